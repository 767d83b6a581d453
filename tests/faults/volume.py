"""A model of a disk: which bytes and names under a folder are durable, and what a power cut leaves
of the others.

The folder itself is real, and is in memory. Each change to it is noted here as well: the store's
through a `RecordedDisk`, SQLite's through a `RecordedSqlite`, both in the order in which they
happen.
"""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from coatcheck.storage.disk import Disk
from tests.faults.below_sqlite import OK
from tests.faults.faulty import Cut

ROOT = 0
_SECTOR = 512
_SHARED_MEMORY = "-shm"
_T = TypeVar("_T")
Event = tuple[Any, ...]
"""A change: its name, and the numbers of files and folders, names, offsets and bytes that
`Volume.apply` takes."""


class Volume:
    """The files and folders under one folder, by number. Number 0 is the folder itself."""

    def __init__(self, root: Path, log: list[Event] | None = None) -> None:
        self.root = root
        self.log = log
        self._count = 0
        self._inodes: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {ROOT: {}}  # durable
        self._names_now: dict[int, dict[str, int]] = {ROOT: {}}
        self._bytes: dict[int, bytearray] = {}  # durable
        self._writes: dict[
            int, list[tuple[int, bytes | None]]
        ] = {}  # unsynced: offset and bytes, or a size and None
        if root.is_dir():
            self._take(root, ROOT)

    def _take(self, folder: Path, number: int) -> None:
        """Count everything in a folder as durable."""
        self._inodes[folder.stat().st_ino] = number
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.endswith(_SHARED_MEMORY):
                continue
            inside = self.number(entry.stat(follow_symlinks=False), new=True)
            self._names[number][entry.name] = self._names_now[number][entry.name] = inside
            if entry.is_dir(follow_symlinks=False):
                self._names[inside], self._names_now[inside] = {}, {}
                self._take(Path(entry.path), inside)
            else:
                data = Path(entry.path).read_bytes()
                self._bytes[inside], self._writes[inside] = bytearray(data), []

    def number(self, info: os.stat_result, *, new: bool = False) -> int:
        """Return the number of a file or folder. The system reuses inode numbers, so a new file
        gets a new number."""
        if new or info.st_ino not in self._inodes:
            self._count += 1
            self._inodes[info.st_ino] = self._count
        return self._inodes[info.st_ino]

    def number_at(self, path: str) -> tuple[int, int, str]:
        """Return the numbers of a file and of its folder, and its name. A file that was never noted
        is new."""
        folder, name = os.path.split(path)
        above = self.number(os.stat(folder))
        found = self._names_now[above].get(name)
        if found is None:
            found = self.number(os.stat(path), new=True)
            self.note("make", above, name, found, False)
        return found, above, name

    def has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return name in self._names_now[self.number(os.stat(folder))]

    def note(self, *event: Any) -> None:
        """Note a change that was made to the real folder."""
        if self.log is not None:
            self.log.append(event)
        self.apply(event)

    def apply(self, event: Event) -> None:
        what, *about = event
        if what == "make":
            folder, name, number, is_folder = about
            self._names_now[folder][name] = number
            if is_folder:
                self._names[number], self._names_now[number] = {}, {}
            else:
                self._bytes[number], self._writes[number] = bytearray(), []
        elif what == "write":
            number, offset, data = about
            self._writes[number].append((offset, data))
        elif what == "truncate":
            number, size = about
            self._writes[number].append((size, None))
        elif what == "sync":
            (number,) = about
            if number in self._names:
                self._names[number] = dict(self._names_now[number])
            elif self._writes[number]:
                self._bytes[number] = _written(self._bytes[number], self._writes[number])
                self._writes[number] = []
        elif what == "lose":
            # A sync failed: the system counts the bytes as written, and never writes them.
            (number,) = about
            self._writes.get(number, []).clear()
        elif what == "rename":
            folder, name, new_folder, new_name = about
            self._names_now[new_folder][new_name] = self._names_now[folder].pop(name)
        elif what == "remove":
            folder, name = about
            self._names_now[folder].pop(name, None)

    def leave(self, target: Path, cut: Cut | None, choose: random.Random) -> None:
        """Write to a new folder what a power cut leaves; without `cut`, what the end of all
        processes leaves."""
        self._leave_folder(ROOT, target, cut, choose)

    def _leave_folder(
        self, number: int, target: Path, cut: Cut | None, choose: random.Random
    ) -> None:
        target.mkdir(mode=0o700)
        held, now = self._names[number], self._names_now[number]
        for name in sorted(held.keys() | now.keys()):
            kept = held.get(name)
            if kept != now.get(name) and (
                cut in (None, "zeroed") or (cut == "torn" and choose.random() < 0.5)
            ):
                kept = now.get(name)
            if kept is None:
                continue
            if kept in self._names:
                self._leave_folder(kept, target / name, cut, choose)
            else:
                data = self._left_of(kept, cut, choose)
                with open(
                    os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
                ) as file:
                    file.write(data.rstrip(b"\0") if name == "reserve" else data)
                    file.truncate(len(data))

    def _left_of(self, number: int, cut: Cut | None, choose: random.Random) -> bytes | bytearray:
        held, writes = self._bytes[number], self._writes[number]
        if not writes or cut == "dropped":
            return held
        if cut is None:
            return _written(held, writes)
        if cut == "zeroed":  # the new size, but none of the new bytes
            size = len(_written(held, writes))
            return held[:size].ljust(size, b"\0")
        torn: list[tuple[int, bytes | None]] = []
        for offset, data in writes:
            if data is None or choose.random() < 0.5:
                torn += [(offset, data)] if choose.random() < 0.7 else []
                continue
            edges = [0, *range(_SECTOR - offset % _SECTOR, len(data), _SECTOR), len(data)]
            which = choose.randrange(3)  # the first sectors, the last ones, or any
            limit = choose.randrange(len(edges))
            for index, (one, other) in enumerate(itertools.pairwise(edges)):
                if (index < limit, index >= limit, choose.random() < 0.5)[which]:
                    torn.append((offset + one, data[one:other]))
        return _written(held, torn)


