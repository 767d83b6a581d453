"""Pipes, links, folders, sockets and devices in place of a store's files: nothing hangs, and the
rest works."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import coatcheck
from coatcheck.errors import StoreError, StoreUnavailable

pytestmark = pytest.mark.faults

DATA, OTHER = os.urandom(300_000), os.urandom(300_000)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/nonexistent")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"in it")


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # like /dev/zero
    except PermissionError:
        pytest.skip("creating a device needs privileges")


def make_file(path: Path) -> None:
    path.write_bytes(b"a file")


THINGS: list[Callable[[Path], None]] = [
    make_pipe, make_link, make_dangling_link, make_folder, make_socket, make_device
]  # fmt: skip
BESIDE: dict[str, str] = {
    "in the store": "something",
    "for a staged file": "tmp/0123456789abcdef.raw",
    "for a folder of digests": "blobs/zz",
    "for an unused folder": "blobs/00",
    "for a copy that nothing names": "blobs/00/" + "00" * 32 + "-0123456789abcdef.raw",
    "beside the copies": "blobs/00/something",
}


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)


def _is_odd(place: str, make: Callable[[Path], None]) -> bool:
    """Return whether this kind of file is wrong there: a folder is allowed among folders, or where
    nothing looks."""
    return make is not make_folder or "copy" in place or "copies" in place or "staged" in place


@pytest.mark.parametrize("make", THINGS)
@pytest.mark.parametrize("place", BESIDE)
def test_a_foreign_file_in_a_store_is_reported_and_the_rest_works(
    place: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        session = store.session("s", ttl=None)
        held = {session.put(data): data for data in (DATA, OTHER, b"small")}
        _replace(folder / BESIDE[place], make)
        orphan = folder / "blobs" / "ff" / ("ff" * 32 + "-0123456789abcdef.raw")
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(b"orphan")
        for repair in (False, True):
            kinds = [problem.kind for problem in store.verify(repair=repair).problems]
            assert "orphan" in kinds
            assert ("foreign" in kinds) == _is_odd(place, make)
            assert not {"damaged", "missing", "catalog"} & set(kinds)
        assert not orphan.exists()
        report = store.collect(grace=0, cold_after=0)
        assert ("foreign" in {problem.kind for problem in report.problems}) == _is_odd(place, make)
        assert {ref: session.get(ref) for ref in held} == held
        assert session.get(session.put(b"more" * 100_000)) == b"more" * 100_000
        assert store.session("other").end() == 0
    if make in (make_link, make_dangling_link) and place == "in the store":
        with pytest.raises(StoreUnavailable):
            coatcheck.open(folder)
        return
    with coatcheck.open(folder) as store:
        assert {ref: store.session("s").get(ref) for ref in held} == held


@pytest.mark.parametrize("make", THINGS)
@pytest.mark.parametrize("level", ["copy", "folder"])
def test_a_foreign_file_in_place_of_a_blob_affects_only_that_blob(
    level: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        session = store.session("s", ttl=None)
        ref, other, small = session.put(DATA), session.put(OTHER), session.put(b"small")
        copy = Path(ref.content_uri.removeprefix("file://"))
        _replace(copy if level == "copy" else copy.parent, make)
        gone = make is make_folder and level != "copy"  # then the file is simply missing
        with contextlib.nullcontext() if gone else pytest.raises(StoreUnavailable):
            assert session.get(ref) is None
        for repair in (False, True):
            problems = store.verify(repair=repair).problems
            assert [
                problem.kind for problem in problems if problem.artifact_id == ref.artifact_id
            ] == ["missing" if gone else "unreadable"]
            assert all(problem.repaired == (gone and repair) for problem in problems)
        store.collect(grace=0, cold_after=0)
        assert session.get(other) == OTHER
        assert session.get(small) == b"small"
        if level == "copy" or gone:
            session.put(DATA)
            assert session.get(ref) == DATA
        else:
            with pytest.raises(StoreUnavailable):
                session.put(DATA)
        store.collect(grace=0)
        assert session.get(other) == OTHER


@pytest.mark.parametrize("make", [*THINGS, make_file])
@pytest.mark.parametrize(
    "name",
    ["lock", "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "reserve",
     "search.sqlite", "blobs", "tmp", "tenants"],
)  # fmt: skip
def test_a_store_with_a_foreign_file_under_one_of_its_names_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        ref = store.session("s", ttl=None).put(DATA)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    _replace(folder / name, make)
    is_folder = name in ("blobs", "tmp", "tenants")
    if (make is make_folder and is_folder) or (make is make_file and not is_folder):
        return  # this is the expected kind
    with pytest.raises(StoreError) as error:
        coatcheck.open(folder)
    assert isinstance(error.value, StoreUnavailable)
    assert name in error.value.message
    with coatcheck.open(kept) as store:
        assert store.session("s").get(ref) == DATA


@pytest.mark.parametrize("make", THINGS)
@pytest.mark.parametrize("name", ["reserve", "search.sqlite"])
def test_a_foreign_file_that_appears_while_a_store_is_open_does_not_stop_a_collection(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        session = store.session("s", ttl=None)
        held = {session.put(data): data for data in (DATA, b"small")}
        _replace(folder / name, make)
        assert "foreign" in {problem.kind for problem in store.verify(repair=True).problems}
        assert store.collect(grace=0, cold_after=0).problems
        assert {ref: session.get(ref) for ref in held} == held
