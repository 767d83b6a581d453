"""What is known of one model call, as a value and as JSON.

Records come back from stores and files, so what they say is checked: one that is not whole is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self

TYPE: Final = "prompt_metrics"
SERIES: Final = "metrics"
"""The series of a session in which its calls are kept."""

_LARGEST: Final = 1 << 53  # JSON readers lose digits beyond
_LONGEST: Final = 65_536
_MANY: Final = 1_000

Reason = Literal["over", "violation", "session", "release"]
_REASONS: Final = ("over", "violation", "session", "release")


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about one figure: it is `over` a threshold, in `violation` of the budget, or has risen against the
    baseline of its `session` or of another `release`. `before` is that threshold, limit or baseline."""

    figure: str
    reason: Reason
    before: float
    actual: float | None
    message: str

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("figure", "reason", "before", "actual", "message")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMetrics:
    """The figures of one model call.

    `hs_…` are of the hot state and `hs_steps` what was taken from it, `artifacts` the entries of its index, `ref_files`
    the bootstrap files that became references. A count is None where it could not be counted, and then the budget is
    not kept. `tokens_saved` are those of stored results that the prompt would hold without their stubs; the other
    `tokens_…` are what that takes. `cost` is what the input costs in tokens that are not cached, `cost_without` the
    same without stubs. What a provider counted is in `input_tokens` and the rest, None where it did not say."""

    session: str
    run: str | None = None
    turn: int | None = None
    at: float = 0.0
    release: str | None = None
    model: str | None = None
    hs_tokens: int | None = 0
    hs_bytes: int = 0
    hs_steps: tuple[str, ...] = ()
    artifacts: int | None = 0
    artifact_types: Mapping[str, int] = field(default_factory=dict)
    sys_chars: int = 0
    user_chars: int = 0
    est_tokens: int | None = 0
    ref_files: int = 0
    budget_tokens: int | None = None
    budget_violations: tuple[Mapping[str, Any], ...] = ()
    tokens_saved: int = 0
    tokens_read_back: int = 0
    tokens_stubs: int = 0
    tokens_schemas: int = 0
    tokens_rewritten: int = 0
    cost: int | None = None
    cost_without: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    warnings: tuple[Notice, ...] = ()

    @property
    def hs_truncated(self) -> bool:
        return bool(self.hs_steps)

    @property
    def budget_ok(self) -> bool:
        return not self.budget_violations

    @property
    def tokens_net(self) -> int:
        """What is left of the saving when all that it costs is taken off."""
        spent = self.tokens_read_back + self.tokens_stubs + self.tokens_schemas + self.tokens_rewritten
        return self.tokens_saved - spent

    @property
    def tokens_without(self) -> int | None:
        """How many tokens the prompt would have with every stored result in it, and without stubs, pages and tools."""
        if self.est_tokens is None:
            return None
        return self.est_tokens + self.tokens_saved - self.tokens_stubs - self.tokens_read_back - self.tokens_schemas

    def to_record(self) -> dict[str, Any]:
        """As a line of JSON has it."""
        told: dict[str, Any] = {"type": TYPE}
        for one in fields(self):
            told[one.name] = getattr(self, one.name)
            if one.name == "hs_bytes":
                told["hs_truncated"] = self.hs_truncated
            elif one.name == "budget_violations":
                told["budget_ok"] = self.budget_ok
            elif one.name == "tokens_rewritten":
                told |= {"tokens_net": self.tokens_net, "tokens_without": self.tokens_without}
        told["artifact_types"] = dict(self.artifact_types)
        told["budget_violations"] = [dict(one) for one in self.budget_violations]
        told["warnings"] = [one.to_record() for one in self.warnings]
        told["hs_steps"] = list(self.hs_steps)
        return told

    def to_json(self) -> str:
        """One line, in ASCII."""
        return json.dumps(self.to_record(), separators=(",", ":"))

    @classmethod
    def from_record(cls, record: object) -> Self:
        """The figures that a record holds; fields that are new to us are passed over. Raises ValueError where it is
        none of ours."""
        if not isinstance(record, Mapping) or record.get("type") != TYPE:
            raise ValueError(f"not a record of {TYPE}")
        read = {one.name: _READ[one.name](record[one.name]) for one in fields(cls) if one.name in record}
        if "session" not in read:
            raise ValueError("a record without a session")
        return cls(**read)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        try:
            return cls.from_record(json.loads(line))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def numbered(self, turn: int | None, at: float | None = None) -> Self:
        """The same with its number in the session and, where given, its time."""
        return replace(self, turn=turn, at=self.at if at is None else at)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError("not a text")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise ValueError("not a count")
    return value


def _count_or_none(value: object) -> int | None:
    return None if value is None else _count(value)


def is_number(value: object) -> bool:
    """Whether this is a number that can be reckoned with: no bool, not infinite or near it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def number(value: object) -> float:
    if not isinstance(value, int | float) or not is_number(value):
        raise ValueError("not a number")
    return value


def _items(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MANY:
        raise ValueError("not a list")
    return value


def _steps(value: object) -> tuple[str, ...]:
    return tuple(_text(one) for one in _items(value))


def _types(value: object) -> Mapping[str, int]:
    if not isinstance(value, dict) or len(value) > _MANY:
        raise ValueError("not counts by type")
    return MappingProxyType({_text(name): _count(many) for name, many in value.items()})


def _violations(value: object) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {
            "field": _text(one.get("field")),
            "limit": number(one.get("limit")),
            "actual": None if one.get("actual") is None else number(one["actual"]),
            "message": _text(one.get("message", "")),
            "ambiguous": one.get("ambiguous") is True,
        }
        for one in map(_mapping, _items(value))
    )


def _notices(value: object) -> tuple[Notice, ...]:
    found = []
    for one in map(_mapping, _items(value)):
        if one.get("reason") not in _REASONS:
            raise ValueError("not a warning")
        actual = None if one.get("actual") is None else number(one["actual"])
        found.append(
            Notice(
                _text(one.get("figure")), one["reason"], number(one.get("before")), actual, _text(one.get("message"))
            )
        )
    return tuple(found)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


_READ: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("session",), _text),
    **dict.fromkeys(("run", "release", "model"), _text_or_none),
    **dict.fromkeys(
        (
            "turn", "hs_tokens", "artifacts", "est_tokens", "budget_tokens", "cost", "cost_without", "input_tokens",
            "output_tokens", "cached_tokens", "cache_write_tokens",
        ),
        _count_or_none,
    ),
    **dict.fromkeys(
        (
            "hs_bytes", "sys_chars", "user_chars", "ref_files", "tokens_saved", "tokens_read_back", "tokens_stubs",
            "tokens_schemas", "tokens_rewritten",
        ),
        _count,
    ),
    "at": number,
    "hs_steps": _steps,
    "artifact_types": _types,
    "budget_violations": _violations,
    "warnings": _notices,
}  # fmt: skip
