"""Space kept in reserve, so that a full disk can still be read from and cleaned up.

Whatever the journal holds must fit into the database later, and forgetting needs a little room before it gives any
back. The reserve is a file of real, allocated bytes for that; while it is used up, or not whole again, nothing new is
taken in. The sizes below keep what one step can need within what the reserve can give: a WAL at its limit and a batch
on top of it, once as they are and once more in the database.
"""

from __future__ import annotations

import contextlib
import os

from coatcheck.storage.disk import Disk
from coatcheck.storage.journal import START, Journal

NAME = "reserve"
_FULL_SIZE = 8 * 1024 * 1024
_SMALLEST = 64 * 1024
_PAGES_OF_A_RECORD = 32 * 1024  # one row in each table and index, each on a page of its own
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Reserve:
    """The reserve of one store. The caller holds the store's lock."""

    def __init__(self, folder: int, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        free = os.fstatvfs(folder)
        self._size = min(_FULL_SIZE, (free.f_blocks * free.f_frsize) // 16)

    @property
    def journal_limit(self) -> int:
        """How long the journal may become before the database takes it over."""
        return START + self._size // 4

    @property
    def wal_limit(self) -> int:
        """How long the WAL may become before it goes into the database."""
        return self._size // 2

    @property
    def batch(self) -> tuple[int, int]:
        """How many records, and how many bytes of them, the database may take over in one transaction."""
        return max(1, self._size // 4 // _PAGES_OF_A_RECORD), self._size // 8

    def is_needed(self) -> bool:
        """Whether so little space is left that a change might not find enough."""
        free = os.fstatvfs(self._folder)
        return free.f_bavail * free.f_frsize < self._size

    def fill(self, journal: Journal) -> None:
        """Allocate what is missing, or take what is left, tell all writers, and raise OSError (no space)."""
        file = os.open(NAME, _OPEN, 0o600, dir_fd=self._folder)
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
        """Give the space to the file system, where somebody is about to need it. False where it was given already."""
        with contextlib.suppress(FileNotFoundError):
            file = os.open(NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
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
