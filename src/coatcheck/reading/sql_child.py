"""SQL in a child process: loads tables into a database, locks it, and runs one statement.

Three walls, each enough by itself: the statement's syntax tree may contain only the given tables
and harmless functions; the database can no longer use files, network, extensions or settings, in a
read-only transaction; and the process is confined. A loaded database is kept for the next call on
the same contents.
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
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.media import starts_with_time
from coatcheck.previews.excerpts import count, line
from coatcheck.reading.sandbox import Message, serve

if TYPE_CHECKING:
    import duckdb

# The lines of a text, without the line ends.
_LINES: Final = """(
    SELECT unnest(range(1, len(lines) + 1)) AS n, rtrim(unnest(lines), chr(13)) AS text FROM (
        SELECT string_split(left(content, length(content) - ends_with(content, chr(10))::INT),
            chr(10)) AS lines
        FROM read_text($path)))"""

ROWS: Final = "rows"
"""The format of text that is converted to a JSON array first."""

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
_WRITING: Final = ("INSERT_NODE", "UPDATE_NODE", "DELETE_NODE")
_QUOTED: Final = re.compile(r'[",\r\n]')
_SEPARATOR: Final = re.compile(r"[,;\t|]")
_START: Final = 64
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_TYPE: Final = 40
_LONGEST_COLUMNS: Final = 600
_BATCH: Final = 1_000
_ONE_SELECT: Final = (
    "write one SELECT statement in DuckDB's SQL, e.g. SELECT count(*) FROM artifact"
)


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

    arguments = message["arguments"]
    if "names_in" in arguments:
        return {"names": _names_in(arguments["names_in"], folder)}
    sql, tables, limits = (arguments[key] for key in ("sql", "tables", "limits"))
    if _loaded.key != message["loaded"] or _loaded.database is None:
        if tables and not message["files"]:
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
    except duckdb.ParserException as error:
        raise _refusal(error, folder, hint=_ONE_SELECT) from error
    except duckdb.Error as error:
        raise _refusal(error, folder, hint=_columns(_loaded.database)) from error
    finally:
        timer.cancel()
        connection.close()


@cache
def _parser() -> duckdb.DuckDBPyConnection:
    """An empty database, which parses statements. Kept, since one takes 30 ms to make."""
    import duckdb

    return duckdb.connect(":memory:", config={"threads": 1})


def _names_in(sql: str, folder: str) -> list[str]:
    """The names of the tables that a statement needs, each once."""
    import duckdb

    try:
        tree = _tree(_parser(), _single_select(_parser(), sql))
    except duckdb.Error as error:
        raise _refusal(error, folder, hint=_ONE_SELECT) from error
    names: dict[str, str] = {}
    for node, local in _nodes(tree):
        name = str(node.get("table_name", ""))
        is_local = name.casefold() in local
        is_qualified = node.get("schema_name") or node.get("catalog_name")
        if node.get("type") == "BASE_TABLE" and not is_local and not is_qualified:
            names.setdefault(name.casefold(), name)
    return list(names.values())


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
    """Load a table, or make a view of the one that has the same content. Return a note."""
    name = _name(table["name"])
    if table["same_as"]:
        database.execute(f"CREATE VIEW {name} AS FROM {_name(table['same_as'])}")
        return ""
    path = os.path.join(folder, table["file"])
    try:
        if table["format"].startswith("csv"):
            return _load_csv(database, name, table["format"], path)
        note = _first_that_works(database, name, _readers(table["format"]), path)
        return _set_types(database, name) or note
    finally:
        os.unlink(path)


def _load_csv(database: duckdb.DuckDBPyConnection, name: str, form: str, path: str) -> str:
    options = _csv_options(path)
    *strict, lenient = _readers(form, options)
    note = _first_that_works(database, name, [*strict, lenient], path)
    if note == lenient[1]:
        return note
    separator = _one_column(database, name)
    if separator:
        *_, lenient = _readers(form, f", delim='{separator}'")
        return _first_that_works(database, name, [lenient], path)
    return _skipped(database, path) if form == "csv" else ""


def _first_that_works(
    database: duckdb.DuckDBPyConnection, name: str, readers: list[tuple[str, str]], path: str
) -> str:
    """Load a table with the first reader that can read the file. Return the note of that one."""
    import duckdb

    *attempts, last = readers
    for reader, note in attempts:
        with suppress(duckdb.ConversionException, duckdb.InvalidInputException):
            database.execute(f"CREATE OR REPLACE TABLE {name} AS FROM {reader}", {"path": path})
            return note
    database.execute(f"CREATE OR REPLACE TABLE {name} AS FROM {last[0]}", {"path": path})
    return last[1]


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


def _set_types(database: duckdb.DuckDBPyConnection, name: str) -> str:
    """Give columns the types that the rest of Coatcheck says (`sql_types`).

    Columns of texts and numbers become text, since `column = 'a'` is an error in a column of
    type JSON. Columns with objects or arrays stay as they are, for `column->>'$.key'`. Return a
    note."""
    import duckdb

    mixed = []
    for column, kind, *_ in database.execute(f"DESCRIBE {name}").fetchall():
        at = _name(column)
        if kind == '"NULL"':  # without any value
            database.execute(f"ALTER TABLE {name} ALTER {at} TYPE VARCHAR")
        if kind == "HUGEINT":  # also of small integers, if some are negative
            with suppress(duckdb.ConversionException):
                database.execute(f"ALTER TABLE {name} ALTER {at} TYPE BIGINT")
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
    if kind == "lines":
        return [(_LINES, "")]
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
        source = f"read_json($path, format='{'array' if kind == ROWS else kind}'"
        by_line = kind == "newline_delimited"
        lenient = ", ignore_errors=true" if by_line else ", maximum_depth=1"
        note = "records that do not fit are NULL" if by_line else "nested values are JSON text"
    sampled = f"{source}, sample_size=-1"
    return [(f"{source})", ""), (f"{sampled})", ""), (f"{sampled}{lenient})", note)]


def _run(
    connection: duckdb.DuckDBPyConnection, sql: str, tables: list[Message], limits: Message
) -> Message:
    bare = _single_select(connection, sql)
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


def _single_select(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """The text of the one statement, which must be a SELECT without parameters."""
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
    return str(statement.query.strip().rstrip(";"))


def _inspect(connection: duckdb.DuckDBPyConnection, sql: str, known: set[str]) -> None:
    """Refuse a statement whose tree contains a table that was not given, or a function that is not
    allowed."""
    for node, local in _nodes(_tree(connection, sql)):
        _check_node(node, known, local)


def _tree(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """The syntax tree of a SELECT."""
    row = connection.execute(
        "SELECT json_serialize_sql(CAST($sql AS VARCHAR))", {"sql": sql}
    ).fetchone()
    tree = json.loads(row[0]) if row else {}
    if tree.get("error", True) or len(tree.get("statements", ())) != 1:
        raise InvalidArgument(
            f"only SELECT is allowed here: {tree.get('error_message', '')}", hint=_ONE_SELECT
        )
    return tree["statements"]


def _check_node(node: Message, known: set[str], local: frozenset[str]) -> None:
    """Refuse a node of a tree. `known` are the names of the tables that were given, `local` those
    that WITH defines."""
    kind = str(node.get("type"))
    if kind == "TABLE_FUNCTION":
        called = str(node["function"].get("function_name", "")).casefold()
        if called not in _TABLE_FUNCTIONS:
            reason = f"{called}() is not allowed here: only the given tables can be read"
            raise InvalidArgument(reason, hint=_tables(known))
    elif kind == "BASE_TABLE":
        _check_table(node, known, local)
    elif kind == "SHOW_REF" and not node.get("query"):
        raise InvalidArgument("SHOW is not allowed here", hint=_tables(known))
    elif kind.endswith("_QUERY_NODE") or kind in _WRITING:
        raise InvalidArgument("only SELECT is allowed here, also in WITH", hint=_ONE_SELECT)
    function = str(node.get("function_name", ""))
    if function.casefold() in _FORBIDDEN:
        raise InvalidArgument(f"{function}() is not allowed here", hint=_ONE_SELECT)


def _check_table(node: Message, known: set[str], local: frozenset[str]) -> None:
    name = str(node.get("table_name", ""))
    above = [node.get("catalog_name"), node.get("schema_name")]
    is_known = name.casefold() in known or name.casefold() in local
    if any(above) or not is_known:
        full = ".".join(part for part in [*above, name] if part)
        raise InvalidArgument(f"there is no table {full[:80]!r}", hint=_tables(known))


def _nodes(tree: Any) -> Iterator[tuple[Message, frozenset[str]]]:
    """Yield every node of a statement's tree, with the names from WITH that are in scope there.

    A name is in scope in the query that WITH belongs to, and in the queries that WITH defines after
    it. Within its own query it is in scope only in the recursive part; elsewhere it has its outer
    meaning."""
    stack: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
    while stack:
        at, names = stack.pop()
        if isinstance(at, dict):
            yield at, names
            stack.extend(_inner_nodes(at, names))
        elif isinstance(at, list):
            stack.extend((item, names) for item in at)


def _inner_nodes(node: Message, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    for name, query in _defined(node):
        yield query, names
        names |= {name}
    recursive = _RECURSIVE.get(str(node.get("type")))
    for key, value in node.items():
        if key == recursive and node.get("cte_name"):
            yield value, names | {str(node["cte_name"]).casefold()}
        elif key != "cte_map":
            yield value, names


def _defined(node: Message) -> Iterator[tuple[str, Any]]:
    """The names that the WITH of a node defines, and their queries."""
    given = node.get("cte_map")
    if isinstance(given, dict):
        for entry in given.get("map", ()):
            yield str(entry["key"]).casefold(), entry["value"]


def _tables(known: set[str]) -> str:
    names = [name if name.isidentifier() else _name(name) for name in sorted(known or {"artifact"})]
    return "tables here: " + ", ".join(names)[:300]


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
    """The columns of the tables with their types, for a hint."""
    cursor = database.cursor()
    rows = cursor.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal"
    ).fetchall()
    keywords = cursor.execute(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    ).fetchall()
    reserved = {keyword for (keyword,) in keywords}
    columns: dict[str, list[str]] = {}
    for table, column, kind in rows:
        is_plain = _PLAIN.fullmatch(column) and column.casefold() not in reserved
        name = column if is_plain else _name(column)
        kind = kind.replace("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ")
        columns.setdefault(table, []).append(f"{name} {line(kind, _LONGEST_TYPE)}")
    if len(columns) == 1:
        (listed,) = columns.values()
        return "columns here: " + line(", ".join(listed), _LONGEST_COLUMNS)
    room = _LONGEST_COLUMNS // max(1, len(columns))
    tables = [
        f"{_name(table)}({line(', '.join(listed), room)})" for table, listed in columns.items()
    ]
    return "columns here: " + ", ".join(tables)


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
