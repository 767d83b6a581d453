"""JSON-RPC as it stands on the wire: one message a line, kept as the bytes that it came in.

What nobody changes leaves as it came, byte for byte, so that methods, fields and numbers that we do not know pass
unharmed. A line over the cap is never held: its two ends are enough to say what it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.errors import CODES, CoatcheckError

Id = str | int | float
Raw = bytes | bytearray

MAX_MESSAGE: Final = 64 << 20
_LARGE: Final = 1 << 16
_END: Final = 4_096
_MEMBER: Final = rb'\s*"(jsonrpc|id|method)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?)\s*'
_MEMBERS: Final = re.compile(_MEMBER)
_FIRST: Final = re.compile(rb"\s*\{(?:" + _MEMBER + rb",)*")
_LAST: Final = re.compile(rb"(?:," + _MEMBER + rb")+\}\s*$|^\s*\{" + _MEMBER + rb"\}\s*$")


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
class Unread:
    """A line that was not parsed, because it is over the cap or no JSON: how long it is, and its two ends.

    Implementations write what a message is (its id, its method) first or last, so that the ends mostly tell."""

    size: int
    head: bytes
    tail: bytes

    @property
    def id(self) -> Id | None:
        return id_of(self._told("id"))

    @property
    def method(self) -> str | None:
        found = self._told("method")
        return found if isinstance(found, str) else None

    def _told(self, name: str) -> object:
        first, last = _FIRST.match(self.head), _LAST.search(self.tail)
        ends = [found[0] for found in (first, last) if found is not None]
        told = {key.decode(): value for end in reversed(ends) for key, value in _MEMBERS.findall(end)}
        try:
            return json.loads(told[name]) if name in told else None
        except ValueError:
            return None


def unread(line: Raw) -> Unread:
    """What is left to say of a line that is no JSON."""
    return Unread(len(line), bytes(line[:_END]), bytes(line[-_END:]))


def id_of(value: object) -> Id | None:
    """A value as an id, where it can be one."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


class Lines:
    """Cuts a stream of bytes into lines, and holds no more than the cap of one."""

    def __init__(self, cap: int = MAX_MESSAGE) -> None:
        self._cap = cap
        self._held = bytearray()
        self._size = 0  # of a line that is over the cap
        self._head = b""

    def feed(self, chunk: bytes) -> Iterator[Raw | Unread]:
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

    def end(self) -> Iterator[Raw | Unread]:
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

    def _taken(self) -> Raw | Unread:
        held, self._held = self._held, bytearray()
        if not self._size:
            return held
        found = Unread(self._size, self._head, bytes(held))
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
    try:
        return json.loads(raw)
    except UnicodeDecodeError:  # somebody's Latin-1: the bytes pass as they are, and we read what can be read
        return json.loads(raw.decode("utf-8", "replace"))


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
