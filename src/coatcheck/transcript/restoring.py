"""One file made whole again: into another file, in its place, or only to prove that it can be."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from coatcheck.errors import CODES, CoatcheckError, Damaged, InvalidArgument
from coatcheck.ids import clip
from coatcheck.store import Store
from coatcheck.transcript.keep import fetch_from, new_session_id
from coatcheck.transcript.known import begins_with, is_whole_of, known_manifest, not_among, sessions_of_file, tidy
from coatcheck.transcript.lines import layout_of, opened, parts
from coatcheck.transcript.manifest import Manifest, recall, remember, sessions_of
from coatcheck.transcript.place import Place, pieces, write_all
from coatcheck.transcript.refs import ArtifactRef
from coatcheck.transcript.report import FileReport
from coatcheck.transcript.splice import whole

Progress = Callable[[int, int | None], None]
Write = Callable[[bytes], object]
_MOST = 20  # problems that are told one by one


class Restoring:
    """A slim file, open and locked, and the store that it refers to. A context manager."""

    def __init__(self, place: Place, store: Store, progress: Progress | None = None) -> None:
        self._place = place
        self._store = store
        self._progress = progress
        self._fetch = fetch_from(store)
        self._stack = contextlib.ExitStack()
        self._missing: dict[str, str] = {}
        self._failed: set[str] = set()
        self.code: str | None = None
        self._parts = 0

    def __enter__(self) -> Restoring:
        self._old = self._stack.enter_context(self._place.reading())
        with self._stack:
            file = opened(self._old)
            layout = layout_of(file)
            self._is_document, self._format = layout.is_document, layout.format
            self._known = known_manifest(self._store, self._old, is_document=layout.is_document)
            self._size = os.fstat(self._old).st_size
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def sessions(self) -> list[str]:
        return list(sessions_of_file(self._old, is_document=self._is_document))

    def write_to(self, write: Write) -> FileReport:
        """Write the whole file. What is missing has a placeholder in it, and is reported."""
        digests = list(self._regions(write))
        problems = self._problems(digests)
        return self._told("rehydrated", sum(size for size, _ in digests), problems)

    def in_place(self) -> FileReport:
        """Make the file whole where it is. Where anything is missing it stays as it is, and that is reported."""
        sessions = self.sessions
        tidy(self._place, self._store, sessions)
        if not sessions:
            return self._told("unchanged", self._size, [])
        name = new_session_id()
        with self._place.replacement(name) as new:
            report = self.write_to(lambda data: write_all(new, data))
            if report.problems:
                return self._told("failed", self._size, list(report.problems))
            fits = not self._problems_of_backup()
            self._replace(new, name)
        if fits and self._known:
            self._place.remove_backup()  # it is what the file is again
        return replace(report, backup=str(self._place.backup) if self._place.size_of_backup() is not None else None)

    def prove(self, *, remove_backup: bool) -> FileReport:
        """Read all, and compare with what was recorded when the file was made slim."""
        digests = list(self._regions(lambda data: None))
        problems = self._problems(digests)
        note = "" if self._known else "no record of what it was before"
        if not self._known and not self.sessions:
            return self._told("unchanged", self._size, [], "no refs")
        problems += self._problems_of_backup()
        if remove_backup and not problems and self._known and self._place.size_of_backup() is not None:
            session_id, manifest = self._known
            self._place.remove_backup()
            remember(self._store, session_id, _without_backup(manifest))
            note = "the backup was removed"
        return self._told("failed" if problems else "verified", sum(size for size, _ in digests), problems, note)

    def undo(self) -> FileReport:
        """Make the file whole where it is, from the store or else from the backup, and let go what it referred to."""
        sessions = self.sessions
        tidy(self._place, self._store, sessions)
        if not sessions:
            self._finish_undo()
            return self._told("unchanged", self._size, [], "no refs")
        name = new_session_id()
        with self._place.replacement(name) as new:
            digests = list(self._regions(lambda data: write_all(new, data)))
            problems = self._problems(digests)
            note = ""
            if problems and self._from_backup(new):
                problems, note = [], "from the backup: the store has not all of it"
            if problems:
                return self._told("failed", self._size, problems)
            late = self._late_in_backup()
            write_all(new, late)
            size = os.fstat(new).st_size
            self._replace(new, name)
        self._place.remove_backup()
        for session_id in sessions:
            self._store.session(session_id).end()
        return self._told("restored", size, [], note)

    def _finish_undo(self) -> None:
        """What an undo that crashed has left to do, once the file was whole."""
        for session_id in sessions_of(self._store, self._place.real_path):
            if any(is_whole_of(self._old, manifest) for manifest in recall(self._store, session_id)):
                self._store.session(session_id).end()
        size = self._place.size_of_backup()
        if size is not None:
            with self._place.reading_backup() as backup:
                is_spare = begins_with(self._old, backup, size)
            if is_spare:
                self._place.remove_backup()

    def _regions(self, write: Write) -> Iterator[tuple[int, str]]:
        """Write the whole bytes, segment by segment, and what was appended since; size and digest of each."""
        segments = self._known[1].segments if self._known else ()
        start = done = 0
        file = opened(self._old)
        for end in [*_ends([one.size for one in segments]), self._size]:
            size, digest = 0, hashlib.sha256()
            for part in parts(file, start, end, is_document=self._is_document):
                text = whole(part, self._fetch, missing=self._note)
                write(text)
                self._parts += 1
                size += len(text)
                digest.update(text)
                done += len(part)
                if self._progress is not None:
                    self._progress(done, self._size)
            start = end
            yield size, digest.hexdigest()

    def _note(self, ref: ArtifactRef, error: CoatcheckError) -> None:
        self._failed.add(ref.id)
        if len(self._missing) < _MOST:
            self._missing[ref.id] = f"{ref.pointer} ({ref.media_type}, {ref.size} bytes): {error.message}"
        if self.code is None or CODES[error.code].exit > CODES[self.code].exit:
            self.code = error.code

    def _problems(self, digests: list[tuple[int, str]]) -> list[str]:
        problems = list(self._missing.values())
        if len(self._failed) > len(problems):
            problems.append(f"and {len(self._failed) - len(problems)} more")
        if self._known and not problems:
            for number, (segment, (size, digest)) in enumerate(zip(self._known[1].segments, digests, strict=False), 1):
                expected = segment.whole_sha256
                if expected is not None and (size, digest) != (segment.whole_size, expected):
                    problems.append(f"segment {number} is not what it was: {size} bytes, not {segment.whole_size}")
                    self.code = Damaged.code
        return problems

    def _problems_of_backup(self) -> list[str]:
        size = self._place.size_of_backup()
        if size is None or not self._known:
            return []
        manifest = self._known[1]
        with self._place.reading_backup() as backup:
            if not _backup_fits(backup, manifest):
                return ["the backup is not what it was"]
        late = self._late_in_backup()
        return [f"the backup got {len(late)} bytes since; externalize again to take them over"] if late else []

    def _late_in_backup(self) -> bytes:
        """What was written to the file that is the backup now, by somebody who had it open, and is nowhere else."""
        size = self._place.size_of_backup()
        if size is None or not self._known or size <= self._known[1].backup_size:
            return b""
        with self._place.reading_backup() as backup:
            late = b"".join(pieces(backup, self._known[1].backup_size, size))
        return not_among(late, b"".join(pieces(self._old, self._known[1].size, self._size)))

    def _from_backup(self, new: int) -> bool:
        """Fill the new file from the backup, if that has all that was made slim and is sound."""
        size = self._place.size_of_backup()
        if size is None or not self._known or self._known[1].backed_up:
            return False
        manifest = self._known[1]
        with self._place.reading_backup() as backup:
            if not _backup_fits(backup, manifest):
                return False
            os.ftruncate(new, 0)
            os.lseek(new, 0, os.SEEK_SET)
            if not self._copy_backup(backup, new, manifest):
                return False
        try:
            for part in parts(opened(self._old), manifest.size, self._size, is_document=self._is_document):
                write_all(new, whole(part, self._fetch))
        except CoatcheckError:
            return False
        return True

    def _copy_backup(self, backup: int, new: int, manifest: Manifest) -> bool:
        """Lines that were slim when they were found are made whole, as far as the store has what they refer to."""
        if all(one.found_size is None for one in manifest.segments):
            for piece in pieces(backup, 0, manifest.backup_size):
                write_all(new, piece)
            return True
        try:
            for part in parts(opened(backup), 0, manifest.backup_size, is_document=self._is_document):
                write_all(new, whole(part, self._fetch))
        except CoatcheckError:
            return False
        return True

    def _replace(self, new: int, name: str) -> None:
        self._place.replace(self._old, new, name, keep=False)
        late = b"".join(pieces(self._old, self._size, os.fstat(self._old).st_size))
        if late:
            self._place.append(late)

    def _told(self, status: str, size: int, problems: list[str], note: str = "") -> FileReport:
        left = self._place.size_of_backup() is not None
        return FileReport(
            str(self._place.path),
            status,  # type: ignore[arg-type]
            self._format.name if self._format else None,
            self._parts,
            0,
            self._size,
            size,
            0,
            str(self._place.backup) if left else None,
            note,
            tuple(problems),
            self.code if problems else None,
        )


def forget_file(place: Place, store: Store, *, force: bool) -> FileReport:
    """Let go what a transcript held. Its refs lead nowhere after."""
    path = str(place.path)
    named: list[str] = []
    with contextlib.suppress(FileNotFoundError), place.reading() as handle:
        layout = layout_of(opened(handle))
        named = list(sessions_of_file(handle, is_document=layout.is_document))
    if named and not force:
        raise InvalidArgument(
            f"{clip(place.path.name)} still refers to what would go",
            hint="rehydrate or undo it first, remove it, or use force: then its stubs lead nowhere",
        )
    sessions = dict.fromkeys([*named, *sessions_of(store, place.real_path)])
    tidy(place, store, sessions)
    gone = sum(store.session(one).end() for one in sessions)
    left = place.size_of_backup() is not None
    return FileReport(
        path,
        "forgotten",
        artifacts=gone,
        backup=str(place.backup) if left else None,
        note="" if sessions else "held nothing",
    )


def _backup_fits(backup: int, manifest: Manifest) -> bool:
    start = 0
    for segment in manifest.segments[manifest.backed_up :]:
        size, expected = segment.in_backup
        digest = hashlib.sha256()
        for piece in pieces(backup, start, start + size):
            digest.update(piece)
        if expected is not None and digest.hexdigest() != expected:
            return False
        start += size
    return True


def _ends(sizes: list[int]) -> Iterator[int]:
    at = 0
    for size in sizes:
        at += size
        yield at


def _without_backup(manifest: Manifest) -> Manifest:
    return Manifest(manifest.path, manifest.format, manifest.segments, len(manifest.segments))
