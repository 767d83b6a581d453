"""Backend protocols: `BlobStore` keeps bytes, `Catalog` keeps metadata about them, `PassageIndex` searches their text.

The store above orders the calls: a blob is durable before a row references it, and a row is removed before its blob. A
backend guarantees only what is documented here; `coatcheck.testing` has a conformance suite for each protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal, Protocol

from coatcheck.errors import StoreError
from coatcheck.refs import Blob, Ref
from coatcheck.storage.claims import Claimant, Record, Records, check_idle, fenced
from coatcheck.storage.indexing import Held, Mark, Match, Passage, PassageIndex

__all__ = [
    "TRANSCRIPT", "BlobStore", "Catalog", "Claimant", "Entry", "Freed", "Gone", "Held", "Limits", "Mark", "Match",
    "Passage", "PassageIndex", "Ranges", "Record", "Records", "SessionInfo", "SetAside", "Staged", "Totals",
    "check_idle", "fenced", "merged", "newest_of_each",
]  # fmt: skip

Gone = Literal["expired", "damaged"]
TRANSCRIPT = "transcript:"
"""Prefix of the ids of sessions that keep the payloads of transcripts."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as stored in the catalog. `ttl` and `quota` are None if there is no limit."""

    session_id: str
    parent: str | None = None
    ttl: float | None = None
    quota: int | None = None
    created: float = 0.0
    used: float = 0.0
    used_bytes: int = 0

    def expires(self, used: float) -> float | None:
        """Return when the session expires if it was last used at `used`, or later according to the catalog."""
        return None if self.ttl is None else max(used, self.used) + self.ttl


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalog: a ref, its blob, its session, and the content if the catalog keeps it.

    `ref.expires` is the artifact's own expiry; the store adds the session's. `gone` marks a tombstone: the row
    describes a former artifact, whose blob may no longer exist. `seq` orders the refs of a session.
    """

    ref: Ref
    blob: Blob
    session: SessionInfo
    content: bytes | None = None
    gone: Gone | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """What a removal freed: counts of refs, artifacts and bytes, and the blobs that the blob store may now remove."""

    refs: int = 0
    artifacts: int = 0
    bytes: int = 0
    blobs: tuple[Blob, ...] = ()

    def __add__(self, other: Freed) -> Freed:
        return Freed(
            self.refs + other.refs,
            self.artifacts + other.artifacts,
            self.bytes + other.bytes,
            self.blobs + other.blobs,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole catalog. `stored_bytes` counts each blob once, `referenced_bytes` each ref."""

    sessions: int = 0
    refs: int = 0
    artifacts: int = 0
    tombstones: int = 0
    stored_bytes: int = 0
    referenced_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SetAside:
    """A blob that a repair took out of use. Its copies are not swept before `until`, as long as there are tombstones
    (`refs`) that it could restore. `content` is the damaged content of a blob that was kept in the catalog."""

    blob: Blob
    until: float
    content: bytes | None = None
    refs: int = 0

    def pack(self) -> bytes:
        blob = self.blob
        fields = {"size": blob.size, "coding": blob.coding, "place": blob.place, "frames": blob.frames.hex(),
                  "until": self.until, "content": None if self.content is None else self.content.hex()}  # fmt: skip
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, digest: str, packed: bytes, refs: int = 0) -> SetAside:
        fields = json.loads(packed)
        blob = Blob(digest, fields["size"], fields["coding"], fields["place"], bytes.fromhex(fields["frames"]))
        return cls(blob, fields["until"], None if fields["content"] is None else bytes.fromhex(fields["content"]), refs)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a put enforces: the store's quota in bytes, and the grace period after expiry in seconds."""

    store_quota: int | None = None
    grace: float = 0.0


_NO_LIMITS = Limits()
_NOTHING: Mapping[tuple[str, str], Ranges] = MappingProxyType({})


class Staged(Protocol):
    """Bytes that were written and hashed, but are not visible yet."""

    @property
    def digest(self) -> str: ...

    @property
    def size(self) -> int: ...

    def publish(self) -> Blob:
        """Make the bytes durable under their digest, at a new place that is not used by any other copy."""
        ...


