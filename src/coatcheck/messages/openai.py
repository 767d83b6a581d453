"""OpenAI's formats: chat messages with `tool_calls`, and the items of the Responses API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Final

from coatcheck.messages.cache import Breakpoint
from coatcheck.messages.dialects import NO_RESULT, Dialect, late_text, repeated_text
from coatcheck.messages.formats import Call, Format, ToolResult, is_by_program
from coatcheck.messages.paths import Message, Path, at, members, text

_ROLES: Final = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
)  # a role may be unhashable
_ITEMS: Final = frozenset(
    {"message", "reasoning", "item_reference", "compaction", "image_generation_call",
     "web_search_call", "file_search_call", "code_interpreter_call", "mcp_call", "mcp_list_tools",
     "mcp_approval_request", "mcp_approval_response", "program", "program_output"}
)  # fmt: skip
_NAMED: Final = {
    "computer_call": "computer", "local_shell_call": "local_shell", "shell_call": "shell",
    "apply_patch_call": "apply_patch",
}  # fmt: skip
_CALLS: Final = frozenset({"function_call", "custom_tool_call", *_NAMED})
_OUTPUTS: Final = frozenset(f"{kind}_output" for kind in _CALLS)
_BLANK: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42"
    "mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)
_NO_OUTPUT: Final[dict[str, Message]] = {  # in the shapes that the provider accepts
    "shell_call": {
        "output": [{"stdout": "", "stderr": NO_RESULT, "outcome": {"type": "exit", "exit_code": 1}}]
    },
    "apply_patch_call": {"status": "failed", "output": NO_RESULT},
    "computer_call": {"output": {"type": "computer_screenshot", "image_url": _BLANK}},
}


class OpenAIChat(Format):
    """Chat completions: `tool_calls` of the assistant, and one message of role `tool` for each
    result."""

    name = "openai-chat"
    roles = MappingProxyType({"developer": "system", "function": "tool"})

    def fits(self, line: Message) -> bool:
        role = line.get("role")
        is_paired = isinstance(line.get("tool_calls"), list) or isinstance(
            line.get("tool_call_id"), str
        )
        if is_paired or isinstance(line.get("function_call"), dict):
            return role in _ROLES
        return role in ("tool", "function", "developer")

    def is_message(self, value: Message) -> bool:
        has_body = "content" in value or "tool_calls" in value or "function_call" in value
        return has_body and value.get("role") in _ROLES

    def calls(self, message: Message) -> tuple[Call, ...]:
        found = []
        for path, one in members(message, ("tool_calls",)) if "tool_calls" in message else ():
            name = at(one, ("function", "name")) or at(one, ("custom", "name")) or one.get("name")
            found.append(Call(text(one.get("id")), text(name), path, is_by_program(one)))
        single = message.get("function_call")
        if isinstance(single, dict):
            found.append(Call("", text(single.get("name")), ("function_call",)))
        return tuple(found)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        if text(message.get("role")) not in ("tool", "function"):
            return ()
        name = text(message.get("name")) or None
        is_error = message.get("is_error") is True or message.get("status") == "error"
        return (ToolResult(text(message.get("tool_call_id")), name, (), ("content",), is_error),)


class OpenAIResponses(Format):
    """The Responses API: a list of items, in which calls and outputs of several kinds match by
    `call_id`."""

    name = "openai-responses"
    opaque = frozenset({"action", "results", "outputs", "tools"})

    def fits(self, line: Message) -> bool:
        kind = line.get("type")
        if not isinstance(kind, str):
            return False
        if kind in _CALLS or kind in _OUTPUTS:
            return "call_id" in line
        if kind == "message":
            is_host_line = "message" in line or line.get("role") == "toolResult"
            if not isinstance(line.get("role"), str) or is_host_line:
                return False
            return "stop_reason" not in line  # Anthropic's answers have the same type
        return (
            kind in _ITEMS
            and ("id" in line or "encrypted_content" in line)
            and "timestamp" not in line
        )

    def is_message(self, value: Message) -> bool:
        return self.fits(value) or (
            isinstance(value.get("role"), str) and "content" in value and "type" not in value
        )

    def role(self, message: Message) -> str:
        if text(message.get("type")) in _OUTPUTS:
            return "tool"
        role = text(message.get("role")) or "assistant"
        return "system" if role == "developer" else role

    def calls(self, message: Message) -> tuple[Call, ...]:
        kind = text(message.get("type"))
        if kind not in _CALLS:
            return ()
        name = text(message.get("name")) or _NAMED.get(kind, "")
        return (Call(text(message.get("call_id")), name, (), is_by_program(message)),)

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        kind = text(message.get("type"))
        if kind == "mcp_call" and message.get("output") is not None:
            # call and result in one item, without a call id
            name, is_error = text(message.get("name")) or None, bool(message.get("error"))
            return (ToolResult("", name, (), ("output",), is_error),)
        if kind not in _OUTPUTS:
            return ()
        name = _NAMED.get(kind.removesuffix("_output"))
        is_error = message.get("status") in ("failed", "incomplete")
        call_id, for_program = text(message.get("call_id")), is_by_program(message)
        return (ToolResult(call_id, name, (), ("output",), is_error, for_program),)

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        return {**message, "output": text} if "output" in message else message


class ChatDialect(Dialect):
    """Prompts for chat completions. A text of ours is a user message of its own."""

    name = "openai"
    format = OpenAIChat()

    def _prompt(self, system: str, messages: list[Message], marks: Sequence[Breakpoint]) -> Message:
        lead = [{"role": "system", "content": system}] if system else []
        return {"messages": [*lead, *messages]}

    def end(self, system: str, messages: Sequence[Message]) -> Path | None:
        number = len(messages) + bool(system) - 1
        return ("messages", number) if number >= 0 else None

    def mended(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Put tool messages right after the message with the calls, one for each call."""
        asked: list[str] = []  # ids of calls without a result so far
        strays: list[Message] = []  # late results
        for message in messages:
            if message.get("role") != "tool":
                yield from map(_missing_result, asked)
                yield from strays
                asked = [str(one.get("id")) for _, one in members(message, ("tool_calls",))]
                strays = []
                yield message
                continue
            call_id = str(message.get("tool_call_id"))
            if call_id in asked:
                asked.remove(call_id)
                yield message
            else:
                late = late_text(call_id, message.get("content"))
                strays.append({"role": "user", "content": late})
        yield from map(_missing_result, asked)
        yield from strays


