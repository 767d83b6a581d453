"""What is sent for a request: stubs in place of results, our tools after the client's, and the
ledger's messages in place of answers that the client has in part.

What is sent for a conversation only ever grows. A conversation is adopted with its first request,
and every decision about it is written to the ledger before a byte of it is sent; a conversation
that began elsewhere is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw

from coatcheck._toolkit import toolkit
from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize import Policy, ResultSource, Situation
from coatcheck.externalize.policy import configured
from coatcheck.gateway.api import (
    FIRST,
    Api,
    ClientRequest,
    HeldResult,
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
from coatcheck.gateway.own_tools import fitting_tools, free_prefix, names_by_purpose, own_tools
from coatcheck.messages.cost import BoundedCache
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session

Mode = Literal["observe", "stub", "loop"]
MODES: Final[tuple[Mode, ...]] = ("observe", "stub", "loop")
_SOURCE: Final = ResultSource("gateway")
_LOG: Final = logging.getLogger("coatcheck")
_REMEMBERED: Final = 4_096
_BYTES_PER_TOKEN: Final = 4
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
        unchanged = Outgoing(body, request, request.messages, request.tools)
        chain = api.chain(request)
        continues = request.has_answers or chain is not None
        if not request.facts or (not continues and not request.tools):
            return unchanged
        session = sessions.index(origin) if origin.owner else _opened(sessions, origin)
        known = self._conversation(
            api, request, session, owner=origin.owner, chain=chain, continues=continues
        )
        if known.adoption is None:
            return unchanged
        try:
            sending = _Sending(
                api=api,
                request=request,
                origin=origin,
                sessions=sessions,
                index=Ledger(session),
                adoption=known.adoption,
                policy=self._policy or configured(session.store.settings),
                pins=self.pins,
                chain=chain,
                is_count=is_count,
            )
            return sending.done(known.adopted, known.link)
        except StoreError as error:
            raise _ledger_failure(error) from error

    def _conversation(
        self,
        api: Api,
        request: ClientRequest,
        session: Session,
        *,
        owner: str,
        chain: str | None,
        continues: bool,
    ) -> _Known:
        """Return the conversation of a request. A new one is adopted now; one that began elsewhere
        or cannot be adopted has no adoption. Raises `RefusedRequest`."""
        first = digest("adopted", api.name, owner, request.first)
        not_adopted = _Known(first, {}, None)
        foreign_key = (_place(session), chain or first)
        if continues and foreign_key in self._foreign:
            return not_adopted
        try:
            known = self._known(session, first, chain)
        except StoreError as error:
            if continues:
                raise _ledger_failure(error) from error
            _LOG.warning(
                "a conversation is not changed, its ledger cannot be read: %s", mask(error.message)
            )
            return not_adopted
        refusal = api.refusal(request)
        if known.adoption is not None:
            if refusal is not None:
                raise RefusedRequest(400, refusal)
            return known
        # A conversation that the provider keeps may be empty before this request.
        is_kept_by_provider = chain is not None and "conversation" in request.top
        if continues and not is_kept_by_provider:
            self._foreign.keep(foreign_key, True)
            return not_adopted
        if refusal is not None:
            return not_adopted
        adoption = self._adopt(api, request, session, known.adopted, is_named=not owner)
        return replace(known, adoption=adoption)

    def _known(self, session: Session, first: str, chain: str | None) -> _Known:
        """Look up a conversation by its first message, or by the answer that the request names.
        Raises `StoreError`."""
        ledger, link, adopted = Ledger(session), dict[str, Raw](), first
        if chain is not None:
            link = ledger.find([chain]).get(chain, {})
            if not link:
                return _Known(adopted, link, None)
            adopted = value_of(link["adopted"])
        key = (_place(session), adopted)
        found = self.pins.get(key) or ledger.find([adopted]).get(adopted)
        if found is None:
            return _Known(adopted, link, None)
        return _Known(adopted, link, adoption_of(self.pins.keep(key, found)))

    def _adopt(
        self,
        api: Api,
        request: ClientRequest,
        session: Session,
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
        theirs = list(own_tools(request.tools))
        has_ours = any(purpose == "get" for purpose, _ in theirs)
        if has_ours and (is_named or self._mode == "stub"):
            adoption = Adoption("stub", [], dict(theirs), pinned)
        elif self._mode == "loop":
            tools = toolkit(session, prefix=free_prefix(request.tools))
            adoption = Adoption("loop", api.described(tools), names_by_purpose(tools), pinned)
        else:
            return None
        try:
            return Ledger(session).adopt(first, adoption)
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


@dataclass(frozen=True, slots=True)
class _Known:
    """What the ledger has about a conversation: the key of its adoption, the record of the answer
    that the request names, and the adoption, None if the conversation was not adopted."""

    adopted: str
    link: Mapping[str, Raw]
    adoption: Adoption | None


@dataclass(frozen=True, slots=True)
class _Run:
    """An answer, which may have several messages, or one other message: where it begins and
    ends."""

    start: int
    end: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class _EntryKey:
    """A key under which an answer may be in the ledger. `place` is the index of the block that it
    was made from, None if it was made from the text."""

    place: int | None
    key: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The keys of the records that a request needs."""

    results: set[str]
    """Decisions about results."""
    entries: Mapping[int, list[_EntryKey]]
    """Answers, by the number of their first message."""
    waiting: Sequence[str]
    """Results of our tools that go before the client's."""
    programs: Mapping[str, str]
    """Calls of a provider's program, each with the id of the call."""
    unbound: Sequence[str]
    """Thinking that was left out before."""
    named: str | None
    """The earlier answer that the request names by its id."""

    @property
    def others(self) -> set[str]:
        """All keys except those of results."""
        found = {*self.waiting, *self.programs, *self.unbound}
        for keys in self.entries.values():
            found.update(one.key for one in keys)
        if self.named:
            found.add(self.named)
        return found


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
        self._our_tools, self._names = fitting_tools(adoption, request.tools)
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
        request, api = self.request, self.api
        runs = list(_runs(request, joins=api.joins_answers))
        prefixes = request.prefixes(self._start())
        wanted = self._wanted(adopted, runs, prefixes)
        self._home = self._home_with(wanted)
        records = self._home.records
        sent, places = self._messages(runs, wanted)
        left_out = set[str]()
        for key in wanted.unbound:
            if key in records:
                left_out.update(value_of(records[key]["blocks"]))
        if left_out:
            sent = api.without_thinking(sent, left_out)
        tools = [*request.tools, *self._our_tools]
        settings = dict[str, Any]()
        if self._is_loop:
            settings |= api.first_settings(request, list(self._names.values()))
        settings |= api.renaming(request, records.get(wanted.named or "", link))
        return Outgoing(
            body=api.written(request, sent, tools, **settings),
            request=request,
            messages=sent,
            tools=tools,
            adoption=self.adoption,
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

    @property
    def _is_loop(self) -> bool:
        return self.adoption.mode == "loop"

    def _wanted(self, adopted: str, runs: Sequence[_Run], prefixes: Sequence[str]) -> _Wanted:
        """Return the keys of all records that the request needs, to look them up at once."""
        request, api, is_loop = self.request, self.api, self._is_loop
        results = set[str]()
        for some in request.replaceable().values():
            results.update(one.key for one in some if one.size > self._least)
        has_own_answers = is_loop and request.has_answers
        may_think = has_own_answers or any(one.thinks for one in request.facts)
        return _Wanted(
            results=results,
            entries=self._entry_keys(runs, prefixes) if is_loop else {},
            waiting=api.waiting_keys(request) if is_loop else [],
            programs=api.program_keys(request) if is_loop else {},
            unbound=_unbound_keys(adopted) if api.binds_thinking and may_think else [],
            named=api.named_before(request),
        )

    def _home_with(self, wanted: _Wanted) -> Home:
        """Return where the conversation is kept, with the records that it has. Decisions that are
        remembered are not read again if the session has a name."""
        if self._is_loop and self.origin.owner:
            self._conversations = Conversations(
                self.sessions, self.origin, self.index, is_count=self.is_count
            )
            answers = [[] if self.chain is None else [self.chain]]
            answers += [[one.key for one in keys] for keys in wanted.entries.values()]
            return self._conversations.home(answers, wanted.others | wanted.results)
        session = _opened(self.sessions, self.origin)
        ledger, place = Ledger(session), _place(session)
        unknown = {key for key in wanted.results if (place, key) not in self.pins}
        return Home(session, ledger, ledger.find(wanted.others | unknown))

    def _messages(self, runs: Sequence[_Run], wanted: _Wanted) -> tuple[list[Raw], list[int]]:
        """Return the messages that are sent, and where each message of the client is among them."""
        request, api, records = self.request, self.api, self._home.records
        by_programs = {call_id for key, call_id in wanted.programs.items() if key in records}
        results = request.replaceable(by_programs)
        answered = max((run.end for run in runs if run.is_answer), default=0)
        sent_before = [some for number, some in results.items() if number < answered]
        pins = self._pins(wanted.results, {one.key for some in sent_before for one in some})
        sent, places = list[Raw](), list[int]()
        for key in wanted.waiting:
            if key in records:
                sent += items_of(records[key]["messages"])
        is_behind_own = False
        for run in runs:
            places += [len(sent)] * (run.end - run.start)
            if run.is_answer:
                keys = wanted.entries.get(run.start, ())
                entry = next((one for one in keys if one.key in records), None)
                sent += self._answer(request.messages[run.start : run.end], entry)
                is_behind_own = entry is not None
                continue
            message = self._with_results(
                run.start, results.get(run.start, []), pins, is_new=run.start >= answered
            )
            api.append(sent, message, is_behind_own=is_behind_own)
            places[-1] = min(places[-1], len(sent) - 1)  # it may be part of the message before
            is_behind_own = False
        return sent, places

    def _answer(self, held: Sequence[Raw], entry: _EntryKey | None) -> Sequence[Raw]:
        """Return what is sent for an answer that the client keeps, given its key in the ledger."""
        if entry is not None:
            recorded = entry_of(self._home.records[entry.key])
            return self.api.expanded(recorded, held, entry.place)
        return self.api.unspliced(held) if self._is_loop else held

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
        self, runs: Sequence[_Run], prefixes: Sequence[str]
    ) -> dict[int, list[_EntryKey]]:
        """Return the keys of each answer by its first message, in order of precedence: its last
        value, then those before, then its text. Each is bound to everything before the answer."""
        found = {}
        for run in runs:
            if not run.is_answer:
                continue
            prefix = prefixes[run.start]
            facts = self.request.facts[run.start : run.end]
            keys: list[_EntryKey] = []
            blocks = 0
            for one in facts:
                for place, value in one.keys:
                    keys.append(_EntryKey(blocks + place, entry_key(prefix, value)))
                blocks += one.blocks
            keys.reverse()
            text = text_key("".join(one.text for one in facts))
            keys.append(_EntryKey(None, entry_key(prefix, text)))
            found[run.start] = keys
        return found

    def _pins(self, asked: set[str], old: set[str]) -> dict[str, Mapping[str, Raw]]:
        """Return the decisions about results that were made before. Those about `old` results,
        which were sent, may have been made in another session, before the client changed
        something."""
        place, records = _place(self._home.session), self._home.records
        known: dict[str, Mapping[str, Raw]] = {}
        for key in asked:
            pin = self.pins.get((place, key)) or records.get(key)
            if pin is not None:
                known[key] = pin
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


def _unbound_keys(adopted: str) -> list[str]:
    """Return the keys of what was left out of a conversation, one for each time."""
    return [digest("unbound", adopted, str(number)) for number in range(_BREAKS)]


def _ledger_failure(error: StoreError) -> RefusedRequest:
    return RefusedRequest(503, f"the gateway cannot read its ledger: {mask(error.message)}")


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


def _runs(request: ClientRequest, *, joins: bool) -> Iterator[_Run]:
    """Yield each answer, which has several messages if the API `joins` them, and each other
    message."""
    sides = [one.side for one in request.facts]
    start = 0
    while start < len(sides):
        is_answer = sides[start] == "answer"
        end = start + 1
        while joins and is_answer and end < len(sides) and sides[end] == "answer":
            end += 1
        yield _Run(start, end, is_answer)
        start = end


def readable(api: Api, body: bytes) -> ClientRequest | None:
    """Return the request, None if it cannot be read."""
    try:
        return api.read(body)
    except Unreadable:
        return None
