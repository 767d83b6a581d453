"""What became of files: a report for each, and the sum of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal[
    "externalized", "would shrink", "unchanged", "no transcript", "rehydrated", "verified", "restored", "forgotten",
    "failed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: what was done, what it has, and what is wrong with it. `backup` is where one is left."""

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
        record: dict[str, Any] = {
            "path": self.path,
            "status": self.status,
            "format": self.format,
            "parts": self.parts,
            "artifacts": self.artifacts,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "tokens_saved": self.tokens_saved,
            "backup": self.backup,
            "note": self.note or None,
            "problems": list(self.problems),
        }
        return record if self.error is None else {**record, "error": self.error}


@dataclass(frozen=True, slots=True)
class Report:
    """The files that a call looked at, in order."""

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
        return {
            "files": [one.to_record() for one in self.files],
            "artifacts": self.artifacts,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "tokens_saved": self.tokens_saved,
            "problems": len(self.problems),
        }
