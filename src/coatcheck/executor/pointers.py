"""Pointers in arguments become what the parameter is annotated for, before the tool runs.

A whole string that is a pointer, at any depth, arrives as the value behind it. Where the annotation at that place says
`Path` it arrives as a file, for a binary stream as a stream, for `str` and `bytes` as the text or bytes of whatever
it is, for `Ref` as the ref, and for `Pointer` as it is. A string that merely contains a pointer is text.
"""

from __future__ import annotations

import io
import json
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, Union

from coatcheck.errors import CoatcheckError, InvalidPointer, NotFound
from coatcheck.ids import clip, is_pointer, parse_pointer
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.session import Session

Want = Literal["value", "text", "json", "bytes", "path", "stream", "ref", "pointer"]


class _PassPointer:
    def __repr__(self) -> str:
        return "PASS_POINTER"


PASS_POINTER: Final = _PassPointer()
"""In an `Annotated`: this parameter takes pointers as they are."""

Pointer = Annotated[str, PASS_POINTER]
"""The annotation of a parameter that takes a pointer itself, not the value behind it."""

_STREAMS = (BinaryIO, IO, io.IOBase, io.RawIOBase, io.BufferedIOBase, io.BufferedReader, io.BytesIO)


class Unresolved(Exception):
    """A pointer in the arguments leads nowhere; the message names it."""


class Resolver:
    """Resolves the arguments of one call. What it opens and writes is closed and removed with `held`."""

    def __init__(self, session: Session, held: ExitStack) -> None:
        self._session = session
        self._held = held
        self._folder: str | None = None

    def resolve(self, value: Any, hint: Any) -> Any:
        """The value with every pointer in it replaced; the same object where there was none."""
        if isinstance(value, str):
            wanted = self._want(hint)
            if is_pointer(value) or wanted in ("ref", "stream"):
                return self._fetch(value, wanted)
            return value
        if isinstance(value, list):
            return [self.resolve(item, self._inside(hint, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            if self._want(hint) == "ref":
                raise Unresolved("this parameter takes a pointer, not an object")
            return {key: self.resolve(item, self._inside(hint, key)) for key, item in value.items()}
        return value

    def _want(self, hint: Any) -> Want:
        return want(hint)

    def _inside(self, hint: Any, key: str | int) -> Any:
        return _inside(hint, key)

    def _fetch(self, pointer: str, wanted: Want) -> Any:
        try:
            if wanted == "pointer":
                return pointer
            if wanted == "ref":
                return self._ref(pointer)
            if not is_pointer(pointer):
                raise InvalidPointer(f"{clip(pointer)} is not a pointer, and this parameter takes the content of one")
            if wanted == "stream":
                return self._held.enter_context(self._session.open(pointer))
            if wanted == "path":
                return self._file(pointer)
            if wanted == "bytes":
                with self._session.open(pointer) as stream:
                    return stream.read()
            value = self._session.get(pointer)
            if value is None:  # a stored null, or nothing there: opening it says which, and why
                self._session.open(pointer).close()
            return _as_text(value) if wanted == "text" else value
        except CoatcheckError as error:
            raise Unresolved(_told(pointer, error)) from error

    def _ref(self, pointer: str) -> Ref:
        if is_pointer(pointer) and parse_pointer(pointer).fragment:
            raise InvalidPointer("this parameter takes a whole artifact", hint="leave out the part from '#' on")
        ref = self._session.ref(pointer)
        if ref is None:
            self._session.open(pointer).close()
            raise NotFound(f"no artifact found for {clip(pointer)}")
        return ref

    def _file(self, pointer: str) -> Path:
        """A private copy that goes when the call is over."""
        if self._folder is None:
            self._folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-"))
        return self._session.materialize(pointer, self._folder)


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value  # the check of the parameter's type says what is wrong


def _told(pointer: str, error: CoatcheckError) -> str:
    said = str(error)
    return said if pointer.partition("#")[0] in said else f"{clip(pointer, 200)}: {said}"


def want(hint: Any) -> Want:
    """What a parameter of this annotation takes where a pointer is sent."""
    for one in _alternatives(hint):
        if typing.get_origin(one) is Annotated and any(isinstance(m, _PassPointer) for m in one.__metadata__):
            return "pointer"
        bare = _bare(one)
        if bare is Ref:
            return "ref"
        if isinstance(bare, type) and issubclass(bare, PurePath):
            return "path"
        if bare in _STREAMS or (isinstance(bare, type) and issubclass(bare, io.RawIOBase | io.BufferedIOBase)):
            return "value" if typing.get_args(one) == (str,) else "stream"
    kinds = {_bare(one) for one in _alternatives(hint)} - {type(None)}
    return "text" if kinds == {str} else "bytes" if kinds == {bytes} else "value"


def takes_streams(hint: Any) -> bool:
    """Whether there is a binary stream anywhere in an annotation: no check of types knows what to do with those."""
    return want(hint) == "stream" or any(takes_streams(one) for one in typing.get_args(hint))


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, however deep in aliases and optionals; any other annotation is its only one."""
    while (named := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
        hint = named  # a NewType, a `type` statement
    if typing.get_origin(hint) is Annotated and not any(isinstance(m, _PassPointer) for m in hint.__metadata__):
        return _alternatives(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [found for one in typing.get_args(hint) for found in _alternatives(one)]
    return [hint]


def _bare(hint: Any) -> Any:
    if typing.get_origin(hint) is Annotated:
        return _bare(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def _inside(hint: Any, key: str | int) -> Any:
    """The annotation of an item of a list, or of a field of a dict, model, dataclass or typed dict."""
    for one in _alternatives(hint):
        bare, args = _bare(one), typing.get_args(one)
        if not isinstance(bare, type):
            continue
        if isinstance(key, str):
            if issubclass(bare, Mapping) and not typing.is_typeddict(bare):
                if len(args) == 2:
                    return args[1]
            elif key in (fields := hints_of(bare)):
                return fields[key]
        elif issubclass(bare, tuple) and args:
            return args[0] if args[-1] is Ellipsis else args[min(key, len(args) - 1)]
        elif issubclass(bare, Sequence | set | frozenset) and args:
            return args[0]
    return Any


def hints_of(owner: Any) -> dict[str, Any]:
    """The annotations of a function or class, resolved as far as they can be."""
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}
