"""Expiry and repair of a catalog in PostgreSQL.

Any number of machines may collect: each takes a batch of sessions that no other machine has locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from coatcheck.refs import Blob
from coatcheck.storage import expiry
from coatcheck.storage.entries import RECORDS, Freed, Note, SetAside
from coatcheck.storage.postgres_rows import ENDED, PAGE, PostgresRows
from coatcheck.storage.records import Records
from coatcheck.storage.sql import Check, blob_from, found_text
from coatcheck.storage.upkeep import BATCH, Upkeep

_BATCH: Final = 100  # sessions per batch of a collection
_LATER: Final = 86_400.0  # seconds before an expired session with a pin is checked again
_HIGHEST: Final = b"\xff" * 32


_CHECKS: Final = (
    Check(
        "refs without a session",
        """SELECT count(*) AS count FROM ref
            WHERE tenant = %(tenant)s AND session_key NOT IN (SELECT session_key FROM session)""",
        "DELETE FROM ref WHERE tenant = %(tenant)s AND session_key NOT IN"
        " (SELECT session_key FROM session)",
    ),
    Check(
        "notes without a session",
        """SELECT count(*) AS count FROM note WHERE tenant = %(tenant)s AND session_key > 0
            AND session_key NOT IN (SELECT session_key FROM session)""",
        """DELETE FROM note WHERE tenant = %(tenant)s AND session_key > 0
            AND session_key NOT IN (SELECT session_key FROM session)""",
    ),
    Check(
        "blobs with a wrong count of refs",
        """SELECT count(*) AS count FROM blob b
            WHERE tenant = %(tenant)s AND refs <> (SELECT count(*) FROM ref r
            WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)""",
        """UPDATE blob b SET refs = (SELECT count(*) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)
            WHERE tenant = %(tenant)s AND refs <> (SELECT count(*) FROM ref r
                WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)""",
    ),
    Check(
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
    Check(
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
    Check(
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


class PostgresUpkeep(PostgresRows, Records, Upkeep):
    """Expiry and repair of one tenant."""

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed = self._end_all()  # first the sessions whose end was interrupted
        walked: _Walk | None = {}
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
        is_due = f"""session.tenant = %(tenant)s
            AND ({expiry.session_is_over("%(at)s")} AND {expiry.REF_MAY_EXPIRE}
                OR {expiry.ref_is_over("%(at)s")})"""
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

    def _expire_sessions(self, at: float, walked: _Walk) -> tuple[Freed, _Walk | None]:
        """Expire the next refs of due sessions that no other machine has locked. Each session is
        checked again at its current expiry time. Also returns how far it has come for the next
        call, or None if no session is due."""
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
        places = {key: walked.get(key, _Place()) for key in over}
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
            after=[places[key].seq for key in over],
            batch=BATCH,
        )
        for row in rows:
            place = places[row["session_key"]]
            places[row["session_key"]] = _Place(
                max(row["seq"], place.seq), place.has_pins or row["is_pinned"]
            )
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
            keys=[key for key, place in places.items() if place.has_pins], later=at + _LATER,
        )  # fmt: skip
        self._ask(
            f"UPDATE session SET look_at = NULL, ended_at = {expiry.SESSION_END}"
            " WHERE session_key = ANY (%(keys)s)",
            keys=[key for key, place in places.items() if not place.has_pins],
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

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        last, digest = after, _HIGHEST
        while rows := self._ask(
            """SELECT digest, size, coding, place, frames, used FROM blob
                WHERE tenant = %(tenant)s AND coding = 'raw' AND used <= %(until)s
                AND (used, digest) > (%(last)s, %(digest)s) ORDER BY used, digest LIMIT %(page)s""",
            until=until,
            last=last,
            digest=digest,
            page=PAGE,
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
            problems += found_text(found["count"], check.name, repair)
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
        return found_text(sum(row["number"] for row in rows), "refs without a blob row", repair)

    def _every_note(self, start: str, stop: str) -> Iterator[Note]:
        with self._own.db.cursor(name="notes") as rows:
            rows.execute(
                """SELECT s.session_id, n.key, n.value FROM note n
                    JOIN session s USING (tenant, session_key)
                    WHERE n.tenant = %s AND n.key >= %s AND n.key < %s
                        AND substr(s.session_id, 1, 1) <> %s""",
                (self._tenant, start, stop, ENDED),
            )
            for session_id, key, value in rows:
                yield Note(session_id.decode(), key, value)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a collection has come in a session: the last ref that it looked at, and whether one
    of those is pinned."""

    seq: int = 0
    has_pins: bool = False


_Walk = dict[int, _Place]
"""The places in the sessions that are not done, by their keys."""
