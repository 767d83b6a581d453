"""The embedded catalog in a folder: SQLite in WAL mode with a journal in front of it, under one lock.

A writer takes the store's lock (a fair file lock, so SQLite never sees a contended write), and first applies the
records of the journal. A reader checks whether the journal has grown, and if so applies it too, except `fetch` and
`look`: they combine the database with the puts at the journal's end, which each process keeps in memory. Only the
holder of the lock runs checkpoints, and automatic checkpoints are off: SQLite before 3.51.3 may corrupt a WAL that two
connections reset at once.

SQLite does not sync commits (`synchronous=NORMAL`): if durability requires it, `_settle` syncs the WAL. Until then the
journal has the same records, and after a power cut they are applied again.
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
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

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
from coatcheck.ids import MIN_PREFIX, prefix_range
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
from coatcheck.storage.files import SAME_FOR, FileBlobs
from coatcheck.storage.forks import Mutex, unwatch, watch
from coatcheck.storage.journal import NAME as JOURNAL
from coatcheck.storage.journal import START, Journal, Position, Reserve
from coatcheck.storage.sqlite import (
    BY_DIGEST,
    HIGHEST,
    NEWEST,
    NEWEST_BRIEF,
    OF_SESSION,
    SqliteCatalog,
    Values,
    brief_entry_alone,
    entry_alone,
    is_migrated,
    migrate,
    translated,
)

NAME = "catalog.sqlite"
LOCK = "lock"
INLINE_LIMIT: Final = 128 * 1024
_PIECE = 1024 * 1024
_REMEMBERED: Final = 1_000  # entries that a connection keeps
_IS_STORED: Final = "SELECT 1 FROM blob WHERE digest BETWEEN ? AND ? LIMIT 1"
_STATE: Final = f"""SELECT (SELECT value FROM meta WHERE key = 'journal'),
    (SELECT value FROM meta WHERE key = 'offset'), s.session_key, s.ttl, s.used, EXISTS (SELECT 1 FROM {BY_DIGEST}
    WHERE ref.session_key = s.session_key AND digest BETWEEN ? AND ?)
    FROM (SELECT 1) LEFT JOIN session s ON s.session_id = ?"""
_PAGES: Final = 64  # pages returned to the file system in one step of compacting
_STEPS: Final = 16  # such steps while others wait
_LOST = "lost "  # key prefix in `meta` for damage in a journal: its id and the offset; the value is a number of bytes
_ENDED: Final = b""
"""The id of a session that has ended and still has refs is a BLOB. In SQLite's order every BLOB is at or after this
value, and all text is before it."""
_SIZES: Final = struct.Struct("<II")
INVALID: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error)
"""The errors that reading or applying a record raises if its values are not those of a put."""
_T = TypeVar("_T")


class _Read:
    """An entry that was read, without its content; the key of the content, if the database has it; until when a put of
    the same content need not compare it again (`time.monotonic`), and the entry for such a put."""

    __slots__ = ("blob_key", "entry", "same", "same_until")

    def __init__(self, entry: Entry, blob_key: int | None) -> None:
        self.entry, self.blob_key, self.same_until, self.same = entry, blob_key, 0.0, entry


class _Connection(sqlite3.Connection):
    """A connection with a lock for its user, and with what it has read: valid while the database has this version."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = Mutex()
        self.version = -1
        self.entries: dict[tuple[str, str, bool], _Read] = {}

    def refresh(self) -> bool:
        """Drop what was read from an older version of the database. Return whether it was still valid."""
        ((version,),) = self.execute("PRAGMA data_version").fetchall()
        if version == self.version:
            return True
        self.entries.clear()
        self.version = version  # last: what is read from here on is at least as new
        return False


