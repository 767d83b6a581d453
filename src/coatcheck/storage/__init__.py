"""The protocols that a backend implements: `BlobStore` keeps bytes, `Catalog` what is known about them, `PassageIndex`
finds words in them.

The store above orders the calls: a blob is durable before a row names it, and a row is gone before its blob is. A
backend keeps only the promises written here; `coatcheck.testing` has a suite for each protocol that proves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal, Protocol

from coatcheck.refs import Blob, Ref
from coatcheck.storage.claims import Claimant, Record, Records, check_idle, fenced
from coatcheck.storage.indexing import Held, Mark, Match, Passage, PassageIndex

__all__ = [
    "BlobStore", "Catalog", "Claimant", "Entry", "Freed", "Gone", "Held", "Limits", "Mark", "Match", "Passage",
    "PassageIndex", "Ranges", "Record", "Records", "SessionInfo", "Staged", "Totals", "check_idle", "fenced", "merged",
    "newest_of_each",
]  # fmt: skip

Gone = Literal["expired", "damaged"]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the catalog knows it. `ttl` and `quota` are None where there is no limit."""

    session_id: str
    parent: str | None = None
    ttl: float | None = None
    quota: int | None = None
    created: float = 0.0
    used: float = 0.0
    used_bytes: int = 0

    def expires(self, used: float) -> float | None:
        """When the session expires if it was last used at this moment, or later as the catalog has it."""
        return None if self.ttl is None else max(used, self.used) + self.ttl


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalog: a ref, the blob behind it, its session, and the content where the catalog holds it.

    `ref.expires` is the artifact's own expiry alone: the store adds the session's. `gone` marks a tombstone: the row
    tells what was here, and its blob may be no more. `seq` orders the refs of a session.
    """

    ref: Ref
    blob: Blob
    session: SessionInfo
    content: bytes | None = None
    gone: Gone | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """What a removal let go: how many refs and bytes, and the blobs whose bytes the blob store may now remove."""

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
class Limits:
    """What the store enforces at a put: its own quota in bytes, and the grace period of expiry in seconds."""

    store_quota: int | None = None
    grace: float = 0.0


_NO_LIMITS = Limits()
_NOTHING: Mapping[tuple[str, str], Ranges] = MappingProxyType({})


class Staged(Protocol):
    """Bytes that were written and hashed, but that nobody can find yet."""

    @property
    def digest(self) -> str: ...

    @property
    def size(self) -> int: ...

    def publish(self) -> Blob:
        """Make the bytes durable under their digest, at a place that no other copy has."""
        ...


class BlobStore(Protocol):
    """Immutable bytes by digest.

    No partial blob is ever visible. A copy that was published stays readable until `remove` names its place, whatever
    other copies of the same digest come and go. Every method is safe to call from many threads and processes.
    """

    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> AbstractContextManager[Staged]:
        """Write chunks as they come, in bounded memory; a digest that is known is not computed again. On leaving the
        context, what was not published is gone, and what was published is no longer protected from `sweep`: its row
        must be committed before."""
        ...

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        """Bytes from `offset` on, fewer than `length` only at the end. Raises `Damaged` where any frame that they touch
        fails its checksum, and `NotFound` where the copy is gone."""
        ...

    def holds(self, blob: Blob, data: bytes) -> bool:
        """Whether this copy is, byte for byte, the data. May raise what `read` raises."""
        ...

    def remove(self, blob: Blob) -> None:
        """Remove this copy. One that is gone already is no error."""
        ...

    def compress(self, blob: Blob) -> AbstractContextManager[Staged] | None:
        """Stage a smaller copy with the same answers to every read, or None where there is nothing to gain."""
        ...

    def places(self) -> Iterator[Blob]:
        """Every copy, with digest, coding and place (and nothing else), in any order."""
        ...

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        """Remove a copy that no row names, unless it is being published right now. Answers whether it was swept (or,
        with `remove=False`, whether it would have been)."""
        ...

    def leftovers(self, *, remove: bool) -> int:
        """How many bytes stages that crashed have left behind; with `remove`, they are gone after."""
        ...

    def uri(self, blob: Blob) -> str:
        """Where somebody with access to the backend finds this copy."""
        ...

    def close(self) -> None: ...


class Catalog(Records, Protocol):
    """Sessions, refs and names, and the content of small blobs.

    What a method has returned from is visible to every reader in every process, and as durable as the catalog was
    opened for. Each change is all or nothing. Every method is safe to call from many threads and processes.
    """

    inline_limit: int
    """Content up to this size is kept in the catalog itself."""

    is_far: bool
    """Whether every call is a trip to another machine: then `put_new` saves one."""

    def session(self, session_id: str) -> SessionInfo | None: ...

    def open_session(self, info: SessionInfo) -> None:
        """Create the session, or change its parent, ttl and quota; the rest of a session that exists stays."""
        ...

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        """Add a ref, its session and its blob where they are new, and count the session as used at `ref.created`.

        Where the catalog has the blob already it keeps the copy that it knows, unless `heal` says that the new one
        replaces it; the copy that lost is left to a sweep. Inline content always replaces what is stored. With `reuse`
        the blob must be the catalog's own: False, and nothing is changed, where it is gone meanwhile. A ref that
        equals the newest one of its artifact, under its name too, is not doubled. A session that is past its expiry by
        more than the grace period gets tombstones for what it held before, and loses its records. Raises
        `QuotaExceeded`."""
        ...

    def put_new(self, entry: Entry, *, limits: Limits = _NO_LIMITS) -> set[str] | None:
        """Put, in the same trip in which `near` would be asked, an artifact that the session does not hold; answers
        what `near` would have. None, and nothing is changed, where the session holds it. Only a catalog that is far
        need do it: another may always answer None."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """Puts of this thread inside are acknowledged together: each is visible at once and survives this process, and
        all are as durable as the catalog was opened for when the context is left. Leaving it by an error is no
        acknowledgement."""
        ...

    def behind(self) -> bool:
        """Whether `find(settled=False)` may miss what was put a moment ago, or tell what is not durable yet."""
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
        """Refs of one session, newest first, tombstones included.

        By `prefix`: of each artifact whose id begins with it, the newest ref (of those that live longest, and no
        tombstone where another is there). By `name`: every ref that was put under it. Else all, or those with a seq
        `before` that one. With `content`, entries carry the inline content; with `brief` too, their refs may lack all
        that was said of them. With `settled=False` the answer may lack what `behind` would tell of."""
        ...

    def near(self, sessions: Iterable[str], digests: Iterable[str], *, settled: bool = True) -> set[str]:
        """The ids in these sessions, tombstones included, whose first 12 characters are those of one of these: what
        their pointers must be told apart from. With `settled=False` the answer may lack what `behind` would tell of."""
        ...

    def version(self, session_id: str, name: str, digest: str) -> int:
        """The how-many-th of this session's refs under a name is the newest to this artifact, tombstones counted; 0
        where there is none."""
        ...

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        """The blob of this digest, whoever refers to it. With `settled=False`, one that another process put a moment
        ago may be missed."""
        ...

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        """Where the blobs of these digests are; those that are not known are left out."""
        ...

    def secret(self) -> bytes:
        """A key that this store drew once and keeps to itself: what it signs, it recognises after a restart."""
        ...

    def shown(self, session_id: str, digest: str) -> Ranges:
        """Which bytes of an artifact this session has seen: ranges in order that neither touch nor overlap."""
        ...

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        """Count sessions and blobs as used at these times, where that is later than what is known. A crash may lose
        it."""
        ...

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        """Pin or unpin a session's refs to an artifact; how many there were."""
        ...

    def remove(self, session_id: str, digest: str | None = None, *, end: bool = False) -> Freed:
        """Remove a session's refs to an artifact, or all of them; with `end` the session, its tombstones, its records
        and its claim too."""
        ...

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        """Turn every ref that had expired at this moment into a tombstone, drop the records of sessions that had,
        tombstones and empty sessions that expired before `forget_before`, and blobs that nothing refers to."""
        ...

    def relocate(self, old: Blob, new: Blob) -> bool:
        """Point at another copy of the same blob, if the catalog still points at the old one."""
        ...

    def lose(self, blob: Blob) -> int:
        """The bytes at this place are damaged or gone: turn refs to them into tombstones, which a later put of the same
        content brings back. How many refs there were."""
        ...

    def sessions(self) -> Iterator[SessionInfo]: ...

    def blobs(self) -> Iterator[tuple[Blob, bytes | None]]:
        """Every blob with its inline content."""
        ...

    def cold(self, before: float) -> Iterator[Blob]:
        """Blobs outside the catalog that are stored as they came and were last used before this moment. A walk that
        came to its end is remembered: what it gave comes again only after it was used again."""
        ...

    def check(self, *, repair: bool) -> list[str]:
        """Inconsistencies within the catalog, each as a sentence; with `repair`, those that can be are set right."""
        ...

    def totals(self) -> Totals: ...

    def compact(self) -> None:
        """Give space back, and overwrite what was removed."""
        ...

    def uri(self, blob: Blob) -> str:
        """Where somebody finds the content that this catalog holds itself."""
        ...

    def close(self) -> None: ...


def newest_of_each(entries: list[Entry]) -> list[Entry]:
    """Of each artifact the entry that lives longest, the first of such; in the order they came."""
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
    """The same bytes in as few ranges as can be, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return tuple(found)
