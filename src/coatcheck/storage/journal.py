"""The journal: an append-only file through which puts reach the catalog.

A put is acknowledged once its record is here (and synced, where durability asks for it): one write and one sync,
however many pages of the database the row will touch. The database takes the records over in batches. The header says
where the valid part ends: what a crash left behind that is not counted, and the next writer cuts it off.

The caller holds the store's lock for everything but `sync` and `grown`.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from coatcheck.errors import StoreUnavailable
from coatcheck.storage.disk import Disk

NAME = "journal"
_MAGIC = b"coatchk1"
_HEADER = struct.Struct("<8s8sQQ")
_END = struct.Struct("<Q")
_RECORD = struct.Struct("<IQ")
START = _HEADER.size
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in one journal: what `sync` has to reach."""

    journal_id: bytes
    end: int


class Journal:
    """The current journal file. Another process may replace it: `refresh` notices."""

    def __init__(self, folder: int, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._file = -1
        self._syncing = threading.Lock()
        self._synced = 0
        self.journal_id = b""
        self.end = START
        self.seen = 0  # how much of it the database has, as far as this process knows
        self.strained = False
        self.is_unsound = False

    def grown(self) -> bool:
        """Whether the journal is not just what was seen of it: longer, shorter, or another file."""
        info = os.fstat(self._file)
        return info.st_size != self.seen or not info.st_nlink

    def is_synced(self) -> bool:
        """Whether this process knows what was seen of the journal to be durable."""
        return self._synced >= self.seen

    def refresh(self) -> None:
        """See the journal as it is now, and cut off what a crash left half-written."""
        if self._file < 0 or not os.fstat(self._file).st_nlink:
            self._reopen()
        header = os.pread(self._file, START, 0)
        if len(header) < START or header[:8] != _MAGIC:
            raise StoreUnavailable(
                "the journal of the store has no valid header",
                hint="move the file 'journal' away: all is there but what was put last",
            )
        _, self.journal_id, self.end, strained = _HEADER.unpack(header)
        self.strained = bool(strained)
        if os.fstat(self._file).st_size > self.end:
            self._disk.truncate(self._file, self.end)

    def append(self, payload: bytes) -> Mark:
        record = _RECORD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            self._disk.write_at(self._file, record, self.end)
        except OSError:
            self._disk.truncate(self._file, self.end)
            raise
        end = self.end + len(record)
        self._disk.write_at(self._file, _END.pack(end), 16)
        self.end = end  # last: a sync that begins now in another thread may count all of this as synced
        return Mark(self.journal_id, end)

    def strain(self, strained: bool) -> None:
        """Tell all writers that the space kept in reserve is used up (or there again)."""
        self.strained = strained
        if self._file >= 0:
            self._disk.write_at(self._file, _END.pack(strained), 24)

    def sync(self, mark: Mark) -> None:
        """Return once the journal is durable up to the mark. One sync serves all threads that wait for one."""
        with self._syncing:
            if mark.journal_id != self.journal_id or self._synced >= mark.end:
                return  # a journal is replaced only after the database has durably taken over all of it
            if self.is_unsound:
                raise OSError(errno.EIO, "an earlier sync of the journal failed")
            end = self.end
            try:
                self._disk.sync_data(self._file)
            except OSError:
                # The system may have dropped what it could not write, and a second sync would not tell.
                self.is_unsound = True
                raise
            self._synced = end

    def records(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Payloads from an offset on, each with the offset behind it. Ends at the first that a power cut has torn."""
        at = max(start, START)
        while at + _RECORD.size <= self.end:
            head = os.pread(self._file, _RECORD.size, at)
            if len(head) < _RECORD.size:
                break
            size, checksum = _RECORD.unpack(head)
            if at + _RECORD.size + size > self.end:
                break
            payload = os.pread(self._file, size, at + _RECORD.size)
            if len(payload) < size or xxhash.xxh3_64_intdigest(payload) != checksum:
                break
            at += _RECORD.size + size
            yield at, payload
        if at < self.end:
            self._cut(at)

    def replace(self) -> None:
        """Start an empty journal in place of this one, whose records the database holds durably."""
        spare = f"{NAME}.new"
        self._disk.remove(spare, self._folder)
        file = self._disk.create(spare, self._folder)
        try:
            self._disk.write(file, _HEADER.pack(_MAGIC, secrets.token_bytes(8), START, self.strained))
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

    def _cut(self, end: int) -> None:
        self.end = end
        self._disk.write_at(self._file, _END.pack(end), 16)
        self._disk.truncate(self._file, end)

    def _reopen(self) -> None:
        try:
            file = os.open(NAME, _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            self.journal_id = b""
            self.replace()
            return
        with self._syncing:
            self.seen = 0  # first: another journal may be just as long
            if self._file < 0:
                self._file = file
            else:
                os.dup2(file, self._file, inheritable=False)  # `grown` may be looking at it in another thread
                os.close(file)
            self._synced = START
            self.journal_id = b""
            self.is_unsound = False
