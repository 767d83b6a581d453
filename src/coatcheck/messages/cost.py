"""How many tokens a message costs.

A message is counted as its JSON, by the host's counter. An image counts as the most that providers charge for one, not
as the characters of its base64 data or URL. Thinking counts by its signature, which contains it encrypted: the text
beside it is not sent to the model. A document that is only referenced (by URL or id) has no known length and cannot be
counted, unless the host sets `document_tokens`. A message that cannot be counted violates every budget.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar

from coatcheck.errors import LimitExceeded
from coatcheck.externalize import blocks
from coatcheck.messages.cache import KEY, without_marks
from coatcheck.tokens import TokenCounter, counted, estimate

__all__ = ["IMAGE", "SIGNATURE", "BoundedCache", "Cost", "Tally", "referenced_documents", "weigh"]

IMAGE: Final = 1_600
"""Tokens of an image of any size: providers scale larger ones down."""

SIGNATURE: Final = 5
"""Characters of a signature per token. In 1,416 calls of real sessions, `usage` reports 0.19 tokens per character and
nothing for the text beside it."""

_OVERHEAD: Final = 3  # tokens around each message
_LARGE: Final = 4_000  # a shorter message can contain no image data worth removing
_DEEPEST: Final = 8
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_SIGNATURES: Final = ("signature", "thinkingSignature")
_CACHED: Final = 65_536
_REFERENCES: Final = (
    '"type":"url"', '"type":"file"', '"image_url"', '"file_id"', '"file_url"', '"type":"item_reference"',
)  # fmt: skip
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(OrderedDict[Key, Value]):
    """A dict that drops its oldest entries beyond a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry and return its value."""
        self[key] = value
        while len(self) > self._limit:
            self.popitem(last=False)
        return value


class Cost(NamedTuple):
    """The tokens of one part of a prompt, and the digest that identifies it."""

    digest: bytes
    tokens: int


class Tally:
    """A token counter that caches its counts by digest, so that each message of a conversation is counted once.

    `document_tokens` is the count of a document that a message only references; with None such a message cannot be
    counted. Failed counts are not cached. Thread-safe: at worst a text is counted twice."""

    __slots__ = ("_cached", "_count", "_document")

    def __init__(self, count: TokenCounter = estimate, *, document_tokens: int | None = None) -> None:
        self._count = count
        self._document = document_tokens
        self._cached: BoundedCache[bytes, int] = BoundedCache(_CACHED)

    def tokens(self, text: str) -> int | None:
        """Count the tokens of a text, or of a message given as JSON, with the images and documents it references."""
        key = _digest(text)
        found = self._cached.get(key)
        if found is None:
            found = self._counted(text)
            if found is not None:
                self._cached.keep(key, found)
        return found

    def weighed(self, message: dict[str, Any]) -> Cost | None:
        """Return the cost of a message, or None if it cannot be counted. Raises as `json` does for other objects."""
        digest, tokens = self.digest_and_tokens(message)
        return None if tokens is None else Cost(digest, tokens)

    def digest_and_tokens(self, message: dict[str, Any]) -> tuple[bytes, int | None]:
        """Return the digest of a message without its cache breakpoints (they move from turn to turn), and its tokens:
        None if it cannot be counted."""
        text = _ENCODER.encode(message)
        if f'"{KEY}"' in text and (plain := without_marks(message)) is not message:
            message, text = plain, _ENCODER.encode(plain)
        digest = _digest("message " + text)
        found = self._cached.get(digest)
        if found is None:
            try:
                found = self._cached.keep(digest, weigh(message, self._counted))  # type: ignore[arg-type]
            except LimitExceeded:
                pass
        return digest, found

    def _counted(self, text: str) -> int | None:
        found = counted(self._count, text)
        if found is None or not any(word in text for word in _REFERENCES):
            return found
        images, documents = _references_in(text)
        if documents and self._document is None:
            return None
        return found + images * IMAGE + documents * (self._document or 0)


def weigh(message: dict[str, Any], count: TokenCounter = estimate) -> int:
    """Count the tokens of one message. Raises `LimitExceeded` if the counter fails or returns no valid count."""
    try:
        text = _dumped(message)
        shown, images, thought = message, 0, 0
        if 'thinking"' in text:
            shown, thought = _without_thinking(message)
        if len(text) > _LARGE and ('"image' in text or '"input_image' in text):
            shown, images = _without_images(shown, 0)
        if shown is not message:
            text = _dumped(shown)
        found: object = count(text)
    except Exception as error:
        raise _uncounted(f"the counter raised {type(error).__name__}") from error
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
        raise _uncounted(f"the counter returned {str(found)[:40]}")
    return math.ceil(found) + _OVERHEAD + images * IMAGE + thought


def referenced_documents(message: dict[str, Any]) -> int:
    """Count the documents that a message references but does not contain."""
    return sum(1 for one in _blocks(message, 0) if _references_document(one))


def _references_in(text: str) -> tuple[int, int]:
    """Count the images and documents that the message with this JSON only references."""
    try:
        found = list(_blocks(json.loads(text), 0))
    except (ValueError, RecursionError):
        return 0, 0
    images = sum(_is_reference(one) and one["type"] in _IMAGES for one in found)
    return images, sum(map(_references_document, found))


def _blocks(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield a message, its blocks and the blocks inside them. Arguments of tool calls are not blocks."""
    if isinstance(value, dict) and depth <= _DEEPEST:
        yield value
        for key in ("content", "output"):
            for one in inner if isinstance(inner := value.get(key), list) else ():
                yield from _blocks(one, depth + 1)


