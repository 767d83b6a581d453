"""Drivers of the adapter suite for Pydantic AI: sync, async and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic_ai import (
    Agent,
    BinaryContent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelRetry,
    ToolOutput,
    capture_run_messages,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.tools import Tool
from pydantic_ai_harness.tool_output_limits import LocalFileStore, ToolOutputLimits

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.pydantic_ai import Coatcheck
from tests.adapters.suite import (
    Ability,
    Colleague,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    ScriptedTurn,
    SeenResult,
)


def model_of(script: ScriptedModel) -> FunctionModel:
    """The framework's own fake model, which follows a script."""

    def respond(messages: list[ModelMessage], info: AgentInfo) -> ScriptedTurn:
        tools = [
            {
                "name": one.name,
                "description": one.description,
                "parameters": one.parameters_json_schema,
            }
            for one in (*info.function_tools, *info.output_tools)
        ]
        return script.respond(
            [one for message in messages for one in as_json(message)], tools, results_in(messages)
        )

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        turn = respond(messages, info)
        calls = [
            ToolCallPart(call.name, json.dumps(call.arguments), call.id) for call in turn.calls
        ]
        return ModelResponse(parts=calls or [TextPart(turn.text)])

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        turn = respond(messages, info)
        if not turn.calls:
            for word in turn.text.partition(" "):
                yield word
        for index, call in enumerate(turn.calls):
            yield {index: DeltaToolCall(name=call.name, tool_call_id=call.id)}
            yield {index: DeltaToolCall(json_args=json.dumps(call.arguments))}

    return FunctionModel(answer, stream_function=stream)


def as_json(message: ModelMessage) -> list[dict[str, Any]]:
    """A message as it would be sent to a provider."""
    found: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, ToolReturnPart):
            files = [one.base64 for one in part.files if isinstance(one, BinaryContent)]
            found.append(
                {
                    "role": "tool",
                    "id": part.tool_call_id,
                    "text": part.model_response_str(),
                    "files": files,
                }
            )
        elif isinstance(part, ToolCallPart):
            found.append(
                {
                    "role": "call",
                    "id": part.tool_call_id,
                    "name": part.tool_name,
                    "arguments": part.args,
                }
            )
        else:
            role = "assistant" if isinstance(part, TextPart) else "user"
            assert isinstance(part, TextPart | UserPromptPart)
            assert isinstance(part.content, str)
            found.append({"role": role, "text": part.content})
    return found


def results_in(messages: Sequence[ModelMessage]) -> list[SeenResult]:
    parts = [part for one in messages if isinstance(one, ModelRequest) for part in one.parts]
    return [
        SeenResult(
            id=part.tool_call_id,
            name=part.tool_name,
            text=part.model_response_str(),
            is_error=part.outcome != "success",
            media=tuple(one.data for one in part.files if isinstance(one, BinaryContent)),
        )
        for part in parts
        if isinstance(part, ToolReturnPart)
    ]


class PydanticDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "hand_off": "an agent hands over in the host's own code"
    }

    def run(self, scenario: Scenario) -> Run:
        agent = self._agent(
            scenario.model, scenario.tools, scenario, scenario.agents, scenario.shared
        )
        events: list[str] = []
        options: dict[str, Any] = {}
        if scenario.conversation is not None:
            options["conversation_id"] = scenario.conversation
        with capture_run_messages() as messages:
            try:
                output, history = self.play(agent, scenario.prompt, **options)
                while isinstance(output, DeferredToolRequests):
                    events += [f"approval: {call.tool_name}" for call in output.approvals]
                    allowed = DeferredToolResults(
                        approvals={call.tool_call_id: True for call in output.approvals}
                    )
                    options |= {"message_history": history, "deferred_tool_results": allowed}
                    output, history = self.play(agent, None, **options)
            except BaseException as error:  # noqa: BLE001 - the suite compares it
                return Run(
                    scenario.model,
                    "",
                    error,
                    ModelMessagesTypeAdapter.dump_json(messages),
                    tuple(events),
                )
        return Run(
            scenario.model,
            str(output),
            None,
            ModelMessagesTypeAdapter.dump_json(history),
            tuple(events),
        )

    def play(
        self, agent: Agent, prompt: str | None, **options: Any
    ) -> tuple[Any, list[ModelMessage]]:
        """Run an agent, and return its output and the messages."""
        result = agent.run_sync(prompt, **options)
        return result.output, result.all_messages()

    def _agent(
        self,
        model: ScriptedModel,
        tools: Sequence[Callable[..., Any]],
        scenario: Scenario,
        agents: Sequence[Colleague] = (),
        shared: Sequence[Any] = (),
    ) -> Agent:
        capabilities: list[Any] = []
        if scenario.store is not None:
            capabilities.append(Coatcheck(scenario.store, policy=scenario.policy))
        if scenario.offloader:
            capabilities.append(ToolOutputLimits(store=LocalFileStore()))
        made = [
            Tool(tool, requires_approval=tool.__name__ in scenario.approvals)
            for tool in (*tools, *(self._as_tool(one, scenario) for one in agents))
            if tool.__name__ not in scenario.final
        ]
        final = [
            ToolOutput(tool, name=tool.__name__)
            for tool in tools
            if tool.__name__ in scenario.final
        ]
        output: Any = (
            [*final] if final else [str, DeferredToolRequests] if scenario.approvals else str
        )
        names = {"tools": [*made, *shared], "output_type": output, "capabilities": capabilities}
        return Agent(model_of(model), **names)

    def _as_tool(self, other: Colleague, scenario: Scenario) -> Callable[..., Any]:
        agent = self._agent(other.model, other.tools, scenario)

        async def delegate(task: str) -> str:
            """Give a task to another agent."""
            return str((await agent.run(task)).output)

        delegate.__name__ = other.name
        return delegate

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return Tool(function)

    def content(self, parts: Sequence[ContentPart]) -> Any:
        made = [
            BinaryContent(one.data, media_type=one.media_type) if one.media_type else one.text
            for one in parts
        ]
        return made if len(made) > 1 else made[0]

    def retry(self, text: str) -> Exception:
        error: Exception = ModelRetry(text)
        return error

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(conversation)


class AsyncDriver(PydanticDriver):
    def play(
        self, agent: Agent, prompt: str | None, **options: Any
    ) -> tuple[Any, list[ModelMessage]]:
        result = asyncio.run(agent.run(prompt, **options))
        return result.output, result.all_messages()


class StreamingDriver(PydanticDriver):
    def play(
        self, agent: Agent, prompt: str | None, **options: Any
    ) -> tuple[Any, list[ModelMessage]]:
        async def streamed() -> tuple[Any, list[ModelMessage]]:
            async with agent.run_stream(prompt, **options) as stream:
                output = await stream.get_output()
                return output, stream.all_messages()

        return asyncio.run(streamed())
