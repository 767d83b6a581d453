"""The statements that change the catalog's tables. Each method runs inside a transaction that the catalog has begun.

`blob.refs` counts refs other than tombstones; a blob whose count falls to zero is deleted in the same transaction.
`session.used_bytes` counts each artifact of a session once.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from coatcheck.errors import QuotaExceeded
from coatcheck.refs import Blob
from coatcheck.storage import TRANSCRIPT, Entry, Freed, Gone, Limits, Ranges, SessionInfo, SetAside, merged
from coatcheck.storage.rows import Row, ref_values

BATCH = 2000
"""Maximum number of refs that one transaction removes, if there is enough space."""
_ENDED = b""
"""The id of a session that has ended and still has refs is a BLOB. In SQLite's order every BLOB is at or after this
value, and all text is before it."""
_STRAY_CONTENT = "content without a blob row"
_DEAD = "(s.ttl IS NOT NULL AND s.used_at + s.ttl <= :at OR r.expires_at IS NOT NULL AND r.expires_at <= :at)"
# By default SQLite finds a digest by scanning all refs of the session, so the index must be named.
_REF = "ref INDEXED BY ref_by_digest"
ASIDE = "aside/"  # key prefix in the table `meta`, before the digest of a blob that was set aside
TOMBSTONES = "SELECT count(*) FROM ref WHERE digest = ? AND gone = 'damaged'"
_EXPIRED = f"r.gone IS NULL AND r.pinned = 0 AND {_DEAD}"


class Changes:
    """The statements of each change, on one connection."""

    def __init__(self, db: sqlite3.Connection, is_readable: Callable[[int], bool]) -> None:
        """`is_readable` checks on another connection whether a blob's content can be read: a failed read on this one
        would spoil the transaction."""
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
        if held and held[11]:  # a pin belongs to the artifact: it covers later refs
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

    def remove(self, session_id: str, digest: str | None, *, name: str | None, end: bool) -> Freed:
        found = self._one("SELECT session_key FROM session WHERE session_id = ?", (session_id,))
        if name is None or found is None:
            self._stop_lending(session_id, digest)
        if found is None:
            return Freed()
        source, where, values = "ref", "session_key = ?", [found[0]]
        if digest is not None:
            source, where, values = _REF, where + " AND digest = ?", [found[0], bytes.fromhex(digest)]
        shown, kept = (where, list(values)), ""
        if name is not None:
            where, values = where + " AND name = ?", [*values, name]
            kept = (
                f" AND NOT EXISTS (SELECT 1 FROM {_REF} WHERE ref.session_key = shown.session_key"
                " AND ref.digest = shown.digest)"
            )
        refs = self._run(
            f"SELECT session_key, digest, size, blob_key FROM {source} WHERE {where} AND gone IS NULL", values
        ).fetchall()
        self._run(f"DELETE FROM {source} WHERE {where}", values)
        self._run(f"DELETE FROM shown WHERE {shown[0]}{kept}", shown[1])
        if name is not None and self._one(f"SELECT 1 FROM {_REF} WHERE {shown[0]}", shown[1]) is None:
            self._stop_lending(session_id, digest)
        if end:
            self._run("DELETE FROM record WHERE session_key = ?", (found[0],))
            self._run("DELETE FROM session WHERE session_key = ?", (found[0],))
        return self._drop_refs(refs)

    def _stop_lending(self, session_id: str, digest: str | None) -> None:
        """Keep the refs of transcripts that this session granted, but no longer lend them to the session."""
        which, values = ("", ()) if digest is None else (" AND digest = ?", (bytes.fromhex(digest),))
        self._run(
            f"UPDATE ref INDEXED BY ref_by_grant SET granted_by = NULL WHERE granted_by = ?{which} AND session_key IN"
            " (SELECT session_key FROM session WHERE substr(session_id, 1, ?) = ?)",
            (session_id, *values, len(TRANSCRIPT), TRANSCRIPT),
        )

    def is_within(self, session_id: str, limit: int) -> bool:
        """Return whether a session has at most `limit` refs."""
        (count,) = self._one(
            "SELECT count(*) FROM (SELECT 1 FROM ref WHERE session_key ="
            " (SELECT session_key FROM session WHERE session_id = ?) LIMIT ?)",
            (session_id, limit + 1),
        )
        return int(count) <= limit

    def unname(self, session_id: str) -> None:
        """End a session in one small change: it can no longer be found, and `end_some` removes its refs."""
        self._stop_lending(session_id, None)
        self._run(
            "UPDATE session SET session_id = CAST(session_key AS BLOB), parent = NULL WHERE session_id = ?",
            (session_id,),
        )

    def end_some(self, limit: int) -> tuple[Freed, bool]:
        """Remove some refs of an ended session. Returns what was freed and whether there may be more to remove."""
        found = self._one("SELECT session_key FROM session WHERE session_id >= ? LIMIT 1", (_ENDED,))
        if found is None:
            return Freed(), False
        refs = self._run(
            "SELECT session_key, digest, size, blob_key, seq, gone FROM ref WHERE session_key = ? LIMIT ?",
            (found[0], limit),
        ).fetchall()
        self._db.executemany("DELETE FROM ref WHERE session_key = ? AND seq = ?", [(ref[0], ref[4]) for ref in refs])
        self._db.executemany("DELETE FROM shown WHERE session_key = ? AND digest = ?", [ref[:2] for ref in refs])
        if not refs:
            for table in ("shown", "record", "session"):
                self._run(f"DELETE FROM {table} WHERE session_key = ?", found)
        return self._drop_refs([ref[:4] for ref in refs if ref[5] is None]), True

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

    def expire(self, at: float, limit: int = BATCH) -> Freed:
        """Turn the next expired refs into tombstones. Returns a result without refs when there are none left."""
        dead = self._run(
            f"SELECT r.session_key, r.digest, r.size, r.blob_key, r.seq FROM ref r JOIN session s USING (session_key)"
            f" WHERE {_EXPIRED} LIMIT :limit",
            {"at": at, "limit": limit},
        ).fetchall()
        return self._bury(dead)

    def drop_tombstones(self, before: float, limit: int = BATCH) -> bool:
        """Delete the next tombstones of sessions that expired before `before`. Returns whether there may be more."""
        dropped = self._run(
            "DELETE FROM ref WHERE (session_key, seq) IN (SELECT session_key, seq FROM ref WHERE gone IS NOT NULL AND"
            " session_key IN (SELECT session_key FROM session WHERE ttl IS NOT NULL AND used_at + ttl < ?) LIMIT ?)",
            (before, limit),
        ).rowcount
        if dropped:
            return True
        self._run(
            "DELETE FROM session WHERE ttl IS NOT NULL AND used_at + ttl < ?"
            " AND NOT EXISTS (SELECT 1 FROM record WHERE record.session_key = session.session_key)"
            " AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.session_key = session.session_key)",
            (before,),
        )
        return False

    def note_cold(self, before: float) -> None:
        """Record that blobs last used up to this time were offered for compression."""
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

    def lose(self, blob: Blob, until: float) -> int:
        found = self._one(
            "SELECT blob_key FROM blob WHERE digest = ? AND place = ?", (bytes.fromhex(blob.digest), blob.place)
        )
        if found is None:
            return 0
        content: Any = None
        if blob.coding == "inline" and self._is_readable(*found):
            (content,) = self._one("SELECT data FROM content WHERE blob_key = ?", found) or (None,)
            content = content if isinstance(content, bytes) else None
            if content is not None and hashlib.sha256(content).hexdigest() == blob.digest:
                return 0  # another put has healed it in the meantime
        self._set_aside(SetAside(blob, until, content))
        lost = self._run(
            "SELECT session_key, digest, size, blob_key, seq FROM ref WHERE blob_key = ? AND gone IS NULL", found
        ).fetchall()
        self._bury(lost, why="damaged")
        return len(lost)

    def _set_aside(self, one: SetAside) -> None:
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (ASIDE + one.blob.digest, one.pack()))

    def drop_aside(self, before: float) -> None:
        """Delete entries that are past their time, or whose tombstones were restored or removed."""
        for key, packed in self._run(
            "SELECT key, value FROM meta WHERE key >= ? AND key < ?", (ASIDE, ASIDE + "g")
        ).fetchall():
            digest = key.removeprefix(ASIDE)
            (refs,) = self._one(TOMBSTONES, (bytes.fromhex(digest),))
            if not refs or SetAside.unpack(digest, packed).until <= before:
                self._run("DELETE FROM meta WHERE key = ?", (key,))

    def restore(self, blob: Blob) -> int:
        digest = bytes.fromhex(blob.digest)
        if self._one("SELECT 1 FROM blob WHERE digest = ?", (digest,)):
            return 0
        key = self._run(
            "INSERT INTO blob (digest, size, coding, place, frames, refs, used_at) VALUES (?, ?, ?, ?, ?, 0, ?)",
            (digest, blob.size, blob.coding, blob.place, blob.frames, blob.used),
        ).lastrowid
        assert key is not None
        self._revive(digest, key)
        self._run("DELETE FROM meta WHERE key = ?", (ASIDE + blob.digest,))
        (refs,) = self._one("SELECT refs FROM blob WHERE blob_key = ?", (key,))
        self._drop_unreferenced()
        return int(refs)

    def check(self, *, repair: bool, until: float) -> list[str]:
        try:
            messages = [message for (message,) in self._run("PRAGMA integrity_check(20)") if message != "ok"]
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            messages = [str(error)]
        problems = [f"SQLite reports: {message}" for message in messages]
        repair = repair and not messages  # rows read from damaged tables and indexes are not reliable enough to change
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
                if not messages or not is_damage(error):
                    raise
                continue  # the damage is already reported, and this table cannot be checked
            if count:
                problems.append(f"{count} {name}" + (": set right" if repair else ""))
                if repair and mend.startswith("UPDATE ref"):
                    for (digest,) in self._run(f"SELECT DISTINCT digest {where}").fetchall():
                        self._set_aside(SetAside(Blob(digest.hex(), 0, "raw"), until))
                if repair and name == _STRAY_CONTENT:
                    self._drop_content(self._run(f"SELECT blob_key {where}").fetchall())
                elif repair:
                    self._run(mend)
        if repair:
            self._drop_unreferenced()
        return problems

    def session_for(self, info: SessionInfo, now: float, grace: float) -> tuple[int, int]:
        """Return the key of a session in use and the number of its next ref. Creates the session if it is new."""
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
        """Replace a blob's content. If the old content's pages are damaged, they are left alone and the blob moves to a
        new key: damage to one artifact must not affect the others."""
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
        """Delete content, except where it cannot be read: freeing damaged pages would damage others."""
        self._db.executemany("DELETE FROM content WHERE blob_key = ?", [key for key in keys if self._is_readable(*key)])

    def _revive(self, digest: bytes, blob_key: int) -> None:
        """Restore the refs that damage had turned into tombstones, now that the bytes are available again."""
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
        """Return whether no later ref uses the name."""
        return name is None or self._one(
            "SELECT max(seq) FROM ref WHERE session_key = ? AND name = ?", (session_key, name)
        ) == (seq,)  # fmt: skip

    def _bury(self, refs: list[Row], why: Gone = "expired") -> Freed:
        """Turn these refs (session_key, digest, size, blob_key, seq) into tombstones."""
        self._db.executemany(
            "UPDATE ref SET gone = ?, blob_key = NULL WHERE session_key = ? AND seq = ?",
            [(why, session_key, seq) for session_key, *_, seq in refs],
        )
        return self._drop_refs([ref[:4] for ref in refs])

    def _drop_refs(self, refs: list[Row]) -> Freed:
        """Update the counts after these refs (session_key, digest, size, blob_key) were removed, and delete
        unreferenced blobs."""
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
    """Return whether SQLite reports a damaged file, as opposed to one that is busy, full or misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
