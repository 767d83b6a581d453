"""Run programs without a store, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from coatcheck.errors import ProgramFailed
from coatcheck.programs.engine import Limits, Program, run
from coatcheck.programs.monty import Call

NOW = datetime(2026, 11, 18, 12, 30, tzinfo=UTC)


class Functions:
    """A host with plain functions. The names in `later` give awaitables."""

    def __init__(
        self, functions: Mapping[str, Callable[..., object]] = {}, *, later: Sequence[str] = ()
    ) -> None:
        self.functions = functions
        self.names = frozenset(functions)
        self.later = frozenset(later)
        self.batches: list[int] = []

    def call(self, call: Call) -> object:
        return self.functions[call.name](*call.args, **call.kwargs)

    def call_all(self, calls: Sequence[Call]) -> Sequence[object]:
        self.batches.append(len(calls))
        return [self.call(call) for call in calls]


def printed(
    source: str,
    host: Functions | None = None,
    *,
    limits: Limits | None = None,
    deadline: float | None = None,
    **inputs: object,
) -> str:
    """What a program prints, without the last line feed."""
    program = Program(source, NOW, inputs)
    return run(program, host or Functions(), limits, deadline=deadline).removesuffix("\n")


def failure(
    source: str,
    host: Functions | None = None,
    *,
    limits: Limits | None = None,
    deadline: float | None = None,
) -> ProgramFailed:
    """The error with which a program ends."""
    try:
        text = printed(source, host, limits=limits, deadline=deadline)
    except ProgramFailed as error:
        return error
    raise AssertionError(f"the program printed {text!r}")
