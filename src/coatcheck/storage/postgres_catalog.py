"""The catalog in PostgreSQL: one transaction for each change, locks always in the order session, refs, blob.

A put is one call of a function in the database: one trip. Content up to `inline_limit` travels with it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import psycopg

from coatcheck.errors import QuotaExceeded
from coatcheck.ids import prefix_range
from coatcheck.refs import Blob, Ref
from coatcheck.storage import (
    _NO_LIMITS,
    _NOTHING,
    Entry,
    Freed,
    Limits,
    Ranges,
    SessionInfo,
    Totals,
    newest_of_each,
)
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_records import OF_SESSION, PostgresRecords

INLINE: Final = 64 * 1024
_PAGE: Final = 256
_BATCH: Final = 100  # sessions that a collection takes at a time
_GONE, _OVER = "CC001", "CC002"

_SESSION: Final = "s.session_id, s.parent, s.ttl, s.quota, s.created_at, s.used_at, s.used_bytes"
_BLOB: Final = "b.digest, b.size, b.coding, b.place, b.frames, b.used_at"
_REF: Final = """r.seq, r.digest, r.size, r.name, r.codec, r.media_type, r.kind, r.tool, r.call_id, r.producer,
    r.parents, r.summary, r.created_at, r.expires_at, r.pinned, r.granted_by, r.request, r.gone"""
_WHOSE: Final = OF_SESSION
_JOINED: Final = """FROM ref r JOIN session s ON s.session_key = r.session_key
    LEFT JOIN blob b ON b.tenant = r.tenant AND b.digest = r.digest"""
# Asked apart: then the planner knows one session, and walks its refs in their order.
_IN_SESSION: Final = f"r.session_key = (SELECT session_key FROM session s WHERE {OF_SESSION})"
_DEAD: Final = "NOT r.pinned AND r.gone IS NULL AND (s.used_at + s.ttl <= %(at)s OR r.expires_at <= %(at)s)"
_USED: Final = """(SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
    WHERE ref.session_key = session.session_key AND ref.gone IS NULL) held)"""
_COUNTED: Final = "(SELECT count(*) FROM ref r WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)"
_STRAY: Final = (
    "gone IS NULL AND NOT EXISTS (SELECT 1 FROM blob b WHERE b.tenant = ref.tenant AND b.digest = ref.digest)"
)


class PostgresCatalog(PostgresRecords):
    """Sessions, refs, names, records and small content of one tenant."""

    inline_limit = INLINE

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._uri = connections.address

    def session(self, session_id: str) -> SessionInfo | None:
        rows = self._ask(f"SELECT {_SESSION} FROM session s WHERE {_WHOSE}", session=_packed(session_id))
        return _session_of(rows[0]) if rows else None

    def open_session(self, info: SessionInfo) -> None:
        self._ask(
            "INSERT INTO session (tenant, session_id, parent, ttl, quota, created_at, used_at)"
            " VALUES (%(tenant)s, %(session)s, %(parent)s, %(ttl)s, %(quota)s, %(created)s, %(used)s)"
            " ON CONFLICT (tenant, sha256(session_id))"
            " DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl, quota = excluded.quota RETURNING 1",
            session=_packed(info.session_id), parent=_packed(info.parent), ttl=info.ttl, quota=info.quota,
            created=info.created, used=info.used,
        )  # fmt: skip

    def put(self, entry: Entry, *, limits: Limits = _NO_LIMITS, reuse: bool = False, heal: bool = False) -> bool:
        ref, blob, session = entry.ref, entry.blob, entry.session
        values = (
            self._tenant, _packed(session.session_id), _packed(session.parent), session.ttl, session.quota, ref.created,
            limits.grace, limits.store_quota, bytes.fromhex(ref.artifact_id), ref.size_bytes, blob.coding, blob.place,
            blob.frames, entry.content, heal, reuse, _packed(ref.name), ref.codec, _packed(ref.media_type), ref.kind,
            _packed(ref.tool), _packed(ref.call_id), ref.producer, json.dumps(ref.parents) if ref.parents else "",
            _packed(ref.summary), ref.expires, ref.pinned, _packed(ref.granted_by), _packed(ref.request),
        )  # fmt: skip

        def change(db: Db) -> bool:
            try:
                db.execute(_PUT, values)
            except psycopg.Error as error:
                if error.sqlstate == _GONE:
                    return False
                if error.sqlstate == _OVER:
                    whose, _, used = (error.diag.message_primary or " ").partition(" ")
                    quota = session.quota if whose == "session" else limits.store_quota
                    raise QuotaExceeded(
                        f"{ref.size_bytes} bytes more would exceed the {whose}'s quota: {used} of {quota} are used"
                    ) from None
                raise
            return True

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
        values: dict[str, Any] = {"session": _packed(session_id)}
        # A bound that the planner knows: with one that it does not, it may sort the session's refs first.
        where, bound = "", "" if limit is None or prefix is not None else f"LIMIT {int(limit)}"
        if prefix is not None:
            where = " AND r.digest BETWEEN %(low)s AND %(high)s"
            values["low"], values["high"] = prefix_range(prefix)
        elif name is not None:
            where, values["name"] = " AND sha256(r.name) = sha256(%(name)s) AND r.name = %(name)s", _packed(name)
        elif before is not None:
            where, values["before"] = " AND r.seq < %(before)s", before
        rows = self._ask(
            f"SELECT {_REF}, {_SESSION}, b.coding, b.place, b.frames, {'b.data' if content else 'NULL'} {_JOINED}"
            f" WHERE {_IN_SESSION}{where} ORDER BY r.seq DESC {bound}",
            **values,
        )
        entries = [_entry_of(row) for row in rows]
        return entries if prefix is None else newest_of_each(entries)

    def version(self, session_id: str, name: str, digest: str) -> int:
        rows = self._ask(
            f"SELECT count(*) FROM session s JOIN ref r USING (session_key) WHERE {_WHOSE} AND r.name = %(name)s"
            " AND sha256(r.name) = sha256(%(name)s) AND r.seq <= (SELECT max(o.seq) FROM ref o"
            " WHERE o.session_key = s.session_key AND o.digest = %(digest)s AND o.name = %(name)s)",
            session=_packed(session_id), name=_packed(name), digest=bytes.fromhex(digest),
        )  # fmt: skip
        return int(rows[0][0])

    def blob(self, digest: str, *, settled: bool = True) -> Blob | None:
        rows = self._ask(
            f"SELECT {_BLOB} FROM blob b WHERE tenant = %(tenant)s AND digest = %(digest)s",
            digest=bytes.fromhex(digest),
        )
        return _blob_of(rows[0]) if rows else None

    def secret(self) -> bytes:
        rows = self._ask(
            "INSERT INTO meta VALUES (%(tenant)s, 'secret', %(drawn)s)"
            " ON CONFLICT (tenant, key) DO UPDATE SET value = meta.value RETURNING value",
            drawn=secrets.token_bytes(16),
        )
        return bytes(rows[0][0])

    def shown(self, session_id: str, digest: str) -> Ranges:
        rows = self._ask(
            "SELECT lower(part), upper(part) FROM session s JOIN shown USING (session_key), unnest(ranges) AS part"
            f" WHERE {_WHOSE} AND digest = %(digest)s ORDER BY 1",
            session=_packed(session_id), digest=bytes.fromhex(digest),
        )  # fmt: skip
        return tuple((int(start), int(end)) for start, end in rows)

    def touch(
        self,
        sessions: Mapping[str, float],
        blobs: Mapping[str, float],
        shown: Mapping[tuple[str, str], Ranges] = _NOTHING,
    ) -> None:
        def change(db: Db) -> None:
            with db.cursor() as cursor:
                cursor.executemany(
                    f"UPDATE session s SET used_at = greatest(used_at, %(at)s) WHERE {_WHOSE}",
                    [{"tenant": self._tenant, "session": _packed(s), "at": at} for s, at in sorted(sessions.items())],
                )
                cursor.executemany(
                    f"INSERT INTO shown SELECT session_key, tenant, %(digest)s, %(ranges)s::int8multirange"
                    f" FROM session s WHERE {_WHOSE} ON CONFLICT (session_key, digest)"
                    " DO UPDATE SET ranges = shown.ranges + excluded.ranges",
                    [
                        {"tenant": self._tenant, "session": _packed(session_id), "digest": bytes.fromhex(digest),
                         "ranges": "{" + ",".join(f"[{start},{end})" for start, end in ranges) + "}"}
                        for (session_id, digest), ranges in sorted(shown.items())
                    ],
                )  # fmt: skip
                cursor.executemany(
                    "UPDATE blob SET used_at = greatest(used_at, %s) WHERE tenant = %s AND digest = %s",
                    [(at, self._tenant, bytes.fromhex(digest)) for digest, at in sorted(blobs.items())],
                )

        self._connections.run(change, "noting use")

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        rows = self._ask(
            f"UPDATE ref r SET pinned = %(pinned)s FROM session s WHERE {_WHOSE} AND r.session_key = s.session_key"
            " AND r.digest = %(digest)s AND r.gone IS NULL RETURNING 1",
            session=_packed(session_id), digest=bytes.fromhex(digest), pinned=pinned,
        )  # fmt: skip
        return len(rows)

    def remove(self, session_id: str, digest: str | None = None, *, end: bool = False) -> Freed:
        one = None if digest is None else bytes.fromhex(digest)

        def change(db: Db) -> Freed:
            key = self._locked(db, session_id)
            if key is None:
                return Freed()
            which = "session_key = %s AND (%s::bytea IS NULL OR digest = %s)"
            gone = db.execute(f"DELETE FROM ref WHERE {which} RETURNING digest, size, gone", (key, one, one)).fetchall()
            db.execute(f"DELETE FROM shown WHERE {which}", (key, one, one))
            refs = [(d, size) for d, size, why in gone if why is None]
            blobs = self._let_go(db, key, refs)
            if end:
                db.execute("DELETE FROM record WHERE session_key = %s", (key,))
                db.execute("DELETE FROM session WHERE session_key = %s", (key,))
            return _freed(len(refs), blobs)

        return self._connections.run(change, "forgetting")

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed, last = Freed(), -1
        while last:
            batch, last = self._connections.run(partial(self._expire_some, at=at, after=last), "expiring")
            freed += batch
        self._connections.run(lambda db: self._drop_tombstones(db, forget_before), "expiring")
        return freed

    def _would_expire(self, at: float) -> Freed:
        (refs,) = self._ask(f"SELECT count(*) FROM session s JOIN ref r USING (session_key)"
                            f" WHERE s.tenant = %(tenant)s AND {_DEAD}", at=at)[0]  # fmt: skip
        blobs = self._ask(
            f"SELECT {_BLOB} FROM blob b JOIN (SELECT r.digest, count(*) AS n FROM session s JOIN ref r USING"
            f" (session_key) WHERE s.tenant = %(tenant)s AND {_DEAD} GROUP BY r.digest) dead"
            " ON dead.digest = b.digest AND dead.n = b.refs WHERE b.tenant = %(tenant)s",
            at=at,
        )
        return _freed(refs, blobs)

    def _expire_some(self, db: Db, *, at: float, after: int) -> tuple[Freed, int]:
        """Tombstones for what expired in the next sessions, but for those that another machine is at; the last session
        that was looked at, 0 after all."""
        values = {"tenant": self._tenant, "at": at, "after": after, "batch": _BATCH}
        keys = [key for (key,) in db.execute(
            "SELECT session_key FROM session s WHERE s.tenant = %(tenant)s AND session_key > %(after)s"
            " AND (s.used_at + s.ttl <= %(at)s AND (EXISTS (SELECT 1 FROM ref r WHERE r.session_key = s.session_key"
            " AND r.gone IS NULL AND NOT r.pinned) OR EXISTS (SELECT 1 FROM record WHERE record.session_key ="
            " s.session_key)) OR session_key IN (SELECT r.session_key FROM ref r"
            " WHERE r.tenant = %(tenant)s AND r.expires_at <= %(at)s AND r.gone IS NULL AND NOT r.pinned))"
            " ORDER BY session_key LIMIT %(batch)s FOR UPDATE SKIP LOCKED",
            values,
        )]  # fmt: skip
        refs, blobs = 0, []
        for key in keys:
            dead = [seq for (seq,) in db.execute(
                f"SELECT r.seq FROM session s JOIN ref r USING (session_key) WHERE s.session_key = %(key)s AND {_DEAD}",
                {"key": key, "at": at},
            )]  # fmt: skip
            refs += len(dead)
            blobs += db.execute(
                f"SELECT {_BLOB} FROM bury_1(%s, %s, %s, 'expired') b", (self._tenant, key, dead)
            ).fetchall()
        db.execute(
            "DELETE FROM record WHERE session_key IN (SELECT session_key FROM session WHERE session_key = ANY (%s)"
            " AND used_at + ttl <= %s)",
            (keys, at),
        )
        return _freed(refs, blobs), keys[-1] if len(keys) == _BATCH else 0

    def _drop_tombstones(self, db: Db, before: float) -> None:
        keys = [key for (key,) in db.execute(
            "SELECT session_key FROM session WHERE tenant = %s AND used_at + ttl < %s FOR UPDATE SKIP LOCKED",
            (self._tenant, before),
        )]  # fmt: skip
        db.execute("DELETE FROM ref WHERE session_key = ANY (%s) AND gone IS NOT NULL", (keys,))
        empty = [key for (key,) in db.execute(
            "DELETE FROM session s WHERE session_key = ANY (%s)"
            " AND NOT EXISTS (SELECT 1 FROM ref r WHERE r.session_key = s.session_key)"
            " AND NOT EXISTS (SELECT 1 FROM record r WHERE r.session_key = s.session_key) RETURNING session_key",
            (keys,),
        )]  # fmt: skip
        db.execute("DELETE FROM shown WHERE session_key = ANY (%s)", (empty,))

    def relocate(self, old: Blob, new: Blob) -> bool:
        return bool(self._ask(
            "UPDATE blob SET coding = %(coding)s, place = %(new)s, frames = %(frames)s"
            " WHERE tenant = %(tenant)s AND digest = %(digest)s AND place = %(old)s RETURNING 1",
            digest=bytes.fromhex(old.digest), old=old.place, coding=new.coding, new=new.place, frames=new.frames,
        ))  # fmt: skip

    def lose(self, blob: Blob) -> int:
        digest = bytes.fromhex(blob.digest)

        def change(db: Db) -> int:
            keys = [key for (key,) in db.execute(
                "SELECT session_key FROM session WHERE tenant = %s AND session_key IN"
                " (SELECT session_key FROM ref WHERE tenant = %s AND digest = %s AND gone IS NULL)"
                " ORDER BY session_key FOR UPDATE",
                (self._tenant, self._tenant, digest),
            )]  # fmt: skip
            same = db.execute(
                "SELECT 1 FROM blob WHERE tenant = %s AND digest = %s AND place = %s FOR UPDATE",
                (self._tenant, digest, blob.place),
            ).fetchone()
            if same is None:
                return 0
            lost = 0
            for key in keys:
                seqs = [seq for (seq,) in db.execute(
                    "SELECT seq FROM ref WHERE session_key = %s AND digest = %s AND gone IS NULL", (key, digest)
                )]  # fmt: skip
                lost += len(seqs)
                db.execute("SELECT count(*) FROM bury_1(%s, %s, %s, 'damaged')", (self._tenant, key, seqs))
            return lost

        return self._connections.run(change, "setting a damaged blob aside")

    def sessions(self) -> Iterator[SessionInfo]:
        last = 0
        while rows := self._ask(
            f"SELECT {_SESSION}, session_key FROM session s WHERE tenant = %(tenant)s AND session_key > %(last)s"
            " ORDER BY session_key LIMIT %(page)s",
            last=last, page=_PAGE,
        ):  # fmt: skip
            yield from map(_session_of, rows)
            last = rows[-1][-1]

    def blobs(self) -> Iterator[tuple[Blob, bytes | None]]:
        last = b""
        while rows := self._ask(
            f"SELECT {_BLOB}, b.data FROM blob b WHERE tenant = %(tenant)s AND digest > %(last)s"
            " ORDER BY digest LIMIT 64",
            last=last,
        ):
            for row in rows:
                yield _blob_of(row), row[6]
            last = rows[-1][0]

    def check(self, *, repair: bool) -> list[str]:
        def change(db: Db) -> list[str]:
            problems = []
            for name, where, mend in (
                ("refs without a blob row", f"FROM ref WHERE {_STRAY} AND tenant = %(tenant)s",
                 f"UPDATE ref SET gone = 'damaged' WHERE {_STRAY} AND tenant = %(tenant)s"),
                ("refs without a session",
                 "FROM ref WHERE tenant = %(tenant)s AND session_key NOT IN (SELECT session_key FROM session)",
                 "DELETE FROM ref WHERE tenant = %(tenant)s AND session_key NOT IN (SELECT session_key FROM session)"),
                ("blobs with a wrong count of refs", f"FROM blob b WHERE tenant = %(tenant)s AND refs <> {_COUNTED}",
                 f"UPDATE blob b SET refs = {_COUNTED} WHERE tenant = %(tenant)s AND refs <> {_COUNTED}"),
                ("sessions with a wrong count of bytes",
                 f"FROM session WHERE tenant = %(tenant)s AND used_bytes <> {_USED}",
                 f"UPDATE session SET used_bytes = {_USED} WHERE tenant = %(tenant)s AND used_bytes <> {_USED}"),
            ):  # fmt: skip
                found = db.execute(f"SELECT count(*) {where}", {"tenant": self._tenant}).fetchone()
                if found and found[0]:
                    problems.append(f"{found[0]} {name}" + (": set right" if repair else ""))
                    if repair:
                        db.execute(mend, {"tenant": self._tenant})
            if repair:
                db.execute("DELETE FROM blob WHERE tenant = %(tenant)s AND refs <= 0", {"tenant": self._tenant})
            return [*problems, *self._check_records(db, repair=repair)]

        return self._connections.run(change, "checking the catalog")

    def totals(self) -> Totals:
        row = self._ask(
            """SELECT (SELECT count(*) FROM session WHERE tenant = %(tenant)s),
            count(*) FILTER (WHERE gone IS NULL), (SELECT count(*) FROM blob WHERE tenant = %(tenant)s),
            count(*) FILTER (WHERE gone IS NOT NULL),
            (SELECT coalesce(sum(size), 0) FROM blob WHERE tenant = %(tenant)s)::bigint,
            coalesce(sum(size) FILTER (WHERE gone IS NULL), 0)::bigint FROM ref WHERE tenant = %(tenant)s"""
        )[0]
        return Totals(*row)

    def compact(self) -> None:
        """Autovacuum gives space back, on the database's own time."""

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}#blob={blob.digest}"

    def close(self) -> None:
        self._connections.close()

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        return self._connections.ask(sql, {"tenant": self._tenant, **values})

    def _locked(self, db: Db, session_id: str) -> int | None:
        row = db.execute(
            f"SELECT session_key FROM session s WHERE {_WHOSE} FOR UPDATE",
            {"tenant": self._tenant, "session": _packed(session_id)},
        ).fetchone()
        return None if row is None else int(row[0])

    def _let_go(self, db: Db, key: int, refs: list[tuple[bytes, int]]) -> list[Any]:
        if not refs:
            return []
        return db.execute(
            f"SELECT {_BLOB} FROM let_go_1(%s, %s, %s, %s) b",
            (self._tenant, key, [digest for digest, _ in refs], [size for _, size in refs]),
        ).fetchall()


