"""What a transcript file is (its format; JSON lines or one document), and its lines by position.

A file is JSONL if one of its first lines is an object by itself. Otherwise it is a document, if all of it is JSON.
Lines keep their line ends, so that all lines in a row are the file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from coatcheck.messages import Format, detect
from coatcheck.transcript.scan import Opened, parsed

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LINES: Final = 200  # lines and bytes that are read to detect the format
_MAX_BYTES: Final = 8 << 20
_ENOUGH: Final = 12  # lines that clearly have a format: then no more are read
_LINE_CHUNK: Final = 256 * 1_024
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's format, None if it is not a transcript, and whether it is one document instead of lines."""

    format: Format | None
    is_document: bool = False


def layout_of(file: BinaryIO) -> Layout:
    """Detect the layout of an open file by its first lines, and rewind the file."""
    return look_at(file)[0]


def look_at(file: BinaryIO) -> tuple[Layout, Opened | None]:
    """Like `layout_of`, with the document if it is one: it had to be parsed to find out."""
    first, is_lines = b"", False

    def objects() -> Iterator[object]:
        nonlocal first, is_lines
        seen = lines = 0
        for line in file:
            first = first or line.lstrip(b"\xef\xbb\xbf \t\r\n")
            value = parsed(line) if line.strip() else None
            if isinstance(value, dict):
                is_lines = True
                yield value
            seen, lines = seen + len(line), lines + bool(line.strip())
            if lines >= _MAX_LINES or seen >= _MAX_BYTES:
                return

    found = detect(objects(), enough=_ENOUGH)
    file.seek(0)
    if is_lines:
        return Layout(found), None
    if not first.startswith((b"[", b"{")):
        return Layout(None), None
    document = Opened.of(file.read())
    file.seek(0)
    return Layout(detect([document.value]) if document else None, is_document=document is not None), document


def parts(file: BinaryIO, start: int, end: int | None, *, is_document: bool) -> Iterator[bytes]:
    """Yield the lines between two offsets, or the document. The last line is cut at `end`; None is the end of file."""
    file.seek(start)
    if is_document:
        whole = file.read() if end is None else file.read(end - start)
        if whole:
            yield whole
        return
    left = None if end is None else end - start
    while left is None or left > 0:
        line = file.readline() if left is None else file.readline(left)
        if not line:
            return
        if left is not None:
            left -= len(line)
        yield line


def opened(handle: int) -> BinaryIO:
    """Return a buffered reader over a descriptor, which stays open when the reader is closed."""
    return io.BufferedReader(io.FileIO(handle, "rb", closefd=False), 1 << 20)


def pieces(handle: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file between two offsets, a chunk at a time."""
    while start < end and (piece := os.pread(handle, min(_CHUNK, end - start), start)):
        yield piece
        start += len(piece)


def lines_between(handle: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines between two offsets, each with its offset. The descriptor's own position is not used."""
    pending: list[bytes] = []
    begin = at = start
    while at < end and (piece := os.pread(handle, min(_LINE_CHUNK, end - at), at)):
        at += len(piece)
        cursor = 0
        while (found := piece.find(b"\n", cursor)) >= 0:
            pending.append(piece[cursor : found + 1])
            line = b"".join(pending)
            yield begin, line
            begin += len(line)
            pending, cursor = [], found + 1
        if cursor < len(piece):
            pending.append(piece[cursor:])
    if pending:
        yield begin, b"".join(pending)


def starts_backwards(handle: int, end: int) -> Iterator[int]:
    """Yield the offsets at which the lines before `end` begin, the last line first."""
    if end <= 0:
        return
    at = end
    # The end of the last line does not begin another one.
    limit = end - 1 if os.pread(handle, 1, end - 1) == b"\n" else end
    while at > 0:
        size = min(_LINE_CHUNK, at)
        at -= size
        piece = os.pread(handle, size, at)
        cursor = min(len(piece), limit - at)
        while (found := piece.rfind(b"\n", 0, max(0, cursor))) >= 0:
            yield at + found + 1
            cursor = found
    yield 0
