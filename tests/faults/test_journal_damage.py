"""Damage in the journal: only the damaged records are lost, the journal is kept aside, and the loss is reported."""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path

import pytest

import coatcheck
from coatcheck.errors import StoreUnavailable
from coatcheck.storage.disk import Disk
from coatcheck.storage.journal import START, Journal, _sealed
from tests.counting import Counts
from tests.faults.world import assert_clean, problems

pytestmark = pytest.mark.faults


def _with_journal(folder: Path, contents: list[bytes], *, durability: str = "power") -> dict[str, bytes]:
    """Create a store whose puts are only in the journal, as after a kill; return ids and contents."""
    live = folder.with_name("live")
    with coatcheck.open(live, durability=durability) as store:  # type: ignore[arg-type]
        session = store.session("s", ttl=None)
        held = {session.put(content).artifact_id: content for content in contents}
        shutil.copytree(live, folder)
    shutil.rmtree(live)
    return held


def _texts(count: int) -> list[bytes]:
    return [f"line {number} of a tool's output\n".encode() * (1 + number % 40) for number in range(count)]


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _missing(store: coatcheck.Store, held: dict[str, bytes]) -> set[str]:
    session = store.session("s")
    found = {ref.artifact_id: session.get(ref) for ref in session.list()}
    assert found.items() <= held.items()
    return held.keys() - found.keys()


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_flipped_bit_in_the_journal_loses_only_the_record_that_it_hits(
    durability: str, in_memory: Path, long_faults: bool, caplog: pytest.LogCaptureFixture, counts: Counts
) -> None:
    start = in_memory / "start"
    held = _with_journal(start, _texts(10 if long_faults else 60), durability=durability)
    original = (start / "journal").read_bytes()
    rng = random.Random(21)
    bits = [at * 8 + rng.randrange(8) for at in range(len(original))]
    if not long_faults:
        bits = [*range(0, START * 8, 61), *rng.sample(bits[START:], 12), *bits[-2:]]
    for bit in bits:
        counts("flipped bits")
        folder = in_memory / "store"
        shutil.copytree(start, folder)
        _flip(folder / "journal", bit)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "coatcheck"), coatcheck.open(folder, durability="process") as store:
            lost = _missing(store, held)
            assert len(lost) == (bit >= START * 8), f"bit {bit}"
            kept = list(folder.glob("journal.damaged-*"))
            if lost:
                assert [one.startswith("catalog: the journal was damaged") for one in problems(store)] == [True]
                assert "kept as" in caplog.text
                (copy,) = kept
                assert copy.read_bytes()[START:] == _flipped(original, bit)[START:]
                for each in lost:
                    store.session("s").put(held[each])
            assert not _missing(store, held)
            store.session("s").put(b"more")
        with coatcheck.open(folder, durability="process") as store:
            assert not _missing(store, held | {store.session("s").put(b"more").artifact_id: b"more"})
            assert bool(problems(store)) == bool(lost)
            store.verify(repair=True)
            assert_clean(store)
            assert list(folder.glob("journal.damaged-*")) == kept
        shutil.rmtree(folder)


def _flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_a_flipped_bit_loses_only_one_of_two_thousand_puts(in_memory: Path) -> None:
    folder = in_memory / "store"
    held = _with_journal(folder, _texts(2_000), durability="process")
    _flip(folder / "journal", (START + 30) * 8)
    with coatcheck.open(folder) as store:
        assert len(_missing(store, held)) == 1
        assert len(problems(store)) == 1


