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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from coatcheck import media
from coatcheck.errors import InvalidArgument, StoreError, storage_errors
from coatcheck.storage import SessionInfo

if TYPE_CHECKING:
    from coatcheck.intake import Parts
    from coatcheck.refs import Ref

_SESSION: Final = "coatcheck:files"
_SERIES: Final = "folders"
_MAX_FOLDERS: Final = 50  # of one store; those that were used first are forgotten
_CHUNK: Final = 1 << 20
_NAME: Final = re.compile(r"([0-9a-f]{12,64})\.[a-z0-9]{1,8}")
_IGNORE: Final = ".gitignore"
_ABOUT: Final = b"# Files of a Coatcheck store"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ENDINGS: Final = {
    media.JSON: "json", media.JSONL: "jsonl", "text/csv": "csv",
    "text/tab-separated-values": "tsv", "text/markdown": "md", "text/x-rst": "rst",
    "text/html": "html", "application/xml": "xml", "application/yaml": "yaml",
    "application/toml": "toml", "application/sql": "sql", "text/css": "css",
    "text/javascript": "js", "text/x-typescript": "ts", "text/x-python": "py", "text/x-c": "c",
    "text/x-c++": "cpp", "text/x-go": "go", "text/x-rust": "rs", "text/x-java": "java",
    "text/x-kotlin": "kt", "text/x-ruby": "rb", "text/x-php": "php", "text/x-shellscript": "sh",
    "text/x-diff": "diff", "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg",
    "image/gif": "gif", "image/webp": "webp", "application/pdf": "pdf", "application/zip": "zip",
    "application/gzip": "gz", "application/zstd": "zst",
    "application/vnd.apache.parquet": "parquet", "application/vnd.sqlite3": "sqlite",
}  # fmt: skip


def file_name(pointer: str, media_type: str, kind: str) -> str:
    """Return the name of an artifact's file: the digits of its pointer, and an ending."""
    digits = pointer.partition(":")[2].partition("#")[0]
    return f"{digits}.{_ending(media.essence(media_type), kind)}"


def _ending(media_type: str, kind: str) -> str:
    if media_type in _ENDINGS:
        return _ENDINGS[media_type]
    if media.is_json(media_type):
        return "json"
    if not media.is_text(media_type):
        return "bin"
    return "log" if kind == "log" else "txt"


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


def remove_files(parts: Parts, digest: str | None = None) -> int:
    """Remove the files of artifacts that the store does not have any more: all of them, or those of
    one artifact. Return their number. A folder that is gone or cannot be read is skipped."""
    removed = 0
    with suppress(StoreError):
        for folder in _folders(parts):
            with suppress(OSError, InvalidArgument):
                removed += _remove_in(parts, Path(folder), digest)
    return removed


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
            if name == _IGNORE or _NAME.fullmatch(name):
                os.unlink(name, dir_fd=handle)
    folder.rmdir()


def _remove_in(parts: Parts, folder: Path, digest: str | None) -> int:
    removed = 0
    with _opened_folder(folder) as handle:
        if _content(handle, _IGNORE) != _ignore(_owner(parts)):
            return 0
        for name in os.listdir(handle):
            match = _NAME.fullmatch(name)
            if match is None or not (digest or match[1]).startswith(match[1]):
                continue
            found = _digest_in(handle, name)
            if found is not None and parts.catalog.blob(found) is not None:
                continue
            with suppress(OSError):
                os.unlink(name, dir_fd=handle)
                removed += 1
    return removed


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
        if not all(map(_NAME.fullmatch, os.listdir(handle))):
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
