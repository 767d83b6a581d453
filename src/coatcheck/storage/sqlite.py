"""A catalog in the tables of an SQLite database. `memory` and `folder` say where the database is.

`blob.refs` counts refs other than tombstones; a blob whose count falls to zero is deleted in the same transaction.
`session.used_bytes` counts each artifact of a session once.

The tables are created in numbered steps: a new store runs all of them, an older one those it does not have yet. Each
step runs in a transaction of its own, which also updates the version. A released step never changes.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, groupby
from typing import Any, Final, TypeVar

from coatcheck.errors import Damaged, StoreError, StoreFull, StoreUnavailable, UnsupportedFormat, development_format
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob, Ref
from coatcheck.storage.catalog import (
    ANY_SESSION,
    BLOB,
    COLUMNS,
    NO_LIMITS,
    REF_COLUMNS,
    SESSION,
    TRANSCRIPT,
    Catalog,
    Entry,
    Freed,
    Limits,
    Note,
    Row,
    SessionFilter,
    SessionInfo,
    SetAside,
    Totals,
    check_quota,
    entry_of,
    key_of,
    newest_in_each,
    newest_of_each,
    ref_values,
    values_of,
)
from coatcheck.storage.disk import Disk

Values = tuple[Any, ...] | dict[str, Any]
_Place = TypeVar("_Place")
_APPLICATION_ID: Final = 0x434F4143
_DEVELOPMENT_ID: Final = 0x434F4154  # of stores made before the first release, in formats that were never released
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
        pinned INTEGER NOT NULL, granted_by TEXT, request TEXT, metadata_json TEXT, gone TEXT,
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
    "CREATE INDEX session_by_creation ON session (created, session_id)",
    "CREATE INDEX session_by_end ON session (used + ttl)",
    "CREATE INDEX blob_raw ON blob (blob_key) WHERE coding = 'raw'",
)
STEPS: list[tuple[str, ...]] = [_TABLES]
HIGHEST: Final = b"\xff" * 32
_EXPIRES, _GONE = 13, 17  # positions of these columns in a row
_BRIEF: Final = """r.digest, r.size, r.codec, r.expires, r.pinned, r.gone, b.coding, b.place, b.frames, s.ttl,
    s.used"""
_FROM: Final = "FROM session s JOIN ref r ON r.session_key = s.session_key LEFT JOIN blob b ON b.digest = r.digest"
_CONTENT: Final = "LEFT JOIN content c ON c.blob_key = b.blob_key"
# By default SQLite finds a digest by scanning all refs of a session in the order of their seq, so the index is named.
BY_DIGEST: Final = "ref INDEXED BY ref_by_digest"
_BY_PREFIX: Final = f"""SELECT {{columns}}, {{content}}, (SELECT o.digest FROM ref o WHERE o.session_key = r.session_key
    AND o.digest >= ? AND o.digest < r.digest LIMIT 1), b.blob_key {_FROM} {_CONTENT}
    WHERE s.session_id = ? AND r.digest >= ? AND r.digest <= ? ORDER BY r.digest DESC, r.seq DESC LIMIT 1"""
NEWEST: Final = {
    True: _BY_PREFIX.format(columns=COLUMNS, content="c.data"),
    False: _BY_PREFIX.format(columns=COLUMNS, content="NULL"),
}
NEWEST_BRIEF: Final = _BY_PREFIX.format(columns=_BRIEF, content="c.data")
OF_SESSION: Final = "session_key = (SELECT session_key FROM session WHERE session_id = ?)"
_DUE: Final = """SELECT session_key, seq FROM session CROSS JOIN ref USING (session_key)
        WHERE used + ttl <= :at AND gone IS NULL AND pinned = 0
    UNION SELECT session_key, seq FROM ref INDEXED BY ref_by_expiry
        WHERE expires <= :at AND gone IS NULL AND pinned = 0"""
_WALK: Final = """SELECT r.gone IS NULL AND r.pinned = 0, r.session_key, r.seq, r.size, s.session_id, r.digest
    FROM session s CROSS JOIN ref r ON r.session_key = s.session_key
    AND r.seq > CASE s.session_key WHEN :key THEN :seq ELSE -1 END
    WHERE s.session_key IN (SELECT session_key FROM session INDEXED BY session_by_end
        WHERE used + ttl <= :at AND session_key >= :key ORDER BY session_key LIMIT :limit)
    ORDER BY s.session_key, r.seq LIMIT :limit"""
_EXPIRED: Final = """SELECT r.session_key, r.seq, r.size, s.session_id, r.digest FROM ref r INDEXED BY ref_by_expiry
    CROSS JOIN session s USING (session_key) WHERE expires <= :at AND gone IS NULL AND pinned = 0 LIMIT :limit"""
_USED: Final = """(SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
    WHERE ref.session_key = session.session_key AND ref.gone IS NULL))"""
_STORED: Final = "(SELECT coalesce(sum(size), 0) FROM blob)"
_STRAY: Final = "gone IS NULL AND digest NOT IN (SELECT digest FROM blob)"
_NO_SESSION: Final = "session_key NOT IN (SELECT session_key FROM session)"
_COUNTED: Final = "(SELECT count(*) FROM ref WHERE ref.digest = blob.digest AND ref.gone IS NULL)"
_MISCOUNTED: Final = """(SELECT b.blob_key FROM blob b LEFT JOIN (SELECT digest, count(*) AS n FROM ref
    WHERE gone IS NULL GROUP BY digest) c ON c.digest = b.digest WHERE b.refs <> coalesce(c.n, 0))"""
_COUNT_USED: Final = f"UPDATE session SET used_bytes = {_USED} WHERE used_bytes <> {_USED}"
_COUNT_STORED: Final = f"UPDATE meta SET value = {_STORED} WHERE key = 'stored_bytes'"
_CHECKS: Final = (
    ("refs without a blob row", f"ref WHERE {_STRAY}", f"UPDATE ref SET gone = 'damaged' WHERE {_STRAY}"),
    ("refs without a session", f"ref WHERE {_NO_SESSION}", f"DELETE FROM ref WHERE {_NO_SESSION}"),
    ("notes without a session", f"note WHERE session_key > 0 AND {_NO_SESSION}",
     f"DELETE FROM note WHERE session_key > 0 AND {_NO_SESSION}"),
    ("content without a blob row", "content WHERE blob_key NOT IN (SELECT blob_key FROM blob)", ""),
    ("blobs with a wrong count of refs", _MISCOUNTED,
     f"UPDATE blob SET refs = {_COUNTED} WHERE blob_key IN {_MISCOUNTED}"),
    ("sessions with a wrong count of bytes", f"session WHERE used_bytes <> {_USED}", _COUNT_USED),
    ("wrong total of stored bytes", f"meta WHERE key = 'stored_bytes' AND value <> {_STORED}", _COUNT_STORED),
)  # fmt: skip
"""What may be wrong with rows, where, and the statement that corrects it."""
_OWNER: Final = "(CASE ?1 WHEN '' THEN 0 ELSE (SELECT session_key FROM session WHERE session_id = ?1) END)"
# The notes of the store itself have an empty owner, whose length is their session key.
_NOTES: Final = {
    owned: f"SELECT key, value FROM note WHERE session_key = {key} AND key >= ?2 AND key < ?3 ORDER BY key"
    for owned, key in ((False, "length(?1)"), (True, "(SELECT session_key FROM session WHERE session_id = ?1)"))
}
_FIRST_NOTES: Final = """WITH owner AS (SELECT session_key FROM session WHERE session_id = ?1)
    SELECT note.key, note.value FROM json_each(?2) asked, owner JOIN note ON note.session_key = owner.session_key
    AND note.key = (SELECT min(key) FROM note WHERE session_key = owner.session_key AND key >= asked.value
    AND key < asked.value || 'g')"""
_INSERT: Final = f"INSERT INTO ref (session_key, seq, digest, size, {', '.join(REF_COLUMNS)}, gone)"
_SAVE: Final[dict[type, str]] = {
    SessionInfo: """INSERT INTO session (session_id, parent, ttl, quota, created, used, used_bytes)
        VALUES (:session_id, :parent, :ttl, :quota, :created, :used, :used_bytes) ON CONFLICT (session_id) DO UPDATE
        SET parent = excluded.parent, ttl = excluded.ttl, quota = excluded.quota, used = excluded.used,
            used_bytes = excluded.used_bytes""",
    Blob: """INSERT INTO blob (digest, size, coding, place, frames, used, refs)
        VALUES (:digest, :size, :coding, :place, :frames, :used, 0) ON CONFLICT (digest) DO UPDATE
        SET coding = excluded.coding, place = excluded.place, frames = excluded.frames,
            used = max(used, excluded.used)""",
    Note: f"INSERT OR REPLACE INTO note SELECT owner, ?2, ?3 FROM (SELECT {_OWNER} AS owner) WHERE owner IS NOT NULL",
    Entry: f"""{_INSERT} SELECT session_key, :seq, :digest, :size, :{", :".join(REF_COLUMNS)}, :gone FROM session
        WHERE session_id = :session_id ON CONFLICT (session_key, seq) DO UPDATE
        SET pinned = excluded.pinned, granted_by = excluded.granted_by, gone = excluded.gone""",
}
_DROP: Final[dict[type, tuple[str, ...]]] = {
    SessionInfo: (f"DELETE FROM note WHERE session_key = {_OWNER}", "DELETE FROM session WHERE session_id = ?1"),
    Blob: ("DELETE FROM content WHERE blob_key = (SELECT blob_key FROM blob WHERE digest = ?1)",
           "DELETE FROM blob WHERE digest = ?1"),
    Note: (f"DELETE FROM note WHERE session_key = {_OWNER} AND key = ?2",),
    Entry: (f"DELETE FROM ref WHERE session_key = {_OWNER} AND seq = ?2",),
}  # fmt: skip
"""`key_of` returns the values for these statements."""


def migrate(db: sqlite3.Connection, disk: Disk) -> None:
    """Migrate the catalog to the current version. The caller holds the store's lock."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application == _DEVELOPMENT_ID or (0 < version <= len(STEPS) and not _has_tables(db, version)):
        raise development_format()
    if application not in (0, _APPLICATION_ID):
        raise StoreUnavailable("the catalog file belongs to another program", hint="use a new folder for the store")
    if version > len(STEPS):
        raise UnsupportedFormat(f"this store has format {version}; this version of coatcheck supports {len(STEPS)}")
    if version and any(found != wanted for found, wanted in _definitions(db, version)):
        raise Damaged(
            "the definitions of the catalog's tables are damaged", hint="restore it from an export or a backup"
        )
    for number, step in enumerate(STEPS[version:], version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in step:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")
            disk.commit(db)
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _has_tables(db: sqlite3.Connection, version: int) -> bool:
    """Return whether the database has the tables, columns, indexes and triggers of this version. It may have other
    tables."""
    wanted = _tables_of(version)
    names = {name for name, _ in wanted}
    return {one for one in _tables(db) if one[0] in names} == wanted


def _definitions(db: sqlite3.Connection, version: int) -> Iterator[tuple[str | None, str | None]]:
    """Yield the SQL of each table, index and trigger as it is in the database, and as it should be. One changed letter
    may give a column another type, so that no row is found."""
    found = dict(db.execute("SELECT name, sql FROM sqlite_master").fetchall())
    return ((found.get(name), sql) for name, sql in _sql_of(version).items())


@cache
def _sql_of(version: int) -> dict[str, str | None]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in ("BEGIN", *chain(*STEPS[:version])):
            db.execute(statement)
        return dict(db.execute("SELECT name, sql FROM sqlite_master").fetchall())


@cache
def _tables_of(version: int) -> set[tuple[str, str | None]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in ("BEGIN", *chain(*STEPS[:version])):
            db.execute(statement)
        return _tables(db)


def _tables(db: sqlite3.Connection) -> set[tuple[str, str | None]]:
    """Return the names of tables, indexes and triggers, with those of their columns."""
    return set(db.execute("SELECT m.name, c.name FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c"))


def is_migrated(db: sqlite3.Connection) -> bool:
    return int(db.execute("PRAGMA user_version").fetchone()[0]) >= len(STEPS)


def _from(index: str) -> str:
    return _FROM.replace("ref r", f"ref r INDEXED BY {index}")


class SqliteCatalog(Catalog):
    """Sessions, refs and small blobs in the tables of one SQLite database."""

    _writer: sqlite3.Connection
    uri_prefix = "memory:#blob="

    @abstractmethod
    def _query(self, sql: str, values: Values = (), *, settled: bool = True, apart: bool = False) -> list[Any]:
        """Return the rows of a query. Inside a change, it sees the change, unless it is kept `apart`."""

    # Rows

    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        if session_id is not None:
            found = self._query(f"SELECT {SESSION} FROM session s WHERE s.session_id = ?", (session_id,))
            return (SessionInfo(*row) for row in found)
        rows = self._pages("session s", "session_key", SESSION)
        return (SessionInfo(*row) for row in rows if isinstance(row[0], str))  # otherwise it has ended

    def session_page(
        self, prefix: str, before: tuple[float, str] | None, limit: int, wanted: SessionFilter = ANY_SESSION
    ) -> list[SessionInfo]:
        where, name = ["s.session_id < x''"], "CAST(s.session_id AS BLOB)"
        values: dict[str, Any] = {"prefix": prefix.encode(), "limit": limit}
        if prefix:
            where.append(f"instr({name}, :prefix) = 1")
        if before is not None:
            where.append("(s.created, s.session_id) < (:created, :session_id)")
            values["created"], values["session_id"] = before
        if wanted.contains:
            where.append(f"instr({name}, :contains) > 0")
            values["contains"] = wanted.contains.encode()
        for number, text in enumerate(wanted.without):
            where.append(f"instr({name}, :without{number}) <> 1")
            values[f"without{number}"] = text.encode()
        if wanted.roots:
            listed = (
                "SELECT 1 FROM session p WHERE p.session_id = s.parent AND instr(CAST(s.parent AS BLOB), :prefix) = 1"
            )
            where.append(f"(s.parent IS NULL OR NOT EXISTS ({listed}))")
        if wanted.parents is not None:
            marks = {f"parent{number}": parent for number, parent in enumerate(wanted.parents)}
            where.append(f"s.parent IN ({', '.join(f':{mark}' for mark in marks)})")
            values |= marks
        if wanted.used_after is not None:
            where.append("s.used > :used_after")
            values["used_after"] = wanted.used_after
        # Children are few, so all sessions are read: faster in the order of the table.
        how = "INDEXED BY session_by_creation" if wanted.parents is None else "NOT INDEXED"
        rows = self._query(
            f"SELECT {SESSION} FROM session s {how} WHERE {' AND '.join(where)}"
            " ORDER BY s.created DESC, s.session_id DESC LIMIT :limit",
            values,
        )
        return [SessionInfo(*row) for row in rows]

    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        key = () if digest is None else (bytes.fromhex(digest),)
        if session_id is None:
            return self._entries(_FROM, "WHERE r.digest = ? ORDER BY r.seq DESC", key)
        if digest is None:
            return self._entries(_FROM, "WHERE s.session_id = ? ORDER BY r.seq DESC", (session_id,))
        where = "WHERE s.session_id = ? AND r.digest = ? ORDER BY r.seq DESC"
        return self._entries(_from("ref_by_digest"), where, (session_id, *key))

    def _entries(
        self, source: str, where: str, values: Values, *, content: bool = False, settled: bool = True
    ) -> list[Entry]:
        columns = f"{COLUMNS}, {'c.data' if content else 'NULL'} {source} {_CONTENT if content else ''}"
        rows = self._query(f"SELECT {columns} {where}", values, settled=settled)
        try:
            return [entry_of(row) for row in rows]
        except (AttributeError, TypeError, ValueError) as error:  # a damaged index led to a row that does not exist
            raise Damaged("the catalog has an invalid row", hint="run 'coatcheck verify'") from error

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        if digest is None:
            keys = self._pages("blob", "blob_key", "blob_key")
        else:
            keys = iter(self._query("SELECT blob_key FROM blob WHERE digest = ?", (bytes.fromhex(digest),)))
        for key in keys:
            # Row and content in one statement: keys are reused, so the content may be another blob's by then. Apart
            # from the writer: a failed read would spoil its transaction.
            try:
                found = self._query(
                    f"SELECT {BLOB}, c.data FROM blob b {_CONTENT} AND b.coding = 'inline' WHERE b.blob_key = ?",
                    key, apart=True,
                )  # fmt: skip
            except StoreError as error:
                rows_alone = self._query(f"SELECT {BLOB} FROM blob b WHERE b.blob_key = ?", key, apart=True)
                found = [(*row, error) for row in rows_alone]
            for digest_now, *rest, content in found:
                if not isinstance(digest_now, bytes):
                    raise Damaged("the catalog has an invalid row", hint="restore the store from a backup")
                if content is not None and not isinstance(content, (bytes, StoreError)):
                    content = Damaged("the content has a wrong type")
                yield Blob(digest_now.hex(), *rest), content

    def notes(self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False) -> list[Note]:
        sql = _NOTES[owner != ""] + (" DESC LIMIT ?4" if newest else " LIMIT ?4")
        found = self._query(sql, (owner, start, stop, -1 if limit is None else limit))
        return [Note(owner, key, value) for key, value in found]

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        found = self._query(_FIRST_NOTES, (owner, json.dumps(prefixes))) if prefixes else []
        return [Note(owner, key, value) for key, value in found]

    def save(self, *rows: Row) -> None:
        for kind, some in groupby(rows, type):
            self._writer.executemany(_SAVE[kind], [one if isinstance(one, Note) else values_of(one) for one in some])

    def drop(self, *rows: Row) -> None:
        for kind, some in groupby(rows, type):
            keys = [tuple(key_of(row).values()) for row in some]
            for statement in _DROP[kind]:
                self._writer.executemany(statement, keys)

    def _drop_notes(self, owner: str, start: str, stop: str) -> None:
        where = f"session_key = {_OWNER} AND key >= ?2 AND key < ?3"
        self._run(f"DELETE FROM note WHERE {where}", (owner, start, stop))

    def _let_go(self, refs: Sequence[Entry]) -> Freed:
        return self._let_go_of(
            [(one.ref.size_bytes, one.session.session_id, bytes.fromhex(one.ref.artifact_id)) for one in refs]
        )

    def _let_go_of(self, refs: Sequence[tuple[int, str, bytes]]) -> Freed:
        """Update the counts after removing live refs (size, session, digest)."""
        self._writer.executemany("UPDATE blob SET refs = refs - 1 WHERE digest = ?", [one[2:] for one in refs])
        self._writer.executemany(
            "UPDATE session SET used_bytes = used_bytes - ? WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM"
            f" {BY_DIGEST} WHERE session_key = session.session_key AND digest = ? AND gone IS NULL)",
            set(refs),
        )
        return Freed.of(len(refs), self._drop_unreferenced())

    def _revive(self, digest: str) -> int:
        key = (bytes.fromhex(digest),)
        if self._one("SELECT 1 FROM ref INDEXED BY ref_damaged WHERE digest = ? AND gone = 'damaged'", key) is None:
            return 0
        back = super()._revive(digest)
        self._run("UPDATE blob SET refs = refs + ? WHERE digest = ?", (back, *key))
        return back

    def _damaged(self, digest: str) -> list[Entry]:
        where = "WHERE r.digest = ? AND r.gone = 'damaged'"
        return self._entries(_from("ref_damaged"), where, (bytes.fromhex(digest),))

    # Reading

    def find(
        self,
        session_id: str,
        *,
        prefix: str | None = None,
        name: str | None = None,
        content: bool = False,
        limit: int | None = None,
        before: int | None = None,
    ) -> list[Entry]:
        if prefix is not None:
            return self._under(session_id, prefix, content)[:limit]
        source, where, values = _FROM, "", [session_id, -1 if limit is None else limit]
        if name is not None:
            source, where, values = _from("ref_by_name"), "AND r.name = ?3", [*values, name]
        elif before is not None:
            where, values = "AND r.seq < ?3", [*values, before]
        where = f"WHERE s.session_id = ?1 {where} ORDER BY r.seq DESC LIMIT ?2"
        return self._entries(source, where, tuple(values), content=content)

    def _under(self, session_id: str, prefix: str, content: bool, *, settled: bool = True) -> list[Entry]:
        """Return what `find` returns for a prefix."""
        low, high = prefix_range(prefix)
        found = self._query(NEWEST[content], (low, session_id, low, high), settled=settled)
        if not found:
            return []
        if (entry := entry_alone(found[0])) is not None:
            return [entry]
        where = "WHERE s.session_id = ? AND r.digest BETWEEN ? AND ? ORDER BY r.seq DESC"
        return newest_of_each(
            self._entries(_from("ref_by_digest"), where, (session_id, low, high), content=content, settled=settled)
        )

    def find_many(self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False) -> list[Entry]:
        lineage = list(sessions)
        columns, joined = (f"{COLUMNS}, c.data", _CONTENT) if content else (f"{COLUMNS}, NULL", "")
        rows = self._under_any(columns, f"{_from('ref_by_digest')} {joined}", lineage, prefixes)
        return newest_in_each(lineage, list(map(entry_of, rows)))

    def near(self, sessions: Iterable[str], digests: Iterable[str]) -> set[str]:
        source = "FROM session s JOIN ref r INDEXED BY ref_by_digest ON r.session_key = s.session_key"
        starts = {digest[:MIN_PREFIX] for digest in digests}
        return {digest.hex() for (digest,) in self._under_any("r.digest", source, list(sessions), starts)}

    def _under_any(self, columns: str, source: str, lineage: Sequence[str], prefixes: Iterable[str]) -> list[Any]:
        """Return columns of all refs of these sessions to artifacts whose id begins with one of the prefixes."""
        bounds = [bound for prefix in prefixes for bound in prefix_range(prefix)]
        if not bounds:
            return []
        wanted = f"WITH wanted (low, high) AS (VALUES {', '.join(['(?, ?)'] * (len(bounds) // 2))})"
        return self._query(
            f"{wanted} SELECT {columns} FROM wanted CROSS JOIN {source.removeprefix('FROM')} WHERE s.session_id IN"
            f" ({', '.join('?' * len(lineage))}) AND r.digest BETWEEN wanted.low AND wanted.high ORDER BY r.seq DESC",
            (*bounds, *lineage),
        )

    def fetch(self, session_id: str, prefix: str, *, brief: bool = False) -> list[Entry]:
        if brief:
            low, high = prefix_range(prefix)
            found = self._query(NEWEST_BRIEF, (low, session_id, low, high))
            if not found:
                return []
            if (entry := brief_entry_alone(found[0], session_id)) is not None:
                return [entry]
        return self._under(session_id, prefix, content=True)

    def _granted(self, session_id: str, prefix: str = "", *, content: bool = False) -> list[Entry]:
        return self._entries(
            _from("ref_by_grant"),
            "WHERE r.granted_by = ? AND r.digest BETWEEN ? AND ? AND substr(s.session_id, 1, ?) = ?"
            " ORDER BY r.created DESC, r.seq DESC",
            (session_id, *prefix_range(prefix), len(TRANSCRIPT), TRANSCRIPT),
            content=content,
        )

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        key = (bytes.fromhex(digest),)
        found = self._query(f"SELECT {BLOB} FROM blob b WHERE b.digest = ?", key, settled=settled)
        return Blob(digest, *found[0][1:]) if found else None

    def _would_expire(self, at: float) -> Freed:
        ((refs,),) = self._query(f"SELECT count(*) FROM ({_DUE})", {"at": at})
        blobs = self._query(
            f"SELECT {BLOB} FROM blob b JOIN (SELECT digest, count(*) AS n FROM ref JOIN ({_DUE}) USING"
            " (session_key, seq) GROUP BY digest) dead ON dead.digest = b.digest AND dead.n = b.refs",
            {"at": at},
        )
        return Freed.of(refs, [Blob(digest.hex(), *rest) for digest, *rest in blobs])

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        where = "WHERE coding = 'raw' AND used > ? AND used <= ?"
        raw = f"(SELECT * FROM blob INDEXED BY blob_raw {where}) b"
        for digest, *rest in self._pages(raw, "blob_key", BLOB, (after, until)):
            yield Blob(digest.hex(), *rest)

    def totals(self) -> Totals:
        row = self._query(
            """SELECT (SELECT count(*) FROM session WHERE session_id < x''),
            (SELECT count(*) FROM ref WHERE gone IS NULL), (SELECT count(*) FROM blob),
            (SELECT count(*) FROM ref WHERE gone IS NOT NULL), (SELECT coalesce(sum(size), 0) FROM blob),
            (SELECT coalesce(sum(size), 0) FROM ref WHERE gone IS NULL)"""
        )[0]
        return Totals(*row)

    def _pages(self, table: str, key: str, columns: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield all rows of a table in key order, page by page, so that no reader keeps the WAL from being reset."""
        last = -1
        page = f"SELECT {key}, {columns} FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT 64"
        while rows := self._query(page, (*values, last)):
            for row in rows:
                yield row[1:]
            last = rows[-1][0]

    # Writing

    def put(self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        def work() -> bool:
            if reuse and not self._has_copy(entry.blob):
                return False
            self._check_quotas(entry, limits)
            self._apply(entry, heal=heal, grace=limits.grace)
            return True

        return self.change("putting an artifact", work, effect="add")

    def _apply(self, entry: Entry, *, heal: bool, grace: float) -> None:
        """Put an entry, inside a transaction."""
        ref, digest = entry.ref, bytes.fromhex(entry.ref.artifact_id)
        session_key, seq = self._session_for(entry.session, ref.created, grace)
        self._store(entry, digest, heal)
        held = self._one(
            "SELECT seq, name, codec, media_type, kind, tool, call_id, producer, parents, summary, expires, pinned,"
            f" granted_by, request, metadata_json, size FROM {BY_DIGEST} WHERE session_key = ? AND digest = ?"
            " AND gone IS NULL ORDER BY seq DESC LIMIT 1",
            (session_key, digest),
        )
        values = ref_values(ref)
        if held and held[11]:  # a pin belongs to the artifact: it covers later refs
            values = (*values[:11], 1, *values[12:])
        if held and held[-1] != ref.size_bytes:
            self._set_size(digest, ref.size_bytes)
        if held and held[1:-1] == values[:9] + values[10:] and self._is_current(session_key, ref.name, held[0]):
            return
        if held is None:
            self._run(
                f"DELETE FROM {BY_DIGEST} WHERE session_key = ? AND digest = ? AND gone IS NOT NULL",
                (session_key, digest),
            )
        self._run(
            f"{_INSERT} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            (session_key, seq, digest, ref.size_bytes, *values),
        )
        self._run("UPDATE blob SET refs = refs + 1 WHERE digest = ?", (digest,))
        self._run(
            "UPDATE session SET next_seq = next_seq + 1, used_bytes = used_bytes + ? WHERE session_key = ?",
            (0 if held else ref.size_bytes, session_key),
        )

    def _session_for(self, info: SessionInfo, now: float, grace: float) -> tuple[int, int]:
        """Do the same as `_use`, in fewer statements. Returns the key of the session and the number of its next ref."""
        found = self._one(
            "SELECT session_key, next_seq, ttl, used FROM session WHERE session_id = ?", (info.session_id,)
        )
        if found is None or (found[2] is not None and found[3] + found[2] + grace <= now):
            super()._use(info, now, grace)
            found = self._one("SELECT session_key, next_seq FROM session WHERE session_id = ?", (info.session_id,))
        elif now > found[3]:
            self._run("UPDATE session SET used = ? WHERE session_key = ?", (now, found[0]))
        return found[0], found[1]

    def _use(self, info: SessionInfo, at: float, grace: float) -> None:
        self._session_for(info, at, grace)

    def _store(self, entry: Entry, digest: bytes, heal: bool) -> None:
        """Add the blob of a put and its content, or replace what is damaged."""
        blob = entry.blob
        found = self._one("SELECT blob_key FROM blob WHERE digest = ?", (digest,))
        if found is None:
            key = self._run(
                "INSERT INTO blob (digest, size, coding, place, frames, refs, used) VALUES (?, ?, ?, ?, ?, 0, ?)",
                (digest, blob.size, blob.coding, blob.place, blob.frames, entry.ref.created),
            ).lastrowid
            if entry.content is not None:
                try:
                    self._run("INSERT INTO content VALUES (?, ?)", (key, entry.content))
                except sqlite3.IntegrityError:  # damaged content was left behind under this key
                    self._replace_content(key, entry.content)
            if self._revive(blob.digest):
                self._set_size(digest, blob.size)
            return
        if entry.content is not None or heal:
            self._run(
                "UPDATE blob SET coding = ?, place = ?, frames = ? WHERE blob_key = ? AND place <> ?",
                (blob.coding, blob.place, blob.frames, *found, blob.place),
            )
        if entry.content is not None:
            self._replace_content(found[0], entry.content)

    def _set_size(self, digest: bytes, size: int) -> None:
        """Correct the size of content wherever damage has changed it, and count bytes again."""
        sql = "UPDATE {} SET size = ?2 WHERE digest = ?1 AND size <> ?2"
        if sum(self._run(sql.format(table), (digest, size)).rowcount for table in ("ref", "blob")):
            self._run(_COUNT_USED)
            self._run(_COUNT_STORED)

    def _replace_content(self, key: int | None, data: bytes) -> None:
        """Replace a blob's content. If the old content's pages are damaged, they are left alone and the blob moves to a
        new key: damage to one artifact must not affect the others."""
        if not self._are_readable([key]):
            new = self._one("SELECT 1 + max((SELECT max(blob_key) FROM blob), (SELECT max(blob_key) FROM content))")[0]
            self._run("UPDATE blob SET blob_key = ? WHERE blob_key = ?", (new, key))
            key = new
        self._run(
            "INSERT INTO content VALUES (?, ?) ON CONFLICT (blob_key) DO UPDATE SET data = excluded.data"
            " WHERE data <> excluded.data",
            (key, data),
        )

    def _are_readable(self, keys: Sequence[int | None]) -> bool:
        """Return whether contents can be read, on another connection: a failed read would spoil the transaction."""
        wanted = "SELECT max(data) FROM content WHERE blob_key IN (SELECT value FROM json_each(?))"
        try:
            self._query(wanted, (json.dumps(keys),), settled=False, apart=True)
        except Damaged:
            return False
        return True

    def _drop_unreferenced(self) -> list[Blob]:
        blobs = self._run(f"SELECT {BLOB} FROM blob b WHERE refs = 0").fetchall()
        if blobs:
            self._drop_content("blob WHERE refs = 0 AND coding = 'inline'")
            self._run("DELETE FROM blob WHERE refs = 0")
        return [Blob(digest.hex(), *rest) for digest, *rest in blobs]

    def _drop_content(self, which: str) -> None:
        """Delete content, except where it cannot be read: freeing damaged pages would damage others."""
        keys = [key for (key,) in self._run(f"SELECT blob_key FROM {which}")]
        if not self._are_readable(keys):
            keys = [key for key in keys if self._are_readable([key])]
        self._writer.executemany("DELETE FROM content WHERE blob_key = ?", [(key,) for key in keys])

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed = self._in_steps("expiring", _resumed(partial(self._expire_sessions, at), (0, -1)))
        freed += self._in_steps("expiring", partial(self._expire_refs, at))
        self._in_steps("expiring", _resumed(partial(self._forget, at, forget_before), 0))
        self._drop_aside(at)
        return freed

    def _expire_sessions(self, at: float, limit: int, after: tuple[int, int]) -> tuple[Freed, tuple[int, int] | None]:
        """Expire the next refs of sessions that had expired at `at`. Tombstones count for the limit too, because they
        take time. Also returns the last ref (session key, seq), or None at the end."""
        rows = self._run(_WALK, {"at": at, "key": after[0], "seq": after[1], "limit": limit}).fetchall()
        freed = self._expire_all([row[1:] for row in rows if row[0]])
        return freed, (rows[-1][1], rows[-1][2]) if rows else None

    def _expire_refs(self, at: float, limit: int) -> tuple[Freed, bool]:
        """Expire the next refs by their own expiry time."""
        rows = self._run(_EXPIRED, {"at": at, "limit": limit}).fetchall()
        return self._expire_all(rows), bool(rows)

    def _expire_all(self, refs: Sequence[tuple[int, int, int, str, bytes]]) -> Freed:
        """Turn live refs (session key, seq, size, session, digest) into tombstones."""
        marked = "UPDATE ref SET gone = 'expired' WHERE session_key = ? AND seq = ?"
        self._writer.executemany(marked, [ref[:2] for ref in refs])
        return self._let_go_of([ref[2:] for ref in refs])

    def _forget(self, at: float, before: float, limit: int, after: int) -> tuple[Freed, int | None]:
        """Do the same as `_forget_sessions` for the next sessions. Also returns the last one that is done, or None at
        the end."""
        page = self._run(
            "SELECT session_key, used + ttl < ? FROM session INDEXED BY session_by_end WHERE session_key > ?"
            " AND used + ttl <= ? AND session_id < x'' ORDER BY session_key LIMIT ?",
            (before, after, at, limit),
        ).fetchall()
        if not page:
            return Freed(), None
        old = [key for key, is_old in page if is_old]
        if self._drop_some("note", [key for key, _ in page], limit, "t.key >= 'record/' AND t.key < 'record0'"):
            return Freed(), after
        if self._drop_some("ref", old, limit, "gone IS NOT NULL"):
            return Freed(), after
        without = "SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM ref WHERE session_key = value)"
        empty = [key for (key,) in self._run(without, (json.dumps(old),))]
        if self._drop_some("note", empty, limit):
            return Freed(), after
        self._writer.executemany("DELETE FROM session WHERE session_key = ?", [(key,) for key in empty])
        return Freed(), page[-1][0]

    def _drop_some(self, table: str, sessions: Sequence[int], limit: int, where: str = "TRUE") -> bool:
        """Delete notes or refs of these sessions, at most `limit`. Returns whether there may be more."""
        key = "key" if table == "note" else "seq"
        found = self._run(
            f"SELECT t.session_key, t.{key} FROM json_each(?) one CROSS JOIN {table} t ON t.session_key = one.value"
            f" WHERE {where} LIMIT ?",
            (json.dumps(sessions), limit),
        ).fetchall()
        self._writer.executemany(f"DELETE FROM {table} WHERE session_key = ? AND {key} = ?", found)
        return len(found) == limit

    def is_named(self, place: str) -> bool:
        return bool(self._query("SELECT 1 FROM blob WHERE place = ? LIMIT 1", (place,)))

    def _has_copy(self, blob: Blob) -> bool:
        where = "digest = ? AND place = ?"
        return self._one(f"SELECT 1 FROM blob WHERE {where}", (bytes.fromhex(blob.digest), blob.place)) is not None

    def _check_quotas(self, entry: Entry, limits: Limits) -> None:
        digest = bytes.fromhex(entry.ref.artifact_id)
        if entry.session.quota is not None:
            used, is_held = self._one(
                f"SELECT used_bytes, EXISTS (SELECT 1 FROM {BY_DIGEST} WHERE ref.session_key = session.session_key"
                " AND digest = ? AND gone IS NULL) FROM session WHERE session_id = ?",
                (digest, entry.session.session_id),
            ) or (0, 0)
            if not is_held:
                check_quota("session", entry.session.quota, used, entry)
        if limits.store_quota is not None and not self._one("SELECT 1 FROM blob WHERE digest = ?", (digest,)):
            (used,) = self._one("SELECT value FROM meta WHERE key = 'stored_bytes'")
            check_quota("store", limits.store_quota, used, entry)

    def _is_current(self, session_key: int, name: str | None, seq: int) -> bool:
        """Return whether no later ref uses the name."""
        newest = "SELECT max(seq) FROM ref WHERE session_key = ? AND name = ?"
        return name is None or self._one(newest, (session_key, name)) == (seq,)

    def doubtful_sizes(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        wrong = "SELECT DISTINCT r.digest, r.size FROM ref r JOIN blob b USING (digest) WHERE gone IS NULL"
        for digest, size in self._query(f"{wrong} AND r.size <> b.size"):
            if isinstance(digest, bytes) and isinstance(size, int):  # a damaged row may have anything there
                found.setdefault(digest.hex(), set()).add(size)
        return found

    def set_size(self, digest: str, size: int) -> None:
        self.change("setting a size right", lambda: self._set_size(bytes.fromhex(digest), size))

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        return self.change("checking the catalog", lambda: self._check(repair, until))

    def _check(self, repair: bool, until: float) -> list[str]:
        """Return what is wrong with the rows. Parts of the database that cannot be read are reported once."""
        try:
            messages = [message for (message,) in self._run("PRAGMA integrity_check(20)") if message != "ok"]
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            messages = [str(error)]
        problems = [f"SQLite reports: {message}" for message in messages]
        mends = repair and not messages  # rows read from damaged tables and indexes are not reliable enough to change
        for name, where, mend in _CHECKS:
            try:
                (count,) = self._one(f"SELECT count(*) FROM {where}")
            except sqlite3.DatabaseError as error:
                if not messages or not is_damage(error):
                    raise
                continue
            if count:
                problems.append(f"{count} {name}" + (": set right" if mends else ""))
            if count and mends:
                if mend.startswith("UPDATE ref"):
                    for (digest,) in self._run(f"SELECT DISTINCT digest FROM {where}").fetchall():
                        self.save(SetAside(Blob(digest.hex(), 0, "raw"), until).note())
                if mend:
                    self._run(mend)
                else:
                    self._drop_content(where)
        if mends:
            self._drop_unreferenced()
        try:
            problems += self._check_records(repair=repair) + self._check_tokens(repair=repair)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
        return problems

    def _run(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._writer.execute(sql, values)

    def _one(self, sql: str, values: Values = ()) -> Any:
        return self._writer.execute(sql, values).fetchone()


def _resumed(
    step: Callable[[int, _Place], tuple[Freed, _Place | None]], start: _Place
) -> Callable[[int], tuple[Freed, bool]]:
    """Return a step for `_in_steps` that continues where the step before ended. A smaller limit means that a step has
    failed: then it begins again."""
    place, last = start, 0

    def run(limit: int) -> tuple[Freed, bool]:
        nonlocal place, last
        place, last = start if limit < last else place, limit
        freed, after = step(limit, place)
        place = place if after is None else after
        return freed, after is not None

    return run


def entry_alone(row: Sequence[Any]) -> Entry | None:
    """Return the entry of a row of `NEWEST`, or None if `find` has to look at other rows too."""
    *rest, other, _ = row
    return entry_of(rest) if other is None and rest[_GONE] is None and rest[_EXPIRES] is None else None


def brief_entry_alone(row: Sequence[Any], session_id: str) -> Entry | None:
    """Return the entry of a row of `NEWEST_BRIEF`, or None if `find` has to look at other rows too."""
    digest, size, codec, expires, pinned, gone, coding, place, frames, ttl, used, data, other, _ = row
    if other is not None or gone is not None or expires is not None:
        return None
    artifact_id = digest.hex()
    ref = Ref(artifact_id, session_id, size, "", "", codec, pinned=bool(pinned))
    blob = Blob(artifact_id, size, coding or "inline", place or "", frames or b"")
    return Entry(ref, blob, SessionInfo(session_id, None, ttl, None, 0.0, used), data)


def translated(error: sqlite3.Error | UnicodeDecodeError, doing: str) -> StoreError:
    """Return our error for an SQLite error. Text that is not UTF-8, even in a message of SQLite, is damage."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, UnicodeDecodeError) or (isinstance(error, sqlite3.DatabaseError) and is_damage(error)):
        return Damaged(f"the catalog is damaged: {error}", hint="restore it from an export, or open a new store")
    return StoreUnavailable(f"the catalog failed while {doing}: {error}", hint="check the folder and try again")


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether SQLite reports a damaged file, as opposed to one that is busy, full or misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
