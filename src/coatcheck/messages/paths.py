"""Parsed JSON by path, and where in a message large payloads can be. Pure: never raises on odd
input, never mutates it.

Conversation text stays inline: what people and models wrote, thinking with its signatures,
summaries. Everything else that is large may be moved out: tool results, call arguments, images,
details, and unknown fields.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final

Message = dict[str, Any]
Path = tuple[str | int, ...]
"""Keys and indices from a parsed line down to a value."""

REFS_KEY: Final = "artifactRefs"
"""The key of the refs in a slim line. A host that reads the file sees one unknown key."""

_SPEAKERS: Final = frozenset({"user", "assistant", "system", "developer", "human", "ai", "model"})
_SPOKEN: Final = frozenset(
    {
        "human",
        "ai",
        "system",
        "HumanMessage",
        "AIMessage",
        "SystemMessage",
        "HumanMessageChunk",
        "AIMessageChunk",
    }
)
_WORDS: Final = frozenset(
    {"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"}
)
_WHOLE: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "compaction", "branch_summary", "summary"}
)
_KEPT_KEYS: Final = frozenset(
    {"signature", "thinkingSignature", "textSignature", "thoughtSignature", "thought_signature", "encrypted_content",
     "reasoning_content", "thinking", "summary", REFS_KEY}
)  # fmt: skip
_OPAQUE: Final = frozenset(
    {"toolUseResult", "structuredContent", "structured_content", "details", "arguments", "input", "args", "parameters",
     "artifact", "metadata", "response_metadata", "additional_kwargs", "_meta", "extra"}
)  # fmt: skip
_CONTAINERS: Final = (dict, list)  # isinstance is faster with a tuple than with a union
_MAX_DEPTH: Final = 400
_SCALAR: Final = 6  # approximate length of a number or literal in JSON


def at(value: Any, path: Path) -> Any:
    """Return the value at a path, or None if there is none."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """Return a copy with another value at a path. Everything beside the path is shared with the
    original."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(value, dict) and step in value:
        return {**value, step: replaced(value[step], rest, new)}
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return [*value[:step], replaced(value[step], rest, new), *value[step + 1 :]]
    return value


def text(value: object) -> str:
    """Return `value` if it is a string, else ''."""
    return value if isinstance(value, str) else ""


def members(value: object, path: Path = ("content",)) -> Iterator[tuple[Path, Message]]:
    """Yield the objects in the list at a path, each with its path."""
    found = at(value, path)
    for index, one in enumerate(found if isinstance(found, list) else ()):
        if isinstance(one, dict):
            yield (*path, index), one


def texts(content: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the texts of content, which is a string or a list of blocks, each with its path. `path`
    leads to it."""
    if isinstance(content, str):
        yield path, content
    for found, one in members(content, ()):
        if isinstance(one.get("text"), str):
            yield (*path, *found, "text"), one["text"]


def blocks_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the blocks of a message; a text is one block."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def with_blocks(message: Message, old: list[Any], new: list[Any]) -> Message:
    """Return a message with new blocks as its content: the same object if they are the old ones."""
    is_same = len(old) == len(new) and all(map(operator.is_, old, new))
    return message if is_same else {**message, "content": new}


def size_of(value: object) -> int:
    """Approximate number of characters of a value as compact JSON, without escapes."""
    total, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            total += len(one) + 2
        elif isinstance(one, dict):
            total += sum(map(len, one)) + 4 * len(one) + 2
            stack.extend(one.values())
        elif isinstance(one, list):
            total += len(one) + 2
            stack.extend(one)
        else:
            total += _SCALAR
    return total


def places(
    value: object, least: int, bulk: int, *, opaque: frozenset[str] = frozenset()
) -> list[tuple[Path, Any]]:
    """Return possible payloads with their paths, in text order: strings of at least `least`
    characters, and containers.

    A container is listed as a whole if it is opaque (arguments, details, structured content, and
    the keys in `opaque`) and its small parts add up to at least `bulk` characters. Larger parts are
    listed by themselves."""
    found: list[tuple[Path, Any]] = []
    least, opaque = max(1, least), _OPAQUE | opaque

    def look(value: Any, path: Path, bulk: int, inside: bool, spoken: bool) -> None:
        """Collect the payloads below a container. `inside`: it is in an opaque container. `spoken`:
        it is the content of a person's or model's message. Written for speed, because lines have
        many small parts."""
        if inside and bulk:
            if (size := size_of(value)) < least:
                return
            if size < bulk:
                bulk = 0  # nothing below can reach it either
            elif _is_bulk(value, bulk):
                found.append((path, value))
                return
        if isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, str):
                    if len(one) >= least and not spoken:
                        found.append(((*path, index), one))
                elif one and isinstance(one, _CONTAINERS) and len(path) < _MAX_DEPTH:
                    look(one, (*path, index), bulk, inside, spoken)
            return
        speaks = False
        if not inside:
            kind = value.get("type")
            if isinstance(kind, str) and (kind in _WHOLE or (spoken and kind in _WORDS)):
                return
            speaks = "content" in value and _is_spoken(value)
        for key, one in value.items():
            if isinstance(one, str):
                if len(one) >= least and (
                    inside or not (key in _KEPT_KEYS or (speaks and key == "content"))
                ):
                    found.append(((*path, key), one))
            elif (
                one
                and isinstance(one, _CONTAINERS)
                and (inside or key not in _KEPT_KEYS)
                and len(path) < _MAX_DEPTH
            ):
                look(one, (*path, key), bulk, inside or key in opaque, speaks and key == "content")

    if isinstance(value, _CONTAINERS):
        look(value, (), max(1, bulk), False, False)
    return found


def _is_spoken(value: Mapping[str, Any]) -> bool:
    """Whether the content of this object was written by a person or a model."""
    role, kind = value.get("role"), value.get("type")
    if isinstance(role, str):
        return role in _SPEAKERS
    return isinstance(kind, str) and kind in _SPOKEN


def _is_bulk(value: object, bulk: int) -> bool:
    """Whether the small parts of a container add up to at least `bulk` characters."""
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    rest = 0
    for key, one in parts:
        size = size_of(one)
        rest += (size if size < bulk else 0) + (len(key) + 4 if isinstance(key, str) else 1)
        if rest >= bulk:
            return True
    return False
