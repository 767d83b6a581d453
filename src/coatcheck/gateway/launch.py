"""Serving a gateway: until a signal ends it, or beside a command whose variables point at it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coatcheck.errors import InvalidArgument
from coatcheck.gateway.front import Gateway
from coatcheck.gateway.settings import TOKEN
from coatcheck.http import serving

GRACE: Final = 5
"""Seconds that answers in progress get when a gateway stops."""
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CROWD: Final = 512  # agents that may connect at once
_KILLED: Final = 128  # a shell adds the number of the signal to this


def check_token(token: str) -> str:
    """Return a token that is long enough and fits into a path. The error does not show it."""
    serving.check_token(token, TOKEN)
    if not all(one.isalnum() or one in "-_.~" for one in token):
        raise InvalidArgument(
            f"the token in {TOKEN} does not fit into a path", hint="use letters, digits and -_.~"
        )
    return token


def local_server(**options: Any) -> serving.LocalServer:
    """Return the server for a gateway, with the options of `LocalServer`."""
    return serving.LocalServer(
        methods=_METHODS, exposed=("*",), relays=True, max_unproven=_CROWD, **options
    )


def address_of(server: serving.LocalServer, token: str | None) -> str:
    """Return the address for clients. It contains the token, since some clients can set only an
    address."""
    return server.url + (f"/t/{token}" if token else "")


@contextlib.contextmanager
def beside(gateway: Gateway, server: serving.LocalServer) -> Iterator[None]:
    """Serve in a thread while something else runs. Connections that come before it has started
    wait."""
    running = server.prepared(gateway, grace=GRACE)
    thread = threading.Thread(target=running.run, name="coatcheck-gateway", daemon=True)
    thread.start()
    try:
        yield
    finally:
        running.should_exit = True
        thread.join(GRACE + 5)


def variables(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that point clients at a gateway."""
    found = {
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_BASE": address,
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
    }
    if (
        "ENABLE_TOOL_SEARCH" not in environ
    ):  # Claude Code turns it off for an address that it does not know
        found["ENABLE_TOOL_SEARCH"] = "true"
    if "OPENCODE_CONFIG_CONTENT" not in environ:
        options = {"options": {"baseURL": f"{address}/v1"}}
        found["OPENCODE_CONFIG_CONTENT"] = json.dumps(
            {"provider": {"anthropic": options, "openai": options}}
        )
    return found


def is_codex(command: Sequence[str]) -> bool:
    """Whether a command needs an option instead of variables. Other users can read it, so it must
    not have the token: the gateway then accepts programs of the same user without one, if it can
    tell them (`knows_users`).

    Codex has no other way that keeps its conversations usable. One with a provider of its own could
    name a variable with the token, but cannot be resumed with another provider later."""
    return Path(command[0]).name in ("codex", "codex.js")


def pointed(command: Sequence[str], address: str) -> list[str]:
    """Return a command with the options that point it at a gateway: Codex ignores the variables."""
    if is_codex(command):
        return [command[0], "-c", f'openai_base_url="{address}/v1"', *command[1:]]
    return list(command)


def knows_users(server: serving.LocalServer) -> bool:
    """Whether a gateway on this server can tell programs of the same user from others. Tries it."""
    with socket.create_connection((serving.HOST, server.port)) as own:
        return serving.is_same_user(own.getsockname(), own.getpeername())


def upstreams(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses that the environment names, which the gateway then uses itself."""
    found = {}
    if anthropic := environ.get("ANTHROPIC_BASE_URL"):
        found["anthropic"] = anthropic.rstrip("/").removesuffix("/v1")
    if openai := environ.get("OPENAI_BASE_URL") or environ.get("OPENAI_API_BASE"):
        found["openai"] = openai.rstrip("/").removesuffix("/v1")
    return found


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command with these variables, pass signals on to it, and return its exit code."""
    try:
        child = subprocess.Popen(list(command), env=dict(environ))
    except OSError as error:
        raise InvalidArgument(
            f"cannot run {command[0]!r}: {error.strerror or error}",
            hint="check the command after --",
        ) from error
    before: dict[int, Any] = {}

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            child.send_signal(number)

    handlers: dict[int, Callable[[int, object], None] | int] = {signal.SIGTERM: pass_on}
    if os.name == "posix":
        handlers |= {
            signal.SIGHUP: pass_on,
            signal.SIGINT: _ignore,
        }  # a terminal sends SIGINT to the command itself
    try:
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.terminate()
            child.wait()
    return _KILLED - code if code < 0 else code


def _ignore(number: int, frame: object) -> None:
    """Do nothing. Unlike SIG_IGN, a child does not inherit this."""
