"""The server: one per script, on a free loopback port, for all three APIs. It records every
request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Final, Protocol, Self

from coatcheck import tokens
from examples.standins import anthropic, openai_chat, openai_responses
from examples.standins.checks import Refused
from examples.standins.script import Fault, Heard, Received, Reply, Step, Usage

WINDOW: Final = 200_000
COUNT_TOKENS: Final = f"{anthropic.PATH}/count_tokens"
_ODD: Final = (
    1,
    17,
    3,
    64,
    7,
    256,
    31,
)  # bytes per chunk, so that characters and events are split anywhere
_LEAST_CACHED: Final = 1_024
_MOST_TURNS: Final = 1_000  # of a conversation
_PER_PART: Final = 3


class Wire(Protocol):
    """One provider's API: its checks, and the format of its replies."""

    @property
    def PATH(self) -> str: ...  # noqa: N802 - a module implements this: it is a constant there
    @property
    def CACHE_STEP(self) -> int: ...  # noqa: N802
    def check(self, headers: Any, body: dict[str, Any]) -> None: ...
    def too_long(self, prompt: int, window: int) -> Refused: ...
    def heard(self, body: dict[str, Any]) -> Heard: ...
    def prompt(self, body: dict[str, Any]) -> list[str]: ...
    def caches(self, body: dict[str, Any]) -> bool: ...
    def whole(
        self, body: dict[str, Any], reply: Reply, turn: int, usage: Usage
    ) -> dict[str, Any]: ...
    def events(
        self, body: dict[str, Any], reply: Reply, turn: int, usage: Usage
    ) -> Iterator[tuple[str, str]]: ...
    def error(self, refused: Refused) -> dict[str, Any]: ...


_WIRES: Final[dict[str, Wire]] = {
    wire.PATH: wire for wire in (anthropic, openai_chat, openai_responses)
}
_count: Final = cache(tokens.count)


class StandIn:
    """A scripted model behind a real port. `with StandIn([…]) as api:` then give the SDK
    `api.openai_url` or `api.anthropic_url`. `requests` has what was received. Prompts over `window`
    tokens are refused. `agents` has other scripts, for conversations whose first message contains
    the key: those of sub-agents."""

    def __init__(
        self,
        script: Sequence[Step],
        *,
        window: int = WINDOW,
        faults: Sequence[Fault] = (),
        agents: Mapping[str, Sequence[Step]] | None = None,
    ) -> None:
        self.requests: list[Received] = []
        self._script = script
        self._agents = agents or {}
        self._window = window
        self._faults = {fault.request: fault for fault in faults}
        self._lock = threading.Lock()
        self._known: list[list[str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._answer))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    @property
    def anthropic_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def openai_url(self) -> str:
        return f"{self.anthropic_url}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str, headers: Any, raw: bytes, send: _Send) -> None:
        wire = _WIRES.get(path.partition("?")[0], anthropic)
        body: dict[str, Any] = {}
        if path.partition("?")[0] == COUNT_TOKENS:
            send.json(200, {"input_tokens": _count(raw.decode())})
            return
        with self._lock:  # one script handles one request at a time
            try:
                body, reply, turn, usage = self._heard(wire, path, headers, raw)
            except Exception as error:  # noqa: BLE001 - a script may raise anything, and its author wants to see it
                refused = (
                    error
                    if isinstance(error, Refused)
                    else Refused(500, f"failed with {error!r}", "api_error")
                )
                self.requests.append(Received(path, raw, body, refused.status))
                send.error(
                    refused.status, wire.error(refused), self._faults.get(len(self.requests) - 1)
                )
                return
            self.requests.append(Received(path, raw, body, 200, reply, usage))
        if body.get("stream"):
            send.events(wire.events(body, reply, turn, usage))
        else:
            send.json(200, wire.whole(body, reply, turn, usage))

    def _heard(
        self, wire: Wire, path: str, headers: Any, raw: bytes
    ) -> tuple[dict[str, Any], Reply, int, Usage]:
        fault = self._faults.get(len(self.requests))
        if fault is not None:
            raise Refused(
                fault.status,
                "Overloaded" if fault.status == 529 else "Rate limit reached; try again later",
            )
        if path.partition("?")[0] not in _WIRES:
            raise Refused(404, f"there is no {path}", "not_found_error")
        try:
            body = json.loads(raw)
        except ValueError:
            raise Refused(400, "The request body is not valid JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "The request body is not an object")
        wire.check(headers, body)
        parts = wire.prompt(body)
        prompt = sum(map(_cost, parts))
        if prompt > self._window:
            raise wire.too_long(prompt, self._window)
        heard = wire.heard(body)
        number = next((n for n, key in enumerate(self._agents, 1) if key in heard.begins), 0)
        script = [self._script, *self._agents.values()][number]
        if heard.turn >= len(script):
            raise Refused(500, f"the script ends before turn {heard.turn + 1}", "api_error")
        step = script[heard.turn]
        reply = step(heard) if callable(step) else step
        output = _count(reply.text) + sum(
            _count(call.name) + _count(call.written) for call in reply.calls
        )
        turn = (
            heard.turn + _MOST_TURNS * number
        )  # ids are made from it: no two conversations have the same
        return body, reply, turn, self._usage(wire, body, parts, prompt, output)

    def _usage(
        self, wire: Wire, body: dict[str, Any], parts: list[str], prompt: int, output: int
    ) -> Usage:
        """Count usage with a provider's cache: complete prefixes that were sent before, of at least
        1,024 tokens."""
        if not wire.caches(body):
            return Usage(prompt, 0, 0, output)
        same = max((_common(parts, known) for known in self._known), default=0)
        cached = sum(map(_cost, parts[:same]))
        cached = cached // wire.CACHE_STEP * wire.CACHE_STEP if cached >= _LEAST_CACHED else 0
        self._known.append(parts)
        return Usage(prompt, cached, prompt - cached if prompt >= _LEAST_CACHED else 0, output)


def prompt_tokens(path: str, body: dict[str, Any]) -> int:
    """Return the prompt tokens of a request of this API, counted as a stand-in counts them."""
    return sum(map(_cost, _WIRES[path].prompt(body)))


def _cost(part: str) -> int:
    return _count(part) + _PER_PART


def _common(one: list[str], other: list[str]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class _Send:
    """Writes a response."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def json(
        self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(body).encode()
        self._begin(
            status,
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **(headers or {}),
            },
        )
        self._handler.wfile.write(data)

    def error(self, status: int, body: dict[str, Any], fault: Fault | None) -> None:
        wait = fault.retry_after if fault is not None else 0
        again = (
            {"retry-after": f"{wait:g}", "retry-after-ms": f"{wait * 1000:g}"}
            if wait
            else {"x-should-retry": "false"}
        )
        self.json(status, body, again)

    def events(self, events: Iterator[tuple[str, str]]) -> None:
        """Send events in chunks of odd sizes."""
        self._begin(
            200,
            {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked"},
        )
        data = b"".join(
            (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
            for name, text in events
        )
        at = 0
        for size in cycle(_ODD):
            piece = data[at : at + size]
            self._handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            at += size
            if not piece:
                break

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self._handler.send_response(status)
        for name, value in {**headers, "request-id": "req_standin", "Connection": "close"}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()


def _handler(answer: Callable[[str, Any, bytes, _Send], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self.path, self.headers, raw, _Send(self))

        def log_message(self, *_: object) -> None:
            """Log nothing: the demo uses the terminal."""

    return Handler
