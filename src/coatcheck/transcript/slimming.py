"""One file made slim in place. What it refers to is durable, and recorded, before the file is renamed over."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

import xxhash

from coatcheck.errors import CoatcheckError, InvalidArgument, StoreUnavailable
from coatcheck.externalize.policy import Policy
from coatcheck.ids import clip
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.transcript.formats import Format
from coatcheck.transcript.formats.values import REFS_KEY
from coatcheck.transcript.keep import Keeper, Weigher, fetch_from, new_session_id
from coatcheck.transcript.known import begins_with, known_manifest, not_among, tidy, unmarked_until
from coatcheck.transcript.lines import Layout, look_at, opened, parts
from coatcheck.transcript.manifest import Manifest, Segment, remember
from coatcheck.transcript.place import Place, pieces, write_all
from coatcheck.transcript.report import FileReport
from coatcheck.transcript.scan import Opened
from coatcheck.transcript.splice import Fetch, slim, whole

Progress = Callable[[int, int | None], None]
_MARK: Final = REFS_KEY.encode()
_BUFFER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """How files are made slim: into which session, by which policy, in which format if not the one they show, and
    whether anything is changed at all."""

    session: Session
    policy: Policy | None = None
    format: Format | None = None
    write: bool = True
    progress: Progress | None = None

    @property
    def store(self) -> Store:
        return self.session.store


def slim_file(place: Place, wanted: Wanted) -> FileReport:
    """Make one file slim. Raises where it cannot be read or replaced, and then it is as it was."""
    with place.reading() as old:
        file = opened(old)
        layout, document = look_at(file)
        if wanted.format is not None:
            layout = Layout(wanted.format, layout.is_document)
        size = os.fstat(old).st_size
        if layout.format is None:
            return FileReport(str(place.path), "no transcript", bytes_before=size, bytes_after=size)
        return _Run(place, wanted, old, file, layout, document).report()


@dataclass(slots=True)
class _Measured:
    """Bytes that went by: how many, and their digest."""

    digest: Any
    size: int = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)


class _Run:
    """One file on its way."""

    def __init__(
        self, place: Place, wanted: Wanted, old: int, file: BinaryIO, layout: Layout, document: Opened | None
    ) -> None:
        self._place, self._wanted, self._old, self._file = place, wanted, old, file
        self._format, self._is_document, self._document = layout.format, layout.is_document, document
        self._looked_at = os.fstat(old).st_mtime_ns
        unmarked = unmarked_until(old)
        self._unmarked = unmarked or 0
        found = None if unmarked is not None else known_manifest(wanted.store, old, is_document=layout.is_document)
        self._before = found[1] if found else Manifest(place.real_path, layout.format.name if layout.format else "")
        unfinished = place.unfinished() if wanted.write else []
        self._session_id = found[0] if found else (unfinished or [new_session_id()])[0]
        keeper = Keeper if wanted.write else Weigher
        self._keeper = keeper(wanted.store, self._session_id, session=wanted.session, policy=wanted.policy)
        self._fetch: Fetch = fetch_from(wanted.store)
        self._slim, self._whole = _Measured(xxhash.xxh3_128()), _Measured(hashlib.sha256())
        self._found: _Measured | None = None  # the file as it was, from where that is not what its lines stand for
        self._is_known = True
        self._changed = False
        self._parts = 0
        self._at = self._before.size

    def report(self) -> FileReport:
        if not self._wanted.write:
            self._slim_all(None)
            return self._told("would shrink" if self._changed else "unchanged")
        if os.fstat(self._old).st_size == self._before.size and self._before.segments:
            if self._before.path != self._place.real_path:
                remember(self._wanted.store, self._session_id, replace(self._before, path=self._place.real_path))
            self._check_backup()
            tidy(self._place, self._wanted.store, (self._session_id,))
            return self._told("unchanged")
        tidy(self._place, self._wanted.store, (), reused=self._session_id)
        self._check_backup()
        with self._place.replacement(self._session_id) as new:
            for piece in pieces(self._old, 0, self._before.size):
                write_all(new, piece)
            try:
                with self._wanted.store.batching:
                    self._slim_all(new)
            except BaseException:
                if not self._before.segments:  # nobody else refers to it
                    self._wanted.store.session(self._session_id).end()
                raise
            if not self._changed:
                return self._told("unchanged")
            self._finish(new)
        return self._told("externalized")

    def _slim_all(self, new: int | None) -> None:
        """All parts from where the last run ended, and those that are appended while we are at it."""
        began = os.fstat(self._old)
        end = began.st_size
        if began.st_mtime_ns != self._looked_at:
            self._unmarked = 0
        while self._at < end:
            self._slim_parts(new, end)
            self._at, end = end, os.fstat(self._old).st_size
        now = os.fstat(self._old)
        moved = now.st_mtime_ns != began.st_mtime_ns
        if now.st_size < self._at or (moved and (self._is_document or now.st_size == began.st_size)):
            raise StoreUnavailable(
                f"{clip(self._place.path.name)} was rewritten meanwhile", hint="nothing was changed: try again"
            )

    def _slim_parts(self, new: int | None, end: int) -> None:
        found: list[bytes] = []
        wholes: list[bytes] = []
        slims: list[bytes] = []
        held, at = 0, self._at
        for part in parts(self._file, at, end, is_document=self._is_document):
            at += len(part)
            marked = at > self._unmarked and _MARK in part
            text = part if not marked and self._keeper.passes(part) else self._slim_part(part, marked)
            self._parts += 1
            if held + len(part) > _BUFFER:
                self._take(new, found, wholes, slims)
                found, wholes, slims, held = [], [], [], 0
            found.append(part)
            wholes.append(self._whole_of(part, text) if marked and new is not None else part)
            slims.append(text)
            held += len(part)
            if self._wanted.progress is not None:
                self._wanted.progress(at, end)
        self._take(new, found, wholes, slims)

    def _slim_part(self, part: bytes, marked: bool) -> bytes:
        assert self._format is not None
        document = self._document if self._document and self._document.text == part else None
        text = slim(part, self._format, self._keeper, opened=document, marked=marked).text
        self._changed = self._changed or text != part
        return text

    def _take(self, new: int | None, found: list[bytes], wholes: list[bytes], slims: list[bytes]) -> None:
        """Measure and write what has come together: a line at a time would cost more than the lines do."""
        data = b"".join(slims)
        self._slim.add(data)
        if new is not None:
            if self._found is None and any(one is not other for one, other in zip(found, wholes, strict=True)):
                self._found = _Measured(self._whole.digest.copy(), self._whole.size)
            if self._found is not None:
                self._found.add(b"".join(found))
            self._whole.add(b"".join(wholes))
            write_all(new, data)

    def _whole_of(self, part: bytes, text: bytes) -> bytes:
        """The bytes that a slim part stands for: the part that it was made from, where nobody knows better."""
        try:
            return whole(text, self._fetch)
        except CoatcheckError:
            self._is_known = False
            return part

    def _finish(self, new: int) -> None:
        segment = Segment(
            self._slim.size,
            self._slim.digest.hexdigest(),
            self._whole.size,
            self._whole.digest.hexdigest() if self._is_known else None,
            *((self._found.size, self._found.digest.hexdigest()) if self._found else ()),
        )
        again = bool(self._before.segments)
        had_backup = self._place.size_of_backup() is not None
        backed_up = self._before.backed_up if had_backup or not again else len(self._before.segments)
        after = replace(
            self._before,
            path=self._place.real_path,
            segments=(*self._before.segments, segment),
            backed_up=backed_up,
        )
        if again:
            self._extend_backup()
        remember(self._wanted.store, self._session_id, after)
        self._place.replace(self._old, new, self._session_id, keep=not again)
        late = b"".join(pieces(self._old, self._at, os.fstat(self._old).st_size))
        if late:  # written by somebody who had opened the file before it was replaced
            self._place.append(late)

    def _check_backup(self) -> None:
        """A backup that is there must be ours; what somebody wrote to it since, having it open, comes back."""
        size = self._place.size_of_backup()
        if size is None:
            return
        with self._place.reading_backup() as backup:
            if os.path.samestat(os.fstat(backup), os.fstat(self._old)):
                return  # a crash came between keeping the file and replacing it
            expected = self._before.backup_size
            if not self._before.segments and begins_with(self._old, backup, size):
                self._place.remove_backup()  # the file is whole again, and a crash came before this went
                return
            if not self._before.segments or size < expected:
                raise InvalidArgument(
                    f"{clip(str(self._place.backup))} is there, and is no backup of this file",
                    hint="move it away, or see what it is",
                )
            if size == expected:
                return
            extra = b"".join(pieces(backup, expected, size))
            grown = b"".join(pieces(self._old, self._before.size, os.fstat(self._old).st_size))
        if late := not_among(extra, grown):
            self._place.append(late)

    def _extend_backup(self) -> None:
        """The backup gets what this run makes slim, and nothing of what a run that crashed, or a process that still
        writes to it, has added: that is in the file."""
        size = self._place.size_of_backup()
        if size is not None and size > self._before.backup_size:
            self._place.cut_backup(self._before.backup_size)
        self._place.extend_backup(pieces(self._old, self._before.size, self._at))

    def _told(self, status: Any) -> FileReport:
        before = os.fstat(self._old).st_size
        after = self._before.size + self._slim.size if self._changed else before
        left = self._place.size_of_backup() is not None
        return FileReport(
            str(self._place.path),
            status,
            self._format.name if self._format else None,
            self._parts,
            len(self._keeper.stored),
            before,
            after,
            self._keeper.tokens_saved,
            str(self._place.backup) if left else None,
        )
