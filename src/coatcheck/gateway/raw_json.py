"""JSON with its bytes: a value that is not changed goes back as it came.

Bodies are read as `msgspec.Raw`. A `digest` identifies a value in the ledger, and `canonical` gives
values that a provider treats as equal the same text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_ARRAY: Final = msgspec.json.Decoder(list[Raw])
_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\u[eE][0-7]..|\\."
)
_PRIVATE: Final = re.compile(rb"\\u[eE][0-7]..|\\.")
_PAIR: Final = 12  # bytes of two escapes
_OF_TEXT: Final = frozenset({"type", "text", "cache_control", "annotations", "logprobs"})
_DEEPEST: Final = 100  # levels of a message that is looked into; parsers fail at about 500


class Unreadable(ValueError):
    """A body that cannot be read. It is relayed unchanged."""


def fields_of(raw: Raw | bytes) -> dict[str, Raw]:
    """Return the members of a JSON object with their bytes. Raises `Unreadable`."""
    try:
        return _OBJECT.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def items_of(raw: Raw | bytes) -> list[Raw]:
    """Return the elements of a JSON array with their bytes. Raises `Unreadable`."""
    try:
        return _ARRAY.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def value_of(raw: Raw | bytes) -> Any:
    """Return a JSON value. Lone surrogates are kept. Raises `Unreadable`."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:
            return json.loads(bytes(raw))
        except (ValueError, RecursionError) as error:
            raise Unreadable(str(error)) from error
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error


def raw_of(value: Any) -> Raw:
    """Return the JSON of a value, which may contain `Raw`."""
    try:
        return Raw(msgspec.json.encode(value))
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return Raw(json.dumps(value).encode())


def value_field(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a member, None if it is missing."""
    return value_of(fields[name]) if name in fields else None


def text_field(fields: Mapping[str, Raw], name: str) -> str:
    """Return a member that is a string, '' if it is missing or something else."""
    found = value_field(fields, name)
    return found if isinstance(found, str) else ""


def number_field(fields: Mapping[str, Raw], name: str) -> int | None:
    found = value_field(fields, name)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def object_field(fields: Mapping[str, Raw], name: str) -> dict[str, Any]:
    """Return a member that is an object, {} if it is missing or something else."""
    found = value_field(fields, name)
    return found if isinstance(found, dict) else {}


def text_in(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "".join(str(one.get("text", "")) for one in blocks if isinstance(one, dict))


def digest(*parts: str) -> str:
    """Return the ledger key for these texts."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "big"))
        whole.update(data)
    return whole.hexdigest()[:40]


def squeezed(text: str) -> str:
    """Return a text without whitespace: clients trim texts, and join them with blank lines."""
    return "".join(text.split())


def text_key(text: str, last_key: str | None = None) -> str:
    """Return the value under which an answer is found by its text: one that has only text, or one
    that had further steps after the last value that the client sends back."""
    return digest("text", squeezed(text), *([] if last_key is None else [last_key]))


def canonical(value: Any) -> str:
    """Return a text that is equal for values that a provider treats as equal: without cache marks
    and outer whitespace of texts, keys in one order, 1 for 1.0, and a text in place of a single
    text block."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def canonical_json(raw: Raw | str) -> str:
    """Return the canonical text of a value that is given as JSON; the JSON itself if it is not
    valid, or too deep."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
    try:
        value = value_of(data)
    except Unreadable:
        return data.decode("utf-8", "replace")
    return data.decode("utf-8", "replace") if is_deep(value) else canonical(value)


def is_deep(value: Any) -> bool:
    """Whether a value is nested more deeply than we look into values."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return False
        level = inner
    return True


def _is_text(value: dict[str, Any]) -> bool:
    """Whether a block contains only text."""
    if value.get("type") not in ("text", "input_text", "output_text"):
        return False
    return isinstance(value.get("text"), str) and value.keys() <= _OF_TEXT


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if _is_text(value):
            return value["text"].strip()
        return {name: _plain(one) for name, one in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return _plain_list(value)
    if isinstance(value, str):
        return value.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_list(value: list[Any]) -> Any:
    plain = [_plain(one) for one in value]
    is_single_text = len(plain) == 1 and isinstance(plain[0], str)
    return plain[0] if is_single_text else plain


def without_surrogates(body: bytes) -> bytes | None:
    """Return the body with each lone surrogate as a private-use character, None if there are none.
    JavaScript cuts strings between two surrogates, and strict parsers reject the halves."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return None
    found = False

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal found
        text = match[0]
        if text[1:2] != b"u" or len(text) == _PAIR:
            return text
        if text[2:3] in b"eE":
            raise Unreadable("lone surrogates beside characters of private use")
        found = True
        return b"\\ue" + b"%x" % (int(text[3:4], 16) - 8) + text[4:]

    try:
        changed = _ESCAPE.sub(replaced, body)
    except Unreadable:
        return None
    return changed if found else None


def with_surrogates(body: bytes) -> bytes:
    """Undo `without_surrogates`."""

    def replaced(match: re.Match[bytes]) -> bytes:
        text = match[0]
        return (
            b"\\ud" + b"%x" % (int(text[3:4], 16) + 8) + text[4:]
            if text[1:3] in (b"ue", b"uE")
            else text
        )

    return _PRIVATE.sub(replaced, body)
