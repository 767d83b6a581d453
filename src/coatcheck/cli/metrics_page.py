"""Figures of model calls: the cells of a table, sparklines, and an HTML page with plots in SVG.

The page is self-contained: no scripts, and nothing is loaded. All text that is not ours is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final, Protocol

from coatcheck.cli.terminal import iso_time, one_line

if TYPE_CHECKING:
    from coatcheck.context.metrics import PromptMetrics

Value = float | None

MAX_SESSIONS: Final = 50
MAX_ROWS: Final = 500
MAX_WARNINGS: Final = 20
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_MAX_POINTS: Final = 400
_SUMS: Final = (
    "est_tokens", "tokens_without", "tokens_saved", "tokens_read_back", "tokens_net", "cost", "cost_without",
)  # fmt: skip

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

_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1e21;--dim:#5f666e;--grid:#e3e6e9;--card:#f6f7f8;--bad:#b3261e;
--c0:#2468b4;--c1:#c2571a;--c2:#2f7d4f;--c3:#7a4fa3;--c4:#8a6d00}
@media(prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e6e8ea;--dim:#9aa2ab;--grid:#2e3338;--card:#1f2327;
--bad:#ff8a80;--c0:#6cb0ff;--c1:#ff9d5c;--c2:#66c28c;--c3:#c19bea;--c4:#e0c04a}}
body{margin:0 auto;max-width:1240px;padding:24px;background:var(--bg);color:var(--fg)}
body{font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px}h2{font-size:18px;margin:32px 0 8px;overflow-wrap:anywhere}h3{font-size:14px;margin:0 0 4px}
.dim{color:var(--dim)}.bad{color:var(--bad)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--card);border-radius:8px}figcaption{font-size:13px;color:var(--dim)}
.tiles{display:flex;flex-wrap:wrap;gap:8px 28px;margin:8px 0 16px}.tiles b{display:block;font-size:20px}
svg.plot{width:100%;height:auto;display:block}.grid{stroke:var(--grid)}.tick{fill:var(--dim);font-size:11px}
.limit{stroke:var(--bad);stroke-dasharray:5 4}.line{fill:none;stroke-width:2}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}
.line{stroke:var(--c)}.dot,.bar{fill:var(--c)}
.key{display:inline-block;width:10px;height:10px;background:var(--c);margin:0 4px 0 10px}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
summary{cursor:pointer;margin:12px 0}section>h3{margin-top:16px}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one layer of bars. `style` is the number of its colour."""

    label: str
    values: Sequence[Value]
    style: int


class Plot(Protocol):
    def __call__(
        self, title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None
    ) -> str: ...


def figure(call: PromptMetrics, column: str) -> str:
    """One cell in a table of calls."""
    if column == "at":
        return (iso_time(round(call.at)) or "-") if call.at else "-"
    if column == "budget":
        used, budget = call.est_tokens, call.budget_tokens
        share = "?" if used is None or not budget else f"{used * 100 // budget}%"
        return share if call.budget_ok else f"{share} over"
    if column == "warnings":
        return str(len(call.warnings) or "-")
    value = getattr(call, column)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else one_line(str(value))


def new_warnings(calls: Sequence[PromptMetrics]) -> list[str]:
    """The warnings of calls that the previous call did not have."""
    found: list[str] = []
    before: set[tuple[str, str]] = set()
    for call in calls:
        found += [
            f"turn {call.turn or '?'}: {one.message}" for one in call.warnings if (one.figure, one.reason) not in before
        ]
        before = {(one.figure, one.reason) for one in call.warnings}
    return found


def totals(calls: Sequence[PromptMetrics]) -> dict[str, int]:
    """Sums over calls; figures that could not be counted are left out."""
    sums = {name: sum(getattr(call, name) or 0 for call in calls) for name in _SUMS}
    return {"calls": len(calls), **sums, "warnings": sum(len(call.warnings) for call in calls)}


def sparkline(values: Sequence[Value], width: int = 32) -> str:
    """Values as blocks, from zero to the largest. Long series are thinned; a missing value is a blank."""
    peaks, _ = thinned(values, width)
    top = max((value for value in peaks if value is not None), default=0)
    steps = (None if value is None else int(max(0, value) / top * len(_BLOCKS)) if top > 0 else 0 for value in peaks)
    return "".join(" " if step is None else _BLOCKS[min(len(_BLOCKS) - 1, step)] for step in steps)


