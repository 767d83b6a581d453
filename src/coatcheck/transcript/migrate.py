"""Externalize, rehydrate, verify, undo and forget existing transcript files and folders of them.

Every change of a file is one rename, after everything that the new bytes refer to is durable and
recorded. A process that is killed at any instant leaves the file as it was or as it should be, and
running again completes the work.

Lines that other processes append are kept, also those of a process that opened the file before the
rename and writes after it. Each run ends by moving them from the old file to the new one, behind
the lines that are there by then, and waits up to half a second for processes that have the old file
open. If one has it open for longer, the report says so, the old file stays, and the next run moves
what was written to it. A run that is killed while it moves lines may leave some of them in the file
twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import xxhash

from coatcheck.collect import Progress
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
from coatcheck.messages import PLAIN, Format, named_format
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.store import Store
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
from coatcheck.transcript.splice import (
    MARK,
    ArtifactRef,
    Fetch,
    Slimmed,
    refs_of,
    sessions_in,
    slim_all,
    whole,
)
from coatcheck.transcript.swap import (
    SETTLING,
    SwapFile,
    batches,
    is_own,
    layout_of,
    open_to_read,
    opened,
    pieces,
    write_all,
)

Paths = str | os.PathLike[str]
Write = Callable[[bytes], object]
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_SCHEME: Final = SCHEME.encode()
_MAX_PROBLEMS: Final = 20
_MAX_MISSES: Final = 10_000  # pointers of a file that may resolve to nothing
_FROM_BACKUP: Final = "from the backup: the store is incomplete"
_WAIT: Final = 0.5  # seconds to wait for processes that have a replaced file open
_MASKED: Final = "secrets are masked, as the policy asked for when this was stored"

Status = Literal[
    "externalized", "would shrink", "unchanged", "no transcript", "rehydrated", "verified", "restored", "forgotten",
    "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was done to one file, and what is wrong with it. `backup` is the path of a remaining
    backup."""

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
        totals = {
            name: getattr(self, name)
            for name in ("artifacts", "bytes_before", "bytes_after", "tokens_saved")
        }
        return {
            "files": [one.to_record() for one in self.files],
            **totals,
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
    """Move the payloads of a transcript, or of all transcripts in a folder, to the store, and
    replace the files in place.

    `session` can read the payloads that a model was shown. A backup stays beside each file until
    `verify` removes it. Running again processes what was appended since. With `dry_run`, nothing is
    written, and the report says what would be saved. A file that is not a transcript is unchanged.

    A file that cannot be read or replaced raises; in a folder it is reported as failed, and the
    others continue."""
    fmt = named_format(format)

    def one(file: SwapFile, handle: int) -> FileReport:
        return _Externalizing(file, handle, session, policy, fmt, progress, dry_run=dry_run).run()

    return _each(path, session.store, one, is_change=not dry_run)


def rehydrate(
    path: Paths,
    store: Store,
    *,
    to: Paths | BinaryIO | None = None,
    progress: Progress | None = None,
) -> Report:
    """Restore a whole transcript: in place, or with `to` into another file or a binary stream.

    A missing or damaged artifact is reported. In place, the file is then unchanged; elsewhere, the
    payload is replaced by a placeholder, and everything else is exact. The artifacts stay in the
    store: `undo` releases them too."""
    if to is None:

        def in_place(file: SwapFile, handle: int) -> FileReport:
            return _SlimFile(file, handle, store, progress).rehydrate()

        return _each(path, store, in_place, is_change=True)
    if os.path.isdir(path):
        raise InvalidArgument(
            "`to` cannot be used with a folder", hint="rehydrate a folder in place, or file by file"
        )
    with SwapFile(path) as file, file.reading() as handle:
        slim_file = _SlimFile(file, handle, store, progress)
        if not isinstance(to, str | os.PathLike):
            return Report((slim_file.write_to(to.write),))
        with open(
            os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
        ) as target:
            return Report((slim_file.write_to(target.write),))


def verify(
    path: Paths, store: Store, *, remove_backup: bool = False, progress: Progress | None = None
) -> Report:
    """Prove that rehydrating gives the original bytes: everything is read and compared with what
    was recorded. With `remove_backup`, the backup of a file that passes is removed. Nothing else
    changes."""

    def one(file: SwapFile, handle: int) -> FileReport:
        return _SlimFile(file, handle, store, progress).verify(remove_backup=remove_backup)

    return _each(path, store, one)


def undo(path: Paths, store: Store, *, progress: Progress | None = None) -> Report:
    """Undo `externalize`: restore the whole file, with everything that was appended since, remove
    its backup, and release its artifacts. If neither the store nor the backup is complete, the file
    is unchanged."""

    def one(file: SwapFile, handle: int) -> FileReport:
        return _SlimFile(file, handle, store, progress).undo()

    return _each(path, store, one, is_change=True)


def forget(path: Paths, store: Store, *, force: bool = False) -> Report:
    """Release the artifacts of a transcript that was deleted or restored. Artifacts that
    nothing else refers to leave the store.

    A transcript that still has refs is refused, unless `force` is given: its stubs then point
    nowhere, and only its backup, if there is one, has the payloads."""

    def one(file: SwapFile, handle: int) -> FileReport:
        return _forgotten(file, handle, store, force=force)

    return _each(path, store, one, is_change=True, missing=True)


def files_in(paths: Iterable[Paths]) -> Iterator[Path]:
    """Yield the files that paths name, and for folders all files below that may be transcripts.
    Links are not followed, and Coatcheck's own files beside transcripts are left out."""
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
        found = _TranscriptFile(file, handle)
        for number, part in enumerate(found.parts(0, found.size), 1):
            for ref in refs_of(part):
                yield number, ref


def failed(path: Paths, error: Exception) -> FileReport:
    """Return the report of a file that could not be processed."""
    if isinstance(error, CoatcheckError):
        return FileReport(str(path), "failed", problems=(str(error),), error=error.code)
    reason = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, RecursionError):
        reason = "the file is nested too deep to be read"
    return FileReport(
        str(path), "failed", problems=(reason or str(error) or type(error).__name__,), error="error"
    )