class _Put(NamedTuple):
    """A record of the journal: where it ends, its entry, and whether it replaces a damaged copy."""

    end: int
    entry: Entry
    heal: bool

    def is_more_than(self, session_id: str, prefix: str) -> bool:
        """Return whether it is more than a new ref of this session to new content whose id begins like this."""
        ref, blob = self.entry.ref, self.entry.blob
        if self.heal or (blob.coding == "inline" and self.entry.content is None):  # the content is in the database
            return True
        return ref.session_id != session_id or not ref.artifact_id.startswith(prefix)


class _Tail:
    """The puts at the end of a journal: all from the offset where this view began up to `end`, and those that this
    process has appended since. The database may have applied some of them: its own offset tells."""

    def __init__(self, journal_id: bytes, end: int) -> None:
        self.journal_id = journal_id
        self.end = end
        self.puts: dict[str, list[_Put]] = {}  # by the first characters of their ids
        self.sessions: dict[str, tuple[float | None, float] | None] = {}
        """The time to live of each session according to its puts, and the time of its last put. None if its puts
        disagree about the former, or if it expired between them."""

    def add(self, end: int, entry: Entry, heal: bool) -> None:
        ref, info = entry.ref, entry.session
        self.puts.setdefault(ref.artifact_id[:MIN_PREFIX], []).append(_Put(end, entry, heal))
        known = self.sessions.get(info.session_id, (info.ttl, ref.created))
        if known is not None:
            last = _last_use(info.ttl, known[1], ref.created) if known[1] != ref.created else ref.created
            known = None if last is None or known[0] != info.ttl else (info.ttl, last)
        self.sessions[info.session_id] = known


