"""Strands Agents pass the adapter suite: sync, async and streaming, with concurrent and with
sequential tools."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.models import Model
from strands.multiagent import Swarm
from strands.session import FileSessionManager
from strands.storage import InMemoryStorage
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.tools.tools import normalize_schema
from strands.vended_plugins.context_offloader import ContextOffloader

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.strands import STATE_KEY, Coatcheck
from tests.adapters.suite import (
    Ability,
    AdapterSuite,
    Ask,
    Colleague,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    SeenResult,
)


class ScriptedProvider(Model):
    """A model of Strands that follows a script."""

    agent: Agent

    def __init__(self, script: ScriptedModel) -> None:
        self.script = script

    def declared(self, sent: Any) -> dict[str, Any]:
        """A tool as it declares itself. Strands adds types and descriptions to properties that have
        none."""
        schema = self.agent.tool_registry.registry[sent["name"]].tool_spec["inputSchema"]["json"]
        assert normalize_schema(schema) == sent["inputSchema"]["json"]
        return {"name": sent["name"], "description": sent["description"], "parameters": schema}

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream(
        self, messages: Any, tool_specs: Any = None, *args: Any, **options: Any
    ) -> AsyncIterator[Any]:
        sent = [as_json(one) for one in messages]
        tools = [self.declared(one) for one in tool_specs or []]
        turn = self.script.respond(sent, tools, results_in(messages))
        yield {"messageStart": {"role": "assistant"}}
        for call in turn.calls:
            yield {
                "contentBlockStart": {
                    "start": {"toolUse": {"name": call.name, "toolUseId": call.id}}
                }
            }
            yield {
                "contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(call.arguments)}}}
            }
            yield {"contentBlockStop": {}}
        if not turn.calls:
            yield {"contentBlockStart": {"start": {}}}
            for word in turn.text.partition(" "):
                yield {"contentBlockDelta": {"delta": {"text": word}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if turn.calls else "end_turn"}}


def as_json(message: Mapping[str, Any]) -> Any:
    """A message as it would be sent to a provider."""
    shown = {"role": message["role"], "content": message["content"]}
    return json.loads(json.dumps(shown, default=lambda one: one.hex()))


def results_in(messages: Sequence[Mapping[str, Any]]) -> list[SeenResult]:
    blocks = [block for one in messages for block in one["content"]]
    names = {
        one["toolUse"]["toolUseId"]: one["toolUse"]["name"] for one in blocks if "toolUse" in one
    }
    return [seen(one["toolResult"], names) for one in blocks if "toolResult" in one]


def seen(result: Mapping[str, Any], names: Mapping[str, str]) -> SeenResult:
    content = result["content"]
    media = [
        one[kind]["source"]["bytes"]
        for one in content
        for kind in ("image", "document")
        if kind in one
    ]
    return SeenResult(
        id=result["toolUseId"],
        name=names[result["toolUseId"]],
        text="\n".join(
            one["text"] if "text" in one else json.dumps(one.get("json", "")) for one in content
        ),
        is_error=result["status"] == "error",
        media=tuple(media),
    )


class StrandsDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "final_answer": "only the answer of an agent behind a tool can end a run; test_strands.py covers it",
        "retry": "a tool cannot ask for it; hooks repeat a call without asking the model",
    }
    executor: ClassVar[Any] = ConcurrentToolExecutor

    def run(self, scenario: Scenario) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            return self._run(scenario, Path(folder))

    def _run(self, scenario: Scenario, folder: Path) -> Run:
        events: list[str] = []
        first = Colleague(name="agent", model=scenario.model, tools=scenario.tools)
        options: dict[str, Any] = {}
        if scenario.conversation is not None and scenario.hand_off is None:
            options["session_manager"] = FileSessionManager(
                session_id=scenario.conversation, storage_dir=str(folder)
            )
        agents = [self._agent(one, scenario).as_tool(name=one.name) for one in scenario.agents]
        agent = self._agent(first, scenario, [*agents, *scenario.shared], **options)

        def ask(event: BeforeToolCallEvent) -> None:
            name = event.tool_use["name"]
            if name in scenario.approvals:
                event.interrupt(f"approve {name}", reason=name)

        agent.add_hook(ask, BeforeToolCallEvent)
        final, error = "", None
        try:
            if scenario.hand_off is not None:
                return self._swarm(agent, scenario)
            result = self.play(agent, scenario.prompt)
            while result.stop_reason == "interrupt":
                events += [f"approval: {one.reason}" for one in result.interrupts]
                answers = [
                    {"interruptResponse": {"interruptId": one.id, "response": "y"}}
                    for one in result.interrupts
                ]
                result = self.play(agent, answers)
            final = str(result).rstrip("\n")
        except BaseException as raised:  # noqa: BLE001 - the suite compares it
            error = raised
        saved = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.json")))
        return Run(
            scenario.model,
            final,
            error,
            saved or json.dumps(agent.messages, default=repr).encode(),
            tuple(events),
        )

    def play(self, agent: Agent, prompt: Any) -> Any:
        """Run an agent, and return its result."""
        return agent(prompt)

    def _swarm(self, agent: Agent, scenario: Scenario) -> Run:
        assert scenario.hand_off is not None
        swarm = Swarm([agent, self._agent(scenario.hand_off, scenario)], entry_point=agent)
        result = swarm("Begin.", invocation_state={STATE_KEY: scenario.conversation})
        events = [f"hand_off: {node.node_id}" for node in result.node_history[1:]]
        return Run(
            scenario.model,
            str(result.results[result.node_history[-1].node_id].result).strip(),
            events=tuple(events),
        )

    def _agent(
        self, one: Colleague, scenario: Scenario, agents: Sequence[Any] = (), **options: Any
    ) -> Agent:
        plugins: list[Any] = []
        if scenario.store is not None:
            plugins.append(Coatcheck(scenario.store, policy=scenario.policy))
        if scenario.offloader:
            plugins.append(ContextOffloader(InMemoryStorage()))
        model = ScriptedProvider(one.model)
        agent = model.agent = Agent(
            model=model,
            name=one.name,
            tools=[*(tool(_own(each)) for each in one.tools), *agents],
            plugins=plugins,
            callback_handler=None,
            tool_executor=self.executor(),
            **options,
        )
        return agent

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return tool(_own(function))

    def content(self, parts: Sequence[ContentPart]) -> Any:
        return {"status": "success", "content": [block_of(one) for one in parts]}

    def delegate(self, agent: str, text: str) -> Ask:
        return agent, {"input": text}

    def transfer(self, agent: str) -> Ask:
        return "handoff_to_agent", {"agent_name": agent, "message": "Please look at the log."}

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(conversation)


def _own(call: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function: the decorator of Strands writes into it."""
    return copy.copy(call)


def block_of(part: ContentPart) -> dict[str, Any]:
    if not part.media_type:
        return {"text": part.text}
    kind, _, form = part.media_type.partition("/")
    media = {"format": form, "source": {"bytes": part.data}}
    return {"image": media} if kind == "image" else {"document": {**media, "name": "file"}}


class AsyncDriver(StrandsDriver):
    def play(self, agent: Agent, prompt: Any) -> Any:
        return asyncio.run(agent.invoke_async(prompt))


class StreamingDriver(StrandsDriver):
    executor: ClassVar[Any] = SequentialToolExecutor

    def play(self, agent: Agent, prompt: Any) -> Any:
        async def streamed() -> Any:
            return [event async for event in agent.stream_async(prompt)][-1]["result"]

        return asyncio.run(streamed())


class TestSync(AdapterSuite):
    def driver(self) -> Driver:
        return StrandsDriver()


class TestAsync(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
