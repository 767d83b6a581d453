"""`Store`, which `coatcheck.open` returns: intake, lookup, search and maintenance over one backend.

Users work with sessions; `Session` calls the methods that take a `Scope`.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, Self, cast

from coatcheck import media
from coatcheck.activity import Activity
from coatcheck.checks import seconds, whole
from coatcheck.collect import COLD_AFTER, CollectReport, Progress, StoreProblem, VerifyReport, collect, verify
from coatcheck.config import DEFAULTS, Settings
from coatcheck.content import ArtifactStream, Content, Files
from coatcheck.errors import (
    Damaged,
    Fenced,
    InvalidArgument,
    InvalidPointer,
    NotFound,
    StoreClosed,
    StoreError,
    TooLarge,
)
from coatcheck.ids import SCHEME, check_name, clip, is_pointer, is_prefix, parse_pointer
from coatcheck.intake import About, Intake
from coatcheck.lookup import Lookup, Scope
from coatcheck.refs import FENCED_SERIES, RECORD_LIMIT, Coverage, Ref
from coatcheck.search import Entries, Hit, search
from coatcheck.search import follow as follow_session
from coatcheck.storage import (
    TRANSCRIPT,
    BlobStore,
    Catalog,
    Claimant,
    Entry,
    Limits,
    PassageIndex,
    Ranges,
    Record,
    SessionInfo,
    Totals,
    merged,
)
from coatcheck.transfer import CopyReport, Side, copy, export_lines, import_lines
from coatcheck.values import Encoded, decode

if TYPE_CHECKING:
    from coatcheck.session import Session

_UNSET: Final[Any] = object()


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
        self._opening_tenant = threading.Lock()
        self._closed = False
        self._files = Files()
        self._secret: bytes | None = None
        self._activity = Activity(catalog)
        self._lookup = Lookup(blobs, catalog, self._activity, clock)
        self._intake = Intake(
            blobs,
            catalog,
            self._lookup,
            limits=Limits(quota_bytes, grace),
            max_artifact_bytes=max_artifact_bytes,
            clock=clock,
            make_room=lambda: self.collect(compress=False),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def session(
        self,
        session_id: str,
        *,
        parent: str | None = None,
        ttl: float | None = _UNSET,
        quota_bytes: int | None = _UNSET,
    ) -> Session:
        """Return the session with this id, created if it is new. Options that are not given stay as they were.

        `ttl` is in seconds after the last use; with None the session never expires. A child session can read what its
        `parent` can."""
        from coatcheck.session import Session  # the layer above

        check_name(session_id, "session id")
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
        if wanted != info:
            self._catalog.open_session(wanted)
        return Session(self, Scope(wanted, ancestors))

    @property
    def batching(self) -> AbstractContextManager[None]:
        """A context for many puts of one thread. Each returns at once, and all are durable when the context ends, at
        the cost of one sync. Puts of a context that ends with an error were not acknowledged."""
        return self._catalog.batch()

    def tenant(self, name: str, *, quota_bytes: int | None = None) -> Store:
        """Return the store of a tenant, opened once and closed with this one.

        Tenants share nothing: sessions, names, quota, deduplication, search and statistics are separate. The artifacts
        of this store itself belong to no tenant."""
        check_name(name, "tenant")
        if self._open_tenant is None:
            raise InvalidArgument("a tenant's store has no tenants", hint="call tenant() of the main store")
        with self._opening_tenant:
            if self._closed:
                raise StoreClosed("the store is closed")
            if name not in self._tenants:
                self._tenants[name] = self._open_tenant(name, quota_bytes)
            return self._tenants[name]

    def sessions(self) -> Iterator[SessionInfo]:
        """All sessions of the store, with expired ones until they are collected."""
        return self._catalog.sessions()

    def holders(self, pointer: str, *, limit: int = 3) -> list[str]:
        """Return the ids of at most `limit` sessions that have the artifact of a pointer, those of transcripts last.

        For the store's owner only: a session must not learn of artifacts of others."""
        if not is_pointer(pointer) and not is_prefix(pointer):
            return []
        prefix = parse_pointer(pointer).prefix if is_pointer(pointer) else pointer
        found: list[str] = []
        transcripts: list[str] = []
        for info in self._catalog.sessions():
            if any(map(self._lookup.is_live, self._catalog.find(info.session_id, prefix=prefix))):
                (transcripts if info.session_id.startswith(TRANSCRIPT) else found).append(info.session_id)
            if len(found) == limit:
                break
        return (found + transcripts)[:limit]

    def collect(
        self,
        *,
        dry_run: bool = False,
        grace: float | None = None,
        orphans: bool = True,
        compress: bool = True,
        cold_after: float = COLD_AFTER,
        progress: Progress | None = None,
    ) -> CollectReport:
        """Remove expired artifacts and the files that crashes left behind, and compress artifacts that are not in use.

        To find such files (`orphans`), every stored copy is listed; in a very large store, do that only now and then.
        Expired artifacts are kept for the grace period of the store (two hours) or for `grace` seconds, so that a wrong
        clock removes nothing that is alive."""
        self._activity.flush()
        report = collect(
            self._blobs,
            self._catalog,
            now=self._clock(),
            grace=self.grace if grace is None else grace,
            dry_run=dry_run,
            orphans=orphans,
            compress=compress,
            cold_after=cold_after,
            progress=progress,
        )
        if not dry_run:
            try:
                self._passages.keep(lambda digest: self._catalog.blob(digest) is not None)
            except StoreError as error:  # the index can be rebuilt: it does not stop a collection
                report.problems.append(StoreProblem("unreadable", error.message))
        return report

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read everything and check it. With `repair`, fix what can be fixed without losing sound content.

        Content is damaged if it fails its checksum twice, and missing if its file or object is gone. A repair turns its
        refs into tombstones and keeps the copies for seven days. Putting the same content again restores the refs, and
        so does a later `verify(repair=True)` that finds the copy sound. Content that cannot be read at the moment is
        reported as `unreadable` and never changed."""
        return verify(self._blobs, self._catalog, now=self._clock(), repair=repair, progress=progress)

    def stats(self) -> Totals:
        return self._catalog.totals()

    def export(self, target: IO[bytes], *, progress: Progress | None = None) -> int:
        """Write sessions, refs and blobs as JSON lines, and return the number of refs."""
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
        """Import an export and return the number of new refs. Ids, names, sessions and expiry stay the same.

        The archive is untrusted. It must contain the bytes of every artifact; quotas and size limits apply. Its
        sessions become new sessions. If a session with that id exists already, the import is refused, unless `sessions`
        maps the id to another one, or `merge` allows to add to it. Importing the same archive again adds nothing."""
        return import_lines(
            self._blobs,
            self._catalog,
            self._intake,
            source,
            now=self._clock(),
            sessions=sessions,
            merge=merge,
            progress=progress,
        )

    def copy_to(self, other: Store, *, progress: Progress | None = None) -> CopyReport:
        """Copy every session and ref to another store on any backend. Refs that it has already are skipped.

        Pointers and names stay valid there. Tenants are separate stores: copy each."""
        self._activity.flush()
        return copy(Side(self._blobs, self._catalog), Side(other._blobs, other._catalog), progress=progress)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        with self._opening_tenant:
            self._closed = True
        for tenant in self._tenants.values():
            tenant.close()
        self._activity.flush()
        self._passages.close()
        self._catalog.close()
        self._blobs.close()

    # What a session calls

    def put(self, scope: Scope, value: object, about: About) -> Ref:
        return self._noted(scope, self._intake.put(scope, value, about))

    def put_encoded(self, scope: Scope, value: Encoded, about: About, also: Sequence[Scope] = ()) -> Ref:
        """Put a value that is already encoded, into the sessions of `also` too."""
        ref = self._intake.put_encoded(scope, value, about, also)
        for each in (*also, scope):
            self._noted(each, ref)
        return ref

    def _noted(self, scope: Scope, ref: Ref) -> Ref:
        large = ref.artifact_id if ref.size_bytes > self._catalog.inline_limit else None
        self._activity.note(scope.lineage, self._clock(), scope.info.ttl, large)
        return ref

    def get(self, scope: Scope, target: Ref | str) -> Any:
        try:
            entry, fragment = self._lookup.resolve(scope, target, content=True, brief=True)
            if fragment:
                part = self._part(scope, target, fragment)
                return None if isinstance(part, InvalidPointer) else json.loads(part)
            entry, data = self._bytes(scope, entry)
        except NotFound:
            return None
        self._note(scope, entry)
        return decode(entry.ref.codec, data)

    def ref(self, scope: Scope, target: Ref | str) -> Ref | None:
        try:
            entry, _ = self._lookup.resolve(scope, target)
        except NotFound:
            return None
        return self._lookup.ref_for_caller(entry, self._lookup.near(scope, entry))

    def open(self, scope: Scope, target: Ref | str) -> BinaryIO:
        entry, fragment = self._lookup.resolve(scope, target, content=True)
        self._note(scope, entry)
        if fragment:
            part = self._part(scope, target, fragment)
            if isinstance(part, InvalidPointer):
                raise part
            return io.BytesIO(part)
        if entry.blob.coding == "inline":
            return io.BytesIO(self._bytes(scope, entry)[1])
        return cast(BinaryIO, io.BufferedReader(ArtifactStream(self._content(scope, entry)), 64 * 1024))

    def content(self, scope: Scope, target: Ref | str) -> Content:
        """The bytes of an artifact, by range. Raises what `open` raises."""
        entry, _ = self._lookup.resolve(scope, target, content=True)
        self._note(scope, entry)
        return self._content(scope, entry)

    def _part(self, scope: Scope, target: Ref | str, fragment: str) -> bytes | InvalidPointer:
        """The JSON of the part that a fragment names, or the error if it does not exist. Raises `InvalidPointer` if the
        artifact is not JSON, and `LimitExceeded` beyond the limits of a JSONPath."""
        from coatcheck.reading.heavy import part  # the layer above: heavy reads run in a process of their own

        try:
            return part(self.content(scope, target), fragment)
        except InvalidPointer as error:
            return error
        except InvalidArgument as error:
            raise InvalidPointer(
                f"{clip(str(target))} has a fragment, but the artifact is not JSON", hint=""
            ) from error

    def _content(self, scope: Scope, entry: Entry) -> Content:
        ref = self._lookup.ref_for_caller(entry)
        if entry.blob.coding == "inline":
            data = self._bytes(scope, entry)[1]
            return Content(ref, b"", lambda offset, length: data[offset : offset + length])
        at = entry

        def read(offset: int, length: int) -> bytes:
            nonlocal at
            try:
                return self._blobs.read(at.blob, offset, length)
            except NotFound:
                at = self._moved(scope, at)
                return self._blobs.read(at.blob, offset, length)

        read(0, 1)
        return Content(ref, entry.blob.frames, read)

    @property
    def secret(self) -> bytes:
        """The key with which this store signs stubs and cursors."""
        if self._secret is None:
            self._secret = self._catalog.secret()
        return self._secret

    def note_shown(self, scope: Scope, ref: Ref, ranges: Ranges) -> None:
        """Note that the session was shown these bytes of an artifact."""
        for start, end in ranges:
            self._activity.show(scope.session_id, ref.artifact_id, start, end)

    def coverage(self, scope: Scope, target: Ref | str) -> Coverage:
        entry, _ = self._lookup.resolve(scope, target)
        session_id, digest = scope.session_id, entry.ref.artifact_id
        known = (*self._catalog.shown(session_id, digest), *self._activity.shown(session_id, digest))
        return Coverage(merged(known), entry.ref.size_bytes)

    def search(self, scope: Scope, words: str, limit: int) -> list[Hit]:
        if not words.strip():
            raise InvalidArgument("the search words are empty")
        whole(limit, "limit", least=1)
        return search(
            self._passages,
            scope.lineage,
            words[:4000],
            limit=limit,
            find=self._entries,
            ref=lambda digest: self.ref(scope, SCHEME + digest),
            content=lambda ref: self.content(scope, ref),
        )

    def version(self, scope: Scope, ref: Ref) -> int:
        if ref.name is None:
            return 1
        for session_id in scope.lineage:
            if found := self._catalog.version(session_id, ref.name, ref.artifact_id):
                return found
        raise NotFound(f"no artifact {ref.pointer} found under the name {clip(ref.name)}")

    def count(self, scope: Scope) -> int:
        for session_id in scope.lineage:
            follow_session(self._passages, session_id, self._entries, lambda ref: self.content(scope, ref))
        alive = [each for each in scope.lineage if self._is_alive(each)]
        return self._passages.count(alive, self._clock()) if alive else 0

    def claim(self, scope: Scope, holder: str, idle: float, instead_of: int | None) -> int:
        if holder != "":
            check_name(holder, "holder")
        whole(instead_of, "instead_of", optional=True)
        seconds(idle, "idle")
        now = self._clock()
        token = self._catalog.claim(scope.info, holder, at=now, idle=idle, instead_of=instead_of, grace=self.grace)
        self._activity.note(scope.lineage, now, scope.info.ttl)
        return token

    def claimant(self, scope: Scope) -> Claimant | None:
        return self._catalog.claimant(scope.session_id)

    def record(self, scope: Scope, series: str, body: bytes, token: int | None, keep: int | None) -> int:
        check_name(series, "series")
        if not isinstance(body, bytes):
            raise InvalidArgument(f"a record must be bytes, got a {type(body).__name__}")
        if len(body) > RECORD_LIMIT:
            raise TooLarge(
                f"a record must have at most {RECORD_LIMIT} bytes, got {len(body)}", hint="put it as an artifact"
            )
        whole(token, "token", least=1, optional=True)
        whole(keep, "keep", least=1, optional=True)
        if token is None and series in FENCED_SERIES:
            raise Fenced(f"the series {series!r} only takes records under a claim", hint="claim the session first")
        now = self._clock()
        number = self._catalog.record(scope.info, series, body, at=now, token=token, keep=keep, grace=self.grace)
        self._activity.note(scope.lineage, now, scope.info.ttl)
        return number

    def records(
        self, scope: Scope, series: str, *, after: int, before: int | None, limit: int | None, newest: bool
    ) -> list[Record]:
        check_name(series, "series")
        whole(after, "after")
        whole(before, "before", optional=True)
        whole(limit, "limit", optional=True)
        return self._catalog.records(scope.session_id, series, after=after, before=before, limit=limit, newest=newest)

    def artifacts(self, scope: Scope, *, after: str | None, limit: int) -> list[Ref]:
        return self._lookup.artifacts(scope, after=after, limit=limit)

    def list(self, scope: Scope, *, name: str | None, kind: str | None, limit: int | None) -> list[Ref]:
        return self._lookup.list(scope, name=name, kind=kind, limit=limit)

    def materialize(self, scope: Scope, target: Ref | str, folder: str | Path) -> Path:
        ref = self.content(scope, target).ref
        is_part = isinstance(target, str) and target.startswith(SCHEME) and "#/" in target
        with self.open(scope, target) as stream:
            return self._files.write(stream, media.JSON if is_part else ref.media_type, scope.session_id, folder)

    def grant(self, scope: Scope, target: Ref | str, to: str) -> Ref:
        check_name(to, "session id")
        known, now = self._catalog.session(to), self._clock()
        receiver = known or SessionInfo(to, None, self.ttl, None, now, now)
        while True:
            entry, _ = self._lookup.resolve(scope, target)
            granted = replace(
                entry.ref, session_id=to, created=now, expires=None, pinned=False, granted_by=scope.session_id
            )
            entry = replace(entry, ref=granted, session=receiver)
            if self._intake.add(replace(entry, content=None), reuse=True):
                return self._lookup.ref_for_caller(entry, self._catalog.near([to], [granted.artifact_id]))

    def pin(self, scope: Scope, target: Ref | str, pinned: bool) -> Ref:
        entry, _ = self._lookup.resolve(scope, target)
        if _is_lent(entry, scope) and pinned:
            self.grant(scope, entry.ref, to=scope.session_id)
            entry, _ = self._lookup.resolve(scope, entry.ref)
        if entry.ref.session_id != scope.session_id:
            raise InvalidArgument(
                f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                hint="pin it there, or grant it first",
            )
        self._catalog.pin(scope.session_id, entry.ref.artifact_id, pinned)
        entry = replace(entry, ref=replace(entry.ref, pinned=pinned))
        return self._lookup.ref_for_caller(entry, self._lookup.near(scope, entry))

    def forget(self, scope: Scope, target: Ref | str) -> bool:
        try:
            entry, _ = self._lookup.resolve(scope, target)
        except NotFound:
            return False
        digest = entry.ref.artifact_id
        name = target if isinstance(target, str) and target == entry.ref.name else None
        freed = self._catalog.remove(scope.session_id, digest, name=name)
        if name is None or not self._catalog.find(scope.session_id, prefix=digest):
            self._passages.leave(scope.session_id, digest)
        for blob in freed.blobs:
            self._blobs.remove(blob)
        return freed.refs > 0 or _is_lent(entry, scope)

    def lend(self, scope: Scope, target: Ref | str, to: Scope) -> None:
        """Let a session read an artifact of a transcript's session, as long as the transcript has it. Raises
        `NotFound`."""
        while True:
            entry, _ = self._lookup.resolve(scope, target)
            ref = replace(entry.ref, created=self._clock(), granted_by=to.session_id)
            if self._intake.add(replace(entry, ref=ref, content=None), reuse=True):
                return

    def lent(self, scope: Scope) -> Iterator[Ref]:
        """The refs that transcripts lend to this session."""
        return (entry.ref for entry in self._catalog.lent(scope.session_id))

    def end(self, scope: Scope) -> int:
        self._files.remove(scope.session_id)
        freed = self._catalog.remove(scope.session_id, end=True)
        self._passages.leave(scope.session_id)
        for blob in freed.blobs:
            self._blobs.remove(blob)
        self._blobs.leftovers(remove=True)
        return freed.artifacts

    def _bytes(self, scope: Scope, entry: Entry) -> tuple[Entry, bytes]:
        """Return all bytes of an entry, checked against the digest."""
        data = entry.content
        if data is None and entry.blob.coding == "inline":
            raise NotFound(
                f"the bytes of {entry.ref.pointer} are missing from the store", hint="put the same content again"
            )
        if data is None:
            try:
                data = self._blobs.read(entry.blob, 0, entry.blob.size)
            except NotFound:
                entry = self._moved(scope, entry)
                data = self._blobs.read(entry.blob, 0, entry.blob.size) if entry.content is None else entry.content
        if hashlib.sha256(data).hexdigest() != entry.ref.artifact_id:
            raise Damaged(f"the bytes of {entry.ref.pointer} do not match their digest")
        return entry, data

    def _moved(self, scope: Scope, entry: Entry) -> Entry:
        """Return the entry as the catalog has it now: its copy may have been compressed or repaired meanwhile."""
        now, _ = self._lookup.resolve(scope, entry.ref, content=True)
        if now.blob.place == entry.blob.place:
            raise NotFound(
                f"the bytes of {entry.ref.pointer} are missing from the store", hint="put the same content again"
            )
        return now

    def _entries(self, session_id: str, before: int | None, size: int) -> Entries:
        return self._catalog.find(session_id, before=before, limit=size)

    def _is_alive(self, session_id: str) -> bool:
        info = self._catalog.session(session_id)
        expires = info.expires(self._activity.last(session_id)) if info else None
        return expires is None or self._clock() < expires

    def _note(self, scope: Scope, entry: Entry) -> None:
        digest = None if entry.blob.coding == "inline" else entry.ref.artifact_id
        self._activity.note(scope.lineage, self._clock(), scope.info.ttl, digest)

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


def _is_lent(entry: Entry, scope: Scope) -> bool:
    """Whether a session has this artifact only because a transcript lends it."""
    return entry.ref.session_id.startswith(TRANSCRIPT) and entry.ref.granted_by == scope.session_id
