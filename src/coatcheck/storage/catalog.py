"""The catalog protocol: sessions, refs, names, records and their upkeep, and the values that it
takes and returns.

A backend implements the eight methods of `Rows`. All others are written in terms of these: slow,
but correct for every backend. A backend overrides those that it can do faster. Methods that begin
with `_` run inside a change, except `_would_expire`, `_due`, `_unused` and `_granted`, which only
read.
"""

from __future__ import annotations

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from itertools import product
from math import inf
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeVar

import xxhash

from coatcheck.errors import Damaged, Fenced, QuotaExceeded, StoreError, StoreFull
from coatcheck.ids import MIN_PREFIX, clip, digest_of
from coatcheck.refs import Blob, Ref
from coatcheck.storage import expiry

Gone = Literal["expired", "damaged"]
Ranges = tuple[tuple[int, int], ...]
Effect = Literal["add", "free", "move", "note"]
TRANSCRIPT: Final = "transcript:"
"""Prefix of the ids of sessions that keep the payloads of transcripts."""
BATCH: Final = 500
"""Maximum number of rows that one change removes, if there is enough space."""
RECORDS: Final = ("record/", "record0")
"""The first and the last key of records; "0" follows "/"."""
_ASIDE: Final = ("aside/", "aside0")
_SHOWN: Final = ("shown/", "shown0")
_HEAD: Final = struct.Struct("<8sdQI")
"""The head of a record, after its checksum: the attempt that wrote it, when, the token of the claim
(0 if none), and the length of the series. The series and the body follow."""
_BODY: Final = 8 + _HEAD.size
_CLAIM: Final = struct.Struct("<Qd8s")
"""The token of a claim, its last use, and the attempt that made it; the holder follows."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as stored in the catalog. `ttl` and `quota` are None if they are unlimited."""

    session_id: str
    parent: str | None = None
    ttl: float | None = None
    quota: int | None = None
    created: float = 0.0
    used: float = 0.0
    used_bytes: int = 0

    def expires(self, used: float = 0.0) -> float | None:
        """Return when the session expires if it was last used at `used`, or later according to the
        catalog."""
        return expiry.session_end(self.ttl, max(used, self.used))


class SessionFilter(NamedTuple):
    """Which sessions a page has: those whose ids contain a text, and begin with none of the
    prefixes in `without`. With `roots`, those whose parent is not listed itself; with `parents`,
    the children of these; with `used_after`, those that were used after this time."""

    contains: str = ""
    without: tuple[str, ...] = ()
    roots: bool = False
    parents: tuple[str, ...] | None = None
    used_after: float | None = None

    def passes(self, info: SessionInfo, listed: Collection[str]) -> bool:
        """Whether a session passes. `listed` are the ids of all sessions with the prefix of the
        page."""
        return (
            self.contains in info.session_id
            and not info.session_id.startswith(self.without)
            and not (self.roots and info.parent in listed)
            and (self.parents is None or info.parent in self.parents)
            and (self.used_after is None or info.used > self.used_after)
        )


ANY_SESSION: Final = SessionFilter()


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalog: a ref, its blob, its session, and the content if the catalog keeps it.

    `ref.expires` is the artifact's own expiry; the store adds the session's. `gone` marks a
    tombstone: the row describes a former artifact, whose blob may no longer exist. `seq` orders the
    refs of a session.
    """

    ref: Ref
    blob: Blob
    session: SessionInfo
    content: bytes | None = None
    gone: Gone | None = None
    seq: int = 0


class Note(NamedTuple):
    """A value under a key that belongs to a session, or to the store if `owner` is empty. Keys are
    short and ASCII."""

    owner: str
    key: str
    value: bytes = b""


Row = SessionInfo | Entry | Blob | Note


class Known(NamedTuple):
    """What a put needs to know about a digest: the entries of its session that begin alike, with
    their inline content; the ids in all of the sessions asked about that begin alike; and the blob,
    if it was asked for and is stored."""

    entries: list[Entry]
    ids: Collection[str]
    blob: Blob | None = None


@dataclass(frozen=True, slots=True)
class Freed:
    """What a removal freed: counts of refs, artifacts and bytes, and the blobs that the blob store
    may now remove."""

    refs: int = 0
    artifacts: int = 0
    bytes: int = 0
    blobs: tuple[Blob, ...] = ()

    @classmethod
    def of(cls, refs: int, blobs: Collection[Blob]) -> Freed:
        outside = tuple(blob for blob in blobs if blob.coding != "inline")
        return cls(refs, len(blobs), sum(blob.size for blob in blobs), outside)

    def __add__(self, other: Freed) -> Freed:
        counts = self.refs + other.refs, self.artifacts + other.artifacts, self.bytes + other.bytes
        return Freed(*counts, self.blobs + other.blobs)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole catalog. `stored_bytes` counts each blob once, `referenced_bytes` each
    ref. `quarantined_bytes` is the size of the copies in quarantine, which the blob store
    counts."""

    sessions: int = 0
    refs: int = 0
    artifacts: int = 0
    tombstones: int = 0
    stored_bytes: int = 0
    referenced_bytes: int = 0
    quarantined_bytes: int = 0


