"""The commands for transcripts: what a migration would save, doing it, proving it, and taking it back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck import CoatcheckError, Store
from coatcheck.cli.files import STDIO, writing
from coatcheck.cli.options import json_option, open_existing, session_option, store_option
from coatcheck.cli.terminal import cell, complain, note, one_line, print_json, print_table, progress
from coatcheck.errors import StoreUnavailable

if TYPE_CHECKING:  # no other command should wait for what comes with it
    from coatcheck.transcript import FileReport, Report
    from coatcheck.transcript.slimming import Progress

_COLUMNS: Final = ("status", "format", "artifacts", "before bytes", "after bytes", "tokens saved", "path")
_REFS: Final = ("line", "artifact", "media type", "bytes", "held", "place", "summary")
_FORMATS: Final = ("claude-code", "pi", "langchain", "mcp", "openai-responses", "anthropic", "openai-chat")

paths_argument = click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))


@click.group()
def transcript() -> None:
    """Keep transcripts slim on disk: payloads in the store, refs in the file, every byte to be had back."""


@transcript.command()
@paths_argument
@click.option("--write", is_flag=True, help="Do it. Without this, only say what would be saved.")
@click.option("--format", "known", type=click.Choice(_FORMATS), help="The format; seen from the content if not given.")
@session_option
@store_option
@json_option
@click.pass_context
def externalize(
    context: click.Context,
    paths: tuple[Path, ...],
    write: bool,
    known: str | None,
    session_id: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Move the payloads of transcripts into the store; of a folder, of all that are in it.

    Without --write nothing changes. With it, each file is replaced at once, and a backup stays beside it until 'verify
    --remove-backup'. Running again takes on what was appended since."""
    from coatcheck.transcript import externalize

    with coatcheck.open(url) if write else _looking(url) as store:
        session = store.session(session_id)

        def one(path: Path, bar: Progress | None) -> Report:
            return externalize(path, session, format=known, dry_run=not write, progress=bar)

        report = _each(paths, one, "externalizing" if write else "looking", quiet=as_json)
    _print(report, as_json)
    if not write and not as_json:
        note("nothing was changed: --write does it")
    context.exit(_exit_code(report))


@transcript.command()
@paths_argument
@click.option("-o", "--output", metavar="FILE", help="Write to a file; stdout if not given, or '-'.")
@click.option("--in-place", is_flag=True, help="Make the files themselves whole.")
@store_option
@json_option
@click.pass_context
def rehydrate(
    context: click.Context, paths: tuple[Path, ...], output: str | None, in_place: bool, url: str | None, as_json: bool
) -> None:
    """Write a transcript whole: the bytes that it had before.

    What the store lacks has a placeholder in the output, is told on stderr, and makes the exit code that of the error.
    In place, a file that lacks something stays as it is."""
    from coatcheck.transcript import rehydrate

    if in_place == (output is not None) and in_place:
        raise click.UsageError("--in-place and --output exclude each other", context)
    if not in_place and (len(paths) > 1 or paths[0].is_dir()):
        raise click.UsageError("several files are made whole with --in-place", context)
    with open_existing(url) as store:
        if in_place:
            report = _each(paths, lambda path, bar: rehydrate(path, store, progress=bar), "rehydrating", quiet=as_json)
            _print(report, as_json)
        else:
            with writing(output or STDIO, private=True) as out:
                report = rehydrate(paths[0], store, to=out)  # type: ignore[arg-type]
            for problem in report.problems:
                complain(problem)
            if as_json and output not in (None, STDIO):
                print_json(report.to_record())
    context.exit(_exit_code(report))


@transcript.command()
@paths_argument
@click.option("--remove-backup", is_flag=True, help="Remove the backup of each file that passes.")
@store_option
@json_option
@click.pass_context
def verify(
    context: click.Context, paths: tuple[Path, ...], remove_backup: bool, url: str | None, as_json: bool
) -> None:
    """Prove that transcripts can be made whole: read everything, and compare it with what was recorded."""
    from coatcheck.transcript import verify

    with open_existing(url) as store:
        report = _each(
            paths,
            lambda path, bar: verify(path, store, remove_backup=remove_backup, progress=bar),
            "verifying",
            quiet=as_json,
        )
    _print(report, as_json)
    context.exit(_exit_code(report))


