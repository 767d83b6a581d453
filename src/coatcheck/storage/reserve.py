"""Reserved space, so that a store on a full disk can still be read and cleaned up.

Removing rows needs some space before it frees any: SQLite appends the changed pages to its
write-ahead log, and copies them to the database later. The reserve is a file of allocated bytes
that is given back for such a change. While it is not full, the store accepts no new content.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from coatcheck.storage.disk import Disk

NAME: Final = "reserve"
FULL_SIZE = 8 * 1024 * 1024
_SMALLEST: Final = 64 * 1024
_PAGE: Final = 4096
# Bytes: one row in each table and index, each on a page of its own.
_PAGES_OF_A_ROW: Final = 32 * 1024
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Reserve:
    """The reserve of one store. Its caller holds the store's lock.

    On a full disk the log may grow to twice `log_pages` before a put fails, and all of its pages
    may have to be appended to the database. This and one more change fit into the reserve."""

    def __init__(self, folder: int, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        system = os.fstatvfs(folder)
        self._size = min(FULL_SIZE, (system.f_blocks * system.f_frsize) // 16)

    @property
    def log_pages(self) -> int:
        """Number of pages in the write-ahead log after which SQLite copies them to the database."""
        return max(1, self._size // 4 // _PAGE)

    @property
    def rows_at_once(self) -> int:
        """Maximum number of rows that one change removes while the disk is full."""
        return max(1, self._size // 4 // _PAGES_OF_A_ROW)

    def is_needed(self) -> bool:
        """Return whether the free space may be too small for a change."""
        system = os.fstatvfs(self._folder)
        return system.f_bavail * system.f_frsize < self._size

    def is_full(self) -> bool:
        try:
            return os.stat(NAME, dir_fd=self._folder, follow_symlinks=False).st_size >= self._size
        except FileNotFoundError:
            return False

    def fill(self) -> None:
        """Allocate the whole reserve. If there is not enough space, allocate what is left and raise
        OSError."""
        try:
            file = os.open(NAME, _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            file = self._disk.create(NAME, self._folder)
        try:
            if os.fstat(file).st_size < self._size:
                self._allocate(file)
        finally:
            os.close(file)

    def release(self) -> bool:
        """Give the space back to the file system. Return False if there is none."""
        with contextlib.suppress(FileNotFoundError):
            file = os.open(NAME, _OPEN, dir_fd=self._folder)
            try:
                if os.fstat(file).st_size:
                    self._disk.truncate(file, 0)
                    return True
            finally:
                os.close(file)
        return False

    def _allocate(self, file: int) -> None:
        try:
            self._disk.allocate(file, self._size)
        except OSError:
            self._allocate_what_is_left(file)
            raise

    def _allocate_what_is_left(self, file: int) -> None:
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
