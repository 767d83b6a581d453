"""Expiry of sessions and artifacts: sliding time to live, pins, tombstones and the grace period."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from coatcheck import Policy, Ref, Store
from coatcheck.errors import Expired, NotFound
from coatcheck.storage.upkeep import BATCH
from tests.backends import LARGE, START, Backend, Clock, digests_of_files, wait_until

VALUES = pytest.mark.parametrize("value", ["small", "x" * LARGE], ids=["small", "large"])


@VALUES
def test_a_session_expires_one_ttl_after_its_last_use(
    store: Store, clock: Clock, value: str
) -> None:
    session = store.session("s", ttl=100)
    ref = session.put(value, name="n")
    assert ref.expires_at == ref.created_at + timedelta(seconds=100)
    clock.advance(99)
    assert session.get(ref) == value
    clock.advance(1)
    assert session.get(ref) == value, "the previous get counted as a use"
    clock.advance(100)
    for target in (ref, ref.pointer, "n"):
        assert session.get(target) is None
        assert session.ref(target) is None
    assert session.list() == []


def test_every_kind_of_use_keeps_a_session_alive(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x")
    for use in (
        lambda: session.get(ref),
        lambda: session.open(ref).close(),
        lambda: session.put("y"),
    ):
        clock.advance(80)
        use()
    clock.advance(80)
    assert session.get(ref) == "x"


def test_looking_for_a_missing_artifact_does_not_count_as_use(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x")
    clock.advance(60)
    assert session.get("art:" + "0" * 12) is None
    clock.advance(60)
    assert session.get(ref) is None


def test_using_a_child_keeps_its_parents_alive(store: Store, clock: Clock) -> None:
    parent = store.session("parent", ttl=100)
    child = store.session("child", parent="parent", ttl=100)
    ref = parent.put("theirs")
    for _ in range(5):
        clock.advance(80)
        assert child.get(ref) == "theirs"
    clock.advance(80)
    assert parent.get(ref) == "theirs"


def test_new_sessions_get_the_ttl_of_the_store(backend: Backend, clock: Clock) -> None:
    store = backend.open(ttl=50, clock=clock)
    assert store.session("default").put("x").expires == START + 50
    assert store.session("own", ttl=70).put("x").expires == START + 70
    assert store.session("endless", ttl=None).put("x").expires_at is None


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        (100, 50, 100),
        (50, 100, 100),
        (None, 50, None),
        (50, None, None),
        ("new", 50, 50),
        ("new", None, None),
    ],
)
def test_a_lasting_session_never_gets_a_shorter_ttl(
    store: Store, before: float | str | None, asked: float | None, after: float | None
) -> None:
    if not isinstance(before, str):
        store.session("s", ttl=before, create=True)
    assert store.lasting_session("s", ttl=asked).ttl == after
    store.lasting_session("s", ttl=asked).put("x")
    assert store.session("s").ttl == after


def test_the_default_time_to_live_is_thirty_days_after_the_last_use(
    store: Store, clock: Clock
) -> None:
    session = store.session("s")
    ref = session.put("x")
    assert ref.expires == START + 30 * 86_400
    clock.advance(29 * 86_400)
    assert session.get(ref) == "x", (
        "a person who returns after weeks still reads what the conversation names"
    )
    clock.advance(29 * 86_400)
    assert session.get(ref) == "x"
    clock.advance(30 * 86_400)
    assert session.get(ref) is None


def test_an_artifact_can_expire_before_its_session(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    brief, long = session.put("brief", ttl=10), session.put("long")
    assert brief.expires == START + 10
    clock.advance(9)
    assert session.get(brief) == "brief", "a use does not extend an artifact's own ttl"
    clock.advance(1)
    assert session.get(brief) is None
    assert session.get(long) == "long"


def test_the_longest_ttl_of_several_puts_applies(store: Store, clock: Clock) -> None:
    session = store.session("s")
    for ttl in (None, 10):
        session.put("first without an end", ttl=ttl)
    for ttl in (10, None):
        session.put("first with an end", ttl=ttl)
    for ttl in (10, 30, 20):
        last = session.put("three times", ttl=ttl)
    clock.advance(15)
    assert len(session.list()) >= 2
    for text in ("first without an end", "first with an end"):
        assert any(session.get(ref) == text for ref in session.list())
    assert session.get(last.pointer) == "three times"
    clock.advance(15)
    assert session.get(last.pointer) is None


def test_the_error_for_an_expired_artifact_describes_it(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("2026-01-01 10:00:00 INFO x", name="build log")
    clock.advance(100)
    for target in (ref, ref.pointer, "build log"):
        with pytest.raises(Expired) as gone:
            session.open(target)
        for part in ("log", "build log", "26 bytes", "2025-06-15"):
            assert part in gone.value.message


@VALUES
def test_a_tombstone_stays_after_the_bytes_are_collected(
    store: Store, clock: Clock, value: str
) -> None:
    session = store.session("s", ttl=100)
    ref = session.put(value, name="n")
    clock.advance(100)
    report = store.collect(grace=0)
    assert (report.refs, report.artifacts, report.bytes) == (1, 1, len(value))
    assert (store.stats().stored_bytes, store.stats().tombstones) == (0, 1)
    for target in (ref, ref.pointer, "n"):
        with pytest.raises(Expired):
            session.open(target)
        assert session.get(target) is None


def test_tombstones_are_forgotten_after_a_week(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x")
    clock.advance(100)
    store.collect(grace=0)
    clock.advance(8 * 86_400)
    store.collect(grace=0)
    with pytest.raises(NotFound) as missing:
        session.open(ref)
    assert missing.value.code == "not_found"
    assert list(store.sessions()) == []


def test_an_expired_artifact_is_collected_after_more_empty_sessions_than_one_change_covers(
    store: Store, clock: Clock
) -> None:
    for number in range(BATCH + 1):
        store.session(f"empty {number}", ttl=100, create=True)
    store.session("full", ttl=100).put("a result")
    clock.advance(200)
    assert store.collect(grace=0).refs == 1
    assert store.stats().stored_bytes == 0


def test_a_tombstone_is_visible_only_to_its_own_session(store: Store, clock: Clock) -> None:
    ref = store.session("owner", ttl=10).put("x")
    clock.advance(10)
    with pytest.raises(NotFound) as missing:
        store.session("stranger").open(ref)
    assert missing.value.code == "not_found"


def test_expired_artifacts_are_kept_during_the_grace_period(store: Store, clock: Clock) -> None:
    store.session("s", ttl=100).put("x")
    clock.advance(100 + 7200 - 1)
    assert store.collect().artifacts == 0
    clock.advance(1)
    assert store.collect().artifacts == 1


def test_a_put_within_the_grace_period_revives_the_session(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x", name="n")
    clock.advance(100 + 7000)
    assert session.get(ref) is None
    session.put("y")
    assert session.get(ref) == session.get("n") == "x"


def test_a_put_after_the_grace_period_revives_nothing(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x", name="n")
    clock.advance(100 + 7200)
    session.put("y")
    assert session.get(ref) is None
    with pytest.raises(Expired):
        session.open("n")
    assert [session.get(one) for one in session.list()] == ["y"]
    store.collect()
    assert store.verify().problems == []


def test_repeating_a_pinned_put_after_the_grace_period_revives_nothing_else(
    store: Store, clock: Clock
) -> None:
    session = store.session("s", ttl=100)
    ref, other = session.put("x"), session.put("y")
    session.pin(ref)
    clock.advance(100 + 7200)
    session.put("x")
    assert [session.get(one) for one in session.list()] == ["x"]
    assert session.get(other) is None


@VALUES
def test_putting_an_expired_value_again_restores_it(store: Store, clock: Clock, value: str) -> None:
    session = store.session("s", ttl=100)
    session.put(value, name="n")
    clock.advance(100)
    store.collect(grace=0)
    ref = session.put(value)
    assert session.get(ref) == value


@VALUES
def test_a_pinned_artifact_outlives_its_session(store: Store, clock: Clock, value: str) -> None:
    session = store.session("s", ttl=100)
    kept, other = session.put(value, name="n"), session.put("other")
    pinned = session.pin("n")
    assert pinned.pinned
    assert pinned.expires_at is None
    clock.advance(86_400 * 30)
    store.collect()
    assert session.get(kept) == session.get("n") == value
    assert session.get(other) is None
    assert [ref.artifact_id for ref in session.list()] == [kept.artifact_id]


def test_an_unpinned_artifact_expires_with_its_session(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x")
    session.pin(ref)
    assert not session.unpin(ref).pinned
    clock.advance(100)
    assert session.get(ref) is None


def test_a_pin_covers_names_that_are_added_later(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=100)
    ref = session.put("x", name="one")
    session.pin(ref)
    session.put("x", name="two")
    clock.advance(200)
    for target in (ref, ref.pointer, "one", "two"):
        assert session.get(target) == "x"


def test_pinning_a_missing_artifact_is_an_error(store: Store) -> None:
    with pytest.raises(NotFound):
        store.session("s").pin("art:" + "0" * 12)


def test_a_pinned_artifact_can_be_forgotten(store: Store) -> None:
    session = store.session("s")
    ref = session.put("x")
    session.pin(ref)
    assert session.forget(ref)
    assert session.get(ref) is None


def test_a_grant_lives_as_long_as_the_session_that_received_it(store: Store, clock: Clock) -> None:
    giver = store.session("giver", ttl=10)
    store.session("receiver", ttl=1000)
    ref = giver.put("x", ttl=5)
    giver.grant(ref, to="receiver")
    clock.advance(500)
    store.collect(grace=0)
    assert store.session("receiver").get(ref) == "x"
    assert giver.get(ref) is None


@VALUES
def test_reading_writes_nothing(folder: Backend, clock: Clock, value: str) -> None:
    store = folder.open(clock=clock)
    session = store.session("s")
    ref = session.put(value, name="n")
    assert session.list() == [ref]
    before = digests_of_files(folder.path)
    for _ in range(20):
        clock.advance(1)
        assert session.get(ref) == session.get("n") == value
        session.open(ref).read()
        session.list()
    assert digests_of_files(folder.path) == before


def test_uses_reach_other_processes_before_the_session_could_expire(
    lasting: Backend, clock: Clock
) -> None:
    reader, other = lasting.open(clock=clock), lasting.open(clock=clock)
    ref = reader.session("s", ttl=100).put("x")
    clock.advance(80)
    assert reader.session("s").get(ref) == "x"
    reader._activity.flush()  # a timer does this eventually
    clock.advance(80)
    assert other.session("s").get(ref) == "x"


def test_uses_are_written_by_a_timer(lasting: Backend, clock: Clock) -> None:
    reader, other = lasting.open(clock=clock), lasting.open(clock=clock)
    # The timer depends on the time to live, and on the machine's clock.
    session = reader.session("s", ttl=0.5)
    ref = session.put("x")
    clock.advance(0.4)
    assert session.get(ref) == "x"
    wait_until(lambda: [info.used for info in other.sessions()] == [clock.now])
    clock.advance(0.4)
    assert other.session("s").get(ref) == "x"


def test_uses_are_written_on_close(lasting: Backend, clock: Clock) -> None:
    with lasting.open(clock=clock) as store:
        session = store.session("s", ttl=100)
        ref = session.put("x")
        clock.advance(80)
        session.get(ref)
    clock.advance(80)
    assert lasting.open(clock=clock).session("s").get(ref) == "x"


def test_a_ref_reports_whether_it_has_expired_and_a_pinned_one_never_does(backend: Backend) -> None:
    session = backend.open().session("s", ttl=3600)
    assert not session.put("lives").is_expired
    assert session.put("is over at once", ttl=0).is_expired
    pinned = session.pin(session.put("stays"))
    assert (pinned.expires_at, pinned.is_expired) == (None, False)


@pytest.mark.parametrize("name", ["062a8bdd", "9f26971d"])
def test_pointers_of_a_real_session_open_after_its_longest_pause(
    corpus: Path, store: Store, clock: Clock, name: str
) -> None:
    """The sessions were recorded with pauses of 1.8 and 29 hours. Each stub is read after each
    message."""
    session = store.session(name)
    refs: list[Ref] = []
    last = 0.0
    longest = 0.0
    for line in (corpus / "transcripts" / "claude-code" / f"{name}.jsonl").read_text().splitlines():
        message = json.loads(line)
        if "timestamp" not in message:
            continue
        at = datetime.fromisoformat(message["timestamp"]).timestamp()
        if last:
            longest = max(longest, at - last)
            clock.advance(max(0.0, at - last))
        last = at
        if refs:
            assert session.read(refs[-1], lines="1:2").text
        refs += session.externalize(line, tool="Read", policy=Policy(max_chars=8_000)).refs
    assert refs
    assert longest > 3_600
    assert all(session.ref(ref.pointer) for ref in refs)
