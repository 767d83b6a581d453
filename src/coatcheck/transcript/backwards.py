"""Lines of a file from either end, by position: no descriptor's offset is moved, and no line is read twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

_PIECE: Final = 256 * 1_024


def lines_between(handle: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines between two offsets with where each begins, ends included; the last one may have none."""
    held: list[bytes] = []
    begin = at = start
    while at < end and (piece := os.pread(handle, min(_PIECE, end - at), at)):
        at += len(piece)
        cursor = 0
        while (found := piece.find(b"\n", cursor)) >= 0:
            held.append(piece[cursor : found + 1])
            line = b"".join(held)
            yield begin, line
            begin += len(line)
            held, cursor = [], found + 1
        if cursor < len(piece):
            held.append(piece[cursor:])
    if held:
        yield begin, b"".join(held)


def starts_backwards(handle: int, end: int) -> Iterator[int]:
    """Where the lines before an offset begin, the last one first."""
    if end <= 0:
        return
    at = end
    # The end of the last line does not begin another one.
    limit = end - 1 if os.pread(handle, 1, end - 1) == b"\n" else end
    while at > 0:
        size = min(_PIECE, at)
        at -= size
        piece = os.pread(handle, size, at)
        cursor = min(len(piece), limit - at)
        while (found := piece.rfind(b"\n", 0, max(0, cursor))) >= 0:
            yield at + found + 1
            cursor = found
    yield 0


def last_start(handle: int, end: int) -> int:
    """Where the last line before an offset begins."""
    return next(starts_backwards(handle, end), 0)
