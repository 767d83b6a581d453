"""The API for async callers: the same methods, each run in a worker thread.

Each method takes the same arguments as its synchronous counterpart, and is awaited. A task that is cancelled stops
waiting at once; its call still runs to its end in the thread. Long calls (grep, query, diff, search, collect, verify)
have a few threads of their own, so that short calls do not wait for them.

    async with await coatcheck.aio.open("./.coatcheck") as store:
        session = await store.session("fix-login-bug")
        ref = await session.put(big_log, tool="run_tests")
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Literal, ParamSpec, Self, TypeVar

import coatcheck
from coatcheck._toolkit import Description, Style, Tool
from coatcheck.collect import Progress
from coatcheck.executor import Handle, ToolCall, ToolExecutor, ToolOutcome
from coatcheck.executor.run import WORKERS
from coatcheck.externalize import Policy
from coatcheck.lanes import in_long_thread, in_thread, may_take_long
from coatcheck.messages.message import Message
from coatcheck.session import Session
from coatcheck.storage import SessionInfo
from coatcheck.store import Store
from coatcheck.transcript import Format, Line, Problem, Transcript
from coatcheck.transcript.file import Mode
from coatcheck.transfer import CopyReport

_BATCH = 16
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


def _always(*args: object, **kwargs: object) -> bool:
    return True


def _never(*args: object, **kwargs: object) -> bool:
    return False


def _of_target(target: object = None, *args: object, **kwargs: object) -> bool:
    return may_take_long(kwargs.get("target", target), kwargs)


def _of_tool(**arguments: object) -> bool:
    return may_take_long(arguments.get("pointer"), arguments)


def _hop(
    call: Callable[Concatenate[Any, P], R], wrap: Callable[[R], W], long: Callable[..., bool] = _never
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, W]]:
    """Make a method of a wrapper: it runs `call` on the wrapped object in a thread, and wraps the result. `long`
    decides from the arguments whether the call may take long."""

    @functools.wraps(call)
    async def hopped(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> W:
        run = in_long_thread if long(*args, **kwargs) else in_thread
        return wrap(await run(call, self._wrapped, *args, **kwargs))

    return hopped


def _same(answer: R) -> R:
    return answer


def _threaded(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    @functools.wraps(call)
    async def hopped(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(call, *args, **kwargs)

    return hopped


class AsyncStream:
    """The bytes of an artifact, read in threads. An async context manager that closes itself."""

    def __init__(self, stream: BinaryIO) -> None:
        self._wrapped = stream

    async def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, by default all that is left; empty at the end."""
        return await in_thread(self._wrapped.read, size)

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return await in_thread(self._wrapped.seek, offset, whence)

    async def tell(self) -> int:
        return await in_thread(self._wrapped.tell)

    async def aclose(self) -> None:
        await in_thread(self._wrapped.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class AsyncSession:
    """A `coatcheck.Session` whose methods are awaited."""

    def __init__(self, session: Session) -> None:
        self._wrapped = session

    @property
    def session_id(self) -> str:
        return self._wrapped.session_id

    @property
    def parent(self) -> str | None:
        return self._wrapped.parent

    @property
    def ttl(self) -> float | None:
        return self._wrapped.ttl

    @property
    def store(self) -> AsyncStore:
        return AsyncStore(self._wrapped.store)

    def __repr__(self) -> str:
        return f"Async{self._wrapped!r}"

    put = _hop(Session.put, _same)
    get = _hop(Session.get, _same, _of_target)
    open = _hop(Session.open, AsyncStream, _of_target)
    ref = _hop(Session.ref, _same)
    read = _hop(Session.read, _same, _of_target)
    coverage = _hop(Session.coverage, _same)
    preview = _hop(Session.preview, _same)
    externalize = _hop(Session.externalize, _same)
    materialize = _hop(Session.materialize, _same, _of_target)
    search = _hop(Session.search, _same, _always)
    count = _hop(Session.count, _same)
    artifacts = _hop(Session.artifacts, _same)
    list = _hop(Session.list, _same)
    grant = _hop(Session.grant, _same)
    pin = _hop(Session.pin, _same)
    unpin = _hop(Session.unpin, _same)
    version = _hop(Session.version, _same)
    claim = _hop(Session.claim, _same)
    claimant = _hop(Session.claimant, _same)
    record = _hop(Session.record, _same)
    records = _hop(Session.records, _same)
    forget = _hop(Session.forget, _same)
    end = _hop(Session.end, _same)

    def offload(
        self, call: Callable[..., Any] | None = None, *, tool: str | None = None, policy: Policy | None = None
    ) -> Callable[..., Any]:
        """Decorate a function as `Session.offload` does. The decorator is not awaited; the decorated function is. A
        plain function runs in a thread."""
        if call is None:
            return lambda function: self.offload(function, tool=tool, policy=policy)
        offloaded = self._wrapped.offload(call, tool=tool, policy=policy)
        return offloaded if inspect.iscoroutinefunction(offloaded) else _threaded(offloaded)


@dataclass(frozen=True, slots=True)
class AsyncTool(Description):
    """A tool of `coatcheck.toolkit` whose `run` is awaited."""

    _wrapped: Tool = field(repr=False)

    @property
    def reads(self) -> bool:
        return self._wrapped.reads

    @property
    def stores(self) -> bool:
        return self._wrapped.stores

    run = _hop(Tool.run, _same, _of_tool)


def toolkit(
    session: AsyncSession | Session,
    *,
    style: Style = "snake",
    prefix: str = "",
    max_chars: int | None = None,
    max_store_bytes: int | None = None,
    redact: Literal["store"] | None = None,
) -> list[AsyncTool]:
    """Return the three tools of a session, as `coatcheck.toolkit` does."""
    tools = coatcheck.toolkit(
        _plain(session), style=style, prefix=prefix, max_chars=max_chars, max_store_bytes=max_store_bytes, redact=redact
    )
    return [AsyncTool(tool.name, tool.description, tool.parameters, tool.read_only, tool) for tool in tools]


class AsyncToolExecutor:
    """A `coatcheck.ToolExecutor` whose methods are awaited. Async tools run on the caller's event loop; those of
    `start` run on their own."""

    def __init__(
        self,
        session: AsyncSession | Session,
        tools: Iterable[object] | Mapping[str, Callable[..., Any]],
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
        max_workers: int = WORKERS,
    ) -> None:
        self.session = session
        self._wrapped = ToolExecutor(_plain(session), tools, policy=policy, timeout=timeout, max_workers=max_workers)

    @property
    def names(self) -> tuple[str, ...]:
        return self._wrapped.names

    @property
    def tools(self) -> tuple[Description, ...]:
        return self._wrapped.tools

    async def run(self, call: ToolCall, *, timeout: float | None = None) -> ToolOutcome:
        """Run one call and wait for it. Cancelling abandons the call."""
        return await self._wrapped.arun(call, timeout=timeout)

    async def run_all(
        self, calls: Sequence[ToolCall], *, timeout: float | None = None, deadline: float | None = None
    ) -> list[ToolOutcome]:
        """Run the calls of a turn in parallel and return their outcomes in the same order."""
        return await self._wrapped.arun_all(calls, timeout=timeout, deadline=deadline)

    async def wait(self, handle: Handle | str, *, timeout: float | None = None) -> ToolOutcome:
        """Return the outcome of a started call, or `Running` if it has not ended within `timeout` seconds."""
        return await self._wrapped.await_(handle, timeout=timeout)

    start = _hop(ToolExecutor.start, _same)
    poll = _hop(ToolExecutor.poll, _same)
    cancel = _hop(ToolExecutor.cancel, _same)


def _plain(session: AsyncSession | Session) -> Session:
    return session._wrapped if isinstance(session, AsyncSession) else session


class AsyncStore:
    """A `coatcheck.Store` whose methods are awaited. An async context manager that closes itself."""

    def __init__(self, store: Store) -> None:
        self._wrapped = store

    @property
    def url(self) -> str:
        return self._wrapped.url

    def __repr__(self) -> str:
        return f"Async{self._wrapped!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def sessions(self) -> list[SessionInfo]:
        """All sessions of the store, with expired ones until they are collected."""
        return await in_thread(lambda: list(self._wrapped.sessions()))

    async def tenant(self, name: str, *, quota_bytes: int | None = None) -> AsyncStore:
        """Return the store of a tenant, closed with this one."""
        return AsyncStore(await in_thread(self._wrapped.tenant, name, quota_bytes=quota_bytes))

    async def copy_to(self, other: AsyncStore | Store, *, progress: Progress | None = None) -> CopyReport:
        """Copy every session and ref to another store."""
        target = other._wrapped if isinstance(other, AsyncStore) else other
        return await in_long_thread(self._wrapped.copy_to, target, progress=progress)

    session = _hop(Store.session, AsyncSession)
    collect = _hop(Store.collect, _same, _always)
    verify = _hop(Store.verify, _same, _always)
    stats = _hop(Store.stats, _same)
    export = _hop(Store.export, _same, _always)
    holders = _hop(Store.holders, _same)
    import_ = _hop(Store.import_, _same, _always)
    close = _hop(Store.close, _same)


class AsyncTranscript:
    """A `coatcheck.transcript.Transcript` whose methods are awaited; `lines` and `messages` are async iterators. An
    async context manager that closes itself."""

    def __init__(self, transcript: Transcript) -> None:
        self._wrapped = transcript

    @property
    def path(self) -> Path:
        return self._wrapped.path

    @property
    def problems(self) -> list[Problem]:
        return self._wrapped.problems

    def __repr__(self) -> str:
        return f"Async{self._wrapped!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def lines(
        self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stored"
    ) -> AsyncGenerator[Line, None]:
        return _each(self._wrapped.lines(start, stop, mode=mode))

    def messages(
        self, start: int | None = None, stop: int | None = None, *, mode: Mode = "stubs"
    ) -> AsyncGenerator[Message, None]:
        return _each(self._wrapped.messages(start, stop, mode=mode))

    append = _hop(Transcript.append, _same)
    extend = _hop(Transcript.extend, _same)
    messages_for_model = _hop(Transcript.messages_for_model, _same)
    unpaired = _hop(Transcript.unpaired, _same)
    read = _hop(Transcript.read, _same)
    close = _hop(Transcript.close, _same)


async def _each(items: Iterator[R]) -> AsyncGenerator[R, None]:
    """Iterate over a generator that runs in threads, a few items at a time."""
    try:
        while batch := await in_thread(lambda: list(islice(items, _BATCH))):
            for one in batch:
                yield one
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # after a cancellation it may still run in its thread
                close()


async def transcript(
    path: str | os.PathLike[str],
    session: AsyncSession | None = None,
    *,
    format: Format | str | None = None,  # noqa: A002 - what users call it
    policy: Policy | None = None,
    read_only: bool = False,
) -> AsyncTranscript:
    """Open the transcript at a path: `coatcheck.transcript.Transcript` for async callers."""
    made = functools.partial(Transcript, format=format, policy=policy, read_only=read_only)
    return AsyncTranscript(await in_thread(made, path, session._wrapped if session else None))


def _opening(call: Callable[P, Store]) -> Callable[P, Coroutine[Any, Any, AsyncStore]]:
    @functools.wraps(call)
    async def opened(*args: P.args, **kwargs: P.kwargs) -> AsyncStore:
        return AsyncStore(await in_thread(call, *args, **kwargs))

    return opened


open = _opening(coatcheck.open)  # noqa: A001 - coatcheck.aio.open is the public name
