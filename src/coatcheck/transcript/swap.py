"""Read a transcript file under a lock, replace it by one rename, and keep a backup beside it.

Links are never followed. A replacement is written beside the file, synced, given the file's owner, mode and times, and
renamed over it. The backup is a hard link to the original file, so that lines which a process still writes to that are
not lost. Only its owner can read it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.ids import clip
from coatcheck.transcript.artifact_refs import PREFIX, is_session_id
from coatcheck.transcript.layout import READ_FLAGS, pieces

_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_BACKUP: Final = ".coatcheck-backup"
_FRESH: Final = ".coatcheck-new-"
_MAX_NAME: Final = 150  # bytes of a file name that leave room for our suffixes
_LOCK_TIMEOUT: Final = 5.0  # seconds to wait for another process's lock


def is_own(name: str) -> bool:
    """Whether a file of this name is one of those that Coatcheck keeps beside a transcript."""
    return name.startswith(".") and (name.endswith(_BACKUP) or _FRESH in name)


class SwapFile:
    """A file that can be replaced, by its name in its folder. A context manager: it keeps the folder open."""

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.path = Path(path)
        self._durable = durable
        self._name = self.path.name
        if not self._name:
            raise InvalidArgument(f"{clip(str(path))} is not a file name")
        encoded = os.fsencode(self._name)
        stem = self._name if len(encoded) <= _MAX_NAME else hashlib.sha256(encoded).hexdigest()[:32]
        self._backup = f".{stem}{_BACKUP}"
        self._fresh = f".{stem}{_FRESH}"
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
        while True:
            handle = self._open(self._name)
            try:
                while True:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            raise StoreUnavailable(
                                f"{clip(self._name)} is locked by another process", hint="try again when it is done"
                            ) from None
                        time.sleep(0.01)
                if self._is_at(handle, self._name):
                    yield handle
                    return
            finally:
                os.close(handle)

    def size_of_backup(self) -> int | None:
        """Return the size of the backup, or None if there is none."""
        try:
            found = os.stat(self._backup, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{clip(self._backup)} is not a file", hint="move it away: Coatcheck did not make it")
        return found.st_size

    @contextmanager
    def reading_backup(self) -> Iterator[int]:
        handle = self._open(self._backup)
        try:
            yield handle
        finally:
            os.close(handle)

    def extend_backup(self, data: Iterator[bytes]) -> None:
        """Append to the backup, create it if it is missing, and sync it."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._backup, _NEW, 0o600, dir_fd=self._folder))
        handle = os.open(self._backup, _APPEND, dir_fd=self._folder)
        try:
            for piece in data:
                write_all(handle, piece)
            os.fsync(handle)
        finally:
            os.close(handle)
        self._sync_folder()

    def cut_backup(self, size: int) -> None:
        """Truncate the backup to this size."""
        handle = os.open(self._backup, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            os.ftruncate(handle, size)
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_backup(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._backup, dir_fd=self._folder)
        self._sync_folder()

    def unfinished(self) -> list[str]:
        """Return the sessions of replacements that a crash left beside the file."""
        names = [one.removeprefix(self._fresh) for one in os.listdir(self._folder) if one.startswith(self._fresh)]
        return [PREFIX + one for one in sorted(names) if is_session_id(PREFIX + one)]

    def remove_unfinished(self, session_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._fresh + session_id.removeprefix(PREFIX), dir_fd=self._folder)

    @contextmanager
    def replacement(self, session_id: str) -> Iterator[int]:
        """Create a new file beside this one, and remove it at the end unless `replace` was called. A file that a crash
        left for this session is reused: it must always exist, because it is the only record of the session."""
        name = self._fresh + session_id.removeprefix(PREFIX)
        try:
            handle = os.open(name, _NEW, 0o600, dir_fd=self._folder)
        except FileExistsError:
            handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_uid != os.geteuid():
                raise InvalidArgument(f"{clip(name)} exists, and Coatcheck did not make it", hint="move it away")
            os.ftruncate(handle, 0)
            yield handle
        finally:
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def replace(self, old: int, new: int, session_id: str, *, keep: bool) -> None:
        """Rename the replacement `new` over the file, whose descriptor is `old`. Owner, mode and times are copied. With
        `keep`, the old file becomes the backup."""
        info = os.fstat(old)
        with contextlib.suppress(PermissionError):
            os.fchown(new, info.st_uid, info.st_gid)
        os.fchmod(new, stat.S_IMODE(info.st_mode))
        _copy_attributes(old, new)
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
        os.fsync(new)
        if not self._is_at(old, self._name):
            raise StoreUnavailable(
                f"{clip(self._name)} was replaced by another process", hint="nothing was changed: try again"
            )
        if keep:
            self._keep(old, info)
        os.rename(
            self._fresh + session_id.removeprefix(PREFIX), self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder
        )
        self._sync_folder()
        if keep and self._is_at(old, self._backup) and stat.S_IMODE(info.st_mode) != 0o600:
            os.fchmod(old, 0o600)

    def append(self, data: bytes) -> None:
        """Append to the file that has the name now."""
        handle = os.open(self._name, _APPEND, dir_fd=self._folder)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _sync_folder(self) -> None:
        """Sync names, if the store's durability asks for it. Contents are always synced before they replace others."""
        if self._durable:
            os.fsync(self._folder)

    def _keep(self, old: int, info: os.stat_result) -> None:
        """Link the file as the backup. Copy it if that is not possible."""
        if self._is_at(old, self._backup):
            return
        if info.st_nlink == 1:
            try:
                os.link(
                    self._name, self._backup, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False
                )
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        self.extend_backup(pieces(old, 0, info.st_size))

    def _open(self, name: str) -> int:
        try:
            handle = os.open(name, READ_FLAGS, dir_fd=self._folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise InvalidArgument(
                    f"{clip(name)} is a symbolic link", hint="pass the file that it points to"
                ) from None
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise InvalidArgument(f"{clip(name)} is not a file", hint="pass a transcript file, or a folder of them")
        return handle

    def _is_at(self, handle: int, name: str) -> bool:
        """Whether this name still belongs to the file behind a descriptor."""
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(handle))


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _copy_attributes(old: int, new: int) -> None:
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(old):
            with contextlib.suppress(OSError):
                os.setxattr(new, name, os.getxattr(old, name))
