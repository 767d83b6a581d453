"""Space kept in reserve, so that a full disk can still be read from and cleaned up.

Whatever the journal holds must fit into the database later, and forgetting needs a little room before it gives any
back. The reserve is a file of real, allocated bytes for that; while it is used up, nothing new is taken in.
"""

from __future__ import annotations

import contextlib
import os

from coatcheck.storage.disk import Disk
from coatcheck.storage.journal import START, Journal

NAME = "reserve"
_FULL_SIZE = 8 * 1024 * 1024
_SHARE = 4  # a record of the journal may need its size in the WAL and in the database, and pages around it
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
        return START + self._size // _SHARE

    def is_needed(self) -> bool:
        """Whether so little space is left that a change might not find enough."""
        free = os.fstatvfs(self._folder)
        return free.f_bavail * free.f_frsize < self._size

    def fill(self, journal: Journal) -> None:
        """Allocate what is missing, or raise OSError (no space) and leave the store as it is."""
        file = os.open(NAME, _OPEN, 0o600, dir_fd=self._folder)
        try:
            if os.fstat(file).st_size < self._size:
                try:
                    self._disk.allocate(file, self._size)
                except OSError:
                    self._disk.truncate(file, 0)
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
