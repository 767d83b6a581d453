"""Slices by lines and characters: each says what part it is, and together they are exact."""

import codecs
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument
from coatcheck.reading import Request
from coatcheck.storage.frames import FRAME
from tests.reading.framed import Framed, content_of, make_content, pages, read

pytestmark = pytest.mark.usefixtures("each_source")

LOG = "".join(f"line {number}\n" for number in range(1, 12_032))


def decoded(data: bytes) -> str:
    """Decode bytes without a declared encoding as pages show them: UTF-8, with U+FFFD for each
    invalid byte."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(
        "\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text
    )


PIECES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b"\n\n\n",
            b"\r",
            b"",
            "é€😀".encode(),
            b"\xff",
            b"\xe2\x82",
            b"\xf0\x9f\x98",
        ]
    ),
    st.integers(150, 700).map(lambda size: b"x" * size),
    st.integers(60, 300).map(lambda size: "語".encode() * size),
)
CONTENTS = (
    st.lists(PIECES, max_size=25)
    .map(b"".join)
    .filter(
        lambda data: (
            not data.startswith(
                (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
            )
        )
    )
)
CAPS = st.integers(200, 900)


@given(CONTENTS, CAPS)
def test_all_pages_put_together_are_the_text(data: bytes, cap: int) -> None:
    found = list(pages(content_of(data), Request(max_chars=cap, exact=True)))
    assert "".join(page.text for page in found) == decoded(data)
    shown = list(pages(content_of(data), Request(max_chars=cap)))
    assert all(len(page.text) <= cap for page in (*found, *shown))


@given(CONTENTS, CAPS, st.data())
def test_all_pages_of_some_lines_are_those_lines(
    data: bytes, cap: int, draw: st.DataObject
) -> None:
    lines = decoded(data).split("\n")
    lines = [line + "\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
    if not lines:
        return
    first = draw.draw(st.integers(1, len(lines)))
    last = draw.draw(st.integers(first, len(lines) + 3))
    found = pages(content_of(data), Request(lines=f"{first}:{last}", max_chars=cap, exact=True))
    assert "".join(page.text for page in found) == "".join(lines[first - 1 : last])
    tail = draw.draw(st.integers(1, len(lines) + 3))
    found = pages(content_of(data), Request(lines=f"-{tail}:", max_chars=cap, exact=True))
    assert "".join(page.text for page in found) == "".join(lines[-tail:])


@given(CONTENTS, CAPS, st.data())
def test_all_pages_of_some_characters_are_those_characters(
    data: bytes, cap: int, draw: st.DataObject
) -> None:
    text = decoded(data)
    if not text:
        return
    first = draw.draw(st.integers(0, len(text) - 1))
    last = draw.draw(st.integers(first + 1, len(text) + 3))
    for spec, wanted in (
        (f"{first}:{last}", text[first:last]),
        (f"{first - len(text)}:", text[first:]),
    ):
        found = list(pages(content_of(data), Request(chars=spec, max_chars=cap)))
        assert "".join(page.text for page in found) == wanted
        assert all(len(page.text) <= cap for page in found)


@given(
    # A NUL at the start would turn a UTF-16 mark into a UTF-32 one.
    st.text(max_size=2_000).filter(lambda text: text[:1] != "\0"),
    st.sampled_from(["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]),
    CAPS,
)
def test_pages_of_text_in_another_encoding_are_the_text(text: str, encoding: str, cap: int) -> None:
    content = content_of(("\ufeff" + text).encode(encoding))
    found = list(pages(content, Request(max_chars=cap, exact=True)))
    assert "".join(page.text for page in found) == text
    assert (
        f"decoded from {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')}"
        in found[0].shown
    )


@given(CONTENTS, CAPS)
def test_pages_end_with_a_line_where_a_line_end_fits(data: bytes, cap: int) -> None:
    for page in pages(content_of(data), Request(max_chars=cap)):
        if page.cursor is not None and "\n" in page.text:
            assert page.text.endswith("\n")


@pytest.mark.parametrize(
    ("spec", "first", "last"),
    [
        ("4100:4160", 4100, 4160),
        ("4100-4160", 4100, 4160),
        (" 4100 : 4160 ", 4100, 4160),
        ("7", 7, 7),
        (":3", 1, 3),
        ("12000:", 12_000, 12_031),
        ("12000:99999", 12_000, 12_031),
        ("-50:", 11_982, 12_031),
        ("-50", 11_982, 12_031),
        ("-50:-49", 11_982, 11_983),
        ("12030:-1", 12_030, 12_031),
        ("-1:", 12_031, 12_031),
    ],
)
def test_lines_count_from_one_and_both_ends_are_included(spec: str, first: int, last: int) -> None:
    page = read(content_of(LOG), Request(lines=spec))
    assert page.text == "".join(f"line {number}\n" for number in range(first, last + 1))
    assert page.shown == (
        f"line {first} of 12,031" if first == last else f"lines {first}-{last} of 12,031"
    )
    assert page.cursor is None


@pytest.mark.parametrize(
    ("spec", "begin", "end"),
    [
        ("0:2000", 0, 2_000),
        ("500:600", 500, 600),
        (":10", 0, 10),
        ("-20:", -20, None),
        ("-20:-10", -20, -10),
    ],
)
def test_characters_count_from_zero_and_the_end_is_left_out(
    spec: str, begin: int, end: int | None
) -> None:
    page = read(content_of(LOG), Request(chars=spec))
    assert page.text == LOG[begin:end]
    first = begin % len(LOG)
    assert page.shown == f"characters {first}-{first + len(page.text)} of {len(LOG):,}"


def test_a_tail_longer_than_the_text_is_all_of_it() -> None:
    assert read(content_of("a\nb\n"), Request(lines="-50:")).text == "a\nb\n"
    assert read(content_of("abc"), Request(chars="-50:")).text == "abc"


@pytest.mark.parametrize(
    "spec", ["", ":", "a:b", "1:2:3", "0:10", "0", "10:5", "-5:-10", "1.5", "1,000:2,000", "9" * 40]
)
def test_invalid_line_slices_are_refused_with_an_example(spec: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Request(lines=spec)
    assert "4100:4160" in caught.value.hint


@pytest.mark.parametrize("spec", ["", ":", "7", "x", "10:5", ":0", "-5:-10"])
def test_invalid_character_slices_are_refused_with_an_example(spec: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Request(chars=spec)
    assert "0:2000" in caught.value.hint


def test_a_slice_past_the_end_says_how_much_there_is() -> None:
    with pytest.raises(InvalidArgument, match="line 5 is past the end: there are 2 lines"):
        read(content_of("a\nb\n"), Request(lines="5:9"))
    with pytest.raises(InvalidArgument, match="character 4 is past the end: there are 4"):
        read(content_of("a\nb\n"), Request(chars="4:9"))


@pytest.mark.parametrize(
    "members",
    [
        {"lines": "1:", "chars": "0:9"},
        {"grep": "x", "chars": "0:9"},
        {"query": "$", "lines": "1:"},
        {"diff": "art:0123456789ab", "grep": "x"},
        {"context": 3},
        {"ignore_case": True},
        {"grep": ""},
        {"grep": "x", "context": -1},
        {"grep": "x", "context": 101},
        {"max_chars": 199},
        {"max_chars": True},
        {"lines": 7},
    ],
)
def test_invalid_values_and_combinations_in_a_request_are_refused_with_a_hint(
    members: dict,
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Request(**members)
    assert caught.value.hint
    assert len(str(caught.value)) < 300


def test_a_page_says_what_part_it_is_and_the_cursor_continues() -> None:
    first, second, *_, last = pages(content_of(LOG))
    assert first.shown == "lines 1-900 of 12,031"
    assert second.shown == "lines 901-1709 of 12,031"
    assert second.text.startswith("line 901\n")
    assert last.shown.endswith("-12031 of 12,031")
    assert last.cursor is None


def test_empty_content_is_an_empty_page() -> None:
    for request in (Request(), Request(lines="1:9"), Request(lines="-5:")):
        page = read(content_of(b""), request)
        assert (page.text, page.shown, page.cursor) == ("", "empty: 0 lines", None)
    assert read(content_of(b""), Request(chars="0:9")).shown == "empty: 0 characters"


@pytest.mark.parametrize(
    "mark",
    [
        codecs.BOM_UTF8,
        codecs.BOM_UTF16_LE,
        codecs.BOM_UTF16_BE,
        codecs.BOM_UTF32_LE,
        codecs.BOM_UTF32_BE,
    ],
)
def test_a_byte_order_mark_alone_is_empty_content(mark: bytes) -> None:
    page = read(content_of(mark))
    assert page.text == ""
    assert page.shown.startswith("empty: 0 lines; ")


def test_a_last_line_without_a_line_feed_counts() -> None:
    assert read(content_of("a\nb\nc")).shown == "lines 1-3 of 3"
    assert read(content_of("a\nb\nc\n")).shown == "lines 1-3 of 3"
    assert read(content_of("a\nb\nc\n\n")).shown == "lines 1-4 of 4"


def test_carriage_returns_stay_in_the_text() -> None:
    page = read(content_of("a\r\nb\r\n"), Request(lines="2"))
    assert (page.text, page.shown) == ("b\r\n", "line 2 of 2")


def test_invalid_bytes_are_shown_one_by_one_and_counted() -> None:
    page = read(content_of(b"caf\xe9 \xe2\x82\nfine\n"))
    assert page.text == "caf\ufffd \ufffd\ufffd\nfine\n"
    assert page.shown == "lines 1-2 of 2; 3 invalid bytes"
    assert read(content_of(b"caf\xe9")).shown == "line 1 of 1; 1 invalid byte"


def test_a_replacement_character_in_the_text_is_not_an_invalid_byte() -> None:
    assert read(content_of("\ufffd")).shown == "line 1 of 1"


def test_the_byte_order_mark_is_left_out_and_mentioned() -> None:
    page = read(content_of(codecs.BOM_UTF8 + b"a\nb\n"))
    assert (page.text, page.shown) == ("a\nb\n", "lines 1-2 of 2; a byte-order mark was left out")
    assert read(content_of(codecs.BOM_UTF8 + b"a\nb\n"), Request(lines="2")).shown == "line 2 of 2"
    assert read(content_of(codecs.BOM_UTF8 + b"abc"), Request(chars="0:2")).text == "ab"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_lone_surrogates_and_a_torn_end_are_invalid_code_units(encoding: str) -> None:
    data = "\ufeffa\ud800b\udc00c\n".encode(encoding, "surrogatepass") + b"x"
    page = read(content_of(data))
    assert page.text == "a\ufffdb\ufffdc\n\ufffd"
    assert "3 invalid code units" in page.shown


@pytest.mark.parametrize(("encoding", "order"), [("utf-32-le", "little"), ("utf-32-be", "big")])
def test_code_points_out_of_range_are_invalid_code_units(encoding: str, order: str) -> None:
    units = (0xFEFF, ord("a"), 0x110000, 0xD800, ord("b"))
    data = b"".join(unit.to_bytes(4, order) for unit in units)  # type: ignore[arg-type]
    page = read(content_of(data + b"zz"))
    assert page.text == "a\ufffd\ufffdb\ufffd"
    assert "3 invalid code units" in page.shown


def test_lines_of_a_large_text_in_another_encoding_are_found() -> None:
    text = "".join(f"zeile {number} 😀\n" for number in range(1, 60_001))
    for encoding in ("utf-16-le", "utf-32-be"):
        content = content_of(("\ufeff" + text).encode(encoding))
        page = read(content, Request(lines="41000:41001"))
        assert page.text == "zeile 41000 😀\nzeile 41001 😀\n"
        assert page.shown.startswith("lines 41000-41001 of 60,000; decoded from UTF-")
        assert "".join(page.text for page in pages(content, Request(lines="59000:"))) == "".join(
            text.splitlines(keepends=True)[58_999:]
        )


@given(st.integers(0, 6), st.sampled_from(["utf-16-le", "utf-16-be", "utf-32-le"]))
def test_a_character_that_two_frames_share_is_whole(shift: int, encoding: str) -> None:
    text = "x" * (FRAME // 2 - 6 + shift) + "😀😀😀\nlast"
    content = content_of(("\ufeff" + text).encode(encoding))
    assert read(content, Request(chars="-10:")).text == text[-10:]
    assert read(content, Request(lines="2")).text == "last"


def test_a_long_line_is_paged_by_its_characters() -> None:
    content = content_of("x" * 20_000 + "\n" + "short\n")
    first, second, third = pages(content)
    assert first.shown == "characters 0-8000 of line 1 (20,000) of 2"
    assert second.shown == "characters 8000-16000 of line 1 (20,000) of 2"
    assert third.shown == "characters 16000-20000 of line 1 (20,000) of 2, line 2 of 2"
    assert third.text == "x" * 4_000 + "\nshort\n"


def test_a_long_line_counts_characters_not_bytes() -> None:
    content = content_of("short\n" + "語" * 10_000 + "\nlast")
    shown = [page.shown for page in pages(content)]
    assert shown == [
        "line 1 of 3",
        "characters 0-8000 of line 2 (10,000) of 3",
        "characters 8000-10000 of line 2 (10,000) of 3, line 3 of 3",
    ]


@pytest.mark.slow
def test_a_single_line_of_50_megabytes_is_paged_from_anywhere() -> None:
    content = content_of(b"0123456789" * (52_428_800 // 10))
    first = read(content)
    assert first.shown == "characters 0-8000 of line 1 (52,428,800)"
    assert first.cursor is not None
    assert len(first.cursor) <= 24
    assert (
        read(content, cursor=first.cursor).shown == "characters 8000-16000 of line 1 (52,428,800)"
    )
    page = read(content, Request(chars="52428790:"))
    assert (page.text, page.shown) == ("0123456789", "characters 52428790-52428800 of 52,428,800")


def numbered(lines: int) -> bytes:
    return b"".join(
        b"%011d of a log with lines of fifty bytes each\n" % number
        for number in range(1, lines + 1)
    )


def test_reading_lines_touches_only_their_frames_and_the_ends() -> None:
    framed = Framed(numbered(400_000))
    content = framed.content()
    for first in (1, 5_243, 123_456, 399_999):
        framed.frames.clear()
        page = read(content, Request(lines=f"{first}:{first + 49}"))
        assert page.text.startswith(f"{first:011d} of")
        ends = {0, (content.size - 1) // FRAME}  # read for the encoding and for a missing line feed
        assert len(set(framed.frames) - ends) <= 2


def test_continuing_by_cursor_touches_few_frames() -> None:
    framed = Framed(numbered(400_000))
    content = framed.content()
    page = read(content, Request(lines="200000:"))
    framed.frames.clear()
    page = read(content, cursor=page.cursor)
    assert page.shown.startswith("lines 200")
    assert len(framed.frames) <= 4


def test_content_without_frames_reads_the_same() -> None:
    whole = content_of(LOG)
    bare = Content(whole.ref, b"", whole.read)
    assert read(bare, Request(lines="-50:")) == read(whole, Request(lines="-50:"))


def test_several_slices_of_lines_are_one_page() -> None:
    content = content_of("".join(f"line {number}\n" for number in range(1, 301)))
    page = read(content, Request(lines="2:3, 100,-1:"))
    assert page.text == "line 2\nline 3\n--\nline 100\n--\nline 300\n"
    assert page.shown == "lines 2-3, line 100, line 300 of 300"
    assert len(page.spans) == 3


def test_pages_of_several_slices_have_all_their_lines() -> None:
    content = content_of("".join(f"line {number}\n" for number in range(1, 301)))
    found = list(pages(content, Request(lines="1:80,200:290", max_chars=300)))
    assert len(found) > 3
    lines = [line for page in found for line in page.text.split("\n") if line and line != "--"]
    assert lines == [f"line {number}" for number in (*range(1, 81), *range(200, 291))]
    assert all(len(page.text) <= 300 for page in found)


def test_slices_past_the_end_are_left_out_and_counted() -> None:
    content = content_of("a\nb\n")
    assert read(content, Request(lines="2,7:9")).shown == "line 2 of 2; 1 past the end"
    with pytest.raises(InvalidArgument, match="line 7 is past the end"):
        read(content, Request(lines="7:9,8"))
    with pytest.raises(InvalidArgument, match="51 slices"):
        Request(lines=",".join(["1"] * 51))


BAR = "\r".join(f"Downloading {percent}% {'#' * percent}" for percent in range(101))


def test_a_progress_bar_is_shown_in_its_final_state() -> None:
    content = content_of(f"begin\n{BAR}\nend\n")
    page = read(content, Request(lines="1:3", max_chars=300))
    assert page.text == f"begin\nDownloading 100% {'#' * 100}\nend\n"
    assert page.shown == "lines 1-3 of 3, 1 line folded to the end of a progress bar"
    assert page.spans == ((0, content.size),)


def test_exact_lines_and_characters_keep_overwritten_text() -> None:
    content = content_of(f"\x1b[1m{BAR}\n")
    assert read(content, Request(lines="1", exact=True, max_chars=20_000)).text == f"\x1b[1m{BAR}\n"
    assert read(content, Request(chars="0:", max_chars=20_000)).text == f"\x1b[1m{BAR}\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("50 %\r99 %\r\n", "99 %\r\n"),
        ("\x1b[31mred\x1b[0m\n", "red\n"),
        ("Loading...\r\x1b[KDone\n", "Done\n"),
        ("long status 1\rshort 2\rshort 3\n", "short 3atus 1\n"),
        ('1,"first\rsecond",x\n', '1,"first\rsecond",x\n'),
        ("1,2\r3,4\r5,6", "1,2\r3,4\r5,6"),
    ],
)
def test_lines_are_shown_as_on_a_terminal(text: str, shown: str) -> None:
    assert read(content_of(text)).text == shown


def test_a_grep_matches_what_a_terminal_shows() -> None:
    content = content_of(f"\x1b[31mERROR\x1b[0m: disk\n{BAR}\n")
    page = read(content, Request(grep="ERROR: disk|100%"))
    assert page.text == f"1:ERROR: disk\n2:Downloading 100% {'#' * 100}"
    assert read(content, Request(grep=" 50%")).matches == 0
    assert read(content, Request(grep=" 50%", exact=True)).matches == 1


@given(st.recursive(st.text(max_size=8) | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_lines_of_json_show_characters_and_stay_the_same_json(value: Any) -> None:
    written = json.dumps([value])
    shown = read(make_content(written.encode(), "application/json"))
    assert json.loads(shown.text) == [value]
    exact = read(make_content(written.encode(), "application/json"), Request(exact=True))
    assert exact.text == written


def test_lines_of_json_show_what_can_be_printed() -> None:
    written = r'["Z\u00fcrich", "\u8a9e\ud83d\ude00", "\\u00fc", "\u0041\u200b\ud83d\n"]'
    content = make_content(written.encode(), "application/json")
    shown = r'["Zürich", "語😀", "\\u00fc", "\u0041\u200b\ud83d\n"]'
    assert read(content).text == shown
    assert read(content, Request(grep="Z")).text == f"1:{shown}"
    assert read(content, Request(chars="0:")).text == written
    assert read(content_of(written)).text == written
