"""One run of `externalize` on one file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

import xxhash

from coatcheck.collect import Progress
from coatcheck.errors import (
    AmbiguousPointer,
    CoatcheckError,
    InvalidArgument,
    NotFound,
    StoreUnavailable,
)
from coatcheck.externalize.policy import Policy
from coatcheck.ids import MIN_PREFIX, SCHEME, clip
from coatcheck.messages import PLAIN, Format
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.transcript.file import pointers_in
from coatcheck.transcript.keep import (
    Keeper,
    Manifest,
    Segment,
    fetch_from,
    new_session_id,
    record_manifest,
    sessions_for,
)
from coatcheck.transcript.lines import batches, pieces, settled_size
from coatcheck.transcript.locked import LockedFile, Measured, clean_up
from coatcheck.transcript.reports import FileReport, Status
from coatcheck.transcript.splice import (
    MARK,
    Fetch,
    Slimmed,
    refs_of,
    sessions_in,
    slim_all,
    whole,
)
from coatcheck.transcript.swap import SwapFile, write_all

_SCHEME: Final = SCHEME.encode()
_MAX_MISSES: Final = 10_000  # pointers of a file that may resolve to nothing


class Externalizing(LockedFile):
    """One run of `externalize` on one file. What the new file refers to is durable before the
    rename."""

    def __init__(
        self,
        file: SwapFile,
        handle: int,
        session: Session,
        policy: Policy | None,
        fmt: Format | None,
        progress: Progress | None,
        *,
        dry_run: bool,
    ) -> None:
        super().__init__(file, handle, progress)
        self.layout = replace(self.layout, format=fmt or self.layout.format)
        self._format = self.layout.format or PLAIN
        self._session, self._store, self._dry_run = session, session.store, dry_run
        found = self.manifest_in(self._store)
        self._before = found[1] if found else Manifest(file.real_path, self._format.name)
        unfinished = [] if dry_run else file.unfinished()
        self._session_id = found[0] if found else (unfinished or [new_session_id()])[0]
        self._keeper = Keeper(
            self._store, self._session_id, session=session, policy=policy, dry_run=dry_run
        )
        self._fetch: Fetch = fetch_from(self._store)
        self._slim, self._whole = Measured(xxhash.xxh3_128()), Measured(hashlib.sha256())
        self._found: Measured | None = (
            None  # the bytes as found, if they differ from the whole bytes
        )
        self._is_known = True
        self._changed = False
        self._pointers: dict[str, None] = {}  # pointers in the file
        self._shown: set[str] = set()  # ids of payloads that the agent's session can read already
        self._hidden: set[str] = set()  # ids of payloads that no model was shown
        self._named: dict[str, None] = {}  # sessions that lines of the file name
        self._at = self._start = self._before.size

    def run(self) -> FileReport:
        if self.layout.format is None:
            return self.report("no transcript", self.size)
        if self._dry_run:
            self._slim_all(None)
            return self._done("would shrink")
        if self.is_slim:
            self._lend()
        if os.fstat(self.handle).st_size == self._start and self._before.segments:
            if self._before.path != self.file.real_path:
                record_manifest(
                    self._keeper.own_session(), replace(self._before, path=self.file.real_path)
                )
            self._check_backup()
            clean_up(self.file, self._store, (self._session_id,))
        else:
            clean_up(self.file, self._store, (), reused=self._session_id)
            self._check_backup()
            self._rewrite()
        if not self._changed:
            self._hold_pointers()
        return self._done("externalized")

    def _rewrite(self) -> None:
        with self.file.replacement(self._session_id) as new:
            for piece in pieces(self.handle, 0, self._start):
                write_all(new, piece)
            try:
                with self._store.batching:
                    self._slim_all(new)
            except BaseException:
                if not self._before.segments:  # nothing else refers to it
                    self._store.session(self._session_id).end()
                raise
            if self._changed:
                self._finish(new)

    def _hold_pointers(self) -> None:
        """Keep what the pointers in the file open, besides its own payloads, and let the agent's
        session read it."""
        wanted = [one for one in self._pointers if _start(one) not in self._shown]
        if not wanted:
            return
        known = self._known_sessions()
        lent: set[str] = set()
        if known:
            lent = {ref.artifact_id for ref in self._session.lent() if ref.session_id in known}
        misses = 0
        for pointer in wanted:
            if misses == _MAX_MISSES:
                return
            with contextlib.suppress(AmbiguousPointer, NotFound):  # or it has expired meanwhile
                ref = self._session.ref(pointer)
                if ref is not None and ref.artifact_id not in lent:
                    self._hold(ref, known)
                if ref is None:
                    misses += 1
                    if _start(pointer) not in self._hidden:
                        self._lend_from(known, pointer)

    def _hold(self, ref: Ref, known: list[str]) -> None:
        """Let the transcript keep an artifact of the agent's session, unless one of its `known`
        sessions has it. If there is none, the transcript gets one."""
        if self._lend_from(known, ref):
            return
        if not known:
            known.append(self._session_id)
            record_manifest(self._keeper.own_session(), self._before)
        self._session.grant(ref, to=known[0])

    def _lend_from(self, session_ids: Sequence[str], target: Ref | str) -> bool:
        """Let the agent's session read an artifact of the first of these sessions that has it.
        Return whether one has it."""
        return any(_lends(self._store.session(one), target, self._session) for one in session_ids)

    def _known_sessions(self) -> list[str]:
        """Return the sessions of this store that have what the file refers to, its own first."""
        own = [self._session_id] if self._changed or self._before.segments else []
        named = [one for one in self._named if one not in own and self._keeper.is_ours({one})]
        return [*own, *named] or sessions_for(self._store, self.file.real_path)

    def _note_pointers(self, parts: Sequence[Slimmed]) -> None:
        """Note the pointers in slim parts, and which of them belong to their own payloads."""
        refs = [ref for one in parts for ref in one.refs]
        for ref in refs:
            self._named[ref.session] = None
            ids = self._shown if self._format.is_shown(ref.path) else self._hidden
            ids.add(ref.id[:MIN_PREFIX])
        found = Counter(chain.from_iterable([pointers_in(one.text) for one in parts]))
        stubs = Counter([SCHEME + ref.id[:MIN_PREFIX] for ref in refs])
        self._pointers.update(dict.fromkeys(found - stubs))

    def _lend(self) -> None:
        """Grant the agent's session what the file already refers to: the session may have ended, or
        be a new one."""
        lent = {(ref.session_id, ref.artifact_id) for ref in self._session.lent()}
        with self._store.batching:
            for part in self.parts(0, os.fstat(self.handle).st_size):
                refs = refs_of(part)
                self._note_pointers([Slimmed(part, refs)])
                self._named.update(dict.fromkeys(() if refs else sessions_in(part)))
                for ref in refs:
                    if (ref.session, ref.id) not in lent and self._format.is_shown(ref.path):
                        lent.add((ref.session, ref.id))
                        _lends(self._store.session(ref.session), ref.id, self._session)

    def _slim_all(self, new: int | None) -> None:
        """Process all parts since the last run, and those that are appended during this one."""
        began = os.fstat(self.handle)
        end = settled_size(self.handle)
        while self._at < end:
            for lines in batches(self.reader, self._at, end, is_document=self.layout.is_document):
                self._slim_batch(lines, new)
                if self.progress is not None:
                    self.progress(self._at, end)
            self._at, end = end, settled_size(self.handle)
        now = os.fstat(self.handle)
        modified = now.st_mtime_ns != began.st_mtime_ns
        if now.st_size < self._at or (
            modified and (self.layout.is_document or now.st_size == began.st_size)
        ):
            raise StoreUnavailable(
                f"{clip(self.file.path.name)} was rewritten by another process",
                hint="nothing was changed: try again",
            )

    def _slim_batch(self, lines: list[bytes], new: int | None) -> None:
        """Make some lines slim, then measure and write them."""
        self._at += sum(map(len, lines))
        is_searched = self._at <= self.size and not self.is_marked
        marks = [False] * len(lines) if is_searched else [MARK in part for part in lines]
        done = slim_all(
            lines, self._format, self._keeper, marks=marks, document=self.layout.document
        )
        with_pointers: list[Slimmed] = []
        for part, slimmed, is_marked in zip(lines, done, marks, strict=True):
            if slimmed.text != part:
                self._changed = True
            if slimmed.text is not part or (not is_marked and _SCHEME in part):
                with_pointers.append(slimmed)
        self._note_pointers(with_pointers)
        self.count += len(lines)
        data = b"".join(one.text for one in done)
        self._slim.add(data)
        if new is not None:
            self._measure_whole(lines, done, marks)
            write_all(new, data)

    def _measure_whole(
        self, lines: list[bytes], done: Sequence[Slimmed], marks: Sequence[bool]
    ) -> None:
        """Measure the whole bytes of some lines, and the lines as found once the two differ."""
        wholes: list[bytes] = []
        differs = False
        for part, slimmed, is_marked in zip(lines, done, marks, strict=True):
            restored = part
            if is_marked or not slimmed.is_exact:
                restored = self._whole_of(part, slimmed.text)
            differs = differs or restored is not part
            wholes.append(restored)
        if differs and self._found is None:
            self._found = Measured(self._whole.digest.copy(), self._whole.size)
        if self._found is not None:
            self._found.add(b"".join(lines))
        self._whole.add(b"".join(wholes))

    def _whole_of(self, part: bytes, text: bytes) -> bytes:
        """Return the whole bytes of a slim part; the part itself if a payload is missing."""
        try:
            return whole(text, self._fetch)
        except CoatcheckError:
            self._is_known = False
            return part

    def _finish(self, new: int) -> None:
        found, before = self._found or self._whole, self._before
        segment = Segment(
            self._slim.size,
            self._slim.digest.hexdigest(),
            self._whole.size,
            self._whole.digest.hexdigest() if self._is_known else None,
            found.size,
            found.digest.hexdigest(),
        )
        again = bool(before.segments)
        had_backup = self.file.has_backup()
        after = replace(
            before,
            path=self.file.real_path,
            segments=(*before.segments, segment),
            backed_up=before.backed_up if had_backup or not again else len(before.segments),
            masked=before.masked or self._keeper.masked > 0,
        )
        if again:
            # Anything after the recorded size of the backup was added by a crashed run, and is in
            # the file too: that is cut off.
            self.file.extend_backup(
                pieces(self.handle, before.size, self._at), after=before.backup_size
            )

        def record() -> None:
            record_manifest(self._keeper.own_session(), after)
            self._hold_pointers()

        self.file.replace(
            self.handle, new, self._session_id, keep=not again, done=self._at, first=record
        )

    def _check_backup(self) -> None:
        """Check that an existing backup is ours."""
        size = self.file.size_of_backup()
        if size is None:
            return
        with self.file.reading_backup() as backup:
            if os.path.samestat(os.fstat(backup), os.fstat(self.handle)):
                return  # a crash between linking the backup and the rename
        if not self._before.segments and self.begins_with_backup():
            # a crash after the file was restored, before its backup was removed
            self.file.remove_backup()
        elif not self._before.segments or size < self._before.backup_size:
            raise InvalidArgument(
                f"{clip(str(self.file.backup))} is not a backup of this file",
                hint="check what it is, or move it away",
            )

    def _done(self, status: Status) -> FileReport:
        self.size = os.fstat(self.handle).st_size
        after = self._start + self._slim.size if self._changed else self.size
        keeper, masked = self._keeper, self._keeper.masked
        payloads = "payload was" if masked == 1 else "payloads were"
        note = f"{masked} {payloads} stored with secrets masked" if masked else ""
        status = status if self._changed else "unchanged"
        return self.report(
            status, after, artifacts=len(keeper.stored), tokens_saved=keeper.tokens_saved, note=note
        )


def _start(pointer: str) -> str:
    """Return the part of an id that every pointer has."""
    return pointer.removeprefix(SCHEME)[:MIN_PREFIX]


def _lends(holder: Session, target: Ref | str, session: Session) -> bool:
    """Let a session read an artifact of a transcript's session. Return whether the transcript's
    session has it."""
    try:
        holder.lend(target, session)
    except NotFound:
        return False
    return True
