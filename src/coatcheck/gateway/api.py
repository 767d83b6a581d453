"""What the gateway knows about an API: how to read a request, what is sent for it, and how answers
are merged.

Requests are read as `msgspec.Raw`: a value that is not changed keeps its bytes. What is learned
about a message is kept by the digest of its bytes, so that only new messages are decoded. `Api` is
one provider's interface, `Merger` joins the steps of one answer into what the client is shown.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec
import xxhash
from msgspec import Raw

from coatcheck.gateway.sse import Event, EventSplitter, event
from coatcheck.messages.cost import BoundedCache

if TYPE_CHECKING:
    from coatcheck._toolkit import Tool
    from coatcheck.parts import Part

Side = Literal["user", "answer", "system"]
FIRST: Final = 1_000
"""Largest size in bytes of a result that usually stays without a lookup."""
_KNOWN: Final = 20_000  # messages whose facts are kept
_LEAST_OUTPUT: Final = 16  # minimum output tokens for a further step
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_ARRAY: Final = msgspec.json.Decoder(list[Raw])
_ESCAPE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\u[eE][0-7]..|\\."
)
_PRIVATE: Final = re.compile(rb"\\u[eE][0-7]..|\\.")
_PAIR: Final = 12  # bytes of two escapes
_SEED: Final = secrets.randbits(64)  # so that no client can prepare two messages with one digest
_PREFIX_DIGITS: Final = 40
_DEEPEST: Final = 100  # levels of a message that is looked into; parsers fail at about 500


class Unreadable(ValueError):
    """A body that cannot be read. It is relayed unchanged."""


def fields_of(raw: Raw | bytes) -> dict[str, Raw]:
    """Return the members of a JSON object with their bytes. Raises `Unreadable`."""
    try:
        return _OBJECT.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def items_of(raw: Raw | bytes) -> list[Raw]:
    """Return the elements of a JSON array with their bytes. Raises `Unreadable`."""
    try:
        return _ARRAY.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def value_of(raw: Raw | bytes) -> Any:
    """Return a JSON value. Lone surrogates are kept. Raises `Unreadable`."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        try:
            return json.loads(bytes(raw))
        except (ValueError, RecursionError) as error:
            raise Unreadable(str(error)) from error
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error


def raw_of(value: Any) -> Raw:
    """Return the JSON of a value, which may contain `Raw`."""
    try:
        return Raw(msgspec.json.encode(value))
    except (UnicodeEncodeError, msgspec.MsgspecError):
        return Raw(json.dumps(value).encode())


