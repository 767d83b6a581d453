"""Collect the lines that match, and those around them, in one pass over a text of any size.

As many are collected as a page can show in its briefest form; the rest are counted. Counting is
limited in time: for one second, or for a few milliseconds if nearly all lines match. A count that
was not finished is a minimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final, TypeAlias

from coatcheck.deferred import lazy_pattern
from coatcheck.previews.excerpts import uncoloured
from coatcheck.reading.line_groups import HugeLine, LineGroup, cleaned, groups, occurrences_in
from coatcheck.reading.long_lines import Extract, Structure
from coatcheck.reading.patterns import LineHit, Pattern, Span, each_line, line_stop, tally
from coatcheck.reading.text import REPLACEMENT, DecodedText, decode, visible

LONG: Final = 500
"""A line of up to this many bytes is shown whole and counts once."""
SEARCH_SECONDS: Final = 10.0  # until the page is full
COUNT_SECONDS: Final = 1.0  # after that
DENSE_SECONDS: Final = 0.008  # if nearly all lines match, their number says little
_BRIEF: Final = 100  # characters that a brief page shows of a match, more or less
_NEAR: Final = 500  # bytes; occurrences in a line that are nearer share an entry, more or less
_LAST_SPANS: Final = 5_000
_LEAST: Final = 4_000  # characters to collect for a small page, which may show more than that
_MAX_BYTES: Final = 16 << 20  # of collected lines
_NEXT_RECORD: Final = lazy_pattern(rb"[\])}]\s{0,40},\s{0,40}[\[({]")
_CONTINUATION: Final = bytes(range(0x80, 0xC0))  # the bytes of UTF-8 that do not begin a character


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page begins: a line, the offset of an occurrence in it, and the number of lines of
    context due after an earlier match."""

    number: int
    inside: int = 0
    due: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """What to search, for what. Each occurrence counts in a line of more than `long` bytes. `reach`
    is the largest number of lines around a match that may be shown; if `is_context_fixed`, they are
    shown however many lines match."""

    text: DecodedText
    pattern: Pattern
    ranges: list[tuple[int, int]]
    long: int
    invert: bool
    reach: int
    is_context_fixed: bool
    max_chars: int
    before: Place | None = None  # only the last occurrences before it are collected


@dataclass(frozen=True, slots=True)
class Row:
    """A line to show. `spans` are the occurrences in a long line, which are shown one by one;
    `match` is the offset of the match in another."""

    number: int
    line: Line
    is_match: bool = False
    match: int = 0
    spans: tuple[Span, ...] = ()

    @property
    def weight(self) -> int:
        """What the row adds to the number of matches."""
        return len(self.spans) or int(self.is_match)


@dataclass(slots=True)
class Found:
    """The rows from a place on. `following` is the place of those that were not collected, None at
    the end; `more` matches were counted there, all of them if `is_exact`. `stopped` is the line at
    which time ran out."""

    rows: list[Row] = field(default_factory=list)
    following: Place | None = None
    stopped: int | None = None
    more: int = 0
    is_exact: bool = True
    has_huge: bool = False

    @property
    def matches(self) -> int:
        return self.more + sum(row.weight for row in self.rows)


def collect(search: Search, place: Place, *, is_counted: bool) -> Found:
    """Collect the rows of a page from a place on, and count the matches after them if
    `is_counted`."""
    collector = _Collector(search, place)
    found = collector.found
    deadline = monotonic() + SEARCH_SECONDS
    pieces = _searchable(search, place.number)
    for group, is_first in pieces:
        if monotonic() > deadline:
            found.stopped, found.is_exact = group.number, False
            return found
        if is_first:
            collector.begin_range(group.number)
        rest = collector.take(group, deadline)
        if rest is not None:
            found.is_exact = is_counted and _count_rest(search, found, place, group, rest, pieces)
            break
    return found


