"""Large blobs as files: `blobs/<2 hex>/<sha256>-<place>`, raw while in use, seekable zstd once they
are cold.

A place is a file name that is made for one copy and never reused, so a writer and a remover of the
same digest never use the same file. The file is locked while a copy is being published: a sweep
skips it, and a crash releases the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import (
    Damaged,
    NotFound,
    StoreClosed,
    StoreError,
    StoreUnavailable,
    storage_error,
)
from coatcheck.refs import Blob, Coding
from coatcheck.storage import BlobStore, Quarantined, frames
from coatcheck.storage.disk import FILES, FOLDERS, KINDS, Disk, file_uri, open_folder
from coatcheck.storage.frames import FRAME, Framed, check_frame, check_size, framing

# Opening a pipe must not block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FAN = lazy_pattern(r"[0-9a-f]{2}")
# Bytes of a value whose lines its readers count; they keep as many frames in memory.
_UNCOUNTED = 4 * FRAME
_SYNCED_KEPT = 10_000
_COMPARED = 64 * 1024  # bytes that are compared at once: they stay in the processor's cache
_QUARANTINE = "quarantine"


class FileBlobs(BlobStore):
    """Blobs in a folder owned by one user."""

    def __init__(self, root: Path, folder: int, disk: Disk, *, is_read_only: bool = False) -> None:
        self._root = root
        self._uri = file_uri(root / "blobs")
        self._disk = disk
        self._named: set[str] = set()  # folders in blobs/ whose names are known to be synced
        # Places of recent copies that are known to be synced. Without it, each repeated put of a
        # large value would make six syncs (counted), and waiting for the disk is what a put costs.
        self._synced: set[str] = set()
        if not is_read_only:
            for name in ("blobs", "tmp"):
                disk.make_folder(name, folder)
            # Even if they exist: the process that created them may not have synced their names.
            disk.sync(folder)
        self._blobs = open_folder("blobs", folder)
        self._tmp = open_folder("tmp", folder)

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[StagedFile]:
        is_small = isinstance(chunks, list) and sum(map(len, chunks)) <= _UNCOUNTED
        chunks, finish = framing(chunks, digest, counts=not is_small)
        with self._staged(chunks, "raw") as staged:
            staged.framed = finish()
            yield staged

    def compress(self, blob: Blob) -> contextlib.AbstractContextManager[StagedFile] | None:
        if blob.coding != "raw" or not frames.is_worthwhile(self.read(blob, 0, FRAME)):
            return None
        return self._compressed(blob)

    @contextmanager
    def _compressed(self, blob: Blob) -> Iterator[StagedFile]:
        pieces = (self.read(blob, at, FRAME) for at in range(0, blob.size, FRAME))
        with self._staged(frames.compressed(pieces), "zst") as staged:
            staged.framed = Framed(blob.digest, blob.size, blob.frames)
            staged.replaces = True
            yield staged

    @contextmanager
    def _staged(self, chunks: Iterable[bytes], suffix: str) -> Iterator[StagedFile]:
        if self._tmp < 0:
            raise StoreClosed("the store is closed")
        with self._errors("writing a blob"):
            file, place = self._created(suffix)
        staged = StagedFile(self, file, place)
        try:
            for chunk in chunks:
                with self._errors("writing a blob"):
                    self._disk.write(file, chunk)
            yield staged
        finally:
            if not staged.published:
                with contextlib.suppress(OSError):  # a sweep removes remaining files
                    self._disk.remove(place, self._tmp)
            os.close(file)

    def _created(self, suffix: str) -> tuple[int, str]:
        """Create a locked file in the staging folder."""
        while True:
            place = f"{os.urandom(8).hex()}.{suffix}"
            file = self._disk.create(place, self._tmp)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, place
            os.close(file)  # a sweep removed it as a leftover before it was locked

    def publish(self, staged: StagedFile) -> None:
        name, always = staged.digest[:2], staged.replaces
        with self._errors("publishing a blob"), self._made(name) as fan:
            self._disk.rename(staged.place, self._tmp, f"{staged.digest}-{staged.place}", fan)
            staged.published = True
            if always or self._disk.durable:
                for one in (staged.file, fan):
                    self._disk.sync(one, always=always)
                # The process that created the folder may have died before it synced it.
                if name not in self._named:
                    names = os.listdir(self._blobs)  # first, so that the sync serves all of them
                    self._disk.sync(self._blobs, always=always)
                    self._named.update(names)
                self._note_synced(staged.place)

    def sync(self, blob: Blob, *, always: bool = False) -> None:
        """Make a copy that will be reused as durable as a new one: its publisher may not have
        synced it. `always` is for a copy that replaces another, which may be durable."""
        is_wanted = always or self._disk.durable
        if not is_wanted or blob.place in self._synced or not _is_place(blob.place):
            return  # a place that is not one of our files has nothing to sync, and reading it fails
        with (
            self._opened(blob) as file,
            self._errors("syncing a blob"),
            self._named_in(blob) as (fan, _),
        ):
            for one in (file, fan, self._blobs):
                self._disk.sync(one, always=always)
        self._note_synced(blob.place)

    def _note_synced(self, place: str) -> None:
        if len(self._synced) >= _SYNCED_KEPT:
            self._synced.clear()
        self._synced.add(place)

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        with self.opened(blob) as read:
            return read(offset, length)

    @contextmanager
    def opened(self, blob: Blob) -> Iterator[Callable[[int, int], bytes]]:
        with self._opened(blob) as file:
            yield partial(self._read, blob, file)

    def _read(self, blob: Blob, file: int, offset: int, length: int) -> bytes:
        check_size(blob)
        end = min(offset + length, blob.size)
        if offset >= end:
            return b""
        first, last = offset // FRAME, (end - 1) // FRAME
        with self._errors("reading a blob"):
            try:
                if blob.coding == "zstd":
                    data = b"".join(_unpacked(file, first, last, blob.digest))
                else:
                    data = _read_all(file, (last - first + 1) * FRAME, first * FRAME)
                view = memoryview(data)
                for index in range(first, last + 1):
                    at = (index - first) * FRAME
                    check_frame(blob, index, view[at : at + FRAME])
            except Damaged:
                # The next read must come from disk, not from the page cache.
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                raise
        return data[offset - first * FRAME : end - first * FRAME]

    def holds(self, blob: Blob, data: bytes) -> bool:
        with self._opened(blob) as file, self._errors("reading a blob"):
            if not self._is(blob, file, data):
                return False
        self.sync(blob)  # the caller will reuse it
        return True

    def _is(self, blob: Blob, file: int, data: bytes) -> bool:
        if blob.coding != "raw":
            return self._read(blob, file, 0, blob.size) == data
        if os.fstat(file).st_size != len(data):
            return False
        piece = memoryview(bytearray(_COMPARED))
        for at in range(0, len(data), _COMPARED):
            got = os.preadv(file, [piece], at)
            if got != min(_COMPARED, len(data) - at) or not data.startswith(piece[:got], at):
                return False
        return True

    def remove(self, blob: Blob) -> None:
        gone = contextlib.suppress(FileNotFoundError)
        with self._errors("removing a blob"), gone, self._named_in(blob) as (fan, name):
            self._disk.remove(name, fan)

    def places(self) -> Iterator[Blob]:
        with self._errors("listing blobs"):
            fans = sorted(os.listdir(self._blobs))
        for fan_name in fans:
            with self._listed(fan_name, self._blobs) as (_, names):
                for name in names:
                    digest, _, place = name.partition("-")
                    copy = frames.PLACE.fullmatch(place)
                    if copy and frames.DIGEST.fullmatch(digest) and digest[:2] == fan_name:
                        yield Blob(digest, 0, frames.CODINGS[copy[1]], place)

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        with self._locked(blob) as is_locked:
            if is_locked and remove:
                self.remove(blob)
            return is_locked

    def quarantine(self, blob: Blob, at: float) -> bool:
        with self._locked(blob) as is_locked, self._errors("setting a blob aside"):
            if not is_locked:
                return False
            with self._quarantine(make=True) as apart, self._named_in(blob) as (fan, name):
                try:
                    self._disk.rename(name, fan, f"{name}-{int(at)}", apart)
                except FileNotFoundError:  # its last ref was forgotten meanwhile
                    return False
                self._disk.sync(apart)
            return True

    @contextmanager
    def _locked(self, blob: Blob) -> Iterator[bool]:
        """Lock a copy. Yields False if it is being published, or is missing."""
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(self._opened(blob))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (NotFound, BlockingIOError):
                yield False
                return
            except OSError as error:
                raise self._error(storage_error(error, "locking a blob")) from error
            yield True

    def quarantined(self) -> Iterator[Quarantined]:
        with self._errors("listing the quarantine"), self._quarantine() as apart:
            for name in sorted(os.listdir(apart)) if apart >= 0 else ():
                found = frames.QUARANTINED.fullmatch(name)
                if found is None:
                    continue
                try:
                    size = os.stat(name, dir_fd=apart, follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                digest, place, coding, since = found.groups()
                copy = Blob(digest, 0, frames.CODINGS[coding], place)
                yield Quarantined(copy, size, float(since))

    def take_back(self, blob: Blob) -> bool:
        with self._errors("returning a blob from the quarantine"), self._quarantine() as apart:
            for name in self._names_apart(blob, apart):
                with self._made(blob.digest[:2]) as fan:
                    self._disk.rename(name, apart, f"{blob.digest}-{blob.place}", fan)
                    for one in (fan, self._blobs):
                        self._disk.sync(one)
                return True
        return False

    def discard(self, blob: Blob) -> None:
        with self._errors("emptying the quarantine"), self._quarantine() as apart:
            for name in self._names_apart(blob, apart):
                self._disk.remove(name, apart)

    def _names_apart(self, blob: Blob, apart: int) -> list[str]:
        start = f"{blob.digest}-{blob.place}-"
        names = os.listdir(apart) if apart >= 0 else []
        return [
            name for name in names if name.startswith(start) and frames.QUARANTINED.fullmatch(name)
        ]

    @contextmanager
    def _quarantine(self, *, make: bool = False) -> Iterator[int]:
        """Open the quarantine, -1 if there is none."""
        root, apart = open_folder(str(self._root)), -1
        try:
            if make and self._disk.make_folder(_QUARANTINE, root):
                self._disk.sync(root)
            with contextlib.suppress(FileNotFoundError):
                apart = open_folder(_QUARANTINE, root)
            yield apart
        finally:
            for folder in (root, apart):
                if folder >= 0:
                    os.close(folder)

    def leftovers(
        self, *, remove: bool, is_named: Callable[[str], bool] = lambda place: False
    ) -> int:
        total = 0
        with self._errors("sweeping the staging folder"):
            names = os.listdir(self._tmp)
        for name in names:
            # Removed, being written, or unreadable: `foreign` reports the last.
            with contextlib.suppress(OSError):
                total += self._leftover(name, remove=remove, is_named=is_named)
        return total

    def _leftover(self, name: str, *, remove: bool, is_named: Callable[[str], bool]) -> int:
        """Return the size of a file in the staging folder, and with `remove`, remove it. Raises
        `OSError` if it is being written."""
        file = os.open(name, _READ, dir_fd=self._tmp)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                return 0
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_named(name):  # a power cut undid the rename of a copy that was published
                return 0
            if remove:
                self._disk.remove(name, self._tmp)
            return info.st_size
        finally:
            os.close(file)

    def foreign(self) -> Iterator[str]:
        with self._errors("looking for foreign files"):
            root = open_folder(str(self._root))
        try:
            yield from _odd(root, "", FILES.pattern, "|".join(FOLDERS))
        finally:
            os.close(root)
        yield from _odd(self._tmp, "tmp/", ".*", "")
        with self._errors("looking for foreign files"), self._quarantine() as apart:
            yield from _odd(apart, "quarantine/", ".*", "") if apart >= 0 else ()
        yield from _odd(self._blobs, "blobs/", "", _FAN.pattern)
        for fan_name in sorted(filter(_FAN.fullmatch, _names(self._blobs))):
            with self._listed(fan_name, self._blobs) as (fan, _):
                if fan is not None:
                    yield from _odd(fan, f"blobs/{fan_name}/", ".*", "")

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}/{blob.digest[:2]}/{blob.digest}-{blob.place}"

    def close(self) -> None:
        folders, self._blobs, self._tmp = (self._blobs, self._tmp), -1, -1
        for folder in folders:
            if folder >= 0:
                os.close(folder)

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Translate an `OSError` to a `StoreError`, or to `StoreClosed` if the folders were closed
        meanwhile."""
        try:
            yield
        except OSError as error:
            raise self._error(storage_error(error, doing)) from error

    def _error(self, error: StoreError) -> StoreError:
        return StoreClosed("the store is closed") if self._tmp < 0 else error

    @contextmanager
    def _made(self, name: str) -> Iterator[int]:
        """Open a folder in blobs/, and create it if it is missing."""
        try:
            fan = open_folder(name, self._blobs)
        except FileNotFoundError:
            self._disk.make_folder(name, self._blobs)
            fan = open_folder(name, self._blobs)
        try:
            yield fan
        finally:
            os.close(fan)

    @contextmanager
    def _named_in(self, blob: Blob) -> Iterator[tuple[int, str]]:
        """Open the folder of a copy, and give its name there. No part of the path is a link or
        comes from an unchecked name."""
        if not (frames.DIGEST.fullmatch(blob.digest) and _is_place(blob.place)):
            raise StoreUnavailable(
                "the catalog references a blob by an invalid digest or place",
                hint="run 'coatcheck verify'",
            )
        fan = open_folder(blob.digest[:2], self._blobs)
        try:
            yield fan, f"{blob.digest}-{blob.place}"
        finally:
            os.close(fan)

    @contextmanager
    def _opened(self, blob: Blob) -> Iterator[int]:
        try:
            with self._named_in(blob) as (fan, name):
                file = os.open(name, _READ, dir_fd=fan)
        except FileNotFoundError as error:
            raise NotFound(
                f"the file of blob {blob.digest} is missing", hint="put the same content again"
            ) from error
        except OSError as error:
            raise self._error(
                StoreUnavailable(
                    f"the file of blob {blob.digest} cannot be opened: {error.strerror}"
                )
            ) from error
        try:
            with self._errors("opening a blob"):
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise StoreUnavailable(f"blob {blob.digest} is not a regular file")
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _listed(self, name: str, folder: int | None) -> Iterator[tuple[int | None, list[str]]]:
        """Open a folder and list it; None and no names if it is missing, not a folder, or cannot be
        listed."""
        try:
            own = open_folder(name, folder)
        except (OSError, StoreUnavailable):
            yield None, []
            return
        try:
            yield own, _names(own)
        finally:
            os.close(own)


