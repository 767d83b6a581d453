"""One flipped bit in any file of a store, in every state that the store may be in, and in
transcripts.

The oracle is that a loss is reported. After a flip, every artifact that was acknowledged reads as
its exact bytes, or the call raises an error, or it is missing and `verify` (or opening the store)
reports damage. It never has wrong bytes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store, transcript
from coatcheck.errors import CoatcheckError, Damaged, StoreError
from tests.backends import edit_catalog
from tests.counting import Counts
from tests.faults.world import chosen_seed
from tests.transcript.samples import SAMPLES, as_lines

pytestmark = pytest.mark.faults

TEXT = b"a line of a text that compresses well\n" * 5_000
NOISE = random.Random(3).randbytes(150_000)
CHATS = as_lines(SAMPLES["openai-chat"])
_GAP = 64  # unused bytes of an SQLite page, which are flipped together


def _small(store: Store) -> dict[str, bytes]:
    session = store.session("s", ttl=None)
    contents = [b"small %d" % number * (1 + number) for number in range(4)] + [
        bytes(range(256)) * 4
    ]
    return {
        session.put(data, name=f"n{number}").artifact_id: data
        for number, data in enumerate(contents)
    }


def in_journal(store: Store) -> dict[str, bytes]:
    """All puts are only in the journal, as after a kill."""
    return _small(store)


def in_wal(store: Store) -> dict[str, bytes]:
    """The database has applied the journal, and its pages are in the WAL."""
    held = _small(store)
    assert store.session("s").get("n0") == held[next(iter(held))]
    return held


def in_database(store: Store) -> dict[str, bytes]:
    """Everything is in the database file. There are also a search index, records and an empty
    journal."""
    held = _small(store)
    session = store.session("s")
    session.search("small")
    session.record("notes", b"{}")
    store.collect(grace=0)
    return held


def as_files(store: Store) -> dict[str, bytes]:
    """A raw copy and a compressed one."""
    session = store.session("s", ttl=None)
    held = {session.put(TEXT).artifact_id: TEXT}
    store.collect(grace=0, cold_after=0)
    return held | {session.put(NOISE).artifact_id: NOISE}


STATES: list[Callable[[Store], dict[str, bytes]]] = [in_journal, in_wal, in_database, as_files]


def _made(state: Callable[[Store], dict[str, bytes]], folder: Path) -> dict[str, bytes]:
    """Leave a store in this state, without closing it: its files are as a killed process leaves
    them."""
    live = folder.with_name("live")
    with coatcheck.open(live, durability="power") as store:
        held = state(store)
        shutil.copytree(live, folder)
        os.truncate(folder / "reserve", 0)
    shutil.rmtree(live)
    return held


def _places(data: bytes, *, is_long: bool, share: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield the bytes to flip together: each separately, but unused bytes of a page in groups. The
    short form yields only a few."""
    groups: list[list[int]] = []
    for at in range(len(data)):
        if groups and not data[at] and len(groups[-1]) < _GAP and not any(data[groups[-1][0] : at]):
            groups[-1].append(at)
        else:
            groups.append([at])
    return iter(groups if is_long else rng.sample(groups, min(share, len(groups))))


def _check(folder: Path, held: dict[str, bytes]) -> bool:
    """Read everything and return whether something was lost, which must then be reported."""
    try:
        store = coatcheck.open(folder, durability="process")
    except CoatcheckError:
        return True
    with store:
        try:
            session = store.session("s")
        except CoatcheckError:
            return True
        missing = []
        for digest, data in held.items():
            try:
                found = session.get("art:" + digest)
            except CoatcheckError:
                continue
            if found is None:
                missing.append(digest)
            else:
                assert (found.encode() if isinstance(found, str) else found) == data, "wrong bytes"
        for ref in _listed(store):
            with contextlib.suppress(CoatcheckError), session.open(ref) as stream:
                assert stream.read() == held.get(ref.artifact_id, b""), "bytes of another artifact"
        if missing:
            assert _reports(store), f"{len(missing)} artifacts are lost, and this is not reported"
        return bool(missing)


def _listed(store: Store) -> list[coatcheck.Ref]:
    try:
        return store.session("s").list()
    except CoatcheckError:
        return []