class SetAside(NamedTuple):
    """A blob that a repair took out of use. Its copies are not swept before `until`, as long as
    there are tombstones (`refs`) that it could restore. `content` is the damaged content of a blob
    that was kept in the catalog."""

    blob: Blob
    until: float
    content: bytes | None = None
    refs: int = 0

    def note(self) -> Note:
        blob, content = self.blob, None if self.content is None else self.content.hex()
        fields = (blob.size, blob.coding, blob.place, blob.frames.hex(), self.until, content)
        return Note("", _ASIDE[0] + blob.digest, json.dumps(fields).encode())

    @classmethod
    def of(cls, note: Note) -> SetAside:
        size, coding, place, frames, until, content = json.loads(note.value)
        blob = Blob(note.key.removeprefix(_ASIDE[0]), size, coding, place, bytes.fromhex(frames))
        return cls(blob, until, None if content is None else bytes.fromhex(content))


class Limits(NamedTuple):
    """Limits that a put enforces: the store's quota in bytes, and the grace period after expiry in
    seconds."""

    store_quota: int | None = None
    grace: float = 0.0


class Claimant(NamedTuple):
    """The newest claim of a session, and when its holder last claimed or wrote. Only exactly this
    token is accepted."""

    token: int
    holder: str
    at: float = 0.0


class Record(NamedTuple):
    """One entry of a series that belongs to a session. `token` belongs to the claim it was written
    under, if any."""

    seq: int
    at: float
    token: int | None
    body: bytes


NO_LIMITS: Final = Limits()
NOTHING_SHOWN: Final[Mapping[tuple[str, str], Ranges]] = MappingProxyType({})


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


