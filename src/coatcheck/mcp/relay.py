"""The relay: between one client and what stands behind it, message by message, both ways.

Requests, answers and notifications pass as the bytes they came in, with the ids that they had, but for what `Changes`
changes. Slow work (storing, reading, resolving) is done in threads, so that nothing waits for it but its own request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from coatcheck.errors import CoatcheckError, UpstreamFailed
from coatcheck.mcp.changes import Changes
from coatcheck.mcp.stdio import say
from coatcheck.mcp.upstreams import Upstream
from coatcheck.mcp.waiting import Pending, Waiting
from coatcheck.mcp.wire import Id, Message, Raw, Unread, failure, id_of, parse, response, rewritten

TIMEOUT: Final = 600.0
_LOOK: Final = 1.0  # seconds between looks at the clock
_POINTER: Final = b"art:"
_ASK: Final = 10.0
_PAGES: Final = 1_000
_METHOD_NOT_FOUND: Final = -32601
_HEAVY: Final = 1 << 20
_SAYS_WHAT_IT_CAN: Final = ("initialize", "server/discover")
_CALLS: Final = ("tools/call", "tasks/result")

Send = Callable[[Raw], Awaitable[None]]


class Relay:
    """Give it what the client sends; it is a sink for what the other server sends."""

    def __init__(self, upstream: Upstream, changes: Changes, to_client: Send, *, timeout: float = TIMEOUT) -> None:
        self._upstream = upstream
        self._changes = changes
        self._to_client = to_client
        self._timeout = timeout
        self._waiting = Waiting(timeout)
        self._own: dict[Id, asyncio.Future[dict[str, Any]]] = {}  # what we want to know ourselves
        self._mark = f"coatcheck-{secrets.token_hex(6)}-"  # before our own ids: no client has such
        self._numbers = itertools.count(1)
        self._listing = asyncio.Lock()
        self._running: dict[Id, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_tools = True
        self.over: asyncio.Future[UpstreamFailed] = asyncio.get_running_loop().create_future()
        self.is_ending = False  # from the moment that the other server ended, before anybody was told

    # From the client

    async def from_client(self, raw: Raw) -> None:
        messages = parse(raw)
        if not messages and raw.strip():
            messages = [Message(raw, {})]  # the other server says best what is wrong with it
        for message in messages:
            try:
                await self._route(message)
            except UpstreamFailed as error:
                await self._unsent(message, error)
            except Exception as error:  # noqa: BLE001 - one odd message is not the end of all others
                say(f"a message could not be passed on: {error!r}")
                await self._unsent(message, CoatcheckError("the proxy could not pass the message on"))

    async def too_large(self, line: Unread, error: UpstreamFailed) -> None:
        """A message of the client that cannot be passed on: who waits for it is told, client or other server."""
        if line.method is None and line.id is not None:
            with contextlib.suppress(UpstreamFailed):
                await self._route(failure(line.id, error))
        elif line.method is None or line.id is not None:
            await self._send(failure(line.id, error))
        else:
            say(str(error))

    async def _route(self, message: Message) -> None:
        if message.is_response and message.id is not None:
            self._waiting.told(message.id)
        elif message.method == "notifications/cancelled" and self._cancelled(message.params.get("requestId")):
            return
        if not message.is_request or message.id is None:
            await self._upstream.send(message)
            return
        params = message.params
        if message.method == "tools/call" and self._is_work(message):
            self._start(message.id, self._call(message))
            return
        if message.method == "tools/list" and not self._has_tools:
            await self._send(response(message.id, self._changes.only_ours(params.get("_meta"))))
            return
        await self._forward(message)

    async def _forward(self, message: Message) -> None:
        assert message.id is not None
        self._waiting.begin(message)
        try:
            await self._upstream.send(message)
        except UpstreamFailed:
            self._waiting.forget(message.id)
            raise

    def _is_work(self, message: Message) -> bool:
        """Whether a call takes more than passing it on."""
        is_unlisted = self._has_tools and not self._changes.is_listed
        return is_unlisted or self._changes.is_ours(message.params.get("name")) or _POINTER in message.raw

    async def _call(self, message: Message) -> None:
        if self._has_tools and not self._changes.is_listed:
            async with self._listing:  # a client that knows the tools from before: we do not, and ask first
                if not self._changes.is_listed:
                    await self._list(message.params.get("_meta"))
        try:
            if self._changes.is_ours(message.params.get("name")):
                await self._answer(message)
            elif _POINTER in message.raw and isinstance(message.params.get("arguments"), dict):
                await self._resolve(message)
            else:
                await self._forward(message)
        except UpstreamFailed as error:
            await self._unsent(message, error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong here: a request is answered
            say(f"a call could not be passed on: {error!r}")
            await self._unsent(message, CoatcheckError("the proxy could not pass the call on"))

    async def _list(self, meta: object) -> None:
        """List the other server's tools for ourselves. One that does not answer is left unlisted."""
        kept = {key: value for key, value in meta.items() if key != "progressToken"} if isinstance(meta, dict) else {}
        cursors: list[object] = [None]
        while len(cursors) <= _PAGES:
            params = {**({"_meta": kept} if kept else {}), **({"cursor": cursors[-1]} if cursors[-1] else {})}
            request_id = f"{self._mark}{next(self._numbers)}"
            body = {"jsonrpc": "2.0", "id": request_id, "method": "tools/list", "params": params}
            answer = self._own[request_id] = asyncio.get_running_loop().create_future()
            try:
                await self._upstream.send(rewritten(Message(b"", body)))
                result = await asyncio.wait_for(answer, _ASK)
            except (UpstreamFailed, TimeoutError):
                break
            finally:
                self._own.pop(request_id, None)
            self._changes.listed(result, first=len(cursors) == 1)
            following = result.get("nextCursor")
            if not following or following in cursors:
                break
            cursors.append(following)
        self._changes.is_listed = True

    async def _answer(self, message: Message) -> None:
        """One of the tools that were added."""
        params = message.params
        result = await asyncio.to_thread(
            self._changes.answer, str(params.get("name")), params.get("arguments"), params.get("_meta")
        )
        await self._send(response(message.id, result))

    async def _resolve(self, message: Message) -> None:
        """A call with what looks like a pointer in it."""
        params, arguments = message.params, message.params["arguments"]
        try:
            resolved = await asyncio.to_thread(self._changes.arguments, str(params.get("name")), arguments)
        except CoatcheckError as error:
            await self._send(response(message.id, self._changes.refusal(f"[error: {error}]", params.get("_meta"))))
            return
        if resolved != arguments:
            message = rewritten(message, params={**params, "arguments": resolved})
        await self._forward(message)

    def _cancelled(self, request_id: object) -> bool:
        """Whether what is cancelled was still with us, and the other server need not know of it."""
        found = id_of(request_id)
        if found is None:
            return False
        task = self._running.get(found)
        if task is not None and task.cancel():
            return True
        self._waiting.cancelled(found)
        return False

    async def _unsent(self, message: Message, error: CoatcheckError) -> None:
        if message.is_request:
            await self._send(failure(message.id, error))

    # From the other server

    async def message(self, message: Message) -> None:
        try:
            await self._came(message)
        except Exception as error:  # noqa: BLE001 - who reads for us must read on, and what we do not understand passes
            say(f"a message passes unchanged: {error!r}")
            await self._send(message)

    async def _came(self, message: Message) -> None:
        if message.is_response and message.id is not None:
            await self._response(message, message.id)
            return
        if message.is_request and message.id is not None:
            self._waiting.asked(message.id)
        elif message.method == "notifications/progress":
            self._waiting.progressed(message.params.get("progressToken"))
        elif message.method == "notifications/cancelled":
            request_id = id_of(message.params.get("requestId"))
            if request_id is not None:
                self._waiting.told(request_id)
        await self._send(message)

    async def _response(self, message: Message, request_id: Id) -> None:
        if isinstance(request_id, str) and request_id.startswith(self._mark):
            answer, result = self._own.get(request_id), message.body.get("result")
            if answer is not None and not answer.done():
                answer.set_result(result if isinstance(result, dict) else {})
            return
        is_wanted, pending = self._waiting.answered(request_id)
        if pending is not None:
            await self._answered(pending, message)
        elif is_wanted:
            await self._send(message)

    async def _answered(self, pending: Pending, message: Message) -> None:
        result = message.body.get("result")
        if pending.method == "tools/list" and _is_unknown_method(message):
            message = response(message.id, self._changes.only_ours(pending.meta))
        if not isinstance(result, dict):
            await self._send(message)
            return
        task = result.get("task")
        if pending.method == "tools/call" and isinstance(task, dict):
            self._waiting.runs(str(task.get("taskId")), pending.tool)
        if pending.method in _SAYS_WHAT_IT_CAN:
            capabilities = result.get("capabilities")
            self._has_tools = not isinstance(capabilities, dict) or isinstance(capabilities.get("tools"), dict)
            await self._send(_with_result(message, self._changes.capable(result)))
        elif pending.method == "tools/list":
            await self._send(_with_result(message, self._changes.listed(result, first=pending.first)))
        elif pending.method in _CALLS and not self._changes.is_small(pending.tool, len(message.raw)):
            await self._slim(message, lambda: self._changes.called(pending.tool, str(message.id), result))
        elif pending.method == "resources/read" and not self._changes.is_small(None, len(message.raw)):
            await self._slim(message, lambda: self._changes.read(str(message.id), result))
        else:
            await self._send(message)

    async def _slim(self, message: Message, change: Callable[[], dict[str, Any]]) -> None:
        """Let a result be stored beside everything else. While a large one is, its server is not read on, so that
        memory is bounded."""
        task = self._start(None, self._slimmed(message, change))
        if len(message.raw) >= _HEAVY:
            await asyncio.wait({task})

    async def _slimmed(self, message: Message, change: Callable[[], dict[str, Any]]) -> None:
        try:
            message = _with_result(message, await asyncio.to_thread(change))
        except Exception as error:  # noqa: BLE001 - whatever is wrong here: a request is answered
            say(f"a result could not be passed on: {error!r}")
            message = failure(message.id, CoatcheckError("the proxy could not pass the result on"))
        await self._send(message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        """One request that will get no answer; all of them where nobody knows which."""
        for asked, answer in self._own.items():
            if request_id in (None, asked) and not answer.done():
                answer.set_result({})
        for one in self._waiting.given_up(request_id):
            await self._send(failure(one, error))

    async def ended(self, error: UpstreamFailed) -> None:
        self.is_ending = True
        await self.unanswered(None, error)
        if not self.over.done():
            self.over.set_result(error)

    # The clock

    async def watch(self) -> None:
        """Give up on what is not answered in time. Time does not run while the other server waits for the client, and
        begins anew with each sign of progress."""
        while self._timeout > 0:
            await asyncio.sleep(min(_LOOK, self._timeout))
            for request_id, pending in self._waiting.overdue():
                said = f"no answer to {pending.method} in {self._timeout:g} seconds"
                await self._send(failure(request_id, UpstreamFailed(said, hint="try once more, or raise --timeout")))
                if pending.method != "initialize":
                    await self._tell_cancelled(request_id)

    async def _tell_cancelled(self, request_id: Id) -> None:
        params = {"requestId": request_id, "reason": "no answer in time"}
        body = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        with contextlib.suppress(UpstreamFailed):
            await self._upstream.send(rewritten(Message(b"", body)))

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
                say(f"a message was lost: {error!r}")

        task.add_done_callback(done)
        return task

    async def settle(self, seconds: float) -> None:
        """Wait for what is under way, but not for long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    async def _send(self, message: Message) -> None:
        await self._to_client(message.raw)


def _with_result(message: Message, result: dict[str, Any]) -> Message:
    return message if result is message.body.get("result") else rewritten(message, result=result)


def _is_unknown_method(message: Message) -> bool:
    error = message.body.get("error")
    return isinstance(error, dict) and error.get("code") == _METHOD_NOT_FOUND