def _names(folder: int) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _odd(folder: int, path: str, files: str, folders: str) -> Iterator[str]:
    """Report entries of a folder that are neither files nor folders, or of the wrong kind for their
    name, or folders that cannot be opened. `files` and `folders` are patterns of names."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield f"{path or 'the folder'} cannot be listed: {error.strerror}"
        return
    for name in names:
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and re.fullmatch(folders, name):
                os.close(open_folder(name, folder))
        except FileNotFoundError:
            continue
        except (OSError, StoreUnavailable) as error:
            yield f"{path}{name!r} cannot be opened: {getattr(error, 'strerror', None) or error}"
            continue
        wrong = {stat.S_IFDIR: files, stat.S_IFREG: folders}.get(stat.S_IFMT(mode), ".*")
        if wrong and re.fullmatch(wrong, name):
            yield (
                f"{path}{name!r} is {KINDS.get(stat.S_IFMT(mode), 'something else')}: move it away"
            )


def _is_place(place: object) -> bool:
    # A damaged row may have bytes.
    return isinstance(place, str) and frames.PLACE.fullmatch(place) is not None


def _read_all(file: int, length: int, offset: int) -> bytes:
    """Read a range, fewer bytes only at the end of the file. One system call reads at most 2 GiB,
    or less."""
    data = os.pread(file, length, offset)
    if len(data) == length:
        return data
    pieces = [data]
    while data and len(data) < length:
        length, offset = length - len(data), offset + len(data)
        data = os.pread(file, length, offset)
        pieces.append(data)
    return b"".join(pieces)


def _unpacked(file: int, first: int, last: int, what: str) -> list[bytes]:
    def pread(at: int, size: int) -> bytes:
        return os.pread(file, size, at)

    return frames.SeekTable.of(os.fstat(file).st_size, pread, what).read(first, last, pread)


class StagedFile:
    """A file in the staging folder, locked until the stage ends."""

    def __init__(self, blobs: FileBlobs, file: int, place: str) -> None:
        self._blobs = blobs
        self.file = file
        self.place = place
        self.published = False
        self.replaces = False  # whether it replaces a durable copy, and so must always be synced
        self.framed = Framed("", 0, b"")

    @property
    def digest(self) -> str:
        return self.framed.digest

    @property
    def size(self) -> int:
        return self.framed.size

    @property
    def coding(self) -> Coding:
        return frames.CODINGS[self.place.rpartition(".")[2]]

    def publish(self) -> Blob:
        self._blobs.publish(self)
        return Blob(self.digest, self.size, self.coding, self.place, self.framed.frames)
