"""grep over an artifact of any size with RE2: linear time for any pattern, in bounded memory.

A page looks like `grep -n`: `12:` before a line that matches, `11-` before a line of context, `--`
between groups. A line counts once, however often it matches, if it has at most `LONG` bytes. On a
longer line, and in a text of a single line, every occurrence counts and is shown: in its record
(see `long_lines`), else with the characters around it. If that takes more than `RICH` characters,
the page shows each match in brief.

The text is searched in pieces of many lines. A pattern sees one line at a time: it is compiled so
that it never matches a line feed and `^` and `$` match at every line; the few patterns for which
that is not enough run line by line. A line that spans pieces is joined up to a limit; a longer one
is searched in overlapping windows. JSON and long lines are searched as written and with the escapes
of their strings decoded. Offsets always refer to the written line.

Counting all matches is limited in time: a full page counts for one more second, or for a few
milliseconds if nearly all lines match, and then says "at least". A position is the next line, the
number of matches before it, the lines of context still due after the last match, the known count
(twice the number, plus one if exact) and, if the page ended inside a line, the offset of the next
occurrence.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from itertools import tee
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import re2  # type: ignore[import-untyped]  # ships without types

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.ids import clip
from coatcheck.previews.excerpts import count, folded, uncoloured
from coatcheck.reading.long_lines import (
    LEVELS,
    RECORD,
    SMALL,
    Decoded,
    Extract,
    Structure,
    boundary,
    decoded_lines,
)
from coatcheck.reading.page import AUTO, MAX_CONTEXT, PageDraft, Request, lines_of
from coatcheck.reading.text import REPLACEMENT, DecodedText, decode, visible
from coatcheck.storage import merged

MAX_PATTERN: Final = 1_000
MAX_PROGRAM: Final = 20_000  # maximum instructions of a compiled pattern
LONG: Final = 500
"""A line of up to this many bytes is shown whole and counts once."""

_RUN: Final = 128 * 1024
_LINE_BY_LINE: Final = lazy_pattern(r"\\[AzC]|\(\?[a-zA-Z]*-[a-zA-Z]*m")
_REJECTIONS: Final = (
    (("(?=", "(?!"), "RE2 has no look-ahead",
     "match the text itself, or filter with a second grep (invert=true)"),
    (("(?<=", "(?<!"), "RE2 has no look-behind",
     "match the text before it too; the whole line is shown anyway"),
    (("operator: (?P", "(?(", "(?>"), "RE2 has no back-references or atomic groups",
     "spell it out: (foo|bar)"),
    (("(?#", "(?x"), "RE2 has no comments in patterns", "leave them out"),
    (("invalid repetition size",), "RE2 allows at most 1,000 repetitions, nested ones multiplied",
     "use + or *"),
    (("too large", "too big"), "the compiled pattern is too large",
     "use a shorter one, + for large repetitions"),
    (("repetition operator: *+", "repetition operator: ++", "repetition operator: ?+"),
     "RE2 has no possessive repetition", "use *, + or ? alone"),
    (("sequence: \\Z", "sequence: \\G", "sequence: \\K"), "RE2 does not support that anchor",
     "use ^ and $"),
    (("sequence: \\u", "sequence: \\N"), "RE2 does not support that escape",
     "write the character, or \\x{00e9}"),
    (("sequence: \\h", "sequence: \\R"), "RE2 does not support that class", "use [ \\t], or \\s"),
    (tuple(f"sequence: \\{name}" for name in "123456789k"),
     "RE2 has no back-references", "spell the text out: (foo|bar)"),
)  # fmt: skip
_PLAIN: Final = lazy_pattern(
    r"[\w !\"#%&',/:;<=>@`~-]+", re.ASCII
)  # printable ASCII without a special meaning in RE2
_FEED: Final = lazy_pattern(r"(\\[^n])|\\n|\n", re.DOTALL)
_ESCAPE_HINT: Final = (
    "check the pattern, and put a backslash before special characters that you search for"
)
LONG_LINE: Final = 2 << 20
OVERLAP: Final = 64 << 10
LINE_SECONDS: Final = 10.0  # maximum time without a match in one line
_STEP: Final = 1 << 20
_QUICK: Final = 1e-9  # seconds per byte read
_PATIENCE: Final = 0.008
_AROUND: Final = 8  # bytes on either side of a window, for `^`, `$` and `\b`
COUNT_SECONDS: Final = 1.0
DENSE_SECONDS: Final = 0.008  # if nearly all lines match, their number says little
SEARCH_SECONDS: Final = 10.0
LINE_CHARS: Final = 500
_KEPT: Final = 8 << 20  # bytes of searched lines
RICH: Final = 2_500  # maximum characters of a page that shows whole records
_WIDTHS: Final = (500, 300, 160)  # of the matches on a page that shows them in brief
FULL: Final = 1_500  # characters up to which lines of context are added,
FILLED: Final = 10  # if there are at most this many matches
_CONTEXTS: Final = (3, 2)
_MARKS: Final = 140
_COMPLETE: Final = lazy_pattern(
    r"(?:p\d+:)?\d+:\s*(?:\S{0,3}\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\[?\d\d:\d\d:\d\d"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d"
    r"|[-bcdlps][-rwxsStT]{9}\s)"
)  # the number of a line, then a time, or the mode of a file
SLOW_SECONDS: Final = 2.0  # a page that took longer is not filled a second time
CONTEXT: Final = 2
TALLY_SECONDS: Final = 0.5
_TALLY: Final = 200  # characters
_ALTERNATIVES: Final = 12
_FEW: Final = 5  # matches
_LOOK: Final = 8_192  # characters
_NODES: Final = 4
_INDENTED: Final = lazy_pattern(r"\s*[\[{]\s*\n[ \t]")
_SNAPSHOT: Final = lazy_pattern(r"^\s*- .*\[ref=\w+\]", re.MULTILINE)
_FLAGS: Final = lazy_pattern(r"\(\?[a-zA-Z-]+\)")
_GROUP: Final = lazy_pattern(r"\((?:\?:)?([^()]*)\)")
_PARTS: Final = lazy_pattern(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_NEXT_RECORD: Final = lazy_pattern(rb"[\])}]\s{0,40},\s{0,40}[\[({]")
_CONTINUATION: Final = bytes(range(0x80, 0xC0))  # the bytes of UTF-8 that do not begin a character
_AGAIN: Final = 2 * RECORD
_LEFT_OUT: Final = len("[999,999,999,999 characters left out]")

_Views: TypeAlias = "dict[int, _LineView | _HugeLineView]"  # by the offset of the line


def search(
    text: DecodedText, request: Request, position: tuple[int, ...] | None = None, base: str = ""
) -> PageDraft:
    """One page of matching lines, from the position on. `base` is the fragment of a text that is
    part of an artifact.

    Few matches are shown with whole records. If those do not fit in a part of the page, each is
    shown in brief."""
    assert request.grep is not None
    if not text.lines:
        Pattern(request.grep, ignore_case=request.ignore_case, literal=request.literal)
        return PageDraft("", "no match: the artifact is empty", matches=0)
    ranges = [(1, text.lines)]
    if request.lines is not None:
        wanted = ((first, last + 1) for first, last in lines_of(request.lines, text.lines))
        ranges = [(first, end - 1) for first, end in merged(wanted)]
    start, before, due, known, *inside = position or (ranges[0][0], 0, 0, 0)
    with closing(_Found(text, request, ranges, start, *inside)) as found:
        page, seconds = _best_form(found, due, base, is_counted=not known)
        is_first = (
            position is None
            and page.found + page.more > 0
            and page.stopped is None
            and seconds < SLOW_SECONDS
        )
        tallies = _tallies(found) if is_first and not (request.literal or request.invert) else []
    seen = before + page.found
    matches, exact = max(seen + page.more, known >> 1), page.is_finished or bool(known & 1)
    following: tuple[int, ...] | None = None
    if page.resume is not None:
        following = (page.resume, seen, page.due, matches << 1 | exact)
        following += (page.inside,) if page.inside else ()
    elif page.stopped is not None:
        following = (page.stopped, seen, page.due, known)

    where = f"{text.lines:,} line{'s' * (text.lines != 1)}"
    if request.lines is not None:
        slices = ", ".join(f"{first}-{last}" for first, last in ranges)
        where = f"lines {slices} of {text.lines:,}"
    if page.records:
        where += f", {count(page.records, 'record')}" + " on this page" * (
            following is not None or before > 0
        )
    total = f"{matches:,}" if exact else f"at least {matches:,}"
    if page.found:
        numbers = f"match {seen}" if page.found == 1 else f"matches {before + 1}-{seen}"
        shown = f"{numbers} of {total} in {where}"
    elif page.out:
        shown = f"context of match {seen} of {total} in {where}"
    else:
        shown = f"no {'further ' if before else ''}match in {where}"
    notes = page.notes()
    if page.stopped is not None:
        notes.insert(
            0, f"searched up to line {page.stopped - 1} so far, the cursor continues from there"
        )
    return PageDraft("\n".join(page.out), "; ".join([shown, *tallies, *notes]), following, matches,
                     exact, total=text.lines, hits=tuple(page.hits))  # fmt: skip


def _best_form(
    found: _Found, due: int, base: str, *, is_counted: bool
) -> tuple[_PageBuilder, float]:
    """The page in the form that shows the most, and the seconds that the first form took."""
    text, request = found.text, found.request
    given = request.context if isinstance(request.context, int) else None
    usual = _usual_context(text) if given is None else given

    def filled(width: int, room: int, context: int) -> _PageBuilder:
        page = _PageBuilder(
            found, due=min(due, context), base=base, room=room, context=context, width=width
        )
        page.fill(is_counted=is_counted and width == _WIDTHS[-1])
        return page

    began = monotonic()
    page = filled(0, RICH, usual)
    seconds = monotonic() - began
    if seconds > SLOW_SECONDS:
        pass  # once is enough
    elif page.resume is not None:
        for width in _WIDTHS if seconds < SLOW_SECONDS / 10 else _WIDTHS[-1:]:
            page = filled(width, request.max_chars, given or 0)
            if page.resume is None:
                break
    elif request.context == AUTO and 0 < page.found <= FILLED and text.lines > 1:
        contexts = () if page.stopped or all(map(_COMPLETE.match, page.out)) else _CONTEXTS
        for context in (context for context in contexts if context > usual):
            fuller = filled(0, FULL, context)
            if fuller.resume is None:
                return fuller, seconds
    return page, seconds


def _usual_context(text: DecodedText) -> int:
    """Default number of lines around a match: more than 0 where one line says little."""
    head = text.head[: 4 * _LOOK].decode("utf-8", "replace")[:_LOOK]
    is_indented = text.is_document and _INDENTED.match(head) is not None
    return CONTEXT if is_indented or len(_SNAPSHOT.findall(head)) > _NODES else 0


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern like `A|B|C` or `(A|B)`, if it has any; flags at its start
    apply to each."""
    flags = _FLAGS.match(pattern)
    lead, body = (flags[0], pattern[flags.end() :]) if flags else ("", pattern)
    parts = _split(body)
    if len(parts) == 1 and (group := _GROUP.fullmatch(body)) and len(inner := _split(group[1])) > 1:
        parts = inner
    return [lead + part for part in parts] if 1 < len(parts) <= _ALTERNATIVES and all(parts) else []


