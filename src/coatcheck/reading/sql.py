"""SQL on tables (CSV, TSV, JSON arrays, JSONL, Parquet, sheets) in a locked-down child process;
needs the extra `sql`.

Only tables can be queried: a log, prose or code is an error, since its first line would be taken
for a header. Rows in Python's `repr`, and JSON after lines of text, are converted to JSON first
(`json_content.rows`). The statement sees the table `artifact`, and others under names given by the
caller, usually `"art:…"`. The result is CSV. No statement can reach a file, the network, a setting
or this process.

The child (`sql_child`) loads the tables, locks the database, and only then looks at the statement.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import (
    JSONL,
    REPR,
    decode_head,
    encoding_of,
    essence,
    is_json,
    is_jsonl,
    is_text,
    sniff_text,
)
from coatcheck.previews.excerpts import count, line
from coatcheck.reading.json_content import DOCUMENT, MAX_ROWS, lines
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Pool
from coatcheck.reading.sql_child import ROWS

if TYPE_CHECKING:
    pass

TABLE: Final = "artifact"
MAX_SQL: Final = 50_000
_POINTER: Final = re.compile(r'"(art:[0-9a-f]{12,64})"')
_SKIPPED: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_STARTS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|FROM|VALUES|DESCRIBE|SUMMARIZE|PIVOT|UNPIVOT"
    r"|TABLE)\b",
    re.DOTALL | re.IGNORECASE,
)
_PARQUET: Final = ("application/vnd.apache.parquet", "application/x-parquet", "application/parquet")
_CSV: Final = (
    "text/csv",
    "application/csv",
    "text/x-csv",
    "application/x-csv",
    "text/comma-separated-values",
)
_TSV: Final = ("text/tab-separated-values", "text/tsv")
_HEAD: Final = 64 << 10  # bytes used to recognize a table
_TABULAR: Final = "SQL reads CSV, TSV, JSON arrays of objects, JSONL and Parquet"
_INSTEAD: Final = 'read it with grep="…" or lines="1:80"; ' + _TABULAR


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Limits of one statement: time and memory including loading, rows and characters of the
    result."""

    seconds: float = 20.0
    memory: int = 1 << 30
    threads: int = min(4, os.cpu_count() or 1)
    input_bytes: int = 1 << 30
    rows: int = 100_000
    chars: int = MAX_RESULT


pool: Final = Pool("coatcheck.reading.sql_child", margin=1 << 30, extra="sql", package="duckdb")


def is_sql(query: str) -> bool:
    """Whether a query looks like SQL."""
    return _STARTS.match(query) is not None


def pointers_in(sql: str) -> list[str]:
    """The pointers that a statement uses as tables (`FROM "art:…"`), each once, in order of
    appearance."""
    return list(dict.fromkeys(_POINTER.findall(_SKIPPED.sub(" ", sql))))


def run_sql(
    sql: str,
    tables: Mapping[str, Content],
    *,
    limits: SqlLimits = SqlLimits(),  # noqa: B008
) -> QueryResult:
    """Run one SELECT on the given tables. The result is CSV: NULL is empty, an empty text is two
    quotes."""
    if len(sql) > MAX_SQL:
        raise InvalidArgument(
            f"the statement has {len(sql):,} characters, the limit is {MAX_SQL:,}"
        )
    if (size := sum(content.size for content in tables.values())) > limits.input_bytes:
        raise TooLarge(
            f"the tables have {size:,} bytes, the limit for SQL is {limits.input_bytes:,}"
        )
    tables, notes = _with_sheets(tables)
    described, files, more = _describe(tables)
    notes += more
    loaded = hashlib.sha256(
        json.dumps([described, limits.memory, limits.threads]).encode()
    ).hexdigest()
    reply = pool.ask(
        {"sql": sql, "tables": described, "limits": asdict(limits)},
        files=files,
        loaded=loaded,
        seconds=limits.seconds,
        cpu_seconds=limits.seconds * limits.threads,
        memory=limits.memory,
        max_chars=limits.chars,
    )
    return _result(reply, limits, notes)


def _with_sheets(tables: Mapping[str, Content]) -> tuple[dict[str, Content], list[str]]:
    """The tables, with each workbook replaced by its sheets: the first under its name, all under
    their own."""
    from coatcheck.reading import sheets  # on demand: the child needs none of it
    from coatcheck.reading.text import recognized

    found: dict[str, Content] = {}
    notes = []
    for name, content in tables.items():
        if recognized(content)[1] != "sheets":
            found[name] = content
            continue
        inside, note = sheets.tables(content, name)
        notes.append(note)
        found |= {
            sheet: table
            for sheet, table in inside.items()
            if sheet == name or sheet not in {*tables, *found}
        }
    return found, notes


