"""The scripted model: its input and its replies. The same for every provider."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model makes. Arguments given as text are sent unchanged, so they may be
    invalid JSON."""

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def written(self) -> str:
        return (
            self.arguments
            if isinstance(self.arguments, str)
            else json.dumps(self.arguments, ensure_ascii=False)
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model: some text, some calls, or both."""

    text: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The result that the model got for one of its calls."""

    call_id: str
    name: str
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """The input of the model: the number of its replies so far, the results of its calls in order,
    and its tools. From Anthropic's API also the text of the first message, and the whole
    request."""

    turn: int
    results: tuple[Result, ...]
    tools: tuple[str, ...]
    begins: str = ""
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def last(self, name: str) -> str:
        """Return the newest result of a tool."""
        return next(result.text for result in reversed(self.results) if result.name == name)

    def pointer(self, name: str) -> str:
        """Return the pointer from the newest stub of a tool, as a model would copy it."""
        found: str = json.loads(self.last(name))["artifact"]
        return found


Step = Reply | Callable[[Heard], Reply]
"""A turn of the script: a reply, or a function from the model's input to a reply."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error status for the request of this number, counted from 0 with retries."""

    request: int
    status: int
    retry_after: float = 0.01


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: `prompt` is the total, of which `cached` were read from the cache and
    `written` to it."""

    prompt: int
    cached: int
    written: int
    output: int


@dataclass(frozen=True, slots=True)
class Received:
    """One request: path, bytes and parsed body, the status of the response, the reply, and its
    usage."""

    path: str
    raw: bytes
    body: dict[str, Any]
    status: int
    reply: Reply | None = None
    usage: Usage | None = None


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of uneven lengths."""
    at, size = 0, 1
    while at < len(text):
        yield text[at : at + size]
        at, size = at + size, size % 13 + 4


def drawn(turn: int, number: int, length: int = 22) -> str:
    """Return an id that looks random but is the same in every run."""
    return hashlib.sha256(f"{turn}/{number}".encode()).hexdigest()[:length]
