"""The recipes for smolagents in docs/recipes.md work as printed."""

from __future__ import annotations

import json

from examples.standins import Reply
from tests.adapters import recipe


def test_the_recipe_for_tool_calling_agents_works() -> None:
    last = recipe.calls("final_answer", answer="There are 3,501 lines.")
    recipe.check(recipe.run("smolagents", last=last), most=12_000)


def code(*lines: str) -> Reply:
    return Reply("\n".join(["Thought: I go on.", "<code>", *lines, "</code>"]))


def test_the_recipe_for_code_agents_works() -> None:
    steps = [
        code("text = fetch_log()", "print(text)"),
        lambda text: code(
            f'print(get_artifact(pointer="{recipe.pointer(text, 0)}", grep="ERROR"))'
        ),
    ]
    requests = recipe.run(
        "smolagents: code agents", steps=steps, last=code("final_answer(count_lines(text))")
    )
    assert recipe.received == [recipe.LOG]  # the variable of the agent has the whole value
    sent = json.dumps(requests[-1])
    assert "code 4711" in sent
    assert recipe.LOG[1_000:1_500] not in sent.replace("\\n", "\n")
