"""Session JSONL of the pi coding agent, which OpenClaw keeps too: entries, with messages of role `toolResult`.

Newer files are trees: entries have ids and parents, and the last entry's branch is what counts. A compaction entry
says from which entry on messages are kept, by index or by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text, without_refs
from coatcheck.transcript.formats.values import Path

_ENTRIES: Final = frozenset(
    {"thinking_level_change", "model_change", "compaction", "branch_summary", "custom", "custom_message", "label",
     "session_info"}
)  # fmt: skip
_ROLES: Final = frozenset({"user", "assistant", "toolResult", "bashExecution", "custom", "hookMessage"})
_SENT: Final = ("role", "content", "toolCallId", "toolName", "isError")
_COMPACTED: Final = "The conversation before this point was compacted into this summary:\n\n"
_LEFT: Final = "The conversation came back from another branch, of which this is the summary:\n\n"


class Pi(Format):
    name = "pi"
    opaque = frozenset({"data", "partialJson"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        kind = text(line.get("type"))
        if kind == "message":
            found = line.get("message")
            return isinstance(found, dict) and isinstance(found.get("role"), str)
        if kind == "session":
            return "id" in line and ("cwd" in line or "version" in line)
        return kind in _ENTRIES and "timestamp" in line

    def message(self, line: object) -> Message | None:
        if not isinstance(line, dict):
            return None
        if line.get("type") == "message":
            found = line.get("message")
            return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None
        return line if "type" not in line and text(line.get("role")) in _ROLES else None

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield (() if found is line else ("message",)), found

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        return next((one for one in self.messages(line) if path[: len(one[0])] == one[0]), None)

    def is_shown(self, path: Path) -> bool:
        return path[:2] in (("message", "content"), ("message", "output")) or path[:1] == ("content",)

    def role(self, message: Message) -> str:
        role = text(message.get("role"))
        return {"toolResult": "tool", "bashExecution": "user", "custom": "user", "hookMessage": "user"}.get(role, role)

    def calls(self, message: Message) -> tuple[Call, ...]:
        content = message.get("content")
        if not isinstance(content, list):
            return ()
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), ("content", index))
            for index, one in enumerate(content)
            if isinstance(one, dict) and one.get("type") == "toolCall"
        )

    def results(self, message: Message) -> tuple[Result, ...]:
        if message.get("role") != "toolResult":
            return ()
        name = text(message.get("toolName")) or None
        is_error = message.get("isError") is True
        return (Result(text(message.get("toolCallId")), name, (), ("content",), is_error),)

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        entries = _branch([line for line in lines if isinstance(line, dict)])
        last = max((at for at, one in enumerate(entries) if one.get("type") == "compaction"), default=None)
        sent: list[Message] = []
        if last is not None and compacted:
            sent.append(_words(_COMPACTED + text(entries[last].get("summary"))))
            entries = [*entries[_first_kept(entries, last) : last], *entries[last + 1 :]]
        for entry in entries:
            shown = self._shown(entry)
            if shown is not None:
                sent.append(shown)
        return sent

    def _shown(self, entry: Message) -> Message | None:
        kind = text(entry.get("type"))
        if kind == "branch_summary":
            return _words(_LEFT + text(entry.get("summary")))
        if kind == "custom_message":
            content = entry.get("content")
            return without_refs({"role": "user", "content": content}) if isinstance(content, str | list) else None
        message = self.message(entry)
        if message is None:
            return None
        if message.get("role") == "bashExecution":
            return None if message.get("excludeFromContext") is True else _words(_ran(message))
        return without_refs({key: message[key] for key in _SENT if key in message})


def _branch(entries: list[Message]) -> list[Message]:
    """The entries from the root to the last one; all of them where they have no ids, or a parent is missing."""
    by_id = {one["id"]: one for one in entries if isinstance(one.get("id"), str) and one.get("type") != "session"}
    if not entries or not isinstance(entries[-1].get("id"), str) or "parentId" not in entries[-1]:
        return entries
    chain: list[Message] = []
    at: Message | None = entries[-1]
    while at is not None and len(chain) <= len(entries):
        chain.append(at)
        parent = at.get("parentId")
        if parent is None:
            return chain[::-1]
        at = by_id.get(parent) if isinstance(parent, str) else None
    return entries


def _first_kept(entries: list[Message], last: int) -> int:
    kept_id, index = entries[last].get("firstKeptEntryId"), entries[last].get("firstKeptEntryIndex")
    if isinstance(kept_id, str):
        return next((at for at in range(last) if entries[at].get("id") == kept_id), last)
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index <= last:
        return index
    return last


def _ran(message: Message) -> str:
    said = f"Ran `{text(message.get('command'))}`\n```\n{text(message.get('output'))}\n```"
    code: Any = message.get("exitCode")
    return said if code in (0, None) else f"{said}\nIt ended with exit code {code}."


def _words(said: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": said}]}
