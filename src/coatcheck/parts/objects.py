"""Objects of an SDK as their JSON, and back. No SDK is imported: a pydantic model is recognised by
its methods."""

from __future__ import annotations

import sys
from typing import Any


def as_json(value: object) -> dict[str, Any] | None:
    """Return a pydantic model as a dict, else None."""
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        return None
    try:
        found = dump(mode="json", by_alias=True, exclude_none=True)
    except Exception:  # noqa: BLE001 - a third party's model
        return None
    return found if isinstance(found, dict) else None


def as_block(value: object) -> dict[str, Any] | None:
    """Return a dict or model that has a `type` as a dict, else None."""
    if isinstance(value, dict):
        return value if isinstance(value.get("type"), str) else None
    return as_json(value) if isinstance(getattr(value, "type", None), str) else None


def rebuilt(original: object, changed: dict[str, Any]) -> object:
    """Return `changed` as an object of the original's class, or of its module's `TextContent`, or
    as a dict."""
    if isinstance(original, dict):
        return changed
    text = getattr(sys.modules.get(type(original).__module__), "TextContent", None)
    for kind in (type(original), text):
        try:
            return kind.model_validate(changed)  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - a third party's model, or no model at all
            continue
    return changed
