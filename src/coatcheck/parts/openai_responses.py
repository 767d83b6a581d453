"""OpenAI's Responses API: images and files as `data:` URLs, links or file ids."""

from __future__ import annotations

from typing import Final

from coatcheck.models import IMAGE_LIMITS
from coatcheck.parts.fields import Block, of_data_url, text_block
from coatcheck.parts.part import Part

_LIMIT: Final = IMAGE_LIMITS["openai"]


def read(block: Block) -> Part | None:
    kind = block.get("type")
    if kind == "input_image":
        part = of_data_url("image", block.get("image_url"), _LIMIT)
    elif kind == "input_file":
        part = of_data_url("file", block.get("file_data"), _LIMIT)
    else:
        return None
    links = [block.get(key) for key in ("image_url", "file_id", "file_url")]
    if part is None and any(isinstance(link, str) for link in links):
        return Part(read_as="reference")
    return part


def write(part: Part) -> Block:
    if part.kind == "text":
        return text_block(part, "input_text")
    return {**part.block, "type": "input_image", "image_url": part.url}
