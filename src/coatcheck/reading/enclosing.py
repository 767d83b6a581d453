"""What encloses a line: a value in JSON, a heading, a definition, a commit or a test.

Light patterns instead of parsers, over the text up to the last line that is asked for. Where a
pattern is not sure, it says nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from coatcheck.deferred import lazy_pattern
from coatcheck.media import essence
from coatcheck.reading.text import DecodedText, decode, visible

MAX_BYTES: Final = 16 << 20
MAX_CODE: Final = 2 << 20
_HEAD: Final = 64 << 10
_CHARS: Final = 100
_OUTER: Final = 3  # definitions that are named around the innermost one
_OUTER_CHARS: Final = 40  # of each definition around the innermost one
_SUBJECT_LINES: Final = 30  # of a commit, in which its subject is
_TABLES: Final = ("text/csv", "text/tab-separated-values", "application/x-ndjson")

_COMMIT: Final = lazy_pattern(rb"^commit ([0-9a-f]{12})[0-9a-f]{0,52}\b", re.MULTILINE)
_SUBJECT: Final = lazy_pattern(rb"\n\n {4}(\S[^\n]*)")
_TEST: Final = lazy_pattern(
    rb"^(?:_{3,}+ (?P<pytest>\S[^\n]{0,200}?) _{3,}+$"
    rb"|={20,}\n(?P<unittest>(?:FAIL|ERROR): \w[^\n]{0,200}$)"
    rb"|(?:=== RUN +|[ \t]*--- FAIL: )(?P<go>\S+)"
    rb"|---- (?P<rust>\S+) stdout ----$"
    rb"|(?P<jest>  \xe2\x97\x8f [^\n]{1,200}$)"
    rb"|(?P<end>={3,}+[^=\n]{0,200}+={3,}+$|Ran \d+ tests? in |(?:FAIL|ok|PASS)\b))",
    re.MULTILINE,
)
_TEST_RUN: Final = lazy_pattern(
    rb"={3,} test session starts|^=== RUN|^running \d+ tests?$|^(?:PASS|FAIL)\b|^[.FEsx]{20,}"
    rb"|^test\w* \([\w.<>]+\)|^={20,}\n(?:FAIL|ERROR): ",
    re.MULTILINE,
)  # how the output of a test run begins
_HEADING: Final = lazy_pattern(
    rb"^(?:#{1,6}[ \t]+\S[^\n]{0,300}|(?P<fence>```|~~~)[^\n]*)$", re.MULTILINE
)
_HTML_HEADING: Final = lazy_pattern(
    rb"<h([1-6])\b[^<>]{0,500}+>([^<]{0,200}+(?:<(?!/?h[1-6]\b)[^<]{0,200}+){0,20}+)</h\1\s*>",
    re.IGNORECASE,
)
_TAG: Final = lazy_pattern(rb"<[^<>]*>|\s+")
_NUMBER: Final = (
    rb"[ \t]{0,8}\d{1,7}(?:\xe2\x86\x92|\t)"  # as tools write it before a line of a file
)
_NUMBERED: Final = lazy_pattern(_NUMBER)

_MODIFIERS: Final = (
    rb"(?:(?:export|default|declare|public|private|protected|internal|static|final|abstract|async"
    rb"|pub(?:\([a-z]+\))?|unsafe|override|open|sealed|data|inline|virtual|partial|suspend|const"
    rb"|get|set|readonly)[ \t]+){0,5}"
)
_KEYWORD: Final = (
    rb"(?:def|class|func|function\*?|fn|interface|struct|enum|trait|impl|module|namespace|protocol"
    rb"|extension)\b[ \t<(]++[^\n;=]{1,300}"
)
_DEFINITION: Final = lazy_pattern(
    _MODIFIERS
    + rb"(?:"
    + _KEYWORD.replace(b"300}", b"300}+")
    + rb"|(?:const|let|var)[ \t]+[\w$]+[^\n=;]{0,80}=[ \t]*(?:async[ \t]*)?[(f][^\n;]{0,200}\{"
    rb"|(?!(?:if|for|while|switch|catch|with|return|else|do)\b)(?:[\w<>\[\],.?]{1,60}[ \t]+)?"
    rb"[A-Za-z_$][\w$]*\([^\n;{}]{0,200}\)[^\n;{}()]{0,80}+\{"
    rb")[ \t]*$"
)
_SURE_DEFINITION: Final = lazy_pattern(
    rb"^(?:" + _NUMBER + rb")?[ \t]{0,12}" + _MODIFIERS + _KEYWORD + rb"[{:(,)][ \t]*$",
    re.MULTILINE,
)
_NO_END: Final = (
    b")",
    b"]",
    b"{",
    b"#",
    b"//",
    b"*",
    b"/*",
    b"public:",
    b"private:",
    b"protected:",
)

_KEY: Final = lazy_pattern(rb'("(?:[^"\\]++|\\.)*+") ?: ?[{\[]')
_MAX_PATH: Final = 200


class Enclosure(NamedTuple):
    """The line that begins what encloses another, and how to call it: as it is written there, or by
    its path."""

    number: int
    text: str
    is_path: bool = False


_Finder: TypeAlias = Callable[[bytes, Sequence[int]], dict[int, Enclosure]]


def enclosures(text: DecodedText, numbers: Sequence[int]) -> dict[int, Enclosure]:
    """What encloses lines, given by their numbers in order. Lines that nothing encloses are left
    out."""
    if not numbers or text.lines < 2:
        return {}
    end = text.line_start(numbers[-1] + 1)
    finder = _finder(text) if end <= MAX_BYTES else None
    if finder is None:
        return {}
    return finder(text.read(text.start, end - text.start), numbers)


def _finder(text: DecodedText) -> _Finder | None:
    """What looks for the enclosing lines in this kind of text."""
    media_type = essence(text.media_type)
    if text.is_document:
        return _json
    if media_type in _TABLES:
        return None
    if media_type in ("text/html", "application/xhtml+xml"):
        return _html
    head = text.head[:_HEAD]
    if media_type == "text/markdown":
        return _headings
    if _COMMIT.match(head):
        return _commits
    if len(_some(_SURE_DEFINITION.finditer(head), 2)) == 2 and text.end <= MAX_CODE:
        return _definitions
    if _is_markdown(head):
        return _headings
    return _tests if _TEST_RUN.search(head) else None


def _some(found: Iterator[re.Match[bytes]], most: int) -> list[re.Match[bytes]]:
    return [match for match, _ in zip(found, range(most), strict=False)]


def _is_markdown(head: bytes) -> bool:
    """Whether lines that begin with `#` are headings and not comments: few of all lines, in more
    than one level, each after an empty line."""
    found = list(_unfenced(head))
    levels = {match[0].split(b" ", 1)[0] for match in found}
    is_apart = all(not m.start() or head[m.start() - 2 : m.start()] == b"\n\n" for m in found)
    return is_apart and len(levels) > 1 and 3 * len(found) <= head.count(b"\n")


def _unfenced(data: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the headings outside of code blocks."""
    fence = b""
    for match in _HEADING.finditer(data):
        if not match["fence"]:
            if not fence:
                yield match
        elif not fence:
            fence = match["fence"]
        elif fence == match["fence"]:
            fence = b""


