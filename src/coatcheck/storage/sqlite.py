"""The database of the embedded catalog: SQLite in WAL mode with a journal in front of it, under one lock.

A writer takes the store's lock (a fair file lock, so SQLite never sees a contended write), and first applies the
records of the journal. A reader checks whether the journal has grown, and if so applies it too. Only the holder of the
lock runs checkpoints, and automatic checkpoints are off: SQLite before 3.51.3 may corrupt a WAL that two connections
reset at once.

SQLite does not sync commits (`synchronous=NORMAL`): if durability requires it, `_settle` syncs the WAL. Until then the
journal has the same records, and after a power cut they are applied once more.

The tables are created in numbered steps: a new store runs all of them, an older one those it does not have yet. Each
step runs in a transaction of its own, which also updates the version. A released step never changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from coatcheck.errors import (
    Damaged,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnsupportedFormat,
    development_format,
    read_only,
    storage_error,
)
from coatcheck.storage.catalog import Effect
from coatcheck.storage.disk import FILES, FOLDERS, Disk, open_root
from coatcheck.storage.forks import Mutex, unwatch, watch
from coatcheck.storage.journal import NAME as JOURNAL
from coatcheck.storage.journal import START, Journal, Position, Reserve

NAME = "catalog.sqlite"
LOCK = "lock"
APPLICATION_ID = 0x434F4143
_DEVELOPMENT_ID = 0x434F4154  # of stores made before the first release, in formats that were never released
Values = tuple[Any, ...] | dict[str, Any]
_PIECE = 1024 * 1024
_LOST = "lost "  # key prefix in `meta` for damage in a journal: its id and the offset; the value is a number of bytes
_LOG: Final = logging.getLogger("coatcheck")
_T = TypeVar("_T")

_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE session (
        session_key INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, parent TEXT, ttl REAL, quota INTEGER,
        created REAL NOT NULL, used REAL NOT NULL, used_bytes INTEGER NOT NULL DEFAULT 0,
        next_seq INTEGER NOT NULL DEFAULT 1)""",
    """CREATE TABLE blob (
        blob_key INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, size INTEGER NOT NULL, coding TEXT NOT NULL,
        place TEXT NOT NULL, frames BLOB NOT NULL, refs INTEGER NOT NULL, used REAL NOT NULL)""",
    "CREATE INDEX blob_unreferenced ON blob (blob_key) WHERE refs = 0",
    "CREATE TABLE content (blob_key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE TABLE ref (
        session_key INTEGER NOT NULL, seq INTEGER NOT NULL, digest BLOB NOT NULL, size INTEGER NOT NULL, name TEXT,
        codec TEXT NOT NULL, media_type TEXT NOT NULL, kind TEXT NOT NULL, tool TEXT, call_id TEXT,
        producer TEXT NOT NULL, parents TEXT NOT NULL, summary TEXT NOT NULL, created REAL NOT NULL, expires REAL,
        pinned INTEGER NOT NULL, granted_by TEXT, request TEXT, gone TEXT,
        PRIMARY KEY (session_key, seq)) WITHOUT ROWID""",
    "CREATE INDEX ref_by_digest ON ref (session_key, digest)",
    "CREATE INDEX ref_by_name ON ref (session_key, name) WHERE name IS NOT NULL",
    "CREATE INDEX ref_by_expiry ON ref (expires) WHERE expires IS NOT NULL AND gone IS NULL",
    "CREATE INDEX ref_by_grant ON ref (granted_by, digest) WHERE granted_by IS NOT NULL",
    "CREATE INDEX ref_damaged ON ref (digest) WHERE gone = 'damaged'",
    # The notes of the store itself have the session key 0.
    """CREATE TABLE note (
        session_key INTEGER NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
        PRIMARY KEY (session_key, key)) WITHOUT ROWID""",
    "INSERT INTO meta VALUES ('stored_bytes', 0)",
    "INSERT INTO note VALUES (0, 'secret', randomblob(16))",
    """CREATE TRIGGER blob_added AFTER INSERT ON blob
        BEGIN UPDATE meta SET value = value + new.size WHERE key = 'stored_bytes'; END""",
    """CREATE TRIGGER blob_dropped AFTER DELETE ON blob
        BEGIN UPDATE meta SET value = value - old.size WHERE key = 'stored_bytes'; END""",
)
STEPS: list[tuple[str, ...]] = [_TABLES]


def migrate(db: sqlite3.Connection, disk: Disk) -> None:
    """Migrate the catalog to the current version. The caller holds the store's lock."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application == _DEVELOPMENT_ID:
        raise development_format()
    if application not in (0, APPLICATION_ID):
        raise StoreUnavailable("the catalog file belongs to another program", hint="use a new folder for the store")
    if version > len(STEPS):
        raise UnsupportedFormat(f"this store has format {version}; this version of coatcheck supports {len(STEPS)}")
    for number, step in enumerate(STEPS[version:], version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in step:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")
            disk.commit(db)
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


class _Connection(sqlite3.Connection):
    """A connection with a lock for its user."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = Mutex()


class Database:
    """Connections, lock and journal of one store. Safe across threads, processes and forks."""

    rank = 2
    _writer: sqlite3.Connection

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        self._path = root / NAME
        self._uri = self._path.as_uri()
        self._folder = folder
        self._disk = disk
        self._lock = -1
        self._mutex = Mutex(self._leave)
        self._readers: list[_Connection] = []
        self._making_reader = Mutex()
        self._is_forked = False
        self._journal = Journal(folder, disk)
        self._reserve = Reserve(folder, disk)
        self._inside = 0  # the thread that holds the lock
        self._wal_is_named = False
        self._wal_is_unsound = False
        self._has_lost = False  # whether the journal still contains damage that was already recorded
        self._closed = False
        self.is_read_only = False
        self._seen_files: object = None  # on a read-only file system: state of the files that the view was made from
        self._view: Path | None = None  # private copy of the store, if a read-only one needs it
        try:
            with contextlib.suppress(FileExistsError):
                os.close(disk.create(LOCK, folder))
                disk.sync(folder, always=True)  # first, because the lock file identifies the folder as a store
            self._lock = self._open_lock()
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self.is_read_only = True
            self._lock = self._open_lock()
        try:
            self._exclusive("opening the store", self._open)
        except BaseException:
            self._close_all()
            raise
        watch(self)

    def _open_lock(self) -> int:
        how = os.O_RDONLY if self.is_read_only else os.O_RDWR
        return os.open(LOCK, how | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)

    def _open(self) -> None:
        if self.is_read_only:
            return
        if self._reserve.is_needed():  # the files that SQLite creates beside the database need space
            self._reserve.release(self._journal)
        with contextlib.suppress(FileExistsError):
            os.close(self._disk.create(NAME, self._folder))
            self._disk.sync(self._folder, always=True)  # before SQLite creates its files: alone, they are not a store
        if not os.stat(NAME, dir_fd=self._folder, follow_symlinks=False).st_size:
            self._check_new()  # before SQLite opens it: SQLite removes the WAL of an empty database
        self._writer = self._connect()
        self._prepare()

    def _prepare(self) -> None:
        is_new = self._writer.execute("PRAGMA user_version").fetchone()[0] == 0
        if is_new:
            self._check_new()
            self._writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._writer.execute("PRAGMA journal_mode = WAL")
        migrate(self._writer, self._disk)
        if is_new:
            self._sync_wal(always=True)  # tables come first: a catalog without tables counts as lost
        self._journal.refresh()
        with contextlib.suppress(OSError):
            self._reserve.fill(self._journal)
        self._sync_wal()
        self._catch_up()

    def _check_new(self) -> None:
        """Raise if the catalog has no tables but the folder has files of a store with tables: content was lost."""
        held = set(os.listdir(self._folder))
        wal = self._path.with_name(NAME + "-wal")
        is_cut = self._path.stat().st_size == 0 and wal.exists() and wal.stat().st_size > 0
        beside = sorted(name for name in held if name in FOLDERS or (FILES.fullmatch(name) and _is_later(name)))
        if beside or is_cut:
            raise StoreUnavailable(
                f"the catalog of the store is empty, but the folder contains {', '.join(beside) or wal.name!r}",
                hint=f"restore {NAME} from a backup, or use a new folder; nothing was changed",
            )

    def close(self) -> None:
        if self._closed:
            return
        self._exclusive("closing the store", self._settle_and_close)
        self._close_all()
        os.close(self._folder)
        unwatch(self)

    def _settle_and_close(self) -> None:
        if not self.is_read_only:
            with contextlib.suppress(StoreError, OSError, sqlite3.Error):
                self._refresh_and_catch_up()
                self._settle()
        self._closed = True
        for reader in self._making_reader.run(self._taken_readers):
            reader.lock.run(reader.close)
        self._writer.close()
        if self._journal.strained:
            with contextlib.suppress(OSError):
                self._reserve.fill(self._journal)

    def _taken_readers(self) -> list[_Connection]:
        readers, self._readers = self._readers, []
        return readers

    def _close_all(self) -> None:
        """Close all open files, after a close or a failed open."""
        self._closed = True
        if hasattr(self, "_writer"):
            self._writer.close()
        self._drop_view()
        self._journal.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _exclusive(self, doing: str, work: Callable[[], _T]) -> _T:
        """Run `work` under the lock that serializes all writers of the store, threads and processes. Translates errors
        to `StoreError`."""

        def locked() -> _T:
            if self._closed:
                raise StoreClosed("the store is closed")
            if self._is_forked:
                self._take_own_files()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._inside = threading.get_ident()
            if self._is_forked:
                self._take_own_connections()
            if self.is_read_only:
                self._refresh_view()
            return work()

        try:
            return self._mutex.run(locked)
        except OSError as error:
            raise storage_error(error, doing) from error
        except sqlite3.Error as error:
            raise translated(error, doing) from error

    def _leave(self) -> None:
        """Clean up before the mutex is released, however the work ended: roll back and release the file lock."""
        self._inside = 0
        with contextlib.suppress(sqlite3.Error):
            if hasattr(self, "_writer") and self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def change(
        self, doing: str, work: Callable[[], _T], *, session_id: str | None = None, effect: Effect | None = None
    ) -> _T:
        """Run `work` in one transaction, after applying the journal. Changes that free space may use the reserve;
        changes that add to the store fail until the reserve is full again."""
        self._check_writable(doing)

        def change() -> _T:
            self._refresh_and_catch_up()
            if effect == "add" and self._journal.strained:
                self._reserve.fill(self._journal)
            with self._roomy() if effect == "free" else contextlib.nullcontext():
                answer = self._transaction(work)
                if effect != "note":
                    self._sync_wal(always=effect == "move")
                self._bound_wal()
            return answer

        return self._exclusive(doing, change)

    def _transaction(self, work: Callable[[], _T]) -> _T:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            answer = work()
            self._disk.commit(self._writer)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
            raise
        return answer

    @contextmanager
    def _roomy(self) -> Iterator[None]:
        """Release the reserve while inside the context, if the disk is full."""
        if self._reserve.is_needed():
            self._reserve.release(self._journal)
        try:
            yield
        finally:
            if self._journal.strained:
                with contextlib.suppress(OSError):
                    self._reserve.fill(self._journal)

    def _check_writable(self, doing: str) -> None:
        if self.is_read_only and not self._closed:
            raise read_only(doing)

    def _refresh_view(self) -> None:
        """Refresh the view of a store on a read-only file system. The caller holds the lock, so there is no writer.

        A database without WAL and journal is read in place. Otherwise SQLite, and applying the journal, would have to
        write; this is done in a private copy."""
        names = (NAME, NAME + "-wal", JOURNAL)
        found = [self._stat(name) for name in names]
        seen = [info and (info.st_ino, info.st_size, info.st_mtime_ns) for info in found]
        if seen == self._seen_files:
            return
        if hasattr(self, "_writer"):
            self._writer.close()
        self._drop_view()
        _, wal, journal = found
        if (wal and wal.st_size) or (journal and journal.st_size > START) or self._version() < len(STEPS):
            self._view = Path(tempfile.mkdtemp(prefix="coatcheck-"))
            weakref.finalize(self, _remove_folder, self._view, os.getpid())
            for name, info in zip(names, found, strict=True):
                if info:
                    shutil.copyfile(self._path.with_name(name), self._view / name)
            (self._view / LOCK).touch()
            type(self)(self._view, open_root(self._view, LOCK, NAME), Disk(durable=False)).close()
        self._writer = self._connect(reading=True)
        migrate(self._writer, self._disk)  # only raises, if the format is too new or not ours
        self._seen_files = seen

    def _stat(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        return None

    def _version(self) -> int:
        db = self._connect(reading=True)
        try:
            return int(db.execute("PRAGMA user_version").fetchone()[0])
        finally:
            db.close()

    def _drop_view(self) -> None:
        view, self._view = self._view, None
        self._seen_files = None
        if view is not None:
            shutil.rmtree(view, ignore_errors=True)

    def _refresh_and_catch_up(self) -> None:
        if self.is_read_only:
            return
        is_current = not self._journal.grown()
        self._journal.refresh()
        if not is_current:
            self._catch_up()

    def _catch_up(self) -> None:
        """Apply the journal records that the database does not have yet. The caller holds the lock.

        Batches fit into the reserve: acknowledged puts must stay readable on a full disk."""
        while self._take_over():
            self._bound_wal()
        if self._reserve.is_needed():
            self._bound_wal()
        if self._has_lost:
            self._has_lost = False
            with contextlib.suppress(OSError, sqlite3.Error):
                self._settle()  # the damaged journal is kept in a copy: start a new one
        self._has_seen_all()

    def _take_over(self) -> bool:
        """Apply a batch. Returns whether there may be more."""
        try:
            return self._take_over_batch()
        except sqlite3.OperationalError:
            self._reserve.release(self._journal)
            with contextlib.suppress(sqlite3.OperationalError):
                self._checkpoint("TRUNCATE")
            return self._take_over_batch()

    def _take_over_batch(self) -> bool:
        known = dict(self._writer.execute("SELECT key, value FROM meta WHERE key IN ('journal', 'offset')"))
        journal = self._journal
        start = known.get("offset", START) if known.get("journal") == journal.journal_id else START
        if start >= journal.end:
            if start > journal.end:
                # A power cut removed records from the journal that the database has. New records at its end would be
                # skipped as already applied, so start a new journal.
                self._sync_wal(always=True)
                journal.replace()
            return False
        return self._transaction(lambda: self._take_records(start)) < journal.end

    def _take_records(self, start: int) -> int:
        """Apply at most one batch of records from an offset. Returns the offset after them."""
        journal, lost = self._journal, {}
        most, size = self._reserve.batch
        at = start
        for count, (behind, record) in enumerate(journal.records(start), 1):
            if record is None:
                lost[at] = behind - at
            else:
                self._take_record(record)
            at = behind
            if count >= most or at - start >= size:
                break
        if lost:
            self._note_loss(lost)
        self._writer.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("journal", journal.journal_id), ("offset", at)]
        )
        return at

    def _take_record(self, record: bytes) -> None:
        """Apply one record to the tables."""
        raise NotImplementedError

    def _append(self, record: bytes, check: Callable[[], bool] | None) -> Position | None:
        """Append a record to the journal. If `check` is given, the journal is applied before, and None is returned if
        the check fails. The caller holds the lock."""
        self._journal.refresh()
        if self._journal.strained:
            self._reserve.fill(self._journal)
        # Before the record is appended: a failure here must not fail a put that is already visible.
        if self._journal.end > self._reserve.journal_limit or self._journal.is_unsound:
            self._catch_up()
            self._settle()
        if check is not None:
            self._catch_up()
            if not check():
                return None
        return self._journal.append(record)

    def _sync_journal(self, position: Position) -> None:
        try:
            self._journal.sync(position)
        except OSError as error:
            raise storage_error(error, "syncing the journal") from error

    def _is_behind(self) -> bool:
        """Return whether the database may lack recent puts, or have some that are not durable yet."""
        if self._closed:
            raise StoreClosed("the store is closed")
        return self._is_forked or self._journal.grown() or (self._disk.durable and not self._journal.is_synced())

    def _note_loss(self, lost: dict[int, int]) -> None:
        """Keep a copy of the journal, and record its damaged parts (bytes by offset) for `verify`."""
        journal = self._journal
        try:
            name = journal.keep_aside()
        except OSError:
            if not self._reserve.release(journal):
                raise
            name = journal.keep_aside()
        self._writer.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(f"{_LOST}{journal.journal_id.hex()} {at}", size) for at, size in lost.items()],
        )
        self._has_lost = True
        _LOG.warning("The store's journal is damaged: %s. A copy is kept as %r.", _lost_text(lost.values()), name)

    def _check_losses(self, *, repair: bool) -> list[str]:
        """Return what was lost to damage in journals. With `repair`, it is not reported again."""
        lost: dict[str, list[int]] = {}
        for key, size in self._writer.execute("SELECT key, value FROM meta WHERE key GLOB ?", (_LOST + "*",)):
            lost.setdefault(key.split(" ")[1], []).append(size)
        if repair:
            self._writer.execute("DELETE FROM meta WHERE key GLOB ?", (_LOST + "*",))
        return [
            f"the journal was damaged: {_lost_text(sizes)}; a copy is kept as 'journal.damaged-{journal_id}'"
            for journal_id, sizes in lost.items()
        ]

    def _has_seen_all(self) -> None:
        self._journal.seen = self._journal.end

    def _settle(self, *, truncate: bool = False) -> None:
        """Make the contents of the database durable, start a new journal, and limit the WAL's size."""
        self._sync_wal(always=True)
        if self._journal.end > START or self._journal.is_unsound:
            self._journal.replace()
        self._has_seen_all()
        if truncate:
            self._checkpoint("TRUNCATE")
        else:
            self._bound_wal()

    def _bound_wal(self) -> None:
        """Keep the WAL small enough that the reserve has room for it in the database."""
        if os.stat(NAME + "-wal", dir_fd=self._folder).st_size > self._reserve.wal_limit:
            try:
                self._checkpoint("PASSIVE")
            except sqlite3.OperationalError:
                self._reserve.release(self._journal)
                with contextlib.suppress(sqlite3.OperationalError):  # then it grows, but stays readable
                    self._checkpoint("TRUNCATE")

    def _checkpoint(self, mode: str) -> None:
        self._writer.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    def _sync_wal(self, *, always: bool = False) -> None:
        # Never open the database file itself: closing a second descriptor of it would drop SQLite's locks.
        with contextlib.suppress(FileNotFoundError):
            file = os.open(NAME + "-wal", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                if self._wal_is_unsound:
                    for at in range(0, os.fstat(file).st_size, _PIECE):
                        self._disk.write_at(file, os.pread(file, _PIECE, at), at)
                self._wal_is_unsound = True  # a failed sync is reported only once: lost pages must be written again
                self._disk.sync(file, always=always)
                self._wal_is_unsound = False
            finally:
                os.close(file)
        if not self._wal_is_named:
            self._disk.sync(self._folder, always=True)
            self._wal_is_named = True

    def _query(self, sql: str, values: Values = (), *, settled: bool = True, apart: bool = False) -> list[Any]:
        """Return the rows of a query, after applying the journal if `settled`. Inside a change, it sees the change,
        unless it is kept `apart`."""
        if self._inside == threading.get_ident() and not (apart and not self.is_read_only):
            return self._writer.execute(sql, values).fetchall()
        if self.is_read_only:
            return self._exclusive("reading the catalog", lambda: self._writer.execute(sql, values).fetchall())
        if self._is_forked or (settled and not apart and not self._closed and self._journal.grown()):
            self._exclusive("reading the catalog", self._refresh_and_catch_up)

        def look() -> list[Any]:
            return reader.execute(sql, values).fetchall()

        try:
            for reader in self._readers:
                if (found := reader.lock.try_run(look)) is not None:
                    return found
            reader = self._making_reader.run(self._new_reader)
            return reader.lock.run(look)
        except sqlite3.Error as error:
            if self._closed:
                raise StoreClosed("the store is closed") from error
            raise translated(error, "reading the catalog") from error

    def _new_reader(self) -> _Connection:
        if self._closed:
            raise StoreClosed("the store is closed")
        reader = self._connect(reading=True)
        self._readers = [*self._readers, reader]
        return reader

    def _connect(self, *, reading: bool = False) -> _Connection:
        for suffix in ("", "-wal", "-shm"):
            if self._path.with_name(NAME + suffix).is_symlink():
                raise StoreUnavailable(f"{NAME + suffix!r} is a symbolic link", hint="a store must not contain links")
        try:
            path: Path | str = self._path
            if self.is_read_only:
                path = (self._view / NAME if self._view else self._path).as_uri() + "?mode=ro&immutable=1"
            db = sqlite3.connect(
                path,
                uri=self.is_read_only,
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=128,
                factory=_Connection,
            )
            for pragma in (
                "synchronous = NORMAL", "wal_autocheckpoint = 0", "secure_delete = FAST", "cell_size_check = ON",
                "trusted_schema = OFF", "temp_store = MEMORY", "journal_size_limit = 0", f"query_only = {int(reading)}",
            ):  # fmt: skip
                db.execute(f"PRAGMA {pragma}")
        except sqlite3.Error as error:
            raise translated(error, "opening the catalog") from error
        return db

    def locks(self) -> Iterator[Mutex]:
        """Yield the locks whose owner is the only thread inside SQLite. New readers are added under the second."""
        yield self._mutex
        yield self._making_reader
        for reader in self._readers:
            yield reader.lock

    def renew(self) -> None:
        """In a child: leave the connections to the parent, without closing them. New ones are opened on first use."""
        if not self._closed:
            _inherited.append((self._writer, self._readers))
            self._view, self._seen_files = None, None  # they belong to the parent
            self._readers = []
            self._is_forked = True
            with contextlib.suppress(OSError):  # already closed, if this is repeated after an interrupt
                os.close(self._lock)  # otherwise the lock would outlive a parent that dies while holding it
            self._lock = -1
            with contextlib.suppress(OSError):
                self._journal.close()

    def _take_own_files(self) -> None:
        self._lock = self._open_lock()
        self._journal = Journal(self._folder, self._disk)
        self._reserve = Reserve(self._folder, self._disk)

    def _take_own_connections(self) -> None:
        if self.is_read_only:
            del self._writer  # it belongs to the parent and stays open
            self._is_forked = False
            return
        self._writer = self._connect()
        self._is_forked = False
        self._refresh_and_catch_up()


def _is_later(name: str) -> bool:
    """Return whether a store creates this file only after the tables of its catalog."""
    return name != LOCK and not name.startswith(NAME)


def translated(error: sqlite3.Error, doing: str) -> StoreError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return Damaged(f"the catalog is damaged: {error}", hint="restore it from an export, or open a new store")
    return StoreUnavailable(f"the catalog failed while {doing}: {error}", hint="check the folder and try again")


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether SQLite reports a damaged file, as opposed to one that is busy, full or misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _remove_folder(folder: Path, process: int) -> None:
    """Remove a private copy that was not closed, unless in a child process: there it belongs to the parent."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _lost_text(sizes: Collection[int]) -> str:
    places = "1 place" if len(sizes) == 1 else f"{len(sizes)} places"
    return f"{sum(sizes)} bytes in {places}; the puts recorded there are lost"


_inherited: list[object] = []
