"""A server of FastMCP with and without Coatcheck, and a client that asks for a log. It needs the
package `fastmcp`, but no network: client and server are in one process.

    python -m examples.fastmcp_server
"""

import asyncio
import json
import tempfile
from typing import Any

from fastmcp import Client, FastMCP

import coatcheck
from coatcheck.adapters.fastmcp import Coatcheck
from coatcheck.tokens import estimate

LOG = "\n".join(
    f"2026-11-17T10:{n // 60 % 60:02}:{n % 60:02}Z INFO request {n} took {n * 7 % 900} ms"
    for n in range(4_000)
)


def run_tests() -> str:
    """Run the tests and return their log."""
    return LOG.replace("INFO request 2711", "ERROR request 2711 was refused")


def count_lines(text: str) -> str:
    """Count the lines of a text."""
    return f"{text.count(chr(10)) + 1} lines"


def server_of(*middleware: Any) -> FastMCP:
    server = FastMCP("tests")
    server.tool(run_tests)
    server.tool(count_lines)
    for one in middleware:
        server.add_middleware(one)
    return server


async def play(server: FastMCP) -> list[dict[str, Any]]:
    """Call tools as a scripted model would, and return the messages that a host sends to its
    model."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do the tests pass?"}]
    async with Client(server) as client:

        async def call(name: str, **arguments: Any) -> str:
            result = await client.call_tool(name, arguments)
            text = str(getattr(result.content[0], "text", ""))
            messages.append({"role": "assistant", "call": name, "arguments": arguments})
            messages.append({"role": "tool", "content": text})
            print(f"  {name}: {text[:150]!r}")
            return text

        first = await call("run_tests")
        if first.startswith('{"stub"'):
            pointer = json.loads(first)["artifact"]
            await call("get_artifact", pointer=pointer, grep="ERROR")
            await call("count_lines", text=pointer)
    return messages


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, coatcheck.open(folder) as store:
        for title, middleware in (("without Coatcheck", []), ("with it", [Coatcheck(store)])):
            print(title)
            sent = json.dumps(asyncio.run(play(server_of(*middleware))))
            print(f"  last request: {len(sent):,} characters, about {estimate(sent):,} tokens")


if __name__ == "__main__":
    main()
