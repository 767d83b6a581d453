"""`Format`: what one kind of transcript answers about its lines. One small file each defines the differences.

Everything works on parsed JSON, raises nothing on odd input, and changes none of what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from coatcheck.externalize import blocks
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.stub import is_stub
from coatcheck.transcript.formats.values import REFS_KEY, Path, at, places, replaced

Message = dict[str, Any]
_STUBS = Policy(preview_chars=2_000)
_DEEPEST = 8
_UNSEEN = frozenset({"artifact", "details", "toolUseResult", "additional_kwargs", "response_metadata", "_meta"})


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool in a message: its id ('' where it has none), the tool, and where it stands."""

    id: str
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's result in a message: the id of its call, the tool where the message says it, where the result and its
    content stand, and whether it reports an error."""

    call_id: str
    name: str | None
    path: Path
    content_path: Path
    is_error: bool = False


class Format:
    """One kind of transcript. A line is one parsed line of a file, or one whole JSON document."""

    name: ClassVar[str] = ""
    opaque: ClassVar[frozenset[str]] = frozenset()
    """Keys, besides the usual ones, whose value may leave the line whole."""

    def __repr__(self) -> str:
        return f"<format {self.name}>"

    def fits(self, line: object) -> bool:
        """Whether a line is plainly of this format."""
        raise NotImplementedError

    def message(self, line: object) -> Message | None:
        """The message that lives in this line, or None where there is none."""
        return line if isinstance(line, dict) and self.is_message(line) else None

    def is_message(self, value: Message) -> bool:
        """Whether this object is a message itself."""
        return isinstance(value.get("role"), str)

    def messages(self, line: object) -> Iterator[tuple[Path, Message]]:
        """Every message of a line or a document, in order, with where it stands."""
        yield from _messages(self, line, ())

    def message_around(self, line: object, path: Path) -> tuple[Path, Message] | None:
        """The one of `messages` that a place is in; None where it is in none."""
        for depth in range(min(len(path), _DEEPEST + 1) + 1):
            found = self.message(line) if isinstance(line, dict) else None
            if found is not None:
                return path[:depth], found
            if depth == len(path) or path[depth] == REFS_KEY:
                break
            line = at(line, path[depth : depth + 1])
        return None

    def places(self, line: object, least: int = 0, bulk: int | None = None) -> list[Path]:
        """Where payloads can be, in the order of the text: strings of `least` characters or more, and containers that
        may go whole, where they have `bulk` characters or more beside what goes for itself."""
        return places(line, least, least if bulk is None else bulk, opaque=self.opaque)

    def is_shown(self, path: Path) -> bool:
        """Whether a model is sent what stands at this path of a line. A host keeps more than that."""
        return not _UNSEEN.intersection(step for step in path if isinstance(step, str))

    def role(self, message: Message) -> str:
        """Who speaks: "user", "assistant", "system" or "tool", else what the message says."""
        role = message.get("role")
        return role if isinstance(role, str) else ""

    def calls(self, message: Message) -> tuple[Call, ...]:
        return ()

    def results(self, message: Message) -> tuple[Result, ...]:
        return ()

    def text_of(self, message: Message, path: Path) -> str:
        """The text at a place of a message: of blocks their texts, of anything else its JSON."""
        return text_of(at(message, path))

    def with_content(self, message: Message, result: Result, text: str) -> Message:
        """The message with another text as the content of one result, and everything else as it was."""
        content = at(message, result.content_path)
        new: object = [{"type": "text", "text": text}] if isinstance(content, list) else text
        return dict(replaced(message, result.content_path, new))

    def for_model(self, lines: Iterable[object], *, compacted: bool = True) -> list[Message]:
        """What a provider would be sent of these lines, in its own shape: no refs of ours, no fields of the host.

        Where the format has compactions they are applied; with `compacted=False` they are not, and what more lines make
        of it only ever begins with what fewer did."""
        return [without_refs(message) for line in lines for _, message in self.messages(line)]


def text_of(content: object) -> str:
    """What a model reads in content: a text, the texts of blocks, or JSON."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and content and all(isinstance(one, str | dict) for one in content):
        return "\n".join(one if isinstance(one, str) else _block_text(one) for one in content)
    return _dumped(content)


def text(value: object) -> str:
    """A field that should be a string: '' where it is none."""
    return value if isinstance(value, str) else ""


def without_refs(message: Message) -> Message:
    """A message as it goes to a model: without our key, and with text where a stub took the place of an image."""
    plain = {key: value for key, value in message.items() if key != REFS_KEY} if REFS_KEY in message else message
    content = plain.get("content")
    if not isinstance(content, list):
        return plain
    shown = [_shown(one) for one in content]
    changed = any(new is not old for new, old in zip(shown, content, strict=True))
    return {**plain, "content": shown} if changed else plain


def _shown(block: Any) -> Any:
    """A block that a provider takes: one that carries a stub in place of its data becomes a text."""
    if not isinstance(block, dict):
        return block
    inner = block.get("content")
    if isinstance(inner, list):
        shown = [_shown(one) for one in inner]
        changed = any(new is not old for new, old in zip(shown, inner, strict=True))
        return {**block, "content": shown} if changed else block
    carried = blocks.payload(block) if isinstance(block.get("type"), str) else None
    if carried is None or not carried.is_base64 or not is_stub(carried.written, _STUBS):
        return block
    return carried.replace(carried.written)


def _block_text(block: Message) -> str:
    inner = block.get("content")
    if isinstance(inner, list | str) and text(block.get("type")) in ("tool_result", "search_result"):
        return text_of(inner)
    carried = blocks.payload(block) if isinstance(block.get("type"), str) else None
    if carried is not None and not carried.is_base64:
        return carried.written
    if carried is not None:
        return f"[{str(block.get('type'))[:40]} of {len(carried.written):,} characters]"
    return _dumped(block)


def _dumped(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return f"[{type(value).__name__}]"


def _messages(known: Format, value: object, path: Path) -> Iterator[tuple[Path, Message]]:
    if isinstance(value, dict):
        found = known.message(value)
        if found is not None:
            yield path, found
            return
    if len(path) > _DEEPEST:
        return
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, dict | list) and key != REFS_KEY:
                yield from _messages(known, one, (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _messages(known, one, (*path, index))
