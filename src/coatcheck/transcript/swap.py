"""A transcript file on disk: how it is replaced, with a backup beside it.

Links are never followed. A replacement is written beside the file, synced, given the file's owner,
mode and times, and renamed over it. The backup is a hard link to the original file. Only its owner
can read it.

Hosts do not lock. A process that opened the file before the rename may write to the old one at any
time after it, so the old one keeps a name, in the folder `.NAME.coatcheck-old`, as long as a
process can write to it. `carry_over` appends to the file what was written there. It removes the old
one when no process has it open for writing any more. Linux can tell that; elsewhere an old one is
removed by the first run that is an hour later than its last change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.ids import clip
from coatcheck.transcript.lines import (
    closing,
    ends_line,
    layout_of,
    open_regular,
    open_to_read,
    opened,
    pieces,
    settled_size,
)
from coatcheck.transcript.splice import PREFIX, is_session_id

Step = Callable[[], object]
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = {
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EXDEV,
}
_BACKUP: Final = ".coatcheck-backup"
_FRESH: Final = ".coatcheck-new-"
_OLD: Final = ".coatcheck-old"
_OLD_NAME: Final = re.compile(
    r"([0-9a-f]{8})-([0-9]{1,18})-([0-9]{1,18})(?:-([0-9]{1,18})-([0-9]{1,18}))?"
)
SETTLING: Final = (
    0.02  # seconds: a process that found the old file just before the rename has opened it by then
)
_STILL_OPEN: Final = (
    "another process may still write to the file as it was before: "
    "what it writes is kept beside the file, "
    "and the next run moves it here"
)
_UNKNOWN: Final = (
    3_600.0  # seconds that an old file is kept if the system cannot tell whether it is open
)
_MAX_NAME: Final = 150  # bytes of a file name that leave room for our suffixes
_LOCK_TIMEOUT: Final = 5.0  # seconds to wait for another process's lock
ATTEMPTS: Final = 100  # times to open a file that other processes replace before it is locked


def is_own(name: str) -> bool:
    """Whether a file of this name is one of those that Coatcheck keeps beside a transcript."""
    return name.startswith(".") and (name.endswith((_BACKUP, _OLD)) or _FRESH in name)


@dataclass(frozen=True, slots=True)
class _OldFile:
    """A file that was replaced: an id, its size at that time, and how many of its bytes the new
    file has. All of this is in its name.

    While bytes are moved, `end` is where they end, and `target` is the size that the new file had
    before. A run that finds these knows that another one was interrupted, and where to look for
    what that one wrote."""

    id: str
    size: int
    moved: int
    end: int | None = None
    target: int | None = None

    @classmethod
    def of(cls, text: str) -> _OldFile | None:
        found = _OLD_NAME.fullmatch(text)
        if found is None:
            return None
        end, target = found[4], found[5]
        if end is None:
            return cls(found[1], int(found[2]), int(found[3]))
        return cls(found[1], int(found[2]), int(found[3]), int(end), int(target))

    def __str__(self) -> str:
        text = f"{self.id}-{self.size}-{self.moved}"
        return text if self.end is None else f"{text}-{self.end}-{self.target}"


class SwapFile:
    """A file that can be replaced, by its name in its folder. A context manager: it keeps the
    folder open."""

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.path = Path(path)
        self._durable = durable
        self._locked: int | None = None
        self.has_replaced = False  # whether `replace` has left an old file
        self._name = self.path.name
        if not self._name:
            raise InvalidArgument(f"{clip(str(path))} is not a file name")
        encoded = os.fsencode(self._name)
        stem = self._name if len(encoded) <= _MAX_NAME else hashlib.sha256(encoded).hexdigest()[:32]
        self._backup = f".{stem}{_BACKUP}"
        self._fresh = f".{stem}{_FRESH}"
        self._old = f".{stem}{_OLD}"
        self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    @property
    def backup(self) -> Path:
        return self.path.with_name(self._backup)

    @property
    def real_path(self) -> str:
        """The file's path with links in its folders resolved, as it is recorded."""
        return os.path.join(os.path.realpath(self.path.parent), self._name)

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Open the file for reading, with an exclusive lock on it."""
        deadline = time.monotonic() + _LOCK_TIMEOUT
        for _ in range(ATTEMPTS):
            with open_to_read(self._name, self._folder) as handle:
                while not _is_locked(handle):
                    if time.monotonic() > deadline:
                        raise StoreUnavailable(
                            f"{clip(self._name)} is locked by another process",
                            hint="try again when it is done",
                        )
                    time.sleep(0.01)
                if is_at(handle, self._name, self._folder):
                    self._locked = handle
                    try:
                        yield handle
                    finally:
                        self.unlock()
                    return
        raise keeps_changing(self._name)

    def unlock(self) -> None:
        """Release the lock of `reading`. Call it after the context too: an interrupt may have ended
        that early."""
        if self._locked is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._locked, fcntl.LOCK_UN)
            self._locked = None

    def has_backup(self) -> bool:
        return self._backup_info() is not None

    def size_of_backup(self) -> int | None:
        """Return the size of the backup, or None if there is none. What was written to it after it
        was replaced does not count."""
        found = self._backup_info()
        if found is None:
            return None
        if found.st_nlink > 1:
            for old in self._old_files():
                with self._reading_old(old) as handle:
                    if handle is not None and os.path.samestat(found, os.fstat(handle)):
                        return min(old.size, found.st_size)
        return found.st_size

    def _backup_info(self) -> os.stat_result | None:
        try:
            found = os.stat(self._backup, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(
                f"{clip(self._backup)} is not a file",
                hint="move it away: Coatcheck did not make it",
            )
        return found

    def reading_backup(self) -> AbstractContextManager[int]:
        return open_to_read(self._backup, self._folder)

    def extend_backup(self, data: Iterator[bytes], *, after: int | None = None) -> None:
        """Append to the backup, create it if it is missing, and sync it. With `after`, it is cut to
        that size first."""
        with contextlib.suppress(FileExistsError), self._opened(self._backup, _NEW):
            pass
        with self.reading_backup() as shared:
            if os.fstat(shared).st_nlink > 1:  # a process may still write to it
                self._copy_backup(shared, os.fstat(shared).st_size if after is None else after)
        with self._opened(self._backup, _APPEND) as handle:
            if after is not None and os.fstat(handle).st_size > after:
                os.ftruncate(handle, after)
            for piece in data:
                write_all(handle, piece)
            os.fsync(handle)
        self._sync_folder()

    def remove_backup(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._backup, dir_fd=self._folder)
        if self.has_backup():  # a record that it is gone would make all of it look like new lines
            raise StoreUnavailable(
                f"the backup {clip(self._backup)} cannot be removed", hint="try again"
            )
        self._sync_folder()

    def _copy_backup(self, shared: int, size: int) -> None:
        """Replace the backup by a copy of its first bytes."""
        name = self._fresh + "backup"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
        with self._opened(name, _NEW) as copy:
            for piece in pieces(shared, 0, size):
                write_all(copy, piece)
            os.fsync(copy)
        os.rename(name, self._backup, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def unfinished(self) -> list[str]:
        """Return the sessions of replacements that a crash left beside the file."""
        names = [
            one.removeprefix(self._fresh)
            for one in os.listdir(self._folder)
            if one.startswith(self._fresh)
        ]
        return [PREFIX + one for one in sorted(names) if is_session_id(PREFIX + one)]

    def remove_unfinished(self, session_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._fresh + session_id.removeprefix(PREFIX), dir_fd=self._folder)

    @contextmanager
    def replacement(self, session_id: str) -> Iterator[int]:
        """Create a new file beside this one, and remove it at the end unless `replace` was called.
        A file that a crash left for this session is reused: it must always exist, because it is the
        only record of the session."""
        name = self._fresh + session_id.removeprefix(PREFIX)
        try:
            handle = os.open(name, _NEW, 0o600, dir_fd=self._folder)
        except FileExistsError:
            handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_uid != os.geteuid():
                raise InvalidArgument(
                    f"{clip(name)} exists, and Coatcheck did not make it", hint="move it away"
                )
            os.ftruncate(handle, 0)
            yield handle
        finally:
            os.close(handle)
            self.remove_unfinished(session_id)

    def replace(
        self,
        old: int,
        new: int,
        session_id: str,
        *,
        keep: bool,
        done: int,
        first: Step | None = None,
    ) -> None:
        """Rename the replacement `new` over the file, whose descriptor is `old`. Owner, mode and
        times are copied. With `keep`, the old file becomes the backup. `done` is the number of its
        bytes that the new file covers: what a process writes after them is left for `carry_over`.
        `first` is called before the rename, after the new file is synced."""
        info = os.fstat(old)
        with contextlib.suppress(PermissionError):
            os.fchown(new, info.st_uid, info.st_gid)
        os.fchmod(new, stat.S_IMODE(info.st_mode))
        _copy_attributes(old, new)
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
        os.fsync(new)
        if first is not None:
            first()
        if not is_at(old, self._name, self._folder):
            raise self._was_replaced()
        if keep:
            self._keep(old, info)
        kept = self._keep_name(old, done)
        name = self._fresh + session_id.removeprefix(PREFIX)
        try:
            os.rename(name, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            if kept is not None:
                self._unlink_old(kept)
            raise
        self._sync_folder()
        if keep and is_at(old, self._backup, self._folder) and stat.S_IMODE(info.st_mode) != 0o600:
            os.fchmod(old, 0o600)
        self.has_replaced = kept is not None
        if kept is None:
            time.sleep(SETTLING)
            self._append(b"".join(pieces(old, done, os.fstat(old).st_size)), is_new_line=False)

    def carry_over(self) -> str:
        """Append to the file what processes wrote to old files after they were replaced, and remove
        the old files that no process can write to any more. Return a note about an old file that is
        left, "" if there is none. The file must be locked."""
        note = ""
        for old in self._old_files():
            with self._reading_old(old) as handle:
                if handle is None:
                    continue
                if is_at(handle, self._name, self._folder):  # a crash before the rename
                    self._unlink_old(old)
                    continue
                age = time.time() - os.fstat(handle).st_ctime
                is_open = is_open_for_writing(
                    handle
                )  # first: what is read after this is complete if it is not
                is_final = is_open is False and age >= SETTLING
                if is_open is None:
                    is_final = age >= _UNKNOWN
                is_moved, old = self._move(old, handle, is_open=not is_final)
                if is_final and is_moved:
                    self._remove_old(old, handle)
                elif is_final:
                    note = (
                        "a process rewrote the file as it was before: "
                        f"see {clip(self._old_path(old), 300)}"
                    )
                else:
                    note = note or _STILL_OPEN
        return note

    def late_bytes(self) -> int:
        """Return how many bytes were written to old files that the file does not have."""
        late = 0
        for old in self._old_files():
            with self._reading_old(old) as handle:
                if handle is not None and not is_at(handle, self._name, self._folder):
                    late += max(0, os.fstat(handle).st_size - old.moved)
        return late

    def _keep_name(self, old: int, done: int) -> _OldFile | None:
        """Give the file a second name, under which it is found once it is replaced. Return None if
        the file system has no hard links and no process has the file open for writing.

        Raises `StoreUnavailable` if one has."""
        kept = _OldFile(secrets.token_hex(4), done, done)
        name = self._old_path(kept)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._old, 0o700, dir_fd=self._folder)
        try:
            os.link(
                self._name,
                name,
                src_dir_fd=self._folder,
                dst_dir_fd=self._folder,
                follow_symlinks=False,
            )
        except OSError as error:
            self._remove_old_folder()
            if error.errno not in _NO_LINKS:
                raise
            if is_open_for_writing(old):
                raise StoreUnavailable(
                    f"{clip(self._name)} is open in another process, "
                    "and its file system has no hard links",
                    hint="nothing was changed: try again when that process has closed it",
                ) from None
            return None
        if not is_at(old, name, self._folder):
            self._unlink_old(kept)
            raise self._was_replaced()
        self._sync_old_folder()
        return kept

    def _was_replaced(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{clip(self._name)} was replaced by another process",
            hint="nothing was changed: try again",
        )

    def _old_files(self) -> list[_OldFile]:
        with self._opened_old_folder() as folder:
            names = [] if folder is None else sorted(os.listdir(folder))
        found = [_OldFile.of(one) for one in names]
        return [one for one in found if one is not None]

    @contextmanager
    def _opened_old_folder(self) -> Iterator[int | None]:
        """Open the folder of old files. None if there is none."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder = os.open(self._old, flags, dir_fd=self._folder)
        except FileNotFoundError:
            yield None
            return
        except NotADirectoryError:  # a link too
            hint = "move it away: Coatcheck did not make it"
            raise InvalidArgument(f"{clip(self._old)} is not a folder", hint=hint) from None
        with closing(folder):
            yield folder

    def _old_path(self, old: _OldFile) -> str:
        return f"{self._old}/{old}"

    @contextmanager
    def _reading_old(self, old: _OldFile) -> Iterator[int | None]:
        """Open an old file. None if another run has removed it."""
        try:
            handle = open_regular(self._old_path(old), os.O_RDONLY, self._folder)
        except FileNotFoundError:
            yield None
            return
        with closing(handle):
            yield handle

    def _move(self, old: _OldFile, handle: int, *, is_open: bool) -> tuple[bool, _OldFile]:
        """Append to the file what was written to an old file, as far as lines are complete if it is
        open. Return whether the file has everything now. A document, or an old file that was cut,
        cannot be appended: it stays."""
        old = self._with_end_of_move(old, handle)
        size = os.fstat(handle).st_size
        data = b"".join(pieces(handle, old.moved, size))
        if is_open:
            data = data[: data.rfind(b"\n") + 1]
        if not data:
            is_moved = size in (
                old.moved,
                old.size,
            )  # the latter if a run was interrupted while it removed the file
            return is_moved, old
        with self._opened(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as now:
            target = os.fstat(now).st_size
            if layout_of(opened(now)).is_document:
                return False, old
        moving = replace(old, end=old.moved + len(data), target=target)
        self._rename_old(old, moving)
        self._append(data, is_new_line=ends_line(handle, old.moved))
        moved = _OldFile(old.id, old.size, old.moved + len(data))
        self._rename_old(moving, moved)
        return moved.moved == size, moved

    def _with_end_of_move(self, old: _OldFile, handle: int) -> _OldFile:
        """Decide whether a run that was interrupted had moved its bytes: they are in the file
        then."""
        if old.end is None or old.target is None:
            return old
        data = b"".join(pieces(handle, old.moved, old.end))
        with self._opened(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as now:
            is_there = data in b"".join(pieces(now, old.target, os.fstat(now).st_size))
        decided = _OldFile(old.id, old.size, old.end if is_there else old.moved)
        self._rename_old(old, decided)
        return decided

    def _rename_old(self, old: _OldFile, new: _OldFile) -> None:
        names = (self._old_path(old), self._old_path(new))
        os.rename(*names, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._sync_old_folder()

    def _remove_old(self, old: _OldFile, handle: int) -> None:
        """Remove an old file, of which everything is in the file. If it is the backup too, that
        stays, as it was when it was replaced."""
        if is_at(handle, self._backup, self._folder) and os.fstat(handle).st_size > old.size:
            with self._opened(self._backup, _APPEND) as backup:
                os.ftruncate(backup, old.size)
                os.fsync(backup)
        self._unlink_old(old)

    def _unlink_old(self, old: _OldFile) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._old_path(old), dir_fd=self._folder)
        self._remove_old_folder()

    def _remove_old_folder(self) -> None:
        """Remove the folder of old files if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self._old, dir_fd=self._folder)

    def _sync_old_folder(self) -> None:
        with self._opened_old_folder() as folder:
            if self._durable and folder is not None:
                os.fsync(folder)

    def _append(self, data: bytes, *, is_new_line: bool) -> None:
        """Append to the file that has the name now: all of the data, or on an error nothing."""
        if not data:
            return
        with self._opened(self._name, _APPEND) as handle:
            size = settled_size(handle)
            if is_new_line and not ends_line(handle, size):
                data = b"\n" + data
            try:
                write_all(handle, data)
            except OSError:
                written = os.fstat(handle).st_size - size
                if 0 < written <= len(data) and os.pread(handle, written, size) == data[:written]:
                    os.ftruncate(handle, size)  # only our own bytes: a host may have appended too
                raise
            os.fsync(handle)

    def _sync_folder(self) -> None:
        """Sync names, if the store's durability asks for it. Contents are always synced before they
        replace others."""
        if self._durable:
            os.fsync(self._folder)

    def _keep(self, old: int, info: os.stat_result) -> None:
        """Link the file as the backup. Copy it if that is not possible."""
        if is_at(old, self._backup, self._folder):
            return
        if info.st_nlink == 1:
            try:
                os.link(
                    self._name,
                    self._backup,
                    src_dir_fd=self._folder,
                    dst_dir_fd=self._folder,
                    follow_symlinks=False,
                )
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        self.extend_backup(pieces(old, 0, info.st_size))

    def _opened(self, name: str, flags: int) -> AbstractContextManager[int]:
        return closing(os.open(name, flags, 0o600, dir_fd=self._folder))


def is_at(handle: int, path: str | Path, folder: int | None = None) -> bool:
    """Whether this path still belongs to the file behind a descriptor. `folder` is a descriptor."""
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(handle))


def is_open_for_writing(handle: int) -> bool | None:
    """Whether a process has this file open for writing. None if the system cannot tell. The
    descriptor must be open for reading only.

    Linux grants a read lease only on a file that nobody has open for writing. It is given back at
    once."""
    if sys.platform != "linux":
        return None
    try:
        # If a process opens the file meanwhile, the kernel sends a signal. The default one would
        # end this process.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def keeps_changing(name: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{clip(name)} keeps being replaced or removed", hint="try again when that is done"
    )


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _is_locked(handle: int) -> bool:
    """Lock a file, unless another process has. Return whether it is locked now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy_attributes(old: int, new: int) -> None:
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(old):
            with contextlib.suppress(OSError):
                os.setxattr(new, name, os.getxattr(old, name))
