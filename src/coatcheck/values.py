"""Python values to bytes and back, exactly: `decode(encode(value)) == value`, in content and in
type. Also what `repr` wrote, back to values, as closely as possible without running it.

Text becomes UTF-8 and JSON values become compact JSON in their own order; bytes stay as they are.
Models and dataclasses are stored as the JSON they describe. A value that would come back different
(a tuple, a key that is not a string, NaN) is refused.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import Damaged, InvalidArgument, UnsupportedValue
from coatcheck.ids import clip, escaped
from coatcheck.refs import Codec

if TYPE_CHECKING:
    from coatcheck.storage.frames import Framed

MAX_DEPTH = 200
_MOST_PLACES: Final = 10_000  # values that are looked at for the largest array
_SAMPLED: Final = 50  # items whose keys are its columns


class Encoded(NamedTuple):
    """A value that is already encoded, so that a put need not do it again.

    `text` is the value, if that is text; `framed` has the digest and the frames of the bytes, if
    they are known."""

    codec: Codec
    data: bytes
    text: str | None = None
    framed: Framed | None = None


def encode(value: object) -> tuple[Codec, bytes]:
    """Return the bytes of a value and how to decode them. Paths and streams are not values: the
    store streams those."""
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
    # Lone surrogates (file names, sloppy JSON) have no UTF-8 form; their three-byte form comes back
    # unchanged.
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def approx_byte_size(value: object) -> int:
    """The size of a value in bytes, as limits count it: bytes as they are, anything else as UTF-8
    of `as_text`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).nbytes
    return byte_size(as_text(value))


def byte_size(text: str) -> int:
    """The size of a text in UTF-8."""
    return len(text) if text.isascii() else len(encode_text(text))


def as_text(value: object) -> str:
    """The text that a model would be sent: text as it is, bytes decoded or as base64, anything else
    as compact JSON.

    Values that JSON does not have (tuples, sets, datetimes, odd keys, NaN) become the nearest JSON,
    or their `str`, so that no result is lost. Where `encode` accepts the value, this is the text of
    its bytes."""
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
    if type(value) in (dict, list):
        return value
    described = hasattr(type(value), "__pydantic_serializer__") or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )
    if not described:
        return value
    import pydantic_core  # here, so that importing coatcheck stays quick

    try:
        return pydantic_core.to_jsonable_python(value)
    except ValueError as error:  # an unknown type, bytes that are not UTF-8, a cycle
        raise UnsupportedValue(
            f"cannot store a {type(value).__name__}: {clip(str(error))}"
        ) from error


def _dump(value: object) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if json.loads(text) == value:
            return encode_text(text)
    except (TypeError, ValueError, RecursionError):
        pass
    raise _why_not(value)


def _why_not(value: object) -> InvalidArgument:
    """Find the first part of a value that does not survive JSON, and return the error that names
    it."""
    stack: list[tuple[object, str, int]] = [(value, "", 0)]
    while stack:
        at, path, depth = stack.pop()
        if depth > MAX_DEPTH:
            return UnsupportedValue(
                f"cannot store a value nested deeper than {MAX_DEPTH} levels", hint="flatten it"
            )
        error = _unsuitable(at, f"at {clip(path)}" if path else "as the whole value")
        if error is not None:
            return error
        if isinstance(at, dict):
            stack.extend((item, f"{path}/{key}", depth + 1) for key, item in at.items())
        elif isinstance(at, list):
            stack.extend((item, f"{path}/{index}", depth + 1) for index, item in enumerate(at))
    return UnsupportedValue(
        f"cannot store a {type(value).__name__}: it does not survive a round trip through JSON"
    )


def _unsuitable(value: object, where: str) -> UnsupportedValue | None:
    """The error for a value that JSON does not have, whatever is inside it."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return UnsupportedValue(
                    f"cannot store a dict with a key of type {type(key).__name__} {where}",
                    hint="JSON keys are strings: convert them",
                )
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return UnsupportedValue(
            f"cannot store {value!r} {where}: JSON has no such number", hint="use None or a string"
        )
    if isinstance(value, tuple):
        return UnsupportedValue(
            f"cannot store a tuple {where}: it would come back as a list",
            hint="convert it to a list",
        )
    if value is None or isinstance(value, str | int | float | bool | list):
        return None
    return UnsupportedValue(f"cannot store a {type(value).__name__} {where}")


def _jsonable(value: object) -> Any:
    """Convert what JSON has no form for. Sets are sorted, so that the same set gives the same text
    in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=as_text)
    import pydantic_core  # here, so that text does not need it

    return pydantic_core.to_jsonable_python(
        value,
        fallback=_printed,
        bytes_mode="base64",
        inf_nan_mode="constants",
        serialize_unknown=False,
    )


