"""MCP: content blocks with base64 data, embedded resources, and the results of tools.

A result has its content, structured content, or both. Servers send structured content as text too,
for older clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from coatcheck.media import media_type_of
from coatcheck.parts.fields import Block, inner, of_base64, of_text, text_block
from coatcheck.parts.objects import as_json
from coatcheck.parts.part import Part

_RESULT_FIELDS: Final = frozenset(
    {"content", "structuredContent", "isError", "_meta", "resultType"}
)


def read(block: Block) -> Part | None:
    kind = block.get("type")
    if kind == "image":
        return of_base64("image", block.get("data"), block.get("mimeType"))
    if kind == "audio":
        return of_base64("audio", block.get("data"), block.get("mimeType"))
    if kind == "resource":
        return _resource(inner(block, "resource"))
    if kind == "resource_link" and isinstance(block.get("uri"), str):
        return Part(read_as="reference")
    return None


def _resource(resource: Block) -> Part | None:
    if not isinstance(resource.get("uri"), str):
        return None
    media_type = media_type_of(resource.get("mimeType")) or ""
    text = of_text(resource.get("text"), media_type)
    if text is not None:
        return text
    is_image = media_type.startswith("image/")
    return of_base64("image" if is_image else "file", resource.get("blob"), media_type)


def write(part: Part) -> Block:
    """Write a part. An embedded resource keeps its URI; its text is replaced."""
    block = part.block
    if part.kind == "text" and block.get("type") != "resource":
        return text_block(part)
    if block.get("type") != "resource":
        return {**block, "type": "image", "data": part.base64, "mimeType": part.media_type}
    resource = block["resource"]
    if part.kind != "text":
        image = {"mimeType": part.media_type, "blob": part.base64}
        return {**block, "resource": {**resource, **image}}
    payload = ("text", "blob", "mimeType")
    rest = {key: value for key, value in resource.items() if key not in payload}
    return {**block, "resource": {**rest, "mimeType": "application/json", "text": part.text}}


def as_result(value: object) -> Block | None:
    """Return a tool result (content, structured content, error flag) as a dict, else None."""
    found: Block | None = None
    if isinstance(value, dict):
        found = value
    elif isinstance(getattr(value, "content", None), list):
        found = as_json(value)
    if found is None or not isinstance(found.get("content"), list):
        return None
    return found if found.keys() <= _RESULT_FIELDS else None


def as_text_result(text: str, result: Block) -> Block:
    """Return a result with one text block in place of the content, and of the structured content
    if it has one."""
    changed = {**result, "content": [{"type": "text", "text": text}]}
    if result.get("structuredContent") is not None:
        changed["structuredContent"] = as_object(text)
    return changed


def as_object(text: str) -> Block:
    """Return what replaces structured content, which must be an object: the fields of a stub, or
    another text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": text}


def is_text_block(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def only_string(value: object) -> str | None:
    """Return the text in an object that has one string and nothing else, as servers wrap a text in
    structured content; None for anything else."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    (text,) = value.values()
    return text if isinstance(text, str) else None


def repeated(content: Iterable[Any], structured: object) -> object | None:
    """Return the value that a result's text and its structured content share, or None if they
    differ.

    Structured content must be an object, so a value that is not one is wrapped, as
    `{"result": …}` or `{"content": …}`, and some servers write a list as one text per item. A
    wrapped value is returned without its wrapping."""
    texts = [one.get("text") for one in content if is_text_block(one)]
    if not texts or not all(isinstance(one, str) for one in texts):
        return None
    text = only_string(structured)
    if text is not None:
        is_same = len(texts) == 1 and (texts[0] == text or _is_same(texts[0], structured))
        return text if is_same else None
    if _is_shared(texts, structured):
        return structured
    if not isinstance(structured, dict) or len(structured) != 1:
        return None
    (wrapped,) = structured.values()
    return wrapped if _is_shared(texts, wrapped) else None


def _is_shared(texts: list[Any], value: object) -> bool:
    """Whether the texts are this value, or its items."""
    if len(texts) == 1 and _is_same(texts[0], value):
        return True
    if not isinstance(value, list) or len(texts) != len(value):
        return False
    return all(_is_same(text, item) for text, item in zip(texts, value, strict=True))


def _is_same(text: Any, value: object) -> bool:
    """Whether a text equals this value, or is JSON that parses to it."""
    if isinstance(value, str) and text == value:
        return True
    try:
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return False
