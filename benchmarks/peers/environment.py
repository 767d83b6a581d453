"""`.venv-peers`: where the peers are installed, at the versions in constraints/peers.txt, the first
time that they are measured. Nothing depends on them. One is from npm: a single package, checked by
its digest.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Final

from tests import environments
from tests.environments import ROOT, Missing
from tests.mcp.node_servers import node

__all__ = ["ROOT", "Missing", "context_mode", "python"]

LOCK: Final = ROOT / "constraints" / "peers.txt"
FOLDER: Final = ROOT / ".venv-peers"
CONTEXT_MODE: Final = "context-mode@1.0.169"
_CONTEXT_MODE_SHA512: Final = (
    "94JIaFuLjF9SO2BsGTrbGtyT44K95+9OC8BdbaL/UT76xOkanJLfUR5CzmNw+GELXZQqH4nBrKg9wjBnSFkVnQ=="
)


def python(lock: Path = LOCK, folder: Path = FOLDER) -> Path:
    """The interpreter of an environment with the peers, made where it is not there or is not of
    this lock."""
    return environments.python(lock, folder)


def context_mode(folder: Path = FOLDER / "context-mode") -> list[str]:
    """The command of the server context-mode, which is unpacked where it is not there. It needs no
    other package."""
    server = folder / "package" / "server.bundle.mjs"
    runtime = node()
    if not server.exists():
        npm = runtime.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        start = [str(runtime), str(npm)] if npm.is_file() else [shutil.which("npm") or "npm"]
        folder.mkdir(parents=True, exist_ok=True)
        environments.run(
            [*start, "pack", CONTEXT_MODE, "--loglevel=error", f"--pack-destination={folder}"]
        )
        archive = next(folder.glob("*.tgz"))
        if (
            base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
            != _CONTEXT_MODE_SHA512
        ):
            archive.unlink()
            raise Missing(
                f"the package {CONTEXT_MODE} has another digest than the one that was tried"
            )
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return [str(runtime), str(server)]
