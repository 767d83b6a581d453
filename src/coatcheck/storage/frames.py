"""Frames: a checksum and a line count for every 256 KiB of a blob.

A range read touches one or two frames, detects damage in them, and finds a line by its number. The record of a frame
has 12 bytes: XXH3-64 of its bytes, then its number of line feeds.
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
    """The result of a `Framer`."""

    digest: str
    size: int
    frames: bytes


class Framer:
    """Takes bytes in pieces of any size, and computes their digest, size and frames."""

    def __init__(self, digest: str | None = None) -> None:
        """If `digest` is given, it is not computed."""
        self._size = 0
        self._digest = digest
        self._sha = hashlib.sha256()
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
    """Chunks whose frames are known, so that a blob store need not compute them again."""

    def __init__(self, chunks: Iterable[bytes], frames: bytes) -> None:
        super().__init__(chunks)
        self.frames = frames


def frames_of(data: bytes) -> bytes:
    """Return the frames of complete content."""
    framer = Framer("")
    framer.update(data)
    return framer.finish().frames


def check_frame(frames: bytes, index: int, data: bytes | memoryview, what: str) -> None:
    """Raise `Damaged` unless the data matches the frame's checksum."""
    at = index * _RECORD.size
    if at >= len(frames) or xxhash.xxh3_64_intdigest(data) != _RECORD.unpack_from(frames, at)[0]:
        raise Damaged(f"frame {index} of blob {what} does not match its checksum")


def line_counts(frames: bytes) -> Sequence[int]:
    """Return the number of line feeds in each frame: every third word of the records. A gigabyte has 4,096 frames."""
    words = array("I", frames)
    if sys.byteorder == "big":
        words.byteswap()
    return words[2::3]
