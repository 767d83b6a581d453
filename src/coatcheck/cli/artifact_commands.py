"""Commands for artifacts: put, get, read, search, ls, show and forget."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck import CoatcheckError, cli, errors
from coatcheck.cli import terminal
from coatcheck.media import KINDS
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck import Ref, Session
    from coatcheck.reading import Page
    from coatcheck.search import Hit
    from coatcheck.storage import SessionInfo

NO_MATCH: Final = 1  # like grep
_BUFFER: Final = 1 << 16
_ARTIFACTS: Final = {
    "pointer": "pointer",
    "type": "kind",
    "size_bytes": "size",
    "seen": "seen",
    "created_at": "age",
    "name": "name",
    "summary": "summary",
}
_SESSIONS: Final = {
    "used_bytes": "size",
    "used_at": "last use",
    "expires_at": "expires",
    "session_id": "session",
}
_CUT: Final = ("summary", "expires", "seen", "kind", "age", "name", "session")
_HIT: Final = ("pointer", "name", "lines", "passage", "read_on")
_PAGE: Final = ("text", "shown", "pointer", "cursor", "derived", "matches", "matches_exact")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--name", help="Name in the session. Default: the file name.")
@click.option(
    "--kind", type=click.Choice(KINDS), help="Kind of artifact. Default: detected from the content."
)
@click.option("--tool", help="Tool that produced it.")
@click.option(
    "--media-type", metavar="TYPE", help="Media type. Default: detected from the content."
)
@click.option(
    "--summary", help="Summary of at most 500 characters. Default: the beginning of the content."
)
@click.option(
    "--ttl", type=click.FloatRange(min=0), metavar="SECONDS", help="Expire before the session does."
)
@click.option("--pin", is_flag=True, help="Never expire.")
@cli.session_options
def put(
    file: Path, pin: bool, session_id: str, url: str | None, as_json: bool, **described: Any
) -> None:
    """Store a FILE, or stdin if it is '-', and print its pointer."""
    with coatcheck.open(url) as store:
        session = store.session(session_id)
        ref = session.put(sys.stdin.buffer if str(file) == terminal.STDIO else file, **described)
        if pin:
            ref = session.pin(ref)
    click.echo(json.dumps(_record(ref)) if as_json else ref.pointer)


@click.command()
@cli.target_argument
@click.option(
    "-o",
    "--output",
    default=terminal.STDIO,
    metavar="FILE",
    help="Write to a file instead of stdout.",
)
@click.option("--raw", is_flag=True, help="Write the exact bytes even to a terminal.")
@cli.any_session_option
@cli.session_option
@cli.store_option
def get(
    target: str, output: str, raw: bool, any_session: bool, session_id: str, url: str | None
) -> None:
    """Write the content of an artifact.

    TARGET is a pointer, an id or a name. With a fragment ('art:…#/items/0') it writes that part of
    a JSON artifact. Files and pipes get the exact bytes; on a terminal, control characters are
    escaped."""
    with (
        cli.open_session(url, session_id, target, any_session) as session,
        session.open(target) as content,
    ):
        if output == terminal.STDIO and terminal.is_terminal() and not raw:
            terminal.print_content(content)
            return
        with terminal.writing(output) as out:
            while chunk := content.read(_BUFFER):
                out.write(chunk)
            if coatcheck.is_pointer(target) and "#" in target:
                out.write(b"\n")


@click.command()
@cli.target_argument
@click.option(
    "--lines", metavar="A:B", help="Lines, counted from 1: 4100:4160, 10:40,200:220, or -50:."
)
@click.option(
    "--chars",
    metavar="A:B",
    help="Characters, counted from 0: 0:2000, or -2000: for the last 2000.",
)
@click.option(
    "--grep",
    metavar="PATTERN",
    help="Matching lines, in RE2 syntax; with --lines, only within those.",
)
@click.option(
    "-C", "--context", type=int, metavar="N", help="With --grep: lines around each match."
)
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: ignore case.")
@click.option("-v", "--invert", is_flag=True, help="With --grep: lines that do not match.")
@click.option("-F", "--literal", is_flag=True, help="With --grep: treat the pattern as plain text.")
@click.option("-c", "--count", is_flag=True, help="With --grep: numbers alone.")
@click.option("--last", is_flag=True, help="With --grep: the last matches first, page by page.")
@click.option(
    "--query",
    help="'shape', a JSONPath ('$.items[0]'), DuckDB SQL (FROM artifact), or 'page 3' of a PDF.",
)
@click.option("--diff", metavar="OLDER", help="Changes since another artifact.")
@click.option(
    "--code",
    metavar="PYTHON",
    help="What a program prints: it has text, lines and data (JSON or rows). '-' reads it from "
    "stdin.",
)
@click.option("--cursor", help="Continue where a page ended.")
@click.option(
    "--max-chars",
    type=int,
    metavar="N",
    help="Maximum size of a page. Default: the settings, else 8000.",
)
@click.option("--raw", is_flag=True, help="Write the exact text even to a terminal.")
@cli.any_session_option
@cli.session_options
def read(
    target: str,
    raw: bool,
    any_session: bool,
    session_id: str,
    url: str | None,
    as_json: bool,
    **request: Any,
) -> int:
    """Print one page of an artifact.

    TARGET is a pointer, an id or a name. A line on stderr says which part the page shows. Without
    options it reads from the start. Exits with 1 if --grep matches nothing."""
    if request["code"] == "-":
        request["code"] = sys.stdin.read()
    with cli.open_session(url, session_id, target, any_session) as session:
        with _printed_before():
            page = session.read(target, **request, exact=True)
        if as_json:
            terminal.print_json({name: getattr(page, name) for name in _PAGE})
        else:
            text = page.text
            if text and not page.spans and not text.endswith("\n"):  # only a slice is an exact copy
                text += "\n"
            styled = (
                _highlighted(session, page, text, request)
                if terminal.is_terminal() and not raw
                else None
            )
            terminal.print_text(text, styled, raw=raw)
            terminal.print_note(_position(page))
    return NO_MATCH if page.matches == 0 and page.cursor is None else 0


@click.command()
@click.argument("file", type=click.File())
@click.option("--raw", is_flag=True, help="Write the exact text even to a terminal.")
@cli.session_options
def program(file: IO[str], raw: bool, session_id: str, url: str | None, as_json: bool) -> None:
    """Run a Python program over artifacts, in a sandbox.

    FILE is '-' for stdin. The program opens artifacts with artifact("art:...") and prints what it
    finds. For one artifact, 'read --code' has text, lines and data ready."""
    from coatcheck import programs
    from coatcheck.reading import Request

    with cli.open_existing(url) as store:
        session = cli.known_session(store, session_id)
        limit = store.settings["page.max_chars"]
        with _printed_before():
            page = programs.run_alone(session, Request(code=file.read(), max_chars=limit))
    if as_json:
        terminal.print_json({"text": page.text, "shown": page.shown, "derived": page.derived})
    else:
        terminal.print_text(page.text + "\n" if page.text else "", None, raw=raw)
        terminal.print_note(_position(page))


@click.command()
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Maximum number of results.",
)
@cli.session_options
def search(
    words: tuple[str, ...], limit: int, session_id: str, url: str | None, as_json: bool
) -> None:
    """Find the artifacts of a session that match WORDS.

    Searches names, tools, summaries and content; the best match comes first. Each result has the
    matching passage and a command that reads on from there. Tab-separated lines in a pipe, JSON
    lines with --json."""
    text = " ".join(words)
    with cli.open_existing(url) as store:
        hits = cli.known_session(store, session_id).search(text, limit=limit)
    if terminal.is_terminal() and not as_json:
        for number, hit in enumerate(hits):
            terminal.print_pieces(_hit_pieces(hit, text, first=number == 0))
    else:
        terminal.print_records([_hit_record(hit, as_json) for hit in hits], _HIT, as_json=as_json)
    if not hits and not as_json:
        terminal.print_note("no artifact matches these words")


@click.command()
@click.option("--sessions", is_flag=True, help="List sessions instead of artifacts.")
@click.option("--name", help="Only artifacts put under this name.")
@click.option("--kind", type=click.Choice(KINDS), help="Only artifacts of this kind.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of entries.")
@cli.session_options
def ls(
    sessions: bool,
    limit: int | None,
    session_id: str,
    url: str | None,
    as_json: bool,
    **wanted: str | None,
) -> None:
    """List the artifacts that a session sees, newest first.

    A table on a terminal, tab-separated lines in a pipe, JSON lines with --json."""
    with cli.open_existing(url) as store:
        if sessions:
            records = [_session_record(info) for info in islice(cli.sessions_of(store), limit)]
        else:
            session = cli.known_session(store, session_id)
            refs = session.list(**wanted, limit=limit)
            records = [_record(ref) | {"coverage": _coverage(session, ref)} for ref in refs]
    if not sessions and not as_json:
        records = [
            record | {"seen": _share(record["coverage"]), "name": _label(record)}
            for record in records
        ]
    columns = _SESSIONS if sessions else _ARTIFACTS
    if not records and terminal.is_terminal() and not as_json:
        what = "sessions yet" if sessions else f"artifacts in session {session_id!r}"
        terminal.print_note(f"there are no {what}; 'coatcheck put FILE' stores one")
    terminal.print_records(records, columns, as_json=as_json, shrink=_CUT)


@click.command()
@cli.target_argument
@cli.any_session_option
@cli.session_options
def show(target: str, any_session: bool, session_id: str, url: str | None, as_json: bool) -> None:
    """Show the record and a preview of an artifact.

    TARGET is a pointer, an id or a name. It also shows how much of the artifact was read."""
    with cli.open_session(url, session_id, target, any_session) as session:
        ref = session.ref(target)
        if ref is None:
            raise _not_held(session, target)
        record, coverage = _record(ref), _coverage(session, ref)
        preview = None
        try:
            found = session.preview(ref)
            preview = {"text": found.text, "shown": found.shown}
        except CoatcheckError as error:  # the record of damaged content is still useful
            terminal.print_error(str(error))
    if as_json:
        terminal.print_json(record | {"coverage": coverage, "preview": preview})
        return
    text, shown = preview.values() if preview else (None, None)
    record |= {"seen": _share(coverage), "preview_shown": shown}
    terminal.print_details(record if terminal.is_terminal() else record | {"preview": text})
    if text and terminal.is_terminal():
        click.echo()
        terminal.print_text(text)


@click.command()
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=cli.complete_target)
@click.option(
    "--all", "everything", is_flag=True, help="Forget everything in the session, and end it."
)
@cli.session_options
def forget(
    targets: tuple[str, ...], everything: bool, session_id: str, url: str | None, as_json: bool
) -> int:
    """Drop artifacts from a session.

    A TARGET is a pointer, an id or a name. The bytes are removed when no other session has them."""
    if bool(targets) == everything:
        raise cli.usage_error("specify the artifacts to forget, or --all")
    forgotten = code = 0
    with cli.open_existing(url) as store:
        with cli.naming_holders(store, next(iter(targets), "")):
            session = cli.known_session(store, session_id)
        if everything:
            forgotten = session.end()
        for target in targets:
            try:
                with cli.naming_holders(store, target):
                    if not session.forget(target):
                        raise _not_held(session, target)
                forgotten += 1
            except CoatcheckError as error:
                terminal.print_error(str(error))
                code = errors.CODES[error.code].exit
    if as_json:
        terminal.print_json({"forgotten": forgotten})
    return code


def _record(ref: Ref) -> dict[str, Any]:
    """A ref as JSON: its public record and what the session knows about it."""
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
        "metadata": ref.metadata,
    }


def _label(record: dict[str, Any]) -> str | None:
    """What a person recognises an artifact by on a terminal: its name, else the tool that returned
    it with the arguments of the call."""
    if record["name"] is not None or not terminal.is_terminal() or record["tool"] is None:
        return record["name"]  # type: ignore[no-any-return]
    given = record["metadata"].get("arguments")
    return f"{record['tool']}({given})" if isinstance(given, str) else str(record["tool"])


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


def _coverage(session: Session, ref: Ref) -> dict[str, int] | None:
    """How much of an artifact the session has read."""
    try:
        coverage = session.coverage(ref)
    except errors.NotFound:  # it expired a moment ago
        return None
    return {"shown_bytes": coverage.shown, "size_bytes": coverage.size}


def _share(coverage: dict[str, int] | None) -> str | None:
    """Coverage in percent, rounded down, so that 100% means everything."""
    if coverage is None:
        return None
    shown, size = coverage.values()
    percent = shown * 100 // size if size else 100
    return f"{percent}%" if percent or not shown else "<1%"


def _not_held(session: Session, target: str) -> CoatcheckError:
    """The error for a target that the session does not hold; opening it gives the most precise
    one."""
    try:
        session.open(target).close()
    except CoatcheckError as error:
        return error
    name = terminal.one_line(session.session_id)
    return errors.NotFound(f"session {name!r} only sees this artifact through a parent")


@contextmanager
def _printed_before() -> Iterator[None]:
    """If a program fails, print what it printed until then."""
    try:
        yield
    except errors.ProgramFailed as error:
        terminal.print_text(error.printed, None)
        raise


def _position(page: Page) -> str:
    """Which part a page shows, and how to continue."""
    shown = page.shown if page.cut is None else f"{page.cut}; {page.shown}"
    if page.cursor is not None:
        return f"{shown}; to read on, add --cursor {page.cursor}"
    return shown + (
        f"; to read on: {cli.command_line('read', page.derived)}"
        if page.derived is not None
        else ""
    )


def _highlighted(
    session: Session, page: Page, text: str, request: dict[str, Any]
) -> Iterable[terminal.Piece] | None:
    """The text of a page in styled pieces, or None if nothing is highlighted."""
    from coatcheck.media import essence, is_json, is_jsonl
    from coatcheck.reading.patterns import Pattern

    if request["count"]:
        return None
    if page.matches is not None:
        pattern = None
        if request["grep"] is not None and not request["invert"]:
            pattern = Pattern(
                request["grep"], ignore_case=request["ignore_case"], literal=request["literal"]
            )
        return terminal.grep_lines(text, pattern)
    query, pointer = (request["query"] or "").lstrip(), page.derived or page.pointer
    ref = None if "#" in pointer or (query and not page.derived) else session.ref(pointer)
    media_type = ref.media_type if ref else ""
    if request["diff"] is not None or essence(media_type) == "text/x-diff":
        return terminal.diff_lines(text)
    is_data = query.startswith("$") or "#" in pointer or is_json(media_type) or is_jsonl(media_type)
    return terminal.json_tokens(text) if is_data else None


def _read_on(hit: Hit) -> str:
    return cli.command_line(
        "read", hit.ref.pointer, *(("--lines", f"{hit.lines[0]}:") if hit.lines else ())
    )


def _hit_record(hit: Hit, as_json: bool) -> dict[str, Any]:
    return {
        "pointer": hit.ref.pointer,
        "name": hit.ref.name,
        "lines": hit.lines if as_json else hit.lines and f"{hit.lines[0]}-{hit.lines[1]}",
        "passage": hit.passage,
        "score": hit.score,
        "read_on": _read_on(hit),
    }


def _hit_pieces(hit: Hit, words: str, *, first: bool) -> Iterable[terminal.Piece]:
    name = f"  {terminal.one_line(hit.ref.name)}" if hit.ref.name else ""
    lines = f"  lines {hit.lines[0]}-{hit.lines[1]}" if hit.lines else ""
    yield "" if first else "\n", terminal.PLAIN
    yield hit.ref.pointer, terminal.BOLD
    yield name + lines + "\n", terminal.PLAIN
    for line in hit.passage.split("\n"):
        yield "  ", terminal.PLAIN
        yield from terminal.words_in(line, words)
        yield "\n", terminal.PLAIN
    yield f"  {terminal.one_line(_read_on(hit))}\n", terminal.FAINT
