"""A fleet's schema is migrated in numbered steps while processes of the previous version keep using
it. The steps here are made up: the first released schema has no history."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

import coatcheck
from coatcheck.errors import UnsupportedFormat
from coatcheck.ids import digest_of
from coatcheck.storage import postgres_schema
from coatcheck.storage.fleet import Place, parse
from coatcheck.storage.postgres import Connections
from coatcheck.storage.postgres_schema import STEPS, Step
from tests.backends import Fleet

# A new table that a trigger fills for processes of both versions, a column with a default, and an
# index.
MADE_UP = (
    Step(
        (
            "CREATE TABLE counted (tenant text PRIMARY KEY, puts bigint NOT NULL)",
            "INSERT INTO counted SELECT tenant, count(*) FROM ref GROUP BY tenant",
            """CREATE FUNCTION count_2() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                INSERT INTO counted VALUES (NEW.tenant, 1) ON CONFLICT (tenant) DO UPDATE SET puts = counted.puts + 1;
                RETURN NULL;
            END $$""",
            "CREATE TRIGGER counted AFTER INSERT ON ref FOR EACH ROW EXECUTE FUNCTION count_2()",
            "ALTER TABLE session ADD COLUMN colour text NOT NULL DEFAULT 'red'",
        )
    ),
    Step(indexes={"session_by_colour": "session (tenant, colour)"}, dropped=("held_by_digest",)),
)


@contextmanager
def connected(place: Place) -> Iterator[psycopg.Connection[Any]]:
    with Connections(place.catalog, schema=place.schema).connect() as db:
        yield db


@pytest.fixture
def first(fleet: Fleet) -> str:
    """Url of a store as the first version created it."""
    url = fleet.new_url()
    coatcheck.open(url).close()
    return url


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that makes this process open stores like the next version. Stores already open
    stay at the first."""
    return lambda: monkeypatch.setattr(postgres_schema, "STEPS", [*STEPS, *MADE_UP])


def version(url: str) -> int:
    with connected(parse(url)) as db:
        found = db.execute("SELECT max(version) FROM applied_step").fetchone()
    assert found is not None
    return int(found[0])


def counted(url: str) -> int:
    with connected(parse(url)) as db:
        found = db.execute("SELECT puts FROM counted").fetchone()
    return int(found[0]) if found else 0


def _moment(later: float) -> float:
    return time.time() + later


