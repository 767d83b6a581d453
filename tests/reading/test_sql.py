"""SQL on artifacts: its answers, and attempts to leave its sandbox that all fail."""

import json
import os
import pprint
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import duckdb
import pytest

import coatcheck
from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, MissingExtra, TooLarge
from coatcheck.reading import sql
from coatcheck.reading.sandbox import MAX_BUSY, Pool
from coatcheck.reading.sql import SqlLimits, is_sql, run_sql
from tests.reading.framed import make_content

of_each_source = pytest.mark.usefixtures("each_source")

CSV = b"id,name,price\n1,apple,1.5\n2,pear,\n3,,2.25\n"
SHORT = SqlLimits(seconds=1, memory=256 << 20, threads=2)
SECRET = "canary-4711"


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    sql.pool.close()


def table(data: bytes = CSV, media_type: str = "text/csv") -> dict[str, Content]:
    return {"artifact": make_content(data, media_type)}


@of_each_source
def test_a_select_returns_csv_in_which_null_is_empty_and_an_empty_text_is_two_quotes() -> None:
    answer = run_sql(
        "SELECT id, name, price, '' AS nothing FROM artifact ORDER BY id DESC", table()
    )
    assert answer.text == 'id,name,price,nothing\n3,,2.25,""\n2,pear,,""\n1,apple,1.5,""'
    assert (answer.media_type, answer.shown, answer.note) == ("text/csv", "3 rows, 4 columns", "")


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (b"id\tname\n1\tapple\n2\tpear\n", "text/tab-separated-values"),
        (b"id,name\r\n1,apple\r\n2,pear\r\n", "text/csv; charset=utf-8"),
        (b"\xef\xbb\xbfid,name\n1,apple\n2,pear\n", "text/csv"),
        ("\ufeffid,name\n1,apple\n2,pear\n".encode("utf-16-le"), "text/csv"),
        (b'[{"id": 1, "name": "apple"}, {"id": 2, "name": "pear"}]', "application/json"),
        (b'{"id": 1, "name": "apple"}\n{"id": 2, "name": "pear"}\n', "application/x-ndjson"),
    ],
)
@of_each_source
def test_every_tabular_format_is_a_table(data: bytes, media_type: str) -> None:
    assert (
        run_sql("SELECT id, name FROM artifact ORDER BY id", table(data, media_type)).text
        == "id,name\n1,apple\n2,pear"
    )


@of_each_source
def test_parquet_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    duckdb.execute(
        "COPY (SELECT range AS n FROM range(1000)) TO $path (FORMAT parquet)", {"path": str(path)}
    )
    answer = run_sql(
        "SELECT sum(n) AS s FROM artifact",
        table(path.read_bytes(), "application/vnd.apache.parquet"),
    )
    assert answer.text == "s\n499500"


@of_each_source
def test_nested_values_are_returned_as_json_and_odd_types_as_text() -> None:
    answer = run_sql(
        "SELECT [1, 2] AS l, {'a': 'x'} AS s, DATE 'infinity' AS d, 170141183460469231731::HUGEINT AS h",
        table(),
    )
    assert answer.text == 'l,s,d,h\n"[1,2]","{""a"":""x""}",infinity,170141183460469231731'


@of_each_source
def test_other_artifacts_join_under_their_pointers() -> None:
    other = make_content(b'[{"id": 1, "qty": 10}, {"id": 3, "qty": 30}]', "application/json")
    question = 'SELECT name, qty FROM artifact JOIN "art:0123456789ab" AS o USING (id) ORDER BY id'
    assert (
        run_sql(question, table() | {"art:0123456789ab": other}).text == "name,qty\napple,10\n,30"
    )


@of_each_source
def test_one_content_under_two_names_is_loaded_once() -> None:
    given = table()
    answer = run_sql(
        'SELECT count(*) AS n FROM artifact, "art:0123456789ab"',
        given | {"art:0123456789ab": given["artifact"]},
    )
    assert answer.text == "n\n9"


def test_a_pointer_in_a_string_or_a_comment_is_not_opened() -> None:
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        ref = session.put("id,name\n1,apple\n2,pear\n", media_type="text/csv")
        question = """SELECT count(*) AS n, 'in "art:aaaaaaaaaaaa"' AS t -- "art:bbbbbbbbbbbb"
            /* "art:cccccccccccc" */ FROM artifact"""
        assert session.read(ref, query=question).text == 'n,t\n2,"in ""art:aaaaaaaaaaaa"""'


