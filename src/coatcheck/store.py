"""`Store`, which `coatcheck.open` returns: it opens sessions, keeps tenants, and maintains one
backend."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

from coatcheck.agent_files import remove_files, remove_folders
from coatcheck.checks import check_name, seconds, whole
from coatcheck.config import DEFAULTS, Settings
from coatcheck.content import Files
from coatcheck.errors import InvalidArgument, StoreClosed, StoreError
from coatcheck.ids import clip, is_pointer, is_prefix, parse_pointer
from coatcheck.intake import Activity, Parts, Scope
from coatcheck.refs import Ref
from coatcheck.storage import (
    ANY_SESSION,
    TRANSCRIPT,
    BlobStore,
    Catalog,
    Limits,
    PassageIndex,
    SessionFilter,
    SessionInfo,
    Totals,
)

if TYPE_CHECKING:
    from coatcheck.collect import CollectReport, Progress, VerifyReport
    from coatcheck.session import Session
    from coatcheck.transfer import CopyReport

PRIVATE: Final = "private:"

_UNSET: Final[Any] = object()
_AT_ONCE: Final = 500  # sessions that one query looks into


def private_id() -> str:
    """Return the id of a session that nobody else has."""
    return PRIVATE + os.urandom(16).hex()


class Store:
    """A content-addressed store. Safe to use from many threads; a context manager that closes."""

    def __init__(
        self,
        blobs: BlobStore,
        catalog: Catalog,
        passages: PassageIndex,
        *,
        url: str,
        ttl: float | None = DEFAULTS["session.ttl"],
        grace: float = DEFAULTS["store.grace"],
        max_artifact_bytes: int | None = None,
        quota_bytes: int | None = None,
        settings: Settings = DEFAULTS,
        clock: Callable[[], float] = time.time,
        session_type: type[Session],
        tenants: Callable[[str, int | None], Store] | None = None,
    ) -> None:
        self.url = url
        self.settings = settings
        self.ttl = ttl
        self.grace = grace
        self._blobs = blobs
        self._catalog = catalog
        self._passages = passages
        self._clock = clock
        self._open_tenant = tenants
        self._tenants: dict[str, Store] = {}
        self._opening_tenant = threading.RLock()
        self._closed = False
        self._secret: bytes | None = None
        self._activity = Activity(catalog)
        self._session_type = session_type
        self._parts = Parts(
            blobs, catalog, passages, self._activity, Files(), clock, ttl,
            Limits(quota_bytes, grace), max_artifact_bytes, lambda: self.collect(compress=False),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def session(
        self,
        session_id: str | None = None,
        *,
        parent: str | None = None,
        ttl: float | None = _UNSET,
        quota_bytes: int | None = _UNSET,
        shared: bool = False,
        create: bool = False,
    ) -> Session:
        """Return the session with this id; without an id, a private one that nobody else has.
        Options that are not given stay as they were.

        A new session is stored with its first artifact, or at once with `create`. `ttl` is in
        seconds after the last use; with None the session never expires. A child session can read
        what its `parent` can. With `shared`, its ancestors also see what is put through this
        object."""
        session_id = private_id() if session_id is None else session_id
        check_name(session_id, "session id")
        if shared and parent is None:
            raise InvalidArgument(
                "a shared session needs a parent", hint='pass parent="…", the session to share with'
            )
        if ttl is not _UNSET:
            seconds(ttl, "ttl", optional=True)
        if quota_bytes is not _UNSET:
            whole(quota_bytes, "quota_bytes", optional=True)
        known, now = self._catalog.session(session_id), self._clock()
        info = known or SessionInfo(session_id, None, self.ttl, None, now, now)
        wanted = replace(
            info,
            parent=info.parent if parent is None else parent,
            ttl=info.ttl if ttl is _UNSET else ttl,
            quota=info.quota if quota_bytes is _UNSET else quota_bytes,
        )
        ancestors = self._ancestors(wanted)
        if wanted != info or (create and known is None):
            self._catalog.open_session(wanted)
        return self._session_type(
            self,
            self._parts,
            Scope(wanted, (wanted.session_id, *ancestors), ancestors if shared else ()),
        )

    def has_session(self, session_id: str) -> bool:
        """Whether the store has a session with this id. An expired one counts until it is
        collected."""
        return self._catalog.session(session_id) is not None

    def lasting_session(
        self, session_id: str, *, ttl: float | None, parent: str | None = None
    ) -> Session:
        """Return a session that lives at least `ttl` seconds after its last use. An existing one
        that lives longer, or never expires, stays so: another surface may rely on that."""
        found = self.session(session_id, parent=parent)
        if self.has_session(session_id) and (
            found.ttl is None or (ttl is not None and found.ttl >= ttl)
        ):
            return found
        return self.session(session_id, ttl=ttl, parent=parent)

    def unchecked_session(self, session_id: str, *, ttl: float | None) -> Session:
        """Return a session object without asking the store, for a caller that must continue if the
        store fails."""
        check_name(session_id, "session id")
        now = self._clock()
        info = SessionInfo(session_id, None, ttl, None, now, now)
        return self._session_type(self, self._parts, Scope(info, (session_id,)))

    @property
    def batching(self) -> AbstractContextManager[None]:
        """A context for many puts of one thread. Each returns at once, and all are durable when the
        context ends, at the cost of one sync. If the context ends with an error, its puts are not
        acknowledged."""
        return self._catalog.batch()

    def tenant(self, name: str, *, quota_bytes: int | None = None) -> Store:
        """Return the store of a tenant, opened once and closed with this one.

        Tenants share nothing: sessions, names, quota, deduplication, search and statistics are
        separate. The artifacts of this store itself belong to no tenant."""
        check_name(name, "tenant")
        if self._open_tenant is None:
            raise InvalidArgument(
                "a tenant's store has no tenants", hint="call tenant() of the main store"
            )
        with self._opening_tenant:
            return self._opened_tenant(name, quota_bytes)

    def _opened_tenant(self, name: str, quota_bytes: int | None) -> Store:
        if self._closed or self._open_tenant is None:
            raise StoreClosed("the store is closed")
        if name not in self._tenants:
            self._tenants[name] = self._open_tenant(name, quota_bytes)
        return self._tenants[name]

    def sessions(self) -> Iterator[SessionInfo]:
        """All sessions of the store, with expired ones until they are collected."""
        return self._catalog.sessions()

    def session_info(self, session_id: str) -> SessionInfo | None:
        """Return the parent, limits, times and size of a session, or None if there is none with
        this id."""
        check_name(session_id, "session id")
        return self._catalog.session(session_id)

    def session_page(
        self,
        *,
        prefix: str = "",
        before: tuple[float, str] | None = None,
        limit: int = 50,
        wanted: SessionFilter = ANY_SESSION,
    ) -> list[SessionInfo]:
        """Return a page of the sessions whose ids begin with `prefix` and that pass the filter,
        newest first, with expired ones until they are collected. `before` is the creation time and
        the id of the last session of the previous page."""
        whole(limit, "limit", least=1)
        return self._catalog.session_page(prefix, before, limit, wanted)

    def holders(self, pointer: str, *, limit: int = 3) -> list[str]:
        """Return the ids of at most `limit` sessions that have the artifact of a pointer, those of
        transcripts last.

        For the store's owner only: a session must not learn about the artifacts of others."""
        if not is_pointer(pointer) and not is_prefix(pointer):
            return []
        prefix = parse_pointer(pointer).prefix if is_pointer(pointer) else pointer
        found: dict[str, None] = {}
        transcripts: dict[str, None] = {}
        sessions = self._catalog.sessions()
        while len(found) < limit and (
            some := [info.session_id for info in islice(sessions, _AT_ONCE)]
        ):
            for entry in filter(self._parts.is_live, self._catalog.find_many(some, [prefix])):
                session_id = entry.ref.session_id
                (transcripts if session_id.startswith(TRANSCRIPT) else found)[session_id] = None
        return [*found, *transcripts][:limit]

    def find(self, pointer: str) -> tuple[Session, Ref] | None:
        """Return the artifact of a pointer with a session that has it, or None. For the store's
        owner only."""
        for session_id in self.holders(pointer, limit=1):
            session = self.session(session_id)
            if (ref := session.ref(pointer)) is not None:
                return session, ref
        return None

    def collect(
        self,
        *,
        dry_run: bool = False,
        grace: float | None = None,
        orphans: bool = True,
        compress: bool = True,
        cold_after: float | None = None,
        progress: Progress | None = None,
    ) -> CollectReport:
        """Remove expired artifacts and the files that crashes left behind, and compress artifacts
        that are not in use.

        To find such files (`orphans`), every stored copy is listed; in a very large store, do that
        only now and then. Expired artifacts are kept for the grace period of the store (two hours)
        or for `grace` seconds, so that a wrong clock removes nothing that is alive."""
        # Here and below: most processes never need it.
        from coatcheck.collect import (
            COLD_AFTER,
            StoreProblem,
            collect,
        )

        self._activity.flush()
        report = collect(
            self._blobs,
            self._catalog,
            now=self._clock(),
            grace=self.grace if grace is None else grace,
            dry_run=dry_run,
            orphans=orphans,
            compress=compress,
            cold_after=COLD_AFTER if cold_after is None else cold_after,
            progress=progress,
        )
        if not dry_run:
            try:
                self._passages.keep(lambda digest: self._catalog.blob(digest) is not None)
            except StoreError as error:  # the index can be rebuilt: it does not stop a collection
                report.problems.append(StoreProblem("unreadable", error.message))
            remove_files(self._parts)
        return report

    def collect_if_due(self, *, every: float = 86_400.0) -> CollectReport | None:
        """Collect, unless this or another process began to in the last `every` seconds. For
        long-lived processes."""
        return self.collect() if self._catalog.note_collection(self._clock(), every=every) else None

    def note_collected(self) -> None:
        """Note that the store was collected now, for `collected_at` and `collect_if_due`. Never
        raises a `StoreError`: on a full disk, the collection itself is what counts."""
        with suppress(StoreError):
            self._catalog.note_collection(self._clock())

    def collected_at(self) -> datetime | None:
        """Return when `collect_if_due` or the command line last collected the store, or None if
        they never did."""
        at = self._catalog.collected()
        return None if at is None else datetime.fromtimestamp(at, UTC)

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read everything and check it. With `repair`, fix what can be fixed without losing sound
        content.

        Content is damaged if it fails its checksum twice, and missing if its file or object is
        gone. A repair turns its refs into tombstones and keeps the copies for seven days. Putting
        the same content again restores the refs, and so does a later `verify(repair=True)` that
        finds the copy sound. Content that cannot be read at the moment is reported as `unreadable`
        and never changed."""
        from coatcheck.collect import verify

        return verify(
            self._blobs, self._catalog, now=self._clock(), repair=repair, progress=progress
        )

    def stats(self) -> Totals:
        """Return counts of sessions, refs, artifacts, tombstones and bytes. `quarantined_bytes` is
        the size of copies that nothing refers to and that a collection set aside for seven days."""
        totals = self._catalog.totals()
        with suppress(StoreError):  # the counts of the catalog do not depend on the blob store
            totals = replace(
                totals, quarantined_bytes=sum(one.size for one in self._blobs.quarantined())
            )
        return totals

    def export(self, target: IO[bytes], *, progress: Progress | None = None) -> int:
        """Write sessions, refs and blobs as JSON lines, and return the number of refs."""
        from coatcheck.transfer import export_lines

        self._activity.flush()
        return export_lines(self._blobs, self._catalog, target, progress=progress)

    def import_(
        self,
        source: IO[bytes],
        *,
        sessions: Mapping[str, str] | None = None,
        merge: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Import an export and return the number of new refs. Ids, names, sessions and expiry stay
        the same.

        The archive is untrusted. It must contain the bytes of every artifact; quotas and size
        limits apply. Its sessions become new sessions. If a session with that id exists already,
        the import is refused, unless `sessions` maps the id to another one, or `merge` allows
        adding to it. Importing the same archive again adds nothing."""
        from coatcheck.transfer import import_lines

        now = self._clock()
        return import_lines(
            self._parts, source, now=now, sessions=sessions, merge=merge, progress=progress
        )

    def copy_to(self, other: Store, *, progress: Progress | None = None) -> CopyReport:
        """Copy every session and ref to another store on any backend. Refs that it has already are
        skipped.

        Pointers and names stay valid there. Tenants are separate stores: copy each."""
        from coatcheck.transfer import copy

        self._activity.flush()
        return copy(self._parts, other._parts, progress=progress)

    @property
    def secret(self) -> bytes:
        """The key with which this store signs stubs and cursors."""
        if self._secret is None:
            self._secret = self._catalog.secret()
        return self._secret

    @property
    def clock(self) -> Callable[[], float]:
        """The function that returns the store's time, in seconds since 1970."""
        return self._clock

    @property
    def writers(self) -> list[Callable[[], None]]:
        """Functions that are called whenever the last uses of sessions are written: within 30
        seconds after a session was used, and on close."""
        return self._activity.writers

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        with self._opening_tenant:  # no tenant is opened after this
            self._closed = True
        for tenant in self._tenants.values():
            tenant.close()
        self._activity.flush()
        if self.url == "memory:":
            remove_folders(self._parts)
        self._passages.close()
        self._catalog.close()
        self._blobs.close()

    def _ancestors(self, info: SessionInfo) -> tuple[str, ...]:
        found: list[str] = []
        parent = info.parent
        while parent is not None:
            if parent == info.session_id or parent in found:
                raise InvalidArgument(f"session {clip(info.session_id)} would be its own ancestor")
            check_name(parent, "session id")
            found.append(parent)
            above = self._catalog.session(parent)
            parent = above.parent if above else None
        return tuple(found)
