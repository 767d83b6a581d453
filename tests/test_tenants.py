"""Tenants are isolated: the data of one never affects or reveals the data of another, on every
backend."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck.cli import main
from coatcheck.errors import InvalidArgument, NotFound, QuotaExceeded
from coatcheck.ids import digest_of
from tests.backends import LARGE, Backend, Fleet

ODD = [
    "acme",
    "../acme",
    "a\0b",
    "'; DROP TABLE ref; --",
    "x" * 10_000,
    "É",
    "-c search_path=public",
    "\\ \t\n",
]


def test_the_artifacts_of_a_tenant_are_visible_only_to_that_tenant(backend: Backend) -> None:
    store = backend.open()
    ref = store.tenant("acme").session("s").put("theirs " * 10, name="n")
    for other in (store, store.tenant("umbrella")):
        session = other.session("s")
        assert session.get("n") is None
        assert session.get(ref.pointer) is None
        assert session.list() == []
        assert session.search("theirs") == []
        with pytest.raises(NotFound) as hidden:
            session.read(ref.pointer)
        with pytest.raises(NotFound) as missing:
            session.read("art:000000000000")
        assert str(hidden.value).replace(ref.pointer, "") == str(missing.value).replace(
            "art:000000000000", ""
        )
    assert store.tenant("acme").session("s").get("n") == "theirs " * 10


@pytest.mark.parametrize("size", [100, LARGE])
def test_each_tenant_deduplicates_separately(backend: Backend, size: int) -> None:
    store = backend.open()
    for name in ("acme", "umbrella"):
        store.tenant(name).session("s").put("x" * size)
        assert store.tenant(name).stats().stored_bytes == size
    assert store.stats().stored_bytes == 0
    store.tenant("acme").session("s").end()
    assert store.tenant("umbrella").session("s").list()
    assert store.tenant("umbrella").verify().problems == []


def test_each_tenant_has_its_own_quota(backend: Backend) -> None:
    store = backend.open()
    acme = store.tenant("acme", quota_bytes=100)
    acme.session("s").put("x" * 90)
    with pytest.raises(QuotaExceeded):
        acme.session("s").put("y" * 90)
    store.tenant("umbrella").session("s").put("y" * 90)


def test_collecting_for_one_tenant_leaves_the_others(backend: Backend) -> None:
    store = backend.open()
    kept = store.tenant("acme").session("s").put("x" * LARGE)
    store.tenant("umbrella").collect(grace=0)
    store.collect(grace=0)
    assert store.tenant("acme").session("s").get(kept.pointer) == "x" * LARGE


def test_the_name_of_a_tenant_is_data(backend: Backend) -> None:
    store = backend.open()
    for name in ODD:
        store.tenant(name).session("s").put(name, name="who")
    for name in ODD:
        assert store.tenant(name).session("s").get("who") == name


def test_a_tenant_is_still_there_after_the_store_was_closed(backend: Backend) -> None:
    if backend.url == "memory:":
        return
    store = backend.open()
    store.tenant("acme").session("s").put("kept", name="n")
    store.close()
    assert backend.open().tenant("acme").session("s").get("n") == "kept"


def test_the_store_of_one_tenant_can_be_opened_directly(backend: Backend) -> None:
    with backend.open(tenant="acme") as alone:
        alone.session("s").put("of acme", name="n")
        with pytest.raises(InvalidArgument):
            alone.tenant("inner")
    if backend.url == "memory:":
        return
    store = backend.open()
    assert store.tenant("acme").session("s").get("n") == "of acme"
    assert store.session("s").get("n") is None
    with backend.open(tenant="acme", quota_bytes=10) as bounded, pytest.raises(QuotaExceeded):
        bounded.session("s").put("much more than ten bytes")
    with pytest.raises(InvalidArgument):
        backend.open(tenant="")


def test_a_command_works_for_the_tenant_that_the_environment_names(tmp_path: Path) -> None:
    def run(*args: str, tenant: str = "", stdin: str = "") -> str:
        runner = CliRunner(
            env={"COATCHECK_STORE": str(tmp_path / "store"), "COATCHECK_TENANT": tenant or "none"}
        )
        done = runner.invoke(main, args, input=stdin)
        assert done.exit_code == 0, done.output
        return done.stdout

    run("put", "-", "--name", "n", tenant="acme", stdin="of acme")
    run("put", "-", "--name", "n", stdin="nobody's")
    assert (run("get", "n", tenant="acme"), run("get", "n")) == ("of acme", "nobody's")
    assert json.loads(run("stats", "--json", tenant="umbrella"))["refs"] == 0
    assert json.loads(run("collect", "--no-orphans", "--json", tenant="acme"))["refs"] == 0
    run("copy", str(tmp_path / "store"), str(tmp_path / "copy"), "--tenant", "acme")
    with coatcheck.open(tmp_path / "copy", tenant="acme") as copied:
        assert copied.session("default").get("n") == b"of acme"


def test_a_tenant_has_no_tenants_and_needs_a_name(backend: Backend) -> None:
    store = backend.open()
    with pytest.raises(InvalidArgument):
        store.tenant("acme").tenant("inner")
    with pytest.raises(InvalidArgument):
        store.tenant("")


def test_row_level_security_hides_other_tenants_from_a_role_that_is_subject_to_it(
    fleet: Fleet,
) -> None:
    role = f"app_{fleet.new_url().partition('schema=')[2].partition('&')[0]}"
    with psycopg.connect(fleet.database.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS")
        admin.execute(f"GRANT CREATE ON DATABASE postgres TO {role}")
    url = fleet.new_url().replace("postgres@", f"{role}@")
    schema = url.partition("schema=")[2].partition("&")[0]
    with coatcheck.open(url) as store:
        for name in ("acme", "umbrella"):
            store.tenant(name).session("s").put(f"of {name}", name="n")
        assert store.tenant("acme").session("s").get("n") == "of acme"
    counted = f"SELECT count(*) FROM {schema}.ref"
    with psycopg.connect(
        fleet.database.url.replace("postgres@", f"{role}@"), autocommit=True
    ) as db:
        assert db.execute(counted).fetchone() == (0,), "no row is visible without a tenant"
        db.execute(f"SET coatcheck.tenant = '{digest_of(b'acme')}'")
        assert db.execute(counted).fetchone() == (1,)
        assert db.execute(f"UPDATE {schema}.ref SET pinned = true").rowcount == 1
