"""Bringing a fleet's schema to the version that this code knows.

Processes of the previous version go on while a step runs, and after: a step adds (tables, columns with defaults,
functions under a new name, indexes made beside the writers), and what only older versions need is dropped by a later
one.
"""

from __future__ import annotations

import time
from typing import Final

from coatcheck.errors import StoreUnavailable, UnsupportedFormat
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_steps import STEPS, Step

_LOCK: Final = 0x636F6174  # the advisory lock under which a schema is changed
_PAUSE: Final = 0.2


def migrate(connections: Connections, *, create: bool = True) -> None:
    """Bring the schema to the version that this code knows; any number of machines may. A schema that is ahead is used
    as it is, where that still suits this version."""
    known = connections.run(lambda db: _version(db, connections.schema), "opening the catalog")
    if known is None and not create:
        raise StoreUnavailable("there is no store in this schema", hint="check the url, or put something there")
    if known is None or known < len(STEPS):
        connections.alone(lambda db: _take_steps(db, connections), "migrating the catalog")
    elif known > len(STEPS):
        ((needed,),) = connections.ask("SELECT max(tolerates) FROM format")
        if needed > len(STEPS):
            raise UnsupportedFormat(f"this store has format {known}; this version of coatcheck knows {len(STEPS)}")


def _version(db: Db, schema: str) -> int | None:
    # Not `to_regclass`: it answers from a cache, where another machine may have made the table a moment ago.
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
    """Held until the connection is closed. Asked for again and again: an index that is made beside writers waits for
    every statement that began before it, and so for one that waits for this lock."""
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
    """Whatever an attempt that broke off has left is taken away first."""
    broken = db.execute(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY (%s) AND NOT i.indisvalid",
        (schema, list(step.indexes)),
    ).fetchall()
    for name in (*(name for (name,) in broken), *step.dropped):
        db.execute(f"DROP INDEX {beside} IF EXISTS {name}")
    for name, on in step.indexes.items():
        db.execute(f"CREATE INDEX {beside} IF NOT EXISTS {name} ON {on}")