def exit_code(report: Report) -> int:
    """Return the exit code for a report: the code of its worst error, 0 if there is none."""
    return max(
        (CODES[one.error or "error"].exit for one in report.files if not one.is_sound), default=0
    )


def _each(
    path: Paths,
    store: Store,
    call: Callable[[SwapFile, int], FileReport],
    *,
    is_change: bool = False,
    missing: bool = False,
) -> Report:
    """Call a function with a file and its locked descriptor, or with each file of a folder. With
    `is_change`, lines that were written to replaced files are moved to the file before and after.
    With `missing`, the file need not exist, and the descriptor is then -1."""
    durable, is_folder = store.settings["store.durability"] == "power", os.path.isdir(path)
    found: list[FileReport] = []
    replaced: list[int] = []  # numbers of the reports whose files have old files beside them
    for name in files_in([path]) if is_folder else [path]:
        try:
            with SwapFile(name, durable=durable) as file:
                if missing and not os.path.lexists(name):
                    found.append(call(file, -1))
                    continue
                left = ""
                try:
                    with file.reading() as handle:
                        if is_change:
                            left = file.carry_over()
                        found.append(call(file, handle))
                finally:
                    file.unlock()
                if left or file.has_replaced:
                    replaced.append(len(found) - 1)
        except (CoatcheckError, OSError, RecursionError) as error:
            if not is_folder:
                raise
            found.append(failed(name, error))
    if replaced:
        time.sleep(SETTLING)
    deadline = time.monotonic() + _WAIT
    for number in replaced:
        left = _carried_over(found[number].path, deadline, durable=durable)
        if left:
            note = "; ".join(filter(None, (found[number].note, left)))
            found[number] = replace(found[number], note=note)
    return Report(tuple(found))


def _carried_over(path: str, deadline: float, *, durable: bool) -> str:
    """Move what processes write to replaced files to the file, until they have closed those or the
    time is over. Return a note about a file that is left, "" if there is none."""
    try:
        while True:
            with SwapFile(path, durable=durable) as file:
                try:
                    with file.reading():
                        left = file.carry_over()
                finally:
                    file.unlock()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(SETTLING)
    except (CoatcheckError, OSError) as error:
        return f"lines that were written to the file as it was before were not moved ({error}): run again"


class _TranscriptFile:
    """One file, open and locked: its layout, the sessions that it names, and the manifest that
    describes it."""

    def __init__(self, file: SwapFile, handle: int, progress: Progress | None = None) -> None:
        self.file, self.handle, self.progress = file, handle, progress
        self.size = os.fstat(handle).st_size
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
                and _matches(self.handle, slim_bytes, xxhash.xxh3_128)
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
            str(self.file.path), status, fmt, self.count, bytes_before=self.size, bytes_after=after, backup=backup,
            **fields,
        )  # fmt: skip


@dataclass(slots=True)
class _Measured:
    """Size and digest of a stream of bytes."""

    digest: Any
    size: int = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)