@transcript.command()
@paths_argument
@store_option
@json_option
@click.pass_context
def undo(context: click.Context, paths: tuple[Path, ...], url: str | None, as_json: bool) -> None:
    """Make transcripts whole where they are, and let go what the store held for them.

    What was appended since stays. From the backup, where the store has not all of it."""
    from coatcheck.transcript import undo

    with open_existing(url) as store:
        report = _each(paths, lambda path, bar: undo(path, store, progress=bar), "restoring", quiet=as_json)
    _print(report, as_json)
    context.exit(_exit_code(report))


@transcript.command()
@paths_argument
@click.option("--force", is_flag=True, help="Even where the file still has refs: they lead nowhere then.")
@store_option
@json_option
@click.pass_context
def forget(context: click.Context, paths: tuple[Path, ...], force: bool, url: str | None, as_json: bool) -> None:
    """Let go what transcripts held, after they were removed, rotated away or made whole."""
    from coatcheck.transcript import forget

    with open_existing(url) as store:
        report = _each(paths, lambda path, bar: forget(path, store, force=force), "forgetting", quiet=as_json)
    _print(report, as_json)
    context.exit(_exit_code(report))


@transcript.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@store_option
@json_option
def show(path: Path, url: str | None, as_json: bool) -> None:
    """List the refs of a transcript: where each stands, what it is, and whether the store has it."""
    with open_existing(url) as store:
        rows = list(_refs(path, store))
    if as_json:
        for row in rows:
            print_json(row)
        return
    print_table(
        _REFS, ([cell(key, row[key.replace(" ", "_")]) for key in _REFS] for row in rows), yielding=("place", "summary")
    )


def _looking(url: str | None) -> Store:
    """The store for a dry run: none is made for that."""
    try:
        return coatcheck.open(url, create=False)
    except StoreUnavailable:
        return coatcheck.open("memory:")


def _refs(path: Path, store: Store) -> Iterator[dict[str, Any]]:
    from coatcheck.transcript.migrate import refs_in

    for number, ref in refs_in(path):
        held = store.session(ref.session).ref(ref.id) is not None
        place = "/" + "/".join(map(str, ref.path))
        yield {
            "line": number,
            "artifact": ref.pointer,
            "media_type": ref.media_type,
            "bytes": ref.size,
            "held": "yes" if held else "no",
            "place": place,
            "summary": ref.summary,
        }


def _each(paths: Iterable[Path], call: Callable[[Path, Progress | None], Report], doing: str, *, quiet: bool) -> Report:
    """The report of all files that paths name. One that fails is told, and the others go on."""
    from coatcheck.transcript import Report
    from coatcheck.transcript.migrate import failed, files_in

    files = list(files_in(paths))
    found: list[FileReport] = []
    with _bar(doing, files, quiet=quiet) as bar:
        for path in files:
            try:
                found += call(path, bar(path)).files
            except (CoatcheckError, OSError) as error:
                found.append(failed(path, error))
    return Report(tuple(found))


@contextmanager
def _bar(doing: str, files: list[Path], *, quiet: bool) -> Iterator[Callable[[Path], Progress | None]]:
    """One bar over the bytes of all files."""
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files] if sys.stderr.isatty() else []
    total, before = sum(sizes), dict(zip(files, _running(sizes), strict=False))
    with progress(doing, quiet=quiet) as told:

        def of(path: Path) -> Progress | None:
            if told is None:
                return None
            update = told
            return lambda done, _: update(before.get(path, 0) + done, total)

        yield of


def _running(sizes: list[int]) -> Iterator[int]:
    done = 0
    for size in sizes:
        yield done
        done += size


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        print_json(report.to_record())
    else:
        print_table(_COLUMNS, map(_row, report.files), yielding=("path",))
        for one in report.files:
            if one.note:
                note(f"{one.path}: {one.note}")
        if len(report.files) > 1:
            saved = report.bytes_before - report.bytes_after
            note(
                f"{len(report.files)} files, {report.artifacts} artifacts, {saved:,} bytes and "
                f"{report.tokens_saved:,} tokens less in them"
            )
    for problem in report.problems:
        complain(problem)


def _row(one: FileReport) -> list[str]:
    return [
        one.status,
        one.format or "-",
        str(one.artifacts),
        cell("bytes", one.bytes_before),
        cell("bytes", one.bytes_after),
        str(one.tokens_saved),
        one_line(os.fspath(one.path)),
    ]


def _exit_code(report: Report) -> int:
    from coatcheck.transcript.migrate import exit_code

    return exit_code(report)
