"""Plots: sparklines for a terminal, and SVG for a page. No library, no script, nothing that is fetched.

Only numbers and our own words go in; who puts anything else into a page escapes it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Value = float | None

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_POINTS: Final = 400


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one layer of the bars. `style` is the number of its colour."""

    label: str
    values: Sequence[Value]
    style: int


def sparkline(values: Sequence[Value], width: int = 32) -> str:
    """The values as blocks, from nothing to the largest; several turns share one where they are many. A gap is a
    blank."""
    peaks, _ = thinned(values, width)
    top = max((value for value in peaks if value is not None), default=0)
    steps = (None if value is None else int(max(0, value) / top * len(_BLOCKS)) if top > 0 else 0 for value in peaks)
    return "".join(" " if step is None else _BLOCKS[min(len(_BLOCKS) - 1, step)] for step in steps)


def thinned(values: Sequence[Value], most: int) -> tuple[list[Value], int]:
    """At most so many values, each the largest of as many neighbours, and how many neighbours that is."""
    step = max(1, math.ceil(len(values) / most))
    groups = (values[at : at + step] for at in range(0, len(values), step))
    return [max((one for one in group if one is not None), default=None) for group in groups], step


def line_plot(title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None) -> str:
    """Lines over turns, with a dashed one at a limit."""
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
    return frame.drawn(title, marks)


def bar_plot(title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None) -> str:
    """Bars over turns, one layer on the other."""
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
    return frame.drawn(title, marks)


def plotted(turns: Sequence[int], series: Sequence[Series]) -> tuple[list[int], list[Series], int]:
    """What a plot can show of many turns: the largest value of each few, and how many those are."""
    step = max(1, math.ceil(len(turns) / _POINTS))
    fewer = [Series(one.label, thinned(one.values, _POINTS)[0], one.style) for one in series]
    return [turns[at] for at in range(0, len(turns), step)], fewer, step


class _Frame:
    """The axes of one plot, and where a value stands in it."""

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
        """The points of a line, broken where a value is missing."""
        found: list[list[str]] = [[]]
        for at, value in enumerate(values):
            if value is None:
                found.append([])
            else:
                found[-1].append(f"{self.x(at)},{self.y(value)}")
        return found

    def drawn(self, title: str, marks: Sequence[str]) -> str:
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
    """Round numbers from at most the lowest to at least the highest, five or so."""
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
