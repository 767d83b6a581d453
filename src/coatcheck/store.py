"""The store: what `coatcheck.open` answers. It puts together intake, lookup and upkeep over one backend.

Sessions are the way in; the methods that take a `Scope` are what `Session` calls.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Final, Self, cast

from coatcheck.archive import export_lines, import_lines
from coatcheck.config import DEFAULTS, Settings
from coatcheck.copying import CopyReport, Side, copy
from coatcheck.errors import Damaged, InvalidArgument, InvalidPointer, NotFound
from coatcheck.ids import SCHEME, clip, follow
from coatcheck.intake import About, Intake
from coatcheck.records import Records
from coatcheck.refs import Coverage, Ref
from coatcheck.scope import Lookup, Scope, check_name, is_seconds
from coatcheck.search import Entries, Hit, search
from coatcheck.search import follow as follow_session
from coatcheck.storage import (
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
from coatcheck.streams import ArtifactStream, Content
from coatcheck.upkeep import COLD_AFTER, CollectReport, Progress, VerifyReport, collect, verify
from coatcheck.uses import Uses
from coatcheck.values import Encoded, decode, encode_text

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
        self._secret: bytes | None = None
        self._uses = Uses(catalog)
        self._lookup = Lookup(blobs, catalog, self._uses, clock)
        self._records = Records(catalog, self._uses, grace=grace, clock=clock)
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
        """The session of this id, whether it is new or not; what is not given stays as it was.

        `ttl` is in seconds after the last use, None for no end. A child session reads what its `parent` can."""
        from coatcheck.session import Session  # the layer above: this is the one place where a store hands it out

        check_name(session_id, "session id")
        if ttl is not _UNSET and ttl is not None and not is_seconds(ttl):
            raise InvalidArgument(f"a time to live of {ttl!r} is no number of seconds", hint="or None for no end")
        counted = isinstance(quota_bytes, int) and 0 <= quota_bytes < 1 << 63
        if quota_bytes is not _UNSET and quota_bytes is not None and not counted:
            raise InvalidArgument(f"a quota of {quota_bytes!r} is no number of bytes", hint="or None for no limit")
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
        """A context for many puts of one thread: each returns at once, and all are as durable as the store was opened
        for when it is left, at the cost of one sync. What an error leaves early was not acknowledged."""
        return self._catalog.batch()

    def tenant(self, name: str, *, quota_bytes: int | None = None) -> Store:
        """The store of a tenant, opened once and closed with this one.

        Nothing of it touches or tells of another's: sessions, names, quota, deduplication, search and statistics are
        its own. What this store holds itself is no tenant's."""
        check_name(name, "tenant")
        if self._open_tenant is None:
            raise InvalidArgument("a tenant has no tenants", hint="ask the store that was opened")
        with self._opening_tenant:
            if name not in self._tenants:
                self._tenants[name] = self._open_tenant(name, quota_bytes)
            return self._tenants[name]

    def sessions(self) -> Iterator[SessionInfo]:
        """Every session that the store knows, expired ones included until they are collected."""
        return self._catalog.sessions()

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
        """Free what has expired and what crashes have left behind, and compress what has gone cold.

        To find what a crash has left (`orphans`), every stored copy is listed: where there are very many, once in a
        while will do.

        Expired artifacts are kept for the grace period of the store (two hours) unless `grace` says otherwise, so that
        a clock which is off removes nothing that lives."""
        self._uses.flush()
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
            self._passages.keep(lambda digest: self._catalog.blob(digest) is not None)
        return report

    def verify(self, *, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Read everything and check it. With `repair`, set right what can be without losing what is sound."""
        return verify(self._blobs, self._catalog, repair=repair, progress=progress)

    def stats(self) -> Totals:
        return self._catalog.totals()

    def export(self, target: IO[bytes], *, progress: Progress | None = None) -> int:
        """Write sessions, refs and blobs as JSON lines; how many refs there were."""
        self._uses.flush()
        return export_lines(self._blobs, self._catalog, target, progress=progress)

    def import_(self, source: IO[bytes], *, progress: Progress | None = None) -> int:
        """Take in what `export` wrote: same ids, names, sessions and expiry. What is there already is not doubled; how
        many refs are new."""
        return import_lines(self._blobs, self._catalog, source, progress=progress)

    def copy_to(self, other: Store, *, progress: Progress | None = None) -> CopyReport:
        """Bring every session and ref over to another store, on whatever backend; what it has already is passed over.

        Pointers and names mean the same there. Tenants are stores of their own: copy each."""
        self._uses.flush()
        return copy(Side(self._blobs, self._catalog), Side(other._blobs, other._catalog), progress=progress)

    def close(self) -> None:
        for tenant in self._tenants.values():
            tenant.close()
        self._uses.flush()
        self._passages.close()
        self._catalog.close()
        self._blobs.close()

    # What a session calls

    def put(self, scope: Scope, value: object, about: About) -> Ref:
        return self._noted(scope, self._intake.put(scope, value, about))

    def put_encoded(self, scope: Scope, value: Encoded, about: About, also: Sequence[Scope] = ()) -> Ref:
        """Put what the caller has encoded already, into further sessions too."""
        ref = self._intake.put_encoded(scope, value, about, also)
        for each in (*also, scope):
            self._noted(each, ref)
        return ref

    def _noted(self, scope: Scope, ref: Ref) -> Ref:
        large = ref.artifact_id if ref.size_bytes > self._catalog.inline_limit else None
        self._uses.note(scope.lineage, self._clock(), scope.info.ttl, large)
        return ref

    def get(self, scope: Scope, target: Ref | str) -> Any:
        try:
            entry, fragment = self._lookup.resolve(scope, target, content=True, brief=True)
            entry, data = self._bytes(scope, entry)
        except NotFound:
            return None
        self._note(scope, entry)
        if not fragment:
            return decode(entry.ref.codec, data)
        whole = _parsed(data, target)
        try:
            return follow(whole, fragment)
        except InvalidPointer:
            return None

    def ref(self, scope: Scope, target: Ref | str) -> Ref | None:
        try:
            entry, _ = self._lookup.resolve(scope, target)
        except NotFound:
            return None
        return self._lookup.told(entry, self._lookup.near(scope, entry))

    def open(self, scope: Scope, target: Ref | str) -> BinaryIO:
        entry, fragment = self._lookup.resolve(scope, target, content=True)
        self._note(scope, entry)
        if fragment:
            part = follow(_parsed(self._bytes(scope, entry)[1], target), fragment)
            return io.BytesIO(encode_text(json.dumps(part, ensure_ascii=False, separators=(",", ":"))))
        if entry.blob.coding == "inline":
            return io.BytesIO(self._bytes(scope, entry)[1])
        return cast(BinaryIO, io.BufferedReader(ArtifactStream(self._content(scope, entry)), 64 * 1024))

    def content(self, scope: Scope, target: Ref | str) -> Content:
        """The bytes of an artifact by range. Raises what `open` raises."""
        entry, _ = self._lookup.resolve(scope, target, content=True)
        self._note(scope, entry)
        return self._content(scope, entry)

    def _content(self, scope: Scope, entry: Entry) -> Content:
        ref = self._lookup.told(entry)
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
        """The key with which this store signs what it must recognise later."""
        if self._secret is None:
            self._secret = self._catalog.secret()
        return self._secret

    def note_shown(self, scope: Scope, ref: Ref, ranges: Ranges) -> None:
        """The session has been shown these bytes of an artifact."""
        for start, end in ranges:
            self._uses.show(scope.session_id, ref.artifact_id, start, end)

    def coverage(self, scope: Scope, target: Ref | str) -> Coverage:
        entry, _ = self._lookup.resolve(scope, target)
        session_id, digest = scope.session_id, entry.ref.artifact_id
        known = (*self._catalog.shown(session_id, digest), *self._uses.shown(session_id, digest))
        return Coverage(merged(known), entry.ref.size_bytes)

    def search(self, scope: Scope, words: str, limit: int) -> list[Hit]:
        if not words.strip():
            raise InvalidArgument("a search needs some words")
        if limit < 1:
            raise InvalidArgument(f"a search for {limit} hits finds nothing", hint="ask for one at least")
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
        return self._records.claim(scope, holder, idle, instead_of)

    def claimant(self, scope: Scope) -> Claimant | None:
        return self._records.claimant(scope)

    def record(self, scope: Scope, series: str, body: bytes, token: int | None, keep: int | None) -> int:
        return self._records.add(scope, series, body, token, keep)

    def records(
        self, scope: Scope, series: str, *, after: int, before: int | None, limit: int | None, newest: bool
    ) -> list[Record]:
        return self._records.find(scope, series, after=after, before=before, limit=limit, newest=newest)

    def list(self, scope: Scope, *, name: str | None, kind: str | None, limit: int | None) -> list[Ref]:
        return self._lookup.list(scope, name=name, kind=kind, limit=limit)

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
            if self._intake.add(entry):
                return self._lookup.told(entry, self._catalog.near([to], [granted.artifact_id]))

    def pin(self, scope: Scope, target: Ref | str, pinned: bool) -> Ref:
        entry, _ = self._lookup.resolve(scope, target)
        if entry.ref.session_id != scope.session_id:
            raise InvalidArgument(
                f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                hint="pin it there, or grant it first",
            )
        self._catalog.pin(scope.session_id, entry.ref.artifact_id, pinned)
        entry = replace(entry, ref=replace(entry.ref, pinned=pinned))
        return self._lookup.told(entry, self._lookup.near(scope, entry))

    def forget(self, scope: Scope, target: Ref | str) -> bool:
        try:
            entry, _ = self._lookup.resolve(scope, target)
        except NotFound:
            return False
        freed = self._catalog.remove(scope.session_id, entry.ref.artifact_id)
        self._passages.leave(scope.session_id, entry.ref.artifact_id)
        for blob in freed.blobs:
            self._blobs.remove(blob)
        return freed.refs > 0

    def end(self, scope: Scope) -> int:
        freed = self._catalog.remove(scope.session_id, end=True)
        self._passages.leave(scope.session_id)
        for blob in freed.blobs:
            self._blobs.remove(blob)
        self._blobs.leftovers(remove=True)
        return freed.artifacts

    def _bytes(self, scope: Scope, entry: Entry) -> tuple[Entry, bytes]:
        """All bytes of an entry, checked against the digest."""
        data = entry.content
        if data is None and entry.blob.coding == "inline":
            raise NotFound(
                f"the bytes of {entry.ref.pointer} are gone from the store", hint="put the same content again"
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
        """The entry as the catalog has it now: its copy may have been compressed or healed under our hands."""
        now, _ = self._lookup.resolve(scope, entry.ref, content=True)
        if now.blob.place == entry.blob.place:
            raise NotFound(
                f"the bytes of {entry.ref.pointer} are gone from the store", hint="put the same content again"
            )
        return now

    def _entries(self, session_id: str, before: int | None, size: int) -> Entries:
        return self._catalog.find(session_id, before=before, limit=size)

    def _is_alive(self, session_id: str) -> bool:
        info = self._catalog.session(session_id)
        expires = info.expires(self._uses.last(session_id)) if info else None
        return expires is None or self._clock() < expires

    def _note(self, scope: Scope, entry: Entry) -> None:
        digest = None if entry.blob.coding == "inline" else entry.ref.artifact_id
        self._uses.note(scope.lineage, self._clock(), scope.info.ttl, digest)

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


def _parsed(data: bytes, target: Ref | str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidPointer(f"{clip(str(target))} names a part of an artifact that is not JSON", hint="") from error