def _is_reference(block: dict[str, Any]) -> bool:
    return isinstance(block.get("type"), str) and blocks.refers(block) and blocks.payload(block) is None


def _references_document(block: dict[str, Any]) -> bool:
    return block.get("type") == "item_reference" or (
        _is_reference(block) and block["type"] not in _IMAGES and block["type"] != "resource_link"
    )


def _without_images(value: Any, depth: int) -> tuple[Any, int]:
    """Return a value without the data of its images, and their number."""
    if not isinstance(value, dict | list) or depth > _DEEPEST:
        return value, 0
    if isinstance(value, dict) and value.get("type") in _IMAGES and _is_encoded(value):
        return {"type": value["type"]}, 1
    parts = [_without_images(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
    images = sum(found for _, found in parts)
    if not images:
        return value, 0
    shown = [part for part, _ in parts]
    return (dict(zip(value, shown, strict=True)) if isinstance(value, dict) else shown), images


def _without_thinking(message: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a message without its signed thinking, and the tokens of that thinking."""
    content = message.get("content")
    if not isinstance(content, list):
        return message, 0
    parts = [_thinking(block) for block in content]
    if not any(parts):
        return message, 0
    shown = [block if part is None else part[0] for block, part in zip(content, parts, strict=True)]
    return {**message, "content": shown}, sum(part[1] for part in parts if part is not None)


def _thinking(block: Any) -> tuple[dict[str, Any], int] | None:
    """Return a thinking block without what its signature covers, and the tokens of that; None for any other block."""
    if not isinstance(block, dict) or block.get("type") not in ("thinking", "redacted_thinking"):
        return None
    keys = ("data",) if block["type"] == "redacted_thinking" else _SIGNATURES
    signed = sum(len(value) for key in keys if isinstance(value := block.get(key), str))
    if not signed:
        return None
    thinking = block.get("thinking")
    is_signed = isinstance(thinking, str) and len(thinking) <= signed  # a signature is never shorter than its text
    removed = (*keys, "thinking") if is_signed else keys
    return {key: value for key, value in block.items() if key not in removed}, math.ceil(signed / SIGNATURE)


def _is_encoded(block: dict[str, Any]) -> bool:
    payload = blocks.payload(block)
    return payload is not None and payload.is_base64


def _dumped(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), default=str)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _uncounted(why: str) -> LimitExceeded:
    return LimitExceeded(f"the tokens cannot be counted: {why}", hint="fix the token counter, or do not pass one")
