"""JSONPath on JSON and JSONL: results, notes, and bounds for hostile paths and documents."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.reading import json_content
from coatcheck.reading.jsonpath import find, is_linear
from tests.reading.framed import make_content

pytestmark = pytest.mark.usefixtures("each_source")

SHOP = {
    "items": [
        {"name": "pen", "price": 2, "tags": ["a", "b"]},
        {"name": "Füller\nblau", "price": 30},
        {"name": "ink", "price": 9, "price.old": 12},
    ],
    "open": True,
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


def document(value: Any) -> Content:
    return make_content(json.dumps(value, ensure_ascii=False).encode(), "application/json")


def records(*lines: str) -> Content:
    return make_content("\n".join(lines).encode(), "application/x-ndjson")


def values(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n")] if text else []


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$.items[0].name", ["pen"]),
        ("$.items[?@.price < 10].name", ["pen", "ink"]),
        ("$.items[?@.tags].price", [2]),
        ("$..price", [2, 30, 9]),
        ("$.items[-1]['price.old']", [12]),
        ("$.items[?length(@.name) == 3].name", ["pen", "ink"]),
        ("$.items[?match(@.name, 'p.*')].name", ["pen"]),
        ("$.items[?match(@.name, '.*')].name", ["pen", "ink"]),  # a dot does not match a line end
        ("$.items[?search(@.name, 'n')].price", [2, 9]),
        ("$.items[?search(@.name, '[[:upper:]]')].price", [30]),  # RE2's own syntax is accepted
        ("$.items[?count(@.tags[*]) == 2].price", [2]),
        ("$.open", [True]),
        ("$.nothing", []),
    ],
)
def test_a_path_selects_values(path: str, found: list[Any]) -> None:
    answer = find(document(SHOP), path)
    assert values(answer.text) == found
    assert answer.shown == f"{len(found)} result{'' if len(found) == 1 else 's'}"
    assert answer.media_type == ("application/json" if len(found) == 1 else "application/x-ndjson")


def test_if_nothing_matches_the_note_says_what_to_try() -> None:
    assert "shape" in find(document(SHOP), "$.nothing").note


@given(JSON_VALUES)
def test_the_root_is_the_document(value: Any) -> None:
    assert json.loads(find(document(value), "$").text) == value


@given(JSON_VALUES)
def test_descent_finds_every_value_once_in_document_order(value: Any) -> None:
    def below(at: Any) -> list[Any]:
        children = list(at.values()) if isinstance(at, dict) else at if isinstance(at, list) else []
        return children + [item for child in children for item in below(child)]

    assert values(find(document(value), "$..*").text) == below(value)


def test_each_line_of_jsonl_is_a_document_and_the_note_names_the_lines() -> None:
    answer = find(records('{"a": 1}', "", '{"b": 2}', '{"a": [3, 4]}'), "$.a")
    assert values(answer.text) == [1, [3, 4]]
    assert answer.note == "from lines 1, 4"


def test_lines_that_are_not_json_are_skipped_and_reported() -> None:
    answer = find(records('{"a": 1}', "oops", '{"a": 2}', "[" * 100_000), "$.a")
    assert values(answer.text) == [1, 2]
    assert "2 lines skipped as invalid JSON, the first is line 2" in answer.note


def test_an_overlong_line_is_skipped_in_bounded_memory() -> None:
    lines = list(
        json_content.lines(
            make_content(b"1\n" + b"x" * 1000 + b"\n2\n" + b"y" * 1000, "application/x-ndjson"), 100
        )
    )
    assert lines == [(1, b"1"), (2, None), (3, b"2"), (4, None)]


def test_results_over_the_limit_are_counted_and_left_out() -> None:
    answer = find(document(list(range(1000))), "$[*]", limit=20)
    assert values(answer.text) == list(range(10))
    assert answer.shown == "10 of 1,000 results"
    assert "left out" in answer.note


def test_one_result_over_the_limit_is_cut_and_says_so() -> None:
    answer = find(document("x" * 1000), "$", limit=50)
    assert (len(answer.text), answer.media_type) == (50, "text/plain")
    assert "1,002 characters" in answer.note


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("items", r"character 1 near 'items'"),
        ("$.items[", r"character 9 at its end"),
        ("$.items[?@.price << 3]", r"character 19"),
        ("$.items[?nope(@.a)]", r"'nope' is not defined"),
        ("$.items[?search(@.a, '(?=x)')]", r"look-around"),
        (r"$.items[?search(@.a, '(a)\\1')]", r"back-references"),
        ("$[?@.a == 1e999]", r"not a JSONPath"),
        ("$['\\u12", r"not a JSONPath"),
        ("$[" + "9" * 3000 + "]", r"not a JSONPath"),
        ("$[?" + "(" * 1500 + "@.a" + ")" * 1500 + "]", r"nested too deeply"),
        ("$" + ".a" * 5000, r"the limit is 4,000"),
        ("", r"not a JSONPath"),
    ],
)
def test_an_invalid_path_is_refused_with_its_position_and_an_example(
    path: str, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected) as raised:
        find(document(SHOP), path)
    assert "$.items[0].name" in raised.value.hint
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000]
)
def test_a_hundred_thousand_brackets_are_an_error(data: bytes) -> None:
    with pytest.raises(LimitExceeded, match="nested too deeply"):
        find(make_content(data, "application/json"), "$..a")


def test_descent_into_a_document_that_is_too_deep_is_an_error() -> None:
    with pytest.raises(LimitExceeded, match="deeper than 200"):
        find(make_content(b"[" * 500 + b"]" * 500, "application/json"), "$..a")


@pytest.mark.parametrize("data", [b"{", b"", b"nope", b"\xff\xfe", b'{"a": 1} x', b"1" * 5000])
def test_invalid_json_is_an_error_that_says_what_to_do(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="as text"):
        find(make_content(data, "application/json"), "$")


def test_a_document_over_the_size_limit_is_refused_without_reading_it() -> None:
    content = make_content(b"[]", "application/json")
    with pytest.raises(TooLarge, match="SQL"):
        json_content.whole(content, 1)


def test_a_document_of_too_many_values_is_refused_before_it_is_built() -> None:
    with pytest.raises(LimitExceeded, match="1,001 values"):
        json_content.parse(b"[" + b"0," * 1000 + b"0]", max_nodes=1000)
    assert json_content.parse(json.dumps([",[{" * 1000]).encode(), max_nodes=1000) == [",[{" * 1000]


def test_results_that_are_left_out_are_counted_until_time_is_up() -> None:
    answer = find(document([1] * 100), "$..*", limit=5, seconds=0)
    assert answer.shown == "3 of at least 4 results"


@pytest.mark.parametrize(
    "path", ["$", "$.a[0]['b.c'][-1][1:9:2][*]", "$..id", "$.rows[*]..*.name", "$..[0][*]"]
)
def test_a_path_that_visits_no_value_twice_is_linear(path: str) -> None:
    assert is_linear(path)


@pytest.mark.parametrize("path", ["$..a..b", "$[0,0]", "$[?@.a]", "$..[?@ == 1]", "$['a','b']"])
def test_a_path_that_may_visit_a_value_twice_is_not_linear(path: str) -> None:
    assert not is_linear(path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*)(.*)(.*)(.*)[b]$", "a{1,900}"])
def test_a_pattern_that_backtracks_elsewhere_is_linear_here(pattern: str) -> None:
    answer = find(document(["a" * 100_000 + "!"]), f"$[?match(@, '{pattern}')]")
    assert answer.shown == "0 results"


def test_a_lone_surrogate_matches_nothing_and_breaks_nothing() -> None:
    content = make_content(b'["\\ud800"]', "application/json")
    assert find(content, "$[?match(@, '.')]").shown == "0 results"


def test_real_data_can_be_queried(corpus: Path) -> None:
    api = make_content(
        (corpus / "content/json/openai-openapi.json").read_bytes(), "application/json"
    )
    assert values(find(api, "$.info.title").text) == ["OpenAI API"]
    assert find(api, "$.paths.*[?@.operationId].operationId").text.count("\n") > 100
