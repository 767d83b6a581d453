"""Descriptions of binary content: type, size, dimensions of an image, pages of a PDF, names in an archive.

Only heads, tails and directories are read, and nothing is unpacked. A PDF is opened in a child process that can be
killed.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from typing import Final

from coatcheck.content import ArtifactStream, Content
from coatcheck.errors import CoatcheckError, MissingExtra
from coatcheck.ids import clip
from coatcheck.media import TEXT, essence
from coatcheck.previews import Sample
from coatcheck.previews.binaries import WORKBOOKS, header, office_kind, pixels
from coatcheck.previews.excerpts import count
from coatcheck.reading.page import MAX_CHARS, QueryResult
from coatcheck.reading.pdf import ask

_HEAD: Final = 64 << 10
_TAIL: Final = 64 << 10
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
    media = essence(content.ref.media_type)
    head = content.read(0, _HEAD)
    lines = [f"{media}, {content.size:,} bytes"]
    if not content.size:
        lines.append("It is empty.")
    elif media.startswith("image/"):
        size = pixels(head) or _bitmap_size(head)
        lines.append(f"{size[0]:,} x {size[1]:,} pixels" if size else "Its first bytes do not have its dimensions.")
    elif media == "application/pdf":
        lines.extend(_pdf(content))
    elif media in _NOTES:
        lines.append(_NOTES[media])
    elif head.startswith(b"PK\x03\x04") or media == "application/zip":
        lines.extend(_zip(content, head))
    elif media == "application/gzip":
        lines.extend(_gzip(content, head))
    elif about := header(Sample(head, b"", content.size), media):
        lines.append(about)
    if not media.startswith("image/") and media != "application/pdf" and content.size and not head.startswith(b"PK"):
        lines.extend(_dump(head))
    text = "\n".join(lines)
    cut = len(text) > max_chars
    return QueryResult(text[:max_chars], TEXT, "description", note="the description is cut" if cut else "")


def _bitmap_size(head: bytes) -> tuple[int, int] | None:
    if head[:2] != b"BM" or len(head) < 26:
        return None
    width, height = struct.unpack("<ii", head[18:26])
    return width, abs(height)


def _pdf(content: Content) -> Iterator[str]:
    try:
        found = ask(content, 1, 0, 0, seconds=5)
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
    yield f"Compressed; it claims to unpack to {claimed:,} bytes (modulo 4 GiB). It is not unpacked here."


def _zip(content: Content, head: bytes) -> Iterator[str]:
    """Names and sizes according to the archive's directory, if that has a reasonable size."""
    tail = content.read(max(0, content.size - _TAIL), _TAIL)
    kind = office_kind(Sample(head, tail, content.size))
    if kind and kind not in WORKBOOKS:  # those are described only where their cells cannot be read
        yield f'{kind}; query="text" gives its text, grep searches it'
        return
    at = tail.rfind(b"PK\x05\x06")
    claimed = int.from_bytes(tail[at + 12 : at + 16], "little")
    if at < 0 or len(tail) < at + 22 or claimed > _DIRECTORY or b"PK\x06\x07" in tail:  # the last: ZIP64, no limit
        yield "Its directory is missing or too large to list."
        return
    try:
        with zipfile.ZipFile(ArtifactStream(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        yield f"Its directory cannot be read: {clip(str(error))}"
        return
    yield f"{len(entries):,} entries that claim {sum(entry.file_size for entry in entries):,} bytes; not unpacked here:"
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
