"""Ids, pointers and fragments: the one place that parses and checks them.

An id is 64 lower-case hex characters, the SHA-256 of the bytes. A pointer is `art:` and a prefix of
the id, at least 12 characters. A fragment such as `#/a/0` after it names a part of a JSON artifact
(RFC 6901).
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidPointer

SCHEME = "art:"
MIN_PREFIX = 12
_POINTER = lazy_pattern(r"art:([0-9a-f]{12,64})(#(?:/.*)?)?", re.DOTALL)
_HEX = lazy_pattern(r"[0-9a-f]{12,64}")
_MISSING = object()


class Target(NamedTuple):
    """A parsed pointer: the prefix of an id, and the fragment, '' if there is none."""

    prefix: str
    fragment: str = ""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def is_pointer(value: object) -> bool:
    """Whether this is a well-formed pointer, with or without a fragment. It need not resolve."""
    return isinstance(value, str) and _POINTER.fullmatch(value) is not None


def parse_pointer(text: str) -> Target:
    match = _POINTER.fullmatch(text)
    if match is None:
        raise InvalidPointer(f"{clip(text)} is not a pointer")
    return Target(match[1], (match[2] or "")[1:])


def is_prefix(text: str) -> bool:
    """Whether this is an id without `art:`, or a prefix of one that is long enough for a
    pointer."""
    return _HEX.fullmatch(text) is not None


def pointer_of(artifact_id: str, length: int = MIN_PREFIX) -> str:
    return SCHEME + artifact_id[:length]


def shared_prefix(one: str, other: str) -> int:
    """The number of leading characters that two ids share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """The smallest and the largest digest, as bytes, that begin with this hex prefix."""
    return bytes.fromhex(prefix.ljust(64, "0")), bytes.fromhex(prefix.ljust(64, "f"))


def escaped(key: str) -> str:
    """A key as a step of a fragment."""
    return key.replace("~", "~0").replace("/", "~1")


def follow(value: Any, fragment: str) -> Any:
    """Return the part of a JSON value that a fragment names. If there is no such part, the error
    says how far it got."""
    if not fragment:
        return value
    at = value
    for step, raw in enumerate(fragment.split("/")[1:]):
        token = raw.replace("~1", "/").replace("~0", "~")
        found: Any = _MISSING
        if isinstance(at, dict):
            found = at.get(token, _MISSING)
        elif isinstance(at, list) and re.fullmatch(r"0|[1-9][0-9]{0,17}", token):
            found = at[int(token)] if int(token) < len(at) else _MISSING
        if found is _MISSING:
            reached = "/" + "/".join(fragment.split("/")[1 : step + 1]) if step else "the top"
            raise InvalidPointer(
                f"nothing at #{clip(fragment)}: no {clip(token)} in {_shape(at)} at "
                f"{clip(reached)}",
                hint="a fragment is a JSON Pointer, e.g. #/items/0/name",
            )
        at = found
    return at


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode this text: it has no lone surrogates. Other text cannot be a
    name."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def clip(text: str, limit: int = 80) -> str:
    """Quote untrusted text for an error: bounded, printable, secrets masked."""
    from coatcheck.redaction import CONTEXT, mask  # here, so that a command starts quickly

    shown = mask(text[: limit + CONTEXT])
    return repr(
        shown
        if max(len(text), len(shown)) <= limit
        else f"{shown[:limit]}… ({len(text)} characters)"
    )


def _shape(value: object) -> str:
    if isinstance(value, dict):
        return f"the object of {len(value)} keys"
    if isinstance(value, list):
        return f"the array of {len(value)} items"
    return "a " + type(value).__name__
