"""A deterministic simulation of processes that share a store in a folder.

One seed decides everything: what each process does, which of them runs at each system call, where one is killed, where
the power fails, what is left of unsynced data, and how far the clock jumps. A process is a thread with a store of its
own; exactly one of them runs at a time. The store's changes go through a `RecordedDisk` and SQLite's through a
`RecordedSqlite`, so each of them is an instant at which another process may continue or a fault may happen.

What is checked: bytes are never wrong, the calls on each artifact are linearizable across all faults, `verify` finds
nothing, and `collect` leaves nothing behind. A failing seed is made smaller by leaving out operations and faults:

    python -m tests.faults.simulation 1234
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import io
import os
import random
import secrets
import shutil
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import coatcheck
from coatcheck import Store
from coatcheck.errors import CoatcheckError, Damaged
from coatcheck.storage import journal
from coatcheck.storage.folder import FolderCatalog
from coatcheck.testing.faulty import Crash, Cut, open_on
from tests.faults.below_sqlite import wrapped_vfs
from tests.faults.conftest import folder_in_memory
from tests.faults.linearizable import NEW, Call, Held, cut, outcomes
from tests.faults.volume import RecordedDisk, RecordedSqlite, Steps, Volume

START = 1_750_000_000.0
DAY = 86_400.0
SESSIONS = ("one", "two")
BRIEF = "brief"  # its artifacts expire, so they may be gone
INLINE = 2_000
VALUES = (
    b"small",
    b"a little more " * 20,
    random.Random(1).randbytes(3_000),  # has a file of its own, and does not compress
    b"a line that compresses well\n" * 150,
    b"another line that does\n" * 300,
)
IDS = tuple(hashlib.sha256(value).hexdigest() for value in VALUES)
CUTS: tuple[Cut, ...] = ("dropped", "zeroed", "torn")
Kind = Literal["put", "stream", "get", "forget", "end", "collect", "jump", "flush", "reopen", "verify"]
KINDS: dict[Kind, int] = {
    "put": 30, "stream": 5, "get": 26, "forget": 12, "end": 2, "collect": 9, "jump": 7, "flush": 4, "reopen": 3,
    "verify": 2,
}  # fmt: skip
_T = TypeVar("_T")
_Thread = threading.Thread
_flock = fcntl.flock


class Wrong(AssertionError):
    """The store did something that it must not do."""


@dataclass(frozen=True, slots=True)
class Operation:
    process: int
    kind: Kind
    session: str
    value: int
    seconds: float

    def __str__(self) -> str:
        if self.kind in ("put", "stream", "get", "forget"):
            return f"{self.kind} value {self.value} of session {self.session}"
        return {"end": f"end session {self.session}", "jump": f"clock {self.seconds:+.0f} s"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed decides before it runs. Without some operations or faults, the rest stays the same."""

    seed: int
    operations: tuple[Operation, ...]
    faults: int
    power: tuple[bool, ...]
    """Whether each process asks for the durability `power`."""
    switching: float
    fault_rate: float
    reserve: int
    is_new: bool
    last_cut: Cut | None

    @classmethod
    def of(cls, seed: int) -> Plan:
        choose = random.Random(f"plan {seed}")
        processes = choose.choice((1, 2, 2, 3))
        durability = choose.choice(("power", "power", "mixed", "process"))
        power = tuple(durability == "power" or (durability == "mixed" and choose.random() < 0.5) for _ in range(processes))
        kinds = {kind: weight * choose.choice((0.3, 1, 1, 3)) for kind, weight in KINDS.items()}
        values = choose.sample(range(len(VALUES)), choose.choice((1, 2, 3)))
        operations = tuple(
            Operation(
                choose.randrange(processes),
                choose.choices(list(kinds), list(kinds.values()))[0],
                choose.choice((*SESSIONS, SESSIONS[0], BRIEF)),
                choose.choice(values),
                choose.choice((1.0, 50.0, 1.5 * DAY, 3 * DAY, -30.0, -2 * DAY)),
            )
            for _ in range(choose.choice((6, 12, 20, 30)))
        )
        return cls(
            seed, operations, choose.choice((0, 1, 1, 2, 4)), power, choose.choice((0.02, 0.1, 0.3)),
            choose.choice((1 / 20, 1 / 100, 1 / 400)), choose.choice((1 << 16, 1 << 17, 1 << 20)),
            choose.random() < 0.1, choose.choice((None, *CUTS)),
        )  # fmt: skip


