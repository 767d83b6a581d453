"""The folder backend conforms to both protocols, with either durability."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coatcheck
from coatcheck.reading.text import sample_of
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog, frames, upkeep
from coatcheck.storage.disk import Disk, file_uri
from coatcheck.storage.folder import FolderCatalog, open_folder_store
from coatcheck.testing import BlobStoreSuite, CatalogSuite
from tests.backends import LARGE, released_by


class _FolderBlobs(BlobStoreSuite):
    durable: bool

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        self.root = tmp_path / "store"
        blobs, catalog = open_folder_store(self.root, Disk(durable=self.durable))
        catalog.close()
        return blobs

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        with open(blobs.uri(blob).removeprefix("file://"), "r+b") as file:
            file.seek(offset)
            old = file.read(1)
            file.seek(offset)
            file.write(bytes([old[0] ^ 1]))
        return True

    def abandon_stage(self, blobs: BlobStore, size: int) -> bool:
        (self.root / "tmp" / "0123456789abcdef.raw").write_bytes(bytes(size))
        return True


class _FolderCatalog(CatalogSuite):
    durable: bool

    def make_catalog(self, tmp_path: Path) -> Catalog:
        blobs, catalog = open_folder_store(tmp_path / "store", Disk(durable=self.durable))
        blobs.close()
        return catalog


class TestPowerBlobs(_FolderBlobs):
    durable = True


class TestProcessBlobs(_FolderBlobs):
    durable = False


class TestPowerCatalog(_FolderCatalog):
    durable = True


class TestProcessCatalog(_FolderCatalog):
    durable = False


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return released_by(FolderCatalog, upkeep, monkeypatch)


def test_a_large_session_expires_in_bounded_changes(tmp_path: Path, released: list[int]) -> None:
    now = [1000.0]
    with coatcheck.open(tmp_path / "store", ttl=10, clock=lambda: now[0]) as store:
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


def test_a_collection_completes_the_end_of_a_session_that_was_interrupted(
    tmp_path: Path, released: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        for number in range(10):
            store.session("s").put(f"result {number}")
        with monkeypatch.context() as patch:
            end_next = FolderCatalog._end_next
            patch.setattr(
                FolderCatalog,
                "_end_next",
                lambda self, limit, place: end_next(self, limit if not released else 1 // 0, place),
            )
            with pytest.raises(ZeroDivisionError):
                store.session("s").end()
        assert list(store.sessions()) == []
        again = store.session("s").put("result 0")
        store.collect()
        assert (sum(released), max(released)) == (10, 3)
        assert [store.session("s").get(again), len(store.session("s").list())] == ["result 0", 1]
        assert store.verify().problems == []


class _Forgetting(Disk):
    """Another thread forgets the last ref of a copy just before the copy is set aside."""

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        if "quarantine" in os.readlink(f"/proc/self/fd/{new_folder}"):
            os.unlink(name, dir_fd=folder)
        super().rename(name, folder, new_name, new_folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_copy_that_is_forgotten_while_it_is_set_aside_is_not_an_error(tmp_path: Path) -> None:
    blobs, catalog = open_folder_store(tmp_path / "store", _Forgetting(durable=False))
    with blobs.stage([b"x" * 100_000]) as staged:
        copy = staged.publish()
    assert not blobs.quarantine(copy, 1_000)
    assert list(blobs.places()) == []
    assert list(blobs.quarantined()) == []
    blobs.close()
    catalog.close()


@pytest.mark.parametrize("size", [0, 1, 300_000, 1_000_000])
def test_digest_and_frames_of_content_are_those_of_its_chunks(size: int) -> None:
    data = (b"a line\n" * size)[:size]
    framer = frames.Framer()
    for at in range(0, size, 70_000):
        framer.update(data[at : at + 70_000])
    assert frames.framed(data) == framer.finish()
    assert sum(frames.line_counts(framer.finish().frames)) == data.count(b"\n")


@pytest.mark.parametrize("length", [1, 10, 60, 5_000, 400_000])
def test_lines_of_any_length_are_counted(length: int) -> None:
    data = b"".join(b"x" * (length - 1) + b"\n" for _ in range(900_000 // length))
    counts = frames.line_counts(frames.framed(data).frames)
    assert list(counts) == [
        data.count(b"\n", at, at + frames.FRAME) for at in range(0, len(data), frames.FRAME)
    ]


def test_lines_of_frames_that_begin_with_long_lines_and_continue_with_short_ones_are_counted() -> (
    None
):
    data = (b"x" * 8_000 + b"\n" * 100_000) * 5
    assert sum(frames.line_counts(frames.framed(data).frames)) == 500_000


@pytest.mark.parametrize("size", [200_000, 1 << 20, (1 << 20) + 1])
def test_line_numbers_do_not_depend_on_when_lines_are_counted(size: int, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(size // 8))[:size]
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        session = store.session("lines")
        session.put(text, name="numbered")
        page = session.read("numbered", lines="9000:9001")
        sample = sample_of(session.content("numbered"))
    total = len(text.splitlines())
    assert (page.text, page.total, sample.lines) == ("line 8999\nline 9000\n", total, total)


@pytest.mark.parametrize("answer", [0, errno.ENOTSUP], ids=["full flush", "no full flush"])
def test_a_store_and_a_transcript_work_without_fdatasync_and_use_a_full_flush_where_there_is_one(
    answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    flushed: list[int] = []

    def full_flush(file: int, command: int) -> int:
        assert command == 51
        flushed.append(file)
        if answer:
            raise OSError(answer, os.strerror(answer))
        return 0

    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_flush)
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("s", ttl=None)
        refs = {session.put(data): data for data in (b"small", b"large" * 100_000)}
        with coatcheck.transcript.Transcript(tmp_path / "t.jsonl", session) as transcript:
            transcript.append({"role": "user", "content": "hello"})
        assert len(flushed) > 3
    with coatcheck.open(tmp_path / "store") as store:
        assert {ref: store.session("s").get(ref) for ref in refs} == refs
    assert (tmp_path / "t.jsonl").read_text().count("\n") == 1


def test_a_process_opens_no_second_descriptor_of_the_database_or_its_index(tmp_path: Path) -> None:
    """Closing one would drop the locks of SQLite, so that another process could reset the log while
    it is in use."""
    other = "import sys, coatcheck; coatcheck.open(sys.argv[1]).session('s').put('from another process', name='other')"
    with coatcheck.open(tmp_path / "store") as store, coatcheck.open(tmp_path / "store") as second:
        session = store.session("s", ttl=None)
        for number in range(3):
            session.put(f"first {number}")
            second.session("s").put(f"second {number}")
            subprocess.run([sys.executable, "-c", other, str(tmp_path / "store")], check=True)
        assert (
            tmp_path / "store" / "catalog.sqlite-wal"
        ).stat().st_size > 0  # the other process was not the last
        assert len(session.list()) == 7
        assert store.verify().problems == []


@pytest.mark.parametrize(
    "name", ["plain", "with space", "100%#?", "naïve", os.fsdecode(b"not utf-8: \xff")]
)
def test_the_uri_of_a_file_is_the_one_that_pathlib_makes(name: str) -> None:
    path = Path("/folder") / name
    assert file_uri(path) == path.as_uri()


@pytest.mark.parametrize("value", ["small", "x" * LARGE], ids=["small", "large"])
def test_a_repeated_put_syncs_what_a_process_without_durability_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """It finds nothing to add, but what it found must survive a power cut before it is
    acknowledged."""
    synced: list[str] = []
    sync = Disk.sync

    def recorded(self: Disk, file: int, *, always: bool = False) -> None:
        sync(self, file, always=always)
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    with (
        coatcheck.open(tmp_path, durability="process") as brief,
        coatcheck.open(tmp_path, durability="power") as durable,
    ):
        brief.session("s").put(value)
        monkeypatch.setattr(Disk, "sync", recorded)
        durable.session("s").put(value)
    assert "catalog.sqlite-wal" in synced
