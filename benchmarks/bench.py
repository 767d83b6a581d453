"""Shared by all cases: a folder on the measured disk, the number of rounds, and text to put."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

import coatcheck
from coatcheck._open import Durability

KB = 1024
MB = 1024 * KB
_LINE = 99


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the benchmarks. `plots` is a folder for plots, if they are wanted."""

    folder: Path
    quick: bool = False
    plots: Path | None = None
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def rounds(self, full: int) -> int:
        return max(3, full // 10) if self.quick else full

    def new_folder(self, what: str) -> Path:
        folder = self.folder / f"{what}-{next(self._names)}"
        folder.mkdir()
        return folder

    def new_store(self, durability: Durability = "power") -> coatcheck.Store:
        """A store in its steady state: the 256 folders for blobs exist."""
        folder = self.new_folder("store")
        coatcheck.open(folder, durability=durability).close()
        for fan in range(256):
            (folder / "blobs" / f"{fan:02x}").mkdir(mode=0o700)
        os.sync()
        return coatcheck.open(folder, durability=durability)


def text(size: int) -> str:
    """New text of this many bytes: lines of random hex digits."""
    digits = os.urandom(size // 2 + 1).hex()
    return "\n".join(digits[at : at + _LINE] for at in range(0, size, _LINE))[:size]


def data(size: int) -> bytes:
    return text(size).encode()


def write_data(path: Path, size: int) -> int:
    """Write a file of this many megabytes of text, and return its number of lines."""
    lines = 1
    with path.open("wb") as file:
        for _ in range(size // MB):
            piece = data(MB)
            file.write(piece)
            lines += piece.count(b"\n")
    return lines


def corpus() -> Path | None:
    """The folder with real data, as in the tests: `COATCHECK_CORPUS`, else `../shared/data`; None
    if there is none."""
    for folder in (
        os.environ.get("COATCHECK_CORPUS"),
        Path(__file__).resolve().parents[2] / "shared" / "data",
    ):
        if folder and Path(folder).is_dir():
            return Path(folder)
    return None


def size_name(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"
