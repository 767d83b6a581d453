"""Many threads and processes on one store: nothing is lost or duplicated, and each sees what the
others put."""

import hashlib
import io
import os
import random
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from tests.backends import LARGE, PROCESSES, Backend, Clock

WORKERS = 4
PER_WORKER = 12


def value_of(number: int) -> bytes:
    """Return the value of this number: one in three is large."""
    return hashlib.sha256(str(number).encode()).digest() * (10 if number % 3 else LARGE // 32)


def put_some(url: str, worker: int) -> list[str]:
    with coatcheck.open(url, durability="process") as store:
        shared, own = store.session("shared"), store.session(f"worker {worker}")
        for number in range(PER_WORKER):
            common = shared.put(value_of(number), name=f"value {number}")
            mine = own.put(value_of(1000 * worker + number), name=f"mine {number}")
            assert shared.get(common) == value_of(number)
            assert own.get(mine) == value_of(1000 * worker + number)
        return [ref.artifact_id for ref in own.list()]


def check_all(store: Store) -> None:
    shared = store.session("shared")
    for number in range(PER_WORKER):
        assert shared.get(f"value {number}") == value_of(number)
        assert len(shared.list(name=f"value {number}")) == 1, "put by all workers, stored once"
    assert len(shared.list()) == PER_WORKER
    for worker in range(1, WORKERS + 1):
        own = store.session(f"worker {worker}")
        assert len(own.list()) == PER_WORKER
        for number in range(PER_WORKER):
            assert own.get(f"mine {number}") == value_of(1000 * worker + number)
    assert store.stats().artifacts == PER_WORKER * (WORKERS + 1)
    store.collect()
    assert store.verify().problems == []


@pytest.mark.slow
def test_many_processes_lose_and_duplicate_nothing(lasting: Backend) -> None:
    store = lasting.open()
    with PROCESSES.Pool(WORKERS) as pool:
        ids = pool.starmap(put_some, [(lasting.url, worker) for worker in range(1, WORKERS + 1)])
    assert len({one for some in ids for one in some}) == WORKERS * PER_WORKER
    check_all(store)
    store.close()
    check_all(lasting.open())


@pytest.mark.parametrize("durability", ["power", "process"])
def test_many_threads_lose_and_duplicate_nothing(backend: Backend, durability: str) -> None:
    store = backend.open(durability=durability)

    def work(worker: int) -> None:
        shared, own = store.session("shared"), store.session(f"worker {worker}")
        for number in range(PER_WORKER):
            shared.put(value_of(number), name=f"value {number}")
            own.put(io.BytesIO(value_of(1000 * worker + number)), name=f"mine {number}")
            assert own.get(f"mine {number}") == value_of(1000 * worker + number)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(1, WORKERS + 1)))
    check_all(store)


def answer(url: str, calls: list[tuple[str, str]]) -> list[object]:
    with coatcheck.open(url, durability="process") as store:
        return [getattr(store.session("s"), method)(target) for method, target in calls]


def test_every_change_is_seen_by_another_process_at_once(lasting: Backend) -> None:
    session = lasting.open().session("s")
    with PROCESSES.Pool(1) as pool:
        for value in ("small", "x" * LARGE):
            ref = session.put(value, name="n")
            assert pool.apply(answer, (lasting.url, [("get", "n"), ("get", ref.pointer)])) == [
                value,
                value,
            ]
            assert pool.apply(answer, (lasting.url, [("forget", "n")])) == [True]
            assert session.get(ref) is None
        assert pool.apply(answer, (lasting.url, [("put", "from there")]))
        assert [session.get(ref) for ref in session.list()] == ["from there"]


def test_two_stores_with_the_same_url_in_one_process_agree(lasting: Backend) -> None:
    one, two = lasting.open().session("s"), lasting.open().session("s")
    for i in range(20):
        writer, reader = (one, two) if i % 2 else (two, one)
        ref = writer.put(value_of(i), name="n")
        assert reader.get("n") == reader.get(ref) == value_of(i)
    lasting.opened[0].close()
    assert two.get("n") == value_of(19)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_use_the_store(folder: Backend) -> None:
    store = folder.open()
    session = store.session("s")
    before = session.put("before", name="before")
    large = session.put(value_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads are part of the test
        child = os.fork()
    if not child:
        failed = 1
        try:
            assert session.get(before) == "before"
            assert session.get(large) == value_of(0)
            session.put("from the child", name="child")
            session.put(value_of(3), name="large child")
            store.collect()
            store.close()
            failed = 0
        finally:
            os._exit(failed)
    session.put("from the parent", name="parent")
    assert os.waitpid(child, 0)[1] == 0
    assert session.get("child") == "from the child"
    assert session.get("large child") == value_of(3)
    assert session.get("parent") == "from the parent"
    assert store.verify().problems == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_forked_during_writes_can_use_the_store(folder: Backend) -> None:
    store = folder.open()
    session = store.session("s")
    children = []
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(session.put, value_of(i), name=f"parent {i}") for i in range(40)]
        for worker in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                failed = 1
                try:
                    session.put(f"child {worker}", name=f"child {worker}")
                    assert session.get(f"child {worker}") == f"child {worker}"
                    failed = 0
                finally:
                    os._exit(failed)
            children.append(child)
        for one in busy:
            one.result()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    for worker in range(5):
        assert session.get(f"child {worker}") == f"child {worker}"
    for i in range(40):
        assert session.get(f"parent {i}") == value_of(i)
    store.collect()
    assert store.verify().problems == []


