"""What requests over HTTP say in their headers from 2026-07-28 on, for those who route them without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import PROTOCOL_VERSION_META_KEY

from coatcheck.mcp.wire import Message

VERSION: Final = MCP_PROTOCOL_VERSION_HEADER


class Routing:
    """Knows which arguments a server's tools want as headers, once they were listed."""

    def __init__(self) -> None:
        self._params: dict[str, Mapping[tuple[str, ...], str]] = {}

    def listed(self, message: Message, result: Mapping[str, Any]) -> None:
        """Learn from the answer to `tools/list`."""
        tools = result.get("tools")
        if not isinstance(tools, list) or _version_of(message) is None:
            return
        for tool in tools:
            schema = tool.get("inputSchema") if isinstance(tool, dict) else None
            if isinstance(schema, dict) and find_invalid_x_mcp_header(schema) is None:
                self._params[str(tool.get("name"))] = x_mcp_header_map(schema)

    def headers(self, message: Message) -> dict[str, str]:
        """Those of one message; none where it is of an older version."""
        version = _version_of(message)
        if version is None or message.method is None:
            return {}
        headers = {VERSION: version, MCP_METHOD_HEADER: message.method}
        name = message.params.get(NAME_BEARING_METHODS.get(message.method, ""))
        if isinstance(name, str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        arguments = message.params.get("arguments")
        if message.method == "tools/call" and isinstance(arguments, dict):
            headers |= mcp_param_headers(self._params.get(str(name), {}), arguments)
        return headers


def _version_of(message: Message) -> str | None:
    meta = message.params.get("_meta")
    version = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
    return version if isinstance(version, str) and version.isascii() and version.isprintable() else None
