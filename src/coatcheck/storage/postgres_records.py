"""Claims and records in PostgreSQL. Each change locks its session's row first, so that an outdated token writes
nothing, on any machine.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from coatcheck.storage import Claimant, Record, SessionInfo, check_idle, fenced
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_rows import BLOB, OF_SESSION
from coatcheck.storage.records import checksum, record_of

_SERIES: Final = "sha256(series) = sha256(%(series)s)"


class PostgresRecords:
    """The part of the catalog that implements claims and records."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant

    def claim(
        self,
        session: SessionInfo,
        holder: str,
        *,
        at: float,
        idle: float = 0.0,
        instead_of: int | None = None,
        grace: float = 0.0,
    ) -> int:
        # Drawn first, so that a retry recognizes its own claim if the answer to the first attempt was lost.
        ((token,),) = self._connections.ask("SELECT nextval('fence')", doing="claiming a session")

        def change(db: Db) -> int:
            key, newest = self._used(db, session, at, grace)
            if newest.token == token:
                return int(token)
            if instead_of is not None and instead_of != newest.token:
                raise fenced(instead_of, newest)
            check_idle(newest, holder, at, idle)
            # Another process may already have drawn and committed a larger token: the newest claim has the largest.
            number = token if token > newest.token else _next(db)
            db.execute(
                "UPDATE session SET token = %s, holder = %s, claimed_at = %s WHERE session_key = %s",
                (number, holder.encode(), at, key),
            )
            return int(number)

        return self._connections.run(change, "claiming a session")

    def claimant(self, session_id: str) -> Claimant | None:
        rows = self._asked(f"SELECT token, holder, claimed_at FROM session s WHERE {OF_SESSION}", session_id)
        return Claimant(rows[0][0], rows[0][1].decode(), rows[0][2]) if rows and rows[0][1] else None

    def record(
        self,
        session: SessionInfo,
        series: str,
        body: bytes,
        *,
        at: float,
        token: int | None = None,
        keep: int | None = None,
        grace: float = 0.0,
    ) -> int:
        drawn = secrets.token_bytes(8)  # lets a retry recognize what the first attempt wrote

        def change(db: Db) -> int:
            key, newest = self._used(db, session, at, grace)
            own = {"key": key, "series": series.encode(), "drawn": drawn}
            last = db.execute(
                f"SELECT seq, drawn FROM record WHERE session_key = %(key)s AND {_SERIES} ORDER BY seq DESC LIMIT 1",
                own,
            ).fetchone()
            if last is not None and last[1] == drawn:
                return int(last[0])
            if token is not None and token != newest.token:
                raise fenced(token, newest)
            number = 1 if last is None else int(last[0]) + 1
            db.execute(
                "INSERT INTO record VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
                (key, self._tenant, series.encode(), number, at, token, checksum(body), drawn, body),
            )
            if token is not None:
                db.execute("UPDATE session SET claimed_at = greatest(claimed_at, %s) WHERE session_key = %s", (at, key))
            if keep is not None:
                db.execute(
                    f"DELETE FROM record WHERE session_key = %(key)s AND {_SERIES} AND seq <= %(last)s",
                    {**own, "last": number - keep},
                )
            return number

        return self._connections.run(change, "writing a record")

    def records(
        self,
        session_id: str,
        series: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[Record]:
        bound = "" if limit is None else f"LIMIT {int(limit)}"
        rows = self._asked(
            "SELECT r.seq, r.at, r.token, r.checksum, r.body FROM session s JOIN record r USING (session_key)"
            f" WHERE {OF_SESSION} AND {_SERIES} AND seq > %(after)s"
            " AND (%(before)s::bigint IS NULL OR seq < %(before)s)"
            f" ORDER BY seq {'DESC' if newest else ''} {bound}",
            session_id, series=series.encode(), after=after, before=before,
        )  # fmt: skip
        return [record_of(row, series) for row in rows]

    def series(self, session_id: str) -> list[str]:
        rows = self._asked(
            f"SELECT DISTINCT series FROM session s JOIN record r USING (session_key) WHERE {OF_SESSION}", session_id
        )
        return sorted(series.decode() for (series,) in rows)

    def _check_records(self, db: Db, *, repair: bool) -> list[str]:
        """Find damaged records and records without a session; `repair` removes them."""
        own = {"tenant": self._tenant}
        stray = "FROM record WHERE tenant = %(tenant)s AND session_key NOT IN (SELECT session_key FROM session)"
        problems = []
        found = db.execute(f"SELECT count(*) {stray}", own).fetchone()
        if found and found[0]:
            problems.append(f"{found[0]} records without a session" + (": removed" if repair else ""))
            if repair:
                db.execute(f"DELETE {stray}", own)
        damaged = []
        with db.cursor(name="records") as rows:
            rows.execute("SELECT session_key, series, seq, checksum, body FROM record WHERE tenant = %(tenant)s", own)
            for key, series, seq, known, body in rows:
                if checksum(body) != known:
                    damaged.append((key, series, seq))
        if damaged:
            problems.append(f"{len(damaged)} damaged records" + (": removed" if repair else ""))
            if repair:
                with db.cursor() as cursor:
                    cursor.executemany(
                        "DELETE FROM record WHERE session_key = %s AND sha256(series) = sha256(%s) AND seq = %s",
                        damaged,
                    )
        return problems

    def _used(self, db: Db, session: SessionInfo, at: float, grace: float) -> tuple[int, Claimant]:
        """Lock and return the row of a session and its newest claim. A new session is added; its last use is updated.
        If it expired longer ago than the grace period, its content is removed."""
        own = {"tenant": self._tenant, "session": session.session_id.encode()}
        locked = (
            f"SELECT session_key, ttl, used_at, token, holder, claimed_at FROM session s WHERE {OF_SESSION} FOR UPDATE"
        )
        while (row := db.execute(locked, own).fetchone()) is None:
            db.execute(
                "INSERT INTO session (tenant, session_id, parent, ttl, quota, created_at, used_at)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
                (self._tenant, own["session"], None if session.parent is None else session.parent.encode(), session.ttl,
                 session.quota, at, at),
            )  # fmt: skip
        key, ttl, used, token, holder, claimed = row
        if ttl is not None and used + ttl + grace <= at:
            gone = db.execute(
                "UPDATE ref SET gone = 'expired' WHERE session_key = %s AND gone IS NULL AND NOT pinned"
                " RETURNING session_key, digest, size",
                (key,),
            ).fetchall()
            self._let_go(db, gone)
            db.execute("DELETE FROM record WHERE session_key = %s", (key,))
        db.execute("UPDATE session SET used_at = greatest(used_at, %s) WHERE session_key = %s", (at, key))
        return int(key), Claimant(token, holder.decode(), claimed)

    def _let_go(self, db: Db, refs: list[Any]) -> list[Any]:
        """Update the accounts after removing refs (session, digest, size) of locked sessions; return removed blobs."""
        if not refs:
            return []
        keys, digests, sizes = zip(*refs, strict=True)
        return db.execute(
            f"SELECT {BLOB} FROM let_go_2(%s, %s, %s, %s) b", (self._tenant, list(keys), list(digests), list(sizes))
        ).fetchall()

    def _asked(self, sql: str, session_id: str, **values: Any) -> list[Any]:
        return self._connections.ask(sql, {"tenant": self._tenant, "session": session_id.encode(), **values})


def _next(db: Db) -> int:
    row = db.execute("SELECT nextval('fence')").fetchone()
    assert row is not None
    return int(row[0])
