"""Folders that are not a store, or not a supported one: each raises its own kind of error, and
nothing is changed."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import coatcheck
from coatcheck.errors import Damaged, StoreUnavailable, UnsupportedFormat
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
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    _sql(folder, "PRAGMA user_version = 1000")
    before = _contents(folder)
    for _ in range(3):
        with pytest.raises(UnsupportedFormat, match="1000"):
            coatcheck.open(folder)
    assert _contents(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        f"PRAGMA application_id = {0x434F4154}",
        f"PRAGMA application_id = {0x434F4143}",
        "ALTER TABLE blob DROP COLUMN used",
        "ALTER TABLE ref ADD COLUMN weight",
        "DROP INDEX ref_damaged",
        "DROP TABLE note",
    ],
)
def test_a_store_of_a_development_version_is_refused_and_left_as_it_is(
    tmp_path: Path, change: str
) -> None:
    folder = tmp_path / "store"
    _made(folder)
    _sql(folder, change)
    before = _contents(folder)
    for _ in range(2):
        with pytest.raises(UnsupportedFormat, match="development version"):
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


def test_a_file_that_vanishes_while_the_folder_is_listed_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    kept = _made(folder)
    listed = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda path: [*listed(path), "search.sqlite", "catalog.sqlite-wal"]
    )
    with coatcheck.open(folder) as store:
        assert store.session("s").get(kept) == b"what was put"


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    _sql(folder, "PRAGMA application_id = 252006673")
    _sql(folder, "CREATE TABLE theirs (one)")
    with pytest.raises(StoreUnavailable, match="another program"):
        coatcheck.open(folder)


def test_a_file_that_is_not_a_database_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    _made(folder)
    (folder / "catalog.sqlite").write_bytes(b"this is not a database, despite its name\n" * 200)
    with pytest.raises(Damaged):
        coatcheck.open(folder)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _without_tables(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


def _of_others(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (one)")
    db.close()


def _cut_to_its_header(path: Path) -> None:
    os.truncate(path, 100)


def _cut_to_a_page(path: Path) -> None:
    os.truncate(path, 4096)


def _cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "harm",
    [
        _empty,
        _without_tables,
        _of_others,
        _cut_to_its_header,
        _cut_to_a_page,
        _cut_in_half,
        _zeroed,
    ],
)
@pytest.mark.parametrize("left", [["blobs"], ["reserve"], ["blobs", "tmp", "reserve"]])
def test_a_store_that_lost_its_catalog_is_refused_and_left_as_it_is(
    harm: Callable[[Path], None], left: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    _made(folder)
    for name in {"blobs", "tmp", "reserve"} - set(left):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    harm(folder / "catalog.sqlite")
    before = _contents(folder)
    for _ in range(2):
        with pytest.raises((StoreUnavailable, Damaged)) as error:
            coatcheck.open(folder)
        assert error.value.hint
        after = {
            name: data
            for name, data in _contents(folder).items()
            if not name.startswith("catalog.sqlite-")
        }
        assert after == before


def test_an_empty_catalog_beside_a_wal_is_refused_and_the_wal_is_kept(tmp_path: Path) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    _made(folder)
    with coatcheck.open(folder) as store:
        store.session("t", ttl=5.0)
        shutil.copytree(folder, copy)  # as after a kill
    for name in ("blobs", "tmp"):
        shutil.rmtree(copy / name)
    (copy / "reserve").unlink()
    (copy / "catalog.sqlite").write_bytes(b"")
    before = _contents(copy)
    assert before["catalog.sqlite-wal"]
    with pytest.raises(StoreUnavailable):
        coatcheck.open(copy)
    assert _contents(copy) == before


@pytest.mark.parametrize("held", [[], ["lock"], ["lock", "catalog.sqlite"]])
def test_a_new_store_that_a_crash_left_incomplete_can_be_opened(
    held: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    for name in held:
        (folder / name).touch()
    with coatcheck.open(folder) as store:
        assert store.stats().refs == 0
        assert_clean(store)