class BlobStore(Protocol):
    """Immutable bytes by digest.

    A partial blob is never visible. A published copy stays readable until `remove` is called with its place, even if
    other copies of the same digest are added or removed. All methods are safe to call from many threads and processes.
    """

    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> AbstractContextManager[Staged]:
        """Write the chunks in bounded memory. A given digest is not computed again. On exit, unpublished bytes are
        removed, and published bytes are no longer protected from `sweep`: their row must be committed before."""
        ...

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        """Return bytes from `offset`, fewer than `length` only at the end. Raises `Damaged` if a frame in the range
        fails its checksum, and `NotFound` if the copy was removed."""
        ...

    def holds(self, blob: Blob, data: bytes) -> bool:
        """Return whether this copy equals `data` byte for byte. If so, the copy is made as durable as a newly published
        one. May raise the errors of `read`."""
        ...

    def remove(self, blob: Blob) -> None:
        """Remove this copy. Removing a copy that does not exist is not an error."""
        ...

    def compress(self, blob: Blob) -> AbstractContextManager[Staged] | None:
        """Stage a smaller copy that reads the same, or return None if compression does not help."""
        ...

    def places(self) -> Iterator[Blob]:
        """Yield every copy, with only digest, coding and place, in any order."""
        ...

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        """Remove a copy that no row references, unless it is being published right now. Returns whether it was removed
        (or, with `remove=False`, whether it would have been)."""
        ...

    def leftovers(self, *, remove: bool) -> int:
        """Return the number of bytes left behind by crashed stages; with `remove`, delete them. Files that cannot be
        opened are ignored."""
        ...

    def foreign(self) -> Iterator[str]:
        """Report unexpected files among the copies: links, pipes, sockets, devices, folders in place of files, and
        folders that cannot be listed. Yields one sentence for each; nothing is changed."""
        ...

    def uri(self, blob: Blob) -> str:
        """Return the location of this copy, for someone with access to the backend."""
        ...

    def close(self) -> None: ...