class Records(Rows):
    """Claims and records of sessions. A claim has a fencing token."""

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
        """Return a new fencing token for this session, larger than all earlier ones, even if the
        session was ended and opened again. Only this token is accepted from now on; an empty
        `holder` releases the claim. Creates the session if it is new, and marks it as used, like
        `put`. Raises `Fenced` and changes nothing if another holder used its claim less than `idle`
        seconds ago, or if `instead_of` is given and is not the newest token (0: unclaimed)."""
        session_id, attempt = session.session_id, os.urandom(8)

        def work() -> int:
            self._use(session, at, grace)
            newest, last_attempt = self._newest_claim(session_id)
            if last_attempt == attempt:
                return newest.token
            _check_token(instead_of, newest)
            if idle and newest.holder not in ("", holder) and at < newest.at + idle:
                unused = max(0.0, at - newest.at)
                raise Fenced(
                    f"{clip(newest.holder)} has claimed the session and used the claim "
                    f"{unused:.0f} s ago",
                    hint="wait until it is done or idle, or claim without `idle` to take over at "
                    "once",
                )
            token = self._next_token()
            self._save_claim(session_id, Claimant(token, holder, at), attempt)
            return token

        return self.change("claiming a session", work, session_id=session_id, effect="add")

    def claimant(self, session_id: str) -> Claimant | None:
        """Return the newest claim, or None if the session is unclaimed."""
        newest, _ = self._newest_claim(session_id)
        return newest if newest.holder else None

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
        """Append to a series of the session. Returns the record's number, counted from 1.

        Creates the session if it is new, and marks it as used, like `put`; if it expired longer ago
        than the grace period, its older records are deleted first. Raises `Fenced` and changes
        nothing if `token` does not belong to the session's newest claim; otherwise the claim counts
        as used. With `keep`, only that number of newest records is kept."""
        return self.record_all(session, [(series, body, keep)], at=at, token=token, grace=grace)[0]

    def record_all(
        self,
        session: SessionInfo,
        given: Sequence[tuple[str, bytes, int | None]],
        *,
        at: float,
        token: int | None = None,
        grace: float = 0.0,
    ) -> list[int]:
        """Append several records, all or none: `record` for each series, body and `keep`. Returns
        their numbers."""
        session_id, attempt = session.session_id, os.urandom(8)
        keys = [_series_key(series) for series, _, _ in given]

        def work() -> list[int]:
            self._use(session, at, grace)
            newest = self._newest_records(session_id, keys)
            last = {key: 0 if note is None else _seq(note) for key, note in newest.items()}
            if _is_written(
                newest.values(), attempt
            ):  # an earlier attempt succeeded, and only its answer was lost
                return _numbered(
                    keys, {key: number - keys.count(key) for key, number in last.items()}
                )
            if token is not None:
                self._use_claim(session_id, token, at)
            numbers = _numbered(keys, last)
            for (series, body, keep), key, number in zip(given, keys, numbers, strict=True):
                name = series.encode()
                value = _HEAD.pack(attempt, at, token or 0, len(name)) + name + body
                self.save(
                    Note(session_id, f"{key}{number:016x}", xxhash.xxh3_64_digest(value) + value)
                )
                self._drop_older_records(session_id, key, number, keep)
            return numbers

        return self.change("writing a record", work, session_id=session_id, effect="add")

    def _newest_records(self, session_id: str, keys: Iterable[str]) -> dict[str, Note | None]:
        """Return the newest record of each series, by the beginning of its keys."""
        newest: dict[str, Note | None] = {}
        for key in set(keys):
            found = self.notes(session_id, key, key + "g", limit=1, newest=True)
            newest[key] = found[0] if found else None
        return newest

    def _drop_older_records(self, session_id: str, key: str, newest: int, keep: int | None) -> None:
        """Drop all records of a series but the newest, as many as `keep` says; none if it is
        None."""
        if keep is not None:
            self._drop_notes(session_id, key, f"{key}{newest - keep + 1:016x}")

    def _use_claim(self, session_id: str, token: int, at: float) -> None:
        """Note that the claim of a session was used. Raises `Fenced` if the token is not that of
        the newest claim."""
        claim, attempt = self._newest_claim(session_id)
        _check_token(token, claim)
        self._save_claim(session_id, claim._replace(at=max(claim.at, at)), attempt)

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
        """Return records numbered between `after` and `before`, oldest first, or newest first with
        `newest`; at most `limit`. Records are kept until the session ends, or `expire` finds it
        expired. Raises `Damaged` if a body does not match its checksum."""
        key = _series_key(series)
        stop = key + "g" if before is None else f"{key}{before:016x}"
        found = self.notes(session_id, f"{key}{after + 1:016x}", stop, limit=limit, newest=newest)
        return [_record(one) for one in found]

    def first_records(self, session_id: str, series: Collection[str]) -> dict[str, Record]:
        """Return the oldest record of each of these series that has one. Raises `Damaged` like
        `records`."""
        names = {_series_key(one): one for one in series}
        return {
            names[note.key[:-16]]: _record(note)
            for note in self._first_notes(session_id, list(names))
        }

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        """Return the first note after each of these beginnings of keys, for an owner that is a
        session."""
        return [
            note for start in prefixes for note in self.notes(owner, start, start + "g", limit=1)
        ]

    def series(self, session_id: str) -> list[str]:
        """Return the names of this session's series that have records, sorted."""
        names, start = [], RECORDS[0]
        while found := self.notes(session_id, start, RECORDS[1], limit=1):
            value, body = found[0].value, _record(found[0]).body
            names.append(value[_BODY : len(value) - len(body)].decode())
            start = found[0].key.rpartition("/")[0] + "0"
        return sorted(names)

    def _next_token(self) -> int:
        """Return a number that is larger than all before, in the whole store."""
        token = 1 + int(self._note("", "fence") or 0)
        self.save(Note("", "fence", str(token).encode()))
        return token

    def _check_records(self, *, repair: bool) -> list[str]:
        """Return what is wrong with records and claims, and with `repair`, correct it."""
        damaged = [
            one._replace(value=b"")
            for one in self._every_note(*RECORDS)
            if not _is_sound(one.value)
        ]
        if damaged and repair:
            self.drop(*damaged)
        return (
            [f"{len(damaged)} damaged records" + (": removed" if repair else "")] if damaged else []
        )

    def _check_tokens(self, *, repair: bool) -> list[str]:
        last = max(
            (_claim(one.value)[0].token for one in self._every_note("claim", "claim ")), default=0
        )
        if last <= int(self._note("", "fence") or 0):
            return []
        if repair:
            self.save(Note("", "fence", str(last).encode()))
        return ["claims beyond the store's token counter" + (": set right" if repair else "")]

    def _every_note(self, start: str, stop: str) -> Iterator[Note]:
        """Yield the notes of all sessions between two keys."""
        for info in self.sessions():
            at = start
            while page := self.notes(info.session_id, at, stop, limit=64):
                yield from page
                at = page[-1].key + " "

    def _newest_claim(self, session_id: str) -> tuple[Claimant, bytes]:
        """Return the newest claim, and the attempt that made it."""
        found = self.notes(session_id, "claim", "claim ")
        return _claim(found[0].value) if found else (Claimant(0, ""), b"")

    def _save_claim(self, session_id: str, claim: Claimant, attempt: bytes) -> None:
        head = _CLAIM.pack(claim.token, claim.at, attempt)
        self.save(Note(session_id, "claim", head + claim.holder.encode()))


