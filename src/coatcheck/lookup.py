"""Look up pointers, ids and names in a session and its ancestors.

Every read goes through `Lookup.resolve`. A digest is not a capability: an id that no session in the lineage has is
answered exactly like one that does not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice

from coatcheck.activity import Activity
from coatcheck.errors import AmbiguousPointer, Expired, InvalidArgument, InvalidPointer, NotFound
from coatcheck.ids import MIN_PREFIX, SCHEME, clip, is_encodable, is_prefix, parse_pointer, pointer_of, shared_prefix
from coatcheck.refs import Ref
from coatcheck.storage import BlobStore, Catalog, Entry, SessionInfo

_PAGE = 128  # refs in one query


@dataclass(frozen=True, slots=True)
class Scope:
    """A session and its ancestors, nearest first: where names and pointers are looked up."""

    info: SessionInfo
    lineage: tuple[str, ...]
    """The ids of the session and its ancestors."""


class Lookup:
    """Resolves pointers, ids and names to catalog entries, for a scope."""

    def __init__(self, blobs: BlobStore, catalog: Catalog, activity: Activity, clock: Callable[[], float]) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._last_uses = activity.last_uses
        self._clock = clock

    def resolve(
        self, scope: Scope, target: Ref | str, *, content: bool = False, brief: bool = False
    ) -> tuple[Entry, str]:
        """Return the live entry for a ref, pointer, id or name, and the fragment of the pointer.

        Raises `NotFound`, `Expired`, `AmbiguousPointer`, `InvalidPointer`."""
        if isinstance(target, Ref):
            entry = self._by_prefix(scope, target.artifact_id, content, brief)
            if entry.ref.codec != target.codec:
                entry = replace(entry, ref=replace(entry.ref, codec=target.codec))
            return entry, ""
        if not isinstance(target, str):
            raise InvalidArgument(f"cannot look up a {type(target).__name__}", hint="pass a pointer, a name or a Ref")
        if target.startswith(SCHEME):
            try:
                parsed = parse_pointer(target)
            except InvalidPointer:
                named = self._by_name(scope, target, content) if is_encodable(target) else None
                if named is None:
                    raise
                return named, ""
            return self._by_prefix(scope, parsed.prefix, content, brief), parsed.fragment
        named = self._by_name(scope, target, content) if is_encodable(target) else None
        if named is not None:
            return named, ""
        if is_prefix(target):
            return self._by_prefix(scope, target, content, brief), ""
        raise NotFound(f"no artifact found for {clip(target)}")

    def artifacts(self, scope: Scope, *, after: str | None, limit: int) -> list[Ref]:
        """Return a page of the live artifacts that the scope sees, each once: own ones first, newest first, then those
        that only transcripts still have. `after` is the id of the last artifact of the page before."""
        places = {session_id: index for index, session_id in enumerate(scope.lineage)}

        def place(entry: Entry) -> tuple[int, int]:
            return places[entry.ref.session_id], -entry.seq

        first, before = 0, None
        lent: dict[str, Entry] | None = None
        if after is not None:
            last = self._listed(scope, after)
            if (last is None or not self.is_live(last)) and after in (ids := self.lent(scope)):
                first, lent = len(places), dict(islice(ids.items(), list(ids).index(after) + 1, None))
            elif last is None:
                raise NotFound(f"no artifact found for {pointer_of(after, 64)!r}", hint="list from the beginning")
            else:
                first, before = places[last.ref.session_id], last.seq
        found: dict[str, Entry] = {}
        done: set[str] = set()
        for session_id in scope.lineage[first:]:
            while len(found) < limit:
                page = self._catalog.find(session_id, before=before, limit=_PAGE)
                for entry in page:
                    digest = entry.ref.artifact_id
                    if digest in done or len(found) == limit:
                        continue
                    listed = self._listed(scope, digest)
                    if listed is not None and place(listed) == place(entry) and self.is_live(listed):
                        found[digest] = listed
                    if listed is None or place(listed) <= place(entry):
                        done.add(digest)
                if len(page) < _PAGE:
                    break
                before = page[-1].seq
            before = None
        if len(found) < limit:
            lent = self.lent(scope) if lent is None else lent
            found |= islice(((digest, lent[digest]) for digest in self.only_lent(scope, lent)), limit - len(found))
        near: dict[str, list[str]] = {}
        for one in self._catalog.near(scope.lineage, found):
            near.setdefault(one[:MIN_PREFIX], []).append(one)
        return [self.ref_for_caller(entry, near.get(digest[:MIN_PREFIX], ())) for digest, entry in found.items()]

    def lent(self, scope: Scope) -> dict[str, Entry]:
        """The artifacts that transcripts lend to the sessions of a scope, by id, newest first."""
        found: dict[str, Entry] = {}
        for entry in (one for session_id in scope.lineage for one in self._catalog.lent(session_id)):
            found.setdefault(entry.ref.artifact_id, entry)
        return found

    def only_lent(self, scope: Scope, lent: Iterable[str]) -> Iterator[str]:
        """Yield those of the lent artifacts that have no live ref in the scope any more."""
        ids = list(lent)
        for some in (ids[start : start + _PAGE] for start in range(0, len(ids), _PAGE)):
            found = self._catalog.find_many(scope.lineage, some)
            held = {entry.ref.artifact_id for entry in found if self.is_live(entry)}
            yield from (digest for digest in some if digest not in held)

    def _listed(self, scope: Scope, artifact_id: str) -> Entry | None:
        """The one ref under which `artifacts` lists an artifact: a live one, if there is any."""
        dead: Entry | None = None
        for session_id in scope.lineage:
            for entry in self._catalog.find(session_id, prefix=artifact_id):
                if self.is_live(entry):
                    return entry
                dead = dead or entry
        return dead

    def list(self, scope: Scope, *, name: str | None, kind: str | None, limit: int | None) -> list[Ref]:
        """List the live refs that the scope sees: own ones first, newest first, each artifact once. A ref without a
        name gets the newest one that its artifact has in the same session, if that was read for the list."""
        if name is not None and not is_encodable(name):
            return []
        seen: dict[str, int] = {}  # the positions of artifacts in the list
        found: list[Entry] = []
        size = 256 if limit is None or kind else min(256, max(16, limit))
        for session_id in scope.lineage:
            before: int | None = None
            while limit is None or len(found) < limit:
                page = self._catalog.find(session_id, name=name, before=before, limit=None if name else size)
                for entry in page:
                    digest = entry.ref.artifact_id
                    if (name or digest not in seen) and kind in (None, entry.ref.kind) and self.is_live(entry):
                        seen[digest] = len(found)
                        found.append(entry)
                    elif entry.ref.name and digest in seen and self.is_live(entry):
                        first = found[seen[digest]]
                        if first.ref.name is None and first.ref.session_id == session_id:
                            found[seen[digest]] = replace(first, ref=replace(first.ref, name=entry.ref.name))
                if name or len(page) < size:
                    break
                before = page[-1].seq
        if name is None and (limit is None or len(found) < limit):
            lent = self.lent(scope).items()
            found += [one for digest, one in lent if digest not in seen and kind in (None, one.ref.kind)]
        is_all = limit is None and name is None and kind is None
        listed = found[:limit]
        ids = {entry.ref.artifact_id for entry in listed}
        near: dict[str, list[str]] = {}
        for one in ids if is_all else self._catalog.near(scope.lineage, ids):
            near.setdefault(one[:MIN_PREFIX], []).append(one)
        return [self.ref_for_caller(entry, near.get(entry.ref.artifact_id[:MIN_PREFIX], ())) for entry in listed]

    def live(self, scope: Scope, digests: Collection[str]) -> dict[str, Entry]:
        """Return the live entries of these artifacts that the scope sees, with their content if it is small and with
        their refs as callers see them. One query serves all of them, unless some have expired."""
        found: dict[str, Entry] = {}
        near: dict[str, set[str]] = {}
        starts = {digest[:MIN_PREFIX] for digest in digests}
        for entry in self._catalog.find_many(scope.lineage, starts, content=True):
            digest = entry.ref.artifact_id
            near.setdefault(digest[:MIN_PREFIX], set()).add(digest)
            if digest not in found and digest in digests and self.is_live(entry):
                found[digest] = entry
        for digest in digests:
            if digest not in found:
                with contextlib.suppress(NotFound):  # a transcript may still refer to it
                    found[digest] = self._by_prefix(scope, digest, True, False)
        return {
            digest: replace(entry, ref=self.ref_for_caller(entry, near.get(digest[:MIN_PREFIX], ())))
            for digest, entry in found.items()
        }

    def near(self, scope: Scope, entry: Entry) -> Iterable[str]:
        """The ids in the scope that begin like this one, and that its pointer must differ from."""
        return self._catalog.near(scope.lineage, [entry.ref.artifact_id])

    def is_live(self, entry: Entry) -> bool:
        expires = self.expires(entry)
        return not entry.gone and (expires is None or self._clock() < expires)

    def expires(self, entry: Entry) -> float | None:
        """When this entry expires if nothing is used from now on: its own time or its session's, whichever is first."""
        ref, session = entry.ref, entry.session
        if ref.pinned:
            return None
        if session.ttl is None:
            return ref.expires
        used = max(session.used, ref.created, self._last_uses.get(session.session_id, 0.0))
        return used + session.ttl if ref.expires is None else min(used + session.ttl, ref.expires)

    def ref_for_caller(self, entry: Entry, near: Iterable[str] = ()) -> Ref:
        """The ref of an entry as users see it: with its expiry, its address, and a pointer that is unique among the ids
        in `near`."""
        artifact_id, length = entry.ref.artifact_id, MIN_PREFIX
        for other in near:
            if other != artifact_id:
                length = max(length, shared_prefix(artifact_id, other) + 1)
        is_inline = entry.blob.coding == "inline"
        uri = self._catalog.uri_prefix + artifact_id if is_inline else self._blobs.uri(entry.blob)
        ref = entry.ref  # written out, since `replace` costs more than hashing
        return Ref(
            artifact_id, ref.session_id, ref.size_bytes, ref.media_type, ref.kind, ref.codec, ref.name, ref.tool,
            ref.call_id, ref.producer, ref.parents, ref.summary, ref.created, self.expires(entry), ref.pinned,
            ref.granted_by, ref.request, uri, length,
        )  # fmt: skip

    def _by_prefix(self, scope: Scope, prefix: str, content: bool, brief: bool) -> Entry:
        dead: Entry | None = None
        live: dict[str, Entry] = {}
        for session_id in scope.lineage:
            if brief:
                found = self._catalog.fetch(session_id, prefix)
            else:
                found = self._catalog.find(session_id, prefix=prefix, content=content)
            for entry in found:
                if self.is_live(entry):
                    live.setdefault(entry.ref.artifact_id, entry)
                else:
                    dead = dead or entry
            if prefix in live:  # a whole id matches one artifact: take its nearest ref
                break
        if not live or dead:  # an expired artifact may still be referenced by a transcript
            for session_id in scope.lineage:
                for entry in self._catalog.lent(session_id, prefix=prefix, content=content):
                    live.setdefault(entry.ref.artifact_id, entry)
        if len(live) == 1:
            return next(iter(live.values()))
        if live:
            raise AmbiguousPointer(
                f"{pointer_of(prefix, 64)} matches {len(live)} artifacts",
                [self.ref_for_caller(one, live).pointer for one in live.values()],
            )
        raise (
            _gone(dead, pointer_of(prefix, 64))
            if dead
            else NotFound(f"no artifact found for {pointer_of(prefix, 64)!r}")
        )

    def _by_name(self, scope: Scope, name: str, content: bool) -> Entry | None:
        dead: Entry | None = None
        for session_id in scope.lineage:
            for entry in self._catalog.find(session_id, name=name, content=content, limit=1):
                if self.is_live(entry):
                    return entry
                dead = dead or entry
        if dead:
            raise _gone(dead, name)
        return None


def _gone(entry: Entry, asked: str) -> NotFound:
    ref = entry.ref
    created = datetime.fromtimestamp(ref.created, UTC).isoformat(timespec="seconds")
    label = clip(ref.name) if ref.name else clip(ref.media_type)
    what = f"{clip(asked)} was {ref.kind} {label} of {ref.size_bytes} bytes, put {created}"
    if entry.gone == "damaged":
        return NotFound(
            f"{what}; its bytes were damaged and set aside", hint="put the same content again to restore it"
        )
    return Expired(f"{what}; it has expired")