def _commits(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    def name(match: re.Match[bytes]) -> str:
        following = _COMMIT.search(data, match.end())
        end = following.start() if following else len(data)
        subject = _SUBJECT.search(data, match.end(), min(end, match.end() + 4_000))
        return f"commit {_shown(match[1])} {_shown(subject[1]) if subject else ''}".rstrip()

    return _by_marks(data, numbers, _COMMIT.finditer(data), name)


def _tests(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    def name(match: re.Match[bytes]) -> str:
        kind = match.lastgroup
        return "" if kind in (None, "end") else _shown(match[kind].strip())

    return _by_marks(data, numbers, _TEST.finditer(data), name)


def _headings(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    return _by_marks(data, numbers, _unfenced(data), lambda match: _shown(match[0]))


def _html(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    def name(match: re.Match[bytes]) -> str:
        words = _TAG.sub(b" ", match[2])
        return f"{'#' * int(match[1])} {' '.join(_shown(words).split())}"

    return _by_marks(data, numbers, _HTML_HEADING.finditer(data), name)


def _by_marks(
    data: bytes,
    numbers: Sequence[int],
    matches: Iterator[re.Match[bytes]],
    name: Callable[[re.Match[bytes]], str],
) -> dict[int, Enclosure]:
    """What encloses lines in a text in which a mark counts until the next one. A mark with the name
    "" ends the one before it."""
    starts, marks = [], []
    number, at = 1, 0
    for match in matches:
        label = name(match)
        offset = match.end() if label else match.start()
        number += data.count(b"\n", at, offset)
        at = offset
        starts.append(number)
        marks.append(Enclosure(number, label))
    found = {}
    for line in numbers:
        index = bisect_left(starts, line) - 1
        if index >= 0 and marks[index].text:
            found[line] = marks[index]
    return found


class _Definition(NamedTuple):
    indent: int
    number: int
    text: str


def _definitions(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    """The definitions around lines of source code, by indentation."""
    lines = data.split(b"\n")
    prefixed = sum(_NUMBERED.match(line) is not None for line in lines[:20])
    is_numbered = 2 * prefixed > min(20, len(lines))
    wanted = set(numbers)
    found = {}
    around: list[_Definition] = []
    for number, line in enumerate(lines, 1):
        if is_numbered and (prefix := _NUMBERED.match(line)):
            line = line[prefix.end() :]
        code = line.lstrip()
        indent = len(line) - len(code)
        if code and not code.startswith(_NO_END):
            while around and around[-1].indent >= indent:
                around.pop()
        if number in wanted and around:
            found[number] = _chain(around)
        if _DEFINITION.match(code.rstrip()):
            around.append(_Definition(indent, number, _shown(code.rstrip(b" \t\r{:(,"))))
    return found


def _chain(around: list[_Definition]) -> Enclosure:
    *outer, inner = around
    names = [one.text[:_OUTER_CHARS] for one in outer[-_OUTER:]]
    return Enclosure(inner.number, " > ".join([*names, inner.text]))


class _Value(NamedTuple):
    """An object or array that is open. Its path is that of a value around it if it is not sure."""

    path: str
    is_array: bool
    is_sure: bool
    number: int


def _json(data: bytes, numbers: Sequence[int]) -> dict[int, Enclosure]:
    """The values around lines of indented JSON, by their pointers. It ends at the first line that
    is not indented in the usual way. An item of an array is only counted if each item before it
    has lines of its own."""
    wanted = set(numbers)
    found: dict[int, Enclosure] = {}
    around: list[_Value] = []
    items: list[int | None] = []  # in each of them so far, None if that is not sure
    for number, line in enumerate(data.split(b"\n"), 1):
        bare = line.strip()
        if number in wanted and around and around[-1].path:
            found[number] = Enclosure(around[-1].number, f"#{around[-1].path}", is_path=True)
        if bare.endswith((b"{", b"[")):
            value = _opened(bare, number, around, items)
            if value is None:
                break
            around.append(value)
            items.append(0)
        elif bare.startswith((b"}", b"]")):
            if not around or bare.rstrip(b",") != (b"]" if around[-1].is_array else b"}"):
                break
            around.pop()
            items.pop()
            if items and items[-1] is not None:
                items[-1] += 1
        elif bare and items:
            items[-1] = None
    return found


def _opened(
    bare: bytes, number: int, around: list[_Value], items: list[int | None]
) -> _Value | None:
    """The value that a line begins, None if the line has more than that."""
    is_array = bare.endswith(b"[")
    key = _KEY.fullmatch(bare)
    if not around:
        return None if key or len(bare) > 1 or number > 1 else _Value("", is_array, True, number)
    outer = around[-1]
    if outer.is_array is (key is not None) or (key is None and len(bare) > 1):
        return None
    step = str(items[-1])
    if key is not None:
        try:
            step = json.loads(key[1])
        except ValueError:
            return None
    is_sure = outer.is_sure and (key is not None or items[-1] is not None)
    if not is_sure:
        return _Value(outer.path, is_array, False, outer.number)
    path = f"{outer.path}/{step.replace('~', '~0').replace('/', '~1')}"
    if len(path) > _MAX_PATH or not path.isprintable():
        return _Value(outer.path, is_array, False, outer.number)
    return _Value(path, is_array, True, number)


def _shown(data: bytes) -> str:
    text = " ".join(visible(decode(data))[0].split())
    return text if len(text) <= _CHARS else text[: _CHARS - 1] + "…"
