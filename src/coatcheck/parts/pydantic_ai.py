"""Pydantic AI's `BinaryContent` and URLs with data, as objects or as their JSON."""

from __future__ import annotations

from typing import Final

from coatcheck.parts.fields import Block, is_data, is_data_url
from coatcheck.parts.part import Part

_URL_KINDS: Final = ("image-url", "audio-url", "video-url", "document-url")


def read(block: Block) -> Part | None:
    kind = block.get("kind")
    is_url = kind in _URL_KINDS and is_data_url(block.get("url"))
    is_binary = (
        kind == "binary" and is_data(block.get("data")) and isinstance(block.get("media_type"), str)
    )
    return Part(read_as="foreign") if is_url or is_binary else None


def is_binary(value: object) -> bool:
    """Whether this is a `BinaryContent`."""
    if getattr(value, "kind", None) != "binary":
        return False
    data, media_type = getattr(value, "data", None), getattr(value, "media_type", None)
    return isinstance(data, bytes) and isinstance(media_type, str)
