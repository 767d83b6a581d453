"""Metrics as one page of HTML: it stands alone, fetches nothing and runs nothing. What it did not make itself is
escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final, Protocol

from coatcheck.cli.plots import Series, bar_plot, line_plot, plotted
from coatcheck.cli.terminal import iso_time, one_line

if TYPE_CHECKING:
    from coatcheck.context.metrics import PromptMetrics

MOST_SESSIONS: Final = 50
MOST_ROWS: Final = 500
MOST_WARNINGS: Final = 20

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


class Plot(Protocol):
    def __call__(
        self, title: str, turns: Sequence[int], series: Sequence[Series], *, limit: float | None = None
    ) -> str: ...


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


def page(sessions: Mapping[str, Sequence[PromptMetrics]]) -> str:
    """One page with plots and a table for each session, the first ones first."""
    shown = list(sessions.items())[:MOST_SESSIONS]
    left = len(sessions) - len(shown)
    more = f'<p class="dim">{left:,} more sessions are not on this page: name those you want.</p>' if left else ""
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


def figure_of(call: PromptMetrics, column: str) -> str:
    """One cell of a table of calls."""
    if column == "at":
        return (iso_time(round(call.at)) or "-") if call.at else "-"
    if column == "budget":
        return _share(call) if call.budget_ok else f"{_share(call)} over"
    if column == "warnings":
        return str(len(call.warnings) or "-")
    value = getattr(call, column)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else one_line(str(value))


def began(calls: Sequence[PromptMetrics]) -> list[str]:
    """What there was to be warned of, each when it began."""
    told: list[str] = []
    before: set[tuple[str, str]] = set()
    for call in calls:
        told += [
            f"turn {call.turn or '?'}: {one.message}" for one in call.warnings if (one.figure, one.reason) not in before
        ]
        before = {(one.figure, one.reason) for one in call.warnings}
    return told


def totals(calls: Sequence[PromptMetrics]) -> dict[str, int]:
    """Sums over calls, of what could be counted."""
    names = ("est_tokens", "tokens_without", "tokens_saved", "tokens_read_back", "tokens_net", "cost", "cost_without")
    sums = {name: sum(getattr(call, name) or 0 for call in calls) for name in names}
    return {"calls": len(calls), **sums, "warnings": sum(len(call.warnings) for call in calls)}


def _share(call: PromptMetrics) -> str:
    if call.est_tokens is None or not call.budget_tokens:
        return "?"
    return f"{call.est_tokens * 100 // call.budget_tokens}%"


def _tiles(calls: Sequence[PromptMetrics]) -> str:
    said = totals(calls)
    tiles = {
        "model calls": f"{said['calls']:,}",
        "tokens sent": f"{said['est_tokens']:,}",
        "tokens without stubs": f"{said['tokens_without']:,}",
        "net saving": f"{said['tokens_net']:,}",
        "of the cost without": _percent(said["cost"], said["cost_without"]),
        "warnings": f"{said['warnings']:,}",
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
            "Tokens saved in each prompt, and what is left of that", turns, line_plot,
            _series(calls, {"saved": "tokens_saved", "net": "tokens_net"}, first=2),
        ),
        _figure(
            "What the saving takes: tokens read back and the rest", turns, bar_plot,
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
    told = began(calls)
    shown = told[-MOST_WARNINGS:]
    left = f" (the newest {len(shown):,} of {len(told):,})" if len(shown) < len(told) else ""
    items = "".join(f"<li>{_safe(one)}</li>" for one in shown)
    return f"<h3>Warnings, when they began{left}</h3><ul>{items}</ul>" if told else ""


def _table(calls: Sequence[PromptMetrics]) -> str:
    shown = calls[-MOST_ROWS:]
    left = f" (the newest {len(shown):,} of {len(calls):,})" if len(shown) < len(calls) else ""
    said = {column: [figure_of(call, column) for call in shown] for column in COLUMNS}
    columns = [column for column in COLUMNS if any(text != "-" for text in said[column])]
    head = "".join(f'<th scope="col">{COLUMNS[column]}</th>' for column in columns)
    rows = []
    for number, call in enumerate(shown):
        cells = (f"<td{_class(call, column)}>{_safe(said[column][number])}</td>" for column in columns)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<details open="open"><summary>Figures of each turn{left}</summary><div class="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _class(call: PromptMetrics, column: str) -> str:
    return ' class="bad"' if column == "budget" and not call.budget_ok else ""


def _safe(text: str) -> str:
    return escape(one_line(text), quote=True)
