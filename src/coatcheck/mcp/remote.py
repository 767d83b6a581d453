"""A server that somebody else runs, over streamable HTTP: a message is a POST, answers are JSON or a stream of events.

Bodies pass as they are. What the transport wants besides (session, version, routing headers) is read from them.
A server that is away costs the requests that it should have answered, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
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
from coatcheck.mcp.upstreams import Sink
from coatcheck.mcp.wire import MAX_MESSAGE, Id, Lines, Message, Raw, Unread, parse, rewritten

_SESSION: Final = "mcp-session-id"
_LAST_EVENT: Final = "last-event-id"
_CONNECT: Final = 20.0
_CLOSE: Final = 3.0
_AGAIN: Final = 1.0  # seconds before a broken stream is taken up again, where the server does not say
_AGAIN_AT_MOST: Final = 30.0
_ATTEMPTS: Final = 3
_ERROR_BODY: Final = 64 * 1024


@dataclass(slots=True)
class _Stream:
    """Where a stream of events has come to."""

    last_id: str | None = None
    again: float = _AGAIN
    answered: bool = False
    data: list[Raw] = field(default_factory=list)
    event_id: str | None = None


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
        self._version: str | None = None
        self._params: dict[str, Mapping[tuple[str, ...], str]] = {}
        self._order = asyncio.Lock()

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        try:
            url = httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise UpstreamFailed(f"{self._url!r} is no address: {error}", hint="http://… or https://…") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UpstreamFailed(f"{self._url!r} is no address of a server", hint="http://… or https://…")
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT),
            limits=httpx2.Limits(max_connections=1_000, max_keepalive_connections=32),
            follow_redirects=False,
        )

    async def send(self, message: Message) -> None:
        if message.method == "notifications/cancelled" and self._abort(message.params.get("requestId")):
            return
        self._spawn(self._deliver(message), message.id if message.is_request else None)
        if message.method == "notifications/initialized" and self._session is not None:
            self._spawn(self._listen(), None)

    async def finish(self) -> None:
        """Answers to what was asked are still delivered."""

        async def end() -> None:
            others = self._tasks - {asyncio.current_task()} if self._posts else set()
            posts = [task for task in others if task in self._posts.values()]
            if posts:
                await asyncio.wait(posts)
            await self._to.ended(UpstreamFailed("the client has left"))

        self._spawn(end(), None)

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

    def _spawn(self, work: Any, request_id: Id | None) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        if request_id is not None:
            self._posts[request_id] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if request_id is not None and self._posts.get(request_id) is task:
                del self._posts[request_id]

        task.add_done_callback(done)

    def _abort(self, request_id: object) -> bool:
        """From 2026-07-28 on, ending the answer's stream is how a request is cancelled."""
        task = self._posts.get(request_id) if isinstance(request_id, str | int) else None
        if task is None or self._version is not None:
            return False
        task.cancel()
        return True

    async def _deliver(self, message: Message) -> None:
        request_id = message.id if message.is_request else None
        if message.is_request:
            await self._post(message, request_id)
            return
        async with self._order:  # notifications and answers arrive in the order they were sent
            await self._post(message, request_id)

    async def _post(self, message: Message, request_id: Id | None) -> None:
        assert self._client is not None
        if message.method == "initialize":
            self._session = self._version = None
        headers = self._common() | self._routing(message)
        stream = _Stream()
        try:
            async with self._client.stream("POST", self._url, content=bytes(message.raw), headers=headers) as response:
                await self._answer(response, message, request_id, stream)
            if request_id is not None and not stream.answered:
                await self._resume(message, request_id, stream)
        except httpx2.HTTPError as error:
            if request_id is not None and not stream.answered:
                reason = str(error) or type(error).__name__
                await self._to.unanswered(request_id, UpstreamFailed(f"{self._place} cannot be reached: {reason}"))

    async def _answer(
        self, response: httpx2.Response, message: Message, request_id: Id | None, stream: _Stream
    ) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code >= 300 and request_id is not None:
            stream.answered = True
            await self._refused(response, kind, request_id)
            return
        if message.method == "initialize" and response.headers.get(_SESSION):
            self._session = response.headers[_SESSION]
        if request_id is None:
            return
        if kind == "application/json":
            lines = Lines(self._max_message)
            async for chunk in response.aiter_bytes():
                for line in lines.feed(chunk.replace(b"\n", b" ")):
                    await self._received(line, message, stream)
            for line in lines.end():
                await self._received(line, message, stream)
        elif kind == "text/event-stream":
            await self._events(response, message, stream)
        else:
            stream.answered = True
            said = f"{self._place} answered {response.status_code} with {kind[:60] or 'nothing'}"
            await self._to.unanswered(request_id, UpstreamFailed(said, hint="is this the address of an MCP server?"))

    async def _refused(self, response: httpx2.Response, kind: str, request_id: Id) -> None:
        """A status that is an error: with the server's own words where it has some."""
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _ERROR_BODY:
                break
        messages = parse(body) if kind == "application/json" else []
        if messages and isinstance(messages[0].body.get("error"), dict):
            await self._to.message(rewritten(messages[0], id=request_id))
            return
        hint = None
        if response.status_code in (401, 403):
            hint = "it wants credentials: --header 'Authorization: Bearer ${TOKEN}'"
        elif response.status_code == 404 and self._session is not None:
            hint = "it has forgotten this session: connect again"
        elif response.status_code < 400:
            hint = f"use the address that it points to: {response.headers.get('location', '')[:200]}"
        said = f"{self._place} answered {response.status_code}"
        await self._to.unanswered(request_id, UpstreamFailed(said, hint=hint))

    # What comes back

    async def _events(self, response: httpx2.Response, message: Message | None, stream: _Stream) -> None:
        lines = Lines(self._max_message + 16)
        async for chunk in _unified(response.aiter_bytes()):
            for line in lines.feed(chunk):
                await self._field(line, message, stream)
                if stream.answered:
                    return

    async def _field(self, line: Raw | Unread, message: Message | None, stream: _Stream) -> None:
        """One line of a stream of events. An empty one ends the event."""
        if isinstance(line, Unread):
            await self._received(line, message, stream)
        elif not line:
            data, stream.data = stream.data, []
            stream.last_id = stream.event_id or stream.last_id
            if data and (whole := data[0] if len(data) == 1 else b"\n".join(data)).strip():
                await self._received(whole, message, stream)
        elif line.startswith(b"data:"):
            stream.data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"id:"):
            stream.event_id = bytes(line[3:]).strip().decode("utf-8", "replace")
        elif line.startswith(b"retry:"):
            with contextlib.suppress(ValueError):
                stream.again = min(int(line[6:]) / 1_000, _AGAIN_AT_MOST)

    async def _received(self, line: Raw | Unread, message: Message | None, stream: _Stream) -> None:
        request_id = message.id if message is not None else None
        if isinstance(line, Unread):
            stream.answered = stream.answered or request_id is not None
            error = UpstreamFailed(
                f"{self._place} sent a message of {line.size:,} bytes; at most {self._max_message:,} are taken",
                hint="ask for less",
            )
            await self._to.unanswered(request_id if request_id is not None else line.id, error)
            return
        for found in parse(line):
            if message is not None and found.is_response:
                stream.answered = True
                self._learned(message, found)
            await self._to.message(found)

    def _learned(self, message: Message, answer: Message) -> None:
        result = answer.body.get("result")
        if not isinstance(result, dict):
            return
        if message.method == "initialize" and isinstance(result.get("protocolVersion"), str):
            self._version = result["protocolVersion"]
        tools = result.get("tools")
        if message.method == "tools/list" and isinstance(tools, list) and _version_of(message) is not None:
            for tool in tools:
                schema = tool.get("inputSchema") if isinstance(tool, dict) else None
                if isinstance(schema, dict) and find_invalid_x_mcp_header(schema) is None:
                    self._params[str(tool.get("name"))] = x_mcp_header_map(schema)

    async def _resume(self, message: Message, request_id: Id, stream: _Stream) -> None:
        """Take a stream up again that broke before the answer, where the server numbers its events."""
        assert self._client is not None
        attempts = _ATTEMPTS if stream.last_id is not None else 0
        while attempts and not stream.answered:
            attempts -= 1
            await asyncio.sleep(stream.again)
            headers = self._common() | {_LAST_EVENT: stream.last_id or ""}
            with contextlib.suppress(httpx2.HTTPError):
                async with self._client.stream("GET", self._url, headers=headers) as response:
                    if response.status_code == 200:
                        attempts = _ATTEMPTS
                        before = stream.last_id
                        await self._events(response, message, stream)
                        attempts = _ATTEMPTS if stream.last_id != before else attempts - 1
        if not stream.answered:
            await self._to.unanswered(request_id, UpstreamFailed(f"{self._place} ended the answer before it was whole"))

    async def _listen(self) -> None:
        """What the server says unasked. One that offers no such stream answers 405, and is left alone."""
        assert self._client is not None
        stream, failures = _Stream(), 0
        while failures < _ATTEMPTS:
            headers = self._common() | ({_LAST_EVENT: stream.last_id} if stream.last_id else {})
            try:
                async with self._client.stream("GET", self._url, headers=headers) as response:
                    if response.status_code != 200:
                        return
                    failures = 0
                    await self._events(response, None, stream)
            except httpx2.HTTPError:
                failures += 1
            await asyncio.sleep(stream.again)

    # Headers

    @property
    def _place(self) -> str:
        url = httpx2.URL(self._url)
        return f"the server at {url.host}"

    def _common(self) -> dict[str, str]:
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if self._session is not None:
            headers[_SESSION] = self._session
        if self._version is not None:
            headers[MCP_PROTOCOL_VERSION_HEADER] = self._version
        return headers

    def _routing(self, message: Message) -> dict[str, str]:
        """What requests say in their headers from 2026-07-28 on."""
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


async def _unified(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Line ends of any kind as line feeds."""
    after_return = False
    async for chunk in chunks:
        if after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        after_return = chunk.endswith(b"\r")
        yield chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in chunk else chunk
