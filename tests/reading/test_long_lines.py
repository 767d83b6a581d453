"""grep on long lines: whole records, each shown once with its path, and decoded strings."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.reading import Request
from coatcheck.reading.long_lines import RECORD, Decoded, Structure, decoded_lines
from tests.reading.framed import content_of, make_content, pages, read

ROWS = [
    (f"id-{n}", "Dana O'Neil" if n == 7 else 'Al "x"', None, f"2024-01-{n:02}", n / 2)
    for n in range(1, 29)
]
ITEMS = [
    {"id": n, "name": f"item {n}", "tags": ["new", f"tag-{n}"], "at": {"lat": n, "lon": -n}}
    for n in range(40)
]


def grep_json(value: Any, pattern: str, **options: Any) -> str:
    content = make_content(json.dumps(value).encode(), "application/json")
    return read(content, Request(grep=pattern, **options)).text


def test_a_match_in_json_shows_the_whole_record_and_its_path() -> None:
    expected = f"1:#/items/3 {json.dumps(ITEMS[3])}"
    assert grep_json({"total": 40, "items": ITEMS}, "tag-3\\b") == expected
    assert grep_json({"total": 40, "items": ITEMS}, '"lon": -3\\b') == expected


def test_keys_in_a_path_are_escaped_as_in_a_pointer() -> None:
    value = {"a/b": {"~é": [{"x": "y" * 2_000}, {"x": "needle"}]}}
    assert grep_json(value, "needle") == '1:#/a~1b/~0é/1 {"x": "needle"}'


def test_a_row_of_a_python_repr_is_shown_whole_with_its_number() -> None:
    page = read(content_of(repr(ROWS)), Request(grep="Dana"))
    assert page.text == f"1:row 7 {ROWS[6]!r}"
    assert page.shown == "match 1 of 1 in 1 line, 1 record"


def test_a_call_in_a_row_is_part_of_the_row() -> None:
    rows = (
        "["
        + ", ".join(f"('n{n}', datetime.datetime(2024, 1, {n}), None)" for n in range(1, 60))
        + "]"
    )
    page = read(content_of(rows), Request(grep=r"2024, 1, 31\)"))
    assert page.text == "1:row 31 ('n31', datetime.datetime(2024, 1, 31), None)"


def test_a_record_is_shown_once_and_all_its_matches_are_counted() -> None:
    value = [
        {"a": "needle", "b": ["needle", "needle"], "c": "x" * 100},
        *ITEMS,
        {"z": "needle", "y": "w" * 100},
    ]
    content = make_content(json.dumps(value).encode(), "application/json")
    page = read(content, Request(grep="needle"))
    assert page.shown == "matches 1-4 of 4 in 1 line, 2 records"
    assert [line.partition(" ")[0] for line in page.text.split("\n")] == ["1:#/0", "1:#/41"]


def test_a_small_part_of_a_large_record_is_shown_with_its_surroundings() -> None:
    value = [
        {
            "id": n,
            "tags": [{"k": "Name", "v": f"web-{n}"}],
            **{f"key{k}": "v" * 40 for k in range(90)},
        }
        for n in (1, 2)
    ]
    text = grep_json(value, "web-2")
    assert text.startswith('1:#/1 …"id": 2, "tags": [{"k": "Name", "v": "web-2"}], "key0"')
    assert text.endswith('"…')  # ends after a whole member
    assert len(text) < 700


def test_the_first_of_many_matches_is_shown_whole_the_others_in_brief_with_an_exact_count() -> None:
    value = [{"id": n, "text": "needle " + "x" * 400, "more": "y" * 200} for n in range(300)]
    content = make_content(json.dumps(value).encode(), "application/json")
    page = read(content, Request(grep="needle"))
    assert page.matches == 300
    assert page.text.count("\n") >= 15
    first, *others = page.text.split("\n")
    assert first == f"1:#/0 {json.dumps(value[0])}"
    assert max(map(len, others)) < 400
    assert "1:#/7 …" in page.text


def test_a_json_line_or_csv_line_is_shown_whole_up_to_the_size_of_a_record() -> None:
    lines = [json.dumps({"n": n, "text": "word " * 150}) for n in range(9)]
    content = make_content("\n".join(lines).encode(), "application/x-ndjson")
    assert read(content, Request(grep='"n": 4')).text == f"5:{lines[4]}"
    csv = "a,b\n" + "".join(f"{n},{'word ' * 150}\n" for n in range(9))
    assert (
        read(make_content(csv.encode(), "text/csv"), Request(grep="^4,")).text
        == f"6:4,{'word ' * 150}"
    )


WRAPPED = {
    "content": [{"type": "text", "text": json.dumps({"total": 40, "items": ITEMS}, indent=2)}]
}


@pytest.mark.parametrize(
    "wrapped",
    [json.dumps(WRAPPED), repr(WRAPPED), f"content=[Text(text={WRAPPED['content'][0]['text']!r})]"],
)
def test_records_of_json_in_a_string_are_shown_decoded(wrapped: str) -> None:
    page = read(content_of(wrapped), Request(grep='"name": "item 12"'))
    assert page.matches == 1
    assert '{ "id": 12, "name": "item 12", "tags": [ "new", "tag-12" ]' in page.text
    assert "\\" not in page.text


def test_nested_strings_are_decoded_before_they_are_matched() -> None:
    twice = json.dumps({"text": json.dumps({"body": 'line one\nsay "yes" — é\n' * 60})})
    for pattern in ('say "yes" — é', "one say", r"one\nsay", "line one\nsay"):
        found = list(pages(make_content(twice.encode(), "application/json"), Request(grep=pattern)))
        assert {page.matches for page in found} == {60}
    page = read(
        make_content(twice.encode(), "application/json"), Request(grep="yes", max_chars=400)
    )
    assert 'line one\n  say "yes" — é\n' in page.text


def test_a_pattern_with_a_line_break_matches_only_a_line_break_of_a_string() -> None:
    content = make_content(
        json.dumps({"a": "one\ntwo", "b": "one two"}).encode(), "application/json"
    )
    assert read(content, Request(grep=r"one\ntwo")).matches == 1
    assert read(content, Request(grep="one\ntwo", literal=True)).matches == 1
    assert read(content, Request(grep="one two")).matches == 2


def test_content_that_is_cut_off_inside_a_string_still_has_records() -> None:
    text = repr(WRAPPED)[:3_000]
    page = read(content_of(text), Request(grep='"name": "item 3"'))
    assert '{ "id": 3, "name": "item 3"' in page.text


def test_records_in_a_very_long_line_are_shown() -> None:
    rows = [{"id": n, "name": f"name {n}", "text": "x" * 80} for n in range(30_000)]
    content = make_content(json.dumps(rows).encode(), "application/json")
    page = read(content, Request(grep='"name 25000"'))
    assert page.text == f"1:{json.dumps(rows[25_000])}"


VALUES = st.recursive(
    st.none()
    | st.integers(-9, 9)
    | st.sampled_from(["needle", 'q"[', "a'(", "\\", "x,y", "é\n", "z" * 90]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["k", "/~", 'a"]', "é"]), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(st.lists(VALUES, min_size=1, max_size=12))
def test_every_path_leads_to_a_value_with_the_match(values: list[Any]) -> None:
    session_text = json.dumps(values)
    structure, at = Structure(session_text.encode(), is_json=True), -1
    while (at := session_text.find("needle", at + 1)) >= 0:
        found = structure.record_at(at, at + 6)
        if found is None or not found.label:
            continue
        value: Any = values
        for step in found.label.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
        assert "needle" in json.dumps(value)
        assert found.is_cut or json.loads(found.text) == value


@given(
    st.lists(
        st.sampled_from(
            ["[", "]", "{", "}", "(", ")", '"', "'", "\\", ",", ":", "needle", "é", " ", "x" * 40]
        )
    ).map("".join)
)
def test_any_text_has_a_record_around_a_match_or_none(text: str) -> None:
    data, at = text.encode(), -1
    structure = Structure(data)
    while (at := data.find(b"needle", at + 1)) >= 0:
        found = structure.record_at(at, at + 6)
        if found is not None:
            assert found.start <= at < found.end
            assert len(found.text) <= 2 * RECORD


@given(
    st.lists(st.sampled_from(["\\", '"', "'", "n", "u00e9", "\\u00e9", "\\n", "é", "x", "/"])).map(
        "".join
    )
)
def test_offsets_in_decoded_text_map_back_to_the_source(text: str) -> None:
    view = Decoded(text.encode())
    assert view.data == decoded_lines(text.encode())
    for offset in range(len(view.data)):
        assert view.decoded(view.written(offset)) <= offset


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "filler", ["[", '"\\"', "'\\'", '{"a":', "(,", "\\\\", '"', "'x ", '\\"', "[1],"]
)
def test_hostile_lines_are_scanned_once(filler: str) -> None:
    data = (filler * (400_000 // len(filler)) + "needle").encode()
    began = time.process_time()
    Structure(data).record_at(len(data) - 6, len(data))
    assert time.process_time() - began < 10  # quadratic time would be minutes
