"""grep over an artifact of any size: whole pieces go through RE2 at once, and only hits are looked at line by line.

A page looks like `grep -n`: `12:` before a line that matches, `11-` before one of its context, `--` between groups.
Very long lines show the part around the match and say what was left out. All lines that match are counted, within
limits of time: a page that is full counts on for a second, or for some milliseconds where nearly all lines match; then
it says "at least". A position is the next line to look at, the matches before it, the context still owed to the last of
them, and what is known of the count (twice the number, plus one where it is exact).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import monotonic
from typing import Final

from coatcheck.reading.decoding import REPLACEMENT, Text, decode, visible
from coatcheck.reading.page import Part, Request, lines_of
from coatcheck.reading.patterns import Hit, Pattern
from coatcheck.reading.scanning import LONG_LINE, OVERLAP, Found, Giant, Lines, find, groups

COUNT_SECONDS: Final = 1.0
DENSE_SECONDS: Final = 0.008  # where nearly all lines match, their number says little
SEARCH_SECONDS: Final = 10.0
LINE_CHARS: Final = 500
_LEFT_OUT: Final = len("[999,999,999,999 characters left out]")


def search(text: Text, request: Request, position: tuple[int, ...] | None = None) -> Part:
    """One page of the lines that match, from the position on."""
    assert request.grep is not None
    pattern = Pattern(request.grep, ignore_case=request.ignore_case, literal=request.literal)
    if not text.lines:
        return Part("", "no match: the artifact is empty", matches=0)
    first, last = (1, text.lines) if request.lines is None else lines_of(request.lines, text.lines)
    start, before, owed, known = position or (first, 0, 0, 0)
    sheet = _Sheet(text, request, pattern, start, owed)
    more, finished, stopped = _go_through(sheet, start, last, count=not known)

    seen = before + sheet.found
    matches, exact = max(seen + more, known >> 1), finished or bool(known & 1)
    following: tuple[int, ...] | None = None
    if sheet.resume is not None:
        following = (sheet.resume, seen, sheet.owed, matches << 1 | exact)
    elif stopped is not None:
        following = (stopped, seen, sheet.owed, known)

    where = f"{text.lines:,} lines" if request.lines is None else f"lines {first}-{last} of {text.lines:,}"
    count = f"{matches:,}" if exact else f"at least {matches:,}"
    if sheet.found:
        numbers = f"match {seen}" if sheet.found == 1 else f"matches {before + 1}-{seen}"
        shown = f"{numbers} of {count} in {where}"
    elif sheet.out:
        shown = f"context of match {seen} of {count} in {where}"
    else:
        shown = f"no {'further ' if before else ''}match in {where}"
    notes = sheet.notes()
    if stopped is not None:
        notes.insert(0, f"searched up to line {stopped - 1} so far, the cursor goes on from there")
    return Part("\n".join(sheet.out), "; ".join([shown, *notes]), following, matches, exact)


def _go_through(sheet: _Sheet, start: int, last: int, *, count: bool) -> tuple[int, bool, int | None]:
    """Go through the lines once: show until the page is full, then count.

    Answers how many matches were counted beyond the page, whether the end was reached, and the line at which time ran
    out before the page was full."""
    limit, full_at, more = monotonic() + SEARCH_SECONDS, None, 0
    with closing(groups(sheet.text, start, last)) as lines:
        for group in lines:
            at: int | None = 0 if isinstance(group, Giant) else group.start
            if full_at is None:
                if monotonic() > limit:
                    return 0, False, group.number
                at = sheet.add(group)
                if at is None:
                    continue
                if not count:
                    return 0, False, None
                full_at = monotonic()
            if isinstance(group, Giant):
                more += sheet.is_hit(group)
                if monotonic() > full_at + COUNT_SECONDS:
                    return more, False, None
                continue
            assert at is not None
            passed = group.number - start + group.data.count(b"\n", group.start, at)
            dense = 10 * (sheet.found + more) >= 9 * passed
            deadline = full_at + (DENSE_SECONDS if dense else COUNT_SECONDS)
            found, upto = sheet.pattern.count(group.data, at, group.end, deadline)
            more += _count(group.data, at, upto) - found if sheet.request.invert else found
            if upto < group.end or monotonic() > deadline:
                return more, False, None
    return more, True, None


class _Sheet:
    """The page as it fills. `resume` is the line that did not fit any more, None while there is room."""

    def __init__(self, text: Text, request: Request, pattern: Pattern, start: int, owed: int) -> None:
        self.text, self.request, self.pattern = text, request, pattern
        self.out: list[str] = []
        self.found = 0
        self.owed = owed
        self.resume: int | None = None
        self._room = request.max_chars
        self._floor = start  # the first line that may still be shown
        self._cut = self._repaired = False
        self._giants: dict[int, Found | None] = {}

    def add(self, group: Lines | Giant) -> int | None:
        """Show what there is to show of these lines. None while there is room, else the offset to count on from."""
        if isinstance(group, Giant):
            return None if self._add_giant(group) else 0
        at, number = group.start, group.number
        for hit in self._hits(group):
            gap = group.data.count(b"\n", at, hit.start)
            if not (self._pay(group, at, number, hit.start) and self._before(group, hit.start, number + gap)):
                return hit.start
            number += gap
            if not self._line(group, number, ":", hit.start, hit.end, hit.match):
                return hit.start
            self.found += 1
            self.owed = self.request.context
            at, number = min(hit.end + 1, group.end), number + 1
        return None if self._pay(group, at, number, group.end) else group.end

    def is_hit(self, giant: Giant) -> bool:
        """Whether a giant line counts as a match. It is searched once."""
        if giant.number not in self._giants:
            self._giants[giant.number] = find(self.text, self.pattern, giant)
        return (self._giants[giant.number] is None) is self.request.invert

    def notes(self) -> list[str]:
        """What a reader should know besides."""
        notes = []
        if self._cut:
            notes.append('long lines are shown in part, lines="N" reads line N whole')
        if self._repaired:
            notes.append(f"invalid {self.text.unit}s are shown as U+FFFD")
        if self._giants:
            most = f"a match over {OVERLAP >> 10} KiB may be missed"
            notes.append(f"lines over {LONG_LINE >> 20} MiB were searched in parts, {most}")
        if not self.found and self.pattern.has_feed:
            notes.append("a pattern sees one line at a time, so \\n never matches: use context=N for the lines around")
        return notes + self.text.notes(self.text.end)

    def _hits(self, group: Lines) -> Iterator[Hit]:
        if not self.request.invert:
            yield from self.pattern.hits(group.data, group.start, group.end)
            return
        at = group.start
        for hit in self.pattern.hits(group.data, group.start, group.end):
            yield from _each(group.data, at, hit.start)
            at = hit.end + 1
        yield from _each(group.data, at, group.end)

    def _pay(self, group: Lines, at: int, number: int, end: int) -> bool:
        """Show the context that is owed to the last match, as far as the lines before an offset have it."""
        while self.owed and at < end:
            stop = _stop(group.data, at, end)
            if not self._line(group, number, "-", at, stop):
                return False
            self.owed -= 1
            at, number = stop + 1, number + 1
        return True

    def _before(self, group: Lines, at: int, number: int) -> bool:
        """Show the context before a match, back to the last line that was shown."""
        first = max(self._floor, number - self.request.context)
        for earlier in range(first, min(number, group.number)):
            if not self._elsewhere(earlier):
                return False
        begins = []
        for _ in range(max(first, group.number), number):
            at = group.data.rfind(b"\n", group.start, at - 1) + 1 or group.start
            begins.append(at)
        for back, begin in enumerate(reversed(begins)):
            line = number - len(begins) + back
            if not self._line(group, line, "-", begin, _stop(group.data, begin, group.end)):
                return False
        return True

    def _elsewhere(self, number: int, mark: str = "-") -> bool:
        """Show a line that is not in the group at hand."""
        begin = self.text.line_start(number)
        end = self.text.line_end(begin)
        head = visible(self.text.take(begin, min(LINE_CHARS, self._width(number)) + 1))[0].partition("\n")[0]
        if len(head.rstrip("\r")) <= self._width(number):
            return self._entry(number, mark, head.rstrip("\r"))
        body = head[: self._width(number) - _LEFT_OUT]
        self._cut = True
        left = end - begin - len(body.encode())
        return self._entry(number, mark, f"{body}[{left:,} bytes left out]")

    def _add_giant(self, giant: Giant) -> bool:
        if self.is_hit(giant):
            first = max(self._floor, giant.number - self.request.context)
            if not all(self._elsewhere(number) for number in range(first, giant.number)):
                return False
            found = self._giants[giant.number]
            if not (self._elsewhere(giant.number, ":") if found is None else self._giant_hit(giant, found)):
                return False
            self.found += 1
            self.owed = self.request.context
        elif self.owed:
            if not self._elsewhere(giant.number):
                return False
            self.owed -= 1
        return True

    def _giant_hit(self, giant: Giant, found: Found) -> bool:
        room = self._width(giant.number) - 2 * _LEFT_OUT
        low = max(0, found.start - room // 4)
        body = visible(decode(found.data[low : low + 4 * room]))[0].strip(REPLACEMENT)[:room]
        before = found.offset + low - giant.start
        after = giant.end - giant.start - before - len(body.encode())
        self._cut = True
        left, right = (f"[{size:,} bytes left out]" if size > 0 else "" for size in (before, after))
        return self._entry(giant.number, ":", left + body + right)

    def _line(self, group: Lines, number: int, mark: str, start: int, end: int, match: int | None = None) -> bool:
        raw = group.data[start:end]
        body, width = raw.decode(), self._width(number)
        if len(body) > width:
            room = width - 2 * _LEFT_OUT
            before = 0 if match is None else match - start
            if len(body) < len(raw):
                before = len(raw[:before].decode())
            low = max(0, min(before - room // 4, len(body) - room))
            high = low + room
            left, right = (f"[{size:,} characters left out]" if size else "" for size in (low, len(body) - high))
            body = left + body[low:high] + right
            self._cut = True
        if not self._entry(number, mark, body):
            return False
        self._repaired |= group.repaired and REPLACEMENT in body
        return True

    def _width(self, number: int) -> int:
        return min(LINE_CHARS, self.request.max_chars - len(str(number)) - 1)

    def _entry(self, number: int, mark: str, body: str) -> bool:
        entry = f"{number}{mark}{body}"
        if self.out and self.request.context and number > self._floor:
            entry = "--\n" + entry
        room = self._room - len(entry) - bool(self.out)
        if room < 0:
            self.resume = number
            return False
        self._room = room
        self.out.append(entry)
        self._floor = number + 1
        return True


def _each(data: bytes, at: int, end: int) -> Iterator[Hit]:
    while at < end:
        stop = _stop(data, at, end)
        yield Hit(at, stop, at)
        at = stop + 1


def _stop(data: bytes, at: int, end: int) -> int:
    """Where the line ends that begins at an offset."""
    found = data.find(b"\n", at, end)
    return end if found < 0 else found


def _count(data: bytes, at: int, end: int) -> int:
    """How many lines there are between two offsets; the last may have no line feed."""
    return data.count(b"\n", at, end) + (at < end and data[end - 1] != 0x0A)
