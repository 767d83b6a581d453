"""How many tokens a message costs.

A message is counted as its JSON, by the host's counter. An image counts as the most that providers
charge for one, not as the characters of its base64 data or URL. Thinking counts by its signature,
which contains it encrypted: the text beside it is not sent to the model. A document that is only
referenced (by URL or id) has no known length and cannot be counted, unless the host sets
`document_tokens`. A message that cannot be counted violates every budget.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from coatcheck.checks import is_whole
from coatcheck.errors import LimitExceeded
from coatcheck.messages.cache import KEY, without_marks
from coatcheck.messages.paths import Message, members, text
from coatcheck.parts import read
from coatcheck.tokens import TokenCounter, counted, estimate

IMAGE: Final = 1_600
"""Tokens of an image of any size: providers scale larger ones down."""

SIGNATURE: Final = 5
"""Characters of a signature per token. In 1,416 calls of real sessions, `usage` reports 0.19 tokens
per character and nothing for the text beside it."""

_OVERHEAD: Final = 3  # tokens around each message
_LARGE: Final = 4_000  # a shorter message cannot contain image data worth removing
_DEEPEST: Final = 8
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_SIGNATURES: Final = {
    "thinking": ("signature", "thinkingSignature"),
    "redacted_thinking": ("data",),
}
_CACHED: Final = 65_536
_LARGEST_USAGE: Final = 1 << 40
_REFERENCES: Final = (
    '"type":"url"', '"type":"file"', '"image_url"', '"file_id"', '"file_url"',
    '"type":"item_reference"',
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
    """A token counter that caches its counts by digest, so that each message of a conversation is
    counted once. For a conversation of 1,000 messages (1.8 MB) and an exact tokenizer, the first
    prompt takes 170 ms to count, and each later one 6 ms.

    `document_tokens` is the count of a document that a message only references; with None such a
    message cannot be counted. Failed counts are not cached. Thread-safe: at worst a text is counted
    twice."""

    __slots__ = ("_cached", "_count", "_document")

    def __init__(
        self, count: TokenCounter = estimate, *, document_tokens: int | None = None
    ) -> None:
        self._count = count
        self._document = document_tokens
        self._cached: BoundedCache[bytes, int] = BoundedCache(_CACHED)

    def tokens(self, text: str) -> int | None:
        """Count the tokens of a text, or of a message given as JSON, with the images and documents
        it references."""
        key = _digest(text)
        found = self._cached.get(key)
        if found is None:
            found = self._counted(text)
            if found is not None:
                self._cached.keep(key, found)
        return found

    def weighed(self, message: Message) -> Cost | None:
        """Return the cost of a message, or None if it cannot be counted. Raises as `json` does for
        other objects."""
        digest, tokens = self.digest_and_tokens(message)
        return None if tokens is None else Cost(digest, tokens)

    def digest_and_tokens(self, message: Message) -> tuple[bytes, int | None]:
        """Return the digest of a message without its cache breakpoints (they move from turn to
        turn), and its tokens: None if it cannot be counted."""
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
        try:
            kinds = list(_references(json.loads(text)))
        except (ValueError, RecursionError):
            return found
        documents = kinds.count("document")
        if documents and self._document is None:
            return None
        return found + kinds.count("image") * IMAGE + documents * (self._document or 0)


def weigh(message: Message, count: TokenCounter = estimate) -> int:
    """Count the tokens of one message. Raises `LimitExceeded` if the counter fails or returns no
    valid count."""
    try:
        text = _dumped(message)
        images = thought = 0
        if 'thinking"' in text and isinstance(message, Mapping):
            message, thought = _without_thinking(message)
            text = _dumped(message) if thought else text
        if len(text) > _LARGE and ('"image' in text or '"input_image' in text):
            text, images = _without_images(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _uncounted("the message is not JSON") from error
    found = counted(count, text)
    if found is None:
        raise _uncounted("the counter failed, or returned no valid count")
    return found + _OVERHEAD + images * IMAGE + thought


def referenced_documents(message: Message) -> int:
    """Count the documents that a message references but does not contain."""
    return list(_references(message)).count("document")


def _references(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield "image" or "document" for each that a message only references. Arguments of tool calls
    are not searched."""
    kind = text(value.get("type")) if isinstance(value, dict) else ""
    if kind == "item_reference" or (
        kind not in ("", "resource_link") and read(value).kind == "reference"
    ):
        yield "image" if kind in _IMAGES else "document"
    for key in ("content", "output") if depth < _DEEPEST else ():
        for _, one in members(value, (key,)):
            yield from _references(one, depth + 1)


