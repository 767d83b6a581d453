"""The waiting side of one call: it makes an outcome of what the tool gives."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from coatcheck.executor.attempts import Attempt, Ending, Failed, OutputStream
from coatcheck.executor.binding import BadCall
from coatcheck.executor.outcomes import (
    ArtifactReference,
    ErrorCode,
    Result,
    TimedOut,
    ToolCall,
    ToolError,
    ToolOutcome,
)
from coatcheck.executor.turns import Cancelled, Deadlines, TurnOver
from coatcheck.externalize import Outcome, Policy
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.truncation import PARTIAL, Truncation
from coatcheck.values import decode_text

_MAX_ERROR: Final = 12_000  # characters of an error that are sent whatever the policy is
_MAX_LINE: Final = 500
_BEGINNING: Final = 4_000  # characters shown of a stream that could not be stored
_HERE: Final = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiting side of one call: makes an outcome of what the tool gives."""

    session: Session
    policy: Policy
    call: ToolCall
    attempt: Attempt
    deadlines: Deadlines

    def outcome(self) -> ToolOutcome:
        """Wait for the tool and store its output. Raises only what interrupts the waiting
        thread."""
        try:
            output = OutputStream(self.attempt, self.deadlines)
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
            if isinstance(output.ending, Failed):
                return self._failed(output.ending.error, shown)
            if shown is None and output.ending is not None:
                shown = self._shown(output.ending.value)
            assert shown is not None
            return self._returned(shown)
        except TurnOver:
            return self._timed_out("turn", None)
        except Cancelled:
            return refused(self.call, "cancelled", f"{self.call.name} was cancelled")
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything when it is serialized
            why = "".join(traceback.format_exception_only(error))
            return refused(
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

    def _small(self, head: bytes, ending: Ending | None) -> Outcome | None:
        """Return the outcome of output that fits in memory. Partial output is stored however small
        it is."""
        value: str | bytes = decode_text(head) if self.attempt.is_text else head
        if ending is not None and not isinstance(ending, Failed):
            return self._shown(value)
        if not head:
            return None
        return self._kept(self._shown(value, cut=PARTIAL), value)

    def _large(self, head: bytes, output: OutputStream) -> Outcome:
        """Stream large output into the store. If that fails, show its beginning."""
        shown = self._shown(output)
        is_whole = output.ending is not None and not isinstance(output.ending, Failed)
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
            raise TurnOver
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
        except TurnOver:
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


def refused(call: ToolCall, code: ErrorCode, message: str) -> ToolError:
    """Return the error of a call that did not reach its tool."""
    line = _line(message)
    return ToolError(call_id=call.id, name=call.name, text=line, code=code, message=line)


def busy(call: ToolCall) -> ToolError:
    message = (
        f"{call.name} was not called: too many abandoned calls are still running; try again later"
    )
    return refused(call, "busy", message)


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


def not_begun(call: ToolCall) -> TimedOut:
    text = f"the time for this turn was up before {clip(call.name)} was called"
    return TimedOut(call_id=call.id, name=call.name, text=text, scope="turn")
