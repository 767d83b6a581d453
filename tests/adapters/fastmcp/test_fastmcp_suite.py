"""Servers of FastMCP pass the adapter suite: in memory, on a connection with a handshake, and over
HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from fastmcp import Client, FastMCP
from fastmcp.server.middleware.response_limiting import ResponseLimitingMiddleware
from fastmcp.tools import Tool
from fastmcp.utilities.tests import run_server_async
from fastmcp.utilities.types import File, Image

from coatcheck import Store
from coatcheck.adapters import ContentPart
from coatcheck.adapters.fastmcp import Coatcheck
from tests.adapters.suite import Ability, AdapterSuite, Driver, Run, Scenario, SeenResult

_OF_CLIENTS = "only clients have messages and agents"


class FastMCPDriver(Driver):
    """A client without a framework: it lists the tools of a server, and calls them for the scripted
    model."""

    lacks: ClassVar[Mapping[Ability, str]] = {
        "approval": _OF_CLIENTS,
        "cancellation": "a server answers a cancelled call with an error of the protocol",
        "final_answer": _OF_CLIENTS,
        "hand_off": _OF_CLIENTS,
        "persistence": _OF_CLIENTS,
        "retry": _OF_CLIENTS,
        "sub_agent": _OF_CLIENTS,
    }
    mode: ClassVar[str] = "auto"

    def run(self, scenario: Scenario) -> Run:
        server = FastMCP("suite")
        for tool in scenario.tools:
            server.tool(tool)
        for tool in scenario.shared:
            server.add_tool(tool)
        if scenario.offloader:
            server.add_middleware(ResponseLimitingMiddleware(max_size=20_000))
        if scenario.store is not None:
            server.add_middleware(
                Coatcheck(scenario.store, policy=scenario.policy, session=scenario.conversation)
            )
        try:
            final = asyncio.run(self._loop(server, scenario))
        except BaseException as error:  # noqa: BLE001 - the suite compares it
            return Run(scenario.model, "", error)
        return Run(scenario.model, final)

    async def _loop(self, server: FastMCP, scenario: Scenario) -> str:
        messages: list[Any] = [{"role": "user", "text": scenario.prompt}]
        results: list[SeenResult] = []
        async with AsyncExitStack() as opened:
            client = await self.client(server, opened)
            while True:
                tools = [
                    {
                        "name": one.name,
                        "description": one.description,
                        "parameters": one.input_schema,
                    }
                    for one in await client.list_tools()
                ]
                turn = scenario.model.respond(messages, tools, results)
                if not turn.calls:
                    return turn.text
                messages += [
                    {"call": call.id, "name": call.name, "arguments": call.arguments}
                    for call in turn.calls
                ]
                calls = [
                    client.call_tool_mcp(call.name, dict(call.parsed())) for call in turn.calls
                ]
                for call, result in zip(turn.calls, await asyncio.gather(*calls), strict=True):
                    shown = result.model_dump(mode="json", by_alias=True, exclude_none=True)
                    messages.append({"result": call.id, "content": shown["content"]})
                    results.append(seen(call.id, call.name, shown))

    async def client(self, server: FastMCP, opened: AsyncExitStack) -> Client:
        return await opened.enter_async_context(Client(server, mode=self.mode))

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        return Tool.from_function(function)

    def content(self, parts: Sequence[ContentPart]) -> Any:
        made = [content_of(one) for one in parts]
        return made if len(made) > 1 else made[0]

    def delete(self, store: Store, conversation: str) -> None:
        Coatcheck(store).forget(conversation)


def content_of(part: ContentPart) -> Any:
    if not part.media_type:
        return part.text
    kind, _, form = part.media_type.partition("/")
    return (
        Image(data=part.data, format=form)
        if kind == "image"
        else File(data=part.data, format=form, name="file")
    )


def seen(call_id: str, name: str, result: Mapping[str, Any]) -> SeenResult:
    blocks = result["content"]
    inner = [block.get("resource", block) for block in blocks]
    return SeenResult(
        id=call_id,
        name=name,
        text="\n".join(one["text"] for one in inner if "text" in one),
        is_error=bool(result.get("isError")),
        media=tuple(
            base64.b64decode(one.get("data") or one["blob"])
            for one in inner
            if "data" in one or "blob" in one
        ),
    )


class HandshakeDriver(FastMCPDriver):
    mode: ClassVar[str] = "legacy"


class HttpDriver(FastMCPDriver):
    lacks: ClassVar[Mapping[Ability, str]] = {
        **FastMCPDriver.lacks,
        "private": "an HTTP request without a name and a user passes unchanged; test_fastmcp.py covers it",
    }

    async def client(self, server: FastMCP, opened: AsyncExitStack) -> Client:
        url = await opened.enter_async_context(run_server_async(server))
        return await opened.enter_async_context(Client(url))


class TestInMemory(AdapterSuite):
    def driver(self) -> Driver:
        return FastMCPDriver()


class TestHandshake(AdapterSuite):
    def driver(self) -> Driver:
        return HandshakeDriver()


class TestHttp(AdapterSuite):
    def driver(self) -> Driver:
        return HttpDriver()