def test_a_collection_during_puts_of_the_same_content_loses_nothing(backend: Backend) -> None:
    store = backend.open()

    def put_and_forget(worker: int) -> None:
        session = store.session(str(worker))
        for number in range(30):
            value = value_of(number % 2 * 3)
            ref = session.put(value)
            assert session.get(ref) == value
            if number % 5:
                session.forget(ref)

    def collect(_: int) -> None:
        for _ in range(15):
            store.collect(grace=0, cold_after=0)

    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda job: job[0](job[1]), [(put_and_forget, 1), (put_and_forget, 2), (collect, 0)]
            )
        )
    store.collect()
    assert store.verify().problems == []


def test_acknowledged_puts_of_a_killed_process_are_kept(lasting: Backend, tmp_path: Path) -> None:
    script = """
import os, sys, coatcheck
session = coatcheck.open(sys.argv[1], durability="process").session("s")
for i in range(10):
    session.put(f"value {i}", name=f"name {i}")
    session.put(str(i) * 300_000, name=f"large {i}")
os.kill(os.getpid(), 9)
"""
    pid = os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, "-c", script, lasting.url],
                     {"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    store = lasting.open()
    session = store.session("s")
    for i in range(10):
        assert session.get(f"name {i}") == f"value {i}"
        assert session.get(f"large {i}") == str(i) * 300_000
    assert store.verify().problems == []


class Peer:
    """Another process that has the store open, and calls methods of a session on request."""

    def __init__(self, url: str, ahead: float = 0.0) -> None:
        self._here, there = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(there, url, ahead), daemon=True)
        self._process.start()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send(None)
        self._process.join()

    def call(self, method: str, *args: object, **options: object) -> Any:
        self._here.send((method, args, options))
        return self._here.recv()


def _serve(pipe: Any, url: str, ahead: float) -> None:
    with coatcheck.open(url, durability="process", clock=lambda: time.time() + ahead) as store:
        while (asked := pipe.recv()) is not None:
            method, args, options = asked
            done = getattr(store if method == "collect" else store.session("s"), method)(
                *args, **options
            )
            pipe.send(None if method == "collect" else done)


def test_a_get_sees_every_put_of_another_process_that_has_the_store_open(lasting: Backend) -> None:
    session = lasting.open().session("s")
    with Peer(lasting.url) as peer:
        for number in range(8):
            mine, theirs = session.put(value_of(number)), peer.call("put", value_of(100 + number))
            assert session.get(theirs) == value_of(100 + number)
            assert peer.call("get", mine.pointer) == value_of(number)
            assert session.get(mine) == value_of(number)
    assert len(session.list()) == 16


def test_an_artifact_that_another_process_forgets_right_after_its_put_is_gone(
    lasting: Backend,
) -> None:
    session = lasting.open().session("s")
    with Peer(lasting.url) as peer:
        for number in range(4):
            mine, theirs = session.put(value_of(number)), peer.call("put", value_of(100 + number))
            assert session.get(mine) == value_of(number)
            assert peer.call("forget", mine.pointer) is True
            assert session.get(mine) is None
            assert session.ref(mine) is None
            assert session.forget(theirs) is True
            assert peer.call("get", theirs.pointer) is None
            assert session.put(value_of(number)) is not None
            assert peer.call("get", mine.pointer) == session.get(mine) == value_of(number)


def test_a_grant_is_visible_at_once_to_all_who_have_the_session_open(lasting: Backend) -> None:
    store, other = lasting.open(), lasting.open()
    giver, receivers = store.session("giver"), [one.session("s") for one in (store, other)]
    with Peer(lasting.url) as peer:
        for number in (0, 1):
            ref = giver.put(value_of(number))
            assert [one.get(ref) for one in receivers] == [None, None]
            giver.grant(ref, to="s")
            assert [one.get(ref) for one in receivers] == [value_of(number)] * 2
            assert peer.call("get", ref.pointer) == value_of(number)
            giver.annotate(ref, "another summary")
            assert giver.get(ref) == value_of(number)


def test_a_session_that_another_process_has_ended_is_empty_until_the_next_put(
    lasting: Backend,
) -> None:
    session = lasting.open().session("s")
    with Peer(lasting.url) as peer:
        refs = [session.put(value_of(number)) for number in range(4)]
        assert peer.call("end") == 4
        assert [session.get(ref) for ref in refs] == [None] * 4
        again = session.put(value_of(1))
        assert session.get(again) == value_of(1)
        assert [session.get(ref) for ref in refs] == [None, value_of(1), None, None]
        assert peer.call("get", again.pointer) == value_of(1)


