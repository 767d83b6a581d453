"""Externalize, rehydrate, verify, undo and forget existing transcript files and folders of them.

Every change of a file is one rename, after everything that the new bytes refer to is durable and recorded. A process
that is killed at any instant leaves the file as it was or as it should be, and running again completes the work. Lines
that other processes append during a run are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import xxhash

from coatcheck.errors import (
    CODES,
    AmbiguousPointer,
    CoatcheckError,
    Damaged,
    InvalidArgument,
    NotFound,
    StoreUnavailable,
)
from coatcheck.externalize.policy import Policy
from coatcheck.ids import MIN_PREFIX, SCHEME, clip
from coatcheck.messages import Format, named_format
from coatcheck.messages.paths import REFS_KEY
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.transcript.artifact_refs import ArtifactRef
from coatcheck.transcript.file import pointers_in
from coatcheck.transcript.keep import (
    Keeper,
    Manifest,
    Segment,
    fetch_from,
    manifests,
    new_session_id,
    record_manifest,
    sessions_for,
)
from coatcheck.transcript.layout import Layout, layout_of, look_at, opened, parts, pieces
from coatcheck.transcript.scan import Opened
from coatcheck.transcript.splice import Fetch, refs_of, sessions_in, slim, whole
from coatcheck.transcript.swap import SwapFile, is_own, write_all

Paths = str | os.PathLike[str]
Progress = Callable[[int, int | None], None]
"""Called with the bytes done so far, and their total if known."""

Write = Callable[[bytes], object]
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_MARK: Final = REFS_KEY.encode()
_BUFFER: Final = 1 << 20
_MAX_PROBLEMS: Final = 20
_MAX_MISSES: Final = 10_000  # pointers of a file that may resolve to nothing
_FROM_BACKUP: Final = "from the backup: the store is incomplete"
_MASKED: Final = "secrets are masked, as the policy asked for when this was stored"

Status = Literal[
    "externalized", "would shrink", "unchanged", "no transcript", "rehydrated", "verified", "restored", "forgotten",
    "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was done to one file, and what is wrong with it. `backup` is the path of a remaining backup."""

    path: str
    status: Status
    format: str | None = None
    parts: int = 0
    artifacts: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    tokens_saved: int = 0
    backup: str | None = None
    note: str = ""
    problems: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_sound(self) -> bool:
        return not self.problems and self.status != "failed"

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes_after

    def to_record(self) -> dict[str, Any]:
        record = asdict(self) | {"note": self.note or None, "problems": list(self.problems)}
        if self.error is None:
            del record["error"]
        return record


@dataclass(frozen=True, slots=True)
class Report:
    """The reports of all files that a call processed, in order."""

    files: tuple[FileReport, ...]

    @property
    def is_sound(self) -> bool:
        return all(one.is_sound for one in self.files)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{one.path}: {problem}" for one in self.files for problem in one.problems)

    @property
    def artifacts(self) -> int:
        return sum(one.artifacts for one in self.files)

    @property
    def bytes_before(self) -> int:
        return sum(one.bytes_before for one in self.files)

    @property
    def bytes_after(self) -> int:
        return sum(one.bytes_after for one in self.files)

    @property
    def tokens_saved(self) -> int:
        return sum(one.tokens_saved for one in self.files)

    def to_record(self) -> dict[str, Any]:
        return {
            "files": [one.to_record() for one in self.files],
            "artifacts": self.artifacts,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "tokens_saved": self.tokens_saved,
            "problems": len(self.problems),
        }


