"""What the dialects share: reading fields of JSON objects, base64 and `data:` URLs."""

from __future__ import annotations

from typing import Any, Final

from coatcheck.media import media_type_of
from coatcheck.models import ANY_PROVIDER, ImageLimit
from coatcheck.parts.part import Kind, Part

Block = dict[str, Any]

_KEPT_FIELDS: Final = ("cache_control", "annotations", "_meta")


def inner(block: Block, key: str) -> Block:
    """Return the object in a field, or an empty one."""
    found = block.get(key)
    return found if isinstance(found, dict) else {}


def text_block(part: Part, kind: str = "text") -> Block:
    """Return a text block in place of a block whose data is gone, with the fields that any block
    may have."""
    kept: Block = {key: part.block[key] for key in _KEPT_FIELDS if key in part.block}
    return {"type": kind, "text": part.text, **kept}


def of_text(text: object, media_type: str = "") -> Part | None:
    """Return a text part, or None if this is not a text."""
    if not isinstance(text, str):
        return None
    return Part(text, media_type=media_type, read_as="text")


def of_base64(
    kind: Kind, data: object, claimed: object, limit: ImageLimit = ANY_PROVIDER
) -> Part | None:
    """Return the part of base64 data, or None if there is none. `claimed` is its media type."""
    if not isinstance(data, str) or not data:
        return None
    media_type = media_type_of(claimed) or ""
    return Part(encoded=data, media_type=media_type, read_as=kind, limit=limit)


def of_data_url(kind: Kind, url: object, limit: ImageLimit) -> Part | None:
    """Return the part of a `data:` URL, as OpenAI accepts images and files; plain base64 is
    accepted too."""
    if not isinstance(url, str):
        return None
    if not url.startswith("data:"):
        is_link = "://" in url[:32]
        return None if is_link else of_base64(kind, url, None, limit)
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        return None
    media_type = head.removeprefix("data:").removesuffix(";base64")
    return of_base64(kind, data, media_type, limit)


def is_data_url(value: object) -> bool:
    return isinstance(value, str) and value.startswith("data:")


def is_data(value: object) -> bool:
    """Whether a value is base64 text or bytes, and not empty."""
    return isinstance(value, str | bytes | bytearray) and bool(value)
