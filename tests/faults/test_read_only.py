"""A store on a read-only file system: it can be read, and each change is an error that names the
reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import StoreUnavailable
from tests.faults.world import assert_clean, problems

pytestmark = pytest.mark.faults

LARGE = b"0123456789" * 30_000


@contextlib.contextmanager
def _mounted_read_only(folder: Path, at: Path) -> Iterator[None]:
    """Mount the folder read-only."""
    at.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "--bind", str(folder), str(at)], capture_output=True, check=False
    )
    if mounted.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(mounted.stderr.decode())
        pytest.skip("mounting is not possible here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(at)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def _fill(store: Store) -> None:
    session = store.session("s", ttl=None)
    session.put("one line\nof some words", name="text")
    session.put(LARGE, name="large")
    session.record("hot", b"a state", token=session.claim("dispatcher"))
    session.put(["a", "list"], name="json")


def _closed(folder: Path) -> None:
    with coatcheck.open(folder) as store:
        _fill(store)


def _killed(folder: Path) -> None:
    """Leave the store as after a kill: all of it is in the WAL."""
    live = folder.with_name("live")
    with coatcheck.open(live) as store:
        _fill(store)
        shutil.copytree(live, folder)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


WAYS = {"closed": _closed, "killed": _killed}
CHANGES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.session("s").put("new"),
    "put again": lambda store: store.session("s").put(["a", "list"], name="json"),
    "put large": lambda store: store.session("s").put(LARGE + b"1"),
    "pin": lambda store: store.session("s").pin("text"),
    "forget": lambda store: store.session("s").forget("text"),
    "end": lambda store: store.session("s").end(),
    "claim": lambda store: store.session("s").claim("another"),
    "record": lambda store: store.session("s").record("other", b"more"),
    "new ttl": lambda store: store.session("s", ttl=5),
    "collect": lambda store: store.collect(),
    "repair": lambda store: store.verify(repair=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_store_on_a_read_only_file_system_can_be_read(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    folder = tmp_path / "store"
    WAYS[way](folder)
    before = _contents(folder)
    with _mounted_read_only(folder, folder), coatcheck.open(folder) as store:
        session = store.session("s")
        assert session.get("text") == "one line\nof some words"
        assert session.get("large") == LARGE
        assert session.get("json") == ["a", "list"]
        assert session.read("text", lines="2-2").text.strip() == "of some words"
        assert session.open("large").read(10) == LARGE[:10]
        assert {ref.name for ref in session.list()} == {"text", "large", "json"}
        assert [one.body for one in session.records("hot")] == [b"a state"]
        assert [hit.ref.name for hit in session.search("words")] == ["text"]
        assert store.stats().refs == 3
        assert store.collect(dry_run=True).refs == 0
        assert problems(store, orphans=True) == []
        for name, change in CHANGES.items():
            with pytest.raises(StoreUnavailable) as error:
                change(store)
            assert error.value.code == "store_unavailable", name
            assert "read-only" in error.value.message, name
        assert len(session.list()) == 3
    assert _contents(folder) == before
    assert list(copies.iterdir()) == []
    with coatcheck.open(folder) as store:
        store.session("s").put("new")
        assert_clean(store)


def test_writes_from_elsewhere_are_visible_through_a_read_only_mount(tmp_path: Path) -> None:
    folder, mount = tmp_path / "store", tmp_path / "mount"
    with coatcheck.open(folder) as writer:
        _fill(writer)
        with _mounted_read_only(folder, mount), coatcheck.open(mount) as reader:
            assert reader.session("s").get("json") == ["a", "list"]
            for number in range(3):
                writer.session("s").put(f"number {number}", name="number")
                assert reader.session("s").get("number") == f"number {number}"
            writer.close()
            assert reader.session("s").get("number") == "number 2"
            # In another process: SQLite opens the files of a database once in a process, here
            # read-only.
            put = "import sys, coatcheck; coatcheck.open(sys.argv[1]).session('s').put('after', name='number')"
            subprocess.run([sys.executable, "-c", put, str(folder)], check=True)
            assert reader.session("s").get("number") == "after"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_from_a_read_only_mount_without_disturbing_the_parent(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"
    _killed(folder)
    with _mounted_read_only(folder, folder), coatcheck.open(folder) as store:
        assert store.session("s").get("json") == ["a", "list"]
        child = os.fork()
        if not child:
            is_right = store.session("s").get("json") == ["a", "list"]
            store.close()
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.session("s").get("json") == ["a", "list"]


def test_a_read_only_folder_without_a_store_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with _mounted_read_only(folder, folder), pytest.raises(StoreUnavailable):
        coatcheck.open(folder)
    with _mounted_read_only(folder, folder), pytest.raises(StoreUnavailable):
        coatcheck.open(folder / "below")
