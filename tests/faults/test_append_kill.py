"""SIGKILL at random instants of processes that append to one transcript."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import pytest

import coatcheck
from coatcheck.transcript import Transcript, verify
from tests.counting import Counts
from tests.faults.world import ROOT, chosen_seed, problems

pytestmark = pytest.mark.faults

PROCESSES = 4
ROUNDS_PER_FILE = 5


def test_no_acknowledged_message_is_lost_and_the_file_is_always_readable(
    tmp_path: Path, long_faults: bool, counts: Counts
) -> None:
    wanted = 200 if long_faults else 8
    seed = chosen_seed()
    rng = random.Random(seed)
    path, folder = tmp_path / "session.jsonl", tmp_path / "store"
    kills = acknowledged = round_ = 0
    try:
        while kills < wanted:
            count = min(PROCESSES, wanted - kills)
            promised = _run_and_kill(tmp_path, folder, path, rng, count, round_)
            acknowledged += sum(promised.values())
            kills += count
            counts("kills while a transcript grows", count)
            round_ += 1
            _check(folder, path, promised)
            if round_ % ROUNDS_PER_FILE == 0:
                path.unlink(missing_ok=True)
                shutil.rmtree(folder)
    except BaseException as error:
        error.add_note(f"COATCHECK_SEED={seed}, after {kills} kills, {acknowledged} acknowledged")
        raise
    assert acknowledged > kills


def _run_and_kill(
    tmp_path: Path, folder: Path, path: Path, rng: random.Random, count: int, round_: int
) -> dict[str, int]:
    """Start processes and kill each at a random instant; return the number of acknowledged messages
    of each."""
    logs = {f"{round_}.{number}": tmp_path / f"log.{round_}.{number}" for number in range(count)}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.faults.appending_worker", str(folder), str(path), str(log), name,
             str(rng.randrange(1 << 32))],
            cwd=ROOT, stderr=subprocess.PIPE,
        )
        for name, log in logs.items()
    }  # fmt: skip
    try:
        while not all(log.exists() and log.stat().st_size for log in logs.values()):
            assert all(one.poll() is None for one in started.values()), _error_output(started)
            time.sleep(0.01)
        for name in rng.sample(sorted(started), count):
            time.sleep(rng.random() * rng.choice((0.02, 0.2, 0.6)))
            assert started[name].poll() is None, _error_output(started)
            started[name].send_signal(signal.SIGKILL)
    finally:
        for one in started.values():
            one.kill()
            one.communicate()
    return {
        name: int(log.read_text().split()[-1].replace("start", "0")) for name, log in logs.items()
    }


def _error_output(started: dict[str, subprocess.Popen[bytes]]) -> str:
    ended = [one for one in started.values() if one.poll() is not None]
    return "\n".join((one.stderr.read() if one.stderr else b"").decode()[-3_000:] for one in ended)


def _check(folder: Path, path: Path, promised: dict[str, int]) -> None:
    """Check that every acknowledged message is there once, in order and complete. Only the end may
    be torn."""
    with coatcheck.open(folder, durability="process") as store:
        if not path.exists():
            assert not any(promised.values())
            return
        with Transcript(path, store.session("reader")) as transcript:
            found: dict[str, list[int]] = defaultdict(list)
            for one in transcript.messages(mode="whole"):
                name, number, digest = one["tool_call_id"].split()
                payload = one["details"]["log"] if "details" in one else one["content"]
                assert sha256(payload.encode()).hexdigest() == digest
                found[name].append(int(number))
            assert {problem.kind for problem in transcript.problems} <= {"torn"}
        for name, count in promised.items():
            assert found[name][:count] == list(range(count)), f"{name}: {count} promised"
            assert found[name] == list(range(len(found[name])))
        assert verify(path, store).is_sound
        assert problems(store) == []