def test_damage_in_several_places_loses_only_the_records_there(in_memory: Path) -> None:
    folder = in_memory / "store"
    held = _with_journal(folder, _texts(200))
    path = folder / "journal"
    size = path.stat().st_size
    data = bytearray(path.read_bytes())
    for at in (size // 4, size // 2, size - 20):
        data[at : at + 20] = bytes(20)
    path.write_bytes(data)
    with coatcheck.open(folder) as store:
        assert 3 <= len(_missing(store, held)) <= 5
        (problem,) = problems(store)
        assert "3 places" in problem


def test_content_that_looks_like_a_record_is_not_taken_for_one(in_memory: Path) -> None:
    folder = in_memory / "store"
    with coatcheck.open(in_memory / "other", durability="process") as other:
        other.session("s", ttl=None).put(b"of another journal", name="forged")
        copied = (in_memory / "other" / "journal").read_bytes()[START:]
    held = _with_journal(folder, [b"first", b"x" * 3 + copied * 3, b"last"])
    journal = (folder / "journal").read_bytes()
    assert journal.count(copied) == 3
    _flip(folder / "journal", journal.index(b"xxx") * 8)
    with coatcheck.open(folder) as store:
        assert {held[one] for one in _missing(store, held)} == {b"x" * 3 + copied * 3}
        assert len(store.session("s").list()) == 2


def test_a_copy_of_the_journal_itself_is_content_like_any_other(in_memory: Path) -> None:
    live, folder = in_memory / "live", in_memory / "store"
    with coatcheck.open(live) as store:
        session = store.session("s", ttl=None)
        refs = [session.put(b"one"), session.put((live / "journal").read_bytes(), name="copy"), session.put(b"two")]
        shutil.copytree(live, folder)
    data = (folder / "journal").read_bytes()
    _flip(folder / "journal", (data.index(b"coatchk2", 8) + 3) * 8)
    with coatcheck.open(folder) as store:
        session = store.session("s")
        assert [session.get(ref) for ref in refs] == [b"one", None, b"two"]


@pytest.mark.parametrize("size", [0, 1, 700])
def test_a_torn_end_is_not_reported(size: int, in_memory: Path) -> None:
    folder = in_memory / "store"
    held = _with_journal(folder, _texts(20))
    path = folder / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole + random.Random(size).randbytes(size))  # a put that was killed before it was counted
    with coatcheck.open(folder) as store:
        assert not _missing(store, held)
        assert problems(store) == []


def test_a_header_without_a_valid_copy_of_the_id_is_an_error_with_a_hint(in_memory: Path) -> None:
    folder = in_memory / "store"
    _with_journal(folder, _texts(3))
    _flip(folder / "journal", 70)
    _flip(folder / "journal", (START - 1) * 8)
    with pytest.raises(StoreUnavailable) as error:
        coatcheck.open(folder)
    assert "journal" in error.value.hint


def test_a_header_that_puts_the_end_far_beyond_the_file_costs_no_memory(in_memory: Path) -> None:
    folder = in_memory / "store"
    held = _with_journal(folder, _texts(3))
    header = (folder / "journal").read_bytes()[:32]
    forged = _sealed(header[:16] + (1 << 55).to_bytes(8, "little") + header[24:])
    with open(folder / "journal", "r+b") as file:
        file.write(forged)
    with coatcheck.open(folder, durability="process") as store:
        assert not _missing(store, held)
        assert store.session("s").get(store.session("s").put(b"more")) == b"more"


def test_a_record_that_is_not_a_put_is_reported_as_lost(in_memory: Path) -> None:
    folder = in_memory / "store"
    held = _with_journal(folder, _texts(3))
    root = os.open(folder, os.O_RDONLY)
    journal = Journal(root, Disk(durable=False))
    journal.refresh()
    for payload in (b"", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}more"):
        journal.append(payload)
    journal.close()
    os.close(root)
    with coatcheck.open(folder, durability="process") as store:
        assert not _missing(store, held)
        assert [one.startswith("catalog: the journal was damaged") for one in problems(store)] == [True]


def test_a_loss_can_be_noted_on_a_journal_that_is_already_partly_applied(in_memory: Path) -> None:
    live, folder = in_memory / "live", in_memory / "store"
    with coatcheck.open(live) as store:
        session = store.session("s", ttl=None)
        first = session.put(b"taken over")
        assert session.get(first) == b"taken over"
        assert session.forget(first)
        at = (live / "journal").stat().st_size
        lost, kept = session.put(b"is hit"), session.put(b"is not")
        shutil.copytree(live, folder)
    _flip(folder / "journal", 75)  # in the header, so that the id must be found in its copy
    _flip(folder / "journal", (at + 2) * 8)
    with coatcheck.open(folder) as store:
        session = store.session("s")
        assert [session.get(ref) for ref in (first, lost, kept)] == [None, None, b"is not"]
        assert len(problems(store)) == 1


def test_the_journal_itself_finds_records_after_damage(in_memory: Path) -> None:
    root = os.open(in_memory, os.O_RDONLY)
    journal = Journal(root, Disk(durable=False))
    journal.refresh()
    marks = [journal.append(b"record %d" % number).end for number in range(3)]
    _flip(in_memory / "journal", (marks[0] + 1) * 8)
    assert list(journal.records(0)) == [(marks[0], b"record 0"), (marks[1], None), (marks[2], b"record 2")]
    journal.close()
    os.close(root)
