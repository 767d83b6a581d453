"""Previews: what they say about content, that it is true, and that no content can break them."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import unicodedata
import zipfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck import media
from coatcheck.previews import EDGE, LEAST, Preview, Sample, code, diffs, logs, preview
from coatcheck.previews.json_parts import CutDict, CutList, CutText, parse_cut
from coatcheck.previews.kinds import KINDS, decode
from tests.token_samples import corpus_files

JSON, JSONL, TEXT = media.JSON, media.JSONL, media.TEXT
TYPES = [
    JSON, JSONL, TEXT, "text/csv", "text/tab-separated-values", "text/html", "application/xml", "image/svg+xml",
    "text/markdown", "text/x-rst", "text/x-diff", "text/x-python", "text/javascript", "application/yaml", "image/png",
    "image/jpeg", "image/gif", "image/webp", "audio/wav", "video/mp4", "application/pdf", "application/zip",
    "application/gzip", "application/vnd.sqlite3", "application/x-elf", media.BINARY, "application/x-unheard-of", "",
]  # fmt: skip


def look(content: str | bytes, media_type: str = TEXT, limit: int = 200) -> Preview:
    data = content.encode() if isinstance(content, str) else content
    return preview(Sample.of(data), media_type=media_type, limit=limit)


def large(line: str, *, size: int = 4 * EDGE) -> str:
    return line * (size // len(line) + 1)


# JSON


def test_json_shows_its_keys_and_the_columns_of_its_rows() -> None:
    document = {
        "total": 512,
        "items": [{"id": n, "tags": ["a"] * n, "owner": {"name": "x" * 50}} for n in range(40)],
    }
    found = look(json.dumps(document), JSON)
    assert found.text == (
        "JSON object, 2 keys\ntotal 512, items [40]\n"
        "items: 40 objects: id BIGINT 0..39, tags VARCHAR[] 0-39 items, owner STRUCT {name}"
    )
    assert found.shown == "2 of 2 keys, 3 of 3 columns, counted in all of it"


def test_rows_that_lack_a_key_are_counted_as_nulls() -> None:
    rows = [{"id": n} | ({"error": "no"} if n % 2 else {}) for n in range(100)]
    assert look(json.dumps(rows), JSON).text == (
        "JSON array of 100 items\nitems: id BIGINT 0..99, error VARCHAR always no, 50 null"
    )


def test_objects_and_arrays_in_one_place_are_distinguished() -> None:
    rows = [{"a": {"x": n}} if n % 2 else {"a": [n, n, n]} for n in range(100)]
    assert "a JSON array|object" in look(json.dumps(rows), JSON).text


def test_values_that_repeat_are_counted() -> None:
    rows = [{"state": "open" if n % 3 else "closed", "n": n} for n in range(100)]
    assert "state VARCHAR open 66|closed 34" in look(json.dumps(rows), JSON).text


def test_a_list_of_values_that_goes_on_is_marked() -> None:
    rows = [{"name": f"name {n * n % 23}"} for n in range(300)]
    assert re.search(
        r"name VARCHAR name \d+ \d+\|.*\|… 12 distinct", look(json.dumps(rows), JSON).text
    )


def test_more_keys_than_fit_are_counted() -> None:
    found = look(json.dumps({f"some_long_key_{n:03}": n for n in range(100)}), JSON)
    missing = int(re.search(r"\+(\d+) more", found.text)[1])  # type: ignore[index]
    assert found.shown == f"{100 - missing} of 100 keys, counted in all of it"
    assert found.text.count("some_long_key_") == 100 - missing


def test_the_type_and_the_largest_part_come_before_urls() -> None:
    row = {f"{name}_url": "https://example.org/" * 3 for name in "abcdefghijklmnopqrstuvwxyz"}
    row |= {"type": "issue", "labels": ["bug"] * 30}  # type: ignore[dict-item]
    found = look(json.dumps(row), JSON).text
    assert ", type, labels, +" in found


def test_counts_of_json_that_continues_beyond_the_sample_are_marked_as_minimums() -> None:
    rows = [{"id": n, "text": "word " * 10} for n in range(5_000)]
    text = json.dumps({"rows": rows, "after": 1})
    found = preview(Sample(text[:EDGE].encode(), b"", len(text)), media_type=JSON)
    assert found.text.startswith(f"in the first {EDGE} of {len(text)} bytes: JSON object, ≥1 key\n")
    assert re.search(r"rows: ≥\d+ objects: id BIGINT", found.text)
    assert found.shown.endswith(f", in the first {EDGE} of {len(text)} bytes")


@pytest.mark.parametrize("rows", [2_500, 30_000])
def test_rows_of_json_are_counted_exactly(rows: int) -> None:
    document = {"rows": [{"id": n, "text": "word " * 10} for n in range(rows)], "after": 1}
    found = look(json.dumps(document), JSON).text
    assert f"rows: {rows} objects: id BIGINT 0..{rows - 1}, text VARCHAR" in found


def test_a_row_cut_in_the_middle_does_not_make_keys_look_optional() -> None:
    rows = json.dumps([{"first": n, "second": "x" * 977, "third": n} for n in range(500)])
    found = preview(Sample(rows[:EDGE].encode(), b"", len(rows)), media_type=JSON)
    assert "null" not in found.text


def test_one_huge_string_inside_json_shows_its_beginning_and_size() -> None:
    found = look(json.dumps({"stdout": "Compiling the world. " * 20_000, "code": 0}), JSON)
    assert 'stdout "Compiling the world. ' in found.text
    assert "(420000 characters), code 0" in found.text


@pytest.mark.parametrize("depth", [50_000, 100_000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_reported_and_not_followed(depth: int, opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    for text in (opening * depth, opening * depth + closing * depth):
        assert "nested too deep" in look(text, JSON).shown


def test_brackets_inside_strings_are_not_nesting() -> None:
    assert 'a "[[[' in look(json.dumps({"a": "[" * 5_000, "b": "}" * 5_000}), JSON).text


@pytest.mark.parametrize(
    "text", ['{"a": 1, ' * 50, "[1, 2" + " " * 300, "{'a': 1}" * 50, '{"a" 1}' + " " * 300]
)
def test_broken_json_is_shown_as_text_that_is_not_json(text: str) -> None:
    found = look(text, JSON)
    assert found.shown.endswith("not valid JSON")
    assert found.text.startswith(text[:40])


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=5)
    ),
    max_leaves=12,
)


def begins_like(cut: object, whole: object) -> bool:
    """Return whether a value that was cut off agrees with the whole value."""
    if isinstance(cut, CutText):
        return isinstance(whole, str) and whole.startswith(cut)
    if isinstance(cut, CutList):
        return (
            isinstance(whole, list) and len(cut) <= len(whole) and all(map(begins_like, cut, whole))
        )
    if isinstance(cut, CutDict):
        return isinstance(whole, dict) and all(
            key in whole and begins_like(cut[key], whole[key]) for key in cut
        )
    return cut == whole


@given(document=documents, data=st.data(), indent=st.sampled_from([None, 1]), ascii_=st.booleans())
def test_json_that_is_cut_anywhere_is_parsed_to_a_part_of_the_document(
    document: object, data: st.DataObject, indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    try:
        found = parse_cut(cut)
    except ValueError:
        return
    assert begins_like(found, document)


def test_concatenated_json_texts_are_counted() -> None:
    values = [json.dumps({"id": n, "body": "long " * 30}, indent=2) for n in range(5)]
    found = look("\n".join(values), JSON)
    assert found.text.startswith("5 JSON values, one after another\nitems: id BIGINT 5 values")


def test_numbers_with_thousands_of_digits_do_no_harm() -> None:
    found = look(json.dumps([1])[:-1] + ", " + "9" * 6_000 + "]", JSON)
    assert found.text == "JSON array of 2 items: 1, a number too large to read"


def test_half_of_a_surrogate_pair_in_json_is_escaped() -> None:
    found = look('{"a": "\\ud800 and more", "b": "' + "x" * 300 + '"}', JSON)
    found.text.encode()
    assert "\\ud800" in found.text


def test_json_lines_are_counted_and_their_columns_described() -> None:
    lines = "".join(
        json.dumps({"level": "info" if n % 2 else "error", "n": n}) + "\n" for n in range(300)
    )
    found = look(lines, JSONL)
    assert found.text == (
        "300 records, one JSON value per line · ERROR 150 INFO 150\n"
        "items: level VARCHAR error 150|info 150, n BIGINT 0..299"
    )
    assert found.shown == "2 of 2 columns, counted in all of it"


def test_all_records_of_large_json_lines_are_described() -> None:
    text = large('{"level":"info","n":1}\n')
    total = len(text) // 23
    assert look(text, JSONL).text == (
        f"{total} records, one JSON value per line · INFO {total}\n"
        "items: level VARCHAR always info, n BIGINT always 1"
    )


def test_lines_that_are_not_json_are_counted_separately() -> None:
    found = look('{"a":1}\n' * 50 + "oops\n", JSONL)
    assert found.shown == "1 line not JSON, 1 of 1 columns, counted in all of it"


# Tables


def test_a_table_shows_its_columns_first_rows_and_number_of_rows() -> None:
    rows = "".join(f"{n},Person {n},{n % 90}\n" for n in range(1_000))
    found = look("id,name,age\n" + rows, "text/csv")
    assert found.text == (
        "1000 rows × 3 columns\nid BIGINT 0..999, name VARCHAR 1000 values, e.g. Person 0, "
        "age BIGINT 0..89, 90 distinct\n0, Person 0, 0\n1, Person 1, 1\n2, Person 2, 2"
    )
    assert found.shown == "3 of 3 columns, counted in all of it"


def test_an_empty_cell_is_a_null() -> None:
    found = look("id,state\n" + "1,\n2,open\n" * 100, "text/csv").text
    assert "id BIGINT 1 100|2 100, state VARCHAR always open, 100 null" in found


def test_a_line_feed_inside_quotes_does_not_start_a_row() -> None:
    found = look("id,text\n" + '1,"two\nlines"\n' * 50, "text/csv")
    assert found.text.startswith("50 rows × 2 columns\n")
    assert found.text.endswith("\n1, two lines")


@pytest.mark.parametrize(
    "row",
    [
        "1,Someone,44",
        '1,"two\nlines",44',
        '1,"a ""word"" of it\n, and more",44',
        '1,5" pipe,44',
        '1,5" and 6" pipes,44',
    ],
)
def test_all_rows_of_a_table_are_counted(row: str) -> None:
    found = look("id,name,age\n" + f"{row}\n" * 30_000, "text/csv")
    assert found.text.startswith("30000 rows × 3 columns\nid BIGINT always 1, ")


def test_a_row_count_of_the_sample_alone_is_marked_as_a_minimum() -> None:
    data = ("id,name\n" + "1,x\n" * 60_000).encode()
    found = preview(Sample(data[:EDGE], data[-EDGE:], len(data)), media_type="text/csv")
    part = f"in the first {EDGE} of {len(data)} bytes"
    assert found.text.startswith(f"{part}: ≥16382 rows × 2 columns\n")
    assert found.shown.endswith(part)


def test_a_table_without_a_header_says_so() -> None:
    found = look("1,2,3\n" * 100, "text/csv").text
    assert found.startswith("100 rows × 3 columns, no header\ncolumn0 BIGINT always 1, ")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_without_a_media_type_is_recognized(separator: str) -> None:
    rows = "".join(separator.join((str(n), "name", "x")) + "\n" for n in range(100))
    assert look(separator.join(("id", "what", "why")) + "\n" + rows).text.startswith(
        "100 rows × 3 columns\nid BIGINT 0..99, what VARCHAR always name, why "
    )


def test_prose_with_commas_is_not_a_table() -> None:
    prose = (
        "One, two, three.\nThen, nothing.\nFive words, and, a, few, more.\nNone here.\nYes, no.\n"
        * 20
    )
    assert "column" not in look(prose).text


# Logs and program output


def test_a_log_shows_levels_times_and_its_first_error() -> None:
    lines = [f"2031-05-06 10:{n // 60:02}:{n % 60:02} INFO request {n} served" for n in range(600)]
    lines[40] = "2031-05-06 10:00:40 ERROR the database is away"
    lines[41] = "2031-05-06 10:00:41 WARNING trying again"
    found = look("\n".join(lines))
    assert found.text == (
        "600 lines · ERROR 1 WARN 1 INFO 598 · 2031-05-06 10:00:00 to 2031-05-06 10:09:59\n"
        "first error, line 41: 2031-05-06 10:00:40 ERROR the database is away"
    )
    assert found.shown == "levels and times, counted in all of it"


def test_levels_are_counted_in_the_whole_log() -> None:
    text = (
        "2031-05-06T10:00:00Z INFO start\n"
        + large("2031-05-06T10:00:01Z DEBUG tick\n")
        + "2031-05-07T00:00:00Z INFO end\n"
    )
    found = look(text)
    assert f"INFO 2 DEBUG {text.count('DEBUG')} ·" in found.text
    assert "2031-05-06T10:00:00Z to 2031-05-07T00:00:00Z" in found.text
    assert found.shown == "levels and times, counted in all of it"


def test_level_counts_of_the_sample_alone_are_marked_as_minimums() -> None:
    data = large("2031-05-06T10:00:01Z DEBUG tick\n").encode()
    found = preview(Sample(data[:EDGE], data[-EDGE:], len(data)), media_type=TEXT)
    assert "DEBUG ≥" in found.text
    assert f"in the first {EDGE} of {len(data)} bytes" in found.shown


def test_the_first_and_the_last_error_of_a_log_are_shown_with_their_lines() -> None:
    tick = large("2031-05-06T10:00:01Z DEBUG tick\n")
    text = f"{tick}2031-05-07T00:00:00Z ERROR gone\n{tick}2031-05-08T00:00:00Z FATAL over\n{tick}"
    lines = text.split("\n")
    found = look(text, limit=300)
    assert (
        f"first error, line {lines.index('2031-05-07T00:00:00Z ERROR gone') + 1}: 2031"
        in found.text
    )
    assert (
        f"last error, line {lines.index('2031-05-08T00:00:00Z FATAL over') + 1}: 2031" in found.text
    )
    assert found.ask == 'grep="FATAL|ERROR"'


@pytest.mark.parametrize(
    ("prefix", "bad", "good"),
    [
        ("web-1  | 2026-11-17T03:00:00Z ", "error: x", "info: x"),
        ("Nov 17 03:00:01 host app[12]: ", "ERROR x", "INFO x"),
        ("2026-11-17T03:00:00.0Z stdout F ", "level=error msg=x", "level=info msg=x"),
        (
            "",
            "E1117 03:00:01.123456      12 file.go:3] x",
            "I1117 03:00:01.123456      12 file.go:3] x",
        ),
        ("10:00:00 ", "[ERR] x", "[INF] x"),
        (
            "",
            "2026-11-17 03:00:00,123 - app - ERROR - x",
            "2026-11-17 03:00:00,123 - app - INFO - x",
        ),
    ],
)
def test_levels_are_found_after_any_prefix(prefix: str, bad: str, good: str) -> None:
    text = "".join(f"{prefix}{bad if n in (70, 75) else good} {n}\n" for n in range(100))
    found = look(text)
    assert "ERROR 2 INFO 98" in found.text
    assert "first error, line 71: " in found.text


def test_a_level_in_the_middle_of_a_message_does_not_count() -> None:
    text = "".join(f"2031-05-06 10:00:00 INFO {'y' * 200} no ERROR here\n" for _ in range(100))
    assert "ERROR" not in look(text).text.split("·")[1]


def test_frequent_levels_of_a_very_large_log_are_counted_exactly() -> None:
    text = "".join(
        f"2031-05-06 10:00:00 {'INFO' if n % 3 else 'WARN'} message {n}\n" for n in range(40_000)
    )
    found = look(text + "2031-05-06 10:00:01 ERROR at last\n")
    assert "ERROR 1 WARN 13334 INFO 26666" in found.text


def test_a_log_shows_the_words_that_tell_its_lines_apart() -> None:
    verbs = ["install", "configure", "configure", "trigproc"]
    text = "".join(
        f"2031-05-06 10:00:{n % 60:02} {verbs[n % 4]} package-{n}:amd64 <none> 1.{n}\n"
        for n in range(400)
    )
    found = look(text, limit=400)
    assert "word 3 of the lines: configure 200, install 100, trigproc 100" in found.text


def test_a_coloured_table_may_have_lines_with_nothing_but_colours() -> None:
    rows = "".join(f"web-{n} up{n} {n}d\n\x1b[32m\x1b[0m\n" for n in range(30))
    assert "30 rows × 3 columns\nNAME " in look(f"NAME STATUS AGE\n{rows}").text


def test_git_log_with_statistics_shows_the_files_that_changed_most() -> None:
    commits = "".join(
        f"commit {n:040x}\nAuthor: Ann <ann@example.org>\nDate:   Mon Mar 2 10:00:{n:02} 2026 +0000\n\n"
        f"    Change number {n}\n\n src/app.py    | 7 +++++--\n docs/a.md     |  2 ++\n"
        " 2 files changed, 7 insertions(+), 2 deletions(-)\n\n"
        for n in range(40)
    )
    found = look(commits, limit=1_200)
    assert found.text.startswith("git log of 40 commits, Mar 2 2026; 80 file changes, +280 -80\n")
    assert "most changed: src/app.py ±280, docs/a.md ±80" in found.text


def test_numbers_that_are_aligned_to_the_right_are_in_their_own_column() -> None:
    few = "".join(f"root {n:>9}  0.0 {n * 7:>6} sleep {n}\n" for n in range(1, 40))
    many = "root     31254 12.5 536436 make test\n"
    found = look(f"USER       PID %CPU    RSS COMMAND\n{few}{many}").text
    assert "PID 1..31254, %CPU 0.0 39|12.5 1, RSS 7..536436" in found


def test_columns_that_do_not_fit_their_names_are_not_described() -> None:
    rows = "".join(f"web-{n}          up\n" for n in range(30))
    assert "columns" not in look(f"NAME  STATUS  AGE\n{rows}").text


def test_colours_of_a_log_do_not_hide_its_levels() -> None:
    assert "ERROR 100" in look("\x1b[31mERROR\x1b[0m it failed again and again\n" * 100).text


def test_the_first_failure_in_a_long_output_is_shown() -> None:
    output = (
        "running tests\n"
        + "ok  some/package\n" * 200
        + "--- FAIL: TestLogin (0.02s)\n"
        + "ok  other\n" * 200
    )
    found = look(output.replace("--- FAIL: TestLogin", "fatal: no such login") + "exit code 1")
    assert "fatal: no such login" in found.text
    assert found.shown.endswith("; 1 failure line, first at 202")
    assert found.ask == 'lines="197:232"'


# Code, diffs and documents


def test_python_shows_its_definitions_with_line_numbers() -> None:
    code = (
        "import os\n\n\nclass Store:\n    def put(self):\n        pass\n\n\nasync def main():\n    pass\n"
        + "# end\n" * 60
    )
    found = look(code, "text/x-python")
    assert found.text == (
        "python, 70 lines; 3 definitions:\nclass Store:4-6 {put:5-6}, def main:9-10"
    )
    assert found.shown == "2 of 2 lines that look like top-level definitions, counted in all of it"


@pytest.mark.parametrize(
    ("code", "spans"),
    [
        ('def one():\n    """Text\nat the left.\n    """\n    return 1\n\n\nx = 1\n', "one:1-5"),
        ("def one(\n    a,\n) -> None:\n    pass\n\n# a comment\nx = 1\n", "one:1-4"),
        ("class A {\n  run() {\n    if (x) {\n    }\n  }\n\n  stop() {\n  }\n}\nlet y = 1;\n",
         "A:1-9 {run:2-5, stop:7-8}"),
    ],
)  # fmt: skip
def test_the_last_line_of_a_definition_is_the_last_one_inside_of_it(code: str, spans: str) -> None:
    language = "text/x-python" if "def" in code else "text/javascript"
    assert spans in look(code + "z = 2;\n" * 60, language).text


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("package shop\n\ntype Cart struct {\n}\n\nfunc (c *Cart) Add(x int) {\n}\n",
         "go, 67 lines; 2 definitions:\ntype Cart:3-4, func Add:6-7"),
        ("use std::io;\n\npub fn main() {\n}\n\nimpl<T> Cart<T> {\n}\n", "rust, 67 lines; 2 definitions:\nfn main:3-4, impl Cart:6-7"),
        ("import x from 'y';\nexport class Cart {\n\tadd(x) {\n\t}\n}\nexport const sum = (a) => a;\n",
         "javascript, 66 lines; 3 definitions:\nclass Cart:2-5 {add:3-4}, const sum:6"),
    ],
)  # fmt: skip
def test_code_without_a_media_type_is_outlined(code: str, names: str) -> None:
    assert look(code + "// a comment\n" * 60).text == names


def test_line_numbers_added_by_a_tool_are_the_ones_shown() -> None:
    code = ["package shop", "", 'import "fmt"', "", "func Buy() {", "}", "func Sell() {", "}"] + [
        "// more"
    ] * 40
    numbered = "\n".join(f"{number:6}→{line}" for number, line in enumerate(code, 200))
    assert look(numbered).text == "go, 48 lines; 2 definitions:\nfunc Buy:204-205, Sell:206-207"


def test_top_level_definitions_come_first_if_not_all_fit() -> None:
    code = "".join(f"class Number{n}:\n" + "    def method(self): ...\n" * 30 for n in range(5))
    found = look(code, "text/x-python", limit=120)
    assert all(f"Number{n}:" in found.text for n in range(5))


def test_a_diff_shows_its_files_and_how_much_each_changes() -> None:
    hunk = "@@ -1,3 +1,4 @@\n one\n--- gone\n+new\n+newer\n three\n"
    text = "".join(
        f"diff --git a/src/{f} b/src/{f}\n--- a/src/{f}\n+++ b/src/{f}\n{hunk}"
        for f in ("a.py", "b.py", "c.py")
    )
    found = look(text, "text/x-diff", limit=90)
    assert found.text == "diff of 3 files, +6 -3, in src/\na.py +2 -1, b.py +2 -1, c.py +2 -1"
    assert found.shown == "3 of 3 files, counted in all of it"


def test_markdown_shows_its_headings_and_not_comments_in_code() -> None:
    text = "# Title\n\ntext\n\n```sh\n# no heading\n```\n\n## Part\n\n" + "words " * 100
    found = look(text, "text/markdown")
    assert found.text == "11 lines, 2 headings\n1:# Title\n9:## Part"
    assert found.shown == "2 of 2 headings, counted in all of it"


def test_markdown_shows_its_tables_with_their_rows() -> None:
    table = "| name | age |\n| --- | ---: |\n" + "| a | 1 |\n" * 7
    text = f"# Title\n\n{table}\nwords\n" + "words " * 100
    assert "tables: 3: 7 rows of name, age" in look(text, "text/markdown").text


def test_html_shows_title_and_headings_without_scripts() -> None:
    text = (
        "<!doctype html><html><head><title>A &amp; B</title><script>'<h1>no</h1>'</script></head>"
        "<body><h1 class='x'>Wel<b>come</b></h1><h2>News</h2>" + "<div></div>" * 50
    )
    found = look(text, "text/html")
    assert found.text == "HTML “A & B”, 1 line, 2 headings\n1:h1 Welcome\n1:h2 News"
    assert found.shown == "2 of 2 headings, counted in all of it"


def test_html_shows_its_tables_with_their_rows() -> None:
    table = "<table><tr><th>a</th></tr>" + "<tr><td>1</td></tr>" * 4 + "</table>"
    text = f"<html>\n<h1>One</h1>\n{table}\n{table}</html>" + " " * 300
    assert "tables: #1 5 rows (line 3), #2 5 rows (line 4)" in look(text, "text/html").text


def test_xml_shows_its_root_and_its_most_frequent_elements() -> None:
    text = '<?xml version="1.0"?><feed lang="en">' + "<entry><id>1</id></entry>" * 20 + "</feed>"
    assert look(text, "application/xml").text == 'XML <feed lang="en">\nentry ×20, id ×20'


# Images and other bytes


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", width, height) + bytes(50)


def jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 1_002) + bytes(1_000)
    return (
        b"\xff\xd8" + exif + b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", height, width) + bytes(20)
    )


def webp(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(8) + sizes + bytes(20)


@pytest.mark.parametrize(
    ("data", "format_"),
    [
        (png(640, 480), "PNG"),
        (jpeg(640, 480), "JPEG"),
        (b"GIF89a" + struct.pack("<HH", 640, 480) + bytes(20), "GIF"),
        (webp(640, 480), "WebP"),
        (
            b"RIFF\x00\x00\x00\x00WEBPVP8L"
            + bytes(5)
            + struct.pack("<I", 639 | 479 << 14)
            + bytes(9),
            "WebP",
        ),
        (
            b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(10) + struct.pack("<HH", 640, 480) + bytes(9),
            "WebP",
        ),
    ],
)
def test_an_image_shows_its_format_and_dimensions(data: bytes, format_: str) -> None:
    for named in (
        "image/" + format_.lower(),
        media.BINARY,
        TEXT if b"\x00" * 9 in data else "image/x-other",
    ):
        assert look(data, named).text == f"{format_} image, 640 × 480 pixels, {len(data)} bytes"


def test_a_zip_shows_how_many_entries_and_their_names() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for n in range(40):
            archive.writestr(f"folder/file-{n}.txt", b"x" * 5_000)
    found = look(buffer.getvalue(), "application/zip")
    assert found.text.startswith(
        f"zip archive, 40 entries, {len(buffer.getvalue())} bytes: folder/file-0.txt, folder/"
    )
    assert found.text.endswith("more")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"%PDF-1.7\n1 0 obj << /Type /Pages /Kids [] /Count 12 >> endobj", "PDF 1.7, 12 pages"),
        (gzip.compress(b"x" * 900, mtime=0), "gzip compressed data"),
        (b"SQLite format 3\x00\x10\x00" + bytes(10) + b"\x00\x00\x00\x07" + bytes(80),
         "SQLite database, 7 pages of 4096 bytes"),
        (b"PAR1" + bytes(99), "Parquet table"),
        (b"\x00\x01\x02" * 99, "application/x-unheard-of content"),
    ],
)  # fmt: skip
def test_bytes_are_described_and_never_shown(data: bytes, expected: str) -> None:
    assert look(data, "application/x-unheard-of").text == f"{expected}, {len(data)} bytes"


def test_bytes_declared_as_text_are_described() -> None:
    assert (
        look(bytes(range(32)) * 50, TEXT).text == "binary data, though named text/plain, 1600 bytes"
    )


# Anything else


def test_small_text_is_shown_whole_whatever_its_type() -> None:
    for named in (TEXT, JSON, "text/csv", "text/html"):
        assert look('{"a": 1}', named) == Preview('{"a": 1}', "all 8 characters")


@pytest.mark.parametrize("named", TYPES)
def test_empty_content_says_that_it_is_empty(named: str) -> None:
    assert look(b"", named) == Preview("(empty)", "all 0 characters")


def test_large_text_shows_both_ends_and_how_much_is_left_out() -> None:
    text = "beginning " + "middle " * 1_000 + "end"
    found = look(text)
    shown = re.fullmatch(rf"first (\d+) and last (\d+) of {len(text)} characters", found.shown)
    assert shown is not None
    first, last = map(int, shown.groups())
    assert (
        found.text
        == text[:first] + f" …[{len(text) - first - last} characters left out]… " + text[-last:]
    )


def test_text_beyond_the_sample_is_measured_in_bytes() -> None:
    text = "é" * 300_000
    found = look(text)
    shown = re.fullmatch(r"first (\d+) and last (\d+) characters of 600000 bytes", found.shown)
    assert shown is not None
    first, last = map(int, shown.groups())
    assert (
        found.text
        == "é" * first + f" …[{600_000 - 2 * (first + last)} bytes left out]… " + "é" * last
    )


def test_text_of_invalid_utf8_is_shown_with_replacements() -> None:
    assert "caf\ufffd au lait" in look(b"caf\xe9 au lait, " * 50).text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("times", [30, 60_000])
def test_text_with_a_byte_order_mark_is_decoded(encoding: str, times: int) -> None:
    found = look(("\ufeff" + "a\U0001f600é" * times).encode(encoding))
    assert found.text.startswith("a😀éa😀é")
    assert "\ufffd" not in found.text
    assert "\\u" not in found.text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_no_character_is_cut_in_half_at_any_edge_of_a_sample(encoding: str) -> None:
    data = ("word 😀 é 漢 " * 200).encode(encoding)
    for edge in range(100, 130):
        for named in (TEXT, "text/markdown"):
            found = preview(Sample(data[:edge], data[-edge:], len(data)), media_type=named)
            assert "\ufffd" not in found.text


@pytest.mark.parametrize(
    "hidden",
    ["\x1b[2J", "\x07", "\x00", "\x9b", "\u202e", "\u2066", "\u200b", "\u2028", "\U000e0041", "\r"],
)
@pytest.mark.parametrize(
    "named", [TEXT, JSON, JSONL, "text/csv", "text/html", "text/markdown", "text/x-python"]
)
def test_control_and_invisible_characters_are_made_visible(hidden: str, named: str) -> None:
    forms = {
        JSON: json.dumps({f"k{hidden}": f"v{hidden}", "b": "x" * 300}),
        JSONL: json.dumps({f"k{hidden}": f"v{hidden}"}) + "\n" + "{}\n" * 100,
        "text/html": f"<title>a{hidden}</title><h1>b{hidden}</h1>" + " " * 300,
        "text/markdown": f"# a{hidden}b\n## c\n" + "words " * 60,
    }
    text = look(forms.get(named, f"a{hidden}b,c,d\n" + "1,2,3\n" * 80), named).text
    assert all(
        character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp")
        for character in text
    )


def test_windows_line_endings_become_line_feeds() -> None:
    assert "\\r" not in look("one line\r\n" * 100).text


def test_a_limit_too_small_for_a_preview_shows_nothing_and_says_so() -> None:
    assert look("x" * 999, limit=LEAST - 1) == Preview("", "nothing of 999 bytes")


# For all content


def test_a_sample_is_the_same_from_memory_and_from_its_ends() -> None:
    for size in (0, 1, EDGE, EDGE + 1, 2 * EDGE, 2 * EDGE + 1, 5 * EDGE):
        data = (b"line of text\n" * (size // 13 + 1))[:size]
        ends = Sample(
            data[:EDGE],
            data[-EDGE:],
            size,
            data.count(b"\n") + (not data.endswith(b"\n") if data else 0),
        )
        assert ends == Sample.of(data)


def test_a_sample_larger_than_its_content_is_refused() -> None:
    with pytest.raises(ValueError):
        Sample(b"abc", b"", 2)


PIECES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"\r\n", b"\\", b"\t", b"# ", b"<h1>", b"</h1>", b"<title>",
         b"<!--", b"def f", b"func (", b"diff --git a/x b/x\n", b"@@ -1,9 +1,9 @@\n", b"+++ b/", b"ERROR ",
         b"2031-01-01 00:00:00 ", b'{"a":1}', b"null", b"PK\x05\x06", b"PK\x01\x02", b"%PDF-", b"\x89PNG\r\n\x1a\n",
         b"\xff\xd8\xff\xc0", b"RIFF", b"WEBP", b"GIF89a", b"\x1f\x8b\x08\x08", b"\xff\xfe", b"\xef\xbb\xbf",
         b"     1\xe2\x86\x92", b"--- FAIL: ", b"| a | b |\n| --- | --- |\n", b"- a: 1\n  b: 2\n", b"Key: value\n",
         b"[(1, datetime.datetime(2020, 1, 1)), ", b'"""', b"commit 0123456\nDate:   \x1b[31m soon\n", b"<table><tr>",
         b'{"a": {"b": [{"c": 1}]}, ', b"a,b,c\n1,2,3\n", b"src/a.py:1:2: E501 long\n", b"NAME  READY\nweb   1/1\n"]
    ),
)  # fmt: skip


