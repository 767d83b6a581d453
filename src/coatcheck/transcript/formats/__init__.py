"""The formats that a transcript can have, and which one a file has. It is told by content, never by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from coatcheck.transcript.formats.anthropic import Anthropic
from coatcheck.transcript.formats.claude_code import ClaudeCode
from coatcheck.transcript.formats.format import Call, Format, Message, Result
from coatcheck.transcript.formats.langchain import LangChain
from coatcheck.transcript.formats.mcp import Mcp
from coatcheck.transcript.formats.openai_chat import OpenAIChat
from coatcheck.transcript.formats.openai_responses import OpenAIResponses
from coatcheck.transcript.formats.pi import Pi
from coatcheck.transcript.formats.values import REFS_KEY, Path, at, replaced

__all__ = ["FORMATS", "PLAIN", "REFS_KEY", "Call", "Format", "Message", "Path", "Result", "at", "detect", "replaced"]

PLAIN: Final[Format] = OpenAIChat()
"""What messages of role and content alone are taken for: every provider reads those."""

FORMATS: Final[dict[str, Format]] = {
    one.name: one for one in (ClaudeCode(), Pi(), LangChain(), Mcp(), OpenAIResponses(), Anthropic(), PLAIN)
}
_LOOKED_AT: Final = 200
_DEEPEST: Final = 6


def detect(lines: Iterable[object]) -> Format | None:
    """The format of parsed lines, or of one parsed document as the only line: the one that most of the first objects
    plainly have. None where nothing looks like a message."""
    votes = dict.fromkeys(FORMATS, 0)
    plain = False
    for one in islice(_objects(lines), _LOOKED_AT):
        fitting = next((name for name, known in FORMATS.items() if known.fits(one)), None)
        if fitting is not None:
            votes[fitting] += 1
        plain = plain or PLAIN.is_message(one)
    best = max(votes, key=lambda name: votes[name])
    if votes[best]:
        return FORMATS[best]
    return PLAIN if plain else None


def _objects(lines: Iterable[object]) -> Iterator[Message]:
    """Lines that are objects; of a document, the objects inside that may be messages."""
    for line in lines:
        if isinstance(line, dict) and any(known.fits(line) for known in FORMATS.values()):
            yield line
        else:
            yield from _inside(line, 0)


def _inside(value: object, depth: int) -> Iterator[Message]:
    if isinstance(value, dict):
        yield value
        if "role" in value:
            return
    if depth < _DEEPEST and isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, dict | list):
                yield from _inside(one, depth + 1)
