"""A folder in memory for what tests write, so that they do not wait for a disk. `TMPDIR=/tmp make
test` uses a disk."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

MEMORY = Path("/dev/shm")
_ROOM = 6 << 30  # some tests write more than a gigabyte, and workers run at the same time
_owned: list[Path] = []


def use_memory() -> None:
    """Let this process and those that it starts make their temporary files in memory. Does nothing
    if `TMPDIR` is set, as it is in a worker, or if there is no folder in memory that has room and
    allows running programs."""
    if "TMPDIR" in os.environ or not _has_room():
        return
    for left in MEMORY.glob("coatcheck-[0-9]*"):  # left by a run that failed or was killed
        if (number := re.fullmatch(r"coatcheck-(\d+)", left.name)) and not Path(
            "/proc", number[1]
        ).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = MEMORY / f"coatcheck-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)  # PostgreSQL runs as nobody, in a folder of its own
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it is found again
    _owned.append(folder)


def remove() -> None:
    """Remove the folder that this process made when it ends, after multiprocessing has removed its
    own from there."""
    while _owned:
        Finalize(
            None,
            shutil.rmtree,
            args=(_owned.pop(),),
            kwargs={"ignore_errors": True},
            exitpriority=-1_000,
        )


def _has_room() -> bool:
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return False
    can_run = not found.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK | os.X_OK)
    return can_run and found.f_bavail * found.f_frsize >= _ROOM
