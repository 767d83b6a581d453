"""A catalog in an SQLite database. `memory` and `folder` say where the database is."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from coatcheck.ids import MIN_PREFIX, prefix_range
from coatcheck.storage import expiry
from coatcheck.storage.catalog import Catalog, check_quota
from coatcheck.storage.entries import (
    NO_LIMITS,
    TRANSCRIPT,
    Entry,
    Freed,
    Limits,
    Note,
    Totals,
    newest_in_each,
    newest_of_each,
)
from coatcheck.storage.sql import InList, ref_values
from coatcheck.storage.sqlite_upkeep import SqliteUpkeep


class SqliteCatalog(SqliteUpkeep, Catalog):
    """Sessions, refs and small blobs in the tables of one SQLite database."""

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
            return self._find_prefix(session_id, prefix, content=content)[:limit]
        values = {
            "session_id": session_id,
            "name": name,
            "before": before,
            "limit": -1 if limit is None else limit,
        }
        if name is not None:
            return self._entries(
                """SELECT entry.*, content.data AS content
                    FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                    WHERE session_id = :session_id AND unlikely(name = :name)
                        ORDER BY seq DESC LIMIT :limit""",
                values | {"content": content},
            )
        return self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE session_id = :session_id AND seq < coalesce(:before, 9e18)
                    ORDER BY seq DESC LIMIT :limit""",
            values | {"content": content},
        )

    def _find_prefix(self, session_id: str, prefix: str, *, content: bool) -> list[Entry]:
        low, high = prefix_range(prefix)
        found = self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE session_id = :session_id AND digest BETWEEN :low AND :high""",
            {"session_id": session_id, "low": low, "high": high, "content": content},
        )
        found.sort(key=_newest_first)
        return newest_of_each(found)

    def find_many(
        self, sessions: Iterable[str], prefixes: Iterable[str], *, content: bool = False
    ) -> list[Entry]:
        lineage = list(sessions)
        listed = InList("session", lineage)
        found: list[Entry] = []
        for prefix in prefixes:
            low, high = prefix_range(prefix)
            entries = self._entries(
                f"""SELECT entry.*, content.data AS content
                    FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                    WHERE session_id IN ({listed.sql}) AND digest BETWEEN :low AND :high""",
                {"low": low, "high": high, "content": content, **listed.values},
            )
            entries.sort(key=_newest_first)
            found += entries
        return newest_in_each(lineage, found)

    def near(self, sessions: Iterable[str], digests: Iterable[str]) -> set[str]:
        listed = InList("session", sessions)
        found: set[str] = set()
        for start in {digest[:MIN_PREFIX] for digest in digests}:
            low, high = prefix_range(start)
            rows = self._query(
                f"""SELECT ref.digest FROM session JOIN ref ON ref.session_key = session.session_key
                    WHERE session.session_id IN ({listed.sql})
                    AND ref.digest BETWEEN :low AND :high""",
                {"low": low, "high": high, **listed.values},
            )
            found.update(row["digest"].hex() for row in rows)
        return found

    def _granted(self, session_id: str, prefix: str = "", *, content: bool = False) -> list[Entry]:
        low, high = prefix_range(prefix)
        return self._entries(
            """SELECT entry.*, content.data AS content
                FROM entry LEFT JOIN content ON :content AND content.blob_key = entry.blob_key
                WHERE granted_by = :granted_by AND digest BETWEEN :low AND :high
                AND substr(session_id, 1, length(:transcript)) = :transcript
                    ORDER BY created DESC, +seq DESC""",
            {
                "granted_by": session_id,
                "low": low,
                "high": high,
                "transcript": TRANSCRIPT,
                "content": content,
            },
        )

    def is_named(self, place: str) -> bool:
        return bool(
            self._query("SELECT 1 FROM blob WHERE place = :place LIMIT 1", {"place": place})
        )

    def _first_notes(self, owner: str, prefixes: Sequence[str]) -> list[Note]:
        found = self._query(
            """WITH owner AS (SELECT session_key FROM session WHERE session_id = :owner)
                SELECT note.key, note.value FROM json_each(:prefixes) AS asked, owner
                JOIN note ON note.session_key = owner.session_key AND note.key =
                (SELECT min(key) FROM note WHERE session_key = owner.session_key
                    AND key >= asked.value AND key < asked.value || 'g')""",
            {"owner": owner, "prefixes": json.dumps(prefixes)},
        )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def totals(self) -> Totals:
        (row,) = self._query(
            """SELECT (SELECT count(*) FROM session WHERE session_id < x'') AS sessions,
                (SELECT count(*) FROM ref WHERE gone IS NULL) AS refs,
                (SELECT count(*) FROM blob) AS artifacts,
                (SELECT count(*) FROM ref WHERE gone IS NOT NULL) AS tombstones,
                (SELECT coalesce(sum(size), 0) FROM blob) AS stored_bytes,
                (SELECT coalesce(sum(size), 0) FROM ref WHERE gone IS NULL) AS referenced_bytes"""
        )
        return Totals(**dict(row))

    # Putting

    def put(
        self, entry: Entry, *, limits: Limits = NO_LIMITS, reuse: bool = False, heal: bool = False
    ) -> bool:
        def work() -> bool:
            known = self._known(entry)
            if reuse and known["place"] != entry.blob.place:
                return False
            self._check_quotas(entry, limits, known)
            end = expiry.session_end(known["ttl"], known["used"] or 0.0)
            if known["session_key"] is None or expiry.is_over(
                end, entry.ref.created - limits.grace
            ):
                self._use(entry.session, entry.ref.created, limits.grace)
                known = self._known(entry)  # if the session had expired, the blob may be gone
            if known["blob_key"] is None:
                self._add_blob(entry, revive=known["is_damaged"])
            else:
                self._update_blob(known["blob_key"], entry, heal=heal)
            self._add_ref(
                entry, known, is_counted=known["blob_key"] is None and not known["is_damaged"]
            )
            return True

        return self.change("putting an artifact", work, effect="add")

    def _known(self, entry: Entry) -> sqlite3.Row:
        """Return what a put needs to know about its session and its blob, NULL if they do not exist
        yet."""
        found: sqlite3.Row = self._one(
            """SELECT session.session_key, session.ttl, session.used, session.used_bytes,
                session.next_seq, blob.blob_key, blob.place,
                EXISTS (SELECT 1 FROM ref
                    WHERE ref.digest = :digest AND ref.gone = 'damaged') AS is_damaged,
                EXISTS (SELECT 1 FROM ref INDEXED BY ref_by_digest
                    WHERE ref.session_key = session.session_key
                    AND ref.digest = :digest) AS has_refs
                FROM (SELECT 1) LEFT JOIN session ON session.session_id = :session_id
                LEFT JOIN blob ON blob.digest = :digest""",
            {
                "session_id": entry.session.session_id,
                "digest": bytes.fromhex(entry.ref.artifact_id),
            },
        )
        return found

    def _check_quotas(self, entry: Entry, limits: Limits, known: sqlite3.Row) -> None:
        quota = entry.session.quota
        if quota is not None and not self._newest_live(known["session_key"], entry.ref.artifact_id):
            check_quota("session", quota, known["used_bytes"] or 0, entry)
        if limits.store_quota is not None and known["blob_key"] is None:
            (used,) = self._one("SELECT value FROM meta WHERE key = 'stored_bytes'")
            check_quota("store", limits.store_quota, used, entry)

    def _newest_live(self, session_key: int | None, artifact_id: str) -> Any:
        """Return the row of a session's newest live ref to an artifact, or None."""
        return self._one(
            """SELECT * FROM ref INDEXED BY ref_by_digest
                WHERE session_key = :session_key AND digest = :digest AND gone IS NULL
                ORDER BY seq DESC LIMIT 1""",
            {"session_key": session_key, "digest": bytes.fromhex(artifact_id)},
        )

    def _add_blob(self, entry: Entry, *, revive: bool) -> None:
        """Add the blob of a put and its content. The ref of the put is counted already, unless
        `revive` restores refs that had lost the blob: the put may repeat one of them."""
        blob = entry.blob
        blob_key = self._run(
            """INSERT INTO blob (digest, size, coding, place, frames, refs, used)
                VALUES (:digest, :size, :coding, :place, :frames, :refs, :used)""",
            {
                "digest": bytes.fromhex(blob.digest),
                "size": blob.size,
                "coding": blob.coding,
                "place": blob.place,
                "frames": blob.frames,
                "refs": 0 if revive else 1,
                "used": entry.ref.created,
            },
        ).lastrowid
        if entry.content is not None:
            try:
                self._run(
                    "INSERT INTO content VALUES (:blob_key, :data)",
                    {"blob_key": blob_key, "data": entry.content},
                )
            except sqlite3.IntegrityError:  # damaged content was left behind under this key
                self._replace_content(blob_key, entry.content)
        if revive and self._revive(blob.digest):
            self._set_size(bytes.fromhex(blob.digest), blob.size)

    def _update_blob(self, blob_key: int, entry: Entry, *, heal: bool) -> None:
        blob = entry.blob
        if entry.content is not None or heal:
            self._run(
                """UPDATE blob SET coding = :coding, place = :place, frames = :frames
                    WHERE blob_key = :blob_key AND place <> :place""",
                {
                    "coding": blob.coding,
                    "place": blob.place,
                    "frames": blob.frames,
                    "blob_key": blob_key,
                },
            )
        if entry.content is not None:
            self._replace_content(blob_key, entry.content)

    def _replace_content(self, blob_key: int | None, data: bytes) -> None:
        """Replace a blob's content. If the old content's pages are damaged, they are left alone and
        the blob moves to a new key: damage to one artifact must not affect the others."""
        if not self._are_readable([blob_key]):
            (new_key,) = self._one(
                "SELECT 1 + max((SELECT max(blob_key) FROM blob),"
                " (SELECT max(blob_key) FROM content))"
            )
            self._run(
                "UPDATE blob SET blob_key = :new_key WHERE blob_key = :blob_key",
                {"new_key": new_key, "blob_key": blob_key},
            )
            blob_key = new_key
        self._run(
            """INSERT INTO content VALUES (:blob_key, :data)
                ON CONFLICT (blob_key) DO UPDATE SET data = excluded.data
                WHERE data <> excluded.data""",
            {"blob_key": blob_key, "data": data},
        )

    def _add_ref(self, entry: Entry, known: sqlite3.Row, *, is_counted: bool) -> None:
        """Add a ref, unless it repeats the newest live one of its artifact, and mark the session as
        used."""
        values = ref_values(entry.ref)
        session_key = known["session_key"]
        newest = (
            self._newest_live(session_key, entry.ref.artifact_id) if known["has_refs"] else None
        )
        if newest is not None:
            if newest["size"] != values["size"]:
                self._set_size(values["digest"], values["size"])
            # A pin covers later refs of the artifact.
            values["pinned"] = values["pinned"] or bool(newest["pinned"])
            if self._is_repeated(newest, values):
                self._run(
                    "UPDATE session SET used = max(used, :at) WHERE session_key = :session_key",
                    {"at": values["created"], "session_key": session_key},
                )
                return
        elif known["has_refs"]:
            self._run(
                "DELETE FROM ref INDEXED BY ref_by_digest"
                " WHERE session_key = :session_key AND digest = :digest",
                {"session_key": session_key, "digest": values["digest"]},
            )
        self._run(
            """INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, tool,
                    call_id, producer, parents, summary, created, expires, pinned, granted_by,
                    request, metadata_json, gone)
                VALUES (:session_key, :seq, :digest, :size, :name, :codec, :media_type, :kind,
                    :tool, :call_id, :producer, :parents, :summary, :created, :expires, :pinned,
                    :granted_by, :request, :metadata_json, NULL)""",
            values | {"session_key": session_key, "seq": known["next_seq"]},
        )
        if not is_counted:
            self._run(
                "UPDATE blob SET refs = refs + 1 WHERE digest = :digest",
                {"digest": values["digest"]},
            )
        self._run(
            """UPDATE session SET used = max(used, :at), next_seq = next_seq + 1,
                used_bytes = used_bytes + :more
                WHERE session_key = :session_key""",
            {
                "at": values["created"],
                "more": values["size"] if newest is None else 0,
                "session_key": session_key,
            },
        )

    def _is_repeated(self, known: Any, values: dict[str, Any]) -> bool:
        """Return whether a put says nothing new about an artifact, and no later ref uses its
        name."""
        for column, value in values.items():
            if column not in ("created", "size") and known[column] != value:
                return False
        if known["name"] is None:
            return True
        (newest,) = self._one(
            "SELECT max(seq) FROM ref WHERE session_key = :session_key AND unlikely(name = :name)",
            {"session_key": known["session_key"], "name": known["name"]},
        )
        return bool(newest == known["seq"])

    # Removing

    def remove(
        self,
        session_id: str,
        digest: str | None = None,
        *,
        name: str | None = None,
        end: bool = False,
    ) -> Freed:
        if not end:
            return super().remove(session_id, digest, name=name)

        def end_some(limit: int, _: object) -> tuple[Freed, bool | None]:
            """Give the session an id that no text equals, so that nobody finds it, and remove some
            of its refs."""
            self._stop_lending(session_id)
            self._run(
                """UPDATE session SET session_id = CAST(session_key AS BLOB), parent = NULL
                    WHERE session_id = :session_id""",
                {"session_id": session_id},
            )
            return self._end_next(limit, True)

        return self._in_steps("forgetting", end_some)


def _newest_first(entry: Entry) -> int:
    """Return the key to sort entries by in Python: to sort them, SQLite would copy their
    content."""
    return -entry.seq
