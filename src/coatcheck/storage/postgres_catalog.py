"""The catalog in PostgreSQL.

A put is one call of a function in the database: one round trip. Content up to `inline_limit` is
sent with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import psycopg

from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.storage.catalog import Catalog, check_quota
from coatcheck.storage.entries import (
    NO_LIMITS,
    NOTHING_SHOWN,
    TRANSCRIPT,
    Entry,
    Freed,
    Limits,
    Note,
    Ranges,
    Totals,
    newest_in_each,
    newest_of_each,
)
from coatcheck.storage.postgres import Db
from coatcheck.storage.postgres_rows import (
    ENDED,
    ENTRY,
    IN_SESSION,
    hashes_of,
    limit_clause,
    rows_of,
)
from coatcheck.storage.postgres_upkeep import PostgresUpkeep
from coatcheck.storage.sql import entry_from, ref_values

_GONE, _OVER, _ALONE = "CC001", "CC002", "CC003"


class PostgresCatalog(PostgresUpkeep, Catalog):
    """Sessions, refs, names, records and small content of one tenant."""

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
            where = f"{IN_SESSION} AND r.digest BETWEEN %(low)s AND %(high)s ORDER BY r.seq DESC"
            found = self._entries(where, content=content, session_id=session_id, low=low, high=high)
            return newest_of_each(found)[:limit]
        where, values = IN_SESSION, {"session_id": session_id, "name": name, "before": before}
        if name is not None:
            where += " AND sha256(r.name) = sha256(%(name)s) AND r.name = %(name)s"
        elif before is not None:
            where += " AND r.seq < %(before)s"
        # A literal bound: with an unknown one, the planner may sort the session's refs first.
        return self._entries(
            f"{where} ORDER BY r.seq DESC {limit_clause(limit)}", content=content, **values
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
            f"SELECT {ENTRY} FROM session s,"
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
            ended=ENDED,
        )[0]
        return Totals(**row)

    # Writing

    def _next_token(self) -> int:
        return int(self._ask("SELECT nextval('fence') AS token")[0]["token"])

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
                ended=ENDED,
                session_id=session_id,
            )
            return hidden[0]["session_key"] if hidden else None

        return self._end_all(self.change("forgetting", hide, session_id=session_id, effect="free"))

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
    rows = rows_of(
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