@pytest.mark.parametrize(
    ("query", "expected"),
    [("SELECT 1", True), ("  -- x\n with a as (select 1) from a", True), ("(select 1)", True),
     ("describe artifact", True), ("$.items[0]", False), ("shape", False), ("selection", False), ("page 3", False)],
)  # fmt: skip
def test_sql_is_distinguished_from_other_queries(query: str, expected: bool) -> None:
    assert is_sql(query) is expected


@pytest.mark.parametrize(
    "question", ["DESCRIBE artifact", "SUMMARIZE artifact", "FROM artifact", "TABLE artifact;"]
)
def test_statements_that_inspect_a_table_count_as_select(question: str) -> None:
    assert run_sql(question, table()).text.count("\n") == 3


@of_each_source
def test_irregular_rows_are_read_as_text_and_the_note_says_so() -> None:
    data = b"a,b\n" + b"1,2\n" * 3000 + b"x,y,z\n" + b"5\n"
    answer = run_sql("SELECT count(*) AS n FROM artifact", table(data))
    assert answer.text.startswith("n\n300")


@of_each_source
def test_rows_over_the_limit_are_left_out_and_the_answer_says_so() -> None:
    answer = run_sql("SELECT * FROM range(1000)", table(), limits=SqlLimits(rows=10))
    assert answer.shown == "the first 10 rows, 1 column"
    assert answer.text.count("\n") == 10
    assert "left out" in answer.note


@of_each_source
def test_characters_over_the_limit_are_left_out_by_whole_rows() -> None:
    answer = run_sql(
        "SELECT repeat('x', 100) AS t FROM range(1000)", table(), limits=SqlLimits(chars=1000)
    )
    assert len(answer.text) <= 1000
    assert set(map(len, answer.text.split("\n")[1:])) == {100}
    assert "left out" in answer.note


def test_one_row_over_the_limit_is_an_error_that_says_how_to_shorten_it() -> None:
    with pytest.raises(LimitExceeded, match=r"2,000 characters.*substr"):
        run_sql("SELECT repeat('x', 2000)", table(), limits=SqlLimits(chars=1000))


def test_an_unknown_column_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"cost.*price"):
        run_sql("SELECT cost FROM artifact", table())


def test_an_unknown_table_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"no table 'sales'.*tables here: artifact"):
        run_sql("SELECT * FROM sales", table())


@pytest.mark.parametrize(
    ("data", "media_type", "expected"),
    [
        (b"{}", "application/json", "no rows"),
        (b"", "text/csv", "empty"),
        (b"\x89PNG", "image/png", "not a table"),
        (b"PAR1 is not all of it", "application/vnd.apache.parquet", "cannot be read as a table"),
        (b"[1, 2", "application/json", "cannot be read as a table"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
    ],
)
@of_each_source
def test_content_that_is_not_a_table_is_an_error_that_says_why(
    data: bytes, media_type: str, expected: str
) -> None:
    with pytest.raises((InvalidArgument, LimitExceeded), match=expected):
        run_sql("SELECT * FROM artifact", table(data, media_type))


LOG = "".join(
    f"2026-01-01 12:{n // 60 % 60:02}:{n % 60:02} INFO request {n} took 3 ms\n"
    for n in range(9_000)
)


@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        (LOG, "text/plain"),
        (LOG.replace(":", ","), "text/plain"),
        ("Some words, and more of them.\nAnother line.\n", "text/plain"),
        ("one line", "text/plain"),
        ("<html><body>Hello</body></html>", "text/html"),
        ("# Title\n\ntext, text\n", "text/markdown"),
        ("import os, sys\n\nprint(os, sys)\n", "text/x-python"),
        ("a: 1\nb: 2\n", "application/yaml"),
        ("usage: 3\n" + "x" * 100_000, "text/x-unknown"),
    ],
)
@of_each_source
def test_text_that_is_not_a_table_is_an_error_that_says_what_works(
    text: str, media_type: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        run_sql("SELECT count(*) FROM artifact", table(text.encode(), media_type))
    assert "not a table" in str(refused.value)
    assert "grep" in refused.value.hint
    with pytest.raises(InvalidArgument):
        run_sql(
            'SELECT count(*) FROM artifact, "art:0123456789ab"',
            {**table(), "art:0123456789ab": make_content(text.encode(), media_type)},
        )


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        ("id,name\n" + "".join(f"{n},apple\n" for n in range(50)), "text/plain"),
        (
            ",".join(f"column_{n}" for n in range(200)) + "\n" + (",".join("1" * 200) + "\n") * 50,
            "text/plain",
        ),
        ("id\tname\n" + "".join(f"{n}\tapple\n" for n in range(50)), "text/x-unknown"),
        ("id,name\n" + "".join(f"{n},apple\n" for n in range(50)), "application/csv"),
        ('{"id": 1}\n{"id": 2}\n' * 25, "text/plain"),
        (f'{{"id": 1, "text": "{"x" * 5_000}"}}\n' * 50, "application/json"),
    ],
)
@of_each_source
def test_a_table_is_recognized_whatever_its_media_type(data: str, media_type: str) -> None:
    assert (
        run_sql("SELECT count(*) AS n FROM artifact", table(data.encode(), media_type)).text
        == "n\n50"
    )


