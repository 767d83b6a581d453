"""An MCP server on stdio: `read_log` returns the file in its first argument. With "clash" it has
`get_artifact`."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("logs")


@server.tool()
def read_log() -> str:
    """Read the log."""
    return Path(sys.argv[1]).read_text()


@server.tool()
def count_words(text: str) -> str:
    """Count the words of a text."""
    return f"{len(text.split())} words"


if "clash" in sys.argv:

    @server.tool()
    def get_artifact(number: str) -> str:
        """Return an artifact of the museum."""
        return f"an amphora, inventory number {number}"


if __name__ == "__main__":
    server.run("stdio")
