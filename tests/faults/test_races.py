"""Races between processes: collections against puts of the same content, and a wrong clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest

import coatcheck
from coatcheck import Session, Store
from coatcheck.collect import collect
from coatcheck.storage.disk import Disk
from coatcheck.storage.folder import open_folder_store
from coatcheck.storage.passages import Passages
from tests.faults.faulty import failing_blobs, failing_catalog, open_on
from tests.faults.world import ROOT, assert_clean, problems, state_of

pytestmark = pytest.mark.faults


def _run(*commands: tuple[str, ...]) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", *command],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    try:
        results = [(one.communicate()[1].decode(), one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [code for _, code in results] == [0] * len(commands), "\n".join(
        text[-3000:] for text, code in results if code
    )


def test_a_collection_that_races_puts_of_the_same_content_leaves_no_dangling_ref(
    tmp_path: Path, long_faults: bool
) -> None:
    folder, seconds = tmp_path / "store", "60" if long_faults else "1"
    _run(*(("race", str(folder), str(seed), seconds) for seed in range(8)))
    with coatcheck.open(folder) as store:
        assert problems(store) == []
        state_of(store)
        assert_clean(store)


def test_a_collection_with_a_clock_that_is_an_hour_off_removes_no_live_artifacts(
    tmp_path: Path, long_faults: bool
) -> None:
    folder, seconds = tmp_path / "store", "60" if long_faults else "1"
    _run(
        ("collect with a clock that is off", str(folder), "0", seconds),
        *(("live", str(folder), str(seed), seconds) for seed in range(3)),
    )
    with coatcheck.open(folder) as store:
        assert store.stats().tombstones == 0
        state_of(store)
        assert_clean(store)


def test_a_copy_whose_row_is_committed_while_a_sweep_looks_at_it_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    blobs, catalog = open_folder_store(folder, Disk())
    store = Store(blobs, catalog, Passages(None), url=str(folder), session_type=Session)
    data = b"x" * 200_000
    entered, publish, committed = Event(), Event(), Event()
    refs: list[coatcheck.Ref] = []

    def wait_before(call: str) -> None:
        """In the putting thread: the bytes are published, the row is not written yet."""
        if call == "put":
            entered.set()
            assert publish.wait(30)

    def finish_before(call: str) -> None:
        """In the sweeping thread: it has seen the copy without a row; now let the put finish."""
        if call == "sweep":
            publish.set()
            assert committed.wait(30)

    def put() -> None:
        slow = Store(
            blobs,
            failing_catalog(catalog, wait_before),
            Passages(None),
            url=str(folder),
            session_type=Session,
        )
        refs.append(slow.session("s").put(data))
        committed.set()

    thread = Thread(target=put)
    thread.start()
    assert entered.wait(30)
    collect(failing_blobs(blobs, finish_before), catalog, now=time.time(), grace=0)
    thread.join()
    assert store.session("s").get(refs[0]) == data
    store.close()


def test_a_sweep_that_meets_a_staged_file_before_it_is_locked_does_not_stop_the_put(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"

    class Swept(Disk):
        """Another process sweeps the staging folder right after a file was created in it."""

        def create(self, name: str, folder: int) -> int:
            file = super().create(name, folder)
            if name.endswith(".raw") and not swept:
                swept.append(name)
                os.unlink(name, dir_fd=folder)
            return file

    swept: list[str] = []
    with open_on(folder, Swept()) as store:
        ref = store.session("s").put(b"y" * 200_000)
        assert swept
        assert store.session("s").get(ref) == b"y" * 200_000
        assert_clean(store)
