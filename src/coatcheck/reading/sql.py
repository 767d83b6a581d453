"""SQL on tables (CSV, TSV, JSON arrays, JSONL, Parquet) in a locked-down child process; needs the extra `sql`.

Only tables can be queried: a log, prose or code is an error, since its first line would be taken for a header. The
statement sees the table `artifact`, and others under names given by the caller, usually `"art:…"`. The result is CSV.
No statement can reach a file, the network, a setting or this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import JSONL, decode_head, encoding_of, essence, is_json, is_jsonl, is_text, sniff_text
from coatcheck.previews.excerpts import count
from coatcheck.reading.json_content import lines
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Pool

TABLE: Final = "artifact"
MAX_SQL: Final = 50_000
_POINTER: Final = re.compile(r'"(art:[0-9a-f]{12,64})"')
_SKIPPED: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_STARTS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|FROM|VALUES|DESCRIBE|SUMMARIZE|PIVOT|UNPIVOT|TABLE)\b",
    re.DOTALL | re.IGNORECASE,
)
_PARQUET: Final = ("application/vnd.apache.parquet", "application/x-parquet", "application/parquet")
_CSV: Final = ("text/csv", "application/csv", "text/x-csv", "application/x-csv", "text/comma-separated-values")
_TSV: Final = ("text/tab-separated-values", "text/tsv")
_HEAD: Final = 64 << 10  # bytes used to recognize a table
_TABULAR: Final = "SQL reads CSV, TSV, JSON arrays of objects, JSONL and Parquet"
_INSTEAD: Final = 'read it with grep="…" or lines="1:80"; ' + _TABULAR


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Limits of one statement: time and memory including loading, rows and characters of the result."""

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
    """The pointers that a statement uses as tables (`FROM "art:…"`), each once, in order of appearance."""
    return list(dict.fromkeys(_POINTER.findall(_SKIPPED.sub(" ", sql))))


def run_sql(sql: str, tables: Mapping[str, Content], *, limits: SqlLimits = SqlLimits()) -> QueryResult:  # noqa: B008
    """Run one SELECT on the given tables. The result is CSV: NULL is empty, an empty text is two quotes."""
    if len(sql) > MAX_SQL:
        raise InvalidArgument(f"the statement has {len(sql):,} characters, the limit is {MAX_SQL:,}")
    if (size := sum(content.size for content in tables.values())) > limits.input_bytes:
        raise TooLarge(f"the tables have {size:,} bytes, the limit for SQL is {limits.input_bytes:,}")
    described, files = _describe(tables)
    loaded = hashlib.sha256(json.dumps([described, limits.memory, limits.threads]).encode()).hexdigest()
    reply = pool.ask(
        {"sql": sql, "tables": described, "limits": asdict(limits)},
        files=files,
        loaded=loaded,
        seconds=limits.seconds,
        cpu_seconds=limits.seconds * limits.threads,
        memory=limits.memory,
        max_chars=limits.chars,
    )
    return _result(reply, limits)


def _describe(tables: Mapping[str, Content]) -> tuple[list[dict[str, str]], dict[str, Content]]:
    """Descriptions of the tables for the child, and the contents by the names of their files."""
    described = []
    contents: dict[str, Content] = {}
    first: dict[tuple[str, str], str] = {}
    for name, content in tables.items():
        form = _format(content, name)
        key = (content.ref.artifact_id, form)
        file = f"{len(contents)}.data"
        described.append({"name": name, "format": form, "file": file, "same_as": first.get(key, ""), "id": key[0]})
        if key not in first:
            first[key] = name
            contents[file] = content
    return described, contents


def _format(content: Content, name: str) -> str:
    media = content.ref.media_type
    bare = essence(media)
    if not content.size:
        raise InvalidArgument(f"{clip(name)} is empty: it has no rows or columns")
    if bare in _PARQUET:
        return "parquet"
    if is_jsonl(media):
        return "newline_delimited"
    head = content.read(0, 4_096)
    if is_json(media):
        if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return "array"
        if _is_lines(content):
            return "newline_delimited"
        raise InvalidArgument(
            f"{clip(name)} is a JSON object, not an array of rows",
            hint="query the array inside it by a pointer with a fragment (art:…#/items), "
            "or select its rows with a JSONPath first ($.items[*]) and query the result",
        )
    if not is_text(media) and bare not in _CSV:
        raise InvalidArgument(f"{clip(name)} is {bare}: not a table", hint=_TABULAR)
    encoding = encoding_of(head)
    if bare not in _CSV + _TSV:  # not declared as a table: the content decides
        bare = sniff_text(decode_head(content.read(0, _HEAD)), "")
        if bare == JSONL:
            return "newline_delimited"
        if bare not in _CSV + _TSV:
            raise InvalidArgument(f"{clip(name)} is {essence(media)}: not a table", hint=_INSTEAD)
    if encoding.unit > 2:
        raise InvalidArgument(f"{clip(name)} is {encoding.name}, which SQL cannot read", hint="read it with lines")
    return f"{'tsv' if bare in _TSV else 'csv'} {'utf-16' if encoding.is_wide else ''}".strip()


def _is_lines(content: Content) -> bool:
    """Whether content is JSONL despite its media type: an object on each of the first two lines."""
    objects = (line is not None and line.strip()[:1] + line.strip()[-1:] == b"{}" for _, line in lines(content))
    return all(next(objects, False) for _ in range(2))


def _result(reply: Mapping[str, Any], limits: SqlLimits) -> QueryResult:
    text, rows, columns = str(reply["text"]), int(reply["rows"]), int(reply["columns"])
    notes = [str(reply.get("note", ""))]
    if reply["more"]:
        if not rows:
            raise LimitExceeded(
                f"the first row alone has {int(reply['widest']):,} characters, the limit is {limits.chars:,}",
                hint="select fewer columns, or a part of a long one: substr(column, 1, 1000)",
            )
        notes.append("more rows are left out; use WHERE, LIMIT … OFFSET, or aggregate")
    shown = f"{'the first ' if reply['more'] else ''}{count(rows, 'row')}, {count(columns, 'column')}"
    return QueryResult(text, "text/csv", shown, complete=not reply["more"], note="; ".join(filter(None, notes)))
