"""Rows for the suites to put: for bytes in a blob store, or with inline content for the catalog."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coatcheck.ids import digest_of
from coatcheck.refs import Blob, Ref
from coatcheck.storage import Entry, SessionInfo


def entry(
    content: str = "",
    *,
    digest: str | None = None,
    session: str = "s",
    place: str = "place",
    ttl: float | None = None,
    parent: str | None = None,
    quota: int | None = None,
    created: float = 1.0,
    **about: Any,
) -> Entry:
    """Return a row for bytes in a blob store."""
    data = content.encode()
    digest = digest or digest_of(data)
    ref = Ref(digest, session, len(data), **{"media_type": "text/plain", "kind": "result"} | about, created=created)
    return Entry(ref, Blob(digest, len(data), "raw", place, b""), SessionInfo(session, parent, ttl, quota))


def inline(data: bytes, **about: Any) -> Entry:
    """Return a row with inline content for the catalog."""
    put = entry(data.decode(), **about)
    return replace(put, blob=Blob(digest_of(data), len(data)), content=data)
