"""A catalog in the tables of an SQLite database. `memory` and `folder` say where the database is.

`blob.refs` counts refs other than tombstones; a blob whose count falls to zero is deleted in the
same transaction. `session.used_bytes` counts each artifact of a session once. The view `entry`
joins a ref with its session and blob: it is the only place that names all columns.

The tables are created in numbered steps: a new store runs all of them, an older one those it does
not have yet. Each step runs in a transaction of its own, which also updates the version. A released
step never changes.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any, Final

from coatcheck.errors import (
    Damaged,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnsupportedFormat,
    development_format,
)
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob
from coatcheck.storage import expiry
from coatcheck.storage.catalog import (
    ANY_SESSION,
    NO_LIMITS,
    RECORDS,
    TRANSCRIPT,
    Catalog,
    Entry,
    Freed,
    InList,
    Limits,
    Note,
    Row,
    SessionFilter,
    SessionInfo,
    SetAside,
    Totals,
    blob_from,
    check_quota,
    entry_from,
    newest_in_each,
    newest_of_each,
    ref_values,
    session_from,
)
from coatcheck.storage.disk import Disk

Values = tuple[Any, ...] | dict[str, Any]
_APPLICATION_ID: Final = 0x434F4157
_DEVELOPMENT_IDS: Final = (0x434F4143, 0x434F4154)  # of stores in formats that were never released
# A store is compared with these texts byte for byte, so their line breaks must not change.
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    (
        "CREATE TABLE session (\n"
        "        session_key INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE,"
        " parent TEXT, ttl REAL, quota INTEGER,\n"
        "        created REAL NOT NULL, used REAL NOT NULL,"
        " used_bytes INTEGER NOT NULL DEFAULT 0,\n"
        "        next_seq INTEGER NOT NULL DEFAULT 1)"
    ),
    (
        "CREATE TABLE blob (\n"
        "        blob_key INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE,"
        " size INTEGER NOT NULL, coding TEXT NOT NULL,\n"
        "        place TEXT NOT NULL, frames BLOB NOT NULL, refs INTEGER NOT NULL,"
        " used REAL NOT NULL)"
    ),
    "CREATE INDEX blob_unreferenced ON blob (blob_key) WHERE refs = 0",
    "CREATE TABLE content (blob_key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    (
        "CREATE TABLE ref (\n"
        "        session_key INTEGER NOT NULL, seq INTEGER NOT NULL, digest BLOB NOT NULL,"
        " size INTEGER NOT NULL, name TEXT,\n"
        "        codec TEXT NOT NULL, media_type TEXT NOT NULL, kind TEXT NOT NULL,"
        " tool TEXT, call_id TEXT,\n"
        "        producer TEXT NOT NULL, parents TEXT NOT NULL, summary TEXT NOT NULL,"
        " created REAL NOT NULL, expires REAL,\n"
        "        pinned INTEGER NOT NULL, granted_by TEXT, request TEXT, metadata_json TEXT,"
        " gone TEXT,\n"
        "        PRIMARY KEY (session_key, seq)) WITHOUT ROWID"
    ),
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
    (
        "CREATE VIEW entry AS SELECT\n"
        "        ref.session_key, ref.seq, ref.digest, ref.size, ref.name, ref.codec,"
        " ref.media_type, ref.kind, ref.tool,\n"
        "        ref.call_id, ref.producer, ref.parents, ref.summary, ref.created,"
        " ref.expires, ref.pinned, ref.granted_by,\n"
        "        ref.request, ref.metadata_json, ref.gone,\n"
        "        blob.blob_key, blob.coding, blob.place, blob.frames,\n"
        "        session.session_id, session.parent, session.ttl, session.quota,"
        " session.created AS session_created,\n"
        "        session.used, session.used_bytes\n"
        "        FROM session JOIN ref ON ref.session_key = session.session_key"
        " LEFT JOIN blob ON blob.digest = ref.digest"
    ),
)
STEPS: list[tuple[str, ...]] = [_TABLES]


@dataclass(frozen=True)
class _Check:
    """Something that may be wrong with rows: a name, a query for the number of such rows, and what
    corrects them."""

    name: str
    count: str
    mend: str


_CHECKS: Final = (
    _Check(
        "refs without a session",
        "SELECT count(*) FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)",
        "DELETE FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)",
    ),
    _Check(
        "notes without a session",
        "SELECT count(*) FROM note WHERE session_key > 0 AND session_key NOT IN"
        " (SELECT session_key FROM session)",
        "DELETE FROM note WHERE session_key > 0 AND session_key NOT IN"
        " (SELECT session_key FROM session)",
    ),
    _Check(
        "blobs with a wrong count of refs",
        """SELECT count(*) FROM blob LEFT JOIN
            (SELECT digest, count(*) AS number FROM ref WHERE gone IS NULL GROUP BY digest) AS live
            ON live.digest = blob.digest WHERE blob.refs <> coalesce(live.number, 0)""",
        """UPDATE blob SET refs = (SELECT count(*) FROM ref
            WHERE ref.digest = blob.digest AND ref.gone IS NULL)
            WHERE blob_key IN (SELECT blob_key FROM blob LEFT JOIN
            (SELECT digest, count(*) AS number FROM ref WHERE gone IS NULL GROUP BY digest) AS live
            ON live.digest = blob.digest WHERE blob.refs <> coalesce(live.number, 0))""",
    ),
    _Check(
        "sessions with a wrong count of bytes",
        """SELECT count(*) FROM session WHERE used_bytes <> (SELECT coalesce(sum(size), 0) FROM
            (SELECT DISTINCT digest, size FROM ref
                WHERE session_key = session.session_key AND gone IS NULL))""",
        """UPDATE session SET used_bytes = (SELECT coalesce(sum(size), 0) FROM
            (SELECT DISTINCT digest, size FROM ref
                WHERE session_key = session.session_key AND gone IS NULL))""",
    ),
    _Check(
        "wrong total of stored bytes",
        """SELECT count(*) FROM meta WHERE key = 'stored_bytes'
            AND value <> (SELECT coalesce(sum(size), 0) FROM blob)""",
        "UPDATE meta SET value = (SELECT coalesce(sum(size), 0) FROM blob)"
        " WHERE key = 'stored_bytes'",
    ),
)


def migrate(db: sqlite3.Connection, disk: Disk) -> None:
    """Migrate the catalog to the current version. The caller holds the store's lock."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application in _DEVELOPMENT_IDS:
        raise development_format()
    if application not in (0, _APPLICATION_ID):
        raise StoreUnavailable(
            "the catalog file belongs to another program", hint="use a new folder for the store"
        )
    if version > len(STEPS):
        raise UnsupportedFormat(
            f"this store has format {version}; this version of coatcheck supports {len(STEPS)}"
        )
    if version:
        _check_schema(db, version)
    for number, step in enumerate(STEPS[version:], version + 1):
        try:
            db.execute("BEGIN IMMEDIATE")
            for statement in step:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")
            disk.commit(db)
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


