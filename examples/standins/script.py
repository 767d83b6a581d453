"""The scripted model: what it is told, and what it answers. The same for every provider."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model makes. Arguments as text are sent as they are, so that they may be no JSON."""

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def written(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model: some text, some calls, or both."""

    text: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What the model was sent for one of its calls."""

    call_id: str
    name: str
    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """What the model has in front of it: how often it has spoken, and the results of its calls in order."""

    turn: int
    results: tuple[Result, ...]
    tools: tuple[str, ...]

    def last(self, name: str) -> str:
        """The newest result of a tool."""
        return next(result.text for result in reversed(self.results) if result.name == name)

    def pointer(self, name: str) -> str:
        """The pointer in the stub that came for the newest call of a tool, as a model would copy it."""
        found: str = json.loads(self.last(name))["artifact"]
        return found


Step = Reply | Callable[[Heard], Reply]
"""A turn of the script: a reply, or a function that looks at what the model was sent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that is none: the status, for the request of this number (from 0, retries count)."""

    request: int
    status: int
    retry_after: float = 0.01


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: `prompt` in all, of which `cached` were read from the cache and `written` to it."""

    prompt: int
    cached: int
    written: int
    output: int


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came: its path, its bytes, what they say; the answer's status; the reply, and what it cost."""

    path: str
    raw: bytes
    body: dict[str, Any]
    status: int
    reply: Reply | None = None
    usage: Usage | None = None


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of uneven lengths, that end anywhere."""
    at, size = 0, 1
    while at < len(text):
        yield text[at : at + size]
        at, size = at + size, size % 13 + 4


def drawn(turn: int, number: int, length: int = 22) -> str:
    """An id that looks drawn, and is the same in every run."""
    return hashlib.sha256(f"{turn}/{number}".encode()).hexdigest()[:length]
