"""Tool calls of a model, and what became of them.

An outcome has `to_model_content()` for the model. Branch on its class:

ToolOutcome
├── Result               the tool returned a value small enough to be sent unchanged
├── ArtifactReference    the value is in the store; the model gets its stub
├── ToolError            the call was invalid, or the tool failed
├── TimedOut             the tool, or the whole turn, ran out of time
└── Running              a started call that has not ended yet
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coatcheck.errors import InvalidArgument
from coatcheck.externalize import Decision, Outcome
from coatcheck.ids import clip
from coatcheck.refs import Ref

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


@dataclass(frozen=True, slots=True)
class Handle:
    """A started call. Its `id` is what `poll` and `wait` take."""

    id: str
    call_id: str
    name: str


def _field(item: object, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)


def _text(item: object, key: str) -> str:
    found = _field(item, key)
    if not isinstance(found, str):
        raise InvalidArgument(f"the tool call has no {key!r}: {clip(repr(item), 200)}")
    return found
