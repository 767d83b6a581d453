"""Pointers in arguments become values before a tool runs.

A string that is a pointer, at any depth, is replaced by the value behind it. For a Python function
the annotation at that place decides the form: `Path` gets a file, a binary stream gets a stream,
`str` and `bytes` get the text or bytes of any content, `Ref` gets the ref, and `Pointer` gets the
pointer itself. A string that contains more than a pointer is not replaced.

For a tool on another server a JSON Schema decides: text if the schema allows only strings, parsed
JSON if it allows no strings, else the value. Bytes are passed as base64 if the schema asks for it.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, Union

from coatcheck.errors import CoatcheckError, InvalidArgument, InvalidPointer, NotFound, TooLarge
from coatcheck.ids import clip, is_pointer, parse_pointer
from coatcheck.refs import Ref
from coatcheck.values import as_text

if TYPE_CHECKING:
    from coatcheck.session import Session

_MAX_DEPTH: Final = 32  # nested alternatives and references of a schema
_ANY: Final[Mapping[str, Any]] = {}
_STREAMS = (BinaryIO, IO, io.IOBase, io.RawIOBase, io.BufferedIOBase, io.BufferedReader, io.BytesIO)

Want = Literal["value", "text", "json", "bytes", "path", "stream", "ref", "pointer"]


class _PassPointer:
    def __repr__(self) -> str:
        return "PASS_POINTER"


PASS_POINTER: Final = _PassPointer()
"""In an `Annotated`: this parameter takes pointers unresolved."""

Pointer = Annotated[str, PASS_POINTER]
"""Annotation for a parameter that takes a pointer itself, not the value behind it."""


class Unresolvable(Exception):
    """A pointer in the arguments could not be resolved. The message names it."""


def resolve_arguments(
    session: Session,
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any] | None = None,
    *,
    foreign: bool = False,
    max_bytes: int | None = None,
) -> Mapping[str, Any]:
    """Return the arguments with every pointer replaced by its value, in the form that the schema
    asks for; the same object if there is none.

    Raises `InvalidArgument` for a pointer that cannot be resolved; with `foreign`, a pointer
    unknown to the session stays, because another server may know it. Raises `TooLarge` if the
    values have more than `max_bytes` in all."""
    pointers = list(argument_pointers(arguments))
    if not pointers:
        return arguments
    if max_bytes is not None:
        _check_size(session, pointers, max_bytes)
    with ExitStack() as resources:
        try:
            resolver = _SchemaResolver(session, resources, schema or _ANY, foreign)
            resolved = resolver.resolve(dict(arguments), schema or _ANY)
        except Unresolvable as error:
            raise InvalidArgument(str(error), hint="") from error
    assert isinstance(resolved, dict)
    return arguments if resolved == arguments else resolved


def _check_size(session: Session, pointers: Sequence[str], max_bytes: int) -> None:
    sizes: dict[str, int] = {}
    for pointer in set(pointers):
        ref = session.ref(pointer)
        sizes[pointer] = 0 if ref is None else ref.size_bytes
    total = sum(sizes[pointer] for pointer in pointers)
    if total > max_bytes:
        raise TooLarge(
            f"the pointers in these arguments refer to {total:,} bytes; "
            f"at most {max_bytes:,} can be passed on",
            hint="pass a part of it, e.g. art:…#/rows/0, or read it and send what matters",
        )


class Resolver:
    """Resolves the arguments of one call by annotations. Closing `resources` closes and removes
    what it opened."""

    def __init__(self, session: Session, resources: ExitStack) -> None:
        self._session = session
        self._resources = resources
        self._folder: str | None = None

    def resolve(self, value: Any, hint: Any) -> Any:
        """Return the value with every pointer in it replaced."""
        if isinstance(value, str):
            wanted = self._want(hint)
            if is_pointer(value) or wanted in ("ref", "stream"):
                return self._fetch(value, wanted)
            return value
        if isinstance(value, list):
            return [
                self.resolve(item, self._inside(hint, index)) for index, item in enumerate(value)
            ]
        if isinstance(value, dict):
            if self._want(hint) == "ref":
                raise Unresolvable("this parameter takes a pointer, not an object")
            return {key: self.resolve(item, self._inside(hint, key)) for key, item in value.items()}
        return value

    def _want(self, hint: Any) -> Want:
        return want(hint)

    def _inside(self, hint: Any, key: str | int) -> Any:
        """Return the annotation of an item of a list, or of a field of a dict, model, dataclass or
        typed dict."""
        for one in alternatives(hint):
            found = _hint_of_field(one, key) if isinstance(key, str) else _hint_of_item(one, key)
            if found is not None:
                return found
        return Any

    def _fetch(self, pointer: str, wanted: Want) -> Any:
        try:
            if wanted == "pointer":
                return pointer
            if wanted == "ref":
                return self._ref(pointer)
            if not is_pointer(pointer):
                raise InvalidPointer(
                    f"{clip(pointer)} is not a pointer, and this parameter takes the content of one"
                )
            if wanted == "stream":
                return self._resources.enter_context(self._session.open(pointer))
            if wanted == "path":
                return self._file(pointer)
            if wanted == "bytes":
                with self._session.open(pointer) as stream:
                    return stream.read()
            value = self._session.get(pointer)
            if value is None:  # a stored null, or not found: opening it tells which, and why
                self._session.open(pointer).close()
            return _as_text(value) if wanted == "text" else value
        except CoatcheckError as error:
            message = str(error)
            is_named = pointer.partition("#")[0] in message
            raise Unresolvable(
                message if is_named else f"{clip(pointer, 200)}: {message}"
            ) from error

    def _ref(self, pointer: str) -> Ref:
        if is_pointer(pointer) and parse_pointer(pointer).fragment:
            raise InvalidPointer(
                "this parameter takes a whole artifact", hint="leave out the part from '#' on"
            )
        ref = self._session.ref(pointer)
        if ref is None:
            self._session.open(pointer).close()
            raise NotFound(f"no artifact found for {clip(pointer)}")
        return ref

    def _file(self, pointer: str) -> Path:
        """Return the path of a private copy, which is removed after the call."""
        if self._folder is None:
            self._folder = self._resources.enter_context(
                tempfile.TemporaryDirectory(prefix="coatcheck-")
            )
        return self._session.materialize(pointer, self._folder)


class _SchemaResolver(Resolver):
    """Resolves by JSON Schemas instead of annotations. References lead into `root`."""

    def __init__(
        self, session: Session, resources: ExitStack, root: Mapping[str, Any], foreign: bool
    ) -> None:
        super().__init__(session, resources)
        self._root = root
        self._foreign = foreign

    def _want(self, hint: Any) -> Want:
        alternatives = self._alternatives(hint)
        if any(
            one.get("contentEncoding") == "base64" or one.get("format") == "byte"
            for one in alternatives
        ):
            return "bytes"
        kinds = {kind for one in alternatives for kind in _kinds(one)} - {"null"}
        if kinds == {"string"}:
            return "text"
        return "json" if kinds and "string" not in kinds else "value"

    def _inside(self, hint: Any, key: str | int) -> Any:
        for one in self._alternatives(hint):
            found = (
                _schema_of_field(one, key) if isinstance(key, str) else _schema_of_item(one, key)
            )
            if isinstance(found, dict):
                return found
        return _ANY

    def _fetch(self, pointer: str, wanted: Want) -> Any:
        if self._foreign and self._session.ref(pointer) is None:
            return pointer
        value = super()._fetch(pointer, wanted)
        if wanted == "bytes":
            return base64.b64encode(value).decode()
        try:
            value = value.decode() if isinstance(value, bytes) else value
            return json.loads(value) if wanted == "json" and isinstance(value, str) else value
        except UnicodeDecodeError:
            raise Unresolvable(
                f"{pointer} is not text, and this argument takes only text"
            ) from None
        except (ValueError, RecursionError):
            raise Unresolvable(
                f"{pointer} is text but not JSON, and this argument does not take strings"
            ) from None

    def _alternatives(self, schema: Any, depth: int = 0) -> list[Mapping[str, Any]]:
        """Return a schema with all that it refers to or chooses from."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
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
        if not ref.startswith("#"):
            return None
        at: Any = self._root
        for step in ref[1:].split("/")[1:]:
            if not isinstance(at, dict):
                return None
            at = at.get(step.replace("~1", "/").replace("~0", "~"))
        return at


