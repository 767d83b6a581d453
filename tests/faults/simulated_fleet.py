"""The simulation of machines that share a fleet's store.

The client code is the real one, down to the requests to the object store and the transactions of
the database. The object store is simulated. A request to it may fail before or after it takes
effect, or take effect much later. The transactions run on a real PostgreSQL, one at a time, through
connections that may break before a transaction or after its commit. The leases of uploads are
simulated, and end when their connection breaks. A failover breaks the connections of all machines
at once, and refuses new ones for a while. Each request is an instant at which another machine may
continue, or this one may be killed.

    python -m tests.faults.simulated_fleet 1234
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, tzinfo
from types import SimpleNamespace
from typing import IO, Any, TypeVar
from unittest.mock import patch

import psycopg
import tenacity
from obstore.exceptions import AlreadyExistsError, GenericError

from coatcheck import Session, Store
from coatcheck.errors import StoreUnavailable
from coatcheck.storage import retry, s3
from coatcheck.storage.postgres import Connections, DatabaseLeases, Db
from coatcheck.storage.postgres_catalog import PostgresCatalog
from coatcheck.storage.postgres_passages import PostgresPassages
from coatcheck.storage.postgres_schema import migrate
from coatcheck.storage.s3 import S3Blobs
from tests import servers
from tests.faults.faulty import Crash
from tests.faults.simulation import INLINE, START, Plan, Process, World, main

COMMAND = "tests.faults.simulated_fleet"
SWEEP_AFTER = 900.0
_SCHEMA = "simulation"
_OUTAGE = 3  # connections that are refused after a failover
_WAITED = 60.0  # seconds that a statement may wait for a lock
_T = TypeVar("_T")


class FleetWorld(World):
    """Machines, an object store and a database."""

    def __init__(self, plan: Plan, database: Db, url: str) -> None:
        super().__init__(plan)
        self.database = database
        self.url = url
        self.objects = _Objects(self)
        self.leases: dict[int, _LeaseConnection] = {}
        self.connections: list[_LeaseConnection] = []
        self.refusals = 0
        self.elapsed = 0.0  # seconds, for timeouts and for the object store's times
        self._pauses = random.Random(f"pauses {plan.seed}")

    def open(self, process: Process | None) -> Store:
        connections = _Connections(self, process)
        migrate(connections)
        blobs = S3Blobs(
            self.objects,  # type: ignore[arg-type]  # what `S3Blobs` hands to obstore
            uri="s3://simulated/", leases=DatabaseLeases(connections), prefix="", sweep_after=SWEEP_AFTER,
            patience=connections.patience,
        )  # fmt: skip
        catalog, passages = PostgresCatalog(connections), PostgresPassages(connections)
        return Store(
            blobs,
            catalog,
            passages,
            url="s3://simulated",
            session_type=Session,
            clock=lambda: self.now,
        )

    def abandon(self, store: Store) -> None:
        pass  # connections break in `ended`

    def ended(self, process: Process) -> None:
        for connection in self.connections:
            if connection.process is process:
                connection.close()

    def excuses(self, error: BaseException) -> bool:
        return isinstance(error, StoreUnavailable) and error.may_retry

    @contextmanager
    def around(self) -> Iterator[None]:
        time = SimpleNamespace(monotonic=lambda: self.elapsed, sleep=self.sleep)
        with ExitStack() as stack:
            for owner, name, value in (
                (retry, "time", time),
                (tenacity, "time", time),
                (tenacity.nap, "time", time),
                (tenacity.wait, "random", self._pauses),
                (s3, "obstore", self.objects),
                (s3, "datetime", _clock(self)),
                (PostgresCatalog, "inline_limit", INLINE),
            ):
                stack.enter_context(patch.object(owner, name, value))
            yield

    def sleep(self, seconds: float) -> None:
        self.elapsed += seconds
        process = self.current()
        if process is not None and not process.is_dead:
            self.pause(process, wait=True)

    def inject(
        self, process: Process, what: str, do: Callable[[], _T], half: Callable[[], object] | None
    ) -> _T:
        """Inject a fault. For a request to the object store, `half` makes it take effect later."""
        where = f"'{what}' of process {process.number}"
        fault = self.choose.choice(
            ("kill", "kill", "lost request", "lost answer", "late request", "failover")
        )
        is_done = self.choose.random() < 0.5
        if fault == "late request" and half is None:
            fault = "lost answer"
        if (is_done and fault in ("kill", "failover")) or fault == "lost answer":
            do()
        if process.is_dead:
            raise Crash
        where = f"{'after' if is_done or fault == 'lost answer' else 'before'} {where}"
        if fault == "kill":
            self.kill(process, where)
            raise Crash
        if fault == "failover":
            self.refusals = _OUTAGE
            for connection in self.connections:
                connection.close()
        elif fault == "late request" and half is not None:
            half()
        self.injected[f"simulated {fault}s of a fleet"] += 1
        self.note(f"{fault}: {where}")
        if what.startswith("database"):
            raise psycopg.OperationalError("the connection is lost")
        raise GenericError("the connection is lost")

    def weight(self, what: str) -> int:
        # Most steps are transactions that only read.
        return 1 if what.startswith("database: a") else 10

    def step(
        self,
        what: str,
        do: Callable[[], _T],
        half: Callable[[], object] | None = None,
        fail: Callable[[], object] | None = None,
    ) -> _T:
        answer, process = super().step(what, do, half), self.current()
        if process is not None and what == "bucket: put" and self.choose.random() < 0.3:
            self.pause(process, slow=True)  # between the object and its row
        return answer

    def before_final_check(self) -> None:
        self.refusals = 0
        self.objects.finish()
        self.elapsed += 2 * SWEEP_AFTER


def _clock(world: FleetWorld) -> type[datetime]:
    class Clock(datetime):
        """The time of the object store. The clocks of machines jump, but this comparison uses only
        differences."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.fromtimestamp(START + world.elapsed, tz or UTC)

    return Clock


