"""Faults of a fleet: clients killed between object store and database, either server killed, racing
collections."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

import coatcheck
from coatcheck.errors import StoreUnavailable
from tests.backends import Fleet
from tests.counting import Counts
from tests.faults.killing import check, run_and_kill
from tests.faults.world import ROOT, assert_clean, chosen_seed, problems
from tests.servers import Server, postgres, seaweedfs, wait_for_postgres, wait_for_s3

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def own_fleet() -> Iterator[Fleet]:
    """Servers that a test may kill, if it starts them again."""
    with postgres() as database, seaweedfs() as s3:
        yield Fleet(s3, database)


def test_acknowledged_artifacts_of_a_fleet_survive_the_kill_of_its_clients(
    fleet: Fleet, tmp_path: Path, long_faults: bool, counts: Counts
) -> None:
    wanted = 200 if long_faults else 8
    seed = chosen_seed()
    rng, url = random.Random(seed), fleet.new_url()
    kills = round_ = acknowledged = 0
    try:
        while kills < wanted:
            logs = tmp_path / "logs" / str(round_)
            logs.mkdir(parents=True)
            killed = run_and_kill(url, logs, rng, min(4, wanted - kills))
            counts("kills of clients of a fleet", killed)
            kills += killed
            acknowledged = check(url, tmp_path / "logs")
            round_ += 1
    except BaseException as error:
        error.add_note(f"COATCHECK_SEED={seed}, after {kills} kills, {acknowledged} acknowledged")
        raise
    assert acknowledged > kills


@pytest.mark.parametrize("which", ["object store", "database"])
def test_acknowledged_artifacts_of_a_fleet_survive_the_kill_of_a_server(
    own_fleet: Fleet, which: str, long_faults: bool, counts: Counts
) -> None:
    server, wait = {
        "object store": (own_fleet.s3, wait_for_s3),
        "database": (own_fleet.database, wait_for_postgres),
    }[which]
    url = own_fleet.new_url()
    held: dict[str, bytes] = {}
    rng = random.Random(1)
    with coatcheck.open(url) as store:
        for _ in range(20 if long_faults else 2):
            _kill_while(server, wait, lambda: _put_some(store, held, rng))
            counts("kills of servers of a fleet")
        for artifact_id, data in held.items():
            assert store.session("s").get(artifact_id) == data
        assert problems(store) == []
        assert_clean(store)


def _put_some(store: coatcheck.Store, held: dict[str, bytes], rng: random.Random) -> None:
    """Put for a while. A failed put was not acknowledged, and may be retried."""
    until = time.monotonic() + 3
    while time.monotonic() < until:
        data = rng.randbytes(rng.choice((200, 30_000, 300_000)))
        try:
            held[store.session("s").put(data).artifact_id] = data
        except StoreUnavailable as error:
            if not error.may_retry:
                raise


def _kill_while(server: Server, wait: Callable[[Server], None], work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def worked() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = Thread(target=worked)
    thread.start()
    time.sleep(random.random() * 0.5)
    server.kill()
    time.sleep(random.random() * 0.5)
    server.start()
    wait(server)
    thread.join()
    if failed:
        raise failed[0]


def test_collections_on_many_machines_race_puts_of_the_same_content(
    fleet: Fleet, long_faults: bool
) -> None:
    url, seconds = fleet.new_url(), "60" if long_faults else "1"
    with coatcheck.open(url):
        pass
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", "race", url, str(seed), seconds],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for seed in range(4)
    ]
    try:
        results = [(one.communicate()[1].decode(), one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [code for _, code in results] == [0] * 4, "\n".join(
        text[-3000:] for text, code in results if code
    )
    with coatcheck.open(url) as store:
        assert problems(store) == []
        assert_clean(store)
