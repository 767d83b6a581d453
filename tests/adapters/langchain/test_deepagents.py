"""Deep Agents with our backend: files are named artifacts of the thread's session, in sub-agents
too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

import coatcheck
from coatcheck import Store
from coatcheck.adapters.deepagents import Coatcheck
from coatcheck.adapters.langchain import Coatcheck as Middleware
from tests.adapters.langchain.driver import ScriptedChat, saved_bytes
from tests.adapters.suite import ScriptedModel

LOG = "\n".join(
    f"line {n}: worker {n % 7} answered request {n * 7919} in {n % 97} ms" for n in range(5_000)
)
CONFIG: Any = {"configurable": {"thread_id": "thread"}}


def fetch_log() -> str:
    """Fetch the log of the last run."""
    return LOG


@pytest.fixture
def store() -> Iterator[Store]:
    with coatcheck.open("memory:") as store:
        yield store


def run(
    store: Store,
    *script: Any,
    config: Any = CONFIG,
    middleware: Any = (),
    others: Any = (),
    **options: Any,
) -> Any:
    """Run a deep agent with these turns of the model, and those of its sub-agents, and return its
    messages."""
    chat = ScriptedChat(script=ScriptedModel(*script))
    agent = create_deep_agent(
        chat,
        [fetch_log],
        backend=Coatcheck(store),
        middleware=middleware,
        checkpointer=InMemorySaver(),
        **options,
    )
    if not config:
        agent.checkpointer = None
    return agent.invoke({"messages": [("user", "Begin.")]}, config)["messages"]


def tool_texts(messages: Any) -> list[str]:
    return [str(one.text) for one in messages if isinstance(one, ToolMessage)]


def test_a_file_that_the_model_writes_is_a_named_artifact(store: Store) -> None:
    texts = tool_texts(
        run(
            store,
            [
                (
                    "write_file",
                    {"file_path": "/notes/plan.md", "content": "# Plan\n\n1. look\n2. fix\n"},
                )
            ],
            [
                (
                    "edit_file",
                    {"file_path": "/notes/plan.md", "old_string": "look", "new_string": "read"},
                )
            ],
            [("ls", {"path": "/notes"})],
            [("grep", {"pattern": "fix", "path": "/"})],
            [("read_file", {"file_path": "/notes/plan.md"})],
        )
    )
    session = store.session("langgraph:thread")
    assert session.get("/notes/plan.md") == "# Plan\n\n1. read\n2. fix\n"
    assert [session.get(ref) for ref in session.list(name="/notes/plan.md")][
        1
    ] == "# Plan\n\n1. look\n2. fix\n"
    assert "/notes/plan.md" in texts[2]
    assert "/notes/plan.md" in texts[3]
    assert "2. fix" in texts[4]


def test_a_result_that_deep_agents_offloads_is_in_the_store_and_not_in_the_checkpoint(
    store: Store,
) -> None:
    saver = InMemorySaver()
    chat = ScriptedChat(script=ScriptedModel([("fetch_log", {})]))
    agent = create_deep_agent(chat, [fetch_log], backend=Coatcheck(store), checkpointer=saver)
    agent.invoke({"messages": [("user", "Begin.")]}, CONFIG)
    assert store.session("langgraph:thread").get("/large_tool_results/call_1") == LOG
    assert len(saved_bytes(saver)) < len(LOG) / 4
    assert LOG[2_000:3_000].encode() not in saved_bytes(saver)


def test_the_backend_reaches_sub_agents(store: Store) -> None:
    task = {"description": "Fetch the log.", "subagent_type": "general-purpose"}
    texts = tool_texts(
        run(
            store,
            [("task", task)],
            [("fetch_log", {})],  # the turns of the sub-agent
            "The log is in /large_tool_results/call_2 .",
            [
                (
                    "grep",
                    {
                        "pattern": "line 4999:",
                        "path": "/large_tool_results/call_2",
                        "output_mode": "content",
                    },
                )
            ],
        )
    )
    assert "/large_tool_results/call_2" in texts[0]
    assert "line 4999: worker 1" in texts[1]


def test_with_the_middleware_our_stub_replaces_theirs(store: Store) -> None:
    messages = run(
        store,
        [("fetch_log", {})],
        lambda results: [
            (
                "get_artifact",
                {"pointer": json.loads(results[0].text)["artifact"], "grep": "line 4999:"},
            )
        ],
        middleware=[Middleware(store)],
    )
    texts = tool_texts(messages)
    assert json.loads(texts[0])["size_bytes"] == len(LOG)
    assert "line 4999: worker 1" in texts[1]
    assert store.session("langgraph:thread").names(prefix="/large_tool_results") == []


def test_our_tools_read_the_files_of_the_agent_by_name(store: Store) -> None:
    texts = tool_texts(
        run(
            store,
            [("write_file", {"file_path": "/log.txt", "content": LOG})],
            [("get_artifact", {"pointer": "/log.txt", "grep": "line 77:"})],
            middleware=[Middleware(store)],
        )
    )
    assert "line 77: worker 0" in texts[1]


def test_each_thread_has_its_own_files(store: Store) -> None:
    write = [("write_file", {"file_path": "/secret.txt", "content": "4711"})]
    read = [("read_file", {"file_path": "/secret.txt"})]
    run(store, write)
    for config in ({"configurable": {"thread_id": "another"}}, {}):
        assert "not found" in tool_texts(run(store, read, config=config))[0]


def test_each_run_without_a_thread_has_its_own_files(store: Store) -> None:
    write = [("write_file", {"file_path": "/secret.txt", "content": "4711"})]
    read = [("read_file", {"file_path": "/secret.txt"})]
    assert "4711" in tool_texts(run(store, write, read, config={}))[1]
    assert "not found" in tool_texts(run(store, read, config={}))[0]


def test_a_deleted_file_is_gone_with_its_earlier_versions(store: Store) -> None:
    backend = Coatcheck(store)
    backend.write("/a/one.txt", "first")
    backend.write("/a/one.txt", "second")
    backend.write("/ab.txt", "other")
    assert backend.delete("/a").error is None
    assert backend.read("/a/one.txt").error is not None
    assert [one["path"] for one in backend.ls("/").entries or []] == ["/ab.txt"]
    assert "not found" in str(backend.delete("/a").error)


def test_forgetting_a_thread_removes_its_files(store: Store) -> None:
    run(store, [("write_file", {"file_path": "/log.txt", "content": LOG})])
    Coatcheck(store).forget("thread")
    assert store.session("langgraph:thread").get("/log.txt") is None
    assert store.stats().artifacts == 0


def test_a_failing_store_is_reported_as_an_error(store: Store) -> None:
    backend = Coatcheck(store)
    backend.write("/a.txt", "text")
    store.close()
    results: list[Any] = [
        backend.ls("/"),
        backend.read("/a.txt"),
        backend.write("/a.txt", "x"),
        backend.edit("/a.txt", "t", "x"),
        backend.delete("/a.txt"),
        backend.grep("t"),
        backend.glob("*"),
        *backend.upload_files([("/a.txt", b"x")]),
        *backend.download_files(["/a.txt"]),
    ]
    assert all("closed" in str(one.error) for one in results)


def test_binary_files_are_exact(store: Store) -> None:
    backend, data = Coatcheck(store), bytes(range(256)) * 50
    assert asyncio.run(backend.aupload_files([("/image.bin", data)]))[0].error is None
    assert asyncio.run(backend.adownload_files(["/image.bin"]))[0].content == data
    assert (backend.read("/image.bin").file_data or {})["encoding"] == "base64"