class _Connections(Connections):
    """The connections of one machine. All of them use one real connection, in turn."""

    def __init__(self, world: FleetWorld, process: Process | None) -> None:
        super().__init__(world.url, schema=_SCHEMA, tenant=f"seed {world.plan.seed}")
        self._world = world
        self._process = process

    @contextmanager
    def _connected(self, until: float, *, own: bool, slow: bool) -> Iterator[Db]:
        world = self._world
        if world.refusals and self._process is not None:
            world.refusals -= 1
            raise psycopg.OperationalError("the server is starting up")
        world.step("database: a transaction begins", lambda: None)
        yield world.database
        world.step("database: a transaction is over", lambda: None)

    def connect(self) -> Any:
        world = self._world
        if world.refusals and self._process is not None:
            world.refusals -= 1
            raise psycopg.OperationalError("the server is starting up")
        made = _LeaseConnection(world, self._process)
        world.connections.append(made)
        return made


class _LeaseConnection:
    """A connection that only takes advisory locks, which it keeps until it is closed."""

    def __init__(self, world: FleetWorld, process: Process | None) -> None:
        self.process = process
        self.closed = False
        self._world = world

    def execute(self, sql: str, values: tuple[int]) -> _LeaseConnection:
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        (key,) = values
        answer = self._world.step(f"database: {sql.split('(')[0]}", lambda: self._locked(sql, key))
        began = self._world.elapsed
        while answer is None:  # another machine has it
            self._world.sleep(0.01)
            if self._world.elapsed > began + _WAITED:
                raise psycopg.OperationalError("the statement waited too long")
            answer = self._locked(sql, key)  # raises if the connection was closed meanwhile
        self._answer = answer
        return self

    def _locked(self, sql: str, key: int) -> bool | None:
        leases = self._world.leases
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        if "unlock" in sql:
            return leases.pop(key, None) is self
        holder = leases.setdefault(key, self)
        return True if holder is self else (False if "try" in sql else None)

    def within(self, until: float) -> nullcontext[None]:
        return nullcontext()

    def fetchone(self) -> tuple[bool]:
        return (self._answer,)

    def close(self) -> None:
        self.closed = True
        for key in [key for key, holder in self._world.leases.items() if holder is self]:
            del self._world.leases[key]


