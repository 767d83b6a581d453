"""Interrupts (control-C, an alarm handler that raises) at every bytecode of a call.

At any instant, no lock and no transaction is left behind. Other threads, other processes and the same store keep
working, and a fork does not hang. The exception is kept for the checks, as in an interactive session.
"""

from __future__ import annotations

import contextlib
import dis
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.storage.forks import Mutex
from tests.faults.world import ROOT, assert_clean, problems

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]

OURS = (str(Path(coatcheck.__file__).parent), contextlib.__file__)
LARGE = random.Random(20).randbytes(140_000)


class Interrupt:
    """Raises KeyboardInterrupt before the n-th bytecode of our code (and contextlib's), or never if n is None."""

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self.count = 0
        self.where = ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self._number:
                sys.settrace(None)
                opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, {opcode}"
                raise KeyboardInterrupt(self.where)
        return self._trace


@dataclass(frozen=True)
class Call:
    """A call to interrupt, and how to prepare the store for it."""

    name: str
    act: Callable[[Store, int], object]
    prepare: Callable[[Store, int], object] = lambda store, number: None


def _forget_and_expire(store: Store, number: int) -> None:
    store.session("gone", ttl=0.001).put(f"expires {number}")
    store.session("s").put(f"is taken over {number}")


def _put_for_another(store: Store, number: int) -> None:
    store.session("s").put(f"not taken over {number}", name="n")


