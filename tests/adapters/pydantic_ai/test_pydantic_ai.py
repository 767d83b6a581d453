"""What is special about Pydantic AI: returns with metadata, MCP toolsets, deferred calls,
validation, ordering."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastmcp.client.transports import StdioTransport
from pydantic_ai import Agent, BinaryContent, DeferredToolRequests, DeferredToolResults, ToolReturn
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import Tool
from pydantic_ai_harness.tool_output_limits import LocalFileStore, ToolOutputLimits

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters.pydantic_ai import Coatcheck
from examples.pydantic_ai_agent import WITH, count_lines, read_log
from examples.standins import StandIn
from tests.adapters.pages import run_example, run_page
from tests.adapters.pydantic_ai.drivers import model_of
from tests.adapters.suite import (
    LOG,
    ROWS,
    CustomerRow,
    ScriptedModel,
    Step,
    fetch_log,
    greet,
    pointer_in,
)
from tests.environments import ROOT

SERVER = Path(__file__).parents[1] / "log_server.py"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def run_agent(
    store: Store, *script: Step, tools: Any = (), capabilities: Any = (), **options: Any
) -> Any:
    """Run an agent, and return the result and the returns of its tools."""
    model = ScriptedModel(*script)
    agent = Agent(
        model_of(model),
        tools=list(tools),
        capabilities=[*capabilities, Coatcheck(store)],
        **options,
    )
    result = agent.run_sync("Begin.")
    return result, returns(result.all_messages())


def returns(messages: list[ModelMessage]) -> list[ToolReturnPart]:
    parts = [part for one in messages if isinstance(one, ModelRequest) for part in one.parts]
    return [part for part in parts if isinstance(part, ToolReturnPart)]


def test_a_tool_return_keeps_its_metadata_and_its_other_content_is_bounded_too(
    store: Store,
) -> None:
    def report(name: str) -> ToolReturn:
        """Write a report."""
        return ToolReturn("written", content=["what it says:", LOG], metadata={"pages": 7})

    result, (part,) = run_agent(store, [("report", {"name": "a"})], tools=[report])
    assert (part.content, part.metadata) == ("written", {"pages": 7})
    sent = result.all_messages_json().decode()
    assert LOG[:2_000] not in json.loads(json.dumps(sent))
    assert len(sent) < 5_000
    assert "art:" in sent


def test_a_tool_return_without_metadata_gets_the_pointers(store: Store) -> None:
    def report(name: str) -> ToolReturn:
        """Write a report."""
        return ToolReturn(LOG)

    _, (part,) = run_agent(store, [("report", {"name": "a"})], tools=[report])
    assert part.metadata == {"artifacts": [pointer_in(part.content)]}


def test_models_are_stored_as_the_framework_serializes_them(store: Store) -> None:
    def customers(name: str) -> list[CustomerRow]:
        """Return customers."""
        return [CustomerRow(**row) for row in ROWS]

    _, (part,) = run_agent(store, [("customers", {"name": "a"})], tools=[customers])
    found = store.find(pointer_in(part.content))
    assert found is not None
    assert found[0].get(pointer_in(part.content) + "#/7/name") == "customer 7"


def test_an_odd_value_stays_the_same_object(store: Store) -> None:
    def small(name: str) -> Any:
        """Return odd values."""
        return {"data": b"\xff\x00", "set": {1}}

    _, (part,) = run_agent(store, [("small", {"name": "a"})], tools=[small])
    assert part.content == {"data": b"\xff\x00", "set": {1}}


def test_the_tools_of_an_mcp_server_are_covered(store: Store, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)

    async def run() -> list[ToolReturnPart]:
        transport = StdioTransport(sys.executable, [str(SERVER), str(tmp_path / "log"), "clash"])
        names: list[str] = []

        def read(results: Any) -> Any:
            names.extend(tool["name"] for tool in model.requests[-1]["tools"])
            reader = next(name for name in names if name.endswith("_get_artifact"))
            return [(reader, {"pointer": pointer_in(results[0].text), "grep": "ERROR"})]

        model = ScriptedModel(
            [("read_log", {})],
            lambda results: [("count_words", {"text": pointer_in(results[0].text)})],
            read,
            [("get_artifact", {"number": "17"})],
        )
        agent = Agent(
            model_of(model),
            toolsets=[MCPToolset(transport, init_timeout=60)],
            capabilities=[Coatcheck(store)],
        )
        async with agent:
            result = await agent.run("Begin.")
        return returns(result.all_messages())

    log, count, page, theirs = asyncio.run(run())
    assert "coatcheck_get_artifact" in log.model_response_str()
    assert f"{len(LOG.split())} words" in count.model_response_str()
    assert "code 4711" in page.model_response_str()
    assert "amphora" in theirs.model_response_str()


def test_the_result_that_a_host_provides_for_a_deferred_call_is_bounded(store: Store) -> None:
    def crawl(name: str) -> str:
        """Crawl a site."""
        raise CallDeferred

    model = ScriptedModel([("crawl", {"name": "a"})])
    agent = Agent(
        model_of(model),
        tools=[crawl],
        output_type=[str, DeferredToolRequests],
        capabilities=[Coatcheck(store)],
    )
    first = agent.run_sync("Begin.")
    assert isinstance(first.output, DeferredToolRequests)
    results = DeferredToolResults(calls={first.output.calls[0].tool_call_id: LOG})
    second = agent.run_sync(message_history=first.all_messages(), deferred_tool_results=results)
    (part,) = returns(second.all_messages())
    found = store.find(pointer_in(part.content))
    assert found is not None
    assert found[0].get(pointer_in(part.content)) == LOG
    assert pointer_in(model.results[-1].text) == pointer_in(part.content)


def test_a_pointer_to_values_of_another_type_is_a_bounded_error(store: Store) -> None:
    def total(numbers: list[int]) -> int:
        """Add numbers."""
        return sum(numbers)

    def fetch_words(name: str) -> list[str]:
        """Fetch words."""
        return [f"word {number}" for number in range(9_000)]

    _, parts = run_agent(
        store,
        [("fetch_words", {"name": "a"})],
        lambda results: [("total", {"numbers": pointer_in(results[0].text)})],
        tools=[total, fetch_words],
    )
    assert parts[1].outcome == "retried"
    assert len(parts[1].model_response_str()) < 3_000


@pytest.mark.parametrize("kind", [ModelRetry, ToolFailed])
def test_a_failure_reported_by_a_tool_is_bounded(store: Store, kind: type[Exception]) -> None:
    def guess(name: str) -> str:
        """Guess."""
        raise (
            kind(LOG)
            if name == "a"
            else kind("it begins with B")
            if name == "b"
            else AssertionError
        )

    def enough(name: str) -> str:
        """Guess."""
        return "right"

    script: list[Step] = [[("guess", {"name": "a"})], [("guess", {"name": "b"})]]
    _, parts = run_agent(store, *script, tools=[Tool(guess, max_retries=5), enough])
    assert len(parts[0].model_response_str()) < 3_000
    assert parts[0].outcome == ("retried" if kind is ModelRetry else "failed")
    assert "it begins with B" in parts[1].model_response_str()


def test_an_exception_that_ends_the_run_is_not_changed(store: Store) -> None:
    raised = ValueError(LOG)

    def fail(name: str) -> str:
        """Fail."""
        raise raised

    with pytest.raises(ValueError) as caught:
        run_agent(store, [("fail", {"name": "a"})], tools=[fail])
    assert caught.value is raised
    assert str(caught.value) == LOG


def test_a_result_that_the_framework_reads_again_stays_whole(store: Store) -> None:
    class Manual(AbstractCapability[Any]):
        def get_instructions(self) -> str:
            return LOG

    model = ScriptedModel([("load_capability", {"id": "manual"})])
    manual = Manual()
    manual.id, manual.defer_loading = "manual", True
    agent = Agent(model_of(model), tools=[greet], capabilities=[Coatcheck(store), manual])
    messages = agent.run_sync("Begin.").all_messages()
    (part,) = returns(messages)
    assert "art:" not in part.model_response_str()
    assert LOG[:60] in str([json.dumps(request) for request in model.requests])


def test_the_offloader_of_the_harness_comes_after_ours_wherever_it_is_listed(store: Store) -> None:
    for before in (True, False):
        model = ScriptedModel([("fetch_log", {})])
        limits = ToolOutputLimits(store=LocalFileStore())
        ours = Coatcheck(store)
        agent = Agent(
            model_of(model),
            tools=[fetch_log],
            capabilities=[limits, ours] if before else [ours, limits],
        )
        (part,) = returns(agent.run_sync("Begin.").all_messages())
        assert pointer_in(part.model_response_str())


def test_a_second_capability_replaces_the_first(store: Store) -> None:
    model = ScriptedModel([("fetch_log", {})])
    both = [Coatcheck(store), Coatcheck(store, policy=Policy(tools={"fetch_log": "never"}))]
    agent = Agent(model_of(model), tools=[fetch_log], capabilities=both)
    (part,) = returns(agent.run_sync("Begin.").all_messages())
    assert part.content == LOG
    names = [tool["name"] for tool in model.requests[0]["tools"]]
    assert len(names) == len(set(names)) == 4


def test_a_capability_for_a_single_run_uses_its_session(store: Store) -> None:
    session = store.session("given")
    model = ScriptedModel([("fetch_log", {})])
    agent = Agent(model_of(model), tools=[fetch_log])
    (part,) = returns(agent.run_sync("Begin.", capabilities=[Coatcheck(session)]).all_messages())
    assert session.get(pointer_in(part.content)) == LOG


def test_only_some_of_our_tools_can_be_offered(store: Store) -> None:
    model = ScriptedModel([("fetch_log", {})])
    agent = Agent(
        model_of(model), tools=[fetch_log], capabilities=[Coatcheck(store, only=("get",))]
    )
    agent.run_sync("Begin.")
    assert [tool["name"] for tool in model.requests[0]["tools"]] == ["fetch_log", "get_artifact"]


def test_our_tool_answers_with_the_picture_itself(store: Store) -> None:
    from tests.adapters.suite import _picture

    session = store.session("given")
    ref = session.put(_picture(), media_type="image/png")
    model = ScriptedModel([("get_artifact", {"pointer": ref.pointer})])
    agent = Agent(model_of(model), capabilities=[Coatcheck(session)])
    (part,) = returns(agent.run_sync("Begin.").all_messages())
    assert [one.media_type for one in part.files if isinstance(one, BinaryContent)]


def test_stream_events_contain_the_stub(store: Store) -> None:
    async def run() -> str:
        model = ScriptedModel([("fetch_log", {})])
        agent = Agent(model_of(model), tools=[fetch_log], capabilities=[Coatcheck(store)])
        async with agent.run_stream_events("Begin.") as events:
            return "".join([repr(event) async for event in events])

    assert LOG[:1_000].replace("\n", "\\n") not in asyncio.run(run())


def test_on_the_wire_each_request_begins_with_the_one_before(store: Store) -> None:
    with StandIn(WITH) as api:
        provider = OpenAIProvider(base_url=api.openai_url, api_key="none")
        model = OpenAIChatModel("gpt-5.2", provider=provider)
        agent = Agent(
            model,
            tools=[read_log, count_lines],
            capabilities=[Coatcheck(store)],
            instructions="Be brief.",
        )
        agent.run_sync("What failed?")
    bodies = [one.body for one in api.requests]
    assert [one.status for one in api.requests] == [200] * 4
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert json.dumps(after["tools"]) == json.dumps(before["tools"])


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    run_page("pydantic-ai.md", tmp_path)


def test_the_example_prints_what_the_page_shows() -> None:
    without, run, times = run_example("pydantic_ai_agent").splitlines()
    page = (ROOT / "docs" / "pydantic-ai.md").read_text()
    for line in (without, run):
        assert f"| {re.findall(r'[0-9,]+', line)[0]} |" in page
    assert int(times.split()[0]) > 100
