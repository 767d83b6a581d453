"""What is sent for a request: stubs in place of results, our tools after the client's, and the
ledger's messages in place of answers that the client has in part.

What is sent for a conversation only ever grows. A conversation is adopted with its first request,
and every decision about it is written to the ledger before a byte of it is sent; a conversation
that began elsewhere is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw

from coatcheck._toolkit import function_of, known_as, toolkit
from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize import Policy, ResultSource, Situation
from coatcheck.externalize.policy import configured
from coatcheck.gateway.api import (
    FIRST,
    Api,
    ClientRequest,
    HeldResult,
    OwnCall,
    Unreadable,
    canonical_json,
    digest,
    items_of,
    raw_of,
    text_key,
    value_of,
)
from coatcheck.gateway.conversations import Conversations, Home, Origin, Sessions, pointers_of
from coatcheck.gateway.ledger import (
    Adoption,
    Ledger,
    adoption_of,
    entry_key,
    entry_of,
)
from coatcheck.messages.cost import BoundedCache
from coatcheck.parts import Part
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session

Mode = Literal["observe", "stub", "loop"]
MODES: Final[tuple[Mode, ...]] = ("observe", "stub", "loop")
_SOURCE: Final = ResultSource("gateway")
_LOG: Final = logging.getLogger("coatcheck")
_PREFIX: Final = "coatcheck_"
_PURPOSES: Final = ("get", "list", "store")
_REMEMBERED: Final = 4_096
_BYTES_PER_TOKEN: Final = 4
_CALLS: Final = 8  # calls of our tools that are answered in one step
_BREAKS: Final = 8  # times that thinking is left out of one conversation
_PINNED: Final = ("max_tokens", "max_chars", "max_bytes", "preview_chars", "redact")
_PRIVATE: Final = range(0xE000, 0xE800)


class RefusedRequest(Exception):
    """A request that must not be sent: its status, what to do, and Anthropic's code if there is
    one."""

    def __init__(self, status: int, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(slots=True)
class Judged:
    """A result that was judged now: its tool, the tokens of the original and of its stub, and the
    pointer."""

    tool: str
    tokens: int
    stub_tokens: int = 0
    pointer: str | None = None


@dataclass(slots=True)
class Outgoing:
    """What is sent for a request. `adoption` and `home` are None if the conversation is not
    changed."""

    body: bytes
    request: ClientRequest
    messages: list[Raw]
    tools: list[Raw]
    adoption: Adoption | None = None
    home: Home | None = None
    judged: list[Judged] = field(default_factory=list)
    replaced: int = 0
    """Bytes of results that the client keeps and that are not sent."""
    settings: dict[str, Any] = field(default_factory=dict)
    adopted: str = ""
    """The key of the adoption."""
    places: Sequence[int] = ()
    """Where each message of the client is among those that are sent; empty if both are the same."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names of our tools in this request, by purpose."""
    prefix: str = ""
    """The digest of everything before the answer."""
    conversations: Conversations | None = None
    """Where the end of the answer is noted, if nobody names the session."""

    def sent_from(self, number: int) -> list[Raw]:
        """Return what is sent for the client's messages from this one on."""
        return self.messages[self.places[number] if number < len(self.places) else number :]

    @property
    def own(self) -> list[str]:
        """The names of our tools that we answer ourselves."""
        is_loop = self.adoption is not None and self.adoption.mode == "loop"
        return list(self.names.values()) if is_loop else []


