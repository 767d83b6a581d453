"""A store in memory, for tests and throw-away runs: blobs in a dict, the catalog in SQLite. Nothing
survives the process."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coatcheck.errors import NotFound
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Quarantined, StagedBlob
from coatcheck.storage.disk import Connection, Disk
from coatcheck.storage.entries import Effect
from coatcheck.storage.forks import RLock, unwatch, watch
from coatcheck.storage.frames import FRAME, check_frame, check_size, framing
from coatcheck.storage.sqlite import SqliteCatalog
from coatcheck.storage.sqlite_rows import Values, inside_another_call, translated
from coatcheck.storage.sqlite_schema import migrate

_T = TypeVar("_T")


class MemoryBlobs(BlobStore):
    """Blobs in a dict, by place."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Blob, bytes]] = {}
        self._staged: set[str] = set()
        self._apart: dict[str, tuple[Blob, bytes, float]] = {}
        self._lock = threading.Lock()
        self._next = 0

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[StagedBlob]:
        chunks, finish = framing(chunks, digest)
        held = b"".join(chunks)
        digest, size, frames = finish()
        with self._lock:
            self._next += 1
            place = f"{self._next:016x}"
            self._staged.add(place)
        try:
            yield StagedBlob(
                digest, size, lambda: self._publish(Blob(digest, size, "raw", place, frames), held)
            )
        finally:
            self._staged.discard(place)

    def _publish(self, blob: Blob, data: bytes) -> Blob:
        with self._lock:
            self._copies[blob.place] = (blob, data)
        return blob

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        copy = self._copies.get(blob.place)
        if copy is None:
            raise NotFound(f"blob {blob.digest} is missing", hint="put the same content again")
        check_size(blob)
        data, end = copy[1], min(offset + length, blob.size)
        for index in range(offset // FRAME, -(-end // FRAME)):
            check_frame(blob, index, data[index * FRAME : (index + 1) * FRAME])
        return data[offset:end]

    def remove(self, blob: Blob) -> None:
        self._copies.pop(blob.place, None)

    def places(self) -> Iterator[Blob]:
        for blob, _ in list(self._copies.values()):
            yield Blob(blob.digest, 0, blob.coding, blob.place)

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        with self._lock:
            if blob.place in self._staged or blob.place not in self._copies:
                return False
            if remove:
                del self._copies[blob.place]
            return True

    def quarantine(self, blob: Blob, at: float) -> bool:
        with self._lock:
            if blob.place in self._staged or blob.place not in self._copies:
                return False
            self._apart[blob.place] = (*self._copies.pop(blob.place), at)
            return True

    def quarantined(self) -> Iterator[Quarantined]:
        for blob, data, since in list(self._apart.values()):
            yield Quarantined(Blob(blob.digest, 0, blob.coding, blob.place), len(data), since)

    def take_back(self, blob: Blob) -> bool:
        with self._lock:
            held = self._apart.pop(blob.place, None)
            if held is not None:
                self._copies[blob.place] = held[:2]
            return held is not None

    def discard(self, blob: Blob) -> None:
        self._apart.pop(blob.place, None)

    def uri(self, blob: Blob) -> str:
        return f"memory:{blob.digest}"

    def close(self) -> None:
        self._copies.clear()


class MemoryCatalog(SqliteCatalog):
    """A catalog in memory. Nothing survives the process. All content is kept in the blob store."""

    rank = 2

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = False
        self._writer = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, factory=Connection
        )
        self._writer.row_factory = sqlite3.Row
        migrate(self._writer, Disk(durable=False))
        watch(self)

    def change(
        self,
        doing: str,
        work: Callable[[], _T],
        *,
        session_id: str | None = None,
        effect: Effect | None = None,
    ) -> _T:
        with self._lock:
            db = self._opened_writer()
            if self._inside:
                raise inside_another_call()
            try:
                self._inside = True
                db.execute("BEGIN")
                answer = work()
                db.execute("COMMIT")
                return answer
            except sqlite3.Error as error:
                raise translated(error, doing) from error
            finally:
                self._inside = False
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _query(self, sql: str, values: Values = (), *, apart: bool = False) -> list[Any]:
        with self._lock:
            try:
                return self._run(sql, values).fetchall()
            except sqlite3.Error as error:
                raise translated(error, "reading the catalog") from error

    def close(self) -> None:
        with self._lock:
            db, self._writer = self._writer, None
            if db is not None:
                db.close()
        unwatch(self)

    def locks(self) -> list[RLock]:
        return [self._lock]

    def before_fork(self) -> None:
        """Do nothing: memory is copied to the child, so the database stays usable there."""

    def after_fork(self) -> None:
        pass
