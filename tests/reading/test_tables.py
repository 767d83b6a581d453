"""The tables of a content: in JSON, in plain text and in web pages, for SQL and without it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Session
from coatcheck.errors import InvalidArgument, InvalidPointer
from coatcheck.reading import heavy, sql
from coatcheck.reading.tables import Column, find_tables, rows_in, tables_of
from tests.reading.framed import make_content
from tests.reading.test_jsonpath import JSON_VALUES

JSON = "application/json"


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    sql.pool.close()
    heavy.pool.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def rows(value: Any, name: str = "artifact") -> list[dict[str, Any]]:
    return rows_in(make_content(json.dumps(value).encode(), JSON), name)


def text_rows(text: str, media_type: str = "text/plain") -> list[dict[str, Any]]:
    return rows_in(make_content(text.encode(), media_type))


# JSON


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, "a", None], [{"value": 1}, {"value": "a"}, {"value": None}]),
        ([[1, 2], [3]], [{"c1": 1, "c2": 2}, {"c1": 3}]),
        ({"a": 1, "b": "x"}, [{"key": "a", "value": 1}, {"key": "b", "value": "x"}]),
        (
            {"a": {"n": 1}, "b": {"n": 2}, "c": None},
            [{"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "c"}],
        ),
        ({"a": {"key": 1}, "b": {"key": 2}}, [{"_key": "a", "key": 1}, {"_key": "b", "key": 2}]),
        ({"a": {"x": 1}}, [{"key": "a", "value": {"x": 1}}]),
        ({"n": 2, "items": [{"id": 1}, {"id": 2}]}, [{"id": 1}, {"id": 2}]),
        (
            {"tags": [{"t": 1}], "paths": {"/a": {"get": 1}, "/b": {"get": 2}}},
            [{"key": "/a", "get": 1}, {"key": "/b", "get": 2}],
        ),
        ({"total": 1, "items": [{"id": 1}]}, [{"id": 1}]),
        (
            {"a": 1, "dist": {"keys": [{"id": 1}]}},
            [
                {"key": "a", "value": 1},
                {"key": "dist", "value": '{"keys": [{"id": 1}]}'},
            ],
        ),
    ],
)
def test_a_json_value_has_rows(value: Any, expected: list[dict[str, Any]]) -> None:
    assert rows(value) == expected


def test_lines_of_json_have_rows_whatever_their_values_are(session: Session) -> None:
    ref = session.put('"a"\n"b"\n3\n', media_type="application/x-ndjson")
    assert session.read(ref, query="SELECT count(value) AS n FROM artifact").text == "n\n3"
    ref = session.put("[1, 2]\n[3, 4]\n", media_type="application/x-ndjson")
    assert session.read(ref, query="SELECT sum(c2) AS s FROM artifact").text == "s\n6"


@pytest.mark.parametrize(
    ("text", "media_type", "expected"),
    [
        ('a,b\n1,"x, ""y""\nz"\n', "text/csv", [{"a": "1", "b": 'x, "y"\nz'}]),
        ("a\tb\n1\t2\n", "text/tab-separated-values", [{"a": "1", "b": "2"}]),
        ("a;a\n1;2,5\n", "text/csv", [{"a": "1", "a_1": "2,5"}]),
        ("1,2\n3,4\n", "text/csv", [{"column0": "1", "column1": "2"}, {"column0": "3", "column1": "4"}]),
    ],
)  # fmt: skip
def test_csv_has_rows_of_text(text: str, media_type: str, expected: list[dict[str, Any]]) -> None:
    assert text_rows(text, media_type) == expected


def test_the_arrays_and_objects_inside_an_object_are_tables_by_their_keys() -> None:
    value = {"name": "x", "versions": ["1", "2"], "dist": {"tags": {"latest": "2", "next": "3"}}}
    assert rows(value, "versions") == [{"value": "1"}, {"value": "2"}]
    assert rows(value, "TAGS") == [
        {"key": "latest", "value": "2"},
        {"key": "next", "value": "3"},
    ]
    with pytest.raises(InvalidArgument, match="tables here: artifact, versions, dist, tags"):
        rows(value, "other")


def test_sql_reads_values_objects_and_members(session: Session) -> None:
    ref = session.put({"name": "x", "versions": ["1.0", "2.0"], "time": {"1.0": "2026-01-02"}})
    assert session.read(ref, query="SELECT max(value) AS m FROM versions").text == "m\n2.0"
    page = session.read(ref, query="SELECT year(value) AS y FROM time WHERE key = '1.0'")
    assert page.text == "y\n2026"
    page = session.read(f"{ref.pointer}#/versions", query="SELECT count(value) AS n FROM artifact")
    assert page.text == "n\n2"
    assert session.read(ref, query="SELECT count(*) AS n FROM artifact").text == "n\n3"


def test_a_statement_may_use_no_table(session: Session) -> None:
    ref = session.put({"a": 1})
    assert session.read(ref, query="SELECT 1 + 1 AS two").text == "two\n2"
    assert session.read(ref, query="SELECT sum(range) AS s FROM range(4)").text == "s\n6"
    for hidden in ("information_schema.tables", "duckdb_settings()"):
        with pytest.raises(InvalidArgument) as refused:
            session.read(ref, query=f"SELECT * FROM {hidden}")
        assert refused.value.hint == "tables here: artifact"


def test_an_unknown_name_lists_the_tables(session: Session) -> None:
    ref = session.put({"versions": ["1.0"], "tags": {"a": 1, "b": 2}})
    with pytest.raises(InvalidArgument) as refused:
        session.read(ref, query="SELECT * FROM nope, artifact")
    assert "tables here: artifact, versions, tags, lines" in refused.value.hint


def test_a_wrong_column_is_reported_with_the_columns_and_their_types(session: Session) -> None:
    ref = session.put("day,n\n2026-01-02,1\n2026-01-03,2\n", media_type="text/csv")
    with pytest.raises(InvalidArgument) as refused:
        session.read(ref, query="SELECT year FROM artifact")
    assert refused.value.hint == "columns here: day DATE, n BIGINT"
    with pytest.raises(InvalidArgument) as refused:
        session.read(ref, query="SELECT * FROM artifact WHERE day LIKE '2026%'")
    assert "day DATE" in refused.value.hint
    with pytest.raises(InvalidArgument) as refused:
        session.read(ref, query="SELECT nope FROM artifact, lines")
    assert '"artifact"(day DATE, n BIGINT), "lines"(n BIGINT, text VARCHAR)' in refused.value.hint
    with pytest.raises(InvalidArgument, match="in DuckDB's SQL"):
        session.read(ref, query="SELECT FROM WHERE")


# Lines


@pytest.mark.parametrize(
    "value",
    ["one\ntwo, \"2\"\n\nfour", b"one\r\ntwo, \"2\"\r\n\r\nfour\r\n", "one\ntwo, \"2\"\n\nfour\n".encode("utf-16")],
)  # fmt: skip
def test_the_lines_of_any_text_are_a_table(session: Session, value: str | bytes) -> None:
    ref = session.put(value, media_type="text/plain")
    page = session.read(ref, query="SELECT n, text FROM lines ORDER BY n")
    assert page.text == 'n,text\n1,one\n2,"two, ""2"""\n3,""\n4,four'


