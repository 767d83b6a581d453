"""The command that starts a worker, confined as far as this system can."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coatcheck.confinement import landlock, seccomp

_LOADER: Final = re.compile(rb"/[\w./+-]*/ld[\w.+-]*\.so[\w.]*(?=\0)")
_WAIT: Final = 20.0
_SCRIPT: Final = Path(__file__).resolve().parent / "worker.py"


@dataclass(frozen=True, slots=True)
class Confinement:
    """Whether a worker can open only its own files, and whether it has neither sockets nor other
    processes."""

    files: bool
    calls: bool


def command(binary: str) -> list[str]:
    """Return the command that confines itself and becomes `binary`. Arguments of the binary are
    added after it."""
    return [*_python(), *_arguments(os.path.realpath(binary)), "--"]


def confinement() -> Confinement:
    """Return how workers are confined here, tried in a process that starts no interpreter."""
    if os.name != "posix":
        return Confinement(files=False, calls=False)
    done = subprocess.run(
        [*_python(), "--report", *_arguments(sys.executable)],
        capture_output=True,
        timeout=_WAIT,
        check=False,
        env={},
    )
    files, _, calls = done.stdout.partition(b" ")
    return Confinement(files=files == b"1", calls=calls == b"1")


def _python() -> list[str]:
    return [sys.executable, "-I", "-S", "-B", str(_SCRIPT)]


def _arguments(binary: str) -> list[str]:
    number, code = seccomp.filter_for_worker() or (0, b"")
    return [os.path.dirname(landlock.__file__), str(number), code.hex(), binary, *_loader(binary)]


def _loader(binary: str) -> list[str]:
    """The program that loads a binary, which the first bytes of the binary name."""
    with open(binary, "rb") as file:
        found = _LOADER.search(file.read(4_096))
    return [os.path.realpath(os.fsdecode(found[0]))] if found else []
