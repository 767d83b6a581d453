"""The messages of a prompt: calls and results paired, large results replaced by stubs as they
arrive.

What a provider was sent is never changed: only results after the model's last answer are judged,
and the host keeps the outcome as part of the history. So the history is the record, and nothing is
remembered here.

If the caller allows rewriting, old results are replaced in rare, large steps: when that is expected
to pay off, and when a history exceeds its budget. Thinking after the first changed message is then
removed too: models that bind thinking to what precedes it would refuse it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from coatcheck.checks import whole
from coatcheck.context.appended import LEADS, own_texts
from coatcheck.errors import CoatcheckError, LimitExceeded
from coatcheck.externalize import Decision, Outcome, Policy, Situation
from coatcheck.externalize.decision import PAGE_TOKENS, QUESTION_TOKENS
from coatcheck.externalize.originals import keep_original, original_of
from coatcheck.externalize.shorter import (
    LEAST_REPEATED,
    ShownResult,
    expanded,
    is_reference,
    repaired,
    shorter,
)
from coatcheck.externalize.storing import put
from coatcheck.externalize.stub import STUB, is_replacement, mark, pointer_in_stub
from coatcheck.ids import clip
from coatcheck.intake import About
from coatcheck.messages import Dialect, Format, Message
from coatcheck.messages.cache import with_marks_of, without_marks
from coatcheck.messages.content import arguments_of, dumped, plain_text, text_of, text_paths
from coatcheck.messages.cost import Cost, Tally
from coatcheck.messages.formats import Call
from coatcheck.messages.pairing import in_context, pair, program_results, side, turns
from coatcheck.messages.paths import Path, at, replaced
from coatcheck.models import USUAL_PRICES, Prices
from coatcheck.previews.excerpts import line as one_line
from coatcheck.refs import Ref
from coatcheck.transcript.prune import Pruned, prune

if TYPE_CHECKING:
    from coatcheck.session import Session

_NO_COSTS: Final[Mapping[int, Cost]] = MappingProxyType({})
_LEAST_CHARS: Final = 400  # a shorter result gets no pointer: repeating its call costs less
_CLEARED: Final = 20  # tokens that the provider leaves of a result
_TOOL: Final = 60
_CHARS_PER_TOKEN: Final = 3  # of results, about

# For a step that replaces old results where that pays off. Measured on recorded sessions, see
# docs/effect.md.
_BATCH: Final = 12_000  # tokens that it must save
_LEAST_SAVED: Final = 100  # tokens that each placeholder must save
_PLACEHOLDER: Final = 60
_LATE_CALLS: Final = (
    30  # maximum of calls to come that are counted on, and at most as many as there were
)
_LATE_READS: Final = 0.25  # expected reads of a placeholder
_CERTAINTY: Final = 2.0
_EVERYTHING: Final = 1e-6  # the low-water mark of a step that replaces all it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """Old tool results are cleared by the provider itself (Anthropic's `clear_tool_uses_20250919`):
    beyond `trigger_tokens`, all but those of the newest `keep` calls, if that clears
    `clear_at_least` tokens."""

    trigger_tokens: int = 100_000
    keep: int = 3
    clear_at_least: int = 20_000

    def __post_init__(self) -> None:
        whole(self.trigger_tokens, "trigger_tokens", least=1)
        whole(self.keep, "keep")
        whole(self.clear_at_least, "clear_at_least")

    def edit(self, excluded: Sequence[str]) -> dict[str, Any]:
        """Return the provider's form of it. Results of the `excluded` tools are never cleared."""
        found: dict[str, Any] = {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": self.trigger_tokens},
            "keep": {"type": "tool_uses", "value": self.keep},
        }
        if self.clear_at_least:
            found["clear_at_least"] = {"type": "input_tokens", "value": self.clear_at_least}
        return found | ({"exclude_tools": list(excluded)} if excluded else {})


@dataclass(frozen=True, slots=True)
class SentMessages:
    """Messages as they are sent, with their costs, the refs of externalized results, what was
    changed now, and why new results left or stayed."""

    messages: list[Message]
    costs: list[Cost]
    refs: tuple[Ref, ...] = ()
    changes: tuple[str, ...] = ()
    pruned: Pruned | None = None
    decisions: tuple[Decision, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.costs)


@dataclass(frozen=True, slots=True)
class Conversation:
    """How the conversations of one session with one provider are sent."""

    session: Session
    dialect: Dialect
    tally: Tally
    _: KW_ONLY
    policy: Policy | None
    keep_turns: int
    read_tool: str | None
    redact: Literal["store"] | None = None
    clearing: Clearing | None = None
    own_tools: Sequence[str] = ()
    prices: Prices = USUAL_PRICES
    may_rewrite: bool = False

    def grown(
        self,
        messages: Sequence[Message],
        costs: Sequence[Cost | None],
        key: bytes,
        *,
        fixed: int = 0,
        tool_tokens: int = 0,
    ) -> SentMessages:
        """Return the messages as they are sent: paired, and with the new results judged. `fixed`
        are the tokens before them, `tool_tokens` those of the tools that a first stub would add.
        Raises `LimitExceeded` if one cannot be counted."""
        known = {
            id(one): cost for one, cost in zip(messages, costs, strict=True) if cost is not None
        }
        paired = list(self.dialect.mended(messages))
        return self._judged(paired, self.dialect.unanswered(paired), known, key, fixed, tool_tokens)

    def rewritten(self, sent: SentMessages, room: int, key: bytes) -> SentMessages:
        """Return the messages within `room` tokens: old results judged too, then pruned. Raises
        `LimitExceeded` if they do not fit."""
        known = dict(zip(map(id, sent.messages), sent.costs, strict=True))
        slim = self._judged(sent.messages, range(len(sent.messages)), known, key)
        return self._after(sent, self._pruned(slim, room) if slim.tokens > room else slim)

    def batched(self, sent: SentMessages, fixed: int, *, is_cold: bool) -> SentMessages:
        """Return the messages with old results and arguments replaced in one step, if that is
        expected to pay off: the savings in later calls must exceed twice the cost of writing the
        changed part again, plus the reads back. With a cold cache everything is written again
        anyway. Otherwise return them unchanged."""
        fmt, prices = self.dialect.format, self.prices
        starts = turns([side(one, fmt) for one in sent.messages])
        old = starts[-self.keep_turns] if 0 < self.keep_turns < len(starts) else 0
        saved = [
            _replaceable(message, cost, fmt)
            for message, cost in zip(sent.messages[:old], sent.costs, strict=False)
        ]
        total, first = sum(saved), next((at for at, tokens in enumerate(saved) if tokens), 0)
        if total < _BATCH:
            return sent
        left = fixed + sent.tokens - total
        behind = sum(one.tokens for one in sent.costs[first:]) - total
        calls = min(_LATE_CALLS, len(starts), Situation(context_tokens=left).calls)
        reads = _LATE_READS * sum(1 for tokens in saved if tokens)
        asked = prices.read * left + prices.output * QUESTION_TOKENS
        lost = reads * (
            asked + (prices.write + prices.read * calls) * (PAGE_TOKENS + QUESTION_TOKENS)
        )
        gained = total * (prices.read * calls + (prices.write if is_cold else 0))
        if not is_cold:
            lost += _CERTAINTY * behind * (prices.write - prices.read)
        if gained <= lost:
            return sent
        try:
            room = sent.tokens - total // 2
            done = self._pruned(
                sent, room, low_water=_EVERYTHING, fold=False, least_saved=_LEAST_SAVED
            )
        except LimitExceeded:  # there was much less to save than it seemed
            return sent
        return self._after(replace(sent, refs=(), changes=()), done)

    def _after(self, sent: SentMessages, done: SentMessages) -> SentMessages:
        """Return changed messages without the thinking after the first change, which belongs to
        other messages."""
        pairs = zip(done.messages, sent.messages, strict=False)
        first = sum(
            1 for _ in takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs)
        )
        whole = [*done.messages[:first], *map(self.dialect.without_thinking, done.messages[first:])]
        lost = sum(new is not old for new, old in zip(whole, done.messages, strict=True))
        notes = [f"{lost} messages: thinking behind the first change was removed"] if lost else []
        known = dict(zip(map(id, done.messages), done.costs, strict=True))
        refs, changes = (*sent.refs, *done.refs), (*sent.changes, *done.changes, *notes)
        return SentMessages(
            whole, self._costs(whole, known), refs, changes, done.pruned, sent.decisions
        )

    def has_stub(self, message: Message) -> bool:
        """Whether a message has a result that is a stub, or the placeholder of one that was
        pruned."""
        results = (at(message, one.content_path) for one in self.dialect.format.results(message))
        return any(is_replacement(plain_text(one) or "") for one in results)

    def clearable(self, sent: SentMessages) -> int:
        """Estimate the tokens that the provider would clear from these messages now."""
        clearing = self.clearing
        if clearing is None or sent.tokens <= clearing.trigger_tokens:
            return 0
        calls = pair(sent.messages, self.dialect.format).call_of
        old = sorted(calls)[: max(0, len(calls) - clearing.keep)]
        of_message: Counter[int] = Counter()
        for number, place in old:
            if calls[number, place][1].name not in self.own_tools:
                result = self.dialect.format.results(sent.messages[number])[place]
                found = self.tally.tokens(text_of(at(sent.messages[number], result.content_path)))
                of_message[number] += max(0, (found or 0) - _CLEARED)
        # A text by itself may be estimated higher than in its message.
        tokens = sum(
            min(tokens, sent.costs[number].tokens - _CLEARED)
            for number, tokens in of_message.items()
        )
        return tokens if tokens >= clearing.clear_at_least else 0

    def _pruned(self, slim: SentMessages, room: int, **how: Any) -> SentMessages:
        done = prune(
            [without_marks(one) for one in slim.messages],
            max_tokens=max(1, room),
            format=self.dialect.format,
            keep_turns=self.keep_turns,
            session=self.session,
            count=self.tally.tokens,  # type: ignore[arg-type]
            read_tool=self.read_tool,
            redact=self.redact,
            **how,
        )
        left = list(zip(done.messages, _origins(done, len(slim.messages)), strict=True))
        messages = self._alternating(left, slim.messages)
        failures = (f"an old result could not be stored: {one}" for one in done.failures)
        changes = (*slim.changes, *done.steps, *failures)
        return SentMessages(
            messages, self._costs(messages), slim.refs, changes, done, slim.decisions
        )

    def _alternating(
        self, left: Sequence[tuple[Message, int | None]], slim: list[Message]
    ) -> list[Message]:
        """Return the messages of a step with the host's current breakpoints. For Anthropic, user
        messages that became neighbours by pruning are merged. Neighbours in the host's own list are
        not: the provider reads them as one, and more may follow the last."""
        found: list[Message] = []
        last: int | None = None
        for message, origin in left:
            sent = message if origin is None else _with_marks(message, slim[origin])
            were_neighbours = last is not None and origin == last + 1
            if found and not were_neighbours and self.dialect.must_join(found[-1], sent):
                found[-1] = self.dialect.joined(found[-1], sent)
            else:
                found.append(sent)
            last = origin
        return found

    def _costs(
        self, messages: Sequence[Message], known: Mapping[int, Cost] = _NO_COSTS
    ) -> list[Cost]:
        """Return the cost of each message. `known` has costs by the identity of the object."""
        found = []
        for message, shown in zip(messages, in_context(messages, self.dialect.format), strict=True):
            one = known.get(id(message)) or self.tally.weighed(shown)
            if one is None:
                raise LimitExceeded(
                    "the tokens of a message cannot be counted", hint="fix the token counter"
                )
            found.append(one)
        return found

    def _judged(
        self,
        messages: list[Message],
        numbers: range,
        known: Mapping[int, Cost],
        key: bytes,
        fixed: int = 0,
        tool_tokens: int = 0,
    ) -> SentMessages:
        """Return the messages with stubs in place of those results in `numbers` that the policy
        lets leave. Messages without such results are the same objects. A result for a provider's
        program stays: it is not in the context."""
        before = (known.get(id(one)) for one in messages[: numbers.start])
        context = fixed + sum(cost.tokens for cost in before if cost is not None)
        arriving = _Arriving(messages, numbers.start, self.dialect.format, context, tool_tokens)
        done = _Judged()
        new = list(messages)
        for number, texts in self._result_texts(messages, numbers).items():
            new[number] = self._judged_message(messages[number], texts, arriving, done, key)
        if done.moved:
            new = [self._with_repaired_references(one, done.moved) for one in new]
        return SentMessages(
            new,
            self._costs(new, known),
            refs=tuple(done.refs),
            changes=tuple(done.changes),
            decisions=tuple(done.decisions),
        )

    def _result_texts(
        self, messages: Sequence[Message], numbers: range
    ) -> dict[int, list[_ResultText]]:
        """Return the contents to judge in each message of `numbers` that is not an answer."""
        calls = self._calls_of(messages, numbers)
        for_program = program_results(messages, self.dialect.format)
        found: dict[int, list[_ResultText]] = {}
        for number in numbers:
            message = messages[number]
            if self.dialect.is_answer(message):
                continue
            texts = found.setdefault(number, [])
            for place, result in enumerate(self.dialect.format.results(message)):
                if (number, place) in for_program:
                    continue
                name, arguments = calls.get(result.call_id, (None, None))
                shown = ShownResult("", result.name or name or "", result.call_id, arguments)
                for path in text_paths(message, result):
                    texts.append(_ResultText(path, at(message, path), shown))
        return found

    def _judged_message(
        self,
        message: Message,
        texts: Sequence[_ResultText],
        arriving: _Arriving,
        done: _Judged,
        key: bytes,
    ) -> Message:
        """Return a message with its results judged, and with our note of their pointers if the
        provider may clear them. What happened is added to `done`."""
        new = message
        pointers: list[tuple[str, list[str]]] = []
        for text in texts:
            outcome = self._outcome(text.content, text.result, arriving)
            if outcome is not None and outcome.why is not None:
                done.decisions.append(outcome.why)
            if outcome is not None and outcome.content == without_marks(text.content):
                outcome = None  # it stays as it is
            if outcome is not None:
                content = with_marks_of(outcome.content, text.content)
                new = dict(replaced(new, text.path, content))
                done.add(text, outcome)
            tool = text.result.tool
            if self.clearing and self.read_tool and tool not in self.own_tools:
                pointers.append((tool, self._kept(text, outcome, done.refs)))
        note = self._note(pointers, key)
        if note is None or any(kind == "results" for kind, _ in own_texts(key, [message])):
            return new
        (noted,) = self.dialect.with_texts([new], [note])
        return noted

    def _with_repaired_references(self, message: Message, moved: Mapping[str, str]) -> Message:
        """Return the message with results that refer to a moved one saying where that is; the same
        object if none does."""
        for result in self.dialect.format.results(message):
            text = plain_text(at(message, result.content_path))
            changed = repaired(text, moved) if text is not None else None
            if changed is not None:
                message = self.dialect.format.with_content(message, result=result, text=changed)
        return message

    def _calls_of(self, messages: Sequence[Message], numbers: range) -> dict[str, tuple[str, Any]]:
        """Return tool and arguments of the calls that the results in `numbers` answer, by the ids
        of the calls."""
        fmt = self.dialect.format
        wanted = {result.call_id for number in numbers for result in fmt.results(messages[number])}
        found: dict[str, tuple[str, Any]] = {}
        for message in reversed(messages):
            if len(found) == len(wanted):
                break
            for call in fmt.calls(message):
                if call.id in wanted:
                    found.setdefault(call.id, (call.name, _arguments(message, call)))
        return found

    def _outcome(self, content: Any, result: ShownResult, arriving: _Arriving) -> Outcome | None:
        """Return what becomes of content without the host's breakpoints, which belong to the turn.
        None if no policy applies to it."""
        policy, plain = self.policy, without_marks(content)
        if policy is None or not isinstance(plain, str | list):
            return None
        text = plain_text(plain)
        if text is not None:
            exact = self._exact(text, policy)
            if exact is None:
                return None  # what it refers to is shown, and it is short
            if exact != text:
                plain, text = _with_plain_text(plain, exact), exact
            short = self._shorter(text, result, arriving, policy)
            if short is not None:
                arriving.add(replace(result, text=short))
                return Outcome(short, _with_plain_text(plain, short))
        situation = Situation(
            context_tokens=arriving.context,
            calls_to_come=policy.expected_calls,
            prices=policy.prices or self.prices,
            tool_tokens=arriving.tool_tokens,
        )
        outcome = self.session.externalize(
            plain,
            tool=result.tool or None,
            call_id=result.call_id or None,
            policy=policy,
            situation=situation,
        )
        if outcome.refs:
            arriving.tool_tokens = 0
        arriving.add(replace(result, text="" if outcome.refs else outcome.text), len(outcome.text))
        return outcome

    def _shorter(
        self, text: str, result: ShownResult, arriving: _Arriving, policy: Policy
    ) -> str | None:
        """Return a text that refers to what the conversation already shows, if the policy allows
        that and it is shorter."""
        if len(text) < LEAST_REPEATED or not policy.decides_by_cost(result.tool):
            return None
        short = shorter(text, result.tool, result.arguments, arriving.shown())
        if short is not None:
            self._keep_original(text, short, result, policy)
        return short

    def _exact(self, text: str, policy: Policy) -> str | None:
        """Return a result as its tool returned it, if the text is a shorter form of it. None if
        that is not known."""
        if not is_reference(text):
            return expanded(text) or text
        ref = original_of(self.session, text, policy)
        found = None if ref is None else self.session.get(ref)
        return found if isinstance(found, str) else None

    def _keep_original(self, text: str, short: str, result: ShownResult, policy: Policy) -> None:
        """Store a result that the conversation shows in a shorter form, if it may be pruned
        later."""
        if not self.may_rewrite:
            return
        try:
            keep_original(self.session, text, short, _about(result), policy)
        except CoatcheckError:  # then the shorter form stays when its conversation is pruned
            pass

    def _kept(self, result: _ResultText, outcome: Outcome | None, refs: list[Ref]) -> list[str]:
        """Store a result that the provider may clear, if it is not stored yet, and return its
        pointers."""
        if outcome is not None and outcome.refs and plain_text(outcome.content) is not None:
            return [ref.pointer for ref in outcome.refs]
        plain = without_marks(result.content)
        text = plain_text(plain)
        pointer = None if text is None else pointer_in_stub(text)
        if pointer is not None:
            return [pointer]
        if not isinstance(plain, str | list) or len(text_of(plain)) < _LEAST_CHARS:
            return []
        about = _about(result.result)
        try:
            ref = put(self.session, plain if text is None else text, about, self.policy)
        except CoatcheckError:  # it is shown, and may be cleared like any other
            return []
        refs.append(ref)
        return [ref.pointer]

    def _note(self, pointers: Sequence[tuple[str, list[str]]], key: bytes) -> str | None:
        """Return our text with the pointers of the results in one message, in their order."""
        lines = [
            f"{one_line(tool, _TOOL)} {' '.join(each)}".strip() for tool, each in pointers if each
        ]
        if not lines:
            return None
        return mark(
            key, f"{LEADS['results']}; {self.read_tool}(pointer=…) reads one.", "\n".join(lines)
        )


