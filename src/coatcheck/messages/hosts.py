"""Formats of hosts: LangChain messages, session files of pi and OpenClaw, and MCP tool results.

`for_provider` converts messages of pi, OpenClaw and Claude Code: bare messages, or lines of a
session file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from coatcheck.checks import LARGEST, is_whole
from coatcheck.errors import InvalidArgument
from coatcheck.messages.anthropic import ClaudeCode
from coatcheck.messages.content import without_refs
from coatcheck.messages.formats import Call, Format, SessionLines, ToolResult, in_line
from coatcheck.messages.openai import OpenAIResponses
from coatcheck.messages.paths import Message, Path, at, blocks_of, members, replaced, text

_LANGCHAIN_TYPES: Final = frozenset({"human", "ai", "system", "tool", "function", "chat", "remove"})
_LANGCHAIN_ROLES: Final = {"human": "user", "ai": "assistant", "function": "tool"}
_LANGCHAIN_FIELDS: Final = frozenset(
    {"additional_kwargs", "response_metadata", "tool_calls", "tool_call_id", "artifact", "example"}
)
_PI_ENTRIES: Final = frozenset(
    {"thinking_level_change", "model_change", "compaction", "branch_summary", "custom",
     "custom_message", "label", "session_info"}
)  # fmt: skip
_SPEAKERS: Final = frozenset({"user", "assistant"})
_PI_ROLES: Final = {
    "toolResult": "tool",
    "bashExecution": "user",
    "custom": "user",
    "hookMessage": "user",
}
_PI_SENT: Final = ("role", "content", "toolCallId", "toolName", "isError")
_COMPACTED: Final = "The conversation before this point was compacted into this summary:\n\n"
_LEFT_BRANCH: Final = (
    "The conversation came back from another branch, of which this is the summary:\n\n"
)
_PROVIDER_KEYS: Final = frozenset({"type", "tool_calls", "tool_call_id", "function_call"})
_ANTHROPIC_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LONGEST_ID: Final = 40  # OpenAI's limit
_FOREIGN_SIGNATURE: Final = (
    64  # characters: a shorter signature is the name of a field of another provider
)


class LangChain(Format):
    """LangChain messages in all three serialized forms.

    `{"type": "ai", "data": {…}}` (message_to_dict), flat (`model_dump`), and the constructor dumps
    of `dumpd` (`{"lc": 1, "type": "constructor", "id": […, "AIMessage"], "kwargs": {…}}`)."""

    name = "langchain"

    def fits(self, line: Message) -> bool:
        return self.is_message(line)

    def is_message(self, value: Message) -> bool:
        if not isinstance(value.get("type"), str) or _langchain_type(value) not in _LANGCHAIN_TYPES:
            return False
        if value.get("lc") == 1:
            return value.get("type") == "constructor" and isinstance(value.get("kwargs"), dict)
        data = value.get("data")
        if isinstance(data, dict):
            return "content" in data
        return (
            "content" in value and "role" not in value and not _LANGCHAIN_FIELDS.isdisjoint(value)
        )

    def role(self, message: Message) -> str:
        kind = _langchain_type(message)
        if kind == "chat":
            return text(at(message, (*self.body_path(message), "role")))
        return _LANGCHAIN_ROLES.get(kind, kind)

    def calls(self, message: Message) -> tuple[Call, ...]:
        keys = ("tool_calls", "invalid_tool_calls") if _langchain_type(message) == "ai" else ()
        return tuple(
            Call(text(one.get("id")), text(one.get("name")), path)
            for key in keys
            for path, one in members(message, (*self.body_path(message), key))
        )

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        base = self.body_path(message)
        fields = at(message, base)
        if _langchain_type(message) not in ("tool", "function") or not isinstance(fields, dict):
            return ()
        name = text(fields.get("name")) or None
        is_error = fields.get("status") == "error"
        return (
            ToolResult(text(fields.get("tool_call_id")), name, (), (*base, "content"), is_error),
        )

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        return dict(replaced(message, result.content_path, text))

    def user_message(self, text: str, like: Message) -> Message | None:
        if like.get("lc") == 1:
            names = [*like["id"][:-1], "HumanMessage"]
            return {
                "lc": 1,
                "type": "constructor",
                "id": names,
                "kwargs": {"content": text, "type": "human"},
            }
        fields = {
            "content": text,
            "additional_kwargs": {},
            "response_metadata": {},
            "type": "human",
        }
        return {"type": "human", "data": fields} if isinstance(like.get("data"), dict) else fields

    def body_path(self, message: Message) -> Path:
        if message.get("lc") == 1 and isinstance(message.get("kwargs"), dict):
            return ("kwargs",)
        return ("data",) if isinstance(message.get("data"), dict) else ()


class Pi(SessionLines):
    """Session JSONL of the pi coding agent, which OpenClaw uses too: entries, with messages of role
    `toolResult`.

    Newer files are trees: entries have ids and parents, and the branch of the last entry counts. A
    compaction entry names the first entry that is kept, by index or by id."""

    name = "pi"
    envelopes = frozenset({"message"})
    new_envelope = "message"
    opaque = frozenset({"data", "partialJson"})
    roles = MappingProxyType(_PI_ROLES)
    call_types = frozenset({"toolCall"})

    def fits(self, line: Message) -> bool:
        if "type" not in line:
            return _is_bare_pi(line)
        kind = text(line.get("type"))
        if kind == "message":
            return isinstance(at(line, ("message", "role")), str)
        if kind == "session":
            return "id" in line and ("cwd" in line or "version" in line)
        return kind in _PI_ENTRIES and "timestamp" in line

    def message(self, line: object) -> Message | None:
        if isinstance(line, dict) and "type" not in line:
            role = text(line.get("role"))
            return line if role in _SPEAKERS or role in _PI_ROLES else None
        return super().message(line)

    def is_shown(self, path: Path) -> bool:
        path = in_line(path)
        return path[:2] in (("message", "content"), ("message", "output")) or path[:1] in (
            ("content",),
            ("output",),
        )

    def details_path(self, line: object, path: Path) -> Path | None:
        base, message = self.message_around(line, path) or ((), {})
        is_content = self.results(message) and path[len(base) : len(base) + 1] == ("content",)
        return (*base, "details") if is_content else None

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
        entries = branch([line for line in lines if isinstance(line, dict)])
        last = max(
            (number for number, one in enumerate(entries) if one.get("type") == "compaction"),
            default=None,
        )
        sent: list[Message] = []
        if last is not None and compacted:
            sent.append(_user_text(_COMPACTED + text(entries[last].get("summary"))))
            entries = [*entries[_first_kept(entries, last) : last], *entries[last + 1 :]]
        return sent + [shown for entry in entries if (shown := self.shown(entry)) is not None]

    def shown(self, entry: Message) -> Message | None:
        """Return the message that a model is sent for an entry or a bare message, if there is
        one."""
        kind = text(entry.get("type"))
        if kind == "branch_summary":
            return _user_text(_LEFT_BRANCH + text(entry.get("summary")))
        if kind == "custom_message":
            content = entry.get("content")
            if not isinstance(content, str | list):
                return None
            return without_refs({"role": "user", "content": content})
        message = self.message(entry)
        if message is None:
            return None
        if message.get("role") == "bashExecution":
            is_hidden = message.get("excludeFromContext") is True
            return None if is_hidden else _user_text(_command_text(message))
        return without_refs({key: message[key] for key in _PI_SENT if key in message})


def _is_bare_pi(message: Message) -> bool:
    """Whether a message without an envelope is in a form that only pi writes."""
    role, content = message.get("role"), message.get("content")
    if role == "bashExecution" or (role == "toolResult" and "toolCallId" in message):
        return True
    if not isinstance(content, list) or role not in (*_PI_ROLES, *_SPEAKERS):
        return False
    return any(isinstance(one, dict) and one.get("type") == "toolCall" for one in content)


class Mcp(Format):
    """Tool results of MCP, bare (`CallToolResult`) or in their JSON-RPC envelope, and the requests
    for them."""

    name = "mcp"

    def fits(self, line: Message) -> bool:
        return line.get("jsonrpc") == "2.0" or self.is_message(line)

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
        base = self.body_path(message)
        found: Any = at(message, base)
        if not _is_mcp_result(found):
            return ()
        return (
            ToolResult(
                _rpc_id(message), None, base, (*base, "content"), found.get("isError") is True
            ),
        )

    def user_message(self, text: str, like: Message) -> Message | None:
        return None

    def body_path(self, message: Message) -> Path:
        is_response = message.get("jsonrpc") == "2.0" and isinstance(message.get("result"), dict)
        return ("result",) if is_response else ()


def _langchain_type(message: Message) -> str:
    kind = text(at(message, ("id", -1)) if message.get("lc") == 1 else message.get("type"))
    name = kind.removesuffix("Chunk")  # of a class, such as AIMessageChunk
    return name.removesuffix("Message").lower() if name.endswith("Message") else kind


def branch(entries: list[Message]) -> list[Message]:
    """The entries from the root to the last one; all of them if they have no ids, or a parent is
    missing."""
    by_id = {
        one["id"]: one
        for one in entries
        if isinstance(one.get("id"), str) and one.get("type") != "session"
    }
    if not entries or not isinstance(entries[-1].get("id"), str) or "parentId" not in entries[-1]:
        return entries
    chain = [entries[-1]]
    while (parent := chain[-1].get("parentId")) is not None:
        if not isinstance(parent, str) or parent not in by_id or len(chain) > len(entries):
            return entries
        chain.append(by_id[parent])
    return chain[::-1]


def _first_kept(entries: list[Message], last: int) -> int:
    kept_id, index = entries[last].get("firstKeptEntryId"), entries[last].get("firstKeptEntryIndex")
    if isinstance(kept_id, str):
        return next(
            (number for number in range(last) if entries[number].get("id") == kept_id), last
        )
    return index if is_whole(index) and index <= last else last


def _command_text(message: Message) -> str:
    """A command that the user ran, with its output, as it is shown to the model."""
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
    return bool(blocks) and all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in blocks
    )


def _rpc_id(message: Message) -> str:
    """The JSON-RPC id, a string or a number, as a string."""
    found = message.get("id")
    return str(found) if isinstance(found, str) or is_whole(found, -LARGEST) else ""


_PI: Final = Pi()
_CLAUDE_CODE: Final = ClaudeCode()
_ITEMS: Final = OpenAIResponses()


def for_provider(messages: Sequence[Any], provider: str) -> list[Any]:
    """Convert messages of a host to the provider's format. Other messages are returned as the same
    objects. Lines of a session file give what the host would send; messages may come before them.

    Raises `InvalidArgument` for lines of Claude Code with a provider other than Anthropic."""
    given = _without_lines(messages, provider)
    if any(_is_pi(one, provider) for one in given):
        return list(_converted(given, provider))
    return given


def _without_lines(messages: Sequence[Any], provider: str) -> list[Any]:
    """Return the messages, with what the host would send in place of lines of a session file."""
    first = next((at for at, one in enumerate(messages) if _is_line(one)), len(messages))
    lines = [one for one in messages[first:] if isinstance(one, dict) and "role" not in one]
    if any(map(_PI.message, lines)):
        return [*messages[:first], *_PI.for_model(messages[first:])]
    if any(map(_CLAUDE_CODE.message, lines)):
        if provider != "anthropic":
            raise InvalidArgument(
                f"lines of Claude Code are in Anthropic's format, but the provider is {provider}",
                hint='use provider="anthropic", or convert the messages first',
            )
        return [*messages[:first], *_CLAUDE_CODE.for_model(messages[first:])]
    if provider == "anthropic":  # which refuses the other fields of its own answers
        return [_bare_answer(one) if _is_answer(one) else one for one in messages]
    return list(messages)


def _bare_answer(message: Message) -> Message:
    return {"role": message["role"], "content": message.get("content")}


def _is_line(value: Any) -> bool:
    """Whether this may be a line of a session file, and is not a provider's message or item."""
    return isinstance(value, dict) and "role" not in value and not _ITEMS.fits(value)


