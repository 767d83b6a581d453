"""Programs on the command line, for async callers, and through MCP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import aio, programs
from tests.mcp.speaking import Speaker, environment
from tests.test_cli import answer, call

ORDERS = [{"id": n, "total": n * 10} for n in range(1, 301)]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("COATCHECK_STORE", str(folder))
    with coatcheck.open(folder) as opened:
        opened.session("default").put(ORDERS, name="orders")
    return folder


def test_a_program_on_the_command_line_reads_an_artifact(store: Path) -> None:
    assert answer("read", "orders", "--code", "sum(o['total'] for o in data)") == "451500\n"
    assert answer("read", "orders", "--code", "-", stdin=b"print(len(data))") == "300\n"


def test_a_program_in_a_file_opens_what_it_names(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("len(artifact('orders'))\n")
    assert answer("program", str(file)) == "300\n"
    shown = json.loads(answer("program", str(file), "--json"))
    assert shown == {"text": "300", "shown": "the program's output, 3 characters", "derived": None}


def test_the_command_line_prints_what_a_failing_program_printed(store: Path) -> None:
    done = call("read", "orders", "--code", "print('one')\n1 / 0")
    assert (done.exit_code, done.stdout) == (2, "one\n")
    assert "ZeroDivisionError in line 2: division by zero" in done.stderr


def test_output_over_a_page_names_the_command_that_reads_on(store: Path) -> None:
    done = call("read", "orders", "--code", "for o in data: print(o)", "--max-chars", "1000")
    assert "to read on: coatcheck read art:" in done.stderr


def test_an_async_caller_awaits_a_program(store: Path) -> None:
    async def read() -> str:
        async with await aio.open(str(store)) as opened:
            session = await opened.session("default")
            return (await session.read("orders", code="len(data)")).text

    assert asyncio.run(read()) == "300"


def test_a_model_runs_a_program_through_the_mcp_server(store: Path) -> None:
    command = [sys.executable, "-m", "coatcheck", "mcp", "--session", "default"]
    arguments = {"pointer": "orders", "code": "max(data, key=lambda o: o['total'])['id']"}
    with Speaker(command, environment(store)) as speaker:
        speaker.begin()
        result = speaker.ask("tools/call", {"name": "get_artifact", "arguments": arguments})
    assert result["result"]["content"][0]["text"].splitlines()[1] == "300"
