"""`Request` and `Page`: what a read asks for and returns; the slices in a request, and the result of a query.

Lines count from 1 and both ends are included: `lines="4100:4160"` is 61 lines. Characters count from 0 and the end is
excluded, as in Python: `chars="0:2000"` is 2,000 characters. Negative numbers count from the end, and an end may be
left open: `lines="-50:"` is the last 50 lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.media import TEXT

MAX_CHARS: Final = 8_000
MIN_CHARS: Final = 200
MAX_CONTEXT: Final = 100
MAX_RESULT: Final = 4_000_000  # characters of a query's result

_SPAN: Final = re.compile(r"\s*(-?\d{1,18})?\s*(?:(:|(?<=\d)\s*-)\s*(-?\d{1,18})?)?\s*")
_LINES_HINT: Final = 'write lines="4100:4160", "7", ":100" or "-50:" for the last 50; lines count from 1'
_CHARS_HINT: Final = 'write chars="0:2000", "8000:" or "-2000:" for the last 2,000; characters count from 0'


@dataclass(frozen=True, slots=True)
class Page:
    """One bounded answer to a read.

    `shown` describes which part of the whole the text is, and what was left out. `cursor` reads the next page; it is
    None at the end. `derived` is the pointer of the whole result if that was too large for a page. `matches` counts the
    lines that a grep found, shown or not, and on long lines each occurrence; it is a minimum if `matches_exact` is
    False. `spans` are the byte ranges of the artifact that a slice has shown."""

    text: str
    shown: str
    pointer: str
    cursor: str | None
    derived: str | None = None
    matches: int | None = None
    matches_exact: bool = True
    spans: tuple[tuple[int, int], ...] = ()


class PageDraft(NamedTuple):
    """A page before its cursor is sealed. `position` is the start of the next page, None at the end; `span` is the
    range of the text that a slice covers."""

    text: str
    shown: str
    position: tuple[int, ...] | None = None
    matches: int | None = None
    matches_exact: bool = True
    span: tuple[int, int] | None = None


class Slice(NamedTuple):
    """Both ends of a slice as written in a request; None for an open end."""

    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to read of an artifact: a slice, a grep (also within a slice of lines), a query, a diff, or all of it.

    Raises `InvalidArgument` if the arguments cannot be combined. `max_chars` limits one page and may differ from page
    to page."""

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
                raise InvalidArgument(f"{name} must be text, got {type(value).__name__}", hint=f'write {name}="…"')
        self._check_combination()
        if not _is_count(self.max_chars) or self.max_chars < MIN_CHARS:
            raise InvalidArgument(
                f"max_chars must be at least {MIN_CHARS}, got {_short(self.max_chars)}",
                hint=f"leave it out for {MAX_CHARS:,}",
            )
        if not _is_count(self.context) or self.context > MAX_CONTEXT:
            raise InvalidArgument(
                f"context must be 0 to {MAX_CONTEXT} lines, got {_short(self.context)}", hint="use lines to read more"
            )
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
                f"{' and '.join(ways)} cannot be combined",
                hint="use one at a time; only lines and grep can be combined",
            )
        if self.grep is None:
            extra = [name for name in ("context", "ignore_case", "invert", "literal") if getattr(self, name)]
            if extra:
                raise InvalidArgument(f"{' and '.join(extra)} needs grep", hint='add grep="pattern", or leave it out')


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query or a diff, complete up to its limit.

    `shown` describes the text ("12 of 30 results"), `complete` is False if anything is missing, and `note` says what
    was left out, skipped or assumed. The same query on the same content gives the same text."""

    text: str
    media_type: str = TEXT
    shown: str = ""
    complete: bool = True
    note: str = ""


class BoundedLines:
    """Lines of a result up to a limit in characters. After the first line that does not fit, none is added.

    A first line that exceeds the limit by itself is cut; `cut` is then its full length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: list[str] = []
        self._size = 0
        self.full = False
        self.cut = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def add(self, line: str) -> bool:
        """Add a line, and return whether all of it was kept."""
        if self.full:
            return False
        size = self._size + len(line) + bool(self._lines)
        if size <= self._limit:
            self._lines.append(line)
            self._size = size
            return True
        self.full = True
        if not self._lines:
            self._lines.append(line[: self._limit])
            self.cut = len(line)
        return False


def parse_lines(spec: str) -> Slice:
    span = _parse(spec, "lines", _LINES_HINT)
    if 0 in span:
        raise InvalidArgument(f"lines={clip(spec)} has a line 0", hint=_LINES_HINT)
    return span


def parse_chars(spec: str) -> Slice:
    span = _parse(spec, "chars", _CHARS_HINT)
    if span.end == 0:
        raise InvalidArgument(f"chars={clip(spec)} is empty", hint=_CHARS_HINT)
    return span


def lines_of(spec: str, total: int) -> tuple[int, int]:
    """The first and the last line of a slice of `total` lines, both 1-based and included."""
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
    """The first character of a slice of `total` characters and the one after its last, both 0-based."""
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


def _parse(spec: str, what: str, hint: str) -> Slice:
    """Parse `a:b` or `a-b`; one end may be missing. A single line number is itself, a negative one the tail."""
    match = _SPAN.fullmatch(spec)
    if match is None or (match[1] is None and match[3] is None):
        raise InvalidArgument(f"{what}={clip(spec)} is not a slice", hint=hint)
    start, end = (None if part is None else int(part) for part in match.group(1, 3))
    if match[2] is None:
        if start is not None and start < 0:
            return Slice(start, None)
        if what == "chars":
            raise InvalidArgument(f"chars={clip(spec)} needs two ends", hint=_CHARS_HINT)
        return Slice(start, start)
    if start is not None and end is not None and (start < 0) == (end < 0) and end < start:
        raise InvalidArgument(f"{what}={clip(spec)} ends before it begins", hint=hint)
    return Slice(start, end)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: object) -> str:
    return clip(str(value), 40) if not isinstance(value, int) or abs(value) > 10**18 else str(value)
