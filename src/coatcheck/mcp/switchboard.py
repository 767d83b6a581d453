"""Several servers that look like one: what a client asks goes to the server that has it, and answers come back.

To the relay this is one more upstream. Lists are merged, names get their server's before them only where they clash.
The handshake is made with each server apart, so this speaks the versions of the protocol that have one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine, Iterable, Mapping
from typing import Any, Final

from coatcheck.errors import CoatcheckError, UpstreamFailed
from coatcheck.mcp import merging
from coatcheck.mcp.directory import ASK, LISTS, Directory
from coatcheck.mcp.member import Member, new_id
from coatcheck.mcp.stdio import say
from coatcheck.mcp.upstreams import Sink, Upstream
from coatcheck.mcp.wire import Id, Message, encode, failure, id_of, response, rewritten

_START: Final = 60.0  # seconds in which a server must have answered the handshake,
PATIENCE: Final = 20.0  # and no more than these once another has: a client waits for all of them
_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_METHOD_NOT_FOUND: Final = -32601
_INVALID_PARAMS: Final = -32602
_RESOURCE_NOT_FOUND: Final = -32002
_BY_NAME: Final = {"tools/call": "tools/list", "prompts/get": "prompts/list"}
_BY_URI: Final = ("resources/read", "resources/subscribe", "resources/unsubscribe")


class Switchboard:
    """An upstream of upstreams, by name. `patience` is how long the others wait for one that does not begin."""

    def __init__(self, servers: Mapping[str, Upstream], *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._members = {name: Member(name, upstream, self) for name, upstream in servers.items()}
        self._directory = Directory(self._members)
        self._sink: Sink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[Id, asyncio.Task[None]] = {}  # requests of the client that are still with us,
        self._at: dict[Id, Member] = {}  # whom we ask for them just now,
        self._owners: dict[Id, Member] = {}  # and those that were handed on, until they are answered
        self._asking: dict[Id, tuple[Member, Id, object]] = {}  # of servers, under our ids: theirs, and progress token

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        members = list(self._members.values())
        done = await asyncio.gather(*(one.upstream.start(one) for one in members), return_exceptions=True)
        for member, error in zip(members, done, strict=True):
            if isinstance(error, UpstreamFailed):
                self._drop(member, error)
            elif isinstance(error, BaseException):
                raise error
        if not self._directory.live():
            raise UpstreamFailed("none of the servers could be started", hint="see above for each")

    async def finish(self) -> None:
        for member in self._directory.live():
            await member.upstream.finish()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.upstream.close() for one in self._members.values()), return_exceptions=True)

    # From the client

    async def send(self, message: Message) -> None:
        if message.is_response:
            await self._answered_by_client(message)
        elif "method" in message.body and "id" not in message.body:
            await self._notified(message)
        elif message.method is None or message.id is None:
            code, said = (_INVALID_REQUEST, "Invalid Request") if message.body else (_PARSE_ERROR, "Parse error")
            await self._to.message(_error(None, code, said))
        elif message.method == "ping":
            await self._to.message(response(message.id, {}))
        else:
            self._start(message.id, self._asked(message))

    async def _asked(self, message: Message) -> None:
        method, params = message.method or "", message.params
        if method == "initialize":
            await self._initialize(message)
        elif method == "server/discover":
            await self._to.message(_error(message.id, _METHOD_NOT_FOUND, "Method not found"))
        elif method in LISTS:
            await self._to.message(response(message.id, {LISTS[method][1]: await self._directory.listed(method)}))
        elif method in _BY_NAME:
            await self._by_name(message, _BY_NAME[method], str(params.get("name")))
        elif method in _BY_URI:
            members = await self._directory.candidates(str(params.get("uri")))
            await self._first(message, members, (_RESOURCE_NOT_FOUND, _INVALID_PARAMS))
        elif method == "completion/complete":
            await self._complete(message)
        elif method == "logging/setLevel":
            await self._everywhere(message, "logging")
        elif method.startswith("tasks/"):
            await self._first(message, self._directory.able("tasks"), (_INVALID_PARAMS, _METHOD_NOT_FOUND))
        else:
            await self._first(message, self._directory.live(), (_METHOD_NOT_FOUND,))

    async def _initialize(self, message: Message) -> None:
        results: dict[str, Mapping[str, Any]] = {}
        for member, answer in (await self._begun(message.params)).items():
            result = answer.body.get("result") if isinstance(answer, Message) else None
            if isinstance(result, dict):
                results[member.name] = result
                capabilities = result.get("capabilities")
                member.capabilities = capabilities if isinstance(capabilities, dict) else {}
            else:
                refused = UpstreamFailed(f"{member.name} refuses to begin")
                self._drop(member, answer if isinstance(answer, UpstreamFailed) else refused)
                await member.upstream.close()
        if not results:
            raise UpstreamFailed("none of the servers could be started", hint="see above for each")
        merged = merging.initialized(results, str(message.params.get("protocolVersion")))
        await self._to.message(response(message.id, merged))

    async def _begun(self, params: Mapping[str, Any]) -> dict[Member, Message | BaseException]:
        """What each server answers to the handshake, or why it does not."""
        tasks = {one: asyncio.create_task(one.ask("initialize", params, _START)) for one in self._directory.live()}
        waiting = set(tasks.values())
        try:
            while waiting and not any(one.done() and one.exception() is None for one in tasks.values()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=self._patience)
        finally:
            for task in tasks.values():
                task.cancel()
        late = UpstreamFailed("no answer to the handshake, and the others cannot wait", hint="start it by itself")
        done = await asyncio.gather(*tasks.values(), return_exceptions=True)
        answers = [late if isinstance(one, asyncio.CancelledError) else one for one in done]
        return dict(zip(tasks, answers, strict=True))

    async def _by_name(self, message: Message, listing: str, name: str) -> None:
        found = await self._directory.named(listing, name)
        if found is None:
            await self._to.message(_error(message.id, _INVALID_PARAMS, f"none of the servers has {name[:80]!r}"))
            return
        member, own = found
        if own != name:
            message = rewritten(message, params={**message.params, "name": own})
        await self._forward(member, message)

    async def _complete(self, message: Message) -> None:
        ref = message.params.get("ref")
        if isinstance(ref, dict) and ref.get("type") == "ref/prompt":
            found = await self._directory.named("prompts/list", str(ref.get("name")))
            if found is not None:
                params = {**message.params, "ref": {**ref, "name": found[1]}}
                await self._forward(found[0], rewritten(message, params=params))
                return
        elif isinstance(ref, dict) and isinstance(ref.get("uri"), str):
            member = await self._directory.completing(ref["uri"])
            if member is not None:
                await self._forward(member, message)
                return
        await self._to.message(_error(message.id, _INVALID_PARAMS, "none of the servers completes this"))

    async def _everywhere(self, message: Message, capability: str) -> None:
        """To all who can do it. Where none of them would, the first says why."""
        asked = [one.ask(message.method or "", message.params, ASK) for one in self._directory.able(capability)]
        done = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Message)]
        refused = [one for one in done if "error" in one.body]
        if not asked:
            await self._to.message(_error(message.id, _METHOD_NOT_FOUND, "Method not found"))
        elif refused and len(refused) == len(done):
            await self._to.message(rewritten(refused[0], id=message.id))
        else:
            await self._to.message(response(message.id, {}))

    async def _first(self, message: Message, members: Iterable[Member], passing: Collection[int]) -> None:
        """The answer of the first server that has one, for as long as that takes; `passing` are errors of those that do
        not have it."""
        assert message.id is not None
        refused: Message | None = None
        for member in members:
            self._at[message.id] = member
            answer = await member.answer(message)
            if (code := _code(answer)) not in passing:
                await self._to.message(answer)
                return
            if refused is None or _code(refused) == _METHOD_NOT_FOUND != code:
                refused = answer
        await self._to.message(refused or _error(message.id, _METHOD_NOT_FOUND, "none of the servers has this"))

    async def _forward(self, member: Member, message: Message) -> None:
        assert message.id is not None
        self._owners[message.id] = member
        try:
            await member.send(message)
        except UpstreamFailed:
            del self._owners[message.id]
            raise

    async def _notified(self, message: Message) -> None:
        """A notification goes to whom it concerns, else to all."""
        params = message.params
        if message.method == "notifications/cancelled":
            await self._cancelled(message, id_of(params.get("requestId")))
        elif message.method == "notifications/progress":
            found = self._asking.get(str(params.get("progressToken")))
            if found is not None:
                await found[0].send(rewritten(message, params={**params, "progressToken": found[2]}))
        else:
            for member in self._directory.live():
                with contextlib.suppress(UpstreamFailed):
                    await member.send(message)

    async def _cancelled(self, message: Message, request_id: Id | None) -> None:
        """What is still with us ends here; the server that has it is told. Its answer is nobody's any more."""
        if request_id is None:
            return
        member = self._at.get(request_id) or self._owners.pop(request_id, None)
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()
        if member is not None:
            await member.send(message)

    async def _answered_by_client(self, message: Message) -> None:
        found = self._asking.pop(message.id, None) if message.id is not None else None
        if found is not None:
            await found[0].send(rewritten(message, id=found[1]))

    # From the servers

    async def from_server(self, member: Member, message: Message) -> None:
        if message.is_response:
            if message.id is not None and self._owners.get(message.id) is member:
                del self._owners[message.id]
                await self._to.message(message)
            return
        if message.is_request and message.id is not None:
            await self._to.message(self._as_ours(member, message, message.id))
            return
        if message.method == "notifications/cancelled":
            own = message.params.get("requestId")
            ours = next((ours for ours, asked in self._asking.items() if asked[:2] == (member, own)), None)
            if ours is not None:
                del self._asking[ours]
                await self._to.message(rewritten(message, params={**message.params, "requestId": ours}))
            return
        if message.method == "notifications/resources/list_changed":
            self._directory.changed()
        await self._to.message(message)

    def _as_ours(self, member: Member, message: Message, theirs: Id) -> Message:
        """A server's request under an id, and with a progress token, that no other server's has."""
        ours, params = new_id(), message.params
        meta = params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        self._asking[ours] = (member, theirs, token)
        if token is None:
            return rewritten(message, id=ours)
        return rewritten(message, id=ours, params={**params, "_meta": {**params["_meta"], "progressToken": ours}})

    async def unanswered(self, member: Member, request_id: Id | None, error: UpstreamFailed) -> None:
        theirs = [one for one, owner in self._owners.items() if owner is member]
        for one in theirs if request_id is None else [one for one in theirs if one == request_id]:
            if self._owners.pop(one, None) is not None:
                await self._to.unanswered(one, error)

    async def lost(self, member: Member, error: UpstreamFailed) -> None:
        """A server that ends takes along what it has asked and listed, and the client is told of both."""
        self._drop(member, error)
        if not self._directory.live():
            await self._to.ended(error)
            return
        for ours in [ours for ours, asked in self._asking.items() if asked[0] is member]:
            del self._asking[ours]
            await self._tell("notifications/cancelled", {"requestId": ours, "reason": str(error)})
        for what in merging.LISTED:
            if what in member.capabilities:
                await self._tell(f"notifications/{what}/list_changed")
        self._directory.changed()

    async def _tell(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        body = {"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})}
        await self._to.message(rewritten(Message(b"", body)))

    def _drop(self, member: Member, error: UpstreamFailed) -> None:
        member.lost = error
        say(f"{member.name}: {error}")

    @property
    def _to(self) -> Sink:
        assert self._sink is not None
        return self._sink

    def _start(self, request_id: Id, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except UpstreamFailed as error:
                await self._to.message(failure(request_id, error))
            except Exception as error:  # noqa: BLE001 - whatever is wrong here: a request is answered
                say(f"a request could not be passed on: {error!r}")
                await self._to.message(failure(request_id, CoatcheckError("the proxy could not pass the request on")))
            finally:
                self._at.pop(request_id, None)
                if self._running.get(request_id) is task:
                    del self._running[request_id]

        task = asyncio.create_task(guarded())
        self._running[request_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _code(answer: Message) -> object:
    error = answer.body.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _error(request_id: Id | None, code: int, said: str) -> Message:
    body = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": said}}
    return Message(encode(body), body)