def thinned(values: Sequence[Value], most: int) -> tuple[list[Value], int]:
    """At most `most` values, each the largest of `step` neighbours, and `step`."""
    step = max(1, math.ceil(len(values) / most))
    groups = (values[at : at + step] for at in range(0, len(values), step))
    return [max((one for one in group if one is not None), default=None) for group in groups], step


def page(sessions: Mapping[str, Sequence[PromptMetrics]]) -> str:
    """An HTML page with plots and a table for each session."""
    shown = list(sessions.items())[:MAX_SESSIONS]
    omitted = len(sessions) - len(shown)
    more = f'<p class="dim">{omitted:,} more sessions are not on this page; select them by name.</p>' if omitted else ""
    every = [call for calls in sessions.values() for call in calls]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Coatcheck metrics</title><style>{_STYLE}</style></head><body><h1>Coatcheck metrics</h1>"
        f'<p class="dim">{len(sessions):,} sessions, {len(every):,} model calls. Tokens are estimates.</p>'
        + _tiles(every)
        + "".join(_section(name, calls) for name, calls in shown)
        + more
        + "</body></html>\n"
    )


def line_plot(title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None) -> str:
    """An SVG with lines over turns, and a dashed line at the limit."""
    frame = _Frame(turns, [value for one in series for value in one.values], limit)
    marks = []
    for one in series:
        marks += [
            f'<polyline class="line s{one.style}" points="{" ".join(run)}"/>'
            for run in frame.runs(one.values)
            if len(run) > 1
        ]
        marks += [
            f'<circle class="dot s{one.style}" cx="{x}" cy="{y}" r="{3 if frame.is_sparse else 1.5}">'
            f"<title>{one.label}, turn {turn}: {value:,.0f}</title></circle>"
            for turn, x, y, value in frame.points(one.values)
        ]
    return frame.svg(title, marks)


def bar_plot(title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None) -> str:
    """An SVG with stacked bars over turns."""
    heights = [
        sum(max(0, value or 0) for value in column) for column in zip(*(one.values for one in series), strict=True)
    ]
    frame = _Frame(turns, heights, limit)
    marks = []
    below = [0.0] * len(turns)
    for one in series:
        for at, value in enumerate(one.values):
            if not value or value < 0:
                continue
            x, width = frame.slot(at)
            top, bottom = frame.y(below[at] + value), frame.y(below[at])
            below[at] += value
            marks.append(
                f'<rect class="bar s{one.style}" x="{x}" y="{top}" width="{width}" height="{round(bottom - top, 1)}">'
                f"<title>{one.label}, turn {turns[at]}: {value:,.0f}</title></rect>"
            )
    return frame.svg(title, marks)


def plotted(turns: Sequence[int], series: Sequence[Series]) -> tuple[list[int], list[Series], int]:
    """Turns and series thinned to what a plot can show, and the number of turns per point."""
    step = max(1, math.ceil(len(turns) / _MAX_POINTS))
    fewer = [Series(one.label, thinned(one.values, _MAX_POINTS)[0], one.style) for one in series]
    return [turns[at] for at in range(0, len(turns), step)], fewer, step


