"""What is special about the OpenAI Agents SDK: copies, MCP servers, hand-offs, strict schemas,
approvals."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    FunctionTool,
    Handoff,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunState,
    ToolOutputText,
    function_tool,
    handoff,
)
from agents.mcp import MCPServerStdio
from agents.strict_schema import ensure_strict_json_schema
from openai import AsyncOpenAI
from pydantic import BaseModel

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters import within
from coatcheck.adapters.openai_agents import _Watching, slim
from examples.openai_agents_agent import WITH, count_lines, read_log
from examples.standins import StandIn
from tests.adapters.openai_agents.drivers import model_of
from tests.adapters.pages import run_example, run_page
from tests.adapters.suite import (
    LOG,
    ROWS,
    NestedOrder,
    Step,
    fetch_log,
    fetch_rows,
    pointer_in,
)
from tests.adapters.suite import ScriptedModel as Script
from tests.environments import ROOT

SERVER = Path(__file__).parents[1] / "log_server.py"
QUIET = RunConfig(tracing_disabled=True)


class Report(BaseModel):
    text: str


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def agent_of(script: Script, *tools: Any, **options: Any) -> Agent:
    wrapped = [tool if isinstance(tool, FunctionTool) else function_tool(tool) for tool in tools]
    return Agent(name="main", model=model_of(script), tools=wrapped, **options)


def read(script_results: Any, which: int = 0) -> list[Any]:
    return [("get_artifact", {"pointer": pointer_in(script_results[which].text), "grep": "ERROR"})]


def test_nothing_that_is_passed_in_is_changed(store: Store) -> None:
    sub = agent_of(Script(), fetch_rows)
    target = agent_of(Script(), fetch_log)
    hand_off = handoff(agent_of(Script(), fetch_rows), tool_name_override="go_elsewhere")
    agent = agent_of(
        Script(), fetch_log, sub.as_tool("sub", "A sub-agent."), handoffs=[target, hand_off]
    )
    theirs = [agent, sub, target, hand_off, *agent.tools, *sub.tools, *target.tools]
    before = [copy.copy(vars(one)) for one in theirs]
    lists = [[*one.tools, *one.handoffs] for one in (agent, sub, target)]
    assert slim(agent, store) is not agent
    assert [vars(one) for one in theirs] == before
    assert [[*one.tools, *one.handoffs] for one in (agent, sub, target)] == lists


def test_the_copy_reads_back_what_it_has_stored(store: Store) -> None:
    script = Script([("fetch_log", {})], lambda results: read(results))
    agent = slim(agent_of(script, fetch_log), store)
    assert [tool.name for tool in agent.tools] == [
        "fetch_log",
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert script.results[0].text.count('"stub"') == 1
    assert "code 4711" in script.results[1].text


def test_the_last_call_of_slim_counts(store: Store) -> None:
    script = Script([("fetch_log", {})], lambda results: read(results))
    agent = slim(
        agent_of(script, fetch_log), store.session("everyone"), policy=Policy(max_chars=200)
    )
    agent = slim(slim(agent, store.session("ada")), store.session("bob"))
    assert [tool.name for tool in agent.tools] == [
        "fetch_log",
        "get_artifact",
        "list_artifacts",
        "store_artifact",
    ]
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert "code 4711" in script.results[1].text
    assert [len(store.session(user).list()) for user in ("everyone", "ada", "bob")] == [0, 0, 1]


def test_a_tool_of_a_slimmed_agent_passes_results_on_in_another_agent(store: Store) -> None:
    script = Script([("fetch_log", {})])
    agent = slim(agent_of(Script(), fetch_log), store)
    other = Agent(name="other", model=model_of(script), tools=[copy.copy(agent.tools[0])])
    Runner.run_sync(other, "Begin.", run_config=QUIET)
    assert script.results[0].text == LOG


def test_a_clone_of_a_slimmed_agent_is_slimmed(store: Store) -> None:
    script = Script([("fetch_log", {})], lambda results: read(results))
    agent = slim(agent_of(script, fetch_log), store).clone(instructions="Be brief.")
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert "code 4711" in script.results[1].text


def test_a_slimmed_agent_can_be_copied_deeply(store: Store) -> None:
    script = Script([("fetch_log", {})], lambda results: read(results))
    agent = slim(agent_of(script, fetch_log), store)
    result = Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert len(copy.deepcopy(agent).tools) == 4
    assert len(copy.deepcopy(result.new_items)) == 5


def test_a_tool_that_is_made_by_hand_is_wrapped(store: Store) -> None:
    async def invoke(ctx: Any, given: str) -> Any:
        return ROWS

    schema = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    script = Script([("rows", {})])
    agent = slim(agent_of(script, FunctionTool("rows", "Return rows.", schema, invoke)), store)
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    found = store.find(pointer_in(script.results[0].text))
    assert found is not None
    assert found[0].get(pointer_in(script.results[0].text)) == ROWS


@pytest.mark.parametrize("clash", [False, True])
def test_the_tools_of_an_mcp_server_are_covered(store: Store, tmp_path: Path, clash: bool) -> None:
    (tmp_path / "log").write_text(LOG)
    name = "coatcheck_get_artifact" if clash else "get_artifact"
    script = Script(
        [("read_log", {})],
        lambda results: [("count_words", {"text": pointer_in(results[0].text)})],
        lambda results: [(name, {"pointer": pointer_in(results[0].text), "grep": "ERROR"})],
    )

    async def run() -> None:
        arguments = [str(SERVER), str(tmp_path / "log"), *(["clash"] if clash else [])]
        params: Any = {"command": sys.executable, "args": arguments}
        async with MCPServerStdio(params, client_session_timeout_seconds=60) as server:
            await Runner.run(
                slim(agent_of(script, mcp_servers=[server]), store), "Begin.", run_config=QUIET
            )

    asyncio.run(run())
    log, count, page = script.results
    assert f"{name}(pointer=" in json.loads(log.text)["hint"]
    assert count.text == f"{len(LOG.split())} words"
    assert "code 4711" in page.text
    names = [tool["name"] for tool in script.requests[0]["tools"]]
    assert len(names) == len(set(names))


def test_an_agent_behind_a_handoff_object_is_slimmed_too(store: Store) -> None:
    other = Script([("fetch_log", {})], ids="other")
    target = Agent(name="specialist", model=model_of(other), tools=[function_tool(fetch_log)])
    script = Script([("transfer_to_specialist", {})])
    agent = slim(agent_of(script, handoffs=[handoff(target)]), store)
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert pointer_in(other.results[-1].text)


def test_agents_that_hand_over_to_each_other_are_copied_once(store: Store) -> None:
    first, second = agent_of(Script(), fetch_log), agent_of(Script(), fetch_rows)
    first.handoffs, second.handoffs = [second], [handoff(first)]
    slimmed = slim(first, store)
    other = slimmed.handoffs[0]
    assert isinstance(other, Agent)
    assert [len(one.tools) for one in (slimmed, other)] == [4, 4]
    back = other.handoffs[0]
    assert isinstance(back, Handoff)
    context: Any = None
    assert asyncio.run(back.on_invoke_handoff(context, "")) is slimmed


def test_hooks_of_an_agent_are_called_as_before(store: Store) -> None:
    class Hooks(AgentHooks[Any]):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                self.seen.append(name)
            return super().__getattribute__(name)

    def played(agent: Agent) -> list[str]:
        hooks.seen.clear()
        Runner.run_sync(agent, "Begin.", run_config=QUIET)
        return [*hooks.seen]

    hooks = Hooks()
    without = played(agent_of(Script([("fetch_log", {})]), fetch_log, hooks=hooks))
    assert (
        played(slim(agent_of(Script([("fetch_log", {})]), fetch_log, hooks=hooks), store))
        == without
    )
    assert set(without) == {
        "on_start",
        "on_llm_start",
        "on_llm_end",
        "on_tool_start",
        "on_tool_end",
        "on_end",
    }


def test_every_hook_of_the_sdk_is_passed_on() -> None:
    theirs = {name for name in dir(AgentHooks) if name.startswith("on_")}
    assert theirs <= vars(_Watching).keys()


def test_agents_with_the_same_name_can_be_saved(store: Store) -> None:
    workers = [agent_of(Script(), fetch_log).as_tool(name, "A worker.") for name in ("one", "two")]
    script = Script([("count", {"text": "a"})])
    counted = function_tool(count_lines, name_override="count", needs_approval=True)
    agent = slim(agent_of(script, counted, *workers), store)
    result = Runner.run_sync(agent, "Begin.", run_config=QUIET)
    state = asyncio.run(RunState.from_string(agent, result.to_state().to_string()))
    assert [one.name for one in state.get_interruptions()] == ["count"]


def test_runs_without_an_id_share_nothing_unless_they_are_within_a_session(store: Store) -> None:
    def second_run(pointer: str) -> str:
        script = Script([("get_artifact", {"pointer": pointer, "grep": "ERROR"})])
        Runner.run_sync(slim(agent_of(script, fetch_log), store), "Begin.", run_config=QUIET)
        return script.results[0].text

    script = Script([("fetch_log", {})], lambda results: read(results))
    agent = slim(agent_of(script, fetch_log), store)
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert "4711" in script.results[1].text
    assert "4711" not in second_run(pointer_in(script.results[0].text))
    session = store.session("conversation of a user")
    with within(session):
        again = Script([("fetch_log", {})])
        Runner.run_sync(slim(agent_of(again, fetch_log), store), "Begin.", run_config=QUIET)
        assert "4711" in second_run(pointer_in(again.results[0].text))
    assert session.get(pointer_in(again.results[0].text)) == LOG


def test_a_session_serves_every_run(store: Store) -> None:
    session = store.session("given")
    script = Script([("fetch_log", {})])
    Runner.run_sync(slim(agent_of(script, fetch_log), session), "Begin.", run_config=QUIET)
    assert session.get(pointer_in(script.results[0].text)) == LOG


def test_strict_schemas_allow_a_pointer_wherever_a_value_may_be_large(store: Store) -> None:
    def place_order(order: NestedOrder, labels: list[str]) -> str:
        """Place an order."""
        return "placed"

    agent = slim(agent_of(Script(), place_order), store)
    schema = agent.tools[0].params_json_schema
    assert ensure_strict_json_schema(copy.deepcopy(schema)) == schema
    assert "string" in schema["properties"]["labels"]["type"]
    assert {"type": "string"} in schema["properties"]["order"]["anyOf"]
    assert "string" in schema["$defs"]["NestedOrder"]["properties"]["rows"]["type"]


def test_a_policy_for_approvals_sees_what_the_model_sent(store: Store) -> None:
    seen: list[Any] = []

    async def needs_approval(ctx: Any, arguments: dict[str, Any], call_id: str) -> bool:
        seen.append(arguments)
        return False

    def count(text: str) -> str:
        """Count the lines of a text."""
        return f"{len(text.splitlines())} lines"

    script = Script(
        [("fetch_log", {})], lambda results: [("count", {"text": pointer_in(results[0].text)})]
    )
    agent = slim(
        agent_of(script, fetch_log, function_tool(count, needs_approval=needs_approval)), store
    )
    result = Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert not result.interruptions
    assert seen == [{"text": pointer_in(script.results[0].text)}]
    assert script.results[1].text == "3520 lines"


def test_every_result_is_whole_if_the_first_tool_ends_the_run(store: Store) -> None:
    script = Script([("fetch_log", {})])
    agent = slim(agent_of(script, fetch_log, tool_use_behavior="stop_on_first_tool"), store)
    assert Runner.run_sync(agent, "Begin.", run_config=QUIET).final_output == LOG


def test_an_exception_that_ends_the_run_is_not_changed(store: Store) -> None:
    raised = ValueError(LOG)

    def fail(name: str) -> str:
        """Fail."""
        raise raised

    agent = slim(
        agent_of(
            Script([("fail", {"name": "a"})]), function_tool(fail, failure_error_function=None)
        ),
        store,
    )
    with pytest.raises(Exception, match="INFO") as caught:
        Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert LOG in str(caught.value)


def test_a_result_with_a_declared_schema_stays_whole(store: Store) -> None:
    def report(name: str) -> Report:
        """Write a report."""
        return Report(text=LOG)

    script = Script([("report", {"name": "a"})])
    schema = Report.model_json_schema()
    agent = slim(agent_of(script, function_tool(report, output_json_schema=schema)), store)
    Runner.run_sync(agent, "Begin.", run_config=QUIET)
    assert json.loads(script.results[0].text) == {"text": LOG}


@pytest.mark.parametrize(
    "value", [ToolOutputText(text=LOG), {"type": "text", "text": LOG}, [ToolOutputText(text=LOG)]]
)
def test_structured_texts_of_the_sdk_become_stubs(store: Store, value: Any) -> None:
    def look(name: str) -> Any:
        """Look."""
        return value

    script = Script([("look", {"name": "a"})])
    Runner.run_sync(slim(agent_of(script, look), store), "Begin.", run_config=QUIET)
    found = store.find(pointer_in(script.results[0].text))
    assert found is not None
    assert found[0].get(pointer_in(script.results[0].text)) == LOG


def test_a_disabled_policy_returns_the_agent_itself(store: Store) -> None:
    agent = agent_of(Script(), fetch_log)
    assert slim(agent, store, policy=Policy(enabled=False)) is agent


def test_our_tools_answer_invalid_arguments_with_an_error(store: Store) -> None:
    steps: list[Step] = [
        [("get_artifact", {})],
        [("get_artifact", {"pointer": 17})],
        [("list_artifacts", {"x": 1})],
    ]
    script = Script(*steps)
    Runner.run_sync(slim(agent_of(script, fetch_log), store), "Begin.", run_config=QUIET)
    assert ["error" in one.text for one in script.results] == [True, True, True]


def test_on_the_wire_each_request_begins_with_the_one_before(store: Store) -> None:
    with StandIn(WITH) as api:
        model = OpenAIResponsesModel(
            "gpt-5.2", AsyncOpenAI(base_url=api.openai_url, api_key="none")
        )
        tools: list[Any] = [function_tool(read_log), function_tool(count_lines)]
        agent = Agent(name="main", model=model, tools=tools, instructions="Be brief.")
        Runner.run_sync(slim(agent, store), "What failed?", run_config=QUIET)
    bodies = [one.body for one in api.requests]
    assert [one.status for one in api.requests] == [200] * 4
    for before, after in pairwise(bodies):
        assert after["input"][: len(before["input"])] == before["input"]
        assert json.dumps(after["tools"]) == json.dumps(before["tools"])


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    run_page("openai-agents.md", tmp_path)


def test_the_example_prints_what_the_page_shows() -> None:
    without, run, times = run_example("openai_agents_agent").splitlines()
    page = (ROOT / "docs" / "openai-agents.md").read_text()
    for line in (without, run):
        assert f"| {re.findall(r'[0-9,]+', line)[0]} |" in page
    assert int(times.split()[0]) > 100
