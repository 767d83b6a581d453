"""JSON-RPC as it stands on the wire: one message a line, kept as the bytes that it came in.

What nobody changes leaves as it came, byte for byte, so that methods, fields and numbers that we do not know pass
unharmed. A line over the cap is never held: its two ends are enough to say whose answer it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.errors import CODES, CoatcheckError

Id = str | int
Raw = bytes | bytearray

MAX_MESSAGE: Final = 64 << 20
_LARGE: Final = 1 << 16
_END: Final = 4_096
_ID_FIRST: Final = re.compile(rb'^\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,)?\s*"id"\s*:\s*(-?\d+|"(?:[^"\\]|\\.)*")')
_ID_LAST: Final = re.compile(rb'"id"\s*:\s*(-?\d+|"(?:[^"\\]|\\.)*")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the bytes of its line, and what they say."""

    raw: Raw
    body: dict[str, Any]

    @property
    def method(self) -> str | None:
        method = self.body.get("method")
        return method if isinstance(method, str) else None

    @property
    def id(self) -> Id | None:
        found = self.body.get("id")
        return found if isinstance(found, str | int) and not isinstance(found, bool) else None

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
class Oversized:
    """A line that was over the cap: how long it was, and its two ends."""

    size: int
    head: bytes
    tail: bytes

    @property
    def id(self) -> Id | None:
        """Whose answer it is, where its ends say so: implementations write the id first or last."""
        match = _ID_FIRST.match(self.head) or _ID_LAST.search(self.tail)
        if match is None:
            return None
        found = json.loads(match[1])
        return found if isinstance(found, str | int) else None


class Lines:
    """Cuts a stream of bytes into lines, and holds no more than the cap of one."""

    def __init__(self, cap: int = MAX_MESSAGE) -> None:
        self._cap = cap
        self._held = bytearray()
        self._size = 0  # of a line that is over the cap
        self._head = b""

    def feed(self, chunk: bytes) -> Iterator[Raw | Oversized]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if not self._held and not self._size and end - start <= self._cap:
                yield chunk[start:end]
            else:
                self._hold(chunk[start:end])
                yield self._taken()
            start = end + 1
        if start < len(chunk):
            self._hold(chunk[start:] if start else chunk)

    def end(self) -> Iterator[Raw | Oversized]:
        """What is left where the stream ends without a line end."""
        if self._held or self._size:
            yield self._taken()

    def _hold(self, piece: bytes) -> None:
        self._held += piece
        if self._size:
            self._size += len(piece)
            del self._held[:-_END]
        elif len(self._held) > self._cap:
            self._size, self._head = len(self._held), bytes(self._held[:_END])
            self._held = self._held[-_END:]

    def _taken(self) -> Raw | Oversized:
        held, self._held = self._held, bytearray()
        if not self._size:
            return held
        found = Oversized(self._size, self._head, bytes(held))
        self._size, self._head = 0, b""
        return found


def parse(raw: Raw) -> list[Message]:
    """The messages of a line: one, several where it is a batch, none where it is no JSON-RPC at all."""
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
        import pydantic_core  # here, so that small messages need none of it; it parses without a second copy

        try:
            return pydantic_core.from_json(bytes(raw) if isinstance(raw, bytes) else raw)
        except ValueError:  # half a surrogate pair, which JSON allows
            pass
    return json.loads(raw)


def encode(body: object) -> bytes:
    """A message as one line, without the line end."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair: its escape is valid JSON, its UTF-8 is not
        return json.dumps(body, separators=(",", ":")).encode()


def response(request_id: Id | None, result: dict[str, Any]) -> Message:
    body = {"jsonrpc": "2.0", "id": request_id, "result": result}
    return Message(encode(body), body)


def failure(request_id: Id | None, error: CoatcheckError) -> Message:
    """An error of ours as a JSON-RPC error. Its data has the code that stays the same in all versions."""
    said = {"code": CODES[error.code].mcp, "message": str(error), "data": {"code": error.code}}
    body = {"jsonrpc": "2.0", "id": request_id, "error": said}
    return Message(encode(body), body)


def rewritten(message: Message, **fields: Any) -> Message:
    """A message with other fields at the top, everything else as it was."""
    body = {**message.body, **fields}
    return Message(encode(body), body)
