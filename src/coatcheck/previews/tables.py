"""Tables of text: separated values, stanzas of `key: value` lines, columns of plain text.

Every figure is computed from all rows. Lines without a quote are split without a parser, which
takes half the time.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from operator import methodcaller
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import mask

from .columns import Column, no_row, of_cells, safe
from .drafts import Draft, Section
from .excerpts import Excerpt, some, sql

_SEPARATORS: Final = (",", "\t", ";", "|")
_PEEK: Final = 30
_CELL: Final = 24
_WIDE: Final = 200  # columns that are described
_ROWS: Final = 3  # rows that are shown
_LOOK: Final = 16_384
_LEAST: Final = 10  # lines that must be alike
_WORD: Final = 80
_LINE: Final = 200
_LISTED: Final = 60
_RULE: Final = lazy_pattern(r"\|?(?:[ \t]{0,8}:?-{2,100}:?[ \t]{0,8}\|?){1,100}")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text in columns. `first` are the first rows. The cells of a column may be in another
    order than the rows, but the same for all columns. `is_whole` says whether all rows could be
    read, `scope` which part of the content they are from."""

    names: Sequence[str]
    cells: Sequence[Sequence[str]]
    first: Sequence[Sequence[str]]
    rows: int
    has_header: bool
    is_whole: bool
    scope: str = ""

    def columns(self) -> list[Column]:
        """What is in the columns of all rows."""
        found = []
        for name, cells in zip(self.names[:_WIDE], self.cells, strict=False):
            found.append(of_cells(name, cells, partial(self._row_with, cells)))
        return found

    def _row_with(self, cells: Sequence[str], value: object) -> str:
        """The first row with a value, with the names of the columns."""
        at = cells.index(str(value))
        return self._written([column[at] for column in self.cells[:_WIDE]])

    def _written(self, row: Sequence[str]) -> str:
        """A row as `name: value` lines, in which secrets are found by their names."""
        named = zip(self.names[:_WIDE], row, strict=False)
        return "\n".join(f"{name}: {cell[:300]}" for name, cell in named)

    def first_lines(self) -> list[str]:
        """The first rows, each on a line."""
        found = []
        for row in self.first:
            near = self._written(row)
            cells = [
                safe(cell, _CELL, name, near)
                for name, cell in zip(self.names[:_WIDE], row, strict=False)
            ]
            found.append(", ".join(cells))
        return found


def draft_of(table: Table, noun: str, *, ask: str = "") -> Draft:
    """Describe a table: its size, its columns, its first rows."""
    columns = table.columns()
    least = "" if table.is_whole else "≥"
    part = f"{table.scope.removeprefix(', ')}: " if table.scope else ""
    size = f"{least}{some(table.rows, noun)} × {some(len(table.names), 'column')}"
    header = "" if table.has_header else ", no header"
    telling = [index for index, column in enumerate(columns) if column.is_telling]
    sections = (
        Section("", [one.variants for one in columns], "columns", len(table.names), share=0.6,
                first=telling),
        Section("", table.first_lines(), sep="\n", is_counted=False),
    )  # fmt: skip
    grouped = min((columns[at] for at in telling), key=lambda one: one.distinct, default=None)
    statement = sql(table.names, grouped.name if grouped else "") if table.has_header else ""
    return Draft(
        f"{part}{size}{header}", sections, scope=table.scope, ask=ask or statement or 'lines="1:30"'
    )  # fmt: skip


# Separated values


def separated(text: Excerpt, *, separator: str | None = None) -> Draft | None:
    """Preview of a table with any separator. One that does not parse is shown as text."""
    separator = separator or separator_in(text.head) or ","
    table = read_separated(text, separator)
    return None if table is None else draft_of(table, "row")


def found_separated(text: Excerpt) -> Draft | None:
    """Preview of text that is clearly a table. SQL is for content that is known to be one."""
    separator = separator_of(text)
    table = None if separator is None else read_separated(text, separator)
    return None if table is None else draft_of(table, "row", ask='lines="1:30"')


def ruled(text: Excerpt) -> Draft | None:
    """Preview of a text that is one Markdown table."""
    start = text.head[:_LOOK].lstrip().split("\n", 2)
    if len(start) < 3 or not start[0].startswith("|") or not _RULE.fullmatch(start[1].strip()):
        return None
    whole, scope = text.everything
    lines = [each.strip() for each in whole.strip().split("\n")]
    rows = [_ruled_cells(each) for each in lines if each.startswith("|")]
    names = rows[0]
    if len(rows) < 3 or len(rows) * 10 < len(lines) * 9:
        return None
    cells = list(zip_longest(*rows[2:], fillvalue=""))[: len(names)]
    first = rows[2 : 2 + _ROWS]
    table = Table(names, cells, first, len(rows) - 2, True, not scope, scope)
    return draft_of(table, "row", ask='lines="1:30"')


def _ruled_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def plain_lines(text: Excerpt) -> Draft | None:
    """Preview of lines of one word each, or of lines that repeat: how many there are, and which are
    the most frequent."""
    first = [each for each in text.head[:_LOOK].split("\n", _PEEK)[:_PEEK] if each.strip()]
    are_words = sum(" " not in each.strip() and len(each) < _WORD for each in first)
    repeat = len(set(first)) * 2 <= len(first) and max(map(len, first), default=0) < _LINE
    if len(first) < _LEAST or not (are_words == len(first) or repeat):
        return None
    whole, scope = text.everything
    lines = [each for each in whole.split("\n") if each.strip()]
    if max(map(len, lines)) > _LINE:
        return None
    column = of_cells("", lines, no_row)
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{part}{some(len(lines), 'line')}, {column.distinct} different"
    # A line may be a secret because of the line before it, so all of the text is masked at once.
    shown = [each for each in mask(whole).split("\n") if each.strip()]
    counted = sorted(Counter(shown).items(), key=lambda item: -item[1])
    if column.distinct == len(lines):
        ends = [safe(each, 60) for each in (*shown[:3], shown[-1])]
        span = f" ({column.type} {column.detail})" if ".." in column.detail else ""
        listed = ", ".join([*ends[:-1], "…", ends[-1]])
        return Draft(lead + span, (Section("", [listed]),), scope=scope, ask='lines="1:60"')
    items = [f"{safe(value, 60)} {times}" for value, times in counted[:_LISTED]]
    section = Section("", items, "different lines", len(counted), share=0.6)
    program = "print(Counter(lines).most_common(30))"
    return Draft(lead, (section,), scope=scope, ask='lines="1:60"', program=program)