def _split(pattern: str) -> list[str]:
    """Split a pattern at each `|` outside of brackets. An unbalanced one, or one with `\\Q`, stays
    whole."""
    parts, start, depth = [], 0, 0
    for token in _PARTS.finditer(pattern):
        sign = token[0]
        depth += (sign == "(") - (sign == ")")
        if depth < 0 or sign == "\\Q":
            return [pattern]
        if sign == "|" and not depth:
            parts.append(pattern[start : token.start()])
            start = token.end()
    return [*parts, pattern[start:]]


def _tallies(found: _Found) -> list[str]:
    """A note on how often each alternative of the pattern matches, unless the few matches show it,
    or it takes long."""
    parts = alternatives(found.request.grep or "")
    deadline = monotonic() + TALLY_SECONDS
    try:
        patterns = [found.compiled(part) for part in parts]
    except InvalidArgument:
        return []
    counts = [0] * len(parts)
    with closing(found.lines(keep=False)) as all_lines:
        for lines in all_lines if parts else ():
            for index, pattern in enumerate(patterns):
                if isinstance(lines.group, HugeLine):
                    spans = _occurrences_in(found.text, lines.group, pattern, 0)
                    number, is_whole = _tally(spans, deadline, is_hit=False)
                else:
                    data, start, end = lines.group.data, lines.group.start, lines.group.end
                    number, upto = pattern.count(data, start, end, deadline, long=found.long)
                    is_whole = upto == end
                counts[index] += number
                if not is_whole or monotonic() > deadline:
                    return []
    named = zip(parts, counts, strict=True)
    note = ", ".join(
        f"{part if len(part) <= 40 else part[:39] + '…'}: {number or 'none'}"
        for part, number in named
    )
    is_plain = all(counts) and sum(counts) <= _FEW
    return [note] if note and len(note) <= _TALLY and not is_plain else []


