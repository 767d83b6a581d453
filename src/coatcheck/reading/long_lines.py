"""What to show of a long line: the whole record around a match, and strings with their escapes
decoded.

A record is an object, an array or a tuple. `Structure` finds it with a scan for quotes and brackets
that reads JSON, Python's `repr` and similar notations, also if they are cut off or follow other
text. The scan never fails: text without brackets just has no records. It passes over a line once,
up to the last match that is shown, and looks at most one record ahead. A long string is decoded and
searched for records itself, since tools wrap JSON in strings.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from operator import add
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern

RECORD: Final = 1_500  # maximum bytes of a record that is shown whole
SMALL: Final = 700  # a record is extended to the one around it up to this size,
_SCANT: Final = 200  # and beyond that if it has fewer bytes than this
_EXCERPT: Final = 500
_MAX_DEPTH: Final = 500
LEVELS: Final = 3  # of strings in strings that are decoded
_SEPARATORS: Final = 12  # remembered for each open bracket

_TOKENS: Final = lazy_pattern(
    rb"""\\.|"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?<!\w)(?:[bBuUrR]{1,2})?'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
    rb"""|[\[\](){},]|"|(?<!\w)'""",
    re.DOTALL,
)
_LIST, _TUPLE, _OBJECT, _CALL, _COMMA, _BACKSLASH = b"[({f,\\"
_CLOSERS: Final = dict(zip(b"[({f", b"])})", strict=True))
_ENDS: Final = frozenset(b"])}")
_DATA: Final = (b"[", b"(", b"{")
_MAX_BRACKETS: Final = 300_000
_BEFORE_STRING: Final = b"[({,:="
_BREAK: Final = lazy_pattern(r"\n\s*")
_UNICODE_SOURCE: Final = (
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4})"
)
_UNICODE: Final = lazy_pattern(_UNICODE_SOURCE)
_ESCAPE: Final = lazy_pattern(rb"(" + _UNICODE_SOURCE + rb"""|\\["'\\/bfnrt])""")
_UNICODE_IN_TEXT: Final = lazy_pattern(r"\\\\|" + _UNICODE_SOURCE.decode())
_ESCAPED: Final = {b"b": b"\b", b"f": b"\f", b"t": b"\t", b"/": b"/", b'"': b'"', b"'": b"'"}


class Extract(NamedTuple):
    """What is shown for a match: the text, its offsets in the line, and a label: `#/items/3`, `row
    4` or nothing. `is_cut` is True if it is only a part of the record."""

    start: int
    end: int
    text: str
    label: str
    is_cut: bool


class Decoded:
    """A text with the escapes of its strings decoded, and the written offset of each character.

    A line break becomes `line_break`; the default is a space, so that a line stays one."""

    def __init__(self, written: bytes, line_break: bytes = b" ") -> None:
        parts = _ESCAPE.split(written)
        plain, escapes = list(map(len, parts[::2])), parts[1::2]
        characters = _Characters(line_break)
        parts[1::2] = map(characters.__getitem__, escapes)
        self.data = b"".join(parts)
        self._ends: array[int] = array(
            "q", accumulate(map(add, plain, map(len, parts[1::2])), initial=0)
        )
        self._sources: array[int] = array(
            "q", accumulate(map(add, plain, map(len, escapes)), initial=0)
        )

    def written(self, offset: int) -> int:
        """Convert the offset of a character in the decoded text to its offset in the written
        line."""
        near = bisect_right(self._ends, offset) - 1
        return self._sources[near] + offset - self._ends[near]

    def decoded(self, offset: int) -> int:
        """Convert an offset in the written line to the offset of its character in the decoded
        text."""
        near = bisect_right(self._sources, offset) - 1
        ahead = self._ends[near + 1] if near + 1 < len(self._ends) else len(self.data)
        return min(
            self._ends[near] + offset - self._sources[near], max(self._ends[near], ahead - 1)
        )


