"""The HTML page of `coatcheck metrics --html`: savings, then plots and a table for each session.

It is self-contained: no scripts, and nothing is loaded. All text that is not ours is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Final

from coatcheck.cli.figures import (
    COLUMNS,
    SAVINGS_COLUMNS,
    cost_share,
    figure,
    new_warnings,
    totals,
)
from coatcheck.cli.terminal import one_line
from coatcheck.display import plot, thinned

if TYPE_CHECKING:
    from coatcheck.context import Savings
    from coatcheck.context.metrics import PromptMetrics

MAX_SESSIONS: Final = 50
MAX_ROWS: Final = 500
MAX_WARNINGS: Final = 20
_MAX_POINTS: Final = 400
_TILES: Final = {
    "calls": "model calls",
    "est_tokens": "tokens sent",
    "tokens_without": "tokens without stubs",
    "tokens_net": "net saving",
    "percent": "of the cost without stubs",
    "warnings": "warnings",
}


@dataclass(frozen=True, slots=True)
class _Plot:
    """A plot over the turns of a session. `series` has a label and the name of a figure for each
    line; the rest are options of `display.plot`."""

    title: str
    series: Mapping[str, str]
    colour: int = 0
    stacked: bool = False
    limit: int | None = None


_PLOTS: Final = (
    _Plot(
        "Tokens of each prompt, with Coatcheck and without",
        {"with": "est_tokens", "without": "tokens_without"},
    ),
    _Plot(
        "Tokens saved in each prompt, gross and net",
        {"saved": "tokens_saved", "net": "tokens_net"},
        colour=2,
    ),
    _Plot(
        "What the saving costs: tokens read back and the rest",
        {
            "read back": "tokens_read_back",
            "stubs": "tokens_stubs",
            "schemas": "tokens_schemas",
            "rewritten": "tokens_rewritten",
        },
        stacked=True,
    ),
)


def page(sessions: Mapping[str, Sequence[PromptMetrics]], saved: Savings | None = None) -> str:
    """Return an HTML page with the savings of the store, and plots and a table for each session."""
    every = [call for calls in sessions.values() for call in calls]
    body = _tiles(every) + _savings_section(saved)
    for name, calls in list(sessions.items())[:MAX_SESSIONS]:
        body += _section(name, calls)
    omitted = len(sessions) - MAX_SESSIONS
    if omitted > 0:
        body += (
            f'<p class="dim">{omitted:,} more sessions are not on this page; '
            "select them by name.</p>"
        )
    template = Template(files("coatcheck.cli").joinpath("metrics.html").read_text("utf-8"))
    return template.substitute(sessions=f"{len(sessions):,}", calls=f"{len(every):,}", body=body)


def _tiles(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    texts = {name: f"{value:,}" for name, value in sums.items()}
    texts["percent"] = cost_share(sums) or "-"
    tiles = "".join(f"<div><b>{texts[name]}</b>{label}</div>" for name, label in _TILES.items())
    return f'<div class="tiles">{tiles}</div>'


def _savings_section(saved: Savings | None) -> str:
    if saved is None or not saved.rows:
        return ""
    body = ""
    for row in saved.by("surface", "server", "tool")[:MAX_ROWS]:
        record = row.to_record()
        body += "<tr>"
        for name in SAVINGS_COLUMNS:
            value = record[name]
            body += f"<td>{f'{value:,}' if isinstance(value, int) else _safe(value)}</td>"
        body += "</tr>"
    table = _table(SAVINGS_COLUMNS.values(), body)
    return f"<section><h2>Savings</h2><p>{saved}</p>{table}</section>"


def _section(name: str, calls: Sequence[PromptMetrics]) -> str:
    budget = max((call.budget_tokens or 0 for call in calls), default=0) or None
    title = f"Budget use: the prompt against {budget:,} tokens" if budget else "Budget use"
    budget_plot = _Plot(title, {"prompt": "est_tokens"}, stacked=True, limit=budget)
    plots = "".join(_figure(one, calls) for one in (*_PLOTS, budget_plot))
    return (
        f"<section><h2>{_safe(name)}</h2>{_tiles(calls)}"
        f'<div class="plots">{plots}</div>{_warnings(calls)}{_turns(calls)}</section>'
    )


def _figure(wanted: _Plot, calls: Sequence[PromptMetrics]) -> str:
    turns = [call.turn or number for number, call in enumerate(calls, 1)]
    step = max(1, math.ceil(len(turns) / _MAX_POINTS))
    series = {}
    keys = ""
    for number, (label, name) in enumerate(wanted.series.items(), wanted.colour):
        series[label] = thinned([getattr(call, name) for call in calls], _MAX_POINTS)[0]
        keys += f'<span class="key s{number}"></span>{label}'
    drawn = plot(
        wanted.title,
        turns[::step],
        series,
        colour=wanted.colour,
        stacked=wanted.stacked,
        limit=wanted.limit,
    )
    note = f"; each point is the largest of {step} turns" if step > 1 else ""
    caption = f"<figcaption>by turn{note}{keys}</figcaption>"
    return f"<figure><h3>{wanted.title}</h3>{drawn}{caption}</figure>"


def _warnings(calls: Sequence[PromptMetrics]) -> str:
    found = new_warnings(calls)
    if not found:
        return ""
    items = "".join(f"<li>{_safe(one)}</li>" for one in found[-MAX_WARNINGS:])
    return f"<h3>New warnings{_newest(found, MAX_WARNINGS)}</h3><ul>{items}</ul>"


def _turns(calls: Sequence[PromptMetrics]) -> str:
    """Return the table of the newest calls, without the columns in which no call has a figure."""
    rows = [{column: figure(call, column) for column in COLUMNS} for call in calls[-MAX_ROWS:]]
    columns = [column for column in COLUMNS if any(row[column] != "-" for row in rows)]
    body = ""
    for row in rows:
        body += "<tr>"
        for column in columns:
            style = ' class="bad"' if row[column].endswith(" over") else ""
            body += f"<td{style}>{_safe(row[column])}</td>"
        body += "</tr>"
    table = _table([COLUMNS[column] for column in columns], body)
    summary = f"<summary>Figures of each turn{_newest(calls, MAX_ROWS)}</summary>"
    return f'<details open="open">{summary}{table}</details>'


def _table(headings: Iterable[str], rows: str) -> str:
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _newest(items: Sequence[object], most: int) -> str:
    return f" (the newest {most:,} of {len(items):,})" if len(items) > most else ""


def _safe(text: str) -> str:
    return escape(one_line(text), quote=True)
