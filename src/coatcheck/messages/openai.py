"""OpenAI's formats: chat messages with `tool_calls`, and the items of the Responses API."""

from __future__ import annotations

from typing import Final

from coatcheck.messages.message import Call, Format, Message, ToolResult, text
from coatcheck.messages.paths import at

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_ITEMS: Final = frozenset(
    {"message", "reasoning", "item_reference", "compaction", "image_generation_call", "web_search_call",
     "file_search_call", "code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request",
     "mcp_approval_response"}
)  # fmt: skip
_NAMED: Final = {
    "computer_call": "computer", "local_shell_call": "local_shell", "shell_call": "shell",
    "apply_patch_call": "apply_patch",
}  # fmt: skip
_CALLS: Final = frozenset({"function_call", "custom_tool_call", *_NAMED})
_OUTPUTS: Final = frozenset(f"{kind}_output" for kind in _CALLS)


class OpenAIChat(Format):
    """Chat completions: `tool_calls` of the assistant, and one message of role `tool` for each result."""

    name = "openai-chat"
    required = frozenset({"role"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict) or text(line.get("role")) not in _ROLES:
            return False
        if isinstance(line.get("tool_calls"), list) or isinstance(line.get("tool_call_id"), str):
            return True
        if isinstance(line.get("function_call"), dict):
            return True
        return text(line.get("role")) in ("tool", "function", "developer")

    def is_message(self, value: Message) -> bool:
        has_body = "content" in value or "tool_calls" in value or "function_call" in value
        return has_body and text(value.get("role")) in _ROLES

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

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        if text(message.get("role")) not in ("tool", "function"):
            return ()
        name = message.get("name")
        is_error = message.get("is_error") is True or message.get("status") == "error"
        return (ToolResult(text(message.get("tool_call_id")), text(name) or None, (), ("content",), is_error),)


class OpenAIResponses(Format):
    """The Responses API: a list of items, in which calls and outputs of several kinds match by `call_id`."""

    name = "openai-responses"
    required = frozenset({"type"})
    opaque = frozenset({"action", "results", "outputs", "tools"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        kind = text(line.get("type"))
        if kind in _CALLS or kind in _OUTPUTS:
            return "call_id" in line
        if kind == "message":
            if not isinstance(line.get("role"), str) or "message" in line or line.get("role") == "toolResult":
                return False
            return "stop_reason" not in line  # Anthropic's answers have the same type
        return kind in _ITEMS and ("id" in line or "encrypted_content" in line) and "timestamp" not in line

    def is_message(self, value: Message) -> bool:
        return self.fits(value) or (isinstance(value.get("role"), str) and "content" in value and "type" not in value)

    def role(self, message: Message) -> str:
        kind = text(message.get("type"))
        if kind in _OUTPUTS:
            return "tool"
        role = text(message.get("role")) or "assistant"
        return "system" if role == "developer" else role

    def calls(self, message: Message) -> tuple[Call, ...]:
        kind = text(message.get("type"))
        if kind not in _CALLS:
            return ()
        name = text(message.get("name")) or _NAMED.get(kind, "")
        return (Call(text(message.get("call_id")), name, ()),)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        kind = text(message.get("type"))
        if kind == "mcp_call" and message.get("output") is not None:  # call and result in one item, without a call id
            return (ToolResult("", text(message.get("name")) or None, (), ("output",), bool(message.get("error"))),)
        if kind not in _OUTPUTS:
            return ()
        name = _NAMED.get(kind.removesuffix("_output"))
        is_error = message.get("status") in ("failed", "incomplete")
        return (ToolResult(text(message.get("call_id")), name, (), ("output",), is_error),)

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        return {**message, "output": text} if "output" in message else message
