"""JSON text: exact spans of values by path, at the speed of the C decoder, and how writers escape
strings.

Writers differ in what they escape. A style is the habit of one writer: a function from a string to
its JSON token.

Spans are only looked up in texts that were parsed before, so they are known to be JSON. If a key
occurs twice in an object the last one counts, as it does for the parser.
"""

from __future__ import annotations

import base64
import binascii
import json
import json.decoder
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import groupby
from json.encoder import encode_basestring, encode_basestring_ascii
from operator import getitem
from typing import Any, Final

from coatcheck.messages.paths import Path

TextSpan = tuple[int, int]
Where = tuple[TextSpan, str | None]
"""The span of a value, and the style of its token if that is known."""

_C: Final[Any] = json.decoder  # some type stubs lack its two C functions
_SCAN: Final = _C.JSONDecoder().scan_once
_STRING: Final = _C.scanstring
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_LEAD: Final = re.compile(r"\ufeff?[ \t\n\r]*")
_CONTAINERS: Final = (dict, list)
_MAX_DEPTH: Final = 500
_HERE: Final = -1  # marks the end of a path in a tree of paths; no path has a negative index

_LONE: Final = re.compile(r"[\ud800-\udfff]")
_GO: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-f]{4}|.)")
_DATA_URL: Final = re.compile(r"data:[\w.+/;=-]{0,100};base64,", re.ASCII)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")
_MIN_BASE64: Final = 256  # characters; a shorter text of that alphabet may be a long word
_HEAD: Final = 64  # characters of a token that are searched for first
_TRIES: Final = 16
_NOWHERE: Final = "90631724905817263"  # prefix of numbers that are assumed to occur in no text
_PYDANTIC_PAYS: Final = (
    8 << 20
)  # characters written before the faster writer makes up for its import


def parse(text: str) -> tuple[Any, int, int] | None:
    """Return the value of a text and where it begins and ends, or None if the text is not valid
    JSON. A byte-order mark and blanks may surround it."""
    start = 0 if text.startswith("{") else _end(_LEAD, text, 0)
    try:
        value, end = _SCAN(text, start)
    except (ValueError, StopIteration, RecursionError):
        return None
    return (value, start, end) if _end(_BLANK, text, end) == len(text) else None


def parsed(data: bytes) -> Any:
    """Return the JSON value of a line, or None if it is not valid UTF-8 or JSON."""
    try:
        found = parse(data.decode())
    except UnicodeDecodeError:
        return None
    return found[0] if found is not None else None


@dataclass(frozen=True)
class Opened:
    """A JSON text that is an object or a list: its characters, its value, and where that begins and
    ends. `elements` are the spans of a list's elements if all of them are objects."""

    text: bytes
    source: str
    value: dict[str, Any] | list[Any]
    start: int
    end: int
    elements: list[TextSpan] | None = None

    @classmethod
    def of(cls, text: bytes) -> Opened | None:
        """Open a text. None if it is not JSON, or neither an object nor a list."""
        try:
            source = text.decode()
        except UnicodeDecodeError:
            return None
        if not source.startswith("{"):
            start = _end(_LEAD, source, 0)
            listed = _objects(source, start) if source.startswith("[", start) else None
            if listed is not None:
                return cls(text, source, *listed)
        found = parse(source)
        return (
            cls(text, source, *found)
            if found is not None and isinstance(found[0], _CONTAINERS)
            else None
        )

    @cached_property
    def is_deep(self) -> bool:
        """Whether containers are nested more than `_MAX_DEPTH` levels deep. Such a text is never
        made slim: when it is restored, less of the parser's stack may be free."""
        level: list[Any] = [self.value]
        for _ in range(_MAX_DEPTH):
            level = [
                inner
                for one in level
                for inner in (one.values() if isinstance(one, dict) else one)
                if inner and isinstance(inner, _CONTAINERS)
            ]
            if not level:
                return False
        return True


def spans(text: str, start: int, paths: Iterable[Path]) -> dict[Path, TextSpan]:
    """Return the spans of the values at these paths in the value that begins at `start`. Paths
    without a value are left out."""
    tree: dict[str | int, Any] = {}
    found: dict[Path, TextSpan] = {}
    for path in paths:
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[_HERE] = path
    _walk(text, start, tree, found)
    return found


