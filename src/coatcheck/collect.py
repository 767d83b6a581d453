"""`collect` removes what nothing refers to any more; `verify` reads everything and reports what is
damaged.

Both may run beside any number of readers and writers. A crash at any moment leaves each step either
done or not done.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
from coatcheck.storage import BlobStore, Catalog, Quarantined

if TYPE_CHECKING:
    from coatcheck.store import Store

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes or artifacts that are done, and the total, or None if it is
unknown."""

_Kind = Literal["damaged", "missing", "unreadable", "orphan", "foreign", "catalog"]
TOMBSTONES_KEPT = 7 * 86_400.0
# Seconds to keep copies that a repair set aside, or that nothing refers to.
QUARANTINE = 7 * 86_400.0
COLD_AFTER = 86_400.0
_PIECE = 1 << 20
_SOME = 500  # copies in one query to the catalog
_GIVE_UP = 3  # failures in a row after which a backend is not asked again
_LOOK = 3_600.0  # seconds after which a long-lived process checks again whether a collection is due
_LAST = 5.0  # seconds that an ending process waits for a collection
_LOG = logging.getLogger("coatcheck")
_MENDED = (": set right", ": removed")
_T = TypeVar("_T")


@contextmanager
def collecting_daily(
    store: Store,
    *,
    tenants: Callable[[], Collection[str]] = tuple,
    first_after: float = 60.0,
    every: float = 86_400.0,
) -> Iterator[None]:
    """Collect at most once a day while a long-lived surface runs, in a thread of its own: the
    store, and those of its tenants that the surface serves. A failure is logged, and the next
    attempt follows an hour later."""
    over = threading.Event()

    def work() -> None:
        wait = first_after
        while not over.wait(wait):
            wait = min(every, _LOOK)
            try:
                for tenant in (None, *sorted(tenants())):
                    _collect_if_due(store, tenant, every)
            except StoreClosed:
                return

    thread = threading.Thread(target=work, name="coatcheck-collect", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST)