def count_each(
    search: Search, patterns: list[Pattern], *, deadline: float
) -> tuple[list[int], bool]:
    """Number of matches of each pattern in all lines, and whether there was time for all."""
    searches = [replace(search, pattern=pattern) for pattern in patterns]
    counts = [0] * len(patterns)
    for group, _ in _searchable(search, 1):
        start = 0 if isinstance(group, HugeLine) else group.start
        for index, each in enumerate(searches):
            number, is_whole = _number_in(each, group, start, inside=0, deadline=deadline)
            counts[index] += number
            if not is_whole or monotonic() > deadline:
                return counts, False
    return counts, True


def first_groups(search: Search) -> Iterator[bytes]:
    """Yield what the first group of the pattern matched in each occurrence."""
    pattern = search.pattern
    for group, _ in _searchable(search, 1):
        if isinstance(group, LineGroup):
            yield from pattern.first_groups(group.data, group.start, group.end)
            continue
        for span in occurrences_in(search.text, group, pattern, 0):
            if span is not None:
                match = search.text.read(group.start + span[0], span[1] - span[0])
                yield from pattern.first_groups(match, 0, len(match))


def _searchable(search: Search, start: int) -> Iterator[tuple[LineGroup | HugeLine, bool]]:
    """Yield all lines to search from a line on, and whether they begin a range."""
    for first, last in search.ranges:
        begin = max(first, start)
        is_first = True
        for group in groups(search.text, begin, last) if begin <= last else ():
            if isinstance(group, LineGroup):
                group = cleaned(search.text, group)
            yield group, is_first
            is_first = False


def _count_rest(
    search: Search,
    found: Found,
    place: Place,
    group: LineGroup | HugeLine,
    rest: int,
    pieces: Iterator[tuple[LineGroup | HugeLine, bool]],
) -> bool:
    """Count the matches after the collected ones. Return whether there was time for all."""
    assert found.following is not None
    inside = found.following.inside
    passed = found.following.number - place.number
    matching = sum(row.is_match for row in found.rows)
    is_dense = 0 < 9 * passed <= 10 * matching
    deadline = monotonic() + (DENSE_SECONDS if is_dense else COUNT_SECONDS)
    while True:
        number, is_whole = _number_in(search, group, rest, inside=inside, deadline=deadline)
        found.more += number
        found.has_huge |= isinstance(group, HugeLine)
        if not is_whole or monotonic() > deadline:
            return False
        following = next(pieces, None)
        if following is None:
            return True
        group, _ = following
        inside, rest = 0, group.start


def _number_in(
    search: Search, group: LineGroup | HugeLine, start: int, *, inside: int, deadline: float
) -> tuple[int, bool]:
    """Number of matches in lines from an offset on, and whether there was time for all."""
    if isinstance(group, HugeLine):
        spans = occurrences_in(search.text, group, search.pattern, inside)
        if search.invert:
            return int(not any(spans)), True
        return tally(spans, deadline, least=int(inside > 0))
    long = None if search.invert else search.long
    number, upto = search.pattern.count(
        group.data, start, group.end, deadline=deadline, long=long, inside=inside
    )
    if search.invert:
        number = _line_count(group.data, start, upto) - number
    return number, upto == group.end


