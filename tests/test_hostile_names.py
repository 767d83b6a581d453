"""Names are data: no path is made from a name, and no link in the folder of a store is followed."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck import Store, toolkit
from coatcheck.cli import main
from coatcheck.errors import InvalidArgument, StoreError, StoreUnavailable, UnsupportedFormat
from tests.backends import LARGE, Backend, digests_of_files, edit_catalog, run_python

NAMES = [
    "../../escaped",
    "..",
    ".",
    "/etc/passwd",
    "a\0b",
    "\0",
    "%2e%2e%2fescaped",
    "%252e%252e/escaped",
    "..\\..\\escaped",
    "\\\\server\\share",
    "C:\\escaped",
    "CON",
    "aux.txt",
    "file:///etc/passwd",
    "~/escaped",
    "$(touch escaped)",
    "`touch escaped`",
    "; touch escaped",
    "'; DROP TABLE ref; --",
    "\u202egpj.exe",
    "\u200b",
    "\ufeffname",
    "\x1b[2J",
    "line\nbreak",
    "catalog.sqlite",
    "blobs",
    " ",
    "é",
    "e\u0301",
    "n" * 10_000,
    "☃" * 10_000,
]

KNOWN = {
    "blobs",
    "catalog.sqlite",
    "catalog.sqlite-shm",
    "catalog.sqlite-wal",
    "lock",
    "reserve",
    "tmp",
}


def check_layout(root: Path) -> None:
    """Check that all names in the folder are ones that we made, from digests and random numbers."""
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if parts[0] == "blobs" and len(parts) > 1:
            assert len(parts) <= 3
            assert all(set(part) <= set("0123456789abcdef-.rawzst") for part in parts[1:]), parts
        else:
            assert parts[0] in KNOWN or parts[0].startswith("search.sqlite"), parts


def test_hostile_names_come_back_as_data_on_every_backend(store: Store) -> None:
    for i, name in enumerate(NAMES):
        session = store.session(name)
        ref = session.put(
            f"value {i}", name=name, tool=name, call_id=name, media_type=name, summary=name[:500]
        )
        assert (ref.session_id, ref.name, ref.tool, ref.call_id, ref.media_type) == (name,) * 5
        assert session.get(name) == f"value {i}"
        assert [one.name for one in session.list(name=name)] == [name]
        store.session("giver").put(f"given {i}", name=name)
        store.session("giver").grant(name, to=name + " receiver")
        assert store.session(name + " receiver").get(name) == f"given {i}"
        store.session(name + " child", parent=name)
        assert store.session(name + " child").get(name) == f"value {i}"
    assert store.verify().problems == []


def test_hostile_names_do_not_become_paths(folder: Backend) -> None:
    outside = sorted(os.listdir(folder.path.parent))
    store = folder.open()
    for i, name in enumerate(NAMES):
        session = store.session(name)
        session.put(f"value {i}", name=name, tool=name)
        session.put(bytes([i]) * LARGE, name=name, tool=name, call_id=name)
        assert session.get(name) == bytes([i]) * LARGE
    check_layout(folder.path)
    store.collect(cold_after=0)
    check_layout(folder.path)
    for name in NAMES:
        assert store.session(name).end() == 2
    store.close()
    check_layout(folder.path)
    assert sorted(os.listdir(folder.path.parent)) == sorted([*outside, folder.path.name])


def test_a_hostile_kind_or_producer_is_refused(store: Store) -> None:
    for name in NAMES:
        with pytest.raises(InvalidArgument):
            store.session("s").put("x", kind=name)
        with pytest.raises(InvalidArgument):
            store.session("s").put("x", producer=name)


def test_hostile_names_in_errors_are_bounded_and_printable(store: Store) -> None:
    for name in NAMES:
        with pytest.raises(coatcheck.CoatcheckError) as missing:
            store.session("s").open(name)
        assert str(missing.value).isprintable()
        assert len(str(missing.value)) < 1000


def test_a_file_name_that_is_not_text_can_be_stored(folder: Backend, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.txt")
    try:
        file.write_bytes(b"content")
    except OSError:
        pytest.skip("this file system does not accept such a name")
    session = folder.open().session("s")
    assert session.get(session.put(file)) == b"content"


# Permissions


def test_only_the_owner_can_access_the_files_of_a_store(folder: Backend) -> None:
    previous = os.umask(0)
    try:
        with folder.open() as store:
            session = store.session("s")
            session.put("small")
            session.put(os.urandom(LARGE))
            session.put("x" * LARGE)
            store.collect(cold_after=0)
            check_modes(folder.path)
    finally:
        os.umask(previous)
    check_modes(folder.path)


def check_modes(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        info = path.lstat()
        expected = 0o700 if stat.S_ISDIR(info.st_mode) else 0o600
        assert stat.S_IMODE(info.st_mode) == expected, path


def test_opening_a_store_makes_its_folder_private(folder: Backend) -> None:
    folder.path.mkdir(mode=0o755)
    folder.open()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_and_untouched(folder: Backend) -> None:
    folder.path.mkdir()
    os.chown(folder.path, 12345, 12345)
    with pytest.raises(StoreUnavailable):
        folder.open()
    assert os.listdir(folder.path) == []


def test_a_folder_with_other_files_is_refused_and_untouched(folder: Backend) -> None:
    folder.path.mkdir(mode=0o755)
    (folder.path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreUnavailable):
        folder.open()
    assert os.listdir(folder.path) == ["thesis.txt"]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755


def test_a_folder_with_other_files_and_a_file_named_lock_is_refused(folder: Backend) -> None:
    folder.path.mkdir()
    for name in ("thesis.txt", "lock"):
        (folder.path / name).write_text("years of work")
    before = digests_of_files(folder.path)
    with pytest.raises(StoreError):
        folder.open()
    assert digests_of_files(folder.path) == before


def test_a_database_of_another_program_is_refused_and_untouched(folder: Backend) -> None:
    folder.open().close()
    edit_catalog(folder.path, "PRAGMA application_id = 7")
    before = digests_of_files(folder.path)
    with pytest.raises(StoreUnavailable):
        folder.open()
    assert digests_of_files(folder.path) == before


def test_a_store_of_a_newer_version_is_refused_and_untouched(folder: Backend) -> None:
    with folder.open() as store:
        store.session("s").put("from the future")
    edit_catalog(folder.path, "PRAGMA user_version = 999")
    before = digests_of_files(folder.path)
    with pytest.raises(UnsupportedFormat):
        folder.open()
    assert digests_of_files(folder.path) == before


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_file_where_the_folder_should_be_is_a_clear_error(folder: Backend, below: str) -> None:
    folder.path.write_text("a file")
    with pytest.raises(StoreUnavailable):
        coatcheck.open(folder.path / below)
    assert folder.path.read_text() == "a file"


# Everything is imported before the process drops its rights: another user may not be able to read
# this Python.
AS_NOBODY = """
import os, sys, tempfile
import coatcheck
with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder + "/store") as store:
    store.session("s").get(store.session("s").put("x" * 300_000))
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with coatcheck.open(sys.argv[1]) as store:
        store.session("s").put("more")
        print("written")
