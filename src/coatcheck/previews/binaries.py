"""Binary content: its size and what its header says, never its bytes as text."""

from __future__ import annotations

import codecs
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from coatcheck import media
from coatcheck.deferred import lazy_pattern
from coatcheck.image_size import pixels

from .excerpts import Preview, is_installed, line, pack, some, sql

if TYPE_CHECKING:
    from . import Sample

_PDF: Final = "application/pdf"
_BINARY: Final = ("image/", "audio/", "video/", "font/")
_PAGES: Final = lazy_pattern(rb"/Type[ \r\n]{0,4}/Pages\b")
_COUNT: Final = lazy_pattern(rb"/Count[ \r\n]{0,4}(\d{1,7})")
_LINEAR: Final = lazy_pattern(rb"/Linearized[^<>]{0,200}/N (\d{1,7})")
_OBJECTS: Final = lazy_pattern(rb"/Type[ \r\n]{0,4}/ObjStm\b")
_PRODUCER: Final = lazy_pattern(rb"/(?:Producer|Creator)[ \r\n]{0,4}[(<]")
_TITLE: Final = lazy_pattern(
    rb"/Title[ \r\n]{0,4}(?:\(((?:[^\\()]|\\.){1,400})\)|<((?:[0-9A-Fa-f]{2}){1,400})>)", re.DOTALL
)
_ESCAPED: Final = lazy_pattern(rb"\\([()\\])")
_STREAMS: Final = 40
_PACKED: Final = 64 << 10
_STREAM: Final = 256 << 10
_MACHINES: Final = {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}
_OFFICE: Final = {"word/": "Word document", "xl/": "Excel workbook",
                  "ppt/": "PowerPoint presentation", "META-INF/MANIFEST.MF": "Java archive",
                  "AndroidManifest.xml": "Android package"}  # fmt: skip
_ZIP_ENTRY, _END_OF_ZIP = (
    b"PK\x01\x02",
    b"PK\x05\x06",
)  # signatures in the directory of a zip archive
_OPEN_DOCUMENT: Final = b"mimetypeapplication/vnd.oasis.opendocument."
_OPEN_KINDS: Final = {b"text": "OpenDocument text", b"presentation": "OpenDocument presentation",
                      b"spreadsheet": "OpenDocument spreadsheet"}  # fmt: skip
WORKBOOKS: Final = ("Excel workbook", "OpenDocument spreadsheet")
_READABLE: Final = (
    "Word document", "PowerPoint presentation", "OpenDocument text", "OpenDocument presentation",
    *WORKBOOKS,
)  # fmt: skip
_SHEET_FILE: Final = "xl/worksheets/"
_SHEET: Final = lazy_pattern(rb'<(?:\w+:)?sheet [^<>]*?name="([^"<>]*)"[^<>]*? r:id="([^"<>]*)"')
_SHEETS_END: Final = lazy_pattern(rb"</(?:\w+:)?sheets>")
_RELATION: Final = lazy_pattern(rb'Target="([^"<>]*)"[^<>]*? Id="([^"<>]*)"')
_RELATION_BACK: Final = lazy_pattern(rb'Id="([^"<>]*)"[^<>]*? Target="([^"<>]*)"')
_DIMENSION: Final = lazy_pattern(
    rb'<(?:\w+:)?dimension ref="([A-Z]{1,3}\d{1,7}:[A-Z]{1,3}\d{1,7})"'
)
_UNPACKED: Final = 16 << 10
_BRANDS: Final = {
    "qt": "QuickTime video",
    "M4A": "M4A audio",
    "heic": "HEIC image",
    "avif": "AVIF image",
}
_IMAGES: Final = {  # the name of a format, and the text for an image whose dimensions are not found
    "image/png": ("PNG", ""), "image/gif": ("GIF", ""), "image/webp": ("WebP", "WebP image"),
    "image/jpeg": ("JPEG", "JPEG image, dimensions not near its beginning"),
}  # fmt: skip


def is_binary(essence: str) -> bool:
    """Whether content of this media type is never text."""
    return essence in _READERS or (essence.startswith(_BINARY) and not essence.endswith("+xml"))


