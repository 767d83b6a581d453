"""The merging of an answer: one or more steps of the model become what the client is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from msgspec import Raw

from coatcheck.gateway.raw_json import value_of
from coatcheck.gateway.request import Request
from coatcheck.gateway.sse import Event, EventSplitter


class Merger(ABC):
    """Joins the steps of one answer. `own` are the names of our tools. If the client wants
    structured output, it is shown only the text of the last step.

    For a streamed answer, `feed` takes bytes and returns what the client gets now; for others,
    `take` takes the body of a step. `end_step` returns the finished step, `next_step` begins
    another and returns what the client gets before it, `finish` returns the end of the answer, or
    all of it if it is not streamed.

    `last_key` is the last value that the client was shown and will send back, `after` what it was
    shown after that, and `texts` are all texts that it was shown."""

    def __init__(self, own: Iterable[str], request: Request, *, is_structured: bool) -> None:
        self.own = frozenset(own)
        self.request = request
        self._is_structured = is_structured
        self.steps = 1
        self.has_failed = False
        self.last_key: str | None = None
        self.after: list[str] = []
        self.texts: list[str] = []
        self.usages: list[dict[str, Any]] = []

    @property
    def answer_id(self) -> str:
        """The id under which the client knows the answer, if it can name it later."""
        return ""

    def _begin(self) -> None:
        """Forget the step before."""
        self._events = EventSplitter()
        self.is_complete = False

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(out for one in self._events.feed(chunk) for out in self._received(one))

    @abstractmethod
    def _received(self, one: Event) -> Iterator[bytes]:
        """Take an event, and yield what the client gets now."""

    @abstractmethod
    def take(self, body: bytes) -> None: ...
    @abstractmethod
    def end_step(self) -> LoopStep: ...

    def next_step(self) -> bytes:
        shown = self._released(with_text=False)
        self._keep(with_text=not self._is_structured)
        self.steps += 1
        self._begin()
        return shown

    def _released(self, *, with_text: bool) -> bytes:
        """Return the events that waited for the end of the step."""
        return b""

    @abstractmethod
    def _keep(self, *, with_text: bool) -> None:
        """Keep what the client is shown of a finished step, unless it was already noted with its
        events."""

    @abstractmethod
    def finish(self, stop: str | None = None) -> bytes: ...

    def _tokens_spent(self, name: str) -> int:
        """Return the output tokens of the last step, from the member of its usage with this
        name."""
        return int((self.usages[-1] if self.usages else {}).get(name) or 0)

    def _summed_usage(self, given: str, written: str) -> dict[str, Any]:
        """Return the input figures of the last step, whose names begin with `given`, and the sum of
        all output. Clients take the size of their context from it."""
        usage: dict[str, Any] = reduce(added, self.usages, {})
        if self.usages:
            last = self.usages[-1]
            usage |= {name: value for name, value in last.items() if name.startswith(given)}
        tokens = [int(usage.get(f"{name}_tokens") or 0) for name in (given, written)]
        return {**usage, "total_tokens": sum(tokens)}


@dataclass(frozen=True, slots=True)
class OwnCall:
    """A call of one of our tools."""

    call_id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One finished step: the model's messages as they are sent back, the calls of our tools, and
    the number of calls of the client's. `is_open` says whether the model waits for results."""

    messages: list[Raw]
    own: list[OwnCall]
    others: int
    is_open: bool
    output_tokens: int

    @property
    def wants_results(self) -> bool:
        """Whether the model waits for results of our tools alone."""
        return bool(self.own) and not self.others and self.is_open


def arguments_of(written: Any) -> Any:
    """Return the arguments of a call, which a model writes as JSON. Raises `Unreadable`."""
    return value_of(str(written or "{}").encode("utf-8", "surrogatepass"))


def added(one: Any, other: Any) -> Any:
    """Add two usages: numbers are summed, objects are added by member; for anything else the later
    one is used."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: added(one.get(name), other.get(name)) for name in one | other}
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, bool) or not isinstance(one, int | float):
        return other
    return one + other if isinstance(other, int | float) else other


def accumulated(
    known: dict[str, Any], delta: Mapping[str, Any], skip: Callable[[str], bool]
) -> None:
    """Add a delta to an object: texts and lists are joined, everything else is replaced."""
    for name, value in delta.items():
        if skip(name) or value is None:
            continue
        before = known.get(name)
        if isinstance(value, str | list) and isinstance(before, type(value)):
            known[name] = before + value  # type: ignore[operator]
        else:
            known[name] = value
