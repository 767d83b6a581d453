"""Shorter forms of a result that leave nothing out: sparse line numbers, repeated results,
diffs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Session, tokens
from coatcheck.externalize.shorter import ShownResult, changed, expanded, listing, repeated, sparse

LINES = [f"    return compute_value({n})  # step {n}" for n in range(1, 400)]


def numbered(lines: list[str], first: int = 1, sign: str = "→") -> str:
    return "\n".join(f"{first + at:>6}{sign}{line}" for at, line in enumerate(lines))


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60),
        min_size=20,
    ),
    st.integers(1, 99_999),
    st.sampled_from("→\t"),
    st.text(max_size=50),
)
def test_a_sparse_listing_has_every_line_under_its_number(
    lines: list[str], first: int, sign: str, rest: str
) -> None:
    whole = numbered(lines, first, sign) + (f"\n\n{rest}" if rest else "")
    short = sparse(whole)
    if short is not None:
        assert len(short) < len(whole)
        assert listing(short) == listing(whole)
        assert expanded(short) == whole


def test_sparse_line_numbers_save_a_tenth_of_the_tokens_of_code() -> None:
    whole = numbered(LINES)
    short = sparse(whole)
    assert short is not None
    assert short.startswith("[Lines 1-399, numbered every 10 lines.]\n     1→")
    assert "\n10→" in short
    assert "\n11→" not in short
    assert tokens.estimate(short) < 0.9 * tokens.estimate(whole)


@pytest.mark.parametrize(
    "text", ["", "1→one line", "no numbers\n" * 50, numbered(LINES[:10]), "7→a\n9→b\n" * 30]
)
def test_other_texts_have_no_sparse_form(text: str) -> None:
    assert sparse(text) is None


def test_a_listing_that_is_not_externalized_is_sparse_only_without_a_limit(
    session: Session,
) -> None:
    whole = numbered(LINES[:40])
    assert session.externalize(whole, tool="Read").content == sparse(whole)
    assert (
        session.externalize(whole, tool="Read", policy=Policy(max_tokens=50_000)).content == whole
    )
    assert session.externalize(whole, tool="Read", policy=Policy(enabled=False)).content == whole
    block = [{"type": "text", "text": whole}]
    assert session.externalize(block, tool="Read").content == [
        {"type": "text", "text": sparse(whole)}
    ]


def test_a_repeated_result_is_replaced_by_a_reference_to_where_it_is_shown() -> None:
    text = "\n".join(LINES)
    shown = [ShownResult("other " * 200, "Bash", "c0"), ShownResult(text, "Read", "c1")]
    assert "Read" in str(repeated(text, shown))
    assert "c1" in str(repeated(text, shown))
    assert "as a part of it" in str(repeated(text[100:900], shown))
    assert repeated(text + "more", shown) is None
    assert repeated(text[:100], shown) is None, "a line about it would be longer"


def test_a_range_of_a_listing_is_found_in_its_sparse_form() -> None:
    short = sparse(numbered(LINES))
    assert short is not None
    shown = [ShownResult(short, "Read", "c1")]
    found = repeated(numbered(LINES[99:150], 100), shown)
    assert found is not None
    assert "lines 100-150" in found
    assert len(found) < 150
    assert repeated(numbered(LINES[99:150], 101), shown) is None, "other numbers"
    assert repeated(numbered([*LINES[99:149], "    pass"], 100), shown) is None, "another line"


def test_a_changed_result_of_an_equal_call_is_a_diff() -> None:
    arguments = {"path": "a.py"}
    shown = [ShownResult(numbered(LINES), "Read", "c1", arguments)]
    new = numbered([*LINES[:50], "    inserted = True", *LINES[50:]])
    found = changed(new, "Read", arguments, shown)
    assert found is not None
    assert "+    inserted = True" in found
    assert "c1" in found
    assert tokens.estimate(found) < 200
    assert changed(new, "Read", {"path": "b.py"}, shown) is None
    assert changed(numbered(LINES[::-1]), "Read", arguments, shown) is None, (
        "nearly everything has changed"
    )


@given(
    st.lists(st.text("ab \n", max_size=30), min_size=1, max_size=30),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_a_result_reported_as_repeated_is_really_shown(
    parts: list[str], start: int, end: int
) -> None:
    whole = "\n".join(parts) * 20
    text = whole[start : len(whole) - end]
    if repeated(text, [ShownResult(whole, "t", "c")]) is not None:
        assert text in whole
