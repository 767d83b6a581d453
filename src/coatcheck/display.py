"""What people look at: text with its unsafe characters visible, ages, and plots as SVG.

Names, summaries, tools and content are untrusted: characters that a terminal or a browser would
obey or hide (controls, escapes, bidirectional marks, invisible formats) become escapes such as
`\\x1b` or `\\u202e`. The command line, the page of metrics and the console share this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    known = [one for one in (heights if stacked else [*chain(*series.values())]) if one is not None]
    ticks = _ticks(min([0, *known]), max([1, *known, limit or 0]))
    room = (_WIDTH - _LEFT - _RIGHT) / max(1, len(turns))
    width = max(0.5, min(28, room * 0.8))
    radius = 3 if len(turns) <= _FEW_POINTS else 1.5

    def x(at: int) -> float:
        return round(_LEFT + room * (at + 0.5), 1)

    def y(value: float) -> float:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def rule(style: str, value: float) -> str:
        return (
            f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" '
            f'y2="{y(value)}"/>'
        )

    def text(left: float, top: float, anchor: str, shown: object) -> str:
        return f'<text class="tick" x="{left}" y="{top}" text-anchor="{anchor}">{shown}</text>'

    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
    parts += [
        rule("grid", tick) + text(_LEFT - 6, y(tick) + 4, "end", _short(tick)) for tick in ticks
    ]
    every = max(1, math.ceil(len(turns) / 10))
    parts += [text(x(at), _HEIGHT - 8, "middle", turns[at]) for at in range(0, len(turns), every)]
    below = [0.0] * len(turns)
    for style, (label, values) in enumerate(series.items(), colour):
        for _, run in groupby(
            enumerate(values), key=lambda point: point[1] is None
        ):  # a missing value splits a line
            points = [f"{x(at)},{y(value)}" for at, value in run if value is not None]
            if len(points) > 1 and not stacked:
                parts.append(f'<polyline class="line s{style}" points="{" ".join(points)}"/>')
        for at, value in enumerate(values):
            if value is None:
                continue
            hint = f"<title>{label}, {unit} {turns[at]}: {value:,.0f}</title>"
            if not stacked:
                parts.append(
                    f'<circle class="dot s{style}" cx="{x(at)}" cy="{y(value)}" '
                    f'r="{radius}">{hint}</circle>'
                )
            elif value > 0:
                top, bottom = y(below[at] + value), y(below[at])
                below[at] += value
                parts.append(
                    f'<rect class="bar s{style}" x="{round(x(at) - width / 2, 1)}" y="{top}" '
                    f'width="{round(width, 1)}" height="{round(bottom - top, 1)}">{hint}</rect>'
                )
    if limit is not None:
        parts.append(rule("limit", limit))
    for at, turn in enumerate(turns):
        if turn in (marked or {}):
            shape = f"M{x(at) - 4} {_TOP - 10}h8l-4 7z"
            parts.append(
                f'<path class="mark" d="{shape}"><title>{(marked or {})[turn]}</title></path>'
            )
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
