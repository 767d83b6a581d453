"""What the catalog's changes do to its tables. Each runs inside a transaction that the catalog has begun.

`blob.refs` counts the refs that are no tombstones; a blob that falls to zero goes in the same transaction.
`session.used_bytes` counts each artifact of a session once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from coatcheck.errors import QuotaExceeded
from coatcheck.refs import Blob
from coatcheck.storage import Entry, Freed, Gone, Limits, Ranges, SessionInfo, merged
from coatcheck.storage.rows import Row, ref_values

_BATCH = 2000
_STRAY_CONTENT = "content without a blob row"
_DEAD = "(s.ttl IS NOT NULL AND s.used_at + s.ttl <= :at OR r.expires_at IS NOT NULL AND r.expires_at <= :at)"
# Left to itself SQLite looks for a digest by walking all refs of the session: the index has to be named.
_REF = "ref INDEXED BY ref_by_digest"
_EXPIRED = f"r.gone IS NULL AND r.pinned = 0 AND {_DEAD}"


class Changes:
    """The statements behind each change, on one connection."""

    def __init__(self, db: sqlite3.Connection, is_readable: Callable[[int], bool]) -> None:
        """`is_readable` tells on another connection whether a blob's content can be read at all: on this one, finding
        out would spoil the transaction."""
        self._db = db
        self._is_readable = is_readable

    def put(self, entry: Entry, *, heal: bool, grace: float) -> None:
        ref, digest = entry.ref, bytes.fromhex(entry.ref.artifact_id)
        session_key, seq = self.session_for(entry.session, ref.created, grace)
        blob_key = self._blob_for(entry, digest, heal)
        held = self._one(
            "SELECT seq, name, codec, media_type, kind, tool, call_id, producer, parents, summary, expires_at, pinned,"
            f" granted_by, request FROM {_REF} WHERE session_key = ? AND digest = ? AND gone IS NULL"
            " ORDER BY seq DESC LIMIT 1",
            (session_key, digest),
        )
        values = ref_values(ref)
        if held and held[11]:  # a pin is on the artifact: it covers refs that come later
            values = (*values[:11], 1, *values[12:])
        if held and held[1:] == values[:9] + values[10:] and self._is_current(session_key, ref.name, held[0]):
            return
        if held is None:
            self._run(
                f"DELETE FROM {_REF} WHERE session_key = ? AND digest = ? AND gone IS NOT NULL", (session_key, digest)
            )
        self._run(
            "INSERT INTO ref (session_key, seq, digest, blob_key, size, name, codec, media_type, kind, tool, call_id,"
            " producer, parents, summary, created_at, expires_at, pinned, granted_by, request)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (session_key, seq, digest, blob_key, ref.size_bytes, *values),
        )
        self._run("UPDATE blob SET refs = refs + 1 WHERE blob_key = ?", (blob_key,))
        self._run(
            "UPDATE session SET next_seq = next_seq + 1, used_bytes = used_bytes + ? WHERE session_key = ?",
            (0 if held else ref.size_bytes, session_key),
        )

    def has_copy(self, blob: Blob) -> bool:
        return self._one(
            "SELECT 1 FROM blob WHERE digest = ? AND place = ?", (bytes.fromhex(blob.digest), blob.place)
        ) is not None  # fmt: skip

    def check_quota(self, entry: Entry, limits: Limits) -> None:
        digest, size = bytes.fromhex(entry.ref.artifact_id), entry.ref.size_bytes
        session_id, quota = entry.session.session_id, entry.session.quota
        if quota is not None:
            held = self._one(
                "SELECT s.used_bytes, EXISTS (SELECT 1 FROM ref r INDEXED BY ref_by_digest"
                " WHERE r.session_key = s.session_key AND r.digest = ? AND r.gone IS NULL)"
                " FROM session s WHERE s.session_id = ?",
                (digest, session_id),
            ) or (0, 0)
            if not held[1] and held[0] + size > quota:
                raise QuotaExceeded(
                    f"{size} bytes more would exceed the session's quota: {held[0]} of {quota} are used"
                )
        if limits.store_quota is not None and not self._one("SELECT 1 FROM blob WHERE digest = ?", (digest,)):
            used = self._one("SELECT value FROM meta WHERE key = 'stored_bytes'")[0]
            if used + size > limits.store_quota:
                raise QuotaExceeded(
                    f"{size} bytes more would exceed the store's quota: {used} of {limits.store_quota} are used"
                )

    def open_session(self, info: SessionInfo) -> None:
        self._run(
            "INSERT INTO session (session_id, parent, ttl, quota, created_at, used_at) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (session_id)"
            " DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl, quota = excluded.quota",
            (info.session_id, info.parent, info.ttl, info.quota, info.created, info.used),
        )

    def touch(
        self, sessions: Mapping[str, float], blobs: Mapping[str, float], shown: Mapping[tuple[str, str], Ranges]
    ) -> None:
        self._db.executemany(
            "UPDATE session SET used_at = max(used_at, ?) WHERE session_id = ?",
            [(at, session_id) for session_id, at in sessions.items()],
        )
        self._db.executemany(
            "UPDATE blob SET used_at = max(used_at, ?) WHERE digest = ?",
            [(at, bytes.fromhex(digest)) for digest, at in blobs.items()],
        )
        for (session_id, digest), ranges in shown.items():
            session = self._one("SELECT session_key FROM session WHERE session_id = ?", (session_id,))
            if session is not None:
                self._show(session[0], bytes.fromhex(digest), ranges)

    def _show(self, session_key: int, digest: bytes, ranges: Ranges) -> None:
        where = "FROM shown WHERE session_key = ? AND digest = ?"
        known = self._run(f"SELECT start, end {where}", (session_key, digest)).fetchall()
        self._run(f"DELETE {where}", (session_key, digest))
        self._db.executemany(
            "INSERT INTO shown VALUES (?, ?, ?, ?)",
            [(session_key, digest, start, end) for start, end in merged([*known, *ranges])],
        )

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        return self._run(
            f"UPDATE {_REF} SET pinned = ? WHERE gone IS NULL AND digest = ?"
            " AND session_key = (SELECT session_key FROM session WHERE session_id = ?)",
            (int(pinned), bytes.fromhex(digest), session_id),
        ).rowcount

    def remove(self, session_id: str, digest: str | None, *, end: bool) -> Freed:
        found = self._one("SELECT session_key FROM session WHERE session_id = ?", (session_id,))
        if found is None:
            return Freed()
        source, where, values = "ref", "session_key = ?", [found[0]]
        if digest is not None:
            source, where, values = _REF, where + " AND digest = ?", [found[0], bytes.fromhex(digest)]
        refs = self._run(
            f"SELECT session_key, digest, size, blob_key FROM {source} WHERE {where} AND gone IS NULL", values
        ).fetchall()
        self._run(f"DELETE FROM {source} WHERE {where}", values)
        self._run(f"DELETE FROM shown WHERE {where}", values)
        if end:
            self._run("DELETE FROM record WHERE session_key = ?", (found[0],))
            self._run("DELETE FROM session WHERE session_key = ?", (found[0],))
        return self._let_go(refs)

    def would_expire(self, at: float) -> Freed:
        (refs,) = self._one(
            f"SELECT count(*) FROM ref r JOIN session s USING (session_key) WHERE {_EXPIRED}", {"at": at}
        )
        blobs = self._run(
            f"""SELECT b.digest, b.size, b.coding, b.place, b.frames FROM blob b JOIN (SELECT r.blob_key, count(*) AS n
            FROM ref r JOIN session s USING (session_key) WHERE {_EXPIRED} GROUP BY r.blob_key) dead
            ON dead.blob_key = b.blob_key AND dead.n = b.refs""",
            {"at": at},
        ).fetchall()
        return _freed(refs, blobs)

    def expire(self, at: float) -> Freed:
        """Tombstones for the next refs that have expired; none left where it answers no refs."""
        dead = self._run(
            f"SELECT r.session_key, r.digest, r.size, r.blob_key, r.seq FROM ref r JOIN session s USING (session_key)"
            f" WHERE {_EXPIRED} LIMIT {_BATCH}",
            {"at": at},
        ).fetchall()
        return self._bury(dead)

    def drop_tombstones(self, before: float) -> None:
        self._run(
            "DELETE FROM ref WHERE gone IS NOT NULL AND session_key IN"
            " (SELECT session_key FROM session WHERE ttl IS NOT NULL AND used_at + ttl < ?)",
            (before,),
        )
        self._run(
            "DELETE FROM session WHERE ttl IS NOT NULL AND used_at + ttl < ?"
            " AND NOT EXISTS (SELECT 1 FROM record WHERE record.session_key = session.session_key)"
            " AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.session_key = session.session_key)",
            (before,),
        )

    def note_cold(self, before: float) -> None:
        """Blobs last used until then were offered for compression."""
        self._run(
            "INSERT INTO meta VALUES ('cold', ?) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)",
            (before,),
        )

    def relocate(self, old: Blob, new: Blob) -> bool:
        changed = self._run(
            "UPDATE blob SET coding = ?, place = ?, frames = ? WHERE digest = ? AND place = ?",
            (new.coding, new.place, new.frames, bytes.fromhex(old.digest), old.place),
        )
        return changed.rowcount == 1

    def lose(self, blob: Blob) -> int:
        found = self._one(
            "SELECT blob_key FROM blob WHERE digest = ? AND place = ?", (bytes.fromhex(blob.digest), blob.place)
        )
        if found is None:
            return 0
        lost = self._run(
            "SELECT session_key, digest, size, blob_key, seq FROM ref WHERE blob_key = ? AND gone IS NULL", found
        ).fetchall()
        self._bury(lost, why="damaged")
        return len(lost)

    def check(self, *, repair: bool) -> list[str]:
        try:
            said = [message for (message,) in self._run("PRAGMA integrity_check(20)") if message != "ok"]
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            said = [str(error)]
        problems = [f"the database says: {message}" for message in said]
        stray = "gone IS NULL AND (blob_key IS NULL OR blob_key NOT IN (SELECT blob_key FROM blob))"
        for name, where, mend in (
            ("refs without a blob row", f"FROM ref WHERE {stray}",
             f"UPDATE ref SET gone = 'damaged', blob_key = NULL WHERE {stray}"),
            ("refs without a session", "FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)",
             "DELETE FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)"),
            (_STRAY_CONTENT, "FROM content WHERE blob_key NOT IN (SELECT blob_key FROM blob)",
             ""),
            ("blobs with a wrong count of refs", f"FROM {_MISCOUNTED}",
             f"UPDATE blob SET refs = {_COUNTED} WHERE blob_key IN {_MISCOUNTED}"),
            ("sessions with a wrong count of bytes", f"FROM session WHERE used_bytes <> {_USED}",
             f"UPDATE session SET used_bytes = {_USED} WHERE used_bytes <> {_USED}"),
            ("wrong total of stored bytes", f"FROM meta WHERE key = 'stored_bytes' AND value <> {_STORED}",
             f"UPDATE meta SET value = {_STORED} WHERE key = 'stored_bytes'"),
        ):  # fmt: skip
            try:
                count = self._one(f"SELECT count(*) {where}")[0]
            except sqlite3.DatabaseError as error:
                if not said or not is_damage(error):
                    raise
                continue  # said already: no more can be told of these tables
            if count:
                problems.append(f"{count} {name}" + (": set right" if repair else ""))
                if repair and name == _STRAY_CONTENT:
                    self._drop_content(self._run(f"SELECT blob_key {where}").fetchall())
                elif repair:
                    self._run(mend)
        if repair:
            self._drop_unreferenced()
        return problems

    def session_for(self, info: SessionInfo, now: float, grace: float) -> tuple[int, int]:
        """The key of a session that is being used now, and the number of its next ref; it is added where it is new."""
        found = self._one(
            "SELECT session_key, next_seq, ttl, used_at FROM session WHERE session_id = ?", (info.session_id,)
        )
        if found is None:
            key = self._run(
                "INSERT INTO session (session_id, parent, ttl, quota, created_at, used_at) VALUES (?, ?, ?, ?, ?, ?)",
                (info.session_id, info.parent, info.ttl, info.quota, now, now),
            ).lastrowid
            assert key is not None
            return key, 1
        key, seq, ttl, used = found
        if ttl is not None and used + ttl + grace <= now:
            self._bury(
                self._run(
                    "SELECT session_key, digest, size, blob_key, seq FROM ref"
                    " WHERE session_key = ? AND gone IS NULL AND pinned = 0",
                    (key,),
                ).fetchall()
            )
            self._run("DELETE FROM record WHERE session_key = ?", (key,))
        if now > used:
            self._run("UPDATE session SET used_at = ? WHERE session_key = ?", (now, key))
        return key, seq

    def _blob_for(self, entry: Entry, digest: bytes, heal: bool) -> int:
        blob = entry.blob
        found = self._one("SELECT blob_key, coding FROM blob WHERE digest = ?", (digest,))
        if found is None:
            key = self._run(
                "INSERT INTO blob (digest, size, coding, place, frames, refs, used_at) VALUES (?, ?, ?, ?, ?, 0, ?)",
                (digest, blob.size, blob.coding, blob.place, blob.frames, entry.ref.created),
            ).lastrowid
            assert key is not None
            if entry.content is not None:
                try:
                    self._run("INSERT INTO content VALUES (?, ?)", (key, entry.content))
                except sqlite3.IntegrityError:  # damaged content was left behind under this key
                    key = self._keep_content(key, entry.content)
            self._revive(digest, key)
            return key
        key = found[0]
        if entry.content is not None or heal:
            self._run(
                "UPDATE blob SET coding = ?, place = ?, frames = ? WHERE blob_key = ? AND place <> ?",
                (blob.coding, blob.place, blob.frames, key, blob.place),
            )
        if entry.content is not None:
            key = self._keep_content(key, entry.content)
        return int(key)

    def _keep_content(self, key: int, data: bytes) -> int:
        """Content in place of what is there. Where the pages of that are damaged, they are left alone and it moves to a
        new key: one artifact's damage must not stop the others."""
        if not self._is_readable(key):
            new = self._one("SELECT 1 + max((SELECT max(blob_key) FROM blob), (SELECT max(blob_key) FROM content))")[0]
            self._run("UPDATE blob SET blob_key = ? WHERE blob_key = ?", (new, key))
            self._run("UPDATE ref SET blob_key = ? WHERE blob_key = ?", (new, key))
            key = int(new)
        self._run(
            "INSERT INTO content VALUES (?, ?) ON CONFLICT (blob_key) DO UPDATE SET data = excluded.data"
            " WHERE data <> excluded.data",
            (key, data),
        )
        return key

    def _drop_content(self, keys: list[Row]) -> None:
        """Remove content, but for what cannot be read: to free damaged pages would damage others."""
        self._db.executemany("DELETE FROM content WHERE blob_key = ?", [key for key in keys if self._is_readable(*key)])

    def _revive(self, digest: bytes, blob_key: int) -> None:
        """Bring back the refs that lost their bytes to damage, now that the bytes are here again."""
        back = self._run("SELECT session_key, seq FROM ref WHERE digest = ? AND gone = 'damaged'", (digest,)).fetchall()
        if back:
            self._db.executemany(
                "UPDATE ref SET gone = NULL, blob_key = ? WHERE session_key = ? AND seq = ?",
                [(blob_key, *key) for key in back],
            )
            self._run("UPDATE blob SET refs = refs + ? WHERE blob_key = ?", (len(back), blob_key))
            self._db.executemany(
                f"UPDATE session SET used_bytes = {_USED} WHERE session_key = ?", {(key,) for key, _ in back}
            )

    def _is_current(self, session_key: int, name: str | None, seq: int) -> bool:
        """Whether no later ref has taken the name."""
        return name is None or self._one(
            "SELECT max(seq) FROM ref WHERE session_key = ? AND name = ?", (session_key, name)
        ) == (seq,)  # fmt: skip

    def _bury(self, refs: list[Row], why: Gone = "expired") -> Freed:
        """Tombstones in place of these refs (session_key, digest, size, blob_key, seq)."""
        self._db.executemany(
            "UPDATE ref SET gone = ?, blob_key = NULL WHERE session_key = ? AND seq = ?",
            [(why, session_key, seq) for session_key, *_, seq in refs],
        )
        return self._let_go([ref[:4] for ref in refs])

    def _let_go(self, refs: list[Row]) -> Freed:
        """The accounts after these refs (session_key, digest, size, blob_key) went; blobs without any are dropped."""
        self._db.executemany("UPDATE blob SET refs = refs - 1 WHERE blob_key = ?", [ref[3:] for ref in refs])
        self._db.executemany(
            "UPDATE session SET used_bytes = used_bytes - ? WHERE session_key = ? AND NOT EXISTS"
            f" (SELECT 1 FROM {_REF} WHERE session_key = ? AND digest = ? AND gone IS NULL)",
            {(size, key, key, digest) for key, digest, size, *_ in refs},
        )
        return _freed(len(refs), self._drop_unreferenced())

    def _drop_unreferenced(self) -> list[Row]:
        blobs = self._run("SELECT digest, size, coding, place, frames FROM blob WHERE refs = 0").fetchall()
        if blobs:
            self._drop_content(self._run("SELECT blob_key FROM blob WHERE refs = 0 AND coding = 'inline'").fetchall())
            self._run("DELETE FROM blob WHERE refs = 0")
        return blobs

    def _run(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def _one(self, sql: str, values: Any = ()) -> Any:
        return self._db.execute(sql, values).fetchone()


_MISCOUNTED = """(SELECT b.blob_key FROM blob b LEFT JOIN (SELECT blob_key, count(*) AS n FROM ref WHERE gone IS NULL
    GROUP BY blob_key) c ON c.blob_key = b.blob_key WHERE b.refs <> coalesce(c.n, 0))"""
_COUNTED = "(SELECT count(*) FROM ref WHERE ref.blob_key = blob.blob_key AND ref.gone IS NULL)"
_USED = """(SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
    WHERE ref.session_key = session.session_key AND ref.gone IS NULL))"""


_STORED = "(SELECT coalesce(sum(size), 0) FROM blob)"


def _freed(refs: int, blobs: list[Row]) -> Freed:
    return Freed(
        refs,
        len(blobs),
        sum(size for _, size, *_ in blobs),
        tuple(Blob(digest.hex(), *rest) for digest, *rest in blobs if rest[1] != "inline"),
    )


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether SQLite says that its file is damaged, and not that it is busy, full or misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
