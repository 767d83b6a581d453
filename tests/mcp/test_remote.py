"""Servers at an address that do what few servers do, but all may: events of every shape, streams that break and are
taken up again, sessions that end, orders that must be kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.speaking import Speaker, environment, proxy, text_of

FAILED = "upstream_failed"
EVENTS = "text/event-stream"


class Asked:
    """A received request, and methods to respond: status, headers, and a body in pieces."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.verb = handler.command
        self.headers = {key.lower(): value for key, value in handler.headers.items()}
        size = int(self.headers.get("content-length", 0))
        self.body: dict[str, Any] = json.loads(handler.rfile.read(size)) if size else {}

    def begin(self, status: int = 200, kind: str | None = "application/json", **headers: str) -> None:
        self._handler.send_response(status)
        if kind is not None:
            self._handler.send_header("Content-Type", kind)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.send_header("Connection", "close")
        self._handler.end_headers()
        self._handler.close_connection = True

    def write(self, piece: str | bytes) -> None:
        self._handler.wfile.write(piece.encode() if isinstance(piece, str) else piece)
        self._handler.wfile.flush()

    def result(self, **result: Any) -> str:
        return json.dumps({"jsonrpc": "2.0", "id": self.body["id"], "result": result})

    def answer(self, **result: Any) -> None:
        self.begin()
        self.write(self.result(**result))


class Script:
    """A server scripted by HTTP verb and MCP method. It does the handshake and lists one tool by itself."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.does: dict[str, Callable[[Asked], None]] = {
            "initialize": self.shake,
            "tools/list": lambda asked: asked.answer(tools=[{"name": "do", "inputSchema": {"type": "object"}}]),
        }

    @staticmethod
    def shake(asked: Asked) -> None:
        asked.begin(Mcp_Session_Id="first")
        version = asked.body["params"]["protocolVersion"]
        info = {"name": "scripted", "version": "1"}
        asked.write(asked.result(protocolVersion=version, capabilities={"tools": {}}, serverInfo=info))

    def __call__(self, asked: Asked) -> None:
        self.asked.append(asked)
        done = self.does.get(asked.body.get("method", asked.verb))
        if done is not None:
            done(asked)
        elif asked.verb == "GET":
            asked.begin(405, None)
        else:
            asked.begin(202, None)

    def seen(self, what: str) -> list[Asked]:
        return [one for one in self.asked if what in (one.verb, one.body.get("method"))]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script, tmp_path: Path) -> Iterator[Speaker]:
    """A client of a proxy in front of that server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            try:
                script(Asked(self))
            except BrokenPipeError:
                pass

        do_GET = do_POST = do_DELETE = do  # noqa: N815 - the names that http.server wants

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        with Speaker(proxy("--url", url), environment(tmp_path / "store")) as speaker:
            yield speaker
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def call(speaker: Speaker) -> dict[str, Any]:
    return speaker.call("do")


