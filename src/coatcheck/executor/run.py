"""`ToolExecutor`: runs the tool calls of a model and returns outcomes that fit its context.

Each call has two sides. The tool runs in its own thread or on an event loop, and is abandoned when
its time is up. The other side waits, stores, and always returns: in the caller's thread for `run`,
else in one of a bounded number of worker threads. Only that side stores anything. It checks the
turn's deadline before each step that stores; past it, nothing more is stored, and a stream on its
way into the store is dropped without a trace.
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
from dataclasses import replace
from typing import Any, Final

from coatcheck._toolkit import Description
from coatcheck.checks import whole
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.executor.attempts import Attempt
from coatcheck.executor.binding import bind, nearest
from coatcheck.executor.jobs import Job
from coatcheck.executor.outcomes import Handle, Running, ToolCall, ToolOutcome
from coatcheck.executor.threads import Workers, start_thread
from coatcheck.executor.turns import Deadlines, Turn, checked_seconds
from coatcheck.executor.waiting import Waiting, busy, not_begun, refused
from coatcheck.externalize import Policy, configured
from coatcheck.externalize.policy import READ_ARGUMENTS, READ_TOOL
from coatcheck.ids import clip
from coatcheck.session import Session

WORKERS: Final = 32
FINISHED: Final = 256
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "coatcheck_inside_tool", default=False
)


class ToolExecutor:
    """Runs tools for one session. Safe to share between threads and event loops; uses no thread
    while idle.

    `tools` are functions (plain, async or generators) and objects with `name` and `run`, such as
    those of `coatcheck.toolkit`; a mapping gives them other names. `timeout` is the default for
    each call, in seconds. `max_workers` limits three things: concurrent calls of `run_all`,
    concurrent started calls, and abandoned calls that are still running. A call over the limit of
    started or abandoned ones ends with the error code "busy"."""

    def __init__(
        self,
        session: Session,
        tools: Iterable[object] | Mapping[str, Callable[..., Any]],
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
        max_workers: int = WORKERS,
    ) -> None:
        whole(max_workers, "max_workers", least=1)
        if not isinstance(session, Session):
            raise InvalidArgument(
                f"session must be a Session, got a {type(session).__name__}",
                hint="for an async session, use the executor of coatcheck.aio",
            )
        self.session = session
        self._tools = bind(tools)
        self._given_policy = policy
        self._timeout = checked_seconds(timeout, "timeout")
        self._most = max_workers
        self._workers = Workers(max_workers)
        self._lock = threading.RLock()
        self._abandoned_calls = 0
        self._started: dict[str, tuple[Handle, Job]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @functools.cached_property
    def tools(self) -> tuple[Description, ...]:
        """Descriptions of the tools for a model, in order: `[tool.as_openai() for tool in
        executor.tools]`.

        A function is described by its docstring, annotations and defaults."""
        return tuple(tool.description() for tool in self._tools.values())

    def run(
        self, call: ToolCall, *, timeout: float | None = None, turn: Turn | None = None
    ) -> ToolOutcome:
        """Run one call and wait for it. Whatever the tool does, this returns an outcome, except
        that control-C in the main thread is raised. Once `turn` is over, nothing is stored.

        A function that has no time limit runs in this thread, unless an event loop runs here."""
        attempt = Attempt(self._count_abandoned)
        return self._conduct(
            call, self._effective(timeout), turn or Turn(), None, attempt, may_run_here=True
        )

    def run_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        turn: Turn | None = None,
    ) -> list[ToolOutcome]:
        """Run the calls of a turn concurrently and return their outcomes in the same order.

        `timeout` is for each call, `deadline` for the whole turn, both in seconds. After the
        deadline nothing more is stored; a store step that has begun is completed. A `turn` can be
        passed instead of its deadline."""
        turn = turn or Turn(deadline)
        jobs = [self._job(call, timeout, turn, None) for call in calls]
        try:
            for job in jobs:
                self._submit(job)
            return [self._collected(call, job, turn) for call, job in zip(calls, jobs, strict=True)]
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    async def arun(
        self, call: ToolCall, *, timeout: float | None = None, turn: Turn | None = None
    ) -> ToolOutcome:
        """`run` for async callers: async tools run on the caller's event loop, others in threads.
        Cancelling it abandons the call."""
        return (await self.arun_all([call], timeout=timeout, turn=turn))[0]

    async def arun_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        turn: Turn | None = None,
    ) -> list[ToolOutcome]:
        """`run_all` for async callers."""
        turn = turn or Turn(deadline)
        loop = asyncio.get_running_loop()
        jobs = [self._job(call, timeout, turn, loop) for call in calls]
        waiting = [asyncio.wrap_future(job.outcome) for job in jobs]
        try:
            for job in jobs:
                self._submit(job)
            if waiting:
                await asyncio.wait(waiting, timeout=turn.left())
                for job in jobs:
                    job.outcome.cancel()  # only those that have not begun
                await asyncio.wait(waiting)
            return [self._collected(call, job, turn) for call, job in zip(calls, jobs, strict=True)]
        finally:
            for future, job in zip(waiting, jobs, strict=True):
                future.cancel()
                job.cancel()

    def start(self, call: ToolCall, *, timeout: float | None = None) -> Handle:
        """Start a call that may take long, and return its handle. The last 256 outcomes are
        kept."""
        job = self._job(call, timeout, Turn(), None)
        job.outcome.set_running_or_notify_cancel()

        with self._lock:
            handle = Handle(secrets.token_hex(4), call.id, call.name)
            while handle.id in self._started:
                handle = Handle(secrets.token_hex(4), call.id, call.name)
            ended = [key for key, (_, one) in self._started.items() if one.outcome.done()]
            is_full = len(self._started) - len(ended) >= self._most
            for key in ended[: max(0, len(ended) - FINISHED + 1)]:
                del self._started[key]
            self._started[handle.id] = handle, job
        if is_full or not start_thread(job.conduct):
            message = (
                f"{call.name} was not started: too many calls are running; "
                "wait for one to end, then try again"
            )
            job.answer(refused(call, "busy", message))
        return handle

    def poll(self, handle: Handle | str) -> ToolOutcome:
        """Return the outcome of a started call, or `Running`. Raises `NotFound` for an unknown
        handle."""
        return self.wait(handle, timeout=0)

    def wait(self, handle: Handle | str, *, timeout: float | None = None) -> ToolOutcome:
        """Return the outcome of a started call, or `Running` if it has not ended within `timeout`
        seconds."""
        found, call = self._find(handle)
        try:
            return call.outcome.result(timeout)
        except TimeoutError:
            text = f"{clip(found.name)} is still running; ask again with the handle {found.id!r}"
            return Running(call_id=found.call_id, name=found.name, text=text, handle=found.id)

    async def await_(self, handle: Handle | str, *, timeout: float | None = None) -> ToolOutcome:
        """`wait` for async callers."""
        _, call = self._find(handle)
        ended = asyncio.wrap_future(call.outcome)
        await asyncio.wait([ended], timeout=timeout)
        ended.cancel()  # only the waiting, not the call
        return self.poll(handle)

    def cancel(self, handle: Handle | str) -> None:
        """Abandon a started call: it ends with the error code "cancelled", unless its result is
        being stored."""
        _, call = self._find(handle)
        call.cancel()

    @functools.cached_property
    def _policy(self) -> Policy:
        """The policy, with stubs that name only what this agent's tools can do.

        A `read_tool` that is neither among the tools nor the default is assumed to be run by the
        host."""
        policy = self._given_policy or configured(self.session.store.settings)
        inline: dict[str, Any] = {
            tool.name: "never" for tool in self._tools.values() if tool.stays_inline
        }
        if inline:
            policy = replace(policy, tools={**inline, **policy.tools})
        if policy.read_tool is None:
            return policy
        named = self._tools.get(policy.read_tool)
        ours = next((tool for tool in self._tools.values() if tool.purpose == "get"), None)
        if named is None and ours is None and policy.read_tool != READ_TOOL:
            return policy
        reader = named if named is not None and named.accepts("pointer") else ours
        resolves = any(tool.resolves for tool in self._tools.values())
        if reader is None:
            return replace(policy, read_tool=None, resolves=resolves)
        possible = (*READ_ARGUMENTS, "code")
        accepted = tuple(name for name in possible if reader.accepts(name))
        return replace(policy, read_tool=reader.name, read_arguments=accepted, resolves=resolves)

    def _find(self, handle: Handle | str) -> tuple[Handle, Job]:
        key = handle.id if isinstance(handle, Handle) else handle
        found = self._started.get(key)
        if found is None:
            raise NotFound(
                f"no started call has the handle {clip(str(key))}",
                hint="handles come from start(); old ones expire",
            )
        return found

    def _job(
        self,
        call: ToolCall,
        timeout: float | None,
        turn: Turn,
        loop: asyncio.AbstractEventLoop | None,
    ) -> Job:
        run = functools.partial(self._conduct, call, self._effective(timeout), turn, loop)
        return Job(run, Attempt(self._count_abandoned))

    def _submit(self, job: Job) -> None:
        """Queue a job. One that a tool submits gets its own thread, because its caller may occupy a
        worker."""
        if not _inside.get():
            self._workers.submit(job)
        elif not start_thread(job):
            job()

    def _conduct(
        self,
        call: ToolCall,
        timeout: float | None,
        turn: Turn,
        loop: asyncio.AbstractEventLoop | None,
        attempt: Attempt,
        *,
        may_run_here: bool = False,
    ) -> ToolOutcome:
        tool = self._tools.get(call.name)
        if tool is None:
            return refused(call, "unknown_tool", self._unknown(call.name))
        policy = self._policy
        deadlines = Deadlines(turn, timeout)
        if deadlines.turn_is_over:
            return not_begun(call)
        if self._abandoned_calls >= self._most:
            return busy(call)

        def begin(work: Callable[[], None]) -> bool:
            return attempt.begin(functools.partial(contextvars.copy_context().run, work))

        def work(hand_over: Callable[[Callable[[], None]], bool] | None = None) -> None:
            _inside.set(True)
            attempt.run(
                lambda resources: tool.call(call, self.session, resources, policy), loop, hand_over
            )

        began = time.monotonic()
        if may_run_here and deadlines.until is None and asyncio._get_running_loop() is None:
            contextvars.copy_context().run(work, begin)
        elif not begin(work):
            return busy(call)
        outcome = Waiting(self.session, policy, call, attempt, deadlines).outcome()
        return replace(outcome, duration=time.monotonic() - began)

    def _collected(self, call: ToolCall, job: Job, turn: Turn) -> ToolOutcome:
        try:
            return job.outcome.result(turn.left())
        except TimeoutError:
            if not job.outcome.cancel():
                return (
                    job.outcome.result()
                )  # it checks the deadline itself, and is in its last store step
        except CancelledError:
            pass
        return not_begun(call)

    def _unknown(self, name: str) -> str:
        names = list(self._tools)
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        known = f"; available tools: {', '.join(names[:20])}{more}" if names else ""
        return f"there is no tool {clip(name)}{nearest(name, names)}{known}"

    def _effective(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else checked_seconds(timeout, "timeout")

    def _count_abandoned(self, change: int) -> None:
        with self._lock:
            self._abandoned_calls += change
