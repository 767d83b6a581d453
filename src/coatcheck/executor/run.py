"""`ToolExecutor`: runs the tool calls of a model and returns outcomes that fit its context.

Each call has two sides. The tool runs in its own thread or on an event loop, and is abandoned when
its time is up. The other side waits, stores, and always returns: in the caller's thread for `run`,
else in one of a bounded number of worker threads. Only that side stores anything. It checks the
turn's deadline before each step that stores; past it, nothing more is stored, and a stream on its
way into the store is dropped without a trace.

An outcome has `to_model_content()` for the model. Branch on its class:

ToolOutcome
├── Result               the tool returned a value small enough to be sent unchanged
├── ArtifactReference    the value is in the store; the model gets its stub
├── ToolError            the call was invalid, or the tool failed
├── TimedOut             the tool, or the whole turn, ran out of time
└── Running              a started call that has not ended yet
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from coatcheck._toolkit import Description
from coatcheck.checks import whole
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.executor import threads
from coatcheck.executor.binding import BadCall, bind, nearest
from coatcheck.executor.threads import Turn
from coatcheck.externalize import Decision, Outcome, Policy, configured
from coatcheck.externalize.policy import READ_ARGUMENTS, READ_TOOL
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.truncation import PARTIAL, Truncation
from coatcheck.values import decode_text

WORKERS: Final = 32
FINISHED: Final = 256
_MAX_ERROR: Final = 12_000  # characters of an error that are sent whatever the policy is
_MAX_LINE: Final = 500
_BEGINNING: Final = 4_000  # characters shown of a stream that could not be stored
_HERE: Final = str(Path(__file__).parent)
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "coatcheck_inside_tool", default=False
)


ErrorCode = Literal[
    "unknown_tool",
    "invalid_arguments",
    "unresolved_pointer",
    "exception",
    "unusable_result",
    "busy",
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: the provider's id, the tool's name, and the arguments as a dict or as JSON
    text."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)

    @classmethod
    def from_openai(cls, item: object) -> ToolCall:
        """Create a call from an entry of `message.tool_calls` or a `function_call` item of the
        Responses API."""
        function = _field(item, "function")
        if function is None:
            return cls(_text(item, "call_id"), _text(item, "name"), _field(item, "arguments") or "")
        return cls(_text(item, "id"), _text(function, "name"), _field(function, "arguments") or "")

    @classmethod
    def from_anthropic(cls, block: object) -> ToolCall:
        """Create a call from a `tool_use` block, as a dict or an object."""
        return cls(_text(block, "id"), _text(block, "name"), _field(block, "input") or {})

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as a dict. Raises `InvalidArgument` if they are not a JSON
        object."""
        given: object = self.arguments
        if isinstance(given, str):
            try:
                given = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    f"the arguments are not JSON: {clip(str(error), 200)}",
                    hint="send one JSON object",
                ) from error
        if given is None:
            return {}
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise InvalidArgument(
                f"the arguments are a {type(given).__name__}, not an object",
                hint='send one JSON object, e.g. {"q": "…"}',
            )
        return dict(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """`text` is what the model gets. `ref` is the stored artifact, if there is one. `duration` is
    how long the call took, in seconds, including storing its result; 0 if the tool was not
    called."""

    call_id: str
    name: str
    text: str
    ref: Ref | None = None
    duration: float = field(default=0.0, compare=False)
    _shown: Outcome | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> Decision | None:
        """Why the value left the context or stayed; None if the tool returned none."""
        return None if self._shown is None else self._shown.why

    @property
    def is_error(self) -> bool:
        """Whether to set the error flag that some providers have."""
        return isinstance(self, ToolError | TimedOut)

    def to_model_content(self) -> str:
        """Return the text for the model: a value within the limit, a stub, or a bounded error."""
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ToolOutcome):
    """The tool returned a value. `content` is the value in its original shape: text, data, or a
    list of content blocks in which large blocks are stubs, with their artifacts in `refs`.
    `failure` says why the store could not keep a large value; then `text` is its head and tail."""

    content: Any = None
    refs: tuple[Ref, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReference(ToolOutcome):
    """The value was large: `text` is its stub, `ref` the artifact."""

    content: Any = None
    refs: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolError(ToolOutcome):
    """The call failed. `code` is stable, `message` is one line. `cause` is what the tool raised,
    None if it did not run. If `partial`, `text` and `ref` have what the tool yielded before it
    failed."""

    code: ErrorCode
    message: str
    partial: bool = False
    cause: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(ToolOutcome):
    """The time of the call or of the turn was up, as `scope` says. If `partial`, `text` and `ref`
    have what the tool yielded by then."""

    scope: Literal["call", "turn"]
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(ToolOutcome):
    """The call has not ended. Ask again with `handle`."""

    handle: str


def _field(item: object, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def _text(item: object, key: str) -> str:
    found = _field(item, key)
    if not isinstance(found, str):
        raise InvalidArgument(f"the tool call has no {key!r}: {clip(repr(item), 200)}")
    return found


@dataclass(frozen=True, slots=True)
class Handle:
    """A started call. Its `id` is what `poll` and `wait` take."""

    id: str
    call_id: str
    name: str


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
        self._timeout = threads.checked_seconds(timeout, "timeout")
        self._most = max_workers
        self._workers = threads.Workers(max_workers)
        self._lock = threading.RLock()
        self._abandoned_calls = 0
        self._started: dict[str, tuple[Handle, threads.Job]] = {}

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
        attempt = threads.Attempt(self._count_abandoned)
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
        if is_full or not threads.start_thread(job.conduct):
            message = (
                f"{call.name} was not started: too many calls are running; "
                "wait for one to end, then try again"
            )
            job.answer(_refused(call, "busy", message))
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
        ours = next((tool for tool in self._tools.values() if tool.purpose == "get"), None)
        named = self._tools.get(policy.read_tool)
        if named is not None and named.takes is not None and "pointer" not in named.takes:
            named = None  # a tool of that name for something else
        elif named is None and ours is None and policy.read_tool != READ_TOOL:
            return policy
        reader = named or ours
        resolves = any(tool.resolves for tool in self._tools.values())
        if reader is None:
            return replace(policy, read_tool=None, resolves=resolves)
        takes = tuple(
            name for name in READ_ARGUMENTS if reader.takes is None or name in reader.takes
        )
        return replace(policy, read_tool=reader.name, read_arguments=takes, resolves=resolves)

    def _find(self, handle: Handle | str) -> tuple[Handle, threads.Job]:
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
    ) -> threads.Job:
        run = functools.partial(self._conduct, call, self._effective(timeout), turn, loop)
        return threads.Job(run, threads.Attempt(self._count_abandoned))

    def _submit(self, job: threads.Job) -> None:
        """Queue a job. One that a tool submits gets its own thread, because its caller may occupy a
        worker."""
        if not _inside.get():
            self._workers.submit(job)
        elif not threads.start_thread(job):
            job()

    def _conduct(
        self,
        call: ToolCall,
        timeout: float | None,
        turn: Turn,
        loop: asyncio.AbstractEventLoop | None,
        attempt: threads.Attempt,
        *,
        may_run_here: bool = False,
    ) -> ToolOutcome:
        tool = self._tools.get(call.name)
        if tool is None:
            return _refused(call, "unknown_tool", self._unknown(call.name))
        policy = self._policy
        deadlines = threads.Deadlines(turn, timeout)
        if deadlines.turn_is_over:
            return _not_begun(call)
        if self._abandoned_calls >= self._most:
            return _busy(call)

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
            return _busy(call)
        outcome = _Waiting(self.session, policy, call, attempt, deadlines).outcome()
        object.__setattr__(
            outcome, "duration", time.monotonic() - began
        )  # it is new, so nobody else has it
        return outcome

    def _collected(self, call: ToolCall, job: threads.Job, turn: Turn) -> ToolOutcome:
        try:
            return job.outcome.result(turn.left())
        except TimeoutError:
            if not job.outcome.cancel():
                return (
                    job.outcome.result()
                )  # it checks the deadline itself, and is in its last store step
        except CancelledError:
            pass
        return _not_begun(call)

    def _unknown(self, name: str) -> str:
        names = list(self._tools)
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        known = f"; available tools: {', '.join(names[:20])}{more}" if names else ""
        return f"there is no tool {clip(name)}{nearest(name, names)}{known}"

    def _effective(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else threads.checked_seconds(timeout, "timeout")

    def _count_abandoned(self, change: int) -> None:
        with self._lock:
            self._abandoned_calls += change


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The waiting side of one call: makes an outcome of what the tool gives."""

    session: Session
    policy: Policy
    call: ToolCall
    attempt: threads.Attempt
    deadlines: threads.Deadlines

    def outcome(self) -> ToolOutcome:
        """Wait for the tool and store its output. Raises only what interrupts the waiting
        thread."""
        try:
            output = threads.OutputStream(self.attempt, self.deadlines)
            head = output.head()
            shown = None
            if self.attempt.yields:
                shown = (
                    self._small(head, output.ending)
                    if output.is_over
                    else self._large(head, output)
                )
            if output.time_was_up:
                return self._timed_out("call", shown)
            if isinstance(output.ending, threads.Failed):
                return self._failed(output.ending.error, shown)
            if shown is None and output.ending is not None:
                shown = self._shown(output.ending.value)
            assert shown is not None
            return self._returned(shown)
        except threads.TurnOver:
            return self._timed_out("turn", None)
        except threads.Cancelled:
            return _refused(self.call, "cancelled", f"{self.call.name} was cancelled")
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything when it is serialized
            why = "".join(traceback.format_exception_only(error))
            return _refused(
                self.call,
                "unusable_result",
                f"{self.call.name} returned a value that cannot be passed on: {why}",
            )
        finally:
            self.attempt.stop()

    def _returned(self, shown: Outcome) -> ToolOutcome:
        fields: dict[str, Any] = {
            "call_id": self.call.id, "name": self.call.name, "text": shown.text, "ref": shown.ref,
            "content": shown.content, "refs": shown.refs, "_shown": shown,
        }  # fmt: skip
        return (
            ArtifactReference(**fields)
            if shown.is_stub
            else Result(**fields, failure=shown.failure)
        )

    def _small(self, head: bytes, ending: threads.Ending | None) -> Outcome | None:
        """Return the outcome of output that fits in memory. Partial output is stored however small
        it is."""
        value: str | bytes = decode_text(head) if self.attempt.is_text else head
        if ending is not None and not isinstance(ending, threads.Failed):
            return self._shown(value)
        if not head:
            return None
        return self._kept(self._shown(value, cut=PARTIAL), value)

    def _large(self, head: bytes, output: threads.OutputStream) -> Outcome:
        """Stream large output into the store. If that fails, show its beginning."""
        shown = self._shown(output)
        is_whole = output.ending is not None and not isinstance(output.ending, threads.Failed)
        if shown.failure is None and is_whole:
            return shown
        if shown.ref is not None:  # its stub was written before the tool failed
            again = self._shown(shown.ref, is_counted=False, cut=PARTIAL)
            return replace(shown, text=again.text, content=again.content)
        if shown.failure is None:
            return self._kept(shown, shown.content)
        start = head[: _BEGINNING * 4].decode("utf-8", "replace")[:_BEGINNING]
        return replace(shown, text=f"{shown.text}\nIt began:\n{start}")

    def _kept(self, shown: Outcome, value: object) -> Outcome:
        """Store partial output, whatever the policy is, and add its ref."""
        if shown.ref is not None or shown.failure is not None:
            return shown
        kept = self._shown(value, always=True, is_counted=False)
        return replace(shown, ref=kept.ref, refs=kept.refs, failure=kept.failure)

    def _shown(
        self,
        value: object,
        *,
        always: bool = False,
        is_error: bool = False,
        is_counted: bool = True,
        cut: Truncation | None = None,
    ) -> Outcome:
        """Externalize a value: the store step. A shrinking function for the tool does not apply to
        its errors. `cut` is what is missing from the value."""
        if self.deadlines.turn_is_over:
            raise threads.TurnOver
        policy = self.policy
        if is_error and callable(policy.tools.get(self.call.name)):
            policy = replace(policy, tools={})
        if always:
            policy = replace(policy, enabled=True, tools={self.call.name: "always"})
        given = self.call.arguments if isinstance(self.call.arguments, Mapping) else None
        return self.session.externalize(
            value, tool=self.call.name, call_id=self.call.id or None, policy=policy,
            arguments=given, source=None if is_counted else UNCOUNTED, cut=cut,
        )  # fmt: skip

    def _failed(self, error: BaseException, yielded: Outcome | None) -> ToolOutcome:
        if isinstance(error, BadCall):
            whole = mask(f"{self.call.name} was not called: {error}")
            return self._error(error.code, _line(whole), whole)
        line = _line(f"{self.call.name} failed: {''.join(traceback.format_exception_only(error))}")
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        return self._error("exception", line, f"{line}\n{mask(text)}".rstrip(), yielded, error)

    def _error(
        self,
        code: ErrorCode,
        line: str,
        whole: str,
        yielded: Outcome | None = None,
        cause: BaseException | None = None,
    ) -> ToolError:
        text, ref = self._bounded(line, whole) if whole != line else (line, None)
        if yielded is not None:
            text, ref = _partial(text, yielded), yielded.ref
        return ToolError(
            call_id=self.call.id, name=self.call.name, text=text, ref=ref, code=code, message=line,
            partial=yielded is not None, cause=cause,
        )  # fmt: skip

    def _bounded(self, line: str, whole: str) -> tuple[str, Ref | None]:
        """Return the text of an error, and its ref if it was large enough to be stored."""
        try:
            shown = self._shown(whole, is_error=True)
        except threads.TurnOver:
            return _cut(whole), None
        return f"{line}\n{shown.text}" if shown.is_stub else _cut(shown.text), shown.ref

    def _timed_out(self, scope: Literal["call", "turn"], yielded: Outcome | None) -> TimedOut:
        name = clip(self.call.name)
        if scope == "turn":
            line = f"the time for this turn was up before {name} ended; nothing of it was stored"
        else:
            line = (
                f"{name} timed out after {self.deadlines.seconds or 0:g} seconds and was abandoned"
            )
        return TimedOut(
            call_id=self.call.id, name=self.call.name,
            text=line if yielded is None else _partial(line, yielded),
            ref=yielded.ref if yielded else None, scope=scope, partial=yielded is not None,
        )  # fmt: skip


def _refused(call: ToolCall, code: ErrorCode, message: str) -> ToolError:
    """Return the error of a call that did not reach its tool."""
    line = _line(message)
    return ToolError(call_id=call.id, name=call.name, text=line, code=code, message=line)


def _busy(call: ToolCall) -> ToolError:
    message = (
        f"{call.name} was not called: too many abandoned calls are still running; try again later"
    )
    return _refused(call, "busy", message)


def _partial(error: str, yielded: Outcome) -> str:
    """Return an error followed by what the tool had yielded."""
    where = f" (kept as {yielded.ref.pointer})" if yielded.ref and not yielded.is_stub else ""
    if yielded.ref is None and yielded.failure is not None:
        where = " (could not be kept)"
    return _cut(f"{error}\npartial output{where}:\n{yielded.text}")


def _line(text: str) -> str:
    """Return an error on one line, with secrets masked before it is cut."""
    line = " ".join(mask(text).split())
    return (
        line
        if len(line) <= _MAX_LINE
        else f"{line[:_MAX_LINE]}… ({len(line) - _MAX_LINE} characters more)"
    )


def _cut(text: str) -> str:
    """Return the head and tail of a long text."""
    if len(text) <= _MAX_ERROR:
        return text
    edge = _MAX_ERROR // 2 - 50
    return f"{text[:edge]}\n[… {len(text) - 2 * edge} characters left out …]\n{text[-edge:]}"


def _not_begun(call: ToolCall) -> TimedOut:
    text = f"the time for this turn was up before {clip(call.name)} was called"
    return TimedOut(call_id=call.id, name=call.name, text=text, scope="turn")
