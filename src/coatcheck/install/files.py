"""A configuration file on disk: read whole, written whole, through links, with the mode that it had."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coatcheck.errors import InvalidArgument

_LARGEST: Final = 64 << 20
_BOM: Final = "\ufeff"


def read(file: Path) -> bytes | None:
    """The bytes of a file, or None where there is none. Raises `InvalidArgument`."""
    try:
        with open(file, "rb") as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise InvalidArgument(f"{str(file)!r} is no file")
            data = source.read(_LARGEST + 1)
    except FileNotFoundError:
        if file.is_symlink():
            raise InvalidArgument(f"{str(file)!r} is a link that leads nowhere", hint="set the link right") from None
        return None
    except OSError as error:
        raise InvalidArgument(f"{str(file)!r} cannot be read: {error.strerror}", hint="nothing was changed") from error
    if len(data) > _LARGEST:
        raise InvalidArgument(f"{str(file)!r} is too large for a configuration")
    return data


def text_of(data: bytes) -> tuple[str, str]:
    """The mark before a text (or nothing), and the text. Raises `InvalidArgument`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument("it is not UTF-8", hint="save it as UTF-8 first") from error
    return (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)


def digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def make_folders(folder: Path) -> list[str]:
    """Make a folder and those above it that are missing; those that were made, the innermost last."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()][::-1]
    for one in missing:
        one.mkdir()
    return [str(one) for one in missing]


def check_writable(file: Path) -> None:
    """Raises `InvalidArgument` where a file is not ours to write; to replace it would step over that."""
    target = Path(os.path.realpath(file))
    try:
        status = target.stat()
    except FileNotFoundError:
        return
    if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
        raise InvalidArgument(f"{str(file)!r} is read-only", hint="nothing was changed; make it writable first")
    if not os.access(target.parent, os.W_OK):
        raise InvalidArgument(f"the folder of {str(target)!r} is read-only", hint="nothing was changed")


def write(file: Path, data: bytes, *, mode: int) -> None:
    """Replace what a file holds, at once; what links lead to is replaced, not the link. A file that is there keeps its
    mode and its owner, a new one has `mode`."""
    with replacing(file, data, mode=mode):
        pass


def check_unchanged(file: Path, before: bytes | None) -> None:
    """Raises `InvalidArgument` where a file is no longer what it was."""
    if read(file) != before:
        raise InvalidArgument(f"{str(file)!r} was changed just now", hint="nothing was written; try again")


@contextmanager
def replacing(file: Path, data: bytes, *, mode: int) -> Iterator[None]:
    """As `write`, but only the last step is left to do when the body runs, and is not done where that raises."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    try:
        status: os.stat_result | None = os.stat(target)
    except FileNotFoundError:
        status = None
    scratch = os.path.join(folder, f".{os.path.basename(target)}.{secrets.token_hex(6)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            if status is not None:
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(out.fileno(), status.st_uid, status.st_gid)
                os.fchmod(out.fileno(), stat.S_IMODE(status.st_mode))
            else:
                os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
        yield
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise
    _sync(folder)


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