def externalize(
    path: Paths,
    session: Session,
    *,
    policy: Policy | None = None,
    format: str | None = None,  # noqa: A002 - the usual word
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Move the payloads of a transcript, or of all transcripts in a folder, to the store, and replace the files in
    place.

    `session` can read the payloads that a model was shown. A backup stays beside each file until `verify` removes it.
    Running again processes what was appended since. With `dry_run`, nothing is written, and the report says what would
    be saved. A file that is not a transcript is unchanged.

    A file that cannot be read or replaced raises; in a folder it is reported as failed, and the others continue."""
    options = _Options(session, policy, named_format(format), not dry_run, progress)
    return _each(path, session.store, lambda file: _externalize_file(file, options))


def rehydrate(
    path: Paths, store: Store, *, to: Paths | BinaryIO | None = None, progress: Progress | None = None
) -> Report:
    """Restore a whole transcript: in place, or with `to` into another file or a binary stream.

    A missing or damaged artifact is reported. In place, the file is then unchanged; elsewhere, the payload is replaced
    by a placeholder, and everything else is exact. The artifacts stay in the store: `undo` releases them too."""
    if to is None:
        return _each_slim(path, store, progress, _SlimFile.rehydrate)
    if os.path.isdir(path):
        raise InvalidArgument("`to` cannot be used with a folder", hint="rehydrate a folder in place, or file by file")
    with SwapFile(path) as file, _SlimFile(file, store, progress) as slim_file:
        if isinstance(to, str | os.PathLike):
            target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                return Report((slim_file.write_to(lambda data: write_all(target, data)),))
            finally:
                os.close(target)
        return Report((slim_file.write_to(to.write),))


def verify(path: Paths, store: Store, *, remove_backup: bool = False, progress: Progress | None = None) -> Report:
    """Prove that rehydrating gives the original bytes: everything is read and compared with what was recorded. With
    `remove_backup`, the backup of a file that passes is removed. Nothing else changes."""
    return _each_slim(path, store, progress, lambda file: file.verify(remove_backup=remove_backup))


def undo(path: Paths, store: Store, *, progress: Progress | None = None) -> Report:
    """Undo `externalize`: restore the whole file, with everything that was appended since, remove its backup, and
    release its artifacts. If neither the store nor the backup is complete, the file is unchanged."""
    return _each_slim(path, store, progress, _SlimFile.undo)


def forget(path: Paths, store: Store, *, force: bool = False) -> Report:
    """Release the artifacts of a transcript that was deleted or restored. Artifacts that
    nothing else refers to leave the store.

    A transcript that still has refs is refused, unless `force` is given: its stubs then point nowhere, and only its
    backup, if there is one, has the payloads."""
    return _each(path, store, lambda file: _forget_file(file, store, force=force))


def files_in(paths: Iterable[Paths]) -> Iterator[Path]:
    """Yield the files that paths name, and for folders all files below that may be transcripts. Links are not followed,
    and Coatcheck's own files beside transcripts are left out."""
    for path in paths:
        if not os.path.isdir(path) or os.path.islink(path):
            yield Path(path)
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                found = Path(folder, name)
                if name.lower().endswith(_SUFFIXES) and not is_own(name) and not found.is_symlink():
                    yield found


def refs_in(path: Paths) -> Iterator[tuple[int, ArtifactRef]]:
    """Yield the refs of a file, each with the number of its line; 1 for all in a document."""
    with SwapFile(path) as file, file.reading() as handle:
        reader = opened(handle)
        layout = layout_of(reader)
        for number, part in enumerate(parts(reader, 0, None, is_document=layout.is_document), 1):
            for ref in refs_of(part):
                yield number, ref


def failed(path: Paths, error: Exception) -> FileReport:
    """Return the report of a file that could not be processed."""
    if isinstance(error, CoatcheckError):
        return FileReport(str(path), "failed", problems=(str(error),), error=error.code)
    reason = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, RecursionError):
        reason = "the file is nested too deep to be read"
    return FileReport(str(path), "failed", problems=(reason or str(error) or type(error).__name__,), error="error")


def exit_code(report: Report) -> int:
    """Return the exit code for a report: that of its worst error, 0 if there is none."""
    return max((CODES[one.error or "error"].exit for one in report.files if not one.is_sound), default=0)


def _each(path: Paths, store: Store, call: Callable[[SwapFile], FileReport]) -> Report:
    durable = store.settings["store.durability"] == "power"
    if not os.path.isdir(path):
        with SwapFile(path, durable=durable) as file:
            return Report((call(file),))
    found = []
    for name in files_in([path]):
        try:
            with SwapFile(name, durable=durable) as file:
                found.append(call(file))
        except (CoatcheckError, OSError, RecursionError) as error:
            found.append(failed(name, error))
    return Report(tuple(found))


