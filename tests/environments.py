"""Environments for packages that cannot share the tests' own: each is made once, from a file with
hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """What was asked for cannot be installed or run here; the message has the reason."""


def python(lock: Path, folder: Path) -> Path:
    """Return the interpreter of the environment in `folder`, made first unless it exists and fits
    this lock file.

    Another process that asks for the same environment waits until it is made."""
    if not lock.is_file():
        raise Missing(f"there is no {lock.name}")
    inside, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not (inside.exists() and stamp.exists() and stamp.read_text() == wanted):
            _make(lock, folder, inside)
            stamp.write_text(wanted)
    return inside


def compile_lock(wanted: list[Path], overrides: Path, lock: Path) -> None:
    """Write the versions and hashes of everything that `wanted` needs to `lock`. Versions that the
    file already has are preferred."""
    options = ["--quiet", "--universal", "--no-header", "--no-annotate", "--generate-hashes"]
    options += ["--python-version", "3.11", "--override", str(overrides), "-o", str(lock)]
    command = [sys.executable, "-m", "uv", "pip", "compile", *map(str, wanted), *options]
    try:
        run(command)
    except Missing:  # uv does not read the settings of pip, which may name another index
        run(command, env=os.environ | _indexes_of_pip())


def _indexes_of_pip() -> dict[str, str]:
    """The indexes and folders of pip's settings, as variables of uv."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
    }
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does
    for line in listed.splitlines():
        setting, _, value = line.partition("=")
        name = names.get(setting.rpartition(".")[2])
        if name is not None:
            found[name] = value.strip("'")
    return found


def _make(lock: Path, folder: Path, inside: Path) -> None:
    sys.stderr.write(
        f"installing {lock.name} into {folder.relative_to(folder.parent.parent)}: once\n"
    )
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    # Every package is locked. Some require a newer release of another than every index has: see
    # overrides.txt.
    options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(lock)]
    try:
        run([sys.executable, "-m", "uv", "pip", "install", "--python", str(inside), *options])
    except Missing:  # uv does not read the settings of pip, which may name another index
        run([sys.executable, "-m", "pip", "--python", str(inside), "install", *options])


def run(command: list[str], env: Mapping[str, str] | None = None) -> None:
    """Run a command. Raises `Missing` with the last line of its errors if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env
        )
    except OSError as error:
        raise Missing(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        raise Missing(lines[-1][:200] if lines else f"{command[2]} failed")
