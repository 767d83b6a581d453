"""The description of a function for a model, made from its signature and docstring.

Any argument may be a pointer, so the schema of an array or an object accepts a string too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import GenericAlias
from typing import Any, Final, Literal

from coatcheck._toolkit import Description
from coatcheck.executor.arguments import Want, want

_POINTERS: Final = "Arguments may be pointers (art:...)."
_WANTED: Final[dict[Want, str]] = {
    "pointer": "a pointer (art:...)",
    "ref": "a pointer (art:...)",
    "stream": "a pointer (art:...) to the content",
    "path": "a path, or a pointer (art:...) to the content",
}
_MAX_CHARS: Final = 1_024  # of a description, as OpenAI limits it
_LARGE: Final = ("array", "object")
_BY_NAME: Final = ("properties", "$defs", "patternProperties", "dependentSchemas")
_DATA: Final = ("default", "enum", "const", "examples")


def description_of(
    name: str, function: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any]
) -> Description:
    """Describe a function by its docstring, annotations and defaults."""
    parameters = list(signature.parameters.values())
    named = [one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    found, shared = _schemas({one.name: _hint(one, hints) for one in named})
    properties = {one.name: _accepted(found[one.name], one) for one in named}
    required = [
        one.name
        for one in named
        if one.default is inspect.Parameter.empty and one.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": len(named) < len(parameters),
        **({"$defs": shared} if shared else {}),
    }
    pointers = _POINTERS if any(map(_takes_pointers, properties.values())) else ""
    text = _cut(inspect.getdoc(function) or "", _MAX_CHARS - len(pointers) - 1)
    return Description(name, " ".join(filter(None, [text, pointers])), schema, None)


def description_of_object(name: str, tool: object) -> Description:
    """Describe a tool that checks its own arguments: by its attributes, or as taking any arguments."""
    if isinstance(tool, Description):
        return tool if tool.name == name else replace(tool, name=name)
    schema: object = getattr(tool, "parameters", None)
    text: object = getattr(tool, "description", None)
    return Description(
        name,
        text if isinstance(text, str) else "",
        schema if isinstance(schema, Mapping) else {"type": "object", "properties": {}, "additionalProperties": True},
        getattr(tool, "read_only", None),
    )


def _cut(text: str, limit: int) -> str:
    """Cut a docstring after the last line that fits, or within its only line."""
    if len(text) <= limit:
        return text
    whole = text[: limit - 1].rpartition("\n")[0].rstrip()
    return f"{whole or text[: limit - 1]}…"


def _hint(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    hint = hints.get(parameter.name, Any)
    return GenericAlias(list, (hint,)) if parameter.kind is inspect.Parameter.VAR_POSITIONAL else hint


def _schemas(hints: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of each annotation, {} if it has none, and the shared definitions."""
    import pydantic  # here, so that importing the executor stays quick

    found: dict[str, dict[str, Any]] = {}
    adapters: list[tuple[str, Literal["validation"], pydantic.TypeAdapter[Any]]] = []
    for name, hint in hints.items():
        wanted = want(hint)
        found[name] = {"type": "string", "description": _WANTED[wanted]} if wanted in _WANTED else {}
        if wanted in _WANTED:
            continue
        try:
            adapter = pydantic.TypeAdapter(hint)
            adapter.json_schema()
        except (pydantic.PydanticUserError, TypeError, NameError):
            continue
        adapters.append((name, "validation", adapter))
    schemas, whole = pydantic.TypeAdapter.json_schemas(adapters)
    for (name, _), schema in schemas.items():
        found[name] = {**_untitled(schema), **_annotated_words(hints[name])}
    return found, _untitled(whole).get("$defs", {})


def _annotated_words(hint: Any) -> dict[str, str]:
    """Return the description from `Annotated[str, "the description"]`."""
    words = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, str)]
    return {"description": words[0]} if words else {}


def _untitled(schema: Any) -> Any:
    """Remove titles from a schema: they only repeat names, and cost tokens in every request."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title"}
    for key, value in kept.items():
        if key in _BY_NAME:
            kept[key] = {name: _untitled(one) for name, one in value.items()}
        elif key not in _DATA:
            kept[key] = _untitled(value)
    return kept


def _accepted(schema: dict[str, Any], parameter: inspect.Parameter) -> dict[str, Any]:
    """Return a parameter's schema with its default, accepting a pointer if the value may be large. If the default is
    None, null is left out."""
    if parameter.default is None:
        rest = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
        if len(rest) == 1:
            schema = {**rest[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
    if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
        schema = _or_pointer(schema)
    if parameter.default is inspect.Parameter.empty or parameter.default is None:
        return schema
    try:
        return {**schema, "default": json.loads(json.dumps(parameter.default, allow_nan=False))}
    except (TypeError, ValueError):
        return schema


def _or_pointer(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") in _LARGE:
        return {**schema, "type": [schema["type"], "string"]}
    if "$ref" in schema:
        return {"anyOf": [{"$ref": schema["$ref"]}, {"type": "string"}], **_without(schema, "$ref")}
    among = schema.get("anyOf", [])
    if any(one.get("type") in _LARGE or "$ref" in one for one in among) and {"type": "string"} not in among:
        return {**schema, "anyOf": [*among, {"type": "string"}]}
    return schema


def _takes_pointers(schema: dict[str, Any]) -> bool:
    """Whether pointers make sense for a parameter: any text or bytes, or what may be large."""
    return any(
        not _without(one, "description") or ("string" in _types(one) and one.get("format", "binary") == "binary")
        for one in schema.get("anyOf", [schema])
        if "enum" not in one and "const" not in one
    )


def _types(schema: dict[str, Any]) -> list[Any]:
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]


def _without(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}
