"""What the plugin and the storage for Strands do beyond the adapter suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, ToolContext, tool
from strands.hooks import AfterToolCallEvent
from strands.models import Model
from strands.session import SnapshotSessionManager
from strands.types.exceptions import StorageError
from strands.vended_plugins.context_offloader import ContextOffloader

import coatcheck
from coatcheck import Store
from coatcheck.adapters import current_session
from coatcheck.adapters.strands import STATE_KEY, Coatcheck, CoatcheckStorage
from tests.adapters.pages import figures_of, run_example, run_page
from tests.adapters.suite import LOG


class Scripted(Model):
    """A model that makes the calls of a script, then says "Done."."""

    def __init__(self, *script: tuple[str, dict[str, Any]]) -> None:
        self.script = list(script)

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        start: dict[str, Any] = {}
        delta: dict[str, Any] = {"text": "Done."}
        reason = "end_turn"
        if self.script:
            name, given = self.script.pop(0)
            start = {"toolUse": {"name": name, "toolUseId": f"call_{len(self.script)}"}}
            delta, reason = {"toolUse": {"input": json.dumps(given)}}, "tool_use"
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": start}}
        yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": reason}}


@tool
def fetch_log() -> str:
    """Fetch the log of the last run."""
    return LOG


def agent_of(model: Model, *plugins: Any, **options: Any) -> Agent:
    return Agent(
        model=model,
        plugins=list(plugins),
        callback_handler=None,
        **{"tools": [fetch_log], **options},
    )


def texts_of(agent: Agent) -> list[str]:
    """The texts of the results in the history."""
    blocks = [
        block["toolResult"]
        for message in agent.messages
        for block in message["content"]
        if "toolResult" in block
    ]
    return [one.get("text", "") for block in blocks for one in block["content"]]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def test_an_agent_inside_a_tool_of_another_store_has_one_session_of_its_own(store: Store) -> None:
    """The agent around it is slimmed too, but into another store."""
    inner = agent_of(Scripted(("fetch_log", {}), ("list_artifacts", {})), Coatcheck(store))

    @tool
    def ask() -> str:
        """Ask another agent."""
        return str(inner("Begin."))

    with coatcheck.open("memory:") as outer_store:
        agent_of(Scripted(("ask", {})), Coatcheck(outer_store), tools=[ask])("Begin.")
    assert "artifacts 1-1" in texts_of(inner)[1]


@pytest.mark.parametrize("is_first", [True, False])
def test_other_hooks_see_the_whole_result_whatever_the_order(store: Store, is_first: bool) -> None:
    seen: list[str] = []

    def listen(event: AfterToolCallEvent) -> None:
        seen.append(event.result["content"][0]["text"])

    agent = agent_of(Scripted(("fetch_log", {})), *([Coatcheck(store)] if is_first else []))
    agent.add_hook(listen, AfterToolCallEvent)
    if not is_first:
        Coatcheck(store).init_agent(agent)
    agent("Begin.")
    assert seen == [LOG]
    assert texts_of(agent)[0].startswith('{"stub"')


@pytest.mark.parametrize("is_first", [True, False])
def test_the_offloader_of_strands_has_nothing_left_to_do_whatever_the_order(
    store: Store, is_first: bool
) -> None:
    plugins = [Coatcheck(store), ContextOffloader()]
    agent = agent_of(Scripted(("fetch_log", {})), *(plugins if is_first else reversed(plugins)))
    agent("Begin.")
    assert texts_of(agent)[0].startswith('{"stub"')


def test_the_answer_of_a_delegate_is_whole(store: Store) -> None:
    class Long(Scripted):
        async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            yield {"messageStart": {"role": "assistant"}}
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": LOG}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn"}}

    other = agent_of(Long(), tools=[]).as_tool(name="writer", delegate=True)
    agent = agent_of(Scripted(("writer", {"input": "Write."})), Coatcheck(store), tools=[other])
    assert str(agent("Begin.")).strip() == LOG


def test_the_invocation_state_names_the_conversation(store: Store) -> None:
    pointers = []
    for name in ("one", "one", "two"):
        agent = agent_of(Scripted(("fetch_log", {})), Coatcheck(store))
        agent("Begin.", invocation_state={STATE_KEY: name})
        pointers.append(texts_of(agent)[0])
    assert len(set(pointers)) == 1
    assert {one.session_id for one in store.sessions()} >= {"strands:one", "strands:two"}


def test_an_agent_object_keeps_its_session_and_another_has_its_own(store: Store) -> None:
    plugin = Coatcheck(store)
    first, second = (agent_of(Scripted(), plugin) for _ in range(2))
    found = [asyncio.run(plugin.session(one, {})).session_id for one in (first, first, second)]
    assert found[0] == found[1] != found[2]


def test_a_host_that_reads_the_stream_is_not_inside_the_session(store: Store) -> None:
    @tool
    async def slow(name: str) -> AsyncIterator[str]:
        """Report progress."""
        for step in range(3):
            yield f"step {step}: {current_session() is not None}"

    async def play() -> list[tuple[str, bool]]:
        agent = agent_of(Scripted(("slow", {"name": "x"})), Coatcheck(store), tools=[slow])
        return [
            (str(event["tool_stream_event"]["data"]), current_session() is not None)
            async for event in agent.stream_async("Begin.")
            if "tool_stream_event" in event
        ]

    found = asyncio.run(play())
    assert found[0] == ("step 0: True", False)
    assert all(not inside for _, inside in found)


def test_a_tool_gets_the_context_of_strands_beside_a_resolved_argument(store: Store) -> None:
    seen: list[Any] = []

    @tool(context=True)
    def count(text: str, tool_context: ToolContext) -> str:
        """Count the lines of a text."""
        seen.append((len(text), tool_context.tool_use["name"]))
        return "counted"

    session = store.session("chosen")
    ref = session.put(LOG)
    agent = agent_of(Scripted(("count", {"text": ref.pointer})), Coatcheck(session), tools=[count])
    agent("Begin.")
    assert seen == [(len(LOG), "count")]


# The storage


def test_a_write_replaces_the_old_value_completely(store: Store) -> None:
    async def play() -> None:
        storage = CoatcheckStorage(store)
        for number in range(5):
            await storage.write("a/b@1", f"value {number}".encode())
            assert await storage.read("a/b@1") == f"value {number}".encode()
        await storage.write("a/b", b"other")
        assert await storage.list("a/") == ["a/b", "a/b@1"]
        await storage.delete("a/b@1")
        assert await storage.read("a/b@1") is None
        assert await storage.list() == ["a/b"]

    asyncio.run(play())
    assert store.stats().artifacts == 1


def test_equal_content_is_stored_once_and_deleted_by_key(store: Store) -> None:
    async def play() -> None:
        storage = CoatcheckStorage(store)
        await storage.write("one", LOG.encode())
        await storage.write("two", LOG.encode())
        assert store.stats().artifacts == 1
        await storage.delete("one")
        assert await storage.read("two") == LOG.encode()

    asyncio.run(play())


def test_a_namespace_sees_only_its_own_keys(store: Store) -> None:
    async def play() -> None:
        storage = CoatcheckStorage(store)
        scoped = storage.namespace("memory").namespace("agent/")
        await storage.write("other/memory-agent.md", b"unrelated")
        await scoped.write("deploy.md", b"blue green deploys")
        assert await scoped.list() == ["deploy.md"]
        assert await storage.list("memory/") == ["memory/agent/deploy.md"]
        assert [one.key for one in await scoped.search("memory agent deploy")] == ["deploy.md"]

    asyncio.run(play())


def test_a_search_finds_words_and_a_bad_key_is_a_storage_error(store: Store) -> None:
    async def play() -> Any:
        storage = CoatcheckStorage(store)
        await storage.write("dark-mode.md", b"enable dark mode in settings")
        await storage.write("deploy.md", b"deploy to production")
        for key in ("", "../x", "a\\b"):
            with pytest.raises(StorageError):
                await storage.write(key, b"")
        return await storage.search("dark mode")

    assert [one.key for one in asyncio.run(play())] == ["dark-mode.md"]


def test_a_session_manager_keeps_its_snapshots_in_the_store(store: Store) -> None:
    for prompts in (1, 2):
        manager = SnapshotSessionManager(session_id="monday", storage=CoatcheckStorage(store))
        agent = agent_of(Scripted(), Coatcheck(store), session_manager=manager)
        agent("Begin.")
        assert len(agent.messages) == 2 * prompts


# The page and the example


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("strands.md", tmp_path)


def test_the_example_shows_how_much_smaller_the_request_is() -> None:
    without, with_it = figures_of(run_example("strands_agent"))
    assert with_it * 50 < without
