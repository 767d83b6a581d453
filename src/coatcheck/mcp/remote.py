"""An MCP server at a URL, over streamable HTTP: a message is a POST, responses are JSON or an event stream.

Bodies pass unchanged; the headers of the transport (session, version, routing) are derived from them. If the server
cannot be reached, only the open requests fail. If it has forgotten the session, the handshake is repeated without the
client noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx2
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import PROTOCOL_VERSION_META_KEY

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp.wire import (
    MAX_MESSAGE,
    Id,
    LineBuffer,
    Message,
    Raw,
    Sink,
    UnparsedLine,
    id_of,
    log,
    notification,
    parse,
    refuse,
    rewritten,
)

RETRY: Final = 1.0  # seconds before a broken stream is resumed, unless the server says otherwise
MIN_RETRY: Final = 0.05
MAX_RETRY: Final = 30.0
_FIELD: Final = 16  # bytes for the name of a field before its value
_BOM: Final = b"\xef\xbb\xbf"
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
    """A request and its response; without a request, the stream of messages that a server sends on its own.

    The response to an exchange of our own is not delivered."""

    def __init__(self, message: Message | None, max_size: int, *, is_own: bool = False) -> None:
        self.message = message
        self.request_id = message.id if message is not None and message.is_request else None
        self.events = EventStream(max_size)
        self.is_own = is_own
        self.answer: Message | None = None
        self.is_answered = False


class _SessionOver(Exception):
    """The server does not know our session."""


class RemoteServer:
    """A client of one server. Redirects are not followed: they could lead anywhere."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, max_message: int = MAX_MESSAGE) -> None:
        self._url = url
        self._headers = dict(headers or {})
        self._max_message = max_message
        self._client: httpx2.AsyncClient | None = None
        self._sink: Sink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._posts: dict[Id, asyncio.Task[None]] = {}
        self._session: str | None = None
        self._epoch = 0  # counts sessions: a server may reuse an id
        self._version: str | None = None
        self._routing = RoutingHeaders()
        self._order = asyncio.Lock()
        self._hello: Message | None = None
        self._begun: asyncio.Task[None] | None = None
        self._lasting: dict[str, Message] = {}  # settings of the session, to repeat in the next one
        self._renewing = asyncio.Lock()

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        try:
            url = httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise UpstreamFailed(f"invalid URL {self._url!r}: {error}", hint="use http://… or https://…") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UpstreamFailed(f"invalid URL {self._url!r}", hint="use http://… or https://…")
        for name, value in self._headers.items():
            if not value.isascii() or not value.isprintable():
                raise UpstreamFailed(f"the header {name!r} has invalid characters", hint="use printable ASCII")
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
        """Deliver the responses to open requests first."""

        async def end() -> None:
            if posts := list(self._posts.values()):
                await asyncio.wait(posts)
            await self._to.ended(UpstreamFailed("the client has disconnected"))

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
        """Cancel a request. Since 2026-07-28 that means closing its stream; before, the server gets a notification, and
        its response is not awaited."""
        request_id = id_of(message.params.get("requestId"))
        post = self._posts.get(request_id) if request_id is not None else None
        if post is not None and self._version is None:
            post.cancel()
            return

        async def notify() -> None:
            await self._deliver(message)
            if post is not None:
                post.cancel()

        self._spawn(notify())

    async def _begin(self, message: Message) -> None:
        await self._deliver(message)
        self._spawn(self._listen())

    async def _deliver(self, message: Message) -> None:
        exchange = _Exchange(message, self._max_message)
        if not message.is_request:
            async with self._order:  # notifications and responses keep their order
                await self._post(exchange)
            return
        if message.method == "initialize":
            self._hello, self._session, self._version = message, None, None
            self._epoch += 1
            self._lasting.clear()
        elif self._begun is not None and not self._begun.done():
            await asyncio.wait({self._begun}, timeout=_CONNECT)  # many servers refuse requests before `initialized`
        epoch = self._epoch
        try:
            await self._post(exchange)
        except _SessionOver:
            await self._renew(epoch)
            try:
                await self._post(exchange)
            except _SessionOver:
                error = UpstreamFailed(f"{self._label} answered 404", hint="it forgets its sessions: reconnect")
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
                await self._unanswered(exchange, UpstreamFailed(f"{self._label} cannot be reached: {reason}"))

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
            lines = LineBuffer(self._max_message)
            async for chunk in response.aiter_bytes():
                for line in lines.feed(chunk.translate(_ONE_LINE)):
                    await self._received(line, exchange)
            for line in lines.end():
                await self._received(line, exchange)
        elif kind == _EVENTS:
            await self._read(response, exchange)
        else:
            found = f"{self._label} answered {response.status_code} with {kind[:60] or 'nothing'}"
            await self._unanswered(exchange, UpstreamFailed(found, hint="check that this is the URL of an MCP server"))

    async def _refused(self, response: httpx2.Response, kind: str, exchange: _Exchange) -> None:
        """Report an error status, with the server's own JSON-RPC error if there is one."""
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
            hint = "OAuth is not supported; pass a token with --header 'Authorization: Bearer ${TOKEN}'"
        elif response.status_code < 400:
            hint = f"use the URL that it redirects to: {response.headers.get('location', '')[:200]}"
        await self._unanswered(exchange, UpstreamFailed(f"{self._label} answered {response.status_code}", hint=hint))

    async def _unanswered(self, exchange: _Exchange, error: UpstreamFailed) -> None:
        exchange.is_answered = True
        if not exchange.is_own:
            await self._to.unanswered(exchange.request_id, error)

    # Receiving

    async def _read(self, response: httpx2.Response, exchange: _Exchange) -> None:
        exchange.events.begin()
        async for chunk in response.aiter_bytes():
            for line in exchange.events.feed(chunk):
                await self._received(line, exchange)
                if exchange.is_answered:
                    return

    async def _received(self, line: Raw | UnparsedLine, exchange: _Exchange) -> None:
        if isinstance(line, UnparsedLine):
            error = UpstreamFailed(
                f"{self._label} sent a message of {line.size:,} bytes; the limit is {self._max_message:,}",
                hint="request less, or raise --max-message",
            )
            if line.method is None and exchange.request_id is not None:
                await self._unanswered(exchange, error)
            else:
                await refuse(line, error, self, self._to)
            return
        for found in parse(line):
            if exchange.request_id is not None and found.is_response:
                exchange.is_answered, exchange.answer = True, found
                self._learn(exchange, found)
            if not (exchange.is_own and found.is_response):
                await self._to.message(found)

    def _learn(self, exchange: _Exchange, answer: Message) -> None:
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
            self._routing.learn(message, result)

    async def _resume(self, exchange: _Exchange) -> None:
        """Resume a stream that broke before the response, if the server numbers its events. The server may close the
        stream any number of times, as long as it resumes it."""
        events = exchange.events
        failures = 0 if events.last_id is not None else _ATTEMPTS
        while failures < _ATTEMPTS and not exchange.is_answered:
            await asyncio.sleep(events.retry)
            headers = self._common() | {_LAST_EVENT: events.last_id or ""}
            failures += 1
            with contextlib.suppress(httpx2.HTTPError):
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if response.status_code == 200 and _kind(response) == _EVENTS:
                        failures = 0
                        await self._read(response, exchange)
        if not exchange.is_answered:
            await self._unanswered(exchange, UpstreamFailed(f"{self._label} closed the stream before the response"))

    async def _listen(self) -> None:
        """Receive the messages that the server sends on its own, if it offers such a stream. Retry with growing pauses
        while it cannot be reached."""
        exchange, epoch = _Exchange(None, self._max_message), self._epoch
        events, pause = exchange.events, 0.0
        while self._epoch == epoch:
            headers = self._common() | ({_LAST_EVENT: events.last_id} if events.last_id else {})
            pause = min(max(pause * 2, events.retry), MAX_RETRY)
            with contextlib.suppress(httpx2.HTTPError):
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if response.status_code == 200 and _kind(response) == _EVENTS:
                        await self._read(response, exchange)
                        pause = events.retry
                    elif response.status_code < 500 and response.status_code != 429:
                        return
            await asyncio.sleep(pause)

    async def _renew(self, epoch: int) -> None:
        """Start a new session after the server has ended ours, once for all requests that notice."""
        async with self._renewing:
            if self._hello is None or self._epoch != epoch:
                return
            before = self._session, self._version
            hello = _Exchange(_own(self._hello), self._max_message, is_own=True)
            await self._post(hello)
            if hello.answer is None or "result" not in hello.answer.body:
                self._session, self._version = before
                return
            self._epoch += 1
            log(f"{self._label} has forgotten the session: started a new one")
            await self._post(_Exchange(notification("notifications/initialized"), self._max_message))
            for message in list(self._lasting.values()):
                with contextlib.suppress(_SessionOver):
                    await self._post(_Exchange(_own(message), self._max_message, is_own=True))
            self._spawn(self._listen())

    # Headers

    @property
    def _label(self) -> str:
        return f"the server at {httpx2.URL(self._url).host}"

    def _common(self, *, fresh: bool = False) -> dict[str, str]:
        """The headers of every request; a `fresh` one has no session yet."""
        headers = {"accept": f"application/json, {_EVENTS}", "content-type": "application/json"}
        if fresh:
            return headers
        if self._session is not None:
            headers[_SESSION] = self._session
        if self._version is not None:
            headers[MCP_PROTOCOL_VERSION_HEADER] = self._version
        return headers