def last_value(text: str, start: int, key: str) -> tuple[Any, TextSpan] | None:
    """Return the last value under a key of the object at `start`, and the span to delete to make
    the object as if it never had that member: from the end of the member before, or to the
    beginning of the one after."""
    found: tuple[Any, TextSpan] | None = None
    begin = before = _end(_BLANK, text, start + 1)
    is_first = True
    while text[begin] != "}":
        name, at = _STRING(text, begin + 1, True)
        at = _end(_BLANK, text, _end(_BLANK, text, at) + 1)
        value, end = _SCAN(text, at)
        after = _after(text, end)
        if name == key:
            found = value, (begin, after) if is_first else (before, end)
        before, begin, is_first = end, after, False
    return found


def locate(opened: Opened, places: Sequence[tuple[Path, Any]]) -> Sequence[Where | None]:
    """Return the spans of the values at these paths, which are in text order; None for a path that
    is not found, and for all paths in a text that is nested too deep."""
    if opened.is_deep:
        return [None] * len(places)
    if opened.elements is None:
        return _located(opened.source, opened.start, places)
    found: list[Where | None] = []
    for index, group in groupby(places, lambda one: one[0][0]):
        begin, end = opened.elements[int(index)]
        inside = _located(opened.source[begin:end], 0, [(path[1:], value) for path, value in group])
        found += [one and ((begin + one[0][0], begin + one[0][1]), one[1]) for one in inside]
    return found


