"""Pointers, prefixes and fragments: what is valid, what is not, and where a fragment leads."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import is_pointer
from coatcheck.errors import InvalidPointer
from coatcheck.ids import (
    clip,
    digest_of,
    follow,
    is_prefix,
    parse_pointer,
    pointer_of,
    prefix_range,
    shared_prefix,
)
from tests.backends import TWIN_PREFIX, TWINS

ID = "3f9b2a1c8e4d" + "0123456789abcdef" * 3 + "0123"
HEX = st.text("0123456789abcdef", min_size=12, max_size=64)


@pytest.mark.parametrize(
    "text",
    [
        "art:3f9b2a1c8e4d",
        f"art:{ID}",
        "art:3f9b2a1c8e4d#",
        "art:3f9b2a1c8e4d#/",
        "art:3f9b2a1c8e4d#/a b/0/\n☃",
    ],
)
def test_valid_pointers_are_recognized(text: str) -> None:
    assert is_pointer(text)


@pytest.mark.parametrize(
    "value",
    ["", "art:", "art:3f9b2a1c8e4", "art:3F9B2A1C8E4D", "3f9b2a1c8e4d", f"art:{ID}0", "art:3f9b2a1c8e4d/rows",
     "art:3f9b2a1c8e4d#rows", " art:3f9b2a1c8e4d", "art:3f9b2a1c8e4d\n", "ART:3f9b2a1c8e4d", "art:3f9b2a1c8e4g",
     "art:٣٣٣٣٣٣٣٣٣٣٣٣", "see art:3f9b2a1c8e4d", None, 12, b"art:3f9b2a1c8e4d", ["art:3f9b2a1c8e4d"]],
)  # fmt: skip
def test_other_values_are_not_pointers(value: object) -> None:
    assert not is_pointer(value)


@given(HEX, st.none() | st.text().map("/".__add__))
def test_a_pointer_is_parsed_into_its_prefix_and_fragment(
    prefix: str, fragment: str | None
) -> None:
    text = f"art:{prefix}" + ("" if fragment is None else f"#{fragment}")
    assert is_pointer(text)
    target = parse_pointer(text)
    assert (target.prefix, target.fragment) == (prefix, fragment or "")


@given(st.text())
def test_text_that_is_not_a_pointer_does_not_parse(text: str) -> None:
    if not is_pointer(text):
        with pytest.raises(InvalidPointer):
            parse_pointer(text)


def test_an_id_is_the_sha_256_of_the_bytes() -> None:
    assert digest_of(b"abc") == hashlib.sha256(b"abc").hexdigest()


def test_a_prefix_is_12_to_64_hex_characters() -> None:
    assert is_prefix(ID)
    assert is_prefix(ID[:12])
    assert not is_prefix(ID[:11])
    assert not is_prefix(ID + "0")
    assert not is_prefix(ID[:12].upper())


def test_a_pointer_has_the_requested_number_of_characters() -> None:
    assert pointer_of(ID) == "art:3f9b2a1c8e4d"
    assert pointer_of(ID, 20) == f"art:{ID[:20]}"
    assert pointer_of(ID, 64) == f"art:{ID}"


@given(HEX)
def test_the_range_of_a_prefix_contains_exactly_the_digests_that_begin_with_it(prefix: str) -> None:
    low, high = prefix_range(prefix)
    assert low.hex().startswith(prefix)
    assert high.hex().startswith(prefix)
    assert int.from_bytes(high) - int.from_bytes(low) == 16 ** (64 - len(prefix)) - 1


def test_shared_prefix_counts_the_characters_in_common() -> None:
    assert shared_prefix("abcd", "abce") == 3
    assert shared_prefix("abcd", "abcd") == 4
    assert shared_prefix("abcd", "xbcd") == 0


def test_the_twins_used_in_tests_share_a_short_pointer() -> None:
    one, two = (digest_of(text.encode()) for text in TWINS)
    assert one[:12] == two[:12] == TWIN_PREFIX
    assert one != two


# The examples of RFC 6901, section 5.
DOCUMENT = {
    "foo": ["bar", "baz"],
    "": 0,
    "a/b": 1,
    "c%d": 2,
    "e^f": 3,
    "g|h": 4,
    "i\\j": 5,
    'k"l': 6,
    " ": 7,
    "m~n": 8,
}


@pytest.mark.parametrize(
    ("fragment", "value"),
    [
        ("", DOCUMENT),
        ("/foo", ["bar", "baz"]),
        ("/foo/0", "bar"),
        ("/", 0),
        ("/a~1b", 1),
        ("/c%d", 2),
        ("/e^f", 3),
        ("/g|h", 4),
        ("/i\\j", 5),
        ('/k"l', 6),
        ("/ ", 7),
        ("/m~0n", 8),
    ],
)
def test_a_fragment_is_a_json_pointer(fragment: str, value: object) -> None:
    assert follow(DOCUMENT, fragment) == value


@pytest.mark.parametrize(
    "fragment",
    [
        "/nope",
        "/foo/2",
        "/foo/-",
        "/foo/-1",
        "/foo/01",
        "/foo/٠",
        "/foo/0/x",
        "/foo/9999999999999999999999",
        "/foo/",
    ],
)
def test_a_fragment_that_leads_nowhere_is_an_error(fragment: str) -> None:
    with pytest.raises(InvalidPointer):
        follow(DOCUMENT, fragment)


@given(
    st.recursive(
        st.integers(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_every_part_of_a_value_has_a_fragment_that_leads_to_it(value: Any) -> None:
    def check(part: Any, fragment: str) -> None:
        assert follow(value, fragment) is part
        if isinstance(part, dict):
            for key, item in part.items():
                check(item, f"{fragment}/{key.replace('~', '~0').replace('/', '~1')}")
        elif isinstance(part, list):
            for index, item in enumerate(part):
                check(item, f"{fragment}/{index}")

    check(value, "")


@given(st.text(min_size=1), st.integers(10, 100))
def test_untrusted_text_in_an_error_is_bounded_printable_and_quoted(text: str, limit: int) -> None:
    shown = clip(text * 100, limit)
    assert shown.isprintable()
    assert len(shown) <= 10 * limit + 40
    json.dumps(shown)
