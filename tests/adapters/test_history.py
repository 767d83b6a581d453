"""What the history of a conversation without an id proves: what is noted of private sessions, and
when it counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import coatcheck
from coatcheck import Session, Store
from coatcheck.adapters import Adapter
from coatcheck.adapters._history import HistoryItem, PastCall, note, past_calls, recall, turn_of

KEY = b"the key of a store"
TTL = 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    with coatcheck.open("memory:", clock=clock, grace=0) as store:
        yield store


@pytest.fixture
def adapter(store: Store) -> Adapter:
    return Adapter(store, host="test", ttl=TTL)


def noted(adapter: Adapter, content: str = "the content") -> tuple[Session, PastCall]:
    """A call of an earlier run, whose output names an artifact of its session."""
    session = adapter.session(None)
    pointer = session.put(content).pointer
    call = PastCall(
        turn="1", call_id="call_1", name="fetch", arguments="{}", output=f"see {pointer}"
    )
    note(adapter, session.session_id, call)
    return session, call


def recalled(adapter: Adapter, call: PastCall) -> list[str]:
    """What a new run has been granted because of this call."""
    session = adapter.session(None)
    recall(adapter, session, call)
    return [session.get(ref) for ref in session.list()]


def test_a_call_that_was_noted_proves_its_artifact(adapter: Adapter) -> None:
    _, call = noted(adapter)
    assert recalled(adapter, call) == ["the content"]
    assert recalled(adapter, replace(call, turn="2")) == []
    assert recalled(adapter, replace(call, output=f"{call.output}.")) == []


def test_a_call_that_waits_proves_what_its_arguments_name(adapter: Adapter) -> None:
    session = adapter.session(None)
    call = PastCall("1", "call_1", "count", arguments=f'{{"text": "{session.put("x").pointer}"}}')
    assert recalled(adapter, call) == []
    note(adapter, session.session_id, call)
    assert recalled(adapter, call) == ["x"]


def test_an_equal_call_of_a_session_without_the_artifact_makes_it_prove_nothing(
    adapter: Adapter,
) -> None:
    _, call = noted(adapter)
    note(adapter, adapter.session(None).session_id, call)
    assert recalled(adapter, call) == []


def test_equal_calls_of_sessions_that_all_have_the_artifact_prove_it(adapter: Adapter) -> None:
    for _ in range(16):
        _, call = noted(adapter)
    assert recalled(adapter, call) == ["the content"]
    noted(adapter)
    assert recalled(adapter, call) == []


def test_what_is_recalled_lives_on_in_the_session_of_the_earlier_run(
    adapter: Adapter, clock: Clock
) -> None:
    _, call = noted(adapter)
    for _ in range(3):
        clock.now += TTL - 1
        assert recalled(adapter, call) == ["the content"]
        noted(adapter, "another content")  # the conversation continues
    clock.now += TTL + 1
    assert recalled(adapter, call) == []


def test_only_what_the_call_names_is_recalled(adapter: Adapter) -> None:
    session, call = noted(adapter)
    session.put("something else")
    assert recalled(adapter, call) == ["the content"]


def test_a_turn_is_known_by_everything_up_to_the_last_message_that_is_not_the_models() -> None:
    hello = HistoryItem("message", "user", text="hello")
    call = HistoryItem("call", "fetch", "call_1", "{}")
    output = HistoryItem("output", "", "call_1", "the output")
    answer = HistoryItem("message", "assistant", text="done")
    again = HistoryItem("message", "user", text="again")
    first = turn_of(KEY, [hello])
    assert turn_of(KEY, [hello, call, output, answer]) == first
    assert (
        turn_of(KEY, [hello, call, output, answer, again])
        != turn_of(KEY, [hello, call, output, again])
        != first
    )
    assert turn_of(b"another key", [hello]) != first
    assert turn_of(KEY, [answer]) == turn_of(KEY, []) == ""
    assert [*past_calls(KEY, [hello, call, output, answer, again])] == [
        PastCall(first, "call_1", "fetch", "{}", "the output")
    ]


def test_an_output_without_its_call_proves_nothing() -> None:
    output = HistoryItem("output", "", "call_1", "the output")
    assert [*past_calls(KEY, [HistoryItem("message", "user", text="hello"), output])] == []
