"""SIGKILL at random instants of eight processes that put, forget, end and collect."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.counting import Counts
from tests.faults.killing import check, run_and_kill
from tests.faults.world import chosen_seed

pytestmark = pytest.mark.faults

PROCESSES = 8
ROUNDS_PER_STORE = 4


def test_acknowledged_artifacts_survive_kill_9_at_any_instant(
    tmp_path: Path, long_faults: bool, counts: Counts
) -> None:
    wanted = 1_000 if long_faults else 16
    seed = chosen_seed()
    rng = random.Random(seed)
    kills = acknowledged = round_ = 0
    folder = tmp_path / "store"
    try:
        while kills < wanted:
            logs = tmp_path / "logs" / str(round_)
            logs.mkdir(parents=True)
            killed = run_and_kill(folder, logs, rng, min(PROCESSES, wanted - kills))
            counts("kills of processes", killed)
            kills += killed
            in_store = check(folder, tmp_path / "logs")
            round_ += 1
            if round_ % ROUNDS_PER_STORE == 0 or kills >= wanted:
                acknowledged += in_store
                shutil.rmtree(folder)
                shutil.rmtree(tmp_path / "logs")
    except BaseException as error:
        error.add_note(
            f"COATCHECK_SEED={seed}, after {kills} kills, round {round_}, {acknowledged} acknowledged"
        )
        raise
    assert acknowledged > kills
