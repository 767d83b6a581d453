"""Storage that fails on purpose: a disk that stops, fills up or loses data, and backends that raise.

`FaultyDisk` replaces the `Disk` under a folder store. It counts every step that changes a file. At a step of your
choice it stops the machine: it copies the folder as a killed process, or a power cut, would leave it, and raises
`Crash`. Open the copy like any other store. Nothing is really synced: the disk records what would have been.

    disk = FaultyDisk(folder, crash=At(7), image=copy)
    with contextlib.suppress(Crash):
        open_on(folder, disk).session("s").put("hello")
    coatcheck.open(copy)

SQLite's own files are modelled where they matter: only the synced part of the WAL survives a power cut. When SQLite
restarts the WAL, it syncs the new header before it writes anything else, so that older frames no longer count.
The database file changes only in checkpoints, which SQLite syncs by itself, so it is copied as it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from coatcheck import _open
from coatcheck.storage import BlobStore, Catalog
from coatcheck.storage.disk import Disk
from coatcheck.store import Store

Cut = Literal["dropped", "zeroed", "torn"]
"""What a power cut does to unsynced data: all of it is lost; names and sizes survive, but bytes do not; or a random
part of it survives."""

_BLOCK = 4096
_DATABASE = ("catalog.sqlite", "catalog.sqlite-shm")
_WAL = "catalog.sqlite-wal"
_WAL_HEADER = 32
_RESERVE = "reserve"


class Crash(BaseException):
    """The machine stopped here. Not an `Exception`, so that no error handler continues after it."""


@dataclass(frozen=True, slots=True)
class At:
    """An instant: before or after a step, or in the middle of a step that writes. Steps count from 0."""

    step: int
    when: Literal["before", "halfway", "after"] = "after"


class FaultyDisk(Disk):
    """A disk that crashes at an instant, or fails at chosen steps with an error of the operating system.

    `image` is the folder that a crash leaves behind; with `cut`, as a power cut would leave it, where `seed` decides
    random choices. `errors` maps steps to error numbers: a failed write has written its first half, and data that a
    sync failed to write is not written by a later sync. `steps` lists the steps so far, for people and for counting.
    After the crash every step raises `Crash` until `revive`, which allows cleaning up.
    """

    def __init__(
        self,
        root: Path,
        *,
        durable: bool = True,
        crash: At | None = None,
        image: Path | None = None,
        cut: Cut | None = None,
        seed: int = 0,
        errors: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(durable=durable)
        self.steps: list[str] = []
        self.crashed = False
        self._root = root
        self._crash = crash
        self._image = image
        self._cut = cut
        self._random = random.Random(seed)
        self._errors = dict(errors or {})
        self._turn = threading.RLock()
        self._held = _Held(root)

    def stop(self) -> None:
        """Stop the machine now, between two steps."""
        with contextlib.suppress(Crash):
            self._stop()

    def revive(self) -> None:
        """Allow the abandoned store to be closed. Its further steps do not matter."""
        self.crashed, self._crash, self._errors = False, None, {}

    def create(self, name: str, folder: int) -> int:
        with self._step("create", name):
            file = super().create(name, folder)
            self._held.is_new(file)
            return file

    def write(self, file: int, data: bytes | memoryview) -> None:
        with self._step("write", lambda: super(FaultyDisk, self).write(file, memoryview(data)[: len(data) // 2])):
            super().write(file, data)

    def write_at(self, file: int, data: bytes, offset: int) -> None:
        half = data[: len(data) // 2]
        with self._step("write at", lambda: super(FaultyDisk, self).write_at(file, half, offset)):
            super().write_at(file, data, offset)
            self._held.wrote(file, offset, len(data))

    def truncate(self, file: int, size: int) -> None:
        with self._step("truncate"):
            super().truncate(file, size)

    def allocate(self, file: int, size: int) -> None:
        with self._step("allocate"):
            super().allocate(file, size)

    def sync(self, file: int, *, always: bool = False) -> None:
        with self._step("sync", lambda: self._held.fail(file)):
            if self.durable or always:
                self._held.sync(file)

    def sync_data(self, file: int) -> None:
        with self._step("sync data", lambda: self._held.fail(file)):
            if self.durable:
                self._held.sync(file)

    def make_folder(self, name: str, folder: int) -> bool:
        with self._step("make folder", name):
            made = super().make_folder(name, folder)
            if made:
                self._held.is_new_folder(name, folder)
            return made

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        with self._step("rename", f"{name} to {new_name}"):
            super().rename(name, folder, new_name, new_folder)

    def remove(self, name: str, folder: int) -> None:
        with self._step("remove", name):
            super().remove(name, folder)

    def commit(self, connection: sqlite3.Connection) -> None:
        with self._step("commit"):
            super().commit(connection)
            self._held.begin_wal()

    @contextmanager
    def _step(self, what: str, detail: str | Callable[[], None] = "") -> Iterator[None]:
        with self._turn:
            if self.crashed:
                raise Crash(f"{what} after the crash")
            number = len(self.steps)
            self.steps.append(f"{what} {detail}".strip() if isinstance(detail, str) else what)
            at = self._crash if self._crash is not None and self._crash.step == number else None
            if at is not None and at.when != "after":
                if at.when == "halfway" and callable(detail):
                    detail()
                self._stop()
            if number in self._errors:
                if callable(detail):
                    detail()
                raise OSError(self._errors[number], os.strerror(self._errors[number]))
            try:
                yield
            finally:
                if at is not None:
                    self._stop()

    def _stop(self) -> None:
        self.crashed = True
        if self._image is not None:
            self._held.leave(self._image, self._cut, self._random)
        raise Crash(self.steps[-1])


class _Held:
    """The durable state of the disk under a folder: the last synced bytes of each file and names in each folder.

    Files are identified by our own numbers, because the operating system reuses inode numbers.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._bytes: dict[int, bytes] = {}
        self._lost: dict[int, dict[int, bytes]] = {}
        self._names: dict[int, dict[str, int]] = {}
        if root.is_dir():
            self._take(root)

    def is_new(self, file: int) -> None:
        self._forget_number(os.fstat(file).st_ino)

    def is_new_folder(self, name: str, folder: int) -> None:
        self._forget_number(os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino)

    def sync(self, file: int) -> None:
        info = os.fstat(file)
        if stat.S_ISDIR(info.st_mode):
            self._names[self._number(info)] = {
                name: self._number(os.stat(name, dir_fd=file, follow_symlinks=False)) for name in os.listdir(file)
            }
        else:
            number, now = self._number(info), _read(file, info.st_size)
            self._bytes[number] = self._without_lost(number, now)

    def fail(self, file: int) -> None:
        """Note a failed sync: the system marks the bytes as clean anyway and will not write them again."""
        info = os.fstat(file)
        if stat.S_ISREG(info.st_mode):
            number, now = self._number(info), _read(file, info.st_size)
            held = self._bytes.get(number, b"")
            blocks = {at: now[at : at + _BLOCK] for at in range(0, len(now), _BLOCK)}
            lost = {at: block for at, block in blocks.items() if block != held[at : at + _BLOCK]}
            self._lost[number] = self._lost.get(number, {}) | lost

    def begin_wal(self) -> None:
        """Note the header of a WAL that SQLite has begun again: the first commit syncs it."""
        with contextlib.suppress(FileNotFoundError), (self._root / _WAL).open("rb") as file:
            number, header = self._number(os.fstat(file.fileno())), file.read(_WAL_HEADER)
            held = self._bytes.get(number, b"")
            if len(header) == _WAL_HEADER and header != held[:_WAL_HEADER]:
                self._bytes[number] = header + held[_WAL_HEADER:]

    def wrote(self, file: int, offset: int, size: int) -> None:
        """Note a write, so that a later sync writes these bytes again."""
        lost = self._lost.get(self._number(os.fstat(file)), {})
        for at in [at for at in lost if at < offset + size and at + _BLOCK > offset]:
            del lost[at]

    def _without_lost(self, number: int, now: bytes) -> bytes:
        lost = self._lost.get(number)
        if not lost:
            return now
        held = self._bytes.get(number, b"").ljust(len(now), b"\0")
        blocks = {at: now[at : at + _BLOCK] for at in range(0, len(now), _BLOCK)}
        return b"".join(held[at : at + _BLOCK] if lost.get(at) == block else block for at, block in blocks.items())

    def leave(self, image: Path, cut: Cut | None, choose: random.Random) -> None:
        if cut is None:
            _copy(self._root, image)
        else:
            self._leave_folder(self._root, self._number(self._root.stat()), image, cut, choose)

    def _leave_folder(self, live: Path | None, number: int, image: Path, cut: Cut, choose: random.Random) -> None:
        image.mkdir(mode=0o700)
        held = self._names.get(number, {})
        now = {} if live is None else {entry.name: entry for entry in os.scandir(live)}
        # Find each file where it is now, whatever its name after the cut: a lost rename moves no bytes.
        for name in sorted(held.keys() | now.keys()):
            current = self._number(now[name].stat(follow_symlinks=False)) if name in now else None
            kept = held.get(name)
            if kept != current and (cut == "zeroed" or (cut == "torn" and choose.random() < 0.5)):
                kept = current
            if kept is None:
                continue
            path = self._live(kept)
            if kept in self._names or (path is not None and path.is_dir()):
                self._leave_folder(path, kept, image / name, cut, choose)
            else:
                self._leave_file(name, path, kept, image / name, cut, choose)

    def _leave_file(
        self, name: str, live: Path | None, number: int, target: Path, cut: Cut, choose: random.Random
    ) -> None:
        if live is not None and name == _RESERVE:
            _write(target, b"", live.stat().st_size)
            return
        held = self._bytes.get(number, b"")
        now = held if live is None else live.read_bytes()
        if name in _DATABASE:
            left = now
        elif cut == "dropped":
            left = held
        else:
            size = len(now) if cut == "zeroed" or choose.random() < 0.5 else len(held)
            pieces = []
            for at in range(0, size, _BLOCK):
                old, new = held[at : at + _BLOCK], now[at : at + _BLOCK]
                piece = old if old == new or cut == "zeroed" or choose.random() < 0.5 else new
                pieces.append(piece.ljust(_BLOCK, b"\0"))
            left = b"".join(pieces)[:size]
        _write(target, left, len(left))

    def _live(self, number: int) -> Path | None:
        """Return the current path of a file or folder."""
        for folder, folders, files in os.walk(self._root):
            for name in (*folders, *files):
                path = Path(folder, name)
                if self._numbers.get(path.lstat().st_ino) == number:
                    return path
        return None

    def _take(self, folder: Path) -> None:
        """Count everything in a folder as durable."""
        names: dict[str, int] = {}
        for entry in os.scandir(folder):
            path, number = Path(entry.path), self._number(entry.stat(follow_symlinks=False))
            names[entry.name] = number
            if entry.is_dir(follow_symlinks=False):
                self._take(path)
            elif entry.name != _RESERVE:
                self._bytes[number] = path.read_bytes()
        self._names[self._number(folder.stat())] = names

    def _number(self, info: os.stat_result) -> int:
        return self._numbers[info.st_ino] if info.st_ino in self._numbers else self._forget_number(info.st_ino)

    def _forget_number(self, inode: int) -> int:
        self._next += 1
        self._numbers[inode] = self._next
        return self._next