def _is_answer(message: Any) -> bool:
    """Whether this is an answer as Anthropic's API returns it and Claude Code keeps it."""
    return (
        isinstance(message, dict)
        and message.get("type") == "message"
        and message.get("role") == "assistant"
    )


def _is_pi(message: Any, provider: str) -> bool:
    """Whether a message is in a form that only pi writes and this provider does not accept."""
    if not _may_be_pi(message):
        return False
    content = message.get("content")
    if isinstance(content, list) and any(_is_pi_block(one, provider) for one in content):
        return True
    if message["role"] == "assistant":
        return "stopReason" in message and "api" in message
    return message["role"] in _PI_ROLES or set(message) == {"role", "content", "timestamp"}


def _is_pi_block(block: object, provider: str) -> bool:
    if not isinstance(block, Mapping):
        return False
    kind = block.get("type")
    if kind == "toolCall" or "thinkingSignature" in block:
        return True
    if kind == "image" and "mimeType" in block:
        return True
    return kind == "text" and provider == "openai-responses"


def _may_be_pi(message: Any) -> bool:
    if not isinstance(message, Mapping) or not _PROVIDER_KEYS.isdisjoint(message):
        return False
    role = message.get("role")
    return isinstance(role, str) and (role in _PI_ROLES or role in _SPEAKERS)


