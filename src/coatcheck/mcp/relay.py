"""The relay between one client and the upstream server.

Requests, responses and notifications pass as received, with their ids, except for the changes of `Rewriter`. Slow work
(storing, reading, resolving) runs in threads and delays only its own request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from coatcheck.errors import CoatcheckError, UpstreamFailed
from coatcheck.lanes import in_long_thread, in_thread, may_take_long
from coatcheck.mcp.proxy_rewrites import Rewriter
from coatcheck.mcp.wire import (
    Id,
    Message,
    Raw,
    UnparsedLine,
    Upstream,
    failure,
    id_of,
    log,
    notification,
    parse,
    request,
    response,
    rewritten,
)

K = TypeVar("K")
V = TypeVar("V")

TIMEOUT: Final = 600.0
_POLL: Final = 1.0  # seconds between checks of the timeout
_POINTER: Final = b"art:"
_LIST_TIMEOUT: Final = 10.0
_MAX_PAGES: Final = 1_000
_METHOD_NOT_FOUND: Final = -32601
_LARGE: Final = 1 << 20
_HANDSHAKES: Final = ("initialize", "server/discover")
_CALLS: Final = ("tools/call", "tasks/result")
_SLIMMED: Final = (*_CALLS, "resources/read")
_REMEMBERED: Final = 1_000
_TIMED: Final = frozenset(
    {
        "initialize", "server/discover", "ping", "tools/list", "tools/call", "resources/list", "resources/read",
        "resources/templates/list", "resources/subscribe", "resources/unsubscribe", "prompts/list", "prompts/get",
        "completion/complete", "logging/setLevel",
    }
)  # fmt: skip
"""Requests that are answered soon, or report progress. Other requests may be meant to stay open."""

Send = Callable[[Raw], Awaitable[None]]


class Relay:
    """Takes the client's messages, and is the sink for the upstream server's."""

    def __init__(self, upstream: Upstream, rewriter: Rewriter, to_client: Send, *, timeout: float = TIMEOUT) -> None:
        self._upstream = upstream
        self._rewriter = rewriter
        self._to_client = to_client
        self._timeout = timeout
        self._pending = PendingRequests(timeout)
        self._own: dict[Id, asyncio.Future[dict[str, Any]]] = {}  # requests of our own
        self._mark = f"coatcheck-{secrets.token_hex(6)}-"  # prefix of our own ids
        self._numbers = itertools.count(1)
        self._listing = asyncio.Lock()
        self._running: dict[Id, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_tools = True
        self.over: asyncio.Future[UpstreamFailed] = asyncio.get_running_loop().create_future()
        self.is_ending = False  # set when the upstream server ends, before the client hears of it

    # From the client

    async def from_client(self, raw: Raw) -> None:
        messages = parse(raw)
        if not messages and raw.strip():
            messages = [Message(raw, {})]  # let the upstream server report what is wrong with it
        for message in messages:
            try:
                await self._route(message)
            except UpstreamFailed as error:
                await self._unsent(message, error)
            except Exception as error:  # noqa: BLE001 - one bad message must not stop the others
                log(f"cannot pass a message on: {error!r}")
                await self._unsent(message, CoatcheckError("the proxy could not pass the message on"))

    async def too_large(self, line: UnparsedLine, error: UpstreamFailed) -> None:
        """Report that a message of the client cannot be passed on, to the side that waits for it."""
        if line.method is None and line.id is not None:
            with contextlib.suppress(UpstreamFailed):
                await self._route(failure(line.id, error))
        elif line.method is None or line.id is not None:
            await self._send(failure(line.id, error))
        else:
            log(str(error))

    async def _route(self, message: Message) -> None:
        if message.is_response and message.id is not None:
            self._pending.client_answered(message.id)
        elif message.method == "notifications/cancelled" and self._cancelled(message.params.get("requestId")):
            return
        if not message.is_request or message.id is None:
            await self._upstream.send(message)
            return
        params = message.params
        if message.method == "tools/call" and self._needs_work(message):
            self._start(message.id, self._call(message))
            return
        if message.method == "tools/list" and not self._has_tools and self._rewriter.has_tools:
            await self._send(response(message.id, self._rewriter.only_ours(params.get("_meta"))))
            return
        await self._forward(message)

    async def _forward(self, message: Message) -> None:
        assert message.id is not None
        self._pending.begin(message)
        try:
            await self._upstream.send(message)
        except UpstreamFailed:
            self._pending.forget(message.id)
            raise

    def _needs_work(self, message: Message) -> bool:
        """Whether a call cannot simply be passed on."""
        is_unlisted = self._has_tools and not self._rewriter.is_listed
        return is_unlisted or self._rewriter.is_ours(message.params.get("name")) or _POINTER in message.raw

    async def _call(self, message: Message) -> None:
        if self._has_tools and not self._rewriter.is_listed:
            async with self._listing:  # the client knows the tools from before, we do not
                if not self._rewriter.is_listed:
                    await self._list(message.params.get("_meta"))
        try:
            if self._rewriter.is_ours(message.params.get("name")):
                await self._answer(message)
            elif _POINTER in message.raw and isinstance(message.params.get("arguments"), dict):
                await self._resolve(message)
            else:
                await self._forward(message)
        except UpstreamFailed as error:
            await self._unsent(message, error)
        except Exception as error:  # noqa: BLE001 - every request gets a response
            log(f"cannot pass a call on: {error!r}")
            await self._unsent(message, CoatcheckError("the proxy could not pass the call on"))

    async def _list(self, meta: object) -> None:
        """List the upstream server's tools for ourselves, unless it does not answer."""
        kept = {key: value for key, value in meta.items() if key != "progressToken"} if isinstance(meta, dict) else {}
        cursors: list[object] = [None]
        while len(cursors) <= _MAX_PAGES:
            params = {**({"_meta": kept} if kept else {}), **({"cursor": cursors[-1]} if cursors[-1] else {})}
            request_id = f"{self._mark}{next(self._numbers)}"
            answer = self._own[request_id] = asyncio.get_running_loop().create_future()
            try:
                await self._upstream.send(request(request_id, "tools/list", params))
                result = await asyncio.wait_for(answer, _LIST_TIMEOUT)
            except (UpstreamFailed, TimeoutError):
                break
            finally:
                self._own.pop(request_id, None)
            self._rewriter.listed(result, first=len(cursors) == 1)
            following = result.get("nextCursor")
            if not following or following in cursors:
                break
            cursors.append(following)
        self._rewriter.is_listed = True

    async def _answer(self, message: Message) -> None:
        """Run one of the added tools."""
        params = message.params
        arguments = params.get("arguments")
        asked = arguments if isinstance(arguments, dict) else {}
        run = in_long_thread if may_take_long(asked.get("pointer"), asked) else in_thread
        result = await run(self._rewriter.answer, str(params.get("name")), arguments, params.get("_meta"))
        await self._send(response(message.id, result))

    async def _resolve(self, message: Message) -> None:
        """Resolve pointers in the arguments of a call."""
        params, arguments = message.params, message.params["arguments"]
        try:
            run = in_long_thread if "#" in str(arguments) else in_thread  # a part of an artifact, which may be large
            resolved = await run(self._rewriter.resolve, str(params.get("name")), arguments)
        except CoatcheckError as error:
            await self._send(
                response(message.id, self._rewriter.error_result(f"[error: {error}]", params.get("_meta")))
            )
            return
        if resolved != arguments:
            message = rewritten(message, params={**params, "arguments": resolved})
        await self._forward(message)

    def _cancelled(self, request_id: object) -> bool:
        """Cancel a request. Whether it had not been sent to the upstream server yet."""
        found = id_of(request_id)
        if found is None:
            return False
        task = self._running.get(found)
        if task is not None and task.cancel():
            return True
        self._pending.cancelled(found)
        return False

    async def _unsent(self, message: Message, error: CoatcheckError) -> None:
        if message.is_request:
            await self._send(failure(message.id, error))

    # From the upstream server

    async def message(self, message: Message) -> None:
        try:
            await self._received(message)
        except Exception as error:  # noqa: BLE001 - the reader must go on; the message passes unchanged
            log(f"a message passes unchanged: {error!r}")
            await self._send(message)

    async def _received(self, message: Message) -> None:
        if message.is_response and message.id is not None:
            await self._response(message, message.id)
            return
        if message.is_response:
            await self._without_id(message)
            return
        if message.is_request and message.id is not None:
            self._pending.server_asks(message.id)
        elif message.method == "notifications/progress":
            self._pending.progressed(message.params.get("progressToken"))
        elif message.method == "notifications/cancelled":
            request_id = id_of(message.params.get("requestId"))
            if request_id is not None:
                self._pending.client_answered(request_id)
        await self._send(message)

    async def _response(self, message: Message, request_id: Id) -> None:
        if isinstance(request_id, str) and request_id.startswith(self._mark):
            answer, result = self._own.get(request_id), message.body.get("result")
            if answer is not None and not answer.done():
                answer.set_result(result if isinstance(result, dict) else {})
            return
        pending = self._pending.pop(request_id)
        if pending is not None:
            await self._answered(pending, message)

    async def _without_id(self, message: Message) -> None:
        """Handle a response without an id: an error about a message that the upstream server could not parse."""
        error = message.body.get("error")
        if self._rewriter.is_small(None, len(message.raw)):
            await self._send(message)
        elif isinstance(error, dict):
            await self._slim(message, lambda: self._rewriter.error(None, "", error), field="error")
        else:
            log(f"dropped a response of {len(message.raw):,} bytes without an id")

    async def _answered(self, pending: PendingRequest, message: Message) -> None:
        result, error = message.body.get("result"), message.body.get("error")
        is_small = self._rewriter.is_small(pending.tool, len(message.raw))
        if pending.method == "tools/list" and _is_unknown_method(message) and self._rewriter.has_tools:
            await self._send(response(message.id, self._rewriter.only_ours(pending.meta)))
            return
        if isinstance(error, dict) and not is_small:
            call_id = str(message.id)
            await self._slim(message, lambda: self._rewriter.error(pending.tool, call_id, error), field="error")
            return
        if not isinstance(result, dict):
            invalid = UpstreamFailed(f"the server sent {len(message.raw):,} bytes without a valid result", hint="")
            await self._send(message if is_small or pending.method not in _SLIMMED else failure(message.id, invalid))
            return
        task = result.get("task")
        if pending.method == "tools/call" and isinstance(task, dict):
            self._pending.task_started(str(task.get("taskId")), pending.tool)
        if pending.method in _HANDSHAKES:
            capabilities = result.get("capabilities")
            self._has_tools = not isinstance(capabilities, dict) or isinstance(capabilities.get("tools"), dict)
            await self._send(_with_result(message, self._rewriter.with_tools_capability(result)))
        elif pending.method == "tools/list":
            await self._send(_with_result(message, self._rewriter.listed(result, first=pending.first)))
        elif pending.method in _CALLS and not is_small:
            await self._slim(message, lambda: self._rewriter.call_result(pending.tool, str(message.id), result))
        elif pending.method == "resources/read" and not is_small:
            await self._slim(message, lambda: self._rewriter.resource(str(message.id), result))
        else:
            await self._send(message)

    async def _slim(
        self, message: Message, change: Callable[[], dict[str, Any]], *, field: Literal["result", "error"] = "result"
    ) -> None:
        """Store a result or an error in the background. For a large one, the server is not read until that is done, so
        memory is bounded."""
        task = self._start(None, self._slimmed(message, change, field))
        if len(message.raw) >= _LARGE:
            await asyncio.wait({task})

    async def _slimmed(self, message: Message, change: Callable[[], dict[str, Any]], field: str) -> None:
        try:
            done = await in_thread(change)
            if field == "error" and "result" in message.body:  # a response has one of the two
                message = Message(b"", {key: value for key, value in message.body.items() if key != "result"})
            if done is not message.body.get(field) or not message.raw:
                message = rewritten(message, **{field: done})
        except UpstreamFailed as error:
            message = failure(message.id, error)
        except Exception as error:  # noqa: BLE001 - every request gets a response
            log(f"cannot pass a result on: {error!r}")
            message = failure(message.id, CoatcheckError("the proxy could not pass the result on"))
        await self._send(message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """Fail one request that gets no response, or all if it is not known which."""
        for asked, answer in self._own.items():
            if request_id in (None, asked) and not answer.done():
                answer.set_result({})
        for one in self._pending.give_up(request_id):
            await self._send(failure(one, error))

    async def ended(self, error: UpstreamFailed) -> None:
        self.is_ending = True
        await self.unanswered(None, error)
        if not self.over.done():
            self.over.set_result(error)

    # Timeouts

    async def watch(self) -> None:
        """Fail requests that time out. The timeout is paused while the server waits for the client, and starts again
        with each sign of progress."""
        while self._timeout > 0:
            await asyncio.sleep(min(_POLL, self._timeout))
            for request_id, pending in self._pending.expired():
                text = f"no answer to {pending.method} in {self._timeout:g} seconds"
                await self._send(failure(request_id, UpstreamFailed(text, hint="try again, or raise --timeout")))
                if pending.method != "initialize":
                    await self._cancel_upstream(request_id)

    async def _cancel_upstream(self, request_id: Id) -> None:
        params = {"requestId": request_id, "reason": "timeout"}
        with contextlib.suppress(UpstreamFailed):
            await self._upstream.send(notification("notifications/cancelled", params))

    # Tasks

    def _start(self, request_id: Id | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        if request_id is not None:
            self._running[request_id] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if request_id is not None and self._running.get(request_id) is task:
                del self._running[request_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log(f"a message was lost: {error!r}")

        task.add_done_callback(done)
        return task

    async def drain(self, seconds: float) -> None:
        """Wait for the running tasks, at most `seconds`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    async def _send(self, message: Message) -> None:
        await self._to_client(message.raw)


def _with_result(message: Message, result: dict[str, Any]) -> Message:
    return message if result is message.body.get("result") else rewritten(message, result=result)


def _is_unknown_method(message: Message) -> bool:
    error = message.body.get("error")
    return isinstance(error, dict) and error.get("code") == _METHOD_NOT_FOUND


@dataclass(slots=True)
class PendingRequest:
    """A request of the client that has no response yet."""

    method: str
    tool: str | None
    token: object
    first: bool
    meta: object
    until: float


class PendingRequests:
    """The open requests of the client. Each is answered once: by the upstream server, or by us."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._pending: dict[Id, PendingRequest] = {}
        self._late: OrderedDict[Id, PendingRequest | None] = OrderedDict()  # cancelled, or answered by us (None)
        self._jobs: OrderedDict[str, str | None] = OrderedDict()  # the tool of each task
        self._asked: set[Id] = set()  # requests of the upstream server to the client

    def begin(self, message: Message) -> None:
        assert message.id is not None
        params = message.params
        meta, tool = params.get("_meta"), params.get("name") if message.method == "tools/call" else None
        if message.method == "tasks/result":
            tool = self._jobs.get(str(params.get("taskId")))
        self._pending[message.id] = PendingRequest(
            message.method or "",
            tool if isinstance(tool, str) else None,
            meta.get("progressToken") if isinstance(meta, dict) else None,
            params.get("cursor") is None,
            meta,
            time.monotonic() + self._timeout if message.method in _TIMED else math.inf,
        )

    def forget(self, request_id: Id) -> None:
        """Remove a request that was not sent."""
        self._pending.pop(request_id, None)

    def pop(self, request_id: Id) -> PendingRequest | None:
        """Remove and return the request of a response. None if it is a second response, or comes after ours."""
        pending = self._pending.pop(request_id, None)
        return self._late.pop(request_id, None) if pending is None else pending

    def task_started(self, task_id: str, tool: str | None) -> None:
        """Note that a call continues as a task, whose result the client requests later."""
        _keep(self._jobs, task_id, tool)

    def cancelled(self, request_id: Id) -> None:
        """Note that the client cancelled a request. A response may still come."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            _keep(self._late, request_id, pending)

    def give_up(self, request_id: Id | None) -> list[Id]:
        """Remove this request, or all for None. Return the ids for which the caller must send an error."""
        ids = [one for one in self._pending if request_id is None or one == request_id]
        for one in ids:
            del self._pending[one]
            if request_id is None:  # their responses may still come
                _keep(self._late, one, None)
        return ids

    def server_asks(self, request_id: Id) -> None:
        """Pause all timeouts: the upstream server waits for the client."""
        self._asked.add(request_id)

    def client_answered(self, request_id: Id) -> None:
        self._asked.discard(request_id)

    def progressed(self, token: object) -> None:
        """Restart the timeout of the request with this progress token."""
        for pending in self._pending.values():
            if token is not None and pending.token == token:
                pending.until = time.monotonic() + self._timeout

    def expired(self) -> Iterator[tuple[Id, PendingRequest]]:
        """Yield the requests that timed out. The caller must send an error for each."""
        now = time.monotonic()
        if self._asked:
            for pending in self._pending.values():
                pending.until = max(pending.until, now + self._timeout)
        for request_id in [one for one, pending in self._pending.items() if pending.until <= now]:
            late = self._pending.pop(request_id, None)  # it may have been answered meanwhile
            if late is not None:
                _keep(self._late, request_id, None)
                yield request_id, late


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)
