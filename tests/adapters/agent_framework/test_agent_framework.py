"""What the context provider for Microsoft Agent Framework does beyond the adapter suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    ContextProvider,
    FunctionInvocationLayer,
    FunctionTool,
    Message,
    MiddlewareTermination,
    function_middleware,
)
from agent_framework.security import LabelTrackingFunctionMiddleware

import coatcheck
from coatcheck import Store
from coatcheck.adapters.agent_framework import Coatcheck
from tests.adapters.pages import figures_of, run_example, run_page
from tests.adapters.suite import LOG, fetch_log, pointer_in


class Scripted(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A client that makes the calls of a script, then says "Done.", and records the names of the
    tools."""

    def __init__(self, *script: tuple[str, dict[str, Any]], **options: Any) -> None:
        super().__init__(**options)
        self.script = list(script)
        self.tools: list[str] = []
        self.results: list[Content] = []

    async def _inner_get_response(
        self, *, messages: Sequence[Message], options: Any, **_: Any
    ) -> ChatResponse:
        self.tools = [tool.name for tool in options.get("tools") or []]
        self.results = [
            one for message in messages for one in message.contents if one.type == "function_result"
        ]
        content = Content.from_text("Done.")
        if self.script:
            name, given = self.script.pop(0)
            content = Content.from_function_call(
                f"call_{len(self.script)}", name, arguments=json.dumps(given)
            )
        return ChatResponse(messages=[Message(role="assistant", contents=[content])])


def tool_of(call: Callable[..., Any], **options: Any) -> FunctionTool:
    return FunctionTool(name=call.__name__, description=call.__doc__ or "", func=call, **options)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def test_a_result_that_ends_the_run_in_a_middleware_is_whole(store: Store) -> None:
    @function_middleware
    async def stop(context: Any, call_next: Any) -> None:
        await call_next()
        context.result = LOG
        raise MiddlewareTermination

    client = Scripted(("fetch_log", {}))
    options: dict[str, Any] = {
        "tools": [tool_of(fetch_log)],
        "context_providers": [Coatcheck(store)],
    }
    agent = Agent(client, **options, middleware=[stop])
    response = asyncio.run(agent.run("Begin."))
    found = [
        one
        for message in response.messages
        for one in message.contents
        if one.type == "function_result"
    ]
    assert found[-1].result == LOG


def test_tools_of_another_provider_keep_their_names(store: Store) -> None:
    def get_artifact(number: str) -> str:
        """Return an artifact of the museum."""
        return f"an amphora, number {number}"

    class Museum(ContextProvider):
        async def before_run(self, *, context: Any, **_: Any) -> None:
            context.extend_tools(self.source_id, [tool_of(get_artifact)])

    client = Scripted(("get_artifact", {"number": "7"}))
    agent = Agent(client, context_providers=[Museum("museum"), Coatcheck(store)])
    asyncio.run(agent.run("Begin."))
    assert {"get_artifact", "coatcheck_get_artifact"} <= set(client.tools)
    assert client.results[0].result == "an amphora, number 7"


def test_an_approval_is_requested_once_and_shows_the_pointer(store: Store) -> None:
    seen: list[int] = []

    def count(text: str) -> str:
        """Count the characters of a text."""
        seen.append(len(text))
        return "counted"

    async def play() -> None:
        client = Scripted(("fetch_log", {}))
        tools = [tool_of(fetch_log), tool_of(count, approval_mode="always_require")]
        agent, session = (
            Agent(client, tools=tools, context_providers=[Coatcheck(store)]),
            AgentSession(),
        )
        await agent.run("Begin.", session=session)
        pointer = pointer_in(str(client.results[0].result))
        client.script.append(("count", {"text": pointer}))
        response = await agent.run("Count.", session=session)
        (request,) = response.user_input_requests
        assert json.loads(request.function_call.arguments) == {"text": pointer}
        answer = Message(role="user", contents=[request.to_function_approval_response(True)])
        response = await agent.run(answer, session=session)
        assert response.user_input_requests == []
        assert LOG[:1_000] not in json.dumps(session.to_dict())

    asyncio.run(play())
    assert seen == [len(LOG)]


def test_a_pointer_behind_security_middleware_is_refused_with_a_message(store: Store) -> None:
    def count(text: str) -> str:
        """Count the characters of a text."""
        return f"{len(text)} characters"

    session = store.session("chosen")
    ref = session.put(LOG)
    client = Scripted(("count", {"text": ref.pointer}), ("count", {"text": "abc"}))
    options: dict[str, Any] = {
        "tools": [tool_of(count)],
        "middleware": [LabelTrackingFunctionMiddleware(auto_hide_untrusted=False)],
    }
    agent = Agent(client, context_providers=[Coatcheck(session)], **options)
    asyncio.run(agent.run("Begin."))
    assert "takes no pointers here" in str(client.results[0].result)
    assert client.results[1].result == "3 characters"


def test_a_long_error_is_bounded_where_the_model_sees_it(store: Store) -> None:
    def fail() -> str:
        """Fail."""
        raise ValueError("refused\n" + LOG)

    client = Scripted(
        ("fail", {}), function_invocation_configuration={"include_detailed_errors": True}
    )
    agent = Agent(client, tools=[tool_of(fail)], context_providers=[Coatcheck(store)])
    asyncio.run(agent.run("Begin."))
    assert "refused" in str(client.results[0].result)
    assert len(str(client.results[0].result)) < 3_000
    assert client.results[0].exception is not None


def test_runs_without_a_session_share_nothing(store: Store) -> None:
    async def play() -> str:
        first, second = Scripted(("fetch_log", {})), Scripted()
        for client in (first, second):
            if client is second:
                pointer = pointer_in(str(first.results[0].result))
                client.script.append(("get_artifact", {"pointer": pointer, "grep": "ERROR"}))
            await Agent(
                client, tools=[tool_of(fetch_log)], context_providers=[Coatcheck(store)]
            ).run("Begin.")
        return str(second.results[0].result)

    assert "4711" not in asyncio.run(play())


# The page and the example


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("agent-framework.md", tmp_path)


def test_the_example_shows_how_much_smaller_the_request_is() -> None:
    without, with_it = figures_of(run_example("agent_framework_agent"))
    assert with_it * 50 < without
