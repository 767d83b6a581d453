"""Plain functions as tools, for any framework that takes functions: `tools=slim([…], session)`.

The agent here is a loop of thirty lines with a scripted model, so that it runs without a network.
It describes functions by their signatures and calls them, as frameworks do. Run it with `python -m
examples.functions_agent`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import coatcheck
from coatcheck.adapters.functions import slim
from coatcheck.tokens import estimate
from examples.shop import fetch_log

Function = Callable[..., Any]
Step = Callable[[list[str]], tuple[str, dict[str, Any]] | str]
"""What the model does next, given the results so far: a call, or its final answer."""


def count_words(text: str, word: str) -> int:
    """Count the lines of a text that contain a word."""
    return sum(word in line for line in text.splitlines())


def run(tools: Sequence[Function], script: Sequence[Step]) -> tuple[str, int]:
    """Run the agent, and return its answer and the tokens of its largest request."""
    known = {tool.__name__: tool for tool in tools}
    described: list[str] = []
    for name, tool in known.items():
        signature = str(inspect.signature(tool)).replace(
            "typing.", ""
        )  # older Pythons write the module too
        described.append(f"{name}{signature}: {inspect.getdoc(tool)}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many captures timed out?"}]
    results: list[str] = []
    largest = 0
    for step in script:
        largest = max(largest, estimate(json.dumps({"tools": described, "messages": messages})))
        answer = step(results)
        if isinstance(answer, str):
            return answer, largest
        name, arguments = answer
        results.append(str(known[name](**arguments)))
        messages += [
            {"role": "assistant", "call": name, **arguments},
            {"role": "tool", "content": results[-1]},
        ]
    raise RuntimeError("the script has no answer")


SCRIPT: tuple[Step, ...] = (
    lambda results: ("fetch_log", {"service": "payments", "day": "2026-03-01"}),
    lambda results: ("count_words", {"text": _text(results[0]), "word": "timed out"}),
    lambda results: f"{results[-1]} captures timed out.",
)


def _text(result: str) -> str:
    """Return what the model passes on: the pointer of a stub, or else the text itself."""
    return str(json.loads(result)["artifact"]) if result.startswith('{"stub"') else result


def main() -> None:
    tools = [fetch_log, count_words]
    answer, largest = run(tools, SCRIPT)
    print(f"without Coatcheck: {answer} The largest request has about {largest:,} tokens.")
    with coatcheck.open("memory:") as store:
        answer, largest = run(slim(tools, store.session("shop")), SCRIPT)
    print(f"with Coatcheck:    {answer} The largest request has about {largest:,} tokens.")


if __name__ == "__main__":
    main()
