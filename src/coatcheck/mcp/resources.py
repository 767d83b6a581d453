"""Artifacts as resources of MCP: `art://<id>`, listed in pages and read in pieces.

A piece never has more than a page of characters, or 48 KiB of what is no text. Where something is left out, a
second content says so and has the address of the next piece.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from coatcheck import Ref, Session
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.media import is_text

PAGE: Final = 50
PIECE_CHARS: Final = 8_000
PIECE_BYTES: Final = 48 * 1024
COMPLETIONS: Final = 100
BY_ID: Final = "art://{id}{?lines,cursor,offset}"
BY_NAME: Final = "art://name/{name}"
_SCHEME: Final = "art"
_NAME: Final = "name"
_POINTER: Final = "art:"
_ID: Final = re.compile(r"[0-9a-f]{12,64}")
_CURSOR: Final = re.compile(r"[0-9a-f]{64}")
_ASKS: Final = frozenset({"lines", "cursor", "offset"})

TEMPLATES: Final[tuple[Mapping[str, Any], ...]] = (
    {
        "uriTemplate": BY_ID,
        "name": "artifact",
        "title": "A stored artifact",
        "description": "By id, or 12 characters of it and more. lines=4100:4160 reads a part of a text.",
    },
    {"uriTemplate": BY_NAME, "name": "named artifact", "title": "The newest artifact of a name"},
)


@dataclass(frozen=True, slots=True)
class Address:
    """What an address asks for: an artifact, by pointer or name, and which piece of it."""

    target: str
    lines: str | None = None
    cursor: str | None = None
    offset: int = 0


def uri_of(ref: Ref) -> str:
    return f"{_SCHEME}://{ref.artifact_id}"


def parsed(uri: str) -> Address:
    """Raises `InvalidArgument`."""
    try:
        parts = urlsplit(uri)
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
    except ValueError as error:
        raise _not_ours(uri) from error
    if parts.scheme != _SCHEME or parts.fragment or len(dict(asked)) != len(asked) or not set(dict(asked)) <= _ASKS:
        raise _not_ours(uri)
    query = dict(asked)
    if parts.netloc == _NAME and len(parts.path) > 1:
        target = unquote(parts.path[1:])
        if target.startswith(_POINTER):
            raise _not_ours(uri)
    elif _ID.fullmatch(parts.netloc) and parts.path in ("", "/"):
        target = _POINTER + parts.netloc
    else:
        raise _not_ours(uri)
    offset = query.get("offset", "0")
    if not re.fullmatch(r"\d{1,18}", offset):
        raise InvalidArgument("offset is no number", hint="leave it out to begin at the beginning")
    return Address(target, query.get("lines"), query.get("cursor"), int(offset))


def listed(session: Session, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """A page of the artifacts that a session sees, the newest first, and the cursor for the next."""
    refs = list(_distinct(session))
    start = 0
    if cursor is not None:
        ids = [ref.artifact_id for ref in refs]
        if not _CURSOR.fullmatch(cursor) or cursor not in ids:
            raise InvalidArgument("that cursor is not one of this listing", hint="leave it out to begin again")
        start = ids.index(cursor) + 1
    page = refs[start : start + PAGE]
    more = start + PAGE < len(refs)
    return [resource_of(ref) for ref in page], page[-1].artifact_id if more else None


def resource_of(ref: Ref) -> dict[str, Any]:
    return {
        "uri": uri_of(ref),
        "name": ref.name or ref.pointer,
        "description": ref.summary,
        "mimeType": ref.media_type,
        "size": ref.size_bytes,
        "annotations": {"lastModified": ref.created_at.isoformat().replace("+00:00", "Z")},
        "_meta": {"coatcheck/pointer": ref.pointer, "coatcheck/kind": ref.kind},
    }


def link_of(ref: Ref) -> dict[str, Any]:
    """A resource link for the result of a tool: the client can open the whole, the model need not read it."""
    return {
        "type": "resource_link",
        "uri": uri_of(ref),
        "name": ref.name or ref.pointer,
        "mimeType": ref.media_type,
        "size": ref.size_bytes,
    }


def read(session: Session, uri: str) -> list[dict[str, Any]]:
    """The contents at an address: a piece, and where it is not all, a note about the next. Raises `CoatcheckError`."""
    address = parsed(uri)
    ref = session.ref(address.target)
    if ref is None:
        session.open(address.target).close()  # says best why
        raise NotFound(f"nothing is stored at {uri[:200]!r}")
    if is_text(ref.media_type):
        return _text(session, ref, uri, address)
    if address.lines is not None or address.cursor is not None:
        raise InvalidArgument(f"{ref.pointer} is no text: it has no lines", hint="read it by offset")
    return _bytes(session, ref, uri, address.offset)


def _text(session: Session, ref: Ref, uri: str, address: Address) -> list[dict[str, Any]]:
    if address.offset:
        raise InvalidArgument(f"{ref.pointer} is a text", hint="read it by lines, or go on with the cursor")
    page = session.read(ref, lines=address.lines, cursor=address.cursor, max_chars=PIECE_CHARS)
    is_whole = page.cursor is None and address.lines is None and address.cursor is None
    piece = {"uri": uri, "mimeType": ref.media_type if is_whole else "text/plain", "text": page.text}
    if page.cursor is None:
        return [piece]
    return [piece, _note(ref, page.shown, cursor=page.cursor)]


def _bytes(session: Session, ref: Ref, uri: str, offset: int) -> list[dict[str, Any]]:
    with session.open(ref) as stream:
        stream.seek(offset)
        data = stream.read(PIECE_BYTES)
    piece = {"uri": uri, "mimeType": ref.media_type, "blob": base64.b64encode(data).decode()}
    end = offset + len(data)
    if end >= ref.size_bytes:
        return [piece]
    return [piece, _note(ref, f"bytes {offset:,}-{end - 1:,} of {ref.size_bytes:,}", offset=str(end))]


def _note(ref: Ref, shown: str, **asks: str) -> dict[str, Any]:
    following = f"{uri_of(ref)}?{urlencode(asks)}"
    return {
        "uri": following,
        "mimeType": "text/plain",
        "text": f"[only {shown} are shown here; the next piece is at {following}]",
        "_meta": {"coatcheck/shown": shown, "coatcheck/next": following},
    }


def completed(session: Session, template: str, argument: str, value: str) -> tuple[list[str], int]:
    """What an argument of a template may be, the likeliest first, and how many there are."""
    if template == BY_ID and argument == "id":
        wanted = value.strip().lower().removeprefix(_POINTER).lstrip("/")
        found = [ref.artifact_id for ref in _distinct(session) if ref.artifact_id.startswith(wanted)]
    elif template == BY_NAME and argument == "name":
        wanted = unquote(value).lower()
        names = list(dict.fromkeys(ref.name for ref in session.list() if ref.name))
        fitting = [name for name in names if wanted in name.lower()]
        found = [
            quote(name, safe=" ") for name in sorted(fitting, key=lambda name: not name.lower().startswith(wanted))
        ]
    else:
        found = []
    return found[:COMPLETIONS], len(found)


def _distinct(session: Session) -> Iterable[Ref]:
    """Each artifact once, under its newest name."""
    found: dict[str, Ref] = {}
    for ref in session.list():
        if ref.artifact_id not in found or (found[ref.artifact_id].name is None and ref.name):
            found[ref.artifact_id] = ref
    return found.values()


def _not_ours(uri: str) -> InvalidArgument:
    return InvalidArgument(f"{uri[:200]!r} is no address of an artifact", hint="art://<id>, or art://name/<name>")
