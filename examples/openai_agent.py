"""An agent loop on OpenAI's SDK whose context stays small. Needs the package `openai` and
OPENAI_API_KEY.

    python examples/openai_agent.py "Which path fails most often in access.log?"

`agent` uses chat completions, `agent_on_responses` (with `--responses`) the Responses API.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from openai import OpenAI

import coatcheck
from coatcheck import Session, ToolCall, ToolExecutor, toolkit

MODEL = os.environ.get("OPENAI_MODEL", "gpt-5.5")
TURNS = 20
SYSTEM = (
    "You answer questions about files. A large result comes as a stub with a pointer (art:...): read it with "
    "get_artifact, or pass the pointer to another tool, which then gets the whole value."
)
# The fields that the API accepts back of its own message; the SDK's object has more.
SENT_BACK: Any = {
    "role": True,
    "content": True,
    "tool_calls": {"__all__": {"id", "type", "function"}},
}


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
    client: OpenAI, session: Session, question: str, tools: Any = TOOLS, timeout: float = 60
) -> str:
    executor = ToolExecutor(session, [*tools, *toolkit(session)], timeout=timeout)
    described: Any = [tool.as_openai() for tool in executor.tools]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    for _ in range(TURNS):
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=described
        ) as stream:
            for event in stream:
                if event.type == "content.delta":
                    print(event.delta, end="", flush=True)
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(include=SENT_BACK, exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        # All calls of a turn run concurrently; each gets a result under its own id, even if it
        # failed.
        outcomes = executor.run_all(
            [ToolCall.from_openai(call) for call in message.tool_calls], deadline=120
        )
        for outcome in outcomes:
            print(f"[{outcome.name}: {type(outcome).__name__}]")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": outcome.call_id,
                    "content": outcome.to_model_content(),
                }
            )
    return f"no answer after {TURNS} turns"


def agent_on_responses(
    client: OpenAI, session: Session, question: str, tools: Any = TOOLS, timeout: float = 60
) -> str:
    executor = ToolExecutor(session, [*tools, *toolkit(session)], timeout=timeout)
    described: Any = [tool.as_openai_responses() for tool in executor.tools]
    items: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        output: list[Any] = []
        # Nothing is stored at the provider, so reasoning comes back encrypted and is sent again
        # with the rest.
        stream = client.responses.create(
            model=MODEL, instructions=SYSTEM, input=items, tools=described, store=False, stream=True,
            include=["reasoning.encrypted_content"],
        )  # fmt: skip
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.completed":
                output = [item.to_dict() for item in event.response.output]
        items += output
        calls = [ToolCall.from_openai(item) for item in output if item["type"] == "function_call"]
        if not calls:
            return "".join(
                part["text"]
                for item in output
                if item["type"] == "message"
                for part in item["content"]
            )
        for outcome in executor.run_all(calls, deadline=120):
            print(f"[{outcome.name}: {type(outcome).__name__}]")
            text = outcome.to_model_content()
            items.append(
                {"type": "function_call_output", "call_id": outcome.call_id, "output": text}
            )
    return f"no answer after {TURNS} turns"


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--responses"]
    run = agent_on_responses if "--responses" in sys.argv else agent
    with OpenAI() as client, coatcheck.open("./.coatcheck") as store:
        run(client, store.session("openai-agent"), " ".join(words))
        print()