class Sender:
    """Prepares what is sent for the requests of one store. It remembers only what the ledger has
    and never changes."""

    def __init__(self, *, mode: Mode, policy: Policy | None = None) -> None:
        self._mode = mode
        self._policy = policy
        self.pins: BoundedCache[tuple[str, str], Mapping[str, Raw]] = BoundedCache(_REMEMBERED)
        self._foreign: BoundedCache[tuple[str, str], bool] = BoundedCache(_REMEMBERED)

    def outgoing(
        self,
        api: Api,
        request: ClientRequest,
        body: bytes,
        origin: Origin,
        sessions: Sessions,
        *,
        is_count: bool = False,
    ) -> Outgoing:
        """Return what is sent for a request. With `is_count`, it only asks for its token count.
        Raises `RefusedRequest`."""
        same = Outgoing(body, request, request.messages, request.tools)
        chain = api.chain(request)
        continues = request.has_answers or chain is not None
        if not request.facts or (not continues and not request.tools):
            return same
        session = sessions.index(origin) if origin.owner else _opened(sessions, origin)
        index, place = (
            Ledger(session),
            f"{session.store.url}/{session.session_id}",
        )
        first = digest("adopted", api.name, origin.owner, request.first)
        if continues and (place, chain or first) in self._foreign:
            return same
        link: Mapping[str, Raw] = {}
        try:
            if chain is not None:
                link = index.find([chain]).get(chain, {})
                first = value_of(link["adopted"]) if link else first
            adoption = (
                self._adopted(index, (place, first), first) if link or chain is None else None
            )
        except StoreError as error:
            if not continues:
                _LOG.warning(
                    "a conversation is not changed, its ledger cannot be read: %s",
                    mask(error.message),
                )
                return same
            raise RefusedRequest(
                503, f"the gateway cannot read its ledger: {mask(error.message)}"
            ) from error
        refused = api.refusal(request)
        if adoption is None:
            if continues and (chain is None or "conversation" not in request.top):
                self._foreign.keep((place, chain or first), True)
            is_new = not continues or (chain is not None and "conversation" in request.top)
            if is_new and refused is None:
                adoption = self._adopt(
                    api, request, session, index, first, is_named=not origin.owner
                )
            if adoption is None:
                return same
        if refused is not None:
            raise RefusedRequest(400, refused)
        try:
            policy = self._policy or configured(session.store.settings)
            sending = _Sending(
                api,
                request,
                origin,
                sessions,
                index,
                adoption,
                policy,
                self.pins,
                chain,
                is_count,
            )
            return sending.done(first, link)
        except StoreError as error:
            raise RefusedRequest(
                503, f"the gateway cannot read its ledger: {mask(error.message)}"
            ) from error

    def _adopted(self, index: Ledger, key: tuple[str, str], first: str) -> Adoption | None:
        found = self.pins.get(key) or index.find([first]).get(first)
        return None if found is None else adoption_of(self.pins.keep(key, found))

    def _adopt(
        self,
        api: Api,
        request: ClientRequest,
        session: Session,
        index: Ledger,
        first: str,
        *,
        is_named: bool,
    ) -> Adoption | None:
        """Adopt a new conversation, if the mode allows it. One with a message that is nested too
        deeply stays as it is. In `loop` mode, the client's own tools can read only in a session
        that `is_named`."""
        if self._mode == "observe" or any(one.is_deep for one in request.facts):
            return None
        policy = self._policy or configured(session.store.settings)
        pinned = {name: getattr(policy, name) for name in _PINNED}
        theirs = list(_own_tools(request.tools))
        has_ours = any(purpose == "get" for purpose, _ in theirs)
        if has_ours and (is_named or self._mode == "stub"):
            adoption = Adoption("stub", [], dict(theirs), pinned)
        elif self._mode == "loop":
            tools = toolkit(session, prefix=_free_prefix(request.tools))
            by_purpose = dict(zip(_PURPOSES, (tool.name for tool in tools), strict=True))
            adoption = Adoption("loop", api.described(tools), by_purpose, pinned)
        else:
            return None
        try:
            return index.adopt(first, adoption)
        except CoatcheckError as error:
            _LOG.warning(
                "a conversation is not changed, its ledger cannot be written: %s",
                mask(error.message),
            )
            return None

    def recovered(self, api: Api, outgoing: Outgoing, session: Session, error: bytes) -> bool:
        """Leave out thinking that the provider has refused with this error: from the first block
        that fails to the end. It stays out of all later requests. Return whether there is something
        else to send now."""
        keys = api.unbound(outgoing.request, outgoing.messages, error) if outgoing.adopted else []
        if not keys:
            return False
        ledger, places = Ledger(session), _unbound_keys(outgoing.adopted)
        try:
            known = ledger.find(places)
            free = [place for place in places if place not in known]
            if not any(
                set(keys) <= set(value_of(ledger.write(place, {"blocks": keys})["blocks"]))
                for place in free
            ):
                return False
        except CoatcheckError as failure:
            _LOG.warning("thinking that was refused cannot be left out: %s", mask(failure.message))
            return False
        outgoing.messages = api.without_thinking(outgoing.messages, keys)
        outgoing.body = api.written(
            outgoing.request, outgoing.messages, outgoing.tools, **outgoing.settings
        )
        return True


