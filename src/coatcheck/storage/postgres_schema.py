"""The catalog's tables in PostgreSQL, as numbered steps: a new schema runs all of them, an older one those it lacks.

Processes of the previous version go on while a step runs, and after: a step only adds (tables, columns with defaults,
functions under a new name), and what no version in use needs any more is dropped by a later one.

Names, ids and labels are `bytea`: they may hold what `text` cannot, a NUL. Long ones are indexed by their SHA-256.
"""

from __future__ import annotations

from typing import Final

from coatcheck.errors import StoreUnavailable, UnsupportedFormat
from coatcheck.storage.postgres import Connections, Db

_LOCK: Final = 0x636F6174  # the advisory lock under which a schema is changed

_FIRST: Final = (
    "CREATE TABLE meta (tenant text NOT NULL, key text NOT NULL, value bytea NOT NULL, PRIMARY KEY (tenant, key))",
    """CREATE TABLE session (
        session_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        tenant text NOT NULL,
        session_id bytea NOT NULL,
        parent bytea,
        ttl float8,
        quota bigint,
        created_at float8 NOT NULL,
        used_at float8 NOT NULL,
        used_bytes bigint NOT NULL DEFAULT 0,
        next_seq bigint NOT NULL DEFAULT 1,
        token bigint NOT NULL DEFAULT 0,
        holder bytea NOT NULL DEFAULT '',
        claimed_at float8 NOT NULL DEFAULT 0) WITH (fillfactor = 70)""",
    "CREATE UNIQUE INDEX session_by_id ON session (tenant, sha256(session_id))",
    "CREATE INDEX session_by_expiry ON session (tenant, (used_at + ttl)) WHERE ttl IS NOT NULL",
    """CREATE TABLE blob (
        tenant text NOT NULL,
        digest bytea NOT NULL,
        size bigint NOT NULL,
        coding text NOT NULL,
        place text NOT NULL,
        frames bytea NOT NULL,
        refs bigint NOT NULL,
        used_at float8 NOT NULL,
        data bytea,
        PRIMARY KEY (tenant, digest)) WITH (fillfactor = 85)""",
    "ALTER TABLE blob ALTER COLUMN data SET STORAGE EXTERNAL",  # to compress would cost a put more than to write
    """CREATE TABLE ref (
        session_key bigint NOT NULL,
        seq bigint NOT NULL,
        tenant text NOT NULL,
        digest bytea NOT NULL,
        size bigint NOT NULL,
        name bytea,
        codec text NOT NULL,
        media_type bytea NOT NULL,
        kind text NOT NULL,
        tool bytea,
        call_id bytea,
        producer text NOT NULL,
        parents text NOT NULL,
        summary bytea NOT NULL,
        created_at float8 NOT NULL,
        expires_at float8,
        pinned boolean NOT NULL,
        granted_by bytea,
        request bytea,
        gone text,
        PRIMARY KEY (session_key, seq))""",
    "CREATE INDEX ref_by_digest ON ref (session_key, digest)",
    "CREATE INDEX ref_by_name ON ref (session_key, sha256(name), seq) WHERE name IS NOT NULL",
    "CREATE INDEX ref_by_expiry ON ref (tenant, expires_at) WHERE expires_at IS NOT NULL AND gone IS NULL",
    "CREATE INDEX ref_of_blob ON ref (tenant, digest)",
    """CREATE TABLE shown (
        session_key bigint NOT NULL,
        tenant text NOT NULL,
        digest bytea NOT NULL,
        ranges int8multirange NOT NULL,
        PRIMARY KEY (session_key, digest))""",
    """CREATE TABLE passage (
        passage_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        tenant text NOT NULL,
        digest bytea NOT NULL,
        session_id bytea NOT NULL,
        first int NOT NULL, last int NOT NULL, start bigint NOT NULL, stop bigint NOT NULL,
        words tsvector NOT NULL)""",
    "CREATE INDEX passage_by_digest ON passage (tenant, digest)",
    "CREATE INDEX passage_words ON passage USING gin (words)",
    "CREATE TABLE indexed (tenant text NOT NULL, digest bytea NOT NULL, PRIMARY KEY (tenant, digest))",
    """CREATE TABLE held (tenant text NOT NULL, session_id bytea NOT NULL, digest bytea NOT NULL, label bytea NOT NULL,
        expires float8)""",
    "CREATE UNIQUE INDEX held_by_session ON held (tenant, sha256(session_id), digest)",
    "CREATE INDEX held_by_digest ON held (tenant, digest)",
    """CREATE TABLE followed (tenant text NOT NULL, session_id bytea NOT NULL, created float8 NOT NULL,
        seq bigint NOT NULL, digest bytea NOT NULL)""",
    "CREATE UNIQUE INDEX followed_by_session ON followed (tenant, sha256(session_id))",
    # Tokens are drawn for the whole schema: a session that ended and began anew never meets an old one.
    "CREATE SEQUENCE fence",
    """CREATE TABLE record (
        session_key bigint NOT NULL,
        tenant text NOT NULL,
        series bytea NOT NULL,
        seq bigint NOT NULL,
        at float8 NOT NULL,
        token bigint,
        checksum bytea NOT NULL,
        drawn bytea NOT NULL,
        body bytea NOT NULL)""",
    "CREATE UNIQUE INDEX record_by_series ON record (session_key, sha256(series), seq)",
    # One call is one transaction and one trip. The order of locks is session, refs, blob: everywhere.
    """CREATE FUNCTION put_1(
        p_tenant text, p_session bytea, p_parent bytea, p_ttl float8, p_quota bigint, p_now float8, p_grace float8,
        p_store_quota bigint, p_digest bytea, p_size bigint, p_coding text, p_place text, p_frames bytea, p_data bytea,
        p_heal boolean, p_reuse boolean, p_name bytea, p_codec text, p_media_type bytea, p_kind text, p_tool bytea,
        p_call_id bytea, p_producer text, p_parents text, p_summary bytea, p_expires float8, p_pinned boolean,
        p_granted_by bytea, p_request bytea) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        s session%ROWTYPE;
        b blob%ROWTYPE;
        held ref%ROWTYPE;
        is_held boolean;
        total bigint;
        is_pinned boolean := p_pinned;
    BEGIN
        LOOP
            SELECT * INTO s FROM session WHERE tenant = p_tenant AND sha256(session_id) = sha256(p_session) FOR UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO session (tenant, session_id, parent, ttl, quota, created_at, used_at)
                VALUES (p_tenant, p_session, p_parent, p_ttl, p_quota, p_now, p_now) ON CONFLICT DO NOTHING;
        END LOOP;
        IF p_quota IS NOT NULL AND s.used_bytes + p_size > p_quota AND NOT EXISTS (SELECT 1 FROM ref
                WHERE session_key = s.session_key AND digest = p_digest AND gone IS NULL) THEN
            RAISE EXCEPTION 'session %', s.used_bytes USING ERRCODE = 'CC002';
        END IF;
        IF p_store_quota IS NOT NULL AND NOT EXISTS (SELECT 1 FROM blob WHERE tenant = p_tenant AND digest = p_digest)
        THEN
            SELECT coalesce(sum(size), 0) INTO total FROM blob WHERE tenant = p_tenant;
            IF total + p_size > p_store_quota THEN
                RAISE EXCEPTION 'store %', total USING ERRCODE = 'CC002';
            END IF;
        END IF;
        IF s.ttl IS NOT NULL AND s.used_at + s.ttl + p_grace <= p_now THEN
            PERFORM bury_1(p_tenant, s.session_key, ARRAY(SELECT seq FROM ref
                WHERE session_key = s.session_key AND gone IS NULL AND NOT pinned), 'expired');
            DELETE FROM record WHERE session_key = s.session_key;
        END IF;
        IF p_reuse THEN
            SELECT * INTO b FROM blob WHERE tenant = p_tenant AND digest = p_digest AND place = p_place FOR UPDATE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'gone' USING ERRCODE = 'CC001';
            END IF;
        ELSE
            LOOP
                INSERT INTO blob (tenant, digest, size, coding, place, frames, refs, used_at, data)
                    VALUES (p_tenant, p_digest, p_size, p_coding, p_place, p_frames, 0, p_now, p_data)
                    ON CONFLICT DO NOTHING;
                IF FOUND THEN
                    PERFORM revive_1(p_tenant, p_digest);
                    EXIT;
                END IF;
                SELECT * INTO b FROM blob WHERE tenant = p_tenant AND digest = p_digest FOR UPDATE;
                IF FOUND THEN
                    IF p_heal OR p_data IS NOT NULL THEN
                        UPDATE blob SET coding = p_coding, place = p_place, frames = p_frames, data = p_data
                            WHERE tenant = p_tenant AND digest = p_digest
                            AND (coding, place, data) IS DISTINCT FROM (p_coding, p_place, p_data);
                    END IF;
                    EXIT;
                END IF;
            END LOOP;
        END IF;
        SELECT * INTO held FROM ref WHERE session_key = s.session_key AND digest = p_digest AND gone IS NULL
            ORDER BY seq DESC LIMIT 1;
        is_held := FOUND;
        is_pinned := p_pinned OR is_held AND held.pinned;  -- a pin is on the artifact: it covers refs that come later
        IF is_held AND (held.name, held.codec, held.media_type, held.kind, held.tool, held.call_id, held.producer,
                held.parents, held.summary, held.expires_at, held.pinned, held.granted_by, held.request)
                IS NOT DISTINCT FROM (p_name, p_codec, p_media_type, p_kind, p_tool, p_call_id, p_producer, p_parents,
                p_summary, p_expires, is_pinned, p_granted_by, p_request)
            AND (p_name IS NULL OR held.seq = (SELECT max(seq) FROM ref
                WHERE session_key = s.session_key AND sha256(name) = sha256(p_name))) THEN
            UPDATE session SET used_at = greatest(used_at, p_now) WHERE session_key = s.session_key;
            RETURN;
        END IF;
        IF NOT is_held THEN
            DELETE FROM ref WHERE session_key = s.session_key AND digest = p_digest AND gone IS NOT NULL;
        END IF;
        INSERT INTO ref VALUES (s.session_key, s.next_seq, p_tenant, p_digest, p_size, p_name, p_codec, p_media_type,
            p_kind, p_tool, p_call_id, p_producer, p_parents, p_summary, p_now, p_expires, is_pinned, p_granted_by,
            p_request, NULL);
        UPDATE blob SET refs = refs + 1 WHERE tenant = p_tenant AND digest = p_digest;
        UPDATE session SET next_seq = next_seq + 1, used_at = greatest(used_at, p_now),
            used_bytes = used_bytes + CASE WHEN is_held THEN 0 ELSE p_size END WHERE session_key = s.session_key;
    END $$""",
    # Tombstones in place of refs of one session, whose row the caller has locked.
    """CREATE FUNCTION bury_1(p_tenant text, p_session_key bigint, p_seqs bigint[], p_why text)
    RETURNS SETOF blob LANGUAGE plpgsql AS $$
    DECLARE
        digests bytea[];
        sizes bigint[];
    BEGIN
        WITH buried AS (UPDATE ref SET gone = p_why WHERE session_key = p_session_key AND seq = ANY (p_seqs)
            AND gone IS NULL RETURNING digest, size)
        SELECT array_agg(digest), array_agg(size) INTO digests, sizes FROM buried;
        RETURN QUERY SELECT * FROM let_go_1(p_tenant, p_session_key, digests, sizes);
    END $$""",
    # The accounts after refs of one session went: what it uses, and blobs that nobody refers to any more.
    """CREATE FUNCTION let_go_1(p_tenant text, p_session_key bigint, p_digests bytea[], p_sizes bigint[])
    RETURNS SETOF blob LANGUAGE plpgsql AS $$
    BEGIN
        IF p_digests IS NULL THEN
            RETURN;
        END IF;
        UPDATE session SET used_bytes = used_bytes - (SELECT coalesce(sum(size), 0) FROM
            (SELECT DISTINCT digest, size FROM unnest(p_digests, p_sizes) AS went (digest, size)) went
            WHERE NOT EXISTS (SELECT 1 FROM ref r WHERE r.session_key = p_session_key AND r.digest = went.digest
                AND r.gone IS NULL)) WHERE session_key = p_session_key;
        PERFORM 1 FROM blob WHERE tenant = p_tenant AND digest = ANY (p_digests) ORDER BY digest FOR UPDATE;
        UPDATE blob b SET refs = b.refs - went.n
            FROM (SELECT digest, count(*) AS n FROM unnest(p_digests) AS went (digest) GROUP BY digest) went
            WHERE b.tenant = p_tenant AND b.digest = went.digest;
        RETURN QUERY DELETE FROM blob WHERE tenant = p_tenant AND digest = ANY (p_digests) AND refs <= 0 RETURNING *;
    END $$""",
    # Refs that lost their bytes to damage, now that the bytes are here again.
    """CREATE FUNCTION revive_1(p_tenant text, p_digest bytea) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        keys bigint[];
    BEGIN
        SELECT array_agg(session_key) INTO keys FROM ref
            WHERE tenant = p_tenant AND digest = p_digest AND gone = 'damaged';
        IF keys IS NULL THEN
            RETURN;
        END IF;
        UPDATE ref SET gone = NULL WHERE tenant = p_tenant AND digest = p_digest AND gone = 'damaged';
        UPDATE blob SET refs = refs + cardinality(keys) WHERE tenant = p_tenant AND digest = p_digest;
        UPDATE session SET used_bytes = (SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
            WHERE ref.session_key = session.session_key AND gone IS NULL) held) WHERE session_key = ANY (keys);
    END $$""",
)

