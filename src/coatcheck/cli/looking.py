"""The commands that look inside artifacts: read and search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from coatcheck import Session
from coatcheck.cli.options import command_line, json_option, open_existing, session_option, store_option
from coatcheck.cli.terminal import cell, is_terminal, note, one_line, print_json, print_pieces, print_table, print_text

if TYPE_CHECKING:
    from coatcheck.cli.highlight import Piece
    from coatcheck.reading import Page
    from coatcheck.search import Hit

NO_MATCH = 1  # as grep says it


@click.command()
@click.argument("target")
@click.option("--lines", metavar="A:B", help="Lines, counted from 1: 4100:4160, :100, or -50: for the last 50.")
@click.option("--chars", metavar="A:B", help="Characters, counted from 0: 0:2000, or -2000: for the last.")
@click.option("--grep", metavar="PATTERN", help="Lines that match, in RE2's syntax; with --lines, only of those lines.")
@click.option("-C", "--context", type=int, default=0, metavar="N", help="With --grep: so many lines around each match.")
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: upper and lower case are the same.")
@click.option("-v", "--invert", is_flag=True, help="With --grep: lines that do not match.")
@click.option("-F", "--literal", is_flag=True, help="With --grep: the pattern is text, not a regular expression.")
@click.option("--query", help="'shape', a JSONPath ('$.items[0]'), SQL on the table artifact, or 'page 3' of a PDF.")
@click.option("--diff", metavar="OLDER", help="What changed since another artifact.")
@click.option("--cursor", help="Read on where a page ended.")
@click.option("--max-chars", type=int, metavar="N", help="The most that a page has; 8000, or what the settings say.")
@click.option("--raw", is_flag=True, help="Write the exact text to a terminal too.")
@session_option
@store_option
@json_option
@click.pass_context
def read(
    here: click.Context, /, target: str, raw: bool, session_id: str, url: str | None, as_json: bool, **asked: Any
) -> None:
    """Look inside an artifact, by pointer, id or name: one page of it, and on stderr what part that is.

    Without options it reads from the start. Exits with 1 where --grep matches nothing."""
    with open_existing(url) as store:
        session = store.session(session_id)
        page = session.read(target, **asked)
        if as_json:
            print_json(_page_record(page))
        else:
            text = page.text if page.spans else _ended(page.text)
            styled = _pieces(session, page, text, asked) if is_terminal() and not raw else None
            print_text(text, styled, raw=raw)
            note(_said(page))
    if page.matches == 0 and page.cursor is None:
        here.exit(NO_MATCH)


@click.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="At most so many.")
@session_option
@store_option
@json_option
def search(words: tuple[str, ...], limit: int, session_id: str, url: str | None, as_json: bool) -> None:
    """Find the artifacts of a session that fit some WORDS, by name, tool, summary and content, the best first.

    Each comes with the passage that fits, and with the command that reads on from there. Tab-separated lines in a
    pipe, JSON lines with --json."""
    wanted = " ".join(words)
    with open_existing(url) as store:
        hits = store.session(session_id).search(wanted, limit=limit)
    if as_json:
        for hit in hits:
            print_json(_hit_record(hit))
    elif is_terminal():
        for number, hit in enumerate(hits):
            print_pieces(_hit_pieces(hit, wanted, first=number == 0))
    else:
        print_table((), map(_row, hits), yielding=())
    if not hits and not as_json:
        note("no artifact fits these words")


def _page_record(page: Page) -> dict[str, Any]:
    told = ("text", "shown", "pointer", "cursor", "derived", "matches", "matches_exact")
    return {name: getattr(page, name) for name in told}


def _said(page: Page) -> str:
    """What part a page is, and how to go on."""
    if page.cursor is not None:
        return f"{page.shown}; to read on, add --cursor {page.cursor}"
    if page.derived is not None:
        return f"{page.shown}; to read on: {command_line('read', page.derived)}"
    return page.shown


def _ended(text: str) -> str:
    """What is not a slice is no exact copy of anything: it ends as lines do."""
    return text + "\n" if text and not text.endswith("\n") else text


def _pieces(session: Session, page: Page, text: str, asked: dict[str, Any]) -> Iterable[Piece] | None:
    """The text of a page with what stands out in it, None where nothing does."""
    from coatcheck.cli.highlight import diff_lines, grep_lines, json_tokens
    from coatcheck.reading.documents import essence, is_json, is_jsonl
    from coatcheck.reading.patterns import Pattern

    if page.matches is not None:
        known = asked["grep"] is not None and not asked["invert"]
        options = {name: asked[name] for name in ("ignore_case", "literal")}
        return grep_lines(text, Pattern(asked["grep"], **options) if known else None)
    if asked["diff"] is not None:
        return diff_lines(text)
    path, pointer = (asked["query"] or "").lstrip().startswith("$"), page.derived or page.pointer
    if path or "#" in pointer:
        return json_tokens(text)
    ref = None if asked["query"] and not page.derived else session.ref(pointer)
    if ref is None:
        return None
    if is_json(ref.media_type) or is_jsonl(ref.media_type):
        return json_tokens(text)
    return diff_lines(text) if essence(ref.media_type) == "text/x-diff" else None


def _read_on(hit: Hit) -> str:
    return command_line("read", hit.ref.pointer, *(("--lines", f"{hit.lines[0]}:") if hit.lines else ()))


def _hit_record(hit: Hit) -> dict[str, Any]:
    return {
        "pointer": hit.ref.pointer,
        "name": hit.ref.name,
        "lines": hit.lines,
        "passage": hit.passage,
        "score": hit.score,
        "read_on": _read_on(hit),
    }


def _row(hit: Hit) -> list[str]:
    told = {**_hit_record(hit), "lines": f"{hit.lines[0]}-{hit.lines[1]}" if hit.lines else None}
    return [cell(key, told[key]) for key in ("pointer", "name", "lines", "passage", "read_on")]


def _hit_pieces(hit: Hit, words: str, *, first: bool) -> Iterable[Piece]:
    from coatcheck.cli.highlight import FAINT, HEAD, PLAIN, words_in

    name = f"  {one_line(hit.ref.name)}" if hit.ref.name else ""
    lines = f"  lines {hit.lines[0]}-{hit.lines[1]}" if hit.lines else ""
    yield "" if first else "\n", PLAIN
    yield hit.ref.pointer, HEAD
    yield name + lines + "\n", PLAIN
    for line in hit.passage.split("\n"):
        yield "  ", PLAIN
        yield from words_in(line, words)
        yield "\n", PLAIN
    yield f"  {one_line(_read_on(hit))}\n", FAINT
