"""One run of a tool, in a thread or on an event loop, and the line between it and the one who waits for it.

The tool's side gives chunks and in the end an ending. The waiting side takes them, and may stop the attempt at any
time: from then on whatever the tool still gives is dropped. The tool's side never touches the store, so that what is
abandoned cannot store anything.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from coatcheck.streams import is_stream
from coatcheck.values import encode_text

BUFFER = 1 << 20
_WORTHWHILE = BUFFER // 8  # bytes to wake somebody for
_PIECE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException


Ending = Returned | Failed


class Attempt:
    """A mailbox of bounded size. `late(1)` is told when a stopped tool goes on all the same, `late(-1)` when that one
    ends."""

    def __init__(self, late: Callable[[int], None]) -> None:
        self._late = late
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self._ending: Ending | None = None
        self._interrupt: Callable[[], object] | None = None
        self._begun = False
        self._over = False
        self.stopped = False
        self.yields = False
        self.is_text = True

    # The tool's side

    def run(self, call: Callable[[ExitStack], Any], loop: asyncio.AbstractEventLoop | None) -> None:
        """Call the tool and see it through, whatever it is: function, coroutine, generator. What it awaits runs on
        `loop`, or on one of its own. Raises nothing."""
        try:
            with ExitStack() as held:
                result = call(held)
                if isinstance(result, Awaitable | AsyncIterator):
                    self._await(result, held.pop_all(), loop)
                    return
                ending: Ending = Returned(self._pumped(result))
        except BaseException as error:  # noqa: BLE001 - an exception of a tool is an outcome, SystemExit too
            ending = Failed(error)
        self._finish(ending)

    def _await(self, result: Any, held: ExitStack, loop: asyncio.AbstractEventLoop | None) -> None:
        driven = self._drive(result, held)
        try:
            if loop is None:
                asyncio.run(driven)
            else:
                asyncio.run_coroutine_threadsafe(driven, loop)
        except BaseException:
            driven.close()
            held.close()
            raise

    async def _drive(self, result: Any, held: ExitStack) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._interrupt_with(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            with held:
                if inspect.isawaitable(result):
                    result = await result
                if isinstance(result, AsyncIterator):
                    await self._pump(result)
                    result = None
                elif isinstance(result, Iterator) or is_stream(result):
                    result = await asyncio.to_thread(self._pumped, result)
                ending: Ending = Returned(result)
        except BaseException as error:  # noqa: BLE001 - as above; where it was cancelled, the task ends here anyway
            ending = Failed(error)
        self._finish(ending)

    def _pumped(self, result: Any) -> Any:
        """Hand on what an iterator yields, or a stream holds; any other result is the answer itself."""
        if not isinstance(result, Iterator) and not is_stream(result):
            return result
        self.yields = True
        try:
            for chunk in _pieces(result) if is_stream(result) else result:
                if not self._give(self._bytes(chunk)):
                    break
        finally:
            if callable(close := getattr(result, "close", None)):
                close()
        return None

    async def _pump(self, result: AsyncIterator[Any]) -> None:
        self.yields = True
        try:
            async for chunk in result:
                data = self._bytes(chunk)
                if not self._has_room():
                    await asyncio.to_thread(self._give, b"")
                if not self._give(data, wait=False):
                    break
        finally:
            if callable(close := getattr(result, "aclose", None)):
                await close()

    def _bytes(self, chunk: object) -> bytes | bytearray | memoryview:
        if isinstance(chunk, str):
            return encode_text(chunk)
        if isinstance(chunk, bytes | bytearray | memoryview):
            self.is_text = False
            return chunk
        raise TypeError(f"the tool yielded a {type(chunk).__name__}; a tool yields text or bytes")

    def _has_room(self) -> bool:
        return len(self._buffer) < BUFFER or self.stopped

    def _give(self, data: bytes | bytearray | memoryview, *, wait: bool = True) -> bool:
        """Put bytes into the buffer, when there is room. False where nobody wants them any more."""
        with self._changed:
            while wait and not self._has_room():
                self._changed.wait()
            if not self.stopped:
                self._buffer += data
                if len(self._buffer) >= _WORTHWHILE:
                    self._changed.notify_all()
            return not self.stopped

    def _interrupt_with(self, interrupt: Callable[[], object]) -> None:
        with self._changed:
            self._interrupt = interrupt
            if self.stopped:
                interrupt()

    def _finish(self, ending: Ending) -> None:
        with self._changed:
            if self._over:
                return
            self._over, self._interrupt = True, None
            if not self.stopped:
                self._ending = ending
            else:
                self._late(-1)
            self._changed.notify_all()

    # The waiting side

    def begin(self, work: Callable[[], None]) -> bool:
        """Start the tool's thread, unless it was stopped before. False where the system has no more threads."""
        with self._changed:
            if self.stopped:
                return True
            self._begun = True
        try:
            threading.Thread(target=work, name="coatcheck-tool", daemon=True).start()
        except RuntimeError as error:
            self._finish(Failed(error))
            return False
        return True

    def take(self, until: float | None) -> bytes | Ending | None:
        """The next bytes, or the ending after the last of them; None where it is stopped or the time is up: then `stop`
        has what is left. A few bytes wait for more."""
        with self._changed:
            while not self.stopped:
                if len(self._buffer) >= _WORTHWHILE or (self._buffer and self._over):
                    data, self._buffer = bytes(self._buffer), bytearray()
                    self._changed.notify_all()
                    return data
                if self._ending is not None:
                    return self._ending
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        return None

    def stop(self) -> bytes:
        """Drop whatever comes from now on, and interrupt what can be interrupted. What was given but not taken."""
        with self._changed:
            if self.stopped:
                return b""
            self.stopped = True
            left, self._buffer, self._ending = bytes(self._buffer), bytearray(), None
            self._changed.notify_all()
            if self._begun and not self._over:
                self._late(1)
            interrupt = self._interrupt
        if interrupt is not None:
            try:
                interrupt()
            except RuntimeError:  # its loop is closed: nothing runs there any more
                pass
        return left


def _pieces(stream: Any) -> Iterator[Any]:
    while piece := stream.read(_PIECE):
        yield piece
