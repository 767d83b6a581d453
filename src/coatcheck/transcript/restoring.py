"""Restore, verify and release one slim file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from coatcheck.collect import Progress
from coatcheck.errors import CODES, CoatcheckError, Damaged, InvalidArgument
from coatcheck.ids import clip
from coatcheck.store import Store
from coatcheck.transcript.keep import (
    Manifest,
    fetch_from,
    manifests,
    new_session_id,
    record_manifest,
    sessions_for,
)
from coatcheck.transcript.lines import batches, open_to_read, opened, pieces
from coatcheck.transcript.locked import LockedFile, Measured, begins_with, clean_up
from coatcheck.transcript.reports import FileReport, Status
from coatcheck.transcript.splice import ArtifactRef, whole
from coatcheck.transcript.swap import SwapFile, write_all

Write = Callable[[bytes], object]
_MAX_PROBLEMS: Final = 20
_FROM_BACKUP: Final = "from the backup: the store is incomplete"
_MASKED: Final = "secrets are masked, as the policy asked for when this was stored"


class SlimFile(LockedFile):
    """A slim file, with the store that it refers to."""

    def __init__(
        self, file: SwapFile, handle: int, store: Store, progress: Progress | None = None
    ) -> None:
        super().__init__(file, handle, progress)
        self._store = store
        self._known = self.manifest_in(store)
        self._manifest = self._known[1] if self._known else Manifest(file.real_path, "")
        self._fetch = fetch_from(store)
        self._missing: dict[str, str] = {}
        self._code: str | None = None

    def write_to(self, write: Write) -> FileReport:
        """Write the whole file. A missing payload is replaced by a placeholder, and reported."""
        size, problems = self._write_whole(write)
        return self._report("rehydrated", size, problems, _MASKED if self._manifest.masked else "")

    def rehydrate(self) -> FileReport:
        """Restore the file in place. If anything is missing, that is reported and the file is
        unchanged."""
        clean_up(self.file, self._store, self.sessions)
        is_spare = not self._problems_of_backup()
        done = self._replaced("rehydrated", exact=is_spare, complete=False)
        if (
            done.status == "rehydrated"
            and is_spare
            and self._known
            and done.note != _MASKED
            and self._is_restored()
        ):
            self.file.remove_backup()  # the file has the same bytes again
            done = replace(done, backup=None)
        return done

    def _replaced(self, status: Status, *, exact: bool, complete: bool) -> FileReport:
        """Replace the file by the whole one, see `_restore`."""
        if not self.sessions:
            return self._report("unchanged", self.size)
        name = new_session_id()
        with self.file.replacement(name) as new:
            problems, note = self._restore(new, exact=exact, complete=complete)
            if problems:
                return self._report("failed", self.size, problems)
            size = os.fstat(new).st_size
            self.file.replace(self.handle, new, name, keep=False, done=self.size)
        return self._report(status, size, note=note)

    def verify(self, *, remove_backup: bool) -> FileReport:
        """Read everything, and compare it with what was recorded by `externalize`."""
        if not self._known and not self.sessions:
            return self._report("unchanged", self.size, note="no refs")
        size, problems = self._write_whole(lambda data: None)
        problems += self._problems_of_backup()
        late = self.file.late_bytes()
        if late:
            problems.append(
                f"{late} bytes were written to a file that this one replaced; "
                "run externalize or undo again"
            )
        if not self._known and any(
            one.segments for each in self.sessions for one in manifests(self._store, each)
        ):
            problems.append(
                "the file was edited or damaged since it was externalized: "
                "its bytes cannot be proved"
            )
        masked = _MASKED if self._manifest.masked else ""
        note = masked if self._known else "no record of the original bytes"
        if remove_backup and not problems and self._known and self.file.has_backup():
            self.file.remove_backup()
            own = self._store.session(self._known[0], ttl=None)
            record_manifest(own, replace(self._manifest, backed_up=len(self._manifest.segments)))
            note = "the backup was removed" + (f"; {masked}" if masked else "")
        return self._report("failed" if problems else "verified", size, problems, note)

    def undo(self) -> FileReport:
        """Restore the file in place, from the store or else from the backup, and release its
        artifacts."""
        clean_up(self.file, self._store, self.sessions)
        if not self.sessions:
            self._finish_undo()
            return self._report("unchanged", self.size, note="no refs")
        done = self._replaced("restored", exact=True, complete=True)
        if done.status == "restored":
            if not self._is_restored():
                raise Damaged(
                    f"{clip(str(self.file.path))} does not read back as it was restored",
                    hint="the backup and the artifacts were kept; check the disk, and undo again",
                )
            if done.note == _MASKED and self.file.has_backup():
                done = replace(
                    done, note=f"{done.note}; the backup was changed since, and was kept"
                )
            else:
                self.file.remove_backup()
                done = replace(done, backup=None)
            for session_id in self.sessions:
                self._store.session(session_id).end()
        return done

    def _is_restored(self) -> bool:
        """Read the file again, before its backup and its artifacts go. Return whether it has the
        bytes that were recorded, as far as their digests are known."""
        known = [one for one in self._manifest.segments if one.whole_sha256 and one.found_sha256]
        with open_to_read(self.file.path) as now:
            return (
                len(known) < len(self._manifest.segments)
                or not known
                or _is_whole(now, self._manifest)
            )

    def _finish_undo(self) -> None:
        """Finish an undo that crashed after it had restored the file."""
        for session_id in sessions_for(self._store, self.file.real_path):
            if any(
                _is_whole(self.handle, manifest) for manifest in manifests(self._store, session_id)
            ):
                self._store.session(session_id).end()
        if self.begins_with_backup():
            self.file.remove_backup()

    def _restore(self, new: int, *, exact: bool, complete: bool) -> tuple[list[str], str]:
        """Fill the new file. Return what is wrong, and a note. If secrets were masked, the backup
        is used instead of the store if that is allowed (`exact`), and with `complete` also if the
        store does not have everything."""
        if exact and self._manifest.masked and self._from_backup(new):
            return [], _FROM_BACKUP
        _empty(new)
        _, problems = self._write_whole(lambda data: write_all(new, data))
        if problems and complete and self._from_backup(new):
            return [], _FROM_BACKUP
        return problems, _MASKED if self._manifest.masked else ""

    def _write_whole(self, write: Write) -> tuple[int, list[str]]:
        """Write the whole bytes, segment by segment, then what was appended since. Return their
        size, and what is missing or differs from what was recorded."""
        self._missing, self._code, self.count = {}, None, 0
        segments, total, start, changed = self._manifest.segments, 0, 0, []
        for number, end in enumerate([*accumulate(one.size for one in segments), self.size]):
            written = Measured(hashlib.sha256())
            done = start
            for part in self.parts(start, end):
                text = whole(part, self._fetch, missing=self._note)
                write(text)
                written.add(text)
                self.count += 1
                done += len(part)
                if self.progress is not None:
                    self.progress(done, self.size)
            start, total = end, total + written.size
            known = segments[number] if number < len(segments) else None
            if known and known.whole_sha256 not in (None, written.digest.hexdigest()):
                was = f"{written.size} bytes, not {known.whole_size}"
                changed.append(f"segment {number + 1} differs from the original: {was}")
        if changed and not self._missing:
            self._code = Damaged.code
            return total, changed
        listed = list(self._missing.values())
        more = [f"and {len(listed) - _MAX_PROBLEMS} more"] if len(listed) > _MAX_PROBLEMS else []
        return total, listed[:_MAX_PROBLEMS] + more

    def _note(self, ref: ArtifactRef, error: CoatcheckError) -> None:
        self._missing.setdefault(
            ref.id, f"{ref.pointer} ({ref.media_type}, {ref.size} bytes): {error.message}"
        )
        if self._code is None or CODES[error.code].exit > CODES[self._code].exit:
            self._code = error.code

    def _problems_of_backup(self) -> list[str]:
        if not self.file.has_backup() or not self._known:
            return []
        with self.file.reading_backup() as backup:
            if not _backup_fits(backup, self._manifest):
                return ["the backup was changed"]
        return []

    def _from_backup(self, new: int) -> bool:
        """Fill the new file from the backup, if that is complete and unchanged. Return whether it
        was. Lines that were already slim when it was made are restored from the store, and so is
        what was appended since."""
        manifest = self._manifest
        if not self.file.has_backup() or not self._known or manifest.backed_up:
            return False
        with self.file.reading_backup() as backup:
            if not _backup_fits(backup, manifest):
                return False
            _empty(new)
            size, is_document = manifest.backup_size, self.layout.is_document
            is_plain = all(one.found_sha256 == one.whole_sha256 for one in manifest.segments)
            try:
                for piece in pieces(backup, 0, size) if is_plain else ():
                    write_all(new, piece)
                for lines in (
                    () if is_plain else batches(opened(backup), 0, size, is_document=is_document)
                ):
                    write_all(new, b"".join(whole(part, self._fetch) for part in lines))
                for part in self.parts(manifest.size, self.size):
                    write_all(new, whole(part, self._fetch))
            except CoatcheckError:
                return False
        return True

    def _report(
        self, status: Status, size: int, problems: Sequence[str] = (), note: str = ""
    ) -> FileReport:
        return self.report(
            status,
            size,
            note=note,
            problems=tuple(problems),
            error=self._code if problems else None,
        )


def forgotten(file: SwapFile, handle: int, store: Store, *, force: bool) -> FileReport:
    """Release the artifacts of a transcript. Its refs then point nowhere."""
    named = LockedFile(file, handle).sessions if handle >= 0 else {}
    if named and not force:
        raise InvalidArgument(
            f"{clip(file.path.name)} still has refs to its artifacts",
            hint="rehydrate or undo it first, delete it, or use force: "
            "its stubs then point nowhere",
        )
    sessions = named | dict.fromkeys(sessions_for(store, file.real_path))
    clean_up(file, store, sessions)
    gone = sum(store.session(one).end() for one in sessions)
    backup = str(file.backup) if file.has_backup() else None
    note = "" if sessions else "nothing to release"
    return FileReport(str(file.path), "forgotten", artifacts=gone, backup=backup, note=note)


def _empty(handle: int) -> None:
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)


def _backup_fits(backup: int, manifest: Manifest) -> bool:
    """Whether a backup begins with the bytes that a manifest records for it. Unknown digests are
    not checked."""
    found = [(one.found_size, one.found_sha256) for one in manifest.segments[manifest.backed_up :]]
    return begins_with(backup, found, hashlib.sha256)


def _is_whole(handle: int, manifest: Manifest) -> bool:
    """Whether a file begins with the whole bytes of a manifest, or with the bytes of its backup."""
    whole_bytes = [(one.whole_size, one.whole_sha256) for one in manifest.segments]
    backup = [(one.found_size, one.found_sha256) for one in manifest.segments]
    return any(
        stretches
        and all(digest for _, digest in stretches)
        and begins_with(handle, stretches, hashlib.sha256)
        for stretches in ([whole_bytes] if backup == whole_bytes else [whole_bytes, backup])
    )
