"""The metrics command: shows the figures of model calls as a table, sparklines or JSON, writes the
HTML page, and compares with baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from coatcheck import errors
from coatcheck.cli import open_existing, setting, store_options, terminal
from coatcheck.cli.figures import (
    COLUMNS,
    SAVINGS_COLUMNS,
    cost_share,
    figure,
    new_warnings,
    sparkline,
    totals,
)

if TYPE_CHECKING:
    from coatcheck import Store
    from coatcheck.context import Savings
    from coatcheck.context.metrics import PromptMetrics

HAS_RISEN: Final = 1
_MAX_NOTES: Final = 10
_SHORT: Final = {
    "turn": "turn",
    "est_tokens": "prompt",
    "tokens_without": "without",
    "tokens_saved": "saved",
    "tokens_read_back": "read",
    "tokens_net": "net",
    "hs_tokens": "hot",
    "artifacts": "index",
    "budget": "budget",
    "warnings": "warn",
}
_SPARKLINES: Final = {
    "prompt": "est_tokens",
    "without": "tokens_without",
    "saved": "tokens_saved",
    "read back": "tokens_read_back",
    "net": "tokens_net",
}

Calls = dict[str, "list[PromptMetrics]"]
"""Model calls by session."""


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
    html: str | None,
    save_baseline: str | None,
    label: str | None,
    baseline: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Show the size of prompts, and what stubs saved.

    Shows the metrics of model calls by turn, for all sessions or the given ones: sparklines and a
    table on a terminal, tab-separated lines in a pipe, JSON lines with --json."""
    found = _read_file(source, sessions, last) if source else _read_store(url, sessions, last)
    every = list(chain.from_iterable(found.values()))
    if not every and not as_json:
        terminal.print_note(f"no metrics in {source or 'this store'}")
    if save_baseline is not None:
        _save_baseline(save_baseline, label, every)
    if html is not None:
        _write_page(html, found, None if source else _store_savings(url))
    if as_json:
        for call in every:
            terminal.print_json(call.to_record())
    elif html is None and save_baseline is None:
        _print_calls(found)
    if baseline is not None and _print_rises(baseline, every):
        return HAS_RISEN
    return 0


def _write_page(file: str, found: Calls, savings: Savings | None) -> None:
    from coatcheck.cli.metrics_page import page

    _write(file, page(found, savings))


def _save_baseline(file: str, label: str | None, calls: Sequence[PromptMetrics]) -> None:
    from coatcheck.context.metrics import Baseline

    release = label or setting("metrics.release") or "unnamed"
    _write(file, Baseline.of(release, calls).to_json())


def _print_rises(file: str, calls: Sequence[PromptMetrics]) -> bool:
    """Print the values that have risen since a saved baseline, and return whether there are any."""
    from coatcheck.context.metrics import Baseline

    rises = Baseline.read(file).rises(calls, setting("metrics.warn_rise_percent"), {})
    for one in rises:
        terminal.print_error(one.message)
    return bool(rises)


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
            rows,
            SAVINGS_COLUMNS,
            as_json=False,
            shrink=("surface", "results", "server", "tool"),
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


def _print_calls(found: Calls) -> None:
    if not terminal.is_terminal():
        terminal.print_table((), _plain_rows(found))
        return
    for number, (session, calls) in enumerate(found.items()):
        if number:
            click.echo()
        name = click.style(terminal.one_line(session), bold=True)
        click.echo(f"{name}  {_summary(calls)}")
        _print_sparklines(calls)
        rows = ([figure(call, name) for name in _SHORT] for call in calls)
        terminal.print_table(list(_SHORT.values()), rows)
        warnings = new_warnings(calls)
        if len(warnings) > _MAX_NOTES:
            earlier = len(warnings) - _MAX_NOTES
            terminal.print_note(f"{earlier} earlier warnings; use --json for all")
        for line in warnings[-_MAX_NOTES:]:
            terminal.print_note(line)


def _plain_rows(found: Calls) -> Iterator[list[str]]:
    """Yield one row per call with all figures, without separators of thousands."""
    for session, calls in found.items():
        for call in calls:
            figures = [figure(call, name).replace(",", "") for name in COLUMNS]
            yield [terminal.one_line(session), *figures]


def _print_sparklines(calls: Sequence[PromptMetrics]) -> None:
    for heading, name in _SPARKLINES.items():
        values = [getattr(call, name) for call in calls]
        known = [value for value in values if value is not None]
        if any(known):
            click.echo(f"  {heading:<10}{sparkline(values)}  {known[0]:,} → {known[-1]:,}")


def _summary(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    plural = "" if sums["calls"] == 1 else "s"
    parts = [
        f"{sums['calls']:,} call{plural}",
        f"{sums['est_tokens']:,} tokens sent",
        f"{sums['tokens_without']:,} without stubs",
    ]
    percent = cost_share(sums)
    if percent is not None:
        parts.append(f"cost {percent} of that")
    if sums["warnings"]:
        parts.append(f"{sums['warnings']:,} warnings")
    return ", ".join(parts)