def _each_slim(path: Paths, store: Store, progress: Progress | None, call: Callable[[_SlimFile], FileReport]) -> Report:
    def one(file: SwapFile) -> FileReport:
        with _SlimFile(file, store, progress) as slim_file:
            return call(slim_file)

    return _each(path, store, one)


@dataclass(frozen=True, slots=True)
class _Options:
    """How to externalize files: the agent's session, the policy, the format if it is given, and whether to write."""

    session: Session
    policy: Policy | None = None
    format: Format | None = None
    write: bool = True
    progress: Progress | None = None

    @property
    def store(self) -> Store:
        return self.session.store


def _externalize_file(file: SwapFile, options: _Options) -> FileReport:
    """Externalize one file. If it cannot be read or replaced, this raises, and the file is unchanged."""
    with file.reading() as old:
        reader = opened(old)
        layout, document = look_at(reader)
        if options.format is not None:
            layout = Layout(options.format, layout.is_document)
        size = os.fstat(old).st_size
        if layout.format is None:
            return FileReport(str(file.path), "no transcript", bytes_before=size, bytes_after=size)
        return _Externalizing(file, options, old, reader, layout, document).run()


@dataclass(slots=True)
class _Measured:
    """Size and digest of a stream of bytes."""

    digest: Any
    size: int = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)


