"""The API for async callers: the same methods, each run in a worker thread.

Each method takes the same arguments as its synchronous counterpart, and is awaited. A task that is
cancelled stops waiting at once; its call still runs to the end in the thread. Long calls (grep,
query, diff, search, collect, verify) have a few threads of their own, so that short calls do not
wait for them.

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
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar

import coatcheck
from coatcheck import executor
from coatcheck._toolkit import Description, Purpose, Style, Tool
from coatcheck.collect import Progress
from coatcheck.executor import ToolExecutor
from coatcheck.executor.run import WORKERS
from coatcheck.externalize import Policy
from coatcheck.lanes import in_long_thread, in_reading_thread, in_thread
from coatcheck.messages import Message
from coatcheck.refs import Ref
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


def _hop(
    call: Callable[Concatenate[Any, P], R], wrap: Callable[[R], W], *, long: bool | None = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, W]]:
    """Make a method of a wrapper: it runs `call` on the wrapped object in a thread, and wraps the
    result. With `long=None`, the target and the other arguments decide whether the call may take
    long."""

    @functools.wraps(call)
    async def hopped(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> W:
        work = functools.partial(call, self._wrapped, *args, **kwargs)
        if long is None and self._session is not None:
            target = args[0] if args else kwargs.get("target", kwargs.get("pointer"))
            return wrap(await in_reading_thread(self._session, target, kwargs, work))
        return wrap(await (in_long_thread if long else in_thread)(work))

    return hopped


def _same(answer: R) -> R:
    return answer


def _awaited(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Make a method of a wrapper that awaits the async method `call` of the wrapped object."""

    @functools.wraps(call)
    async def awaited(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await call(self._wrapped, *args, **kwargs)

    return awaited


def _threaded(
    call: Callable[P, R], wrap: Callable[[R], W], run: Callable[..., Awaitable[R]] = in_thread
) -> Callable[P, Coroutine[Any, Any, W]]:
    """Make an async function from a plain one: it runs in a thread, and its result is wrapped."""

    @functools.wraps(call)
    async def hopped(*args: P.args, **kwargs: P.kwargs) -> W:
        return wrap(await run(call, *args, **kwargs))

    return hopped


class _Wrapper(Generic[W]):
    def __init__(self, wrapped: W) -> None:
        self._wrapped = wrapped

    def __repr__(self) -> str:
        return f"Async{self._wrapped!r}"


class _Closable(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closable)


class _Closing(_Wrapper[C]):
    """An async context manager that closes what it wraps."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await in_thread(self._wrapped.close)


class AsyncStream(_Closing[BinaryIO]):
    """The bytes of an artifact, read in threads. An async context manager that closes itself."""

    async def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, by default all that is left; empty at the end."""
        return await in_thread(self._wrapped.read, size)

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return await in_thread(self._wrapped.seek, offset, whence)

    async def tell(self) -> int:
        return await in_thread(self._wrapped.tell)

    async def aclose(self) -> None:
        await in_thread(self._wrapped.close)


class AsyncSession(_Wrapper[Session]):
    """A `coatcheck.Session` whose methods are awaited."""

    @property
    def _session(self) -> Session:
        return self._wrapped

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

    put = _hop(Session.put, _same)
    get = _hop(Session.get, _same, long=None)
    open = _hop(Session.open, AsyncStream, long=None)
    ref = _hop(Session.ref, _same)
    read = _hop(Session.read, _same, long=None)
    coverage = _hop(Session.coverage, _same)
    preview = _hop(Session.preview, _same)
    externalize = _hop(Session.externalize, _same)
    materialize = _hop(Session.materialize, _same, long=None)
    write_file = _hop(Session.write_file, _same, long=None)
    search = _hop(Session.search, _same, long=True)
    count = _hop(Session.count, _same)
    artifacts = _hop(Session.artifacts, _same)
    list = _hop(Session.list, _same)
    names = _hop(Session.names, _same)
    grant = _hop(Session.grant, _same)
    pin = _hop(Session.pin, _same)
    unpin = _hop(Session.unpin, _same)
    version = _hop(Session.version, _same)
    claim = _hop(Session.claim, _same)
    claimant = _hop(Session.claimant, _same)
    record = _hop(Session.record, _same)
    record_all = _hop(Session.record_all, _same)
    records = _hop(Session.records, _same)
    first_records = _hop(Session.first_records, _same)
    annotate = _hop(Session.annotate, _same)
    forget = _hop(Session.forget, _same)
    end = _hop(Session.end, _same)
    viewed = _hop(Session.viewed, lambda session: AsyncSession(session))

    def offload(
        self,
        call: Callable[..., Any] | None = None,
        *,
        tool: str | None = None,
        policy: Policy | None = None,
    ) -> Callable[..., Any]:
        """Decorate a function as `Session.offload` does. The decorator is not awaited; the
        decorated function is. A plain function runs in a thread."""
        if call is None:
            return lambda function: self.offload(function, tool=tool, policy=policy)
        offloaded = self._wrapped.offload(call, tool=tool, policy=policy)
        if inspect.iscoroutinefunction(offloaded):
            return offloaded
        return _threaded(offloaded, _same, asyncio.to_thread)


@dataclass(frozen=True, slots=True)
class AsyncTool(Description):
    """A tool of `coatcheck.toolkit` whose `run` and `parts` are awaited."""

    _wrapped: Tool = field(repr=False)
    _session: Session | None = field(repr=False)

    def bind(self, session: AsyncSession | Session) -> AsyncTool:
        """Return this tool for a session."""
        return _async_tool(self._wrapped.bind(_plain(session)), _plain(session))

    run = _hop(Tool.run, _same, long=None)
    parts = _hop(Tool.parts, _same, long=None)


async def resolve_arguments(
    session: AsyncSession | Session,
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any] | None = None,
    *,
    foreign: bool = False,
    max_bytes: int | None = None,
) -> Mapping[str, Any]:
    """Replace pointers in arguments by their values, as `coatcheck.executor.resolve_arguments`
    does."""
    work = functools.partial(executor.resolve_arguments, foreign=foreign, max_bytes=max_bytes)
    return await in_thread(work, _plain(session), arguments, schema)


