"""grep over an artifact of any size: matches are collected once, then laid out on a page.

A page looks like `grep -n`: `12:` before a line that matches, `11-` before a line of context, `--`
between groups. A line counts once, however often it matches, if it has at most `LONG` bytes. On a
longer line, and in a text of a single line, every occurrence counts and is shown: in its record
(see `long_lines`), else with the characters around it. If that takes more than `RICH` characters,
the page shows each match in brief.
"""

from __future__ import annotations

import re
from dataclasses import replace
from time import monotonic
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.previews.excerpts import count
from coatcheck.reading.enclosing import Enclosure, enclosures
from coatcheck.reading.grep_counts import alternatives_of, count_page
from coatcheck.reading.grep_last import LayOut, last_matches
from coatcheck.reading.grep_page import Form, GrepPage, Layout, render
from coatcheck.reading.line_groups import LONG_LINE, OVERLAP
from coatcheck.reading.matches import (
    COUNT_SECONDS,
    LONG,
    Found,
    Place,
    Search,
    collect,
    count_each,
)
from coatcheck.reading.page import AUTO, PageDraft, Request, lines_of
from coatcheck.reading.patterns import Pattern
from coatcheck.reading.text import DecodedText
from coatcheck.storage import merged

RICH: Final = 2_500  # maximum characters of a page that shows whole records
FULL: Final = 1_500  # characters up to which lines of context are added,
FILLED: Final = 10  # if there are at most this many matches
TALLY_SECONDS: Final = 0.5
_CONTEXTS: Final = (3, 2)
_WIDTHS: Final = (500, 300, 160)  # of the matches on a page that shows them in brief
_USUAL_CONTEXT: Final = 2
_TALLY: Final = 200  # characters
_FEW: Final = 5  # matches
_LOOK: Final = 8_192  # characters
_NODES: Final = 4
_INDENTED: Final = lazy_pattern(r"\s*[\[{]\s*\n[ \t]")
_SNAPSHOT: Final = lazy_pattern(r"^\s*- .*\[ref=\w+\]", re.MULTILINE)
_COMPLETE: Final = lazy_pattern(
    r"(?:p\d+:)?\d+:\s*(?:\S{0,3}\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\[?\d\d:\d\d:\d\d"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d"
    r"|[-bcdlps][-rwxsStT]{9}\s)"
)  # the number of a line, then a time, or the mode of a file


class Position(NamedTuple):
    """Where a page begins, as its cursor carries it: a line, the number of matches before it, the
    lines of context still due after the last match, the known count (twice the number, plus one if
    it is exact) and, inside a line, the offset of the next occurrence."""

    number: int
    matches: int = 0
    due: int = 0
    known: int = 0
    inside: int = 0


def search(
    text: DecodedText, request: Request, position: tuple[int, ...] | None = None, base: str = ""
) -> PageDraft:
    """One page of matching lines, from the position on. `base` is the fragment of a text that is
    part of an artifact."""
    if not text.lines:
        Pattern(request.grep or "", ignore_case=request.ignore_case, literal=request.literal)
        return PageDraft("", "no match: the artifact is empty", matches=0)
    asked = _search_of(text, request)
    if request.count:
        where = _searched(asked, request)
        return count_page(asked, request, where, escapes=_has_escapes(text))
    if request.last:
        return _from_end(asked, request, position, base)
    start = Position(*position) if position else Position(asked.ranges[0][0])
    place = Place(start.number, start.inside, start.due)
    found = collect(asked, place, is_counted=not start.known)
    layout = Layout(text, request.max_chars, base, _enclosures(found, asked, base))
    page = _best_form(found, layout, request, start.due)

    matches = max(start.matches + found.matches, start.known >> 1)
    is_exact = found.is_exact or bool(start.known & 1)
    following = _following(found, page, start, matches << 1 | is_exact)
    total = f"{matches:,}" if is_exact else f"at least {matches:,}"
    shown = [_shown(page, start, total, _where(asked, request, page, start, following))]
    if position is None and matches and found.stopped is None:
        shown += _tallies(asked, request)
    shown += _notes(asked, found, page)
    return PageDraft(
        "\n".join(page.entries),
        "; ".join(shown),
        following,
        matches,
        is_exact,
        total=text.lines,
        hits=tuple(page.hits),
    )


