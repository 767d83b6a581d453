"""Prompt caches of providers: breakpoints (`cache_control`), and the prefix that two prompts have
in common.

Breakpoints move from turn to turn and are not content: messages are compared and cached without
them, and those of the current turn are put back. They occur on blocks, tools and messages.
Elsewhere, for example in the arguments of a call, a key of this name is ordinary data.

Prompts are compared part by part: the tools, the system text, each message.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coatcheck.messages.cost import Cost
    from coatcheck.messages.dialects import Dialect

KEY: Final = "cache_control"
SMALLEST: Final = 1_024
"""Minimum cacheable prefix in tokens; most models silently ignore shorter ones."""
_MOST_BREAKPOINTS: Final = 4
_BLOCK_LISTS: Final = ("content", "system", "tools")
_DEEPEST: Final = 8


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a part of the prompt that a provider should cache: its path in the request (for
    Anthropic, the block that carries `cache_control`), and the number of messages and approximate
    number of tokens before it."""

    path: tuple[str | int, ...]
    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StablePrefix:
    """The beginning of a prompt or a conversation: its number of messages and its approximate
    number of tokens."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The parts of a prompt. The first `lead` of them are tools and system text."""

    parts: tuple[Cost, ...]
    lead: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a prompt compares with the previous one: the prefix they share, and the tokens of the
    previous prompt that were `rewritten`, that is, sent differently or not at all."""

    stable: StablePrefix
    rewritten: int = 0


def without_marks(value: Any) -> Any:
    """Return a message, a block or a list of them without breakpoints: the same object if it has
    none."""
    return with_marks_of(value, None)


def with_marks_of(value: Any, other: Any, depth: int = 0) -> Any:
    """Return a value with exactly the breakpoints that another value has in the same places: the
    same object if it already has just these."""
    if isinstance(value, list):
        return _list_with_marks_of(value, other if isinstance(other, list) else [], depth + 1)
    if not isinstance(value, dict) or depth > _DEEPEST:
        return value
    same = other if isinstance(other, dict) and other.get("type") == value.get("type") else {}
    marks = {KEY: same[KEY]} if KEY in same else {}
    changed: dict[str, Any] = {}
    for key, old in _block_lists(value):
        new = with_marks_of(old, same.get(key), depth + 1)
        if new is not old:
            changed[key] = new
    if not changed and not marks and KEY not in value:
        return value
    return {key: changed.get(key, one) for key, one in value.items() if key != KEY} | marks


def _list_with_marks_of(values: list[Any], others: list[Any], depth: int) -> list[Any]:
    found = []
    for value, other in zip_longest(values, others[: len(values)]):
        found.append(with_marks_of(value, other, depth))
    return found if any(map(operator.is_not, found, values)) else values


def marks_in(value: Any, depth: int = 0) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every breakpoint that is set, in order, with the path of the object that carries it."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            yield from (((at, *path), mark) for path, mark in marks_in(one, depth + 1))
    elif isinstance(value, dict) and depth <= _DEEPEST:
        if value.get(KEY):
            yield (), value[KEY]
        for key, inner in _block_lists(value):
            yield from (((key, *path), mark) for path, mark in marks_in(inner, depth + 1))


def compared(before: Sent | None, now: Sent) -> Comparison:
    """Compare a prompt with the previous one, if there was one."""
    if before is None:
        return Comparison(StablePrefix(0, 0))
    pairs = zip(before.parts, now.parts, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0].digest == pair[1].digest, pairs))
    stable = StablePrefix(max(0, same - now.lead), sum(one.tokens for one in now.parts[:same]))
    return Comparison(stable, sum(one.tokens for one in before.parts[same:]))


def breakpoints(
    dialect: Dialect,
    system: str,
    messages: Sequence[dict[str, Any]],
    sent: Sent,
    own: int,
    smallest: int,
) -> tuple[Breakpoint, ...]:
    """Choose where the cache should end: at the end, where the previous prompt ended (before the
    model's last answer; a provider looks back only a few blocks), and after the system text.
    Prefixes below `smallest` tokens are skipped, and the `own` breakpoints of the host count toward
    the provider's limit."""
    ends = (len(messages), dialect.previous_end(messages), 0)
    found: dict[tuple[str | int, ...], Breakpoint] = {}
    for number in ends[: None if dialect.writes_marks else 1]:
        path = dialect.end(system, messages[:number])
        tokens = sum(one.tokens for one in sent.parts[: sent.lead + number])
        if path is not None and tokens >= smallest:
            found.setdefault(path, Breakpoint(path, number, tokens))
    most = max(0, _MOST_BREAKPOINTS - own) if dialect.writes_marks else 1
    return tuple(sorted(list(found.values())[:most], key=lambda one: one.tokens))


def _block_lists(value: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    return [(key, value[key]) for key in _BLOCK_LISTS if isinstance(value.get(key), list)]