class _Objects:
    """A bucket, and the functions of obstore on it."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self._held: dict[str, tuple[bytes, datetime]] = {}
        self._late: list[Callable[[], object]] = []

    def finish(self) -> None:
        """Finish the requests that are still under way."""
        late, self._late = self._late, []
        for do in late:
            with contextlib.suppress(AlreadyExistsError):
                do()

    def _request(self, what: str, do: Callable[[], _T], *, changes: bool = False) -> _T:
        if self._late and self._world.choose.random() < 0.2:
            self.finish()
        return self._world.step(
            f"bucket: {what}", do, (lambda: self._late.append(do)) if changes else None
        )

    def put(
        self,
        bucket: object,
        path: str,
        data: bytes | IO[bytes],
        *,
        mode: str = "overwrite",
        chunk_size: int = 0,
    ) -> None:
        content = data if isinstance(data, bytes) else data.read()

        def do() -> None:
            if mode == "create" and path in self._held:
                raise AlreadyExistsError(path)
            self._held[path] = content, datetime.fromtimestamp(START + self._world.elapsed, UTC)

        self._request("put", do, changes=True)

    def get(self, bucket: object, path: str) -> Any:
        data = self._request("get", lambda: self._found(path)[0])
        return SimpleNamespace(bytes=lambda: data)

    def get_range(self, bucket: object, path: str, *, start: int, length: int) -> bytes:
        return self._request("get a range", lambda: self._found(path)[0][start : start + length])

    def head(self, bucket: object, path: str) -> dict[str, Any]:
        data, changed = self._request("head", lambda: self._found(path))
        return {"size": len(data), "last_modified": changed, "e_tag": None}

    def delete(self, bucket: object, path: str) -> None:
        self._request("delete", lambda: self._held.pop(path, None), changes=True)

    def copy(self, bucket: object, source: str, target: str) -> None:
        def do() -> None:
            self._held[target] = self._found(source)

        self._request("copy", do, changes=True)

    def list(self, bucket: object, prefix: str) -> _Listing:
        paths = self._request(
            "list", lambda: sorted(path for path in self._held if path.startswith(prefix))
        )
        return _Listing({"path": path, "size": len(self._held[path][0])} for path in paths)

    def _found(self, path: str) -> tuple[bytes, datetime]:
        if path not in self._held:
            raise FileNotFoundError(path)
        return self._held[path]


class _Listing(list[dict[str, Any]]):
    """The listing of a bucket: in batches, or everything at once."""

    def __iter__(self) -> Iterator[Any]:
        return iter([self.collect()])

    def collect(self) -> list[dict[str, Any]]:
        return self[:]


@contextmanager
def prepared_database(url: str) -> Iterator[Db]:
    """The one connection for all transactions. Each seed is a tenant of its own."""
    connections = Connections(url, schema=_SCHEMA)
    try:
        migrate(connections)
    finally:
        connections.close()
    options = f"-c search_path={_SCHEMA} -c jit=off -c enable_seqscan=off"
    with Db.connect(url, autocommit=True, options=options) as database:
        yield database


def made_fleet(
    database: Db, url: str
) -> Callable[[Plan], contextlib.AbstractContextManager[World]]:
    def made(plan: Plan) -> contextlib.AbstractContextManager[World]:
        # A plan runs again while it is shrunk, and a tenant must be empty.
        tenant = Connections(url, schema=_SCHEMA, tenant=f"seed {plan.seed}").tenant
        for table in (
            "ref",
            "session",
            "blob",
            "note",
            "held",
            "indexed",
            "passage",
            "followed",
            "stored",
        ):
            database.execute(f"DELETE FROM {table} WHERE tenant = %s".encode(), (tenant,))
        return nullcontext(FleetWorld(plan, database, url))

    return made


if __name__ == "__main__":
    with servers.postgres(fsync=False) as _server, prepared_database(_server.url) as _database:
        _status = main(sys.argv[1:], made_fleet(_database, _server.url), COMMAND)
    sys.exit(_status)
