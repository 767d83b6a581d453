"""The commands that carry a store elsewhere: export and import."""

from __future__ import annotations

import os
import sys

import click

import coatcheck
from coatcheck.cli.files import STDIO, reading, writing
from coatcheck.cli.options import json_option, open_existing, store_option
from coatcheck.cli.terminal import progress


@click.command()
@click.argument("file", default=STDIO)
@store_option
@json_option
def export(file: str, url: str | None, as_json: bool) -> None:
    """Write sessions, refs and content as JSON lines to a FILE, or to stdout.

    A file that is new can be read by its owner alone."""
    if file == STDIO and sys.stdout.isatty():
        raise click.UsageError("an export is not for a terminal: name a file, or pipe it", click.get_current_context())
    with (
        open_existing(url) as store,
        writing(file, private=True) as target,
        progress("exporting", quiet=as_json) as bar,
    ):
        count = store.export(target, progress=bar)
    _tell("exported", count, as_json, err=file == STDIO)


@click.command("import")
@click.argument("file", default=STDIO)
@store_option
@json_option
def import_(file: str, url: str | None, as_json: bool) -> None:
    """Take in what export wrote, from a FILE or from stdin: same ids, names, sessions and expiry."""
    with coatcheck.open(url) as store, reading(file) as source, progress("importing", quiet=as_json) as bar:
        size = os.path.getsize(file) if file != STDIO and os.path.isfile(file) else None

        def so_far(refs: int, _: int | None) -> None:
            if bar:
                bar(source.tell() if size else refs, size)

        count = store.import_(source, progress=so_far if bar else None)
    _tell("imported", count, as_json)


def _tell(done: str, count: int, as_json: bool, *, err: bool = False) -> None:
    click.echo(f'{{"{done}": {count}}}' if as_json else f"{done} {count} refs", err=err)
