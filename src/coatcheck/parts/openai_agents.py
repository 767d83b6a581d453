"""Images and files of the OpenAI Agents SDK: `data:` URLs in a block of the type itself."""

from __future__ import annotations

from coatcheck.parts.fields import Block, is_data_url
from coatcheck.parts.part import Part


def read(block: Block) -> Part | None:
    kind = block.get("type")
    is_image = kind == "image" and is_data_url(block.get("image_url"))
    is_file = kind == "file" and is_data_url(block.get("file_data"))
    return Part(read_as="foreign") if is_image or is_file else None
