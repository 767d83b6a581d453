"""Google ADK passes the adapter suite: sync, async and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps.app import App
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions.in_memory_session_service import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.google_adk import Coatcheck
from tests.adapters.suite import (
    Ability,
    AdapterSuite,
    Ask,
    Colleague,
    Driver,
    Run,
    Scenario,
    SeenResult,
)

APP = "suite"
USER = "user"
CONFIRM = "adk_request_confirmation"


class ScriptedLlm(BaseLlm):
    """A model of ADK that follows a script."""

    script: Any

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        contents = llm_request.contents
        declared = [
            one
            for tool in llm_request.config.tools or []
            for one in tool.function_declarations or []
        ]
        messages = [one.model_dump(mode="json", exclude_none=True) for one in contents]
        turn = self.script.respond(
            messages, [described(one) for one in declared], results_in(contents)
        )
        parts = [types.Part(text=turn.text)]
        if turn.calls:
            parts = [
                types.Part(
                    function_call=types.FunctionCall(
                        id=call.id, name=call.name, args=dict(call.parsed())
                    )
                )
                for call in turn.calls
            ]
        elif stream:
            for word in turn.text.partition(" "):
                yield LlmResponse(
                    content=types.Content(role="model", parts=[types.Part(text=word)]), partial=True
                )
        yield LlmResponse(content=types.Content(role="model", parts=parts))


def described(tool: types.FunctionDeclaration) -> dict[str, Any]:
    declared = tool.parameters
    schema = tool.parameters_json_schema or (
        declared.model_dump(mode="json", exclude_none=True) if declared else {}
    )
    return {"name": tool.name, "description": tool.description, "parameters": schema}


def results_in(contents: Sequence[types.Content]) -> list[SeenResult]:
    found = [
        part.function_response
        for one in contents
        for part in one.parts or []
        if part.function_response
    ]
    return [
        SeenResult(
            id=one.id or "",
            name=one.name or "",
            text=text_of(one.response or {}),
            is_error="error" in (one.response or {}),
            media=tuple(part.inline_data.data for part in one.parts or [] if part.inline_data),
        )
        for one in found
    ]


def text_of(response: Mapping[str, Any]) -> str:
    value = next(iter(response.values())) if len(response) == 1 else response
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class AdkDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "offloader": "ADK has none; it only summarizes or drops whole events",
        "private": "every run of ADK has an app, a user and a session",
        "retry": "ADK has no exception for it; its own plugin turns any error into an answer",
    }

    def run(self, scenario: Scenario) -> Run:
        assert scenario.conversation is not None
        events: list[str] = []
        sessions = InMemorySessionService()
        agents = [AgentTool(self._agent(one, scenario)) for one in scenario.agents]
        others = [self._agent(scenario.hand_off, scenario)] if scenario.hand_off else []
        first = Colleague(name="agent", model=scenario.model, tools=scenario.tools)
        agent = self._agent(first, scenario, tools=[*agents, *scenario.shared], sub_agents=others)
        plugins = (
            [] if scenario.store is None else [Coatcheck(scenario.store, policy=scenario.policy)]
        )
        runner = Runner(
            app=App(name=APP, root_agent=agent, plugins=plugins), session_service=sessions
        )
        names = {"app_name": APP, "user_id": USER, "session_id": scenario.conversation}
        sessions.create_session_sync(**names)
        final, error = "", None
        message = types.Content(role="user", parts=[types.Part(text=scenario.prompt)])
        try:
            while True:
                seen = self.play(runner, scenario.conversation, message)
                final = final_of(seen) or final
                events += [
                    f"hand_off: {one.actions.transfer_to_agent}"
                    for one in seen
                    if one.actions.transfer_to_agent
                ]
                requested = [
                    call
                    for one in seen
                    for call in one.get_function_calls()
                    if call.name == CONFIRM
                ]
                if not requested:
                    break
                events += [
                    f"approval: {(call.args or {})['originalFunctionCall']['name']}"
                    for call in requested
                ]
                message = types.Content(role="user", parts=[confirmed(call) for call in requested])
        except BaseException as raised:  # noqa: BLE001 - the suite compares it
            error = raised
        saved = sessions.get_session_sync(**names)
        assert saved is not None
        return Run(scenario.model, final, error, saved.model_dump_json().encode(), tuple(events))

    def play(self, runner: Runner, session_id: str, message: types.Content) -> list[Event]:
        """Run an agent, and return its events."""
        return [*runner.run(user_id=USER, session_id=session_id, new_message=message)]

    def _agent(self, one: Colleague, scenario: Scenario, **options: Any) -> LlmAgent:
        made = [self._tool(tool, scenario) for tool in one.tools]
        return LlmAgent(
            name=one.name,
            description="An agent.",
            model=ScriptedLlm(model="scripted", script=one.model),
            tools=[*made, *options.pop("tools", ())],
            **options,
        )

    def _tool(self, tool: Callable[..., Any], scenario: Scenario) -> FunctionTool:
        if tool.__name__ not in scenario.final:
            return FunctionTool(tool, require_confirmation=tool.__name__ in scenario.approvals)

        def last(tool_context: ToolContext) -> Any:
            tool_context.actions.skip_summarization = True
            return tool()

        last.__name__, last.__doc__ = tool.__name__, tool.__doc__
        return FunctionTool(last)

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return FunctionTool(function)

    def content(self, parts: Sequence[ContentPart]) -> Any:
        made = [
            types.Part.from_bytes(data=one.data, mime_type=one.media_type)
            if one.media_type
            else one.text
            for one in parts
        ]
        return made if len(made) > 1 else made[0]

    def delegate(self, agent: str, text: str) -> Ask:
        return agent, {"request": text}

    def transfer(self, agent: str) -> Ask:
        return "transfer_to_agent", {"agent_name": agent}

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(app_name=APP, user_id=USER, session_id=conversation)


def final_of(events: Sequence[Event]) -> str:
    """The text of the last event, or the result of a tool that ended the run."""
    last = next((one for one in reversed(events) if one.is_final_response()), None)
    parts = last.content.parts or [] if last and last.content else []
    responses = [part.function_response for part in parts if part.function_response]
    return (
        text_of(responses[0].response or {})
        if responses
        else "".join(part.text or "" for part in parts)
    )


def confirmed(call: types.FunctionCall) -> types.Part:
    answer = types.FunctionResponse(id=call.id, name=CONFIRM, response={"confirmed": True})
    return types.Part(function_response=answer)


class AsyncDriver(AdkDriver):
    config: ClassVar[RunConfig] = RunConfig()

    def play(self, runner: Runner, session_id: str, message: types.Content) -> list[Event]:
        async def run() -> list[Event]:
            events = runner.run_async(
                user_id=USER, session_id=session_id, new_message=message, run_config=self.config
            )
            return [event async for event in events]

        return asyncio.run(run())


class StreamingDriver(AsyncDriver):
    config: ClassVar[RunConfig] = RunConfig(streaming_mode=StreamingMode.SSE)


class TestSync(AdapterSuite):
    def driver(self) -> Driver:
        return AdkDriver()


class TestAsync(AdapterSuite):
    def driver(self) -> Driver:
        return AsyncDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