except coatcheck.CoatcheckError as error:
    print(error.code)
"""


def as_nobody(root: Path) -> str:
    """Open this store as a user without special rights (`nobody`, if run as root) and return the
    outcome."""
    for folder in (root.parent, *root.parent.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)  # access to the parent folders is not tested here
    return run_python(AS_NOBODY, root, env={"PYTHONPATH": ":".join(sys.path)}).strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_the_store_of_another_user_is_a_clear_error(folder: Backend) -> None:
    folder.open().close()
    before = digests_of_files(folder.path)
    folder.path.chmod(0o777)
    assert as_nobody(folder.path) == "store_unavailable"
    assert digests_of_files(folder.path) == before


@pytest.mark.parametrize("mode", [0o500, 0o000])
@pytest.mark.parametrize("new", [True, False])
def test_a_folder_that_cannot_be_written_is_a_clear_error(
    folder: Backend, mode: int, new: bool
) -> None:
    if new:
        folder.path.mkdir()
    else:
        folder.open().close()
    everything = (*folder.path.rglob("*"), folder.path)
    for path in everything:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        path.chmod(mode if path.is_dir() else mode & 0o400)
    try:
        assert as_nobody(folder.path) == "store_unavailable"
        assert as_nobody(folder.path / "below") == "store_unavailable"
    finally:
        for path in reversed(everything):
            path.chmod(0o700)


def test_a_store_that_its_owner_can_write_opens_for_any_user(folder: Backend) -> None:
    folder.path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder.path, 65534, 65534)
    assert as_nobody(folder.path) == "written"


# Planted links


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "target"
    made.mkdir()
    (made / "file").write_bytes(b"target")
    return made


def check_target(target: Path) -> None:
    assert os.listdir(target) == ["file"]
    assert (target / "file").read_bytes() == b"target"


def replace_with_link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".aside"))
        aside = path.with_name(path.name + ".aside")
        aside.rename(target.parent / f"aside-{path.name}")
        path.symlink_to(target)
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(target / "file")


@pytest.mark.parametrize(
    "name",
    [
        "catalog.sqlite",
        "catalog.sqlite-wal",
        "catalog.sqlite-shm",
        "lock",
        "reserve",
        "blobs",
        "tmp",
    ],
)
def test_a_link_in_place_of_a_part_of_the_store_is_refused(
    folder: Backend, target: Path, name: str
) -> None:
    with folder.open() as store:
        store.session("s").put(os.urandom(LARGE))
    replace_with_link(folder.path / name, target)
    with pytest.raises(StoreError):
        folder.open()
    check_target(target)


def test_a_link_in_a_folder_that_is_not_a_store_yet_is_refused(
    folder: Backend, target: Path
) -> None:
    for name in ("catalog.sqlite", "lock", "reserve", "blobs", "tmp"):
        root = Path(f"{folder.path}-{name}")
        root.mkdir()
        (root / name).symlink_to(target / "file")
        with pytest.raises(StoreError):
            coatcheck.open(root)
        check_target(target)


USES: dict[str, Callable[[Store, bytes], object]] = {
    "get": lambda store, data: store.session("s").get("n"),
    "open": lambda store, data: store.session("s").open("n").read(),
    "put": lambda store, data: store.session("other").put(data),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("level", ["file", "folder"])
def test_a_link_in_the_path_of_a_blob_is_not_followed(
    folder: Backend, target: Path, level: str, use: str
) -> None:
    store, data = folder.open(), os.urandom(LARGE)
    ref = store.session("s").put(data, name="n")
    file = Path(ref.content_uri.removeprefix("file://"))
    replace_with_link(file if level == "file" else file.parent, target)
    try:
        USES[use](store, data)
    except StoreError:
        pass
    else:
        assert use == "put", "only a put may work around the link"
        assert store.session("other").get(ref) == data
    check_target(target)


def test_links_below_the_blobs_are_neither_listed_nor_swept(folder: Backend, target: Path) -> None:
    store = folder.open()
    (folder.path / "blobs" / "ab").symlink_to(target)
    (folder.path / "blobs" / "cd").mkdir()
    for name in (target, target / "file"):
        (
            folder.path / "blobs" / "cd" / ("cd" + "0" * 62 + f"-{len(name.name):016x}.raw")
        ).symlink_to(name)
    for upkeep in (store.verify, lambda: store.verify(repair=True), store.collect):
        try:
            upkeep()
        except StoreError:
            pass
        check_target(target)


def test_a_link_among_the_leftovers_is_not_followed(folder: Backend, target: Path) -> None:
    store = folder.open()
    (folder.path / "tmp" / "0123456789abcdef.raw").symlink_to(target / "file")
    for upkeep in (store.verify, store.collect, store.session("s").end):
        try:
            upkeep()
        except StoreError:
            pass
        check_target(target)


def test_a_link_in_place_of_the_catalog_of_an_open_store_is_not_followed(
    folder: Backend, target: Path
) -> None:
    store = folder.open()
    session = store.session("s")
    session.put("x")
    replace_with_link(folder.path / "catalog.sqlite-wal", target)
    for use in (lambda: session.put("y"), lambda: session.list(), store.collect):
        try:
            use()
        except StoreError:
            pass
        check_target(target)
    folder.opened.clear()


LIKE_POINTERS = [
    "art:xyz",
    "art: my drawing",
    "art:0123",
    "art:0123456789ab:v2",
    "art:foo#/bar",
    "ART:0123456789AB",
    "abcdefabcdef",
    "0123456789abcdef0123456789abcdef01234567",
    "ABCDEFABCDEF",
    "'abcdefabcdef'",
    "abcdefabcdef#/a",
]


@pytest.mark.parametrize("name", LIKE_POINTERS)
def test_a_name_that_is_accepted_is_found_by_every_reader(name: str, tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("s")
        ref = session.put("the value", name=name)
        assert session.get(name) == "the value"
        assert session.ref(name) == ref
        assert session.read(name).text == "the value"
        assert session.preview(name).text == "the value"
        with session.open(name) as stream:
            assert stream.read() == b"the value"
        (tmp_path / "files").mkdir()
        assert session.materialize(name, tmp_path / "files").read_bytes() == b"the value"
        get, _, keep = toolkit(session)
        assert get.run(pointer=name).endswith("\nthe value")
        if "'" not in name:
            assert get.run(pointer=f'"{name}"').endswith("\nthe value")
        if not name.startswith("art:"):
            assert keep.run(name=name, value="a newer value").startswith("[stored")
            assert get.run(pointer=name).endswith("\na newer value")
            session.put("the value", name=name)
    for command in ("get", "read"):
        done = CliRunner().invoke(
            main, [command, name, "--session", "s", "--store", str(tmp_path / "store")]
        )
        assert "the value" in done.output, done.output
