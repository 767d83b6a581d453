"""Bytes in and out: pieces of a stream for a put, and a stored artifact by ranges or as a seekable stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeGuard

from coatcheck.errors import UnsupportedValue
from coatcheck.refs import Ref
from coatcheck.storage.frames import FRAME

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a stored artifact, by range: what everything that looks inside one is given.

    `read(offset, length)` answers fewer bytes only at the end, and raises `Damaged` rather than wrong ones. `frames`
    are the records of its frames (`storage.frames.line_counts`), empty for a small artifact."""

    ref: Ref
    frames: bytes
    read: Callable[[int, int], bytes]

    @property
    def size(self) -> int:
        return self.ref.size_bytes

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """All bytes from an offset on, a frame at a time, cut where frames are."""
        at = start
        while at < self.size:
            chunk = self.read(at, FRAME - at % FRAME)
            yield chunk
            at += len(chunk)


def is_stream(value: object) -> TypeGuard[IO[bytes]]:
    return callable(getattr(value, "read", None))


def chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    """A binary stream in pieces of a megabyte, short only at the end, whatever pieces it gives itself."""
    while True:
        piece = bytearray()
        while len(piece) < CHUNK:
            got: object = stream.read(CHUNK - len(piece))
            if isinstance(got, str):
                raise UnsupportedValue("the stream gives text, not bytes", hint="open the file in binary mode ('rb')")
            if got is None:
                raise UnsupportedValue("the stream has nothing to read yet", hint="pass one that waits for its bytes")
            if not got:
                break
            if not isinstance(got, bytes | bytearray | memoryview):
                raise UnsupportedValue(f"the stream gives a {type(got).__name__}, not bytes")
            piece += got
        if piece:
            yield bytes(piece)
        if len(piece) < CHUNK:
            return


class ArtifactStream(io.RawIOBase):
    """Reads a stored blob by ranges, never more than one frame in memory at a time. Each frame is checked as it is
    read."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"cannot seek to {offset} from {whence}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        room = min(len(view), FRAME - self._at % FRAME)  # up to the frame's end: no frame is read twice
        data = self._content.read(self._at, room)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