def _describe(
    tables: Mapping[str, Content],
) -> tuple[list[dict[str, str]], dict[str, Content], list[str]]:
    """Descriptions of the tables for the child, the contents by the names of their files, and notes
    for the result."""
    described, notes = [], []
    contents: dict[str, Content] = {}
    first: dict[tuple[str, str], str] = {}
    for name, content in tables.items():
        form = _format(content, name)
        key = (content.ref.artifact_id, form)
        file = f"{len(contents)}.data"
        described.append(
            {
                "name": name,
                "format": form,
                "file": file,
                "same_as": first.get(key, ""),
                "id": key[0],
            }
        )
        if key not in first:
            first[key] = name
            if form == ROWS:
                content, note = _converted(content, name)
                notes.append(note)
            contents[file] = content
    return described, contents, notes


def _converted(content: Content, name: str) -> tuple[Content, str]:
    """The rows in a text as a content of JSON, and a note about what was left out."""
    from coatcheck.reading import heavy  # on demand: the child needs none of it

    try:
        data, note = heavy.rows(content)
    except InvalidArgument as error:
        if is_json(content.ref.media_type):
            raise InvalidArgument(
                f"the content cannot be read as a table: {error.message}"
            ) from error
        raise InvalidArgument(
            f"{clip(name)} is {essence(content.ref.media_type)}: not a table", hint=_INSTEAD
        ) from error
    return Content.of(replace(content.ref, size_bytes=len(data)), data), note


def _format(content: Content, name: str) -> str:
    """How the child reads a table: the name of the format, and its encoding."""
    media = content.ref.media_type
    if not content.size:
        raise InvalidArgument(f"{clip(name)} is empty: it has no rows or columns")
    if essence(media) in _PARQUET:
        return "parquet"
    if is_jsonl(media):
        return "newline_delimited"
    if is_json(media):
        return _format_of_json(content, name)
    if not is_text(media) and essence(media) not in _CSV:
        raise InvalidArgument(f"{clip(name)} is {essence(media)}: not a table", hint=_TABULAR)
    return _format_of_text(content, name)


def _format_of_json(content: Content, name: str) -> str:
    start = content.read(0, 4_096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[":
        is_nested = start[1:].lstrip()[:1] == b"["
        return ROWS if is_nested and content.size <= MAX_ROWS else "array"
    if _is_lines(content):
        return "newline_delimited"
    raise InvalidArgument(
        f"{clip(name)} is a JSON object, not an array of rows", hint=_inside(content)
    )


def _format_of_text(content: Content, name: str) -> str:
    declared = essence(content.ref.media_type)
    bare = declared
    if declared not in _CSV + _TSV:  # the content decides
        look = decode_head(content.read(0, _HEAD))
        bare = _sniffed(content, look)
        if bare == JSONL:
            return "newline_delimited"
        if bare not in _CSV + _TSV:
            if bare == REPR or (content.size <= MAX_ROWS and DOCUMENT.search(look)):
                return ROWS
            raise InvalidArgument(f"{clip(name)} is {declared}: not a table", hint=_INSTEAD)
    encoding = encoding_of(content.read(0, 4_096))
    if encoding.unit > 2:
        raise InvalidArgument(
            f"{clip(name)} is {encoding.name}, which SQL cannot read", hint="read it with lines"
        )
    form = "tsv" if bare in _TSV else "csv"
    return f"{form} utf-16" if encoding.is_wide else form


def _sniffed(content: Content, look: str) -> str:
    """The media type of a text by its content."""
    tail = look
    if content.size > 64:
        tail = decode_head(content.read(content.size - 64, 64))
    return sniff_text(look, tail, None, look if content.size <= _HEAD else None)


def _inside(content: Content) -> str:
    """The hint for an object: the pointer of its largest array."""
    from coatcheck.reading import heavy

    try:
        found = heavy.largest(content)
    except CoatcheckError:
        found = None
    if found is None:
        return "it has no rows: read it with a JSONPath ($.key) or grep"
    rows = count(found.length, "row") + (
        f" of {line(', '.join(found.columns), 200)}" if found.columns else ""
    )
    return f"query the array inside it: add #{line(found.pointer, 200)} to the pointer, for {rows}"


def _is_lines(content: Content) -> bool:
    """Whether content is JSONL despite its media type: an object on each of the first two lines."""
    objects = (
        one is not None and one.strip()[:1] + one.strip()[-1:] == b"{}" for _, one in lines(content)
    )
    return all(next(objects, False) for _ in range(2))


def _result(reply: Mapping[str, Any], limits: SqlLimits, notes: list[str]) -> QueryResult:
    text, rows, columns = str(reply["text"]), int(reply["rows"]), int(reply["columns"])
    notes = [*notes, str(reply.get("note", ""))]
    if reply["more"]:
        if not rows:
            raise LimitExceeded(
                f"the first row alone has {int(reply['widest']):,} characters, "
                f"the limit is {limits.chars:,}",
                hint="select fewer columns, or a part of a long one: substr(column, 1, 1000)",
            )
        notes.append("more rows are left out; use WHERE, LIMIT … OFFSET, or aggregate")
    shown = (
        f"{'the first ' if reply['more'] else ''}{count(rows, 'row')}, {count(columns, 'column')}"
    )
    return QueryResult(text, "text/csv", shown, note="; ".join(filter(None, notes)))
