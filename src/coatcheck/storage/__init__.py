"""Backend protocols: `BlobStore` keeps bytes, `Catalog` keeps metadata about them, `PassageIndex`
searches their text.

The store above orders the calls: a blob is durable before a row references it, and a row is removed
before its blob. A backend guarantees only what is documented here; `coatcheck.testing` has a
conformance suite for each protocol. Methods with a body have a slow, correct default, which a
backend may override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from coatcheck.refs import Blob
from coatcheck.storage.catalog import Catalog
from coatcheck.storage.entries import (
    ANY_SESSION,
    TRANSCRIPT,
    Claimant,
    Entry,
    Freed,
    Gone,
    Known,
    Limits,
    Note,
    Ranges,
    Record,
    Row,
    SessionFilter,
    SessionInfo,
    SetAside,
    Totals,
    merged,
)

__all__ = [
    "ANY_SESSION", "TRANSCRIPT", "BlobStore", "Catalog", "Claimant", "Entry", "Freed", "Gone",
    "Held", "Known", "Limits", "Mark", "Match", "Note", "Passage", "PassageIndex", "Ranges",
    "Record", "Row", "SessionFilter", "SessionInfo", "SetAside", "Staged", "StagedBlob", "Totals",
    "merged",
]  # fmt: skip


class Staged(Protocol):
    """Bytes that were written and hashed, but are not visible yet."""

    @property
    def digest(self) -> str: ...

    @property
    def size(self) -> int: ...

    def publish(self) -> Blob:
        """Make the bytes durable under their digest, at a new place that is not used by any other
        copy."""
        ...


class StagedBlob(NamedTuple):
    """The `Staged` of a backend that knows the blob before it is published."""

    digest: str
    size: int
    publish: Callable[[], Blob]


class Quarantined(NamedTuple):
    """A copy in quarantine, with its size on the backend and the time when it was moved there."""

    blob: Blob
    size: int
    since: float


class BlobStore(ABC):
    """Immutable bytes by digest.

    A partial blob is never visible. A published copy stays readable until `remove` is called with
    its place, even if other copies of the same digest are added or removed. All methods are safe to
    call from many threads and processes.
    """

    @abstractmethod
    def stage(
        self, chunks: Iterable[bytes], digest: str | None = None
    ) -> AbstractContextManager[Staged]:
        """Write the chunks in bounded memory. A given digest is not computed again. On exit,
        unpublished bytes are removed, and published bytes are no longer protected from `sweep`:
        their row must be committed before."""

    @abstractmethod
    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        """Return bytes from `offset`, fewer than `length` only at the end. Raises `Damaged` if a
        frame in the range fails its checksum, and `NotFound` if the copy was removed."""

    @contextmanager
    def opened(self, blob: Blob) -> Iterator[Callable[[int, int], bytes]]:
        """Keep this copy open for several reads. Yields a function that does what `read` does with
        an offset and a length, and is safe to call from several threads."""
        yield partial(self.read, blob)

    def prefetch(self, ranges: Sequence[tuple[Blob, int, int]]) -> None:  # noqa: B027 - optional
        """Load these ranges (blob, offset, length) all at once, if that makes their `read` faster.
        Raises nothing: `read` reports what is wrong."""

    @abstractmethod
    def remove(self, blob: Blob) -> None:
        """Remove this copy. Removing a copy that does not exist is not an error."""

    @abstractmethod
    def places(self) -> Iterator[Blob]:
        """Yield every copy, with only digest, coding and place, in any order."""

    @abstractmethod
    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        """Remove a copy that no row references, unless it is being published right now. Returns
        whether it was removed (or, with `remove=False`, whether it would have been)."""

    @abstractmethod
    def uri(self, blob: Blob) -> str:
        """Return the location of this copy, for someone with access to the backend."""

    def holds(self, blob: Blob, data: bytes) -> bool:
        """Return whether this copy equals `data` byte for byte. If so, the copy is made as durable
        as a newly published one. May raise the errors of `read`."""
        return self.read(blob, 0, blob.size) == data

    def compress(self, blob: Blob) -> AbstractContextManager[Staged] | None:
        """Stage a smaller copy that reads the same, or return None if compression does not help."""
        return None

    def leftovers(
        self, *, remove: bool, is_named: Callable[[str], bool] = lambda place: False
    ) -> int:
        """Return the number of bytes left behind by crashed stages; with `remove`, delete them.
        Files that cannot be opened are ignored, and so are those whose place a row names, according
        to `is_named`."""
        return 0

    def quarantine(self, blob: Blob, at: float) -> bool:
        """Move a copy that no row references to the quarantine, unless it is being published right
        now, and note the time. Returns whether it was moved. A backend without a quarantine leaves
        the copy in its place."""
        return False

    def quarantined(self) -> Iterator[Quarantined]:
        """Yield every copy in quarantine. A copy that is taken back meanwhile may be missing."""
        return iter(())

    def take_back(self, blob: Blob) -> bool:
        """Move a copy from the quarantine back to its place. Returns False if it is not in
        quarantine."""
        return False

    def discard(self, blob: Blob) -> None:  # noqa: B027 - optional
        """Remove a copy from the quarantine. It is not an error if it is not there."""

    def foreign(self) -> Iterator[str]:
        """Report unexpected files among the copies: links, pipes, sockets, devices, folders in
        place of files, and folders that cannot be listed. Yields one sentence for each; nothing is
        changed."""
        return iter(())

    def close(self) -> None:  # noqa: B027 - optional
        """Close the store. Other methods need not work afterwards."""


class Passage(NamedTuple):
    """A part of an artifact: its first and last line, its byte range, and its text."""

    first: int
    last: int
    start: int
    end: int
    text: str


class Match(NamedTuple):
    """A search result. Lower scores are better. Lines are 0 if a name, tool or summary matched."""

    digest: str
    first: int
    last: int
    start: int
    end: int
    score: float


class Held(NamedTuple):
    """The labels that a session gives to an artifact, and the expiry of the session's refs to
    it."""

    labels: list[str]
    expires: float | None


class Mark(NamedTuple):
    """How far a session is indexed: when it was created, and its newest indexed ref."""

    created: float
    seq: int
    digest: str


class PassageIndex(Protocol):
    """Full-text search in passages of text artifacts and in their labels. The index is derived from
    the store, and its matches are only candidates: callers check each one against the store. All
    methods are safe to call from many threads."""

    def followed(self, session_id: str) -> Mark | None:
        """Return how far a session is indexed, or None if it is not."""
        ...

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return those artifacts whose content is not indexed yet."""
        ...

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        """Index the contents of artifacts. An artifact may have no passages."""
        ...

    def hold(
        self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool
    ) -> None:
        """Record a session's artifacts, by digest, and how far the session is indexed. With
        `complete`, they replace the known ones, otherwise they are added."""
        ...

    def count(self, sessions: Iterable[str], at: float) -> int:
        """Return the number of distinct artifacts in these sessions that do not expire before this
        time."""
        ...

    def leave(self, session_id: str, digest: str | None = None) -> None:
        """Remove an artifact from a session, or the whole session."""
        ...

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        """Return the best passages and labels for these words among the artifacts of these
        sessions."""
        ...

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Delete artifacts that the store no longer has, and all traces of their words. Returns
        their number."""
        ...

    def close(self) -> None: ...
