"""`ToolExecutor`: runs what a model asked for, and answers with outcomes that fit its context.

Each call has two sides. Its tool runs in a thread of its own (what it awaits, on an event loop) and is given up when
time is up. The other side waits, stores, and always comes back: that is the caller's thread for `run`, and one of a
bounded crew for everything else.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck.descriptions import Description
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.executor.attempt import Attempt
from coatcheck.executor.binding import bind, nearest
from coatcheck.executor.calls import ToolCall
from coatcheck.executor.crew import Crew, Job, Started, hire
from coatcheck.executor.outcomes import Running, TimedOut, ToolOutcome
from coatcheck.executor.settle import Limits, Settling, refused
from coatcheck.ids import clip
from coatcheck.scope import is_seconds
from coatcheck.session import Session

if TYPE_CHECKING:
    from coatcheck.externalize import Policy

WORKERS: Final = 32
FINISHED: Final = 256
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("coatcheck_inside_tool", default=False)


@dataclass(frozen=True, slots=True)
class Handle:
    """A started call: `id` is what to poll and wait by, here or through a model."""

    id: str
    call_id: str
    name: str


class ToolExecutor:
    """Runs tools for one session. Safe to share between threads and event loops; holds no thread while idle.

    `tools` are functions, plain or async, returning or yielding, and objects with `name` and `run` such as those of
    `coatcheck.toolkit`; a mapping names them itself. `timeout` is the default for each call, in seconds. At most
    `max_workers` calls of `run_all` run at once, as many started ones, and as many that were given up but do not end:
    when these are all taken, calls are answered with an error of code "busy"."""

    def __init__(
        self,
        session: Session,
        tools: Iterable[object] | Mapping[str, Callable[..., Any]],
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
        max_workers: int = WORKERS,
    ) -> None:
        if max_workers < 1:
            raise InvalidArgument(f"{max_workers} workers do nothing", hint="one at least")
        if not isinstance(session, Session):
            raise InvalidArgument(
                f"a {type(session).__name__} is no session", hint="coatcheck.aio has an executor for its own"
            )
        self.session = session
        self._tools = bind(tools)
        self._policy = self._naming_our_own(policy)
        self._timeout = _seconds(timeout)
        self._most = max_workers
        self._crew = Crew(max_workers)
        self._lock = threading.Lock()
        self._given_up = 0
        self._started: dict[str, tuple[Handle, Started]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @functools.cached_property
    def tools(self) -> tuple[Description, ...]:
        """What to tell a model of the tools, in their order: `[tool.as_openai() for tool in executor.tools]`.

        A function is described by its docstring, annotations and defaults."""
        return tuple(tool.description() for tool in self._tools.values())

    def run(self, call: ToolCall, *, timeout: float | None = None) -> ToolOutcome:
        """Run one call and wait for it. Whatever the tool does, the answer is an outcome."""
        return self._conduct(call, self._given(timeout), None, None, Attempt(self._late))

    def run_all(
        self, calls: Sequence[ToolCall], *, timeout: float | None = None, deadline: float | None = None
    ) -> list[ToolOutcome]:
        """Run the calls of a turn side by side; their outcomes in the same order.

        `timeout` is for each call, `deadline` for the turn as a whole, both in seconds. Once the turn is past its
        deadline nothing more is stored for it; a store step that had begun is waited for."""
        turn_end = _end(deadline)
        jobs = [self._job(call, timeout, turn_end, None) for call in calls]
        try:
            for job in jobs:
                self._submit(job)
            return [self._collected(call, job, turn_end) for call, job in zip(calls, jobs, strict=True)]
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    async def arun(self, call: ToolCall, *, timeout: float | None = None) -> ToolOutcome:
        """`run` for async callers: async tools run on the caller's event loop, all else in threads. Cancelling it gives
        the call up."""
        return (await self.arun_all([call], timeout=timeout))[0]

    async def arun_all(
        self, calls: Sequence[ToolCall], *, timeout: float | None = None, deadline: float | None = None
    ) -> list[ToolOutcome]:
        """`run_all` for async callers."""
        turn_end = _end(deadline)
        loop = asyncio.get_running_loop()
        jobs = [self._job(call, timeout, turn_end, loop) for call in calls]
        waiting = [asyncio.wrap_future(job.outcome) for job in jobs]
        try:
            for job in jobs:
                self._submit(job)
            if waiting:
                await asyncio.wait(waiting, timeout=_left(turn_end))
                for job in jobs:
                    job.outcome.cancel()  # those that never began, and no others
                await asyncio.wait(waiting)
            return [self._collected(call, job, turn_end) for call, job in zip(calls, jobs, strict=True)]
        finally:
            for future, job in zip(waiting, jobs, strict=True):
                future.cancel()
                job.cancel()

    def start(self, call: ToolCall, *, timeout: float | None = None) -> Handle:
        """Begin a call that may take long. Ask for it by the handle; the outcomes of the last 256 to end are kept."""
        job = self._job(call, timeout, None, None)
        job.outcome.set_running_or_notify_cancel()
        with self._lock:
            handle = Handle(secrets.token_hex(4), call.id, call.name)
            while handle.id in self._started:
                handle = Handle(secrets.token_hex(4), call.id, call.name)
            ended = [key for key, (_, one) in self._started.items() if one.outcome.done()]
            is_full = len(self._started) - len(ended) >= self._most
            for key in ended[: max(0, len(ended) - FINISHED + 1)]:
                del self._started[key]
            self._started[handle.id] = handle, job.started
        if is_full or not hire(job.conduct):
            message = f"{call.name} was not started: too many calls are running; wait for one to end, then try again"
            job.outcome.set_result(refused(call, "busy", message))
        return handle

    def poll(self, handle: Handle | str) -> ToolOutcome:
        """The outcome of a started call, or `Running`. Raises `NotFound` for a handle that is not known."""
        return self.wait(handle, timeout=0)

    def wait(self, handle: Handle | str, *, timeout: float | None = None) -> ToolOutcome:
        """The outcome of a started call, or `Running` where it has not ended within `timeout` seconds."""
        found, call = self._find(handle)
        try:
            return call.outcome.result(timeout)
        except TimeoutError:
            text = f"{clip(found.name)} is still running; ask again by the handle {found.id!r}"
            return Running(call_id=found.call_id, name=found.name, text=text, handle=found.id)

    async def await_(self, handle: Handle | str, *, timeout: float | None = None) -> ToolOutcome:
        """`wait` for async callers."""
        _, call = self._find(handle)
        ended = asyncio.wrap_future(call.outcome)
        await asyncio.wait([ended], timeout=timeout)
        ended.cancel()  # the waiting, not the call
        return self.poll(handle)

    def cancel(self, handle: Handle | str) -> None:
        """Give a started call up: it ends as an error of code "cancelled", unless its result is being stored."""
        _, call = self._find(handle)
        call.cancel()

    def _naming_our_own(self, policy: Policy | None) -> Policy | None:
        """The policy, whose stubs name the reading tool as this agent has it: with a prefix, or in another style."""
        reading = [tool.name for tool in self._tools.values() if tool.reads]
        named = "get_artifact" if policy is None else policy.read_tool
        if not reading or named is None or named in self._tools:
            return policy
        from coatcheck.externalize import Policy  # with all that stands behind it, for those who need it

        return replace(policy or Policy(), read_tool=reading[0])

    def _find(self, handle: Handle | str) -> tuple[Handle, Started]:
        key = handle.id if isinstance(handle, Handle) else handle
        with self._lock:
            found = self._started.get(key)
        if found is None:
            raise NotFound(
                f"no started call goes by the handle {clip(str(key))}", hint="handles come from start; old ones lapse"
            )
        return found

    def _job(
        self, call: ToolCall, timeout: float | None, turn_end: float | None, loop: asyncio.AbstractEventLoop | None
    ) -> Job:
        run = functools.partial(self._conduct, call, self._given(timeout), turn_end, loop)
        return Job(run, Attempt(self._late))

    def _submit(self, job: Job) -> None:
        """To the crew; but what a tool itself asks for gets its own thread, since its caller may hold a place."""
        if not _inside.get():
            self._crew.submit(job)
        elif not hire(job):
            job()

    def _conduct(
        self,
        call: ToolCall,
        timeout: float | None,
        turn_end: float | None,
        loop: asyncio.AbstractEventLoop | None,
        attempt: Attempt,
    ) -> ToolOutcome:
        tool = self._tools.get(call.name)
        if tool is None:
            return refused(call, "unknown_tool", self._unknown(call.name))
        limits = Limits.of(timeout, turn_end)
        if limits.turn_is_over:
            return _never_begun(call)
        busy = f"{call.name} was not called: too many calls are running that were given up; try again later"
        with self._lock:
            if self._given_up >= self._most:
                return refused(call, "busy", busy)

        def work() -> None:
            _inside.set(True)
            attempt.run(lambda held: tool.call(call, self.session, held), loop)

        if not attempt.begin(functools.partial(contextvars.copy_context().run, work)):
            return refused(call, "busy", busy)
        return Settling(self.session, self._policy, call, attempt, limits).outcome()

    def _collected(self, call: ToolCall, job: Job, turn_end: float | None) -> ToolOutcome:
        try:
            try:
                return job.outcome.result(_left(turn_end))
            except TimeoutError:
                if job.outcome.cancel():
                    return _never_begun(call)
                return job.outcome.result()  # it sees the clock itself: what it does now is its last store step
        except CancelledError:
            return _never_begun(call)

    def _unknown(self, name: str) -> str:
        names = list(self._tools)
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        there = f"; there is {', '.join(names[:20])}{more}" if names else ""
        return f"there is no tool {clip(name)}{nearest(name, names)}{there}"

    def _given(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else _seconds(timeout)

    def _late(self, change: int) -> None:
        with self._lock:
            self._given_up += change


def _never_begun(call: ToolCall) -> TimedOut:
    text = f"the time for this turn was up before {clip(call.name)} was called"
    return TimedOut(call_id=call.id, name=call.name, text=text, scope="turn")


def _seconds(given: float | None) -> float | None:
    if given is None:
        return None
    if not is_seconds(given):
        raise InvalidArgument(f"a time of {given!r} is no number of seconds", hint="or None for no limit")
    return None if given >= threading.TIMEOUT_MAX / 2 else given


def _end(deadline: float | None) -> float | None:
    seconds = _seconds(deadline)
    return None if seconds is None else time.monotonic() + seconds


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
