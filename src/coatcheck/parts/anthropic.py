"""Anthropic's Messages API: images, documents, and results with blocks in them."""

from __future__ import annotations

from typing import Any, Final

from coatcheck.models import IMAGE_LIMITS
from coatcheck.parts.fields import Block, inner, of_base64, of_text, text_block
from coatcheck.parts.part import Part

# Tuples: `type` may be a list, in data that only looks like a block, and a list has no hash.
_NESTED: Final = ("tool_result", "search_result")
_SOURCES: Final = ("image", "audio", "document")
_LIMIT: Final = IMAGE_LIMITS["anthropic"]


def read(block: Block) -> Part | None:
    kind = block.get("type")
    if kind in _NESTED:
        return _result(block)
    if kind not in _SOURCES:
        return None
    source = inner(block, "source")
    if source.get("type") in ("url", "file") and kind != "audio":
        return Part(read_as="reference")
    if kind == "document" and source.get("type") == "text":
        return of_text(source.get("data"))
    if source.get("type") != "base64":
        return None
    read_as: Any = "file" if kind == "document" else kind
    return of_base64(read_as, source.get("data"), source.get("media_type"), _LIMIT)


def _result(block: Block) -> Part | None:
    """Return the part of a result: its text if that is all it has, or the blocks in it."""
    content = block.get("content")
    if isinstance(content, str):
        return of_text(content) if "tool_use_id" in block else None
    if isinstance(content, list) and content:
        return Part(read_as="nested", content=tuple(content))
    return None


def write(part: Part) -> Block:
    """Write a part. A text may replace the data of a document, but not that of an image."""
    block = part.block
    kind = block.get("type")
    if part.kind == "image":
        source = {**inner(block, "source"), "type": "base64"}
        source |= {"media_type": part.media_type, "data": part.base64}
        return {**block, "type": "image", "source": source}
    if part.kind == "nested":
        return {**block, "content": list(part.content)}
    if kind in _NESTED:
        return {**block, "content": part.text}
    if kind == "document":
        return {**block, "source": _text_source(block["source"], part.text)}
    return text_block(part)


def _text_source(source: Block, text: str) -> Block:
    if source.get("type") == "text":
        return {**source, "data": text}
    return {"type": "text", "media_type": "text/plain", "data": text}
