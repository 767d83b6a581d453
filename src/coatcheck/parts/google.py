"""Google's parts with inline data, as ADK and the Gemini SDK shape them, and messages of them."""

from __future__ import annotations

from typing import Final

from coatcheck.parts.fields import Block, is_data
from coatcheck.parts.part import Part

MESSAGES: Final = {"function_response": "parts", "functionResponse": "parts", "": "parts"}
"""The fields of a message with the object that has its parts ("" for the message itself), and the
field of that object."""


def read(block: Block) -> Part | None:
    found = [block.get(key) for key in ("inline_data", "inlineData")]
    inline = [one for one in found if isinstance(one, dict)]
    if len(inline) != 1 or "type" in block:
        return None
    media_type = inline[0].get("mime_type", inline[0].get("mimeType"))
    if not is_data(inline[0].get("data")) or not isinstance(media_type, str):
        return None
    return Part(read_as="foreign")


def is_inline(value: object) -> bool:
    """Whether this is a `Part` with inline data."""
    inline = getattr(value, "inline_data", None)
    data, media_type = getattr(inline, "data", None), getattr(inline, "mime_type", None)
    return isinstance(data, bytes) and isinstance(media_type, str)
