"""The OpenAPI document, generated from the table of operations and the types that validate their
requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from pydantic import TypeAdapter

from coatcheck import __version__
from coatcheck.http import definitions as d
from coatcheck.http.operations import OPERATIONS, Operation

HEADER: Final = "x-coatcheck-"
_TEMPLATE: Final = "#/components/schemas/{model}"
_ERROR: Final = {"$ref": "#/components/responses/Error"}
_PATH: Final = {
    "session_id": "Id of the session, percent-encoded.",
    "target": "A pointer, an id, at least 12 characters of an id, or a name, percent-encoded: "
    "`/` is `%2F`.",
}
_PARAMETER: Final = re.compile(r"{(\w+)}")
_BINARY: Final = {"type": "string", "format": "binary"}
_ALWAYS: Final = (400,)
_WITH_TOKEN: Final = (401, 403)
_HEADERS: Final = {
    "ETag": "The digest of the content, in quotes.",
    "Repr-Digest": "SHA-256 of the whole content, in base64 between colons.",
}


@cache
def document() -> dict[str, Any]:
    """Return the document for all operations."""
    schemas, definitions = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        for method in operation.methods:
            paths.setdefault(operation.path, {})[method.lower()] = _described(
                operation, method, schemas
            )
    error = {
        "description": "What went wrong, and what to do.",
        "content": _json(schemas[d.ErrorAnswer]),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Coatcheck",
            "version": __version__,
            "description": "A content-addressed store for large tool results, over HTTP.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "responses": {"Error": error},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> tuple[dict[type, Any], dict[str, Any]]:
    """The schema of each body and answer, as a reference, and the definitions that they refer
    to."""
    bodies = {operation.body for operation in OPERATIONS if operation.body is not None}
    answers = {
        one for operation in OPERATIONS for one in operation.answers.values() if one is not None
    }
    named: list[tuple[type, Any]] = [(one, "validation") for one in bodies]
    named += [(one, "serialization") for one in (*answers, d.ErrorAnswer)]
    named.sort(key=lambda pair: pair[0].__name__)
    found, definitions = TypeAdapter.json_schemas(
        [(one, mode, TypeAdapter(one)) for one, mode in named], ref_template=_TEMPLATE
    )
    return {key[0]: schema for key, schema in found.items()}, dict(
        sorted(definitions["$defs"].items())
    )


def _described(operation: Operation, method: str, schemas: dict[type, Any]) -> dict[str, Any]:
    is_first = method == operation.methods[0]
    described: dict[str, Any] = {
        "operationId": operation.name if is_first else f"{operation.name}_{method.lower()}",
        "summary": operation.summary,
        "parameters": list(_parameters(operation)),
        "responses": dict(_responses(operation, schemas, is_head=method == "HEAD")),
    }
    if operation.scope is not None:
        described["description"] = f"Needs a token with the scope `{operation.scope}`."
        described["security"] = [{"token": []}]
    if operation.body is not None:
        described["requestBody"] = {
            "required": _is_required(operation.body),
            "content": _json(schemas[operation.body]),
        }
    elif operation.streams_in:
        described["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": {"schema": _BINARY}},
        }
    return described


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in _PARAMETER.findall(operation.path):
        schema = {"type": "string", "minLength": 1}
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH[name],
            "schema": schema,
        }
    if operation.query is not None:
        yield from _options(operation.query, "query")
    if operation.streams_in and operation.query is not None:
        yield from _options(operation.query, "header")
    if operation.streams_out:
        for name in ("range", "if-none-match", "if-match", "if-range"):
            yield {"name": name, "in": "header", "required": False, "schema": {"type": "string"}}


def _options(options: type, where: str) -> Iterator[dict[str, Any]]:
    """The members of a type of options, as parameters."""
    schema = TypeAdapter(options).json_schema(ref_template=_TEMPLATE)
    required = schema.get("required", ())
    for name, member in schema["properties"].items():
        one = _without_null(member)
        described = {"name": name, "in": where, "required": name in required and where == "query"}
        if where == "header":
            if one.get("type") == "array":
                continue  # a header has one value
            described["name"] = HEADER + name.replace("_", "-")
            described["description"] = f"The same as `{name}` of the query, percent-encoded."
        elif "description" in one:
            described["description"] = one.pop("description")
        yield described | {"schema": one}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter: one that is not given is missing, not null."""
    kept = {
        key: value
        for key, value in schema.items()
        if key not in ("title", "anyOf", "description", "default")
    }
    if schema.get("default") not in (None, (), []):
        kept["default"] = schema["default"]
    kinds = [dict(one) for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    described = {"description": schema["description"]} if "description" in schema else {}
    if len(kinds) == 1:
        return kept | kinds[0] | described
    return kept | ({"anyOf": kinds} if kinds else {}) | described


def _responses(
    operation: Operation, schemas: dict[type, Any], *, is_head: bool
) -> Iterator[tuple[str, Any]]:
    for status, answer in operation.answers.items():
        described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if answer is not None:
            described["content"] = _json(schemas[answer])
        elif operation.streams_out:
            described |= _streamed(has_body=status != 304 and not is_head)
        elif operation.name == "metrics":
            described["content"] = {"text/plain": {"schema": {"type": "string"}}}
        elif operation.name == "openapi":
            described["content"] = _json({"type": "object"})
        if status == 201:
            described["headers"] = {"Location": {"schema": {"type": "string"}}}
            described["links"] = _links()
        yield str(status), described
    for error in _errors(operation):
        yield str(error), {"description": HTTPStatus(error).phrase} if is_head else _ERROR
    yield "default", {"description": "An error"} if is_head else _ERROR


def _streamed(*, has_body: bool) -> dict[str, Any]:
    """Describe the headers of an artifact's content, and the content itself if it `has_body`."""
    headers = {}
    for name, text in _HEADERS.items():
        headers[name] = {"description": text, "schema": {"type": "string"}}
    if not has_body:
        return {"headers": headers}
    kinds = ("application/octet-stream", "text/plain")
    return {"headers": headers, "content": {kind: {"schema": _BINARY} for kind in kinds}}


def _errors(operation: Operation) -> list[int]:
    """Return the statuses of all errors that an operation may answer with."""
    found = {*_ALWAYS, *operation.errors}
    if operation.scope:
        found.update(_WITH_TOKEN)
    if operation.body is not None:
        found.update((413, 415))
    return sorted(found)


def _links() -> dict[str, Any]:
    """What can be done with an artifact that was put."""
    found = {"session_id": "$request.path.session_id", "target": "$response.body#/pointer"}
    named = [one.name for one in OPERATIONS if "{target}" in one.path]
    return {name: {"operationId": name, "parameters": found} for name in named}


def _is_required(body: type) -> bool:
    return "required" in TypeAdapter(body).json_schema()


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
