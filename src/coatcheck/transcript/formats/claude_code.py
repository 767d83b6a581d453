"""Claude Code's session JSONL: Anthropic messages in envelopes, beside lines of the host's own.

One answer of the model may lie on several lines with the same message id, and results of parallel calls on several
more. A tool's result stands twice: as the model saw it, and as `toolUseResult`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from coatcheck.transcript.formats.anthropic import Anthropic
from coatcheck.transcript.formats.format import Message, without_refs
from coatcheck.transcript.formats.values import Path

_OWN: Final = frozenset(
    {"file-history-snapshot", "queue-operation", "progress", "pr-link", "attachment", "last-prompt", "custom-title",
     "ai-title", "agent-name", "permission-mode"}
)  # fmt: skip
_BOUNDARY: Final = "compact_boundary"


class ClaudeCode(Anthropic):
    name = "claude-code"
    opaque = frozenset({"mcpMeta", "hookInfos", "attachment", "todos", "structuredPatch"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        kind = line.get("type")
        if kind in ("user", "assistant", "system"):
            return "uuid" in line and ("parentUuid" in line or "sessionId" in line)
        return kind in _OWN or (kind == "summary" and "leafUuid" in line)

    def message(self, line: object) -> Message | None:
        if not isinstance(line, dict) or line.get("type") not in ("user", "assistant"):
            return None
        found = line.get("message")
        return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield ("message",), found

    def is_shown(self, path: Path) -> bool:
        return path[:2] == ("message", "content")

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """The main conversation since the last compaction: side chains and the host's own errors are left out."""
        sent: list[Message] = []
        last_id: object = None
        for line in lines:
            if not isinstance(line, dict):
                continue
            if line.get("subtype") == _BOUNDARY and line.get("type") == "system":
                sent, last_id = [] if compacted else sent, None
                continue
            found = self.message(line)
            if found is None or line.get("isSidechain") is True or line.get("isApiErrorMessage") is True:
                continue
            shown = without_refs({"role": found["role"], "content": found.get("content")})
            message_id = found.get("id") if found["role"] == "assistant" else None
            if sent and _continues(sent[-1], shown, last_id, message_id):
                sent[-1] = {**sent[-1], "content": [*sent[-1]["content"], *shown["content"]]}
            else:
                sent.append(shown)
            last_id = message_id
        return sent


def _continues(before: Message, now: Message, last_id: object, now_id: object) -> bool:
    """Whether two lines are one message: parts of one answer, or results of calls that were made together."""
    if before["role"] != now["role"] or not isinstance(now["content"], list):
        return False
    if not isinstance(before["content"], list):
        return False
    if now["role"] == "assistant":
        return now_id is not None and now_id == last_id
    return _has_results(before["content"]) and _has_results(now["content"])


def _has_results(content: list[Any]) -> bool:
    return any(isinstance(one, dict) and one.get("type") == "tool_result" for one in content)
