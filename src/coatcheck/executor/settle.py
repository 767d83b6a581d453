"""From what a tool gives to an outcome. This is the only code of the executor that stores anything.

The one who waits for the tool runs it, and before each step that stores it looks at the turn's clock: past the turn's
deadline it stores nothing more, and a stream that is on its way into the store breaks off without a trace.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coatcheck.executor.attempt import BUFFER, Attempt, Ending, Failed
from coatcheck.executor.binding import BadCall
from coatcheck.executor.calls import ToolCall
from coatcheck.executor.outcomes import ArtifactReference, ErrorCode, Result, TimedOut, ToolError, ToolOutcome
from coatcheck.ids import clip
from coatcheck.refs import Ref
from coatcheck.values import decode_text

if TYPE_CHECKING:
    from coatcheck.externalize import Policy
    from coatcheck.session import Session

_WORDS = 12_000  # characters of an error that are sent whatever the policy says
_LINE = 500
_GLANCE = 4_000  # characters of a stream that could not be stored
_HERE = str(Path(__file__).parent)


class TurnOver(BaseException):
    """The turn is past its deadline: nothing more may be stored for it.

    Like a cancellation, no error: whoever stores must not take it for a failure of the store."""


class Cancelled(BaseException):
    """Nobody waits for this call any more. No error either."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a call and its turn end, on the monotonic clock; and how long the call was given, to tell it."""

    call_end: float | None = None
    turn_end: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, timeout: float | None, turn_end: float | None) -> Limits:
        return cls(None if timeout is None else time.monotonic() + timeout, turn_end, timeout)

    @property
    def until(self) -> float | None:
        ends = [end for end in (self.call_end, self.turn_end) if end is not None]
        return min(ends) if ends else None

    @property
    def turn_is_over(self) -> bool:
        return self.turn_end is not None and time.monotonic() >= self.turn_end


class Incoming:
    """What a tool yields, as a binary stream for a put. It ends with the tool, or when the call's time is up; it breaks
    with `TurnOver` when the turn's is."""

    def __init__(self, attempt: Attempt, limits: Limits) -> None:
        self._attempt = attempt
        self._limits = limits
        self._left = memoryview(b"")
        self._over = False
        self.ending: Ending | None = None
        self.time_was_up = False

    def head(self) -> bytes:
        """What there is until the end, or more than a buffer of it, which is then read once more."""
        pieces, size = [], 0
        while size < BUFFER and (piece := self.read(BUFFER)):
            pieces.append(piece)
            size += len(piece)
        head = b"".join(pieces)
        if not self.is_over:
            self._left = memoryview(head + bytes(self._left))
        return head

    @property
    def is_text(self) -> bool:
        """Whether all of it was text, as far as it went: what the store asks at the end of a stream."""
        return self._attempt.is_text

    @property
    def is_over(self) -> bool:
        return self._over and not self._left

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return b"".join(iter(lambda: self.read(BUFFER), b""))
        self._check()
        if not self._left and not self._over:
            self._left = memoryview(self._next())
            self._check()
        piece = self._left[:size]
        self._left = self._left[len(piece) :]
        return bytes(piece)

    def _next(self) -> bytes:
        until = self._limits.until
        got = None if until is not None and time.monotonic() >= until else self._attempt.take(until)
        if isinstance(got, bytes):
            return got
        self._over = True
        if got is None:  # the time is up; what lies ready still counts
            if self._attempt.stopped:
                raise Cancelled
            self.time_was_up = True
            return self._attempt.stop()
        self.ending = got
        return b""

    def _check(self) -> None:
        if self._limits.turn_is_over:
            raise TurnOver


@dataclass(frozen=True, slots=True)
class Shown:
    """A value as the model gets it."""

    text: str
    content: Any = None
    ref: Ref | None = None
    refs: tuple[Ref, ...] = ()
    is_stub: bool = False
    failure: str | None = None


