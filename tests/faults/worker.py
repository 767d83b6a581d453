"""A process that uses a store until it is killed. Run as a module, only by the fault tests.

Each acknowledged call is written to its log as one JSON line after the call has returned. Before
each call, the process logs what it is about to do: without a second line, the outcome is unknown.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import coatcheck
from coatcheck import Session, Store
from coatcheck.errors import Fenced, NotFound

COMMON = 12


def content(rng: random.Random) -> bytes:
    """Return content: mostly small, sometimes up to 20 MB, sometimes the same as other processes
    put."""
    if rng.random() < 0.25:
        number = rng.randrange(COMMON)
        return random.Random(number).randbytes(200 if number % 2 else 200_000)
    size = rng.choices(
        (
            rng.randint(1, 2_000),
            rng.randint(2_000, 120_000),
            rng.randint(130_000, 1_000_000),
            20_000_000,
        ),
        (70, 20, 9.4, 0.6),
    )[0]
    return rng.randbytes(size)


class Worker:
    """One process's sessions, and the log of what was acknowledged to it."""

    def __init__(self, store: Store, log: Path, name: str, rng: random.Random) -> None:
        self.store = store
        self.name = name
        self.rng = rng
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.held: dict[str, list[str]] = {}

    def write_log(self, **line: Any) -> None:
        os.write(self.log, json.dumps(line).encode() + b"\n")

    def session(self) -> Session:
        return self.store.session(f"{self.name}/{self.rng.randrange(3)}")

    def put(self) -> None:
        session, data = self.session(), content(self.rng)
        self.write_log(
            about_to="put", session=session.session_id, id=hashlib.sha256(data).hexdigest()
        )
        ref = session.put(data, name=f"n{self.rng.randrange(50)}")
        self.write_log(did="put", session=session.session_id, id=ref.artifact_id)
        self.held.setdefault(session.session_id, []).append(ref.artifact_id)

    def read(self) -> None:
        session = self.session()
        held = self.held.get(session.session_id)
        if held:
            wanted = self.rng.choice(held)
            assert session.get(wanted) is not None, f"{wanted} is lost"

    def forget(self) -> None:
        session = self.session()
        held = self.held.get(session.session_id)
        if held:
            wanted = self.rng.choice(held)
            self.held[session.session_id] = [one for one in held if one != wanted]
            self.write_log(about_to="forget", session=session.session_id, id=wanted)
            session.forget(wanted)
            self.write_log(did="forget", session=session.session_id, id=wanted)

    def end(self) -> None:
        session = self.session()
        self.held.pop(session.session_id, None)
        self.write_log(about_to="end", session=session.session_id)
        session.end()
        self.write_log(did="end", session=session.session_id)

    def collect(self) -> None:
        self.store.collect(grace=0, cold_after=self.rng.choice((0, 86_400)))

    def work(self) -> None:
        self.write_log(did="start")
        operations = (self.put, self.read, self.forget, self.end, self.collect)
        while True:
            self.rng.choices(operations, (60, 15, 18, 3, 4))[0]()


def fight(worker: Worker) -> None:
    """Claim a session that all workers compete for, and write its hot state until another worker
    claims it."""
    from coatcheck.context import HotState, claim, current

    session, number = worker.store.session("fought for"), 0
    worker.write_log(did="start")
    while True:
        claimed = claim(session, worker.name)
        newest = current(session)
        worker.write_log(did="claim", token=claimed.token, seen=newest.number if newest else 0)
        for _ in range(worker.rng.randrange(1, 8)):
            number += 1
            objective = f"{worker.name}/{number}"
            try:
                written = claimed.write(HotState(session_id="fought for", objective=objective))
            except Fenced:
                worker.write_log(did="lose", objective=objective)
                break
            worker.write_log(did="write", objective=objective, number=written, token=claimed.token)


def race(store: Store, seed: int, seconds: float) -> None:
    """Put and forget the same content as other workers, while collections run. Every ref must have
    its bytes."""
    rng, stop = random.Random(seed), time.monotonic() + seconds
    session = store.session(f"racer {seed}")
    while time.monotonic() < stop:
        number = rng.randrange(4)
        data = random.Random(number).randbytes(140_000 if number % 2 else 3_000)
        if rng.random() < 0.15:
            store.collect(grace=0, cold_after=0)
            continue
        ref = session.put(data)
        assert session.get(ref) == data, f"{ref.pointer} dangles right after it was put"
        with session.open(ref) as stream:
            assert stream.read(1000) == data[:1000]
        if rng.random() < 0.5:
            session.forget(ref)


def live(store: Store, seed: int, seconds: float) -> None:
    """Keep artifacts in sessions with the default time to live, and read them repeatedly."""
    rng, stop = random.Random(seed), time.monotonic() + seconds
    session = store.session(f"live {seed}")
    held = {session.put(rng.randbytes(size)): size for size in (10, 5_000, 200_000)}
    while time.monotonic() < stop:
        for ref, size in held.items():
            got = session.get(ref)
            assert got is not None, f"{ref.pointer} was removed before it expired"
            assert len(got) == size
        try:
            ref = session.put(rng.randbytes(rng.choice((100, 150_000))))
            assert session.ref(ref) is not None
            session.open(ref).close()
        except NotFound as error:
            raise AssertionError("an artifact that was just put is gone") from error


def main() -> None:
    mode, folder, seed, *rest = sys.argv[1:]
    number = int(seed)
    if mode == "kill":
        store = coatcheck.open(folder, durability="process" if number % 2 else "power")
        Worker(store, Path(rest[0]), rest[1], random.Random(number)).work()
    elif mode == "fight":
        fight(
            Worker(
                coatcheck.open(folder, durability="process"),
                Path(rest[0]),
                rest[1],
                random.Random(number),
            )
        )
    elif mode == "collect with a clock that is off":
        with coatcheck.open(folder, clock=lambda: time.time() + 3600) as store:
            stop = time.monotonic() + float(rest[0])
            while time.monotonic() < stop:
                store.collect()
    else:
        with coatcheck.open(folder, durability="process" if number % 2 else "power") as store:
            (race if mode == "race" else live)(store, number, float(rest[0]))


if __name__ == "__main__":
    main()
