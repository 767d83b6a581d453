"""Commands for a whole store: collect, verify, stats, export, import and copy; and config and trust
for the settings."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck import errors
from coatcheck.cli import (
    json_option,
    open_existing,
    setting,
    shown_url,
    store_options,
    terminal,
    usage_error,
)
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck.collect import CollectReport, VerifyReport
    from coatcheck.config import Setting, Settings

DAMAGED: Final = errors.CODES["damaged"].exit
_MAX_VALUE: Final = 40
_SETTING: Final = {"key": "key", "value": "value", "source": "from", "about": "meaning"}


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be freed, without changes.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time to keep expired artifacts. Default: 7200.",
)
@click.option(
    "--no-orphans", is_flag=True, help="Do not list every stored copy to find leftovers of crashes."
)
@store_options
def collect(
    dry_run: bool, grace: float | None, no_orphans: bool, url: str | None, as_json: bool
) -> int:
    """Remove expired artifacts and compress cold content.

    Also removes leftovers of crashes. Exits with 8 if something could not be read or removed."""
    with open_existing(url) as store, terminal.progress("collecting", quiet=as_json) as bar:
        report = store.collect(dry_run=dry_run, grace=grace, orphans=not no_orphans, progress=bar)
        if not dry_run:
            store.note_collected()
    if not as_json:
        terminal.print_details(report.to_record() | {"problems": len(report.problems)})
    _print_report(report, as_json)
    return DAMAGED if report.problems else 0


@click.command()
@click.option(
    "--repair", is_flag=True, help="Repair what can be repaired, without losing sound content."
)
@store_options
def verify(repair: bool, url: str | None, as_json: bool) -> int:
    """Read everything and report problems. Exits with 8 if problems remain."""
    from coatcheck.previews.excerpts import count  # here, because other commands need not import it

    with open_existing(url) as store, terminal.progress("verifying", quiet=as_json) as bar:
        report = store.verify(repair=repair, progress=bar)
    _print_report(report, as_json)
    if not as_json:
        found = count(len(report.problems), "problem") if report.problems else "all is well"
        click.echo(f"{count(report.artifacts, 'artifact')}, {report.bytes:,} bytes read: {found}")
    return 0 if all(problem.repaired for problem in report.problems) else DAMAGED


@click.command()
@store_options
def stats(url: str | None, as_json: bool) -> None:
    """Count sessions, refs, artifacts, tombstones and bytes.

    Also shows where the store is, what a collection would free now, and when it was last
    collected."""
    with open_existing(url) as store:
        collected = store.collected_at()
        totals = {"store": shown_url(store), **asdict(store.stats())}
        freed = store.collect(dry_run=True, orphans=False)
        totals["collectable_artifacts"] = freed.artifacts
        totals["collectable_bytes"] = freed.bytes
        totals["collected_at"] = collected and iso_time(collected.timestamp())
    (terminal.print_json if as_json else terminal.print_details)(totals)


@click.command()
@click.argument("file", default=terminal.STDIO)
@store_options
def export(file: str, url: str | None, as_json: bool) -> None:
    """Export sessions, refs and content as JSON lines.

    Writes to a FILE, or to stdout. A new file is readable by its owner only."""
    if file == terminal.STDIO and terminal.is_terminal():
        raise usage_error("an export cannot be written to a terminal: name a file, or use a pipe")
    with (
        open_existing(url) as store,
        terminal.writing(file, private=True) as target,
        terminal.progress("exporting", quiet=as_json) as bar,
    ):
        count = store.export(target, progress=bar)
    _print_count("exported", count, as_json, err=file == terminal.STDIO)


@click.command("import")
@click.argument("file", default=terminal.STDIO)
@click.option(
    "--session", "mapped", multiple=True, metavar="OLD=NEW", help="Import OLD as NEW. Repeatable."
)
@click.option("--merge", is_flag=True, help="Import into existing sessions.")
@store_options
def import_(
    file: str, mapped: tuple[str, ...], merge: bool, url: str | None, as_json: bool
) -> None:
    """Import the output of export.

    Reads a FILE, or stdin. Ids, names, sessions and expiry stay the same. An existing session is
    refused unless --session maps it or --merge is given."""
    sessions: dict[str, str] = {}
    for pair in mapped:
        old, _, new = pair.partition("=")
        if not old or not new:
            raise usage_error(f"--session takes OLD=NEW, got {pair!r}")
        sessions[old] = new
    with (
        coatcheck.open(url) as store,
        click.open_file(file, "rb") as source,
        terminal.progress("importing", quiet=as_json) as bar,
    ):
        size = os.path.getsize(file) if file != terminal.STDIO and os.path.isfile(file) else None

        def advance(refs: int, _: int | None) -> None:
            if bar:
                bar(source.tell() if size else refs, size)

        count = store.import_(
            source, sessions=sessions, merge=merge, progress=advance if bar else None
        )
    _print_count("imported", count, as_json)


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--tenant",
    default=lambda: setting("store.tenant"),
    show_default="the settings (COATCHECK_TENANT)",
    help="Copy this tenant's store to the same tenant in the target.",
)
@click.option(
    "--move",
    is_flag=True,
    help="End the sessions in the source afterwards. Stop their writers first.",
)
@json_option
def copy(source: str, target: str, tenant: str | None, move: bool, as_json: bool) -> int:
    """Copy a store FROM one place TO another.

    A place is a folder, or an s3:// URL with its catalog. Existing content in the target is
    skipped: an interrupted copy can be continued, and a later one adds what is new."""
    with (
        coatcheck.open(source, create=False, tenant=tenant) as old,
        coatcheck.open(target, tenant=tenant) as new,
        terminal.progress("copying", quiet=as_json) as bar,
    ):
        report = old.copy_to(new, progress=bar)
        if move and not report.lost:
            for info in list(old.sessions()):
                old.session(info.session_id).end()
            old.collect(grace=0)
    if as_json:
        terminal.print_json(report.to_record())
    else:
        click.echo(
            f"copied {report.refs} refs of {report.sessions} sessions: "
            f"{report.artifacts} artifacts, {report.bytes} bytes; "
            f"{report.known} refs were already there"
        )
    if report.lost:
        terminal.print_error(
            f"{len(report.lost)} refs have lost their bytes in the source: run 'coatcheck verify'"
        )
    return DAMAGED if report.lost else 0


@click.command()
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@json_option
def config(keys: tuple[str, ...], as_json: bool) -> None:
    """Show the effective settings for this folder.

    Each has its source: a file, the environment, or the default. With KEYs, or the beginnings of
    keys ('policy'), it shows only those. Passwords are masked."""
    from coatcheck.cli import default_place
    from coatcheck.config import FILE, SETTINGS, VARIABLE, load, unknown

    settings = load()
    chosen = [one for one in SETTINGS if not keys or any(_matches(one.key, key) for key in keys)]
    for key in keys:
        if not any(_matches(one.key, key) for one in chosen):
            settings[key]  # raises an error that names the nearest key
    records = [_setting_record(settings, one, as_json) for one in chosen]
    terminal.print_records(records, _SETTING, as_json=as_json, shrink=("meaning",))
    if as_json:
        return
    if terminal.is_terminal():
        terminal.print_note(
            f"file: {settings.file or f'none; {FILE} in this folder or above, or {VARIABLE}'}"
        )
        terminal.print_note(f"store: {default_place()}")
    for name, nearest in unknown(os.environ).items():
        terminal.print_error(f"unknown setting {name}; did you mean {nearest}?")


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--revoke", is_flag=True, help="End the trust.")
def trust(folder: Path | None, revoke: bool) -> None:
    """Trust the settings file of a project.

    Settings in a coatcheck.toml that decide where data goes, mask fewer secrets or change what a
    model reads count only then. FOLDER has the file; by default it is the nearest in this folder or
    above. Shows what it sets. The trust is for its present content: it ends with the next change of
    the file."""
    from coatcheck import trust as records
    from coatcheck.config import FILE, Settings, found_file, needing_trust, others_can_write

    file = found_file({}) if folder is None else folder.expanduser().absolute() / FILE
    elsewhere = "name the folder that has it"
    if file is None:
        raise errors.InvalidArgument(f"there is no {FILE} in this folder or above", hint=elsewhere)
    if revoke:
        state = "is no longer trusted" if records.revoke(file) else "was not trusted"
        terminal.print_note(f"{file} {state}")
        return
    if not file.is_file():
        raise errors.InvalidArgument(f"there is no {FILE} in {file.parent}", hint=elsewhere)
    if others_can_write(file.stat()):
        hint = "chmod o-w, or make it your own"
        raise errors.InvalidArgument(f"other users can write {file}", hint=hint)
    content, found = needing_trust(file)
    records.trust(file, content)
    settings = Settings(found, {})
    for key in found:
        click.echo(f"{key} = {terminal.one_line(settings.shown(key))}")
    more = "" if found else "; it has no setting that needs it"
    terminal.print_note(f"{file} is trusted{more}")


def _print_report(report: CollectReport | VerifyReport, as_json: bool) -> None:
    """Print JSON, or the problems of a report."""
    if as_json:
        terminal.print_json(report.to_record())
        return
    for problem in report.problems:
        artifact = f"{problem.artifact_id}: " if problem.artifact_id else ""
        repaired = " (repaired)" if problem.repaired else ""
        click.echo(f"{problem.kind}: {artifact}{terminal.one_line(problem.message)}{repaired}")


def _print_count(done: str, count: int, as_json: bool, *, err: bool = False) -> None:
    click.echo(f'{{"{done}": {count}}}' if as_json else f"{done} {count} refs", err=err)


def _matches(key: str, wanted: str) -> bool:
    return key == wanted or key.startswith(f"{wanted}.")


def _setting_record(settings: Settings, setting: Setting, as_json: bool) -> dict[str, Any]:
    """A setting as JSON, or as the cells of a table. On a terminal the path of the settings file is
    below the table."""
    key, value, origin = setting.key, settings[setting.key], settings.origin(setting.key)
    shown, source = settings.shown(key), str(origin)
    if as_json:
        record = {
            "key": key,
            "value": shown if isinstance(value, str) else value,
            "source": origin.source,
        }
        record |= {
            "where": origin.where or None,
            "default": setting.default,
            "variable": setting.variable,
        }
        return record | {"about": setting.about}
    if terminal.is_terminal():
        shown = shown if len(shown) <= _MAX_VALUE else f"{shown[:_MAX_VALUE]}…"
        source = os.path.basename(origin.where) if origin.source == "file" else source
    return {"key": key, "value": shown, "source": source, "about": setting.about}
