"""What a client sent: a request with its messages and tools, and the facts about each message."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Raw

from coatcheck.gateway.raw_json import canonical, digest

Side = Literal["user", "answer", "system"]
FIRST: Final = 1_000
"""Largest size in bytes of a result that usually stays without a lookup."""
_PREFIX_DIGITS: Final = 40


@dataclass(slots=True)
class Request:
    """A client's request, with its messages and tools as they came. `top` has all other fields; its
    list of messages may be empty."""

    top: dict[str, Raw]
    messages: list[Raw]
    facts: list[MessageFacts]
    tools: list[Raw]
    model: str
    is_streamed: bool
    has_surrogates: bool = False

    @property
    def has_answers(self) -> bool:
        return any(one.side == "answer" for one in self.facts)

    @property
    def first(self) -> str:
        """The digest of the conversation's first message, with the system messages before it."""
        parts = []
        for one in self.facts:
            parts.append(one.digest)
            if one.side != "system":
                break
        return digest("first", *parts)

    def prefixes(self, start: str) -> list[str]:
        """Return the digest of everything before each message, and at the end that of all messages.
        `start` is what else separates this conversation from others."""
        running = hashlib.sha256(start.encode())
        found = [running.hexdigest()[:_PREFIX_DIGITS]]
        for one in self.facts:
            running.update(one.in_prefix.encode() + b"\n")
            found.append(running.hexdigest()[:_PREFIX_DIGITS])
        return found

    def replaceable(self, programs: Collection[str] = ()) -> dict[int, list[ResultFacts]]:
        """Return the results that may become stubs, by the number of their message. Results for a
        provider's program are not among them: those of the calls that it made here, of `programs`,
        and those that say so themselves."""
        called = {*programs, *(call_id for one in self.facts for call_id in one.programs)}
        found: dict[int, list[ResultFacts]] = {}
        for number, facts in enumerate(self.facts):
            for result in facts.results:
                if not result.is_for_program and result.call_id not in called:
                    found.setdefault(number, []).append(result)
        return found


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """What is known about one message. `keys` are the values in an answer that clients send back
    unchanged, each with the place of its block; `text` is an answer's text without whitespace.
    `label` describes the message to a person. `programs` are the ids of calls that a provider's
    program made. `thinks` says whether the message has thinking.

    `in_prefix` is what the message adds to the digest of a prefix: its own digest, but for an
    answer without what clients change in it (thinking, whitespace, the encoding of arguments).
    `is_deep` says whether the message is nested too deeply to look into: it passes as it is."""

    side: Side
    digest: str
    in_prefix: str
    size: int
    label: str = ""
    keys: tuple[tuple[int, str], ...] = ()
    results: tuple[ResultFacts, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()
    text: str = ""
    blocks: int = 1
    thinks: bool = False
    is_deep: bool = False


@dataclass(frozen=True, slots=True)
class ResultFacts:
    """A tool result in a message: its place there, the call it answers, its key in the ledger, and
    its size. `is_for_program` says whether the result itself names a provider's program as its
    caller."""

    place: int
    call_id: str
    key: str
    size: int
    is_for_program: bool = False

    @classmethod
    def of(
        cls, place: int, call_id: str, content: Any, *, is_for_program: bool = False
    ) -> ResultFacts:
        size = len(content) if isinstance(content, str) else len(str(content))
        return cls(
            place, call_id, digest("result", call_id, canonical(content)), size, is_for_program
        )
