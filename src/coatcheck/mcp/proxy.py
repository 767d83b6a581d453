"""Run a proxy: one client on stdin and stdout, the relay, the upstream server, and an orderly shutdown.

stdin and stdout are used by threads, so that neither blocks the rest. Other output of the process goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from coatcheck import Policy, Session
from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.proxy_rewrites import Rewriter
from coatcheck.mcp.relay import TIMEOUT, Relay
from coatcheck.mcp.savings import Counts
from coatcheck.mcp.wire import MAX_MESSAGE, LineBuffer, Raw, UnparsedLine, Upstream

_CHUNK: Final = 1 << 16
_WRITE_BUFFER: Final = 16 << 20  # bytes that may wait to be written before writers must wait
_READ_AHEAD: Final = 8  # chunks that may wait to be read
_FLUSH: Final = 2.0
_M_MMAP_THRESHOLD: Final = -3  # an option of mallopt
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """`inline` names tools whose results stay unchanged. `timeout` 0 means no timeout. With `no_tools`, another server
    with the same session offers the tools for reading."""

    policy: Policy
    inline: frozenset[str] = frozenset()
    timeout: float = TIMEOUT
    max_message: int = MAX_MESSAGE
    no_tools: bool = False


def run(upstream: Upstream, session: Session, settings: ProxySettings, counts: Counts) -> int:
    """Serve one client until it disconnects, the upstream server ends, or a signal arrives. Return the exit status.

    Raises `UpstreamFailed` if the upstream server cannot be started, or ends while the client is connected."""
    _release_large_blocks()
    return asyncio.run(_run(upstream, session, settings, counts))


async def _run(upstream: Upstream, session: Session, settings: ProxySettings, counts: Counts) -> int:
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    rewriter = Rewriter(
        session, policy=settings.policy, inline=settings.inline, max_message=settings.max_message, counts=counts,
        has_tools=not settings.no_tools,
    )  # fmt: skip
    with Stdio() as client:
        relay = Relay(upstream, rewriter, client.write, timeout=settings.timeout)
        tasks = [asyncio.create_task(relay.watch())]
        try:
            await upstream.start(relay)
            left = asyncio.create_task(_serve(client, relay, settings.max_message))
            tasks.append(left)
            ends: set[asyncio.Future[Any]] = {signalled, relay.over, client.broken}
            await asyncio.wait({left, *ends}, return_when=asyncio.FIRST_COMPLETED)
            left_first = left.done() and not relay.is_ending  # the end of the server may make the client leave
            if left.done() and not signalled.done() and not client.is_gone():
                await upstream.finish()  # open requests may still be answered
                await asyncio.wait(ends, timeout=_FLUSH, return_when=asyncio.FIRST_COMPLETED)
            await relay.drain(_FLUSH)
            await client.flush(_FLUSH)
            if relay.over.done() and not left_first:
                raise relay.over.result()
            return 128 + signalled.result() if signalled.done() else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await upstream.close()


async def _serve(client: Stdio, relay: Relay, max_message: int) -> None:
    """Pass the client's messages to the relay until the end of stdin."""
    lines = LineBuffer(max_message)
    while chunk := await client.read():
        for line in lines.feed(chunk):
            await _pass_on(relay, line)
    for line in lines.end():
        await _pass_on(relay, line)


async def _pass_on(relay: Relay, line: Raw | UnparsedLine) -> None:
    if isinstance(line, UnparsedLine):
        error = UpstreamFailed(f"a message of {line.size:,} bytes is over the limit", hint="send less")
        await relay.too_large(line, error)
    else:
        await relay.from_client(line)


def _release_large_blocks() -> None:
    """Make the C library return large blocks of memory to the system as soon as they are free. By default glibc raises
    its threshold after the first one and keeps the next."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class Stdio:
    """Our stdin and stdout. `broken` is done when nobody reads stdout any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = os.dup(0), os.dup(1)
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._read_ahead = threading.Semaphore(_READ_AHEAD)
        self._lock = threading.Condition()
        self._queue: deque[Raw] = deque()
        self._size = 0
        self._closed = False
        self._room = asyncio.Event()
        self._room.set()
        self._flushed = asyncio.Event()
        self.broken: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        threading.Thread(target=self._read_stdin, daemon=True).start()
        threading.Thread(target=self._write_stdout, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    async def read(self) -> bytes:
        """Return the next chunk from the client; empty at the end."""
        chunk = await self._chunks.get()
        self._read_ahead.release()
        return chunk

    async def write(self, raw: Raw) -> None:
        """Write one line. Waits only if the client leaves a lot unread; without a reader, the line is dropped."""
        await self._room.wait()
        with self._lock:
            self._queue.append(raw)
            self._size += len(raw) + 1
            if self._size > _WRITE_BUFFER:
                self._room.clear()
            self._lock.notify()

    async def flush(self, seconds: float) -> None:
        """Wait until everything is written, at most `seconds`."""
        with self._lock:
            if self._size == 0:
                return
            self._flushed.clear()
        try:
            await asyncio.wait_for(self._flushed.wait(), seconds)
        except TimeoutError:
            pass

    def is_gone(self) -> bool:
        """Whether stdout has no reader any more."""
        poll = select.poll()
        poll.register(self._out, 0)
        return self.broken.done() or bool(poll.poll(0))

    # In threads

    def _read_stdin(self) -> None:
        chunk = b"."
        while chunk:
            self._read_ahead.acquire()
            try:
                chunk = os.read(self._in, _CHUNK)
            except OSError:
                chunk = b""
            self._call_in_loop(self._chunks.put_nowait, chunk)

    def _write_stdout(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._lock.wait()
                if not self._queue:
                    return
                lines = list(self._queue)
                self._queue.clear()
                written = self._size
            try:
                data = b"".join([part for raw in lines for part in (raw, b"\n")])
                del lines
                view = memoryview(data)
                while view:
                    view = view[os.write(self._out, view) :]
                del view, data
            except OSError:
                self._call_in_loop(self._break)
            with self._lock:
                self._size -= written
                is_empty = self._size == 0
            self._call_in_loop(self._written, is_empty)

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed
            pass

    def _written(self, is_empty: bool) -> None:
        self._room.set()
        if is_empty:
            self._flushed.set()

    def _break(self) -> None:
        if not self.broken.done():
            self.broken.set_result(None)
