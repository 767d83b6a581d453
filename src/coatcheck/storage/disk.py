"""Every call that changes a file, in one place.

The embedded backend writes through a `Disk` and nothing else, so that a test can stand in for it: crash after any
step, run out of space, or drop what was never synced. New files are created exclusively, for the owner alone, and
never through a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from pathlib import Path

from coatcheck.errors import StoreUnavailable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """The operating system's calls, with our flags. `durable=False` makes every sync a no-op."""

    def __init__(self, *, durable: bool = True) -> None:
        self.durable = durable

    def create(self, name: str, folder: int) -> int:
        return os.open(name, _NEW, 0o600, dir_fd=folder)

    def write(self, file: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def write_at(self, file: int, data: bytes, offset: int) -> None:
        done = os.pwrite(file, data, offset)
        while done < len(data):
            done += os.pwrite(file, memoryview(data)[done:], offset + done)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def allocate(self, file: int, size: int) -> None:
        """Make a file of real, allocated bytes."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.pwrite(file, bytes(size), 0)

    def sync(self, file: int, *, always: bool = False) -> None:
        """Make a file's bytes, or a folder's names, survive a power cut. `always` is for what older data depends on."""
        if self.durable or always:
            os.fsync(file)

    def sync_data(self, file: int) -> None:
        if self.durable:
            os.fdatasync(file)

    def make_folder(self, name: str, folder: int) -> bool:
        """Create a folder for the owner alone. False where it was there."""
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

    def remove_folder(self, name: str, folder: int) -> None:
        """Remove a folder if it is empty; one that is not, stays."""
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")


def open_folder(name: str, folder: int | None = None) -> int:
    """A folder's descriptor, refused where the last part of its path is a symbolic link."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreUnavailable(
                f"{os.path.basename(name)!r} in the store is a file or a symbolic link where a folder should be",
                hint="a store is never reached through links inside it: look at what put it there",
            ) from error
        raise


def open_root(path: Path, marker: str, *others: str) -> int:
    """The descriptor of a store's folder: made if it is missing, private, ours, and either empty or a store already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(above)
        finally:
            os.close(above)
    if not path.is_dir():
        raise StoreUnavailable(f"{str(path)!r} is not a folder", hint="name a folder, new or empty, for the store")
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = os.fstat(root)
        if info.st_uid != os.geteuid():
            raise StoreUnavailable(
                f"the folder {str(path)!r} belongs to another user", hint="use a folder of your own for the store"
            )
        held = os.listdir(root)
        if held and held != [marker] and not {marker, *others} <= set(held):  # a crash may leave the marker alone
            raise StoreUnavailable(
                f"the folder {str(path)!r} holds other files and is no store", hint="name a new or an empty folder"
            )
        for name in held:
            if stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
                raise StoreUnavailable(
                    f"{name!r} in the store is a symbolic link", hint="remove it: a store follows no links"
                )
        if stat.S_IMODE(info.st_mode) & 0o077:
            os.fchmod(root, 0o700)
    except BaseException:
        os.close(root)
        raise
    return root
