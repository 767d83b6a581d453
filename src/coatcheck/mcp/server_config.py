"""The upstream servers in a configuration of MCP clients (`mcpServers`).

Commands, URLs and headers come only from there and from the command line, never from a message. `${NAME}`,
`${env:NAME}` and `${NAME:-default}` are replaced by environment variables, so that files need not contain secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from coatcheck.errors import InvalidArgument, MissingExtra
from coatcheck.mcp.process import ProcessServer
from coatcheck.mcp.wire import MAX_MESSAGE, Upstream

_VARIABLE: Final = re.compile(
    r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{(?:input|command|config):[^}]*\}"
)
_NAME: Final = re.compile(r"[^\s\x00-\x1f]{1,64}")
HEADERS: Final = "COATCHECK_PROXY_HEADERS"  # an environment variable
_HTTP: Final = ("http", "streamable-http", "streamableHttp", "streamable_http")


def remote_server(url: str, headers: Mapping[str, str], max_message: int) -> Upstream:
    """Return the server at a URL. Needs the extra `[mcp]`."""
    try:
        from coatcheck.mcp.remote import RemoteServer
    except ImportError as error:
        raise MissingExtra("mcp") from error
    return RemoteServer(url, headers=headers, max_message=max_message)


def configured_servers(whole: object, *, max_message: int = MAX_MESSAGE) -> dict[str, Upstream]:
    """Return the servers of a configuration, by name. Raises `InvalidArgument`."""
    found = whole.get("mcpServers", whole.get("servers")) if isinstance(whole, dict) else None
    if not isinstance(found, dict) or not found:
        raise InvalidArgument(
            "the configuration has no servers", hint='expected {"mcpServers": {"name": {"command": "…"}}}'
        )
    return {
        name: _server(name, entry, max_message)
        for name, entry in found.items()
        if not (isinstance(entry, dict) and entry.get("disabled") is True)
    }


def _server(name: str, entry: object, max_message: int) -> Upstream:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"invalid server name {name[:80]!r}", hint="use 1 to 64 characters without spaces")
    if not isinstance(entry, dict):
        raise InvalidArgument(f"the server {name!r} is not an object")
    command, url = entry.get("command"), entry.get("url", entry.get("httpUrl"))
    if isinstance(command, str) and command and url is None:
        arguments = entry.get("args", [])
        if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            raise InvalidArgument(f"args of {name!r} must be a list of strings")
        cwd = entry.get("cwd")
        return ProcessServer(
            [expanded(command), *map(expanded, arguments)],
            name=name,
            env=_strings(name, "env", entry),
            cwd=expanded(cwd) if isinstance(cwd, str) else None,
            max_message=max_message,
        )
    if isinstance(url, str) and command is None:
        if entry.get("type", "http") not in _HTTP:
            raise InvalidArgument(
                f"the server {name!r} has the unsupported transport {entry['type']!r}",
                hint="use streamable HTTP or a command",
            )
        return remote_server(expanded(url), _strings(name, "headers", entry), max_message)
    raise InvalidArgument(f"the server {name!r} must have either a command or a url")


def parse_header(text: str) -> tuple[str, str]:
    """Parse `Name: value` from a command line."""
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name.strip()):
        raise InvalidArgument(f"invalid header {text[:40]!r}", hint="expected 'Name: value'")
    return name.strip(), expanded(value.strip())


def headers_from_environment() -> list[str]:
    """Return headers from the environment, one per line. A command line is visible to every user of the machine."""
    return [line for line in os.environ.get(HEADERS, "").splitlines() if line.strip()]


def expanded(text: str) -> str:
    """Replace environment variables in a text. One that is not set is an error."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            raise InvalidArgument(
                f"{match[0][:80]} is defined only in the client", hint="use an environment variable: ${NAME}"
            )
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise InvalidArgument(f"the environment variable {match[1]} is not set", hint=f"export {match[1]}=…")
        return found

    return _VARIABLE.sub(value, text)


def _strings(name: str, key: str, entry: Mapping[str, Any]) -> dict[str, str]:
    found = entry.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InvalidArgument(f"{key} of {name!r} must contain only strings")
    return {str(one): expanded(value) for one, value in found.items()}
