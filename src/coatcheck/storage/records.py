"""Claims and records in the catalog's tables. Each change runs inside a transaction that the catalog has begun.

A record is not an artifact: it has no digest, no ref and no quota. A checksum of its own detects damage.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import xxhash

from coatcheck.errors import Damaged
from coatcheck.ids import clip
from coatcheck.storage import Claimant, Record, SessionInfo, check_idle, fenced
from coatcheck.storage.changes import Changes, is_damage
from coatcheck.storage.rows import Row

_BATCH = 500
_OF_SESSION = "session_key = (SELECT session_key FROM session WHERE session_id = ?)"
CLAIMANT = "SELECT fence, holder, claimed_at FROM session WHERE session_id = ?"
SERIES = f"SELECT DISTINCT series FROM record WHERE {_OF_SESSION} ORDER BY series"
_SELECT = f"SELECT seq, written_at, token, checksum, body FROM record WHERE {_OF_SESSION} AND series = ?"
OLDEST_FIRST = _SELECT + " AND seq > ? AND seq < ? ORDER BY seq LIMIT ?"
NEWEST_FIRST = _SELECT + " AND seq > ? AND seq < ? ORDER BY seq DESC LIMIT ?"


class Records:
    """The statements for claims and records, on one connection."""

    def __init__(self, db: sqlite3.Connection, changes: Changes) -> None:
        self._db = db
        self._changes = changes

    def claim(
        self, session: SessionInfo, holder: str, at: float, idle: float, instead_of: int | None, grace: float
    ) -> int:
        self._check_fence(session.session_id, instead_of)
        check_idle(self._newest(session.session_id), holder, at, idle)
        key, _ = self._changes.session_for(session, at, grace)
        self._db.execute("UPDATE meta SET value = value + 1 WHERE key = 'fence'")
        (token,) = self._db.execute("SELECT value FROM meta WHERE key = 'fence'").fetchone()
        self._db.execute(
            "UPDATE session SET fence = ?, holder = ?, claimed_at = ? WHERE session_key = ?", (token, holder, at, key)
        )
        return int(token)

    def add(
        self,
        session: SessionInfo,
        series: str,
        body: bytes,
        at: float,
        token: int | None,
        keep: int | None,
        grace: float,
    ) -> int:
        self._check_fence(session.session_id, token)
        key, _ = self._changes.session_for(session, at, grace)
        (last,) = self._db.execute(
            "SELECT coalesce(max(seq), 0) FROM record WHERE session_key = ? AND series = ?", (key, series)
        ).fetchone()
        self._db.execute(
            "INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)", (key, series, last + 1, at, token, checksum(body), body)
        )
        if token is not None:
            self._db.execute("UPDATE session SET claimed_at = max(claimed_at, ?) WHERE session_key = ?", (at, key))
        if keep is not None:
            self._db.execute(
                "DELETE FROM record WHERE session_key = ? AND series = ? AND seq <= ?", (key, series, last + 1 - keep)
            )
        return int(last) + 1

    def expire(self, at: float) -> int:
        """Delete the next records of expired sessions. Returns 0 when there are none left."""
        return self._db.execute(
            "DELETE FROM record WHERE (session_key, series, seq) IN (SELECT session_key, series, seq FROM record"
            " WHERE session_key IN (SELECT session_key FROM session WHERE ttl IS NOT NULL AND used_at + ttl <= ?)"
            f" LIMIT {_BATCH})",
            (at,),
        ).rowcount

    def check(self, *, repair: bool) -> list[str]:
        """Return problems; with `repair`, delete damaged and stray records. Damaged pages of the database are reported
        elsewhere, and end the check."""
        problems: list[str] = []
        try:
            self._check(problems, repair=repair)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
        return problems

    def _check(self, problems: list[str], *, repair: bool) -> None:
        stray = "FROM record WHERE session_key NOT IN (SELECT session_key FROM session)"
        (count,) = self._db.execute(f"SELECT count(*) {stray}").fetchone()
        if count:
            problems.append(f"{count} records without a session" + (": removed" if repair else ""))
            if repair:
                self._db.execute(f"DELETE {stray}")
        damaged = [row[:3] for row in self._all() if checksum(row[4]) != row[3]]
        if damaged:
            problems.append(f"{len(damaged)} damaged records" + (": removed" if repair else ""))
            if repair:
                self._db.executemany("DELETE FROM record WHERE session_key = ? AND series = ? AND seq = ?", damaged)
        behind = "(SELECT max(fence) FROM session)"
        (low,) = self._db.execute(
            f"SELECT count(*) FROM meta WHERE key = 'fence' AND value < {behind}"
        ).fetchone()  # fmt: skip
        if low:
            problems.append("claims beyond the store's token counter" + (": set right" if repair else ""))
            if repair:
                self._db.execute(f"UPDATE meta SET value = {behind} WHERE key = 'fence'")

    def _all(self) -> Iterator[Row]:
        at: tuple[int, str, int] = (-1, "", 0)
        while page := self._db.execute(
            "SELECT session_key, series, seq, checksum, body FROM record WHERE (session_key, series, seq) > (?, ?, ?)"
            " ORDER BY session_key, series, seq LIMIT 64",
            at,
        ).fetchall():
            yield from page
            at = page[-1][:3]

    def _check_fence(self, session_id: str, token: int | None) -> None:
        newest = self._newest(session_id)
        if token is not None and token != newest.token:
            raise fenced(token, newest)

    def _newest(self, session_id: str) -> Claimant:
        return Claimant(*(self._db.execute(CLAIMANT, (session_id,)).fetchone() or (0, "")))


def record_of(row: Row, series: str) -> Record:
    seq, at, token, known, body = row
    if checksum(body) != known:
        raise Damaged(
            f"record {seq} of the series {clip(series)} is damaged", hint="'coatcheck verify --repair' removes it"
        )
    return Record(seq, at, token, body)


def checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)
