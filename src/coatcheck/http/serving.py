"""Run an ASGI application as a server that web pages and strangers can reach: `LocalServer`.

Any web page open on this machine can send requests to 127.0.0.1, and use any host name for it. So
the Host header is checked, and an Origin must be allowed, before anything else. Connections without
a token are closed after a few seconds. The store over HTTP, the MCP server and the gateway share
this; paths and tokens belong to the application.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Collection, Hashable, Iterable
from pathlib import Path
from typing import Final, NoReturn, Self

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coatcheck.errors import InvalidArgument, StoreUnavailable

HOST: Final = "127.0.0.1"
MIN_TOKEN: Final = 16
_LOCAL: Final = (HOST, "localhost")
_ANY: Final = ("0.0.0.0", "::")
_BACKLOG: Final = 128
_ACCEPT: Final = 16  # connections that are accepted before the oldest are closed
_BEARER: Final = "bearer "
_LARGEST_HEAD: Final = 1 << 16  # bytes of the request line and the headers
_PROOF: Final = 10.0  # seconds for the token to arrive
_PROVEN: Final = "coatcheck.proven"
_ORIGIN: Final = re.compile(r"https?://[^/\s?#@,]+")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_SOCKETS: Final = {"/proc/net/tcp": "", "/proc/net/tcp6": "0" * 16 + "FFFF0000"}
"""The tables of sockets on Linux, and how an IPv4 address begins in each."""
_ESTABLISHED: Final = "01"
_FOREIGN: Final = "this server does not accept requests from there"


def problem(status: int, code: str, message: str, hint: str = "", **headers: str) -> Response:
    """Return the response for a request that is refused or failed."""
    body = json.dumps({"error": {"code": code, "message": message, "hint": hint}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {"cache-control": "no-store", "x-content-type-options": "nosniff", **named}
    return Response(body, status, given, media_type="application/json")


def new_token() -> str:
    return secrets.token_urlsafe(32)


def check_token(token: str, source: str) -> None:
    """Check that a token from `source` is long enough and fits into a header. The error does not
    show it."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        hint = f"use at least {MIN_TOKEN} printable characters without spaces"
        raise InvalidArgument(f"the token in {source} is too weak", hint=hint)


def bearer(scope: Scope) -> str | None:
    """Return the bearer token of a request. A request with several `Authorization` headers has
    none."""
    given = Headers(scope=scope).getlist("authorization")
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        return None
    return given[0][len(_BEARER) :].strip()


def is_same(given: str | None, token: str) -> bool:
    """Compare a token from a request in constant time."""
    return given is not None and hmac.compare_digest(
        given.encode("utf-8", "replace"), token.encode()
    )


