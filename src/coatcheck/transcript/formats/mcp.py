"""MCP: results of tools, bare (`CallToolResult`) or in their JSON-RPC envelope, and the requests that they answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text, without_refs
from coatcheck.transcript.formats.values import Path, at


class Mcp(Format):
    name = "mcp"

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        return line.get("jsonrpc") == "2.0" or (_is_result(line) and "role" not in line)

    def message(self, line: object) -> Message | None:
        return line if isinstance(line, dict) and self.is_message(line) else None

    def is_message(self, value: Message) -> bool:
        if value.get("jsonrpc") == "2.0":
            return _is_result(value.get("result")) or value.get("method") == "tools/call"
        return _is_result(value) and "role" not in value

    def role(self, message: Message) -> str:
        return "assistant" if "method" in message else "tool"

    def calls(self, message: Message) -> tuple[Call, ...]:
        if message.get("method") != "tools/call":
            return ()
        return (Call(_id(message), text(at(message, ("params", "name"))), ("params",)),)

    def results(self, message: Message) -> tuple[Result, ...]:
        base: Path = ("result",) if message.get("jsonrpc") == "2.0" else ()
        found: Any = at(message, base)
        if not _is_result(found):
            return ()
        return (Result(_id(message), None, base, (*base, "content"), found.get("isError") is True),)

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        sent = super().for_model(lines, compacted=compacted)
        inner = [one.get("result") for one in sent]
        return [
            {**one, "result": without_refs(found)} if isinstance(found, dict) else one
            for one, found in zip(sent, inner, strict=True)
        ]


def _is_result(value: object) -> bool:
    """Whether this is a tool's result: content blocks, with or without its structured form."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return False
    if "structuredContent" in value or isinstance(value.get("isError"), bool):
        return True
    blocks = value["content"]
    return bool(blocks) and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in blocks)


def _id(message: Message) -> str:
    """Ids of JSON-RPC are strings or numbers."""
    found = message.get("id")
    if isinstance(found, str):
        return found
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else ""
