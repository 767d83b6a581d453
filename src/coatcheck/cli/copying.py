"""The command that carries a store from one backend to another."""

from __future__ import annotations

import json

import click

import coatcheck
from coatcheck.cli.options import json_option
from coatcheck.cli.terminal import progress
from coatcheck.config import load


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--tenant",
    default=lambda: load()["store.tenant"],
    show_default="what the settings say (COATCHECK_TENANT)",
    help="Copy this tenant's store, to the same tenant over there.",
)
@click.option(
    "--move", is_flag=True, help="End the sessions over here once all of them are over there. Stop their writers first."
)
@json_option
def copy(source: str, target: str, tenant: str | None, move: bool, as_json: bool) -> None:
    """Copy a store FROM one place TO another: a folder, or an s3:// url with its catalog.

    What the target has already is passed over: a copy that broke off goes on, and a later one brings what is new."""
    with (
        coatcheck.open(source, create=False, tenant=tenant) as one,
        coatcheck.open(target, tenant=tenant) as other,
        progress("copying", quiet=as_json) as bar,
    ):
        report = one.copy_to(other, progress=bar)
        if move and not report.lost:
            for info in list(one.sessions()):
                one.session(info.session_id).end()
            one.collect(grace=0)
    if as_json:
        click.echo(json.dumps(report.to_record()))
    else:
        click.echo(
            f"copied {report.refs} refs of {report.sessions} sessions: {report.artifacts} artifacts,"
            f" {report.bytes} bytes; {report.known} refs were there"
        )
    if report.lost:
        click.echo(f"{len(report.lost)} refs have lost their bytes over here: run 'coatcheck verify'", err=True)
        raise SystemExit(coatcheck.errors.CODES["damaged"].exit)
