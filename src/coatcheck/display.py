"""What people look at: text with its unsafe characters visible, ages, and plots as SVG.

Names, summaries, tools and content are untrusted: characters that a terminal or a browser would
obey or hide (controls, escapes, bidirectional marks, invisible formats) become escapes such as
`\\x1b` or `\\u202e`. The command line, the page of metrics and the console share this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Final

Value = float | None

_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))
_FEW_POINTS: Final = 40
_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28


class _Escapes(dict[int, str]):
    """A table for `str.translate` that is filled on demand. Harmless characters map to
    themselves."""

    def __missing__(self, code: int) -> str:
        import unicodedata  # here, so that the command line starts quickly

        char = chr(code)
        unsafe = unicodedata.category(char) in _UNSAFE
        self[code] = char.encode("unicode_escape").decode("ascii") if unsafe else char
        return self[code]


_LINE: Final = _Escapes()
_TEXT: Final = _Escapes({ord("\n"): "\n", ord("\t"): "\t"})


def visible(text: str) -> str:
    """Escape everything unsafe on a terminal or a page; line ends and tabs stay."""
    return text.translate(_TEXT)


def one_line(text: str) -> str:
    """Escape everything unsafe on a terminal, a page or in a column, including line ends and
    tabs."""
    return text.translate(_LINE)


def age(moment: str) -> str:
    """How long ago a moment was, as "5 min", or how far ahead it is, as "in 5 min"."""
    from datetime import UTC, datetime

    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    unit, size = next(((unit, size) for unit, size in _UNITS if abs(seconds) >= size), ("s", 1))
    text = f"{int(abs(seconds)) // size} {unit}"
    return text if seconds > -1 else f"in {text}"


def thinned(values: Sequence[Value], most: int) -> tuple[list[Value], int]:
    """At most `most` values, each the largest of `step` neighbours, and `step`."""
    step = max(1, math.ceil(len(values) / most))
    groups = (values[at : at + step] for at in range(0, len(values), step))
    return [max((one for one in group if one is not None), default=None) for group in groups], step


def plot(
    title: str,
    turns: Sequence[int | str],
    series: Mapping[str, Sequence[Value]],
    *,
    colour: int = 0,
    stacked: bool = False,
    limit: float | None = None,
    marked: Mapping[int | str, str] | None = None,
    unit: str = "turn",
) -> str:
    """An SVG with lines or stacked bars over turns, and a dashed line at the limit. `series` has
    labels and values; `colour` is the number of the first one's colour. `marked` are turns with a
    mark, and what it says; `unit` is what a turn is called."""
    columns = zip(*series.values(), strict=True)
    heights: list[Value] = [sum(max(0, value or 0) for value in column) for column in columns]
    shown = heights if stacked else chain(*series.values())
    known = [one for one in shown if one is not None]
    axes = _Axes(turns, _ticks(min([0, *known]), max([1, *known, limit or 0])), unit)
    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
    parts += axes.grid()
    if stacked:
        parts += axes.bars(series, colour)
    else:
        for style, (label, values) in enumerate(series.items(), colour):
            parts += axes.lines(values, style)
            parts += axes.dots(label, values, style)
    if limit is not None:
        parts.append(axes.rule("limit", limit))
    parts += axes.marks(marked or {})
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Axes:
    """Where turns and values are in a plot, and what is drawn there."""

    turns: Sequence[int | str]
    ticks: Sequence[float]
    unit: str

    @property
    def room(self) -> float:
        """The width of a turn."""
        return (_WIDTH - _LEFT - _RIGHT) / max(1, len(self.turns))

    def x(self, at: int) -> float:
        return round(_LEFT + self.room * (at + 0.5), 1)

    def y(self, value: float) -> float:
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> Iterator[str]:
        """A line for each tick, the numbers beside them, and about ten turns below."""
        for tick in self.ticks:
            yield self.rule("grid", tick)
            yield _text(_LEFT - 6, self.y(tick) + 4, "end", _short(tick))
        for at in range(0, len(self.turns), max(1, math.ceil(len(self.turns) / 10))):
            yield _text(self.x(at), _HEIGHT - 8, "middle", self.turns[at])

    def rule(self, style: str, value: float) -> str:
        y = self.y(value)
        return f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'

    def lines(self, values: Sequence[Value], style: int) -> Iterator[str]:
        """A line through the values. A missing value splits it."""
        for _, run in groupby(enumerate(values), key=lambda point: point[1] is None):
            points = [f"{self.x(at)},{self.y(value)}" for at, value in run if value is not None]
            if len(points) > 1:
                yield f'<polyline class="line s{style}" points="{" ".join(points)}"/>'

    def dots(self, label: str, values: Sequence[Value], style: int) -> Iterator[str]:
        radius = 3 if len(self.turns) <= _FEW_POINTS else 1.5
        for at, value in enumerate(values):
            if value is not None:
                yield (
                    f'<circle class="dot s{style}" cx="{self.x(at)}" cy="{self.y(value)}" '
                    f'r="{radius}">{self._hint(label, at, value)}</circle>'
                )

    def bars(self, series: Mapping[str, Sequence[Value]], colour: int) -> Iterator[str]:
        """The bars of all series, each above the one before it."""
        width = max(0.5, min(28, self.room * 0.8))
        below = [0.0] * len(self.turns)
        for style, (label, values) in enumerate(series.items(), colour):
            for at, value in enumerate(values):
                if value is None or value <= 0:
                    continue
                top, bottom = self.y(below[at] + value), self.y(below[at])
                below[at] += value
                yield (
                    f'<rect class="bar s{style}" x="{round(self.x(at) - width / 2, 1)}" y="{top}" '
                    f'width="{round(width, 1)}" height="{round(bottom - top, 1)}">'
                    f"{self._hint(label, at, value)}</rect>"
                )

    def marks(self, marked: Mapping[int | str, str]) -> Iterator[str]:
        for at, turn in enumerate(self.turns):
            if turn in marked:
                shape = f"M{self.x(at) - 4} {_TOP - 10}h8l-4 7z"
                yield f'<path class="mark" d="{shape}"><title>{marked[turn]}</title></path>'

    def _hint(self, label: str, at: int, value: float) -> str:
        return f"<title>{label}, {self.unit} {self.turns[at]}: {value:,.0f}</title>"


def _text(left: float, top: float, anchor: str, shown: object) -> str:
    return f'<text class="tick" x="{left}" y="{top}" text-anchor="{anchor}">{shown}</text>'


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
