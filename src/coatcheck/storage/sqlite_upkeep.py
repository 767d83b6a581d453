"""Expiry and repair of a catalog in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from coatcheck.refs import Blob
from coatcheck.storage import expiry
from coatcheck.storage.entries import RECORDS, Freed, SetAside
from coatcheck.storage.records import Records
from coatcheck.storage.sql import Check, blob_from, found_text
from coatcheck.storage.sqlite_rows import SqliteRows, is_damage
from coatcheck.storage.upkeep import Upkeep

_CHECKS: Final = (
    Check(
        "refs without a session",
        "SELECT count(*) FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)",
        "DELETE FROM ref WHERE session_key NOT IN (SELECT session_key FROM session)",
    ),
    Check(
        "notes without a session",
        "SELECT count(*) FROM note WHERE session_key > 0 AND session_key NOT IN"
        " (SELECT session_key FROM session)",
        "DELETE FROM note WHERE session_key > 0 AND session_key NOT IN"
        " (SELECT session_key FROM session)",
    ),
    Check(
        "blobs with a wrong count of refs",
        """SELECT count(*) FROM blob LEFT JOIN
            (SELECT digest, count(*) AS number FROM ref WHERE gone IS NULL GROUP BY digest) AS live
            ON live.digest = blob.digest WHERE blob.refs <> coalesce(live.number, 0)""",
        """UPDATE blob SET refs = (SELECT count(*) FROM ref
            WHERE ref.digest = blob.digest AND ref.gone IS NULL)
            WHERE blob_key IN (SELECT blob_key FROM blob LEFT JOIN
            (SELECT digest, count(*) AS number FROM ref WHERE gone IS NULL GROUP BY digest) AS live
            ON live.digest = blob.digest WHERE blob.refs <> coalesce(live.number, 0))""",
    ),
    Check(
        "sessions with a wrong count of bytes",
        """SELECT count(*) FROM session WHERE used_bytes <> (SELECT coalesce(sum(size), 0) FROM
            (SELECT DISTINCT digest, size FROM ref
                WHERE session_key = session.session_key AND gone IS NULL))""",
        """UPDATE session SET used_bytes = (SELECT coalesce(sum(size), 0) FROM
            (SELECT DISTINCT digest, size FROM ref
                WHERE session_key = session.session_key AND gone IS NULL))""",
    ),
    Check(
        "wrong total of stored bytes",
        """SELECT count(*) FROM meta WHERE key = 'stored_bytes'
            AND value <> (SELECT coalesce(sum(size), 0) FROM blob)""",
        "UPDATE meta SET value = (SELECT coalesce(sum(size), 0) FROM blob)"
        " WHERE key = 'stored_bytes'",
    ),
)


class SqliteUpkeep(SqliteRows, Records, Upkeep):
    """Expiry and repair in the tables of an SQLite database."""

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        # First, sessions whose end a crash interrupted.
        freed = self._in_steps("forgetting", self._end_next)
        freed += self._in_steps("expiring", partial(self._expire_sessions, at), _Place(0, -1))
        freed += self._in_steps("expiring", partial(self._expire_refs, at))
        self._in_steps("expiring", partial(self._drop_records, at))
        self._in_steps("expiring", partial(self._drop_tombstones, forget_before))
        self._in_steps("expiring", partial(self._drop_empty_sessions, forget_before))
        self._drop_aside(at)
        return freed

    def _would_expire(self, at: float) -> Freed:
        due = f"""SELECT ref.session_key, ref.seq, ref.digest FROM session
                CROSS JOIN ref ON ref.session_key = session.session_key
                WHERE {expiry.session_is_over(":at")} AND {expiry.REF_MAY_EXPIRE}
            UNION SELECT ref.session_key, ref.seq, ref.digest FROM ref INDEXED BY ref_by_expiry
                WHERE {expiry.ref_is_over(":at")}"""
        (count,) = self._query(f"SELECT count(*) AS refs FROM ({due})", {"at": at})
        blobs = self._query(
            f"""SELECT blob.* FROM blob JOIN (SELECT digest, count(*) AS number FROM ({due})
                GROUP BY digest) AS dead
                ON dead.digest = blob.digest AND dead.number = blob.refs""",
            {"at": at},
        )
        return Freed.of(count["refs"], [blob_from(row) for row in blobs])

    def _end_next(self, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Remove some refs of a session that has ended, and the session itself with the last of
        them."""
        ended = self._run(
            "SELECT session_key FROM session WHERE session_id >= x'' LIMIT 2"
        ).fetchall()
        if not ended:
            return Freed(), None
        session_key = ended[0]["session_key"]
        refs = self._run(
            """SELECT session_id, seq, digest, size, gone FROM entry
                WHERE session_key = :session_key ORDER BY seq LIMIT :limit""",
            {"session_key": session_key, "limit": limit},
        ).fetchall()
        if refs:
            self._run(
                "DELETE FROM ref WHERE session_key = :session_key AND seq <= :last",
                {"session_key": session_key, "last": refs[-1]["seq"]},
            )
        freed = self._let_go_of([row for row in refs if row["gone"] is None])
        if len(refs) == limit or self._drop_notes_of([session_key], limit):
            return freed, True
        self._run(
            "DELETE FROM session WHERE session_key = :session_key", {"session_key": session_key}
        )
        return freed, len(ended) > 1 or None

    def _expire_sessions(self, at: float, limit: int, after: _Place) -> tuple[Freed, _Place | None]:
        """Expire the next refs of sessions that had expired at `at`. Tombstones count for the limit
        too, because they take time. Also returns the last ref, or None at the end."""
        rows = self._run(
            f"""SELECT session.session_id, ref.session_key, ref.seq, ref.digest, ref.size,
                {expiry.REF_MAY_EXPIRE} AS may_expire
                FROM session CROSS JOIN ref ON ref.session_key = session.session_key
                AND ref.seq > iif(session.session_key = :session_key, :seq, -1)
                WHERE session.session_key IN
                    (SELECT session_key FROM session INDEXED BY session_by_end
                    WHERE {expiry.session_is_over(":at")} AND session_key >= :session_key
                    AND EXISTS (SELECT 1 FROM ref WHERE ref.session_key = session.session_key)
                    ORDER BY session_key LIMIT :limit + 1)
                ORDER BY session.session_key, ref.seq LIMIT :limit""",
            {"at": at, "session_key": after.session_key, "seq": after.seq, "limit": limit},
        ).fetchall()
        freed = self._bury_rows([row for row in rows if row["may_expire"]])
        return freed, _Place(rows[-1]["session_key"], rows[-1]["seq"]) if rows else None

    def _expire_refs(self, at: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Expire some refs by their own expiry time."""
        rows = self._run(
            f"""SELECT session.session_id, ref.session_key, ref.seq, ref.digest, ref.size
                FROM ref INDEXED BY ref_by_expiry
                CROSS JOIN session ON session.session_key = ref.session_key
                WHERE {expiry.ref_is_over(":at")} LIMIT :limit""",
            {"at": at, "limit": limit},
        ).fetchall()
        return self._bury_rows(rows), len(rows) == limit or None

    def _bury_rows(self, refs: Sequence[sqlite3.Row]) -> Freed:
        """Turn live refs into tombstones."""
        self._run_each(
            "UPDATE ref SET gone = 'expired' WHERE session_key = :session_key AND seq = :seq",
            [{"session_key": row["session_key"], "seq": row["seq"]} for row in refs],
        )
        return self._let_go_of(refs)

    def _drop_records(self, at: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Drop some records of sessions that had expired at `at`."""
        done = self._run(
            f"""DELETE FROM note WHERE (session_key, key) IN (SELECT note.session_key, note.key
                FROM session INDEXED BY session_by_end
                CROSS JOIN note ON note.session_key = session.session_key
                WHERE {expiry.session_is_over(":at")} AND session.session_id < x''
                AND note.key >= :first AND note.key < :last LIMIT :limit)""",
            {"at": at, "first": RECORDS[0], "last": RECORDS[1], "limit": limit},
        )
        return Freed(), done.rowcount == limit or None

    def _drop_tombstones(self, before: float, limit: int, _: object) -> tuple[Freed, bool | None]:
        """Drop some tombstones of sessions that had expired before this time."""
        done = self._run(
            f"""DELETE FROM ref WHERE (session_key, seq) IN (SELECT ref.session_key, ref.seq
                FROM session INDEXED BY session_by_end
                CROSS JOIN ref ON ref.session_key = session.session_key
                WHERE {expiry.SESSION_END} < :before AND session.session_id < x''
                    AND ref.gone IS NOT NULL
                LIMIT :limit)""",
            {"before": before, "limit": limit},
        )
        return Freed(), done.rowcount == limit or None

    def _drop_empty_sessions(
        self, before: float, limit: int, _: object
    ) -> tuple[Freed, bool | None]:
        """Drop some sessions without refs that had expired before this time. Their notes go
        first."""
        found = self._run(
            f"""SELECT session_key FROM session INDEXED BY session_by_end
                WHERE {expiry.SESSION_END} < :before AND session_id < x''
                AND NOT EXISTS (SELECT 1 FROM ref
                    WHERE ref.session_key = session.session_key) LIMIT :limit""",
            {"before": before, "limit": limit},
        ).fetchall()
        keys = [row["session_key"] for row in found]
        if self._drop_notes_of(keys, limit):
            return Freed(), True
        self._run_each(
            "DELETE FROM session WHERE session_key = :key", [{"key": key} for key in keys]
        )
        return Freed(), len(keys) == limit or None

    def _drop_notes_of(self, session_keys: Sequence[int], limit: int) -> bool:
        """Drop notes of these sessions, at most `limit`. Returns whether there may be more."""
        done = self._run(
            """DELETE FROM note WHERE (session_key, key) IN (SELECT note.session_key, note.key
                FROM json_each(:session_keys) AS one
                CROSS JOIN note ON note.session_key = one.value LIMIT :limit)""",
            {"session_keys": json.dumps(session_keys), "limit": limit},
        )
        return done.rowcount == limit

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        last = -1
        while page := self._query(
            """SELECT * FROM blob INDEXED BY blob_raw
                WHERE coding = 'raw' AND used > :after AND used <= :until
                AND blob_key > :last ORDER BY blob_key LIMIT 64""",
            {"after": after, "until": until, "last": last},
        ):
            yield from map(blob_from, page)
            last = page[-1]["blob_key"]

    def doubtful_sizes(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for row in self._query(
            """SELECT DISTINCT ref.digest, ref.size FROM ref JOIN blob ON blob.digest = ref.digest
                WHERE ref.gone IS NULL AND ref.size <> blob.size"""
        ):
            # A damaged row may have anything.
            if isinstance(row["digest"], bytes) and isinstance(row["size"], int):
                found.setdefault(row["digest"].hex(), set()).add(row["size"])
        return found

    def set_size(self, digest: str, size: int) -> None:
        self.change("setting a size right", lambda: self._set_size(bytes.fromhex(digest), size))

    def _set_size(self, digest: bytes, size: int) -> None:
        """Correct the size of content wherever damage has changed it, and count bytes again."""
        values = {"digest": digest, "size": size}
        changed = self._run(
            "UPDATE ref SET size = :size WHERE digest = :digest AND size <> :size", values
        ).rowcount
        changed += self._run(
            "UPDATE blob SET size = :size WHERE digest = :digest AND size <> :size", values
        ).rowcount
        if changed:
            for check in _CHECKS:
                if "bytes" in check.name:
                    self._run(check.mend)

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
        return self.change("checking the catalog", lambda: self._check(repair, until))

    def _check(self, repair: bool, until: float) -> list[str]:
        """Return what is wrong with the rows. Parts of the database that cannot be read are
        reported once."""
        damage = self._integrity()
        problems = [f"SQLite reports: {message}" for message in damage]
        # Rows read from damaged tables and indexes are not reliable enough to change.
        mends = repair and not damage
        checks: list[Callable[[], list[str]]] = [
            partial(self._check_stray_refs, mends, until),
            partial(self._check_stray_content, mends),
            *(partial(self._check_rows, check, mends) for check in _CHECKS),
            partial(self._check_records, repair=repair),
            partial(self._check_tokens, repair=repair),
        ]
        for check in checks:
            try:
                problems += check()
            except sqlite3.DatabaseError as error:
                if not damage or not is_damage(error):
                    raise
        if mends:
            self._drop_unreferenced()
        return problems

    def _integrity(self) -> list[str]:
        """Return what SQLite finds wrong with the pages of the database."""
        try:
            found = self._run("PRAGMA integrity_check(20)").fetchall()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return [str(error)]
        return [row[0] for row in found if row[0] != "ok"]

    def _check_stray_refs(self, mends: bool, until: float) -> list[str]:
        """Find live refs without a blob row. They become tombstones, and what they need is set
        aside."""
        rows = self._run(
            """SELECT digest, count(*) AS number FROM ref
                WHERE gone IS NULL AND digest NOT IN (SELECT digest FROM blob) GROUP BY digest"""
        ).fetchall()
        if mends:
            for row in rows:
                self.save(SetAside(Blob(row["digest"].hex(), 0, "raw"), until).note())
            self._run(
                """UPDATE ref SET gone = 'damaged'
                    WHERE gone IS NULL AND digest NOT IN (SELECT digest FROM blob)"""
            )
        return found_text(sum(row["number"] for row in rows), "refs without a blob row", mends)

    def _check_stray_content(self, mends: bool) -> list[str]:
        rows = self._run(
            "SELECT blob_key FROM content WHERE blob_key NOT IN (SELECT blob_key FROM blob)"
        ).fetchall()
        if mends and rows:
            self._drop_content(
                "SELECT blob_key FROM content WHERE blob_key NOT IN (SELECT blob_key FROM blob)"
            )
        return found_text(len(rows), "content without a blob row", mends)

    def _check_rows(self, check: Check, mends: bool) -> list[str]:
        (count,) = self._one(check.count)
        if count and mends:
            self._run(check.mend)
        return found_text(count, check.name, mends)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a walk over the refs of several sessions has come."""

    session_key: int
    seq: int
