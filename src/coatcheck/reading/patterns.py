"""Patterns of a grep, compiled with RE2: linear time for any pattern.

A pattern sees one line at a time: it is compiled so that it never matches a line feed and `^` and
`$` match at every line. The few patterns for which that is not enough run line by line. JSON and
long lines are matched as written and with the escapes of their strings decoded. Offsets always
refer to the written line.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from functools import cached_property
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import re2  # type: ignore[import-untyped]  # ships without types

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.reading.long_lines import LEVELS, Decoded, decoded_lines

Span: TypeAlias = tuple[int, int]

MAX_PATTERN: Final = 1_000
MAX_PROGRAM: Final = 20_000  # maximum instructions of a compiled pattern
_DECODED: Final = 128 * 1024  # bytes of lines that are decoded at once
_RUN: Final = 128 * 1024  # bytes of consecutive matching lines that are counted at once
_LINE_BY_LINE: Final = lazy_pattern(r"\\[AzC]|\(\?[a-zA-Z]*-[a-zA-Z]*m")
_REJECTIONS: Final = (
    (("(?=", "(?!"), "RE2 has no look-ahead",
     "match the text itself, or filter with a second grep (invert=true)"),
    (("(?<=", "(?<!"), "RE2 has no look-behind",
     "match the text before it too; the whole line is shown anyway"),
    (("operator: (?P", "(?(", "(?>"), "RE2 has no back-references or atomic groups",
     "spell it out: (foo|bar)"),
    (("(?#", "(?x"), "RE2 has no comments in patterns", "leave them out"),
    (("invalid repetition size",), "RE2 allows at most 1,000 repetitions, nested ones multiplied",
     "use + or *"),
    (("too large", "too big"), "the compiled pattern is too large",
     "use a shorter one, + for large repetitions"),
    (("repetition operator: *+", "repetition operator: ++", "repetition operator: ?+"),
     "RE2 has no possessive repetition", "use *, + or ? alone"),
    (("sequence: \\Z", "sequence: \\G", "sequence: \\K"), "RE2 does not support that anchor",
     "use ^ and $"),
    (("sequence: \\u", "sequence: \\N"), "RE2 does not support that escape",
     "write the character, or \\x{00e9}"),
    (("sequence: \\h", "sequence: \\R"), "RE2 does not support that class", "use [ \\t], or \\s"),
    (tuple(f"sequence: \\{name}" for name in "123456789k"),
     "RE2 has no back-references", "spell the text out: (foo|bar)"),
)  # fmt: skip
_ESCAPE_HINT: Final = (
    "check the pattern, and put a backslash before special characters that you search for"
)
_FEED: Final = lazy_pattern(r"(\\[^n])|\\n|\n", re.DOTALL)
_ALTERNATIVES: Final = 12
_FLAGS: Final = lazy_pattern(r"\(\?[a-zA-Z-]+\)")
_GROUP: Final = lazy_pattern(r"\((?:\?:)?([^()]*)\)")
_PARTS: Final = lazy_pattern(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)


class LineHit(NamedTuple):
    """A line that matches: its start, its end and the start of the match, as offsets into the
    searched lines."""

    start: int
    end: int
    match: int


class Pattern:
    """Finds matching lines in whole lines of valid UTF-8. With `escapes`, JSON escapes are decoded
    too."""

    def __init__(
        self,
        pattern: str,
        *,
        ignore_case: bool = False,
        literal: bool = False,
        escapes: bool = False,
    ) -> None:
        # Checked alone first: a pattern must not close the brackets that are put around it.
        program_size(pattern, ignore_case=ignore_case, literal=literal)
        source = _escaped(pattern) if literal else pattern
        self.has_feed = "\n" in pattern or (not literal and "\\n" in pattern)
        # What a line break in a string becomes; \s matches both.
        self._line_break = b"\f" if self.has_feed else b" "
        if escapes and self.has_feed:
            source = _FEED.sub(lambda match: match[1] or r"\f", source)
        self._by_line = not literal and _LINE_BY_LINE.search(source) is not None
        self._compiled: Any = _compile(source if self._by_line else f"(?m:{source})", ignore_case)
        self._source, self._ignore_case = source, ignore_case
        self._run: Any = None if self._by_line else _run(source, ignore_case)
        self._escapes = escapes
        # Then it matches every line, without occurrences.
        self._matches_nothing = self._compiled.search(b"") is not None

    def search(self, data: bytes, start: int, end: int) -> Span | None:
        """The first match between two offsets. The bytes around them count for `^`, `$` and word
        boundaries."""
        found = self._compiled.search(data, start, end)
        return None if found is None else found.span()

    def hits(self, lines: bytes, start: int, end: int) -> Iterator[LineHit]:
        """Yield the matching lines between two offsets, which are line starts or the end."""
        if not self._has_escapes(lines, start, end):
            yield from self._hits(lines, start, end)
            return
        while start < end:
            stop = _line_start_near(lines, start + _DECODED, start, end)
            yield from self._hits_of_levels(lines, start, stop)
            start = stop

    def occurrences(self, data: bytes, start: int, end: int) -> Iterator[Span]:
        """Yield the matches between two offsets of one line, without overlaps. Empty matches are
        left out unless one is first, so that the line counts. The bytes around the offsets count
        for `^`, `$` and `\\b`."""
        if self._matches_nothing:
            yield start, start
            return
        if not self._has_escapes(data, start, end):
            yield from self._spans(data, start, end)
            return
        written = self._spans(data, start, end)
        upto, is_first = start, True
        for first, last in heapq.merge(written, *self._decoded_spans(data, start, end)):
            if first >= upto and (last > first or is_first):
                yield first, last
                upto, is_first = last, False

    def occurrences_from(self, line: bytes, inside: int) -> Iterator[Span]:
        """Yield the occurrences in a line from an offset on: the offset of an occurrence, or 0."""
        for span in self.occurrences(line, 0 if self._escapes else inside, len(line)):
            if span[0] >= inside:
                yield span

    def count(
        self,
        lines: bytes,
        start: int,
        end: int,
        *,
        deadline: float,
        long: int | None = None,
        inside: int = 0,
    ) -> tuple[int, int]:
        """Number of matching lines between two offsets, and the offset reached before the deadline.

        A line of more than `long` bytes counts once for each occurrence, the first line only from
        its offset `inside` on."""
        total = 0
        for hit, upto in self._hits_and_runs(lines, start, end, long):
            if long is None or hit.end - hit.start <= long:
                total += 1
            else:
                spans = self.occurrences_from(lines[hit.start : hit.end], inside)
                found, is_whole = tally(spans, deadline, least=1)
                total += found
                if not is_whole:
                    return total, hit.start
            inside = 0
            total += lines.count(b"\n", hit.end + 1, upto)
            if monotonic() > deadline:
                return total, min(upto, end)
        return total, end

    @cached_property
    def _capturing(self) -> Any:
        """The pattern with groups, None if it has none."""
        source = self._source if self._by_line else f"(?m:{self._source})"
        compiled = _compile(source, self._ignore_case, captures=True)
        return compiled if compiled.groups else None

    @property
    def has_groups(self) -> bool:
        return self._capturing is not None

    def first_groups(self, lines: bytes, start: int, end: int) -> Iterator[bytes]:
        """Yield what the first group matched in each occurrence in lines, as it is written."""
        if not self._by_line:
            parts = iter([(start, end)])
        else:
            parts = ((line.start, line.end) for line in each_line(lines, start, end))
        for first, last in parts:
            for found in self._capturing.finditer(lines[first:last]):
                value = found[1]
                if value is not None:
                    yield value

    def _hits_and_runs(
        self, lines: bytes, start: int, end: int, long: int | None
    ) -> Iterator[tuple[LineHit, int]]:
        """Yield matching lines, each with the offset up to which all lines after it match too and
        are not long. RE2 finds such a run in one step: 16,000 matching lines are counted in 2 ms
        and not in 25 ms, so that more counts are exact."""
        if self._run is None or self._has_escapes(lines, start, end):
            yield from ((hit, hit.end + 1) for hit in self.hits(lines, start, end))
            return
        expected = -1
        while (hit := next(self._hits(lines, start, end), None)) is not None:
            start = hit.end + 1
            if hit.start == expected:
                start = self._run_end(lines, start, end, long)
            expected = start
            yield hit, start

    def _run_end(self, lines: bytes, start: int, end: int, long: int | None) -> int:
        upto = lines.rfind(b"\n", start, min(start + _RUN, end)) + 1
        run = self._run.match(lines, start, upto) if upto else None
        if run is None:
            return start
        return run.end() if long is None else _before_long(lines, start, run.end(), long)

    def _has_escapes(self, data: bytes, start: int, end: int) -> bool:
        return self._escapes and data.find(b"\\", start, end) >= 0

    def _hits(self, lines: bytes, start: int, end: int) -> Iterator[LineHit]:
        search = self._compiled.search
        if self._by_line:
            for line in each_line(lines, start, end):
                if (found := search(lines[line.start : line.end])) is not None:
                    yield line._replace(match=line.start + found.start())
            return
        while start < end and (found := search(lines, start, end)) is not None:
            match = found.start()
            begin = lines.rfind(b"\n", start, match) + 1 or start
            if begin >= end:
                return  # an empty match after the last line feed
            stop = line_stop(lines, match, end)
            yield LineHit(begin, stop, match)
            start = stop + 1

    def _hits_of_levels(self, lines: bytes, start: int, end: int) -> Iterator[LineHit]:
        """Yield the lines that match as written or with their escapes decoded, each once."""
        decoded = [
            self._decoded_hits(level, lines, start, end) for level in self._levels(lines[start:end])
        ]
        last = -1
        for hit in heapq.merge(self._hits(lines, start, end), *decoded):
            if hit.start != last:
                yield hit
            last = hit.start

    def _levels(self, lines: bytes) -> Iterator[bytes]:
        """Yield the lines with their escapes decoded, then with those of nested strings. The number
        of lines stays."""
        for _ in range(LEVELS):
            written, lines = lines, decoded_lines(lines, self._line_break)
            if lines == written:
                return
            yield lines
            if lines.find(b"\\") < 0:
                return

    def _decoded_hits(
        self, decoded: bytes, lines: bytes, start: int, end: int
    ) -> Iterator[LineHit]:
        """Yield the lines that match with their escapes decoded."""
        at = 0
        for hit in self._hits(decoded, 0, len(decoded)):
            for _ in range(decoded.count(b"\n", at, hit.start)):
                start = lines.index(b"\n", start) + 1
            at = hit.start
            yield LineHit(start, line_stop(lines, start, end), start)

    def _decoded_spans(self, data: bytes, start: int, end: int) -> Iterator[Iterator[Span]]:
        """The matches in each level of the decoded line, at their written offsets."""
        views: list[Decoded] = []
        while len(views) < LEVELS and (not views or views[-1].data.find(b"\\") >= 0):
            written = views[-1].data if views else data
            view = Decoded(written, self._line_break)
            if view.data == written:
                return
            views.append(view)
            yield self._mapped(views[:], start, end)

    def _mapped(self, views: list[Decoded], start: int, end: int) -> Iterator[Span]:
        data = views[-1].data
        for first, last in self._spans(data, 0, len(data)):
            for view in reversed(views):
                first, last = view.written(first), view.written(last)
            if start <= first < end:
                yield first, min(last, end)

    def _spans(self, data: bytes, start: int, end: int) -> Iterator[Span]:
        search, is_first = self._compiled.search, True
        while start < end and (found := search(data, start, end)) is not None:
            first, last = found.span()
            if last > first or is_first:
                yield first, last
            is_first = False
            start = last if last > first else _next_character(data, last, end)


def program_size(pattern: str, *, ignore_case: bool = False, literal: bool = False) -> int:
    """Check a pattern, and return the number of instructions that it compiles to: the maximum cost
    of one byte."""
    if len(pattern) > MAX_PATTERN:
        raise InvalidArgument(
            f"the pattern has {len(pattern):,} characters, the limit is {MAX_PATTERN:,}",
            hint="use a shorter one",
        )
    try:
        size = int(_compile(_escaped(pattern) if literal else pattern, ignore_case).programsize)
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            "the pattern is not valid Unicode", hint="remove lone surrogates"
        ) from error
    if size > MAX_PROGRAM:
        raise InvalidArgument(
            f"the pattern compiles to {size:,} instructions, the limit is {MAX_PROGRAM:,}",
            hint="simplify it: + or * for large repetitions, [a-z] for classes like \\pL",
        )
    return size


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern like `A|B|C` or `(A|B)`, if it has any; flags at its start
    apply to each."""
    flags = _FLAGS.match(pattern)
    lead, body = (flags[0], pattern[flags.end() :]) if flags else ("", pattern)
    parts = _split(body)
    group = _GROUP.fullmatch(body)
    if len(parts) == 1 and group:
        parts = _split(group[1])
    if not 1 < len(parts) <= _ALTERNATIVES or not all(parts):
        return []
    return [lead + part for part in parts]


