"""The gate before an HTTP server on this machine: who may pass, and nobody else.

A web page that somebody has open can reach a server on 127.0.0.1 too, under any name that it makes resolve there. So
the Host must be ours, an Origin must be one that was allowed, and a token is wanted from everybody.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BEARER: Final = b"bearer "
_ALLOW: Final = b"access-control-allow"
_EXPOSED: Final = b"mcp-session-id, mcp-protocol-version, www-authenticate"


class Gate:
    """An ASGI application around another. `hosts` and `origins` are exact."""

    def __init__(self, app: App, *, hosts: Iterable[str], origins: Iterable[str], token: str, path: str) -> None:
        self._app = app
        self._hosts = frozenset(host.encode() for host in hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._token = token.encode()
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (foreign := self._foreign(scope)) is not None:
            await _answer(send, 403, foreign)
        else:
            await self._pass(scope, receive, _for_page(send, _values(scope, b"origin")))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whoever asks is no foreign page. A browser asks first whether a page may ask, and has no token then."""
        wanted = _values(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and wanted and _values(scope, b"origin"):
            asked = b", ".join(_values(scope, b"access-control-request-headers"))
            await _answer(send, 204, "", (_ALLOW + b"-methods", b"GET, POST, DELETE"), (_ALLOW + b"-headers", asked))
        elif not self._has_token(_values(scope, b"authorization")):
            said = "a bearer token is wanted: the one that was printed at the start, or COATCHECK_MCP_TOKEN"
            await _answer(send, 401, said, (b"www-authenticate", b"Bearer"))
        elif scope["path"] != self._path:
            await _answer(send, 404, f"there is only {self._path}")
        else:
            await self._app(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """Why a request is not for us, where it is not. What a foreign page could learn of us ends here."""
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return "this Host is not served here"
        if len(origins) > 1 or not self._origins.issuperset(origins):
            return "this Origin may not ask here"
        return None

    def _has_token(self, given: list[bytes]) -> bool:
        if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
            return False
        return hmac.compare_digest(given[0][len(_BEARER) :].strip(), self._token)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _for_page(send: Send, origins: list[bytes]) -> Send:
    """What is sent to a page, so that its browser hands it over."""
    if not origins:
        return send
    shown = [(_ALLOW + b"-origin", origins[0]), (b"access-control-expose-headers", _EXPOSED), (b"vary", b"Origin")]

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *shown]}
        await send(message)

    return sent


async def _answer(send: Send, status: int, said: str, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": said.encode() + b"\n" if said else b""})
