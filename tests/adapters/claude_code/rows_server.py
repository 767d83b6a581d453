"""An MCP server on stdio with a tool that returns a table, one that takes a text, and one that
returns a text twice: as a block, and as structured content, like the official server for files."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server


def rows(count: int) -> str:
    return json.dumps(
        [{"id": n, "name": f"customer {n}", "city": f"city {n % 97}"} for n in range(count)]
    )


def page(count: int) -> str:
    return "".join(
        f"2026-01-01 12:00:{n % 60:02} INFO request {n} took {n} ms\n" for n in range(count)
    )


async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
    number = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    text = {"type": "object", "properties": {"text": {"type": "string"}}}
    always = {"anthropic/alwaysLoad": True}
    return types.ListToolsResult(
        tools=[
            types.Tool(name="rows", description="Return rows.", input_schema=number, _meta=always),
            types.Tool(
                name="count", description="Count characters.", input_schema=text, _meta=always
            ),
            types.Tool(
                name="page", description="Return a text.", input_schema=number, _meta=always
            ),
        ]
    )


async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    arguments = params.arguments or {}
    if params.name == "page":
        whole = page(arguments["count"])
        return types.CallToolResult(
            content=[types.TextContent(text=whole)], structured_content={"content": whole}
        )
    text = (
        rows(arguments["count"])
        if params.name == "rows"
        else f"{len(arguments['text'])} characters"
    )
    return types.CallToolResult(content=[types.TextContent(text=text)])


async def main() -> None:
    server: Server[Any] = Server("rows", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (source, sink):
        await server.run(source, sink, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
