"""The database of the embedded catalog: SQLite in WAL mode with a journal in front of it, under one lock.

A writer takes the store's lock (a fair file lock, so SQLite never sees a contended write), and first applies the
records of the journal. A reader checks whether the journal has grown, and if so applies it too. Only the holder of the
lock runs checkpoints, and automatic checkpoints are off: SQLite before 3.51.3 may corrupt a WAL that two connections
reset at once.

SQLite does not sync commits (`synchronous=NORMAL`): if durability requires it, `_settle` syncs the WAL. Until then the
journal has the same records, and after a power cut they are applied once more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from coatcheck.errors import Damaged, StoreClosed, StoreError, StoreFull, StoreUnavailable, read_only, storage_error
from coatcheck.refs import Blob
from coatcheck.storage import Entry, rows, schema
from coatcheck.storage.changes import Changes, is_damage
from coatcheck.storage.disk import FILES, FOLDERS, Disk, open_root
from coatcheck.storage.forks import Mutex, unwatch, watch
from coatcheck.storage.journal import NAME as JOURNAL
from coatcheck.storage.journal import START, Journal
from coatcheck.storage.records import Records
from coatcheck.storage.reserve import Reserve
from coatcheck.storage.rows import Row

NAME = "catalog.sqlite"
LOCK = "lock"
_PIECE = 1024 * 1024
_LOST = "lost "  # key prefix in `meta` for damage in a journal: its id and the offset; the value is a number of bytes
_LOG: Final = logging.getLogger("coatcheck")
_T = TypeVar("_T")


class _Connection(sqlite3.Connection):
    """A connection with a lock for its user. The lock knows its owner, so an interrupt cannot lose it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = threading.RLock()
        self._is_owned: Callable[[], bool] = cast(Any, self.lock)._is_owned

    def release(self) -> None:
        """Release the connection, if this thread owns it."""
        if self._is_owned():
            self.lock.release()


