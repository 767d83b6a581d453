"""Frames: a checksum and a line count for every 256 KiB of a blob.

A range read touches one or two frames, detects damage in them, and finds a line by its number. The
record of a frame has 12 bytes: XXH3-64 of its bytes, then its number of line feeds, or 0xFFFFFFFF
if they were not counted: then a reader that needs them counts them.

A cold copy is seekable zstd: every frame is compressed on its own, followed by a seek table, in the
format of zstd's contrib/seekable_format. Any zstd tool can decompress the file; we decompress only
the frames that a read touches.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import Damaged
from coatcheck.refs import Blob, Coding

FRAME = 256 * 1024
DIGEST: Final = lazy_pattern(r"[0-9a-f]{64}")
PLACE: Final = lazy_pattern(r"[0-9a-f]{16}\.(raw|zst)")
"""The name of a copy: random digits, and how it is coded."""
QUARANTINED: Final = lazy_pattern(r"([0-9a-f]{64})-([0-9a-f]{16}\.(raw|zst))-(\d{1,12})")
"""The name of a copy in quarantine: its digest, its place, and when it was moved there, in
seconds."""
CODINGS: Final[dict[str, Coding]] = {"raw": "raw", "zst": "zstd"}
_RECORD = struct.Struct("<QI")
_SKIPPABLE = struct.Struct("<II")
_ENTRY = struct.Struct("<II")
_FOOTER = struct.Struct("<IBI")
_SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER_MAGIC = 0x8F92EAB1
_LEVEL = 3
_NOT_COUNTED = 0xFFFF_FFFF
_SAMPLE = 4096
_LONG_LINE = 50
Pread = Callable[[int, int], bytes]
"""Reads bytes of a file or object, given an offset and a length."""


class Framed(NamedTuple):
    """The result of a `Framer`."""

    digest: str
    size: int
    frames: bytes


class Framer:
    """Takes bytes in pieces of any size, and computes their digest, size and frames."""

    def __init__(self, digest: str | None = None, *, counts: bool = True) -> None:
        """If `digest` is given, it is not computed. Without `counts`, lines are not counted."""
        self._size = 0
        self._counts = counts
        self._digest = digest
        self._sha = hashlib.sha256() if digest is None else None
        self._frames = bytearray()
        self._check = xxhash.xxh3_64()
        self._lines = 0
        self._room = FRAME

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same chunks, and add each to the result."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def update(self, data: bytes) -> None:
        if self._sha is not None:
            self._sha.update(data)
        view, at, size = memoryview(data), 0, len(data)
        self._size += size
        while at < size:
            end = min(at + self._room, size)
            self._check.update(view[at:end])
            if self._counts:
                self._lines += _line_feeds(data, at, end)
            self._room -= end - at
            at = end
            if not self._room:
                self._close_frame()

    def finish(self) -> Framed:
        if self._room < FRAME:
            self._close_frame()
        digest = self._digest if self._sha is None else self._sha.hexdigest()
        return Framed(digest or "", self._size, bytes(self._frames))

    def _close_frame(self) -> None:
        self._frames += _RECORD.pack(
            self._check.intdigest(), self._lines if self._counts else _NOT_COUNTED
        )
        self._check.reset()
        self._lines = 0
        self._room = FRAME


class FramedChunks(list[bytes]):
    """Chunks whose digest and frames are known, so that a blob store need not compute them
    again."""

    def __init__(self, chunks: Iterable[bytes], framed: Framed) -> None:
        super().__init__(chunks)
        self.framed = framed


def framing(
    chunks: Iterable[bytes], digest: str | None, *, counts: bool = True
) -> tuple[Iterable[bytes], Callable[[], Framed]]:
    """Return the same chunks, and a function that returns their digest, size and frames once all
    were taken."""
    if isinstance(chunks, FramedChunks):
        return chunks, lambda: chunks.framed
    framer = Framer(digest, counts=counts)
    return framer.through(chunks), framer.finish


def framed(data: bytes) -> Framed:
    """Return the digest and the frames of complete content."""
    framer = Framer()
    framer.update(data)
    return framer.finish()


def _line_feeds(data: bytes, start: int, end: int) -> int:
    """Return the number of line feeds in a range. `bytes.count` compares every byte, and `replace`
    skips from one line feed to the next: it takes a third of the time if lines are long, and much
    longer if they are short."""
    sampled = data.count(b"\n", start, min(end, start + _SAMPLE))
    if sampled * _LONG_LINE > _SAMPLE or end - start <= _SAMPLE:
        return data.count(b"\n", start, end)
    piece = data[start:end]
    return len(piece) - len(piece.replace(b"\n", b""))


def check_size(blob: Blob) -> None:
    """Raise `Damaged` unless a blob has as many frames as its size requires."""
    if len(blob.frames) != -(-blob.size // FRAME) * _RECORD.size:
        raise Damaged(f"the size of blob {blob.digest} does not match its frames")


def check_frame(blob: Blob, index: int, data: bytes | memoryview) -> None:
    """Raise `Damaged` unless the data matches the frame's checksum and the blob's size."""
    at = index * _RECORD.size
    if (
        at >= len(blob.frames)
        or xxhash.xxh3_64_intdigest(data) != _RECORD.unpack_from(blob.frames, at)[0]
    ):
        raise Damaged(f"frame {index} of blob {blob.digest} does not match its checksum")
    if len(data) != min(FRAME, blob.size - index * FRAME):
        raise Damaged(f"the size of blob {blob.digest} does not match frame {index}")


def line_counts(frames: bytes) -> Sequence[int]:
    """Return the number of line feeds in each frame: every third word of the records. A gigabyte
    has 4,096 frames. Return nothing if they were not counted."""
    words = array("I", frames)
    if sys.byteorder == "big":
        words.byteswap()
    counts = words[2::3]
    return () if _NOT_COUNTED in counts[:1] else counts


def _zstd() -> Any:
    """Import zstd on first use: only cold copies need it."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def is_worthwhile(frame: bytes) -> bool:
    """Return whether compression saves at least 10 %, judged by one frame."""
    return len(_zstd().compress(frame, _LEVEL)) < 0.9 * len(frame)