class _Externalizing:
    """One run of `externalize` on one file. What the new file refers to is durable before the rename."""

    def __init__(
        self, file: SwapFile, options: _Options, old: int, reader: BinaryIO, layout: Layout, document: Opened | None
    ) -> None:
        self._file, self._options, self._old, self._reader = file, options, old, reader
        self._format, self._is_document, self._document = layout.format, layout.is_document, document
        self._opened_at = os.fstat(old).st_mtime_ns
        unmarked = _size_without_key(old)
        self._unmarked = unmarked or 0  # bytes at the start that do not contain our key
        self._has_refs = unmarked is None
        found = None if unmarked is not None else _matching_manifest(options.store, old, is_document=layout.is_document)
        self._before = found[1] if found else Manifest(file.real_path, layout.format.name if layout.format else "")
        unfinished = file.unfinished() if options.write else []
        self._session_id = found[0] if found else (unfinished or [new_session_id()])[0]
        self._keeper = Keeper(
            options.store, self._session_id, session=options.session, policy=options.policy, dry_run=not options.write
        )
        self._fetch: Fetch = fetch_from(options.store)
        self._slim, self._whole = _Measured(xxhash.xxh3_128()), _Measured(hashlib.sha256())
        self._found: _Measured | None = None  # the bytes as found, if they differ from the whole bytes
        self._is_known = True
        self._changed = False
        self._parts = 0
        self._pointers: dict[str, None] = {}  # pointers in the file
        self._shown: set[str] = set()  # ids of payloads that the agent's session can read already, and of
        self._hidden: set[str] = set()  # those that no model was shown
        self._named: dict[str, None] = {}  # sessions that lines of the file name
        self._at = self._before.size

    def run(self) -> FileReport:
        if not self._options.write:
            self._slim_all(None)
            return self._report("would shrink" if self._changed else "unchanged")
        if self._has_refs:
            self._lend()
        if os.fstat(self._old).st_size == self._before.size and self._before.segments:
            if self._before.path != self._file.real_path:
                record_manifest(self._options.store, self._session_id, replace(self._before, path=self._file.real_path))
            self._check_backup()
            _clean_up(self._file, self._options.store, (self._session_id,))
            self._hold_pointers()
            return self._report("unchanged")
        _clean_up(self._file, self._options.store, (), reused=self._session_id)
        self._check_backup()
        with self._file.replacement(self._session_id) as new:
            for piece in pieces(self._old, 0, self._before.size):
                write_all(new, piece)
            try:
                with self._options.store.batching:
                    self._slim_all(new)
            except BaseException:
                if not self._before.segments:  # nothing else refers to it
                    self._options.store.session(self._session_id).end()
                raise
            if self._changed:
                self._finish(new)
        if not self._changed:
            self._hold_pointers()
            return self._report("unchanged")
        return self._report("externalized")

    def _hold_pointers(self) -> None:
        """Keep what the pointers in the file open, besides its own payloads, and let the agent's session read it."""
        store, session = self._options.store, self._options.session
        wanted = [one for one in self._pointers if _start(one) not in self._shown]
        known = self._known_sessions() if wanted else []
        lent = {ref.artifact_id for ref in session.lent() if ref.session_id in known} if known else set()
        misses = 0
        for pointer in wanted:
            if misses == _MAX_MISSES:
                break
            with contextlib.suppress(AmbiguousPointer, NotFound):  # or it has expired meanwhile
                ref = session.ref(pointer)
                misses += ref is None
                if (ref is None and _start(pointer) in self._hidden) or (ref is not None and ref.artifact_id in lent):
                    continue
                if any(_lends(store.session(one), ref or pointer, session) for one in known) or ref is None:
                    continue
                if not known:
                    known = [self._session_id]
                    record_manifest(store, self._session_id, self._before)
                session.grant(ref, to=known[0])

    def _known_sessions(self) -> list[str]:
        """Return the sessions of this store that hold what the file refers to, its own first."""
        own = [self._session_id] if self._changed or self._before.segments else []
        named = [one for one in self._named if one not in own and self._keeper.is_ours({one})]
        return [*own, *named] or sessions_for(self._options.store, self._file.real_path)

    def _note_pointers(self, part: bytes, refs: Iterable[ArtifactRef]) -> None:
        """Note the pointers in a slim part, and which of them are those of its own payloads."""
        assert self._format is not None
        for ref in refs:
            self._named[ref.session] = None
            (self._shown if self._format.is_shown(ref.path) else self._hidden).add(_start(ref.pointer))
        self._pointers.update(dict.fromkeys(pointers_in(part)))

    def _lend(self) -> None:
        """Grant the agent's session what the file already refers to: the session may have ended, or be a new one."""
        assert self._format is not None
        store, session = self._options.store, self._options.session
        lent = {(ref.session_id, ref.artifact_id) for ref in session.lent()}
        with store.batching:
            for part in parts(self._reader, 0, os.fstat(self._old).st_size, is_document=self._is_document):
                refs = refs_of(part) if _MARK in part else ()
                self._note_pointers(part, refs)
                self._named.update(dict.fromkeys(sessions_in(part) if _MARK in part and not refs else ()))
                for ref in refs:
                    if (ref.session, ref.id) not in lent and self._format.is_shown(ref.path):
                        lent.add((ref.session, ref.id))
                        with contextlib.suppress(NotFound):
                            store.session(ref.session).lend(ref.id, session)

    def _slim_all(self, new: int | None) -> None:
        """Process all parts since the last run, and those that are appended during this one."""
        began = os.fstat(self._old)
        end = began.st_size
        if began.st_mtime_ns != self._opened_at:
            self._unmarked = 0
        while self._at < end:
            self._slim_parts(new, end)
            self._at, end = end, os.fstat(self._old).st_size
        now = os.fstat(self._old)
        modified = now.st_mtime_ns != began.st_mtime_ns
        if now.st_size < self._at or (modified and (self._is_document or now.st_size == began.st_size)):
            raise StoreUnavailable(
                f"{clip(self._file.path.name)} was rewritten by another process", hint="nothing was changed: try again"
            )

    def _slim_parts(self, new: int | None, end: int) -> None:
        found: list[bytes] = []
        wholes: list[bytes] = []
        slims: list[bytes] = []
        buffered, at = 0, self._at
        for part in parts(self._reader, at, end, is_document=self._is_document):
            at += len(part)
            marked = at > self._unmarked and _MARK in part
            before = self._keeper.masked
            text = part if not marked and self._keeper.passes(part) else self._slim_part(part, marked)
            differs = marked or self._keeper.masked > before
            self._parts += 1
            if new is not None and text is part and not marked:
                self._note_pointers(part, ())
            if buffered + len(part) > _BUFFER:
                self._flush(new, found, wholes, slims)
                found, wholes, slims, buffered = [], [], [], 0
            found.append(part)
            wholes.append(self._whole_of(part, text) if differs and new is not None else part)
            slims.append(text)
            buffered += len(part)
            if self._options.progress is not None:
                self._options.progress(at, end)
        self._flush(new, found, wholes, slims)

    def _slim_part(self, part: bytes, marked: bool) -> bytes:
        assert self._format is not None
        document = self._document if self._document and self._document.text == part else None
        done = slim(part, self._format, self._keeper, opened=document, marked=marked)
        self._changed = self._changed or done.text != part
        if done.text is not part:
            self._note_pointers(done.text, done.refs)
        return done.text

    def _flush(self, new: int | None, found: list[bytes], wholes: list[bytes], slims: list[bytes]) -> None:
        """Measure and write the buffered lines: one at a time would be slow."""
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
        """Return the whole bytes of a slim part; the part itself if a payload is missing."""
        try:
            return whole(text, self._fetch)
        except CoatcheckError:
            self._is_known = False
            return part

    def _finish(self, new: int) -> None:
        found = self._found or self._whole
        segment = Segment(
            self._slim.size,
            self._slim.digest.hexdigest(),
            self._whole.size,
            self._whole.digest.hexdigest() if self._is_known else None,
            found.size,
            found.digest.hexdigest(),
        )
        again = bool(self._before.segments)
        had_backup = self._file.size_of_backup() is not None
        backed_up = self._before.backed_up if had_backup or not again else len(self._before.segments)
        after = replace(
            self._before,
            path=self._file.real_path,
            segments=(*self._before.segments, segment),
            backed_up=backed_up,
            masked=self._before.masked or self._keeper.masked > 0,
        )
        if again:
            self._extend_backup()
        record_manifest(self._options.store, self._session_id, after)
        self._hold_pointers()
        self._file.replace(self._old, new, self._session_id, keep=not again)
        late = b"".join(pieces(self._old, self._at, os.fstat(self._old).st_size))
        if late:  # written by a process that had opened the file before it was replaced
            self._file.append(late)

    def _check_backup(self) -> None:
        """Check that an existing backup is ours. Lines that a process appended to it since are moved to the file."""
        size = self._file.size_of_backup()
        if size is None:
            return
        with self._file.reading_backup() as backup:
            if os.path.samestat(os.fstat(backup), os.fstat(self._old)):
                return  # a crash between linking the backup and the rename
            expected = self._before.backup_size
            if not self._before.segments and _begins_with(self._old, backup, size):
                self._file.remove_backup()  # a crash after the file was restored, before its backup was removed
                return
            if not self._before.segments or size < expected:
                raise InvalidArgument(
                    f"{clip(str(self._file.backup))} is not a backup of this file",
                    hint="check what it is, or move it away",
                )
            if size == expected:
                return
            extra = b"".join(pieces(backup, expected, size))
            grown = b"".join(pieces(self._old, self._before.size, os.fstat(self._old).st_size))
        if late := _new_lines(extra, grown):
            self._file.append(late)

    def _extend_backup(self) -> None:
        """Append what this run externalizes to the backup. Anything after its recorded size was added by a crashed run
        or a process that still writes to it, and is in the file too: that is cut off."""
        size = self._file.size_of_backup()
        if size is not None and size > self._before.backup_size:
            self._file.cut_backup(self._before.backup_size)
        self._file.extend_backup(pieces(self._old, self._before.size, self._at))

    def _report(self, status: Status) -> FileReport:
        before = os.fstat(self._old).st_size
        after = self._before.size + self._slim.size if self._changed else before
        masked = self._keeper.masked
        payloads = "payload was" if masked == 1 else "payloads were"
        return FileReport(
            str(self._file.path),
            status,
            self._format.name if self._format else None,
            self._parts,
            len(self._keeper.stored),
            before,
            after,
            self._keeper.tokens_saved,
            _backup_path(self._file),
            f"{masked} {payloads} stored with secrets masked" if masked else "",
        )


