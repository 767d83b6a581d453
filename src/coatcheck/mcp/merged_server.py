"""Several servers that look like one upstream server. Each request goes to the server that offers
what it names.

Lists are merged. A name gets the prefix of its server only if two servers use it. The handshake is
made with each server separately, so only versions of the protocol with a handshake are supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from coatcheck import __version__
from coatcheck.errors import UpstreamFailed
from coatcheck.ids import clip
from coatcheck.mcp import wire
from coatcheck.mcp.wire import METHOD_NOT_FOUND, Id, Message, OwnRequests, Sink, Tasks, Upstream

LISTS: Final = {
    "tools/list": ("tools", "tools", "name"),
    "prompts/list": ("prompts", "prompts", "name"),
    "resources/list": ("resources", "resources", "uri"),
    "resources/templates/list": ("resources", "resourceTemplates", "uriTemplate"),
    "tasks/list": ("tasks", "tasks", "taskId"),
}
"""List methods: the capability, the field of the result, and the key of an entry."""

_LISTED: Final = ("tools", "prompts", "resources")  # capabilities with lists that may change
_TIMEOUT: Final = 60.0  # seconds for a server to answer the handshake or another request of our own
# seconds for the handshakes of the others once one is done: the client waits for all of them
PATIENCE: Final = 20.0
_LAST: Final = 2.0  # seconds for requests that are not sent yet when the client disconnects
_EXPRESSION: Final = re.compile(r"\{[^{}]*\}")
_NOT_IN_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_INVALID_PARAMS: Final = -32602
_RESOURCE_NOT_FOUND: Final = -32002
_BY_NAME: Final = {"tools/call": "tools/list", "prompts/get": "prompts/list"}
_BY_URI: Final = ("resources/read", "resources/subscribe", "resources/unsubscribe")


class MergedServer:
    """An upstream made of several, by name. `patience` is how long the others wait for a slow
    handshake."""

    _to: Sink

    def __init__(self, servers: Mapping[str, Upstream], *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._members = {
            name: MemberServer(name, upstream, self) for name, upstream in servers.items()
        }
        self._names: dict[
            str, dict[str, tuple[str, str]]
        ] = {}  # all names ever listed, with their latest meaning
        self._uris: dict[str, dict[str, str]] = {}  # the server of each, until a list changes
        self._is_ending = False
        self._tasks = Tasks()  # requests of the client that are being routed,
        self._owners: dict[Id, MemberServer] = {}  # and the servers that are asked for them
        self._asking: dict[
            Id, tuple[MemberServer, Id, object]
        ] = {}  # by our id: server, its id, its progress token

    def plain_name(self, tool: str) -> str:
        """Return the name that a listed tool has at its own server."""
        return self._names.get("tools/list", {}).get(tool, ("", tool))[1]

    def server_of(self, tool: str) -> str:
        """Return the name of the server that a listed tool belongs to; "" if it was not listed."""
        return self._names.get("tools/list", {}).get(tool, ("", tool))[0]

    async def start(self, sink: Sink) -> None:
        self._to = sink
        members = list(self._members.values())
        done = await asyncio.gather(
            *(one.upstream.start(one) for one in members), return_exceptions=True
        )
        for member, error in zip(members, done, strict=True):
            if isinstance(error, UpstreamFailed):
                self._drop(member, error)
            elif isinstance(error, BaseException):
                raise error
        self._check_live()

    def _check_live(self) -> None:
        if not self._live():
            raise UpstreamFailed(
                "none of the servers could be started", hint="see the messages above"
            )

    async def finish(self) -> None:
        await self._tasks.wait(_LAST)
        self._is_ending = True
        for member in self._live():
            await member.upstream.finish()

    async def close(self) -> None:
        self._is_ending = True
        await self._tasks.cancel()
        await asyncio.gather(
            *(one.upstream.close() for one in self._members.values()), return_exceptions=True
        )

    # From the client

    async def send(self, message: Message) -> None:
        if message.is_response:
            member, own_id, _ = self._asking.pop(message.id or "", (None, "", None))
            if member is not None:
                await member.send(wire.rewritten(message, id=own_id))
        elif "method" in message.body and "id" not in message.body:
            await self._notified(message)
        elif message.method is None or message.id is None:
            code, text = (
                (_INVALID_REQUEST, "Invalid Request")
                if message.body
                else (_PARSE_ERROR, "Parse error")
            )
            await self._to.message(wire.error_response(None, code, text))
        else:
            route = self._route(message, message.method, message.id)
            self._tasks.start(
                wire.answer(route, message.id, "request", self._to.message), message.id
            )

    async def _route(self, message: Message, method: str, request_id: Id) -> Message | None:
        """Return the response to a request, or None if it was passed on to a server whose response
        is still to come."""
        params = message.params
        if method == "ping":
            return wire.response(request_id, {})
        if method == "initialize":
            return wire.response(request_id, await self._handshake(params))
        if method == "server/discover":
            return wire.error_response(request_id, METHOD_NOT_FOUND, "Method not found")
        if method in LISTS:
            return wire.response(request_id, {LISTS[method][1]: await self._listed(method)})
        if method in _BY_NAME:
            name = str(params.get("name"))
            member, own = await self._find(_BY_NAME[method], name)
            changed = (
                message if own == name else wire.rewritten(message, params={**params, "name": own})
            )
            return await self._forward(member, changed, request_id, f"no server has {clip(name)}")
        if method in _BY_URI:
            members = await self._candidates(str(params.get("uri")))
            return await self._first(
                message, request_id, members, (_RESOURCE_NOT_FOUND, _INVALID_PARAMS)
            )
        if method == "completion/complete":
            return await self._complete(message, request_id)
        if method == "logging/setLevel":
            return await self._everywhere(message, request_id, self._able("logging"))
        if method.startswith("tasks/"):
            return await self._first(
                message, request_id, self._able("tasks"), (_INVALID_PARAMS, METHOD_NOT_FOUND)
            )
        return await self._first(message, request_id, self._live(), (METHOD_NOT_FOUND,))

    async def _handshake(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Make the handshake with each server, and return the merged result. Servers that do not
        answer are dropped."""
        tasks = {
            one: asyncio.create_task(one.own.ask("initialize", params, _TIMEOUT))
            for one in self._live()
        }
        try:
            await self._wait_for_answers(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
        results: dict[str, dict[str, Any]] = {}
        for member, answer in zip(tasks, answers, strict=True):
            if isinstance(answer, Message) and isinstance(answer.body.get("result"), dict):
                results[member.name] = answer.result
                capabilities = answer.result.get("capabilities")
                member.capabilities = capabilities if isinstance(capabilities, dict) else {}
                continue
            error = UpstreamFailed(f"{member.name} refused the handshake")
            if isinstance(answer, UpstreamFailed):
                error = answer
            elif isinstance(answer, asyncio.CancelledError):
                error = UpstreamFailed(
                    "no answer to the handshake in time", hint="run it behind its own proxy"
                )
            self._drop(member, error)
            await member.upstream.close()
        self._check_live()
        return merged_handshake(results, str(params.get("protocolVersion")))

    async def _wait_for_answers(self, tasks: Collection[asyncio.Task[Message]]) -> None:
        """Wait until a server has answered, and then a while longer for the others."""
        waiting = set(tasks)
        while waiting and not any(one.done() and one.exception() is None for one in tasks):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=self._patience)

    async def _complete(self, message: Message, request_id: Id) -> Message | None:
        ref, member = message.params.get("ref"), None
        if isinstance(ref, dict) and ref.get("type") == "ref/prompt":
            member, own = await self._find("prompts/list", str(ref.get("name")))
            message = wire.rewritten(
                message, params={**message.params, "ref": {**ref, "name": own}}
            )
        elif isinstance(ref, dict) and isinstance(uri := ref.get("uri"), str):
            likely = await self._candidates(uri)
            server = self._uris["resources/templates/list"].get(uri)
            member = self._members[server] if server is not None else next(iter(likely), None)
        return await self._forward(member, message, request_id, "no server can complete this")

    async def _everywhere(
        self, message: Message, request_id: Id, members: Iterable[MemberServer]
    ) -> Message:
        """Send a request to these servers. If all of them fail, return the first error."""
        asked = [one.own.ask(message.method or "", message.params, _TIMEOUT) for one in members]
        done = [
            one
            for one in await asyncio.gather(*asked, return_exceptions=True)
            if isinstance(one, Message)
        ]
        refused = [one for one in done if "error" in one.body]
        if not asked:
            return wire.error_response(request_id, METHOD_NOT_FOUND, "Method not found")
        if refused and len(refused) == len(done):
            return wire.rewritten(refused[0], id=request_id)
        return wire.response(request_id, {})

    async def _first(
        self,
        message: Message,
        request_id: Id,
        members: Iterable[MemberServer],
        passing: Collection[int],
    ) -> Message:
        """Ask one server after the other. `passing` are the error codes after which the next one is
        asked."""
        best: Message | None = None
        try:
            for member in members:
                self._owners[request_id] = member
                answer = await member.own.answer(message)
                if (code := answer.error_code) not in passing:
                    return answer
                if best is None or best.error_code == METHOD_NOT_FOUND != code:
                    best = answer
        finally:
            self._owners.pop(request_id, None)
        return best or wire.error_response(request_id, METHOD_NOT_FOUND, "no server has this")

    async def _forward(
        self, member: MemberServer | None, message: Message, request_id: Id, missing: str
    ) -> Message | None:
        """Pass a request on to a server. Without one, it is refused with the text `missing`."""
        if member is None:
            return wire.error_response(request_id, _INVALID_PARAMS, missing)
        self._owners[request_id] = member
        try:
            await member.send(message)
        except UpstreamFailed:
            del self._owners[request_id]
            raise
        return None

    async def _notified(self, message: Message) -> None:
        """Send a notification to the server it concerns, or to all."""
        params, request_id = message.params, wire.id_of(message.params.get("requestId"))
        if message.method == "notifications/cancelled" and request_id is not None:
            member, task = (
                self._owners.pop(request_id, None),
                self._tasks.of(request_id),
            )  # a response is dropped
            if task is not None:
                task.cancel()
            if member is not None:
                await member.send(message)
        elif message.method == "notifications/progress":
            member, _, token = self._asking.get(str(params.get("progressToken")), (None, "", None))
            if member is not None:
                await member.send(
                    wire.rewritten(message, params={**params, "progressToken": token})
                )
        elif message.method != "notifications/cancelled":
            for member in self._live():
                with contextlib.suppress(UpstreamFailed):
                    await member.send(message)

    # From the servers

    async def from_server(self, member: MemberServer, message: Message) -> None:
        if message.is_response:
            if message.id is not None and self._owners.get(message.id) is member:
                del self._owners[message.id]
                await self._to.message(message)
            return
        if (
            message.is_request and message.id is not None
        ):  # ids and progress tokens of two servers may be equal
            our_id, meta = wire.new_id(), message.meta
            self._asking[our_id] = (member, message.id, meta.get("progressToken"))
            if meta.get("progressToken") is not None:
                params = {**message.params, "_meta": {**meta, "progressToken": our_id}}
                message = wire.rewritten(message, params=params)
            message = wire.rewritten(message, id=our_id)
        elif message.method == "notifications/cancelled":
            asked = (member, message.params.get("requestId"))
            cancelled = next(
                (one for one, asking in self._asking.items() if asking[:2] == asked), None
            )
            if cancelled is None:
                return
            del self._asking[cancelled]
            message = wire.rewritten(message, params={**message.params, "requestId": cancelled})
        elif message.method == "notifications/resources/list_changed":
            self._uris.clear()
        await self._to.message(message)

    async def unanswered(
        self, member: MemberServer, request_id: Id | None, error: UpstreamFailed
    ) -> None:
        for one in [
            one
            for one, owner in self._owners.items()
            if owner is member and request_id in (None, one)
        ]:
            if self._owners.pop(one, None) is not None:
                await self._to.unanswered(one, error)

    async def lost(self, member: MemberServer, error: UpstreamFailed) -> None:
        """Handle the end of a server: cancel its requests, and tell the client that lists
        changed."""
        self._drop(member, error)
        if not self._live():
            await self._to.ended(error)
            return
        if self._is_ending:
            return
        for our_id in [one for one, asked in self._asking.items() if asked[0] is member]:
            del self._asking[our_id]
            params = {"requestId": our_id, "reason": str(error)}
            await self._to.message(wire.notification("notifications/cancelled", params))
        for what in _LISTED:
            if what in member.capabilities:
                await self._to.message(wire.notification(f"notifications/{what}/list_changed"))
        self._uris.clear()

    def _drop(self, member: MemberServer, error: UpstreamFailed) -> None:
        """Mark a server as lost, and log it unless the client has disconnected."""
        member.lost = error
        if not self._is_ending:
            wire.log(
                str(error)
                if error.message.startswith(f"{member.name} ")
                else f"{member.name}: {error}"
            )

    # What the servers have

    def _live(self) -> list[MemberServer]:
        return [member for member in self._members.values() if member.lost is None]

    def _able(self, capability: str) -> list[MemberServer]:
        return [member for member in self._live() if capability in member.capabilities]

    async def _listed(self, method: str) -> list[dict[str, Any]]:
        """Return the merged list of all servers that answer."""
        capability, _, key = LISTS[method]
        members = self._able(capability)
        lists = await asyncio.gather(*(self._entries(one, method) for one in members))
        entries = [
            (one.name, entry) for one, found in zip(members, lists, strict=True) for entry in found
        ]
        owned = [(server, str(entry.get(key))) for server, entry in entries]
        if key == "name":
            names = unique_names(owned)
            self._names[method] = self._names.get(method, {}) | dict(zip(names, owned, strict=True))
            return [{**entry, key: name} for (_, entry), name in zip(entries, names, strict=True)]
        first: dict[str, int] = {}
        for position, (_, uri) in enumerate(owned):
            first.setdefault(uri, position)
        self._uris[method] = {uri: owned[position][0] for uri, position in first.items()}
        return [entries[position][1] for position in first.values()]

    async def _entries(self, member: MemberServer, method: str) -> list[dict[str, Any]]:
        """Return the entries of one server, each once: the cursors of some servers lead in a
        circle."""
        _, field, key = LISTS[method]
        found: dict[str, dict[str, Any]] = {}
        try:
            async for page in member.own.pages(method, {}, _TIMEOUT):
                entries = page.get(field)
                for one in entries if isinstance(entries, list) else []:
                    if isinstance(one, dict):
                        found.setdefault(str(one.get(key)), one)
        except UpstreamFailed as error:
            wire.log(str(error))
        return list(found.values())

    async def _find(self, listing: str, name: str) -> tuple[MemberServer | None, str]:
        """Return the server of a name, and the name it has there. A name that was listed once stays
        valid."""
        if name not in self._names.get(listing, {}):
            await self._listed(listing)
        server, own = self._names[listing].get(name, ("", name))
        return self._members.get(server), own

    async def _candidates(self, uri: str) -> list[MemberServer]:
        """Return the server that lists a URI, or else all servers with resources, the best matching
        templates first."""
        for method in ("resources/list", "resources/templates/list"):
            if method not in self._uris:
                await self._listed(method)
        server = self._uris["resources/list"].get(uri)
        if server is not None:
            return [self._members[server]]
        templates = self._uris["resources/templates/list"].items()
        matches = sorted(
            ((template_match(one, uri), server) for one, server in templates),
            key=lambda one: -one[0],
        )
        servers = [server for match, server in matches if match >= 0]
        servers += [member.name for member in self._able("resources")]
        return [
            self._members[server]
            for server in dict.fromkeys(servers)
            if self._members[server].lost is None
        ]


