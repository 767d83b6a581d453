"""The clients from npm that the tests run through a gateway: installed once, as locked in
`node/package-lock.json`.

`python -m tests.gateway.node_clients` installs them into the environment. `make test` runs it
first."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.mcp.node_servers import Missing, install, is_installed, node

LOCKED = Path(__file__).parent / "node"
PLACE = Path(os.environ.get("COATCHECK_GATEWAY_CLIENTS", Path(sys.prefix) / "gateway-clients"))
_PROGRAMS = {
    "claude": "@anthropic-ai/claude-code/cli-wrapper.cjs",
    "codex": "@openai/codex/bin/codex.js",
}


def client(name: str) -> list[str]:
    """The command for Claude Code or Codex, or for one of the SDKs in `clients.mjs`. Raises
    `Missing`."""
    if not is_installed(LOCKED, PLACE):
        raise Missing(
            "the clients from npm are not installed: python -m tests.gateway.node_clients"
        )
    if name in _PROGRAMS:
        return [str(node()), str(PLACE / "node_modules" / _PROGRAMS[name])]
    script = PLACE / "clients.mjs"
    shutil.copy(LOCKED / "clients.mjs", script)  # node finds packages beside the script
    return [str(node()), str(script), name]


if __name__ == "__main__":
    install(LOCKED, PLACE)
