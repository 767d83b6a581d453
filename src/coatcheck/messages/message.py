"""`Format`: what Coatcheck needs to know about one message format. Subclasses define the differences.

Everything works on parsed JSON, never raises on odd input, and never changes its input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from coatcheck.externalize import blocks
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.stub import is_stub
from coatcheck.messages.paths import REFS_KEY, Path, at, places, replaced

Message = dict[str, Any]
_STUBS: Final = Policy(preview_chars=2_000)
_MAX_DEPTH: Final = 8
_HOST_KEYS: Final = frozenset(
    {"artifact", "details", "toolUseResult", "additional_kwargs", "response_metadata", "_meta"}
)
_ARGUMENTS: Final[tuple[Path, ...]] = (
    ("function", "arguments"),
    ("custom", "input"),
    ("arguments",),
    ("input",),
    ("args",),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a message: its id ('' if it has none), the tool, and the path in the message."""

    id: str
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool result in a message: the id of its call, the tool if the message names it, the paths of the result and of
    its content, and whether it reports an error."""

    call_id: str
    name: str | None
    path: Path
    content_path: Path
    is_error: bool = False


class Format:
    """One message format. A line is one parsed line of a file, or a whole JSON document."""

    name: ClassVar[str] = ""
    required: ClassVar[frozenset[str]] = frozenset()
    """Keys without which no line `fits`."""
    opaque: ClassVar[frozenset[str]] = frozenset()
    """Additional keys whose value may be moved out of a line as a whole."""

    def __repr__(self) -> str:
        return f"<format {self.name}>"

    def fits(self, line: object) -> bool:
        """Whether a line clearly has this format."""
        raise NotImplementedError

    def message(self, line: object) -> Message | None:
        """Return the message in this line, or None."""
        return line if isinstance(line, dict) and self.is_message(line) else None

    def is_message(self, value: Message) -> bool:
        """Whether this object itself is a message."""
        return isinstance(value.get("role"), str)

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        """Yield every message of a line or a document in order, each with its path."""
        yield from self._messages(line, ())

    def _messages(self, value: object, path: Path) -> Iterator[tuple[Path, Message]]:
        if isinstance(value, dict):
            found = self.message(value)
            if found is not None:
                yield path, found
                return
        if len(path) > _MAX_DEPTH:
            return
        if isinstance(value, dict):
            for key, one in value.items():
                if isinstance(one, dict | list) and key != REFS_KEY:
                    yield from self._messages(one, (*path, key))
        elif isinstance(value, list):
            for index, one in enumerate(value):
                yield from self._messages(one, (*path, index))

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        """Return the one of `messages` that contains a path, or None."""
        for depth in range(min(len(path), _MAX_DEPTH + 1) + 1):
            found = self.message(line) if isinstance(line, dict) else None
            if found is not None:
                return path[:depth], found
            if depth == len(path) or path[depth] == REFS_KEY:
                break
            line = at(line, path[depth : depth + 1])
        return None

    def places(self, line: object, least: int = 0, bulk: int | None = None) -> list[Path]:
        """Return the paths of possible payloads, see `paths.places`."""
        return places(line, least, least if bulk is None else bulk, opaque=self.opaque)

    def is_shown(self, path: Path) -> bool:
        """Whether a model is sent the value at this path of a line. Hosts store more than that."""
        return not _HOST_KEYS.intersection(step for step in path if isinstance(step, str))

    def role(self, message: Message) -> str:
        """Return "user", "assistant", "system" or "tool", or else the message's own role."""
        return text(message.get("role"))

    def calls(self, message: Message) -> tuple[Call, ...]:
        """Return the tool calls in a message."""
        return ()

    def results(self, message: Message) -> tuple[ToolResult, ...]:
        """Return the tool results in a message."""
        return ()

    def outputs(self, message: Message) -> tuple[ToolResult, ...]:
        """Return output that the model is shown without a call, such as that of a command the user ran."""
        return ()

    def with_content(self, message: Message, result: ToolResult, text: str) -> Message:
        """Return the message with a text as the content of one result. A cache breakpoint in the content is kept."""
        content = at(message, result.content_path)
        if not isinstance(content, list):
            return dict(replaced(message, result.content_path, text))
        block: Message = {"type": "text", "text": text}
        for one in content:
            if isinstance(one, dict) and "cache_control" in one:
                block["cache_control"] = one["cache_control"]
        return dict(replaced(message, result.content_path, [block]))

    def without_thinking(self, message: Message) -> Message | None:
        """Return the message without thinking blocks. None if the provider refuses that, or nothing would be left."""
        return None

    def user_message(self, text: str, like: Message) -> Message | None:
        """Return a user message in the form of `like`. None if the format has no conversation."""
        return {"role": "user", "content": text}

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """Return what a provider is sent for these lines, without our refs and the host's fields.

        Compactions are applied if the format has them. With `compacted=False` they are not: the result for more lines
        then always begins with the result for fewer."""
        return [without_refs(message) for line in lines for _, message in self.messages(line)]