class MemberServer:
    """One of the servers, and the sink for its messages. `lost` is the reason if it has ended."""

    def __init__(self, name: str, upstream: Upstream, merged: MergedServer) -> None:
        self.name = name
        self.upstream = upstream
        self.own = OwnRequests(self.send, name)
        self.lost: UpstreamFailed | None = None
        self.capabilities: Mapping[str, Any] = {}
        self._merged = merged

    async def send(self, message: Message) -> None:
        if self.lost is not None:
            raise self.lost
        await self.upstream.send(message)

    async def message(self, message: Message) -> None:
        if not self.own.answered(message):
            await self._merged.from_server(self, message)

    async def unanswered(self, request_id: Id | None, error: UpstreamFailed) -> None:
        if not self.own.fail(request_id, error):
            await self._merged.unanswered(self, request_id, error)

    async def ended(self, error: UpstreamFailed) -> None:
        self.lost = error
        await self.unanswered(None, error)
        await self._merged.lost(self, error)


def merged_handshake(results: Mapping[str, Mapping[str, Any]], wanted: str) -> dict[str, Any]:
    """Merge the responses to `initialize`. The version is the client's if one server supports it,
    else the newest. `listChanged` is always set, because lists change when a server ends."""
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
        "serverInfo": {
            "name": "coatcheck",
            "version": __version__,
            "title": f"Coatcheck: {', '.join(results)}",
        },
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


def unique_names(owned: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names shown to the client, for servers and their names.

    A name gets the prefix of its server only if another server has the same."""
    counts = Counter(name for _, name in set(owned))
    shown: dict[str, None] = {}
    for server, name in owned:
        prefix, number = _NOT_IN_NAME.sub("_", server), 2
        one = name if counts[name] == 1 else f"{prefix}_{name}"
        while one in shown or (one != name and one in counts):
            one, number = f"{prefix}_{number}_{name}", number + 1
        shown[one] = None
    return list(shown)


def template_match(template: str, uri: str) -> int:
    """Return the number of literal characters of a template that matches a URI, or -1 if it does
    not match."""
    first, *between = _EXPRESSION.split(template)
    if not between:
        return len(uri) if template == uri else -1
    last = between.pop()
    at, end = len(first), len(uri) - len(last)
    if at > end or not uri.startswith(first) or not uri.endswith(last):
        return -1
    for part in between:
        if (found := uri.find(part, at, end)) < 0:
            return -1
        at = found + len(part)
    return len(_EXPRESSION.sub("", template))
