"""A transcript file's format, and its lines by position.

A file is JSONL if one of its first lines is an object by itself. Otherwise it is a document, if all
of it is JSON. Lines keep their line ends, so that the lines joined together are the file.

Links are never followed.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.messages import Format, detect
from coatcheck.transcript.scan import Opened, parsed

_NO_SURPRISE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITING: Final = 0.1  # seconds after its last change in which a file may be in the middle of one
_MAX_LINES: Final = 200  # lines and bytes that are read to detect the format
_MAX_BYTES: Final = 8 << 20
_ENOUGH: Final = 12  # lines that clearly have a format: then no more are read
_LINE_CHUNK: Final = 256 * 1_024
_CHUNK: Final = 1 << 20
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"  # the byte-order mark too


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's format, None if it is not a transcript, and whether it is one document instead of
    lines; then `document` is its content, which had to be parsed to find out."""

    format: Format | None
    is_document: bool = False
    document: Opened | None = None


def layout_of(file: BinaryIO) -> Layout:
    """Detect the layout of an open file by its first lines, and rewind the file."""
    lines = _FirstLines(file)
    found = detect(lines.objects(), enough=_ENOUGH)
    file.seek(0)
    if lines.has_objects:
        return Layout(found)
    if lines.first_character not in (b"[", b"{"):
        return Layout(None)
    document = Opened.of(file.read())
    file.seek(0)
    if document is None or document.is_deep:
        return Layout(None)
    return Layout(detect([document.value]), True, document)


class _FirstLines:
    """The first lines of a file, and what was found in them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.first_character = b""  # that is not blank
        self.has_objects = False

    def objects(self) -> Iterator[object]:
        """Yield the lines that are objects."""
        count = size = 0
        for line in self._file:
            if line.strip():
                count += 1
                self.first_character = self.first_character or line.lstrip(_BLANK)[:1]
                value = parsed(line)
                if isinstance(value, dict):
                    self.has_objects = True
                    yield value
            size += len(line)
            if count >= _MAX_LINES or size >= _MAX_BYTES:
                return


def batches(file: BinaryIO, start: int, end: int, *, is_document: bool) -> Iterator[list[bytes]]:
    """Yield the lines between two offsets, about a megabyte at a time, or the document. The last
    line is cut at `end`."""
    file.seek(start)
    left = end - start
    while left > 0:
        lines = [file.read(left)] if is_document else file.readlines(min(left, _CHUNK))
        size = sum(map(len, lines))
        if not size:
            return
        if size > left:  # the file has grown
            lines = _cut(lines, left)
            size = left
        left -= size
        yield lines


def _cut(lines: list[bytes], size: int) -> list[bytes]:
    """Return the lines in the first `size` bytes, the last one cut."""
    kept = []
    for line in lines:
        if size <= 0:
            break
        kept.append(line[:size])
        size -= len(line)
    return kept


def open_regular(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a regular file, without following a link or waiting for a pipe. `folder` is a
    descriptor."""
    try:
        handle = os.open(path, flags | _NO_SURPRISE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            name = clip(os.path.basename(path))
            raise InvalidArgument(
                f"{name} is a symbolic link", hint="pass the file that it points to"
            ) from None
        if error.errno not in (errno.ENXIO, errno.EISDIR):
            raise
    else:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    name = clip(os.path.basename(path))
    raise InvalidArgument(
        f"{name} is not a file", hint="pass a transcript file, or a folder of them"
    )


@contextmanager
def closing(handle: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield handle
    finally:
        os.close(handle)


def open_to_read(path: str | Path, folder: int | None = None) -> AbstractContextManager[int]:
    return closing(open_regular(path, os.O_RDONLY, folder))


def opened(handle: int) -> BinaryIO:
    """Return a buffered reader over a descriptor, which stays open when the reader is closed."""
    return io.BufferedReader(io.FileIO(handle, "rb", closefd=False), _CHUNK)


def pieces(handle: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file between two offsets, a chunk at a time."""
    while start < end and (piece := os.pread(handle, min(_CHUNK, end - start), start)):
        yield piece
        start += len(piece)


def lines_between(handle: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines between two offsets, each with its offset."""
    for lines in batches(opened(handle), start, end, is_document=False):
        for line in lines:
            yield start, line
            start += len(line)


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


def lines_backwards(handle: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines before `end`, the last one first, each with its offset."""
    for begin in starts_backwards(handle, end):
        yield begin, b"".join(pieces(handle, begin, end))
        end = begin


def settled_size(handle: int) -> int:
    """Return the size of a file. If it ends in the middle of a line, wait a moment for the rest.

    A file grows page by page while one write is under way, so its size may lie within a line that
    a process is writing. The wait is short, and only for a file that was changed just now: a line
    that a crash cut off stays unfinished."""
    give_up = time.monotonic() + _WRITING
    while True:
        info = os.fstat(handle)
        is_recent = time.time() - info.st_mtime < _WRITING
        if not is_recent or time.monotonic() > give_up or ends_line(handle, info.st_size):
            return info.st_size
        time.sleep(0.001)


def ends_line(handle: int, size: int) -> bool:
    """Whether the first `size` bytes of a file end with a line, or there are none."""
    return not size or os.pread(handle, 1, size - 1) == b"\n"
