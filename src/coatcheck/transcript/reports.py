"""The reports of `externalize`, `rehydrate`, `verify`, `undo` and `forget`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from coatcheck.errors import CODES, CoatcheckError

Status = Literal[
    "externalized", "would shrink", "unchanged", "no transcript", "rehydrated", "verified",
    "restored", "forgotten", "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was done to one file, and what is wrong with it. `backup` is the path of a remaining
    backup."""

    path: str
    status: Status
    format: str | None = None
    parts: int = 0
    artifacts: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    tokens_saved: int = 0
    backup: str | None = None
    note: str = ""
    problems: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_sound(self) -> bool:
        return not self.problems and self.status != "failed"

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes_after

    def to_record(self) -> dict[str, Any]:
        record = asdict(self) | {"note": self.note or None, "problems": list(self.problems)}
        if self.error is None:
            del record["error"]
        return record


@dataclass(frozen=True, slots=True)
class Report:
    """The reports of all files that a call processed, in order."""

    files: tuple[FileReport, ...]

    @property
    def is_sound(self) -> bool:
        return all(one.is_sound for one in self.files)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{one.path}: {problem}" for one in self.files for problem in one.problems)

    @property
    def artifacts(self) -> int:
        return sum(one.artifacts for one in self.files)

    @property
    def bytes_before(self) -> int:
        return sum(one.bytes_before for one in self.files)

    @property
    def bytes_after(self) -> int:
        return sum(one.bytes_after for one in self.files)

    @property
    def tokens_saved(self) -> int:
        return sum(one.tokens_saved for one in self.files)

    def to_record(self) -> dict[str, Any]:
        totals = {
            name: getattr(self, name)
            for name in ("artifacts", "bytes_before", "bytes_after", "tokens_saved")
        }
        return {
            "files": [one.to_record() for one in self.files],
            **totals,
            "problems": len(self.problems),
        }


def failed(path: str | os.PathLike[str], error: Exception) -> FileReport:
    """Return the report of a file that could not be processed."""
    if isinstance(error, CoatcheckError):
        return FileReport(str(path), "failed", problems=(str(error),), error=error.code)
    reason = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, RecursionError):
        reason = "the file is nested too deep to be read"
    return FileReport(
        str(path), "failed", problems=(reason or str(error) or type(error).__name__,), error="error"
    )


def exit_code(report: Report) -> int:
    """Return the exit code for a report: the code of its worst error, 0 if there is none."""
    return max(
        (CODES[one.error or "error"].exit for one in report.files if not one.is_sound), default=0
    )
