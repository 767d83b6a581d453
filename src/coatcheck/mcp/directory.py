"""Who of several servers has what: their lists as one, and the server that a name or an address leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from coatcheck.errors import UpstreamFailed
from coatcheck.mcp import merging
from coatcheck.mcp.member import Member
from coatcheck.mcp.stdio import say

ASK: Final = 60.0  # seconds for a server to answer a question of ours
_PAGES: Final = 1_000
LISTS: Final = {
    "tools/list": ("tools", "tools", "name"),
    "prompts/list": ("prompts", "prompts", "name"),
    "resources/list": ("resources", "resources", "uri"),
    "resources/templates/list": ("resources", "resourceTemplates", "uriTemplate"),
    "tasks/list": ("tasks", "tasks", "taskId"),
}
"""Methods that list: the capability, the field of the result, and what tells its entries apart."""


class Directory:
    """Names and addresses as far as they were listed; what is not known is listed when somebody asks for it."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._names: dict[str, dict[str, tuple[str, str]]] = {}  # all that were ever given, the newest meaning
        self._addresses: dict[str, dict[str, str]] = {}

    def live(self) -> list[Member]:
        return [member for member in self._members.values() if member.lost is None]

    def able(self, capability: str) -> list[Member]:
        return [member for member in self.live() if capability in member.capabilities]

    async def listed(self, method: str) -> list[dict[str, Any]]:
        """What all servers list. One that does not answer is left out: the others are still there."""
        capability, _, key = LISTS[method]
        members = self.able(capability)
        pages = await asyncio.gather(*(self._pages(one, method) for one in members))
        listed = {one.name: found for one, found in zip(members, pages, strict=True)}
        if key == "name":
            names = merging.named(listed)
            self._names[method] = self._names.get(method, {}) | names
            return merging.shown(listed, names)
        self._addresses[method] = merging.addressed(listed, key)
        return merging.distinct(listed, key)

    async def _pages(self, member: Member, method: str) -> list[dict[str, Any]]:
        """What one server lists, each entry once: some lead in a circle."""
        _, field, key = LISTS[method]
        found: dict[str, dict[str, Any]] = {}
        cursors: list[object] = [None]
        while len(cursors) <= _PAGES:
            try:
                answer = await member.ask(method, {"cursor": cursors[-1]} if cursors[-1] else None, ASK)
            except UpstreamFailed as error:
                say(str(error))
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

    async def named(self, listing: str, name: str) -> tuple[Member, str] | None:
        """The server that a name leads to, and what it is called there. A name that was once given stays good."""
        if name not in self._names.get(listing, {}):
            await self.listed(listing)
        found = self._names[listing].get(name)
        return (self._members[found[0]], found[1]) if found is not None else None

    async def candidates(self, uri: str) -> list[Member]:
        """The server that lists an address; else all with resources, those first whose templates say most of it."""
        for method in ("resources/list", "resources/templates/list"):
            if method not in self._addresses:
                await self.listed(method)
        server = self._addresses["resources/list"].get(uri)
        if server is not None:
            return [self._members[server]]
        templates = self._addresses["resources/templates/list"].items()
        fitting = sorted(
            ((merging.fitness(template, uri), server) for template, server in templates), key=lambda one: -one[0]
        )
        servers = [server for fitness, server in fitting if fitness >= 0]
        servers += [member.name for member in self.able("resources")]
        return [self._members[server] for server in dict.fromkeys(servers) if self._members[server].lost is None]

    async def completing(self, uri: str) -> Member | None:
        """The server that completes a template: the one that lists it, else the likeliest."""
        members = await self.candidates(uri)
        server = self._addresses["resources/templates/list"].get(uri)
        return self._members[server] if server is not None else next(iter(members), None)

    def changed(self) -> None:
        """Addresses are no longer what they were."""
        self._addresses.clear()
