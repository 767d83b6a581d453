"""Many threads and processes on one store: nothing is lost or doubled, and all see what any has put."""

import hashlib
import io
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store
from tests.backends import LARGE, Backend

CONTEXT = get_context("spawn")  # a process of its own, with nothing inherited
PROCESSES = 4
EACH = 12


def value_of(number: int) -> bytes:
    """Small ones and large ones in turn."""
    return hashlib.sha256(str(number).encode()).digest() * (10 if number % 3 else LARGE // 32)


def put_some(url: str, worker: int) -> list[str]:
    with coatcheck.open(url, durability="process") as store:
        shared, own = store.session("shared"), store.session(f"worker {worker}")
        for number in range(EACH):
            common = shared.put(value_of(number), name=f"value {number}")
            mine = own.put(value_of(1000 * worker + number), name=f"mine {number}")
            assert shared.get(common) == value_of(number)
            assert own.get(mine) == value_of(1000 * worker + number)
        return [ref.artifact_id for ref in own.list()]


def check_all(store: Store) -> None:
    shared = store.session("shared")
    for number in range(EACH):
        assert shared.get(f"value {number}") == value_of(number)
        assert len(shared.list(name=f"value {number}")) == 1, "put by all, held once"
    assert len(shared.list()) == EACH
    for worker in range(1, PROCESSES + 1):
        own = store.session(f"worker {worker}")
        assert len(own.list()) == EACH
        for number in range(EACH):
            assert own.get(f"mine {number}") == value_of(1000 * worker + number)
    assert store.stats().artifacts == EACH * (PROCESSES + 1)
    store.collect()
    assert store.verify().problems == []


@pytest.mark.slow
def test_many_processes_lose_and_double_nothing(lasting: Backend) -> None:
    store = lasting.open()
    with CONTEXT.Pool(PROCESSES) as pool:
        ids = pool.starmap(put_some, [(lasting.url, worker) for worker in range(1, PROCESSES + 1)])
    assert len({one for some in ids for one in some}) == PROCESSES * EACH
    check_all(store)
    store.close()
    check_all(lasting.open())


@pytest.mark.parametrize("durability", ["power", "process"])
def test_many_threads_lose_and_double_nothing(backend: Backend, durability: str) -> None:
    store = backend.open(durability=durability)

    def work(worker: int) -> None:
        shared, own = store.session("shared"), store.session(f"worker {worker}")
        for number in range(EACH):
            shared.put(value_of(number), name=f"value {number}")
            own.put(io.BytesIO(value_of(1000 * worker + number)), name=f"mine {number}")
            assert own.get(f"mine {number}") == value_of(1000 * worker + number)

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(work, range(1, PROCESSES + 1)))
    check_all(store)


def answer(url: str, calls: list[tuple[str, str]]) -> list[object]:
    with coatcheck.open(url, durability="process") as store:
        return [getattr(store.session("s"), method)(target) for method, target in calls]


def test_every_change_is_seen_by_another_process_at_once(lasting: Backend) -> None:
    session = lasting.open().session("s")
    with CONTEXT.Pool(1) as pool:
        for value in ("small", "x" * LARGE):
            ref = session.put(value, name="n")
            assert pool.apply(answer, (lasting.url, [("get", "n"), ("get", ref.pointer)])) == [value, value]
            assert pool.apply(answer, (lasting.url, [("forget", "n")])) == [True]
            assert session.get(ref) is None
        assert pool.apply(answer, (lasting.url, [("put", "from there")]))
        assert [session.get(ref) for ref in session.list()] == ["from there"]


def test_two_stores_at_one_place_in_one_process_agree(lasting: Backend) -> None:
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
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is part of the test
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
def test_children_forked_in_the_middle_of_work_continue(folder: Backend) -> None:
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


def test_a_collection_beside_puts_of_the_same_content_loses_nothing(backend: Backend) -> None:
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
        list(pool.map(lambda job: job[0](job[1]), [(put_and_forget, 1), (put_and_forget, 2), (collect, 0)]))
    store.collect()
    assert store.verify().problems == []


def test_a_killed_process_leaves_what_was_acknowledged(lasting: Backend, tmp_path: Path) -> None:
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
