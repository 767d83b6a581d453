"""OpenAI's chat completions: images and files as `data:` URLs, and audio as base64."""

from __future__ import annotations

from typing import Final

from coatcheck.models import IMAGE_LIMITS
from coatcheck.parts.fields import Block, inner, of_base64, of_data_url, text_block
from coatcheck.parts.part import Part

_LIMIT: Final = IMAGE_LIMITS["openai"]
_AUDIO: Final = {"wav": "audio/wav", "mp3": "audio/mpeg"}


def read(block: Block) -> Part | None:
    kind = block.get("type")
    if kind == "image_url":
        url = inner(block, "image_url").get("url", block.get("image_url"))
        part = of_data_url("image", url, _LIMIT)
        return part or _reference(url)
    if kind == "file":
        file = inner(block, "file")
        part = of_data_url("file", file.get("file_data"), _LIMIT)
        return part or _reference(file.get("file_id"))
    if kind == "input_audio":
        audio = inner(block, "input_audio")
        return of_base64("audio", audio.get("data"), _AUDIO.get(str(audio.get("format"))))
    return None


def _reference(to: object) -> Part | None:
    return Part(read_as="reference") if isinstance(to, str) else None


def write(part: Part) -> Block:
    if part.kind == "text":
        return text_block(part)
    block = part.block
    image: object = {"url": part.url}
    if block:
        given = block["image_url"]
        image = {**given, "url": part.url} if isinstance(given, dict) else part.url
    return {**block, "type": "image_url", "image_url": image}