def content(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def streamed(*pieces: str) -> Callable[[Asked], None]:
    """Respond to a call with these pieces as an event stream; PRETTY is the result."""

    def do(asked: Asked) -> None:
        asked.begin(kind=EVENTS)
        result = asked.result(**content("streamed")).encode()
        for piece in pieces:
            asked.write(piece.encode().replace(b"PRETTY", _pretty(result)))

    return do


def _pretty(result: bytes) -> bytes:
    lines = json.dumps(json.loads(result), indent=2).splitlines()
    return "\n".join(f"data: {line}" for line in lines).encode()


def test_an_event_over_several_lines_is_one_line_for_the_client(script: Script, client: Speaker) -> None:
    script.does["tools/call"] = streamed("event: message\r\nid: 1\r\n", "PRETTY\n\n")
    client.begin()
    assert text_of(call(client)) == "streamed"


def test_json_over_several_lines_is_one_line_for_the_client(script: Script, client: Speaker) -> None:
    def pretty(asked: Asked) -> None:
        asked.begin()
        asked.write(json.dumps(json.loads(asked.result(**content("pretty"))), indent=1).replace("\n", "\r\n"))

    script.does["tools/call"] = pretty
    client.begin()
    assert text_of(call(client)) == "pretty"
    assert b"\r" not in client.lines[-1]


def test_a_stream_that_breaks_is_taken_up_again_behind_the_last_event(script: Script, client: Speaker) -> None:
    asked_first: list[Asked] = []

    def breaks(asked: Asked) -> None:
        asked_first.append(asked)
        streamed("id: 41\nretry: 1\ndata:\n\n")(asked)

    def goes_on(asked: Asked) -> None:
        if "last-event-id" not in asked.headers:
            asked.begin(405, None)
            return
        asked.begin(kind=EVENTS)
        if len(script.seen("GET")) > 4:  # it may close the stream as often as it likes
            asked.write(f"id: 42\ndata: {asked_first[0].result(**content('resumed'))}\n\n")

    script.does |= {"tools/call": breaks, "GET": goes_on}
    client.begin()
    assert text_of(call(client)) == "resumed"
    resumed = [one for one in script.seen("GET") if "last-event-id" in one.headers]
    assert {one.headers["last-event-id"] for one in resumed} == {"41"}
    assert {one.headers["mcp-session-id"] for one in resumed} == {"first"}


def test_a_stream_that_breaks_and_has_no_numbers_is_an_error(script: Script, client: Speaker) -> None:
    script.does["tools/call"] = streamed("data: {}\n\n")
    client.begin()
    assert call(client)["data"]["code"] == FAILED


def test_no_request_overtakes_the_word_that_the_client_has_begun(script: Script, client: Speaker) -> None:
    begun, asked_early = threading.Event(), threading.Event()

    def initialized(asked: Asked) -> None:
        assert not asked_early.wait(1.0)  # time enough for what comes after it, were it sent
        begun.set()
        asked.begin(202, None)

    def listed(asked: Asked) -> None:
        if not begun.is_set():
            asked_early.set()
        asked.answer(tools=[])

    script.does |= {"notifications/initialized": initialized, "tools/list": listed}
    client.begin()
    assert client.ask("tools/list")["result"]["tools"]
    assert not asked_early.is_set()


def test_a_session_is_named_in_every_request_and_deleted_at_the_end(script: Script, client: Speaker) -> None:
    client.begin()
    client.ask("tools/list")
    client.leave()
    hello, *others = script.asked
    assert "mcp-session-id" not in hello.headers
    assert {one.headers.get("mcp-session-id") for one in others} == {"first"}
    assert {one.headers.get("mcp-protocol-version") for one in others} == {"2025-06-18"}
    assert [one.verb for one in script.asked][-1] == "DELETE"


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_session_that_is_over_is_begun_again_and_the_request_made_once_more(
    script: Script, client: Speaker, kind: str
) -> None:
    alive = ["first"]

    def shake(asked: Asked) -> None:
        asked.begin(Mcp_Session_Id=alive[-1])
        asked.write(asked.result(protocolVersion="2025-03-26", capabilities={"tools": {}}, serverInfo={}))

    def do(asked: Asked) -> None:
        if asked.headers.get("mcp-session-id") != alive[-1]:
            asked.begin(404, kind)
            error = {"code": -32001, "message": "Session not found"}
            asked.write(json.dumps({"jsonrpc": "2.0", "id": asked.body.get("id"), "error": error}))
        else:
            asked.answer(**content(alive[-1]))

    script.does |= {"initialize": shake, "tools/call": do}
    client.begin()
    assert text_of(call(client)) == "first"
    alive.append("second")
    waiting = [client.start("tools/call", {"name": "do", "arguments": {}}) for _ in range(5)]
    assert [text_of(client.answer(one)["result"]) for one in waiting] == ["second"] * 5
    assert len(script.seen("initialize")) == 2
    first, second = script.seen("initialize")
    assert first.body["params"] == second.body["params"]
    assert [one.headers.get("mcp-session-id") for one in script.seen("notifications/initialized")] == alive
    assert not [one for one in client.heard if "id" in one]


def test_a_server_that_forgets_every_session_is_an_error_and_no_circle(script: Script, client: Speaker) -> None:
    script.does["tools/call"] = lambda asked: asked.begin(404, "text/plain")
    client.begin()
    assert call(client)["data"]["code"] == FAILED
    assert len(script.seen("initialize")) == 2


def test_what_a_server_says_unasked_is_heard_again_after_it_was_away(script: Script, client: Speaker) -> None:
    def listen(asked: Asked) -> None:
        count = len(script.seen("GET"))
        if count < 4:
            asked.begin(503, None)
            return
        asked.begin(kind=EVENTS)
        asked.write('data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')

    script.does["GET"] = listen
    client.begin()
    client.until(lambda one: one.get("method") == "notifications/tools/list_changed")


def test_a_page_for_people_is_not_a_stream(script: Script, client: Speaker) -> None:
    def page(asked: Asked) -> None:
        asked.begin(kind="text/html")
        asked.write("<p>hello\n\n")

    script.does["GET"] = page
    client.begin()
    client.ask("tools/list")
    client.leave()
    assert len(script.seen("GET")) == 1


def test_a_server_without_sessions_is_listened_to_as_well(script: Script, client: Speaker) -> None:
    def shake(asked: Asked) -> None:
        asked.answer(protocolVersion="2025-06-18", capabilities={"tools": {}}, serverInfo={})

    def listen(asked: Asked) -> None:
        asked.begin(kind=EVENTS)
        asked.write('data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')

    script.does |= {"initialize": shake, "GET": listen}
    client.begin()
    client.until(lambda one: one.get("method") == "notifications/tools/list_changed")


def test_a_server_that_wants_a_sign_in_is_reported_as_such(script: Script, client: Speaker) -> None:
    def refuse(asked: Asked) -> None:
        where = 'Bearer resource_metadata="https://example.org/.well-known/oauth-protected-resource"'
        asked.begin(401, WWW_Authenticate=where)
        asked.write('{"error":"invalid_token","error_description":"Missing"}')

    script.does["initialize"] = refuse
    said = client.ask("initialize", {"protocolVersion": "2025-06-18"})["error"]["message"]
    assert "OAuth" in said
    assert "--header" in said


def test_a_cancelled_request_is_cancelled_there_and_its_connection_given_up(script: Script, client: Speaker) -> None:
    gone = threading.Event()
    started = threading.Event()

    def hang(asked: Asked) -> None:
        asked.begin(kind=EVENTS)
        started.set()
        try:
            while not gone.wait(0.05):
                asked.write(": still here\n\n")
        except OSError:
            gone.set()

    script.does["tools/call"] = hang
    client.begin()
    client.ask("tools/list")
    waiting = client.start("tools/call", {"name": "do", "arguments": {}})
    assert started.wait(30)
    client.tell("notifications/cancelled", {"requestId": waiting})
    assert gone.wait(30)
    assert script.seen("notifications/cancelled")[0].body["params"]["requestId"] == waiting
