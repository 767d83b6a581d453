"""Content over HTTP: exact bytes, ranges, entity tags and digests, and headers that keep browsers
from running it."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Iterator

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Session
from coatcheck.errors import InvalidArgument
from coatcheck.http.streams import NotSatisfiable, Span, has_tag, requested_range
from tests.backends import Backend
from tests.http.servers import Web, path_of, running

SMALL = b"one\ntwo\nthree\n"
LARGE = random.Random(1).randbytes(
    3_000_001
)  # several frames, and more than one piece of an answer


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def data(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.param
    return found


@pytest.fixture
def path(session: Session, data: bytes) -> str:
    return path_of(session.session_id, session.put(data).pointer)


def digest_header(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def test_content_comes_back_exactly_with_its_digest(
    client: httpx2.Client, path: str, data: bytes
) -> None:
    found = client.get(path)
    assert found.status_code == 200
    assert found.content == data
    assert found.headers["content-length"] == str(len(data))
    assert found.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
    assert found.headers["content-digest"] == found.headers["repr-digest"] == digest_header(data)


def test_no_browser_runs_content(client: httpx2.Client, session: Session) -> None:
    ref = session.put("<script>alert(1)</script>", media_type="text/html", name="page.html")
    for query, kind in (
        ("", "application/octet-stream"),
        ("?text=true", "text/plain; charset=utf-8"),
    ):
        found = client.get(path_of(session.session_id, ref.pointer) + query)
        assert found.headers["content-type"] == kind
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert found.headers["content-disposition"].startswith("attachment")
        assert found.headers["cache-control"] == "private, no-cache"


def test_head_has_the_headers_of_get_and_no_content(client: httpx2.Client, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert head.status_code == 200
    assert head.content == b""
    without = {"date"}
    assert {k: v for k, v in head.headers.items() if k not in without} == {
        k: v for k, v in got.headers.items() if k not in without
    }


@pytest.mark.parametrize(
    ("range_header", "start", "end"),
    [("bytes=0-0", 0, 1), ("bytes=2-5", 2, 6), ("bytes=5-", 5, None), ("bytes=-4", -4, None),
     ("bytes = 1-2", 1, 3), ("BYTES=1-2", 1, 3), ("bytes=0-99999999999", 0, None), ("bytes=-99999999999", 0, None),
     ("bytes=262140-262150", 262140, 262151), ("bytes=1048570-2100000", 1048570, 2100001)],
)  # fmt: skip
def test_a_range_returns_that_part_of_the_content(
    client: httpx2.Client, session: Session, range_header: str, start: int, end: int | None
) -> None:
    found = client.get(
        path_of(session.session_id, session.put(LARGE).pointer), headers={"range": range_header}
    )
    wanted = LARGE[start:end]
    first = start if start >= 0 else len(LARGE) + start
    assert found.status_code == 206
    assert found.content == wanted
    assert found.headers["content-range"] == f"bytes {first}-{first + len(wanted) - 1}/{len(LARGE)}"
    assert found.headers["repr-digest"] == digest_header(LARGE)
    assert "content-digest" not in found.headers  # it would be the digest of the part


@given(st.integers(0, 60), st.integers(0, 80), st.integers(0, 80))
def test_every_range_is_a_slice(size: int, first: int, last: int) -> None:
    content = bytes(range(size))
    for header, wanted in (
        (f"bytes={first}-{last}", content[first : last + 1]),
        (f"bytes={first}-", content[first:]),
        (f"bytes=-{last}", content[-last:] if last else b""),
    ):
        try:
            span = requested_range(header, size)
        except NotSatisfiable:
            assert not wanted
        except InvalidArgument:
            assert last < first
        else:
            assert span is not None
            assert content[span.start : span.end] == wanted != b""


@pytest.mark.parametrize(
    "range_header",
    ["bytes=", "bytes=a-b", "bytes=5-2", "bytes=--1", "bytes=1-2,x", "bytes=1", "bytes=-"],
)
def test_a_malformed_range_is_refused(client: httpx2.Client, path: str, range_header: str) -> None:
    found = client.get(path, headers={"range": range_header})
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "invalid_argument"


@pytest.mark.parametrize("range_header", ["items=0-1", "bytes=0-1,4-5", "nonsense"])
def test_another_range_unit_or_several_ranges_return_the_whole_content(
    client: httpx2.Client, path: str, data: bytes, range_header: str
) -> None:
    found = client.get(path, headers={"range": range_header})
    assert (found.status_code, found.content) == (200, data)


@pytest.mark.parametrize(
    "range_header", ["bytes={}-", "bytes={}-{}", "bytes=-0", "bytes=9999999999-"]
)
def test_a_range_past_the_end_cannot_be_satisfied(
    client: httpx2.Client, path: str, data: bytes, range_header: str
) -> None:
    found = client.get(path, headers={"range": range_header.format(len(data), len(data) + 1)})
    assert found.status_code == 416
    assert found.headers["content-range"] == f"bytes */{len(data)}"
    assert found.json()["error"]["code"] == "range_not_satisfiable"


def test_an_empty_artifact_has_no_ranges(client: httpx2.Client, session: Session) -> None:
    path = path_of(session.session_id, session.put(b"").pointer)
    assert (client.get(path).status_code, client.get(path).content) == (200, b"")
    assert client.get(path, headers={"range": "bytes=0-"}).status_code == 416


def test_content_that_a_client_already_has_is_not_sent_again(
    client: httpx2.Client, path: str
) -> None:
    etag = client.head(path).headers["etag"]
    for tag in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        for method in ("GET", "HEAD"):
            found = client.request(method, path, headers={"if-none-match": tag})
            assert (found.status_code, found.content) == (304, b"")
            assert found.headers["etag"] == etag
    for tag in ('"other"', etag.strip('"'), ""):
        assert client.get(path, headers={"if-none-match": tag}).status_code == 200


def test_if_range_returns_a_part_only_of_the_same_content(
    client: httpx2.Client, path: str, data: bytes
) -> None:
    etag = client.head(path).headers["etag"]
    same = client.get(path, headers={"range": "bytes=1-3", "if-range": etag})
    assert (same.status_code, same.content) == (206, data[1:4])
    for tag in ('"other"', f"W/{etag}", "Tue, 17 Nov 2026 10:00:00 GMT"):
        other = client.get(path, headers={"range": "bytes=1-3", "if-range": tag})
        assert (other.status_code, other.content) == (200, data)


def test_if_match_with_another_tag_fails(client: httpx2.Client, path: str) -> None:
    etag = client.head(path).headers["etag"]
    assert client.get(path, headers={"if-match": etag}).status_code == 200
    assert client.get(path, headers={"if-match": "*"}).status_code == 200
    for tag in ('"other"', f"W/{etag}"):
        found = client.get(path, headers={"if-match": tag})
        assert found.status_code == 412
        assert found.json()["error"]["code"] == "precondition_failed"


@given(
    st.lists(
        st.text(st.characters(codec="latin-1", exclude_characters='"'), max_size=5), max_size=4
    )
)
def test_a_list_of_tags_has_exactly_its_tags(tags: list[str]) -> None:
    header = ", ".join(f'"{tag}"' for tag in tags)
    for tag in (*tags, "x"):
        assert has_tag(header, f'"{tag}"') == (tag in tags)


def test_a_name_returns_the_newest_content_even_with_the_tag_of_an_older_one(
    client: httpx2.Client, session: Session
) -> None:
    session.put("first", name="report")
    path = path_of(session.session_id, "report")
    etag = client.head(path).headers["etag"]
    session.put("second", name="report")
    assert client.get(path, headers={"if-none-match": etag}).text == "second"


def test_a_part_of_a_json_artifact_has_its_own_tag_and_ranges(
    client: httpx2.Client, session: Session
) -> None:
    ref = session.put({"rows": [{"id": 1}, {"id": 2}]})
    found = client.get(path_of(session.session_id, ref.pointer + "#/rows/1"))
    assert found.json() == {"id": 2}
    assert found.headers["etag"] == f'"{hashlib.sha256(found.content).hexdigest()}"'
    part = client.get(
        path_of(session.session_id, ref.pointer + "#/rows/1"), headers={"range": "bytes=0-0"}
    )
    assert (part.status_code, part.content) == (206, b"{")
    missing = client.get(path_of(session.session_id, ref.pointer + "#/none"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (400, "invalid_pointer")


def receive(client: httpx2.Client, path: str, received: bytearray) -> None:
    with client.stream("GET", path) as answer:
        for piece in answer.iter_bytes():
            received += piece


@pytest.fixture
def damaged(lasting: Backend) -> Iterator[tuple[Web, str, bytes]]:
    """A server for a store in which the last byte of an artifact was changed."""
    data = random.Random(2).randbytes(3_000_000)
    store = lasting.open()
    ref = store.session("s").put(data)
    lasting.damage(ref, lambda stored: stored[:-1] + bytes([stored[-1] ^ 1]))
    with running(store) as web:
        yield web, path_of("s", ref.pointer), data


def test_damage_gives_an_error_or_a_broken_answer_and_never_wrong_bytes(
    damaged: tuple[Web, str, bytes],
) -> None:
    web, path, data = damaged
    with web.client() as client:
        refused = client.get(path, headers={"range": "bytes=-10"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "damaged")
        assert client.get(path, headers={"range": "bytes=0-99"}).content == data[:100]
        received = bytearray()
        with pytest.raises(httpx2.RemoteProtocolError):
            receive(client, path, received)
        assert data.startswith(received)
        assert len(received) < len(data)


def test_a_range_never_begins_at_its_end() -> None:
    assert requested_range("bytes=0-0", 1) == Span(0, 1)
    with pytest.raises(NotSatisfiable):
        requested_range("bytes=0-", 0)


def test_a_missing_artifact_has_the_status_of_its_error(
    client: httpx2.Client, session: Session
) -> None:
    session.put("coat 5287776")
    session.put("coat 23863487")  # the ids of both begin with 96dbffe64f9f
    session.put("brief", name="brief", ttl=0)
    for target, status, code in (
        ("none", 404, "not_found"), ("art:0123456789ab", 404, "not_found"), ("art:xyz", 400, "invalid_pointer"),
        ("art:96dbffe64f9f", 409, "ambiguous_pointer"), ("brief", 410, "expired"),
    ):  # fmt: skip
        for more in ("", "/ref", "/read", "/preview"):
            found = client.get(path_of(session.session_id, target, more))
            assert (found.status_code, found.json()["error"]["code"]) == (status, code), (
                target,
                more,
            )
            assert set(found.json()["error"]) == {"code", "message", "hint"}
        assert client.head(path_of(session.session_id, target)).status_code == status


def test_an_artifact_of_another_session_looks_like_a_missing_one(
    client: httpx2.Client, session: Session
) -> None:
    ref = session.put("secret of another session")
    answers = [
        client.get(path_of("somebody else", f"art:{digest}"))
        for digest in (ref.artifact_id, "0" * 64)
    ]
    texts = [found.text.replace(ref.artifact_id, "ID").replace("0" * 64, "ID") for found in answers]
    assert answers[0].status_code == answers[1].status_code == 404
    assert texts[0] == texts[1]