def read_separated(text: Excerpt, separator: str) -> Table | None:
    """Read all rows of separated values."""
    whole, scope = text.everything
    lines = whole.replace("\r\n", "\n").split("\n")
    if scope and len(lines) > 1:
        lines.pop()  # it may be cut
    lines = [each for each in lines if each]
    first, _ = _parsed(lines[:_PEEK], separator)
    if not first:
        return None
    has_header = is_header(first)
    names = first[0] if has_header else [f"column{at}" for at in range(len(first[0]))]
    start = _end_of_quotes(lines, 0) if has_header else 0
    cells, is_whole = _in_columns(lines[start:], separator, len(names))
    return Table(
        names,
        cells,
        first[has_header : has_header + _ROWS],
        len(cells[0]) if cells else 0,
        has_header,
        is_whole and not scope,
        scope,
    )


def _in_columns(
    lines: list[str], separator: str, width: int
) -> tuple[Sequence[Sequence[str]], bool]:
    """The cells of lines in columns, and whether all lines are valid.

    Lines without quotes and with the right number of cells are split all at once, which takes a
    third of the time that a parser takes; the others come after them."""
    joined = "\n".join(lines)
    if '"' not in joined and set(map(methodcaller("count", separator), lines)) <= {width - 1}:
        flat = joined.replace("\n", separator).split(separator) if lines else []
        return [flat[index::width] for index in range(width)], True
    near = lines[:_PEEK]
    plain: list[str] = []
    others = lines
    if sum('"' in each for each in near) * 2 < len(near):
        plain, others = _split_off(lines, separator, width)
    flat = separator.join(plain).split(separator) if plain else []
    rows, is_whole = _parsed(others, separator)
    across = list(zip_longest(*rows, fillvalue=""))[:width]
    across += [("",) * len(rows)] * (width - len(across))
    return [[*flat[index::width], *more] for index, more in enumerate(across)], is_whole


def _split_off(lines: list[str], separator: str, width: int) -> tuple[list[str], list[str]]:
    """The lines without quotes and with the right number of cells, and the others."""
    plain: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(lines):
        each = lines[at]
        end = at + 1
        if '"' in each:
            end = _end_of_quotes(lines, at)
            others += lines[at:end]
        elif each.count(separator) == width - 1:
            plain.append(each)
        else:
            others.append(each)
        at = end
    return plain, others


def _parsed(lines: Sequence[str], separator: str) -> tuple[list[list[str]], bool]:
    """The rows up to the first invalid one, and whether all are valid. Empty lines are left out."""
    rows: list[list[str]] = []
    try:
        found = csv.reader("\n".join(lines).splitlines(keepends=True), delimiter=separator)
        rows.extend(filter(None, found))
    except csv.Error:
        return rows, False
    return rows, True


def _end_of_quotes(lines: Sequence[str], start: int) -> int:
    """The line after the one in which the quotes that begin in a line are closed."""
    quotes = 0
    for at in range(start, len(lines)):
        quotes += lines[at].count('"')
        if quotes % 2 == 0:
            return at + 1
    return len(lines)


def separator_of(text: Excerpt) -> str | None:
    """Return the separator if the text is clearly a table: at least five rows with the same three
    columns or more."""
    first = text.head[:_LOOK].split("\n", 5)[:5]
    if len(first) < 5:
        return None
    if not any(all(each.count(mark) > 1 for each in first) for mark in _SEPARATORS[:3]):
        return None
    separator = separator_in(text.head)
    if separator is None or separator == "|":
        return None
    rows, _ = _parsed(text.head.split("\n", _PEEK)[:_PEEK][:-1], separator)
    widths = set(map(len, rows))
    if len(rows) < 5 or len(widths) != 1 or min(widths) < 3:
        return None
    cells = [cell for row in rows for cell in row]
    return separator if sum(len(cell) > 60 for cell in cells) * 4 < len(cells) else None


def separator_in(head: str) -> str | None:
    """The separator that makes the most columns in each of the first lines."""
    lines = [each for each in head[:_LOOK].split("\n", _PEEK)[:10] if each.strip()]
    marks = [mark for mark in _SEPARATORS if all(mark in each for each in lines)]
    if len(marks) == 1 or not lines:
        return marks[0] if lines else None
    best, most = None, 0
    for mark in marks or _SEPARATORS:
        widths = [sum(map(len, _parsed([each], mark)[0])) for each in lines]
        if min(widths) > most:
            best, most = mark, min(widths)
    return best if any((best or ",") in each for each in lines) else None


def is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has the column names: all different, no numbers."""
    named = [cell for cell in rows[0] if cell.strip()]
    may_lack = len(named) > 2
    if len(rows) < 2 or len(named) < len(rows[0]) - may_lack or len(set(named)) < len(named):
        return False
    return not any(_is_number(cell) or len(cell) > 80 for cell in islice(named, 200))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
