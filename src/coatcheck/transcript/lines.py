"""A transcript's file as parts: the lines of a JSONL file, or one whole document. Read as it comes, never all at once.

A file is JSONL where one of its first lines is an object by itself; else it is a document, where all of it is JSON. A
part keeps its line end, so that parts in a row are the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from coatcheck.transcript.formats import FORMATS, Format, detect
from coatcheck.transcript.scan import Opened, parse

_FIRST: Final = 200
_PLAINLY: Final = 12  # lines that plainly have a format: then no more need be looked at
_FIRST_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file is: of which format, None where it is no transcript, and whether it is lines or one document."""

    format: Format | None
    is_document: bool = False


def layout_of(file: BinaryIO) -> Layout:
    """The layout of an open file, by its first lines; the file is at its beginning after."""
    return look_at(file)[0]


def look_at(file: BinaryIO) -> tuple[Layout, Opened | None]:
    """The same, with the document where it is one: to tell, all of it had to be parsed."""
    objects, seen, lines, plain = [], 0, 0, 0
    first = b""
    for line in file:
        first = first or line.lstrip(b"\xef\xbb\xbf \t\r\n")
        value = _parsed(line) if line.strip() else None
        if isinstance(value, dict):
            objects.append(value)
            plain += any(known.fits(value) for known in FORMATS.values())
        seen, lines = seen + len(line), lines + bool(line.strip())
        if plain >= _PLAINLY or lines >= _FIRST or seen >= _FIRST_BYTES:
            break
    file.seek(0)
    if objects:
        return Layout(detect(objects)), None
    if not first.startswith((b"[", b"{")):
        return Layout(None), None
    document = Opened.of(file.read())
    file.seek(0)
    return Layout(detect([document.value]) if document else None, is_document=document is not None), document


def parts(file: BinaryIO, start: int, end: int | None, *, is_document: bool) -> Iterator[bytes]:
    """The parts between two offsets, `end` where the file ends if None. The last one is cut there."""
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
    """A buffered reader over a descriptor, which stays open when it is closed."""
    return io.BufferedReader(io.FileIO(handle, "rb", closefd=False), 1 << 20)


def _parsed(text: bytes) -> object:
    try:
        found = parse(text.decode())
    except UnicodeDecodeError:
        return None
    return found[0] if found is not None else None
