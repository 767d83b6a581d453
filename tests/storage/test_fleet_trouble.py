"""A fleet's store when the object store or the database misbehaves, and secrets in its url, which
must not leak."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import pytest

import coatcheck
import coatcheck.storage.postgres
from coatcheck import Session, Store, storage
from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.storage.fleet import Place, open_fleet, parse
from coatcheck.storage.postgres import Connections
from coatcheck.storage.postgres_rows import _is_committed
from coatcheck.testing.catalog_case import entry
from tests.backends import LARGE, Fleet
from tests.servers import SECRET, postgres, seaweedfs, wait_for_s3

CANARY = "hunter2-canary"


class Between:
    """A proxy in front of the object store that fails on demand: `busy` answers 503, `lost` lets a
    put succeed and drops its answer, `slow` waits before it answers, `gone` answers that the object
    does not exist."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.host = target.removeprefix("http://")
        self.faults: list[str] = []
        self.seen: Counter[str] = Counter()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), client.makefile("rb") as requests:
            while (head := _head(requests)) and self._answer(
                client, head, requests.read(_length(head))
            ):
                pass

    def _answer(self, client: socket.socket, head: bytes, body: bytes) -> bool:
        method = head.split(b" ")[0].decode()
        fault = self.faults.pop(0) if self.faults else ""
        self.seen[f"{method} {fault}".strip()] += 1
        if fault == "busy":
            client.sendall(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n")
            return True
        if fault == "gone":
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            client.sendall(
                b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            return True
        if fault == "slow":
            time.sleep(0.5)
        with socket.create_connection(self._target) as server, server.makefile("rb") as answered:
            server.sendall(head + body)
            answer = _head(answered)
            empty = method == "HEAD" or answer.split(b" ")[1] in (b"204", b"304")
            answer += b"" if empty else answered.read(_length(answer))
        if fault == "lost":
            return False
        client.sendall(answer)
        return True


def _head(stream: object) -> bytes:
    lines = []
    while (line := stream.readline()) not in (b"", b"\r\n"):  # type: ignore[attr-defined]
        lines.append(line)
    return b"".join(lines) + b"\r\n" if lines else b""


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@pytest.fixture
def between(fleet: Fleet) -> Iterator[Between]:
    made = Between(fleet.s3.url)
    yield made
    made.close()


@pytest.fixture
def troubled(fleet: Fleet, between: Between) -> Iterator[Store]:
    """A store that reaches its objects through the proxy."""
    with coatcheck.open(fleet.new_url().replace(fleet.s3.url, between.url)) as store:
        yield store


def test_a_put_whose_answer_was_lost_is_tried_again_and_stored_once(
    troubled: Store, between: Between
) -> None:
    between.faults = ["lost"]
    ref = troubled.session("s").put("x" * LARGE)
    assert troubled.session("s").get(ref.pointer) == "x" * LARGE
    assert between.seen["PUT lost"] == 1
    assert troubled.verify().problems == []


def test_a_busy_object_store_is_retried(troubled: Store, between: Between) -> None:
    between.faults = ["busy", "busy", "slow"]
    ref = troubled.session("s").put("x" * LARGE)
    between.faults = ["busy"]
    assert troubled.session("s").get(ref.pointer) == "x" * LARGE
    assert sum(between.seen[f"{method} busy"] for method in ("PUT", "GET")) == 3


@pytest.fixture
def patient_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give only the database a longer timeout: it always answers, but perhaps slowly."""
    real = storage.postgres.Connections
    monkeypatch.setattr(
        storage.postgres,
        "Connections",
        lambda *args, **named: real(*args, **named | {"patience": 30}),
    )


@pytest.mark.usefixtures("patient_database")
def test_an_object_that_is_forgotten_while_it_is_set_aside_is_not_an_error(
    fleet: Fleet, between: Between
) -> None:
    place = parse(fleet.new_url().replace(fleet.s3.url, between.url))
    blobs, catalog, passages = open_fleet(place, patience=0.5)
    with Store(blobs, catalog, passages, url="fleet", session_type=Session):
        with blobs.stage([b"x" * LARGE]) as staged:
            copy = staged.publish()
        between.faults = ["", "gone"]  # it exists at first, and then it does not
        assert not blobs.quarantine(copy, 1_000)
        assert between.seen["PUT gone"] == 1
        assert list(blobs.quarantined()) == []


def test_an_unreachable_object_store_is_a_retryable_error(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = fleet.new_url().replace(fleet.s3.url, f"http://127.0.0.1:{unused.getsockname()[1]}")
    blobs, catalog, passages = open_fleet(parse(url), patience=0.5)
    with Store(blobs, catalog, passages, url="fleet", session_type=Session) as store:
        with pytest.raises(StoreUnavailable) as caught:
            store.session("s").put("x" * LARGE)
        assert caught.value.may_retry
        assert store.stats().refs == 0, "a failed put left a ref"
        outcome = store.session("s").externalize("x" * LARGE)
        assert outcome.failure, "the failure is not reported"


@pytest.mark.usefixtures("patient_database")
def test_upkeep_without_the_object_store_removes_and_changes_nothing(fleet: Fleet) -> None:
    with seaweedfs() as s3:
        url = fleet.new_url().replace(fleet.s3.url, s3.url)
        blobs, catalog, passages = open_fleet(parse(url), patience=0.5)
        with Store(blobs, catalog, passages, url="fleet", session_type=Session) as store:
            session = store.session("s", ttl=None)
            held = {session.put(f"{i}" * LARGE): f"{i}" * LARGE for i in range(5)}
            small, doomed = session.put("small"), session.put("doomed" * LARGE)
            blobs._cache.clear()
            s3.kill()
            with pytest.raises(StoreUnavailable):
                session.forget(doomed)
            for repair in (False, True):
                problems = store.verify(repair=repair).problems
                assert {(one.kind, one.repaired) for one in problems} == {("unreadable", False)}
            assert {one.kind for one in store.collect(grace=0, cold_after=0).problems} == {
                "unreadable"
            }
            assert session.get(small) == "small"
            assert store.stats().tombstones == 0
        s3.start()
        wait_for_s3(s3)
        with coatcheck.open(url) as store:  # with a longer timeout: the server is just starting
            session = store.session("s")
            store.collect(grace=0)
            assert {ref: session.get(ref) for ref in held} == held
            assert store.verify(repair=True).problems == []


def test_an_unreachable_database_is_a_retryable_error(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(StoreUnavailable) as caught:
        open_fleet(
            parse(f"s3://coatcheck?catalog=postgresql://who:{CANARY}@127.0.0.1:{port}/x"),
            patience=0.5,
        )
    assert caught.value.may_retry
    assert CANARY not in str(caught.value)


def test_a_call_to_a_database_that_hangs_times_out(fleet: Fleet) -> None:
    with postgres() as database:
        url = fleet.new_url().replace(fleet.database.url, database.url)
        coatcheck.open(
            url
        ).close()  # creates the schema, which may take longer than the patience below
        blobs, catalog, passages = open_fleet(parse(url), patience=3)
        with Store(blobs, catalog, passages, url="fleet", session_type=Session) as store:
            store.session("s").put("x", name="small")
            store.session("s").put("x" * LARGE, name="large")
            database.signal(signal.SIGSTOP)
            try:
                for content in ("y", "y" * LARGE):
                    with pytest.raises(StoreUnavailable) as caught:
                        store.session("s").put(content)
                    assert caught.value.may_retry
            finally:
                database.signal(signal.SIGCONT)
            assert store.session("s").get("small") == "x"
            assert store.session("s").get("large") == "x" * LARGE


def test_a_statement_ends_at_its_deadline_and_the_next_one_gets_its_own_answer(
    fleet: Fleet,
) -> None:
    connections = Connections(fleet.database.url, schema="public", patience=0.5)
    with pytest.raises(StoreUnavailable) as caught:
        connections.ask("SELECT 'late' FROM pg_sleep(3)")
    assert caught.value.may_retry
    assert connections.ask("SELECT 'in time'") == [("in time",)]
    connections.close()


def test_a_lease_whose_answer_was_lost_is_taken_again_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, catalog, passages = open_fleet(parse(fleet.new_url()), patience=5)
    lost: list[psycopg.Connection[Any]] = []
    execute: Any = psycopg.Connection.execute

    def losing(db: psycopg.Connection[Any], query: str, *args: Any, **more: Any) -> Any:
        answer = execute(db, query, *args, **more)
        if "pg_advisory_lock" in query and not lost:
            lost.append(db)  # it stays referenced, so only closing it ends its lease
            raise psycopg.OperationalError("the answer was lost")
        return answer

    with Store(blobs, catalog, passages, url="fleet", session_type=Session) as store:
        monkeypatch.setattr(psycopg.Connection, "execute", losing)
        session = store.session("s")
        assert session.get(session.put("x" * LARGE)) == "x" * LARGE
        assert [db.closed for db in lost] == [True]


def _losing(
    connected: Callable[..., AbstractContextManager[Any]], meanwhile: list[Callable[[], object]]
) -> Callable[..., AbstractContextManager[Any]]:
    """Connections whose next transactions are committed without an answer; each then makes a call
    from `meanwhile`."""

    @contextmanager
    def losing(*args: Any, **more: Any) -> Iterator[Any]:
        with connected(*args, **more) as db:
            yield db
        if meanwhile:
            meanwhile.pop()()
            raise psycopg.OperationalError("the answer was lost")

    return losing


def test_a_change_whose_answer_was_lost_is_not_made_twice(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, one = parse(fleet.new_url()), entry("a value")
    _, catalog, _ = open_fleet(url, patience=5)
    _, other, _ = open_fleet(url, patience=5)
    meanwhile: list[Callable[[], object]] = []
    monkeypatch.setattr(
        catalog._connections, "_connected", _losing(catalog._connections._connected, meanwhile)
    )
    session_id, digest = one.session.session_id, one.ref.artifact_id

    meanwhile.append(lambda: other.remove(session_id, digest))
    assert catalog.put(one)
    assert not meanwhile
    assert catalog.totals().refs == 0  # the put came before the forget

    catalog.put(one)
    meanwhile.append(lambda: other.put(one))
    assert catalog.remove(session_id, digest).refs == 1
    assert not meanwhile
    assert catalog.totals().refs == 1  # the forget came before the put

    number = str(catalog._ask("SELECT pg_current_xact_id()::text AS number")[0]["number"])
    # As on a server that was promoted without the last commits.
    ahead = str(int(number) + 1_000_000)
    with catalog._connections._connected(time.monotonic() + 5, own=False, slow=False) as db:
        assert [_is_committed(db, one) for one in (number, ahead)] == [True, False]
    other.close()
    catalog.close()


def test_a_connection_to_a_server_that_is_no_longer_primary_is_not_kept(fleet: Fleet) -> None:
    _, catalog, _ = open_fleet(parse(fleet.new_url()), patience=10)
    catalog.put(entry("before"))
    # Like a demoted server.
    catalog._ask("SELECT set_config('default_transaction_read_only', 'on', false)")
    catalog.put(entry("after"))
    assert catalog.totals().refs == 2
    catalog.close()


def test_missing_rights_are_an_error_that_is_not_retryable(fleet: Fleet) -> None:
    with coatcheck.open(fleet.new_url().replace(SECRET, CANARY)) as store:
        with pytest.raises(StoreUnavailable) as caught:
            store.session("s").put("x" * LARGE)
        assert not caught.value.may_retry
        assert CANARY not in str(caught.value)


def test_no_output_of_a_store_contains_a_secret(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    url = fleet.new_url().replace("postgres@", f"postgres:{CANARY}@")
    with coatcheck.open(url) as store:
        session = store.session("s")
        small, large = session.put("small"), session.put("x" * LARGE)
        outputs = [repr(store), store.url, repr(session), repr(small), repr(large), repr(parse(url)),
                str(small.to_record()), session.externalize("y " * LARGE).text]  # fmt: skip
    assert not [text for text in outputs if CANARY in text or SECRET in text]


@pytest.mark.parametrize(
    "url",
    [
        f"s3://?catalog=postgresql://u:{CANARY}@h/d",
        f"s3://bucket?secret_access_key={CANARY}",
        f"s3://bucket?secret_access_key={CANARY}&catalog=mysql://u:{CANARY}@h/d",
        f"s3://bucket?{CANARY}&catalog=postgresql://u:{CANARY}@h/d&unknown=1".replace(
            "?", "?colour=red&"
        ),
        f"s3://bucket/../x?secret_access_key={CANARY}&catalog=postgresql://h/d",
        f"s3://bucket?schema=a;b&secret_access_key={CANARY}&catalog=postgresql://h/d",
        f"s3://bucket?connections=0&secret_access_key={CANARY}&catalog=postgresql://h/d",
        f"s3://{CANARY}@bucket?catalog=postgresql://h/d",
    ],
)
def test_an_invalid_url_is_rejected_without_repeating_its_secrets(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        coatcheck.open(url)
    assert CANARY not in str(caught.value)


def test_endpoint_and_credentials_come_from_the_standard_environment(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fleet.new_url()
    place: Place = parse(url)
    for name, value in (
        ("AWS_ENDPOINT_URL", place.options["endpoint"]), ("AWS_REGION", place.options["region"]),
        ("AWS_ACCESS_KEY_ID", place.options["access_key_id"]),
        ("AWS_SECRET_ACCESS_KEY", place.options["secret_access_key"]),
        ("PGHOST", "127.0.0.1"), ("PGUSER", "postgres"), ("PGDATABASE", "postgres"),
        ("PGPORT", fleet.database.url.rpartition(":")[2].partition("/")[0]),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    with coatcheck.open(
        f"s3://coatcheck/{place.prefix}?schema={place.schema}&catalog=postgresql://"
    ) as store:
        ref = store.session("s").put("x" * LARGE)
        assert store.session("s").get(ref.pointer) == "x" * LARGE


def test_opening_with_create_false_does_not_create_a_store(fleet: Fleet) -> None:
    url = fleet.new_url()
    with pytest.raises(StoreUnavailable):
        coatcheck.open(url, create=False)
    with psycopg.connect(fleet.database.url) as db:
        assert (
            db.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname = %s", (parse(url).schema,)
            ).fetchone()
            is None
        )


def test_a_forked_child_reads_the_catalog_and_gets_an_error_for_objects(fleet: Fleet) -> None:
    with coatcheck.open(fleet.new_url()) as store:
        store.session("s").put("x" * LARGE, name="large")
        store.session("s").put("small", name="small")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if store.session("s").get("small") == "small":
                    store.session("s").get("large")
            except StoreUnavailable as error:
                code = 0 if "spawn" in error.hint else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.session("s").get("large") == "x" * LARGE
