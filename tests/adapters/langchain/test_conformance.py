"""Slimmed checkpointers pass LangGraph's conformance tests, and our tools those of
`langchain-tests`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from langchain_core.tools import BaseTool
from langchain_tests.integration_tests import ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

import coatcheck
from coatcheck import Store
from coatcheck.adapters.langchain import Coatcheck
from coatcheck.adapters.langgraph import slim
from tests.adapters.langchain import outermost


@pytest.fixture
def store() -> Any:
    with coatcheck.open("memory:") as store:
        yield store


class Padded(JsonPlusSerializer):
    """Adds a long text to every value, so that none is small. The suite itself writes only small
    ones."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        kind, data = super().dumps_typed({"pad": f"{obj!r:<9999}", "value": obj})
        return kind, data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return super().loads_typed(data)["value"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_slimmed_checkpointer_passes_the_tests_of_langgraph(store: Store, kind: str) -> None:
    async def make() -> AsyncIterator[Any]:
        if kind == "memory":
            yield slim(InMemorySaver(serde=Padded()), store)
        else:
            async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
                saver.serde = Padded()
                yield slim(saver, store)

    report = asyncio.run(validate(checkpointer_test(name=kind)(make)))
    assert {name: one.failures for name, one in report.results.items() if one.failures} == {}
    assert report.passed_all_base()
    assert sum(one.tests_passed for one in report.results.values()) >= 58
    assert store.stats().artifacts > 100


STORE = coatcheck.open("memory:")
TOOLS = {tool.name: tool for tool in Coatcheck(STORE.session("tools")).tools}


class _OurTool:
    """What the suites need to know about one of our tools."""

    name = ""
    example: ClassVar[dict[str, Any]] = {}

    @property
    def tool_constructor(self) -> BaseTool:
        return TOOLS[self.name]

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return self.example


class TestGetUnit(_OurTool, ToolsUnitTests):
    name, example = "get_artifact", {"pointer": "art:000000000000"}


@pytest.mark.asyncio
class TestGet(_OurTool, ToolsIntegrationTests):
    name, example = "get_artifact", {"pointer": "art:000000000000"}


class TestListUnit(_OurTool, ToolsUnitTests):
    name, example = "list_artifacts", {"query": "plan"}


@pytest.mark.asyncio
class TestList(_OurTool, ToolsIntegrationTests):
    name, example = "list_artifacts", {"query": "plan"}


class TestStoreUnit(_OurTool, ToolsUnitTests):
    name, example = "store_artifact", {"name": "plan", "value": "first, second"}


@pytest.mark.asyncio
class TestStore(_OurTool, ToolsIntegrationTests):
    name, example = "store_artifact", {"name": "plan", "value": "first, second"}


@pytest.mark.skipif(
    "COATCHECK_LANGCHAIN_SOURCE" not in os.environ, reason="needs the source archive of LangChain"
)
def test_the_tests_of_langchain_pass_with_ours_as_with_an_idle_middleware() -> None:
    assert outermost.main(os.environ["COATCHECK_LANGCHAIN_SOURCE"]) == 0