def value_field(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a member, None if it is missing."""
    return value_of(fields[name]) if name in fields else None


def text_field(fields: Mapping[str, Raw], name: str) -> str:
    """Return a member that is a string, '' if it is missing or something else."""
    found = value_field(fields, name)
    return found if isinstance(found, str) else ""


def number_field(fields: Mapping[str, Raw], name: str) -> int | None:
    found = value_field(fields, name)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def object_field(fields: Mapping[str, Raw], name: str) -> dict[str, Any]:
    """Return a member that is an object, {} if it is missing or something else."""
    found = value_field(fields, name)
    return found if isinstance(found, dict) else {}


def text_in(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "".join(str(one.get("text", "")) for one in blocks if isinstance(one, dict))


def digest(*parts: str) -> str:
    """Return the ledger key for these texts."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "big"))
        whole.update(data)
    return whole.hexdigest()[:40]


def squeezed(text: str) -> str:
    """Return a text without whitespace: clients trim texts, and join them with blank lines."""
    return "".join(text.split())


def text_key(text: str) -> str:
    """Return the value under which an answer is found that has only text."""
    return digest("text", squeezed(text))


def canonical(value: Any) -> str:
    """Return a text that is equal for values that a provider treats as equal: without cache marks
    and outer whitespace of texts, keys in one order, 1 for 1.0, and a text in place of a single
    text block."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def canonical_json(raw: Raw | str) -> str:
    """Return the canonical text of a value that is given as JSON; the JSON itself if it is not
    valid, or too deep."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
    try:
        value = value_of(data)
    except Unreadable:
        return data.decode("utf-8", "replace")
    return data.decode("utf-8", "replace") if is_deep(value) else canonical(value)


def is_deep(value: Any) -> bool:
    """Whether a value is nested more deeply than we look into values."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return False
        level = inner
    return True


def _is_text(value: dict[str, Any]) -> bool:
    """Whether a block contains only text."""
    is_text = value.get("type") in ("text", "input_text", "output_text") and isinstance(
        value.get("text"), str
    )
    return is_text and value.keys() <= {"type", "text", "cache_control", "annotations", "logprobs"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if _is_text(value):
            return value["text"].strip()
        return {name: _plain(one) for name, one in value.items() if name != "cache_control"}
    if isinstance(value, list):
        plain = [_plain(one) for one in value]
        return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain
    if isinstance(value, str):
        return value.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, slots=True)
class HeldResult:
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
    ) -> HeldResult:
        size = len(content) if isinstance(content, str) else len(str(content))
        return cls(
            place, call_id, digest("result", call_id, canonical(content)), size, is_for_program
        )


@dataclass(frozen=True, slots=True)
class HeldFacts:
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
    results: tuple[HeldResult, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()
    text: str = ""
    blocks: int = 1
    thinks: bool = False
    is_deep: bool = False


@dataclass(slots=True)
class ClientRequest:
    """A client's request, with its messages and tools as they came. `top` has all other fields; its
    list of messages may be empty."""

    top: dict[str, Raw]
    messages: list[Raw]
    facts: list[HeldFacts]
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

    def replaceable(self, programs: Collection[str] = ()) -> dict[int, list[HeldResult]]:
        """Return the results that may become stubs, by the number of their message. Results for a
        provider's program are not among them: those of the calls that it made here, of `programs`,
        and those that say so themselves."""
        called = {*programs, *(call_id for one in self.facts for call_id in one.programs)}
        found: dict[int, list[HeldResult]] = {}
        for number, facts in enumerate(self.facts):
            for result in facts.results:
                if not result.is_for_program and result.call_id not in called:
                    found.setdefault(number, []).append(result)
        return found


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


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What was sent for an answer that a client keeps: messages, and what the client was shown
    after the key."""

    messages: list[Raw]
    after: list[str] = field(default_factory=list)


class Merger(ABC):
    """Joins the steps of one answer. `own` are the names of our tools. If the client wants
    structured output, it is shown only the text of the last step.

    For a streamed answer, `feed` takes bytes and returns what the client gets now; for others,
    `take` takes the body of a step. `end_step` returns the finished step, `next_step` begins
    another and returns what the client gets before it, `finish` returns the end of the answer, or
    all of it if it is not streamed.

    `last_key` is the last value that the client was shown and will send back, `after` what it was
    shown after that, and `texts` are all texts that it was shown."""

    def __init__(self, own: Iterable[str], request: ClientRequest, *, is_structured: bool) -> None:
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

    @property
    def text_key(self) -> str:
        """The value under which a text-only answer is found."""
        return text_key("".join(self.texts))

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
        last = self.usages[-1] if self.usages else {}
        summed: dict[str, Any] = reduce(added, self.usages, {})
        usage = {
            **summed,
            **{name: value for name, value in last.items() if name.startswith(given)},
        }
        tokens = [int(usage.get(f"{name}_tokens") or 0) for name in (given, written)]
        return {**usage, "total_tokens": sum(tokens)}


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
        self._facts: BoundedCache[bytes, HeldFacts] = BoundedCache(_KNOWN)
        self._facts_lock = threading.Lock()

    def read(self, body: bytes) -> ClientRequest:
        """Read a request. Raises `Unreadable` if it is not a request of this API."""
        has_surrogates = False
        try:
            top = fields_of(body)
        except Unreadable:
            readable = _without_surrogates(body)
            if readable is None:
                raise
            has_surrogates = True
            top = fields_of(readable)
        messages = self.messages_in(top)
        facts = [self.facts_of(one) for one in messages]
        tools = items_of(top["tools"]) if "tools" in top and bytes(top["tools"]) != b"null" else []
        stream = bytes(top["stream"]) == b"true" if "stream" in top else False
        return ClientRequest(
            top, messages, facts, tools, text_field(top, "model"), stream, has_surrogates
        )

    def messages_in(self, top: Mapping[str, Raw]) -> list[Raw]:
        if self.list_name not in top:
            raise Unreadable(f"no {self.list_name}")
        return items_of(top[self.list_name])

    def facts_of(self, raw: Raw) -> HeldFacts:
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
            return self._facts.keep(key, facts)

    def _facts_of_deep(self, message: dict[str, Any], data: bytes) -> HeldFacts:
        """Return what is known about a message that is nested too deeply: whose it is, but nothing
        of its content."""
        flat = {
            name: value for name, value in message.items() if not isinstance(value, dict | list)
        }
        whole = digest("deep", data.decode("utf-8", "replace"))
        facts = self.facts(flat, len(data))
        return replace(facts, digest=whole, in_prefix=whole, results=(), text="", is_deep=True)

    @abstractmethod
    def facts(self, message: dict[str, Any], size: int) -> HeldFacts:
        """Return what is known about a message."""

    def written(
        self, request: ClientRequest, messages: Sequence[Raw], tools: Sequence[Raw], **more: Any
    ) -> bytes:
        """Return the body with these messages and tools. Everything else keeps its bytes; new
        members go last."""
        changed: dict[str, Any] = {**request.top, self.list_name: list(messages)}
        if len(tools) > len(request.tools):
            changed["tools"] = list(tools)
        body = bytes(raw_of(changed | more))
        return _with_surrogates(body) if request.has_surrogates else body

    @abstractmethod
    def described(self, tools: Sequence[Tool]) -> list[Raw]:
        """Return our tools as this API describes them."""

    @abstractmethod
    def result_content(self, raw: Raw, result: HeldResult) -> Any:
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
        self, request: ClientRequest, sent: list[Raw], answer: list[Raw], results: list[Raw]
    ) -> list[Raw]:
        """Return the messages of the next step."""
        return [*sent, *answer, *results]

    def settings(
        self, request: ClientRequest, spent: int, *, is_last: bool
    ) -> dict[str, Any] | None:
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

    def least_output(self, request: ClientRequest) -> int:
        """Return the minimum number of output tokens for a further step."""
        return _LEAST_OUTPUT

    def first_settings(self, request: ClientRequest, own: Sequence[str]) -> dict[str, Any]:
        """Return what else changes in the first step."""
        return {}

    @abstractmethod
    def merger(self, own: Iterable[str], request: ClientRequest) -> Merger: ...

    def refusal(self, request: ClientRequest) -> str | None:
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

    def unbound(self, request: ClientRequest, sent: Sequence[Raw], error: bytes) -> list[str]:
        """Return the keys of the thinking that the provider refuses with this error, and of all
        thinking after it. Empty if the error has another reason."""
        return []

    def without_thinking(self, sent: Sequence[Raw], keys: Collection[str]) -> list[Raw]:
        """Return messages without the thinking that has these keys."""
        return list(sent)

    def chained(self, request: ClientRequest, merger: Merger) -> dict[str, Any]:
        """Return what ties a further step to the one before."""
        return {}

    def chain(self, request: ClientRequest) -> str | None:
        """Return the key of what a request continues, if the provider keeps the conversation."""
        return None

    def links(
        self, request: ClientRequest, merger: Merger, adopted: str
    ) -> dict[str, dict[str, Any]]:
        """Return records, by the key of `chain`, for requests that continue this answer by its id.
        `adopted` is the key of the adoption."""
        return {}

    def renamed(
        self, request: ClientRequest, merger: Merger, waiting: Sequence[Raw]
    ) -> dict[str, dict[str, Any]]:
        """Return records, by key, for requests that name this answer: ids to replace, and our
        results that wait."""
        return {}

    def renaming(self, request: ClientRequest, link: Mapping[str, Raw]) -> dict[str, Any]:
        """Return what changes in a request that names an earlier answer, given the record of that
        answer."""
        return {}

    def named_before(self, request: ClientRequest) -> str | None:
        """Return the key of an earlier answer that a request names by its id, if the id only
        informs the provider."""
        return None

    def waiting_keys(self, request: ClientRequest) -> list[str]:
        """Return the keys of our results that go before the results in this request."""
        return []

    def program_keys(self, request: ClientRequest) -> dict[str, str]:
        """Return the keys of calls that a provider's program may have made and that the request
        does not contain, each with the id of the call."""
        return {}

    def unspliced(self, held: Sequence[Raw]) -> list[Raw]:
        """Return what is sent for an answer that the ledger does not have."""
        return list(held)

    def usage_in(self, chunks: bytes, *, is_streamed: bool) -> tuple[dict[str, Any], Any]:
        """Return the usage that an answer reports, and the answer as a message, None if it is not
        complete."""
        merger = self.merger((), ClientRequest({}, [], [], [], "", is_streamed))
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