class _Collector:
    """Takes groups of lines in order until a page cannot show more. `_due` counts the lines of
    context left to collect after a match, and `_next` is the first line that may be collected."""

    def __init__(self, search: Search, place: Place) -> None:
        self._search = search
        self._place = place
        self._due = place.due
        self._next = place.number
        self._chars = max(search.max_chars, _LEAST)
        self._bytes = _MAX_BYTES if search.before is None else _MAX_BYTES // 4
        self.found = Found()

    def begin_range(self, number: int) -> None:
        """No context reaches from one range to another."""
        if number > self._next:
            self._next, self._due = number, 0

    def take(self, group: LineGroup | HugeLine, deadline: float) -> int | None:
        """Collect from lines. Return None while there is room, else the offset from which to
        count."""
        if isinstance(group, HugeLine):
            self.found.has_huge = True
            return self._take_huge(group, deadline)
        at, number = group.start, group.number
        for hit in self._hits(group):
            self._context_after(group, at, number, hit.start)
            number += group.data.count(b"\n", at, hit.start)
            if self._is_full(number):
                return hit.start
            self._context_before(group, hit.start, number)
            self._match(group, hit, number, deadline)
            if self.found.following is not None:
                return hit.start
            at, number = min(hit.end + 1, group.end), number + 1
        self._context_after(group, at, number, group.end)
        return None

    def _hits(self, group: LineGroup) -> Iterator[LineHit]:
        hits = self._search.pattern.hits(group.data, group.start, group.end)
        if not self._search.invert:
            yield from hits
            return
        at = group.start
        for hit in hits:
            yield from each_line(group.data, at, hit.start)
            at = hit.end + 1
        yield from each_line(group.data, at, group.end)

    def _take_huge(self, huge: HugeLine, deadline: float) -> int | None:
        search, inside = self._search, self._inside(huge.number)
        if self._is_full(huge.number):
            return huge.start
        occurrences = occurrences_in(search.text, huge, search.pattern, inside)
        spans: tuple[Span, ...] = ()
        if search.invert:
            is_match = not any(occurrences)
        else:
            spans = self._spans(occurrences, huge.number, deadline)
            is_match = bool(spans) or inside > 0
        line = StoredLine(search.text, huge.start, huge.end)
        if is_match:
            self._far_lines_before(huge.number, huge.number)
            self._add(Row(huge.number, line, is_match=True, spans=spans))
            self._due = search.reach
        elif self._due:
            self._add(Row(huge.number, line))
            self._due -= 1
        return None if self.found.following is None else huge.start

    def _match(self, group: LineGroup, hit: LineHit, number: int, deadline: float) -> None:
        data = group.data[hit.start : hit.end]
        line = TextLine(data, is_repaired=group.repaired)
        spans: tuple[Span, ...] = ()
        if len(data) > self._search.long and not self._search.invert:
            inside = self._inside(number)
            found = self._search.pattern.occurrences_from(data, inside)
            spans = self._spans(found, number, deadline) or ((inside, inside),)
        self._add(Row(number, line, is_match=True, match=hit.match - hit.start, spans=spans))
        self._due = self._search.reach

    def _spans(
        self, found: Iterator[Span] | Iterator[Span | None], number: int, deadline: float
    ) -> tuple[Span, ...]:
        """The occurrences in a line, up to those that a page can show. An empty one counts only if
        there is no other."""
        if self._search.before is not None:
            return _last_spans(found, number, self._search.before)
        spans: list[Span] = []
        near = 0
        for span in found:
            if span is None:
                continue
            if spans and (self._chars <= 0 or monotonic() > deadline):
                self.found.following = Place(number, inside=span[0])
                break
            spans.append(span)
            if span[0] >= near:
                self._chars -= _BRIEF
                near = span[0] + _NEAR
        if len(spans) > 1 and spans[0][0] == spans[0][1]:
            del spans[0]
        return tuple(spans)

    def _context_after(self, group: LineGroup, at: int, number: int, end: int) -> None:
        """Collect the context due after the last match, from the lines before an offset."""
        while self._due and at < end:
            stop = line_stop(group.data, at, end)
            self._add_context(group, at, stop, number)
            self._due -= 1
            at, number = stop + 1, number + 1

    def _context_before(self, group: LineGroup, at: int, number: int) -> None:
        """Collect the context before a match, back to the last line collected."""
        self._far_lines_before(number, group.number)
        lines = []
        for _ in range(max(self._next, number - self._search.reach, group.number), number):
            stop = at - 1
            at = group.data.rfind(b"\n", group.start, stop) + 1 or group.start
            lines.append((at, stop))
        for back, (start, stop) in zip(range(len(lines), 0, -1), reversed(lines), strict=True):
            self._add_context(group, start, stop, number - back)

    def _far_lines_before(self, number: int, end: int) -> None:
        """Collect the part of the context before a match that is not in its group."""
        text = self._search.text
        for far in range(max(self._next, number - self._search.reach), min(number, end)):
            start = text.line_start(far)
            self._add(Row(far, StoredLine(text, start, text.line_end(start))))

    def _add_context(self, group: LineGroup, start: int, stop: int, number: int) -> None:
        line = TextLine(group.data[start:stop], is_repaired=group.repaired)
        self._add(Row(number, line))

    def _add(self, row: Row) -> None:
        self.found.rows.append(row)
        self._next = row.number + 1
        if isinstance(row.line, TextLine):
            self._bytes -= row.line.length
        if row.is_match or self._search.is_context_fixed:
            brief = 0 if row.spans else min(row.line.length, _BRIEF)
            self._chars -= len(str(row.number)) + 1 + brief

    def _is_full(self, number: int) -> bool:
        """Whether the page cannot show a match in a line; then that is where the next one
        begins."""
        if min(self._chars, self._bytes) > 0:
            return False
        self.found.following = Place(max(self._next, number - self._search.reach))
        return True

    def _inside(self, number: int) -> int:
        """Offset in a line that the page continues from, 0 for all lines but the first."""
        return self._place.inside if number == self._place.number else 0


