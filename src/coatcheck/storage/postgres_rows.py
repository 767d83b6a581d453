"""The rows of a catalog in PostgreSQL.

A change is one transaction; locks are always taken in the order session, refs, blob.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

from psycopg import errors
from psycopg.rows import dict_row

from coatcheck.errors import StoreError
from coatcheck.refs import Blob
from coatcheck.storage.entries import (
    ANY_SESSION,
    Effect,
    Entry,
    Freed,
    Note,
    Row,
    SessionFilter,
    SessionInfo,
)
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.rows import Rows
from coatcheck.storage.sql import blob_from, entry_from, ref_values, session_from

_INLINE: Final = 64 * 1024
PAGE: Final = 256
_ERRORS: Final = "surrogateescape"  # for the ids of sessions that have ended
_TEXTS: Final = {"session_id", "parent", "name", "media_type", "tool", "call_id", "summary",
                 "granted_by", "request", "metadata_json"}  # fmt: skip
"""Columns of text that are stored as bytes."""
# Columns are named, because a plan that PostgreSQL keeps fails if a migration adds one.
ENTRY: Final = """r.seq, r.digest, r.size, r.name, r.codec, r.media_type, r.kind, r.tool,
    r.call_id, r.producer, r.parents, r.summary, r.created, r.expires, r.pinned, r.granted_by,
    r.request, r.metadata_json, r.gone, b.coding, b.place, b.frames, s.session_id, s.parent, s.ttl,
    s.quota, s.created AS session_created, s.used, s.used_bytes,
    CASE WHEN %(content)s THEN b.data END AS content"""
"""The columns of an entry: of a ref, its blob and its session."""
# A separate query, so that the planner knows the single session and walks its refs in order.
IN_SESSION: Final = """r.session_key = (SELECT session_key FROM session
    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s))"""
ENDED: Final = b"\xff"
"""The first byte of the id of a session that has ended and still has rows; no text has it.
`look_at` is then infinite, and so is `ended_at`, in the past."""
_T = TypeVar("_T")


class PostgresRows(Rows):
    """The rows of one tenant."""

    inline_limit = _INLINE

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant
        self.uri_prefix = f"{connections.address}#blob="
        self._own = threading.local()  # `db` is the connection of the change that this thread runs

    def change(
        self,
        doing: str,
        work: Callable[[], _T],
        *,
        session_id: str | None = None,
        effect: Effect | None = None,
    ) -> _T:
        return self._run(doing, work, session_id, slow=effect == "free", is_locked=effect != "note")

    def _run(
        self,
        doing: str,
        work: Callable[[], _T],
        session_id: str | None = None,
        *,
        slow: bool = False,
        whole: bool = False,
        is_locked: bool = False,
    ) -> _T:
        """Run `work` in a transaction. A locked one runs after others about the session, or about
        no session, and only once, even if the answer to its commit is lost."""
        tried: list[tuple[str, _T]] = []  # the last transaction and its result

        def run(db: Db) -> _T:
            self._own.db = db
            try:
                if session_id is not None:
                    lock = """(SELECT 1 FROM session
                        WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)
                        FOR UPDATE)"""
                elif is_locked:
                    lock = (
                        "pg_advisory_xact_lock(hashtextextended(current_schema() || %(tenant)s, 3))"
                    )
                else:
                    return work()
                # First the lock: after it, an earlier transaction of this change is over.
                (now,) = self._ask(
                    f"SELECT {lock}, pg_current_xact_id()::text AS number", session_id=session_id
                )
                if not tried or not _is_committed(db, tried[-1][0]):
                    tried.append((now["number"], work()))
                return tried[-1][1]
            finally:
                self._own.db = None

        return self._connections.run(run, doing, slow=slow, whole=whole)

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a statement. Inside a change, it is part of the change."""
        packed = self._packed(values)
        db: Db | None = getattr(self._own, "db", None)
        if db is None:
            return self._connections.once(
                lambda db: rows_of(db, sql, packed), "reading the catalog"
            )
        return rows_of(db, sql, packed)

    def _ask_whole(self, sql: str, **values: Any) -> list[Any]:
        """Like `_ask`, for whole tables."""
        return self._run("reading the catalog", lambda: self._ask(sql, **values), whole=True)

    def _packed(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"tenant": self._tenant} | {
            name: _stored(name, value) for name, value in values.items()
        }

    def _lock(self) -> str:
        """Return a clause for rows that a change reads to write them."""
        return "FOR UPDATE" if getattr(self._own, "db", None) else ""

    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        if session_id is not None:
            found = self._ask(
                """SELECT session_id, parent, ttl, quota, created, used, used_bytes FROM session
                    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)""",
                session_id=session_id,
            )
            yield from map(session_from, found)
            return
        last = 0
        while rows := self._ask(
            """SELECT session_key, session_id, parent, ttl, quota, created, used, used_bytes
                FROM session
                WHERE tenant = %(tenant)s AND session_key > %(last)s
                    AND substr(session_id, 1, 1) <> %(ended)s
                ORDER BY session_key LIMIT %(page)s""",
            last=last,
            ended=ENDED,
            page=PAGE,
        ):
            yield from map(session_from, rows)
            last = rows[-1]["session_key"]

    def session_page(
        self,
        prefix: str,
        before: tuple[float, str] | None,
        limit: int,
        wanted: SessionFilter = ANY_SESSION,
    ) -> list[SessionInfo]:
        where = ["tenant = %(tenant)s", "substr(session_id, 1, 1) <> %(ended)s"]
        values: dict[str, Any] = {"prefix": prefix.encode(), "ended": ENDED, "limit": limit}
        if prefix:
            where.append("substr(session_id, 1, length(%(prefix)s)) = %(prefix)s")
        if before is not None:
            where.append("created <= %(at)s AND (created, session_id) < (%(at)s, %(session_id)s)")
            values["at"], values["session_id"] = before
        if wanted.contains:
            where.append("position(%(contains)s IN session_id) > 0")
            values["contains"] = wanted.contains.encode()
        for number, text in enumerate(wanted.without):
            where.append(
                f"substr(session_id, 1, length(%(without{number})s)) <> %(without{number})s"
            )
            values[f"without{number}"] = text.encode()
        if wanted.roots:
            listed = (
                "substr(s.parent, 1, length(%(prefix)s)) = %(prefix)s AND p.tenant = %(tenant)s"
            )
            same = "sha256(p.session_id) = sha256(s.parent)"
            where.append(
                "(parent IS NULL OR NOT EXISTS"
                f" (SELECT 1 FROM session p WHERE {listed} AND {same}))"
            )
        if wanted.parents is not None:
            where.append("parent = ANY (%(parents)s)")
            values["parents"] = [one.encode() for one in wanted.parents]
        if wanted.used_after is not None:
            where.append("used > %(used_after)s")
            values["used_after"] = wanted.used_after
        rows = self._ask_whole(
            f"""SELECT session_id, parent, ttl, quota, created, used, used_bytes FROM session s
                WHERE {" AND ".join(where)}
                ORDER BY created DESC, session_id DESC LIMIT %(limit)s""",
            **values,
        )
        return [session_from(row) for row in rows]

    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        values: dict[str, Any] = {"digest": digest and bytes.fromhex(digest)}
        where = [] if digest is None else ["r.digest = %(digest)s"]
        if session_id is not None:
            where, values["session_id"] = [IN_SESSION, *where], session_id
        else:
            where = ["r.tenant = %(tenant)s", *where]
            if self._lock():  # first, so that what is read next is current
                self._ask(
                    "SELECT 1 FROM session WHERE tenant = %(tenant)s AND session_key IN"
                    " (SELECT session_key FROM ref r"
                    f" WHERE {' AND '.join(where)}) ORDER BY session_key FOR UPDATE",
                    **values,
                )
        return self._entries(f"{' AND '.join(where)} ORDER BY r.seq DESC", **values)

    def _entries(self, where: str, *, content: bool = False, **values: Any) -> list[Entry]:
        rows = self._ask(
            f"""SELECT {ENTRY} FROM ref r JOIN session s ON s.session_key = r.session_key
            LEFT JOIN blob b ON b.tenant = r.tenant AND b.digest = r.digest WHERE {where}""",
            content=content,
            **values,
        )
        return [entry_from(row) for row in rows]

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        if digest is not None:
            found = self._ask(
                f"""SELECT digest, size, coding, place, frames, used, data FROM blob
                    WHERE tenant = %(tenant)s AND digest = %(digest)s {self._lock()}""",
                digest=bytes.fromhex(digest),
            )
            for row in found:
                yield blob_from(row), row["data"]
            return
        last = b""
        while rows := self._ask(
            """SELECT digest, size, coding, place, frames, used, data FROM blob
                WHERE tenant = %(tenant)s AND digest > %(last)s ORDER BY digest LIMIT 64""",
            last=last,
        ):
            for row in rows:
                yield blob_from(row), row["data"]
            last = rows[-1]["digest"]

    def blob(self, digest: str) -> Blob | None:
        rows = self._ask(
            f"""SELECT digest, size, coding, place, frames, used FROM blob
                WHERE tenant = %(tenant)s AND digest = %(digest)s {self._lock()}""",
            digest=bytes.fromhex(digest),
        )
        return blob_from(rows[0]) if rows else None

    def notes(
        self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False
    ) -> list[Note]:
        order = "DESC" if newest else "ASC"
        found = self._ask(
            f"""SELECT key, value FROM note WHERE tenant = %(tenant)s AND key >= %(start)s
                AND key < %(stop)s
                AND session_key = (CASE %(session_id)s WHEN ''::bytea THEN 0 ELSE
                (SELECT session_key FROM session
                    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)) END)
                ORDER BY key {order} {limit_clause(limit)}""",
            session_id=owner,
            start=start,
            stop=stop,
        )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def save(self, *rows: Row) -> None:
        for kind, some in groupby(rows, type):
            values = [_values_of(row) for row in some]
            if kind is SessionInfo:
                self._save_sessions(values)
            elif kind is Blob:
                self._save_blobs(values)
            elif kind is Note:
                self._save_notes(values)
            else:
                self._save_refs(values)

    def _save_sessions(self, rows: list[dict[str, Any]]) -> None:
        self._each(
            """INSERT INTO session (tenant, session_id, parent, ttl, quota, created, used)
                VALUES (%(tenant)s, %(session_id)s, %(parent)s, %(ttl)s, %(quota)s, %(created)s,
                    %(used)s)
                ON CONFLICT (tenant, sha256(session_id))
                    DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl,
                quota = excluded.quota, used = greatest(session.used, excluded.used)""",
            rows,
        )

    def _save_blobs(self, rows: list[dict[str, Any]]) -> None:
        self._each(
            """INSERT INTO blob (tenant, digest, size, coding, place, frames, used, refs)
                VALUES (%(tenant)s, %(digest)s, %(size)s, %(coding)s, %(place)s, %(frames)s,
                    %(used)s, 0)
                ON CONFLICT (tenant, digest)
                    DO UPDATE SET coding = excluded.coding, place = excluded.place,
                frames = excluded.frames, used = greatest(blob.used, excluded.used)""",
            rows,
        )

    def _save_notes(self, rows: list[dict[str, Any]]) -> None:
        self._each(
            """INSERT INTO note (tenant, session_key, key, value)
                SELECT %(tenant)s, owner.session_key, %(key)s, %(value)s FROM (
                    SELECT 0 AS session_key WHERE %(session_id)s = ''::bytea
                    UNION ALL SELECT session_key FROM session
                    WHERE tenant = %(tenant)s
                        AND sha256(session_id) = sha256(%(session_id)s)) AS owner
                ON CONFLICT (tenant, session_key, key) DO UPDATE SET value = excluded.value""",
            rows,
        )

    def _save_refs(self, rows: list[dict[str, Any]]) -> None:
        self._each(
            # What a pin kept may have expired long ago: a collection looks at the session again,
            # unless it has ended.
            """WITH own AS (UPDATE session
                    SET look_at = CASE look_at WHEN 'infinity' THEN look_at ELSE '-infinity' END
                    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)
                        RETURNING session_key)
                INSERT INTO ref (session_key, tenant, seq, digest, size, name, codec, media_type,
                    kind, tool, call_id, producer, parents, summary, created, expires, pinned,
                    granted_by, request, metadata_json, gone)
                SELECT session_key, %(tenant)s, %(seq)s, %(digest)s, %(size)s, %(name)s, %(codec)s,
                    %(media_type)s, %(kind)s, %(tool)s, %(call_id)s, %(producer)s, %(parents)s,
                    %(summary)s, %(created)s, %(expires)s, %(pinned)s, %(granted_by)s, %(request)s,
                    %(metadata_json)s, %(gone)s FROM own
                ON CONFLICT (session_key, seq) DO UPDATE SET pinned = excluded.pinned,
                granted_by = excluded.granted_by, gone = excluded.gone""",
            rows,
        )

    def drop(self, *rows: Row) -> None:
        for kind, some in groupby(rows, type):
            keys = [_values_of(row) for row in some]
            if kind is SessionInfo:
                self._drop_sessions(keys)
            elif kind is Blob:
                self._each(
                    "DELETE FROM blob WHERE tenant = %(tenant)s AND digest = %(digest)s", keys
                )
            elif kind is Note:
                self._each(
                    """DELETE FROM note WHERE tenant = %(tenant)s AND key = %(key)s
                        AND session_key = (CASE %(session_id)s WHEN ''::bytea THEN 0 ELSE
                        (SELECT session_key FROM session
                            WHERE tenant = %(tenant)s
                            AND sha256(session_id) = sha256(%(session_id)s)) END)""",
                    keys,
                )
            else:
                self._each(
                    """DELETE FROM ref WHERE seq = %(seq)s AND session_key =
                        (SELECT session_key FROM session
                        WHERE tenant = %(tenant)s
                            AND sha256(session_id) = sha256(%(session_id)s))""",
                    keys,
                )

    def _drop_sessions(self, keys: list[dict[str, Any]]) -> None:
        self._each(
            """DELETE FROM note WHERE tenant = %(tenant)s AND session_key =
                (SELECT session_key FROM session
                WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s))""",
            keys,
        )
        self._each(
            "DELETE FROM session WHERE tenant = %(tenant)s"
            " AND sha256(session_id) = sha256(%(session_id)s)",
            keys,
        )

    def _each(self, statement: str, rows: Iterable[dict[str, Any]]) -> None:
        with self._own.db.cursor() as cursor:
            cursor.executemany(statement, [self._packed(row) for row in rows])

    def _let_go(self, refs: Sequence[Entry]) -> Freed:
        rows = self._ask(
            "SELECT session_id, session_key FROM session"
            " WHERE tenant = %(tenant)s AND sha256(session_id) ="
            " ANY (%(sessions)s)",
            sessions=hashes_of({one.session.session_id for one in refs}),
        )
        keys = {row["session_id"]: row["session_key"] for row in rows}
        return self._let_go_of(
            [
                (
                    keys[one.session.session_id],
                    bytes.fromhex(one.ref.artifact_id),
                    one.ref.size_bytes,
                )
                for one in refs
            ]
        )

    def _let_go_of(self, refs: Sequence[tuple[int, bytes, int]]) -> Freed:
        """Update the counts after removing refs (session key, digest, size) of locked sessions."""
        keys, digests, sizes = zip(*refs, strict=True) if refs else ((), (), ())
        gone = self._ask(
            """SELECT digest, size, coding, place, frames, used
                FROM let_go_1(%(tenant)s, %(keys)s::bigint[], %(digests)s, %(sizes)s::bigint[])""",
            keys=list(keys),
            digests=list(digests),
            sizes=list(sizes),
        )
        return Freed.of(len(refs), [blob_from(row) for row in gone])

    def _revive(self, digest: str) -> int:
        (row,) = self._ask(
            "SELECT revive_1(%(tenant)s, %(digest)s) AS refs", digest=bytes.fromhex(digest)
        )
        return int(row["refs"])

    def close(self) -> None:
        self._connections.close()


