"""A stream of events (`text/event-stream`) as the messages in it: bytes in, lines out.

An event's data is JSON, so the lines that it may be spread over are one again. Nothing over the cap is held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from coatcheck.mcp.wire import Lines, Raw, Unread, unread

AGAIN: Final = 1.0  # seconds before a broken stream is taken up again, where the server does not say
_LEAST: Final = 0.05
MOST: Final = 30.0
_FIELD: Final = 16  # bytes for the name of a field before its value
_MARK: Final = b"\xef\xbb\xbf"


class Events:
    """Where a stream has come to: `last_id` is what it is taken up from, `again` when."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.last_id: str | None = None
        self.again = AGAIN
        self.begin()

    def begin(self) -> None:
        """The stream begins, once more too: what had come of an event is void, and will be sent again."""
        self._lines = Lines(self._cap + _FIELD)
        self._is_first = True
        self._after_return = False
        self._next_event()

    def _next_event(self) -> None:
        self._data: list[Raw] = []
        self._size = 0
        self._unread: Unread | None = None
        self._kind = b""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> Iterator[Raw | Unread]:
        for line in self._lines.feed(self._unified(chunk)):
            if self._is_first and not isinstance(line, Unread) and line.startswith(_MARK):
                line = line[len(_MARK) :]
            self._is_first = False
            if isinstance(line, Unread):
                self._unread = Unread(line.size, line.head.removeprefix(b"data:"), line.tail)
            elif line:
                self._field(bytes(line[:_FIELD]).partition(b":")[0], line)
            else:
                yield from self._event()

    def _event(self) -> Iterator[Raw | Unread]:
        data, too_large, kind = self._data, self._unread, self._kind
        self.last_id = self._id or self.last_id
        self._next_event()
        if kind not in (b"", b"message"):
            return
        if too_large is not None:
            yield too_large
        elif data and (whole := data[0] if len(data) == 1 else b" ".join(data)).strip():
            yield whole

    def _field(self, name: bytes, line: Raw) -> None:
        value = line[len(name) + 1 :]
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            self._size += len(value) + 1
            if self._size <= self._cap + 1:
                self._data.append(value)
            else:
                head = self._data[0] if self._data else value
                self._unread = Unread(self._size, unread(head).head, unread(value).tail)
        elif name == b"id":
            self._id = bytes(value).decode("utf-8", "replace")
        elif name == b"event":
            self._kind = bytes(value)
        elif name == b"retry":
            with contextlib.suppress(ValueError):
                self.again = min(max(int(value) / 1_000, _LEAST), MOST)

    def _unified(self, chunk: bytes) -> bytes:
        """Line ends of any kind as line feeds."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_return = chunk.endswith(b"\r") if chunk else self._after_return
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in chunk else chunk
