"""Blocks and results that are objects, as the SDKs of OpenAI, Anthropic and MCP have them: read as the JSON that they
are on the wire, and made anew in their own class.

None of those packages is imported: a pydantic model is known by how it behaves.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_RESULT: Final = frozenset({"content", "structuredContent", "isError", "_meta", "resultType"})


def as_block(value: object) -> dict[str, Any] | None:
    """A dict or model with a type, as a dict. None for anything else."""
    if isinstance(value, dict):
        return value if isinstance(value.get("type"), str) else None
    return _wire(value) if isinstance(getattr(value, "type", None), str) else None


def as_result(value: object) -> dict[str, Any] | None:
    """The result of a tool call as MCP has it: content, structured content, whether it is an error. None for anything
    else."""
    found: dict[str, Any] | None
    if isinstance(value, dict):
        found = value
    else:
        found = _wire(value) if isinstance(getattr(value, "content", None), list) else None
    if found is None or not isinstance(found.get("content"), list) or not found.keys() <= _RESULT:
        return None
    return found


def like(original: object, changed: dict[str, Any]) -> object:
    """What has changed of an object, as an object of its kind; as a dict where there is none that takes it."""
    if isinstance(original, dict):
        return changed
    text = getattr(sys.modules.get(type(original).__module__), "TextContent", None)
    for kind in (type(original), text):
        try:
            return kind.model_validate(changed)  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - a model of somebody else's, or none
            continue
    return changed


def _wire(value: object) -> dict[str, Any] | None:
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        return None
    try:
        found = dump(mode="json", by_alias=True, exclude_none=True)
    except Exception:  # noqa: BLE001 - a model of somebody else's
        return None
    return found if isinstance(found, dict) else None
