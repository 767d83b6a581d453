"""How a value stands in JSON text, and how to write it just so again.

Writers differ in what they escape. A style is one writer's habit: a function from a text to the token that it writes.
What no style gives is kept as it stood.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Final

_LONE: Final = re.compile(r"[\ud800-\udfff]")
_GO: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-f]{4}|.)")
_DATA_URL: Final = re.compile(r"data:[\w.+/;=-]{0,100};base64,", re.ASCII)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")
_LOADING: Final = (
    8 << 20
)  # characters whose writing takes as long as loading what writes them in less than half the time
_LEAST: Final = 256  # characters from which on a text of that alphabet is base64, not a long word


def utf8(text: str) -> str:
    """JavaScript, Rust, and Python without `ensure_ascii`: only what must be escaped is, halves of pairs included."""
    token = encode_basestring(text)
    return _LONE.sub(_escaped, token) if _has_lone(token) else token


def ascii_(text: str) -> str:
    """Python as it comes."""
    return encode_basestring_ascii(text)


STYLES: Final[dict[str, Callable[[str], str]]] = {
    "utf8": utf8,
    "ascii": ascii_,
    "go": lambda text: utf8(text).translate(_GO),
    "go-old": lambda text: _upto_2023(utf8(text).translate(_GO)),
    "utf8-slash": lambda text: utf8(text).replace("/", "\\/"),
    "ascii-slash": lambda text: ascii_(text).replace("/", "\\/"),
    "ascii-upper": lambda text: _ESCAPE.sub(_upper, ascii_(text)),
}


def styled(text: str, token: str) -> str | None:
    """The style that writes this text as this token, or None."""
    return next((name for name, style in STYLES.items() if style(text) == token), None)


def tokens_of(value: object) -> Iterator[tuple[str, str]]:
    """How the commonest writers write a value: styles and tokens. A token with half a pair in it stands in no text."""
    if isinstance(value, str):
        yield "utf8", _plain(value)
        yield "ascii", ascii_(value)
        return
    for is_ascii in (False, True):
        for separators in ((",", ":"), (", ", ": ")):
            try:
                yield "json", json.dumps(value, ensure_ascii=is_ascii, separators=separators)
            except (ValueError, RecursionError):
                return


_written = 0


def _plain(text: str) -> str:
    """What `encode_basestring` gives."""
    global _written
    if _written < _LOADING:
        _written += len(text)
        return encode_basestring(text)
    import pydantic_core  # here, so that who has little to write need not load it

    try:
        return pydantic_core.to_json(text).decode()
    except ValueError:  # half a pair
        return encode_basestring(text)


def binary(text: str) -> tuple[str, bytes] | None:
    """The prefix of a `data:` address ('' where there is none) and the bytes behind a base64 that is written as we
    would write it; None for any other text."""
    prefix = ""
    if text.startswith("data:"):
        match = _DATA_URL.match(text)
        if match is None:
            return None
        prefix = match[0]
    body = text[len(prefix) :] if prefix else text
    if len(body) < _LEAST or len(body) % 4 or not _BASE64.match(body):
        return None
    try:
        data = binascii.a2b_base64(body.encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError):
        return None
    return (prefix, data) if base64.b64encode(data).decode() == body else None


def _has_lone(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _upper(match: re.Match[str]) -> str:
    found = match[0]
    return f"\\u{found[2:].upper()}" if found[1] == "u" else found


def _upto_2023(token: str) -> str:
    """Go before 1.22 had no short form for two of the controls."""
    return _ESCAPE.sub(lambda match: {"\\b": "\\u0008", "\\f": "\\u000c"}.get(match[0], match[0]), token)
