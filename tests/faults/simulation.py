"""A deterministic simulation of processes that share a store.

One seed decides everything: what each process does, which of them runs at each system call or
request, which faults happen where, and how far the clock jumps. A process is a thread with a store
of its own; exactly one of them runs at a time. `simulated_folder` and `simulated_fleet` define
where a process may be interrupted, and which faults there are.

The checks: bytes are never wrong, the calls on each artifact are linearizable across all faults,
`verify` finds nothing, and `collect` leaves nothing behind. A failing seed is made smaller by
leaving out operations and faults.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import secrets
import sqlite3
import sys
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import coatcheck
from coatcheck import Store
from coatcheck.errors import CoatcheckError, Damaged
from tests.faults.faulty import Crash, Cut
from tests.faults.linearizable import NEW, Call, CallKind, State, cut, outcomes
from tests.faults.volume import Steps

START = 1_750_000_000.0
DAY = 86_400.0
SESSIONS = ("one", "two")
BRIEF = "brief"  # its artifacts expire, so they may be gone
INLINE = 2_000  # larger content has a file or an object of its own
VALUES = (
    b"small",
    b"a little more " * 20,
    random.Random(1).randbytes(3_000),  # does not compress
    b"a line that compresses well\n" * 150,
    b"another line that does\n" * 300,
)
IDS = tuple(hashlib.sha256(value).hexdigest() for value in VALUES)
CUTS: tuple[Cut, ...] = ("dropped", "zeroed", "torn")
Kind = Literal[
    "put", "stream", "get", "forget", "end", "collect", "jump", "flush", "reopen", "verify"
]
KINDS: dict[Kind, int] = {
    "put": 30, "stream": 5, "get": 26, "forget": 12, "end": 2, "collect": 9, "jump": 7, "flush": 4, "reopen": 3,
    "verify": 2,
}  # fmt: skip
_T = TypeVar("_T")
_Thread = threading.Thread
_ERRORS = (Crash, CoatcheckError, sqlite3.Error, OSError)


class Wrong(AssertionError):
    """The store did something that it must not do."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a process."""

    process: int
    kind: Kind
    session: str
    value: int
    seconds: float

    def __str__(self) -> str:
        if self.kind in ("put", "stream", "get", "forget"):
            return f"{self.kind} value {self.value} of session {self.session}"
        return {"end": f"end session {self.session}", "jump": f"clock {self.seconds:+.0f} s"}.get(
            self.kind, self.kind
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a seed decides before it runs. Leaving out operations or faults does not
    change the rest."""

    seed: int
    operations: tuple[Operation, ...]
    faults: int
    power: tuple[bool, ...]
    """Whether each process asks for the durability `power`."""
    switching: float
    """Probability that another process continues at a step."""
    fault_rate: float
    reserve: int
    is_new: bool
    last_cut: Cut | None

    @classmethod
    def of(cls, seed: int) -> Plan:
        choose = random.Random(f"plan {seed}")
        processes = choose.choice((1, 2, 2, 3))
        durability = choose.choice(("power", "power", "mixed", "process"))
        shares = {"power": 1.0, "mixed": 0.5, "process": 0.0}
        power = tuple(choose.random() < shares[durability] for _ in range(processes))
        kinds = {kind: weight * choose.choice((0.3, 1, 1, 3)) for kind, weight in KINDS.items()}
        values = choose.sample(range(len(VALUES)), choose.choice((1, 2, 3)))
        jumps: tuple[float, ...] = (1.0, 50.0, 1.5 * DAY, 3 * DAY, -30.0, -2 * DAY)
        if choose.random() < 0.25:  # much is compressed and read at the same time
            values, jumps = [3, choose.randrange(len(VALUES))], (3 * DAY, 1.5 * DAY)
            kinds |= {"get": 40, "collect": 20, "jump": 15}
        operations = tuple(
            Operation(
                choose.randrange(processes),
                choose.choices(list(kinds), list(kinds.values()))[0],
                choose.choice((*SESSIONS, SESSIONS[0], BRIEF)),
                choose.choice(values),
                choose.choice(jumps),
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
    """A simulated process: a thread with a store of its own, which runs only while it has the
    baton."""

    def __init__(self, world: World, number: int, operations: Sequence[Operation]) -> None:
        self.world = world
        self.number = number
        self.operations = operations
        self.store: Store | None = None
        self.is_dead = False
        self.is_done = False
        self.sleeps_until = (
            0  # before this number of steps, it continues only if another process waits
        )
        self.may_run = threading.Lock()
        self.may_run.acquire()
        self.thread = _Thread(target=self._main, name=f"process {number}", daemon=True)

    def _main(self) -> None:
        self.may_run.acquire()
        try:
            for operation in self.operations:
                self._run(operation)
            self._until_done(self._close)
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the simulation
            self.world.fail(error)
        finally:
            self._abandon()
            self.is_done = True
            self.world.pass_on()

    def _run(self, operation: Operation) -> None:
        self._until_done(self._opened)
        world, text = self.world, f"process {self.number}: {operation}"
        line = Line(
            text, world.tick(), operation=operation, is_durable=world.plan.power[self.number]
        )
        world.history.append(line)
        try:
            line.result = self._act(operation)
            line.is_over = not self.is_dead
        except _ERRORS as error:
            line.result = repr(error)
            if not self.is_dead and not world.excuses(error):
                raise
        line.end = world.tick()
        if self.is_dead:
            line.result = "killed"
            self._abandon()

    def _until_done(self, work: Callable[[], object]) -> None:
        """Do this work, and repeat it after each crash."""
        while True:
            if self.world.failure is not None:
                raise Crash
            try:
                work()
                if not self.is_dead:
                    return
            except _ERRORS as error:
                if not self.is_dead and not self.world.excuses(error):
                    raise
            if self.is_dead:
                self._abandon()

    def _opened(self) -> Store:
        if self.store is None:
            self.store = self.world.open(self)
        return self.store

    def _close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            try:
                store.close()
            except BaseException:
                self.store = store
                raise

    def _abandon(self) -> None:
        """Release everything as the system does when a process ends."""
        store, self.store, self.is_dead = self.store, None, True
        if store is not None:
            self.world.abandon(store)
        self.world.ended(self)
        self.is_dead = self.world.failure is not None

    def _act(self, operation: Operation) -> str:
        store, world = self._opened(), self.world
        kind, value, artifact_id = operation.kind, VALUES[operation.value], IDS[operation.value]
        if kind == "collect":
            store.collect(grace=0)
        elif kind == "jump":
            world.now += operation.seconds
        elif kind == "flush":
            store._activity.flush()
        elif kind == "reopen":
            self._close()
            self._opened()
        elif kind == "verify":
            world.check_problems(store, "orphan")
        else:
            session = store.session(
                operation.session, ttl=100.0 if operation.session == BRIEF else None
            )
            if kind == "get":
                return found_by_get(session, artifact_id, value)
            if kind == "forget":
                return "present" if session.forget(artifact_id) else "absent"
            if kind == "end":
                session.end()
                return ""
            ref = session.put(value if kind == "put" else io.BytesIO(value))
            if ref.artifact_id != artifact_id:
                raise Wrong(f"{operation}: the id is {ref.artifact_id}")
        return ""


def found_by_get(session: coatcheck.Session, artifact_id: str, value: bytes) -> str:
    try:
        found = session.get(artifact_id)
    except Damaged:
        return "damaged"
    if found is not None and found != value:
        raise Wrong(f"a get returned {len(found)} wrong bytes")
    return "absent" if found is None else "present"


class World(Steps):
    """The machines: their clock, the order in which processes run, and the faults."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = START
        self.history: list[Line] = []
        self.steps: list[str] = []
        self.injected: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.suspect: tuple[str, int] | None = (
            None  # session and value of the artifact that is not linearizable
        )
        self.choose = random.Random(f"schedule {plan.seed}")
        self.running: Process | None = None
        self.processes = [
            Process(self, number, [one for one in plan.operations if one.process == number])
            for number in range(len(plan.power))
        ]
        self._ticks = 0
        self._faults = plan.faults
        self._due = self._next_fault()
        self._finished = threading.Lock()
        self._finished.acquire()

    # Defined by each backend

    @abstractmethod
    def open(self, process: Process | None) -> Store:
        """Open a store for a process, or for the final check."""

    @abstractmethod
    def abandon(self, store: Store) -> None:
        """Release the files and connections of a store, without its own steps."""

    def ended(self, process: Process) -> None:
        """Called when a process was killed or has ended."""

    def excuses(self, error: BaseException) -> bool:
        """Return whether a process that was not killed may see this error."""
        return False

    @abstractmethod
    def around(self) -> AbstractContextManager[object]:
        """Replace everything that the seed does not decide, while the simulation runs."""

    @abstractmethod
    def inject(
        self, process: Process, what: str, do: Callable[[], _T], half: Callable[[], object] | None
    ) -> _T:
        """Make a fault happen at a step."""

    def weight(self, what: str) -> int:
        """Return how much more likely than other steps this one is to have a fault."""
        return 1

    def before_final_check(self) -> None:
        """Called when all processes have ended."""

    def first_state(self, value: int) -> State:
        """Return what is in each session before the first operation."""
        return NEW

    excused: tuple[str, ...] = ()
    """Prefixes, starting with the kind, of problems that verify may find after the faults that
    happened."""

    def run(self) -> None:
        """Run all processes to their end, then check what is left."""
        with drawn_names(self.plan.seed), self.around():
            for process in self.processes:
                process.thread.start()
            self.pass_on()
            self._finished.acquire()
            for process in self.processes:
                process.thread.join()
            self.running = None
            if self.failure is None:
                self.before_final_check()
                with self.open(None) as store:
                    self._check(store)
        if self.failure is not None:
            raise self.failure

    # The scheduler

    def tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def note(self, text: str, *, is_cut: bool = False) -> None:
        """Add a fault to the history."""
        now = self.tick()
        self.history.append(Line(text, now, now, is_cut=is_cut))

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for process in self.processes:
            process.is_dead = True

    def pass_on(self) -> None:
        """Let another process run, after the end of one."""
        left = [process for process in self.processes if not process.is_done]
        if left:
            self.running = self.choose.choice(left)
            self.running.may_run.release()
        else:
            self._finished.release()

    def current(self) -> Process | None:
        """Return the process whose thread this is, if the simulation is in it."""
        running = self.running
        return (
            running
            if running is not None and running.thread is threading.current_thread()
            else None
        )

    def pause(self, process: Process, *, wait: bool = False, slow: bool = False) -> None:
        """Maybe let another process run: with `wait`, always if there is one; with `slow`, for some
        time."""
        if len(self.processes) > 1 and (wait or slow or self.choose.random() < self.plan.switching):
            others = [one for one in self.processes if not one.is_done and one is not process]
            ready = (
                others if wait else [one for one in others if one.sleeps_until <= len(self.steps)]
            )
            if ready:
                # A slow process meets others in the middle of their work.
                if slow or (not wait and self.choose.random() < 0.3):
                    process.sleeps_until = len(self.steps) + self.choose.choice((20, 60, 150))
                self.running = self.choose.choice(ready)
                self.running.may_run.release()
                process.may_run.acquire()
        if process.is_dead:
            raise Crash

    def step(
        self,
        what: str,
        do: Callable[[], _T],
        half: Callable[[], object] | None = None,
        fail: Callable[[], object] | None = None,
    ) -> _T:
        process = self.current()
        if process is None:
            return do()
        if process.is_dead:
            raise Crash
        self.pause(process)
        self.steps.append(f"{process.number}: {what}")
        self._due -= self.weight(what)
        if self._due > 0 or not self._faults:
            return do()
        self._faults -= 1
        self._due = self._next_fault()
        return self.inject(process, what, do, half)

    def kill(self, process: Process, where: str) -> None:
        self.injected["simulated kills"] += 1
        self.note(f"kill: {where}")
        process.is_dead = True

    def _next_fault(self) -> int:
        return 1 + int(self.choose.expovariate(self.plan.fault_rate))

    # Checks

    def _check(self, store: Store) -> None:
        for session_id in SESSIONS:
            session = store.session(session_id, ttl=None)
            for number, (artifact_id, value) in enumerate(zip(IDS, VALUES, strict=True)):
                operation = Operation(-1, "get", session_id, number, 0.0)
                line = Line(
                    f"at the end: {operation}", self.tick(), operation=operation, is_over=True
                )
                line.result = found_by_get(session, artifact_id, value)
                line.end = self.tick()
                self.history.append(line)
        self._check_linearizable()
        self.check_problems(store, "orphan")
        store.collect(grace=0)
        self.check_problems(store)

    def check_problems(self, store: Store, *excused: str) -> None:
        allowed = (*excused, *self.excused)
        found = [
            one
            for one in store.verify().problems
            if not f"{one.kind}: {one.message}".startswith(allowed)
        ]
        if found:
            raise Wrong(f"verify found {found}")

    def _check_linearizable(self) -> None:
        for session_id in SESSIONS:
            for number in range(len(VALUES)):
                states = {self.first_state(number)}
                segments: list[list[Call]] = [[]]
                for line in self.history:
                    if line.is_cut:
                        segments.append([])
                    kind = _effect(line.operation, session_id, number)
                    if kind is not None:
                        found: Any = (
                            line.result if line.is_over and kind in ("get", "forget") else None
                        )
                        call = Call(
                            kind, line.start, line.end, found or None, line.is_durable, line.is_over
                        )
                        segments[-1].append(call)
                for index, calls in enumerate(segments):
                    states = outcomes(calls, cut(states) if index else states)
                    if not states:
                        self.suspect = session_id, number
                        raise Wrong(f"value {number} of session {session_id} is not linearizable")

    def story(self) -> str:
        """Return the history as text, one line for each operation and fault."""
        lines = []
        for line in self.history:
            one = line.operation
            if one is None or one.process >= 0 or (one.session, one.value) == self.suspect:
                over = f"-{line.end}" if line.end > line.start else ""
                lines.append(
                    f"  {line.start}{over}  {line.text}"
                    + (f": {line.result}" if line.result else "")
                )
        return "\n".join(lines)


def _effect(one: Operation | None, session_id: str, number: int) -> CallKind | None:
    """Return what an operation does to an artifact of a session."""
    if one is None or (one.value != number and one.kind != "end"):
        return None
    is_own = one.session == session_id
    if one.kind in ("put", "stream"):
        return "put" if is_own else "heal"
    if one.kind == "get":
        return "get" if is_own else None
    return "forget" if is_own and one.kind in ("forget", "end") else None


@contextmanager
def drawn_names(seed: int) -> Iterator[None]:
    """Let a seed decide randomly drawn names, and keep threads and timers from deciding the
    order."""
    choose = random.Random(f"tokens {seed}")
    with (
        patch.object(os, "urandom", lambda size: choose.randbytes(size)),
        patch.object(secrets, "token_bytes", lambda size: choose.randbytes(size)),
        patch.object(secrets, "token_hex", lambda size: choose.randbytes(size).hex()),
        patch.object(threading, "Thread", _InlineThread),
        patch.object(threading, "Timer", _IdleTimer),
    ):
        yield


class _InlineThread:
    """A thread that runs when it is started."""

    def __init__(
        self, target: Callable[..., object] = lambda: None, args: Sequence[Any] = (), **options: Any
    ) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


class _IdleTimer:
    """A timer that never fires: the operation `flush` does what it would do."""

    daemon = True

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        pass

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


Made = Callable[[Plan], AbstractContextManager[World]]
"""Creates the world of a plan with its folders, and removes them afterwards."""


def simulate(plan: Plan, made: Made) -> tuple[World, Exception | None]:
    """Run a plan. Return its world, and the error if it failed."""
    with made(plan) as world:
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - the result
            return world, error
        return world, None


def _shrunk(plan: Plan, made: Made) -> Plan:
    """Return the smallest plan that still fails, found by leaving out operations and faults."""
    size = len(plan.operations) // 2
    while size:
        at = 0
        while at < len(plan.operations):
            fewer = replace(plan, operations=plan.operations[:at] + plan.operations[at + size :])
            if simulate(fewer, made)[1] is not None:
                plan = fewer
            else:
                at += size
        size //= 2
    tried = (replace(plan, faults=faults) for faults in range(plan.faults))
    return next((fewer for fewer in tried if simulate(fewer, made)[1] is not None), plan)


def report(plan: Plan, made: Made, command: str) -> str:
    """Return the shortest history that shows what is wrong with a seed, and the command that
    repeats it."""
    small = _shrunk(plan, made)
    world, error = simulate(small, made)
    kept, last = [], -1
    for one in small.operations:
        last = plan.operations.index(one, last + 1)
        kept.append(str(last))
    durability = ", ".join("power" if power else "process" for power in plan.power)
    return (
        f"seed {plan.seed}: {error}\ndurability of the processes: {durability}\n{world.story()}\n"
        f"repeat: python -m {command} {plan.seed} --faults {small.faults} --keep {','.join(kept) or '-'}"
    )


def main(arguments: Sequence[str], made: Made, command: str) -> int:
    """The command line of a simulation: run seeds, and shrink the ones that fail."""
    parser = argparse.ArgumentParser(prog=command, description="Run seeds of the simulation.")
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
            kept = [int(one) for one in given.keep.split(",") if one.isdigit()]
            plan = replace(plan, operations=tuple(plan.operations[number] for number in kept))
        if given.faults is not None:
            plan = replace(plan, faults=given.faults)
        world, error = simulate(plan, made)
        if given.steps:
            sys.stdout.write("\n".join(world.steps) + "\n")
        if error is not None:
            failed += 1
            is_small = given.keep is not None
            sys.stdout.write(
                f"{error}\n{world.story()}\n\n"
                if is_small
                else report(plan, made, command) + "\n\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{given.count} seeds, {failed} failed\n")
    return 1 if failed else 0
