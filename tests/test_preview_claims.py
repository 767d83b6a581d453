"""Figures and lists in previews are from all of the content, or say where they are from right
beside them."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import coatcheck
from coatcheck.media import HEAD, JSON, JSONL, sniff_text
from coatcheck.previews import SCANNED, Preview, Sample, facts
from coatcheck.previews.shape import outline
from tests.conftest import ROOT


def stub(text: str, media_type: str | None = None) -> Preview:
    """The preview in a stub of a text."""
    named = media_type or sniff_text(text[:HEAD], text[-64:], None, text)
    return facts(Sample.of(text.encode()), named, "result", 1_200).preview


# Documents

DOCUMENT = "".join(f"{'#' * (1 + n % 3)} Heading {n}\n\n{'words ' * 200}\n\n" for n in range(40))


def numbered(text: str, start: int = 1) -> str:
    """A text as a tool shows a file, each line with its number."""
    return "\n".join(f"{number:6}→{line}" for number, line in enumerate(text.split("\n"), start))


@pytest.mark.parametrize("text", [DOCUMENT, numbered(DOCUMENT)])
def test_all_headings_of_a_document_are_counted(text: str) -> None:
    found = stub(text)
    assert re.fullmatch(r"\d+ of 40 headings, counted in all of it", found.shown)
    assert "157:# Heading 39" in found.text


def test_headings_of_a_part_of_a_file_have_the_line_numbers_that_are_printed() -> None:
    assert "\n501:# Heading 0\n" in stub(numbered(DOCUMENT, start=501)).text


def test_headings_of_content_larger_than_is_read_say_which_part_they_are_from() -> None:
    text = DOCUMENT * 360
    assert len(text) > SCANNED
    found = stub(text)
    part = f"in the first {SCANNED} of {len(text)} bytes"
    assert found.text.startswith(f"{part}: ")
    assert found.shown.endswith(f", {part}")


def test_all_headings_of_a_restructured_text_are_counted() -> None:
    text = "".join(f"Heading {n}\n{'=' * 12}\n\n{'words ' * 200}\n\n" for n in range(40))
    assert re.match(r"\d+ of 40 headings", stub(text, "text/x-rst").shown)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_headings_are_counted_like_a_parser_does(path: Path) -> None:
    text = path.read_text()
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [
        token for token in tokens if token.type == "heading_open" and token.markup.startswith("#")
    ]
    assert f" of {len(headings)} headings" in stub(text, "text/markdown").shown


def test_code_in_a_longer_fence_may_have_shorter_fences_inside() -> None:
    fenced = "````md\n```\n# not a heading\n```\n# not a heading either\n````\n"
    text = f"# One\n\n{fenced}\n## Two\n\n```js `not a fence`\n\n## Three\n\n{'words ' * 300}\n"
    assert "3 of 3 headings" in stub(text, "text/markdown").shown


# JSON

CARS = [
    {
        "Name": f"car {n}",
        "Miles_per_Gallon": None if n % 9 == 0 else n if n < 100 else n + 0.5,
        "Cylinders": (8, 4, 6)[n % 3] if n < 300 else (3, 5)[n % 2],
        "Origin": "USA" if n < 390 else "Japan",
    }
    for n in range(406)
]


@pytest.mark.parametrize("times", [1, 20])
def test_types_and_values_of_json_are_those_of_all_items(times: int) -> None:
    text = json.dumps(CARS * times, indent=2)
    assert stub(text, JSON).text == (
        f"JSON array of {406 * times} items\n"
        "items: Name VARCHAR 406 values, e.g. car 0, Miles_per_Gallon DOUBLE 1..404.5, "
        f"{'' if times == 1 else '360 distinct, '}{46 * times} null, Cylinders BIGINT "
        f"4 {100 * times}|6 {100 * times}|8 {100 * times}|3 {53 * times}|5 {53 * times}, "
        f"Origin VARCHAR USA {390 * times}|Japan {16 * times}"
    )


def test_the_largest_rows_of_rows_come_first() -> None:
    rows = [
        {"id": n, "parts": [{"part": m, "text": "words " * 40} for m in range(100)]}
        for n in range(60)
    ]
    found = stub(json.dumps(rows), JSON).text
    assert "\n[*].parts: 6000 objects in 60 arrays: part BIGINT 0..99, 100 distinct, " in found
    assert "\nitems: id BIGINT 0..59, parts STRUCT[] 100 items" in found


def test_objects_of_alike_objects_are_a_table() -> None:
    users = {f"user{n}": {"age": n, "role": ["admin", "guest"][n % 2]} for n in range(50)}
    assert stub(json.dumps({"users": users, "next": None}), JSON).text == (
        "JSON object, 2 keys\nusers {user0, user1, user2, user3, +46}, next null\n"
        "users: 50 objects by key (user0, user1, user2, …), each: "
        "age BIGINT 0..49, role VARCHAR admin 25|guest 25"
    )


def test_all_records_of_json_lines_are_described() -> None:
    rows = [{"id": n, "state": "open" if n < 8_999 else "closed"} for n in range(9_000)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert stub(text, JSONL).text == (
        "9000 records, one JSON value per line\n"
        "items: id BIGINT 0..8999, state VARCHAR open 8999|closed 1"
    )


def test_the_columns_of_pythons_rows_say_how_many_of_them_they_are_from() -> None:
    text = repr([{"id": n, "state": "open", "text": "words " * 20} for n in range(500)])
    found = stub(text, "text/x-python-repr")
    first = re.match(
        r"500 rows \(Python repr\)\ncolumns of the first (\d+) of 500 rows: ", found.text
    )
    assert first
    assert found.shown.endswith(f", of the first {first[1]} of 500 rows")


def test_the_outline_of_an_array_has_the_types_of_all_its_items() -> None:
    text, _ = outline([{"values": [*range(1_500), None, "x"]}], 1_000)
    assert "array of 1,502 null/number/strings" in text


# Types are those of SQL

CELLS = {
    "whole": "7 12 0",
    "zero first": "007 010 000",
    "real": "1.5 2 -3e5",
    "huge": "12345678901234567890 1 2",
    "day": "2020-01-01 2021-12-31 1999-02-03",
    "moment": "2020-01-01T10:00:00 2021-01-01T10:00:00 1999-01-01T00:00:00",
    "zoned": "2020-01-01T10:00:00Z 2021-01-01T10:00:00Z 1999-01-01T00:00:00Z",
    "clock": "10:00:00 11:30:00 23:59:59",
    "flag": "true false true",
    "text": "a b 3",
    "mixed": "2020-01-01 x 1",
}


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_types_of_columns_are_those_that_sql_finds(suffix: str) -> None:
    pytest.importorskip("duckdb")
    rows = [
        {name: values.split()[at] for name, values in CELLS.items()} | {"empty": ""}
        for at in range(3)
    ] * 10
    if suffix == "csv":
        lines = [",".join(row.values()) for row in rows]
        text = "\n".join([",".join(rows[0]), *lines]) + "\n"
    else:
        typed: list[dict[str, object]] = []
        for row in rows:
            one: dict[str, object] = {**row, "flag": row["flag"] == "true"}
            one |= {name: json.loads(row[name]) for name in ("whole", "real")}
            typed.append(
                one | {"list": [1, 2], "inside": {"a": 1}, "nothing": None, "both": row["day"]}
            )
        text = json.dumps(typed)
    session = coatcheck.open("memory:").session("s")
    ref = session.put(text, name=f"rows.{suffix}")
    found = {}
    for line in session.read(ref, query="DESCRIBE artifact").text.split("\n")[1:]:
        name, type_ = line.split(",")[:2]
        found[name] = re.sub(r"STRUCT.*", "STRUCT", type_.strip('"'))
    shown = session.preview(ref, limit=2_000).text
    for name, type_ in found.items():
        expected = {"TIMESTAMP WITH TIME ZONE": "TIMESTAMPTZ"}.get(type_, type_)
        assert re.search(rf"\b{name} {re.escape(expected)}(?!\w)", shown), (name, type_, shown)


def test_dates_that_do_not_sort_like_texts_have_no_range() -> None:
    rows = "".join(f"{n},{n % 28 + 1:02}/02/20{n % 30:02}\n" for n in range(100))
    found = stub(f"id,day\n{rows}", "text/csv").text
    assert ".." not in found.partition("day ")[2].partition("\n")[0]


@pytest.mark.parametrize("form", ["csv", "json", "lines"])
def test_a_value_that_its_name_makes_a_secret_is_masked_wherever_it_is_listed(form: str) -> None:
    secret = "correct horse battery staple 9"
    rows = [{"id": n, "password": secret, "note": "x" * 30} for n in range(200)]
    texts = {
        "csv": "id,password,note\n" + "".join(f"{n},{secret},{'x' * 30}\n" for n in range(200)),
        "json": json.dumps({"rows": rows, "password": secret}),
        "lines": "".join(json.dumps(row) + "\n" for row in rows),
    }
    assert "horse" not in stub(texts[form]).text


def test_a_value_beside_the_name_of_a_secret_is_masked() -> None:
    env = [{"name": f"SETTING_{n}", "value": f"plain {n}"} for n in range(30)]
    env.insert(0, {"name": "DB_PASSWORD", "value": "hunter2-and-more"})
    assert "hunter2" not in stub(json.dumps({"env": env}), JSON).text


# Known documents


def test_openapi_is_described_by_operations_tags_and_schemas() -> None:
    paths = {
        f"/p{n}": {"get": {"tags": ["a"]}, "post": {"tags": ["a", "b"]}, "parameters": []}
        for n in range(30)
    }
    document = {"openapi": "3.1.0", "info": {"title": "Shop"}, "paths": paths,
                "components": {"schemas": {"Cart": {}, "User": {}}}}  # fmt: skip
    assert stub(json.dumps(document), JSON).text.startswith(
        "OpenAPI 3.1.0 “Shop”: 30 paths, 60 operations (get 30, post 30), 2 schemas\n"
        "tags: a 60, b 30\npaths: /p0 get,post, "
    )


def test_a_package_of_npm_is_described_by_its_versions() -> None:
    document = {
        "name": "left-pad", "dist-tags": {"latest": "1.3.0", "next": "2.0.0"},
        "versions": [f"{n}.0.0" for n in range(90)], "description": "pads",
        "time": {"created": "2014-03-05T00:00:00Z", "modified": "2022-01-01T00:00:00Z"},
        "readme": "words " * 900,
    }  # fmt: skip
    found = stub(json.dumps(document), JSON)
    assert found.text.startswith(
        "npm package left-pad: 90 versions, latest 1.3.0; created 2014-03-05, modified 2022-01-01\n"
    )
    assert found.shown == "2 of 2 tags, 6 of 6 keys, counted in all of it"


def test_kubernetes_objects_are_described_by_kind_namespace_and_phase() -> None:
    items = [
        {"kind": "Pod", "metadata": {"name": f"web-{n}", "namespace": ["shop", "ops"][n % 2]},
         "status": {"phase": "Running" if n else "Pending"}}
        for n in range(40)
    ]  # fmt: skip
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    assert stub(text, JSON).text.startswith(
        "Kubernetes Pod 40\nnamespaces: ops 20, shop 20\nphases: Running 39, Pending 1\n"
        "names: web-0, web-1, "
    )


def test_issues_of_github_are_described_by_state_author_and_label() -> None:
    issues = [
        {"html_url": "https://example.org", "number": n, "state": ["open", "closed"][n % 2],
         "title": f"Issue {n}", "user": {"login": "ann"}, "labels": [{"name": "bug"}]}
        for n in range(1, 31)
    ]  # fmt: skip
    assert stub(json.dumps(issues), JSON).text.startswith(
        "GitHub 30 issues: closed 15, open 15, #1-#30\nauthors: ann 30\nlabels: bug 30\n"
        "titles: #1 Issue 1, "
    )


# What programs print


def linter(lines: int) -> str:
    """Findings of a linter. The file with the most, and the second most frequent rule, are in the
    last quarter."""
    random.seed(7)
    early = [
        f"src/app/module_{random.randrange(90)}.py:{n % 900}:{n % 80}: E501 line too long"
        for n in range(lines * 3 // 4)
    ]
    late = [
        f"src/app/generated.py:{n}:1: F401 imported but unused" for n in range(lines - len(early))
    ]
    return "\n".join([*early, *late]) + "\n"


def test_the_files_and_rules_with_the_most_findings_are_those_of_the_whole() -> None:
    text = linter(14_000)
    assert 680_000 < len(text) < 1 << 20
    found = stub(text)
    assert found.text.startswith(
        "14000 findings in 91 files in src/app/\n"
        "by rule: E501 ×10500 (E501 line too long), F401 ×3500 (F401 imported but unused)\n"
        "by file: generated.py 3500, "
    )


def test_files_with_the_same_name_in_different_folders_are_different_files() -> None:
    folder = "/home/somebody/projects/a-rather-long-name-of-a-project/packages"
    rows = [
        f"{folder}/{name}/src/index.ts:{n}: words" for name in ("one", "two") for n in range(30)
    ]
    rows += [f"packages/one/src/index.ts:{n}: words" for n in range(40, 60)]
    assert stub("\n".join(rows)).text.startswith("80 lines from 2 files\nby file: ")


PACKAGE = (
    "Package: lib{0}\nStatus: install ok installed\nSection: libs\nVersion: 1.{0}\n"
    "Description: a library\n with a second line\n"
)
PACKAGES = "".join(
    PACKAGE.format(n) + ("Homepage: http://a\n\n" if n % 2 else "\n") for n in range(400)
)


def test_a_package_list_is_not_called_yaml() -> None:
    found = stub(PACKAGES)
    assert found.text == (
        "400 records of lines “key: value”, each from Package on\n"
        "Package 400 values, e.g. lib0, Status always install ok installed, Section always libs, "
        "Version 1..1.99, Description always a library, "
        "Homepage ×200 always http://a"
    )
    assert found.shown == "6 of 6 fields, counted in all of it"


def test_a_yaml_list_of_records_is_a_table() -> None:
    text = "".join(f"- name: user {n}\n  state: {['on', 'off'][n % 2]}\n" for n in range(200))
    assert stub(text).text == (
        "200 items of a YAML list, each from name on\n"
        "name 200 values, e.g. user 0, state off 100|on 100"
    )


def test_a_column_of_text_shows_its_most_frequent_values() -> None:
    text = "apple\npear\napple\nplum\n" * 300
    assert stub(text).text == "1200 lines, 3 different\napple 600, pear 300, plum 300"
    numbers = "".join(f"{n * 7}\n" for n in range(900))
    assert stub(numbers).text == "900 lines, 900 different (BIGINT 0..6293)\n0, 7, 14, …, 6293"


def test_a_table_of_markdown_is_a_table() -> None:
    text = "| id | state |\n| --- | :-- |\n" + "".join(f"| {n} | on |\n" for n in range(300))
    assert stub(text).text == (
        "300 rows × 2 columns\nid BIGINT 0..299, state VARCHAR always on\n0, on\n1, on\n2, on"
    )


def test_the_reasons_for_which_tests_were_skipped_are_counted() -> None:
    skipped = "test_{0} (a.B.test_{0}) ... skipped 'no {1}'\n"
    rows = "".join(skipped.format(n, "tk" if n % 3 else "gdbm") for n in range(300))
    found = stub(f"{rows}\nRan 7351 tests in 33.1s\n\nOK (skipped=300)\n").text
    assert found.startswith(
        "unittest, 304 lines: Ran 7351 tests in 33.1s, OK (skipped=300)\n"
        "why skipped (300 lines): no tk ×200, no gdbm ×100"
    )


def test_documents_of_yaml_may_repeat_their_keys() -> None:
    manifest = (
        "---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: a\nspec:\n  containers:\n  - name: b\n"
    )
    found = stub(manifest * 300)
    assert found.text.startswith("YAML, 2400 lines\nobjects: Pod ×300\nkeys: ")
    assert " of 1200 upper keys" in found.shown


def test_the_folder_of_paths_is_one_of_all_of_them() -> None:
    rows = [f"src/app/file_{n}.py" for n in range(3_000)] + ["docs/index.md", "README.md"]
    found = stub("\n".join(rows))
    assert found.text.startswith(
        "3002 paths\nby folder: src/ 3000, docs/ 1, (files) 1\nby suffix: .py 3000, .md 2\n"
    )


def test_the_largest_files_of_a_listing_for_people_are_the_largest() -> None:
    sizes = ["4.0K", "1.5M", "12", "980K", "2.1G", "15K"]
    rows = [
        f"-rw-r--r-- 1 me me {size:>5} Mar  1 12:00 file{n}.bin"
        for n, size in enumerate(sizes * 20)
    ]
    assert "\nlargest: file94.bin 2.1G, " in stub("total 9\n" + "\n".join(rows)).text


def test_the_upper_level_of_a_long_tree_is_complete() -> None:
    inner = "".join(f"│   ├── a_rather_long_name_of_a_file_{n}.py\n" for n in range(60))
    text = (
        ".\n"
        + "".join(f"├── folder_{n}\n{inner}" for n in range(9))
        + "└── last\n\n10 directories, 540 files\n"
    )
    found = stub(text)
    assert found.shown == "10 of 10 names of the upper level, counted in all of it"
    assert "folder_0 (60), " in found.text


def test_all_headings_of_a_snapshot_are_counted() -> None:
    rows = [
        f'- heading "Section {n} of the page" [level=2] [ref=e{n}]\n- link "more" [ref=f{n}]'
        for n in range(120)
    ]
    found = stub("- Page URL: http://a/\n" + "\n".join(rows))
    assert re.search(r"\d+ of 120 headings", found.shown)


def test_lines_after_a_table_are_not_its_rows() -> None:
    rows = [f"pod-{n:<12}Running   {n}m    node{n % 3}" for n in range(50)]
    text = "NAME            STATUS    AGE   NODE\n" + "\n".join(rows)
    found = stub(f"{text}\n\nLegend: words and more words\n").text
    assert found.startswith("50 rows × 4 columns; then 1 other line\n")
    assert "STATUS always Running, " in found
    assert stub(f"{text}\n<command with exit code 0>\n").text.startswith("50 rows × 4 columns")


def test_columns_that_do_not_fit_are_counted() -> None:
    names = [f"COLUMN{n}" for n in range(30)]
    rows = ["  ".join(f"{n * 7 % 9:<8}" for _ in names) for n in range(40)]
    found = stub("  ".join(f"{name:<8}" for name in names) + "\n" + "\n".join(rows))
    assert re.match(r"\d+ of 30 columns", found.shown)


def test_a_package_that_did_not_build_is_a_failure() -> None:
    text = (
        "# app/a\n./a.go:3:2: undefined: x\n" * 40
        + "FAIL\tapp/a [build failed]\nok  \tapp/b\t0.012s\n"
    )
    found = stub(text)
    assert "FAIL in 1 of 2 packages" in found.text
    assert "no failures" not in found.text


def test_the_totals_of_the_last_of_several_runs_are_called_so() -> None:
    run = "running 9 tests\n" + "".join(f"test case_{n} ... ok\n" for n in range(90))
    totals = "\ntest result: ok. {} passed; 0 failed; 0 ignored; 0 measured\n\n"
    text = "".join(run + totals.format(n) for n in (40, 12, 0))
    assert (
        "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured (the last of 3 such lines)"
        in stub(text).text
    )


LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")
MENTIONS = (
    "",
    "",
    "",
    " after ERROR in backend",
    " (WARN limit) ok",
    " previous state ERROR: none",
)


@pytest.mark.parametrize(
    "form", ["{time} {level} {text}", "{time} app[12] {level} - {text}", "{level} {time} {text}"]
)
@pytest.mark.parametrize("lines", [400, 5_000])
def test_a_level_that_a_message_names_is_not_the_level_of_its_line(form: str, lines: int) -> None:
    random.seed(3)
    levels = random.choices(LEVELS, (80, 8, 3, 9), k=lines)
    rows = [
        form.format(
            time=f"2026-01-01 12:00:{n % 60:02}",
            level=level,
            text=f"request {n}{random.choice(MENTIONS)}",
        )
        for n, level in enumerate(levels)
    ]
    counts = Counter(levels)
    assert (
        f" · ERROR {counts['ERROR']} WARN {counts['WARN']} INFO {counts['INFO']} "
        in stub("\n".join(rows)).text
    )


def test_the_figures_of_a_diff_with_very_many_files_say_which_part_they_are_from() -> None:
    header = "diff --git a/src/f{0}.py b/src/f{0}.py\n--- a/src/f{0}.py\n+++ b/src/f{0}.py\n"
    part = header + "@@ -1,2 +1,2 @@\n-old {0}\n+new {0}\n"
    files = "".join(part.format(n) for n in range(4_900))
    assert stub(files, "text/x-diff").text.startswith("diff of 4900 files, +4900 -4900, in src/\n")
    many = "".join(part.format(n) for n in range(21_000))
    assert stub(many, "text/x-diff").text.startswith(
        "diff of 20000 files, +20000 -20000, in src/, only the first 20000 of each are counted\n"
    )


def test_all_elements_of_an_xml_document_are_counted() -> None:
    text = "<rows>" + "<row><name>a</name></row>" * 9_000 + "</rows>"
    assert stub(text, "application/xml").text == "XML <rows>\nname ×9000, row ×9000"


def test_a_folded_progress_bar_is_mentioned() -> None:
    text = (
        "".join(f"\rdownloading {n}%" for n in range(100)) + "\ndone\n" + "a line of words\n" * 100
    )
    assert stub(text).shown.endswith("; progress bars are folded")


SHEET = '<sheet name="Sheet {0} of a workbook with long names" sheetId="{0}" r:id="rId{0}"/>'


def test_the_sheets_of_a_workbook_with_many_are_a_minimum() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "xl/workbook.xml", "<workbook><sheets>" + "".join(map(SHEET.format, range(900)))
        )
    found = facts(Sample.of(file.getvalue()), "application/zip", "data", 1_200).preview
    assert re.match(r"Excel workbook, at least \d+ sheets", found.text)
