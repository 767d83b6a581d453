"""Parsed JSON by path, and where in it payloads can be. Pure: nothing here raises on odd input or changes its own.

Words stay inline: what people and models said, thinking with its signatures, summaries. Everything else that is large
may go: results of tools, arguments of calls, images, details, and fields that nobody told us of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Path = tuple[str | int, ...]
"""Keys and indices from a parsed line down to a value."""

REFS_KEY: Final = "artifactRefs"
"""The key that a slim line holds its refs under: a host that reads the file meets one unknown key."""

_SPEAKERS: Final = frozenset({"user", "assistant", "system", "developer", "human", "ai", "model"})
_SPOKEN: Final = frozenset(
    {"human", "ai", "system", "HumanMessage", "AIMessage", "SystemMessage", "HumanMessageChunk", "AIMessageChunk"}
)
_WORDS: Final = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})
_WHOLE: Final = frozenset({"thinking", "redacted_thinking", "reasoning", "compaction", "branch_summary", "summary"})
_KEPT_KEYS: Final = frozenset(
    {"signature", "thinkingSignature", "textSignature", "thoughtSignature", "thought_signature", "encrypted_content",
     "reasoning_content", "thinking", "summary", REFS_KEY}
)  # fmt: skip
_OPAQUE: Final = frozenset(
    {"toolUseResult", "structuredContent", "structured_content", "details", "arguments", "input", "args", "parameters",
     "artifact", "metadata", "response_metadata", "additional_kwargs", "_meta", "extra"}
)  # fmt: skip
_CONTAINERS: Final = (dict, list)  # quicker to ask for than their union
_DEEPEST: Final = 400
_SCALAR: Final = 6  # characters that a number or a word of JSON takes, about


def at(value: Any, path: Path) -> Any:
    """The value at a path, or None where it leads nowhere."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at a path; what lies beside the path is shared with the original."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(value, dict) and step in value:
        return {**value, step: replaced(value[step], rest, new)}
    if isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
        return [*value[:step], replaced(value[step], rest, new), *value[step + 1 :]]
    return value


def size_of(value: object) -> int:
    """About how many characters a value has as compact JSON. Escapes do not count."""
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


def places(value: object, least: int, bulk: int, *, opaque: frozenset[str] = frozenset()) -> list[Path]:
    """Where payloads can be, in the order of the text: strings of `least` characters or more, and containers.

    A container goes whole where it is one that nobody looks into (arguments, details, structured content, and the keys
    that `opaque` adds) and has `bulk` characters or more in parts that are smaller than that: larger ones go for
    themselves."""
    found: list[Path] = []
    if isinstance(value, dict | list):
        _look(value, (), found, max(1, least), max(1, bulk), _OPAQUE | opaque, False, False)
    return found


def _look(
    value: dict[str, Any] | list[Any],
    path: Path,
    found: list[Path],
    least: int,
    bulk: int,
    opaque: frozenset[str],
    inside: bool,
    spoken: bool,
) -> None:
    """Note the places below a container. `inside`: it, or one around it, may go whole. `spoken`: it is the content of
    somebody's message. Written for speed: lines have many small parts."""
    if inside and bulk:
        if size_of(value) < bulk:
            bulk = 0  # then nothing below is large by its small parts either
        elif _is_bulk(value, bulk):
            found.append(path)
            return
    says = False
    if isinstance(value, dict):
        if not inside:
            kind = value.get("type")
            if isinstance(kind, str) and (kind in _WHOLE or (spoken and kind in _WORDS)):
                return
            says = "content" in value and _is_spoken(value)
        for key, one in value.items():
            if isinstance(one, str):
                if len(one) < least or (not inside and (key in _KEPT_KEYS or (says and key == "content"))):
                    continue
                found.append((*path, key))
            elif one and isinstance(one, _CONTAINERS) and (inside or key not in _KEPT_KEYS) and len(path) < _DEEPEST:
                words = says and key == "content"
                _look(one, (*path, key), found, least, bulk, opaque, inside or key in opaque, words)
        return
    for index, one in enumerate(value):
        if isinstance(one, str):
            if len(one) >= least and not spoken:
                found.append((*path, index))
        elif one and isinstance(one, _CONTAINERS) and len(path) < _DEEPEST:
            _look(one, (*path, index), found, least, bulk, opaque, inside, spoken)


def _is_spoken(value: Mapping[str, Any]) -> bool:
    """Whether the content of this object is what a person or a model said."""
    role, kind = value.get("role"), value.get("type")
    if isinstance(role, str):
        return role in _SPEAKERS
    return isinstance(kind, str) and kind in _SPOKEN


def _is_bulk(value: object, bulk: int) -> bool:
    """Whether a container is large by the sum of its small parts."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    rest = 0
    for key, one in parts:
        size = size_of(one)
        rest += (size if size < bulk else 0) + (len(key) + 4 if isinstance(key, str) else 1)
        if rest >= bulk:
            return True
    return False
