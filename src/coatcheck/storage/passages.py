"""The full-text index: passages of text artifacts, and the labels that sessions give them, in SQLite's FTS5.

It is derived from the store and nothing else depends on it: it is created on the first search, filled outside of puts,
and rebuilt if it is damaged. It records the artifacts of each session and how far the session is indexed, so that the
cost of a search depends on what is new and what is found, not on the size of the store. Callers check each match
against the store.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import CoatcheckError, StoreError, StoreUnavailable, storage_error, storage_errors
from coatcheck.storage import Held, Mark, Match, Passage
from coatcheck.storage.disk import Connection
from coatcheck.storage.forks import RLock, watch

NAME = "search.sqlite"
_VERSION = 3
_POSTINGS = 1_000
"""Maximum number of occurrences that a search ranks; if there are more, the most frequent words are ignored."""
_NEWEST = -1e-12
"""Score of a match of a frequent word, times its number in the index: the best score is the lowest."""
_HUMP = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = lazy_pattern(r"\w+")
_STOP_WORDS = (
    "a about after all also an and any are as at be been before between but by can could did do does "
    "during each explain for from get give given had has have he how i if in inside into is it its just "
    "like may me might more my no not of on one only or other our out over purpose s she should show so "
    "some such t tell than that the their them then there these they this those through to under up use "
    "used using was we were what when where which while who why will with within would you your "
)
_COMMON = frozenset(_STOP_WORDS.split())
_TABLES = (
    """CREATE TABLE passage (passage_key INTEGER PRIMARY KEY, digest TEXT NOT NULL, session TEXT NOT NULL,
        first INTEGER, last INTEGER, start INTEGER, end INTEGER)""",
    "CREATE INDEX passage_by_digest ON passage (digest, session)",
    "CREATE VIRTUAL TABLE words USING fts5 (text, tokenize = 'porter unicode61')",
    "CREATE TABLE indexed (digest TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE held (session TEXT, digest TEXT, label TEXT, expires REAL, PRIMARY KEY (session, digest))
        WITHOUT ROWID""",
    "CREATE INDEX held_by_session ON held (session, expires)",
    "CREATE TABLE followed (session TEXT PRIMARY KEY, created REAL, seq INTEGER, digest TEXT) WITHOUT ROWID",
    "CREATE TABLE held_count (session TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TRIGGER held_more AFTER INSERT ON held BEGIN
        INSERT INTO held_count VALUES (new.session, 1) ON CONFLICT DO UPDATE SET number = number + 1; END""",
    """CREATE TRIGGER held_less AFTER DELETE ON held BEGIN
        UPDATE held_count SET number = number - 1 WHERE session = old.session; END""",
)
_FOUND = """SELECT p.digest, p.first, p.last, p.start, p.end, {score} AS score
    FROM words CROSS JOIN passage p ON p.passage_key = words.rowid
    WHERE words MATCH ? AND p.session IN ('', {sessions})"""
_HELD = "EXISTS (SELECT 1 FROM held h WHERE h.session IN ({sessions}) AND h.digest = {digest})"
_BEST = "ORDER BY score, digest, first LIMIT ?"
_DIGEST = lazy_pattern(r"[0-9a-f]{64}")
_NONSENSE = (TypeError, ValueError, AttributeError)  # errors that rows of a damaged index lead to
_TROUBLE = tuple(
    f"SQLITE_{name}"
    for name in ("BUSY", "LOCKED", "FULL", "IOERR", "CANTOPEN", "READONLY", "PERM", "AUTH", "NOMEM", "INTERRUPT")
)
APART = " \n"
_T = TypeVar("_T")


class Passages:
    """The index of one store, in memory if `path` is None. Rows are fetched at once: a cursor that an interrupt leaves
    open would block other processes."""

    rank = 1

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        watch(self)

    def followed(self, session_id: str) -> Mark | None:
        def look(db: sqlite3.Connection) -> Mark | None:
            row = _one(db, "SELECT created, seq, digest FROM followed WHERE session = ?", session_id)
            return None if row is None else Mark(*_checked(row, (float, int), int, str))

        return self._run(look)

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = list(digests)
        return self._run(
            lambda db: [d for d in wanted if _one(db, "SELECT 1 FROM indexed WHERE digest = ?", d) is None]
        )

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        def insert(db: sqlite3.Connection) -> None:
            for digest, rows in contents.items():
                if _one(db, "SELECT 1 FROM indexed WHERE digest = ?", digest) is None:
                    for row in rows:
                        _insert(db, digest, "", row)
                    db.execute("INSERT INTO indexed VALUES (?)", (digest,))

        self._run(insert)

    def hold(self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool) -> None:
        def note(db: sqlite3.Connection) -> None:
            if complete:
                for (digest,) in db.execute("SELECT digest FROM held WHERE session = ?", (session_id,)).fetchall():
                    if digest not in holds:
                        _leave(db, session_id, digest)
            for digest, held in holds.items():
                row = _one(db, "SELECT label, expires FROM held WHERE session = ? AND digest = ?", session_id, digest)
                known = None if row is None else Held(row[0].split(APART) if row[0] else [], row[1])
                _hold(db, session_id, digest, held if complete else held_together(known, held), known)
            if mark is not None:
                db.execute("INSERT OR REPLACE INTO followed VALUES (?, ?, ?, ?)", (session_id, *mark))

        self._run(note)

    def count(self, sessions: Iterable[str], at: float) -> int:
        wanted = list(sessions)
        marks = ", ".join("?" * len(wanted))
        distinct = f"SELECT count(DISTINCT digest) FROM held WHERE session IN ({marks}) AND coalesce(expires, ?) >= ?"

        def look(db: sqlite3.Connection) -> int:
            if len(wanted) > 1:
                return int(db.execute(distinct, (*wanted, at, at)).fetchone()[0])
            row = _one(db, "SELECT number FROM held_count WHERE session = ?", *wanted)
            gone = db.execute("SELECT count(*) FROM held WHERE session = ? AND expires < ?", (*wanted, at)).fetchone()
            return int(row[0] - gone[0]) if row else 0

        return self._run(look)

    def leave(self, session_id: str, digest: str | None = None) -> None:
        def drop(db: sqlite3.Connection) -> None:
            if digest is not None:
                _leave(db, session_id, digest)
                return
            for (each,) in db.execute("SELECT digest FROM held WHERE session = ?", (session_id,)).fetchall():
                _leave(db, session_id, each)
            db.execute("DELETE FROM followed WHERE session = ?", (session_id,))

        try:
            if self._exists():
                self._run(drop)
        except StoreError:  # for example no space left: forgetting must not fail because of the index
            with self._lock:
                self._discard()

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        # If the words are very frequent, only the rarest are used. The best matches of a single frequent word are the
        # newest: to rank them, FTS5 would count the word in the whole index first.
        terms = terms_of(words)
        scope = list(sessions)
        marks = ", ".join("?" * len(scope))

        def ask(db: sqlite3.Connection) -> list[Match]:
            selective, is_bounded = _selective(db, list(dict.fromkeys(terms))[:64])
            query = " OR ".join(selective)
            if not query:
                return []
            if is_bounded:  # rank all matches first, and check only the best for a session
                held = _HELD.format(sessions=marks, digest="digest")
                found = _FOUND.format(score="bm25(words)", sessions=marks)
                sql = f"SELECT * FROM ({found} ORDER BY score, p.digest, p.first) WHERE {held} {_BEST}"
                return [_match(row) for row in db.execute(sql, (query, *scope, *scope, limit)).fetchall()]
            held = _HELD.format(sessions=marks, digest="p.digest")
            found = _FOUND.format(score=f"{_NEWEST} * words.rowid", sessions=marks)
            sql = f"{found} AND {held} ORDER BY words.rowid DESC LIMIT ?"
            return [_match(row) for row in db.execute(sql, (query, *scope, *scope, limit)).fetchall()]

        return self._run(ask)

    def keep(self, is_known: Callable[[str], bool]) -> int:
        def drop(db: sqlite3.Connection) -> int:
            rows = db.execute("SELECT digest FROM indexed UNION SELECT digest FROM held").fetchall()
            digests = [_checked(row, str)[0] for row in rows]
            if not all(map(_DIGEST.fullmatch, digests)):
                raise ValueError("the search index contains an invalid digest")
            gone = [digest for digest in digests if not is_known(digest)]
            for digest in gone:
                _delete(db, "digest = ?", digest)
                db.execute("DELETE FROM indexed WHERE digest = ?", (digest,))
                db.execute("DELETE FROM held WHERE digest = ?", (digest,))
            if gone:
                db.execute("INSERT INTO words (words) VALUES ('rebuild')")
            return len(gone)

        try:
            count = self._run(drop) if self._exists() else 0
            if count:
                with self._lock:
                    self._opened().execute("VACUUM")
        except (StoreError, sqlite3.Error):  # for example no space left: a discarded index leaves no traces either
            with self._lock:
                self._discard()
            return 0
        return count

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def locks(self) -> list[RLock]:
        return [self._lock]

    def before_fork(self) -> None:
        if self._path is not None:
            self._close()

    def after_fork(self) -> None:
        pass

    def _run(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `change` in one transaction. A damaged index is discarded and created again."""
        try:
            with self._lock:
                return self._attempt(change)
        except CoatcheckError:
            raise
        except OSError as error:
            raise storage_error(error, "opening the search index") from error
        except (sqlite3.Error, *_NONSENSE) as error:
            raise StoreUnavailable(
                f"the search index failed: {error}", hint=f"try again, or remove the file {NAME!r} of the store"
            ) from error

    def _attempt(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        for failed in (self._close, self._discard):  # only an index that fails on a new connection too is damaged
            try:
                return self._transaction(change)
            except CoatcheckError:
                raise
            except (sqlite3.Error, *_NONSENSE) as error:
                if _is_trouble(error):
                    raise
            failed()
        return self._transaction(change)

    def _transaction(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        db = self._opened()
        try:
            db.execute("BEGIN IMMEDIATE")
            answer = change(db)
            db.execute("COMMIT")
            return answer
        finally:
            if db.in_transaction:  # left open, it would block other processes
                try:
                    db.execute("ROLLBACK")
                except sqlite3.Error:
                    pass  # the error that led here says more

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            if self._path is not None:
                with contextlib.suppress(FileExistsError):
                    os.close(
                        os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                    )
                if self._path.is_symlink():
                    raise StoreUnavailable(f"{NAME!r} is a symbolic link", hint="a store must not contain links")
            db = sqlite3.connect(
                self._path or ":memory:",
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
                factory=Connection,
            )
            try:
                db.execute("PRAGMA synchronous = OFF")
                db.execute("PRAGMA secure_delete = ON")
                db.execute("PRAGMA trusted_schema = OFF")
                self._make(db)
                self._db = db
            except BaseException:
                self._db = None
                db.close()  # otherwise a traceback would keep its transaction open
                raise
        return self._db

    def _make(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            for table in ("passage", "words", "indexed", "described", "held", "followed", "held_count"):
                db.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")

    def _exists(self) -> bool:
        """Whether the index was made."""
        with storage_errors("opening the search index"):
            return self._db is not None or (self._path is not None and self._path.exists())

    def _discard(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._path is not None:
            with storage_errors("removing the search index"):
                self._path.unlink(missing_ok=True)


def terms_of(words: str) -> list[str]:
    """Return the words to search for. Stop words are dropped, unless there are no other words."""
    found = _WORD.findall(spread(words))
    return [word for word in found if word.lower() not in _COMMON] or found


def spread(text: str) -> str:
    """Separate the words inside identifiers: `parseHTTPHeader` becomes `parse HTTP Header`."""
    return _HUMP.sub(" ", text.encode("utf-8", "replace").decode().replace("_", " "))


def _insert(db: sqlite3.Connection, digest: str, session: str, row: Passage) -> None:
    key = db.execute(
        "INSERT INTO passage (digest, session, first, last, start, end) VALUES (?, ?, ?, ?, ?, ?)",
        (digest, session, row.first, row.last, row.start, row.end),
    ).lastrowid
    db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (key, spread(row.text)))


def _delete(db: sqlite3.Connection, where: str, *values: str) -> None:
    keys = db.execute(f"SELECT passage_key FROM passage WHERE {where}", values).fetchall()
    db.executemany("DELETE FROM words WHERE rowid = ?", keys)
    db.executemany("DELETE FROM passage WHERE passage_key = ?", keys)


def held_together(known: Held | None, held: Held) -> Held:
    """Return the labels of both, and the later end; None never ends."""
    if known is None:
        return held
    ends = None if known.expires is None or held.expires is None else max(known.expires, held.expires)
    return Held(list(dict.fromkeys([*known.labels, *held.labels])), ends)


def _hold(db: sqlite3.Connection, session_id: str, digest: str, held: Held, known: Held | None) -> None:
    text = APART.join(dict.fromkeys(held.labels))
    db.execute(
        """INSERT INTO held VALUES (:session, :digest, :label, :expires)
            ON CONFLICT DO UPDATE SET label = excluded.label, expires = excluded.expires""",
        {"session": session_id, "digest": digest, "label": text, "expires": held.expires},
    )
    before = "" if known is None else APART.join(known.labels)
    if text == before:
        return
    if before:
        _delete(db, "digest = ? AND session = ?", digest, session_id)
    if text:
        _insert(db, digest, session_id, Passage(0, 0, 0, 0, text))


def _leave(db: sqlite3.Connection, session_id: str, digest: str) -> None:
    db.execute("DELETE FROM held WHERE session = ? AND digest = ?", (session_id, digest))
    _delete(db, "digest = ? AND session = ?", digest, session_id)


def _selective(db: sqlite3.Connection, terms: list[str]) -> tuple[list[str], bool]:
    """Return the quoted terms that occur in the index, rarest first and at least one, as long as their occurrences can
    be ranked; and whether all occurrences of the returned terms can be."""
    counts = []
    for term in terms:
        quoted = f'"{term}"'
        row = db.execute(
            "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)", (quoted, _POSTINGS + 1)
        ).fetchone()
        if row[0]:
            counts.append((row[0], quoted))
    counts.sort(key=lambda each: each[0])
    total = 0
    kept: list[str] = []
    for count, quoted in counts:
        total += count
        if kept and total > _POSTINGS:
            break
        kept.append(quoted)
    return kept, sum(count for count, _ in counts[: len(kept)]) <= _POSTINGS


def _is_trouble(error: Exception) -> bool:
    """Return whether the index is temporarily unusable (busy, no space, unreadable), as opposed to damaged."""
    return (getattr(error, "sqlite_errorname", None) or "").startswith(_TROUBLE)


def _match(row: tuple[Any, ...]) -> Match:
    return Match(*_checked(row, str, int, int, int, int, float))


def _checked(row: tuple[Any, ...], *kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Return the row if its values have these types. In a damaged index they may not."""
    if not all(map(isinstance, row, kinds)):
        raise ValueError("the search index has a value of a wrong type")
    return row


def _one(db: sqlite3.Connection, sql: str, *values: str) -> tuple[Any, ...] | None:
    row: tuple[Any, ...] | None = db.execute(sql, values).fetchone()
    return row