class _Lines:
    """Searched lines. Their matches, and those inside a long line, are found when they are first
    asked for, and kept for every form of the page. `is_first` is True at the start of a range."""

    def __init__(self, found: _Found, group: LineGroup | HugeLine, is_first: bool) -> None:
        self.group, self.is_first = group, is_first
        self.views: _Views = {}
        self._hits = tee(found.hits(group, self.views), 1)[0]

    def hits(self) -> Iterator[LineHit]:
        """The lines to show as matches; a huge line counts as one."""
        return copy(self._hits)


class _Found:
    """The lines of a search from its start on. Each form of the page goes through them, but they
    are read and searched once: lines with matches, and those after them, are kept up to a limit."""

    def __init__(
        self,
        text: DecodedText,
        request: Request,
        ranges: list[tuple[int, int]],
        start: int,
        inside: int = 0,
    ) -> None:
        self.text, self.request, self.start, self.inside = text, request, start, inside
        self.long = LONG if text.lines > 1 else 0
        self._has_escapes = text.is_json or text.end - text.start > LONG * text.lines
        self.pattern = self.compiled(request.grep or "", literal=request.literal)
        self._ranges = ranges
        self._kept: list[_Lines] = []
        self._room = _KEPT
        self._next = start  # the last of the kept lines, or those after them

    def compiled(self, pattern: str, *, literal: bool = False) -> Pattern:
        return Pattern(
            pattern,
            ignore_case=self.request.ignore_case,
            literal=literal,
            escapes=self._has_escapes,
        )

    def inside_at(self, number: int) -> int:
        """Offset in a line that the page continues from, 0 for all lines but the first."""
        return self.inside if number == self.start else 0

    def view(
        self, group: LineGroup | HugeLine, views: _Views, start: int, end: int, number: int
    ) -> _LineView | _HugeLineView:
        """A long line in which occurrences are shown, made once for all forms."""
        if start not in views:
            inside = self.inside_at(number)
            views[start] = (
                _HugeLineView(self.text, group, self.pattern, inside)
                if isinstance(group, HugeLine)
                else _LineView(group, start, end, self.pattern, inside)
            )
        return views[start]

    def hits(self, group: LineGroup | HugeLine, views: _Views) -> Iterator[LineHit]:
        """Search lines for those to show as matches."""
        is_inverted = self.request.invert
        if isinstance(group, HugeLine):
            spans = self.view(group, views, 0, 0, group.number).occurrences()
            if (
                self.inside_at(group.number)
                or any(span is not None for span in spans) is not is_inverted
            ):
                yield LineHit(0, 0, 0)
            return
        if group.absent:
            return
        hits, at = self.pattern.hits(group.data, group.start, group.end), group.start
        if not is_inverted:
            yield from hits
            return
        for hit in hits:
            yield from _each(group.data, at, hit.start)
            at = hit.end + 1
        yield from _each(group.data, at, group.end)

    def close(self) -> None:
        """Drop the kept lines, which refer to this object."""
        self._kept.clear()

    def lines(self, *, keep: bool) -> Generator[_Lines, None, None]:
        """Yield the lines in order: the kept ones, then others, which are kept if `keep` is
        True."""
        yield from self._kept
        start = self._next
        if self._kept and self._kept[-1].group.number == start:
            start = _after(self._kept[-1].group)
        for first, last in self._ranges:
            begin = max(first, start)
            is_first = begin in (first, self.start)
            was_hit, near = True, 0
            for stored in groups(self.text, begin, last) if begin <= last else ():
                if was_hit:
                    near = stored.number + MAX_CONTEXT
                group = self._searchable(stored, is_near=not keep or stored.number <= near)
                lines = _Lines(self, group, is_first)
                keep = keep and self._room > 0
                if keep:
                    self._next = group.number
                    self._kept.append(lines)
                yield lines
                if keep:
                    is_hit = next(lines.hits(), None) is not None
                    if is_first or is_hit or was_hit:
                        self._room -= group.end - group.start
                    else:
                        self._kept.pop()
                    was_hit = is_hit
                is_first = False
            if keep:
                self._next = max(self._next, last + 1)

    def _searchable(self, group: LineGroup | HugeLine, *, is_near: bool) -> LineGroup | HugeLine:
        """Lines fit to search, or as they are stored if there is no match in or near them."""
        if isinstance(group, HugeLine):
            return group
        can_skip = not is_near and not self.request.invert
        if can_skip and self.pattern.is_absent(group.data, group.start, group.end):
            return group._replace(absent=True)
        return _cleaned(self.text, group)


class _LineView:
    """A line in memory, measured in characters."""

    unit = "characters"

    def __init__(
        self,
        group: LineGroup,
        start: int,
        end: int,
        pattern: Pattern | None = None,
        inside: int = 0,
    ) -> None:
        self._raw = group.data[start:end]
        self._body = self._raw.decode()
        self._near = (0, 0)
        self._spans = tee(pattern.occurrences_from(self._raw, inside) if pattern else (), 1)[0]
        self._structure: Structure | None = None
        self.length = len(self._body)
        self.is_repaired = group.repaired

    def occurrences(self) -> Iterator[tuple[int, int] | None]:
        """Yield the occurrences from the byte offset where a page continues, and None from time to
        time."""
        self._structure = None
        return copy(self._spans)

    def measure(self, offset: int) -> int:
        """Convert a byte offset to the line's unit."""
        if self.length == len(self._raw):
            return offset
        near, size = self._near
        between = self._raw[near:offset] or self._raw[offset:near]
        characters = len(between.translate(None, _CONTINUATION))
        self._near = (offset, size + characters if offset >= near else size - characters)
        return self._near[1]

    def cut(self, low: int, high: int) -> str:
        return self._body[low:high]

    def record(
        self, span: tuple[int, int], limit: int, *, is_json: bool, width: int
    ) -> Extract | None:
        """The record around a match. The spans must come in order."""
        if self._structure is None:
            self._structure = Structure(self._raw, is_json=is_json)
        return self._structure.record_at(*span, limit=limit, width=width)


