"""Pointers in arguments that a JSON Schema describes, as those of a tool on another server.

A pointer arrives as JSON: as a text where the schema takes strings alone, as the value behind it elsewhere, and as the
JSON that a text holds where the schema takes no strings. Bytes have no JSON, but where a schema asks for base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.executor.pointers import Resolver, Unresolved, Want
from coatcheck.ids import is_pointer

if TYPE_CHECKING:
    from coatcheck.session import Session

_DEEPEST: Final = 32  # alternatives within alternatives, and references
_ANY: Final[Mapping[str, Any]] = {}


def resolve_arguments(
    session: Session,
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any] | None = None,
    *,
    foreign: bool = False,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """The arguments with every pointer in them replaced by what it stands for, as the schema wants it.

    A pointer that leads nowhere raises `InvalidArgument` in words for a model; with `foreign` it stays as it is where
    the session does not know it, for somebody else may. `TooLarge` is for values of more than `max_bytes` in all."""
    pointers = list(_pointers(dict(arguments)))
    if max_bytes is not None and pointers:
        sizes = {pointer: ref.size_bytes for pointer in pointers if (ref := session.ref(pointer)) is not None}
        total = sum(sizes.get(pointer, 0) for pointer in pointers)
        if total > max_bytes:
            raise TooLarge(
                f"the pointers in these arguments stand for {total:,} bytes; at most {max_bytes:,} can be passed on",
                hint="pass a part of it, e.g. art:…#/rows/0, or read it and send what matters",
            )
    with ExitStack() as held:
        try:
            resolved = _BySchema(session, held, schema or _ANY, foreign).resolve(dict(arguments), schema or _ANY)
        except Unresolved as error:
            raise InvalidArgument(str(error), hint="") from error
    assert isinstance(resolved, dict)
    return resolved


def _pointers(value: object) -> Iterator[str]:
    if is_pointer(value):
        yield str(value)
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _pointers(one)


class _BySchema(Resolver):
    """Resolves by schemas in place of annotations. `root` is where references lead."""

    def __init__(self, session: Session, held: ExitStack, root: Mapping[str, Any], foreign: bool) -> None:
        super().__init__(session, held)
        self._root = root
        self._foreign = foreign

    def _want(self, hint: Any) -> Want:
        kinds = {kind for one in self._alternatives(hint) for kind in _kinds(one)} - {"null"}
        if any(_is_encoded(one) for one in self._alternatives(hint)):
            return "bytes"
        return "text" if kinds == {"string"} else "json" if kinds and "string" not in kinds else "value"

    def _inside(self, hint: Any, key: str | int) -> Any:
        for one in self._alternatives(hint):
            if isinstance(key, str):
                fields = one.get("properties")
                found = fields.get(key) if isinstance(fields, dict) else None
                found = one.get("additionalProperties") if found is None else found
            else:
                first = one.get("prefixItems")
                found = first[key] if isinstance(first, list) and key < len(first) else one.get("items")
            if isinstance(found, dict):
                return found
        return _ANY

    def _fetch(self, pointer: str, wanted: Want) -> Any:
        if self._foreign and self._session.ref(pointer) is None:
            return pointer
        value = super()._fetch(pointer, wanted)
        if wanted == "bytes":
            return base64.b64encode(value).decode()
        if isinstance(value, bytes):
            value = _decoded(pointer, value)
        return _parsed(pointer, value) if wanted == "json" and isinstance(value, str) else value

    def _alternatives(self, schema: Any, depth: int = 0) -> list[Mapping[str, Any]]:
        """What a schema may stand for: itself, and what it refers to or chooses from."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return []
        found: list[Mapping[str, Any]] = [schema]
        ref = schema.get("$ref")
        if isinstance(ref, str):
            found += self._alternatives(self._referred(ref), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(keyword)
            for one in choices if isinstance(choices, list) else ():
                found += self._alternatives(one, depth + 1)
        return found

    def _referred(self, ref: str) -> Any:
        at: Any = self._root
        for step in ref.removeprefix("#").split("/")[1:] if ref.startswith("#") else ("",):
            at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        return at


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type")
    if kinds is None and isinstance(schema.get("enum"), list):
        return ["string" if isinstance(one, str) else "other" for one in schema["enum"]]
    return [kinds] if isinstance(kinds, str) else [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _is_encoded(schema: Mapping[str, Any]) -> bool:
    return schema.get("contentEncoding") == "base64" or schema.get("format") == "byte"


def _decoded(pointer: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unresolved(f"{pointer} is no text, and this argument takes nothing else") from None


def _parsed(pointer: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unresolved(f"{pointer} is a text that is no JSON, and this argument takes no strings") from None
