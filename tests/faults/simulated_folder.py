"""The simulation of processes on one machine that share a folder.

The store's changes go through a `RecordedDisk` and SQLite's through a `RecordedSqlite`. At each of
them another process may continue, this one may be killed, or the power may fail; at each file lock
and each opened file, another process may continue. A power cut leaves what was synced, and some,
none or only the size of the rest. Then all processes start again.

    python -m tests.faults.simulated_folder 1234
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import coatcheck
from coatcheck import Store
from coatcheck.storage import reserve
from coatcheck.storage.folder import INDEX, LOG, FolderCatalog
from tests.faults.below_sqlite import wrapped_vfs
from tests.faults.conftest import folder_in_memory
from tests.faults.faulty import Crash, Cut, open_on
from tests.faults.linearizable import NEW, State
from tests.faults.simulation import (
    CUTS,
    INLINE,
    SESSIONS,
    START,
    VALUES,
    Plan,
    Process,
    World,
    Wrong,
    drawn_names,
    main,
)
from tests.faults.volume import RecordedDisk, RecordedSqlite, Volume

COMMAND = "tests.faults.simulated_folder"
_OLD = 3  # this value is in each session of the template
_T = TypeVar("_T")
_flock = fcntl.flock


class FolderWorld(World):
    """One machine with a disk."""

    disk_type: type[RecordedDisk] = RecordedDisk

    def __init__(self, plan: Plan, base: Path) -> None:
        super().__init__(plan)
        self._base = base
        self._cuts = 0
        root = base / "0"
        if plan.is_new:
            root.mkdir(mode=0o700)
        else:
            shutil.copytree(template(), root)
        self.volume = Volume(root)

    def first_state(self, value: int) -> State:
        return ("present", frozenset()) if value == _OLD and not self.plan.is_new else NEW

    def open(self, process: Process | None) -> Store:
        durable = process is None or self.plan.power[process.number]
        disk = self.disk_type(lambda: self.volume, self, durable=durable)
        return open_on(self.volume.root, disk, clock=lambda: self.now)

    def abandon(self, store: Store) -> None:
        catalog: Any = store._catalog
        if not catalog._closed:
            catalog._closed = True
            with contextlib.suppress(sqlite3.Error):
                catalog._close_files()
            with contextlib.suppress(OSError):
                os.close(catalog._folder)
        store._blobs.close()
        store._passages.close()

    @contextmanager
    def around(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(wrapped_vfs().listening(_Sqlite(self)))
            for owner, name, value in (
                (fcntl, "flock", self._lock),
                (os, "open", self._pausing(os.open)),
                (os, "listdir", self._pausing(os.listdir)),
                (reserve, "FULL_SIZE", self.plan.reserve),
                (FolderCatalog, "inline_limit", INLINE),
            ):
                stack.enter_context(patch.object(owner, name, value))
            yield

    def inject(
        self, process: Process, what: str, do: Callable[[], _T], half: Callable[[], object] | None
    ) -> _T:
        is_cut, when = (
            self.choose.random() < 0.5,
            self.choose.choice(("before", "halfway", "after")),
        )
        if when == "after":
            do()
        elif when == "halfway" and half is not None:
            half()
        if not process.is_dead:  # otherwise a fault inside this step killed it
            where = f"{when} '{what}' of process {process.number}"
            if is_cut:
                self._cut_power(self.choose.choice(CUTS), where)
            else:
                self.kill(process, where)
        raise Crash

    def before_final_check(self) -> None:
        if self.plan.last_cut is not None:
            self._cut_power(self.plan.last_cut, "at the end")

    def _cut_power(self, how: Cut, where: str) -> None:
        self._cuts += 1
        self.injected["simulated power cuts"] += 1
        if not all(self.plan.power):
            # Puts of a process without durability may be lost, and the index of the WAL may say so.
            self.excused = ("damaged", "missing", "catalog: the end of the write-ahead log")
        root, running = self._base / str(self._cuts), self.running
        self.running = None  # no process runs meanwhile
        index = self.volume.root / INDEX
        self.volume.leave(root, how, self.choose)
        if (root / LOG).exists() and index.exists() and self.choose.random() < 0.5:
            shutil.copyfile(index, root / INDEX)  # the system may have written it, or not
        self.volume = Volume(root)
        self.running = running
        self.note(f"power cut ({how}): {where}", is_cut=True)
        for process in self.processes:
            process.is_dead = not process.is_done

    def _lock(self, file: int, how: int) -> None:
        """Take a file lock as `flock` does, but let other processes run meanwhile."""
        process = self.current()
        if process is None or how & fcntl.LOCK_UN:
            return _flock(file, how)
        self.pause(process)
        for _ in range(100_000):
            try:
                return _flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
            self.pause(process, wait=True)
        raise Wrong("a lock never became free")

    def _pausing(self, call: Callable[..., _T]) -> Callable[..., _T]:
        def paused(*args: Any, **options: Any) -> _T:
            process = self.current()
            if process is not None and not process.is_dead:
                self.pause(process)
            return call(*args, **options)

        return paused


class _Sqlite(RecordedSqlite):
    def __init__(self, world: FolderWorld) -> None:
        super().__init__(lambda: world.volume, world)
        self._world = world

    def sleep(self) -> bool:
        process = self._world.current()
        if process is not None and not process.is_dead:
            with contextlib.suppress(Crash):
                self._world.pause(process, wait=True)
        return process is not None


@cache
def template() -> Path:
    """A store with an artifact in each session, made once."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(folder_in_memory()) / "template"
    with (
        drawn_names(-1),
        patch.object(reserve, "FULL_SIZE", 1 << 16),
        patch.object(FolderCatalog, "inline_limit", INLINE),
        coatcheck.open(folder, clock=lambda: START) as store,
    ):
        for session_id in SESSIONS:
            store.session(session_id, ttl=None).put(VALUES[_OLD])
    return folder


@contextmanager
def made_folder(plan: Plan, kind: type[FolderWorld] = FolderWorld) -> Iterator[World]:
    with folder_in_memory() as base:
        yield kind(plan, base)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], made_folder, COMMAND))