class Upkeep(Rows):
    """Expiry, repair and compression."""

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        """Turn every ref that had expired at `at` into a tombstone. Delete the records of sessions
        that had expired, tombstones and empty sessions that expired before `forget_before`, and
        unreferenced blobs."""
        if dry_run:
            return self._would_expire(at)

        def some(limit: int, _: object) -> tuple[Freed, bool | None]:
            dead = self._due(at)[:limit]
            return self._bury(dead, "expired"), bool(dead) or None

        freed = self._in_steps("expiring", some)
        self._in_steps("expiring", partial(self._forget_sessions, at, forget_before))
        self._drop_aside(at)
        return freed

    def _would_expire(self, at: float) -> Freed:
        """Return what `expire` would free."""
        dead = self._due(at)
        known = filter(None, map(self.blob, {one.ref.artifact_id for one in dead}))
        gone = [
            blob
            for blob in known
            if all(one.gone or one in dead for one in self.refs(digest=blob.digest))
        ]
        return Freed.of(len(dead), gone)

    def _due(self, at: float) -> list[Entry]:
        """Return live refs that had expired at `at`, at least some of them if there are any."""
        due = []
        for info in self.sessions():
            for one in self.refs(info.session_id):
                end = expiry.ref_end(info.expires(), one.ref.expires, pinned=one.ref.pinned)
                if not one.gone and expiry.is_over(end, at):
                    due.append(one)
        return due

    def _in_steps(
        self, doing: str, step: Callable[[int, Any], tuple[Freed, Any]], start: object = True
    ) -> Freed:
        """Remove rows in several changes. `step` removes at most the given number, beginning at a
        place, and returns the place where the next step begins, or None at the end. The changes
        become smaller if the space is too short for larger ones."""
        freed, limit, place = Freed(), BATCH, start
        while place is not None:
            try:
                some, place = self.change(doing, partial(step, limit, place), effect="free")
                freed += some
            except StoreFull:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
        return freed

    def _forget_sessions(
        self, at: float, before: float, limit: int, _: object
    ) -> tuple[Freed, bool | None]:
        """Drop records of sessions that had expired at `at`, and tombstones and rows of those that
        had at `before`."""
        for info in list(self.sessions()):
            end = info.expires()
            if end is None or not expiry.is_over(end, at):
                continue
            going: list[Row] = [*self.notes(info.session_id, *RECORDS, limit=limit)]
            if not going and end < before:
                refs = self.refs(info.session_id)
                going += [one for one in refs if one.gone][:limit]
                if len(going) == len(refs):
                    going.append(info)
            self.drop(*going)
            limit -= len(going)
            if limit <= 0:
                return Freed(), True
        return Freed(), None

    def _drop_aside(self, at: float) -> None:
        over = [one.note() for one in self.aside() if not one.refs or one.until <= at]
        if over:
            self.change("expiring", lambda: self.drop(*over), effect="free")

    def relocate(self, old: Blob, new: Blob) -> bool:
        """Switch to another copy of the same blob, if the catalog still references the old one."""

        def work() -> bool:
            known = self.blob(old.digest)
            if known is None or known.place != old.place:
                return False
            self.save(new)
            return True

        return self.change("moving a blob", work, effect="move")

    def doubtful_sizes(self) -> Mapping[str, Collection[int]]:
        """Return, by digest, the sizes of refs that differ from the size of their blob. A database
        that checks its own pages need not look."""
        return {}

    def set_size(self, digest: str, size: int) -> None:
        """Set the size of a blob and of its refs to the correct one."""

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        """Turn refs to a damaged or missing blob into tombstones, and set the blob `aside`. A later
        put of the same content restores the refs. Content in the catalog itself is checked again in
        the same transaction; if it is valid, nothing changes. Returns the number of refs."""

        def work() -> int:
            refs = [one for one in self.refs(digest=blob.digest) if not one.gone]
            known, content = next(iter(self.blobs(blob.digest)), (None, None))
            held = content if isinstance(content, bytes) else None
            if (
                known is None
                or known.place != blob.place
                or (held is not None and digest_of(held) == blob.digest)
            ):
                return 0  # another put has healed it in the meantime
            self.save(SetAside(blob, until, held).note())
            return self._bury(refs, "damaged").refs

        return self.change("setting a damaged blob aside", work, effect="free")

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        """Return the blobs set aside by `lose` and `check`, all or those of these digests. `expire`
        deletes entries past their `until`, and entries without tombstones, because their refs were
        restored or removed."""
        wanted = None if digests is None else set(digests)
        found = [SetAside.of(one) for one in self.notes("", *_ASIDE)]
        found = [one for one in found if wanted is None or one.blob.digest in wanted]
        return [one._replace(refs=len(self._damaged(one.blob.digest))) for one in found]

    def restore(self, blob: Blob) -> int:
        """Undo `lose` for a copy that turned out to be valid. Returns the number of restored refs;
        returns 0 and changes nothing if the catalog has another copy by now or no ref needs it."""

        def work() -> int:
            if not self._damaged(blob.digest) or self.blob(blob.digest) is not None:
                return 0
            self.save(blob)
            self.drop(SetAside(blob, 0.0).note())
            return self._revive(blob.digest)

        return self.change("restoring a blob", work, effect="move")

    def cold(self, before: float) -> Iterator[Blob]:
        """Yield uncompressed blobs outside the catalog that were last used before this time. A
        completed walk is remembered: its blobs are yielded again only after they were used
        again."""
        yield from self._unused(float(self._note("", "cold") or -inf), before)
        walked = Note("", "cold", repr(before).encode())
        self.change("noting what was compressed", lambda: self.save(walked), effect="free")

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        """Yield uncompressed blobs outside the catalog that were last used between these times."""
        return iter(
            [
                blob
                for blob, _ in self.blobs()
                if blob.coding == "raw" and after < blob.used <= until
            ]
        )

    def make_durable(self) -> None:
        """Make everything that reads can see survive a power cut, whatever the durability."""

    def compact(self) -> None:
        """Return free space to the file system, and overwrite removed content."""


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
            known = self.blob(
                digest
            )  # again: if the session had expired, the blob may have been dropped
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