def added(one: Any, other: Any) -> Any:
    """Add two usages: numbers are summed, objects are added by member; for anything else the later
    one is used."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: added(one.get(name), other.get(name)) for name in one | other}
    if one is None or other is None:
        return one if other is None else other
    if (
        isinstance(one, int | float)
        and isinstance(other, int | float)
        and not isinstance(one, bool)
    ):
        return one + other
    return other


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


def _without_surrogates(body: bytes) -> bytes | None:
    """Return the body with each lone surrogate as a private-use character, None if there are none.
    JavaScript cuts strings between two surrogates, and strict parsers reject the halves."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return None
    found = False

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal found
        text = match[0]
        if text[1:2] != b"u" or len(text) == _PAIR:
            return text
        if text[2:3] in b"eE":
            raise Unreadable("lone surrogates beside characters of private use")
        found = True
        return b"\\ue" + b"%x" % (int(text[3:4], 16) - 8) + text[4:]

    try:
        changed = _ESCAPE.sub(replaced, body)
    except Unreadable:
        return None
    return changed if found else None


def _with_surrogates(body: bytes) -> bytes:
    """Undo `_without_surrogates`."""

    def replaced(match: re.Match[bytes]) -> bytes:
        text = match[0]
        return (
            b"\\ud" + b"%x" % (int(text[3:4], 16) + 8) + text[4:]
            if text[1:3] in (b"ue", b"uE")
            else text
        )

    return _PRIVATE.sub(replaced, body)
