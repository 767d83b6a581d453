"""Files and folders that are there already: made slim in place, made whole again, proved, undone and let go.

Every change of a file is one rename, made after all that the new bytes refer to is durable: a process that is killed at
any instant leaves the file as it was or as it should be, and running again ends right. What other processes append
meanwhile is taken along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from coatcheck.errors import CODES, CoatcheckError, InvalidArgument
from coatcheck.externalize.policy import Policy
from coatcheck.ids import clip
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.transcript.formats import FORMATS, Format
from coatcheck.transcript.lines import layout_of, opened, parts
from coatcheck.transcript.place import Place, is_own, write_all
from coatcheck.transcript.refs import ArtifactRef
from coatcheck.transcript.report import FileReport, Report
from coatcheck.transcript.restoring import Restoring, forget_file
from coatcheck.transcript.slimming import Progress, Wanted, slim_file
from coatcheck.transcript.splice import refs_of

Paths = str | os.PathLike[str]
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")


def externalize(
    path: Paths,
    session: Session,
    *,
    policy: Policy | None = None,
    format: str | None = None,  # noqa: A002 - it is the word for it
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Make a transcript, or all in a folder, slim in place: payloads over the policy leave the file for the store.

    What a model was shown can be read by `session` too. A backup stays beside each file until `verify` removes it.
    Running again takes on what was appended since, and else changes nothing. With `dry_run`, nothing is written: the
    report says what would be saved. A file that is no transcript stays as it is.

    A file that cannot be read or replaced raises; in a folder, it is reported as failed, and the others go on."""
    wanted = Wanted(session, policy, _format(format), not dry_run, progress)

    def one(place: Place) -> FileReport:
        return slim_file(place, wanted)

    return _each(path, one)


def rehydrate(
    path: Paths, store: Store, *, to: Paths | BinaryIO | None = None, progress: Progress | None = None
) -> Report:
    """Make a transcript whole again: in its place, or with `to` into another file or a binary stream.

    An artifact that is missing or damaged is reported. In place, the file then stays as it is; elsewhere, a placeholder
    stands where it was, and all the rest is exact. The store keeps what it holds: `undo` lets that go too."""
    if to is None:

        def one(place: Place) -> FileReport:
            with Restoring(place, store, progress) as restoring:
                return restoring.in_place()

        return _each(path, one)
    if os.path.isdir(path):
        raise InvalidArgument("many files do not go into one", hint="rehydrate a folder in place, or file by file")
    with Place(path) as place, Restoring(place, store, progress) as restoring:
        if isinstance(to, str | os.PathLike):
            target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                return Report((restoring.write_to(lambda data: write_all(target, data)),))
            finally:
                os.close(target)
        return Report((restoring.write_to(to.write),))


def verify(path: Paths, store: Store, *, remove_backup: bool = False, progress: Progress | None = None) -> Report:
    """Prove that rehydrating gives the bytes that were there before: everything is read and compared with what was
    recorded. With `remove_backup`, the backup of a file that passes goes. Changes nothing else."""

    def one(place: Place) -> FileReport:
        with Restoring(place, store, progress) as restoring:
            return restoring.prove(remove_backup=remove_backup)

    return _each(path, one)


def undo(path: Paths, store: Store, *, progress: Progress | None = None) -> Report:
    """Take `externalize` back: the file is whole again, with all that was appended since, its backup is gone, and the
    store no longer holds anything for it. Where neither store nor backup has all of it, the file stays as it is."""

    def one(place: Place) -> FileReport:
        with Restoring(place, store, progress) as restoring:
            return restoring.undo()

    return _each(path, one)


def forget(path: Paths, store: Store, *, force: bool = False) -> Report:
    """Let go what a transcript held: what no other session or transcript holds is removed from the store.

    For one that was removed or made whole. One that still has refs is refused unless `force` says so: its stubs then
    lead nowhere, and only its backup, if there is one, has the rest."""

    def one(place: Place) -> FileReport:
        return forget_file(place, store, force=force)

    return _each(path, one)


def files_in(paths: Iterable[Paths]) -> Iterator[Path]:
    """The files that paths name: themselves, and of folders all files below that may be transcripts. Links are not
    followed, and what we keep beside transcripts is left out."""
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
    """The refs of a file as it is, each with the number of its line; 1 for all in a document."""
    with Place(path) as place, place.reading() as handle:
        file = opened(handle)
        layout = layout_of(file)
        for number, part in enumerate(parts(file, 0, None, is_document=layout.is_document), 1):
            for ref in refs_of(part):
                yield number, ref


def failed(path: Paths, error: Exception) -> FileReport:
    """The report of a file that could not be dealt with."""
    if isinstance(error, CoatcheckError):
        return FileReport(str(path), "failed", problems=(str(error),), error=error.code)
    reason = error.strerror if isinstance(error, OSError) else None
    return FileReport(str(path), "failed", problems=(reason or str(error) or type(error).__name__,), error="error")


def exit_code(report: Report) -> int:
    """What a process says of a report: that of the worst thing in it, 0 where all is sound."""
    return max((CODES[one.error or "error"].exit for one in report.files if not one.is_sound), default=0)


def _each(path: Paths, call: Callable[[Place], FileReport]) -> Report:
    if not os.path.isdir(path):
        with Place(path) as place:
            return Report((call(place),))
    found = []
    for file in files_in([path]):
        try:
            with Place(file) as place:
                found.append(call(place))
        except (CoatcheckError, OSError) as error:
            found.append(failed(file, error))
    return Report(tuple(found))


def _format(name: str | None) -> Format | None:
    if name is not None and name not in FORMATS:
        raise InvalidArgument(f"{clip(name)} is no format", hint="one of " + ", ".join(FORMATS))
    return None if name is None else FORMATS[name]