def _split(pattern: str) -> list[str]:
    """Split a pattern at each `|` outside of brackets. An unbalanced one, or one with `\\Q`, stays
    whole."""
    parts, start, depth = [], 0, 0
    for token in _PARTS.finditer(pattern):
        sign = token[0]
        depth += (sign == "(") - (sign == ")")
        if depth < 0 or sign == "\\Q":
            return [pattern]
        if sign == "|" and not depth:
            parts.append(pattern[start : token.start()])
            start = token.end()
    return [*parts, pattern[start:]]


def tally(
    spans: Iterator[Span] | Iterator[Span | None], deadline: float, *, least: int
) -> tuple[int, bool]:
    """Number of occurrences in a line, at least `least` and at least one if there is a span, and
    whether all were counted. A None among the spans only gives time to look at the clock."""
    total = 0
    for span in spans:
        if span is not None:
            total, least = total + (span[1] > span[0]), 1
        if (span is None or not total & 63) and monotonic() > deadline:
            return total, False
    return max(total, least), True


def each_line(data: bytes, at: int, end: int) -> Iterator[LineHit]:
    """Yield every line between two offsets as if it matched at its start."""
    while at < end:
        stop = line_stop(data, at, end)
        yield LineHit(at, stop, at)
        at = stop + 1


