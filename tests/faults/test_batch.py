"""Many puts, one sync: what a batch guarantees, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

import coatcheck
from tests.faults.faulty import open_on
from tests.faults.machine import FaultyDisk
from tests.faults.world import problems

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("on_machines")]


def test_a_batch_of_puts_costs_one_sync(in_memory: Path) -> None:
    disk = FaultyDisk(in_memory / "store", image=in_memory / "image", cut="dropped")

    def syncs() -> int:
        return sum("sync" in step for step in disk.steps)

    with open_on(in_memory / "store", disk) as store:
        session = store.session("s")
        session.put("before")
        before = syncs()
        with store.batching:
            for number in range(50):
                session.put(f"artifact {number}")
            assert syncs() == before
        assert syncs() == before + 1


def test_a_finished_batch_survives_a_power_cut(in_memory: Path) -> None:
    disk = FaultyDisk(in_memory / "store", image=in_memory / "image", cut="dropped")
    store = open_on(in_memory / "store", disk)
    session = store.session("s", ttl=None)
    with store.batching:
        refs = [session.put(f"artifact {number}") for number in range(20)]
    disk.stop()
    with coatcheck.open(in_memory / "image") as left:
        assert [left.session("s").get(ref) for ref in refs] == [
            f"artifact {number}" for number in range(20)
        ]
        assert problems(left) == []
    disk.revive()
    store.close()