def test_lines_are_a_table_even_of_json_that_cannot_be_parsed(session: Session) -> None:
    ref = session.put("[" * 100_000 + "\n" + "]" * 100_000, media_type=JSON)
    assert session.read(ref, query="SELECT count(*) AS n FROM lines").text == "n\n2"
    ref = session.put({"lines": [{"price": 3}, {"price": 4}], "n": 2})
    assert session.read(ref, query="SELECT sum(price) AS s FROM lines").text == "s\n7"


def test_lines_join_other_tables(session: Session) -> None:
    ref = session.put("a,b\n1,2\n3,4\n", media_type="text/csv")
    page = session.read(ref, query="SELECT b, text FROM artifact JOIN lines ON n = a + 1")
    assert page.text == 'b,text\n2,"1,2"'


# Plain text

STATUS = """Package: adduser
Status: install ok installed
Installed-Size: 686
Description: add users
 This package has commands.
 .

Package: apt
Installed-Size: 4232
Depends: libc6
"""
MARKDOWN = "# Cars\n\n| name | n |\n|:-----|--:|\n| a \\| b | 1,200 |\n| c | 3 |\n\ntext\n\nx | y\n--|--\n5 | 6\n"
POSTGRES = " id | name\n----+------\n  1 | Ada\n  2 | Grace\n(2 rows)\n"
MYSQL = "+----+-------+\n| id | name  |\n+----+-------+\n|  1 | Ada   |\n|  2 | Grace |\n+----+-------+\n"
PODS = "NAME        READY   STATUS             AGE\nweb-1       1/1     Running            3d\nweb-2       0/1     CrashLoopBackOff   3d\n"
PS = "USER       PID %CPU COMMAND\nroot         1  0.0 /sbin/init splash\nada        812 12.5 python app.py\n"