def found_type(head: bytes, media_type: str) -> str:
    """The media type of content by its first bytes, if it was declared as text or unknown and is
    not text."""
    essence = media.essence(media_type)
    if not media.is_text(essence) and essence != media.BINARY:
        return media_type
    sniffed = media.sniff_bytes(head[: media.HEAD], b"")
    look = media.look(head)
    if sniffed == media.BINARY or not is_binary(sniffed) or (not look.has_odd and sniffed != _PDF):
        sniffed = media.BINARY if look.is_binary else media_type
    return sniffed


def binary(sample: Sample, media_type: str, limit: int) -> Preview:
    """Preview of type, size and header. The media type found in the bytes wins over the given
    one."""
    sniffed = media.sniff_bytes(sample.head[: media.HEAD], b"")
    essence = sniffed if is_binary(sniffed) and sniffed != media.BINARY else media_type
    name = header(sample, essence) or _unknown(essence)
    shape = f"{name}, {some(sample.size, 'byte')}"
    if len(shape) > limit:
        shape = line(name, limit)
    total, names = _inside(sample, essence, name)
    if names and len(shape) + 2 < limit:
        shape, _ = pack(f"{shape}: ", [line(each, 60) for each in names], total, limit)
    shown = f"what the header tells of {some(sample.size, 'byte')}"
    is_sql = name.startswith(WORKBOOKS) and is_installed("python_calamine")
    if is_sql and is_installed("duckdb"):
        shown += "; in SQL, artifact is the first sheet, each is a table by its name"
    return Preview(shape, shown, _first_read(sample, essence, name))


def _unknown(essence: str) -> str:
    """What content is called whose header says nothing."""
    named = line(essence, 60)
    is_text = media.is_text(essence)
    return f"binary data, though named {named}" if is_text else f"{named} content"


def _inside(sample: Sample, essence: str, name: str) -> tuple[int, list[str]]:
    """The number of sheets of a workbook or of entries of an archive, and their names."""
    if name.startswith(WORKBOOKS):
        sheets, is_cut = _sheets(sample)
        if sheets:
            names = [*sheets, "…"] if is_cut else sheets
            return len(names), names
    if essence != "application/zip":
        return 0, []
    total, names = _zip_entries(sample)
    return max(total, len(names)), names


def _first_read(sample: Sample, essence: str, name: str) -> str:
    """The read that shows the text or the rows of a document; empty if it has none."""
    if name.startswith(WORKBOOKS) and is_installed("python_calamine"):
        return sql(()) or 'query="text"'
    if essence == _PDF and is_installed("pypdf"):
        return 'query="text"' if re.search(r", [1-3] pages?\b", name) else 'query="page 1"'
    if sample.head.startswith(b"PK") and office_kind(sample):
        return 'query="text"'
    return ""


def header(sample: Sample, essence: str) -> str:
    """Describe the header of binary content; empty if there is nothing to say."""
    if essence in _IMAGES:
        name, otherwise = _IMAGES[essence]
        size = pixels(sample.head)
        return f"{name} image, {size[0]} × {size[1]} pixels" if size else otherwise
    reader = _READERS.get(essence, "")
    with suppress(struct.error, IndexError, ValueError):
        return reader if isinstance(reader, str) else reader(sample)
    return ""


def _wav(sample: Sample) -> str:
    channels, rate, per_second = struct.unpack_from("<HII", sample.head, 22)
    length = f", about {sample.size / per_second:.1f} s" if per_second else ""
    return f"WAV audio, {some(channels, 'channel')}, {rate} Hz{length}"


