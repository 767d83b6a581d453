"""Commands for what prompts carry: hot shows the hot state of a session, metrics the figures of its
model calls.

Figures are shown as a table, sparklines, JSON, an HTML page with plots, and baselines. The page is
self-contained: no scripts, and nothing is loaded. All text that is not ours is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from coatcheck import errors
from coatcheck.cli import open_existing, setting, store_options, terminal, usage_error
from coatcheck.display import Value, plot, thinned
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck import Session, Store
    from coatcheck.context import Savings, Snapshot
    from coatcheck.context.metrics import PromptMetrics
    from coatcheck.storage import Record

_SERIES: Final = "hot"
_NAME_WIDTH: Final = 22
_STATES: Final = {
    "number": "number", "written_at": "time", "holder": "holder", "risk_level": "risk", "artifacts": "artifacts",
    "changed": "changed",
}  # fmt: skip
HAS_RISEN: Final = 1
MAX_SESSIONS: Final = 50
MAX_ROWS: Final = 500
MAX_WARNINGS: Final = 20
_MAX_NOTES: Final = 10
_MAX_POINTS: Final = 400
_BLOCKS: Final = "▁▂▃▄▅▆▇█"

COLUMNS: Final[Mapping[str, str]] = {
    "turn": "turn", "at": "time", "est_tokens": "prompt", "tokens_without": "without", "tokens_saved": "saved",
    "tokens_stubs": "stubs", "tokens_read_back": "read back", "tokens_schemas": "schemas",
    "tokens_rewritten": "rewritten", "tokens_net": "net", "cost": "cost", "cost_without": "cost without",
    "input_tokens": "counted in", "output_tokens": "counted out", "hs_tokens": "hot state", "artifacts": "index",
    "budget": "budget", "warnings": "warnings",
}  # fmt: skip
"""The figures of a call, with their headings."""

_SHORT: Final = {
    "turn": "turn", "est_tokens": "prompt", "tokens_without": "without", "tokens_saved": "saved",
    "tokens_read_back": "read", "tokens_net": "net", "hs_tokens": "hot", "artifacts": "index", "budget": "budget",
    "warnings": "warn",
}  # fmt: skip
_SPARKLINES: Final = {
    "prompt": "est_tokens", "without": "tokens_without", "saved": "tokens_saved", "read back": "tokens_read_back",
    "net": "tokens_net",
}  # fmt: skip
_SUMS: Final = (
    "est_tokens", "tokens_without", "tokens_saved", "tokens_read_back", "tokens_net", "cost", "cost_without",
)  # fmt: skip
_TILES: Final = {
    "calls": "model calls", "est_tokens": "tokens sent", "tokens_without": "tokens without stubs",
    "tokens_net": "net saving", "percent": "of the cost without stubs", "warnings": "warnings",
}  # fmt: skip
_PLOTS: Final[tuple[tuple[str, Mapping[str, str], dict[str, Any]], ...]] = (
    ("Tokens of each prompt, with Coatcheck and without", {"with": "est_tokens", "without": "tokens_without"}, {}),
    ("Tokens saved in each prompt, gross and net", {"saved": "tokens_saved", "net": "tokens_net"}, {"colour": 2}),
    ("What the saving costs: tokens read back and the rest",
     {"read back": "tokens_read_back", "stubs": "tokens_stubs", "schemas": "tokens_schemas",
      "rewritten": "tokens_rewritten"}, {"stacked": True}),
)  # fmt: skip
"""The plots of a session: title, labels and figures, options of `plot`."""
_OVER: Final = ' class="bad"'
_SAVINGS: Final = {
    "tokens_net": "net", "tokens_kept_out": "kept out", "tokens_read_back": "read back", "results": "results",
    "surface": "surface", "server": "server", "tool": "tool",
}  # fmt: skip

Calls = dict[str, "list[PromptMetrics]"]
"""Model calls by session."""


@click.command()
@click.argument("session_id", metavar="SESSION", envvar="COATCHECK_SESSION")
@click.argument("numbers", metavar="[N [M]]", nargs=-1, type=click.IntRange(min=1))
@click.option("--history", is_flag=True, help="List the states, newest first.")
@click.option("--diff", is_flag=True, help="Changes from state N to M. Default: the last two.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Maximum number of states.",
)
@store_options
def hot(
    session_id: str,
    numbers: tuple[int, ...],
    history: bool,
    diff: bool,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the hot state of a SESSION.

    Shows the newest state, or number N of its history."""
    if history + diff > 1 or len(numbers) > (2 if diff else 0 if history else 1):
        raise usage_error("specify one state, --history, or --diff with at most two numbers")
    with open_existing(url) as store:
        session = store.session(session_id)
        if history:
            rows = list(_history(session, limit))
            terminal.print_records(rows, _STATES, as_json=as_json, shrink=("holder", "changed"))
        elif diff:
            _print_diff(session, numbers, as_json)
        else:
            _print_state(session, numbers, as_json)


