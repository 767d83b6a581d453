"""Content parts: what the messages and results of every provider and framework consist of.

`read` makes a `Part` from anything, and `write` an object in a provider's shape from a part. Each
provider or framework is one module with those two functions and one row in `DIALECTS`; a framework
whose media pass unchanged needs only `read`.

A payload is replaced in place where the provider accepts text there (text, documents, resources);
order, ids and unknown fields stay. An image, audio or file block without its data would be refused,
so a text block replaces it. References to a URL or a file id pass unchanged, and so do the media of
frameworks: only the framework knows what it accepts in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from coatcheck.parts import (
    anthropic,
    bedrock,
    google,
    langchain,
    mcp,
    openai_agents,
    openai_chat,
    openai_responses,
    pydantic_ai,
    texts,
)
from coatcheck.parts.objects import as_block, rebuilt
from coatcheck.parts.part import Kind, Part
from coatcheck.parts.texts import text_of

__all__ = [
    "DIALECTS", "Kind", "Part", "as_block", "block_of", "extra_fields", "is_block", "is_known",
    "leaves", "message_fields", "read", "rebuilt", "text_of", "write",
]  # fmt: skip

DIALECTS: Final[dict[str, Any]] = {
    "text": texts,
    "anthropic": anthropic,
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "mcp": mcp,
    "langchain": langchain,
    "openai_agents": openai_agents,
    "pydantic_ai": pydantic_ai,
    "google": google,
    "bedrock": bedrock,
}
"""The modules that read and write parts, the first that knows a shape wins."""

_MESSAGES: Final = {**bedrock.MESSAGES, **google.MESSAGES}
_PAYLOAD_FIELDS: Final = frozenset(
    {
        "type",
        "text",
        "data",
        "source",
        "resource",
        "image_url",
        "file_data",
        "file",
        "input_audio",
        "content",
    }
)


def read(value: object) -> Part:
    """Return the part that a string, a dict or an object of an SDK is. It has the kind `unknown`
    if no dialect knows the shape."""
    if isinstance(value, str):
        return Part(value, original=value, read_as="text")
    if _is_foreign_object(value):
        return Part(original=value, read_as="foreign")
    block = value if isinstance(value, dict) else as_block(value)
    if block is None:
        return Part(original=value, read_as="unknown")
    for name, dialect in DIALECTS.items():
        part: Part | None = dialect.read(block)
        if part is not None:
            part = replace(part, original=value, block=block, dialect=name)
            return _with_parts(part) if part.kind == "nested" else part
    return _message(block) or Part(original=value, block=block, read_as="unknown")


def write(part: Part, dialect: str | None = None) -> Any:
    """Return a part as an object of a dialect, by default the one it was read in. Other fields of
    the object that it was read from stay, and so does its class."""
    name = dialect or part.dialect
    if part.kind == "foreign":
        return part.original if part.kept is None else part.kept
    if part.kind == "message":
        return _written_message(part)
    if part.kind == "nested":
        part = replace(part, content=tuple(write(one) for one in part.content))
    if not part.dialect or part.dialect != name:
        return DIALECTS[name].write(replace(part, block={}))
    return rebuilt(part.original, block_of(part))


def block_of(part: Part) -> dict[str, Any]:
    """Return a part in the dialect it was read in, as a JSON object."""
    written: dict[str, Any] = DIALECTS[part.dialect].write(part)
    return written


def leaves(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts that have a payload, in order, nested ones included."""
    for part in parts:
        if part.kind == "nested":
            yield from leaves(part.content)
        elif part.has_payload:
            yield part


def is_known(value: object) -> bool:
    """Whether this is a content block of a provider's shape, not just data with a `type`."""
    return isinstance(value, dict) and is_block(read(value))


def is_block(part: Part) -> bool:
    """Whether a part was read from a content block of a provider's shape."""
    return bool(part.dialect) and part.kind not in ("foreign", "message", "unknown")


def extra_fields(part: Part) -> dict[str, Any]:
    """Return the fields of a block besides its payload. They are never replaced."""
    return {key: value for key, value in part.block.items() if key not in _PAYLOAD_FIELDS}


def message_fields(part: Part) -> dict[str, Any]:
    """Return the fields of a framework's message besides its parts."""
    block = part.block
    outer = _outer(block)
    if not outer:
        return {key: value for key, value in block.items() if key != _MESSAGES[""]}
    others = {key: value for key, value in block.items() if key != outer}
    rest = {key: value for key, value in block[outer].items() if key != _MESSAGES[outer]}
    return {**others, **rest}


def _with_parts(part: Part) -> Part:
    """Return a nested part with its content read, or an unknown part if not all of it is known."""
    content = tuple(read(one) for one in part.content)
    if not all(is_block(one) for one in content):
        return replace(part, content=(), read_as="unknown", dialect="")
    return replace(part, content=content)


def _is_foreign_object(value: object) -> bool:
    """Whether this is an object of a framework with the bytes of a picture or file."""
    if isinstance(value, dict | list):
        return False
    try:
        return pydantic_ai.is_binary(value) or google.is_inline(value)
    except Exception:  # noqa: BLE001 - the properties of a host's class may raise anything
        return False


def _outer(block: dict[str, Any]) -> str:
    """Return the field of a message with the object that has its parts; "" for the message."""
    return next((key for key in _MESSAGES if key in block), "")


def _message(block: dict[str, Any]) -> Part | None:
    """Return the part of a framework's message or result, or None if it has no media of the
    framework inside."""
    outer = _outer(block)
    owner = block[outer] if outer else block
    content = owner.get(_MESSAGES[outer]) if isinstance(owner, dict) else None
    if not isinstance(content, list) or not any(read(one).kind == "foreign" for one in content):
        return None
    return Part(original=block, block=block, content=tuple(content), read_as="message")


def _written_message(part: Part) -> dict[str, Any]:
    block = part.block
    outer = _outer(block)
    if not outer:
        return {**block, _MESSAGES[""]: list(part.content)}
    return {**block, outer: {**block[outer], _MESSAGES[outer]: list(part.content)}}
