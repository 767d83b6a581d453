"""Aligned columns of text, as command-line tools print them: with a header (`kubectl get`, `ps`,
`pip list`) or without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coatcheck.deferred import lazy_pattern

from .columns import Column, of_cells
from .drafts import Draft, Section
from .excerpts import Excerpt, grep, masked_line, some, uncoloured

_LEAD: Final = 12  # lines that may precede a table
_GAP: Final = lazy_pattern(r"\s{2,}|\t")
_HEADER: Final = lazy_pattern(r"[A-Z%#][A-Za-z0-9%#_()/.:'-]*(?: [A-Z(][A-Za-z0-9%_()/.-]*)?")
_RULE: Final = lazy_pattern(r"[-=+|─ ]{6,}")
_FINE: Final = frozenset(
    {
        "running",
        "active",
        "completed",
        "ready",
        "normal",
        "succeeded",
        "bound",
        "up",
        "ok",
        "true",
        "success",
        "<none>",
    }
)
_FULL: Final = lazy_pattern(r"([^/]+)/\1")  # 3/3
_FOOTER: Final = lazy_pattern(
    r"\(\d{1,9} rows?\)|<[^<>]{1,200}>"
)  # of psql, and of hosts that add an exit code
_PEEK: Final = 24
_FIRST_ROWS: Final = 'lines="1:40"'
_TELLING: Final = (
    "STATUS", "STATE", "PHASE", "READY", "TYPE", "REASON", "SEVERITY", "CONCLUSION", "USER",
    "NAMESPACE", "KIND",
)  # fmt: skip
_ROWS: Final = 3


def _columns_in(row: str) -> list[str] | None:
    """The names of columns if a line is a header of aligned columns."""
    if not row[:1].isascii() or not ("  " in row or "\t" in row or row.upper() == row):
        return None
    cells = [cell for cell in _GAP.split(row.strip()) if cell]
    if row.upper() == row and not all(map(_HEADER.fullmatch, cells)):
        cells = row.split()
    is_header = (
        len(cells) > 1 and all(map(_HEADER.fullmatch, cells)) and len(set(cells)) == len(cells)
    )
    return cells if is_header and (row.upper() == row or len(cells) < 9) else None


@dataclass(frozen=True, slots=True)
class _Header:
    """The names of columns and the line that they are in, counted from 0. A ruled header is
    followed by a line of dashes."""

    at: int
    row: str
    names: list[str]
    is_ruled: bool


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows below a header, which is in line `number`, counted from 1."""

    number: int
    rows: list[str]


def columns(text: Excerpt) -> Draft | None:
    """Preview of aligned columns: what is in each, and the first rows."""
    header = _header_in(uncoloured(text.head[:8_192]).split("\n", _LEAD + 3)[: _LEAD + 3])
    if header is None:
        return None
    whole, scope = text.everything
    tables, other_lines = _tables_below(header, lines_of(whole))
    rows = tables[0].rows
    if len(rows) < 3:
        return None
    cells_of_columns = _cells_of(rows, header)
    if cells_of_columns is None:
        return None
    found = []
    for name, cells in zip(header.names, cells_of_columns, strict=True):
        found.append(_of_column(name, cells, rows))
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{part}{some(len(rows), 'row')} × {some(len(found), 'column')}"
    after = _what_follows(tables[1:], other_lines)
    return replace(_draft(lead + after, found, rows, "columns"), scope=scope)


def bare_columns(text: Excerpt) -> Draft | None:
    """Preview of aligned columns without a header: what is in each."""
    first = first_lines(text.head)
    widths = Counter(len(_GAP.split(each.strip())) for each in first)
    width, times = widths.most_common(1)[0] if widths else (0, 0)
    if width < 3 or times < 5 or times * 10 < len(first) * 6:
        return None
    whole, scope = text.everything
    lines = [each for each in lines_of(whole) if each.strip()]
    rows = []
    cells = []
    for each in lines:
        row = _GAP.split(each.strip())
        if len(row) == width:
            rows.append(each)
            cells.append(row)
    found = [
        _of_column(f"column {index}", column, rows)
        for index, column in enumerate(zip(*cells, strict=True), 1)
    ]
    if not any(column.is_telling for column in found):
        return None
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    of = f" of {len(lines)} lines" if len(rows) < len(lines) else ""
    lead = f"{part}{some(len(rows), 'row')}{of} × {width} columns, no header"
    return replace(_draft(lead, found, rows, "columns"), scope=scope)


def _of_column(name: str, cells: Sequence[str], rows: list[str]) -> Column:
    """The column of a table that SQL does not read: it has no type."""
    return of_cells(name, cells, lambda value: rows[cells.index(str(value))])


def _draft(lead: str, found: list[Column], rows: list[str], noun: str) -> Draft:
    """Describe columns of text and their first rows."""
    telling = _telling(found)
    items = []
    for column in found:
        name = masked_line(column.name, 40)
        items.append((name, f"{name} {column.detail}") if column.detail else (name,))
    first = [found.index(telling)] if telling is not None else []
    sections = (
        Section("", items, noun, share=0.7, first=first),
        Section("", [masked_line(row, 140) for row in rows[:_ROWS]], sep="\n", is_counted=False),
    )  # fmt: skip
    ask = _first_read(telling, rows)
    return Draft(lead, sections, ask=ask)


