"""Warnings about one call: over a threshold, or in violation of the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coatcheck.config import Settings
from coatcheck.context.metrics.figures import Notice, PromptMetrics

_LEARNED = 20
_WATCHED = (
    ("hs_tokens", "metrics.warn_hot_state_tokens", "a hot state of {} tokens"),
    ("artifacts", "metrics.warn_index_entries", "an index of {} artifacts"),
    ("est_tokens", "metrics.warn_prompt_tokens", "a prompt of {} tokens"),
)


def notices_of(call: PromptMetrics, settings: Settings, ratio: float = 1.0) -> list[Notice]:
    """What one call by itself is a reason to warn of. A prompt is as large as its provider counted it, or where it did
    not, as estimates turned out in calls where it did: `ratio`."""
    found = list(_over(call, settings, ratio))
    found += [
        Notice(one["field"], "violation", one["limit"], one["actual"], one["message"]) for one in call.budget_violations
    ]
    return found


def ratio_of(calls: Sequence[PromptMetrics]) -> float:
    """What a provider counted for each token that was estimated: the median of the newest calls, 1 where it never
    said."""
    known = sorted(
        one.input_tokens / one.est_tokens for one in calls[-_LEARNED:] if one.input_tokens and one.est_tokens
    )
    return known[len(known) // 2] if known else 1.0


def _over(call: PromptMetrics, settings: Settings, ratio: float) -> Iterable[Notice]:
    for name, key, words in _WATCHED:
        value: int | None = getattr(call, name)
        if name == "est_tokens" and value is not None:
            value = round(value * ratio) if call.input_tokens is None else call.input_tokens
        threshold: int = settings[key]
        if value is not None and value > threshold:
            yield Notice(name, "over", threshold, value, f"{words.format(f'{value:,}')} is over {threshold:,}")
