"""`@session.offload` and `session.materialize` beyond the plain case."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coatcheck import Session, Store, ToolCall, ToolExecutor

LOG = "".join(f"line {number} of a log that nobody wants in a prompt\n" for number in range(5_000))


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def test_an_object_whose_call_is_a_coroutine_is_awaited(session: Session) -> None:
    class Search:
        async def __call__(self, q: str) -> str:
            return LOG

    found = asyncio.run(session.offload(Search(), tool="search")("x"))
    assert session.get(json.loads(found)["artifact"]) == LOG
    assert session.list()[0].tool == "search"


def test_methods_keep_their_object_and_static_ones_their_arguments(session: Session) -> None:
    class Reader:
        def __init__(self, text: str) -> None:
            self.text = text

        @session.offload
        def read(self, times: int) -> str:
            return self.text * times

        @staticmethod
        @session.offload(tool="static")
        def repeat(text: str) -> str:
            return text

    assert Reader("short").read(2) == "shortshort"
    assert session.get(json.loads(Reader(LOG).read(2))["artifact"]) == LOG * 2
    assert session.get(json.loads(Reader.repeat(LOG))["artifact"]) == LOG


def test_what_a_function_raises_is_raised(session: Session) -> None:
    @session.offload
    def fail() -> str:
        raise LookupError("nothing there")

    with pytest.raises(LookupError):
        fail()


def test_files_that_calls_took_along_are_not_remembered_for_ever(session: Session) -> None:
    def size(file: Path) -> int:
        return file.stat().st_size

    executor = ToolExecutor(session, [size])
    call = ToolCall("c", "size", {"file": session.put("four").pointer})
    assert {executor.run(call).text for _ in range(200)} == {"4"}
    assert len(session._parts.files._made["s"]) < 100
