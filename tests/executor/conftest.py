"""A session to run tools for. Tools wait for events, never for a clock; tests of deadlines use short ones."""

from __future__ import annotations

import pytest

import coatcheck
from coatcheck import Session, Store
from coatcheck.executor import ToolCall, ToolExecutor

SOON = 0.05
"""A deadline that is meant to pass."""

ENOUGH = 0.5
"""One that is meant to pass, but not before a tool has begun."""

LONG = 60.0
"""One that is not: whatever waits so long is stuck."""


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


@pytest.fixture(scope="session", autouse=True)
def _everything_is_imported() -> None:
    """So that no deadline passes over imports."""

    def tool(x: int) -> str:
        return "x" * 20_000

    with coatcheck.open("memory:") as store:
        assert ToolExecutor(store.session("s"), [tool]).run(ToolCall("c", "tool", {"x": 1})).ref is not None
