"""The catalog of a folder: SQLite with a write-ahead log (WAL).

Two connections: one writes, one reads, each used by one thread at a time. A change is one
transaction (`BEGIN IMMEDIATE`), and SQLite syncs it before it is visible: `synchronous=FULL` for
the durability `power`. With `process` it is `NORMAL`, which survives the end of the process. A read
asks the database, so it sees what other processes have committed.

The store's lock (`flock` on the file `lock`) orders writers fairly. It is also held for
checkpoints: SQLite before 3.51.3 may corrupt a WAL that two connections reset at once.

SQLite connections must not be carried across a fork, so they are closed before one. Parent and
child open new ones on their next call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from coatcheck.deferred import logger
from coatcheck.errors import NotFound, StoreClosed, StoreUnavailable, read_only, storage_error
from coatcheck.storage.disk import FILES, FOLDERS, Connection, Disk, file_uri, open_root
from coatcheck.storage.entries import NO_LIMITS, Effect, Entry, Freed, Limits
from coatcheck.storage.files import FileBlobs
from coatcheck.storage.forks import RLock, unwatch, watch
from coatcheck.storage.reserve import Reserve
from coatcheck.storage.sqlite import SqliteCatalog
from coatcheck.storage.sqlite_rows import Values, inside_another_call, translated
from coatcheck.storage.sqlite_schema import migrate
from coatcheck.storage.wal import LogIndex, lost_frames, read_index, read_salts

NAME = "catalog.sqlite"
LOG = NAME + "-wal"
INDEX = NAME + "-shm"
LOCK = "lock"
INLINE_LIMIT: Final = 128 * 1024
# seconds to wait for a lock inside SQLite, which is only held while a process opens or closes
_PATIENCE: Final = 30.0
_VACUUMED: Final = 64  # pages returned to the file system in one step of compacting
_STEPS: Final = 16  # such steps while others wait
_LOST: Final = "lost_frames"  # key in `meta`
_T = TypeVar("_T")
_in_use: Counter[tuple[int, int]] = Counter()
"""How often this process has opened each database, by device and inode."""


class FolderCatalog(SqliteCatalog):
    """A catalog in a folder, safe across threads, processes and forks."""

    inline_limit = INLINE_LIMIT
    rank = 2

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        # Called before a ref to an existing copy is added, and always before a copy replaces
        # another.
        self.sync_copy: Callable[..., None] = lambda blob, always=False: None
        self._path = root / NAME
        self.uri_prefix = f"{file_uri(self._path)}#blob="
        self._folder = folder
        self._disk = disk
        self._reserve = Reserve(folder, disk)
        self._writing = threading.RLock()
        self._reading = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._lock_file = -1
        self._inside = 0  # the thread that holds the store's lock
        self._batch = threading.local()
        self._has_failed = False  # whether the WAL may have pages that a failed sync has lost
        self._key = (0, 0)
        self._is_full = True  # whether the connection that writes has synchronous=FULL
        self._closed = False
        self.is_read_only = False
        self._seen: object = (
            None  # on a read-only file system: state of the files when the connection was opened
        )
        try:
            with contextlib.suppress(FileExistsError):
                os.close(disk.create(LOCK, folder))
                # First, because the lock file identifies the folder as a store.
                disk.sync(folder, always=True)
            self._open_lock_file()
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self.is_read_only = True
        try:
            self._exclusive("opening the store", lambda: None)
        except BaseException:
            self._close_files()
            raise
        watch(self)

    def close(self) -> None:
        with self._writing, self._reading:
            if not self._closed:
                self._closed = True
                self._close_files()
                os.close(self._folder)
                unwatch(self)

    # Locks and connections

    def _exclusive(self, doing: str, work: Callable[[], _T]) -> _T:
        """Run `work` while holding the store's lock. An interrupt at any moment releases it:
        nothing between `try` and the calls in `finally` runs a signal handler."""
        try:
            with self._writing:
                if self._closed:
                    raise StoreClosed("the store is closed")
                if self._inside:
                    raise inside_another_call()
                self._open_lock_file()
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX)
                    self._inside = threading.get_ident()
                    if self.is_read_only:
                        self._open_read_only()
                    elif self._writer is None:
                        self._open_writer()
                    return work()
                finally:
                    self._inside = 0
                    fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        except OSError as error:
            raise storage_error(error, doing) from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translated(error, doing) from error

    def _open_lock_file(self) -> None:
        if self._lock_file < 0:
            mode = os.O_RDONLY if self.is_read_only else os.O_RDWR
            self._lock_file = os.open(
                LOCK, mode | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder
            )

    def _open_writer(self) -> None:
        """Open the connection that writes, and create the database if the store is new."""
        # The files that SQLite creates beside the database need space.
        if self._reserve.is_needed():
            self._reserve.release()
        with contextlib.suppress(FileExistsError):
            os.close(self._disk.create(NAME, self._folder))
            # Before SQLite creates its files: alone, they are not a store.
            self._disk.sync(self._folder, always=True)
        info = os.stat(NAME, dir_fd=self._folder, follow_symlinks=False)
        if not info.st_size:
            self._check_new()  # before SQLite opens it: SQLite removes the WAL of an empty database
        key = info.st_dev, info.st_ino
        index = None if _in_use[key] else read_index(INDEX, self._folder)
        salts = read_salts(LOG, self._folder)
        # first, because SQLite may find a complete commit of a process that was killed before its
        # sync
        self.confirm()
        db = self._connect()
        try:
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                self._check_new()
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnavailable(
                    "the file system does not support a write-ahead log", hint="use a local disk"
                )
            migrate(db, self._disk)
            # The process that created the WAL may not have synced its name.
            self._disk.sync(self._folder, always=True)
            if index is not None and index.frames > index.copied:
                self._check_log(db, index, salts)
        except BaseException:
            db.close()
            raise
        self._writer, self._key, self._is_full = db, key, True
        _in_use[key] += 1
        with contextlib.suppress(OSError):
            self._reserve.fill()

    def _connect(self, options: str = "") -> sqlite3.Connection:
        for name in (NAME, LOG, INDEX):
            if self._path.with_name(name).is_symlink():
                raise StoreUnavailable(
                    f"{name!r} is a symbolic link", hint="a store must not contain links"
                )
        db = sqlite3.connect(
            file_uri(self._path) + options,
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )
        db.row_factory = sqlite3.Row
        try:
            db.execute("PRAGMA synchronous = FULL")
            # On macOS, the disk empties its own cache too.
            db.execute(f"PRAGMA fullfsync = {int(self._disk.durable)}")
            db.execute(f"PRAGMA checkpoint_fullfsync = {int(self._disk.durable)}")
            db.execute(f"PRAGMA wal_autocheckpoint = {self._reserve.log_pages}")
            db.execute("PRAGMA secure_delete = FAST")
            db.execute("PRAGMA cell_size_check = ON")
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("PRAGMA cache_size = -8000")
        except BaseException:
            db.close()
            raise
        return db

    def _check_new(self) -> None:
        """Raise if the catalog has no tables but the folder has files of a store with tables:
        content was lost."""
        found = set(os.listdir(self._folder))
        log = self._path.with_name(LOG)
        is_cut = self._path.stat().st_size == 0 and log.exists() and log.stat().st_size > 0
        later = {
            name
            for name in found
            if FILES.fullmatch(name) and name != LOCK and not name.startswith(NAME)
        }
        # What a store creates after the tables of its catalog.
        beside = sorted(later | found.intersection(FOLDERS))
        if beside or is_cut:
            raise StoreUnavailable(
                "the catalog of the store is empty, but the folder contains "
                f"{', '.join(beside) or LOG!r}",
                hint=f"restore {NAME} from a backup, or use a new folder; nothing was changed",
            )

    def _close_files(self) -> None:
        """Close the connections and the lock file. The caller holds both locks, or nobody else has
        this object."""
        reader, self._reader = self._reader, None
        writer, self._writer = self._writer, None
        self._seen = None
        for connection in (reader, writer):
            if connection is not None:
                connection.close()
        if writer is not None and not self.is_read_only:
            _in_use[self._key] -= 1
        lock_file, self._lock_file = self._lock_file, -1
        if lock_file >= 0:
            os.close(lock_file)

    def locks(self) -> list[RLock]:
        return [self._writing, self._reading]

    def before_fork(self) -> None:
        # Otherwise this thread forks in the middle of a call, and the parent completes it.
        if not self._inside:
            self._close_files()

    def after_fork(self) -> None:
        if self._writer is not None:
            # The parent's: never used or closed here.
            _inherited.append((self._writer, self._reader))
            self._reader, self._writer, self._lock_file, self._inside = None, None, -1, 0

    # Reading

    def _query(self, sql: str, values: Values = (), *, apart: bool = False) -> list[Any]:
        """Return the rows of a query. Inside a change, it sees the change, unless it is kept
        `apart`."""
        if self._inside == threading.get_ident() and (self.is_read_only or not apart):
            return self._run(sql, values).fetchall()
        if self.is_read_only:
            return self._exclusive("reading the catalog", lambda: self._run(sql, values).fetchall())
        if self._writer is None and not self._closed:  # after a fork
            self._exclusive("reading the catalog", lambda: None)
        try:
            with self._reading:
                if self._closed:
                    raise StoreClosed("the store is closed")
                if self._reader is None:
                    self._reader = self._connect()
                return self._reader.execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translated(error, "reading the catalog") from error

    # Writing

    def change(
        self,
        doing: str,
        work: Callable[[], _T],
        *,
        session_id: str | None = None,
        effect: Effect | None = None,
    ) -> _T:
        """Run `work` in one transaction. Changes that free space may use the reserve. Changes that
        add to the store fail until the reserve is full again."""
        self._check_writable(doing)

        def change() -> _T:
            if effect == "add" and not self._reserve.is_full():
                self._reserve.fill()
            if effect == "free":
                with self._roomy():
                    return self._transaction(work, self._is_synced(effect))
            return self._transaction(work, self._is_synced(effect))

        return self._exclusive(doing, change)

    def _is_synced(self, effect: Effect | None) -> bool:
        """Return whether a change with this effect must survive a power cut when it returns."""
        return effect == "move" or (self._disk.durable and not self._is_batching())

    def _transaction(self, work: Callable[[], _T], is_synced: bool) -> _T:
        db = self._opened_writer()
        if self._has_failed:
            self._mend_log(db)
        self._set_synchronous(is_synced)
        changes = db.total_changes
        try:
            db.execute("BEGIN IMMEDIATE")
            answer = work()
            self._disk.commit(db)
        except sqlite3.OperationalError as error:
            self._has_failed = (error.sqlite_errorname or "").startswith("SQLITE_IOERR")
            raise
        finally:
            if db.in_transaction:
                try:
                    db.execute("ROLLBACK")
                except sqlite3.Error:
                    pass  # the error that led here says more
        if is_synced and db.total_changes == changes:
            # what it has read may be a commit of another process that does not sync
            self.make_durable()
        return answer

    def _set_synchronous(self, is_synced: bool) -> None:
        if self._is_full != is_synced:
            self._run(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_full = is_synced

    def _mend_log(self, db: sqlite3.Connection) -> None:
        """Copy the WAL to the database and begin a new one. After a failed sync the system may have
        dropped pages that it could not write, and a second sync would not report that."""
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise StoreUnavailable(
                "an earlier sync of the catalog failed", hint="try again", may_retry=True
            )
        self._has_failed = False

    @contextmanager
    def _roomy(self) -> Iterator[None]:
        """Release the reserve while inside the context, if the disk is full."""
        if self._reserve.is_needed():
            self._reserve.release()
            with contextlib.suppress(sqlite3.OperationalError):
                self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        try:
            yield
        finally:
            if not self._reserve.is_full():
                with contextlib.suppress(sqlite3.OperationalError):
                    self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                with contextlib.suppress(OSError):
                    self._reserve.fill()

    def put(
        self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False
    ) -> bool:
        self._check_writable("putting an artifact")
        if (reuse or heal) and entry.blob.coding != "inline":
            with contextlib.suppress(NotFound):  # removed or moved: the transaction checks its row
                self.sync_copy(entry.blob, always=heal)
        # Meanwhile another process may have put the same content without syncing its copy: a synced
        # one replaces it.
        replaces = heal or (self._disk.durable and not reuse and entry.content is None)
        return super().put(entry, limits=limits, reuse=reuse, heal=replaces)

    def confirm(self) -> None:
        self._check_writable("putting an artifact")
        if self._disk.durable and not self._is_batching():
            self.make_durable()

    def make_durable(self) -> None:
        """Sync the WAL. Only the WAL: closing a second descriptor of the database would drop
        SQLite's locks."""
        if self.is_read_only:
            return
        try:
            file = os.open(LOG, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                self._disk.sync(file, always=True)
            finally:
                os.close(file)
        except FileNotFoundError:
            return  # the database has everything
        except OSError as error:
            self._has_failed = True
            raise storage_error(error, "syncing the catalog") from error

    @contextmanager
    def batch(self) -> Iterator[None]:
        if self._is_batching():
            yield  # the outer batch acknowledges
            return
        self._batch.is_open = True
        try:
            yield
        finally:
            self._batch.is_open = False
        self.confirm()

    def _is_batching(self) -> bool:
        return getattr(self._batch, "is_open", False)

    def remove(
        self,
        session_id: str,
        digest: str | None = None,
        *,
        name: str | None = None,
        end: bool = False,
    ) -> Freed:
        return self._made_durable(super().remove(session_id, digest, name=name, end=end))

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        return self._made_durable(super().expire(at, forget_before=forget_before, dry_run=dry_run))

    def _made_durable(self, freed: Freed) -> Freed:
        """Sync a removal, whatever the durability: a power cut must not restore rows whose files
        are deleted."""
        if freed.blobs and not self._disk.durable:
            self.make_durable()
        return freed

    def _in_steps(
        self, doing: str, step: Callable[[int, Any], tuple[Freed, Any]], start: object = True
    ) -> Freed:
        def fitting(limit: int, place: object) -> tuple[Freed, Any]:
            return step(
                limit if self._reserve.is_full() else min(limit, self._reserve.rows_at_once), place
            )

        return super()._in_steps(doing, fitting, start)

    # Upkeep

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        def check() -> list[str]:
            return self._check_losses(repair=repair) + self._check(repair, until)

        if self.is_read_only and not repair:
            return self._exclusive("checking the catalog", check)
        return self.change("checking the catalog", check)

    def compact(self) -> None:
        self._check_writable("compacting the catalog")
        while self._exclusive("compacting the catalog", self._compact):
            pass

    def _compact(self) -> bool:
        """Return some free pages to the file system. Returns whether there may be more."""
        with self._roomy():
            self._set_synchronous(self._disk.durable)
            before = self._free_pages()
            for _ in range(_STEPS if before else 0):
                # `execute` frees one.
                self._opened_writer().executescript(f"PRAGMA incremental_vacuum({_VACUUMED})")
            after = self._free_pages()
            if 0 < after < before:
                return True
            self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return False

    def _free_pages(self) -> int:
        return int(self._one("PRAGMA freelist_count")[0])

    def _check_log(self, db: sqlite3.Connection, index: LogIndex, salts: bytes | None) -> None:
        """Find out whether SQLite has recovered the whole WAL after a crash, and keep a loss for
        `verify`."""
        try:
            busy, found, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError:  # for example a full disk
            return
        lost = 0 if busy else lost_frames(index, salts, found)
        if not lost:
            return
        db.execute(
            "INSERT INTO meta VALUES (:key, :lost) ON CONFLICT (key)"
            " DO UPDATE SET value = value + excluded.value",
            {"key": _LOST, "lost": lost},
        )
        logger().warning(
            "The end of the store's write-ahead log is missing or damaged: "
            "its newest changes are lost."
        )

    def _check_losses(self, *, repair: bool) -> list[str]:
        """Return what was lost at the end of the WAL. With `repair`, it is not reported again."""
        found = self._one("SELECT value FROM meta WHERE key = :key", {"key": _LOST})
        if found is None:
            return []
        if repair:
            self._run("DELETE FROM meta WHERE key = :key", {"key": _LOST})
        pages = f"{found['value']} page" + ("" if found["value"] == 1 else "s")
        return [
            (
                "the end of the write-ahead log was missing or damaged: "
                f"the changes in its last {pages} are lost"
            )
        ]

    # Read-only file systems

    def _check_writable(self, doing: str) -> None:
        if self.is_read_only and not self._closed:
            raise read_only(doing)

    def _open_read_only(self) -> None:
        """Open the database, or open it again if its files have changed. The caller holds the lock:
        nobody writes.

        A database without a WAL is read as it is. SQLite can read a WAL without writing if its
        index exists."""
        found = [self._state(name) for name in (NAME, LOG)]
        if found == self._seen:
            return
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        has_log = found[1] is not None and found[1][1] > 0
        if has_log and self._state(INDEX) is None:
            raise StoreUnavailable(
                f"the store is on a read-only file system, and {LOG!r} has changes that must be "
                "applied first",
                hint="copy the folder to a file system that can be written, and open the copy",
            )
        db = self._connect("?mode=ro" if has_log else "?mode=ro&immutable=1")
        try:
            migrate(db, self._disk)  # only raises, if the format is too new or not ours
        except BaseException:
            db.close()
            raise
        self._writer, self._seen = db, found

    def _state(self, name: str) -> tuple[int, int, int] | None:
        try:
            info = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_size, info.st_mtime_ns


_inherited: list[object] = []


def open_folder_store(root: Path, disk: Disk) -> tuple[FileBlobs, FolderCatalog]:
    """Open a store in a folder: large blobs in `blobs/`, the rest in the catalog, all under one
    lock."""
    folder = open_root(root, LOCK, NAME)
    try:
        catalog = FolderCatalog(root, folder, disk)
    except BaseException:
        os.close(folder)
        raise
    try:
        blobs = FileBlobs(root, folder, disk, is_read_only=catalog.is_read_only)
        catalog.sync_copy = blobs.sync
        return blobs, catalog
    except BaseException:
        catalog.close()
        raise