PYTHON_ROWS = [
    (
        "apple",
        1,
        None,
        Decimal("1.50"),
        datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - as databases return them
        UUID(int=7),
        True,
    ),
    (
        'it\'s "a" pear\n',
        2,
        float("nan"),
        Decimal("2.25"),
        datetime(2026, 1, 3, tzinfo=UTC),
        None,
        False,
    ),
    ("plum", 3),
]


@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        (repr(PYTHON_ROWS), "text/x-python-repr"),
        (repr(PYTHON_ROWS), "text/plain"),
        (repr(tuple(PYTHON_ROWS)), "text/x-python-repr"),
        (pprint.pformat(PYTHON_ROWS, width=20), "text/plain"),
        (
            "Retrieved 30 entries. Displaying the first 3.\n" + repr(PYTHON_ROWS) + "\n",
            "text/plain",
        ),
        (repr({"rowcount": 3, "rows": PYTHON_ROWS}), "text/x-python-repr"),
    ],
)
def test_rows_that_python_printed_are_a_table(text: str, media_type: str) -> None:
    given = table(text.encode(), media_type)
    answer = run_sql("SELECT c1, c2, c3, c4 FROM artifact WHERE c2 < 3 ORDER BY c4 DESC", given)
    assert answer.text == 'c1,c2,c3,c4\n"it\'s ""a"" pear\n",2,,2.25\napple,1,,1.5'
    assert run_sql(
        "SELECT count(*) AS n, min(c5)::DATE AS d, max(c6) AS u FROM artifact WHERE c7", given
    ).text == ("n,d,u\n1,2026-01-02,00000000-0000-0000-0000-000000000007")


def test_paths_fragments_and_shapes_work_on_values_that_python_printed() -> None:
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        ref = session.put(repr({"rows": PYTHON_ROWS}))
        assert (
            session.read(ref, query="$.rows[?@[1] == 2][4]").text == '"2026-01-03 00:00:00+00:00"'
        )
        assert session.read(f"{ref.pointer}#/rows/2").text == '["plum",3]'
        assert "rows: array of 3 arrays" in session.read(ref, query="shape").text


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (repr([{"id": 1, "name": "apple"}, {"id": 2, "name": None}]), ""),
        (
            '12:00:01 INFO started\n[INFO] reading\n[{"id": 1, "name": "apple"},\n {"id": 2}]',
            "2 lines around",
        ),
        (
            'loading…\n{"took": 3, "items": [{"id": 1, "name": "apple"}, {"id": 2}]}\ndone\n',
            "rows of /items; 2 lines",
        ),
        (
            'Output:\n{"id": 1, "name": "apple"}\n{"id": 2, "name": null}\nexit code 0\n',
            "2 lines around",
        ),
        ('[{"id": 1, "name": "apple"}, {"id": 2, "name": NaN}]', ""),
    ],
)
@pytest.mark.parametrize("size", [1, 20_000])
def test_json_after_other_lines_and_python_dicts_are_tables(
    text: str, note: str, size: int
) -> None:
    given = table(text.replace("apple", "apple" * size).encode(), "text/plain")
    answer = run_sql("SELECT id, name[:5] AS name FROM artifact ORDER BY id", given)
    assert answer.text == "id,name\n1,apple\n2,"
    assert note in answer.note


