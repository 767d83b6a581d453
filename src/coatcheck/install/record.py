"""What was done to a configuration, so that it can be undone: a copy of the original, and a record, beside the file.

Both are for their owner alone (0600): configurations hold secrets. The copy is made once, before the first change.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.errors import InvalidArgument
from coatcheck.install import files

_VERSION: Final = 1


@dataclass(slots=True)
class Record:
    """`original` and `written` are digests; `original` is None where there was no file. `exact` is False once
    somebody else's edits lie between the original and what was written last."""

    original: str | None
    written: str | None = None
    exact: bool = True
    made: list[str] = field(default_factory=list)
    section_was_there: bool = True
    added: list[str] = field(default_factory=list)
    wrapped: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = _VERSION

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """The record of a configuration, or None. Raises `InvalidArgument` where it is damaged."""
        place = record_of(file)
        data = files.read(place)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if found["version"] != _VERSION:
                raise ValueError(found["version"])
            return cls(**found)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidArgument(
                f"{str(place)!r} is damaged or of another version", hint=f"the original is {str(backup_of(file))!r}"
            ) from error

    def write(self, file: Path) -> None:
        files.write(record_of(file), json.dumps(asdict(self), indent=1).encode(), mode=0o600)


def backup_of(file: Path) -> Path:
    return file.with_name(file.name + ".coatcheck-backup")


def record_of(file: Path) -> Path:
    return file.with_name(file.name + ".coatcheck-undo")


def back_up(file: Path, data: bytes) -> None:
    """Keep the original. Raises `InvalidArgument` where another is kept already: it may be the only one."""
    place = backup_of(file)
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        if not place.is_symlink() and files.read(place) == data:
            return
        raise InvalidArgument(f"{str(place)!r} is there already", hint="move it away; nothing was changed") from error
    with os.fdopen(handle, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def forget(file: Path) -> None:
    for place in (record_of(file), backup_of(file)):
        place.unlink(missing_ok=True)
