"""The servers that MCP clients name in their configuration (`mcpServers`), and what stands behind each name.

Commands, addresses and headers come from there and the command line alone, never from the wire. `${NAME}`,
`${env:NAME}` and `${NAME:-otherwise}` stand for variables of the environment, so that no secret need be in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from coatcheck.errors import InvalidArgument, MissingExtra
from coatcheck.mcp.child import Child
from coatcheck.mcp.upstreams import Upstream
from coatcheck.mcp.wire import MAX_MESSAGE

_VARIABLE: Final = re.compile(
    r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{(?:input|command|config):[^}]*\}"
)
_NAME: Final = re.compile(r"[^\s\x00-\x1f]{1,64}")
HEADERS: Final = "COATCHECK_PROXY_HEADERS"  # the name of a variable
_HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")


def remote(url: str, headers: Mapping[str, str], max_message: int) -> Upstream:
    """A server by its address. Needs the extra `[mcp]`."""
    try:
        from coatcheck.mcp.remote import Remote
    except ImportError as error:
        raise MissingExtra("mcp") from error
    return Remote(url, headers=headers, max_message=max_message)


def servers(whole: object, *, max_message: int = MAX_MESSAGE) -> dict[str, Upstream]:
    """The servers of a configuration, by name. Raises `InvalidArgument`."""
    found = whole.get("mcpServers", whole.get("servers")) if isinstance(whole, dict) else None
    if not isinstance(found, dict) or not found:
        raise InvalidArgument("it names no servers", hint='{"mcpServers": {"name": {"command": "…"}}}')
    return {
        name: _server(name, entry, max_message)
        for name, entry in found.items()
        if not (isinstance(entry, dict) and entry.get("disabled") is True)
    }


def _server(name: str, entry: object, max_message: int) -> Upstream:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{name[:80]!r} is no name of a server", hint="1 to 64 characters without blanks")
    if not isinstance(entry, dict):
        raise InvalidArgument(f"the server {name!r} is no object")
    command, url = entry.get("command"), entry.get("url", entry.get("httpUrl"))
    if isinstance(command, str) and command and url is None:
        arguments = entry.get("args", [])
        if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            raise InvalidArgument(f"args of {name!r} is no list of strings")
        cwd = entry.get("cwd")
        return Child(
            [expanded(command), *map(expanded, arguments)],
            name=name,
            env=_strings(name, "env", entry),
            cwd=expanded(cwd) if isinstance(cwd, str) else None,
            max_message=max_message,
        )
    if isinstance(url, str) and command is None:
        if entry.get("type", "http") not in _HTTP:
            raise InvalidArgument(
                f"the server {name!r} wants the transport {entry['type']!r}", hint="streamable HTTP, or a command"
            )
        return remote(expanded(url), _strings(name, "headers", entry), max_message)
    raise InvalidArgument(f"the server {name!r} has neither a command nor a url", hint="it needs one of the two")


def header(text: str) -> tuple[str, str]:
    """`Name: value`, as it stands on a command line."""
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name.strip()):
        raise InvalidArgument(f"{text[:40]!r} is no header", hint="'Name: value'")
    return name.strip(), expanded(value.strip())


def headers_of_environment() -> list[str]:
    """Headers that need not stand on a command line, where every user of the machine can read them: one on a line."""
    return [line for line in os.environ.get(HEADERS, "").splitlines() if line.strip()]


def expanded(text: str) -> str:
    """A text with the environment's variables in it. One that is not set is an error: an empty one would mislead."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            raise InvalidArgument(f"only its client knows what {match[0][:80]} is", hint="use a variable: ${NAME}")
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise InvalidArgument(f"the variable {match[1]} is not set", hint=f"export {match[1]}=…")
        return found

    return _VARIABLE.sub(value, text)


def _strings(name: str, key: str, entry: Mapping[str, Any]) -> dict[str, str]:
    found = entry.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InvalidArgument(f"{key} of {name!r} does not hold strings alone")
    return {str(one): expanded(value) for one, value in found.items()}
