"""The types of columns without a database are those that SQL says."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.content import Content
from coatcheck.reading import sql
from coatcheck.reading.sql import run_sql
from coatcheck.reading.tables import tables_of
from tests.reading.framed import make_content


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    sql.pool.close()


def types_in_sql(content: Content) -> dict[str, str]:
    described = run_sql("DESCRIBE artifact", {"artifact": content}).text
    described = described.replace("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ")  # its other name
    return {
        row["column_name"]: row["column_type"] for row in csv.DictReader(io.StringIO(described))
    }


def types_without(content: Content) -> dict[str, str]:
    return {column.name: column.type for column in tables_of(content)[0].columns}


def document(value: Any) -> Content:
    return make_content(json.dumps(value).encode(), "application/json")


COLUMNS: list[list[Any]] = [
    [1, 2], [1, 2.5], [True, False], [True, 1], ["a"], ["12"], [1, "a"], [None], [None, 1], [2**63],
    [2**64], [-(2**63) - 1], ["2026-01-02"], ["2026-01-02", None], ["2026-01-02", "x"],
    ["2026-01-02T03:04:05Z"], ["2026-01-02T03:04:05+02:00"], ["2026-01-02 03:04:05"],
    ["2026-01-02T03:04:05.123"], ["12:30:00"], ["12:30"], ["2026-01"], ["20260102"], ["13/12/2026"],
    ["550e8400-e29b-41d4-a716-446655440000"], [[1, None]], [["a"]], [[]], [[1, "a"]], [[{"x": 1}]],
    [{"x": 1}, {"y": "a"}], [{"x": 1, "a b": [1.5]}], [{}], [{"x": None}], [1, {"x": 1}], [[1], 2],
    [{"x": 1}, {"x": "a"}], [{"x": "2026-01-02"}],
]  # fmt: skip


@pytest.mark.parametrize("values", COLUMNS, ids=json.dumps)
def test_a_column_of_json_has_the_type_that_sql_says(values: list[Any]) -> None:
    content = document([{"id": n, "v": value} for n, value in enumerate(values)])
    assert types_without(content) == types_in_sql(content)


TEXTS = [
    ["1", "2"], ["1", "2.5"], ["1", ""], ["", ""], ["true", "FALSE"], ["yes", "no"], ["0", "1"],
    ["2026-01-02"], ["2026/01/02"], ["01/02/2026"], ["13/12/2026"], ["12/31/26"], ["2026-01-02 03:04"],
    ["2026-01-02T03:04:05Z"], ["2026-01-02 03:04:05.123"], ["12:30"], ["12:30:00"], ["a", "1"],
    ["1e5", "2"], ["1,000"], ["9999999999999999999"], ["007"], ["1967"], ["1.", ".5"], ["1.2.3"],
    ["2026-01-02", "x"], ["-1", "-2.5"], ["NULL", "1"], ["20260102"],
]  # fmt: skip


@pytest.mark.parametrize("texts", TEXTS, ids=json.dumps)
def test_a_column_of_csv_has_the_type_that_sql_says(texts: list[str]) -> None:
    rows = "".join(f'{number},"{text}",x\n' for number, text in enumerate(texts * 3, 10))
    content = make_content(f"id,v,w\n{rows}".encode(), "text/csv")
    assert types_without(content) == types_in_sql(content)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": st.integers(0, 9)},
            optional={
                "v": st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.sampled_from([1.5, "a", "2026-01-02"]),
                "w": st.lists(st.integers(0, 9), max_size=2),
            },
        ),
        min_size=1,
        max_size=6,
    )
)  # fmt: skip
def test_rows_of_any_values_have_the_types_that_sql_says(rows: list[dict[str, Any]]) -> None:
    content = document(rows)
    assert types_without(content) == types_in_sql(content)


def test_real_data_has_the_types_that_sql_says(corpus: Path) -> None:
    table = make_content((corpus / "content/csv/marvel-wikia-data.csv").read_bytes(), "text/csv")
    assert types_without(table) == types_in_sql(table)
    issues = make_content(
        (corpus / "content/json/github-issues.json").read_bytes(), "application/json"
    )
    flat = {name: kind for name, kind in types_in_sql(issues).items() if "(" not in kind}
    assert flat.items() <= types_without(issues).items()