class _SlimFile:
    """An open and locked slim file, with the store that it refers to. A context manager."""

    def __init__(self, file: SwapFile, store: Store, progress: Progress | None = None) -> None:
        self._file = file
        self._store = store
        self._progress = progress
        self._fetch = fetch_from(store)
        self._stack = contextlib.ExitStack()
        self._missing: dict[str, str] = {}
        self._failed: set[str] = set()
        self.code: str | None = None
        self._parts = 0

    def __enter__(self) -> _SlimFile:
        self._old = self._stack.enter_context(self._file.reading())
        with self._stack:
            layout = layout_of(opened(self._old))
            self._is_document, self._format = layout.is_document, layout.format
            self._known = _matching_manifest(self._store, self._old, is_document=layout.is_document)
            self._size = os.fstat(self._old).st_size
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _is_masked(self) -> bool:
        return self._known is not None and self._known[1].masked

    @property
    def sessions(self) -> list[str]:
        return list(_sessions_in_file(self._old, is_document=self._is_document))

    def write_to(self, write: Write) -> FileReport:
        """Write the whole file. A missing payload is replaced by a placeholder, and reported."""
        digests = list(self._regions(write))
        problems = self._problems(digests)
        return self._report(
            "rehydrated", sum(size for size, _ in digests), problems, _MASKED if self._is_masked else ""
        )

    def rehydrate(self) -> FileReport:
        """Restore the file in place. If anything is missing it is unchanged, and that is reported."""
        sessions = self.sessions
        _clean_up(self._file, self._store, sessions)
        if not sessions:
            return self._report("unchanged", self._size, [])
        name = new_session_id()
        with self._file.replacement(name) as new:
            report = self.write_to(lambda data: write_all(new, data))
            if report.problems:
                return self._report("failed", self._size, list(report.problems))
            is_spare = not self._problems_of_backup()
            if self._is_masked:
                is_spare = is_spare and self._exact_from_backup(new)
                note = _FROM_BACKUP if is_spare else _MASKED
                report = replace(report, bytes_after=os.fstat(new).st_size, note=note)
            self._replace(new, name)
        if is_spare and self._known:
            self._file.remove_backup()  # the file has the same bytes again
        return replace(report, backup=_backup_path(self._file))

    def verify(self, *, remove_backup: bool) -> FileReport:
        """Read everything, and compare it with what was recorded by `externalize`."""
        digests = list(self._regions(lambda data: None))
        problems = self._problems(digests)
        note = (_MASKED if self._is_masked else "") if self._known else "no record of the original bytes"
        if not self._known and not self.sessions:
            return self._report("unchanged", self._size, [], "no refs")
        problems += self._problems_of_backup()
        if remove_backup and not problems and self._known and self._file.size_of_backup() is not None:
            session_id, manifest = self._known
            self._file.remove_backup()
            record_manifest(self._store, session_id, replace(manifest, backed_up=len(manifest.segments)))
            note = "the backup was removed" + (f"; {_MASKED}" if self._is_masked else "")
        return self._report("failed" if problems else "verified", sum(size for size, _ in digests), problems, note)

    def undo(self) -> FileReport:
        """Restore the file in place, from the store or else from the backup, and release its artifacts."""
        sessions = self.sessions
        _clean_up(self._file, self._store, sessions)
        if not sessions:
            self._finish_undo()
            return self._report("unchanged", self._size, [], "no refs")
        name = new_session_id()
        with self._file.replacement(name) as new:
            digests = list(self._regions(lambda data: write_all(new, data)))
            problems = self._problems(digests)
            note = ""
            if self._from_backup(new) if problems else self._is_masked and self._exact_from_backup(new):
                problems, note = [], _FROM_BACKUP
            elif self._is_masked:
                note = _MASKED
            if problems:
                return self._report("failed", self._size, problems)
            late = self._late_in_backup()
            write_all(new, late)
            size = os.fstat(new).st_size
            self._replace(new, name)
        self._file.remove_backup()
        for session_id in sessions:
            self._store.session(session_id).end()
        return self._report("restored", size, [], note)

    def _finish_undo(self) -> None:
        """Do what a crashed undo left to do after it had restored the file."""
        for session_id in sessions_for(self._store, self._file.real_path):
            if any(_is_whole(self._old, manifest) for manifest in manifests(self._store, session_id)):
                self._store.session(session_id).end()
        size = self._file.size_of_backup()
        if size is not None:
            with self._file.reading_backup() as backup:
                is_spare = _begins_with(self._old, backup, size)
            if is_spare:
                self._file.remove_backup()

    def _regions(self, write: Write) -> Iterator[tuple[int, str]]:
        """Write the whole bytes, segment by segment, then what was appended since. Yield size and digest of each."""
        segments = self._known[1].segments if self._known else ()
        start = done = 0
        reader = opened(self._old)
        for end in [*accumulate(one.size for one in segments), self._size]:
            size, digest = 0, hashlib.sha256()
            for part in parts(reader, start, end, is_document=self._is_document):
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
        if len(self._missing) < _MAX_PROBLEMS:
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
                    problems.append(
                        f"segment {number} differs from the original: {size} bytes, not {segment.whole_size}"
                    )
                    self.code = Damaged.code
        return problems

    def _problems_of_backup(self) -> list[str]:
        size = self._file.size_of_backup()
        if size is None or not self._known:
            return []
        manifest = self._known[1]
        with self._file.reading_backup() as backup:
            if not _backup_fits(backup, manifest):
                return ["the backup was changed"]
        late = self._late_in_backup()
        return (
            [f"{len(late)} bytes were appended to the backup; externalize again to move them to the file"]
            if late
            else []
        )

    def _late_in_backup(self) -> bytes:
        """Return what a process that had the file open wrote to it after it became the backup, and is nowhere else."""
        size = self._file.size_of_backup()
        if size is None or not self._known or size <= self._known[1].backup_size:
            return b""
        with self._file.reading_backup() as backup:
            late = b"".join(pieces(backup, self._known[1].backup_size, size))
        return _new_lines(late, b"".join(pieces(self._old, self._known[1].size, self._size)))

    def _from_backup(self, new: int) -> bool:
        """Fill the new file from the backup, if that is complete and unchanged. Return whether it was."""
        size = self._file.size_of_backup()
        if size is None or not self._known or self._known[1].backed_up:
            return False
        manifest = self._known[1]
        with self._file.reading_backup() as backup:
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

    def _exact_from_backup(self, new: int) -> bool:
        """Fill the new file from the backup, which has the secrets that the store has only masked; if that fails, from
        the store again. Return whether the backup was used."""
        if self._from_backup(new):
            return True
        os.ftruncate(new, 0)
        os.lseek(new, 0, os.SEEK_SET)
        self._parts = 0
        for _ in self._regions(lambda data: write_all(new, data)):
            pass
        return False

    def _copy_backup(self, backup: int, new: int, manifest: Manifest) -> bool:
        """Copy the backup. Lines that were already slim when it was made are restored from the store."""
        if all(one.found_sha256 == one.whole_sha256 for one in manifest.segments):
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
        self._file.replace(self._old, new, name, keep=False)
        late = b"".join(pieces(self._old, self._size, os.fstat(self._old).st_size))
        if late:
            self._file.append(late)

    def _report(self, status: Status, size: int, problems: list[str], note: str = "") -> FileReport:
        return FileReport(
            str(self._file.path),
            status,
            self._format.name if self._format else None,
            self._parts,
            0,
            self._size,
            size,
            0,
            _backup_path(self._file),
            note,
            tuple(problems),
            self.code if problems else None,
        )


