"""Anthropic's formats: the Messages API, and Claude Code's session files.

`tool_use` blocks of the assistant are answered by `tool_result` blocks of the next user message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from coatcheck.messages.message import Call, Format, Message, SessionLines, ToolResult, in_line, text, without_refs
from coatcheck.messages.paths import Path

_CALLS: Final = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_BLOCKS: Final = _CALLS | _THINKING | {"search_result"}
_CLAUDE_CODE_LINES: Final = frozenset(
    {"file-history-snapshot", "queue-operation", "progress", "pr-link", "attachment", "last-prompt", "custom-title",
     "ai-title", "agent-name", "permission-mode"}
)  # fmt: skip
_BOUNDARY: Final = "compact_boundary"


class AnthropicMessages(Format):
    """Messages of the Messages API."""

    name = "anthropic"
    required = frozenset({"role", "content"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict) or text(line.get("role")) not in ("user", "assistant"):
            return False
        content = line.get("content")
        if line.get("type") == "message" and "stop_reason" in line:
            return isinstance(content, list)
        return isinstance(content, list) and any(isinstance(one, dict) and _is_own(one) for one in content)

    def is_message(self, value: Message) -> bool:
        has_role = text(value.get("role")) in ("user", "assistant", "system")
        return has_role and isinstance(value.get("content"), str | list)

    def calls(self, message: Message) -> tuple[Call, ...]:
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), ("content", index))
            for index, one in _blocks(message)
            if text(one.get("type")) in _CALLS
        )

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        return tuple(
            ToolResult(
                text(one.get("tool_use_id")),
                None,
                ("content", index),
                ("content", index, "content"),
                one.get("is_error") is True or _failed(one.get("content")),
            )
            for index, one in _blocks(message)
            if "tool_use_id" in one and str(one.get("type")).endswith("tool_result")
        )

    def without_thinking(self, message: Message) -> Message | None:
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, list):
            return None
        kept = [one for one in content if not (isinstance(one, dict) and one.get("type") in _THINKING)]
        return {**message, "content": kept} if kept and len(kept) < len(content) else None


class ClaudeCode(SessionLines, AnthropicMessages):
    """Claude Code's session JSONL: Anthropic messages in envelopes, beside the host's own lines.

    One answer of the model may span several lines with the same message id, and so may the results of parallel calls.
    A tool result is there twice: as the model saw it, and as `toolUseResult`."""

    name = "claude-code"
    required = frozenset({"type"})
    opaque = frozenset({"mcpMeta", "hookInfos", "attachment", "todos", "structuredPatch"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        kind = text(line.get("type"))
        if self.message(line) is not None and "role" not in line:
            return True
        if kind in ("user", "assistant", "system"):
            return "uuid" in line and ("parentUuid" in line or "sessionId" in line)
        return kind in _CLAUDE_CODE_LINES or (kind == "summary" and "leafUuid" in line)

    def message(self, line: object) -> Message | None:
        if not isinstance(line, dict) or text(line.get("type")) not in ("user", "assistant"):
            return None
        found = line.get("message")
        return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None

    def is_shown(self, path: Path) -> bool:
        return in_line(path)[:2] == ("message", "content")

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """Return the main conversation since the last compaction, without side chains and the host's own errors."""
        sent: list[Message] = []
        answer, answer_id = -1, None  # the model's last message, and its id
        for line in lines:
            if not isinstance(line, dict):
                continue
            if line.get("subtype") == _BOUNDARY and line.get("type") == "system":
                sent, answer_id = [] if compacted else sent, None
                continue
            found = self.message(line)
            if found is None or line.get("isSidechain") is True or line.get("isApiErrorMessage") is True:
                continue
            shown = without_refs({"role": found["role"], "content": found.get("content")})
            is_answer = found["role"] == "assistant"
            continues = is_answer and answer_id is not None and found.get("id") == answer_id
            # Results of its first calls may come before the rest of an answer.
            if continues and _can_join(sent[answer], shown) and all(map(_has_results, sent[answer + 1 :])):
                sent[answer] = _joined(sent[answer], shown)
                continue
            if not is_answer and sent and _can_join(sent[-1], shown) and _has_results(sent[-1]) and _has_results(shown):
                sent[-1] = _joined(sent[-1], shown)  # results of parallel calls
                continue
            sent.append(shown)
            if is_answer:
                answer, answer_id = len(sent) - 1, found.get("id")
        return sent


def _is_own(block: dict[str, Any]) -> bool:
    """Whether only Anthropic has blocks like this one."""
    kind = text(block.get("type"))
    if kind in _BLOCKS or (kind.endswith("tool_result") and "tool_use_id" in block):
        return True
    return kind in ("image", "document") and isinstance(block.get("source"), dict)


def _blocks(message: Message) -> Iterator[tuple[int, dict[str, Any]]]:
    content = message.get("content")
    for index, one in enumerate(content if isinstance(content, list) else ()):
        if isinstance(one, dict):
            yield index, one


def _failed(content: object) -> bool:
    """Whether a provider's own tool failed: its content is then `{"type": "web_search_tool_result_error", …}`."""
    return isinstance(content, dict) and str(content.get("type")).endswith("_error")


def _can_join(before: Message, now: Message) -> bool:
    return before["role"] == now["role"] and isinstance(before["content"], list) and isinstance(now["content"], list)


def _joined(before: Message, now: Message) -> Message:
    return {**before, "content": [*before["content"], *now["content"]]}


def _has_results(message: Message) -> bool:
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, list):
        return False
    return any(isinstance(one, dict) and one.get("type") == "tool_result" for one in content)
