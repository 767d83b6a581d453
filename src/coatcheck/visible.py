"""What a session sees: its own refs, those of its ancestors, and what transcripts lend to them.

A session resolves pointers and names here, and lists artifacts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from coatcheck.errors import AmbiguousPointer, Damaged, Expired, InvalidArgument, NotFound
from coatcheck.ids import (
    MIN_PREFIX,
    SCHEME,
    clip,
    is_encodable,
    is_pointer,
    is_prefix,
    parse_pointer,
    pointer_of,
)
from coatcheck.intake import Parts, Scope
from coatcheck.refs import Ref
from coatcheck.storage import Entry, expiry

_PAGE = 128  # refs in one query


class Visible:
    """The artifacts that one session sees."""

    __slots__ = ("_parts", "_scope")

    def __init__(self, parts: Parts, scope: Scope) -> None:
        self._parts = parts
        self._scope = scope

    def resolve(self, target: Ref | str, *, content: bool = False) -> tuple[Entry, str]:
        """Return the live entry for a ref, pointer, id or name, and the fragment of the pointer.

        Every read goes through here. A digest is not a capability: an id that neither the session
        nor an ancestor has is answered exactly like one that does not exist. Raises `NotFound`,
        `Expired`, `AmbiguousPointer`, `InvalidPointer`."""
        if isinstance(target, Ref):
            entry = self.by_prefix(target.artifact_id, content)
            if entry.ref.codec != target.codec:
                entry = replace(entry, ref=replace(entry.ref, codec=target.codec))
            return entry, ""
        if not isinstance(target, str):
            raise InvalidArgument(
                f"cannot look up a {type(target).__name__}", hint="pass a pointer, a name or a Ref"
            )
        if target.startswith(SCHEME) and is_pointer(target):
            prefix, _, fragment = target[len(SCHEME) :].partition("#")
            return self.by_prefix(prefix, content), fragment
        named = (
            self.nearest(name=target, content=content, limit=1) if is_encodable(target) else None
        )
        if named is not None:
            if not self._parts.is_live(named):
                raise _gone(named, target)
            return named, ""
        if is_prefix(target):
            return self.by_prefix(target, content), ""
        if target.startswith(SCHEME):
            parse_pointer(target)  # raises
        raise NotFound(f"no artifact found for {clip(target)}")

    def by_prefix(self, prefix: str, content: bool) -> Entry:
        """Return the live entry of the one artifact whose id begins with a prefix. Raises like
        `resolve`."""
        found = self._matches(prefix, content)
        live = found.live
        if not live or found.dead is not None:
            # A transcript may still refer to an expired artifact.
            self._add_lent(live, prefix, content)
        if len(live) == 1:
            return next(iter(live.values()))
        if live:
            pointers = [self._parts.ref_for_caller(entry, live).pointer for entry in live.values()]
            raise AmbiguousPointer(
                f"{pointer_of(prefix, 64)} matches {len(live)} artifacts", pointers
            )
        if found.dead is not None:
            raise _gone(found.dead, pointer_of(prefix, 64))
        raise NotFound(f"no artifact found for {pointer_of(prefix, 64)!r}")

    def _matches(self, prefix: str, content: bool) -> _Matches:
        """Return the refs in this session and its ancestors whose artifact id begins with a
        prefix."""
        found = _Matches()
        for session_id in self._scope.lineage:
            for entry in self._parts.catalog.find(session_id, prefix=prefix, content=content):
                if self._parts.is_live(entry):
                    found.live.setdefault(entry.ref.artifact_id, entry)
                elif found.dead is None:
                    found.dead = entry
            if prefix in found.live:  # a whole id matches one artifact: take its nearest ref
                break
        return found

    def _add_lent(self, live: dict[str, Entry], prefix: str, content: bool) -> None:
        for session_id in self._scope.lineage:
            for entry in self._parts.catalog.lent(session_id, prefix=prefix, content=content):
                live.setdefault(entry.ref.artifact_id, entry)

    def nearest(self, **which: Any) -> Entry | None:
        """Return the first ref that `find` finds in this session or its ancestors: a live one, if
        there is any."""
        dead: Entry | None = None
        for session_id in self._scope.lineage:
            for entry in self._parts.catalog.find(session_id, **which):
                if self._parts.is_live(entry):
                    return entry
                dead = dead or entry
        return dead

    def page(self, after: str | None, limit: int) -> list[Entry]:
        """Return a page of what the session sees, each artifact once: own ones first, newest first,
        then those that only transcripts still have. `after` is the id of the last artifact of the
        previous page. Raises `NotFound` for an unknown id."""
        lent = self.lent()
        last = None if after is None else self.nearest(prefix=after)
        is_over = last is not None and not self._parts.is_live(last)
        if after in lent and (last is None or is_over):
            ids = list(lent)
            return self._of_lent(lent, ids[ids.index(after) + 1 :], limit)
        if after is not None and last is None:
            raise NotFound(
                f"no artifact found for {pointer_of(after, 64)!r}", hint="list from the beginning"
            )
        found = list(islice(self._each_once(last), limit))
        return found + self._of_lent(lent, lent, limit - len(found))

    def _each_once(self, after: Entry | None) -> Iterator[Entry]:
        """Yield each artifact once, after this ref: where its nearest ref is, so that a page does
        not repeat those before it."""
        known: set[str] = set()
        for entry in self.seen(after=after):
            digest = entry.ref.artifact_id
            if digest in known:
                continue
            nearest = self.nearest(prefix=digest)
            if nearest is not None and _place(nearest) == _place(entry):
                known.add(digest)
                yield nearest

    def listing(self, kind: str | None, limit: int | None) -> list[Ref]:
        """Return the refs of what the session sees, newest first, each artifact once under its
        newest name; of one kind if it is given."""
        listing = _Listing(kind, limit)
        listing.add(self.seen())
        if listing.is_full:  # older refs, which may have a name, were not looked at
            return self.refs([self._with_newest_name(one) for one in listing.entries.values()])
        listing.add(self.lent().values())
        is_all = kind is None and limit is None
        return self.refs(listing.entries.values(), listing.entries if is_all else None)

    def named(self, name: str, kind: str | None, limit: int | None) -> list[Entry]:
        """Return the refs under a name, newest first, of one kind if it is given."""
        if not is_encodable(name):
            return []
        found = (entry for entry in self.seen(name=name) if kind in (None, entry.ref.kind))
        return list(islice(found, limit))

    def _with_newest_name(self, entry: Entry) -> Entry:
        """Return a ref with the newest name that its session gives to the artifact, if it has none
        itself."""
        if entry.ref.name is None:
            for older in self._parts.catalog.refs(entry.ref.session_id, entry.ref.artifact_id):
                if self._parts.is_live(older):
                    entry = _named_like(older, entry)
        return entry

    def seen(self, *, name: str | None = None, after: Entry | None = None) -> Iterator[Entry]:
        """Yield every live ref of this session and its ancestors: nearest session first, newest
        first. With `name`, those under that name; with `after`, those that come after this ref."""
        lineage = self._scope.lineage
        before: int | None = None
        if after is not None:
            lineage = lineage[lineage.index(after.ref.session_id) :]
            before = after.seq
        for session_id in lineage:
            while True:
                page = self._parts.catalog.find(
                    session_id, name=name, before=before, limit=None if name else _PAGE
                )
                yield from filter(self._parts.is_live, page)
                if name is not None or len(page) < _PAGE:
                    break
                before = page[-1].seq
            before = None

    def lent(self) -> dict[str, Entry]:
        """The artifacts that transcripts lend to the sessions of a scope, by id, newest first."""
        found: dict[str, Entry] = {}
        for session_id in self._scope.lineage:
            for entry in self._parts.catalog.lent(session_id):
                found.setdefault(entry.ref.artifact_id, entry)
        return found

    def only_lent(self, lent: Iterable[str]) -> Iterator[str]:
        """Yield the lent artifacts that no longer have a live ref in the scope."""
        ids = list(lent)
        for start in range(0, len(ids), _PAGE):
            some = ids[start : start + _PAGE]
            found = self._parts.catalog.find_many(self._scope.lineage, some)
            held = {entry.ref.artifact_id for entry in found if self._parts.is_live(entry)}
            yield from (digest for digest in some if digest not in held)

    def _of_lent(self, lent: Mapping[str, Entry], ids: Iterable[str], limit: int) -> list[Entry]:
        """Return the first of these lent artifacts that no longer have a live ref in the scope."""
        return [lent[digest] for digest in islice(self.only_lent(ids), max(0, limit))]

    def live(self, digests: Collection[str]) -> dict[str, Entry]:
        """Return the live entries of these artifacts that the session sees, with their content if
        it is small and with their refs as callers see them. One query serves all of them, unless
        some have expired."""
        starts = {digest[:MIN_PREFIX] for digest in digests}
        entries = self._parts.catalog.find_many(self._scope.lineage, starts, content=True)
        found: dict[str, Entry] = {}
        for entry in entries:
            if entry.ref.artifact_id in digests and self._parts.is_live(entry):
                found.setdefault(entry.ref.artifact_id, entry)
        for digest in digests:
            if digest not in found:
                with contextlib.suppress(NotFound):  # a transcript may still refer to it
                    found[digest] = self.by_prefix(digest, True)
        refs = self.refs(found.values(), {entry.ref.artifact_id for entry in entries})
        return {ref.artifact_id: replace(found[ref.artifact_id], ref=ref) for ref in refs}

    def refs(self, entries: Collection[Entry], ids: Iterable[str] | None = None) -> list[Ref]:
        """Return the refs of entries as users see them, with pointers that are unique among these
        ids; by default among all that the session sees."""
        if ids is None:
            ids = self._parts.catalog.near(
                self._scope.lineage, {entry.ref.artifact_id for entry in entries}
            )
        near: dict[str, set[str]] = {}
        for one in ids:
            near.setdefault(one[:MIN_PREFIX], set()).add(one)
        ref_of = self._parts.ref_for_caller
        return [
            ref_of(entry, near.get(entry.ref.artifact_id[:MIN_PREFIX], ())) for entry in entries
        ]

    def is_alive(self, session_id: str) -> bool:
        info = self._parts.catalog.session(session_id)
        end = info.expires(self._parts.activity.last_uses.get(session_id, 0.0)) if info else None
        return not expiry.is_over(end, self._parts.clock())


@dataclass(slots=True)
class _Matches:
    """What a prefix matches: the nearest live ref of each artifact, by id, and the first ref that
    has expired."""

    live: dict[str, Entry] = field(default_factory=dict)
    dead: Entry | None = None


class _Listing:
    """The newest refs of artifacts of one kind, or of all kinds, at most `limit`, by artifact
    id."""

    def __init__(self, kind: str | None, limit: int | None) -> None:
        self._kind = kind
        self._limit = limit
        self._others: set[str] = set()  # artifacts whose newest ref is of another kind
        self.entries: dict[str, Entry] = {}

    @property
    def is_full(self) -> bool:
        return len(self.entries) == self._limit

    def add(self, refs: Iterable[Entry]) -> None:
        """Add refs, newest first, until the listing is full."""
        for entry in refs:
            if self.is_full:
                return
            digest = entry.ref.artifact_id
            newer = self.entries.get(digest)
            if newer is not None:
                self.entries[digest] = _named_like(entry, newer)
            elif self._kind not in (None, entry.ref.kind):
                self._others.add(digest)
            elif digest not in self._others:
                self.entries[digest] = entry


def _place(entry: Entry) -> tuple[str, int]:
    return entry.ref.session_id, entry.seq


def _named_like(older: Entry, newer: Entry) -> Entry:
    """Return the newer ref of an artifact, with the name of the older one of the same session if it
    has none."""
    if (
        newer.ref.name is not None
        or older.ref.name is None
        or newer.ref.session_id != older.ref.session_id
    ):
        return newer
    return replace(newer, ref=replace(newer.ref, name=older.ref.name))


def _gone(entry: Entry, asked: str) -> NotFound:
    ref = entry.ref
    try:
        created = datetime.fromtimestamp(ref.created, UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError, OSError):  # a damaged row may have anything here
        raise Damaged(f"the row of {clip(asked)} in the catalog is damaged") from None
    label = clip(ref.name) if ref.name else clip(ref.media_type)
    what = f"{clip(asked)} was {ref.kind} {label} of {ref.size_bytes} bytes, put {created}"
    if entry.gone == "damaged":
        return NotFound(
            f"{what}; its bytes were damaged and set aside",
            hint="put the same content again to restore it",
        )
    return Expired(f"{what}; it has expired")
