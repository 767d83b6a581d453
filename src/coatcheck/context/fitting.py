"""A hot state made to fit: a ladder of renderings, each showing a little less than the one above.

The rungs are fixed by the state alone, and the search for the highest that fits asks about the same ones in the same
order. So a larger limit never shows less, whatever the counter does. Each rung says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from coatcheck.context.budget import Budget, Violation
from coatcheck.context.hot_state import compact
from coatcheck.errors import BudgetExceeded
from coatcheck.tokens import TokenCounter, counted

__all__ = ["Rendered", "fitted"]

MINIMAL: Final = "all but ids and risk"
_IDS: Final = ("session_id", "session_key", "run_id", "risk_level", "current_plan_id")
_LISTS: Final = ("open_questions", "accepted_decisions", "constraints")  # the least important first
_TEXTS: Final = ("last_successful_step", "objective")
_SHORTEST: Final = 16  # characters: what would be shorter is left out


@dataclass(frozen=True, slots=True)
class Rendered:
    """A hot state as it goes into a prompt: one line of JSON, what it costs, and each step that made it fit.

    `entries` is how many artifacts it lists, `types` are their kinds in that order."""

    text: str
    tokens: int
    bytes: int
    steps: tuple[str, ...] = ()
    entries: int = 0
    types: tuple[str, ...] = ()

    def render(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def fitted(shown: Mapping[str, Any], budget: Budget, count: TokenCounter) -> Rendered:
    """The highest rung that fits. Raises `BudgetExceeded`."""
    ladder = _Ladder(shown, budget.max_artifact_index_entries)
    limit = budget.max_hot_state_tokens
    best = _tried(ladder, 0, budget, count)
    if best.tokens > limit:
        low, high = 1, ladder.last
        best = _tried(ladder, high, budget, count) if high else best
        if best.tokens > limit:
            message = f"even ids and risk alone have {best.tokens:,} tokens: over max_hot_state_tokens ({limit:,})"
            raise _refusal(Violation("max_hot_state_tokens", limit, best.tokens, message))
        while low < high:
            middle = (low + high) // 2
            found = _tried(ladder, middle, budget, count)
            if found.tokens <= limit:
                best, high = found, middle
            else:
                low = middle + 1
    return best


def _tried(ladder: _Ladder, number: int, budget: Budget, count: TokenCounter) -> Rendered:
    said, steps = ladder.rung(number)
    text = compact(said)
    tokens = counted(count, text)
    if tokens is None:
        raise _refusal(*budget.hot_state_tokens(None))
    index = said.get("artifact_index", [])
    return Rendered(text, tokens, len(text.encode()), steps, len(index), tuple(entry["type"] for entry in index))


def _refusal(*violations: Violation) -> BudgetExceeded:
    from coatcheck.context.references import refusal

    return refusal(violations)


class _Cut(NamedTuple):
    """What one kind of step may leave of a field: from nearly all of it to nothing."""

    field: str
    left: range
    whole: int


class _Ladder:
    """The rungs of one state: 0 shows all that the limit of entries allows, `last` ids and risk alone."""

    def __init__(self, shown: Mapping[str, Any], most_entries: int) -> None:
        self._shown = shown
        index = shown.get("artifact_index", [])
        self._all_entries = len(index)
        self._index = index[:most_entries]
        longest = max((len(entry.get("summary", "")) for entry in self._index), default=0)
        lists = [(name, len(shown.get(name, ()))) for name in _LISTS]
        texts = [(name, len(shown.get(name, ""))) for name in _TEXTS]
        self._cuts = [
            _Cut("summaries", _lengths(longest)[:-1], longest),
            _Cut("summarized", range(len(self._index) - 1, -1, -1) if longest else range(0), len(self._index)),
            _Cut("artifact_index", range(len(self._index) - 1, -1, -1), self._all_entries),
            *(_Cut(name, range(size - 1, -1, -1), size) for name, size in lists),
            *(_Cut(name, _lengths(size), size) for name, size in texts),
        ]
        self.last = sum(len(cut.left) for cut in self._cuts)

    def rung(self, number: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a rung shows, and the steps down to it."""
        said = dict(self._shown)
        index = self._index
        taken: list[_Taken] = []
        for cut in self._cuts:
            down = min(number, len(cut.left))
            number -= down
            left = cut.left[down - 1] if down else None
            if cut.field == "artifact_index":
                index = index[:left]
                said["artifact_index"] = index
                left = len(index) if len(index) < cut.whole else None
            elif left is None:
                continue
            elif cut.field == "summaries":
                index = [_with_summary(entry, left) for entry in index]
            elif cut.field == "summarized":
                index = [*index[:left], *(_with_summary(entry, 0) for entry in index[left:])]
                taken = taken if left else []  # how long they were tells nothing where there are none
            elif cut.field in _LISTS:
                said[cut.field] = said[cut.field][cut.whole - left :]
            else:
                left = left if left >= _SHORTEST else 0
                said[cut.field] = _cut(said[cut.field], left)
            if left is not None:
                taken.append(_Taken(cut.field, left, cut.whole))
        said = {name: value for name, value in said.items() if value or name in _IDS}
        minimal = bool(taken) and not said.keys() - set(_IDS)
        if taken:
            said["truncated"] = [f"left out: {MINIMAL}"] if minimal else _told(taken)
        return said, (*(str(one) for one in taken), *([MINIMAL] if minimal else []))


class _Taken(NamedTuple):
    """A step that was taken: how much it left of how much."""

    field: str
    left: int
    whole: int

    def __str__(self) -> str:
        if self.field == "summaries":
            return f"summaries: {self.left} characters at most"
        if self.field == "summarized":
            return f"summaries: {self.left or 'none'} of {self.whole}"
        how = "newest " if self.field in _LISTS else ""
        return f"{self.field}: {how}{self.left} of {self.whole}" + (" characters" if self.field in _TEXTS else "")

    @property
    def gone(self) -> str:
        """The field that it left nothing of, in as few words as say it."""
        if self.field in _LISTS:
            return f"{self.whole} {self.field}"
        return {"summarized": "summaries", "artifact_index": f"{self.whole} artifacts"}.get(self.field, self.field)


def _told(taken: list[_Taken]) -> list[str]:
    """The steps as the model is told of them: a few words, for they count too."""
    gone = [one.gone for one in taken if not one.left]
    return [*(["left out: " + ", ".join(gone)] if gone else []), *(str(one) for one in taken if one.left)]


def _lengths(whole: int) -> range:
    """The lengths that a text can be cut to, one by one. The last stands for nothing at all."""
    return range(max(whole, _SHORTEST) - 1, _SHORTEST - 2, -1) if whole else range(0)


def _with_summary(entry: Mapping[str, Any], limit: int) -> dict[str, Any]:
    said = dict(entry) | {"summary": _cut(entry.get("summary", ""), limit)}
    return {name: value for name, value in said.items() if value}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…" if limit else ""
