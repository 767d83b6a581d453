"""What the parts of a prompt cost, remembered: a conversation is counted once, not once a turn."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from coatcheck.context.cache_marks import KEY, bare
from coatcheck.errors import LimitExceeded
from coatcheck.tokens import TokenCounter, counted, estimate
from coatcheck.transcript.weight import weigh

__all__ = ["Tally", "Weighed"]

_REMEMBERED: Final = 65_536
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Weighed(NamedTuple):
    """A part of a prompt: what it is known by, and what it costs."""

    digest: bytes
    tokens: int


class Tally:
    """A counter that remembers what it counted, by digest.

    What could not be counted is not remembered. May be shared between threads: the worst is a text counted twice."""

    __slots__ = ("_count", "_known")

    def __init__(self, count: TokenCounter = estimate) -> None:
        self._count = count
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def tokens(self, text: str) -> int | None:
        key = _digest(text)
        known = self._known.get(key)
        return self._noted(key, self._counted(text)) if known is None else known

    def weighed(self, message: dict[str, Any]) -> Weighed | None:
        """A message, whatever cache breakpoints a host has set in it: those move from turn to turn, and are no
        content. None where it cannot be counted; raises what `json` raises where it is no JSON."""
        text = _ENCODER.encode(message)
        if f'"{KEY}"' in text and (plain := bare(message)) is not message:
            message, text = plain, _ENCODER.encode(plain)
        digest = _digest("message " + text)
        known = self._known.get(digest)
        if known is None:
            try:
                known = self._noted(digest, weigh(message, self._counted))  # type: ignore[arg-type]
            except LimitExceeded:
                return None
        return None if known is None else Weighed(digest, known)

    def _counted(self, text: str) -> int | None:
        return counted(self._count, text)

    def _noted(self, key: bytes, tokens: int | None) -> int | None:
        if tokens is not None:
            self._known[key] = tokens
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return tokens


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
