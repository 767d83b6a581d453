"""Figures of model calls as text: cells of tables, sums, sparklines, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from coatcheck.cli.terminal import one_line
from coatcheck.display import Value, thinned
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck.context.metrics import PromptMetrics

COLUMNS: Final[Mapping[str, str]] = {
    "turn": "turn",
    "at": "time",
    "est_tokens": "prompt",
    "tokens_without": "without",
    "tokens_saved": "saved",
    "tokens_stubs": "stubs",
    "tokens_read_back": "read back",
    "tokens_schemas": "schemas",
    "tokens_rewritten": "rewritten",
    "tokens_net": "net",
    "cost": "cost",
    "cost_without": "cost without",
    "input_tokens": "counted in",
    "output_tokens": "counted out",
    "hs_tokens": "hot state",
    "artifacts": "index",
    "budget": "budget",
    "warnings": "warnings",
}
"""The figures of a call, with their headings."""
SAVINGS_COLUMNS: Final[Mapping[str, str]] = {
    "tokens_net": "net",
    "tokens_kept_out": "kept out",
    "tokens_read_back": "read back",
    "results": "results",
    "surface": "surface",
    "server": "server",
    "tool": "tool",
}
"""The figures of savings, with their headings."""
_SUMS: Final = (
    "est_tokens",
    "tokens_without",
    "tokens_saved",
    "tokens_read_back",
    "tokens_net",
    "cost",
    "cost_without",
)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


def figure(call: PromptMetrics, column: str) -> str:
    """Return the text of one cell in a table of calls."""
    if column == "at":
        time = iso_time(round(call.at)) if call.at else None
        return time or "-"
    if column == "budget":
        return _budget_share(call)
    if column == "warnings":
        return str(len(call.warnings) or "-")
    value = getattr(call, column)
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else one_line(str(value))


def _budget_share(call: PromptMetrics) -> str:
    if call.est_tokens is None or not call.budget_tokens:
        share = "?"
    else:
        share = f"{call.est_tokens * 100 // call.budget_tokens}%"
    return share if call.budget_ok else f"{share} over"


def new_warnings(calls: Sequence[PromptMetrics]) -> list[str]:
    """Return the warnings of calls that the previous call did not have."""
    found: list[str] = []
    before: set[tuple[str, str]] = set()
    for call in calls:
        new = [one for one in call.warnings if (one.figure, one.reason) not in before]
        found += [f"turn {call.turn or '?'}: {one.message}" for one in new]
        before = {(one.figure, one.reason) for one in call.warnings}
    return found


def totals(calls: Sequence[PromptMetrics]) -> dict[str, int]:
    """Return sums over calls; figures that could not be counted are left out."""
    sums = {name: sum(getattr(call, name) or 0 for call in calls) for name in _SUMS}
    return {"calls": len(calls), **sums, "warnings": sum(len(call.warnings) for call in calls)}


def cost_share(sums: Mapping[str, int]) -> str | None:
    """Return the cost as a percentage of the cost without stubs, None if that is unknown."""
    if not sums["cost_without"]:
        return None
    return f"{sums['cost'] * 100 / sums['cost_without']:.0f}%"


def sparkline(values: Sequence[Value], width: int = 32) -> str:
    """Return values as blocks, from zero to the largest. Long series are thinned; a missing value
    is a blank."""
    peaks, _ = thinned(values, width)
    top = max((value for value in peaks if value is not None), default=0)
    return "".join(_block(value, top) for value in peaks)


def _block(value: Value, top: float) -> str:
    if value is None:
        return " "
    step = int(max(0, value) / top * len(_BLOCKS)) if top > 0 else 0
    return _BLOCKS[min(len(_BLOCKS) - 1, step)]
