"""Run a proxy: one client on stdin and stdout, the upstream server, and the relay between them.

Requests, responses and notifications pass as received, with their ids, except for the changes of
`Rewriter`. Slow work (storing, reading, resolving) runs in threads and delays only its own request.
stdin and stdout are used by threads too, so that neither blocks the rest. Other output of the
process goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import math
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from coatcheck import Session, Store
from coatcheck.errors import CODES, CoatcheckError, UpstreamFailed
from coatcheck.lanes import in_long_thread, in_reading_thread, in_thread
from coatcheck.mcp import wire
from coatcheck.mcp.proxy_rewrites import Counts, ProxySettings, Rewriter, text_result
from coatcheck.mcp.resources import SCHEME as ARTIFACT
from coatcheck.mcp.wire import Id, Message, OwnRequests, Raw, Tasks, UnparsedLine, Upstream

_CHUNK: Final = 1 << 16
_WRITE_BUFFER: Final = 16 << 20  # bytes that may wait to be written before writers must wait
_READ_AHEAD: Final = 8  # chunks that may wait to be read
_FLUSH: Final = 2.0
_POLL: Final = 0.01
_M_MMAP_THRESHOLD: Final = -3  # an option of mallopt
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TIMEOUT_POLL: Final = 1.0  # seconds between checks of the timeout
_LIST_TIMEOUT: Final = 10.0
_POINTER: Final = b"art:"
_MAX_ERROR: Final = 1_000
_RESOURCE_LISTS: Final = {
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
_LARGE: Final = 1 << 20
_REMEMBERED: Final = 1_000
_HANDSHAKES: Final = ("initialize", "server/discover")
_CALLS: Final = ("tools/call", "tasks/result")
_SLIMMED: Final = (*_CALLS, "resources/read")
_TIMED: Final = frozenset(
    {
        "initialize",
        "server/discover",
        "ping",
        "tools/list",
        "tools/call",
        "resources/list",
        "resources/read",
        "resources/templates/list",
        "resources/subscribe",
        "resources/unsubscribe",
        "prompts/list",
        "prompts/get",
        "completion/complete",
        "logging/setLevel",
    }
)
"""Requests that are answered soon, or report progress. Other requests may be meant to stay open."""


def run(upstream: Upstream, session: Session, settings: ProxySettings, counts: Counts) -> int:
    """Serve one client until it disconnects, the upstream server ends, or a signal arrives. Return
    the exit status.

    Raises `UpstreamFailed` if the upstream server cannot be started, or ends while the client is
    connected."""
    # By default, once glibc has seen a large block of memory freed, it keeps such blocks.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    naming = {
        name: found
        for name in ("plain_name", "server_of")
        if (found := getattr(upstream, name, None))
    }
    return asyncio.run(_run(upstream, Rewriter(session, settings, counts, **naming), settings))


async def _run(upstream: Upstream, rewriter: Rewriter, settings: ProxySettings) -> int:
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _resolve, signalled, number)
    with contextlib.closing(Stdio()) as client:
        relay = Relay(upstream, rewriter, client.write, timeout=settings.timeout)
        tasks = [asyncio.create_task(relay.watch())]
        try:
            await upstream.start(relay)
            left = asyncio.create_task(_serve(client, relay, settings.max_message))
            tasks.append(left)
            ends: set[asyncio.Future[Any]] = {signalled, relay.over, client.broken}
            await asyncio.wait({left, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():  # a host may kill us before the server has ended
                await in_thread(_write_counts, rewriter.session.store)
            left_first = (
                left.done() and not relay.is_ending
            )  # the end of the server may make the client leave
            if left.done() and not signalled.done() and not client.is_gone():
                await upstream.finish()  # open requests may still be answered
                await asyncio.wait(ends, timeout=_FLUSH, return_when=asyncio.FIRST_COMPLETED)
            await relay.tasks.wait(_FLUSH)
            await client.flush(_FLUSH)
            if relay.over.done() and not left_first:
                raise relay.over.result()
            return 128 + signalled.result() if signalled.done() else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await upstream.close()


def _write_counts(store: Store) -> None:
    """Write what was saved so far."""
    for write in store.writers:
        write()


async def _serve(client: Stdio, relay: Relay, max_message: int) -> None:
    """Pass the client's messages to the relay until the end of stdin."""
    async for line in wire.read_lines(client.read, max_message):
        await relay.from_client(line)


