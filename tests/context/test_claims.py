"""Only the dispatcher that claimed a session writes its hot state, in any thread or process."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import coatcheck
from coatcheck import Session, Store, errors
from coatcheck.context import Claim, HotState, claim, current, history
from tests.backends import Backend, Clock, files_with
from tests.faults.world import ROOT, problems

pytestmark = pytest.mark.on_fleet


def state(objective: str = "o", session_id: str = "s") -> HotState:
    return HotState(session_id=session_id, objective=objective)


def objectives(session: Session) -> list[str | None]:
    return [one.state.objective for one in history(session)]


def test_the_last_written_state_is_the_current_one(backend: Backend, clock: Clock) -> None:
    session = backend.open(clock=clock).session("s")
    assert current(session) is None
    assert list(history(session)) == []
    held = claim(session, "a")
    assert [held.write(state(text)) for text in ("one", "two")] == [1, 2]
    if backend.lasts:
        backend.close()
        session = backend.open().session("s")
    newest = current(session)
    assert newest is not None
    assert newest.state == state("two")
    assert (newest.number, newest.at, newest.holder, newest.token) == (
        2,
        clock.now,
        "a",
        held.token,
    )
    assert newest.written_at.timestamp() == clock.now
    assert objectives(session) == ["two", "one"]


def test_a_writer_that_lost_its_claim_is_fenced_and_nothing_it_wrote_is_seen(store: Store) -> None:
    session = store.session("s")
    old = claim(session, "a")
    old.write(state("before"))
    new = claim(session, "b")
    for _ in range(2):
        with pytest.raises(errors.Fenced):
            old.write(state("too late"))
    assert not old.is_held
    assert new.is_held
    old.release()
    assert new.is_held
    assert new.write(state("after")) == 2
    assert objectives(session) == ["after", "before"]


def test_a_session_that_ended_fences_its_dispatcher_off_for_good(store: Store) -> None:
    old = claim(store.session("s"), "a")
    store.session("s").end()
    with pytest.raises(errors.Fenced):
        old.write(state())
    assert list(store.sessions()) == []
    assert claim(store.session("s"), "a").token > old.token
    with pytest.raises(errors.Fenced):
        old.write(state())


def test_a_claim_is_released_at_the_end_of_its_context(store: Store) -> None:
    session = store.session("s")
    with claim(session, "a", idle=math.inf) as held:
        held.write(state())
        with pytest.raises(errors.Fenced):
            claim(session, "b", idle=math.inf)
    with claim(session, "b", idle=math.inf) as other:
        with pytest.raises(errors.Fenced):
            held.write(state())
        other.write(state())
    with pytest.raises(ZeroDivisionError), claim(session, "c", idle=math.inf):
        raise ZeroDivisionError
    assert session.claimant() is None


def test_a_state_of_another_session_or_an_invalid_one_is_not_written(store: Store) -> None:
    held = claim(store.session("s"), "a")
    for wrong in (
        state(session_id="other"),
        {"session_id": "s"},
        None,
        state().model_copy(update={"run_id": 7}),
    ):
        with pytest.raises(errors.InvalidArgument):
            held.write(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument):
        claim(store.session("s"), "")
    with pytest.raises(errors.TooLarge):
        held.write(state("x" * (1 << 20)))
    assert current(store.session("s")) is None


def test_the_history_can_be_limited_and_trimmed(store: Store) -> None:
    session = store.session("s")
    held = claim(session, "a")
    for number in range(150):
        held.write(state(str(number)))
    assert objectives(session) == [str(number) for number in reversed(range(150))]
    assert [one.number for one in history(session, limit=70)] == list(range(150, 80, -1))
    assert [one.number for one in history(session, before=4)] == [3, 2, 1]
    assert list(history(session, limit=0)) == []
    held.write(state("last"), keep=3)
    assert [one.number for one in history(session)] == [151, 150, 149]


def test_the_history_is_deleted_with_its_session(folder: Backend) -> None:
    store = folder.open()
    session = store.session("s")
    claim(session, "a").write(state("a very secret objective"))
    assert files_with(folder.path, b"a very secret objective")
    session.end()
    store.collect()
    assert files_with(folder.path, b"a very secret objective") == []
    assert current(store.session("s")) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b'{"by":7,"state":{"session_id":"s"}}', b'{"by":"a","state":{}}'],
)
def test_an_invalid_record_is_an_error_and_does_not_hide_the_others(
    store: Store, body: bytes
) -> None:
    session = store.session("s")
    held = claim(session, "a")
    held.write(state("sound"))
    session.record("hot", body, token=held.token)
    with pytest.raises(errors.Damaged):
        current(session)
    assert [one.number for one in history(session, before=2)] == [1]
    held.write(state("again"))
    newest = current(session)
    assert newest is not None
    assert newest.state.objective == "again"


def test_a_shown_snapshot_contains_no_secret(store: Store) -> None:
    session = store.session("s")
    secret = "ghp_" + "a1B2c3D4e5F6" * 3
    claim(session, f"holder {secret}").write(state(f"use {secret}"))
    newest = current(session)
    assert newest is not None
    assert newest.state.objective == f"use {secret}"
    assert secret not in json.dumps(newest.to_record())


def test_two_competing_threads_write_in_the_order_of_their_claims(store: Store) -> None:
    session, go = store.session("s"), threading.Barrier(4)
    lost: list[str] = []

    def fight(name: str) -> None:
        go.wait()
        for turn in range(10):
            held = claim(session, name)
            for number in range(3):
                text = f"{name} {turn} {number}"
                try:
                    held.write(state(text))
                except errors.Fenced:
                    lost.append(text)
                    break

    threads = [threading.Thread(target=fight, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = list(history(session))
    tokens = [one.token for one in reversed(written)]
    assert tokens == sorted(tokens, key=lambda token: token or 0)
    assert not {one.state.objective for one in written} & set(lost)


class Dispatchers(RuleBasedStateMachine):
    """Compare claims with a model: only the newest token can write, and the history lists every
    write."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.session = backend.new_session(ttl=None)
        self.claims: list[Claim] = []
        self.newest: Claim | None = None
        self.is_idle_since = self.clock.now
        self.written: list[str] = []

    @rule(holder=st.sampled_from("abc"), idle=st.sampled_from([0.0, 10.0, math.inf]))
    def claim(self, holder: str, idle: float) -> None:
        busy = (
            self.newest is not None
            and self.newest.holder != holder
            and self.clock.now < self.is_idle_since + idle
        )
        if busy:
            with pytest.raises(errors.Fenced):
                claim(self.session, holder, idle=idle)
            return
        made = claim(self.session, holder, idle=idle)
        assert all(made.token > other.token for other in self.claims)
        self.claims.append(made)
        self.newest, self.is_idle_since = made, self.clock.now

    @rule(which=st.integers(0, 5), text=st.text("xyz", max_size=3))
    def write(self, which: int, text: str) -> None:
        if not self.claims:
            return
        held = self.claims[-1 - which % len(self.claims)]
        if held is self.newest:
            self.written.append(text)
            assert held.write(state(text, self.session.session_id)) == len(self.written)
            self.is_idle_since = self.clock.now
        else:
            with pytest.raises(errors.Fenced):
                held.write(state(text, self.session.session_id))

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        if self.claims:
            held = self.claims[-1 - which % len(self.claims)]
            held.release()
            self.newest = None if held is self.newest else self.newest

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_history_is_what_was_written(self) -> None:
        assert [text or None for text in reversed(self.written)] == [
            text or None for text in objectives(self.session)
        ]
        holder = self.session.claimant()
        assert (holder.token if holder else None) == (self.newest.token if self.newest else None)
        assert [one.is_held for one in self.claims] == [one is self.newest for one in self.claims]


