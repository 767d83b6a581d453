"""Proxies and servers for the tests of MCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mcp import node_servers
from tests.mcp.speaking import ODD, Speaker, environment, proxy


@pytest.fixture(scope="session")
def npm_server() -> Callable[[str], list[str]]:
    """How to start a server from npm. Where they are not installed the test skips, but never in CI."""

    def command(name: str) -> list[str]:
        try:
            return node_servers.command(name)
        except node_servers.Missing as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))

    return command


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a proxy keeps its store."""
    return tmp_path / "store"


@pytest.fixture
def speak(place: Path) -> Iterator[Callable[..., Speaker]]:
    """Start a proxy before the odd server (or what is given), and speak to it. It ends with the test."""
    with ExitStack() as stack:

        def start(*options: str, server: list[str] | None = None, begin: bool = True, **env: str) -> Speaker:
            command = proxy(*options, server=ODD if server is None else server)
            speaker = stack.enter_context(Speaker(command, environment(place, **env)))
            if begin:
                speaker.begin()
            return speaker

        yield start


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """One proxy before the odd server, for all tests of a module that do not need their own."""
    env = environment(tmp_path_factory.mktemp("odd") / "store")
    with Speaker(proxy("--inline", "typed", "--inline", "small_table", server=ODD), env) as speaker:
        speaker.begin()
        cursor: dict[str, str] = {}
        while following := speaker.ask("tools/list", cursor)["result"].get("nextCursor"):
            cursor = {"cursor": following}
        yield speaker
