"""What is known about the message formats of providers and hosts. No other package knows them.

`detect` finds the format of a transcript by its content, never by its file name. `dialect` returns
how a provider takes a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress, islice
from operator import not_
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
    rest, left, plain = iter(lines), _MAX_OBJECTS, False
    while (
        left > 0
        and sum(votes.values()) < enough
        and (some := list(islice(rest, min(left, enough))))
    ):
        unknown = [one for one in some if isinstance(one, dict)]
        left -= len(unknown)
        for fmt in FORMATS.values():  # the first one that fits counts
            fitting = list(map(fmt.fits, unknown))
            votes[fmt.name] += sum(fitting)
            unknown = list(compress(unknown, map(not_, fitting)))
        plain = plain or any(map(PLAIN.is_message, unknown))
        documents = [one for one in unknown if "role" not in one] + [
            one for one in some if isinstance(one, list)
        ]
        for one, found in islice(_objects(documents, 0), left):
            left -= 1
            plain = plain or PLAIN.is_message(one)
            votes.update({found.name: votes[found.name] + 1} if found else {})
    best = max(votes, key=lambda name: votes[name])
    return FORMATS[best] if votes[best] else PLAIN if plain else None


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
    """Yield the objects inside a document that may be messages, each with its format."""
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict):
            found = next((fmt for fmt in FORMATS.values() if fmt.fits(one)), None)
            yield one, found
            if found is not None or "role" in one:
                continue
        if isinstance(one, dict | list) and depth < _MAX_DEPTH:
            yield from _objects(one, depth + 1)
