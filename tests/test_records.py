"""Claims and records of a session: fenced, numbered, exact, and removed with the session."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import warnings
from typing import Any

import pytest

import coatcheck
from coatcheck import Store, errors
from coatcheck.refs import RECORD_LIMIT
from tests.backends import PROCESSES, Backend, Clock, edit_catalog


def test_records_and_claims_survive_reopening(lasting: Backend, clock: Clock) -> None:
    session = lasting.open(clock=clock).session("s")
    token = session.claim("dispatcher")
    assert [session.record("hot", body, token=token) for body in (b"one", b"", bytes(200_000))] == [
        1,
        2,
        3,
    ]
    lasting.close()
    again = lasting.open().session("s")
    assert [(one.seq, one.at, one.token, one.body) for one in again.records("hot")] == [
        (number, clock.now, token, body)
        for number, body in enumerate((b"one", b"", bytes(200_000)), 1)
    ]
    claim = again.claimant()
    assert claim is not None
    assert (claim.token, claim.holder) == (token, "dispatcher")
    assert again.claim("another") > token


def test_the_hot_series_accepts_nothing_without_a_claim(store: Store) -> None:
    session = store.session("s")
    with pytest.raises(errors.Fenced):
        session.record("hot", b"by nobody")
    assert session.records("hot") == []
    assert session.record("metrics", b"by anybody") == 1


def test_records_that_are_written_together_are_checked_before_any_is_written(store: Store) -> None:
    session = store.session("s")
    assert session.record_all([]) == []
    assert session.record_all([("x", b"one", None), ("y", b"two", 1)]) == [1, 1]
    with pytest.raises(errors.Fenced):
        session.record_all([("x", b"three", None), ("hot", b"by nobody", None)])
    with pytest.raises(errors.TooLarge):
        session.record_all([("x", b"three", None), ("x", bytes(RECORD_LIMIT + 1), None)])
    assert [one.body for one in session.records("x")] == [b"one"]
    assert [one.body for one in session.records("y")] == [b"two"]


def test_an_active_holder_keeps_its_claim_while_another_waits(store: Store, clock: Clock) -> None:
    session = store.session("s")
    first = session.claim("a", idle=30)
    clock.advance(29)
    session.record("hot", b"state", token=first)
    clock.advance(29)
    with pytest.raises(errors.Fenced):
        session.claim("b", idle=30)
    session.record("hot", b"state", token=first)
    assert session.claim("a", idle=30) > first
    clock.advance(30)
    second = session.claim("b", idle=30)
    with pytest.raises(errors.Fenced):
        session.claim("c", idle=math.inf)
    session.claim("", instead_of=second)
    assert session.claimant() is None
    assert session.claim("c", idle=math.inf) > second
    assert session.claim("d") > second


def test_a_claim_and_a_record_keep_a_session_and_its_parent_alive(
    store: Store, clock: Clock
) -> None:
    parent = store.session("parent", ttl=100)
    parent.put("text", name="n")
    child = store.session("child", parent="parent", ttl=100)
    for _ in range(4):
        clock.advance(60)
        child.record("metrics", b"x")
        clock.advance(30)
        child.claim("a")
    assert child.get("n") == "text"
    store.collect(grace=0)
    assert len(child.records("metrics")) == 4


def test_records_can_be_read_until_an_expired_session_is_collected(
    store: Store, clock: Clock
) -> None:
    session = store.session("s", ttl=10)
    session.record("metrics", b"x")
    clock.advance(1_000)
    assert len(session.records("metrics")) == 1
    store.collect(dry_run=True, grace=0)
    assert len(session.records("metrics")) == 1
    store.collect(grace=0)
    assert session.records("metrics") == []


def test_records_are_erased_after_the_session_has_ended_and_a_collection(lasting: Backend) -> None:
    store = lasting.open()
    store.session("other").record("metrics", b"kept")
    session = store.session("s")
    secrets = [
        f"the secret of record {number}".encode() * (300 if number % 2 else 1)
        for number in range(40)
    ]
    for secret in secrets:
        session.record("metrics", secret)
    session.claim("a holder whose name is a secret")
    assert lasting.places_of(b"the secret of record")
    session.end()
    store.collect()
    assert lasting.places_of(b"the secret of record") == []
    assert lasting.places_of(b"a holder whose name is a secret") == []
    assert [one.body for one in store.session("other").records("metrics")] == [b"kept"]


def test_records_beyond_the_kept_ones_are_erased_after_a_collection(lasting: Backend) -> None:
    store = lasting.open()
    for number in range(30):
        store.session("s").record("metrics", b"record number %d." % number, keep=2)
    store.collect()
    assert lasting.places_of(b"record number 5.") == []
    assert lasting.places_of(b"record number 29.")


@pytest.mark.on_fleet
@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.claim(None), lambda s: s.claim("\ud800"), lambda s: s.claim("x" * 70_000),
        lambda s: s.claim("a", idle=-1), lambda s: s.claim("a", idle=math.nan), lambda s: s.claim("a", idle="soon"),
        lambda s: s.claim("a", instead_of=-1), lambda s: s.claim("a", instead_of=True),
        lambda s: s.record("", b"x"), lambda s: s.record("\ud800", b"x"), lambda s: s.record("x", "text"),
        lambda s: s.record("x", b"x", keep=0), lambda s: s.record("x", b"x", keep=1.5),
        lambda s: s.record("x", b"x", token=0), lambda s: s.record("x", b"x", token=1 << 63),
        lambda s: s.records("x", after=-1), lambda s: s.records("x", before=1 << 64), lambda s: s.records(7),
        lambda s: s.records("x", limit=-1), lambda s: s.records("x", limit="9"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(store: Store, ask: Any) -> None:
    session = store.session("s")
    with pytest.raises(errors.InvalidArgument):
        ask(session)
    assert list(store.sessions()) == []


def test_a_record_has_at_most_a_megabyte(store: Store) -> None:
    session = store.session("s")
    assert session.record("x", bytes(RECORD_LIMIT)) == 1
    with pytest.raises(errors.TooLarge):
        session.record("x", bytes(RECORD_LIMIT + 1))
    assert len(session.records("x")) == 1


def test_a_version_counts_only_what_the_session_sees(store: Store) -> None:
    parent = store.session("parent")
    refs = [parent.put(f"text {number}", name="n") for number in range(3)]
    child = store.session("child", parent="parent")
    own = child.put("own", name="n")
    assert [child.version(ref) for ref in refs] == [1, 2, 3]
    assert child.version(own) == 1
    assert child.version(child.put("without a name")) == 1
    with pytest.raises(errors.NotFound):
        store.session("stranger").version(refs[0])


# Damage


def test_a_damaged_record_is_an_error_and_repair_removes_it(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    for number in range(5):
        session.record("x", b"body %d" % number)
    rotten = (
        "set_byte(value, 20, 0)"
        if lasting.is_fleet
        else "CAST(substr(value, 1, 20) || 'X' AS BLOB)"
    )
    lasting.edit_catalog(f"UPDATE note SET value = {rotten} WHERE key LIKE 'record/%3'")
    with pytest.raises(errors.Damaged):
        session.records("x")
    assert [one.seq for one in session.records("x", after=3)] == [4, 5]
    assert [problem.kind for problem in store.verify().problems] == ["catalog"]
    assert [problem.repaired for problem in store.verify(repair=True).problems] == [True]
    assert store.verify().problems == []
    assert [one.seq for one in session.records("x")] == [1, 2, 4, 5]


def test_stray_records_and_an_outdated_claim_counter_are_repaired(folder: Backend) -> None:
    store = folder.open()
    store.session("s").claim("a")
    token = store.session("s").claim("a")
    edit_catalog(
        folder.path,
        "INSERT INTO note VALUES (99, 'record/x/1', x'00')",
        "UPDATE note SET value = CAST('0' AS BLOB) WHERE key = 'fence'",
    )
    assert len(store.verify(repair=True).problems) == 2
    assert store.verify().problems == []
    assert store.session("s").claim("b") > token


# Exports


def exported(store: Store) -> bytes:
    target = io.BytesIO()
    store.export(target)
    return target.getvalue()


def recorded(store: Store, series: str = "metrics") -> list[tuple[float, bytes]]:
    return [(one.at, one.body) for one in store.session("s").records(series)]


def test_an_export_contains_records_and_an_import_duplicates_none(
    store: Store, backend: Backend, clock: Clock
) -> None:
    session = store.session("s", ttl=None)
    token = session.claim("a")
    for number in range(130):
        clock.advance(number % 2)
        session.record("metrics", b"\x00\xff %d" % (number // 3))
    session.record("hot", b"state", token=token)
    data = exported(store)
    copy = backend.open_new(clock=clock)
    for _ in range(2):
        copy.import_(io.BytesIO(data))
        assert recorded(copy) == recorded(store)
        assert recorded(copy, "hot") == [(clock.now, b"state")]
        assert copy.session("s").claimant() is None
    assert exported(copy) == data
    before = recorded(store)
    with pytest.raises(errors.Fenced):
        store.import_(
            io.BytesIO(data.replace(base64.b64encode(b"state"), base64.b64encode(b"other"))),
            merge=True,
        )
    store.import_(io.BytesIO(data), merge=True)
    assert recorded(store) == before


def test_an_old_export_does_not_bring_back_records_that_a_series_has_dropped(
    store: Store, clock: Clock
) -> None:
    session = store.session("s", ttl=None)
    for number in range(5):
        clock.advance(1)
        session.record("metrics", b"%d" % number)
    old = exported(store)
    clock.advance(1)
    session.record("metrics", b"newest", keep=2)
    now = recorded(store)
    store.import_(io.BytesIO(old), merge=True)
    assert recorded(store) == now


def test_an_export_in_the_first_format_can_be_imported(store: Store, backend: Backend) -> None:
    source = io.BytesIO()
    other = backend.open_new()
    other.session("s").put("text", name="n")
    other.export(source)
    first, _, rest = source.getvalue().partition(b"\n")
    assert json.loads(first) == {"coatcheck": 2}
    assert store.import_(io.BytesIO(b'{"coatcheck": 1}\n' + rest)) == 1


@pytest.mark.on_fleet
@pytest.mark.parametrize(
    "record",
    [
        None, [], {}, {"series": "", "at": 1, "body": ""}, {"series": "x", "at": -1, "body": ""},
        {"series": "x", "at": "NaN", "body": ""}, {"series": "x", "at": 1, "body": "?"},
        {"series": "x", "at": 1, "body": 7}, {"series": ["x"], "at": 1, "body": ""},
        {"series": "x", "at": 1, "body": "A" * 4 * (RECORD_LIMIT // 3 + 1)},
    ],
)  # fmt: skip
def test_an_invalid_record_is_not_imported(store: Store, record: object) -> None:
    session = {
        "session_id": "s",
        "parent": None,
        "ttl": None,
        "quota": None,
        "created": 1,
        "used": 1,
    }
    lines = [{"coatcheck": 2}, {"session": session}, {"record": record}, {"end": 0}]
    with pytest.raises(errors.InvalidArgument, match="line 3"):
        store.import_(io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines)))
    assert store.session("s").records("x") == []


# Processes


def write_some(url: str, worker: int) -> list[int]:
    with coatcheck.open(url, durability="process") as store:
        session = store.session("s")
        return [session.record("metrics", b"%d/%d" % (worker, number)) for number in range(25)]


def test_many_processes_lose_no_record(lasting: Backend) -> None:
    with PROCESSES.Pool(3) as pool:
        numbers = pool.starmap(write_some, [(lasting.url, worker) for worker in range(3)])
    assert sorted(one for some in numbers for one in some) == list(range(1, 76))
    session = lasting.open().session("s")
    assert {one.body for one in session.records("metrics")} == {
        b"%d/%d" % (worker, number) for worker in range(3) for number in range(25)
    }


def test_a_forked_child_claims_and_writes_on_its_own(lasting: Backend) -> None:
    store = lasting.open()
    session = store.session("s")
    token = session.claim("parent")
    session.record("hot", b"parent's", token=token)
    with warnings.catch_warnings():
        # Forking while threads run is the case under test.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            session.record("hot", b"child's", token=session.claim("child"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(errors.Fenced):
        session.record("hot", b"too late", token=token)
    assert [one.body for one in session.records("hot")] == [b"parent's", b"child's"]
