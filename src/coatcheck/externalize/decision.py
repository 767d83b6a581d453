"""Decide by expected cost whether a result leaves the context, if the policy has no limit of its
own.

A result of `S` tokens that stays is written to the provider's cache once and read from it with
every later call. A stub costs less of both, but may be read back: one more call, which reads the
whole context again, and a page that stays. Both costs follow from the size, the context so far, the
calls still to come, the prices of the model, and how often results of this kind are read back:

    inline   (write + read·calls)·S
    stub     (write + read·calls)·(stub + tools + reads·page)
             + reads·(read·context + output·question)

`tools` are the descriptions of our tools, if this is the first stub and they are not described yet.
The first cost is linear in the size, and the expected number of reads grows more slowly than the
size, so there is one size from which a stub pays off: the break-even. It is the limit that applies
to the result.

How often results are read was measured on recorded runs (`make bench ARGS=effect`): often for code
that an agent reads to edit, rarely for rows, logs and pages. Each store corrects these figures by
how often its stubs were really read.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from coatcheck.models import USUAL_PRICES, Prices
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coatcheck.core_session import CoreSession
    from coatcheck.refs import Ref
    from coatcheck.store import Store

STUB_TOKENS: Final = 200
PAGE_TOKENS: Final = 330
"""Tokens of a stub and of a page that a model asks for, about the mean of those in recorded
runs."""

QUESTION_TOKENS: Final = 60
"""Tokens of the words and arguments with which a model asks for a page."""

LEAST_TOKENS: Final = 400
"""A smaller result always stays."""

UNKNOWN_CONTEXT: Final = 20_000
"""Tokens that a conversation is assumed to have besides the results that were seen, if the host
does not say."""

_LARGEST_UNKNOWN: Final = 100_000  # hosts compact long conversations without telling us
_RECOVERED: Final = 15  # calls within which a stub must earn back one immediate read
_FEWEST_CALLS, _MOST_CALLS, _PER_CALL = 8, 40, 1_500
_TRUST: Final = 6.0  # expected reads from which the observed rate outweighs the assumed one
_BOUNDS: Final = (0.25, 4.0)
_STEPS: Final = 4  # per unit of a rate: a single additional read does not change a decision
_MOST: Final = 10_000_000
_TRACKED: Final = 1_000
_LEAST_SAVED: Final = 32  # number of stubs and reads that is worth a write
REMEMBERED: Final = 10_000
"""Number of entries that `bound` leaves in a table."""

_CHARS_PER_TOKEN: Final = 3  # of results, about
_TOOLS: Final = 500
_SESSION: Final = "coatcheck:reads"
_SERIES: Final = "rates"
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

Use = str
"""What an agent does with a result: "report", "file", "search", "command" or "data"."""

_READS: Final[dict[Use, tuple[float, float]]] = {
    "file": (1.2, 0.7), "search": (1.2, 0.7), "command": (0.8, 0.3), "data": (0.75, 0.0),
}  # fmt: skip
"""Expected reads of a stub: the first number for a result of 1,000 tokens, growing with the size to
the power of the second. Reports (of sub-agents, skills and plans) are read as a whole, so they
never leave."""

_REPORTS: Final = frozenset(
    {"task", "agent", "subagent", "skill", "plan", "todo", "delegate", "handoff"}
)
_FILES: Final = frozenset({"read", "view", "cat", "open", "edit", "write"})
_OF_FILES: Final = frozenset(
    {"file", "files", "text", "source", "notebook", "multiple", "multi", "tool"}
)
_SEARCHES: Final = frozenset({"grep", "glob", "rg", "ripgrep"})
_COMMANDS: Final = frozenset(
    {"bash", "shell", "terminal", "command", "commands", "cmd", "sh", "exec", "powershell"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The conversation in which a result arrives: its tokens so far, the calls still to come (None:
    estimated), the model's prices, and the tokens of the tool descriptions that a first stub would
    add."""

    context_tokens: int = UNKNOWN_CONTEXT
    calls_to_come: float | None = None
    prices: Prices = USUAL_PRICES
    tool_tokens: int = 0

    @property
    def calls(self) -> float:
        """The calls still to come. Long contexts belong to long sessions: in recorded runs with a
        context of 5,000 tokens about 10 calls follow, with 50,000 tokens and more about 40."""
        if self.calls_to_come is not None:
            return self.calls_to_come
        return min(_MOST_CALLS, _FEWEST_CALLS + self.context_tokens / _PER_CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why a result left the context or stayed: sizes, expected reads and costs. Costs are in units
    of the price of an input token. `reason` is "cost", "limit", "rule", "off", "small", or "report"
    for what is always read as a whole."""

    leaves: bool
    reason: str
    tokens: int
    limit_tokens: int | None = None
    use: Use = "data"
    context_tokens: int = 0
    calls_to_come: float = 0.0
    expected_reads: float = 0.0
    inline_cost: float = 0.0
    stub_cost: float = 0.0

    @property
    def expected_saving(self) -> float:
        """What a stub is expected to save; below zero if the result costs less inline."""
        return self.inline_cost - self.stub_cost

    def __str__(self) -> str:
        what = "leaves" if self.leaves else "stays"
        if self.reason != "cost":
            return f"{self.tokens:,} tokens: {what} ({self.reason})"
        return (
            f"{self.tokens:,} tokens of {self.use}: {what}. Inline it costs "
            f"{self.inline_cost:,.0f}, a stub {self.stub_cost:,.0f} with "
            f"{self.expected_reads:.1f} expected reads, in a context of "
            f"{self.context_tokens:,} tokens with {self.calls_to_come:.0f} calls to come; "
            f"from {self.limit_tokens:,} "
            "tokens on a stub pays"
        )


def use_of(tool: str | None) -> Use:
    """Return what agents do with results of a tool, by its name. The prefix of an MCP server does
    not count."""
    name = (tool or "").rpartition("__")[2]
    words = {word.lower() for word in _WORDS.findall(name)}
    if words & _REPORTS and "output" not in words:
        return "report"
    if words & _FILES and words <= _FILES | _OF_FILES:
        return "file"
    if words & _SEARCHES or {"search", "code"} <= words:
        return "search"
    if words & _COMMANDS:
        return "command"
    return "data"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected costs of one kind of result in a situation."""

    use: Use
    situation: Situation
    rate: float = 1.0
    """Reads per expected read, as this store has seen them."""

    def reads(self, tokens: int) -> float:
        """Expected reads of a stub for a result of this size."""
        reads, power = self._reads()
        return reads * math.pow(tokens / 1_000, power)

    def _reads(self) -> tuple[float, float]:
        """Expected reads for a result of 1,000 tokens, and the exponent of the size with which they
        grow."""
        base, power = _READS.get(self.use, _READS["data"])
        return self.rate * base, power

    def _stub(self) -> float:
        return self._kept() * (STUB_TOKENS + self.situation.tool_tokens)

    def _kept(self) -> float:
        return self.situation.prices.write + self.situation.prices.read * self.situation.calls

    def _read(self) -> float:
        """The cost of one read: one more call, and a page that stays."""
        prices = self.situation.prices
        asked = prices.read * self.situation.context_tokens + prices.output * QUESTION_TOKENS
        return asked + self._kept() * (PAGE_TOKENS + QUESTION_TOKENS)

    def inline_cost(self, tokens: int) -> float:
        return self._kept() * tokens

    def stub_cost(self, tokens: int) -> float:
        return self._stub() + self.reads(tokens) * self._read()

    def break_even(self) -> int:
        """Return the size in tokens from which a stub is expected to cost less."""
        low, high = LEAST_TOKENS, _MOST
        kept, read, stub = self._kept(), self._read(), self._stub()
        reads, power = self._reads()
        while low < high:
            middle = (low + high) // 2
            if (
                stub + reads * math.pow(middle / 1_000, power) * read < kept * middle
            ):  # as `stub_cost` adds them up
                high = middle
            else:
                low = middle + 1
        return max(low, self._recovering())

    def _recovering(self) -> int:
        """Return the size from which one immediate read is earned back soon: a conversation may end
        early."""
        prices = self.situation.prices
        asked = prices.read * self.situation.context_tokens + prices.output * QUESTION_TOKENS
        soon = prices.write + prices.read * _RECOVERED
        return STUB_TOKENS + PAGE_TOKENS + self.situation.tool_tokens + math.ceil(asked / soon)

    def decided(self, tokens: int, limit: int) -> Decision:
        return Decision(
            leaves=tokens > limit,
            reason="cost",
            tokens=tokens,
            limit_tokens=limit,
            use=self.use,
            context_tokens=self.situation.context_tokens,
            calls_to_come=self.situation.calls,
            expected_reads=self.reads(tokens),
            inline_cost=self.inline_cost(tokens),
            stub_cost=self.stub_cost(tokens),
        )


@dataclass(slots=True)
class _Rate:
    """Expected and actual reads of the stubs of one tool."""

    expected: float = 0.0
    reads: int = 0
    stubs: int = 0

    def add(self, other: _Rate) -> None:
        self.expected += other.expected
        self.reads += other.reads
        self.stubs += other.stubs


class _Judged(NamedTuple):
    """A result as a prompt builder judges it."""

    session_id: str
    tool: str | None
    call_id: str
    situation: Situation


class ReadRates:
    """How often stubs are read, per tool, in one store, and the conversations of this process.

    Counts are kept in a record of the store and written with the last uses of sessions, so that the
    next process begins with them. They are not locked: losing a few does no harm."""

    def __init__(self, store: Store) -> None:
        self._saved: dict[str, _Rate] | None = None
        self._new: dict[str, _Rate] = {}
        self._sessions: dict[str, int] = {}  # tokens that each was shown by this process
        self._stubs: dict[str, tuple[str, str | None]] = {}
        self._used: dict[_Judged, float] = {}
        self._events = 0
        store.writers.append(partial(self.flush, store))

    def rate_for(self, result: _Judged, session: CoreSession) -> float:
        """Return the rate for a result in a known situation: the same as last time if it is judged
        again, so that a prompt that is built twice is the same."""
        found = self._used.get(result)
        if found is None:
            found = self._used[result] = self.rate(session, result.tool)
            bound(self._used)
        return found

    def rate(self, session: CoreSession, tool: str | None) -> float:
        """Return the reads per expected read of a tool's stubs in this store."""
        if self._saved is None:
            self._saved = _loaded(session.store)
        total = _Rate()
        for rates in (self._saved, self._new):
            one = rates.get(_rate_name(tool))
            if one is not None:
                total.add(one)
        found = (_TRUST + total.reads) / (_TRUST + total.expected)
        return min(max(found, _BOUNDS[0]), _BOUNDS[1])

    def context_tokens(self, session: CoreSession) -> int:
        """Return the tokens of a session's conversation as far as this process has seen it."""
        return min(UNKNOWN_CONTEXT + self._sessions.get(session.session_id, 0), _LARGEST_UNKNOWN)

    def shown(self, session: CoreSession, tokens: int) -> None:
        """Note that the model of a session got this many tokens."""
        total = self._sessions.pop(session.session_id, 0) + tokens
        self._sessions[session.session_id] = total  # the newest is last
        if len(self._sessions) > _TRACKED:
            self._sessions.pop(next(iter(self._sessions)), None)

    def stubbed(
        self, session: CoreSession, tool: str | None, refs: Sequence[Ref], expected: float
    ) -> None:
        """Note the stubs of a result, and the expected number of reads. The same result of the same
        call counts once, even if a host passes it again."""
        call = session.session_id, refs[0].call_id
        if call[1] and self._stubs.get(refs[0].artifact_id) == call:
            return
        self.shown(session, STUB_TOKENS)
        self._stubs |= {ref.artifact_id: call for ref in refs}
        bound(self._stubs)
        self._add(tool, _Rate(expected, 0, 1))

    def read(self, session: CoreSession, ref: Ref, chars: int) -> None:
        """Note that a model read a page of an artifact. It counts as a read back if the artifact
        became a stub when it arrived; what a person stored or what was pruned later does not
        count."""
        self.shown(session, chars // _CHARS_PER_TOKEN)
        if ref.artifact_id in self._stubs:
            self._add(ref.tool, _Rate(0.0, 1, 0))

    def _add(self, tool: str | None, seen: _Rate) -> None:
        self._new.setdefault(_rate_name(tool), _Rate()).add(seen)
        self._events += 1

    def flush(self, store: Store) -> None:
        """Write the counts if enough has happened. Another process may have written meanwhile, so
        they are added to what the store has."""
        if self._events < _LEAST_SAVED:
            return
        self._events, new, self._new = 0, self._new, {}
        total = _loaded(store)
        for name, rate in dict(new).items():
            total.setdefault(name, _Rate()).add(rate)
        self._saved = dict(sorted(total.items(), key=lambda one: -one[1].stubs)[:_TOOLS])
        body = {
            name: [round(one.expected, 3), one.reads, one.stubs]
            for name, one in self._saved.items()
        }
        try:
            store.session(_SESSION, ttl=None).record(_SERIES, json.dumps(body).encode(), keep=1)
        except Exception:  # noqa: BLE001 - a full or read-only store, or a third party's: only the correction is lost
            pass


def _rate_name(tool: str | None) -> str:
    """The name under which a tool's counts are stored: without secrets, whatever the policy, and
    short."""
    return mask(tool or "")[:200]


def _loaded(store: Store) -> dict[str, _Rate]:
    """Return the counts that a store has; none if they cannot be read."""
    try:
        records = store.session(_SESSION, ttl=None).records(_SERIES, newest=True, limit=1)
        found = json.loads(records[0].body) if records else {}
        return {
            str(tool): _Rate(float(one[0]), int(one[1]), int(one[2])) for tool, one in found.items()
        }
    except Exception:  # noqa: BLE001 - third-party backends raise anything, records may be damaged; the agent continues
        return {}


_RATES: Final[WeakKeyDictionary[Store, ReadRates]] = WeakKeyDictionary()


def rates_of(store: Store) -> ReadRates:
    """Return the read rates of a store, one object per process."""
    return _RATES.get(store) or _RATES.setdefault(store, ReadRates(store))


def expected_costs(
    session: CoreSession,
    tool: str | None,
    situation: Situation | None,
    prices: Prices,
    calls: float | None,
    call_id: str | None = None,
) -> tuple[Estimate | None, int]:
    """Return the expected costs of a tool's result, and the size in tokens from which a stub pays
    off. None if it never leaves. Without a situation, prices and calls come from the policy, and
    the context is what this process saw."""
    use = use_of(tool)
    if use == "report":
        return None, 0
    rates = rates_of(session.store)
    if situation is None:
        context, tools, rate = rates.context_tokens(session), 0, rates.rate(session, tool)
    else:
        context, tools, prices = situation.context_tokens, situation.tool_tokens, situation.prices
        calls = situation.calls_to_come
        known = call_id and _Judged(session.session_id, tool, call_id, situation)
        rate = rates.rate_for(known, session) if known else rates.rate(session, tool)
    situation = Situation(
        context_tokens=_rounded(context), calls_to_come=calls, prices=prices, tool_tokens=tools
    )
    found = Estimate(use, situation, max(_BOUNDS[0], round(rate * _STEPS) / _STEPS))
    return found, found.break_even()


def note_result(
    session: CoreSession, tool: str | None, refs: Sequence[Ref], tokens: int, chars: int
) -> None:
    """Note what became of a result: stubs with these refs for this many tokens, or its characters
    in the context."""
    rates = rates_of(session.store)
    if refs:
        rates.stubbed(session, tool, refs, Estimate(use_of(tool), Situation()).reads(tokens))
    else:
        rates.shown(session, chars // _CHARS_PER_TOKEN)


def bound(table: dict[Any, Any]) -> None:
    """Forget the oldest entries of a table that grew too long."""
    while len(table) > REMEMBERED:
        table.pop(next(iter(table)), None)


def _rounded(tokens: int) -> int:
    """Round to two digits, so that a little more context does not change a decision."""
    step: int = 10 ** max(0, len(str(tokens)) - 2)
    return tokens // step * step