def _tiles(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    tiles = {
        "model calls": f"{sums['calls']:,}",
        "tokens sent": f"{sums['est_tokens']:,}",
        "tokens without stubs": f"{sums['tokens_without']:,}",
        "net saving": f"{sums['tokens_net']:,}",
        "of the cost without stubs": _percent(sums["cost"], sums["cost_without"]),
        "warnings": f"{sums['warnings']:,}",
    }
    return '<div class="tiles">' + "".join(f"<div><b>{text}</b>{name}</div>" for name, text in tiles.items()) + "</div>"


def _percent(part: int, whole: int) -> str:
    return f"{part * 100 / whole:.0f}%" if whole else "-"


def _section(name: str, calls: Sequence[PromptMetrics]) -> str:
    turns = [call.turn or number for number, call in enumerate(calls, 1)]
    budget = max((call.budget_tokens or 0 for call in calls), default=0) or None
    plots = [
        _figure(
            "Tokens of each prompt, with Coatcheck and without", turns, line_plot,
            _series(calls, {"with": "est_tokens", "without": "tokens_without"}),
        ),
        _figure(
            "Tokens saved in each prompt, gross and net", turns, line_plot,
            _series(calls, {"saved": "tokens_saved", "net": "tokens_net"}, first=2),
        ),
        _figure(
            "What the saving costs: tokens read back and the rest", turns, bar_plot,
            _series(calls, {"read back": "tokens_read_back", "stubs": "tokens_stubs", "schemas": "tokens_schemas",
                            "rewritten": "tokens_rewritten"}),
        ),
        _figure(
            f"Budget use: the prompt against {budget:,} tokens" if budget else "Budget use", turns, bar_plot,
            _series(calls, {"prompt": "est_tokens"}), limit=budget,
        ),
    ]  # fmt: skip
    drawn = f'<div class="plots">{"".join(plots)}</div>'
    return f"<section><h2>{_safe(name)}</h2>{_tiles(calls)}{drawn}{_warnings(calls)}{_table(calls)}</section>"


def _series(calls: Sequence[PromptMetrics], names: Mapping[str, str], first: int = 0) -> list[Series]:
    columns = ((label, [getattr(call, name) for call in calls]) for label, name in names.items())
    return [Series(label, values, first + number) for number, (label, values) in enumerate(columns)]


def _figure(
    title: str, turns: Sequence[int], plot: Plot, series: Sequence[Series], *, limit: float | None = None
) -> str:
    seen, fewer, step = plotted(turns, series)
    note = f"; each point is the largest of {step} turns" if step > 1 else ""
    keys = "".join(f'<span class="key s{one.style}"></span>{one.label}' for one in fewer)
    drawn = plot(title, seen, fewer, limit=limit)
    return f"<figure><h3>{title}</h3>{drawn}<figcaption>by turn{note}{keys}</figcaption></figure>"


def _warnings(calls: Sequence[PromptMetrics]) -> str:
    found = new_warnings(calls)
    items = "".join(f"<li>{_safe(one)}</li>" for one in found[-MAX_WARNINGS:])
    return f"<h3>New warnings{_newest(found, MAX_WARNINGS)}</h3><ul>{items}</ul>" if found else ""


def _newest(items: Sequence[object], most: int) -> str:
    return f" (the newest {most:,} of {len(items):,})" if len(items) > most else ""


def _table(calls: Sequence[PromptMetrics]) -> str:
    shown = calls[-MAX_ROWS:]
    texts = {column: [figure(call, column) for call in shown] for column in COLUMNS}
    columns = [column for column in COLUMNS if any(text != "-" for text in texts[column])]
    head = "".join(f'<th scope="col">{COLUMNS[column]}</th>' for column in columns)
    rows = []
    for number, call in enumerate(shown):
        cells = (f"<td{_class(call, column)}>{_safe(texts[column][number])}</td>" for column in columns)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<details open="open"><summary>Figures of each turn{_newest(calls, MAX_ROWS)}</summary><div class="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _class(call: PromptMetrics, column: str) -> str:
    return ' class="bad"' if column == "budget" and not call.budget_ok else ""


def _safe(text: str) -> str:
    return escape(one_line(text), quote=True)


class _Frame:
    """The axes of one plot, and the position of a value in it."""

    def __init__(self, turns: Sequence[int], values: Sequence[Value], limit: float | None) -> None:
        known = [value for value in values if value is not None]
        self._turns = turns
        self._limit = limit
        self._ticks = _ticks(min([0, *known]), max([1, *known, limit or 0]))
        self._low, self._high = self._ticks[0], self._ticks[-1]

    @property
    def is_sparse(self) -> bool:
        return len(self._turns) <= 40

    def x(self, at: int) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + room * (at + 0.5) / max(1, len(self._turns)), 1)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def slot(self, at: int) -> tuple[float, float]:
        """The left edge and the width of a bar."""
        room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(self._turns))
        width = max(0.5, min(28, room * 0.8))
        return round(self.x(at) - width / 2, 1), round(width, 1)

    def points(self, values: Sequence[Value]) -> list[tuple[int, float, float, float]]:
        return [
            (self._turns[at], self.x(at), self.y(value), value) for at, value in enumerate(values) if value is not None
        ]

    def runs(self, values: Sequence[Value]) -> list[list[str]]:
        """The points of a line, split where a value is missing."""
        found: list[list[str]] = [[]]
        for at, value in enumerate(values):
            if value is None:
                found.append([])
            else:
                found[-1].append(f"{self.x(at)},{self.y(value)}")
        return found

    def svg(self, title: str, marks: Sequence[str]) -> str:
        parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
        for tick in self._ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(tick)}</text>')
        every = max(1, math.ceil(len(self._turns) / 10))
        parts += [
            f'<text class="tick" x="{self.x(at)}" y="{_HEIGHT - 8}" text-anchor="middle">{self._turns[at]}</text>'
            for at in range(0, len(self._turns), every)
        ]
        parts += marks
        if self._limit is not None:
            y = self.y(self._limit)
            parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span the lowest and the highest value."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * at, 6) for at in range(first, last + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