class Settling:
    """One call on its way to an outcome."""

    def __init__(
        self, session: Session, policy: Policy | None, call: ToolCall, attempt: Attempt, limits: Limits
    ) -> None:
        self._session = session
        self._policy = policy
        self._call = call
        self._attempt = attempt
        self._limits = limits

    def outcome(self) -> ToolOutcome:
        """Wait for the tool and store what it gives. Raises only what interrupts the waiting thread itself."""
        try:
            incoming = Incoming(self._attempt, self._limits)
            head = incoming.head()
            shown = None
            if self._attempt.yields:
                shown = self._small(head, incoming.ending) if incoming.is_over else self._large(head, incoming)
            if incoming.time_was_up:
                return self._timed_out("call", shown)
            if isinstance(incoming.ending, Failed):
                return self._failed(incoming.ending.error, shown)
            if shown is None and incoming.ending is not None:
                shown = self._shown(incoming.ending.value)
            assert shown is not None
            return self._answered(shown)
        except TurnOver:
            return self._timed_out("turn", None)
        except Cancelled:
            return refused(self._call, "cancelled", f"{self._call.name} was cancelled")
        except Exception as error:  # noqa: BLE001 - a value's own methods raise what they like when it is written down
            said = "".join(traceback.format_exception_only(error))
            return refused(
                self._call, "unusable_result", f"{self._call.name} answered what cannot be passed on: {said}"
            )
        finally:
            self._attempt.stop()

    def _answered(self, shown: Shown) -> ToolOutcome:
        if shown.is_stub:
            return ArtifactReference(
                call_id=self._call.id, name=self._call.name, text=shown.text, ref=shown.ref, content=shown.content,
                refs=shown.refs,
            )  # fmt: skip
        return Result(
            call_id=self._call.id, name=self._call.name, text=shown.text, ref=shown.ref, content=shown.content,
            refs=shown.refs, failure=shown.failure,
        )  # fmt: skip

    # What was yielded

    def _small(self, head: bytes, ending: Ending | None) -> Shown | None:
        """All that a tool yielded, held in memory. What is partial is stored however small: it may be all there is."""
        value: str | bytes = decode_text(head) if self._attempt.is_text else head
        if ending is not None and not isinstance(ending, Failed):
            return self._shown(value)
        if not head:
            return None
        return self._kept(self._shown(value), value)

    def _large(self, head: bytes, incoming: Incoming) -> Shown:
        """More than a tool's output should take of memory, on its way into the store. Where that fails, the head."""
        shown = self._shown(incoming)
        if shown.failure is None:
            is_whole = incoming.ending is not None and not isinstance(incoming.ending, Failed)
            return shown if is_whole else self._kept(shown, shown.content)
        begins = head[: _GLANCE * 4].decode("utf-8", "replace")[:_GLANCE]
        return replace(shown, text=f"{shown.text}\nIt began:\n{begins}")

    def _kept(self, shown: Shown, value: object) -> Shown:
        """What is partial, with its ref: stored, whatever the policy says of it."""
        if shown.ref is not None or shown.failure is not None:
            return shown
        kept = self._shown(value, always=True)
        return replace(shown, ref=kept.ref, refs=kept.refs, failure=kept.failure)

    # Values, errors and time

    def _shown(self, value: object, *, always: bool = False, is_error: bool = False) -> Shown:
        """The store step. A function that shrinks what a tool answers has no say in what its errors say."""
        self._check_turn()
        policy = self._policy
        if is_error and policy is not None and callable(policy.tools.get(self._call.name)):
            policy = replace(policy, tools={})
        if always:
            from coatcheck.externalize import configured  # with all that stands behind it, for those who need it

            policy = replace(
                policy or configured(self._session.store.settings), enabled=True, tools={self._call.name: "always"}
            )
        done = self._session.externalize(value, tool=self._call.name, call_id=self._call.id or None, policy=policy)
        return Shown(done.text, done.content, done.ref, tuple(done.refs), done.is_stub, done.failure)

    def _failed(self, error: BaseException, yielded: Shown | None) -> ToolOutcome:
        if isinstance(error, BadCall):
            whole = f"{self._call.name} was not called: {error}"
            return self._error(error.code, _line(whole), whole)
        line = _line(f"{self._call.name} failed: {''.join(traceback.format_exception_only(error))}")
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
            trace = trace.tb_next
        said = "".join(traceback.format_exception(type(error), error, trace))
        return self._error("exception", line, f"{line}\n{said}".rstrip(), yielded)

    def _error(self, code: ErrorCode, line: str, whole: str, yielded: Shown | None = None) -> ToolError:
        text, ref = self._told(line, whole) if whole != line else (line, None)
        if yielded is not None:
            text, ref = _partial(text, yielded), yielded.ref
        return ToolError(
            call_id=self._call.id, name=self._call.name, text=text, ref=ref, code=code, message=line,
            partial=yielded is not None,
        )  # fmt: skip

    def _told(self, line: str, whole: str) -> tuple[str, Ref | None]:
        """A long account of an error: like any other text, in the store where it is large."""
        try:
            shown = self._shown(whole, is_error=True)
        except TurnOver:
            return _cut(whole), None
        return f"{line}\n{shown.text}" if shown.is_stub else _cut(shown.text), shown.ref

    def _timed_out(self, scope: Literal["call", "turn"], yielded: Shown | None) -> TimedOut:
        name = clip(self._call.name)
        if scope == "turn":
            line = f"the time for this turn was up before {name} had ended; nothing of it was stored"
        else:
            line = f"{name} timed out after {self._limits.seconds or 0:g} seconds and was given up"
        return TimedOut(
            call_id=self._call.id, name=self._call.name, text=line if yielded is None else _partial(line, yielded),
            ref=yielded.ref if yielded else None, scope=scope, partial=yielded is not None,
        )  # fmt: skip

    def _check_turn(self) -> None:
        if self._limits.turn_is_over:
            raise TurnOver


def refused(call: ToolCall, code: ErrorCode, message: str) -> ToolError:
    """The outcome of a call that never came to its tool."""
    line = _line(message)
    return ToolError(call_id=call.id, name=call.name, text=line, code=code, message=line)


def _partial(said: str, yielded: Shown) -> str:
    """What went wrong, and what there was by then."""
    where = f", kept as {yielded.ref.pointer}" if yielded.ref and not yielded.is_stub else ""
    if yielded.ref is None and yielded.failure is not None:
        where = ", and could not be kept"
    return _cut(f"{said}\nwhat it had yielded by then is partial{where}:\n{yielded.text}")


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE else f"{line[:_LINE]}… ({len(line) - _LINE} characters more)"


def _cut(text: str) -> str:
    """Head and tail of a text that no policy has bounded."""
    if len(text) <= _WORDS:
        return text
    edge = _WORDS // 2 - 50
    return f"{text[:edge]}\n[… {len(text) - 2 * edge} characters left out …]\n{text[-edge:]}"
