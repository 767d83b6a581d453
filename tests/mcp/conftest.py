"""Fixtures for the MCP tests: proxies and servers."""

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
    """The command for a server from npm. Skips the test if it is not installed, but not in CI."""

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
    """The folder of a proxy's store."""
    return tmp_path / "store"


@pytest.fixture
def speak(place: Path) -> Iterator[Callable[..., Speaker]]:
    """Start a proxy in front of the odd server, or of `server`. It ends with the test."""
    with ExitStack() as stack:

        def start(
            *options: str,
            server: list[str] | None = None,
            begin: bool = True,
            is_warm: bool = True,
            **env: str,
        ) -> Speaker:
            command = proxy(*options, server=ODD if server is None else server, is_warm=is_warm)
            speaker = stack.enter_context(Speaker(command, environment(place, **env)))
            if begin:
                speaker.begin()
            return speaker

        yield start


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """One proxy in front of the odd server, shared by the tests of a module."""
    env = environment(tmp_path_factory.mktemp("odd") / "store")
    command = proxy("--inline", "typed", "--inline", "small_table", server=ODD, is_warm=False)
    with Speaker(command, env) as speaker:
        speaker.begin()
        cursor: dict[str, str] = {}
        while following := speaker.ask("tools/list", cursor)["result"].get("nextCursor"):
            cursor = {"cursor": following}
        yield speaker