def _written(held: bytearray, writes: list[tuple[int, bytes | None]]) -> bytearray:
    data = bytearray(held)
    for offset, piece in writes:
        if piece is None:
            del data[offset:]
        if len(data) < offset:
            data.extend(bytes(offset - len(data)))
        if piece is not None:
            data[offset : offset + len(piece)] = piece
    return data


class Steps:
    """Decides whether a change is delayed, cut in half or refused. This class performs every
    change."""

    def step(
        self,
        what: str,
        do: Callable[[], _T],
        half: Callable[[], object] | None = None,
        fail: Callable[[], object] | None = None,
    ) -> _T:
        """Make a change. `half` makes the first half of it, `fail` is what an error leaves of
        it."""
        return do()


class RecordedDisk(Disk):
    """The disk of a store, noted on a volume. Nothing is really synced."""

    def __init__(self, volume: Callable[[], Volume], steps: Steps, *, durable: bool = True) -> None:
        super().__init__(durable=durable)
        self._volume = volume
        self._steps = steps

    def _number(self, file: int) -> int:
        return self._volume().number(os.fstat(file))

    def create(self, name: str, folder: int) -> int:
        def do() -> int:
            file = super(RecordedDisk, self).create(name, folder)
            volume = self._volume()
            volume.note(
                "make", self._number(folder), name, volume.number(os.fstat(file), new=True), False
            )
            return file

        return self._steps.step(f"create {name}", do)

    def write(self, file: int, data: bytes | memoryview) -> None:
        def do(data: bytes | memoryview = data) -> None:
            at = os.lseek(file, 0, os.SEEK_CUR)
            super(RecordedDisk, self).write(file, data)
            self._volume().note("write", self._number(file), at, bytes(data))

        self._steps.step("write", do, lambda: do(data[: len(data) // 2]))

    def truncate(self, file: int, size: int) -> None:
        def do() -> None:
            super(RecordedDisk, self).truncate(file, size)
            self._volume().note("truncate", self._number(file), size)

        self._steps.step(f"truncate to {size}", do)

    def allocate(self, file: int, size: int) -> None:
        """Allocate space. Only the size is noted: the bytes of the reserve have no meaning."""

        def do() -> None:
            os.ftruncate(file, size)
            volume = self._volume()
            number, _, _ = volume.number_at(str(volume.root / "reserve"))
            volume.note("truncate", number, size)

        self._steps.step("allocate", do)

    def sync(self, file: int, *, always: bool = False) -> None:
        def do() -> None:
            if self.durable or always:
                self._volume().note("sync", self._number(file))

        self._steps.step("sync", do, fail=lambda: self._volume().note("lose", self._number(file)))

    def sync_data(self, file: int) -> None:
        def do() -> None:
            if self.durable:
                self._volume().note("sync", self._number(file))

        self._steps.step("sync data", do)

    def make_folder(self, name: str, folder: int) -> bool:
        def do() -> bool:
            made = super(RecordedDisk, self).make_folder(name, folder)
            if made:
                volume, info = self._volume(), os.stat(name, dir_fd=folder)
                volume.note("make", self._number(folder), name, volume.number(info, new=True), True)
            return made

        return self._steps.step(f"make folder {name}", do)

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        def do() -> None:
            super(RecordedDisk, self).rename(name, folder, new_name, new_folder)
            self._volume().note(
                "rename", self._number(folder), name, self._number(new_folder), new_name
            )

        self._steps.step(f"rename {name} to {new_name}", do)

    def remove(self, name: str, folder: int) -> None:
        def do() -> None:
            super(RecordedDisk, self).remove(name, folder)
            self._volume().note("remove", self._number(folder), name)

        self._steps.step(f"remove {name}", do)

    def commit(self, connection: sqlite3.Connection) -> None:
        self._steps.step("commit", lambda: super(RecordedDisk, self).commit(connection))


class RecordedSqlite:
    """What SQLite does to the files of a volume. A listener of `WrappedVfs`."""

    def __init__(self, volume: Callable[[], Volume], steps: Steps) -> None:
        self._volume = volume
        self._steps = steps
        self._unnamed: set[str] = set()  # new files whose first sync syncs their folder too

    def is_inside(self, path: str) -> bool:
        return path.startswith(f"{self._volume().root}{os.sep}")

    def opened(self, path: str) -> None:
        if self.is_inside(path):
            volume = self._volume()
            is_new = not volume.has(path)
            volume.number_at(path)
            if is_new and path.endswith(("-journal", "-wal")):
                self._unnamed.add(path)

    def write(self, path: str, offset: int, data: bytes, do: Callable[[int], int]) -> int:
        if not self.is_inside(path):
            return do(len(data))

        def write(size: int) -> int:
            volume, code = self._volume(), do(size)
            if code == OK:
                volume.note("write", volume.number_at(path)[0], offset, data[:size])
            return code

        what = f"sqlite writes {len(data)} bytes at {offset} of {os.path.basename(path)}"
        return self._steps.step(what, lambda: write(len(data)), lambda: write(len(data) // 2))

    def truncate(self, path: str, size: int, do: Callable[[], int]) -> int:
        if not self.is_inside(path):
            return do()

        def truncate() -> int:
            volume, code = self._volume(), do()
            if code == OK:
                volume.note("truncate", volume.number_at(path)[0], size)
            return code

        return self._steps.step(f"sqlite truncates {os.path.basename(path)} to {size}", truncate)

    def sync(self, path: str, do: Callable[[], int]) -> int:
        if not self.is_inside(path):
            return do()

        def sync() -> int:
            volume = self._volume()
            number, folder, _ = volume.number_at(path)
            volume.note("sync", number)
            if path in self._unnamed:
                self._unnamed.discard(path)
                volume.note("sync", folder)
            return OK

        def fail() -> None:
            volume = self._volume()
            volume.note("lose", volume.number_at(path)[0])

        return self._steps.step(f"sqlite syncs {os.path.basename(path)}", sync, fail=fail)

    def remove(self, path: str, do: Callable[[], int], *, sync: bool) -> int:
        if not self.is_inside(path) or path.endswith(_SHARED_MEMORY):
            return do()

        def remove() -> int:
            volume = self._volume()
            folder, name = os.path.split(path)
            above, code = volume.number(os.stat(folder)), do()
            volume.note("remove", above, name)
            if sync:
                volume.note("sync", above)
            return code

        return self._steps.step(f"sqlite removes {os.path.basename(path)}", remove)

    def sleep(self) -> bool:
        return False
