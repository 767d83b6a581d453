"""The child process that runs SQL: load the tables, lock the database, and only then look at the statement.

Three walls, each enough by itself: the statement's syntax tree may contain only the given tables and harmless
functions; the database can no longer use files, network, extensions or settings, in a read-only transaction; and the
process is confined. A loaded database is kept for the next call on the same contents.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import duckdb

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.reading.sandbox import Message, serve

_LOADING: Final = (
    "temp_directory=''",
    "max_temp_directory_size='0KiB'",
    "autoinstall_known_extensions=false",
    "autoload_known_extensions=false",
    "allow_community_extensions=false",
    "allow_persistent_secrets=false",
    "python_enable_replacements=false",
    "enable_external_file_cache=false",
)
_LOCKING: Final = ("disabled_filesystems='LocalFileSystem'", "enable_external_access=false", "lock_configuration=true")
_TABLE_FUNCTIONS: Final = frozenset(
    {"range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"}
)
_FORBIDDEN: Final = frozenset(
    {"getenv", "current_setting", "getvariable", "write_log", "parse_duckdb_log_message", "sleep_ms", "pg_sleep",
     "nextval", "currval", "setval", "json_serialize_plan", "json_execute_serialized_sql", "query", "query_table"}
)  # fmt: skip
# DuckDB aborts if it cannot read these.
_MACHINE: Final = ("/proc/self/cgroup", "/sys/fs/cgroup", "/sys/devices/system/cpu")
_NESTED: Final = frozenset({"list", "array", "struct", "map", "union", "variant"})
_RECURSIVE: Final = {
    "RECURSIVE_CTE_NODE": "right",
    "CTE_NODE": "child",
}  # the part in which the node's own name is in scope
_QUOTED: Final = re.compile(r'[",\r\n]')
_BATCH: Final = 1_000
_ONE_SELECT: Final = "write one SELECT statement, e.g. SELECT count(*) FROM artifact"


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
    database = duckdb.connect(":memory:")
    database.execute("SELECT CAST($text AS VARCHAR), to_json([1])", {"text": ""}).fetchmany(1)
    database.close()  # and its threads, which would not be confined


def answer(folder: str, message: Message, _: list[Content]) -> Message:
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
        hint = _columns(_loaded.database) if isinstance(error, duckdb.BinderException) else _ONE_SELECT
        raise _refusal(error, folder, hint=hint) from error
    finally:
        timer.cancel()
        connection.close()


def _load(tables: list[Message], limits: Message, folder: str) -> tuple[duckdb.DuckDBPyConnection, str]:
    """Load the tables into a new database in memory, then lock it."""
    database = duckdb.connect(":memory:")
    try:
        for setting in (*_LOADING, f"memory_limit='{limits['memory']}B'", f"threads={limits['threads']}"):
            database.execute("SET " + setting)
        notes = [_load_one(database, table, folder) for table in tables]
        for setting in _LOCKING:
            database.execute("SET " + setting)
    except BaseException:
        database.close()
        raise
    return database, "; ".join(filter(None, notes))


def _load_one(database: duckdb.DuckDBPyConnection, table: Message, folder: str) -> str:
    name = _name(table["name"])
    if table["same_as"]:
        database.execute(f"CREATE VIEW {name} AS FROM {_name(table['same_as'])}")
        return ""
    path = os.path.join(folder, table["file"])
    *attempts, last = _readers(table["format"])
    try:
        for reader, note in attempts:
            with suppress(duckdb.ConversionException, duckdb.InvalidInputException):
                database.execute(f"CREATE TABLE {name} AS FROM {reader}", {"path": path})
                return note
        database.execute(f"CREATE TABLE {name} AS FROM {last[0]}", {"path": path})
        return last[1]
    finally:
        os.unlink(path)


def _readers(form: str) -> list[tuple[str, str]]:
    """Ways to read a format, the strictest first, each with a note for the result."""
    kind, _, encoding = form.partition(" ")
    if kind == "parquet":
        return [("read_parquet($path)", "")]
    if kind in ("csv", "tsv"):
        source = "read_csv($path" + ", delim='\t'" * (kind == "tsv") + f", encoding='{encoding}'" * bool(encoding)
        lenient = ", all_varchar=true, strict_mode=false, null_padding=true"
        note = "irregular rows: every column is text, short rows are filled with NULL"
    else:
        source = f"read_json($path, format='{kind}'"
        by_line = kind == "newline_delimited"
        lenient = ", ignore_errors=true" if by_line else ", maximum_depth=1"
        note = "records that do not fit are NULL" if by_line else "nested values are JSON text"
    sampled = f"{source}, sample_size=-1"
    return [(f"{source})", ""), (f"{sampled})", ""), (f"{sampled}{lenient})", note)]


def _run(connection: duckdb.DuckDBPyConnection, sql: str, tables: list[Message], limits: Message) -> Message:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise InvalidArgument(f"expected one statement, got {len(statements)}", hint=_ONE_SELECT)
    statement = statements[0]
    if statement.type != duckdb.StatementType.SELECT:
        kind = str(statement.type).rpartition(".")[2]
        pivot = "; a PIVOT needs its values: ON column IN ('a', 'b')" if kind == "MULTI" else ""
        raise InvalidArgument(f"only SELECT is allowed here, got {kind}", hint=_ONE_SELECT + pivot)
    if statement.named_parameters:
        raise InvalidArgument("the statement has parameters, which cannot be used here", hint=_ONE_SELECT)
    bare = statement.query.strip().rstrip(";")
    known = {table["name"].casefold() for table in tables}
    _inspect(connection, bare, known)
    connection.execute("BEGIN TRANSACTION READ ONLY")
    relation = connection.query(bare)
    columns, types = relation.columns, relation.types
    # Every value is converted to text: Python has no type for some, and text is what we need.
    places = [f"c{index}" for index in range(len(columns))]
    texts = ", ".join(
        f"CAST(to_json({place}) AS VARCHAR)" if column_type.id in _NESTED else f"CAST({place} AS VARCHAR)"
        for place, column_type in zip(places, types, strict=True)
    )
    wrapped = f"SELECT {texts} FROM ({bare}\n) AS answer({', '.join(places)})"  # noqa: S608 - inspected next
    _inspect(connection, wrapped, known)
    return _gather(connection.execute(wrapped), columns, limits)


def _inspect(connection: duckdb.DuckDBPyConnection, sql: str, known: set[str]) -> None:
    """Refuse a statement whose tree contains a table that was not given, or a function that is not allowed."""
    row = connection.execute("SELECT json_serialize_sql(CAST($sql AS VARCHAR))", {"sql": sql}).fetchone()
    tree = json.loads(row[0]) if row else {}
    if tree.get("error", True) or len(tree.get("statements", ())) != 1:
        raise InvalidArgument(f"only SELECT is allowed here: {tree.get('error_message', '')}", hint=_ONE_SELECT)
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
                full = ".".join(filter(None, [node.get("catalog_name"), node.get("schema_name"), wanted]))
                raise InvalidArgument(f"there is no table {full[:80]!r}", hint=_tables(known))
        elif kind == "SHOW_REF" and not node.get("query"):
            raise InvalidArgument("SHOW is not allowed here", hint=_tables(known))
        elif str(kind).endswith("_QUERY_NODE") or kind in ("INSERT_NODE", "UPDATE_NODE", "DELETE_NODE"):
            raise InvalidArgument("only SELECT is allowed here, also in WITH", hint=_ONE_SELECT)
        if str(node.get("function_name", "")).casefold() in _FORBIDDEN:
            raise InvalidArgument(f"{node['function_name']}() is not allowed here", hint=_ONE_SELECT)


def _nodes(tree: Any) -> Iterator[tuple[Message, frozenset[str]]]:
    """Yield every node of a statement's tree, with the names from WITH that are in scope there.

    A name is in scope in the query that WITH belongs to, and in the queries that WITH defines after it. Within its own
    query it is in scope only in the recursive part; elsewhere it has its outer meaning."""
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
    return "tables here: " + ", ".join(name if name.isidentifier() else f'"{name}"' for name in sorted(known))[:300]


def _gather(result: Any, columns: list[str], limits: Message) -> Message:
    """Format the result as CSV: NULL is empty, an empty text is `\"\"`. Only whole rows, as many as fit."""
    lines = [",".join(map(_cell, columns))]
    size, rows, more, widest = len(lines[0]), 0, False, 0
    while not more and (batch := result.fetchmany(_BATCH)):
        for row in batch:
            line = ",".join(map(_cell, row))
            if rows == limits["rows"] or size + len(line) + 1 > limits["chars"]:
                more, widest = True, len(line)
                break
            lines.append(line)
            size += len(line) + 1
            rows += 1
    return {"text": "\n".join(lines), "rows": rows, "columns": len(columns), "more": more, "widest": widest}


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
        database.cursor().execute("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    )
    several = len({table for table, _ in rows}) > 1
    columns = ", ".join(_name(table) * several + "." * several + _name(column) for table, column in rows)
    return "columns here: " + (columns if len(columns) <= 400 else columns[:400] + "…")


def _refusal(error: duckdb.Error, folder: str, lead: str = "", hint: str = "") -> Exception:
    narrower = "filter or aggregate before you join or sort"
    if isinstance(error, duckdb.OutOfMemoryException):
        return LimitExceeded("this takes more memory than allowed", hint=narrower)
    if isinstance(error, duckdb.InterruptException):
        return LimitExceeded("this took more time than allowed", hint=narrower)
    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        sys.exit(3)  # the database is unusable, and so is this process
    return InvalidArgument(lead + " ".join(str(error).replace(folder + os.sep, "").split()), hint=hint)
