"""What the store remembers of a transcript that was externalized: where it is, and what its bytes were.

A run adds a segment: so many bytes of the slim file stand for so many of the whole, with a digest of each. What follows
the last segment was appended since. Manifests are records of the transcript's session, and go with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from coatcheck.store import Store
from coatcheck.transcript.refs import PREFIX

SERIES: Final = "transcript"
_KEPT: Final = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the file: size and checksum (XXH3, 128 bits) of its slim bytes, by which they are known again, and
    size and SHA-256 of the whole ones, by which they are proved; None where nobody knows."""

    size: int
    checksum: str
    whole_size: int
    whole_sha256: str | None
    found_size: int | None = None
    found_sha256: str | None = None

    @property
    def in_backup(self) -> tuple[int, str | None]:
        """Size and digest of what a backup has of it: the bytes as they were found."""
        return (self.whole_size, self.whole_sha256) if self.found_size is None else (self.found_size, self.found_sha256)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`backed_up` is the number of the first segment whose whole bytes the backup has."""

    path: str
    format: str
    segments: tuple[Segment, ...] = ()
    backed_up: int = 0

    @property
    def size(self) -> int:
        return sum(one.size for one in self.segments)

    @property
    def whole_size(self) -> int:
        return sum(one.whole_size for one in self.segments)

    @property
    def backup_size(self) -> int:
        return sum(one.in_backup[0] for one in self.segments[self.backed_up :])

    def grown(self, segment: Segment) -> Manifest:
        return replace(self, segments=(*self.segments, segment))


def remember(store: Store, session_id: str, manifest: Manifest) -> None:
    """Record a manifest, as durably as the store was opened for."""
    segments = [
        [one.size, one.checksum, one.whole_size, one.whole_sha256]
        + ([] if one.found_size is None else [one.found_size, one.found_sha256])
        for one in manifest.segments
    ]
    said = {
        "v": 1,
        "path": manifest.path,
        "format": manifest.format,
        "segments": segments,
        "backup": manifest.backed_up,
    }
    body = json.dumps(said, ensure_ascii=True, separators=(",", ":")).encode()
    store.session(session_id, ttl=None).record(SERIES, body, keep=_KEPT)


def recall(store: Store, session_id: str) -> Iterator[Manifest]:
    """The manifests of a transcript's session, the newest first. What makes no sense is left out."""
    for record in store.session(session_id).records(SERIES, newest=True):
        found = _parsed(record.body)
        if found is not None:
            yield found


def sessions_of(store: Store, path: str) -> list[str]:
    """The sessions of transcripts whose newest manifest names this path."""
    return [
        one.session_id
        for one in store.sessions()
        if one.session_id.startswith(PREFIX) and any(m.path == path for m in _newest(recall(store, one.session_id)))
    ]


def _newest(found: Iterable[Manifest]) -> list[Manifest]:
    for one in found:
        return [one]
    return []


def _found(size: Any = None, digest: Any = None) -> tuple[int | None, str | None]:
    return (None, None) if size is None else (int(size), None if digest is None else str(digest))


def _parsed(body: bytes) -> Manifest | None:
    try:
        said: Any = json.loads(body)
        segments = tuple(
            Segment(int(size), str(digest), int(whole_size), None if whole is None else str(whole), *_found(*found))
            for size, digest, whole_size, whole, *found in said["segments"]
        )
        return Manifest(str(said["path"]), str(said["format"]), segments, int(said["backup"]))
    except (ValueError, KeyError, TypeError):
        return None
