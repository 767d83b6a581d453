"""The values that a catalog takes and returns: sessions, entries, notes, and what is counted."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from coatcheck.refs import Blob, Ref
from coatcheck.storage import expiry

Gone = Literal["expired", "damaged"]
Ranges = tuple[tuple[int, int], ...]
Effect = Literal["add", "free", "move", "note"]
TRANSCRIPT: Final = "transcript:"
"""Prefix of the ids of sessions that keep the payloads of transcripts."""
RECORDS: Final = ("record/", "record0")
"""The first and the last key of records; "0" follows "/"."""
ASIDE: Final = ("aside/", "aside0")
"""Likewise of blobs that were set aside."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as stored in the catalog. `ttl` and `quota` are None if they are unlimited."""

    session_id: str
    parent: str | None = None
    ttl: float | None = None
    quota: int | None = None
    created: float = 0.0
    used: float = 0.0
    used_bytes: int = 0

    def expires(self, used: float = 0.0) -> float | None:
        """Return when the session expires if it was last used at `used`, or later according to the
        catalog."""
        return expiry.session_end(self.ttl, max(used, self.used))


class SessionFilter(NamedTuple):
    """Which sessions a page has: those whose ids contain a text, and begin with none of the
    prefixes in `without`. With `roots`, those whose parent is not listed itself; with `parents`,
    the children of these; with `used_after`, those that were used after this time."""

    contains: str = ""
    without: tuple[str, ...] = ()
    roots: bool = False
    parents: tuple[str, ...] | None = None
    used_after: float | None = None

    def passes(self, info: SessionInfo, listed: Collection[str]) -> bool:
        """Whether a session passes. `listed` are the ids of all sessions with the prefix of the
        page."""
        return (
            self.contains in info.session_id
            and not info.session_id.startswith(self.without)
            and not (self.roots and info.parent in listed)
            and (self.parents is None or info.parent in self.parents)
            and (self.used_after is None or info.used > self.used_after)
        )


ANY_SESSION: Final = SessionFilter()


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalog: a ref, its blob, its session, and the content if the catalog keeps it.

    `ref.expires` is the artifact's own expiry; the store adds the session's. `gone` marks a
    tombstone: the row describes a former artifact, whose blob may no longer exist. `seq` orders the
    refs of a session.
    """

    ref: Ref
    blob: Blob
    session: SessionInfo
    content: bytes | None = None
    gone: Gone | None = None
    seq: int = 0


class Note(NamedTuple):
    """A value under a key that belongs to a session, or to the store if `owner` is empty. Keys are
    short and ASCII."""

    owner: str
    key: str
    value: bytes = b""


Row = SessionInfo | Entry | Blob | Note


class Known(NamedTuple):
    """What a put needs to know about a digest: the entries of its session that begin alike, with
    their inline content; the ids in all of the sessions asked about that begin alike; and the blob,
    if it was asked for and is stored."""

    entries: list[Entry]
    ids: Collection[str]
    blob: Blob | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """What a removal freed: counts of refs, artifacts and bytes, and the blobs that the blob store
    may now remove."""

    refs: int = 0
    artifacts: int = 0
    bytes: int = 0
    blobs: tuple[Blob, ...] = ()

    @classmethod
    def of(cls, refs: int, blobs: Collection[Blob]) -> Freed:
        outside = tuple(blob for blob in blobs if blob.coding != "inline")
        return cls(refs, len(blobs), sum(blob.size for blob in blobs), outside)

    def __add__(self, other: Freed) -> Freed:
        counts = self.refs + other.refs, self.artifacts + other.artifacts, self.bytes + other.bytes
        return Freed(*counts, self.blobs + other.blobs)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole catalog. `stored_bytes` counts each blob once, `referenced_bytes` each
    ref. `quarantined_bytes` is the size of the copies in quarantine, which the blob store
    counts."""

    sessions: int = 0
    refs: int = 0
    artifacts: int = 0
    tombstones: int = 0
    stored_bytes: int = 0
    referenced_bytes: int = 0
    quarantined_bytes: int = 0


class SetAside(NamedTuple):
    """A blob that a repair took out of use. Its copies are not swept before `until`, as long as
    there are tombstones (`refs`) that it could restore. `content` is the damaged content of a blob
    that was kept in the catalog."""

    blob: Blob
    until: float
    content: bytes | None = None
    refs: int = 0

    def note(self) -> Note:
        blob, content = self.blob, None if self.content is None else self.content.hex()
        fields = (blob.size, blob.coding, blob.place, blob.frames.hex(), self.until, content)
        return Note("", ASIDE[0] + blob.digest, json.dumps(fields).encode())

    @classmethod
    def of(cls, note: Note) -> SetAside:
        size, coding, place, frames, until, content = json.loads(note.value)
        blob = Blob(note.key.removeprefix(ASIDE[0]), size, coding, place, bytes.fromhex(frames))
        return cls(blob, until, None if content is None else bytes.fromhex(content))


class Limits(NamedTuple):
    """Limits that a put enforces: the store's quota in bytes, and the grace period after expiry in
    seconds."""

    store_quota: int | None = None
    grace: float = 0.0


class Claimant(NamedTuple):
    """The newest claim of a session, and when its holder last claimed or wrote. Only exactly this
    token is accepted."""

    token: int
    holder: str
    at: float = 0.0


class Record(NamedTuple):
    """One entry of a series that belongs to a session. `token` belongs to the claim it was written
    under, if any."""

    seq: int
    at: float
    token: int | None
    body: bytes


NO_LIMITS: Final = Limits()


NOTHING_SHOWN: Final[Mapping[tuple[str, str], Ranges]] = MappingProxyType({})


def newest_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """Return the longest-lived entry of each artifact, the first one if several are equal, in their
    original order."""
    best: dict[str, Entry] = {}
    for entry in entries:
        known = best.get(entry.ref.artifact_id)
        if known is None or _end(known) < _end(entry):
            best[entry.ref.artifact_id] = entry
    return list(best.values())


def newest_in_each(sessions: Iterable[str], entries: Iterable[Entry]) -> list[Entry]:
    """Return `newest_of_each` for each of these sessions, one after the other."""
    found: dict[str, list[Entry]] = {session_id: [] for session_id in sessions}
    for entry in entries:
        found[entry.ref.session_id].append(entry)
    return [entry for each in found.values() for entry in newest_of_each(each)]


def _end(entry: Entry) -> float:
    if entry.gone:
        return -inf
    return inf if entry.ref.pinned or entry.ref.expires is None else entry.ref.expires


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges that touch or overlap, and sort them."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return tuple(found)
