"""Rows in plain text: tables with `|` between cells, aligned columns with a header, and records of
`key: value` lines with an empty line between them.

Cells are text. A column whose values are all numbers has numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from coatcheck.deferred import lazy_pattern

Row = dict[str, Any]

_RULE: Final = lazy_pattern(r"(?=[^-=]*[-=]{2})[-=:+| \t]+")
_RUN: Final = lazy_pattern(r"=+|\++|-{2,}")  # of a rule: a column
_PAIR: Final = lazy_pattern(r"([A-Za-z][\w./()-]*(?: [\w./()-]+){0,3})[ \t]*:(?:[ \t]+(.*)|[ \t]*)")
_FIELD: Final = lazy_pattern(r"\S+(?: \S+)*")
_INTEGER: Final = lazy_pattern(r"-?(?:0|[1-9]\d{0,17}|[1-9]\d{0,2}(?:,\d{3}){1,5})")
_DECIMAL: Final = lazy_pattern(r"-?(?:0|[1-9]\d{0,15}|[1-9]\d{0,2}(?:,\d{3}){1,5})?\.\d{1,15}")
_NUMERIC: Final = lazy_pattern(r"[\d.,:%-]+")
_CAPITALS: Final = lazy_pattern(
    r"Filesystem[ \t].*|[A-Z%#][A-Z0-9%#/()_-]*(?:[ \t]+[A-Z%#][A-Z0-9%#/()_-]*){2,}"
)
_FIRST_LINES: Final = 8  # among which the header is
_FEW_ROWS: Final = 2
_MOST_COLUMNS: Final = 1_000
_FIT: Final = 0.9  # of the rows or records, which must have the form


def named_rows(
    cells: Sequence[Sequence[str]], *, header_rows: int, may_begin_with_names: bool = True
) -> list[Row]:
    """The rows below a header. Without one, the first row may be the header, if it has a distinct
    text in every column; otherwise the columns are c1, c2, …"""
    width = max((len(row) for row in cells), default=0)
    if header_rows >= len(cells) or width > _MOST_COLUMNS:
        return []
    header: Sequence[str] = ()
    if header_rows:
        header = cells[header_rows - 1]
    elif may_begin_with_names and len(cells) > 1 and _is_header(cells[0], width):
        header, header_rows = cells[0], 1
    names = [header[at] if at < len(header) else "" for at in range(width)]
    columns = distinct([name or f"c{at}" for at, name in enumerate(names, 1)])
    rows = [dict(zip(columns, row, strict=False)) for row in cells[header_rows:]]
    return with_numbers(columns, rows)


def _is_header(row: Sequence[str], width: int) -> bool:
    if len(row) < width or len({cell.casefold() for cell in row}) < width:
        return False
    return all(cell and number_of(cell) is None for cell in row)


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with numbers for those that are there before. Case does not count."""
    taken: set[str] = set()
    found = []
    for base in names:
        name, number = base, 1
        while name.casefold() in taken:
            name = f"{base}_{number}"
            number += 1
        taken.add(name.casefold())
        found.append(name)
    return found


def with_numbers(columns: Sequence[str], rows: list[Row]) -> list[Row]:
    """The rows, with numbers in the columns that have nothing else, and NULL for empty cells."""
    for column in columns:
        texts = [row[column] for row in rows if row.get(column)]
        numbers = {text: number_of(text) for text in set(texts)}
        is_numeric = bool(texts) and None not in numbers.values()
        for row in rows:
            text = row.get(column)
            if not text:
                row[column] = None
            elif is_numeric:
                row[column] = numbers[text]
    return rows


def number_of(text: str) -> int | float | None:
    """The number that a text is; None if it is something else. A code such as 007 is text."""
    if _INTEGER.fullmatch(text):
        return int(text.replace(",", ""))
    if _DECIMAL.fullmatch(text):
        return float(text.replace(",", ""))
    return None


def text_tables(text: str) -> list[list[Row]]:
    """The tables of a plain text. There may be several with `|`, or one of another form."""
    lines = text.splitlines()
    found = list(_piped_tables(lines))
    if found:
        return found
    rows = _stanzas(lines) or _aligned(lines) or _listed(lines)
    return [rows] if rows else []