@given(
    pieces=st.lists(PIECES, max_size=30),
    times=st.sampled_from([1, 1, 1, 20, 500]),
    media_type=st.one_of(st.sampled_from(TYPES), st.text(max_size=30)),
    limit=st.one_of(st.integers(0, 300), st.integers(0, 6_000)),
    edge=st.one_of(st.none(), st.integers(0, 400)),
    counted=st.booleans(),
)
@example(
    pieces=[b"diff --git a/ b/\0"],
    times=20,
    media_type="text/plain",
    limit=20,
    edge=17,
    counted=False,
).via("a count that is not exact")
def test_any_content_gets_a_preview_within_the_limit(
    pieces: list[bytes], times: int, media_type: str, limit: int, edge: int | None, counted: bool
) -> None:
    data = (b"".join(pieces) * times)[: 4 * EDGE]
    sample = Sample.of(data)
    if edge is not None:
        edge = min(edge, len(data))
        sample = Sample(
            data[:edge], data[len(data) - edge :], len(data), sample.lines if counted else None
        )
    found = preview(sample, media_type=media_type, limit=limit)
    assert len(found.text) <= limit
    assert found == preview(sample, media_type=media_type, limit=limit)
    assert found.text or limit < LEAST
    found.text.encode()
    assert all(
        c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in found.text
    )
    assert found.shown
    assert len(found.shown) < 160
    assert found.shown.replace("≥", "").isascii(), "it does not quote the content"


