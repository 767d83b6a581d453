"""grep: every line that matches, its number, its context, and a correct count."""

import codecs
import json
import re
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.reading import Page, Request, grep, line_groups, matches
from coatcheck.reading.line_groups import LONG_LINE
from coatcheck.reading.matches import LONG
from coatcheck.reading.patterns import alternatives
from coatcheck.reading.text import PIECE
from coatcheck.storage.frames import FRAME
from tests.reading.framed import Framed, content_of, make_content, pages, read

pytestmark = pytest.mark.usefixtures("each_source")

LOG = "".join(
    f"line {number}{' ERROR' if number % 100 == 0 else ''}\n" for number in range(1, 12_032)
)

WORDS = st.sampled_from(
    ["a", "ab", "ERROR", "error", "x" * 30, "x" * 700, "é", "語", " ", "", "\r", "a.c", "42"]
)
LINES = st.lists(st.lists(WORDS, max_size=4).map("".join), max_size=60)
TEXTS = st.tuples(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans()).map(
    lambda drawn: drawn[1].join(drawn[0]) + (drawn[1] if drawn[2] and drawn[0] else "")
)
PATTERNS = st.sampled_from(
    [
        "a",
        "^a",
        "a$",
        "^$",
        "",
        "x*",
        "ERROR|42",
        "[^a]",
        r"\d",
        r"\bab\b",
        ".",
        "é",
        r"\s",
        "a.c",
        "(a|b)+",
        r"\Aab",
        "b\\z",
    ]
).filter(bool)


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    """Counts are exact here, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COUNT_SECONDS", "DENSE_SECONDS", "SEARCH_SECONDS"):
            patch.setattr(matches, name, 300.0)
        yield


def found_by_hand(text: str, request: Request) -> list[int]:
    """Return the numbers of the lines that match, found by Python's `re` one line at a time."""
    return [number for number, _ in weighed_by_hand(text, request)]


def weighed_by_hand(text: str, request: Request) -> list[tuple[int, int]]:
    """Return the lines that match, and what each adds to the count: one, or one per occurrence on a
    long line."""
    source = (
        re.escape(request.grep or "")
        if request.literal
        else (request.grep or "").replace("\\z", "\\Z")
    )
    pattern = re.compile(source, (re.IGNORECASE if request.ignore_case else 0) | re.ASCII)
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        if (pattern.search(line) is None) is request.invert:
            is_long = len(line.encode()) > LONG or len(lines) == 1
            many = not request.invert and is_long and not pattern.search("")
            found.append((number, max(1, sum(map(bool, pattern.findall(line)))) if many else 1))
    return found


def matches_of(page: Page) -> list[int]:
    """Return the numbers of the matches that a page says it shows."""
    found = re.match(r"match(?:es)? (\d+)(?:-(\d+))? of ", page.shown)
    return [] if found is None else list(range(int(found[1]), int(found[2] or found[1]) + 1))


def shown_parts(found: list[Page], number: int) -> list[tuple[int, str]]:
    """Return the parts of a line that pages show, each with the offset at which it begins."""
    parts = []
    for page in found:
        for line in page.text.split("\n"):
            entry = re.fullmatch(
                rf"{number}:(?:\[([\d,]+) \w+ left out\])?(.*?)(?:\[[\d,]+ \w+ left out\])?",
                line,
                re.DOTALL,
            )
            if entry is not None:
                parts.append((int((entry[1] or "0").replace(",", "")), entry[2]))
    return parts


def numbers(found: list[Page], mark: str) -> list[int]:
    return [
        int(match[1])
        for page in found
        for line in page.text.split("\n")
        if (match := re.match(rf"(\d+){mark}", line)) is not None
    ]


