"""Several servers' answers as one server's: what they can do, and what they list. Pure: JSON in, JSON out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coatcheck import __version__

LISTED: Final = ("tools", "prompts", "resources")
"""Capabilities that are about lists."""

_EXPRESSION: Final = re.compile(r"\{[^{}]*\}")
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]+")
Listed = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each server lists, by the server's name."""


def initialized(results: Mapping[str, Mapping[str, Any]], wanted: str) -> dict[str, Any]:
    """The answer to `initialize` of all servers together. The version that the client wants holds where one of them
    speaks it, else the newest. Lists change when a server ends, whether or not its own ever do."""
    versions = [str(result.get("protocolVersion")) for result in results.values()]
    capabilities: dict[str, Any] = {}
    for result in results.values():
        found = result.get("capabilities")
        capabilities = united(capabilities, found if isinstance(found, dict) else {})
    for what in LISTED:
        if isinstance(capabilities.get(what), dict):
            capabilities[what] = {**capabilities[what], "listChanged": True}
    told = [
        f"# {name}\n{result['instructions']}"
        for name, result in results.items()
        if isinstance(result.get("instructions"), str) and result["instructions"]
    ]
    return {
        "protocolVersion": wanted if wanted in versions else max(versions, default=wanted),
        "capabilities": capabilities,
        "serverInfo": {"name": "coatcheck", "version": __version__, "title": f"Coatcheck: {', '.join(results)}"},
        **({"instructions": "\n\n".join(told)} if told else {}),
    }


def united(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Capabilities of either: an object has the keys of both, a flag is set where one of them sets it."""
    found = dict(one)
    for key, value in other.items():
        mine = found.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            found[key] = united(mine, value)
        elif key not in found or value:
            found[key] = value
    return found


def named(listed: Listed) -> dict[str, tuple[str, str]]:
    """The names under which tools or prompts are shown, with the server and its own name of each.

    A name has its server's before it only where another server has the same."""
    often = Counter(name for entries in listed.values() for name in {str(entry.get("name")) for entry in entries})
    found: dict[str, tuple[str, str]] = {}
    for server, entries in listed.items():
        for entry in entries:
            name = str(entry.get("name"))
            shown = name if often[name] == 1 else f"{_UNFIT.sub('_', server)}_{name}"
            number = 2
            while shown in found or (shown != name and shown in often):
                shown, number = f"{_UNFIT.sub('_', server)}_{number}_{name}", number + 1
            found[shown] = (server, name)
    return found


def shown(listed: Listed, names: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """The entries of all servers, under the names that they have here."""
    here = {own: name for name, own in names.items()}
    found = []
    for server, entries in listed.items():
        for entry in entries:
            name = here[server, str(entry.get("name"))]
            found.append(dict(entry) if entry.get("name") == name else {**entry, "name": name})
    return found


def addressed(listed: Listed, key: str) -> dict[str, str]:
    """Which server has an address, or a template for some: the first that lists it."""
    found: dict[str, str] = {}
    for server, entries in listed.items():
        for entry in entries:
            found.setdefault(str(entry.get(key)), server)
    return found


def distinct(listed: Listed, key: str) -> list[dict[str, Any]]:
    """The entries of all servers, each address once."""
    owners = addressed(listed, key)
    return [
        dict(entry) for server, entries in listed.items() for entry in entries if owners[str(entry.get(key))] == server
    ]


def fitness(template: str, uri: str) -> int:
    """How much of an address a template says in so many characters; -1 where the address cannot come from it."""
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
