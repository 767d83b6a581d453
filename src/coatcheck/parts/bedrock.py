"""Bedrock's Converse API, as Strands uses it: images, documents and videos with bytes in them."""

from __future__ import annotations

from typing import Final

from coatcheck.parts.fields import Block, inner, is_data
from coatcheck.parts.part import Part

MESSAGES: Final = {"toolResult": "content", "tool_result": "content"}
"""As in `google`."""


def read(block: Block) -> Part | None:
    if "type" in block:
        return None
    media = [block[key] for key in ("image", "document", "video") if key in block]
    media = [one for one in media if isinstance(one, dict)]
    if len(media) != 1:
        return None
    is_medium = isinstance(media[0].get("format"), str)
    has_bytes = is_data(inner(media[0], "source").get("bytes"))
    return Part(read_as="foreign") if is_medium and has_bytes else None
