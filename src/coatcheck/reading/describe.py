"""A page about content that is no text: what it is, its size, an image's dimensions, a PDF's pages, an archive's names.

Only heads, tails and directories are looked at. Nothing is unpacked here, whatever it claims to hold; a PDF is opened
in a child process that can be killed.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Final

from coatcheck.errors import CoatcheckError, MissingExtra
from coatcheck.ids import clip
from coatcheck.media import TEXT
from coatcheck.reading.answer import Answer
from coatcheck.reading.documents import essence
from coatcheck.reading.pdf import PdfLimits, ask
from coatcheck.streams import ArtifactStream, Content

PAGE: Final = 8_000
_HEAD: Final = 64 << 10
_TAIL: Final = 64 << 10
_DIRECTORY: Final = 4 << 20
_NAMES: Final = 40
_DUMP: Final = 128


def describe(content: Content, *, max_chars: int = PAGE, limits: PdfLimits = PdfLimits(seconds=5)) -> Answer:  # noqa: B008
    """What can be said of a content without showing it, in at most `max_chars` characters."""
    media = essence(content.ref.media_type)
    head = content.read(0, _HEAD)
    lines = [f"{media}, {content.size:,} bytes"]
    if not content.size:
        lines.append("It is empty.")
    elif media.startswith("image/"):
        lines.append(_image(head) or "Its dimensions cannot be told from its head.")
    elif media == "application/pdf":
        lines.extend(_pdf(content, limits))
    elif media in _ABOUT:
        lines.extend(_ABOUT[media](content, head))
    if not media.startswith("image/") and media != "application/pdf" and content.size:
        lines.extend(_dump(head))
    text = "\n".join(lines)
    cut = len(text) > max_chars
    return Answer(text[:max_chars], TEXT, "description", complete=not cut, note="the description is cut" if cut else "")


def _image(head: bytes) -> str:
    size = _dimensions(head)
    return f"{size[0]:,} x {size[1]:,} pixels" if size else ""


def _dimensions(head: bytes) -> tuple[int, int] | None:
    """Width and height of PNG, GIF, JPEG, WebP and BMP."""
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        return struct.unpack(">II", head[16:24])
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return struct.unpack("<HH", head[6:10])
    if head[:2] == b"BM" and len(head) >= 26:
        width, height = struct.unpack("<ii", head[18:26])
        return width, abs(height)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    return _jpeg(head) if head[:2] == b"\xff\xd8" else None


def _webp(head: bytes) -> tuple[int, int] | None:
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head[12:16] == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(head: bytes) -> tuple[int, int] | None:
    """The frame header, found by stepping from marker to marker."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return width, height
        at += 1 if marker == 0xFF else 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


def _pdf(content: Content, limits: PdfLimits) -> Iterator[str]:
    try:
        told = ask(content, 1, 0, 0, limits)
    except MissingExtra as error:
        yield f"Its pages and text need the extra 'pdf': {error.hint}"
        return
    except CoatcheckError as error:
        yield f"It could not be opened: {error.message}"
        return
    if told["encrypted"]:
        yield "encrypted"
    if told["pages"]:
        yield f"{told['pages']:,} pages"
    for key, value in told["about"].items():
        yield f"{key}: {clip(value, 200)}"
    if told["pages"]:
        yield "query='page 1' gives the text of a page, query='pages 2-5' of several"


def _gzip(content: Content, head: bytes) -> Iterator[str]:
    if len(head) >= 10 and head[3] & 8 and not head[3] & 4:
        name = head[10 : head.find(b"\0", 10)] if b"\0" in head[10:300] else b""
        if name:
            yield f"holds {clip(name.decode('latin-1'))}"
    claimed = int.from_bytes(content.read(max(0, content.size - 4), 4), "little")
    yield f"Compressed; it says that it unpacks to {claimed:,} bytes (modulo 4 GiB). It is not unpacked here."


def _zstd(content: Content, head: bytes) -> Iterator[str]:
    yield "Compressed. It is not unpacked here."


def _zip(content: Content, head: bytes) -> Iterator[str]:
    """The names and sizes that the archive's directory claims, where the directory is of a reasonable size."""
    tail = content.read(max(0, content.size - _TAIL), _TAIL)
    at = tail.rfind(b"PK\x05\x06")
    claimed = int.from_bytes(tail[at + 12 : at + 16], "little")
    if at < 0 or len(tail) < at + 22 or claimed > _DIRECTORY or b"PK\x06\x07" in tail:  # the last: ZIP64, of any size
        yield "Its directory is missing, or too large to be listed."
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


def _sqlite(content: Content, head: bytes) -> Iterator[str]:
    size = int.from_bytes(head[16:18], "big")
    yield f"pages of {65_536 if size == 1 else size:,} bytes, {int.from_bytes(head[28:32], 'big'):,} of them"


def _parquet(content: Content, head: bytes) -> Iterator[str]:
    yield "query='DESCRIBE artifact' gives its columns, query='SELECT … FROM artifact' its rows"


def _wave(content: Content, head: bytes) -> Iterator[str]:
    at = head.find(b"fmt ")
    if 0 <= at <= len(head) - 24:
        channels, rate, per_second = struct.unpack("<HII", head[at + 10 : at + 20])
        seconds = f", about {content.size / per_second:,.1f} s" if per_second else ""
        yield f"{channels} channels at {rate:,} Hz{seconds}"


_ABOUT: Final[dict[str, Callable[[Content, bytes], Iterator[str]]]] = {
    "application/gzip": _gzip,
    "application/zstd": _zstd,
    "application/zip": _zip,
    "application/vnd.sqlite3": _sqlite,
    "application/vnd.apache.parquet": _parquet,
    "audio/wav": _wave,
}


def _dump(head: bytes) -> Iterator[str]:
    """The first bytes, as hexadecimal digits and as the characters that can be printed."""
    yield f"first {min(_DUMP, len(head))} bytes:"
    for at in range(0, min(_DUMP, len(head)), 16):
        row = head[at : at + 16]
        yield f"  {at:04x}  {row.hex(' '):<47}  {re.sub(rb'[^ -~]', b'.', row).decode('ascii')}"
