"""Connections to PostgreSQL: a pool of them per process, tried again within a deadline, and the leases of uploads.

Every statement names its tenant, and so does every connection (`coatcheck.tenant`): where the role is subject to
row-level security, the database holds tenants apart even if a statement of ours were wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection, errors
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolTimeout

from coatcheck.errors import CoatcheckError, StoreClosed, StoreFull, StoreUnavailable
from coatcheck.ids import digest_of
from coatcheck.storage.watch import Watch

PATIENCE: Final = 30.0  # seconds that a call tries before it says that the database is unavailable
_SHORTEST, _LONGEST = 0.02, 2.0
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
_T = TypeVar("_T")
_watch: Final = Watch()

logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
Db = Connection[tuple[Any, ...]]


class Connections:
    """A pool that opens on first use, and anew in a child process."""

    def __init__(
        self, conninfo: str, *, schema: str, tenant: str = "", size: int = 16, patience: float = PATIENCE
    ) -> None:
        self._conninfo = conninfo
        self.schema = schema
        self.tenant = digest_of(tenant.encode()) if tenant else ""  # a name may hold anything
        self._size = size
        self.patience = patience
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Db] | None = None
        self._owner = 0
        self._closed = False

    @property
    def address(self) -> str:
        """Where the database is, without who goes there."""
        about = conninfo_to_dict(self._conninfo)
        host = about.get("host") or about.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
        port = about.get("port") or os.environ.get("PGPORT")
        name = about.get("dbname") or os.environ.get("PGDATABASE") or ""
        return f"postgresql://{'' if str(host).startswith('/') else host}{f':{port}' if port else ''}/{name}"

    def run(self, change: Callable[[Db], _T], doing: str, *, slow: bool = False, whole: bool = False) -> _T:
        """One transaction, tried again where that may help. `change` may run more than once: what it does must be
        right when the first time succeeded and only its answer was lost. What is `slow` may take as long as it takes;
        else a database that does not answer in time is given up. What reads `whole` tables is slow."""

        def all_of_it(db: Db) -> _T:
            with db.transaction():
                if whole:
                    db.execute("SET LOCAL enable_seqscan = on")
                return change(db)

        return self._tried(all_of_it, doing, slow=slow or whole)

    def once(self, change: Callable[[Db], _T], doing: str) -> _T:
        """Like `run`, for a change that is a single statement and so a transaction by itself."""
        return self._tried(change, doing)

    def ask(
        self,
        sql: str,
        values: tuple[Any, ...] | dict[str, Any] = (),
        *,
        doing: str = "reading the catalog",
    ) -> list[Any]:
        """The rows of one statement, which is a transaction of its own."""
        return self._tried(lambda db: db.execute(sql, values, binary=True).fetchall(), doing)

    def connect(self) -> Db:
        """A connection beside the pool, for who must keep it."""
        settings: dict[str, Any] = self._options()
        return psycopg.connect(self._conninfo, autocommit=True, connect_timeout=10, **settings)

    def alone(self, change: Callable[[Db], _T], doing: str) -> _T:
        """On a connection by itself, which is closed after: what it holds goes with it. It may take long."""
        return self._tried(change, doing, own=True)

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
                    with _watch.over(db, until):
                        yield db
            except errors.ReadOnlySqlTransaction:
                db.close()  # of a server that is no primary any more: the next connection finds the one that is
                raise

    def _tried(self, call: Callable[[Db], _T], doing: str, *, own: bool = False, slow: bool = False) -> _T:
        until, pause = time.monotonic() + self.patience, _SHORTEST
        while True:
            try:
                with self._connected(until, own=own, slow=slow) as db:
                    return call(db)
            except CoatcheckError:
                raise
            except _FULL as error:
                raise StoreFull(f"the database has no space left while {doing}") from error
            except (psycopg.Error, PoolTimeout) as error:
                again = is_passing(error)
                if self._closed:
                    raise StoreClosed("the store is closed") from None
                if not again or time.monotonic() + pause > until:
                    raise unavailable(error, doing, may_retry=again) from None
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST)

    def _opened(self) -> ConnectionPool[Db]:
        if self._closed:
            raise StoreClosed("the store is closed")
        pool = self._pool
        if pool is None or self._owner != os.getpid():
            with self._lock:
                if self._pool is None or self._owner != os.getpid():
                    if self._pool is not None:
                        _inherited.append(self._pool)  # the parent's: its sockets are not ours to close
                    self._pool = ConnectionPool(
                        self._conninfo,
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
        # Whatever is asked for on behalf of a caller has an index. One session with most of the refs makes the planner
        # think that every session has as many, and that reading all, or compiling, would pay.
        settings = f"-c search_path={self.schema} -c coatcheck.tenant={self.tenant} -c jit=off -c enable_seqscan=off"
        named = conninfo_to_dict(self._conninfo)
        # A machine that is gone does not say so: the network is asked for it.
        network = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3",
                   "tcp_user_timeout": str(int(self.patience * 1000))}  # fmt: skip
        ours = {name: value for name, value in network.items() if name not in named}
        return {"options": settings, "application_name": "coatcheck", **ours}

    def close(self) -> None:
        self._closed = True
        if self._pool is not None and self._owner == os.getpid():
            self._pool.close(timeout=5)


class DatabaseLeases:
    """Leases as advisory locks. All that a process holds is on one connection, and ends with it; a second one tries for
    those of others, since a connection never stands in its own way."""

    def __init__(self, connections: Connections) -> None:
        self._holding = _Kept(connections)
        self._trying = _Kept(connections)

    @contextmanager
    def hold(self, place: str) -> Iterator[None]:
        self._holding.run("SELECT pg_advisory_lock(%s)", place, "taking a lease")
        try:
            yield
        finally:
            with contextlib.suppress(StoreUnavailable):  # a connection that broke has let go of it
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
    """One connection that stays, for one thread at a time."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._db: Db | None = None
        self._owner = 0

    def run(self, sql: str, place: str, doing: str) -> bool:
        key = int.from_bytes(bytes.fromhex(place[:16]), "big", signed=True)
        with self._lock:
            for attempt in (1, 2):
                try:
                    db = self._opened()
                    with _watch.over(db, time.monotonic() + self._connections.patience):
                        found = db.execute(sql, (key,)).fetchone()
                    return found is not None and bool(found[0])
                except psycopg.Error as error:
                    self._db = None
                    if attempt == 2 or not is_passing(error):
                        raise unavailable(error, doing, may_retry=is_passing(error)) from None
            raise AssertionError("unreachable")

    def _opened(self) -> Db:
        mine = self._owner == os.getpid()
        if self._db is None or not mine or self._db.closed:
            if self._db is not None and not mine:
                _inherited.append(self._db)
            self._db = self._connections.connect()
            self._owner = os.getpid()
        return self._db

    def close(self) -> None:
        with self._lock:
            if self._db is not None and self._owner == os.getpid():
                self._db.close()
            self._db = None


_inherited: list[object] = []


def is_passing(error: Exception) -> bool:
    """Whether the same call may succeed in a while."""
    if isinstance(error, (*_AGAIN, PoolTimeout)):
        return True
    lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return lost and getattr(error, "sqlstate", None) in (None, *_CONNECTION)


_CONNECTION: Final = ("08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03")


def unavailable(error: Exception, doing: str, *, may_retry: bool) -> StoreUnavailable:
    # The message of a failed connection names host and user, at worst more: only its kind is told.
    what = getattr(error, "sqlstate", None) or type(error).__name__
    return StoreUnavailable(
        f"the database failed while {doing}: {what}",
        hint="try again" if may_retry else "check the catalog's url, role and schema",
        may_retry=may_retry,
    )