def _kind(response: httpx2.Response) -> str:
    kind: str = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind


def _own(message: Message) -> Message:
    """Repeat a message of the client with an id of our own."""
    return rewritten(message, id=f"coatcheck-{secrets.token_hex(6)}")


class EventStream:
    """Parse `text/event-stream`: bytes in, messages out. It is resumed from `last_id`, after `retry` seconds.

    The data of an event is JSON, so its lines are joined to one. Nothing over the size limit is kept."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self.last_id: str | None = None
        self.retry = RETRY
        self.begin()

    def begin(self) -> None:
        """Start or restart the stream. An incomplete event is dropped: the server sends it again."""
        self._lines = LineBuffer(self._max_size + _FIELD)
        self._is_first = True
        self._after_return = False
        self._next_event()

    def _next_event(self) -> None:
        self._data: list[Raw] = []
        self._size = 0
        self._too_large: UnparsedLine | None = None
        self._type = b""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> Iterator[Raw | UnparsedLine]:
        for line in self._lines.feed(self._normalized(chunk)):
            if self._is_first and not isinstance(line, UnparsedLine) and line.startswith(_BOM):
                line = line[len(_BOM) :]
            self._is_first = False
            if isinstance(line, UnparsedLine):
                self._too_large = UnparsedLine(line.size, line.head.removeprefix(b"data:"), line.tail)
            elif line:
                self._field(bytes(line[:_FIELD]).partition(b":")[0], line)
            else:
                yield from self._event()

    def _event(self) -> Iterator[Raw | UnparsedLine]:
        data, too_large, type_ = self._data, self._too_large, self._type
        self.last_id = self._id or self.last_id
        self._next_event()
        if type_ not in (b"", b"message"):
            return
        if too_large is not None:
            yield too_large
        elif data and (whole := data[0] if len(data) == 1 else b" ".join(data)).strip():
            yield whole

    def _field(self, name: bytes, line: Raw) -> None:
        value = line[len(name) + 1 :]
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            self._size += len(value) + 1
            if self._size <= self._max_size + 1:
                self._data.append(value)
            else:
                head = self._data[0] if self._data else value
                self._too_large = UnparsedLine(self._size, UnparsedLine.of(head).head, UnparsedLine.of(value).tail)
        elif name == b"id":
            self._id = bytes(value).decode("utf-8", "replace")
        elif name == b"event":
            self._type = bytes(value)
        elif name == b"retry":
            with contextlib.suppress(ValueError):
                self.retry = min(max(int(value) / 1_000, MIN_RETRY), MAX_RETRY)

    def _normalized(self, chunk: bytes) -> bytes:
        """Convert all kinds of line ends to line feeds."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_return = chunk.endswith(b"\r") if chunk else self._after_return
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in chunk else chunk


