"""Lay out collected rows on a page: whole, or in brief if there are too many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from coatcheck.reading.enclosing import Enclosure
from coatcheck.reading.long_lines import RECORD, SMALL, Extract, Structure
from coatcheck.reading.matches import Place, Row, StoredLine
from coatcheck.reading.patterns import Span
from coatcheck.reading.text import REPLACEMENT, DecodedText

LINE_CHARS: Final = 500  # of a line that is shown in part
_MARKS: Final = 140
_AGAIN: Final = 2 * RECORD
_LEFT_OUT: Final = len("[999,999,999,999 characters left out]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How to show the rows: in at most `room` characters, with this many lines around a match, and
    each match after the first in about `width` characters, 0 for whole records and lines."""

    room: int
    context: int
    width: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What all forms of a page have in common. `base` is the fragment of a text that is part of an
    artifact; `max_chars` is the limit of an entry; `enclosures` are what encloses the matches."""

    text: DecodedText
    max_chars: int
    base: str = ""
    enclosures: Mapping[int, Enclosure] = field(default_factory=dict)

    def label(self, number: int) -> str:
        return f"p{self.text.page_at(number)}:{number}" if self.text.is_paged else str(number)

    def room_for(self, number: int) -> int:
        return self.max_chars - len(self.label(number)) - 1


@dataclass(slots=True)
class GrepPage:
    """The rows that fit on a page. `resume` is the place of the first one that does not, None if
    all do. `matches` and `records` are those shown, and `due` the lines of context left to show."""

    entries: list[str] = field(default_factory=list)
    hits: list[tuple[int, str]] = field(default_factory=list)
    matches: int = 0
    records: int = 0
    due: int = 0
    resume: Place | None = None
    is_cut: bool = False
    is_cut_line_readable: bool = False
    is_repaired: bool = False


def render(rows: list[Row], layout: Layout, form: Form, *, due: int = 0) -> GrepPage:
    """Show rows in order until the page is full. `due` of them are context of an earlier match."""
    painter = _Painter(layout, form)
    page = painter.page
    page.due = min(due, form.context)
    for row, next_match in zip(rows, _next_matches(rows), strict=True):
        if not painter.wants(row, next_match):
            continue
        is_shown = painter.show_match(row) if row.is_match else painter.show_line(row, "-")
        if not is_shown:
            if page.resume is None:
                page.resume = Place(row.number, due=page.due)
            break
        page.due = form.context if row.is_match else max(0, page.due - 1)
    return page


def _next_matches(rows: list[Row]) -> list[int | None]:
    """For each row, the number of the next one that matches."""
    following: list[int | None] = []
    number = None
    for row in reversed(rows):
        following.append(number)
        if row.is_match:
            number = row.number
    return following[::-1]


class _Entry(NamedTuple):
    """A text to show for one or more occurrences in a line. `end` is the offset up to which the
    occurrences share it, in characters if there is no record. `is_cut` is True if the text is not
    the whole line or record."""

    text: str
    end: int
    is_cut: bool
    record: Extract | None = None


class _Painter:
    def __init__(self, layout: Layout, form: Form) -> None:
        self._layout = layout
        self._form = form
        self._room = form.room
        self._last_number = 0
        self._last_record = ("", 0)  # its label and offset
        self._previous = 0  # the number of the row before, shown or not
        self._group_start = 0
        self._entered = 0  # the number of the enclosing line that was shown last
        self._enclosure: Enclosure | None = None  # of the row to show
        self.page = GrepPage()

    @property
    def _width(self) -> int:
        """The width of the next match; 0 for a whole record, which the first match always gets."""
        return self._form.width if self.page.matches else 0

    def wants(self, row: Row, next_match: int | None) -> bool:
        """Whether the page should have a row: a match, or context that is due after one or comes
        before the next one."""
        is_gap = 0 < self._previous < row.number - 1
        self._previous = row.number
        if is_gap:
            self.page.due = 0
        is_before = next_match is not None and next_match - row.number <= self._form.context
        encloses = row.number if row.is_match else (next_match or 0) * is_before
        self._enclosure = self._layout.enclosures.get(encloses)
        return row.is_match or self.page.due > 0 or is_before

    def show_line(self, row: Row, mark: str) -> bool:
        """Show a line, or the part of it around its match."""
        excerpt = self._excerpt(row, row.match)
        return self._add(row, mark, excerpt)

    def show_match(self, row: Row) -> bool:
        if row.spans:
            return self._show_occurrences(row)
        if not self.show_line(row, ":"):
            return False
        self.page.matches += 1
        return True

    def _show_occurrences(self, row: Row) -> bool:
        """Show the occurrences in a line. Those in the same record or near one another share an
        entry."""
        is_document = self._layout.text.lines == 1 and self._layout.text.is_document
        records = row.line.records(is_json=is_document)
        at = 0
        while at < len(row.spans):
            entry = self._record(row, row.spans[at], records) or self._excerpt(
                row, row.spans[at][0]
            )
            if not self._is_shown_again(entry):
                if not self._add(row, ":", entry):
                    self.page.resume = Place(row.number, row.spans[at][0], self.page.due)
                    return False
                self._note_record(entry)
            shared = _shared(row, at, entry)
            self.page.matches += shared
            at += shared
        return True

    def _is_shown_again(self, entry: _Entry) -> bool:
        """Whether a brief page has the record already; a very large one is shown again further
        on."""
        label, start = self._last_record
        record = entry.record
        if record is None or not self._width or not label:
            return False
        return record.label == label and record.start <= start + _AGAIN

    def _note_record(self, entry: _Entry) -> None:
        record = entry.record
        if record is None:
            return
        if record.label:
            self.page.records += record.label != self._last_record[0]
        else:
            self.page.records += not record.is_cut
        self._last_record = (record.label, record.start)

    def _record(self, row: Row, span: Span, records: Structure | StoredLine) -> _Entry | None:
        """The record around an occurrence, unless the whole line fits."""
        layout, room = self._layout, self._layout.room_for(row.number)
        limit = min(RECORD, room)
        whole = SMALL if layout.text.lines == 1 else limit  # otherwise the line is a record itself
        if row.line.length <= (self._width or whole) or span[0] == span[1]:
            return None
        found = records.record_at(*span, limit=limit, width=self._width)
        if found is None or len(found.text) + len(found.label) + len(layout.base) >= room:
            return None
        label = found.label
        if layout.base and label.startswith("#"):
            label = f"#{layout.base}{label[1:]}"
        text = f"{label} {found.text}" if label else found.text
        return _Entry(text, found.end, found.is_cut, found._replace(label=label))

    def _excerpt(self, row: Row, offset: int) -> _Entry:
        """As much of a line as may be shown around a byte offset."""
        line, room = row.line, self._layout.room_for(row.number)
        limit = min(LINE_CHARS, room)
        if self._width:
            limit = min(limit, self._width + _MARKS)
        elif line.length <= min(RECORD, room):
            limit = line.length
        if line.length <= limit:
            return _Entry(line.cut(0, line.length), line.length, is_cut=False)
        size = limit - 2 * _LEFT_OUT
        low = max(0, min(line.measure(offset) - size // 4, line.length - size))
        high = low + size
        left = f"[{low:,} {line.unit} left out]" if low else ""
        right = ""
        if high < line.length:
            right = f"[{line.length - high:,} {line.unit} left out]"
        edge = high if not right else high - size // 8
        return _Entry(left + line.cut(low, high) + right, edge, is_cut=True)

    def _add(self, row: Row, mark: str, entry: _Entry) -> bool:
        """Add an entry if it fits."""
        page, layout = self.page, self._layout
        body = layout.text.as_shown(entry.text)
        text = f"{layout.label(row.number)}{mark}{body}"
        is_apart = row.number > self._last_number + 1
        group_start = row.number if is_apart else self._group_start
        entered = self._newly_entered(group_start)
        if entered is not None:
            headed = f"{layout.label(entered.number)}={entered.text}\n{text}"
            # An entry that fills a page by itself has no room for more.
            text = headed if page.entries or len(headed) <= self._room else text
        has_left = self._entered > 0 and self._enclosure is None
        if page.entries and is_apart and (self._form.context or has_left):
            text = "--\n" + text
        room = self._room - len(text) - bool(page.entries)
        if room < 0:
            return False
        self._room = room
        page.entries.append(text)
        if mark == ":":
            page.hits.append((row.number, body))
        self._last_number = row.number
        self._group_start = group_start
        if entered is not None or (has_left and is_apart):
            self._entered = entered.number if entered is not None else 0
        page.is_repaired |= row.line.is_repaired and REPLACEMENT in body
        if entry.is_cut:
            page.is_cut = True
            is_readable = row.line.length <= layout.max_chars and layout.text.lines > 1
            page.is_cut_line_readable |= is_readable
        return True

    def _newly_entered(self, group_start: int) -> Enclosure | None:
        """What encloses the next row, unless the page shows that right above it already."""
        enclosure = self._enclosure
        if enclosure is None or enclosure.number == self._entered:
            return None
        is_in_group = enclosure.number >= group_start  # shown above the match, or soon
        return None if is_in_group and not enclosure.is_path else enclosure


def _shared(row: Row, at: int, entry: _Entry) -> int:
    """How many occurrences from an index on an entry shows: at least one."""
    upto = at + 1
    while upto < len(row.spans):
        first, last = row.spans[upto]
        if entry.record is not None:
            is_inside = first < entry.record.end
        else:
            is_inside = row.line.measure(last) <= entry.end
        if not is_inside:
            break
        upto += 1
    return upto - at
