"""What the middleware for FastMCP does beyond the adapter suite: the session of a request, and what
is unchanged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client, Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from fastmcp.server.middleware.caching import ResponseCachingMiddleware
from fastmcp.tools.base import ToolResult
from fastmcp.utilities.tests import run_server_async
from mcp_types import CallToolResult, TextContent

import coatcheck
from coatcheck import Policy, Store
from coatcheck.adapters.fastmcp import Coatcheck
from tests.adapters.pages import figures_of, run_example, run_page
from tests.adapters.suite import LOG, ROWS, fetch_log, fetch_rows, pointer_in

Play = Callable[..., Awaitable[Client]]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with coatcheck.open(tmp_path / "store") as opened:
        yield opened


def server_of(*middleware: Any, **options: Any) -> FastMCP:
    server = FastMCP("tests", **options)
    for tool in (fetch_log, fetch_rows):
        server.tool(tool)
    for one in middleware:
        server.add_middleware(one)
    return server


def over_http(server: FastMCP, play: Callable[[Play], Awaitable[None]]) -> None:
    """Run a server on loopback. `play` gets a function that connects a client."""

    async def run() -> None:
        async with AsyncExitStack() as opened:
            url = await opened.enter_async_context(run_server_async(server))
            await play(lambda **options: opened.enter_async_context(Client(url, **options)))

    asyncio.run(run())


async def text_of(client: Client, name: str, **arguments: Any) -> str:
    result: CallToolResult = await client.call_tool_mcp(name, arguments)
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def found_by(reader: Client, pointer: str) -> bool:
    return "code 4711" in await text_of(reader, "get_artifact", pointer=pointer, grep="ERROR")


def test_each_user_has_their_own_session(store: Store) -> None:
    tokens: dict[str, Any] = {
        name: {"client_id": "app", "sub": name, "scopes": []} for name in ("ada", "bob")
    }
    server = server_of(Coatcheck(store), auth=StaticTokenVerifier(tokens=tokens))

    async def play(connect: Play) -> None:
        ada, bob, again = (
            await connect(auth="ada"),
            await connect(auth="bob"),
            await connect(auth="ada"),
        )
        pointer = pointer_in(await text_of(ada, "fetch_log"))
        assert [await found_by(one, pointer) for one in (ada, again, bob)] == [True, True, False]
        assert pointer not in await text_of(bob, "list_artifacts")

    over_http(server, play)
    assert not any("ada" in one.session_id for one in store.sessions())


def test_a_connection_with_a_handshake_has_the_session_of_its_state(store: Store) -> None:
    async def play(connect: Play) -> None:
        one, other = await connect(mode="legacy"), await connect(mode="legacy")
        texts = await asyncio.gather(*(text_of(one, "fetch_log") for _ in range(4)))
        assert len(set(texts)) == 1
        assert [await found_by(client, pointer_in(texts[0])) for client in (one, other)] == [
            True,
            False,
        ]

    over_http(server_of(Coatcheck(store)), play)
    assert len([one for one in store.sessions() if one.session_id.startswith("fastmcp:")]) == 2


def test_an_unidentified_request_passes_unchanged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(connect: Play) -> None:
        client = await connect()
        assert [tool.name for tool in await client.list_tools()] == ["fetch_log", "fetch_rows"]
        assert await text_of(client, "fetch_log") == LOG
        assert await text_of(client, "fetch_log") == LOG
        assert "no artifacts" in await text_of(client, "get_artifact", pointer="art:000000000000")

    with caplog.at_level(logging.WARNING, "coatcheck"):
        over_http(server_of(Coatcheck(store)), play)
    assert len([one for one in caplog.records if "pass session" in one.getMessage()]) == 1
    assert [*store.sessions()] == []


def test_the_author_may_name_the_session_of_each_request(store: Store) -> None:
    def named(context: Context) -> str | None:
        request = context.request_context
        assert request is not None
        return request.request.headers.get("x-project") if request.request else None

    async def play(connect: Play) -> None:
        from fastmcp.client.transports import StreamableHttpTransport

        url = (await connect()).transport.url
        one, other = (
            Client(StreamableHttpTransport(url, headers={"x-project": name}))
            for name in ("one", "other")
        )
        async with one, other:
            pointer = pointer_in(await text_of(one, "fetch_log"))
            assert [await found_by(client, pointer) for client in (one, other)] == [True, False]

    over_http(server_of(Coatcheck(store, session=named)), play)


def test_a_pointer_opens_with_the_next_request_of_a_client_in_memory(store: Store) -> None:
    async def play() -> None:
        async with Client(server_of(Coatcheck(store))) as client:
            assert await found_by(client, pointer_in(await text_of(client, "fetch_log")))

    asyncio.run(play())


def test_a_client_that_checks_output_schemas_accepts_stubs(store: Store) -> None:
    async def play() -> None:
        async with Client(server_of(Coatcheck(store))) as client:
            assert {tool.output_schema is None for tool in await client.list_tools()} == {True}
            result = await client.call_tool("fetch_rows")
            assert result.structured_content is None
            pointer = pointer_in(result.content[0].text)
            assert [
                one.get(pointer)
                for one, _ in [store.find(pointer) or pytest.fail("it is not stored")]
            ] == [ROWS]

    asyncio.run(play())


def test_a_disabled_policy_leaves_the_list_of_tools_as_it_is(store: Store) -> None:
    async def listed(*middleware: Any) -> str:
        async with Client(server_of(*middleware)) as client:
            return json.dumps([tool.model_dump(mode="json") for tool in await client.list_tools()])

    assert asyncio.run(listed()) == asyncio.run(
        listed(Coatcheck(store, policy=Policy(enabled=False)))
    )


def test_structured_content_that_differs_from_the_text_is_bounded_too(store: Store) -> None:
    async def play() -> None:
        server = server_of(Coatcheck(store))

        @server.tool
        def both() -> ToolResult:
            """Return a text for people and rows for programs."""
            return ToolResult(
                content="3,000 rows", structured_content={"rows": ROWS}, meta={"kept": True}
            )

        async with Client(server) as client:
            result = await client.call_tool_mcp("both", {})
            texts = [block.text for block in result.content if isinstance(block, TextContent)]
            assert texts[0] == "3,000 rows"
            assert pointer_in(texts[1])
            assert result.structured_content is None
            assert (result.meta or {})["kept"] is True

    asyncio.run(play())


def test_a_long_error_is_bounded_and_keeps_its_type(store: Store) -> None:
    async def play() -> None:
        server = server_of(Coatcheck(store))

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ToolError("refused\n" + LOG)

        with pytest.raises(ToolError) as raised:
            await server.call_tool("fail")
        assert len(str(raised.value)) < 3_000
        async with Client(server) as client:
            result = await client.call_tool_mcp("fail", {})
            assert result.is_error

    asyncio.run(play())


def test_cached_results_become_stubs_in_each_session(store: Store) -> None:
    async def play() -> None:
        names = iter(["one", "other"])
        current = next(names)
        server = server_of(Coatcheck(store, session=lambda _: current), ResponseCachingMiddleware())
        async with Client(server) as client:
            first = pointer_in(await text_of(client, "fetch_log"))
            current = next(names)
            assert not await found_by(client, first)
            assert pointer_in(await text_of(client, "fetch_log")) == first
            assert await found_by(client, first)

    asyncio.run(play())


def test_a_tool_of_a_mounted_server_that_has_our_name_keeps_it(store: Store) -> None:
    async def play() -> None:
        museum = FastMCP("museum")

        @museum.tool
        def get_artifact(number: str) -> str:
            """Return an artifact of the museum."""
            return f"an amphora, number {number}"

        server = server_of(Coatcheck(store))
        server.mount(museum)
        async with Client(server) as client:
            assert await text_of(client, "get_artifact", number="7") == "an amphora, number 7"
            names = {tool.name for tool in await client.list_tools()}
            assert {"get_artifact", "coatcheck_get_artifact"} <= names
            assert "coatcheck_get_artifact" in await text_of(client, "fetch_log")

    asyncio.run(play())


# The page and the example


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("fastmcp.md", tmp_path)


def test_the_example_shows_how_much_smaller_the_request_is() -> None:
    without, with_it = figures_of(run_example("fastmcp_server"))
    assert with_it * 50 < without
