"""How each provider takes a prompt: where the system text goes, where the tail, and where a cache breakpoint may stand.

The tail is what changes with every turn. It comes last: as a block behind the last user message for Anthropic, where
roles alternate and results come first, and as a user message of its own for OpenAI. It is made anew each time and never
kept in the conversation, so the prefix before it grows and does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.context.cache_marks import marks_in
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.transcript.formats import FORMATS, Format, Message

__all__ = ["Breakpoint", "Dialect", "dialect"]

MOST_BREAKPOINTS: Final = 4
_MARK: Final = {"type": "ephemeral"}
_MARK_FOR_AN_HOUR: Final = {"type": "ephemeral", "ttl": "1h"}
_UNMARKABLE: Final = frozenset({"thinking", "redacted_thinking"})


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a part of the prompt that a provider should cache: where it stands in the request (for Anthropic, the
    block that carries `cache_control`), how many messages and about how many tokens lie before it."""

    path: tuple[str | int, ...]
    messages: int
    tokens: int


class Dialect:
    """OpenAI's chat, and what the others do differently."""

    name = "openai"
    format: Format = FORMATS["openai-chat"]
    writes_marks = False
    """Whether breakpoints are written into the request. OpenAI caches prefixes by itself."""
    alternates = False
    """Whether messages of the user must not follow one another."""

    def request(
        self,
        system: str,
        messages: Sequence[Message],
        tail: str,
        tools: Sequence[Any],
        marks: Sequence[Breakpoint],
    ) -> dict[str, Any]:
        """The arguments of the provider's call that hold the prompt."""
        told = [{"role": "system", "content": system}] if system else []
        ends = [{"role": "user", "content": tail}] if tail else []
        said: dict[str, Any] = {"messages": [*told, *messages, *ends]}
        return {"tools": list(tools), **said} if tools else said

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        """Where the part before the tail ends, given as many messages as it has."""
        number = len(messages) + bool(system) - 1
        return ("messages", number) if number >= 0 else None

    def before_tail(self, messages: Sequence[Message]) -> int:
        """How many messages come before the tail."""
        return len(messages)

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        """How many breakpoints the host has set itself."""
        return 0

    def joined(self, one: Message, other: Message) -> Message:
        """Two messages of the user as one."""
        return {**one, "content": [*_blocks(one), *_blocks(other)]}

    def tool(self, tool: Any) -> Any:
        """A tool as the provider is told of it."""
        return _described(tool, "as_openai")


class Responses(Dialect):
    name = "openai-responses"
    format = FORMATS["openai-responses"]

    def request(
        self,
        system: str,
        messages: Sequence[Message],
        tail: str,
        tools: Sequence[Any],
        marks: Sequence[Breakpoint],
    ) -> dict[str, Any]:
        ends = [{"role": "user", "content": [{"type": "input_text", "text": tail}]}] if tail else []
        said: dict[str, Any] = {"input": [*messages, *ends]}
        if system:
            said = {"instructions": system, **said}
        return {"tools": list(tools), **said} if tools else said

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        return ("input", len(messages) - 1) if messages else ("instructions",) if system else None

    def tool(self, tool: Any) -> Any:
        told = _described(tool, "as_openai")
        inner = told.get("function") if isinstance(told, Mapping) else None
        return {"type": "function", **inner} if isinstance(inner, Mapping) else told


class Anthropic(Dialect):
    name = "anthropic"
    format = FORMATS["anthropic"]
    writes_marks = True
    alternates = True

    def request(
        self,
        system: str,
        messages: Sequence[Message],
        tail: str,
        tools: Sequence[Any],
        marks: Sequence[Breakpoint],
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"messages": list(messages)}
        if system:
            said = {"system": [{"type": "text", "text": system}], **said}
        if tools:
            said = {"tools": list(tools), **said}
        last = _last_for_an_hour(messages)
        for one in marks:
            _mark(said, one.path, _MARK if last is None or _place(one.path) > last else _MARK_FOR_AN_HOUR)
        if tail:
            _append(said["messages"], self.before_tail(messages) - 1, tail)
        return said

    def before_tail(self, messages: Sequence[Message]) -> int:
        """Up to the last message of the user: an answer that the host has begun for the model stays last."""
        users = (at for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "user")
        return next(users, -1) + 1

    def end(self, system: str, messages: Sequence[Message]) -> tuple[str | int, ...] | None:
        for number in range(len(messages) - 1, -1, -1):
            blocks = _blocks(messages[number])
            for index in range(len(blocks) - 1, -1, -1):
                if _takes_mark(blocks[index]):
                    return ("messages", number, "content", index)
        return ("system", 0) if system else None

    def own_marks(self, messages: Sequence[Message], tools: Sequence[Any]) -> int:
        return sum(1 for _ in marks_in([*messages, *tools]))

    def tool(self, tool: Any) -> Any:
        return _described(tool, "as_anthropic")


_DIALECTS: Final[dict[str, Dialect]] = {one.name: one for one in (Dialect(), Responses(), Anthropic())}
_ALSO: Final = {"openai-chat": "openai", "chat": "openai", "responses": "openai-responses"}


def dialect(provider: str) -> Dialect:
    name = _ALSO.get(str(provider), str(provider))
    if name not in _DIALECTS:
        raise InvalidArgument(f"no provider is called {clip(str(provider))}", hint="one of: " + ", ".join(_DIALECTS))
    return _DIALECTS[name]


def _described(tool: Any, how: str) -> Any:
    describe = getattr(tool, how, None)
    return describe() if callable(describe) else tool


def _blocks(message: Mapping[str, Any]) -> list[Any]:
    """The blocks of a message; a text is one block."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def _takes_mark(block: Any) -> bool:
    if not isinstance(block, dict) or block.get("type") in _UNMARKABLE:
        return False
    return block.get("type") != "text" or bool(str(block.get("text", "")).strip())


def _last_for_an_hour(messages: Sequence[Message]) -> tuple[int, int] | None:
    """Where the last breakpoint stands that a host keeps for an hour: the provider refuses those that stand behind one
    of five minutes."""
    found = [path for path, mark in marks_in(list(messages)) if isinstance(mark, Mapping) and mark.get("ttl") == "1h"]
    return _place(("messages", *found[-1])) if found else None


def _place(path: tuple[str | int, ...]) -> tuple[int, int]:
    """A place among the blocks of a request by its path, in the order in which the provider reads them."""
    return (-1, 0) if path[0] == "system" else (int(path[1]), int(path[3]) if len(path) > 3 else 0)


def _mark(request: dict[str, Any], path: tuple[str | int, ...], mark: Mapping[str, str]) -> None:
    """Set a breakpoint on a copy of the block at this path; a host's own stays what it is."""
    if path[0] == "system":
        request["system"] = [{**request["system"][0], "cache_control": dict(mark)}]
        return
    number, index = int(path[1]), int(path[3])
    message = request["messages"][number]
    blocks = list(_blocks(message))
    blocks[index] = {**blocks[index], "cache_control": blocks[index].get("cache_control") or dict(mark)}
    request["messages"][number] = {**message, "content": blocks}


def _append(messages: list[Message], number: int, tail: str) -> None:
    """The tail behind what the user message of this number says, or as one of its own where there is none."""
    block = {"type": "text", "text": tail}
    if number < 0:
        messages.insert(0, {"role": "user", "content": [block]})
    else:
        messages[number] = {**messages[number], "content": [*_blocks(messages[number]), block]}
