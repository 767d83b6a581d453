"""Timeouts and deadlines: abandoned calls, and nothing stored after the end of a turn."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from coatcheck import Session, Store
from coatcheck.executor import (
    ArtifactReference,
    Result,
    TimedOut,
    ToolCall,
    ToolError,
    ToolExecutor,
    ToolOutcome,
)
from tests.backends import run_python
from tests.executor.conftest import LONG, SOON, after_it_began

BIG = "A line of a log that nobody wants in a prompt.\n" * 2_000


class Patient:
    """A tool that waits for `go_on`, then returns something large. `begun` is set when it waits,
    and `ended` when it is about to end, whether or not its answer is used."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.current_thread()

    def function(self) -> str:
        self.thread = threading.current_thread()
        self.begun.set()
        try:
            self.go_on.wait(LONG)
            return BIG
        finally:
            self.ended.set()

    def generator(self) -> Iterator[str]:
        self.thread = threading.current_thread()
        try:
            yield BIG
            self.begun.set()
            self.go_on.wait(LONG)
            yield BIG
        finally:
            self.ended.set()

    async def coroutine(self) -> str:
        self.thread = threading.current_thread()
        self.begun.set()
        try:
            await asyncio.Event().wait()
            return BIG
        finally:
            self.ended.set()

    async def async_generator(self) -> AsyncIterator[str]:
        self.thread = threading.current_thread()
        try:
            yield BIG
            self.begun.set()
            await asyncio.Event().wait()
            yield BIG
        finally:
            self.ended.set()

    def has_begun(self) -> bool:
        """Return whether the tool has begun to wait. If it has not, it will not wait later
        either."""
        if not self.begun.is_set():
            self.go_on.set()
        return self.begun.is_set()

    def finish(self) -> None:
        """Let the tool go on, and wait until its thread has ended."""
        self.go_on.set()
        assert self.ended.wait(LONG)
        if self.thread is not threading.current_thread():
            self.thread.join(LONG)
            assert not self.thread.is_alive()


KINDS = ["function", "generator", "coroutine", "async_generator"]


def timed_out(outcome: ToolOutcome, scope: str) -> TimedOut:
    assert isinstance(outcome, TimedOut), outcome
    assert outcome.is_error
    assert outcome.scope == scope
    assert len(outcome.to_model_content()) <= 12_600
    return outcome


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_call_that_runs_over_is_abandoned_and_its_result_dropped(
    session: Session, store: Store, kind: str
) -> None:
    def attempt(seconds: float) -> tuple[TimedOut, Patient] | None:
        patient = Patient()
        executor = ToolExecutor(session, {"tool": getattr(patient, kind)})
        outcome = timed_out(executor.run(ToolCall("c", "tool"), timeout=seconds), "call")
        return (outcome, patient) if patient.has_begun() else None

    outcome, patient = after_it_began(attempt)
    assert outcome.ref is None
    assert not outcome.partial
    before = store.stats()
    patient.finish()
    assert store.stats() == before
    assert before.artifacts == 0


def test_calls_without_a_timeout_use_that_of_the_executor(session: Session) -> None:
    patient = Patient()
    executor = ToolExecutor(session, {"tool": patient.function}, timeout=SOON)
    timed_out(executor.run(ToolCall("c", "tool")), "call")
    patient.go_on.set()
    assert isinstance(executor.run(ToolCall("c", "tool"), timeout=LONG), ArtifactReference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["run_all", "arun_all"])
def test_once_a_turn_is_past_its_deadline_nothing_more_is_stored_for_it(
    session: Session, store: Store, kind: str, form: str
) -> None:
    patient_loop = asyncio.new_event_loop()

    def attempt(seconds: float) -> tuple[ToolOutcome, Patient] | None:
        patient = Patient()
        executor = ToolExecutor(
            session, {"slow": getattr(patient, kind), "quick": lambda: BIG + "quick"}
        )
        calls = [ToolCall("c1", "slow"), ToolCall("c2", "quick")]
        if form == "run_all":
            slow, quick = executor.run_all(calls, deadline=seconds)
        else:
            slow, quick = patient_loop.run_until_complete(
                executor.arun_all(calls, deadline=seconds)
            )
        return (
            (slow, patient)
            if patient.has_begun() and isinstance(quick, ArtifactReference)
            else None
        )

    slow, patient = after_it_began(attempt)
    assert timed_out(slow, "turn").ref is None
    before = store.stats()
    assert (before.artifacts, before.refs) == (1, 1)
    if form == "arun_all":
        patient_loop.run_until_complete(asyncio.sleep(0))
    patient.finish()
    patient_loop.run_until_complete(patient_loop.shutdown_default_executor())
    patient_loop.close()
    assert store.stats() == before
    assert [ref.tool for ref in session.list()] == ["quick"]


