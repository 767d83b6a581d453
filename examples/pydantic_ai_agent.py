"""An agent of Pydantic AI with and without Coatcheck, and what each sends to the model in its last
request.

The model is a script behind a real port on loopback: it needs no key and no network. It needs the
package `pydantic-ai-slim[openai]`: `python -m examples.pydantic_ai_agent`.
"""

from __future__ import annotations

import random
import tempfile

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import coatcheck
from coatcheck import Store
from coatcheck.adapters.pydantic_ai import Coatcheck
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
    with StandIn(WITH if store else WITHOUT) as api:
        model = OpenAIChatModel(
            "gpt-5.2", provider=OpenAIProvider(base_url=api.openai_url, api_key="none")
        )
        capabilities = [Coatcheck(store)] if store else []
        agent = Agent(model, tools=[read_log, count_lines], capabilities=capabilities)
        result = agent.run_sync(QUESTION, conversation_id="on call")
    last = api.requests[-1]
    tokens = last.usage.prompt if last.usage else 0
    saved = len(result.all_messages_json())
    print(
        f"{'with' if store else 'without':8}{len(last.raw):9,} bytes {tokens:9,} tokens {saved:9,} bytes of history"
    )
    return tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder) as opened:
        before, after = run(None), run(opened)
        print(f"{before / after:.0f} times fewer tokens")