def _forget_file(file: SwapFile, store: Store, *, force: bool) -> FileReport:
    """Release the artifacts of a transcript. Its refs then point nowhere."""
    named: list[str] = []
    with contextlib.suppress(FileNotFoundError), file.reading() as handle:
        layout = layout_of(opened(handle))
        named = list(_sessions_in_file(handle, is_document=layout.is_document))
    if named and not force:
        raise InvalidArgument(
            f"{clip(file.path.name)} still has refs to its artifacts",
            hint="rehydrate or undo it first, delete it, or use force: its stubs then point nowhere",
        )
    sessions = dict.fromkeys([*named, *sessions_for(store, file.real_path)])
    _clean_up(file, store, sessions)
    gone = sum(store.session(one).end() for one in sessions)
    note = "" if sessions else "nothing to release"
    return FileReport(str(file.path), "forgotten", artifacts=gone, backup=_backup_path(file), note=note)


def _backup_path(file: SwapFile) -> str | None:
    return str(file.backup) if file.size_of_backup() is not None else None


def _backup_fits(backup: int, manifest: Manifest) -> bool:
    """Whether a backup begins with the bytes that a manifest records for it. Unknown digests are not checked."""
    return _matches(
        backup, [(one.found_size, one.found_sha256) for one in manifest.segments[manifest.backed_up :]], hashlib.sha256
    )