def test_stanzas_are_rows() -> None:
    first, second = text_rows(STATUS)
    assert first["Installed-Size"] == 686
    assert first["Description"] == "add users\nThis package has commands.\n."
    assert (second["Package"], second["Status"], second["Depends"]) == ("apt", None, "libc6")


@pytest.mark.parametrize(
    ("text", "media_type", "expected"),
    [
        (MARKDOWN, "text/markdown", [{"name": "a | b", "n": 1200}, {"name": "c", "n": 3}]),
        (POSTGRES, "text/plain", [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Grace"}]),
        (MYSQL, "text/plain", [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Grace"}]),
        (
            PODS,
            "text/plain",
            [
                {"NAME": "web-1", "READY": "1/1", "STATUS": "Running", "AGE": "3d"},
                {"NAME": "web-2", "READY": "0/1", "STATUS": "CrashLoopBackOff", "AGE": "3d"},
            ],
        ),
        (
            PS,
            "text/plain",
            [
                {"USER": "root", "PID": 1, "%CPU": 0.0, "COMMAND": "/sbin/init splash"},
                {"USER": "ada", "PID": 812, "%CPU": 12.5, "COMMAND": "python app.py"},
            ],
        ),
    ],
)
def test_columns_of_text_are_rows(
    text: str, media_type: str, expected: list[dict[str, Any]]
) -> None:
    assert text_rows(text, media_type) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Some words, and more.\nAnother line.\n",
        "a: 1\nb: 2\n",
        "Dear Ada:\n\nthank you.\n\nPS: call me.\n",
        "2026-01-01 12:00:00  INFO  started\n2026-01-01 12:00:01  INFO  done\n",
        "def f():\n    return 1\n\n\ndef g():\n    return 2\n",
    ],
)
def test_prose_code_and_logs_have_no_table(text: str) -> None:
    assert find_tables(make_content(text.encode(), "text/plain")) == []


def test_sql_reads_stanzas_and_columns(session: Session) -> None:
    page = session.read(
        session.put(STATUS), query='SELECT Package FROM artifact WHERE "Installed-Size" > 1000'
    )
    assert page.text == "Package\napt"
    page = session.read(session.put(PODS), query="SELECT NAME FROM artifact WHERE READY = '0/1'")
    assert page.text == "NAME\nweb-2"
    ref = session.put(MARKDOWN, media_type="text/markdown")
    assert session.read(ref, query="SELECT sum(n)::INT AS s FROM artifact").text == "s\n1203"
    assert session.read(ref, query="SELECT y FROM table_2").text == "y\n6"
    assert "artifact is #/table/1" in session.read(ref, query="FROM artifact").shown


# Web pages

PAGE = """<!doctype html><html><body><table><tr><td>layout only</td></tr></table>
<table><thead><tr><th>City</th><th>People</th></tr></thead>
<tr><td><a href="/b">Basel</a></td><td>171,000</td></tr>
<tr><td>Bern<sup>1</sup><style>p{}</style></td><td>134,000</td></tr></table>
<table><tr><th>year<th colspan=2>votes<tr><td rowspan=2>2024<td>1<td>2<tr><td>3<td><b hidden>x</b>4
</table></body></html>"""


def test_the_tables_of_a_web_page_are_rows() -> None:
    content = make_content(PAGE.encode(), "text/html")
    assert rows_in(content, "table_1") == [
        {"City": "Basel", "People": 171000},
        {"City": "Bern1", "People": 134000},
    ]
    assert rows_in(content, "table_2") == [
        {"year": 2024, "votes": 1, "votes_1": 2},
        {"year": 2024, "votes": 3, "votes_1": 4},
    ]


def test_a_fragment_names_a_table_of_a_web_page(session: Session) -> None:
    ref = session.put(PAGE, media_type="text/html")
    part = f"{ref.pointer}#/table/2"
    assert json.loads(session.read(part).text)[1]["votes"] == 3
    assert session.read(part, query="SELECT max(votes) AS m FROM artifact").text == "m\n3"
    assert session.get(f"{part}/0/year") == 2024
    assert session.read(ref, query='SELECT City FROM table_1 WHERE "People" < 150000').text == (
        "City\nBern1"
    )
    with pytest.raises(InvalidPointer, match="nothing at"):
        session.read(f"{ref.pointer}#/table/9")
    with pytest.raises(InvalidPointer, match="not JSON"):
        session.read(f"{session.put('some text').pointer}#/table/1")


@pytest.mark.parametrize(
    "piece",
    ["<table>", "<tr>", "<td rowspan=9999 colspan=9999>x", "<table><tr><td>", "<th>", "<p hidden>"],
)
def test_the_tables_of_a_hostile_page_take_linear_time(piece: str) -> None:
    source = "<table><tr>" + piece * (200_000 // len(piece))
    find_tables(make_content(source.encode(), "text/html"))


# Descriptions


def test_a_table_is_described_with_the_types_of_sql() -> None:
    content = make_content(b'{"items": [{"id": 1, "at": "2026-01-02", "x": 1.5}, {"id": 2}]}', JSON)
    main, items = tables_of(content)
    assert (main.name, items.name, main.rows, main.place) == ("artifact", "items", 2, "/items")
    assert [f"{one.name} {one.type}" for one in main.columns] == [
        "id BIGINT",
        "at DATE",
        "x DOUBLE",
    ]


def test_large_content_is_described_in_the_child() -> None:
    data = json.dumps({"items": [{"id": n, "name": "x" * 20} for n in range(20_000)]}).encode()
    main, *_ = heavy.tables(make_content(data, JSON))
    assert main.rows == 20_000
    assert main.columns == (Column("id", "BIGINT"), Column("name", "VARCHAR"))


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb{n}: 2\n\n", "a: 1\n x\n", "| a |\n", "A  B  C\n", "x | y\n--|--\n", "| a" * 50],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    repeated = "".join(text.replace("{n}", str(n)) for n in range(1_000_000 // len(text)))
    find_tables(make_content(repeated.encode(), "text/plain"))


PIECES = [
    "<table>", "</table>", "<tr>", "<td>", "<th colspan=3>", "<td rowspan=2>", "</td>", "<p hidden>",
    "<script>", "a", "b  c", "1", "|", "---", "--|--", "\n", "\n\n", " ", "key: value", "A  B", "x: ", "\t",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.sampled_from(["text/html", "text/plain"]))
def test_any_text_has_tables_with_rows_or_none(pieces: list[str], media_type: str) -> None:
    for table in find_tables(make_content("".join(pieces).encode(), media_type)):
        assert table.rows()
        assert all(
            isinstance(value, str | int | float | None)
            for row in table.rows()
            for value in row.values()
        )


@given(JSON_VALUES)
def test_any_json_has_tables_with_rows_or_none(value: Any) -> None:
    for table in find_tables(make_content(json.dumps(value).encode(), JSON)):
        assert table.rows()
        assert all(isinstance(row, dict) for row in table.rows())
