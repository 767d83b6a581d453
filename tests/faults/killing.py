"""Processes that use one store until they are killed, and a check of what was acknowledged to
them."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import coatcheck
from tests.faults.world import ROOT, assert_clean, problems


def run_and_kill(url: str | Path, logs: Path, rng: random.Random, count: int) -> int:
    """Start processes and kill each at a random instant."""
    started = {
        number: subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", "kill", str(url), str(rng.randrange(1 << 32)),
             str(logs / str(number)), f"{logs.name}.{number}"],
            cwd=ROOT, stderr=subprocess.PIPE,
        )
        for number in range(count)
    }  # fmt: skip
    try:
        while not all((logs / str(number)).exists() for number in started):
            assert all(one.poll() is None for one in started.values()), _error_output(started)
            time.sleep(0.01)
        for number in rng.sample(sorted(started), count):
            time.sleep(rng.random() * rng.choice((0.02, 0.2, 0.6)))
            assert started[number].poll() is None, _error_output(started)
            started[number].send_signal(signal.SIGKILL)
    finally:
        for one in started.values():
            one.kill()
            one.communicate()
    return count


def _error_output(started: dict[int, subprocess.Popen[bytes]]) -> str:
    """Return the error output of processes that ended on their own."""
    ended = [one for one in started.values() if one.poll() is not None]
    return "\n".join((one.stderr.read() if one.stderr else b"").decode()[-3000:] for one in ended)


def check(url: str | Path, logs: Path) -> int:
    """Compare the store with everything that was acknowledged; return the number of
    acknowledgements."""
    held: dict[str, set[str]] = defaultdict(set)
    gone: dict[str, set[str]] = defaultdict(set)
    promises = 0
    for log in logs.glob("*/*"):
        for line in map(json.loads, log.read_bytes().splitlines()):
            session, wanted = line.get("session", ""), line.get("id", "")
            promises += "did" in line
            if line.get("about_to") == "put":
                gone[session].discard(wanted)
            elif line.get("did") == "put":
                held[session].add(wanted)
            elif line.get("about_to") == "forget":
                held[session].discard(wanted)
            elif line.get("did") == "forget":
                gone[session].add(wanted)
            elif line.get("about_to") == "end":
                maybe, held[session] = held[session], set()
                gone[session + " ending"] = maybe
            elif line.get("did") == "end":
                gone[session] |= gone.pop(session + " ending")
    with coatcheck.open(url, durability="process") as store:
        assert problems(store) == []
        for session_id, wanted_ids in held.items():
            session = store.session(session_id)
            for wanted in wanted_ids:
                data = session.get(wanted)
                assert data is not None, f"{wanted} of {session_id} was acknowledged but is lost"
                assert hashlib.sha256(data).hexdigest() == wanted
        for session_id, unwanted in gone.items():
            if not session_id.endswith("ending"):
                assert not [one for one in unwanted if store.session(session_id).ref(one)], (
                    "a forgotten one is back"
                )
        assert_clean(store)
    return promises
