"""Convert catalog rows to entries and back, and entries to journal records."""

from __future__ import annotations

import json
import struct
from typing import Any

from coatcheck.refs import Blob, Ref
from coatcheck.storage import Entry, SessionInfo

Row = tuple[Any, ...]

COLUMNS = """r.seq, r.digest, r.size, r.name, r.codec, r.media_type, r.kind, r.tool, r.call_id, r.producer, r.parents,
    r.summary, r.created_at, r.expires_at, r.pinned, r.granted_by, r.request, r.gone, b.coding, b.place, b.frames,
    s.session_id, s.parent, s.ttl, s.quota, s.created_at, s.used_at, s.used_bytes"""

EXPIRES, GONE, WIDTH = 13, 17, 28  # positions of these columns in a row, and its length

_SIZES = struct.Struct("<II")


def entry_of(row: Row, content: bytes | None = None) -> Entry:
    """Return the entry of a row of `COLUMNS`."""
    (seq, digest, size, name, codec, media_type, kind, tool, call_id, producer, parents,
     summary, created, expires, pinned, granted_by, request, gone, coding, place, frames,
     session_id, parent, ttl, quota, session_created, used, used_bytes) = row[:WIDTH]  # fmt: skip
    artifact_id = digest.hex()
    return Entry(
        Ref(
            artifact_id, session_id, size, media_type, kind, codec, name, tool, call_id, producer,
            tuple(json.loads(parents)) if parents else (), summary, created, expires, bool(pinned), granted_by,
            request,
        ),
        Blob(artifact_id, size, coding or "inline", place or "", frames or b""),
        SessionInfo(session_id, parent, ttl, quota, session_created, used, used_bytes),
        content,
        gone,
        seq,
    )  # fmt: skip


BRIEF = """r.digest, r.size, r.codec, r.expires_at, r.pinned, r.gone, b.coding, b.place, b.frames, s.session_id, s.ttl,
    s.used_at"""


def brief_entry_of(row: Row) -> Entry:
    """Return an entry with only the fields needed to return a value, in half the time.

    The row has the columns of `BRIEF`, the content, and another digest."""
    digest, size, codec, expires, pinned, _, coding, place, frames, session_id, ttl, used, content, _ = row
    artifact_id = digest.hex()
    return Entry(
        Ref(artifact_id, session_id, size, "", "", codec, expires=expires, pinned=bool(pinned)),
        Blob(artifact_id, size, coding or "inline", place or "", frames or b""),
        SessionInfo(session_id, None, ttl, None, 0.0, used),
        content,
    )


def ref_values(ref: Ref) -> Row:
    """Return the columns of a ref that a put sets, in table order."""
    return (
        ref.name, ref.codec, ref.media_type, ref.kind, ref.tool, ref.call_id, ref.producer,
        json.dumps(ref.parents) if ref.parents else "", ref.summary, ref.created, ref.expires, int(ref.pinned),
        ref.granted_by, ref.request,
    )  # fmt: skip


def pack(entry: Entry, *, heal: bool, grace: float) -> bytes:
    """Encode a put as a journal record: lengths, JSON, frames, content."""
    ref, blob, session = entry.ref, entry.blob, entry.session
    head = json.dumps(
        [ref.artifact_id, ref.size_bytes, ref_values(ref), blob.coding, blob.place,
         session.session_id, session.parent, session.ttl, session.quota, heal, grace,
         entry.content is not None]
    ).encode()  # fmt: skip
    return b"".join((_SIZES.pack(len(head), len(blob.frames)), head, blob.frames, entry.content or b""))


def unpack(record: bytes) -> tuple[Entry, bool, float]:
    """Decode the entry of a put, its `heal` flag, and its grace period."""
    head_size, frames_size = _SIZES.unpack_from(record)
    at = _SIZES.size + head_size
    digest, size, values, coding, place, *session, heal, grace, whole = json.loads(record[_SIZES.size : at])
    session_id, parent, ttl, quota = session
    (name, codec, media_type, kind, tool, call_id, producer, parents, summary, created, expires, pinned,
     granted_by, request) = values  # fmt: skip
    frames, content = record[at : at + frames_size], record[at + frames_size :]
    entry = Entry(
        Ref(
            digest, session_id, size, media_type, kind, codec, name, tool, call_id, producer,
            tuple(json.loads(parents)) if parents else (), summary, created, expires, bool(pinned), granted_by,
            request,
        ),
        Blob(digest, size, coding, place, frames),
        SessionInfo(session_id, parent, ttl, quota, created, created),
        content if whole else None,
    )  # fmt: skip
    return entry, heal, grace
