"""Every operation of the HTTP API, on a folder and on a fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from coatcheck import Session, Store
from coatcheck.http.operations import OPERATIONS
from tests.backends import Backend, Clock
from tests.http.servers import Web, part, path_of, running, served

LOG = "".join(
    f"{number} {'ERROR' if number % 1000 == 0 else 'ok'}\n" for number in range(1, 20_001)
)


@pytest.fixture
def opened(lasting: Backend) -> Store:
    return lasting.open()


@pytest.fixture
def web(opened: Store) -> Iterator[Web]:
    with running(opened) as found:
        yield found


@pytest.fixture
def client(web: Web) -> Iterator[httpx2.Client]:
    with web.client() as found:
        yield found


@pytest.fixture
def session(opened: Store) -> Session:
    return opened.session("s")


def answer(found: httpx2.Response, status: int = 200) -> Any:
    assert found.status_code == status, found.text
    assert found.headers["content-type"] == "application/json"
    return found.json()


def put(client: httpx2.Client, data: bytes | str, **options: Any) -> dict[str, Any]:
    found = client.post(path_of("s"), content=data, params=options)
    made: dict[str, Any] = answer(found, 201)
    return made


# Puts


def test_a_put_stores_the_content_with_all_its_options(
    client: httpx2.Client, session: Session
) -> None:
    parent = session.put("parent").pointer
    made = put(client, LOG, name="run/1.log", kind="log", tool="run_tests", summary="a run", call_id="c1", ttl=60,
               media_type="text/x-log", parents=parent)  # fmt: skip
    ref = session.ref("run/1.log")
    assert ref is not None
    assert session.get(ref) == LOG.encode()
    assert (ref.kind, ref.tool, ref.summary, ref.call_id, ref.media_type, ref.parents) == (
        "log", "run_tests", "a run", "c1", "text/x-log", (parent.removeprefix("art:"),),
    )  # fmt: skip
    assert made["artifact_id"] == ref.artifact_id
    assert made["expires_at"] is not None


def test_options_of_a_put_may_be_headers_and_the_query_takes_precedence(
    client: httpx2.Client, session: Session
) -> None:
    headers = {
        "x-coatcheck-name": "caf%C3%A9%2Fmenu",
        "x-coatcheck-tool": "from the header",
        "x-coatcheck-kind": "doc",
    }
    made = answer(
        client.put(path_of("s"), content=b"x", params={"tool": "from the query"}, headers=headers),
        201,
    )
    assert (made["name"], made["tool"], made["kind"]) == ("café/menu", "from the query", "doc")


@pytest.mark.parametrize(
    ("content_type", "media_type"),
    [("text/csv", "text/csv"), ("application/json; charset=utf-8", "application/json; charset=utf-8"),
     ("application/octet-stream", "text/plain"), ("application/x-www-form-urlencoded", "text/plain"),
     ("text/plain;charset=UTF-8", "text/plain"), (None, "text/plain")],
)  # fmt: skip
def test_the_content_type_is_the_media_type_unless_it_is_a_default_of_clients(
    client: httpx2.Client, content_type: str | None, media_type: str
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    made = answer(client.post(path_of("s"), content=b"just a few words", headers=headers), 201)
    assert made["media_type"] == media_type


def test_text_comes_back_as_text_in_python(client: httpx2.Client, session: Session) -> None:
    put(client, "naïve", name="text", codec="text")
    put(client, "naïve" * 500_000, name="long text", codec="text")
    put(client, "naïve", name="bytes")
    assert session.get("text") == "naïve"
    assert session.get("long text") == "naïve" * 500_000
    assert session.get("bytes") == "naïve".encode()
    for body in (b"\xff", b"x" * 2_000_000 + b"\xc3"):
        found = client.post(path_of("s"), content=body, params={"codec": "text"})
        assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_argument")


def test_the_location_of_a_put_returns_its_content(client: httpx2.Client) -> None:
    found = client.post("/api/v1/sessions/a%2F%C3%A9/artifacts", content=b"content")
    assert client.get(found.headers["location"]).content == b"content"
    assert found.headers["etag"] == client.head(found.headers["location"]).headers["etag"]


def test_the_same_content_is_stored_once(client: httpx2.Client, opened: Store) -> None:
    assert put(client, LOG)["artifact_id"] == put(client, LOG, name="again")["artifact_id"]
    assert opened.stats().stored_bytes == len(LOG)


# Reading


def test_a_page_is_the_same_as_from_the_session(client: httpx2.Client, session: Session) -> None:
    session.put(LOG, name="log")
    path = path_of("s", "log", "/read")
    cases: list[dict[str, Any]] = [
        {}, {"lines": "-3:"}, {"chars": "0:20"}, {"grep": "error", "ignore_case": True, "context": 1},
        {"grep": "ERROR", "lines": "1:5000"}, {"grep": "ok", "invert": True}, {"max_chars": 300},
        {"grep": ".", "literal": True}, {"exact": True}, {"grep": "ok|ERROR", "count": True},
        {"grep": "ERROR", "last": True, "max_chars": 300},
    ]  # fmt: skip
    for options in cases:
        page = session.read("log", **options)
        found = answer(client.get(path, params=options))
        assert (found["text"], found["shown"], found["matches"]) == (
            page.text,
            page.shown,
            page.matches,
        )


def test_a_cursor_leads_through_all_pages(client: httpx2.Client, session: Session) -> None:
    session.put(LOG, name="log")
    path, text, cursor = path_of("s", "log", "/read"), "", dict[str, str]()
    while True:
        found = answer(client.get(path, params=cursor))
        text += found["text"]
        if found["cursor"] is None:
            break
        cursor = {"cursor": found["cursor"]}
    assert text == LOG


def test_queries_diffs_and_derived_artifacts_work(client: httpx2.Client, session: Session) -> None:
    session.put({"rows": [{"id": n, "tag": "x" * 20} for n in range(2_000)]}, name="rows")
    session.put("a\nb\n", name="old")
    session.put("a\nc\n", name="new")
    path = path_of("s", "rows", "/read")
    assert answer(client.get(path, params={"query": "$.rows[3].id"}))["text"] == "3"
    assert "+c" in answer(client.get(path_of("s", "new", "/read"), params={"diff": "old"}))["text"]
    whole = answer(client.get(path, params={"query": "$.rows[*]"}))
    assert client.get(path_of("s", whole["derived"])).content.count(b"\n") >= 1_999


def test_a_preview_and_a_record_describe_an_artifact(
    client: httpx2.Client, session: Session
) -> None:
    session.put(LOG, name="log", kind="log")
    preview = session.preview("log", limit=300)
    found = answer(client.get(path_of("s", "log", "/preview"), params={"limit": 300}))
    assert (found["text"], found["shown"]) == (preview.text, preview.shown)
    record = answer(client.get(path_of("s", "log", "/ref")))
    assert (record["name"], record["kind"], record["size_bytes"]) == ("log", "log", len(LOG))


def test_a_record_does_not_show_where_the_store_is(
    client: httpx2.Client, session: Session, opened: Store
) -> None:
    session.put(b"x" * 300_000, name="n")
    found = client.get(path_of("s", "n", "/ref")).text + client.get(path_of("s")).text
    assert "content_uri" not in found
    assert "file:" not in found
    assert "s3:" not in found


def test_a_search_finds_passages(client: httpx2.Client, session: Session) -> None:
    session.put("The pump failed at noon.\nThe turbine overheated later.\n", name="incident")
    (hit,) = answer(client.get("/api/v1/sessions/s/search", params={"q": "turbine overheated"}))[
        "hits"
    ]
    assert hit["artifact"]["name"] == "incident"
    assert "turbine" in hit["passage"]
    assert (hit["first_line"], hit["last_line"]) == (2, 2)


def test_artifacts_are_listed_in_pages_newest_first(
    client: httpx2.Client, session: Session
) -> None:
    names = [session.put(f"content {number}", name=f"n{number}").name for number in range(25)]
    listed: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = answer(client.get(path_of("s"), params={"limit": 10, **after}))
        listed += [one["name"] for one in page["artifacts"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert listed == names[::-1]


def test_versions_of_a_name_and_artifacts_of_a_kind_are_listed(
    client: httpx2.Client, session: Session
) -> None:
    for number in range(3):
        session.put(f"plan {number}", name="plan", kind="plan")
    session.put("other", kind="doc")
    assert len(answer(client.get(path_of("s"), params={"name": "plan"}))["artifacts"]) == 3
    assert [
        one["kind"] for one in answer(client.get(path_of("s"), params={"kind": "doc"}))["artifacts"]
    ] == ["doc"]
    refused = client.get(path_of("s"), params={"kind": "doc", "after": "0" * 64})
    assert answer(refused, 400)["error"]["code"] == "invalid_argument"


# Changing


def test_a_granted_artifact_is_seen_by_the_other_session(
    client: httpx2.Client, session: Session
) -> None:
    ref = session.put("shared")
    granted = answer(client.post(path_of("s", ref.pointer, "/grant"), json={"to": "other/one"}))
    assert (granted["session_id"], granted["granted_by"]) == ("other/one", "s")
    assert client.get(path_of("other/one", ref.pointer)).text == "shared"


def test_a_pinned_artifact_does_not_expire(backend: Backend, clock: Clock) -> None:
    store = backend.open(clock=clock)
    store.session("s", ttl=60).put("kept", name="kept")
    with running(store) as web, web.client() as client:
        assert answer(client.put(path_of("s", "kept", "/pin")))["pinned"]
        clock.advance(1_000)
        assert client.get(path_of("s", "kept")).text == "kept"
        assert not answer(client.delete(path_of("s", "kept", "/pin")))["pinned"]
        clock.advance(1_000)
        assert client.get(path_of("s", "kept")).status_code == 410


def test_a_forgotten_artifact_is_gone(client: httpx2.Client, session: Session) -> None:
    session.put("one", name="one")
    assert client.delete(path_of("s", "one")).status_code == 204
    assert client.delete(path_of("s", "one")).status_code == 404
    assert session.get("one") is None


def test_a_large_result_becomes_a_stub_and_a_small_one_stays(
    client: httpx2.Client, session: Session
) -> None:
    path = "/api/v1/sessions/s/externalize"
    body = {"value": LOG, "tool": "run_tests", "call_id": "c9", "policy": {"max_chars": 1_000}}
    large = answer(client.post(path, json=body))
    assert large["is_stub"]
    assert next(iter(json.loads(large["text"]))) == "stub"
    assert large["artifacts"][0]["pointer"] in large["text"]
    assert (large["artifacts"][0]["tool"], large["artifacts"][0]["call_id"]) == ("run_tests", "c9")
    assert large["tokens_saved"] > 1_000
    assert session.get(large["artifacts"][0]["pointer"]) == LOG
    value = {"rows": [1, 2.5, None, "\ud800", 10**30]}
    small = answer(client.post(path, content=json.dumps({"value": value})))
    assert (small["is_stub"], small["content"], small["artifacts"]) == (False, value, [])


# Sessions and the store


def test_a_session_is_created_with_its_options_and_ended(
    client: httpx2.Client, opened: Store
) -> None:
    options = {"ttl": 90, "parent": "p", "quota_bytes": 1000}
    made = answer(client.put("/api/v1/sessions/child", json=options))
    assert (made["ttl"], made["parent"], made["quota_bytes"]) == (90, "p", 1000)
    opened.session("p").put("of the parent", name="n")
    assert client.get(path_of("child", "n")).text == "of the parent"
    assert client.post(path_of("child"), content=b"x" * 1_001).status_code == 507
    never = answer(
        client.put("/api/v1/sessions/child", json={"ttl": "none", "quota_bytes": "none"})
    )
    assert (never["ttl"], never["quota_bytes"], never["parent"], never["expires_at"]) == (
        None,
        None,
        "p",
        None,
    )
    client.post(path_of("child"), content=b"own")
    assert answer(client.delete("/api/v1/sessions/child")) == {"artifacts": 1}
    assert client.get("/api/v1/sessions/child").status_code == 404


def test_a_session_without_options_is_created_too(client: httpx2.Client) -> None:
    for body in (b"", b"{}"):
        assert answer(client.put("/api/v1/sessions/plain", content=body))["session_id"] == "plain"
    assert answer(client.get("/api/v1/sessions/plain"))["used_bytes"] == 0


def test_sessions_are_listed_in_pages(client: httpx2.Client) -> None:
    names = {f"ci-{number}" for number in range(7)} | {"other"}
    for name in names:
        client.put(f"/api/v1/sessions/{name}")
    listed: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = answer(client.get("/api/v1/sessions", params={"limit": 3, "prefix": "ci-", **after}))
        listed += [one["session_id"] for one in page["sessions"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert sorted(listed) == sorted(names - {"other"})
    assert client.get("/api/v1/sessions", params={"after": "nonsense"}).status_code == 400


def test_statistics_and_collection_work_on_the_store(backend: Backend, clock: Clock) -> None:
    store = backend.open(clock=clock)
    store.session("s", ttl=10).put(b"x" * 1_000)
    with running(store) as web, web.client() as client:
        assert answer(client.get("/api/v1/stats"))["stored_bytes"] == 1_000
        clock.advance(100_000)
        would = answer(client.post("/api/v1/collect", params={"dry_run": True}))
        assert (would["dry_run"], would["artifacts"]) == (True, 1)
        assert answer(client.post("/api/v1/collect"))["bytes"] == 1_000
        assert answer(client.get("/api/v1/stats"))["artifacts"] == 0


def test_healthz_reports_whether_the_store_is_available(
    client: httpx2.Client, web: Web, opened: Store
) -> None:
    with web.client(token=None) as anyone:
        assert answer(anyone.get("/healthz"))["status"] == "ok"
    opened.close()
    with running(opened) as other, other.client(token=None) as anyone:
        found = anyone.get("/healthz")
        assert answer(found, 503)["error"]["code"] == "store_unavailable"
        assert found.headers["retry-after"] == "5"


def test_metrics_count_operations_and_contain_nothing_chosen_by_clients(
    client: httpx2.Client,
) -> None:
    put(client, b"x" * 500, name="a-secret-name")
    client.get(path_of("s", "a-secret-name"))
    client.get("/not/there")
    found = client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    assert 'coatcheck_http_requests_total{operation="put_artifact",status="201"} 1.0' in found.text
    assert 'coatcheck_http_requests_total{operation="get_artifact",status="200"} 1.0' in found.text
    assert 'coatcheck_http_requests_total{operation="none",status="404"} 1.0' in found.text
    assert "coatcheck_http_received_bytes_total 500.0" in found.text
    assert "secret" not in found.text


# Invalid requests


def test_invalid_arguments_are_refused_and_named(client: httpx2.Client, session: Session) -> None:
    session.put(LOG, name="log")
    for path, params, word in (
        (path_of("s", "log", "/read"), {"line": "1"}, "unknown argument 'line'"),
        (path_of("s", "log", "/read"), {"max_chars": "many"}, "max_chars"),
        (path_of("s", "log", "/read"), {"max_chars": "10"}, "max_chars"),
        (path_of("s", "log", "/read"), {"lines": "x"}, "x"),
        (path_of("s", "log", "/read"), {"grep": "("}, "("),
        (path_of("s", "log", "/read"), {"lines": "1", "query": "shape"}, "combined"),
        (path_of("s", "log", "/ref"), {"x": "1"}, "unknown argument"),
        (path_of("s"), {"limit": "0"}, "limit"),
        (path_of("s"), [("limit", "1"), ("limit", "2")], "given twice"),
        ("/api/v1/sessions/s/search", {"q": "  "}, "q"),
        ("/api/v1/sessions/s/search", {}, "q"),
    ):  # fmt: skip
        found = answer(client.get(path, params=params), 400)  # type: ignore[arg-type]
        assert found["error"]["code"] == "invalid_argument"
        assert word in found["error"]["message"], found


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"3", b"nul", b"\xff\xfe", b'{"value": NaN}', b"[" * 100_000,
             b'{"value": 1' + b"0" * 9_999 + b"}",
             b'{"valu": 1}', b'{"value": 1, "tool": 3}', b'{"value": 1, "policy": {"max_chars": "9"}}',
             b'{"value": 1, "policy": {"max_chars": true}}', b'{"value": 1, "policy": {"nonsense": 1}}'],
)  # fmt: skip
def test_an_invalid_body_is_refused(client: httpx2.Client, body: bytes) -> None:
    found = answer(client.post("/api/v1/sessions/s/externalize", content=body), 400)
    assert found["error"]["code"] == "invalid_argument"


def test_http_errors_have_the_same_format(client: httpx2.Client) -> None:
    for method, path, status, code in (
        ("GET", "/", 404, "not_found"), ("GET", "/api/v1/sessions/", 404, "not_found"),
        ("GET", "/api/v1/sessions/s/artifacts/a/b", 404, "not_found"),
        ("PATCH", "/api/v1/sessions/s", 405, "method_not_allowed"), ("POST", "/healthz", 405, "method_not_allowed"),
    ):  # fmt: skip
        found = client.request(method, path)
        assert answer(found, status)["error"]["code"] == code
        if status == 405:
            assert "GET" in found.headers["allow"]
    zipped = client.post(path_of("s"), content=b"x", headers={"content-encoding": "gzip"})
    assert answer(zipped, 415)["error"]["code"] == "unsupported_media_type"
    form = client.post("/api/v1/sessions/s/externalize", data={"value": "1"})
    assert answer(form, 415)["error"]["code"] == "unsupported_media_type"


def test_an_unexpected_error_reveals_no_details(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("the password is hunter2")

    monkeypatch.setattr(opened, "stats", broken)
    with running(opened) as web, web.client() as client:
        found = client.get("/api/v1/stats")
        assert answer(found, 500)["error"]["code"] == "error"
        assert "hunter2" not in found.text
        assert client.get("/healthz").status_code == 200


# Several servers


def test_two_servers_on_one_store_see_each_others_artifacts(lasting: Backend) -> None:
    with (
        served(lasting.url) as one,
        served(lasting.url) as other,
        one.client() as here,
        other.client() as there,
    ):
        made = answer(here.post(path_of("s"), content=LOG.encode(), params={"name": "log"}), 201)
        assert there.get(path_of("s", made["pointer"])).text == LOG
        assert there.delete(path_of("s", "log")).status_code == 204
        assert here.get(path_of("s", "log")).status_code == 404


def test_a_restarted_server_has_everything_and_its_cursors_continue(lasting: Backend) -> None:
    with served(lasting.url) as web, web.client() as client:
        answer(client.post(path_of("s"), content=LOG.encode(), params={"name": "log"}), 201)
        first = answer(client.get(path_of("s", "log", "/read")))
    with served(lasting.url) as web, web.client() as client:
        second = answer(
            client.get(path_of("s", "log", "/read"), params={"cursor": first["cursor"]})
        )
        assert LOG.startswith(first["text"] + second["text"])


def test_every_operation_has_a_route(client: httpx2.Client) -> None:
    """The table matches the routes: no path answers one of its methods with 405."""
    for operation in OPERATIONS:
        path = operation.path.replace("{session_id}", part("s")).replace(
            "{target}", part("art:0123456789ab")
        )
        for method in operation.methods:
            assert client.request(method, path).status_code not in (405, 500)
