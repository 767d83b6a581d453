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

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from coatcheck.collect import Progress
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.externalize.policy import Policy
from coatcheck.messages import named_format
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.transcript.externalizing import Externalizing
from coatcheck.transcript.locked import LockedFile
from coatcheck.transcript.reports import FileReport, Report, failed
from coatcheck.transcript.restoring import SlimFile, forgotten
from coatcheck.transcript.splice import ArtifactRef, refs_of
from coatcheck.transcript.swap import SETTLING, SwapFile, is_own

Paths = str | os.PathLike[str]
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_WAIT: Final = 0.5  # seconds to wait for processes that have a replaced file open


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
        return Externalizing(file, handle, session, policy, fmt, progress, dry_run=dry_run).run()

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
            return SlimFile(file, handle, store, progress).rehydrate()

        return _each(path, store, in_place, is_change=True)
    if os.path.isdir(path):
        raise InvalidArgument(
            "`to` cannot be used with a folder", hint="rehydrate a folder in place, or file by file"
        )
    with SwapFile(path) as file, file.reading() as handle:
        slim_file = SlimFile(file, handle, store, progress)
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
        return SlimFile(file, handle, store, progress).verify(remove_backup=remove_backup)

    return _each(path, store, one)


def undo(path: Paths, store: Store, *, progress: Progress | None = None) -> Report:
    """Undo `externalize`: restore the whole file, with everything that was appended since, remove
    its backup, and release its artifacts. If neither the store nor the backup is complete, the file
    is unchanged."""

    def one(file: SwapFile, handle: int) -> FileReport:
        return SlimFile(file, handle, store, progress).undo()

    return _each(path, store, one, is_change=True)


def forget(path: Paths, store: Store, *, force: bool = False) -> Report:
    """Release the artifacts of a transcript that was deleted or restored. Artifacts that
    nothing else refers to leave the store.

    A transcript that still has refs is refused, unless `force` is given: its stubs then point
    nowhere, and only its backup, if there is one, has the payloads."""

    def one(file: SwapFile, handle: int) -> FileReport:
        return forgotten(file, handle, store, force=force)

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
        found = LockedFile(file, handle)
        for number, part in enumerate(found.parts(0, found.size), 1):
            for ref in refs_of(part):
                yield number, ref


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
    durable = store.settings["store.durability"] == "power"
    is_folder = os.path.isdir(path)
    found: list[FileReport] = []
    replaced: list[int] = []  # numbers of the reports whose files have old files beside them
    for name in files_in([path]) if is_folder else [path]:
        try:
            report, has_old_files = _processed(
                name, call, durable=durable, is_change=is_change, missing=missing
            )
        except (CoatcheckError, OSError, RecursionError) as error:
            if not is_folder:
                raise
            report, has_old_files = failed(name, error), False
        if has_old_files:
            replaced.append(len(found))
        found.append(report)
    if replaced:
        time.sleep(SETTLING)
    deadline = time.monotonic() + _WAIT
    for number in replaced:
        left = _carried_over(found[number].path, deadline, durable=durable)
        if left:
            note = "; ".join(filter(None, (found[number].note, left)))
            found[number] = replace(found[number], note=note)
    return Report(tuple(found))


def _processed(
    name: Paths,
    call: Callable[[SwapFile, int], FileReport],
    *,
    durable: bool,
    is_change: bool,
    missing: bool,
) -> tuple[FileReport, bool]:
    """Lock a file and call a function with it. Return its report, and whether old files are beside
    the file now."""
    with SwapFile(name, durable=durable) as file:
        if missing and not os.path.lexists(name):
            return call(file, -1), False
        left = ""
        try:
            with file.reading() as handle:
                if is_change:
                    left = file.carry_over()
                report = call(file, handle)
        finally:
            file.unlock()
        return report, bool(left) or file.has_replaced


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
        return (
            f"lines that were written to the file as it was before were not moved ({error}): "
            "run again"
        )
