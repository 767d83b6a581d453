"""An agent of Strands with and without Coatcheck. The model follows a script, so it needs no key
and no network; it needs the package `strands-agents`.

    python -m examples.strands_agent
"""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from strands import Agent, tool
from strands.models import Model
from strands.session import FileSessionManager

import coatcheck
from coatcheck.adapters.strands import Coatcheck
from coatcheck.tokens import estimate

LOG = "\n".join(
    f"2026-11-17T10:{n // 60 % 60:02}:{n % 60:02}Z INFO request {n} took {n * 7 % 900} ms"
    for n in range(4_000)
)


@tool
def run_tests() -> str:
    """Run the tests and return their log."""
    return LOG.replace("INFO request 2711", "ERROR request 2711 was refused")


@tool
def count_lines(text: str) -> str:
    """Count the lines of a text."""
    return f"{text.count(chr(10)) + 1} lines"


class ScriptedModel(Model):
    """Calls a tool, looks into its result, passes it on to another tool, and answers."""

    def __init__(self) -> None:
        self.turns = 0
        self.sent = ""

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        sent = [{"role": one["role"], "content": one["content"]} for one in messages]
        self.sent = json.dumps(sent)
        self.turns += 1
        results = [
            block["toolResult"] for one in sent for block in one["content"] if "toolResult" in block
        ]
        first = results[0]["content"][0]["text"] if results else ""
        call: tuple[str, dict[str, Any]] | None = ("run_tests", {}) if self.turns == 1 else None
        if first.startswith('{"stub"') and self.turns < 4:
            pointer = json.loads(first)["artifact"]
            steps = [
                ("get_artifact", {"pointer": pointer, "grep": "ERROR"}),
                ("count_lines", {"text": pointer}),
            ]
            call = steps[self.turns - 2]
        yield {"messageStart": {"role": "assistant"}}
        if call:
            yield {
                "contentBlockStart": {
                    "start": {"toolUse": {"name": call[0], "toolUseId": f"call_{self.turns}"}}
                }
            }
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(call[1])}}}}
        else:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": "One request was refused."}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if call else "end_turn"}}


def play(folder: Path, *plugins: Any) -> ScriptedModel:
    """Run the agent and print its results. Return the model, which has the last request."""
    model = ScriptedModel()
    agent = Agent(
        model=model,
        tools=[run_tests, count_lines],
        plugins=list(plugins),
        session_manager=FileSessionManager(session_id="monday", storage_dir=str(folder)),
        callback_handler=None,
    )
    agent("Do the tests pass?")
    for message in agent.messages:
        for block in message["content"]:
            if "toolResult" in block:
                print(f"  {block['toolResult']['content'][0]['text'][:150]!r}")
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, coatcheck.open(Path(scratch) / "store") as store:
        for title, plugins in (("without Coatcheck", []), ("with it", [Coatcheck(store)])):
            print(title)
            folder = Path(scratch) / title
            model = play(folder, *plugins)
            saved = sum(path.stat().st_size for path in folder.rglob("*.json"))
            print(
                f"  last request: {len(model.sent):,} characters, about {estimate(model.sent):,} tokens"
            )
            print(f"  saved session: {saved:,} bytes")


if __name__ == "__main__":
    main()
