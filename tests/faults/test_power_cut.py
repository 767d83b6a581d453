"""Power cuts that involve several processes, threads or durabilities."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import coatcheck
from coatcheck.errors import StoreError
from tests.conftest import LONG_FAULTS
from tests.faults.faulty import Crash, Cut, open_on
from tests.faults.machine import At, FaultyDisk
from tests.faults.world import assert_clean, problems, refs_of, state_of

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("on_machines")]

LARGE = random.Random(2).randbytes(200_000)
TEXT = b"one line of many\n" * 20_000
NOW = 1_700_000_000.0
DAY = 86_400.0
CUTS: tuple[Cut, ...] = ("dropped", "zeroed", "torn")


def test_a_folder_created_by_another_process_is_synced_too(in_memory: Path) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    with coatcheck.open(folder):
        pass
    disk = FaultyDisk(folder, image=image, cut="dropped")
    with open_on(folder, disk) as store:
        blobs = os.open(folder / "blobs", os.O_RDONLY)
        for number in range(256):  # what a put leaves if it is killed before it syncs
            disk.make_folder(f"{number:02x}", blobs)
        os.close(blobs)
        ref = store.session("s", ttl=None).put(LARGE)
        disk.stop()
        disk.revive()
    with coatcheck.open(image) as store:
        assert store.session("s").get(ref) == LARGE


def test_a_process_without_durability_preserves_the_durability_of_another(in_memory: Path) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    disk = FaultyDisk(folder, image=image, cut="dropped")
    with open_on(folder, disk) as store:
        ref = store.session("s", ttl=None).put(b"synced when it was put")
        disk.durable = False
        with open_on(folder, disk) as careless:
            assert careless.session("s").get(ref) == b"synced when it was put"
        disk.stop()
        disk.revive()
    with coatcheck.open(image) as store:
        assert store.session("s").get(ref) == b"synced when it was put"


AGAIN: dict[str, Callable[[coatcheck.Store, bytes], object]] = {
    "the same put": lambda store, data: store.session("s").put(data, name="it"),
    "another name": lambda store, data: store.session("s").put(data, name="other"),
    "another session": lambda store, data: store.session("t", ttl=None).put(data, name="it"),
    "a stream": lambda store, data: store.session("s").put(io.BytesIO(data), name="it"),
    "a stream to another session": lambda store, data: store.session("t", ttl=None).put(
        io.BytesIO(data)
    ),
    "a grant": lambda store, data: store.session("s").grant("it", "t"),
}


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("size", [20, 200_000, 3_000_000])
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_durable_put_of_content_first_put_without_durability_survives(
    again: str, size: int, is_open: bool, in_memory: Path
) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    disk = FaultyDisk(folder, durable=False, image=image, cut="dropped")
    data = random.Random(size).randbytes(size)
    careless = open_on(folder, disk)
    careless.session("s", ttl=None).put(data, name="it")
    if not is_open:
        careless.close()
    disk.durable = True
    with open_on(folder, disk) as store:
        AGAIN[again](store, data)
        disk.stop()
        disk.revive()
    careless.close()
    with coatcheck.open(image) as store:
        found = [store.session(ref.session_id).get(ref) for ref in refs_of(store)]
        assert data in found
        assert problems(store) == []


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", range(4 if LONG_FAULTS else 2))
def test_without_durability_a_power_cut_loses_no_old_artifacts_and_the_store_opens(
    cut: Cut, seed: int, in_memory: Path
) -> None:
    folder = in_memory / "store"
    with coatcheck.open(folder, durability="process", clock=lambda: NOW) as store:
        old = store.session("old", ttl=None)
        for number in range(4):
            old.put(TEXT + bytes([number]), name=str(number))
        old.put(LARGE, name="large")
        state = state_of(store)
    for stop in (1, 5, 12, 20, 30, 45, 60, 90) if LONG_FAULTS else (1, 12, 30, 60):
        image = in_memory / f"image-{stop}"
        disk = FaultyDisk(folder, durable=False, image=image, cut=cut, seed=seed)
        with open_on(folder, disk, clock=lambda: NOW + 3 * DAY) as store:
            session = store.session("new", ttl=None)
            for number in range(3):
                session.put(random.Random(stop + number).randbytes(500), name=str(number))
                session.put(random.Random(stop + number).randbytes(150_000), name=f"large {number}")
            session.forget("large 1")
            store.collect()
            disk.stop()
            disk.revive()
        with coatcheck.open(image, clock=lambda: NOW + 3 * DAY) as store:
            held = {(one.name, one.artifact_id) for one in store.session("old").list()}
            assert held == {
                (name, digest) for session_id, name, digest, _ in state if session_id == "old"
            }
            for one in store.session("old").list():
                assert store.session("old").get(one) is not None
            store.verify(repair=True)
            assert problems(store, orphans=True) == []


@pytest.mark.parametrize("cut", CUTS)
def test_without_durability_compressing_never_loses_existing_artifacts(
    cut: Cut, in_memory: Path
) -> None:
    start = in_memory / "start"
    with coatcheck.open(start, clock=lambda: NOW) as store:
        for number in range(2):
            store.session("old", ttl=None).put(TEXT + bytes([number]))
        state = state_of(store)
    step, stride = (0, 1) if LONG_FAULTS else (CUTS.index(cut), len(CUTS))
    while True:
        folder, image = in_memory / f"store-{step}", in_memory / f"image-{step}"
        shutil.copytree(start, folder)
        disk = FaultyDisk(folder, durable=False, crash=At(step), image=image, cut=cut, seed=step)
        opened: list[coatcheck.Store] = []
        with contextlib.suppress(Crash, StoreError):
            opened.append(open_on(folder, disk, clock=lambda: NOW + 3 * DAY))
            opened[0].collect()
        is_done = not disk.crashed
        disk.revive()
        for store in opened:
            store.close()
        if is_done:
            break
        with coatcheck.open(image) as store:
            assert state_of(store) == state, f"step {step}: {disk.steps[step]}"
        step += stride
    assert step > 20


CHANGES: dict[str, Callable[[coatcheck.Store], object]] = {
    "a note": lambda store: store.note_collected(),
    "a put": lambda store: (
        store.session("new", ttl=None).put(b"small"),
        store.session("new").list(),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cut", CUTS)
def test_without_durability_a_change_after_compressing_never_loses_existing_artifacts(
    cut: Cut, change: str, in_memory: Path
) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    with coatcheck.open(folder, clock=lambda: NOW) as store:
        for number in range(2):
            store.session("old", ttl=None).put(TEXT + bytes([number]))
        state = state_of(store)
    disk = FaultyDisk(folder, durable=False, image=image, cut=cut)
    with open_on(folder, disk, clock=lambda: NOW + 3 * DAY) as store:
        assert store.collect().compressed == 2
        CHANGES[change](store)  # the database restarts its WAL
        disk.stop()
        disk.revive()
    with coatcheck.open(image) as store:
        assert {one for one in state_of(store) if one[0] == "old"} == state
        assert problems(store) == []


@pytest.mark.parametrize("unsynced", [False, True], ids=["alone", "after_a_batch"])
def test_after_a_failed_sync_nothing_is_acknowledged_until_it_is_durable(
    unsynced: bool, in_memory: Path
) -> None:
    def use(disk: FaultyDisk, *, fails: bool) -> None:
        with open_on(disk.root, disk) as store:
            session = store.session("s", ttl=None)
            session.put(b"first")
            if unsynced:
                with contextlib.suppress(ZeroDivisionError), store.batching:
                    session.put(b"x" * 50_000, name="in a batch")
                    raise ZeroDivisionError  # so that nothing is synced
            before.append(len(disk.steps))
            with pytest.raises(StoreError) if fails else contextlib.nullcontext():
                session.put(b"y" * 50_000, name="fails")
            session.put(b"z" * 50_000, name="after")
            session.put(b"y" * 50_000, name="fails")
            disk.stop()
            disk.revive()

    before: list[int] = []
    counted = FaultyDisk(in_memory / "counted")
    use(counted, fails=False)
    at = counted.steps.index("sqlite syncs catalog.sqlite-wal", before[0])
    image = in_memory / "image"
    use(
        FaultyDisk(in_memory / "store", image=image, cut="dropped", errors={at: errno.EIO}),
        fails=True,
    )
    with coatcheck.open(image) as store:
        assert store.session("s").get("after") == b"z" * 50_000
        assert store.session("s").get("fails") == b"y" * 50_000


class Raced(FaultyDisk):
    """Calls back once, before a staged file is created: the copy that a put looked at may be gone
    by then. With `stops_at_sweep`, stops the machine when a compressed copy has been removed."""

    before_stage: Callable[[], object] | None = None
    stops_at_sweep = False

    def create(self, name: str, folder: int) -> int:
        call, self.before_stage = (
            (self.before_stage, None) if name.endswith(".raw") else (None, self.before_stage)
        )
        if call:
            call()
        return super().create(name, folder)

    def remove(self, name: str, folder: int) -> None:
        super().remove(name, folder)
        if self.stops_at_sweep and name.endswith(".zst"):
            self.stops_at_sweep = False
            self.stop()
            self.revive()


def _replace_copy(folder: Path, disk: Raced) -> coatcheck.Store:
    """Put content durably. Put it again without durability, while another process compresses it:
    this put finds that its file is missing, and so replaces the compressed copy. Return the open
    store."""
    with open_on(folder, disk, clock=lambda: NOW) as store:
        store.session("old", ttl=None).put(TEXT, name="it")
    disk.durable = False
    store = open_on(folder, disk, clock=lambda: NOW + 3 * DAY)
    copy = Path(store.session("old").list()[0].content_uri.removeprefix("file://"))
    hidden = folder.with_name("hidden")

    def compress() -> None:
        hidden.rename(copy)
        with open_on(folder, disk, clock=lambda: NOW + 3 * DAY) as other:
            assert other.collect().compressed == 1

    copy.rename(hidden)  # as if it were compressed after the put looked at the row
    disk.before_stage = compress
    store.session("new", ttl=None).put(TEXT)
    assert disk.before_stage is None
    assert store.session("old").list()[0].content_uri.endswith(".raw")
    return store


@pytest.mark.parametrize("cut", CUTS)
def test_a_copy_that_replaces_another_is_synced_even_without_durability(
    cut: Cut, in_memory: Path
) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    disk = Raced(folder, image=image, cut=cut)
    with _replace_copy(folder, disk) as store:
        store.collect(orphans=False, compress=False)  # makes the row durable
        disk.stop()
        disk.revive()
    with coatcheck.open(image) as store:
        assert store.session("old").get("it") == TEXT


def test_a_replaced_copy_is_swept_only_after_the_row_that_names_the_new_one_is_durable(
    in_memory: Path,
) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    # The removal is durable, unsynced bytes are not.
    disk = Raced(folder, image=image, cut="zeroed")
    with _replace_copy(folder, disk) as store:
        disk.stops_at_sweep = True
        assert store.collect(compress=False).orphans == 1
        assert not disk.stops_at_sweep
    with coatcheck.open(image) as store:
        assert store.session("old").get("it") == TEXT


@pytest.mark.parametrize("cut", CUTS)
def test_a_durable_put_does_not_rely_on_a_copy_that_another_process_has_just_put_without_durability(
    cut: Cut, in_memory: Path
) -> None:
    folder, image = in_memory / "store", in_memory / "image"
    disk = Raced(folder, image=image, cut=cut)
    with open_on(folder, disk) as store, open_on(folder, disk) as careless:

        def put_carelessly() -> None:
            disk.durable = False
            careless.session("careless", ttl=None).put(LARGE)
            disk.durable = True

        disk.before_stage = put_carelessly
        ref = store.session("s", ttl=None).put(LARGE)
        assert disk.before_stage is None
        disk.stop()
        disk.revive()
    with coatcheck.open(image) as store:
        assert store.session("s").get(ref) == LARGE
        assert_clean(store)
