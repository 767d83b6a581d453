"""Commands for transcripts: externalize, rehydrate, verify, undo, forget and show; and audit, which
replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck import CoatcheckError, Store
from coatcheck.cli import (
    json_option,
    open_existing,
    session_options,
    store_options,
    terminal,
    usage_error,
)
from coatcheck.errors import InvalidArgument, StoreUnavailable

if TYPE_CHECKING:
    from coatcheck.audit import Audited
    from coatcheck.models import Prices
    from coatcheck.transcript import FileReport, Report

_COLUMNS: Final = (
    "status",
    "format",
    "artifacts",
    "before_bytes",
    "after_bytes",
    "tokens_saved",
    "path",
)
_REF_KEYS: Final = ("line", "artifact", "media_type", "bytes", "held", "place", "summary")
_FORMATS: Final = (
    "claude-code",
    "pi",
    "langchain",
    "mcp",
    "openai-responses",
    "anthropic",
    "openai-chat",
)
_SHOWN: Final = 3  # of the best and of the worst sessions
_PAYS: Final = 0.99
_MANY_READS: Final = 1.5
_AUDIT_COLUMNS: Final = {
    "name": "sessions",
    "calls": "calls",
    "inline": "inline",
    "ratio": "Coatcheck",
    "worse": "worse",
    "stubs": "stubs",
    "reads": "reads",
    "kept_out": "kept out",
    "path": "file",
}
_AUDIT_CUT: Final = ("file", "inline", "worse", "reads", "stubs", "calls", "sessions")

paths_argument = click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)


@click.group()
def transcript() -> None:
    """Move payloads of transcripts into the store.

    The files keep refs to them, and every byte can be restored."""


@transcript.command()
@paths_argument
@click.option(
    "--write", is_flag=True, help="Change the files. Without it, only show what would be saved."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="The format. Default: detected from the content.",
)
@session_options
def externalize(
    paths: tuple[Path, ...],
    write: bool,
    form: str | None,
    session_id: str,
    url: str | None,
    as_json: bool,
) -> int:
    """Move the payloads of transcripts into the store.

    A PATH is a file, or a folder with transcripts. Without --write nothing changes. With it, each
    file is replaced atomically, and a backup stays beside it until 'verify --remove-backup'. Run it
    again to process lines appended since."""
    from coatcheck.transcript import externalize

    with coatcheck.open(url) if write else _store_for_dry_run(url) as store:
        call = partial(
            externalize, session=store.session(session_id), format=form, dry_run=not write
        )
        code = _for_each(paths, call, "externalizing" if write else "reading", as_json)
    if not write and not as_json:
        terminal.print_note("nothing was changed (use --write)")
    return code


@transcript.command()
@paths_argument
@click.option("-o", "--output", metavar="FILE", help="Write to a file. Default: stdout, or '-'.")
@click.option("--in-place", is_flag=True, help="Restore the files themselves.")
@store_options
def rehydrate(
    paths: tuple[Path, ...], output: str | None, in_place: bool, url: str | None, as_json: bool
) -> int:
    """Write the original transcript, byte for byte.

    Payloads that the store lacks get a placeholder in the output and are reported on stderr, and
    the exit code is that of the error. With --in-place, such a file is left unchanged."""
    from coatcheck.transcript import rehydrate
    from coatcheck.transcript.reports import exit_code

    if in_place and output is not None:
        raise usage_error("--in-place cannot be used with --output")
    if not in_place and (len(paths) > 1 or paths[0].is_dir()):
        raise usage_error("several files need --in-place")
    with open_existing(url) as store:
        if in_place:
            return _for_each(paths, partial(rehydrate, store=store), "restoring", as_json)
        with terminal.writing(output or terminal.STDIO, private=True) as out:
            report = rehydrate(paths[0], store, to=out)  # type: ignore[arg-type]
    for problem in report.problems:
        terminal.print_error(problem)
    if as_json and output not in (None, terminal.STDIO):
        terminal.print_json(report.to_record())
    return exit_code(report)


@transcript.command()
@paths_argument
@click.option("--remove-backup", is_flag=True, help="Remove the backup of each file that passes.")
@store_options
def verify(paths: tuple[Path, ...], remove_backup: bool, url: str | None, as_json: bool) -> int:
    """Prove that transcripts can be restored.

    Reads everything and compares it with the recorded digests."""
    from coatcheck.transcript import verify

    with open_existing(url) as store:
        call = partial(verify, store=store, remove_backup=remove_backup)
        return _for_each(paths, call, "verifying", as_json, _sound_summary)


@transcript.command()
@paths_argument
@store_options
def undo(paths: tuple[Path, ...], url: str | None, as_json: bool) -> int:
    """Restore transcripts in place.

    Drops what the store kept for them. Lines appended since are kept. The backup is used if the
    store does not have everything."""
    from coatcheck.transcript import undo

    with open_existing(url) as store:
        return _for_each(paths, partial(undo, store=store), "restoring", as_json)


@transcript.command()
@paths_argument
@click.option(
    "--force", is_flag=True, help="Even if the file still has refs; they then lead nowhere."
)
@store_options
def forget(paths: tuple[Path, ...], force: bool, url: str | None, as_json: bool) -> int:
    """Drop what the store kept for transcripts.

    For transcripts that were removed, rotated away or restored."""
    from coatcheck.transcript import forget

    with open_existing(url) as store:
        return _for_each(
            paths, lambda path, progress: forget(path, store, force=force), "forgetting", as_json
        )


@transcript.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@store_options
def show(path: Path, url: str | None, as_json: bool) -> None:
    """List the refs of a transcript.

    Shows the position and content of each, and whether the store has it."""
    from coatcheck.transcript.migrate import refs_in

    with open_existing(url) as store:
        rows = [
            {
                "line": number,
                "artifact": ref.pointer,
                "media_type": ref.media_type,
                "bytes": ref.size,
                "held": "no" if store.session(ref.session).ref(ref.id) is None else "yes",
                "place": "/" + "/".join(map(str, ref.path)),
                "summary": ref.summary,
            }
            for number, ref in refs_in(path)
        ]
    terminal.print_records(rows, _REF_KEYS, as_json=as_json, shrink=("place", "summary"))


def _store_for_dry_run(url: str | None) -> Store:
    """Open the store if it exists; a dry run does not create one."""
    try:
        return coatcheck.open(url, create=False)
    except StoreUnavailable:
        return coatcheck.open("memory:")


def _summary(report: Report) -> str | None:
    if len(report.files) < 2:
        return None
    saved = report.bytes_before - report.bytes_after
    change = f"{abs(saved):,} bytes {'less' if saved >= 0 else 'more'} in them"
    tokens = f", {report.tokens_saved:,} tokens saved" if report.tokens_saved else ""
    return f"{len(report.files)} files, {report.artifacts} artifacts, {change}{tokens}"


def _sound_summary(report: Report) -> str:
    sound, total = sum(one.is_sound for one in report.files), len(report.files)
    if sound < total:
        count = f"{sound} of {total} files"
    else:
        count = "1 file" if total == 1 else f"{total} files"
    return f"{count} {'is' if sound == 1 else 'are'} sound"


def _for_each(
    paths: Iterable[Path],
    call: Callable[..., Report],
    doing: str,
    as_json: bool,
    summary: Callable[[Report], str | None] = _summary,
) -> int:
    """Call a function for each file, with one progress bar for all, and print the report. A file
    that fails does not stop the others. Return the exit code."""
    from coatcheck.transcript import Report
    from coatcheck.transcript.migrate import files_in
    from coatcheck.transcript.reports import exit_code, failed

    files = list(files_in(paths))
    found: list[FileReport] = []
    with terminal.progress(doing, quiet=as_json) as bar:
        sizes = [path.stat().st_size if bar and path.is_file() else 0 for path in files]
        start = 0
        for path, size in zip(files, sizes, strict=True):
            advance = bar and partial(_advance, bar, start, sum(sizes))
            try:
                found += call(path, progress=advance).files
            except (CoatcheckError, OSError, RecursionError) as error:
                found.append(failed(path, error))
            start += size
    report = Report(tuple(found))
    if as_json:
        terminal.print_json(report.to_record())
    else:
        _print_report(report, summary(report))
    for problem in report.problems:
        terminal.print_error(problem)
    return exit_code(report)


def _advance(bar: terminal.Progress, start: int, total: int, done: int, _: int | None) -> None:
    bar(start + done, total)


def _print_report(report: Report, summary: str | None) -> None:
    rows = (
        {**asdict(one), "before_bytes": one.bytes_before, "after_bytes": one.bytes_after}
        for one in report.files
    )
    terminal.print_records(rows, _COLUMNS, as_json=False, shrink=("path",))
    for one in report.files:
        if one.note:
            terminal.print_note(f"{one.path}: {one.note}")
    if summary:
        terminal.print_note(summary)


@click.command()
@click.argument(
    "paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--model",
    "model_name",
    metavar="NAME",
    help="Use the prices of this model. Default: the usual prices.",
)
@click.option(
    "--plot", "plot_file", metavar="FILE.svg", help="Write a plot with one bar for each session."
)
@json_option
def audit(
    paths: tuple[Path, ...], model_name: str | None, plot_file: str | None, as_json: bool
) -> None:
    """Show what recorded sessions would have cost with Coatcheck.

    A PATH is a file, or a folder with transcripts. Default: the sessions of Claude Code, Codex and
    pi of this user. The sessions are replayed, and what later answers used of a stored result is
    read back and charged. Nothing is changed or stored."""
    from coatcheck.audit import audit as audited
    from coatcheck.audit import ratio_plot, usual_folders

    chosen = list(paths) or usual_folders()
    if not chosen:
        raise usage_error(
            "there are no sessions of Claude Code, Codex or pi; name a file or a folder"
        )
    prices = _prices(model_name)
    with terminal.progress("replaying", quiet=as_json) as bar:
        found = list(audited(chosen, prices=prices, progress=bar))
    skipped = [one for one in found if one.skipped]
    sessions = sorted((one for one in found if not one.skipped), key=lambda one: one.ratio)
    if as_json:
        _print_audit_json(sessions, skipped)
    else:
        for one in skipped:
            terminal.print_note(f"skipped {one.path}: {one.skipped}")
    if not sessions:
        raise InvalidArgument(
            "there is no recorded session in these files", hint="name a transcript of an agent"
        )
    if plot_file is not None:
        bars = [(one.name, one.ratio) for one in sessions]
        with terminal.writing(plot_file) as out:
            out.write(ratio_plot("Cost with Coatcheck", bars).encode())
    if not as_json:
        _print_audit(sessions)


def _prices(model_name: str | None) -> Prices:
    from coatcheck.models import UNKNOWN, model

    found = model(model_name)
    if model_name is not None and found is UNKNOWN:
        terminal.print_note(f"the prices of {model_name} are not known; the usual ones are used")
    return found.prices


def _print_audit_json(sessions: Sequence[Audited], skipped: Sequence[Audited]) -> None:
    from coatcheck.audit import total

    record = {
        "sessions": len(sessions),
        "worse": sum(one.is_worse for one in sessions),
        **total(sessions).to_record(),
    }
    files = [one.to_record() for one in (*sessions, *skipped)]
    terminal.print_json({"total": record, "files": files})


def _print_audit(sessions: Sequence[Audited]) -> None:
    """Print the sum of all sessions, the best and the worst of them, and the verdict."""
    from coatcheck.audit import total

    whole = total(sessions)
    rows = [_row(whole, sessions)] if len(sessions) > 1 else []
    shown = sessions
    if len(sessions) > 2 * _SHOWN:
        shown = [*sessions[:_SHOWN], *sessions[-_SHOWN:]]
    rows += [_row(one, [one]) for one in shown]
    terminal.print_records(rows, _AUDIT_COLUMNS, as_json=False, shrink=_AUDIT_CUT)
    terminal.print_note(verdict(whole, sessions))


def _row(one: Audited, sessions: Sequence[Audited]) -> dict[str, Any]:
    return {
        "name": one.name if len(sessions) == 1 else f"all {len(sessions)}",
        "calls": one.inline.calls,
        "inline": 1,
        "ratio": f"{one.ratio:.3f}",
        "worse": sum(each.is_worse for each in sessions),
        "stubs": one.ours.stubs,
        "reads": one.ours.reads,
        "kept_out": one.ours.kept_out,
        "path": one.path or None,
    }


def verdict(whole: Audited, sessions: Sequence[Audited]) -> str:
    """Return one line that says whether it pays, and if not, why."""
    ours, calls = whole.ours, whole.inline.calls / len(sessions)
    if whole.ratio < _PAYS:
        less = f"{1 - whole.ratio:.0%} less"
        return f"it pays: {less}, with {ours.extra_calls:,} calls more to read back"
    if not ours.kept_out:
        reason = f"in sessions of {calls:.0f} calls, no result is large enough to leave the context"
    elif ours.reads > _MANY_READS * max(1, ours.stubs):
        reads = ours.reads / max(1, ours.stubs)
        reason = f"a stub is read {reads:.1f} times, a call more each time"
    else:
        reason = f"sessions of {calls:.0f} calls are too short to earn the stubs and tools back"
    return f"it does not pay here: {reason}"
