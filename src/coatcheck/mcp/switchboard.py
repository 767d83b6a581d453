"""Several servers that look like one: what a client asks goes to the server that has it, and answers come back.

To the relay this is one more upstream. Lists are merged, names get their server's before them only where they clash.
The handshake is made with each server apart, so this speaks the versions of the protocol that have one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp import merging
from coatcheck.mcp.stdio import say
from coatcheck.mcp.upstreams import Sink, Upstream
from coatcheck.mcp.wire import Id, Message, encode, failure, response, rewritten

_START: Final = 60.0  # seconds in which a server must have answered the handshake
_ASK: Final = 60.0
_PAGES: Final = 1_000
_METHOD_NOT_FOUND: Final = -32601
_INVALID_PARAMS: Final = -32602
_LISTS: Final = {
    "tools/list": ("tools", "tools", "name"),
    "prompts/list": ("prompts", "prompts", "name"),
    "resources/list": ("resources", "resources", "uri"),
    "resources/templates/list": ("resources", "resourceTemplates", "uriTemplate"),
}
_BY_NAME: Final = {"tools/call": "tools/list", "prompts/get": "prompts/list"}
_BY_URI: Final = ("resources/read", "resources/subscribe", "resources/unsubscribe")


class _Line:
    """One server: the sink for what it sends, and the questions that we ask it ourselves."""

    def __init__(self, name: str, upstream: Upstream, board: Switchboard) -> None:
        self.name = name
        self.upstream = upstream
        self.lost: UpstreamFailed | None = None
        self.capabilities: Mapping[str, Any] = {}
        self._board = board
        self._asked: dict[Id, asyncio.Future[Message]] = {}

    async def ask(self, method: str, params: Mapping[str, Any] | None, seconds: float = _ASK) -> Message:
        """A question of our own. Raises `UpstreamFailed`."""
        request_id = f"coatcheck-{next(self._board.numbers)}"
        body = {"jsonrpc": "2.0", "id": request_id, "method": method, **({"params": params} if params else {})}
        answer = self._asked[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.send(Message(encode(body), body))
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise UpstreamFailed(f"{self.name} did not answer {method} in {seconds:g} seconds") from None
        finally:
            self._asked.pop(request_id, None)

    async def send(self, message: Message) -> None:
        if self.lost is not None:
            raise self.lost
        await self.upstream.send(message)

    async def message(self, message: Message) -> None:
        answer = self._asked.get(message.id) if message.is_response and message.id is not None else None
        if answer is not None:
            if not answer.done():
                answer.set_result(message)
        else:
            await self._board.from_server(self, message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        for one in [request_id] if request_id is not None else list(self._asked):
            answer = self._asked.get(one)
            if answer is not None and not answer.done():
                answer.set_exception(error)
        await self._board.unanswered(self, request_id, error)

    async def ended(self, error: UpstreamFailed) -> None:
        self.lost = error
        await self.unanswered(None, error)
        await self._board.lost(self, error)


class Switchboard:
    """An upstream of upstreams, by name."""

    def __init__(self, servers: Mapping[str, Upstream]) -> None:
        self._lines = {name: _Line(name, upstream, self) for name, upstream in servers.items()}
        self._sink: Sink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners: dict[Id, _Line] = {}  # requests of the client, until they are answered
        self._asking: dict[Id, tuple[_Line, Id]] = {}  # requests of servers, under the ids that the client sees
        self._tokens: dict[str, tuple[_Line, object]] = {}  # progress tokens of servers, likewise
        self._names: dict[str, dict[str, tuple[str, str]]] = {}
        self._addresses: dict[str, dict[str, str]] = {}
        self.numbers = itertools.count(1)

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        lines = list(self._lines.values())
        done = await asyncio.gather(*(line.upstream.start(line) for line in lines), return_exceptions=True)
        for line, error in zip(lines, done, strict=True):
            if isinstance(error, UpstreamFailed):
                self._drop(line, error)
            elif isinstance(error, BaseException):
                raise error
        if not self._live():
            raise UpstreamFailed("none of the servers could be started", hint="see above for each")

    async def finish(self) -> None:
        for line in self._live():
            await line.upstream.finish()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(line.upstream.close() for line in self._lines.values()), return_exceptions=True)

    # From the client

    async def send(self, message: Message) -> None:
        if message.is_response:
            await self._answered_by_client(message)
        elif not message.is_request or message.id is None:
            await self._notified(message)
        elif message.method == "ping":
            await self._to.message(response(message.id, {}))
        else:
            self._start(message, self._asked(message))

    async def _asked(self, message: Message) -> None:
        method, params = message.method or "", message.params
        if method == "initialize":
            await self._initialize(message)
        elif method == "server/discover":
            await self._to.message(_error(message.id, _METHOD_NOT_FOUND, "Method not found"))
        elif method in _LISTS:
            await self._to.message(response(message.id, {_LISTS[method][1]: await self._listed(method)}))
        elif method in _BY_NAME:
            await self._by_name(message, _BY_NAME[method], str(params.get("name")))
        elif method in _BY_URI:
            await self._forward(await self._line_of(str(params.get("uri"))), message)
        elif method == "completion/complete":
            await self._complete(message)
        elif method == "logging/setLevel":
            await self._everywhere(message, "logging")
        else:
            await self._anywhere(message)

    async def _initialize(self, message: Message) -> None:
        lines = self._live()
        done = await asyncio.gather(
            *(line.ask("initialize", message.params, _START) for line in lines), return_exceptions=True
        )
        results: dict[str, Mapping[str, Any]] = {}
        for line, answer in zip(lines, done, strict=True):
            result = answer.body.get("result") if isinstance(answer, Message) else None
            if isinstance(result, dict):
                results[line.name] = result
                capabilities = result.get("capabilities")
                line.capabilities = capabilities if isinstance(capabilities, dict) else {}
            else:
                said = answer if isinstance(answer, UpstreamFailed) else UpstreamFailed(f"{line.name} refuses to begin")
                self._drop(line, said)
                await line.upstream.close()
        if not results:
            raise UpstreamFailed("none of the servers could be started", hint="see above for each")
        merged = merging.initialized(results, str(message.params.get("protocolVersion")))
        await self._to.message(response(message.id, merged))

    async def _listed(self, method: str) -> list[dict[str, Any]]:
        """What all servers list. One that does not answer is left out: the others are still there."""
        capability, field, key = _LISTS[method]
        lines = [line for line in self._live() if capability in line.capabilities]
        pages = await asyncio.gather(*(self._pages(line, method, field) for line in lines))
        listed = {line.name: found for line, found in zip(lines, pages, strict=True)}
        if key == "name":
            self._names[method] = merging.named(listed)
            return merging.shown(listed, self._names[method])
        self._addresses[method] = merging.addressed(listed, key)
        return merging.distinct(listed, key)

    async def _pages(self, line: _Line, method: str, field: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: object = None
        for _ in range(_PAGES):
            try:
                answer = await line.ask(method, None if cursor is None else {"cursor": cursor})
            except UpstreamFailed as error:
                say(str(error))
                break
            result = answer.body.get("result")
            entries = result.get(field) if isinstance(result, dict) else None
            found += [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
            cursor = result.get("nextCursor") if isinstance(result, dict) else None
            if cursor is None:
                break
        return found

    async def _by_name(self, message: Message, listing: str, name: str) -> None:
        if name not in self._names.get(listing, {}):
            await self._listed(listing)
        found = self._names[listing].get(name)
        if found is None:
            await self._to.message(_error(message.id, _INVALID_PARAMS, f"none of the servers has {name[:80]!r}"))
            return
        server, own = found
        if own != name:
            message = rewritten(message, params={**message.params, "name": own})
        await self._forward(self._lines[server], message)

    async def _line_of(self, uri: str) -> _Line:
        """The server that lists an address, or has a template for it; else the first that has resources at all."""
        for method in ("resources/list", "resources/templates/list"):
            if method not in self._addresses:
                await self._listed(method)
        server = self._addresses["resources/list"].get(uri)
        if server is None:
            fitting = [one for one in self._addresses["resources/templates/list"] if merging.fits(one, uri)]
            template = max(fitting, key=len, default=None)
            server = self._addresses["resources/templates/list"][template] if template is not None else None
        if server is not None:
            return self._lines[server]
        for line in self._live():
            if "resources" in line.capabilities:
                return line
        raise UpstreamFailed("none of the servers has resources", hint="")

    async def _complete(self, message: Message) -> None:
        ref = message.params.get("ref")
        if isinstance(ref, dict) and ref.get("type") == "ref/prompt":
            name = str(ref.get("name"))
            if name not in self._names.get("prompts/list", {}):
                await self._listed("prompts/list")
            found = self._names["prompts/list"].get(name)
            if found is not None:
                params = {**message.params, "ref": {**ref, "name": found[1]}}
                await self._forward(self._lines[found[0]], rewritten(message, params=params))
                return
        elif isinstance(ref, dict) and isinstance(ref.get("uri"), str):
            if "resources/templates/list" not in self._addresses:
                await self._listed("resources/templates/list")
            server = self._addresses["resources/templates/list"].get(ref["uri"])
            await self._forward(self._lines[server] if server else await self._line_of(ref["uri"]), message)
            return
        await self._to.message(_error(message.id, _INVALID_PARAMS, "none of the servers completes this"))

    async def _everywhere(self, message: Message, capability: str) -> None:
        lines = [line for line in self._live() if capability in line.capabilities]
        await asyncio.gather(
            *(line.ask(message.method or "", message.params) for line in lines), return_exceptions=True
        )
        await self._to.message(response(message.id, {}))

    async def _anywhere(self, message: Message) -> None:
        """A method that we do not know: the first server that does has the answer."""
        answer = None
        for line in self._live():
            answer = await line.ask(message.method or "", message.params)
            error = answer.body.get("error")
            if not isinstance(error, dict) or error.get("code") != _METHOD_NOT_FOUND:
                break
        if answer is None:
            raise UpstreamFailed("none of the servers runs any more")
        await self._to.message(rewritten(answer, id=message.id))

    async def _forward(self, line: _Line, message: Message) -> None:
        assert message.id is not None
        self._owners[message.id] = line
        try:
            await line.send(message)
        except UpstreamFailed:
            del self._owners[message.id]
            raise

    async def _notified(self, message: Message) -> None:
        """A notification goes to whom it concerns, else to all."""
        params = message.params
        if message.method == "notifications/cancelled":
            request_id = params.get("requestId")
            line = self._owners.get(request_id) if isinstance(request_id, str | int) else None
            if line is not None:
                await line.send(message)
            return
        if message.method == "notifications/progress":
            found = self._tokens.get(str(params.get("progressToken")))
            if found is not None:
                await found[0].send(rewritten(message, params={**params, "progressToken": found[1]}))
            return
        for line in self._live():
            with contextlib.suppress(UpstreamFailed):
                await line.send(message)

    async def _answered_by_client(self, message: Message) -> None:
        found = self._asking.pop(message.id, None) if message.id is not None else None
        if found is not None:
            line, own = found
            self._tokens.pop(str(message.id), None)
            await line.send(rewritten(message, id=own))

    # From the servers

    async def from_server(self, line: _Line, message: Message) -> None:
        if message.is_response:
            if message.id is not None and self._owners.get(message.id) is line:
                del self._owners[message.id]
                await self._to.message(message)
            return
        if message.is_request and message.id is not None:
            await self._to.message(self._as_ours(line, message))
            return
        if message.method == "notifications/cancelled":
            own = message.params.get("requestId")
            ours = next((ours for ours, owner in self._asking.items() if owner == (line, own)), None)
            if ours is not None:
                await self._to.message(rewritten(message, params={**message.params, "requestId": ours}))
            return
        await self._to.message(message)

    def _as_ours(self, line: _Line, message: Message) -> Message:
        """A server's request under an id, and with a progress token, that no other server's has."""
        assert message.id is not None
        ours = f"coatcheck-{next(self.numbers)}"
        self._asking[ours] = (line, message.id)
        meta = message.params.get("_meta")
        if not isinstance(meta, dict) or "progressToken" not in meta:
            return rewritten(message, id=ours)
        self._tokens[ours] = (line, meta["progressToken"])
        params = {**message.params, "_meta": {**meta, "progressToken": ours}}
        return rewritten(message, id=ours, params=params)

    async def unanswered(self, line: _Line, request_id: Id | None, error: UpstreamFailed) -> None:
        theirs = [one for one, owner in self._owners.items() if owner is line]
        for one in theirs if request_id is None else [request_id]:
            if self._owners.pop(one, None) is not None:
                await self._to.unanswered(one, error)

    async def lost(self, line: _Line, error: UpstreamFailed) -> None:
        self._drop(line, error)
        if not self._live():
            await self._to.ended(error)

    def _drop(self, line: _Line, error: UpstreamFailed) -> None:
        line.lost = error
        self._asking = {ours: owner for ours, owner in self._asking.items() if owner[0] is not line}
        say(f"{line.name}: {error}")

    def _live(self) -> list[_Line]:
        return [line for line in self._lines.values() if line.lost is None]

    @property
    def _to(self) -> Sink:
        assert self._sink is not None
        return self._sink

    def _start(self, message: Message, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except UpstreamFailed as error:
                await self._to.message(failure(message.id, error))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error(request_id: Id | None, code: int, said: str) -> Message:
    body = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": said}}
    return Message(encode(body), body)
