"""What encloses a match: a value of JSON, a heading, a definition, a commit, a test."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.reading import Request
from tests.reading.framed import content_of, make_content, pages, read

PYTHON = '''\
import os

LIMIT = 3


class Store:
    """A store."""

    def put(
        self, data: bytes
    ) -> None:
        if data:
            self.needle = data

    # a comment
    async def get(self) -> bytes:
        return self.needle


needle = Store()
'''
GO = """\
package main

func (s *Store) Put(data []byte) error {
\tif len(data) > 0 {
\t\treturn needle(data)
\t}
\treturn nil
}

func main() {
\tneedle()
}
"""


def grep(data: str, media_type: str = "text/plain", **options: Any) -> list[str]:
    asked: dict[str, Any] = {"grep": "needle", "context": 0} | options
    return read(make_content(data.encode(), media_type), Request(**asked)).text.split("\n")


def test_a_match_in_code_names_the_definitions_around_it() -> None:
    assert grep(PYTHON) == [
        "9=class Store > def put",
        "13:            self.needle = data",
        "16=class Store > async def get(self) -> bytes",
        "17:        return self.needle",
        "--",
        "20:needle = Store()",
    ]
    assert grep(GO) == [
        "3=func (s *Store) Put(data []byte) error",
        "5:\t\treturn needle(data)",
        "10=func main()",
        "11:\tneedle()",
    ]


def test_lines_that_a_tool_has_numbered_are_code_too() -> None:
    numbered = "".join(f"{n:6}→{line}\n" for n, line in enumerate(PYTHON.split("\n"), 1))
    assert grep(numbered)[0] == "9=class Store > def put"


def test_a_definition_that_the_page_shows_is_not_repeated() -> None:
    lines = grep(PYTHON, grep="return self", context=3)
    assert "16-    async def get(self) -> bytes:" in lines
    assert not any(line.startswith("16=") for line in lines)


@pytest.mark.parametrize("pattern", ["needle", "Store"])
def test_prose_and_logs_have_no_definitions(pattern: str) -> None:
    log = "".join(f"12:00:{n:02} class of 19{n}: needle Store\n" for n in range(60))
    assert all("=" not in line for line in grep(log, grep=pattern))


def test_a_match_in_markdown_names_its_heading() -> None:
    text = "# Guide\n\nneedle\n\n## Set up\n\n```sh\n# needle in a comment\n```\nneedle\n\n## End\n"
    assert grep(text, "text/markdown") == [
        "1=# Guide",
        "3:needle",
        "5=## Set up",
        "8:# needle in a comment",
        "10:needle",
    ]
    assert grep(text)[0] == "1=# Guide"


def test_a_match_in_html_names_its_heading() -> None:
    text = "<p>needle</p>\n<h2 class='x'>The <b>first</b>\npart</h2>\n<p>needle</p>\n"
    assert grep(text, "text/html") == ["1:<p>needle</p>", "3=## The first part", "4:<p>needle</p>"]


def test_comments_in_a_configuration_are_no_headings() -> None:
    text = "# needle\nhost: a\n# more\nport: 80\n## needle\nuser: needle\n"
    assert all("=" not in line for line in grep(text))


def test_a_match_in_a_git_log_names_its_commit() -> None:
    text = "".join(
        f"commit {n:040x}\nAuthor: A <a@example.org>\n\n    Subject {n}\n\n src/needle.py | {n} +\n\n"
        for n in (10, 11)
    )
    assert grep(text) == [
        "1=commit 000000000000 Subject 10",
        "6: src/needle.py | 10 +",
        "8=commit 000000000000 Subject 11",
        "13: src/needle.py | 11 +",
    ]


def test_a_match_in_test_output_names_its_test() -> None:
    text = (
        "=================== test session starts ===================\n"
        "_____________________ test_one _____________________\n"
        "    assert needle\n"
        "_____________________ TestTwo.test_two _____________________\n"
        "E   needle\n"
        "================= short test summary info =================\n"
        "FAILED needle\n"
    )
    assert grep(text) == [
        "2=test_one",
        "3:    assert needle",
        "4=TestTwo.test_two",
        "5:E   needle",
        "--",
        "7:FAILED needle",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("=== RUN   TestA/sub\n    a_test.go:10: needle\n", "1=TestA/sub"),
        ("running 2 tests\n---- tests::a stdout ----\nneedle\n", "2=tests::a"),
        (
            f"..F\n{'=' * 70}\nFAIL: test_x (a.Case)\n{'-' * 70}\nneedle\n",
            "3=FAIL: test_x (a.Case)",
        ),
        ("FAIL src/a.test.ts\n  ● suite › does x\n\n    needle\n", "2=● suite › does x"),
    ],
)
def test_a_match_in_the_output_of_another_runner_names_its_test(text: str, expected: str) -> None:
    assert grep(text)[0] == expected


def test_a_match_in_a_part_of_an_artifact_has_the_pointer_of_the_whole() -> None:
    content = make_content(
        json.dumps({"a": {"b": "needle"}}, indent=1).encode(), "application/json"
    )
    assert read(content, Request(grep="needle", context=0)).text.startswith("2=#/a\n3:")


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.sampled_from(["needle", "{", "[", '"', "a\nb", "}"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["k", "/~", 'a"]', "é", "{"]), inner, max_size=4)
    ),
    max_leaves=40,
)


@given(VALUES, st.sampled_from([1, 2, "\t"]))
def test_every_pointer_leads_to_a_value_with_the_match(value: Any, indent: int | str) -> None:
    text = json.dumps(value, indent=indent)
    content = make_content(text.encode(), "application/json")
    pointer = ""
    for line in read(content, Request(grep="needle", context=0)).text.split("\n"):
        _, sign, rest = line.partition("=" if "=#" in line[:8] else ":")
        if sign == "=":
            pointer = rest
        elif pointer:
            found = value
            for step in pointer.split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
            assert "needle" in json.dumps(found)


def test_json_that_is_indented_in_another_way_has_no_pointers() -> None:
    text = '[{\n "a": "needle"\n}, {\n "a": "needle"\n}]\n'
    assert grep(text, "application/json") == ['2: "a": "needle"', '4: "a": "needle"']


HOSTILE = [
    "def f(" * 40, "def " + "(" * 700, "_" * 3_000, "=" * 3_000, "{" * 500, "# " * 800, "<h1>" * 300,
    "<h1>" + "<a" * 900, "f(" + ")" * 400 + "x", '"' + "\\\\" * 400 + "{", "=" * 400 + " x" * 150,
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("line", HOSTILE)
def test_hostile_lines_are_passed_quickly(line: str) -> None:
    lines = f"{line}\n" * (1_000_000 // len(line)) + "  needle\n"
    code = "def a():\n  pass\nclass b:\n" + lines
    for media_type in ("text/plain", "text/html", "text/markdown", "application/json"):
        assert grep(code, media_type)[-1].endswith("needle")
    for head in ("== test session starts ==\n", "commit 0123456789abcdef\n"):
        assert grep(head + lines)[-1].endswith("needle")


@given(
    st.lists(
        st.sampled_from(["  needle", "needle " * 90, "def f():", "class A:", "x"]), max_size=40
    )
)
def test_small_pages_have_every_match_and_what_encloses_it(lines: list[str]) -> None:
    text = "def a():\nclass B:\n" + "\n".join(lines) + "\n"
    found = list(pages(content_of(text), Request(grep="needle", max_chars=200, context=0)))
    numbers = [int(n) for page in found for n in re.findall(r"^(\d+):", page.text, re.MULTILINE)]
    wanted = [number for number, line in enumerate(text.split("\n"), 1) if "needle" in line]
    assert list(dict.fromkeys(numbers)) == wanted
    assert all(len(page.text) <= 200 for page in found)


def test_definitions_that_are_nested_deeply_stay_on_a_line() -> None:
    text = "".join(f"{' ' * n}class C{n}:\n" for n in range(300)) + " " * 300 + "needle\n"
    assert grep(text)[0] == "300=class C296 > class C297 > class C298 > class C299"


def test_any_text_is_searched() -> None:
    assert (
        read(content_of(b"def a():\n  \xff needle\ndef b():\n"), Request(grep="needle")).matches
        == 1
    )