class RoutingHeaders:
    """The headers with which requests are routed since 2026-07-28. Which arguments of a tool belong there is known once
    the tools were listed."""

    def __init__(self) -> None:
        self._params: dict[str, Mapping[tuple[str, ...], str]] = {}

    def learn(self, message: Message, result: Mapping[str, Any]) -> None:
        """Learn from a response to `tools/list`."""
        tools = result.get("tools")
        if not isinstance(tools, list) or _version_of(message) is None:
            return
        for tool in tools:
            schema = tool.get("inputSchema") if isinstance(tool, dict) else None
            if isinstance(schema, dict) and find_invalid_x_mcp_header(schema) is None:
                self._params[str(tool.get("name"))] = x_mcp_header_map(schema)

    def headers(self, message: Message) -> dict[str, str]:
        """The headers of a message; none in older versions of the protocol."""
        version = _version_of(message)
        if version is None or message.method is None:
            return {}
        headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: message.method}
        name = message.params.get(NAME_BEARING_METHODS.get(message.method, ""))
        if isinstance(name, str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        arguments = message.params.get("arguments")
        if message.method == "tools/call" and isinstance(arguments, dict):
            headers |= mcp_param_headers(self._params.get(str(name), {}), arguments)
        return headers


def _version_of(message: Message) -> str | None:
    meta = message.params.get("_meta")
    version = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
    return version if isinstance(version, str) and version.isascii() and version.isprintable() else None
