"""Conversations without a name: a run finds what earlier runs have stored by its history, and
nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, FunctionTool, RunConfig, Runner, RunState, SQLiteSession, function_tool

import coatcheck
from coatcheck import Store
from coatcheck.adapters.openai_agents import slim
from tests.adapters.openai_agents.drivers import failure_text, model_of
from tests.adapters.suite import (
    LOG,
    ROWS,
    SeenResult,
    Step,
    fail_at_length,
    fetch_log,
    fetch_rows,
    greet,
    pointer_in,
)
from tests.adapters.suite import ScriptedModel as Script

QUIET = RunConfig(tracing_disabled=True)


def count_lines(text: str) -> str:
    """Count the lines of a text."""
    return f"{len(text.splitlines())} lines"


def fetch(results: Sequence[SeenResult]) -> list[Any]:
    return [("fetch_log", {})]


def read_first(results: Sequence[SeenResult]) -> list[Any]:
    return [("get_artifact", {"pointer": pointer_in(results[0].text), "grep": "ERROR"})]


def count_first(results: Sequence[SeenResult]) -> list[Any]:
    return [("count_lines", {"text": pointer_in(results[0].text)})]


class Conversation:
    """Runs that continue one another. Each is a process of its own: it opens the store, and makes
    the agent."""

    def __init__(self, folder: Path, *tools: Any) -> None:
        self.folder = folder
        self.tools = tools or (fetch_log, fetch_rows, count_lines)
        self.history: list[Any] = []
        self._turn = 0

    def agent(self, script: Script, store: Store) -> Agent[Any]:
        tools = [one if isinstance(one, FunctionTool) else function_tool(one) for one in self.tools]
        return slim(Agent(name="main", model=model_of(script), tools=[*tools]), store)

    def script(self, *steps: Step) -> Script:
        self._turn += 1
        return Script(*steps, ids=f"turn{self._turn}")

    def say(self, text: str, *steps: Step, config: RunConfig = QUIET) -> list[SeenResult]:
        """Run the agent with all that was said before, and return what its model has seen."""
        script = self.script(*steps)
        with coatcheck.open(self.folder) as store:
            given = [*self.history, {"role": "user", "content": text}]
            result = Runner.run_sync(self.agent(script, store), given, run_config=config)
        self.history = result.to_input_list()
        return script.results


@pytest.fixture
def conversation(tmp_path: Path) -> Conversation:
    return Conversation(tmp_path / "store")


@pytest.fixture
def other(conversation: Conversation) -> Conversation:
    """Another conversation in the same store, with the same ids of calls."""
    return Conversation(conversation.folder)


def is_closed(results: Sequence[SeenResult]) -> bool:
    return "4711" not in results[-1].text and "no artifact found" in results[-1].text


# What is found again


def test_pointers_of_earlier_runs_open_with_their_history_as_input(
    conversation: Conversation,
) -> None:
    conversation.say("Fetch the log.", fetch)
    assert "3520 lines" in conversation.say("Count it.", count_first)[-1].text
    conversation.say("And the rows.", [("fetch_rows", {})])
    results = conversation.say("Read both.", read_first, [("list_artifacts", {})])
    assert "code 4711" in results[-2].text
    assert results[-1].text.count("art:") == 2


def test_pointers_of_earlier_runs_open_with_a_session_of_the_sdk(
    conversation: Conversation, tmp_path: Path
) -> None:
    def say(text: str, *steps: Step) -> list[SeenResult]:
        script, memory = (
            conversation.script(*steps),
            SQLiteSession("ticket", tmp_path / "sessions.db"),
        )
        with coatcheck.open(conversation.folder) as store:
            Runner.run_sync(
                conversation.agent(script, store), text, session=memory, run_config=QUIET
            )
        memory.close()
        return script.results

    say("Fetch the log.", fetch)
    assert "3520 lines" in say("Count it.", count_first)[-1].text
    assert "code 4711" in say("Read it.", read_first)[-1].text


def test_pointers_of_a_streamed_run_open_in_the_next_one(conversation: Conversation) -> None:
    async def streamed(store: Store) -> list[Any]:
        result = Runner.run_streamed(
            conversation.agent(Script(fetch), store), "Fetch the log.", run_config=QUIET
        )
        async for _ in result.stream_events():
            pass
        history: list[Any] = result.to_input_list()
        return history

    with coatcheck.open(conversation.folder) as store:
        conversation.history = asyncio.run(streamed(store))
    conversation.script()
    assert "code 4711" in conversation.say("Read it.", read_first)[-1].text


def approved(conversation: Conversation, script: Script) -> None:
    """Run the agent until it asks for an approval, save the run, and continue it in another
    process."""
    with coatcheck.open(conversation.folder) as store:
        result = Runner.run_sync(conversation.agent(script, store), "Begin.", run_config=QUIET)
        saved = result.to_state().to_string()
    with coatcheck.open(conversation.folder) as store:
        agent = conversation.agent(script, store)
        state = asyncio.run(RunState.from_string(agent, saved))
        for one in state.get_interruptions():
            state.approve(one)
        Runner.run_sync(agent, state, run_config=QUIET)


def test_a_saved_run_continues_with_its_pointers_in_another_process(
    conversation: Conversation,
) -> None:
    def read_rows(results: Sequence[SeenResult]) -> list[Any]:
        return [("get_artifact", {"pointer": pointer_in(results[1].text) + "#/7/name"})]

    conversation.tools = (fetch_log, fetch_rows, function_tool(count_lines, needs_approval=True))
    script = Script(fetch, [("fetch_rows", {})], count_first, read_rows)
    approved(conversation, script)
    assert "3520 lines" in script.results[2].text
    assert "customer 7" in script.results[3].text


def test_a_run_that_was_saved_before_a_nested_approval_continues_with_its_pointers(
    conversation: Conversation,
) -> None:
    asked = function_tool(count_lines, needs_approval=True)
    inner, outer = (
        Script(fetch, count_first, ids="inner"),
        Script([("worker", {"input": "Count it."})]),
    )
    worker = Agent(name="worker", model=model_of(inner), tools=[function_tool(fetch_log), asked])
    main = Agent(name="main", model=model_of(outer), tools=[worker.as_tool("worker", "A worker.")])
    with coatcheck.open(conversation.folder) as store:
        saved = (
            Runner.run_sync(slim(main, store), "Begin.", run_config=QUIET).to_state().to_string()
        )
    with coatcheck.open(conversation.folder) as store:
        agent = slim(main, store)
        state = asyncio.run(RunState.from_string(agent, saved))
        for one in state.get_interruptions():
            state.approve(one)
        Runner.run_sync(agent, state, run_config=QUIET)
    assert "3520 lines" in inner.results[-1].text


def test_what_a_model_has_stored_and_long_errors_are_found_again(
    conversation: Conversation,
) -> None:
    failing = function_tool(fail_at_length, failure_error_function=failure_text)
    conversation.tools = (failing,)
    note = {"name": "note", "value": "remember the milk"}
    conversation.say("Begin.", [("store_artifact", note)], [("fail_at_length", {"name": "Ada"})])

    def read_error(results: Sequence[SeenResult]) -> list[Any]:
        return [("get_artifact", {"pointer": pointer_in(results[1].text), "grep": "field 1799"})]

    results = conversation.say("Read both.", [("get_artifact", {"pointer": "note"})], read_error)
    assert "remember the milk" in results[2].text
    assert "value 30583 is invalid" in results[3].text


def test_what_an_agent_behind_a_hand_off_has_stored_is_found_again(
    conversation: Conversation,
) -> None:
    other = Agent(
        name="other", model=model_of(Script(fetch, ids="other")), tools=[function_tool(fetch_log)]
    )
    first = Agent(
        name="main",
        model=model_of(Script([("transfer_to_other", {})], ids="first")),
        handoffs=[other],
    )
    with coatcheck.open(conversation.folder) as store:
        result = Runner.run_sync(slim(first, store), "Begin.", run_config=QUIET)
    conversation.history = result.to_input_list()

    def read_last(results: Sequence[SeenResult]) -> list[Any]:
        return [("get_artifact", {"pointer": pointer_in(results[-1].text), "grep": "ERROR"})]

    assert "code 4711" in conversation.say("Read it.", read_last)[-1].text


def test_a_pointer_opens_after_a_tool_has_named_it_too(conversation: Conversation) -> None:
    stub = conversation.say("Fetch the log.", fetch)[0].text

    def hint() -> str:
        """Give a hint."""
        return f"look at {pointer_in(stub)}"

    conversation.tools = (hint,)
    assert "code 4711" in conversation.say("Read it.", [("hint", {})], read_first)[-1].text


# What is not found


def test_a_pointer_or_a_stub_in_a_message_opens_nothing(
    conversation: Conversation, other: Conversation
) -> None:
    stub = conversation.say("Fetch the log.", fetch)[0].text
    pointer = pointer_in(stub)
    read: Step = [("get_artifact", {"pointer": pointer, "grep": "ERROR"})]
    assert is_closed(other.say(f"Read {pointer}. You know it: {stub}", read))
    assert "was not called" in other.say("Count it.", [("count_lines", {"text": pointer})])[-1].text


@pytest.mark.parametrize(
    "change", ["another message", "another call id", "another tool", "another output"]
)
def test_a_history_that_is_not_the_same_opens_nothing(
    conversation: Conversation, other: Conversation, change: str
) -> None:
    conversation.say("Fetch the log.", fetch)
    message, call, output, *rest = conversation.history
    if change == "another message":
        message = {**message, "content": "Fetch the log!"}
    elif change == "another call id":
        call, output = {**call, "call_id": "call_17"}, {**output, "call_id": "call_17"}
    elif change == "another tool":
        call = {**call, "name": "fetch_rows"}
    else:
        output = {**output, "output": output["output"] + " "}
    other.history = [message, call, output, *rest]
    other.script()
    assert is_closed(other.say("Read it.", read_first))


def test_a_tool_that_returns_the_stub_of_another_conversation_opens_nothing(
    conversation: Conversation, other: Conversation
) -> None:
    """The other conversation has the same messages and ids, and someone who knows the stub controls
    its tool."""
    stub = conversation.say("Fetch the log.", fetch)[0].text

    def fetch_log() -> str:
        """Fetch the log of the last run."""
        return stub

    other.tools = (fetch_log, count_lines)
    assert other.say("Fetch the log.", fetch)[0].text == stub
    assert is_closed(other.say("Read it.", read_first))


def test_a_tool_that_names_the_pointer_first_and_then_returns_the_stub_opens_nothing(
    conversation: Conversation, other: Conversation
) -> None:
    def hint() -> str:
        """Give a hint."""
        return hints.pop()

    hints = ["art:000000000000"]
    conversation.tools = (hint, fetch_log)
    stub = conversation.say("Fetch the log.", [("hint", {})], fetch)[1].text

    def forged_log() -> str:
        """Fetch the log of the last run."""
        return stub

    hints = [pointer_in(stub)]
    other.tools = (hint, function_tool(forged_log, name_override="fetch_log"))
    assert other.say("Fetch the log.", [("hint", {})], fetch)[1].text == stub

    def read_second(results: Sequence[SeenResult]) -> list[Any]:
        return [("get_artifact", {"pointer": pointer_in(results[1].text), "grep": "ERROR"})]

    assert is_closed(other.say("Read it.", read_second))


@pytest.mark.parametrize("before", [[[("greet", {"name": "Ada"})]], []])
def test_a_saved_call_with_the_pointer_of_another_conversation_opens_nothing(
    conversation: Conversation, other: Conversation, before: list[Step]
) -> None:
    """The other conversation has the same message, and its model makes the same call with the same
    id."""
    asked = function_tool(count_lines, needs_approval=True)
    conversation.tools = other.tools = (fetch_log, greet, asked)
    script = Script(fetch, count_first)
    approved(conversation, script)
    assert "3520 lines" in script.results[1].text
    count: Any = ("count_lines", {"text": pointer_in(script.results[0].text)})
    steps = [*before, [count]] if before else [[("greet", {"name": "Ada"}), count]]
    script = Script(*steps)
    approved(other, script)
    assert script.results[1].id == "call_2"
    assert "was not called" in script.results[1].text


def test_equal_conversations_do_not_share_what_comes_later(
    conversation: Conversation, other: Conversation
) -> None:
    for one in (conversation, other):
        one.say("Fetch the log.", fetch)
    conversation.say("And the rows.", [("fetch_rows", {})])
    results = other.say("What is there?", [("list_artifacts", {})], read_first)
    assert results[-2].text.count("art:") == 1
    assert "code 4711" in results[-1].text


def test_a_branch_of_a_conversation_does_not_see_the_other_branch(
    conversation: Conversation, other: Conversation
) -> None:
    conversation.say("Fetch the log.", fetch)
    other.history = [*conversation.history]
    other.script()
    conversation.say("And the rows.", [("fetch_rows", {})])
    results = other.say("What is there?", [("list_artifacts", {})], read_first)
    assert results[-2].text.count("art:") == 1
    assert "code 4711" in results[-1].text


def test_a_history_does_not_open_what_a_named_conversation_has_stored(
    conversation: Conversation,
) -> None:
    named = RunConfig(group_id="of ada", tracing_disabled=True)
    conversation.say("Fetch the log.", fetch, config=named)
    assert is_closed(conversation.say("Read it.", read_first))
    assert "code 4711" in conversation.say("Read it.", read_first, config=named)[-1].text


def test_a_history_does_not_open_what_another_store_has(
    conversation: Conversation, tmp_path: Path
) -> None:
    conversation.say("Fetch the log.", fetch)
    conversation.folder = tmp_path / "another store"
    assert is_closed(conversation.say("Read it.", read_first))


def test_what_was_forgotten_is_not_found_again(conversation: Conversation) -> None:
    conversation.say("Fetch the log.", fetch)
    with coatcheck.open(conversation.folder) as store:
        for info in [*store.sessions()]:
            if info.session_id.startswith("private:"):
                assert store.session(info.session_id).end() == 1
    assert is_closed(conversation.say("Read it.", read_first))


def test_a_store_that_fails_in_a_later_run_does_not_end_it(conversation: Conversation) -> None:
    conversation.say("Fetch the log.", fetch)
    script = conversation.script(read_first, count_first)
    with coatcheck.open(conversation.folder) as store:
        agent = conversation.agent(script, store)
    given = [*conversation.history, {"role": "user", "content": "Read it."}]
    assert Runner.run_sync(agent, given, run_config=QUIET).final_output == "Done."
    assert "get_artifact failed" in script.results[1].text
    assert "was not called" in script.results[2].text


def test_the_values_are_the_same_in_every_run(conversation: Conversation) -> None:
    conversation.say("Fetch both.", fetch, [("fetch_rows", {})])
    received: list[Any] = []

    def keep(text: str, rows: list[dict[str, Any]]) -> str:
        """Keep a text and rows."""
        received.append((text, rows))
        return "kept"

    conversation.tools = (function_tool(keep, strict_mode=False),)
    conversation.say(
        "Keep both.",
        lambda results: [
            ("keep", {"text": pointer_in(results[0].text), "rows": pointer_in(results[1].text)})
        ],
    )
    assert received == [(LOG, ROWS)]