def _without_images(message: str) -> tuple[str, int]:
    """Return the JSON of a message without the data of its images, and their number."""
    images = 0

    def without_data(block: Message) -> Message:
        nonlocal images
        kind = text(block.get("type"))
        if kind not in _IMAGES or not read(block).is_encoded:
            return block
        images += 1
        return {"type": kind}

    shown = json.loads(message, object_hook=without_data)
    return (_dumped(shown) if images else message), images


def _without_thinking(message: Message) -> tuple[Message, int]:
    """Return a message without its signed thinking, and the tokens of that thinking."""
    content = message.get("content")
    shown, tokens = [], 0
    for block in content if isinstance(content, list) else ():
        signed = _signature_size(block)
        shown.append(_unsigned(block, signed) if signed else block)
        tokens += math.ceil(signed / SIGNATURE)
    return ({**message, "content": shown} if tokens else message), tokens


def _signature_size(block: object) -> int:
    if not isinstance(block, dict):
        return 0
    keys = _SIGNATURES.get(text(block.get("type")), ())
    return sum(len(text(block.get(key))) for key in keys)


def _unsigned(block: Message, signed: int) -> Message:
    """Return a block of thinking without its signature, and without the text that is in it."""
    removed = set(_SIGNATURES[block["type"]])
    thinking = block.get("thinking")
    if isinstance(thinking, str) and len(thinking) <= signed:  # a signature is never shorter
        removed.add("thinking")
    return {key: value for key, value in block.items() if key not in removed}


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one call as the provider counted them: the whole input (with cached tokens),
    the output, and the part of the input that was read from or written to its cache. None if not
    reported."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None

    def cost(self, cached: float, written: float) -> int | None:
        """Return the price of the input in uncached tokens, given the prices of cached and written
        tokens."""
        if self.input_tokens is None or self.cached_tokens is None:
            return None
        read, wrote = self.cached_tokens, self.cache_write_tokens or 0
        return round(max(0, self.input_tokens - read - wrote) + read * cached + wrote * written)


def usage_of(answer: object) -> Usage:
    """Return the usage in a provider's answer or in its `usage` part: OpenAI's two APIs and
    Anthropic's, as dicts or objects. Invalid values are ignored; nothing is raised."""
    if answer is None:
        return Usage()
    inner = _member(answer, "usage")
    usage = answer if inner is None else inner
    read = _usage_count(usage, "cache_read_input_tokens")
    written = _usage_count(usage, "cache_creation_input_tokens")
    if read is not None or written is not None:  # Anthropic counts its cache separately
        fresh = _usage_count(usage, "input_tokens")
        total = None if fresh is None else fresh + (read or 0) + (written or 0)
        return Usage(total, _usage_count(usage, "output_tokens"), read, written)
    for sent, received in (
        ("input_tokens", "output_tokens"),
        ("prompt_tokens", "completion_tokens"),
    ):
        tokens = _usage_count(usage, sent)
        if tokens is not None:
            details = _member(usage, f"{sent}_details")
            cached = None if details is None else _usage_count(details, "cached_tokens")
            return Usage(tokens, _usage_count(usage, received), cached, None)
    return Usage(output_tokens=_usage_count(usage, "output_tokens"))


def _member(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _usage_count(usage: object, name: str) -> int | None:
    value = _member(usage, name)
    return value if is_whole(value) and value < _LARGEST_USAGE else None


def _dumped(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), default=str)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _uncounted(why: str) -> LimitExceeded:
    return LimitExceeded(
        f"the tokens cannot be counted: {why}", hint="fix the token counter, or do not pass one"
    )
