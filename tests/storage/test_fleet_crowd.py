"""Many concurrent writers in a fleet's store: no deadlock, no lost data, no exceeded quota."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg

import coatcheck
from coatcheck.errors import NotFound, QuotaExceeded
from tests.backends import LARGE, Fleet


def deadlocks(fleet: Fleet) -> int:
    with psycopg.connect(fleet.database.url) as db:
        found = db.execute("SELECT sum(deadlocks) FROM pg_stat_database").fetchone()
    assert found is not None
    return int(found[0])


def all_at_once(count: int, work: Callable[[int], None]) -> None:
    together = threading.Barrier(count)

    def begin(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))


def test_sixty_four_writers_never_deadlock(fleet: Fleet) -> None:
    before = deadlocks(fleet)
    with coatcheck.open(fleet.new_url()) as store:

        def work(number: int) -> None:
            rng, session = random.Random(number), store.session(f"s{number % 6}")
            for _ in range(12):
                content = "x" * LARGE if rng.random() < 0.05 else f"content {rng.randrange(8)}"
                ref = session.put(content, name=f"n{rng.randrange(4)}")
                if rng.random() < 0.3:
                    session.forget(ref)
                elif rng.random() < 0.2:
                    with suppress(NotFound):
                        session.pin(ref)
                elif rng.random() < 0.1:
                    store.collect(grace=0)

        all_at_once(64, work)
        assert store.verify().problems == []
    assert deadlocks(fleet) == before


def test_a_quota_is_enforced_when_many_put_at_once(fleet: Fleet) -> None:
    with coatcheck.open(fleet.new_url()) as store:
        acme, refused = store.tenant("acme", quota_bytes=20_000), []

        def work(number: int) -> None:
            for i in range(10):
                try:
                    acme.session(f"s{number}").put(f"{number} {i} ".ljust(1_000, "."))
                except QuotaExceeded:
                    refused.append(number)

        all_at_once(16, work)
        assert acme.stats().stored_bytes == 20_000
        assert len(refused) == 140
        acme.session(next(info.session_id for info in acme.sessions() if info.used_bytes)).end()
        acme.session("new").put("x" * 500)
        assert acme.verify().problems == []