def _print_state(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import Budget
    from coatcheck.context.hot_state import entry_line

    snapshot = _find_snapshot(session, *numbers)
    try:
        rendered = snapshot.state.fitted(Budget(**session.store.settings.section("budget")))
        tokens, steps = rendered.tokens, list(rendered.steps)
    except errors.BudgetExceeded as error:
        tokens, steps = None, [error.message]
    if as_json:
        terminal.print_json(snapshot.to_record() | {"tokens": tokens, "steps": steps})
        return
    lines = [
        (name, terminal.one_line(entry_line(item) if isinstance(item, dict) else str(item)))
        for name, value in snapshot.state.shown().items()
        for item in (value if isinstance(value, list) else [value])
    ]
    if terminal.is_terminal():
        terminal.print_pieces(_state_pieces(snapshot, lines))
    else:
        terminal.print_table((), lines)
    text = "; ".join(steps)
    terminal.print_note(
        f"in a prompt: {tokens} tokens{' after ' + text if text else ''}" if tokens else text
    )


def _state_pieces(snapshot: Snapshot, lines: list[tuple[str, str]]) -> Iterator[terminal.Piece]:
    holder = terminal.one_line(mask(snapshot.holder))
    yield f"state {snapshot.number}", terminal.BOLD
    yield f", written {snapshot.written_at:%Y-%m-%d %H:%M:%S}Z by {holder}\n", terminal.FAINT
    last = ""
    for name, text in lines:
        yield ("" if name == last else name).ljust(_NAME_WIDTH), terminal.FAINT
        yield text + "\n", terminal.PLAIN
        last = name


def _print_diff(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import changes_between

    newer = _find_snapshot(session, *numbers[1:])
    older = (
        _find_snapshot(session, numbers[0])
        if numbers
        else _find_snapshot(session, before=newer.number)
    )
    changes = changes_between(older.state, newer.state)
    if as_json:
        terminal.print_json(
            {
                "from": older.number,
                "to": newer.number,
                "changes": [one.to_record() for one in changes],
            }
        )
        return
    pieces = [
        (f"{sign} {change.field}: {terminal.one_line(text)}\n", style)
        for change in changes
        for sign, style, texts in (
            ("-", terminal.REMOVED, change.removed),
            ("+", terminal.ADDED, change.added),
        )
        for text in texts
    ]
    terminal.print_text("".join(text for text, _ in pieces), pieces)
    count = f"{len(changes)} fields changed" if changes else "no difference"
    terminal.print_note(f"from state {older.number} to {newer.number}: {count}")


def _history(session: Session, limit: int) -> Iterator[dict[str, Any]]:
    """One row per state, with the fields it changed. An unreadable state gets a row that says
    so."""
    from coatcheck.context import changes_between

    records = session.records(_SERIES, newest=True, limit=limit + 1)
    if not records:
        raise _no_state(session)
    snapshots = [_readable(record) for record in records]
    for record, snapshot, previous in zip(
        records[:limit], snapshots, [*snapshots[1:], None], strict=False
    ):
        row: dict[str, Any] = {"number": record.seq, "written_at": iso_time(record.at)}
        if snapshot is None:
            yield row | {
                "holder": None,
                "risk_level": None,
                "artifacts": None,
                "changed": ["cannot be read"],
            }
            continue
        state = snapshot.state
        yield row | {
            "holder": mask(snapshot.holder),
            "risk_level": state.risk_level,
            "artifacts": len(state.artifact_index),
            "changed": [one.field for one in changes_between(previous.state, state)]
            if previous
            else [],
        }


def _readable(record: Record) -> Snapshot | None:
    from coatcheck.context import Snapshot

    try:
        return Snapshot.of(record)
    except errors.Damaged:
        return None


def _find_snapshot(
    session: Session, number: int | None = None, *, before: int | None = None
) -> Snapshot:
    """The state with this number, the last one before another, or the newest."""
    from coatcheck.context import history

    found = next(history(session, before=before if number is None else number + 1, limit=1), None)
    if found is not None and number in (None, found.number):
        return found
    if before is not None:
        raise errors.NotFound(
            f"hot state {before} is the first", hint="there is no earlier state to compare it with"
        )
    kept = [*session.records(_SERIES, limit=1), *session.records(_SERIES, newest=True, limit=1)]
    if not kept:
        raise _no_state(session)
    raise errors.NotFound(
        f"there is no hot state {number}", hint=f"the history has {kept[0].seq} to {kept[-1].seq}"
    )


def _no_state(session: Session) -> errors.NotFound:
    return errors.NotFound(
        f"session {clip(session.session_id)} has no hot state",
        hint="'coatcheck ls --sessions' lists sessions",
    )


# Metrics


@click.command()
@click.argument("sessions", metavar="[SESSION]...", nargs=-1)
@click.option(
    "--last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the newest N calls of each session.",
)
@click.option(
    "--file",
    "source",
    metavar="FILE",
    help="Read a file of JSON lines (metrics.file) instead of the store.",
)
@click.option(
    "--html", metavar="FILE", help="Write a self-contained HTML page with plots and tables."
)
@click.option(
    "--save-baseline",
    metavar="FILE",
    help="Save the current values, to compare a later release with them.",
)
@click.option(
    "--label",
    metavar="TEXT",
    help="With --save-baseline: name of the release. Default: metrics.release.",
)
@click.option(
    "--baseline",
    metavar="FILE",
    help="Compare with a saved baseline; exit with 1 if a value has risen.",
)
@store_options
def metrics(
    sessions: tuple[str, ...],
    last: int | None,
    source: str | None,
    url: str | None,
    as_json: bool,
    **out: str | None,
) -> int:
    """Show the size of prompts, and what stubs saved.

    Shows the metrics of model calls by turn, for all sessions or the given ones: sparklines and a
    table on a terminal, tab-separated lines in a pipe, JSON lines with --json."""
    from coatcheck.context.metrics import Baseline

    found = _read_file(source, sessions, last) if source else _read_store(url, sessions, last)
    every = [call for calls in found.values() for call in calls]
    if not every and not as_json:
        terminal.print_note(
            "no metrics in this store" if source is None else f"no metrics in {source}"
        )
    html, saved, baseline = out["html"], out["save_baseline"], out["baseline"]
    if saved is not None:
        current = Baseline.of(out["label"] or setting("metrics.release") or "unnamed", every)
        _write(saved, current.to_json())
    if html is not None:
        _write(html, page(found, None if source else _store_savings(url)))
    if as_json:
        for call in every:
            terminal.print_json(call.to_record())
    elif html is None and saved is None:
        _print(found)
    rises = (
        Baseline.read(baseline).rises(every, setting("metrics.warn_rise_percent"), {})
        if baseline
        else []
    )
    for one in rises:
        terminal.print_error(one.message)
    return HAS_RISEN if rises else 0


def print_savings(store: Store, *, as_json: bool) -> None:
    """Print what stubs kept out of prompts: in total, then by surface, server and tool."""
    from coatcheck.context import savings

    found = savings(store)
    if as_json:
        terminal.print_json(
            {"total": found.total.to_record(), "rows": [row.to_record() for row in found.rows]}
        )
    elif not found.rows:
        terminal.print_note("no result has become a stub in this store yet")
    else:
        click.echo(f"{found}\n")
        rows = (row.to_record() for row in found.by("surface", "server", "tool"))
        terminal.print_records(
            rows, _SAVINGS, as_json=False, shrink=("surface", "results", "server", "tool")
        )


def _store_savings(url: str | None) -> Savings:
    from coatcheck.context import savings

    with open_existing(url) as store:
        return savings(store)


def _write(path: str, text: str) -> None:
    with terminal.writing(path) as out:
        out.write(text.encode("utf-8", "backslashreplace"))


def _read_store(url: str | None, wanted: Sequence[str], last: int | None) -> Calls:
    from coatcheck.context.metrics import calls_of

    with open_existing(url) as store:
        names = wanted or sorted(info.session_id for info in store.sessions())
        found = {name: list(calls_of(store.session(name), limit=last)) for name in names}
    return {name: calls for name, calls in found.items() if calls}


def _read_file(path: str, wanted: Sequence[str], last: int | None) -> Calls:
    """Read a file of JSON lines, and report how many lines are not metrics."""
    from coatcheck.context.metrics import PromptMetrics

    found: Calls = {}
    invalid = 0
    with Path(path).open("rb") as lines:
        for line in lines:
            try:
                call = PromptMetrics.from_json(line)
            except ValueError:
                invalid += bool(line.strip())
                continue
            if not wanted or call.session in wanted:
                found.setdefault(call.session, []).append(call)
    if invalid:
        terminal.print_error(f"{invalid} lines of {path} are not metrics")
    if invalid and not found:
        raise errors.InvalidArgument(
            f"{path} has no metrics", hint="use the file set in metrics.file"
        )
    return {name: calls[-last:] if last else calls for name, calls in sorted(found.items())}


def _print(found: Calls) -> None:
    if not terminal.is_terminal():
        calls_of_all = (
            (terminal.one_line(session), call) for session, calls in found.items() for call in calls
        )
        rows = (
            [session, *(figure(call, name).replace(",", "") for name in COLUMNS)]
            for session, call in calls_of_all
        )
        terminal.print_table((), rows)
        return
    for number, (session, calls) in enumerate(found.items()):
        click.echo(
            ("\n" if number else "")
            + click.style(terminal.one_line(session), bold=True)
            + f"  {_summary(calls)}"
        )
        for heading, name in _SPARKLINES.items():
            values = [getattr(call, name) for call in calls]
            known = [value for value in values if value is not None]
            if any(known):
                click.echo(f"  {heading:<10}{sparkline(values)}  {known[0]:,} → {known[-1]:,}")
        terminal.print_table(
            list(_SHORT.values()), ([figure(call, name) for name in _SHORT] for call in calls)
        )
        warnings = new_warnings(calls)
        if len(warnings) > _MAX_NOTES:
            terminal.print_note(
                f"{len(warnings) - _MAX_NOTES} earlier warnings; use --json for all"
            )
        for line in warnings[-_MAX_NOTES:]:
            terminal.print_note(line)


def _summary(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    plural = "" if sums["calls"] == 1 else "s"
    text = f"{sums['calls']:,} call{plural}, {sums['est_tokens']:,} tokens sent, {sums['tokens_without']:,} without stubs"
    if sums["cost_without"]:
        text += f", cost {sums['cost'] * 100 / sums['cost_without']:.0f}% of that"
    return text + (f", {sums['warnings']:,} warnings" if sums["warnings"] else "")


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
    return (
        "-"
        if value is None
        else f"{value:,}"
        if isinstance(value, int)
        else terminal.one_line(str(value))
    )


def new_warnings(calls: Sequence[PromptMetrics]) -> list[str]:
    """The warnings of calls that the previous call did not have."""
    found: list[str] = []
    before: set[tuple[str, str]] = set()
    for call in calls:
        found += [
            f"turn {call.turn or '?'}: {one.message}"
            for one in call.warnings
            if (one.figure, one.reason) not in before
        ]
        before = {(one.figure, one.reason) for one in call.warnings}
    return found


def totals(calls: Sequence[PromptMetrics]) -> dict[str, int]:
    """Sums over calls; figures that could not be counted are left out."""
    sums = {name: sum(getattr(call, name) or 0 for call in calls) for name in _SUMS}
    return {"calls": len(calls), **sums, "warnings": sum(len(call.warnings) for call in calls)}


def sparkline(values: Sequence[Value], width: int = 32) -> str:
    """Values as blocks, from zero to the largest. Long series are thinned; a missing value is a
    blank."""
    peaks, _ = thinned(values, width)
    top = max((value for value in peaks if value is not None), default=0)
    steps = (
        None if value is None else int(max(0, value) / top * len(_BLOCKS)) if top > 0 else 0
        for value in peaks
    )
    return "".join(" " if step is None else _BLOCKS[min(len(_BLOCKS) - 1, step)] for step in steps)


def page(sessions: Mapping[str, Sequence[PromptMetrics]], saved: Savings | None = None) -> str:
    """An HTML page with the savings of the store, and plots and a table for each session."""
    from importlib.resources import files
    from string import Template

    every = [call for calls in sessions.values() for call in calls]
    body = (
        _tiles(every)
        + _savings_section(saved)
        + "".join(_section(*one) for one in list(sessions.items())[:MAX_SESSIONS])
    )
    if (omitted := len(sessions) - MAX_SESSIONS) > 0:
        body += f'<p class="dim">{omitted:,} more sessions are not on this page; select them by name.</p>'
    template = Template(files("coatcheck.cli").joinpath("metrics.html").read_text("utf-8"))
    return template.substitute(sessions=f"{len(sessions):,}", calls=f"{len(every):,}", body=body)


def _tiles(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    texts = {name: f"{value:,}" for name, value in sums.items()}
    texts["percent"] = (
        f"{sums['cost'] * 100 / sums['cost_without']:.0f}%" if sums["cost_without"] else "-"
    )
    return f'<div class="tiles">{"".join(f"<div><b>{texts[name]}</b>{text}</div>" for name, text in _TILES.items())}</div>'


def _savings_section(saved: Savings | None) -> str:
    if saved is None or not saved.rows:
        return ""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in _SAVINGS.values())
    body = ""
    for row in saved.by("surface", "server", "tool")[:MAX_ROWS]:
        shown = row.to_record()
        cells = (
            f"{one:,}" if isinstance(one := shown[name], int) else _safe(one) for name in _SAVINGS
        )
        body += f"<tr>{''.join(f'<td>{text}</td>' for text in cells)}</tr>"
    table = f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<section><h2>Savings</h2><p>{saved}</p>{table}</section>"


def _section(name: str, calls: Sequence[PromptMetrics]) -> str:
    turns = [call.turn or number for number, call in enumerate(calls, 1)]
    budget = max((call.budget_tokens or 0 for call in calls), default=0) or None
    title = f"Budget use: the prompt against {budget:,} tokens" if budget else "Budget use"
    plots = (*_PLOTS, (title, {"prompt": "est_tokens"}, {"stacked": True, "limit": budget}))
    drawn = []
    for title, names, options in plots:
        step = max(1, math.ceil(len(turns) / _MAX_POINTS))
        series = {
            label: thinned([getattr(call, one) for call in calls], _MAX_POINTS)[0]
            for label, one in names.items()
        }
        keys = (
            f'<span class="key s{at}"></span>{label}'
            for at, label in enumerate(names, options.get("colour", 0))
        )
        note = f"; each point is the largest of {step} turns" if step > 1 else ""
        drawn.append(
            f"<figure><h3>{title}</h3>{plot(title, turns[::step], series, **options)}"
            f"<figcaption>by turn{note}{''.join(keys)}</figcaption></figure>"
        )
    found = new_warnings(calls)
    items = "".join(f"<li>{_safe(one)}</li>" for one in found[-MAX_WARNINGS:])
    warnings = (
        f"<h3>New warnings{_newest(found, MAX_WARNINGS)}</h3><ul>{items}</ul>" if found else ""
    )
    plots_part = f'<div class="plots">{"".join(drawn)}</div>'
    return f"<section><h2>{_safe(name)}</h2>{_tiles(calls)}{plots_part}{warnings}{_table(calls)}</section>"


def _newest(items: Sequence[object], most: int) -> str:
    return f" (the newest {most:,} of {len(items):,})" if len(items) > most else ""


def _table(calls: Sequence[PromptMetrics]) -> str:
    rows = [{column: figure(call, column) for column in COLUMNS} for call in calls[-MAX_ROWS:]]
    columns = [column for column in COLUMNS if any(row[column] != "-" for row in rows)]
    head = "".join(f'<th scope="col">{COLUMNS[column]}</th>' for column in columns)
    body = ""
    for row in rows:
        cells = (
            f"<td{_OVER if row[one].endswith(' over') else ''}>{_safe(row[one])}</td>"
            for one in columns
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return (
        f'<details open="open"><summary>Figures of each turn{_newest(calls, MAX_ROWS)}</summary><div class="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _safe(text: str) -> str:
    return escape(terminal.one_line(text), quote=True)
