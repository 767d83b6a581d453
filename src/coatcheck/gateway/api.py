"""What the gateway knows about a provider's API: how to read a request, and what is sent for it."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import xxhash
from cachetools import LRUCache
from msgspec import Raw

from coatcheck.gateway.answer import Merger, OwnCall
from coatcheck.gateway.ledger import LedgerEntry
from coatcheck.gateway.raw_json import (
    Unreadable,
    digest,
    fields_of,
    is_deep,
    items_of,
    number_field,
    raw_of,
    text_field,
    value_of,
    with_surrogates,
    without_surrogates,
)
from coatcheck.gateway.request import MessageFacts, Request, ResultFacts
from coatcheck.gateway.sse import event

if TYPE_CHECKING:
    from coatcheck._toolkit import Tool
    from coatcheck.parts import Part

_KNOWN: Final = 20_000  # messages whose facts are kept
_LEAST_OUTPUT: Final = 16  # minimum output tokens for a further step
_SEED: Final = secrets.randbits(64)  # so that no client can prepare two messages with one digest


class Api(ABC):
    """One provider's API."""

    name: ClassVar[str]
    list_name: ClassVar[str] = "messages"
    joins_answers: ClassVar[bool] = False
    """Whether consecutive messages of the model are one answer."""
    binds_thinking: ClassVar[bool] = False
    """Whether the provider refuses thinking after any history but the one that it was written
    for."""
    stops: ClassVar[Mapping[str, str]]
    """The stop reason of an answer that was cut by the limit on output or on steps."""
    output_limits: ClassVar[tuple[str, ...]]
    """The fields of a request that limit the output tokens."""
    no_calls: ClassVar[Any] = "none"
    """The tool choice that allows no calls."""
    error_name: ClassVar[str] = ""
    """The name of error events."""
    ping: ClassVar[bytes]

    def __init__(self) -> None:
        self._facts: LRUCache[bytes, MessageFacts] = LRUCache(_KNOWN)
        self._facts_lock = threading.Lock()

    def read(self, body: bytes) -> Request:
        """Read a request. Raises `Unreadable` if it is not a request of this API."""
        has_surrogates = False
        try:
            top = fields_of(body)
        except Unreadable:
            readable = without_surrogates(body)
            if readable is None:
                raise
            has_surrogates = True
            top = fields_of(readable)
        messages = self.messages_in(top)
        facts = [self.facts_of(one) for one in messages]
        tools = items_of(top["tools"]) if "tools" in top and bytes(top["tools"]) != b"null" else []
        stream = bytes(top["stream"]) == b"true" if "stream" in top else False
        return Request(
            top, messages, facts, tools, text_field(top, "model"), stream, has_surrogates
        )

    def messages_in(self, top: Mapping[str, Raw]) -> list[Raw]:
        if self.list_name not in top:
            raise Unreadable(f"no {self.list_name}")
        return items_of(top[self.list_name])

    def facts_of(self, raw: Raw) -> MessageFacts:
        """Return what is known about a message. Raises `Unreadable`.

        Facts are kept by the digest of the message's bytes, for all threads: a request of 400
        messages and 0.7 MB is read in 1.5 ms if its messages are known, else in 17 ms."""
        data = bytes(raw)
        key = xxhash.xxh3_128_digest(data, _SEED)
        with self._facts_lock:
            found = self._facts.get(key)
        if found is not None:
            return found
        value = value_of(raw)
        if not isinstance(value, dict):
            raise Unreadable("a message is not an object")
        facts = self._facts_of_deep(value, data) if is_deep(value) else self.facts(value, len(data))
        with self._facts_lock:
            self._facts[key] = facts
        return facts

    def _facts_of_deep(self, message: dict[str, Any], data: bytes) -> MessageFacts:
        """Return what is known about a message that is nested too deeply: whose it is, but nothing
        of its content."""
        flat = {
            name: value for name, value in message.items() if not isinstance(value, dict | list)
        }
        whole = digest("deep", data.decode("utf-8", "replace"))
        facts = self.facts(flat, len(data))
        return replace(facts, digest=whole, in_prefix=whole, results=(), text="", is_deep=True)

    @abstractmethod
    def facts(self, message: dict[str, Any], size: int) -> MessageFacts:
        """Return what is known about a message."""

    def written(
        self, request: Request, messages: Sequence[Raw], tools: Sequence[Raw], **more: Any
    ) -> bytes:
        """Return the body with these messages and tools. Everything else keeps its bytes; new
        members go last."""
        changed: dict[str, Any] = {**request.top, self.list_name: list(messages)}
        if len(tools) > len(request.tools):
            changed["tools"] = list(tools)
        body = bytes(raw_of(changed | more))
        return with_surrogates(body) if request.has_surrogates else body

    @abstractmethod
    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        """Return our tools as this API describes them."""

    @abstractmethod
    def result_content(self, raw: Raw, result: ResultFacts) -> Any:
        """Return the content of a result."""

    @abstractmethod
    def with_results(self, raw: Raw, contents: Mapping[int, Raw]) -> Raw:
        """Return a message with these contents in its results, by their place."""

    @abstractmethod
    def expanded(self, entry: LedgerEntry, held: Sequence[Raw], place: int | None) -> list[Raw]:
        """Return what was sent for an answer that the client keeps. `place` is the index of the
        block with the key."""

    def append(self, sent: list[Raw], message: Raw, *, is_behind_own: bool) -> None:
        """Add a client's message to what is sent so far, which may end with messages from the
        ledger."""
        sent.append(message)

    @abstractmethod
    def results(self, answers: Sequence[tuple[OwnCall, list[Part]]]) -> list[Raw]:
        """Return the messages with the results of our tools."""

    def following(
        self, request: Request, sent: list[Raw], answer: list[Raw], results: list[Raw]
    ) -> list[Raw]:
        """Return the messages of the next step."""
        return [*sent, *answer, *results]

    def settings(self, request: Request, spent: int, *, is_last: bool) -> dict[str, Any] | None:
        """Return what else changes in a further step, after `spent` output tokens. None if too few
        are left."""
        changed: dict[str, Any] = {"tool_choice": self.no_calls} if is_last else {}
        for name in self.output_limits:
            most = number_field(request.top, name)
            if most is not None:
                if most - spent < self.least_output(request):
                    return None
                changed[name] = most - spent
        return changed

    def least_output(self, request: Request) -> int:
        """Return the minimum number of output tokens for a further step."""
        return _LEAST_OUTPUT

    def first_settings(self, request: Request, own: Sequence[str]) -> dict[str, Any]:
        """Return what else changes in the first step."""
        return {}

    @abstractmethod
    def merger(self, own: Iterable[str], request: Request) -> Merger: ...

    def refusal(self, request: Request) -> str | None:
        """Return why a request of an adopted conversation cannot be sent, or None."""
        return None

    def error(self, status: int, message: str) -> bytes:
        """Return the body of an error, by default as OpenAI writes it."""
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        return bytes(
            raw_of({"error": {"message": message, "type": kind, "param": None, "code": None}})
        )

    def error_event(self, status: int, message: str) -> bytes:
        return event(self.error(status, message), self.error_name)

    def wrapped_error(self, body: bytes) -> bytes:
        """Return the body of a provider's error as an event."""
        return event(body, self.error_name)

    def unbound(self, request: Request, sent: Sequence[Raw], error: bytes) -> list[str]:
        """Return the keys of the thinking that the provider refuses with this error, and of all
        thinking after it. Empty if the error has another reason."""
        return []

    def without_thinking(self, sent: Sequence[Raw], keys: Collection[str]) -> list[Raw]:
        """Return messages without the thinking that has these keys."""
        return list(sent)

    def chained(self, request: Request, merger: Merger) -> dict[str, Any]:
        """Return what ties a further step to the one before."""
        return {}

    def chain(self, request: Request) -> str | None:
        """Return the key of what a request continues, if the provider keeps the conversation."""
        return None

    def links(self, request: Request, merger: Merger, adopted: str) -> dict[str, dict[str, Any]]:
        """Return records, by the key of `chain`, for requests that continue this answer by its id.
        `adopted` is the key of the adoption."""
        return {}

    def renamed(
        self, request: Request, merger: Merger, waiting: Sequence[Raw]
    ) -> dict[str, dict[str, Any]]:
        """Return records, by key, for requests that name this answer: ids to replace, and our
        results that wait."""
        return {}

    def renaming(self, request: Request, link: Mapping[str, Raw]) -> dict[str, Any]:
        """Return what changes in a request that names an earlier answer, given the record of that
        answer."""
        return {}

    def named_before(self, request: Request) -> str | None:
        """Return the key of an earlier answer that a request names by its id, if the id only
        informs the provider."""
        return None

    def waiting_keys(self, request: Request) -> list[str]:
        """Return the keys of our results that go before the results in this request."""
        return []

    def program_keys(self, request: Request) -> dict[str, str]:
        """Return the keys of calls that a provider's program may have made and that the request
        does not contain, each with the id of the call."""
        return {}

    def unspliced(self, held: Sequence[Raw]) -> list[Raw]:
        """Return what is sent for an answer that the ledger does not have."""
        return list(held)

    def usage_in(self, chunks: bytes, *, is_streamed: bool) -> tuple[dict[str, Any], Any]:
        """Return the usage that an answer reports, and the answer as a message, None if it is not
        complete."""
        merger = self.merger((), Request({}, [], [], [], "", is_streamed))
        if is_streamed:
            merger.feed(chunks)
        else:
            merger.take(chunks)
        step = merger.end_step()
        usage = merger.usages[0] if merger.usages else {}
        return usage, self.recorded(step.messages) if merger.is_complete else None

    def recorded(self, answer: Sequence[Raw]) -> Any:
        """Return the messages of a whole answer as they are recorded."""
        return value_of(answer[0]) if answer else None
