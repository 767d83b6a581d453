"""The catalog in PostgreSQL, and the full-text index beside it.

A change is one transaction; locks are always taken in the order session, refs, blob. A put is one
call of a function in the database: one round trip. Content up to `inline_limit` is sent with it.
Any number of machines may collect: each takes a batch of sessions that no other machine has locked.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import dict_row

from coatcheck.errors import StoreError, StoreUnavailable
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob
from coatcheck.storage import Held, Mark, Match, Passage, expiry
from coatcheck.storage.catalog import (
    ANY_SESSION,
    BATCH,
    NO_LIMITS,
    NOTHING_SHOWN,
    RECORDS,
    TRANSCRIPT,
    Catalog,
    Effect,
    Entry,
    Freed,
    Limits,
    Note,
    Ranges,
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
from coatcheck.storage.passages import held_from, held_together, label_of, spread, terms_of
from coatcheck.storage.postgres import Connections, Db

_INLINE: Final = 64 * 1024
_PAGE: Final = 256
_BATCH: Final = 100  # sessions per batch of a collection
_LATER: Final = 86_400.0  # seconds before an expired session with a pin is checked again
_HIGHEST: Final = b"\xff" * 32
_ERRORS: Final = "surrogateescape"  # for the ids of sessions that have ended
_GONE, _OVER, _ALONE = "CC001", "CC002", "CC003"
_TEXTS: Final = {"session_id", "parent", "name", "media_type", "tool", "call_id", "summary",
                 "granted_by", "request", "metadata_json"}  # fmt: skip
"""Columns of text that are stored as bytes."""
# Columns are named, because a plan that PostgreSQL keeps fails if a migration adds one.
_ENTRY: Final = """r.seq, r.digest, r.size, r.name, r.codec, r.media_type, r.kind, r.tool,
    r.call_id, r.producer, r.parents, r.summary, r.created, r.expires, r.pinned, r.granted_by,
    r.request, r.metadata_json, r.gone, b.coding, b.place, b.frames, s.session_id, s.parent, s.ttl,
    s.quota, s.created AS session_created, s.used, s.used_bytes,
    CASE WHEN %(content)s THEN b.data END AS content"""
"""The columns of an entry: of a ref, its blob and its session."""
# A separate query, so that the planner knows the single session and walks its refs in order.
_IN_SESSION: Final = """r.session_key = (SELECT session_key FROM session
    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s))"""
_ENDED: Final = b"\xff"
"""The first byte of the id of a session that has ended and still has rows; no text has it.
`look_at` is then infinite, and so is `ended_at`, in the past."""
_LONGEST: Final = 500_000  # indexed characters per passage: a tsvector is limited to one megabyte
_SWEPT_AT_ONCE: Final = 1000
_SWEPT_EVERY: Final = 86_400  # seconds
_T = TypeVar("_T")


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
        """SELECT count(*) AS count FROM ref
            WHERE tenant = %(tenant)s AND session_key NOT IN (SELECT session_key FROM session)""",
        "DELETE FROM ref WHERE tenant = %(tenant)s AND session_key NOT IN"
        " (SELECT session_key FROM session)",
    ),
    _Check(
        "notes without a session",
        """SELECT count(*) AS count FROM note WHERE tenant = %(tenant)s AND session_key > 0
            AND session_key NOT IN (SELECT session_key FROM session)""",
        """DELETE FROM note WHERE tenant = %(tenant)s AND session_key > 0
            AND session_key NOT IN (SELECT session_key FROM session)""",
    ),
    _Check(
        "blobs with a wrong count of refs",
        """SELECT count(*) AS count FROM blob b
            WHERE tenant = %(tenant)s AND refs <> (SELECT count(*) FROM ref r
            WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)""",
        """UPDATE blob b SET refs = (SELECT count(*) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)
            WHERE tenant = %(tenant)s AND refs <> (SELECT count(*) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)""",
    ),
    _Check(
        "sessions with a wrong count of bytes",
        """SELECT count(*) AS count FROM session WHERE tenant = %(tenant)s
            AND used_bytes <> (SELECT coalesce(sum(size), 0)
                FROM (SELECT DISTINCT digest, size FROM ref
                WHERE ref.session_key = session.session_key AND ref.gone IS NULL) held)""",
        """UPDATE session SET used_bytes =
                (SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
                WHERE ref.session_key = session.session_key AND ref.gone IS NULL) held)
            WHERE tenant = %(tenant)s
            AND used_bytes <> (SELECT coalesce(sum(size), 0)
                FROM (SELECT DISTINCT digest, size FROM ref
                WHERE ref.session_key = session.session_key AND ref.gone IS NULL) held)""",
    ),
    _Check(
        "blobs with a wrong size",
        """SELECT count(*) AS count FROM blob b WHERE tenant = %(tenant)s
            AND size <> coalesce(octet_length(b.data), (SELECT max(r.size) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL), b.size)""",
        """UPDATE blob b SET size = coalesce(octet_length(b.data), (SELECT max(r.size) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL), b.size)
            WHERE tenant = %(tenant)s
            AND size <> coalesce(octet_length(b.data), (SELECT max(r.size) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL), b.size)""",
    ),
    _Check(
        "wrong counts of all bytes",
        """SELECT count(*) AS count WHERE
            (SELECT coalesce(sum(size), 0) FROM blob WHERE tenant = %(tenant)s)
            <> (SELECT coalesce(sum(bytes), 0) FROM stored WHERE tenant = %(tenant)s)""",
        """INSERT INTO stored SELECT %(tenant)s, -1,
                (SELECT coalesce(sum(size), 0) FROM blob WHERE tenant = %(tenant)s)
                - (SELECT coalesce(sum(bytes), 0) FROM stored WHERE tenant = %(tenant)s)
            ON CONFLICT (tenant, slot) DO UPDATE SET bytes = stored.bytes + excluded.bytes""",
    ),
)


class PostgresCatalog(Catalog):
    """Sessions, refs, names, records and small content of one tenant."""

    inline_limit = _INLINE

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant
        self.uri_prefix = f"{connections.address}#blob="
        self._own = threading.local()  # `db` is the connection of the change that this thread runs

    # Rows

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
            return self._connections.once(lambda db: _rows(db, sql, packed), "reading the catalog")
        return _rows(db, sql, packed)

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
            ended=_ENDED,
            page=_PAGE,
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
        values: dict[str, Any] = {"prefix": prefix.encode(), "ended": _ENDED, "limit": limit}
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
            where, values["session_id"] = [_IN_SESSION, *where], session_id
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
            f"""SELECT {_ENTRY} FROM ref r JOIN session s ON s.session_key = r.session_key
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
                ORDER BY key {order} {_limit(limit)}""",
            session_id=owner,
            start=start,
            stop=stop,
        )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        if not prefixes:
            return []
        found = self._ask(
            """SELECT first.key, first.value FROM unnest(%(prefixes)s::text[]) AS asked (start),
                LATERAL (SELECT key, value FROM note WHERE tenant = %(tenant)s
                    AND key >= asked.start AND key < asked.start || 'g'
                    AND session_key = (SELECT session_key FROM session
                        WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s))
                    ORDER BY key LIMIT 1) AS first""",
            session_id=owner,
            prefixes=list(prefixes),
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

    def _next_token(self) -> int:
        return int(self._ask("SELECT nextval('fence') AS token")[0]["token"])

    def close(self) -> None:
        self._connections.close()

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
            low, high = prefix_range(prefix)
            where = f"{_IN_SESSION} AND r.digest BETWEEN %(low)s AND %(high)s ORDER BY r.seq DESC"
            found = self._entries(where, content=content, session_id=session_id, low=low, high=high)
            return newest_of_each(found)[:limit]
        where, values = _IN_SESSION, {"session_id": session_id, "name": name, "before": before}
        if name is not None:
            where += " AND sha256(r.name) = sha256(%(name)s) AND r.name = %(name)s"
        elif before is not None:
            where += " AND r.seq < %(before)s"
        # A literal bound: with an unknown one, the planner may sort the session's refs first.
        return self._entries(
            f"{where} ORDER BY r.seq DESC {_limit(limit)}", content=content, **values
        )

    def _granted(self, session_id: str, prefix: str = "", *, content: bool = False) -> list[Entry]:
        low, high = prefix_range(prefix)
        return self._entries(
            "r.tenant = %(tenant)s AND sha256(r.granted_by) = sha256(%(session_id)s) AND "
            "r.granted_by = %(session_id)s"
            f" AND substr(s.session_id, 1, {len(TRANSCRIPT)}) = '{TRANSCRIPT}' AND r.digest "
            "BETWEEN %(low)s AND"
            " %(high)s ORDER BY r.created DESC, r.seq DESC",
            content=content, session_id=session_id, low=low, high=high,
        )  # fmt: skip

    def find_many(
        self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False
    ) -> list[Entry]:
        lineage, ranges = list(sessions), [prefix_range(prefix) for prefix in prefixes]
        rows = self._ask(
            # OFFSET prevents a join: each session and range is one index lookup.
            f"SELECT {_ENTRY} FROM session s,"
            " unnest(%(low)s::bytea[], %(high)s::bytea[]) AS one (low, high),"
            " LATERAL (SELECT * FROM ref WHERE session_key = s.session_key"
            " AND digest BETWEEN one.low AND one.high OFFSET 0) r"
            " LEFT JOIN blob b ON b.tenant = r.tenant AND b.digest = r.digest"
            " WHERE s.tenant = %(tenant)s AND sha256(s.session_id) = ANY (%(sessions)s)"
            " ORDER BY r.seq DESC",
            sessions=hashes_of(lineage), low=[low for low, _ in ranges],
            high=[high for _, high in ranges], content=content,
        )  # fmt: skip
        return newest_in_each(lineage, map(entry_from, rows))

    def blob(self, digest: str) -> Blob | None:
        rows = self._ask(
            f"""SELECT digest, size, coding, place, frames, used FROM blob
                WHERE tenant = %(tenant)s AND digest = %(digest)s {self._lock()}""",
            digest=bytes.fromhex(digest),
        )
        return blob_from(rows[0]) if rows else None

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        rows = self._ask(
            "SELECT digest, place FROM blob"
            " WHERE tenant = %(tenant)s AND digest = ANY (%(digests)s)",
            digests=[bytes.fromhex(digest) for digest in digests],
        )
        return {row["digest"].hex(): row["place"] for row in rows}

    def totals(self) -> Totals:
        row = self._ask_whole(
            """SELECT (SELECT count(*) FROM session
                WHERE tenant = %(tenant)s AND substr(session_id, 1, 1) <> %(ended)s) AS sessions,
            count(*) FILTER (WHERE gone IS NULL) AS refs,
            (SELECT count(*) FROM blob WHERE tenant = %(tenant)s) AS artifacts,
            count(*) FILTER (WHERE gone IS NOT NULL) AS tombstones,
            (SELECT coalesce(sum(size), 0) FROM blob
                WHERE tenant = %(tenant)s)::bigint AS stored_bytes,
            coalesce(sum(size) FILTER (WHERE gone IS NULL), 0)::bigint AS referenced_bytes
            FROM ref WHERE tenant = %(tenant)s""",
            ended=_ENDED,
        )[0]
        return Totals(**row)

    def _ask_whole(self, sql: str, **values: Any) -> list[Any]:
        """Like `_ask`, for whole tables."""
        return self._run("reading the catalog", lambda: self._ask(sql, **values), whole=True)

    # Writing

    def put(
        self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False
    ) -> bool:
        return self._put(entry, limits, reuse=reuse, heal=heal) is not None

    def put_inline(
        self,
        digest: str,
        lineage: Sequence[str],
        make: Callable[[], Entry],
        is_repeat: Callable[[Entry], bool],
        *,
        limits: Limits = NO_LIMITS,
    ) -> tuple[Entry, Collection[str]]:
        entry = make()
        near = self._put(entry, limits, if_new=True)
        if near is None:  # the session has the artifact
            return super().put_inline(digest, lineage, lambda: entry, is_repeat, limits=limits)
        return entry, near | (self.near(lineage[1:], [digest]) if len(lineage) > 1 else set())

    def _put(
        self,
        entry: Entry,
        limits: Limits,
        *,
        reuse: bool = False,
        heal: bool = False,
        if_new: bool = False,
    ) -> set[str] | None:
        """Put an entry in one round trip, and return the ids in its session that begin like its
        own. Returns None and changes nothing if the copy to reuse is gone or, with `if_new`, if the
        session has the artifact."""
        ref, blob, session = entry.ref, entry.blob, entry.session
        low, high = prefix_range(ref.artifact_id[:MIN_PREFIX])
        values = self._packed(ref_values(ref)) | self._packed(
            {
                "session_id": session.session_id,
                "parent": session.parent,
                "ttl": session.ttl,
                "quota": session.quota,
                "grace": limits.grace,
                "store_quota": limits.store_quota,
                "coding": blob.coding,
                "place": blob.place,
                "frames": blob.frames,
                "content": entry.content,
                "heal": heal,
                "reuse": reuse,
                "if_new": if_new,
                "low": low,
                "high": high,
                "attempt": secrets.token_bytes(8),
            }
        )

        def change(db: Db) -> set[str] | None:
            try:
                near = _put_row(db, values)
            except psycopg.Error as error:
                if error.sqlstate == _GONE:
                    return None
                if error.sqlstate == _OVER:
                    _check_reported_quota(error, entry, limits)
                raise
            if near is None:
                return None
            return {digest.hex() for digest in near}

        return self._connections.once(change, "putting an artifact")

    def remove(
        self,
        session_id: str,
        digest: str | None = None,
        *,
        name: str | None = None,
        end: bool = False,
    ) -> Freed:
        """Like `Catalog.remove`. A session that ends gets an id that cannot be found, and its rows
        are removed in short transactions. If they are interrupted, a collection removes the
        rest."""
        if not end:
            return super().remove(session_id, digest, name=name)

        def hide() -> int | None:
            self._stop_lending(session_id)
            hidden = self._ask(
                """UPDATE session SET session_id = %(ended)s || int8send(session_key),
                    parent = NULL, look_at = 'infinity', ended_at = '-infinity'
                    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)
                        RETURNING session_key""",
                ended=_ENDED,
                session_id=session_id,
            )
            return hidden[0]["session_key"] if hidden else None

        return self._end_all(self.change("forgetting", hide, session_id=session_id, effect="free"))

    def _end_all(self, key: int | None = None) -> Freed:
        """Remove what is left of a session that has ended, or of all of them."""
        freed, is_open = Freed(), True
        while is_open:
            some, is_open = self._run("forgetting", partial(self._end_some, key), slow=True)
            freed += some
        return freed

    def _end_some(self, key: int | None) -> tuple[Freed, bool]:
        """Remove some rows of a session that has ended, and the session itself with the last of
        them. Returns what was freed and whether there may be more."""
        own, lock = ("", "SKIP LOCKED") if key is None else ("AND session_key = %(key)s", "")
        found = self._ask(
            "SELECT session_key FROM session"
            f" WHERE tenant = %(tenant)s AND ended_at = '-infinity' {own} LIMIT 1"
            f" FOR UPDATE {lock}",
            key=key,
        )
        if not found:
            return Freed(), False
        one = found[0]["session_key"]
        refs = self._ask(
            "DELETE FROM ref WHERE session_key = %(key)s AND seq <="
            " (SELECT max(seq) FROM (SELECT seq FROM ref"
            " WHERE session_key = %(key)s ORDER BY seq LIMIT %(batch)s) part)"
            " RETURNING digest, size, gone",
            key=one, batch=BATCH,
        )  # fmt: skip
        freed = self._let_go_of(
            [(one, row["digest"], row["size"]) for row in refs if row["gone"] is None]
        )
        if len(refs) == BATCH or self._drop_some("note", [one]):
            return freed, True
        self._ask("DELETE FROM session WHERE session_key = %(key)s", key=one)
        return freed, key is None

    def _drop_some(self, table: str, keys: list[int], where: str = "TRUE") -> bool:
        """Delete notes or refs of these sessions, at most a batch. Returns whether there may be
        more."""
        key = "key" if table == "note" else "seq"
        same = "t.tenant = %(tenant)s AND t.session_key = one.session_key"
        (done,) = self._ask(
            f"WITH part AS MATERIALIZED (SELECT one.session_key, found.{key}"
            " FROM unnest(%(keys)s::bigint[])"
            " AS one (session_key), LATERAL"
            f" (SELECT {key} FROM {table} t WHERE {same} AND {where} ORDER BY {key}"
            " LIMIT %(batch)s) found LIMIT %(batch)s),"
            f" gone AS (DELETE FROM {table} t USING part one WHERE {same}"
            f" AND t.{key} = one.{key} RETURNING 1) SELECT count(*) AS count FROM gone",
            keys=keys, batch=BATCH,
        )  # fmt: skip
        return bool(done["count"] == BATCH)

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = NOTHING_SHOWN,
    ) -> None:
        def work() -> None:
            self._each(
                """UPDATE session SET used = greatest(used, %(at)s)
                    WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session_id)s)""",
                [{"session_id": each, "at": at} for each, at in sorted(sessions.items())],
            )
            self._each(
                "UPDATE blob SET used = greatest(used, %(at)s)"
                " WHERE tenant = %(tenant)s AND digest = %(digest)s",
                [
                    {"digest": bytes.fromhex(digest), "at": at}
                    for digest, at in sorted(blobs.items())
                ],
            )
            self._add_shown(shown)

        self.change("noting use", work, effect="note")

    # Upkeep

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed = self._end_all()  # first the sessions whose end was interrupted
        walked: dict[int, tuple[int, bool]] | None = {}
        while walked is not None:
            some, walked = self._run(
                "expiring", partial(self._expire_sessions, at, walked), slow=True
            )
            freed += some
        is_open = True
        while is_open:
            some, is_open = self._run("expiring", partial(self._expire_refs, at), slow=True)
            freed += some
        while self._run("expiring", partial(self._drop_tombstones, forget_before), slow=True):
            pass
        self._drop_aside(at)
        return freed

    def _would_expire(self, at: float) -> Freed:
        is_due = f"""session.tenant = %(tenant)s AND {expiry.REF_MAY_EXPIRE}
            AND ({expiry.session_is_over("%(at)s")} OR ref.expires <= %(at)s)"""
        (count,) = self._ask_whole(
            f"SELECT count(*) AS refs FROM session JOIN ref USING (session_key) WHERE {is_due}",
            at=at,
        )
        blobs = self._ask_whole(
            f"""SELECT b.digest, b.size, b.coding, b.place, b.frames, b.used FROM blob b
                JOIN (SELECT ref.digest, count(*) AS number FROM session
                    JOIN ref USING (session_key)
                    WHERE {is_due} GROUP BY ref.digest) AS dead
                ON dead.digest = b.digest AND dead.number = b.refs WHERE b.tenant = %(tenant)s""",
            at=at,
        )
        return Freed.of(count["refs"], [blob_from(row) for row in blobs])

    def _expire_sessions(
        self, at: float, walked: dict[int, tuple[int, bool]]
    ) -> tuple[Freed, dict[int, tuple[int, bool]] | None]:
        """Expire the next refs of due sessions that no other machine has locked. Each session is
        checked again at its current expiry time. `walked` has the last ref looked at in each
        session that is not done, and whether one of its refs is pinned; also returns this for the
        next call, or None if no session is due."""
        due = self._ask(
            f"SELECT session_key, coalesce({expiry.session_is_over('%(at)s')}, false) AS is_over"
            " FROM session"
            " WHERE tenant = %(tenant)s AND look_at <= %(at)s"
            " ORDER BY look_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED",
            at=at, batch=_BATCH,
        )  # fmt: skip
        if not due:
            return Freed(), None
        over = [row["session_key"] for row in due if row["is_over"]]
        places = {key: walked.get(key, (0, False)) for key in over}
        rows = self._ask(
            # Turns the next refs into tombstones, except pinned ones, and returns all that it has
            # looked at.
            """WITH part AS MATERIALIZED (SELECT one.key, found.*
                    FROM unnest(%(keys)s::bigint[], %(after)s::bigint[]) AS one (key, after),
                    LATERAL (SELECT seq, gone IS NULL AS is_live, pinned FROM ref
                    WHERE session_key = one.key AND seq > one.after
                        ORDER BY seq LIMIT %(batch)s) found
                    LIMIT %(batch)s),
                buried AS (UPDATE ref SET gone = 'expired' FROM part
                    WHERE ref.session_key = part.key AND ref.seq = part.seq AND part.is_live
                    AND NOT part.pinned
                    RETURNING ref.session_key, ref.seq, ref.digest, ref.size)
                SELECT part.key AS session_key, part.seq, part.is_live AND part.pinned AS is_pinned,
                    buried.digest, buried.size
                FROM part LEFT JOIN buried ON buried.session_key = part.key
                    AND buried.seq = part.seq""",
            keys=over,
            after=[places[key][0] for key in over],
            batch=BATCH,
        )
        for row in rows:
            seq, has_pins = places[row["session_key"]]
            places[row["session_key"]] = max(row["seq"], seq), row["is_pinned"] or has_pins
        buried = [row for row in rows if row["digest"] is not None]
        freed = self._let_go_of(
            [(row["session_key"], row["digest"], row["size"]) for row in buried]
        )
        if len(rows) == BATCH or self._drop_some(
            "note", over, f"key >= '{RECORDS[0]}' AND key < '{RECORDS[1]}'"
        ):
            return freed, places
        self._ask(
            f"UPDATE session SET look_at = {expiry.SESSION_END} WHERE session_key = ANY (%(keys)s)",
            keys=[row["session_key"] for row in due if not row["is_over"]],
        )
        self._ask(
            "UPDATE session SET look_at = %(later)s WHERE session_key = ANY (%(keys)s)",
            keys=[key for key, (_, has_pins) in places.items() if has_pins], later=at + _LATER,
        )  # fmt: skip
        self._ask(
            f"UPDATE session SET look_at = NULL, ended_at = {expiry.SESSION_END}"
            " WHERE session_key = ANY (%(keys)s)",
            keys=[key for key, (_, has_pins) in places.items() if not has_pins],
        )
        return freed, {}

    def _expire_refs(self, at: float) -> tuple[Freed, bool]:
        """Expire the next refs by their own expiry time. Returns what was freed and whether there
        may be more."""
        due = self._ask(
            "SELECT session_key, seq FROM ref"
            f" WHERE tenant = %(tenant)s AND {expiry.ref_is_over('%(at)s')}"
            " ORDER BY expires LIMIT %(batch)s",
            at=at, batch=BATCH,
        )  # fmt: skip
        keys, seqs = [row["session_key"] for row in due], [row["seq"] for row in due]
        self._ask(
            "SELECT 1 FROM session WHERE session_key = ANY (%(keys)s)"
            " ORDER BY session_key FOR UPDATE",
            keys=keys,
        )
        buried = self._ask(
            "UPDATE ref SET gone = 'expired'"
            " FROM unnest(%(keys)s::bigint[], %(seqs)s::bigint[]) AS due (key, seq)"
            f" WHERE session_key = due.key AND ref.seq = due.seq AND {expiry.REF_MAY_EXPIRE}"
            " RETURNING session_key, digest, size",
            keys=keys, seqs=seqs,
        )  # fmt: skip
        return self._let_go_of(
            [(row["session_key"], row["digest"], row["size"]) for row in buried]
        ), bool(due)

    def _drop_tombstones(self, before: float) -> bool:
        """Drop some tombstones of the next sessions that have nothing else; return whether there
        may be more."""
        found = self._ask(
            "SELECT session_key FROM session WHERE tenant = %(tenant)s AND ended_at < %(before)s"
            " AND ended_at > '-infinity' ORDER BY ended_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED",
            before=before, batch=_BATCH,
        )  # fmt: skip
        keys = [row["session_key"] for row in found]
        if self._drop_some("ref", keys, "gone IS NOT NULL"):
            return True
        found = self._ask(
            """SELECT session_key, sha256(session_id) AS hash FROM session s
                WHERE session_key = ANY (%(keys)s)
                AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.session_key = s.session_key)
                AND NOT EXISTS (SELECT 1 FROM note
                    WHERE note.tenant = s.tenant AND note.session_key = s.session_key
                    AND note.key >= %(first)s AND note.key < %(last)s)""",
            keys=keys,
            first=RECORDS[0],
            last=RECORDS[1],
        )
        empty = {row["session_key"]: row["hash"] for row in found}
        if self._drop_some("note", list(empty)):
            return True
        self._ask("DELETE FROM session WHERE session_key = ANY (%(keys)s)", keys=list(empty))
        for table, more in (("held", ""), ("followed", ""), ("passage", " AND session_id <> ''")):
            where = f"tenant = %(tenant)s AND sha256(session_id) = ANY (%(sessions)s){more}"
            self._ask(f"DELETE FROM {table} WHERE {where}", sessions=list(empty.values()))
        self._ask(
            "UPDATE session SET ended_at = NULL WHERE session_key = ANY (%(keys)s)", keys=keys
        )
        return bool(keys)

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        last, digest = after, _HIGHEST
        while rows := self._ask(
            """SELECT digest, size, coding, place, frames, used FROM blob
                WHERE tenant = %(tenant)s AND coding = 'raw' AND used <= %(until)s
                AND (used, digest) > (%(last)s, %(digest)s) ORDER BY used, digest LIMIT %(page)s""",
            until=until,
            last=last,
            digest=digest,
            page=_PAGE,
        ):
            yield from map(blob_from, rows)
            last, digest = rows[-1]["used"], rows[-1]["digest"]

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        return self._run("checking the catalog", lambda: self._check(repair, until), whole=True)

    def _check(self, repair: bool, until: float) -> list[str]:
        problems = self._check_stray_refs(repair, until)
        for check in _CHECKS:
            (found,) = self._ask(check.count)
            if found["count"] and repair:
                self._ask(check.mend)
            problems += _found(found["count"], check.name, repair)
        if repair:
            self._ask("DELETE FROM blob WHERE tenant = %(tenant)s AND refs <= 0")
        return problems + self._check_records(repair=repair)

    def _check_stray_refs(self, repair: bool, until: float) -> list[str]:
        """Find live refs without a blob row. They become tombstones, and what they need is set
        aside."""
        rows = self._ask(
            """SELECT digest, count(*) AS number FROM ref WHERE tenant = %(tenant)s AND gone IS NULL
                AND NOT EXISTS (SELECT 1 FROM blob b
                WHERE b.tenant = ref.tenant AND b.digest = ref.digest)
                GROUP BY digest"""
        )
        if rows and repair:
            for row in rows:
                self.save(SetAside(Blob(row["digest"].hex(), 0, "raw"), until).note())
            self._ask(
                """UPDATE ref SET gone = 'damaged' WHERE tenant = %(tenant)s AND gone IS NULL
                    AND NOT EXISTS (SELECT 1 FROM blob b
                    WHERE b.tenant = ref.tenant AND b.digest = ref.digest)"""
            )
        return _found(sum(row["number"] for row in rows), "refs without a blob row", repair)

    def _every_note(self, start: str, stop: str) -> Iterator[Note]:
        with self._own.db.cursor(name="notes") as rows:
            rows.execute(
                """SELECT s.session_id, n.key, n.value FROM note n
                    JOIN session s USING (tenant, session_key)
                    WHERE n.tenant = %s AND n.key >= %s AND n.key < %s
                        AND substr(s.session_id, 1, 1) <> %s""",
                (self._tenant, start, stop, _ENDED),
            )
            for session_id, key, value in rows:
                yield Note(session_id.decode(), key, value)


class PostgresPassages:
    """The full-text index of one tenant."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant

    def followed(self, session_id: str) -> Mark | None:
        rows = self._ask(
            """SELECT created, seq, digest FROM followed
                WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session)s)""",
            session=session_id.encode(),
        )
        return Mark(rows[0]["created"], rows[0]["seq"], rows[0]["digest"].hex()) if rows else None

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = list(digests)
        known = self._ask(
            "SELECT digest FROM indexed WHERE tenant = %(tenant)s AND digest = ANY (%(wanted)s)",
            wanted=[bytes.fromhex(digest) for digest in wanted],
        )
        held = {row["digest"].hex() for row in known}
        return [digest for digest in wanted if digest not in held]

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        found = {digest: list(passages) for digest, passages in sorted(contents.items())}

        def insert(db: Db) -> None:
            new = db.execute(
                "INSERT INTO indexed SELECT %s, unnest(%s) ON CONFLICT DO NOTHING RETURNING digest",
                (self._tenant, [bytes.fromhex(digest) for digest in found]),
            ).fetchall()
            self._insert(
                db, b"", [(digest, passage) for (digest,) in new for passage in found[digest.hex()]]
            )

        self._connections.run(insert, "indexing artifacts")

    def hold(
        self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool
    ) -> None:
        session = session_id.encode()

        def note(db: Db) -> None:
            # One at a time: the results of two machines for one session must not be mixed.
            db.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(encode(%s, 'hex'), 1))", (session,)
            )
            known = self._held(db, session)
            if complete:
                self._leave(
                    db, session, [bytes.fromhex(digest) for digest in known.keys() - holds.keys()]
                )
                self._save_held(db, session, known, holds)
            else:
                together = {
                    digest: held_together(known.get(digest), held) for digest, held in holds.items()
                }
                self._save_held(db, session, known, together)
            if mark is not None:
                self._save_mark(db, session, mark)

        self._connections.run(note, "indexing a session")

    def _held(self, db: Db, session: bytes) -> dict[str, Held]:
        """Return what the index has for a session, by digest."""
        rows = _rows(
            db,
            """SELECT digest, label, expires FROM held
                WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session)s)""",
            {"tenant": self._tenant, "session": session},
        )
        return {
            row["digest"].hex(): held_from(row["label"].decode(), row["expires"]) for row in rows
        }

    def _save_held(
        self, db: Db, session: bytes, known: Mapping[str, Held], holds: Mapping[str, Held]
    ) -> None:
        """Save a session's artifacts, and index the labels that differ from the known ones."""
        rows: list[dict[str, Any]] = []
        changed: dict[bytes, str] = {}
        for digest, held in sorted(holds.items()):
            key = bytes.fromhex(digest)
            label = label_of(held)
            rows.append(
                {
                    "tenant": self._tenant,
                    "session": session,
                    "digest": key,
                    "label": label.encode("utf-8", "replace"),
                    "expires": held.expires,
                }
            )
            if digest not in known or label_of(known[digest]) != label:
                changed[key] = label
        with db.cursor() as cursor:
            cursor.executemany(
                """INSERT INTO held VALUES (%(tenant)s, %(session)s, %(digest)s, %(label)s,
                    %(expires)s)
                    ON CONFLICT (tenant, sha256(session_id), digest)
                    DO UPDATE SET label = excluded.label, expires = excluded.expires""",
                rows,
            )
        self._drop_labels(db, session, list(changed))
        self._insert(
            db,
            session,
            [(key, Passage(0, 0, 0, 0, label)) for key, label in changed.items() if label],
        )

    def _save_mark(self, db: Db, session: bytes, mark: Mark) -> None:
        db.execute(
            """INSERT INTO followed VALUES (%(tenant)s, %(session)s, %(created)s, %(seq)s,
                %(digest)s)
                ON CONFLICT (tenant, sha256(session_id))
                DO UPDATE SET created = excluded.created, seq = excluded.seq,
                digest = excluded.digest""",
            {
                "tenant": self._tenant,
                "session": session,
                "created": mark.created,
                "seq": mark.seq,
                "digest": bytes.fromhex(mark.digest),
            },
        )

    def count(self, sessions: Iterable[str], at: float) -> int:
        rows = self._ask(
            """SELECT count(DISTINCT digest) AS number FROM held WHERE tenant = %(tenant)s
                AND sha256(session_id) = ANY (%(sessions)s)
                AND (expires IS NULL OR expires >= %(at)s)""",
            sessions=hashes_of(sessions),
            at=at,
        )
        return int(rows[0]["number"])

    def leave(self, session_id: str, digest: str | None = None) -> None:
        session = session_id.encode()

        def drop(db: Db) -> None:
            if digest is not None:
                self._leave(db, session, [bytes.fromhex(digest)])
                return
            own = {"tenant": self._tenant, "session": session}
            db.execute(
                "DELETE FROM held WHERE tenant = %(tenant)s"
                " AND sha256(session_id) = sha256(%(session)s)",
                own,
            )
            db.execute(
                "DELETE FROM followed WHERE tenant = %(tenant)s"
                " AND sha256(session_id) = sha256(%(session)s)",
                own,
            )
            db.execute(
                """DELETE FROM passage WHERE tenant = %(tenant)s
                    AND sha256(session_id) = sha256(%(session)s)
                    AND session_id <> ''""",
                own,
            )

        try:
            self._connections.run(drop, "sweeping the index")
        except StoreUnavailable:
            pass  # the caller checks each match anyway: forgetting must not fail here

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        terms = list(dict.fromkeys(terms_of(words)))[:64]
        if not terms:
            return []
        rows = self._ask(
            # Each word is its own query, so a model's words are never parsed as operators. The
            # ranking is like BM25: a word counts more if fewer passages of these sessions contain
            # it, and repeating it in one passage counts less each time.
            """WITH asked AS MATERIALIZED (SELECT DISTINCT plainto_tsquery('english', term) AS word
                    FROM unnest(%(terms)s::text[]) AS t (term)
                    WHERE numnode(plainto_tsquery('english', term)) > 0),
                own AS MATERIALIZED (SELECT DISTINCT digest FROM held
                    WHERE tenant = %(tenant)s AND sha256(session_id) = ANY (%(sessions)s)),
                found AS MATERIALIZED (SELECT p.passage_key, p.digest, p.first, p.last, p.start,
                    p.stop, asked.word, ts_rank('{1,1,1,1}', p.words, asked.word) AS often,
                    length(p.words)::float8 AS size
                    FROM own JOIN passage p ON p.tenant = %(tenant)s AND p.digest = own.digest
                    JOIN asked ON p.words @@ asked.word
                    WHERE p.session_id = '' OR sha256(p.session_id) = ANY (%(sessions)s)),
                rarity AS (SELECT word, ln(1 + (greatest(0,
                    (SELECT count(*) FROM own) - count(*)) + 0.5)::float8
                    / (count(*) + 0.5)::float8) AS weight FROM found GROUP BY word)
                SELECT digest, first, last, start, stop, -sum(weight * often
                    / (often + 0.3 * (0.75 + 0.25 * size /
                        (SELECT avg(size) FROM found))))::float8 AS score
                FROM found JOIN rarity USING (word)
                    GROUP BY passage_key, digest, first, last, start, stop
                ORDER BY score, digest, first LIMIT %(limit)s""",
            terms=terms,
            sessions=hashes_of(sessions),
            limit=limit,
        )
        return [
            Match(
                row["digest"].hex(),
                row["first"],
                row["last"],
                row["start"],
                row["stop"],
                row["score"],
            )
            for row in rows
        ]

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop what the catalog no longer knows. Both are in one database, so `is_known` is not
        called, and the words of a blob are deleted with it. Only entries indexed just then, or
        released by an older version, remain: one sweep a day, on one machine, is enough."""
        due = self._ask(
            "INSERT INTO note VALUES (%(tenant)s, 0, 'swept',"
            " convert_to(extract(epoch FROM now())::text, 'UTF8'))"
            " ON CONFLICT (tenant, session_key, key) DO UPDATE SET value = excluded.value"
            " WHERE convert_from(note.value, 'UTF8')::float8"
            " < extract(epoch FROM now()) - %(every)s RETURNING 1",
            every=_SWEPT_EVERY,
        )
        if not due:
            return 0

        def drop(db: Db) -> int:
            gone = [digest for (digest,) in db.execute(
                "SELECT digest FROM (SELECT digest FROM indexed WHERE tenant = %(tenant)s UNION"
                " SELECT digest FROM held WHERE tenant = %(tenant)s) d WHERE NOT EXISTS"
                " (SELECT 1 FROM blob b WHERE b.tenant = %(tenant)s AND b.digest = d.digest)"
                " LIMIT %(page)s",
                {"tenant": self._tenant, "page": _SWEPT_AT_ONCE},
            )]  # fmt: skip
            for table in ("passage", "indexed", "held"):
                db.execute(
                    f"DELETE FROM {table} WHERE tenant = %s AND digest = ANY (%s)",
                    (self._tenant, gone),
                )
            return len(gone)

        total = 0
        while count := self._connections.run(drop, "sweeping the index", whole=True):
            total += count
        return total

    def close(self) -> None:
        """Do nothing: the catalog closes the connections that both use."""

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        return self._connections.once(
            lambda db: _rows(db, sql, {"tenant": self._tenant, **values}), "searching"
        )

    def _leave(self, db: Db, session: bytes, digests: list[bytes]) -> None:
        db.execute(
            """DELETE FROM held WHERE tenant = %(tenant)s
                AND sha256(session_id) = sha256(%(session)s)
                AND digest = ANY (%(digests)s)""",
            {"tenant": self._tenant, "session": session, "digests": digests},
        )
        self._drop_labels(db, session, digests)

    def _drop_labels(self, db: Db, session: bytes, digests: list[bytes]) -> None:
        db.execute(
            "DELETE FROM passage WHERE tenant = %s AND digest = ANY (%s) AND session_id = %s",
            (self._tenant, digests, session),
        )

    def _insert(self, db: Db, session: bytes, rows: list[tuple[bytes, Passage]]) -> None:
        with db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO passage (tenant, digest, session_id, first, last, start, stop, words)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, to_tsvector('english', %s))",
                [
                    (self._tenant, digest, session, row.first, row.last, row.start, row.end,
                     spread(row.text)[:_LONGEST].replace("\0", " "))
                    for digest, row in rows
                ],
            )  # fmt: skip


def hashes_of(sessions: Iterable[str]) -> list[bytes]:
    """Return the hashes that the indexes use instead of long ids."""
    return [hashlib.sha256(session_id.encode(errors=_ERRORS)).digest() for session_id in sessions]


def _found(count: int, what: str, repair: bool) -> list[str]:
    return [f"{count} {what}" + (": set right" if repair else "")] if count else []


def _limit(limit: int | None) -> str:
    return "" if limit is None else f"LIMIT {int(limit)}"


def _stored(name: str, value: Any) -> Any:
    return value.encode(errors=_ERRORS) if name in _TEXTS and value is not None else value


def _rows(db: Db, sql: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a statement and return its rows, with the columns of text as text."""
    with db.cursor(row_factory=dict_row) as cursor:
        cursor.execute(sql, values, binary=True)
        rows = cursor.fetchall() if cursor.description is not None else []
    for row in rows:
        for name in _TEXTS.intersection(row):
            if row[name] is not None:
                row[name] = row[name].decode(errors=_ERRORS)
    return rows


