"""One run of a tool, and its output.

An `Attempt` runs in a thread of its own, on an event loop, or in the waiting thread. The tool's
side gives chunks and finally an ending. The waiting side takes them, and may stop the attempt at
any time; what the tool gives after that is dropped. The tool's side never touches the store, so an
abandoned tool cannot store anything.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.content import is_stream
from coatcheck.executor.threads import start_thread
from coatcheck.executor.turns import Cancelled, Deadlines, TurnOver
from coatcheck.values import encode_text

BUFFER: Final = 1 << 20
_WAKE: Final = BUFFER // 8  # bytes worth waking the waiting side for
_CHUNK: Final = 64 * 1024
_PLAIN: Final = frozenset({str, bytes, dict, list, int, float, bool, type(None)})
"""Types of results that are values."""

_AWAITED: Final = (Awaitable, AsyncIterator)


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException


Ending = Returned | Failed


class Attempt:
    """One run of a tool, with a bounded buffer between the two sides.

    `abandoned(1)` is called when a stopped tool keeps running, `abandoned(-1)` when that tool
    ends."""

    def __init__(self, abandoned: Callable[[int], None]) -> None:
        self._abandoned = abandoned
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

    def run(
        self,
        call: Callable[[ExitStack], Any],
        loop: asyncio.AbstractEventLoop | None,
        hand_over: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        """Run the tool to its end: function, coroutine or generator. Coroutines run on `loop`, or
        on a new one. Raises nothing.

        With `hand_over`, this is the thread of the waiting side. Then a coroutine or generator is
        handed over to run in another thread. And in the main thread, a KeyboardInterrupt is raised:
        it may well be the user's."""
        try:
            with ExitStack() as resources:
                result = call(resources)
                if hand_over is not None and _goes_on(result):
                    self._hand_over(result, resources.pop_all(), loop, hand_over)
                    return
                if isinstance(result, _AWAITED):
                    self._await(result, resources.pop_all(), loop)
                    return
                ending: Ending = Returned(self._pumped(result))
        except BaseException as error:  # every exception of a tool is an outcome, even SystemExit
            if hand_over and isinstance(error, KeyboardInterrupt) and _in_main_thread():
                raise
            ending = Failed(error)
        self._finish(ending)

    def _hand_over(
        self,
        result: Any,
        resources: ExitStack,
        loop: asyncio.AbstractEventLoop | None,
        hand_over: Callable[[Callable[[], None]], bool],
    ) -> None:
        """Finish a coroutine or generator in another thread, which closes the resources."""

        def resumed(fresh: ExitStack) -> Any:
            fresh.enter_context(resources)
            return result

        if not hand_over(lambda: self.run(resumed, loop)):
            resources.close()

    def _await(
        self, result: Any, resources: ExitStack, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        driven = self._drive(result, resources)
        try:
            if loop is None:
                asyncio.run(driven)
            else:
                asyncio.run_coroutine_threadsafe(driven, loop)
        except BaseException:
            driven.close()
            resources.close()
            raise

    async def _drive(self, result: Any, resources: ExitStack) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._interrupt_with(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            with resources:
                if inspect.isawaitable(result):
                    result = await result
                if isinstance(result, AsyncIterator):
                    await self._pump(result)
                    result = None
                elif isinstance(result, Iterator) or is_stream(result):
                    result = await asyncio.to_thread(self._pumped, result)
                ending: Ending = Returned(result)
        except BaseException as error:  # noqa: BLE001 - as above; a cancelled task ends here anyway
            ending = Failed(error)
        self._finish(ending)

    def _pumped(self, result: Any) -> Any:
        """Pass on the chunks of an iterator or stream; return any other result."""
        if not isinstance(result, Iterator) and not is_stream(result):
            return result
        self.yields = True
        try:
            for chunk in _chunks(result) if is_stream(result) else result:
                if not self._give(self._bytes(chunk)):
                    break
        finally:
            close = getattr(result, "close", None)
            if callable(close):
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
            close = getattr(result, "aclose", None)
            if callable(close):
                await close()

    def _bytes(self, chunk: object) -> bytes | bytearray | memoryview:
        if isinstance(chunk, str):
            return encode_text(chunk)
        if isinstance(chunk, bytes | bytearray | memoryview):
            self.is_text = False
            return chunk
        raise TypeError(
            f"the tool yielded a {type(chunk).__name__}; tools may yield only text or bytes"
        )

    def _has_room(self) -> bool:
        return len(self._buffer) < BUFFER or self.stopped

    def _give(self, data: bytes | bytearray | memoryview, *, wait: bool = True) -> bool:
        """Add bytes to the buffer once there is room. False if the attempt was stopped."""
        with self._changed:
            while wait and not self._has_room():
                self._changed.wait()
            if not self.stopped:
                self._buffer += data
                if len(self._buffer) >= _WAKE:
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
                self._abandoned(-1)
            self._changed.notify_all()

    # The waiting side

    def begin(self, work: Callable[[], None]) -> bool:
        """Start the tool's thread, unless the attempt was stopped. False if the system has no more
        threads."""
        with self._changed:
            if self.stopped:
                return True
            self._begun = True
        if not start_thread(work):
            self._finish(Failed(RuntimeError("the system has no more threads")))
            return False
        return True

    def take(self, until: float | None) -> bytes | Ending | None:
        """Return the next bytes, or the ending after the last of them. None if stopped or out of
        time: then `stop` returns what is left. Small amounts wait for more."""
        with self._changed:
            while not self.stopped:
                if len(self._buffer) >= _WAKE or (self._buffer and self._over):
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
        """Drop all further output and interrupt the tool if possible. Return the bytes that were
        not taken yet."""
        with self._changed:
            if self.stopped:
                return b""
            self.stopped = True
            left, self._buffer, self._ending = bytes(self._buffer), bytearray(), None
            self._changed.notify_all()
            if self._begun and not self._over:
                self._abandoned(1)
            interrupt = self._interrupt
        if interrupt is not None:
            try:
                interrupt()
            except RuntimeError:  # its loop is closed
                pass
        return left


class OutputStream:
    """The output of a tool as a binary stream for a put.

    It ends with the tool or at the call's deadline. It raises `TurnOver` at the turn's deadline."""

    def __init__(self, attempt: Attempt, deadlines: Deadlines) -> None:
        self._attempt = attempt
        self._deadlines = deadlines
        self._left = memoryview(b"")
        self._over = False
        self.ending: Ending | None = None
        self.time_was_up = False

    def head(self) -> bytes:
        """Read to the end, or a little more than one buffer, which stays readable."""
        head = piece = self.read(BUFFER)
        while piece and len(head) < BUFFER:
            piece = self.read(BUFFER)
            head += piece
        if not self.is_over:
            self._left = memoryview(head + bytes(self._left))
        return head

    @property
    def is_text(self) -> bool:
        """Whether all output so far was text. The store asks at the end of a stream."""
        return self._attempt.is_text

    @property
    def is_over(self) -> bool:
        return self._over and not self._left

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return b"".join(iter(lambda: self.read(BUFFER), b""))
        self._check()
        if not self._left and not self._over:
            more = self._next()
            self._check()
            self._left = memoryview(more)
        if not self._left:
            return b""
        piece = self._left[:size]
        self._left = self._left[len(piece) :]
        return bytes(piece)

    def _next(self) -> bytes:
        until = self._deadlines.until
        got = None if until is not None and time.monotonic() >= until else self._attempt.take(until)
        if isinstance(got, bytes):
            return got
        self._over = True
        if got is None:  # out of time; what is buffered still counts
            if self._attempt.stopped:
                raise Cancelled
            self.time_was_up = True
            return self._attempt.stop()
        self.ending = got
        return b""

    def _check(self) -> None:
        if self._deadlines.turn_is_over:
            raise TurnOver


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _goes_on(result: Any) -> bool:
    """Whether a tool has returned something that still has to run: a coroutine, a generator or a
    stream."""
    if type(result) in _PLAIN:
        return False
    return isinstance(result, (*_AWAITED, Iterator)) or is_stream(result)


def _chunks(stream: Any) -> Iterator[Any]:
    while chunk := stream.read(_CHUNK):
        yield chunk
