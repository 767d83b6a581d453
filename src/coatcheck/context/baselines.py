"""`Baseline`: the figures of a release, and how later ones have risen against it.

Rises within a session are found in the same way, against its own earlier calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from coatcheck.context.figures import TYPE, Notice, Number, PromptMetrics, Reason, Text, reader
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

if TYPE_CHECKING:
    from coatcheck.storage import Record
    from coatcheck.store import Store

RECENT: Final = 3
"""Number of a session's newest calls that are compared with the earlier ones."""
EARLIER: Final = 5
"""Minimum number of earlier calls for a session's baseline."""
CALLS: Final = 10
"""Minimum number of calls of a release before it is compared."""
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
"""The figures that are watched, their names in messages, and the smallest rise of each that is
reported."""

_LEARNED: Final = 20  # calls from which the error of the estimate is learned
_RELEASES: Final = "coatcheck:releases"  # the session that contains the figures of all releases
_LABELS: Final = "releases"
_KEPT_CALLS: Final = 500
_KEPT_LABELS: Final = 100


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """The median of a figure, and its 90th percentile."""

    median: Number
    p90: Number


@dataclass(frozen=True, slots=True)
class Baseline:
    """The figures of a release.

    Medians are compared with medians, so that one unusual turn changes nothing. A rise is reported
    once, and again only when the figure has risen as much above the reported value."""

    type: Literal["metrics_baseline"]
    label: Text
    calls: Number
    figures: Mapping[str, MeasuredFigure]

    @classmethod
    def of(cls, label: str, calls: Iterable[PromptMetrics]) -> Self:
        known = list(calls)
        figures = {}
        for name, values in _columns(known).items():
            last = len(values) - 1
            figures[name] = MeasuredFigure(values[last // 2], values[last * 9 // 10])
        return cls("metrics_baseline", label, len(known), figures)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a baseline. Raises `InvalidArgument` if it is not valid."""
        try:
            found: Self = reader(Baseline)(json.loads(text))
        except (ValueError, RecursionError) as error:
            hint = "make one with 'coatcheck metrics --save-baseline FILE'"
            raise InvalidArgument("not a valid baseline of metrics", hint=hint) from error
        return replace(
            found, figures={name: one for name, one in found.figures.items() if name in FLOORS}
        )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a baseline from a file. Raises `InvalidArgument`."""
        try:
            return cls.from_json(Path(path).expanduser().read_bytes())
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error

    def rises(
        self, now: Sequence[PromptMetrics], percent: float, reported: Mapping[str, float]
    ) -> list[Notice]:
        """Return a notice for each figure that has risen in these calls of another release.
        `reported` has the value of each figure when it was last reported."""
        if self.calls < CALLS or len(now) < CALLS:
            return []
        where = f"in release {clip(self.label)}"
        before = {name: one.median for name, one in self.figures.items()}
        return _rises("release", where, before, _medians(now), percent=percent, reported=reported)


def session_rises(calls: Sequence[PromptMetrics], percent: float) -> list[Notice]:
    """Return a notice for each figure that has risen in the newest calls of a session, given oldest
    first."""
    if len(calls) < EARLIER + RECENT:
        return []
    before, after = _medians(calls[:-RECENT], EARLIER), _medians(calls[-RECENT:], RECENT)
    reported = _reported(calls[:-1], "session")
    return _rises("session", "in this session", before, after, percent=percent, reported=reported)


def _reported(calls: Iterable[PromptMetrics], reason: Reason) -> dict[str, float]:
    """Return the value of each figure when it was last reported for this reason."""
    warnings = (one for call in calls for one in call.warnings)
    return {
        one.figure: one.actual
        for one in warnings
        if one.reason == reason and one.actual is not None
    }


def _columns(calls: Sequence[PromptMetrics], least: int = 1) -> dict[str, list[float]]:
    """Return the values of each figure, sorted, if it could be counted in enough calls."""
    columns: dict[str, list[float]] = {}
    for name in FLOORS:
        values = [getattr(one, name) for one in calls]
        known = sorted(one for one in values if one is not None)
        if len(known) >= least:
            columns[name] = known
    return columns


def _medians(calls: Sequence[PromptMetrics], least: int = 1) -> dict[str, float]:
    """Return the median of each figure; the lower of two, so that it is one of the values."""
    return {name: values[(len(values) - 1) // 2] for name, values in _columns(calls, least).items()}


def _rises(
    reason: Reason,
    where: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    percent: float,
    reported: Mapping[str, float],
) -> list[Notice]:
    found = []
    for name, (words, floor) in FLOORS.items():
        if name not in before or name not in after:
            continue
        old, new = before[name], after[name]
        known = max(old, reported.get(name, 0))
        if new - known >= floor and new > known * (1 + percent / 100):
            message = f"{words} rose from {old:,.0f} {where} to {new:,.0f}"
            found.append(Notice(name, reason, old, new, message))
    return found


class Release:
    """The calls of one release so far, and the baseline of the previous release, if there is one.

    They are stored in a session that does not expire, one series for each label. Calls of other
    processes are read only when a process starts."""

    def __init__(self, store: Store, label: str, before: Baseline | None = None) -> None:
        self._session = store.session(_RELEASES, ttl=None)
        self._series = f"metrics:{label}"
        labels = labels_of(store)
        if labels[:1] != [label]:
            self._session.record(_LABELS, label.encode(), keep=_KEPT_LABELS)
        previous = next((one for one in labels if one != label), None)
        if before is None and previous is not None:
            records = self._session.records(f"metrics:{previous}", newest=True, limit=_KEPT_CALLS)
            before = Baseline.of(previous, read_calls(records))
        self._before = before
        known = self._session.records(self._series, newest=True, limit=_KEPT_CALLS)[::-1]
        self._calls = list(read_calls(known))
        self._reported = _reported(self._calls, "release")

    def rises(self, call: PromptMetrics, percent: float) -> list[Notice]:
        """Add a call, and return a notice for each figure that has risen against the previous
        release."""
        self._calls = [*self._calls[1 - _KEPT_CALLS :], call]
        found: list[Notice] = []
        if self._before is not None:
            found = self._before.rises(self._calls, percent, self._reported)
        self._reported |= _reported([replace(call, warnings=tuple(found))], "release")
        figures = {name: getattr(call, name) for name in FLOORS}
        body = {
            "type": TYPE,
            "session": "-",
            **figures,
            "warnings": [one.to_record() for one in found],
        }
        encoded = json.dumps(body, separators=(",", ":")).encode()
        self._session.record(self._series, encoded, keep=_KEPT_CALLS)
        return found


def labels_of(store: Store) -> list[str]:
    """Return the releases with stored figures, newest first."""
    found = store.session(_RELEASES).records(_LABELS, newest=True, limit=_KEPT_LABELS)
    return list(dict.fromkeys(record.body.decode("utf-8", "replace") for record in found))


def read_calls(records: Iterable[Record]) -> Iterator[PromptMetrics]:
    for record in records:
        try:
            yield PromptMetrics.from_json(record.body)
        except ValueError:
            continue  # damaged, or of an unknown version


def ratio_to_estimate(calls: Sequence[PromptMetrics]) -> float:
    """Return the provider's count per estimated token: the median of the newest calls, 1 if it was
    never reported."""
    known = sorted(
        one.input_tokens / one.est_tokens
        for one in calls[-_LEARNED:]
        if one.input_tokens and one.est_tokens
    )
    return known[len(known) // 2] if known else 1.0
