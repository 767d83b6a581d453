"""Our own stdin and stdout as the wire to a client: read and written in threads, so that neither can stop the rest.

While they are the wire, nothing else may use them: what the process prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from coatcheck.mcp.wire import Raw

_CHUNK: Final = 1 << 16
_AHEAD: Final = 16 << 20  # bytes that may wait to be written before those who write must wait
_PIECES: Final = 8  # pieces that may wait to be read


def say(text: str) -> None:
    """A line on stderr. Servers have a hand in it, and stderr may be a terminal."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    sys.stderr.write(f"coatcheck: {shown}\n")
    sys.stderr.flush()


class Stdio:
    """The two streams. `broken` is done when nobody reads what is written."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = os.dup(0), os.dup(1)
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._ahead = threading.Semaphore(_PIECES)
        self._lock = threading.Condition()
        self._waiting: deque[Raw] = deque()
        self._size = 0
        self._closed = False
        self._room = asyncio.Event()
        self._room.set()
        self._flushed = asyncio.Event()
        self.broken: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        threading.Thread(target=self._reading, daemon=True).start()
        threading.Thread(target=self._writing, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    async def read(self) -> bytes:
        """The next piece of what the client sends; empty at the end."""
        piece = await self._pieces.get()
        self._ahead.release()
        return piece

    async def write(self, raw: Raw) -> None:
        """One line. It waits only while a client leaves very much unread; where nobody reads, it goes nowhere."""
        await self._room.wait()
        with self._lock:
            self._waiting.append(raw)
            self._size += len(raw) + 1
            if self._size > _AHEAD:
                self._room.clear()
            self._lock.notify()

    async def flush(self, seconds: float) -> None:
        """Wait until all is written, but not for long."""
        with self._lock:
            if self._size == 0:
                return
            self._flushed.clear()
        try:
            await asyncio.wait_for(self._flushed.wait(), seconds)
        except TimeoutError:
            pass

    def is_gone(self) -> bool:
        """Whether nobody can read what we write."""
        poll = select.poll()
        poll.register(self._out, 0)
        return self.broken.done() or bool(poll.poll(0))

    # In threads

    def _reading(self) -> None:
        piece = b"."
        while piece:
            self._ahead.acquire()
            try:
                piece = os.read(self._in, _CHUNK)
            except OSError:
                piece = b""
            self._in_loop(self._pieces.put_nowait, piece)

    def _writing(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._lock.wait()
                if not self._waiting:
                    return
                lines = list(self._waiting)
                self._waiting.clear()
                written = self._size
            try:
                data = b"".join([part for raw in lines for part in (raw, b"\n")])
                del lines
                view = memoryview(data)
                while view:
                    view = view[os.write(self._out, view) :]
                del view, data
            except OSError:
                self._in_loop(self._break)
            with self._lock:
                self._size -= written
                is_empty = self._size == 0
            self._in_loop(self._made_room, is_empty)

    def _in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed
            pass

    def _made_room(self, is_empty: bool) -> None:
        self._room.set()
        if is_empty:
            self._flushed.set()

    def _break(self) -> None:
        if not self.broken.done():
            self.broken.set_result(None)