def _piped_tables(lines: list[str]) -> Iterator[list[Row]]:
    """Tables as in Markdown, or as databases print them: a header, a rule, and rows."""
    at = 1
    while at < len(lines):
        header = _cells(lines[at - 1])
        if len(header) < 2 or not _RULE.fullmatch(lines[at]):
            at += 1
            continue
        cells = [header]
        at += 1
        while at < len(lines) and len(_cells(lines[at])) >= 2:
            cells.append(_cells(lines[at]))
            at += 1
        rows = named_rows(cells, header_rows=1)
        if rows:
            yield rows
        at += 1


def _cells(line: str) -> list[str]:
    """The cells of a line with `|` between them."""
    if "|" not in line or _RULE.fullmatch(line):
        return []
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    parts = re.split(r"(?<!\\)\|", line)
    return [part.strip().replace("\\|", "|") for part in parts]


def _stanzas(lines: list[str]) -> list[Row]:
    """Records of `key: value` lines. A line that begins with a space continues the value before
    it."""
    records: list[Row] = []
    skipped = 0
    for block in _blocks(lines):
        record = _record(block)
        if record is None:
            skipped += 1
        else:
            records.append(record)
    if len(records) < _FEW_ROWS or len(records) < _FIT * (len(records) + skipped):
        return []
    first = next(iter(records[0]))
    if sum(first in record for record in records) < _FIT * len(records):
        return []
    columns = list(dict.fromkeys(key for record in records for key in record))
    if len(columns) > _MOST_COLUMNS:
        return []
    return with_numbers(columns, [dict.fromkeys(columns) | record for record in records])


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in lines:
        if line.strip() and set(line.strip()) != {"-"}:
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _record(lines: list[str]) -> Row | None:
    """The values of a block by their keys; None if it has other lines."""
    values: dict[str, list[str]] = {}
    value: list[str] = []
    for line in lines:
        if line[0] in " \t" and values:
            value.append(line.strip())
            continue
        match = _PAIR.fullmatch(line.rstrip())
        if match is None:
            return None
        value = values.setdefault(match[1], [])
        value.append((match[2] or "").strip())
    return {key: "\n".join(value).strip("\n") for key, value in values.items()}


def _aligned(lines: list[str]) -> list[Row]:
    """Columns that begin where the names of a header begin, two spaces or more apart, or where the
    parts of the rule below it begin."""
    lines = [line.rstrip() for line in lines if line.strip()]
    for number, header in enumerate(lines[: min(_FIRST_LINES, len(lines) - 1)]):
        starts = _starts(header, lines[number + 1])
        if len(starts) < 2:
            continue
        rows = [line for line in lines[number + 1 :] if not _RULE.fullmatch(line)]
        fitting = sum(_fits(row, starts) for row in rows)
        if len(rows) >= _FEW_ROWS and fitting >= _FIT * len(rows):
            return named_rows([_slices(line, starts) for line in [header, *rows]], header_rows=1)
    return []


def _starts(header: str, below: str) -> list[int]:
    """Where the columns under a header begin; empty if it is not a header."""
    if "\t" in header or _RULE.fullmatch(header):
        return []
    if any(_NUMERIC.fullmatch(word) for word in header.split()):
        return []
    if _RULE.fullmatch(below):
        return [match.start() for match in _RUN.finditer(below)]
    fields = list(_FIELD.finditer(header))
    if any(match[0].count(" ") > 1 for match in fields):  # several names, one space apart
        return []
    return [match.start() for match in fields]


def _fits(line: str, starts: list[int]) -> bool:
    """Whether a line has an empty place before each column, and a value in the first."""
    if line[starts[0] : starts[0] + 1] in ("", " "):
        return False
    return all(line[start - 1 : start] in ("", " ") for start in starts[1:])


def _slices(line: str, starts: list[int]) -> list[str]:
    ends = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _listed(lines: list[str]) -> list[Row]:
    """Columns under names in capitals, as `ps` prints them, or those of `df`. The last one takes
    the rest."""
    lines = [line for line in lines if line.strip()]
    if len(lines) <= _FEW_ROWS or not _CAPITALS.fullmatch(lines[0].strip()):
        return []
    header = lines[0].replace("Mounted on", "Mounted_on").split()
    cells = [line.split(None, len(header) - 1) for line in lines[1:]]
    if any(len(row) < len(header) for row in cells):
        return []
    return named_rows([header, *([cell.strip() for cell in row] for row in cells)], header_rows=1)
