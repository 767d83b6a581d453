"""Tables of separated values: number of rows, columns, and the first rows."""

from __future__ import annotations

import csv
from collections import Counter
from itertools import islice
from typing import Final

from .excerpts import Excerpt, Preview, ends, line, pack, some

_SEPARATORS: Final = (",", "\t", ";", "|")
_PEEK: Final = 30
_CELL: Final = 24


def table(text: Excerpt, limit: int, *, separator: str | None = None) -> Preview:
    """Preview of a table with any separator. One that does not parse is shown as text."""
    separator = separator or _separator(text.head) or ","
    rows, complete = _rows(text, separator)
    if not rows:
        return ends(text, limit)
    header = _is_header(rows)
    columns = rows[0]
    total = _total(text, rows, header, complete)
    lead = f"{total} rows × {some(len(columns), 'column')}{'' if header else ', no header'}: "
    if header:
        names = [line(name, 40) or '""' for name in columns[:limit]]
        shape, named = pack(lead, names, len(columns), limit)
    else:
        shape, named = lead.rstrip(), len(columns)
    body = rows[1:] if header else rows
    shown, part = 0, ""
    for row in body:
        cells, kept = pack("", [line(cell, _CELL) for cell in row[:limit]], len(row), limit - len(shape) - 1)
        if kept < min(len(row), 3) or len(shape) + len(cells) + 1 > limit or "\n" in cells:
            break
        shape += "\n" + cells
        shown += 1
        if kept < len(row):
            part = ", the last in part"
            break
    of_columns = f"{named} of {len(columns)} columns and " if named < len(columns) else ""
    by = "" if complete else " (rows by line count)" if text.lines is not None else text.scope
    return Preview(shape, f"{of_columns}{shown} of {total} rows{part}{by}")


def looks_like(text: Excerpt) -> str | None:
    """Return the separator if the text is clearly a table: five rows or more, all of the same three columns or more."""
    first = text.head[:16_384].split("\n", 5)[:5]
    if len(first) < 5 or not any(all(each.count(mark) > 1 for each in first) for mark in _SEPARATORS[:3]):
        return None
    separator = _separator(text.head)
    if separator is None or separator == "|":
        return None
    rows = _parse(text.head.split("\n", _PEEK)[:_PEEK][:-1], separator)
    widths = Counter(len(row) for row in rows)
    if len(rows) < 5 or len(widths) != 1 or min(widths) < 3:
        return None
    cells = [cell for row in rows for cell in row]
    return separator if sum(len(cell) > 60 for cell in cells) * 4 < len(cells) else None


def _separator(head: str) -> str | None:
    """The separator that makes the most columns in each of the first lines."""
    lines = [each for each in head[:16_384].split("\n", _PEEK)[:10] if each.strip()]
    if not lines:
        return None
    marks = [mark for mark in _SEPARATORS if all(mark in each for each in lines)]
    if len(marks) == 1:
        return marks[0]
    best = max(marks or _SEPARATORS, key=lambda mark: min(len(next(iter(_parse([each], mark)), [])) for each in lines))
    return best if any(best in each for each in lines) else None


def _rows(text: Excerpt, separator: str) -> tuple[list[list[str]], bool]:
    """All rows of a whole table, else the first ones; and whether they are complete."""
    if text.is_whole:
        lines = [each + "\n" for each in text.head.removesuffix("\n").split("\n")]
        return _parse_all(lines, separator)
    lines = text.head.split("\n", _PEEK)
    rows = _parse([each + "\n" for each in (lines[:-1] if len(lines) > 1 else lines)], separator)
    return (rows[:-1] if len(rows) > 2 else rows), False  # the last row may be cut inside its quotes


def _parse(lines: list[str], separator: str) -> list[list[str]]:
    return _parse_all(lines, separator)[0]


def _parse_all(lines: list[str], separator: str) -> tuple[list[list[str]], bool]:
    """The rows up to the first invalid one, and whether all are valid."""
    rows: list[list[str]] = []
    try:
        rows.extend(row for row in csv.reader(lines, delimiter=separator) if row)
    except csv.Error:
        return rows, False
    return rows, True


def _total(text: Excerpt, rows: list[list[str]], header: bool, complete: bool) -> str:
    if complete:
        return str(len(rows) - header)
    return str(text.lines - header) if text.lines is not None else f"at least {len(rows) - header}"


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row has the column names: all different, no numbers."""
    first = rows[0]
    named = [cell for cell in first if cell.strip()]
    if len(rows) < 2 or not named or len(set(named)) < len(named):
        return False
    return not any(_is_number(cell) or len(cell) > 80 for cell in islice(named, 200))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
