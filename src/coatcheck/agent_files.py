"""Artifacts as files, for agents that read files.

A folder has one read-only file for each artifact. It is named by the digest, with the ending of its
media type, so an agent can use `grep`, `jq` or an editor on it. The folder belongs to one store. It
is private, and has a `.gitignore` that ignores all of it. A file lives as long as its artifact: the
store knows its folders, and removes the files of an artifact when that is forgotten or collected,
or its session ends.

The folder may be inside a project that others wrote. So a folder that is a link, that belongs to
another user or that has other files is refused, and links inside it are never followed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from coatcheck import media
from coatcheck.errors import InvalidArgument, StoreError, storage_errors
from coatcheck.ids import MIN_PREFIX
from coatcheck.storage import SessionInfo

if TYPE_CHECKING:
    from coatcheck.intake import Parts
    from coatcheck.refs import Ref

_SESSION: Final = "coatcheck:files"
_SERIES: Final = "folders"
_MAX_FOLDERS: Final = 50  # of one store; those that were used first are forgotten
_CHUNK: Final = 1 << 20
_NAME: Final = re.compile(r"([0-9a-f]{12,64})\.[a-z0-9]{1,8}")
_DRAFT: Final = re.compile(r"\.[0-9a-f]{32}")
_ABANDONED: Final = 3_600.0  # seconds after which a draft is certainly not being written any more
_IGNORE: Final = ".gitignore"
_ABOUT: Final = b"# Files of a Coatcheck store"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def file_name(pointer: str, media_type: str, kind: str) -> str:
    """Return the name of an artifact's file: the digits of its pointer, and an ending."""
    digits = pointer.partition(":")[2].partition("#")[0]
    ending = media.ending(media_type)
    return f"{digits}.{'log' if ending == 'txt' and kind == 'log' else ending}"


def is_files_folder(folder: Path) -> bool:
    """Whether a folder has files of artifacts, of this store or another."""
    try:
        with open(folder / _IGNORE, "rb") as file:
            return file.read(len(_ABOUT)) == _ABOUT
    except OSError:
        return False


def write_file(
    parts: Parts, ref: Ref, opened: Callable[[], BinaryIO], folder: str | os.PathLike[str]
) -> Path:
    """Write an artifact to its file in a folder, unless it is there already. Return the path as the
    folder was given. Raises `InvalidArgument` for a folder that cannot be used, and `StoreError` if
    writing fails."""
    path = Path(folder)
    name = file_name(ref.pointer, ref.media_type, ref.kind)
    with storage_errors("writing a file for an agent"):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise _refused(path, "it is a file or a link") from error
        with _opened_folder(path) as handle:
            _make_private(handle, path, _owner(parts))
            if _digest_in(handle, name) != ref.artifact_id:
                with opened() as content:
                    _write(handle, name, content)
    _remember(parts, path)
    return path / name


def artifacts_of(parts: Parts, session_id: str) -> set[str]:
    """Return the artifacts of a session, to remove their files after it has ended. None are
    returned if the store has no folder, or cannot be read."""
    with suppress(StoreError):
        if _folders(parts):
            return {entry.ref.artifact_id for entry in parts.catalog.find(session_id)}
    return set()


def remove_files(parts: Parts, among: Collection[str] | None = None) -> None:
    """Remove the files of artifacts that the store does not have any more: all of them, or those
    `among` some. A folder that is gone or cannot be read is skipped."""
    prefixes = None if among is None else {digest[:MIN_PREFIX] for digest in among}
    if prefixes is not None and not prefixes:
        return
    with suppress(StoreError):
        for folder in _folders(parts):
            with suppress(OSError, InvalidArgument):
                _remove_in(parts, Path(folder), prefixes)


def remove_folders(parts: Parts) -> None:
    """Remove the folders of a store that ends with its process."""
    with suppress(StoreError):
        for folder in _folders(parts):
            with suppress(OSError, InvalidArgument):
                _remove_folder(Path(folder), _owner(parts))


def _remove_folder(folder: Path, owner: str) -> None:
    with _opened_folder(folder) as handle:
        if _content(handle, _IGNORE) != _ignore(owner):
            return
        for name in os.listdir(handle):
            if _is_ours(name):
                os.unlink(name, dir_fd=handle)
    folder.rmdir()


