"""The tables of a catalog in SQLite, and how a store gets those that it does not have yet.

`blob.refs` counts refs other than tombstones; a blob whose count falls to zero is deleted in the
same transaction. `session.used_bytes` counts each artifact of a session once. The view `entry`
joins a ref with its session and blob: it is the only place that names all columns.

The tables are created in numbered steps: a new store runs all of them, an older one those it does
not have yet. Each step runs in a transaction of its own, which also updates the version. A released
step never changes.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import Final

from coatcheck.errors import Damaged, StoreUnavailable, UnsupportedFormat, development_format
from coatcheck.storage.disk import Disk

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


def _schema_of(version: int) -> _Schema:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for step in STEPS[:version]:
            for statement in step:
                db.execute(statement)
        return _Schema.of(db)