def toolkit(
    session: AsyncSession | Session | None = None,
    *,
    style: Style = "snake",
    prefix: str = "",
    max_chars: int | None = None,
    max_store_bytes: int | None = None,
    redact: Literal["store"] | None = None,
    handles: AsyncToolExecutor | ToolExecutor | None = None,
    only: Iterable[Purpose] | None = None,
    code: bool = True,
) -> list[AsyncTool]:
    """Return the tools of a session, as `coatcheck.toolkit` does."""
    bound = None if session is None else _plain(session)
    known = handles._wrapped if isinstance(handles, AsyncToolExecutor) else handles
    tools = coatcheck.toolkit(
        bound, style=style, prefix=prefix, max_chars=max_chars, max_store_bytes=max_store_bytes,
        redact=redact, handles=known, only=only, code=code,
    )  # fmt: skip
    return [_async_tool(tool, bound) for tool in tools]


def _async_tool(tool: Tool, session: Session | None) -> AsyncTool:
    return AsyncTool(tool.name, tool.description, tool.parameters, tool.read_only, tool, session)


class AsyncToolExecutor(_Wrapper[ToolExecutor]):
    """A `coatcheck.ToolExecutor` whose methods are awaited. Async tools run on the caller's event
    loop; those of `start` run on their own. Cancelling `run` abandons the call."""

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
        super().__init__(
            ToolExecutor(
                _plain(session), tools, policy=policy, timeout=timeout, max_workers=max_workers
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self._wrapped.names

    @property
    def tools(self) -> tuple[Description, ...]:
        return self._wrapped.tools

    run = _awaited(ToolExecutor.arun)
    run_all = _awaited(ToolExecutor.arun_all)
    wait = _awaited(ToolExecutor.await_)
    start = _hop(ToolExecutor.start, _same)
    poll = _hop(ToolExecutor.poll, _same)
    cancel = _hop(ToolExecutor.cancel, _same)


def _plain(session: AsyncSession | Session) -> Session:
    return session._wrapped if isinstance(session, AsyncSession) else session


def _found(found: tuple[Session, Ref] | None) -> tuple[AsyncSession, Ref] | None:
    return None if found is None else (AsyncSession(found[0]), found[1])


class AsyncStore(_Closing[Store]):
    """A `coatcheck.Store` whose methods are awaited. An async context manager that closes
    itself."""

    @property
    def url(self) -> str:
        return self._wrapped.url

    async def sessions(self) -> list[SessionInfo]:
        """All sessions of the store, including expired ones until they are collected."""
        return await in_thread(lambda: list(self._wrapped.sessions()))

    async def copy_to(
        self, other: AsyncStore | Store, *, progress: Progress | None = None
    ) -> CopyReport:
        """Copy every session and ref to another store."""
        target = other._wrapped if isinstance(other, AsyncStore) else other
        return await in_long_thread(self._wrapped.copy_to, target, progress=progress)

    session = _hop(Store.session, AsyncSession)
    session_info = _hop(Store.session_info, _same)
    session_page = _hop(Store.session_page, _same)
    tenant = _hop(Store.tenant, lambda store: AsyncStore(store))
    collect = _hop(Store.collect, _same, long=True)
    collect_if_due = _hop(Store.collect_if_due, _same, long=True)
    collected_at = _hop(Store.collected_at, _same)
    note_collected = _hop(Store.note_collected, _same)
    verify = _hop(Store.verify, _same, long=True)
    stats = _hop(Store.stats, _same)
    export = _hop(Store.export, _same, long=True)
    holders = _hop(Store.holders, _same)
    find = _hop(Store.find, _found)
    has_session = _hop(Store.has_session, _same)
    import_ = _hop(Store.import_, _same, long=True)
    close = _hop(Store.close, _same)


class AsyncTranscript(_Closing[Transcript]):
    """A `coatcheck.transcript.Transcript` whose methods are awaited; `lines` and `messages` are
    async iterators. An async context manager that closes itself."""

    @property
    def path(self) -> Path:
        return self._wrapped.path

    @property
    def problems(self) -> list[Problem]:
        return self._wrapped.problems

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
        if isinstance(items, Generator):
            with contextlib.suppress(
                ValueError
            ):  # after a cancellation it may still run in its thread
                items.close()


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


open = _threaded(coatcheck.open, AsyncStore)  # noqa: A001 - coatcheck.aio.open is the public name
