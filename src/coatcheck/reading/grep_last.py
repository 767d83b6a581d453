"""A grep from the end: the last matches that fit on a page, in the order of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final, TypeAlias

from coatcheck.errors import LimitExceeded
from coatcheck.reading.grep_page import GrepPage
from coatcheck.reading.matches import SEARCH_SECONDS, Found, Place, Row, Search, collect

_FIRST_WINDOW: Final = 64 << 10
_ALL: Final = 1 << 30  # characters: more than a window has


@dataclass(frozen=True, slots=True)
class LastMatches:
    """The last matches before a place, on a page. The matches before them end at `before`, None if
    there are none; `is_late` is True if time ran out before the page was full."""

    found: Found
    page: GrepPage
    before: Place | None
    is_late: bool = False


LayOut: TypeAlias = Callable[[list[Row]], GrepPage]
"""Makes a page of rows that were collected together, or of the last of them."""


def last_matches(search: Search, end: Place, layout_of: Callable[[Found], LayOut]) -> LastMatches:
    """Find the last matches before a place that fit on a page.

    Ever larger windows before the place are searched, until there are more matches in one than
    fit. If a window has too many to collect, or takes too long, the page has those of the one
    before. Raises `LimitExceeded` if that is the first."""
    deadline = monotonic() + SEARCH_SECONDS / 2
    size = _FIRST_WINDOW
    done: LastMatches | None = None
    while True:
        first, found = _collect_window(search, end, size)
        if found.stopped is not None or found.following is not None:
            if done is None:
                raise LimitExceeded(
                    "searching from the end takes too long here",
                    hint="use a simpler pattern, or leave out last",
                )
            return done
        rows, page = _largest_end(found.rows, layout_of(found))
        if rows is not found.rows:
            return LastMatches(found, page, _place_of(rows))
        if first <= search.ranges[0][0]:
            return LastMatches(found, page, None)
        done = LastMatches(found, page, Place(first), is_late=True)
        if monotonic() > deadline:
            return done
        size *= 4


def _collect_window(search: Search, end: Place, size: int) -> tuple[int, Found]:
    """All matches in the lines before a place that are in a window of some bytes, and the number of
    the first of these lines."""
    text = search.text
    last = end.number if end.inside else end.number - 1
    upto = text.line_start(last + 1)
    first = 1
    if upto - size > text.start:
        first = text.line_at(upto - size)
    ranges = [
        (max(begin, first), min(stop, last))
        for begin, stop in search.ranges
        if begin <= last and stop >= first
    ]
    if not ranges:
        return first, Found()
    window = replace(search, ranges=ranges, max_chars=_ALL, before=end)
    return first, collect(window, Place(ranges[0][0]), is_counted=False)


def _largest_end(rows: list[Row], lay_out: LayOut) -> tuple[list[Row], GrepPage]:
    """The last rows that fit on a page, as many as possible, and the page. If not even the last
    match fits with its context, the page shows a part of that."""
    starts = [
        (index, occurrence)
        for index, row in enumerate(rows)
        if row.is_match
        for occurrence in range(max(1, len(row.spans)))
    ]
    page = lay_out(rows)
    if page.resume is None or not starts:
        return rows, page
    low, high = 0, len(starts) - 1  # the first start that fits is after `low`, or is `high`
    while high - low > 1:
        middle = (low + high) // 2
        if lay_out(_rows_from(rows, *starts[middle])).resume is None:
            high = middle
        else:
            low = middle
    best = _rows_from(rows, *starts[high])
    page = lay_out(best)
    if not page.matches:  # its context alone is more than a page
        best = rows[starts[high][0] :]
        page = lay_out(best)
    return best, page


def _rows_from(rows: list[Row], index: int, occurrence: int) -> list[Row]:
    """The rows from an occurrence on, with the lines of context before its row."""
    row = rows[index]
    if occurrence:
        return [replace(row, spans=row.spans[occurrence:]), *rows[index + 1 :]]
    first = index
    while first > 0 and _is_context_before(rows[first - 1], rows[first]):
        first -= 1
    return rows[first:]


def _is_context_before(row: Row, following: Row) -> bool:
    return not row.is_match and row.number == following.number - 1


def _place_of(rows: list[Row]) -> Place:
    """The place of the first match in rows."""
    row = next(row for row in rows if row.is_match)
    return Place(row.number, row.spans[0][0] if row.spans else 0)
