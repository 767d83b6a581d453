"""The figures of a release, kept beside all sessions, so that the next one can be compared with it.

They are in a session of their own that does not expire, a series for each label. What other processes have added is
seen when a process begins, not while it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from coatcheck.context.metrics.baseline import FLOORS, Baseline, told_in
from coatcheck.context.metrics.figures import Notice, PromptMetrics
from coatcheck.storage import Record
from coatcheck.store import Store

SESSION: Final = "coatcheck:releases"
LABELS: Final = "releases"
_KEPT: Final = 500
_LABELS: Final = 100


class Release:
    """The calls of one release, as they go on, and the release before it where there is one."""

    def __init__(self, store: Store, label: str, before: Baseline | None = None) -> None:
        self._session = store.session(SESSION, ttl=None)
        self._series = f"metrics:{label}"
        labels = labels_of(store)
        if labels[:1] != [label]:
            self._session.record(LABELS, label.encode(), keep=_LABELS)
        previous = next((one for one in labels if one != label), None)
        self.before = before or (None if previous is None else baseline_of(store, previous))
        self._told: dict[str, float] = {}
        known = self._session.records(self._series, newest=True, limit=_KEPT)
        self._calls = _calls(reversed(known))
        for record in reversed(known):
            self._told |= told_in(_mapping(record))

    def rises(self, call: PromptMetrics, percent: float) -> list[Notice]:
        """Add a call; what has risen with it against the release before."""
        self._calls = [*self._calls[1 - _KEPT :], call]
        found = [] if self.before is None else self.before.rises(self._calls, percent, self._told)
        told = {one.figure: one.actual for one in found if one.actual is not None}
        self._told |= told
        figures = {name: getattr(call, name) for name in FLOORS}
        body = {"type": "prompt_metrics", "session": "-", **figures, **({"told": told} if told else {})}
        self._session.record(self._series, json.dumps(body, separators=(",", ":")).encode(), keep=_KEPT)
        return found


def labels_of(store: Store) -> list[str]:
    """The releases that figures are kept of, the newest first."""
    found = store.session(SESSION).records(LABELS, newest=True, limit=_LABELS)
    return list(dict.fromkeys(record.body.decode("utf-8", "replace") for record in found))


def baseline_of(store: Store, label: str) -> Baseline:
    """What the figures of a release were, by the newest 500 of its calls."""
    records = store.session(SESSION).records(f"metrics:{label}", newest=True, limit=_KEPT)
    return Baseline.of(label, _calls(records))


def _calls(records: Iterable[Record]) -> Sequence[PromptMetrics]:
    found = []
    for record in records:
        try:
            found.append(PromptMetrics.from_json(record.body))
        except ValueError:
            continue  # damaged, or of a version that we do not know
    return found


def _mapping(record: Record) -> dict[str, object]:
    try:
        said = json.loads(record.body)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
