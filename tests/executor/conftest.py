"""A session to run tools for. Tools wait for events, never for a clock; tests of deadlines use short ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

import coatcheck
from coatcheck import Session, Store
from coatcheck.executor import ToolCall, ToolExecutor

Answer = TypeVar("Answer")

SOON = 0.05
"""A deadline that is meant to pass."""

LONG = 60.0
"""One that is not: whatever waits so long is stuck."""


def after_it_began(attempt: Callable[[float], Answer | None]) -> Answer:
    """Return what `attempt` returns for a deadline that is meant to pass, but not before a tool has begun. With less
    time than that, which depends on the machine, an attempt returns None, and the next one has more."""
    for seconds in (SOON, 0.5, 5.0, LONG / 2):
        answer = attempt(seconds)
        if answer is not None:
            return answer
    raise AssertionError(f"no tool began within {LONG / 2} s")


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