class _HugeLineView:
    """A line too long to keep in memory, searched in windows and measured in bytes."""

    unit = "bytes"
    is_repaired = False

    def __init__(
        self, text: DecodedText, huge: HugeLine, pattern: Pattern, inside: int = 0
    ) -> None:
        self._text, self._start = text, huge.start
        self._spans = tee(_occurrences_in(text, huge, pattern, inside), 1)[0]
        self.length = huge.end - huge.start

    def occurrences(self) -> Iterator[tuple[int, int] | None]:
        return copy(self._spans)

    def measure(self, offset: int) -> int:
        return offset

    def cut(self, low: int, high: int) -> str:
        data = self._text.read(self._start + low, high - low)
        return visible(uncoloured(decode(data)))[0].strip(REPLACEMENT)

    def record(
        self, span: tuple[int, int], limit: int, *, is_json: bool, width: int
    ) -> Extract | None:
        """The record around a match, if one begins shortly before it: the line is not scanned from
        its start."""
        low = max(0, span[0] - 2 * limit)
        data = self._text.read(self._start + low, min(self.length - low, span[1] - low + limit))
        begin = _NEXT_RECORD.search(data, 0, span[0] - low)
        if begin is None or span[1] - span[0] > limit:
            return None
        found = Structure(data, at=begin.end() - 1).record_at(
            span[0] - low, span[1] - low, limit=limit, width=width
        )
        return found and found._replace(start=found.start + low, end=found.end + low, label="")


