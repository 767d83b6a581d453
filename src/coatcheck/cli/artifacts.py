"""The commands for artifacts: put, get, ls, show and forget."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

import coatcheck
from coatcheck import CoatcheckError, Ref, Session, Store, errors
from coatcheck.cli.options import json_option, session_option, store_option
from coatcheck.cli.terminal import (
    bytes_text,
    complain,
    one_line,
    print_content,
    print_details,
    print_json,
    print_table,
    time_text,
)
from coatcheck.media import KINDS

_STDIO = "-"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--name", help="A name for it in the session; a file's own name where none is given.")
@click.option("--kind", type=click.Choice(KINDS), help="What it is; seen from the content where not given.")
@click.option("--tool", help="The tool that made it.")
@click.option("--media-type", metavar="TYPE", help="Its media type; seen from the content where not given.")
@click.option("--summary", help="What it says, in at most 500 characters; its beginning where not given.")
@click.option(
    "--ttl", type=click.FloatRange(min=0), metavar="SECONDS", help="Let it expire before its session does."
)
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
    value = click.get_binary_stream("stdin") if str(file) == _STDIO else file
    with coatcheck.open(url) as store:
        session = store.session(session_id)
        ref = session.put(
            value, name=name, kind=kind, tool=tool, media_type=media_type, summary=summary, ttl=ttl
        )
        if pin:
            ref = session.pin(ref)
    if as_json:
        print_json(_record(ref))
    else:
        click.echo(ref.pointer)


@click.command()
@click.argument("target")
@click.option("-o", "--output", metavar="FILE", help="Write to a file instead of stdout.")
@click.option("--raw", is_flag=True, help="Write the exact bytes to a terminal too.")
@session_option
@store_option
def get(target: str, output: str | None, raw: bool, session_id: str, url: str | None) -> None:
    """Write the content of an artifact, by pointer, id or name. With a fragment ('art:…#/items/0'), write that part
    of a JSON artifact.

    Files and pipes get the exact bytes. On a terminal, characters that would steer it are made visible."""
    is_part = coatcheck.is_pointer(target) and "#" in target
    with coatcheck.open(url) as store, store.session(session_id).open(target) as content:
        if output not in (None, _STDIO):
            with Path(output).open("wb") as file:
                shutil.copyfileobj(content, file)
        elif sys.stdout.isatty() and not raw:
            print_content(content)
        else:
            out = click.get_binary_stream("stdout")
            shutil.copyfileobj(content, out)
            if is_part:
                out.write(b"\n")
            out.flush()


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
    """List what a session sees, the newest first: a table on a terminal, tab-separated lines in a pipe, JSON lines
    with --json."""
    with coatcheck.open(url) as store:
        if sessions:
            _list_sessions(store, limit, as_json)
            return
        refs = store.session(session_id).list(name=name, kind=kind, limit=limit)
    if as_json:
        for ref in refs:
            print_json(_record(ref))
        return
    columns = ("pointer", "kind", "size", "created", "name", "summary")
    print_table(columns, map(_row, refs))


@click.command()
@click.argument("target")
@session_option
@store_option
@json_option
def show(target: str, session_id: str, url: str | None, as_json: bool) -> None:
    """Show what is known of an artifact, by pointer, id or name."""
    with coatcheck.open(url) as store:
        session = store.session(session_id)
        ref = session.ref(target)
        if ref is None:
            raise _why_not(session, target)
    record = _record(ref)
    if as_json:
        print_json(record)
    else:
        print_details(
            record | {"parents": ", ".join(ref.parents) or None, "size_bytes": bytes_text(ref.size_bytes)}
        )


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
    with coatcheck.open(url) as store:
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
        "expires_at": None if ref.expires_at is None else ref.expires_at.isoformat().replace("+00:00", "Z"),
        "pinned": ref.pinned,
        "tool": ref.tool,
        "call_id": ref.call_id,
        "parents": list(ref.parents),
        "granted_by": ref.granted_by,
    }


def _row(ref: Ref) -> tuple[str, ...]:
    created = time_text(ref.created_at) or ""
    return (ref.pointer, ref.kind, bytes_text(ref.size_bytes), created, ref.name or "-", ref.summary)


def _list_sessions(store: Store, limit: int | None, as_json: bool) -> None:
    def rows() -> Iterator[tuple[str, ...]]:
        for count, info in enumerate(store.sessions()):
            if count == limit:
                return
            expires = info.expires(info.used)
            record = {
                "session_id": info.session_id,
                "parent": info.parent,
                "used_bytes": info.used_bytes,
                "created_at": _moment(info.created),
                "used_at": _moment(info.used),
                "expires_at": None if expires is None else _moment(expires),
                "ttl": info.ttl,
                "quota_bytes": info.quota,
            }
            if as_json:
                print_json(record)
            else:
                size = bytes_text(info.used_bytes)
                yield (size, _moment(info.used), str(record["expires_at"] or "-"), info.session_id)

    if as_json:
        for _ in rows():
            pass
    else:
        print_table(("size", "used", "expires", "session"), rows())


def _moment(seconds: float) -> str:
    return time_text(datetime.fromtimestamp(seconds, UTC)) or ""


def _why_not(session: Session, target: str) -> CoatcheckError:
    """The error for a target that the session does not hold: opening it says best what became of it."""
    try:
        session.open(target).close()
    except CoatcheckError as error:
        return error
    return errors.NotFound(
        f"session {one_line(session.session_id)!r} only sees this artifact through a parent"
    )
