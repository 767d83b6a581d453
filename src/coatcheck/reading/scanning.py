"""A text as groups of whole lines, a piece at a time in bounded memory: what a grep runs its pattern over.

Lines are handed on as they lie in a piece, without a copy. A line that reaches over pieces is put together up to a
limit; beyond it, only where it lies is told. Where reading is slow, the next piece is read while one is being searched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import monotonic
from typing import Final, NamedTuple

from coatcheck.errors import LimitExceeded
from coatcheck.reading.decoding import Text, decode, visible
from coatcheck.reading.patterns import Pattern

LONG_LINE: Final = 2 << 20
OVERLAP: Final = 64 << 10
LINE_SECONDS: Final = 30.0
_STEP: Final = 1 << 20
_QUICK: Final = 1e-9  # seconds for each byte that is read
_PATIENCE: Final = 0.008
_AROUND: Final = 8  # bytes left on either side of a window, so that `^`, `$` and `\b` see what is there


class Lines(NamedTuple):
    """Whole lines, `data[start:end]`, of which the first has this number. They end with a line feed alone and are valid
    UTF-8: `repaired` tells that they were not before."""

    number: int
    data: bytes
    start: int
    end: int
    repaired: bool = False


class Giant(NamedTuple):
    """A line too long to be held: its number, and its offsets in the text without the line feed."""

    number: int
    start: int
    end: int


class Found(NamedTuple):
    """A match in a giant line: the bytes around it, its offsets in them, and where in the text they begin."""

    data: bytes
    start: int
    end: int
    offset: int


def groups(text: Text, first: int, last: int) -> Generator[Lines | Giant, None, None]:
    """All lines from one number to another, both included."""
    at, end = text.line_start(first), text.line_start(last + 1)
    number = first
    while at < end:
        giant: Giant | None = None
        with closing(_joined(text, at, end, number)) as joined:
            for group in joined:
                if isinstance(group, Giant):
                    giant = group
                    break
                yield _cleaned(text, group)
        if giant is None:
            return
        yield giant
        at, number = giant.end + 1, giant.number + 1


def find(text: Text, pattern: Pattern, giant: Giant) -> Found | None:
    """The first match in a line too long to be held, window by window. A match longer than the overlap may be missed,
    and bytes that are not valid UTF-8 match nothing. Raises `LimitExceeded` where the pattern is too slow for it."""
    deadline = monotonic() + LINE_SECONDS
    for at in range(giant.start, giant.end, _STEP):
        if monotonic() > deadline:
            raise LimitExceeded(
                f"line {giant.number} has {giant.end - giant.start:,} bytes, too many for this pattern",
                hint="use a simpler pattern",
            )
        low = max(giant.start, at - OVERLAP - _AROUND)
        high = min(giant.end, at + _STEP + _AROUND)
        data = text.read(low, high - low)
        start, stop = 0, len(data)
        if high == giant.end < text.end and data.endswith(b"\r"):
            data, stop = data[:-1], stop - 1
        elif high < giant.end:
            stop = _boundary(data, stop - _AROUND)
        if low > giant.start:
            start = _boundary(data, _AROUND)
        span = pattern.search(data, start, stop)
        if span is not None:
            return Found(data, *span, low)
    return None


def _joined(text: Text, at: int, end: int, number: int) -> Generator[Lines | Giant, None, None]:
    """Groups as they lie in the pieces; a giant line is the last one."""
    held: list[bytes] = []
    began, size = at, 0
    for piece, feeds in _ahead(text, at, end):
        head = piece.find(b"\n") + 1
        if not head:
            held.append(piece)
            size += len(piece)
            if size >= LONG_LINE:
                yield Giant(number, began, min(text.line_end(began), end))
                return
        else:
            if held:
                line = b"".join([*held, piece[:head]])
                yield Lines(number, line, 0, len(line))
                number, feeds = number + 1, feeds - 1
            tail = piece.rfind(b"\n") + 1
            begin = head if held else 0
            if begin < tail:
                yield Lines(number, piece, begin, tail)
            number += feeds
            held = [piece[tail:]] if tail < len(piece) else []
            size = len(piece) - tail
            began = at + tail
        at += len(piece)
    if held:
        line = b"".join(held)
        yield Lines(number, line, 0, len(line))


def _ahead(text: Text, at: int, end: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a text. Where reading takes its time (a slow disk, compressed content), each is read while the one
    before it is in use; where it is quick, passing pieces between threads would cost more than that saves."""
    pieces = text.pieces(at, end)
    spent, allowed = 0.0, _PATIENCE
    while text.is_scanned or spent <= allowed:  # blocks of a scanned text are kept in one place, for one thread
        began = monotonic()
        piece = next(pieces, None)
        if piece is None:
            return
        spent, allowed = spent + monotonic() - began, allowed + _QUICK * len(piece[0])
        yield piece
    with ThreadPoolExecutor(1, "coatcheck-read-ahead") as reader:
        reading = reader.submit(next, pieces, None)
        while (piece := reading.result()) is not None:
            reading = reader.submit(next, pieces, None)
            yield piece


def _cleaned(text: Text, group: Lines) -> Lines:
    """The same lines without carriage returns at their ends, and with U+FFFD where a byte is not valid."""
    number, data, start, end, repaired = group
    if not data.isascii():
        lines = data[start:end]
        try:
            lines.decode()
        except UnicodeDecodeError:
            data, repaired = visible(decode(lines))[0].encode(), True
            start, end = 0, len(data)
    if data.find(b"\r", start, end) >= 0:
        data = data[start:end].replace(b"\r\n", b"\n")
        start, end = 0, len(data)
    return Lines(number, data, start, end, repaired)


def _boundary(data: bytes, at: int) -> int:
    """The start of the character that an offset lies in."""
    return next((near for near in range(at, at - 4, -1) if data[near] & 0xC0 != 0x80), at)