@dataclass(slots=True)
class _Sending:
    """One request of an adopted conversation. `index` has the adoption, and says where the
    conversation is kept; `pins` are those that are remembered; `chain` is the key of the answer
    that the request names."""

    api: Api
    request: ClientRequest
    origin: Origin
    sessions: Sessions
    index: Ledger
    adoption: Adoption
    policy: Policy
    pins: BoundedCache[tuple[str, str], Mapping[str, Raw]]
    chain: str | None
    is_count: bool
    judged: list[Judged] = field(default_factory=list)
    replaced: int = 0
    _names: Mapping[str, str] = field(init=False)
    _our_tools: list[Raw] = field(init=False)
    _tools: dict[str, str] = field(init=False)
    _least: int = field(init=False)
    _home: Home = field(init=False)
    _conversations: Conversations | None = None

    def __post_init__(self) -> None:
        adoption, policy, request = self.adoption, self.policy, self.request
        self._our_tools, self._names = _fitting_tools(adoption, request.tools)
        named = policy.model or request.model or None
        self.policy = policy = replace(
            policy, **adoption.policy, read_tool=self._names["get"], model=named
        )
        looks_at_all = policy.is_named or any(rule != "never" for rule in policy.tools.values())
        self._least = min(FIRST, policy.safe_chars) if looks_at_all else FIRST
        self._tools = {call_id: name for one in request.facts for call_id, name in one.calls}

    def done(self, adopted: str, link: Mapping[str, Raw]) -> Outgoing:
        """Return what is sent. `adopted` is the key of the adoption, `link` the record of the
        answer that the request continues."""
        request, api, adoption = self.request, self.api, self.adoption
        is_loop = adoption.mode == "loop"
        runs = list(_runs(request, joins=api.joins_answers))
        behind = next((end for start, end, is_answer in reversed(runs) if is_answer), 0)
        prefixes = request.prefixes(self._start())
        may_leave = request.replaceable()
        asked = {one.key for some in may_leave.values() for one in some if one.size > self._least}
        entry_keys = self._entry_keys(runs, prefixes) if is_loop else {}
        waiting = api.waiting_keys(request) if is_loop else []
        programs = api.program_keys(request) if is_loop else {}
        may_think = (is_loop and request.has_answers) or any(one.thinks for one in request.facts)
        unbound = _unbound_keys(adopted) if api.binds_thinking and may_think else []
        named = api.named_before(request)
        wanted = {key for keys in entry_keys.values() for _, key in keys}
        wanted |= {*unbound, *waiting, *programs, *([named] if named else [])}
        if is_loop and self.origin.owner:
            self._conversations = Conversations(
                self.sessions, self.origin, self.index, is_count=self.is_count
            )
            answers = [[] if self.chain is None else [self.chain]]
            answers += [[key for _, key in keys] for keys in entry_keys.values()]
            self._home = self._conversations.home(answers, wanted | asked)
        else:
            self._home = self._named_home(wanted, asked)
        found = self._home.records
        results = request.replaceable(
            {call_id for key, call_id in programs.items() if key in found}
        )
        pins = self._pins(
            asked,
            old={one.key for number, some in results.items() if number < behind for one in some},
        )
        sent = [one for key in waiting if key in found for one in items_of(found[key]["messages"])]
        is_behind_own, places = False, list[int]()
        for start, end, is_answer in runs:
            places += [len(sent)] * (end - start)
            if is_answer:
                held = request.messages[start:end]
                place_and_key = next(
                    (one for one in entry_keys.get(start, ()) if one[1] in found), None
                )
                if place_and_key is None:
                    sent += api.unspliced(held) if is_loop else held
                else:
                    sent += api.expanded(entry_of(found[place_and_key[1]]), held, place_and_key[0])
                is_behind_own = place_and_key is not None
            else:
                message = self._with_results(
                    start, results.get(start, []), pins, is_new=start >= behind
                )
                api.append(sent, message, is_behind_own=is_behind_own)
                places[-1] = min(places[-1], len(sent) - 1)  # it may be part of the message before
                is_behind_own = False
        left_out = {
            key for place in unbound if place in found for key in value_of(found[place]["blocks"])
        }
        if left_out:
            sent = api.without_thinking(sent, left_out)
        tools = [*request.tools, *self._our_tools]
        settings = api.first_settings(request, list(self._names.values())) if is_loop else {}
        settings |= api.renaming(request, found.get(named or "", link))
        return Outgoing(
            body=api.written(request, sent, tools, **settings),
            request=request,
            messages=sent,
            tools=tools,
            adoption=adoption,
            home=self._home,
            judged=self.judged,
            replaced=self.replaced,
            settings=settings,
            adopted=adopted,
            places=places,
            names=self._names,
            prefix=prefixes[-1],
            conversations=self._conversations,
        )

    def _start(self) -> str:
        """Return what separates this conversation from others before its first message: the answer
        that it continues, and, if nobody names the session, the credentials and the system text."""
        parts = [self.api.name, self.chain or ""]
        if self.origin.owner:
            system = [name for name in ("system", "instructions") if name in self.request.top]
            parts += [
                self.origin.owner,
                *(canonical_json(self.request.top[name]) for name in system),
            ]
        return digest("start", *parts)

    def _entry_keys(
        self, runs: Sequence[tuple[int, int, bool]], prefixes: Sequence[str]
    ) -> dict[int, list[tuple[int | None, str]]]:
        """Return the keys of each answer by its first message, in order of precedence: its last
        value, then those before, then its text. Each is bound to everything before the answer."""
        found = {}
        for start, end, is_answer in runs:
            if not is_answer:
                continue
            facts = self.request.facts[start:end]
            values: list[tuple[int | None, str]] = []
            blocks = 0
            for one in facts:
                values += [(blocks + place, value) for place, value in one.keys]
                blocks += one.blocks
            text = text_key("".join(one.text for one in facts))
            ordered = [*reversed(values), (None, text)]
            found[start] = [(place, entry_key(prefixes[start], value)) for place, value in ordered]
        return found

    def _named_home(self, wanted: Collection[str], asked: Collection[str]) -> Home:
        """Return the session that the request names or is known by, with the records that are not
        remembered."""
        session = _opened(self.sessions, self.origin)
        ledger = Ledger(session)
        unknown = {key for key in asked if (_place(session), key) not in self.pins}
        return Home(session, ledger, ledger.find({*wanted, *unknown}))

    def _pins(self, asked: set[str], old: set[str]) -> dict[str, Mapping[str, Raw]]:
        """Return the decisions about results that were made before. Those about `old` results,
        which were sent, may have been made in another session, before the client changed
        something."""
        place, records = _place(self._home.session), self._home.records
        known = {
            key: pin
            for key in asked
            if (pin := self.pins.get((place, key)) or records.get(key)) is not None
        }
        missing = (asked & old) - known.keys()
        if self._conversations is not None and missing:
            known |= self._conversations.pins(missing, self._home)
        return {key: self.pins.keep((place, key), pin) for key, pin in known.items()}

    def _with_results(
        self,
        number: int,
        results: Sequence[HeldResult],
        pins: dict[str, Mapping[str, Raw]],
        *,
        is_new: bool,
    ) -> Raw:
        """Return a message with these results as they are sent. Only results that no answer has
        followed are judged."""
        raw, contents = self.request.messages[number], {}
        for one in results:
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
        session, ledger = self._home.session, self._home.ledger
        outcome = session.externalize(
            content,
            tool=tool,
            call_id=result.call_id,
            policy=self.policy,
            situation=situation,
            source=_SOURCE,
        )
        if outcome.failure is not None:
            return {}
        why = outcome.why
        judged = Judged(tool or "", 0 if why is None else why.tokens)
        body: dict[str, Any] = {"inline": True, "pointers": []}
        if outcome.refs or outcome.has_scaled_image:
            body = {"content": raw_of(outcome.content), "pointers": pointers_of(outcome.refs)}
        if outcome.refs:
            judged.pointer = outcome.refs[0].pointer
            judged.stub_tokens = max(0, judged.tokens - outcome.tokens_saved)
        try:
            pin = ledger.write(result.key, body)
        except CoatcheckError as error:
            _LOG.warning(
                "a result stays, the decision about it cannot be stored: %s", mask(error.message)
            )
            return self._written_anyway(result.key)
        if self._conversations is not None:
            self._conversations.note_pin(result.key, session)
        self.judged.append(judged)
        return self.pins.keep((_place(session), result.key), pin)

    def _written_anyway(self, key: str) -> Mapping[str, Raw]:
        """Return a pin whose write failed but left it in the store."""
        try:
            return self._home.ledger.find([key]).get(key, {})
        except CoatcheckError:
            return {}