class SessionLines(Format):
    """A format whose lines are envelopes around messages, one message per line at most."""

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        found = self.message(line)
        if found is not None:
            yield (() if found is line else ("message",)), found
        elif isinstance(line, list) or (isinstance(line, dict) and "type" not in line):
            for base, inner in _lines_in(line):
                for path, one in self.messages(inner):
                    yield (*base, *path), one

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        return next((one for one in self.messages(line) if path[: len(one[0])] == one[0]), None)


def _lines_in(document: list[Any] | Message) -> Iterator[tuple[Path, Message]]:
    """The lines of a session file that was saved as one document: a list of them, or an object with such a list."""
    lists = [((), document)] if isinstance(document, list) else [((key,), one) for key, one in document.items()]
    for base, lines in lists:
        for index, line in enumerate(lines if isinstance(lines, list) else ()):
            if isinstance(line, dict):
                yield (*base, index), line


def in_line(path: Path) -> Path:
    """Strip the steps that lead to a line in a document of lines."""
    found = next((number for number, step in enumerate(path[:2]) if isinstance(step, int)), None)
    return path if found is None else path[found + 1 :]


def text(value: object) -> str:
    """Return `value` if it is a string, else ''."""
    return value if isinstance(value, str) else ""


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
    if isinstance(content, list) and content and all(isinstance(one, str | dict) for one in content):
        return "\n".join(one if isinstance(one, str) else _block_text(one) for one in content)
    return dumped(content)


def _block_text(block: Message) -> str:
    inner = block.get("content")
    if isinstance(inner, list | str) and text(block.get("type")) in ("tool_result", "search_result"):
        return text_of(inner)
    carried = blocks.payload(block) if isinstance(block.get("type"), str) else None
    if carried is not None and not carried.is_base64:
        return carried.written
    if carried is not None:
        return f"[{str(block.get('type'))[:40]} of {len(carried.written):,} characters]"
    return dumped(block)


def plain_text(content: object) -> str | None:
    """Return content that is a string or a single text block as a string, else None."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        carried = blocks.payload(content[0])
        if carried is not None and not carried.is_base64 and content[0].get("type") in ("text", "input_text"):
            return carried.written
    return None


def is_replaceable(message: Message, result: ToolResult) -> bool:
    """Whether a provider accepts a text in place of this result's content. Results of a provider's own tools have
    shapes that cannot be replaced."""
    content = at(message, result.content_path)
    if isinstance(content, str):
        return True
    if not isinstance(content, list) or not content:
        return False
    return all(isinstance(one, str) or (isinstance(one, dict) and blocks.is_block(one)) for one in content)


def arguments_of(message: Message, call: Call) -> tuple[Path, Any] | None:
    """Return the path of a call's arguments and their value: an object, or its JSON. None if it has none."""
    base = at(message, call.path)
    for path in _ARGUMENTS:
        found = at(base, path)
        if isinstance(found, dict | list | str) and found:
            return (*call.path, *path), found
    return None


def attachments(message: Message) -> Iterator[tuple[Path, blocks.BlockPayload]]:
    """Yield the base64 images and documents in a message's own content, each with its path."""
    content = message.get("content")
    for index, one in enumerate(content if isinstance(content, list) else ()):
        carried = blocks.payload(one) if isinstance(one, dict) else None
        if carried is not None and carried.is_base64:
            yield ("content", index), carried


def without_refs(message: Message) -> Message:
    """Return a message as a model is sent it: without our key, and with text blocks where a stub replaces an image."""
    plain = {key: value for key, value in message.items() if key != REFS_KEY} if REFS_KEY in message else message
    return _with_shown_content(plain)


def _with_shown_content(holder: Message) -> Message:
    content = holder.get("content")
    if not isinstance(content, list):
        return holder
    shown = [_shown(one) for one in content]
    changed = any(new is not old for new, old in zip(shown, content, strict=True))
    return {**holder, "content": shown} if changed else holder


def _shown(block: Any) -> Any:
    """A block that a provider accepts: one with a stub in place of its data becomes a text block."""
    if not isinstance(block, dict):
        return block
    if isinstance(block.get("content"), list):
        return _with_shown_content(block)
    carried = blocks.payload(block) if isinstance(block.get("type"), str) else None
    if carried is None or not carried.is_base64 or not is_stub(carried.written, _STUBS):
        return block
    return carried.replace(carried.written)
