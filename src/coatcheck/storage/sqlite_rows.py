"""The rows of a catalog in the tables of an SQLite database."""

from __future__ import annotations

import json
import sqlite3
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from coatcheck.errors import Damaged, StoreClosed, StoreError, StoreFull, StoreUnavailable
from coatcheck.refs import Blob
from coatcheck.storage.entries import (
    ANY_SESSION,
    Entry,
    Freed,
    Note,
    Row,
    SessionFilter,
    SessionInfo,
)
from coatcheck.storage.rows import Rows
from coatcheck.storage.sql import InList, blob_from, entry_from, ref_values, session_from

Values = tuple[Any, ...] | dict[str, Any]


class SqliteRows(Rows):
    """Sessions, refs and small blobs in the tables of one SQLite database."""

    _writer: sqlite3.Connection | None = None
    uri_prefix = "memory:#blob="

    @abstractmethod
    def _query(self, sql: str, values: Values = (), *, apart: bool = False) -> list[Any]:
        """Return the rows of a query. Inside a change, it sees the change, unless it is kept
        `apart`."""

    def _opened_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise StoreClosed("the store is closed")
        return self._writer

    def _run(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._opened_writer().execute(sql, values)

    def _run_each(self, sql: str, values: Iterable[Values]) -> None:
        self._opened_writer().executemany(sql, values)

    def _one(self, sql: str, values: Values = ()) -> Any:
        return self._run(sql, values).fetchone()

    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        if session_id is not None:
            found = self._query(
                "SELECT * FROM session WHERE session_id = :session_id", {"session_id": session_id}
            )
            yield from map(session_from, found)
            return
        last = -1
        while page := self._query(
            # The id of a session that has ended is a BLOB, which is greater than all text.
            """SELECT * FROM session WHERE session_key > :last AND session_id < x''
                ORDER BY session_key LIMIT 64""",
            {"last": last},
        ):
            yield from map(session_from, page)
            last = page[-1]["session_key"]

    def session_page(
        self,
        prefix: str,
        before: tuple[float, str] | None,
        limit: int,
        wanted: SessionFilter = ANY_SESSION,
    ) -> list[SessionInfo]:
        created, session_id = (inf, "") if before is None else before
        parents = InList("parent", wanted.parents or ())
        found = self._query(
            f"""SELECT * FROM session INDEXED BY session_by_creation
                WHERE session_id < x'' AND (created, session_id) < (:created, :session_id)
                AND instr(CAST(session_id AS BLOB), :prefix) = 1
                AND instr(CAST(session_id AS BLOB), :contains) > 0
                AND NOT EXISTS (SELECT 1 FROM json_each(:without) AS excluded
                    WHERE instr(CAST(session_id AS BLOB), CAST(excluded.value AS BLOB)) = 1)
                AND (NOT :roots OR parent IS NULL OR instr(CAST(parent AS BLOB), :prefix) <> 1
                    OR parent NOT IN (SELECT listed.session_id FROM session AS listed))
                AND (NOT :has_parents OR parent IN ({parents.sql}))
                AND (:used_after IS NULL OR used > :used_after)
                ORDER BY created DESC, session_id DESC LIMIT :limit""",
            {
                "created": created,
                "session_id": session_id,
                "prefix": prefix.encode(),
                "contains": wanted.contains.encode(),
                "without": json.dumps(wanted.without),
                "roots": wanted.roots,
                "has_parents": wanted.parents is not None,
                "used_after": wanted.used_after,
                "limit": limit,
                **parents.values,
            },
        )
        return [session_from(row) for row in found]

    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        values = {
            "session_id": session_id,
            "digest": None if digest is None else bytes.fromhex(digest),
        }
        if session_id is None:
            return self._entries(
                "SELECT * FROM entry WHERE digest = :digest ORDER BY seq DESC", values
            )
        if digest is None:
            return self._entries(
                "SELECT * FROM entry WHERE session_id = :session_id ORDER BY seq DESC", values
            )
        return self._entries(
            # Without `unlikely`, SQLite reads all refs of the session in the order of their seq.
            "SELECT * FROM entry WHERE session_id = :session_id AND unlikely(digest = :digest)"
            " ORDER BY seq DESC",
            values,
        )

    def _entries(self, sql: str, values: Values) -> list[Entry]:
        rows = self._query(sql, values)
        try:
            return [entry_from(dict(zip(row.keys(), row, strict=True))) for row in rows]
        except (
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # a damaged index led to a row that does not exist
            raise Damaged(
                "the catalog has an invalid row", hint="run 'coatcheck verify'"
            ) from error

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        for blob_key in self._blob_keys(digest):
            for row, content in self._blob_with_content(blob_key):
                if not isinstance(row["digest"], bytes):
                    raise Damaged(
                        "the catalog has an invalid row", hint="restore the store from a backup"
                    )
                if content is not None and not isinstance(content, (bytes, StoreError)):
                    content = Damaged("the content has a wrong type")
                yield blob_from(row), content

    def _blob_keys(self, digest: str | None) -> Iterator[int]:
        if digest is not None:
            found = self._query(
                "SELECT blob_key FROM blob WHERE digest = :digest",
                {"digest": bytes.fromhex(digest)},
            )
            yield from (row["blob_key"] for row in found)
            return
        last = -1
        while page := self._query(
            "SELECT blob_key FROM blob WHERE blob_key > :last ORDER BY blob_key LIMIT 64",
            {"last": last},
        ):
            yield from (row["blob_key"] for row in page)
            last = page[-1]["blob_key"]

    def _blob_with_content(self, blob_key: int) -> list[tuple[Any, Any]]:
        """Return the row of a blob with its content, or with the error of reading that. Row and
        content are read in one statement: keys are reused, so the content may be another blob's by
        then. They are read apart from the writer, because a failed read would spoil its
        transaction."""
        key = {"blob_key": blob_key}
        try:
            found = self._query(
                """SELECT blob.*, content.data FROM blob LEFT JOIN content
                    ON content.blob_key = blob.blob_key AND blob.coding = 'inline'
                    WHERE blob.blob_key = :blob_key""",
                key,
                apart=True,
            )
        except StoreError as error:
            return [
                (row, error)
                for row in self._query(
                    "SELECT * FROM blob WHERE blob_key = :blob_key", key, apart=True
                )
            ]
        return [(row, row["data"]) for row in found]

    def blob(self, digest: str) -> Blob | None:
        found = self._query(
            "SELECT * FROM blob WHERE digest = :digest", {"digest": bytes.fromhex(digest)}
        )
        return blob_from(found[0]) if found else None

    def notes(
        self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False
    ) -> list[Note]:
        values = {
            "owner": owner,
            "start": start,
            "stop": stop,
            "limit": -1 if limit is None else limit,
        }
        if newest:
            found = self._query(
                """SELECT key, value FROM note WHERE key >= :start AND key < :stop AND session_key =
                    iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))
                    ORDER BY key DESC LIMIT :limit""",
                values,
            )
        else:
            found = self._query(
                """SELECT key, value FROM note WHERE key >= :start AND key < :stop AND session_key =
                    iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))
                    ORDER BY key LIMIT :limit""",
                values,
            )
        return [Note(owner, row["key"], row["value"]) for row in found]

    def save(self, *rows: Row) -> None:
        for row in rows:
            if isinstance(row, SessionInfo):
                self._save_session(row)
            elif isinstance(row, Blob):
                self._save_blob(row)
            elif isinstance(row, Note):
                self._save_note(row)
            else:
                self._save_ref(row)

    def _save_session(self, info: SessionInfo) -> None:
        self._run(
            """INSERT INTO session (session_id, parent, ttl, quota, created, used, used_bytes)
                VALUES (:session_id, :parent, :ttl, :quota, :created, :used, :used_bytes)
                ON CONFLICT (session_id) DO UPDATE SET parent = excluded.parent, ttl = excluded.ttl,
                quota = excluded.quota, used = excluded.used, used_bytes = excluded.used_bytes""",
            {
                "session_id": info.session_id,
                "parent": info.parent,
                "ttl": info.ttl,
                "quota": info.quota,
                "created": info.created,
                "used": info.used,
                "used_bytes": info.used_bytes,
            },
        )

    def _save_blob(self, blob: Blob) -> None:
        self._run(
            """INSERT INTO blob (digest, size, coding, place, frames, used, refs)
                VALUES (:digest, :size, :coding, :place, :frames, :used, 0)
                ON CONFLICT (digest) DO UPDATE SET coding = excluded.coding, place = excluded.place,
                frames = excluded.frames, used = max(used, excluded.used)""",
            {
                "digest": bytes.fromhex(blob.digest),
                "size": blob.size,
                "coding": blob.coding,
                "place": blob.place,
                "frames": blob.frames,
                "used": blob.used,
            },
        )

    def _save_note(self, note: Note) -> None:
        self._run(
            """INSERT OR REPLACE INTO note SELECT session_key, :key, :value FROM
                (SELECT iif(:owner = '', 0,
                    (SELECT session_key FROM session WHERE session_id = :owner)) AS session_key)
                WHERE session_key IS NOT NULL""",
            {"owner": note.owner, "key": note.key, "value": note.value},
        )

    def _save_ref(self, entry: Entry) -> None:
        self._run(
            """INSERT INTO ref (session_key, seq, digest, size, name, codec, media_type, kind, tool,
                    call_id, producer, parents, summary, created, expires, pinned, granted_by,
                    request, metadata_json, gone)
                SELECT session_key, :seq, :digest, :size, :name, :codec, :media_type, :kind, :tool,
                    :call_id, :producer, :parents, :summary, :created, :expires, :pinned,
                    :granted_by, :request, :metadata_json, :gone
                FROM session WHERE session_id = :session_id
                ON CONFLICT (session_key, seq) DO UPDATE
                SET pinned = excluded.pinned, granted_by = excluded.granted_by,
                gone = excluded.gone""",
            ref_values(entry.ref)
            | {"session_id": entry.session.session_id, "seq": entry.seq, "gone": entry.gone},
        )

    def drop(self, *rows: Row) -> None:
        for row in rows:
            if isinstance(row, SessionInfo):
                self._drop_notes(row.session_id, "", "\x7f")
                self._run(
                    "DELETE FROM session WHERE session_id = :session_id",
                    {"session_id": row.session_id},
                )
            elif isinstance(row, Blob):
                digest = {"digest": bytes.fromhex(row.digest)}
                self._drop_content("SELECT blob_key FROM blob WHERE digest = :digest", digest)
                self._run("DELETE FROM blob WHERE digest = :digest", digest)
            elif isinstance(row, Note):
                self._drop_notes(row.owner, row.key, row.key + " ")
            else:
                self._run(
                    """DELETE FROM ref WHERE seq = :seq
                        AND session_key = (SELECT session_key FROM session
                        WHERE session_id = :session_id)""",
                    {"seq": row.seq, "session_id": row.session.session_id},
                )

    def _drop_notes(self, owner: str, start: str, stop: str) -> None:
        self._run(
            """DELETE FROM note WHERE key >= :start AND key < :stop AND session_key =
                iif(:owner = '', 0, (SELECT session_key FROM session WHERE session_id = :owner))""",
            {"owner": owner, "start": start, "stop": stop},
        )

    def _let_go(self, refs: Sequence[Entry]) -> Freed:
        gone = []
        for one in refs:
            digest = bytes.fromhex(one.ref.artifact_id)
            gone.append(
                {"session_id": one.session.session_id, "digest": digest, "size": one.ref.size_bytes}
            )
        return self._let_go_of(gone)

    def _let_go_of(self, refs: Sequence[Any]) -> Freed:
        """Update the counts after live refs were removed: rows with the session id, digest and size
        of each."""
        self._run_each(
            "UPDATE blob SET refs = refs - 1 WHERE digest = :digest",
            [{"digest": ref["digest"]} for ref in refs],
        )
        distinct = {(ref["session_id"], ref["digest"]): ref["size"] for ref in refs}
        self._run_each(
            """UPDATE session SET used_bytes = used_bytes - :size WHERE session_id = :session_id
                AND NOT EXISTS (SELECT 1 FROM ref INDEXED BY ref_by_digest
                WHERE session_key = session.session_key AND digest = :digest AND gone IS NULL)""",
            [
                {"session_id": session_id, "digest": digest, "size": size}
                for (session_id, digest), size in distinct.items()
            ],
        )
        return Freed.of(len(refs), self._drop_unreferenced())

    def _drop_unreferenced(self) -> list[Blob]:
        found = self._run("SELECT * FROM blob WHERE refs = 0").fetchall()
        if found:
            self._drop_content("SELECT blob_key FROM blob WHERE refs = 0 AND coding = 'inline'")
            self._run("DELETE FROM blob WHERE refs = 0")
        return [blob_from(row) for row in found]

    def _drop_content(self, which: str, values: Values = ()) -> None:
        """Delete content, except where it cannot be read: freeing damaged pages would damage
        others."""
        keys = [row[0] for row in self._run(which, values).fetchall()]
        if not self._are_readable(keys):
            keys = [key for key in keys if self._are_readable([key])]
        self._run_each(
            "DELETE FROM content WHERE blob_key = :blob_key", [{"blob_key": key} for key in keys]
        )

    def _are_readable(self, blob_keys: Sequence[int | None]) -> bool:
        """Return whether contents can be read, on another connection: a failed read would spoil the
        transaction."""
        try:
            self._query(
                "SELECT max(data) FROM content"
                " WHERE blob_key IN (SELECT value FROM json_each(:blob_keys))",
                {"blob_keys": json.dumps(blob_keys)},
                apart=True,
            )
        except Damaged:
            return False
        return True

    def _revive(self, digest: str) -> int:
        back = super()._revive(digest)
        if back:
            self._run(
                "UPDATE blob SET refs = refs + :back WHERE digest = :digest",
                {"back": back, "digest": bytes.fromhex(digest)},
            )
        return back

    def _damaged(self, digest: str) -> list[Entry]:
        return self._entries(
            "SELECT * FROM entry WHERE digest = :digest AND gone = 'damaged'",
            {"digest": bytes.fromhex(digest)},
        )


def inside_another_call() -> StoreUnavailable:
    return StoreUnavailable(
        "this thread is in the middle of another call to the store",
        hint="do not use a store from a signal handler or a callback that runs inside one of its "
        "calls",
    )


def translated(error: sqlite3.Error | UnicodeDecodeError, doing: str) -> StoreError:
    """Return our error for an SQLite error. Text that is not UTF-8, even in a message of SQLite, is
    damage."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return StoreFull(f"no space left while {doing}")
    if isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.DatabaseError) and is_damage(error)
    ):
        return Damaged(
            f"the catalog is damaged: {error}",
            hint="restore it from an export, or open a new store",
        )
    return StoreUnavailable(
        f"the catalog failed while {doing}: {error}", hint="check the folder and try again"
    )


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether SQLite reports a damaged file, as opposed to one that is busy, full or
    misused."""
    return (getattr(error, "sqlite_errorname", "") or "").startswith(
        ("SQLITE_CORRUPT", "SQLITE_NOTADB")
    )
