"""Running a proxy: one client on stdin and stdout, the relay, what stands behind it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
from dataclasses import dataclass
from typing import Any, Final

from coatcheck import Policy, Session
from coatcheck.errors import UpstreamFailed
from coatcheck.mcp import report
from coatcheck.mcp.changes import Changes
from coatcheck.mcp.relay import TIMEOUT, Relay
from coatcheck.mcp.stdio import Stdio
from coatcheck.mcp.upstreams import Upstream
from coatcheck.mcp.wire import MAX_MESSAGE, Lines, Raw, Unread

_FLUSH: Final = 2.0
_M_MMAP_THRESHOLD: Final = -3  # of mallopt
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a proxy slims. `inline` are tools whose results stay as they are; `timeout` 0 waits for ever."""

    policy: Policy
    inline: frozenset[str] = frozenset()
    timeout: float = TIMEOUT
    max_message: int = MAX_MESSAGE


def run(upstream: Upstream, session: Session, settings: Settings, counts: report.Counts) -> int:
    """Serve one client until it leaves, the other server ends, or a signal comes. The exit status for it.

    Raises `UpstreamFailed` where the other server cannot be started, or ended while the client was still there."""
    _give_back_what_is_large()
    return asyncio.run(_run(upstream, session, settings, counts))


async def _run(upstream: Upstream, session: Session, settings: Settings, counts: report.Counts) -> int:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not told.done():
            told.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    changes = Changes(
        session, policy=settings.policy, inline=settings.inline, max_message=settings.max_message, counts=counts
    )
    with Stdio() as client:
        relay = Relay(upstream, changes, client.write, timeout=settings.timeout)
        tasks = [asyncio.create_task(relay.watch())]
        try:
            await upstream.start(relay)
            left = asyncio.create_task(_serve(client, relay, settings.max_message))
            tasks.append(left)
            ends: set[asyncio.Future[Any]] = {told, relay.over, client.broken}
            await asyncio.wait({left, *ends}, return_when=asyncio.FIRST_COMPLETED)
            left_first = left.done() and not relay.is_ending  # who has just been told of the end may leave at once
            if left.done() and not told.done() and not client.is_gone():
                await upstream.finish()  # what was asked before may still be answered
                await asyncio.wait(ends, timeout=_FLUSH, return_when=asyncio.FIRST_COMPLETED)
            await relay.settle(_FLUSH)
            await client.flush(_FLUSH)
            if relay.over.done() and not left_first:
                raise relay.over.result()
            return 128 + told.result() if told.done() else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await upstream.close()


async def _serve(client: Stdio, relay: Relay, max_message: int) -> None:
    """Hand the relay what the client sends, until it sends no more."""
    lines = Lines(max_message)
    while piece := await client.read():
        for line in lines.feed(piece):
            await _handed(relay, line)
    for line in lines.end():
        await _handed(relay, line)


async def _handed(relay: Relay, line: Raw | Unread) -> None:
    if isinstance(line, Unread):
        error = UpstreamFailed(f"a message of {line.size:,} bytes is too large to pass on", hint="send less")
        await relay.too_large(line, error)
    else:
        await relay.from_client(line)


def _give_back_what_is_large() -> None:
    """Have the C library hand every large piece of memory back as soon as it is free. By itself, glibc learns from the
    first one to keep those that follow for itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