CALLS = [
    Call("put", lambda store, number: store.session("s").put(f"new {number}", name="new")),
    Call("put again", lambda store, number: store.session("s").put("the same", name="same")),
    Call("put large", lambda store, number: store.session("s").put(LARGE + b"%d" % number)),
    Call("get", lambda store, number: store.session("s").get("n"), _put_for_another),
    Call("get large", lambda store, number: store.session("s").get("large")),
    Call("forget", lambda store, number: store.session("s").forget("n"), _put_for_another),
    Call("search", lambda store, number: store.session("s").search("taken over"), _put_for_another),
    Call("collect", lambda store, number: store.collect(grace=0), _forget_and_expire),
]


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Another process with the store open; each call makes it put something and waits for its answer."""
    code = (
        "import sys, coatcheck\n"
        "store = coatcheck.open(sys.argv[1], durability='process')\n"
        "session = store.session('another', ttl=None)\n"
        "for line in sys.stdin:\n"
        "    session.put(line)\n"
        "    session.forget(session.put('not ' + line))\n"
        "    print('done', flush=True)\n"
    )
    coatcheck.open(tmp_path / "store", durability="process").close()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        numbers = iter(range(1_000_000))

        def put() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(20, process.kill)  # a process that waits for a lock would wait forever
            timer.start()
            process.stdin.write(f"from another process {next(numbers)}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            timer.cancel()
            assert answer == "done\n", "another process could not write"

        yield put
        process.stdin.close()
        process.wait(20)


def _fork() -> None:
    """Fork as another thread would, with a timeout. The child does nothing and exits."""
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _instants(count: int, name: str, long_faults: bool) -> list[int]:
    return list(range(count)) if long_faults else sorted(random.Random(name).sample(range(count), min(count, 20)))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name.replace(" ", "_"))
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_interrupt_at_any_bytecode_of_a_call_leaves_no_lock_behind(
    call: Call, tmp_path: Path, another: Callable[[], None], long_faults: bool
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder, durability="process") as store, ThreadPoolExecutor(1) as pool:
        session = store.session("s", ttl=None)
        session.put("the same", name="same")
        session.put(LARGE, name="large")
        call.prepare(store, -1)
        with Interrupt() as counted:
            call.act(store, -1)
        for number in _instants(counted.count, call.name, long_faults):
            call.prepare(store, number)
            kept: BaseException | None = None
            try:
                with Interrupt(number) as interrupt:
                    call.act(store, number)
            except KeyboardInterrupt as error:
                kept = error
            try:
                pool.submit(store.session("t").put, f"from a thread {number}").result(timeout=20)
                if number % 7 == 0:
                    pool.submit(_fork).result(timeout=20)
                another()
                assert session.get(session.put(f"after {number}")) == f"after {number}"
            except BaseException as error:
                error.add_note(f"interrupted at {number} of {counted.count}: {interrupt.where}")
                raise
            del kept
        store.verify(repair=True)
        assert problems(store) == []
        assert session.get("same") == "the same"
        assert session.get("large") == LARGE


@pytest.mark.parametrize("durability", ["power", "process"])
def test_an_interrupt_at_any_bytecode_of_an_opening_leaves_no_lock_behind(
    durability: Any, tmp_path: Path, another: Callable[[], None], long_faults: bool
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder, durability=durability) as store:
        ref = store.session("s", ttl=None).put("kept")
    with Interrupt() as counted:
        coatcheck.open(folder, durability=durability).close()
    for number in _instants(counted.count, "open", long_faults):
        kept: BaseException | None = None
        try:
            with Interrupt(number) as interrupt:
                coatcheck.open(folder, durability=durability).close()
        except KeyboardInterrupt as error:
            kept = error
        try:
            another()
            with coatcheck.open(folder, durability=durability) as store:
                assert store.session("s").get(ref) == "kept"
                store.session("s").put(f"after {number}")
        except BaseException as error:
            error.add_note(f"interrupted at {number} of {counted.count}: {interrupt.where}")
            raise
        del kept
    with coatcheck.open(folder) as store:
        assert_clean(store)


def test_an_alarm_that_raises_while_a_call_waits_for_the_lock_leaves_it_free(
    tmp_path: Path, another: Callable[[], None]
) -> None:
    def ring(*_: object) -> None:
        raise TimeoutError("the alarm")

    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        session = store.session("s", ttl=None)
        lock = os.open(folder / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises((TimeoutError, coatcheck.errors.StoreError)):
                session.put("waits")
        finally:
            signal.signal(signal.SIGALRM, before)
            os.close(lock)
        another()
        assert session.get(session.put("after")) == "after"


def test_a_call_from_a_signal_handler_inside_another_call_is_an_error_and_not_a_deadlock(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("s", ttl=None)
        catalog: Any = store._catalog
        with pytest.raises(coatcheck.errors.StoreUnavailable) as error:
            catalog._exclusive("putting", lambda: session.put("inside"))
        assert error.value.code == "store_unavailable"
        assert session.get(session.put("after")) == "after"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_bytecode_around_a_fork_leaves_no_lock_behind(
    tmp_path: Path, another: Callable[[], None], long_faults: bool
) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store, ThreadPoolExecutor(1) as pool:
        session = store.session("s", ttl=None)

        def fork(number: int) -> None:
            child = os.fork()
            if not child:
                sys.settrace(None)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)  # a child that waits for a lock would wait forever
                session.put(f"from a child {number}")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, "the child could not write"

        session.get(session.put("read once"))
        with Interrupt() as counted:
            child = os.fork()
            if not child:
                os._exit(0)
        os.waitpid(child, 0)
        for number in _instants(counted.count, "fork", long_faults):
            interrupt = Interrupt(number)
            try:
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    fork(number)
                session.put(f"from this thread {number}")
                pool.submit(session.put, f"from a thread {number}").result(timeout=20)
                pool.submit(_fork).result(timeout=20)
                another()
            except BaseException as error:
                error.add_note(f"interrupted at {number} of {counted.count}: {interrupt.where}")
                raise


@pytest.mark.parametrize("times", [1, 2, 5])
def test_several_interrupts_during_a_release_leave_the_lock_free(times: int) -> None:
    left = [KeyboardInterrupt(str(number)) for number in range(times)]

    def interrupted() -> None:
        if left:
            raise left.pop(0)

    mutex = Mutex(interrupted)
    with pytest.raises(KeyboardInterrupt, match="0"):
        mutex.run(lambda: None)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(mutex.run, lambda: "free").result(timeout=20) == "free"


def test_a_lock_that_was_left_behind_outside_a_call_is_released_by_the_next_call() -> None:
    mutex = Mutex()
    mutex.acquire()  # what more interrupts than releases would leave
    assert mutex.run(lambda: "works") == "works"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(mutex.run, lambda: "free").result(timeout=20) == "free"


def test_two_threads_can_fork_at_the_same_time(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store, ThreadPoolExecutor(3) as pool:
        session = store.session("s", ttl=None)
        for number in range(20):
            forks = [pool.submit(_fork) for _ in range(2)]
            pool.submit(session.put, f"meanwhile {number}").result(timeout=20)
            for fork in forks:
                fork.result(timeout=20)