def _matching_manifest(store: Store, handle: int, *, is_document: bool) -> tuple[str, Manifest] | None:
    """Return the session and the manifest that a file begins with the slim bytes of, or None."""
    first = next(_sessions_in_file(handle, is_document=is_document), None)
    if first is None:
        return None
    for manifest in manifests(store, first):
        slim_bytes = [(one.size, one.checksum) for one in manifest.segments]
        if slim_bytes and _matches(handle, slim_bytes, xxhash.xxh3_128):
            return first, manifest
    return None


def _matches(handle: int, stretches: Iterable[tuple[int, str | None]], new: Callable[[], Any]) -> bool:
    """Whether a file begins with stretches of these sizes and digests, as far as those are known."""
    start = 0
    for size, expected in stretches:
        digest = new()
        for piece in pieces(handle, start, start + size):
            digest.update(piece)
        if expected is not None and digest.hexdigest() != expected:
            return False
        start += size
    return True


def _sessions_in_file(handle: int, *, is_document: bool) -> Iterator[str]:
    """Yield the sessions that the refs of a file name, each once, in file order."""
    seen: set[str] = set()
    if _size_without_key(handle) is not None:
        return
    for part in parts(opened(handle), 0, None, is_document=is_document):
        if _MARK in part:
            for session_id in sessions_in(part):
                if session_id not in seen:
                    seen.add(session_id)
                    yield session_id