def newest_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """Return the longest-lived entry of each artifact, the first one if several are equal, in their
    original order."""
    best: dict[str, Entry] = {}
    for entry in entries:
        known = best.get(entry.ref.artifact_id)
        if known is None or _end(known) < _end(entry):
            best[entry.ref.artifact_id] = entry
    return list(best.values())


def newest_in_each(sessions: Iterable[str], entries: Iterable[Entry]) -> list[Entry]:
    """Return `newest_of_each` for each of these sessions, one after the other."""
    found: dict[str, list[Entry]] = {session_id: [] for session_id in sessions}
    for entry in entries:
        found[entry.ref.session_id].append(entry)
    return [entry for each in found.values() for entry in newest_of_each(each)]


def _end(entry: Entry) -> float:
    if entry.gone:
        return -inf
    return inf if entry.ref.pinned or entry.ref.expires is None else entry.ref.expires


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges that touch or overlap, and sort them."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return tuple(found)


def _check_token(token: int | None, newest: Claimant) -> None:
    """Raise `Fenced` if a token is given that is not the newest."""
    if token is not None and token != newest.token:
        now = (
            f"{clip(newest.holder)} has it with token {newest.token}"
            if newest.holder
            else "the session is unclaimed"
        )
        raise Fenced(f"token {token} is not that of the session's newest claim: {now}")


def _series_key(series: str) -> str:
    """Return the beginning of the keys of a series. The number of a record follows, as 16 hex
    digits."""
    return f"{RECORDS[0]}{digest_of(series.encode())[:32]}/"


