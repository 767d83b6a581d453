"""An agent of Microsoft Agent Framework with and without Coatcheck. The chat client follows a
script, so it needs no key and no network; it needs the package `agent-framework-core`.

    python -m examples.agent_framework_agent
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    ContextProvider,
    FunctionInvocationLayer,
    Message,
)

import coatcheck
from coatcheck.adapters.agent_framework import Coatcheck
from coatcheck.tokens import estimate

LOG = "\n".join(
    f"2026-11-17T10:{n // 60 % 60:02}:{n % 60:02}Z INFO request {n} took {n * 7 % 900} ms"
    for n in range(4_000)
)


def run_tests() -> str:
    """Run the tests and return their log."""
    return LOG.replace("INFO request 2711", "ERROR request 2711 was refused")


def count_lines(text: str) -> str:
    """Count the lines of a text."""
    return f"{text.count(chr(10)) + 1} lines"


class ScriptedClient(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """Calls a tool, looks into its result, passes it on to another tool, and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.sent = ""

    async def _inner_get_response(
        self, *, messages: Sequence[Message], **options: Any
    ) -> ChatResponse:
        self.turns += 1
        contents = [one for message in messages for one in message.contents]
        self.sent = json.dumps([self.shown(one) for one in contents])
        results = [str(one.result) for one in contents if one.type == "function_result"]
        content = Content.from_text("One request was refused.")
        if self.turns == 1:
            content = Content.from_function_call("call_1", "run_tests", arguments="{}")
        elif results[0].startswith('{"stub"') and self.turns < 4:
            pointer = json.loads(results[0])["artifact"]
            steps = [
                ("get_artifact", {"pointer": pointer, "grep": "ERROR"}),
                ("count_lines", {"text": pointer}),
            ]
            name, given = steps[self.turns - 2]
            content = Content.from_function_call(
                f"call_{self.turns}", name, arguments=json.dumps(given)
            )
        else:
            for result in results:
                print(f"  {result[:150]!r}")
        return ChatResponse(messages=[Message(role="assistant", contents=[content])])

    def shown(self, one: Content) -> dict[str, Any]:
        """Return a content as it is sent to a provider."""
        if one.type == "function_result":
            return {"type": "function_call_output", "call_id": one.call_id, "output": one.result}
        if one.type == "function_call":
            return {
                "type": one.type,
                "call_id": one.call_id,
                "name": one.name,
                "arguments": one.arguments,
            }
        return {"type": one.type, "text": one.text}


async def play(*providers: ContextProvider) -> tuple[ScriptedClient, str]:
    """Run the agent. Return the client, which has the last request, and the saved session as
    JSON."""
    client, session = ScriptedClient(), AgentSession(session_id="monday")
    agent = Agent(
        client, name="tester", tools=[run_tests, count_lines], context_providers=list(providers)
    )
    await agent.run("Do the tests pass?", session=session)
    return client, json.dumps(session.to_dict())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder) as store:
        for title, providers in (("without Coatcheck", []), ("with it", [Coatcheck(store)])):
            print(title)
            client, saved = asyncio.run(play(*providers))
            print(
                f"  last request: {len(client.sent):,} characters, about {estimate(client.sent):,} tokens"
            )
            print(f"  saved session: {len(saved):,} characters")


if __name__ == "__main__":
    main()