def _nearest(value: object) -> str:
    """The JSON nearest to a value with numbers or keys that JSON does not have, or its `str`."""
    try:
        return _ENCODER.encode(json.loads(_LENIENT.encode(value), parse_constant=str))
    except (TypeError, ValueError, RecursionError):
        pass
    import pydantic_core

    try:
        return pydantic_core.to_json(
            value, fallback=_printed, bytes_mode="base64", inf_nan_mode="strings"
        ).decode()
    except (ValueError, TypeError, RecursionError):  # a cycle, a lone surrogate
        return _printed(value)


def _printed(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a tool's own class may raise anything
        return f"<{type(value).__name__}>"


_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=_jsonable, allow_nan=False
)
_LENIENT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_jsonable)


class Array(NamedTuple):
    """An array inside a JSON value: the JSON Pointer to it, its length, and the keys of its first
    items in order."""

    pointer: str
    length: int
    columns: tuple[str, ...]


def largest_array(value: object) -> Array | None:
    """Describe the array that `find_largest` finds."""
    path, items = find_largest(value)
    pointer = "".join(f"/{escaped(key)}" for key in path)
    columns = dict.fromkeys(
        str(key) for item in items[:_SAMPLED] if isinstance(item, dict) for key in item
    )
    return Array(pointer, len(items), tuple(columns)) if items else None


def find_largest(value: object) -> tuple[tuple[str, ...], list[Any]]:
    """The array of a JSON value with the most items, and the keys that lead to it; empty if it has
    none. Arrays of objects come before others, and outer ones before those inside their items."""
    best: list[Any] = []
    best_path: tuple[str, ...] = ()
    best_rank = (False, 0)
    stack: list[tuple[object, tuple[str, ...]]] = [(value, ())]
    for _ in range(_MOST_PLACES):
        if not stack:
            break
        at, path = stack.pop()
        if isinstance(at, dict):
            stack.extend((item, (*path, str(key))) for key, item in reversed(at.items()))
        elif isinstance(at, list):
            has_objects = any(isinstance(item, dict) for item in at[:_SAMPLED])
            if (has_objects, len(at)) > best_rank:
                best_rank, best_path, best = (has_objects, len(at)), path, at
            if len(at) == 1:
                stack.append((at[0], (*path, "0")))
    return best_path, best


# Python's repr

_TOKEN: Final = lazy_pattern(
    r"""(?:(?P<text>b?(?:'(?:[^'\\\n]|\\[^\n])*+'|"(?:[^"\\\n]|\\[^\n])*+"))|(?P<mark>[,:])|(?P<close>[\])}])
    |(?P<number>[-+]?\d[\d_]*+(?:\.\d*+)?+(?:[eE][-+]?\d++)?+)|(?P<open>[^\W\d][\w.]*+\(|[\[({])
    |(?P<keyword>[^\W\d]\w*+=)|(?P<word>[-+]?[^\W\d][\w.]*+|\.\.\.|<[^<>\n]{1,200}>))\s*+""",
    re.VERBOSE,
)
_ESCAPE: Final = lazy_pattern(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_ESCAPES: Final = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "0": "\0",
}
_WORDS: Final[dict[str, Any]] = {
    "None": None, "True": True, "False": False, "nan": None, "inf": None, "-inf": None,
}  # fmt: skip
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_TIMES: Final[dict[str, Callable[..., Any]]] = {
    "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time,
    "timedelta": datetime.timedelta, "timezone": datetime.timezone,
}  # fmt: skip
_UTC: Final = ("datetime.timezone.utc", "datetime.UTC")


def read_repr(text: str, start: int = 0, *, most: int = 1 << 62) -> tuple[Any, int]:
    """Parse what `repr` or `pprint` wrote for a list, tuple, set or dict, and return the value and
    where its text ends.

    Nothing is evaluated. Tuples and sets become lists, keys become strings, a Decimal becomes a
    number; NaN and infinities become None. Dates and times stay what they are. An object with named
    fields becomes a dict, one with a single argument becomes that argument, and any other becomes
    its text. Raises ValueError for anything else, or `most` tokens and more."""
    return _ReprReader(text, start, most).read()


_NOTHING: Final = object()


