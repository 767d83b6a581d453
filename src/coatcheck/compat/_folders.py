"""The folders of the tool artifacts' files: one for each session, in a private one by default."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from coatcheck.checks import check_name
from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.ids import clip

BASE_NAME: Final = "sb_artifacts"
_LONGEST_NAME: Final = 200  # bytes of a folder's name


def folder_name(session_id: str) -> str:
    """Return a session id as the name of a folder: letters, digits and `_.-~` as they are, anything
    else encoded as in a url. A dot at the beginning is encoded too. Raises `InvalidArgument` if it
    is empty or too long for a folder."""
    check_name(session_id, "session id")
    name = quote(session_id, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_NAME:
        raise InvalidArgument(
            f"the session id {clip(session_id)} is too long for the name of a folder",
            hint=f"use at most {_LONGEST_NAME} characters; those other than letters, "
            "digits and _.-~ count three times",
        )
    return name


def session_of(folder: Path) -> str | None:
    """Return the session id that a folder is named after, or None if it is not the folder of a
    session."""
    session_id = unquote(folder.name)
    try:
        return session_id if folder_name(session_id) == folder.name else None
    except InvalidArgument:
        return None


def private_folder() -> Path:
    """Return the default folder. Other users of the machine can create a folder of this name first,
    so it must be a folder of this user that nobody else can enter."""
    folder = Path(tempfile.gettempdir()).absolute() / BASE_NAME
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    is_own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if not stat.S_ISDIR(about.st_mode) or not is_own:
        raise StoreUnavailable(
            f"{str(folder)!r} is not a folder of this user",
            hint="pass another base_dir, or set TMPDIR",
        )
    if stat.S_IMODE(about.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def files_in(folder: Path) -> list[Path]:
    """Return the files and links in a folder; none if it is missing."""
    try:
        return [
            Path(entry) for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