_TENANTS: Final = ("meta", "session", "blob", "ref", "shown", "passage", "indexed", "held", "followed", "record")
_SECURED: Final = tuple(
    statement
    for table in _TENANTS
    for statement in (
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
        f"CREATE POLICY own_tenant ON {table} USING (tenant = current_setting('coatcheck.tenant', true))",
    )
)

STEPS: Final[tuple[tuple[str, ...], ...]] = (_FIRST + _SECURED,)


def migrate(connections: Connections, *, create: bool = True) -> None:
    """Bring the schema to the version that this code knows, each step in a transaction; any number of machines may."""
    schema = connections.schema

    def version(db: Db) -> int | None:
        # Not `to_regclass`: it answers from a cache, where another machine may have made the table a moment ago.
        made = "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        if db.execute(made + " WHERE n.nspname = %s AND c.relname = 'format'", (schema,)).fetchone() is None:
            return None
        found = db.execute("SELECT max(version) FROM format").fetchone()
        return int(found[0] or 0) if found else 0

    def begin(db: Db) -> None:
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        if version(db) is None:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            db.execute("CREATE TABLE format (version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())")

    def step(db: Db) -> bool:
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        number = version(db) or 0
        if number > len(STEPS):
            raise UnsupportedFormat(f"this store has format {number}; this version of coatcheck knows {len(STEPS)}")
        if number == len(STEPS):
            return False
        for statement in STEPS[number]:
            db.execute(statement)
        db.execute("INSERT INTO format (version) VALUES (%s)", (number + 1,))
        return True

    known = connections.run(version, "opening the catalog")
    if known == len(STEPS):
        return
    if known is None and not create:
        raise StoreUnavailable("there is no store in this schema", hint="check the url, or put something there")
    if known is None:
        connections.run(begin, "making the catalog")
    while connections.run(step, "migrating the catalog"):
        pass
