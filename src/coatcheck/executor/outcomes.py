"""What becomes of a tool call, as types: branch on the class, send `to_model_content()` to the model.

ToolOutcome
├── Result               the tool answered, and the answer is small enough to be sent as it is
├── ArtifactReference    the answer is in the store; the model gets its stub
├── ToolError            the call was wrong, or the tool failed
├── TimedOut             the tool, or the whole turn, ran out of time
└── Running              a started call that has not ended yet
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from coatcheck.refs import Ref

ErrorCode = Literal[
    "unknown_tool", "invalid_arguments", "unresolved_pointer", "exception", "unusable_result", "busy", "cancelled"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """`text` is what the model is told. `ref` is the artifact that holds the whole, where one was stored."""

    call_id: str
    name: str
    text: str
    ref: Ref | None = None

    @property
    def is_error(self) -> bool:
        """Whether to mark it as an error where a provider has a flag for that."""
        return isinstance(self, ToolError | TimedOut)

    def to_model_content(self) -> str:
        """The text for the model: within the policy's limit, or a stub, or a bounded account of what went wrong."""
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ToolOutcome):
    """`content` is the value in the shape it had: the text, the structure, or a list of content blocks. Blocks that
    were too large by themselves are stubs there, and in `refs`. `failure` says why the store could not keep a large
    value: then `text` is its head and tail."""

    content: Any = None
    refs: tuple[Ref, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReference(ToolOutcome):
    """The answer was large: `text` is its stub, `ref` the artifact."""

    content: Any = None
    refs: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolError(ToolOutcome):
    """`code` is stable, `message` is one line. `partial`: the text and the ref hold what was yielded before it
    failed."""

    code: ErrorCode
    message: str
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(ToolOutcome):
    """`scope` says whose time was up. `partial`: the text and the ref hold what was yielded by then."""

    scope: Literal["call", "turn"]
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(ToolOutcome):
    """Not over yet: ask again by `handle`."""

    handle: str
