"""`.venv-peers`: where the peers are installed, at the versions in constraints-peers.txt, the first time that they are
measured. Nothing depends on them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / "constraints-peers.txt"
FOLDER: Final = ROOT / ".venv-peers"


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


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NoPeers(lines[-1][:200] if lines else f"{command[2]} failed")
