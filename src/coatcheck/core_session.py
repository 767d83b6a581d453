"""`CoreSession`: the storage verbs of a session, over the parts of one store.

Everything that works inside a session (reading, externalize, transcripts, context) takes one as its
first argument. Users get `coatcheck.Session`, a subclass that adds the verbs that look inside
artifacts.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from coatcheck import media
from coatcheck.checks import check_name, seconds, whole
from coatcheck.content import ArtifactStream, BlobReader, Content
from coatcheck.errors import (
    AmbiguousPointer,
    Damaged,
    Expired,
    Fenced,
    InvalidArgument,
    InvalidPointer,
    NotFound,
    TooLarge,
)
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
from coatcheck.intake import About, Onlooker, Parts, Scope, metadata_text
from coatcheck.refs import FENCED_SERIES, RECORD_LIMIT, Coverage, Ref
from coatcheck.storage import (
    TRANSCRIPT,
    Claimant,
    Entry,
    Ranges,
    Record,
    SessionInfo,
    expiry,
    merged,
)

if TYPE_CHECKING:
    from coatcheck.search import Hit
    from coatcheck.store import Store
    from coatcheck.values import Encoded

_PAGE = 128  # refs in one query
_MAX_LENDERS = 500  # transcripts that one search covers, those that were used last


class CoreSession(ABC):
    """The scope in which pointers and names resolve: artifacts that it put or was granted, and
    those of its ancestors.

    Created by `store.session(…)`. A session object is cheap, has no connection, and can be shared
    between threads."""

    __slots__ = ("_parts", "_scope", "session_id", "store")

    def __init__(self, store: Store, parts: Parts, scope: Scope) -> None:
        self.store = store
        self._parts = parts
        self._scope = scope
        self.session_id = scope.info.session_id

    @property
    def parent(self) -> str | None:
        return self._scope.info.parent

    @property
    def ttl(self) -> float | None:
        return self._scope.info.ttl

    def __repr__(self) -> str:
        return f"Session({self.session_id!r} of {self.store!r})"

    def viewed(self) -> Self:
        """Return this session for a person who looks at it: reads do not count as use, nor as shown
        to a model."""
        return type(self)(
            self.store, self._parts._replace(activity=Onlooker(self._parts.activity)), self._scope
        )

    def put(
        self,
        value: object,
        *,
        name: str | None = None,
        tool: str | None = None,
        kind: str | None = None,
        media_type: str | None = None,
        summary: str | None = None,
        producer: str | None = None,
        call_id: str | None = None,
        parents: Iterable[Ref | str] = (),
        ttl: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Ref:
        """Store a value: text, bytes, a JSON value, a model or dataclass, a `Path`, or a binary
        stream.

        Media type, kind and summary are detected if they are not given. `ttl` limits the life of
        this artifact within that of the session. `metadata` is a small JSON object for the host's
        own use. Returns when the value is durable."""
        lineage: tuple[str, ...] = ()
        if parents != ():
            lineage = tuple(
                one.artifact_id if isinstance(one, Ref) else parse_pointer(one).prefix
                for one in parents
            )
        text = None if metadata is None else metadata_text(metadata)
        about = About(
            name, tool, kind, media_type, summary, producer, call_id, lineage, ttl, None, None, text
        )
        return self.put_about(value, about)

    def put_about(self, value: object, about: About) -> Ref:
        """Store a value, like `put`."""
        parts, scope = self._parts, self._scope
        ref = parts.put(scope, value, about)
        for ancestor in scope.shared_with:
            self.grant(ref, to=ancestor)
        copied = ref.artifact_id if ref.size_bytes > parts.catalog.inline_limit else None
        parts.activity.note(scope.lineage, parts.clock(), scope.info.ttl, copied)
        return ref

    def put_encoded(self, value: Encoded, about: About, also: Sequence[CoreSession] = ()) -> Ref:
        """Store a value that is already encoded, in the sessions of `also` too."""
        parts, scopes = self._parts, [each._scope for each in (self, *also)]
        ref = parts.put_encoded(scopes, value, about)
        for ancestor in self._scope.shared_with:
            self.grant(ref, to=ancestor)
        copied = ref.artifact_id if ref.size_bytes > parts.catalog.inline_limit else None
        for scope in scopes:
            parts.activity.note(scope.lineage, parts.clock(), scope.info.ttl, copied)
        return ref

    def get(self, target: Ref | str) -> Any:
        """Return the exact value of a ref, pointer or name, or None if it is missing, expired or
        not this session's.

        A pointer with a fragment (`art:…#/rows/0`) returns that part of a JSON value. That raises
        `LimitExceeded` if the whole value has more than 64 MiB or ten million values."""
        try:
            entry, fragment = self._resolve(target, content=True)
            if fragment:
                self._note(entry)
                part = self._part_or_error(self._content(entry), fragment)
                return None if isinstance(part, InvalidPointer) else json.loads(part)
            entry, data = self._bytes(entry)
        except NotFound:
            return None
        self._note(entry)
        from coatcheck.values import decode

        return decode(entry.ref.codec, data)

    def open(self, target: Ref | str) -> BinaryIO:
        """Open a seekable binary stream over the artifact's bytes, or over the JSON of the part
        that a fragment names.

        Raises `NotFound`, `Expired`, `InvalidPointer` if the fragment does not exist, and
        `LimitExceeded` if the artifact is too large for a fragment."""
        entry, fragment = self._resolve(target, content=True)
        self._note(entry)
        if fragment:
            return io.BytesIO(self.part(self._content(entry), fragment))
        if entry.blob.coding == "inline":
            return io.BytesIO(self._bytes(entry)[1])
        content = self._content(entry)
        content.read(0, 1)  # raises here if the bytes are gone
        return cast(BinaryIO, io.BufferedReader(ArtifactStream(content), 64 * 1024))

    def content(self, target: Ref | str) -> Content:
        """The bytes of an artifact, by range; a fragment is ignored. Either this call or the first
        read raises what `open` raises."""
        entry, _ = self._resolve(target, content=True)
        self._note(entry)
        return self._content(entry)

    def ref(self, target: Ref | str) -> Ref | None:
        """Return the current ref, or None if the artifact is not found."""
        try:
            entry, _ = self._resolve(target)
        except NotFound:
            return None
        return self._refs([entry])[0]

    def materialize(self, target: Ref | str, folder: str | Path) -> Path:
        """Write an artifact to a read-only file, for a tool that needs one: jq, a sandbox, a
        sub-process.

        `end()` removes the file, if it is called in the same process. Raises what `open` raises."""
        ref = self.content(target).ref
        is_part = isinstance(target, str) and is_pointer(target) and "#/" in target
        with self.open(target) as stream:
            return self._parts.files.write(
                stream, media.JSON if is_part else ref.media_type, self.session_id, folder
            )

    def note_shown(self, ref: Ref, ranges: Ranges) -> None:
        """Note that the session was shown these bytes of an artifact."""
        for start, end in ranges:
            self._parts.activity.show(self.session_id, ref.artifact_id, start, end)

    def coverage(self, target: Ref | str) -> Coverage:
        """Return which part of an artifact this session has been shown by `read`."""
        entry, _ = self._resolve(target)
        session_id, digest = self.session_id, entry.ref.artifact_id
        known = self._parts.catalog.shown(session_id, [digest]).get(digest, ())
        return Coverage(
            merged((*known, *self._parts.activity.shown(session_id, digest))), entry.ref.size_bytes
        )

    def shown_of(self, refs: Iterable[Ref]) -> set[str]:
        """Return the ids of those artifacts that this session has been shown at least a part of."""
        session_id, digests = self.session_id, [ref.artifact_id for ref in refs]
        recent = {digest for digest in digests if self._parts.activity.shown(session_id, digest)}
        return recent | set(self._parts.catalog.shown(session_id, digests))

    def search(self, words: str, *, limit: int = 8) -> builtins.list[Hit]:
        """Search names, tools, summaries and content for these words. Return the best artifacts,
        each with its best passage."""
        if not words.strip():
            raise InvalidArgument("the search words are empty")
        whole(limit, "limit", least=1)
        return self._search(words, limit, self._follow())

    def count(self) -> int:
        """Return the number of artifacts that this session sees. It comes from the search index, so
        only new artifacts cost time."""
        return self.survey("", 0)[0]

    def survey(self, words: str, limit: int) -> tuple[int, builtins.list[Hit]]:
        """Return what `count` and `search` return, with less work; no hits for empty words."""
        parts, lent = self._parts, self._follow()
        alive = [each for each in self._scope.lineage if self._is_alive(each)]
        own = parts.passages.count(alive, parts.clock()) if alive else 0
        total = own + sum(1 for _ in (self._only_lent(lent) if own else lent))
        return total, self._search(words, limit, lent) if total and words.strip() else []

    def _follow(self) -> dict[str, Entry]:
        """Index what is new in the session, its ancestors, and the transcripts that lend it
        something. Return what they lend."""
        from coatcheck.search import follow

        parts = self._parts
        for session_id in self._scope.lineage:
            follow(parts.passages, parts.catalog, session_id, self._live, self._content)
        lent = self._lent()
        for session_id in _lenders(lent):
            transcript = self.store.session(session_id)
            follow(parts.passages, parts.catalog, session_id, transcript._live, transcript._content)
        return lent

    def _search(self, words: str, limit: int, lent: Mapping[str, Entry]) -> builtins.list[Hit]:
        from coatcheck.search import search

        hits = search(
            self._parts.passages,
            (*self._scope.lineage, *_lenders(lent)),
            words[:4000],
            limit=limit,
            live=self._live,
            content=self._content,
        )
        if hits:
            self._used(None)
        return hits

    def version(self, ref: Ref) -> int:
        """Return the version number of a ref under its name, counted from 1. Expired versions count
        too."""
        if ref.name is None:
            return 1
        for session_id in self._scope.lineage:
            if found := self._parts.catalog.version(session_id, ref.name, ref.artifact_id):
                return found
        raise NotFound(f"no artifact {ref.pointer} found under the name {clip(ref.name)}")

    def artifacts(self, *, after: str | None = None, limit: int = 50) -> builtins.list[Ref]:
        """Return a page of what this session sees, each artifact once: own ones first, newest
        first, then those that only transcripts still have. `after` is the id of the last artifact
        of the previous page. A page costs the same wherever it begins. Raises `NotFound` for an
        unknown id."""
        lent = self._lent()
        last = None if after is None else self._nearest(prefix=after)
        is_over = last is not None and not self._parts.is_live(last)
        if after in lent and (last is None or is_over):
            ids = builtins.list(lent)
            return self._refs(self._of_lent(lent, ids[ids.index(after) + 1 :], limit))
        if after is not None and last is None:
            raise NotFound(
                f"no artifact found for {pointer_of(after, 64)!r}", hint="list from the beginning"
            )
        found: dict[str, Entry] = {}
        for entry in self._seen(after=last):
            if len(found) == limit:
                break
            digest = entry.ref.artifact_id
            # An artifact is listed where its nearest ref is, so that a page does not repeat those
            # before it.
            nearest = None if digest in found else self._nearest(prefix=digest)
            if nearest is not None and (nearest.ref.session_id, nearest.seq) == (
                entry.ref.session_id,
                entry.seq,
            ):
                found[digest] = nearest
        return self._refs([*found.values(), *self._of_lent(lent, lent, limit - len(found))])

    def list(
        self, *, name: str | None = None, kind: str | None = None, limit: int | None = None
    ) -> builtins.list[Ref]:
        """List what this session sees, newest first, each artifact once under its newest name. With
        `name`, list every artifact that was put under that name."""
        if name is not None:
            return self._refs(self._named(name, kind, limit))
        listing = _Listing(kind, limit)
        listing.add(self._seen())
        if listing.is_full:  # older refs, which may have a name, were not looked at
            return self._refs([self._with_newest_name(entry) for entry in listing.entries.values()])
        listing.add(self._lent().values())
        is_all = kind is None and limit is None
        return self._refs(listing.entries.values(), listing.entries if is_all else None)

    def _named(self, name: str, kind: str | None, limit: int | None) -> builtins.list[Entry]:
        """Return the refs under a name, newest first, of one kind if it is given."""
        if not is_encodable(name):
            return []
        found = (entry for entry in self._seen(name=name) if kind in (None, entry.ref.kind))
        return builtins.list(islice(found, limit))

    def _with_newest_name(self, entry: Entry) -> Entry:
        """Return a ref with the newest name that its session gives to the artifact, if it has none
        itself."""
        if entry.ref.name is None:
            for older in self._parts.catalog.refs(entry.ref.session_id, entry.ref.artifact_id):
                if self._parts.is_live(older):
                    entry = _named_like(older, entry)
        return entry

    def names(self, *, prefix: str = "") -> builtins.list[str]:
        """Return the names that begin with `prefix` and resolve in this session, the most recent
        put first."""
        found: dict[str, None] = {}
        for entry in self._seen():
            if entry.ref.name is not None and entry.ref.name.startswith(prefix):
                found[entry.ref.name] = None
        return [*found]

    def _seen(self, *, name: str | None = None, after: Entry | None = None) -> Iterator[Entry]:
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

    def claim(self, holder: str, *, idle: float = 0, instead_of: int | None = None) -> int:
        """Claim this session for a dispatcher and return a fencing token, larger than every earlier
        one. From then on, `record` with an earlier token raises `Fenced`.

        With `idle`, the claim raises `Fenced` if another holder has claimed or written within that
        many seconds; the same holder can claim again at any time. With `instead_of`, it raises
        `Fenced` unless that is still the newest token (0: no claim yet). An empty holder releases
        the claim. For the hot state, use `coatcheck.context.claim`."""
        if holder != "":
            check_name(holder, "holder")
        whole(instead_of, "instead_of", optional=True)
        seconds(idle, "idle")
        parts, info = self._parts, self._scope.info
        now = parts.clock()
        token = parts.catalog.claim(
            info, holder, at=now, idle=idle, instead_of=instead_of, grace=parts.limits.grace
        )
        parts.activity.note(self._scope.lineage, now, info.ttl)
        return token

    def claimant(self) -> Claimant | None:
        """Return the current claim of this session: token, holder, and the time of its last claim
        or record. None if it is unclaimed."""
        return self._parts.catalog.claimant(self.session_id)

    def record(
        self, series: str, body: bytes, *, token: int | None = None, keep: int | None = None
    ) -> int:
        """Append bytes (at most 1 MiB) to a series of this session, and return their number in the
        series.

        Raises `Fenced` and writes nothing if `token` does not belong to the newest claim. With
        `keep`, only that many of the newest records stay. Records end with the session. Returns
        when the record is durable."""
        _check_record(series, body, keep)
        whole(token, "token", least=1, optional=True)
        if token is None and series in FENCED_SERIES:
            raise Fenced(
                f"the series {series!r} only takes records under a claim",
                hint="claim the session first",
            )
        parts, info = self._parts, self._scope.info
        now = parts.clock()
        number = parts.catalog.record(
            info, series, body, at=now, token=token, keep=keep, grace=parts.limits.grace
        )
        parts.activity.note(self._scope.lineage, now, info.ttl)
        return number

    def record_all(self, records: Sequence[tuple[str, bytes, int | None]]) -> builtins.list[int]:
        """Append several records, each with its series and its `keep`, and return their numbers:
        all are written, or none."""
        for series, body, keep in records:
            _check_record(series, body, keep)
            if series in FENCED_SERIES:
                raise Fenced(
                    f"the series {series!r} only takes records under a claim",
                    hint="claim the session first",
                )
        if not records:
            return []
        parts, info = self._parts, self._scope.info
        now = parts.clock()
        numbers = parts.catalog.record_all(info, records, at=now, grace=parts.limits.grace)
        parts.activity.note(self._scope.lineage, now, info.ttl)
        return numbers

    def records(
        self,
        series: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        newest: bool = False,
    ) -> builtins.list[Record]:
        """Return the records of a series (number, time, token, body), oldest first, or with
        `newest` newest first.

        They can be read until the session ends, or is collected after it expired."""
        check_name(series, "series")
        whole(after, "after")
        whole(before, "before", optional=True)
        whole(limit, "limit", optional=True)
        return self._parts.catalog.records(
            self.session_id, series, after=after, before=before, limit=limit, newest=newest
        )

    def first_records(self, series: Collection[str]) -> dict[str, Record]:
        """Return the oldest record of each of these series that has one, with one query."""
        for one in series:
            check_name(one, "series")
        return self._parts.catalog.first_records(self.session_id, series)

    def grant(self, target: Ref | str, to: str) -> Ref:
        """Let another session see an artifact for as long as that session lives. Return the ref in
        that session."""
        check_name(to, "session id")
        parts = self._parts
        now = parts.clock()
        receiver = parts.catalog.session(to) or SessionInfo(to, None, parts.ttl, None, now, now)
        while True:
            entry, _ = self._resolve(target)
            granted = replace(
                entry.ref,
                session_id=to,
                created=now,
                expires=None,
                pinned=False,
                granted_by=self.session_id,
            )
            entry = replace(entry, ref=granted, session=receiver)
            if parts.add(replace(entry, content=None), reuse=True):
                return parts.ref_for_caller(entry, parts.catalog.near([to], [granted.artifact_id]))

    def lend(self, target: Ref | str, to: CoreSession) -> None:
        """Let a session read an artifact of this one, which belongs to a transcript, as long as the
        transcript has it. Raises `NotFound`."""
        parts = self._parts
        while True:
            entry, _ = self._resolve(target)
            ref = replace(entry.ref, created=parts.clock(), granted_by=to.session_id)
            if parts.add(replace(entry, ref=ref, content=None), reuse=True):
                return

    def lent(self) -> Iterator[Ref]:
        """The refs that transcripts lend to this session."""
        return (entry.ref for entry in self._parts.catalog.lent(self.session_id))

    def pin(self, target: Ref | str) -> Ref:
        """Keep an artifact regardless of its time to live."""
        return self._pin(target, True)

    def unpin(self, target: Ref | str) -> Ref:
        return self._pin(target, False)

    def _pin(self, target: Ref | str, pinned: bool) -> Ref:
        parts = self._parts
        entry, _ = self._resolve(target)
        if self._is_lent(entry) and pinned:
            self.grant(entry.ref, to=self.session_id)
            entry, _ = self._resolve(entry.ref)
        if entry.ref.session_id != self.session_id:
            raise InvalidArgument(
                f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                hint="pin it there, or grant it first",
            )
        parts.catalog.pin(self.session_id, entry.ref.artifact_id, pinned)
        entry = replace(entry, ref=replace(entry.ref, pinned=pinned))
        return self._refs([entry])[0]

    def annotate(self, target: Ref | str, summary: str) -> Ref:
        """Write a summary beside an artifact of this session, for example one that a model made
        later. It replaces the one that was detected or given at the put. Return the new ref."""
        from coatcheck.redaction import mask

        while True:
            entry, _ = self._resolve(target)
            if entry.ref.session_id != self.session_id:
                raise InvalidArgument(
                    f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                    hint="annotate it there",
                )
            About(summary=summary).check()
            entry = replace(entry, ref=replace(entry.ref, summary=mask(summary)), content=None)
            if self._parts.add(entry, reuse=True):
                return self._refs([entry])[0]

    def forget(self, target: Ref | str) -> bool:
        """Drop an artifact from this session and return whether there was one. Its bytes are
        removed once no session refers to them.

        A name drops only what was put under that name: the artifact stays under its other names. A
        pointer or a `Ref` drops the artifact under all of its names."""
        parts, session_id = self._parts, self.session_id
        try:
            entry, _ = self._resolve(target)
        except NotFound:
            return False
        digest = entry.ref.artifact_id
        name = entry.ref.name if entry.ref.name == target else None
        freed = parts.catalog.remove(session_id, digest, name=name)
        if name is None or not parts.catalog.find(session_id, prefix=digest, limit=1):
            parts.passages.leave(session_id, digest)
        for blob in freed.blobs:
            parts.blobs.remove(blob)
        return freed.refs > 0 or self._is_lent(entry)

    def end(self) -> int:
        """Forget everything in this session, and remove the files that `materialize` made. Return
        the number of artifacts removed: those that no other session refers to."""
        parts = self._parts
        parts.files.remove(self.session_id)
        freed = parts.catalog.remove(self.session_id, end=True)
        parts.passages.leave(self.session_id)
        for blob in freed.blobs:
            parts.blobs.remove(blob)
        parts.blobs.leftovers(remove=True)
        return freed.artifacts

    @abstractmethod
    def _part(self, content: Content, fragment: str) -> bytes:
        """Return the JSON of the part of a content that a fragment names. Raises `InvalidPointer`
        if it does not exist, `InvalidArgument` if the content is not JSON, and `LimitExceeded`
        beyond the limits of a JSONPath."""

    def part(self, content: Content, fragment: str) -> bytes:
        """Return the JSON of the part of a content that a fragment names. Raises `InvalidPointer`
        if there is none."""
        part = self._part_or_error(content, fragment)
        if isinstance(part, InvalidPointer):
            raise part
        return part

    def _part_or_error(self, content: Content, fragment: str) -> bytes | InvalidPointer:
        try:
            with content:
                return self._part(content, fragment)
        except InvalidPointer as error:
            return error
        except InvalidArgument as error:
            what = f"{content.ref.pointer}#{fragment}"
            raise InvalidPointer(
                f"{clip(what)} has a fragment, but the artifact is not JSON", hint=""
            ) from error

    def _resolve(self, target: Ref | str, *, content: bool = False) -> tuple[Entry, str]:
        """Return the live entry for a ref, pointer, id or name, and the fragment of the pointer.

        Every read goes through here. A digest is not a capability: an id that neither the session
        nor an ancestor has is answered exactly like one that does not exist. Raises `NotFound`,
        `Expired`, `AmbiguousPointer`, `InvalidPointer`."""
        if isinstance(target, Ref):
            entry = self._by_prefix(target.artifact_id, content)
            if entry.ref.codec != target.codec:
                entry = replace(entry, ref=replace(entry.ref, codec=target.codec))
            return entry, ""
        if not isinstance(target, str):
            raise InvalidArgument(
                f"cannot look up a {type(target).__name__}", hint="pass a pointer, a name or a Ref"
            )
        if target.startswith(SCHEME) and is_pointer(target):
            prefix, _, fragment = target[len(SCHEME) :].partition("#")
            return self._by_prefix(prefix, content), fragment
        named = (
            self._nearest(name=target, content=content, limit=1) if is_encodable(target) else None
        )
        if named is not None:
            if not self._parts.is_live(named):
                raise _gone(named, target)
            return named, ""
        if is_prefix(target):
            return self._by_prefix(target, content), ""
        if target.startswith(SCHEME):
            parse_pointer(target)  # raises
        raise NotFound(f"no artifact found for {clip(target)}")

    def _by_prefix(self, prefix: str, content: bool) -> Entry:
        """Return the live entry of the one artifact whose id begins with a prefix. Raises like
        `_resolve`."""
        found = self._matches(prefix, content)
        live = found.live
        if (
            not live or found.dead is not None
        ):  # a transcript may still refer to an expired artifact
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

    def _nearest(self, **which: Any) -> Entry | None:
        """Return the first ref that `find` finds in this session or its ancestors: a live one, if
        there is any."""
        dead: Entry | None = None
        for session_id in self._scope.lineage:
            for entry in self._parts.catalog.find(session_id, **which):
                if self._parts.is_live(entry):
                    return entry
                dead = dead or entry
        return dead

    def _lent(self) -> dict[str, Entry]:
        """The artifacts that transcripts lend to the sessions of a scope, by id, newest first."""
        found: dict[str, Entry] = {}
        for entry in (
            one
            for session_id in self._scope.lineage
            for one in self._parts.catalog.lent(session_id)
        ):
            found.setdefault(entry.ref.artifact_id, entry)
        return found

    def _only_lent(self, lent: Iterable[str]) -> Iterator[str]:
        """Yield the lent artifacts that no longer have a live ref in the scope."""
        ids = builtins.list(lent)
        for some in (ids[start : start + _PAGE] for start in range(0, len(ids), _PAGE)):
            found = self._parts.catalog.find_many(self._scope.lineage, some)
            held = {entry.ref.artifact_id for entry in found if self._parts.is_live(entry)}
            yield from (digest for digest in some if digest not in held)

    def _of_lent(
        self, lent: Mapping[str, Entry], ids: Iterable[str], limit: int
    ) -> builtins.list[Entry]:
        """Return the first of these lent artifacts that no longer have a live ref in the scope."""
        return [lent[digest] for digest in islice(self._only_lent(ids), max(0, limit))]

    def _live(self, digests: Collection[str]) -> dict[str, Entry]:
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
                    found[digest] = self._by_prefix(digest, True)
        refs = self._refs(found.values(), {entry.ref.artifact_id for entry in entries})
        return {ref.artifact_id: replace(found[ref.artifact_id], ref=ref) for ref in refs}

    def _refs(
        self, entries: Collection[Entry], ids: Iterable[str] | None = None
    ) -> builtins.list[Ref]:
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

    def _content(self, entry: Entry) -> Content:
        data = self._bytes(entry)[1] if entry.blob.coding == "inline" else None
        ref = entry.ref if entry.ref.content_uri else self._parts.ref_for_caller(entry)
        if data is not None:
            return Content(ref, b"", lambda offset, length: data[offset : offset + length])
        return Content(ref, entry.blob.frames, BlobReader(self._parts.blobs, entry, self._moved))

    def _bytes(self, entry: Entry) -> tuple[Entry, bytes]:
        """Return all bytes of an entry, checked against the digest."""
        data, blobs = entry.content, self._parts.blobs
        if data is None and entry.blob.coding == "inline":
            raise _missing(entry)
        if data is None:
            try:
                data = blobs.read(entry.blob, 0, entry.blob.size)
            except NotFound:
                entry = self._moved(entry)
                data = (
                    blobs.read(entry.blob, 0, entry.blob.size)
                    if entry.content is None
                    else entry.content
                )
        kept: object = (
            data  # a damaged row of SQLite may have text, or a number, in place of the bytes
        )
        if not isinstance(kept, bytes) or hashlib.sha256(kept).hexdigest() != entry.ref.artifact_id:
            raise Damaged(f"the bytes of {entry.ref.pointer} do not match their digest")
        return entry, data

    def _moved(self, entry: Entry) -> Entry:
        """Return the entry as the catalog has it now: its copy may have been compressed or repaired
        meanwhile."""
        now, _ = self._resolve(entry.ref, content=True)
        if now.blob.place == entry.blob.place:
            raise _missing(entry)
        return now

    def _is_alive(self, session_id: str) -> bool:
        info = self._parts.catalog.session(session_id)
        end = info.expires(self._parts.activity.last_uses.get(session_id, 0.0)) if info else None
        return not expiry.is_over(end, self._parts.clock())

    def _is_lent(self, entry: Entry) -> bool:
        """Whether this session has the artifact only because a transcript lends it."""
        return (
            entry.ref.session_id.startswith(TRANSCRIPT) and entry.ref.granted_by == self.session_id
        )

    def _note(self, entry: Entry) -> None:
        self._used(None if entry.blob.coding == "inline" else entry.ref.artifact_id)

    def _used(self, digest: str | None) -> None:
        """Note that the session was used now, and also a blob, if it has a copy of its own."""
        self._parts.activity.note(
            self._scope.lineage, self._parts.clock(), self._scope.info.ttl, digest
        )


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


def _check_record(series: str, body: bytes, keep: int | None) -> None:
    check_name(series, "series")
    if not isinstance(body, bytes):
        raise InvalidArgument(f"a record must be bytes, got a {type(body).__name__}")
    if len(body) > RECORD_LIMIT:
        text = f"a record must have at most {RECORD_LIMIT} bytes, got {len(body)}"
        raise TooLarge(text, hint="put it as an artifact")
    whole(keep, "keep", least=1, optional=True)


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


def _lenders(lent: Mapping[str, Entry]) -> builtins.list[str]:
    return list(
        islice(dict.fromkeys(entry.ref.session_id for entry in lent.values()), _MAX_LENDERS)
    )


def _missing(entry: Entry) -> NotFound:
    return NotFound(
        f"the bytes of {entry.ref.pointer} are missing from the store",
        hint="put the same content again",
    )


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