@given(
    TEXTS,
    st.builds(
        Request,
        exact=st.just(True),
        grep=PATTERNS,
        context=st.integers(0, 4),
        ignore_case=st.booleans(),
        invert=st.booleans(),
        literal=st.booleans(),
        max_chars=st.integers(200, 1_500),
    ),
)
def test_all_pages_have_every_line_that_matches_once_with_its_context(
    text: str, request: Request
) -> None:
    found = list(pages(content_of(text), request))
    wanted = found_by_hand(text, request)
    assert list(dict.fromkeys(numbers(found, ":"))) == wanted
    total = len(text.split("\n")) - (text.endswith("\n") or not text)
    context = request.context if isinstance(request.context, int) else 0
    around = {
        near
        for number in wanted
        for near in range(number - context, number + context + 1)
        if 1 <= near <= total
    }
    assert numbers(found, "-") == sorted(around.difference(wanted))
    matches = sum(weight for _, weight in weighed_by_hand(text, request))
    assert all(page.matches == matches and page.matches_exact for page in found)
    assert all(len(page.text) <= request.max_chars for page in found)
    assert [number for page in found for number in matches_of(page)] == list(range(1, matches + 1))


@given(
    TEXTS,
    st.builds(
        Request,
        exact=st.just(True),
        grep=PATTERNS,
        invert=st.booleans(),
        lines=st.sampled_from(["3:9", "-5:", "4"]),
    ),
)
def test_a_grep_of_some_lines_searches_only_those(text: str, request: Request) -> None:
    total = len(text.split("\n")) - (text.endswith("\n") or not text)
    if total < 5:
        return
    first, last = {"3:9": (3, 9), "-5:": (total - 4, total), "4": (4, 4)}[request.lines or ""]
    wanted = [number for number in found_by_hand(text, request) if first <= number <= last]
    assert list(dict.fromkeys(numbers(list(pages(content_of(text), request)), ":"))) == wanted


FILLERS = st.sampled_from(
    ["x", "é" * 7, "needle", "語", "z" * 90, "y" * 700, " ", "Needle", "needleneedle"]
)


@given(
    st.lists(FILLERS, min_size=1, max_size=60).map("".join),
    st.sampled_from(["", "short needle\n", "no match here\n"]),
    st.sampled_from(["needle", "n.*?e", "[ny]", "(?i)needle", "e$", r"\bneedle"]),
    st.integers(200, 1_500),
)
def test_every_occurrence_on_a_long_line_is_counted_and_shown(
    line: str, before: str, pattern: str, max_chars: int
) -> None:
    request = Request(grep=pattern, max_chars=max_chars)
    text = before + line
    found = list(pages(content_of(text), request))
    weights = dict(weighed_by_hand(text, request))
    assert all(page.matches == sum(weights.values()) for page in found)
    assert [number for page in found for number in matches_of(page)] == list(
        range(1, sum(weights.values()) + 1)
    )
    number = 1 + bool(before)
    if weights.get(number, 1) == 1:
        return
    parts = shown_parts(found, number)
    for match in re.finditer(pattern, line):
        begin, end = match.start(), min(match.end(), match.start() + 50)
        assert any(low <= begin and end <= low + len(part) for low, part in parts)


@pytest.mark.parametrize("size", [9, 300, 20_000])
def test_nine_matches_on_one_line_count_as_nine_whatever_its_length(size: int) -> None:
    for text in (("needle" + "-" * size) * 9, "x\n" + ("needle" + "-" * (size + 60)) * 9):
        found = list(pages(content_of(text), Request(grep="needle", max_chars=1_000)))
        assert {page.matches for page in found} == {9}
        assert sum(len(matches_of(page)) for page in found) == 9


JSON_WORDS = ["é", "Zürich", "😀", 'say "yes"', "a/b", "C:\\dir", "plain", "語"]


@given(
    st.lists(
        st.lists(
            st.sampled_from([*JSON_WORDS, "filler", "line\nbreak", "\t", "-" * 300]), max_size=8
        ),
        max_size=30,
    ),
    st.sampled_from(JSON_WORDS),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(200, 2_000),
)
def test_grep_of_json_finds_the_decoded_text_of_strings(
    lists: list[list[str]], word: str, indent: int | None, slashes: bool, max_chars: int
) -> None:
    value = [" | ".join(words) for words in lists]
    text = json.dumps(value, indent=indent)
    if slashes:
        text = text.replace("/", "\\/")
    content = make_content(text.encode(), "application/json")
    request = Request(grep=word, literal=True, max_chars=max_chars)
    found = list(pages(content, request))
    lines = text.split("\n")
    wanted = 0
    for line in lines:
        decoded = line if line in "[]" else "".join(map(str, json.loads(f"[{line.strip(' ,[]')}]")))
        occurrences = decoded.count(word)
        wanted += occurrences if len(line) > LONG or len(lines) == 1 else min(1, occurrences)
    assert {page.matches for page in found} == {wanted}


