"""What is sent for a request: stubs in place of results, our tools after the client's, and the
ledger's messages in place of answers that the client has in part.

What is sent for a conversation only ever grows: every decision about it is written to the ledger
before a byte of it is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.errors import CoatcheckError
from coatcheck.externalize import Policy
from coatcheck.gateway.adoption import AdoptedConversation
from coatcheck.gateway.api import Api
from coatcheck.gateway.conversations import Conversations, Home, Sessions
from coatcheck.gateway.judging import Judge, Judged, least_size
from coatcheck.gateway.ledger import Ledger, entry_key, entry_of
from coatcheck.gateway.own_tools import fitting_tools
from coatcheck.gateway.raw_json import canonical_json, digest, items_of, text_key, value_of
from coatcheck.gateway.request import Request, ResultFacts
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session

_LOG: Final = logging.getLogger("coatcheck")
_BREAKS: Final = 8  # times that thinking is left out of one conversation


class Outgoing:
    """What is sent for a request: at first the request itself, after `change` that of an adopted
    conversation.

    `places` says where each message of the client is among those that are sent; empty if both are
    the same. `settings` are other members that are changed. `names` are the names of our tools in
    this request, by purpose. `prefix` is the digest of everything before the answer. If nobody
    names the session, the end of the answer is noted in `conversations`. `judged` are the results
    that were judged now, and `replaced` the bytes of results that the client keeps and that are not
    sent. With `is_count`, the request only asks for its token count."""

    def __init__(
        self,
        api: Api,
        request: Request,
        body: bytes,
        *,
        session: Session | None = None,
        is_count: bool = False,
    ) -> None:
        self.api = api
        self.request = request
        self.body = body
        self.session = session
        self.is_count = is_count
        self.started = time.time()
        self.messages: Sequence[Raw] = request.messages
        self.tools: Sequence[Raw] = request.tools
        self.settings: dict[str, Any] = {}
        self.places: Sequence[int] = ()
        self.conversation: AdoptedConversation | None = None
        self.conversations: Conversations | None = None
        self.names: Mapping[str, str] = {}
        self.prefix = ""
        self.judged: list[Judged] = []
        self.replaced = 0

    def change(self, conversation: AdoptedConversation, sessions: Sessions, policy: Policy) -> None:
        """Change what is sent to what the conversation requires. Raises `StoreError`."""
        api, request = self.api, self.request
        our_tools, self.names = fitting_tools(conversation.adoption, request.tools)
        named = policy.model or request.model or None
        reader = self.names.get("get")
        policy = replace(policy, **conversation.adoption.policy, read_tool=reader, model=named)
        runs = list(_runs(request, joins=api.joins_answers))
        prefixes = request.prefixes(_start(api, request, conversation))
        entries = _entry_keys(request, runs, prefixes) if conversation.is_loop else {}
        wanted = _Wanted.of(api, request, conversation, least=least_size(policy), entries=entries)
        home = self._home(conversation, sessions, wanted)
        records = home.records
        self.conversation, self.session, self.prefix = conversation, home.session, prefixes[-1]
        by_programs = {call_id for key, call_id in wanted.programs.items() if key in records}
        results = request.replaceable(by_programs)
        judge = Judge(api, request, home, self.conversations, policy)
        judge.recall(wanted.results, _keys_before(results, _answered(runs)))
        messages = self._messages(judge, results, records, runs, wanted)
        self.judged, self.replaced = judge.judged, judge.replaced
        left_out: set[str] = set()
        for key in wanted.unbound:
            if key in records:
                left_out.update(value_of(records[key]["blocks"]))
        self.messages = api.without_thinking(messages, left_out) if left_out else messages
        self.tools = [*request.tools, *our_tools]
        if conversation.is_loop:
            self.settings |= api.first_settings(request, list(self.names.values()))
        self.settings |= api.renaming(request, records.get(wanted.named or "", conversation.link))
        self._write()

    def leave_out_refused(self, error: bytes) -> bool:
        """Leave out thinking that the provider has refused with this error: from the first block
        that fails to the end. It stays out of all later requests. Return whether there is something
        else to send now."""
        if self.conversation is None or self.session is None:
            return False
        keys = self.api.unbound(self.request, self.messages, error)
        if not keys:
            return False
        try:
            if not _note_refused(Ledger(self.session), self.conversation.key, keys):
                return False
        except CoatcheckError as failure:
            _LOG.warning("thinking that was refused cannot be left out: %s", mask(failure.message))
            return False
        self.messages = self.api.without_thinking(self.messages, keys)
        self._write()
        return True

    def sent_from(self, number: int) -> Sequence[Raw]:
        """Return what is sent for the client's messages from this one on."""
        return self.messages[self.places[number] if number < len(self.places) else number :]

    @property
    def own(self) -> list[str]:
        """The names of our tools that we answer ourselves."""
        is_loop = self.conversation is not None and self.conversation.is_loop
        return list(self.names.values()) if is_loop else []

    def _write(self) -> None:
        self.body = self.api.written(self.request, self.messages, self.tools, **self.settings)

    def _home(self, conversation: AdoptedConversation, sessions: Sessions, wanted: _Wanted) -> Home:
        """Return where the conversation is kept, with the records that it has."""
        origin = conversation.origin
        if not conversation.is_loop or not origin.owner:
            session = sessions.opened(origin)
            ledger = Ledger(session)
            return Home(session, ledger, ledger.find(wanted.all))
        self.conversations = Conversations(
            sessions, origin, conversation.index, is_count=self.is_count
        )
        answers = [[] if conversation.chain is None else [conversation.chain]]
        answers += [[one.key for one in keys] for keys in wanted.entries.values()]
        return self.conversations.home(answers, wanted.all)

    def _messages(
        self,
        judge: Judge,
        results: Mapping[int, list[ResultFacts]],
        records: Mapping[str, dict[str, Raw]],
        runs: Sequence[_Run],
        wanted: _Wanted,
    ) -> list[Raw]:
        """Return the messages that are sent. `results` are those that may become stubs, by the
        number of their message."""
        answered = _answered(runs)
        sent: list[Raw] = []
        places: list[int] = []
        for key in wanted.waiting:
            if key in records:
                sent += items_of(records[key]["messages"])
        is_behind_own = False
        for run in runs:
            places += [len(sent)] * (run.end - run.start)
            if run.is_answer:
                known = [one for one in wanted.entries.get(run.start, ()) if one.key in records]
                held = self.request.messages[run.start : run.end]
                sent += self._answer(held, known, records)
                is_behind_own = bool(known)
                continue
            message = judge.with_results(
                run.start, results.get(run.start, []), is_new=run.start >= answered
            )
            self.api.append(sent, message, is_behind_own=is_behind_own)
            places[-1] = min(places[-1], len(sent) - 1)  # it may be part of the message before
            is_behind_own = False
        self.places = places
        return sent

    def _answer(
        self,
        held: Sequence[Raw],
        known: Sequence[_EntryKey],
        records: Mapping[str, dict[str, Raw]],
    ) -> Sequence[Raw]:
        """Return what was sent for an answer that the client keeps. `known` are its keys that the
        ledger has, the best first."""
        if known:
            return self.api.expanded(entry_of(records[known[0].key]), held, known[0].place)
        is_loop = self.conversation is not None and self.conversation.is_loop
        return self.api.unspliced(held) if is_loop else held


