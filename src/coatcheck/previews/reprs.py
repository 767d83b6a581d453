"""Rows as Python prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.values import read_repr

from .columns import no_row, of_values
from .drafts import Draft, Section
from .excerpts import Excerpt, grep, masked_line, some, sql
from .json_text import rows_of

_STRINGS: Final = lazy_pattern(rb"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"()[]{}"))
_COUNTED: Final = 512 << 10  # bytes in which rows are counted
_READ: Final = 16 << 10  # characters that are parsed: reading a repr is slow
_BEGINS: Final = lazy_pattern(r"(?:^|[\n:=] ?)([\[(][\[({](?=['\"\d({\[N]|[a-zA-Z_]+\())")
_LOOK: Final = 2_000


def python_rows(text: Excerpt) -> Draft | None:
    """Preview of the repr of Python rows: their number, and what is in the columns of those that
    were read. A lead stays."""
    match = _BEGINS.search(text.head, 0, _LOOK)
    if match is None:
        return None
    lead = text.head[: match.start(1)]
    whole, _ = text.everything
    is_whole = len(whole) <= _READ and text.is_whole
    rows = _rows(whole[match.start(1) : _READ], is_whole=is_whole)
    if not rows:
        return None
    total = str(len(rows)) if is_whole else _number_of_rows(text, lead)
    scope = "" if total == str(len(rows)) else f", of the first {len(rows)} of {total} rows"
    title = f"{masked_line(lead, 60)} " if lead.strip() else ""
    title += f"{some(int(total), 'row')}" if total.isdigit() else f"{total} rows"
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) == len(rows):
        return _of_objects(title, objects, scope)
    return _of_cells(title, rows, scope)


def _of_objects(title: str, rows: list[dict[str, object]], scope: str) -> Draft:
    """Describe rows with keys."""
    found = rows_of(rows)
    keys = [column.name for column in found.columns]
    items = [column.variants for column in found.columns]
    section = Section(_seen(scope), items, "columns", found.total_columns)
    ask = sql(keys, found.grouped()) or grep(keys[0] if keys else "")
    return Draft(f"{title} (Python repr)", (section,), scope=scope, ask=ask)


def _of_cells(title: str, rows: list[object], scope: str) -> Draft:
    """Describe rows without keys: SQL names their columns c1, c2 and so on."""
    is_nested = isinstance(rows[0], (list, tuple))
    cells = [list(row) if isinstance(row, (list, tuple)) else [row] for row in rows]
    width = len(cells[0])
    items = []
    for index in range(width):
        values = [row[index] for row in cells if len(row) > index]
        name = f"c{index + 1}" if is_nested else "value"
        items.append(of_values(name, values, len(cells), no_row).variants[1:])
    first = ", ".join(masked_line(str(cell), 30) or "''" for cell in cells[0][:60])
    sections = (
        Section(_seen(scope), items, "columns", width, share=0.6),
        Section("first: ", [(masked_line(first, 120), masked_line(first, 400))]),
    )
    short = [cell for cell in cells[0] if isinstance(cell, str) and 3 < len(cell) < 40]
    ask = sql((), rows=20 if width < 6 else 2) or grep(*short[:1])
    size = f"{title} × {some(width, 'column')} (Python repr)"
    return Draft(size, sections, scope=scope, ask=ask)


def _seen(scope: str) -> str:
    """What precedes columns that are not from all rows."""
    return f"columns {scope.removeprefix(', ')}: " if scope else ""


def _rows(source: str, *, is_whole: bool) -> list[object]:
    """The rows of a list or tuple, or as many of the first ones as can be read."""
    for cut in _cuts(source, is_whole=is_whole):
        try:
            value, _ = read_repr(cut)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, list) else [value]
    return []


def _number_of_rows(text: Excerpt, lead: str) -> str:
    """The number of members of the outer list. Brackets in strings do not count."""
    data = text.body.data[len(lead.encode()) : _COUNTED]
    outside = _STRINGS.sub(b"", data).translate(None, _NOT_BRACKETS)
    depth = rows = 0
    for bracket in outside:
        if bracket in b"([{":
            depth += 1
            rows += depth == 2
        else:
            depth -= 1
            if not depth:
                return str(rows)
    return f"≥{rows}"


def _cuts(source: str, *, is_whole: bool) -> Iterator[str]:
    """Texts to try: the whole, then up to the last complete rows."""
    source = source.rstrip()
    if is_whole:
        yield source
    close = "]" if source[0] == "[" else ")"
    end = len(source)
    for _ in range(12):
        ends = [source.rfind(between, 0, end) for between in ("), (", "}, {", "], [")]
        end = max(ends)
        if end < 0:
            return
        yield source[: end + 1] + close
