"""Verification during writes: concurrent changes are not reported as damage, and a repair loses
nothing."""

from __future__ import annotations

import random
from threading import Thread

import pytest

from coatcheck import Store
from tests.backends import LARGE, Backend

pytestmark = pytest.mark.faults


def _write(
    store: Store, number: int, rounds: int, kept: dict[str, bytes], failed: list[BaseException]
) -> None:
    """Put small and large content, forget most of it, and put some of it again."""
    try:
        rng, session = random.Random(number), store.session(f"s{number}", ttl=None)
        for turn in range(rounds):
            data = b"%d %d " % (number, turn % 7) + b"x" * rng.choice((10, 2_000, 30_000, LARGE))
            for copy in (data, b"shared by all writers" * (1 + turn % 3)):
                ref = session.put(copy)
                assert session.get(ref) == copy
                if rng.random() < 0.9:
                    session.forget(ref)
                    kept.pop(ref.artifact_id, None)
                else:
                    kept[ref.artifact_id] = copy
            if turn % 20 == number:
                store.collect(grace=0, cold_after=0)
    except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
        failed.append(error)


def test_verify_during_writes_finds_no_damage_and_a_repair_loses_nothing(
    backend: Backend, long_faults: bool
) -> None:
    rounds = (20 if backend.is_fleet else 60) * (20 if long_faults else 1)
    store = backend.open()
    stores = [store if not backend.lasts else backend.open() for _ in range(3)]
    kept: list[dict[str, bytes]] = [{} for _ in stores]
    failed: list[BaseException] = []
    writers = [
        Thread(target=_write, args=(each, number, rounds, kept[number], failed))
        for number, each in enumerate(stores)
    ]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found += [one for one in store.verify(repair=True).problems if one.kind != "orphan"]
    for writer in writers:
        writer.join()
    assert failed == []
    assert found == []
    assert store.stats().tombstones == 0
    for number, held in enumerate(kept):
        session = store.session(f"s{number}")
        for artifact_id, data in held.items():
            assert session.get("art:" + artifact_id) == data
    store.collect(grace=0)
    assert store.verify().problems == []


def test_content_healed_between_check_and_repair_is_kept(lasting: Backend) -> None:
    """Put a damaged small artifact again just before a repair would set it aside."""
    with lasting.open() as store:
        ref = store.session("s").put("content")
    table = "blob" if lasting.is_fleet else "content"
    value = "'rotten!'" if lasting.is_fleet else "CAST('rotten!' AS BLOB)"
    lasting.edit_catalog(f"UPDATE {table} SET data = {value}")
    store = lasting.open()
    ((blob, content),) = store._catalog.blobs()
    assert content == b"rotten!"
    store.session("s").put("content", name="again")
    assert store._catalog.lose(blob, until=1e12) == 0
    assert store.session("s").get(ref) == "content"
    assert store.verify(repair=True).problems == []
