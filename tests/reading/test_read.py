"""`session.read` end to end: which part answers, how a large result is stored, and what is recorded
as shown."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session, Store, toolkit
from coatcheck.errors import (
    AmbiguousPointer,
    CoatcheckError,
    Expired,
    InvalidArgument,
    InvalidPointer,
    NotFound,
)
from coatcheck.reading import Page
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Staged
from coatcheck.storage.disk import Disk
from coatcheck.storage.folder import open_folder_store
from coatcheck.storage.frames import FRAME
from coatcheck.storage.passages import Passages
from tests.backends import Backend, Clock, Fleet

LOG = "".join(f"2026-01-01 12:00:{i % 60:02} INFO request {i} served\n" for i in range(12_031))
PDFS = Path(__file__).parent / "pdfs"
ROWS = [{"id": i, "price": i / 2, "name": f"item {i}"} for i in range(500)]


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def pages(session: Session, target: str, **request: str | int) -> Iterator[Page]:
    page = session.read(target, **request)  # type: ignore[arg-type]
    yield page
    while page.cursor is not None:
        page = session.read(
            target, cursor=page.cursor, max_chars=int(request.get("max_chars", 8_000))
        )
        yield page


def test_a_read_returns_a_bounded_page_and_says_what_part_it_is(session: Session) -> None:
    ref = session.put(LOG)
    page = session.read(ref, lines="4100:4160")
    assert page.text == "".join(LOG.splitlines(keepends=True)[4099:4160])
    assert page.shown == "lines 4100-4160 of 12,031"
    assert page.pointer == ref.pointer
    assert page.cursor is None


def test_all_pages_together_are_the_artifact(session: Session) -> None:
    ref = session.put(LOG)
    found = list(pages(session, ref.pointer))
    assert "".join(page.text for page in found) == LOG
    assert all(len(page.text) <= 8_000 for page in found)


def test_a_cursor_works_in_another_process_and_after_a_restart(lasting: Backend) -> None:
    with lasting.open() as store:
        ref = store.session("s").put(LOG)
        first = store.session("s").read(ref)
    with lasting.open() as store:
        second = store.session("s").read(ref.pointer, cursor=first.cursor)
    assert LOG.startswith(first.text + second.text)


def test_a_cursor_of_another_artifact_or_store_is_a_clear_error(
    session: Session, backend: Backend
) -> None:
    one, other = session.put(LOG), session.put(LOG + "more")
    cursor = session.read(one).cursor
    with pytest.raises(InvalidArgument, match="cursor"):
        session.read(other, cursor=cursor)
    elsewhere = backend.open_new().session("s")
    with pytest.raises(InvalidArgument, match="cursor"):
        elsewhere.read(elsewhere.put(LOG), cursor=cursor)


def test_grep_finds_with_line_numbers_and_counts_all(session: Session) -> None:
    page = session.read(session.put(LOG), grep=r"request 77\b", context=1)
    assert page.text.splitlines()[1].startswith("78:")
    assert page.matches == 1
    assert page.matches_exact


def test_a_path_a_shape_and_sql_are_distinguished(session: Session) -> None:
    ref = session.put(ROWS)
    assert session.read(ref, query="$[1].name").text == '"item 1"'
    assert "price" in session.read(ref, query="shape").text
    assert session.read(ref, query="SELECT count(*) AS n FROM artifact").text.split() == [
        "n",
        "500",
    ]
    with pytest.raises(InvalidArgument, match="JSONPath"):
        session.read(ref, query="cheapest item")


def test_sql_joins_other_artifacts_of_the_session_and_no_others(
    store: Store, session: Session
) -> None:
    items, names = session.put(ROWS), session.put("id,owner\n3,ann\n4,bob\n", name="owners.csv")
    page = session.read(
        items,
        query=f'SELECT owner, price FROM artifact JOIN "{names.pointer}" USING (id) ORDER BY id',
    )
    assert page.text.split() == ["owner,price", "ann,1.5", "bob,2.0"]
    secret = store.session("other").put("id,secret\n1,x\n", name="secret.csv")
    with pytest.raises(NotFound):
        session.read(items, query=f'SELECT * FROM "{secret.pointer}"')


def test_a_fragment_is_read_like_an_artifact(session: Session) -> None:
    ref = session.put({"log": LOG, "rows": ROWS})
    assert json.loads(session.read(ref.pointer + "#/rows/3").text) == ROWS[3]
    assert session.read(ref.pointer + "#/rows", query="$[2].id").text == "2"
    found = list(pages(session, ref.pointer + "#/log"))
    assert "".join(page.text for page in found) == LOG
    assert found[0].pointer == ref.pointer + "#/log"
    with pytest.raises(InvalidPointer):
        session.read(ref.pointer + "#/nothing")


def test_a_diff_shows_what_changed_since_another_artifact(session: Session) -> None:
    old, new = session.put(LOG), session.put(LOG.replace("request 500 ", "REQUEST 500 "))
    changed = [
        line for line in session.read(new, diff=old.pointer).text.splitlines() if line[:1] in "+-"
    ][2:]
    assert [line[:1] for line in changed] == ["-", "+"]
    assert "REQUEST 500" in changed[1]


def test_a_diff_of_documents_compares_their_texts(session: Session) -> None:
    old, new = (session.put((PDFS / name).read_bytes()) for name in ("columns.pdf", "groff.pdf"))
    page = session.read(new, diff=old.pointer)
    assert "-An efficient office offers" in page.text.splitlines()
    assert f"{old.pointer}: the text of pages 1-2 of 2" in page.shown
    page = session.read(
        session.put("--- page 1 ---\nAn efficient office offers\n"), diff=old.pointer
    )
    assert " An efficient office offers" in page.text.splitlines()


def test_a_diff_of_a_document_that_cannot_be_read_says_where_the_bytes_differ(
    session: Session,
) -> None:
    page = session.read(
        session.put(b"%PDF-1.4 " + bytes(500)), diff=session.put(b"%PDF-1.4 no").pointer
    )
    assert "equal up to byte 9" in page.text


def test_a_result_over_the_cap_becomes_an_artifact_with_its_parent_and_request_on_record(
    session: Session,
) -> None:
    ref = session.put(ROWS)
    page = session.read(ref, query="$[*].name", max_chars=1_000)
    assert len(page.text) <= 1_000
    assert page.derived is not None
    assert page.derived in page.shown
    derived = session.ref(page.derived)
    assert derived is not None
    assert derived.parents == (ref.artifact_id,)
    assert json.loads(derived.request or "") == {"query": "$[*].name", "max_chars": 1_000}
    assert session.get(page.derived) == "\n".join(json.dumps(row["name"]) for row in ROWS)
    assert session.read(ref, query="$[*].name", max_chars=1_000) == page
    assert len(session.list()) == 2


def test_binary_content_is_described_and_never_dumped(session: Session) -> None:
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x01\x00\x00\x00\x00\x80" + bytes(50)
    page = session.read(session.put(png))
    assert "256 x 128" in page.text
    assert "PNG\r" not in page.text


def test_coverage_is_the_union_of_the_slices_shown(store: Store, session: Session) -> None:
    ref = session.put(LOG)
    assert session.coverage(ref).share == 0.0
    session.read(ref, lines="1:10")
    session.read(ref, lines="5:20")
    shown = len("".join(LOG.splitlines(keepends=True)[:20]))
    assert session.coverage(ref).ranges == ((0, shown),)
    assert store.session("other", parent="s").coverage(ref).share == 0.0
    for _ in pages(session, ref.pointer):
        pass
    assert session.coverage(ref).share == 1.0


def test_coverage_survives_a_restart(lasting: Backend) -> None:
    with lasting.open() as store:
        ref = store.session("s").put(LOG)
        store.session("s").read(ref, lines="1:10")
    with lasting.open() as store:
        assert store.session("s").coverage(ref).shown == len(
            "".join(LOG.splitlines(keepends=True)[:10])
        )


def test_a_read_keeps_the_session_alive(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put(LOG)
    for _ in range(3):
        clock.advance(90)
        session.read(ref, lines="1")
    clock.advance(101)
    with pytest.raises(Expired):
        session.read(ref)


def test_a_missing_artifact_is_reported(session: Session) -> None:
    with pytest.raises(NotFound):
        session.read("art:000000000000")
    with pytest.raises(NotFound):
        session.read("no such name")


def test_a_preview_is_the_same_for_the_same_content_wherever_it_is_stored(
    fleet: Fleet, tmp_path: Path
) -> None:
    found = []
    for url in ("memory:", tmp_path / "store", fleet.new_url()):
        with coatcheck.open(url) as store:
            session = store.session("s")
            found.append(
                [
                    session.preview(session.put(value))
                    for value in (LOG, LOG[:500], ROWS, "", b"\x00\x01")
                ]
            )
    assert found[0] == found[1] == found[2]
    assert "empty" in found[0][3].text
    assert all(len(preview.text) <= 200 for preview in found[0])


@pytest.mark.parametrize(
    "request_",
    [
        {"grep": "(" * 5_000}, {"grep": "(?=" + "x" * 9_000}, {"query": "$" + "[" * 100_000}, {"query": "x" * 100_000},
        {"query": "SELECT " + "(" * 40_000}, {"query": "SELECT * FROM " + "y" * 40_000}, {"lines": "9" * 50_000},
        {"chars": "z" * 50_000}, {"cursor": "c" * 50_000}, {"diff": "art:" + "0" * 50_000}, {"diff": "d" * 50_000},
        {"max_chars": -1}, {"max_chars": 10**30}, {"context": -5}, {"lines": "1:5", "query": "$"},
    ],
)  # fmt: skip
def test_every_error_is_ours_and_no_longer_than_a_page(session: Session, request_: dict) -> None:
    ref = session.put(ROWS)
    try:
        answer = session.read(ref, **request_).text
    except CoatcheckError as error:
        answer = str(error)
    assert len(answer) <= max(8_000, request_.get("max_chars", 0))


def test_an_ambiguous_pointer_in_a_diff_is_an_error_too(session: Session) -> None:
    with pytest.raises((NotFound, AmbiguousPointer)):
        session.read(session.put(LOG), diff="art:ffffffffffff")


class CountingBlobs(BlobStore):
    """A blob store around another one that counts how often a copy is opened, and how often each of
    its frames is read."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.opens = 0
        self.frames: Counter[int] = Counter()

    def stage(
        self, chunks: Iterable[bytes], digest: str | None = None
    ) -> AbstractContextManager[Staged]:
        return self.inner.stage(chunks, digest)

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        self.opens += 1
        return self.inner.read(blob, offset, length)

    @contextmanager
    def opened(self, blob: Blob) -> Iterator[Callable[[int, int], bytes]]:
        self.opens += 1
        with self.inner.opened(blob) as read:

            def counted(offset: int, length: int) -> bytes:
                data = read(offset, length)
                self.frames.update(range(offset // FRAME, -(-(offset + len(data)) // FRAME)))
                return data

            yield counted

    def remove(self, blob: Blob) -> None:
        self.inner.remove(blob)

    def places(self) -> Iterator[Blob]:
        return self.inner.places()

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        return self.inner.sweep(blob, remove=remove)

    def uri(self, blob: Blob) -> str:
        return self.inner.uri(blob)

    def close(self) -> None:
        self.inner.close()


DOCUMENT = {"rows": [{"id": i, "name": f"item {i}"} for i in range(40_000)]}


@pytest.mark.parametrize(
    ("value", "request_of"),
    [
        (LOG * 4, {"grep": "request 11.*served", "context": 2}),
        (LOG * 4, {"lines": "-20:"}),
        (LOG * 4, {"chars": "1000000:1002000"}),
        (LOG * 4, {}),
        (LOG[:200_000], {"grep": "request 7"}),
        (LOG * 4, {"grep": "INFO", "context": "auto"}),
        (LOG * 4, {"grep": "request 500 |request 12000", "context": "auto"}),
        (DOCUMENT, {"grep": "item 39.77", "context": "auto"}),
        (DOCUMENT, {"query": "SELECT count(*) FROM artifact"}),
        (repr(DOCUMENT["rows"]), {"grep": "item 1"}),
        (DOCUMENT, {"query": "$.rows[39999]"}),
        ({"rows": DOCUMENT["rows"][:6_000]}, {"query": "$.rows[7]"}),
        (DOCUMENT, {"query": "shape"}),
        (bytes(600_000), {}),
    ],
    ids=[
        "grep", "lines", "chars", "start", "grep in one frame", "brief grep", "grep with context and alternatives",
        "grep in JSON", "SQL", "grep in a long line", "path in a child", "path", "shape", "binary",
    ],
)  # fmt: skip
def test_a_page_opens_its_blob_once(
    tmp_path: Path, value: object, request_of: dict[str, str | int]
) -> None:
    inner, catalog = open_folder_store(tmp_path / "store", Disk())
    blobs = CountingBlobs(inner)
    with Store(blobs, catalog, Passages(None), url="counting", session_type=Session) as store:
        session = store.session("s")
        ref = session.put(value)
        blobs.opens = 0
        assert session.read(ref, **request_of).text  # type: ignore[arg-type]
        assert blobs.opens == 1
        assert blobs.frames[0] == 1
        assert (
            "grep" not in request_of or max(blobs.frames.values()) <= 2
        )  # twice if a line spans two pieces
        session.read(
            f"{ref.pointer}#/rows/3"
        ) if ref.media_type == "application/json" else session.preview(ref)
        assert blobs.opens == 2
        assert session.externalize(ref).is_stub
        assert blobs.opens == 3


@pytest.mark.parametrize(
    "request_of", [{"grep": "efficient|flat"}, {"lines": "1:3"}, {"query": "text"}]
)
def test_a_page_of_a_document_opens_its_blob_once(
    tmp_path: Path, request_of: dict[str, str]
) -> None:
    data = (PDFS / "columns.pdf").read_bytes() + b"%" * 300_000
    inner, catalog = open_folder_store(tmp_path / "store", Disk())
    blobs = CountingBlobs(inner)
    with Store(blobs, catalog, Passages(None), url="counting", session_type=Session) as store:
        session = store.session("s")
        ref = session.put(data, media_type="application/pdf")
        blobs.opens = 0
        assert "efficient" in session.read(ref, **request_of).text  # type: ignore[arg-type]
        assert blobs.opens == 1


def test_a_tool_that_tries_other_ways_to_search_opens_its_blob_once(tmp_path: Path) -> None:
    inner, catalog = open_folder_store(tmp_path / "store", Disk())
    blobs = CountingBlobs(inner)
    with Store(blobs, catalog, Passages(None), url="counting", session_type=Session) as store:
        session = store.session("s")
        ref = session.put(LOG)
        blobs.opens = 0
        assert "no match in" in toolkit(session)[0].run(
            pointer=ref.pointer, grep="nothing (like) that"
        )
        assert blobs.opens == 1
        answer = toolkit(session)[0].run(pointer=ref.pointer, grep="12:00:07 info")
        assert "no match as written, ignoring case" in answer
        assert blobs.opens == 2


def test_a_page_follows_a_blob_that_was_compressed_meanwhile(tmp_path: Path) -> None:
    inner, catalog = open_folder_store(tmp_path / "store", Disk())
    with Store(
        CountingBlobs(inner), catalog, Passages(None), url="moving", session_type=Session
    ) as store:
        session = store.session("s")
        ref = session.put(LOG)
        content = session.content(ref)
        with coatcheck.open(tmp_path / "store") as other:
            other.collect(cold_after=-1)
        with content:
            assert content.read(0, 100) == LOG[:100].encode()


def test_a_part_that_is_a_string_is_read_as_text(session: Session) -> None:
    ref = session.put({"log": "first\nsecond é\nthird", "json": json.dumps({"a": [1, 2]})})
    assert session.read(f"{ref.pointer}#/log").text == "first\nsecond é\nthird"
    assert session.read(f"{ref.pointer}#/log", lines="2").text == "second é\n"
    assert session.read(f"{ref.pointer}#/log", grep="second").text == "2:second é"
    assert session.read(f"{ref.pointer}#/json", query="$.a[1]").text == "2"


def test_paths_in_a_part_begin_at_the_artifact(session: Session) -> None:
    items = [{"id": n, "name": f"item {n}", "tags": ["new", f"tag-{n}"]} for n in range(40)]
    ref = session.put({"data": {"items": items}})
    text = session.read(f"{ref.pointer}#/data", grep="tag-5\\b").text
    assert text.startswith("1:#/data/items/5 {")
    path = text.split(" ")[0].removeprefix("1:")
    assert json.loads(session.read(ref.pointer + path).text) == items[5]
