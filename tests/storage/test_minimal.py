"""A backend in plain dicts that implements only the required methods conforms to both protocols:
the defaults of the protocols do the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coatcheck import Session, Store
from coatcheck.errors import NotFound, StoreClosed, StoreError
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog, Entry, Note, Row, SessionInfo
from coatcheck.storage.frames import FRAME, Framer, check_frame
from coatcheck.storage.passages import Passages
from coatcheck.testing import BlobStoreSuite, CatalogSuite
from tests.backends import LARGE, Clock

_T = TypeVar("_T")


class DictBlobs(BlobStore):
    """Copies by place."""

    def __init__(self) -> None:
        self.copies: dict[str, tuple[Blob, bytes]] = {}
        self._staged: set[str] = set()
        self._lock = threading.Lock()
        self._next = 0

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[DictStage]:
        framer = Framer(digest)
        data = b"".join(framer.through(chunks))
        digest, size, frames = framer.finish()
        with self._lock:
            self._next += 1
            place = str(self._next)
        self._staged.add(place)
        try:
            yield DictStage(self, Blob(digest, size, "raw", place, frames), data)
        finally:
            self._staged.discard(place)

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        if blob.place not in self.copies:
            raise NotFound("this copy was removed")
        data, end = self.copies[blob.place][1], min(offset + length, blob.size)
        for index in range(offset // FRAME, -(-end // FRAME)):
            check_frame(blob, index, data[index * FRAME : (index + 1) * FRAME])
        return data[offset:end]

    def remove(self, blob: Blob) -> None:
        self.copies.pop(blob.place, None)

    def places(self) -> Iterator[Blob]:
        return iter(
            [Blob(blob.digest, 0, blob.coding, blob.place) for blob, _ in self.copies.values()]
        )

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        is_free = blob.place in self.copies and blob.place not in self._staged
        if is_free and remove:
            self.remove(blob)
        return is_free

    def uri(self, blob: Blob) -> str:
        return f"dict:{blob.digest}"


class DictStage:
    def __init__(self, blobs: DictBlobs, blob: Blob, data: bytes) -> None:
        self._blobs, self._blob, self._data = blobs, blob, data
        self.digest, self.size = blob.digest, blob.size

    def publish(self) -> Blob:
        self._blobs.copies[self._blob.place] = self._blob, self._data
        return self._blob


class DictCatalog(Catalog):
    """Rows by kind and key. A change works on a copy, which it puts in place at its end."""

    def __init__(self) -> None:
        self._rows: dict[type, dict[Any, Any]] = {SessionInfo: {}, Entry: {}, Blob: {}, Note: {}}
        self._lock = threading.RLock()
        self._closed = False

    def change(self, doing: str, work: Callable[[], _T], **_: object) -> _T:
        with self._lock:
            before = {kind: dict(rows) for kind, rows in self._all().items()}
            try:
                return work()
            except BaseException:
                self._rows = before
                raise

    def sessions(self, session_id: str | None = None) -> Iterator[SessionInfo]:
        found = self._all()[SessionInfo]
        return iter([one for one in list(found.values()) if session_id in (None, one.session_id)])

    def refs(self, session_id: str | None = None, digest: str | None = None) -> list[Entry]:
        with self._lock:
            rows = self._all()
            found = [
                replace(
                    one,
                    blob=rows[Blob].get(one.ref.artifact_id, one.blob),
                    session=rows[SessionInfo][one.ref.session_id],
                )
                for one in rows[Entry].values()
                if session_id in (None, one.ref.session_id)
                and digest in (None, one.ref.artifact_id)
            ]
        return sorted(found, key=lambda one: one.seq, reverse=True)

    def blobs(self, digest: str | None = None) -> Iterator[tuple[Blob, bytes | StoreError | None]]:
        found = self._all()[Blob]
        return iter([(one, None) for one in list(found.values()) if digest in (None, one.digest)])

    def notes(
        self, owner: str, start: str, stop: str, *, limit: int | None = None, newest: bool = False
    ) -> list[Note]:
        with self._lock:
            found = [
                one
                for one in self._all()[Note].values()
                if one.owner == owner and start <= one.key < stop
            ]
        return sorted(found, key=lambda one: str(one.key), reverse=newest)[:limit]

    def save(self, *rows: Row) -> None:
        for row in rows:
            self._rows[type(row)][_key(row)] = row

    def drop(self, *rows: Row) -> None:
        for row in rows:
            self._rows[type(row)].pop(_key(row), None)
            if isinstance(row, SessionInfo):
                self.drop(*self.notes(row.session_id, "", "~"))

    def close(self) -> None:
        self._closed = True

    def _all(self) -> dict[type, dict[Any, Any]]:
        if self._closed:
            raise StoreClosed("the store is closed")
        return self._rows


def _key(row: Row) -> object:
    match row:
        case SessionInfo():
            return row.session_id
        case Entry():
            return row.ref.session_id, row.seq
        case Blob():
            return row.digest
        case Note():
            return row.owner, row.key


class TestDictBlobs(BlobStoreSuite):
    shared = False

    def make_blobs(self, tmp_path: Path) -> BlobStore:
        return DictBlobs()

    def flip_byte(self, blobs: BlobStore, blob: Blob, offset: int) -> bool:
        assert isinstance(blobs, DictBlobs)
        held, data = blobs.copies[blob.place]
        blobs.copies[blob.place] = (
            held,
            data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :],
        )
        return True


class TestDictCatalog(CatalogSuite):
    shared = False

    def make_catalog(self, tmp_path: Path) -> Catalog:
        return DictCatalog()


@pytest.mark.parametrize(
    ("backend", "protocol", "most"), [(DictBlobs, BlobStore, 6), (DictCatalog, Catalog, 8)]
)
def test_a_backend_needs_few_methods(backend: type, protocol: Any, most: int) -> None:
    methods = {name for name in vars(backend) if not name.startswith("_")}
    assert methods == protocol.__abstractmethods__
    assert len(methods) <= most


def test_a_store_works_on_a_minimal_backend() -> None:
    clock, backend = Clock(), (DictBlobs(), DictCatalog(), Passages(None))
    with Store(*backend, url="dict:", session_type=Session, clock=clock) as store:
        session = store.session("s", ttl=None)
        small, large = (
            session.put("small words", name="small"),
            session.put("x" * LARGE, name="large"),
        )
        assert session.put("small words", name="small") == small
        assert (session.get("small"), session.get(large.pointer)) == ("small words", "x" * LARGE)
        assert [hit.ref.name for hit in session.search("words")] == ["small"]
        assert session.read("large", chars="0:9").text == "x" * 9
        token = session.claim("dispatcher")
        assert session.record("hot", b"state", token=token) == 1
        child = store.session("child", parent="s")
        assert child.get("small") == "small words"
        session.forget("large")
        store.session("brief", ttl=10).put("expires")
        clock.advance(11)
        assert store.collect(grace=0).problems == []
        assert store.verify(repair=True).problems == []
        assert store.stats().artifacts == 1