class FolderCatalog(SqliteCatalog):
    """A catalog in a folder, safe across threads, processes and forks. Puts go through the journal."""

    inline_limit = INLINE_LIMIT
    rank = 2

    def __init__(self, root: Path, folder: int, disk: Disk) -> None:
        self._tail = _Tail(b"", 0)
        self._following = Mutex()  # held to add to the tail
        self._batch = threading.local()
        # Called before a ref to an existing copy is added, and always before a copy replaces another.
        self.sync_copy: Callable[..., None] = lambda blob, always=False: None
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
        later = {name for name in held if FILES.fullmatch(name) and name != LOCK and not name.startswith(NAME)}
        beside = sorted(later | held.intersection(FOLDERS))  # what a store creates after the tables of its catalog
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
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translated(error, doing) from error

    def _leave(self) -> None:
        """Clean up before the mutex is released, however the work ended: roll back and release the file lock."""
        self._inside = 0
        try:
            writer = getattr(self, "_writer", None)  # not yet, if it is being opened
            if writer is not None and writer.in_transaction:
                writer.execute("ROLLBACK")
        except sqlite3.Error:
            pass
        try:
            if self._lock >= 0:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError:
            pass

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
        known = self._tail.puts.get(start)
        puts = [one.entry for one in reversed(known)] if known else []
        is_stored, stored = self._alike(start, lineage)
        copy = None
        if blob and (puts or is_stored):
            copies = (one.blob for one in (*puts, *stored) if one.blob.place and one.blob.digest == digest)
            copy = next(copies, None) or self.blob(digest, settled=False)
        if not puts and not stored:
            return Known([], (), copy, False)
        own = entries = [*(one for one in puts if one.ref.session_id in lineage), *stored] if puts else stored
        if puts or len(lineage) > 1:
            own = [one for one in entries if one.ref.session_id == lineage[0]]
        if len(own) > 1:
            own = newest_of_each(own)
        # Checked last: then what was found is durable too.
        return Known(own, [one.ref.artifact_id for one in entries], copy, not self._is_behind())

    def _alike(self, start: str, lineage: Sequence[str]) -> tuple[bool, list[Entry]]:
        """Return whether the database has blobs whose digests begin alike, and the refs of these sessions to them:
        those of the first session with their content."""
        own = lineage[0], start, False

        def look(reader: _Connection) -> tuple[bool, list[Entry] | None]:
            if (known := self._read_again(reader, own, is_put=True)) is not None:
                return True, [known]
            # Most puts are of new content: a look at the blobs shows that in a third of the time of the full query.
            low = bytes.fromhex(start)
            if not reader.execute(_IS_STORED, (low, low + HIGHEST)).fetchall():
                return False, None
            return True, self._read_first(reader, own)

        try:
            is_stored, found = self._read(look) if self._is_direct() else (True, None)
            if not is_stored:
                return False, []
            if found is None:
                found = self._under(lineage[0], start, True, settled=False)
        except Damaged:  # this put may repair it
            found = self._under(lineage[0], start, False, settled=False)
        for each in lineage[1:]:
            found = [*found, *self._under(each, start, False, settled=False)]
        return True, found

    def _note_same(self, entry: Entry) -> None:
        if not entry.is_checked:
            for reader in self._readers:
                known = reader.entries.get((entry.ref.session_id, entry.ref.artifact_id[:MIN_PREFIX], False))
                if known is not None and known.entry.seq == entry.seq:
                    known.same = Entry(entry.ref, entry.blob, entry.session, None, None, entry.seq, True)
                    known.same_until = time.monotonic() + SAME_FOR

    def put(self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        guarded = limits.store_quota is not None or entry.session.quota is not None
        # Meanwhile another process may have put the same content without syncing its copy: a synced one replaces it.
        replaces = heal or (self._disk.durable and not reuse and entry.content is None)
        record = _pack(entry, heal=replaces, grace=limits.grace)
        self._check_writable("putting an artifact")
        if (reuse or heal) and entry.blob.coding != "inline":
            with contextlib.suppress(NotFound):  # removed or moved: its row is checked below
                self.sync_copy(entry.blob, always=heal)

        def check() -> bool:
            if reuse and not self._has_copy(entry.blob):
                return False
            self._check_quotas(entry, limits)
            return True

        def append() -> Position | None:
            position = self._append(record, check if guarded or reuse else None)
            if position is not None:
                self._following.run(lambda: self._add_own(position, entry, heal))
            return position

        position = self._exclusive("putting an artifact", append)
        if getattr(self._batch, "is_open", False):
            self._batch.position = position or self._batch.position
        elif position is not None and self._disk.durable:
            self._sync_journal(position)
        return position is not None

    def _add_own(self, position: Position, entry: Entry, heal: bool) -> None:
        tail = self._tail
        if tail.journal_id != position.journal_id:  # the records of the journal before are all applied
            tail = self._tail = _Tail(position.journal_id, START)
        tail.add(position.end, entry, heal)
        if tail.end == position.start:  # otherwise others have appended too, and a read adds everything from `end` on
            tail.end = position.end

    def fetch(self, session_id: str, prefix: str, *, brief: bool = False) -> list[Entry]:
        if self._is_direct() and (tail := self._follow()) is not None:
            found = self._read(lambda reader: (self._fetch(reader, tail, session_id, prefix, brief),))[0]
            if found is not None:
                return found
        return super().fetch(session_id, prefix, brief=brief)

    def _is_direct(self) -> bool:
        """Return whether this thread may use a reader without taking the lock first."""
        return self._inside != threading.get_ident() and not self.is_read_only and not self._is_forked

    def _follow(self) -> _Tail | None:
        """Return the tail of the journal with everything that was put before this call, or None if the database has to
        apply the journal first."""
        tail = self._tail
        if self._closed:
            return None
        if self._journal.ends_at(tail.journal_id, tail.end):
            return tail
        return self._following.run(lambda: self._extended(tail))

    def _extended(self, tail: _Tail) -> _Tail | None:
        records = self._journal.behind(tail.journal_id, tail.end)
        try:
            for end, record in records or ():
                entry, heal, _ = _unpack(record)
                tail.add(end, entry, heal)
                tail.end = end
        except (ValueError, TypeError, struct.error):
            return None
        return None if records is None else tail

    def _fetch(self, reader: _Connection, tail: _Tail, session_id: str, prefix: str, brief: bool) -> list[Entry] | None:
        """Do the same as `find`, with the tail of the journal instead of applying it. Return None if applying it would
        change more than this method considers."""
        puts = tail.puts.get(prefix[:MIN_PREFIX])
        if not puts:
            return self._fetch_stored(reader, tail, session_id, prefix, brief)
        ((journal_id, offset, session_key, ttl, used, is_held),) = reader.execute(
            _STATE, (*prefix_range(prefix), session_id)
        ).fetchall()
        if journal_id == tail.journal_id:
            puts = [one for one in puts if one.end > offset]
            if not puts:
                return self._fetch_stored(reader, tail, session_id, prefix, brief)
        use = tail.sessions.get(session_id)
        if is_held or use is None or any(one.is_more_than(session_id, prefix) for one in puts):
            return None
        ttl, used = use if session_key is None else (ttl, _last_use(ttl, used, use[1]))
        if used is None:
            return None
        if len(puts) == 1:
            return [_used_at(puts[0].entry, ttl, used)]
        entries = (one.entry for one in sorted(puts, key=itemgetter(0), reverse=True))
        return [_used_at(one, ttl, used) for one in newest_of_each(entries)]

    def _fetch_stored(
        self, reader: _Connection, tail: _Tail, session_id: str, prefix: str, brief: bool
    ) -> list[Entry] | None:
        key = session_id, prefix, brief
        entry = self._read_again(reader, key)
        found = [entry] if entry else self._read_first(reader, key)
        if not found or session_id not in tail.sessions:
            return found
        (entry,), use = found, tail.sessions[session_id]
        ttl, used = entry.session.ttl, entry.session.used
        if ttl is None or (use is not None and use[1] <= used):
            return found
        last = None if use is None else _last_use(ttl, used, use[1])
        return None if last is None else [_used_at(entry, ttl, last)]

    def _read_again(self, reader: _Connection, key: tuple[str, str, bool], *, is_put: bool = False) -> Entry | None:
        """Return an entry that was read before, with its content as it is now; None if it may have changed. A put need
        not read content that was compared a moment ago."""
        if (known := reader.entries.get(key)) is None:
            return None
        entry = known.entry
        if is_put and known.same_until > time.monotonic():
            entry = known.same
        elif known.blob_key is not None:
            try:
                with reader.blobopen("content", "data", known.blob_key, readonly=True) as blob:
                    entry = Entry(entry.ref, entry.blob, entry.session, blob.read(), None, entry.seq)
            except sqlite3.Error:  # removed or damaged: a query will tell
                return None
        return entry if reader.refresh() else None  # after the content: its key may belong to another blob by now

    def _read_first(self, reader: _Connection, key: tuple[str, str, bool]) -> list[Entry] | None:
        """Return the entry of a session under a prefix, and remember it; None if there are several."""
        session_id, prefix, brief = key
        reader.refresh()
        low, high = prefix_range(prefix)
        rows = reader.execute(NEWEST_BRIEF if brief else NEWEST[True], (low, session_id, low, high)).fetchall()
        if not rows:
            return []
        entry = brief_entry_alone(rows[0], session_id) if brief else entry_alone(rows[0])
        if entry is None:
            return None
        if len(reader.entries) >= _REMEMBERED:
            reader.entries.clear()
        is_inline = entry.blob.coding == "inline"
        if not is_inline or isinstance(entry.content, bytes):
            known = Entry(entry.ref, entry.blob, entry.session, None, None, entry.seq)
            reader.entries[key] = _Read(known, rows[0][-1] if is_inline else None)
        return [entry]

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

    def make_durable(self) -> None:
        def sync() -> None:
            self._refresh_and_catch_up()
            self._sync_wal(always=True)

        if not self.is_read_only:
            self._exclusive("syncing the catalog", sync)

    def compact(self) -> None:
        self._check_writable("compacting the catalog")
        while self._exclusive("compacting the catalog", self._compact):
            pass

    def _compact(self) -> bool:
        """Return some free pages to the file system. Returns whether there may be more."""
        self._refresh_and_catch_up()
        with self._roomy():
            free = self._free_pages()
            for _ in range(_STEPS if free else 0):
                self._writer.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` would free only one page
                self._bound_wal()
            if free != (left := self._free_pages()) and left:
                return True
            self._settle(truncate=True)
            return False

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
            if record is None or not self._take_record(record):
                lost[at] = behind - at
            at = behind
            if count >= most or at - start >= size:
                break
        if lost:
            self._note_loss(lost)
        self._writer.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("journal", journal.journal_id), ("offset", at)]
        )
        return at

    def _take_record(self, record: bytes) -> bool:
        """Apply a record. Returns False if it is not the record of a put."""
        try:
            entry, heal, grace = _unpack(record)
        except INVALID:
            return False
        try:
            self._apply(entry, heal=heal, grace=grace)
        except INVALID as error:
            raise Damaged("the journal contains an invalid record", hint="restore the store") from error
        return True

    def _append(self, record: bytes, check: Callable[[], bool] | None) -> Position | None:
        """Append a record to the journal. If `check` is given, the journal is applied first, and None is returned if
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
        # Begin the new tail first, then mark the journal as seen: an interrupt in between costs a check, not a put.
        self._tail = _Tail(self._journal.journal_id, self._journal.end)
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

        return self._read(lambda reader: reader.execute(sql, values).fetchall())

    def _read(self, work: Callable[[_Connection], _T]) -> _T:
        """Run `work`, which does not return None, with a connection that no other thread uses."""

        def run() -> _T:
            return work(reader)

        try:
            for reader in self._readers:
                if (found := reader.lock.try_run(run)) is not None:
                    return found
            reader = self._making_reader.run(self._new_reader)
            return reader.lock.run(run)
        except (sqlite3.Error, UnicodeDecodeError) as error:
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
                "trusted_schema = OFF", "temp_store = MEMORY", "journal_size_limit = 0", "cache_size = -8000",
                f"query_only = {int(reading)}",
            ):  # fmt: skip
                db.execute(f"PRAGMA {pragma}")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise translated(error, "opening the catalog") from error
        return db

    def locks(self) -> Iterator[Mutex]:
        """Yield the locks whose owner is the only thread inside SQLite. New readers are added under the second."""
        yield self._mutex
        yield self._making_reader
        yield self._following
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


def _last_use(ttl: float | None, used: float, at: float) -> float | None:
    """Return the last use of a session after a put; None if the put may find it expired."""
    return None if ttl is not None and used + ttl <= at else max(used, at)


def _used_at(entry: Entry, ttl: float | None, used: float) -> Entry:
    info = entry.session
    session = SessionInfo(info.session_id, info.parent, ttl, info.quota, info.created, used, info.used_bytes)
    return Entry(entry.ref, entry.blob, session, entry.content, None, entry.seq, entry.is_checked)


def _remove_folder(folder: Path, process: int) -> None:
    """Remove a private copy that was not closed, unless in a child process: there it belongs to the parent."""
    if os.getpid() == process:
        from shutil import rmtree

        rmtree(folder, ignore_errors=True)


def _lost_text(sizes: Collection[int]) -> str:
    places = "1 place" if len(sizes) == 1 else f"{len(sizes)} places"
    return f"{sum(sizes)} bytes in {places}; the puts recorded there are lost"


_inherited: list[object] = []
_ENCODE: Final = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


def _pack(entry: Entry, *, heal: bool, grace: float) -> bytes:
    """Encode a put as a journal record: lengths, JSON, frames, content."""
    ref, blob, session = entry.ref, entry.blob, entry.session
    values = list(ref_fields(ref))
    values[PARENTS] = json.dumps(ref.parents) if ref.parents else ""
    head = _ENCODE(
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
