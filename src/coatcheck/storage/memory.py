"""Blobs in memory, for tests and throw-away runs. Nothing survives the process. The catalog is SQLite in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from coatcheck.errors import NotFound
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, StagedBlob
from coatcheck.storage.frames import FRAME, Framer, check_frame


class MemoryBlobs(BlobStore):
    """Blobs in a dict, by place."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Blob, bytes]] = {}
        self._staged: set[str] = set()
        self._lock = threading.Lock()
        self._next = 0

    @contextmanager
    def stage(self, chunks: Iterable[bytes], digest: str | None = None) -> Iterator[StagedBlob]:
        framer = Framer(digest)
        held = b"".join(framer.through(chunks))
        digest, size, frames = framer.finish()
        with self._lock:
            self._next += 1
            place = f"{self._next:016x}"
            self._staged.add(place)
        try:
            yield StagedBlob(digest, size, lambda: self._publish(Blob(digest, size, "raw", place, frames), held))
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
        data, end = copy[1], min(offset + length, blob.size)
        for index in range(offset // FRAME, -(-end // FRAME)):
            check_frame(blob.frames, index, data[index * FRAME : (index + 1) * FRAME], blob.digest)
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

    def uri(self, blob: Blob) -> str:
        return f"memory:{blob.digest}"

    def close(self) -> None:
        self._copies.clear()
