"""Folders that are no store, or not one for us: each is told in an error of its own kind, and nothing is changed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

import coatcheck
from coatcheck.errors import Damaged, StoreError, StoreUnavailable, UnsupportedFormat
from tests.faults.world import assert_clean

pytestmark = pytest.mark.faults


def _made(folder: Path) -> str:
    with coatcheck.open(folder) as store:
        ref = store.session("s", ttl=None).put(b"what was put")
        store.session("s").put(b"x" * 200_000)
    return ref.artifact_id


def _sql(folder: Path, statement: str) -> None:
    db = sqlite3.connect(folder / "catalog.sqlite")
    db.execute(statement)
    db.commit()
    db.close()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    _sql(folder, "PRAGMA user_version = 1000")
    before = _contents(folder)
    for _ in range(3):
        with pytest.raises(UnsupportedFormat, match="1000"):
            coatcheck.open(folder)
    assert _contents(folder) == before


def test_a_refused_store_leaves_no_file_open(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    _sql(folder, "PRAGMA user_version = 1000")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(10):
        with pytest.raises(UnsupportedFormat):
            coatcheck.open(folder)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_opening_and_closing_leaves_no_file_open(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(5):
        with coatcheck.open(folder) as store:
            assert len(store.session("s").list()) == 2
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    _sql(folder, "PRAGMA application_id = 252006673")
    _sql(folder, "CREATE TABLE theirs (one)")
    with pytest.raises(StoreUnavailable, match="another program"):
        coatcheck.open(folder)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    (folder / "catalog.sqlite").write_bytes(b"this is no database, whatever its name says\n" * 200)
    with pytest.raises(Damaged):
        coatcheck.open(folder)


def test_a_journal_that_is_gone_after_a_clean_close_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kept = _made(folder)
    (folder / "journal").unlink()
    with coatcheck.open(folder) as store:
        assert store.session("s").get(kept) == b"what was put"
        store.session("s").put(b"more")
        assert_clean(store)


@pytest.mark.parametrize("content", [b"", b"\0" * 32, b"\0" * 4096, b"something else entirely, and long enough"])
def test_a_journal_that_is_damaged_is_told_with_a_way_out(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kept = _made(folder)
    (folder / "journal").write_bytes(content)
    with pytest.raises(StoreError) as error:
        coatcheck.open(folder)
    assert "journal" in error.value.hint
    (folder / "journal").unlink()
    with coatcheck.open(folder) as store:
        assert store.session("s").get(kept) == b"what was put"


def test_a_store_on_a_read_only_file_system_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    mounted = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(mounted.stderr.decode())
        pytest.skip("mounting is not possible here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        with pytest.raises(StoreUnavailable):
            coatcheck.open(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    with coatcheck.open(folder) as store:
        assert_clean(store)
