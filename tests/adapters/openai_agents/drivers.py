"""Drivers of the adapter suite for the OpenAI Agents SDK: sync, async and streaming."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from agents import (
    Agent,
    HandoffOutputItem,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    function_tool,
)
from agents.extensions import ToolOutputTrimmer
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.openai_agents import forget, slim
from tests.adapters.suite import (
    Ability,
    Ask,
    Colleague,
    Driver,
    Run,
    Scenario,
    SeenResult,
)
from tests.adapters.suite import ScriptedModel as Script

MAX_TURNS = 30


def model_of(script: Script) -> ScriptedModel:
    """The SDK's own fake model, which follows a script."""

    def respond(call: ModelCall) -> list[Any]:
        messages = (
            [{"role": "user", "content": call.input}] if isinstance(call.input, str) else call.input
        )
        tools = [
            {"name": one.name, "description": one.description, "parameters": one.params_json_schema}
            for one in call.tools
        ] + [
            {
                "name": one.tool_name,
                "description": one.tool_description,
                "parameters": one.input_json_schema,
            }
            for one in call.handoffs
        ]
        turn = script.respond(messages, tools, results_in(messages))
        calls = [function_call(one.name, one.parsed(), call_id=one.id) for one in turn.calls]
        return calls or [assistant_message(turn.text)]

    return ScriptedModel([ModelStep.respond(respond)] * MAX_TURNS)


def results_in(messages: Sequence[Any]) -> list[SeenResult]:
    names = {one["call_id"]: one["name"] for one in messages if one.get("type") == "function_call"}
    found = [one for one in messages if one.get("type") == "function_call_output"]
    return [
        SeenResult(
            id=one["call_id"],
            name=names[one["call_id"]],
            text=text_of(one["output"]),
            media=media_of(one["output"]),
        )
        for one in found
    ]


def text_of(output: Any) -> str:
    return (
        output
        if isinstance(output, str)
        else "\n".join(one["text"] for one in output if one["type"] == "input_text")
    )


def media_of(output: Any) -> tuple[bytes, ...]:
    urls = (
        []
        if isinstance(output, str)
        else [one.get("image_url") or one.get("file_data") for one in output]
    )
    return tuple(base64.b64decode(url.partition(",")[2] or url) for url in urls if url)


class AgentsDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "retry": "a tool asks for a retry in the text that it returns"
    }

    def run(self, scenario: Scenario) -> Run:
        agent = self._agent(scenario.model, scenario.tools, scenario, scenario.agents, name="main")
        agent.tools += scenario.shared
        if scenario.store is not None:
            agent = slim(agent, scenario.store, policy=scenario.policy)
        trimmer = ToolOutputTrimmer() if scenario.offloader else None
        config = RunConfig(
            group_id=scenario.conversation, tracing_disabled=True, call_model_input_filter=trimmer
        )
        memory = SQLiteSession(scenario.conversation or "private")
        options: dict[str, Any] = {"run_config": config, "session": memory}
        events: list[str] = []
        try:
            result = self.play(agent, scenario.prompt, **options)
            while result.interruptions:
                state = result.to_state()
                for one in result.interruptions:
                    events.append(f"approval: {one.name}")
                    state.approve(one)
                result = self.play(agent, state, **options)
        except BaseException as error:  # noqa: BLE001 - the suite compares it
            return Run(scenario.model, "", error, saved(memory), tuple(events))
        events += [
            f"hand_off: {one.target_agent.name}"
            for one in result.new_items
            if isinstance(one, HandoffOutputItem)
        ]
        return Run(scenario.model, str(result.final_output), None, saved(memory), tuple(events))

    def play(self, agent: Agent, given: Any, **options: Any) -> Any:
        return Runner.run_sync(agent, given, **options)

    def _agent(
        self,
        model: Script,
        tools: Sequence[Callable[..., Any]],
        scenario: Scenario,
        agents: Sequence[Colleague] = (),
        *,
        name: str,
    ) -> Agent:
        made: list[Any] = [
            function_tool(
                tool,
                needs_approval=tool.__name__ in scenario.approvals,
                failure_error_function=failure_text,
            )
            for tool in tools
        ]
        made += [
            self._agent(one.model, one.tools, scenario, name=one.name).as_tool(
                one.name, "Give a task to another agent"
            )
            for one in agents
        ]
        others = [] if scenario.hand_off is None or name != "main" else [scenario.hand_off]
        stops: Any = (
            {"stop_at_tool_names": sorted(scenario.final)} if scenario.final else "run_llm_again"
        )
        return Agent(
            name=name,
            model=model_of(model),
            tools=made,
            handoffs=[self._agent(one.model, one.tools, scenario, name=one.name) for one in others],
            tool_use_behavior=stops,
        )

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return function_tool(function)

    def content(self, parts: Sequence[ContentPart]) -> Any:
        return [as_output(one) for one in parts]

    def delegate(self, agent: str, text: str) -> Ask:
        return agent, {"input": text}

    def transfer(self, agent: str) -> Ask:
        return f"transfer_to_{agent}", {}

    def delete(self, store: Store, conversation: str) -> None:
        forget(store, conversation)


def failure_text(ctx: Any, error: Exception) -> str:
    """The SDK's own message does not include the text of the error."""
    return f"The tool failed: {error}"


def as_output(part: ContentPart) -> Any:
    encoded = base64.b64encode(part.data).decode()
    if part.media_type.startswith("image/"):
        return ToolOutputImage(image_url=f"data:{part.media_type};base64,{encoded}")
    return (
        ToolOutputFileContent(file_data=encoded, filename="file.pdf")
        if encoded
        else ToolOutputText(text=part.text)
    )


def saved(memory: SQLiteSession) -> bytes:
    return json.dumps(asyncio.run(memory.get_items())).encode()


class AsyncDriver(AgentsDriver):
    def play(self, agent: Agent, given: Any, **options: Any) -> Any:
        return asyncio.run(Runner.run(agent, given, **options))


class StreamingDriver(AgentsDriver):
    def play(self, agent: Agent, given: Any, **options: Any) -> Any:
        async def streamed() -> Any:
            result = Runner.run_streamed(agent, given, **options)
            async for _ in result.stream_events():
                pass
            return result

        return asyncio.run(streamed())
