"""The embedded catalog in a folder: SQLite in WAL mode with a journal in front of it, under one lock.

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
import json
import os
import sqlite3
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from coatcheck.deferred import logger
from coatcheck.errors import (
    Damaged,
    NotFound,
    StoreClosed,
    StoreError,
    StoreUnavailable,
    read_only,
    storage_error,
)
from coatcheck.ids import MIN_PREFIX
from coatcheck.refs import Blob
from coatcheck.storage.catalog import (
    NO_LIMITS,
    PARENTS,
    Effect,
    Entry,
    Freed,
    Known,
    Limits,
    Note,
    SessionInfo,
    entry_of,
    newest_of_each,
    ref_fields,
)
from coatcheck.storage.disk import FILES, FOLDERS, Disk, open_root
from coatcheck.storage.files import FileBlobs
from coatcheck.storage.forks import Mutex, unwatch, watch
from coatcheck.storage.journal import NAME as JOURNAL
from coatcheck.storage.journal import START, Journal, Position, Reserve
from coatcheck.storage.sqlite import HIGHEST, OF_SESSION, SqliteCatalog, Values, is_migrated, migrate, translated

NAME = "catalog.sqlite"
LOCK = "lock"
INLINE_LIMIT: Final = 128 * 1024
_PIECE = 1024 * 1024
_PAGES: Final = 64  # pages returned to the file system in one step of compacting
_LOST = "lost "  # key prefix in `meta` for damage in a journal: its id and the offset; the value is a number of bytes
_ENDED: Final = b""
"""The id of a session that has ended and still has refs is a BLOB. In SQLite's order every BLOB is at or after this
value, and all text is before it."""
_SIZES: Final = struct.Struct("<II")
_T = TypeVar("_T")


class _Connection(sqlite3.Connection):
    """A connection with a lock for its user."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = Mutex()