def compressed(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the compressed frames, then the seek table."""
    table = bytearray()
    count = 0
    for frame in frames:
        packed = _zstd().compress(frame, _LEVEL)
        table += _ENTRY.pack(len(packed), len(frame))
        count += 1
        yield packed
    table += _FOOTER.pack(count, 0, _FOOTER_MAGIC)
    yield _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(table)) + bytes(table)


class SeekTable(NamedTuple):
    """The seek table: the size of the file, and the size of each compressed frame."""

    size: int
    packed: tuple[int, ...]
    what: str

    @classmethod
    def of(cls, size: int, pread: Pread, what: str) -> SeekTable:
        """Read the table at the end of a file. Raises `Damaged` if it is invalid."""
        footer = pread(max(0, size - _FOOTER.size), _FOOTER.size)
        if len(footer) < _FOOTER.size:
            raise Damaged(f"the seek table of blob {what} is missing")
        count, flags, magic = _FOOTER.unpack(footer)
        table_size = count * _ENTRY.size
        if magic != _FOOTER_MAGIC or flags or table_size + _FOOTER.size > size:
            raise Damaged(f"the seek table of blob {what} is damaged")
        table = pread(size - _FOOTER.size - table_size, table_size)
        return cls(size, tuple(packed for packed, _ in _ENTRY.iter_unpack(table)), what)

    def read(self, first: int, last: int, pread: Pread) -> list[bytes]:
        """Return frames `first` to `last`, decompressed. Raises `Damaged` if the table or a frame
        is invalid."""
        if last >= len(self.packed):
            raise Damaged(f"the seek table of blob {self.what} is damaged")
        at = sum(self.packed[:first])
        sizes = self.packed[first : last + 1]
        if at + sum(sizes) > self.size:
            raise Damaged(f"the seek table of blob {self.what} is damaged")
        data = pread(at, sum(sizes))
        frames, start = [], 0
        for packed in sizes:
            frames.append(_unpack(data[start : start + packed], self.what))
            start += packed
        return frames


def _unpack(packed: bytes, what: str) -> bytes:
    """Decompress one frame, using at most the memory of a frame, whatever its header claims."""
    unpacker = _zstd().ZstdDecompressor()
    try:
        frame: bytes = unpacker.decompress(packed, max_length=FRAME)
    except _zstd().ZstdError as error:
        raise Damaged(f"a compressed frame of blob {what} is damaged") from error
    if not unpacker.eof:
        raise Damaged(f"a compressed frame of blob {what} is damaged")
    return frame
