"""The commands for artifacts: put, get, ls, show and forget."""

from __future__ import annotations

import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import click

import coatcheck
from coatcheck import CoatcheckError, Ref, Session, errors
from coatcheck.cli.files import STDIO, writing
from coatcheck.cli.options import json_option, open_existing, session_option, store_option
from coatcheck.cli.terminal import (
    cell,
    complain,
    is_terminal,
    iso_time,
    one_line,
    print_content,
    print_details,
    print_json,
    print_table,
    print_text,
)
from coatcheck.media import KINDS
from coatcheck.storage import SessionInfo


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--name", help="A name for it in the session; a file's own name where none is given.")
@click.option("--kind", type=click.Choice(KINDS), help="What it is; seen from the content where not given.")
@click.option("--tool", help="The tool that made it.")
@click.option("--media-type", metavar="TYPE", help="Its media type; seen from the content where not given.")
@click.option("--summary", help="What it says, in at most 500 characters; its beginning where not given.")
@click.option("--ttl", type=click.FloatRange(min=0), metavar="SECONDS", help="Let it expire before its session does.")
@click.option("--pin", is_flag=True, help="Keep it whatever the time to live of its session.")
@session_option
@store_option
@json_option
def put(
    file: Path,
    name: str | None,
    kind: str | None,
    tool: str | None,
    media_type: str | None,
    summary: str | None,
    ttl: float | None,
    pin: bool,
    session_id: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Store a FILE, or stdin where it is '-', and print the pointer to it."""
    value = sys.stdin.buffer if str(file) == STDIO else file
    with coatcheck.open(url) as store:
        session = store.session(session_id)
        ref = session.put(value, name=name, kind=kind, tool=tool, media_type=media_type, summary=summary, ttl=ttl)
        if pin:
            ref = session.pin(ref)
    if as_json:
        print_json(_record(ref))
    else:
        click.echo(ref.pointer)


@click.command()
@click.argument("target")
@click.option("-o", "--output", default=STDIO, metavar="FILE", help="Write to a file instead of stdout.")
@click.option("--raw", is_flag=True, help="Write the exact bytes to a terminal too.")
@session_option
@store_option
def get(target: str, output: str, raw: bool, session_id: str, url: str | None) -> None:
    """Write the content of an artifact, by pointer, id or name.

    With a fragment ('art:…#/items/0') it writes that part of a JSON artifact. Files and pipes get the exact bytes; on
    a terminal, characters that would steer it are made visible."""
    is_part = coatcheck.is_pointer(target) and "#" in target
    with open_existing(url) as store, store.session(session_id).open(target) as content:
        if output == STDIO and sys.stdout.isatty() and not raw:
            print_content(content)
            return
        with writing(output) as out:
            shutil.copyfileobj(content, out)
            if is_part:
                out.write(b"\n")


@click.command()
@click.option("--sessions", is_flag=True, help="List sessions instead of artifacts.")
@click.option("--name", help="Only what was put under this name, the newest first.")
@click.option("--kind", type=click.Choice(KINDS), help="Only artifacts of this kind.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most so many.")
@session_option
@store_option
@json_option
def ls(
    sessions: bool,
    name: str | None,
    kind: str | None,
    limit: int | None,
    session_id: str,
    url: str | None,
    as_json: bool,
) -> None:
    """List what a session sees, the newest first.

    A table on a terminal, tab-separated lines in a pipe, JSON lines with --json."""
    with open_existing(url) as store:
        if sessions:
            records = [_session_record(info) for info in islice(store.sessions(), limit)]
            columns = {"used_bytes": "size", "used_at": "used", "expires_at": "expires", "session_id": "session"}
        else:
            session = store.session(session_id)
            refs = session.list(name=name, kind=kind, limit=limit)
            records = [_record(ref) | _coverage(session, ref) for ref in refs]
            columns = {"pointer": "pointer", "type": "kind", "size_bytes": "size", "seen": "seen",
                       "created_at": "created", "name": "name", "summary": "summary"}  # fmt: skip
    if as_json:
        for record in records:
            record.pop("seen", None)
            print_json(record)
    else:
        rows = ([cell(key, record[key]) for key in columns] for record in records)
        print_table(list(columns.values()), rows, yielding=("name", "summary", "session"))


@click.command()
@click.argument("target")
@session_option
@store_option
@json_option
def show(target: str, session_id: str, url: str | None, as_json: bool) -> None:
    """Show what is known of an artifact, by pointer, id or name: its record, how much of it was read, a preview."""
    with open_existing(url) as store:
        session = store.session(session_id)
        ref = session.ref(target)
        if ref is None:
            raise _why_not(session, target)
        record = _record(ref) | _coverage(session, ref)
        try:
            preview = session.preview(ref)
        except CoatcheckError as error:  # what is known of damaged content is told all the same
            complain(str(error))
            preview = None
    seen, coverage = record.pop("seen"), record.pop("coverage")
    if as_json:
        told = {"text": preview.text, "shown": preview.shown} if preview else None
        print_json({**record, "coverage": coverage, "preview": told})
        return
    text, shown = (preview.text, preview.shown) if preview else (None, None)
    print_details({**record, "seen": seen, "preview_shown": shown} | ({} if is_terminal() else {"preview": text}))
    if text and is_terminal():
        click.echo()
        print_text(text)


@click.command()
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Forget all that the session holds, and end it.")
@session_option
@store_option
@json_option
@click.pass_context
def forget(
    context: click.Context,
    targets: tuple[str, ...],
    everything: bool,
    session_id: str,
    url: str | None,
    as_json: bool,
) -> None:
    """Drop a session's hold on artifacts, by pointer, id or name. Bytes go when nobody else holds them."""
    if bool(targets) == everything:
        raise click.UsageError("name what to forget, or give --all", context)
    forgotten = failed = 0
    with open_existing(url) as store:
        session = store.session(session_id)
        if everything:
            forgotten = session.end()
        for target in targets:
            try:
                if not session.forget(target):
                    raise _why_not(session, target)
                forgotten += 1
            except CoatcheckError as error:
                complain(str(error))
                failed = errors.CODES[error.code].exit
    if as_json:
        print_json({"forgotten": forgotten})
    context.exit(failed)


def _record(ref: Ref) -> dict[str, Any]:
    """A ref as JSON: the registry's record, and what this session knows besides."""
    return {
        "pointer": ref.pointer,
        "name": ref.name,
        "session_id": ref.session_id,
        **ref.to_record(),
        "expires_at": iso_time(ref.expires),
        "pinned": ref.pinned,
        "tool": ref.tool,
        "call_id": ref.call_id,
        "parents": list(ref.parents),
        "granted_by": ref.granted_by,
    }


def _coverage(session: Session, ref: Ref) -> dict[str, Any]:
    """How much of an artifact the session has been shown, for scripts and for people. 100% is all of it."""
    try:
        coverage = session.coverage(ref)
    except errors.NotFound:  # it expired a moment ago
        return {"coverage": None, "seen": None}
    percent = f"{int(coverage.share * 100)}%" if coverage.share >= 0.01 or not coverage.shown else "<1%"
    return {"coverage": {"shown_bytes": coverage.shown, "size_bytes": coverage.size}, "seen": percent}


def _session_record(info: SessionInfo) -> dict[str, Any]:
    return {
        "session_id": info.session_id,
        "parent": info.parent,
        "used_bytes": info.used_bytes,
        "created_at": iso_time(info.created),
        "used_at": iso_time(info.used),
        "expires_at": iso_time(info.expires(info.used)),
        "ttl": info.ttl,
        "quota_bytes": info.quota,
    }


def _why_not(session: Session, target: str) -> CoatcheckError:
    """The error for a target that the session does not hold: opening it says best what became of it."""
    try:
        session.open(target).close()
    except CoatcheckError as error:
        return error
    return errors.NotFound(f"session {one_line(session.session_id)!r} only sees this artifact through a parent")
