"""The rows of a catalog: what a backend must implement, and what every change is made of.

Methods that begin with `_` run inside a change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import TypeVar

from coatcheck.errors import StoreError
from coatcheck.refs import Blob
from coatcheck.storage import expiry
from coatcheck.storage.entries import (
    ANY_SESSION,
    RECORDS,
    Effect,
    Entry,
    Freed,
    Gone,
    Note,
    Row,
    SessionFilter,
    SessionInfo,
)

_T = TypeVar("_T")


class Rows(ABC):
    """The rows of a catalog, which a backend must implement: sessions by id, refs by session and
    `seq`, blobs by digest, notes by owner and key. All methods are safe to call from many threads
    and processes."""

    inline_limit: int = -1
    """Content up to this size is stored in the catalog itself. The defaults store none."""

    uri_prefix: str = "catalog:"
    """The location of content that is stored in this catalog, up to its digest."""

    @abstractmethod
    def change(
        self,
        doing: str,
        work: Callable[[], _T],
        *,
        session_id: str | None = None,
        effect: Effect | None = None,
    ) -> _T:
        """Run `work`, which reads and writes rows, as one change, and return its result. If it
        raises, nothing has changed. When this method returns, the change is visible to every reader
        in every process, and as durable as the catalog was opened for. No other change runs
        meanwhile, except one about another session if `session_id` names one. `work` may run again
        after a failure, even one that only lost the answer.

        A change with the effect "free" must be possible when space is short; one that adds may
        fail. After one that moves, bytes are removed, so it must always be durable. A crash may
        lose a change with the effect "note". `doing` is for errors."""

    @abstractmethod
    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        """Yield all sessions, or the one with this id."""

    @abstractmethod
    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        """Return the refs of a session, or to an artifact, or both, newest first, including
        tombstones; each with its session and its blob as they are now."""

    @abstractmethod
    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        """Yield every blob, or the one with this digest, with its inline content, both read in one
        snapshot. If the content cannot be read, the error takes its place."""

    @abstractmethod
    def notes(
        self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False
    ) -> list[Note]:
        """Return the notes of an owner from key `start` to before `stop`, in the order of their
        keys, or in reverse order with `newest`; at most `limit`."""

    @abstractmethod
    def save(self, *rows: Row) -> None:
        """Add rows, or replace those with the same key. Called inside `change` only."""

    @abstractmethod
    def drop(self, *rows: Row) -> None:
        """Remove rows, if they exist; a session with its notes. Called inside `change` only."""

    @abstractmethod
    def close(self) -> None:
        """Close the catalog. From then on, every other method raises `StoreClosed`."""

    # The rest is overridden where a backend has an index or keeps counts.

    def session(self, session_id: str) -> SessionInfo | None:
        return next(iter(self.sessions(session_id)), None)

    def session_page(
        self,
        prefix: str,
        before: tuple[float, str] | None,
        limit: int,
        wanted: SessionFilter = ANY_SESSION,
    ) -> list[SessionInfo]:
        """Return at most `limit` sessions whose ids begin with `prefix` and that pass the filter,
        newest first: by the time of their creation, then by their ids. With `before`, only those
        that come after the session with this time and id."""

        def place(info: SessionInfo) -> tuple[float, str]:
            return info.created, info.session_id

        every = list(self.sessions())
        known = {one.session_id for one in every if one.session_id.startswith(prefix)}
        found = (one for one in every if one.session_id in known and wanted.passes(one, known))
        return nlargest(
            limit, (one for one in found if before is None or place(one) < before), key=place
        )

    def blob(self, digest: str) -> Blob | None:
        """Return the blob of this digest, regardless of session."""
        return next((blob for blob, _ in self.blobs(digest)), None)

    def _note(self, owner: str, key: str) -> bytes | None:
        return next((one.value for one in self.notes(owner, key, key + " ")), None)

    def _drop_notes(self, owner: str, start: str, stop: str) -> None:
        self.drop(*self.notes(owner, start, stop))

    def _use(self, info: SessionInfo, at: float, grace: float) -> None:
        """Mark a session as used. It is created if it is new. If it expired longer ago than the
        grace period, its former refs become tombstones and its records are deleted."""
        known = self.session(info.session_id)
        if known is None:
            known = replace(info, created=at, used=at, used_bytes=0)
        elif expiry.is_over(known.expires(), at - grace):
            self._bury(
                [one for one in self.refs(info.session_id) if not (one.gone or one.ref.pinned)],
                "expired",
            )
            self._drop_notes(info.session_id, *RECORDS)
            known = self.session(info.session_id) or known
        self.save(replace(known, used=max(known.used, at)))

    def _bury(self, refs: Sequence[Entry], why: Gone) -> Freed:
        """Turn these live refs into tombstones."""
        self.save(*(replace(one, gone=why) for one in refs))
        return self._let_go(refs)

    def _let_go(self, refs: Sequence[Entry]) -> Freed:
        """Count the bytes of sessions again after these live refs were dropped or buried, and drop
        blobs that no live ref needs any more."""
        self._count_bytes(refs)
        known = filter(None, map(self.blob, {one.ref.artifact_id for one in refs}))
        gone = [blob for blob in known if all(one.gone for one in self.refs(digest=blob.digest))]
        self.drop(*gone)
        return Freed.of(len(refs), gone)

    def _revive(self, digest: str) -> int:
        """Restore the refs that damage had turned into tombstones. Returns their number."""
        back = self._damaged(digest)
        self.save(*(replace(one, gone=None) for one in back))
        self._count_bytes(back)
        return len(back)

    def _damaged(self, digest: str) -> list[Entry]:
        return [one for one in self.refs(digest=digest) if one.gone == "damaged"]

    def _count_bytes(self, refs: Sequence[Entry]) -> None:
        for session_id in {one.session.session_id for one in refs}:
            sizes = {
                one.ref.artifact_id: one.ref.size_bytes
                for one in self.refs(session_id)
                if not one.gone
            }
            self.save(
                *(replace(one, used_bytes=sum(sizes.values())) for one in self.sessions(session_id))
            )
