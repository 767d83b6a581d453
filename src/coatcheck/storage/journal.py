"""The journal: an append-only file through which puts reach the catalog.

A put is acknowledged once its record is here (and synced, if durability requires it). This takes one write and one
sync, however many database pages the row will touch. The database applies the records in batches. The header says where
the valid part ends: bytes after it are left over from a crash, and the next writer truncates them.

Header, marker and records each have a checksum. Damage affects only the records it hits: the head of a record is bound
to its journal and its offset, so the next one can be found by searching, and content cannot be mistaken for a record.
The marker says how far the journal is known to be synced. Damage before it is a loss. After it, an unwritten place is
the result of a power cut during puts that were not acknowledged.

The caller holds the store's lock for everything but `sync`, `grown`, `ends_at` and `behind`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from coatcheck.deferred import logger
from coatcheck.errors import StoreUnavailable
from coatcheck.storage.disk import Disk
from coatcheck.storage.forks import Mutex

NAME = "journal"
_MAGIC = b"coatchk2"
_HEADER = struct.Struct("<8s8sQQ")  # magic, journal id, end, whether the reserve is used up; then a checksum
_MARKER = struct.Struct("<8sQ")  # journal id, how far it is synced; then a checksum
_CHECKSUM = struct.Struct("<Q")
_STATE_AT = 16  # where the variable part of the header begins: the end, the flag and the checksum
_MARKER_AT = _HEADER.size + _CHECKSUM.size
START = _MARKER_AT + _MARKER.size + _CHECKSUM.size
_SYNC = b"\xc0\xa7\x1e\x9d"
_RECORD = struct.Struct("<4sIQQ")  # sync word, length and checksum of the payload, checksum of the head
_HEAD_KEY = struct.Struct("<8sQIQ")  # journal id, offset, length and checksum of the payload
_SECTOR = 512
_PIECE = 1024 * 1024
_PATIENCE = 0.05  # seconds, after which a thread looks again: an interrupt may have kept another from waking it
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

RESERVE = "reserve"
_FULL_SIZE = 8 * 1024 * 1024
_SMALLEST = 64 * 1024
_PAGES_OF_A_RECORD = 32 * 1024  # one row in each table and index, each on a page of its own


class Position(NamedTuple):
    """The position of a record in one journal. `sync` must reach its end."""

    journal_id: bytes
    start: int
    end: int


class Journal:
    """The current journal file. Another process may replace it; `refresh` detects that."""

    def __init__(self, folder: int, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._file = -1
        self._syncing = Mutex()
        self._ended = threading.Event()  # set when the sync that is running ends
        self._synced = 0
        self._marked = START  # how far it is certainly synced, according to the marker in the file
        self.journal_id = b""
        self.end = START
        self._header_seen = b""  # header and marker, as this process last read or wrote them
        self.seen = 0  # how much of it the database has applied, as far as this process knows
        self.strained = False
        self.is_unsound = False

    def grown(self) -> bool:
        """Return whether the journal differs from what was seen: longer, shorter, or another file."""
        try:
            info = os.fstat(self._file)
        except OSError:
            return True  # closed meanwhile: the caller's next call raises
        return info.st_size != self.seen or not info.st_nlink

    def ends_at(self, journal_id: bytes, end: int) -> bool:
        """Return whether this is still the journal with this id, and ends at this offset."""
        try:
            info = os.fstat(self._file)
        except OSError:
            return False
        return info.st_size == end and info.st_nlink > 0 and self.journal_id == journal_id  # the id last: see `_take`

    def behind(self, journal_id: bytes, start: int) -> list[tuple[int, bytes]] | None:
        """Return the payloads of this journal after an offset, each with the offset where it ends. Return None if that
        needs the lock: the journal was replaced, or is damaged."""
        try:
            header = os.pread(self._file, _MARKER_AT, 0)
            if not os.fstat(self._file).st_nlink or not _is_sealed(header, _HEADER.size):
                return None
            magic, found_id, end, _ = _HEADER.unpack_from(header)
            if magic != _MAGIC or found_id != journal_id or end < start:
                return None
            data = os.pread(self._file, end - start, start)  # complete: the header is written after the records
        except OSError:
            return None
        found, at = [], 0
        while at < len(data):
            head = data[at : at + _RECORD.size]
            if len(head) < _RECORD.size or head[:4] != _SYNC:
                return None
            _, size, checksum, seal = _RECORD.unpack(head)
            payload = data[at + _RECORD.size : at + _RECORD.size + size]
            is_valid = seal == _seal(journal_id, start + at, size, checksum)
            if not is_valid or len(payload) < size or xxhash.xxh3_64_intdigest(payload) != checksum:
                return None
            at += _RECORD.size + size
            found.append((start + at, payload))
        return found if start + at == end else None

    def is_synced(self) -> bool:
        """Return whether this process knows that the seen part of the journal is durable."""
        return self._synced >= self.seen

    def refresh(self) -> None:
        """Reread the journal's state, and truncate what a crash left half-written."""
        info = os.fstat(self._file) if self._file >= 0 else None
        if info is None or not info.st_nlink:
            self._reopen()
            info = os.fstat(self._file)
        header = os.pread(self._file, START, 0)
        if header == self._header_seen and info.st_size == self.end:
            return
        marker = header[_MARKER_AT:]
        journal_id, self._marked = _MARKER.unpack_from(marker) if _is_sealed(marker, _MARKER.size) else (b"", START)
        if _is_sealed(header[:_MARKER_AT], _HEADER.size) and header[:8] == _MAGIC:
            _, self.journal_id, self.end, strained = _HEADER.unpack_from(header)
            self.strained = bool(strained)
            if journal_id != self.journal_id:
                self._marked = START
        elif journal_id:
            self._mend_header(journal_id)
        else:
            raise StoreUnavailable(
                "the journal of the store has no valid header",
                hint="move the file 'journal' away: everything but the last puts is in the catalog",
            )
        if os.fstat(self._file).st_size > self.end:
            self._disk.truncate(self._file, self.end)
        self._header_seen = header

    def append(self, payload: bytes) -> Position:
        record = _record(self.journal_id, self.end, payload)
        end = self.end + len(record)
        header = self._header(end)
        try:
            self._disk.write_at(self._file, record, self.end)
        except OSError:
            self._disk.truncate(self._file, self.end)
            raise
        self._disk.write_at(self._file, header[_STATE_AT:], _STATE_AT)
        self._header_seen = header + self._header_seen[_MARKER_AT:]
        start, self.end = self.end, end  # last: a concurrent sync in another thread may count all up to it as synced
        return Position(self.journal_id, start, end)

    def strain(self, strained: bool) -> None:
        """Record for all writers whether the reserve is used up."""
        self.strained = strained
        if self._file >= 0:
            self._write_state(self.end)

    def sync(self, position: Position) -> None:
        """Return once the journal is durable up to the position. One sync serves all waiting threads."""
        while True:
            ended = self._ended  # before the check: a sync that ends after it sets this event
            if self._is_durable(position):
                return
            try:
                has_synced = self._syncing.try_run(lambda: self._sync(position))
            except BaseException:
                self._wake()
                raise
            if has_synced:
                self._wake()
            elif self._syncing.is_owned():
                self._syncing.run(lambda: None)  # raises
            else:
                ended.wait(_PATIENCE)

    def _is_durable(self, position: Position) -> bool:
        # A journal is replaced only after the database has applied all of it durably.
        return position.journal_id != self.journal_id or self._synced >= position.end

    def _wake(self) -> None:
        """Wake the threads that wait for the end of a sync. Call it after `_syncing` is released."""
        ended, self._ended = self._ended, threading.Event()
        ended.set()

    def _sync(self, position: Position) -> bool:
        if self._is_durable(position):
            return True
        if self.is_unsound:
            raise OSError(errno.EIO, "an earlier sync of the journal failed")
        end = self.end
        try:
            self._disk.sync_data(self._file)
        except OSError:
            # The system may have dropped the data it could not write, and a second sync would not report that.
            self.is_unsound = True
            raise
        self._synced = end
        if self._disk.durable:
            with contextlib.suppress(OSError):  # the marker only distinguishes damage from the result of a power cut
                self._disk.write_at(self._file, _sealed(_MARKER.pack(position.journal_id, end)), _MARKER_AT)
        return True

    def records(self, start: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield payloads from an offset, each with the offset after it; None for each damaged part.

        Parts that were not written because of a power cut are skipped, and truncated at the end of the journal."""
        for at, behind, payload in self._walk(max(start, START), self.end):
            if payload is not None or not self._is_unwritten(at, behind):
                yield behind, payload
            elif behind >= self.end:
                self._cut(at)

    def keep_aside(self) -> str:
        """Copy the journal to a separate file. Returns the file's name."""
        name, spare = f"{NAME}.damaged-{self.journal_id.hex()}", f"{NAME}.copy"
        self._disk.remove(spare, self._folder)
        file = self._disk.create(spare, self._folder)
        try:
            end = min(self.end, self._size())
            for at in range(0, end, _PIECE):
                self._disk.write(file, os.pread(self._file, min(_PIECE, end - at), at))
            self._disk.sync(file, always=True)
            self._disk.rename(spare, self._folder, name, self._folder)
            self._disk.sync(self._folder, always=True)
        finally:
            os.close(file)
        return name

    def replace(self) -> None:
        """Start an empty journal in place of this one, after the database has applied its records durably."""
        spare, journal_id = f"{NAME}.new", os.urandom(8)
        self._disk.remove(spare, self._folder)
        file = self._disk.create(spare, self._folder)
        try:
            header = _sealed(_HEADER.pack(_MAGIC, journal_id, START, self.strained))
            self._disk.write(file, header + _sealed(_MARKER.pack(journal_id, START)))
            self._disk.sync(file, always=True)
            self._disk.rename(spare, self._folder, NAME, self._folder)
            self._disk.sync(self._folder, always=True)
        finally:
            os.close(file)
        self._reopen()
        self.refresh()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _walk(self, start: int, end: int) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield the start, end and payload of each record; the payload is None for a part without a valid record."""
        at = start
        while at < end:
            head = self._head_at(at, end)
            if head is None:
                behind, payload = self._next_head(at + 1, end), None
            else:
                size, checksum = head
                behind = at + _RECORD.size + size
                payload = os.pread(self._file, min(size, self._size()), at + _RECORD.size)
                if xxhash.xxh3_64_intdigest(payload) != checksum:
                    payload = None
            yield at, behind, payload
            at = behind

    def _head_at(self, at: int, end: int) -> tuple[int, int] | None:
        """Return length and checksum of the payload if a record begins at this offset, else None."""
        head = os.pread(self._file, _RECORD.size, at)
        if len(head) < _RECORD.size or head[:4] != _SYNC:
            return None
        _, size, checksum, seal = _RECORD.unpack(head)
        is_valid = seal == _seal(self.journal_id, at, size, checksum) and at + _RECORD.size + size <= end
        return (size, checksum) if is_valid else None

    def _next_head(self, at: int, end: int) -> int:
        # A damaged header may say that the journal ends anywhere: only what is in the file is read, a piece at a time.
        while at < end and (data := os.pread(self._file, min(_PIECE, end - at), at)):
            found = data.find(_SYNC)
            while found >= 0:
                if self._head_at(at + found, end) is not None:
                    return at + found
                found = data.find(_SYNC, found + 1)
            at += max(1, len(data) - len(_SYNC) + 1)
        return end

    def _is_unwritten(self, at: int, end: int) -> bool:
        """Return whether this part looks like the result of a power cut: not known to be synced, and with a sector that
        is missing or zero."""
        if at < self._marked:
            return False
        if self._size() < end:
            return True
        data = os.pread(self._file, end - at, at)
        edges = [at, *range(at - at % _SECTOR + _SECTOR, end, _SECTOR), end]
        sectors = (data[one - at : other - at] for one, other in itertools.pairwise(edges))
        return not all(map(any, sectors))

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def _mend_header(self, journal_id: bytes) -> None:
        """Rewrite a damaged header, using the id in the marker and the records themselves."""
        logger().warning("The header of the store's journal is damaged. It is rebuilt from the records.")
        self.journal_id, self.strained = journal_id, True  # so that the reserve is checked and the flag corrected
        end = size = os.fstat(self._file).st_size
        for at, behind, payload in self._walk(START, size):
            if payload is None and behind >= size and self._is_unwritten(at, behind):
                end = at
        self._write_state(end, whole=True)
        self.end = end

    def _write_state(self, end: int, *, whole: bool = False) -> None:
        at = 0 if whole else _STATE_AT
        self._disk.write_at(self._file, self._header(end)[at:], at)

    def _header(self, end: int) -> bytes:
        return _sealed(_HEADER.pack(_MAGIC, self.journal_id, end, self.strained))

    def _cut(self, end: int) -> None:
        self.end = end
        self._write_state(end)
        self._disk.truncate(self._file, end)

    def _reopen(self) -> None:
        try:
            file = os.open(NAME, _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            if NAME in os.listdir(self._folder):
                raise  # the file exists: a new one would replace it
            self.journal_id = b""
            self.replace()
            return
        self._syncing.run(lambda: self._take(file))
        self._wake()

    def _take(self, file: int) -> None:
        # First: another journal may have the same length, and no part of it is known to be synced.
        self.seen = 0
        self._synced = START
        self.journal_id = b""
        self.is_unsound = False
        self._header_seen = b""
        if self._file < 0:
            self._file = file
        else:
            os.dup2(file, self._file, inheritable=False)  # another thread may be using the descriptor in `grown`
            os.close(file)


class Reserve:
    """Reserved space, so that a store on a full disk can still be read and cleaned up.

    The records of the journal must fit into the database later, and forgetting needs some space before it frees any.
    The reserve is a file of allocated bytes for that. While it is not full, the store accepts no new content. The sizes
    keep the needs of one step within the reserve: a WAL at its limit plus one batch, and the same amount again in the
    database. The caller holds the store's lock."""

    def __init__(self, folder: int, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        free = os.fstatvfs(folder)
        self._size = min(_FULL_SIZE, (free.f_blocks * free.f_frsize) // 16)

    @property
    def journal_limit(self) -> int:
        """Maximum length of the journal before the database applies it."""
        return START + self._size // 4

    @property
    def wal_limit(self) -> int:
        """Maximum length of the WAL before a checkpoint."""
        return self._size // 2

    @property
    def batch(self) -> tuple[int, int]:
        """Maximum number of records, and of their bytes, that the database applies in one transaction."""
        return max(1, self._size // 4 // _PAGES_OF_A_RECORD), self._size // 8

    def is_needed(self) -> bool:
        """Return whether the free space may be too small for a change."""
        free = os.fstatvfs(self._folder)
        return free.f_bavail * free.f_frsize < self._size

    def fill(self, journal: Journal) -> None:
        """Fill the reserve. If there is not enough space, allocate what is left, inform all writers, and raise
        OSError."""
        file = os.open(RESERVE, _OPEN | os.O_CREAT, 0o600, dir_fd=self._folder)
        try:
            if os.fstat(file).st_size < self._size:
                try:
                    self._disk.allocate(file, self._size)
                except OSError:
                    self._take_what_is_left(file)
                    if not journal.strained:
                        journal.strain(True)
                    raise
        finally:
            os.close(file)
        if journal.strained:
            journal.strain(False)

    def release(self, journal: Journal) -> bool:
        """Give the space back to the file system for a change that needs it. Returns False if the reserve is empty."""
        with contextlib.suppress(FileNotFoundError):
            file = os.open(RESERVE, _OPEN, dir_fd=self._folder)
            try:
                if os.fstat(file).st_size:
                    self._disk.truncate(file, 0)
                    journal.strain(True)
                    return True
            finally:
                os.close(file)
        return False

    def _take_what_is_left(self, file: int) -> None:
        size = self._size // 2
        while size >= _SMALLEST:
            self._disk.truncate(file, 0)
            try:
                self._disk.allocate(file, size)
            except OSError:
                size //= 2
            else:
                return
        self._disk.truncate(file, 0)


def _record(journal_id: bytes, at: int, payload: bytes) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(payload)
    seal = _seal(journal_id, at, len(payload), checksum)
    return _RECORD.pack(_SYNC, len(payload), checksum, seal) + payload


def _seal(journal_id: bytes, at: int, size: int, checksum: int) -> int:
    return xxhash.xxh3_64_intdigest(_HEAD_KEY.pack(journal_id, at, size, checksum))


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def _is_sealed(data: bytes, size: int) -> bool:
    return len(data) == size + _CHECKSUM.size and data == _sealed(data[:size])
