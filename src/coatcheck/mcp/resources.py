"""Artifacts as resources: the URI of an artifact, links to it, and what a URI reads.

A resource is read in parts of at most a page of characters, or 48 KiB if it is not text. If a part
is not the whole, a second content says so and has the URI of the next part.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from coatcheck import Ref, Session
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.media import is_text
from coatcheck.previews.excerpts import line

SCHEME: Final = "art://"
PART_CHARS: Final = 8_000
PART_BYTES: Final = 48 * 1024
MAX_URI: Final = 1_000
"""Characters of a URI in a response."""
MAX_LABEL: Final = 200
"""Characters of a name, a media type or a summary."""
_ID: Final = re.compile(r"[0-9a-f]{12,64}")
_PARAMETERS: Final = frozenset({"lines", "cursor", "offset"})


def uri_of(ref: Ref) -> str:
    return f"art://{ref.artifact_id}"


def labels(ref: Ref) -> dict[str, Any]:
    """Return what names an artifact, shortened if it is very long. The id is always next to it."""
    return {
        "uri": uri_of(ref),
        "name": short(ref.name or ref.pointer),
        "mimeType": short(ref.media_type),
    }


def short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else line(label, MAX_LABEL)


def link_to(ref: Ref) -> dict[str, Any]:
    """Return a content block that links to an artifact, for people and programs: the stub beside it
    is for the model."""
    about = {"type": "resource_link", **labels(ref), "size": ref.size_bytes}
    return {**about, "annotations": {"audience": ["user"]}}


def parse_uri(uri: str) -> tuple[str, str | None, str | None, int]:
    """Return the pointer or name of an artifact, lines, cursor and offset. Raises
    `InvalidArgument`."""
    invalid = InvalidArgument(
        f"invalid artifact URI {uri[:200]!r}", hint="use art://<id> or art://name/<name>"
    )
    try:
        parts = urlsplit(uri)
        asked = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8
        )
    except ValueError as error:
        raise invalid from error
    query, name = dict(asked), unquote(parts.path[1:]) if parts.netloc == "name" else ""
    is_id = _ID.fullmatch(parts.netloc) is not None and parts.path in ("", "/")
    if (
        parts.scheme != "art"
        or parts.fragment
        or len(query) != len(asked)
        or not query.keys() <= _PARAMETERS
    ):
        raise invalid
    if not is_id and (not name or name.startswith("art:")):
        raise invalid
    if not re.fullmatch(r"\d{1,18}", query.get("offset", "0")):
        raise InvalidArgument("offset must be a number", hint="omit it to start at the beginning")
    target = f"art:{parts.netloc}" if is_id else name
    return target, query.get("lines"), query.get("cursor"), int(query.get("offset", "0"))


def contents(session: Session, uri: str) -> list[dict[str, Any]]:
    target, lines, cursor, offset = parse_uri(uri)
    ref = session.ref(target)
    if ref is None:
        session.open(target).close()  # raises the precise error
        raise NotFound(f"no artifact at {uri[:200]!r}")
    part: dict[str, Any] = {
        "uri": uri if len(uri) <= MAX_URI else uri_of(ref),
        "mimeType": short(ref.media_type),
    }
    if is_text(ref.media_type):
        if offset:
            raise InvalidArgument(
                f"offset cannot be used with {ref.pointer}: it is text", hint="use lines or cursor"
            )
        page = session.read(ref, lines=lines, cursor=cursor, exact=True, max_chars=PART_CHARS)
        if page.cursor is not None or lines is not None or cursor is not None:
            part["mimeType"] = "text/plain"
        part["text"] = page.text
        return [part] if page.cursor is None else [part, _note(ref, page.shown, cursor=page.cursor)]
    if lines is not None or cursor is not None:
        raise InvalidArgument(f"{ref.pointer} is not text and has no lines", hint="use offset")
    with session.open(ref) as stream:
        stream.seek(offset)
        data = stream.read(PART_BYTES)
    part["blob"], end = base64.b64encode(data).decode(), offset + len(data)
    shown = f"bytes {offset:,}-{end - 1:,} of {ref.size_bytes:,}"
    return [part] if end >= ref.size_bytes else [part, _note(ref, shown, offset=str(end))]


def _note(ref: Ref, shown: str, **parameters: str) -> dict[str, Any]:
    following = f"{uri_of(ref)}?{urlencode(parameters)}"
    return {
        "uri": following,
        "mimeType": "text/plain",
        "text": f"[only {shown} are shown here; the next part is at {following}]",
        "_meta": {"coatcheck/shown": shown, "coatcheck/next": following},
    }
