"""A store compared with a model made of dicts: after any sequence of operations, both give the same
answers.

The machine also reopens the store, and abandons it as a crash would: not closed, with its WAL as it
is and its uses not written. The model knows nothing of blobs, rows, files or objects.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import coatcheck
from coatcheck import Store
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.ids import digest_of
from coatcheck.values import encode
from tests.backends import LARGE, Backend, Clock
from tests.conftest import LONG_FAULTS

TTL, GRACE = 100.0, 50.0
SESSIONS = ("one", "two", "child of one")
PARENTS = {"child of one": "one"}

# Few enough that they repeat. Some have the same bytes in another type.
VALUES = st.sampled_from(["a", "[1]", [1], b"[1]", "x" * LARGE, b"x" * LARGE])
NAMES = st.sampled_from([None, "n", "m"])
WHICH = st.sampled_from(SESSIONS)


@dataclass
class ModelRef:
    """A ref of the model."""

    digest: str
    value: Any
    name: str | None
    own_end: float | None
    pinned: bool = False
    granted_by: str | None = None
    gone: bool = False

    def end(self) -> float:
        return inf if self.pinned or self.own_end is None else self.own_end

    def equals(self, other: ModelRef) -> bool:
        """Return whether both have the same content, type, name, giver and end."""
        mine, others = (
            (one.digest, type(one.value), one.name, one.granted_by) for one in (self, other)
        )
        return mine == others and self.own_end == other.own_end


@dataclass
class ModelSession:
    """A session of the model: its refs from the oldest to the newest, and when it was last used."""

    used: float
    refs: list[ModelRef] = field(default_factory=list)

    def expires(self) -> float:
        return self.used + TTL


class Machine(RuleBasedStateMachine):
    """Everything that a session can do, on one backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend, self.url = backend, backend.new_url()
        self.clock = Clock()
        self.sessions: dict[str, ModelSession] = {}
        self.abandoned: list[Store] = []
        self.store = self.opened()

    def opened(self) -> Store:
        return coatcheck.open(
            self.url, durability="process", ttl=TTL, grace=GRACE, clock=self.clock
        )

    # The model

    def lineage(self, name: str) -> list[str]:
        return [name, *self.lineage(PARENTS[name])] if name in PARENTS else [name]

    def is_live(self, model: ModelSession, entry: ModelRef) -> bool:
        ends = [model.expires()] + ([] if entry.own_end is None else [entry.own_end])
        return not entry.gone and (entry.pinned or self.clock.now < min(ends))

    def seen(self, name: str) -> list[tuple[str, ModelRef]]:
        """Live refs that a session sees: own before inherited, newest first."""
        return [
            (one, entry)
            for one in self.lineage(name)
            if one in self.sessions
            for entry in reversed(self.sessions[one].refs)
            if self.is_live(self.sessions[one], entry)
        ]

    def use(self, name: str) -> None:
        for one in self.lineage(name):
            if one in self.sessions:
                self.sessions[one].used = max(self.sessions[one].used, self.clock.now)

    def by_name(self, session: str, name: str) -> ModelRef | None:
        for one in self.lineage(session):
            model = self.sessions.get(one)
            named = [entry for entry in model.refs if entry.name == name] if model else []
            if model and named and self.is_live(model, named[-1]):
                return named[-1]
        return None

    def add(self, session: str, entry: ModelRef) -> None:
        model = self.sessions.setdefault(session, ModelSession(self.clock.now))
        if model.expires() + GRACE <= self.clock.now:
            for one in model.refs:
                one.gone = one.gone or not one.pinned
        same = [one for one in model.refs if one.digest == entry.digest and not one.gone]
        longest = [one for one in same if one.end() == max(map(ModelRef.end, same))]
        is_asked = entry.granted_by is None and entry.own_end is None
        known = [one for one in longest[-1:] if is_asked and self.is_live(model, one)]
        model.used = max(model.used, self.clock.now)
        newest = next((one for one in reversed(model.refs) if one.name == entry.name), None)
        if any(
            one.equals(entry) and (entry.name is None or one is newest)
            for one in [*known, *same[-1:]]
        ):
            return  # nothing is added: the existing ref stays where it is
        if not same:
            model.refs = [one for one in model.refs if one.digest != entry.digest]
        entry.pinned = bool(same) and same[-1].pinned
        model.refs.append(entry)

    # Operations

    @initialize()
    def family(self) -> None:
        for child, parent in PARENTS.items():
            self.store.session(child, parent=parent)
            self.sessions[child] = ModelSession(self.clock.now)

    def session(self, name: str) -> coatcheck.Session:
        return self.store.session(name, parent=PARENTS.get(name))

    @rule(
        which=WHICH,
        value=VALUES,
        name=NAMES,
        ttl=st.sampled_from([None, None, 10.0, 500.0]),
        stream=st.booleans(),
    )
    def put(
        self, which: str, value: Any, name: str | None, ttl: float | None, stream: bool
    ) -> None:
        # as a timer does: a put asks the catalog when its session was last used
        self.store._activity.flush()
        streamed = stream and isinstance(value, bytes)
        ref = self.session(which).put(io.BytesIO(value) if streamed else value, name=name, ttl=ttl)
        digest = digest_of(encode(value)[1])
        assert ref.artifact_id == digest
        self.add(
            which, ModelRef(digest, value, name, None if ttl is None else self.clock.now + ttl)
        )
        self.use(which)
        assert same(self.session(which).get(ref), value)

    @rule(which=WHICH, name=st.sampled_from(["n", "m"]))
    def get_by_name(self, which: str, name: str) -> None:
        expected = self.by_name(which, name)
        found = self.session(which).get(name)
        if expected is None:
            assert found is None
        else:
            assert same(found, expected.value)
            self.use(which)

    @rule(which=WHICH, value=VALUES, length=st.sampled_from([12, 64]))
    def get_by_pointer(self, which: str, value: Any, length: int) -> None:
        data = encode(value)[1]
        entries = [one for _, one in self.seen(which) if one.digest == digest_of(data)]
        pointer = "art:" + digest_of(data)[:length]
        found = self.session(which).get(pointer)
        if entries:
            assert any(same(found, one.value) for one in entries)
            self.use(which)
            with self.session(which).open(pointer) as stream:
                assert stream.read() == data
        else:
            assert found is None
            assert self.session(which).ref(pointer) is None

    @rule(which=WHICH)
    def list_all(self, which: str) -> None:
        expected = list(dict.fromkeys(entry.digest for _, entry in self.seen(which)))
        assert [ref.artifact_id for ref in self.session(which).list()] == expected

    @rule(which=WHICH, name=st.sampled_from(["n", "m"]))
    def list_history(self, which: str, name: str) -> None:
        expected = [entry.digest for _, entry in self.seen(which) if entry.name == name]
        found = [ref.artifact_id for ref in self.session(which).list(name=name)]
        assert [
            one for one, before in zip(found, [None, *found], strict=False) if one != before
        ] == [
            one for one, before in zip(expected, [None, *expected], strict=False) if one != before
        ]

    @rule(which=WHICH, value=VALUES)
    def forget(self, which: str, value: Any) -> None:
        digest = digest_of(encode(value)[1])
        sees = any(entry.digest == digest for _, entry in self.seen(which))
        model = self.sessions.get(which)
        own = [entry for entry in model.refs if entry.digest == digest] if model else []
        done = self.session(which).forget("art:" + digest)
        assert done == (sees and bool(own)) or not any(
            self.is_live(model, one) for one in own if model
        )
        if sees and model:
            model.refs = [entry for entry in model.refs if entry.digest != digest]

    @rule(which=WHICH, name=st.sampled_from(["n", "m"]))
    def forget_name(self, which: str, name: str) -> None:
        found = self.by_name(which, name)
        model = self.sessions.get(which)
        own = (
            [
                one
                for one in model.refs
                if one.name == name and one.digest == found.digest and not one.gone
            ]
            if model and found
            else []
        )
        assert self.session(which).forget(name) == bool(own)
        if model:
            model.refs = [entry for entry in model.refs if entry not in own]

    @rule(which=WHICH, value=VALUES, pinned=st.booleans())
    def pin(self, which: str, value: Any, pinned: bool) -> None:
        digest = digest_of(encode(value)[1])
        owners = [owner for owner, entry in self.seen(which) if entry.digest == digest]
        change = self.session(which).pin if pinned else self.session(which).unpin
        if not owners:
            refused: type[Exception] = NotFound
        elif owners[0] != which:
            refused = InvalidArgument
        else:
            assert change("art:" + digest).pinned == pinned
            for entry in self.sessions[which].refs:
                if entry.digest == digest:
                    entry.pinned = pinned
            return
        try:
            change("art:" + digest)
        except refused:
            return
        raise AssertionError("pinned an artifact of another session")

    @rule(giver=WHICH, to=st.sampled_from(["one", "two"]), value=VALUES)
    def grant(self, giver: str, to: str, value: Any) -> None:
        digest = digest_of(encode(value)[1])
        entries = [one for _, one in self.seen(giver) if one.digest == digest]
        self.store._activity.flush()
        try:
            ref = self.session(giver).grant("art:" + digest, to=to)
        except NotFound:
            assert not entries
            return
        assert entries
        source = next(
            one for one in entries if (one.name, encode(one.value)[0]) == (ref.name, ref.codec)
        )
        self.add(to, ModelRef(digest, source.value, ref.name, None, granted_by=giver))

    @rule(which=WHICH)
    def end(self, which: str) -> None:
        model = self.sessions.pop(which, None)
        alone = {entry.digest for entry in model.refs if not entry.gone} if model else set()
        for other in self.sessions.values():
            alone -= {entry.digest for entry in other.refs if not entry.gone}
        ended = self.session(which).end()
        assert ended <= len(alone), "expired artifacts may be gone already"
        if model and all(self.is_live(model, entry) for entry in model.refs):
            assert ended == len(alone)
        assert self.session(which).list() == [] or which in PARENTS
        if which in PARENTS:
            self.session(which)
            self.sessions[which] = ModelSession(self.clock.now)

    @rule(seconds=st.sampled_from([1.0, 30.0, 101.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(grace=st.sampled_from([None, 0.0]))
    def collect(self, grace: float | None) -> None:
        planned = self.store.collect(dry_run=True, grace=grace, cold_after=0)
        done = self.store.collect(grace=grace, cold_after=0)
        assert (planned.refs, planned.artifacts, planned.bytes) == (
            done.refs,
            done.artifacts,
            done.bytes,
        )
        at = self.clock.now - (GRACE if grace is None else grace)
        for model in self.sessions.values():
            for entry in model.refs:
                is_over = model.expires() <= at or (
                    entry.own_end is not None and entry.own_end <= at
                )
                entry.gone = entry.gone or (is_over and not entry.pinned)

    @rule()
    def verify(self) -> None:
        self.collect(None)  # removes copies that lost to another one
        assert self.store.verify().problems == []

    @precondition(lambda self: self.backend.lasts)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    @precondition(lambda self: self.backend.lasts)
    @rule()
    def crash(self) -> None:
        self.store._activity.flush()  # a crash may lose uses, which the model does not cover
        self.abandoned.append(self.store)
        self.store = self.opened()

    @precondition(lambda self: not self.backend.lasts)
    @rule()
    def move(self) -> None:
        """Export and import: the equivalent, in memory, of reopening a store."""
        target = io.BytesIO()
        self.store.export(target)
        self.store.close()
        self.store = self.opened()
        self.store.import_(io.BytesIO(target.getvalue()))
        for model in self.sessions.values():
            model.refs = [entry for entry in model.refs if not entry.gone]

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        for name, model in self.sessions.items():
            for entry in model.refs:
                if self.is_live(model, entry):
                    assert self.store.session(name).ref(entry.digest) is not None

    def teardown(self) -> None:
        try:
            self.collect(None)
            assert self.store.verify().problems == []
            for name in SESSIONS:
                self.list_all(name)
        finally:
            for store in (self.store, *self.abandoned):
                store.close()
            if self.backend.is_folder:
                shutil.rmtree(self.url)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


PHASES = [
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
    Phase.shrink,
]  # Phase.explain takes longer than it saves


def test_a_store_behaves_like_its_model(backend: Backend) -> None:
    if backend.is_fleet:
        chosen = settings(
            max_examples=60 if LONG_FAULTS else 6, stateful_step_count=40 if LONG_FAULTS else 20
        )
    else:
        chosen = settings(max_examples=400 if LONG_FAULTS else 12, stateful_step_count=40)
    run_state_machine_as_test(lambda: Machine(backend), settings=settings(chosen, phases=PHASES))  # type: ignore[arg-type]
