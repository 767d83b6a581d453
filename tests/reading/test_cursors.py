"""Cursors: short, bound to artifact and request, and refused if they were changed."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArgument
from coatcheck.reading.page import Request, seal, unseal
from tests.reading.framed import KEY

ARTIFACT = "3f" * 32
OTHER = "40" * 32

NUMBERS = st.integers(1, 10**12)
SPECS = st.one_of(
    NUMBERS.map(str),
    NUMBERS.map(lambda n: f"{n}:"),
    NUMBERS.map(lambda n: f":{n}"),
    NUMBERS.map(lambda n: f"-{n}:"),
    st.tuples(NUMBERS, NUMBERS).map(lambda ends: f"{min(ends)}:{max(ends)}"),
)
SEVERAL = st.lists(SPECS, min_size=1, max_size=4).map(",".join)
PATTERNS = st.text(st.characters(), min_size=1, max_size=300)
REQUESTS = st.one_of(
    st.just(Request()),
    st.builds(Request, lines=SEVERAL),
    st.builds(Request, chars=SPECS.filter(lambda spec: ":" in spec)),
    st.builds(
        Request,
        lines=st.none() | SEVERAL,
        grep=PATTERNS,
        context=st.none() | st.integers(0, 100),
        ignore_case=st.booleans(),
        invert=st.booleans(),
        literal=st.booleans(),
        exact=st.booleans(),
    ),
    st.builds(Request, query=PATTERNS),
    st.builds(Request, diff=PATTERNS),
)
POSITIONS = st.lists(st.integers(0, 2**60), max_size=5).map(tuple)


@given(REQUESTS, POSITIONS)
def test_a_cursor_with_its_request_gives_back_the_position(
    request: Request, position: tuple
) -> None:
    cursor = seal(KEY, ARTIFACT, request, position)
    again, at = unseal(KEY, ARTIFACT, cursor, request)
    assert at == position
    assert seal(KEY, ARTIFACT, again, at) == cursor


@given(REQUESTS, POSITIONS)
def test_a_cursor_alone_gives_back_a_request_that_reads_the_same(
    request: Request, position: tuple
) -> None:
    cursor = seal(KEY, ARTIFACT, request, position)
    assume(
        sum(len(part.encode()) for part in (request.grep, request.query, request.diff) if part)
        < 120
    )
    again, at = unseal(KEY, ARTIFACT, cursor)
    assert at == position
    assert seal(KEY, ARTIFACT, again, at) == cursor


@given(REQUESTS, POSITIONS)
def test_cursors_are_url_safe(request: Request, position: tuple) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]+", seal(KEY, ARTIFACT, request, position))


@pytest.mark.parametrize(
    ("request_", "position"),
    [
        (Request(), (1 << 30,)),
        (Request(lines="4100:9000"), (1 << 24,)),
        (Request(lines="-500:"), (1 << 30,)),
        (Request(chars="0:20000"), (8_000, 0, 1)),
        (Request(grep="FAIL"), (12_031, 83, 0, 2 * 2_711 + 1)),
    ],
)
def test_typical_cursors_have_at_most_24_characters(request_: Request, position: tuple) -> None:
    assert len(seal(KEY, ARTIFACT, request_, position)) <= 24


@given(REQUESTS, POSITIONS, st.data())
def test_a_changed_cursor_is_refused(
    request: Request, position: tuple, data: st.DataObject
) -> None:
    cursor = seal(KEY, ARTIFACT, request, position)
    at = data.draw(st.integers(0, len(cursor) - 1))
    other = data.draw(st.sampled_from("ABCxyz019_-").filter(lambda c: c != cursor[at]))
    with pytest.raises(InvalidArgument, match="that cursor"):
        unseal(KEY, ARTIFACT, cursor[:at] + other + cursor[at + 1 :], request)


@given(st.text(max_size=600))
def test_text_that_is_not_a_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="that cursor") as caught:
        unseal(KEY, ARTIFACT, text)
    assert len(str(caught.value)) < 300


def test_a_cursor_of_another_artifact_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="that cursor is not for this artifact"):
        unseal(KEY, OTHER, seal(KEY, ARTIFACT, Request(), (8_000,)))


def test_a_cursor_of_another_store_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="that cursor"):
        unseal(b"another key, another store", ARTIFACT, seal(KEY, ARTIFACT, Request(), (8_000,)))


@pytest.mark.parametrize(
    "given_",
    [
        Request(lines="1:10"),
        Request(chars="0:10"),
        Request(grep="WARN"),
        Request(grep="ERROR", context=3),
        Request(grep="ERROR", ignore_case=True),
        Request(grep="ERROR", lines="5:"),
        Request(query="$.x"),
    ],
)
def test_a_request_that_contradicts_the_cursor_is_refused(given_: Request) -> None:
    cursor = seal(KEY, ARTIFACT, Request(grep="ERROR", context=2), (100, 5, 0, 0))
    with pytest.raises(InvalidArgument, match=r"that cursor continues .*, not ") as caught:
        unseal(KEY, ARTIFACT, cursor, given_)
    assert "cursor alone" in caught.value.hint


def test_part_of_the_request_may_be_repeated() -> None:
    whole = Request(grep="ERROR", context=2, ignore_case=True, lines="100:")
    cursor = seal(KEY, ARTIFACT, whole, (100, 5, 0, 0))
    assert unseal(KEY, ARTIFACT, cursor, Request(grep="ERROR"))[0] == whole


def test_a_slice_written_in_another_way_is_the_same_slice() -> None:
    cursor = seal(KEY, ARTIFACT, Request(lines="4100:9000"), (77,))
    assert unseal(KEY, ARTIFACT, cursor, Request(lines=" 4100-9000 "))[1] == (77,)


def test_the_limit_of_the_next_page_is_the_one_given_with_the_cursor() -> None:
    cursor = seal(KEY, ARTIFACT, Request(lines="1:", max_chars=20_000), (77,))
    assert unseal(KEY, ARTIFACT, cursor, Request(max_chars=500))[0] == Request(
        lines="1:", max_chars=500
    )


def test_a_long_pattern_is_not_part_of_the_cursor_and_has_to_be_repeated() -> None:
    long = Request(grep="x" * 900)
    cursor = seal(KEY, ARTIFACT, long, (7, 1, 0, 0))
    assert len(cursor) < 24
    assert unseal(KEY, ARTIFACT, cursor, long)[1] == (7, 1, 0, 0)
    for wrong in (None, Request(grep="x" * 899)):
        with pytest.raises(InvalidArgument, match="that cursor") as caught:
            unseal(KEY, ARTIFACT, cursor, wrong)
        assert "repeat the arguments" in caught.value.hint
