"""JSON-RPC messages, one per line, and the interface of an upstream server.

A message keeps the bytes that it was received as. Unless it is changed it is sent on byte for byte, so unknown methods,
fields and numbers survive. A line over the size limit is not kept: its two ends usually contain its id and method.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from coatcheck.errors import CODES, CoatcheckError, UpstreamFailed

Id = str | int | float
Raw = bytes | bytearray

MAX_MESSAGE: Final = 64 << 20
_LARGE: Final = 1 << 16
_END: Final = 4_096
_MAX_ERROR: Final = 2_000
_MEMBER: Final = rb'\s*"(jsonrpc|id|method)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?)\s*'
_MEMBERS: Final = re.compile(_MEMBER)
_FIRST: Final = re.compile(rb"\s*\{(?:" + _MEMBER + rb",)*")
_LAST: Final = re.compile(rb"(?:," + _MEMBER + rb")+\}\s*$|^\s*\{" + _MEMBER + rb"\}\s*$")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the bytes of its line, and the parsed object."""

    raw: Raw
    body: dict[str, Any]

    @property
    def method(self) -> str | None:
        method = self.body.get("method")
        return method if isinstance(method, str) else None

    @property
    def id(self) -> Id | None:
        return id_of(self.body.get("id"))

    @property
    def params(self) -> dict[str, Any]:
        params = self.body.get("params")
        return params if isinstance(params, dict) else {}

    @property
    def is_request(self) -> bool:
        return "method" in self.body and "id" in self.body

    @property
    def is_response(self) -> bool:
        return "method" not in self.body and "id" in self.body


@dataclass(frozen=True, slots=True)
class UnparsedLine:
    """A line that was not parsed, because it is too long or not JSON: its size and its two ends.

    Implementations write the id and the method first or last, so the ends usually contain them."""

    size: int
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, line: Raw) -> Self:
        return cls(len(line), bytes(line[:_END]), bytes(line[-_END:]))

    @property
    def id(self) -> Id | None:
        return id_of(self._field("id"))

    @property
    def method(self) -> str | None:
        found = self._field("method")
        return found if isinstance(found, str) else None

    def _field(self, name: str) -> object:
        first, last = _FIRST.match(self.head), _LAST.search(self.tail)
        ends = [found[0] for found in (first, last) if found is not None]
        fields = {key.decode(): value for end in reversed(ends) for key, value in _MEMBERS.findall(end)}
        try:
            return json.loads(fields[name]) if name in fields else None
        except ValueError:
            return None


def id_of(value: object) -> Id | None:
    """Return `value` if it is a valid JSON-RPC id, else None."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


class LineBuffer:
    """Split a stream of bytes into lines, buffering at most `max_size` bytes."""

    def __init__(self, max_size: int = MAX_MESSAGE) -> None:
        self._max_size = max_size
        self._buffer = bytearray()
        self._size = 0  # of a line over the limit
        self._head = b""

    def feed(self, chunk: bytes) -> Iterator[Raw | UnparsedLine]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if not self._buffer and not self._size and end - start <= self._max_size:
                yield chunk[start:end]
            else:
                self._append(chunk[start:end])
                yield self._take()
            start = end + 1
        if start < len(chunk):
            self._append(chunk[start:] if start else chunk)

    def end(self) -> Iterator[Raw | UnparsedLine]:
        """Yield the rest of a stream that does not end with a newline."""
        if self._buffer or self._size:
            yield self._take()

    def _append(self, piece: bytes) -> None:
        self._buffer += piece
        if self._size:
            self._size += len(piece)
            del self._buffer[:-_END]
        elif len(self._buffer) > self._max_size:
            self._size, self._head = len(self._buffer), bytes(self._buffer[:_END])
            self._buffer = self._buffer[-_END:]

    def _take(self) -> Raw | UnparsedLine:
        line, self._buffer = self._buffer, bytearray()
        if not self._size:
            return line
        found = UnparsedLine(self._size, self._head, bytes(line))
        self._size, self._head = 0, b""
        return found


def parse(raw: Raw) -> list[Message]:
    """Parse a line: one message, several if it is a batch, none if it is not JSON-RPC."""
    try:
        value = _loads(raw)
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict):
        return [Message(raw, value)]
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return [Message(encode(one), one) for one in value]
    return []


def _loads(raw: Raw) -> Any:
    if len(raw) >= _LARGE:
        import pydantic_core  # imported only for large messages: it parses without a copy

        try:
            return pydantic_core.from_json(bytes(raw) if isinstance(raw, bytes) else raw)
        except ValueError:  # a lone surrogate, which JSON allows
            pass
    try:
        return json.loads(raw)
    except UnicodeDecodeError:  # not UTF-8: the bytes pass unchanged, we only read them
        return json.loads(raw.decode("utf-8", "replace"))


def encode(body: object) -> bytes:
    """Encode a message as one line, without the newline."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate: valid as a JSON escape, not as UTF-8
        return json.dumps(body, separators=(",", ":")).encode()


def _message(**fields: Any) -> Message:
    body = {"jsonrpc": "2.0", **fields}
    return Message(encode(body), body)


def request(request_id: Id, method: str, params: Mapping[str, Any] | None = None) -> Message:
    return _message(id=request_id, method=method, **({"params": params} if params else {}))


def notification(method: str, params: Mapping[str, Any] | None = None) -> Message:
    return _message(method=method, **({"params": params} if params else {}))


def response(request_id: Id | None, result: dict[str, Any]) -> Message:
    return _message(id=request_id, result=result)


def error_response(request_id: Id | None, number: int, text: str, **data: Any) -> Message:
    return _message(id=request_id, error={"code": number, "message": text, **({"data": data} if data else {})})


def failure(request_id: Id | None, error: CoatcheckError) -> Message:
    """Build the response for an error of ours. Its data has the stable code of the error."""
    return error_response(request_id, CODES[error.code].mcp, str(error)[:_MAX_ERROR], code=error.code)


def rewritten(message: Message, **fields: Any) -> Message:
    """Replace top-level fields of a message."""
    body = {**message.body, **fields}
    return Message(encode(body), body)


class Sink(Protocol):
    """The receiver of an upstream's messages. An upstream reads on only after each call has returned."""

    async def message(self, message: Message) -> None: ...

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """No response to this request will come; None if it is not known which."""

    async def ended(self, error: UpstreamFailed) -> None:
        """Nothing more will come."""


class Upstream(Protocol):
    """One server, or several that look like one."""

    async def start(self, sink: Sink) -> None:
        """Raises `UpstreamFailed` if it cannot be started."""

    async def send(self, message: Message) -> None:
        """Send without waiting for the server to read. Raises `UpstreamFailed` if it cannot be reached."""

    async def finish(self) -> None:
        """Tell the server that nothing more will be sent. Its remaining responses are delivered, then `ended`."""

    async def close(self) -> None:
        """End it within a few seconds, whatever its state."""


async def refuse(line: UnparsedLine, error: UpstreamFailed, upstream: Upstream, sink: Sink) -> None:
    """Report that a server's message cannot be passed on: a response to the client, a request to the server. Nobody
    waits for a notification."""
    if line.method is None:
        await sink.unanswered(line.id, error)
        return
    log(str(error))
    if line.id is not None:
        with contextlib.suppress(UpstreamFailed):
            await upstream.send(failure(line.id, error))


def log(text: str) -> None:
    """Write a line to stderr. Servers influence the text and stderr may be a terminal, so it is escaped."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    sys.stderr.write(f"coatcheck: {shown}\n")
    sys.stderr.flush()