def all_at_once(work: Callable[[int], None], count: int) -> list[BaseException]:
    """Run this many threads, and return the errors that they raised."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - asserted by the caller
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_processes_of_the_previous_version_put_during_and_after_a_migration(
    first: str, upgrade: Callable[[], None]
) -> None:
    written: list[tuple[str, str]] = []
    with coatcheck.open(first) as old:

        def work(number: int) -> None:
            if number:
                while len(written) < 200:
                    content = f"{number} {len(written)}"
                    old.session(f"old {number}").put(content)
                    written.append((f"old {number}", content))
                return
            while len(written) < 20:
                time.sleep(0.01)
            upgrade()
            with coatcheck.open(first) as store:
                store.session("new").put("new")

        assert all_at_once(work, 5) == []
        assert version(first) == len(STEPS) + len(MADE_UP)
        before = counted(first)
        old.session("s").put("put by the previous version")
        assert counted(first) == before + 1
    with coatcheck.open(first) as store:
        for session, content in written:
            assert store.session(session).get(digest_of(content.encode())) == content
        assert store.verify().problems == []


def test_refs_released_by_the_previous_version_are_counted_and_collected(
    first: str, upgrade: Callable[[], None]
) -> None:
    with coatcheck.open(first, ttl=3_600) as old:
        kept = old.session("kept").put("kept")
        upgrade()
        coatcheck.open(first).close()
        ref = old.session("old").put("dropped by a process of the previous version")
        old.session("old").forget(ref)
        assert old.stats().artifacts == 1
        assert old.session("kept").get(kept) == "kept"
    with coatcheck.open(first, clock=partial(_moment, 86_400)) as store:
        assert store.collect().refs == 1
        assert store.verify().problems == []
        assert store.stats().stored_bytes == 0


def test_sessions_from_before_a_migration_expire_and_lose_their_tombstones(
    first: str, upgrade: Callable[[], None]
) -> None:
    with coatcheck.open(first, ttl=3_600) as store:
        for i in range(150):
            store.session(f"old {i}").put("x")
    upgrade()
    day = 86_400.0
    for later, refs, sessions in (
        (0.0, 0, 150),
        (day, 150, 150),
        (2 * day, 0, 150),
        (10 * day, 0, 0),
    ):
        with coatcheck.open(first, clock=partial(_moment, later)) as store:
            assert store.collect().refs == refs
            assert store.stats().sessions == sessions


def test_every_tenants_bytes_are_counted_where_the_owner_is_subject_to_row_level_security(
    fleet: Fleet,
) -> None:
    url = fleet.new_url()
    role = f"owner_{parse(url).schema}"
    with psycopg.connect(fleet.database.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS")
        admin.execute(f"GRANT CREATE ON DATABASE postgres TO {role}")
    url = url.replace("postgres@", f"{role}@")
    with coatcheck.open(url) as store:
        for name in ("acme", "umbrella"):
            store.tenant(name).session("s").put(f"of {name}")
    with coatcheck.open(url) as store:
        for name in ("acme", "umbrella"):
            with pytest.raises(coatcheck.errors.QuotaExceeded) as caught:
                store.tenant(name, quota_bytes=20).session("s").put("y" * 20)
            assert f"{len(name) + 3} of 20" in str(caught.value)


def test_an_interrupted_index_is_created_again_and_an_unneeded_one_is_dropped(
    first: str, upgrade: Callable[[], None]
) -> None:
    with coatcheck.open(first) as store:
        for session in ("one", "two"):
            store.session(session).put("x")
    upgrade()
    with connected(parse(first)) as db:
        with pytest.raises(psycopg.errors.UniqueViolation):
            db.execute("CREATE UNIQUE INDEX CONCURRENTLY session_by_colour ON session (tenant)")
        with coatcheck.open(first) as store:
            assert store.verify().problems == []
        valid = db.execute(
            "SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = 'session_by_colour'::regclass"
        ).fetchone()
        assert valid == (True, False)
        assert db.execute("SELECT to_regclass('held_by_digest')").fetchone() == (None,)


def test_any_number_of_processes_may_open_an_older_schema(
    first: str, upgrade: Callable[[], None]
) -> None:
    upgrade()

    def work(number: int) -> None:
        with coatcheck.open(first) as store:
            store.session(f"s{number}").put("x")

    assert all_at_once(work, 6) == []
    assert (version(first), counted(first)) == (len(STEPS) + len(MADE_UP), 6)
    with coatcheck.open(first) as store:
        assert store.stats().sessions == 6


def test_a_schema_of_a_newer_version_is_used_as_long_as_it_tolerates_this_one(fleet: Fleet) -> None:
    url = fleet.new_url()
    coatcheck.open(url).close()
    with connected(parse(url)) as db:
        db.execute("INSERT INTO applied_step (version, tolerates) VALUES (98, 1)")
        with coatcheck.open(url) as store:
            assert store.session("s").get(store.session("s").put("x").pointer) == "x"
        db.execute("INSERT INTO applied_step (version, tolerates) VALUES (99, 98)")
    with pytest.raises(UnsupportedFormat):
        coatcheck.open(url)


def test_a_schema_of_a_development_version_is_refused(fleet: Fleet) -> None:
    url = fleet.new_url()
    coatcheck.open(url).close()
    with connected(parse(url)) as db:
        db.execute("ALTER TABLE applied_step RENAME TO format")  # its name before the first release
    with pytest.raises(UnsupportedFormat, match="development version"):
        coatcheck.open(url)