@dataclass(frozen=True)
class _Schema:
    """The names of tables, indexes, views and triggers with their SQL, and all columns."""

    sql: dict[str, str | None]
    columns: set[tuple[str, str | None]]

    @classmethod
    def of(cls, db: sqlite3.Connection) -> _Schema:
        sql = db.execute("SELECT name, sql FROM sqlite_master").fetchall()
        columns = db.execute(
            """SELECT master.name, info.name FROM sqlite_master AS master
                LEFT JOIN pragma_table_info(master.name) AS info"""
        ).fetchall()
        return cls({row[0]: row[1] for row in sql}, {(row[0], row[1]) for row in columns})


def _check_schema(db: sqlite3.Connection, version: int) -> None:
    """Raise if the database does not have the tables of this version, or if their SQL was changed:
    one letter may give a column another type, so that no row is found. It may have other tables."""
    wanted, found = _schema_of(version), _Schema.of(db)
    if {column for column in found.columns if column[0] in wanted.sql} != wanted.columns:
        raise development_format()
    if any(found.sql[name] != sql for name, sql in wanted.sql.items()):
        raise Damaged(
            "the definitions of the catalog's tables are damaged",
            hint="restore it from an export or a backup",
        )


@cache
def _schema_of(version: int) -> _Schema:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for step in STEPS[:version]:
            for statement in step:
                db.execute(statement)
        return _Schema.of(db)


