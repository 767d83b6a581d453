"""Checks of a request that the providers share. Each provider has its own messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TYPES: Final = {"object", "array", "string", "number", "integer", "boolean", "null"}
_SUBSCHEMA: Final = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
_SUBSCHEMA_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_SUBSCHEMA_MAPS: Final = ("properties", "$defs", "patternProperties", "dependentSchemas")


@dataclass
class Refused(Exception):
    """The provider refuses the request."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


def schema_fault(schema: object, where: str = "") -> str | None:
    """Return why providers refuse this JSON schema, or None. Covers the part of the standard that
    tools use."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{where or 'the schema'} is not an object"
    types = schema.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if one not in _TYPES:
            return f"{where}/type: {one!r} is not a type"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{where}/required is not a list of names"
    if len(set(required)) != len(required) or not set(required) <= set(
        schema.get("properties", required)
    ):
        return f"{where}/required has unknown or duplicate names"
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        return f"{where}/enum is not a non-empty list"
    return next(filter(None, (schema_fault(one, at) for at, one in _parts(schema, where))), None)


def _parts(schema: dict[str, Any], where: str) -> Iterable[tuple[str, object]]:
    for key in _SUBSCHEMA:
        if key in schema:
            yield f"{where}/{key}", schema[key]
    for key in _SUBSCHEMA_LISTS:
        if key in schema:
            many = schema[key]
            yield from ((f"{where}/{key}/{n}", one) for n, one in enumerate(many or [None]))
    for key in _SUBSCHEMA_MAPS:
        if key in schema:
            named = schema[key]
            yield from (
                ((f"{where}/{key}/{name}", one) for name, one in named.items())
                if isinstance(named, dict)
                else [(f"{where}/{key}", None)]
            )
    if "$ref" in schema:
        yield f"{where}/$ref", schema["$ref"].startswith("#/$defs/") or None
