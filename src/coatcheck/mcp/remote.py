"""An MCP server at a URL, over streamable HTTP: a message is a POST, responses are JSON or an event
stream.

Bodies pass unchanged; the headers of the transport (session, version, routing) are derived from
them. If the server cannot be reached, only the open requests fail. If it has forgotten the session,
the handshake is repeated without the client noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final

import httpx2

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp import wire
from coatcheck.mcp.wire import MAX_MESSAGE, LineBuffer, Message, Raw, Sink, Tasks, UnparsedLine

if (
    find_spec("mcp") is None
):  # imported only for newer clients, but its absence should show before they connect
    raise ImportError("mcp is not installed")

RETRY: Final = 1.0  # seconds before a broken stream is resumed, unless the server says otherwise
MIN_RETRY: Final = 0.05
MAX_RETRY: Final = 30.0
_FIELD: Final = 16  # bytes for the name of a field before its value
_BOM: Final = b"\xef\xbb\xbf"
_SESSION: Final = "mcp-session-id"
_VERSION: Final = "mcp-protocol-version"
_VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
_CONNECT: Final = 20.0
_CLOSE: Final = 3.0
_ATTEMPTS: Final = 3
_ERROR_BODY: Final = 64 * 1024
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
_LASTING: Final = ("logging/setLevel", "resources/subscribe")


class _Exchange:
    """A request and its response; without a request, the stream of messages that a server sends on
    its own.

    The response to an exchange of our own is not delivered. `failures` counts attempts to resume
    the stream."""

    def __init__(self, message: Message | None, max_size: int, *, is_own: bool = False) -> None:
        self.message = message
        self.method = message.method if message is not None else None
        self.request_id = message.id if message is not None and message.is_request else None
        self.events = EventStream(max_size)
        self.is_own = is_own
        self.answer: Message | None = None
        self.is_answered = False
        self.failures = 0


class RemoteServer:
    """A client of one server. Redirects are not followed: they could lead anywhere."""

    _to: Sink

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, max_message: int = MAX_MESSAGE
    ) -> None:
        self._url = url
        self._headers = dict(headers or {})
        self._max_message = max_message
        self._client: httpx2.AsyncClient | None = None
        self._tasks = Tasks()
        self._session: str | None = None
        self._epoch = 0  # counts sessions: a server may reuse an id
        self._version: str | None = None
        self._tool_headers: dict[
            str, Mapping[tuple[str, ...], str]
        ] = {}  # the arguments of tools that are headers
        self._order = asyncio.Lock()
        self._hello: Message | None = None
        self._begun: asyncio.Task[None] | None = None
        self._lasting: dict[str, Message] = {}  # settings of the session, to repeat in the next one
        self._renewing = asyncio.Lock()

    async def start(self, sink: Sink) -> None:
        self._to = sink
        try:
            url = httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise UpstreamFailed(
                f"invalid URL {self._url!r}: {error}", hint="use http://… or https://…"
            ) from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UpstreamFailed(f"invalid URL {self._url!r}", hint="use http://… or https://…")
        for name, value in self._headers.items():
            if not value.isascii() or not value.isprintable():
                raise UpstreamFailed(
                    f"the header {name!r} has invalid characters", hint="use printable ASCII"
                )
        self._label = f"the server at {url.host}"
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT),
            limits=httpx2.Limits(max_connections=1_000, max_keepalive_connections=32),
            follow_redirects=False,
        )

    async def send(self, message: Message) -> None:
        if message.method == "notifications/cancelled":
            post = self._tasks.of(wire.id_of(message.params.get("requestId")))
            self._tasks.start(self._cancel(message, post))
        elif message.method == "notifications/initialized":
            self._begun = self._tasks.start(self._begin(message))
        else:
            self._tasks.start(self._deliver(message), message.id if message.is_request else None)

    async def finish(self) -> None:
        """Deliver the responses to open requests first."""

        async def end() -> None:
            await self._tasks.wait(requests_only=True)
            await self._to.ended(UpstreamFailed("the client has disconnected"))

        self._tasks.start(end())

    async def close(self) -> None:
        if self._client is None:
            return
        await self._tasks.cancel()
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            if self._session is not None:
                await asyncio.wait_for(
                    self._client.delete(self._url, headers=self._headers_of()), _CLOSE
                )
        await self._client.aclose()

    # Sending

    async def _cancel(self, message: Message, post: asyncio.Task[None] | None) -> None:
        """Cancel a request. Since 2026-07-28 that means closing its stream; before, the server gets
        a notification, and its response is not awaited."""
        if post is None or self._version is not None:
            await self._deliver(message)
        if post is not None:
            post.cancel()

    async def _begin(self, message: Message) -> None:
        await self._deliver(message)
        self._tasks.start(self._listen())

    async def _deliver(self, message: Message) -> None:
        exchange = _Exchange(message, self._max_message)
        if not message.is_request:
            async with self._order:  # notifications and responses keep their order
                await self._post(message, exchange)
            return
        if message.method == "initialize":
            self._hello, self._session, self._version = message, None, None
            self._epoch += 1
            self._lasting.clear()
        elif self._begun is not None and not self._begun.done():
            await asyncio.wait(
                {self._begun}, timeout=_CONNECT
            )  # many servers refuse requests before `initialized`
        epoch = self._epoch
        if not await self._post(message, exchange):
            await self._renew(epoch)
            if not await self._post(message, exchange):
                error = UpstreamFailed(
                    f"{self._label} answered 404", hint="it does not keep its sessions; reconnect"
                )
                await self._unanswered(exchange, error)

    async def _post(self, message: Message, exchange: _Exchange) -> bool:
        """Send a message and deliver the response. Return False if the server does not know our
        session."""
        assert self._client is not None
        headers = self._headers_of(message)
        try:
            async with self._client.stream(
                "POST", self._url, content=bytes(message.raw), headers=headers
            ) as response:
                if (
                    response.status_code == 404
                    and _SESSION in headers
                    and exchange.request_id is not None
                ):
                    return False
                if exchange.request_id is not None:
                    await self._answer(response, exchange)
            if exchange.request_id is not None and not exchange.is_answered:
                await self._resume(exchange)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ValueError) as error:
            if exchange.request_id is not None and not exchange.is_answered:
                reason = str(error) or type(error).__name__
                await self._unanswered(
                    exchange, UpstreamFailed(f"{self._label} cannot be reached: {reason}")
                )
        return True

    async def _answer(self, response: httpx2.Response, exchange: _Exchange) -> None:
        kind = _kind(response)
        if response.status_code >= 300:
            await self._refused(response, kind, exchange)
            return
        if exchange.method == "initialize" and _SESSION in response.headers:
            self._session = response.headers[_SESSION]
        if kind == _JSON:
            chunks = response.aiter_bytes()

            async def read() -> bytes:
                return (await anext(chunks, b"")).translate(_ONE_LINE)

            async for line in wire.read_lines(read, self._max_message):
                await self._received(line, exchange)
        elif kind == _EVENTS:
            await self._read(response, exchange)
        else:
            found = f"{self._label} answered {response.status_code} with {kind[:60] or 'nothing'}"
            await self._unanswered(
                exchange, UpstreamFailed(found, hint="check that this is the URL of an MCP server")
            )

    async def _refused(self, response: httpx2.Response, kind: str, exchange: _Exchange) -> None:
        """Report an error status, with the server's own JSON-RPC error if there is one."""
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _ERROR_BODY:
                break
        messages = wire.parse(body) if kind == _JSON else []
        error = messages[0].body.get("error") if messages else None
        if isinstance(error, dict) and isinstance(
            error.get("code"), int
        ):  # other JSON may have an `error`, too
            await self._received(wire.rewritten(messages[0], id=exchange.request_id).raw, exchange)
            return
        hint = None
        if response.status_code in (401, 403):
            hint = (
                "OAuth is not supported; pass a token with --header 'Authorization: "
                "Bearer ${TOKEN}'"
            )
        elif response.status_code < 400:
            hint = f"use the URL that it redirects to: {response.headers.get('location', '')[:200]}"
        await self._unanswered(
            exchange, UpstreamFailed(f"{self._label} answered {response.status_code}", hint=hint)
        )

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
            error = wire.too_large(self._label, line, self._max_message)
            if line.method is None and exchange.request_id is not None:
                await self._unanswered(exchange, error)
            else:
                await wire.refuse(line, error, self, self._to)
            return
        for found in wire.parse(line):
            if (
                exchange.message is not None
                and exchange.request_id is not None
                and found.is_response
            ):
                exchange.is_answered, exchange.answer = True, found
                if isinstance(found.body.get("result"), dict):
                    self._learn(exchange.message, found)
            if not (exchange.is_own and found.is_response):
                await self._to.message(found)

    def _learn(self, message: Message, answer: Message) -> None:
        """Note what a response says about the session."""
        result, setting = answer.result, f"{message.method} {message.params.get('uri')}"
        if message.method == "initialize" and isinstance(result.get("protocolVersion"), str):
            self._version = result["protocolVersion"]
        elif message.method in _LASTING:
            self._lasting[setting] = message
        elif message.method == "resources/unsubscribe":
            self._lasting.pop(setting.replace("unsubscribe", "subscribe", 1), None)
        elif message.method == "tools/list" and _version_of(message) is not None:
            self._learn_headers(result.get("tools"))

    def _learn_headers(self, tools: object) -> None:
        """Note which arguments of the listed tools are sent as headers too."""
        from mcp.shared import inbound  # slow to import, and only newer clients need it

        if not isinstance(tools, list):
            return
        for tool in tools:
            schema = tool.get("inputSchema") if isinstance(tool, dict) else None
            if isinstance(schema, dict) and inbound.find_invalid_x_mcp_header(schema) is None:
                self._tool_headers[str(tool.get("name"))] = inbound.x_mcp_header_map(schema)

    async def _get(self, exchange: _Exchange) -> bool:
        """Read the event stream of an exchange after its last event. Return whether the server may
        offer it."""
        assert self._client is not None
        events = exchange.events
        headers = self._headers_of() | ({"last-event-id": events.last_id} if events.last_id else {})
        exchange.failures += 1
        with contextlib.suppress(httpx2.HTTPError):
            async with self._client.stream("GET", self._url, headers=headers) as response:
                if response.status_code == 200 and _kind(response) == _EVENTS:
                    exchange.failures = 0
                    await self._read(response, exchange)
                elif response.status_code < 500 and response.status_code != 429:
                    return False
        return True

    async def _resume(self, exchange: _Exchange) -> None:
        """Resume a stream that broke before the response, if the server numbers its events. The
        server may close the stream any number of times, as long as it resumes it."""
        events = exchange.events
        while (
            events.last_id is not None
            and exchange.failures < _ATTEMPTS
            and not exchange.is_answered
        ):
            await asyncio.sleep(events.retry)
            await self._get(exchange)
        if not exchange.is_answered:
            await self._unanswered(
                exchange, UpstreamFailed(f"{self._label} closed the stream before the response")
            )

    async def _listen(self) -> None:
        """Receive the messages that the server sends on its own, if it offers such a stream. Retry
        with growing pauses while it cannot be reached."""
        exchange, epoch = _Exchange(None, self._max_message), self._epoch
        while self._epoch == epoch and await self._get(exchange):
            doubled = min(max(exchange.failures - 1, 0), 10)
            await asyncio.sleep(min(exchange.events.retry * 2**doubled, MAX_RETRY))

    async def _renew(self, epoch: int) -> None:
        """Start a new session after the server has ended ours, once for all requests that
        notice."""
        async with self._renewing:
            if self._hello is None or self._epoch != epoch:
                return
            before = self._session, self._version
            hello = await self._repeat(self._hello)
            if hello.answer is None or "result" not in hello.answer.body:
                self._session, self._version = before
                return
            self._epoch += 1
            wire.log(f"{self._label} has forgotten the session: started a new one")
            initialized = wire.notification("notifications/initialized")
            await self._post(initialized, _Exchange(initialized, self._max_message))
            for message in list(self._lasting.values()):
                await self._repeat(message)
            self._tasks.start(self._listen())

    async def _repeat(self, message: Message) -> _Exchange:
        """Repeat a message of the client with an id of our own."""
        message = wire.rewritten(message, id=wire.new_id())
        exchange = _Exchange(message, self._max_message, is_own=True)
        await self._post(message, exchange)
        return exchange

    def _headers_of(self, message: Message | None = None) -> dict[str, str]:
        """Return the headers of a request. Since 2026-07-28 some are for routing; which arguments
        of a tool belong there is known once the tools have been listed."""
        headers = {"accept": f"{_JSON}, {_EVENTS}", "content-type": _JSON}
        if message is None or message.method != "initialize":
            sent = {_SESSION: self._session, _VERSION: self._version}
            headers |= {name: value for name, value in sent.items() if value is not None}
        if message is None or message.method is None or (version := _version_of(message)) is None:
            return headers
        from mcp.shared import inbound

        headers |= {_VERSION: version, inbound.MCP_METHOD_HEADER: message.method}
        name = message.params.get(inbound.NAME_BEARING_METHODS.get(message.method, ""))
        if isinstance(name, str):
            headers[inbound.MCP_NAME_HEADER] = inbound.encode_header_value(name)
        arguments = message.params.get("arguments")
        if message.method == "tools/call" and isinstance(arguments, dict):
            headers |= inbound.mcp_param_headers(self._tool_headers.get(str(name), {}), arguments)
        return headers


