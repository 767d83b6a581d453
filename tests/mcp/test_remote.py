"""Remote servers with rare but valid behaviour: events of every shape, streams that break and are
resumed, sessions that end, and messages whose order matters."""

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


class Request:
    """A received request, and methods to respond: status, headers, and a body in pieces."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.verb = handler.command
        self.headers = {key.lower(): value for key, value in handler.headers.items()}
        size = int(self.headers.get("content-length", 0))
        self.body: dict[str, Any] = json.loads(handler.rfile.read(size)) if size else {}

    def begin(
        self, status: int = 200, kind: str | None = "application/json", **headers: str
    ) -> None:
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
    """A server scripted by HTTP verb and MCP method. It does the handshake and lists one tool by
    itself."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.handlers: dict[str, Callable[[Request], None]] = {
            "initialize": self.handshake,
            "tools/list": lambda request: request.answer(
                tools=[{"name": "do", "inputSchema": {"type": "object"}}]
            ),
        }

    @staticmethod
    def handshake(request: Request) -> None:
        request.begin(Mcp_Session_Id="first")
        version = request.body["params"]["protocolVersion"]
        info = {"name": "scripted", "version": "1"}
        request.write(
            request.result(protocolVersion=version, capabilities={"tools": {}}, serverInfo=info)
        )

    def __call__(self, request: Request) -> None:
        self.requests.append(request)
        handler = self.handlers.get(request.body.get("method", request.verb))
        if handler is not None:
            handler(request)
        elif request.verb == "GET":
            request.begin(405, None)
        else:
            request.begin(202, None)

    def seen(self, what: str) -> list[Request]:
        return [one for one in self.requests if what in (one.verb, one.body.get("method"))]


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
                script(Request(self))
            except BrokenPipeError:
                pass

        do_GET = do_POST = do_DELETE = do  # noqa: N815 - the names that http.server requires

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


def streamed(*pieces: str) -> Callable[[Request], None]:
    """Respond to a call with these pieces as an event stream; PRETTY is the result."""

    def do(request: Request) -> None:
        request.begin(kind=EVENTS)
        result = request.result(**content("streamed")).encode()
        for piece in pieces:
            request.write(piece.encode().replace(b"PRETTY", _pretty(result)))

    return do


def _pretty(result: bytes) -> bytes:
    lines = json.dumps(json.loads(result), indent=2).splitlines()
    return "\n".join(f"data: {line}" for line in lines).encode()


def test_an_event_over_several_lines_is_one_line_for_the_client(
    script: Script, client: Speaker
) -> None:
    script.handlers["tools/call"] = streamed("event: message\r\nid: 1\r\n", "PRETTY\n\n")
    client.begin()
    assert text_of(call(client)) == "streamed"


def test_json_over_several_lines_is_one_line_for_the_client(
    script: Script, client: Speaker
) -> None:
    def pretty(request: Request) -> None:
        request.begin()
        request.write(
            json.dumps(json.loads(request.result(**content("pretty"))), indent=1).replace(
                "\n", "\r\n"
            )
        )

    script.handlers["tools/call"] = pretty
    client.begin()
    assert text_of(call(client)) == "pretty"
    assert b"\r" not in client.lines[-1]


def test_a_broken_stream_is_resumed_after_the_last_event(script: Script, client: Speaker) -> None:
    first_requests: list[Request] = []

    def break_off(request: Request) -> None:
        first_requests.append(request)
        streamed("id: 41\nretry: 1\ndata:\n\n")(request)

    def resume(request: Request) -> None:
        if "last-event-id" not in request.headers:
            request.begin(405, None)
            return
        request.begin(kind=EVENTS)
        if len(script.seen("GET")) > 4:  # a server may close the stream any number of times
            request.write(f"id: 42\ndata: {first_requests[0].result(**content('resumed'))}\n\n")

    script.handlers |= {"tools/call": break_off, "GET": resume}
    client.begin()
    assert text_of(call(client)) == "resumed"
    resumed = [one for one in script.seen("GET") if "last-event-id" in one.headers]
    assert {one.headers["last-event-id"] for one in resumed} == {"41"}
    assert {one.headers["mcp-session-id"] for one in resumed} == {"first"}


def test_a_broken_stream_without_event_ids_is_an_error(script: Script, client: Speaker) -> None:
    script.handlers["tools/call"] = streamed("data: {}\n\n")
    client.begin()
    assert call(client)["data"]["code"] == FAILED


def test_no_request_overtakes_the_initialized_notification(script: Script, client: Speaker) -> None:
    begun, listed_early = threading.Event(), threading.Event()

    def initialized(request: Request) -> None:
        assert not listed_early.wait(
            1.0
        )  # long enough for a request that was sent too early to arrive
        begun.set()
        request.begin(202, None)

    def listed(request: Request) -> None:
        if not begun.is_set():
            listed_early.set()
        request.answer(tools=[])

    script.handlers |= {"notifications/initialized": initialized, "tools/list": listed}
    client.begin()
    assert client.ask("tools/list")["result"]["tools"]
    assert not listed_early.is_set()