def _resolve(future: asyncio.Future[Any], value: object = None) -> None:
    if not future.done():
        future.set_result(value)


class Stdio:
    """Our stdin and stdout. `broken` is done when nobody reads stdout any more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = os.dup(0), os.dup(1)
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._read_ahead = threading.Semaphore(_READ_AHEAD)
        self._lines: queue.SimpleQueue[Raw | None] = queue.SimpleQueue()
        self._queued = self._written = (
            0  # bytes: the first is changed in the loop, the second in a thread
        )
        self._room = asyncio.Event()
        self._room.set()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        for work in (self._read_stdin, self._write_stdout):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._lines.put(None)

    async def read(self) -> bytes:
        """Return the next chunk from the client; empty at the end."""
        chunk = await self._chunks.get()
        self._read_ahead.release()
        return chunk

    async def write(self, raw: Raw) -> None:
        """Write one line. Waits only if the client leaves a lot unread; without a reader, the line
        is dropped."""
        await self._room.wait()
        self._queued += len(raw)
        if self._queued - self._written > _WRITE_BUFFER:
            self._room.clear()
        self._lines.put(raw)

    async def flush(self, seconds: float) -> None:
        """Wait until everything is written, at most `seconds`."""
        until = time.monotonic() + seconds
        while self._written < self._queued and time.monotonic() < until:
            await asyncio.sleep(_POLL)

    def is_gone(self) -> bool:
        """Whether stdout has no reader any more."""
        poll = select.poll()
        poll.register(self._out, 0)
        return self.broken.done() or bool(poll.poll(0))

    # In threads

    def _read_stdin(self) -> None:
        chunk = b"."
        while chunk:
            self._read_ahead.acquire()
            try:
                chunk = os.read(self._in, _CHUNK)
            except OSError:
                chunk = b""
            self._call_in_loop(self._chunks.put_nowait, chunk)

    def _write_stdout(self) -> None:
        while (raw := self._lines.get()) is not None:
            size = len(raw)
            try:
                view = memoryview(b"".join((raw, b"\n")))
                del raw  # free it now: it may be large
                while view:
                    view = view[os.write(self._out, view) :]
            except OSError:
                self._call_in_loop(_resolve, self.broken)
            view = memoryview(b"")
            self._written += size
            if self._queued - self._written <= _WRITE_BUFFER:
                self._call_in_loop(self._room.set)

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *args)


@dataclass(slots=True)
class PendingRequest:
    """A request of the client that has no response yet. `first` is False for a further page of a
    list."""

    method: str
    tool: str | None
    first: bool
    meta: dict[str, Any]
    until: float


_NO_REQUEST: Final = PendingRequest("tools/call", None, True, {}, math.inf)
"""For a response without an id: an error about a message that the upstream server could not
parse."""


class Relay:
    """Takes the client's messages, and is the sink for the upstream server's. Each request of the
    client is answered once: by the upstream server, or by us."""

    def __init__(
        self,
        upstream: Upstream,
        rewriter: Rewriter,
        to_client: Callable[[Raw], Awaitable[None]],
        *,
        timeout: float,
    ) -> None:
        self._upstream = upstream
        self._rewriter = rewriter
        self._to_client = to_client
        self._timeout = timeout
        self._pending: dict[Id | None, PendingRequest] = {}
        self._cancelled: dict[Id | None, PendingRequest] = {}  # a response may still come
        self._asked: set[Id] = (
            set()
        )  # requests of the upstream server to the client: they pause all timeouts
        self._tools: dict[
            str, str | None
        ] = {}  # the tools of calls that continue as a task, by its id
        self._own = OwnRequests(upstream.send, "the server")
        self._listing = asyncio.Lock()
        self._has_tools = True
        self._has_resources = True
        self.tasks = Tasks()
        self.over: asyncio.Future[UpstreamFailed] = asyncio.get_running_loop().create_future()
        self.is_ending = False  # set when the upstream server ends, before the client hears of it

    # From the client

    async def from_client(self, line: Raw | UnparsedLine) -> None:
        if isinstance(line, UnparsedLine):
            await self._too_large(line)
            return
        messages = wire.parse(line)
        if not messages and line.strip():
            messages = [Message(line, {})]  # let the upstream server report what is wrong with it
        for message in messages:
            await wire.answer(
                self._route(message),
                message.id,
                "message",
                self._send if message.is_request else None,
            )

    async def _too_large(self, line: UnparsedLine) -> None:
        """Report that a message cannot be passed on, to the side that waits for it."""
        error = UpstreamFailed(
            f"a message of {line.size:,} bytes is over the limit", hint="send less"
        )
        if line.method is None and line.id is not None:
            with contextlib.suppress(UpstreamFailed):
                await self._route(wire.failure(line.id, error))
        elif line.method is None or line.id is not None:
            await self._send(wire.failure(line.id, error))
        else:
            wire.log(str(error))

    async def _route(self, message: Message) -> Message | None:
        """Pass a message on, or return the response to it."""
        if message.is_response and message.id is not None:
            self._asked.discard(message.id)
        elif message.method == "notifications/cancelled" and self._cancel(message):
            return None
        if not message.is_request or message.id is None:
            await self._upstream.send(message)
        elif message.method == "tools/call" and self._needs_work(message):
            self.tasks.start(
                wire.answer(self._call(message), message.id, "call", self._send), message.id
            )
        elif message.method == "tools/list" and not self._has_tools and self._rewriter.has_tools:
            return wire.response(message.id, self._rewriter.only_ours(message.meta))
        elif message.method == "resources/read" and self._is_artifact(message):
            self.tasks.start(
                wire.answer(self._read(message), message.id, "read", self._send), message.id
            )
        elif (
            message.method in _RESOURCE_LISTS
            and not self._has_resources
            and self._rewriter.has_links
        ):
            empty = self._rewriter.no_resources(_RESOURCE_LISTS[message.method], message.meta)
            return wire.response(message.id, empty)
        else:
            await self._forward(message)
        return None

    def _is_artifact(self, message: Message) -> bool:
        uri = message.params.get("uri")
        return isinstance(uri, str) and uri.startswith(ARTIFACT) and self._rewriter.has_links

    async def _read(self, message: Message) -> Message | None:
        """Read an artifact that a result links to. One that this session does not have may be the
        server's: another Coatcheck has the same URIs."""
        uri = str(message.params["uri"])
        try:
            result = await in_thread(self._rewriter.read_resource, uri, message.meta)
        except CoatcheckError as error:
            if self._has_resources:
                await self._forward(message)
                return None
            code = CODES[error.code].mcp
            return wire.error_response(message.id, code, str(error)[:_MAX_ERROR])
        return wire.response(message.id, result)

    def _cancel(self, message: Message) -> bool:
        """Cancel a request of the client. Return whether that is done: the server has not received
        the request yet."""
        request_id = wire.id_of(message.params.get("requestId"))
        if request_id is None:
            return False
        task = self.tasks.of(request_id)
        if task is not None and task.cancel():
            return True
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            _remember(self._cancelled, request_id, pending)
        return False

    async def _forward(self, message: Message) -> None:
        assert message.id is not None
        method, params = message.method or "", message.params
        tool = params.get("name") if method == "tools/call" else None
        if method == "tasks/result":
            tool = self._tools.get(str(params.get("taskId")))
        tool = tool if isinstance(tool, str) else None
        about = params.get("clientInfo")
        if method == "initialize" and isinstance(about, dict):
            self._rewriter.note_client(about.get("name"))
        until = time.monotonic() + self._timeout if method in _TIMED else math.inf
        self._pending[message.id] = PendingRequest(
            method, tool, params.get("cursor") is None, message.meta, until
        )
        try:
            await self._upstream.send(message)
        except UpstreamFailed:
            self._pending.pop(message.id, None)
            raise

    def _needs_work(self, message: Message) -> bool:
        """Whether a call cannot simply be passed on."""
        is_unlisted = self._has_tools and not self._rewriter.is_listed
        return (
            is_unlisted
            or self._rewriter.is_ours(message.params.get("name"))
            or _POINTER in message.raw
        )

    async def _call(self, message: Message) -> Message | None:
        async with self._listing:
            if (
                self._has_tools and not self._rewriter.is_listed
            ):  # the client knows the tools from before, we do not
                await self._list(message.meta)
        name, arguments = message.params.get("name"), message.params.get("arguments")
        asked = arguments if isinstance(arguments, dict) else {}
        if self._rewriter.is_ours(name):
            work = functools.partial(self._rewriter.answer, str(name), arguments, message.meta)
            result = await in_reading_thread(
                self._rewriter.session, asked.get("pointer"), asked, work
            )
            return wire.response(message.id, result)
        if _POINTER in message.raw and asked:
            run = (
                in_long_thread if "#" in str(asked) else in_thread
            )  # a part of an artifact, which may be large
            try:
                resolved = await run(self._rewriter.resolve, str(name), asked)
            except CoatcheckError as error:
                return wire.response(message.id, text_result(f"[error: {error}]", message.meta))
            if resolved != asked:
                message = wire.rewritten(message, params={**message.params, "arguments": resolved})
        await self._forward(message)
        return None

    async def _list(self, meta: dict[str, Any]) -> None:
        """List the upstream server's tools for ourselves, unless it does not answer."""
        kept = {key: value for key, value in meta.items() if key != "progressToken"}
        is_first = True
        with contextlib.suppress(UpstreamFailed):
            async for page in self._own.pages(
                "tools/list", {"_meta": kept} if kept else {}, _LIST_TIMEOUT
            ):
                self._rewriter.listed(page, first=is_first)
                is_first = False
        self._rewriter.is_listed = True

    # From the upstream server

    async def message(self, message: Message) -> None:
        try:
            await self._received(message)
        except Exception as error:  # noqa: BLE001 - the reader must go on; the message passes unchanged
            wire.log(f"a message was passed on unchanged: {error!r}")
            await self._send(message)

    async def _received(self, message: Message) -> None:
        if message.is_response and not self._own.answered(message):
            pending = self._pending.pop(message.id, None) or self._cancelled.pop(message.id, None)
            pending = _NO_REQUEST if message.id is None else pending
            if pending is not None:  # else it is a second response, or comes after ours
                await self._answered(pending, message)
        elif not message.is_response:
            self._note(message)
            await self._send(message)

    def _note(self, message: Message) -> None:
        """Note what a request or notification of the upstream server means for timeouts."""
        token, request_id = (
            message.params.get("progressToken"),
            wire.id_of(message.params.get("requestId")),
        )
        if message.is_request and message.id is not None:
            self._asked.add(message.id)
        elif message.method == "notifications/cancelled" and request_id is not None:
            self._asked.discard(request_id)
        elif message.method == "notifications/progress" and token is not None:
            for pending in self._pending.values():
                if pending.meta.get("progressToken") == token:
                    pending.until = time.monotonic() + self._timeout

    async def _answered(self, pending: PendingRequest, message: Message) -> None:
        method, tool, call_id = pending.method, pending.tool, str(message.id)
        rewriter, error, result = self._rewriter, message.body.get("error"), message.result
        is_small = rewriter.is_small(tool, len(message.raw))
        if method == "tools/call" and isinstance(result.get("task"), dict):
            _remember(self._tools, str(result["task"].get("taskId")), tool)
        if (
            method == "tools/list"
            and message.error_code == wire.METHOD_NOT_FOUND
            and rewriter.has_tools
        ):
            await self._send(wire.response(message.id, rewriter.only_ours(pending.meta)))
        elif isinstance(error, dict) and not is_small:
            await self._slim(message, "error", lambda: rewriter.error(tool, call_id, error))
        elif not isinstance(message.body.get("result"), dict):
            invalid = UpstreamFailed(
                f"the server sent {len(message.raw):,} bytes without a valid result", hint=""
            )
            await self._send(
                message if is_small or method not in _SLIMMED else wire.failure(message.id, invalid)
            )
        elif method in _HANDSHAKES:
            capabilities = result.get("capabilities")
            offered = capabilities if isinstance(capabilities, dict) else {"tools": {}}
            self._has_tools = isinstance(offered.get("tools"), dict)
            self._has_resources = isinstance(offered.get("resources"), dict)
            await self._send(_changed(message, "result", rewriter.with_capabilities(result)))
        elif method == "tools/list":
            await self._send(
                _changed(message, "result", rewriter.listed(result, first=pending.first))
            )
        elif method in _CALLS and not is_small:
            await self._slim(message, "result", lambda: rewriter.call_result(tool, call_id, result))
        elif method == "resources/read" and not is_small:
            await self._slim(message, "result", lambda: rewriter.resource(call_id, result))
        else:
            await self._send(message)

    async def _slim(
        self, message: Message, field: str, change: Callable[[], dict[str, Any]]
    ) -> None:
        """Store a result or an error in the background. For a large one, the server is not read
        until that is done, so memory is bounded."""

        async def slim() -> Message:
            return _changed(message, field, await in_thread(change))

        task = self.tasks.start(wire.answer(slim(), message.id, "result", self._send))
        if len(message.raw) >= _LARGE:
            await asyncio.wait({task})

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """Fail one request that gets no response, or all if it is not known which."""
        self._own.fail(request_id, error)
        for one in [one for one in self._pending if request_id in (None, one)]:
            if self._pending.pop(one, None) is not None:
                await self._send(wire.failure(one, error))

    async def ended(self, error: UpstreamFailed) -> None:
        self.is_ending = True
        await self.unanswered(None, error)
        _resolve(self.over, error)

    async def watch(self) -> None:
        """Fail requests that time out. The timeout is paused while the server waits for the client,
        and starts again with each sign of progress."""
        while self._timeout > 0:
            await asyncio.sleep(min(_TIMEOUT_POLL, self._timeout))
            now = time.monotonic()
            for pending in self._pending.values() if self._asked else ():
                pending.until = max(pending.until, now + self._timeout)
            late = [one for one, pending in self._pending.items() if pending.until <= now]
            for request_id in late:
                await self._time_out(request_id)

    async def _time_out(self, request_id: Id | None) -> None:
        """Fail a request, and cancel it at the server."""
        pending = self._pending.pop(request_id, None)
        if pending is None:  # it was answered meanwhile
            return
        text = f"no answer to {pending.method} in {self._timeout:g} seconds"
        error = UpstreamFailed(text, hint="try again, or raise --timeout")
        await self._send(wire.failure(request_id, error))
        if pending.method == "initialize":  # it cannot be cancelled
            return
        params = {"requestId": request_id, "reason": "timeout"}
        with contextlib.suppress(UpstreamFailed):
            await self._upstream.send(wire.notification("notifications/cancelled", params))

    async def _send(self, message: Message) -> None:
        await self._to_client(message.raw)


def _changed(message: Message, field: str, value: dict[str, Any]) -> Message:
    """Return a response with another result or error, or as received if it is the same object. A
    response has one of the two."""
    kept = {key: one for key, one in message.body.items() if key != "result" or field == "result"}
    is_same = value is message.body[field] and len(kept) == len(message.body)
    return message if is_same else wire.rewritten(Message(b"", kept), **{field: value})


def _remember(kept: dict[Any, Any], key: object, value: object) -> None:
    """Keep a value, and forget the oldest if there are many."""
    kept[key] = value
    if len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]
