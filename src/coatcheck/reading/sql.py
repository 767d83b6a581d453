"""SQL on tables (CSV, TSV, JSON arrays, JSONL, Parquet), in a locked-down child process; needs the extra `sql`.

The statement sees the table `artifact`, and others under the names that the caller gives them, `"art:…"` as a rule. The
answer is CSV. Nothing that the statement says can reach a file, the network, a setting or this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import encoding_of, is_text
from coatcheck.reading.answer import LIMIT, Answer, count
from coatcheck.reading.child import Pool
from coatcheck.reading.documents import essence, is_json, is_jsonl
from coatcheck.streams import Content

TABLE: Final = "artifact"
MAX_SQL: Final = 50_000
_POINTER: Final = re.compile(r'"(art:[0-9a-f]{12,64})"')
_SKIPPED: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_STARTS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|FROM|VALUES|DESCRIBE|SUMMARIZE|PIVOT|UNPIVOT|TABLE)\b",
    re.DOTALL | re.IGNORECASE,
)
_PARQUET: Final = ("application/vnd.apache.parquet", "application/x-parquet", "application/parquet")
_TSV: Final = ("text/tab-separated-values", "text/tsv")
_TABULAR: Final = "SQL reads CSV, TSV, JSON arrays, JSONL and Parquet"


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one statement may take: time and memory with loading, rows and characters of the answer."""

    seconds: float = 20.0
    memory: int = 1 << 30
    threads: int = min(4, os.cpu_count() or 1)
    input_bytes: int = 1 << 30
    rows: int = 100_000
    chars: int = LIMIT


pool: Final = Pool("coatcheck.reading.sql_child", "sql", "duckdb")


def is_sql(query: str) -> bool:
    """Whether a query reads like SQL rather than like a path."""
    return _STARTS.match(query) is not None


def pointers_in(sql: str) -> list[str]:
    """The pointers that a statement names as tables (`FROM "art:…"`), each once, in the order in which they come."""
    return list(dict.fromkeys(_POINTER.findall(_SKIPPED.sub(" ", sql))))


def run_sql(sql: str, tables: Mapping[str, Content], *, limits: SqlLimits = SqlLimits()) -> Answer:  # noqa: B008
    """The result of one SELECT on the given tables, as CSV: NULL is empty, an empty text is two quotes."""
    if len(sql) > MAX_SQL:
        raise InvalidArgument(f"the statement has {len(sql):,} characters, {MAX_SQL:,} are allowed")
    if (size := sum(content.size for content in tables.values())) > limits.input_bytes:
        raise TooLarge(f"the tables have {size:,} bytes, SQL takes {limits.input_bytes:,} at most")
    described, contents = _describe(tables)
    holds = hashlib.sha256(json.dumps([described, limits.memory, limits.threads]).encode()).hexdigest()
    answer = pool.ask(
        {"sql": sql, "tables": described, "limits": asdict(limits)},
        contents,
        holds=holds,
        seconds=limits.seconds,
        most_chars=limits.chars,
    )
    return _answer(answer, limits)


def _describe(tables: Mapping[str, Content]) -> tuple[list[dict[str, str]], dict[str, Content]]:
    """How the child is told of the tables, and the contents by the names of the files that we choose for them."""
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
        raise InvalidArgument(f"{clip(name)} is empty: it has no rows and no columns")
    if bare in _PARQUET:
        return "parquet"
    head = content.read(0, 4_096)
    if is_jsonl(media):
        return "newline_delimited"
    if is_json(media):
        if not head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            raise InvalidArgument(
                f"{clip(name)} is a JSON object, not an array of rows",
                hint="select its rows with a JSONPath first ($.items[*]), and query what that gives",
            )
        return "array"
    if not is_text(media):
        raise InvalidArgument(f"{clip(name)} is {bare}: not a table", hint=_TABULAR)
    encoding = encoding_of(head)
    if encoding.unit > 2:
        raise InvalidArgument(f"{clip(name)} is {encoding.name}, which SQL cannot read", hint="read it by lines")
    return f"{'tsv' if bare in _TSV else 'csv'} {'utf-16' if encoding.is_wide else ''}".strip()


def _answer(told: Mapping[str, object], limits: SqlLimits) -> Answer:
    text, rows, columns = str(told["text"]), int(str(told["rows"])), int(str(told["columns"]))
    notes = [str(told.get("note", ""))]
    if told["more"]:
        if not rows:
            raise LimitExceeded(
                f"the first row alone has {int(str(told['widest'])):,} characters, {limits.chars:,} are allowed",
                hint="select fewer columns, or a part of a long one: substr(column, 1, 1000)",
            )
        notes.append("more rows are left out; use WHERE, LIMIT … OFFSET, or aggregate")
    shown = f"{'the first ' if told['more'] else ''}{count(rows, 'row')}, {count(columns, 'column')}"
    return Answer(text, "text/csv", shown, complete=not told["more"], note="; ".join(filter(None, notes)))