def open_on(folder: Path, disk: Disk, **options: Any) -> Store:
    """Open a folder on your own disk. Takes the options of `coatcheck.open`, except `durability`."""
    return _open.open_on(folder, disk, url=str(folder), **options)


def failing_blobs(blobs: BlobStore, before: Callable[[str], None]) -> BlobStore:
    """Return the same blob store, but call `before` with each method's name first; it may raise."""
    return cast(BlobStore, _Failing(blobs, before))


def failing_catalog(catalog: Catalog, before: Callable[[str], None]) -> Catalog:
    """Return the same catalog, but call `before` with each method's name first; it may raise."""
    return cast(Catalog, _Failing(catalog, before))


class _Failing:
    def __init__(self, inner: object, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._before(name)
            return found(*args, **options)

        return call


def _copy(folder: Path, target: Path) -> None:
    """Copy a folder byte for byte, except the content of the reserve, which has no meaning."""
    if not folder.is_dir():
        return
    target.mkdir(mode=0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _copy(Path(entry.path), target / entry.name)
        elif entry.name == _RESERVE:
            _write(target / entry.name, b"", entry.stat().st_size)
        else:
            data = Path(entry.path).read_bytes()
            _write(target / entry.name, data, len(data))


def _write(target: Path, data: bytes, size: int) -> None:
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.truncate(size)


def _read(file: int, size: int) -> bytes:
    pieces = []
    at = 0
    while at < size and (piece := os.pread(file, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
