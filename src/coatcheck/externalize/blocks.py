"""Mixed content: lists of text, image, document and resource blocks, as OpenAI, Anthropic and MCP shape them.

Each block is judged for itself; order, ids and unknown fields stay. What a block carries is replaced in place where a
provider takes text there (text, documents, resources), so its type stays too. An image, audio or file block
without its data would be refused, so a text block with the stub stands in its place. What refers to an address instead
of holding data passes as it is.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from coatcheck.externalize.stub import media_type_of

Block = Mapping[str, Any]

_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
_NESTED: Final = frozenset({"tool_result", "search_result"})
_ABOUT: Final = ("cache_control", "annotations", "_meta")
_AUDIO: Final = {"wav": "audio/wav", "mp3": "audio/mpeg"}


@dataclass(frozen=True, slots=True)
class Payload:
    """What a block carries as it stands in the message, and how to write the block with another text in its place."""

    written: str
    is_base64: bool
    media_type: str | None
    replace: Callable[[str], dict[str, Any]]

    @property
    def value(self) -> str | bytes:
        """The text, or the bytes behind base64; what claims to be base64 and is not stays as it was written."""
        if not self.is_base64:
            return self.written
        try:
            return base64.b64decode("".join(self.written.split()), validate=True)
        except ValueError:
            return self.written


def is_block(value: object) -> bool:
    """Whether this is a block of a shape that we know, not just data with a type."""
    return isinstance(value, dict) and (nested(value) is not None or payload(value) is not None or _refers(value))


def payload(block: Block) -> Payload | None:
    """What a block carries, or None where that is nothing, an address, or a shape that we do not know."""
    kind = block.get("type")
    if kind in _TEXTS:
        return _text(block, "text")
    if kind in ("image", "audio"):
        return _encoded(block, block.get("data"), block.get("mimeType"), "text") or _source(block)
    if kind == "document":
        return _source(block)
    if kind == "resource":
        return _resource(block)
    if kind == "image_url":
        inner = block.get("image_url")
        return _address(block, inner.get("url") if isinstance(inner, dict) else inner, "text")
    if kind == "input_image":
        return _address(block, block.get("image_url"), "input_text")
    if kind == "input_file":
        return _address(block, block.get("file_data"), "input_text")
    if kind == "file":
        inner = block.get("file")
        return _address(block, inner.get("file_data"), "text") if isinstance(inner, dict) else None
    if kind == "input_audio":
        inner = block.get("input_audio")
        if isinstance(inner, dict):
            return _encoded(block, inner.get("data"), _AUDIO.get(str(inner.get("format"))), "text")
    return None


def nested(block: Block) -> list[Any] | str | None:
    """The content of a block that holds further ones."""
    content = block.get("content")
    if block.get("type") not in _NESTED:
        return None
    if isinstance(content, str):
        return content if "tool_use_id" in block else None
    return content if isinstance(content, list) and content and all(map(is_block, content)) else None


def texts(value: Iterable[Any]) -> Iterator[str]:
    """The texts that blocks carry, those inside others too. Base64 is no text that would stay."""
    for block in value:
        inner = nested(block)
        if isinstance(inner, str):
            yield inner
        elif inner is not None:
            yield from texts(inner)
        elif (carried := payload(block)) is not None and not carried.is_base64:
            yield carried.written


def _refers(block: Block) -> bool:
    """Whether a block names an address or an id in place of data."""
    kind, source = block.get("type"), block.get("source")
    if kind in ("image", "document"):
        return isinstance(source, dict) and source.get("type") in ("url", "file")
    if kind == "image_url":
        inner = block.get("image_url")
        return isinstance(inner.get("url") if isinstance(inner, dict) else inner, str)
    if kind in ("input_image", "input_file"):
        return any(isinstance(block.get(key), str) for key in ("image_url", "file_id", "file_url"))
    if kind == "file":
        inner = block.get("file")
        return isinstance(inner, dict) and isinstance(inner.get("file_id"), str)
    return kind == "resource_link" and isinstance(block.get("uri"), str)


def _text(block: Block, key: str) -> Payload | None:
    text = block.get(key)
    if not isinstance(text, str):
        return None
    return Payload(text, False, None, lambda said: {**block, key: said})


def _source(block: Block) -> Payload | None:
    """Anthropic's images and documents. A document may as well be text, an image may not."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    is_document = block.get("type") == "document"
    if source.get("type") == "text" and is_document and isinstance(source.get("data"), str):
        text: str = source["data"]
        return Payload(text, False, None, lambda said: {**block, "source": {**source, "data": said}})
    if source.get("type") != "base64":
        return None
    found = _encoded(block, source.get("data"), source.get("media_type"), "text")
    if found is None or not is_document:
        return found

    def as_text(said: str) -> dict[str, Any]:
        return {**block, "source": {"type": "text", "media_type": "text/plain", "data": said}}

    return replace(found, replace=as_text)


def _resource(block: Block) -> Payload | None:
    """An embedded resource of MCP keeps its address and type: its text is what is replaced."""
    inner = block.get("resource")
    if not isinstance(inner, dict) or not isinstance(inner.get("uri"), str):
        return None
    rest = {key: value for key, value in inner.items() if key not in ("text", "blob", "mimeType")}

    def as_text(said: str) -> dict[str, Any]:
        return {**block, "resource": {**rest, "mimeType": "application/json", "text": said}}

    claimed = media_type_of(inner.get("mimeType"))
    text = inner.get("text")
    if isinstance(text, str):
        return Payload(text, False, claimed, as_text)
    found = _encoded(block, inner.get("blob"), claimed, "text")
    return None if found is None else replace(found, replace=as_text)


def _address(block: Block, url: object, becomes: str) -> Payload | None:
    """A `data:` address, as OpenAI takes images and files; a bare base64 is taken too."""
    if not isinstance(url, str):
        return None
    if not url.startswith("data:"):
        return _encoded(block, url, None, becomes) if "://" not in url[:32] else None
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        return None
    return _encoded(block, data, head[5:-7], becomes)


def _encoded(block: Block, data: object, claimed: object, becomes: str) -> Payload | None:
    if not isinstance(data, str) or not data:
        return None
    about = {key: block[key] for key in _ABOUT if key in block}
    return Payload(data, True, media_type_of(claimed), lambda said: {"type": becomes, "text": said, **about})
