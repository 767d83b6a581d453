"""Slimmed checkpointers of LangGraph: long texts are stored once, and deleted with their thread."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph

import coatcheck
from coatcheck import Store
from coatcheck.adapters import within
from coatcheck.adapters.langgraph import slim
from tests.adapters.langchain.driver import saved_bytes

LOG = "\n".join(
    f"line {n}: worker {n % 7} answered request {n * 7919} in {n % 97} ms" for n in range(5_000)
)
CONFIG: Any = {"configurable": {"thread_id": "thread"}}
STEPS = 8


@pytest.fixture
def store() -> Iterator[Store]:
    with coatcheck.open("memory:") as store:
        yield store


def graph(saver: Any) -> Any:
    """A graph that adds a message in each of eight steps. The first one is long."""

    def step(state: MessagesState) -> dict[str, Any]:
        number = len(state["messages"])
        return {
            "messages": [
                ToolMessage(
                    LOG if number == 1 else f"small {number}", tool_call_id=f"call {number}"
                )
            ]
        }

    made = StateGraph(MessagesState)
    made.add_node("step", step)
    made.add_edge(START, "step")
    made.add_conditional_edges(
        "step", lambda state: END if len(state["messages"]) > STEPS else "step"
    )
    return made.compile(checkpointer=saver)


def begin(saver: Any, config: Any = CONFIG) -> Any:
    return graph(saver).invoke({"messages": [HumanMessage("Begin.", id="first")]}, config)


def texts(state: Any) -> list[str]:
    return [str(one.text) for one in state["messages"]]


def test_a_long_text_is_stored_once_and_every_checkpoint_is_read_back(store: Store) -> None:
    plain, saver = InMemorySaver(), slim(InMemorySaver(), store)
    expected, found = begin(plain), begin(saver)
    assert texts(found) == texts(expected)
    states = [texts(one.values) for one in graph(saver).get_state_history(CONFIG) if one.values]
    assert states == [
        texts(one.values) for one in graph(plain).get_state_history(CONFIG) if one.values
    ]
    assert len(saved_bytes(saver)) < len(saved_bytes(plain)) / 50
    assert [ref.size_bytes for ref in store.session("langgraph-checkpoints:thread").list()] == [
        len(LOG)
    ]


def test_small_values_are_written_as_before(store: Store) -> None:
    plain, saver = InMemorySaver(), slim(InMemorySaver(), store)
    for one in (plain, saver):
        one.put_writes(
            {"configurable": {**CONFIG["configurable"], "checkpoint_id": "1"}},
            [("a", "x" * 500)],
            "task",
        )
    assert plain.writes == saver.writes
    assert [*store.sessions()] == []


def test_earlier_checkpoints_can_be_read(store: Store) -> None:
    plain = InMemorySaver()
    expected = begin(plain)
    assert texts(graph(slim(plain, store)).get_state(CONFIG).values) == texts(expected)


def test_the_original_checkpointer_is_not_changed(store: Store) -> None:
    plain = InMemorySaver()
    slim(plain, store)
    assert type(plain) is InMemorySaver
    assert type(plain.serde) is JsonPlusSerializer


def test_deleting_a_thread_removes_its_texts_and_the_session_of_its_tools(store: Store) -> None:
    saver = slim(InMemorySaver(), store)
    begin(saver)
    begin(saver, {"configurable": {"thread_id": "other"}})
    store.session("langgraph:thread").put("a result of a tool")
    saver.delete_thread("thread")
    assert [one.session_id for one in store.sessions() if store.session(one.session_id).list()] == [
        "langgraph-checkpoints:other"
    ]
    assert texts(graph(saver).get_state({"configurable": {"thread_id": "other"}}).values)[1] == LOG


def test_texts_belong_to_the_thread_even_if_a_tool_is_running(store: Store) -> None:
    with within(store.session("of a tool", ttl=60)):
        begin(slim(InMemorySaver(), store))
    assert store.session("of a tool").list() == []
    assert store.session("langgraph-checkpoints:thread").ttl is None


def test_a_failing_store_leaves_the_text_in_the_checkpoint(store: Store) -> None:
    saver = slim(InMemorySaver(), store)
    store.close()
    assert texts(begin(saver))[1] == LOG
    assert texts(graph(saver).get_state(CONFIG).values)[1] == LOG


def test_an_async_database_is_slimmed_and_survives_a_restart(tmp_path: Path) -> None:
    async def run() -> tuple[list[str], list[str]]:
        with coatcheck.open(tmp_path / "store") as store:
            async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "db")) as saver:
                state = await graph(slim(saver, store)).ainvoke(
                    {"messages": [("user", "Begin.")]}, CONFIG
                )
        with coatcheck.open(tmp_path / "store") as store:
            async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "db")) as saver:
                later = (await graph(slim(saver, store)).aget_state(CONFIG)).values
                await slim(saver, store).adelete_thread("thread")
                assert store.stats().artifacts == 0
        return texts(state), texts(later)

    before, after = asyncio.run(run())
    assert before == after
    assert before[1] == LOG


def test_a_sync_database_is_slimmed(tmp_path: Path, store: Store) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "db")) as saver:
        assert texts(begin(slim(saver, store)))[1] == LOG
    assert LOG[5_000:6_000].encode() not in (tmp_path / "db").read_bytes()


class Copying(InMemorySaver):
    """A checkpointer that can copy a thread and prune one."""

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.storage[target_thread_id] = self.storage[source_thread_id]
        for (thread, *rest), value in [*self.blobs.items()]:
            if thread == source_thread_id:
                self.blobs[target_thread_id, *rest] = value

    def prune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        for thread in thread_ids if strategy == "delete" else ():
            InMemorySaver.delete_thread(self, thread)


def test_a_copy_of_a_thread_outlives_the_first_one(store: Store) -> None:
    saver = slim(Copying(), store)
    begin(saver)
    saver.copy_thread("thread", "copy")
    saver.delete_thread("thread")
    assert texts(graph(saver).get_state({"configurable": {"thread_id": "copy"}}).values)[1] == LOG


@pytest.mark.parametrize(("strategy", "left"), [("keep_latest", 1), ("delete", 0)])
def test_pruning_a_whole_thread_removes_its_texts(store: Store, strategy: str, left: int) -> None:
    saver = slim(Copying(), store)
    begin(saver)
    saver.prune(["thread"], strategy=strategy)
    assert store.stats().artifacts == left


def test_a_slimmed_checkpointer_can_do_no_more_than_the_original(store: Store) -> None:
    with pytest.raises(NotImplementedError):
        slim(InMemorySaver(), store).copy_thread("thread", "copy")


def test_an_allow_list_is_passed_on_and_texts_are_still_externalized(store: Store) -> None:
    saver = slim(InMemorySaver(), store).with_allowlist([("builtins", "dict")])
    begin(saver)
    assert store.session("langgraph-checkpoints:thread").list() != []


VALUES = st.recursive(
    st.none()
    | st.integers(-(2**60), 2**60)
    | st.text()
    | st.binary(max_size=200)
    | st.text(min_size=20, max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=40), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_is_read_back_unchanged(value: Any) -> None:
    with coatcheck.open("memory:") as store:
        saver = slim(InMemorySaver(), store, min_bytes=16)
        config: Any = {
            "configurable": {"thread_id": "thread", "checkpoint_ns": "", "checkpoint_id": "1"}
        }
        saver.put_writes(config, [("channel", value)], "task")
        (written,) = [each[2] for one in saver.writes.values() for each in one.values()]
        assert saver.serde.loads_typed(written) == value


class _State(TypedDict):
    parts: Annotated[list[str], operator.add]


def test_texts_in_any_state_are_externalized_not_only_messages(store: Store) -> None:
    made = StateGraph(_State)
    made.add_node("read", lambda _: {"parts": [LOG]})
    made.add_edge(START, "read")
    saver = slim(InMemorySaver(), store)
    made.compile(checkpointer=saver).invoke({"parts": []}, CONFIG)
    assert LOG[5_000:6_000].encode() not in saved_bytes(saver)
