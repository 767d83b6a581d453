"""Less common uses of `@session.offload` and `session.materialize`."""

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


def test_an_object_with_an_async_call_method_is_awaited(session: Session) -> None:
    class Search:
        async def __call__(self, q: str) -> str:
            return LOG

    found = asyncio.run(session.offload(Search(), tool="search")("x"))
    assert session.get(json.loads(found)["artifact"]) == LOG
    assert session.list()[0].tool == "search"


def test_methods_keep_self_and_static_methods_keep_their_arguments(session: Session) -> None:
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


def test_an_exception_of_an_offloaded_function_is_raised(session: Session) -> None:
    @session.offload
    def fail() -> str:
        raise LookupError("nothing there")

    with pytest.raises(LookupError):
        fail()


def test_files_passed_to_calls_are_not_remembered_forever(session: Session) -> None:
    def size(file: Path) -> int:
        return file.stat().st_size

    executor = ToolExecutor(session, [size])
    call = ToolCall("c", "size", {"file": session.put("four").pointer})
    assert {executor.run(call).text for _ in range(200)} == {"4"}
    assert len(session._parts.files._made["s"]) < 100