def run_calls(
    session: Session, names: Mapping[str, str], calls: Sequence[OwnCall], note: str
) -> list[tuple[OwnCall, list[Part]]]:
    """Return the answer to each call of our tools. `names` are their names by purpose. The last
    answer ends with the note."""
    tools = {
        tool.name: tool
        for tool in toolkit(session, prefix=names["get"].removesuffix("get_artifact"))
    }
    answers = []
    for number, call in enumerate(calls):
        arguments = (
            call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
        )
        if number < _CALLS:
            parts = tools[call.name].parts(**arguments)
        else:
            parts = [Part(f"[error: at most {_CALLS} calls at once are answered; call again]")]
        answers.append((call, parts))
    if note and answers:
        last = answers[-1][1]
        last[0] = replace(last[0], text=f"{last[0].text}\n{note}")
    return answers


def _unbound_keys(adopted: str) -> list[str]:
    """Return the keys of what was left out of a conversation, one for each time."""
    return [digest("unbound", adopted, str(number)) for number in range(_BREAKS)]


def _place(session: Session) -> str:
    """Return what tells a session from all others in a memory."""
    return f"{session.store.url}/{session.session_id}"


def _opened(sessions: Sessions, origin: Origin) -> Session:
    """Return the session of an origin. One that cannot be created, on a full disk, can still be
    read."""
    try:
        return sessions.open(origin.name, origin.parent)
    except CoatcheckError as error:
        _LOG.warning("a session cannot be opened: %s", mask(error.message))
        return sessions.unopened(origin.name)