class FolderCatalog(SqliteCatalog):
    """A catalog in a folder, safe across threads, processes and forks. Puts go through the journal."""

    inline_limit = INLINE_LIMIT
    rank = 2

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        self._recent: dict[str, Blob] = {}  # large blobs that this process put since it last applied the journal
        self._pending: dict[str, list[Entry]] = {}  # refs put since then, by the first characters of their ids
        self._batch = threading.local()
        self.sync_copy: Callable[[Blob], None] = lambda blob: None  # called before a ref to an existing copy is added
        self._path = root / NAME
        self.uri_prefix = f"{self._path.as_uri()}#blob="
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

    def look(self, digest: str, lineage: Sequence[str], *, blob: bool) -> Known:
        """Return what this process knows without applying the journal: puts of others may be missing."""
        start = digest[:MIN_PREFIX]
        low = bytes.fromhex(start)
        entries: dict[str, list[Entry]] = {each: [] for each in lineage}
        for one in reversed(self._pending.get(start, ())):
            if one.ref.session_id in entries:
                entries[one.ref.session_id].append(one)
        # Most puts are of new content: a look at the blobs shows that in a third of the time of the full query.
        if self._query("SELECT 1 FROM blob WHERE digest BETWEEN ? AND ? LIMIT 1", (low, low + HIGHEST), settled=False):
            for each, found in entries.items():
                try:
                    found += self._under(each, start, each == lineage[0], settled=False)
                except Damaged:  # this put may repair it
                    found += self._under(each, start, False, settled=False)
        copy = (self._recent.get(digest) or self.blob(digest, settled=False)) if blob else None
        if not any(entries.values()):
            return Known([], (), copy, False)
        ids = {one.ref.artifact_id for found in entries.values() for one in found}
        # Asked last: then what was found is durable too.
        return Known(newest_of_each(entries[lineage[0]]), ids, copy, not self._is_behind())

    def put(self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        guarded = limits.store_quota is not None or entry.session.quota is not None
        record = _pack(entry, heal=heal, grace=limits.grace)
        self._check_writable("putting an artifact")
        if reuse and entry.blob.coding != "inline":
            with contextlib.suppress(NotFound):  # removed or moved: its row is checked below
                self.sync_copy(entry.blob)

        def check() -> bool:
            if reuse and not self._has_copy(entry.blob):
                return False
            self._check_quotas(entry, limits)
            return True

        def append() -> Position | None:
            position = self._append(record, check if guarded or reuse else None)
            if position is not None:
                if entry.content is None:
                    self._recent[entry.blob.digest] = entry.blob
                self._pending.setdefault(entry.ref.artifact_id[:MIN_PREFIX], []).append(entry)
            return position

        position = self._exclusive("putting an artifact", append)
        if getattr(self._batch, "is_open", False):
            self._batch.position = position or self._batch.position
        elif position is not None and self._disk.durable:
            self._sync_journal(position)
        return position is not None

    @contextmanager
    def batch(self) -> Iterator[None]:
        if getattr(self._batch, "is_open", False):
            yield  # the outer batch acknowledges
            return
        self._batch.is_open, self._batch.position = True, None
        try:
            yield
        finally:
            self._batch.is_open = False
        if self._batch.position is not None:
            self._sync_journal(self._batch.position)

    def remove(
        self, session_id: str, digest: str | None = None, *, name: str | None = None, end: bool = False
    ) -> Freed:
        if not end:
            return self._made_durable(super().remove(session_id, digest, name=name))

        def end_some(limit: int) -> tuple[Freed, bool]:
            """Give the session an id that cannot be found, and remove as many refs as one change may."""
            self._stop_lending(session_id)
            where = "SET session_id = CAST(session_key AS BLOB), parent = NULL WHERE session_id = ?"
            self._run(f"UPDATE session {where}", (session_id,))
            return self._end_next(limit)

        return self._made_durable(self._in_steps("forgetting", end_some))

    def _end_next(self, limit: int) -> tuple[Freed, bool]:
        """Remove some refs of a session that has ended, and the session itself with the last of them. Returns what was
        freed and whether there is more to remove."""
        found = self._run("SELECT session_id FROM session WHERE session_id >= ? LIMIT 2", (_ENDED,)).fetchall()
        if not found:
            return Freed(), False
        ((session_id,), *others) = found
        which = f"SELECT seq, digest, size, gone FROM ref WHERE {OF_SESSION} ORDER BY seq LIMIT ?"
        refs = self._run(which, (session_id, limit)).fetchall()
        if refs:
            self._run(f"DELETE FROM ref WHERE {OF_SESSION} AND seq <= ?", (session_id, refs[-1][0]))
        is_over = len(refs) < limit
        if is_over:
            self.drop(SessionInfo(session_id))
        else:
            self.drop(*(Note(session_id, f"shown/{digest.hex()}") for _, digest, *_ in refs))
        freed = self._let_go_of([(size, session_id, digest) for _, digest, size, gone in refs if gone is None])
        return freed, bool(others) or not is_over

    def _in_steps(self, doing: str, step: Callable[[int], tuple[Freed, bool]]) -> Freed:
        def fitting(limit: int) -> tuple[Freed, bool]:
            return step(min(limit, self._reserve.batch[0]) if self._journal.strained else limit)

        return super()._in_steps(doing, fitting)

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        # First the sessions whose end a crash interrupted.
        freed = Freed() if dry_run else self._in_steps("forgetting", self._end_next)
        return self._made_durable(freed + super().expire(at, forget_before=forget_before, dry_run=dry_run))

    def _made_durable(self, freed: Freed) -> Freed:
        """Sync a removal, whatever the durability: a power cut must not restore rows whose files are deleted."""
        if freed.blobs and not self._disk.durable and not self.is_read_only:
            self._exclusive("forgetting", lambda: self._sync_wal(always=True))
        return freed

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        def check() -> list[str]:
            return self._check_losses(repair=repair) + self._check(repair, until)

        change = self._exclusive if self.is_read_only and not repair else self.change
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
        return int(self._one("PRAGMA freelist_count")[0])

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
        if (wal and wal.st_size) or (journal and journal.st_size > START) or not self._is_migrated():
            from shutil import copyfile
            from tempfile import mkdtemp

            self._view = Path(mkdtemp(prefix="coatcheck-"))
            weakref.finalize(self, _remove_folder, self._view, os.getpid())
            for name, info in zip(names, found, strict=True):
                if info:
                    copyfile(self._path.with_name(name), self._view / name)
            (self._view / LOCK).touch()
            type(self)(self._view, open_root(self._view, LOCK, NAME), Disk(durable=False)).close()
        self._writer = self._connect(reading=True)
        migrate(self._writer, self._disk)  # only raises, if the format is too new or not ours
        self._seen_files = seen

    def _stat(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        return None

    def _is_migrated(self) -> bool:
        with contextlib.closing(self._connect(reading=True)) as db:
            return is_migrated(db)

    def _drop_view(self) -> None:
        view, self._view = self._view, None
        self._seen_files = None
        if view is not None:
            _remove_folder(view, os.getpid())

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
        try:
            entry, heal, grace = _unpack(record)
        except (ValueError, TypeError, struct.error) as error:
            raise Damaged("the journal contains an invalid record", hint="restore the store") from error
        self._apply(entry, heal=heal, grace=grace)

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
        logger().warning("The store's journal is damaged: %s. A copy is kept as %r.", _lost_text(lost.values()), name)

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


def _remove_folder(folder: Path, process: int) -> None:
    """Remove a private copy that was not closed, unless in a child process: there it belongs to the parent."""
    if os.getpid() == process:
        from shutil import rmtree

        rmtree(folder, ignore_errors=True)


def _lost_text(sizes: Collection[int]) -> str:
    places = "1 place" if len(sizes) == 1 else f"{len(sizes)} places"
    return f"{sum(sizes)} bytes in {places}; the puts recorded there are lost"


_inherited: list[object] = []


def _pack(entry: Entry, *, heal: bool, grace: float) -> bytes:
    """Encode a put as a journal record: lengths, JSON, frames, content."""
    ref, blob, session = entry.ref, entry.blob, entry.session
    values = list(ref_fields(ref))
    values[PARENTS] = json.dumps(ref.parents) if ref.parents else ""
    head = json.dumps(
        [ref.artifact_id, ref.size_bytes, values, blob.coding, blob.place,
         session.session_id, session.parent, session.ttl, session.quota, heal, grace,
         entry.content is not None]
    ).encode()  # fmt: skip
    return b"".join((_SIZES.pack(len(head), len(blob.frames)), head, blob.frames, entry.content or b""))


def _unpack(record: bytes) -> tuple[Entry, bool, float]:
    """Decode the entry of a put, its `heal` flag, and its grace period."""
    head_size, frames_size = _SIZES.unpack_from(record)
    at = _SIZES.size + head_size
    digest, size, values, coding, place, *session, heal, grace, whole = json.loads(record[_SIZES.size : at])
    frames, content = record[at : at + frames_size], record[at + frames_size :]
    times = values[9], values[9], 0
    row = (0, bytes.fromhex(digest), size, *values, None, coding, place, frames, *session, *times)
    return entry_of((*row, content if whole else None)), heal, grace


def open_folder_store(root: Path, disk: Disk) -> tuple[FileBlobs, FolderCatalog]:
    """Open a store in a folder: large blobs in `blobs/`, the rest in the catalog, all under one lock."""
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
