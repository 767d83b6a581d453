"""Which settings files of projects the user trusts, like direnv: each by its path and the digest of
its content.

A project's `coatcheck.toml` comes with the project, so it is not the user's until `coatcheck trust`
says so. A record is one file in the user's data folder. A change of the settings file ends the
trust.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coatcheck.atomic import replace_file
from coatcheck.ids import digest_of
from coatcheck.regular import read_regular

_FOLDER: Final = "coatcheck-trust"  # beside the default store, which has only files of its own
_LARGEST: Final = 64 << 10


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for the user's data of all programs."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


def is_trusted(file: Path, content: bytes, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user trusts a file with this content. If the record cannot be read, the file is
    not trusted."""
    try:
        found = json.loads(read_regular(_record(file, environ), max_bytes=_LARGEST))
    except (OSError, ValueError, RuntimeError):
        return False
    return isinstance(found, dict) and found == _entry(file, content)


def trust(file: Path, content: bytes, environ: Mapping[str, str] | None = None) -> None:
    """Record that the user trusts a file with this content, in place of what was trusted at its
    path before."""
    record = _record(file, environ)
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(record, json.dumps(_entry(file, content)).encode())


def revoke(file: Path, environ: Mapping[str, str] | None = None) -> bool:
    """Remove the record of a file, which need not exist any more. Returns whether there was one."""
    try:
        _record(file, environ).unlink()
    except FileNotFoundError:
        return False
    return True


def _record(file: Path, environ: Mapping[str, str] | None) -> Path:
    return data_folder(environ) / _FOLDER / digest_of(os.fsencode(_real(file)))


def _entry(file: Path, content: bytes) -> dict[str, str]:
    path = os.fsencode(_real(file)).decode("utf-8", "backslashreplace")
    return {"path": path, "sha256": digest_of(content)}


def _real(file: Path) -> Path:
    """Return the path of a file with the real path of its folder: the file itself may be a link."""
    return Path(os.path.realpath(file.parent), file.name)
