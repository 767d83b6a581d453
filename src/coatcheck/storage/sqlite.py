"""The embedded catalog: its SQLite queries, and the writes of a put. See `database` for locking and durability."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from coatcheck.errors import Damaged, NotFound, StoreClosed, StoreError, StoreFull, storage_error
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob
from coatcheck.storage import (
    _NO_LIMITS,
    _NOTHING,
    TRANSCRIPT,
    Claimant,
    Entry,
    Freed,
    Limits,
    Ranges,
    Record,
    SessionInfo,
    SetAside,
    Totals,
    newest_of_each,
    records,
    rows,
)
from coatcheck.storage.changes import ASIDE, BATCH, TOMBSTONES
from coatcheck.storage.database import Database
from coatcheck.storage.disk import Disk
from coatcheck.storage.journal import Mark
from coatcheck.storage.rows import BRIEF, COLUMNS, EXPIRES, GONE, WIDTH, brief_entry_of, entry_of

INLINE_LIMIT = 128 * 1024
_LAST = (1 << 63) - 1
_PAGES = 64  # pages returned to the file system in one step of compacting
_FROM = "FROM session s JOIN ref r ON r.session_key = s.session_key LEFT JOIN blob b ON b.blob_key = r.blob_key"
# By default SQLite scans all refs of a session in the order of their seq, so the index must be named.
_FROM_DIGEST = _FROM.replace("ref r", "ref r INDEXED BY ref_by_digest")
_FROM_WANTED = _FROM_DIGEST.replace("FROM", "FROM wanted CROSS JOIN")
_FROM_NAME = _FROM.replace("ref r", "ref r INDEXED BY ref_by_name")
_FROM_GRANT = _FROM.replace("ref r", "ref r INDEXED BY ref_by_grant")
_BY_PREFIX = f"""SELECT {{columns}}, {{content}}, (SELECT o.digest FROM ref o WHERE o.session_key = r.session_key
    AND o.digest >= ? AND o.digest < r.digest LIMIT 1) {_FROM} LEFT JOIN content c ON c.blob_key = b.blob_key
    WHERE s.session_id = ? AND r.digest >= ? AND r.digest <= ? ORDER BY r.digest DESC, r.seq DESC LIMIT 1"""
_NEWEST = {
    True: _BY_PREFIX.format(columns=COLUMNS, content="c.data"),
    False: _BY_PREFIX.format(columns=COLUMNS, content="NULL"),
}
_ANY_BLOB = "SELECT 1 FROM blob WHERE digest >= ? AND digest <= ? LIMIT 1"
_NEWEST_BRIEF = _BY_PREFIX.format(columns=BRIEF, content="c.data")


class SqliteCatalog(Database):
    """Sessions, refs and small blobs in one SQLite file."""

    inline_limit = INLINE_LIMIT
    is_far = False

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        super().__init__(root, folder, disk)
        self._batch = threading.local()
        self.sync_copy: Callable[[Blob], None] = lambda blob: None  # called before a ref to an existing copy is added

    # Reading

    def behind(self) -> bool:
        if self._closed:
            raise StoreClosed("the store is closed")
        return self._is_forked or self._journal.grown() or (self._disk.durable and not self._journal.is_synced())

    def session(self, session_id: str) -> SessionInfo | None:
        found = self._query(
            "SELECT session_id, parent, ttl, quota, created_at, used_at, used_bytes FROM session WHERE session_id = ?",
            (session_id,),
        )
        return SessionInfo(*found[0]) if found else None

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
        values: tuple[Any, ...] = ()
        source, where = _FROM, ""
        pending: list[Entry] = []
        if prefix is not None:
            low, high = prefix_range(prefix)
            if brief and content and settled:
                (row,) = self._query(_NEWEST_BRIEF, (low, session_id, low, high)) or (None,)
                if row is None:
                    return []
                if row[13] is None and row[5] is None and row[3] is None:
                    return [brief_entry_of(row)]
            pending = [] if settled else self._put_lately(session_id, prefix)
            # Most puts are of new content: a look at the blobs shows that in a third of the time of the full query.
            if not settled and not self._query(_ANY_BLOB, (low, high), settled=False):
                return newest_of_each(pending)
            found = self._query(_NEWEST[content], (low, session_id, low, high), settled=settled)
            if not found:
                return newest_of_each(pending)
            if found[0][WIDTH + 1] is None and found[0][GONE] is None and found[0][EXPIRES] is None:
                return newest_of_each([*pending, entry_of(found[0], found[0][WIDTH])])
            source, where, values = _FROM_DIGEST, " AND r.digest BETWEEN ? AND ?", (low, high)
        elif name is not None:
            source, where, values = _FROM_NAME, " AND r.name = ?", (name,)
        elif before is not None:
            where, values = " AND r.seq < ?", (before,)
        entries = [
            entry_of(row, row[WIDTH])
            for row in self._query(
                f"SELECT {COLUMNS}, {'c.data' if content else 'NULL'} {source}"
                f" {'LEFT JOIN content c ON c.blob_key = b.blob_key' if content else ''}"
                f" WHERE s.session_id = ?{where} ORDER BY r.seq DESC LIMIT ?",
                (session_id, *values, -1 if limit is None else limit),
                settled=settled,
            )
        ]
        return entries if prefix is None else newest_of_each([*pending, *entries])

    def find_many(self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False) -> list[Entry]:
        lineage, ranges = list(sessions), [prefix_range(prefix) for prefix in prefixes]
        if not ranges:
            return []
        rows = self._query(
            f"WITH wanted(low, high) AS (VALUES {', '.join(['(?, ?)'] * len(ranges))})"
            f" SELECT {COLUMNS}, {'c.data' if content else 'NULL'} {_FROM_WANTED}"
            f" {'LEFT JOIN content c ON c.blob_key = b.blob_key' if content else ''}"
            f" WHERE s.session_id IN ({', '.join('?' * len(lineage))}) AND r.digest BETWEEN wanted.low AND wanted.high"
            " ORDER BY r.seq DESC",
            (*(bound for pair in ranges for bound in pair), *lineage),
        )
        found: dict[str, list[Entry]] = {session_id: [] for session_id in lineage}
        for row in rows:
            entry = entry_of(row, row[WIDTH])
            found[entry.ref.session_id].append(entry)
        return [entry for each in found.values() for entry in newest_of_each(each)]

    def lent(self, session_id: str, *, prefix: str | None = None, content: bool = False) -> list[Entry]:
        low, high = prefix_range(prefix or "")
        rows = self._query(
            f"SELECT {COLUMNS}, {'c.data' if content else 'NULL'} {_FROM_GRANT}"
            f" {'LEFT JOIN content c ON c.blob_key = b.blob_key' if content else ''}"
            " WHERE r.granted_by = ? AND r.digest BETWEEN ? AND ? AND r.gone IS NULL"
            " AND substr(s.session_id, 1, ?) = ? ORDER BY r.created_at DESC, r.seq DESC",
            (session_id, low, high, len(TRANSCRIPT), TRANSCRIPT),
        )
        found = [entry_of(row, row[WIDTH]) for row in rows]
        return found if prefix is None else newest_of_each(found)

    def near(self, sessions: Iterable[str], digests: Iterable[str], *, settled: bool = True) -> set[str]:
        starts, lineage = {digest[:MIN_PREFIX] for digest in digests}, list(sessions)
        if settled:
            return {entry.ref.artifact_id for entry in self.find_many(lineage, starts)}
        return {
            entry.ref.artifact_id
            for session_id in lineage
            for start in starts
            for entry in self.find(session_id, prefix=start, settled=settled)
        }

    def version(self, session_id: str, name: str, digest: str) -> int:
        (count,) = self._query(
            "SELECT count(*) FROM session s JOIN ref r INDEXED BY ref_by_name ON r.session_key = s.session_key"
            " WHERE s.session_id = ? AND r.name = ? AND r.seq <= (SELECT max(o.seq) FROM ref o INDEXED BY"
            " ref_by_digest WHERE o.session_key = s.session_key AND o.digest = ? AND o.name = ?)",
            (session_id, name, bytes.fromhex(digest), name),
        )[0]
        return int(count)

    def _put_lately(self, session_id: str, prefix: str) -> list[Entry]:
        """Return refs that this process put since it last applied the journal, newest first."""
        near = self._pending.get(prefix[:MIN_PREFIX], ())
        return [e for e in reversed(near) if e.ref.session_id == session_id and e.ref.artifact_id.startswith(prefix)]

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        recent = None if settled else self._recent.get(digest)
        if recent is not None:
            return recent
        found = self._query(
            "SELECT size, coding, place, frames, used_at FROM blob WHERE digest = ?",
            (bytes.fromhex(digest),),
            settled=settled,
        )
        return Blob(digest, *found[0]) if found else None

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        wanted = [bytes.fromhex(digest) for digest in digests]
        marks = ",".join("?" * len(wanted))
        found = self._query(f"SELECT digest, place FROM blob WHERE digest IN ({marks})", tuple(wanted))
        return {digest.hex(): place for digest, place in found}

    def secret(self) -> bytes:
        return bytes(self._query("SELECT value FROM meta WHERE key = 'secret'")[0][0])

    def shown(self, session_id: str, digests: Iterable[str]) -> dict[str, Ranges]:
        wanted = [bytes.fromhex(digest) for digest in digests]
        found: dict[str, Ranges] = {}
        for digest, start, end in self._query(
            f"SELECT digest, start, end FROM shown WHERE digest IN ({', '.join('?' * len(wanted))}) AND session_key ="
            " (SELECT session_key FROM session WHERE session_id = ?) ORDER BY start",
            (*wanted, session_id),
        ):
            found[digest.hex()] = (*found.get(digest.hex(), ()), (start, end))
        return found

    def claimant(self, session_id: str) -> Claimant | None:
        found = self._query(records.CLAIMANT, (session_id,))
        return Claimant(*found[0]) if found and found[0][1] else None

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
        found = self._query(
            records.NEWEST_FIRST if newest else records.OLDEST_FIRST,
            (session_id, series, after, _LAST if before is None else before, -1 if limit is None else limit),
        )
        return [records.record_of(row, series) for row in found]

    def series(self, session_id: str) -> list[str]:
        return [series for (series,) in self._query(records.SERIES, (session_id,))]

    def sessions(self) -> Iterator[SessionInfo]:
        for row in self._pages(
            "session", "session_key", "session_id, parent, ttl, quota, created_at, used_at, used_bytes"
        ):
            if isinstance(row[0], str):  # otherwise the session has ended
                yield SessionInfo(*row)

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        if digest is None:
            keys = self._pages("blob", "blob_key", "blob_key")
        else:
            keys = iter(self._query("SELECT blob_key FROM blob WHERE digest = ?", (bytes.fromhex(digest),)))
        columns = "b.digest, b.size, b.coding, b.place, b.frames, b.used_at"
        for key in keys:
            # Read row and content in one statement: keys are reused, so the content may be another blob's by then.
            try:
                found = self._query(
                    f"SELECT {columns}, c.data FROM blob b LEFT JOIN content c ON c.blob_key = b.blob_key"
                    " AND b.coding = 'inline' WHERE b.blob_key = ?",
                    key,
                )
            except StoreError as error:
                rows_alone = self._query(f"SELECT {columns} FROM blob b WHERE b.blob_key = ?", key)
                found = [(*row, error) for row in rows_alone]
            for digest_now, *rest, content in found:
                if content is not None and not isinstance(content, (bytes, StoreError)):
                    content = Damaged("the content has a wrong type")
                yield Blob(digest_now.hex(), *rest), content

    def cold(self, before: float) -> Iterator[Blob]:
        known = self._query("SELECT value FROM meta WHERE key = 'cold'")
        after, last = known[0][0] if known else -inf, -1
        while page := self._query(
            "SELECT digest, size, coding, place, frames, used_at, blob_key FROM blob WHERE blob_key > ?"
            " AND coding = 'raw' AND used_at > ? AND used_at <= ? ORDER BY blob_key LIMIT 64",
            (last, after, before),
        ):
            for digest, *rest, key in page:
                yield Blob(digest.hex(), *rest)
                last = key
        self._change("recording the compressed blobs", lambda: self._changes.note_cold(before))

    def totals(self) -> Totals:
        row = self._query(
            """SELECT (SELECT count(*) FROM session WHERE session_id < x''),
            (SELECT count(*) FROM ref WHERE gone IS NULL), (SELECT count(*) FROM blob),
            (SELECT count(*) FROM ref WHERE gone IS NOT NULL), (SELECT coalesce(sum(size), 0) FROM blob),
            (SELECT coalesce(sum(size), 0) FROM ref WHERE gone IS NULL)"""
        )[0]
        return Totals(*row)

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}#blob={blob.digest}"

    # Writing

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        guarded = limits.store_quota is not None or entry.session.quota is not None
        record = rows.pack(entry, heal=heal, grace=limits.grace)
        self._check_writable("putting an artifact")
        if reuse and entry.blob.coding != "inline":
            with contextlib.suppress(NotFound):  # removed or moved: `has_copy` checks its row below
                self.sync_copy(entry.blob)

        def append() -> Mark | None:
            self._journal.refresh()
            if self._journal.strained:
                self._reserve.fill(self._journal)
            # Before the record is appended: a failure here must not fail a put that is already visible.
            if self._journal.end > self._reserve.journal_limit or self._journal.is_unsound:
                self._catch_up()
                self._settle()
            if guarded or reuse:
                self._catch_up()
                if reuse and not self._changes.has_copy(entry.blob):
                    return None
                if guarded:
                    self._changes.check_quota(entry, limits)
            mark = self._journal.append(record)
            if entry.content is None:
                self._recent[entry.blob.digest] = entry.blob
            self._pending.setdefault(entry.ref.artifact_id[:MIN_PREFIX], []).append(entry)
            return mark

        mark = self._exclusive("putting an artifact", append)
        if mark is None:
            return False
        if getattr(self._batch, "is_open", False):
            self._batch.mark = mark
        else:
            self._sync_journal(mark)
        return True

    def put_new(self, entry: Entry, *, limits: Limits = _NO_LIMITS) -> set[str] | None:
        return None

    @contextmanager
    def batch(self) -> Iterator[None]:
        if getattr(self._batch, "is_open", False):
            yield  # the outer batch acknowledges
            return
        self._batch.is_open, self._batch.mark = True, None
        try:
            yield
        finally:
            self._batch.is_open = False
        if self._batch.mark is not None:
            self._sync_journal(self._batch.mark)

    def _sync_journal(self, mark: Mark) -> None:
        try:
            self._journal.sync(mark)
        except OSError as error:
            raise storage_error(error, "syncing the journal") from error

    def open_session(self, info: SessionInfo) -> None:
        self._change("opening a session", lambda: self._changes.open_session(info))

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        self._change("recording use", lambda: self._changes.touch(sessions, blobs, shown), durable=False)

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
        return self._change(
            "claiming a session",
            lambda: self._records.claim(session, holder, at, idle, instead_of, grace),
            adding=True,
        )

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
        return self._change(
            "writing a record",
            lambda: self._records.add(session, series, body, at, token, keep, grace),
            adding=True,
        )

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        return self._change("pinning", lambda: self._changes.pin(session_id, digest, pinned))

    def remove(
        self, session_id: str, digest: str | None = None, *, name: str | None = None, end: bool = False
    ) -> Freed:
        def remove() -> Freed | None:
            limit = self._reserve.batch[0] if self._journal.strained else BATCH
            if end and digest is None and not self._changes.is_within(session_id, limit):
                return None
            return self._changes.remove(session_id, digest, name=name, end=end)

        def unname() -> None:
            self._changes.unname(session_id)

        freed = None
        with contextlib.suppress(StoreFull) if end else contextlib.nullcontext():
            freed = self._change("forgetting", remove, freeing=True)
        if freed is None:
            self._change("forgetting", unname, freeing=True)
            freed = self._free_in_steps("forgetting", self._changes.end_some)
        return self._made_durable(freed)

    def _free_in_steps(self, doing: str, step: Callable[[int], tuple[Freed, bool]]) -> Freed:
        """Free refs in several transactions, each with a limit on their number; smaller ones if the disk is full."""
        freed, limit, is_open = Freed(), BATCH, True

        def free() -> tuple[Freed, bool]:
            return step(min(limit, self._reserve.batch[0]) if self._journal.strained else limit)

        while is_open:
            try:
                some, is_open = self._change(doing, free, freeing=True)
                freed += some
            except StoreFull:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
        return freed

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        def would_expire() -> Freed:
            self._refresh_and_catch_up()
            return self._changes.would_expire(at)

        if dry_run:
            return self._exclusive("looking for expired refs", would_expire)

        def expire_some(limit: int) -> tuple[Freed, bool]:
            batch, records_dropped = self._changes.expire(at, limit), self._records.expire(at)
            return batch, bool(batch.refs or records_dropped)

        freed = self._free_in_steps("forgetting", self._changes.end_some)  # sessions whose end a crash interrupted
        freed += self._free_in_steps("expiring", expire_some)
        self._free_in_steps("expiring", lambda limit: (Freed(), self._changes.drop_tombstones(forget_before, limit)))
        self._change("expiring", lambda: self._changes.drop_aside(at), freeing=True)
        return self._made_durable(freed)

    def relocate(self, old: Blob, new: Blob) -> bool:
        return self._change("moving a blob", lambda: self._changes.relocate(old, new), always=True)

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        return self._change("setting a damaged blob aside", lambda: self._changes.lose(blob, until), freeing=True)

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        if digests is None:
            found = self._query("SELECT key, value FROM meta WHERE key >= ? AND key < ?", (ASIDE, ASIDE + "g"))
        else:
            wanted = tuple(ASIDE + digest for digest in digests)
            found = self._query(f"SELECT key, value FROM meta WHERE key IN ({','.join('?' * len(wanted))})", wanted)
        aside = []
        for key, packed in found:
            digest = key.removeprefix(ASIDE)
            ((refs,),) = self._query(TOMBSTONES, (bytes.fromhex(digest),))
            aside.append(SetAside.unpack(digest, packed, refs))
        return aside

    def restore(self, blob: Blob) -> int:
        return self._change("restoring a blob", lambda: self._changes.restore(blob), always=True)

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        def check() -> list[str]:
            return [
                *self._check_losses(repair=repair),
                *self._changes.check(repair=repair, until=until),
                *self._records.check(repair=repair),
            ]

        change = self._exclusive if self.is_read_only and not repair else self._change
        return change("checking the catalog", check)

    def compact(self) -> None:
        self._check_writable("compacting the catalog")
        self._exclusive("compacting the catalog", self._compact)

    def _compact(self) -> None:
        self._refresh_and_catch_up()
        with self._roomy():
            before, free = -1, self._free_pages()
            while free and free != before:
                self._writer.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` would free only one page
                self._bound_wal()
                before, free = free, self._free_pages()
            self._settle(truncate=True)

    def _free_pages(self) -> int:
        return int(self._writer.execute("PRAGMA freelist_count").fetchone()[0])

    def _made_durable(self, freed: Freed) -> Freed:
        """Sync a removal, whatever the durability: a power cut must not restore rows whose files are deleted."""
        if freed.blobs and not self._disk.durable:
            self._exclusive("forgetting", lambda: self._sync_wal(always=True))
        return freed