def _from_end(
    asked: Search, request: Request, position: tuple[int, ...] | None, base: str
) -> PageDraft:
    """One page of the last matches before a position, which has the number of those after it."""
    end = Position(*position) if position else Position(asked.ranges[-1][1] + 1)
    matches, is_exact = end.known >> 1, bool(end.known & 1)
    if position is None:
        deadline = monotonic() + COUNT_SECONDS
        (matches,), is_exact = count_each(asked, [asked.pattern], deadline=deadline)

    def layout_of(found: Found) -> LayOut:
        layout = Layout(asked.text, request.max_chars, base, _enclosures(found, asked, base))
        return lambda rows: _best_form(replace(found, rows=rows), layout, request, due=0)

    last = last_matches(asked, Place(end.number, end.inside), layout_of)
    page, seen = last.page, end.matches + last.page.matches
    following: tuple[int, ...] | None = None
    if last.before is not None:
        known = matches << 1 | is_exact
        following = Position(last.before.number, seen, 0, known, last.before.inside)
    where = _where(asked, request, page, end, following)
    shown = [_shown_from_end(page, matches, end.matches, where, is_exact=is_exact)]
    if last.is_late and last.before is not None:
        line = last.before.number
        shown.append(f"searched back to line {line} so far, the cursor continues from there")
    shown += _notes(asked, last.found, page)
    return PageDraft(
        "\n".join(page.entries),
        "; ".join(shown),
        following,
        matches,
        is_exact,
        total=asked.text.lines,
        hits=tuple(page.hits),
    )


def _shown_from_end(page: GrepPage, matches: int, after: int, where: str, *, is_exact: bool) -> str:
    """Which matches a page from the end shows; `after` of them come after those."""
    if not page.matches:
        return f"no {'further ' if after else ''}match in {where}"
    if not is_exact:
        which = "the last before those" if after else "the last"
        return f"{which} {page.matches} of at least {matches:,} matches in {where}"
    last = matches - after
    first = last - page.matches + 1
    numbers = f"match {last}" if first == last else f"matches {first}-{last}"
    return f"{numbers} of {matches:,} in {where}"


def _search_of(text: DecodedText, request: Request) -> Search:
    ranges = [(1, text.lines)]
    if request.lines is not None:
        wanted = [(first, last + 1) for first, last in lines_of(request.lines, text.lines)]
        ranges = [(first, end - 1) for first, end in merged(wanted)]
    reach = _fixed_context(request)
    if reach is None:
        reach = _usual_context(text)
        if request.context == AUTO:
            reach = max(reach, *_CONTEXTS)
    pattern = Pattern(
        request.grep or "",
        ignore_case=request.ignore_case,
        literal=request.literal,
        escapes=_has_escapes(text),
    )
    return Search(
        text,
        pattern,
        ranges,
        long=LONG if text.lines > 1 else 0,
        invert=request.invert,
        reach=reach,
        is_context_fixed=_fixed_context(request) is not None,
        max_chars=request.max_chars,
    )


def _enclosures(found: Found, asked: Search, base: str) -> dict[int, Enclosure]:
    """What encloses the matches. Of lines that do not match there may be too many."""
    if asked.invert:
        return {}
    numbers = [row.number for row in found.rows if row.is_match]
    known = enclosures(asked.text, numbers)
    if not base or not asked.text.is_document:
        return known
    return {line: one._replace(text=f"#{base}{one.text[1:]}") for line, one in known.items()}


def _has_escapes(text: DecodedText) -> bool:
    """Whether strings are matched decoded too: in JSON, and in long lines."""
    return text.is_json or text.end - text.start > LONG * text.lines


def _fixed_context(request: Request) -> int | None:
    return request.context if isinstance(request.context, int) else None


def _usual_context(text: DecodedText) -> int:
    """Default number of lines around a match: more than 0 where one line says little."""
    head = text.head[: 4 * _LOOK].decode("utf-8", "replace")[:_LOOK]
    is_indented = text.is_document and _INDENTED.match(head) is not None
    is_snapshot = len(_SNAPSHOT.findall(head)) > _NODES
    return _USUAL_CONTEXT if is_indented or is_snapshot else 0


