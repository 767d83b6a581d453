"""The code of docs/langchain.md runs, and so does the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

import coatcheck
from coatcheck.adapters.langchain import Coatcheck
from examples import langchain_agent
from tests.adapters.langchain.driver import ScriptedChat
from tests.adapters.suite import ScriptedModel, fetch_log

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "langchain.md").read_text()


def test_the_code_of_the_page_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with coatcheck.open("memory:") as store:
        names: dict[str, Any] = {
            "create_agent": create_agent,
            "store": store,
            "checkpointer": InMemorySaver(),
        }
        names |= {"model": ScriptedChat(script=ScriptedModel()), "tools": [fetch_log]}
        for block in blocks:
            exec(compile(block, "<page>", "exec"), names)  # noqa: S102 - our own page
        done = names["agent"].invoke(
            {"messages": [("user", "Begin.")]}, {"configurable": {"thread_id": "case-17"}}
        )
        assert done["messages"][-1].text == "Done."


def test_the_example_prints_the_figures_of_the_page() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.langchain_agent"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    printed = [line.split(":")[1].split() for line in done.stdout.splitlines()[:2]]
    rows = [
        re.findall(r"[\d,]+", row)
        for row in re.findall(r"^\| with(?:out)? (.*)$", PAGE, re.MULTILINE)
    ]
    for one, other in zip(
        printed, rows, strict=True
    ):  # the marks on answers differ from store to store
        assert [int(n.replace(",", "")) for n in one] == pytest.approx(
            [int(n.replace(",", "")) for n in other], rel=0.02
        )
    assert done.stdout.splitlines()[-1] == langchain_agent.FINAL.text


def test_the_agent_of_the_example_answers_from_small_requests() -> None:
    with coatcheck.open("memory:") as store:
        sent, saved, answer = langchain_agent.run(langchain_agent.WITH, [Coatcheck(store)])
    assert answer == langchain_agent.FINAL.text
    assert max(sent) < 1_500
    assert saved < len(langchain_agent.LOG) / 4
