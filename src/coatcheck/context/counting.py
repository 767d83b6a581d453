"""Counts that can be trusted, or none: whatever a host's tokenizer does, a budget is never kept by accident.

Every check of this package counts through `counted`. Its answer None means "could not be counted", and a budget that
cannot be counted is a budget that is violated.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from operator import index
from typing import Final

from coatcheck.tokens import TokenCounter, estimate

__all__ = ["Tally", "counted"]

_REMEMBERED: Final = 65_536


def counted(count: TokenCounter, text: str) -> int | None:
    """The tokens of a text by this counter, rounded up; None where the counter raises, or answers what cannot be a
    count: None, a bool, what is no number, not a number, infinite, negative, or 0 for a text that is not empty."""
    try:
        found: object = count(text)
        if isinstance(found, bool):
            return None
        tokens = math.ceil(found) if isinstance(found, float) else index(found)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever a host's counter raises: no count is no count
        return None
    return None if tokens < 0 or (tokens == 0 and text) else tokens


class Tally:
    """A counter that remembers what it counted, by digest: a conversation is counted once, not once a turn.

    What could not be counted is not remembered. May be shared between threads: the worst is a text counted twice."""

    __slots__ = ("_count", "_known")

    def __init__(self, count: TokenCounter = estimate) -> None:
        self._count = count
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def tokens(self, text: str) -> int | None:
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            return known
        tokens = counted(self._count, text)
        if tokens is not None:
            self._known[key] = tokens
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return tokens