@dataclass(frozen=True, slots=True)
class _ResultText:
    """Content of a result, where it is in its message, and the call that it answers."""

    path: Path
    content: Any
    result: ShownResult


@dataclass(slots=True)
class _Judged:
    """What judging results has done so far. `moved` says where a result went, by its place in the
    conversation."""

    refs: list[Ref] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)

    def add(self, text: _ResultText, outcome: Outcome) -> None:
        if outcome.refs:
            self.moved[text.result.place] = f"stored in {outcome.refs[0].pointer}"
        self.refs += outcome.refs
        self.changes.append(_change(text.result.tool, text.content, outcome))


class _Arriving:
    """Where a new result arrives: the tokens before it, the results that the conversation shows,
    and the tokens of the tools that a first stub would add."""

    def __init__(
        self, messages: Sequence[Message], end: int, fmt: Format, context: int, tool_tokens: int
    ) -> None:
        self.context = context
        self.tool_tokens = tool_tokens
        self._messages, self._end, self._format = messages, end, fmt
        self._shown: list[ShownResult] | None = None

    def shown(self) -> list[ShownResult]:
        """Return the results so far, oldest first. They are collected when they are first
        needed."""
        if self._shown is None:
            calls: dict[str, tuple[str, Any]] = {}
            self._shown = []
            for message in in_context(self._messages, self._format)[: self._end]:
                calls.update(
                    {
                        one.id: (one.name, _arguments(message, one))
                        for one in self._format.calls(message)
                    }
                )
                for result in self._format.results(message):
                    tool, arguments = calls.get(result.call_id, (result.name or "", None))
                    text = plain_text(at(message, result.content_path))
                    if text and not text.startswith(STUB):
                        self._shown.append(ShownResult(text, tool, result.call_id, arguments))
        return self._shown

    def add(self, result: ShownResult, chars: int = 0) -> None:
        self.context += (chars or len(result.text)) // _CHARS_PER_TOKEN
        if result.text and self._shown is not None:
            self._shown.append(result)


