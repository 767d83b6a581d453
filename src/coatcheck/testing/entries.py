"""Rows for the suites to put: about bytes that a blob store holds, or with the content that the catalog is to hold."""

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
    """A row about bytes that a blob store holds."""
    data = content.encode()
    digest = digest or digest_of(data)
    ref = Ref(digest, session, len(data), **{"media_type": "text/plain", "kind": "result"} | about, created=created)
    return Entry(ref, Blob(digest, len(data), "raw", place, b""), SessionInfo(session, parent, ttl, quota))


def inline(data: bytes, **about: Any) -> Entry:
    """A row with the content that the catalog is to hold."""
    put = entry(data.decode(), **about)
    return replace(put, blob=Blob(digest_of(data), len(data)), content=data)
