"""The embedded catalog: SQLite in WAL mode behind a journal, for many threads and processes on one machine.

Who writes holds the store's lock (a file lock, fair and prompt, so SQLite never sees a contended write), and first
takes over what the journal holds. Readers look whether the journal has grown, and take it over too if so. Only the
holder of the lock checkpoints, and no connection does so on its own: SQLite before 3.51.3 may corrupt a WAL that two
reset at once.

Commits are not synced by SQLite (`synchronous=NORMAL`): where durability asks for it, `_settle` syncs the WAL. Until
then the journal holds the same records, and a power cut only means that they are taken over once more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coatcheck.errors import Damaged, StoreClosed, StoreError, StoreFull, StoreUnavailable, storage_error
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob
from coatcheck.storage import (
    _NO_LIMITS,
    _NOTHING,
    Entry,
    Freed,
    Limits,
    Ranges,
    SessionInfo,
    Totals,
    newest_of_each,
    rows,
    schema,
)
from coatcheck.storage.changes import Changes, is_damage
from coatcheck.storage.disk import Disk
from coatcheck.storage.forks import unwatch, watch
from coatcheck.storage.journal import START, Journal
from coatcheck.storage.reserve import Reserve
from coatcheck.storage.rows import BRIEF, COLUMNS, EXPIRES, GONE, WIDTH, Row, brief_entry_of, entry_of

NAME = "catalog.sqlite"
LOCK = "lock"
INLINE_LIMIT = 128 * 1024
_PAGES = 64  # given back in one step of compacting
_PIECE = 1024 * 1024
_FROM = "FROM session s JOIN ref r ON r.session_key = s.session_key LEFT JOIN blob b ON b.blob_key = r.blob_key"
# Left to itself SQLite walks all refs of a session in the order of their seq: the index has to be named.
_FROM_DIGEST = _FROM.replace("ref r", "ref r INDEXED BY ref_by_digest")
_FROM_NAME = _FROM.replace("ref r", "ref r INDEXED BY ref_by_name")
_BY_PREFIX = f"""SELECT {{columns}}, {{content}}, (SELECT o.digest FROM ref o WHERE o.session_key = r.session_key
    AND o.digest >= ?1 AND o.digest < r.digest LIMIT 1) {_FROM} LEFT JOIN content c ON c.blob_key = b.blob_key
    WHERE s.session_id = ?3 AND r.digest >= ?1 AND r.digest <= ?2 ORDER BY r.digest DESC, r.seq DESC LIMIT 1"""
_NEWEST = {
    True: _BY_PREFIX.format(columns=COLUMNS, content="c.data"),
    False: _BY_PREFIX.format(columns=COLUMNS, content="NULL"),
}
_NEWEST_BRIEF = _BY_PREFIX.format(columns=BRIEF, content="c.data")


class SqliteCatalog:
    """Sessions, refs and small blobs in one SQLite file."""

    inline_limit = INLINE_LIMIT
    rank = 2

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        self._path = root / NAME
        self._uri = self._path.as_uri()
        self._folder = folder
        self._disk = disk
        self._mutex = threading.Lock()
        self._readers: deque[sqlite3.Connection] = deque()
        self._reader_count = 0
        self._making_reader = threading.Lock()
        self._is_forked = False
        self._journal = Journal(folder, disk)
        self._reserve = Reserve(folder, disk)
        self._recent: dict[str, Blob] = {}  # large blobs that this process put since it last took over the journal
        self._pending: dict[str, list[Entry]] = {}  # and refs, by the first characters of their ids
        self._wal_is_named = False
        self._wal_is_unsound = False
        self._closed = False
        with contextlib.suppress(FileExistsError):
            os.close(disk.create(LOCK, folder))
            disk.sync(folder, always=True)  # it tells a store from a folder that holds other files: it comes first
        self._lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            with self._exclusive("opening the store"):
                if self._reserve.is_needed():  # what SQLite makes beside the database has to fit
                    self._reserve.release(self._journal)
                with contextlib.suppress(FileExistsError):
                    os.close(disk.create(NAME, folder))
                self._writer = self._connect()
                try:
                    self._changes = Changes(self._writer, self._is_readable)
                    self._prepare()
                except BaseException:
                    self._writer.close()
                    self._journal.close()
                    raise
        except BaseException:
            os.close(self._lock)
            raise
        watch(self)

    def _prepare(self) -> None:
        if self._writer.execute("PRAGMA user_version").fetchone()[0] == 0:
            self._writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._writer.execute("PRAGMA journal_mode = WAL")
        schema.migrate(self._writer, self._disk)
        self._journal.refresh()
        with contextlib.suppress(OSError):
            self._reserve.fill(self._journal)
        self._sync_wal()
        self._catch_up()

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
                (row,) = self._query(_NEWEST_BRIEF, (low, high, session_id)) or (None,)
                if row is None:
                    return []
                if row[13] is None and row[5] is None and row[3] is None:
                    return [brief_entry_of(row)]
            found = self._query(_NEWEST[content], (low, high, session_id), settled=settled)
            pending = [] if settled else self._put_lately(session_id, prefix)
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

    def _put_lately(self, session_id: str, prefix: str) -> list[Entry]:
        """What this process put since it last took over the journal, newest first."""
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

    def secret(self) -> bytes:
        return bytes(self._query("SELECT value FROM meta WHERE key = 'secret'")[0][0])

    def shown(self, session_id: str, digest: str) -> Ranges:
        return tuple(
            self._query(
                "SELECT start, end FROM shown WHERE digest = ? AND session_key ="
                " (SELECT session_key FROM session WHERE session_id = ?) ORDER BY start",
                (bytes.fromhex(digest), session_id),
            )
        )

    def sessions(self) -> Iterator[SessionInfo]:
        for row in self._pages(
            "session", "session_key", "session_id, parent, ttl, quota, created_at, used_at, used_bytes"
        ):
            yield SessionInfo(*row)

    def blobs(self) -> Iterator[tuple[Blob, bytes | None]]:
        for key, digest, *rest in self._pages(
            "blob", "blob_key", "blob_key, digest, size, coding, place, frames, used_at"
        ):
            blob = Blob(digest.hex(), *rest)
            yield blob, self._content(key) if blob.coding == "inline" else None

    def _is_readable(self, blob_key: int) -> bool:
        try:
            self._query("SELECT data FROM content WHERE blob_key = ?", (blob_key,), settled=False)
        except Damaged:
            return False
        return True

    def _content(self, blob_key: int) -> bytes | None:
        """Inline content as it is in the database: nothing right, where the pages that hold it are damaged."""
        try:
            found = self._query("SELECT data FROM content WHERE blob_key = ?", (blob_key,))
        except Damaged:
            return b""
        return found[0][0] if found else None

    def totals(self) -> Totals:
        row = self._query(
            """SELECT (SELECT count(*) FROM session), (SELECT count(*) FROM ref WHERE gone IS NULL),
            (SELECT count(*) FROM blob), (SELECT count(*) FROM ref WHERE gone IS NOT NULL),
            (SELECT coalesce(sum(size), 0) FROM blob), (SELECT coalesce(sum(size), 0) FROM ref WHERE gone IS NULL)"""
        )[0]
        return Totals(*row)

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}#blob={blob.digest}"

    # Writing

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        guarded = limits.store_quota is not None or entry.session.quota is not None
        record = rows.pack(entry, heal=heal, grace=limits.grace)
        with self._exclusive("putting an artifact"):
            self._journal.refresh()
            if self._journal.strained:
                self._reserve.fill(self._journal)
            # Before the record is in, not after: what fails here must not fail a put that everybody can see.
            if self._journal.end > self._reserve.journal_limit or self._journal.is_unsound:
                self._catch_up()
                self._settle()
            if guarded or reuse:
                self._catch_up()
                if reuse and not self._changes.has_copy(entry.blob):
                    return False
                if guarded:
                    self._changes.check_quota(entry, limits)
            mark = self._journal.append(record)
            if entry.content is None:
                self._recent[entry.blob.digest] = entry.blob
            self._pending.setdefault(entry.ref.artifact_id[:MIN_PREFIX], []).append(entry)
        try:
            self._journal.sync(mark)
        except OSError as error:
            raise storage_error(error, "syncing the journal") from error
        return True

    def open_session(self, info: SessionInfo) -> None:
        with self._change("opening a session"):
            self._changes.open_session(info)

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        with self._change("noting use", durable=False):
            self._changes.touch(sessions, blobs, shown)

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        with self._change("pinning"):
            return self._changes.pin(session_id, digest, pinned)

    def remove(self, session_id: str, digest: str | None = None, *, end: bool = False) -> Freed:
        with self._change("forgetting", freeing=True):
            freed = self._changes.remove(session_id, digest, end=end)
        return self._let_go(freed)

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            with self._exclusive("looking for what has expired"):
                self._refresh_and_catch_up()
                return self._changes.would_expire(at)
        freed = Freed()
        while True:
            with self._change("expiring", freeing=True):
                batch = self._changes.expire(at)
            freed += batch
            if not batch.refs:
                break
        with self._change("expiring", freeing=True):
            self._changes.drop_tombstones(forget_before)
        return self._let_go(freed)

    def relocate(self, old: Blob, new: Blob) -> bool:
        with self._change("moving a blob", always=True):
            return self._changes.relocate(old, new)

    def lose(self, blob: Blob) -> int:
        with self._change("setting a damaged blob aside", freeing=True):
            return self._changes.lose(blob)

    def check(self, *, repair: bool) -> list[str]:
        with self._change("checking the catalog"):
            return self._changes.check(repair=repair)

    def compact(self) -> None:
        with self._exclusive("compacting the catalog"):
            self._refresh_and_catch_up()
            with self._roomy():
                before, free = -1, self._free_pages()
                while free and free != before:
                    self._writer.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` would free one page
                    self._bound_wal()
                    before, free = free, self._free_pages()
                self._settle(truncate=True)

    def _free_pages(self) -> int:
        return int(self._writer.execute("PRAGMA freelist_count").fetchone()[0])

    def close(self) -> None:
        if self._closed:
            return
        with self._exclusive("closing the store"):
            with contextlib.suppress(StoreError, OSError, sqlite3.Error):
                self._refresh_and_catch_up()
                self._settle()
            self._closed = True
            self._reader_count = 0
            while self._readers:
                self._readers.pop().close()
            self._writer.close()
            if self._journal.strained:
                with contextlib.suppress(OSError):
                    self._reserve.fill(self._journal)
            self._journal.close()
        os.close(self._lock)
        os.close(self._folder)
        unwatch(self)

    # The machinery

    @contextmanager
    def _exclusive(self, doing: str) -> Iterator[None]:
        """Hold the lock that orders all writers of the store, threads and processes, and tell failures as ours."""
        with self._mutex:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                if self._is_forked:
                    self._take_own_files()
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                try:
                    if self._is_forked:
                        self._take_own_connections()
                    yield
                finally:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
            except OSError as error:
                raise storage_error(error, doing) from error
            except sqlite3.Error as error:
                raise _translated(error, doing) from error

    @contextmanager
    def _change(
        self, doing: str, *, durable: bool = True, always: bool = False, freeing: bool = False
    ) -> Iterator[None]:
        """One transaction on all that was put so far. What frees space may use the space that is kept in reserve."""
        with self._exclusive(doing):
            self._refresh_and_catch_up()
            with self._roomy() if freeing else contextlib.nullcontext():
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._disk.commit(self._writer)
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise
                if durable:
                    self._sync_wal(always=always)
                self._bound_wal()

    @contextmanager
    def _roomy(self) -> Iterator[None]:
        """With the space that is kept in reserve, where the disk is full."""
        if self._reserve.is_needed():
            self._reserve.release(self._journal)
        try:
            yield
        finally:
            if self._journal.strained:
                with contextlib.suppress(OSError):
                    self._reserve.fill(self._journal)

    def _let_go(self, freed: Freed) -> Freed:
        """Files may go only when no power cut can bring their rows back, whatever the durability."""
        if freed.blobs and not self._disk.durable:
            with self._exclusive("forgetting"):
                self._sync_wal(always=True)
        return freed

    def _refresh_and_catch_up(self) -> None:
        self._journal.refresh()
        self._catch_up()

    def _catch_up(self) -> None:
        """Take over from the journal what the database does not have yet. The caller holds the lock.

        In batches that fit into the reserve: what was acknowledged must stay readable on a full disk."""
        while self._take_over():
            self._bound_wal()
        self._has_seen_all()

    def _take_over(self) -> bool:
        """Take over a batch; whether there may be more."""
        try:
            return self._take_over_batch()
        except sqlite3.OperationalError:
            self._reserve.release(self._journal)
            with contextlib.suppress(sqlite3.OperationalError):
                self._checkpoint("TRUNCATE")
            return self._take_over_batch()

    def _take_over_batch(self) -> bool:
        journal = self._journal
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            known = dict(self._writer.execute("SELECT key, value FROM meta WHERE key IN ('journal', 'offset')"))
            start = known.get("offset", START) if known.get("journal") == journal.journal_id else START
            if start >= journal.end:
                self._writer.execute("ROLLBACK")
                if start > journal.end:
                    # A power cut took from the journal what the database kept: what is put at its end now would be
                    # taken for known. Begin another one.
                    self._sync_wal(always=True)
                    journal.replace()
                return False
            most, size = self._reserve.batch
            at = start
            for count, (at, record) in enumerate(journal.records(start), 1):
                try:
                    entry, heal, grace = rows.unpack(record)
                except (ValueError, TypeError, struct.error) as error:
                    raise Damaged("a record of the journal makes no sense", hint="restore the store") from error
                self._changes.put(entry, heal=heal, grace=grace)
                if count >= most or at - start >= size:
                    break
            self._writer.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("journal", journal.journal_id), ("offset", at)]
            )
            self._disk.commit(self._writer)
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise
        return at < journal.end

    def _has_seen_all(self) -> None:
        self._journal.seen = self._journal.end
        self._recent.clear()
        self._pending.clear()

    def _settle(self, *, truncate: bool = False) -> None:
        """Make all that the database holds durable, start a new journal, and keep the WAL from growing."""
        self._sync_wal(always=True)
        if self._journal.end > START or self._journal.is_unsound:
            self._journal.replace()
        self._has_seen_all()
        if truncate:
            self._checkpoint("TRUNCATE")
        else:
            self._bound_wal()

    def _bound_wal(self) -> None:
        """Keep the WAL from growing beyond what the reserve has room for in the database."""
        if self._path.with_name(NAME + "-wal").stat().st_size > self._reserve.wal_limit:
            try:
                self._checkpoint("PASSIVE")
            except sqlite3.OperationalError:
                self._reserve.release(self._journal)
                with contextlib.suppress(sqlite3.OperationalError):  # then it grows: what is in it stays readable
                    self._checkpoint("TRUNCATE")

    def _checkpoint(self, mode: str) -> None:
        self._writer.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    def _sync_wal(self, *, always: bool = False) -> None:
        # Never the database file itself: closing a second descriptor of it would drop SQLite's locks.
        with contextlib.suppress(FileNotFoundError):
            file = os.open(NAME + "-wal", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                if self._wal_is_unsound:
                    for at in range(0, os.fstat(file).st_size, _PIECE):
                        self._disk.write_at(file, os.pread(file, _PIECE, at), at)
                self._wal_is_unsound = True  # a failed sync is told once: what it dropped must be written again
                self._disk.sync(file, always=always)
                self._wal_is_unsound = False
            finally:
                os.close(file)
        if not self._wal_is_named:
            self._disk.sync(self._folder, always=True)
            self._wal_is_named = True

    def _query(self, sql: str, values: tuple[Any, ...] = (), *, settled: bool = True) -> list[Row]:
        """Rows for a reader, after taking over what the journal has."""
        if self._is_forked or (settled and not self._closed and self._journal.grown()):
            with self._exclusive("reading the catalog"):
                self._refresh_and_catch_up()
        try:
            reader = self._readers.pop()
        except IndexError:
            with self._making_reader:
                if self._closed:
                    raise StoreClosed("the store is closed") from None
                reader = self._connect(reading=True)
                self._reader_count += 1
        try:
            return reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _translated(error, "reading the catalog") from error
        finally:
            self._readers.append(reader)

    def _pages(self, table: str, key: str, columns: str) -> Iterator[Row]:
        """All rows of a table in the order of its key, a page at a time: no reader keeps the WAL from being reset."""
        last = -1
        while page := self._query(
            f"SELECT {key}, {columns} FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT 64", (last,)
        ):
            for row in page:
                yield row[1:]
            last = page[-1][0]

    def _connect(self, *, reading: bool = False) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm"):
            if self._path.with_name(NAME + suffix).is_symlink():
                raise StoreUnavailable(f"{NAME + suffix!r} is a symbolic link", hint="a store follows no links")
        try:
            db = sqlite3.connect(
                self._path, timeout=30, isolation_level=None, check_same_thread=False, cached_statements=128
            )
            for pragma in (
                "synchronous = NORMAL", "wal_autocheckpoint = 0", "secure_delete = FAST", "cell_size_check = ON",
                "trusted_schema = OFF", "temp_store = MEMORY", "journal_size_limit = 0", f"query_only = {int(reading)}",
            ):  # fmt: skip
                db.execute(f"PRAGMA {pragma}")
        except sqlite3.Error as error:
            raise _translated(error, "opening the catalog") from error
        return db

    def pause(self) -> None:
        """Before a fork: wait until no thread is inside SQLite, and keep them all out."""
        self._mutex.acquire()
        self._making_reader.acquire()
        idle: deque[sqlite3.Connection] = deque()
        while len(idle) < self._reader_count:
            try:
                idle.append(self._readers.pop())
            except IndexError:
                time.sleep(0.0005)
        self._idle = idle

    def resume(self) -> None:
        self._readers.extend(self._idle)
        self._making_reader.release()
        self._mutex.release()

    def renew(self) -> None:
        """In a child: leave the connections to the parent, without closing them. Our own are opened on first use."""
        if not self._closed:
            _inherited.append((self._writer, self._idle))
            self._reader_count = 0
            self._is_forked = True
            os.close(self._lock)  # else it would stay locked for as long as we live, were the parent to die with it
            self._journal.close()
        self._making_reader.release()
        self._mutex.release()

    def _take_own_files(self) -> None:
        self._lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        self._journal = Journal(self._folder, self._disk)
        self._reserve = Reserve(self._folder, self._disk)
        self._recent, self._pending = {}, {}

    def _take_own_connections(self) -> None:
        self._writer = self._connect()
        self._changes = Changes(self._writer, self._is_readable)
        self._is_forked = False
        self._refresh_and_catch_up()


def _translated(error: sqlite3.Error, doing: str) -> StoreError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return Damaged(f"the catalog is damaged: {error}", hint="restore it from an export, or open a new store")
    return StoreUnavailable(f"the catalog failed while {doing}: {error}", hint="check the folder and try again")


_inherited: list[object] = []