class TextLine:
    """A line in memory, measured in characters."""

    unit = "characters"

    def __init__(self, data: bytes, *, is_repaired: bool) -> None:
        self.is_repaired = is_repaired
        self._data = data
        self._text = data.decode()
        self._measured = (0, 0)  # an offset, and the characters before it
        self.length = len(self._text)

    def measure(self, offset: int) -> int:
        """Convert a byte offset to characters, counted from the offset that was measured last."""
        if self.length == len(self._data):
            return offset
        near, size = self._measured
        between = self._data[near:offset] or self._data[offset:near]
        characters = len(between.translate(None, _CONTINUATION))
        size += characters if offset >= near else -characters
        self._measured = (offset, size)
        return size

    def cut(self, low: int, high: int) -> str:
        return self._text[low:high]

    def records(self, *, is_json: bool) -> Structure:
        """What finds the records around spans, which must come in order."""
        return Structure(self._data, is_json=is_json)


class StoredLine:
    """A line that is read when it is shown, since it is far away or too long to keep in memory.
    It is measured in bytes."""

    unit = "bytes"
    is_repaired = False

    def __init__(self, text: DecodedText, start: int, end: int) -> None:
        self._text, self._start = text, start
        self.length = end - start

    def measure(self, offset: int) -> int:
        return offset

    def cut(self, low: int, high: int) -> str:
        data = self._text.read(self._start + low, high - low)
        shown = visible(uncoloured(decode(data)))[0]
        # A character that was cut into bytes was made one that is not readable.
        if low > 0:
            shown = shown.lstrip(REPLACEMENT)
        return shown.rstrip(REPLACEMENT if high < self.length else "\r")

    def records(self, *, is_json: bool) -> StoredLine:
        return self

    def record_at(self, first: int, last: int, *, limit: int, width: int) -> Extract | None:
        """The record around a match, if one begins shortly before it: the line is not scanned from
        its start."""
        low = max(0, first - 2 * limit)
        data = self._text.read(self._start + low, min(self.length - low, last - low + limit))
        begin = _NEXT_RECORD.search(data, 0, first - low)
        if begin is None or last - first > limit:
            return None
        structure = Structure(data, at=begin.end() - 1)
        found = structure.record_at(first - low, last - low, limit=limit, width=width)
        if found is None:
            return None
        return found._replace(start=found.start + low, end=found.end + low, label="")


Line: TypeAlias = TextLine | StoredLine


def _last_spans(
    found: Iterator[Span] | Iterator[Span | None], number: int, before: Place
) -> tuple[Span, ...]:
    """The last occurrences in a line, before a place if that is in it."""
    spans: deque[Span] = deque(maxlen=_LAST_SPANS)
    end = before.inside if number == before.number else 0
    for span in found:
        if span is None:
            continue
        if end and span[0] >= end:
            break
        spans.append(span)
    return tuple(spans)


def _line_count(data: bytes, at: int, end: int) -> int:
    """Number of lines between two offsets; the last may have no line feed."""
    return data.count(b"\n", at, end) + (at < end and data[end - 1] != 0x0A)
