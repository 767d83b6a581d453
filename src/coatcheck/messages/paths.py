"""Parsed JSON by path, and where in a message large payloads can be. Pure: never raises on odd
input, never mutates it.

Conversation text stays inline: what people and models wrote, thinking with its signatures,
summaries. Everything else that is large may be moved out: tool results, call arguments, images,
details, and unknown fields.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    {"signature", "thinkingSignature", "textSignature", "thoughtSignature", "thought_signature",
     "encrypted_content", "reasoning_content", "thinking", "summary", REFS_KEY}
)  # fmt: skip
_OPAQUE: Final = frozenset(
    {"toolUseResult", "structuredContent", "structured_content", "details", "arguments", "input",
     "args", "parameters", "artifact", "metadata", "response_metadata", "additional_kwargs",
     "_meta", "extra"}
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
    search = _PayloadSearch(least=max(1, least), bulk=max(1, bulk), opaque=_OPAQUE | opaque)
    search.look(value, (), is_spoken=False)
    return search.found


@dataclass(frozen=True, slots=True)
class _PayloadSearch:
    """Collects the payloads of one parsed line in `found`."""

    least: int
    bulk: int
    opaque: frozenset[str]
    found: list[tuple[Path, Any]] = field(default_factory=list)

    def look(self, value: object, path: Path, *, is_spoken: bool) -> None:
        """Look into a container. `is_spoken`: it is content that a person or a model wrote."""
        if len(path) > _MAX_DEPTH:
            return
        if isinstance(value, list):
            self._look_into_list(value, path, is_spoken=is_spoken)
        elif isinstance(value, dict):
            self._look_into_object(value, path, is_spoken=is_spoken)

    def _look_into_list(self, value: list[Any], path: Path, *, is_spoken: bool) -> None:
        for index, one in enumerate(value):
            if isinstance(one, _CONTAINERS):
                self.look(one, (*path, index), is_spoken=is_spoken)
            elif isinstance(one, str) and len(one) >= self.least and not is_spoken:
                self.found.append(((*path, index), one))

    def _look_into_object(self, value: Message, path: Path, *, is_spoken: bool) -> None:
        kind = text(value.get("type"))
        if kind in _WHOLE or (is_spoken and kind in _WORDS):
            return
        spoken_key = "content" if "content" in value and _is_spoken(value) else None
        for key, one in value.items():
            if isinstance(one, str):
                if len(one) >= self.least and key not in _KEPT_KEYS and key != spoken_key:
                    self.found.append(((*path, key), one))
            elif not isinstance(one, _CONTAINERS) or key in _KEPT_KEYS:
                continue
            elif key in self.opaque:
                self._look_into_opaque(one, (*path, key), self.bulk)
            else:
                self.look(one, (*path, key), is_spoken=key == spoken_key)

    def _look_into_opaque(self, value: Any, path: Path, bulk: int | None) -> None:
        """Look into an opaque container, or one inside it, where no key is kept. `bulk` is None
        where everything is smaller than that."""
        if len(path) > _MAX_DEPTH:
            return
        if bulk is not None:
            size = size_of(value)
            if size < self.least:
                return
            if size < bulk:
                bulk = None
            elif _is_bulk(value, bulk):
                self.found.append((path, value))
                return
        for key, one in _parts(value):
            if isinstance(one, _CONTAINERS):
                self._look_into_opaque(one, (*path, key), bulk)
            elif isinstance(one, str) and len(one) >= self.least:
                self.found.append(((*path, key), one))


def _is_spoken(value: Mapping[str, Any]) -> bool:
    """Whether the content of this object was written by a person or a model."""
    role, kind = value.get("role"), value.get("type")
    if isinstance(role, str):
        return role in _SPEAKERS
    return isinstance(kind, str) and kind in _SPOKEN


def _is_bulk(value: dict[str, Any] | list[Any], bulk: int) -> bool:
    """Whether the small parts of a container add up to at least `bulk` characters."""
    total = 0
    for key, one in _parts(value):
        total += len(key) + 4 if isinstance(key, str) else 1
        size = size_of(one)
        if size < bulk:
            total += size
        if total >= bulk:
            return True
    return False


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[tuple[str | int, Any]]:
    """The values in a container, each with its key or index."""
    return value.items() if isinstance(value, dict) else enumerate(value)
