"""Upkeep: what a collection frees and compresses, and what a verification finds and repairs."""

import contextlib
import errno
import io
import os
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Ref, Store
from coatcheck.collect import collecting_daily
from coatcheck.errors import Damaged, NotFound
from coatcheck.storage import frames
from coatcheck.storage.frames import FRAME
from tests.backends import LARGE, Backend, Clock, edit_catalog, wait_until

TEXT = "".join(f"{i:06d} a line of a log that repeats itself\n" for i in range(20_000))
NOISE = random.Random(7).randbytes(LARGE)


def file_of(ref: Ref) -> Path:
    assert ref.content_uri.startswith("file://")
    return Path(ref.content_uri.removeprefix("file://"))


# Collecting


def test_a_dry_run_reports_what_a_collection_would_free_and_changes_nothing(
    store: Store, clock: Clock
) -> None:
    dying, living = store.session("dying", ttl=10), store.session("living", ttl=None)
    for value in ("small", "x" * LARGE, "shared"):
        dying.put(value)
    living.put("shared")
    clock.advance(10)
    before = store.stats()
    plan = store.collect(grace=0, dry_run=True)
    assert store.stats() == before
    done = store.collect(grace=0)
    assert plan.dry_run
    assert not done.dry_run
    assert (
        (plan.refs, plan.artifacts, plan.bytes)
        == (done.refs, done.artifacts, done.bytes)
        == (3, 2, LARGE + 5)
    )
    again = store.collect(grace=0)
    assert (again.refs, again.artifacts, again.bytes) == (0, 0, 0)
    assert store.verify().problems == []


def test_a_collection_keeps_all_live_artifacts(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=None)
    values = ["small", "x" * LARGE, NOISE, {"a": 1}]
    refs = [session.put(value) for value in values]
    clock.advance(86_400 * 365)
    store.collect(grace=0, cold_after=0)
    assert [session.get(ref) for ref in refs] == values


def test_orphans_and_leftovers_are_swept(folder: Backend) -> None:
    store = folder.open()
    store.session("s").put(NOISE)
    orphan = folder.path / "blobs" / "ab" / ("ab" + "0" * 62 + "-0123456789abcdef.raw")
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"orphan")
    (folder.path / "tmp" / "0123456789abcdef.raw").write_bytes(b"left over")
    plan = store.collect(dry_run=True)
    assert (plan.orphans, plan.leftover_bytes) == (1, 9)
    assert orphan.exists()
    done = store.collect()
    assert (done.orphans, done.leftover_bytes) == (1, 9)
    assert not orphan.exists()
    assert os.listdir(folder.path / "tmp") == []
    assert store.collect().orphans == 0
    assert store.verify().problems == []


def test_the_progress_of_a_collection_is_reported(store: Store) -> None:
    session = store.session("s")
    for i in range(3):
        session.put(f"{i}" * LARGE)
    steps: list[tuple[int, int | None]] = []
    store.collect(cold_after=0, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, None), (2, None), (3, None)]


# Compression


def test_cold_artifacts_are_compressed_and_read_the_same(lasting: Backend, clock: Clock) -> None:
    store = lasting.open(clock=clock)
    session = store.session("s", ttl=None)
    values = {"text": TEXT, "noise": NOISE, "small": "small", "zeros": bytes(700_000)}
    for name, value in values.items():
        session.put(value, name=name)
    assert store.collect().compressed == 0, "nothing is cold yet"
    clock.advance(86_400)
    report = store.collect()
    assert report.compressed == 2, "noise does not compress, and small content is in the database"
    ref = session.ref("text")
    assert ref is not None
    assert lasting.size_of(ref) < len(TEXT) / 2
    for name, value in values.items():
        assert session.get(name) == value
        data = value.encode() if isinstance(value, str) else value
        with session.open(name) as stream:
            for offset in (0, 1, 262_143, 262_144, 500_000, len(data) - 1, len(data)):
                stream.seek(min(offset, len(data)))
                assert stream.read(5000) == data[min(offset, len(data)) :][:5000]
    assert store.verify().problems == []
    assert store.collect(cold_after=0).compressed == 0


