"""Threads for async callers, in three pools: long calls never use up the threads of short ones, and
calls that wait for a client never use up either."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from coatcheck.errors import CoatcheckError

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession

SHORT: Final = 32
LONG: Final = 8
STREAMS: Final = 128
_SMALL: Final = 16 << 10  # bytes of an artifact that these patterns and paths read in a moment:
_PATTERN: Final = re.compile(
    r"(?:[^\\{]|\\[^pPC]){0,200}"
)  # without counted repetitions and large classes
_QUERY: Final = re.compile(r"shape|\$(?:[^.?]|\.(?!\.)){0,200}")  # without filters and descendants

P = ParamSpec("P")
R = TypeVar("R")


class _Lane:
    """A pool of threads, started on demand. `running` are the calls in progress."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self.restart()
        if hasattr(os, "register_at_fork"):  # a forked process does not have the threads
            os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        self._executor = ThreadPoolExecutor(self._size, self._name)
        self.running: set[object] = set()

    async def run(self, call: Callable[[], R]) -> R:
        context, token, running = contextvars.copy_context(), object(), self.running

        def tracked() -> R:
            running.add(token)
            try:
                return context.run(call)
            finally:
                running.discard(token)

        return await asyncio.get_running_loop().run_in_executor(self._executor, tracked)


_short: Final = _Lane(SHORT, "coatcheck-short")
_long: Final = _Lane(LONG, "coatcheck-long")
_streams: Final = _Lane(STREAMS, "coatcheck-stream")


async def in_thread(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a call in a thread. If the caller is cancelled, it stops waiting; the call runs to its
    end."""
    return await _short.run(functools.partial(call, *args, **kwargs))


async def in_long_thread(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a long call in a thread. At most `LONG` of them run at once; the others wait."""
    return await _long.run(functools.partial(call, *args, **kwargs))


async def in_stream_thread(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a call that waits for a client in between, such as an upload. At most `STREAMS` of them
    run at once."""
    return await _streams.run(functools.partial(call, *args, **kwargs))


async def in_reading_thread(
    session: CoreSession, target: object, asked: Mapping[str, Any], call: Callable[[], R]
) -> R:
    """Run a read of `target` with these arguments in a thread: with the short calls if it is
    certainly short."""
    is_long = may_take_long(target, asked) and not await in_thread(
        _is_small, session, target, asked
    )
    return await (_long if is_long else _short).run(call)


def _is_small(session: CoreSession, target: Any, asked: Mapping[str, Any]) -> bool:
    """Whether a read that may take long by its arguments is short, because the artifact is
    small."""
    if asked.get("cursor") or asked.get("code"):
        return False
    for name, quick in (("grep", _PATTERN), ("query", _QUERY)):
        value = asked.get(name)
        if value and not (isinstance(value, str) and quick.fullmatch(value)):
            return False
    try:
        refs = [session.ref(one) for one in (target, asked.get("diff")) if one]
    except CoatcheckError:
        return False
    return all(ref is not None and ref.size_bytes <= _SMALL for ref in refs)


@contextmanager
def ending() -> Iterator[None]:
    """A context for the work of a server. At its end it calls `leave`."""
    try:
        yield
    except SystemExit as left:
        leave(left.code if isinstance(left.code, int) else int(left.code is not None))
        raise
    leave(0)


def leave(code: int) -> None:
    """End the process at once if calls are still in progress. Kills child processes; does not wait
    for threads."""
    if not any(lane.running for lane in (_short, _long, _streams)):
        return
    from coatcheck.reading.sandbox import kill_all

    kill_all()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def may_take_long(target: object, asked: Mapping[str, Any]) -> bool:
    """Whether a read of `target` with these arguments may take long: a grep, a query, a diff, a
    program, or a part of JSON."""
    if any(asked.get(name) for name in ("grep", "query", "diff", "code")):
        return True
    if isinstance(target, str) and "#" in target:
        return True
    cursor = asked.get("cursor")
    if not isinstance(cursor, str) or not cursor:
        return False
    from coatcheck.reading.page import continues_slice  # here, so that importing this stays quick

    return not continues_slice(cursor)
