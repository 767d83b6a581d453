"""Seeds of the simulation, and proof that it finds mistakes: each of the classic ones is found within some seeds."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from coatcheck.core_session import CoreSession
from coatcheck.errors import NotFound
from coatcheck.refs import Blob
from coatcheck.storage.files import FileBlobs, StagedFile
from coatcheck.storage.folder import FolderCatalog
from tests.conftest import LONG_FAULTS
from tests.counting import Counts
from tests.faults.simulated_folder import COMMAND, FolderWorld, made_folder
from tests.faults.simulation import Plan, World, report, simulate
from tests.faults.volume import RecordedDisk

pytestmark = pytest.mark.faults

SEEDS = 10_000 if LONG_FAULTS else 160
GROUPS = 40 if LONG_FAULTS else 4
MOST = 2_000 if LONG_FAULTS else 40  # seeds within which each mistake is found


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_schedule_of_processes_and_faults_loses_anything_in_a_folder(group: int, counts: Counts) -> None:
    for seed in range(group, SEEDS, GROUPS):
        world, error = simulate(Plan.of(seed), made_folder)
        counts("simulated histories of a folder (seeds)")
        for what, number in world.injected.items():
            counts(what, number)
        if error is not None:
            pytest.fail(report(Plan.of(seed), made_folder, COMMAND))


class NoSyncOfBlobs(RecordedDisk):
    def sync(self, file: int, *, always: bool = False) -> None:
        if not self.is_blob(file):
            super().sync(file, always=always)

    def is_blob(self, file: int) -> bool:
        return stat.S_ISREG(os.fstat(file).st_mode) and os.readlink(f"/proc/self/fd/{file}").endswith((".raw", ".zst"))


class NoSyncOfFolders(RecordedDisk):
    def sync(self, file: int, *, always: bool = False) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):
            super().sync(file, always=always)


class NoSyncOfJournal(RecordedDisk):
    def sync_data(self, file: int) -> None:
        pass


class SyncsOnlyOnRequest(RecordedDisk):
    """Without durability, not even what older data depends on is synced."""

    def sync(self, file: int, *, always: bool = False) -> None:
        super().sync(file)


@contextmanager
def late_publish() -> Iterator[None]:
    """The row comes before the blob."""
    stage, publish = FileBlobs.stage, StagedFile.publish

    @contextmanager
    def staged(self: FileBlobs, *args: Any) -> Iterator[StagedFile]:
        with stage(self, *args) as one:
            yield one
            publish(one)

    def named(self: StagedFile) -> Blob:
        self.frame()
        return Blob(self.digest, self.size, self.coding, self.place, self.framed.frames)

    with patch.object(FileBlobs, "stage", staged), patch.object(StagedFile, "publish", named):
        yield


@contextmanager
def sweep_without_lock() -> Iterator[None]:
    def sweep(self: FileBlobs, blob: Blob, *, remove: bool = True) -> bool:
        if remove:
            self.remove(blob)
        return True

    with patch.object(FileBlobs, "sweep", sweep):
        yield


@contextmanager
def no_second_look() -> Iterator[None]:
    """A read does not look for a copy that was compressed meanwhile."""

    def moved(self: CoreSession, entry: object) -> object:
        raise NotFound("the bytes are missing")

    with patch.object(CoreSession, "_moved", moved):
        yield


@contextmanager
def journal_replaced_too_early() -> Iterator[None]:
    with patch.object(FolderCatalog, "_sync_wal", lambda self, always=False: None):
        yield


Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mistake:
    """A disk or a change to the store that is wrong, and a seed near the first that shows it."""

    first: int
    disk: type[RecordedDisk] = RecordedDisk
    change: Change = nullcontext

    @contextmanager
    def made(self, plan: Plan) -> Iterator[World]:
        with self.change(), made_folder(plan) as world:
            assert isinstance(world, FolderWorld)
            world.disk_type = self.disk
            yield world


MISTAKES = {
    "blobs are not synced": Mistake(0, NoSyncOfBlobs),
    "folders are not synced": Mistake(0, NoSyncOfFolders),
    "a put is acknowledged before the journal is synced": Mistake(0, NoSyncOfJournal),
    "a process without durability syncs nothing": Mistake(0, SyncsOnlyOnRequest),
    "the row comes before the blob": Mistake(0, change=late_publish),
    "a sweep does not take the lock": Mistake(0, change=sweep_without_lock),
    "a read does not look again after a compression": Mistake(0, change=no_second_look),
    "the journal is replaced before the database is synced": Mistake(0, change=journal_replaced_too_early),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name.replace(" ", "_"))
def test_the_simulation_finds_that(mistake: str) -> None:
    one = MISTAKES[mistake]
    first = 0 if LONG_FAULTS else one.first
    found = (seed for seed in range(first, first + MOST) if simulate(Plan.of(seed), one.made)[1] is not None)
    assert next(found, None) is not None, f"not found in {MOST} seeds"
