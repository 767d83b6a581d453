"""`CoreSession`: the storage verbs of a session, over the parts of one store.

Everything that works inside a session (reading, externalize, transcripts, context) takes one as its
first argument. Users get `coatcheck.Session`, a subclass that adds the verbs that look inside
artifacts.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from coatcheck import media
from coatcheck.agent_files import artifacts_of, remove_files, write_file
from coatcheck.checks import check_name, seconds, whole
from coatcheck.content import ArtifactStream, BlobReader, Content
from coatcheck.errors import Damaged, Fenced, InvalidArgument, InvalidPointer, NotFound, TooLarge
from coatcheck.ids import clip, is_pointer, parse_pointer
from coatcheck.intake import About, Onlooker, Parts, Scope, metadata_text
from coatcheck.refs import FENCED_SERIES, RECORD_LIMIT, Coverage, Ref
from coatcheck.storage import TRANSCRIPT, Claimant, Entry, Ranges, Record, SessionInfo, merged
from coatcheck.visible import Visible

if TYPE_CHECKING:
    from coatcheck.search import Hit
    from coatcheck.store import Store
    from coatcheck.values import Encoded

_MAX_LENDERS = 500  # transcripts that one search covers, those that were used last


class CoreSession(ABC):
    """The scope in which pointers and names resolve: artifacts that it put or was granted, and
    those of its ancestors.

    Created by `store.session(…)`. A session object is cheap, has no connection, and can be shared
    between threads."""

    __slots__ = ("_parts", "_scope", "_visible", "session_id", "store")

    def __init__(self, store: Store, parts: Parts, scope: Scope) -> None:
        self.store = store
        self._parts = parts
        self._scope = scope
        self._visible = Visible(parts, scope)
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
            entry, fragment = self._visible.resolve(target, content=True)
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
        entry, fragment = self._visible.resolve(target, content=True)
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
        entry, _ = self._visible.resolve(target, content=True)
        self._note(entry)
        return self._content(entry)

    def ref(self, target: Ref | str) -> Ref | None:
        """Return the current ref, or None if the artifact is not found."""
        try:
            entry, _ = self._visible.resolve(target)
        except NotFound:
            return None
        return self._visible.refs([entry])[0]

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

    def write_file(self, target: Ref | str, folder: str | Path) -> Path:
        """Write an artifact to a read-only file for an agent that reads files, and return its path.

        The file is named by the digest. It lives as long as the artifact: `forget`, `end` and
        `store.collect` remove it. The folder is private to this store, and git ignores it. Raises
        what `open` raises, and `InvalidArgument` for a folder with other files."""
        ref = self.content(target).ref
        return write_file(self._parts, ref, lambda: self.open(ref), folder)

    def note_shown(self, ref: Ref, ranges: Ranges) -> None:
        """Note that the session was shown these bytes of an artifact."""
        for start, end in ranges:
            self._parts.activity.show(self.session_id, ref.artifact_id, start, end)

    def coverage(self, target: Ref | str) -> Coverage:
        """Return which part of an artifact this session has been shown by `read`."""
        entry, _ = self._visible.resolve(target)
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
        alive = [each for each in self._scope.lineage if self._visible.is_alive(each)]
        own = parts.passages.count(alive, parts.clock()) if alive else 0
        total = own + sum(1 for _ in (self._visible.only_lent(lent) if own else lent))
        return total, self._search(words, limit, lent) if total and words.strip() else []

    def _follow(self) -> dict[str, Entry]:
        """Index what is new in the session, its ancestors, and the transcripts that lend it
        something. Return what they lend."""
        from coatcheck.search import follow

        parts = self._parts
        for session_id in self._scope.lineage:
            follow(parts.passages, parts.catalog, session_id, self._visible.live, self._content)
        lent = self._visible.lent()
        for session_id in _lenders(lent):
            transcript = self.store.session(session_id)
            follow(
                parts.passages,
                parts.catalog,
                session_id,
                transcript._visible.live,
                transcript._content,
            )
        return lent

    def _search(self, words: str, limit: int, lent: Mapping[str, Entry]) -> builtins.list[Hit]:
        from coatcheck.search import search

        hits = search(
            self._parts.passages,
            (*self._scope.lineage, *_lenders(lent)),
            words[:4000],
            limit=limit,
            live=self._visible.live,
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
        return self._visible.refs(self._visible.page(after, limit))

    def list(
        self, *, name: str | None = None, kind: str | None = None, limit: int | None = None
    ) -> builtins.list[Ref]:
        """List what this session sees, newest first, each artifact once under its newest name. With
        `name`, list every artifact that was put under that name."""
        if name is not None:
            return self._visible.refs(self._visible.named(name, kind, limit))
        return self._visible.listing(kind, limit)

    def names(self, *, prefix: str = "") -> builtins.list[str]:
        """Return the names that begin with `prefix` and resolve in this session, the most recent
        put first."""
        names = (entry.ref.name for entry in self._visible.seen())
        found = (name for name in names if name is not None and name.startswith(prefix))
        return builtins.list(dict.fromkeys(found))

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
            entry, _ = self._visible.resolve(target)
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
            entry, _ = self._visible.resolve(target)
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
        entry, _ = self._visible.resolve(target)
        if self._is_lent(entry) and pinned:
            self.grant(entry.ref, to=self.session_id)
            entry, _ = self._visible.resolve(entry.ref)
        if entry.ref.session_id != self.session_id:
            raise InvalidArgument(
                f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                hint="pin it there, or grant it first",
            )
        parts.catalog.pin(self.session_id, entry.ref.artifact_id, pinned)
        entry = replace(entry, ref=replace(entry.ref, pinned=pinned))
        return self._visible.refs([entry])[0]

    def annotate(self, target: Ref | str, summary: str) -> Ref:
        """Write a summary beside an artifact of this session, for example one that a model made
        later. It replaces the one that was detected or given at the put. Return the new ref."""
        from coatcheck.redaction import mask

        while True:
            entry, _ = self._visible.resolve(target)
            if entry.ref.session_id != self.session_id:
                raise InvalidArgument(
                    f"the artifact belongs to the session {clip(entry.ref.session_id)}",
                    hint="annotate it there",
                )
            About(summary=summary).check()
            entry = replace(entry, ref=replace(entry.ref, summary=mask(summary)), content=None)
            if self._parts.add(entry, reuse=True):
                return self._visible.refs([entry])[0]

    def forget(self, target: Ref | str) -> bool:
        """Drop an artifact from this session and return whether there was one. Its bytes are
        removed once no session refers to them.

        A name drops only what was put under that name: the artifact stays under its other names. A
        pointer or a `Ref` drops the artifact under all of its names."""
        parts, session_id = self._parts, self.session_id
        try:
            entry, _ = self._visible.resolve(target)
        except NotFound:
            return False
        digest = entry.ref.artifact_id
        name = entry.ref.name if entry.ref.name == target else None
        freed = parts.catalog.remove(session_id, digest, name=name)
        if name is None or not parts.catalog.find(session_id, prefix=digest, limit=1):
            parts.passages.leave(session_id, digest)
        for blob in freed.blobs:
            parts.blobs.remove(blob)
        remove_files(parts, [digest])
        return freed.refs > 0 or self._is_lent(entry)

    def end(self) -> int:
        """Forget everything in this session, and remove the files that `materialize` made. Return
        the number of artifacts removed: those that no other session refers to. Their files that
        `write_file` made are removed too."""
        parts = self._parts
        parts.files.remove(self.session_id)
        artifacts = artifacts_of(parts, self.session_id)
        freed = parts.catalog.remove(self.session_id, end=True)
        parts.passages.leave(self.session_id)
        for blob in freed.blobs:
            parts.blobs.remove(blob)
        parts.blobs.leftovers(remove=True)
        remove_files(parts, artifacts)
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
        now, _ = self._visible.resolve(entry.ref, content=True)
        if now.blob.place == entry.blob.place:
            raise _missing(entry)
        return now

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


def _check_record(series: str, body: bytes, keep: int | None) -> None:
    check_name(series, "series")
    if not isinstance(body, bytes):
        raise InvalidArgument(f"a record must be bytes, got a {type(body).__name__}")
    if len(body) > RECORD_LIMIT:
        text = f"a record must have at most {RECORD_LIMIT} bytes, got {len(body)}"
        raise TooLarge(text, hint="put it as an artifact")
    whole(keep, "keep", least=1, optional=True)


def _lenders(lent: Mapping[str, Entry]) -> builtins.list[str]:
    return list(
        islice(dict.fromkeys(entry.ref.session_id for entry in lent.values()), _MAX_LENDERS)
    )


def _missing(entry: Entry) -> NotFound:
    return NotFound(
        f"the bytes of {entry.ref.pointer} are missing from the store",
        hint="put the same content again",
    )
