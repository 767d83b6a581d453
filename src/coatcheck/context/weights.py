"""What the parts of a prompt cost, remembered: a conversation is counted once, not once a turn.

A picture that a message only names, by its address or an id, costs what providers charge for one at most. How long a
document is that it only names, nobody can tell from the message: it cannot be counted, unless the host says.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from coatcheck.context.cache_marks import KEY, bare
from coatcheck.errors import LimitExceeded
from coatcheck.externalize import blocks
from coatcheck.tokens import TokenCounter, counted, estimate
from coatcheck.transcript.weight import IMAGE, weigh

__all__ = ["Tally", "Weighed", "named_documents"]

_REMEMBERED: Final = 65_536
_NAMING: Final = ('"type":"url"', '"type":"file"', '"image_url"', '"file_id"', '"file_url"', '"type":"item_reference"')
_PICTURES: Final = frozenset({"image", "image_url", "input_image"})
_DEEPEST: Final = 8
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Weighed(NamedTuple):
    """A part of a prompt: what it is known by, and what it costs."""

    digest: bytes
    tokens: int


class Tally:
    """A counter that remembers what it counted, by digest.

    `document_tokens` is what a document counts that a message only names; None: such a message cannot be counted. What
    could not be counted is not remembered. May be shared between threads: the worst is a text counted twice."""

    __slots__ = ("_count", "_document", "_known")

    def __init__(self, count: TokenCounter = estimate, *, document_tokens: int | None = None) -> None:
        self._count = count
        self._document = document_tokens
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def tokens(self, text: str) -> int | None:
        """The tokens of a text; where it is the JSON of a message, with what that only names."""
        key = _digest(text)
        known = self._known.get(key)
        return self._noted(key, self._counted(text)) if known is None else known

    def weighed(self, message: dict[str, Any]) -> Weighed | None:
        """A message that can be counted, None where it cannot be. Raises what `json` raises where it is no JSON."""
        digest, tokens = self.known(message)
        return None if tokens is None else Weighed(digest, tokens)

    def known(self, message: dict[str, Any]) -> tuple[bytes, int | None]:
        """What a message is known by, whatever cache breakpoints a host has set in it (those move from turn to turn,
        and are no content), and what it costs: None where it cannot be counted."""
        text = _ENCODER.encode(message)
        if f'"{KEY}"' in text and (plain := bare(message)) is not message:
            message, text = plain, _ENCODER.encode(plain)
        digest = _digest("message " + text)
        known = self._known.get(digest)
        if known is None:
            try:
                known = self._noted(digest, weigh(message, self._counted))  # type: ignore[arg-type]
            except LimitExceeded:
                pass
        return digest, known

    def _counted(self, text: str) -> int | None:
        found = counted(self._count, text)
        if found is None or not any(word in text for word in _NAMING):
            return found
        pictures, documents = _named_in(text)
        if documents and self._document is None:
            return None
        return found + pictures * IMAGE + documents * (self._document or 0)

    def _noted(self, key: bytes, tokens: int | None) -> int | None:
        if tokens is not None:
            self._known[key] = tokens
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return tokens


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def named_documents(message: dict[str, Any]) -> int:
    """How many documents a message names and does not carry."""
    return sum(1 for one in _blocks(message, 0) if _names_document(one))


def _named_in(text: str) -> tuple[int, int]:
    """The pictures and documents that the message with this JSON only names."""
    try:
        found = list(_blocks(json.loads(text), 0))
    except (ValueError, RecursionError):
        return 0, 0
    return sum(_names(one) and one["type"] in _PICTURES for one in found), sum(map(_names_document, found))


def _blocks(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    """A message, its blocks, and those inside them. What a tool is called with is none."""
    if isinstance(value, dict) and depth <= _DEEPEST:
        yield value
        for key in ("content", "output"):
            for one in held if isinstance(held := value.get(key), list) else ():
                yield from _blocks(one, depth + 1)


def _names(block: dict[str, Any]) -> bool:
    return isinstance(block.get("type"), str) and blocks.refers(block) and blocks.payload(block) is None


def _names_document(block: dict[str, Any]) -> bool:
    return block.get("type") == "item_reference" or (
        _names(block) and block["type"] not in _PICTURES and block["type"] != "resource_link"
    )
