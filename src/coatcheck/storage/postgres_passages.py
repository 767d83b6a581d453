"""The full-text index of a fleet, in the database of its catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from coatcheck.errors import StoreUnavailable
from coatcheck.storage import Held, Mark, Match, Passage
from coatcheck.storage.passages import held_from, held_together, label_of, spread, terms_of
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_rows import hashes_of, rows_of

_LONGEST: Final = 500_000  # indexed characters per passage: a tsvector is limited to one megabyte
_SWEPT_AT_ONCE: Final = 1000
_SWEPT_EVERY: Final = 86_400  # seconds


class PostgresPassages:
    """The full-text index of one tenant."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant

    def followed(self, session_id: str) -> Mark | None:
        rows = self._ask(
            """SELECT created, seq, digest FROM followed
                WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session)s)""",
            session=session_id.encode(),
        )
        return Mark(rows[0]["created"], rows[0]["seq"], rows[0]["digest"].hex()) if rows else None

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = list(digests)
        known = self._ask(
            "SELECT digest FROM indexed WHERE tenant = %(tenant)s AND digest = ANY (%(wanted)s)",
            wanted=[bytes.fromhex(digest) for digest in wanted],
        )
        held = {row["digest"].hex() for row in known}
        return [digest for digest in wanted if digest not in held]

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        found = {digest: list(passages) for digest, passages in sorted(contents.items())}

        def insert(db: Db) -> None:
            new = db.execute(
                "INSERT INTO indexed SELECT %s, unnest(%s) ON CONFLICT DO NOTHING RETURNING digest",
                (self._tenant, [bytes.fromhex(digest) for digest in found]),
            ).fetchall()
            self._insert(
                db, b"", [(digest, passage) for (digest,) in new for passage in found[digest.hex()]]
            )

        self._connections.run(insert, "indexing artifacts")

    def hold(
        self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool
    ) -> None:
        session = session_id.encode()

        def note(db: Db) -> None:
            # One at a time: the results of two machines for one session must not be mixed.
            db.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(encode(%s, 'hex'), 1))", (session,)
            )
            known = self._held(db, session)
            if complete:
                self._leave(
                    db, session, [bytes.fromhex(digest) for digest in known.keys() - holds.keys()]
                )
                self._save_held(db, session, known, holds)
            else:
                together = {
                    digest: held_together(known.get(digest), held) for digest, held in holds.items()
                }
                self._save_held(db, session, known, together)
            if mark is not None:
                self._save_mark(db, session, mark)

        self._connections.run(note, "indexing a session")

    def _held(self, db: Db, session: bytes) -> dict[str, Held]:
        """Return what the index has for a session, by digest."""
        rows = rows_of(
            db,
            """SELECT digest, label, expires FROM held
                WHERE tenant = %(tenant)s AND sha256(session_id) = sha256(%(session)s)""",
            {"tenant": self._tenant, "session": session},
        )
        return {
            row["digest"].hex(): held_from(row["label"].decode(), row["expires"]) for row in rows
        }

    def _save_held(
        self, db: Db, session: bytes, known: Mapping[str, Held], holds: Mapping[str, Held]
    ) -> None:
        """Save a session's artifacts, and index the labels that differ from the known ones."""
        rows: list[dict[str, Any]] = []
        changed: dict[bytes, str] = {}
        for digest, held in sorted(holds.items()):
            key = bytes.fromhex(digest)
            label = label_of(held)
            rows.append(
                {
                    "tenant": self._tenant,
                    "session": session,
                    "digest": key,
                    "label": label.encode("utf-8", "replace"),
                    "expires": held.expires,
                }
            )
            if digest not in known or label_of(known[digest]) != label:
                changed[key] = label
        with db.cursor() as cursor:
            cursor.executemany(
                """INSERT INTO held VALUES (%(tenant)s, %(session)s, %(digest)s, %(label)s,
                    %(expires)s)
                    ON CONFLICT (tenant, sha256(session_id), digest)
                    DO UPDATE SET label = excluded.label, expires = excluded.expires""",
                rows,
            )
        self._drop_labels(db, session, list(changed))
        self._insert(
            db,
            session,
            [(key, Passage(0, 0, 0, 0, label)) for key, label in changed.items() if label],
        )

    def _save_mark(self, db: Db, session: bytes, mark: Mark) -> None:
        db.execute(
            """INSERT INTO followed VALUES (%(tenant)s, %(session)s, %(created)s, %(seq)s,
                %(digest)s)
                ON CONFLICT (tenant, sha256(session_id))
                DO UPDATE SET created = excluded.created, seq = excluded.seq,
                digest = excluded.digest""",
            {
                "tenant": self._tenant,
                "session": session,
                "created": mark.created,
                "seq": mark.seq,
                "digest": bytes.fromhex(mark.digest),
            },
        )

    def count(self, sessions: Iterable[str], at: float) -> int:
        rows = self._ask(
            """SELECT count(DISTINCT digest) AS number FROM held WHERE tenant = %(tenant)s
                AND sha256(session_id) = ANY (%(sessions)s)
                AND (expires IS NULL OR expires >= %(at)s)""",
            sessions=hashes_of(sessions),
            at=at,
        )
        return int(rows[0]["number"])

    def leave(self, session_id: str, digest: str | None = None) -> None:
        session = session_id.encode()

        def drop(db: Db) -> None:
            if digest is not None:
                self._leave(db, session, [bytes.fromhex(digest)])
                return
            own = {"tenant": self._tenant, "session": session}
            db.execute(
                "DELETE FROM held WHERE tenant = %(tenant)s"
                " AND sha256(session_id) = sha256(%(session)s)",
                own,
            )
            db.execute(
                "DELETE FROM followed WHERE tenant = %(tenant)s"
                " AND sha256(session_id) = sha256(%(session)s)",
                own,
            )
            db.execute(
                """DELETE FROM passage WHERE tenant = %(tenant)s
                    AND sha256(session_id) = sha256(%(session)s)
                    AND session_id <> ''""",
                own,
            )

        try:
            self._connections.run(drop, "sweeping the index")
        except StoreUnavailable:
            pass  # the caller checks each match anyway: forgetting must not fail here

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        terms = list(dict.fromkeys(terms_of(words)))[:64]
        if not terms:
            return []
        rows = self._ask(
            # Each word is its own query, so a model's words are never parsed as operators. The
            # ranking is like BM25: a word counts more if fewer passages of these sessions contain
            # it, and repeating it in one passage counts less each time.
            """WITH asked AS MATERIALIZED (SELECT DISTINCT plainto_tsquery('english', term) AS word
                    FROM unnest(%(terms)s::text[]) AS t (term)
                    WHERE numnode(plainto_tsquery('english', term)) > 0),
                own AS MATERIALIZED (SELECT DISTINCT digest FROM held
                    WHERE tenant = %(tenant)s AND sha256(session_id) = ANY (%(sessions)s)),
                found AS MATERIALIZED (SELECT p.passage_key, p.digest, p.first, p.last, p.start,
                    p.stop, asked.word, ts_rank('{1,1,1,1}', p.words, asked.word) AS often,
                    length(p.words)::float8 AS size
                    FROM own JOIN passage p ON p.tenant = %(tenant)s AND p.digest = own.digest
                    JOIN asked ON p.words @@ asked.word
                    WHERE p.session_id = '' OR sha256(p.session_id) = ANY (%(sessions)s)),
                rarity AS (SELECT word, ln(1 + (greatest(0,
                    (SELECT count(*) FROM own) - count(*)) + 0.5)::float8
                    / (count(*) + 0.5)::float8) AS weight FROM found GROUP BY word)
                SELECT digest, first, last, start, stop, -sum(weight * often
                    / (often + 0.3 * (0.75 + 0.25 * size /
                        (SELECT avg(size) FROM found))))::float8 AS score
                FROM found JOIN rarity USING (word)
                    GROUP BY passage_key, digest, first, last, start, stop
                ORDER BY score, digest, first LIMIT %(limit)s""",
            terms=terms,
            sessions=hashes_of(sessions),
            limit=limit,
        )
        return [
            Match(
                row["digest"].hex(),
                row["first"],
                row["last"],
                row["start"],
                row["stop"],
                row["score"],
            )
            for row in rows
        ]

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop what the catalog no longer knows. Both are in one database, so `is_known` is not
        called, and the words of a blob are deleted with it. Only entries indexed just then, or
        released by an older version, remain: one sweep a day, on one machine, is enough."""
        due = self._ask(
            "INSERT INTO note VALUES (%(tenant)s, 0, 'swept',"
            " convert_to(extract(epoch FROM now())::text, 'UTF8'))"
            " ON CONFLICT (tenant, session_key, key) DO UPDATE SET value = excluded.value"
            " WHERE convert_from(note.value, 'UTF8')::float8"
            " < extract(epoch FROM now()) - %(every)s RETURNING 1",
            every=_SWEPT_EVERY,
        )
        if not due:
            return 0

        def drop(db: Db) -> int:
            gone = [digest for (digest,) in db.execute(
                "SELECT digest FROM (SELECT digest FROM indexed WHERE tenant = %(tenant)s UNION"
                " SELECT digest FROM held WHERE tenant = %(tenant)s) d WHERE NOT EXISTS"
                " (SELECT 1 FROM blob b WHERE b.tenant = %(tenant)s AND b.digest = d.digest)"
                " LIMIT %(page)s",
                {"tenant": self._tenant, "page": _SWEPT_AT_ONCE},
            )]  # fmt: skip
            for table in ("passage", "indexed", "held"):
                db.execute(
                    f"DELETE FROM {table} WHERE tenant = %s AND digest = ANY (%s)",
                    (self._tenant, gone),
                )
            return len(gone)

        total = 0
        while count := self._connections.run(drop, "sweeping the index", whole=True):
            total += count
        return total

    def close(self) -> None:
        """Do nothing: the catalog closes the connections that both use."""

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        return self._connections.once(
            lambda db: rows_of(db, sql, {"tenant": self._tenant, **values}), "searching"
        )

    def _leave(self, db: Db, session: bytes, digests: list[bytes]) -> None:
        db.execute(
            """DELETE FROM held WHERE tenant = %(tenant)s
                AND sha256(session_id) = sha256(%(session)s)
                AND digest = ANY (%(digests)s)""",
            {"tenant": self._tenant, "session": session, "digests": digests},
        )
        self._drop_labels(db, session, digests)

    def _drop_labels(self, db: Db, session: bytes, digests: list[bytes]) -> None:
        db.execute(
            "DELETE FROM passage WHERE tenant = %s AND digest = ANY (%s) AND session_id = %s",
            (self._tenant, digests, session),
        )

    def _insert(self, db: Db, session: bytes, rows: list[tuple[bytes, Passage]]) -> None:
        with db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO passage (tenant, digest, session_id, first, last, start, stop, words)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, to_tsvector('english', %s))",
                [
                    (self._tenant, digest, session, row.first, row.last, row.start, row.end,
                     spread(row.text)[:_LONGEST].replace("\0", " "))
                    for digest, row in rows
                ],
            )  # fmt: skip
