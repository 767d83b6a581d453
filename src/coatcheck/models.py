"""What is known about models by name: context window, prices, and whether tools can be added to a
conversation; and about providers: how large an image may be.

Prices are factors of the price of an input token, so one table serves every currency and discount.
The providers' pages were read in November 2026: platform.claude.com (about-claude/pricing,
mid-conversation-system-messages) and developers.openai.com (api/docs/pricing). Everything here can
be overridden where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coatcheck.checks import is_seconds, valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a token as factors of the input price: read from the cache, written to it, and
    output. `cache_seconds` is how long the cache keeps a prompt after its last use."""

    read: float = 0.1
    write: float = 1.25
    output: float = 5.0
    cache_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("read", "write", "output", "cache_seconds"):
            value = getattr(self, name)
            valid(is_seconds(value), value, name, "a number of at least 0")


USUAL_PRICES: Final = Prices()


@dataclass(frozen=True, slots=True)
class Model:
    """What is known about a model. `adds_tools` is True if a request can add tools to a
    conversation without changing what was sent before."""

    window: int = 200_000
    prices: Prices = USUAL_PRICES
    adds_tools: bool = False


UNKNOWN: Final = Model()


@dataclass(frozen=True, slots=True)
class ImageLimit:
    """The largest image that a provider accepts: bytes of its file, and pixels of its longer edge
    (None: any)."""

    max_bytes: int
    max_edge: int | None = None


IMAGE_LIMITS: Final = {
    # 5 MiB of base64, 8,000 pixels: platform.claude.com, build-with-claude/vision. That base64 is
    # measured is in the error of the API: "image exceeds 5 MB maximum: 5272940 bytes > 5242880
    # bytes".
    "anthropic": ImageLimit(max_bytes=5 * 1_024 * 1_024 * 3 // 4, max_edge=8_000),
    # 3.75 MB, 8,000 pixels: docs.aws.amazon.com,
    # bedrock/latest/APIReference/API_runtime_Message.html
    "bedrock": ImageLimit(max_bytes=3_750_000, max_edge=8_000),
    # 20 MB for one image, 50 MB for all of a request: developers.openai.com,
    # api/docs/guides/images-vision
    "openai": ImageLimit(max_bytes=20_000_000),
    # 7 MB as inline data: docs.cloud.google.com,
    # vertex-ai/generative-ai/docs/multimodal/image-understanding
    "gemini": ImageLimit(max_bytes=7_000_000),
}

ANY_PROVIDER: Final = ImageLimit(max_bytes=3_750_000, max_edge=8_000)
"""The limit for an image whose provider is not known: every provider in the table accepts it."""

_MILLION: Final = 1_000_000
_GPT_5: Final = Prices(write=1.0, output=8.0)

# The first row whose name a model's name begins with applies, so longer names come first.
_MODELS: Final = {
    # Cache reads at 0.05 since 2026-09-22 (Opus 5.5) and 2026-10-07 (Sonnet 5.5), at 0.025 on Fable
    # and Mythos 5.1.
    "claude-fable-5-": Model(_MILLION, Prices(read=0.025), adds_tools=True),
    "claude-mythos-5-": Model(_MILLION, Prices(read=0.025), adds_tools=True),
    "claude-opus-5-5": Model(_MILLION, Prices(read=0.05), adds_tools=True),
    "claude-sonnet-5-5": Model(_MILLION, Prices(read=0.05), adds_tools=True),
    "claude-haiku-5-5": Model(_MILLION, USUAL_PRICES, adds_tools=True),
    "claude-fable": Model(_MILLION, USUAL_PRICES, adds_tools=True),
    "claude-mythos": Model(_MILLION, USUAL_PRICES, adds_tools=True),
    "claude-opus-5": Model(_MILLION, USUAL_PRICES, adds_tools=True),
    "claude-sonnet-5": Model(_MILLION, USUAL_PRICES, adds_tools=True),
    "claude-opus-4-8": Model(200_000, USUAL_PRICES, adds_tools=True),
    # Writes cost extra from GPT-5.6 on (2026). From GPT-5.4 on, prompts over 272,000 tokens cost
    # twice as much.
    "gpt-6": Model(272_000),
    "gpt-5.6": Model(272_000, Prices(output=6.0)),
    "gpt-5.4": Model(272_000, Prices(write=1.0, output=6.0)),
    "gpt-5": Model(272_000, _GPT_5),
    "gpt-4.1": Model(_MILLION, Prices(read=0.25, write=1.0, output=4.0)),
    "gpt-4o": Model(128_000, Prices(read=0.5, write=1.0, output=4.0)),
}


def model(name: str | None) -> Model:
    """Return what is known about a model. A provider before the name ("anthropic/…") is ignored; an
    unknown model has a window of 200,000 tokens and the usual prices: 0.1 to read, 1.25 to write, 5
    for output."""
    known = str(name or "").rpartition("/")[2].lower()
    return next((found for start, found in _MODELS.items() if known.startswith(start)), UNKNOWN)