def _version_of(message: Message) -> str | None:
    version = message.meta.get(_VERSION_KEY)
    return (
        version
        if isinstance(version, str) and version.isascii() and version.isprintable()
        else None
    )


def _kind(response: httpx2.Response) -> str:
    kind: str = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind


class EventStream:
    """Parse `text/event-stream`: bytes in, messages out. It is resumed from `last_id`, after
    `retry` seconds.

    The data of an event is JSON, so its lines are joined to one. Nothing over the size limit is
    kept."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self.last_id: str | None = None
        self.retry = RETRY
        self.begin()

    def begin(self) -> None:
        """Start or restart the stream. An incomplete event is dropped: the server sends it
        again."""
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
            if isinstance(line, UnparsedLine):
                self._too_large = UnparsedLine(
                    line.size, line.head.removeprefix(b"data:"), line.tail
                )
            elif field := line.removeprefix(_BOM) if self._is_first else line:
                self._field(bytes(field[:_FIELD]).partition(b":")[0], field)
            else:
                yield from self._event()
            self._is_first = False

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
        value = line[len(name) + 1 :].removeprefix(b" ")
        if name == b"data":
            self._size += len(value) + 1
            if self._size <= self._max_size + 1:
                self._data.append(value)
            else:
                head = self._data[0] if self._data else value
                self._too_large = UnparsedLine(
                    self._size, UnparsedLine.of(head).head, UnparsedLine.of(value).tail
                )
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