def _replaceable(message: Message, cost: Cost, fmt: Format) -> int:
    """Estimate the tokens that placeholders would save in a message."""
    if fmt.results(message):
        return (
            max(0, cost.tokens - _PLACEHOLDER) if cost.tokens > _LEAST_SAVED + _PLACEHOLDER else 0
        )
    sizes = (
        len(dumped(_arguments(message, call))) // _CHARS_PER_TOKEN for call in fmt.calls(message)
    )
    return sum(size - _PLACEHOLDER for size in sizes if size > _LEAST_SAVED + _PLACEHOLDER)


def _arguments(message: Message, call: Call) -> Any:
    found = arguments_of(message, call)
    return found and found[1]


def _with_plain_text(plain: str | list[Any], text: str) -> str | list[Any]:
    """Return content that is only a text with another text, in the same form."""
    return text if isinstance(plain, str) else [{**plain[0], "text": text}]


def _about(result: ShownResult) -> About:
    return About(tool=result.tool[:1_000] or None, call_id=result.call_id[:1_000] or None)


def _change(tool: str, content: Any, outcome: Outcome) -> str:
    of = f" of {clip(tool, 60)}" if tool else ""
    size = f"{len(content):,} {'characters' if isinstance(content, str) else 'blocks'}"
    if outcome.failure is not None:
        return f"result{of}: {size} were cut, and could not be stored: {clip(outcome.failure, 200)}"
    return (
        f"result{of}: {size} became {', '.join(ref.pointer for ref in outcome.refs) or 'shorter'}"
    )


def _origins(done: Pruned, length: int) -> list[int | None]:
    """Return, for each message that pruning left, the index of the message it was made from. A note
    replaces several messages, in the place of the first."""
    folded = {one.message for one in done.replaced if one.what == "turns"}
    first = min(folded, default=None)
    return [
        None if number == first else number
        for number in range(length)
        if number == first or number not in folded
    ]


def _with_marks(message: Message, now: Message) -> Message:
    """Return a pruned message with the breakpoints of its current form; the same object if nothing
    else differs."""
    if message is now or message == now:
        return now
    marked: Message = with_marks_of(message, now) if without_marks(now) is not now else message
    return marked