class ResponsesDialect(Dialect):
    """Prompts for the Responses API. A text of ours is a user message of its own."""

    name = "openai-responses"
    format = OpenAIResponses()

    def _prompt(self, system: str, messages: list[Message], marks: Sequence[Breakpoint]) -> Message:
        return {"instructions": system, "input": messages} if system else {"input": messages}

    def is_answer(self, message: Message) -> bool:
        return self.format.role(message) == "assistant"

    def with_texts(self, messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
        contents = ([{"type": "input_text", "text": text}] for text in texts)
        return [*messages, *({"role": "user", "content": content} for content in contents)]

    def end(self, system: str, messages: Sequence[Message]) -> Path | None:
        if messages:
            return ("input", len(messages) - 1)
        return ("instructions",) if system else None

    def tool(self, tool: Any) -> Any:
        described = super().tool(tool)
        inner = described.get("function") if isinstance(described, Mapping) else None
        return {"type": "function", **inner} if isinstance(inner, Mapping) else described

    def mended(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Give every call an output somewhere after it and every output a call; an id is not called
        again before its output."""
        to_come = Counter(_call_id(one) for one in messages if _is_output(one))
        waiting: set[str] = set()
        for item in messages:
            call_id = _call_id(item)
            if _is_output(item):
                to_come[call_id] -= 1
                late = {"role": "user", "content": late_text(call_id, item.get("output"))}
                yield item if call_id in waiting else late
                waiting.discard(call_id)
                continue
            call = next(iter(self.format.calls(item)), None)
            if call is None:
                yield item
            elif call_id in waiting:
                arguments = item.get("arguments", item.get("input", item.get("action")))
                yield {"role": "user", "content": repeated_text(call_id, call.name, arguments)}
            elif to_come[call_id]:
                waiting.add(call_id)
                yield item
            else:
                yield item
                yield from _missing_output(item["type"], call_id)


def _missing_result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}


def _missing_output(kind: str, call_id: str) -> Iterator[Message]:
    """Yield a placeholder for the output of a call of this kind."""
    missing = deepcopy(_NO_OUTPUT.get(kind, {"output": NO_RESULT}))
    yield {"type": f"{kind}_output", "call_id": call_id, **missing}
    if kind == "computer_call":
        note = f"The screenshot of the call {call_id} is blank. {NO_RESULT}"
        yield {"role": "user", "content": note}


def _is_output(item: Message) -> bool:
    return text(item.get("type")) in _OUTPUTS


def _call_id(item: Message) -> str:
    """Return the id that pairs a call with its output. A local shell may use another key."""
    is_local = item.get("type") == "local_shell_call_output" and "call_id" not in item
    return str(item.get("id" if is_local else "call_id"))
