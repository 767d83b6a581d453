"""Patterns that a model wrote, compiled by RE2: linear time whatever they are, and an error that says what to write.

A pattern looks at one line at a time, but is run over many lines at once: it is compiled so that it never matches a
line feed, and `^` and `$` match at every line. The few patterns that would tell the difference are run line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import monotonic
from typing import Any, Final, NamedTuple

import re2  # type: ignore[import-untyped]  # it ships no types

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

MAX_PATTERN: Final = 1_000
_RUN: Final = 128 * 1024
_LINE_BY_LINE: Final = re.compile(r"\\[AzC]|\(\?[a-zA-Z]*-[a-zA-Z]*m")
_ANSWERS: Final = (
    (("(?=", "(?!"), "RE2 has no look-ahead", "match the text itself, or filter with a second grep (invert=true)"),
    (("(?<=", "(?<!"), "RE2 has no look-behind", "match the text before it too; the whole line is shown anyway"),
    (("operator: (?P", "(?(", "(?>"), "RE2 has no back-references or atomic groups", "spell it out: (foo|bar)"),
    (("(?#", "(?x"), "RE2 has no comments in patterns", "leave them out"),
    (("invalid repetition size",), "RE2 repeats at most 1,000 times, nested ones multiplied", "use + or *"),
    (("too large", "too big"), "the pattern compiles to too much", "use a shorter one, + for large repetitions"),
    (("repetition operator: *+", "repetition operator: ++", "repetition operator: ?+"),
     "RE2 has no possessive repetition", "use *, + or ? alone"),
    (("sequence: \\Z", "sequence: \\G", "sequence: \\K"), "RE2 does not know that anchor", "use ^ and $"),
    (("sequence: \\u", "sequence: \\N"), "RE2 does not know that escape", "write the character itself, or \\x{00e9}"),
    (("sequence: \\h", "sequence: \\R"), "RE2 does not know that class", "use [ \\t], or \\s"),
)  # fmt: skip
_BACK_REFERENCE: Final = re.compile(r"sequence: \\[1-9k]")
_PLAIN: Final = "check the pattern, and write a backslash before what is meant as it stands"


class Hit(NamedTuple):
    """A line that matches, by offsets into the lines searched: its begin, its end, and where in it the match begins."""

    start: int
    end: int
    match: int


class Pattern:
    """Finds the lines that match among whole lines of valid UTF-8."""

    def __init__(self, pattern: str, *, ignore_case: bool = False, literal: bool = False) -> None:
        if len(pattern) > MAX_PATTERN:
            raise InvalidArgument(
                f"the pattern has {len(pattern):,} characters", hint=f"use one of at most {MAX_PATTERN:,}"
            )
        if literal and "\n" in pattern:
            raise InvalidArgument("the text has a line break, and grep sees one line at a time", hint="use one line")
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("the pattern is not valid Unicode", hint="leave lone surrogates out") from error
        source = re2.escape(pattern) if literal else pattern
        _compile(source, ignore_case)  # by itself first: no bracket may close what we put around it
        self._by_line = not literal and _LINE_BY_LINE.search(source) is not None
        self._one: Any = _compile(source if self._by_line else f"(?m:{source})", ignore_case)
        self._run: Any = None if self._by_line else _run(source, ignore_case)
        self.has_feed = "\n" in pattern or (not literal and "\\n" in pattern)

    def search(self, data: bytes, start: int, end: int) -> tuple[int, int] | None:
        """The first match between two offsets. What lies around them counts for `^`, `$` and word boundaries."""
        found = self._one.search(data, start, end)
        return None if found is None else found.span()

    def hits(self, lines: bytes, start: int, end: int) -> Iterator[Hit]:
        """The lines that match between two offsets, which are line starts (or the end)."""
        if self._by_line:
            yield from self._each(lines, start, end)
            return
        search = self._one.search
        while start < end and (found := search(lines, start, end)) is not None:
            match = found.start()
            begin = lines.rfind(b"\n", start, match) + 1 or start
            if begin >= end:
                return  # an empty match behind the last line feed
            stop = lines.find(b"\n", match, end)
            stop = end if stop < 0 else stop
            yield Hit(begin, stop, match)
            start = stop + 1

    def count(self, lines: bytes, start: int, end: int, deadline: float) -> tuple[int, int]:
        """How many lines match between two offsets, and up to where that was found out before the deadline.

        Where lines match one after the other, a run of them is taken in one step."""
        total, expected = 0, -1
        while start < end:
            hit = next(self.hits(lines, start, end), None)
            if hit is None:
                return total, end
            total += 1
            start = hit.end + 1
            if hit.start == expected and self._run is not None:
                upto = lines.rfind(b"\n", start, min(start + _RUN, end)) + 1
                run = self._run.match(lines, start, upto) if upto else None
                if run is not None:
                    total += lines.count(b"\n", start, run.end())
                    start = run.end()
            expected = start
            if monotonic() > deadline:
                break
        return total, min(start, end)

    def _each(self, lines: bytes, start: int, end: int) -> Iterator[Hit]:
        while start < end:
            stop = lines.find(b"\n", start, end)
            stop = end if stop < 0 else stop
            found = self._one.search(lines[start:stop])
            if found is not None:
                yield Hit(start, stop, start + found.start())
            start = stop + 1


def _run(source: str, ignore_case: bool) -> Any:
    """Matches as many whole lines that match as follow one another. `$\\C` is a line feed: the only one allowed."""
    try:
        return _compile(rf"(?m:(?:^.*(?:{source}).*$\C)+)", ignore_case)
    except InvalidArgument:
        return None  # the pattern alone is nearly too large


def _compile(source: str, ignore_case: bool) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True
    options.never_capture = True  # where a group matched is of no interest, and would cost the quick way to match
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(source, options)
    except re2.error as error:
        raise _rejected(error) from None


def _rejected(error: Exception) -> InvalidArgument:
    reason = error.args[0] if error.args else ""
    told = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    for signs, what, instead in _ANSWERS:
        if any(sign in told for sign in signs):
            return InvalidArgument(f"{what}: {clip(told)}", hint=instead)
    if _BACK_REFERENCE.search(told):
        return InvalidArgument(f"RE2 has no back-references: {clip(told)}", hint="spell the text out: (foo|bar)")
    return InvalidArgument(f"not a pattern that RE2 takes: {clip(told)}", hint=_PLAIN)
