"""Frames: a checksum and a line count for every 256 KiB of a blob.

They let a range read touch one or two frames, notice bit rot in what it touched, and find a line by its number. A
frame's record is 12 bytes: XXH3-64 of its bytes, then how many line feeds it has.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from coatcheck.errors import Damaged

FRAME = 256 * 1024
_RECORD = struct.Struct("<QI")


class Framed(NamedTuple):
    """What is known of bytes that went through a `Framer`."""

    digest: str
    size: int
    frames: bytes


class Framer:
    """Takes bytes in pieces of any size; knows their digest, size and frames at the end."""

    def __init__(self, digest: str | None = None) -> None:
        """With a digest that is known already, nothing is hashed again."""
        self._size = 0
        self._digest = digest
        self._sha = hashlib.sha256()
        self._frames = bytearray()
        self._check = xxhash.xxh3_64()
        self._lines = 0
        self._room = FRAME

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks, each taken in on its way."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def update(self, data: bytes) -> None:
        if self._digest is None:
            self._sha.update(data)
        view, at, size = memoryview(data), 0, len(data)
        self._size += size
        while at < size:
            end = min(at + self._room, size)
            self._check.update(view[at:end])
            self._lines += data.count(b"\n", at, end)
            self._room -= end - at
            at = end
            if not self._room:
                self._close_frame()

    def finish(self) -> Framed:
        if self._room < FRAME:
            self._close_frame()
        return Framed(self._digest or self._sha.hexdigest(), self._size, bytes(self._frames))

    def _close_frame(self) -> None:
        self._frames += _RECORD.pack(self._check.intdigest(), self._lines)
        self._check.reset()
        self._lines = 0
        self._room = FRAME


class FramedChunks(list[bytes]):
    """Chunks whose frames are known: a blob store that sees this need not make them again."""

    def __init__(self, chunks: Iterable[bytes], frames: bytes) -> None:
        super().__init__(chunks)
        self.frames = frames


def frames_of(data: bytes) -> bytes:
    """The frames of bytes that are all here."""
    framer = Framer("")
    framer.update(data)
    return framer.finish().frames


def check_frame(frames: bytes, index: int, data: bytes | memoryview, what: str) -> None:
    """Raise `Damaged` unless this is what the frame held when it was written."""
    at = index * _RECORD.size
    if at >= len(frames) or xxhash.xxh3_64_intdigest(data) != _RECORD.unpack_from(frames, at)[0]:
        raise Damaged(f"frame {index} of blob {what} does not match its checksum")


def line_counts(frames: bytes) -> Sequence[int]:
    """How many line feeds each frame has, in order. Every third word of them: a gigabyte has 4,096 frames."""
    words = array("I", frames)
    if sys.byteorder == "big":
        words.byteswap()
    return words[2::3]
