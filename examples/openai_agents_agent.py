"""An agent of the OpenAI Agents SDK with and without Coatcheck, and what each sends to the model in
its last request.

The model is a script behind a real port on loopback: it needs no key and no network. It needs the
package `openai-agents`: `python -m examples.openai_agents_agent`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI

import coatcheck
from coatcheck import Store
from coatcheck.adapters.openai_agents import slim
from examples.standins import Call, Reply, StandIn, Step

QUESTION = "What failed in the last hour, and out of how many requests?"


def read_log() -> str:
    """Return the log of the last hour."""
    pick = random.Random(1)
    lines = [
        f"10:{n // 60 % 60:02}:{n % 60:02} GET /page/{pick.randrange(500)} 200 {n} ms"
        for n in range(6_000)
    ]
    lines[4_321] = "10:12:01 POST /pay 500 card refused: code 4711"
    return "\n".join(lines)


def count_lines(text: str) -> int:
    """Count the lines of a text."""
    return text.count("\n") + 1


ANSWER = Reply("One payment of 6,000 requests failed, with code 4711.")
WITHOUT: list[Step] = [
    Reply(calls=(Call("read_log", {}),)),
    ANSWER,
]  # this model has read all of the log
WITH: list[Step] = [
    Reply(calls=(Call("read_log", {}),)),
    lambda heard: Reply(
        calls=(Call("get_artifact", {"pointer": heard.pointer("read_log"), "grep": " 500 "}),)
    ),
    lambda heard: Reply(calls=(Call("count_lines", {"text": heard.pointer("read_log")}),)),
    ANSWER,
]


def run(store: Store | None) -> int:
    """Run the agent, print what its last request had, and return its tokens."""
    session = SQLiteSession("on call")
    config = RunConfig(group_id="on call", tracing_disabled=True)
    with StandIn(WITH if store else WITHOUT) as api:
        model = OpenAIResponsesModel(
            "gpt-5.2", AsyncOpenAI(base_url=api.openai_url, api_key="none")
        )
        agent = Agent(
            name="on call", model=model, tools=[function_tool(read_log), function_tool(count_lines)]
        )
        if store:
            agent = slim(agent, store)
        Runner.run_sync(agent, QUESTION, session=session, run_config=config)
    last = api.requests[-1]
    tokens = last.usage.prompt if last.usage else 0
    saved = len(json.dumps(asyncio.run(session.get_items())))
    print(
        f"{'with' if store else 'without':8}{len(last.raw):9,} bytes {tokens:9,} tokens {saved:9,} bytes of history"
    )
    return tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder) as opened:
        before, after = run(None), run(opened)
        print(f"{before / after:.0f} times fewer tokens")
