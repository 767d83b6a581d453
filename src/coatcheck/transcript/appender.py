"""`Appender`: appends lines to a file that other processes append to and replace.

A lock on the file orders writers. The file is looked up again under the lock, because it may have
been replaced. A line that a crash left unfinished at the end is moved to a file beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from coatcheck.errors import StoreUnavailable, storage_error
from coatcheck.ids import clip
from coatcheck.storage.disk import Disk
from coatcheck.transcript.lines import (
    closing,
    ends_line,
    open_regular,
    pieces,
    settled_size,
    starts_backwards,
)
from coatcheck.transcript.scan import parsed
from coatcheck.transcript.swap import ATTEMPTS, is_at, keeps_changing

_OPEN: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LINE: Final = 64 << 20  # bytes; a longer unfinished line is left alone
_CHECKED: Final = 20  # lines before a torn one that show whether this is a transcript
TORN: Final = ".coatcheck-torn"


@dataclass(frozen=True, slots=True)
class Torn:
    """A line that a crash cut off: its offset, its size, and the file that it was moved to (None if
    it was left in place, because it is too long to check)."""

    offset: int
    size: int
    kept_in: Path | None


class Appender:
    """Appends to one file. Thread-safe."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._lock = threading.RLock()
        self._handle: int | None = None
        self._pid = os.getpid()

    def close(self) -> None:
        with self._lock:
            self._close()

    def append(self, data: bytes) -> int:
        """Append lines, each with its line end, and return their offset. On an error the file is
        unchanged."""
        with self._lock:
            handle = None
            try:
                handle = self._locked(create=True)
                assert handle is not None
                size = settled_size(handle)
                lead = b"" if ends_line(handle, size) else b"\n"
                self._write(handle, lead + data, size)
            finally:
                if handle is not None:
                    fcntl.flock(handle, fcntl.LOCK_UN)
            return self._synced(handle, size + len(lead))

    def _synced(self, handle: int, offset: int) -> int:
        try:
            self._disk.sync_data(handle)
        except OSError as error:
            raise storage_error(error, "syncing a transcript") from error
        return offset

    def recover(self) -> Torn | None:
        """Move an unfinished last line aside. A complete line that only lacks its line end
        stays."""
        with self._lock:
            handle = None
            try:
                handle = self._locked(create=False)
                return None if handle is None else self._recover(handle)
            finally:
                if handle is not None:
                    fcntl.flock(handle, fcntl.LOCK_UN)

    def _recover(self, handle: int) -> Torn | None:
        size = settled_size(handle)
        if ends_line(handle, size):
            return None
        start = next(starts_backwards(handle, size), 0)
        if size - start > _MAX_LINE:
            return Torn(start, size - start, None)
        if not _is_torn(os.pread(handle, size - start, start)) or not _has_lines(handle, start):
            return None
        aside = self._path.with_name(f".{self._path.name}{TORN}")
        try:
            self._set_aside(handle, start, size, aside)
        except OSError as error:
            raise storage_error(error, "moving a torn line aside") from error
        return Torn(start, size - start, aside)

    def _set_aside(self, handle: int, start: int, size: int, aside: Path) -> None:
        with closing(os.open(aside, _OPEN | os.O_CREAT, 0o600)) as kept:
            for piece in pieces(handle, start, size):
                self._disk.write(kept, piece)
            self._disk.write(kept, b"\n")
            self._disk.sync(kept, always=True)
        self._sync_folder()
        self._disk.truncate(handle, start)
        self._disk.sync(handle)

    def _write(self, handle: int, data: bytes, size: int) -> None:
        try:
            self._disk.write(handle, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                written = os.fstat(handle).st_size - size
                # Truncate only our own bytes: a writer that does not lock may have appended too.
                if 0 < written <= len(data) and os.pread(handle, written, size) == data[:written]:
                    self._disk.truncate(handle, size)
            raise storage_error(error, "appending to a transcript") from error

    def _locked(self, *, create: bool) -> int | None:
        """Lock the file at the path, and return its descriptor, or None if there is no file. The
        caller unlocks it."""
        for _ in range(ATTEMPTS):
            handle = self._opened(create)
            if handle is None:
                return None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if is_at(handle, self._path):
                    return handle
            except BaseException:
                self._unlock()
                raise
            self._close()
        raise keeps_changing(self._path.name)

    def _unlock(self) -> None:
        if self._handle is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)

    def _opened(self, create: bool) -> int | None:
        if self._pid != os.getpid():
            # A fork shares the parent's lock, so it needs its own descriptor.
            self._close()
            self._pid = os.getpid()
        if self._handle is not None:
            return self._handle
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    self._handle = os.open(self._path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
                    self._sync_folder()
                    return self._handle
            self._handle = open_regular(self._path, _OPEN)
        except FileNotFoundError:
            if not create:
                return None
            raise StoreUnavailable(
                f"folder not found: {clip(str(self._path.parent))}",
                hint="create it, or use another path",
            ) from None
        except OSError as error:
            raise storage_error(error, "opening a transcript") from error
        return self._handle

    def _sync_folder(self) -> None:
        with closing(
            os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        ) as folder:
            self._disk.sync(folder)

    def _close(self) -> None:
        self._unlock()
        handle = self._handle
        self._handle = None  # first: once it is closed, its number may be another file's
        if handle is not None:
            os.close(handle)


def _is_torn(line: bytes) -> bool:
    """Whether this is an incomplete object, or the zeros that a power cut leaves."""
    return line.lstrip(b" \t\r\0")[:1] in (b"{", b"") and parsed(line) is None


def _has_lines(handle: int, end: int) -> bool:
    """Whether the lines before an offset are JSON objects, as in a transcript, or there are
    none."""
    stop = end
    for begin in islice(starts_backwards(handle, end), _CHECKED):
        if isinstance(parsed(os.pread(handle, min(stop - begin, _MAX_LINE), begin)), dict):
            return True
        stop = begin
    return not end
