"""Blobs in any S3-compatible object store: `<prefix>blobs/<sha256>-<place>`, through obstore.

A place is drawn for one copy and never used again, so a retried put of which the answer was lost can only meet itself,
and who removes a copy cannot meet who writes the same digest anew. While a copy is being published its place is leased:
a sweep leaves it alone, and a crash lets the lease go.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from coatcheck.errors import Damaged, NotFound, StoreClosed, StoreUnavailable
from coatcheck.refs import Blob, Coding
from coatcheck.storage import seekable
from coatcheck.storage.cache import FrameCache
from coatcheck.storage.frames import FRAME, Framed, Framer, check_frame

if TYPE_CHECKING:
    from obstore.store import S3Store

PART: Final = 8 << 20  # an object up to this size is one request; larger ones are parts of it
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between attempts
_SPOOLED: Final = 4 << 20  # bytes of a stage that are held in memory before a file takes them
_TABLES: Final = 512  # compressed blobs of which it is remembered where their frames are
_WINDOW: Final = 64  # frames that one request brings at most
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PLACE: Final = re.compile(r"[0-9a-f]{16}\.(raw|zst)")
_CODINGS: Final[dict[str, Coding]] = {"raw": "raw", "zst": "zstd"}
_FINAL: Final = (PermissionDeniedError, UnauthenticatedError, NotSupportedError)  # trying again helps nobody
_BEYOND: Final = re.compile(r"\b416\b|InvalidRange|not satisfiable|out of range|greater than length", re.IGNORECASE)
_T = TypeVar("_T")


class Leases(Protocol):
    """Who is publishing what, across machines. A process that dies lets go of all that it held."""

    def hold(self, place: str) -> AbstractContextManager[None]: ...

    def take(self, place: str) -> AbstractContextManager[bool]:
        """Hold a place for a moment, where nobody else does; whether that was so."""
        ...

    def close(self) -> None: ...


class S3Blobs:
    """Blobs below one prefix of a bucket."""

    def __init__(
        self, bucket: S3Store, *, uri: str, leases: Leases, prefix: str, sweep_after: float, patience: float
    ) -> None:
        self._bucket = bucket
        self._uri = uri.rstrip("/")
        self._prefix = prefix
        self._leases = leases
        self._sweep_after = sweep_after
        self._patience = patience
        self._cache = FrameCache()
        self._tables: dict[str, seekable.Table] = {}
        self._closed = False
        self._owner = os.getpid()

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[StagedObject]:
        self._check_open()
        framer = Framer(digest)
        if isinstance(chunks, list) and len(chunks) == 1:
            framer.update(chunks[0])
            with self._staged(framer.finish(), chunks[0], "raw") as staged:
                yield staged
            return
        with tempfile.SpooledTemporaryFile(_SPOOLED) as spool:
            for chunk in framer.through(chunks):
                spool.write(chunk)
            with self._staged(framer.finish(), spool, "raw") as staged:
                yield staged

    def compress(self, blob: Blob) -> AbstractContextManager[StagedObject] | None:
        if blob.coding != "raw" or not seekable.is_worthwhile(self.read(blob, 0, FRAME)):
            return None
        return self._compressed(blob)

    @contextmanager
    def _compressed(self, blob: Blob) -> Iterator[StagedObject]:
        with tempfile.SpooledTemporaryFile(_SPOOLED) as spool:
            for piece in seekable.compress(self.read(blob, at, FRAME) for at in range(0, blob.size, FRAME)):
                spool.write(piece)
            with self._staged(Framed(blob.digest, blob.size, blob.frames), spool, "zst") as staged:
                yield staged

    @contextmanager
    def _staged(self, framed: Framed, source: bytes | IO[bytes], suffix: str) -> Iterator[StagedObject]:
        place = f"{secrets.token_hex(8)}.{suffix}"
        with self._leases.hold(place):
            yield StagedObject(self, framed, source, place)

    def upload(self, blob: Blob, source: bytes | IO[bytes]) -> None:
        size = len(source) if isinstance(source, bytes) else source.seek(0, 2)
        path = self._path(blob)

        def upload() -> None:
            if not isinstance(source, bytes):
                source.seek(0)
            obstore.put(self._bucket, path, source, chunk_size=PART)

        if size > PART:  # a create of many parts does not exist; nobody else has this place
            self._asked(upload, "storing a blob")
            return
        if not isinstance(source, bytes):
            source.seek(0)
        data = source if isinstance(source, bytes) else source.read()
        try:
            self._asked(lambda: obstore.put(self._bucket, path, data, mode="create"), "storing a blob")
        except _Exists:
            pass  # our own put, of which the answer was lost

    def read(self, blob: Blob, offset: int, length: int) -> bytes:
        end = min(offset + length, blob.size)
        self._check_open()
        if offset >= end:
            return b""
        first, last = offset // FRAME, (end - 1) // FRAME
        views = [view for at in range(first, last + 1, _WINDOW)
                 for view in self._frames(blob, at, min(at + _WINDOW - 1, last))]  # fmt: skip
        whole = views[0].obj
        alone = all(view.obj is whole for view in views)
        if alone and isinstance(whole, bytes) and len(whole) == end - offset == sum(map(len, views)):
            return whole  # what was fetched at once is just what was asked for
        views[-1] = views[-1][: end - last * FRAME]
        views[0] = views[0][offset - first * FRAME :]
        return b"".join(views)

    def _frames(self, blob: Blob, first: int, last: int) -> list[memoryview]:
        """Checked frames, from the cache as far as it has them at either end."""
        held = [self._cache.get(blob.place, index) for index in range(first, last + 1)]
        low, high = first, last
        while low <= high and held[low - first] is not None:
            low += 1
        while high >= low and held[high - first] is not None:
            high -= 1
        if low <= high:
            for index, frame in enumerate(self._fetched(blob, low, high), low):
                check_frame(blob.frames, index, frame, blob.digest)
                self._cache.keep(blob.place, index, frame)
                held[index - first] = frame
        return [frame for frame in held if frame is not None]

    def _fetched(self, blob: Blob, first: int, last: int) -> list[memoryview]:
        if blob.coding == "zstd":
            table = self._tables.get(blob.place)
            if table is None:
                table = seekable.Table.of(self._tail(blob), lambda at, size: self._range(blob, at, size), blob.digest)
                if len(self._tables) >= _TABLES:
                    self._tables.pop(next(iter(self._tables)), None)
                self._tables[blob.place] = table
            return [memoryview(one) for one in table.read(first, last, lambda at, size: self._range(blob, at, size))]
        length = min((last + 1) * FRAME, blob.size) - first * FRAME
        data = memoryview(self._range(blob, first * FRAME, length))
        if len(data) != length:
            raise _shortened(blob)
        return [data[at : at + FRAME] for at in range(0, len(data), FRAME)]

    def _range(self, blob: Blob, start: int, length: int) -> bytes:
        path = self._path(blob)
        if blob.coding == "raw" and not start and length == blob.size:  # all of it: object stores are quicker so
            return bytes(self._asked(lambda: obstore.get(self._bucket, path).bytes(), "reading a blob"))

        def ranged() -> bytes:
            try:
                return bytes(obstore.get_range(self._bucket, path, start=start, length=length))
            except BaseError as error:
                # What is damaged is set aside by a repair, so words alone do not tell.
                if _BEYOND.search(str(error)) and self._tail(blob) < start + length:
                    raise _shortened(blob) from None
                raise

        return self._asked(ranged, "reading a blob")

    def _tail(self, blob: Blob) -> int:
        """How long the object is."""
        return int(self._head(blob)["size"])

    def _head(self, blob: Blob) -> Any:
        path = self._path(blob)
        return self._asked(lambda: obstore.head(self._bucket, path), "looking for a blob")

    def holds(self, blob: Blob, data: bytes) -> bool:
        self._check_open()
        if blob.coding == "raw":
            head = self._head(blob)
            if head["size"] != len(data):
                return False
            if str(head.get("e_tag") or "").strip('"') == _tag(data):
                return True  # the object store's own checksum of what it holds
        return self.read(blob, 0, blob.size) == data and blob.size == len(data)

    def remove(self, blob: Blob) -> None:
        self._cache.drop(blob.place)
        self._tables.pop(blob.place, None)
        path = self._path(blob)
        try:
            self._asked(lambda: obstore.delete(self._bucket, path), "removing a blob")
        except NotFound:
            pass

    def places(self) -> Iterator[Blob]:
        self._check_open()
        batches = self._asked(lambda: iter(obstore.list(self._bucket, f"{self._prefix}blobs")), "listing blobs")
        while (batch := self._asked(lambda: next(batches, None), "listing blobs")) is not None:
            for meta in batch:
                digest, _, name = str(meta["path"]).rpartition("/")[2].partition("-")
                place = _PLACE.fullmatch(name)
                if place and _DIGEST.fullmatch(digest):
                    yield Blob(digest, 0, _CODINGS[place[1]], name)

    def sweep(self, blob: Blob, *, remove: bool = True) -> bool:
        with self._leases.take(blob.place) as free:
            if not free:
                return False
            try:
                changed: datetime = self._head(blob)["last_modified"]
            except NotFound:
                return False
            if self._sweep_after and datetime.now(UTC) - changed < timedelta(seconds=self._sweep_after):
                return False
            if remove:
                self.remove(blob)
            return True

    def leftovers(self, *, remove: bool) -> int:
        return 0  # what is staged lies in a file without a name; parts of an upload that broke off are the bucket's

    def uri(self, blob: Blob) -> str:
        return f"{self._uri}/blobs/{blob.digest}-{blob.place}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        del self._bucket  # and so its connections: whoever still holds this store holds none of them
        self._leases.close()
        self._cache.clear()
        self._tables.clear()

    def _path(self, blob: Blob) -> str:
        if not (_DIGEST.fullmatch(blob.digest) and _PLACE.fullmatch(blob.place)):
            raise StoreUnavailable(
                "the catalog names a blob by something that is no digest", hint="run 'coatcheck verify'"
            )
        return f"{self._prefix}blobs/{blob.digest}-{blob.place}"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _asked(self, call: Callable[[], _T], doing: str) -> _T:
        """What the object store answers. The client tries requests again by itself, but not a body that breaks off, or
        what a server says that is just coming up: that is done here, within the same time."""
        if os.getpid() != self._owner:
            raise StoreUnavailable(
                "the object store's client does not survive a fork",
                hint="start processes with 'spawn', or open the store in the child alone",
            )
        until, pause = time.monotonic() + self._patience, _SHORTEST
        while True:
            self._check_open()
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFound("the object of a blob is gone", hint="put the same content again") from error
            except AlreadyExistsError as error:
                raise _Exists from error
            except (BaseError, OSError) as error:
                again = not isinstance(error, _FINAL)
                if not again or time.monotonic() + pause > until:
                    # The text of the error holds addresses and headers: only its kind is told.
                    raise StoreUnavailable(
                        f"the object store failed while {doing}: {type(error).__name__}",
                        hint="try again" if again else "check bucket, endpoint and credentials",
                        may_retry=again,
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST)


def _shortened(blob: Blob) -> Damaged:
    return Damaged(f"the object of blob {blob.digest} has fewer bytes than it had")


class _Exists(Exception):
    """There is an object of this name."""


class StagedObject:
    """Bytes that were hashed and wait for their upload."""

    def __init__(self, blobs: S3Blobs, framed: Framed, source: bytes | IO[bytes], place: str) -> None:
        self._blobs = blobs
        self._framed = framed
        self._source = source
        self._place = place

    @property
    def digest(self) -> str:
        return self._framed.digest

    @property
    def size(self) -> int:
        return self._framed.size

    def publish(self) -> Blob:
        coding = _CODINGS[self._place.rpartition(".")[2]]
        blob = Blob(self.digest, self.size, coding, self._place, self._framed.frames)
        self._blobs.upload(blob, self._source)
        return blob


def _tag(data: bytes) -> str:
    """The entity tag that S3 gives an object of these bytes, uploaded as we upload: MD5, of the parts where there are
    several."""
    if len(data) <= PART:
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    view = memoryview(data)
    parts = [hashlib.md5(view[at : at + PART], usedforsecurity=False).digest() for at in range(0, len(data), PART)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