def test_grep_of_json_still_finds_the_source_text() -> None:
    content = make_content(
        b'{"name": "caf\\u00e9", "path": "C:\\\\dir\\/x", "text": "one\\ntwo"}', "application/json"
    )
    for pattern in (
        "caf\\\\u00e9",
        "café",
        r"C:\\dir/x",
        r"dir\\/x",
        r"\btwo",
        "one two",
        r"one\\ntwo",
    ):
        assert read(content, Request(grep=pattern)).matches == 1, pattern
    assert read(content, Request(grep="café", invert=True)).matches == 0
    plain = content_of(b'{"name": "caf\\u00e9"}')
    assert read(plain, Request(grep="café")).matches == 0


def test_an_escape_at_the_border_of_two_parts_of_a_line_is_found() -> None:
    size = LONG_LINE + (1 << 20)
    for shift in range(8):
        filler = "-" * ((1 << 20) - 20 - shift)
        text = json.dumps([filler + "\u00e9" * 10 + "-" * (size - len(filler))])
        page = read(make_content(text.encode(), "application/json"), Request(grep="é"))
        assert (page.matches, page.matches_exact) == (10, True)


@pytest.mark.parametrize(
    "arguments", [{}, {"context": 3}, {"context": 100}, {"invert": True}, {"ignore_case": True}]
)
@pytest.mark.parametrize(
    "ends",
    [
        [b"needle here\n", b"nothing\n", b"caf\xc3 \xff\n"],
        [b"needle\n" + b"long \xff" * 300_000 + b"\n", b"broken \xff\n" * 90, b"the last needle"],
        [
            b"NEEDLE \xff\n",
            b"nee\x1b[31mdle\n",
            b"50%\r60% needle\n",
            b"need\xffle\n",
            b"crlf needle\r\n",
        ],
    ],
)
def test_a_plain_text_is_found_like_any_pattern_among_invalid_bytes_and_colours(
    ends: list[bytes], arguments: dict[str, Any]
) -> None:
    filler = "ordinary line é\n".encode() * (2 * PIECE // 16)
    content = content_of(b"".join(filler + end for end in ends) + b"\n\xff after\n" * 5)
    plain, pattern = (
        [
            (page.text, page.shown, page.matches, page.hits)
            for page in islice(pages(content, request), 3)
        ]
        for request in (Request(grep=text, **arguments) for text in ("needle", "needl[e]"))
    )
    assert plain == pattern


@pytest.mark.parametrize("size", [FRAME // 3, 3 * FRAME, 2 * PIECE + FRAME // 2])
def test_a_page_reads_each_frame_once(size: int) -> None:
    framed = Framed(b"a line of text\n" * (size // 15))
    for request in (Request(grep="nothing"), Request(grep="line", context=2), Request(lines="-5:")):
        framed.frames.clear()
        read(framed.content(), request)
        assert set(framed.frames.values()) == {1}


def test_a_page_looks_like_grep_with_line_numbers() -> None:
    content = content_of("one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n")
    page = read(content, Request(grep="two|three|seven", context=1))
    assert page.text == "1-one\n2:two\n3:three\n4-four\n--\n6-six\n7:seven\n8-eight"
    assert (page.shown, page.matches, page.matches_exact) == (
        "matches 1-3 of 3 in 8 lines",
        3,
        True,
    )
    assert page.cursor is None


def test_no_match_is_reported_with_the_number_of_lines() -> None:
    page = read(content_of(LOG), Request(grep="panic"))
    assert (page.text, page.shown, page.matches, page.cursor) == (
        "",
        "no match in 12,031 lines",
        0,
        None,
    )
    assert (
        read(content_of(LOG), Request(grep="ERROR", lines="1:99")).shown
        == "no match in lines 1-99 of 12,031"
    )
    assert read(content_of(""), Request(grep="x")).shown == "no match: the artifact is empty"


def test_all_matches_are_counted_even_if_few_are_shown() -> None:
    first, second = list(pages(content_of(LOG), Request(grep="ERROR", max_chars=1_000)))[:2]
    assert first.shown == "matches 1-48 of 120 in 12,031 lines"
    assert second.shown == "matches 49-95 of 120 in 12,031 lines"
    assert (first.matches, second.matches) == (120, 120)


def test_a_count_that_takes_too_long_says_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matches, "DENSE_SECONDS", -1.0)
    found = list(pages(content_of(LOG), Request(grep="line")))
    first, second, *_, last = found
    assert not first.matches_exact
    assert first.matches is not None
    assert first.matches < 12_031
    assert "of at least " in first.shown
    assert second.matches is not None
    assert second.matches >= first.matches
    assert (last.matches, last.matches_exact) == (12_031, True)
    assert numbers(found, ":") == list(range(1, 12_032))


def test_many_occurrences_on_few_long_lines_are_counted_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matches, "DENSE_SECONDS", -1.0)
    line = "import one " * 60 + "x" * 400 + "\n"
    text = (line + "short\n" * 3) * 200 + "import import\n"
    found = list(pages(content_of(text), Request(grep="import")))
    assert len(found) > 3
    assert {(page.matches, page.matches_exact) for page in found} == {(60 * 200 + 1, True)}


def test_a_search_that_takes_too_long_continues_by_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("x" * 99 + "\n") * 40_000 + "needle\n"
    monkeypatch.setattr(matches, "SEARCH_SECONDS", 0.0)
    first = read(content_of(text), Request(grep="needle"))
    assert first.text == ""
    assert not first.matches_exact
    assert re.search(r"searched up to line \d+ so far, the cursor continues", first.shown)
    monkeypatch.setattr(matches, "SEARCH_SECONDS", 10.0)
    second = read(content_of(text), cursor=first.cursor)
    assert (second.text, second.matches, second.matches_exact) == ("40001:needle", 1, True)


def test_matches_are_counted_by_runs_and_one_by_one_alike() -> None:
    text = "".join(
        f"{'hit' if number % 7 and number % 1000 < 900 else 'miss'} {number}\n"
        for number in range(50_000)
    )
    for invert in (False, True):
        request = Request(grep="hit", invert=invert, max_chars=200)
        assert read(content_of(text), request).matches == len(found_by_hand(text, request))


def test_lines_and_context_that_span_pieces_are_whole() -> None:
    filler = "y" * 99 + "\n"
    text = (
        filler * (PIECE // 100)
        + "a" * 300
        + "\nneedle one\n"
        + "b" * 200
        + "\n"
        + filler * 30_000
        + "needle two"
    )
    page = read(content_of(text), Request(grep="needle", context=2))
    line = PIECE // 100 + 2
    assert (
        f"{line - 2}-{filler.strip()}\n{line - 1}-{'a' * 300}\n{line}:needle one\n{line + 1}-{'b' * 200}\n"
        in page.text
    )
    assert page.text.endswith(f"{line + 30_002}:needle two")
    assert page.matches == 2


@pytest.mark.parametrize("offset", range(-3, 4))
def test_a_match_at_the_border_of_two_pieces_is_found(offset: int) -> None:
    text = "y" * (PIECE - 3 + offset) + "needle\nnext\n"
    page = read(content_of(text), Request(grep="needle$"))
    assert page.text.startswith("1:[")
    assert "needle" in page.text
    assert page.matches == 1


def test_the_dollar_matches_before_a_carriage_return() -> None:
    page = read(content_of("foo\r\nbar\r\nfoo"), Request(grep="foo$"))
    assert page.text == "1:foo\n3:foo"


def test_invalid_bytes_match_a_dot_and_are_shown() -> None:
    page = read(content_of(b"caf\xe9!\nother\n"), Request(grep="caf.!"))
    assert page.text == "1:caf\ufffd!"
    assert page.shown == "match 1 of 1 in 2 lines; invalid bytes are shown as U+FFFD"


def test_a_pattern_of_single_bytes_is_answered_on_long_lines() -> None:
    found = list(pages(content_of("first\n" + "é" * 400), Request(grep=r"\C", max_chars=500)))
    assert {page.matches for page in found} == {801}
    assert found[0].text.startswith("1:first\n2:éé")


def test_notes_are_about_the_lines_that_a_page_shows() -> None:
    text = f"short {'x' * 100} needle\n{'y' * 400}needle{'y' * 400}\n"
    first, second = pages(content_of(text), Request(grep="needle", max_chars=200))
    assert first.text.startswith("1:short")
    assert "shown in part" not in first.shown
    assert "shown in part" in second.shown


def test_text_that_was_put_with_lone_surrogates_can_be_searched() -> None:
    assert (
        read(
            content_of("a\ud800b\nb\n".encode("utf-8", "surrogatepass")), Request(grep="b")
        ).matches
        == 2
    )


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_searched_as_text(encoding: str) -> None:
    text = "\ufeff" + LOG + "größe 😀\n"
    page = read(content_of(text.encode(encoding)), Request(grep="gr.ße .$"))
    assert page.text == "12032:größe 😀"
    assert "decoded from UTF-" in page.shown
    found = list(
        pages(content_of(text.encode(encoding)), Request(grep="ERROR", context=1, max_chars=900))
    )
    assert numbers(found, ":") == list(range(100, 12_001, 100))


def test_the_byte_order_mark_is_not_part_of_the_first_line() -> None:
    assert read(content_of(codecs.BOM_UTF8 + b"abc\n"), Request(grep="^abc$")).text == "1:abc"


def test_a_long_line_shows_the_part_around_the_match() -> None:
    page = read(content_of("x" * 10_000 + "needle" + "é" * 10_000 + "\n"), Request(grep="needle"))
    match = re.fullmatch(
        r"1:\[([\d,]+) characters left out](.*)\[([\d,]+) characters left out]", page.text
    )
    assert match is not None
    left, middle, right = match.groups()
    assert "needle" in middle
    assert int(left.replace(",", "")) + len(middle) + int(right.replace(",", "")) == 20_006
    assert "shown in part" in page.shown
    assert 'lines="N"' not in page.shown  # the line is longer than a page
    assert (
        'lines="N" reads line N whole'
        in read(content_of("a\n" + "x" * 4_000 + "b"), Request(grep="b$")).shown
    )


def test_very_long_lines_are_searched_in_parts() -> None:
    giant = "x" * 3_000_000 + "needle" + "x" * 3_000_000
    content = content_of(
        "before\n" + giant + "\nafter needle\n" + giant.replace("needle", "nothing")
    )
    page = read(content, Request(grep="needle", context=1))
    first, second, third, fourth = page.text.split("\n")
    assert (first, third) == ("1-before", "3:after needle")
    assert re.fullmatch(r"2:\[[\d,]+ bytes left out\]x+needlex+\[[\d,]+ bytes left out\]", second)
    assert re.fullmatch(r"4-x+\[[\d,]+ bytes left out\]", fourth)
    assert page.matches == 2
    assert "lines over 2 MiB were searched in parts" in page.shown
    for pattern, number in (
        ("^x", 2),
        ("x$", 2),
        ("^needle", 0),
        ("needle$", 1),
        (r"\bneedle", 1),
    ):
        assert read(content, Request(grep=pattern)).matches == number
    assert read(content, Request(grep="needle", invert=True)).matches == 2


def test_a_match_at_the_border_of_two_parts_of_a_line_is_found() -> None:
    for offset in (-6, -3, 0, 3):
        content = content_of("x" * ((1 << 20) + offset) + "needle" + "x" * (3 << 20) + "\r\n")
        page = read(content, Request(grep="xneedlex"))
        assert page.matches == 1
        assert "needle" in page.text
        assert read(content, Request(grep="x$")).matches == 1


def test_a_line_that_takes_too_long_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_groups, "LINE_SECONDS", -1.0)
    with pytest.raises(
        LimitExceeded, match="line 2 has 4,194,304 bytes, too many for this pattern"
    ):
        read(content_of("short\n" + "x" * (4 << 20)), Request(grep="needle"))


def test_a_match_never_crosses_a_line_end() -> None:
    page = read(content_of("a\nb\n"), Request(grep=r"a\sb|a[^c]b|a\nb|(?s)a.b|a\Cb"))
    assert page.matches == 0
    assert "\\n never matches" in page.shown


@pytest.mark.parametrize("pattern", [r"\Ab", r"b\z", r"(?-m)^b$", r"(?i-m:^B$)"])
def test_anchors_of_the_whole_text_apply_to_each_line(pattern: str) -> None:
    assert read(content_of("a\nb\nab a\n"), Request(grep=pattern, lines="2:3")).text == "2:b"


def test_ignore_case_and_literal_have_their_usual_meaning() -> None:
    content = content_of("a.c\nabc\nA.C\n")
    assert read(content, Request(grep="a.c")).matches == 2
    assert read(content, Request(grep="a.c", literal=True)).text == "1:a.c"
    assert read(content, Request(grep="a.c", literal=True, ignore_case=True)).matches == 2
    assert read(content, Request(grep="(unbalanced[", literal=True)).matches == 0


@pytest.mark.parametrize(
    ("pattern", "found", "hint"),
    [
        ("foo(?=bar)", "no look-ahead", "second grep"),
        ("foo(?!bar)", "no look-ahead", "invert"),
        ("(?<=foo)bar", "no look-behind", "match the text before it"),
        ("(?<!foo)bar", "no look-behind", "match the text before it"),
        (r"(a)\1", "no back-references", "spell"),
        (r"(?P<x>a)(?P=x)", "no back-references", "spell"),
        ("(?>a)", "atomic groups", "spell"),
        ("a{1001}", "at most 1,000 repetitions", "use + or *"),
        ("(a{100}){100}", "at most 1,000 repetitions", "use + or *"),
        (r"\pL{500}", "compiled pattern is too large", "shorter"),
        ("a++", "possessive", "alone"),
        (r"foo\Z", "anchor", "$"),
        (r"\u00e9", "escape", "x{00e9}"),
        ("(", "missing )", "backslash"),
        ("a)|(b", "unexpected )", "backslash"),
        ("[", "missing ]", "backslash"),
        ("*a", "no argument for repetition", "backslash"),
        ("x" * 1_001, "the limit is 1,000", "shorter"),
    ],
)
def test_a_pattern_that_is_refused_says_why_and_what_to_write(
    pattern: str, found: str, hint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(content_of("x"), Request(grep=pattern))
    assert found in caught.value.message
    assert hint in caught.value.hint
    assert len(str(caught.value)) < 300


@given(st.text(max_size=60))
def test_any_pattern_is_answered_or_refused_with_a_message(pattern: str) -> None:
    answer: Page | InvalidArgument
    try:
        answer = read(content_of(LOG), Request(grep=pattern, max_chars=200))
    except InvalidArgument as error:
        answer = error
    if isinstance(answer, InvalidArgument):
        assert answer.hint
        assert len(str(answer)) < 400
    else:
        assert len(answer.text) <= 200


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){20}b", "(x+x+)+y", "(a|a?)+b"])
def test_patterns_that_would_backtrack_are_answered(pattern: str) -> None:
    content = content_of("a" * 1_000_000 + "!\n" + "tail\n")
    assert read(content, Request(grep=pattern)).matches == 0


def test_other_threads_run_while_a_pattern_is_searched() -> None:
    content = content_of("some line of text that does not match\n" * 400_000)
    done = threading.Event()

    def search() -> None:
        read(content, Request(grep="[a-z ]+Q"))
        done.set()

    searching = threading.Thread(target=search)
    searching.start()
    steps = 0
    while not done.is_set():
        steps += 1
    searching.join()
    assert steps > 100


def test_a_grep_of_several_slices_searches_only_those() -> None:
    page = read(
        content_of(LOG), Request(grep="ERROR", lines="950:1001,90:110, 95:120,-31:", context=2)
    )
    assert numbers([page], ":") == [100, 1_000]
    assert page.shown == "matches 1-2 of 2 in lines 90-120, 950-1001, 12001-12031 of 12,031"
    assert "--" in page.text
    found = list(
        pages(content_of(LOG), Request(grep="line", lines="1:50,500:560,900:903", max_chars=300))
    )
    assert numbers(found, ":") == [*range(1, 51), *range(500, 561), *range(900, 904)]
    assert {page.matches for page in found} == {50 + 61 + 4}


def test_context_is_shown_by_default_where_a_single_line_says_little() -> None:
    rows = [{"id": number, "name": f"item {number}", "size": number * 7} for number in range(200)]
    indented = json.dumps(rows, indent=2).encode()
    assert (
        '"id": 7,'
        in read(make_content(indented, "application/json"), Request(grep='"item 7"')).text
    )
    assert (
        '"id"'
        not in read(
            make_content(indented, "application/json"), Request(grep='"item 7"', context=0)
        ).text
    )
    snapshot = "- main [ref=e1]:\n" + "".join(
        f'  - link "Item {n}" [ref=e{n}]:\n    - /url: /items/{n}\n    - text: Price {n}\n'
        for n in range(2, 60)
    )
    assert "/url: /items/7\n" in read(content_of(snapshot), Request(grep="Item 7")).text + "\n"
    assert "3-" not in read(content_of(LOG), Request(grep="line 4$")).text


def test_default_context_is_left_out_if_many_lines_match() -> None:
    rows = [{"id": number, "name": f"item {number}", "size": number * 7} for number in range(500)]
    page = read(
        make_content(json.dumps(rows, indent=2).encode(), "application/json"), Request(grep="name")
    )
    assert page.matches == 500
    assert numbers([page], "-") == []


def test_each_alternative_of_a_pattern_is_counted_and_one_without_a_match_named() -> None:
    text = "".join(
        f"{word} {number}\n" for number in range(20) for word in ("error", "warning", "info")
    )
    for pattern in ("error|warn|panic", "(error|warn|panic)", "(?:error|warn|panic)"):
        assert read(content_of(text), Request(grep=pattern)).shown == (
            "matches 1-40 of 40 in 60 lines; error: 20, warn: 20, panic: none"
        )
    assert "(?i)ERROR: 20" in read(content_of(text), Request(grep="(?i)ERROR|PANIC")).shown
    assert (
        read(content_of(text), Request(grep="error 1$|info 2$")).shown
        == "matches 1-2 of 2 in 60 lines"
    )
    one_line = ("needle-" * 9 + "pin " * 4) * 100
    assert (
        "needle: 900, pin: 400, hay: none"
        in read(content_of(one_line), Request(grep="needle|pin|hay")).shown
    )


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("a|b", ["a", "b"]),
        (r"a\|b", []),
        ("[|]", []),
        ("[]|]x|y", ["[]|]x", "y"]),
        ("(a|b)c", []),
        ("(a|b)|c", ["(a|b)", "c"]),
        ("(?i)a|b", ["(?i)a", "(?i)b"]),
        ("a|", []),
        (r"\Qa|b\E", []),
        ("(a)|(b)", ["(a)", "(b)"]),
    ],
)
def test_a_pattern_is_split_only_where_it_has_alternatives(pattern: str, parts: list[str]) -> None:
    assert alternatives(pattern) == parts


def test_auto_context_fills_a_short_page_around_few_matches() -> None:
    page = read(content_of(LOG), Request(grep="line 500 ", context="auto"))
    assert numbers([page], ":") == [500]
    assert numbers([page], "-") == [497, 498, 499, 501, 502, 503]
    assert len(page.text) <= grep.FULL
    many = read(content_of(LOG), Request(grep="ERROR", context="auto"))
    assert numbers([many], "-") == []
    assert numbers([read(content_of(LOG), Request(grep="line 500 "))], "-") == []
    found = list(pages(content_of(LOG), Request(grep="ERROR", context="auto", max_chars=1_000)))
    assert numbers(found, ":") == list(range(100, 12_001, 100))