def _converted(messages: Sequence[Any], provider: str) -> Iterator[Any]:
    """Yield messages of pi in the provider's format. A result in OpenAI's chat may only contain
    text, so the images of results follow the last one in a message of the user."""
    images: list[Message] = []
    for given in messages:
        is_pi = _may_be_pi(given)
        message = _PI.shown(dict(given)) if is_pi else given
        if message is None:
            continue
        if is_pi and _PI.role(message) == "tool":
            parts = _parts(message, "tool", provider)
            images += _images(parts, provider)
            yield _result(message, parts, provider, has_images=bool(images))
            continue
        if images:
            yield {"role": "user", "content": images}
            images = []
        if is_pi:
            yield from _spoken(message, provider)
        else:
            yield message
    if images:
        yield {"role": "user", "content": images}


def _images(parts: Sequence[Message], provider: str) -> list[Message]:
    """Return the parts of a result that OpenAI's chat accepts only in a message of the user."""
    return [one for one in parts if provider == "openai" and one.get("type") != "text"]


def _parts(message: Message, role: str, provider: str) -> list[Message]:
    """Return the blocks of a message of pi that the provider accepts, in its format."""
    blocks = [one for one in blocks_of(message) if isinstance(one, Mapping)]
    parts = [_part(one, role, provider) for one in blocks]
    return [one for one in parts if one is not None]


