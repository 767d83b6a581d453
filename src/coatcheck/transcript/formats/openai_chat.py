"""OpenAI chat: messages with `tool_calls`, and one message of role `tool` for each result."""

from __future__ import annotations

from typing import Final

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text
from coatcheck.transcript.formats.values import at

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class OpenAIChat(Format):
    name = "openai-chat"

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict) or text(line.get("role")) not in _ROLES:
            return False
        if isinstance(line.get("tool_calls"), list) or isinstance(line.get("tool_call_id"), str):
            return True
        if isinstance(line.get("function_call"), dict):
            return True
        return text(line.get("role")) in ("tool", "function", "developer")

    def is_message(self, value: Message) -> bool:
        says = "content" in value or "tool_calls" in value or "function_call" in value
        return says and text(value.get("role")) in _ROLES

    def role(self, message: Message) -> str:
        role = text(message.get("role"))
        return {"developer": "system", "function": "tool"}.get(role, role)

    def calls(self, message: Message) -> tuple[Call, ...]:
        found = []
        listed = message.get("tool_calls")
        for index, one in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(one, dict):
                name = at(one, ("function", "name")) or at(one, ("custom", "name")) or one.get("name")
                found.append(Call(text(one.get("id")), text(name), ("tool_calls", index)))
        single = message.get("function_call")
        if isinstance(single, dict):
            found.append(Call("", text(single.get("name")), ("function_call",)))
        return tuple(found)

    def results(self, message: Message) -> tuple[Result, ...]:
        if text(message.get("role")) not in ("tool", "function"):
            return ()
        name = message.get("name")
        is_error = message.get("is_error") is True or message.get("status") == "error"
        return (Result(text(message.get("tool_call_id")), text(name) or None, (), ("content",), is_error),)
