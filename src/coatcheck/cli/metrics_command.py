"""The command metrics: figures of model calls as a table, sparklines, JSON, an HTML page and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from coatcheck.cli.metrics_page import COLUMNS, figure, new_warnings, page, sparkline, totals
from coatcheck.cli.options import open_existing, store_options
from coatcheck.cli.terminal import is_terminal, one_line, print_error, print_json, print_note, print_table, writing
from coatcheck.config import load
from coatcheck.errors import InvalidArgument

if TYPE_CHECKING:
    from coatcheck.context.metrics import PromptMetrics

HAS_RISEN: Final = 1
_SHORT: Final = {
    "turn": "turn", "est_tokens": "prompt", "tokens_without": "without", "tokens_saved": "saved",
    "tokens_read_back": "read", "tokens_net": "net", "hs_tokens": "hot", "artifacts": "index", "budget": "budget",
}  # fmt: skip
_SPARKLINES: Final = {
    "prompt": "est_tokens", "without": "tokens_without", "saved": "tokens_saved", "read back": "tokens_read_back",
    "net": "tokens_net",
}  # fmt: skip
_MAX_WARNINGS: Final = 10

Calls = dict[str, "list[PromptMetrics]"]
"""Model calls by session."""


@click.command()
@click.argument("sessions", metavar="[SESSION]...", nargs=-1)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N calls of each session.")
@click.option("--file", "source", metavar="FILE", help="Read a file of JSON lines (metrics.file) instead of the store.")
@click.option("--html", metavar="FILE", help="Write a self-contained page with plots and figures.")
@click.option("--save-baseline", metavar="FILE", help="Save the current figures, to compare a later release with.")
@click.option("--label", metavar="TEXT", help="With --save-baseline: name of the release. Default: metrics.release.")
@click.option("--baseline", metavar="FILE", help="Compare with a saved baseline; exits with 1 if a figure has risen.")
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

    Shows the figures of model calls by turn, for all sessions or the given ones. Sparklines and a table on a
    terminal, tab-separated lines in a pipe, JSON lines with --json."""
    from coatcheck.context.metrics import Baseline

    found = _read_file(source, sessions, last) if source else _read_store(url, sessions, last)
    every = [call for calls in found.values() for call in calls]
    if not every and not as_json:
        print_note("no figures of model calls in this store" if source is None else f"no figures in {source}")
    if save_baseline is not None:
        saved = Baseline.of(label or load()["metrics.release"] or "unnamed", every)
        with writing(save_baseline) as out:
            out.write(saved.to_json().encode())
    if html is not None:
        with writing(html) as out:
            out.write(page(found).encode("utf-8", "backslashreplace"))
    if as_json:
        for call in every:
            print_json(call.to_record())
    elif html is None and save_baseline is None:
        _print(found)
    rises = Baseline.read(baseline).rises(every, load()["metrics.warn_rise_percent"], {}) if baseline else []
    for one in rises:
        print_error(one.message)
    return HAS_RISEN if rises else 0


def _read_store(url: str | None, wanted: Sequence[str], last: int | None) -> Calls:
    from coatcheck.context.metrics import calls_of

    with open_existing(url) as store:
        names = wanted or sorted(info.session_id for info in store.sessions())
        found = {name: list(calls_of(store.session(name), limit=last)) for name in names}
    return {name: calls for name, calls in found.items() if calls}


def _read_file(path: str, wanted: Sequence[str], last: int | None) -> Calls:
    """Read a file of JSON lines, and report how many lines are not figures."""
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
        print_error(f"{invalid} lines of {path} are not figures of model calls")
    if invalid and not found:
        raise InvalidArgument(f"{path} has no figures of model calls", hint="use the file set in metrics.file")
    return {name: calls[-last:] if last else calls for name, calls in sorted(found.items())}


def _print(found: Calls) -> None:
    if not is_terminal():
        for session, calls in found.items():
            for call in calls:
                click.echo("\t".join([one_line(session), *(figure(call, name).replace(",", "") for name in COLUMNS)]))
        return
    for number, (session, calls) in enumerate(found.items()):
        click.echo(("\n" if number else "") + click.style(one_line(session), bold=True) + f"  {_summary(calls)}")
        for heading, name in _SPARKLINES.items():
            values = [getattr(call, name) for call in calls]
            known = [value for value in values if value is not None]
            if any(known):
                click.echo(f"  {heading:<10}{sparkline(values)}  {known[0]:,} → {known[-1]:,}")
        rows = ([*(figure(call, name) for name in _SHORT), str(len(call.warnings) or "-")] for call in calls)
        print_table([*_SHORT.values(), "warn"], rows)
        warnings = new_warnings(calls)
        if len(warnings) > _MAX_WARNINGS:
            print_note(f"{len(warnings) - _MAX_WARNINGS} earlier warnings; use --json for all")
        for line in warnings[-_MAX_WARNINGS:]:
            print_note(line)


def _summary(calls: Sequence[PromptMetrics]) -> str:
    sums = totals(calls)
    plural = "" if sums["calls"] == 1 else "s"
    text = (
        f"{sums['calls']:,} call{plural}, {sums['est_tokens']:,} tokens sent, {sums['tokens_without']:,} without stubs"
    )
    if sums["cost_without"]:
        text += f", cost {sums['cost'] * 100 / sums['cost_without']:.0f}% of that"
    return text + (f", {sums['warnings']:,} warnings" if sums["warnings"] else "")
