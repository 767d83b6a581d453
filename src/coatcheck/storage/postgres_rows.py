"""Conversion between rows of a fleet's catalog and entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final

from coatcheck.refs import Blob, Ref
from coatcheck.storage import TRANSCRIPT, Entry, Freed, SessionInfo

Row = tuple[Any, ...]

OF_SESSION: Final = "s.tenant = %(tenant)s AND sha256(s.session_id) = sha256(%(session)s)"
LENT: Final = f"""r.tenant = %(tenant)s AND sha256(r.granted_by) = sha256(%(session)s) AND r.granted_by = %(session)s
    AND substr(s.session_id, 1, {len(TRANSCRIPT)}) = '{TRANSCRIPT}'"""
SESSION: Final = "s.session_id, s.parent, s.ttl, s.quota, s.created_at, s.used_at, s.used_bytes"
BLOB: Final = "b.digest, b.size, b.coding, b.place, b.frames, b.used_at"
REF: Final = """r.seq, r.digest, r.size, r.name, r.codec, r.media_type, r.kind, r.tool, r.call_id, r.producer,
    r.parents, r.summary, r.created_at, r.expires_at, r.pinned, r.granted_by, r.request, r.gone"""


def packed(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def hashes_of(sessions: Iterable[str]) -> list[bytes]:
    """Return the hashes that the indexes use instead of long ids."""
    return [hashlib.sha256(session_id.encode()).digest() for session_id in sessions]


def session_of(row: Row) -> SessionInfo:
    session_id, parent, *rest = row[:7]
    return SessionInfo(session_id.decode(), _text(parent), *rest)


def blob_of(row: Row) -> Blob:
    digest, *rest = row[:6]
    return Blob(digest.hex(), *rest)


def entry_of(row: Row) -> Entry:
    """Build an entry from a row of `REF`, `SESSION`, and its blob's coding, place, frames and content."""
    (seq, digest, size, name, codec, media_type, kind, tool, call_id, producer, parents, summary, created, expires,
     pinned, granted_by, request, gone, *session) = row[:25]  # fmt: skip
    coding, place, frames, content = row[25:]
    artifact_id, info = digest.hex(), session_of(tuple(session))
    return Entry(
        Ref(
            artifact_id, info.session_id, size, media_type.decode(), kind, codec, _text(name), _text(tool),
            _text(call_id), producer, tuple(json.loads(parents)) if parents else (), summary.decode(), created, expires,
            pinned, _text(granted_by), _text(request),
        ),
        Blob(artifact_id, size, coding or "inline", place or "", frames or b""),
        info,
        content,
        gone,
        seq,
    )  # fmt: skip


def freed_of(refs: int, blobs: list[Any]) -> Freed:
    gone = [blob_of(row) for row in blobs]
    return Freed(refs, len(gone), sum(b.size for b in gone), tuple(b for b in gone if b.coding != "inline"))


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()
