"""Python values to bytes and back, exactly: `decode(encode(value)) == value`, in content and in type.

Text becomes UTF-8 and JSON values become compact JSON in their own order; bytes stay as they are. Models and
dataclasses are stored as the JSON they describe. A value that would come back different (a tuple, a key that is not a
string, NaN) is refused.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from typing import Any, Final, NamedTuple

from coatcheck.errors import Damaged, InvalidArgument, UnsupportedValue
from coatcheck.ids import clip
from coatcheck.refs import Codec

MAX_DEPTH = 200


class Encoded(NamedTuple):
    """A value that is already encoded, so that a put need not do it again.

    `text` is the value, if that is text; `frames` are the frame records of the bytes, if the caller has them."""

    codec: Codec
    data: bytes
    text: str | None = None
    frames: bytes | None = None


def encode(value: object) -> tuple[Codec, bytes]:
    """Return the bytes of a value and how to decode them. Paths and streams are not values: the store streams those."""
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
        raise Damaged(f"the stored bytes cannot be decoded as {codec}: {error}") from error


def encode_text(text: str) -> bytes:
    # Lone surrogates (file names, sloppy JSON) have no UTF-8 form; their three-byte form comes back unchanged.
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def approx_byte_size(value: object) -> int:
    """The size of a value in bytes, as limits count it: bytes as they are, anything else as UTF-8 of `as_text`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).nbytes
    return byte_size(as_text(value))


def byte_size(text: str) -> int:
    """The size of a text in UTF-8."""
    return len(text) if text.isascii() else len(encode_text(text))


def as_text(value: object) -> str:
    """The text that a model would be sent: text as it is, bytes decoded or as base64, anything else as compact JSON.

    Values that JSON does not have (tuples, sets, datetimes, odd keys, NaN) become the nearest JSON, or their `str`, so
    that no result is lost. Where `encode` accepts the value, this is the text of its bytes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return base64.b64encode(data).decode()
    try:
        return _ENCODER.encode(_plain(value))
    except (TypeError, ValueError, RecursionError, UnsupportedValue):
        return _nearest(value)


def _plain(value: object) -> object:
    """Convert models and dataclasses to JSON values; return everything else as it is."""
    described = hasattr(type(value), "__pydantic_serializer__") or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )
    if not described:
        return value
    import pydantic_core  # here, so that importing coatcheck stays quick

    try:
        return pydantic_core.to_jsonable_python(value)
    except ValueError as error:  # an unknown type, bytes that are not UTF-8, a cycle
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
    """Find the first part of a value that does not survive JSON, and return the error that names it."""
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
    return UnsupportedValue(f"cannot store a {type(value).__name__}: it does not survive a round trip through JSON")


def _jsonable(value: object) -> Any:
    """Convert what JSON has no form for. Sets are sorted, so that the same set gives the same text in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=as_text)
    import pydantic_core  # here, so that text needs none of it

    return pydantic_core.to_jsonable_python(
        value, fallback=_printed, bytes_mode="base64", inf_nan_mode="constants", serialize_unknown=False
    )


def _nearest(value: object) -> str:
    """The JSON nearest to a value with numbers or keys that JSON does not have, or its `str`."""
    try:
        return _ENCODER.encode(json.loads(_LENIENT.encode(value), parse_constant=str))
    except (TypeError, ValueError, RecursionError):
        pass
    import pydantic_core

    try:
        return pydantic_core.to_json(value, fallback=_printed, bytes_mode="base64", inf_nan_mode="strings").decode()
    except (ValueError, TypeError, RecursionError):  # a cycle, a lone surrogate
        return _printed(value)


def _printed(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a tool's own class may raise anything
        return f"<{type(value).__name__}>"


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_jsonable, allow_nan=False)
_LENIENT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_jsonable)
