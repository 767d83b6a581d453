"""What is in a message: its texts, its attachments, the arguments of its calls, and what a result
may be replaced by."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from coatcheck.externalize.stub import is_stub
from coatcheck.messages.paths import REFS_KEY, Message, Path, at, members, text, with_blocks
from coatcheck.parts import Part, is_known, read, write

if TYPE_CHECKING:
    from coatcheck.messages.formats import Call, ToolResult

_DEEPEST_CALL: Final = 12
_AUTHORS: Final = {"user": "user", "system": "system", "developer": "system"}
_TEXT_RESULTS: Final = frozenset(
    {
        None,
        "tool_result",
        "mcp_tool_result",
        "function_call_output",
        "custom_tool_call_output",
        "mcp_call",
    }
)
_STREAMS: Final = ("stdout", "stderr")
_ARGUMENTS: Final = (
    ("function", "arguments"),
    ("custom", "input"),
    ("arguments",),
    ("input",),
    ("args",),
)
_WITHOUT_DATA: Final = ("text", "input_text", "output_text", "tool_use", "tool_result", "toolCall")
_OUTPUTS: Final = ("tool_result", "function_call_output")


def dumped(value: object) -> str:
    """Return a value as compact JSON, whatever a host put in it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        return f"[{type(value).__name__}]"


def text_of(content: object) -> str:
    """Return what a model reads in content: a string, the texts of blocks, or JSON."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not content or not isinstance(content, list):
        return dumped(content)
    if not all(isinstance(one, str | dict) for one in content):
        return dumped(content)
    return "\n".join(one if isinstance(one, str) else _block_text(one) for one in content)


def _block_text(block: Message) -> str:
    kind, inner = text(block.get("type")), block.get("content")
    if isinstance(inner, list | str) and kind in ("tool_result", "search_result"):
        return text_of(inner)
    part = read(block)
    if not part.has_payload:
        return dumped(block)
    if part.is_encoded:
        return f"[{kind[:40]} of {len(part.encoded):,} characters]"
    return part.text


def plain_text(content: object) -> str | None:
    """Return content that is a string or a single text block as a string, else None."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        block = content[0]
        content = block.get("text") if block.get("type") in ("text", "input_text") else None
    return content if isinstance(content, str) else None


def is_replaceable(message: Message, result: ToolResult) -> bool:
    """Whether a provider accepts a text in place of this result's content. Results of a provider's
    own tools have shapes that cannot be replaced."""
    content = at(message, result.content_path)
    if not isinstance(content, list):
        return isinstance(content, str)
    return bool(content) and all(isinstance(one, str) or is_known(one) for one in content)


def text_paths(message: Message, result: ToolResult) -> Iterator[Path]:
    """Yield the paths in a result where the provider accepts text instead: usually its whole
    content. Results of the provider's own tools (searches, code execution) must keep their shape;
    for a shell, the streams may be replaced."""
    content, holder = at(message, result.content_path), at(message, result.path)
    kind = holder.get("type") if isinstance(holder, dict) else None
    if isinstance(content, str) or kind in _TEXT_RESULTS:
        yield result.content_path
    elif kind == "shell_call_output":
        for path, one in members(message, result.content_path):
            yield from ((*path, name) for name in _STREAMS if name in one)


def spoken(message: object) -> tuple[str, list[str]]:
    """Return who wrote a message, "user" or "system", and the texts they wrote, without results of
    tools and data. For anyone else, both are empty."""
    role = message.get("role") if isinstance(message, Mapping) else None
    author = _AUTHORS.get(role) if isinstance(role, str) else None
    if not author or not isinstance(message, Mapping):
        return "", []
    content = message.get("content")
    if isinstance(content, str):
        return author, [content]
    texts: list[str] = []
    for one in content if isinstance(content, list) else ():
        found = one
        if isinstance(one, Mapping) and one.get("type") not in _OUTPUTS:
            found = one.get("text")
        if isinstance(found, str):
            texts.append(found)
    return author, texts


def calls_named(
    value: object, names: Collection[str], depth: int = 0
) -> Iterator[Mapping[str, Any]]:
    """Yield the calls of these tools in a message of any format."""
    if not isinstance(value, Mapping | list) or depth >= _DEEPEST_CALL or not names:
        return
    if isinstance(value, list):
        for one in value:
            yield from calls_named(one, names, depth + 1)
        return
    name = value.get("name")
    if isinstance(name, str) and name in names and ("arguments" in value or "input" in value):
        yield value
        return
    for one in value.values():
        yield from calls_named(one, names, depth + 1)


def arguments_of(message: Message, call: Call) -> tuple[Path, Any] | None:
    """Return the path of a call's arguments and their value: an object, or its JSON. None if it has
    none."""
    for path in ((*call.path, *path) for path in _ARGUMENTS):
        found = at(message, path)
        if isinstance(found, dict | list | str) and found:
            return path, found
    return None


def attachments(message: Message) -> Iterator[tuple[Path, Part]]:
    """Yield the base64 images and documents in a message's own content, each with its path."""
    for path, one in members(message):
        part = read(one)
        if part.is_encoded:
            yield path, part


def without_refs(message: Message) -> Message:
    """Return a message as sent to a model: without our key, and with text blocks where a stub
    replaces an image."""
    if REFS_KEY in message:
        message = {key: value for key, value in message.items() if key != REFS_KEY}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return with_blocks(message, content, list(map(_shown, content)))


def _shown(block: Any) -> Any:
    """A block that a provider accepts: one with a stub in place of its data becomes a text
    block."""
    if not isinstance(block, dict):
        return block
    content = block.get("content")
    if isinstance(content, list):
        return with_blocks(block, content, list(map(_shown, content)))
    if block.get("type") in _WITHOUT_DATA:
        return block
    part = read(block)
    if not is_stub(part.encoded):
        return block
    return write(part.with_text(part.encoded))
