"""The bytes of artifacts: read by range, as a seekable stream or as a file; and the chunks of a
stream that is put.

Files are for tools that accept nothing else. A file's name is made of digests only, whatever an
artifact or a session is called. Files are read-only, for their owner only, and appear whole or not
at all. The process that made a file removes it at the end of the session.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Final, Self, TypeGuard

from coatcheck import media
from coatcheck.atomic import Draft
from coatcheck.errors import NotFound, UnsupportedValue, storage_errors
from coatcheck.refs import Blob, Ref
from coatcheck.storage import BlobStore, Entry
from coatcheck.storage.frames import FRAME

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 20
_CHECKED_EVERY: Final = 64  # files written between two checks for files that are gone


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a stored artifact, by range. Everything that looks inside an artifact takes one.

    `read(offset, length)` returns fewer bytes only at the end, and raises `Damaged` instead of
    returning wrong bytes. `frames` are the records of its frames (`storage.frames.line_counts`),
    empty for a small artifact. In a `with` block the bytes are opened once for all reads, even by a
    copy with another ref; otherwise each read opens them."""

    ref: Ref
    frames: bytes
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, ref: Ref, data: bytes) -> Content:
        """The content of an artifact whose bytes are in memory."""
        return cls(ref, b"", lambda offset, length: data[offset : offset + length])

    def __enter__(self) -> Self:
        if isinstance(self.read, BlobReader):
            self.read.keep_open()
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.read, BlobReader):
            self.read.close()

    @property
    def size(self) -> int:
        return self.ref.size_bytes

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """The bytes from an offset on, in chunks that end where frames end."""
        at = start
        while at < self.size:
            chunk = self.read(at, FRAME - at % FRAME)
            yield chunk
            at += len(chunk)


class BlobReader:
    """Reads a stored blob by range. If its copy was moved (compressed, repaired), it continues with
    the new one.

    Between `keep_open` and the matching `close`, the copy is opened once, and its first frame is
    read once: every check for a kind of content looks at it."""

    def __init__(self, blobs: BlobStore, entry: Entry, moved: Callable[[Entry], Entry]) -> None:
        self._blobs = blobs
        self._entry = entry
        self._moved = moved
        self._users = 0
        self._open = ExitStack()
        self._read_open: Callable[[int, int], bytes] | None = None
        self._head = b""

    def __call__(self, offset: int, length: int) -> bytes:
        if self._users and offset + length <= FRAME:
            self._head = self._head or self._current(0, FRAME)
            return self._head[offset : offset + length]
        return self._current(offset, length)

    def _current(self, offset: int, length: int) -> bytes:
        try:
            return self._read(offset, length)
        except NotFound:
            self._entry, self._read_open = self._moved(self._entry), None
            return self._read(offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        if not self._users:
            return self._blobs.read(self._entry.blob, offset, length)
        if self._read_open is None:
            self._read_open = self._open.enter_context(self._blobs.opened(self._entry.blob))
        return self._read_open(offset, length)

    @property
    def source(self) -> tuple[BlobStore, Blob]:
        """The store and the copy that it reads."""
        return self._blobs, self._entry.blob

    def keep_open(self) -> None:
        """Keep the copy open from the next read on, until `close` has been called as often as
        this."""
        self._users += 1

    def close(self) -> None:
        self._users -= 1
        if not self._users:
            self._open.close()
            self._read_open, self._head = None, b""


def is_stream(value: object) -> TypeGuard[IO[bytes]]:
    return callable(getattr(value, "read", None))


def chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    """Read a binary stream in chunks of one megabyte. Only the last one is shorter, whatever `read`
    returns."""
    chunk = bytearray()
    while data := _read_some(stream, CHUNK - len(chunk)):
        chunk += data
        if len(chunk) >= CHUNK:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _read_some(stream: IO[bytes], length: int) -> bytes | bytearray | memoryview:
    """What one read returns, empty at the end. Raises `UnsupportedValue` if it is not bytes."""
    got: object = stream.read(length)
    if isinstance(got, bytes | bytearray | memoryview):
        return got
    if isinstance(got, str):
        raise UnsupportedValue(
            "the stream returns text, not bytes", hint="open the file in binary mode ('rb')"
        )
    if got is None:
        raise UnsupportedValue("the stream has no data yet", hint="pass a blocking stream")
    raise UnsupportedValue(f"the stream returns a {type(got).__name__}, not bytes")


class ArtifactStream(io.RawIOBase):
    """A seekable stream over a stored artifact. It keeps at most one frame in memory, and checks
    each as it reads it."""

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
        # up to the end of the frame, so that no frame is read twice
        room = min(len(view), FRAME - self._at % FRAME)
        data = self._content.read(self._at, room)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class Files:
    """The files that this process made of the artifacts of a store."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: dict[str, set[Path]] = {}

    def write(self, stream: BinaryIO, media_type: str, session_id: str, folder: str | Path) -> Path:
        """Write a stream to a read-only file in a folder, which is created if it is missing."""
        suffix = f".{media.ending(media_type)}"
        digest = hashlib.sha256()
        with storage_errors("writing a file for a tool"):
            where = Path(folder).absolute()
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            with Draft(where, mode=0o400) as draft:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    draft.file.write(chunk)
                owner = hashlib.sha256(session_id.encode()).hexdigest()[:8]
                path = where / f"{digest.hexdigest()[:32]}-{owner}{suffix}"
                draft.replace(path, durable=False)
        with self._lock:
            self._note(session_id, path)
        return path

    def _note(self, session_id: str, path: Path) -> None:
        paths = self._made.setdefault(session_id, set())
        if len(paths) % _CHECKED_EVERY == _CHECKED_EVERY - 1:
            # a tool may have removed its temporary folder
            paths.intersection_update({one for one in paths if one.exists()})
        paths.add(path)

    def remove(self, session_id: str) -> None:
        """Remove the files of a session. Files that are gone or cannot be removed are skipped."""
        with self._lock:
            paths = self._made.pop(session_id, set())
        for path in paths:
            with suppress(OSError):
                path.unlink()
