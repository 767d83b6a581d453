"""The known formats, and which one a transcript has. Detection goes by content, never by file name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.messages.anthropic import AnthropicMessages, ClaudeCode
from coatcheck.messages.hosts import LangChain, Mcp, Pi
from coatcheck.messages.message import Format, Message
from coatcheck.messages.openai import OpenAIChat, OpenAIResponses

PLAIN: Final[Format] = OpenAIChat()
"""The format of messages that have only role and content: every provider reads those."""

FORMATS: Final[dict[str, Format]] = {
    one.name: one for one in (ClaudeCode(), Pi(), LangChain(), Mcp(), OpenAIResponses(), AnthropicMessages(), PLAIN)
}
_MAX_OBJECTS: Final = 200
_MAX_DEPTH: Final = 6


def detect(lines: Iterable[object], *, enough: int = _MAX_OBJECTS) -> Format | None:
    """Return the format that most of the first objects clearly have, or None if nothing looks like a message. `lines`
    are parsed lines, or one parsed document; no more are read after `enough` lines that clearly have a format."""
    votes = dict.fromkeys(FORMATS, 0)
    plain = False
    for one, found in islice(_objects(lines, enough), _MAX_OBJECTS):
        if found is not None:
            votes[found.name] += 1
        elif not plain:
            plain = PLAIN.is_message(one)
    best = max(votes, key=lambda name: votes[name])
    if votes[best]:
        return FORMATS[best]
    return PLAIN if plain else None


def named_format(given: Format | str | None) -> Format | None:
    """Return the format of this name; a format or None is returned as it is."""
    if given is None or isinstance(given, Format):
        return given
    if given not in FORMATS:
        raise InvalidArgument(f"unknown format {clip(given)}", hint="use one of: " + ", ".join(FORMATS))
    return FORMATS[given]


def _fitting(value: Message) -> Format | None:
    for one in FORMATS.values():
        if one.required <= value.keys() and one.fits(value):
            return one
    return None


def _objects(lines: Iterable[object], enough: int) -> Iterator[tuple[Message, Format | None]]:
    """Lines that are objects; of a document, the nested objects that may be messages. Each with the format it has."""
    for line in lines:
        found = _fitting(line) if isinstance(line, dict) else None
        if found is not None and isinstance(line, dict):
            yield line, found
            enough -= 1
            if not enough:
                return
        else:
            yield from ((one, _fitting(one)) for one in _nested(line, 0))


def _nested(value: object, depth: int) -> Iterator[Message]:
    if isinstance(value, dict):
        yield value
        if "role" in value:
            return
    if depth < _MAX_DEPTH and isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, dict | list):
                yield from _nested(one, depth + 1)
