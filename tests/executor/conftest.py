"""A session to run tools for. Tools wait for events, never for a clock; tests of deadlines use
short ones."""

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
"""A deadline that is not meant to pass: a call that waits this long is stuck."""


def after_it_began(attempt: Callable[[float], Answer | None]) -> Answer:
    """Return the result of `attempt` for a deadline that passes only after a tool has begun. If the
    deadline was too short for the machine, `attempt` returns None and is called again with a longer
    one."""
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
    """Import everything first, so that imports do not use up a deadline."""

    def tool(x: int) -> str:
        return "x" * 20_000

    with coatcheck.open("memory:") as store:
        assert (
            ToolExecutor(store.session("s"), [tool]).run(ToolCall("c", "tool", {"x": 1})).ref
            is not None
        )
