"""Mixed content: lists of text, image, document and resource blocks, as OpenAI, Anthropic and MCP shape them.

Each block is judged for itself; order, ids and unknown fields stay. What a block carries is replaced in place where a
provider takes text there (text, documents, resources), so its type stays too. An image, audio or file block
without its data would be refused, so a text block with the stub stands in its place. What refers to an address instead
of holding data passes as it is.

An image counts as the tokens that providers bill for its pixels, not as its base64: what a model should see, it sees. A
file of more than 256 KiB, or one whose pixels cannot be told, counts as the text that it is in the message.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from coatcheck.externalize.stub import media_type_of
from coatcheck.previews.binaries import pixels

Block = Mapping[str, Any]

_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
_NESTED: Final = frozenset({"tool_result", "search_result"})
_CARRIES: Final = frozenset(
    {"type", "text", "data", "source", "resource", "image_url", "file_data", "file", "input_audio", "content"}
)
_ABOUT: Final = ("cache_control", "annotations", "_meta")
_AUDIO: Final = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_LARGEST_IMAGE: Final = 256 * 1_024
_PIXELS_A_TOKEN: Final = 750
_MOST_FOR_IMAGE: Final = 1_600  # providers scale larger ones down
_HEADER: Final = 64 * 1_024  # characters of base64 in which an image tells its size


@dataclass(frozen=True, slots=True)
class Payload:
    """What a block carries as it stands in the message, and how to write the block with another text in its place."""

    written: str
    is_base64: bool
    media_type: str | None
    replace: Callable[[str], dict[str, Any]]
    is_image: bool = False

    @property
    def value(self) -> str | bytes:
        """The text, or the bytes behind base64; what claims to be base64 and is not stays as it was written."""
        if not self.is_base64:
            return self.written
        try:
            return base64.b64decode("".join(self.written.split()), validate=True)
        except ValueError:
            return self.written

    @property
    def billed(self) -> int | None:
        """The tokens of an image that is no large file, None for anything else."""
        if not self.is_image or len(self.written) * 3 > _LARGEST_IMAGE * 4:
            return None
        head = "".join(self.written[:_HEADER].split())
        try:
            size = pixels(base64.b64decode(head[: len(head) // 4 * 4], validate=True))
        except ValueError:
            return None
        return min(math.ceil(size[0] * size[1] / _PIXELS_A_TOKEN), _MOST_FOR_IMAGE) if size and all(size) else None


def is_block(value: object) -> bool:
    """Whether this is a block of a shape that we know, not just data with a type."""
    return isinstance(value, dict) and (nested(value) is not None or payload(value) is not None or refers(value))


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


def besides(block: Block) -> dict[str, Any]:
    """What stands in a block beside what it carries: that stays, whatever it is."""
    return {key: value for key, value in block.items() if key not in _CARRIES}


def parts(value: Iterable[Any]) -> Iterator[str | Payload]:
    """What blocks carry, those inside others too, in order."""
    for block in value:
        inner = nested(block)
        if isinstance(inner, str):
            yield inner
        elif inner is not None:
            yield from parts(inner)
        elif (carried := payload(block)) is not None:
            yield carried


def refers(block: Block) -> bool:
    """Whether a block names an address or an id: in place of data, where it carries none."""
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
    return Payload(
        data,
        True,
        media_type_of(claimed),
        lambda said: {"type": becomes, "text": said, **about},
        block.get("type") in _IMAGES,
    )
