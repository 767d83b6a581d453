"""What is known about the message formats of providers and hosts. No other package knows them.

`detect` finds the format of a transcript by its content, never by its file name. `dialect` returns
how a provider takes a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.messages.anthropic import AnthropicDialect, AnthropicMessages, ClaudeCode
from coatcheck.messages.dialects import Dialect
from coatcheck.messages.formats import Format
from coatcheck.messages.hosts import LangChain, Mcp, Pi, for_provider
from coatcheck.messages.openai import ChatDialect, OpenAIChat, OpenAIResponses, ResponsesDialect
from coatcheck.messages.paths import Message

__all__ = [
    "FORMATS",
    "PLAIN",
    "Dialect",
    "Format",
    "Message",
    "detect",
    "dialect",
    "for_provider",
    "named_format",
]

PLAIN: Final[Format] = OpenAIChat()
"""The format of messages that have only role and content: every provider reads those."""

FORMATS: Final[dict[str, Format]] = {
    one.name: one
    for one in (
        ClaudeCode(),
        Pi(),
        LangChain(),
        Mcp(),
        OpenAIResponses(),
        AnthropicMessages(),
        PLAIN,
    )
}
_DIALECTS: Final[dict[str, Dialect]] = {
    one.name: one for one in (ChatDialect(), ResponsesDialect(), AnthropicDialect())
}
_ALIASES: Final = {"openai-chat": "openai", "chat": "openai", "responses": "openai-responses"}
_MAX_OBJECTS: Final = 200
_MAX_DEPTH: Final = 7


def detect(lines: Iterable[object], *, enough: int = _MAX_OBJECTS) -> Format | None:
    """Return the format that most of the first objects clearly have, or None if nothing looks like
    a message. `lines` are parsed lines, or one parsed document; no more are read after `enough`
    lines that clearly have a format."""
    votes = dict.fromkeys(FORMATS, 0)
    is_plain = False
    left = _MAX_OBJECTS
    for line in lines:
        for one, found in islice(_objects(line, 0), left):
            left -= 1
            if found is not None:
                votes[found.name] += 1
            elif PLAIN.is_message(one):
                is_plain = True
        if left <= 0 or sum(votes.values()) >= enough:
            break
    best = max(votes, key=lambda name: votes[name])
    if votes[best]:
        return FORMATS[best]
    return PLAIN if is_plain else None


def named_format(given: Format | str | None) -> Format | None:
    """Return the format of this name; a format or None is returned as it is."""
    if given is None or isinstance(given, Format):
        return given
    if given not in FORMATS:
        raise InvalidArgument(
            f"unknown format {clip(given)}", hint="use one of: " + ", ".join(FORMATS)
        )
    return FORMATS[given]


def dialect(provider: str) -> Dialect:
    """Return the dialect of a provider. Raises `InvalidArgument` for an unknown name."""
    name = _ALIASES.get(str(provider), str(provider))
    if name not in _DIALECTS:
        raise InvalidArgument(
            f"unknown provider {clip(str(provider))}", hint="use one of: " + ", ".join(_DIALECTS)
        )
    return _DIALECTS[name]


def _objects(value: Any, depth: int) -> Iterator[tuple[Message, Format | None]]:
    """Yield a line, or the objects in a document, that may be messages, each with its format."""
    if isinstance(value, dict):
        found = next((fmt for fmt in FORMATS.values() if fmt.fits(value)), None)
        yield value, found
        if found is not None or "role" in value:
            return
    if not isinstance(value, dict | list) or depth > _MAX_DEPTH:
        return
    for one in value.values() if isinstance(value, dict) else value:
        yield from _objects(one, depth + 1)