def _spoken(message: Message, provider: str) -> Iterator[Message]:
    """Yield a message of the user or the assistant in pi's format as messages, or items, of the
    provider."""
    if isinstance(message.get("content"), str):
        yield message
        return
    role = _PI.role(message)
    parts = _parts(message, role, provider)
    if provider == "openai-responses":
        yield from _items(role, parts)
    elif provider == "openai" and role == "assistant":
        texts = [one for one in parts if one.get("type") == "text"]
        calls = [one for one in parts if one.get("type") == "function"]
        if calls:
            yield {"role": role, "content": texts or None, "tool_calls": calls}
        elif texts:
            yield {"role": role, "content": texts}
    elif parts:
        yield {"role": role, "content": parts}


def _items(role: str, parts: Sequence[Message]) -> Iterator[Message]:
    """Yield items of the Responses API: calls and reasoning by themselves, and each run of other
    parts as one message."""
    for is_item, run in groupby(
        parts, key=lambda one: one.get("type") in ("function_call", "reasoning")
    ):
        if is_item:
            yield from run
        else:
            yield {"role": role, "content": list(run)}


def _result(message: Message, parts: list[Message], provider: str, *, has_images: bool) -> Message:
    """Return a result of pi in the provider's format, with these parts as its content."""
    call_id = _call_id(message, provider)
    if provider == "anthropic":
        result: Message = {"type": "tool_result", "tool_use_id": call_id, "content": parts}
        if message.get("isError") is True:
            result["is_error"] = True
        return {"role": "user", "content": [result]}
    kind = "text" if provider == "openai" else "input_text"
    texts = [text(one.get("text")) for one in parts if one.get("type") == kind]
    words = "\n".join(texts) or ("(see the image below)" if has_images else "(no output)")
    if provider == "openai":
        return {"role": "tool", "tool_call_id": call_id, "content": words}
    output = words if len(texts) == len(parts) else parts
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _part(block: Mapping[str, Any], role: str, provider: str) -> Message | None:
    """Return a block of pi as a part of the provider's message; None if the provider does not
    accept it. For OpenAI, a call is an entry of `tool_calls` or an item, and thinking may be an
    item."""
    kind = block.get("type")
    if kind == "text":
        return _text_part(block, role, provider)
    if kind == "image" and "mimeType" in block:
        return _image_part(block, provider)
    if kind == "toolCall":
        return _call(block, provider) if role == "assistant" else None
    return _thinking(block, provider) if kind == "thinking" else dict(block)