def test_recently_used_artifacts_are_not_compressed(lasting: Backend, clock: Clock) -> None:
    store = lasting.open(clock=clock)
    session = store.session("s", ttl=None)
    session.put(TEXT, name="n")
    clock.advance(80_000)
    session.get("n")
    clock.advance(80_000)
    assert store.collect().compressed == 0


def test_putting_compressed_content_again_keeps_one_copy(folder: Backend) -> None:
    store = folder.open()
    session = store.session("s")
    first = session.put(TEXT)
    store.collect(cold_after=0)
    session.put(TEXT, name="again")
    session.put(io.BytesIO(TEXT.encode() * 2))
    store.session("other").put(TEXT)
    assert session.get(first) == TEXT
    assert len(list((folder.path / "blobs").rglob("*.*"))) == 2
    assert store.verify().problems == []


def test_a_stream_stays_readable_across_compression(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    ref = session.put(TEXT)
    with session.open(ref) as stream:
        head = stream.read(1000)
        assert store.collect(cold_after=0).compressed == 1
        assert head + stream.read() == TEXT.encode()


def test_a_stream_stays_readable_across_healing(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    ref = session.put(NOISE)
    with session.open(ref) as stream:
        head = stream.read(1000)
        lasting.damage(ref, remove)
        session.put(NOISE)
        assert head + stream.read() == NOISE


def test_a_compressed_copy_that_rots_is_an_error_and_heals(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    ref = session.put(TEXT)
    store.collect(cold_after=0)
    moved = session.ref(ref)
    assert moved is not None
    lasting.damage(moved, flip)
    with pytest.raises(Damaged):
        session.get(ref)
    session.put(TEXT)
    assert session.get(ref) == TEXT
    assert [problem.kind for problem in store.verify(repair=True).problems] in ([], ["orphan"])
    assert store.verify().problems == []


# Damage


Harm = Callable[[bytes], bytes | None]


def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def truncate_at_a_frame(data: bytes) -> bytes:
    return data[:FRAME]


def zero(data: bytes) -> bytes:
    return bytes(len(data))


def empty(data: bytes) -> bytes:
    return b""


def lengthen(data: bytes) -> bytes:
    return data + b"more"


def remove(data: bytes) -> None:
    return None


def remove_folder(data: bytes) -> None:
    return None


def damage(place: Backend, ref: Ref, harm: Harm) -> None:
    place.damage(ref, harm)
    if harm is remove_folder:
        with contextlib.suppress(OSError):  # another copy may be in it
            file_of(ref).parent.rmdir()


HARMS: dict[str, list[Harm]] = {
    "folder": [flip, truncate, truncate_at_a_frame, zero, empty, remove, remove_folder],
    "fleet": [flip, truncate, truncate_at_a_frame, zero, empty, remove],
}
DAMAGE = pytest.mark.parametrize(
    ("lasting", "harm"),
    [(kind, harm) for kind, harms in HARMS.items() for harm in harms],
    indirect=["lasting"],
)


@DAMAGE
def test_damage_to_a_blob_is_an_error_never_wrong_bytes(lasting: Backend, harm: Harm) -> None:
    session = lasting.open().session("s")
    ref, other = session.put(NOISE), session.put(TEXT)
    damage(lasting, ref, harm)
    if harm in (remove, remove_folder):
        assert session.get(ref) is None
        with pytest.raises(NotFound):
            session.open(ref)
    else:
        with pytest.raises(Damaged):
            session.get(ref)
        with pytest.raises(Damaged), session.open(ref) as stream:
            stream.read()
    assert session.get(other) == TEXT


@DAMAGE
def test_verify_finds_damage_to_a_blob(lasting: Backend, harm: Harm) -> None:
    store = lasting.open()
    ref = store.session("s").put(NOISE)
    store.session("s").put(TEXT)
    damage(lasting, ref, harm)
    for _ in range(2):
        (problem,) = store.verify().problems
        assert problem.kind == ("missing" if harm in (remove, remove_folder) else "damaged")
        assert problem.artifact_id == ref.artifact_id
        assert not problem.repaired


@DAMAGE
def test_putting_the_same_content_heals_a_blob(lasting: Backend, harm: Harm) -> None:
    store = lasting.open()
    session = store.session("s")
    ways: list[Callable[[], object]] = [
        lambda: session.put(NOISE),
        lambda: session.put(io.BytesIO(NOISE)),
        lambda: store.session("other").put(NOISE),
        lambda: session.put(NOISE, name="healed"),
    ]
    for again in ways:
        ref = session.ref(session.put(NOISE))
        assert ref is not None
        damage(lasting, ref, harm)
        again()
        assert session.get(ref) == NOISE
        store.collect()
        assert session.get(ref) == NOISE
        assert store.verify().problems == []


@DAMAGE
def test_a_repair_sets_damaged_content_aside_and_putting_it_again_restores_all_refs(
    lasting: Backend, harm: Harm
) -> None:
    store = lasting.open()
    one, two = store.session("one"), store.session("two")
    ref = one.put(NOISE, name="first")
    one.put(NOISE, name="second")
    two.put(NOISE, name="theirs")
    sound = one.put(TEXT)
    damage(lasting, ref, harm)
    report = store.verify(repair=True)
    assert [problem.repaired for problem in report.problems] == [True] * len(report.problems)
    assert store.verify().problems == []
    for target in (ref, "first", "second"):
        assert one.get(target) is None
        with pytest.raises(NotFound):
            one.open(target)
    assert one.get(sound) == TEXT
    store.session("third").put(NOISE)
    assert one.get("first") == one.get("second") == two.get("theirs") == one.get(ref) == NOISE
    assert store.verify().problems == []


def is_stored(place: Backend, ref: Ref) -> bool:
    """Whether the file or object of an artifact is there."""
    try:
        return place.size_of(ref) > 0
    except FileNotFoundError:
        return False


def test_content_that_a_repair_set_aside_is_kept_for_a_week(lasting: Backend, clock: Clock) -> None:
    store = lasting.open(clock=clock)
    session = store.session("s", ttl=None)
    ref = session.put(NOISE)
    lasting.damage(ref, flip)
    (problem,) = store.verify(repair=True).problems
    assert (problem.kind, problem.repaired) == ("damaged", True)
    for _ in range(3):
        assert store.collect(grace=0).orphans == 0
        assert store.verify(repair=True).problems == []
        assert is_stored(lasting, ref)
        clock.advance(2 * 86_400)
    clock.advance(2 * 86_400)
    assert store.collect(grace=0).orphans == 1
    assert not is_stored(lasting, ref)
    assert store.verify().problems == []


@pytest.mark.parametrize("way", ["put", "end"])
def test_content_that_was_set_aside_is_removed_when_no_ref_waits_for_it(
    lasting: Backend, way: str
) -> None:
    store = lasting.open()
    ref = store.session("s").put(NOISE)
    lasting.damage(ref, flip)
    store.verify(repair=True)
    if way == "put":
        store.session("other").put(NOISE)
    else:
        store.session("s").end()
    assert store.collect(grace=0).orphans == 1
    assert not is_stored(lasting, ref)
    assert store.session("s").get(ref) == (NOISE if way == "put" else None)
    assert store.verify().problems == []


@pytest.mark.parametrize("harm", [flip, remove])
def test_a_copy_that_is_sound_after_all_is_used_again(lasting: Backend, harm: Harm) -> None:
    store = lasting.open()
    one, two = store.session("one"), store.session("two")
    ref = one.put(NOISE, name="first")
    two.put(NOISE, name="theirs")
    lasting.damage(ref, harm)
    store.verify(repair=True)
    assert one.get("first") is None
    # A backup of the objects was restored, or a disk works again.
    lasting._stored_copy(ref).write(NOISE)
    store.collect(grace=0)
    (problem,) = store.verify().problems
    assert (problem.kind, problem.artifact_id, problem.repaired) == (
        "catalog",
        ref.artifact_id,
        False,
    )
    (problem,) = store.verify(repair=True).problems
    assert problem.repaired
    assert one.get("first") == two.get("theirs") == NOISE
    assert store.verify().problems == []


def test_damaged_small_content_is_kept_for_a_week(lasting: Backend, clock: Clock) -> None:
    with lasting.open(clock=clock) as store:
        ref = store.session("s", ttl=None).put("content")
    lasting.edit_catalog((ROWS_OF_A_FLEET if lasting.is_fleet else ROWS)["content that changed"][0])
    store = lasting.open(clock=clock)
    assert [problem.repaired for problem in store.verify(repair=True).problems] == [True]
    store.collect(grace=0)
    (aside,) = store._catalog.aside()
    assert (aside.blob.digest, aside.content) == (ref.artifact_id, b"rotten!")
    assert store.verify().problems == []
    clock.advance(8 * 86_400)
    store.collect(grace=0)
    assert store._catalog.aside() == []
    assert store.session("s").get(ref) is None


def test_files_of_refs_that_lost_their_blob_row_are_kept_by_a_repair(lasting: Backend) -> None:
    with lasting.open() as store:
        ref = store.session("s").put(NOISE)
    lasting.edit_catalog("DELETE FROM blob")
    store = lasting.open()
    assert {problem.kind for problem in store.verify(repair=True).problems} == {"catalog"}
    store.collect(grace=0)
    assert is_stored(lasting, ref)
    store.session("s").put(NOISE)
    assert store.session("s").get(ref) == NOISE


def test_one_bad_read_is_not_damage(folder: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder.open()
    ref = store.session("s").put(NOISE)
    real, bad = os.pread, [True]

    def pread(file: int, size: int, offset: int) -> bytes:
        data = real(file, size, offset)
        return flip(data) if len(data) > 1000 and bad.pop() else data

    monkeypatch.setattr(os, "pread", pread)
    bad.insert(0, False)
    assert store.verify(repair=True).problems == []
    monkeypatch.undo()
    assert store.session("s").get(ref) == NOISE


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE]
)
def test_temporarily_unreadable_content_is_reported_and_left_alone(
    folder: Backend, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    session = store.session("s", ttl=None)
    refs = {session.put(f"{i}" * LARGE): f"{i}" * LARGE for i in range(3)}
    small = session.put("small")
    store.verify()  # connections are open
    real = os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if str(path).endswith(".raw"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    for repair in (False, True):
        report = store.verify(repair=repair)
        assert [(one.kind, one.repaired) for one in report.problems] == [("unreadable", False)] * 3
        assert {one.artifact_id for one in report.problems} == {ref.artifact_id for ref in refs}
    collected = store.collect(grace=0, cold_after=0)
    assert collected.compressed == collected.orphans == 0
    assert {one.kind for one in collected.problems} == {"unreadable"}
    assert session.get(small) == "small"
    monkeypatch.undo()
    store.collect(grace=0)
    assert {ref: session.get(ref) for ref in refs} == refs
    assert store.verify().problems == []


def test_content_that_cannot_be_read_can_be_put_again(
    folder: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    session = store.session("s", ttl=None)
    ref = session.put(NOISE)
    place, real = file_of(ref).name, os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if path == place and not args[0] & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    for again in (NOISE, io.BytesIO(NOISE)):
        session.put(again)
        assert session.get(ref) == NOISE
    monkeypatch.undo()
    store.collect()
    assert session.get(ref) == NOISE
    assert store.verify().problems == []


def test_a_repair_with_a_damaged_catalog_removes_no_copy(folder: Backend) -> None:
    with folder.open() as store:
        ref = store.session("s").put(NOISE)
    # The index over digests loses its entries: a lookup through it finds nothing.
    edit_catalog(
        folder.path,
        "PRAGMA writable_schema = ON",
        "CREATE TABLE other (one UNIQUE)",
        "UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name ="
        " 'sqlite_autoindex_other_1') WHERE name = 'sqlite_autoindex_blob_1'",
    )
    store = folder.open()
    assert store._catalog.places([ref.artifact_id]) == {}
    assert "orphan" in {problem.kind for problem in store.verify(repair=True).problems}
    assert not all(problem.repaired for problem in store.verify(repair=True).problems)
    assert is_stored(folder, ref)


def test_a_blob_that_grew_is_read_without_the_extra_bytes(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    ref = session.put(NOISE)
    lasting.damage(ref, lengthen)
    try:
        assert session.get(ref) == NOISE
    except Damaged:
        session.put(NOISE)
        assert session.get(ref) == NOISE


def test_verify_finds_orphans_and_leftovers(folder: Backend) -> None:
    store = folder.open()
    orphan = folder.path / "blobs" / "ab" / ("ab" + "0" * 62 + "-0123456789abcdef.raw")
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"orphan")
    (folder.path / "tmp" / "0123456789abcdef.raw").write_bytes(b"left over")
    assert [problem.kind for problem in store.verify().problems] == ["orphan", "orphan"]
    assert [problem.repaired for problem in store.verify(repair=True).problems] == [True, True]
    assert store.verify().problems == []
    assert not orphan.exists()


ROWS = {
    "content that changed": ("UPDATE content SET data = CAST('rotten!' AS BLOB)", "damaged"),
    "content that is gone": ("DELETE FROM content", "missing"),
    "a ref without a blob": ("DELETE FROM blob", "catalog"),
    "a ref to another blob": ("UPDATE ref SET digest = zeroblob(32)", "catalog"),
    "a ref without a session": ("DELETE FROM session", "catalog"),
    "a wrong count of refs": ("UPDATE blob SET refs = refs + 1", "catalog"),
    "a wrong count of bytes": ("UPDATE session SET used_bytes = 1", "catalog"),
    "a wrong total": ("UPDATE meta SET value = 1 WHERE key = 'stored_bytes'", "catalog"),
    "a wrong size": ("UPDATE blob SET size = 1", "catalog"),
}
ROWS_OF_A_FLEET = {
    "content that changed": ("UPDATE blob SET data = 'rotten!'", "damaged"),
    "content that is gone": ("UPDATE blob SET data = NULL", "missing"),
    "a ref without a blob": ("DELETE FROM blob", "catalog"),
    "a ref to another blob": ("UPDATE ref SET digest = sha256('another')", "catalog"),
    "a ref without a session": ("DELETE FROM session", "catalog"),
    "a wrong count of refs": ("UPDATE blob SET refs = refs + 1", "catalog"),
    "a wrong count of bytes": ("UPDATE session SET used_bytes = 1", "catalog"),
    "a wrong size": ("UPDATE blob SET size = 1", "catalog"),
}


@pytest.mark.parametrize(
    ("lasting", "harm"),
    [*(("folder", harm) for harm in ROWS), *(("fleet", harm) for harm in ROWS_OF_A_FLEET)],
    indirect=["lasting"],
)
def test_verify_finds_and_repairs_damage_to_rows(lasting: Backend, harm: str) -> None:
    statement, kind = (ROWS_OF_A_FLEET if lasting.is_fleet else ROWS)[harm]
    with lasting.open() as store:
        ref = store.session("s").put("content", name="n")
    lasting.edit_catalog(statement)
    store = lasting.open()
    session = store.session("s")
    assert kind in {problem.kind for problem in store.verify().problems}
    try:
        assert session.get(ref) in ("content", None)
    except Damaged:
        pass
    assert all(problem.repaired for problem in store.verify(repair=True).problems)
    assert store.verify().problems == []
    again = session.put("content", name="n")
    assert session.get(again) == session.get("n") == session.get(ref) == "content"
    assert store.verify().problems == []


def test_small_content_that_rots_is_an_error_and_heals(lasting: Backend) -> None:
    with lasting.open() as store:
        ref = store.session("s").put("content", name="n")
    for again in ("s", "other"):
        lasting.edit_catalog(
            (ROWS_OF_A_FLEET if lasting.is_fleet else ROWS)["content that changed"][0]
        )
        with lasting.open() as store:
            with pytest.raises(Damaged):
                store.session("s").get(ref)
            with pytest.raises(Damaged):
                store.session("s").open(ref)
            store.session(again).put("content")
            assert store.session("s").get(ref) == "content"
            assert store.verify().problems == []


def test_a_catalog_that_is_not_a_database_is_a_clear_error(folder: Backend) -> None:
    folder.open().close()
    for file in folder.path.glob("catalog.sqlite-*"):
        file.unlink()
    (folder.path / "catalog.sqlite").write_bytes(b"this is not a database" * 1000)
    with pytest.raises(Damaged):
        folder.open()


def test_verify_reads_everything_and_reports_its_progress(store: Store) -> None:
    session = store.session("s")
    session.put("small")
    session.put(NOISE)
    steps: list[tuple[int, int | None]] = []
    report = store.verify(progress=lambda done, total: steps.append((done, total)))
    assert (report.artifacts, report.bytes) == (2, LARGE + 5)
    assert steps[-1] == (LARGE + 5, LARGE + 5)
    assert report.to_record() == {
        "artifacts": 2,
        "bytes": LARGE + 5,
        "problems": [],
        "quarantined_bytes": 0,
    }


# Quarantine


def _without_its_row(backend: Backend, clock: Clock) -> tuple[Store, Ref]:
    """A store whose catalog has lost the row of a blob, like one that was restored from an older
    backup."""
    store = backend.open(clock=clock)
    ref = store.session("s", ttl=None).put(NOISE)
    store.close()
    backend.opened.clear()
    backend.edit_catalog("DELETE FROM ref", "DELETE FROM blob")
    return backend.open(clock=clock), ref


@pytest.mark.parametrize("way", ["collect", "verify"])
def test_a_copy_that_nothing_refers_to_is_kept_in_quarantine_for_a_week(
    folder: Backend, clock: Clock, way: str
) -> None:
    store, ref = _without_its_row(folder, clock)
    if way == "collect":
        assert store.collect(grace=0).orphans == 1
    store.verify(repair=True)  # the counts are wrong too
    store.verify(repair=True)
    assert store.stats().quarantined_bytes == LARGE
    report = store.verify()
    assert (report.problems, report.quarantined_bytes) == ([], LARGE)
    (path,) = (folder.path / "quarantine").iterdir()
    assert path.read_bytes() == NOISE
    assert path.name.startswith(ref.artifact_id)
    clock.advance(6 * 86_400)
    store.collect(grace=0)
    assert store.stats().quarantined_bytes == LARGE
    clock.advance(2 * 86_400)
    store.collect(grace=0)
    assert store.stats().quarantined_bytes == 0
    assert list((folder.path / "quarantine").iterdir()) == []


def test_a_repair_takes_a_missing_copy_back_from_the_quarantine(
    folder: Backend, clock: Clock
) -> None:
    store = folder.open(clock=clock)
    session = store.session("s", ttl=None)
    ref = session.put(NOISE)
    assert session.list() == [ref]
    folder.edit_catalog("UPDATE blob SET place = '00' || substr(place, 3)")
    assert store.collect(grace=0).orphans == 1
    assert store.stats().quarantined_bytes == LARGE
    (problem,) = store.verify(repair=True).problems
    assert (problem.kind, problem.repaired) == ("missing", True)
    assert store.stats() == replace(store.stats(), quarantined_bytes=0, tombstones=0)
    assert session.get(ref) == NOISE
    assert store.verify().problems == []


def test_a_second_copy_is_removed_only_if_the_first_is_sound(
    lasting: Backend, clock: Clock
) -> None:
    store = lasting.open(clock=clock)
    session = store.session("s", ttl=None)
    ref = session.put(NOISE)
    blobs = store._blobs
    for _ in range(2):
        with blobs.stage([NOISE]) as staged:
            staged.publish()
    if lasting.is_fleet:
        blobs._sweep_after = 0  # type: ignore[attr-defined]
    assert store.collect(grace=0).orphans == 2
    assert store.stats().quarantined_bytes == 0
    with blobs.stage([NOISE]) as staged:
        staged.publish()
    lasting.damage(ref, lambda data: data[:-1] + b"?")
    assert store.collect(grace=0).orphans == 1
    assert store.stats().quarantined_bytes == LARGE
    assert {(one.kind, one.repaired) for one in store.verify(repair=True).problems} == {
        ("damaged", True), ("orphan", True),
    }  # fmt: skip
    assert session.get(ref) == NOISE


def test_the_copy_of_an_artifact_that_a_put_found_expired_is_removed_and_not_quarantined(
    folder: Backend, clock: Clock
) -> None:
    store = folder.open(clock=clock, grace=10)
    store.session("s", ttl=10).put(NOISE)
    clock.advance(1_000)
    session = store.session("s")
    assert session.get(session.put("the session begins again")) == "the session begins again"
    assert store.collect().orphans == 1
    assert store.stats().quarantined_bytes == 0


def test_a_compressed_copy_that_does_not_read_back_is_not_used(
    folder: Backend, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open(clock=clock)
    session = store.session("s", ttl=None)
    text = "a line that compresses\n" * 20_000
    ref = session.put(text)
    compressed = frames.compressed
    monkeypatch.setattr(
        frames, "compressed", lambda pieces: (one[:-1] + b"?" for one in compressed(pieces))
    )
    report = store.collect(grace=0, cold_after=0)
    assert (report.compressed, [one.kind for one in report.problems]) == (0, ["unreadable"])
    assert session.get(ref) == text
    assert store.verify().problems == []


# Purging


@pytest.mark.parametrize("size", [10, 100_000, LARGE])
@pytest.mark.parametrize("way", ["forget", "end", "expire"])
def test_content_that_was_forgotten_and_collected_leaves_no_trace(
    lasting: Backend, clock: Clock, size: int, way: str
) -> None:
    secret, name = b"canary-" + b"7c1e" * 8, "canary-name-91f3"
    store = lasting.open(clock=clock)
    session, other = store.session("s", ttl=100), store.session("other", ttl=None)
    for i in range(20):
        other.put(f"neighbour {i}")
    ref = session.put(secret + os.urandom(size) + secret, name=name, tool=name)
    for i in range(20):
        other.put(f"another neighbour {i}")
    assert session.get(ref) is not None
    assert lasting.places_of(secret)
    if way == "forget":
        session.forget(ref)
    elif way == "end":
        session.end()
    else:
        clock.advance(101)
        store.collect(grace=0)
        clock.advance(86_400 * 8)  # the tombstone goes too
    store.collect(grace=0)
    assert lasting.places_of(secret) == []
    assert lasting.places_of(name.encode()) == []
    assert store.verify().problems == []


def test_healing_leaves_nothing_to_sweep(lasting: Backend) -> None:
    store = lasting.open()
    data = "x" * LARGE
    ref = store.session("s").put(data)
    lasting.damage(ref, lambda data: b"y" * LARGE)
    store.session("other").put(data)
    assert store.session("s").get(ref) == data
    assert store.verify().problems == []


def test_a_read_that_the_system_answers_in_pieces_is_not_damage(
    folder: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    session, data = store.session("s"), os.urandom(2_000_000)
    ref = session.put(data)
    read = os.pread
    monkeypatch.setattr(
        os, "pread", lambda file, length, offset: read(file, min(length, 300_000), offset)
    )
    assert session.get(ref) == data
    with session.open(ref) as stream:
        stream.seek(500_000)
        assert stream.read(1_000_000) == data[500_000:1_500_000]
    assert store.verify().problems == []


def test_a_collection_is_due_once_a_day_for_all_processes(lasting: Backend, clock: Clock) -> None:
    store, other = (lasting.open(clock=clock) for _ in range(2))
    assert store.collected_at() is None
    assert store.collect_if_due() is not None
    assert other.collect_if_due() is None
    assert other.collected_at() == datetime.fromtimestamp(clock.now, UTC)
    clock.advance(86_399)
    assert store.collect_if_due() is None
    clock.advance(1)
    assert other.collect_if_due() is not None
    assert store.collect_if_due() is None


def test_a_long_lived_process_collects_by_itself_and_ends_quietly(store: Store) -> None:
    with collecting_daily(store, first_after=0):
        wait_until(lambda: store.collected_at() is not None)
    with collecting_daily(store, first_after=3_600):
        pass


def test_a_surface_collects_the_tenants_that_it_serves(store: Store) -> None:
    served, other = store.tenant("served"), store.tenant("other")
    with collecting_daily(store, tenants=lambda: {"served"}, first_after=0):
        wait_until(lambda: served.collected_at() is not None)
    assert store.collected_at() is not None
    assert other.collected_at() is None