def test_a_result_that_arrives_at_the_deadline_is_stored_whole_or_not_at_all(
    session: Session, store: Store
) -> None:
    for number in range(30):
        ready = threading.Event()

        def tool(number: int, ready: threading.Event = ready) -> Iterator[str]:
            for line in range(3_000):
                yield f"{number} {line} " * 100
            ready.set()

        tool.__annotations__.pop("ready")
        outcome = ToolExecutor(session, [tool]).run_all(
            [ToolCall("c", "tool", {"number": number})], deadline=number / 300
        )
        stored = [
            ref
            for ref in session.list()
            if session.open(ref).read(20).startswith(f"{number} 0 ".encode())
        ]
        assert len(stored) == isinstance(outcome[0], ArtifactReference)
        if stored:
            assert ready.is_set()
    assert store.verify().problems == []


def test_calls_that_wait_for_a_worker_until_the_deadline_are_never_made(session: Session) -> None:
    def attempt(seconds: float) -> tuple[list[int], Patient] | None:
        patients = [Patient() for _ in range(3)]
        made: list[int] = []

        def tool(number: int) -> str:
            made.append(number)
            return patients[number].function()

        executor = ToolExecutor(session, [tool], max_workers=1)
        outcomes = executor.run_all(
            [ToolCall(f"c{n}", "tool", {"number": n}) for n in range(3)], deadline=seconds
        )
        assert [timed_out(one, "turn").call_id for one in outcomes] == ["c0", "c1", "c2"]
        return (made, patients[0]) if patients[0].has_begun() else None

    made, patient = after_it_began(attempt)
    patient.finish()
    assert made == [0]


def test_a_turn_returns_at_its_deadline_even_if_other_turns_use_all_workers(
    session: Session,
) -> None:
    patient = Patient()
    executor = ToolExecutor(
        session, {"slow": patient.function, "quick": lambda: "done"}, max_workers=1
    )
    other: list[ToolOutcome] = []
    thread = threading.Thread(
        target=lambda: other.extend(executor.run_all([ToolCall("c", "slow")]))
    )
    thread.start()
    assert patient.begun.wait(LONG)
    timed_out(executor.run_all([ToolCall("c", "quick")], deadline=SOON)[0], "turn")
    timed_out(asyncio.run(executor.arun_all([ToolCall("c", "quick")], deadline=SOON))[0], "turn")
    patient.finish()
    thread.join()
    assert isinstance(other[0], ArtifactReference)
    assert executor.run_all([ToolCall("c", "quick")], deadline=LONG)[0].text == "done"


def test_the_calls_of_a_turn_share_its_deadline_and_have_their_own_timeouts(
    session: Session,
) -> None:
    def attempt(seconds: float) -> ToolOutcome | None:
        patient = Patient()
        executor = ToolExecutor(session, {"slow": patient.function, "quick": lambda: "done"})
        calls = [ToolCall("c1", "slow"), ToolCall("c2", "quick"), ToolCall("c3", "slow")]
        one, two, three = executor.run_all(calls, timeout=seconds, deadline=LONG)
        timed_out(one, "call")
        timed_out(three, "call")
        patient.go_on.set()
        return None if isinstance(two, TimedOut) else two

    assert after_it_began(attempt).text == "done"


@pytest.mark.parametrize("kind", ["coroutine", "async_generator"])
@pytest.mark.parametrize("form", ["run", "arun"])
def test_an_async_tool_that_runs_over_is_cancelled(session: Session, kind: str, form: str) -> None:
    call = ToolCall("c", "tool")

    def attempt(seconds: float) -> Patient | None:
        patient = Patient()
        executor = ToolExecutor(session, {"tool": getattr(patient, kind)})

        async def scenario() -> ToolOutcome:
            outcome = await executor.arun(call, timeout=seconds)
            if patient.begun.is_set():
                await asyncio.to_thread(patient.ended.wait, LONG)
            return outcome

        timed_out(
            executor.run(call, timeout=seconds) if form == "run" else asyncio.run(scenario()),
            "call",
        )
        return patient if patient.has_begun() else None

    assert after_it_began(attempt).ended.wait(LONG)


