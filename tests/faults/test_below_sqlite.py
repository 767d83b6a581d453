"""The database file and its WAL under power cuts, like all other files: every write below SQLite is
recorded, and each prefix of the record is replayed.

A store is used while everything that it and SQLite do to files is written to a log: writes,
truncations, renames, removals and syncs. A power cut after each entry leaves what was synced, and
some, none or only the sizes of the rest. Each such folder is opened.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.storage import reserve
from coatcheck.storage.folder import FolderCatalog
from tests.conftest import LONG_FAULTS
from tests.counting import Counts
from tests.faults.below_sqlite import wrapped_vfs
from tests.faults.faulty import Cut, open_on
from tests.faults.volume import Event, RecordedDisk, RecordedSqlite, Steps, Volume
from tests.faults.world import problems

pytestmark = pytest.mark.faults

NOW = 1_750_000_000.0
DAY = 86_400.0
CUTS: tuple[Cut | None, ...] = (None, "dropped", "zeroed", "torn")
SAMPLED = 60  # prefixes of each log in the short form
INLINE = 2_000
TEXT = b"a line that compresses well\n" * 200
State = frozenset[tuple[str, str]]
"""Session and id of each artifact."""


@dataclass
class Recording:
    """A log of changes, and what had been acknowledged at each of its lengths."""

    log: list[Event] = field(default_factory=list)
    acknowledged: list[tuple[int, State]] = field(default_factory=list)

    def known(self, length: int) -> tuple[State, set[State]]:
        """Return the state that was acknowledged at this length of the log, and the possible ones:
        that or the next."""
        before = [frozenset(), *(state for at, state in self.acknowledged if at <= length)][-1]
        after = [state for at, state in self.acknowledged if at > length][:1]
        return before, {before, *after}


@dataclass
class Use:
    """A store in use. Each change is noted once it is acknowledged."""

    store: Store
    recording: Recording
    held: set[tuple[str, str]] = field(default_factory=set)
    now: float = NOW

    def put(self, session_id: str, data: bytes) -> None:
        self.store.session(session_id, ttl=None).put(data)
        self.held.add((session_id, hashlib.sha256(data).hexdigest()))
        self.note()

    def forget(self, session_id: str, data: bytes) -> None:
        artifact_id = hashlib.sha256(data).hexdigest()
        assert self.store.session(session_id).forget(artifact_id)
        self.held.discard((session_id, artifact_id))
        self.note()

    def end(self, session_id: str) -> None:
        self.store.session(session_id).end()
        self.held = {one for one in self.held if one[0] != session_id}
        self.note()

    def collect_later(self) -> None:
        self.now += 3 * DAY
        self.store.collect(grace=0)
        self.note()

    def note(self) -> None:
        self.recording.acknowledged.append((len(self.recording.log), frozenset(self.held)))


def use_all(use: Use) -> None:
    """Make puts of all kinds, removals, and small changes after compression. The WAL begins again
    many times."""
    choose = random.Random(1)
    small = [choose.randbytes(300) for _ in range(12)]
    large = [choose.randbytes(5_000) for _ in range(3)]
    for data in small[:6]:
        use.put("one", data)
    for data in large:
        use.put("one", data)
    use.put("two", large[0])
    use.put("two", TEXT)
    use.forget("one", small[0])
    use.forget("one", large[1])
    use.collect_later()
    use.put("one", small[6])
    use.forget("two", TEXT)
    use.put("two", TEXT)
    use.collect_later()
    for data in small[7:]:
        use.put("two", data)
        assert use.store.session("two").list()
    use.end("one")
    use.collect_later()
    use.put("three", small[0])


OLD = [TEXT, TEXT[1:], random.Random(2).randbytes(5_000), b"small and old"]


def put_old(use: Use) -> None:
    for data in OLD:
        use.put("old", data)


def change_around_old(use: Use) -> None:
    """Compress old artifacts, and make small changes before, between and after."""
    choose = random.Random(3)
    for _ in range(3):
        small = choose.randbytes(100)
        use.put("new", small)
        use.put("new", choose.randbytes(4_000))
        use.collect_later()
        use.forget("new", small)
        assert use.store.session("old").get(hashlib.sha256(TEXT).hexdigest()) == TEXT
        use.store._activity.flush()


@pytest.fixture
def small_reserve() -> Iterator[None]:
    """Limits so small that the WAL is copied to the database within a few changes."""
    with (
        patch.object(reserve, "FULL_SIZE", 1 << 16),
        patch.object(FolderCatalog, "inline_limit", INLINE),
    ):
        yield


def recorded(folder: Path, *work: tuple[bool, Callable[[Use], None]]) -> Recording:
    """Record what is written while a new store is opened for each piece of work, with or without
    durability."""
    recording = Recording()
    folder.mkdir(mode=0o700)
    volume = Volume(folder, recording.log)
    held: set[tuple[str, str]] = set()
    now = NOW
    with wrapped_vfs().listening(RecordedSqlite(lambda: volume, Steps())):
        for durable, do in work:
            use: Use | None = None
            disk = RecordedDisk(lambda: volume, Steps(), durable=durable)
            with open_on(folder, disk, clock=lambda: use.now if use else now) as store:  # noqa: B023
                use = Use(store, recording, held, now)
                do(use)
            held, now = use.held, use.now
    return recording


def prefixes(recording: Recording, how: str) -> Iterator[tuple[int, Cut | None]]:
    """Yield the lengths to replay, each with what happens to unsynced data."""
    count = len(recording.log)
    if LONG_FAULTS:
        yield from ((length, cut) for length in range(count + 1) for cut in CUTS)
    else:
        choose = random.Random(how)
        yield from (
            (length, choose.choice(CUTS))
            for length in sorted(choose.sample(range(count + 1), SAMPLED))
        )


def held_in(store: Store) -> State:
    """Read everything. Fails if any byte is wrong or missing."""
    held = set()
    for info in list(store.sessions()):
        session = store.session(info.session_id)
        for ref in session.list():
            data = session.get(ref)
            assert data is not None, f"{ref.pointer} of {info.session_id} has no bytes"
            assert hashlib.sha256(data).hexdigest() == ref.artifact_id
            held.add((info.session_id, ref.artifact_id))
    return frozenset(held)


def replay(
    recording: Recording, in_memory: Path, how: str, counts: Counts, check: Callable[..., None]
) -> None:
    empty = in_memory / "empty"
    empty.mkdir()
    volume, done = Volume(empty), 0
    for length, cut in prefixes(recording, how):
        for event in recording.log[done:length]:
            volume.apply(event)
        done = length
        image = in_memory / "image"
        volume.leave(image, cut, random.Random(length))
        counts("replayed prefixes of the writes below SQLite")
        try:
            with coatcheck.open(image, durability="process", clock=lambda: NOW + 30 * DAY) as store:
                check(store, cut, *recording.known(length))
        except BaseException as error:
            what = [
                one if not isinstance(one, bytes) else f"{len(one)} bytes"
                for one in recording.log[length - 1]
            ]
            error.add_note(
                f"after entry {length} of {len(recording.log)}, {what}; unsynced data: {cut or 'kept'}"
            )
            raise
        shutil.rmtree(image)


def test_every_prefix_of_the_writes_below_sqlite_contains_all_acknowledged_artifacts(
    in_memory: Path, small_reserve: None, counts: Counts
) -> None:
    recording = recorded(in_memory / "store", (True, use_all))

    def check(store: Store, cut: Cut | None, held: State, possible: set[State]) -> None:
        found = held_in(store)
        assert found in possible, f"lost: {held - found}; not expected: {found - held}"
        assert problems(store) == []
        store.collect(grace=0)
        assert problems(store, orphans=True) == []

    replay(recording, in_memory, "power", counts, check)


def test_without_durability_every_prefix_opens_and_no_byte_is_wrong(
    in_memory: Path, small_reserve: None, counts: Counts
) -> None:
    recording = recorded(in_memory / "store", (False, use_all))
    ever = {one for _, state in recording.acknowledged for one in state}

    def check(store: Store, cut: Cut | None, held: State, possible: set[State]) -> None:
        if cut is None:
            assert held_in(store) in possible
            assert problems(store) == []
        found = {
            (info.session_id, ref.artifact_id)
            for info in store.sessions()
            for ref in refs_of(store, info)
        }
        assert found <= ever
        assert not [one for one in problems(store) if one.startswith("catalog")]
        store.verify(repair=True)
        assert problems(store, orphans=True) == []
        held_in(store)

    replay(recording, in_memory, "process", counts, check)


def test_a_process_without_durability_never_endangers_durable_artifacts(
    in_memory: Path, small_reserve: None, counts: Counts
) -> None:
    recording = recorded(in_memory / "store", (True, put_old), (False, change_around_old))
    old = {("old", hashlib.sha256(data).hexdigest()) for data in OLD}

    def check(store: Store, cut: Cut | None, held: State, possible: set[State]) -> None:
        session = store.session("old")
        assert (
            {one for one in held if one[0] == "old"}
            <= {("old", ref.artifact_id) for ref in session.list()}
            <= old
        )
        for ref in session.list():
            assert hashlib.sha256(session.get(ref)).hexdigest() == ref.artifact_id
        assert not [one for one in problems(store) if one.startswith("catalog")]

    replay(recording, in_memory, "mixed", counts, check)


def refs_of(store: Store, info: object) -> list[coatcheck.Ref]:
    return store.session(info.session_id).list()  # type: ignore[attr-defined]


@pytest.mark.parametrize("durable", [True, False], ids=["power", "process"])
def test_the_log_is_complete(durable: bool, in_memory: Path, small_reserve: None) -> None:
    folder = in_memory / "store"
    recording = recorded(folder, (durable, use_all))
    empty = in_memory / "empty"
    empty.mkdir()
    volume = Volume(empty)
    for event in recording.log:
        volume.apply(event)
    volume.leave(in_memory / "image", None, random.Random(0))
    assert files_of(in_memory / "image") == files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    found = {}
    for path, _, names in os.walk(folder):
        found[os.path.relpath(path, folder)] = b""
        found |= {
            os.path.relpath(Path(path, name), folder): Path(path, name).read_bytes()
            for name in names
        }
    return found
