"""A crash at every single step of every change: after reopening, the store is as before the change
or as after it.

Each case first runs once to count its steps, then once for each instant before, during and after a
step. Then the same is done with a power cut, which drops, zeroes or tears unsynced data.
"""

from __future__ import annotations

import errno
import io
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import StoreError, StoreFull
from coatcheck.storage import sqlite_schema
from tests.counting import Counts
from tests.faults.conftest import folder_in_memory
from tests.faults.faulty import Crash, Cut, open_on
from tests.faults.machine import At, FaultyDisk
from tests.faults.world import State, assert_clean, files_under, problems, state_of

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("on_machines")]

SMALL = b"a small artifact " * 20
LARGE = random.Random(1).randbytes(140_000)
TEXT = b"a line that compresses well\n" * 10_000
NOW = 1_700_000_000.0
DAY = 86_400.0
CUTS: tuple[Cut, ...] = ("dropped", "zeroed", "torn")
CRASHES: tuple[Cut | None, ...] = (None, *CUTS)  # killed, or one of the power cuts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """A change to a store: its initial state, and the change itself."""

    name: str
    act: Callable[[Store], object]
    prepare: Callable[[Store], object] | None = None
    later: float = 0.0
    is_whole: bool = True  # one atomic change: no intermediate state may ever be visible


Prepared = Callable[[Case], tuple[Path, State]]


def _put_some(store: Store) -> None:
    kept = store.session("kept", ttl=None)
    kept.put(SMALL, name="small")
    kept.put(LARGE, name="large")
    kept.put(TEXT, name="text")


def _put_to_forget(store: Store) -> None:
    _put_some(store)
    gone = store.session("gone", ttl=None)
    gone.put(b"only here", name="small")
    gone.put(LARGE[::-1], name="large")
    gone.put(LARGE, name="shared")
    gone.record("hot", b"a state", token=gone.claim("dispatcher"))


def _put_many_to_forget(store: Store) -> None:
    _put_some(store)
    gone = store.session("gone", ttl=None)
    for number in range(2_003):
        gone.put(b"%d" % number)
    gone.put(LARGE[::-1], name="large")


def _put_to_expire(store: Store) -> None:
    _put_some(store)
    brief = store.session("brief", ttl=10)
    brief.put(b"not for long", name="small")
    brief.put(LARGE[::-1], name="large")
    brief.record("hot", b"a state", token=brief.claim("dispatcher"))


def _claim_and_record(store: Store) -> None:
    kept = store.session("kept")
    kept.record("hot", LARGE[:10_000], token=kept.claim("dispatcher"))


def _damage_large(store: Store) -> None:
    _put_some(store)
    uri = store.session("kept").list(name="large")[0].content_uri
    path = Path(uri.removeprefix("file://"))
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def _leave_orphans(store: Store) -> None:
    _put_some(store)
    root = Path(store.url)
    (root / "tmp" / ("0" * 16 + ".raw")).write_bytes(b"half a put")
    for number, path in enumerate(list(files_under(root / "blobs"))):
        path.with_name(f"{path.name[:64]}-{number:016x}.raw").write_bytes(path.read_bytes())


@cache
def _exported() -> bytes:
    target = io.BytesIO()
    with coatcheck.open("memory:") as store:
        _put_to_forget(store)
        store.export(target)
    return target.getvalue()


CASES = [
    Case("opening a new store", lambda store: None),
    Case(
        "putting a small artifact",
        lambda store: store.session("s").put(b"new", name="n"),
        _put_some,
    ),
    Case(
        "putting a large artifact",
        lambda store: store.session("s").put(LARGE[1:], name="n"),
        _put_some,
    ),
    Case(
        "putting a stream",
        lambda store: store.session("s").put(io.BytesIO(LARGE * 4), name="n"),
        _put_some,
    ),
    Case(
        "putting a small duplicate",
        lambda store: store.session("s").put(SMALL, name="n"),
        _put_some,
    ),
    Case(
        "putting a large duplicate",
        lambda store: store.session("s").put(LARGE, name="n"),
        _put_some,
    ),
    Case("healing", lambda store: store.session("kept").put(LARGE, name="large"), _damage_large),
    Case(
        "forgetting a small artifact",
        lambda store: store.session("gone").forget("small"),
        _put_to_forget,
    ),
    Case(
        "forgetting a large artifact",
        lambda store: store.session("gone").forget("large"),
        _put_to_forget,
    ),
    Case("ending a session", lambda store: store.session("gone").end(), _put_to_forget),
    Case("ending a long session", lambda store: store.session("gone").end(), _put_many_to_forget),
    Case("pinning", lambda store: store.session("kept").pin("large"), _put_some),
    Case("recording under a claim", _claim_and_record, _put_some),
    Case(
        "collecting what has expired",
        lambda store: store.collect(grace=0),
        _put_to_expire,
        later=1_000,
    ),
    Case("sweeping orphans", lambda store: store.collect(grace=0), _leave_orphans),
    Case("compressing what is cold", lambda store: store.collect(), _put_some, later=3 * DAY),
    Case("importing", lambda store: store.import_(io.BytesIO(_exported())), is_whole=False),
]