def _collect_if_due(store: Store, tenant: str | None, every: float) -> None:
    """Collect the store, or that of a tenant, unless it was collected within the last `every`
    seconds. Only `StoreClosed` is raised; other failures are logged."""
    try:
        own = store if tenant is None else store.tenant(tenant)
        report = own.collect_if_due(every=every)
    except StoreClosed:
        raise
    except StoreError as error:
        _LOG.warning("collecting failed: %s", error.code)
        return
    if report is not None:
        _LOG.info("collected: %s", report.to_record())


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """Something that is wrong in a store. `repaired` says whether it has been fixed.

    `damaged` and `missing` content was read twice. `unreadable` content could not be read this
    time: a repair leaves it alone. `orphan` is a file that no artifact refers to, `foreign` a file
    that does not belong to the store, `catalog` an inconsistent row."""

    kind: _Kind
    message: str
    artifact_id: str | None = None
    repaired: bool = False

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


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
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read, and the problems that it found. The store is sound if there are
    none. Copies in quarantine are not a problem: nothing refers to them, and a collection removes
    them after seven days."""

    artifacts: int
    bytes: int
    problems: list[StoreProblem] = field(default_factory=list)
    quarantined_bytes: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


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
    """Expire, remove, sweep, compress: rows before bytes. A copy that cannot be removed or read
    becomes a problem in the report, and the work continues."""
    work = _Upkeep(blobs, catalog, now)
    over_since = now - grace
    freed = catalog.expire(over_since, forget_before=over_since - TOMBSTONES_KEPT, dry_run=dry_run)
    if not dry_run:
        # Copies that stay have no row: a sweep finds them.
        work.try_each(work.unnamed(freed.blobs), blobs.remove)
    swept = leftovers = 0
    if orphans:
        swept = work.clear_orphans(act=not dry_run)
        leftovers = work.leftovers(remove=not dry_run)
        work.note_foreign()
    if orphans and not dry_run:
        work.empty_quarantine(now - QUARANTINE)
    compressed = 0
    if compress and not dry_run:
        compressed = work.compress_cold(now - cold_after, progress)
    if not dry_run:
        catalog.compact()
    return CollectReport(
        dry_run=dry_run,
        refs=freed.refs,
        artifacts=freed.artifacts,
        bytes=freed.bytes,
        orphans=swept,
        leftover_bytes=leftovers,
        compressed=compressed,
        problems=work.problems,
    )


def verify(
    blobs: BlobStore,
    catalog: Catalog,
    *,
    now: float,
    repair: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read every byte and check it. With `repair`, set damaged content aside so that the rest is
    sound; it comes back when the same content is put again. Content that cannot be read at the
    moment is reported and left alone."""
    work = _Upkeep(blobs, catalog, now)
    for message in catalog.check(repair=repair, until=now + QUARANTINE):
        work.add("catalog", message, None, repair and message.endswith(_MENDED))
    # A damaged catalog may have lost the row of a copy, so copies without a row are kept.
    sweeping = repair and all(problem.repaired for problem in work.problems)
    read = work.read_all(repair=repair, progress=progress)
    work.restore_sound(repair=repair)
    work.report_orphans(act=sweeping)
    leftovers = work.leftovers(remove=sweeping)
    if leftovers:
        work.add("orphan", f"{leftovers} bytes of puts that never finished", None, sweeping)
    work.note_foreign()
    quarantined = sum(one.size for one in work.quarantined())
    return VerifyReport(read.artifacts, read.bytes, work.problems, quarantined)


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A copy without a row. `was_set_aside` says whether an earlier repair took it out of use."""

    blob: Blob
    was_set_aside: bool


@dataclass(frozen=True, slots=True)
class _Read:
    """How much a verification has read."""

    artifacts: int
    bytes: int


class _Upkeep:
    """The steps of `collect` and `verify`, and the problems that they met. Work continues after
    each problem, until the backend fails several times in a row."""

    def __init__(self, blobs: BlobStore, catalog: Catalog, now: float) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._now = now
        self._failures = 0
        self._apart: list[Blob] | None = None  # the copies in quarantine, once they are listed
        self.problems: list[StoreProblem] = []

    @property
    def is_over(self) -> bool:
        return self._failures >= _GIVE_UP

    def add(
        self, kind: _Kind, message: str, digest: str | None = None, repaired: bool = False
    ) -> None:
        self.problems.append(StoreProblem(kind, message, digest, repaired))

    def note(self, error: StoreError | OSError) -> str:
        """Count a failure and return its message. Raises if the work cannot continue."""
        if isinstance(error, OSError):
            error = storage_error(error, "maintaining the store")
        if isinstance(error, StoreClosed):
            raise error
        if isinstance(error, StoreFull):
            self._failures = _GIVE_UP
        elif isinstance(error, StoreUnavailable) and error.may_retry:
            self._failures += 1
        return error.message

    def attempt(
        self, act: Callable[[], _T], otherwise: _T, digest: str | None = None, doing: str = ""
    ) -> _T:
        """Return the result of a call, or `otherwise` if it fails. The failure becomes a problem,
        unless what the call works on was removed meanwhile."""
        try:
            return act()
        except NotFound:
            return otherwise
        except (StoreError, OSError) as error:
            self.add("unreadable", doing + self.note(error), digest)
            return otherwise

    def try_one(self, blob: Blob, act: Callable[[Blob], bool | None]) -> bool:
        done = None if self.is_over else self.attempt(lambda: bool(act(blob)), None, blob.digest)
        if done is not None:
            self._failures = 0
        return done is True

    def try_each(self, every: Iterable[Blob], act: Callable[[Blob], bool | None]) -> int:
        return sum(self.try_one(blob, act) for blob in every)

    def orphans(self) -> Iterator[_Orphan]:
        """Yield copies without a row that are not being published and that no repair keeps
        aside."""
        copies = self._blobs.places()
        while not self.is_over:
            page = self._next_copies(copies)
            if not page:
                return
            found = self._without_row(page)
            if found and not self._make_durable():
                continue
            for orphan in found:
                # The second look counts: once a copy is no longer being published, its row exists,
                # or never will.
                if self.try_one(orphan.blob, partial(self._blobs.sweep, remove=False)):
                    yield from self._without_row([orphan.blob])

    def _next_copies(self, copies: Iterator[Blob]) -> list[Blob]:
        nothing: list[Blob] = []
        return self.attempt(
            lambda: list(islice(copies, _SOME)), nothing, doing="the copies cannot be listed: "
        )

    def _without_row(self, copies: Sequence[Blob]) -> list[_Orphan]:
        """Return those copies that have no row and that no repair keeps aside."""
        found = list(self.unnamed(copies))
        # Queried after the rows: a row is removed in the transaction that sets its blob aside.
        aside = {
            one.blob.digest: one for one in self._catalog.aside({copy.digest for copy in found})
        }
        orphans = []
        for copy in found:
            one = aside.get(copy.digest)
            is_kept = one is not None and one.refs > 0 and one.until > self._now
            if not is_kept:
                orphans.append(_Orphan(copy, was_set_aside=one is not None))
        return orphans

    def _make_durable(self) -> bool:
        """Make the catalog survive a power cut, which must not bring back a row of a copy that is
        cleared away."""

        def make_durable() -> bool:
            self._catalog.make_durable()
            return True

        return self.attempt(make_durable, False)

    def clear_orphans(self, *, act: bool) -> int:
        """Clear away all orphans, or with `act` false only count them. Returns their number."""
        return self.try_each(
            (orphan.blob for orphan in self.orphans()), partial(self.clear_away, act=act)
        )

    def report_orphans(self, *, act: bool) -> None:
        """Report all orphans, except those that a repair had set aside. With `act`, clear all of
        them away."""
        message = "a file that no artifact refers to" + (": cleared away" if act else "")
        for orphan in self.orphans():
            is_cleared = self.try_one(orphan.blob, partial(self.clear_away, act=act))
            if is_cleared and not orphan.was_set_aside:
                self.add("orphan", message, orphan.blob.digest, act)

    def unnamed(self, copies: Sequence[Blob]) -> Iterator[Blob]:
        """Yield those copies that the catalog, asked again, does not name."""
        for at in range(0, len(copies), _SOME):
            some = copies[at : at + _SOME]
            known = self._catalog.places({copy.digest for copy in some})
            yield from (copy for copy in some if known.get(copy.digest) != copy.place)

    def clear_away(self, orphan: Blob, *, act: bool) -> bool:
        """Remove a copy without a row if the catalog has another copy that is sound, or if
        tombstones say that all refs to it expired. Otherwise nobody can say that the bytes are not
        needed (the catalog may have lost a row, or may be restored from a backup): the copy goes to
        the quarantine."""
        if not act:
            return self._blobs.sweep(orphan, remove=False)
        row = next(iter(self._catalog.blobs(orphan.digest)), None)
        if row is not None and row[0].place != orphan.place and self._failure(*row) is None:
            return self._blobs.sweep(orphan)
        refs = self._catalog.refs(digest=orphan.digest)
        if row is None and refs and all(one.gone == "expired" for one in refs):
            return self._blobs.sweep(orphan)
        return self._blobs.quarantine(orphan, self._now)

    def leftovers(self, *, remove: bool) -> int:
        return self.attempt(
            lambda: self._blobs.leftovers(remove=remove, is_named=self._catalog.is_named), 0
        )

    def quarantined(self) -> list[Quarantined]:
        return self.attempt(lambda: list(self._blobs.quarantined()), [])

    def empty_quarantine(self, before: float) -> None:
        """Discard the copies that went to the quarantine before this time."""
        self.try_each(
            (one.blob for one in self.quarantined() if one.since <= before), self._blobs.discard
        )

    def take_back(self, blob: Blob) -> bool:
        """Look for a missing or damaged blob in the quarantine. Returns whether a sound copy is in
        use again."""
        if self._apart is None:
            self._apart = [one.blob for one in self.quarantined()]
        for one in [one for one in self._apart if one.digest == blob.digest]:
            copy = replace(blob, coding=one.coding, place=one.place)
            # Another repair may be faster.
            self.attempt(partial(self._blobs.take_back, one), False, blob.digest)
            if self._failure(copy, None) is None and (
                copy.place == blob.place or self._catalog.relocate(blob, copy)
            ):
                return True
        return False

    def note_foreign(self) -> None:
        self.attempt(
            lambda: self.problems.extend(
                StoreProblem("foreign", one) for one in self._blobs.foreign()
            ),
            None,
        )

    def read_all(self, *, repair: bool, progress: Progress | None) -> _Read:
        """Read all artifacts, and report those that are damaged. With `repair`, set them aside."""
        total = self._catalog.totals().stored_bytes
        unknown: Mapping[str, Collection[int]] = {}
        doubtful = self.attempt(self._catalog.doubtful_sizes, unknown)
        artifacts = size = unread = 0
        for row, content in self._catalog.blobs():
            blob = self.sized(row, content, doubtful.get(row.digest, ()), repair=repair)
            if self.is_over and blob.coding != "inline":
                unread += 1
            else:
                self.check(blob, content, repair=repair)
            artifacts += 1
            size += blob.size
            if progress is not None:
                progress(size, max(total, size))
        if unread:
            self.add(
                "unreadable",
                f"{unread} more artifacts were not read, because the store does not respond",
            )
        return _Read(artifacts, size)

    def check(self, blob: Blob, content: bytes | StoreError | None, *, repair: bool) -> None:
        """Read a blob, and report what is wrong with it. With `repair`, use a copy from the
        quarantine instead, or set it aside."""
        problem = self.examine(blob, content)
        if problem is None:
            return
        repaired = False
        if repair and problem.kind in ("damaged", "missing"):
            repaired = self.take_back(blob) or self.lose(blob, self._now + QUARANTINE)
        self.add(problem.kind, problem.message, blob.digest, repaired)

    def examine(self, blob: Blob, content: bytes | StoreError | None) -> StoreProblem | None:
        """Return what is wrong with a blob. Content that fails is read again, with its current row:
        it may have been removed, repaired or compressed meanwhile, and one bad read is not
        damage."""
        looked: str | None = None
        while True:
            problem = self._failure(blob, content)
            if problem is None or problem.kind == "unreadable" or looked == blob.place:
                return problem
            looked = blob.place
            now = next(iter(self._catalog.blobs(blob.digest)), None)
            if now is None:
                return None
            blob, content = now

    def _failure(self, blob: Blob, content: bytes | StoreError | None) -> StoreProblem | None:
        """Read a blob once and return what is wrong with it."""
        try:
            running = hashlib.sha256()
            if isinstance(content, StoreError):
                raise content
            if blob.coding != "inline":
                for at in range(0, blob.size, _PIECE):
                    running.update(self._blobs.read(blob, at, _PIECE))
                self._failures = 0
            elif content is None:
                return StoreProblem("missing", "its content is missing from the database")
            else:
                running.update(content)
        except NotFound as error:
            return StoreProblem("missing", error.message)
        except Damaged as error:
            return StoreProblem("damaged", error.message)
        except (StoreError, OSError) as error:
            return StoreProblem("unreadable", f"cannot be read: {self.note(error)}")
        is_sound = running.hexdigest() == blob.digest
        return None if is_sound else StoreProblem("damaged", "the bytes do not match their digest")

    def sized(
        self,
        blob: Blob,
        content: bytes | StoreError | None,
        sizes: Collection[int],
        *,
        repair: bool,
    ) -> Blob:
        """Return a blob with the one of its sizes that its bytes confirm, and correct the others.
        `sizes` are those that differ from its own."""
        if not sizes or self.is_over:
            return blob
        for size in (blob.size, *sizes):
            one = replace(blob, size=size)
            if (
                size == len(content)
                if isinstance(content, bytes)
                else self._failure(one, content) is None
            ):
                done = repair and self.attempt(partial(self._set_size, one), False, blob.digest)
                self.add(
                    "catalog",
                    "its size is wrong" + (": set right" if done else ""),
                    blob.digest,
                    done,
                )
                return one
        return blob

    def _set_size(self, blob: Blob) -> bool:
        self._catalog.set_size(blob.digest, blob.size)
        return True

    def lose(self, blob: Blob, until: float) -> bool:
        try:
            self._catalog.lose(blob, until=until)
        except (StoreError, OSError) as error:
            self.note(error)
            return False
        return True

    def restore_sound(self, *, repair: bool) -> None:
        """Look again at copies that an earlier repair set aside. Those that are sound now go back
        into use."""
        for one in self._catalog.aside():
            blob = one.blob
            if (
                not one.refs
                or blob.coding == "inline"
                or not blob.place
                or self.is_over
                or self._failure(blob, None)
            ):
                continue
            restored = repair and self._catalog.restore(blob) > 0
            message = "was set aside by an earlier repair, and is sound" + (
                ": set right" if restored else ""
            )
            self.add("catalog", message, blob.digest, restored)

    def compress_cold(self, before: float, progress: Progress | None) -> int:
        """Compress the blobs that were last used before this time. Returns the number of those that
        became smaller."""
        compressed = 0
        for done, blob in enumerate(self._catalog.cold(before), 1):
            compressed += self.try_one(blob, self.compress)
            if progress is not None:
                progress(done, None)
            if self.is_over:
                break
        return compressed

    def compress(self, blob: Blob) -> bool:
        try:
            stage = self._blobs.compress(blob)
            if stage is None:
                return False
            with stage as staged:
                smaller = staged.publish()
                # The new copy is read before the old one goes, and the catalog is asked again which
                # one it names.
                problem = self._failure(smaller, None)
                if problem is None and self._catalog.relocate(blob, smaller):
                    for copy in self.unnamed([blob]):
                        self._blobs.remove(copy)
                    return True
                for copy in self.unnamed([smaller]):
                    self._blobs.remove(copy)
                if problem is not None:
                    self.add(
                        "unreadable",
                        f"its compressed copy did not read back: {problem.message}",
                        blob.digest,
                    )
                return False
        except (Damaged, NotFound):
            return False  # verify reports it; the collection continues
