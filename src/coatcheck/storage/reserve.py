"""Reserved space, so that a store on a full disk can still be read and cleaned up.

The records of the journal must fit into the database later, and forgetting needs some space before it frees any. The
reserve is a file of allocated bytes for that. While it is not full, the store accepts no new content. The sizes below
keep the needs of one step within the reserve: a WAL at its limit plus one batch, and the same amount again in the
database.
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
        """Give the space back to the file system for a change that needs it. Returns False if the reserve is empty."""
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
