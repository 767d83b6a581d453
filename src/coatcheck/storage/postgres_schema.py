"""The schema of a fleet's catalog, and how it gets the steps that it does not have yet.

The schema is made in numbered steps. Processes of the previous version keep running during a step
and after it. So a step only adds (tables, columns with defaults, functions under a new name,
indexes created concurrently); a later step drops what only older versions need. A released step
never changes.

Names, ids and labels are `bytea`, because `text` cannot contain a NUL. Long ones are indexed by
their SHA-256. The name of a function ends with the number of its step: a changed function gets a
new name, so that processes of the previous version still find theirs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from coatcheck.errors import StoreUnavailable, UnsupportedFormat, development_format
from coatcheck.storage.postgres import Connections, Db

_LOCK: Final = 0x636F6174  # the advisory lock for schema changes
_PAUSE: Final = 0.2
_APPLIED: Final = """CREATE TABLE applied_step (version int PRIMARY KEY, tolerates int NOT NULL,
    at timestamptz NOT NULL DEFAULT now())"""


@dataclass(frozen=True, slots=True)
class Step:
    """Either a `change` in one transaction, or indexes that are created and dropped while others
    write.

    `tolerates` is the number of steps that a process must know to keep using the schema after this
    one."""

    change: tuple[str, ...] = ()
    indexes: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    tolerates: int = 1


_TABLES: Final = (
    # `look_at`: when a collection must check a session again, or NULL for never. `ended_at`: when
    # an emptied session ended. A put changes neither, so that the row it updates stays on its page
    # and in its indexes. `attempts`: the last 16 puts, so that one whose answer was lost is not
    # done twice.
    """CREATE TABLE session (
        session_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL,
        session_id bytea NOT NULL, parent bytea, ttl float8, quota bigint, created float8 NOT NULL,
        used float8 NOT NULL, used_bytes bigint NOT NULL DEFAULT 0,
        next_seq bigint NOT NULL DEFAULT 1, look_at float8 DEFAULT '-infinity', ended_at float8,
        attempts bytea NOT NULL DEFAULT '')
        WITH (fillfactor = 70)""",
    "CREATE UNIQUE INDEX session_by_id ON session (tenant, sha256(session_id))",
    "CREATE INDEX session_by_look ON session (tenant, look_at)",
    "CREATE INDEX session_by_end ON session (tenant, ended_at) WHERE ended_at IS NOT NULL",
    """CREATE TABLE blob (
        tenant text NOT NULL, digest bytea NOT NULL, size bigint NOT NULL, coding text NOT NULL,
        place text NOT NULL, frames bytea NOT NULL, refs bigint NOT NULL, used float8 NOT NULL,
        data bytea,
        PRIMARY KEY (tenant, digest)) WITH (fillfactor = 85)""",
    # compressing would cost a put more than writing
    "ALTER TABLE blob ALTER COLUMN data SET STORAGE EXTERNAL",
    "CREATE INDEX blob_by_use ON blob (tenant, used) WHERE coding = 'raw'",
    """CREATE TABLE ref (
        session_key bigint NOT NULL, seq bigint NOT NULL, tenant text NOT NULL,
        digest bytea NOT NULL, size bigint NOT NULL, name bytea, codec text NOT NULL,
        media_type bytea NOT NULL, kind text NOT NULL, tool bytea, call_id bytea,
        producer text NOT NULL, parents text NOT NULL, summary bytea NOT NULL,
        created float8 NOT NULL, expires float8, pinned boolean NOT NULL, granted_by bytea,
        request bytea, metadata_json bytea, gone text, PRIMARY KEY (session_key, seq))""",
    "CREATE INDEX ref_by_digest ON ref (session_key, digest)",
    "CREATE INDEX ref_by_name ON ref (session_key, sha256(name), seq) WHERE name IS NOT NULL",
    (
        "CREATE INDEX ref_by_expiry ON ref (tenant, expires)"
        " WHERE expires IS NOT NULL AND gone IS NULL"
    ),
    "CREATE INDEX ref_of_blob ON ref (tenant, digest)",
    (
        "CREATE INDEX ref_by_grant ON ref (tenant, sha256(granted_by), digest)"
        " WHERE granted_by IS NOT NULL"
    ),
    # The notes of the store itself have the session key 0.
    """CREATE TABLE note (
        tenant text NOT NULL, session_key bigint NOT NULL, key text COLLATE "C" NOT NULL,
        value bytea NOT NULL,
        PRIMARY KEY (tenant, session_key, key))""",
    """CREATE TABLE passage (
        passage_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL,
        digest bytea NOT NULL, session_id bytea NOT NULL,
        first int NOT NULL, last int NOT NULL, start bigint NOT NULL, stop bigint NOT NULL,
        words tsvector NOT NULL)""",
    "CREATE INDEX passage_by_digest ON passage (tenant, digest)",
    (
        "CREATE INDEX passage_by_session ON passage (tenant, sha256(session_id))"
        " WHERE session_id <> ''"
    ),
    "CREATE INDEX passage_words ON passage USING gin (words)",
    (
        "CREATE TABLE indexed (tenant text NOT NULL, digest bytea NOT NULL,"
        " PRIMARY KEY (tenant, digest))"
    ),
    """CREATE TABLE held (tenant text NOT NULL, session_id bytea NOT NULL, digest bytea NOT NULL,
        label bytea NOT NULL, expires float8)""",
    "CREATE UNIQUE INDEX held_by_session ON held (tenant, sha256(session_id), digest)",
    "CREATE INDEX held_by_digest ON held (tenant, digest)",
    """CREATE TABLE followed (tenant text NOT NULL, session_id bytea NOT NULL,
        created float8 NOT NULL, seq bigint NOT NULL, digest bytea NOT NULL)""",
    "CREATE UNIQUE INDEX followed_by_session ON followed (tenant, sha256(session_id))",
    # Tokens are drawn for the whole schema: a session that is created again never reuses an old
    # token.
    "CREATE SEQUENCE fence",
    """CREATE FUNCTION look_again_1() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.look_at := '-infinity';
        NEW.ended_at := NULL;
        RETURN NEW;
    END $$""",
    """CREATE TRIGGER look_again BEFORE UPDATE ON session FOR EACH ROW
        WHEN (NEW.ttl IS DISTINCT FROM OLD.ttl OR OLD.look_at IS NULL
            AND (NEW.used, NEW.used_bytes) IS DISTINCT FROM (OLD.used, OLD.used_bytes))
        EXECUTE FUNCTION look_again_1()""",
    # The bytes of a tenant's blobs, split over slots: writers rarely collide, and a quota adds up a
    # few rows.
    """CREATE TABLE stored (tenant text NOT NULL, slot int NOT NULL, bytes bigint NOT NULL,
        PRIMARY KEY (tenant, slot))
        WITH (fillfactor = 50)""",
    """CREATE FUNCTION count_1() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO stored SELECT tenant, pg_backend_pid() % 256,
            sum(size) * CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END FROM changed GROUP BY tenant
            ON CONFLICT (tenant, slot) DO UPDATE SET bytes = stored.bytes + excluded.bytes;
        RETURN NULL;
    END $$""",
    """CREATE TRIGGER added AFTER INSERT ON blob REFERENCING NEW TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION count_1()""",
    """CREATE TRIGGER dropped AFTER DELETE ON blob REFERENCING OLD TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION count_1()""",
    # Updates the accounts after removing refs, one array element each: the used bytes of their
    # sessions, and blobs without refs, including their full-text index.
    """CREATE FUNCTION let_go_1(p_tenant text, p_keys bigint[], p_digests bytea[], p_sizes bigint[])
    RETURNS SETOF blob LANGUAGE plpgsql AS $$
    DECLARE
        b blob%ROWTYPE;
        gone bytea[] := '{}';
    BEGIN
        UPDATE session s SET used_bytes = s.used_bytes - freed.size FROM
            (SELECT went.session_key, sum(went.size) AS size FROM
                (SELECT DISTINCT * FROM unnest(p_keys, p_digests, p_sizes)
                    AS w (session_key, digest, size)) went
            WHERE NOT EXISTS (SELECT 1 FROM ref r
                WHERE r.session_key = went.session_key AND r.digest = went.digest
                AND r.gone IS NULL) GROUP BY went.session_key) freed
            WHERE s.session_key = freed.session_key;
        PERFORM 1 FROM blob WHERE tenant = p_tenant AND digest = ANY (p_digests)
            ORDER BY digest FOR UPDATE;
        UPDATE blob SET refs = refs - went.n
            FROM (SELECT digest, count(*) AS n FROM unnest(p_digests) AS w (digest)
            GROUP BY digest) went
            WHERE blob.tenant = p_tenant AND blob.digest = went.digest;
        FOR b IN DELETE FROM blob WHERE tenant = p_tenant AND digest = ANY (p_digests) AND refs <= 0
            RETURNING * LOOP
            gone := gone || b.digest;
            RETURN NEXT b;
        END LOOP;
        IF cardinality(gone) > 0 THEN
            DELETE FROM passage WHERE tenant = p_tenant AND digest = ANY (gone);
            DELETE FROM indexed WHERE tenant = p_tenant AND digest = ANY (gone);
            DELETE FROM held WHERE tenant = p_tenant AND digest = ANY (gone);
        END IF;
    END $$""",
    # Restores refs whose bytes were damaged, now that the bytes are available again.
    """CREATE FUNCTION revive_1(p_tenant text, p_digest bytea) RETURNS bigint LANGUAGE plpgsql AS $$
    DECLARE
        keys bigint[];
    BEGIN
        SELECT array_agg(session_key) INTO keys FROM ref
            WHERE tenant = p_tenant AND digest = p_digest AND gone = 'damaged';
        IF keys IS NULL THEN
            RETURN 0;
        END IF;
        UPDATE ref SET gone = NULL
            WHERE tenant = p_tenant AND digest = p_digest AND gone = 'damaged';
        UPDATE blob SET refs = refs + cardinality(keys)
            WHERE tenant = p_tenant AND digest = p_digest;
        UPDATE session SET used_bytes =
            (SELECT coalesce(sum(size), 0) FROM (SELECT DISTINCT digest, size FROM ref
            WHERE ref.session_key = session.session_key AND gone IS NULL) held)
                WHERE session_key = ANY (keys);
        RETURN cardinality(keys);
    END $$""",
    # One call is one transaction and one round trip. The order of locks is always session, refs,
    # blob. Returns the session's previous ids between `p_low` and `p_high`. With `p_if_new`, if the
    # session already has the artifact, it does nothing and returns NULL.
    """CREATE FUNCTION put_1(
        p_tenant text, p_session bytea, p_parent bytea, p_ttl float8, p_quota bigint, p_now float8,
        p_grace float8, p_store_quota bigint, p_digest bytea, p_size bigint, p_coding text,
        p_place text, p_frames bytea, p_data bytea, p_heal boolean, p_reuse boolean, p_name bytea,
        p_codec text, p_media_type bytea, p_kind text, p_tool bytea, p_call_id bytea,
        p_producer text, p_parents text, p_summary bytea, p_expires float8, p_pinned boolean,
        p_granted_by bytea, p_request bytea, p_metadata_json bytea, p_if_new boolean, p_low bytea,
            p_high bytea, p_attempt bytea, p_alone boolean)
        RETURNS bytea[] LANGUAGE plpgsql AS $$
    DECLARE
        s record;
        held ref%ROWTYPE;
        near bytea[];
        is_held boolean;
        was_held boolean;
        is_new boolean;
        is_pinned boolean := p_pinned;
        total bigint;
        keys bigint[];
        digests bytea[];
        sizes bigint[];
    BEGIN
        LOOP
            SELECT session_key, ttl, used, used_bytes, next_seq, attempts INTO s FROM session
                WHERE tenant = p_tenant AND sha256(session_id) = sha256(p_session) FOR UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO session (tenant, session_id, parent, ttl, quota, created, used)
                VALUES (p_tenant, p_session, p_parent, p_ttl, p_quota, p_now, p_now)
                ON CONFLICT DO NOTHING;
        END LOOP;
        IF s.ttl IS NOT NULL AND s.used + s.ttl + p_grace <= p_now THEN
            WITH buried AS (UPDATE ref SET gone = 'expired'
                WHERE session_key = s.session_key AND gone IS NULL
                AND NOT pinned RETURNING session_key, digest, size)
            SELECT array_agg(session_key), array_agg(digest), array_agg(size)
                INTO keys, digests, sizes FROM buried;
            PERFORM let_go_1(p_tenant, keys, digests, sizes);
            DELETE FROM note WHERE tenant = p_tenant AND session_key = s.session_key
                AND key >= 'record/' AND key < 'record0';
            SELECT used_bytes INTO s.used_bytes FROM session WHERE session_key = s.session_key;
        END IF;
        SELECT array_agg(DISTINCT digest),
        coalesce(bool_or(digest = p_digest AND gone IS NULL), false),
            coalesce(bool_or(digest = p_digest AND gone IS NOT NULL), false)
                INTO near, is_held, was_held
            FROM ref WHERE session_key = s.session_key AND digest BETWEEN p_low AND p_high;
        -- it was committed, and only its answer was lost
        IF position(p_attempt IN s.attempts) > 0 THEN
            RETURN coalesce(near, '{}');
        END IF;
        IF p_if_new AND is_held THEN
            RETURN NULL;
        END IF;
        IF p_quota IS NOT NULL AND NOT is_held AND s.used_bytes + p_size > p_quota THEN
            RAISE EXCEPTION 'session %', s.used_bytes USING ERRCODE = 'CC002';
        END IF;
        IF p_store_quota IS NOT NULL AND NOT EXISTS
            (SELECT 1 FROM blob WHERE tenant = p_tenant AND digest = p_digest)
        THEN
            -- Others do not see what is not committed. As long as a thousand more of this size
            -- would fit, that does no harm; from there on one puts at a time.
            IF p_alone THEN
                PERFORM pg_advisory_xact_lock(hashtextextended(current_schema() || p_tenant, 2));
            ELSE
                PERFORM pg_advisory_xact_lock_shared(hashtextextended(current_schema() || p_tenant,
                    2));
            END IF;
            SELECT coalesce(sum(bytes), 0) INTO total FROM stored WHERE tenant = p_tenant;
            IF p_alone AND total + p_size > p_store_quota THEN
                RAISE EXCEPTION 'store %', total USING ERRCODE = 'CC002';
            ELSIF NOT p_alone AND total + p_size * 1000 > p_store_quota THEN
                RAISE EXCEPTION 'alone' USING ERRCODE = 'CC003';
            END IF;
        END IF;
        IF p_reuse THEN
            UPDATE blob SET refs = refs + 1
                WHERE tenant = p_tenant AND digest = p_digest AND place = p_place;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'gone' USING ERRCODE = 'CC001';
            END IF;
        ELSE
            INSERT INTO blob AS b (tenant, digest, size, coding, place, frames, refs, used, data)
                VALUES (p_tenant, p_digest, p_size, p_coding, p_place, p_frames, 1, p_now, p_data)
                ON CONFLICT (tenant, digest) DO UPDATE SET refs = b.refs + 1
                    RETURNING b.xmax = 0 INTO is_new;
            IF is_new THEN
                IF EXISTS (SELECT 1 FROM ref
                    WHERE tenant = p_tenant AND digest = p_digest AND gone = 'damaged') THEN
                    PERFORM revive_1(p_tenant, p_digest);
                    SELECT coalesce(bool_or(gone IS NULL), false),
                        coalesce(bool_or(gone IS NOT NULL), false)
                        INTO is_held, was_held FROM ref
                            WHERE session_key = s.session_key AND digest = p_digest;
                END IF;
            ELSIF p_heal OR p_data IS NOT NULL THEN
                UPDATE blob SET coding = p_coding, place = p_place, frames = p_frames, data = p_data
                    WHERE tenant = p_tenant AND digest = p_digest
                    AND (coding, place, data) IS DISTINCT FROM (p_coding, p_place, p_data);
            END IF;
        END IF;
        IF is_held THEN
            SELECT * INTO held FROM ref
                WHERE session_key = s.session_key AND digest = p_digest AND gone IS NULL
                ORDER BY seq DESC LIMIT 1;
            -- a pin is on the artifact: it covers refs that come later
            is_pinned := p_pinned OR held.pinned;
            IF (held.name, held.codec, held.media_type, held.kind, held.tool, held.call_id,
            held.producer,
                    held.parents, held.summary, held.expires, held.pinned, held.granted_by,
                    held.request, held.metadata_json)
                    IS NOT DISTINCT FROM (p_name, p_codec, p_media_type, p_kind, p_tool, p_call_id,
                    p_producer, p_parents, p_summary, p_expires, is_pinned, p_granted_by, p_request,
                        p_metadata_json)
                AND (p_name IS NULL OR held.seq = (SELECT max(seq) FROM ref
                    WHERE session_key = s.session_key AND sha256(name) = sha256(p_name))) THEN
                UPDATE blob SET refs = refs - 1 WHERE tenant = p_tenant AND digest = p_digest;
                UPDATE session SET used = greatest(used, p_now) WHERE session_key = s.session_key;
                RETURN near;
            END IF;
        ELSIF was_held THEN
            DELETE FROM ref WHERE session_key = s.session_key AND digest = p_digest
                AND gone IS NOT NULL;
        END IF;
        INSERT INTO ref VALUES (s.session_key, s.next_seq, p_tenant, p_digest, p_size, p_name,
            p_codec, p_media_type, p_kind, p_tool, p_call_id, p_producer, p_parents, p_summary,
            p_now, p_expires, is_pinned, p_granted_by, p_request, p_metadata_json, NULL);
        UPDATE session SET next_seq = next_seq + 1, used = greatest(used, p_now),
            attempts = substr(p_attempt || attempts, 1, 128),
            used_bytes = used_bytes + CASE WHEN is_held THEN 0 ELSE p_size END
                WHERE session_key = s.session_key;
        RETURN coalesce(near, '{}');
    END $$""",
)
_WITH_TENANTS: Final = (
    "session",
    "blob",
    "ref",
    "note",
    "passage",
    "indexed",
    "held",
    "followed",
    "stored",
)
_SECURED: Final = tuple(
    statement
    for table in _WITH_TENANTS
    for statement in (
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
        (
            f"CREATE POLICY own_tenant ON {table}"
            " USING (tenant = current_setting('coatcheck.tenant', true))"
        ),
    )
)
STEPS: Final[list[Step]] = [
    Step(_TABLES + _SECURED),
    Step(indexes={"session_by_creation": "session (tenant, created)"}),
]


def migrate(connections: Connections, *, create: bool = True) -> None:
    """Migrate the schema to the version that this code knows; any number of machines may do so. A
    newer schema is used as it is, if it still supports this version."""
    known = connections.run(lambda db: _version(db, connections.schema), "opening the catalog")
    if known is None and not create:
        raise StoreUnavailable(
            "no store found in this schema", hint="check the url, or create the store with a put"
        )
    if known is None or known < len(STEPS):
        connections.once(lambda db: _take_steps(db, connections), "migrating the catalog", own=True)
    elif known > len(STEPS):
        ((needed,),) = connections.ask("SELECT max(tolerates) FROM applied_step")
        if needed > len(STEPS):
            raise UnsupportedFormat(
                f"this store has format {known}; this version of coatcheck knows {len(STEPS)}"
            )


def _version(db: Db, schema: str) -> int | None:
    # Not `to_regclass`: it answers from a cache, and another machine may just have created the
    # table.
    made = (
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s"
    )
    names = {
        name
        for (name,) in db.execute(made + " AND c.relname IN ('applied_step', 'format')", (schema,))
    }
    if "format" in names:
        raise development_format()
    if not names:
        return None
    found = db.execute("SELECT max(version) FROM applied_step").fetchone()
    return int(found[0] or 0) if found else 0


def _take_steps(db: Db, connections: Connections) -> None:
    _lock(db, connections.patience)
    known = _version(db, connections.schema)
    is_new = not known
    if known is None:
        with db.transaction():
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {connections.schema}")
            db.execute(_APPLIED)
    for number, step in enumerate(STEPS[known or 0 :], (known or 0) + 1):
        with db.transaction():
            for statement in step.change:
                db.execute(statement)
            if step.change:
                _note(db, number, step)
        if not step.change:
            _index(db, step, connections.schema, beside="" if is_new else "CONCURRENTLY")
            _note(db, number, step)


def _lock(db: Db, patience: float) -> None:
    """Take the lock, which is kept until the connection is closed. This polls: creating an index
    concurrently waits for every statement that began before it, so it would wait for one that waits
    for this lock."""
    until = time.monotonic() + patience
    while db.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).fetchone() != (True,):
        if time.monotonic() > until:
            raise StoreUnavailable(
                "another process is migrating the catalog", hint="try again", may_retry=True
            )
        time.sleep(_PAUSE)


def _note(db: Db, number: int, step: Step) -> None:
    db.execute(
        "INSERT INTO applied_step (version, tolerates) VALUES (%s, %s)", (number, step.tolerates)
    )


def _index(db: Db, step: Step, schema: str, *, beside: str) -> None:
    """Drop and create the step's indexes. Remains of an interrupted attempt are removed first."""
    broken = db.execute(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = ANY (%s)"
        " AND NOT i.indisvalid",
        (schema, list(step.indexes)),
    ).fetchall()
    for name in (*(name for (name,) in broken), *step.dropped):
        db.execute(f"DROP INDEX {beside} IF EXISTS {name}")
    for name, on in step.indexes.items():
        db.execute(f"CREATE INDEX {beside} IF NOT EXISTS {name} ON {on}")
