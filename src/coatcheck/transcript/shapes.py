"""Where a format keeps what pruning replaces, how another text is written there, and how a note looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from coatcheck.externalize import blocks
from coatcheck.transcript.formats import Call, Format, Message, Path, Result, at, replaced

Write = Callable[[Message, str], Message]
"""Makes of a message one with another text in some place."""

_ARGUMENTS: Final[tuple[Path, ...]] = (
    ("function", "arguments"),
    ("custom", "input"),
    ("arguments",),
    ("input",),
    ("args",),
)
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_DROPS_THINKING: Final = frozenset({"anthropic", "claude-code"})
_NO_CONVERSATION: Final = frozenset({"mcp"})


def is_replaceable(message: Message, result: Result) -> bool:
    """Whether a provider takes a text in place of this result's content. Some results (of a provider's own tools) have
    shapes that only they may have."""
    content = at(message, result.content_path)
    if isinstance(content, str):
        return True
    return (
        isinstance(content, list) and bool(content) and all(isinstance(one, str) or _is_plain(one) for one in content)
    )


def with_result(known: Format, message: Message, result: Result, text: str) -> Message:
    """The message with a text as a result's content. A client's cache breakpoint inside it stays."""
    old = at(message, result.content_path)
    done = known.with_content(message, result, text)
    parts = old if isinstance(old, list) else []
    marks = [one["cache_control"] for one in parts if isinstance(one, dict) and "cache_control" in one]
    new = at(done, result.content_path)
    if marks and isinstance(new, list) and new and isinstance(new[0], dict):
        return dict(replaced(done, result.content_path, [{**new[0], "cache_control": marks[-1]}]))
    return done


def arguments(message: Message, call: Call) -> tuple[Path, Any] | None:
    """Where a call's arguments stand, and what they are: an object, or the JSON of one."""
    base = at(message, call.path)
    for path in _ARGUMENTS:
        found = at(base, path)
        if isinstance(found, dict | list | str) and found:
            return (*call.path, *path), found
    return None


def with_arguments(message: Message, path: Path, text: str) -> Message:
    """The message with other arguments of a call; the text is the JSON of an object."""
    new: Any = text if isinstance(at(message, path), str) else json.loads(text)
    return dict(replaced(message, path, new))


def without_thinking(known: Format, message: Message) -> Message | None:
    """The message without what the model thought, where the provider permits that and something is left."""
    content = message.get("content")
    if known.name not in _DROPS_THINKING or message.get("role") != "assistant" or not isinstance(content, list):
        return None
    kept = [one for one in content if not (isinstance(one, dict) and one.get("type") in _THINKING)]
    return {**message, "content": kept} if kept and len(kept) < len(content) else None


def pictures(message: Message) -> list[tuple[Path, blocks.Payload]]:
    """The encoded images and documents that somebody sent in a message, results apart."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    found: list[tuple[Path, blocks.Payload]] = []
    for index, one in enumerate(content):
        carried = blocks.payload(one) if isinstance(one, dict) else None
        if carried is not None and carried.is_base64:
            found.append((("content", index), carried))
    return found


def dumped(value: Any) -> str:
    """A value as compact JSON, whatever a host put in it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        return str(type(value))


def result_writer(known: Format, place: int) -> Write:
    """Writes a text as the content of the n-th result of a message."""
    return lambda message, text: with_result(known, message, known.results(message)[place], text)


def argument_writer(known: Format, place: int) -> Write:
    """Writes the JSON of an object as the arguments of the n-th call of a message."""

    def write(message: Message, text: str) -> Message:
        found = arguments(message, known.calls(message)[place])
        return message if found is None else with_arguments(message, found[0], text)

    return write


def picture_writer(path: Path) -> Write:
    """Writes a text where a picture or a document stands."""

    def write(message: Message, text: str) -> Message:
        carried = blocks.payload(at(message, path))
        return message if carried is None else dict(replaced(message, path, carried.replace(text)))

    return write


def note(known: Format, like: Message, text: str) -> Message | None:
    """A message of the user with this text, in the format's shape; None where the format has no conversation."""
    if known.name in _NO_CONVERSATION:
        return None
    if known.name == "pi":
        return {"role": "user", "content": [{"type": "text", "text": text}]}
    if known.name != "langchain":
        return {"role": "user", "content": text}
    if like.get("lc") == 1:
        names = [*like["id"][:-1], "HumanMessage"]
        return {"lc": 1, "type": "constructor", "id": names, "kwargs": {"content": text, "type": "human"}}
    fields = {"content": text, "additional_kwargs": {}, "response_metadata": {}, "type": "human"}
    return {"type": "human", "data": fields} if isinstance(like.get("data"), dict) else fields


def _is_plain(block: object) -> bool:
    return isinstance(block, dict) and blocks.is_block(block)
