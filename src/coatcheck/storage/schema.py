"""The catalog's tables, as numbered steps: a new store runs all of them, an older one those it does not have yet.

Each step runs in a transaction of its own, which also updates the version. A released step never changes; a store of
every released version is kept in tests/stores.
"""

from __future__ import annotations

import sqlite3

from coatcheck.errors import StoreUnavailable, UnsupportedFormat
from coatcheck.storage.disk import Disk

APPLICATION_ID = 0x434F4154

_FIRST = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE session (
        session_key INTEGER PRIMARY KEY,
        session_id TEXT NOT NULL UNIQUE,
        parent TEXT,
        ttl REAL,
        quota INTEGER,
        created_at REAL NOT NULL,
        used_at REAL NOT NULL,
        used_bytes INTEGER NOT NULL DEFAULT 0,
        next_seq INTEGER NOT NULL DEFAULT 1)""",
    """CREATE TABLE blob (
        blob_key INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        size INTEGER NOT NULL,
        coding TEXT NOT NULL,
        place TEXT NOT NULL,
        frames BLOB NOT NULL,
        refs INTEGER NOT NULL,
        used_at REAL NOT NULL)""",
    "CREATE INDEX blob_unreferenced ON blob (blob_key) WHERE refs = 0",
    "CREATE TABLE content (blob_key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE TABLE ref (
        session_key INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        digest BLOB NOT NULL,
        blob_key INTEGER,
        size INTEGER NOT NULL,
        name TEXT,
        codec TEXT NOT NULL,
        media_type TEXT NOT NULL,
        kind TEXT NOT NULL,
        tool TEXT,
        call_id TEXT,
        producer TEXT NOT NULL,
        parents TEXT NOT NULL,
        summary TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        pinned INTEGER NOT NULL,
        granted_by TEXT,
        request TEXT,
        gone TEXT,
        PRIMARY KEY (session_key, seq)) WITHOUT ROWID""",
    "CREATE INDEX ref_by_digest ON ref (session_key, digest)",
    "CREATE INDEX ref_by_name ON ref (session_key, name) WHERE name IS NOT NULL",
    "CREATE INDEX ref_by_expiry ON ref (expires_at) WHERE expires_at IS NOT NULL AND gone IS NULL",
    "CREATE INDEX ref_damaged ON ref (digest) WHERE gone = 'damaged'",
    """CREATE TABLE shown (
        session_key INTEGER NOT NULL,
        digest BLOB NOT NULL,
        start INTEGER NOT NULL,
        end INTEGER NOT NULL,
        PRIMARY KEY (session_key, digest, start)) WITHOUT ROWID""",
    "INSERT INTO meta VALUES ('stored_bytes', 0), ('secret', randomblob(16))",
    """CREATE TRIGGER blob_added AFTER INSERT ON blob
        BEGIN UPDATE meta SET value = value + new.size WHERE key = 'stored_bytes'; END""",
    """CREATE TRIGGER blob_dropped AFTER DELETE ON blob
        BEGIN UPDATE meta SET value = value - old.size WHERE key = 'stored_bytes'; END""",
)

# Tokens come from one counter for the whole store, so a session that is ended and opened again never reuses one.
_RECORDS = (
    "ALTER TABLE session ADD COLUMN fence INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE session ADD COLUMN holder TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE session ADD COLUMN claimed_at REAL NOT NULL DEFAULT 0",
    "INSERT INTO meta VALUES ('fence', 0)",
    """CREATE TABLE record (
        session_key INTEGER NOT NULL,
        series TEXT NOT NULL,
        seq INTEGER NOT NULL,
        written_at REAL NOT NULL,
        token INTEGER,
        checksum BLOB NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (session_key, series, seq)) WITHOUT ROWID""",
)

# Refs that transcripts keep for a session are looked up by that session, and updated when it forgets an artifact.
_GRANTS = ("CREATE INDEX ref_by_grant ON ref (granted_by, digest) WHERE granted_by IS NOT NULL",)

STEPS: list[tuple[str, ...]] = [_FIRST, _RECORDS, _GRANTS]


def migrate(db: sqlite3.Connection, disk: Disk) -> None:
    """Migrate the catalog to the current version. The caller holds the store's lock."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application not in (0, APPLICATION_ID):
        raise StoreUnavailable("the catalog file belongs to another program", hint="use a new folder for the store")
    if version > len(STEPS):
        raise UnsupportedFormat(f"this store has format {version}; this version of coatcheck supports {len(STEPS)}")
    for number, step in enumerate(STEPS[version:], version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in step:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")
            disk.commit(db)
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
