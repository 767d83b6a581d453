"""Upkeep: `collect` removes what nothing refers to any more, `verify` reads everything and says what is not sound.

Both may run beside any number of readers and writers, and a crash at any instant leaves a store that either has or has
not taken the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from coatcheck.errors import CoatcheckError, Damaged, NotFound
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog

Progress = Callable[[int, int | None], None]
"""Called with what is done and what there is to do, in bytes or artifacts; None where nobody knows yet."""

TOMBSTONES_KEPT = 7 * 86_400.0
COLD_AFTER = 86_400.0
_PIECE = 1 << 20
_SOME = 500  # copies that the catalog is asked about at once


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection freed, or with `dry_run` would free."""

    dry_run: bool
    refs: int = 0
    artifacts: int = 0
    bytes: int = 0
    orphans: int = 0
    leftover_bytes: int = 0
    compressed: int = 0

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be. `repaired` tells whether it is now."""

    kind: Literal["damaged", "missing", "orphan", "catalog"]
    message: str
    artifact_id: str | None = None
    repaired: bool = False

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read, and what it found. All is well where `problems` is empty."""

    artifacts: int
    bytes: int
    problems: list[Problem] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        return {
            "artifacts": self.artifacts,
            "bytes": self.bytes,
            "problems": [problem.to_record() for problem in self.problems],
        }


def collect(
    blobs: BlobStore,
    catalog: Catalog,
    *,
    now: float,
    grace: float,
    dry_run: bool = False,
    orphans: bool = True,
    compress: bool = True,
    cold_after: float = COLD_AFTER,
    progress: Progress | None = None,
) -> CollectReport:
    """Expire, remove, sweep, compress: rows before bytes."""
    freed = catalog.expire(now - grace, forget_before=now - grace - TOMBSTONES_KEPT, dry_run=dry_run)
    if not dry_run:
        for blob in freed.blobs:
            blobs.remove(blob)
    swept = sum(blobs.sweep(blob, remove=not dry_run) for blob in _orphans(blobs, catalog)) if orphans else 0
    leftovers = blobs.leftovers(remove=not dry_run) if orphans else 0
    compressed = 0
    if compress and not dry_run:
        for done, blob in enumerate(catalog.cold(now - cold_after), 1):
            compressed += _compress(blobs, catalog, blob)
            if progress:
                progress(done, None)
    if not dry_run:
        catalog.compact()
    return CollectReport(dry_run, freed.refs, freed.artifacts, freed.bytes, swept, leftovers, compressed)


def verify(
    blobs: BlobStore, catalog: Catalog, *, repair: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte. With `repair`, set right what can be: what is damaged is set aside so that the rest is sound,
    and comes back when the same content is put again."""
    problems = [Problem("catalog", message, None, repair) for message in catalog.check(repair=repair)]
    total = catalog.totals().stored_bytes
    checked = seen = 0
    for blob, content in catalog.blobs():
        problem = _examine(blobs, catalog, blob, content)
        if problem is not None:
            if repair:
                catalog.lose(blob)
            problems.append(Problem(problem.kind, problem.message, blob.digest, repair))
        checked += 1
        seen += blob.size
        if progress:
            progress(seen, max(total, seen))
    for orphan in _orphans(blobs, catalog):
        if blobs.sweep(orphan, remove=repair):
            message = "a file that no artifact refers to" + (": removed" if repair else "")
            problems.append(Problem("orphan", message, orphan.digest, repair))
    leftovers = blobs.leftovers(remove=repair)
    if leftovers:
        problems.append(Problem("orphan", f"{leftovers} bytes of puts that never finished", None, repair))
    return VerifyReport(checked, seen, problems)


def _orphans(blobs: BlobStore, catalog: Catalog) -> Iterator[Blob]:
    """Copies that no row names, and that nobody is publishing."""

    def unnamed(copies: Sequence[Blob]) -> list[Blob]:
        known = catalog.places({copy.digest for copy in copies})
        return [copy for copy in copies if known.get(copy.digest) != copy.place]

    copies = blobs.places()
    while some := list(islice(copies, _SOME)):
        # The second look counts: once a copy is no longer being published, its row is there, or never will be.
        for copy in unnamed(some):
            if blobs.sweep(copy, remove=False) and unnamed([copy]):
                yield copy


def _examine(blobs: BlobStore, catalog: Catalog, blob: Blob, content: bytes | None) -> Problem | None:
    try:
        if blob.coding == "inline":
            if content is None:
                raise NotFound("its content is gone from the database", hint="")
            digest = hashlib.sha256(content).hexdigest()
        else:
            running = hashlib.sha256()
            for at in range(0, blob.size, _PIECE):
                running.update(blobs.read(blob, at, _PIECE))
            digest = running.hexdigest()
    except NotFound as error:
        # A copy may have been removed or compressed since we read its row: then there is nothing wrong.
        now = catalog.blob(blob.digest)
        return Problem("missing", error.message) if now is not None and now.place == blob.place else None
    except Damaged as error:
        return Problem("damaged", error.message)
    except CoatcheckError as error:
        return Problem("damaged", f"cannot be read: {error.message}")
    return None if digest == blob.digest else Problem("damaged", "the bytes do not match their digest")


def _compress(blobs: BlobStore, catalog: Catalog, blob: Blob) -> bool:
    try:
        stage = blobs.compress(blob)
        if stage is None:
            return False
        with stage as staged:
            smaller = staged.publish()
            moved = catalog.relocate(blob, smaller)
            blobs.remove(blob if moved else smaller)
            return moved
    except (Damaged, NotFound):
        return False  # verify's to report; collecting must go on
