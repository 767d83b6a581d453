"""Cells of a workbook (xlsx, xlsb, xls, ods) as text and as tables, read in a child process; needs
the extra `sheets`.

The text has a line for each sheet with its range, then a line for each row that has a value: the
address of its first cell and the values as CSV. As a table, a sheet has the columns of its header:
the first row that is about as wide as the sheet, if it has names. Rows above it, such as a title,
are left out, and so are empty rows and columns. A formula is its last value. In a range that is
merged over several rows, every cell has its value.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from typing import Any, Final, NamedTuple

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.ids import clip, digest_of
from coatcheck.media import BINARY, JSON
from coatcheck.previews.excerpts import count, line
from coatcheck.reading.page import MAX_RESULT, BoundedLines, QueryResult
from coatcheck.reading.records import distinct
from coatcheck.reading.sandbox import Message, Pool, serve
from coatcheck.reading.text import sample_of

MAX_BYTES: Final = 64 << 20  # of a workbook, which is compressed
_MAX_JSON: Final = 64 << 20  # characters of all its tables
_LIMITS: Final[dict[str, Any]] = {
    "seconds": 20.0,
    "memory": 1 << 30,
    "hint": "read it without a query to see what it is",
}
OLD: Final = ("application/vnd.ms-excel", BINARY)  # media types of workbooks before xlsx
_OLD_MAGIC: Final = b"\xd0\xcf\x11\xe0"
_OLD_STREAM: Final = "Workbook".encode("utf-16-le")
_NAMES: Final = 300  # characters of the names of sheets
_SEARCHED_ROWS: Final = 200  # rows in which the header and the width are looked for
_WIDE: Final = 0.6  # of the widest row: a row that may be a header
_QUOTED: Final = lazy_pattern(r'[",]')
_ROW: Final = lazy_pattern(r"[A-Z]+\d+: ")
_SHEET: Final = lazy_pattern(r'--- sheet "(.*)": .* ---')

pool: Final = Pool(
    "coatcheck.reading.sheets", margin=1 << 30, extra="sheets", package="python_calamine"
)

Cell = str | int | float | bool


def is_old_workbook(content: Content) -> bool:
    """Whether a content is a workbook in the format before xlsx. CSV is often declared with its
    media type."""
    sample = sample_of(content)
    return sample.head.startswith(_OLD_MAGIC) and (
        _OLD_STREAM in sample.head or _OLD_STREAM in sample.tail
    )


def cells(content: Content) -> QueryResult:
    """Return the cells of every sheet as text."""
    found = _ask(content, "text", MAX_RESULT)
    note = f"only the first {MAX_RESULT:,} characters" if found["more"] else ""
    return QueryResult(str(found["text"]), shown=str(found["shown"]), note=note)


def searched(text: str) -> str:
    """Begin every row in a text from `cells` with the name of its sheet, so that a match shows
    where it is."""
    lines, sheet = [], ""
    for row in text.split("\n"):
        if match := _SHEET.fullmatch(row):
            sheet = match[1]
        lines.append(f"{sheet}!{row}" if _ROW.match(row) else row)
    return "\n".join(lines)


def tables(content: Content, name: str) -> tuple[dict[str, Content], str]:
    """Return the sheets that have rows as JSON (the first as `name`, then each by its own name),
    and a note."""
    found = _ask(content, "tables", _MAX_JSON)
    if not found["sheets"]:
        raise InvalidArgument(f"{clip(name)} is a workbook without a table")
    named: dict[str, Content] = {}
    taken, at = {name.casefold()}, 0
    for sheet, size in found["sheets"]:
        data = found["raw"][at : at + size]
        at += size
        ref = replace(
            content.ref, artifact_id=digest_of(data), size_bytes=len(data), media_type=JSON
        )
        one = Content.of(ref, data)
        named.setdefault(name, one)
        if sheet.casefold() not in taken:
            named[sheet] = one
            taken.add(sheet.casefold())
    return named, str(found["note"])


def _ask(content: Content, wanted: str, chars: int) -> Message:
    if content.size > MAX_BYTES:
        raise TooLarge(
            f"{clip(content.ref.pointer)} has {content.size:,} bytes, the limit is {MAX_BYTES:,}"
        )
    return pool.ask(
        {"wanted": wanted, "chars": chars}, contents=[content], max_chars=chars, **_LIMITS
    )


# The child process


class _Sheet(NamedTuple):
    name: str
    top: int  # row and column of the first cell, from 0
    left: int
    rows: list[list[Cell]]  # as wide as the widest; an empty cell is an empty text


class _Range(NamedTuple):
    """Cells from the first to the last row and column, counted from the first cell of a sheet."""

    first_row: int
    first_column: int
    last_row: int
    last_column: int


def main(folder: str) -> None:
    import python_calamine

    with suppress(python_calamine.CalamineError):
        python_calamine.load_workbook(io.BytesIO(b"PK"))
    serve(folder, _answer)


def _answer(message: Message, contents: list[Content]) -> Message:
    import python_calamine

    wanted, chars = (message["arguments"][key] for key in ("wanted", "chars"))
    file = io.BytesIO(b"".join(contents[0].chunks()))
    try:
        workbook = python_calamine.load_workbook(file)
        sheets = [_read(workbook.get_sheet_by_name(name), name) for name in workbook.sheet_names]
    except (python_calamine.CalamineError, OSError, ValueError) as error:
        raise InvalidArgument(f"the workbook cannot be read: {clip(str(error), 200)}") from error
    return _as_text(sheets, chars) if wanted == "text" else _as_tables(sheets, chars)


def _read(sheet: Any, name: str) -> _Sheet:
    if sheet.start is None:
        return _Sheet(name, 0, 0, [])
    top, left = sheet.start
    rows = [[_value(cell) for cell in row] for row in sheet.to_python()]
    ranges = [
        _Range(first - top, start - left, last - top, end - left)
        for (first, start), (last, end) in sheet.merged_cell_ranges or ()
    ]
    _fill_merged(rows, ranges)
    return _Sheet(name, top, left, rows)


def _fill_merged(rows: list[list[Cell]], ranges: Iterable[_Range]) -> None:
    """Give each cell of a range that is merged over several rows its value.

    Ranges of a valid workbook do not overlap, so together they have at most as many cells as the
    sheet. In another one, the ranges that have more are left out: a small file could make this take
    hours."""
    width = len(rows[0]) if rows else 0
    left = width * len(rows)
    for one in ranges:
        if one.first_row == one.last_row:
            continue  # a title or a group of columns: its text belongs to one cell
        if not (0 <= one.first_row < len(rows) and 0 <= one.first_column < width):
            continue  # its first cell, which has the value, is not among those in use
        value = rows[one.first_row][one.first_column]
        columns = min(one.last_column + 1, width) - one.first_column
        for row in rows[one.first_row : one.last_row + 1]:
            left -= columns
            if left < 0:
                return
            row[one.first_column : one.first_column + columns] = [value] * columns


def _value(cell: object) -> Cell:
    if isinstance(cell, bool | str | int):
        return cell
    if isinstance(cell, float):
        if not math.isfinite(cell):
            return str(cell)
        return int(cell) if cell.is_integer() and abs(cell) < 1 << 53 else cell
    if isinstance(cell, datetime):
        return cell.isoformat(" ")
    if isinstance(cell, date | time):
        return cell.isoformat()
    return str(cell) if isinstance(cell, timedelta) else ""


def _as_text(sheets: list[_Sheet], chars: int) -> Message:
    lines, names = BoundedLines(chars), []
    for name, top, left, rows in sheets:
        end = _address(top + len(rows) - 1, left + len(rows[0]) - 1) if rows else ""
        span = f"{_address(top, left)}:{end}" if rows else "empty"
        title = " ".join(name.split())
        names.append(f'"{title}" {span}')
        lines.add(f'--- sheet "{title}": {span} ---')
        for number, row in enumerate(rows, top):
            if values := _trimmed(row):
                lines.add(f"{_address(number, left)}: {','.join(map(_csv, values))}")
    shown = f"the cells of {count(len(sheets), 'sheet')}: {line(', '.join(names), _NAMES)}"
    return {"text": lines.text, "more": lines.full, "shown": shown}


def _as_tables(sheets: list[_Sheet], chars: int) -> Message:
    found, notes, parts = [], [], []
    for sheet in sheets:
        table = _table(sheet)
        if not table.rows:
            continue
        records = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
        data = f"[{lines}]".encode("utf-8", "replace")
        chars -= len(data)
        if chars < 0:
            raise TooLarge(
                "the tables of the workbook have too many characters",
                hint='read them with query="text"',
            )
        found.append((sheet.name, len(data)))
        parts.append(data)
        if table.above:
            name = json.dumps(sheet.name, ensure_ascii=False)
            notes.append(f"{count(table.above, 'row')} above the header of {name} left out")
    return {"raw": b"".join(parts), "sheets": found, "note": "; ".join(notes[:5])}


class _Table(NamedTuple):
    above: int
    """Rows with values above the header."""
    columns: list[str]
    rows: list[list[Cell | None]]


def _table(sheet: _Sheet) -> _Table:
    """The table of a sheet: its header, and the rows below."""
    filled = [row for row in sheet.rows if _trimmed(row)]
    if not filled:
        return _Table(0, [], [])
    first = _first_wide(filled)
    header = filled[first]
    if len(filled) > first + 1 and _is_header(header):
        below = filled[first + 1 :]
    else:
        header, below = [""] * len(header), filled[first:]
    used = [at for at, name in enumerate(header) if name != "" or _has_values(below, at)]
    names = [" ".join(str(header[at]).split()) or _letters(sheet.left + at) for at in used]
    rows = [[None if row[at] == "" else row[at] for at in used] for row in below]
    return _Table(first, distinct(names), rows)


def _first_wide(rows: list[list[Cell]]) -> int:
    """The first row that is about as wide as the widest."""
    widths = [sum(cell != "" for cell in row) for row in rows[:_SEARCHED_ROWS]]
    return next(at for at, width in enumerate(widths) if width >= _WIDE * max(widths))


def _has_values(rows: list[list[Cell]], column: int) -> bool:
    return any(row[column] != "" for row in rows)


def _is_header(row: list[Cell]) -> bool:
    """Whether a row has names: texts, or years among them."""
    named = [cell for cell in row if cell != ""]
    texts = sum(isinstance(cell, str) for cell in named)
    years = sum(type(cell) is int and 1800 <= cell <= 2200 for cell in named)
    return texts > 0 and texts + years == len(named)


def _trimmed(row: list[Cell]) -> list[Cell]:
    """A row without the empty cells at its end."""
    end = len(row)
    while end and row[end - 1] == "":
        end -= 1
    return row[:end]


def _csv(cell: Cell) -> str:
    text = " ".join(str(cell).split()) if isinstance(cell, str) else str(cell)
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _address(row: int, column: int) -> str:
    return f"{_letters(column)}{row + 1}"


def _letters(column: int) -> str:
    letters = ""
    column += 1
    while column:
        column, rest = divmod(column - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
