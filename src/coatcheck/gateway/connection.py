"""A client's request over ASGI: its path and headers, its body within bounds, and the response.

A path may begin with a session and a token (`/s/NAME/t/TOKEN/v1/…`), for clients that can set
nothing but an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

from coatcheck.gateway.settings import MIB, GatewaySettings
from coatcheck.gateway.upstream import CODING_ERRORS, HOP, HeaderList, decoder
from coatcheck.http.limits import Pace, Shares
from coatcheck.ids import clip
from coatcheck.lanes import in_long_thread

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODIES: Final = 12
"""Bodies of the largest size that are in memory at once, with their copies."""
_NOT_SENT: Final = HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
_OWN: Final = b"x-coatcheck-"
_PATH_PART: Final = re.compile(r"/(s|t)/([^/]{1,300})(?=/|$)")
_COPIES: Final = 5  # copies of a body in memory while it is read


class RefusedRequest(Exception):
    """A request that must not be sent, or an answer that cannot go on: its status, what to do, and
    Anthropic's code if there is one."""

    def __init__(self, status: int, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class ClientLeft(Exception):
    """The client has closed its connection. Nothing more is sent."""


class BrokenOff(ConnectionError):
    """Breaks off a response, so that the server closes the connection and the client sees that the
    answer is not complete."""


class Connection:
    """One client request. `path` and `raw_path` are without the session and the token at their
    beginning, which are `named_session` and `named_token`. `began` gets the status of the response
    when it begins."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        settings: GatewaySettings,
        memory: Shares,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._settings = settings
        self._memory = memory
        self._held = 0  # bytes of `memory`
        self.tenant: str | None = None
        self.began: Callable[[int], None] | None = None
        self.is_begun = False
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.lower(), value)
        self.path: str = scope.get("path", "/")
        raw_path = bytes(scope.get("raw_path") or self.path.encode())
        self.raw_path = raw_path.partition(b"?")[0].decode("latin-1")
        named = self._take_prefixes()
        self.named_session, self.named_token = named.get("s"), named.get("t")

    def _take_prefixes(self) -> dict[str, str]:
        """Take the session and the token from the beginning of the path."""
        named: dict[str, str] = {}
        while (found := _PATH_PART.match(self.raw_path)) is not None:
            named[found[1]] = found[2]
            self.raw_path = self.path = self.raw_path[found.end() :] or "/"
        return named

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1").strip()

    @property
    def target(self) -> str:
        """The path with the query, as it came."""
        query = self.scope.get("query_string", b"").decode("latin-1")
        return f"{self.raw_path}?{query}" if query else self.raw_path

    def forwarded_headers(self, *, is_plain: bool) -> HeaderList:
        """Return the headers for the provider: all except those of this connection and ours. With
        `is_plain`, the body is no longer encoded."""
        dropped = set(_NOT_SENT)
        listed = self.headers.get(b"connection", b"").split(b",")
        dropped.update(one.strip().lower() for one in listed)
        if is_plain:
            dropped.add(b"content-encoding")
        kept: HeaderList = []
        for name, value in self.scope["headers"]:
            lower = name.lower()
            if lower not in dropped and not lower.startswith(_OWN):
                kept.append((name, value))
        return [*kept, (b"accept-encoding", b"identity")]

    # The body

    async def reserve(self) -> None:
        """Wait for memory for the body, if it is large and says so. Raises `Busy`."""
        declared = self.header(b"content-length")
        size = int(declared) if declared.isdecimal() else 0
        if size > self._settings.max_body:
            raise _too_large(self._settings.max_body)
        if size > MIB:
            await self.hold(_COPIES * size)

    async def body(self) -> bytes:
        """Read the body. Raises `RefusedRequest` if it is too large or too slow, `Busy` if there is
        no memory for it, and `ClientLeft`."""
        most, seconds = self._settings.max_body, self._settings.body_timeout
        pace = Pace(seconds)
        parts: list[bytes] = []
        size = 0
        is_complete = False
        while not is_complete:
            try:
                event = await pace.next(self.receive)
            except TimeoutError:
                message = (
                    f"the request body came too slowly; each MiB must arrive within {seconds:g} s"
                )
                raise RefusedRequest(408, message) from None
            if event["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if size > MIB and not self._held:  # its length is not declared
                await self.hold(_COPIES * most)
            is_complete = not event.get("more_body")
        return b"".join(parts)

    async def plain(self, body: bytes) -> bytes:
        """Return the body without its content coding. A large one waits for room in memory."""
        coding, limit = self.header(b"content-encoding").lower(), self._settings.max_body
        if coding in ("", "identity"):
            return body
        if decoder(coding) is None:
            raise RefusedRequest(
                415,
                f"the content coding {clip(coding, 20)} is not supported; use gzip, zstd or none",
            )
        size = min(limit, MIB)
        data = _decoded(body, coding, size)
        while data is None and size < limit:
            size = min(limit, 8 * size)
            await self.hold(_COPIES * max(size, len(body)))
            data = await in_long_thread(_decoded, body, coding, size)
        if data is None:
            raise _too_large(limit)
        return data

    async def hold(self, size: int) -> None:
        """Hold this many bytes of the memory for large bodies, instead of those that were held
        before. Waits only if they are more; then it holds none meanwhile, so that requests cannot
        block one another. Raises `Busy`."""
        if size <= self._held:
            self._memory.release(self.tenant, self._held - size)
        else:
            self._memory.release(self.tenant, self._held)
            self._held = 0
            await self._memory.take(self.tenant, size)
        self._held = size

    async def hold_at_most(self, size: int) -> None:
        """Give back what is held beyond this many bytes."""
        await self.hold(min(self._held, size))

    @contextlib.asynccontextmanager
    async def leaving(self, is_read: asyncio.Event | None = None) -> AsyncIterator[None]:
        """Cancel what runs inside when the client leaves. `is_read` is set once the body of the
        request has been read: the provider may answer earlier."""
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        async def listen() -> None:
            nonlocal has_left
            if is_read is not None:
                await is_read.wait()
            while (await self.receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        listener = asyncio.create_task(listen())
        try:
            yield
        except asyncio.CancelledError:
            if not has_left:
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            listener.cancel()

    # The response

    async def begin(self, status: int, headers: HeaderList) -> None:
        self.is_begun = True
        if self.began is not None:
            self.began(status)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, body: bytes, headers: HeaderList) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [*headers, length])
        await self.end(b"" if self.method == "HEAD" else body)


def _decoded(body: bytes, coding: str, limit: int) -> bytes | None:
    """Return a body without its content coding, None if it is larger than the limit."""
    decoding = decoder(coding)
    assert decoding is not None
    try:
        data = decoding.decompress(body, limit + 1)
    except CODING_ERRORS as error:
        raise RefusedRequest(400, f"the body is not valid {coding}") from error
    if len(data) > limit:
        return None
    if not decoding.eof:
        raise RefusedRequest(400, f"the body is not valid {coding}: it is cut off")
    return data


def _too_large(limit: int) -> RefusedRequest:
    return RefusedRequest(
        413, f"the request body is larger than {limit // MIB} MiB, the limit of this gateway"
    )