def _reports(store: Store) -> bool:
    try:
        return bool(store.verify().problems)
    except CoatcheckError:
        return True


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_flipped_bit_in_any_file_of_a_store_causes_no_wrong_bytes_and_no_silent_loss(
    state: Callable[[Store], dict[str, bytes]], in_memory: Path, long_faults: bool, counts: Counts
) -> None:
    start, folder = in_memory / "start", in_memory / "store"
    held = _made(state, start)
    seed = chosen_seed()
    rng = random.Random(seed)
    assert not _check(shutil.copytree(start, folder), held)
    shutil.rmtree(folder)
    files = [path for path in sorted(start.rglob("*")) if path.is_file() and path.stat().st_size]
    for path in files:
        data = path.read_bytes()
        groups = list(_places(data, is_long=long_faults, share=6, rng=rng))
        if long_faults and "blobs" in path.relative_to(start).parts:
            groups = groups[::64]  # mostly payload, where one byte is like the next
        for places in groups:
            changed, bit = bytearray(data), rng.randrange(8)
            for at in places:
                changed[at] ^= 1 << bit
            shutil.copytree(start, folder)
            (folder / path.relative_to(start)).write_bytes(changed)
            try:
                _check(folder, held)
            except BaseException as error:
                error.add_note(
                    f"bit {bit} of bytes {places[0]} to {places[-1]} of {path.name}, seed {seed}"
                )
                raise
            shutil.rmtree(folder)
            counts("flipped bits", len(places))


def test_a_flipped_bit_in_the_definition_of_a_table_is_damage_and_not_an_empty_store(
    in_memory: Path,
) -> None:
    folder = in_memory / "store"
    _made(in_database, folder)
    data = (folder / "catalog.sqlite").read_bytes()
    at = data.index(b"blob_key INTEGER PRIMARY KEY, digest") + len("blob_key INTEG")
    (folder / "catalog.sqlite").write_bytes(data[:at] + b"M" + data[at + 1 :])
    with pytest.raises(Damaged):
        coatcheck.open(folder)


@pytest.mark.parametrize("changed", ["CAST(data AS TEXT)", "5"])
def test_content_whose_type_was_changed_by_a_flip_is_damage(changed: str, in_memory: Path) -> None:
    folder = in_memory / "store"
    with coatcheck.open(folder, durability="process") as store:
        ref = store.session("s", ttl=None).put(b"some bytes")
    edit_catalog(folder, f"UPDATE content SET data = {changed}")
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s")
        with pytest.raises(Damaged):
            session.get(ref)
        with pytest.raises(Damaged):
            session.read(ref, lines="1:2")
        assert _reports(store)
        session.put(b"some bytes")
        assert session.get(ref) == b"some bytes"


@pytest.mark.parametrize("column", ["place", "coding"])
def test_a_file_whose_row_has_bytes_in_place_of_text_is_reported_and_a_put_heals_it(
    column: str, in_memory: Path
) -> None:
    folder = in_memory / "store"
    held = _made(as_files, folder)
    edit_catalog(folder, f"UPDATE blob SET {column} = CAST({column} AS BLOB)")
    _check(folder, held)
    with coatcheck.open(folder) as store:
        session = store.session("s")
        with pytest.raises(StoreError):
            session.get("art:" + next(iter(held)))
        assert _reports(store)
        for digest, data in held.items():
            session.put(data)
            assert session.get("art:" + digest) == data


@pytest.mark.parametrize("name", ["session.jsonl", ".session.jsonl.coatcheck-backup"])
def test_a_flipped_bit_in_a_transcript_or_its_backup_is_reported_or_harmless(
    name: str, in_memory: Path, long_faults: bool, counts: Counts
) -> None:
    path, seed = in_memory / "session.jsonl", chosen_seed()
    rng = random.Random(seed)
    with coatcheck.open(in_memory / "store", durability="process") as store:
        session = store.session("s", ttl=None)
        path.write_bytes(CHATS)
        transcript.externalize(path, session)
        sound = {one.name: one.read_bytes() for one in in_memory.iterdir() if one.is_file()}
        data = sound[name]
        # A backup is mostly payload.
        every = range(0, len(data), 8 if name.endswith("-backup") else 1)
        for at in every if long_faults else rng.sample(every, 30):
            bit = 1 << rng.randrange(8)
            for one, content in sound.items():
                (in_memory / one).write_bytes(content)
            (in_memory / name).write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                try:
                    verified = transcript.verify(path, store).is_sound
                except CoatcheckError:
                    verified = False
                if verified:  # a flip inside a stub, which is not part of the whole file
                    whole = io.BytesIO()
                    transcript.rehydrate(path, store, to=whole)
                    assert whole.getvalue() == CHATS, "a flip was not noticed"
                with contextlib.suppress(CoatcheckError):
                    transcript.rehydrate(path, store)
                backup = in_memory / ".session.jsonl.coatcheck-backup"
                assert CHATS in (
                    path.read_bytes(),
                    backup.read_bytes() if backup.exists() else b"",
                ), "no file is whole"
            except BaseException as error:
                error.add_note(f"byte {at}, bit {bit}, seed {seed}")
                raise
            counts("flipped bits")


