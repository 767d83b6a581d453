"""LangChain's images and files, and those of Vercel's AI SDK: base64 beside a media type."""

from __future__ import annotations

from typing import Final

from coatcheck.parts.fields import Block, is_data
from coatcheck.parts.part import Part

_MEDIA: Final = ("image", "audio", "video", "file")


def read(block: Block) -> Part | None:
    kind = block.get("type")
    if kind in _MEDIA and is_data(block.get("base64")):
        return Part(read_as="foreign")
    media_type = block.get("mime_type", block.get("mediaType"))
    if kind == "media" and is_data(block.get("data")) and isinstance(media_type, str):
        return Part(read_as="foreign")
    return None
