"""Under durable execution, everything that needs the store runs as a step of the engine."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dbos import DBOS
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability

import coatcheck
from coatcheck.adapters.pydantic_ai import Coatcheck
from tests.adapters.pydantic_ai.drivers import model_of
from tests.adapters.suite import LOG, ScriptedModel, fetch_log, pointer_in


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "system.sqlite"
    DBOS(
        config={
            "name": "coatcheck-tests",
            "system_database_url": f"sqlite:///{path}",
            "run_admin_server": False,
        }
    )
    yield path
    DBOS.destroy()


@pytest.mark.skipif(
    sys.version_info >= (3, 13) and sqlite3.sqlite_version_info < (3, 42),
    reason="DBOS does not start with an older SQLite than 3.42 on Python 3.13",
)
def test_reading_and_storing_are_steps_of_the_workflow(database: Path, tmp_path: Path) -> None:
    received: list[str] = []

    def count(text: str) -> str:
        """Count the lines of a text."""
        received.append(text)
        return f"{len(text.splitlines())} lines"

    model = ScriptedModel(
        [("fetch_log", {})],
        lambda results: [
            ("get_artifact", {"pointer": pointer_in(results[0].text), "grep": "ERROR"})
        ],
        lambda results: [("count", {"text": pointer_in(results[0].text)})],
    )
    with coatcheck.open(tmp_path / "store") as store:
        capabilities = [DBOSDurability(), Coatcheck(store)]
        agent = Agent(
            model_of(model), name="reader", tools=[fetch_log, count], capabilities=capabilities
        )

        @DBOS.workflow()
        async def answer(question: str) -> str:
            return str((await agent.run(question, conversation_id="c")).output)

        async def run() -> str:
            DBOS.launch()
            return str(await answer("Begin."))

        assert asyncio.run(run()) == "Done."
    assert received == [LOG]
    assert "code 4711" in model.results[1].text
    steps = sqlite3.connect(database).execute(
        "select function_name from operation_outputs order by function_id"
    )
    names = [name.rpartition(".")[2] for (name,) in steps]
    assert [name for name in names if name != "request"] == ["slim", "answer", "resolve"]