def _first_read(telling: Column | None, rows: list[str]) -> str:
    """The read that shows the rows that an operator would look at."""
    if telling is not None:
        odd = grep(*_odd(telling.counts))
        if odd:
            return odd
    first = rows[0].split(None, 1)[0] if telling is None and rows[0].strip() else ""
    return grep(first) if len(first) > 3 else _FIRST_ROWS


def _header_in(first: list[str]) -> _Header | None:
    """The first header of aligned columns, else the line above a rule, if a table can follow."""
    above_rule = _line_above_rule(first)
    at = above_rule
    for index, row in enumerate(first[:_LEAD]):
        if _columns_in(row) is not None:
            at = index
            break
    if at is None or at + 2 >= len(first):
        return None
    row = first[at]
    if at == above_rule:
        names = _GAP.split(row.lstrip("|/ ").rstrip())
        return _Header(at, row, names, is_ruled=True) if len(names) > 1 else None
    names = _columns_in(row) or []
    if row.upper() != row or len(names) < 3:
        return None
    return _Header(at, row, names, is_ruled=False)


def _line_above_rule(first: list[str]) -> int | None:
    for index, row in enumerate(first[1:_LEAD]):
        if _RULE.fullmatch(row.strip()):
            return index
    return None


def _tables_below(header: _Header, lines: list[str]) -> tuple[list[_Table], int]:
    """The table of the header and those after it, and the number of lines in none of them.

    A table ends at an empty line; the next one begins with a header of its own."""
    table = _Table(header.at + 1, [])
    tables = [table]
    is_over, other_lines = False, 0
    start = header.at + 1 + header.is_ruled
    for number, row in enumerate(lines[start:], start + 1):
        if row.upper() == row and _columns_in(row) is not None:
            table = _Table(number, [])
            tables.append(table)
            is_over = False
        elif not row.strip():
            is_over = bool(table.rows)
        elif is_over or _FOOTER.fullmatch(row.strip()):
            other_lines += 1
        else:
            plain = uncoloured(row)
            if plain.strip():
                table.rows.append(plain)
    return tables, other_lines


def _cells_of(rows: list[str], header: _Header) -> list[list[str]] | None:
    """The cells of each column: cut below the names if all rows are aligned with them, else split
    at spaces, as for numbers that are aligned to the right. None if neither fits all rows."""
    starts = [header.row.find(name) for name in header.names]
    if all(_is_aligned(row, starts) for row in rows):
        ends: list[int | None] = [*starts[1:], None]
        return [
            [row[start:end].strip() for row in rows]
            for start, end in zip(starts, ends, strict=True)
        ]
    if any(" " in name for name in header.names):
        return None
    split = [row.split(None, len(starts) - 1) for row in rows]
    if any(len(cells) < len(starts) for cells in split):
        return None
    return [list(column) for column in zip(*split, strict=True)]


def _is_aligned(row: str, starts: list[int]) -> bool:
    """Whether there is a space before each column but the first."""
    return all(not row[start - 1 : start].strip() for start in starts[1:])


def _what_follows(tables: list[_Table], other_lines: int) -> str:
    """The other tables and lines after the first table: `; then 4 service/ from line 12`."""
    parts = [
        f"{len(table.rows)} {_prefix(table.rows)}from line {table.number}"
        for table in tables
        if table.rows
    ]
    if other_lines:
        parts.append(some(other_lines, "other line"))
    return masked_line(f"; then {', '.join(parts)}", 160) if parts else ""


def _odd(counts: Sequence[tuple[str, int]]) -> list[str]:
    """The values that an operator would look at: rare ones first, without those that mean that all
    is well."""
    usual = counts[0][0] if len(counts) > 1 else ""
    return [
        value
        for value, _ in reversed(counts)
        if len(value) > 2
        and value != usual
        and value.lower() not in _FINE
        and not _FULL.fullmatch(value)
    ][:4]


def _prefix(rows: list[str]) -> str:
    """What the names of all rows begin with: `service/ ` of `kubectl get all`."""
    first = {row.partition("/")[0] for row in rows}
    return f"{first.pop()}/ " if len(first) == 1 and "/" in rows[0].split(None, 1)[0] else ""


def _telling(found: list[Column]) -> Column | None:
    """The column whose values say most: one with a telling name, else the one with the fewest, but
    two or more."""
    several = [column for column in found if column.is_telling]
    for name in _TELLING:
        for column in several:
            if column.name == name:
                return column
    for name in _TELLING:
        for column in found:
            if column.name == name and column.distinct == 1:
                return column
    return min(several, key=lambda column: column.distinct, default=None)


def lines_of(text: str) -> list[str]:
    """The lines of a text, without an empty one after the last line feed."""
    found = text.split("\n")
    if found and not found[-1]:
        found.pop()
    return found


def first_lines(head: str) -> list[str]:
    """The first lines that are not blank, without colours."""
    return [each for each in uncoloured(head[:8_192]).split("\n", _PEEK)[:_PEEK] if each.strip()]
