"""Long-running tools: a handle at once, and the outcome when the tool has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coatcheck import Session, Store
from coatcheck.errors import NotFound
from coatcheck.executor import (
    ArtifactReference,
    Result,
    Running,
    TimedOut,
    ToolCall,
    ToolError,
    ToolExecutor,
)
from coatcheck.executor.run import FINISHED
from tests.executor.conftest import LONG, SOON

BIG = "A line of a log that nobody wants in a prompt.\n" * 2_000


class Slow:
    """A tool that ends when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def tool(self) -> str:
        self.go_on.wait(LONG)
        return BIG


def test_a_started_call_keeps_running_and_is_polled_by_its_handle(session: Session) -> None:
    slow = Slow()
    executor = ToolExecutor(session, [slow.tool])
    handle = executor.start(ToolCall("c1", "tool"))
    assert (handle.call_id, handle.name) == ("c1", "tool")
    assert 6 <= len(handle.id) <= 16
    for running in (
        executor.poll(handle),
        executor.poll(handle.id),
        executor.wait(handle, timeout=SOON),
    ):
        assert isinstance(running, Running)
        assert (running.call_id, running.name, running.handle) == ("c1", "tool", handle.id)
        assert handle.id in running.to_model_content()
        assert not running.is_error
    slow.go_on.set()
    outcome = executor.wait(handle)
    assert isinstance(outcome, ArtifactReference)
    assert outcome.ref is not None
    assert session.get(outcome.ref.pointer) == BIG
    assert executor.poll(handle.id) is outcome


def test_a_handle_can_be_awaited(session: Session) -> None:
    slow = Slow()
    executor = ToolExecutor(session, [slow.tool])

    async def scenario() -> None:
        handle = executor.start(ToolCall("c1", "tool"))
        assert isinstance(await executor.await_(handle, timeout=SOON), Running)
        waiting = asyncio.create_task(executor.await_(handle))
        await asyncio.sleep(0)
        slow.go_on.set()
        assert isinstance(await waiting, ArtifactReference)

    asyncio.run(scenario())


def test_a_started_call_times_out_even_if_nobody_polls_it(session: Session, store: Store) -> None:
    slow = Slow()
    executor = ToolExecutor(session, [slow.tool])
    outcome = executor.wait(executor.start(ToolCall("c1", "tool"), timeout=SOON), timeout=LONG)
    assert isinstance(outcome, TimedOut)
    slow.go_on.set()
    assert store.stats().artifacts == 0


def test_a_started_call_can_be_cancelled(session: Session) -> None:
    slow = Slow()
    executor = ToolExecutor(session, [slow.tool])
    handle = executor.start(ToolCall("c1", "tool"))
    executor.cancel(handle)
    outcome = executor.wait(handle, timeout=LONG)
    assert isinstance(outcome, ToolError)
    assert outcome.code == "cancelled"
    executor.cancel(handle)
    assert executor.poll(handle) is outcome
    slow.go_on.set()


def test_an_invalid_call_has_a_handle_too(session: Session) -> None:
    executor = ToolExecutor(session, [Slow().tool])
    outcome = executor.wait(executor.start(ToolCall("c1", "no such tool")))
    assert isinstance(outcome, ToolError)
    assert outcome.code == "unknown_tool"


@pytest.mark.parametrize("handle", ["", "nothing", "x" * 100_000])
def test_an_unknown_handle_is_a_clear_error(session: Session, handle: str) -> None:
    executor = ToolExecutor(session, [Slow().tool])
    for ask in (executor.poll, executor.wait, executor.cancel):
        with pytest.raises(NotFound) as caught:
            ask(handle)
        assert len(str(caught.value)) < 400
    with pytest.raises(NotFound):
        asyncio.run(executor.await_(handle))


def test_the_handle_of_another_executor_is_unknown(session: Session) -> None:
    one, two = (ToolExecutor(session, {"tool": lambda: "done"}) for _ in range(2))
    with pytest.raises(NotFound):
        two.poll(one.start(ToolCall("c", "tool")))


def test_more_started_calls_than_workers_are_answered_as_busy(session: Session) -> None:
    slow = Slow()
    executor = ToolExecutor(session, {"tool": slow.tool, "quick": lambda: "done"}, max_workers=2)
    handles = [executor.start(ToolCall("c", "tool")) for _ in range(2)]
    refused = executor.wait(executor.start(ToolCall("c", "tool")))
    assert isinstance(refused, ToolError)
    assert refused.code == "busy"
    assert executor.run(ToolCall("c", "quick")).text == "done"
    assert executor.run_all([ToolCall("c", "quick")])[0].text == "done"
    slow.go_on.set()
    assert all(isinstance(executor.wait(handle), ArtifactReference) for handle in handles)
    assert isinstance(executor.wait(executor.start(ToolCall("c", "tool"))), ArtifactReference)


def test_the_oldest_outcomes_are_dropped_but_running_calls_never_are(session: Session) -> None:
    slow = Slow()
    executor = ToolExecutor(session, {"slow": slow.tool, "quick": lambda: "done"})
    running = executor.start(ToolCall("c", "slow"))
    handles = []
    for _ in range(FINISHED + 10):
        handles.append(executor.start(ToolCall("c", "quick")))
        assert isinstance(executor.wait(handles[-1]), Result)
    assert isinstance(executor.poll(running), Running)
    known = []
    for handle in handles:
        try:
            executor.poll(handle)
            known.append(handle)
        except NotFound:
            pass
    assert known == handles[-FINISHED:]
    slow.go_on.set()
    assert isinstance(executor.wait(running), ArtifactReference)
