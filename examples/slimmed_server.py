"""What a model gets from an MCP server with and without `coatcheck proxy`: the git server and a
repository's log.

It needs the extra `coatcheck[mcp]`, `mcp-server-git` and git: `python examples/slimmed_server.py`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import TextContent

from coatcheck.tokens import estimate

SERVER = [sys.executable, "-m", "mcp_server_git"]
COMMITS = 1_500
BUG = 1_024


def make_repository(folder: Path) -> None:
    """Create a repository whose history is the same on every machine."""
    history = []
    for number in range(1, COMMITS + 1):
        subject = "Fix the login timeout" if number == BUG else f"Change number {number}"
        who = f"Ada <ada@example.org> {1_700_000_000 + number * 3600} +0000"
        history.append(
            f"commit refs/heads/main\nauthor {who}\ncommitter {who}\ndata {len(subject)}\n{subject}\n"
        )
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    subprocess.run(
        ["git", "fast-import", "--quiet"], cwd=folder, input="\n".join(history).encode(), check=True
    )


async def ask(
    command: list[str], store: Path, *calls: tuple[str, dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """Start a server as a client does. Return the names of its tools, and the text the model gets
    for each call."""
    environment = {**os.environ, "COATCHECK_STORE": str(store)}
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment)
    with open(os.devnull, "w") as quiet:
        async with (
            stdio_client(parameters, errlog=quiet) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            tools = [tool.name for tool in (await session.list_tools()).tools]
            texts = []
            for name, arguments in calls:
                result = await session.call_tool(name, arguments)
                texts.append(
                    "".join(
                        block.text for block in result.content[:1] if isinstance(block, TextContent)
                    )
                )
            return tools, texts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository, store = Path(folder, "repository"), Path(folder, "store")
        make_repository(repository)
        log: tuple[str, dict[str, Any]] = (
            "git_log",
            {"repo_path": str(repository), "max_count": COMMITS},
        )

        _, (before,) = asyncio.run(ask(SERVER, store, log))
        print(f"before: about {estimate(before):,} tokens")
        print(before[:260].rstrip())
        print(f"… and {len(before.splitlines()):,} lines in all")

        proxy = [sys.executable, "-m", "coatcheck", "proxy", "--session", "demo", "--", *SERVER]
        tools, (after,) = asyncio.run(ask(proxy, store, log))
        print(f"\nafter: about {estimate(after):,} tokens")
        print(after)
        print("\nthe three tools that were added:", *tools[-3:])

        pointer = after.partition('"art:')[2].partition('"')[0]
        wanted = {"pointer": f"art:{pointer}", "grep": "login timeout"}
        _, (found,) = asyncio.run(ask(proxy, store, ("get_artifact", wanted)))
        print("\nand what the model reads of it:")
        print(found)


if __name__ == "__main__":
    main()
