"""A machine that stops or fails at a chosen step: all that a store, and SQLite below it, does to
files is a step.

    with machines():
        disk = FaultyDisk(folder, crash=At(7), image=copy)
        with contextlib.suppress(Crash, StoreError):
            open_on(folder, disk).session("s").put("hello")
    coatcheck.open(copy)

A crash inside SQLite reaches the caller as an I/O error; every later step raises `Crash`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from coatcheck.storage.folder import INDEX, LOG
from tests.faults.below_sqlite import wrapped_vfs
from tests.faults.faulty import Crash, Cut
from tests.faults.volume import RecordedDisk, RecordedSqlite, Steps, Volume

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class At:
    """An instant: before or after a step, or in the middle of a step that writes. Steps count from
    0."""

    step: int
    when: Literal["before", "halfway", "after"] = "after"


class FaultyDisk(RecordedDisk):
    """A disk that crashes at an instant, or fails at chosen steps with an error of the operating
    system.

    `image` is the folder that a crash leaves behind; with `cut`, as a power cut would leave it,
    where `seed` decides random choices. `errors` maps steps to error numbers: a failed write has
    written its first half, and data that a sync failed to write is not written by a later sync.
    `steps` lists the steps so far, for people and for counting. After the crash every step raises
    `Crash` until `revive`, which allows cleaning up.
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
        root.mkdir(mode=0o700, exist_ok=True)
        self.root = root
        self._inode = root.stat().st_ino
        volume = Volume(root)
        self.faults = _Faults(volume, crash, image, cut, random.Random(seed), dict(errors or {}))
        super().__init__(lambda: volume, self.faults, durable=durable)
        self.sqlite = RecordedSqlite(lambda: volume, self.faults)
        _machines[root] = self

    @property
    def steps(self) -> list[str]:
        return self.faults.steps

    @property
    def crashed(self) -> bool:
        return self.faults.crashed

    def is_current(self) -> bool:
        """Return whether the folder is still the one that this disk was made for."""
        return self.root.exists() and self.root.stat().st_ino == self._inode

    def stop(self) -> None:
        """Stop the machine now, between two steps."""
        with contextlib.suppress(Crash):
            self.faults.stop()

    def revive(self) -> None:
        """Allow the abandoned store to be closed. Its further steps do not matter."""
        self.faults.revive()


class _Faults(Steps):
    """Counts steps, and stops or fails at some."""

    def __init__(
        self,
        volume: Volume,
        crash: At | None,
        image: Path | None,
        cut: Cut | None,
        choose: random.Random,
        errors: dict[int, int],
    ) -> None:
        self.steps: list[str] = []
        self.crashed = False
        self._volume = volume
        self._crash = crash
        self._image = image
        self._cut = cut
        self._choose = choose
        self._errors = errors
        self._turn = threading.RLock()

    def step(
        self,
        what: str,
        do: Callable[[], _T],
        half: Callable[[], object] | None = None,
        fail: Callable[[], object] | None = None,
    ) -> _T:
        with self._turn:
            if self.crashed:
                raise Crash(f"{what} after the crash")
            number = len(self.steps)
            self.steps.append(what)
            at = self._crash if self._crash is not None and self._crash.step == number else None
            if at is not None and at.when != "after":
                if at.when == "halfway" and half is not None:
                    half()
                self.stop()
            if number in self._errors:
                effect = half or fail
                if effect is not None:
                    effect()
                raise OSError(self._errors[number], os.strerror(self._errors[number]))
            try:
                return do()
            finally:
                if at is not None:
                    self.stop()

    def stop(self) -> None:
        self.crashed = True
        if self._image is not None:
            self._volume.leave(self._image, self._cut, self._choose)
            self._leave_index(self._volume.root / INDEX, self._image)
        raise Crash(self.steps[-1])

    def _leave_index(self, index: Path, image: Path) -> None:
        """Leave the index of the WAL behind. After a power cut it may be missing: nobody syncs
        it."""
        is_kept = self._cut is None or self._choose.random() < 0.5
        if is_kept and index.exists() and (image / LOG).exists():
            shutil.copyfile(index, image / INDEX)

    def revive(self) -> None:
        self.crashed, self._crash, self._errors = False, None, {}


_machines: weakref.WeakValueDictionary[Path, FaultyDisk] = weakref.WeakValueDictionary()
"""The newest machine of each folder."""


class _Machines:
    """Passes what SQLite does to the machine whose files it concerns. A listener of
    `WrappedVfs`."""

    def _sqlite(self, path: str) -> RecordedSqlite | None:
        for machine in list(_machines.values()):
            if machine.sqlite.is_inside(path) and machine.is_current():
                return machine.sqlite
        return None

    def opened(self, path: str) -> None:
        sqlite = self._sqlite(path)
        if sqlite is not None:
            sqlite.opened(path)

    def write(self, path: str, offset: int, data: bytes, do: Callable[[int], int]) -> int:
        sqlite = self._sqlite(path)
        return do(len(data)) if sqlite is None else sqlite.write(path, offset, data, do)

    def truncate(self, path: str, size: int, do: Callable[[], int]) -> int:
        sqlite = self._sqlite(path)
        return do() if sqlite is None else sqlite.truncate(path, size, do)

    def sync(self, path: str, do: Callable[[], int]) -> int:
        sqlite = self._sqlite(path)
        return do() if sqlite is None else sqlite.sync(path, do)

    def remove(self, path: str, do: Callable[[], int], *, sync: bool) -> int:
        sqlite = self._sqlite(path)
        return do() if sqlite is None else sqlite.remove(path, do, sync=sync)

    def sleep(self) -> bool:
        return False


@contextmanager
def machines() -> Iterator[None]:
    """Let faulty disks see what SQLite does to their files."""
    _machines.clear()
    with wrapped_vfs().listening(_Machines()):
        yield
