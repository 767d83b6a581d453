"""The full-text index of a fleet: PostgreSQL's own, beside the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from coatcheck.storage import Match, Passage
from coatcheck.storage.passages import spread, terms_of
from coatcheck.storage.postgres import Connections, Db

_LONGEST: Final = 500_000  # characters of a passage that are indexed: a tsvector holds a megabyte
_PAGE: Final = 1000


class PostgresPassages:
    """The index of one tenant."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tenant = connections.tenant

    def missing(self, digests: Iterable[str]) -> list[str]:
        wanted = [bytes.fromhex(digest) for digest in digests]
        rows = self._connections.ask(
            "SELECT digest FROM unnest(%s::bytea[]) AS wanted (digest)"
            " EXCEPT SELECT digest FROM indexed WHERE tenant = %s",
            (wanted, self._tenant),
            doing="searching",
        )
        return [digest.hex() for (digest,) in rows]

    def add(self, digest: str, passages: Iterable[Passage]) -> None:
        rows = list(passages)

        def insert(db: Db) -> None:
            key = bytes.fromhex(digest)
            new = db.execute(
                "INSERT INTO indexed VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1", (self._tenant, key)
            ).fetchone()
            if new:
                self._insert(db, key, "", rows)

        self._connections.run(insert, "indexing an artifact")

    def describe(self, session_id: str, labels: Mapping[str, str]) -> None:
        session = session_id.encode()
        own = "tenant = %s AND sha256(session_id) = sha256(%s)"

        def replace(db: Db) -> None:
            said = db.execute(f"SELECT digest, label FROM described WHERE {own}", (self._tenant, session)).fetchall()
            known = {digest.hex(): label.decode() for digest, label in said}
            for digest, text in sorted(labels.items()):
                if known.get(digest) == text:
                    continue
                key = bytes.fromhex(digest)
                db.execute(
                    "INSERT INTO described VALUES (%s, %s, %s, %s)"
                    " ON CONFLICT (tenant, sha256(session_id), digest) DO UPDATE SET label = excluded.label",
                    (self._tenant, session, key, text.encode()),
                )
                db.execute(
                    "DELETE FROM passage WHERE tenant = %s AND digest = %s AND session_id = %s",
                    (self._tenant, key, session),
                )
                self._insert(db, key, session_id, [Passage(0, 0, 0, 0, text)])

        self._connections.run(replace, "indexing what a session says")

    def match(self, words: str, allowed: Iterable[str], sessions: Iterable[str], limit: int) -> list[Match]:
        terms = terms_of(words)
        if not terms:
            return []
        rows = self._connections.ask(
            # `plainto_tsquery` of one term each: what a model asks for is never read as an operator.
            "WITH asked AS (SELECT string_agg(q::text, ' | ')::tsquery AS q FROM"
            " (SELECT plainto_tsquery('english', term) AS q FROM unnest(%(terms)s::text[]) AS t (term)) parts"
            " WHERE numnode(q) > 0)"
            " SELECT p.digest, p.first, p.last, p.start, p.stop, -ts_rank_cd(p.words, asked.q, 1|32)::float8 AS score"
            " FROM passage p, asked WHERE p.tenant = %(tenant)s AND p.words @@ asked.q"
            " AND p.digest = ANY (%(allowed)s) AND p.session_id = ANY (%(sessions)s)"
            " ORDER BY score, p.digest, p.first LIMIT %(limit)s",
            {"terms": terms[:64], "tenant": self._tenant, "allowed": [bytes.fromhex(d) for d in allowed],
             "sessions": [s.encode() for s in ("", *sessions)], "limit": limit},
            doing="searching",
        )  # fmt: skip
        return [Match(digest.hex(), *rest) for digest, *rest in rows]

    def keep(self, is_known: Callable[[str], bool]) -> int:
        """Drop what the catalog does not know any more. Both are in one database: nobody needs to be asked."""

        def drop(db: Db) -> int:
            gone = [digest for (digest,) in db.execute(
                "SELECT digest FROM (SELECT digest FROM indexed WHERE tenant = %(tenant)s UNION"
                " SELECT digest FROM described WHERE tenant = %(tenant)s) d WHERE NOT EXISTS"
                " (SELECT 1 FROM blob b WHERE b.tenant = %(tenant)s AND b.digest = d.digest) LIMIT %(page)s",
                {"tenant": self._tenant, "page": _PAGE},
            )]  # fmt: skip
            for table in ("passage", "indexed", "described"):
                db.execute(f"DELETE FROM {table} WHERE tenant = %s AND digest = ANY (%s)", (self._tenant, gone))
            return len(gone)

        total = 0
        while count := self._connections.run(drop, "sweeping the index"):
            total += count
        return total

    def close(self) -> None:
        """The catalog closes the connections that both use."""

    def _insert(self, db: Db, digest: bytes, session_id: str, rows: list[Passage]) -> None:
        with db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO passage (tenant, digest, session_id, first, last, start, stop, words)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, to_tsvector('english', %s))",
                [
                    (self._tenant, digest, session_id.encode(), row.first, row.last, row.start, row.end,
                     spread(row.text)[:_LONGEST].replace("\0", " "))
                    for row in rows
                ],
            )  # fmt: skip
