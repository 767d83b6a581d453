"""Anthropic messages: `tool_use` blocks of the assistant, answered by `tool_result` blocks of the next user message."""

from __future__ import annotations

from typing import Any, Final

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text

_CALLS: Final = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_OWN: Final = _CALLS | {"thinking", "redacted_thinking", "search_result"}


class Anthropic(Format):
    name = "anthropic"

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict) or text(line.get("role")) not in ("user", "assistant"):
            return False
        content = line.get("content")
        return isinstance(content, list) and any(isinstance(one, dict) and _is_own(one) for one in content)

    def is_message(self, value: Message) -> bool:
        spoken = text(value.get("role")) in ("user", "assistant", "system")
        return spoken and isinstance(value.get("content"), str | list)

    def calls(self, message: Message) -> tuple[Call, ...]:
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), ("content", index))
            for index, one in _blocks(message)
            if text(one.get("type")) in _CALLS
        )

    def results(self, message: Message) -> tuple[Result, ...]:
        return tuple(
            Result(
                text(one.get("tool_use_id")),
                None,
                ("content", index),
                ("content", index, "content"),
                one.get("is_error") is True or _failed(one.get("content")),
            )
            for index, one in _blocks(message)
            if "tool_use_id" in one and str(one.get("type")).endswith("tool_result")
        )


def _is_own(block: dict[str, Any]) -> bool:
    kind = text(block.get("type"))
    if kind in _OWN or (kind.endswith("tool_result") and "tool_use_id" in block):
        return True
    return kind in ("image", "document") and isinstance(block.get("source"), dict)


def _blocks(message: Message) -> list[tuple[int, dict[str, Any]]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [(index, one) for index, one in enumerate(content) if isinstance(one, dict)]


def _failed(content: object) -> bool:
    """A server's own tool reports its failure as the content: `{"type": "web_search_tool_result_error", …}`."""
    return isinstance(content, dict) and str(content.get("type")).endswith("_error")
