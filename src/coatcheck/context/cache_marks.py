"""`cache_control`: where a host wants the provider's cache to end. It stands on blocks, on tools and on messages.

Marks move from turn to turn and are no content: what is remembered of a message is remembered without them, and those
of the turn are put back. Elsewhere, as in what a tool is called with, a key of this name is data like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

__all__ = ["KEY", "bare", "marked", "marks_in"]

KEY: Final = "cache_control"
_HOLD_BLOCKS: Final = ("content", "system", "tools")
_DEEPEST: Final = 8


def bare(value: Any, depth: int = 0) -> Any:
    """A message, a block or a list of them without marks; the same object where there are none."""
    if isinstance(value, list):
        parts = [bare(one, depth + 1) for one in value]
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if not isinstance(value, dict) or depth > _DEEPEST:
        return value
    inner = {key: new for key, held in _held(value) if (new := bare(held, depth + 1)) is not held}
    if KEY not in value and not inner:
        return value
    return {key: inner.get(key, one) for key, one in value.items() if key != KEY}


def marked(value: Any, like: Any, depth: int = 0) -> Any:
    """A value with the marks that another has in the same places, as far as it has those, and no others."""
    if isinstance(value, list):
        others = like if isinstance(like, list) else []
        return [marked(one, others[at] if at < len(others) else None, depth + 1) for at, one in enumerate(value)]
    if not isinstance(value, dict) or depth > _DEEPEST:
        return value
    same = like if isinstance(like, dict) and like.get("type") == value.get("type") else {}
    new = {key: one for key, one in value.items() if key != KEY}
    new |= {key: marked(held, same.get(key), depth + 1) for key, held in _held(value)}
    return new | {KEY: same[KEY]} if KEY in same else new


def marks_in(value: Any, depth: int = 0) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every mark that is set, in order, with the path of what carries it."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            yield from (((at, *path), mark) for path, mark in marks_in(one, depth + 1))
    elif isinstance(value, dict) and depth <= _DEEPEST:
        if value.get(KEY):
            yield (), value[KEY]
        for key, held in _held(value):
            yield from (((key, *path), mark) for path, mark in marks_in(held, depth + 1))


def _held(value: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [(key, held) for key in _HOLD_BLOCKS if isinstance(held := value.get(key), list)]
