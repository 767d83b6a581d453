"""Expiry, repair and compression, in terms of the rows of a catalog."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any, Final

from coatcheck.errors import StoreFull
from coatcheck.ids import digest_of
from coatcheck.refs import Blob
from coatcheck.storage import expiry
from coatcheck.storage.entries import ASIDE, RECORDS, Entry, Freed, Note, Row, SetAside
from coatcheck.storage.rows import Rows

BATCH: Final = 500
"""Maximum number of rows that one change removes, if there is enough space."""


class Upkeep(Rows):
    """Expiry, repair and compression."""

    def expire(self, at: float, *, forget_before: float, dry_run: bool = False) -> Freed:
        """Turn every ref that had expired at `at` into a tombstone. Delete the records of sessions
        that had expired, tombstones and empty sessions that expired before `forget_before`, and
        unreferenced blobs."""
        if dry_run:
            return self._would_expire(at)

        def some(limit: int, _: object) -> tuple[Freed, bool | None]:
            dead = self._due(at)[:limit]
            return self._bury(dead, "expired"), bool(dead) or None

        freed = self._in_steps("expiring", some)
        self._in_steps("expiring", partial(self._forget_sessions, at, forget_before))
        self._drop_aside(at)
        return freed

    def _would_expire(self, at: float) -> Freed:
        """Return what `expire` would free."""
        dead = self._due(at)
        known = filter(None, map(self.blob, {one.ref.artifact_id for one in dead}))
        gone = [
            blob
            for blob in known
            if all(one.gone or one in dead for one in self.refs(digest=blob.digest))
        ]
        return Freed.of(len(dead), gone)

    def _due(self, at: float) -> list[Entry]:
        """Return live refs that had expired at `at`, at least some of them if there are any."""
        due = []
        for info in self.sessions():
            for one in self.refs(info.session_id):
                end = expiry.ref_end(info.expires(), one.ref.expires, pinned=one.ref.pinned)
                if not one.gone and expiry.is_over(end, at):
                    due.append(one)
        return due

    def _in_steps(
        self, doing: str, step: Callable[[int, Any], tuple[Freed, Any]], start: object = True
    ) -> Freed:
        """Remove rows in several changes. `step` removes at most the given number, beginning at a
        place, and returns the place where the next step begins, or None at the end. The changes
        become smaller if the space is too short for larger ones."""
        freed, limit, place = Freed(), BATCH, start
        while place is not None:
            try:
                some, place = self.change(doing, partial(step, limit, place), effect="free")
                freed += some
            except StoreFull:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
        return freed

    def _forget_sessions(
        self, at: float, before: float, limit: int, _: object
    ) -> tuple[Freed, bool | None]:
        """Drop records of sessions that had expired at `at`, and tombstones and rows of those that
        had at `before`."""
        for info in list(self.sessions()):
            end = info.expires()
            if end is None or not expiry.is_over(end, at):
                continue
            going: list[Row] = [*self.notes(info.session_id, *RECORDS, limit=limit)]
            if not going and end < before:
                refs = self.refs(info.session_id)
                going += [one for one in refs if one.gone][:limit]
                if len(going) == len(refs):
                    going.append(info)
            self.drop(*going)
            limit -= len(going)
            if limit <= 0:
                return Freed(), True
        return Freed(), None

    def _drop_aside(self, at: float) -> None:
        over = [one.note() for one in self.aside() if not one.refs or one.until <= at]
        if over:
            self.change("expiring", lambda: self.drop(*over), effect="free")

    def relocate(self, old: Blob, new: Blob) -> bool:
        """Switch to another copy of the same blob, if the catalog still references the old one."""

        def work() -> bool:
            known = self.blob(old.digest)
            if known is None or known.place != old.place:
                return False
            self.save(new)
            return True

        return self.change("moving a blob", work, effect="move")

    def doubtful_sizes(self) -> Mapping[str, Collection[int]]:
        """Return, by digest, the sizes of refs that differ from the size of their blob. A database
        that checks its own pages need not look."""
        return {}

    def set_size(self, digest: str, size: int) -> None:
        """Set the size of a blob and of its refs to the correct one."""

    def lose(self, blob: Blob, *, until: float = 0.0) -> int:
        """Turn refs to a damaged or missing blob into tombstones, and set the blob `aside`. A later
        put of the same content restores the refs. Content in the catalog itself is checked again in
        the same transaction; if it is valid, nothing changes. Returns the number of refs."""

        def work() -> int:
            refs = [one for one in self.refs(digest=blob.digest) if not one.gone]
            known, content = next(iter(self.blobs(blob.digest)), (None, None))
            held = content if isinstance(content, bytes) else None
            if (
                known is None
                or known.place != blob.place
                or (held is not None and digest_of(held) == blob.digest)
            ):
                return 0  # another put has healed it in the meantime
            self.save(SetAside(blob, until, held).note())
            return self._bury(refs, "damaged").refs

        return self.change("setting a damaged blob aside", work, effect="free")

    def aside(self, digests: Iterable[str] | None = None) -> list[SetAside]:
        """Return the blobs set aside by `lose` and `check`, all or those of these digests. `expire`
        deletes entries past their `until`, and entries without tombstones, because their refs were
        restored or removed."""
        wanted = None if digests is None else set(digests)
        found = [SetAside.of(one) for one in self.notes("", *ASIDE)]
        found = [one for one in found if wanted is None or one.blob.digest in wanted]
        return [one._replace(refs=len(self._damaged(one.blob.digest))) for one in found]

    def restore(self, blob: Blob) -> int:
        """Undo `lose` for a copy that turned out to be valid. Returns the number of restored refs;
        returns 0 and changes nothing if the catalog has another copy by now or no ref needs it."""

        def work() -> int:
            if not self._damaged(blob.digest) or self.blob(blob.digest) is not None:
                return 0
            self.save(blob)
            self.drop(SetAside(blob, 0.0).note())
            return self._revive(blob.digest)

        return self.change("restoring a blob", work, effect="move")

    def cold(self, before: float) -> Iterator[Blob]:
        """Yield uncompressed blobs outside the catalog that were last used before this time. A
        completed walk is remembered: its blobs are yielded again only after they were used
        again."""
        yield from self._unused(float(self._note("", "cold") or -inf), before)
        walked = Note("", "cold", repr(before).encode())
        self.change("noting what was compressed", lambda: self.save(walked), effect="free")

    def _unused(self, after: float, until: float) -> Iterator[Blob]:
        """Yield uncompressed blobs outside the catalog that were last used between these times."""
        return iter(
            [
                blob
                for blob, _ in self.blobs()
                if blob.coding == "raw" and after < blob.used <= until
            ]
        )

    def make_durable(self) -> None:
        """Make everything that reads can see survive a power cut, whatever the durability."""

    def compact(self) -> None:
        """Return free space to the file system, and overwrite removed content."""