class _Characters(dict[bytes, bytes]):
    """The character of each escape as UTF-8. A line break becomes the given byte."""

    def __init__(self, line_break: bytes) -> None:
        super().__init__({b"\\n": line_break, b"\\r": b"" if line_break == b"\n" else line_break})
        self._line_break = line_break.decode()

    def __missing__(self, escape: bytes) -> bytes:
        units = bytes.fromhex(escape.replace(b"\\u", b"").decode()) if escape[1:2] == b"u" else b""
        text = (
            units.decode("utf-16-be", "replace")
            .replace("\n", self._line_break)
            .replace("\r", self._line_break)
        )
        found = self[escape] = text.encode() if units else _ESCAPED.get(escape[1:], b"\\")
        return found


def with_characters(json_text: str) -> str:
    """JSON with printable characters in place of their `\\u` escapes. It stays JSON with the same
    value: characters of ASCII, control characters and lone surrogates stay escaped."""
    if "\\u" not in json_text:
        return json_text
    return _UNICODE_IN_TEXT.sub(_character, json_text)


def _character(escape: re.Match[str]) -> str:
    units = bytes.fromhex(escape[0].replace("\\u", "")) if escape[0][1] == "u" else b""
    text = units.decode("utf-16-be", "replace")
    is_shown = text > "\x7f" and text.isprintable() and text != "\ufffd"
    return text if is_shown else escape[0]


def decoded_lines(lines: bytes, line_break: bytes = b" ") -> bytes:
    """Decode the escapes in lines: like `Decoded` but faster, without offsets."""
    lines = lines.replace(b"\\\\", b"\x00").replace(b"\\n", line_break).replace(b"\\r", line_break)
    for escape, character in _ESCAPED.items():
        lines = lines.replace(b"\\" + escape, character)
    if lines.find(b"\\u") >= 0:
        characters = _Characters(line_break)
        lines = _UNICODE.sub(lambda match: characters[match[0]], lines)
    return lines.replace(b"\x00", b"\\")


class _Bracket:
    """An open bracket: its offset, the byte that opens it (`f` if it follows a name, as in a call),
    the number of its commas and the offsets after the last of them, and the last string that may be
    a key."""

    __slots__ = ("index", "key", "kind", "parts", "start", "wants_key")

    def __init__(self, start: int, kind: int) -> None:
        self.start = start
        self.kind = kind
        self.index = 0
        self.key: tuple[int, int] | None = None
        self.wants_key = kind == _OBJECT
        self.parts: deque[int] | None = None

    def pass_comma(self, end: int) -> None:
        self.index += 1
        self.wants_key = self.kind == _OBJECT
        if self.parts is None:
            self.parts = deque(maxlen=_SEPARATORS)
        self.parts.append(end)


