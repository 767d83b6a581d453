"""A full disk, on a real, small file system."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

import coatcheck
from coatcheck import Ref, Session, Store
from coatcheck.errors import StoreError, StoreFull
from tests.counting import Counts
from tests.faults.world import assert_clean, files_under, problems, state_of
from tests.gateway.provider import Provider, Say, Seen, Turn, Use, turn
from tests.gateway.talking import APIS, Api, Person, serving
from tests.repeated import shown_by_first

pytestmark = pytest.mark.faults

MEGABYTE = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on its own file system of 24 MB."""
    with (
        tempfile.TemporaryDirectory(prefix="coatcheck-full-") as base,
        contextlib.ExitStack() as stack,
    ):
        disk = Path(base, "disk")
        disk.mkdir()
        if request.param == "tmpfs":
            _mount(["-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], stack, disk)
        else:
            file = Path(base, "file")
            with file.open("wb") as made:
                made.truncate(24 * MEGABYTE)
            _try(["mkfs.ext4", "-q", "-m", "0", str(file)])
            _mount(["-o", "loop", str(file), str(disk)], stack, disk)
        yield disk


def _mount(arguments: list[str], stack: contextlib.ExitStack, disk: Path) -> None:
    _try(["mount", *arguments])
    stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)


def _try(command: list[str]) -> None:
    """Run a command that needs privileges. Without them, skip the test, but fail in CI."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"{command[0]} is not possible here: {getattr(error, 'stderr', b'') or error!r}"
        if command[0] == "mount" and "tmpfs" in command and os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def _filled(session: Session, make: Callable[[], bytes]) -> dict[Ref, bytes]:
    """Put until the disk is full. The first error must be StoreFull."""
    held: dict[Ref, bytes] = {}
    for _ in range(200_000):
        data = make()
        try:
            held[session.put(data)] = data
        except StoreFull:
            return held
    raise AssertionError("the disk never filled up")


def _assert_held(store: Store, held: dict[Ref, bytes]) -> None:
    for ref, data in held.items():
        assert store.session(ref.session_id).get(ref) == data
    assert {digest for _, _, digest, _ in state_of(store)} == {ref.artifact_id for ref in held}
    assert problems(store) == []


SIZES = {
    "tiny": lambda rng: rng.randint(8, 200),
    "small": lambda rng: rng.randint(1_000, 128 * 1024),
    "large": lambda rng: rng.randint(129 * 1024, 3 * MEGABYTE),
    "mixed": lambda rng: rng.choice((10, 3_000, 100_000, 400_000, 2 * MEGABYTE)),
}


@pytest.mark.parametrize(
    ("sizes", "small_disk"),
    [
        *((sizes, "tmpfs") for sizes in SIZES),
        ("mixed", "ext4"),
        *(
            pytest.param(sizes, "ext4", marks=pytest.mark.repeated)
            for sizes in SIZES
            if sizes != "mixed"
        ),
    ],
    indirect=["small_disk"],
)
def test_a_full_disk_is_a_typed_error_and_the_store_stays_usable(
    sizes: str, small_disk: Path, long_faults: bool, counts: Counts
) -> None:
    rng = random.Random(sizes)
    if sizes == "tiny":
        _eat(small_disk, leave=(5 if long_faults else 2) * MEGABYTE)
    folder = small_disk / "store"
    held: dict[Ref, bytes] = {}
    store = coatcheck.open(folder, durability="process")
    for round_ in range(10 if long_faults else {"tiny": 1, "mixed": 3}.get(sizes, 2)):
        session = store.session(f"round {round_}", ttl=None)
        held |= _filled(session, lambda: rng.randbytes(SIZES[sizes](rng)))
        counts("full disks")
        assert held
        _assert_held(store, held)
        if round_ % 2:
            store.close()
            store = coatcheck.open(folder, durability="process")
            _assert_held(store, held)
        for ref in rng.sample(
            sorted(held, key=lambda ref: ref.artifact_id), max(1, len(held) // 3)
        ):
            assert store.session(ref.session_id).forget(ref)
            del held[ref]
        store.collect(grace=0)
        _assert_held(store, held)
        after = store.session(f"round {round_}").put(b"again" * 10)
        held[after] = b"again" * 10
        if round_ % 3 == 2:
            for info in list(store.sessions()):
                store.session(info.session_id).end()
            held.clear()
            store.collect(grace=0)
    _assert_held(store, held)
    assert_clean(store)
    store.close()


def test_records_that_do_not_fit_are_a_typed_error_and_earlier_ones_stay(small_disk: Path) -> None:
    _eat(small_disk, leave=6 * MEGABYTE)
    with coatcheck.open(small_disk / "store", durability="process") as store:
        session = store.session("s", ttl=None)
        token = session.claim("dispatcher")
        bodies: list[bytes] = []
        rng = random.Random(1)

        def fill() -> None:
            while len(bodies) < 10_000:
                body = rng.randbytes(60_000)
                session.record("hot", body, token=token)
                bodies.append(body)

        with pytest.raises(StoreFull):
            fill()
        assert len(bodies) > 10
        assert [one.body for one in session.records("hot")] == bodies
        store.session("other").end()
        assert session.end() == 0
        store.collect()
        assert problems(store) == []
        session.record("hot", b"again", token=session.claim("dispatcher"))
        assert [one.body for one in session.records("hot")] == [b"again"]


def _eat(disk: Path, leave: int = 0) -> Path:
    """Fill the disk to the last byte, like another program."""
    path = disk / "eaten"
    with path.open("ab", buffering=0) as file:
        for size in (MEGABYTE, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        if leave:
            file.truncate(max(0, file.tell() - leave))
    return path


@pytest.mark.parametrize("count", [1, 40, 400])
def test_puts_can_be_read_if_another_program_fills_the_disk_before_the_journal_is_applied(
    count: int, small_disk: Path
) -> None:
    folder = small_disk / "store"
    rng = random.Random(count)
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s", ttl=None)
        held = {}
        for _ in range(count):
            data = rng.randbytes(rng.choice((1, 300, 40_000)) if count > 1 else 128 * 1024)
            held[session.put(data)] = data
            if sum(map(len, held.values())) > 4 * MEGABYTE:
                break
        _eat(small_disk)
        _assert_held(store, held)
        held |= _filled(session, lambda: rng.randbytes(100_000))
        _assert_held(store, held)
        ref = next(iter(held))
        assert session.forget(ref)
        del held[ref]
        store.collect(grace=0)
        _assert_held(store, held)


def test_a_full_disk_can_be_opened_read_and_cleaned_up_by_a_new_process(small_disk: Path) -> None:
    folder = small_disk / "store"
    rng = random.Random(5)
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s", ttl=None)
        held = {session.put(data): data for data in map(rng.randbytes, (10, 50_000, 500_000) * 4)}
    _eat(small_disk)
    with coatcheck.open(folder, durability="process") as store:
        _assert_held(store, held)
    _eat(small_disk)
    with coatcheck.open(folder, durability="process") as store:
        _assert_held(store, held)
        for ref in list(held)[::2]:
            assert store.session("s").forget(ref)
            del held[ref]
        store.collect(grace=0)
        _assert_held(store, held)
    (small_disk / "eaten").unlink()
    with coatcheck.open(folder, durability="process") as store:
        store.session("s").put(b"again")
        assert_clean(store)


@pytest.mark.parametrize("small_disk", shown_by_first(["tmpfs", "ext4"]), indirect=True)
def test_many_small_puts_to_a_large_catalog_can_be_applied_on_a_full_disk(small_disk: Path) -> None:
    """Each record touches its own pages: then the WAL needs many times the size of the journal."""
    folder = small_disk / "store"
    rng = random.Random(6)
    held: dict[Ref, bytes] = {}
    with coatcheck.open(folder, durability="process") as store:
        for number in range(4_000):
            data = rng.randbytes(8)
            ref = store.session(f"s{number % 50}", ttl=None).put(data)
            if number % 100 == 0:
                held[ref] = data
        store.collect()
        late = {}
        for number in range(450):
            data = rng.randbytes(8)
            late[store.session(f"s{number % 50}").put(data)] = data
        _eat(small_disk)
        for ref, data in (held | late).items():
            assert store.session(ref.session_id).get(ref) == data
    with coatcheck.open(folder, durability="process") as store:
        for ref, data in (held | late).items():
            assert store.session(ref.session_id).get(ref) == data
        assert problems(store) == []


@pytest.mark.parametrize("small_disk", shown_by_first(["tmpfs", "ext4"]), indirect=True)
def test_a_session_with_very_many_artifacts_can_be_ended_on_a_full_disk(
    small_disk: Path, long_faults: bool
) -> None:
    rng = random.Random(20)
    with coatcheck.open(small_disk / "store", durability="process") as store:
        kept = store.session("kept", ttl=None).put(b"of another session")
        session = store.session("s", ttl=None)
        count = 20_000 if long_faults else 3_000
        for _ in range(count):
            session.put(rng.randbytes(8))
        store.collect()
        _eat(small_disk)
        assert session.end() == count
        assert [info.session_id for info in store.sessions()] == ["kept"]
        assert store.session("s").list() == []
        assert store.session("kept").get(kept) == b"of another session"
        assert problems(store) == []
        assert store.stats().refs == 1


@pytest.mark.parametrize("small_disk", shown_by_first(["tmpfs", "ext4"]), indirect=True)
def test_very_many_artifacts_can_expire_on_a_full_disk(small_disk: Path, long_faults: bool) -> None:
    rng, now, count = random.Random(21), [1_000_000.0], 5_000 if long_faults else 1_000
    with coatcheck.open(small_disk / "store", durability="process", clock=lambda: now[0]) as store:
        session = store.session("s", ttl=10)
        for _ in range(count):
            session.put(rng.randbytes(8))
        store.collect()
        _eat(small_disk)
        now[0] += 100
        assert store.collect(grace=0).refs == count
        now[0] += 30 * 86_400
        store.collect(grace=0)
        assert store.stats().tombstones == 0
        assert problems(store) == []


def test_a_store_cannot_be_created_on_a_full_disk_but_can_be_later(small_disk: Path) -> None:
    eaten = _eat(small_disk)
    with pytest.raises(StoreError):
        coatcheck.open(small_disk / "store").session("s").put(b"x")
    eaten.unlink()
    with coatcheck.open(small_disk / "store") as store:
        store.session("s").put(b"x")
        assert_clean(store)
    assert not list(files_under(small_disk / "store" / "tmp"))


def _fill_up(disk: Path) -> None:
    """Fill the rest of a file system."""
    for size in (MEGABYTE, 4_096, 512, 1):
        with (
            contextlib.suppress(OSError),
            (disk / f"filler of {size}").open("wb", buffering=0) as filler,
        ):
            while True:
                filler.write(b"\0" * size)


def _fill_log(store: Store) -> None:
    """Use up the room that the write-ahead log still has on a full disk."""
    with contextlib.suppress(StoreFull):
        session = store.session("another", ttl=None)
        for size in (60_000, 4_000, 100, 1):
            with contextlib.suppress(StoreFull):
                for _ in range(10_000):
                    session.record("filler", bytes(size))


def _searching(seen: Seen) -> Turn:
    """A model that searches once and then talks."""
    return (
        turn(Use("search", {"q": "x"}))
        if "find" in json.dumps(seen.messages[-1])
        else turn(Say("Fine."))
    )


@pytest.mark.parametrize("small_disk", shown_by_first(["tmpfs", "ext4"]), indirect=True)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", shown_by_first(["loop", "stub", "observe"]))
@pytest.mark.parametrize(
    ("is_streamed", "session"),
    [(True, None), (False, "mine")],
    ids=["streamed", "whole, in a named session"],
)
def test_a_gateway_on_a_full_disk_passes_conversations_that_it_never_changed(
    small_disk: Path, api: Api, mode: str, is_streamed: bool, session: str | None
) -> None:
    with (
        coatcheck.open(small_disk / "store") as store,
        Provider(_searching) as provider,
        serving(store, provider, mode=mode, session=session) as url,
    ):
        _fill_up(small_disk)
        person = Person(api, url, is_streamed=is_streamed)
        person.say("find it")
        person.give("a result of many lines\n" * 5_000)
        person.say("thanks")
        assert provider.problems == []
        assert [seen.tools for seen in provider.seen] == [["search"]] * 3
        assert "a result of many lines" in provider.seen[1].raw.decode()


@pytest.mark.parametrize("small_disk", shown_by_first(["tmpfs", "ext4"]), indirect=True)
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_that_a_gateway_has_changed_continues_on_a_full_disk(
    small_disk: Path, api: Api
) -> None:
    """What was sent stays as it was, and a new result is sent whole."""
    with (
        coatcheck.open(small_disk / "store") as store,
        Provider(_searching) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        person = Person(api, url, is_streamed=False)
        person.say("find it")
        person.give("a first result\n" * 9_000)
        _fill_up(small_disk)
        _fill_log(store)  # the room that is left there differs from run to run

        def continue_conversation() -> None:
            person.say("find more")
            person.give("a second result\n" * 9_000)
            person.say("thanks")

        # A link to the next request cannot be written once the log has no room.
        if api == "responses stored":
            with pytest.raises(openai.APIError, match="cannot write its ledger"):
                continue_conversation()
            return
        continue_conversation()
        assert provider.problems == []
        last = provider.seen[-1].raw.decode()
        assert last.count('{\\"stub\\"') == 1
        assert last.count("a second result") >= 9_000
        assert len(provider.seen[-1].tools) == 4