def hashes_of(sessions: Iterable[str]) -> list[bytes]:
    """Return the hashes that the indexes use instead of long ids."""
    return [hashlib.sha256(session_id.encode(errors=_ERRORS)).digest() for session_id in sessions]


def limit_clause(limit: int | None) -> str:
    return "" if limit is None else f"LIMIT {int(limit)}"


def _stored(name: str, value: Any) -> Any:
    return value.encode(errors=_ERRORS) if name in _TEXTS and value is not None else value


def rows_of(db: Db, sql: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a statement and return its rows, with the columns of text as text."""
    with db.cursor(row_factory=dict_row) as cursor:
        cursor.execute(sql, values, binary=True)
        rows = cursor.fetchall() if cursor.description is not None else []
    for row in rows:
        for name in _TEXTS.intersection(row):
            if row[name] is not None:
                row[name] = row[name].decode(errors=_ERRORS)
    return rows


def _values_of(row: Row) -> dict[str, Any]:
    """Return the values of a row by the names of their columns; the owner of a note is its
    session."""
    if isinstance(row, Entry):
        return ref_values(row.ref) | {
            "session_id": row.session.session_id,
            "seq": row.seq,
            "gone": row.gone,
        }
    if isinstance(row, Note):
        return {"session_id": row.owner, "key": row.key, "value": row.value}
    if isinstance(row, Blob):
        return {name: getattr(row, name) for name in row.__slots__} | {
            "digest": bytes.fromhex(row.digest)
        }
    return {name: getattr(row, name) for name in row.__slots__}


def _is_committed(db: Db, number: str) -> bool:
    try:
        with db.transaction():
            found = db.execute("SELECT pg_xact_status(%s::xid8)", (number,)).fetchone()
    except errors.InvalidParameterValue:  # after a failover, the new primary may never have seen it
        return False
    return found == ("committed",)
