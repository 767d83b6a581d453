"""The server for a store, with the official client: on stdio and over HTTP, in old and new protocol
versions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import re
import resource
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.transport_security import TransportSecuritySettings

import coatcheck
from coatcheck.http.serving import Probation
from coatcheck.mcp import resources, server
from coatcheck.mcp.server import Sessions, UnfinishedHandshakes, make_server
from tests import warm
from tests.backends import Fleet
from tests.mcp.speaking import ODD, Speaker, environment, gone, proxy, stub_in, text_of

pytestmark = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
SESSION = "shown"
LOG = "".join(f"line {number}\n" for number in range(5_000))
BINARY = bytes(range(256)) * 400
Open = Callable[..., contextlib.AbstractAsyncContextManager[Client]]


def serve(*options: str, is_warm: bool = True) -> list[str]:
    """The command for a server. Its process id is that of the server only if it is not warm."""
    words = ["coatcheck", "mcp", *options]
    return warm.command(*words) if is_warm else [sys.executable, "-m", *words]


class Web:
    """A server over HTTP: its printed URL and token."""

    def __init__(self, url: str, token: str, pid: int) -> None:
        self.url = url
        self.token = token
        self.pid = pid


def filled(place: Path | str) -> None:
    """Put a log, a binary and many small artifacts into a session."""
    with coatcheck.open(place) as store:
        session = store.session(SESSION, ttl=None)
        for number in range(60):
            session.put(f"small {number}", name=f"note {number}")
        session.put(BINARY, name="binary", media_type="application/octet-stream")
        session.put(LOG, name="a log")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "store"
    filled(folder)
    return folder


@contextlib.contextmanager
def served(
    place: Path | str,
    *options: str,
    is_warm: bool = True,
    printed: list[str] | None = None,
    **env: str,
) -> Iterator[Web]:
    """Start a server. At its end, `printed` gets the lines that it has written to stderr."""
    command = serve("--http", "--port", "0", *options, is_warm=is_warm)
    process = subprocess.Popen(
        command, env=environment(place, **env), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        token = env.get("COATCHECK_MCP_TOKEN") or process.stderr.readline().split()[-1]
        yield Web(first.split()[-1], token, process.pid)
        if printed is not None:
            process.terminate()
            printed += [first, *process.stderr]
    finally:
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="module")
def web(place: Path) -> Iterator[Web]:
    with served(place, "--session", SESSION) as found:
        yield found


@pytest.fixture(scope="module")
def fleet_web(fleet: Fleet) -> Iterator[Web]:
    url = fleet.new_url()
    filled(url)
    with served(url, "--session", SESSION) as found:
        yield found


@contextlib.contextmanager
def silence() -> Iterator[Any]:
    """A sink for stderr."""
    with open(os.devnull, "w") as quiet:
        yield quiet


@pytest.fixture(params=["stdio legacy", "stdio auto", "http legacy", "http auto", "fleet auto"])
def opened(request: pytest.FixtureRequest, place: Path) -> Open:
    """Each way to connect: transports, protocol versions, and the store of a fleet."""
    transport, mode = request.param.split()

    @contextlib.asynccontextmanager
    async def connect(**options: Any) -> AsyncIterator[Client]:
        async with contextlib.AsyncExitStack() as stack:
            if transport != "stdio":
                found: Web = request.getfixturevalue("web" if transport == "http" else "fleet_web")
                headers = {"authorization": f"Bearer {found.token}"}
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
                wire: Any = streamable_http_client(found.url, http_client=http)
            else:
                quiet = stack.enter_context(silence())
                command = serve("--session", SESSION)
                wire = stdio_client(
                    StdioServerParameters(
                        command=command[0], args=command[1:], env=environment(place)
                    ),
                    errlog=quiet,
                )
            yield await stack.enter_async_context(Client(wire, mode=mode, **options))

    return connect


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_the_tools_are_those_of_the_toolkit_with_annotations(opened: Open) -> None:
    async def look() -> list[types.Tool]:
        async with opened() as client:
            return (await client.list_tools()).tools

    get, listing, store = run(look())
    with coatcheck.open("memory:") as memory:
        ours = [tool.as_mcp() for tool in coatcheck.toolkit(memory.session("any"))]
    assert [tool.input_schema for tool in (get, listing, store)] == [
        tool["inputSchema"] for tool in ours
    ]
    assert [tool.annotations.read_only_hint for tool in (get, listing, store)] == [
        True,
        True,
        False,
    ]
    assert all(tool.annotations.idempotent_hint for tool in (get, listing, store))
    assert store.output_schema is not None


def test_a_server_can_offer_only_the_reading_tool(tmp_path: Path) -> None:
    async def look() -> list[str]:
        command = serve("--only", "get")
        with silence() as quiet:
            wire = StdioServerParameters(
                command=command[0], args=command[1:], env=environment(tmp_path)
            )
            async with Client(stdio_client(wire, errlog=quiet)) as client:
                return [tool.name for tool in (await client.list_tools()).tools]

    assert run(look()) == ["get_artifact"]


def test_storing_returns_a_pointer_a_link_and_structured_content(opened: Open) -> None:
    async def store() -> tuple[
        types.CallToolResult, types.ReadResourceResult, types.CallToolResult
    ]:
        async with opened() as client:
            await client.list_tools()
            stored = await client.call_tool(
                "store_artifact", {"name": "kept", "value": "some words"}
            )
            link = stored.content[1]
            assert isinstance(link, types.ResourceLink)
            got = await client.call_tool(
                "get_artifact", {"pointer": stored.structured_content["pointer"]}
            )
            return stored, await client.read_resource(link.uri), got

    stored, read, got = run(store())
    assert stored.structured_content["size_bytes"] == len("some words")
    assert read.contents[0].text == "some words"
    assert got.content[0].text.endswith("\nsome words")


def test_invalid_calls_are_tool_errors_and_unknown_tools_are_protocol_errors(opened: Open) -> None:
    async def call() -> tuple[types.CallToolResult, int]:
        async with opened() as client:
            wrong = await client.call_tool("get_artifact", {"pointer": "art:000000000000"})
            with pytest.raises(MCPError) as caught:
                await client.call_tool("nothing", {})
            return wrong, caught.value.code

    wrong, code = run(call())
    assert wrong.is_error
    assert code == -32602


def test_each_resource_is_listed_once_across_all_pages(opened: Open) -> None:
    async def look() -> list[list[str]]:
        async with opened() as client:
            pages, cursor = [], None
            while True:
                page = await client.list_resources(cursor=cursor)
                pages.append([one.uri for one in page.resources])
                cursor = page.next_cursor
                if cursor is None:
                    return pages

    pages = run(look())
    assert len(pages) > 1
    assert len(pages[0]) == server.PAGE
    uris = [uri for page in pages for uri in page]
    assert len(uris) == len(set(uris)) >= 62


def test_a_text_is_read_completely_in_pieces(opened: Open) -> None:
    async def read() -> str:
        async with opened() as client:
            whole, uri = "", "art://name/a%20log"
            while True:
                contents: list[Any] = list((await client.read_resource(uri)).contents)
                assert len(contents[0].text) <= resources.PART_CHARS
                whole += contents[0].text
                if len(contents) == 1:
                    return str(whole)
                uri = contents[1].meta["coatcheck/next"]
                assert uri in contents[1].text

    assert run(read()) == LOG


def test_bytes_are_read_completely_in_pieces(opened: Open) -> None:
    async def read() -> bytes:
        async with opened() as client:
            whole, uri = b"", "art://name/binary"
            while True:
                contents: list[Any] = list((await client.read_resource(uri)).contents)
                whole += base64.b64decode(contents[0].blob)
                if len(contents) == 1:
                    return whole
                uri = contents[1].meta["coatcheck/next"]

    assert run(read()) == BINARY


@pytest.mark.parametrize(
    "uri",
    [
        "art://000000000000",
        "art://name/no%20such%20name",
        "art://xyz",
        "art://name/",
        "file:///etc/passwd",
        "art://name/art:000000000000",
        "art://000000000000?shell=1",
        "art://000000000000?offset=-1",
        "art://000000000000#/a",
        "art://../../etc",
        "art://name/a%20log?lines=nonsense",
    ],
)
def test_an_unknown_or_invalid_uri_is_an_error(place: Path, uri: str) -> None:
    with coatcheck.open(place) as store, pytest.raises(coatcheck.CoatcheckError):
        server.read(store.session(SESSION), types.ReadResourceRequestParams(uri=uri))


def test_pointers_and_names_are_completed(opened: Open) -> None:
    async def complete() -> tuple[list[str], list[str]]:
        async with opened() as client:
            by_id, by_name = (
                one.uri_template
                for one in (await client.list_resource_templates()).resource_templates
            )
            listed = (await client.list_resources()).resources[0].uri.removeprefix("art://")
            ids = await client.complete(
                types.ResourceTemplateReference(uri=by_id),
                {"name": "id", "value": f"art:{listed[:4]}"},
            )
            names = await client.complete(
                types.ResourceTemplateReference(uri=by_name), {"name": "name", "value": "NOTE 1"}
            )
            assert listed in ids.completion.values
            return ids.completion.values, names.completion.values

    ids, names = run(complete())
    assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in ids)
    assert {"note 1", "note 10", "note 19"} <= set(names)


def test_a_session_sees_only_its_own_artifacts(place: Path) -> None:
    async def look() -> tuple[int, bool]:
        command = serve("--session", "another")
        with silence() as quiet:
            parameters = StdioServerParameters(
                command=command[0], args=command[1:], env=environment(place)
            )
            async with Client(stdio_client(parameters, errlog=quiet)) as client:
                listed = await client.list_resources()
                got = await client.call_tool("get_artifact", {"pointer": "a log"})
                return len(listed.resources), got.is_error

    assert run(look()) == (0, True)


@pytest.mark.parametrize(
    ("before", "after"), [(60 * 86_400.0, 60 * 86_400.0), (None, None), (60.0, 30 * 86_400.0)]
)
def test_a_session_lives_at_least_thirty_days_and_keeps_a_longer_ttl(
    tmp_path: Path, before: float | None, after: float | None
) -> None:
    async def use() -> bool:
        command = serve("--session", "shared")
        with silence() as quiet:
            parameters = StdioServerParameters(
                command=command[0], args=command[1:], env=environment(tmp_path)
            )
            async with Client(stdio_client(parameters, errlog=quiet)) as client:
                return (
                    await client.call_tool("store_artifact", {"name": "n", "value": "v"})
                ).is_error

    with coatcheck.open(tmp_path) as store:
        store.session("shared", ttl=before, create=True)
        assert not run(use())
        assert store.session("shared").ttl == after


def test_each_http_connection_has_its_own_session(place: Path) -> None:
    async def look(found: Web) -> bool:
        headers = {"authorization": f"Bearer {found.token}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(found.url, http_client=http), mode="legacy") as one,
            Client(streamable_http_client(found.url, http_client=http), mode="legacy") as other,
        ):
            await one.call_tool("store_artifact", {"name": "mine", "value": "mine"})
            assert not (await one.call_tool("get_artifact", {"pointer": "mine"})).is_error
            return (await other.call_tool("get_artifact", {"pointer": "mine"})).is_error

    with served(place) as found:
        assert run(look(found))


def test_logs_and_change_notifications_reach_the_client(place: Path) -> None:
    received: list[str] = []

    async def log(params: types.LoggingMessageNotificationParams) -> None:
        received.append(f"{params.level} {params.data}")

    async def handle(message: Any) -> None:
        received.append(str(getattr(message, "method", "")))

    async def work() -> None:
        command = serve("--session", SESSION)
        with silence() as quiet:
            parameters = StdioServerParameters(
                command=command[0], args=command[1:], env=environment(place)
            )
            wire = stdio_client(parameters, errlog=quiet)
            async with Client(
                wire, mode="legacy", logging_callback=log, message_handler=handle
            ) as client:
                await client.call_tool("list_artifacts", {})
                assert not received
                await client.session.set_logging_level("debug")
                await client.call_tool("store_artifact", {"name": "new", "value": "new"})
                await client.session.send_ping()

    run(work())
    assert any(one.startswith("debug store_artifact") for one in received)
    assert "notifications/resources/list_changed" in received


def test_a_client_that_asks_for_progress_receives_it_while_a_call_runs(
    opened: Open, place: Path
) -> None:
    received: list[tuple[float, str | None]] = []
    lock = sqlite3.connect(place / "catalog.sqlite", isolation_level=None)

    async def progressed(progress: float, total: float | None, message: str | None) -> None:
        received.append((progress, message))
        if len(received) == 2:
            lock.execute("ROLLBACK")  # the call waits for this lock

    async def store() -> types.CallToolResult:
        async with opened() as client:
            await client.call_tool("list_artifacts", {})
            lock.execute("BEGIN IMMEDIATE")
            value = {"name": "slow", "value": f"waited for {len(received)}"}
            return await client.call_tool("store_artifact", value, progress_callback=progressed)

    try:
        assert not run(store()).is_error
    finally:
        lock.close()
    assert [progress for progress, _ in received] == sorted({progress for progress, _ in received})
    assert all(message for _, message in received)


HUGE = "n" * 60_000
CAP = 10_000  # characters: a page, and JSON around it
READS: list[tuple[str, dict[str, Any]]] = [
    ("tools/call", {"name": "get_artifact", "arguments": {"pointer": HUGE}}),
    ("tools/call", {"name": "get_artifact", "arguments": {"pointer": "e" * 60_000}}),
    ("resources/read", {"uri": f"art://name/{HUGE}"}),
    ("resources/read", {"uri": "art://name/binary"}),
    (
        "completion/complete",
        {
            "ref": {"type": "ref/resource", "uri": "art://name/{name}"},
            "argument": {"name": "name", "value": ""},
        },
    ),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("resources/read", {"uri": HUGE}),
    ("resources/read", {"uri": f"art://name/not {HUGE}"}),
    ("resources/read", {"uri": f"art://name/{'e' * 60_000}"}),
    ("resources/read", {"uri": f"art://name/{HUGE}?lines={HUGE}"}),
    ("resources/list", {"cursor": HUGE}),
    ("tools/call", {"name": HUGE, "arguments": {}}),
    (HUGE, {}),
]


def test_no_answer_exceeds_the_limit_whatever_names_types_and_uris_contain(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("long", ttl=None)
        session.put("a text", name=HUGE, media_type=f"text/{'m' * 5_000}")
        session.put(b"\0\1", name="binary", media_type=f"application/{'m' * 5_000}")
        session.put("expired", name="e" * 60_000, ttl=0.001)
        for number in range(30):
            session.put(f"another {number}", name=f"{number} {HUGE}")
    with Speaker(serve("--session", "long"), environment(tmp_path / "store")) as speaker:
        speaker.begin()
        for method, params in READS:
            answer = speaker.ask(method, params)
            assert "result" in answer
            assert len(json.dumps(answer)) < CAP
        for method, params in REFUSED:
            answer = speaker.ask(method, params)
            assert "error" in answer
            assert len(json.dumps(answer)) < CAP
        for listed in speaker.ask("resources/list")["result"]["resources"]:
            assert len(json.dumps(listed)) < 2_000


# Access over HTTP

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


def status_of(found: Web, path: str = "", method: str = "POST", **headers: str | None) -> int:
    given = {**HEADERS, "authorization": f"Bearer {found.token}", **headers}
    with httpx2.Client() as client:
        kept = {key: value for key, value in given.items() if value is not None}
        return client.request(method, found.url + path, json=PING, headers=kept).status_code


def test_a_request_with_the_token_is_accepted(web: Web) -> None:
    assert status_of(web) not in (401, 403, 404)
    port = web.url.split(":")[2].split("/")[0]
    assert status_of(web, host=f"localhost:{port}") not in (401, 403, 404)
    assert status_of(web, origin=f"http://127.0.0.1:{port}") not in (401, 403, 404)


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer x{}"]
)
def test_a_request_without_the_token_is_refused(web: Web, token: str | None) -> None:
    assert status_of(web, authorization=token if token is None else token.format(web.token)) == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "localhost", "127.0.0.1.evil.example:{}", "0.0.0.0:{}"]
)
def test_a_foreign_host_is_refused_even_with_the_token(web: Web, host: str) -> None:
    assert status_of(web, host=host.format(web.url.split(":")[2].split("/")[0])) == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1", "http://localhost:1", "file://"]
)
def test_a_foreign_origin_is_refused_even_with_the_token(web: Web, origin: str) -> None:
    assert status_of(web, origin=origin) == 403


@pytest.mark.parametrize("path", ["/", "/more", "/../etc/passwd", "?x=1"])
def test_no_other_path_is_served(web: Web, path: str) -> None:
    found = status_of(web, path, method="GET")
    assert found in ((404,) if path != "?x=1" else (400, 406))


def test_the_token_comes_from_the_environment_and_is_not_printed(place: Path) -> None:
    secret = "a-token-of-at-least-16"
    printed: list[str] = []
    given = ("--allow-origin", "https://friend.example")
    with served(place, *given, printed=printed, COATCHECK_MCP_TOKEN=secret) as found:
        assert status_of(found) not in (401, 403)
        assert status_of(found, origin="https://friend.example") not in (401, 403)
    assert secret not in "".join(printed)


def test_a_page_from_an_allowed_origin_can_make_requests(place: Path) -> None:
    friend, wanted = "https://friend.example", "authorization,content-type,mcp-session-id"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    with served(place, "--allow-origin", friend) as found, httpx2.Client() as client:
        before = client.options(found.url, headers={"origin": friend, **preflight})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == friend
        assert before.headers["access-control-allow-headers"] == wanted
        assert {"POST", "GET", "DELETE"} == set(
            before.headers["access-control-allow-methods"].split(", ")
        )
        given = {**HEADERS, "authorization": f"Bearer {found.token}"}
        answered = client.post(found.url, json=PING, headers={**given, "origin": friend})
        assert answered.headers["access-control-allow-origin"] == friend
        assert "mcp-session-id" in answered.headers["access-control-expose-headers"]
        refused = client.post(found.url, json=PING, headers={**HEADERS, "origin": friend})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
            401,
            friend,
        )
        for foreign in (
            client.options(found.url, headers={"origin": "https://evil.example", **preflight}),
            client.post(found.url, json=PING, headers={**given, "origin": "https://evil.example"}),
            client.post(found.url, json=PING, headers=given),
        ):
            assert not [name for name in foreign.headers if name.startswith("access-control")]
        assert (
            client.options(
                found.url, headers={"origin": "https://evil.example", **preflight}
            ).status_code
            == 403
        )
        assert client.options(found.url).status_code == 401


def test_a_weak_token_is_refused_at_startup(place: Path) -> None:
    done = subprocess.run(
        serve("--http", "--port", "0"),
        env=environment(place, COATCHECK_MCP_TOKEN="short"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "short" not in done.stderr


# Clients that stop halfway


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
@pytest.mark.parametrize("beginning", [b"", b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_connections_without_a_token_do_not_lock_clients_out(place: Path, beginning: bytes) -> None:
    with served(place, is_warm=False) as found, contextlib.ExitStack() as stack:
        resource.prlimit(found.pid, resource.RLIMIT_NOFILE, (256, 256))
        port = int(found.url.split(":")[2].split("/")[0])
        for _ in range(400):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):  # closed already
                one.sendall(beginning)
        assert status_of(found) not in (401, 403, 404)


def test_a_connection_is_closed_unless_a_token_arrives() -> None:
    async def wait() -> list[str]:
        closed: list[str] = []
        over = asyncio.Event()
        connections = Probation(seconds=0.05, max_open=3)

        def close(name: str) -> None:
            closed.append(name)
            over.set()

        for port, name in enumerate(("known", "evicted", "a", "b", "c")):
            connections.begin(("127.0.0.1", port), functools.partial(close, name))
            if name == "known":
                connections.passed(("127.0.0.1", port))
        assert closed == ["evicted"]
        while len(closed) < 4:
            over.clear()
            await over.wait()
        return closed

    assert run(wait()) == ["evicted", "a", "b", "c"]


def test_an_unfinished_handshake_is_freed() -> None:
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "tests", "version": "1"},
    }

    async def work() -> tuple[int, list[int]]:
        with coatcheck.open("memory:") as store:
            server = make_server(Sessions(store, "x", named=False, ttl=60))
            security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
            app = server.streamable_http_app(transport_security=security)
            freed = asyncio.Semaphore(0)

            async def counting(scope: Any, receive: Any, send: Any) -> None:
                await app(scope, receive, send)
                if scope["method"] == "DELETE":
                    freed.release()

            wire = httpx2.ASGITransport(app=UnfinishedHandshakes(counting, seconds=1, max_open=3))
            async with (
                app.router.lifespan_context(app),
                httpx2.AsyncClient(
                    transport=wire, base_url="http://127.0.0.1", headers=HEADERS
                ) as client,
            ):

                async def post(session: str | None, method: str, **more: Any) -> httpx2.Response:
                    headers = {"mcp-session-id": session} if session else {}
                    return await client.post(
                        "/mcp", json={"jsonrpc": "2.0", "method": method, **more}, headers=headers
                    )

                begun = [
                    (await post(None, "initialize", id=1, params=hello)).headers["mcp-session-id"]
                    for _ in range(3)
                ]
                await post(begun[2], "notifications/initialized")
                begun += [
                    (await post(None, "initialize", id=1, params=hello)).headers["mcp-session-id"]
                    for _ in range(2)
                ]
                for _ in range(4):
                    await asyncio.wait_for(freed.acquire(), 60)
                done = [(await post(session, "ping", id=2)).status_code for session in begun]
                return done.pop(2), done

    assert run(work()) == (200, [404, 404, 404, 404])


# A remote server behind a proxy


@pytest.fixture(scope="module")
def behind(web: Web, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    env = environment(tmp_path_factory.mktemp("behind") / "store", TOKEN=web.token)
    with Speaker(
        proxy("--url", web.url, "--header", "Authorization: Bearer ${TOKEN}"), env
    ) as speaker:
        speaker.begin()
        yield speaker


def test_a_proxy_in_front_of_a_url_passes_everything_and_prefixes_its_own_tools(
    behind: Speaker,
) -> None:
    names = [tool["name"] for tool in behind.ask("tools/list")["result"]["tools"]]
    assert names[:3] == [one.removeprefix("coatcheck_") for one in names[3:]]
    assert "line 4999" in text_of(behind.call("get_artifact", pointer="a log", lines="-1:"))
    contents = behind.ask("resources/read", {"uri": "art://name/binary"})["result"]["contents"]
    assert stub_in(contents[0]["text"])["size_bytes"] == resources.PART_BYTES


def test_concurrent_calls_to_a_url_are_not_swapped(behind: Speaker) -> None:
    waiting = {
        behind.start(
            "tools/call", {"name": "get_artifact", "arguments": {"pointer": f"note {n}"}}
        ): n
        for n in range(60)
    }
    for request_id, number in waiting.items():
        assert text_of(behind.answer(request_id)["result"]).endswith(f"small {number}")


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_everything_over_http_is_the_same_behind_a_proxy(
    web: Web, tmp_path: Path, mode: str
) -> None:
    async def look(wire: Any) -> list[Any]:
        async with Client(wire, mode=mode) as client:
            tools = [
                tool
                for tool in (await client.list_tools()).tools
                if not tool.name.startswith("coatcheck_")
            ]
            listed = await client.list_resources()
            read = await client.read_resource("art://name/note%201")
            return [client.protocol_version, client.server_info, tools, listed, read]

    async def both() -> tuple[list[Any], list[Any]]:
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {web.token}"}) as http:
            bare = await look(streamable_http_client(web.url, http_client=http))
        command = proxy("--url", web.url, "--header", "Authorization: Bearer ${TOKEN}")
        env = environment(tmp_path / "store", TOKEN=web.token)
        with silence() as quiet:
            parameters = StdioServerParameters(command=command[0], args=command[1:], env=env)
            return bare, await look(stdio_client(parameters, errlog=quiet))

    bare, proxied = run(both())
    assert bare[:2] == proxied[:2]
    assert bare[2:] == proxied[2:]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/mcp", "cannot be reached"),
        ("{}", "answered 401"),
        ("{}/elsewhere", "answered 401"),
    ],
)
def test_an_unusable_url_is_an_error_for_each_request(
    web: Web, tmp_path: Path, url: str, reason: str
) -> None:
    with Speaker(proxy("--url", url.format(web.url)), environment(tmp_path / "store")) as speaker:
        error = speaker.ask("initialize", {"protocolVersion": "2025-06-18"})["error"]
        assert reason in error["message"]
        assert error["data"]["code"] == "upstream_failed"
        assert "no artifacts yet" in text_of(speaker.call("list_artifacts"))


def test_a_url_with_another_scheme_is_refused_at_startup(tmp_path: Path) -> None:
    with Speaker(proxy("--url", "file:///etc/passwd"), environment(tmp_path / "store")) as speaker:
        assert speaker.leave() == 10


def test_a_header_that_cannot_be_sent_is_refused_at_startup_and_not_shown(tmp_path: Path) -> None:
    words = proxy("--url", "http://127.0.0.1:1/mcp", "--header", "X-Key: geheim\u20ac")
    with Speaker(words, environment(tmp_path / "store")) as speaker:
        assert speaker.leave() == 10
    assert "X-Key" in speaker.complained("header")
    assert not [line for line in speaker.complaints if "geheim" in line]


@pytest.mark.parametrize("command", [["mcp"], ["proxy", "--url", "http://127.0.0.1:1/mcp"]])
def test_a_missing_extra_names_its_fix(tmp_path: Path, command: list[str]) -> None:
    without = "import sys; sys.modules['mcp'] = sys.modules['mcp_types'] = None; from coatcheck.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, *command],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert "pip install 'coatcheck[mcp]'" in done.stderr


def test_incompatible_options_are_a_usage_error(tmp_path: Path) -> None:
    for options in ([], ["--url", "http://x", "--config", "y"], ["--header", "a: b", "--", *ODD]):
        done = subprocess.run(
            proxy(*options), env=environment(tmp_path), capture_output=True, check=False
        )
        assert done.returncode == 2


# Slow calls

SLOW = {"grep": "(a?){1000}a{1000}b"}


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(one) for one in listed.stdout.split()]


def with_long_line(place: Path) -> str:
    with coatcheck.open(place) as store:
        session = store.session(SESSION, ttl=None)
        session.put("hello", name="small")
        return session.put("a" * 1_000_000).pointer


@pytest.mark.parametrize("kind", ["server", "proxy"])
def test_a_short_call_is_answered_during_slow_ones_and_a_signal_ends_them_all(
    tmp_path: Path, kind: str
) -> None:
    pointer = with_long_line(tmp_path / "store")
    if kind == "server":
        command = serve("--session", SESSION, is_warm=False)
    else:
        command = proxy("--session", SESSION, server=ODD, is_warm=False)
    with Speaker(command, environment(tmp_path / "store")) as speaker:
        speaker.begin()
        slow = [
            speaker.start(
                "tools/call", {"name": "get_artifact", "arguments": {"pointer": pointer, **SLOW}}
            )
            for _ in range(41)
        ]
        answer = speaker.call("get_artifact", pointer=pointer, lines="1")
        assert "aaaa" in text_of(answer)
        assert "hello" in text_of(speaker.call("get_artifact", pointer="small", grep="h"))
        assert not {one.get("id") for one in speaker.heard} >= set(slow)
        children = children_of(speaker.process.pid)
        assert children
        speaker.process.terminate()
        speaker.process.wait(30)
        assert gone(*children)


def test_a_server_over_http_ends_on_a_signal_while_slow_calls_run(tmp_path: Path) -> None:
    pointer = with_long_line(tmp_path / "store")
    command = serve("--http", "--port", "0", "--session", SESSION, is_warm=False)
    process = subprocess.Popen(
        command, env=environment(tmp_path / "store"), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    url = process.stderr.readline().split()[-1]
    token = process.stderr.readline().split()[-1]
    children: list[int] = []

    async def main() -> None:
        headers = {"authorization": f"Bearer {token}"}
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
            client = await stack.enter_async_context(
                Client(streamable_http_client(url, http_client=http))
            )
            slow = [
                asyncio.create_task(client.call_tool("get_artifact", {"pointer": pointer, **SLOW}))
                for _ in range(41)
            ]
            answer = await client.call_tool("get_artifact", {"pointer": pointer, "lines": "1"})
            assert "aaaa" in str(answer.content[0])
            assert not all(one.done() for one in slow)
            children.extend(children_of(process.pid))
            process.terminate()
            await asyncio.to_thread(process.wait, 30)
            for one in slow:
                one.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    with contextlib.suppress(
        ExceptionGroup, httpx2.HTTPError, MCPError
    ):  # the server ends before the client
        asyncio.run(main())
    try:
        assert process.wait(30) == 128 + 15
        assert children
        assert gone(*children)
    finally:
        process.kill()
        process.stderr.close()