def argument_pointers(value: object) -> Iterator[str]:
    """Yield the pointers in a value from a model, at any depth."""
    if is_pointer(value):
        yield str(value)
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from argument_pointers(one)


def _as_text(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else as_text(value)
    except UnicodeDecodeError:
        return value  # validation of the parameter reports it


def want(hint: Any) -> Want:
    """Return the form in which a parameter of this annotation takes the value of a pointer."""
    among = alternatives(hint)
    for one in among:
        form = _special_form(one)
        if form is not None:
            return form
    kinds = [_bare(one) for one in among]
    kinds = [kind for kind in kinds if kind is not type(None)]
    if kinds and all(kind is str for kind in kinds):
        return "text"
    if kinds and all(kind is bytes for kind in kinds):
        return "bytes"
    return "value"


def _special_form(hint: Any) -> Want | None:
    """Return the form for an annotation that is not satisfied with text, bytes or a value."""
    if _passes_pointer(hint):
        return "pointer"
    bare = _bare(hint)
    if bare is Ref:
        return "ref"
    if isinstance(bare, type) and issubclass(bare, PurePath):
        return "path"
    is_binary = isinstance(bare, type) and issubclass(bare, io.RawIOBase | io.BufferedIOBase)
    if is_binary or bare in _STREAMS:
        return "value" if typing.get_args(hint) == (str,) else "stream"
    return None


def _passes_pointer(hint: Any) -> bool:
    if typing.get_origin(hint) is not Annotated:
        return False
    return any(isinstance(note, _PassPointer) for note in hint.__metadata__)


def takes_streams(hint: Any) -> bool:
    """Whether an annotation contains a binary stream, which pydantic cannot validate."""
    return want(hint) == "stream" or any(takes_streams(one) for one in typing.get_args(hint))


def alternatives(hint: Any) -> list[Any]:
    """Return the members of a union, through aliases and optionals, or the annotation itself."""
    while (
        named := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    ) is not None:
        hint = named  # a NewType, a `type` statement
    if typing.get_origin(hint) is Annotated and not _passes_pointer(hint):
        return alternatives(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [found for one in typing.get_args(hint) for found in alternatives(one)]
    return [hint]


def _bare(hint: Any) -> Any:
    if typing.get_origin(hint) is Annotated:
        return _bare(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def hints_of(owner: Any) -> dict[str, Any]:
    """Return the resolved annotations of a function or class, or {} if they cannot be resolved."""
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}


def _hint_of_field(hint: Any, key: str) -> Any:
    """Return the annotation of a field of a dict, model, dataclass or typed dict; else None."""
    bare, args = _bare(hint), typing.get_args(hint)
    if not isinstance(bare, type):
        return None
    if issubclass(bare, Mapping) and not typing.is_typeddict(bare):
        return args[1] if len(args) == 2 else None
    return hints_of(bare).get(key)


def _hint_of_item(hint: Any, index: int) -> Any:
    """Return the annotation of an item of a list, tuple or set; else None."""
    bare, args = _bare(hint), typing.get_args(hint)
    if not args or not isinstance(bare, type):
        return None
    if issubclass(bare, tuple):
        return args[0] if args[-1] is Ellipsis else args[min(index, len(args) - 1)]
    return args[0] if issubclass(bare, Sequence | set | frozenset) else None


def _schema_of_field(schema: Mapping[str, Any], key: str) -> Any:
    fields = schema.get("properties")
    found = fields.get(key) if isinstance(fields, dict) else None
    return schema.get("additionalProperties") if found is None else found


def _schema_of_item(schema: Mapping[str, Any], index: int) -> Any:
    first = schema.get("prefixItems")
    if isinstance(first, list) and index < len(first):
        return first[index]
    return schema.get("items")


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema names; "other" for a choice that is not a string."""
    kinds, choices = schema.get("type"), schema.get("enum")
    if kinds is None and isinstance(choices, list):
        return ["string" if isinstance(one, str) else "other" for one in choices]
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []
