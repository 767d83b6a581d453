"""What is sent for a request: stubs in place of results, our tools after the client's, and the ledger's messages in
place of answers that the client has in part.

What is sent for a conversation only ever grows. A conversation is adopted with its first request, and every decision
about it is written to the ledger before a byte of it is sent; a conversation that began elsewhere is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw

from coatcheck._toolkit import DESCRIPTIONS, function_of, known_as, toolkit
from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize import Policy, ResultSource, Situation
from coatcheck.externalize.blocks import ContentPart
from coatcheck.externalize.policy import configured
from coatcheck.gateway.api import (
    FIRST,
    Api,
    ClientRequest,
    HeldResult,
    OwnCall,
    Unreadable,
    digest,
    items_of,
    raw_of,
    value_of,
)
from coatcheck.gateway.ledger import Adoption, Ledger, adoption_of, entry_of
from coatcheck.messages.cost import BoundedCache
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session

Mode = Literal["observe", "stub", "loop"]
MODES: Final[tuple[Mode, ...]] = ("observe", "stub", "loop")
_SOURCE: Final = ResultSource("gateway")
_LOG: Final = logging.getLogger("coatcheck")
_PREFIX: Final = "coatcheck_"
_REMEMBERED: Final = 4_096
_BYTES_PER_TOKEN: Final = 4
_CALLS: Final = 8  # calls of our tools that are answered in one step
_BREAKS: Final = 8  # times that thinking is left out of one conversation
_PINNED: Final = ("max_tokens", "max_chars", "max_bytes", "preview_chars", "redact")
_PRIVATE: Final = range(0xE000, 0xE800)


class RefusedRequest(Exception):
    """A request that must not be sent: its status, what to do, and Anthropic's code if there is one."""

    def __init__(self, status: int, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(slots=True)
class Judged:
    """A result that was judged now: its tool, the tokens of the original and of its stub, and the pointer."""

    tool: str
    tokens: int
    stub_tokens: int = 0
    pointer: str | None = None


@dataclass(slots=True)
class Outgoing:
    """What is sent for a request. `adoption` is None if the conversation is not changed."""

    body: bytes
    request: ClientRequest
    messages: list[Raw]
    tools: list[Raw]
    adoption: Adoption | None = None
    judged: list[Judged] = field(default_factory=list)
    replaced: int = 0
    """Bytes of results that the client keeps and that are not sent."""
    settings: dict[str, Any] = field(default_factory=dict)
    adopted: str = ""
    """The key of the adoption."""
    places: Sequence[int] = ()
    """Where each message of the client is among those that are sent; empty if both are the same."""

    def sent_from(self, number: int) -> list[Raw]:
        """Return what is sent for the client's messages from this one on."""
        return self.messages[self.places[number] if number < len(self.places) else number :]

    @property
    def own(self) -> list[str]:
        """The names of our tools that we answer ourselves."""
        adoption = self.adoption
        return list(adoption.names.values()) if adoption is not None and adoption.mode == "loop" else []


class Sender:
    """Prepares what is sent for the requests of one store. It remembers only what the ledger has and never changes."""

    def __init__(self, *, mode: Mode, policy: Policy | None = None) -> None:
        self._mode = mode
        self._policy = policy
        self.pins: BoundedCache[tuple[str, str], Mapping[str, Raw]] = BoundedCache(_REMEMBERED)
        self._foreign: BoundedCache[tuple[str, str], bool] = BoundedCache(_REMEMBERED)

    def outgoing(
        self, api: Api, request: ClientRequest, body: bytes, session: Session, *, is_quick: bool = False
    ) -> Outgoing:
        """Return what is sent for a request. Raises `RefusedRequest`, and with `is_quick` `NotRemembered` if the store
        must be asked."""
        first, place = digest("adopted", api.name, request.first), f"{session.store.url}/{session.session_id}"
        same = Outgoing(body, request, request.messages, request.tools)
        ledger, chain = Ledger(session, is_quick=is_quick), api.chain(request)
        continues = request.has_answers or chain is not None
        if not request.facts or (continues and (place, chain or first) in self._foreign):
            return same
        if not continues and not request.tools:
            return same
        link: Mapping[str, Raw] = {}
        try:
            if chain is not None:
                link = ledger.find([chain]).get(chain, {})
                first = value_of(link["adopted"]) if link else first
            adoption = self._adopted(ledger, (place, first), first) if link or chain is None else None
        except StoreError as error:
            if not continues:
                _LOG.warning("a conversation is not changed, its ledger cannot be read: %s", mask(error.message))
                return same
            raise RefusedRequest(503, f"the gateway cannot read its ledger: {mask(error.message)}") from error
        refused = api.refusal(request)
        if adoption is None:
            if continues and (chain is None or "conversation" not in request.top):
                self._foreign.keep((place, chain or first), True)
            is_new = not continues or (chain is not None and "conversation" in request.top)
            adoption = None if refused or not is_new else self._adopt(api, request, session, ledger, first)
            if adoption is None:
                return same
        if refused is not None:
            raise RefusedRequest(400, refused)
        try:
            policy = self._policy or configured(session.store.settings)
            sending = _Sending(api, request, session, ledger, adoption, policy, self.pins, place)
            return sending.done(first, link)
        except StoreError as error:
            raise RefusedRequest(503, f"the gateway cannot read its ledger: {mask(error.message)}") from error

    def _adopted(self, ledger: Ledger, key: tuple[str, str], first: str) -> Adoption | None:
        found = self.pins.get(key) or ledger.find([first]).get(first)
        return None if found is None else adoption_of(self.pins.keep(key, found))

    def _adopt(self, api: Api, request: ClientRequest, session: Session, ledger: Ledger, first: str) -> Adoption | None:
        """Adopt a new conversation, if the mode allows it."""
        if self._mode == "observe":
            return None
        policy = self._policy or configured(session.store.settings)
        pinned = {name: getattr(policy, name) for name in _PINNED}
        theirs = list(_own_tools(request.tools))
        if any(purpose == "get" for purpose, _ in theirs):
            adoption = Adoption("stub", [], dict(theirs), pinned)
        elif self._mode == "loop":
            names = {str(function_of(value_of(one)).get("name")) for one in request.tools}
            tools = toolkit(session)
            if names & {tool.name for tool in tools}:
                tools = toolkit(session, prefix=_PREFIX)
            by_purpose = dict(zip(("get", "list", "store"), (tool.name for tool in tools), strict=True))
            adoption = Adoption("loop", api.described(tools), by_purpose, pinned)
        else:
            return None
        try:
            return ledger.adopt(first, adoption)
        except CoatcheckError as error:
            _LOG.warning("a conversation is not changed, its ledger cannot be written: %s", mask(error.message))
            return None

    def recovered(self, api: Api, outgoing: Outgoing, session: Session, error: bytes) -> bool:
        """Leave out thinking that the provider has refused with this error: from the first block that fails to the end.
        It stays out of all later requests. Return whether there is something else to send now."""
        keys = api.unbound(outgoing.request, outgoing.messages, error) if outgoing.adopted else []
        if not keys:
            return False
        ledger, places = Ledger(session), _unbound_keys(outgoing.adopted)
        try:
            known = ledger.find(places)
            free = [place for place in places if place not in known]
            if not any(set(keys) <= set(value_of(ledger.write(place, {"blocks": keys})["blocks"])) for place in free):
                return False
        except CoatcheckError as failure:
            _LOG.warning("thinking that was refused cannot be left out: %s", mask(failure.message))
            return False
        outgoing.messages = api.without_thinking(outgoing.messages, keys)
        outgoing.body = api.written(outgoing.request, outgoing.messages, outgoing.tools, **outgoing.settings)
        return True


@dataclass(slots=True)
class _Sending:
    """One request of an adopted conversation. `pins` are the remembered ones; `place` names the session there."""

    api: Api
    request: ClientRequest
    session: Session
    ledger: Ledger
    adoption: Adoption
    policy: Policy
    pins: BoundedCache[tuple[str, str], Mapping[str, Raw]]
    place: str
    judged: list[Judged] = field(default_factory=list)
    replaced: int = 0
    _tools: dict[str, str] = field(init=False)
    _least: int = field(init=False)

    def __post_init__(self) -> None:
        adoption, policy, request = self.adoption, self.policy, self.request
        named = policy.model or request.model or None
        self.policy = policy = replace(policy, **adoption.policy, read_tool=adoption.names["get"], model=named)
        looks_at_all = policy.is_named or any(rule != "never" for rule in policy.tools.values())
        self._least = min(FIRST, policy.safe_chars) if looks_at_all else FIRST
        self._tools = {call_id: name for one in request.facts for call_id, name in one.calls}

    def done(self, adopted: str, link: Mapping[str, Raw]) -> Outgoing:
        """Return what is sent. `adopted` is the key of the adoption, `link` the record of the answer that the request
        continues."""
        request, api, adoption = self.request, self.api, self.adoption
        runs = list(_runs(request, joins=api.joins_answers))
        behind = next((end for start, end, is_answer in reversed(runs) if is_answer), 0)
        asked = {one.key for facts in request.facts for one in facts.results if one.size > self._least}
        pins = {key: pin for key in asked if (pin := self.pins.get((self.place, key))) is not None}
        entry_keys = self._entry_keys(runs) if adoption.mode == "loop" else {}
        waiting = api.waiting_keys(request) if adoption.mode == "loop" else []
        may_think = (adoption.mode == "loop" and request.has_answers) or any(one.thinks for one in request.facts)
        unbound = _unbound_keys(adopted) if api.binds_thinking and may_think else []
        named = api.named_before(request)
        wanted = (asked - pins.keys()) | {key for keys in entry_keys.values() for _, key in keys}
        wanted |= {*unbound, *waiting, *([named] if named else [])}
        found = self.ledger.find(wanted)
        pins |= {key: self.pins.keep((self.place, key), found[key]) for key in asked & found.keys()}
        sent = [one for key in waiting if key in found for one in items_of(found[key]["messages"])]
        is_behind_own, places = False, list[int]()
        for start, end, is_answer in runs:
            places += [len(sent)] * (end - start)
            if is_answer:
                place_and_key = next((one for one in entry_keys.get(start, ()) if one[1] in found), None)
                held = request.messages[start:end]
                if place_and_key is None:
                    sent += api.unspliced(held) if adoption.mode == "loop" else held
                else:
                    sent += api.expanded(entry_of(found[place_and_key[1]]), held, place_and_key[0])
                is_behind_own = place_and_key is not None
            else:
                message = self._with_results(start, pins, is_new=start >= behind)
                api.append(sent, message, is_behind_own=is_behind_own)
                places[-1] = min(places[-1], len(sent) - 1)  # it may be part of the message before
                is_behind_own = False
        left_out = {key for place in unbound if place in found for key in value_of(found[place]["blocks"])}
        if left_out:
            sent = api.without_thinking(sent, left_out)
        tools = [*request.tools, *adoption.tools]
        settings = api.first_settings(request, list(adoption.names.values())) if adoption.mode == "loop" else {}
        settings |= api.renaming(request, found.get(named or "", link))
        body = api.written(request, sent, tools, **settings)
        return Outgoing(body, request, sent, tools, adoption, self.judged, self.replaced, settings, adopted, places)

    def _entry_keys(self, runs: Sequence[tuple[int, int, bool]]) -> dict[int, list[tuple[int | None, str]]]:
        """Return the keys of each answer by its first message, in order of precedence: its last value, then those
        before, then its text."""
        found = {}
        for start, end, is_answer in runs:
            if not is_answer:
                continue
            facts = self.request.facts[start:end]
            keys: list[tuple[int | None, str]] = []
            blocks = 0
            for one in facts:
                keys += [(blocks + place, key) for place, key in one.keys]
                blocks += one.blocks
            text = "".join(one.text for one in facts)
            found[start] = [*reversed(keys), (None, self.request.text_key(text, start))]
        return found

    def _with_results(self, number: int, pins: dict[str, Mapping[str, Raw]], *, is_new: bool) -> Raw:
        """Return a message with its results as they are sent. Only results that no answer has followed are judged."""
        raw, contents = self.request.messages[number], {}
        for one in self.request.facts[number].results:
            pin = pins.get(one.key)
            if pin is None and is_new and one.size > self._least:
                pin = pins[one.key] = self._judge(raw, one)
            if pin is not None and "content" in pin:
                contents[one.place] = pin["content"]
                self.replaced += one.size - len(bytes(pin["content"]))
        return self.api.with_results(raw, contents) if contents else raw

    def _judge(self, raw: Raw, result: HeldResult) -> Mapping[str, Raw]:
        """Decide about a result, and pin the decision. If the store fails, the result stays."""
        content = self.api.result_content(raw, result)
        tool = self._tools.get(result.call_id)
        if self.request.has_surrogates and any(ord(one) in _PRIVATE for one in str(content)):
            return {}
        context = sum(one.size for one in self.request.facts) // _BYTES_PER_TOKEN
        situation = Situation(context_tokens=len(bytes(raw)) // _BYTES_PER_TOKEN + context)
        outcome = self.session.externalize(
            content, tool=tool, call_id=result.call_id, policy=self.policy, situation=situation, source=_SOURCE
        )
        if outcome.failure is not None:
            return {}
        why = outcome.why
        judged = Judged(tool or "", 0 if why is None else why.tokens)
        body: dict[str, Any] = {"inline": True}
        if outcome.refs or outcome.has_scaled_image:
            body = {"content": raw_of(outcome.content)}
        if outcome.refs:
            judged.pointer = outcome.refs[0].pointer
            judged.stub_tokens = max(0, judged.tokens - outcome.tokens_saved)
        try:
            pin = self.ledger.write(result.key, body)
        except CoatcheckError as error:
            _LOG.warning("a result stays, the decision about it cannot be stored: %s", mask(error.message))
            return self._written_anyway(result.key)
        self.judged.append(judged)
        return self.pins.keep((self.place, result.key), pin)

    def _written_anyway(self, key: str) -> Mapping[str, Raw]:
        """Return a pin whose write failed but left it in the store."""
        try:
            return self.ledger.find([key]).get(key, {})
        except CoatcheckError:
            return {}


def run_calls(
    session: Session, names: Mapping[str, str], calls: Sequence[OwnCall], note: str
) -> list[tuple[OwnCall, list[ContentPart]]]:
    """Return the answer to each call of our tools. `names` are their names by purpose. The last answer ends with the
    note."""
    tools = {tool.name: tool for tool in toolkit(session, prefix=names["get"].removesuffix("get_artifact"))}
    answers = []
    for number, call in enumerate(calls):
        arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
        if number < _CALLS:
            parts = tools[call.name].parts(**arguments)
        else:
            parts = [ContentPart(f"[error: at most {_CALLS} calls at once are answered; call again]")]
        answers.append((call, parts))
    if note and answers:
        last = answers[-1][1]
        last[0] = replace(last[0], text=f"{last[0].text}\n{note}")
    return answers


def _unbound_keys(adopted: str) -> list[str]:
    """Return the keys of what was left out of a conversation, one for each time."""
    return [digest("unbound", adopted, str(number)) for number in range(_BREAKS)]


def _own_tools(tools: Sequence[Raw]) -> Iterator[tuple[str, str]]:
    """Yield the purpose and name of our tools among those of a client, which may have them through MCP."""
    for raw in tools:
        if any(words.encode() in bytes(raw) for words in DESCRIPTIONS):
            found = known_as(value_of(raw))
            if found is not None:
                yield found


def _runs(request: ClientRequest, *, joins: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield each answer, which has several messages if the API `joins` them, and each other message: where it begins
    and ends."""
    start = 0
    while start < len(request.facts):
        is_answer = request.facts[start].side == "answer"
        end = start + 1
        while joins and is_answer and end < len(request.facts) and request.facts[end].side == "answer":
            end += 1
        yield start, end, is_answer
        start = end


def readable(api: Api, body: bytes) -> ClientRequest | None:
    """Return the request, None if it cannot be read."""
    try:
        return api.read(body)
    except Unreadable:
        return None