class Catalog(Records, Protocol):
    """Sessions, refs and names, and the content of small blobs.

    When a method returns, its change is visible to every reader in every process, and as durable as the catalog was
    opened for. Each change is atomic. All methods are safe to call from many threads and processes.
    """

    inline_limit: int
    """Content up to this size is stored in the catalog itself."""

    is_far: bool
    """Whether every call is a network round trip: `put_new` then saves one."""

    def session(self, session_id: str) -> SessionInfo | None: ...

    def open_session(self, info: SessionInfo) -> None:
        """Create the session, or update parent, ttl and quota of an existing one."""
        ...

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        """Add a ref, and its session and blob if they are new, and mark the session as used at `ref.created`.

        If the catalog already has the blob, it keeps the known copy, unless `heal` asks for it to be replaced; the
        other copy is left to a sweep. Inline content always replaces the stored content. With `reuse`, the blob must be
        the catalog's own: if it was removed meanwhile, returns False and changes nothing. A ref equal to the newest one
        of its artifact, including the name, is not added twice. If the session expired longer ago than the grace
        period, its former refs become tombstones and its records are deleted. Raises `QuotaExceeded`."""
        ...

    def put_new(self, entry: Entry, *, limits: Limits = _NO_LIMITS) -> set[str] | None:
        """Put an artifact that the session does not have yet, and return the result of `near`, in one round trip.
        Returns None and changes nothing if the session has the artifact. Only remote catalogs need to implement it:
        others may always return None."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """Acknowledge the puts of this thread inside the context together. Each put is visible at once and survives
        this process; on exit, all are as durable as the catalog was opened for. Exiting with an error does not
        acknowledge them."""
        ...

    def behind(self) -> bool:
        """Return whether `find(settled=False)` may miss recent puts, or return some that are not durable yet."""
        ...

    def find(
        self,
        session_id: str,
        *,
        prefix: str | None = None,
        name: str | None = None,
        content: bool = False,
        brief: bool = False,
        settled: bool = True,
        limit: int | None = None,
        before: int | None = None,
    ) -> list[Entry]:
        """Return refs of one session, newest first, including tombstones.

        With `prefix`: for each artifact whose id starts with it, the newest of the refs that live longest; a tombstone
        only if there is no other ref. With `name`: every ref put under that name. Otherwise all refs, or those with a
        seq lower than `before`. With `content`, entries include the inline content; with `brief` as well, their refs
        may lack metadata. With `settled=False`, recent puts may be missing (see `behind`)."""
        ...

    def find_many(self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False) -> list[Entry]:
        """Return what `find` returns for each of these sessions and prefixes, in one query."""
        ...

    def lent(self, session_id: str, *, prefix: str | None = None, content: bool = False) -> list[Entry]:
        """Return refs that transcripts keep for this session, newest first, without tombstones: refs in sessions whose
        id starts with `TRANSCRIPT` that were granted by this one.

        With `prefix`, only the newest ref of each artifact whose id starts with it."""
        ...

    def near(self, sessions: Iterable[str], digests: Iterable[str], *, settled: bool = True) -> set[str]:
        """Return the ids in these sessions, including tombstones, that share their first 12 characters with one of
        `digests`: pointers must distinguish them. With `settled=False`, recent puts may be missing (see `behind`)."""
        ...

    def version(self, session_id: str, name: str, digest: str) -> int:
        """Return the version number of this artifact's newest ref under a name in this session, counted from 1 and
        including tombstones; 0 if there is none."""
        ...

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        """Return the blob of this digest, regardless of session. With `settled=False`, a recent put of another process
        may be missing."""
        ...

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        """Return the places of the blobs of these digests. Unknown digests are omitted."""
        ...

    def secret(self) -> bytes:
        """Return the store's private signing key. It is generated once, so signatures stay valid after a restart."""
        ...

    def shown(self, session_id: str, digests: Iterable[str]) -> dict[str, Ranges]:
        """Return which bytes of these artifacts this session has seen, as sorted ranges that do not touch or overlap.
        Artifacts of which it has seen nothing are omitted."""
        ...

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        """Update the last-used times of sessions and blobs, if these are later, and add to the ranges shown. A crash
        may lose the update."""
        ...

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        """Pin or unpin a session's refs to an artifact. Returns the number of refs."""
        ...

    def remove(
        self, session_id: str, digest: str | None = None, *, name: str | None = None, end: bool = False
    ) -> Freed:
        """Remove a session's refs to an artifact (only those under `name`, if given), or all of its refs. With `end`,
        also remove the session, its tombstones, records and claim. Refs that transcripts keep to the removed artifacts
        are no longer `lent` to the session."""
        ...

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        """Turn every ref that had expired at `at` into a tombstone. Delete the records of sessions that had expired,
        tombstones and empty sessions that expired before `forget_before`, and unreferenced blobs."""
        ...

    def relocate(self, old: Blob, new: Blob) -> bool:
        """Switch to another copy of the same blob, if the catalog still references the old one."""
        ...

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        """Turn refs to a damaged or missing blob into tombstones, and set the blob `aside`. A later put of the same
        content restores the refs. Content in the catalog itself is checked again in the same transaction; if it is
        valid, nothing changes. Returns the number of refs."""
        ...

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        """Return the blobs set aside by `lose` and `check`, all or those of these digests. `expire` deletes entries
        past their `until`, and entries without tombstones, because their refs were restored or removed."""
        ...

    def restore(self, blob: Blob) -> int:
        """Undo `lose` for a copy that turned out to be valid. Returns the number of restored refs; returns 0 and
        changes nothing if the catalog has another copy by now or no ref needs it."""
        ...

    def sessions(self) -> Iterator[SessionInfo]: ...

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        """Yield every blob, or the one with this digest, with its inline content, both read in one snapshot. If the
        content cannot be read, the error takes its place."""
        ...

    def cold(self, before: float) -> Iterator[Blob]:
        """Yield uncompressed blobs outside the catalog that were last used before this time. A completed walk is
        remembered: its blobs are yielded again only after they were used again."""
        ...

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        """Return inconsistencies within the catalog, one sentence each. With `repair`, those that can be repaired are,
        and their sentences end in ": set right" or ": removed". Blobs of refs that became tombstones are set aside."""
        ...

    def totals(self) -> Totals: ...

    def compact(self) -> None:
        """Return free space to the file system, and overwrite removed content."""
        ...

    def uri(self, blob: Blob) -> str:
        """Return the location of content that is stored in this catalog."""
        ...

    def close(self) -> None: ...


def newest_of_each(entries: list[Entry]) -> list[Entry]:
    """Return the longest-lived entry of each artifact, the first one if several are equal, in their original order."""
    best: dict[str, Entry] = {}
    for entry in entries:
        known = best.get(entry.ref.artifact_id)
        if known is None or _end(known) < _end(entry):
            best[entry.ref.artifact_id] = entry
    return list(best.values())


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
