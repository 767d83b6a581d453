"""The full-text index: passages of text artifacts, and what sessions say about them, in SQLite's FTS5.

It is derived from the store and nothing else depends on it: made on the first search, filled off the put path, and
thrown away and made again where it is damaged. It is asked only with the list of artifacts that the asker may see.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from coatcheck.errors import StoreUnavailable
from coatcheck.storage import Match, Passage
from coatcheck.storage.forks import watch

NAME = "search.sqlite"
_VERSION = 1
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
    """CREATE TABLE described (session TEXT, digest TEXT, label TEXT, PRIMARY KEY (session, digest))
        WITHOUT ROWID""",
)
_T = TypeVar("_T")


class Passages:
    """The index of one store; in memory where it has no path."""

    rank = 1

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        watch(self)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those artifacts whose content is not indexed yet."""
        wanted = [(digest,) for digest in digests]

        def look(db: sqlite3.Connection) -> list[str]:
            db.execute("DELETE FROM temp.allowed")
            db.executemany("INSERT OR IGNORE INTO temp.allowed VALUES (?)", wanted)
            return [d for (d,) in db.execute("SELECT digest FROM temp.allowed EXCEPT SELECT digest FROM indexed")]

        return self._run(look)

    def add(self, digest: str, passages: Iterable[Passage]) -> None:
        """Index an artifact's content, which may be no passages at all."""
        rows = list(passages)

        def insert(db: sqlite3.Connection) -> None:
            if _one(db, "SELECT 1 FROM indexed WHERE digest = ?", digest) is None:
                for row in rows:
                    _insert(db, digest, "", row)
                db.execute("INSERT INTO indexed VALUES (?)", (digest,))

        self._run(insert)

    def describe(self, session_id: str, labels: Mapping[str, str]) -> None:
        """Index what a session says of artifacts (digest to text), in place of what it said before."""

        def replace(db: sqlite3.Connection) -> None:
            known = dict(db.execute("SELECT digest, label FROM described WHERE session = ?", (session_id,)))
            for digest, text in labels.items():
                if known.get(digest) == text:
                    continue
                db.execute("INSERT OR REPLACE INTO described VALUES (?, ?, ?)", (session_id, digest, text))
                _delete(db, "digest = ? AND session = ?", digest, session_id)
                _insert(db, digest, session_id, Passage(0, 0, 0, 0, text))

        self._run(replace)

    def match(self, words: str, allowed: Iterable[str], sessions: Iterable[str], limit: int) -> list[Match]:
        """The best passages for these words among the allowed artifacts, and among what these sessions say of them."""
        terms = terms_of(words)
        if not terms:
            return []
        query = " OR ".join(f'"{term}"' for term in dict.fromkeys(terms[:64]))
        digests, scopes = [(d,) for d in allowed], [(s,) for s in ("", *sessions)]

        def ask(db: sqlite3.Connection) -> list[Match]:
            db.execute("DELETE FROM temp.allowed")
            db.execute("DELETE FROM temp.scope")
            db.executemany("INSERT OR IGNORE INTO temp.allowed VALUES (?)", digests)
            db.executemany("INSERT OR IGNORE INTO temp.scope VALUES (?)", scopes)
            rows = db.execute(
                "SELECT p.digest, p.first, p.last, p.start, p.end, words.rank FROM words JOIN passage p"
                " ON p.passage_key = words.rowid JOIN temp.allowed a ON a.digest = p.digest"
                " JOIN temp.scope s ON s.session = p.session WHERE words MATCH ?"
                " ORDER BY words.rank, p.digest, p.first LIMIT ?",
                (query, limit),
            )
            return [Match(*row) for row in rows]

        return self._run(ask)

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop artifacts that the store does not know any more, and every trace of their words. How many there were."""

        def drop(db: sqlite3.Connection) -> int:
            digests = [d for (d,) in db.execute("SELECT digest FROM indexed UNION SELECT digest FROM described")]
            gone = [digest for digest in digests if not is_known(digest)]
            for digest in gone:
                _delete(db, "digest = ?", digest)
                db.execute("DELETE FROM indexed WHERE digest = ?", (digest,))
                db.execute("DELETE FROM described WHERE digest = ?", (digest,))
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
            db.execute("CREATE TEMP TABLE allowed (digest TEXT PRIMARY KEY) WITHOUT ROWID")
            db.execute("CREATE TEMP TABLE scope (session TEXT PRIMARY KEY) WITHOUT ROWID")
            self._db = db
        return self._db

    def _make(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            for table in ("passage", "words", "indexed", "described"):
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


def _one(db: sqlite3.Connection, sql: str, *values: str) -> tuple[object, ...] | None:
    row: tuple[object, ...] | None = db.execute(sql, values).fetchone()
    return row
