"""All lines of a text in groups that fit in memory, made fit to search.

The text is read in pieces of many lines. A line that spans pieces is joined up to a limit; of a
longer one only the place is given, and it is searched in overlapping windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Final, NamedTuple

from coatcheck.errors import LimitExceeded
from coatcheck.previews.excerpts import folded
from coatcheck.reading.long_lines import boundary
from coatcheck.reading.patterns import Pattern, Span
from coatcheck.reading.text import DecodedText, decode, visible

LONG_LINE: Final = 2 << 20
OVERLAP: Final = 64 << 10
LINE_SECONDS: Final = 10.0  # maximum time without a match in one line
_WINDOW: Final = 1 << 20
_AROUND: Final = 8  # bytes on either side of a window, for `^`, `$` and `\b`


class LineGroup(NamedTuple):
    """Whole lines `data[start:end]`, the first with this number. `repaired` is True if they had
    invalid bytes."""

    number: int
    data: bytes
    start: int
    end: int
    repaired: bool = False


class HugeLine(NamedTuple):
    """A line too long to keep in memory: its number, and its offsets in the text without the line
    feed."""

    number: int
    start: int
    end: int


def groups(text: DecodedText, first: int, last: int) -> Iterator[LineGroup | HugeLine]:
    """Yield all lines from one number to another, both included, as they are stored."""
    at = text.start if first == 1 else text.line_start(first)
    end = text.end if last == text.lines else text.line_start(last + 1)
    number = first
    begun: list[bytes] = []  # pieces of a line that is not complete
    size = 0
    while at < end:
        piece, feeds = text.piece(at, end)
        at += len(piece)
        whole = piece.rfind(b"\n") + 1
        if not whole:
            begun.append(piece)
            size += len(piece)
            if size >= LONG_LINE:
                huge = HugeLine(number, at - size, min(text.line_end(at - size), end))
                yield huge
                at, number = huge.end + 1, number + 1
                begun, size = [], 0
            continue
        start = 0
        if begun:
            start = piece.find(b"\n") + 1
            line = b"".join([*begun, piece[:start]])
            yield LineGroup(number, line, 0, len(line))
            number, feeds = number + 1, feeds - 1
        if start < whole:
            yield LineGroup(number, piece, start, whole)
        number += feeds
        size = len(piece) - whole
        begun = [piece[whole:]] if size else []
    if begun:
        line = b"".join(begun)
        yield LineGroup(number, line, 0, len(line))


def cleaned(text: DecodedText, group: LineGroup) -> LineGroup:
    """Make lines fit to search: as a terminal shows them, without carriage returns at their ends,
    and with U+FFFD for invalid bytes."""
    number, data, start, end, repaired = group
    if not data.isascii():
        lines = data[start:end]
        try:
            lines.decode()
        except UnicodeDecodeError:
            data, repaired = visible(decode(lines))[0].encode(), True
            start, end = 0, len(data)
    has_returns = data.find(b"\r", start, end) >= 0  # counting takes 20 times longer
    is_drawn = data.find(b"\x1b", start, end) >= 0 or (
        has_returns and data.count(b"\r", start, end) != data.count(b"\r\n", start, end)
    )
    if is_drawn and not text.exact:
        data = folded(data[start:end].decode())[0].encode()
        start, end = 0, len(data)
    if has_returns:
        data = data[start:end].replace(b"\r\n", b"\n")
        start, end = 0, len(data)
    return LineGroup(number, data, start, end, repaired)


def occurrences_in(
    text: DecodedText, huge: HugeLine, pattern: Pattern, inside: int
) -> Iterator[Span | None]:
    """Yield the occurrences as offsets from the start of the line, and None after each window.
    `inside` is the start of an earlier match to continue from.

    A match longer than the overlap may be missed, or found in parts that count as one. Invalid
    UTF-8 matches nothing. Raises `LimitExceeded` if the pattern is too slow."""
    done, is_cut = huge.start + inside, False
    deadline = monotonic() + LINE_SECONDS
    for base in range(huge.start + inside // _WINDOW * _WINDOW, huge.end, _WINDOW):
        if monotonic() > deadline:
            raise LimitExceeded(
                f"line {huge.number} has {huge.end - huge.start:,} bytes, "
                "too many for this pattern",
                hint="use a simpler pattern",
            )
        low, data, start, stop, is_last = _window(text, huge, base)
        for first, last in pattern.occurrences(data, max(start, done - low), stop):
            if not is_last and first >= stop - OVERLAP:
                break  # it is complete in the next window
            is_rest = is_cut and last > first and low + first == done
            done, is_cut = low + last, last == stop and not is_last
            if not is_rest:
                yield low + first - huge.start, low + last - huge.start
                deadline = monotonic() + LINE_SECONDS
        yield None


class _Window(NamedTuple):
    """A part of a huge line: its offset in the text, its bytes, and the range in them to search."""

    low: int
    data: bytes
    start: int
    stop: int
    is_last: bool


def _window(text: DecodedText, huge: HugeLine, base: int) -> _Window:
    low = max(huge.start, base - OVERLAP - _AROUND)
    high = min(huge.end, base + _WINDOW + _AROUND)
    data = text.read(low, high - low)
    start, stop = 0, len(data)
    if high == huge.end < text.end and data.endswith(b"\r"):
        data, stop = data[:-1], stop - 1
    elif high < huge.end:
        stop = boundary(data, stop - _AROUND)
    if low > huge.start:
        start = boundary(data, _AROUND)
    return _Window(low, data, start, stop, is_last=high == huge.end)
