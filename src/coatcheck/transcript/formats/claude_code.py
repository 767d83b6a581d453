"""Claude Code's session JSONL: Anthropic messages in envelopes, beside lines of the host's own.

One answer of the model may lie on several lines with the same message id, and results of parallel calls on several
more. A tool's result stands twice: as the model saw it, and as `toolUseResult`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from coatcheck.transcript.formats.anthropic import Anthropic
from coatcheck.transcript.formats.format import Message, text, without_refs
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
        kind = text(line.get("type"))
        if kind in ("user", "assistant", "system"):
            return "uuid" in line and ("parentUuid" in line or "sessionId" in line)
        return kind in _OWN or (kind == "summary" and "leafUuid" in line)

    def message(self, line: object) -> Message | None:
        if not isinstance(line, dict) or text(line.get("type")) not in ("user", "assistant"):
            return None
        found = line.get("message")
        return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield ("message",), found

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        return next((one for one in self.messages(line) if path[: len(one[0])] == one[0]), None)

    def is_shown(self, path: Path) -> bool:
        return path[:2] == ("message", "content")

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """The main conversation since the last compaction: side chains and the host's own errors are left out."""
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
            goes_on = is_answer and answer_id is not None and found.get("id") == answer_id
            # Results of its first calls may stand before the rest of an answer.
            if goes_on and _joins(sent[answer], shown) and all(map(_has_results, sent[answer + 1 :])):
                sent[answer] = _joined(sent[answer], shown)
                continue
            if not is_answer and sent and _joins(sent[-1], shown) and _are_results(sent[-1], shown):
                sent[-1] = _joined(sent[-1], shown)
                continue
            sent.append(shown)
            if is_answer:
                answer, answer_id = len(sent) - 1, found.get("id")
        return sent


def _joins(before: Message, now: Message) -> bool:
    return before["role"] == now["role"] and isinstance(before["content"], list) and isinstance(now["content"], list)


def _joined(before: Message, now: Message) -> Message:
    return {**before, "content": [*before["content"], *now["content"]]}


def _are_results(before: Message, now: Message) -> bool:
    """Whether both are results: of calls that were made together."""
    return _has_results(before) and _has_results(now)


def _has_results(message: Message) -> bool:
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, list):
        return False
    return any(isinstance(one, dict) and one.get("type") == "tool_result" for one in content)
