"""The commands that carry a store elsewhere: export and import."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import click

import coatcheck
from coatcheck.cli.options import json_option, store_option
from coatcheck.cli.terminal import progress

_STDIO = "-"


@click.command()
@click.argument("file", default=_STDIO)
@store_option
@json_option
def export(file: str, url: str | None, as_json: bool) -> None:
    """Write sessions, refs and content as JSON lines to a FILE, or to stdout. A new file is for its owner alone."""
    if file == _STDIO and sys.stdout.isatty():
        raise click.UsageError(
            "an export is not for a terminal: name a file, or pipe it", click.get_current_context()
        )
    with coatcheck.open(url) as store, _writing(file) as target, progress("exporting", quiet=as_json) as bar:
        count = store.export(target, progress=bar)
    _tell("exported", count, as_json, err=file == _STDIO)


@click.command("import")
@click.argument("file", default=_STDIO)
@store_option
@json_option
def import_(file: str, url: str | None, as_json: bool) -> None:
    """Take in what export wrote, from a FILE or from stdin: same ids, names, sessions and expiry."""
    with coatcheck.open(url) as store, _reading(file) as source, progress("importing", quiet=as_json) as bar:
        status = os.fstat(source.fileno())
        size = status.st_size if stat.S_ISREG(status.st_mode) else None

        def so_far(done: int, total: int) -> None:
            if bar:
                bar(source.tell() if size else done, size)

        count = store.import_(source, progress=so_far if bar else None)
    _tell("imported", count, as_json)


@contextmanager
def _writing(file: str) -> Iterator[IO[bytes]]:
    if file == _STDIO:
        out = click.get_binary_stream("stdout")
        yield out
        out.flush()
        return
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as target:
        yield target


@contextmanager
def _reading(file: str) -> Iterator[IO[bytes]]:
    if file == _STDIO:
        yield click.get_binary_stream("stdin")
        return
    with open(file, "rb") as source:
        yield source


def _tell(done: str, count: int, as_json: bool, *, err: bool = False) -> None:
    click.echo(f'{{"{done}": {count}}}' if as_json else f"{done} {count} refs", err=err)