class _ReprReader:
    """Reads the repr of one value, token by token."""

    def __init__(self, text: str, start: int, most: int) -> None:
        self._text, self._at, self._left = text, start, most
        self._stack: list[_Open] = []
        self._value: Any = _NOTHING  # read, but not yet part of what is open

    def read(self) -> tuple[Any, int]:
        while True:
            match = self._next()
            if match is None:
                raise self._wrong()
            written = match[str(match.lastgroup)]
            kind = match.lastgroup
            if not self._stack and kind != "open":
                raise self._wrong()
            if kind == "text":
                self._set(self._string(written))
            elif kind == "open":
                self._open(written, match.start())
            elif kind == "close":
                self._close(written, match.end("close"))
                if not self._stack:
                    return self._value, match.end("close")
            elif kind == "mark":
                self._take(is_key=written == ":")
            elif kind == "keyword":
                if self._value is not _NOTHING:  # `str` of a model has spaces between its fields
                    self._take(is_key=False)
                self._stack[-1].keyword = written[:-1]
            else:
                self._set(_word(written))

    def _next(self) -> re.Match[str] | None:
        self._left -= 1
        match = _TOKEN.match(self._text, self._at)
        if match is None or self._left <= 0:
            return None
        self._at = match.end()
        return match

    def _wrong(self) -> ValueError:
        return ValueError(f"this is not a repr: character {self._at + 1}")

    def _set(self, value: Any) -> None:
        if self._value is not _NOTHING:
            raise self._wrong()
        self._value = value

    def _take(self, *, is_key: bool) -> None:
        """Add the value to what is open."""
        if self._value is _NOTHING:
            raise self._wrong()
        self._stack[-1].take(self._value, is_key=is_key)
        self._value = _NOTHING

    def _open(self, opening: str, start: int) -> None:
        if self._value is not _NOTHING or len(self._stack) == MAX_DEPTH:
            raise self._wrong()
        self._stack.append(_Open(opening, start))

    def _close(self, closing: str, end: int) -> None:
        if self._value is not _NOTHING:
            self._take(is_key=False)
        if _CLOSING[self._stack[-1].opening[-1]] != closing:
            raise self._wrong()
        self._value = self._stack.pop().closed(self._text, end)

    def _string(self, written: str) -> str:
        """The text of a string. `pprint` writes long ones in pieces."""
        pieces = [unquoted(written)]
        while True:
            match = _TOKEN.match(self._text, self._at)
            if match is None or match.lastgroup != "text":
                return "".join(pieces)
            self._left -= 1
            if self._left <= 0:
                raise self._wrong()
            pieces.append(unquoted(match["text"]))
            self._at = match.end()


class _Open:
    """A bracket or a call that is not closed yet."""

    def __init__(self, opening: str, start: int) -> None:
        self.opening, self.start = opening, start
        self.items: list[Any] = []
        self.named: dict[str, Any] = {}
        self.keyword: str | None = None

    def take(self, value: Any, *, is_key: bool) -> None:
        """Add a value: as an item, or as the value of the last keyword or key; or remember it as a
        key."""
        if is_key:
            if self.keyword is not None or self.opening != "{":
                raise ValueError("a colon outside a dict")
            self.keyword = value if isinstance(value, str) else as_text(value)
        elif self.keyword is not None:
            self.named[self.keyword], self.keyword = value, None
        else:
            self.items.append(value)

    def closed(self, text: str, end: int) -> Any:
        """The value, now that its text has ended."""
        if self.keyword is not None or (self.opening == "{" and self.items and self.named):
            raise ValueError("a key without a value")
        if self.opening == "{":
            return self.items or self.named
        if self.opening in ("[", "("):
            return self.named or self.items
        name = self.opening[:-1].rpartition(".")[2]
        if name in _TIMES:
            moment = self._time(name)
            return text[self.start : end] if moment is None else moment
        return self._object(name, text[self.start : end])

    def _time(self, name: str) -> Any:
        """A date or a time; None if it is not valid."""
        named = dict(self.named)
        if named.get("tzinfo") in _UTC:
            named["tzinfo"] = datetime.UTC
        try:
            return _TIMES[name](*self.items, **named)
        except (TypeError, ValueError, OverflowError):
            return None

    def _object(self, name: str, written: str) -> Any:
        if not self.items:
            return self.named or []
        if isinstance(self.items[-1], dict):
            return self.items[-1]  # defaultdict, Counter
        if len(self.items) > 1 or self.named:
            return written
        only = self.items[0]
        return _word(only) if name == "Decimal" and isinstance(only, str) else only


def unquoted(written: str) -> str:
    """The text of a string, or of bytes, in Python's notation."""
    inner = written.removeprefix("b")[1:-1]
    return _ESCAPE.sub(_unescaped, inner) if "\\" in inner else inner


def _unescaped(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    return chr(min(int(digits, 16), 0x10FFFF)) if digits else _ESCAPES.get(match[4], match[4])


def _word(written: str) -> Any:
    """The value of a number or a name; the text itself, if it is neither."""
    if written in _WORDS:
        return _WORDS[written]
    try:
        return int(written)
    except ValueError:
        try:
            number = float(written)
        except ValueError:
            return written
        return number if math.isfinite(number) else None