class Database:
    """Connections, lock and journal of one store. Safe across threads, processes and forks."""

    rank = 2

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
        self._recent: dict[str, Blob] = {}  # large blobs that this process put since it last applied the journal
        self._pending: dict[str, list[Entry]] = {}  # refs put since then, by the first characters of their ids
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
        self._changes = Changes(self._writer, self._is_readable)
        self._records = Records(self._writer, self._changes)
        self._prepare()

    def _prepare(self) -> None:
        is_new = self._writer.execute("PRAGMA user_version").fetchone()[0] == 0
        if is_new:
            self._check_new()
            self._writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._writer.execute("PRAGMA journal_mode = WAL")
        schema.migrate(self._writer, self._disk)
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
            with reader.lock:
                reader.close()
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
            if self._is_forked:
                self._take_own_connections()
            if self.is_read_only:
                self._look()
            return work()

        try:
            return self._mutex.run(locked)
        except OSError as error:
            raise storage_error(error, doing) from error
        except sqlite3.Error as error:
            raise _translated(error, doing) from error

    def _leave(self) -> None:
        """Clean up before the mutex is released, however the work ended: roll back and release the file lock."""
        with contextlib.suppress(sqlite3.Error):
            if hasattr(self, "_writer") and self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _change(
        self,
        doing: str,
        work: Callable[[], _T],
        *,
        durable: bool = True,
        always: bool = False,
        freeing: bool = False,
        adding: bool = False,
    ) -> _T:
        """Run `work` in one transaction, after applying the journal. Changes that free space may use the reserve;
        changes that add to the store fail until the reserve is full again."""

        self._check_writable(doing)

        def change() -> _T:
            self._refresh_and_catch_up()
            if adding and self._journal.strained:
                self._reserve.fill(self._journal)
            with self._roomy() if freeing else contextlib.nullcontext():
                answer = self._transaction(work)
                if durable:
                    self._sync_wal(always=always)
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

    def _look(self) -> None:
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
        if (wal and wal.st_size) or (journal and journal.st_size > START) or self._version() < len(schema.STEPS):
            self._view = Path(tempfile.mkdtemp(prefix="coatcheck-"))
            weakref.finalize(self, _remove_folder, self._view, os.getpid())
            for name, info in zip(names, found, strict=True):
                if info:
                    shutil.copyfile(self._path.with_name(name), self._view / name)
            (self._view / LOCK).touch()
            Database(self._view, open_root(self._view, LOCK, NAME), Disk(durable=False)).close()
        self._writer = self._connect(reading=True)
        schema.migrate(self._writer, self._disk)  # only raises, if the format is too new or not ours
        self._changes = Changes(self._writer, self._is_readable)
        self._records = Records(self._writer, self._changes)
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
        self._journal.refresh()
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
                try:
                    entry, heal, grace = rows.unpack(record)
                except (ValueError, TypeError, struct.error) as error:
                    raise Damaged("the journal contains an invalid record", hint="restore the store") from error
                self._changes.put(entry, heal=heal, grace=grace)
            at = behind
            if count >= most or at - start >= size:
                break
        if lost:
            self._note_loss(lost)
        self._writer.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("journal", journal.journal_id), ("offset", at)]
        )
        return at

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
        # Clear the caches first, then mark the journal as seen: an interrupt in between costs a check, not a put.
        self._recent.clear()
        self._pending.clear()
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
        if self._path.with_name(NAME + "-wal").stat().st_size > self._reserve.wal_limit:
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

    def _query(self, sql: str, values: tuple[Any, ...] = (), *, settled: bool = True) -> list[Row]:
        """Return the rows of a query, after applying the journal."""
        if self.is_read_only:
            return self._exclusive("reading the catalog", lambda: self._writer.execute(sql, values).fetchall())
        if self._is_forked or (settled and not self._closed and self._journal.grown()):
            self._exclusive("reading the catalog", self._refresh_and_catch_up)
        reader: _Connection | None = None
        try:
            try:
                for reader in self._readers:
                    if reader.lock.acquire(blocking=False):
                        break
                else:
                    reader = self._making_reader.run(self._new_reader)
                    reader.lock.acquire()
                return reader.execute(sql, values).fetchall()
            finally:
                if reader is not None:
                    reader.release()
        except sqlite3.Error as error:
            if self._closed:
                raise StoreClosed("the store is closed") from error
            raise _translated(error, "reading the catalog") from error
        finally:
            if reader is not None:
                reader.release()

    def _new_reader(self) -> _Connection:
        if self._closed:
            raise StoreClosed("the store is closed")
        reader = self._connect(reading=True)
        self._readers = [*self._readers, reader]
        return reader

    def _pages(self, table: str, key: str, columns: str) -> Iterator[Row]:
        """Yield all rows of a table in key order, page by page, so that no reader keeps the WAL from being reset."""
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
            raise _translated(error, "opening the catalog") from error
        return db

    def pause(self) -> None:
        """Before a fork: wait until no thread is inside SQLite, and block all threads."""
        self._mutex.acquire()
        self._making_reader.acquire()
        for reader in self._readers:
            reader.lock.acquire()

    def resume(self) -> None:
        for reader in self._readers:
            reader.lock.release()
        self._making_reader.release()
        self._mutex.release()

    def renew(self) -> None:
        """In a child: leave the connections to the parent, without closing them. New ones are opened on first use."""
        if not self._closed:
            _inherited.append((self._writer, self._readers))
            self._view, self._seen_files = None, None  # they belong to the parent
            self._readers = []
            self._is_forked = True
            os.close(self._lock)  # otherwise the lock would outlive a parent that dies while holding it
            self._lock = -1
            self._journal.close()
        self._making_reader.release()
        self._mutex.release()

    def _take_own_files(self) -> None:
        self._lock = self._open_lock()
        self._journal = Journal(self._folder, self._disk)
        self._reserve = Reserve(self._folder, self._disk)
        self._recent, self._pending = {}, {}

    def _take_own_connections(self) -> None:
        if self.is_read_only:
            del self._writer  # it belongs to the parent and stays open
            self._is_forked = False
            return
        self._writer = self._connect()
        self._changes = Changes(self._writer, self._is_readable)
        self._records = Records(self._writer, self._changes)
        self._is_forked = False
        self._refresh_and_catch_up()


def _is_later(name: str) -> bool:
    """Return whether a store creates this file only after the tables of its catalog."""
    return name != LOCK and not name.startswith(NAME)


def _translated(error: sqlite3.Error, doing: str) -> StoreError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return Damaged(f"the catalog is damaged: {error}", hint="restore it from an export, or open a new store")
    return StoreUnavailable(f"the catalog failed while {doing}: {error}", hint="check the folder and try again")


def _remove_folder(folder: Path, process: int) -> None:
    """Remove a private copy that was not closed, unless in a child process: there it belongs to the parent."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _lost_text(sizes: Collection[int]) -> str:
    places = "1 place" if len(sizes) == 1 else f"{len(sizes)} places"
    return f"{sum(sizes)} bytes in {places}; the puts recorded there are lost"


_inherited: list[object] = []