def test_artifacts_that_another_process_has_collected_are_gone(lasting: Backend) -> None:
    session = lasting.open().session("s", ttl=60)
    refs = [session.put(value_of(number)) for number in range(4)]
    kept = session.pin(session.put(b"pinned"))
    with Peer(lasting.url, ahead=86_400.0) as peer:
        peer.call("collect", grace=0)
    assert [session.get(ref) for ref in refs] == [None] * 4
    assert session.get(kept) == b"pinned"


def test_an_artifact_that_another_process_has_compressed_or_repaired_can_be_read(
    lasting: Backend,
) -> None:
    session = lasting.open().session("s", ttl=None)
    text = b"a line that compresses well\n" * 10_000
    ref = session.put(text)
    assert session.get(ref) == text
    with Peer(lasting.url, ahead=86_400.0 * 3) as peer:
        peer.call("collect")
        assert session.get(ref) == text
        lasting.damage(session.list()[0], lambda data: b"\0" + data[1:])
        peer.call("put", text)
        assert session.get(ref) == text


def test_a_put_of_another_process_keeps_a_session_alive_but_does_not_revive_expired_artifacts(
    lasting: Backend, clock: Clock
) -> None:
    here, there = (lasting.open(clock=clock, grace=50).session("s", ttl=100) for _ in range(2))
    old = here.put(value_of(1))
    assert here.get(old) == there.get(old) == value_of(1)
    clock.advance(80)
    there.put(value_of(2))
    clock.advance(80)
    assert here.get(old) == value_of(1), "kept alive by the put of the other store"
    lasting.opened[0]._activity.last_uses.clear()  # as in a process that did not use the session
    clock.advance(140)
    assert here.get(old) is None
    clock.advance(100)
    new = there.put(value_of(4))
    assert here.get(old) is None, "it had expired before the put"
    assert here.get(new) == value_of(4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_and_its_parent_see_the_puts_of_each_other(folder: Backend) -> None:
    session = folder.open().session("s")
    before = [session.put(value_of(number)) for number in range(4)]
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        failed = 1
        try:
            assert [session.get(ref) for ref in before] == [value_of(number) for number in range(4)]
            ref = session.put(value_of(10))
            assert session.get(ref) == value_of(10)
            assert session.forget(before[0])
            os.write(writing, ref.pointer.encode())
            failed = 0
        finally:
            os._exit(failed)
    pointer = os.read(reading, 100).decode()
    assert os.waitpid(child, 0)[1] == 0
    assert session.get(pointer) == value_of(10)
    assert session.get(before[0]) is None
    assert [session.get(ref) for ref in before[1:]] == [value_of(number) for number in range(1, 4)]


@pytest.mark.parametrize("seed", range(3))
def test_two_open_stores_with_the_same_url_always_answer_like_one(
    folder: Backend, clock: Clock, seed: int
) -> None:
    choose = random.Random(seed)
    stores = [
        folder.open(clock=clock, grace=5),
        folder.open(clock=clock, grace=5),
        folder.open_new(clock=clock, grace=5),
    ]
    sessions = [
        {
            "one": store.session("one", ttl=100_000),
            "two": store.session("two", ttl=None),
            "child": store.session("child", ttl=200_000, parent="one"),
        }
        for store in stores
    ]
    values = [b"%d" % number for number in range(5)] + [value_of(number) for number in (0, 3)]
    ids = [hashlib.sha256(value).hexdigest() for value in values]

    def act(at: int, which: str, verb: str, number: int, name: str | None) -> object:
        session = sessions[at][which]
        if verb == "put":
            return session.put(values[number], name=name).artifact_id
        if verb == "brief":
            return session.put(values[number], ttl=3).artifact_id
        if verb == "end":
            return session.end()
        if verb == "collect":
            return stores[at].collect(grace=0).refs
        if verb == "pin":
            owned = any(
                ref.artifact_id == ids[number] and ref.session_id == which for ref in session.list()
            )
            return owned and session.pin(ids[number]).artifact_id
        return session.forget(ids[number]) if verb == "forget" else session.get(ids[number])

    for step in range(120):
        verb = choose.choices(
            ["put", "get", "forget", "brief", "pin", "end", "collect"], [12, 8, 3, 2, 1, 1, 1]
        )[0]
        asked = (
            choose.choice(["one", "two", "child"]),
            verb,
            choose.randrange(len(values)),
            choose.choice([None, "n"]),
        )
        assert act(choose.randrange(2), *asked) == act(2, *asked), (step, asked)
        for which in sessions[0]:
            for one in choose.sample(ids, 4):
                found = [each[which].get(one) for each in sessions]
                assert found[0] == found[1] == found[2], (step, asked, which, ids.index(one))
        clock.advance(choose.choice([0, 0, 0, 1, 1, 2, 4, 40]))
