"""Checks of arguments. Each raises `InvalidArgument` that names the argument, says what it takes
and what was given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeGuard

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip, is_encodable

NAME_LIMIT: Final = 65_536
LARGEST: Final = (1 << 63) - 1
"""The largest integer that every catalog can store."""


def check_name(name: object, what: str = "name") -> None:
    """Check a name, an id or a label: any text that UTF-8 can encode, from 1 to 65,536
    characters."""
    if not isinstance(name, str):
        raise InvalidArgument(f"the {what} must be a string, got a {type(name).__name__}")
    if not 0 < len(name) <= NAME_LIMIT:
        raise InvalidArgument(f"the {what} must have 1 to {NAME_LIMIT} characters, got {len(name)}")
    if not name.isascii() and not is_encodable(name):
        raise InvalidArgument(
            f"the {what} {clip(name)} contains a lone surrogate, which UTF-8 cannot encode"
        )


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether this is an integer from `least` to `LARGEST`. A bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def is_seconds(value: object) -> TypeGuard[float]:
    """Whether this is a number of seconds: 0 or more, not NaN, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def whole(value: object, what: str, *, least: int = 0, optional: bool = False) -> None:
    if not (optional and value is None) and not is_whole(value, least):
        raise _wrong(value, what, f"an integer of at least {least}", optional)


def share(value: object, what: str) -> None:
    """Check a part of a whole: above 0, at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise _wrong(value, what, "above 0 and at most 1", False)


def whole_text(text: str, what: str, *, least: int = 0, most: int = LARGEST) -> int:
    """Return the integer that a text contains. The error does not repeat the text: it may be part
    of a url."""
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most):
        raise InvalidArgument(f"{what} must be an integer from {least} to {most}")
    return int(text)


def seconds(value: object, what: str, *, optional: bool = False) -> None:
    if not (optional and value is None) and not is_seconds(value):
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