class _Externalizing(_TranscriptFile):
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
        self._slim, self._whole = _Measured(xxhash.xxh3_128()), _Measured(hashlib.sha256())
        self._found: _Measured | None = (
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
            _clean_up(self.file, self._store, (self._session_id,))
        else:
            _clean_up(self.file, self._store, (), reused=self._session_id)
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
        session = self._session
        wanted = [one for one in self._pointers if _start(one) not in self._shown]
        known = self._known_sessions() if wanted else []
        lent = (
            {ref.artifact_id for ref in session.lent() if ref.session_id in known}
            if known
            else set()
        )
        misses = 0
        for pointer in wanted:
            if misses == _MAX_MISSES:
                break
            with contextlib.suppress(AmbiguousPointer, NotFound):  # or it has expired meanwhile
                ref = session.ref(pointer)
                misses += ref is None
                if (ref is None and _start(pointer) in self._hidden) or (
                    ref is not None and ref.artifact_id in lent
                ):
                    continue
                if (
                    any(_lends(self._store.session(one), ref or pointer, session) for one in known)
                    or ref is None
                ):
                    continue
                if not known:
                    known = [self._session_id]
                    record_manifest(self._keeper.own_session(), self._before)
                session.grant(ref, to=known[0])

    def _known_sessions(self) -> list[str]:
        """Return the sessions of this store that have what the file refers to, its own first."""
        own = [self._session_id] if self._changed or self._before.segments else []
        named = [one for one in self._named if one not in own and self._keeper.is_ours({one})]
        return [*own, *named] or sessions_for(self._store, self.file.real_path)

    def _note_pointers(self, parts: Sequence[Slimmed]) -> None:
        """Note the pointers in slim parts, and which of them belong to their own payloads."""
        refs = [ref for one in parts for ref in one.refs]
        for ref, is_shown in zip(
            refs, [self._format.is_shown(ref.path) for ref in refs], strict=True
        ):
            self._named[ref.session] = None
            (self._shown if is_shown else self._hidden).add(ref.id[:MIN_PREFIX])
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
        end = began.st_size
        while self._at < end:
            for lines in batches(self.reader, self._at, end, is_document=self.layout.is_document):
                self._slim_batch(lines, new)
                if self.progress is not None:
                    self.progress(self._at, end)
            self._at, end = end, os.fstat(self.handle).st_size
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
        triples = list(zip(done, lines, marks, strict=True))
        self._changed = self._changed or any(one.text != part for one, part, _ in triples)
        self._note_pointers(
            [
                one
                for one, part, marked in triples
                if one.text is not part or (not marked and _SCHEME in part)
            ]
        )
        wholes = [
            self._whole_of(part, one.text)
            if new is not None and (marked or not one.is_exact)
            else part
            for one, part, marked in triples
        ]
        self.count += len(lines)
        self._slim.add(data := b"".join(one.text for one in done))
        if new is not None:
            if self._found is None and any(map(operator.is_not, lines, wholes)):
                self._found = _Measured(self._whole.digest.copy(), self._whole.size)
            if self._found is not None:
                self._found.add(b"".join(lines))
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


class _SlimFile(_TranscriptFile):
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
        _clean_up(self.file, self._store, self.sessions)
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
                f"{late} bytes were written to a file that this one replaced; run externalize or undo again"
            )
        if not self._known and any(
            one.segments for each in self.sessions for one in manifests(self._store, each)
        ):
            problems.append(
                "the file was edited or damaged since it was externalized: its bytes cannot be proved"
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
        _clean_up(self.file, self._store, self.sessions)
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
            written = _Measured(hashlib.sha256())
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


def _forgotten(file: SwapFile, handle: int, store: Store, *, force: bool) -> FileReport:
    """Release the artifacts of a transcript. Its refs then point nowhere."""
    named = _TranscriptFile(file, handle).sessions if handle >= 0 else {}
    if named and not force:
        raise InvalidArgument(
            f"{clip(file.path.name)} still has refs to its artifacts",
            hint="rehydrate or undo it first, delete it, or use force: its stubs then point nowhere",
        )
    sessions = named | dict.fromkeys(sessions_for(store, file.real_path))
    _clean_up(file, store, sessions)
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
    return _matches(backup, found, hashlib.sha256)


def _is_whole(handle: int, manifest: Manifest) -> bool:
    """Whether a file begins with the whole bytes of a manifest, or with the bytes of its backup."""
    whole_bytes = [(one.whole_size, one.whole_sha256) for one in manifest.segments]
    backup = [(one.found_size, one.found_sha256) for one in manifest.segments]
    return any(
        stretches
        and all(digest for _, digest in stretches)
        and _matches(handle, stretches, hashlib.sha256)
        for stretches in ([whole_bytes] if backup == whole_bytes else [whole_bytes, backup])
    )


def _matches(
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


def _clean_up(
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
