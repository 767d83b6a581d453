"""Python values to bytes and back, exactly: `decode(encode(value)) == value`, in content and in type.

Text is UTF-8, anything JSON can hold is compact JSON in the order it came, bytes are themselves. Models and dataclasses
are stored as the JSON they describe. A value that would come back different (a tuple, a key that is no string, NaN) is
refused here rather than changed there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

from coatcheck.errors import Damaged, InvalidArgument, UnsupportedValue
from coatcheck.ids import clip
from coatcheck.refs import Codec

MAX_DEPTH = 200


class Encoded(NamedTuple):
    """A value that was encoded already: a put need not do it again.

    `text` is the value where that is text; `frames` are those of the bytes, where somebody has made them."""

    codec: Codec
    data: bytes
    text: str | None = None
    frames: bytes | None = None


def encode(value: object) -> tuple[Codec, bytes]:
    """The bytes of a value and how to read them back. Paths and streams are not values: the store streams those."""
    if isinstance(value, str):
        return "text", encode_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes", bytes(value)
    return "json", _dump(_plain(value))


def decode(codec: Codec, data: bytes) -> Any:
    if codec == "bytes":
        return data
    try:
        return decode_text(data) if codec == "text" else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"what was stored as {codec} does not read as such: {error}") from error


def encode_text(text: str) -> bytes:
    # Lone surrogates (file names, sloppy JSON) have no UTF-8 form; they pass in their three-byte one and come back.
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def approx_byte_size(value: object) -> int:
    """How many bytes a value takes in a prompt: UTF-8 of a text, else of its JSON; bytes count as they are."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(encode_text(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).nbytes
    try:
        return len(json.dumps(_plain(value), ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))
    except (TypeError, ValueError, RecursionError):
        return len(repr(value).encode("utf-8", "surrogatepass"))


def _plain(value: object) -> object:
    """Models and dataclasses as JSON values; everything else as it is."""
    described = hasattr(type(value), "__pydantic_serializer__") or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )
    if not described:
        return value
    import pydantic_core  # here, so that importing coatcheck stays quick

    try:
        return pydantic_core.to_jsonable_python(value)
    except pydantic_core.PydanticSerializationError as error:
        raise UnsupportedValue(f"cannot store a {type(value).__name__}: {clip(str(error))}") from error


def _dump(value: object) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if json.loads(text) == value:
            return encode_text(text)
    except (TypeError, ValueError, RecursionError):
        pass
    raise _why_not(value)


def _why_not(value: object) -> InvalidArgument:
    """Walk a value that does not survive JSON and name the first thing that stops it, and where."""
    stack: list[tuple[object, str, int]] = [(value, "", 0)]
    while stack:
        at, path, depth = stack.pop()
        where = f"at {clip(path)}" if path else "as the whole value"
        if depth > MAX_DEPTH:
            return UnsupportedValue(f"cannot store a value nested deeper than {MAX_DEPTH} levels", hint="flatten it")
        if isinstance(at, dict):
            for key, item in at.items():
                if not isinstance(key, str):
                    return UnsupportedValue(
                        f"cannot store a dict with a key of type {type(key).__name__} {where}",
                        hint="JSON keys are strings: convert them",
                    )
                stack.append((item, f"{path}/{key}", depth + 1))
        elif isinstance(at, list):
            stack.extend((item, f"{path}/{i}", depth + 1) for i, item in enumerate(at))
        elif isinstance(at, float) and not math.isfinite(at):
            return UnsupportedValue(
                f"cannot store {at!r} {where}: JSON has no such number", hint="use None or a string"
            )
        elif isinstance(at, tuple):
            return UnsupportedValue(
                f"cannot store a tuple {where}: it would come back as a list", hint="convert it to a list"
            )
        elif at is not None and not isinstance(at, str | int | float | bool):
            return UnsupportedValue(f"cannot store a {type(at).__name__} {where}")
    return UnsupportedValue(f"cannot store a {type(value).__name__}: it does not come back from JSON as it went in")