class SqliteCatalog(Catalog):
    """Sessions, refs and small blobs in the tables of one SQLite database."""

    _writer: sqlite3.Connection | None = None
    uri_prefix = "memory:#blob="

    @abstractmethod
    def _query(self, sql: str, values: Values = (), *, apart: bool = False) -> list[Any]:
        """Return the rows of a query. Inside a change, it sees the change, unless it is kept
        `apart`."""

    def _opened_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise StoreClosed("the store is closed")
        return self._writer

    def _run(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._opened_writer().execute(sql, values)

    def _run_each(self, sql: str, values: Iterable[Values]) -> None:
        self._opened_writer().executemany(sql, values)

    def _one(self, sql: str, values: Values = ()) -> Any:
        return self._run(sql, values).fetchone()

    # Rows

    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        if session_id is not None:
            found = self._query(
                "SELECT * FROM session WHERE session_id = :session_id", {"session_id": session_id}
            )
            yield from map(session_from, found)
            return
        last = -1
        while page := self._query(
            # The id of a session that has ended is a BLOB, which is greater than all text.
            """SELECT * FROM session WHERE session_key > :last AND session_id < x''
                ORDER BY session_key LIMIT 64""",
            {"last": last},
        ):
            yield from map(session_from, page)
            last = page[-1]["session_key"]

    def session_page(
        self,
        prefix: str,
        before: tuple[float, str] | None,
        limit: int,
        wanted: SessionFilter = ANY_SESSION,
    ) -> list[SessionInfo]:
        created, session_id = (inf, "") if before is None else before
        parents = InList("parent", wanted.parents or ())
        found = self._query(
            f"""SELECT * FROM session INDEXED BY session_by_creation
                WHERE session_id < x'' AND (created, session_id) < (:created, :session_id)
                AND instr(CAST(session_id AS BLOB), :prefix) = 1
                AND instr(CAST(session_id AS BLOB), :contains) > 0
                AND NOT EXISTS (SELECT 1 FROM json_each(:without) AS excluded
                    WHERE instr(CAST(session_id AS BLOB), CAST(excluded.value AS BLOB)) = 1)
                AND (NOT :roots OR parent IS NULL OR instr(CAST(parent AS BLOB), :prefix) <> 1
                    OR parent NOT IN (SELECT listed.session_id FROM session AS listed))
                AND (NOT :has_parents OR parent IN ({parents.sql}))
                AND (:used_after IS NULL OR used > :used_after)
                ORDER BY created DESC, session_id DESC LIMIT :limit""",
            {
                "created": created,
                "session_id": session_id,
                "prefix": prefix.encode(),
                "contains": wanted.contains.encode(),
                "without": json.dumps(wanted.without),
                "roots": wanted.roots,
                "has_parents": wanted.parents is not None,
                "used_after": wanted.used_after,
                "limit": limit,
                **parents.values,
            },
        )
        return [session_from(row) for row in found]

    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        values = {
            "session_id": session_id,
            "digest": None if digest is None else bytes.fromhex(digest),
        }
        if session_id is None:
            return self._entries(
                "SELECT * FROM entry WHERE digest = :digest ORDER BY seq DESC", values
            )
        if digest is None:
            return self._entries(
                "SELECT * FROM entry WHERE session_id = :session_id ORDER BY seq DESC", values
            )
        return self._entries(
            # Without `unlikely`, SQLite reads all refs of the session in the order of their seq.
            "SELECT * FROM entry WHERE session_id = :session_id AND unlikely(digest = :digest)"
            " ORDER BY seq DESC",
            values,
        )

    def _entries(self, sql: str, values: Values) -> list[Entry]:
        rows = self._query(sql, values)
        try:
            return [entry_from(dict(zip(row.keys(), row, strict=True))) for row in rows]
        except (
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # a damaged index led to a row that does not exist
            raise Damaged(
                "the catalog has an invalid row", hint="run 'coatcheck verify'"
            ) from error

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        for blob_key in self._blob_keys(digest):
            for row, content in self._blob_with_content(blob_key):
                if not isinstance(row["digest"], bytes):
                    raise Damaged(
                        "the catalog has an invalid row", hint="restore the store from a backup"
                    )
                if content is not None and not isinstance(content, (bytes, StoreError)):
                    content = Damaged("the content has a wrong type")
                yield blob_from(row), content

    def _blob_keys(self, digest: str | None) -> Iterator[int]:
        if digest is not None:
            found = self._query(
                "SELECT blob_key FROM blob WHERE digest = :digest",
                {"digest": bytes.fromhex(digest)},
            )
            yield from (row["blob_key"] for row in found)
            return
        last = -1
        while page := self._query(
            "SELECT blob_key FROM blob WHERE blob_key > :last ORDER BY blob_key LIMIT 64",
            {"last": last},
        ):
            yield from (row["blob_key"] for row in page)
            last = page[-1]["blob_key"]

    def _blob_with_content(self, blob_key: int) -> list[tuple[Any, Any]]:
        """Return the row of a blob with its content, or with the error of reading that. Row and
        content are read in one statement: keys are reused, so the content may be another blob's by
        then. They are read apart from the writer, because a failed read would spoil its
        transaction."""
        key = {"blob_key": blob_key}
        try:
            found = self._query(
                """SELECT blob.*, content.data FROM blob LEFT JOIN content
                    ON content.blob_key = blob.blob_key AND blob.coding = 'inline'
                    WHERE blob.blob_key = :blob_key""",
                key,
                apart=True,
            )
        except StoreError as error:
            return [
                (row, error)
                for row in self._query(
                    "SELECT * FROM blob WHERE blob_key = :blob_key", key, apart=True
                )
            ]
        return [(row, row["data"]) for row in found]

    def notes(
        self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False
    ) -> list[Note]:
        values = {
            "owner": owner,
            "start": start,
            "stop": stop,
            "limit": -1 if limit is None else limit,
        }
        if newest:
            found = self._query(
                """SELECT key, value FROM note WHERE key >= :start AND key < :stop AND session_key =
                    iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))
                    ORDER BY key DESC LIMIT :limit""",
                values,
            )
        else:
            found = self._query(
                """SELECT key, value FROM note WHERE key >= :start AND key < :stop AND session_key =
                    iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))
                    ORDER BY key LIMIT :limit""",
                values,
            )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        found = self._query(
            """WITH owner AS (SELECT session_key FROM session WHERE session_id = :owner)
                SELECT note.key, note.value FROM json_each(:prefixes) AS asked, owner
                JOIN note ON note.session_key = owner.session_key AND note.key =
                (SELECT min(key) FROM note WHERE session_key = owner.session_key
                    AND key >= asked.value AND key < asked.value || 'g')""",
            {"owner": owner, "prefixes": json.dumps(prefixes)},
        )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def save(self, *rows: Row) -> None:
        for row in rows:
            if isinstance(row, SessionInfo):
                self._save_session(row)
            elif isinstance(row, Blob):
                self._save_blob(row)
            elif isinstance(row, Note):
                self._save_note(row)
            else:
                self._save_ref(row)

    def _save_session(self, info: SessionInfo) -> None:
        self._run(
            """INSERT INTO session (session_id, parent, ttl, quota, created, used, used_bytes)
                VALUES (:session_id, :parent, :ttl, :quota, :created, :used, :used_bytes)
                ON CONFLICT (session_id) DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl,
                quota = excluded.quota, used = excluded.used, used_bytes = excluded.used_bytes""",
            {
                "session_id": info.session_id,
                "parent": info.parent,
                "ttl": info.ttl,
                "quota": info.quota,
                "created": info.created,
                "used": info.used,
                "used_bytes": info.used_bytes,
            },
        )

    def _save_blob(self, blob: Blob) -> None:
        self._run(
            """INSERT INTO blob (digest, size, coding, place, frames, used, refs)
                VALUES (:digest, :size, :coding, :place, :frames, :used, 0)
                ON CONFLICT (digest) DO UPDATE SET coding = excluded.coding, place = excluded.place,
                frames = excluded.frames, used = max(used, excluded.used)""",
            {
                "digest": bytes.fromhex(blob.digest),
                "size": blob.size,
                "coding": blob.coding,
                "place": blob.place,
                "frames": blob.frames,
                "used": blob.used,
            },
        )

    def _save_note(self, note: Note) -> None:
        self._run(
            """INSERT OR REPLACE INTO note SELECT session_key, :key, :value FROM
                (SELECT iif(:owner = '', 0,
                    (SELECT session_key FROM session WHERE session_id = :owner)) AS session_key)
                WHERE session_key IS NOT NULL""",
            {"owner": note.owner, "key": note.key, "value": note.value},
        )

    def _save_ref(self, entry: Entry) -> None:
        self._run(
            """INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, tool,
                    call_id, producer, parents, summary, created, expires, pinned, granted_by,
                    request, metadata_json, gone)
                SELECT session_key, :seq, :digest, :size, :name, :codec, :media_type, :kind, :tool,
                    :call_id, :producer, :parents, :summary, :created, :expires, :pinned,
                    :granted_by, :request, :metadata_json, :gone
                FROM session WHERE session_id = :session_id
                ON CONFLICT (session_key, seq) DO UPDATE
                SET pinned = excluded.pinned, granted_by = excluded.granted_by,
                gone = excluded.gone""",
            ref_values(entry.ref)
            | {"session_id": entry.session.session_id, "seq": entry.seq, "gone": entry.gone},
        )

    def drop(self, *rows: Row) -> None:
        for row in rows:
            if isinstance(row, SessionInfo):
                self._drop_notes(row.session_id, "", "\x7f")
                self._run(
                    "DELETE FROM session WHERE session_id = :session_id",
                    {"session_id": row.session_id},
                )
            elif isinstance(row, Blob):
                digest = {"digest": bytes.fromhex(row.digest)}
                self._drop_content("SELECT blob_key FROM blob WHERE digest = :digest", digest)
                self._run("DELETE FROM blob WHERE digest = :digest", digest)
            elif isinstance(row, Note):
                self._drop_notes(row.owner, row.key, row.key + " ")
            else:
                self._run(
                    """DELETE FROM ref WHERE seq = :seq
                        AND session_key = (SELECT session_key FROM session
                        WHERE session_id = :session_id)""",
                    {"seq": row.seq, "session_id": row.session.session_id},
                )

    def _drop_notes(self, owner: str, start: str, stop: str) -> None:
        self._run(
            """DELETE FROM note WHERE key >= :start AND key < :stop AND session_key =
                iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))""",
            {"owner": owner, "start": start, "stop": stop},
        )

    def _let_go(self, refs: Sequence[Entry]) -> Freed:
        gone = []
        for one in refs:
            digest = bytes.fromhex(one.ref.artifact_id)
            gone.append(
                {"session_id": one.session.session_id, "digest": digest, "size": one.ref.size_bytes}
            )
        return self._let_go_of(gone)

    def _let_go_of(self, refs: Sequence[Any]) -> Freed:
        """Update the counts after live refs were removed: rows with the session id, digest and size
        of each."""
        self._run_each(
            "UPDATE blob SET refs = refs - 1 WHERE digest = :digest",
            [{"digest": ref["digest"]} for ref in refs],
        )
        distinct = {(ref["session_id"], ref["digest"]): ref["size"] for ref in refs}
        self._run_each(
            """UPDATE session SET used_bytes = used_bytes - :size WHERE session_id = :session_id
                AND NOT EXISTS (SELECT 1 FROM ref INDEXED BY ref_by_digest
                WHERE session_key = session.session_key AND digest = :digest AND gone IS NULL)""",
            [
                {"session_id": session_id, "digest": digest, "size": size}
                for (session_id, digest), size in distinct.items()
            ],
        )
        return Freed.of(len(refs), self._drop_unreferenced())

    def _revive(self, digest: str) -> int:
        back = super()._revive(digest)
        if back:
            self._run(
                "UPDATE blob SET refs = refs + :back WHERE digest = :digest",
                {"back": back, "digest": bytes.fromhex(digest)},
            )
        return back

    def _damaged(self, digest: str) -> list[Entry]:
        return self._entries(
            "SELECT * FROM entry WHERE digest = :digest AND gone = 'damaged'",
            {"digest": bytes.fromhex(digest)},
        )

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
            return self._find_prefix(session_id, prefix, content=content)[:limit]
        values = {
            "session_id": session_id,
            "name": name,
            "before": before,
            "limit": -1 if limit is None else limit,
        }
        if name is not None:
            return self._entries(
                """SELECT entry.*, content.data AS content
                    FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                    WHERE session_id = :session_id AND unlikely(name = :name)
                        ORDER BY seq DESC LIMIT :limit""",
                values | {"content": content},
            )
        return self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE session_id = :session_id AND seq < coalesce(:before, 9e18)
                    ORDER BY seq DESC LIMIT :limit""",
            values | {"content": content},
        )

    def _find_prefix(self, session_id: str, prefix: str, *, content: bool) -> list[Entry]:
        low, high = prefix_range(prefix)
        found = self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE session_id = :session_id AND digest BETWEEN :low AND :high""",
            {"session_id": session_id, "low": low, "high": high, "content": content},
        )
        found.sort(key=_newest_first)
        return newest_of_each(found)

    def find_many(
        self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False
    ) -> list[Entry]:
        lineage = list(sessions)
        listed = InList("session", lineage)
        found: list[Entry] = []
        for prefix in prefixes:
            low, high = prefix_range(prefix)
            entries = self._entries(
                f"""SELECT entry.*, content.data AS content
                    FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                    WHERE session_id IN ({listed.sql}) AND digest BETWEEN :low AND :high""",
                {"low": low, "high": high, "content": content, **listed.values},
            )
            entries.sort(key=_newest_first)
            found += entries
        return newest_in_each(lineage, found)

    def near(self, sessions: Iterable[str], digests: Iterable[str]) -> set[str]:
        listed = InList("session", sessions)
        found: set[str] = set()
        for start in {digest[:MIN_PREFIX] for digest in digests}:
            low, high = prefix_range(start)
            rows = self._query(
                f"""SELECT ref.digest FROM session JOIN ref ON ref.session_key = session.session_key
                    WHERE session.session_id IN ({listed.sql})
                    AND ref.digest BETWEEN :low AND :high""",
                {"low": low, "high": high, **listed.values},
            )
            found.update(row["digest"].hex() for row in rows)
        return found

    def _granted(self, session_id: str, prefix: str = "", *, content: bool = False) -> list[Entry]:
        low, high = prefix_range(prefix)
        return self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE granted_by = :granted_by AND digest BETWEEN :low AND :high
                AND substr(session_id, 1, length(:transcript)) = :transcript
                    ORDER BY created DESC, +seq DESC""",
            {
                "granted_by": session_id,
                "low": low,
                "high": high,
                "transcript": TRANSCRIPT,
                "content": content,
            },
        )

    def blob(self, digest: str) -> Blob | None:
        found = self._query(
            "SELECT * FROM blob WHERE digest = :digest", {"digest": bytes.fromhex(digest)}
        )
        return blob_from(found[0]) if found else None

    def is_named(self, place: str) -> bool:
        return bool(
            self._query("SELECT 1 FROM blob WHERE place = :place LIMIT 1", {"place": place})
        )

    def totals(self) -> Totals:
        (row,) = self._query(
            """SELECT (SELECT count(*) FROM session WHERE session_id < x'') AS sessions,
                (SELECT count(*) FROM ref WHERE gone IS NULL) AS refs,
                (SELECT count(*) FROM blob) AS artifacts,
                (SELECT count(*) FROM ref WHERE gone IS NOT NULL) AS tombstones,
                (SELECT coalesce(sum(size), 0) FROM blob) AS stored_bytes,
                (SELECT coalesce(sum(size), 0) FROM ref WHERE gone IS NULL) AS referenced_bytes"""
        )
        return Totals(**dict(row))

    # Putting

    def put(
        self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False
    ) -> bool:
        def work() -> bool:
            known = self._known(entry)
            if reuse and known["place"] != entry.blob.place:
                return False
            self._check_quotas(entry, limits, known)
            end = expiry.session_end(known["ttl"], known["used"] or 0.0)
            if known["session_key"] is None or expiry.is_over(
                end, entry.ref.created - limits.grace
            ):
                self._use(entry.session, entry.ref.created, limits.grace)
                known = self._known(entry)  # if the session had expired, the blob may be gone
            if known["blob_key"] is None:
                self._add_blob(entry, revive=known["is_damaged"])
            else:
                self._update_blob(known["blob_key"], entry, heal=heal)
            self._add_ref(
                entry, known, is_counted=known["blob_key"] is None and not known["is_damaged"]
            )
            return True

        return self.change("putting an artifact", work, effect="add")

    def _known(self, entry: Entry) -> sqlite3.Row:
        """Return what a put needs to know about its session and its blob, NULL if they do not exist
        yet."""
        found: sqlite3.Row = self._one(
            """SELECT session.session_key, session.ttl, session.used, session.used_bytes,
                session.next_seq, blob.blob_key, blob.place,
                EXISTS (SELECT 1 FROM ref
                    WHERE ref.digest = :digest AND ref.gone = 'damaged') AS is_damaged,
                EXISTS (SELECT 1 FROM ref INDEXED BY ref_by_digest
                    WHERE ref.session_key = session.session_key
                    AND ref.digest = :digest) AS has_refs
                FROM (SELECT 1) LEFT JOIN session ON session.session_id = :session_id
                LEFT JOIN blob ON blob.digest = :digest""",
            {
                "session_id": entry.session.session_id,
                "digest": bytes.fromhex(entry.ref.artifact_id),
            },
        )
        return found

    def _check_quotas(self, entry: Entry, limits: Limits, known: sqlite3.Row) -> None:
        quota = entry.session.quota
        if quota is not None and not self._newest_live(known["session_key"], entry.ref.artifact_id):
            check_quota("session", quota, known["used_bytes"] or 0, entry)
        if limits.store_quota is not None and known["blob_key"] is None:
            (used,) = self._one("SELECT value FROM meta WHERE key = 'stored_bytes'")
            check_quota("store", limits.store_quota, used, entry)

    def _newest_live(self, session_key: int | None, artifact_id: str) -> Any:
        """Return the row of a session's newest live ref to an artifact, or None."""
        return self._one(
            """SELECT * FROM ref INDEXED BY ref_by_digest
                WHERE session_key = :session_key AND digest = :digest AND gone IS NULL
                ORDER BY seq DESC LIMIT 1""",
            {"session_key": session_key, "digest": bytes.fromhex(artifact_id)},
        )

    def _add_blob(self, entry: Entry, *, revive: bool) -> None:
        """Add the blob of a put and its content. The ref of the put is counted already, unless
        `revive` restores refs that had lost the blob: the put may repeat one of them."""
        blob = entry.blob
        blob_key = self._run(
            """INSERT INTO blob (digest, size, coding, place, frames, refs, used)
                VALUES (:digest, :size, :coding, :place, :frames, :refs, :used)""",
            {
                "digest": bytes.fromhex(blob.digest),
                "size": blob.size,
                "coding": blob.coding,
                "place": blob.place,
                "frames": blob.frames,
                "refs": 0 if revive else 1,
                "used": entry.ref.created,
            },
        ).lastrowid
        if entry.content is not None:
            try:
                self._run(
                    "INSERT INTO content VALUES (:blob_key, :data)",
                    {"blob_key": blob_key, "data": entry.content},
                )
            except sqlite3.IntegrityError:  # damaged content was left behind under this key
                self._replace_content(blob_key, entry.content)
        if revive and self._revive(blob.digest):
            self._set_size(bytes.fromhex(blob.digest), blob.size)

    def _update_blob(self, blob_key: int, entry: Entry, *, heal: bool) -> None:
        blob = entry.blob
        if entry.content is not None or heal:
            self._run(
                """UPDATE blob SET coding = :coding, place = :place, frames = :frames
                    WHERE blob_key = :blob_key AND place <> :place""",
                {
                    "coding": blob.coding,
                    "place": blob.place,
                    "frames": blob.frames,
                    "blob_key": blob_key,
                },
            )
        if entry.content is not None:
            self._replace_content(blob_key, entry.content)

    def _replace_content(self, blob_key: int | None, data: bytes) -> None:
        """Replace a blob's content. If the old content's pages are damaged, they are left alone and
        the blob moves to a new key: damage to one artifact must not affect the others."""
        if not self._are_readable([blob_key]):
            (new_key,) = self._one(
                "SELECT 1 + max((SELECT max(blob_key) FROM blob),"
                " (SELECT max(blob_key) FROM content))"
            )
            self._run(
                "UPDATE blob SET blob_key = :new_key WHERE blob_key = :blob_key",
                {"new_key": new_key, "blob_key": blob_key},
            )
            blob_key = new_key
        self._run(
            """INSERT INTO content VALUES (:blob_key, :data)
                ON CONFLICT (blob_key) DO UPDATE SET data = excluded.data
                WHERE data <> excluded.data""",
            {"blob_key": blob_key, "data": data},
        )

    def _are_readable(self, blob_keys: Sequence[int | None]) -> bool:
        """Return whether contents can be read, on another connection: a failed read would spoil the
        transaction."""
        try:
            self._query(
                "SELECT max(data) FROM content"
                " WHERE blob_key IN (SELECT value FROM json_each(:blob_keys))",
                {"blob_keys": json.dumps(blob_keys)},
                apart=True,
            )
        except Damaged:
            return False
        return True

    def _set_size(self, digest: bytes, size: int) -> None:
        """Correct the size of content wherever damage has changed it, and count bytes again."""
        values = {"digest": digest, "size": size}
        changed = self._run(
            "UPDATE ref SET size = :size WHERE digest = :digest AND size <> :size", values
        ).rowcount
        changed += self._run(
            "UPDATE blob SET size = :size WHERE digest = :digest AND size <> :size", values
        ).rowcount
        if changed:
            for check in _CHECKS:
                if "bytes" in check.name:
                    self._run(check.mend)

    def _add_ref(self, entry: Entry, known: sqlite3.Row, *, is_counted: bool) -> None:
        """Add a ref, unless it repeats the newest live one of its artifact, and mark the session as
        used."""
        values = ref_values(entry.ref)
        session_key = known["session_key"]
        newest = (
            self._newest_live(session_key, entry.ref.artifact_id) if known["has_refs"] else None
        )
        if newest is not None:
            if newest["size"] != values["size"]:
                self._set_size(values["digest"], values["size"])
            values["pinned"] = values["pinned"] or bool(
                newest["pinned"]
            )  # a pin covers later refs of the artifact
            if self._is_repeated(newest, values):
                self._run(
                    "UPDATE session SET used = max(used, :at) WHERE session_key = :session_key",
                    {"at": values["created"], "session_key": session_key},
                )
                return
        elif known["has_refs"]:
            self._run(
                "DELETE FROM ref INDEXED BY ref_by_digest"
                " WHERE session_key = :session_key AND digest = :digest",
                {"session_key": session_key, "digest": values["digest"]},
            )
        self._run(
            """INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, tool,
                    call_id, producer, parents, summary, created, expires, pinned, granted_by,
                    request, metadata_json, gone)
                VALUES (:session_key, :seq, :digest, :size, :name, :codec, :media_type, :kind,
                    :tool, :call_id, :producer, :parents, :summary, :created, :expires, :pinned,
                    :granted_by, :request, :metadata_json, NULL)""",
            values | {"session_key": session_key, "seq": known["next_seq"]},
        )
        if not is_counted:
            self._run(
                "UPDATE blob SET refs = refs + 1 WHERE digest = :digest",
                {"digest": values["digest"]},
            )
        self._run(
            """UPDATE session SET used = max(used, :at), next_seq = next_seq + 1,
                used_bytes = used_bytes + :more
                WHERE session_key = :session_key""",
            {
                "at": values["created"],
                "more": values["size"] if newest is None else 0,
                "session_key": session_key,
            },
        )

    def _is_repeated(self, known: Any, values: dict[str, Any]) -> bool:
        """Return whether a put says nothing new about an artifact, and no later ref uses its
        name."""
        for column, value in values.items():
            if column not in ("created", "size") and known[column] != value:
                return False
        if known["name"] is None:
            return True
        (newest,) = self._one(
            "SELECT max(seq) FROM ref WHERE session_key = :session_key AND unlikely(name = :name)",
            {"session_key": known["session_key"], "name": known["name"]},
        )
        return bool(newest == known["seq"])

    # Removing

    def remove(
        self,
        session_id: str,
        digest: str | None = None,
        *,
        name: str | None = None,
        end: bool = False,
    ) -> Freed:
        if not end:
            return super().remove(session_id, digest, name=name)

        def end_some(limit: int, _: object) -> tuple[Freed, bool | None]:
            """Give the session an id that no text equals, so that nobody finds it, and remove some
            of its refs."""
            self._stop_lending(session_id)
            self._run(
                """UPDATE session SET session_id = CAST(session_key AS BLOB), parent = NULL
                    WHERE session_id = :session_id""",
                {"session_id": session_id},
            )
            return self._end_next(limit, True)

        return self._in_steps("forgetting", end_some)

    def _end_next(self, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Remove some refs of a session that has ended, and the session itself with the last of
        them."""
        ended = self._run(
            "SELECT session_key FROM session WHERE session_id >= x'' LIMIT 2"
        ).fetchall()
        if not ended:
            return Freed(), None
        session_key = ended[0]["session_key"]
        refs = self._run(
            """SELECT session_id, seq, digest, size, gone FROM entry
                WHERE session_key = :session_key ORDER BY seq LIMIT :limit""",
            {"session_key": session_key, "limit": limit},
        ).fetchall()
        if refs:
            self._run(
                "DELETE FROM ref WHERE session_key = :session_key AND seq <= :last",
                {"session_key": session_key, "last": refs[-1]["seq"]},
            )
        freed = self._let_go_of([row for row in refs if row["gone"] is None])
        if len(refs) == limit or self._drop_notes_of([session_key], limit):
            return freed, True
        self._run(
            "DELETE FROM session WHERE session_key = :session_key", {"session_key": session_key}
        )
        return freed, len(ended) > 1 or None

    def _drop_unreferenced(self) -> list[Blob]:
        found = self._run("SELECT * FROM blob WHERE refs = 0").fetchall()
        if found:
            self._drop_content("SELECT blob_key FROM blob WHERE refs = 0 AND coding = 'inline'")
            self._run("DELETE FROM blob WHERE refs = 0")
        return [blob_from(row) for row in found]

    def _drop_content(self, which: str, values: Values = ()) -> None:
        """Delete content, except where it cannot be read: freeing damaged pages would damage
        others."""
        keys = [row[0] for row in self._run(which, values).fetchall()]
        if not self._are_readable(keys):
            keys = [key for key in keys if self._are_readable([key])]
        self._run_each(
            "DELETE FROM content WHERE blob_key = :blob_key", [{"blob_key": key} for key in keys]
        )

    # Upkeep

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed = self._in_steps(
            "forgetting", self._end_next
        )  # first the sessions whose end a crash interrupted
        freed += self._in_steps("expiring", partial(self._expire_sessions, at), _Place(0, -1))
        freed += self._in_steps("expiring", partial(self._expire_refs, at))
        self._in_steps("expiring", partial(self._drop_records, at))
        self._in_steps("expiring", partial(self._drop_tombstones, forget_before))
        self._in_steps("expiring", partial(self._drop_empty_sessions, forget_before))
        self._drop_aside(at)
        return freed

    def _would_expire(self, at: float) -> Freed:
        due = f"""SELECT ref.session_key, ref.seq, ref.digest FROM session
                CROSS JOIN ref ON ref.session_key = session.session_key
                WHERE {expiry.session_is_over(":at")} AND {expiry.REF_MAY_EXPIRE}
            UNION SELECT ref.session_key, ref.seq, ref.digest FROM ref INDEXED BY ref_by_expiry
                WHERE {expiry.ref_is_over(":at")}"""
        (count,) = self._query(f"SELECT count(*) AS refs FROM ({due})", {"at": at})
        blobs = self._query(
            f"""SELECT blob.* FROM blob JOIN (SELECT digest, count(*) AS number FROM ({due})
                GROUP BY digest) AS dead
                ON dead.digest = blob.digest AND dead.number = blob.refs""",
            {"at": at},
        )
        return Freed.of(count["refs"], [blob_from(row) for row in blobs])

    def _expire_sessions(self, at: float, limit: int, after: _Place) -> tuple[Freed, _Place | None]:
        """Expire the next refs of sessions that had expired at `at`. Tombstones count for the limit
        too, because they take time. Also returns the last ref, or None at the end."""
        rows = self._run(
            f"""SELECT session.session_id, ref.session_key, ref.seq, ref.digest, ref.size,
                {expiry.REF_MAY_EXPIRE} AS may_expire
                FROM session CROSS JOIN ref ON ref.session_key = session.session_key
                AND ref.seq > iif(session.session_key = :session_key, :seq, -1)
                WHERE session.session_key IN
                    (SELECT session_key FROM session INDEXED BY session_by_end
                    WHERE {expiry.session_is_over(":at")} AND session_key >= :session_key
                    AND EXISTS (SELECT 1 FROM ref WHERE ref.session_key = session.session_key)
                    ORDER BY session_key LIMIT :limit + 1)
                ORDER BY session.session_key, ref.seq LIMIT :limit""",
            {"at": at, "session_key": after.session_key, "seq": after.seq, "limit": limit},
        ).fetchall()
        freed = self._bury_rows([row for row in rows if row["may_expire"]])
        return freed, _Place(rows[-1]["session_key"], rows[-1]["seq"]) if rows else None

    def _expire_refs(self, at: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Expire some refs by their own expiry time."""
        rows = self._run(
            f"""SELECT session.session_id, ref.session_key, ref.seq, ref.digest, ref.size
                FROM ref INDEXED BY ref_by_expiry
                CROSS JOIN session ON session.session_key = ref.session_key
                WHERE {expiry.ref_is_over(":at")} LIMIT :limit""",
            {"at": at, "limit": limit},
        ).fetchall()
        return self._bury_rows(rows), len(rows) == limit or None

    def _bury_rows(self, refs: Sequence[sqlite3.Row]) -> Freed:
        """Turn live refs into tombstones."""
        self._run_each(
            "UPDATE ref SET gone = 'expired' WHERE session_key = :session_key AND seq = :seq",
            [{"session_key": row["session_key"], "seq": row["seq"]} for row in refs],
        )
        return self._let_go_of(refs)

    def _drop_records(self, at: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Drop some records of sessions that had expired at `at`."""
        done = self._run(
            f"""DELETE FROM note WHERE (session_key, key) IN (SELECT note.session_key, note.key
                FROM session INDEXED BY session_by_end
                CROSS JOIN note ON note.session_key = session.session_key
                WHERE {expiry.session_is_over(":at")} AND session.session_id < x''
                AND note.key >= :first AND note.key < :last LIMIT :limit)""",
            {"at": at, "first": RECORDS[0], "last": RECORDS[1], "limit": limit},
        )
        return Freed(), done.rowcount == limit or None

    def _drop_tombstones(self, before: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Drop some tombstones of sessions that had expired before this time."""
        done = self._run(
            f"""DELETE FROM ref WHERE (session_key, seq) IN (SELECT ref.session_key, ref.seq
                FROM session INDEXED BY session_by_end
                CROSS JOIN ref ON ref.session_key = session.session_key
                WHERE {expiry.SESSION_END} < :before AND session.session_id < x''
                    AND ref.gone IS NOT NULL
                LIMIT :limit)""",
            {"before": before, "limit": limit},
        )
        return Freed(), done.rowcount == limit or None

    def _drop_empty_sessions(
        self, before: float, limit: int, _: object
    ) -> tuple[Freed, bool | None]:
        """Drop some sessions without refs that had expired before this time. Their notes go
        first."""
        found = self._run(
            f"""SELECT session_key FROM session INDEXED BY session_by_end
                WHERE {expiry.SESSION_END} < :before AND session_id < x''
                AND NOT EXISTS (SELECT 1 FROM ref
                    WHERE ref.session_key = session.session_key) LIMIT :limit""",
            {"before": before, "limit": limit},
        ).fetchall()
        keys = [row["session_key"] for row in found]
        if self._drop_notes_of(keys, limit):
            return Freed(), True
        self._run_each(
            "DELETE FROM session WHERE session_key = :key", [{"key": key} for key in keys]
        )
        return Freed(), len(keys) == limit or None

    def _drop_notes_of(self, session_keys: Sequence[int], limit: int) -> bool:
        """Drop notes of these sessions, at most `limit`. Returns whether there may be more."""
        done = self._run(
            """DELETE FROM note WHERE (session_key, key) IN (SELECT note.session_key, note.key
                FROM json_each(:session_keys) AS one
                CROSS JOIN note ON note.session_key = one.value LIMIT :limit)""",
            {"session_keys": json.dumps(session_keys), "limit": limit},
        )
        return done.rowcount == limit

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        last = -1
        while page := self._query(
            """SELECT * FROM blob INDEXED BY blob_raw
                WHERE coding = 'raw' AND used > :after AND used <= :until
                AND blob_key > :last ORDER BY blob_key LIMIT 64""",
            {"after": after, "until": until, "last": last},
        ):
            yield from map(blob_from, page)
            last = page[-1]["blob_key"]

    def doubtful_sizes(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for row in self._query(
            """SELECT DISTINCT ref.digest, ref.size FROM ref JOIN blob ON blob.digest = ref.digest
                WHERE ref.gone IS NULL AND ref.size <> blob.size"""
        ):
            if isinstance(row["digest"], bytes) and isinstance(
                row["size"], int
            ):  # a damaged row may have anything
                found.setdefault(row["digest"].hex(), set()).add(row["size"])
        return found

    def set_size(self, digest: str, size: int) -> None:
        self.change("setting a size right", lambda: self._set_size(bytes.fromhex(digest), size))

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        return self.change("checking the catalog", lambda: self._check(repair, until))

    def _check(self, repair: bool, until: float) -> list[str]:
        """Return what is wrong with the rows. Parts of the database that cannot be read are
        reported once."""
        damage = self._integrity()
        problems = [f"SQLite reports: {message}" for message in damage]
        mends = (
            repair and not damage
        )  # rows read from damaged tables and indexes are not reliable enough to change
        checks: list[Callable[[], list[str]]] = [
            partial(self._check_stray_refs, mends, until),
            partial(self._check_stray_content, mends),
            *(partial(self._check_rows, check, mends) for check in _CHECKS),
            partial(self._check_records, repair=repair),
            partial(self._check_tokens, repair=repair),
        ]
        for check in checks:
            try:
                problems += check()
            except sqlite3.DatabaseError as error:
                if not damage or not is_damage(error):
                    raise
        if mends:
            self._drop_unreferenced()
        return problems

    def _integrity(self) -> list[str]:
        """Return what SQLite finds wrong with the pages of the database."""
        try:
            found = self._run("PRAGMA integrity_check(20)").fetchall()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return [str(error)]
        return [row[0] for row in found if row[0] != "ok"]

    def _check_stray_refs(self, mends: bool, until: float) -> list[str]:
        """Find live refs without a blob row. They become tombstones, and what they need is set
        aside."""
        rows = self._run(
            """SELECT digest, count(*) AS number FROM ref
                WHERE gone IS NULL AND digest NOT IN (SELECT digest FROM blob) GROUP BY digest"""
        ).fetchall()
        if mends:
            for row in rows:
                self.save(SetAside(Blob(row["digest"].hex(), 0, "raw"), until).note())
            self._run(
                """UPDATE ref SET gone = 'damaged'
                    WHERE gone IS NULL AND digest NOT IN (SELECT digest FROM blob)"""
            )
        return _found(sum(row["number"] for row in rows), "refs without a blob row", mends)

    def _check_stray_content(self, mends: bool) -> list[str]:
        rows = self._run(
            "SELECT blob_key FROM content WHERE blob_key NOT IN (SELECT blob_key FROM blob)"
        ).fetchall()
        if mends and rows:
            self._drop_content(
                "SELECT blob_key FROM content WHERE blob_key NOT IN (SELECT blob_key FROM blob)"
            )
        return _found(len(rows), "content without a blob row", mends)

    def _check_rows(self, check: _Check, mends: bool) -> list[str]:
        (count,) = self._one(check.count)
        if count and mends:
            self._run(check.mend)
        return _found(count, check.name, mends)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a walk over the refs of several sessions has come."""

    session_key: int
    seq: int


def _newest_first(entry: Entry) -> int:
    """Return the key to sort entries by in Python: to sort them, SQLite would copy their
    content."""
    return -entry.seq


def _found(count: int, what: str, mends: bool) -> list[str]:
    return [f"{count} {what}" + (": set right" if mends else "")] if count else []


def inside_another_call() -> StoreUnavailable:
    return StoreUnavailable(
        "this thread is in the middle of another call to the store",
        hint="do not use a store from a signal handler or a callback that runs inside one of its "
        "calls",
    )


def translated(error: sqlite3.Error | UnicodeDecodeError, doing: str) -> StoreError:
    """Return our error for an SQLite error. Text that is not UTF-8, even in a message of SQLite, is
    damage."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.DatabaseError) and is_damage(error)
    ):
        return Damaged(
            f"the catalog is damaged: {error}",
            hint="restore it from an export, or open a new store",
        )
    return StoreUnavailable(
        f"the catalog failed while {doing}: {error}", hint="check the folder and try again"
    )


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether SQLite reports a damaged file, as opposed to one that is busy, full or
    misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(
        ("SQLITE_CORRUPT", "SQLITE_NOTADB")
    )
