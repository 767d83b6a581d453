"""Seeds of the simulation, and proof that it finds mistakes: each classic mistake is found within a
number of seeds."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest

from coatcheck.core_session import CoreSession
from coatcheck.errors import NotFound
from coatcheck.refs import Blob
from coatcheck.storage.files import FileBlobs, StagedFile
from coatcheck.storage.folder import FolderCatalog
from coatcheck.storage.s3 import S3Blobs
from tests.backends import Fleet
from tests.conftest import LONG_FAULTS
from tests.counting import Counts
from tests.faults.simulated_fleet import COMMAND as FLEET
from tests.faults.simulated_fleet import made_fleet, prepared_database
from tests.faults.simulated_folder import COMMAND as FOLDER
from tests.faults.simulated_folder import FolderWorld, made_folder
from tests.faults.simulation import DAY, Kind, Made, Operation, Plan, World, report, simulate
from tests.faults.volume import RecordedDisk

pytestmark = pytest.mark.faults

PUTS: tuple[Kind, ...] = ("put", "get", "forget", "put", "get")
SEEDS = 10_000 if LONG_FAULTS else 160
GROUPS = 40 if LONG_FAULTS else 4
FLEET_SEEDS = 2_000 if LONG_FAULTS else 40
FLEET_GROUPS = 20 if LONG_FAULTS else 2
# Seeds within which each mistake is found; most are found within 20.
MAX_SEEDS = 2_000 if LONG_FAULTS else 400


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_schedule_of_processes_and_faults_loses_anything_in_a_folder(
    group: int, counts: Counts
) -> None:
    run(
        range(group, SEEDS, GROUPS),
        made_folder,
        FOLDER,
        counts,
        "simulated histories of a folder (seeds)",
    )


@pytest.fixture(scope="module")
def made_on(fleet: Fleet) -> Iterator[Made]:
    """A factory of worlds that use the database of the tests."""
    with prepared_database(fleet.database.url) as database:
        yield made_fleet(database, fleet.database.url)


@pytest.mark.parametrize("group", range(FLEET_GROUPS))
def test_no_schedule_of_machines_and_faults_loses_anything_in_a_fleet(
    group: int, made_on: Made, counts: Counts
) -> None:
    run(
        range(group, FLEET_SEEDS, FLEET_GROUPS),
        made_on,
        FLEET,
        counts,
        "simulated histories of a fleet (seeds)",
    )


def run(seeds: range, made: Made, command: str, counts: Counts, what: str) -> None:
    for seed in seeds:
        world, error = simulate(Plan.of(seed), made)
        counts(what)
        for fault, number in world.injected.items():
            counts(fault, number)
        if error is not None:
            pytest.fail(report(Plan.of(seed), made, command))


@pytest.mark.parametrize("made", ["folder", "fleet"])
def test_a_seed_repeats_every_step(made: str, request: pytest.FixtureRequest) -> None:
    world = made_folder if made == "folder" else request.getfixturevalue("made_on")
    for seed in (2, 3, 5):
        first, second = (simulate(Plan.of(seed), world)[0] for _ in range(2))
        assert first.steps
        assert first.steps == second.steps
        assert first.story() == second.story()


class NoSyncOfBlobs(RecordedDisk):
    def sync(self, file: int, *, always: bool = False) -> None:
        if not self.is_blob(file):
            super().sync(file, always=always)

    def is_blob(self, file: int) -> bool:
        return stat.S_ISREG(os.fstat(file).st_mode) and os.readlink(
            f"/proc/self/fd/{file}"
        ).endswith((".raw", ".zst"))


class NoSyncOfFolders(RecordedDisk):
    def sync(self, file: int, *, always: bool = False) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):
            super().sync(file, always=always)


class SyncsOnlyOnRequest(RecordedDisk):
    """Without durability, it does not even sync data that older artifacts depend on."""

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
        return Blob(self.digest, self.size, self.coding, self.place, self.framed.frames)

    with patch.object(FileBlobs, "stage", staged), patch.object(StagedFile, "publish", named):
        yield


@contextmanager
def sweep_without_lock() -> Iterator[None]:
    def sweep(self: FileBlobs, blob: Blob, *, remove: bool = True) -> bool:
        if remove:
            self.remove(blob)
        return True

    with patch.object(FileBlobs, "sweep", sweep), patch.object(FileBlobs, "quarantine", cleared):
        yield


def cleared(self: FileBlobs | S3Blobs, blob: Blob, at: float) -> bool:
    """A copy is set aside without its lock."""
    self.remove(blob)
    return True


@contextmanager
def no_second_look() -> Iterator[None]:
    """A read does not look for a copy that was compressed meanwhile."""

    def moved(self: CoreSession, entry: object) -> object:
        raise NotFound("the bytes are missing")

    with patch.object(CoreSession, "_moved", moved):
        yield


@contextmanager
def commits_without_sync() -> Iterator[None]:
    """A put is acknowledged before SQLite has synced it."""
    with patch.object(FolderCatalog, "_is_synced", lambda self, effect: False):
        yield


def read_during_compression(seed: int) -> Plan:
    reads = (Operation(0, "get", "one", 3, 0.0),) * 12
    upkeep = Operation(1, "jump", "one", 3, 3 * DAY), Operation(1, "collect", "one", 3, 0.0)
    return _without_faults(seed, (*upkeep, *reads), (0.02, 0.05, 0.1)[seed % 3])


def put_during_sweep(seed: int) -> Plan:
    puts = tuple(Operation(0, kind, "one", value, 0.0) for value in (2, 3, 4) for kind in PUTS)
    return _without_faults(
        seed, (*(Operation(1, "collect", "one", 3, 0.0),) * 8, *puts), (0.1, 0.2, 0.3)[seed % 3]
    )


def _without_faults(seed: int, operations: tuple[Operation, ...], switching: float) -> Plan:
    return replace(
        Plan.of(seed),
        operations=operations,
        power=(True, True),
        faults=0,
        is_new=False,
        switching=switching,
    )


Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mistake:
    """A faulty disk or a faulty change to the store, and the plans that reveal it."""

    disk: type[RecordedDisk] = RecordedDisk
    change: Change = nullcontext
    plan: Callable[[int], Plan] = Plan.of

    @contextmanager
    def made(self, plan: Plan) -> Iterator[World]:
        with self.change(), made_folder(plan) as world:
            assert isinstance(world, FolderWorld)
            world.disk_type = self.disk
            yield world


MISTAKES = {
    "blobs are not synced": Mistake(NoSyncOfBlobs),
    "folders are not synced": Mistake(NoSyncOfFolders),
    "a put is acknowledged before it is synced": Mistake(change=commits_without_sync),
    "a process without durability syncs nothing": Mistake(SyncsOnlyOnRequest),
    "the row comes before the blob": Mistake(change=late_publish),
    "a sweep does not take the lock": Mistake(change=sweep_without_lock, plan=put_during_sweep),
    "a read does not look again after a compression": Mistake(
        change=no_second_look, plan=read_during_compression
    ),
}
FOUND_LATE = {
    "the row comes before the blob",
    "the row comes before the object",
}  # after a few hundred seeds


@contextmanager
def sweep_without_lease() -> Iterator[None]:
    def sweep(self: S3Blobs, blob: Blob, *, remove: bool = True) -> bool:
        if remove:
            self.remove(blob)
        return True

    with patch.object(S3Blobs, "sweep", sweep), patch.object(S3Blobs, "quarantine", cleared):
        yield


@contextmanager
def late_upload() -> Iterator[None]:
    """The row comes before the object."""
    staged, upload = S3Blobs._staged, S3Blobs._upload
    late: dict[S3Blobs, tuple[Any, ...]] = {}  # by machine: a killed one never finishes its upload

    def named(self: S3Blobs, blob: Blob, source: object) -> Blob:
        late[self] = blob, source
        return blob

    @contextmanager
    def stage(self: S3Blobs, *args: Any) -> Iterator[Any]:
        with staged(self, *args) as one:
            yield one
            if self in late:
                upload(self, *late.pop(self))

    with patch.object(S3Blobs, "_staged", stage), patch.object(S3Blobs, "_upload", named):
        yield


FLEET_MISTAKES: dict[str, tuple[Callable[[int], Plan], Change]] = {
    "a sweep does not ask for the lease": (put_during_sweep, sweep_without_lease),
    "the row comes before the object": (Plan.of, late_upload),
}


def first_found(made: Made, plan: Callable[[int], Plan]) -> int | None:
    return next(
        (seed for seed in range(MAX_SEEDS) if simulate(plan(seed), made)[1] is not None), None
    )


def each(mistakes: Iterable[str]) -> pytest.MarkDecorator:
    marked = [
        pytest.param(name, marks=[pytest.mark.repeated] if name in FOUND_LATE else [])
        for name in mistakes
    ]
    return pytest.mark.parametrize("mistake", marked, ids=lambda name: name.replace(" ", "_"))


@each(MISTAKES)
def test_the_simulation_of_a_folder_finds_the_mistake(mistake: str) -> None:
    one = MISTAKES[mistake]
    assert first_found(one.made, one.plan) is not None, f"not found in {MAX_SEEDS} seeds"


@each(FLEET_MISTAKES)
def test_the_simulation_of_a_fleet_finds_the_mistake(mistake: str, made_on: Made) -> None:
    plan, change = FLEET_MISTAKES[mistake]

    @contextmanager
    def made(plan: Plan) -> Iterator[World]:
        with change(), made_on(plan) as world:
            yield world

    assert first_found(made, plan) is not None, f"not found in {MAX_SEEDS} seeds"