def _text_part(block: Mapping[str, Any], role: str, provider: str) -> Message | None:
    words = text(block.get("text"))
    if not words or (provider == "anthropic" and not words.strip()):
        return None
    if provider != "openai-responses":
        return {"type": "text", "text": words}
    return {"type": "output_text" if role == "assistant" else "input_text", "text": words}


def _image_part(block: Mapping[str, Any], provider: str) -> Message:
    url = f"data:{block['mimeType']};base64,{block.get('data')}"
    if provider == "openai-responses":
        return {"type": "input_image", "image_url": url}
    if provider == "openai":
        return {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": block["mimeType"], "data": block.get("data")}
    return {"type": "image", "source": source}


def _call(block: Mapping[str, Any], provider: str) -> Message:
    call_id, name, arguments = _call_id(block, provider), block.get("name"), block.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    if provider == "anthropic":
        return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
    function = {
        "name": name,
        "arguments": json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
    }
    if provider == "openai":
        return {"id": call_id, "type": "function", "function": function}
    return {"type": "function_call", "call_id": call_id, **function}


def _thinking(block: Mapping[str, Any], provider: str) -> Message | None:
    """Convert thinking. Its signature is Anthropic's, or a reasoning item of OpenAI's Responses API
    as JSON."""
    signature = text(block.get("thinkingSignature"))
    if provider == "openai-responses" and signature.startswith("{"):
        try:
            item = json.loads(signature)
        except (ValueError, RecursionError):
            return None
        return item if isinstance(item, dict) and item.get("type") == "reasoning" else None
    if provider != "anthropic":
        return None
    if "signature" in block:
        return dict(block)
    if len(signature) < _FOREIGN_SIGNATURE or signature.startswith("{"):
        return None  # from another provider, or incomplete
    if block.get("redacted") is True:
        return {"type": "redacted_thinking", "data": signature}
    return {"type": "thinking", "thinking": block.get("thinking", ""), "signature": signature}


def _call_id(block: Mapping[str, Any], provider: str) -> str:
    """Return the id of a call or a result in a form that the provider accepts. With OpenAI's
    Responses API, pi appends the id of the item."""
    found = text(block.get("toolCallId", block.get("id"))).partition("|")[0]
    is_accepted = len(found) <= _LONGEST_ID
    if provider == "anthropic":
        is_accepted = _ANTHROPIC_ID.fullmatch(found) is not None
    if is_accepted:
        return found
    return "call_" + hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()[:32]
