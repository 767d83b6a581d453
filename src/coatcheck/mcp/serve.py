"""Run the server: on stdio for one client, or over streamable HTTP on 127.0.0.1 for clients with the token.

Any web page open on this machine can send requests to 127.0.0.1, and use any host name for it. So the Host header is
checked, an Origin must be allowed, and every request needs the token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Final, NoReturn

import anyio
import httpx2
import uvicorn
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp.shared.exceptions import MCPDeprecationWarning
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coatcheck.errors import InvalidArgument, StoreUnavailable
from coatcheck.mcp.server import MAX_CONNECTIONS, Sessions, make_server
from coatcheck.mcp.wire import Tasks
from coatcheck.reading.sandbox import kill_all

HOST: Final = "127.0.0.1"
PATH: Final = "/mcp"
TOKEN: Final = "COATCHECK_MCP_TOKEN"  # an environment variable
_MIN_TOKEN: Final = 16
_BACKLOG: Final = 128
_ACCEPT: Final = 16  # connections that are accepted before the oldest are closed
_IDLE: Final = 1_800.0  # seconds without a request after which a client's session ends
_BEARER: Final = "bearer "
_SESSION: Final = "mcp-session-id"
_EXPOSED: Final = (_SESSION, "mcp-protocol-version", "www-authenticate")
_PROOF: Final = (10.0, 64)  # seconds for the token to come, and connections that may be without it
_HANDSHAKE: Final = (60.0, 100)  # seconds for a handshake, and handshakes that may be unfinished


def serve_stdio(sessions: Sessions) -> None:
    """Serve the client that started this process, until it closes our stdin."""
    _silence_warnings()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise the thread that reads stdin delays the exit
    signal.signal(signal.SIGTERM, _end)
    server = make_server(sessions)

    async def run() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(run)


def serve_http(
    sessions: Sessions, *, port: int, token: str | None, origins: Iterable[str], say: Callable[[str], None]
) -> None:
    """Serve over HTTP until a signal ends it. Without a token, a new one is made and printed once."""
    _silence_warnings()
    if token is not None and (
        len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token
    ):
        hint = f"use at least {_MIN_TOKEN} printable characters without spaces"
        raise InvalidArgument(f"the token in {TOKEN} is too weak", hint=hint)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)  # clients may connect as soon as the URL is printed
    except OSError as error:
        listener.close()
        text = f"cannot listen on port {port}: {error.strerror}"
        raise StoreUnavailable(text, hint="choose another --port") from error
    bound = listener.getsockname()[1]
    secret = token or secrets.token_urlsafe(32)
    hosts = [f"{host}:{bound}" for host in (HOST, "localhost")]
    security = TransportSecuritySettings(
        allowed_hosts=hosts, allowed_origins=[*(f"http://{host}" for host in hosts), *origins]
    )
    app = make_server(sessions).streamable_http_app(
        streamable_http_path=PATH,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # `_protected` does it
        session_idle_timeout=_IDLE,
        max_sessions=MAX_CONNECTIONS,
    )
    unproven = Probation(*_PROOF)
    protected = _protected(UnfinishedHandshakes(app, *_HANDSHAKE), security, secret, unproven)
    say(f"MCP server at http://{HOST}:{bound}{PATH}")
    if token is None:
        say(f"token, shown only once: {secret}")
    config = uvicorn.Config(
        protected, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2,
        http=_protocol(unproven), backlog=_ACCEPT,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, _leave)  # uvicorn raises the signal again when it is done
    with listener:
        _Server(config).run(sockets=[listener])


def _protected(app: ASGIApp, settings: TransportSecuritySettings, token: str, unproven: Probation) -> ASGIApp:
    """Protect an application: check Host and Origin, answer CORS preflights, and require the token."""
    security = TransportSecurityMiddleware(settings)

    async def with_token(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if not _has_token(scope, token):
            text = f"a bearer token is required: the one printed at the start, or from {TOKEN}"
            refusal = PlainTextResponse(text, 401, {"www-authenticate": "Bearer", "cache-control": "no-store"})
        else:
            unproven.passed(scope["client"])
            if scope["path"] != PATH:
                text = f"not found; the only path is {PATH}"
                refusal = PlainTextResponse(text, 404, {"cache-control": "no-store"})
        await (refusal or app)(scope, receive, send)

    for_pages = CORSMiddleware(
        with_token,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )

    async def protected(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif len(Headers(scope=scope).getlist("origin")) > 1:  # the SDK looks at the first
            await PlainTextResponse("Invalid Origin header", 403)(scope, receive, send)
        else:
            refusal = await security.validate_request(Request(scope))
            await (refusal or for_pages)(scope, receive, send)

    return protected


def _has_token(scope: Scope, token: str) -> bool:
    given = Headers(scope=scope).getlist("authorization")
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        return False
    return hmac.compare_digest(given[0][len(_BEARER) :].strip().encode(), token.encode())


class Probation:
    """What must be confirmed in time: connections by the token, sessions by the end of the handshake.

    Each is ended after some seconds, and the oldest if there are too many. So they cannot use up the file descriptors
    or the memory of the process, and clients with the token get through."""

    def __init__(self, seconds: float, max_open: int) -> None:
        self._seconds = seconds
        self._max_open = max_open
        self._open: dict[Hashable, tuple[Callable[[], object], asyncio.TimerHandle]] = {}

    def begin(self, key: Hashable, end: Callable[[], object]) -> None:
        self.passed(key)
        self._open[key] = end, asyncio.get_running_loop().call_later(self._seconds, self._fail, key)
        if len(self._open) > self._max_open:
            self._fail(next(iter(self._open)))

    def passed(self, key: Hashable) -> Callable[[], object] | None:
        """Forget what is confirmed or over, and return what would have ended it."""
        end, timer = self._open.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        return end

    def _fail(self, key: Hashable) -> None:
        if (end := self.passed(key)) is not None:
            end()


class UnfinishedHandshakes:
    """ASGI middleware that ends the sessions of clients that never finish the handshake."""

    def __init__(self, app: ASGIApp, seconds: float, max_open: int) -> None:
        self._app = app
        self._unfinished = Probation(seconds, max_open)
        self._tasks = Tasks()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = Headers(scope=scope).getlist(_SESSION) if scope["type"] == "http" else []
        for session in known:
            self._unfinished.passed(session)

        async def sent(message: Message) -> None:
            await send(message)
            is_start = message["type"] == "http.response.start" and not known
            if is_start and (session := Headers(raw=message["headers"]).get(_SESSION)) is not None:
                self._unfinished.begin(session, lambda: self._tasks.start(self._end(session)))

        await self._app(scope, receive, sent)

    async def _end(self, session: str) -> None:
        """Send the DELETE with which a client ends its session."""
        headers = {_SESSION: session, "accept": "application/json, text/event-stream"}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self._app)) as client:
            await client.delete(f"http://{HOST}{PATH}", headers=headers)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_BACKLOG)  # asyncio used the accept limit for this, too

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").disabled = True  # each interrupted call would log a traceback
        await super().shutdown(sockets)


def _protocol(unproven: Probation) -> type[H11Protocol]:
    """Return an HTTP protocol that reports its connections."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            unproven.begin(self.client, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            unproven.passed(self.client)
            super().connection_lost(exc)

    return Protocol


def _end(number: int, _: object) -> None:
    """End by the signal, as without a handler, after ending our child processes."""
    kill_all()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _silence_warnings() -> None:
    """Silence warnings: about MCP logging, deprecated but used by older clients, and about refused requests."""
    logging.getLogger("mcp.server.transport_security").disabled = True
    if not sys.warnoptions:
        warnings.simplefilter("ignore", MCPDeprecationWarning)
