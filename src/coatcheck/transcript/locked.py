"""One transcript file, open and locked: its layout, its sessions, its manifest, its backup."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import Any

import xxhash

from coatcheck.collect import Progress
from coatcheck.store import Store
from coatcheck.transcript.keep import Manifest, manifests
from coatcheck.transcript.lines import batches, layout_of, opened, pieces, settled_size
from coatcheck.transcript.reports import FileReport, Status
from coatcheck.transcript.splice import MARK, sessions_in
from coatcheck.transcript.swap import SwapFile


class LockedFile:
    """One file, open and locked: its layout, the sessions that it names, and the manifest that
    describes it."""

    def __init__(self, file: SwapFile, handle: int, progress: Progress | None = None) -> None:
        self.file, self.handle, self.progress = file, handle, progress
        self.size = settled_size(handle)
        self.reader = opened(handle)
        self.layout = layout_of(self.reader)
        self.count = 0  # parts that were processed
        self.is_slim = False  # whether the file has refs; `manifest_in` finds out
        self.is_marked = False  # whether the file has a key like ours; `manifest_in` finds out

    def parts(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the lines between two offsets, or the document."""
        return chain.from_iterable(
            batches(self.reader, start, end, is_document=self.layout.is_document)
        )

    @cached_property
    def sessions(self) -> dict[str, None]:
        """The sessions that the refs of the file name, in file order."""
        return dict.fromkeys(self._sessions())

    def _sessions(self) -> Iterator[str]:
        chunks = pairwise(chain([b""], pieces(self.handle, 0, self.size)))
        for before, chunk in chunks:
            self.is_marked = self.is_marked or MARK in before[-len(MARK) :] + chunk
        for part in self.parts(0, self.size) if self.is_marked else ():
            yield from sessions_in(part)

    def manifest_in(self, store: Store) -> tuple[str, Manifest] | None:
        """Return the session and the manifest whose slim bytes the file begins with, or None."""
        first = next(self._sessions(), None)
        self.is_slim = first is not None
        for manifest in manifests(store, first) if first is not None else ():
            slim_bytes = [(one.size, one.checksum) for one in manifest.segments]
            if (
                first is not None
                and slim_bytes
                and begins_with(self.handle, slim_bytes, xxhash.xxh3_128)
            ):
                return first, manifest
        return None

    def begins_with_backup(self) -> bool:
        """Whether the file begins with all bytes of its backup."""
        size = self.file.size_of_backup()
        if size is None:
            return False
        with self.file.reading_backup() as backup:
            pairs = zip_longest(pieces(self.handle, 0, size), pieces(backup, 0, size))
            return all(one == other for one, other in pairs)

    def report(self, status: Status, after: int, **fields: Any) -> FileReport:
        fmt = self.layout.format.name if self.layout.format else None
        backup = str(self.file.backup) if self.file.has_backup() else None
        return FileReport(
            str(self.file.path), status, fmt, self.count, bytes_before=self.size, bytes_after=after,
            backup=backup, **fields,
        )  # fmt: skip


def clean_up(
    file: SwapFile, store: Store, keep: Container[str], *, reused: str | None = None
) -> None:
    """Remove unfinished replacements that a crash left beside a file, except the one to be
    `reused`, and end their sessions, except those to `keep`."""
    for session_id in file.unfinished():
        if session_id == reused:
            continue
        own = all(manifest.path == file.real_path for manifest in manifests(store, session_id))
        if own and session_id not in keep:
            store.session(session_id).end()
        file.remove_unfinished(session_id)


def begins_with(
    handle: int, stretches: Iterable[tuple[int, str | None]], new: Callable[[], Any]
) -> bool:
    """Whether a file begins with stretches of these sizes and digests, as far as those are
    known."""
    start = 0
    for size, expected in stretches:
        digest = new()
        for piece in pieces(handle, start, start + size):
            digest.update(piece)
        if expected is not None and digest.hexdigest() != expected:
            return False
        start += size
    return True


@dataclass(slots=True)
class Measured:
    """Size and digest of a stream of bytes."""

    digest: Any
    size: int = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
