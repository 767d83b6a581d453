"""An agent of Google ADK with and without Coatcheck. The model follows a script in place of Gemini,
so it needs no key and no network; it needs the package `google-adk`.

    python -m examples.google_adk_agent
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps.app import App
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions.in_memory_session_service import InMemorySessionService
from google.genai import types

import coatcheck
from coatcheck.adapters.google_adk import Coatcheck
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


class ScriptedModel(BaseLlm):
    """Calls a tool, looks into its result, passes it on to another tool, and answers."""

    turns: int = 0
    sent: str = ""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.sent = json.dumps(
            [one.model_dump(mode="json", exclude_none=True) for one in llm_request.contents]
        )
        self.turns += 1
        parts = [
            part
            for one in llm_request.contents
            for part in one.parts or []
            if part.function_response
        ]
        result = (
            (parts[0].function_response.response or {})["result"]
            if parts and parts[0].function_response
            else ""
        )
        if self.turns == 1:
            part = call("run_tests")
        elif result.startswith('{"stub"'):
            pointer = json.loads(result)["artifact"]
            steps = [
                call("get_artifact", pointer=pointer, grep="ERROR"),
                call("count_lines", text=pointer),
            ]
            part = (
                steps[self.turns - 2]
                if self.turns < 4
                else types.Part(text="One request was refused.")
            )
        else:
            part = types.Part(text="One request was refused.")
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def call(name: str, **args: Any) -> types.Part:
    return types.Part(function_call=types.FunctionCall(name=name, args=args))


async def play(plugins: list[BasePlugin]) -> tuple[ScriptedModel, str]:
    """Run the agent. Return the model, which has the last request, and the saved session as
    JSON."""
    model = ScriptedModel(model="scripted")
    agent = LlmAgent(name="tester", model=model, tools=[run_tests, count_lines])
    sessions = InMemorySessionService()
    runner = Runner(
        app=App(name="example", root_agent=agent, plugins=plugins), session_service=sessions
    )
    names = {"user_id": "ada", "session_id": "monday"}
    await sessions.create_session(app_name="example", **names)
    message = types.Content(role="user", parts=[types.Part(text="Do the tests pass?")])
    async for event in runner.run_async(new_message=message, **names):
        for response in event.get_function_responses():
            print(f"  {response.name}: {str((response.response or {}).get('result'))[:150]!r}")
    saved = await sessions.get_session(app_name="example", **names)
    return model, saved.model_dump_json() if saved else ""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder) as store:
        for title, plugins in (("without Coatcheck", []), ("with it", [Coatcheck(store)])):
            print(title)
            model, saved = asyncio.run(play(list(plugins)))
            print(
                f"  last request: {len(model.sent):,} characters, about {estimate(model.sent):,} tokens"
            )
            print(f"  saved session: {len(saved):,} characters")


if __name__ == "__main__":
    main()
