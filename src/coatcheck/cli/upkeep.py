"""The commands for a whole store: collect, verify and stats."""

from __future__ import annotations

from dataclasses import asdict

import click

from coatcheck import errors
from coatcheck.cli.options import json_option, open_existing, store_option
from coatcheck.cli.terminal import one_line, print_details, print_json, progress


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be freed, and change nothing.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long expired artifacts are kept; two hours where not given.",
)
@click.option("--no-orphans", is_flag=True, help="Do not list every stored copy to find what crashes have left.")
@store_option
@json_option
def collect(dry_run: bool, grace: float | None, no_orphans: bool, url: str | None, as_json: bool) -> None:
    """Free what has expired and what crashes have left behind, and compress what has gone cold."""
    with open_existing(url) as store, progress("collecting", quiet=as_json) as bar:
        report = store.collect(dry_run=dry_run, grace=grace, orphans=not no_orphans, progress=bar).to_record()
    (print_json if as_json else print_details)(report)


@click.command()
@click.option("--repair", is_flag=True, help="Set right what can be, without losing what is sound.")
@store_option
@json_option
@click.pass_context
def verify(context: click.Context, repair: bool, url: str | None, as_json: bool) -> None:
    """Read everything and say what is not sound. Exits with 8 where problems remain."""
    with open_existing(url) as store, progress("verifying", quiet=as_json) as bar:
        report = store.verify(repair=repair, progress=bar)
    if as_json:
        print_json(report.to_record())
    else:
        for problem in report.problems:
            where = f"{problem.artifact_id}: " if problem.artifact_id else ""
            done = " (repaired)" if problem.repaired else ""
            click.echo(f"{problem.kind}: {where}{one_line(problem.message)}{done}")
        read = f"{report.artifacts} artifacts, {report.bytes} bytes read"
        found = f"{len(report.problems)} problems" if report.problems else "all is well"
        click.echo(f"{read}: {found}")
    if any(not problem.repaired for problem in report.problems):
        context.exit(errors.CODES["damaged"].exit)


@click.command()
@store_option
@json_option
def stats(url: str | None, as_json: bool) -> None:
    """Count sessions, artifacts and bytes."""
    with open_existing(url) as store:
        totals = asdict(store.stats())
    (print_json if as_json else print_details)(totals)
