"""Checks of arguments. Each raises `InvalidArgument` that names the argument, says what it takes and what was given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeGuard

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

LARGEST: Final = (1 << 63) - 1
"""The largest integer that every catalog can store."""


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether this is an integer from `least` to `LARGEST`. A bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def is_seconds(value: object) -> TypeGuard[float]:
    """Whether this is a number of seconds: 0 or more, not NaN, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def whole(value: object, what: str, *, least: int = 0, optional: bool = False) -> None:
    if not is_whole(value, least) and not (optional and value is None):
        raise _wrong(value, what, f"an integer of at least {least}", optional)


def seconds(value: object, what: str, *, optional: bool = False) -> None:
    if not is_seconds(value) and not (optional and value is None):
        raise _wrong(value, what, "a non-negative number of seconds", optional)


def one_of(value: object, what: str, choices: Collection[str], *, optional: bool = False) -> None:
    if not (isinstance(value, str) and value in choices) and not (optional and value is None):
        raise _wrong(value, what, "one of " + ", ".join(map(repr, choices)), optional)


def valid(is_valid: bool, value: object, what: str, takes: str) -> None:
    """Check what only the caller can judge."""
    if not is_valid:
        raise _wrong(value, what, takes, False)


def _wrong(value: object, what: str, takes: str, optional: bool) -> InvalidArgument:
    given = clip(value) if isinstance(value, str) else clip(repr(value)).strip("'\"")
    return InvalidArgument(f"{what} must be {takes}{' or None' if optional else ''}, got {given}")
