"""A fleet's schema is migrated while processes of the previous version keep using it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import UnsupportedFormat
from coatcheck.ids import digest_of
from coatcheck.storage import postgres_schema
from coatcheck.storage.fleet import Place, parse
from coatcheck.storage.postgres import Connections
from coatcheck.storage.postgres_steps import STEPS
from tests.backends import Fleet

# The exact statement of a process of the first version.
FIRST_PUT = f"SELECT put_1({', '.join(['%s'] * 29)})"
FIRST_FORGET = "SELECT digest FROM let_go_1(%s, %s, %s, %s)"


@contextmanager
def connected(place: Place, tenant: str = "") -> Iterator[psycopg.Connection[Any]]:
    connections = Connections(place.catalog, schema=place.schema, tenant=tenant)
    with connections.connect() as db:
        yield db


def put_as_before(db: psycopg.Connection[Any], content: bytes, *, session: str = "old", tenant: str = "") -> None:
    digest = bytes.fromhex(digest_of(content))
    values = (tenant, session.encode(), None, 3600.0, None, time.time(), 7200.0, None, digest, len(content), "inline",
              "", b"", content, False, False, None, "bytes", b"text/plain", "result", None, None, "system", "", b"",
              None, False, None, None)  # fmt: skip
    db.execute(FIRST_PUT, values)


@pytest.fixture
def first(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> str:
    """Url of a store as the first version created it."""
    url = fleet.new_url()
    make_first(url, monkeypatch)
    return url


def make_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = parse(url)
    with monkeypatch.context() as patched:
        patched.setattr(postgres_schema, "STEPS", STEPS[:1])
        connections = Connections(place.catalog, schema=place.schema)
        postgres_schema.migrate(connections)
        connections.close()


def _moment(later: float) -> float:
    return time.time() + later


def stored(store: Store, place: Place) -> int:
    with connected(place) as db:
        found = db.execute("SELECT sum(bytes) FROM stored WHERE tenant = ''").fetchone()
    assert found is not None
    return int(found[0] or 0)


def test_processes_of_the_previous_version_put_during_and_after_a_migration(first: str) -> None:
    place, stop = parse(first), threading.Event()
    written: list[tuple[str, bytes]] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with connected(place) as db:
                while not stop.is_set():
                    content = f"{number} {len(written)}".encode()
                    put_as_before(db, content, session=f"old {number}")
                    written.append((f"old {number}", content))
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while len(written) < 20 and not failed:
        time.sleep(0.01)
    with coatcheck.open(first) as store:
        before = len(written)
        while len(written) < before + 50 and not failed:
            store.session("new").put(f"new {len(written)}", ttl=None)
        stop.set()
        for thread in threads:
            thread.join()
        assert failed == []
        for session, content in written:
            assert store.session(session).get(digest_of(content)) == content
        assert store.verify().problems == []
        assert stored(store, place) == store.stats().stored_bytes > 0


def test_what_the_previous_version_releases_is_counted_and_collected(first: str) -> None:
    place, content = parse(first), b"let go by one of the version before"
    with coatcheck.open(first) as store, connected(place) as db:
        put_as_before(db, content)
        with db.transaction():
            ((key,),) = db.execute("SELECT session_key FROM session WHERE session_id = 'old' FOR UPDATE").fetchall()
            db.execute("DELETE FROM ref WHERE session_key = %s", (key,))
            db.execute(FIRST_FORGET, ("", key, [bytes.fromhex(digest_of(content))], [len(content)]))
        assert store.stats().artifacts == stored(store, place) == 0
        put_as_before(db, content)
    with coatcheck.open(first, clock=lambda: time.time() + 86_400) as store:
        assert store.collect().refs == 1
        assert store.verify().problems == []
        assert stored(store, place) == 0


def test_sessions_from_before_a_migration_expire_and_lose_their_tombstones(first: str) -> None:
    with connected(parse(first)) as db:
        for i in range(150):
            put_as_before(db, b"x", session=f"old {i}")
    day = 86_400.0
    for later, refs, sessions in ((0.0, 0, 150), (day, 150, 150), (2 * day, 0, 150), (10 * day, 0, 0)):
        with coatcheck.open(first, clock=partial(_moment, later)) as store:
            assert store.collect().refs == refs
            assert store.stats().sessions == sessions


def test_every_tenants_bytes_are_counted_where_the_owner_is_subject_to_row_level_security(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fleet.new_url()
    role = f"owner_{parse(url).schema}"
    with psycopg.connect(fleet.database.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS")
        admin.execute(f"GRANT CREATE ON DATABASE postgres TO {role}")
    url = url.replace("postgres@", f"{role}@")
    make_first(url, monkeypatch)
    place = parse(url)
    for name in ("acme", "umbrella"):
        with connected(place, name) as db:
            put_as_before(db, f"of {name}".encode(), tenant=digest_of(name.encode()))
    with coatcheck.open(url) as store:
        for name in ("acme", "umbrella"):
            with pytest.raises(coatcheck.errors.QuotaExceeded) as told:
                store.tenant(name, quota_bytes=20).session("s").put("y" * 20)
            assert f"{len(name) + 3} of 20" in str(told.value)


def test_an_interrupted_index_is_created_again(first: str) -> None:
    place = parse(first)
    with connected(place) as db:
        for session in ("one", "two"):
            put_as_before(db, b"x", session=session)
        with pytest.raises(psycopg.errors.UniqueViolation):
            db.execute("CREATE UNIQUE INDEX CONCURRENTLY session_by_look ON session (tenant)")
        with coatcheck.open(first) as store:
            assert store.verify().problems == []
        valid = db.execute(
            "SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = 'session_by_look'::regclass"
        ).fetchone()
        assert valid == (True, False)


def test_any_number_of_processes_may_open_an_older_schema(first: str) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with coatcheck.open(first) as store:
                store.session(f"s{number}").put("x")
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with coatcheck.open(first) as store:
        assert store.stats().sessions == 6


def test_a_schema_of_a_newer_version_is_used_as_long_as_it_tolerates_this_one(fleet: Fleet) -> None:
    url = fleet.new_url()
    coatcheck.open(url).close()
    with connected(parse(url)) as db:
        db.execute("INSERT INTO format (version, tolerates) VALUES (98, 1)")
        with coatcheck.open(url) as store:
            assert store.session("s").get(store.session("s").put("x").pointer) == "x"
        db.execute("INSERT INTO format (version, tolerates) VALUES (99, 98)")
    with pytest.raises(UnsupportedFormat):
        coatcheck.open(url)
