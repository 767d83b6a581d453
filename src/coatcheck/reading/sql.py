"""SQL on tables (CSV, TSV, JSON arrays, JSONL, Parquet, sheets) in a locked-down child process;
needs the extra `sql`.

Only tables can be queried: a log, prose or code is an error, since its first line would be taken
for a header. Rows in Python's `repr`, and JSON after lines of text, are converted to JSON first
(`json_content.rows`). The statement sees the table `artifact`, and others under names given by the
caller, usually `"art:…"`. The result is CSV. No statement can reach a file, the network, a setting
or this process.

The child loads the tables, locks the database, and only then looks at the statement. Three walls,
each enough by itself: the statement's syntax tree may contain only the given tables and harmless
functions; the database can no longer use files, network, extensions or settings, in a read-only
transaction; and the process is confined. A loaded database is kept for the next call on the same
contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
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
    starts_with_time,
)
from coatcheck.previews.excerpts import count, line
from coatcheck.reading.json_content import DOCUMENT, MAX_ROWS, lines
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Message, Pool, serve

if TYPE_CHECKING:
    import duckdb

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
_ROWS: Final = "rows"  # text that is converted to a JSON array first
_INSTEAD: Final = 'read it with grep="…" or lines="1:80"; ' + _TABULAR

_LOADING: Final = (
    "temp_directory=''", "max_temp_directory_size='0KiB'", "autoinstall_known_extensions=false",
    "autoload_known_extensions=false", "allow_community_extensions=false",
    "allow_persistent_secrets=false", "python_enable_replacements=false",
    "enable_external_file_cache=false",
)  # fmt: skip
_LOCKING: Final = (
    "disabled_filesystems='LocalFileSystem'",
    "enable_external_access=false",
    "lock_configuration=true",
)
_TABLE_FUNCTIONS: Final = frozenset(
    {"range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"}
)
_FORBIDDEN: Final = frozenset(
    {"getenv", "current_setting", "getvariable", "write_log", "parse_duckdb_log_message",
     "sleep_ms", "pg_sleep", "nextval", "currval", "setval", "json_serialize_plan",
     "json_execute_serialized_sql", "query", "query_table"}
)  # fmt: skip
# DuckDB aborts if it cannot read these.
_MACHINE: Final = ("/proc/self/cgroup", "/sys/fs/cgroup", "/sys/devices/system/cpu")
_NESTED: Final = frozenset({"list", "array", "struct", "map", "union", "variant"})
# The part of a node in which its own name is in scope.
_RECURSIVE: Final = {"RECURSIVE_CTE_NODE": "right", "CTE_NODE": "child"}
_QUOTED: Final = re.compile(r'[",\r\n]')
_SEPARATOR: Final = re.compile(r"[,;\t|]")
_START: Final = 64
_BATCH: Final = 1_000
_ONE_SELECT: Final = "write one SELECT statement, e.g. SELECT count(*) FROM artifact"


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


pool: Final = Pool("coatcheck.reading.sql", margin=1 << 30, extra="sql", package="duckdb")


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
            if form == _ROWS:
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
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if start[:1] == b"[":
            return _ROWS if start[1:].lstrip()[:1] == b"[" and content.size <= MAX_ROWS else "array"
        if _is_lines(content):
            return "newline_delimited"
        raise InvalidArgument(
            f"{clip(name)} is a JSON object, not an array of rows", hint=_inside(content)
        )
    if not is_text(media) and bare not in _CSV:
        raise InvalidArgument(f"{clip(name)} is {bare}: not a table", hint=_TABULAR)
    encoding = encoding_of(head)
    if bare not in _CSV + _TSV:  # not declared as a table: the content decides
        look = decode_head(content.read(0, _HEAD))
        tail = (
            decode_head(content.read(max(0, content.size - 64), 64)) if content.size > 64 else look
        )
        bare = sniff_text(look, tail, None, look if content.size <= _HEAD else None)
        if bare == JSONL:
            return "newline_delimited"
        if bare == REPR or (
            bare not in _CSV + _TSV and content.size <= MAX_ROWS and DOCUMENT.search(look)
        ):
            return _ROWS
        if bare not in _CSV + _TSV:
            raise InvalidArgument(f"{clip(name)} is {essence(media)}: not a table", hint=_INSTEAD)
    if encoding.unit > 2:
        raise InvalidArgument(
            f"{clip(name)} is {encoding.name}, which SQL cannot read", hint="read it with lines"
        )
    return f"{'tsv' if bare in _TSV else 'csv'} {'utf-16' if encoding.is_wide else ''}".strip()


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


# The child process


@dataclass(slots=True)
class _Loaded:
    """The one database that this process keeps."""

    key: str = ""
    database: duckdb.DuckDBPyConnection | None = None
    note: str = ""

    def drop(self) -> None:
        if self.database is not None:
            self.database.close()
        self.key, self.database, self.note = "", None, ""


_loaded = _Loaded()


def main(folder: str) -> None:
    _warm()
    serve(folder, partial(answer, folder), forget=_loaded.drop, also=_MACHINE)


def _warm() -> None:
    """Run one query, so that the library imports everything before files are out of reach."""
    import duckdb

    database = duckdb.connect(":memory:")
    database.execute("SELECT CAST($text AS VARCHAR), to_json([1])", {"text": ""}).fetchmany(1)
    database.close()  # and its threads, which would not be confined


def answer(folder: str, message: Message, _: list[Content]) -> Message:
    import duckdb

    sql, tables, limits = (message["arguments"][key] for key in ("sql", "tables", "limits"))
    if _loaded.key != message["loaded"] or _loaded.database is None:
        if not message["files"]:
            return {"need": True}
        _loaded.drop()
        try:
            _loaded.database, _loaded.note = _load(tables, limits, folder)
            _loaded.key = message["loaded"]
        except duckdb.Error as error:
            raise _refusal(error, folder, "the content cannot be read as a table: ") from error
    connection = _loaded.database.cursor()
    timer = threading.Timer(limits["seconds"], connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        return _run(connection, sql, tables, limits) | {"loaded": _loaded.key, "note": _loaded.note}
    except duckdb.Error as error:
        hint = (
            _columns(_loaded.database) if isinstance(error, duckdb.BinderException) else _ONE_SELECT
        )
        raise _refusal(error, folder, hint=hint) from error
    finally:
        timer.cancel()
        connection.close()


def _load(
    tables: list[Message], limits: Message, folder: str
) -> tuple[duckdb.DuckDBPyConnection, str]:
    """Load the tables into a new database in memory, then lock it."""
    import duckdb

    database = duckdb.connect(":memory:")
    try:
        for setting in (
            *_LOADING,
            f"memory_limit='{limits['memory']}B'",
            f"threads={limits['threads']}",
        ):
            database.execute("SET " + setting)
        notes = [_load_one(database, table, folder) for table in tables]
        for setting in _LOCKING:
            database.execute("SET " + setting)
    except BaseException:
        database.close()
        raise
    return database, "; ".join(filter(None, notes))


def _load_one(database: duckdb.DuckDBPyConnection, table: Message, folder: str) -> str:
    import duckdb

    name = _name(table["name"])
    if table["same_as"]:
        database.execute(f"CREATE VIEW {name} AS FROM {_name(table['same_as'])}")
        return ""
    path = os.path.join(folder, table["file"])
    form = table["format"]
    is_csv = form.startswith("csv")
    try:
        *attempts, last = _readers(form, _csv_options(path) if is_csv else "")
        for reader, note in attempts:
            with suppress(duckdb.ConversionException, duckdb.InvalidInputException):
                database.execute(f"CREATE OR REPLACE TABLE {name} AS FROM {reader}", {"path": path})
                if is_csv and (separator := _one_column(database, name)):
                    *_, last = _readers(form, f", delim='{separator}'")
                    break
                return (
                    _skipped(database, path) if form == "csv" else _as_texts(database, name)
                ) or note
        database.execute(f"CREATE OR REPLACE TABLE {name} AS FROM {last[0]}", {"path": path})
        return _as_texts(database, name) or last[1]
    finally:
        os.unlink(path)


def _csv_options(path: str) -> str:
    """Options for a file that begins with a time: a log with commas, whose first line is not a
    header."""
    with open(path, "rb") as file:
        start = file.read(_START).decode("utf-8", "ignore")  # no other codec can be imported here
    return ", header=false" if starts_with_time(start) else ""


def _one_column(database: duckdb.DuckDBPyConnection, name: str) -> str:
    """The separator in the name of the only column, which was not detected since the rows differ in
    length."""
    columns = [column for column, *_ in database.execute(f"DESCRIBE {name}").fetchall()]
    return (
        max(",;\t|", key=columns[0].count)
        if len(columns) == 1 and _SEPARATOR.search(columns[0])
        else ""
    )


def _skipped(database: duckdb.DuckDBPyConnection, path: str) -> str:
    """A note about lines before the header."""
    row = database.execute("SELECT SkipRows FROM sniff_csv($path)", {"path": path}).fetchone()
    return f"{count(row[0], 'line')} before the header left out" if row and row[0] else ""


def _as_texts(database: duckdb.DuckDBPyConnection, name: str) -> str:
    """Convert columns of texts and numbers to text, since `column = 'a'` is an error in a column of
    type JSON. Columns with objects or arrays stay as they are, for `column->>'$.key'`. Return a
    note."""
    mixed = []
    for column, kind, *_ in database.execute(f"DESCRIBE {name}").fetchall():
        at = _name(column)
        nested = f"SELECT 1 FROM {name} WHERE json_type({at}) IN ('OBJECT', 'ARRAY') LIMIT 1"  # noqa: S608
        if kind == "JSON" and not database.execute(nested).fetchone():
            database.execute(f"ALTER TABLE {name} ALTER {at} TYPE VARCHAR USING {at}->>'$'")
            mixed.append(at)
    return f"{', '.join(mixed)[:200]} with values of several types: as text" if mixed else ""


def _readers(form: str, options: str = "") -> list[tuple[str, str]]:
    """Ways to read a format, the strictest first, each with a note for the result."""
    kind, _, encoding = form.partition(" ")
    if kind == "parquet":
        return [("read_parquet($path)", "")]
    if kind in ("csv", "tsv"):
        source = (
            "read_csv($path"
            + ", delim='\t'" * (kind == "tsv")
            + f", encoding='{encoding}'" * bool(encoding)
        )
        source += options
        lenient = ", all_varchar=true, strict_mode=false, null_padding=true"
        note = "irregular rows: every column is text, short rows are filled with NULL"
    else:
        source = f"read_json($path, format='{'array' if kind == _ROWS else kind}'"
        by_line = kind == "newline_delimited"
        lenient = ", ignore_errors=true" if by_line else ", maximum_depth=1"
        note = "records that do not fit are NULL" if by_line else "nested values are JSON text"
    sampled = f"{source}, sample_size=-1"
    return [(f"{source})", ""), (f"{sampled})", ""), (f"{sampled}{lenient})", note)]


def _run(
    connection: duckdb.DuckDBPyConnection, sql: str, tables: list[Message], limits: Message
) -> Message:
    import duckdb

    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise InvalidArgument(f"expected one statement, got {len(statements)}", hint=_ONE_SELECT)
    statement = statements[0]
    if statement.type != duckdb.StatementType.SELECT:
        kind = str(statement.type).rpartition(".")[2]
        pivot = "; a PIVOT needs its values: ON column IN ('a', 'b')" if kind == "MULTI" else ""
        raise InvalidArgument(f"only SELECT is allowed here, got {kind}", hint=_ONE_SELECT + pivot)
    if statement.named_parameters:
        raise InvalidArgument(
            "the statement has parameters, which cannot be used here", hint=_ONE_SELECT
        )
    bare = statement.query.strip().rstrip(";")
    known = {table["name"].casefold() for table in tables}
    _inspect(connection, bare, known)
    connection.execute("BEGIN TRANSACTION READ ONLY")
    relation = connection.query(bare)
    columns, types = relation.columns, relation.types
    # Every value is converted to text: Python has no type for some, and text is what we need.
    places = [f"c{index}" for index in range(len(columns))]
    texts = ", ".join(
        f"CAST(to_json({place}) AS VARCHAR)"
        if column_type.id in _NESTED
        else f"CAST({place} AS VARCHAR)"
        for place, column_type in zip(places, types, strict=True)
    )
    wrapped = f"SELECT {texts} FROM ({bare}\n) AS answer({', '.join(places)})"  # noqa: S608 - inspected next
    _inspect(connection, wrapped, known)
    return _gather(connection.execute(wrapped), columns, limits)


def _inspect(connection: duckdb.DuckDBPyConnection, sql: str, known: set[str]) -> None:
    """Refuse a statement whose tree contains a table that was not given, or a function that is not
    allowed."""
    row = connection.execute(
        "SELECT json_serialize_sql(CAST($sql AS VARCHAR))", {"sql": sql}
    ).fetchone()
    tree = json.loads(row[0]) if row else {}
    if tree.get("error", True) or len(tree.get("statements", ())) != 1:
        raise InvalidArgument(
            f"only SELECT is allowed here: {tree.get('error_message', '')}", hint=_ONE_SELECT
        )
    for node, local in _nodes(tree["statements"]):
        kind = node.get("type")
        if kind == "TABLE_FUNCTION":
            called = str(node["function"].get("function_name", "")).casefold()
            if called not in _TABLE_FUNCTIONS:
                reason = f"{called}() is not allowed here: only the given tables can be read"
                raise InvalidArgument(reason, hint=_tables(known))
        elif kind == "BASE_TABLE":
            wanted = str(node.get("table_name", ""))
            qualified = node.get("schema_name") or node.get("catalog_name")
            if qualified or (wanted.casefold() not in known and wanted.casefold() not in local):
                full = ".".join(
                    filter(None, [node.get("catalog_name"), node.get("schema_name"), wanted])
                )
                raise InvalidArgument(f"there is no table {full[:80]!r}", hint=_tables(known))
        elif kind == "SHOW_REF" and not node.get("query"):
            raise InvalidArgument("SHOW is not allowed here", hint=_tables(known))
        elif str(kind).endswith("_QUERY_NODE") or kind in (
            "INSERT_NODE",
            "UPDATE_NODE",
            "DELETE_NODE",
        ):
            raise InvalidArgument("only SELECT is allowed here, also in WITH", hint=_ONE_SELECT)
        if str(node.get("function_name", "")).casefold() in _FORBIDDEN:
            raise InvalidArgument(
                f"{node['function_name']}() is not allowed here", hint=_ONE_SELECT
            )


def _nodes(tree: Any) -> Iterator[tuple[Message, frozenset[str]]]:
    """Yield every node of a statement's tree, with the names from WITH that are in scope there.

    A name is in scope in the query that WITH belongs to, and in the queries that WITH defines after
    it. Within its own query it is in scope only in the recursive part; elsewhere it has its outer
    meaning."""
    stack: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
    while stack:
        at, names = stack.pop()
        if isinstance(at, list):
            stack.extend((item, names) for item in at)
        if not isinstance(at, dict):
            continue
        yield at, names
        given = at.get("cte_map")
        for entry in given.get("map", ()) if isinstance(given, dict) else ():
            stack.append((entry["value"], names))
            names |= {str(entry["key"]).casefold()}
        own = names | {str(at["cte_name"]).casefold()} if at.get("cte_name") else names
        for key, value in at.items():
            if key != "cte_map":
                stack.append((value, own if _RECURSIVE.get(str(at.get("type"))) == key else names))


def _tables(known: set[str]) -> str:
    return (
        "tables here: "
        + ", ".join(name if name.isidentifier() else f'"{name}"' for name in sorted(known))[:300]
    )


def _gather(result: Any, columns: list[str], limits: Message) -> Message:
    """Format the result as CSV: NULL is empty, an empty text is `\"\"`. Only whole rows, as many as
    fit."""
    lines = [",".join(map(_cell, columns))]
    size, rows, more, widest = len(lines[0]), 0, False, 0
    while not more and (batch := result.fetchmany(_BATCH)):
        for row in batch:
            text = ",".join(map(_cell, row))
            if rows == limits["rows"] or size + len(text) + 1 > limits["chars"]:
                more, widest = True, len(text)
                break
            lines.append(text)
            size += len(text) + 1
            rows += 1
    return {
        "text": "\n".join(lines),
        "rows": rows,
        "columns": len(columns),
        "more": more,
        "widest": widest,
    }


def _cell(value: str | None) -> str:
    if value is None:
        return ""
    if not value or _QUOTED.search(value):
        return '"' + value.replace('"', '""') + '"'
    return value


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _columns(database: duckdb.DuckDBPyConnection) -> str:
    """List the columns of the tables, for a hint."""
    rows = (
        database.cursor()
        .execute("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal")
        .fetchall()
    )
    several = len({table for table, _ in rows}) > 1
    columns = ", ".join(
        _name(table) * several + "." * several + _name(column) for table, column in rows
    )
    return "columns here: " + (columns if len(columns) <= 400 else columns[:400] + "…")


def _refusal(error: duckdb.Error, folder: str, lead: str = "", hint: str = "") -> Exception:
    import duckdb

    narrower = "filter or aggregate before you join or sort"
    if isinstance(error, duckdb.OutOfMemoryException):
        return LimitExceeded("this takes more memory than allowed", hint=narrower)
    if isinstance(error, duckdb.InterruptException):
        return LimitExceeded("this took more time than allowed", hint=narrower)
    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        sys.exit(3)  # the database is unusable, and so is this process
    return InvalidArgument(
        lead + " ".join(str(error).replace(folder + os.sep, "").split()), hint=hint
    )
