"""A server that somebody else runs, over streamable HTTP: a message is a POST, answers are JSON or a stream of events.

Bodies pass as they are. What the transport wants besides (session, version, routing headers) is read from them.
A server that is away costs the requests that it should have answered, and nothing else; one that has forgotten our
session gets a new handshake, of which the client learns nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any, Final

import httpx2

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.events import MOST, Events
from coatcheck.mcp.routing import VERSION, Routing
from coatcheck.mcp.stdio import say
from coatcheck.mcp.upstreams import Sink, refuse
from coatcheck.mcp.wire import MAX_MESSAGE, Id, Lines, Message, Raw, Unread, id_of, parse, rewritten

_SESSION: Final = "mcp-session-id"
_LAST_EVENT: Final = "last-event-id"
_CONNECT: Final = 20.0
_CLOSE: Final = 3.0
_ATTEMPTS: Final = 3
_ERROR_BODY: Final = 64 * 1024
_EVENTS: Final = "text/event-stream"
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
_LASTING: Final = ("logging/setLevel", "resources/subscribe")


class _Exchange:
    """A request and what came of it; without a request, the stream of what a server says unasked.

    An exchange of our own keeps its answer to itself."""

    def __init__(self, message: Message | None, cap: int, *, is_own: bool = False) -> None:
        self.message = message
        self.request_id = message.id if message is not None and message.is_request else None
        self.events = Events(cap)
        self.is_own = is_own
        self.answer: Message | None = None
        self.is_answered = False


class _SessionOver(Exception):
    """The server does not know the session that we named."""


class Remote:
    """One connection to a server by its address. Redirects are not followed: they could lead anywhere."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, max_message: int = MAX_MESSAGE) -> None:
        self._url = url
        self._headers = dict(headers or {})
        self._max_message = max_message
        self._client: httpx2.AsyncClient | None = None
        self._sink: Sink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._posts: dict[Id, asyncio.Task[None]] = {}
        self._session: str | None = None
        self._epoch = 0  # counts the sessions: a server may give an id twice
        self._version: str | None = None
        self._routing = Routing()
        self._order = asyncio.Lock()
        self._hello: Message | None = None
        self._begun: asyncio.Task[None] | None = None
        self._lasting: dict[str, Message] = {}  # what a session holds for the client, for the next one
        self._renewing = asyncio.Lock()

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        try:
            url = httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise UpstreamFailed(f"{self._url!r} is no address: {error}", hint="http://… or https://…") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UpstreamFailed(f"{self._url!r} is no address of a server", hint="http://… or https://…")
        for name, value in self._headers.items():
            if not value.isascii() or not value.isprintable():
                raise UpstreamFailed(f"the header {name!r} has characters that no header may have", hint="plain ASCII")
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT),
            limits=httpx2.Limits(max_connections=1_000, max_keepalive_connections=32),
            follow_redirects=False,
        )

    async def send(self, message: Message) -> None:
        if message.method == "notifications/cancelled":
            await self._cancel(message)
        elif message.method == "notifications/initialized":
            self._begun = self._spawn(self._begin(message))
        else:
            self._spawn(self._deliver(message), message.id if message.is_request else None)

    async def finish(self) -> None:
        """Answers to what was asked are still delivered."""

        async def end() -> None:
            if posts := list(self._posts.values()):
                await asyncio.wait(posts)
            await self._to.ended(UpstreamFailed("the client has left"))

        self._spawn(end())

    async def close(self) -> None:
        if self._client is None:
            return
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            if self._session is not None:
                await asyncio.wait_for(self._client.delete(self._url, headers=self._common()), _CLOSE)
        await self._client.aclose()

    # Sending

    @property
    def _to(self) -> Sink:
        assert self._sink is not None
        return self._sink

    @property
    def _http(self) -> httpx2.AsyncClient:
        assert self._client is not None
        return self._client

    def _spawn(self, work: Any, request_id: Id | None = None) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        if request_id is not None:
            self._posts[request_id] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if request_id is not None and self._posts.get(request_id) is task:
                del self._posts[request_id]

        task.add_done_callback(done)
        return task

    async def _cancel(self, message: Message) -> None:
        """From 2026-07-28 on, ending the answer's stream is how a request is cancelled; before, the server is told, and
        what it has to say of it is not waited for."""
        request_id = id_of(message.params.get("requestId"))
        post = self._posts.get(request_id) if request_id is not None else None
        if post is not None and self._version is None:
            post.cancel()
            return

        async def told() -> None:
            await self._deliver(message)
            if post is not None:
                post.cancel()

        self._spawn(told())

    async def _begin(self, message: Message) -> None:
        await self._deliver(message)
        self._spawn(self._listen())

    async def _deliver(self, message: Message) -> None:
        exchange = _Exchange(message, self._max_message)
        if not message.is_request:
            async with self._order:  # notifications and answers arrive in the order they were sent
                await self._post(exchange)
            return
        if message.method == "initialize":
            self._hello, self._session, self._version = message, None, None
            self._epoch += 1
            self._lasting.clear()
        elif self._begun is not None and not self._begun.done():
            await asyncio.wait({self._begun}, timeout=_CONNECT)  # many refuse what comes before it
        epoch = self._epoch
        try:
            await self._post(exchange)
        except _SessionOver:
            await self._renew(epoch)
            try:
                await self._post(exchange)
            except _SessionOver:
                error = UpstreamFailed(f"{self._place} answered 404", hint="it forgets its sessions: connect again")
                await self._unanswered(exchange, error)

    async def _post(self, exchange: _Exchange) -> None:
        message = exchange.message
        assert message is not None
        headers = self._common(fresh=message.method == "initialize") | self._routing.headers(message)
        try:
            async with self._http.stream("POST", self._url, content=bytes(message.raw), headers=headers) as response:
                if response.status_code == 404 and _SESSION in headers and exchange.request_id is not None:
                    raise _SessionOver
                await self._answer(response, exchange)
            if exchange.request_id is not None and not exchange.is_answered:
                await self._resume(exchange)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ValueError) as error:
            if exchange.request_id is not None and not exchange.is_answered:
                reason = str(error) or type(error).__name__
                await self._unanswered(exchange, UpstreamFailed(f"{self._place} cannot be reached: {reason}"))

    async def _answer(self, response: httpx2.Response, exchange: _Exchange) -> None:
        kind = _kind(response)
        if exchange.request_id is None:
            return
        if response.status_code >= 300:
            await self._refused(response, kind, exchange)
            return
        if exchange.message is not None and exchange.message.method == "initialize" and _SESSION in response.headers:
            self._session = response.headers[_SESSION]
        if kind == "application/json":
            lines = Lines(self._max_message)
            async for chunk in response.aiter_bytes():
                for line in lines.feed(chunk.translate(_ONE_LINE)):
                    await self._received(line, exchange)
            for line in lines.end():
                await self._received(line, exchange)
        elif kind == _EVENTS:
            await self._read(response, exchange)
        else:
            said = f"{self._place} answered {response.status_code} with {kind[:60] or 'nothing'}"
            await self._unanswered(exchange, UpstreamFailed(said, hint="is this the address of an MCP server?"))

    async def _refused(self, response: httpx2.Response, kind: str, exchange: _Exchange) -> None:
        """A status that is an error: with the server's own words where it has some."""
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _ERROR_BODY:
                break
        messages = parse(body) if kind == "application/json" else []
        if messages and isinstance(messages[0].body.get("error"), dict):
            await self._received(rewritten(messages[0], id=exchange.request_id).raw, exchange)
            return
        hint = None
        if response.status_code in (401, 403):
            hint = "signing in (OAuth) is not supported; with a token: --header 'Authorization: Bearer ${TOKEN}'"
        elif response.status_code < 400:
            hint = f"use the address that it points to: {response.headers.get('location', '')[:200]}"
        await self._unanswered(exchange, UpstreamFailed(f"{self._place} answered {response.status_code}", hint=hint))

    async def _unanswered(self, exchange: _Exchange, error: UpstreamFailed) -> None:
        exchange.is_answered = True
        if not exchange.is_own:
            await self._to.unanswered(exchange.request_id, error)

    # What comes back

    async def _read(self, response: httpx2.Response, exchange: _Exchange) -> None:
        exchange.events.begin()
        async for chunk in response.aiter_bytes():
            for line in exchange.events.feed(chunk):
                await self._received(line, exchange)
                if exchange.is_answered:
                    return

    async def _received(self, line: Raw | Unread, exchange: _Exchange) -> None:
        if isinstance(line, Unread):
            error = UpstreamFailed(
                f"{self._place} sent a message of {line.size:,} bytes; at most {self._max_message:,} are taken",
                hint="ask for less",
            )
            if line.method is None and exchange.request_id is not None:
                await self._unanswered(exchange, error)
            else:
                await refuse(line, error, self, self._to)
            return
        for found in parse(line):
            if exchange.request_id is not None and found.is_response:
                exchange.is_answered, exchange.answer = True, found
                self._learned(exchange, found)
            if not (exchange.is_own and found.is_response):
                await self._to.message(found)

    def _learned(self, exchange: _Exchange, answer: Message) -> None:
        message, result = exchange.message, answer.body.get("result")
        if message is None or not isinstance(result, dict):
            return
        if message.method == "initialize" and isinstance(result.get("protocolVersion"), str):
            self._version = result["protocolVersion"]
        elif message.method in _LASTING:
            self._lasting[f"{message.method} {message.params.get('uri')}"] = message
        elif message.method == "resources/unsubscribe":
            self._lasting.pop(f"resources/subscribe {message.params.get('uri')}", None)
        elif message.method == "tools/list":
            self._routing.listed(message, result)

    async def _resume(self, exchange: _Exchange) -> None:
        """Take a stream up again that broke before the answer, where the server numbers its events. It may close the
        stream as often as it likes, so long as it takes it up again."""
        events = exchange.events
        failures = 0 if events.last_id is not None else _ATTEMPTS
        while failures < _ATTEMPTS and not exchange.is_answered:
            await asyncio.sleep(events.again)
            headers = self._common() | {_LAST_EVENT: events.last_id or ""}
            failures += 1
            with contextlib.suppress(httpx2.HTTPError):
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if response.status_code == 200 and _kind(response) == _EVENTS:
                        failures = 0
                        await self._read(response, exchange)
        if not exchange.is_answered:
            await self._unanswered(exchange, UpstreamFailed(f"{self._place} ended the answer before it was whole"))

    async def _listen(self) -> None:
        """What the server says unasked. One that offers no such stream says so, and is left alone; one that is away is
        asked again, more and more seldom."""
        exchange, epoch = _Exchange(None, self._max_message), self._epoch
        events, pause = exchange.events, 0.0
        while self._epoch == epoch:
            headers = self._common() | ({_LAST_EVENT: events.last_id} if events.last_id else {})
            pause = min(max(pause * 2, events.again), MOST)
            with contextlib.suppress(httpx2.HTTPError):
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if response.status_code == 200 and _kind(response) == _EVENTS:
                        await self._read(response, exchange)
                        pause = events.again
                    elif response.status_code < 500 and response.status_code != 429:
                        return
            await asyncio.sleep(pause)

    async def _renew(self, over: int) -> None:
        """Begin anew where a session is over, as the protocol demands: once, however many requests find out."""
        async with self._renewing:
            if self._hello is None or self._epoch != over:
                return
            before = self._session, self._version
            hello = _Exchange(_own(self._hello), self._max_message, is_own=True)
            await self._post(hello)
            if hello.answer is None or "result" not in hello.answer.body:
                self._session, self._version = before
                return
            self._epoch += 1
            say(f"{self._place} has forgotten the session: it was begun anew")
            begun = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            await self._post(_Exchange(rewritten(Message(b"", begun)), self._max_message))
            for message in list(self._lasting.values()):
                with contextlib.suppress(_SessionOver):
                    await self._post(_Exchange(_own(message), self._max_message, is_own=True))
            self._spawn(self._listen())

    # Headers

    @property
    def _place(self) -> str:
        url = httpx2.URL(self._url)
        return f"the server at {url.host}"

    def _common(self, *, fresh: bool = False) -> dict[str, str]:
        """What every request has; a `fresh` one belongs to no session yet."""
        headers = {"accept": f"application/json, {_EVENTS}", "content-type": "application/json"}
        if fresh:
            return headers
        if self._session is not None:
            headers[_SESSION] = self._session
        if self._version is not None:
            headers[VERSION] = self._version
        return headers


def _kind(response: httpx2.Response) -> str:
    kind: str = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind


def _own(message: Message) -> Message:
    """A message of the client once more, under an id of ours."""
    return rewritten(message, id=f"coatcheck-{secrets.token_hex(6)}")
