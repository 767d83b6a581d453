"""Server-sent events as they are on the wire: bytes are split into events, and an event keeps its
bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE: Final = re.compile(rb"\r\n|\n|\r")
_BOM: Final = b"\xef\xbb\xbf"
COMMENT: Final = b": ping\n\n"
"""An event that every client ignores."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event with its bytes, the blank line included. `data` has its data lines, joined."""

    raw: bytes
    name: str
    data: bytes


class EventSplitter:
    """Splits a stream into events, wherever its bytes were cut. At most `limit` bytes of an event
    are kept."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._left = bytearray()
        self._limit = limit
        self._looked = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that are complete. Raises ValueError if one is too large."""
        left: bytes | bytearray = chunk
        if self._left:
            self._left += chunk  # in place: an event of many chunks is not copied for each
            left = self._left
        start, at = 0, max(0, self._looked - 3)
        # A carriage return at the end may be the first half of a line end.
        stop = len(left) - 1 if left.endswith(b"\r") else len(left)
        while (found := _END.search(left, at, stop)) is not None:
            yield _event(bytes(left[start : found.end()]))
            start = at = found.end()
        if left is self._left:
            del self._left[:start]
        else:
            self._left += left[start:]
        self._looked = len(self._left)
        if len(self._left) > self._limit:
            raise ValueError(f"an event has more than {self._limit:,} bytes")

    def rest(self) -> bytes:
        """Return what is left after the last complete event."""
        return bytes(self._left)


def event(data: bytes, name: str = "") -> bytes:
    """Return an event as bytes."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def _event(raw: bytes) -> Event:
    name, data = b"", []
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:  # most of OpenAI's events
        return Event(raw, "", raw[6:-2])
    for line in _LINE.split(raw.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(raw, name.decode("utf-8", "replace"), b"\n".join(data))
