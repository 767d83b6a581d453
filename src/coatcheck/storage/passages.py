"""The full-text index: passages of text artifacts, and the labels that sessions give them, in
SQLite's FTS5.

It is derived from the store and nothing else depends on it: it is created on the first search,
filled outside of puts, and rebuilt if it is damaged. It records the artifacts of each session and
how far the session is indexed, so that the cost of a search depends on what is new and what is
found, not on the size of the store. Callers check each match against the store.
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
from coatcheck.errors import (
    CoatcheckError,
    StoreError,
    StoreUnavailable,
    storage_error,
    storage_errors,
)
from coatcheck.storage import Held, Mark, Match, Passage
from coatcheck.storage.disk import Connection
from coatcheck.storage.forks import RLock, watch
from coatcheck.storage.sql import InList

NAME = "search.sqlite"
_VERSION = 3
_POSTINGS = 1_000
"""Maximum number of occurrences that a search ranks; if there are more, the most frequent words are
ignored."""
_NEWEST = -1e-12
"""Score of a match of a frequent word, times its number in the index: the best score is the
lowest."""
_HUMP = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = lazy_pattern(r"\w+")
_STOP_WORDS = (
    "a about after all also an and any are as at be been before between but by can could did do "
    "does during each explain for from get give given had has have he how i if in inside into is "
    "it its just like may me might more my no not of on one only or other our out over purpose s "
    "she should show so some such t tell than that the their them then there these they this "
    "those through to under up use used using was we were what when where which while who why "
    "will with within would you your "
)
_COMMON = frozenset(_STOP_WORDS.split())
_TABLES = (
    """CREATE TABLE passage (passage_key INTEGER PRIMARY KEY, digest TEXT NOT NULL,
        session TEXT NOT NULL, first INTEGER, last INTEGER, start INTEGER, end INTEGER)""",
    "CREATE INDEX passage_by_digest ON passage (digest, session)",
    "CREATE VIRTUAL TABLE words USING fts5 (text, tokenize = 'porter unicode61')",
    "CREATE TABLE indexed (digest TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE held (session TEXT, digest TEXT, label TEXT, expires REAL,
        PRIMARY KEY (session, digest))
        WITHOUT ROWID""",
    "CREATE INDEX held_by_session ON held (session, expires)",
    (
        "CREATE TABLE followed (session TEXT PRIMARY KEY, created REAL, seq INTEGER, digest TEXT)"
        " WITHOUT ROWID"
    ),
    "CREATE TABLE held_count (session TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TRIGGER held_more AFTER INSERT ON held BEGIN
        INSERT INTO held_count VALUES (new.session, 1) ON CONFLICT
            DO UPDATE SET number = number + 1; END""",
    """CREATE TRIGGER held_less AFTER DELETE ON held BEGIN
        UPDATE held_count SET number = number - 1 WHERE session = old.session; END""",
)
_DIGEST = lazy_pattern(r"[0-9a-f]{64}")
_NONSENSE = (TypeError, ValueError, AttributeError)  # errors that rows of a damaged index lead to
_TROUBLE = tuple(
    f"SQLITE_{name}"
    for name in (
        "BUSY",
        "LOCKED",
        "FULL",
        "IOERR",
        "CANTOPEN",
        "READONLY",
        "PERM",
        "AUTH",
        "NOMEM",
        "INTERRUPT",
    )
)
_APART = " \n"
_T = TypeVar("_T")


class Passages:
    """The index of one store, in memory if `path` is None. Rows are fetched at once: a cursor that
    an interrupt leaves open would block other processes."""

    rank = 1

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        watch(self)

    def followed(self, session_id: str) -> Mark | None:
        def look(db: sqlite3.Connection) -> Mark | None:
            row = db.execute(
                "SELECT created, seq, digest FROM followed WHERE session = :session",
                {"session": session_id},
            ).fetchone()
            if row is None:
                return None
            return Mark(
                created=_checked(row["created"], float, int),
                seq=_checked(row["seq"], int),
                digest=_checked(row["digest"], str),
            )

        return self._run(look)

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = list(digests)
        return self._run(lambda db: [digest for digest in wanted if not _is_indexed(db, digest)])

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        def insert(db: sqlite3.Connection) -> None:
            for digest, passages in contents.items():
                if _is_indexed(db, digest):
                    continue
                for passage in passages:
                    _insert(db, digest, "", passage)
                db.execute("INSERT INTO indexed VALUES (:digest)", {"digest": digest})

        self._run(insert)

    def hold(
        self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool
    ) -> None:
        def note(db: sqlite3.Connection) -> None:
            if complete:
                for digest in set(_held_digests(db, session_id)) - holds.keys():
                    _leave(db, session_id, digest)
            for digest, held in holds.items():
                known = _held(db, session_id, digest)
                _hold(
                    db, session_id, digest, held if complete else held_together(known, held), known
                )
            if mark is not None:
                db.execute(
                    "INSERT OR REPLACE INTO followed VALUES (:session, :created, :seq, :digest)",
                    {
                        "session": session_id,
                        "created": mark.created,
                        "seq": mark.seq,
                        "digest": mark.digest,
                    },
                )

        self._run(note)

    def count(self, sessions: Iterable[str], at: float) -> int:
        wanted = list(sessions)
        if len(wanted) == 1:
            return self._run(lambda db: _count_in_one(db, wanted[0], at))
        listed = InList("session", wanted)

        def look(db: sqlite3.Connection) -> int:
            row = db.execute(
                f"""SELECT count(DISTINCT digest) AS number FROM held
                    WHERE session IN ({listed.sql}) AND coalesce(expires, :at) >= :at""",
                {"at": at, **listed.values},
            ).fetchone()
            return int(row["number"])

        return self._run(look)

    def leave(self, session_id: str, digest: str | None = None) -> None:
        def drop(db: sqlite3.Connection) -> None:
            if digest is not None:
                _leave(db, session_id, digest)
                return
            for each in _held_digests(db, session_id):
                _leave(db, session_id, each)
            db.execute("DELETE FROM followed WHERE session = :session", {"session": session_id})

        try:
            if self._exists():
                self._run(drop)
        except StoreError:
            # For example no space left: forgetting must not fail because of the index.
            with self._lock:
                self._discard()

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        # If the words are very frequent, only the rarest are used. The best matches of a single
        # frequent word are the newest: to rank them, FTS5 would count the word in the whole index
        # first.
        terms = terms_of(words)
        listed = InList("session", sessions)

        def ask(db: sqlite3.Connection) -> list[Match]:
            selective, is_bounded = _selective(db, list(dict.fromkeys(terms))[:64])
            if not selective:
                return []
            values = {"query": " OR ".join(selective), "limit": limit, **listed.values}
            if is_bounded:  # rank all matches first, and check only the best for a session
                rows = db.execute(
                    f"""SELECT * FROM (
                        SELECT passage.digest, passage.first, passage.last, passage.start,
                        passage.end,
                            bm25(words) AS score
                        FROM words CROSS JOIN passage ON passage.passage_key = words.rowid
                        WHERE words MATCH :query AND passage.session IN ('', {listed.sql})
                        ORDER BY score, passage.digest, passage.first) AS found
                    WHERE EXISTS (SELECT 1 FROM held WHERE held.session IN ({listed.sql})
                        AND held.digest = found.digest)
                    ORDER BY score, digest, first LIMIT :limit""",
                    values,
                ).fetchall()
            else:
                rows = db.execute(
                    f"""SELECT passage.digest, passage.first, passage.last, passage.start,
                        passage.end, :newest * words.rowid AS score
                    FROM words CROSS JOIN passage ON passage.passage_key = words.rowid
                    WHERE words MATCH :query AND passage.session IN ('', {listed.sql})
                    AND EXISTS (SELECT 1 FROM held WHERE held.session IN ({listed.sql})
                        AND held.digest = passage.digest)
                    ORDER BY words.rowid DESC LIMIT :limit""",
                    values | {"newest": _NEWEST},
                ).fetchall()
            return [_match(row) for row in rows]

        return self._run(ask)

    def keep(self, is_known: Callable[[str], bool]) -> int:
        def drop(db: sqlite3.Connection) -> int:
            rows = db.execute("SELECT digest FROM indexed UNION SELECT digest FROM held").fetchall()
            digests = [_checked(row["digest"], str) for row in rows]
            if not all(map(_DIGEST.fullmatch, digests)):
                raise ValueError("the search index contains an invalid digest")
            gone = [digest for digest in digests if not is_known(digest)]
            for digest in gone:
                _delete_all(db, digest)
                db.execute("DELETE FROM indexed WHERE digest = :digest", {"digest": digest})
                db.execute("DELETE FROM held WHERE digest = :digest", {"digest": digest})
            if gone:
                db.execute("INSERT INTO words (words) VALUES ('rebuild')")
            return len(gone)

        try:
            count = self._run(drop) if self._exists() else 0
            if count:
                with self._lock:
                    self._opened().execute("VACUUM")
        except (StoreError, sqlite3.Error):
            # For example no space left: a discarded index leaves no traces either.
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
                f"the search index failed: {error}",
                hint=f"try again, or remove the file {NAME!r} of the store",
            ) from error

    def _attempt(self, change: Callable[[sqlite3.Connection], _T]) -> _T:
        for failed in (
            self._close,
            self._discard,
        ):
            # Only an index that fails on a new connection too is damaged.
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
                        os.open(
                            self._path,
                            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                            0o600,
                        )
                    )
                if self._path.is_symlink():
                    raise StoreUnavailable(
                        f"{NAME!r} is a symbolic link", hint="a store must not contain links"
                    )
            db = sqlite3.connect(
                self._path or ":memory:",
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
                factory=Connection,
            )
            db.row_factory = sqlite3.Row
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
            for table in (
                "passage",
                "words",
                "indexed",
                "described",
                "held",
                "followed",
                "held_count",
            ):
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


def _is_indexed(db: sqlite3.Connection, digest: str) -> bool:
    return (
        db.execute("SELECT 1 FROM indexed WHERE digest = :digest", {"digest": digest}).fetchone()
        is not None
    )


def _insert(db: sqlite3.Connection, digest: str, session_id: str, passage: Passage) -> None:
    key = db.execute(
        """INSERT INTO passage (digest, session, first, last, start, end)
            VALUES (:digest, :session, :first, :last, :start, :end)""",
        {
            "digest": digest,
            "session": session_id,
            "first": passage.first,
            "last": passage.last,
            "start": passage.start,
            "end": passage.end,
        },
    ).lastrowid
    db.execute(
        "INSERT INTO words (rowid, text) VALUES (:key, :text)",
        {"key": key, "text": spread(passage.text)},
    )


def _delete_all(db: sqlite3.Connection, digest: str) -> None:
    """Delete all passages of an artifact, and the labels that sessions give it."""
    _delete(
        db,
        db.execute(
            "SELECT passage_key FROM passage WHERE digest = :digest", {"digest": digest}
        ).fetchall(),
    )


def _delete_label(db: sqlite3.Connection, session_id: str, digest: str) -> None:
    rows = db.execute(
        "SELECT passage_key FROM passage WHERE digest = :digest AND session = :session",
        {"digest": digest, "session": session_id},
    ).fetchall()
    _delete(db, rows)


def _delete(db: sqlite3.Connection, rows: list[sqlite3.Row]) -> None:
    keys = [{"passage_key": row["passage_key"]} for row in rows]
    db.executemany("DELETE FROM words WHERE rowid = :passage_key", keys)
    db.executemany("DELETE FROM passage WHERE passage_key = :passage_key", keys)


def _held_digests(db: sqlite3.Connection, session_id: str) -> list[str]:
    rows = db.execute(
        "SELECT digest FROM held WHERE session = :session", {"session": session_id}
    ).fetchall()
    return [row["digest"] for row in rows]


def _held(db: sqlite3.Connection, session_id: str, digest: str) -> Held | None:
    row = db.execute(
        "SELECT label, expires FROM held WHERE session = :session AND digest = :digest",
        {"session": session_id, "digest": digest},
    ).fetchone()
    if row is None:
        return None
    return held_from(row["label"], row["expires"])


def _count_in_one(db: sqlite3.Connection, session_id: str, at: float) -> int:
    """Return the number of artifacts in one session that do not expire before this time."""
    values = {"session": session_id, "at": at}
    every = db.execute("SELECT number FROM held_count WHERE session = :session", values).fetchone()
    if every is None:
        return 0
    gone = db.execute(
        "SELECT count(*) AS number FROM held WHERE session = :session AND expires < :at", values
    ).fetchone()
    return int(every["number"] - gone["number"])


def label_of(held: Held) -> str:
    """Return the text that is indexed for the labels of an artifact."""
    return _APART.join(dict.fromkeys(held.labels))


def held_from(label: str, expires: float | None) -> Held:
    """Return the opposite of `label_of`."""
    return Held(label.split(_APART) if label else [], expires)


def held_together(known: Held | None, held: Held) -> Held:
    """Return the labels of both, and the later end; None never ends."""
    if known is None:
        return held
    ends = (
        None if known.expires is None or held.expires is None else max(known.expires, held.expires)
    )
    return Held(list(dict.fromkeys([*known.labels, *held.labels])), ends)


def _hold(
    db: sqlite3.Connection, session_id: str, digest: str, held: Held, known: Held | None
) -> None:
    label = label_of(held)
    db.execute(
        """INSERT INTO held VALUES (:session, :digest, :label, :expires)
            ON CONFLICT DO UPDATE SET label = excluded.label, expires = excluded.expires""",
        {"session": session_id, "digest": digest, "label": label, "expires": held.expires},
    )
    before = "" if known is None else label_of(known)
    if label == before:
        return
    if before:
        _delete_label(db, session_id, digest)
    if label:
        _insert(db, digest, session_id, Passage(0, 0, 0, 0, label))


def _leave(db: sqlite3.Connection, session_id: str, digest: str) -> None:
    db.execute(
        "DELETE FROM held WHERE session = :session AND digest = :digest",
        {"session": session_id, "digest": digest},
    )
    _delete_label(db, session_id, digest)


def _selective(db: sqlite3.Connection, terms: list[str]) -> tuple[list[str], bool]:
    """Return the quoted terms that occur in the index, rarest first and at least one, as long as
    their occurrences can be ranked; and whether all occurrences of the returned terms can be."""
    counts: dict[str, int] = {}
    for term in terms:
        quoted = f'"{term}"'
        row = db.execute(
            "SELECT count(*) AS number FROM"
            " (SELECT 1 FROM words WHERE words MATCH :query LIMIT :limit)",
            {"query": quoted, "limit": _POSTINGS + 1},
        ).fetchone()
        if row["number"]:
            counts[quoted] = row["number"]
    total = 0
    kept: list[str] = []
    for quoted in sorted(counts, key=lambda quoted: counts[quoted]):
        if kept and total + counts[quoted] > _POSTINGS:
            break
        kept.append(quoted)
        total += counts[quoted]
    return kept, total <= _POSTINGS


def _is_trouble(error: Exception) -> bool:
    """Return whether the index is temporarily unusable (busy, no space, unreadable), as opposed to
    damaged."""
    return (getattr(error, "sqlite_errorname", None) or "").startswith(_TROUBLE)


def _match(row: sqlite3.Row) -> Match:
    return Match(
        digest=_checked(row["digest"], str),
        first=_checked(row["first"], int),
        last=_checked(row["last"], int),
        start=_checked(row["start"], int),
        end=_checked(row["end"], int),
        score=_checked(row["score"], float),
    )


def _checked(value: Any, *kinds: type) -> Any:
    """Return a value if it has one of these types. In a damaged index it may not."""
    if not isinstance(value, kinds):
        raise ValueError("the search index has a value of a wrong type")
    return value
