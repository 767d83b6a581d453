"""`collect` removes what nothing refers to any more; `verify` reads everything and reports what is damaged.

Both may run beside any number of readers and writers. A crash at any moment leaves each step either done or not done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from coatcheck.errors import (
    Damaged,
    NotFound,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    storage_error,
)
from coatcheck.refs import Blob
from coatcheck.storage import BlobStore, Catalog

Progress = Callable[[int, int | None], None]
"""Called with the bytes or artifacts that are done, and the total, None if it is unknown."""

TOMBSTONES_KEPT = 7 * 86_400.0
QUARANTINE = 7 * 86_400.0  # seconds that a repair keeps the copies that it set aside
COLD_AFTER = 86_400.0
_PIECE = 1 << 20
_SOME = 500  # copies in one query to the catalog
_GIVE_UP = 3  # failures in a row after which a backend is not asked again
_MENDED = (": set right", ": removed")


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """Something that is wrong in a store. `repaired` says whether it has been fixed.

    `damaged` and `missing` content was read twice. `unreadable` content could not be read this time: a repair leaves it
    alone. `orphan` is a file that no artifact refers to, `foreign` a file that does not belong to the store, `catalog`
    an inconsistent row."""

    kind: Literal["damaged", "missing", "unreadable", "orphan", "foreign", "catalog"]
    message: str
    artifact_id: str | None = None
    repaired: bool = False

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection freed, or with `dry_run` would free, and the problems that it met."""

    dry_run: bool
    refs: int = 0
    artifacts: int = 0
    bytes: int = 0
    orphans: int = 0
    leftover_bytes: int = 0
    compressed: int = 0
    problems: list[StoreProblem] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__slots__}
        return record | {"problems": [problem.to_record() for problem in self.problems]}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read, and the problems that it found. The store is sound if there are none."""

    artifacts: int
    bytes: int
    problems: list[StoreProblem] = field(default_factory=list)

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
    """Expire, remove, sweep, compress: rows before bytes. A copy that cannot be removed or read becomes a problem in
    the report, and the work continues."""
    trouble = _Problems()
    freed = catalog.expire(now - grace, forget_before=now - grace - TOMBSTONES_KEPT, dry_run=dry_run)
    if not dry_run:
        trouble.try_each(freed.blobs, blobs.remove)  # copies that stay have no row: a sweep finds them
    swept = leftovers = 0
    if orphans:
        found = (orphan for orphan, _ in _orphans(blobs, catalog, now, trouble))
        swept = trouble.try_each(found, lambda blob: blobs.sweep(blob, remove=not dry_run))
        leftovers = _leftovers(blobs, trouble, remove=not dry_run)
        _note_foreign(blobs, trouble)
    compressed = 0
    if compress and not dry_run:
        for done, blob in enumerate(catalog.cold(now - cold_after), 1):
            compressed += trouble.try_one(blob, lambda blob: _compress(blobs, catalog, blob))
            if progress:
                progress(done, None)
            if trouble.is_over:
                break
    if not dry_run:
        catalog.compact()
    return CollectReport(
        dry_run, freed.refs, freed.artifacts, freed.bytes, swept, leftovers, compressed, trouble.problems
    )


def verify(
    blobs: BlobStore, catalog: Catalog, *, now: float, repair: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte and check it. With `repair`, set damaged content aside so that the rest is sound; it comes back
    when the same content is put again. Content that cannot be read at the moment is reported and left alone."""
    until, trouble = now + QUARANTINE, _Problems()
    trouble.problems = [
        StoreProblem("catalog", message, None, repair and message.endswith(_MENDED))
        for message in catalog.check(repair=repair, until=until)
    ]
    # A damaged catalog may have lost the row of a copy, so copies without a row are kept.
    sweeping = repair and all(problem.repaired for problem in trouble.problems)
    total = catalog.totals().stored_bytes
    checked = seen = unread = 0
    for blob, content in catalog.blobs():
        if trouble.is_over and blob.coding != "inline":
            unread += 1
        elif (problem := _examine(blobs, catalog, blob, content, trouble)) is not None:
            repaired = repair and problem.kind in ("damaged", "missing") and _lose(catalog, blob, until, trouble)
            trouble.problems.append(StoreProblem(problem.kind, problem.message, blob.digest, repaired))
        checked += 1
        seen += blob.size
        if progress:
            progress(seen, max(total, seen))
    if unread:
        message = f"{unread} more artifacts were not read, because the store does not respond"
        trouble.problems.append(StoreProblem("unreadable", message))
    _restore_sound(blobs, catalog, trouble, repair=repair)
    for orphan, was_set_aside in _orphans(blobs, catalog, now, trouble):
        if trouble.try_one(orphan, lambda blob: blobs.sweep(blob, remove=sweeping)) and not was_set_aside:
            message = "a file that no artifact refers to" + (": removed" if sweeping else "")
            trouble.problems.append(StoreProblem("orphan", message, orphan.digest, sweeping))
    leftovers = _leftovers(blobs, trouble, remove=sweeping)
    if leftovers:
        trouble.problems.append(
            StoreProblem("orphan", f"{leftovers} bytes of puts that never finished", None, sweeping)
        )
    _note_foreign(blobs, trouble)
    return VerifyReport(checked, seen, trouble.problems)


