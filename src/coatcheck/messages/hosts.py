"""Formats of hosts: LangChain messages, session files of pi and OpenClaw, and MCP tool results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from coatcheck.messages.message import Call, Format, Message, SessionLines, ToolResult, in_line, text, without_refs
from coatcheck.messages.paths import REFS_KEY, Path, at, replaced

_LANGCHAIN_TYPES: Final = frozenset({"human", "ai", "system", "tool", "function", "chat", "remove"})
_LANGCHAIN_CLASSES: Final = {
    f"{name}Message{chunk}": kind
    for name, kind in (("Human", "human"), ("AI", "ai"), ("System", "system"), ("Tool", "tool"),
                       ("Function", "function"), ("Chat", "chat"))
    for chunk in ("", "Chunk")
}  # fmt: skip
_LANGCHAIN_ROLES: Final = {"human": "user", "ai": "assistant", "function": "tool"}
_LANGCHAIN_FIELDS: Final = (
    "additional_kwargs", "response_metadata", "tool_calls", "tool_call_id", "artifact", "example",
)  # fmt: skip
_PI_ENTRIES: Final = frozenset(
    {"thinking_level_change", "model_change", "compaction", "branch_summary", "custom", "custom_message", "label",
     "session_info"}
)  # fmt: skip
_PI_ROLES: Final = frozenset({"user", "assistant", "toolResult", "bashExecution", "custom", "hookMessage"})
_PI_SENT: Final = ("role", "content", "toolCallId", "toolName", "isError")
_COMPACTED: Final = "The conversation before this point was compacted into this summary:\n\n"
_LEFT_BRANCH: Final = "The conversation came back from another branch, of which this is the summary:\n\n"


class LangChain(Format):
    """LangChain messages in all three serialized forms.

    `{"type": "ai", "data": {…}}` (message_to_dict), flat (`model_dump`), and the constructor dumps of `dumpd`
    (`{"lc": 1, "type": "constructor", "id": […, "AIMessage"], "kwargs": {…}}`)."""

    name = "langchain"
    required = frozenset({"type"})

    def fits(self, line: object) -> bool:
        return isinstance(line, dict) and self.is_message(line)

    def is_message(self, value: Message) -> bool:
        kind = text(value.get("type"))
        if value.get("lc") == 1 and kind == "constructor":
            names = value.get("id")
            is_class = isinstance(names, list) and names and text(names[-1]) in _LANGCHAIN_CLASSES
            return bool(is_class) and isinstance(value.get("kwargs"), dict)
        if kind not in _LANGCHAIN_TYPES and kind not in _LANGCHAIN_CLASSES:
            return False
        data = value.get("data")
        if isinstance(data, dict):
            return "content" in data
        return "content" in value and "role" not in value and any(key in value for key in _LANGCHAIN_FIELDS)

    def role(self, message: Message) -> str:
        kind = _langchain_type(message)
        if kind == "chat":
            return text(at(message, (*_fields_path(message), "role")))
        return _LANGCHAIN_ROLES.get(kind, kind)

    def calls(self, message: Message) -> tuple[Call, ...]:
        base = _fields_path(message)
        if _langchain_type(message) != "ai":
            return ()
        found: list[Call] = []
        for key in ("tool_calls", "invalid_tool_calls"):
            listed = at(message, (*base, key))
            for index, one in enumerate(listed if isinstance(listed, list) else ()):
                if isinstance(one, dict):
                    found.append(Call(text(one.get("id")), text(one.get("name")), (*base, key, index)))
        return tuple(found)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        if _langchain_type(message) not in ("tool", "function"):
            return ()
        base = _fields_path(message)
        fields = at(message, base)
        if not isinstance(fields, dict):
            return ()
        name = text(fields.get("name")) or None
        is_error = fields.get("status") == "error"
        return (ToolResult(text(fields.get("tool_call_id")), name, (), (*base, "content"), is_error),)

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        return dict(replaced(message, result.content_path, text))

    def user_message(self, text: str, like: Message) -> Message | None:
        if like.get("lc") == 1:
            names = [*like["id"][:-1], "HumanMessage"]
            return {"lc": 1, "type": "constructor", "id": names, "kwargs": {"content": text, "type": "human"}}
        fields = {"content": text, "additional_kwargs": {}, "response_metadata": {}, "type": "human"}
        return {"type": "human", "data": fields} if isinstance(like.get("data"), dict) else fields

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        sent = []
        for line in lines:
            for _, message in self.messages(line):
                base = _fields_path(message)
                fields: Any = at(message, base)
                shown = without_refs(fields) if isinstance(fields, dict) else fields
                plain = {key: value for key, value in message.items() if key != REFS_KEY}
                sent.append(dict(replaced(plain, base, shown)) if base else shown)
        return sent


class Pi(SessionLines):
    """Session JSONL of the pi coding agent, which OpenClaw uses too: entries, with messages of role `toolResult`.

    Newer files are trees: entries have ids and parents, and the branch of the last entry counts. A compaction entry
    names the first entry that is kept, by index or by id."""

    name = "pi"
    opaque = frozenset({"data", "partialJson"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        if "type" not in line:
            is_result = line.get("role") == "toolResult" and "toolCallId" in line
            return is_result or line.get("role") == "bashExecution" or bool(self.message(line) and self.calls(line))
        kind = text(line.get("type"))
        if kind == "message":
            return isinstance(at(line, ("message", "role")), str)
        if kind == "session":
            return "id" in line and ("cwd" in line or "version" in line)
        return kind in _PI_ENTRIES and "timestamp" in line

    def message(self, line: object) -> Message | None:
        if not isinstance(line, dict):
            return None
        if line.get("type") == "message":
            found = line.get("message")
            return found if isinstance(found, dict) and isinstance(found.get("role"), str) else None
        return line if "type" not in line and text(line.get("role")) in _PI_ROLES else None

    def is_shown(self, path: Path) -> bool:
        path = in_line(path)
        return path[:2] in (("message", "content"), ("message", "output")) or path[:1] in (("content",), ("output",))

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

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        if message.get("role") != "toolResult":
            return ()
        name = text(message.get("toolName")) or None
        is_error = message.get("isError") is True
        return (ToolResult(text(message.get("toolCallId")), name, (), ("content",), is_error),)

    def outputs(self, message: Message) -> tuple[ToolResult, ...]:
        is_command = message.get("role") == "bashExecution"
        return (ToolResult("", "bash", (), ("output",)),) if is_command else ()

    def user_message(self, text: str, like: Message) -> Message | None:
        return _user_text(text)

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        entries = _branch([line for line in lines if isinstance(line, dict)])
        last = max((number for number, one in enumerate(entries) if one.get("type") == "compaction"), default=None)
        sent: list[Message] = []
        if last is not None and compacted:
            sent.append(_user_text(_COMPACTED + text(entries[last].get("summary"))))
            entries = [*entries[_first_kept(entries, last) : last], *entries[last + 1 :]]
        return sent + [shown for entry in entries if (shown := self._shown(entry)) is not None]

    def _shown(self, entry: Message) -> Message | None:
        kind = text(entry.get("type"))
        if kind == "branch_summary":
            return _user_text(_LEFT_BRANCH + text(entry.get("summary")))
        if kind == "custom_message":
            content = entry.get("content")
            return without_refs({"role": "user", "content": content}) if isinstance(content, str | list) else None
        message = self.message(entry)
        if message is None:
            return None
        if message.get("role") == "bashExecution":
            return None if message.get("excludeFromContext") is True else _user_text(_command_text(message))
        return without_refs({key: message[key] for key in _PI_SENT if key in message})


class Mcp(Format):
    """Tool results of MCP, bare (`CallToolResult`) or in their JSON-RPC envelope, and the requests for them."""

    name = "mcp"

    def fits(self, line: object) -> bool:
        return isinstance(line, dict) and (line.get("jsonrpc") == "2.0" or self.is_message(line))

    def is_message(self, value: Message) -> bool:
        if value.get("jsonrpc") == "2.0":
            return _is_mcp_result(value.get("result")) or value.get("method") == "tools/call"
        return _is_mcp_result(value) and "role" not in value

    def role(self, message: Message) -> str:
        return "assistant" if "method" in message else "tool"

    def calls(self, message: Message) -> tuple[Call, ...]:
        if message.get("method") != "tools/call":
            return ()
        return (Call(_rpc_id(message), text(at(message, ("params", "name"))), ("params",)),)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        base: Path = ("result",) if message.get("jsonrpc") == "2.0" else ()
        found: Any = at(message, base)
        if not _is_mcp_result(found):
            return ()
        return (ToolResult(_rpc_id(message), None, base, (*base, "content"), found.get("isError") is True),)

    def user_message(self, text: str, like: Message) -> Message | None:
        return None

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        sent = super().for_model(lines, compacted=compacted)
        return [
            {**one, "result": without_refs(one["result"])} if isinstance(one.get("result"), dict) else one
            for one in sent
        ]


def _fields_path(message: Message) -> Path:
    """Where a LangChain message keeps its fields."""
    if message.get("lc") == 1 and isinstance(message.get("kwargs"), dict):
        return ("kwargs",)
    return ("data",) if isinstance(message.get("data"), dict) else ()


def _langchain_type(message: Message) -> str:
    kind = text(message.get("type"))
    if message.get("lc") == 1:
        names = message.get("id")
        kind = text(names[-1]) if isinstance(names, list) and names else ""
    return _LANGCHAIN_CLASSES.get(kind, kind)


def _branch(entries: list[Message]) -> list[Message]:
    """The entries from the root to the last one; all of them if they have no ids, or a parent is missing."""
    by_id = {one["id"]: one for one in entries if isinstance(one.get("id"), str) and one.get("type") != "session"}
    if not entries or not isinstance(entries[-1].get("id"), str) or "parentId" not in entries[-1]:
        return entries
    chain: list[Message] = []
    entry: Message | None = entries[-1]
    while entry is not None and len(chain) <= len(entries):
        chain.append(entry)
        parent = entry.get("parentId")
        if parent is None:
            return chain[::-1]
        entry = by_id.get(parent) if isinstance(parent, str) else None
    return entries


def _first_kept(entries: list[Message], last: int) -> int:
    kept_id, index = entries[last].get("firstKeptEntryId"), entries[last].get("firstKeptEntryIndex")
    if isinstance(kept_id, str):
        return next((number for number in range(last) if entries[number].get("id") == kept_id), last)
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index <= last:
        return index
    return last


def _command_text(message: Message) -> str:
    """A command that the user ran, with its output, as the model is shown it."""
    shown = f"Ran `{text(message.get('command'))}`\n```\n{text(message.get('output'))}\n```"
    code: Any = message.get("exitCode")
    return shown if code in (0, None) else f"{shown}\nIt ended with exit code {code}."


def _user_text(text: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def _is_mcp_result(value: object) -> bool:
    """Whether this is a tool result: content blocks, with or without structured content."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return False
    if "structuredContent" in value or isinstance(value.get("isError"), bool):
        return True
    blocks = value["content"]
    return bool(blocks) and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in blocks)


def _rpc_id(message: Message) -> str:
    """The JSON-RPC id, a string or a number, as a string."""
    found = message.get("id")
    if isinstance(found, str):
        return found
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else ""
