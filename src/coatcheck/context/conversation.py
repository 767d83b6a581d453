"""The messages of a prompt: calls and results paired, large results replaced by stubs as they arrive.

What a provider was sent is never changed: only results behind the model's last answer are judged, and what becomes of
them is kept by the host as part of the history. So the history is the record, and nothing is remembered here.

Where the caller allows rewriting, a history over its budget is pruned in one large step. Thinking behind the first
changed message then goes too: models that bind thinking to what is before it would refuse it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from coatcheck.checks import whole
from coatcheck.context.appended import LEADS, own_texts
from coatcheck.errors import CoatcheckError, LimitExceeded
from coatcheck.externalize import Outcome, Policy
from coatcheck.externalize.pipeline import put
from coatcheck.externalize.stub import mark
from coatcheck.ids import clip
from coatcheck.intake import About
from coatcheck.messages import Dialect, Message
from coatcheck.messages.cache import with_marks_of, without_marks
from coatcheck.messages.cost import Cost, Tally
from coatcheck.messages.formats import plain_text, text_of, text_paths
from coatcheck.messages.pairing import pair
from coatcheck.messages.paths import at, replaced
from coatcheck.previews.excerpts import line as one_line
from coatcheck.refs import Ref
from coatcheck.transcript.placeholders import pointer_in_stub
from coatcheck.transcript.prune import Pruned, prune

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Clearing", "Conversation", "SentMessages"]

_NO_COSTS: Final[Mapping[int, Cost]] = MappingProxyType({})
_LEAST_CHARS: Final = 400  # a shorter result gets no pointer: repeating its call costs less
_CLEARED: Final = 20  # tokens that the provider leaves of a result
_TOOL: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """Old tool results are cleared by the provider itself (Anthropic's `clear_tool_uses_20250919`): beyond
    `trigger_tokens`, all but those of the newest `keep` calls, if that clears `clear_at_least` tokens."""

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
    """Messages as they are sent, with their costs, the refs of externalized results, and what was changed now."""

    messages: list[Message]
    costs: list[Cost]
    refs: tuple[Ref, ...] = ()
    changes: tuple[str, ...] = ()
    pruned: Pruned | None = None

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.costs)


class Conversation:
    """How the conversations of one session with one provider are sent."""

    def __init__(
        self,
        session: Session,
        dialect: Dialect,
        tally: Tally,
        *,
        policy: Policy | None,
        keep_turns: int,
        read_tool: str | None,
        redact: Literal["store"] | None = None,
        clearing: Clearing | None = None,
        own_tools: Sequence[str] = (),
    ) -> None:
        self._session = session
        self._dialect = dialect
        self._tally = tally
        self._policy = policy
        self._keep_turns = keep_turns
        self._read_tool = read_tool
        self._redact = redact
        self._clearing = clearing
        self._own_tools = own_tools

    def grown(self, messages: Sequence[Message], costs: Sequence[Cost | None], key: bytes) -> SentMessages:
        """Return the messages as they are sent: paired, and with the new results judged. Raises `LimitExceeded` if a
        message cannot be counted."""
        known = {id(one): cost for one, cost in zip(messages, costs, strict=True) if cost is not None}
        paired = list(self._dialect.mended(messages))
        return self._judged(paired, self._dialect.unanswered(paired), known, key)

    def rewritten(self, sent: SentMessages, room: int, key: bytes) -> SentMessages:
        """Return the messages within `room` tokens: old results judged too, then pruned. Raises `LimitExceeded` if they
        do not fit."""
        known = dict(zip(map(id, sent.messages), sent.costs, strict=True))
        slim = self._judged(sent.messages, range(len(sent.messages)), known, key)
        done = self._pruned(slim, room) if slim.tokens > room else slim
        pairs = zip(done.messages, sent.messages, strict=False)
        first = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs))
        whole = [*done.messages[:first], *map(self._dialect.without_thinking, done.messages[first:])]
        lost = sum(new is not old for new, old in zip(whole, done.messages, strict=True))
        notes = [f"{lost} messages: thinking behind the first change was removed"] if lost else []
        known.update(zip(map(id, done.messages), done.costs, strict=True))
        refs, changes = (*sent.refs, *done.refs), (*sent.changes, *done.changes, *notes)
        return SentMessages(whole, self._costs(whole, known), refs, changes, done.pruned)

    def clearable(self, sent: SentMessages) -> int:
        """Estimate the tokens that the provider clears of these messages, if it clears now."""
        clearing = self._clearing
        if clearing is None or sent.tokens <= clearing.trigger_tokens:
            return 0
        calls = pair(sent.messages, self._dialect.format).call_of
        old = sorted(calls)[: max(0, len(calls) - clearing.keep)]
        of_message: Counter[int] = Counter()
        for number, place in old:
            if calls[number, place][1].name not in self._own_tools:
                result = self._dialect.format.results(sent.messages[number])[place]
                found = self._tally.tokens(text_of(at(sent.messages[number], result.content_path)))
                of_message[number] += max(0, (found or 0) - _CLEARED)
        # A text by itself may be estimated higher than in its message.
        tokens = sum(min(tokens, sent.costs[number].tokens - _CLEARED) for number, tokens in of_message.items())
        return tokens if tokens >= clearing.clear_at_least else 0

    def _pruned(self, slim: SentMessages, room: int) -> SentMessages:
        done = prune(
            [without_marks(one) for one in slim.messages],
            max_tokens=max(1, room),
            format=self._dialect.format,
            keep_turns=self._keep_turns,
            session=self._session,
            count=self._tally.tokens,  # type: ignore[arg-type]
            read_tool=self._read_tool,
            redact=self._redact,
        )
        left = list(zip(done.messages, _origins(done, len(slim.messages)), strict=True))
        messages = self._alternating(left, slim.messages)
        failures = (f"an old result could not be stored: {one}" for one in done.failures)
        changes = (*slim.changes, *done.steps, *failures)
        return SentMessages(messages, self._costs(messages), slim.refs, changes, done)

    def _alternating(self, left: Sequence[tuple[Message, int | None]], slim: list[Message]) -> list[Message]:
        """Return the messages of a step with the host's current breakpoints. For Anthropic, user messages that became
        neighbours by pruning are merged. Neighbours in the host's own list are not: the provider reads them as one, and
        more may follow the last."""
        found: list[Message] = []
        last: int | None = None
        for message, origin in left:
            sent = message if origin is None else _with_marks(message, slim[origin])
            were_neighbours = last is not None and origin == last + 1
            if found and not were_neighbours and self._dialect.must_join(found[-1], sent):
                found[-1] = self._dialect.joined(found[-1], sent)
            else:
                found.append(sent)
            last = origin
        return found

    def _costs(self, messages: Sequence[Message], known: Mapping[int, Cost] = _NO_COSTS) -> list[Cost]:
        """Return the cost of each message. `known` has costs by the identity of the object."""
        found = []
        for message in messages:
            one = known.get(id(message)) or self._tally.weighed(message)
            if one is None:
                raise LimitExceeded("the tokens of a message cannot be counted", hint="fix the token counter")
            found.append(one)
        return found

    def _judged(self, messages: list[Message], numbers: range, known: Mapping[int, Cost], key: bytes) -> SentMessages:
        """Return the messages with stubs in place of those results in `numbers` that the policy finds too large.
        Messages without such results are the same objects."""
        fmt, refs, changes = self._dialect.format, list[Ref](), list[str]()
        new = list(messages)
        tools = self._tools_of(messages, numbers)
        for number in numbers:
            message = messages[number]
            if self._dialect.is_answer(message):
                continue
            pointers: list[tuple[str, list[str]]] = []
            for result in fmt.results(message):
                tool = result.name or tools.get(result.call_id)
                for path in text_paths(message, result):
                    content = at(message, path)
                    outcome = self._outcome(content, tool, result.call_id)
                    if outcome is not None:
                        new[number] = dict(replaced(new[number], path, with_marks_of(outcome.content, content)))
                        refs += outcome.refs
                        changes.append(_change(tool, content, outcome))
                    if self._clearing and self._read_tool and tool not in self._own_tools:
                        pointers.append((tool or "", self._kept(content, tool, result.call_id, outcome, refs)))
            note = self._note(pointers, key)
            if note is not None and not any(kind == "results" for kind, _ in own_texts(key, [message])):
                (new[number],) = self._dialect.with_texts([new[number]], [note])
        return SentMessages(new, self._costs(new, known), tuple(refs), tuple(changes))

    def _tools_of(self, messages: Sequence[Message], numbers: range) -> dict[str, str]:
        """Return the tools of the calls that the results in `numbers` answer, by the ids of the calls."""
        fmt = self._dialect.format
        wanted = {result.call_id for number in numbers for result in fmt.results(messages[number])}
        found: dict[str, str] = {}
        for message in reversed(messages):
            if len(found) == len(wanted):
                break
            for call in fmt.calls(message):
                if call.id in wanted:
                    found.setdefault(call.id, call.name)
        return found

    def _outcome(self, content: Any, tool: str | None, call_id: str) -> Outcome | None:
        """Externalize content without the host's breakpoints, which belong to the turn; None if it stays as it is."""
        plain = without_marks(content)
        if self._policy is None or not isinstance(plain, str | list):
            return None
        outcome = self._session.externalize(plain, tool=tool, call_id=call_id or None, policy=self._policy)
        return None if outcome.content is plain else outcome

    def _kept(
        self, content: Any, tool: str | None, call_id: str, outcome: Outcome | None, refs: list[Ref]
    ) -> list[str]:
        """Store a result that the provider may clear, if it is not stored yet, and return its pointers."""
        if outcome is not None and outcome.refs and plain_text(outcome.content) is not None:
            return [ref.pointer for ref in outcome.refs]
        plain = without_marks(content)
        text = plain_text(plain)
        if text is not None and (pointer := pointer_in_stub(text)) is not None:
            return [pointer]
        if not isinstance(plain, str | list) or len(text_of(plain)) < _LEAST_CHARS:
            return []
        about = About(tool=(tool or "")[:1_000] or None, call_id=call_id[:1_000] or None)
        try:
            ref = put(self._session, plain if text is None else text, about, self._policy)
        except CoatcheckError:  # it is shown, and may be cleared like any other
            return []
        refs.append(ref)
        return [ref.pointer]

    def _note(self, pointers: Sequence[tuple[str, list[str]]], key: bytes) -> str | None:
        """Return our text with the pointers of the results in one message, in their order."""
        lines = [f"{one_line(tool, _TOOL)} {' '.join(each)}".strip() for tool, each in pointers if each]
        if not lines:
            return None
        return mark(key, f"{LEADS['results']}; {self._read_tool}(pointer=…) reads one.", "\n".join(lines))


def _change(tool: str | None, content: Any, outcome: Outcome) -> str:
    of = f" of {clip(tool, 60)}" if tool else ""
    size = f"{len(content):,} {'characters' if isinstance(content, str) else 'blocks'}"
    if outcome.failure is not None:
        return f"result{of}: {size} were cut, and could not be stored: {clip(outcome.failure, 200)}"
    return f"result{of}: {size} became {', '.join(ref.pointer for ref in outcome.refs) or 'shorter'}"


def _origins(done: Pruned, length: int) -> list[int | None]:
    """Return, for each message that pruning left, the index of the message it was made from. A note replaces several
    messages, in the place of the first."""
    folded = {one.message for one in done.replaced if one.what == "turns"}
    first = min(folded, default=None)
    return [None if number == first else number for number in range(length) if number == first or number not in folded]


def _with_marks(message: Message, now: Message) -> Message:
    """Return a pruned message with the breakpoints of its current form; that very object if nothing else differs."""
    if message is now or message == now:
        return now
    marked: Message = with_marks_of(message, now) if without_marks(now) is not now else message
    return marked
