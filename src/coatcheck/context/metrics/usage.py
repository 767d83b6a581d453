"""What providers say of the tokens that they counted: OpenAI's two APIs and Anthropic's, as dicts or as objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_LARGEST: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call: all that went in (cached ones included), what came out, and what of the input the provider
    read from its cache or wrote to it. None where it did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None

    def cost(self, cached: float, written: float) -> int | None:
        """What the input costs, in tokens that are not cached, by the prices of cached and of written ones."""
        if self.input_tokens is None or self.cached_tokens is None:
            return None
        read, wrote = self.cached_tokens, self.cache_write_tokens or 0
        return round(max(0, self.input_tokens - read - wrote) + read * cached + wrote * written)


def usage_of(said: object) -> Usage:
    """The usage in a provider's answer, or in its `usage` part. Nothing is raised: what is odd was not said."""
    if said is None:
        return Usage()
    inner = _held(said, "usage")
    said = said if inner is None else inner
    read, written = _number(said, "cache_read_input_tokens"), _number(said, "cache_creation_input_tokens")
    if read is not None or written is not None:  # Anthropic counts its cache apart
        fresh = _number(said, "input_tokens")
        total = None if fresh is None else fresh + (read or 0) + (written or 0)
        return Usage(total, _number(said, "output_tokens"), read, written)
    for sent, got, about in (
        ("input_tokens", "output_tokens", "input_tokens_details"),
        ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ):
        tokens = _number(said, sent)
        if tokens is not None:
            details = _held(said, about)
            cached = None if details is None else _number(details, "cached_tokens")
            return Usage(tokens, _number(said, got), cached, None)
    return Usage(output_tokens=_number(said, "output_tokens"))


def _held(said: object, name: str) -> Any:
    return said.get(name) if isinstance(said, Mapping) else getattr(said, name, None)


def _number(said: object, name: str) -> int | None:
    value = _held(said, name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
    return value if is_count else None
