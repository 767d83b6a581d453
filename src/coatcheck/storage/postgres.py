"""A fleet's PostgreSQL: one pool of connections per process, and the leases of uploads.

Every statement names its tenant, and so does every connection (`coatcheck.tenant`). If the role is
subject to row-level security, the database separates tenants even if one of our statements is
wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection, errors
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolTimeout

from coatcheck.errors import StoreClosed, StoreFull, StoreUnavailable
from coatcheck.ids import digest_of
from coatcheck.storage.retry import keep_trying

PATIENCE: Final = 30.0  # seconds that a call retries before it reports the database as unavailable
_HINT: Final = "check the catalog's url, role and schema"
_ERRORS: Final = (psycopg.Error, PoolTimeout)
_FULL: Final = (errors.DiskFull, errors.OutOfMemory)
_AGAIN: Final = (
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.TooManyConnections,
    errors.ReadOnlySqlTransaction,  # a standby that is about to be promoted
    errors.IdleInTransactionSessionTimeout,
    errors.QueryCanceled,
)
_CONNECTION: Final = ("08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03")
_T = TypeVar("_T")
_inherited: list[object] = []

logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


class Db(Connection[tuple[Any, ...]]):
    """A connection on which nothing waits for ever: a server that hangs, or whose machine
    disappeared, neither answers nor closes the connection."""

    _until: float | None = None

    @contextmanager
    def within(self, until: float) -> Iterator[None]:
        """Let calls inside the context fail at this time (`time.monotonic`)."""
        self._until = until
        try:
            yield
        finally:
            self._until = None

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if self._until is None:
            return super().wait(gen, interval, timeout)
        left = max(0.0, self._until - time.monotonic())
        try:
            return super().wait(gen, interval, left if timeout is None else min(left, timeout))
        except psycopg.OperationalError:
            if time.monotonic() >= self._until:
                self.close()  # the late answer would be taken for that to the next statement
            raise


class Connections:
    """A pool that opens on first use, and again in a child process."""

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str,
        tenant: str = "",
        size: int = 16,
        patience: float = PATIENCE,
    ) -> None:
        self._conninfo = conninfo
        self.schema = schema
        # A name may contain any character.
        self.tenant = digest_of(tenant.encode()) if tenant else ""
        self._size = size
        self.patience = patience
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Db] | None = None
        self._owner = 0
        self._closed = False

    @property
    def address(self) -> str:
        """Address of the database, without user and password."""
        about = conninfo_to_dict(self._conninfo)
        host = about.get("host") or about.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
        port = about.get("port") or os.environ.get("PGPORT")
        name = about.get("dbname") or os.environ.get("PGDATABASE") or ""
        return (
            f"postgresql://{'' if str(host).startswith('/') else host}"
            f"{f':{port}' if port else ''}/{name}"
        )

    def run(
        self, change: Callable[[Db], _T], doing: str, *, slow: bool = False, whole: bool = False
    ) -> _T:
        """Run `change` in one transaction and retry it if that may help. `change` may run more than
        once: it must be correct even if the first run was committed and only its answer was lost. A
        `slow` change has no time limit; otherwise a database that does not answer in time is given
        up. Use `whole` to read whole tables; it is slow."""

        def all_of_it(db: Db) -> _T:
            with db.transaction():
                if whole:
                    db.execute("SET LOCAL enable_seqscan = on")
                return change(db)

        return self.once(all_of_it, doing, slow=slow or whole)

    def ask(
        self,
        sql: str,
        values: tuple[Any, ...] | dict[str, Any] = (),
        *,
        doing: str = "reading the catalog",
    ) -> list[Any]:
        """Return the rows of one statement, run as its own transaction."""
        return self.once(lambda db: db.execute(sql, values, binary=True).fetchall(), doing)

    def connect(self) -> Db:
        """Open a connection outside the pool, for callers that keep it."""
        settings: dict[str, Any] = self._options()
        return Db.connect(self._conninfo, autocommit=True, connect_timeout=10, **settings)

    @contextmanager
    def _connected(self, until: float, *, own: bool, slow: bool) -> Iterator[Db]:
        if own:
            with contextlib.closing(self.connect()) as db:
                yield db
            return
        with self._opened().connection(max(0.1, until - time.monotonic())) as db:
            try:
                if slow:
                    yield db
                else:
                    with db.within(until):
                        yield db
            except errors.ReadOnlySqlTransaction:
                # the server is no longer the primary: the next connection finds the new one
                db.close()
                raise

    def once(
        self, change: Callable[[Db], _T], doing: str, *, own: bool = False, slow: bool = False
    ) -> _T:
        """Like `run`, for a change that is a single statement and therefore its own transaction.
        With `own`, it gets a connection of its own, which is closed afterwards and so frees its
        locks; it may take long."""

        def attempt(until: float) -> _T:
            try:
                with self._connected(until, own=own, slow=slow) as db:
                    return change(db)
            except _FULL as error:
                raise StoreFull(f"the database has no space left while {doing}") from error
            except _ERRORS:
                if self._closed:
                    raise StoreClosed("the store is closed") from None
                raise

        return keep_trying(
            attempt,
            doing,
            patience=self.patience,
            errors=_ERRORS,
            may_pass=is_passing,
            whose="database",
            hint=_HINT,
        )

    def _opened(self) -> ConnectionPool[Db]:
        if self._closed:
            raise StoreClosed("the store is closed")
        pool = self._pool
        if pool is None or self._owner != os.getpid():
            with self._lock:
                if self._pool is None or self._owner != os.getpid():
                    if self._pool is not None:
                        # The parent's pool: its sockets are not ours to close.
                        _inherited.append(self._pool)
                    self._pool = ConnectionPool(
                        self._conninfo,
                        connection_class=Db,
                        kwargs={"autocommit": True, "connect_timeout": 10, **self._options()},
                        min_size=0 if self.tenant else 1,
                        max_size=self._size,
                        max_idle=120,
                        reconnect_timeout=self.patience,
                        check=None,
                        open=True,
                    )
                    self._owner = os.getpid()
                pool = self._pool
        return pool

    def _options(self) -> dict[str, str]:
        # Every query on behalf of a caller has an index. If one session has most of the refs, the
        # planner assumes that every session has as many, and prefers sequential scans and JIT
        # compilation.
        settings = (
            f"-c search_path={self.schema} -c coatcheck.tenant={self.tenant} -c jit=off "
            "-c enable_seqscan=off"
        )
        named = conninfo_to_dict(self._conninfo)
        # A dead machine sends nothing: only a network timeout detects it.
        network = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3",
                   "tcp_user_timeout": str(int(self.patience * 1000))}  # fmt: skip
        ours = {name: value for name, value in network.items() if name not in named}
        return {"options": settings, "application_name": "coatcheck", **ours}

    def close(self) -> None:
        self._closed = True
        if self._pool is not None and self._owner == os.getpid():
            self._pool.close(timeout=5)


class DatabaseLeases:
    """Leases as advisory locks. One connection has all leases of this process, and they end with
    it. A second one tries to take the leases of others, because advisory locks never conflict
    within one connection."""

    def __init__(self, connections: Connections) -> None:
        self._holding = _Kept(connections)
        self._trying = _Kept(connections)

    @contextmanager
    def hold(self, place: str) -> Iterator[None]:
        self._holding.run("SELECT pg_advisory_lock(%s)", place, "taking a lease")
        try:
            yield
        finally:
            with contextlib.suppress(StoreUnavailable):
                # A broken connection has already released it.
                self._holding.run("SELECT pg_advisory_unlock(%s)", place, "ending a lease")

    @contextmanager
    def take(self, place: str) -> Iterator[bool]:
        free = self._trying.run("SELECT pg_try_advisory_lock(%s)", place, "asking for a lease")
        try:
            yield free
        finally:
            if free:
                with contextlib.suppress(StoreUnavailable):
                    self._trying.run("SELECT pg_advisory_unlock(%s)", place, "ending a lease")

    def close(self) -> None:
        self._holding.close()
        self._trying.close()


class _Kept:
    """One permanent connection, used by one thread at a time."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._db: Db | None = None
        self._owner = 0

    def run(self, sql: str, place: str, doing: str) -> bool:
        key = int.from_bytes(bytes.fromhex(place[:16]), "big", signed=True)

        def attempt(until: float) -> bool:
            try:
                db = self._opened()
                with db.within(until):
                    found = db.execute(sql, (key,)).fetchone()
                return found is not None and bool(found[0])
            except psycopg.Error:
                self._drop()  # at once: the server may have granted a lease whose answer was lost
                raise

        with self._lock:
            return keep_trying(
                attempt, doing, patience=self._connections.patience, errors=_ERRORS,
                may_pass=is_passing, whose="database", hint=_HINT,
            )  # fmt: skip

    def _opened(self) -> Db:
        mine = self._owner == os.getpid()
        if self._db is None or not mine or self._db.closed:
            if self._db is not None and not mine:
                _inherited.append(self._db)
            self._db = self._connections.connect()
            self._owner = os.getpid()
        return self._db

    def _drop(self) -> None:
        if self._db is not None and self._owner == os.getpid():
            self._db.close()
        self._db = None

    def close(self) -> None:
        with self._lock:
            self._drop()


def is_passing(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    if isinstance(error, (*_AGAIN, PoolTimeout)):
        return True
    lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return lost and getattr(error, "sqlstate", None) in (None, *_CONNECTION)
