"""Migration of a fleet's schema to the version that this code knows.

Processes of the previous version keep running during a step and after it. So a step only adds (tables, columns with
defaults, functions under a new name, indexes created concurrently); a later step drops what only older versions
need.
"""

from __future__ import annotations

import time
from typing import Final

from coatcheck.errors import StoreUnavailable, UnsupportedFormat
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_steps import STEPS, Step

_LOCK: Final = 0x636F6174  # the advisory lock for schema changes
_PAUSE: Final = 0.2


def migrate(connections: Connections, *, create: bool = True) -> None:
    """Migrate the schema to the version that this code knows; any number of machines may do so. A newer schema is used
    as it is, if it still supports this version."""
    known = connections.run(lambda db: _version(db, connections.schema), "opening the catalog")
    if known is None and not create:
        raise StoreUnavailable("no store found in this schema", hint="check the url, or create the store with a put")
    if known is None or known < len(STEPS):
        connections.alone(lambda db: _take_steps(db, connections), "migrating the catalog")
    elif known > len(STEPS):
        ((needed,),) = connections.ask("SELECT max(tolerates) FROM format")
        if needed > len(STEPS):
            raise UnsupportedFormat(f"this store has format {known}; this version of coatcheck knows {len(STEPS)}")


def _version(db: Db, schema: str) -> int | None:
    # Not `to_regclass`: it answers from a cache, and another machine may just have created the table.
    made = "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    if db.execute(made + " WHERE n.nspname = %s AND c.relname = 'format'", (schema,)).fetchone() is None:
        return None
    found = db.execute("SELECT max(version) FROM format").fetchone()
    return int(found[0] or 0) if found else 0


def _take_steps(db: Db, connections: Connections) -> None:
    _lock(db, connections.patience)
    known = _version(db, connections.schema)
    is_new = not known
    if known is None:
        with db.transaction():
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {connections.schema}")
            db.execute("CREATE TABLE format (version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())")
    for number, step in enumerate(STEPS[known or 0 :], (known or 0) + 1):
        with db.transaction():
            for statement in step.change:
                db.execute(statement)
            if step.change:
                _note(db, number, step)
        if not step.change:
            _index(db, step, connections.schema, beside="" if is_new else "CONCURRENTLY")
            _note(db, number, step)


def _lock(db: Db, patience: float) -> None:
    """Take the lock, which is kept until the connection is closed. This polls: creating an index concurrently waits
    for every statement that began before it, so it would wait for one that waits for this lock."""
    until = time.monotonic() + patience
    while db.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).fetchone() != (True,):
        if time.monotonic() > until:
            raise StoreUnavailable("another process is migrating the catalog", hint="try again", may_retry=True)
        time.sleep(_PAUSE)


def _note(db: Db, number: int, step: Step) -> None:
    if number == 1:
        db.execute("INSERT INTO format (version) VALUES (1)")
    else:
        db.execute("INSERT INTO format (version, tolerates) VALUES (%s, %s)", (number, step.tolerates))


def _index(db: Db, step: Step, schema: str, *, beside: str) -> None:
    """Drop and create the step's indexes. Remains of an interrupted attempt are removed first."""
    broken = db.execute(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY (%s) AND NOT i.indisvalid",
        (schema, list(step.indexes)),
    ).fetchall()
    for name in (*(name for (name,) in broken), *step.dropped):
        db.execute(f"DROP INDEX {beside} IF EXISTS {name}")
    for name, on in step.indexes.items():
        db.execute(f"CREATE INDEX {beside} IF NOT EXISTS {name} ON {on}")