def _put_row(db: Db, values: dict[str, Any]) -> list[bytes] | None:
    """Call the function that puts. Some puts must not run beside others: it says so, and is called
    again alone."""
    try:
        return _call_put(db, values | {"alone": False})
    except psycopg.Error as error:
        if error.sqlstate != _ALONE:
            raise
    return _call_put(db, values | {"alone": True})


def _call_put(db: Db, values: dict[str, Any]) -> list[bytes] | None:
    rows = _rows(
        db,
        """SELECT put_1(%(tenant)s, %(session_id)s, %(parent)s, %(ttl)s, %(quota)s, %(created)s,
            %(grace)s, %(store_quota)s, %(digest)s, %(size)s, %(coding)s, %(place)s, %(frames)s,
            %(content)s, %(heal)s, %(reuse)s, %(name)s, %(codec)s, %(media_type)s, %(kind)s,
            %(tool)s, %(call_id)s, %(producer)s, %(parents)s, %(summary)s, %(expires)s, %(pinned)s,
            %(granted_by)s, %(request)s, %(metadata_json)s, %(if_new)s, %(low)s, %(high)s,
            %(attempt)s, %(alone)s) AS near""",
        values,
    )
    return rows[0]["near"] if rows else None


def _check_reported_quota(error: psycopg.Error, entry: Entry, limits: Limits) -> None:
    """Raise `QuotaExceeded` for the quota that the database reports, with the bytes that are
    used."""
    whose, _, used = (error.diag.message_primary or " ").partition(" ")
    quota = entry.session.quota if whose == "session" else limits.store_quota
    check_quota(whose, quota, int(used), entry)


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
