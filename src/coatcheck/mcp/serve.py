"""Running the server: on stdio for one client, or over streamable HTTP on 127.0.0.1 for those who have the token."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

import anyio
import uvicorn
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPDeprecationWarning

from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.mcp.gate import Gate
from coatcheck.mcp.server import Sessions, make_server

HOST: Final = "127.0.0.1"
PATH: Final = "/mcp"
TOKEN: Final = "COATCHECK_MCP_TOKEN"  # the name of a variable
_LEAST: Final = 16


def serve_stdio(sessions: Sessions) -> None:
    """Serve the client that started this process, until it closes our stdin."""
    _quieten()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a thread that reads stdin would keep the process waiting
    server = make_server(sessions)

    async def run() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(run)


def serve_http(
    sessions: Sessions, *, port: int, token: str | None, origins: Iterable[str], say: Callable[[str], None]
) -> None:
    """Serve over HTTP until a signal ends it. Without a token it makes one, and says it once."""
    _quieten()
    if token is not None and (len(token) < _LEAST or not token.isascii() or not token.isprintable() or " " in token):
        raise InvalidArgument(
            f"the token in {TOKEN} is too weak", hint=f"at least {_LEAST} printable characters without blanks"
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)  # who reads the address below may connect at once
    except OSError as error:
        listener.close()
        raise StoreUnavailable(f"port {port} cannot be had: {error.strerror}", hint="choose another --port") from error
    bound = listener.getsockname()[1]
    secret = token or secrets.token_urlsafe(32)
    ours = [f"{host}:{bound}" for host in (HOST, "localhost")]
    app = make_server(sessions).streamable_http_app(
        streamable_http_path=PATH,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # the gate is stricter
    )
    gate = Gate(app, hosts=ours, origins=[*(f"http://{one}" for one in ours), *origins], token=secret, path=PATH)
    say(f"MCP server at http://{HOST}:{bound}{PATH}")
    if token is None:
        say(f"token, shown this once: {secret}")
    config = uvicorn.Config(
        gate, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2
    )
    signal.signal(signal.SIGTERM, _leave)  # what uvicorn raises again when it is done, and would end us at once
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _quieten() -> None:
    """Logging is deprecated in the newest protocol, and wanted by clients of all others."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", MCPDeprecationWarning)
