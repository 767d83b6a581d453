"""Read files that somebody else may have put in place: only regular ones, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_regular(
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    follow: bool = False,
) -> bytes:
    """Return the bytes of a regular file. A pipe, a socket, a device, a file over `max_bytes`, and
    a symbolic link unless `follow` is True, raise OSError. Links in the folders above are
    followed."""
    flags = _READ if follow else _READ | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path)) from error
        raise
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        data = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return data