def _remove_in(parts: Parts, folder: Path, prefixes: Collection[str] | None) -> None:
    with _opened_folder(folder) as handle:
        if _content(handle, _IGNORE) != _ignore(_owner(parts)):
            return
        for name in os.listdir(handle):
            if prefixes is None and _DRAFT.fullmatch(name):
                _remove_old(handle, name)
            if _NAME.fullmatch(name) is None:
                continue
            if prefixes is not None and name[:MIN_PREFIX] not in prefixes:
                continue
            digest = _digest_in(handle, name)
            if digest is None or parts.catalog.blob(digest) is None:
                with suppress(OSError):
                    os.unlink(name, dir_fd=handle)


def _remove_old(handle: int, name: str) -> None:
    """Remove a draft that a process left behind when it was killed."""
    with suppress(OSError):
        written = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime
        if written < time.time() - _ABANDONED:
            os.unlink(name, dir_fd=handle)


def _is_ours(name: str) -> bool:
    return name == _IGNORE or bool(_NAME.fullmatch(name) or _DRAFT.fullmatch(name))


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    """Open a folder that is not a link and belongs to this user."""
    try:
        handle = os.open(folder, _FOLDER)
    except NotADirectoryError as error:
        raise _refused(folder, "it is a file or a link") from error
    except OSError as error:
        if folder.is_symlink():
            raise _refused(folder, "it is a link") from error
        raise
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise _refused(folder, "it belongs to another user")
        yield handle
    finally:
        os.close(handle)


def _make_private(handle: int, folder: Path, owner: str) -> None:
    """Take an empty folder for this store. Raises `InvalidArgument` for a folder with other
    files."""
    expected = _ignore(owner)
    found = _content(handle, _IGNORE)
    if found is None:
        if not all(map(_is_ours, os.listdir(handle))):
            raise _refused(folder, "it has other files")
        _write(handle, _IGNORE, io.BytesIO(expected))
    elif found != expected:
        raise _refused(folder, "it belongs to another store, or has a .gitignore of its own")
    if stat.S_IMODE(os.fstat(handle).st_mode) != 0o700:
        os.fchmod(handle, 0o700)


def _refused(folder: Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{str(folder)!r} cannot have files of artifacts: {why}",
        hint="name a new folder for them, or remove this one",
    )


def _ignore(owner: str) -> bytes:
    return _ABOUT + f" ({owner}). It removes them.\n*\n".encode()


def _owner(parts: Parts) -> str:
    """Return a name for the store that nobody else can guess."""
    return blake2b(parts.catalog.secret(), digest_size=8, person=b"coatcheck.files").hexdigest()


def _content(handle: int, name: str, most: int = 4_096) -> bytes | None:
    """Return the beginning of a file of this user; None if there is none, or something else."""
    try:
        file = os.open(name, _READ, dir_fd=handle)
    except FileNotFoundError:
        return None
    except OSError:  # a link
        return b""
    with os.fdopen(file, "rb") as stream:
        info = os.fstat(stream.fileno())
        is_own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        return stream.read(most) if is_own else b""


def _digest_in(handle: int, name: str) -> str | None:
    """Return the digest of a file that nobody can change; None if there is none."""
    try:
        file = os.open(name, _READ, dir_fd=handle)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        info = os.fstat(stream.fileno())
        is_own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        if not is_own or info.st_nlink != 1 or info.st_mode & 0o277:
            return None
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(handle: int, name: str, content: BinaryIO) -> None:
    """Write a read-only file under a hidden name, and then give it its own."""
    draft = f".{os.urandom(16).hex()}"
    file = os.open(draft, _NEW, 0o400, dir_fd=handle)
    try:
        with os.fdopen(file, "wb") as stream:
            while chunk := content.read(_CHUNK):
                stream.write(chunk)
        os.rename(draft, name, src_dir_fd=handle, dst_dir_fd=handle)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=handle)
        raise


def _folders(parts: Parts) -> list[str]:
    """Return the folders of a store on this machine."""
    records = parts.catalog.records(_SESSION, _SERIES, newest=True, limit=1)
    if not records:
        return []
    try:
        found = json.loads(records[0].body)
    except ValueError:
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _remember(parts: Parts, folder: Path) -> None:
    """Add a folder to those of the store."""
    where = os.path.realpath(folder)
    known = _folders(parts)
    if where in known:
        return
    now = parts.clock()
    info = SessionInfo(_SESSION, created=now, used=now)
    body = json.dumps([*known[1 - _MAX_FOLDERS :], where]).encode()
    parts.catalog.record(info, _SERIES, body, at=now, token=None, keep=1, grace=parts.limits.grace)
