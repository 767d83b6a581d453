"""What a provider demands of a request, piece by piece. Each provider says it in its own words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TYPES: Final = {"object", "array", "string", "number", "integer", "boolean", "null"}
_HOLDS_ONE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_HOLDS_MANY: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_HOLDS_NAMED: Final = ("properties", "$defs", "patternProperties", "dependentSchemas")


@dataclass
class Refused(Exception):
    """A request that the provider would not take."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


def schema_fault(schema: object, where: str = "") -> str | None:
    """Why this is no JSON schema that a provider takes, or None. Not all of the standard: what tools are made of."""
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
    if len(set(required)) != len(required) or not set(required) <= set(schema.get("properties", required)):
        return f"{where}/required names what is not there, or twice"
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        return f"{where}/enum is not a list with something in it"
    return next(filter(None, (schema_fault(one, at) for at, one in _parts(schema, where))), None)


def _parts(schema: dict[str, Any], where: str) -> Iterable[tuple[str, object]]:
    for key in _HOLDS_ONE:
        if key in schema:
            yield f"{where}/{key}", schema[key]
    for key in _HOLDS_MANY:
        if key in schema:
            many = schema[key]
            yield from ((f"{where}/{key}/{n}", one) for n, one in enumerate(many or [None]))
    for key in _HOLDS_NAMED:
        if key in schema:
            named = schema[key]
            yield from (
                ((f"{where}/{key}/{name}", one) for name, one in named.items())
                if isinstance(named, dict)
                else [(f"{where}/{key}", None)]
            )
    if "$ref" in schema:
        yield f"{where}/$ref", schema["$ref"].startswith("#/$defs/") or None
