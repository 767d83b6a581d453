"""What a read asks for and what it answers: `Request` and `Page`, and the slices that a request writes as text.

Lines count from 1 and both ends are included, as a page says them: `lines="4100:4160"` answers lines 4100-4160, that is
61 lines. Characters count from 0 and the end is left out, as in Python: `chars="0:2000"` answers 2,000 characters.
Negative numbers count from the end, and an end may be left open: `lines="-50:"` are the last 50 lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

MAX_CHARS: Final = 8_000
MIN_CHARS: Final = 200
MAX_CONTEXT: Final = 100

_SPAN: Final = re.compile(r"\s*(-?\d{1,18})?\s*(?:(:|(?<=\d)\s*-)\s*(-?\d{1,18})?)?\s*")
_LINES_HINT: Final = 'write lines="4100:4160", "7", ":100" or "-50:" for the last 50; lines count from 1'
_CHARS_HINT: Final = 'write chars="0:2000", "8000:" or "-2000:" for the last 2,000; characters count from 0'


@dataclass(frozen=True, slots=True)
class Page:
    """One bounded answer to a read.

    `shown` says what part of the whole the text is, and what was left out of it. `cursor` reads on, None at the end.
    `derived` is the pointer of the whole result where it was too large for a page. `matches` counts the lines that a
    grep found, shown or not: at least so many where `matches_exact` is False. `spans` are the bytes of the artifact
    that a slice has shown."""

    text: str
    shown: str
    pointer: str
    cursor: str | None
    derived: str | None = None
    matches: int | None = None
    matches_exact: bool = True
    spans: tuple[tuple[int, int], ...] = ()


class Part(NamedTuple):
    """A page before its cursor is sealed: `position` is where the next one begins, None at the end, and `span` where a
    slice began and ended in the text."""

    text: str
    shown: str
    position: tuple[int, ...] | None = None
    matches: int | None = None
    matches_exact: bool = True
    span: tuple[int, int] | None = None


class Span(NamedTuple):
    """Both ends of a slice as they were written; None where one was left open."""

    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to read of an artifact: a slice, a grep (of a slice of lines), a query or a diff; nothing for all of it.

    Raises `InvalidArgument` where the parts do not go together. `max_chars` bounds one page: it is not part of what is
    being read, and may differ from page to page."""

    lines: str | None = None
    chars: str | None = None
    grep: str | None = None
    context: int = 0
    ignore_case: bool = False
    invert: bool = False
    literal: bool = False
    query: str | None = None
    diff: str | None = None
    max_chars: int = MAX_CHARS

    def __post_init__(self) -> None:
        for name in ("lines", "chars", "grep", "query", "diff"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"{name} is a {type(value).__name__}, not text", hint=f'write {name}="…"')
        self._check_combination()
        if not _is_count(self.max_chars) or self.max_chars < MIN_CHARS:
            raise InvalidArgument(
                f"max_chars is {_told(self.max_chars)}", hint=f"a page has {MIN_CHARS} characters or more"
            )
        if not _is_count(self.context) or self.context > MAX_CONTEXT:
            raise InvalidArgument(f"context is {_told(self.context)}", hint=f"ask for 0 to {MAX_CONTEXT} lines")
        if self.lines is not None:
            parse_lines(self.lines)
        if self.chars is not None:
            parse_chars(self.chars)
        if self.grep == "":
            raise InvalidArgument("grep is empty", hint='write grep="pattern", or lines="1:50" to read from the start')

    def _check_combination(self) -> None:
        ways = [name for name in ("lines", "chars", "grep", "query", "diff") if getattr(self, name) is not None]
        if len(ways) > 1 and ways != ["lines", "grep"]:
            raise InvalidArgument(
                f"{' and '.join(ways)} do not go together",
                hint="ask for one at a time; only lines and grep combine",
            )
        if self.grep is None:
            extra = [name for name in ("context", "ignore_case", "invert", "literal") if getattr(self, name)]
            if extra:
                raise InvalidArgument(f"{' and '.join(extra)} without grep", hint='add grep="pattern", or leave it out')


def parse_lines(spec: str) -> Span:
    span = _parse(spec, "lines", _LINES_HINT)
    if 0 in span:
        raise InvalidArgument(f"there is no line 0 in lines={clip(spec)}", hint=_LINES_HINT)
    return span


def parse_chars(spec: str) -> Span:
    span = _parse(spec, "chars", _CHARS_HINT)
    if span.end == 0:
        raise InvalidArgument(f"chars={clip(spec)} asks for no characters", hint=_CHARS_HINT)
    return span


def lines_of(spec: str, total: int) -> tuple[int, int]:
    """The first and the last line that are meant, both 1-based and included, of a text that has some lines."""
    start, end = parse_lines(spec)
    first = 1 if start is None else start if start > 0 else max(1, total + start + 1)
    last = total if end is None else min(end, total) if end > 0 else total + end + 1
    if first > total:
        raise InvalidArgument(
            f"line {first} is past the end: there are {total:,} lines", hint='lines="-50:" reads the last 50'
        )
    if last < first:
        raise InvalidArgument(f"lines={clip(spec)} ends before it begins", hint=_LINES_HINT)
    return first, last


def chars_of(spec: str, total: int) -> tuple[int, int]:
    """The first character that is meant and the one after the last, both 0-based, of a text that has some."""
    start, end = parse_chars(spec)
    first = 0 if start is None else start if start >= 0 else max(0, total + start)
    last = total if end is None else min(end, total) if end > 0 else total + end
    if first >= total:
        raise InvalidArgument(
            f"character {first} is past the end: there are {total:,}", hint='chars="-2000:" reads the last 2,000'
        )
    if last <= first:
        raise InvalidArgument(f"chars={clip(spec)} ends before it begins", hint=_CHARS_HINT)
    return first, last


def _parse(spec: str, what: str, hint: str) -> Span:
    """`a:b`, also written `a-b`; one end may be missing. A bare line is itself; a bare negative number is the tail."""
    match = _SPAN.fullmatch(spec)
    if match is None or (match[1] is None and match[3] is None):
        raise InvalidArgument(f"{what}={clip(spec)} is not a slice", hint=hint)
    start, end = (None if part is None else int(part) for part in match.group(1, 3))
    if match[2] is None:
        if start is not None and start < 0:
            return Span(start, None)
        if what == "chars":
            raise InvalidArgument(f"chars={clip(spec)} has one end", hint=_CHARS_HINT)
        return Span(start, start)
    if start is not None and end is not None and (start < 0) == (end < 0) and end < start:
        raise InvalidArgument(f"{what}={clip(spec)} ends before it begins", hint=hint)
    return Span(start, end)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _told(value: object) -> str:
    return clip(str(value), 40) if not isinstance(value, int) or abs(value) > 10**18 else str(value)