def _claim(value: bytes) -> tuple[Claimant, bytes]:
    token, at, attempt = _CLAIM.unpack_from(value)
    return Claimant(token, value[_CLAIM.size :].decode(), at), attempt


def _is_written(newest: Iterable[Note | None], attempt: bytes) -> bool:
    """Return whether this attempt wrote one of these records."""
    return any(note is not None and note.value[8:16] == attempt for note in newest)


def _numbered(keys: Iterable[str], last: Mapping[str, int]) -> list[int]:
    """Return the numbers of new records of these series, given the last number of each."""
    counts = dict(last)
    numbers = []
    for key in keys:
        counts[key] += 1
        numbers.append(counts[key])
    return numbers


def _seq(note: Note) -> int:
    return int(note.key[-16:], 16)


def _is_sound(value: bytes) -> bool:
    return value[:8] == xxhash.xxh3_64_digest(value[8:])


def _record(note: Note) -> Record:
    value = note.value
    if xxhash.xxh3_64_digest(value[8:]) != value[:8]:
        raise Damaged(
            f"record {_seq(note)} of a series is damaged",
            hint="'coatcheck verify --repair' removes it",
        )
    _, at, token, length = _HEAD.unpack_from(value, 8)
    return Record(int(note.key[-16:], 16), at, token or None, value[_BODY + length :])


class InList:
    """The parameters of SQLite's `IN (…)`: their SQL, and their values by name. (A text with a null
    character is not safe in SQLite's JSON.)"""

    def __init__(self, name: str, texts: Iterable[str]) -> None:
        self.values = {f"{name}_{number}": text for number, text in enumerate(texts)}
        self.sql = ", ".join(f":{name}" for name in self.values)


# Rows of the two databases


def entry_from(row: Mapping[str, Any]) -> Entry:
    """Return the entry of a row of the view `entry`."""
    artifact_id = row["digest"].hex()
    ref = Ref(
        artifact_id=artifact_id,
        session_id=row["session_id"],
        size_bytes=row["size"],
        media_type=row["media_type"],
        kind=row["kind"],
        codec=row["codec"],
        name=row["name"],
        tool=row["tool"],
        call_id=row["call_id"],
        producer=row["producer"],
        parents=tuple(json.loads(row["parents"])) if row["parents"] else (),
        summary=row["summary"],
        created=row["created"],
        expires=row["expires"],
        pinned=bool(row["pinned"]),
        granted_by=row["granted_by"],
        request=row["request"],
        metadata_json=row["metadata_json"],
    )
    blob = Blob(
        artifact_id,
        row["size"],
        row["coding"] or "inline",
        row["place"] or "",
        row["frames"] or b"",
    )
    session = SessionInfo(
        session_id=row["session_id"],
        parent=row["parent"],
        ttl=row["ttl"],
        quota=row["quota"],
        created=row["session_created"],
        used=row["used"],
        used_bytes=row["used_bytes"],
    )
    return Entry(ref, blob, session, content=row.get("content"), gone=row["gone"], seq=row["seq"])


def ref_values(ref: Ref) -> dict[str, Any]:
    """Return the columns of a ref in the table `ref`, by name."""
    return {
        "digest": bytes.fromhex(ref.artifact_id),
        "size": ref.size_bytes,
        "name": ref.name,
        "codec": ref.codec,
        "media_type": ref.media_type,
        "kind": ref.kind,
        "tool": ref.tool,
        "call_id": ref.call_id,
        "producer": ref.producer,
        "parents": json.dumps(ref.parents) if ref.parents else "",
        "summary": ref.summary,
        "created": ref.created,
        "expires": ref.expires,
        "pinned": ref.pinned,
        "granted_by": ref.granted_by,
        "request": ref.request,
        "metadata_json": ref.metadata_json,
    }


def session_from(row: Any) -> SessionInfo:
    """Return the session of a row of the table `session`."""
    return SessionInfo(
        session_id=row["session_id"],
        parent=row["parent"],
        ttl=row["ttl"],
        quota=row["quota"],
        created=row["created"],
        used=row["used"],
        used_bytes=row["used_bytes"],
    )


def blob_from(row: Any) -> Blob:
    """Return the blob of a row of the table `blob`."""
    return Blob(
        row["digest"].hex(), row["size"], row["coding"], row["place"], row["frames"], row["used"]
    )