@pytest.mark.parametrize(
    "text",
    [
        '{"items": [\n    {"id": 1, "tags": [1, 2]},\n    {"id": 2, "ta',
        '{\n  "items": [\n    {\n      "tags": [1, 2, 3, 4, 5, 6, 7, 8, 9]\n    },\n    {\n',
        "[('a', 1), ('b', 2), ('c'",
        "12:00 started\n" * 50 + '[{"id": 1}]\n',
        "# Example\n" * 50 + json.dumps([{"id": "x" * 1_000}]),
        "[main] it works\n(see below)\n",
    ],
)
def test_a_document_that_is_cut_or_the_smaller_part_of_a_text_is_not_a_table(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a table"):
        run_sql("SELECT * FROM artifact", table(text.encode(), "text/plain"))


def test_an_array_of_arrays_has_numbered_columns() -> None:
    given = table(b'[["apple", 1.5], ["pear", 2, "x"]]', "application/json")
    assert (
        run_sql("SELECT c1, c2 + 1 AS c2, c3 FROM artifact", given).text
        == "c1,c2,c3\napple,2.5,\npear,3.0,x"
    )


def test_a_column_with_values_of_several_types_is_text() -> None:
    given = table(
        b'[{"a": 1, "b": {"c": 1}}, {"a": "two", "b": ""}, {"a": null, "b": [3]}]',
        "application/json",
    )
    answer = run_sql(
        "SELECT a, b->>'$.c' AS c FROM artifact WHERE a = 'two' OR a = '1' ORDER BY a", given
    )
    assert answer.text == "a,c\n1,1\ntwo,"
    assert answer.note == '"a" with values of several types: as text'


def test_nested_values_are_reached_in_the_usual_ways() -> None:
    given = table(
        b'[{"u": {"login": "ada"}, "l": [{"name": "x"}]}, {"u": null, "l": []}]', "application/json"
    )
    question = "SELECT u.login AS a, u->>'$.login' AS b, l[1].name AS c, len(l) AS n FROM artifact ORDER BY n DESC LIMIT 1"
    assert run_sql(question, given).text == "a,b,c,n\nada,ada,x,1"


def test_the_first_line_of_a_log_is_not_a_header_even_if_it_is_called_csv() -> None:
    log = "".join(f"12:00:{n % 60:02} INFO a,b,c request {n}\n" for n in range(9_000))
    assert run_sql("SELECT count(*) AS n FROM artifact", table(log.encode())).text == "n\n9000"


def test_rows_of_different_lengths_do_not_hide_the_columns() -> None:
    data = "a,b,c\n" + "".join(f"{n},1\n" if n % 10 == 0 else f"{n},1,2\n" for n in range(100))
    answer = run_sql("SELECT count(*) AS n, count(c) AS c FROM artifact", table(data.encode()))
    assert answer.text == "n,c\n100,90"


def test_lines_before_the_header_are_left_out_with_a_note() -> None:
    data = "Report of sales\nMade today\nid,name\n" + "".join(f"{n},x\n" for n in range(50))
    answer = run_sql("SELECT count(id) AS n FROM artifact", table(data.encode()))
    assert (answer.text, answer.note) == ("n\n50", "2 lines before the header left out")


def test_an_array_inside_a_json_object_is_a_table_by_its_fragment() -> None:
    with coatcheck.open("memory:") as store:
        session = store.session("s")
        ref = session.put({"shop": "north", "orders": [{"id": n} for n in range(7)]})
        page = session.read(f"{ref.pointer}#/orders", query="SELECT count(*) AS n FROM artifact")
        assert page.text == "n\n7"
        page = session.read(ref, query="SELECT count(*) AS n FROM artifact")
        assert (page.text, page.shown) == ("n\n7", "1 row, 1 column; artifact is #/orders")


@of_each_source
def test_tables_over_the_size_limit_are_refused_before_they_are_read() -> None:
    with pytest.raises(TooLarge):
        run_sql("SELECT 1", table(), limits=SqlLimits(input_bytes=10))


def test_a_missing_extra_is_reported() -> None:
    with pytest.raises(MissingExtra, match=r"coatcheck\[sql\]"):
        Pool("coatcheck.reading.sql_child", extra="sql", package="no_such_package_here").ask(
            {}, seconds=1, max_chars=1
        )


WAYS_OUT = {
    "read_csv": "SELECT * FROM read_csv('{file}')",
    "read_csv_auto": "SELECT * FROM read_csv_auto('{file}')",
    "sniff_csv": "SELECT * FROM sniff_csv('{file}')",
    "read_text": "SELECT content FROM read_text('{file}')",
    "read_blob": "SELECT content FROM read_blob('{file}')",
    "read_json": "SELECT * FROM read_json('{file}')",
    "read_json_objects": "SELECT * FROM read_json_objects('{file}')",
    "read_ndjson": "SELECT * FROM read_ndjson('{file}')",
    "read_parquet": "SELECT * FROM read_parquet('{file}')",
    "parquet_metadata": "SELECT * FROM parquet_metadata('{file}')",
    "read_duckdb": "SELECT * FROM read_duckdb('{file}')",
    "glob": "SELECT * FROM glob('{folder}/*')",
    "a reader in a subquery": "SELECT (SELECT count(*) FROM read_text('{file}'))",
    "a reader in WITH": "WITH t AS (FROM read_text('{file}')) SELECT * FROM t",
    "a reader behind a lateral join": "SELECT * FROM artifact, LATERAL (SELECT * FROM read_text('{file}'))",
    "a file's name as a table": "SELECT * FROM '{file}'",
    "a quoted name of a file": 'SELECT * FROM "{file}"',
    "a file under the home folder": "SELECT * FROM '~/.bashrc'",
    "a process's files": "SELECT * FROM '/proc/self/environ'",
    "a url": "SELECT * FROM 'https://127.0.0.1:9/x.csv'",
    "a bucket": "SELECT * FROM read_parquet('s3://bucket/key.parquet')",
    "COPY to a file": "COPY artifact TO '{folder}/out.csv'",
    "COPY from a file": "COPY artifact FROM '{file}'",
    "EXPORT": "EXPORT DATABASE '{folder}/out'",
    "IMPORT": "IMPORT DATABASE '{folder}'",
    "ATTACH": "ATTACH '{folder}/new.db' AS other",
    "ATTACH of SQLite": "ATTACH '{file}' AS other (TYPE sqlite)",
    "ATTACH of PostgreSQL": "ATTACH 'host=127.0.0.1 dbname=postgres' AS other (TYPE postgres)",
    "INSTALL": "INSTALL httpfs",
    "LOAD": "LOAD '{file}'",
    "CREATE TABLE": "CREATE TABLE t AS SELECT * FROM read_text('{file}')",
    "CREATE VIEW": "CREATE VIEW v AS SELECT * FROM '{file}'",
    "CREATE SECRET": "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "CREATE MACRO": "CREATE MACRO m() AS TABLE SELECT * FROM read_text('{file}')",
    "getenv": "SELECT getenv('CANARY')",
    "PRAGMA": "PRAGMA database_list",
    "PRAGMA with a value": "PRAGMA memory_limit='100GB'",
    "SET": "SET enable_external_access=true",
    "RESET": "RESET lock_configuration",
    "CALL": "CALL pragma_version()",
    "settings": "SELECT * FROM duckdb_settings()",
    "settings as a view": "SELECT * FROM pg_catalog.pg_settings",
    "one setting": "SELECT current_setting('secret_directory')",
    "secrets": "SELECT * FROM duckdb_secrets()",
    "logging": "CALL enable_logging(storage => 'file', storage_path => '{folder}/log')",
    "logging from SELECT": "SELECT * FROM enable_logging()",
    "query()": "SELECT * FROM query('SELECT * FROM read_text(''{file}'')')",
    "query_table()": "SELECT * FROM query_table('{file}')",
    "a serialized statement": "SELECT * FROM json_execute_serialized_sql('{{}}')",
    "the catalog": "SELECT * FROM information_schema.tables",
    "tables of the system": "SELECT * FROM system.main.duckdb_tables",
    "SHOW": "SHOW ALL TABLES",
    "two statements": "SELECT 1; SELECT * FROM read_text('{file}')",
    "a closed bracket": "SELECT 1) AS x; COPY artifact TO '{folder}/out.csv'; SELECT * FROM (SELECT 1",
    "a comment": "SELECT 1 -- \n; COPY artifact TO '{folder}/out.csv' --",
    "DELETE": "DELETE FROM artifact",
    "DELETE in WITH": "WITH gone AS (DELETE FROM artifact RETURNING *) SELECT * FROM gone",
    "INSERT": "INSERT INTO artifact SELECT * FROM artifact",
    "DROP": "DROP TABLE artifact",
    "EXPLAIN ANALYZE": "EXPLAIN ANALYZE SELECT 1",
    "PREPARE": "PREPARE p AS SELECT 1",
    "a parameter": "SELECT $1",
    "a huge cross join": "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE hash(a.range, b.range) = 1",
    "an endless recursion": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
    "a giant text": "SELECT length(repeat('x', 3000000000))",
    "many large texts": "SELECT string_agg(repeat('x', 100000000), '') FROM range(1000)",
    "a giant list": "SELECT len(list(range)) FROM range(100000000000)",
    "a giant sort": "SELECT * FROM range(10000000000) ORDER BY hash(range) LIMIT 1 OFFSET 1000000000",
    "waiting": "SELECT sleep_ms(100000)",
    "brackets": "SELECT " + "(" * 20_000 + "1" + ")" * 20_000,
    "a long sum": "SELECT " + "1+" * 20_000 + "1",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_statement_escapes_the_sandbox(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    secret = tmp_path / "secret.csv"
    secret.write_text(f"word\n{SECRET}\n")
    question = WAYS_OUT[way].format(file=secret, folder=tmp_path)
    with pytest.raises(CoatcheckError) as raised:
        run_sql(question, table(), limits=SHORT)
    assert isinstance(raised.value, InvalidArgument | LimitExceeded)
    assert SECRET not in str(raised.value)
    assert len(str(raised.value)) < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    assert secret.read_text() == f"word\n{SECRET}\n"
    assert run_sql("SELECT count(*) AS n FROM artifact", table(), limits=SqlLimits()).text == "n\n3"


SYSTEM_VIEWS_BESIDE_WITH = {
    "in the query that WITH names": "WITH pg_tables AS (SELECT * FROM pg_tables) SELECT * FROM pg_tables",
    "beside a subquery": "SELECT (WITH pg_tables AS (SELECT 1 AS a) SELECT a FROM pg_tables) AS x, * FROM pg_tables",
    "in a branch": "(WITH duckdb_tables AS (SELECT 'a') FROM duckdb_tables) UNION ALL SELECT sql FROM duckdb_tables",
    "before the name is given": "WITH a AS (FROM sqlite_master), sqlite_master AS (SELECT 1) SELECT * FROM a",
    "before a recursion": (
        "WITH RECURSIVE pg_class AS (SELECT relname FROM pg_class UNION ALL SELECT relname FROM pg_class) FROM pg_class"
    ),
    "in capitals": 'WITH t AS (FROM PG_TABLES), "Pg_Tables" AS (SELECT 1) SELECT * FROM t',
}


@pytest.mark.parametrize("place", SYSTEM_VIEWS_BESIDE_WITH)
def test_a_name_defined_by_with_does_not_open_a_system_view_outside_its_scope(place: str) -> None:
    with pytest.raises(InvalidArgument, match="there is no table"):
        run_sql(SYSTEM_VIEWS_BESIDE_WITH[place], table(), limits=SqlLimits())


@pytest.mark.parametrize(
    "statement",
    [
        "WITH pg_tables AS (SELECT 3 AS n) SELECT n FROM pg_tables",
        "WITH a AS (SELECT 1 AS n), b AS (SELECT n + 2 AS n FROM a) SELECT n FROM b",
        "WITH a AS (SELECT 3 AS n) SELECT n FROM (SELECT * FROM a WHERE n IN (SELECT n FROM a))",
        "WITH a AS (WITH b AS (SELECT 3 AS n) SELECT * FROM b) SELECT (SELECT max(n) FROM a) AS n",
        "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT max(n) AS n FROM r",
        "WITH a AS MATERIALIZED (SELECT 3 AS n) SELECT n FROM a UNION SELECT n FROM a",
        "WITH artifact AS (SELECT count(*) AS n FROM artifact) SELECT n FROM artifact",
    ],
)
def test_a_name_defined_by_with_is_a_table_in_its_scope(statement: str) -> None:
    assert run_sql(statement, table(), limits=SqlLimits()).text == "n\n3"


def test_the_database_refuses_each_statement_by_itself(tmp_path: Path) -> None:
    """The database refuses these statements by itself, without the check of the statement's
    tree."""
    script = f"""
import os, sys
from coatcheck.reading import sql_child
open({str(tmp_path / "0.data")!r}, "w").write("a\\n1\\n")
given = [{{"name": "artifact", "format": "csv", "file": "0.data", "same_as": ""}}]
database, _ = sql_child._load(given, {{"memory": 1 << 28, "threads": 1}}, {str(tmp_path)!r})
database.execute("BEGIN TRANSACTION READ ONLY")
for statement in ("SELECT * FROM read_text('/etc/hostname')", "SET threads=8", "COPY artifact TO '/tmp/x'",
                  "LOAD httpfs", "SELECT getenv('PATH')", "FROM glob('/*')", "ATTACH '/tmp/x.db'",
                  "DELETE FROM artifact"):
    try:
        database.execute(statement).fetchall()
    except Exception:
        database.execute("ROLLBACK; BEGIN TRANSACTION READ ONLY")
    else:
        sys.exit("allowed: " + statement)
print("still locked", flush=True)
os._exit(0)
"""
    ran = _python(script)
    assert ran.stdout.strip() == "still locked", ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock needs Linux")
def test_a_confined_process_opens_no_file_and_no_connection(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("ours")
    script = f"""
import ctypes, os, socket, sys
from coatcheck.reading.sandbox import confine
if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) < 4:
    print("no landlock"); os._exit(0)
listening = socket.create_server(("127.0.0.1", 0))
confine({str(tmp_path)!r})
assert open({str(tmp_path / "mine")!r}).read() == "ours"
for attempt in (lambda: open("/etc/passwd"), lambda: os.listdir("/"), lambda: open({str(tmp_path / "new")!r}, "w"),
                lambda: os.open("/dev/null", os.O_WRONLY), lambda: os.execv("/bin/true", ["true"]),
                lambda: socket.create_connection(listening.getsockname(), 2)):
    try:
        attempt()
    except OSError:
        continue
    os._exit(3)
print("still locked", flush=True)
os._exit(0)
"""
    ran = _python(script)
    assert ran.stdout.strip() in ("still locked", "no landlock"), ran.stderr


def _python(script: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
        check=False,
        timeout=60,
    )


def test_an_idle_child_that_was_killed_is_replaced_silently() -> None:
    run_sql("SELECT 1", table())
    killed = sql.pool._idle[:]
    for child in killed:
        os.kill(child.pid, signal.SIGKILL)
        child._process.wait()
    assert run_sql("SELECT 1 AS one", table()).text == "one\n1"
    assert not {child.pid for child in killed} & set(sql.pool.pids())


def test_a_child_that_exceeds_its_time_limit_is_killed_and_the_next_call_is_served() -> None:
    described, files, _ = sql._describe({"artifact": sql.Source(table()["artifact"])})
    limits = asdict(SqlLimits(seconds=600))
    message = {"sql": WAYS_OUT["an endless recursion"], "tables": described, "limits": limits}
    with pytest.raises(LimitExceeded, match="stopped"):
        sql.pool.ask(
            message, files=files, loaded="x", seconds=-0.5, cpu_seconds=600, max_chars=1000
        )
    assert run_sql("SELECT 1 AS one", table()).text == "one\n1"


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_a_child_that_crashes_at_work_is_a_clear_error() -> None:
    sql.pool.close()
    threading.Timer(1, _crash_children).start()
    with pytest.raises(LimitExceeded, match="crashed"):
        run_sql(WAYS_OUT["an endless recursion"], table(), limits=SqlLimits(seconds=30))
    assert run_sql("SELECT 1 AS one", table()).text == "one\n1"


def _crash_children() -> None:
    """Crash the children of this process that run SQL."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"coatcheck.reading.sql_child" in (entry / "cmdline").read_bytes()
            ):
                os.kill(int(entry.name), signal.SIGSEGV)
        except OSError:
            continue


def test_the_child_sees_no_environment() -> None:
    run_sql("SELECT 1", table())
    (pid, *_) = sql.pool.pids()
    environ = Path(f"/proc/{pid}/environ")
    if not environ.exists():
        pytest.skip("no /proc")
    assert [entry.partition(b"=")[0] for entry in environ.read_bytes().split(b"\0") if entry] == [
        b"LC_ALL"
    ]


def test_no_content_stays_on_disk() -> None:
    run_sql("SELECT 1", table())
    for child in sql.pool._idle:
        assert os.listdir(child.folder) == []
        assert os.stat(child.folder).st_mode & 0o777 == 0o700
        folder = child.folder
    sql.pool.close()
    assert not os.path.exists(folder)


def test_the_second_call_finds_its_tables_loaded() -> None:
    reads: list[int] = []
    data = b"n\n" + b"1\n" * 1000
    content = make_content(data, "text/csv")

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return data[offset : offset + length]

    watched = Content(content.ref, b"", read)
    first = run_sql("SELECT sum(n) AS s FROM artifact", {"artifact": watched})
    reads.clear()
    assert run_sql("SELECT sum(n) AS s FROM artifact", {"artifact": watched}) == first
    assert set(reads) == {4096}  # only the head, to recognize the format


@of_each_source
def test_a_statement_cannot_change_what_the_next_one_sees() -> None:
    for question in ("SELECT setseed(0.5)", "WITH x AS (DELETE FROM artifact RETURNING *) FROM x"):
        with pytest.raises(InvalidArgument) if "DELETE" in question else nullcontext():
            run_sql(question, table())
        assert run_sql("SELECT count(*) AS n FROM artifact", table()).text == "n\n3"


@of_each_source
def test_concurrent_calls_each_get_their_own_answer() -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        given = table(f"n\n{number}\n".encode())
        answers[number] = run_sql("SELECT n + 0 AS n FROM artifact", given).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3 * MAX_BUSY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"n\n{number}" for number in range(3 * MAX_BUSY)}


def test_a_long_running_statement_does_not_delay_another() -> None:
    failed: list[BaseException] = []

    def run_on(seconds: float) -> None:
        try:
            run_sql(
                WAYS_OUT["an endless recursion"],
                table(),
                limits=SqlLimits(seconds=seconds, memory=256 << 20),
            )
        except CoatcheckError as error:
            failed.append(error)

    for seconds in (2, 20, 100):  # on a busy machine, even the quick one takes a while
        failed.clear()
        slow = threading.Thread(target=run_on, args=(seconds,))
        slow.start()
        quick = run_sql("SELECT count(*) AS n FROM artifact", table())
        runs_on = not failed
        assert quick.text == "n\n3"
        slow.join()
        assert len(failed) == 1
        if runs_on:
            return
    raise AssertionError("the quick statement waited for the slow one")


@of_each_source
def test_real_data_can_be_queried(corpus: Path) -> None:
    heroes = make_content((corpus / "content/csv/marvel-wikia-data.csv").read_bytes(), "text/csv")
    answer = run_sql(
        'SELECT "ALIGN", count(*) AS n FROM artifact GROUP BY ALL ORDER BY n DESC LIMIT 2',
        {"artifact": heroes},
    )
    assert answer.shown == "2 rows, 2 columns"
    chunks = make_content(
        (corpus / "retrieval/codebase_chunks.json").read_bytes(), "application/json"
    )
    rows = json.loads((corpus / "retrieval/codebase_chunks.json").read_bytes())
    assert (
        run_sql("SELECT count(*) AS n FROM artifact", {"artifact": chunks}).text
        == f"n\n{len(rows)}"
    )


def test_a_table_in_an_encoding_that_sql_does_not_read_is_refused() -> None:
    data = "\ufeffid,name\n1,apple\n".encode("utf-32-le")
    with pytest.raises(InvalidArgument, match="UTF-32LE"):
        run_sql("SELECT * FROM artifact", table(data, "text/csv"))
