"""Frames: a checksum and a line count for every 256 KiB of a blob.

They let a range read touch one or two frames, notice bit rot in what it touched, and find a line by its number. A frame's
record is 12 bytes: XXH3-64 of its bytes, then how many line feeds it has.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

import xxhash

from coatcheck.errors import Damaged

FRAME = 256 * 1024
_RECORD = struct.Struct("<QI")


class Framer:
    """Takes bytes in pieces of any size; knows their digest, size and frames at the end."""

    def __init__(self, digest: str | None = None) -> None:
        self.size = 0
        self._known = digest
        self._sha = hashlib.sha256() if digest is None else None
        self._frames = bytearray()
        self._hash = xxhash.xxh3_64()
        self._lines = 0
        self._room = FRAME

    def update(self, data: bytes) -> None:
        if self._sha is not None:
            self._sha.update(data)
        view, at, size = memoryview(data), 0, len(data)
        self.size += size
        while at < size:
            end = min(at + self._room, size)
            self._hash.update(view[at:end])
            self._lines += data.count(b"\n", at, end)
            self._room -= end - at
            at = end
            if not self._room:
                self._close_frame()

    def finish(self) -> tuple[str, bytes]:
        """The digest, and the records of all frames."""
        if self._room < FRAME:
            self._close_frame()
        digest = self._known if self._sha is None else self._sha.hexdigest()
        assert digest is not None
        return digest, bytes(self._frames)

    def _close_frame(self) -> None:
        self._frames += _RECORD.pack(self._hash.intdigest(), self._lines)
        self._hash.reset()
        self._lines = 0
        self._room = FRAME


def frames_of(data: bytes) -> bytes:
    framer = Framer("")
    framer.update(data)
    return framer.finish()[1]


def check_frame(frames: bytes, index: int, data: bytes | memoryview, what: str) -> None:
    """Raise `Damaged` unless this is what the frame held when it was written."""
    at = index * _RECORD.size
    if at >= len(frames) or xxhash.xxh3_64_intdigest(data) != _RECORD.unpack_from(frames, at)[0]:
        raise Damaged(f"frame {index} of blob {what} does not match its checksum")


def line_counts(frames: bytes) -> Iterator[int]:
    """How many line feeds each frame has, in order."""
    for _, lines in _RECORD.iter_unpack(frames):
        yield lines


def in_frames(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of exactly one frame, but for the last."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        while len(rest) >= FRAME:
            yield bytes(rest[:FRAME])
            del rest[:FRAME]
    if rest:
        yield bytes(rest)