def test_a_session_is_named_in_every_request_and_deleted_at_the_end(
    script: Script, client: Speaker
) -> None:
    client.begin()
    client.ask("tools/list")
    client.leave()
    hello, *others = script.requests
    assert "mcp-session-id" not in hello.headers
    assert {one.headers.get("mcp-session-id") for one in others} == {"first"}
    assert {one.headers.get("mcp-protocol-version") for one in others} == {"2025-06-18"}
    assert [one.verb for one in script.requests][-1] == "DELETE"


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_an_expired_session_is_started_again_and_the_request_repeated(
    script: Script, client: Speaker, kind: str
) -> None:
    alive = ["first"]

    def new_handshake(request: Request) -> None:
        request.begin(Mcp_Session_Id=alive[-1])
        request.write(
            request.result(protocolVersion="2025-03-26", capabilities={"tools": {}}, serverInfo={})
        )

    def do(request: Request) -> None:
        if request.headers.get("mcp-session-id") != alive[-1]:
            request.begin(404, kind)
            error = {"code": -32001, "message": "Session not found"}
            request.write(
                json.dumps({"jsonrpc": "2.0", "id": request.body.get("id"), "error": error})
            )
        else:
            request.answer(**content(alive[-1]))

    script.handlers |= {"initialize": new_handshake, "tools/call": do}
    client.begin()
    assert text_of(call(client)) == "first"
    alive.append("second")
    waiting = [client.start("tools/call", {"name": "do", "arguments": {}}) for _ in range(5)]
    assert [text_of(client.answer(one)["result"]) for one in waiting] == ["second"] * 5
    assert len(script.seen("initialize")) == 2
    first, second = script.seen("initialize")
    assert first.body["params"] == second.body["params"]
    assert [
        one.headers.get("mcp-session-id") for one in script.seen("notifications/initialized")
    ] == alive
    assert not [one for one in client.heard if "id" in one]


def test_a_server_that_forgets_every_session_is_an_error_not_an_endless_loop(
    script: Script, client: Speaker
) -> None:
    script.handlers["tools/call"] = lambda request: request.begin(404, "text/plain")
    client.begin()
    assert call(client)["data"]["code"] == FAILED
    assert len(script.seen("initialize")) == 2


def test_notifications_are_received_again_after_a_server_was_unavailable(
    script: Script, client: Speaker
) -> None:
    def listen(request: Request) -> None:
        count = len(script.seen("GET"))
        if count < 4:
            request.begin(503, None)
            return
        request.begin(kind=EVENTS)
        request.write('data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')

    script.handlers["GET"] = listen
    client.begin()
    client.until(lambda one: one.get("method") == "notifications/tools/list_changed")


def test_an_html_page_is_not_read_as_a_stream(script: Script, client: Speaker) -> None:
    def page(request: Request) -> None:
        request.begin(kind="text/html")
        request.write("<p>hello\n\n")

    script.handlers["GET"] = page
    client.begin()
    client.ask("tools/list")
    client.leave()
    assert len(script.seen("GET")) == 1


def test_notifications_of_a_server_without_sessions_are_received(
    script: Script, client: Speaker
) -> None:
    def new_handshake(request: Request) -> None:
        request.answer(protocolVersion="2025-06-18", capabilities={"tools": {}}, serverInfo={})

    def listen(request: Request) -> None:
        request.begin(kind=EVENTS)
        request.write('data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')

    script.handlers |= {"initialize": new_handshake, "GET": listen}
    client.begin()
    client.until(lambda one: one.get("method") == "notifications/tools/list_changed")


def test_a_server_that_requires_a_sign_in_is_reported_as_such(
    script: Script, client: Speaker
) -> None:
    def refuse(request: Request) -> None:
        where = (
            'Bearer resource_metadata="https://example.org/.well-known/oauth-protected-resource"'
        )
        request.begin(401, WWW_Authenticate=where)
        request.write('{"error":"invalid_token","error_description":"Missing"}')

    script.handlers["initialize"] = refuse
    message = client.ask("initialize", {"protocolVersion": "2025-06-18"})["error"]["message"]
    assert "OAuth" in message
    assert "--header" in message


def test_a_cancelled_request_is_cancelled_at_the_server_and_its_connection_closed(
    script: Script, client: Speaker
) -> None:
    gone = threading.Event()
    started = threading.Event()

    def hang(request: Request) -> None:
        request.begin(kind=EVENTS)
        started.set()
        try:
            while not gone.wait(0.05):
                request.write(": still here\n\n")
        except OSError:
            gone.set()

    script.handlers["tools/call"] = hang
    client.begin()
    client.ask("tools/list")
    waiting = client.start("tools/call", {"name": "do", "arguments": {}})
    assert started.wait(30)
    client.tell("notifications/cancelled", {"requestId": waiting})
    assert gone.wait(30)
    assert script.seen("notifications/cancelled")[0].body["params"]["requestId"] == waiting
