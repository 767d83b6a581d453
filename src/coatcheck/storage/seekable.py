"""Seekable zstd: every frame of a blob is compressed on its own, followed by a seek table, in the format of zstd's
contrib/seekable_format. Any zstd tool can decompress the file; we decompress only the frames that a read touches.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from coatcheck.errors import Damaged
from coatcheck.storage.frames import FRAME

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_SKIPPABLE = struct.Struct("<II")
_ENTRY = struct.Struct("<II")
_FOOTER = struct.Struct("<IBI")
_SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER_MAGIC = 0x8F92EAB1
_LEVEL = 3


def is_worthwhile(frame: bytes) -> bool:
    """Return whether compression saves at least 10 %, judged by one frame."""
    return len(zstd.compress(frame, _LEVEL)) < 0.9 * len(frame)


def compress(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the compressed frames, then the seek table."""
    table = bytearray()
    count = 0
    for frame in frames:
        packed = zstd.compress(frame, _LEVEL)
        table += _ENTRY.pack(len(packed), len(frame))
        count += 1
        yield packed
    table += _FOOTER.pack(count, 0, _FOOTER_MAGIC)
    yield _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(table)) + bytes(table)


Pread = Callable[[int, int], bytes]
"""Reads bytes of a file or object, given an offset and a length."""


@dataclass(frozen=True, slots=True)
class Table:
    """The seek table: the size of the file, and the size of each compressed frame."""

    size: int
    packed: tuple[int, ...]
    what: str

    @classmethod
    def of(cls, size: int, pread: Pread, what: str) -> Table:
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
        """Return frames `first` to `last`, decompressed. Raises `Damaged` if the table or a frame is invalid."""
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
    unpacker = zstd.ZstdDecompressor()
    try:
        frame = unpacker.decompress(packed, max_length=FRAME)
    except zstd.ZstdError as error:
        raise Damaged(f"a compressed frame of blob {what} is damaged") from error
    if not unpacker.eof:
        raise Damaged(f"a compressed frame of blob {what} is damaged")
    return frame
