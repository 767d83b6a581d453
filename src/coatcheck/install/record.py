"""What was done to a configuration, so that it can be undone: a copy of the original, and a record, beside the file.

Both are for their owner alone (0600): configurations hold secrets. The copy is made once, before the first change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.errors import InvalidArgument
from coatcheck.install import files

_VERSION: Final = 2


@dataclass(slots=True)
class Part:
    """What was done to the servers of one scope: a file may hold those of several."""

    section_was_there: bool = True
    added: list[str] = field(default_factory=list)
    wrapped: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """`original` and `written` are digests; `original` is None where there was no file. `exact` is False once
    somebody else's edits lie between the original and what was written last. `parts` are by path of the servers."""

    original: str | None
    written: str | None = None
    exact: bool = True
    made: list[str] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    version: int = _VERSION

    def part(self, section: Sequence[str]) -> Part | None:
        return self.parts.get(json.dumps(section))

    def begin(self, section: Sequence[str], *, was_there: bool) -> Part:
        """The part for these servers, a new one where there is none."""
        return self.parts.setdefault(json.dumps(section), Part(section_was_there=was_there))

    def end(self, section: Sequence[str]) -> None:
        self.parts.pop(json.dumps(section), None)

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
            return cls(**{**found, "parts": {key: Part(**part) for key, part in found["parts"].items()}})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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
