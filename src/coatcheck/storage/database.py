"""The database behind the embedded catalog: SQLite in WAL mode and the journal in front of it, under one lock.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coatcheck.errors import Damaged, StoreClosed, StoreError, StoreFull, StoreUnavailable, storage_error
from coatcheck.refs import Blob
from coatcheck.storage import Entry, rows, schema
from coatcheck.storage.changes import Changes, is_damage
from coatcheck.storage.disk import Disk
from coatcheck.storage.forks import unwatch, watch
from coatcheck.storage.journal import START, Journal
from coatcheck.storage.records import Records
from coatcheck.storage.reserve import Reserve
from coatcheck.storage.rows import Row

NAME = "catalog.sqlite"
LOCK = "lock"
_PIECE = 1024 * 1024


class Database:
    """Connections, lock and journal of one store, safe between threads, processes and forks."""

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
                    disk.sync(folder, always=True)  # before SQLite makes files beside it, which alone are no store
                self._writer = self._connect()
                try:
                    self._changes = Changes(self._writer, self._is_readable)
                    self._records = Records(self._writer, self._changes)
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
        self, doing: str, *, durable: bool = True, always: bool = False, freeing: bool = False, adding: bool = False
    ) -> Iterator[None]:
        """One transaction on all that was put so far. What frees space may use the space that is kept in reserve; what
        adds to the store waits until that is whole again."""
        with self._exclusive(doing):
            self._refresh_and_catch_up()
            if adding and self._journal.strained:
                self._reserve.fill(self._journal)
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

    def _is_readable(self, blob_key: int) -> bool:
        try:
            self._query("SELECT data FROM content WHERE blob_key = ?", (blob_key,), settled=False)
        except Damaged:
            return False
        return True

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
        self._records = Records(self._writer, self._changes)
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