@dataclass
class Run:
    """One run of a case on a faulty disk."""

    case: Case
    folder: Path
    disk: FaultyDisk
    is_done: bool = False

    def go(self) -> State | None:
        """Run the case and close the store; return the state after it, or None if it crashed."""
        store: Store | None = None
        try:
            store = open_on(self.folder, self.disk, clock=lambda: NOW + self.case.later)
            self.case.act(store)
            self.is_done = True
            after = state_of(store)
            store.close()
            # SQLite reports no error if it fails to close.
            return None if self.disk.crashed else after
        except (Crash, StoreError):
            assert self.disk.crashed
            self.disk.revive()
            if store is not None:
                store.close()
            return None


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    """The folder of a case before its change, and its state. Each is made once and copied by the
    tests."""
    with folder_in_memory() as base:
        yield cache(lambda case: (base / case.name, _prepare(case, base / case.name)))


def _prepare(case: Case, folder: Path) -> State:
    if case.prepare is None:
        return frozenset()
    with coatcheck.open(folder, durability="process", clock=lambda: NOW) as store:
        case.prepare(store)
        if case.name == "healing":
            return frozenset()
        if not case.later:
            return state_of(store)
    with coatcheck.open(folder, durability="process", clock=lambda: NOW + case.later) as store:
        return state_of(store)