class _Problems:
    """The problems that were met. Work continues after each, until the backend fails several times in a row."""

    def __init__(self) -> None:
        self.problems: list[StoreProblem] = []
        self._failures = 0

    @property
    def is_over(self) -> bool:
        return self._failures >= _GIVE_UP

    def note(self, error: StoreError | OSError, digest: str | None = None) -> str:
        """Count a failure and return its message. Raises if the work cannot go on."""
        if isinstance(error, OSError):
            error = storage_error(error, "maintaining the store")
        if isinstance(error, StoreClosed):
            raise error
        if isinstance(error, StoreFull):
            self._failures = _GIVE_UP
        elif isinstance(error, StoreUnavailable) and error.may_retry:
            self._failures += 1
        return error.message

    def answered(self) -> None:
        self._failures = 0

    def try_one(self, blob: Blob, act: Callable[[Blob], bool | None]) -> bool:
        if self.is_over:
            return False
        try:
            done = bool(act(blob))
        except (StoreError, OSError) as error:
            self.problems.append(StoreProblem("unreadable", self.note(error), blob.digest))
            return False
        self.answered()
        return done

    def try_each(self, every: Iterable[Blob], act: Callable[[Blob], bool | None]) -> int:
        return sum(self.try_one(blob, act) for blob in every)


def _orphans(blobs: BlobStore, catalog: Catalog, now: float, trouble: _Problems) -> Iterator[tuple[Blob, bool]]:
    """Copies without a row that are not being published, and that no repair keeps aside. Each comes with whether a
    repair had set it aside earlier."""
    replaced: set[str] = set()

    def unnamed(copies: Sequence[Blob]) -> list[Blob]:
        known = catalog.places({copy.digest for copy in copies})
        found = [copy for copy in copies if known.get(copy.digest) != copy.place]
        # Asked after the places: a row is removed in the transaction that sets its blob aside.
        aside = catalog.aside({copy.digest for copy in found})
        kept = {one.blob.digest for one in aside if one.refs and one.until > now}
        replaced.update(one.blob.digest for one in aside)
        return [copy for copy in found if copy.digest not in kept]

    copies = blobs.places()
    while not trouble.is_over:
        try:
            some = list(islice(copies, _SOME))
        except (StoreError, OSError) as error:
            trouble.problems.append(StoreProblem("unreadable", f"the copies cannot be listed: {trouble.note(error)}"))
            return
        if not some:
            return
        # The second look counts: once a copy is no longer being published, its row exists, or never will.
        for copy in unnamed(some):
            if trouble.try_one(copy, lambda copy: blobs.sweep(copy, remove=False)) and unnamed([copy]):
                yield copy, copy.digest in replaced


def _leftovers(blobs: BlobStore, trouble: _Problems, *, remove: bool) -> int:
    try:
        return blobs.leftovers(remove=remove)
    except (StoreError, OSError) as error:
        trouble.problems.append(StoreProblem("unreadable", trouble.note(error)))
        return 0


def _note_foreign(blobs: BlobStore, trouble: _Problems) -> None:
    try:
        trouble.problems.extend(StoreProblem("foreign", message) for message in blobs.foreign())
    except (StoreError, OSError) as error:
        trouble.problems.append(StoreProblem("unreadable", trouble.note(error)))


def _examine(
    blobs: BlobStore, catalog: Catalog, blob: Blob, content: bytes | StoreError | None, trouble: _Problems
) -> StoreProblem | None:
    """Return what is wrong with a blob. Content that fails is read again, with its current row: it may have been
    removed, repaired or compressed meanwhile, and one bad read is not damage."""
    looked: str | None = None
    while True:
        problem = _failure(blobs, blob, content, trouble)
        if problem is None or problem.kind == "unreadable" or looked == blob.place:
            return problem
        looked = blob.place
        now = next(iter(catalog.blobs(blob.digest)), None)
        if now is None:
            return None
        blob, content = now


def _failure(
    blobs: BlobStore, blob: Blob, content: bytes | StoreError | None, trouble: _Problems
) -> StoreProblem | None:
    """Read a blob once and return what is wrong with it."""
    try:
        running = hashlib.sha256()
        if isinstance(content, StoreError):
            raise content
        if blob.coding != "inline":
            for at in range(0, blob.size, _PIECE):
                running.update(blobs.read(blob, at, _PIECE))
            trouble.answered()
        elif content is None:
            return StoreProblem("missing", "its content is missing from the database")
        else:
            running.update(content)
    except NotFound as error:
        return StoreProblem("missing", error.message)
    except Damaged as error:
        return StoreProblem("damaged", error.message)
    except (StoreError, OSError) as error:
        return StoreProblem("unreadable", f"cannot be read: {trouble.note(error)}")
    return (
        None if running.hexdigest() == blob.digest else StoreProblem("damaged", "the bytes do not match their digest")
    )


def _lose(catalog: Catalog, blob: Blob, until: float, trouble: _Problems) -> bool:
    try:
        catalog.lose(blob, until=until)
    except (StoreError, OSError) as error:
        trouble.note(error)
        return False
    return True


def _restore_sound(blobs: BlobStore, catalog: Catalog, trouble: _Problems, *, repair: bool) -> None:
    """Look again at copies that an earlier repair set aside. Those that are sound now go back into use."""
    for one in catalog.aside():
        blob = one.blob
        if not one.refs or blob.coding == "inline" or not blob.place or trouble.is_over:
            continue
        if _failure(blobs, blob, None, trouble):
            continue
        restored = repair and catalog.restore(blob) > 0
        message = "was set aside by an earlier repair, and is sound" + (": set right" if restored else "")
        trouble.problems.append(StoreProblem("catalog", message, blob.digest, restored))


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
        return False  # verify reports it; the collection continues