def is_same_user(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Whether the client of a connection on this machine is a program of this user. Linux lists the
    owner of each socket. False on other systems, and for IPv6."""
    if ":" in client[0] or ":" in server[0]:
        return False
    ends = _listed_address(*client), _listed_address(*server)
    for table, start in _SOCKETS.items():
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, owner, *_ = line.split()
            if (local, remote) == (start + ends[0], start + ends[1]) and state == _ESTABLISHED:
                return int(owner) == os.getuid()
    return False


def _listed_address(host: str, port: int) -> str:
    """Return an IPv4 address and a port as in the tables of sockets."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def prove(scope: Scope) -> None:
    """Note that the client of this request has presented a valid token: its connection may stay."""
    scope.get(_PROVEN, lambda: None)()


class LocalServer:
    """A listening socket, and the checks that each request must pass before an application gets it.

    `hosts` are further host names that clients use, for example a reverse proxy's, with a port or
    for any port; `origins` are those of web pages that may send requests. With `relays`, responses
    come from another server: they have their own date, and one that breaks off is not logged. At
    most `max_unproven` connections wait for their token. A context manager that closes the
    socket."""

    def __init__(
        self,
        *,
        host: str = HOST,
        port: int = 0,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        methods: Collection[str] = ("GET", "POST", "DELETE"),
        exposed: Collection[str] = (),
        relays: bool = False,
        max_unproven: int = 64,
    ) -> None:
        self._methods, self._exposed = methods, exposed
        self._relays = relays
        self._unproven = Probation(_PROOF, max_unproven)
        extra_hosts, extra_origins = tuple(hosts), tuple(origins)
        for one in extra_hosts:
            if not _HOST.fullmatch(one):
                raise InvalidArgument(
                    f"invalid host name {one!r}", hint="use a name or name:port, without http://"
                )
        for one in extra_origins:
            if not _ORIGIN.fullmatch(one):
                raise InvalidArgument(
                    f"invalid origin {one!r}", hint="use http(s)://name or http(s)://name:port"
                )
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        names = (*_LOCAL, name) if self.is_local(host) else _LOCAL if host in _ANY else (name,)
        own = {f"{one}:{self.port}" for one in names}
        self.url = f"http://{name}:{self.port}"
        self._hosts = frozenset(one.lower() for one in (*own, *extra_hosts))
        self._origins = (*(f"http://{one}" for one in sorted(own)), *extra_origins)

    @staticmethod
    def is_local(host: str) -> bool:
        """Whether an address can only be reached from this machine."""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def run(self, app: ASGIApp, *, grace: int) -> None:
        """Serve until a signal ends it. Requests in progress then get `grace` seconds."""
        signal.signal(signal.SIGTERM, _leave)  # uvicorn raises the signal again when it is done
        self.prepared(app, grace=grace).run()

    def prepared(self, app: ASGIApp, *, grace: int) -> uvicorn.Server:
        """Return the server for `run`, or for a thread: it ends when its `should_exit` is set."""
        config = uvicorn.Config(
            self.guarded(app), log_level="critical" if self._relays else "error", access_log=False,
            ws="none", server_header=False, date_header=not self._relays,
            timeout_graceful_shutdown=grace, backlog=_ACCEPT, http=_protocol(self._unproven),
            proxy_headers=False,
        )  # fmt: skip
        return _HttpServer(config, self._listener)

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Return the application behind the checks of Host and Origin, with answers to CORS
        preflights."""
        for_pages = CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_methods=tuple(self._methods),
            allow_headers=("*",),
            expose_headers=tuple(self._exposed),
        )

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            elif scope["type"] != "http":
                await send({"type": "websocket.close", "code": 1008})
            elif (refusal := self._refusal(Headers(scope=scope))) is not None:
                await refusal(scope, receive, send)
            else:
                proven = functools.partial(self._unproven.passed, scope["client"])
                await for_pages({**scope, _PROVEN: proven}, receive, send)

        return checked

    def _refusal(self, headers: Headers) -> Response | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0].lower()):
            return problem(
                403,
                "forbidden",
                f"foreign Host header: {_FOREIGN}",
                "connect to the printed address",
            )
        if len(origins) > 1 or (origins and origins[0] not in self._origins):
            return problem(
                403,
                "forbidden",
                f"foreign Origin header: {_FOREIGN}",
                "start the server with this origin",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        return match is not None and (host in self._hosts or match[1] in self._hosts)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sends small writes at once only on sockets that name it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # clients may connect as soon as the URL is printed
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host} port {port}: {error.strerror}"
        raise StoreUnavailable(text, hint="choose another --port") from error
    return listener


class Probation:
    """What must be confirmed in time: connections by the token, MCP sessions by the end of the
    handshake.

    Each is ended after a few seconds, and the oldest if there are too many. So they cannot use up
    the file descriptors or the memory of the process, and clients with the token get through."""

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
        """Forget one that is confirmed or over, and return what would have ended it."""
        end, timer = self._open.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        return end

    def _fail(self, key: Hashable) -> None:
        if (end := self.passed(key)) is not None:
            end()


class _HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(_BACKLOG)  # asyncio used the accept limit for this, too

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger(
            "uvicorn.error"
        ).disabled = True  # each interrupted call would log a traceback
        await super().shutdown(sockets)


def _protocol(unproven: Probation) -> type[HttpToolsProtocol]:
    """Return an HTTP protocol that reports its connections, limits the head of a request, ignores
    trailers, and answers invalid HTTP in our form."""

    class Protocol(HttpToolsProtocol):
        _is_in_head = True
        """Whether the head of a request is being read, or none has begun."""
        _size = 0
        """Bytes since the last piece of a body: of a head, of trailers, or around chunks."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            unproven.begin(self.client, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            unproven.passed(self.client)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._size += len(data)
            super().data_received(data)
            if self._size > _LARGEST_HEAD:
                self.send_400_response("")

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._is_in_head:  # the others are trailers, which come after the checks
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_in_head, self._size = False, 0
            self.headers[:] = [
                (name, value.strip(b" \t")) for name, value in self.headers
            ]  # the parser leaves those
            if sum(len(name) + len(value) for name, value in self.headers) > _LARGEST_HEAD:
                raise ValueError("the head of a request is too large")
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._size = 0
            if not self.cycle.body:
                self.cycle.body = b""  # type: ignore[assignment]  # so that the application gets the bytes without a copy
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._is_in_head, self._size = True, 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self.transport.is_closing():
                return
            if not self._has_answered() and not self.pipeline:
                answer = problem(
                    400, "invalid_request", "this is not a valid HTTP request", connection="close"
                )
                head = [
                    b"HTTP/1.1 400 Bad Request",
                    *(name + b": " + value for name, value in answer.raw_headers),
                ]
                self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
            self.transport.close()

        def _has_answered(self) -> bool:
            """Whether an answer has begun that a further one would disturb."""
            cycle: RequestResponseCycle | None = self.cycle
            if cycle is None or not cycle.response_started:
                return False
            return not (self._is_in_head and cycle.response_complete)

    return Protocol


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
