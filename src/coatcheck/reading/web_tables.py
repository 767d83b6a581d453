"""The tables of a web page as rows."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from coatcheck.reading.records import Row, named_rows
from coatcheck.reading.web_pages import is_hidden, tokens

_MOST_CELLS: Final = 2_000_000  # of a page, with those that span several columns or rows
_MOST_COLUMNS: Final = 1_000
_SPACED: Final = frozenset(("br", "p", "div", "li", "tr", "td", "th"))
_VOID_CONTENT: Final = frozenset(("script", "style", "template"))


def web_tables(source: str) -> list[list[Row]]:
    """The tables of a page that have rows, in the order in which they begin. Those that only
    arrange the page are left out."""
    reader = _Reader()
    for token in tokens(source):
        if isinstance(token, str):
            reader.text(token)
        elif token.is_end:
            reader.end(token.name)
        else:
            reader.start(token.name, token.attributes)
    found = []
    for table in reader.tables:
        if table.is_layout:
            continue
        rows = named_rows(
            table.cells, header_rows=table.header_rows, may_begin_with_names=not table.has_headings
        )
        if rows:
            found.append(rows)
    return found


@dataclass
class _Table:
    """A table: its cells so far, and what is open in it."""

    cells: list[list[str]] = field(default_factory=list)
    header_rows: int = 0
    row: list[str] | None = None
    has_headings: bool = False  # whether any cell is a header cell
    is_header: bool = True  # whether the current row has header cells only
    in_head: bool = False
    pieces: list[str] | None = None  # of the current cell
    columns: int = 1  # that the current cell spans
    rows: int = 1  # that the current cell spans
    # what cells of earlier rows have in a column: the text, and how many rows are left
    below: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def is_layout(self) -> bool:
        """Whether this only arranges a page: one column or one row, without a header."""
        if self.header_rows:
            return False
        return len(self.cells) < 2 or max(map(len, self.cells)) < 2


class _Reader:
    """Collects the tables of a page. A table inside a cell is a table of its own."""

    def __init__(self) -> None:
        self.tables: list[_Table] = []
        self._open: list[_Table] = []
        self._cells = 0
        self._hidden = ""  # the element that is not shown
        self._depth = 0  # of elements of that name

    def text(self, data: str) -> None:
        if not self._hidden and self._open and self._open[-1].pieces is not None:
            self._open[-1].pieces.append(html.unescape(data))

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        if self._hidden:
            self._depth += tag == self._hidden
            return
        if tag in _VOID_CONTENT or (tag not in _SPACED and is_hidden(tag, given)):
            self._hidden, self._depth = tag, 1
            return
        if tag == "table":
            self.tables.append(_Table())
            self._open.append(self.tables[-1])
        elif self._open:
            self._begin(self._open[-1], tag, given)

    def end(self, tag: str) -> None:
        if self._hidden:
            self._depth -= tag == self._hidden
            if not self._depth:
                self._hidden = ""
        elif self._open:
            table = self._open[-1]
            if tag in ("td", "th"):
                self._end_cell(table)
            elif tag == "tr":
                self._end_row(table)
            elif tag == "thead":
                self._end_row(table)
                table.in_head = False
            elif tag == "table":
                self._end_row(table)
                self._open.pop()

    def _begin(self, table: _Table, tag: str, given: Mapping[str, str]) -> None:
        if tag in ("td", "th"):
            self._end_cell(table)
            if table.row is None:
                self._begin_row(table)
            table.pieces = []
            table.columns = _span(given.get("colspan", ""))
            table.rows = _span(given.get("rowspan", ""))
            table.has_headings = table.has_headings or tag == "th"
            table.is_header = table.is_header and (tag == "th" or table.in_head)
        elif tag == "tr":
            self._end_row(table)
            self._begin_row(table)
        elif tag in ("thead", "tbody", "tfoot"):
            self._end_row(table)
            table.in_head = tag == "thead"
        elif tag in _SPACED and table.pieces is not None:
            table.pieces.append(" ")

    def _begin_row(self, table: _Table) -> None:
        table.row, table.is_header = [], True

    def _end_cell(self, table: _Table) -> None:
        if table.pieces is None or table.row is None:
            return
        text = " ".join("".join(table.pieces).split())
        table.pieces = None
        self._fill(table)
        for _ in range(table.columns):
            if len(table.row) == _MOST_COLUMNS or self._cells == _MOST_CELLS:
                return
            if table.rows > 1:
                table.below[len(table.row)] = (text, table.rows)
            table.row.append(text)
            self._cells += 1

    def _fill(self, table: _Table) -> None:
        """Add the cells of earlier rows that reach into the next columns."""
        assert table.row is not None
        while len(table.row) in table.below and self._cells < _MOST_CELLS:
            text, left = table.below[len(table.row)]
            if left <= 1:
                return
            table.below[len(table.row)] = (text, left - 1)
            table.row.append(text)
            self._cells += 1

    def _end_row(self, table: _Table) -> None:
        self._end_cell(table)
        if table.row is None:
            return
        self._fill(table)
        is_title = len(table.row) > 1 and len(set(table.row)) == 1 and not table.cells
        if table.row and not is_title:
            if table.is_header and table.header_rows == len(table.cells):
                table.header_rows += 1
            table.cells.append(table.row)
        table.row = None


def _span(written: str) -> int:
    return min(max(1, int(written)), _MOST_COLUMNS) if written.isdecimal() else 1
