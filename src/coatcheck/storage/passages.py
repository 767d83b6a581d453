"""The full-text index: passages of text artifacts, and what sessions say about them, in SQLite's FTS5.

It is derived from the store and nothing else depends on it: made on the first search, filled off the put path, and
thrown away and made again where it is damaged. It notes what each session holds and how far it has followed it, so that
a search costs what is new and what is found, not what is there. Whoever asks checks each match against the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from coatcheck.errors import StoreUnavailable
from coatcheck.storage import Held, Mark, Match, Passage
from coatcheck.storage.forks import watch

NAME = "search.sqlite"
_VERSION = 3
_POSTINGS = 1_000
"""So many occurrences of its words a search ranks: where there are more, the words that tell least are left out."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"\w+")
_SAYS_NOTHING = (
    "a about after all also an and any are as at be been before between but by can could did do does "
    "during each explain for from get give given had has have he how i if in inside into is it its just "
    "like may me might more my no not of on one only or other our out over purpose s she should show so "
    "some such t tell than that the their them then there these they this those through to under up use "
    "used using was we were what when where which while who why will with within would you your "
)
_COMMON = frozenset(_SAYS_NOTHING.split())
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
_FOUND = """SELECT p.digest, p.first, p.last, p.start, p.end, bm25(words) AS score
    FROM words CROSS JOIN passage p ON p.passage_key = words.rowid
    WHERE words MATCH ? AND p.session IN ('', {sessions})"""
_HELD = "EXISTS (SELECT 1 FROM held h WHERE h.session IN ({sessions}) AND h.digest = {digest})"
_BEST = "ORDER BY score, digest, first LIMIT ?"
APART = " \n"
_T = TypeVar("_T")


