"""Large blobs as files: `blobs/<2 hex>/<sha256>/<place>`, raw while they are hot, seekable zstd once they are cold.

A place is a file name that is made for one copy and never used again, so a writer and a remover of the same digest
cannot meet in one file. While a copy is being published its file is locked: a sweep leaves it alone, and a crash
unlocks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coatcheck.errors import NotFound, StoreClosed, StoreUnavailable, storage_errors
from coatcheck.refs import Blob, Coding
from coatcheck.storage import seekable
from coatcheck.storage.disk import Disk, open_folder
from coatcheck.storage.frames import FRAME, Framed, FramedChunks, Framer, check_frame

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"[0-9a-f]{16}\.(raw|zst)")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CODINGS: dict[str, Coding] = {"raw": "raw", "zst": "zstd"}


class FileBlobs:
    """Blobs in a folder that one user owns."""

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        self._uri = (root / "blobs").as_uri()
        self._disk = disk
        self._named: set[str] = set()  # folders under blobs/ whose names are known to be synced
        made = [disk.make_folder(name, folder) for name in ("blobs", "tmp")]
        if any(made):
            disk.sync(folder)
        self._blobs = open_folder("blobs", folder)
        self._tmp = open_folder("tmp", folder)

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[StagedFile]:
        framer = Framer(digest)
        if isinstance(chunks, list) and digest is not None:
            with self._staged(chunks, "raw") as staged:
                frames = chunks.frames if isinstance(chunks, FramedChunks) else None
                staged.unframed = (framer, chunks) if frames is None else None
                staged.framed = Framed(digest, sum(map(len, chunks)), frames or b"")
                yield staged
            return
        with self._staged(framer.through(chunks), "raw") as staged:
            staged.framed = framer.finish()
            yield staged

    def compress(self, blob: Blob) -> contextlib.AbstractContextManager[StagedFile] | None:
        if blob.coding != "raw" or not seekable.is_worthwhile(self.read(blob, 0, FRAME)):
            return None
        return self._compressed(blob)

    @contextmanager
    def _compressed(self, blob: Blob) -> Iterator[StagedFile]:
        frames = (self.read(blob, at, FRAME) for at in range(0, blob.size, FRAME))
        with self._staged(seekable.compress(frames), "zst") as staged:
            staged.framed = Framed(blob.digest, blob.size, blob.frames)
            staged.replaces = True
            yield staged

    @contextmanager
    def _staged(self, chunks: Iterable[bytes], suffix: str) -> Iterator[StagedFile]:
        if self._tmp < 0:
            raise StoreClosed("the store is closed")
        with storage_errors("writing a blob"):
            file, place = self._created(suffix)
        staged = StagedFile(self, file, place)
        try:
            for chunk in chunks:
                with storage_errors("writing a blob"):
                    self._disk.write(file, chunk)
            yield staged
        finally:
            if not staged.published:
                with contextlib.suppress(OSError):  # a sweep takes what stays
                    self._disk.remove(place, self._tmp)
            os.close(file)

    def _created(self, suffix: str) -> tuple[int, str]:
        """A new file in the staging folder, locked."""
        while True:
            place = f"{secrets.token_hex(8)}.{suffix}"
            file = self._disk.create(place, self._tmp)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file, place
            os.close(file)  # a sweep took it for a leftover before it was locked

    def publish(self, staged: StagedFile) -> None:
        digest, always = staged.digest, staged.replaces
        with storage_errors("publishing a blob"):
            while not staged.published:
                with self._made(digest[:2], self._blobs) as fan:
                    # A remover may take the digest's empty folder away between our steps: then make it again.
                    with contextlib.suppress(FileNotFoundError), self._made(digest, fan) as own:
                        self._disk.rename(staged.place, self._tmp, staged.place, own)
                        staged.published = True
                        # The folders' names go to disk with the file's bytes, so syncing them after costs little.
                        with self._syncing(staged.file, always):
                            staged.frame()
                        self._disk.sync(own, always=always)
                    self._disk.sync(fan, always=always)
                    # Whoever made the folder may not have synced its name yet, or have died before.
                    if digest[:2] not in self._named:
                        self._disk.sync(self._blobs, always=always)
                        if always or self._disk.durable:
                            self._named.add(digest[:2])

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        end = min(offset + length, blob.size)
        if offset >= end:
            return b""
        first, last = offset // FRAME, (end - 1) // FRAME
        with self._opened(blob) as file, storage_errors("reading a blob"):
            if blob.coding == "zstd":
                data = b"".join(seekable.read(file, first, last, blob.digest))
            else:
                data = os.pread(file, (last - first + 1) * FRAME, first * FRAME)
        view = memoryview(data)
        for index in range(first, last + 1):
            at = (index - first) * FRAME
            check_frame(blob.frames, index, view[at : at + FRAME], blob.digest)
        return data[offset - first * FRAME : end - first * FRAME]

    def holds(self, blob: Blob, data: bytes) -> bool:
        if blob.coding != "raw":
            return self.read(blob, 0, blob.size) == data
        piece = bytearray(FRAME)
        with self._opened(blob) as file, storage_errors("reading a blob"):
            for at in range(0, len(data), FRAME):
                got = os.preadv(file, [piece], at)
                if got != min(FRAME, len(data) - at) or not data.startswith(memoryview(piece)[:got], at):
                    return False
            return os.fstat(file).st_size == len(data)

    def remove(self, blob: Blob) -> None:
        gone = contextlib.suppress(FileNotFoundError)
        with storage_errors("removing a blob"), gone, self._folders(blob) as (fan, own):
            self._disk.remove(blob.place, own)
            self._disk.remove_folder(blob.digest, fan)

    def places(self) -> Iterator[Blob]:
        with storage_errors("listing blobs"):
            for fan_name in sorted(os.listdir(self._blobs)):
                with self._listed(fan_name, self._blobs) as fan:
                    for digest in [] if fan is None else sorted(os.listdir(fan)):
                        with self._listed(digest, fan) as own:
                            names = [] if own is None else sorted(os.listdir(own))
                        for name in names:
                            place = _PLACE.fullmatch(name)
                            if place and _DIGEST.fullmatch(digest) and digest[:2] == fan_name:
                                yield Blob(digest, 0, _CODINGS[place[1]], name)

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        try:
            with self._opened(blob) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if remove:
                    self.remove(blob)
                return True
        except (BlockingIOError, NotFound):
            return False

    def leftovers(self, *, remove: bool) -> int:
        total = 0
        with storage_errors("sweeping the staging folder"):
            for name in os.listdir(self._tmp):
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    file = os.open(name, _READ, dir_fd=self._tmp)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        total += os.fstat(file).st_size
                        if remove:
                            self._disk.remove(name, self._tmp)
                    finally:
                        os.close(file)
        return total

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}/{blob.digest[:2]}/{blob.digest}/{blob.place}"

    def close(self) -> None:
        for folder in (self._blobs, self._tmp):
            if folder >= 0:
                os.close(folder)
        self._blobs = self._tmp = -1

    @contextmanager
    def _made(self, name: str, folder: int) -> Iterator[int]:
        self._disk.make_folder(name, folder)
        own = open_folder(name, folder)
        try:
            yield own
        finally:
            os.close(own)

    @contextmanager
    def _syncing(self, file: int, always: bool) -> Iterator[None]:
        """Sync a file while the caller does something else."""
        if not (always or self._disk.durable):
            yield
            return
        failed: list[BaseException] = []

        def sync() -> None:
            try:
                self._disk.sync(file, always=always)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                failed.append(error)

        thread = threading.Thread(target=sync)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if failed:
            raise failed[0]

    @contextmanager
    def _folders(self, blob: Blob) -> Iterator[tuple[int, int]]:
        """The folders that hold a copy: no part of the path is followed through a link, or made from a foreign name."""
        if not (_DIGEST.fullmatch(blob.digest) and _PLACE.fullmatch(blob.place)):
            raise StoreUnavailable(
                "the catalog names a blob by something that is no digest", hint="run 'coatcheck verify'"
            )
        fan = open_folder(blob.digest[:2], self._blobs)
        try:
            own = open_folder(blob.digest, fan)
            try:
                yield fan, own
            finally:
                os.close(own)
        finally:
            os.close(fan)

    @contextmanager
    def _opened(self, blob: Blob) -> Iterator[int]:
        try:
            with self._folders(blob) as (_, own):
                file = os.open(blob.place, _READ, dir_fd=own)
        except FileNotFoundError as error:
            raise NotFound(f"the file of blob {blob.digest} is gone", hint="put the same content again") from error
        except OSError as error:
            raise StoreUnavailable(f"the file of blob {blob.digest} cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise StoreUnavailable(f"blob {blob.digest} is not a regular file")
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _listed(self, name: str, folder: int | None) -> Iterator[int | None]:
        """A folder to list, or None where the name is something else or gone."""
        try:
            own = open_folder(name, folder)
        except (OSError, StoreUnavailable):
            yield None
            return
        try:
            yield own
        finally:
            os.close(own)


class StagedFile:
    """A file in the staging folder, locked by us until the stage ends."""

    def __init__(self, blobs: FileBlobs, file: int, place: str) -> None:
        self._blobs = blobs
        self.file = file
        self.place = place
        self.published = False
        self.replaces = False  # a copy that is known to be durable: then this one must be, whatever the durability
        self.framed = Framed("", 0, b"")
        self.unframed: tuple[Framer, list[bytes]] | None = None

    def frame(self) -> None:
        """Checksum what was written whole, which can wait until the disk is busy with it anyway."""
        if self.unframed is not None:
            framer, chunks = self.unframed
            for chunk in chunks:
                framer.update(chunk)
            self.framed = framer.finish()
            self.unframed = None

    @property
    def digest(self) -> str:
        return self.framed.digest

    @property
    def size(self) -> int:
        return self.framed.size

    @property
    def coding(self) -> Coding:
        return _CODINGS[self.place.rpartition(".")[2]]

    def publish(self) -> Blob:
        self._blobs.publish(self)
        return Blob(self.digest, self.size, self.coding, self.place, self.framed.frames)
