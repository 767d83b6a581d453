"""SQL on the tables of artifacts in a locked-down child process; needs the extra `sql`.

The statement sees the main table of the artifact as `artifact`, the other tables in it by their
names (`coatcheck.reading.tables`), its lines as `lines(n, text)`, and other artifacts of the
session by their pointers or names. The result is CSV. No statement can reach a file, the network, a
setting or this process.

The child (`sql_child`) reads CSV, TSV, JSON arrays of objects, JSONL and Parquet itself. Everything
else is converted to JSON rows first (`heavy.table`). Only the tables that a statement names are
loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip, digest_of, is_pointer
from coatcheck.media import (
    JSON,
    JSONL,
    decode_head,
    decoded,
    encoding_of,
    essence,
    is_json,
    is_jsonl,
    is_text,
    sniff_text,
)
from coatcheck.previews.excerpts import count, line
from coatcheck.reading.json_content import MAX_BYTES, MAX_ROWS, lines
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Pool
from coatcheck.reading.sql_child import ROWS
from coatcheck.reading.tables import CSV, TSV
from coatcheck.reading.text import recognized
from coatcheck.sql_types import quoted

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession

TABLE: Final = "artifact"
MAX_SQL: Final = 50_000
_STARTS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|FROM|VALUES|DESCRIBE|SUMMARIZE|PIVOT|UNPIVOT"
    r"|TABLE)\b",
    re.DOTALL | re.IGNORECASE,
)
_PARQUET: Final = ("application/vnd.apache.parquet", "application/x-parquet", "application/parquet")
_NUMBERED: Final = re.compile(r"table_\d+", re.IGNORECASE)
_HEAD: Final = 64 << 10  # bytes used to recognize a table
_LINES: Final = "lines"
_MAX_LINES: Final = 256 << 20  # bytes of a text whose lines are a table
_TABULAR: Final = (
    "SQL reads CSV, TSV, JSON, JSONL, Parquet, and tables, records and columns in text; any text "
    "is the table lines(n, text)"
)
_INSTEAD: Final = 'read it with grep="…" or lines="1:80", or query its lines: SELECT … FROM lines'


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


@dataclass(frozen=True, slots=True)
class Source:
    """A table: its content, and its name there."""

    content: Content
    table: str = TABLE


def query(session: CoreSession, content: Content, sql: str) -> QueryResult:
    """Run one SELECT on the tables of a content and of other artifacts of the session."""
    with ExitStack() as stack:
        tables: dict[str, Source] = {}
        notes = []
        names = _names_in(sql)
        for name in names:
            tables[name], note = _resolved(session, content, name, names, stack)
            notes.append(note)
        result = run_sql(sql, tables)
    return replace(result, note="; ".join(filter(None, (result.note, *notes))))


def _names_in(sql: str) -> list[str]:
    """The names of the tables that a statement needs."""
    _check_length(sql)
    limits = SqlLimits()
    reply = pool.ask(
        {"names_in": sql}, seconds=limits.seconds, memory=limits.memory, max_chars=len(sql) + 1_000
    )
    return [str(name) for name in reply["names"]]


def _resolved(
    session: CoreSession, content: Content, name: str, names: list[str], stack: ExitStack
) -> tuple[Source, str]:
    """The table of a name, and a note: one of the content, else the artifact of that name or
    pointer, else the main table of the content."""
    from coatcheck.reading import source_of

    if name.casefold() == TABLE:
        return Source(content), ""
    if is_pointer(name):
        return Source(stack.enter_context(source_of(session, name).content)), ""
    try:
        return _own_table(content, name), ""
    except InvalidArgument as error:
        missing = error
    with suppress(CoatcheckError):
        return Source(stack.enter_context(source_of(session, name).content)), ""
    is_exact = recognized(content)[1] == "sheets" or _NUMBERED.fullmatch(name)
    if is_exact or any(other.casefold() == TABLE for other in names):
        raise missing
    return Source(content), f"{name} is artifact"


def _own_table(content: Content, name: str) -> Source:
    """A table of a content. Raises `InvalidArgument` with the names of those that it has."""
    content, form = recognized(content)
    if form == "sheets":
        return _sheet(content, name)
    if form == "other":
        raise _no_table(name, [TABLE])
    is_document = form in ("text", "page") and content.size <= MAX_BYTES
    if name.casefold() == _LINES:
        if is_document and is_json(content.ref.media_type):
            with suppress(CoatcheckError):  # a part of it may have this name
                return _inner_table(content, name)
        return Source(content, _LINES)
    if not is_document:
        raise _no_table(name, [TABLE, _LINES])
    try:
        return _inner_table(content, name)
    except InvalidArgument as error:
        hint = f"{error.hint}, {_LINES}" if error.hint else f"tables here: {_LINES}"
        raise InvalidArgument(error.message, hint=hint) from error


def _sheet(content: Content, name: str) -> Source:
    from coatcheck.reading import sheets  # on demand: the child needs none of it

    named, _ = sheets.tables(content, TABLE)
    if not any(sheet.casefold() == name.casefold() for sheet in named):
        raise _no_table(name, list(named))
    return Source(content, name)


def _inner_table(content: Content, name: str) -> Source:
    """A table inside a document or a text, as JSON rows."""
    from coatcheck.reading import heavy  # on demand: the child needs none of it

    data, _ = heavy.table(content, name)
    ref = replace(content.ref, artifact_id=digest_of(data), size_bytes=len(data), media_type=JSON)
    return Source(Content.of(ref, data))


def _no_table(name: str, known: list[str]) -> InvalidArgument:
    names = [table if table.isidentifier() else quoted(table) for table in known]
    hint = "tables here: " + line(", ".join(names), 300) if known else ""
    return InvalidArgument(f"there is no table {clip(name, 80)}", hint=hint)


def run_sql(
    sql: str,
    tables: Mapping[str, Content | Source],
    *,
    limits: SqlLimits = SqlLimits(),  # noqa: B008
) -> QueryResult:
    """Run one SELECT on the given tables. The result is CSV: NULL is empty, an empty text is two
    quotes."""
    _check_length(sql)
    sources = {
        name: one if isinstance(one, Source) else Source(one) for name, one in tables.items()
    }
    size = sum(one.content.size for one in sources.values())
    if size > limits.input_bytes:
        raise TooLarge(
            f"the tables have {size:,} bytes, the limit for SQL is {limits.input_bytes:,}"
        )
    sources, notes = _with_sheets(sources)
    described, files, more = _describe(sources)
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
    return _result(reply, limits, [*notes, *more])


def _check_length(sql: str) -> None:
    if len(sql) > MAX_SQL:
        raise InvalidArgument(
            f"the statement has {len(sql):,} characters, the limit is {MAX_SQL:,}"
        )


def _with_sheets(tables: Mapping[str, Source]) -> tuple[dict[str, Source], list[str]]:
    """The tables, with each workbook replaced by the sheet that is meant, and notes."""
    from coatcheck.reading import sheets  # on demand: the child needs none of it

    found: dict[str, Source] = {}
    notes: list[str] = []
    for name, source in tables.items():
        found[name] = source
        if recognized(source.content)[1] == "sheets":
            inside, note = sheets.tables(source.content, TABLE)
            notes.append(note)
            for sheet, content in inside.items():
                if sheet.casefold() == source.table.casefold():
                    found[name] = Source(content)
    return found, list(dict.fromkeys(notes))


def _describe(
    tables: Mapping[str, Source],
) -> tuple[list[dict[str, str]], dict[str, Content], list[str]]:
    """Descriptions of the tables for the child, the contents by the names of their files, and notes
    for the result."""
    described, notes = [], []
    files: dict[str, Content] = {}
    first: dict[tuple[str, str], str] = {}
    for name, source in tables.items():
        form = _format(source, name)
        # Tables that are converted differ by their names in the content.
        key = (source.content.ref.artifact_id, f"{form} {source.table}")
        file = f"{len(files)}.data"
        described.append(
            {
                "name": name,
                "format": form,
                "file": file,
                "same_as": first.get(key, ""),
                "id": "/".join(key),
            }
        )
        if key not in first:
            first[key] = name
            files[file], note = _to_load(source, name, form)
            notes.append(note)
    return described, files, notes


def _to_load(source: Source, name: str, form: str) -> tuple[Content, str]:
    """The content that the child reads, and a note about what was left out."""
    content = source.content
    if form == ROWS:
        from coatcheck.reading import heavy  # on demand: the child needs none of it

        try:
            data, note = heavy.table(content, TABLE)
        except InvalidArgument as error:
            raise _not_a_table(content, name, error) from error
    elif form == _LINES:
        data, note = _text_of(content), ""
    else:
        return content, ""
    return Content.of(replace(content.ref, size_bytes=len(data)), data), note


def _text_of(content: Content) -> bytes:
    """The text whose lines are a table, as UTF-8."""
    if content.size > _MAX_LINES:
        raise TooLarge(
            f"the artifact has {content.size:,} bytes, the limit for its lines is {_MAX_LINES:,}",
            hint="read it with lines or grep",
        )
    content, form = recognized(content)
    if form in ("pdf", "office"):
        from coatcheck.reading import documents

        content, _ = documents.as_text(content, form, is_searched=False)
    return decoded(content.read(0, content.size)).encode("utf-8", "replace")


def _not_a_table(content: Content, name: str, error: InvalidArgument) -> InvalidArgument:
    media_type = content.ref.media_type
    if is_json(media_type):
        return InvalidArgument(
            f"the content cannot be read as a table: {error.message}", hint=error.hint
        )
    return InvalidArgument(f"{clip(name)} is {essence(media_type)}: not a table", hint=_INSTEAD)


def _format(source: Source, name: str) -> str:
    """How the child reads a table: the name of the format, and its encoding."""
    content = source.content
    media = content.ref.media_type
    if not content.size:
        raise InvalidArgument(f"{clip(name)} is empty: it has no rows or columns")
    if source.table.casefold() == _LINES:
        return _LINES
    if essence(media) in _PARQUET:
        return "parquet"
    if is_jsonl(media):
        first = next((data for _, data in lines(content)), None) or b"{"
        is_small = content.size <= MAX_ROWS
        return ROWS if is_small and not first.lstrip().startswith(b"{") else "newline_delimited"
    if is_json(media):
        return _format_of_json(content)
    if not is_text(media) and essence(media) not in CSV:
        raise InvalidArgument(f"{clip(name)} is {essence(media)}: not a table", hint=_TABULAR)
    return _format_of_text(content, name)


def _format_of_json(content: Content) -> str:
    start = content.read(0, 4_096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[" and (start[1:].lstrip()[:1] == b"{" or content.size > MAX_ROWS):
        return "array"
    if start[:1] == b"{" and _is_lines(content):
        return "newline_delimited"
    return ROWS


def _format_of_text(content: Content, name: str) -> str:
    declared = essence(content.ref.media_type)
    bare = declared
    if declared not in CSV + TSV:  # the content decides
        bare = _sniffed(content, decode_head(content.read(0, _HEAD)))
        if bare == JSONL:
            return "newline_delimited"
        if bare not in CSV + TSV:
            return ROWS
    encoding = encoding_of(content.read(0, 4_096))
    if encoding.unit > 2:
        raise InvalidArgument(
            f"{clip(name)} is {encoding.name}, which SQL cannot read", hint="read it with lines"
        )
    form = "tsv" if bare in TSV else "csv"
    return f"{form} utf-16" if encoding.is_wide else form


def _sniffed(content: Content, look: str) -> str:
    """The media type of a text by its content."""
    tail = look
    if content.size > 64:
        tail = decode_head(content.read(content.size - 64, 64))
    return sniff_text(look, tail, None, look if content.size <= _HEAD else None)


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