class Passages:
    """The index of one store; in memory where it has no path."""

    rank = 1

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        watch(self)

    def followed(self, session_id: str) -> Mark | None:
        """How far a session was followed; None where it never was."""

        def look(db: sqlite3.Connection) -> Mark | None:
            row = _one(db, "SELECT created, seq, digest FROM followed WHERE session = ?", session_id)
            return None if row is None else Mark(*row)

        return self._run(look)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those artifacts whose content is not indexed yet."""
        wanted = list(digests)
        return self._run(
            lambda db: [d for d in wanted if _one(db, "SELECT 1 FROM indexed WHERE digest = ?", d) is None]
        )

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        """Index the contents of artifacts, each of which may be no passages at all."""

        def insert(db: sqlite3.Connection) -> None:
            for digest, rows in contents.items():
                if _one(db, "SELECT 1 FROM indexed WHERE digest = ?", digest) is None:
                    for row in rows:
                        _insert(db, digest, "", row)
                    db.execute("INSERT INTO indexed VALUES (?)", (digest,))

        self._run(insert)

    def hold(self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, anew: bool) -> None:
        """Note what a session holds, by digest, and how far it was followed. With `anew` that is all that it holds,
        else it is added to what is known."""

        def note(db: sqlite3.Connection) -> None:
            if anew:
                for (digest,) in db.execute("SELECT digest FROM held WHERE session = ?", (session_id,)).fetchall():
                    if digest not in holds:
                        _leave(db, session_id, digest)
            for digest, held in holds.items():
                row = _one(db, "SELECT label, expires FROM held WHERE session = ? AND digest = ?", session_id, digest)
                known, ends = (None, None) if row is None else row
                before = [] if anew or not known else known.split(APART)
                text = APART.join(dict.fromkeys([*before, *held.said]))
                both = (held.expires,) if anew or row is None else (held.expires, ends)
                ends = None if None in both else max(both)
                db.execute(
                    "INSERT INTO held VALUES (?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET label = excluded.label, expires = excluded.expires",
                    (session_id, digest, text, ends),
                )
                if text == known:
                    continue
                if known:
                    _delete(db, "digest = ? AND session = ?", digest, session_id)
                if text:
                    _insert(db, digest, session_id, Passage(0, 0, 0, 0, text))
            if mark is not None:
                db.execute("INSERT OR REPLACE INTO followed VALUES (?, ?, ?, ?)", (session_id, *mark))

        self._run(note)

    def count(self, sessions: Iterable[str], at: float) -> int:
        """How many artifacts these sessions hold together that do not expire before this moment."""
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
        """A session holds an artifact no more, or has ended."""

        def drop(db: sqlite3.Connection) -> None:
            if digest is not None:
                _leave(db, session_id, digest)
                return
            for (each,) in db.execute("SELECT digest FROM held WHERE session = ?", (session_id,)).fetchall():
                _leave(db, session_id, each)
            db.execute("DELETE FROM followed WHERE session = ?", (session_id,))

        if self._db is None and (self._path is None or not self._path.exists()):
            return
        try:
            self._run(drop)
        except StoreUnavailable:  # no space, or worse: forgetting does not fail for it
            with self._lock:
                self._discard()

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        """The best passages for these words in what the sessions hold, and in what they say of it.

        Where the words occur very often, the rarest of them decide, and of a single such word the newest places."""
        terms = terms_of(words)
        scope = list(sessions)
        marks = ", ".join("?" * len(scope))
        found = _FOUND.format(sessions=marks)

        def ask(db: sqlite3.Connection) -> list[Match]:
            telling, is_bounded = _telling(db, list(dict.fromkeys(terms))[:64])
            query = " OR ".join(telling)
            if not query:
                return []
            if is_bounded:  # all can be ranked, and whose they are be asked of the best alone
                held = _HELD.format(sessions=marks, digest="digest")
                sql = f"SELECT * FROM ({found} ORDER BY score, p.digest, p.first) WHERE {held} {_BEST}"
                return [Match(*row) for row in db.execute(sql, (query, *scope, *scope, limit))]
            held = _HELD.format(sessions=marks, digest="p.digest")
            sql = f"SELECT * FROM ({found} AND {held} ORDER BY words.rowid DESC LIMIT ?) {_BEST}"
            return [Match(*row) for row in db.execute(sql, (query, *scope, *scope, max(limit, _POSTINGS), limit))]

        return self._run(ask)

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop artifacts that the store does not know any more, and every trace of their words. How many there were."""

        def drop(db: sqlite3.Connection) -> int:
            digests = [d for (d,) in db.execute("SELECT digest FROM indexed UNION SELECT digest FROM held")]
            gone = [digest for digest in digests if not is_known(digest)]
            for digest in gone:
                _delete(db, "digest = ?", digest)
                db.execute("DELETE FROM indexed WHERE digest = ?", (digest,))
                db.execute("DELETE FROM held WHERE digest = ?", (digest,))
            if gone:
                db.execute("INSERT INTO words (words) VALUES ('rebuild')")
            return len(gone)

        if self._db is None and (self._path is None or not self._path.exists()):
            return 0
        try:
            count = self._run(drop)
            if count:
                with self._lock:
                    self._opened().execute("VACUUM")
        except (StoreUnavailable, sqlite3.Error):  # no space, or worse: what is thrown away leaves no trace either
            with self._lock:
                self._discard()
            return 0
        return count

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def pause(self) -> None:
        self._lock.acquire()

    def resume(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        if self._path is not None:
            _inherited.append(self._db)  # the parent's, and not to be closed here
            self._db = None
        self._lock.release()

    def _run(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        """One transaction; an index that is damaged is made anew, since all of it can be."""
        with self._lock:
            for attempt in (1, 2):
                try:
                    db = self._opened()
                    db.execute("BEGIN IMMEDIATE")
                    try:
                        answer = change(db)
                    except BaseException:
                        db.execute("ROLLBACK")
                        raise
                    db.execute("COMMIT")
                    return answer
                except sqlite3.Error as error:
                    damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(
                        error, sqlite3.OperationalError
                    )
                    if attempt == 2 or not damaged:
                        raise StoreUnavailable(f"the search index failed: {error}", hint="try again") from error
                    self._discard()
            raise AssertionError("unreachable")

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            if self._path is not None:
                with contextlib.suppress(FileExistsError):
                    os.close(
                        os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                    )
                if self._path.is_symlink():
                    raise StoreUnavailable(f"{NAME!r} is a symbolic link", hint="a store follows no links")
            db = sqlite3.connect(self._path or ":memory:", timeout=30, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA trusted_schema = OFF")
            self._make(db)
            self._db = db
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

    def _discard(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)


_inherited: list[object] = []


def terms_of(words: str) -> list[str]:
    """The words that a search is for: those that say nothing count only where there are no others."""
    found = _WORD.findall(spread(words))
    return [word for word in found if word.lower() not in _COMMON] or found


def spread(text: str) -> str:
    """Words inside identifiers apart: `parseHTTPHeader` as `parse HTTP Header`."""
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


def _leave(db: sqlite3.Connection, session_id: str, digest: str) -> None:
    db.execute("DELETE FROM held WHERE session = ? AND digest = ?", (session_id, digest))
    _delete(db, "digest = ? AND session = ?", digest, session_id)


def _telling(db: sqlite3.Connection, terms: list[str]) -> tuple[list[str], bool]:
    """The words that occur, as the index takes them, the rarest first and as many as can be ranked, at least one; and
    whether all that they occur in can be."""
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


def _one(db: sqlite3.Connection, sql: str, *values: str) -> tuple[Any, ...] | None:
    row: tuple[Any, ...] | None = db.execute(sql, values).fetchone()
    return row
