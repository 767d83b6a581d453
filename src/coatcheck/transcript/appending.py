"""Appending to a transcript's file: whole lines or nothing, by any number of threads and processes.

A lock on the file orders writers; the file is looked up again under it, since it may have been replaced. What a crash
left half written at the end is moved aside when the file is next opened: beside the file, never away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from coatcheck.errors import InvalidArgument, StoreUnavailable, storage_error
from coatcheck.ids import clip
from coatcheck.storage.disk import Disk
from coatcheck.transcript.backwards import last_start, starts_backwards
from coatcheck.transcript.place import pieces
from coatcheck.transcript.scan import parse

_OPEN: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST: Final = 64 << 20  # bytes of an unfinished line that are looked at
_JUDGED: Final = 20  # lines before a torn one that tell whether this is a transcript
TORN: Final = ".coatcheck-torn"


@dataclass(frozen=True, slots=True)
class Torn:
    """A line that a crash had cut off: where it began, how long it was, and the file that it was moved to (None where
    it was left, being too long to judge)."""

    offset: int
    size: int
    kept_in: Path | None


class Appender:
    """The end of one file. Safe to use from many threads."""

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
        """Write lines, each with its end, behind all others; where they begin. On an error the file is as it was."""
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
        """Move a line aside that a crash has left unfinished. One that only lacks its end stays."""
        with self._mutex, self._locked(create=False) as handle:
            if handle is None:
                return None
            size = os.fstat(handle).st_size
            if not size or os.pread(handle, 1, size - 1) == b"\n":
                return None
            start = last_start(handle, size)
            if size - start > _LONGEST:
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
        kept = os.open(aside, _OPEN | os.O_CREAT, 0o600)
        try:
            for piece in pieces(handle, start, size):
                self._disk.write(kept, piece)
            self._disk.write(kept, b"\n")
            self._disk.sync(kept, always=True)
        finally:
            os.close(kept)
        self._sync_folder()
        self._disk.truncate(handle, start)
        self._disk.sync(handle)

    def _write(self, handle: int, data: bytes, size: int) -> None:
        try:
            self._disk.write(handle, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                written = os.fstat(handle).st_size - size
                # Only what is ours is taken back: a writer that knows no locks may have come between.
                if 0 < written <= len(data) and os.pread(handle, written, size) == data[:written]:
                    self._disk.truncate(handle, size)
            raise storage_error(error, "appending to a transcript") from error

    @contextmanager
    def _locked(self, *, create: bool) -> Iterator[int | None]:
        """The descriptor of the file that is at the path, locked; None where there is none."""
        while True:
            handle = self._opened(create)
            if handle is None:
                yield None
                return
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                if self._is_there(handle):
                    yield handle
                    return
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)
            self._close()

    def _opened(self, create: bool) -> int | None:
        if self._pid != os.getpid():  # a fork shares the lock with its parent, so it needs a descriptor of its own
            self._close()
            self._pid = os.getpid()
        if self._handle is not None:
            return self._handle
        try:
            self._handle = self._open(create)
        except FileNotFoundError:
            if not create:
                return None
            raise StoreUnavailable(
                f"there is no folder {clip(str(self._path.parent))}", hint="make it, or name another file"
            ) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise InvalidArgument(
                    f"{clip(self._path.name)} is a link, or no file", hint="name the file itself"
                ) from None
            raise storage_error(error, "opening a transcript") from error
        return self._handle

    def _open(self, create: bool) -> int:
        if create:
            with contextlib.suppress(FileExistsError):
                handle = os.open(self._path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
                self._sync_folder()
                return handle
        handle = os.open(self._path, _OPEN)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise InvalidArgument(f"{clip(self._path.name)} is not a file", hint="name a transcript")
        return handle

    def _sync_folder(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(folder)
        finally:
            os.close(folder)

    def _is_there(self, handle: int) -> bool:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(handle))

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_torn(line: bytes) -> bool:
    """Whether this is the beginning of an object, or the blanks that a power cut leaves, and no JSON by itself."""
    return line.lstrip(b" \t\r\0")[:1] in (b"{", b"") and _parsed(line) is None


def _has_lines(handle: int, end: int) -> bool:
    """Whether the lines before an offset are those of a transcript, and not of a document or some other file. Where
    there are none, the line behind is the first."""
    stop = end
    for begin in islice(starts_backwards(handle, end), _JUDGED):
        if isinstance(_parsed(os.pread(handle, min(stop - begin, _LONGEST), begin)), dict):
            return True
        stop = begin
    return not end


def _parsed(line: bytes) -> object:
    try:
        found = parse(line.decode())
    except UnicodeDecodeError:
        return None
    return None if found is None else found[0]