@dataclass
class Line:
    """One line of the history: an operation of a process, or a fault."""

    text: str
    start: int
    end: int = -1
    operation: Operation | None = None
    result: str = ""
    is_over: bool = False
    is_durable: bool = False
    is_cut: bool = False


class Process:
    """A simulated process: a thread with a store of its own, which runs only while it has the baton."""

    def __init__(self, world: World, number: int, operations: Sequence[Operation]) -> None:
        self.world = world
        self.number = number
        self.operations = operations
        self.disk = world.new_disk(world.plan.power[number])
        self.store: Store | None = None
        self.is_dead = False
        self.is_done = False
        self.may_run = threading.Lock()
        self.may_run.acquire()
        self.thread = _Thread(target=self._main, name=f"process {number}", daemon=True)

    def _main(self) -> None:
        self.may_run.acquire()
        try:
            for operation in self.operations:
                self._run(operation)
            self._restart(lambda: self._closed() if self.store else None)
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the simulation
            self.world.fail(error)
        finally:
            self._abandon()
            self.is_done = True
            self.world.pass_on()

    def _run(self, operation: Operation) -> None:
        self._restart(self._opened)
        world = self.world
        line = Line(str(operation), world.tick(), operation=operation, is_durable=world.plan.power[self.number])
        line.text = f"process {self.number}: {line.text}"
        world.history.append(line)
        try:
            line.result = self._act(operation)
            line.is_over = not self.is_dead
        except (Crash, CoatcheckError, sqlite3.Error, OSError) as error:
            if not self.is_dead:
                line.result = repr(error)
                raise
        line.end = world.tick()
        if self.is_dead:
            line.result = "killed"
            self._abandon()

    def _restart(self, work: Callable[[], _T]) -> _T:
        """Do this work, again after each crash."""
        while True:
            try:
                answer = work()
                if not self.is_dead:
                    return answer
            except (Crash, CoatcheckError, sqlite3.Error, OSError):
                if not self.is_dead:
                    raise
            self._abandon()

    def _opened(self) -> Store:
        if self.world.failure is not None:
            raise Crash
        if self.store is None:
            self.store = self.world.open(self.disk)
        return self.store

    def _closed(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _abandon(self) -> None:
        """Let go of everything as the system does when a process ends."""
        store, self.store = self.store, None
        if store is not None:
            self.is_dead = True
            abandon(store)
        self.is_dead = self.world.failure is not None

    def _act(self, operation: Operation) -> str:
        store, world = self._opened(), self.world
        kind, value, artifact_id = operation.kind, VALUES[operation.value], IDS[operation.value]
        if kind in ("put", "stream", "get", "forget", "end"):
            session = store.session(operation.session, ttl=100.0 if operation.session == BRIEF else None)
        if kind in ("put", "stream"):
            ref = session.put(value if kind == "put" else io.BytesIO(value))
            if ref.artifact_id != artifact_id:
                raise Wrong(f"{operation}: the id is {ref.artifact_id}")
        elif kind == "get":
            return self._get(session, artifact_id, value)
        elif kind == "forget":
            return "present" if session.forget(artifact_id) else "absent"
        elif kind == "end":
            session.end()
        elif kind == "collect":
            store.collect(grace=0)
        elif kind == "jump":
            world.now += operation.seconds
        elif kind == "flush":
            store._activity.flush()
        elif kind == "reopen":
            self._closed()
            self._opened()
        elif kind == "verify":
            world.check_problems(store, orphans=True)
        return ""

    def _get(self, session: coatcheck.Session, artifact_id: str, value: bytes) -> str:
        try:
            found = session.get(artifact_id)
        except Damaged:
            return "damaged"
        if found is not None and found != value:
            raise Wrong(f"a get returned {len(found)} wrong bytes")
        return "absent" if found is None else "present"


def abandon(store: Store) -> None:
    """Close the files of a store without the store's own steps."""
    catalog: Any = store._catalog
    blobs: Any = store._blobs
    for connection in (catalog._writer, *catalog._readers):
        with contextlib.suppress(sqlite3.Error):
            connection.close()
    catalog._closed = True
    catalog._journal.close()
    for descriptor in (catalog._lock, catalog._folder):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    catalog._lock = -1
    blobs.close()
    store._passages.close()


class World(Steps):
    """The machine: its disk, its clock, and the order in which processes run."""

    def __init__(self, plan: Plan, base: Path, mistake: Mistake | None = None) -> None:
        self.plan = plan
        self.now = START
        self.history: list[Line] = []
        self.steps: list[str] = []
        self.failure: BaseException | None = None
        self.has_lost = False  # whether a power cut may have lost what a process without durability has put
        self.cuts = self.kills = 0
        self._base = base
        self._mistake = mistake
        self._ticks = 0
        self._choose = random.Random(f"schedule {plan.seed}")
        self._faults = plan.faults
        self._due = self._next_fault()
        root = base / "0"
        if not plan.is_new:
            shutil.copytree(template(), root)
        else:
            root.mkdir(mode=0o700)
        self.volume = Volume(root)
        self.processes = [
            Process(self, number, [one for one in plan.operations if one.process == number])
            for number in range(len(plan.power))
        ]
        self._running: Process | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    def new_disk(self, durable: bool) -> RecordedDisk:
        made = self._mistake.disk if self._mistake else RecordedDisk
        return made(lambda: self.volume, self, durable=durable)

    def open(self, disk: RecordedDisk) -> Store:
        return open_on(self.volume.root, disk, clock=lambda: self.now)

    def run(self) -> None:
        """Run all processes to their end, then check what is left."""
        with self._around():
            for process in self.processes:
                process.thread.start()
            self.pass_on()
            self._finished.acquire()
            for process in self.processes:
                process.thread.join()
            self._running = None
            if self.failure is None:
                try:
                    self._check()
                except Exception as error:  # noqa: BLE001 - raised below, like that of a process
                    self.failure = error
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Everything that is not determined by the seed is replaced while the simulation runs."""
        with ExitStack() as stack:
            stack.enter_context(wrapped_vfs().listening(_Sqlite(lambda: self.volume, self)))
            stack.enter_context(_tokens_of(self.plan.seed))
            for owner, name, value in (
                (fcntl, "flock", self._lock),
                (threading, "Thread", _InlineThread),
                (threading, "Timer", _IdleTimer),
                (os, "open", self._pausing(os.open)),
                (os, "listdir", self._pausing(os.listdir)),
                (journal, "_FULL_SIZE", self.plan.reserve),
                (FolderCatalog, "inline_limit", INLINE),
            ):
                stack.enter_context(patch.object(owner, name, value))
            if self._mistake is not None:
                stack.enter_context(self._mistake.made())
            yield

    # The scheduler

    def tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for process in self.processes:
            process.is_dead = True

    def pass_on(self) -> None:
        """Let another process run, after the end of one."""
        left = [process for process in self.processes if not process.is_done]
        if left:
            self._running = self._choose.choice(left)
            self._running.may_run.release()
        else:
            self._finished.release()

    def current(self) -> Process | None:
        running = self._running
        return running if running is not None and running.thread is threading.current_thread() else None

    def pause(self, process: Process, *, wait: bool = False) -> None:
        """Let another process run, perhaps; with `wait`, surely, if there is one."""
        if len(self.processes) > 1 and (wait or self._choose.random() < self.plan.switching):
            others = [one for one in self.processes if not one.is_done and one is not process]
            if others:
                self._running = self._choose.choice(others)
                self._running.may_run.release()
                process.may_run.acquire()
        if process.is_dead:
            raise Crash

    def step(self, what: str, do: Callable[[], _T], half: Callable[[], object] | None = None) -> _T:
        process = self.current()
        if process is None:
            return do()
        if process.is_dead:
            raise Crash
        self.pause(process)
        self.steps.append(f"{process.number}: {what}")
        self._due -= 1
        if self._due or not self._faults:
            return do()
        self._faults -= 1
        self._due = self._next_fault()
        is_cut, when = self._choose.random() < 0.5, self._choose.choice(("before", "halfway", "after"))
        if when == "after":
            do()
        elif when == "halfway" and half is not None:
            half()
        if process.is_dead:  # of a fault inside this step
            raise Crash
        where = f"{when} '{what}' of process {process.number}"
        if is_cut:
            self.cut_power(self._choose.choice(CUTS), where)
        else:
            self.kills += 1
            self.history.append(Line(f"kill: {where}", self.tick()))
            process.is_dead = True
        raise Crash

    def _next_fault(self) -> int:
        return 1 + int(self._choose.expovariate(self.plan.fault_rate))

    def cut_power(self, how: Cut, where: str) -> None:
        self.cuts += 1
        self.has_lost = self.has_lost or not all(self.plan.power)
        root, running = self._base / str(self.cuts), self._running
        self._running = None  # nobody runs meanwhile
        self.volume.leave(root, how, self._choose)
        self.volume = Volume(root)
        self._running = running
        now = self.tick()
        self.history.append(Line(f"power cut ({how}): {where}", now, now, is_cut=True))
        for process in self.processes:
            process.is_dead = not process.is_done

    def _lock(self, file: int, how: int) -> None:
        """Take a file lock as `flock` does, but let other processes run meanwhile."""
        process = self.current()
        if process is None or how & fcntl.LOCK_UN:
            return _flock(file, how)
        self.pause(process)
        for _ in range(100_000):
            try:
                return _flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
            self.pause(process, wait=True)
        raise Wrong("deadlock: a lock is never free")

    def _pausing(self, call: Callable[..., _T]) -> Callable[..., _T]:
        def paused(*args: Any, **options: Any) -> _T:
            process = self.current()
            if process is not None and not process.is_dead:
                self.pause(process)
            return call(*args, **options)

        return paused

    # What must be true

    def _check(self) -> None:
        if self.plan.last_cut is not None:
            self.cut_power(self.plan.last_cut, "at the end")
        with self.open(self.new_disk(True)) as store:
            for session_id in SESSIONS:
                session = store.session(session_id, ttl=None)
                for number, (artifact_id, value) in enumerate(zip(IDS, VALUES, strict=True)):
                    operation = Operation(-1, "get", session_id, number, 0.0)
                    line = Line(f"at the end: {operation}", self.tick(), operation=operation, is_over=True)
                    line.result = self.processes[0]._get(session, artifact_id, value)
                    line.end = self.tick()
                    self.history.append(line)
            self._check_linearizable()
            self.history = [line for line in self.history if line.operation is None or line.operation.process >= 0]
            self.check_problems(store, orphans=True)
            store.collect(grace=0)
            self.check_problems(store, orphans=False)

    def check_problems(self, store: Store, *, orphans: bool) -> None:
        """Check what verify finds. Content that was put without durability may be damaged by a power cut."""
        kinds = ("orphan",) if orphans else ()
        excused = ("damaged", "missing") if self.has_lost else ()
        found = [one for one in store.verify().problems if one.kind not in (*kinds, *excused)]
        if found:
            raise Wrong(f"verify found {found}")

    def _check_linearizable(self) -> None:
        ended = {"put": "put", "stream": "put", "get": "get", "forget": "forget", "end": "forget"}
        for session_id in SESSIONS:
            for number in range(len(VALUES)):
                segments: list[list[tuple[Call, Line]]] = [[]]
                for line in self.history:
                    if line.is_cut:
                        segments.append([])
                    one = line.operation
                    if one is None or one.kind not in ended or one.session != session_id:
                        continue
                    if one.kind != "end" and one.value != number:
                        continue
                    found: Any = line.result if line.is_over and one.kind in ("get", "forget") else None
                    call = Call(ended[one.kind], line.start, line.end, found, line.is_durable, line.is_over)  # type: ignore[arg-type]
                    segments[-1].append((call, line))
                states = {template_state(number) if not self.plan.is_new else NEW}
                for index, segment in enumerate(segments):
                    states = cut(states) if index else states
                    states = outcomes([call for call, _ in segment], states)
                    if not states:
                        key = (session_id, number)
                        self.history = [line for line in self.history if line.operation is None or line.operation.process >= 0 or (line.operation.session, line.operation.value) == key]
                        lines = "\n".join(f"  {line.text}: {line.result}" for _, line in segment)
                        raise Wrong(f"value {number} of session {session_id} is not linearizable:\n{lines}")


class _Sqlite(RecordedSqlite):
    def __init__(self, volume: Callable[[], Volume], world: World) -> None:
        super().__init__(volume, world)
        self._world = world

    def sleep(self) -> bool:
        process = self._world.current()
        if process is None:
            return False
        if not process.is_dead:
            with contextlib.suppress(Crash):
                self._world.pause(process, wait=True)
        return True


class _InlineThread:
    """A thread that runs when it is started, so that only the scheduler decides about order."""

    def __init__(self, group: None = None, target: Callable[..., object] = lambda: None, name: str = "",
                 args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, *, daemon: bool = False) -> None:  # fmt: skip
        self._work = lambda: target(*args, **(kwargs or {}))

    def start(self) -> None:
        self._work()

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


class _IdleTimer(_InlineThread):
    """A timer that never fires: the operation `flush` does what it would do."""

    daemon = True

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        super().__init__()

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class Mistake:
    """A change to the store that makes it wrong, to show that the simulation finds it."""

    disk: type[RecordedDisk] = RecordedDisk

    @contextmanager
    def made(self) -> Iterator[None]:
        yield


@contextmanager
def _tokens_of(seed: int) -> Iterator[None]:
    """Let the seed decide about names that are drawn."""
    choose = random.Random(f"tokens {seed}")
    with (
        patch.object(secrets, "token_bytes", lambda size: choose.randbytes(size)),
        patch.object(secrets, "token_hex", lambda size: choose.randbytes(size).hex()),
    ):
        yield


@cache
def template() -> Path:
    """A store with an artifact in each session, made once."""
    stack = ExitStack()
    folder = stack.enter_context(folder_in_memory()) / "template"
    atexit.register(stack.close)
    with (
        _tokens_of(-1),
        patch.object(journal, "_FULL_SIZE", 1 << 16),
        patch.object(FolderCatalog, "inline_limit", INLINE),
        coatcheck.open(folder, clock=lambda: START) as store,
    ):
        for session_id in SESSIONS:
            store.session(session_id, ttl=None).put(VALUES[3])
    return folder


def template_state(number: int) -> tuple[Held, frozenset[Held]]:
    return ("present", frozenset()) if number == 3 else NEW


@dataclass
class Outcome:
    """What came of a seed."""

    world: World
    error: BaseException | None

    def story(self) -> str:
        """Return the history as text, one line for each operation and fault."""
        lines = []
        for line in self.world.history:
            over = "" if line.end < 0 or line.is_cut else f"-{line.end}"
            lines.append(f"  {line.start}{over}  {line.text}" + (f": {line.result}" if line.result else ""))
        return "\n".join(lines)


def simulate(plan: Plan, mistake: Mistake | None = None) -> Outcome:
    with folder_in_memory() as base:
        world = World(plan, base, mistake)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - part of the outcome
            return Outcome(world, error)
        return Outcome(world, None)


def shrunk(plan: Plan, mistake: Mistake | None = None) -> Plan:
    """Return the smallest plan that still fails, found by leaving out operations and faults."""
    size = len(plan.operations) // 2
    while size:
        at = 0
        while at < len(plan.operations):
            fewer = replace(plan, operations=plan.operations[:at] + plan.operations[at + size :])
            if simulate(fewer, mistake).error is not None:
                plan = fewer
            else:
                at += size
        size //= 2
    for faults in range(plan.faults):
        fewer = replace(plan, faults=faults)
        if simulate(fewer, mistake).error is not None:
            return fewer
    return plan


def report(plan: Plan, mistake: Mistake | None = None) -> str:
    """Return the shortest history that shows what is wrong, and how to repeat it."""
    small = shrunk(plan, mistake)
    outcome = simulate(small, mistake)
    kept = ",".join(str(plan.operations.index(one)) for one in small.operations)
    durability = ", ".join("power" if power else "process" for power in plan.power)
    return (
        f"seed {plan.seed}: {outcome.error}\ndurability of the processes: {durability}\n{outcome.story()}\n"
        f"repeat: python -m tests.faults.simulation {plan.seed} --faults {small.faults} --keep {kept}"
    )


def main(arguments: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(description="Run seeds of the simulation, and shrink the ones that fail.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="number of seeds from this one on")
    parser.add_argument("--keep", help="run only these operations of the seed, by number")
    parser.add_argument("--faults", type=int, help="inject at most this number of faults")
    parser.add_argument("--steps", action="store_true", help="print every step")
    given = parser.parse_args(arguments)
    failed = 0
    for seed in range(given.seed, given.seed + given.count):
        plan = Plan.of(seed)
        if given.keep is not None:
            kept = [int(one) for one in given.keep.split(",") if one]
            plan = replace(plan, operations=tuple(plan.operations[number] for number in kept))
        if given.faults is not None:
            plan = replace(plan, faults=given.faults)
        outcome = simulate(plan)
        if given.steps:
            sys.stdout.write("\n".join(outcome.world.steps) + "\n")
        if outcome.error is not None:
            failed += 1
            text = f"{outcome.error}\n{outcome.story()}" if given.keep is not None else report(plan)
            sys.stdout.write(text + "\n\n")
    sys.stdout.write(f"{given.count} seeds, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