@pytest.mark.parametrize(
    "unit",
    ["[", '{"a":', "[],", '"', '\\"', ",", "1\n", "\n", "\t", "<h1", "<h1>", "<h1></", "<p></", "<!--", "<script",
     "# a\n", "```\n", "def a\n", "public static ", "\ta(b) {\n", "int a(", "ERROR\n", "@@ -1,99999 +1,99999 @@\n",
     "\x1b[", "\u202e", "a/b/", "E   ", "/Count 1 ", "/Type /Pages "],
)  # fmt: skip
def test_a_preview_of_hostile_repetition_finishes(unit: str) -> None:
    """Quadratic work on a sample of this size would take minutes and exceed the time limit of the
    run."""
    for named in TYPES:
        assert len(look(large(unit, size=2 * EDGE - 99), named).text) <= 200
        assert len(look(large(unit), named).text) <= 200


def test_every_file_of_the_corpus_has_a_preview_that_matches_its_format(corpus: Path) -> None:
    forms = {".csv": " rows × ", ".jsonl": " record", ".html": "HTML “", ".md": "# "}
    for path in corpus_files(corpus):
        if path.suffix in forms:
            data = path.read_bytes()
            named = media.sniff_bytes(data[: media.HEAD], data[-64:], path.name)
            found = preview(Sample.of(data), media_type=named)
            assert forms[path.suffix] in found.text, path.name
            assert len(found.text) <= 200
            assert "left out" not in found.text


