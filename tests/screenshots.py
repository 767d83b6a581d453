"""Screenshots as tools return them: real PNG and JPEG files of a given size in pixels and, roughly,
in bytes."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image


def screenshot(
    width: int = 1_280, height: int = 800, *, noisy: int = 73, mode: str = "RGB"
) -> bytes:
    """Return a PNG with random pixels in its first `noisy` rows; by default it has about 280 KB."""
    image = Image.new(mode, (width, height), "#f0f0f0")
    pixels = random.Random(3).randbytes(width * noisy * len(mode))
    image.paste(Image.frombytes(mode, (width, noisy), pixels), (0, 0))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def huge_screenshot() -> bytes:
    """Return a PNG of about 6 MB, which is over the limit of some providers."""
    return screenshot(2_000, 1_600, noisy=1_000)


def in_shape(shape: str, data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """Return an image as a block of MCP, Anthropic, OpenAI's chat or OpenAI's responses."""
    encoded = base64.b64encode(data).decode()
    url = f"data:{media_type};base64,{encoded}"
    if shape == "anthropic":
        source = {"type": "base64", "media_type": media_type, "data": encoded}
        return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    if shape == "chat":
        return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    if shape == "responses":
        return {"type": "input_image", "image_url": url, "detail": "high"}
    if shape == "resource":
        return {
            "type": "resource",
            "resource": {"uri": "screen://1", "mimeType": media_type, "blob": encoded},
        }
    return {
        "type": "image",
        "data": encoded,
        "mimeType": media_type,
        "annotations": {"audience": ["user"]},
    }


def image_in(block: dict[str, Any]) -> bytes:
    """Return the data of an image block of any of these shapes."""
    source = block.get("source") or block.get("resource") or block
    url = block.get("image_url", "")
    url = url["url"] if isinstance(url, dict) else url
    written: str = url.partition(",")[2] or source.get("data") or source.get("blob") or ""
    return base64.b64decode(written, validate=True)


def dimensions(data: bytes) -> tuple[int, int]:
    """Return the width and height of an image that must be readable to its end."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        size: tuple[int, int] = image.size
        return size
