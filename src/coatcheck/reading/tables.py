"""The tables of a content: what SQL can select from, and what a program gets as rows.

`artifact` is the main table. A JSON object has a table for each array and object in it, by its key;
a page or a Markdown text has `table_1`, `table_2`, …; a JSON value has these rows:

| value | rows |
| --- | --- |
| array of objects | the objects |
| array of arrays | columns c1, c2, … |
| other array | column `value` |
| object of objects | the objects, with their key in the column `key` |
| other object | columns `key` and `value` |
"""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.ids import clip, escaped, follow
from coatcheck.media import REPR, decoded, essence, is_json, is_jsonl, starts_with_time
from coatcheck.previews.excerpts import line
from coatcheck.reading import json_content
from coatcheck.reading.json_content import MAX_ROWS, documents_in, lines, load, parse, whole
from coatcheck.reading.records import Row, distinct, number_of, text_tables
from coatcheck.sql_types import quoted, type_of_texts, type_of_values
from coatcheck.values import MAX_DEPTH, encode_text

MAIN: Final = "artifact"
_MOST_PLACES: Final = 10_000  # values that are looked at for tables
_DESCRIBED: Final = 50  # tables
_LONGEST_HINT: Final = 400
_MOST_COLUMNS: Final = 1_000  # that are described
_SAMPLED: Final = 50  # items that decide what an array or an object is
CSV: Final = (
    "text/csv", "application/csv", "text/x-csv", "application/x-csv",
    "text/comma-separated-values",
)  # fmt: skip
TSV: Final = ("text/tab-separated-values", "text/tsv")
_START: Final = 64  # characters
_PAGES: Final = ("text/html", "application/xhtml+xml")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, with its type as SQL calls it."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Table:
    """What a table has."""

    name: str
    rows: int
    columns: tuple[Column, ...]
    place: str = ""
    """The fragment of the part that is the table: `/items`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A table of a content: its name, and a value whose rows it has."""

    name: str
    value: Any
    place: str = ""
    note: str = ""

    def rows(self) -> list[Row]:
        return rows_of(self.value)


def tables_of(content: Content) -> list[Table]:
    """Describe the tables of a content; the first is the main one. A workbook and Parquet have
    tables that only SQL can read: they are not described. This parses all of the content:
    `heavy.tables` does so in a child process if it is large."""
    described = []
    is_csv = essence(content.ref.media_type) in CSV + TSV
    type_of = type_of_texts if is_csv else type_of_values
    for found in find_tables(content)[:_DESCRIBED]:
        rows = found.rows()
        names = dict.fromkeys(name for row in rows for name in row)
        columns = tuple(
            Column(name, type_of(row.get(name) for row in rows))
            for name in islice(names, _MOST_COLUMNS)
        )
        described.append(Table(found.name, len(rows), columns, found.place))
    return described


def rows_in(content: Content, name: str = MAIN) -> list[Row]:
    """The rows of a table. The cells of CSV are text. Raises `InvalidArgument` if there is none of
    that name."""
    return find_table(content, name).rows()


def find_table(content: Content, name: str = MAIN) -> Found:
    """The table of a name, whose case does not count. Raises `InvalidArgument` if there is none."""
    tables = find_tables(content)
    for found in tables:
        if found.name.casefold() == name.casefold():
            return found
    if name == MAIN:
        raise InvalidArgument("there are no rows in it", hint="read it with lines or grep")
    names = [one.name if one.name.isidentifier() else quoted(one.name) for one in tables]
    hint = "tables here: " + line(", ".join(names), _LONGEST_HINT) if names else ""
    raise InvalidArgument(f"there is no table {clip(name, 80)}", hint=hint)


def find_tables(content: Content) -> list[Found]:
    """The tables of a content, the main one first."""
    media_type = content.ref.media_type
    bare = essence(media_type)
    if is_jsonl(media_type):
        return [Found(MAIN, list(_records(content)))]
    if is_json(media_type) or bare == REPR:
        return _in_json(load(content))
    text = decoded(whole(content, MAX_ROWS))
    if bare in _PAGES:
        from coatcheck.reading.web_tables import web_tables  # most contents need it not

        return _numbered(web_tables(text))
    if bare in CSV + TSV:
        return [Found(MAIN, _in_csv(text, _separator(text, bare)))]
    return _in_text(text)


def part_of(content: Content, fragment: str) -> bytes:
    """The JSON of the value that a fragment names: a part of a JSON document, or the rows of a
    table in a page or a text (`/table/2`). Raises `InvalidPointer` if there is no such part,
    `InvalidArgument` if the content has no parts."""
    media_type = content.ref.media_type
    if is_json(media_type) or is_jsonl(media_type) or essence(media_type) == REPR:
        return json_content.part_of(content, fragment)
    numbered = {}
    for found in find_tables(content):
        if found.place:
            numbered[found.place.rpartition("/")[2]] = found.value
    if not numbered:
        raise InvalidArgument("the artifact is not JSON, and has no tables")
    part = follow({"table": numbered}, fragment)
    return encode_text(json.dumps(part, ensure_ascii=False, separators=(",", ":")))


