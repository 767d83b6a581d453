"""Microsoft Agent Framework passes the adapter suite: whole responses and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    FunctionTool,
    Message,
    ResponseStream,
)

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.agent_framework import Coatcheck, _part
from tests.adapters.suite import (
    Ability,
    AdapterSuite,
    Colleague,
    Driver,
    Run,
    Scenario,
    ScriptedModel,
    SeenResult,
)


class ScriptedClient(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A chat client that follows a script."""

    def __init__(self, script: ScriptedModel) -> None:
        super().__init__()
        self.script = script

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any
    ) -> Any:
        contents = [one for message in messages for one in message.contents]
        tools = [
            {"name": one.name, "description": one.description, "parameters": one.parameters()}
            for one in options.get("tools") or []
        ]
        sent = [json.loads(json.dumps(as_json(message))) for message in messages]
        turn = self.script.respond(sent, tools, results_in(contents))
        made = [
            Content.from_function_call(call.id, call.name, arguments=json.dumps(call.arguments))
            for call in turn.calls
        ] or [Content.from_text(turn.text)]

        async def whole() -> ChatResponse:
            return ChatResponse(messages=[Message(role="assistant", contents=made)])

        async def updates() -> Any:
            for one in made:
                yield ChatResponseUpdate(role="assistant", contents=[one])

        return ResponseStream(updates(), finalizer=ChatResponse.from_updates) if stream else whole()


def as_json(message: Message) -> dict[str, Any]:
    """A message as it would be sent to a provider."""
    return {"role": str(message.role), "contents": [content_json(one) for one in message.contents]}


def content_json(one: Content) -> dict[str, Any]:
    if one.type == "function_result":
        return {
            "type": one.type,
            "call": one.call_id,
            "items": [content_json(item) for item in one.items or []],
        }
    if one.type == "function_call":
        return {"type": one.type, "call": one.call_id, "name": one.name, "arguments": one.arguments}
    return {"type": one.type, "text": one.text, "uri": one.uri}


def results_in(contents: Sequence[Content]) -> list[SeenResult]:
    names = {one.call_id: one.name for one in contents if one.type == "function_call"}
    return [
        SeenResult(
            id=one.call_id or "",
            name=names.get(one.call_id) or "",
            text="\n".join(item.text or "" for item in one.items or [] if item.type == "text"),
            is_error=one.exception is not None,
            media=tuple(_part(item).data for item in one.items or [] if item.type == "data"),
        )
        for one in contents
        if one.type == "function_result"
    ]


class AgentFrameworkDriver(Driver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        "final_answer": "only a middleware can end a run with a result; test_agent_framework.py covers it",
        "hand_off": "it is in a separate package, for workflows",
        "offloader": "the framework drops or summarizes old messages, and offloads none",
        "retry": "a function cannot ask for it",
    }

    def run(self, scenario: Scenario) -> Run:
        first = Colleague(name="agent", model=scenario.model, tools=scenario.tools)
        agents = [
            self._agent(one, scenario).as_tool(name=one.name, arg_name="task")
            for one in scenario.agents
        ]
        agent = self._agent(first, scenario, [*agents, *scenario.shared])
        session = (
            AgentSession()
            if scenario.conversation is None
            else AgentSession(session_id=scenario.conversation)
        )
        events: list[str] = []
        final, error = "", None
        try:
            message: Any = scenario.prompt
            while True:
                response = asyncio.run(self.play(agent, message, session))
                final = response.text
                requested = response.user_input_requests
                if not requested:
                    break
                events += [f"approval: {one.function_call.name}" for one in requested]
                message = Message(
                    role="user",
                    contents=[one.to_function_approval_response(True) for one in requested],
                )
        except BaseException as raised:  # noqa: BLE001 - the suite compares it
            error = raised
        return Run(
            scenario.model, final, error, json.dumps(session.to_dict()).encode(), tuple(events)
        )

    async def play(self, agent: Agent, message: Any, session: AgentSession) -> Any:
        """Run an agent, and return its response."""
        return await agent.run(message, session=session)

    def _agent(self, one: Colleague, scenario: Scenario, agents: Sequence[Any] = ()) -> Agent:
        providers = (
            [] if scenario.store is None else [Coatcheck(scenario.store, policy=scenario.policy)]
        )
        made = [self._tool(each, scenario) for each in one.tools]
        return Agent(
            ScriptedClient(one.model),
            name=one.name,
            description="An agent.",
            tools=[*made, *agents],
            context_providers=providers,
        )

    def _tool(self, call: Callable[..., Any], scenario: Scenario) -> FunctionTool:
        mode = "always_require" if call.__name__ in scenario.approvals else "never_require"
        return FunctionTool(
            name=call.__name__, description=call.__doc__ or "", func=call, approval_mode=mode
        )

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return FunctionTool(
            name=function.__name__, description=function.__doc__ or "", func=function
        )

    def content(self, parts: Sequence[ContentPart]) -> Any:
        return [
            Content.from_data(one.data, one.media_type)
            if one.media_type
            else Content.from_text(one.text)
            for one in parts
        ]

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(conversation)


class StreamingDriver(AgentFrameworkDriver):
    async def play(self, agent: Agent, message: Any, session: AgentSession) -> Any:
        stream = agent.run(message, session=session, stream=True)
        async for _ in stream:
            pass
        return await stream.get_final_response()


class TestWhole(AdapterSuite):
    def driver(self) -> Driver:
        return AgentFrameworkDriver()


class TestStreaming(AdapterSuite):
    def driver(self) -> Driver:
        return StreamingDriver()
