"""`.venv-peers`: where the peers are installed, at the versions in constraints-peers.txt, the first time that they are
measured. Nothing depends on them. One is from npm: a single package, checked by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.mcp.node_servers import Missing, node

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / "constraints-peers.txt"
FOLDER: Final = ROOT / ".venv-peers"
CONTEXT_MODE: Final = "context-mode@1.0.169"
_CONTEXT_MODE_SHA512: Final = "94JIaFuLjF9SO2BsGTrbGtyT44K95+9OC8BdbaL/UT76xOkanJLfUR5CzmNw+GELXZQqH4nBrKg9wjBnSFkVnQ=="


class NoPeers(Exception):
    """The environment cannot be made. Says why."""


def python(lock: Path = LOCK, folder: Path = FOLDER) -> Path:
    """The interpreter of an environment with the peers, made where it is not there or is not of this lock."""
    if not lock.is_file():
        raise NoPeers(f"there is no {lock.name}")
    inside, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    if inside.exists() and stamp.exists() and stamp.read_text() == wanted:
        return inside
    print(f"installing the peers into {folder.name}: once, some hundred megabytes", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    # Locked to the last package, and one of them is older than some others ask for: see overrides.txt.
    pip = [sys.executable, "-m", "pip", "--python", str(inside)]
    _run([*pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(lock)])
    stamp.write_text(wanted)
    return inside


def context_mode(folder: Path = FOLDER / "context-mode") -> list[str]:
    """The command of the server context-mode, which is unpacked where it is not there. It needs no other package."""
    server = folder / "package" / "server.bundle.mjs"
    try:
        runtime = node()
    except Missing as missing:
        raise NoPeers(str(missing)) from missing
    if not server.exists():
        npm = runtime.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        start = [str(runtime), str(npm)] if npm.is_file() else [shutil.which("npm") or "npm"]
        folder.mkdir(parents=True, exist_ok=True)
        _run([*start, "pack", CONTEXT_MODE, "--loglevel=error", f"--pack-destination={folder}"])
        archive = next(folder.glob("*.tgz"))
        if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != _CONTEXT_MODE_SHA512:
            archive.unlink()
            raise NoPeers(f"the package {CONTEXT_MODE} has another digest than the one that was tried")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return [str(runtime), str(server)]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise NoPeers(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NoPeers(lines[-1][:200] if lines else f"{command[2]} failed")