def _pdf(sample: Sample) -> str:
    """Version, title and number of pages, as far as they can be read from the bytes without a
    parser."""
    version = re.match(rb"%PDF-(\d\.\d)", sample.head)
    start = sample.read() if sample.read is not None else sample.head
    data = start if len(start) == sample.size else start + sample.tail
    data += b"\n".join(islice(_object_streams(data), _STREAMS))
    counts = set()
    for match in islice(_PAGES.finditer(data), 2_000):
        before = data[max(0, match.start() - 4_000) : match.start()].rpartition(b"<<")[2]
        about = before + b" " + data[match.end() : match.end() + 4_000].partition(b">>")[0]
        if b"/Parent" not in about:  # the root of the tree, which counts all pages
            counts |= {int(count) for count in _COUNT.findall(about)}
    linear = _LINEAR.search(sample.head, 0, 1_024)
    pages = int(linear.group(1)) if linear else counts.pop() if len(counts) == 1 else 0
    title = "" if b"/Encrypt" in data else _pdf_title(data)
    named = f" “{title}”" if title else ""
    counted = f", {some(pages, 'page')}" if pages else ""
    return f"PDF {version.group(1).decode() if version else ''}".rstrip() + named + counted


def _object_streams(data: bytes) -> Iterator[bytes]:
    """The objects that are packed in streams, the last ones first, each up to a size."""
    for match in reversed(list(_OBJECTS.finditer(data))):
        begin = data.find(b"stream", match.end(), match.end() + 400)
        packed = data[begin + 6 : begin + 6 + _PACKED].lstrip(b"\r\n") if begin >= 0 else b""
        with suppress(zlib.error):
            yield zlib.decompressobj().decompress(packed, _STREAM)


def _pdf_title(data: bytes) -> str:
    """The title in the dictionary that names the program; outlines have titles too."""
    program = _PRODUCER.search(data)
    if program is None:
        return ""
    low = max(0, program.start() - 1_000)
    around = (
        data[low : program.start()].rpartition(b"<<")[2]
        + data[program.start() : program.end() + 1_000]
    )
    match = _TITLE.search(around.partition(b">>")[0])
    if match is None:
        return ""
    raw = (
        bytes.fromhex(match[2].decode()) if match[2] is not None else _ESCAPED.sub(rb"\1", match[1])
    )
    is_wide = raw.startswith(codecs.BOM_UTF16_BE)
    return line(raw.decode("utf-16", "ignore") if is_wide else raw.decode("latin-1"), 80)


def _zip(sample: Sample) -> str:
    count, names = _zip_entries(sample)
    kind = _zip_kind(sample, names)
    if kind in WORKBOOKS:
        listed, is_cut = _sheets(sample)
        sheets = len(listed) or sum(name.startswith(_SHEET_FILE) for name in names)
        may_be_more = is_cut if listed else len(names) < count
        least = "at least " if may_be_more else ""
        if sheets:
            return f"{kind}, {least}{some(sheets, 'sheet')}"
    return f"{kind}, {count} entries" if count else kind


def office_kind(sample: Sample) -> str:
    """Name the kind of a zip archive whose text can be read: a Word document, a presentation; empty
    for others."""
    kind = _zip_kind(sample, _zip_entries(sample)[1])
    return kind if kind in _READABLE else ""


def _zip_kind(sample: Sample, names: list[str]) -> str:
    names = names or _last_zip_names(sample)
    if sample.head[30:].startswith(_OPEN_DOCUMENT):
        kind = sample.head[30 + len(_OPEN_DOCUMENT) :][:12]
        return next(
            (name for mark, name in _OPEN_KINDS.items() if kind.startswith(mark)),
            "OpenDocument file",
        )
    return next(
        (kind for mark, kind in _OFFICE.items() if any(name.startswith(mark) for name in names)),
        "zip archive",
    )


def _zip_entries(sample: Sample) -> tuple[int, list[str]]:
    """Number of entries of a zip archive, and their names if all of its directory is in the last
    bytes."""
    end = (
        sample.tail
        if len(sample.tail) > 1_024 or not sample.is_whole
        else sample.head + sample.tail
    )
    record = end.rfind(_END_OF_ZIP)
    if not 0 <= record <= len(end) - 22:
        return 0, []
    count, size = struct.unpack_from("<HI", end, record + 10)
    return count, _zip_names(end, record - size, record)


def _last_zip_names(sample: Sample) -> list[str]:
    """The names in that part of a zip archive's directory that is in the last bytes."""
    return _zip_names(sample.tail, sample.tail.find(_ZIP_ENTRY), sample.tail.rfind(_END_OF_ZIP))


