"""grep for numbers alone, and from the end."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArgument
from coatcheck.reading import Page, Request
from coatcheck.reading.line_groups import LONG_LINE
from tests.reading.framed import content_of, make_content, pages, read

pytestmark = pytest.mark.usefixtures("each_source")

LOG = "".join(
    f"line {n}{' ERROR' if n % 100 == 0 else ''} code={n % 7}\n" for n in range(1, 12_032)
)


def count(text: str | bytes, pattern: str, **options: Any) -> Page:
    return read(content_of(text), Request(grep=pattern, count=True, **options))


def numbers(page: Page) -> list[int]:
    return [int(match) for match in re.findall(r"^(\d+):", page.text, re.MULTILINE)]


def test_a_count_is_a_number_alone() -> None:
    page = count(LOG, "ERROR")
    assert (page.text, page.matches, page.cursor) == ("120", 120, None)
    assert page.shown == "120 matches in 12,031 lines"
    assert count(LOG, "panic").text == "0"
    assert count(LOG, "ERROR", invert=True).text == "11911"
    assert count("", "x").matches == 0


def test_each_alternative_is_counted() -> None:
    assert count(LOG, "ERROR|code=3$|panic").text == "120 ERROR\n1719 code=3$\n0 panic"
    assert count(LOG, "(?i)(error|panic)").text == "120 (?i)error\n0 (?i)panic"


def test_the_values_of_the_first_group_are_counted_most_frequent_first() -> None:
    page = count(LOG, r"code=(\d)")
    wanted = Counter(re.findall(r"code=(\d)", LOG))
    assert page.text == "\n".join(
        f"{number} {value}" for value, number in sorted(wanted.items(), key=lambda v: (-v[1], v[0]))
    )
    assert page.shown == "12,031 matches in 12,031 lines; 7 values of the first group"
    assert "the 50 most frequent of 12,031 values" in count(LOG, r"line (\d+)").shown


def test_values_on_long_lines_are_counted_too() -> None:
    rows = json.dumps(
        [{"state": "öpen" if n % 3 else "closed", "x": "y" * 90} for n in range(30_000)]
    )
    assert len(rows) > LONG_LINE
    page = read(
        make_content(rows.encode(), "application/json"),
        Request(grep='"state": "([^"]+)"', count=True),
    )
    assert page.text == "20000 öpen\n10000 closed"


def test_a_count_that_takes_too_long_is_a_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coatcheck.reading.grep_counts.SEARCH_SECONDS", -1.0)
    page = count(LOG, "line")
    assert not page.matches_exact
    assert page.shown.startswith("at least ")


def test_a_count_is_not_combined_with_lines_of_context_or_the_end() -> None:
    for options in ({"context": 2}, {"last": True}):
        with pytest.raises(InvalidArgument, match="cannot be combined"):
            Request(grep="x", count=True, **options)
    for option in ("count", "last"):
        with pytest.raises(InvalidArgument, match="needs grep"):
            Request(**{option: True})  # type: ignore[arg-type]


def test_the_last_matches_come_first_in_the_order_of_the_text() -> None:
    first, second, *others = pages(content_of(LOG), Request(grep="ERROR", last=True, max_chars=300))
    assert numbers(first)[-1] == 12_000
    assert numbers(first) == sorted(numbers(first))
    assert first.shown == f"matches {121 - len(numbers(first))}-120 of 120 in 12,031 lines"
    assert numbers(second)[-1] == numbers(first)[0] - 100
    assert others[-1].cursor is None


@given(
    st.lists(
        st.sampled_from(["needle", "hay", "needle " * 200, "x" * 700, "é needle"]), max_size=60
    ),
    st.integers(200, 900),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, "2:9,12:30", "-5:"]),
)
def test_pages_from_the_end_have_every_match_once(
    lines: list[str], max_chars: int, context: int | None, within: str | None
) -> None:
    content = content_of("\n".join(lines) + "\n")
    if len(lines) < 12:
        within = None
    forward = Request(grep="needle", max_chars=max_chars, context=context, lines=within)
    backward = Request(grep="needle", max_chars=max_chars, context=context, lines=within, last=True)
    found = list(pages(content, backward))
    wanted = list(pages(content, forward))
    assert all(page.matches == wanted[0].matches for page in found)
    assert {n for page in found for n in numbers(page)} == {
        n for page in wanted for n in numbers(page)
    }
    upto = wanted[0].matches or 0
    for page in found:
        shown = re.match(r"match(?:es)? (\d+)(?:-(\d+))? of ", page.shown)
        if shown is not None:
            assert int(shown[2] or shown[1]) == upto
            upto = int(shown[1]) - 1
    assert upto == 0
    assert all(len(page.text) <= max_chars for page in found)


def test_the_last_occurrences_on_one_long_line_are_found() -> None:
    text = json.dumps([{"id": n, "text": "needle" + "x" * 50} for n in range(60_000)])
    content = make_content(text.encode(), "application/json")
    first = read(content, Request(grep="needle", last=True))
    assert '"id": 59999' in first.text
    second = read(content, cursor=first.cursor)
    assert '"id": 59999' not in second.text
    assert second.matches == 60_000


def test_a_search_from_the_end_that_takes_too_long_continues_by_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = content_of("needle\n" + ("x" * 99 + "\n") * 40_000)
    monkeypatch.setattr("coatcheck.reading.grep_last.SEARCH_SECONDS", -1.0)
    page = read(content, Request(grep="needle", last=True))
    assert page.text == ""
    assert "searched back to line" in page.shown
    monkeypatch.setattr("coatcheck.reading.grep_last.SEARCH_SECONDS", 10.0)
    assert read(content, cursor=page.cursor).text == "1:needle"


def test_many_matches_before_few_are_left_to_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coatcheck.reading.matches._MAX_BYTES", 400_000)
    text = "needle and more of it\n" * 9_000 + "hay\n" * 30_000 + "the last needle\n"
    first, second, *_ = pages(content_of(text), Request(grep="needle", last=True))
    assert first.text == "39001:the last needle"
    assert "the cursor continues from there" in first.shown
    assert numbers(second)[-1] == 9_000
    assert second.shown.endswith("-9000 of 9,001 in 39,001 lines")