def _own_tools(tools: Sequence[Raw]) -> Iterator[tuple[str, str]]:
    """Yield the purpose and name of our tools among those of a client, which may have them through
    MCP."""
    for raw in tools:
        if b"artifact" in bytes(raw):
            found = known_as(value_of(raw))
            if found is not None:
                yield found


def _names_of(tools: Sequence[Raw]) -> set[str]:
    return {str(function_of(value_of(one)).get("name")) for one in tools}


def _free_prefix(tools: Sequence[Raw]) -> str:
    """Return a prefix for the names of our tools with which none of them is the name of one of
    these tools."""
    taken = _names_of(tools)
    for number in count():
        prefix = ("", _PREFIX)[number] if number < 2 else f"{_PREFIX}{number}_"
        if taken.isdisjoint(tool.name for tool in toolkit(prefix=prefix)):
            return prefix
    raise AssertionError("there is always another number")


def _fitting_tools(adoption: Adoption, tools: Sequence[Raw]) -> tuple[list[Raw], Mapping[str, str]]:
    """Return our tools for a request that has these tools, and their names by purpose: those of the
    adoption. If the client has added a tool of the same name since, ours get other names, and the
    client's calls stay the client's."""
    if not adoption.tools or _names_of(tools).isdisjoint(adoption.names.values()):
        return adoption.tools, adoption.names
    prefix = _free_prefix(tools)
    names = dict(zip(_PURPOSES, (tool.name for tool in toolkit(prefix=prefix)), strict=True))
    renamed = []
    for raw, name in zip(adoption.tools, names.values(), strict=True):
        described = value_of(raw)
        if isinstance(described.get("function"), dict):
            described["function"]["name"] = name
        else:
            described["name"] = name
        renamed.append(raw_of(described))
    return renamed, names


def _runs(request: ClientRequest, *, joins: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield each answer, which has several messages if the API `joins` them, and each other
    message: where it begins and ends."""
    start = 0
    while start < len(request.facts):
        is_answer = request.facts[start].side == "answer"
        end = start + 1
        while (
            joins and is_answer and end < len(request.facts) and request.facts[end].side == "answer"
        ):
            end += 1
        yield start, end, is_answer
        start = end


def readable(api: Api, body: bytes) -> ClientRequest | None:
    """Return the request, None if it cannot be read."""
    try:
        return api.read(body)
    except Unreadable:
        return None
