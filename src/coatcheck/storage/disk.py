"""All calls that change files, in one place.

The embedded backend writes only through a `Disk`, so that a test can replace it: crash after any
step, run out of space, or drop unsynced data. New files are created exclusively, readable only by
the owner, and never through a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
from pathlib import Path
from urllib.parse import quote

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import StoreUnavailable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
FILES = lazy_pattern(r"lock|reserve|(catalog|search)\.sqlite(-wal|-shm|-journal)?")
FOLDERS = ("blobs", "tmp", "quarantine", "tenants")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Connection(sqlite3.Connection):
    """A connection that closes itself when its store is dropped. Python 3.13 and newer warn
    otherwise."""

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.ProgrammingError):  # it was never opened
            self.close()


class Disk:
    """System calls with the flags that the store needs. `durable=False` makes every sync a
    no-op."""

    def __init__(self, *, durable: bool = True) -> None:
        self.durable = durable

    def create(self, name: str, folder: int) -> int:
        return os.open(name, _NEW, 0o600, dir_fd=folder)

    def write(self, file: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def allocate(self, file: int, size: int) -> None:
        """Give a file real, allocated bytes."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.pwrite(file, bytes(size), 0)

    def sync(self, file: int, *, always: bool = False) -> None:
        """Make a file's bytes, or a folder's names, survive a power cut. `always` is for what older
        data depends on."""
        if self.durable or always:
            _flush(file)

    def sync_data(self, file: int) -> None:
        """Make a file's bytes survive a power cut."""
        if not self.durable:
            return
        if hasattr(os, "fdatasync"):
            os.fdatasync(file)
        else:
            _flush(file)

    def make_folder(self, name: str, folder: int) -> bool:
        """Create a folder for the owner only. Returns False if it exists."""
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            return False
        return True

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def remove(self, name: str, folder: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")


def _flush(file: int) -> None:
    """Sync a file or a folder. On macOS, `fsync` leaves the bytes in the cache of the disk, and
    `F_FULLFSYNC` does not. Some file systems there do not support it."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                raise
    os.fsync(file)


def file_uri(path: Path) -> str:
    """Return the `file:` URI of an absolute path. `Path.as_uri` imports an HTTP client in some
    versions of Python."""
    return "file://" + quote(os.fsencode(path))


def open_folder(name: str, folder: int | None = None) -> int:
    """Return a folder's descriptor. Raises if the last part of its path is a symbolic link."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreUnavailable(
                f"{os.path.basename(name)!r} in the store is a file or a symbolic link where a "
                "folder should be",
                hint="a store must not contain links; find out what put it there",
            ) from error
        raise


def open_root(path: Path, marker: str, *others: str) -> int:
    """Return the descriptor of a store's folder, which is created if missing. It must be ours, and
    empty or a store."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(above)
        finally:
            os.close(above)
    if not path.is_dir():
        raise StoreUnavailable(
            f"{str(path)!r} is not a folder", hint="use a new or empty folder for the store"
        )
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_root(root, path, {marker, *others}, marker)
    except BaseException:
        os.close(root)
        raise
    return root


def _check_root(root: int, path: Path, needed: set[str], marker: str) -> None:
    info = os.fstat(root)
    if info.st_uid != os.geteuid():
        raise StoreUnavailable(
            f"the folder {str(path)!r} belongs to another user",
            hint="use a folder that you own for the store",
        )
    found = os.listdir(root)
    # A crash may leave the marker alone.
    if found and found != [marker] and not needed <= set(found):
        raise StoreUnavailable(
            f"the folder {str(path)!r} has other files and is not a store",
            hint="use a new or empty folder",
        )
    for name in found:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            _check_kind(name, os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    if stat.S_IMODE(info.st_mode) & 0o077:
        try:
            os.fchmod(root, 0o700)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise


def _check_kind(name: str, mode: int) -> None:
    """Raise if a file or folder of a store is a link, or something else than its name says."""
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        raise StoreUnavailable(
            f"{name!r} in the store is a symbolic link",
            hint="remove it: a store must not contain links",
        )
    wanted = kind
    if FILES.fullmatch(name):
        wanted = stat.S_IFREG
    elif name in FOLDERS:
        wanted = stat.S_IFDIR
    if kind != wanted:
        raise StoreUnavailable(
            f"{name!r} in the store is {KINDS.get(kind, 'something else')}, not {KINDS[wanted]}",
            hint="move it away; if it replaced a file of the store, "
            "restore that file from a backup",
        )
