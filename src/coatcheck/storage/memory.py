"""The in-memory store: dicts behind one lock. It is the reference for the conformance suites, and is used for tests and
throw-away runs. Nothing survives the process.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from coatcheck.errors import NotFound, QuotaExceeded, StoreClosed, StoreError
from coatcheck.ids import MIN_PREFIX
from coatcheck.refs import Blob
from coatcheck.storage import (
    _NO_LIMITS,
    _NOTHING,
    TRANSCRIPT,
    Claimant,
    Entry,
    Freed,
    Gone,
    Limits,
    Ranges,
    Record,
    SessionInfo,
    SetAside,
    Totals,
    check_idle,
    fenced,
    merged,
    newest_of_each,
)
from coatcheck.storage.frames import FRAME, Framer, check_frame
from coatcheck.storage.holdings import UNCLAIMED, Holdings


class MemoryBlobs:
    """Blobs in a dict, by place."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Blob, bytes]] = {}
        self._staged: set[str] = set()
        self._lock = threading.Lock()
        self._next = 0

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[_StagedBytes]:
        framer = Framer(digest)
        held = b"".join(framer.through(chunks))
        digest, size, frames = framer.finish()
        with self._lock:
            self._next += 1
            place = f"{self._next:016x}"
            self._staged.add(place)
        try:
            yield _StagedBytes(self, Blob(digest, size, "raw", place, frames), held)
        finally:
            self._staged.discard(place)

    def publish(self, blob: Blob, data: bytes) -> None:
        with self._lock:
            self._copies[blob.place] = (blob, data)

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        copy = self._copies.get(blob.place)
        if copy is None:
            raise NotFound(f"blob {blob.digest} is missing", hint="put the same content again")
        data, end = copy[1], min(offset + length, blob.size)
        for index in range(offset // FRAME, -(-end // FRAME)):
            check_frame(blob.frames, index, data[index * FRAME : (index + 1) * FRAME], blob.digest)
        return data[offset:end]

    def holds(self, blob: Blob, data: bytes) -> bool:
        return self.read(blob, 0, blob.size) == data

    def remove(self, blob: Blob) -> None:
        self._copies.pop(blob.place, None)

    def compress(self, blob: Blob) -> None:
        return None

    def places(self) -> Iterator[Blob]:
        for blob, _ in list(self._copies.values()):
            yield Blob(blob.digest, 0, blob.coding, blob.place)

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        with self._lock:
            if blob.place in self._staged or blob.place not in self._copies:
                return False
            if remove:
                del self._copies[blob.place]
            return True

    def leftovers(self, *, remove: bool) -> int:
        return 0

    def foreign(self) -> Iterator[str]:
        return iter(())

    def uri(self, blob: Blob) -> str:
        return f"memory:{blob.digest}"

    def close(self) -> None:
        self._copies.clear()


@dataclass(frozen=True, slots=True)
class _StagedBytes:
    blobs: MemoryBlobs
    blob: Blob
    data: bytes

    @property
    def digest(self) -> str:
        return self.blob.digest

    @property
    def size(self) -> int:
        return self.blob.size

    def publish(self) -> Blob:
        self.blobs.publish(self.blob, self.data)
        return self.blob


class MemoryCatalog:
    """Sessions and refs in dicts. All content is kept in the blob store, so every blob is handled the same way."""

    inline_limit = -1
    is_far = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sessions: dict[str, Holdings] = {}
        self._blobs: dict[str, Blob] = {}
        self._aside: dict[str, SetAside] = {}
        self._fence = 0
        self._cold = -inf
        self._secret = secrets.token_bytes(16)
        self._closed = False

    def session(self, session_id: str) -> SessionInfo | None:
        with self._open():
            held = self._sessions.get(session_id)
            return self._info(held) if held else None

    def open_session(self, info: SessionInfo) -> None:
        with self._open():
            held = self._sessions.setdefault(info.session_id, Holdings(info))
            held.info = replace(held.info, parent=info.parent, ttl=info.ttl, quota=info.quota)

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        with self._open():
            digest, now = entry.ref.artifact_id, entry.ref.created
            known = self._blobs.get(digest)
            if reuse and (known is None or known.place != entry.blob.place):
                return False
            self._check_quota(entry, limits)
            held = self._used(entry.session, now, limits.grace)
            if known is None or heal:
                self._blobs[digest] = replace(entry.blob, used=now)
                self._revive(digest)
            of_digest = held.of(digest)
            live = [e for e in of_digest if not e.gone]
            if live and live[-1].ref.pinned:  # a pin belongs to the artifact: it covers later refs
                entry = replace(entry, ref=replace(entry.ref, pinned=True))
            if live and self._same(held, live[-1], entry):
                return True
            if of_digest and not live:
                held.replace([e for e in held.entries if e.ref.artifact_id != digest])
            held.add(replace(entry, content=None, gone=None, seq=held.next_seq))
            held.next_seq += 1
            return True

    def put_new(self, entry: Entry, *, limits: Limits = _NO_LIMITS) -> set[str] | None:
        return None

    def behind(self) -> bool:
        return False

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
        with self._open():
            held = self._sessions.get(session_id)
            if held is None:
                return []
            if prefix is not None:
                found = newest_of_each(held.of(prefix)[::-1])[:limit]
            elif name is not None:
                found = held.named(name)[::-1][:limit]
            else:
                found = list(islice(held.newest(before), limit))
            info = self._info(held)
            return [
                replace(entry, blob=self._blobs.get(entry.ref.artifact_id, entry.blob), session=info) for entry in found
            ]

    def find_many(self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False) -> list[Entry]:
        wanted = list(prefixes)
        return [one for each in sessions for prefix in wanted for one in self.find(each, prefix=prefix)]

    def lent(self, session_id: str, *, prefix: str | None = None, content: bool = False) -> list[Entry]:
        with self._open():
            found = [
                replace(entry, blob=self._blobs.get(entry.ref.artifact_id, entry.blob), session=self._info(held))
                for held in self._sessions.values()
                if held.info.session_id.startswith(TRANSCRIPT)
                for entry in (held.entries if prefix is None else held.of(prefix))
                if entry.ref.granted_by == session_id and not entry.gone
            ]
            found.sort(key=lambda entry: (entry.ref.created, entry.seq), reverse=True)
            return found if prefix is None else newest_of_each(found)

    def near(self, sessions: Iterable[str], digests: Iterable[str], *, settled: bool = True) -> set[str]:
        with self._open():
            held = [self._sessions[session_id] for session_id in sessions if session_id in self._sessions]
            starts = {digest[:MIN_PREFIX] for digest in digests}
            return {entry.ref.artifact_id for one in held for start in starts for entry in one.of(start)}

    def version(self, session_id: str, name: str, digest: str) -> int:
        with self._open():
            held = self._sessions.get(session_id)
            named = [entry.ref.artifact_id for entry in held.named(name)] if held else []
            return len(named) - named[::-1].index(digest) if digest in named else 0

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        with self._open():
            return self._blobs.get(digest)

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        with self._open():
            return {digest: self._blobs[digest].place for digest in digests if digest in self._blobs}

    def secret(self) -> bytes:
        return self._secret

    def shown(self, session_id: str, digests: Iterable[str]) -> dict[str, Ranges]:
        with self._open():
            held = self._sessions.get(session_id)
            return {digest: found for digest in digests if (found := held.shown.get(digest))} if held else {}

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        with self._open():
            for (session_id, digest), ranges in shown.items():
                if held := self._sessions.get(session_id):
                    held.shown[digest] = merged([*held.shown.get(digest, ()), *ranges])
            for session_id, at in sessions.items():
                if held := self._sessions.get(session_id):
                    held.info = replace(held.info, used=max(held.info.used, at))
            for digest, at in blobs.items():
                if blob := self._blobs.get(digest):
                    self._blobs[digest] = replace(blob, used=max(blob.used, at))

    def claim(
        self,
        session: SessionInfo,
        holder: str,
        *,
        at: float,
        idle: float = 0.0,
        instead_of: int | None = None,
        grace: float = 0.0,
    ) -> int:
        with self._open():
            self._check_fence(session.session_id, instead_of)
            known = self._sessions.get(session.session_id)
            check_idle(known.claim if known else UNCLAIMED, holder, at, idle)
            held = self._used(session, at, grace)
            self._fence += 1
            held.claim = Claimant(self._fence, holder, at)
            return self._fence

    def claimant(self, session_id: str) -> Claimant | None:
        with self._open():
            held = self._sessions.get(session_id)
            return held.claim if held and held.claim.holder else None

    def record(
        self,
        session: SessionInfo,
        series: str,
        body: bytes,
        *,
        at: float,
        token: int | None = None,
        keep: int | None = None,
        grace: float = 0.0,
    ) -> int:
        with self._open():
            self._check_fence(session.session_id, token)
            held = self._used(session, at, grace)
            records = held.records.setdefault(series, [])
            records.append(Record(records[-1].seq + 1 if records else 1, at, token, body))
            if token is not None:
                held.claim = replace(held.claim, at=max(held.claim.at, at))
            if keep is not None:
                del records[:-keep]
            return records[-1].seq

    def records(
        self,
        session_id: str,
        series: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[Record]:
        with self._open():
            held = self._sessions.get(session_id)
            records = held.records.get(series, []) if held else []
            found = [one for one in records if one.seq > after and (before is None or one.seq < before)]
            return (found[::-1] if newest else found)[:limit]

    def series(self, session_id: str) -> list[str]:
        with self._open():
            held = self._sessions.get(session_id)
            return sorted(held.records) if held else []

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        with self._open():
            held = self._sessions.get(session_id)
            hits = [e.seq for e in held.of(digest) if not e.gone] if held else []
            if held and hits:
                held.replace(
                    [replace(e, ref=replace(e.ref, pinned=pinned)) if e.seq in hits else e for e in held.entries]
                )
            return len(hits)

    def remove(
        self, session_id: str, digest: str | None = None, *, name: str | None = None, end: bool = False
    ) -> Freed:
        with self._open():
            held = self._sessions.get(session_id)
            if name is None or held is None:
                self._stop_lending(session_id, digest)
            if held is None:
                return Freed()
            going = held.entries if digest is None else held.of(digest)
            if name is not None:
                going = [e for e in going if e.ref.name == name]
            removed = {e.seq for e in going}
            held.replace([e for e in held.entries if e.seq not in removed])
            kept = {e.ref.artifact_id for e in held.entries}
            held.shown = {d: r for d, r in held.shown.items() if d in kept}
            if name is not None and digest not in kept:
                self._stop_lending(session_id, digest)
            if end:
                del self._sessions[session_id]
            return self._freed(sum(not e.gone for e in going))

    def _stop_lending(self, session_id: str, digest: str | None) -> None:
        for held in self._sessions.values():
            if held.info.session_id.startswith(TRANSCRIPT):
                lent = {
                    e.seq
                    for e in (held.entries if digest is None else held.of(digest))
                    if e.ref.granted_by == session_id
                }
                if lent:
                    held.replace(
                        [replace(e, ref=replace(e.ref, granted_by=None)) if e.seq in lent else e for e in held.entries]
                    )

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        with self._open():
            dead = {id(s): (s, [e for e in s.live() if _expired(e, s.info, at)]) for s in self._sessions.values()}
            if dry_run:
                staying = {
                    e.ref.artifact_id for s in self._sessions.values() for e in s.live() if e not in dead[id(s)][1]
                }
                going = [blob for digest, blob in self._blobs.items() if digest not in staying]
                return Freed(
                    sum(len(refs) for _, refs in dead.values()), len(going), sum(b.size for b in going), tuple(going)
                )
            freed = Freed()
            for held, refs in dead.values():
                freed += self._bury(held, refs)
            for held in list(self._sessions.values()):
                expires = held.info.expires(0)
                if expires is not None and expires <= at:
                    held.records.clear()
                if expires is not None and expires < forget_before:
                    held.replace(held.live())
                    if not held.entries and not held.records:
                        del self._sessions[held.info.session_id]
            self._aside = {d: one for d, one in self._aside.items() if one.until > at and self._tombstones(d)}
            return freed

    def relocate(self, old: Blob, new: Blob) -> bool:
        with self._open():
            known = self._blobs.get(old.digest)
            if known is None or known.place != old.place:
                return False
            self._blobs[old.digest] = new
            return True

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        with self._open():
            known = self._blobs.get(blob.digest)
            if known is None or known.place != blob.place:
                return 0
            self._aside[blob.digest] = SetAside(blob, until)
            return sum(
                self._bury(held, [e for e in held.live() if e.ref.artifact_id == blob.digest], "damaged").refs
                for held in self._sessions.values()
            )

    def sessions(self) -> Iterator[SessionInfo]:
        with self._open():
            return iter([self._info(held) for held in self._sessions.values()])

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        with self._open():
            wanted = self._aside if digests is None else self._aside.keys() & set(digests)
            return [replace(self._aside[digest], refs=self._tombstones(digest)) for digest in wanted]

    def restore(self, blob: Blob) -> int:
        with self._open():
            if blob.digest in self._blobs or not self._tombstones(blob.digest):
                return 0
            self._blobs[blob.digest] = blob
            self._revive(blob.digest)
            self._aside.pop(blob.digest, None)
            return sum(len(held.of(blob.digest)) for held in self._sessions.values())

    def _tombstones(self, digest: str) -> int:
        return sum(e.gone == "damaged" for held in self._sessions.values() for e in held.of(digest))

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        with self._open():
            every = self._blobs.values() if digest is None else filter(None, [self._blobs.get(digest)])
            return iter([(blob, None) for blob in every])

    def cold(self, before: float) -> Iterator[Blob]:
        with self._open():
            cold = [blob for blob in self._blobs.values() if self._cold < blob.used <= before and blob.coding == "raw"]
        yield from cold
        self._cold = max(self._cold, before)

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        return []

    def totals(self) -> Totals:
        with self._open():
            live = [e for held in self._sessions.values() for e in held.live()]
            return Totals(
                len(self._sessions),
                len(live),
                len(self._blobs),
                sum(bool(e.gone) for held in self._sessions.values() for e in held.entries),
                sum(blob.size for blob in self._blobs.values()),
                sum(e.ref.size_bytes for e in live),
            )

    def compact(self) -> None:
        pass

    def uri(self, blob: Blob) -> str:
        return f"memory:{blob.digest}"

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreClosed("the store is closed")
            yield

    def _info(self, held: Holdings) -> SessionInfo:
        return replace(held.info, used_bytes=held.used_bytes)

    def _used(self, info: SessionInfo, now: float, grace: float) -> Holdings:
        """Return the session, created if it is new, and mark it as used now."""
        held = self._sessions.setdefault(info.session_id, Holdings(replace(info, created=now, used=now, used_bytes=0)))
        if held.info.ttl is not None and held.info.used + held.info.ttl + grace <= now:
            self._bury(held, [e for e in held.live() if not e.ref.pinned])
            held.records.clear()
        held.info = replace(held.info, used=max(held.info.used, now))
        return held

    def _check_fence(self, session_id: str, token: int | None) -> None:
        held = self._sessions.get(session_id)
        newest = held.claim if held else UNCLAIMED
        if token is not None and token != newest.token:
            raise fenced(token, newest)

    def _check_quota(self, entry: Entry, limits: Limits) -> None:
        digest, size = entry.ref.artifact_id, entry.ref.size_bytes
        held, quota = self._sessions.get(entry.session.session_id), entry.session.quota
        if quota is not None:
            used = held.used_bytes if held else 0
            if not (held and held.holds(digest)) and used + size > quota:
                raise QuotaExceeded(f"{size} bytes more would exceed the session's quota: {used} of {quota} are used")
        if limits.store_quota is not None and digest not in self._blobs:
            used = sum(blob.size for blob in self._blobs.values())
            if used + size > limits.store_quota:
                raise QuotaExceeded(
                    f"{size} bytes more would exceed the store's quota: {used} of {limits.store_quota} are used"
                )

    def _same(self, held: Holdings, newest: Entry, entry: Entry) -> bool:
        current = held.named(entry.ref.name)[-1:] if entry.ref.name is not None else [newest]
        same = replace(newest.ref, created=0) == replace(entry.ref, created=0)
        return current == [newest] and same and newest.ref.expires == entry.ref.expires

    def _bury(self, held: Holdings, refs: list[Entry], why: Gone = "expired") -> Freed:
        going = {e.seq for e in refs}
        held.replace([replace(e, gone=why) if e.seq in going else e for e in held.entries])
        return self._freed(len(refs))

    def _freed(self, refs: int) -> Freed:
        staying = {e.ref.artifact_id for held in self._sessions.values() for e in held.live()}
        going = [blob for digest, blob in self._blobs.items() if digest not in staying]
        for blob in going:
            del self._blobs[blob.digest]
        return Freed(refs, len(going), sum(blob.size for blob in going), tuple(going))

    def _revive(self, digest: str) -> None:
        for held in self._sessions.values():
            lost = {e.seq for e in held.of(digest) if e.gone == "damaged"}
            if lost:
                held.replace([replace(e, gone=None) if e.seq in lost else e for e in held.entries])


def _expired(entry: Entry, session: SessionInfo, at: float) -> bool:
    ends = [t for t in (session.expires(0), entry.ref.expires) if t is not None]
    return not entry.ref.pinned and any(t <= at for t in ends)