def test_text_that_the_quick_check_skips_contains_no_failure(corpus: Path) -> None:
    texts = [path.read_text()[:200_000] for path in corpus_files(corpus)]
    texts += [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    for text in texts:
        for at in range(0, len(text), 4_096):
            piece = f"\n{text[at : at + 4_096]}"
            assert logs._FAILS(piece) or not logs._FAILURE.search(piece)


BEGINNINGS = [
    "  7\tx = 1\n8\ty = 2\n9: z", "10-w", "7\tx", "...", "", " \t", "2026-03-01 INFO served",
    "+ 12 new\n- 12 old\n  13 same\n  14 same", "- 12 old",
    "deadbe1 Add it\n* 0123abc (HEAD) Fix\ndeadbe2 Add more\n0123abd Remove it", "0123abe Rename it",
]  # fmt: skip


@given(st.lists(st.sampled_from(BEGINNINGS), max_size=8))
def test_the_beginning_of_a_text_rules_out_only_forms_that_do_not_apply(lines: list[str]) -> None:
    text = decode(Sample.of("\n".join(lines).encode()))
    forms = (diffs.numbered_diff, diffs.short_history)
    for kind in (kind for kind in KINDS if kind.form in forms):
        assert kind.begins is not None
        assert kind.begins.match(text.head) or kind.form(text) is None
    assert code.NUMBERED_LINES.match(text.head) or code.unnumber(text.head) is None
