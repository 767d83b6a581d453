"""The full-text index of a fleet: PostgreSQL's own, beside the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from coatcheck.errors import StoreUnavailable
from coatcheck.storage import Held, Mark, Match, Passage
from coatcheck.storage.passages import APART, spread, terms_of
from coatcheck.storage.postgres import Connections, Db
from coatcheck.storage.postgres_catalog import hashes_of

_LONGEST: Final = 500_000  # indexed characters per passage: a tsvector is limited to one megabyte
_PAGE: Final = 1000
_SWEPT_EVERY: Final = 86_400  # seconds
_OWN: Final = "tenant = %(tenant)s AND sha256(session_id) = sha256(%(session)s)"
# Each word is its own query, so a model's words are never parsed as operators. The ranking is like BM25: a word counts
# more if fewer passages of these sessions contain it, and repeating it in one passage counts less each time.
_MATCH: Final = """WITH asked AS MATERIALIZED (SELECT DISTINCT plainto_tsquery('english', term) AS word
        FROM unnest(%(terms)s::text[]) AS t (term) WHERE numnode(plainto_tsquery('english', term)) > 0),
    own AS MATERIALIZED (SELECT DISTINCT digest FROM held
        WHERE tenant = %(tenant)s AND sha256(session_id) = ANY (%(sessions)s)),
    found AS MATERIALIZED (SELECT p.passage_key, p.digest, p.first, p.last, p.start, p.stop, asked.word,
        ts_rank('{1,1,1,1}', p.words, asked.word) AS often, length(p.words)::float8 AS size
        FROM own JOIN passage p ON p.tenant = %(tenant)s AND p.digest = own.digest JOIN asked ON p.words @@ asked.word
        WHERE p.session_id = '' OR sha256(p.session_id) = ANY (%(sessions)s)),
    rarity AS (SELECT word, ln(1 + (greatest(0, (SELECT count(*) FROM own) - count(*)) + 0.5)::float8
        / (count(*) + 0.5)::float8) AS weight FROM found GROUP BY word)
    SELECT digest, first, last, start, stop, -sum(weight * often
        / (often + 0.3 * (0.75 + 0.25 * size / (SELECT avg(size) FROM found))))::float8 AS score
    FROM found JOIN rarity USING (word) GROUP BY passage_key, digest, first, last, start, stop
    ORDER BY score, digest, first LIMIT %(limit)s"""


class PostgresPassages:
    """The full-text index of one tenant."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant

    def followed(self, session_id: str) -> Mark | None:
        rows = self._ask(f"SELECT created, seq, digest FROM followed WHERE {_OWN}", session=session_id.encode())
        return Mark(rows[0][0], rows[0][1], rows[0][2].hex()) if rows else None

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = list(digests)
        known = self._ask(
            "SELECT digest FROM indexed WHERE tenant = %(tenant)s AND digest = ANY (%(wanted)s)",
            wanted=[bytes.fromhex(digest) for digest in wanted],
        )
        held = {digest.hex() for (digest,) in known}
        return [digest for digest in wanted if digest not in held]

    def add(self, contents: Mapping[str, Iterable[Passage]]) -> None:
        found = {digest: list(passages) for digest, passages in sorted(contents.items())}

        def insert(db: Db) -> None:
            new = db.execute(
                "INSERT INTO indexed SELECT %s, unnest(%s) ON CONFLICT DO NOTHING RETURNING digest",
                (self._tenant, [bytes.fromhex(digest) for digest in found]),
            ).fetchall()
            self._insert(db, b"", [(digest, passage) for (digest,) in new for passage in found[digest.hex()]])

        self._connections.run(insert, "indexing artifacts")

    def hold(self, session_id: str, holds: Mapping[str, Held], mark: Mark | None, *, complete: bool) -> None:
        session = session_id.encode()
        own = {"tenant": self._tenant, "session": session}

        def note(db: Db) -> None:
            # One at a time: the results of two machines for one session must not be mixed.
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended(encode(%(session)s, 'hex'), 1))", own)
            rows = db.execute(f"SELECT digest, label, expires FROM held WHERE {_OWN}", own).fetchall()
            known = {digest.hex(): (label.decode(), expires) for digest, label, expires in rows}
            if complete:
                self._leave(db, session, [bytes.fromhex(digest) for digest in known.keys() - holds.keys()])
            noted: list[tuple[Any, ...]] = []
            changed: dict[bytes, str] = {}
            for digest, held in sorted(holds.items()):
                label, ends = (None, None) if complete else known.get(digest, (None, None))
                text = APART.join(dict.fromkeys([*(label.split(APART) if label else []), *held.labels]))
                both = (held.expires,) if label is None else (held.expires, ends)
                last = None if None in both else max(one for one in both if one is not None)
                key = bytes.fromhex(digest)
                noted.append((self._tenant, session, key, text.encode("utf-8", "replace"), last))
                if digest not in known or known[digest][0] != text:
                    changed[key] = text
            with db.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO held VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, sha256(session_id), digest)"
                    " DO UPDATE SET label = excluded.label, expires = excluded.expires",
                    noted,
                )
            self._drop_labels(db, session, list(changed))
            self._insert(db, session, [(key, Passage(0, 0, 0, 0, text)) for key, text in changed.items() if text])
            if mark is not None:
                db.execute(
                    "INSERT INTO followed VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, sha256(session_id))"
                    " DO UPDATE SET created = excluded.created, seq = excluded.seq, digest = excluded.digest",
                    (self._tenant, session, mark.created, mark.seq, bytes.fromhex(mark.digest)),
                )

        self._connections.run(note, "indexing a session")

    def count(self, sessions: Iterable[str], at: float) -> int:
        rows = self._ask(
            "SELECT count(DISTINCT digest) FROM held WHERE tenant = %(tenant)s"
            " AND sha256(session_id) = ANY (%(sessions)s) AND (expires IS NULL OR expires >= %(at)s)",
            sessions=hashes_of(sessions), at=at,
        )  # fmt: skip
        return int(rows[0][0])

    def leave(self, session_id: str, digest: str | None = None) -> None:
        session = session_id.encode()

        def drop(db: Db) -> None:
            own = {"tenant": self._tenant, "session": session}
            if digest is not None:
                self._leave(db, session, [bytes.fromhex(digest)])
                return
            for table in ("held", "followed"):
                db.execute(f"DELETE FROM {table} WHERE {_OWN}", own)
            db.execute(f"DELETE FROM passage WHERE {_OWN} AND session_id <> ''", own)

        try:
            self._connections.run(drop, "sweeping the index")
        except StoreUnavailable:
            pass  # the caller checks each match anyway: forgetting must not fail here

    def match(self, words: str, sessions: Iterable[str], limit: int) -> list[Match]:
        terms = list(dict.fromkeys(terms_of(words)))[:64]
        if not terms:
            return []
        rows = self._ask(_MATCH, terms=terms, sessions=hashes_of(sessions), limit=limit)
        return [Match(digest.hex(), *rest) for digest, *rest in rows]

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop what the catalog no longer knows. Both are in one database, so `is_known` is not called, and the words
        of a blob are deleted with it. Only entries indexed just then, or released by an older version, remain: one
        sweep a day, on one machine, is enough."""
        due = self._ask(
            "INSERT INTO note VALUES (%(tenant)s, 0, 'swept', convert_to(extract(epoch FROM now())::text, 'UTF8'))"
            " ON CONFLICT (tenant, session_key, key) DO UPDATE SET value = excluded.value"
            " WHERE convert_from(note.value, 'UTF8')::float8 < extract(epoch FROM now()) - %(every)s RETURNING 1",
            every=_SWEPT_EVERY,
        )
        if not due:
            return 0

        def drop(db: Db) -> int:
            gone = [digest for (digest,) in db.execute(
                "SELECT digest FROM (SELECT digest FROM indexed WHERE tenant = %(tenant)s UNION"
                " SELECT digest FROM held WHERE tenant = %(tenant)s) d WHERE NOT EXISTS"
                " (SELECT 1 FROM blob b WHERE b.tenant = %(tenant)s AND b.digest = d.digest) LIMIT %(page)s",
                {"tenant": self._tenant, "page": _PAGE},
            )]  # fmt: skip
            for table in ("passage", "indexed", "held"):
                db.execute(f"DELETE FROM {table} WHERE tenant = %s AND digest = ANY (%s)", (self._tenant, gone))
            return len(gone)

        total = 0
        while count := self._connections.run(drop, "sweeping the index", whole=True):
            total += count
        return total

    def close(self) -> None:
        """Do nothing: the catalog closes the connections that both use."""

    def _ask(self, sql: str, **values: Any) -> list[Any]:
        return self._connections.ask(sql, {"tenant": self._tenant, **values}, doing="searching")

    def _leave(self, db: Db, session: bytes, digests: list[bytes]) -> None:
        own = {"tenant": self._tenant, "session": session, "digests": digests}
        db.execute(f"DELETE FROM held WHERE {_OWN} AND digest = ANY (%(digests)s)", own)
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