def _start(pointer: str) -> str:
    """Return the part of an id that every pointer has."""
    return pointer.removeprefix(SCHEME)[:MIN_PREFIX]


def _lends(holder: Session, target: Ref | str, session: Session) -> bool:
    """Let a session read an artifact of a transcript's session. Return whether that has it."""
    try:
        holder.lend(target, session)
    except NotFound:
        return False
    return True


def _clean_up(file: SwapFile, store: Store, keep: Container[str], *, reused: str | None = None) -> None:
    """Remove unfinished replacements that a crash left beside a file, except the one to be `reused`, and end their
    sessions, except those to `keep`."""
    for session_id in file.unfinished():
        own = all(manifest.path == file.real_path for manifest in manifests(store, session_id))
        if own and session_id != reused and session_id not in keep:
            store.session(session_id).end()
        if session_id != reused:
            file.remove_unfinished(session_id)


def _begins_with(handle: int, other: int, size: int) -> bool:
    """Whether a file begins with the first bytes of another."""
    return all(one == two for one, two in zip_longest(pieces(handle, 0, size), pieces(other, 0, size)))


def _is_whole(handle: int, manifest: Manifest) -> bool:
    """Whether a file begins with the whole bytes of a manifest, or with the bytes of its backup."""
    whole = [(one.whole_size, one.whole_sha256) for one in manifest.segments]
    backup = [(one.found_size, one.found_sha256) for one in manifest.segments]
    return any(
        stretches and all(digest for _, digest in stretches) and _matches(handle, stretches, hashlib.sha256)
        for stretches in ([whole] if backup == whole else [whole, backup])
    )


def _new_lines(late: bytes, lines: bytes) -> bytes:
    """Return the lines of `late` after the longest start of it that occurs, in order, in `lines`."""
    rest = late.splitlines(keepends=True)
    for line in lines.splitlines(keepends=True):
        if rest and line == rest[0]:
            del rest[0]
    return b"".join(rest)


def _size_without_key(handle: int) -> int | None:
    """Return the size of a file that does not contain our key, else None. A fast test that most files pass."""
    tail, size = b"", 0
    for piece in pieces(handle, 0, os.fstat(handle).st_size):
        if _MARK in piece or _MARK in tail + piece[: len(_MARK)]:
            return None
        tail, size = piece[-len(_MARK) :], size + len(piece)
    return size
