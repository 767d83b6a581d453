"""Describe binary content without showing it: type, size, dimensions of an image, pages of a PDF,
names in an archive. Only heads, tails and directories are read, and nothing is unpacked.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from typing import Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError, MissingExtra
from coatcheck.ids import clip
from coatcheck.image_size import pixels
from coatcheck.media import TEXT, essence
from coatcheck.previews import EDGE, Sample
from coatcheck.previews.binaries import WORKBOOKS, header, office_kind
from coatcheck.previews.excerpts import count
from coatcheck.reading import office, pdf
from coatcheck.reading.page import MAX_CHARS, QueryResult
from coatcheck.reading.text import sample_of

_PDF: Final = "application/pdf"
_DIRECTORY: Final = 4 << 20
_NAMES: Final = 40
_DUMP: Final = 128
_NOTES: Final = {
    "application/zstd": "Compressed. It is not unpacked here.",
    "application/vnd.apache.parquet": (
        "query='DESCRIBE artifact' gives its columns, query='SELECT … FROM artifact' its rows"
    ),
}


def describe(content: Content, *, max_chars: int = MAX_CHARS) -> QueryResult:
    """Describe a content without showing it, in at most `max_chars` characters."""
    media, sample = essence(content.ref.media_type), sample_of(content)
    lines = [f"{media}, {content.size:,} bytes"]
    if content.size:
        lines.extend(_facts(content, media, sample))
        if not media.startswith("image/") and media != _PDF and not sample.head.startswith(b"PK"):
            lines.extend(_dump(sample.head))
    else:
        lines.append("It is empty.")
    text = "\n".join(lines)
    note = "the description is cut" if len(text) > max_chars else ""
    return QueryResult(text[:max_chars], TEXT, "description", note=note)


def _facts(content: Content, media: str, sample: Sample) -> Iterator[str]:
    """What the format says about the content."""
    if media.startswith("image/"):
        size = pixels(sample.head) or _bitmap_size(sample.head)
        if size is None:
            yield "Its first bytes do not have its dimensions."
        else:
            yield f"{size[0]:,} x {size[1]:,} pixels"
    elif media == _PDF:
        yield from _pdf(content)
    elif media in _NOTES:
        yield _NOTES[media]
    elif sample.head.startswith(b"PK\x03\x04") or media == "application/zip":
        yield from _zip(content, sample)
    elif media == "application/gzip":
        yield from _gzip(content, sample.head)
    else:
        about = header(sample, media)
        if about:
            yield about


def _bitmap_size(head: bytes) -> tuple[int, int] | None:
    if head[:2] != b"BM" or len(head) < 26:
        return None
    width, height = struct.unpack("<ii", head[18:26])
    return width, abs(height)


def _pdf(content: Content) -> Iterator[str]:
    try:
        found = pdf.ask(content, 1, 0, 0, seconds=5)
    except MissingExtra:
        yield "Its text cannot be read here."
        return
    except CoatcheckError as error:
        yield f"It could not be opened: {error.message}"
        return
    if found["encrypted"]:
        yield "encrypted" if found["pages"] else "It is encrypted and needs a password."
    if found["pages"]:
        yield count(found["pages"], "page")
    for key, value in found["about"].items():
        yield f"{key}: {clip(value, 200)}"
    if found["pages"]:
        yield 'query="page 1" gives the text of a page, query="text" of all; grep searches it'


def _gzip(content: Content, head: bytes) -> Iterator[str]:
    if len(head) >= 10 and head[3] & 8 and not head[3] & 4:
        name = head[10 : head.find(b"\0", 10)] if b"\0" in head[10:300] else b""
        if name:
            yield f"contains {clip(name.decode('latin-1'))}"
    claimed = int.from_bytes(content.read(max(0, content.size - 4), 4), "little")
    yield (
        f"Compressed; it claims to unpack to {claimed:,} bytes (modulo 4 GiB). "
        "It is not unpacked here."
    )


def _zip(content: Content, sample: Sample) -> Iterator[str]:
    """Names and sizes according to the archive's directory, unless it is too large."""
    kind = office_kind(sample)
    if kind and kind not in WORKBOOKS:  # a workbook is described only if its cells cannot be read
        yield f'{kind}; query="text" gives its text, grep searches it'
        return
    tail = (sample.head + sample.tail)[-EDGE:]
    at = tail.rfind(b"PK\x05\x06")
    claimed = int.from_bytes(tail[at + 12 : at + 16], "little")
    if (
        at < 0 or len(tail) < at + 22 or claimed > _DIRECTORY or b"PK\x06\x07" in tail
    ):  # the last: ZIP64, unlimited
        yield "Its directory is missing or too large to list."
        return
    try:
        with office.opened(content) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        yield f"Its directory cannot be read: {clip(str(error))}"
        return
    yield (
        f"{len(entries):,} entries that claim {sum(entry.file_size for entry in entries):,} "
        "bytes; not unpacked here:"
    )
    for entry in entries[:_NAMES]:
        yield f"  {clip(entry.filename)} {entry.file_size:,}"
    if len(entries) > _NAMES:
        yield f"  … {len(entries) - _NAMES:,} more"


def _dump(head: bytes) -> Iterator[str]:
    """The first bytes as hexadecimal digits and printable characters."""
    yield f"first {min(_DUMP, len(head))} bytes:"
    for at in range(0, min(_DUMP, len(head)), 16):
        row = head[at : at + 16]
        yield f"  {at:04x}  {row.hex(' '):<47}  {re.sub(rb'[^ -~]', b'.', row).decode('ascii')}"
