"""Text blocks, which every provider shapes alike."""

from __future__ import annotations

from typing import Final

from coatcheck.parts.fields import Block, of_text
from coatcheck.parts.part import Part

# A tuple: `type` may be a list, in data that only looks like a block, and a list has no hash.
_TYPES: Final = ("text", "input_text", "output_text")


def read(block: Block) -> Part | None:
    return of_text(block.get("text")) if block.get("type") in _TYPES else None


def write(part: Part) -> Block:
    return {"type": "text", **part.block, "text": part.text}


def text_of(value: object) -> str | None:
    """Return the text of a string, a text block, or an object with a text and no type; else
    None."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or value.get("type", "text") not in _TYPES:
        return None
    text = value.get("text")
    return text if isinstance(text, str) else None
