"""Replace a file as a whole: readers see the old bytes or the new ones, after a crash too."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | os.O_CLOEXEC


class Draft:
    """A new file under a hidden, random name in a folder. `replace` gives it its final name;
    otherwise it is removed on exit. Write to `file`."""

    def __init__(self, folder: Path, *, mode: int = 0o600) -> None:
        self._path = folder / f".{os.urandom(16).hex()}"
        self.file = open(os.open(self._path, _NEW, mode), "wb")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        return self

    def replace(self, path: Path, *, durable: bool = True) -> None:
        """Rename the draft to `path`, over what is there. With `durable`, its bytes and its name
        survive a power cut."""
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._path, path)
        if durable:
            sync_folder(path.parent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def replace_file(
    path: Path, data: bytes, *, mode: int = 0o600, check: Callable[[], object] | None = None
) -> None:
    """Replace the content of a file durably. An existing file keeps its mode and owner, a new one
    gets `mode`. A symbolic link stays: the file that it leads to is replaced. If `check`, called
    just before, raises, nothing is replaced."""
    target = Path(os.path.realpath(path))
    with Draft(target.parent) as draft:
        draft.file.write(data)
        handle = draft.file.fileno()
        try:
            old = target.stat()
        except FileNotFoundError:
            os.fchmod(handle, mode)
        else:
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        if check is not None:
            draft.file.flush()
            os.fsync(handle)  # now, so that little time passes after the check
            check()
        draft.replace(target)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
