"""The catalog in PostgreSQL: one transaction per change; locks are always taken in the order session, refs, blob.

A put is one call of a function in the database: one round trip. Content up to `inline_limit` is sent with it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import psycopg

from coatcheck.errors import QuotaExceeded
from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.refs import Blob
from coatcheck.storage import _NO_LIMITS, _NOTHING, Entry, Limits, Ranges, SessionInfo, newest_of_each
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_rows import (
    BLOB,
    LENT,
    OF_SESSION,
    REF,
    SESSION,
    blob_of,
    entry_of,
    hashes_of,
    packed,
    session_of,
)
from coatcheck.storage.postgres_upkeep import PostgresUpkeep

INLINE: Final = 64 * 1024
_GONE, _OVER, _ALONE = "CC001", "CC002", "CC003"

_JOINED: Final = """FROM ref r JOIN session s ON s.session_key = r.session_key
    LEFT JOIN blob b ON b.tenant = r.tenant AND b.digest = r.digest"""
# A separate query, so that the planner knows the single session and walks its refs in order.
_IN_SESSION: Final = f"r.session_key = (SELECT session_key FROM session s WHERE {OF_SESSION})"


class PostgresCatalog(PostgresUpkeep):
    """Sessions, refs, names, records and small content of one tenant."""

    inline_limit = INLINE
    is_far = True

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._uri = connections.address

    def session(self, session_id: str) -> SessionInfo | None:
        rows = self._ask(f"SELECT {SESSION} FROM session s WHERE {OF_SESSION}", session=packed(session_id))
        return session_of(rows[0]) if rows else None

    def open_session(self, info: SessionInfo) -> None:
        self._ask(
            "INSERT INTO session (tenant, session_id, parent, ttl, quota, created_at, used_at)"
            " VALUES (%(tenant)s, %(session)s, %(parent)s, %(ttl)s, %(quota)s, %(created)s, %(used)s)"
            " ON CONFLICT (tenant, sha256(session_id))"
            " DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl, quota = excluded.quota RETURNING 1",
            session=packed(info.session_id), parent=packed(info.parent), ttl=info.ttl, quota=info.quota,
            created=info.created, used=info.used,
        )  # fmt: skip

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        return self._put(entry, limits, reuse=reuse, heal=heal) is not None

    def put_new(self, entry: Entry, *, limits: Limits = _NO_LIMITS) -> set[str] | None:
        return self._put(entry, limits, if_new=True)

    def _put(
        self, entry: Entry, limits: Limits, *, reuse: bool = False, heal: bool = False, if_new: bool = False
    ) -> set[str] | None:
        ref, blob, session = entry.ref, entry.blob, entry.session
        values = (
            self._tenant, packed(session.session_id), packed(session.parent), session.ttl, session.quota, ref.created,
            limits.grace, limits.store_quota, bytes.fromhex(ref.artifact_id), ref.size_bytes, blob.coding, blob.place,
            blob.frames, entry.content, heal, reuse, packed(ref.name), ref.codec, packed(ref.media_type), ref.kind,
            packed(ref.tool), packed(ref.call_id), ref.producer, json.dumps(ref.parents) if ref.parents else "",
            packed(ref.summary), ref.expires, ref.pinned, packed(ref.granted_by), packed(ref.request), if_new,
            *prefix_range(ref.artifact_id[:MIN_PREFIX]),
        )  # fmt: skip

        def change(db: Db) -> set[str] | None:
            try:
                try:
                    row = db.execute(_PUT, (*values, False), binary=True).fetchone()
                except psycopg.Error as error:
                    if error.sqlstate != _ALONE:
                        raise
                    row = db.execute(_PUT, (*values, True), binary=True).fetchone()
            except psycopg.Error as error:
                if error.sqlstate == _GONE:
                    return None
                if error.sqlstate == _OVER:
                    whose, _, used = (error.diag.message_primary or " ").partition(" ")
                    quota = session.quota if whose == "session" else limits.store_quota
                    raise QuotaExceeded(
                        f"{ref.size_bytes} bytes more would exceed the {whose}'s quota: {used} of {quota} are used"
                    ) from None
                raise
            return None if row is None or row[0] is None else {digest.hex() for digest in row[0]}

        return self._connections.once(change, "putting an artifact")

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()  # a put is committed when it returns

    def behind(self) -> bool:
        return False

    def find(
        self,
        session_id: str,
        *,
        prefix: str | None = None,
        name: str | None = None,
        content: bool = False,
        brief: bool = False,
        settled: bool = True,
        limit: int | None = None,
        before: int | None = None,
    ) -> list[Entry]:
        values: dict[str, Any] = {"session": packed(session_id)}
        # A literal bound: with an unknown one, the planner may sort the session's refs first.
        where, bound = "", "" if limit is None or prefix is not None else f"LIMIT {int(limit)}"
        if prefix is not None:
            where = " AND r.digest BETWEEN %(low)s AND %(high)s"
            values["low"], values["high"] = prefix_range(prefix)
        elif name is not None:
            where, values["name"] = " AND sha256(r.name) = sha256(%(name)s) AND r.name = %(name)s", packed(name)
        elif before is not None:
            where, values["before"] = " AND r.seq < %(before)s", before
        rows = self._ask(
            f"SELECT {REF}, {SESSION}, b.coding, b.place, b.frames, {'b.data' if content else 'NULL'} {_JOINED}"
            f" WHERE {_IN_SESSION}{where} ORDER BY r.seq DESC {bound}",
            **values,
        )
        entries = [entry_of(row) for row in rows]
        return entries if prefix is None else newest_of_each(entries)

    def find_many(self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False) -> list[Entry]:
        lineage, ranges = list(sessions), [prefix_range(prefix) for prefix in prefixes]
        found: dict[str, list[Entry]] = {session_id: [] for session_id in lineage}
        for row in self._ask(
            # OFFSET prevents a join: each session and range is one index lookup.
            f"SELECT {REF}, {SESSION}, b.coding, b.place, b.frames, {'b.data' if content else 'NULL'} FROM session s,"
            " unnest(%(low)s::bytea[], %(high)s::bytea[]) AS one (low, high),"
            " LATERAL (SELECT * FROM ref WHERE session_key = s.session_key"
            " AND digest BETWEEN one.low AND one.high OFFSET 0) r"
            " LEFT JOIN blob b ON b.tenant = r.tenant AND b.digest = r.digest"
            " WHERE s.tenant = %(tenant)s AND sha256(s.session_id) = ANY (%(sessions)s) ORDER BY r.seq DESC",
            sessions=hashes_of(lineage), low=[low for low, _ in ranges], high=[high for _, high in ranges],
        ):  # fmt: skip
            entry = entry_of(row)
            found[entry.ref.session_id].append(entry)
        return [entry for each in found.values() for entry in newest_of_each(each)]

    def lent(self, session_id: str, *, prefix: str | None = None, content: bool = False) -> list[Entry]:
        low, high = prefix_range(prefix or "")
        rows = self._ask(
            f"SELECT {REF}, {SESSION}, b.coding, b.place, b.frames, {'b.data' if content else 'NULL'} {_JOINED}"
            f" WHERE {LENT} AND r.gone IS NULL AND r.digest BETWEEN %(low)s AND %(high)s"
            " ORDER BY r.created_at DESC, r.seq DESC",
            session=packed(session_id), low=low, high=high,
        )  # fmt: skip
        found = [entry_of(row) for row in rows]
        return found if prefix is None else newest_of_each(found)

    def near(self, sessions: Iterable[str], digests: Iterable[str], *, settled: bool = True) -> set[str]:
        ranges = [prefix_range(start) for start in {digest[:MIN_PREFIX] for digest in digests}]
        rows = self._ask(
            # OFFSET prevents a join: each session and range is one index lookup.
            "SELECT DISTINCT found.digest FROM session s,"
            " unnest(%(low)s::bytea[], %(high)s::bytea[]) AS one (low, high),"
            " LATERAL (SELECT r.digest FROM ref r WHERE r.session_key = s.session_key"
            " AND r.digest BETWEEN one.low AND one.high OFFSET 0) found"
            " WHERE s.tenant = %(tenant)s AND sha256(s.session_id) = ANY (%(sessions)s)",
            sessions=hashes_of(sessions), low=[low for low, _ in ranges], high=[high for _, high in ranges],
        )  # fmt: skip
        return {digest.hex() for (digest,) in rows}

    def version(self, session_id: str, name: str, digest: str) -> int:
        rows = self._ask(
            f"SELECT count(*) FROM session s JOIN ref r USING (session_key) WHERE {OF_SESSION} AND r.name = %(name)s"
            " AND sha256(r.name) = sha256(%(name)s) AND r.seq <= (SELECT max(o.seq) FROM ref o"
            " WHERE o.session_key = s.session_key AND o.digest = %(digest)s AND o.name = %(name)s)",
            session=packed(session_id), name=packed(name), digest=bytes.fromhex(digest),
        )  # fmt: skip
        return int(rows[0][0])

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        rows = self._ask(
            f"SELECT {BLOB} FROM blob b WHERE tenant = %(tenant)s AND digest = %(digest)s",
            digest=bytes.fromhex(digest),
        )
        return blob_of(rows[0]) if rows else None

    def places(self, digests: Iterable[str]) -> dict[str, str]:
        rows = self._ask(
            "SELECT digest, place FROM blob WHERE tenant = %(tenant)s AND digest = ANY (%(digests)s)",
            digests=[bytes.fromhex(digest) for digest in digests],
        )
        return {digest.hex(): place for digest, place in rows}

    def secret(self) -> bytes:
        rows = self._ask(
            "INSERT INTO meta VALUES (%(tenant)s, 'secret', %(drawn)s)"
            " ON CONFLICT (tenant, key) DO UPDATE SET value = meta.value RETURNING value",
            drawn=secrets.token_bytes(16),
        )
        return bytes(rows[0][0])

    def shown(self, session_id: str, digests: Iterable[str]) -> dict[str, Ranges]:
        found: dict[str, Ranges] = {}
        for digest, start, end in self._ask(
            "SELECT digest, lower(part), upper(part) FROM session s JOIN shown USING (session_key),"
            f" unnest(ranges) AS part WHERE {OF_SESSION} AND digest = ANY(%(digests)s) ORDER BY 2",
            session=packed(session_id), digests=[bytes.fromhex(digest) for digest in digests],
        ):  # fmt: skip
            found[digest.hex()] = (*found.get(digest.hex(), ()), (int(start), int(end)))
        return found

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        def change(db: Db) -> None:
            with db.cursor() as cursor:
                cursor.executemany(
                    f"UPDATE session s SET used_at = greatest(used_at, %(at)s) WHERE {OF_SESSION}",
                    [{"tenant": self._tenant, "session": packed(s), "at": at} for s, at in sorted(sessions.items())],
                )
                cursor.executemany(
                    f"INSERT INTO shown SELECT session_key, tenant, %(digest)s, %(ranges)s::int8multirange"
                    f" FROM session s WHERE {OF_SESSION} ON CONFLICT (session_key, digest)"
                    " DO UPDATE SET ranges = shown.ranges + excluded.ranges",
                    [
                        {"tenant": self._tenant, "session": packed(session_id), "digest": bytes.fromhex(digest),
                         "ranges": "{" + ",".join(f"[{start},{end})" for start, end in ranges) + "}"}
                        for (session_id, digest), ranges in sorted(shown.items())
                    ],
                )  # fmt: skip
                cursor.executemany(
                    "UPDATE blob SET used_at = greatest(used_at, %s) WHERE tenant = %s AND digest = %s",
                    [(at, self._tenant, bytes.fromhex(digest)) for digest, at in sorted(blobs.items())],
                )

        self._connections.run(change, "noting use")

    def compact(self) -> None:
        """Do nothing: autovacuum reclaims space by itself."""

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}#blob={blob.digest}"

    def close(self) -> None:
        self._connections.close()


_PUT: Final = f"SELECT put_2({', '.join(['%s'] * 33)})"