@dataclass(frozen=True, slots=True)
class _Run:
    """An answer, which may have several messages, or one other message: where it begins and
    ends."""

    start: int
    end: int
    is_answer: bool


def _runs(request: Request, *, joins: bool) -> Iterator[_Run]:
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


def _answered(runs: Sequence[_Run]) -> int:
    """Return the number of the first message after the last answer."""
    return max((run.end for run in runs if run.is_answer), default=0)


def _keys_before(results: Mapping[int, list[ResultFacts]], end: int) -> set[str]:
    """Return the keys of the results in messages before this one."""
    found: set[str] = set()
    for number, some in results.items():
        if number < end:
            found.update(one.key for one in some)
    return found


@dataclass(frozen=True, slots=True)
class _EntryKey:
    """A key under which an answer may be in the ledger. `place` is the index of the block that it
    was made from, None if it was made from the text."""

    place: int | None
    key: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The keys of the records that a request needs, to look them up at once."""

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

    @classmethod
    def of(
        cls,
        api: Api,
        request: Request,
        conversation: AdoptedConversation,
        *,
        least: int,
        entries: Mapping[int, list[_EntryKey]],
    ) -> _Wanted:
        """`least` is the size that a result must exceed to be judged."""
        is_loop = conversation.is_loop
        results: set[str] = set()
        for some in request.replaceable().values():
            results.update(one.key for one in some if one.size > least)
        has_own_answers = is_loop and request.has_answers
        may_think = has_own_answers or any(one.thinks for one in request.facts)
        return cls(
            results=results,
            entries=entries,
            waiting=api.waiting_keys(request) if is_loop else [],
            programs=api.program_keys(request) if is_loop else {},
            unbound=_unbound_keys(conversation.key) if api.binds_thinking and may_think else [],
            named=api.named_before(request),
        )

    @property
    def all(self) -> set[str]:
        found = {*self.results, *self.waiting, *self.programs, *self.unbound}
        for keys in self.entries.values():
            found.update(one.key for one in keys)
        if self.named:
            found.add(self.named)
        return found


def _entry_keys(
    request: Request, runs: Sequence[_Run], prefixes: Sequence[str]
) -> dict[int, list[_EntryKey]]:
    """Return the keys of each answer by its first message, in order of precedence: its text with
    its last value, its values from the last to the first, its text alone. Each is bound to
    everything before the answer."""
    found = {}
    for run in runs:
        if not run.is_answer:
            continue
        prefix = prefixes[run.start]
        facts = request.facts[run.start : run.end]
        text = "".join(one.text for one in facts)
        keys = [_EntryKey(None, entry_key(prefix, text_key(text)))]
        last: str | None = None
        blocks = 0
        for one in facts:
            for place, last in one.keys:
                keys.append(_EntryKey(blocks + place, entry_key(prefix, last)))
            blocks += one.blocks
        if last is not None:
            keys.append(_EntryKey(None, entry_key(prefix, text_key(text, last))))
        keys.reverse()
        found[run.start] = keys
    return found


def _start(api: Api, request: Request, conversation: AdoptedConversation) -> str:
    """Return what separates a conversation from others before its first message: the answer that it
    continues, and, if nobody names the session, the credentials and the system text."""
    parts = [api.name, conversation.chain or ""]
    if conversation.origin.owner:
        parts.append(conversation.origin.owner)
        system = [name for name in ("system", "instructions") if name in request.top]
        parts += [canonical_json(request.top[name]) for name in system]
    return digest("start", *parts)


def _unbound_keys(adopted: str) -> list[str]:
    """Return the keys of what was left out of a conversation, one for each time."""
    return [digest("unbound", adopted, str(number)) for number in range(_BREAKS)]


def _note_refused(ledger: Ledger, adopted: str, keys: Sequence[str]) -> bool:
    """Note that this thinking is left out of a conversation from now on. Return whether a record
    has it, which another replica may have written. Raises `CoatcheckError`."""
    places = _unbound_keys(adopted)
    known = ledger.find(places)
    for place in places:
        if place in known:
            continue
        written = ledger.write(place, {"blocks": keys})
        if set(keys) <= set(value_of(written["blocks"])):
            return True
    return False
