"""The fleet's backend conforms to both protocols and to its documentation, on a real SeaweedFS and
PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import psycopg
import pytest

import coatcheck
from coatcheck.errors import Fenced
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog, postgres_upkeep
from coatcheck.storage.entries import Freed
from coatcheck.storage.fleet import open_fleet, parse
from coatcheck.storage.postgres_catalog import PostgresCatalog
from coatcheck.storage.s3 import S3Blobs
from coatcheck.testing import BlobStoreSuite, CatalogSuite
from tests import warm
from tests.backends import LARGE, PROCESSES, Fleet, released_by
from tests.servers import SECRET

CANARY = "hunter2-canary"


class TestS3Blobs(BlobStoreSuite):
    @pytest.fixture(autouse=True)
    def _place(self, fleet: Fleet) -> Iterator[None]:
        self.catalogs: list[Catalog] = []
        with fleet.lending() as new_url:
            self.url = new_url()
            yield
            for catalog in self.catalogs:
                catalog.close()

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        blobs, catalog, _ = open_fleet(parse(self.url), patience=10)
        self.catalogs.append(catalog)
        return blobs

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        assert isinstance(blobs, S3Blobs)
        path = blobs._path(blob)
        data = bytearray(bytes(obstore.get(blobs._bucket, path).bytes()))
        data[offset] ^= 1
        obstore.put(blobs._bucket, path, bytes(data))
        blobs._cache.clear()
        return True


class TestPostgresCatalog(CatalogSuite):
    @pytest.fixture(autouse=True)
    def _place(self, fleet: Fleet) -> Iterator[None]:
        with fleet.lending() as new_url:
            self.url = new_url()
            yield

    def make_catalog(self, tmp_path: Path) -> Catalog:
        blobs, catalog, _ = open_fleet(parse(self.url), patience=10)
        blobs.close()
        assert isinstance(catalog, PostgresCatalog)
        return catalog


# Roles


@pytest.fixture
def workers(fleet: Fleet) -> str:
    """Url of a store for a role that owns nothing: an owner created the schema and granted the
    documented rights."""
    owner, worker = (f"{who}_{parse(fleet.new_url()).schema}" for who in ("owner", "worker"))
    url = fleet.new_url()
    schema = parse(url).schema
    with psycopg.connect(fleet.database.url, autocommit=True) as admin:
        for role in (owner, worker):
            admin.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS")
        admin.execute(f"GRANT CREATE ON DATABASE postgres TO {owner}")
    coatcheck.open(url.replace("postgres@", f"{owner}@")).close()
    with psycopg.connect(
        fleet.database.url.replace("postgres@", f"{owner}@"), autocommit=True
    ) as db:
        for granted in (
            f"USAGE ON SCHEMA {schema}",
            f"SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}",
            f"USAGE ON ALL SEQUENCES IN SCHEMA {schema}",
            f"EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema}",
        ):
            db.execute(f"GRANT {granted} TO {worker}")
    return url.replace("postgres@", f"{worker}@")


def test_a_role_with_the_documented_rights_can_do_everything_that_an_agent_needs(
    workers: str,
) -> None:
    with coatcheck.open(workers) as store:
        session = store.session("s")
        small, large = (
            session.put("small words", name="small"),
            session.put("x" * LARGE, name="large"),
        )
        assert (session.get(small), session.get(large)) == ("small words", "x" * LARGE)
        assert len(session.list()) == 2
        assert [hit.ref.name for hit in session.search("words")] == ["small"]
        assert session.read("large", chars="0:9").text == "x" * 9
        assert session.coverage("large").shown == 9
        token = session.claim("dispatcher")
        assert session.record("hot", b"state", token=token) == 1
        assert session.record("metrics", b"figures", keep=1) == 1
        assert session.externalize("a long result\n" * 5_000).is_stub
        session.grant(small, to="friend")
        store.tenant("acme").session("s").put("theirs" * LARGE)
        assert session.forget("large")
        store.session("friend").end()
        store.collect(grace=0)
        assert store.stats().artifacts == 2
        assert store.verify(repair=True).problems == []


def test_a_role_that_owns_nothing_cannot_drop_tables_or_policies(workers: str) -> None:
    coatcheck.open(workers).close()
    place = parse(workers)
    with psycopg.connect(place.catalog, autocommit=True) as db:
        for statement in (
            f"DROP TABLE {place.schema}.ref", f"ALTER TABLE {place.schema}.ref DISABLE ROW LEVEL SECURITY",
            f"DROP POLICY own_tenant ON {place.schema}.ref", f"CREATE TABLE {place.schema}.mine (n int)",
            f"TRUNCATE {place.schema}.ref",
        ):  # fmt: skip
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(statement)


# Credentials


def url_with_secrets(fleet: Fleet) -> tuple[str, str]:
    """Return a url that contains working secrets, and the same url without them."""
    url = fleet.new_url().replace("postgres@", f"postgres:{CANARY}@")
    return url, f"s3://coatcheck/{parse(url).prefix}"


def assert_no_secret(*outputs: str | bytes) -> None:
    for one in outputs:
        text = one.decode(errors="replace") if isinstance(one, bytes) else one
        for secret in (SECRET, CANARY):
            assert secret not in text
            assert urllib.parse.quote(secret, safe="") not in text


def test_a_file_of_settings_names_the_store_and_its_credentials(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bare = url_with_secrets(fleet)
    (tmp_path / "coatcheck.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n")
    (tmp_path / "coatcheck.toml").chmod(0o600)
    monkeypatch.delenv("COATCHECK_STORE", raising=False)
    named = {"COATCHECK_CONFIG": str(tmp_path / "coatcheck.toml")}
    monkeypatch.setenv("COATCHECK_CONFIG", named["COATCHECK_CONFIG"])
    with coatcheck.open() as store:
        assert store.url == bare
        ref = store.session("s").put("x" * LARGE, name="n")
        assert_no_secret(repr(store), str(ref.to_record()))
    assert command("get", "n", "--session", "s", env=named).stdout == b"x" * LARGE


# The command line


def command(*words: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
    env |= {"PYTHONPATH": ":".join(sys.path)} | options.pop("env", {})
    done = subprocess.run(
        warm.command("coatcheck", *words),
        input=stdin,
        capture_output=True,
        timeout=60,
        env=env,
        **options,
    )
    assert done.returncode == 0, done.stderr
    assert_no_secret(done.stdout, done.stderr)
    return done


def test_every_command_works_on_a_fleet_and_shows_no_secret(fleet: Fleet, tmp_path: Path) -> None:
    env = {"COATCHECK_SESSION": "s", "COATCHECK_STORE": url_with_secrets(fleet)[0]}

    def run(*words: str, stdin: bytes = b"") -> str:
        return command(*words, stdin=stdin, env=env).stdout.decode()

    large = b"one line of a log\n" * (LARGE // 10)
    put = json.loads(run("put", "-", "--name", "log", "--json", stdin=large))
    assert run("get", "log").encode() == large
    assert put["artifact_id"][:12] in run("ls")
    assert run("read", "log", "--lines", "2:3") == "one line of a log\n" * 2
    assert put["artifact_id"][:12] in run("search", "line", "log")
    assert json.loads(run("stats", "--json"))["artifacts"] == 1
    run("collect", "--grace", "0")
    assert json.loads(run("verify", "--json"))["problems"] == []
    archive = tmp_path / "archive.jsonl"
    run("export", str(archive))
    assert_no_secret(archive.read_bytes())
    run("forget", "log")
    run("import", "--merge", str(archive))
    assert run("get", "log").encode() == large
    assert "s3://coatcheck/" in run("config", "store", "--json")


def test_secrets_in_a_url_on_the_command_line_are_not_printed(fleet: Fleet) -> None:
    url, _ = url_with_secrets(fleet)
    rows = json.dumps([{"n": number, "text": f"word {number}"} for number in range(2_000)]).encode()
    command("put", "-", "--name", "rows", "--store", url, stdin=rows)
    assert b"rows" in command("search", "word", "--store", url).stdout
    assert command("read", "rows", "--query", "$[*].text", "--store", url).stdout


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("get", "nothing"), ("", "")),
        (("put", "no such file"), ("", "")),
        (("put", "large"), (SECRET, CANARY)),
        (("ls",), ("schema=", "colour=")),
        (("stats",), ("schema=", "schema=not_yet_")),
    ],
)
def test_a_command_that_fails_on_a_fleet_shows_no_secret(
    fleet: Fleet, tmp_path: Path, words: tuple[str, ...], wrong: tuple[str, str]
) -> None:
    (tmp_path / "large").write_bytes(bytes(LARGE))
    url, _ = url_with_secrets(fleet)
    coatcheck.open(url).close()
    done = subprocess.run(
        warm.command("coatcheck", *words, "--store", url.replace(*wrong) if all(wrong) else url),
        capture_output=True, timeout=60, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr
    assert_no_secret(done.stdout, done.stderr)


# Processes


def take_turns(url: str, worker: int, rounds: int) -> list[int]:
    """Put, name, record and claim in one session, concurrently with others. Return the numbers of
    the records."""
    numbers = []
    with coatcheck.open(url) as store:
        session = store.session("shared")
        for turn in range(rounds):
            value = f"{worker} {turn} " * (LARGE // 4 if turn % 5 == 0 else 1)
            session.put(value, name=f"{worker}/{turn}")
            session.put("the same of both", name="common")
            numbers.append(session.record("metrics", f"{worker} {turn}".encode()))
            assert session.get(f"{worker}/{turn}") == value
            token = session.claim(f"worker {worker}")
            try:
                session.record("hot", f"{worker} {turn}".encode(), token=token)
            except Fenced:
                pass  # the other process claimed in between
    return numbers


def test_two_processes_in_one_session_lose_and_duplicate_nothing(fleet: Fleet) -> None:
    url, rounds = fleet.new_url(), 15
    with PROCESSES.Pool(2) as pool:  # neither has created the schema
        numbers = pool.starmap(take_turns, [(url, worker, rounds) for worker in range(2)])
    assert sorted(number for some in numbers for number in some) == list(range(1, 2 * rounds + 1))
    with coatcheck.open(url) as store:
        session = store.session("shared")
        assert {ref.name for ref in session.list()} == {
            *(f"{worker}/{turn}" for worker in range(2) for turn in range(rounds)), "common",
        }  # fmt: skip
        assert len(session.list(name="common")) == 1
        assert {one.body for one in session.records("metrics")} == {
            f"{worker} {turn}".encode() for worker in range(2) for turn in range(rounds)
        }
        hot = session.records("hot")
        assert [one.seq for one in hot] == list(range(1, len(hot) + 1))
        assert [one.token for one in hot] == sorted(one.token or 0 for one in hot)
        store.collect(grace=0)
        assert store.stats().artifacts == 2 * rounds + 1
        assert store.verify().problems == []


def test_a_search_fetches_large_artifacts_all_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, together = fleet.new_url(), threading.Barrier(4)
    fetched = S3Blobs._fetched

    def waiting(self: S3Blobs, blob: Blob, first: int, last: int) -> list[memoryview]:
        together.wait(60)  # breaks if they are fetched one after the other
        return fetched(self, blob, first, last)

    with coatcheck.open(url) as store:
        for number in range(4):
            store.session("s").put(f"needle {number} " + f"filler {number} " * 20_000)
    monkeypatch.setattr(S3Blobs, "_fetched", waiting)
    with coatcheck.open(url) as store:
        assert len(store.session("s").search("needle")) == 4
    with coatcheck.open(url) as store:
        assert {hit.lines for hit in store.session("s").search("needle")} == {(1, 1)}


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return released_by(PostgresCatalog, postgres_upkeep, monkeypatch)


def test_a_large_session_ends_in_bounded_transactions(fleet: Fleet, released: list[int]) -> None:
    with coatcheck.open(fleet.new_url()) as store:
        for number in range(10):
            store.session("s").put(f"result {number}")
        kept = store.session("other").put("result 0")
        assert store.session("s").end() == 9
        assert (sum(released), max(released)) == (10, 3)
        assert store.session("other").get(kept) == "result 0"
        assert [one.session_id for one in store.sessions()] == ["other"]
        assert store.verify().problems == []


def test_a_collection_completes_the_end_of_a_session_that_was_interrupted(
    fleet: Fleet, released: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with coatcheck.open(fleet.new_url()) as store:
        for number in range(10):
            store.session("s").put(f"result {number}")
        store.session("s").pin(store.session("s").put("result 4"))
        with monkeypatch.context() as patch:
            patch.setattr(PostgresCatalog, "_end_some", lambda self, key: (Freed(), 1 / 0))
            with pytest.raises(ZeroDivisionError):
                store.session("s").end()
        assert list(store.sessions()) == []
        assert store.stats().sessions == 0
        assert store.verify().problems == []
        again = store.session("s").put("result 0")
        store.collect()
        assert sum(released) == 10
        assert [store.session("s").get(again), len(store.session("s").list())] == ["result 0", 1]
        assert store.stats().artifacts == 1
        assert store.verify().problems == []


def test_a_large_session_expires_in_bounded_transactions(fleet: Fleet, released: list[int]) -> None:
    now = [1000.0]
    with coatcheck.open(fleet.new_url(), ttl=10, clock=lambda: now[0]) as store:
        for number in range(10):
            store.session("s").put(f"result {number}")
        store.session("s").pin(store.session("s").put("result 4"))
        for number in range(5):
            store.session("kept", ttl=None).put(f"own {number}", ttl=10)
        now[0] += 60
        assert store.collect(grace=0).refs == 14
        assert (sum(released), max(released)) == (14, 3)
        now[0] += 30 * 86_400
        store.collect(grace=0)
        assert len(store.session("s").list()) == 1
        assert store.verify().problems == []