class Structure:
    """The brackets and strings of one line. Matches are looked up in the order in which they occur.

    `is_json` labels records with their JSON Pointer. `at` is where the scan begins, outside of
    strings."""

    def __init__(self, data: bytes, *, is_json: bool = False, at: int = 0, level: int = 0) -> None:
        self._data, self._is_json, self._level = data, is_json, level
        self._at = at  # the end of the last token
        self._open: list[_Bracket] = []
        self._string: tuple[int, int] = (0, 0)
        self._inner: tuple[tuple[int, int], Decoded, Structure] | None = None
        self._tokens = 0
        self._lost = False

    def record_at(
        self, first: int, last: int, *, limit: int = RECORD, width: int = 0
    ) -> Extract | None:
        """The record around a match, or a part of it, of about `limit` bytes at most; None if there
        is none. A `width` other than 0 is a stricter limit, and then records are not extended."""
        self._advance(first)
        if self._lost or not (self._open or self._string[1] > first):
            return None
        begin, end = self._string
        if begin < first < end and end - begin > SMALL:
            return self._inside(first, last, limit, width)
        ends, parts = self._ahead(first + limit)
        best, around = self._whole_record(last, ends, limit=width or limit, extends=not width)
        if best is not None:
            start, end = self._open[best].start, ends[best]
            # In a long list, the next item is another record; elsewhere a tiny one says little.
            is_row = around == best - 1
            is_telling = width or end - start >= _SCANT // 2
            if around is None or is_row or is_telling:
                return Extract(start, end, self._text(start, end), self._label(best), is_cut=False)
        if around is None:
            return None
        return self._excerpt(first, last, around, parts, min(limit, width or _EXCERPT))

    def _whole_record(
        self, last: int, ends: dict[int, int], *, limit: int, extends: bool
    ) -> tuple[int | None, int | None]:
        """The depth of the record to show, and that of the first bracket around it that cannot be
        shown. A small record is extended to the one around it if `extends`."""
        ample = min(limit, SMALL) if extends else limit
        scant = _SCANT if extends else 0
        best = None
        for depth in range(len(self._open) - 1, -1, -1):
            bracket = self._open[depth]
            end = ends.get(depth, 0)
            size = end - bracket.start
            if end < last or size > limit:
                return best, depth
            is_part = self._is_part(depth)
            if best is not None and bracket.kind != _OBJECT and not is_part:
                return best, depth
            if is_part:
                continue
            if best is None or size <= ample or ends[best] - self._open[best].start < scant:
                best = depth
            if size > ample:
                break
        return best, None

    def _is_part(self, depth: int) -> bool:
        """Whether a bracket is less than a record: the arguments of a call, or the list of a
        member."""
        kind = self._open[depth].kind
        if kind in (_CALL, _OBJECT):
            return kind == _CALL
        return depth > 0 and self._open[depth - 1].kind in (_OBJECT, _CALL)

    def _advance(self, upto: int) -> None:
        """Pass the tokens before an offset, and a bracket that opens there."""
        data, stack = self._data, self._open
        for token in _TOKENS.finditer(data, self._at):
            start, end = token.span()
            sign = data[start]
            if start >= upto and (start > upto or sign not in _CLOSERS):
                break
            self._at = end
            if sign == _COMMA:
                if stack:
                    stack[-1].pass_comma(end)
            elif sign in _CLOSERS:
                self._open_bracket(start, sign)
                if self._lost:
                    return
            elif sign in _ENDS:
                self._close_bracket(sign)
            elif sign != _BACKSLASH:
                self._pass_string(start, end)
                if self._at == len(data):
                    return

    def _open_bracket(self, start: int, sign: int) -> None:
        before = self._data[start - 1 : start]
        is_call = sign == _TUPLE and (before.isalnum() or before == b"_")
        self._open.append(_Bracket(start, _CALL if is_call else sign))
        self._tokens += 1
        self._lost = len(self._open) > _MAX_DEPTH or self._tokens > _MAX_BRACKETS

    def _close_bracket(self, sign: int) -> None:
        """Close the bracket that this one ends. Up to two that were not closed are forgotten."""
        for back in range(1, min(3, len(self._open)) + 1):
            if _CLOSERS[self._open[-back].kind] == sign:
                del self._open[-back:]
                return

    def _pass_string(self, start: int, end: int) -> None:
        if end - start == 1:  # a quote without an end: a string that is cut off, or not a string
            before = self._data[max(0, start - 64) : start].rstrip()
            if before[-1:] not in _BEFORE_STRING:
                return
            self._at = end = len(self._data)
        self._string = (start, end)
        if self._open and self._open[-1].wants_key:
            self._open[-1].key, self._open[-1].wants_key = (start, end), False

    def _ahead(self, upto: int) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Where the open brackets end, by depth, and the commas in them as depth and offset, up to
        an offset."""
        ends: dict[int, int] = {}
        parts: list[tuple[int, int]] = []
        depth, above = len(self._open) - 1, 0
        for token in _TOKENS.finditer(self._data, self._at, min(upto, len(self._data))):
            start, end = token.span()
            sign = self._data[start]
            if sign in _CLOSERS:
                above += 1
            elif sign in _ENDS:
                if above:
                    above -= 1
                    continue
                ends[depth] = end
                depth -= 1
                if depth < 0:
                    break
            elif sign == _COMMA:
                if not above:
                    parts.append((depth, start))
            elif end - start == 1:  # a string that reaches beyond
                break
        return ends, parts

    def _excerpt(
        self, first: int, last: int, depth: int, parts: list[tuple[int, int]], width: int
    ) -> Extract:
        """A part of a record that is too large, from one of its members to another where
        possible."""
        bracket = self._open[depth]
        starts = (bracket.start + 1, *(bracket.parts or ()))
        begin = next((part for part in starts if first - width // 3 <= part <= first), None)
        if begin is None:
            begin = boundary(self._data, max(bracket.start, first - width // 3))
        fits = [
            offset for level, offset in parts if level == depth and last <= offset <= begin + width
        ]
        end = (
            fits[-1]
            if fits
            else boundary(self._data, min(len(self._data), max(begin + width, last)))
        )
        end = min(end, begin + 2 * width)
        text = self._text(begin, end).strip()
        return Extract(begin, max(end, first + 1), f"…{text}…", self._label(depth), is_cut=True)

    def _inside(self, first: int, last: int, limit: int, width: int) -> Extract:
        """A record in a long string, or the lines around the match in it. The text is decoded."""
        begin, end = self._string
        if self._inner is None or self._inner[0] != self._string:
            decoded = Decoded(self._data[begin + 1 : end], b"\n")
            self._inner = (self._string, decoded, Structure(decoded.data, level=self._level + 1))
        _, decoded, structure = self._inner
        base = begin + 1
        low, high = decoded.decoded(first - base), decoded.decoded(max(first, last - 1) - base) + 1
        is_data = decoded.data[:64].lstrip()[:1] in _DATA and self._level < LEVELS
        found = structure.record_at(low, high, limit=limit, width=width) if is_data else None
        if found is None:
            found = _lines_around(decoded.data, low, high, min(limit, width or _EXCERPT))
        label = self._label(len(self._open))
        start, stop = base + decoded.written(found.start), base + decoded.written(found.end)
        return Extract(start, max(stop, first + 1), found.text, label, found.is_cut)

    def _text(self, start: int, end: int) -> str:
        text = self._data[start:end].decode("utf-8", "replace")
        return _BREAK.sub(" ", text) if self._level else text

    def _label(self, depth: int) -> str:
        parents = self._open[:depth]
        if self._is_json:
            steps: list[str] = []
            for parent in parents:
                if parent.kind == _LIST:
                    steps.append(str(parent.index))
                elif parent.key is not None:
                    steps.append(_key(self._data[slice(*parent.key)]))
            path = "#" + "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
            return path if steps and len(path) <= _SCANT and path.isprintable() else ""
        start = parents[0].start if parents else _EXCERPT
        is_row = (
            start < _EXCERPT
            and parents[0].kind == _LIST
            and not (self._level or self._data[:start].strip())
        )
        return f"row {parents[0].index + 1}" if is_row else ""


def _key(written: bytes) -> str:
    try:
        return str(json.loads(written))
    except ValueError:
        return written.decode("utf-8", "replace").strip("\"'")


def _lines_around(data: bytes, first: int, last: int, width: int) -> Extract:
    """The line of a match and those next to it, as many as fit."""
    low = data.rfind(b"\n", max(0, first - width // 2), first) + 1 or boundary(
        data, max(0, first - width // 3)
    )
    high = data.find(b"\n", last, low + width)
    if high < 0:
        high = min(len(data), max(low + width, last))
        high = boundary(data, high)
    while (more := data.find(b"\n", high + 1, low + width)) >= 0 and more - low <= width // 2:
        high = more
    high = min(high, low + 2 * width)
    lines = data[low:high].decode("utf-8", "replace").strip("\n").replace("\n", "\n  ")
    left, right = "…" * (low > 0), "…" * (high < len(data))
    return Extract(low, max(high, first + 1), left + lines + right, "", is_cut=True)


def boundary(data: bytes, at: int) -> int:
    """Start of the character at an offset."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at
