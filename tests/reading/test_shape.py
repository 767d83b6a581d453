"""The shape of a document: accurate, merged, breadth first, and never more than a page."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.reading.json_content import shape
from tests.reading.framed import make_content
from tests.reading.test_jsonpath import JSON_VALUES, document, records

pytestmark = pytest.mark.usefixtures("each_source")


def outline(value: Any, max_chars: int = 8000) -> list[str]:
    return shape(document(value), max_chars=max_chars).text.split("\n")


def test_keys_types_lengths_and_samples_are_shown() -> None:
    assert outline(
        {
            "name": "x",
            "n": 1.5,
            "none": None,
            "ok": True,
            "list": [1, 2, 3, 4],
            "empty": [],
            "in": {"a": "b"},
        }
    ) == [
        "object of 7 keys",
        '  name: string "x"',
        "  n: number 1.5",
        "  none: null",
        "  ok: boolean true",
        "  list: array of 4 numbers 1, 2, 3, …",
        "  empty: array of 0 items",
        "  in: object of 1 key",
        '    a: string "b"',
    ]


def test_items_of_an_array_are_merged_and_keys_show_how_often_they_occur() -> None:
    assert outline([{"id": 1, "a": "x"}, {"id": 2}, {"id": "3"}]) == [
        "array of 3 objects",
        "  []: object of 1-2 keys",
        '    id: number 1, 2 | string "3"',
        '    a (1 of 3): string "x"',
    ]


def test_records_of_jsonl_are_merged() -> None:
    answer = shape(records('{"a": 1}', '{"a": 2, "b": []}', "oops"))
    assert answer.text.split("\n") == [
        "3 records, one JSON value per line | object of 1-2 keys",
        "  a: number 1, 2",
        "  b (1 of 2): array of 0 items",
    ]
    assert "1 line skipped" in answer.note


def test_the_first_of_many_records_are_merged_and_all_are_counted() -> None:
    answer = shape(records(*('{"a": 1}' for _ in range(5000))))
    assert answer.text.startswith(
        "5,000 records, one JSON value per line, shape of the first 1,000"
    )


def test_the_top_level_is_complete_before_anything_deeper_is_shown() -> None:
    lines = outline(
        {f"key{n}": {"deep": {"deeper": list(range(9))}} for n in range(12)}, max_chars=900
    )
    assert sum(line.startswith("  key") for line in lines) == 12


def test_omitted_keys_are_counted() -> None:
    answer = shape(document({f"key{n}": n for n in range(100)}))
    assert "  … 75 more keys" in answer.text
    assert "75 places left out" in answer.note


def test_a_long_value_and_a_long_key_are_cut_and_say_so() -> None:
    (_, line) = outline({"k" * 500: "v" * 500})
    assert "(500 characters)" in line
    assert len(line) < 200


@given(JSON_VALUES, st.integers(200, 2000))
def test_an_outline_is_never_longer_than_its_page(value: Any, room: int) -> None:
    assert len(shape(document(value), max_chars=room).text) <= room


@given(st.lists(JSON_VALUES, max_size=5))
def test_an_outline_is_the_same_each_time(values: list[Any]) -> None:
    content = records(*map(json.dumps, values))
    assert shape(content) == shape(content)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (make_content(b"[" * 100_000, "application/json"), LimitExceeded),
        (make_content(b"{", "application/json"), InvalidArgument),
        (make_content(b"oops\noops\n", "application/x-ndjson"), InvalidArgument),
    ],
)
def test_content_without_a_shape_is_an_error(content: Content, error: type[Exception]) -> None:
    with pytest.raises(error):
        shape(content)


def test_a_deep_document_says_that_it_continues() -> None:
    answer = shape(make_content(b"[" * 300 + b"]" * 300, "application/json"))
    assert "left out" in answer.note


def test_a_large_document_fits_on_a_page(corpus: Path) -> None:
    answer = shape(
        make_content((corpus / "content/json/openai-openapi.json").read_bytes(), "application/json")
    )
    assert len(answer.text) <= 8000
    assert "  paths: object of " in answer.text
    assert '    title: string "OpenAI API"' in answer.text
    assert "left out" in answer.note