def _zip_names(end: bytes, at: int, record: int) -> list[str]:
    """The first names of a zip archive's directory from a position on. `record` is where the
    directory ends."""
    names: list[str] = []
    while 0 <= at <= record - 46 and end[at : at + 4] == _ZIP_ENTRY and len(names) < 200:
        length, extra, comment = struct.unpack_from("<HHH", end, at + 28)
        names.append(end[at + 46 : at + 46 + length].decode("utf-8", "replace"))
        at += 46 + length + extra + comment
    return names


def _sheets(sample: Sample) -> tuple[list[str], bool]:
    """Names of the sheets of an Excel workbook with their ranges, if they are in its first or last
    bytes, and whether there may be more."""
    from html import unescape  # here, since few reads need it

    files = {
        match[2]: match[1]
        for match in _RELATION.finditer(_unpacked(sample, b"xl/_rels/workbook.xml.rels"))
    }
    files |= {
        match[1]: match[2]
        for match in _RELATION_BACK.finditer(_unpacked(sample, b"xl/_rels/workbook.xml.rels"))
    }
    found = []
    workbook = _unpacked(sample, b"xl/workbook.xml")
    for name, relation in _SHEET.findall(workbook):
        file = files.get(relation, b"").rpartition(b"/")[2]
        span = _DIMENSION.search(_unpacked(sample, _SHEET_FILE.encode() + file)) if file else None
        title = line(unescape(name.decode("utf-8", "replace")), 40)
        found.append(f'"{title}"' + (f" {span[1].decode()}" if span else ""))
    return found, _SHEETS_END.search(workbook) is None


def _unpacked(sample: Sample, name: bytes) -> bytes:
    """The beginning of a file in a zip archive, if it is in the first or last bytes."""
    for part in (sample.head, sample.tail):
        at = part.find(name)
        while at >= 0 and part[max(0, at - 30) : at - 26] != b"PK\x03\x04":
            at = part.find(name, at + 1)
        if at >= 30:
            method, length, extra = struct.unpack_from("<H16xHH", part, at - 22)
            start = at + length + extra
            with suppress(zlib.error):
                inflate = zlib.decompressobj(-15)
                return (
                    inflate.decompress(part[start:], _UNPACKED)
                    if method
                    else part[start : start + _UNPACKED]
                )
    return b""


def _gzip(sample: Sample) -> str:
    flags, name = sample.head[3], ""
    if flags & 0x08 and not flags & 0x04:
        name = sample.head[10 : sample.head.index(b"\x00", 10)].decode("latin-1")
    return "gzip" + (f" of {line(name, 60)}" if name else " compressed data")


def _sqlite(sample: Sample) -> str:
    page_size = struct.unpack_from(">H", sample.head, 16)[0]
    pages = struct.unpack_from(">I", sample.head, 28)[0]
    return f"SQLite database, {pages} pages of {65_536 if page_size == 1 else page_size} bytes"


def _elf(sample: Sample) -> str:
    machine = struct.unpack_from("<H" if sample.head[5] == 1 else ">H", sample.head, 18)[0]
    return (
        f"ELF {64 if sample.head[4] == 2 else 32}-bit binary, "
        f"{_MACHINES.get(machine, f'machine {machine}')}"
    )


def _mp4(sample: Sample) -> str:
    brand = sample.head[8:12].decode("ascii", "replace").strip()
    return _BRANDS.get(brand, f"MP4 video ({line(brand, 8)})")


_READERS: Final[dict[str, str | Callable[[Sample], str]]] = {
    "audio/wav": _wav, "application/pdf": _pdf, "application/zip": _zip, "application/gzip": _gzip,
    "application/vnd.sqlite3": _sqlite, "application/x-elf": _elf, "video/mp4": _mp4,
    media.BINARY: "binary data", "application/vnd.apache.parquet": "Parquet table",
    "application/zstd": "zstd compressed data", "audio/ogg": "Ogg audio or video",
    "audio/mpeg": "MP3 audio", "video/x-msvideo": "AVI video",
}  # fmt: skip