def line_stop(data: bytes, at: int, end: int) -> int:
    """End of the line that begins at an offset."""
    found = data.find(b"\n", at, end)
    return end if found < 0 else found


def _line_start_near(lines: bytes, near: int, start: int, end: int) -> int:
    """The last start of a line up to `near`, else the first one after it, or the end."""
    if near >= end:
        return end
    return lines.rfind(b"\n", start, near) + 1 or lines.find(b"\n", near, end) + 1 or end


def _next_character(data: bytes, at: int, end: int) -> int:
    at += 1
    while at < end and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _before_long(lines: bytes, start: int, end: int, long: int) -> int:
    """Offset of the first line of more than `long` bytes between two line starts, or the end."""
    while start < end:
        feed = lines.rfind(b"\n", start, start + long + 1)
        if feed < 0:
            return start
        start = feed + 1
    return end


def _escaped(text: str) -> str:
    return r"\n".join(map(re2.escape, text.split("\n")))


def _run(source: str, ignore_case: bool) -> Any:
    """Compile a pattern for consecutive matching lines. `$\\C` is a line feed, the only one
    allowed."""
    try:
        return _compile(rf"(?m:(?:^.*(?:{source}).*$\C)+)", ignore_case)
    except InvalidArgument:
        return None  # the pattern alone is nearly at the limit


def _compile(source: str, ignore_case: bool, *, captures: bool = False) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True
    options.never_capture = not captures  # groups prevent fast matching
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(source, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        for signs, what, instead in _REJECTIONS:
            if any(sign in text for sign in signs):
                raise InvalidArgument(f"{what}: {clip(text)}", hint=instead) from None
        raise InvalidArgument(f"RE2 rejects the pattern: {clip(text)}", hint=_ESCAPE_HINT) from None
