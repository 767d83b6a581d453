"""`PromptMetrics`: the figures of one model call, and `Notice`: a warning about one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PlainValidator, TypeAdapter

TYPE: Final = "prompt_metrics"
_DERIVED: Final = ("hs_truncated", "budget_ok", "tokens_net", "tokens_without")
_LARGEST: Final = 1 << 53  # JSON readers lose digits beyond this
_LONGEST: Final = 65_536
_MANY: Final = 1_000


Reason = Literal["over", "violation", "session", "release"]
Count = Annotated[int, Field(strict=True, ge=0, lt=_LARGEST)]
Number = (
    Annotated[int, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
    | Annotated[float, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
)
Text = Annotated[str, Field(strict=True, max_length=_LONGEST)]


@dataclass(frozen=True, slots=True)
class _ViolationRecord:
    field: Text
    limit: Number
    actual: Number | None = None
    message: Text = ""
    ambiguous: bool = False


def _violations(value: object) -> tuple[Mapping[str, Any], ...]:
    found = reader(list[_ViolationRecord])(value)
    if len(found) > _MANY:
        raise ValueError("too many violations")
    return tuple(map(asdict, found))


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about one figure: it is `over` a threshold, in `violation` of the budget, or has
    risen against the baseline of its `session` or of another `release`. `before` is that threshold,
    limit or baseline."""

    figure: Text
    reason: Reason
    before: Number
    actual: Number | None
    message: Text

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMetrics:
    """The figures of one model call.

    `hs_…` describe the hot state, and `hs_steps` how it was shortened; `artifacts` are the entries
    of its index, `ref_files` the bootstrap files that became references. A count is None if it
    could not be counted, which violates the budget. `tokens_saved` are the tokens of stored results
    that the prompt would contain without stubs; the other `tokens_…` are the cost of that. `cost`
    is the price of the input in uncached tokens, `cost_without` the same without stubs.
    `results_left` and `results_kept` count the new results that left the context or stayed, as the
    builder decided, and `expected_saving` is what those that left are expected to save, in units of
    the price of an input token. `input_tokens` and the following are the provider's counts, None if
    it did not report them. `tool_calls` and `tool_seconds` are the number and the durations of the
    tool calls since the previous one."""

    session: Text
    run: Text | None = None
    turn: Count | None = None
    at: Number = 0.0
    release: Text | None = None
    model: Text | None = None
    hs_tokens: Count | None = 0
    hs_bytes: Count = 0
    hs_steps: Annotated[tuple[Text, ...], Field(max_length=_MANY)] = ()
    artifacts: Count | None = 0
    artifact_types: Annotated[Mapping[Text, Count], Field(max_length=_MANY)] = field(
        default_factory=dict
    )
    sys_chars: Count = 0
    user_chars: Count = 0
    est_tokens: Count | None = 0
    ref_files: Count = 0
    budget_tokens: Count | None = None
    budget_violations: Annotated[tuple[Mapping[str, Any], ...], PlainValidator(_violations)] = ()
    tokens_saved: Count = 0
    tokens_read_back: Count = 0
    tokens_stubs: Count = 0
    tokens_schemas: Count = 0
    tokens_rewritten: Count = 0
    results_left: Count = 0
    results_kept: Count = 0
    expected_saving: Number = 0.0
    cost: Count | None = None
    cost_without: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    tool_calls: Count = 0
    tool_seconds: Number = 0.0
    warnings: Annotated[tuple[Notice, ...], Field(max_length=_MANY)] = ()

    @property
    def hs_truncated(self) -> bool:
        return bool(self.hs_steps)

    @property
    def budget_ok(self) -> bool:
        return not self.budget_violations

    @property
    def tokens_net(self) -> int:
        """The tokens saved, less everything that this cost."""
        spent = (
            self.tokens_read_back + self.tokens_stubs + self.tokens_schemas + self.tokens_rewritten
        )
        return self.tokens_saved - spent

    @property
    def tokens_without(self) -> int | None:
        """The size of the prompt with every stored result in it, and without stubs, pages and our
        tools."""
        if self.est_tokens is None:
            return None
        return (
            self.est_tokens
            + self.tokens_saved
            - self.tokens_stubs
            - self.tokens_read_back
            - self.tokens_schemas
        )

    def to_record(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        record = {"type": TYPE, **asdict(self), **{name: getattr(self, name) for name in _DERIVED}}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in record.items()
        }

    def to_json(self) -> str:
        """Return the figures as one line of ASCII JSON."""
        return json.dumps(self.to_record(), separators=(",", ":"))

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Read figures from a record, ignoring unknown fields. Raises ValueError for an invalid
        record: records come from stores and files that anyone may have written."""
        if not isinstance(record, Mapping) or record.get("type") != TYPE:
            raise ValueError(f"not a record of {TYPE}")
        found: Self = reader(PromptMetrics)(record)
        return found

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        try:
            return cls.from_record(json.loads(line))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


@cache
def reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that validates a record of this type. It raises ValueError.

    It is made once, on first use: that takes 16 ms for `PromptMetrics`."""
    return TypeAdapter(kind).validate_python