def _best_form(found: Found, layout: Layout, request: Request, due: int) -> GrepPage:
    """The page in the form that shows the most: whole records if they fit in a part of it, with
    lines of context if there is room, else each match in brief."""
    fixed = _fixed_context(request)
    usual = _usual_context(layout.text) if fixed is None else fixed
    brief = Form(room=request.max_chars, context=fixed or 0, width=_WIDTHS[-1])
    if found.following is not None:
        return render(found.rows, layout, brief, due=due)
    rich = Form(room=min(RICH, request.max_chars), context=usual)
    page = render(found.rows, layout, rich, due=due)
    if page.resume is None:
        return _with_context(found, layout, request, page, usual, due) or page
    for width in _WIDTHS:
        page = render(found.rows, layout, replace(brief, width=width), due=due)
        if page.resume is None:
            break
    return page


def _with_context(
    found: Found, layout: Layout, request: Request, page: GrepPage, usual: int, due: int
) -> GrepPage | None:
    """The page with more context, if that was left to us, helps and fits."""
    is_short = 0 < page.matches <= FILLED and layout.text.lines > 1
    if request.context != AUTO or not is_short or found.stopped is not None:
        return None
    if all(_COMPLETE.match(entry) for entry in page.entries):
        return None
    for context in _CONTEXTS:
        if context > usual:
            form = Form(room=min(FULL, request.max_chars), context=context)
            fuller = render(found.rows, layout, form, due=due)
            if fuller.resume is None:
                return fuller
    return None


def _following(found: Found, page: GrepPage, start: Position, known: int) -> tuple[int, ...] | None:
    """The position of the next page, None at the end."""
    seen = start.matches + page.matches
    place = page.resume or found.following
    if place is not None:
        following = Position(place.number, seen, page.due, known, place.inside)
        return following if place.inside else following[:-1]
    if found.stopped is not None:
        return (found.stopped, seen, page.due, start.known)
    return None


def _searched(asked: Search, request: Request) -> str:
    lines = asked.text.lines
    if request.lines is None:
        return f"{lines:,} line{'s' * (lines != 1)}"
    slices = ", ".join(f"{first}-{last}" for first, last in asked.ranges)
    return f"lines {slices} of {lines:,}"


def _where(
    asked: Search,
    request: Request,
    page: GrepPage,
    start: Position,
    following: tuple[int, ...] | None,
) -> str:
    """What was searched, and how many records of it the page shows."""
    where = _searched(asked, request)
    if page.records:
        where += f", {count(page.records, 'record')}"
        if following is not None or start.matches:
            where += " on this page"
    return where


def _shown(page: GrepPage, start: Position, total: str, where: str) -> str:
    """Which matches the page shows."""
    before, seen = start.matches, start.matches + page.matches
    if page.matches == 1:
        return f"match {seen} of {total} in {where}"
    if page.matches:
        return f"matches {before + 1}-{seen} of {total} in {where}"
    if page.entries:
        return f"context of match {seen} of {total} in {where}"
    return f"no {'further ' if before else ''}match in {where}"


def _tallies(asked: Search, request: Request) -> list[str]:
    """A note on how often each alternative of the pattern matches, unless the few matches show it,
    or it takes long."""
    parts = alternatives_of(request, escapes=_has_escapes(asked.text))
    if not parts:
        return []
    deadline = monotonic() + TALLY_SECONDS
    counts, is_whole = count_each(asked, [part.pattern for part in parts], deadline=deadline)
    if not is_whole or (all(counts) and sum(counts) <= _FEW):
        return []
    named = [f"{part.name}: {number or 'none'}" for part, number in zip(parts, counts, strict=True)]
    note = ", ".join(named)
    return [note] if len(note) <= _TALLY else []


def _notes(asked: Search, found: Found, page: GrepPage) -> list[str]:
    """Notes on the page for its reader."""
    notes = []
    if found.stopped is not None and page.resume is None:
        upto = found.stopped - 1
        notes.append(f"searched up to line {upto} so far, the cursor continues from there")
    if page.is_cut:
        whole = ', lines="N" reads line N whole' if page.is_cut_line_readable else ""
        notes.append(f"long lines are shown in part{whole}")
    if page.is_repaired:
        notes.append(f"invalid {asked.text.unit}s are shown as U+FFFD")
    if found.has_huge:
        most = f"a match over {OVERLAP >> 10} KiB may be missed"
        notes.append(f"lines over {LONG_LINE >> 20} MiB were searched in parts, {most}")
    if not page.matches and asked.pattern.has_feed:
        notes.append(
            "a pattern sees one line at a time, so \\n never matches: "
            "use context=N for the lines around"
        )
    if asked.text.is_scanned:
        notes += asked.text.notes()
    return notes
