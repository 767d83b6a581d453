"""What two prompts of a conversation have in common, and where a provider should cache: the beginning that is the same.

A prompt is compared part by part: the tools, the system text, each message. The tail is no part of it: it is made anew
for every turn, and stands behind all that could be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coatcheck.context.dialects import MOST_BREAKPOINTS, Breakpoint, Dialect
from coatcheck.context.weights import Weighed
from coatcheck.transcript.formats import Message

__all__ = ["Prefix", "Sent", "Standing", "breakpoints", "compared"]

SMALLEST: Final = 1_024
"""Tokens: what is shorter, most models cache silently not at all."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt: so many messages, and about so many tokens with the tools and the system text."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What a prompt had before its tail, part by part; how many of them, the first, are tools and system text."""

    parts: tuple[Weighed, ...]
    lead: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How a prompt compares with the one before it. `rewritten` are the tokens that had been sent before the tail and
    were not sent again the same."""

    stable: Prefix
    rewritten: int = 0


def compared(before: Sent | None, now: Sent) -> Standing:
    if before is None:
        return Standing(Prefix(0, 0))
    same = 0
    for old, new in zip(before.parts, now.parts, strict=False):
        if old.digest != new.digest:
            break
        same += 1
    stable = Prefix(max(0, same - now.lead), sum(one.tokens for one in now.parts[:same]))
    return Standing(stable, sum(one.tokens for one in before.parts[same:]))


def breakpoints(
    dialect: Dialect, system: str, messages: Sequence[Message], sent: Sent, stable: Prefix, own: int, smallest: int
) -> tuple[Breakpoint, ...]:
    """Where the cache should end: before the tail, where the prompt before ended (a provider looks back only so many
    blocks), and behind the system text. Those that a host has set itself count, and what is too short is left out."""
    ends = (len(messages), stable.messages, 0)
    found: dict[tuple[str | int, ...], Breakpoint] = {}
    for number in ends[: None if dialect.writes_marks else 1]:
        path = dialect.end(system, messages[:number])
        tokens = sum(one.tokens for one in sent.parts[: sent.lead + number])
        if path is not None and tokens >= smallest:
            found.setdefault(path, Breakpoint(path, number, tokens))
    most = max(0, MOST_BREAKPOINTS - own) if dialect.writes_marks else 1
    return tuple(sorted(list(found.values())[:most], key=lambda one: one.tokens))
