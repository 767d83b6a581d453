"""Several servers that look like one upstream server. Each request goes to the server that offers what it names.

Lists are merged. A name gets the prefix of its server only if two servers use it. The handshake is made with each
server separately, so only versions of the protocol with a handshake are supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from coatcheck import __version__
from coatcheck.errors import CoatcheckError, UpstreamFailed
from coatcheck.ids import clip
from coatcheck.mcp.wire import (
    Id,
    Message,
    Sink,
    Upstream,
    error_response,
    failure,
    id_of,
    log,
    notification,
    request,
    response,
    rewritten,
)

Listed = Mapping[str, Sequence[Mapping[str, Any]]]
"""The entries that each server lists, by the name of the server."""

LISTS: Final = {
    "tools/list": ("tools", "tools", "name"),
    "prompts/list": ("prompts", "prompts", "name"),
    "resources/list": ("resources", "resources", "uri"),
    "resources/templates/list": ("resources", "resourceTemplates", "uriTemplate"),
    "tasks/list": ("tasks", "tasks", "taskId"),
}
"""List methods: the capability, the field of the result, and the key of an entry."""

_LISTED: Final = ("tools", "prompts", "resources")  # capabilities with lists that may change
_MAX_PAGES: Final = 1_000
_TIMEOUT: Final = 60.0  # seconds for a server to answer a request of our own
_START: Final = 60.0  # seconds for a server to answer the handshake,
PATIENCE: Final = 20.0  # and for the others once one has: the client waits for all of them
_LAST: Final = 2.0  # seconds for requests that are not sent yet when the client disconnects
_ID_PREFIX: Final = f"coatcheck-{secrets.token_hex(6)}-"  # of our own requests: unique among clients and proxies
_NUMBERS: Final = itertools.count(1)
_EXPRESSION: Final = re.compile(r"\{[^{}]*\}")
_NOT_IN_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_METHOD_NOT_FOUND: Final = -32601
_INVALID_PARAMS: Final = -32602
_RESOURCE_NOT_FOUND: Final = -32002
_BY_NAME: Final = {"tools/call": "tools/list", "prompts/get": "prompts/list"}
_BY_URI: Final = ("resources/read", "resources/subscribe", "resources/unsubscribe")


class MergedServer:
    """An upstream made of several, by name. `patience` is how long the others wait for a slow handshake."""

    def __init__(self, servers: Mapping[str, Upstream], *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._members = {name: MemberServer(name, upstream, self) for name, upstream in servers.items()}
        self._index = ServerIndex(self._members)
        self._sink: Sink | None = None
        self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[Id, asyncio.Task[None]] = {}  # requests of the client that are being routed,
        self._at: dict[Id, MemberServer] = {}  # the server that is asked for them now,
        self._owners: dict[Id, MemberServer] = {}  # and those that were passed on, until they are answered
        self._asking: dict[Id, tuple[MemberServer, Id, object]] = {}  # by our id: server, its id, its progress token

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        members = list(self._members.values())
        done = await asyncio.gather(*(one.upstream.start(one) for one in members), return_exceptions=True)
        for member, error in zip(members, done, strict=True):
            if isinstance(error, UpstreamFailed):
                self._drop(member, error)
            elif isinstance(error, BaseException):
                raise error
        if not self._index.live():
            raise UpstreamFailed("none of the servers could be started", hint="see the messages above")

    async def finish(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_LAST)
        self._is_ending = True
        for member in self._index.live():
            await member.upstream.finish()

    async def close(self) -> None:
        self._is_ending = True
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
            code, text = (_INVALID_REQUEST, "Invalid Request") if message.body else (_PARSE_ERROR, "Parse error")
            await self._to.message(error_response(None, code, text))
        elif message.method == "ping":
            await self._to.message(response(message.id, {}))
        else:
            self._start(message.id, self._route(message))

    async def _route(self, message: Message) -> None:
        method, params = message.method or "", message.params
        if method == "initialize":
            await self._initialize(message)
        elif method == "server/discover":
            await self._to.message(error_response(message.id, _METHOD_NOT_FOUND, "Method not found"))
        elif method in LISTS:
            await self._to.message(response(message.id, {LISTS[method][1]: await self._index.listed(method)}))
        elif method in _BY_NAME:
            await self._by_name(message, _BY_NAME[method], str(params.get("name")))
        elif method in _BY_URI:
            members = await self._index.candidates(str(params.get("uri")))
            await self._first(message, members, (_RESOURCE_NOT_FOUND, _INVALID_PARAMS))
        elif method == "completion/complete":
            await self._complete(message)
        elif method == "logging/setLevel":
            await self._everywhere(message, "logging")
        elif method.startswith("tasks/"):
            await self._first(message, self._index.able("tasks"), (_INVALID_PARAMS, _METHOD_NOT_FOUND))
        else:
            await self._first(message, self._index.live(), (_METHOD_NOT_FOUND,))

    async def _initialize(self, message: Message) -> None:
        results: dict[str, Mapping[str, Any]] = {}
        for member, answer in (await self._handshakes(message.params)).items():
            result = answer.body.get("result") if isinstance(answer, Message) else None
            if isinstance(result, dict):
                results[member.name] = result
                capabilities = result.get("capabilities")
                member.capabilities = capabilities if isinstance(capabilities, dict) else {}
            else:
                refused = UpstreamFailed(f"{member.name} refused the handshake")
                self._drop(member, answer if isinstance(answer, UpstreamFailed) else refused)
                await member.upstream.close()
        if not results:
            raise UpstreamFailed("none of the servers could be started", hint="see the messages above")
        merged = merged_handshake(results, str(message.params.get("protocolVersion")))
        await self._to.message(response(message.id, merged))

    async def _handshakes(self, params: Mapping[str, Any]) -> dict[MemberServer, Message | BaseException]:
        """Return each server's response to the handshake, or its error."""
        tasks = {one: asyncio.create_task(one.ask("initialize", params, _START)) for one in self._index.live()}
        waiting = set(tasks.values())
        try:
            while waiting and not any(one.done() and one.exception() is None for one in tasks.values()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=self._patience)
        finally:
            for task in tasks.values():
                task.cancel()
        late = UpstreamFailed("no answer to the handshake in time", hint="run it behind a proxy of its own")
        done = await asyncio.gather(*tasks.values(), return_exceptions=True)
        answers = [late if isinstance(one, asyncio.CancelledError) else one for one in done]
        return dict(zip(tasks, answers, strict=True))

    async def _by_name(self, message: Message, listing: str, name: str) -> None:
        found = await self._index.find(listing, name)
        if found is None:
            await self._to.message(error_response(message.id, _INVALID_PARAMS, f"no server has {clip(name)}"))
            return
        member, own = found
        if own != name:
            message = rewritten(message, params={**message.params, "name": own})
        await self._forward(member, message)

    async def _complete(self, message: Message) -> None:
        ref = message.params.get("ref")
        if isinstance(ref, dict) and ref.get("type") == "ref/prompt":
            found = await self._index.find("prompts/list", str(ref.get("name")))
            if found is not None:
                params = {**message.params, "ref": {**ref, "name": found[1]}}
                await self._forward(found[0], rewritten(message, params=params))
                return
        elif isinstance(ref, dict) and isinstance(ref.get("uri"), str):
            member = await self._index.completer(ref["uri"])
            if member is not None:
                await self._forward(member, message)
                return
        await self._to.message(error_response(message.id, _INVALID_PARAMS, "no server can complete this"))

    async def _everywhere(self, message: Message, capability: str) -> None:
        """Send a request to all servers with a capability. If all of them fail, return the first error."""
        asked = [one.ask(message.method or "", message.params, _TIMEOUT) for one in self._index.able(capability)]
        done = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Message)]
        refused = [one for one in done if "error" in one.body]
        if not asked:
            await self._to.message(error_response(message.id, _METHOD_NOT_FOUND, "Method not found"))
        elif refused and len(refused) == len(done):
            await self._to.message(rewritten(refused[0], id=message.id))
        else:
            await self._to.message(response(message.id, {}))

    async def _first(self, message: Message, members: Iterable[MemberServer], passing: Collection[int]) -> None:
        """Ask one server after the other. `passing` are the error codes with which the next one is asked."""
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
        await self._to.message(refused or error_response(message.id, _METHOD_NOT_FOUND, "no server has this"))

    async def _forward(self, member: MemberServer, message: Message) -> None:
        assert message.id is not None
        self._owners[message.id] = member
        try:
            await member.send(message)
        except UpstreamFailed:
            del self._owners[message.id]
            raise

    async def _notified(self, message: Message) -> None:
        """Send a notification to the server it concerns, or to all."""
        params = message.params
        if message.method == "notifications/cancelled":
            await self._cancelled(message, id_of(params.get("requestId")))
        elif message.method == "notifications/progress":
            found = self._asking.get(str(params.get("progressToken")))
            if found is not None:
                await found[0].send(rewritten(message, params={**params, "progressToken": found[2]}))
        else:
            for member in self._index.live():
                with contextlib.suppress(UpstreamFailed):
                    await member.send(message)

    async def _cancelled(self, message: Message, request_id: Id | None) -> None:
        """Cancel a request here and at the server that has it. Its response is dropped."""
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

    async def from_server(self, member: MemberServer, message: Message) -> None:
        if message.is_response:
            if message.id is not None and self._owners.get(message.id) is member:
                del self._owners[message.id]
                await self._to.message(message)
            return
        if message.is_request and message.id is not None:
            await self._to.message(self._with_our_id(member, message, message.id))
            return
        if message.method == "notifications/cancelled":
            own = message.params.get("requestId")
            our_id = next((one for one, asked in self._asking.items() if asked[:2] == (member, own)), None)
            if our_id is not None:
                del self._asking[our_id]
                await self._to.message(rewritten(message, params={**message.params, "requestId": our_id}))
            return
        if message.method == "notifications/resources/list_changed":
            self._index.forget_uris()
        await self._to.message(message)

    def _with_our_id(self, member: MemberServer, message: Message, own_id: Id) -> Message:
        """Give a server's request an id and a progress token of our own: those of two servers may be equal."""
        our_id, params = _new_id(), message.params
        meta = params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        self._asking[our_id] = (member, own_id, token)
        if token is None:
            return rewritten(message, id=our_id)
        return rewritten(message, id=our_id, params={**params, "_meta": {**params["_meta"], "progressToken": our_id}})

    async def unanswered(self, member: MemberServer, request_id: Id | None, error: UpstreamFailed) -> None:
        owned = [one for one, owner in self._owners.items() if owner is member]
        for one in owned if request_id is None else [one for one in owned if one == request_id]:
            if self._owners.pop(one, None) is not None:
                await self._to.unanswered(one, error)

    async def lost(self, member: MemberServer, error: UpstreamFailed) -> None:
        """Handle the end of a server: cancel its requests, and tell the client that lists changed."""
        self._drop(member, error)
        if not self._index.live():
            await self._to.ended(error)
            return
        if self._is_ending:
            return
        for our_id in [one for one, asked in self._asking.items() if asked[0] is member]:
            del self._asking[our_id]
            params = {"requestId": our_id, "reason": str(error)}
            await self._to.message(notification("notifications/cancelled", params))
        for what in _LISTED:
            if what in member.capabilities:
                await self._to.message(notification(f"notifications/{what}/list_changed"))
        self._index.forget_uris()

    def _drop(self, member: MemberServer, error: UpstreamFailed) -> None:
        """Mark a server as lost, and log it unless the client has disconnected."""
        member.lost = error
        if not self._is_ending:
            log(str(error) if error.message.startswith(f"{member.name} ") else f"{member.name}: {error}")

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
            except Exception as error:  # noqa: BLE001 - every request gets a response
                log(f"cannot pass a request on: {error!r}")
                await self._to.message(failure(request_id, CoatcheckError("the proxy could not pass the request on")))
            finally:
                self._at.pop(request_id, None)
                if self._running.get(request_id) is task:
                    del self._running[request_id]

        task = asyncio.create_task(guarded())
        self._running[request_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MemberServer:
    """One of the servers, and the sink for its messages. `lost` is the reason if it has ended."""

    def __init__(self, name: str, upstream: Upstream, merged: MergedServer) -> None:
        self.name = name
        self.upstream = upstream
        self.lost: UpstreamFailed | None = None
        self.capabilities: Mapping[str, Any] = {}
        self._merged = merged
        self._asked: dict[Id, asyncio.Future[Message]] = {}

    async def ask(self, method: str, params: Mapping[str, Any] | None, seconds: float) -> Message:
        """Send a request of our own and return the response. Raises `UpstreamFailed`."""
        try:
            return await asyncio.wait_for(self.answer(request(_new_id(), method, params)), seconds)
        except TimeoutError:
            raise UpstreamFailed(f"{self.name} did not answer {method} in {seconds:g} seconds") from None

    async def answer(self, message: Message) -> Message:
        """Send a request and return the response, without a timeout. Raises `UpstreamFailed`."""
        assert message.id is not None
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = answer
        try:
            await self.send(message)
            return await answer
        finally:
            self._asked.pop(message.id, None)

    async def send(self, message: Message) -> None:
        if self.lost is not None:
            raise self.lost
        await self.upstream.send(message)

    async def message(self, message: Message) -> None:
        answer = self._asked.get(message.id) if message.is_response and message.id is not None else None
        if answer is None:
            await self._merged.from_server(self, message)
        elif not answer.done():
            answer.set_result(message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        for one in [request_id] if request_id is not None else list(self._asked):
            answer = self._asked.get(one)
            if answer is not None and not answer.done():
                answer.set_exception(error)
        if request_id not in self._asked:
            await self._merged.unanswered(self, request_id, error)

    async def ended(self, error: UpstreamFailed) -> None:
        self.lost = error
        await self.unanswered(None, error)
        await self._merged.lost(self, error)


class ServerIndex:
    """Which server has which names and URIs. They are listed when an unknown one is requested."""

    def __init__(self, members: Mapping[str, MemberServer]) -> None:
        self._members = members
        self._names: dict[str, dict[str, tuple[str, str]]] = {}  # all names ever listed, with their latest meaning
        self._uris: dict[str, dict[str, str]] = {}

    def live(self) -> list[MemberServer]:
        return [member for member in self._members.values() if member.lost is None]

    def able(self, capability: str) -> list[MemberServer]:
        return [member for member in self.live() if capability in member.capabilities]

    async def listed(self, method: str) -> list[dict[str, Any]]:
        """Return the merged list of all servers that answer."""
        capability, _, key = LISTS[method]
        members = self.able(capability)
        pages = await asyncio.gather(*(self._pages(one, method) for one in members))
        listed = {one.name: found for one, found in zip(members, pages, strict=True)}
        if key == "name":
            names = unique_names(listed)
            self._names[method] = self._names.get(method, {}) | names
            return renamed(listed, names)
        self._uris[method] = owners(listed, key)
        return distinct(listed, key)

    async def _pages(self, member: MemberServer, method: str) -> list[dict[str, Any]]:
        """Return the entries of one server, each once: the cursors of some servers lead in a circle."""
        _, field, key = LISTS[method]
        found: dict[str, dict[str, Any]] = {}
        cursors: list[object] = [None]
        while len(cursors) <= _MAX_PAGES:
            try:
                answer = await member.ask(method, {"cursor": cursors[-1]} if cursors[-1] else None, _TIMEOUT)
            except UpstreamFailed as error:
                log(str(error))
                break
            result = answer.body.get("result")
            entries = result.get(field) if isinstance(result, dict) else None
            for one in entries if isinstance(entries, list) else []:
                if isinstance(one, dict):
                    found.setdefault(str(one.get(key)), one)
            following = result.get("nextCursor") if isinstance(result, dict) else None
            if not following or following in cursors:
                break
            cursors.append(following)
        return list(found.values())

    async def find(self, listing: str, name: str) -> tuple[MemberServer, str] | None:
        """Return the server of a name, and the name it has there. A name that was listed once stays valid."""
        if name not in self._names.get(listing, {}):
            await self.listed(listing)
        found = self._names[listing].get(name)
        return (self._members[found[0]], found[1]) if found is not None else None

    async def candidates(self, uri: str) -> list[MemberServer]:
        """Return the server that lists a URI, or else all servers with resources, the best matching templates first."""
        for method in ("resources/list", "resources/templates/list"):
            if method not in self._uris:
                await self.listed(method)
        server = self._uris["resources/list"].get(uri)
        if server is not None:
            return [self._members[server]]
        templates = self._uris["resources/templates/list"].items()
        matches = sorted(
            ((template_match(template, uri), server) for template, server in templates), key=lambda one: -one[0]
        )
        servers = [server for match, server in matches if match >= 0]
        servers += [member.name for member in self.able("resources")]
        return [self._members[server] for server in dict.fromkeys(servers) if self._members[server].lost is None]

    async def completer(self, uri: str) -> MemberServer | None:
        """Return the server for completing a template: the one that lists it, or else the most likely."""
        members = await self.candidates(uri)
        server = self._uris["resources/templates/list"].get(uri)
        return self._members[server] if server is not None else next(iter(members), None)

    def forget_uris(self) -> None:
        """Forget all URIs, because a list has changed."""
        self._uris.clear()


def merged_handshake(results: Mapping[str, Mapping[str, Any]], wanted: str) -> dict[str, Any]:
    """Merge the responses to `initialize`. The version is the client's if one server supports it, else the newest.
    `listChanged` is always set, because lists change when a server ends."""
    versions = [str(result.get("protocolVersion")) for result in results.values()]
    capabilities: dict[str, Any] = {}
    for result in results.values():
        found = result.get("capabilities")
        capabilities = merged_capabilities(capabilities, found if isinstance(found, dict) else {})
    for what in _LISTED:
        if isinstance(capabilities.get(what), dict):
            capabilities[what] = {**capabilities[what], "listChanged": True}
    instructions = [
        f"# {name}\n{result['instructions']}"
        for name, result in results.items()
        if isinstance(result.get("instructions"), str) and result["instructions"]
    ]
    return {
        "protocolVersion": wanted if wanted in versions else max(versions, default=wanted),
        "capabilities": capabilities,
        "serverInfo": {"name": "coatcheck", "version": __version__, "title": f"Coatcheck: {', '.join(results)}"},
        **({"instructions": "\n\n".join(instructions)} if instructions else {}),
    }


def merged_capabilities(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge capabilities: an object has the keys of both, a flag is set if either sets it."""
    found = dict(one)
    for key, value in other.items():
        mine = found.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = merged_capabilities(mine, value)
        elif key not in found or value:
            found[key] = value
    return found


def unique_names(listed: Listed) -> dict[str, tuple[str, str]]:
    """Map the names shown to the client to the server and the name there.

    A name gets the prefix of its server only if another server has the same."""
    counts = Counter(name for entries in listed.values() for name in {str(entry.get("name")) for entry in entries})
    found: dict[str, tuple[str, str]] = {}
    for server, entries in listed.items():
        for entry in entries:
            name = str(entry.get("name"))
            shown = name if counts[name] == 1 else f"{_NOT_IN_NAME.sub('_', server)}_{name}"
            number = 2
            while shown in found or (shown != name and shown in counts):
                shown, number = f"{_NOT_IN_NAME.sub('_', server)}_{number}_{name}", number + 1
            found[shown] = (server, name)
    return found


def renamed(listed: Listed, names: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the entries of all servers, with the names shown to the client."""
    here = {own: name for name, own in names.items()}
    found = []
    for server, entries in listed.items():
        for entry in entries:
            name = here[server, str(entry.get("name"))]
            found.append(dict(entry) if entry.get("name") == name else {**entry, "name": name})
    return found


def owners(listed: Listed, key: str) -> dict[str, str]:
    """Map each URI or template to the first server that lists it."""
    found: dict[str, str] = {}
    for server, entries in listed.items():
        for entry in entries:
            found.setdefault(str(entry.get(key)), server)
    return found


def distinct(listed: Listed, key: str) -> list[dict[str, Any]]:
    """Return the entries of all servers, each key once."""
    first = owners(listed, key)
    return [
        dict(entry) for server, entries in listed.items() for entry in entries if first[str(entry.get(key))] == server
    ]


def template_match(template: str, uri: str) -> int:
    """Return the number of literal characters of a template that matches a URI, or -1 if it does not match."""
    parts = _EXPRESSION.split(template)
    if len(parts) == 1:
        return len(uri) if template == uri else -1
    first, *between, last = parts
    at = len(first)
    if not uri.startswith(first) or not uri.endswith(last) or len(uri) < len(first) + len(last):
        return -1
    for part in between:
        found = uri.find(part, at, len(uri) - len(last))
        if found < 0:
            return -1
        at = found + len(part)
    return sum(map(len, parts))


def _new_id() -> str:
    return f"{_ID_PREFIX}{next(_NUMBERS)}"


def _code(answer: Message) -> object:
    error = answer.body.get("error")
    return error.get("code") if isinstance(error, dict) else None
