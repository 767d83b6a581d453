"""How many tokens a message costs, by a host's counter, and never too few by accident.

A message is counted as the JSON that it is. A picture counts as what providers charge for one at most, not as the
characters of its base64. What cannot be counted is an error: a budget that nobody can check is not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from coatcheck.errors import LimitExceeded
from coatcheck.externalize import blocks
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.formats import Message

IMAGE: Final = 1_600
"""Tokens of a picture, whatever its size: larger ones are scaled down by the providers."""

_OVERHEAD: Final = 3  # tokens around each message
_LARGE: Final = 4_000  # a picture has more characters than this, or may count as text
_DEEPEST: Final = 8
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})


def weigh(message: Message, count: TokenCounter = estimate) -> int:
    """The tokens of one message. Raises `LimitExceeded` where the counter answers nothing that is a count."""
    try:
        text = _dumped(message)
        images = 0
        if len(text) > _LARGE and ('"image' in text or '"input_image' in text):
            shown, images = _without_images(message, 0)
            text = _dumped(shown) if images else text
        found: object = count(text)
    except Exception as error:
        raise _uncounted(f"{type(error).__name__} from the counter") from error
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
        raise _uncounted(f"the counter answered {str(found)[:40]} for a message")
    return math.ceil(found) + _OVERHEAD + images * IMAGE


def weigh_all(messages: Iterable[Message], count: TokenCounter = estimate) -> int:
    return sum(weigh(message, count) for message in messages)


def _dumped(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), default=str)


def _without_images(value: Any, depth: int) -> tuple[Any, int]:
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


def _is_encoded(block: dict[str, Any]) -> bool:
    carried = blocks.payload(block)
    return carried is not None and carried.is_base64


def _uncounted(why: str) -> LimitExceeded:
    return LimitExceeded(f"the tokens cannot be counted: {why}", hint="mend the counter, or leave it out")
