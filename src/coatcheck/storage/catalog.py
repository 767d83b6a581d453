"""The catalog protocol: sessions, refs and names, and with `Records` and `Upkeep` all that a store
keeps about its artifacts.

A backend implements the eight methods of `Rows`. All others are written in terms of these: slow,
but correct for every backend. A backend overrides those that it can do faster. Methods that begin
with `_` run inside a change, except `_would_expire`, `_due`, `_unused` and `_granted`, which only
read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Final

from coatcheck.errors import Damaged, QuotaExceeded
from coatcheck.ids import MIN_PREFIX
from coatcheck.refs import Ref
from coatcheck.storage.entries import (
    NO_LIMITS,
    NOTHING_SHOWN,
    TRANSCRIPT,
    Entry,
    Freed,
    Known,
    Limits,
    Note,
    Ranges,
    SessionInfo,
    Totals,
    merged,
    newest_of_each,
)
from coatcheck.storage.records import Records
from coatcheck.storage.upkeep import Upkeep

_SHOWN: Final = ("shown/", "shown0")


class Catalog(Records, Upkeep):
    """Sessions, refs and names, and the content of small blobs. Each change is atomic."""

    def open_session(self, info: SessionInfo) -> None:
        """Create the session, or update parent, ttl and quota of an existing one."""

        def work() -> None:
            known = self.session(info.session_id) or replace(info, used_bytes=0)
            self.save(replace(known, parent=info.parent, ttl=info.ttl, quota=info.quota))

        self.change("opening a session", work, session_id=info.session_id)

    def put(
        self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False
    ) -> bool:
        """Add a ref, and its session and blob if they are new, and mark the session as used at
        `ref.created`.

        If the catalog already has the blob, it keeps the known copy, unless `heal` asks for it to
        be replaced; the other copy is left to a sweep. Inline content always replaces the stored
        content. With `reuse`, the blob must be the catalog's own: if it was removed meanwhile,
        returns False and changes nothing. A ref equal to the newest one of its artifact, including
        the name, is not added twice. If the session expired longer ago than the grace period, its
        former refs become tombstones and its records are deleted. Raises `QuotaExceeded`."""
        digest, now = entry.ref.artifact_id, entry.ref.created

        def work() -> bool:
            known = self.blob(digest)
            if reuse and (known is None or known.place != entry.blob.place):
                return False
            self._use(entry.session, now, limits.grace)
            # Again: if the session had expired, the blob may have been dropped.
            known = self.blob(digest)
            self._check_quotas_of(entry, limits, is_stored=known is not None)
            if known is None or heal:
                self.save(replace(entry.blob, used=now))
                self._revive(digest)
            self._add_new_ref(entry)
            return True

        return self.change("putting an artifact", work, effect="add")

    def _check_quotas_of(self, entry: Entry, limits: Limits, *, is_stored: bool) -> None:
        session = self.session(entry.session.session_id) or entry.session
        if all(one.gone for one in self.refs(session.session_id, entry.ref.artifact_id)):
            check_quota("session", entry.session.quota, session.used_bytes, entry)
        if not is_stored:
            check_quota(
                "store", limits.store_quota, sum(blob.size for blob, _ in self.blobs()), entry
            )

    def _add_new_ref(self, entry: Entry) -> None:
        """Add a ref, unless it repeats the newest live one of its artifact."""
        session_id = entry.session.session_id
        refs = self.refs(session_id, entry.ref.artifact_id)
        live = [one for one in refs if not one.gone]
        # A pin belongs to the artifact: it covers later refs.
        ref = replace(entry.ref, pinned=True) if live and live[0].ref.pinned else entry.ref
        if live and self._is_same(live[0], ref):
            return
        if not live:
            self.drop(*refs)
        last = max((one.seq for one in self.refs(session_id)), default=0)
        session = self.session(session_id) or entry.session
        new = replace(entry, ref=ref, session=session, content=None, gone=None, seq=last + 1)
        self.save(new)
        self._count_bytes([new])

    def _is_same(self, known: Entry, ref: Ref) -> bool:
        """Return whether a ref repeats a known one whose name is not used by a later one."""
        if replace(known.ref, created=ref.created) != ref or known.ref.expires != ref.expires:
            return False
        return (
            ref.name is None
            or self.find(ref.session_id, name=ref.name, limit=1)[0].seq == known.seq
        )

    def look(self, digest: str, lineage: Sequence[str], *, blob: bool) -> Known:
        """Return what a put into the first of these sessions needs to know; see `Known`."""
        own, *others = lineage
        try:
            entries = self.find(own, prefix=digest[:MIN_PREFIX], content=True)
        except Damaged:  # this put may repair it
            entries = self.find(own, prefix=digest[:MIN_PREFIX])
        ids = {one.ref.artifact_id for one in entries} | (
            self.near(others, [digest]) if others else set()
        )
        return Known(entries, ids, self.blob(digest) if blob else None)

    def put_inline(
        self,
        digest: str,
        lineage: Sequence[str],
        make: Callable[[], Entry],
        is_repeat: Callable[[Entry], bool],
        *,
        limits: Limits = NO_LIMITS,
    ) -> tuple[Entry, Collection[str]]:
        """Put the entry that `make` returns, which contains its content, into the first of these
        sessions, unless the session has one that `is_repeat` accepts. Returns whichever it is, and
        the ids in `Known`."""
        known = self.look(digest, lineage, blob=False)
        for entry in known.entries:
            if is_repeat(entry):
                self.confirm()
                return entry, known.ids
        entry = make()
        self.put(entry, limits=limits)
        return entry, known.ids

    def confirm(self) -> None:
        """Make what was read as durable as the catalog was opened for. Called when a put finds
        nothing to add: another process may have written it with less durability."""

    def batch(self) -> AbstractContextManager[None]:
        """Acknowledge the puts of this thread inside the context together. Each put is visible at
        once and survives this process; on exit, all are as durable as the catalog was opened for.
        Exiting with an error does not acknowledge them."""
        return nullcontext()

    def find(
        self,
        session_id: str,
        *,
        prefix: str | None = None,
        name: str | None = None,
        content: bool = False,
        limit: int | None = None,
        before: int | None = None,
    ) -> list[Entry]:
        """Return refs of one session, newest first, including tombstones.

        With `prefix`: for each artifact whose id starts with it, the newest of the refs that live
        longest; a tombstone only if all of them are. With `name`: every ref put under that name.
        Otherwise all refs, or those with a seq lower than `before`. With `content`, entries include
        the inline content."""
        refs = self.refs(session_id)
        if prefix is not None:
            return newest_of_each(one for one in refs if one.ref.artifact_id.startswith(prefix))[
                :limit
            ]
        found = [one for one in refs if name in (None, one.ref.name)]
        return [one for one in found if before is None or one.seq < before][:limit]

    def find_many(
        self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False
    ) -> list[Entry]:
        """Return what `find` returns for each of these sessions and prefixes."""
        pairs = product(sessions, list(prefixes))
        return [
            one for each, prefix in pairs for one in self.find(each, prefix=prefix, content=content)
        ]

    def lent(
        self, session_id: str, *, prefix: str | None = None, content: bool = False
    ) -> list[Entry]:
        """Return refs that transcripts keep for this session, newest first, without tombstones:
        refs in sessions whose id starts with `TRANSCRIPT` that were granted by this one.

        With `prefix`, only the newest ref of each artifact whose id starts with it."""
        found = [
            one for one in self._granted(session_id, prefix or "", content=content) if not one.gone
        ]
        return found if prefix is None else newest_of_each(found)

    def _granted(self, session_id: str, prefix: str = "", *, content: bool = False) -> list[Entry]:
        """Return the refs of transcripts that this session granted, newest first, including
        tombstones."""
        sessions = [
            one.session_id for one in self.sessions() if one.session_id.startswith(TRANSCRIPT)
        ]
        refs = [
            one for each in sessions for one in self.refs(each) if one.ref.granted_by == session_id
        ]
        found = [one for one in refs if one.ref.artifact_id.startswith(prefix)]
        return sorted(found, key=lambda one: (one.ref.created, one.seq), reverse=True)

    def _stop_lending(self, session_id: str, prefix: str = "") -> None:
        """Keep the refs of transcripts that this session granted, but do not lend them to it."""
        lent = self._granted(session_id, prefix)
        self.save(*(replace(one, ref=replace(one.ref, granted_by=None)) for one in lent))

    def near(self, sessions: Iterable[str], digests: Iterable[str]) -> set[str]:
        """Return the ids in these sessions, including tombstones, that share their first 12
        characters with one of `digests`: pointers must distinguish them."""
        return {
            one.ref.artifact_id
            for one in self.find_many(sessions, {digest[:MIN_PREFIX] for digest in digests})
        }

    def version(self, session_id: str, name: str, digest: str) -> int:
        """Return the version number of this artifact's newest ref under a name in this session,
        counted from 1 and including tombstones; 0 if there is none."""
        ids = [one.ref.artifact_id for one in self.find(session_id, name=name)]
        return len(ids) - ids.index(digest) if digest in ids else 0

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        """Return the places of the blobs of these digests. Unknown digests are omitted."""
        return {blob.digest: blob.place for blob in filter(None, map(self.blob, digests))}

    def is_named(self, place: str) -> bool:
        """Return whether a blob has this place."""
        return any(blob.place == place for blob, _ in self.blobs())

    def secret(self) -> bytes:
        """Return the store's private signing key. It is generated once, so signatures stay valid
        after a restart."""

        def work() -> bytes:
            key = self._note("", "secret") or os.urandom(16)
            self.save(Note("", "secret", key))
            return key

        return self._note("", "secret") or self.change("creating a key", work)

    def collected(self) -> float | None:
        """Return when the last collection began, or None if there was none."""
        note = self._note("", "collected")
        return None if note is None else float(note)

    def note_collection(self, at: float, *, every: float = 0.0) -> bool:
        """Note that a collection begins, unless one began less than `every` seconds ago. Return
        whether it was noted: of several processes that ask at once, one gets True."""

        def work() -> bool:
            last = self.collected()
            if last is not None and every and last > at - every:
                return False
            self.save(Note("", "collected", repr(at).encode()))
            return True

        return self.change("noting a collection", work, effect="free")

    def shown(self, session_id: str, digests: Iterable[str]) -> dict[str, Ranges]:
        """Return which bytes of these artifacts this session has seen, as sorted ranges that do not
        touch or overlap. Artifacts of which it has seen nothing are omitted."""
        keys = {_SHOWN[0] + digest: digest for digest in digests}
        found = self.notes(session_id, min(keys), max(keys) + " ") if keys else []
        ranges = {keys[one.key]: json.loads(one.value) for one in found if one.key in keys}
        return {
            digest: tuple((start, end) for start, end in each) for digest, each in ranges.items()
        }

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = NOTHING_SHOWN,
    ) -> None:
        """Update the last-used times of sessions and blobs, if these are later, and add to the
        ranges shown. A crash may lose the update."""

        def work() -> None:
            for session in filter(None, map(self.session, sessions)):
                self.save(replace(session, used=max(session.used, sessions[session.session_id])))
            for blob in filter(None, map(self.blob, blobs)):
                self.save(replace(blob, used=max(blob.used, blobs[blob.digest])))
            self._add_shown(shown)

        self.change("noting use", work, effect="note")

    def _add_shown(self, shown: Mapping[tuple[str, str], Ranges]) -> None:
        for (session_id, digest), ranges in shown.items():
            if self.session(session_id) is not None:
                every = merged([*self.shown(session_id, [digest]).get(digest, ()), *ranges])
                self.save(Note(session_id, _SHOWN[0] + digest, json.dumps(every).encode()))

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        """Pin or unpin a session's refs to an artifact. Returns the number of refs."""

        def work() -> int:
            refs = [one for one in self.refs(session_id, digest) if not one.gone]
            self.save(*(replace(one, ref=replace(one.ref, pinned=pinned)) for one in refs))
            return len(refs)

        return self.change("pinning", work, session_id=session_id)

    def remove(
        self,
        session_id: str,
        digest: str | None = None,
        *,
        name: str | None = None,
        end: bool = False,
    ) -> Freed:
        """Remove a session's refs to an artifact (only those under `name`, if given), or all of its
        refs. With `end`, also remove the session, its tombstones, records and claim. Refs that
        transcripts keep to the removed artifacts are no longer `lent` to the session."""

        def work() -> Freed:
            every = self.refs(session_id, digest)
            going = [one for one in every if name in (None, one.ref.name)]
            self.drop(*going)
            if name is None or len(going) == len(every):
                self._stop_lending(session_id, digest or "")
                start, stop = (
                    _SHOWN if digest is None else (_SHOWN[0] + digest, _SHOWN[0] + digest + " ")
                )
                self._drop_notes(session_id, start, stop)
            freed = self._let_go([one for one in going if not one.gone])
            if end:
                self.drop(*self.sessions(session_id))
            return freed

        return self.change("forgetting", work, session_id=session_id, effect="free")

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        """Return inconsistencies within the catalog, one sentence each. With `repair`, fix those
        that can be fixed; their sentences end in ": set right" or ": removed". Blobs of refs that
        became tombstones are set aside."""

        def work() -> list[str]:
            return self._check_records(repair=repair) + self._check_tokens(repair=repair)

        return self.change("checking the catalog", work)

    def totals(self) -> Totals:
        sessions, blobs = list(self.sessions()), [blob.size for blob, _ in self.blobs()]
        refs = [one for info in sessions for one in self.refs(info.session_id)]
        live = [one.ref.size_bytes for one in refs if not one.gone]
        return Totals(
            len(sessions), len(live), len(blobs), len(refs) - len(live), sum(blobs), sum(live)
        )


def check_quota(whose: str, quota: int | None, used: int, entry: Entry) -> None:
    """Raise `QuotaExceeded` if an artifact that is not counted yet would exceed a quota."""
    size = entry.ref.size_bytes
    if quota is not None and used + size > quota:
        raise QuotaExceeded(
            f"{size} bytes more would exceed the {whose}'s quota: {used} of {quota} are used"
        )
