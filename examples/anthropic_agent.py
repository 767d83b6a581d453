"""An agent loop on Anthropic's Messages API whose context stays small. Needs the package
`anthropic` and ANTHROPIC_API_KEY.

    python examples/anthropic_agent.py "Which path fails most often in access.log?"
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from anthropic import Anthropic

import coatcheck
from coatcheck import Session, ToolCall, ToolExecutor, toolkit

MODEL = os.environ.get("ANTHROPIC_MODEL", "claude-sonnet-5")
TURNS = 20
SYSTEM = (
    "You answer questions about files. A large result comes as a stub with a pointer (art:...): read it with "
    "get_artifact, or pass the pointer to another tool, which then gets the whole value."
)


def read_file(path: str) -> str:
    """Return the text of a file."""
    return Path(path).read_text()


def tally(text: str, column: int, containing: str = "") -> dict[str, int]:
    """Count the words in a column (from 0) of the lines that contain a text. Returns the ten most
    frequent."""
    rows = (line.split() for line in text.splitlines() if containing in line)
    return dict(Counter(row[column] for row in rows if column < len(row)).most_common(10))


TOOLS = (read_file, tally)


def agent(
    client: Anthropic, session: Session, question: str, tools: Any = TOOLS, timeout: float = 60
) -> str:
    executor = ToolExecutor(session, [*tools, *toolkit(session)], timeout=timeout)
    described: Any = [tool.as_anthropic() for tool in executor.tools]
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        with client.messages.stream(
            model=MODEL,
            max_tokens=8_000,
            system=SYSTEM,
            messages=messages,
            tools=described,
            cache_control={
                "type": "ephemeral"
            },  # what was sent never changes, so each turn is read from the cache
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        calls = [
            ToolCall.from_anthropic(block) for block in message.content if block.type == "tool_use"
        ]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        # All calls of a turn run concurrently; their results are sent together, each under its own
        # id.
        results = []
        for outcome in executor.run_all(calls, deadline=120):
            print(f"[{outcome.name}: {type(outcome).__name__}]")
            result = {
                "type": "tool_result",
                "tool_use_id": outcome.call_id,
                "content": outcome.to_model_content(),
            }
            results.append({**result, "is_error": outcome.is_error})
        messages.append({"role": "user", "content": results})
    return f"no answer after {TURNS} turns"


if __name__ == "__main__":
    with Anthropic() as client, coatcheck.open("./.coatcheck") as store:
        agent(client, store.session("anthropic-agent"), " ".join(sys.argv[1:]))
        print()
