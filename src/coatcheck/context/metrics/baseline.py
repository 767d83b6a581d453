"""Whether figures have risen: against what a session had before, and against another release.

Medians are compared with medians, so that one odd turn changes nothing, and a rise is told once: again only when the
figure has risen as much above what was told. The same calls give the same answers, whoever asks and when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.context.metrics.figures import Notice, PromptMetrics, is_number, number
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

TYPE: Final = "metrics_baseline"
RECENT: Final = 3
"""How many of a session's newest calls are compared with those before."""
EARLIER: Final = 5
"""A session's baseline needs so many calls."""
CALLS: Final = 10
"""A release is compared when it has had so many calls."""

FLOORS: Final[Mapping[str, tuple[str, int]]] = {
    "est_tokens": ("the prompt's tokens", 500),
    "sys_chars": ("the system text's characters", 1_000),
    "hs_tokens": ("the hot state's tokens", 100),
    "artifacts": ("the index's artifacts", 3),
    "tokens_stubs": ("tokens of stubs", 200),
    "tokens_read_back": ("tokens read back", 500),
    "tokens_schemas": ("tokens of tool schemas", 50),
    "tokens_rewritten": ("tokens of rewritten prefix", 500),
}
"""The figures that are watched, what they are called, and the least rise of each that is worth a word."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the figures of a release were: the median of each, and the value that nine of ten calls kept below."""

    label: str
    calls: int
    medians: Mapping[str, float]
    tops: Mapping[str, float]

    @classmethod
    def of(cls, label: str, calls: Iterable[PromptMetrics]) -> Self:
        known = list(calls)
        columns = {name: values_of(known, name) for name in FLOORS}
        return cls(
            label,
            len(known),
            {name: middle(values) for name, values in columns.items() if values},
            {name: sorted(values)[(len(values) - 1) * 9 // 10] for name, values in columns.items() if values},
        )

    def to_json(self) -> str:
        figures = {name: {"median": self.medians[name], "p90": self.tops[name]} for name in self.medians}
        return json.dumps({"type": TYPE, "label": self.label, "calls": self.calls, "figures": figures}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises `InvalidArgument` where it is none."""
        try:
            said = json.loads(text)
            if said["type"] != TYPE or not isinstance(said["label"], str):
                raise ValueError
            figures = {name: one for name, one in said["figures"].items() if name in FLOORS}
            medians = {name: number(one["median"]) for name, one in figures.items()}
            tops = {name: number(one["p90"]) for name, one in figures.items()}
            return cls(said["label"], int(number(said["calls"])), medians, tops)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            hint = "make one with 'coatcheck metrics --save-baseline FILE'"
            raise InvalidArgument("this is no baseline of metrics", hint=hint) from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        try:
            return cls.from_json(Path(path).expanduser().read_bytes())
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error

    def rises(self, now: Sequence[PromptMetrics], percent: float, told: Mapping[str, float]) -> list[Notice]:
        """What has risen in these calls of another release; `told` is how high each figure was when last told."""
        if self.calls < CALLS or len(now) < CALLS:
            return []
        found = []
        for name, (words, floor) in FLOORS.items():
            values = values_of(now, name)
            before = self.medians.get(name)
            if before is None or not values:
                continue
            after = middle(values)
            if _rose(max(before, told.get(name, 0)), after, percent, floor) and after - before >= floor:
                message = f"{words} rose from {before:,.0f} in release {clip(self.label)} to {after:,.0f}"
                found.append(Notice(name, "release", before, after, message))
        return found


def session_rises(calls: Sequence[PromptMetrics], percent: float) -> list[Notice]:
    """What has risen in the newest calls of a session against those before, oldest first."""
    if len(calls) < EARLIER + RECENT:
        return []
    told: dict[str, float] = {}
    for call in calls[:-1]:
        for one in call.warnings:
            if one.reason == "session" and one.actual is not None:
                told[one.figure] = one.actual
    found = []
    for name, (words, floor) in FLOORS.items():
        earlier, recent = values_of(calls[:-RECENT], name), values_of(calls[-RECENT:], name)
        if len(earlier) < EARLIER or len(recent) < RECENT:
            continue
        before, after = middle(earlier), middle(recent)
        if _rose(max(before, told.get(name, 0)), after, percent, floor):
            message = f"{words} rose from {before:,.0f} in this session to {after:,.0f}"
            found.append(Notice(name, "session", before, after, message))
    return found


def values_of(calls: Iterable[PromptMetrics], name: str) -> list[float]:
    """One figure of each call, where it could be counted."""
    return [value for call in calls if (value := getattr(call, name)) is not None]


def middle(values: Sequence[float]) -> float:
    """The median; the lower one of two, so that it is a value that there was."""
    return sorted(values)[(len(values) - 1) // 2]


def _rose(before: float, after: float, percent: float, floor: float) -> bool:
    return after - before >= floor and after > before * (1 + percent / 100)


def told_in(record: Mapping[str, Any]) -> dict[str, float]:
    """How high each figure was when it was last told, as a release's record keeps it."""
    said = record.get("told")
    pairs = said.items() if isinstance(said, dict) else ()
    return {name: value for name, value in pairs if name in FLOORS and is_number(value)}
