"""OpenAI Responses: a list of items, in which calls and outputs of several kinds match by `call_id`."""

from __future__ import annotations

from typing import Final

from coatcheck.transcript.formats.format import Call, Format, Message, Result, text

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


class OpenAIResponses(Format):
    name = "openai-responses"
    opaque = frozenset({"action", "results", "outputs", "tools"})

    def fits(self, line: object) -> bool:
        if not isinstance(line, dict):
            return False
        kind = text(line.get("type"))
        if kind in _CALLS or kind in _OUTPUTS:
            return "call_id" in line
        if kind == "message":
            return isinstance(line.get("role"), str) and "message" not in line and line.get("role") != "toolResult"
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
        name = text(message.get("name")) or _NAMED.get(str(kind), "")
        return (Call(text(message.get("call_id")), name, ()),)

    def results(self, message: Message) -> tuple[Result, ...]:
        kind = text(message.get("type"))
        if kind == "mcp_call" and message.get("output") is not None:  # call and result in one item: it has no call id
            return (Result("", text(message.get("name")) or None, (), ("output",), bool(message.get("error"))),)
        if kind not in _OUTPUTS:
            return ()
        name = _NAMED.get(str(kind).removesuffix("_output"))
        is_error = message.get("status") in ("failed", "incomplete")
        return (Result(text(message.get("call_id")), name, (), ("output",), is_error),)

    def with_content(self, message: Message, result: Result, text: str) -> Message:
        return {**message, "output": text} if "output" in message else message
