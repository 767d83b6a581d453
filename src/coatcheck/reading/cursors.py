"""Cursors: where a page stopped, signed with the store's key.

A cursor contains the position and the request that it continues, then a keyed tag over both and the artifact's id. So
the pointer and the cursor are enough to read on, also after a restart; if the request is repeated it must be the same.
A long pattern or query is not carried in the cursor: it must be repeated, and the tag covers it too.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.reading.page import Request, Slice, parse_chars, parse_lines

Position = tuple[int, ...]

TAG: Final = 6
CARRIED: Final = 160  # maximum bytes of a request that a cursor carries
_LONGEST: Final = 512
_PERSON: Final = b"coatcheck.cursor"
_SHAPE: Final = re.compile(r"[A-Za-z0-9_-]{8,}")
_AGAIN: Final = "leave the cursor out to read from the start"
_MEMBERS: Final = ("lines", "chars", "grep", "context", "ignore_case", "invert", "literal", "query", "diff")
_REPEAT: Final = 1 << len(_MEMBERS)


def seal(key: bytes, artifact_id: str, request: Request, position: Sequence[int]) -> str:
    """Make a cursor for this artifact and request. The key has 16 to 64 bytes and survives restarts."""
    wanted = _encode(request)
    body = wanted if len(wanted) <= CARRIED else _varint(_REPEAT)
    body += b"".join(map(_varint, position))
    return _text(body + _tag(key, artifact_id, wanted, body))


def unseal(key: bytes, artifact_id: str, cursor: str, request: Request | None = None) -> tuple[Request, Position]:
    """Return the request that a cursor continues, and its position.

    `request` came with the cursor: its members must be at their default or equal to those in the cursor, and its
    `max_chars` applies to the next page. Raises `InvalidArgument` if the cursor is incomplete, was signed with another
    key, or belongs to another artifact or request."""
    given = request or Request()
    body, tag = _open(cursor)
    try:
        bits, at = _number(body, 0)
        if bits & _REPEAT:
            meant, wanted = given, _encode(given)
        else:
            meant, at = _decode(body, bits, at)
            wanted = body[:at]
        position = []
        while at < len(body):
            number, at = _number(body, at)
            position.append(number)
    except (IndexError, ValueError) as error:  # `InvalidArgument` is a ValueError too
        raise _not_ours() from error
    if not hmac.compare_digest(tag, _tag(key, artifact_id, wanted, body)):
        if bits & _REPEAT:
            raise InvalidArgument(
                "that cursor continues a request too long to be part of it, or is not for this artifact",
                hint="repeat the arguments of the first call exactly, and add the cursor",
            )
        raise _not_ours()
    for member in _MEMBERS:
        value = _member(given, member)
        if value and value != _member(meant, member):
            raise InvalidArgument(
                f"that cursor continues {_shown(member, getattr(meant, member))}, "
                f"not {_shown(member, getattr(given, member))}",
                hint=f"send the pointer and the cursor alone, or {_AGAIN}",
            )
    return replace(meant, max_chars=given.max_chars), tuple(position)


def continues_slice(cursor: str) -> bool:
    """Whether a cursor continues a slice rather than a grep or a query; the tag is not checked."""
    try:
        bits, _ = _number(_open(cursor)[0], 0)
    except (InvalidArgument, IndexError, ValueError):
        return False
    slices = sum(1 << bit for bit, name in enumerate(_MEMBERS) if name in ("lines", "chars"))
    return not bits & ~slices


def _not_ours() -> InvalidArgument:
    return InvalidArgument("that cursor is not for this artifact, or was altered", hint=_AGAIN)


def _open(cursor: str) -> tuple[bytes, bytes]:
    text = cursor.strip()
    if len(text) > _LONGEST or not _SHAPE.fullmatch(text):
        raise InvalidArgument(f"that cursor is invalid: {clip(text, 40)}", hint=_AGAIN)
    sealed = b""
    with suppress(binascii.Error):
        sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(sealed) != text or len(sealed) <= TAG:
        raise InvalidArgument("that cursor is incomplete", hint="copy it exactly from the page, or " + _AGAIN)
    return sealed[:-TAG], sealed[-TAG:]


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def _tag(key: bytes, artifact_id: str, wanted: bytes, body: bytes) -> bytes:
    mac = blake2b(key=key, digest_size=TAG, person=_PERSON)
    for part in (artifact_id.encode(), wanted, body):
        mac.update(_varint(len(part)) + part)
    return mac.digest()


def _member(request: Request, name: str) -> object:
    """A member in normal form: two ways to write the same slice are equal."""
    value: object = getattr(request, name)
    if isinstance(value, str) and name in ("lines", "chars"):
        return parse_lines(value) if name == "lines" else parse_chars(value)
    return value


def _encode(request: Request) -> bytes:
    """Encode the members that are not at their default: one bit each, then the values in order."""
    bits, values = 0, b""
    for bit, name in enumerate(_MEMBERS):
        value = _member(request, name)
        if not value:
            continue
        bits |= 1 << bit
        if isinstance(value, Slice):
            values += b"".join(_varint(0 if end is None else 1 + _zigzag(end)) for end in value)
        elif isinstance(value, str):
            written = value.encode("utf-8", "surrogatepass")
            values += _varint(len(written)) + written
        elif not isinstance(value, bool):
            assert isinstance(value, int)
            values += _varint(value)
    return _varint(bits) + values


def _decode(body: bytes, bits: int, at: int) -> tuple[Request, int]:
    if bits >> len(_MEMBERS):
        raise ValueError("unknown members")
    members: dict[str, object] = {}
    for bit, name in enumerate(_MEMBERS):
        if not bits >> bit & 1:
            continue
        if name in ("lines", "chars"):
            start, at = _number(body, at)
            end, at = _number(body, at)
            members[name] = ":".join("" if number == 0 else str(_unzigzag(number - 1)) for number in (start, end))
        elif name == "context":
            members[name], at = _number(body, at)
        elif name in ("grep", "query", "diff"):
            length, at = _number(body, at)
            members[name] = body[at : at + length].decode("utf-8", "surrogatepass")
            at += length
        else:
            members[name] = True
    return Request(**members), at  # type: ignore[arg-type]  # checked by Request itself, and by the tag


def _shown(name: str, value: object) -> str:
    return f"{name}={clip(value, 60)}" if isinstance(value, str) else f"{name}={value}"


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _unzigzag(number: int) -> int:
    return -(number + 1 >> 1) if number & 1 else number >> 1


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at