def test_an_async_caller_that_is_cancelled_abandons_its_calls(
    session: Session, store: Store
) -> None:
    patient, begun = Patient(), threading.Event()

    async def tool() -> str:
        begun.set()
        return await patient.coroutine()

    async def scenario() -> None:
        task = asyncio.create_task(ToolExecutor(session, [tool]).arun(ToolCall("c", "tool")))
        await asyncio.to_thread(begun.wait, LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(patient.ended.wait, LONG)

    asyncio.run(scenario())
    assert store.stats().artifacts == 0


# Threads do not pile up


def test_calls_that_do_not_end_make_the_executor_busy_until_they_do(session: Session) -> None:
    patients = [Patient() for _ in range(3)]
    executor = ToolExecutor(
        session,
        {"quick": lambda: "done"} | {f"slow{n}": one.function for n, one in enumerate(patients)},
        max_workers=3,
    )
    for number in range(3):
        assert executor.run(ToolCall("c", "quick")).text == "done"
        timed_out(executor.run(ToolCall("c", f"slow{number}"), timeout=SOON), "call")
    for outcome in (
        executor.run(ToolCall("c", "quick")),
        *executor.run_all([ToolCall("c", "quick")]),
    ):
        assert isinstance(outcome, ToolError)
        assert outcome.code == "busy"
    patients[1].finish()
    assert executor.run(ToolCall("c", "quick")).text == "done"
    for one in patients:
        one.go_on.set()


def test_an_idle_executor_keeps_no_threads(session: Session) -> None:
    before = set(threading.enumerate())
    executor = ToolExecutor(session, {"quick": lambda: "done"})
    executor.run_all([ToolCall("c", "quick")] * 20)
    executor.wait(executor.start(ToolCall("c", "quick")))
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
    assert not set(threading.enumerate()) - before


def test_a_function_without_a_time_limit_runs_in_the_calling_thread(session: Session) -> None:
    seen: list[threading.Thread] = []

    def note() -> None:
        seen.append(threading.current_thread())

    def lines() -> Iterator[str]:
        note()
        yield "a line\n"

    async def later() -> str:
        note()
        return "later"

    executor = ToolExecutor(session, [note, lines, later])
    for one in executor.names:
        executor.run(ToolCall("c", one))
    assert [thread is threading.current_thread() for thread in seen] == [True, False, False]


def test_a_tool_may_start_an_event_loop_wherever_it_is_called_from(session: Session) -> None:
    def tool() -> str:
        asyncio.run(asyncio.sleep(0))
        return "done"

    executor = ToolExecutor(session, [tool])

    async def inside() -> str:
        return executor.run(ToolCall("c", "tool")).text

    assert executor.run(ToolCall("c", "tool")).text == asyncio.run(inside()) == "done"


def test_context_changes_of_a_tool_are_not_seen_by_the_caller(session: Session) -> None:
    var = contextvars.ContextVar("var", default="before")

    def tool() -> Iterator[str]:
        var.set("inside")

        def lines() -> Iterator[str]:
            yield var.get()

        return lines()

    assert ToolExecutor(session, [tool]).run(ToolCall("c", "tool")).text == "inside"
    assert var.get() == "before"


def test_calls_of_many_threads_never_share_a_thread_at_the_same_time(session: Session) -> None:
    busy: set[threading.Thread] = set()
    clashes: list[threading.Thread] = []

    def tool() -> None:
        thread = threading.current_thread()
        if thread in busy:
            clashes.append(thread)
        busy.add(thread)
        busy.remove(thread)

    executor = ToolExecutor(session, [tool])
    callers = [
        threading.Thread(target=lambda: [executor.run(ToolCall("c", "tool")) for _ in range(50)])
        for _ in range(8)
    ]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert clashes == []


def test_a_forked_process_runs_calls_although_the_idle_threads_are_in_its_parent() -> None:
    printed = run_python(
        "import os, coatcheck\n"
        "from coatcheck.executor import ToolCall, ToolExecutor\n"
        "def run():\n"
        "    with coatcheck.open('memory:') as store:\n"
        "        return ToolExecutor(store.session('s'), {'tool': lambda: 'done'}).run(ToolCall('c', 'tool')).text\n"
        "run()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if run() == 'done' else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert printed.split() == ["0"]


@pytest.mark.parametrize("seconds", [0, 10**12, float("inf")])
def test_any_number_of_seconds_is_a_valid_timeout(session: Session, seconds: Any) -> None:
    executor = ToolExecutor(session, {"quick": lambda: "done"})
    outcome = executor.run(ToolCall("c", "quick"), timeout=seconds)
    assert isinstance(outcome, Result if seconds else TimedOut | Result)
    assert len(executor.run_all([ToolCall("c", "quick")], timeout=seconds, deadline=seconds)) == 1
