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
        elif (refusal := self._refusal(scope)) is not None:
            status, reason = refusal
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
            if status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": reason.encode() + b"\n"})
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why not, where not. What a foreign page could learn of us ends with the first two."""
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 403, "this Host is not served here"
        if len(origins) > 1 or not self._origins.issuperset(origins):
            return 403, "this Origin may not ask here"
        if not self._has_token(_values(scope, b"authorization")):
            return 401, "a bearer token is wanted: the one that was printed at the start, or COATCHECK_MCP_TOKEN"
        if scope["path"] != self._path:
            return 404, f"there is only {self._path}"
        return None

    def _has_token(self, given: list[bytes]) -> bool:
        if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
            return False
        return hmac.compare_digest(given[0][len(_BEARER) :].strip(), self._token)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]