_PUT: Final = f"SELECT put_1({', '.join(['%s'] * 29)})"


def _packed(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


def _session_of(row: tuple[Any, ...]) -> SessionInfo:
    session_id, parent, *rest = row[:7]
    return SessionInfo(session_id.decode(), _text(parent), *rest)


def _blob_of(row: tuple[Any, ...]) -> Blob:
    digest, *rest = row[:6]
    return Blob(digest.hex(), *rest)


def _entry_of(row: tuple[Any, ...]) -> Entry:
    (seq, digest, size, name, codec, media_type, kind, tool, call_id, producer, parents, summary, created, expires,
     pinned, granted_by, request, gone, *session) = row[:25]  # fmt: skip
    coding, place, frames, content = row[25:]
    artifact_id, info = digest.hex(), _session_of(tuple(session))
    return Entry(
        Ref(
            artifact_id, info.session_id, size, media_type.decode(), kind, codec, _text(name), _text(tool),
            _text(call_id), producer, tuple(json.loads(parents)) if parents else (), summary.decode(), created, expires,
            pinned, _text(granted_by), _text(request),
        ),
        Blob(artifact_id, size, coding or "inline", place or "", frames or b""),
        info,
        content,
        gone,
        seq,
    )  # fmt: skip


def _freed(refs: int, blobs: list[Any]) -> Freed:
    gone = [_blob_of(row) for row in blobs]
    return Freed(refs, len(gone), sum(b.size for b in gone), tuple(b for b in gone if b.coding != "inline"))