def _occurrences_in(
    text: DecodedText, huge: HugeLine, pattern: Pattern, inside: int
) -> Iterator[tuple[int, int] | None]:
    """Yield the occurrences as offsets from the start of the line, and None after each window.
    `inside` is the start of an earlier match to continue from.

    A match longer than the overlap may be missed, or found in parts that count as one. Invalid
    UTF-8 matches nothing. Raises `LimitExceeded` if the pattern is too slow."""
    done, is_cut = huge.start + inside, False
    deadline = monotonic() + LINE_SECONDS
    for base in range(huge.start + inside // _STEP * _STEP, huge.end, _STEP):
        if monotonic() > deadline:
            raise LimitExceeded(
                f"line {huge.number} has {huge.end - huge.start:,} bytes, "
                "too many for this pattern",
                hint="use a simpler pattern",
            )
        low = max(huge.start, base - OVERLAP - _AROUND)
        high = min(huge.end, base + _STEP + _AROUND)
        data = text.read(low, high - low)
        start, stop = 0, len(data)
        if high == huge.end < text.end and data.endswith(b"\r"):
            data, stop = data[:-1], stop - 1
        elif high < huge.end:
            stop = boundary(data, stop - _AROUND)
        if low > huge.start:
            start = boundary(data, _AROUND)
        is_last = high == huge.end
        for first, last in pattern.occurrences(data, max(start, done - low), stop):
            if not is_last and first >= stop - OVERLAP:
                break  # it is complete in the next window
            is_rest = is_cut and last > first and low + first == done
            done, is_cut = low + last, last == stop and not is_last
            if not is_rest:
                yield low + first - huge.start, low + last - huge.start
                deadline = monotonic() + LINE_SECONDS
        yield None


class _PageBuilder:
    """A page being filled. `resume` is the first line that did not fit, None while there is room;
    `inside` is the offset of the first occurrence in it that did not. `due` counts the lines of
    context left to show after a match, and `more` the matches beyond the page. `is_finished` is
    True if the end was reached, and `stopped` is the line at which time ran out before the page was
    full."""

    def __init__(
        self, found: _Found, *, due: int, base: str, room: int, context: int, width: int
    ) -> None:
        self._search, self._text, self._request = found, found.text, found.request
        self._base, self._width_of_most, self._context = base, width, context
        self.records = 0
        self._last = ("", 0)  # the label of the last record, and its offset
        self._deadline = monotonic() + SEARCH_SECONDS
        self.out: list[str] = []
        self.hits: list[tuple[int, str]] = []
        self.found = self.more = self.inside = 0
        self.due = due
        self.resume: int | None = None
        self.is_finished = False
        self.stopped: int | None = None
        self._room = min(found.request.max_chars, room)
        self._floor = found.start  # the first line that may still be shown
        self._cut = self._fits = self._repaired = self._has_huge = False

    def fill(self, *, is_counted: bool) -> None:
        """Go through the lines once: show until the page is full, then count if `is_counted`."""
        full_at, inside = None, 0
        with closing(self._search.lines(keep=not is_counted)) as found:
            for lines in found:
                group = lines.group
                at: int | None = group.start
                if full_at is None:
                    if monotonic() > self._deadline:
                        self.stopped = group.number
                        return
                    if (
                        lines.is_first and group.number > self._floor
                    ):  # no context reaches from one range to another
                        self._floor, self.due = group.number, 0
                    at = (
                        self._add_huge(lines, group)
                        if isinstance(group, HugeLine)
                        else self._add(lines, group)
                    )
                    if at is None:
                        continue
                    if not is_counted:
                        return
                    full_at, inside = monotonic(), self.inside
                assert at is not None
                if not self._count(group, at, inside, full_at):
                    return
                inside = 0
        self.is_finished = True

    def notes(self) -> list[str]:
        """Notes on the page for its reader."""
        notes = []
        if self._cut:
            whole = ', lines="N" reads line N whole' if self._fits else ""
            notes.append(f"long lines are shown in part{whole}")
        if self._repaired:
            notes.append(f"invalid {self._text.unit}s are shown as U+FFFD")
        if self._has_huge:
            most = f"a match over {OVERLAP >> 10} KiB may be missed"
            notes.append(f"lines over {LONG_LINE >> 20} MiB were searched in parts, {most}")
        if not self.found and self._search.pattern.has_feed:
            notes.append(
                "a pattern sees one line at a time, so \\n never matches: "
                "use context=N for the lines around"
            )
        return notes + self._text.notes() if self._text.is_scanned else notes

    def _count(self, group: LineGroup | HugeLine, at: int, inside: int, full_at: float) -> bool:
        """Count the matches in these lines from the offset `at` on, in the first line from `inside`
        on. Return whether there is time for more."""
        inverted, deadline = self._request.invert, full_at + COUNT_SECONDS
        if isinstance(group, HugeLine):
            self._has_huge = True
            spans = _occurrences_in(self._text, group, self._search.pattern, inside)
            found, is_whole = _tally(spans, deadline, is_hit=inside > 0, stops=inverted)
            self.more += is_whole and not found if inverted else found
        else:
            passed = group.number - self._search.start + group.data.count(b"\n", group.start, at)
            if (
                0 < 9 * passed <= 10 * (self.found + self.more) <= 10 * passed
            ):  # a larger count includes occurrences
                deadline = full_at + DENSE_SECONDS
            long = None if inverted else self._search.long
            found, upto = self._search.pattern.count(
                group.data, at, group.end, deadline, long=long, inside=inside
            )
            self.more += _line_count(group.data, at, upto) - found if inverted else found
            is_whole = upto == group.end
        return is_whole and monotonic() <= deadline

    def _add(self, lines: _Lines, group: LineGroup) -> int | None:
        """Show the matches in these lines. None while there is room, else the offset from which to
        count."""
        at, number = group.start, group.number
        for hit in lines.hits():
            gap = group.data.count(b"\n", at, hit.start)
            if not (
                self._show_due(group, at, number, hit.start)
                and self._before(group, hit.start, number + gap)
            ):
                return hit.start
            number += gap
            if not self._request.invert and hit.end - hit.start > self._search.long:
                if not self._occurrences(
                    self._search.view(group, lines.views, hit.start, hit.end, number), number
                ):
                    return hit.start
            elif not self._line(group, number, ":", hit.start, hit.end, hit.match):
                return hit.start
            else:
                self.found += 1
            self.due = self._context
            at, number = min(hit.end + 1, group.end), number + 1
        return None if self._show_due(group, at, number, group.end) else group.end

    def _add_huge(self, lines: _Lines, huge: HugeLine) -> int | None:
        """Show the matches in a huge line. None while there is room."""
        self._has_huge = True
        is_shown, is_hit = True, next(lines.hits(), None) is not None
        if not is_hit:
            is_shown = not self.due or self._distant(huge.number)
            self.due -= bool(self.due and is_shown)
        elif self._request.invert:
            is_shown = self._before(huge, 0, huge.number) and self._distant(huge.number, ":")
            self.found += is_shown
        else:
            is_shown = self._search.inside_at(huge.number) > 0 or self._before(huge, 0, huge.number)
            view = self._search.view(huge, lines.views, 0, 0, huge.number)
            is_shown = is_shown and self._occurrences(view, huge.number)
        self.due = self._context if is_hit and is_shown else self.due
        return None if is_shown else 0

    def _show_due(self, group: LineGroup, at: int, number: int, end: int) -> bool:
        """Show the context due after the last match, from the lines before an offset."""
        while self.due and at < end:
            stop = _stop(group.data, at, end)
            if not self._line(group, number, "-", at, stop):
                return False
            self.due -= 1
            at, number = stop + 1, number + 1
        return True

    def _before(self, group: LineGroup | HugeLine, at: int, number: int) -> bool:
        """Show the context before a match, back to the last line shown."""
        first = max(self._floor, number - self._context)
        if not all(map(self._distant, range(first, min(number, group.number)))):
            return False
        begins = []
        if isinstance(group, LineGroup):
            for _ in range(max(first, group.number), number):
                at = group.data.rfind(b"\n", group.start, at - 1) + 1 or group.start
                begins.append((at, _stop(group.data, at, group.end)))
            for back in range(len(begins), 0, -1):
                if not self._line(group, number - back, "-", *begins[back - 1]):
                    return False
        return True

    def _distant(self, number: int, mark: str = "-") -> bool:
        """Show a line that is not in the current group."""
        begin, width = self._text.line_start(number), self._width(number)
        head = (
            visible(uncoloured(self._text.take(begin, width + 1)))[0]
            .partition("\n")[0]
            .rstrip("\r")
        )
        if len(head) <= width:
            return self._entry(number, mark, head)
        body = head[: width - _LEFT_OUT]
        left = self._text.line_end(begin) - begin - len(body.encode())
        return self._entry(number, mark, f"{body}[{left:,} bytes left out]", cut_from=left + width)

    def _line(
        self, group: LineGroup, number: int, mark: str, start: int, end: int, match: int = -1
    ) -> bool:
        line = _LineView(group, start, end)
        body, low, high = self._excerpt(line, number, max(0, match - start))
        cut_from = line.length if high - low < line.length else 0
        return self._entry(number, mark, body, cut_from=cut_from, is_repaired=line.is_repaired)

    def _occurrences(self, line: _LineView | _HugeLineView, number: int) -> bool:
        """Show the occurrences in a line. Those in the same record or near one another share an
        entry."""
        inside = self._search.inside_at(number)
        spans = (span for span in line.occurrences() if span is not None)
        span: tuple[int, int] | None = next(spans, (inside, inside))
        if (
            span is not None and span[0] == span[1]
        ):  # an empty match counts only if there is no other
            span = next(spans, span)
        while span is not None:
            first, record, edge = span[0], self._record(line, number, span), 0
            if record is None:
                body, low, high = self._excerpt(line, number, first)
                edge = high if high == line.length else high - (high - low) // 8
                is_cut = high - low < line.length
            else:
                body = f"{record.label} {record.text}" if record.label else record.text
                is_cut = record.is_cut
            count = 0
            while span is not None and (
                count == 0
                or (line.measure(span[1]) <= edge if record is None else span[0] < record.end)
            ):
                count += 1
                span = next(spans, None)
                if monotonic() > self._deadline:
                    break
            cut_from = line.length if is_cut else 0
            label, shown_at = self._last
            if (
                record is not None
                and self._wide
                and record.label == label != ""
                and record.start <= shown_at + _AGAIN
            ):
                pass  # a brief page shows a record once; a very large one is shown again further on
            elif not self._entry(
                number, ":", body, cut_from=cut_from, is_repaired=line.is_repaired
            ):
                self.inside = first
                return False
            elif record is not None:
                self.records += record.label != self._last[0] if record.label else not record.is_cut
                self._last = (record.label, record.start)
            self.found += count
            if span is not None and monotonic() > self._deadline:
                self.resume, self.inside = number, span[0]
                return False
        return True

    @property
    def _wide(self) -> int:
        """The width of the next match; 0 for a whole record, which the first match always gets."""
        return self._width_of_most if self.found else 0

    def _record(
        self, line: _LineView | _HugeLineView, number: int, span: tuple[int, int]
    ) -> Extract | None:
        """The record around an occurrence, unless the whole line fits."""
        limit = min(RECORD, self._room_for(number))
        is_only = self._text.lines == 1  # otherwise the line is a record itself
        if line.length <= (self._wide or (SMALL if is_only else limit)) or span[0] == span[1]:
            return None
        found = line.record(
            span, limit, is_json=is_only and self._text.is_document, width=self._wide
        )
        if found is None or len(found.text) + len(found.label) + len(self._base) >= self._room_for(
            number
        ):
            return None
        label = (
            f"#{self._base}{found.label[1:]}"
            if self._base and found.label.startswith("#")
            else found.label
        )
        return found._replace(label=label)

    def _excerpt(
        self, line: _LineView | _HugeLineView, number: int, offset: int
    ) -> tuple[str, int, int]:
        """As much of a line as may be shown around a byte offset, and where that begins and
        ends."""
        width = self._width(number)
        if not self._wide and line.length <= min(RECORD, self._room_for(number)):
            width = line.length
        room = line.length if line.length <= width else width - 2 * _LEFT_OUT
        low = max(0, min(line.measure(offset) - room // 4, line.length - room))
        high = min(low + room, line.length)
        left, right = (
            f"[{size:,} {line.unit} left out]" if size else "" for size in (low, line.length - high)
        )
        return left + line.cut(low, high) + right, low, high

    def _label(self, number: int) -> str:
        return f"p{self._text.page_at(number)}:{number}" if self._text.is_paged else str(number)

    def _room_for(self, number: int) -> int:
        return self._request.max_chars - len(self._label(number)) - 1

    def _width(self, number: int) -> int:
        return min(
            self._wide + _MARKS if self._wide else LINE_CHARS, LINE_CHARS, self._room_for(number)
        )

    def _entry(
        self, number: int, mark: str, body: str, *, cut_from: int = 0, is_repaired: bool = False
    ) -> bool:
        entry = f"{self._label(number)}{mark}{body}"
        if self.out and self._context and number > self._floor:
            entry = "--\n" + entry
        room = self._room - len(entry) - bool(self.out)
        if room < 0:
            self.resume = number
            return False
        self._room = room
        self.out.append(entry)
        if mark == ":":
            self.hits.append((number, body))
        self._floor = number + 1
        self._cut |= cut_from > 0
        self._fits |= 0 < cut_from <= self._request.max_chars and self._text.lines > 1
        self._repaired |= is_repaired and REPLACEMENT in body
        return True


def _tally(
    spans: Iterator[tuple[int, int] | None], deadline: float, *, is_hit: bool, stops: bool = False
) -> tuple[int, bool]:
    """Number of occurrences in a line, at least one if it matches, and whether all were counted.
    With `stops`, one is enough."""
    total = 0
    for span in spans:
        if span is not None:
            total, is_hit = total + (span[1] > span[0]), True
            if stops:
                break
        if (span is None or not total & 63) and monotonic() > deadline:
            return total, False
    return max(total, is_hit), True


def _each(data: bytes, at: int, end: int) -> Iterator[LineHit]:
    while at < end:
        stop = _stop(data, at, end)
        yield LineHit(at, stop, at)
        at = stop + 1


def _stop(data: bytes, at: int, end: int) -> int:
    """End of the line that begins at an offset."""
    found = data.find(b"\n", at, end)
    return end if found < 0 else found


def _after(group: LineGroup | HugeLine) -> int:
    """Number of the line after these."""
    size = 1 if isinstance(group, HugeLine) else _line_count(group.data, group.start, group.end)
    return group.number + size


def _line_count(data: bytes, at: int, end: int) -> int:
    """Number of lines between two offsets; the last may have no line feed."""
    return data.count(b"\n", at, end) + (at < end and data[end - 1] != 0x0A)


class LineHit(NamedTuple):
    """A line that matches: its start, its end and the start of the match, as offsets into the
    searched lines."""

    start: int
    end: int
    match: int


class Pattern:
    """Finds matching lines in whole lines of valid UTF-8. With `escapes`, JSON escapes are decoded
    too."""

    def __init__(
        self,
        pattern: str,
        *,
        ignore_case: bool = False,
        literal: bool = False,
        escapes: bool = False,
    ) -> None:
        program_size(
            pattern, ignore_case=ignore_case, literal=literal
        )  # alone first: it must not close our brackets
        source = _escaped(pattern) if literal else pattern
        self.has_feed = "\n" in pattern or (not literal and "\\n" in pattern)
        self._break = (
            b"\f" if self.has_feed else b" "
        )  # replaces a line break in a string; \s matches both
        if escapes and self.has_feed:
            source = _FEED.sub(lambda match: match[1] or r"\f", source)
        self._by_line = not literal and _LINE_BY_LINE.search(source) is not None
        self._one: Any = _compile(source if self._by_line else f"(?m:{source})", ignore_case)
        self._run: Any = None if self._by_line else _run(source, ignore_case)
        self._escapes = escapes
        self._is_plain = (
            pattern.isascii() and pattern.isprintable()
            if literal
            else bool(_PLAIN.fullmatch(pattern))
        )
        self._matches_nothing = (
            self._one.search(b"") is not None
        )  # then it matches every line, without occurrences

    def search(self, data: bytes, start: int, end: int) -> tuple[int, int] | None:
        """The first match between two offsets. The bytes around them count for `^`, `$` and word
        boundaries."""
        found = self._one.search(data, start, end)
        return None if found is None else found.span()

    def is_absent(self, lines: bytes, start: int, end: int) -> bool:
        """Whether no line between two offsets can match, whatever is done to invalid UTF-8 in it.
        Only known for plain text in lines without colours, carriage returns and escapes: nothing is
        removed from them."""
        return (
            self._is_plain
            and lines.find(b"\x1b", start, end) < 0
            and lines.find(b"\r", start, end) < 0
            and not self._has_escapes(lines, start, end)
            and self._one.search(lines, start, end) is None
        )

    def hits(self, lines: bytes, start: int, end: int) -> Iterator[LineHit]:
        """Yield the matching lines between two offsets, which are line starts or the end."""
        if not self._has_escapes(lines, start, end):
            yield from self._hits(lines, start, end)
            return
        last = -1
        while start < end:
            stop = end
            if end - start > _RUN:
                stop = (
                    lines.rfind(b"\n", start, start + _RUN) + 1
                    or lines.find(b"\n", start + _RUN, end) + 1
                ) or end
            decoded = (
                self._decoded_hits(level, lines, start, stop)
                for level in self._levels(lines[start:stop])
            )
            for hit in heapq.merge(self._hits(lines, start, stop), *decoded):
                if hit.start != last:
                    yield hit
                last = hit.start
            start = stop

    def occurrences(self, data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the matches between two offsets of one line, without overlaps. Empty matches are
        left out unless one is first, so that the line counts. The bytes around the offsets count
        for `^`, `$` and `\\b`."""
        if self._matches_nothing:
            yield start, start
            return
        if not self._has_escapes(data, start, end):
            yield from self._spans(data, start, end)
            return
        upto = start
        is_first = True
        for first, last in heapq.merge(
            self._spans(data, start, end), *self._decoded_spans(data, start, end)
        ):
            if first >= upto and (last > first or is_first):
                yield first, last
                upto, is_first = last, False

    def occurrences_from(self, line: bytes, inside: int) -> Iterator[tuple[int, int] | None]:
        """Yield the occurrences in a line from an offset on: the offset of an occurrence, or 0."""
        spans = self.occurrences(line, 0 if self._escapes else inside, len(line))
        return ((first, last) for first, last in spans if first >= inside)

    def count(
        self,
        lines: bytes,
        start: int,
        end: int,
        deadline: float,
        *,
        long: int | None = None,
        inside: int = 0,
    ) -> tuple[int, int]:
        """Number of matching lines between two offsets, and the offset reached before the deadline.

        A line of more than `long` bytes counts once for each occurrence, the first line only from
        its offset `inside` on. Consecutive matching lines are counted in one step."""
        total, expected = 0, -1
        hits = self.hits(lines, start, end) if self._has_escapes(lines, start, end) else None
        while start < end:
            hit = next(self._hits(lines, start, end) if hits is None else hits, None)
            if hit is None:
                return total, end
            if long is not None and hit.end - hit.start > long:
                spans = self.occurrences_from(lines[hit.start : hit.end], inside)
                found, is_whole = _tally(spans, deadline, is_hit=True)
                total += found
                if not is_whole:
                    return total, hit.start
            else:
                total += 1
            inside = 0
            start = hit.end + 1
            if hit.start == expected and hits is None and self._run is not None:
                upto = lines.rfind(b"\n", start, min(start + _RUN, end)) + 1
                run = self._run.match(lines, start, upto) if upto else None
                if run is not None:
                    upto = (
                        run.end() if long is None else _before_long(lines, start, run.end(), long)
                    )
                    total += lines.count(b"\n", start, upto)
                    start = upto
            expected = start
            if monotonic() > deadline:
                break
        return total, min(start, end)

    def _has_escapes(self, data: bytes, start: int, end: int) -> bool:
        return self._escapes and data.find(b"\\", start, end) >= 0

    def _hits(self, lines: bytes, start: int, end: int) -> Iterator[LineHit]:
        search = self._one.search
        if self._by_line:
            for begin, stop, _ in _each(lines, start, end):
                if (found := search(lines[begin:stop])) is not None:
                    yield LineHit(begin, stop, begin + found.start())
            return
        while start < end and (found := search(lines, start, end)) is not None:
            match = found.start()
            begin = lines.rfind(b"\n", start, match) + 1 or start
            if begin >= end:
                return  # an empty match after the last line feed
            stop = _stop(lines, match, end)
            yield LineHit(begin, stop, match)
            start = stop + 1

    def _levels(self, lines: bytes) -> Iterator[bytes]:
        """Yield the lines with their escapes decoded, then with those of nested strings. The number
        of lines stays."""
        for _ in range(LEVELS):
            written, lines = lines, decoded_lines(lines, self._break)
            if lines == written:
                return
            yield lines
            if lines.find(b"\\") < 0:
                return

    def _decoded_hits(
        self, decoded: bytes, lines: bytes, start: int, end: int
    ) -> Iterator[LineHit]:
        """Yield the lines that match with their escapes decoded."""
        at = 0
        for hit in self._hits(decoded, 0, len(decoded)):
            for _ in range(decoded.count(b"\n", at, hit.start)):
                start = lines.index(b"\n", start) + 1
            at = hit.start
            yield LineHit(start, _stop(lines, start, end), start)

    def _decoded_spans(
        self, data: bytes, start: int, end: int
    ) -> Iterator[Iterator[tuple[int, int]]]:
        """The matches in each level of the decoded line, at their written offsets."""
        views: list[Decoded] = []
        while len(views) < LEVELS and (not views or views[-1].data.find(b"\\") >= 0):
            written = views[-1].data if views else data
            view = Decoded(written, self._break)
            if view.data == written:
                return
            views.append(view)
            yield self._mapped(views[:], start, end)

    def _mapped(self, views: list[Decoded], start: int, end: int) -> Iterator[tuple[int, int]]:
        data = views[-1].data
        for first, last in self._spans(data, 0, len(data)):
            for view in reversed(views):
                first, last = view.written(first), view.written(last)
            if start <= first < end:
                yield first, min(last, end)

    def _spans(self, data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        search, is_first = self._one.search, True
        while start < end and (found := search(data, start, end)) is not None:
            first, last = found.span()
            if last > first or is_first:
                yield first, last
            is_first = False
            if last > first:
                start = last
            else:
                start = last + 1
                while start < end and data[start] & 0xC0 == 0x80:
                    start += 1


def program_size(pattern: str, *, ignore_case: bool = False, literal: bool = False) -> int:
    """Check a pattern, and return the number of instructions that it compiles to: the maximum cost
    of one byte."""
    if len(pattern) > MAX_PATTERN:
        raise InvalidArgument(
            f"the pattern has {len(pattern):,} characters, the limit is {MAX_PATTERN:,}",
            hint="use a shorter one",
        )
    try:
        size = int(_compile(_escaped(pattern) if literal else pattern, ignore_case).programsize)
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            "the pattern is not valid Unicode", hint="remove lone surrogates"
        ) from error
    if size > MAX_PROGRAM:
        raise InvalidArgument(
            f"the pattern compiles to {size:,} instructions, the limit is {MAX_PROGRAM:,}",
            hint="simplify it: + or * for large repetitions, [a-z] for classes like \\pL",
        )
    return size


def _escaped(text: str) -> str:
    return r"\n".join(map(re2.escape, text.split("\n")))


def _before_long(lines: bytes, start: int, end: int, long: int) -> int:
    """Offset of the first line of more than `long` bytes between two line starts, or the end."""
    while start < end:
        feed = lines.rfind(b"\n", start, start + long + 1)
        if feed < 0:
            return start
        start = feed + 1
    return end


def _run(source: str, ignore_case: bool) -> Any:
    """Compile a pattern for consecutive matching lines. `$\\C` is a line feed, the only one
    allowed."""
    try:
        return _compile(rf"(?m:(?:^.*(?:{source}).*$\C)+)", ignore_case)
    except InvalidArgument:
        return None  # the pattern alone is nearly at the limit


def _compile(source: str, ignore_case: bool) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True
    options.never_capture = True  # groups are not needed, and would prevent fast matching
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(source, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        known = (
            (what, instead)
            for signs, what, instead in _REJECTIONS
            if any(sign in text for sign in signs)
        )
        what, hint = next(known, ("RE2 rejects the pattern", _ESCAPE_HINT))
        raise InvalidArgument(f"{what}: {clip(text)}", hint=hint) from None


class LineGroup(NamedTuple):
    """Whole lines `data[start:end]`, the first with this number. Unless they are `absent` (no match
    in or near them), they end with a line feed alone and are valid UTF-8; `repaired` is True if
    they were not before."""

    number: int
    data: bytes
    start: int
    end: int
    repaired: bool = False
    absent: bool = False


class HugeLine(NamedTuple):
    """A line too long to keep in memory: its number, and its offsets in the text without the line
    feed."""

    number: int
    start: int
    end: int


def groups(text: DecodedText, first: int, last: int) -> Generator[LineGroup | HugeLine, None, None]:
    """Yield all lines from one number to another, both included, as they are stored; without
    copying if possible."""
    at = text.start if first == 1 else text.line_start(first)
    end = text.end if last == text.lines else text.line_start(last + 1)
    number = first
    while at < end:
        began, waiting = (
            at,
            list[bytes](),
        )  # the start of a line that is not complete, and its pieces
        for piece, feeds in _ahead(text, at, end):
            at += len(piece)
            head, tail = piece.find(b"\n") + 1, piece.rfind(b"\n") + 1
            if not head:
                waiting.append(piece)
                if at - began < LONG_LINE:
                    continue
                huge = HugeLine(number, began, min(text.line_end(began), end))
                yield huge
                at, number = huge.end + 1, number + 1
                break
            begin = 0
            if waiting:
                line = b"".join([*waiting, piece[:head]])
                yield LineGroup(number, line, 0, len(line))
                begin, number, feeds = head, number + 1, feeds - 1
            if begin < tail:
                yield LineGroup(number, piece, begin, tail)
            number += feeds
            began, waiting = at - len(piece) + tail, [piece[tail:]] if tail < len(piece) else []
        else:
            if waiting:
                line = b"".join(waiting)
                yield LineGroup(number, line, 0, len(line))


def _ahead(text: DecodedText, at: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the pieces of a text. If reading is slow (a slow disk, compressed content), each piece
    is read in a thread while the previous one is in use; otherwise passing pieces between threads
    would cost more than it saves."""
    spent, allowed = 0.0, _PATIENCE
    while at < end and (
        text.is_scanned or spent <= allowed
    ):  # the blocks of a scanned text are for one thread
        began = monotonic()
        piece, feeds = text.piece(at, end)
        spent, allowed = spent + monotonic() - began, allowed + _QUICK * len(piece)
        at += len(piece)
        yield piece, feeds
    if at < end:
        with ThreadPoolExecutor(1, "coatcheck-read-ahead") as reader:
            reading = reader.submit(text.piece, at, end)
            while at < end:
                piece, feeds = reading.result()
                at += len(piece)
                if at < end:
                    reading = reader.submit(text.piece, at, end)
                yield piece, feeds


def _cleaned(text: DecodedText, group: LineGroup) -> LineGroup:
    """Make lines fit to search: as a terminal shows them, without carriage returns at their ends,
    and with U+FFFD for invalid bytes."""
    _, data, start, end, repaired, _ = group
    if not data.isascii():
        lines = data[start:end]
        try:
            lines.decode()
        except UnicodeDecodeError:
            data, repaired = visible(decode(lines))[0].encode(), True
            start, end = 0, len(data)
    has_returns = data.find(b"\r", start, end) >= 0  # counting takes 20 times longer
    is_drawn = data.find(b"\x1b", start, end) >= 0 or (
        has_returns and data.count(b"\r", start, end) != data.count(b"\r\n", start, end)
    )
    if is_drawn and not text.exact:
        data = folded(data[start:end].decode())[0].encode()
        start, end = 0, len(data)
    if has_returns:
        data = data[start:end].replace(b"\r\n", b"\n")
        start, end = 0, len(data)
    return LineGroup(group.number, data, start, end, repaired)