def rows_of(value: Any) -> list[Row]:
    """The rows of a JSON value."""
    if isinstance(value, dict):
        return _rows_of_object(value)
    if not isinstance(value, list):
        return [{"value": value}]
    if all(isinstance(item, dict) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        width = max((len(item) for item in value), default=0)
        names = [f"c{number}" for number in range(1, width + 1)]
        return [dict(zip(names, item, strict=False)) for item in value]
    return [{"value": item} for item in _alike(value)]


def _rows_of_object(value: dict[str, Any]) -> list[Row]:
    if not _has_records(value):
        items = zip(value, _alike(list(value.values())), strict=True)
        return [{"key": key, "value": item} for key, item in items]
    name = "key"
    if any("key" in item for item in value.values() if item):
        name = "_key"
    return [{name: key, **(item or {})} for key, item in value.items()]


def _alike(values: list[Any]) -> list[Any]:
    """The values, with arrays and objects as JSON text if there are others too: so a column of
    texts has no quotes."""
    nested = [isinstance(value, dict | list) for value in values]
    others = [
        value is not None and not is_one for value, is_one in zip(values, nested, strict=True)
    ]
    if not (any(nested) and any(others)):
        return values
    return [
        json.dumps(value, ensure_ascii=False, default=str) if is_one else value
        for value, is_one in zip(values, nested, strict=True)
    ]


def _has_records(value: dict[str, Any]) -> bool:
    """Whether an object has records: two objects or more, which share a key."""
    if len(value) < 2:
        return False
    if not all(isinstance(item, dict) or item is None for item in value.values()):
        return False
    sampled = [item for item in islice(value.values(), _SAMPLED) if item]
    counts: dict[str, int] = {}
    for item in sampled:
        for key in item:
            counts[key] = counts.get(key, 0) + 1
    return max(counts.values(), default=0) * 2 >= len(value if len(value) < _SAMPLED else sampled)


def _in_json(value: Any) -> list[Found]:
    """The tables of a JSON value: the main one, and the arrays and objects inside an object by
    their keys."""
    if not isinstance(value, dict | list) or not value:
        return []
    if isinstance(value, list):
        return [Found(MAIN, value)]
    main, best = Found(MAIN, value), (0, 0)
    named: dict[str, Found] = {}
    for place, key, part in _parts(value):
        rank = _rank(part)
        is_detail = rank[1] == 1 and place.count("/") > 1
        if rank > best and not is_detail:
            best = rank
            note = f"artifact is #{place}" if place else ""
            main = Found(MAIN, part, place, note)
        if key.casefold() not in named:
            named[key.casefold()] = Found(key, part, place)
    named.pop("", None)
    named.pop(MAIN, None)
    return [main, *named.values()]


def _parts(value: Any) -> Iterator[tuple[str, str, Any]]:
    """The arrays and objects in a JSON value that have items, each with its place and its key,
    outer ones first. Of arrays, only those with one item are looked into."""
    queue: deque[tuple[str, str, Any]] = deque([("", "", value)])
    seen = 0
    while queue and seen < _MOST_PLACES:
        place, key, part = queue.popleft()
        seen += 1
        if not isinstance(part, dict | list) or not part:
            continue
        yield place, key, part
        if place.count("/") >= MAX_DEPTH:
            continue
        if isinstance(part, dict):
            queue.extend((f"{place}/{escaped(name)}", name, item) for name, item in part.items())
        elif len(part) == 1:
            queue.append((f"{place}/0", "", part[0]))


def _rank(value: Any) -> tuple[int, int]:
    """How likely a value is what a document is about: arrays of objects and objects of objects
    come before arrays of arrays, larger ones before smaller ones; (0, 0) for anything else."""
    if isinstance(value, dict):
        return (2, len(value)) if _has_records(value) else (0, 0)
    if any(isinstance(item, dict) for item in value[:_SAMPLED]):
        return 2, len(value)
    return (1, len(value)) if isinstance(value[0], list) else (0, 0)


def _records(content: Content) -> Iterator[Any]:
    """The values on the lines of JSONL. Invalid lines are left out."""
    for number, data in lines(content):
        if data is not None:
            with suppress(InvalidArgument, LimitExceeded):
                yield parse(data, f"line {number}")


def _in_csv(text: str, separator: str) -> list[Row]:
    """The rows of CSV, with the columns that its header names. A first row with a number, or with
    a time at its start, is data."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        cells = [row for row in reader if row]
    except csv.Error as error:
        raise InvalidArgument(f"the content cannot be read as a table: {error}") from error
    if not cells:
        return []
    header, below = cells[0], cells[1:]
    if any(number_of(cell) is not None for cell in header) or starts_with_time(text[:_START]):
        header, below = [f"column{at}" for at in range(len(header))], cells
    names = distinct([name.strip() or f"column{at}" for at, name in enumerate(header)])
    return [dict(zip(names, row, strict=False)) for row in below]


def _separator(text: str, media_type: str) -> str:
    """What separates the cells of CSV: the candidate that is most frequent in its first line."""
    if media_type in TSV:
        return "\t"
    first = text[: text.find("\n")] if "\n" in text else text
    return max(",;\t|", key=first.count)


def _in_text(text: str) -> list[Found]:
    items, note = documents_in(text)
    if items:
        return [Found(MAIN, items, note=note)]
    return _numbered(text_tables(text))


def _numbered(tables: list[list[Row]]) -> list[Found]:
    """Several tables in the order of the text. The main one is the one with the most rows."""
    if not tables:
        return []
    numbered = [
        Found(f"table_{number}", rows, f"/table/{number}") for number, rows in enumerate(tables, 1)
    ]
    if len(tables) == 1:
        return [Found(MAIN, tables[0], "/table/1"), *numbered]
    largest = max(numbered, key=lambda found: len(found.value))
    note = f"artifact is #{largest.place}, the largest of {len(tables)} tables"
    return [Found(MAIN, largest.value, largest.place, note), *numbered]


def encoded_rows(rows: list[Row]) -> bytes:
    """Rows as a JSON array, as SQL loads it."""
    try:
        text = json.dumps(rows, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # NaN or an infinity, which JSON does not have
        plain = json.loads(json.dumps(rows, default=str), parse_constant=lambda _: None)
        text = json.dumps(plain, ensure_ascii=False)
    return encode_text(text)
