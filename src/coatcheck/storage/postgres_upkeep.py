"""Upkeep of a fleet's catalog: pins, removal, expiry, listing everything, and consistency checks.

Any number of machines may collect: each takes a batch of sessions that no other machine has locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import inf
from typing import Any, Final

from coatcheck.errors import StoreError
from coatcheck.refs import Blob
from coatcheck.storage import Freed, SessionInfo, SetAside, Totals
from coatcheck.storage.postgres import Db
from coatcheck.storage.postgres_records import PostgresRecords
from coatcheck.storage.postgres_rows import BLOB, LENT, OF_SESSION, SESSION, blob_of, freed_of, packed, session_of

_PAGE: Final = 256
_BATCH: Final = 100  # sessions per batch of a collection
_LATER: Final = 86_400.0  # seconds before an expired session with a pin is checked again
_ASIDE: Final = "aside/"  # key prefix in the table `meta` for the digest of a blob that was set aside
_HIGHEST: Final = b"\xff" * 32
_DEAD: Final = "NOT r.pinned AND r.gone IS NULL AND (s.used_at + s.ttl <= %(at)s OR r.expires_at <= %(at)s)"
_USED: Final = """(SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
    WHERE ref.session_key = session.session_key AND ref.gone IS NULL) held)"""
_COUNTED: Final = "(SELECT count(*) FROM ref r WHERE r.tenant = b.tenant AND r.digest = b.digest AND r.gone IS NULL)"
_SIZE: Final = """coalesce(octet_length(b.data), (SELECT max(r.size) FROM ref r WHERE r.tenant = b.tenant
    AND r.digest = b.digest AND r.gone IS NULL), b.size)"""
_STORED: Final = """((SELECT coalesce(sum(size), 0) FROM blob WHERE tenant = %(tenant)s)
    - (SELECT coalesce(sum(bytes), 0) FROM stored WHERE tenant = %(tenant)s))"""
_STORE_AGAIN: Final = f"""INSERT INTO stored SELECT %(tenant)s, -1, {_STORED}
    ON CONFLICT (tenant, slot) DO UPDATE SET bytes = stored.bytes + excluded.bytes"""
_STRAY: Final = (
    "gone IS NULL AND NOT EXISTS (SELECT 1 FROM blob b WHERE b.tenant = ref.tenant AND b.digest = ref.digest)"
)


class PostgresUpkeep(PostgresRecords):
    """The part of the catalog besides putting and finding."""

    def pin(self, session_id: str, digest: str, pinned: bool) -> int:
        def change(db: Db) -> int:
            key = self._locked(db, session_id)
            if not pinned:  # what the pin kept may have expired long ago
                db.execute("UPDATE session SET look_at = '-infinity' WHERE session_key = %s", (key,))
            return db.execute(
                "UPDATE ref SET pinned = %s WHERE session_key = %s AND digest = %s AND gone IS NULL",
                (pinned, key, bytes.fromhex(digest)),
            ).rowcount

        return self._connections.run(change, "pinning")

    def remove(
        self, session_id: str, digest: str | None = None, *, name: str | None = None, end: bool = False
    ) -> Freed:
        def change(db: Db) -> Freed:
            key = self._locked(db, session_id)
            if name is None or key is None:
                self._stop_lending(db, session_id, digest)
            if key is None:
                return Freed()
            which = "session_key = %(key)s"
            values = {"key": key, "digest": digest and bytes.fromhex(digest), "name": name}
            if digest is not None:
                which += " AND digest = %(digest)s"
            shown = which
            if name is not None:
                which += " AND name = %(name)s"
                shown += (
                    " AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.session_key = shown.session_key"
                    " AND ref.digest = shown.digest)"
                )
            gone = db.execute(
                f"DELETE FROM ref WHERE {which} RETURNING session_key, digest, size, gone", values
            ).fetchall()
            db.execute(f"DELETE FROM shown WHERE {shown}", values)
            if (
                name is not None
                and not db.execute(
                    "SELECT 1 FROM ref WHERE session_key = %(key)s AND digest = %(digest)s LIMIT 1", values
                ).fetchone()
            ):
                self._stop_lending(db, session_id, digest)
            refs = [ref for *ref, why in gone if why is None]
            blobs = self._let_go(db, refs)
            if end:
                db.execute("DELETE FROM record WHERE session_key = %s", (key,))
                db.execute("DELETE FROM session WHERE session_key = %s", (key,))
            return freed_of(len(refs), blobs)

        return self._connections.run(change, "forgetting", slow=True)

    def _stop_lending(self, db: Db, session_id: str, digest: str | None) -> None:
        """Stop lending to a session: refs that transcripts keep for it become the transcripts' own."""
        which = "" if digest is None else " AND r.digest = %(digest)s"
        db.execute(
            f"UPDATE ref r SET granted_by = NULL FROM session s WHERE s.session_key = r.session_key AND {LENT}{which}",
            {
                "tenant": self._tenant,
                "session": packed(session_id),
                "digest": digest and bytes.fromhex(digest),
            },
        )

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        if dry_run:
            return self._would_expire(at)
        freed = Freed()
        while (some := self._connections.run(partial(self._expire_sessions, at=at), "expiring", slow=True)) is not None:
            freed += some
        last: int | None = 0
        while last is not None:
            batch, last = self._connections.run(partial(self._expire_refs, at=at, after=last), "expiring", slow=True)
            freed += batch
        while self._connections.run(partial(self._drop_tombstones, before=forget_before), "expiring", slow=True):
            pass
        self._connections.run(partial(self._drop_aside, before=at), "expiring", slow=True)
        return freed

    def _would_expire(self, at: float) -> Freed:
        (refs,) = self._ask_all(f"SELECT count(*) FROM session s JOIN ref r USING (session_key)"
                                f" WHERE s.tenant = %(tenant)s AND {_DEAD}", at=at)[0]  # fmt: skip
        blobs = self._ask_all(
            f"SELECT {BLOB} FROM blob b JOIN (SELECT r.digest, count(*) AS n FROM session s JOIN ref r USING"
            f" (session_key) WHERE s.tenant = %(tenant)s AND {_DEAD} GROUP BY r.digest) dead"
            " ON dead.digest = b.digest AND dead.n = b.refs WHERE b.tenant = %(tenant)s",
            at=at,
        )
        return freed_of(refs, blobs)

    def _expire_sessions(self, db: Db, *, at: float) -> Freed | None:
        """Expire the next due sessions that no other machine has locked; return None if there are none. Each session is
        checked again at its current expiry time."""
        due = db.execute(
            "SELECT session_key, coalesce(used_at + ttl <= %(at)s, false) FROM session WHERE tenant = %(tenant)s"
            " AND look_at <= %(at)s ORDER BY look_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED",
            {"tenant": self._tenant, "at": at, "batch": _BATCH},
        ).fetchall()
        if not due:
            return None
        over = [key for key, is_over in due if is_over]
        freed = self._bury(db, "session_key = ANY (%(keys)s)", keys=over)
        db.execute("DELETE FROM record WHERE session_key = ANY (%s)", (over,))
        # An inner limit keeps the planner from reading all refs of all sessions.
        pinned = [key for (key,) in db.execute(
            "SELECT one.key FROM unnest(%s::bigint[]) AS one (key), LATERAL (SELECT 1 FROM ref"
            " WHERE session_key = one.key AND gone IS NULL LIMIT 1) found",
            (over,),
        )]  # fmt: skip
        later = [key for key, is_over in due if not is_over]
        db.execute("UPDATE session SET look_at = used_at + ttl WHERE session_key = ANY (%s)", (later,))
        db.execute("UPDATE session SET look_at = %s WHERE session_key = ANY (%s)", (at + _LATER, pinned))
        db.execute(
            "UPDATE session SET look_at = NULL, ended_at = used_at + ttl WHERE session_key = ANY (%s)",
            ([key for key in over if key not in pinned],),
        )
        return freed

    def _expire_refs(self, db: Db, *, at: float, after: int) -> tuple[Freed, int | None]:
        """Expire refs by their own expiry time; also return the last session checked, or None at the end."""
        keys = [key for (key,) in db.execute(
            "SELECT session_key FROM session WHERE session_key IN (SELECT session_key FROM ref WHERE tenant = %s"
            " AND expires_at <= %s AND gone IS NULL AND NOT pinned) AND session_key > %s ORDER BY session_key LIMIT %s"
            " FOR UPDATE SKIP LOCKED",
            (self._tenant, at, after, _BATCH),
        )]  # fmt: skip
        dead = "tenant = %(tenant)s AND expires_at <= %(at)s AND session_key = ANY (%(keys)s)"
        return self._bury(db, dead, keys=keys, at=at), keys[-1] if keys else None

    def _bury(self, db: Db, where: str, **values: Any) -> Freed:
        """Replace the selected refs by tombstones. The rows of their sessions are locked."""
        dead = db.execute(
            f"UPDATE ref SET gone = 'expired' WHERE {where} AND gone IS NULL AND NOT pinned"
            " RETURNING session_key, digest, size",
            {"tenant": self._tenant, **values},
        ).fetchall()
        return freed_of(len(dead), self._let_go(db, dead))

    def _drop_tombstones(self, db: Db, *, before: float) -> bool:
        """Drop the tombstones of the next sessions that have nothing else; return whether there were any."""
        keys = [key for (key,) in db.execute(
            "SELECT session_key FROM session WHERE tenant = %s AND ended_at < %s ORDER BY ended_at LIMIT %s"
            " FOR UPDATE SKIP LOCKED",
            (self._tenant, before, _BATCH),
        )]  # fmt: skip
        db.execute("DELETE FROM ref WHERE session_key = ANY (%s) AND gone IS NOT NULL", (keys,))
        empty = db.execute(
            "DELETE FROM session s WHERE session_key = ANY (%s)"
            " AND NOT EXISTS (SELECT 1 FROM ref r WHERE r.session_key = s.session_key)"
            " AND NOT EXISTS (SELECT 1 FROM record r WHERE r.session_key = s.session_key)"
            " RETURNING session_key, sha256(session_id)",
            (keys,),
        ).fetchall()
        db.execute("DELETE FROM shown WHERE session_key = ANY (%s)", ([key for key, _ in empty],))
        for table, more in (("held", ""), ("followed", ""), ("passage", " AND session_id <> ''")):
            db.execute(
                f"DELETE FROM {table} WHERE tenant = %s AND sha256(session_id) = ANY (%s){more}",
                (self._tenant, [session for _, session in empty]),
            )
        db.execute("UPDATE session SET ended_at = NULL WHERE session_key = ANY (%s)", (keys,))
        return bool(keys)

    def relocate(self, old: Blob, new: Blob) -> bool:
        return bool(self._ask(
            "UPDATE blob SET coding = %(coding)s, place = %(new)s, frames = %(frames)s"
            " WHERE tenant = %(tenant)s AND digest = %(digest)s AND place = %(old)s RETURNING 1",
            digest=bytes.fromhex(old.digest), old=old.place, coding=new.coding, new=new.place, frames=new.frames,
        ))  # fmt: skip

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        digest = bytes.fromhex(blob.digest)

        def change(db: Db) -> int:
            keys = [key for (key,) in db.execute(
                "SELECT session_key FROM session WHERE tenant = %s AND session_key IN"
                " (SELECT session_key FROM ref WHERE tenant = %s AND digest = %s AND gone IS NULL)"
                " ORDER BY session_key FOR UPDATE",
                (self._tenant, self._tenant, digest),
            )]  # fmt: skip
            # Small content is checked again under the lock: a put may have healed it in the meantime.
            same = db.execute(
                "SELECT data FROM blob WHERE tenant = %s AND digest = %s AND place = %s"
                " AND (data IS NULL OR sha256(data) <> digest) FOR UPDATE",
                (self._tenant, digest, blob.place),
            ).fetchone()
            if same is None:
                return 0
            self._set_aside(db, SetAside(blob, until, same[0]))
            lost = db.execute(
                "UPDATE ref SET gone = 'damaged' WHERE session_key = ANY (%s) AND digest = %s AND gone IS NULL"
                " RETURNING session_key, digest, size",
                (keys, digest),
            ).fetchall()
            self._let_go(db, lost)
            return len(lost)

        return self._connections.run(change, "setting a damaged blob aside")

    def _set_aside(self, db: Db, one: SetAside) -> None:
        db.execute(
            "INSERT INTO meta VALUES (%s, %s, %s) ON CONFLICT (tenant, key) DO UPDATE SET value = excluded.value",
            (self._tenant, _ASIDE + one.blob.digest, one.pack()),
        )

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        which = " AND key = ANY (%(keys)s)" if digests is not None else ""
        rows = self._ask(
            "SELECT key, value, (SELECT count(*) FROM ref WHERE tenant = %(tenant)s AND gone = 'damaged' AND digest ="
            " decode(substr(key, %(skip)s), 'hex')) FROM meta WHERE tenant = %(tenant)s"
            f" AND starts_with(key, %(aside)s){which}",
            aside=_ASIDE, skip=len(_ASIDE) + 1, keys=[_ASIDE + digest for digest in digests or ()],
        )  # fmt: skip
        return [SetAside.unpack(key.removeprefix(_ASIDE), packed, refs) for key, packed, refs in rows]

    def _drop_aside(self, db: Db, *, before: float) -> None:
        """Drop entries set aside until `before`, entries restored since, and entries without a tombstone."""
        over = [_ASIDE + one.blob.digest for one in self.aside() if not one.refs or one.until <= before]
        if over:
            db.execute("DELETE FROM meta WHERE tenant = %s AND key = ANY (%s)", (self._tenant, over))

    def restore(self, blob: Blob) -> int:
        digest = bytes.fromhex(blob.digest)

        def change(db: Db) -> int:
            db.execute(
                "SELECT 1 FROM session WHERE tenant = %s AND session_key IN"
                " (SELECT session_key FROM ref WHERE tenant = %s AND digest = %s AND gone = 'damaged')"
                " ORDER BY session_key FOR UPDATE",
                (self._tenant, self._tenant, digest),
            )
            new = db.execute(
                "INSERT INTO blob (tenant, digest, size, coding, place, frames, refs, used_at)"
                " SELECT %(tenant)s, %(digest)s, %(size)s, %(coding)s, %(place)s, %(frames)s, 0, %(used)s WHERE EXISTS"
                " (SELECT 1 FROM ref WHERE tenant = %(tenant)s AND digest = %(digest)s AND gone = 'damaged')"
                " ON CONFLICT DO NOTHING RETURNING 1",
                {"tenant": self._tenant, "digest": digest, "size": blob.size, "coding": blob.coding,
                 "place": blob.place, "frames": blob.frames, "used": blob.used},
            ).fetchone()  # fmt: skip
            if new is None:
                return 0
            db.execute("SELECT revive_1(%s, %s)", (self._tenant, digest))
            db.execute("DELETE FROM meta WHERE tenant = %s AND key = %s", (self._tenant, _ASIDE + blob.digest))
            row = db.execute(
                "SELECT refs FROM blob WHERE tenant = %s AND digest = %s", (self._tenant, digest)
            ).fetchone()
            return int(row[0]) if row else 0

        return self._connections.run(change, "restoring a blob")

    def sessions(self) -> Iterator[SessionInfo]:
        last = 0
        while rows := self._ask(
            f"SELECT {SESSION}, session_key FROM session s WHERE tenant = %(tenant)s AND session_key > %(last)s"
            " ORDER BY session_key LIMIT %(page)s",
            last=last, page=_PAGE,
        ):  # fmt: skip
            yield from map(session_of, rows)
            last = rows[-1][-1]

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        if digest is not None:
            one = f"SELECT {BLOB}, b.data FROM blob b WHERE tenant = %(tenant)s AND digest = %(digest)s"
            for row in self._ask(one, digest=bytes.fromhex(digest)):
                yield blob_of(row), row[6]
            return
        last = b""
        while rows := self._ask(
            f"SELECT {BLOB}, b.data FROM blob b WHERE tenant = %(tenant)s AND digest > %(last)s"
            " ORDER BY digest LIMIT 64",
            last=last,
        ):
            for row in rows:
                yield blob_of(row), row[6]
            last = rows[-1][0]

    def cold(self, before: float) -> Iterator[Blob]:
        noted = self._ask("SELECT value FROM meta WHERE tenant = %(tenant)s AND key = 'cold'")
        last, digest = (float(noted[0][0].decode()) if noted else -inf), _HIGHEST
        while rows := self._ask(
            f"SELECT {BLOB} FROM blob b WHERE tenant = %(tenant)s AND coding = 'raw' AND used_at <= %(before)s"
            " AND (used_at, digest) > (%(last)s, %(digest)s) ORDER BY used_at, digest LIMIT %(page)s",
            before=before, last=last, digest=digest, page=_PAGE,
        ):  # fmt: skip
            yield from map(blob_of, rows)
            last, digest = rows[-1][5], rows[-1][0]
        self._ask(
            "INSERT INTO meta VALUES (%(tenant)s, 'cold', %(before)s) ON CONFLICT (tenant, key)"
            " DO UPDATE SET value = excluded.value WHERE convert_from(meta.value, 'UTF8')::float8"
            " < convert_from(excluded.value, 'UTF8')::float8 RETURNING 1",
            before=repr(before).encode(),
        )

    def check(self, *, repair: bool, until: float = 0.0) -> list[str]:
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
                ("blobs with a wrong size", f"FROM blob b WHERE tenant = %(tenant)s AND size <> {_SIZE}",
                 f"UPDATE blob b SET size = {_SIZE} WHERE tenant = %(tenant)s AND size <> {_SIZE}"),
                ("wrong counts of all bytes", f"WHERE {_STORED} <> 0", _STORE_AGAIN),
            ):  # fmt: skip
                found = db.execute(f"SELECT count(*) {where}", {"tenant": self._tenant}).fetchone()
                if found and found[0]:
                    problems.append(f"{found[0]} {name}" + (": set right" if repair else ""))
                    if repair and mend.startswith("UPDATE ref"):
                        for (digest,) in db.execute(f"SELECT DISTINCT digest {where}", {"tenant": self._tenant}):
                            self._set_aside(db, SetAside(Blob(digest.hex(), 0, "raw"), until))
                    if repair:
                        db.execute(mend, {"tenant": self._tenant})
            if repair:
                db.execute("DELETE FROM blob WHERE tenant = %(tenant)s AND refs <= 0", {"tenant": self._tenant})
            return [*problems, *self._check_records(db, repair=repair)]

        return self._connections.run(change, "checking the catalog", whole=True)

    def totals(self) -> Totals:
        row = self._ask_all(
            """SELECT (SELECT count(*) FROM session WHERE tenant = %(tenant)s),
            count(*) FILTER (WHERE gone IS NULL), (SELECT count(*) FROM blob WHERE tenant = %(tenant)s),
            count(*) FILTER (WHERE gone IS NOT NULL),
            (SELECT coalesce(sum(size), 0) FROM blob WHERE tenant = %(tenant)s)::bigint,
            coalesce(sum(size) FILTER (WHERE gone IS NULL), 0)::bigint FROM ref WHERE tenant = %(tenant)s"""
        )[0]
        return Totals(*row)

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        return self._connections.ask(sql, {"tenant": self._tenant, **values})

    def _ask_all(self, sql: str, **values: Any) -> list[Any]:
        """Like `_ask`, for whole tables."""
        own = {"tenant": self._tenant, **values}
        return self._connections.run(
            lambda db: db.execute(sql, own, binary=True).fetchall(), "reading the catalog", whole=True
        )

    def _locked(self, db: Db, session_id: str) -> int | None:
        row = db.execute(
            f"SELECT session_key FROM session s WHERE {OF_SESSION} FOR UPDATE",
            {"tenant": self._tenant, "session": packed(session_id)},
        ).fetchone()
        return None if row is None else int(row[0])