def test_claims_follow_their_model(backend: Backend, clock: Clock) -> None:
    backend.open(clock=clock)
    run_state_machine_as_test(lambda: Dispatchers(backend, clock), settings=backend.examples())  # type: ignore[arg-type]


@pytest.mark.faults
def test_among_competing_and_killed_processes_only_the_newest_claim_writes(
    lasting: Backend, tmp_path: Path, long_faults: bool
) -> None:
    url, logs = lasting.url, tmp_path / "logs"
    rng, count = random.Random(7), 0
    logs.mkdir()
    lasting.open().close()
    for turn in range(20 if long_faults else 1):
        started = [_fighter(url, logs / f"{turn}.{number}", rng) for number in range(3)]
        try:
            for number, one in enumerate(started):
                _wait_for_writes(one, logs / f"{turn}.{number}")
            for one in rng.sample(started, len(started)):
                assert one.poll() is None, one.communicate()[1].decode()
                one.send_signal(signal.SIGKILL)
        finally:
            for one in started:
                one.kill()
                one.communicate()
        count = _check(url, logs)
    assert count


def _fighter(url: str, log: Path, rng: random.Random) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.faults.worker",
        "fight",
        url,
        rng.randrange(1 << 32),
        log,
        log.name,
    ]
    return subprocess.Popen([str(word) for word in command], cwd=ROOT, stderr=subprocess.PIPE)


def _wait_for_writes(fighter: subprocess.Popen[bytes], log: Path) -> None:
    while not log.exists() or log.read_bytes().count(b'"write"') < 15:
        assert fighter.poll() is None, fighter.communicate()[1].decode()
        time.sleep(0.01)


def _check(url: str, logs: Path) -> int:
    """Compare the history with what each process logged, and return the number of acknowledged
    writes."""
    logged: list[dict[str, Any]] = [
        json.loads(line) for log in logs.iterdir() for line in log.read_bytes().splitlines()
    ]
    with coatcheck.open(url, durability="process") as store:
        session = store.session("fought for")
        found = {one.number: one for one in history(session)}
        for line in logged:
            if line["did"] == "write":
                one = found[line["number"]]
                assert (one.state.objective, one.token) == (line["objective"], line["token"])
            elif line["did"] == "claim":
                older = [
                    one
                    for one in found.values()
                    if one.number > line["seen"] and (one.token or 0) < line["token"]
                ]
                assert older == [], "a process wrote after it had lost the claim"
        lost = {line["objective"] for line in logged if line["did"] == "lose"}
        assert not lost & {one.state.objective for one in found.values()}
        tokens = [found[number].token or 0 for number in sorted(found)]
        assert tokens == sorted(tokens)
        assert sorted(found) == list(range(1, len(found) + 1))
        assert problems(store) == []
        held = claim(session, "after the fight")
        assert held.write(state("continues", "fought for")) == len(found) + 1
    return sum(line["did"] == "write" for line in logged)
