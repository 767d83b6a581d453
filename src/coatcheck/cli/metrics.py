"""The command that shows what model calls were like: a table, sparklines, JSON, a page with plots, baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from coatcheck.cli.files import writing
from coatcheck.cli.options import json_option, open_existing, store_option
from coatcheck.cli.plots import sparkline
from coatcheck.cli.report import COLUMNS, began, figure_of, page, totals
from coatcheck.cli.terminal import complain, is_terminal, note, one_line, print_json, print_table
from coatcheck.config import load
from coatcheck.errors import InvalidArgument

if TYPE_CHECKING:
    from coatcheck.context.metrics import PromptMetrics

RISEN = 1
_IN_SHORT = {
    "turn": "turn", "est_tokens": "prompt", "tokens_without": "without", "tokens_saved": "saved",
    "tokens_read_back": "read", "tokens_net": "net", "hs_tokens": "hot", "artifacts": "index", "budget": "budget",
}  # fmt: skip
_TOLD = 10
_SPARKS = {"prompt": "est_tokens", "without": "tokens_without", "saved": "tokens_saved",
           "read back": "tokens_read_back", "net": "tokens_net"}  # fmt: skip

Sessions = dict[str, "list[PromptMetrics]"]


@click.command()
@click.argument("sessions", metavar="[SESSION]...", nargs=-1)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest so many calls of each session.")
@click.option("--file", "source", metavar="FILE", help="Read a file of JSON lines (metrics.file) instead of the store.")
@click.option("--html", metavar="FILE", help="Write one page with plots and figures that needs nothing else.")
@click.option(
    "--save-baseline", metavar="FILE", help="Write what the figures are now, to compare a later release with."
)
@click.option("--label", metavar="TEXT", help="With --save-baseline: what release it is; metrics.release by default.")
@click.option("--baseline", metavar="FILE", help="Compare with that; exits with 1 where a figure has risen.")
@store_option
@json_option
@click.pass_context
def metrics(
    here: click.Context,
    sessions: tuple[str, ...],
    last: int | None,
    source: str | None,
    html: str | None,
    save_baseline: str | None,
    label: str | None,
    baseline: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the figures of model calls, by session and turn: how large prompts were, and what stubs saved.

    Of all sessions, or of those that are named. Sparklines and a table on a terminal, tab-separated lines in a pipe,
    JSON lines with --json."""
    from coatcheck.context.metrics import Baseline  # here and below: only this command needs it

    found = _read_file(source, sessions, last) if source else _read_store(url, sessions, last)
    every = [call for calls in found.values() for call in calls]
    if not every and not as_json:
        note("no figures of model calls are kept here" if source is None else f"no figures in {source}")
    if save_baseline is not None:
        kept = Baseline.of(label or load()["metrics.release"] or "unnamed", every)
        with writing(save_baseline) as out:
            out.write(kept.to_json().encode())
    if html is not None:
        with writing(html) as out:
            out.write(page(found).encode("utf-8", "backslashreplace"))
    if as_json:
        for call in every:
            print_json(call.to_record())
    elif html is None and save_baseline is None:
        _print(found)
    if baseline is not None:
        rises = Baseline.read(baseline).rises(every, load()["metrics.warn_rise_percent"], {})
        for one in rises:
            complain(one.message)
        here.exit(RISEN if rises else 0)


def _read_store(url: str | None, wanted: Sequence[str], last: int | None) -> Sessions:
    from coatcheck.context.metrics import calls_of

    with open_existing(url) as store:
        names = wanted or sorted(info.session_id for info in store.sessions())
        found = {name: list(calls_of(store.session(name), limit=last)) for name in names}
    return {name: calls for name, calls in found.items() if calls}


def _read_file(path: str, wanted: Sequence[str], last: int | None) -> Sessions:
    """What a file of JSON lines holds. Lines that are none of ours are counted, and told."""
    from coatcheck.context.metrics import PromptMetrics

    found: Sessions = {}
    odd = 0
    with Path(path).open("rb") as lines:
        for line in lines:
            try:
                call = PromptMetrics.from_json(line)
            except ValueError:
                odd += bool(line.strip())
                continue
            if not wanted or call.session in wanted:
                found.setdefault(call.session, []).append(call)
    if odd:
        complain(f"{odd} lines of {path} are no figures of model calls")
    if odd and not found:
        raise InvalidArgument(f"{path} holds no figures of model calls", hint="name the file that metrics.file names")
    return {name: calls[-last:] if last else calls for name, calls in sorted(found.items())}


def _print(found: Sessions) -> None:
    if not is_terminal():
        rows = (
            (one_line(session), *(figure_of(call, name).replace(",", "") for name in COLUMNS))
            for session, calls in found.items()
            for call in calls
        )
        print_table((), rows, yielding=())
        return
    for number, (session, calls) in enumerate(found.items()):
        click.echo(("\n" if number else "") + click.style(one_line(session), bold=True) + f"  {_summary(calls)}")
        for words, name in _SPARKS.items():
            values = [getattr(call, name) for call in calls]
            known = [value for value in values if value is not None]
            if any(known):
                click.echo(f"  {words:<10}{sparkline(values)}  {known[0]:,} → {known[-1]:,}")
        shown = ([*(figure_of(call, name) for name in _IN_SHORT), str(len(call.warnings) or "-")] for call in calls)
        print_table([*_IN_SHORT.values(), "warn"], shown, yielding=())
        _print_warnings(calls)


def _print_warnings(calls: Sequence[PromptMetrics]) -> None:
    told = began(calls)
    if len(told) > _TOLD:
        note(f"{len(told) - _TOLD} earlier warnings; --json has all")
    for line in told[-_TOLD:]:
        note(line)


def _summary(calls: Sequence[PromptMetrics]) -> str:
    said = totals(calls)
    plural = "" if said["calls"] == 1 else "s"
    text = (
        f"{said['calls']:,} call{plural}, {said['est_tokens']:,} tokens sent, {said['tokens_without']:,} without stubs"
    )
    if said["cost_without"]:
        text += f", cost {said['cost'] * 100 / said['cost_without']:.0f}% of that"
    return text + (f", {said['warnings']:,} warnings" if said["warnings"] else "")
