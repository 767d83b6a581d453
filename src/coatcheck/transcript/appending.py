"""Append whole lines to a transcript file, from any number of threads and processes.

A lock on the file orders writers. The file is looked up again under the lock, because it may have been replaced. A line
that a crash left unfinished at the end is moved to a file beside it when the transcript is next opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from coatcheck.errors import StoreUnavailable, storage_error
from coatcheck.ids import clip
from coatcheck.storage.disk import Disk
from coatcheck.transcript.scan import parsed
from coatcheck.transcript.swap import closing, is_at, open_regular, pieces, starts_backwards

_OPEN: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LINE: Final = 64 << 20  # bytes; a longer unfinished line is left alone
_CHECKED: Final = 20  # lines before a torn one that show whether this is a transcript
TORN: Final = ".coatcheck-torn"


@dataclass(frozen=True, slots=True)
class Torn:
    """A line that a crash cut off: its offset, its size, and the file that it was moved to (None if it was left in
    place, because it is too long to check)."""

    offset: int
    size: int
    kept_in: Path | None


class Appender:
    """Appends to one file. Thread-safe."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._mutex = threading.Lock()
        self._handle: int | None = None
        self._pid = os.getpid()

    def close(self) -> None:
        with self._mutex:
            self._close()

    def append(self, data: bytes) -> int:
        """Append lines, each with its line end, and return their offset. On an error the file is unchanged."""
        with self._mutex:
            with self._locked(create=True) as handle:
                assert handle is not None
                size = os.fstat(handle).st_size
                lead = b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""
                self._write(handle, lead + data, size)
            try:
                self._disk.sync_data(handle)
            except OSError as error:
                raise storage_error(error, "syncing a transcript") from error
        return size + len(lead)

    def recover(self) -> Torn | None:
        """Move an unfinished last line aside. A complete line that only lacks its line end stays."""
        with self._mutex, self._locked(create=False) as handle:
            if handle is None:
                return None
            size = os.fstat(handle).st_size
            if not size or os.pread(handle, 1, size - 1) == b"\n":
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

    @contextmanager
    def _locked(self, *, create: bool) -> Iterator[int | None]:
        """Lock the file at the path, and yield its descriptor, or None if there is no file."""
        while True:
            handle = self._opened(create)
            if handle is None:
                yield None
                return
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                if is_at(handle, self._path):
                    yield handle
                    return
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)
            self._close()

    def _opened(self, create: bool) -> int | None:
        if self._pid != os.getpid():  # a fork shares the parent's lock, so it needs its own descriptor
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
                f"folder not found: {clip(str(self._path.parent))}", hint="create it, or use another path"
            ) from None
        except OSError as error:
            raise storage_error(error, "opening a transcript") from error
        return self._handle

    def _sync_folder(self) -> None:
        with closing(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
            self._disk.sync(folder)

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_torn(line: bytes) -> bool:
    """Whether this is an incomplete object, or the zeros that a power cut leaves."""
    return line.lstrip(b" \t\r\0")[:1] in (b"{", b"") and parsed(line) is None


def _has_lines(handle: int, end: int) -> bool:
    """Whether the lines before an offset are JSON objects, as in a transcript, or there are none."""
    stop = end
    for begin in islice(starts_backwards(handle, end), _CHECKED):
        if isinstance(parsed(os.pread(handle, min(stop - begin, _MAX_LINE), begin)), dict):
            return True
        stop = begin
    return not end