def _copied(folder: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    if folder.exists():
        shutil.copytree(folder, target)
    return target


def _steps(disk: FaultyDisk, long_faults: bool) -> Iterator[tuple[int, int, str]]:
    """Yield steps with their number and a running count. An import repeats the same steps for each
    of its artifacts: the short form takes about twenty of its one hundred."""
    stride = 1 if long_faults else 1 + len(disk.steps) // 20
    for count, step in enumerate(range(0, len(disk.steps), stride)):
        yield count, step, disk.steps[step]


def _instants(disk: FaultyDisk, cut: Cut | None, long_faults: bool) -> Iterator[tuple[At, int]]:
    """Yield the instants to crash at, each with a seed. The short form takes each step once:
    killed, or with one of the three power cuts, in turn."""
    for count, step, what in _steps(disk, long_faults):
        is_turn = long_faults or CRASHES[count % len(CRASHES)] == cut
        if is_turn:
            yield At(step, "after"), step
        if is_turn and "write" in what and cut is None:
            yield At(step, "halfway"), step
        if long_faults:
            yield At(step, "before"), step
            for seed in range(6 if cut == "torn" else 0):
                yield At(step, "before"), seed
                yield At(step, "after"), seed


def _check(case: Case, run: Run, image: Path, before: State, after: State) -> None:
    """Open the image of the crash: it must be sound, in the state before or after. Then run the
    case to the end."""
    with _reopened(case, image) as store:
        if case.name == "healing":
            healed = not problems(store)
            assert healed or not run.is_done
            case.act(store)
        assert problems(store) == []
        found = state_of(store)
        if run.is_done:
            assert found == after
        elif case.is_whole:
            assert found in (before, after)
        else:
            assert before <= found <= after
        case.act(store)
        assert state_of(store) == after
        assert_clean(store)


def _reopened(case: Case, folder: Path) -> Store:
    return open_on(folder, FaultyDisk(folder), clock=lambda: NOW + case.later)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
@pytest.mark.parametrize("cut", CRASHES)
def test_a_crash_at_any_step_leaves_the_state_before_or_after_the_change(
    case: Case,
    cut: Cut | None,
    prepared: Prepared,
    in_memory: Path,
    long_faults: bool,
    counts: Counts,
) -> None:
    start, before = prepared(case)
    counted = FaultyDisk(_copied(start, in_memory / "counted"))
    after = Run(case, in_memory / "counted", counted).go()
    assert after is not None
    assert counted.steps
    for at, seed in _instants(counted, cut, long_faults):
        folder, image = _copied(start, in_memory / "store"), in_memory / "image"
        run = Run(case, folder, FaultyDisk(folder, crash=at, image=image, cut=cut, seed=seed))
        assert run.go() is None, f"{at} was never reached"
        counts("crashes at a step" if cut is None else "power cuts at a step")
        try:
            _check(case, run, image, before, after)
        except BaseException as error:
            error.add_note(
                f"{case.name}: {cut or 'killed'} {at} ({counted.steps[at.step]}), seed {seed}"
            )
            raise
        shutil.rmtree(image, ignore_errors=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_an_error_at_any_step_is_typed_and_leaves_the_state_before_or_after_the_change(
    case: Case, number: int, prepared: Prepared, in_memory: Path, long_faults: bool, counts: Counts
) -> None:
    start, before = prepared(case)
    counted = FaultyDisk(_copied(start, in_memory / "counted"))
    after = Run(case, in_memory / "counted", counted).go()
    assert after is not None
    for count, step, what in _steps(counted, long_faults):
        if not long_faults and count % 4 != (2 if number == errno.EIO else 0):
            continue  # the short form takes every second step, full and broken in turn
        folder, image = _copied(start, in_memory / "store"), in_memory / "image"
        disk = FaultyDisk(folder, errors={step: number}, image=image, cut="dropped")
        run = Run(case, folder, disk)
        counts("errors of the disk at a step (full, or broken)")
        try:
            found = _go_through_error(run, number)
            if not run.is_done and case.is_whole:
                assert found in (before, after)
            # A change acknowledged after the error survives a power cut, even after a failed sync.
            # (A removal that failed to sync and then finds nothing to remove has acknowledged
            # nothing.)
            is_done = run.is_done or not case.name.startswith(("forgetting", "ending"))
            _check(case, Run(case, image, disk, is_done), image, before, after)
        except BaseException as error:
            error.add_note(f"{case.name}: {errno.errorcode[number]} at step {step} ({what})")
            raise
        shutil.rmtree(image, ignore_errors=True)


def _go_through_error(run: Run, number: int) -> State:
    """Run a case into an error, then again without; return the state in between. The power fails at
    the end."""
    case, expected = run.case, StoreFull if number == errno.ENOSPC else StoreError

    def twice(call: Callable[[], Result]) -> Result:
        try:
            return call()
        except expected:
            return call()

    store = twice(lambda: _opened(run))
    try:
        try:
            case.act(store)
            run.is_done = True
        except expected:
            pass
        found: State = frozenset()
        if case.name != "healing":
            found = twice(lambda: state_of(store))
            assert twice(lambda: problems(store)) == []
        twice(lambda: case.act(store))
        run.disk.stop()
        run.disk.revive()
        return found
    finally:
        store.close()


def _opened(run: Run) -> Store:
    return open_on(run.folder, run.disk, clock=lambda: NOW + run.case.later)


MIGRATION = (
    "CREATE TABLE added (one INTEGER)",
    "INSERT INTO added VALUES (1)",
    "UPDATE ref SET tool = 'migrated'",
)


@pytest.mark.parametrize("cut", CRASHES)
def test_a_crash_at_any_step_of_a_migration_leaves_the_old_version_or_the_new(
    cut: Cut | None,
    in_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    long_faults: bool,
    counts: Counts,
) -> None:
    case = Case("migrating", lambda store: None, _put_some)
    start = in_memory / "start"
    before = _prepare(case, start)
    old = sqlite_schema.STEPS
    monkeypatch.setattr(sqlite_schema, "STEPS", [*old, MIGRATION])
    counted = FaultyDisk(_copied(start, in_memory / "counted"))
    assert Run(case, in_memory / "counted", counted).go() == before
    versions = set()
    for at, seed in _instants(counted, cut, long_faults):
        folder, image = _copied(start, in_memory / "store"), in_memory / "image"
        run = Run(case, folder, FaultyDisk(folder, crash=at, image=image, cut=cut, seed=seed))
        assert run.go() is None
        counts("crashes at a step" if cut is None else "power cuts at a step")
        version, added, tools = _look(image)
        versions.add(version)
        assert (version, added, tools) in (
            (len(old), False, {None}),
            (len(old) + 1, True, {"migrated"}),
        ), at
        with _reopened(case, image) as store:
            assert state_of(store) == before
            assert_clean(store)
        assert _look(image) == (len(old) + 1, True, {"migrated"})
        shutil.rmtree(image)
    if long_faults or cut is None:
        assert versions == {len(old), len(old) + 1}


def _look(folder: Path) -> tuple[int, bool, set[str | None]]:
    """Return the version, whether the new table exists, and the tools of the refs, as read by plain
    SQLite."""
    db = sqlite3.connect(folder / "catalog.sqlite")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        added = db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'added'").fetchone()[0]
        return version, bool(added), {tool for (tool,) in db.execute("SELECT tool FROM ref")}
    finally:
        db.close()
