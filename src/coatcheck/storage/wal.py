"""Detect damage to SQLite's write-ahead log, which SQLite itself does not report.

When SQLite opens a log that a crash left behind, it keeps the valid frames at its beginning and
ignores the rest. That is right for a commit that was never synced, but damage in the middle looks
the same, and later commits are lost. The index of the log (the `-shm` file) tells them apart: its
number of frames grows only after the frames are written and, with `synchronous=FULL`, synced. (A
process that opens a log after a crash syncs it first.) If SQLite finds fewer frames than the index
names, some were damaged.

After a power cut, the index on disk may be older than the log, but never newer than what was
synced. Without syncs (`synchronous=NORMAL`) it may be newer: then acknowledged commits are lost,
and reporting that is right too.

The layouts are those of https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import os
import struct
from typing import Final, NamedTuple

_INDEX: Final = struct.Struct("=12xB3xI12x8s8x")
"""The header of the index: whether it is initialized, the number of frames, the salts of the
log."""
# After two equal headers: the number of frames that the database has.
_COPIED_AT: Final = 2 * _INDEX.size
_LOG: Final = struct.Struct(">I12x8sII")
"""The header of the log: magic number, salts, checksum."""
_MAGIC: Final = 0x377F0682  # the last bit says in which byte order checksums are computed
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class LogIndex(NamedTuple):
    """What the index says about a log: its salts, its frames, and how many of these the database
    has."""

    salts: bytes
    frames: int
    copied: int


def read_index(name: str, folder: int) -> LogIndex | None:
    """Return what an index file says, or None if there is none or it is not valid. Not for a
    database that this process has open: closing a second descriptor of the file would drop SQLite's
    locks on it."""
    data = _read(name, folder, _COPIED_AT + 4)
    header = data[: _INDEX.size]
    if len(data) < _COPIED_AT + 4 or header != data[_INDEX.size : _COPIED_AT]:
        return None
    is_initialized, frames, salts = _INDEX.unpack(header)
    if is_initialized != 1:
        return None
    (copied,) = struct.unpack_from("=I", data, _COPIED_AT)
    return LogIndex(salts, frames, copied)


def read_salts(name: str, folder: int) -> bytes | None:
    """Return the salts of a log file, or None if it is missing, empty, or its header is damaged."""
    header = _read(name, folder, _LOG.size)
    if len(header) < _LOG.size:
        return None
    magic, salts, *checksum = _LOG.unpack(header)
    if magic | 1 != _MAGIC | 1 or checksum != _checksum(
        header[:24], "<" if magic == _MAGIC else ">"
    ):
        return None
    return bytes(salts)


def lost_frames(index: LogIndex, salts: bytes | None, found: int) -> int:
    """Return the number of frames that are missing from a log: `index` is from before SQLite opened
    it, `salts` are those of the log itself, and `found` is the number of frames that SQLite
    accepted."""
    if salts is None:
        return max(0, index.frames - index.copied)
    if salts != index.salts:
        return 0  # the index belongs to an earlier log
    return max(0, index.frames - found)


def _checksum(data: bytes, order: str) -> list[int]:
    one = two = 0
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        one = (one + words[at] + two) & 0xFFFFFFFF
        two = (two + words[at + 1] + one) & 0xFFFFFFFF
    return [one, two]


def _read(name: str, folder: int, size: int) -> bytes:
    try:
        file = os.open(name, _READ, dir_fd=folder)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(file, size, 0)
    finally:
        os.close(file)