def test_a_flipped_bit_in_the_row_offsets_of_a_page_is_reported_as_damage(in_memory: Path) -> None:
    start, folder, reported = in_memory / "start", in_memory / "store", 0
    _made(in_database, start)
    data = (start / "catalog.sqlite").read_bytes()
    for page, offset, bit in itertools.product(range(1, len(data) // 4096), (16, 17), range(8)):
        changed = bytearray(data)
        changed[page * 4096 + offset] ^= 1 << bit
        shutil.copytree(start, folder)
        (folder / "catalog.sqlite").write_bytes(changed)
        try:
            with coatcheck.open(folder, durability="process") as store:
                store.session("s").list()
        except CoatcheckError as error:
            reported += isinstance(error, Damaged)
        shutil.rmtree(folder)
    assert reported


def _put_with_wrong_size(folder: Path, table: str, coding: str, size: int) -> coatcheck.Ref:
    with coatcheck.open(folder, durability="process") as store:
        ref = store.session("s", ttl=None).put(TEXT[:20_000] if coding == "inline" else TEXT)
        if coding == "zstd":
            assert store.collect(grace=0, cold_after=0).compressed
        store.session("s").list()
    edit_catalog(folder, f"UPDATE {table} SET size = {size}")
    return ref


@pytest.mark.parametrize("heal", ["put", "repair"])
@pytest.mark.parametrize("size", [-5, 0, 20, 58_928, 200_000, 1 << 40])
@pytest.mark.parametrize("coding", ["raw", "zstd"])
def test_a_ref_with_a_wrong_size_is_damage_and_a_put_or_a_repair_heals_it(
    coding: str, size: int, heal: str, in_memory: Path
) -> None:
    ref = _put_with_wrong_size(in_memory / "store", "ref", coding, size)
    with coatcheck.open(in_memory / "store", durability="process") as store:
        session = store.session("s")
        with pytest.raises(Damaged):
            session.get(ref)
        with pytest.raises(Damaged), session.open(ref) as stream:
            stream.read()
        assert _reports(store)
        if heal == "put":
            session.put(TEXT)
        else:
            assert all(one.repaired for one in store.verify(repair=True).problems)
        with session.open(ref) as stream:
            assert stream.read() == session.get(ref) == TEXT
        assert store.verify().problems == []


@pytest.mark.parametrize("size", [0, 20, 58_928, 1 << 40])
@pytest.mark.parametrize("table", ["ref", "blob"])
@pytest.mark.parametrize("coding", ["inline", "raw", "zstd"])
def test_a_repair_finds_out_which_of_two_sizes_is_right(
    coding: str, table: str, size: int, in_memory: Path
) -> None:
    ref = _put_with_wrong_size(in_memory / "store", table, coding, size)
    with coatcheck.open(in_memory / "store", durability="process") as store:
        assert all(one.repaired for one in store.verify(repair=True).problems)
        assert store.verify().problems == []
        assert store.session("s").get(ref) == TEXT[: ref.size_bytes]
        assert [one.size_bytes for one in store.session("s").list()] == [ref.size_bytes]


def test_a_tombstone_with_a_damaged_time_is_damage(in_memory: Path) -> None:
    with coatcheck.open(in_memory / "store", durability="process") as store:
        ref = store.session("s", ttl=None).put(b"some bytes")
    edit_catalog(in_memory / "store", "UPDATE ref SET created = 'soon', gone = 'expired'")
    with coatcheck.open(in_memory / "store", durability="process") as store, pytest.raises(Damaged):
        store.session("s").get(ref)