def edited(source: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Replace spans of a text, which do not overlap, by other texts."""
    pieces: list[str] = []
    done = 0
    for begin, end, new in sorted(edits):
        pieces += (source[done:begin], new)
        done = end
    return "".join((*pieces, source[done:]))


def utf8(text: str) -> str:
    """Write a string like JavaScript, Rust, and Python without `ensure_ascii`: escape only what
    must be escaped, lone surrogates included."""
    token = encode_basestring(text)
    return _LONE.sub(lambda match: f"\\u{ord(match[0]):04x}", token) if _has_lone(token) else token


def ascii_(text: str) -> str:
    """Write a string like Python does by default."""
    return encode_basestring_ascii(text)


STYLES: Final[dict[str, Callable[[str], str]]] = {
    "utf8": utf8,
    "ascii": ascii_,
    "go": lambda text: utf8(text).translate(_GO),
    "go-old": lambda text: _go_before_1_22(utf8(text).translate(_GO)),
    "utf8-slash": lambda text: utf8(text).replace("/", "\\/"),
    "ascii-slash": lambda text: ascii_(text).replace("/", "\\/"),
    "ascii-upper": lambda text: _ESCAPE.sub(_upper, ascii_(text)),
}


def styled(text: str, token: str) -> str | None:
    """Return the style that writes this text as this token, or None."""
    return next((name for name, style in STYLES.items() if style(text) == token), None)


def tokens_of(value: object) -> Iterator[tuple[str, str]]:
    """Yield styles and tokens of a value as the commonest writers write it. A token with a lone
    surrogate occurs in no UTF-8 text, so it never matches."""
    if isinstance(value, str):
        yield "utf8", _fast_utf8(value)
        yield "ascii", ascii_(value)
        return
    for is_ascii in (False, True):
        for separators in ((",", ":"), (", ", ": ")):
            try:
                yield "json", json.dumps(value, ensure_ascii=is_ascii, separators=separators)
            except (ValueError, RecursionError):
                return


def binary(text: str) -> tuple[str, bytes] | None:
    """Return the prefix of a `data:` URL ('' if there is none) and the decoded bytes of base64 that
    encodes back to the same text; None for any other text."""
    prefix = ""
    if text.startswith("data:"):
        match = _DATA_URL.match(text)
        if match is None:
            return None
        prefix = match[0]
    body = text[len(prefix) :] if prefix else text
    if len(body) < _MIN_BASE64 or len(body) % 4 or not _BASE64.match(body):
        return None
    try:
        data = binascii.a2b_base64(body.encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError):
        return None
    return (prefix, data) if base64.b64encode(data).decode() == body else None


def _located(source: str, start: int, places: Sequence[tuple[Path, Any]]) -> Sequence[Where | None]:
    """Return the spans of values in the value at `start`. Each is first searched for as most
    writers would write it; parsing the text with unique numbers in those spans proves the guess. If
    that fails, the whole text is scanned."""
    found = _guessed(source, start, places)
    if found is not None:
        return found
    exact = spans(source, start, [path for path, _ in places])
    return [(exact[path], None) if path in exact else None for path, _ in places]


def _guessed(source: str, start: int, places: Sequence[tuple[Path, Any]]) -> list[Where] | None:
    found: list[Where] = []
    for _, value in places:
        guesses = ((style, token, find(source, token, start)) for style, token in tokens_of(value))
        guess = next((one for one in guesses if one[2] >= 0), None)
        if guess is None:
            return None
        style, token, begin = guess
        start = begin + len(token)
        found.append(((begin, start), style))
    if _NOWHERE in source:
        return None
    left = parse(
        edited(source, [(*span, f"{_NOWHERE}{number}") for number, (span, _) in enumerate(found)])
    )
    try:
        proved = left and all(
            reduce(getitem, path, left[0]) == int(f"{_NOWHERE}{number}")
            for number, (path, _) in enumerate(places)
        )
    except (LookupError, TypeError):
        return None
    return found if proved else None


def find(text: str, token: str, start: int) -> int:
    """Return the position of a token from `start` on, or -1. Searches for its first characters:
    `str.find` reads a long token twice before it begins."""
    head = token[:_HEAD]
    for _ in range(_TRIES):
        start = text.find(head, start)
        if start < 0 or text.startswith(token, start):
            return start
        start += 1
    return text.find(token, start)


def _objects(text: str, start: int) -> tuple[list[Any], int, int, list[TextSpan]] | None:
    """Parse a list of objects one by one, which costs no more and gives the span of each. None if
    the list contains anything else."""
    values: list[Any] = []
    elements: list[TextSpan] = []
    at = _end(_BLANK, text, start + 1)
    try:
        while text.startswith("{", at):
            value, end = _SCAN(text, at)
            values.append(value)
            elements.append((at, end))
            behind = _end(_BLANK, text, end)
            at = _end(_BLANK, text, behind + 1)
            if not text.startswith(",", behind):
                is_all = text.startswith("]", behind) and at == len(text)
                return (values, start, behind + 1, elements) if is_all else None
    except (ValueError, StopIteration, RecursionError):
        pass
    return None


def _walk(text: str, at: int, tree: dict[str | int, Any], found: dict[Path, TextSpan]) -> int:
    """Note the spans of the tree's paths in the value at a position, and return where that value
    ends."""
    start, kind = at, text[at]
    if kind in "{[" and any(step != _HERE for step in tree):
        at = _end(_BLANK, text, at + 1)
        index = 0
        while text[at] not in "}]":
            step: str | int = index
            if kind == "{":
                step, at = _STRING(text, at + 1, True)
                at = _end(_BLANK, text, _end(_BLANK, text, at) + 1)
            branch = tree.get(step)
            if branch is None or (kind == "{") != isinstance(step, str):
                at = _SCAN(text, at)[1]
            else:
                _drop(branch, found)
                at = _walk(text, at, branch, found)
            index += 1
            at = _after(text, at)
        at += 1
    else:
        at = _SCAN(text, at)[1]
    if _HERE in tree:
        found[tree[_HERE]] = (start, at)
    return at


def _drop(tree: dict[str | int, Any], found: dict[Path, TextSpan]) -> None:
    """Discard what was found below a key that occurs again."""
    for step, one in tree.items():
        if step == _HERE:
            found.pop(one, None)
        elif found:
            _drop(one, found)


def _after(text: str, at: int) -> int:
    """Skip the comma after a value, if there is one, and blanks."""
    at = _end(_BLANK, text, at)
    return _end(_BLANK, text, at + 1) if text[at] == "," else at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


_written = 0


def _fast_utf8(text: str) -> str:
    """Like `encode_basestring`, and faster for a process that writes a lot."""
    global _written
    if _written < _PYDANTIC_PAYS:
        _written += len(text)
        return encode_basestring(text)
    import pydantic_core  # slow to import, so only once it pays off

    try:
        return pydantic_core.to_json(text).decode()
    except ValueError:  # a lone surrogate
        return encode_basestring(text)


def _has_lone(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _upper(match: re.Match[str]) -> str:
    found = match[0]
    return f"\\u{found[2:].upper()}" if found[1] == "u" else found


def _go_before_1_22(token: str) -> str:
    """Go before 1.22 had no short escapes for two control characters."""
    return _ESCAPE.sub(
        lambda match: {"\\b": "\\u0008", "\\f": "\\u000c"}.get(match[0], match[0]), token
    )
