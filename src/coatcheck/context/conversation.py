"""The messages of a prompt: calls and results paired, large results replaced by stubs, old ones pruned to fit.

A large result is externalized when it is first sent; its stub is the same in every later prompt. What was done to a
message is cached by its digest, so that each message is processed once and not once per turn.

Between two pruning steps a conversation only grows. The result of a step is kept and new messages are appended to it.
That gives the same messages as pruning the whole history again, without going through it each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from coatcheck.errors import LimitExceeded
from coatcheck.externalize import Outcome, Policy
from coatcheck.ids import clip
from coatcheck.messages import Dialect, Message
from coatcheck.messages.cache import with_marks_of, without_marks
from coatcheck.messages.cost import BoundedCache, Cost, Tally
from coatcheck.messages.formats import ToolResult, text_paths
from coatcheck.messages.paths import Path, at, replaced
from coatcheck.refs import Ref
from coatcheck.transcript.prune import Pruned, counted_by, prune

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Conversation", "SentMessages"]

_NO_COSTS: Final[Mapping[int, Cost]] = MappingProxyType({})
_CACHED: Final = 16_384


@dataclass(frozen=True, slots=True)
class SentMessages:
    """Messages as they are sent, with their costs and the refs of externalized results. `pruned` is the newest pruning
    step that applies."""

    messages: list[Message]
    costs: list[Cost]
    refs: tuple[Ref, ...] = ()
    pruned: Pruned | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A pruning step: the digests of its input, the room it had, and its result.

    `left` are the messages without breakpoints, each with the index of the message it was made from; a note about
    folded messages has None. `costs` are the costs of the messages as sent."""

    digests: tuple[bytes, ...]
    room: int
    left: tuple[tuple[Message, int | None], ...]
    costs: tuple[Cost, ...]
    pruned: Pruned


class Conversation:
    """The conversation of one session with one provider, with its newest pruning step."""

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
    ) -> None:
        self._session = session
        self._dialect = dialect
        self._tally = tally
        self._policy = policy
        self._keep_turns = keep_turns
        self._read_tool = read_tool
        self._redact = redact
        self._step: _Step | None = None
        self._changes: list[str] = []
        self._parts: BoundedCache[bytes, tuple[dict[str, str], tuple[ToolResult, ...]]] = BoundedCache(_CACHED)
        self._replacements: BoundedCache[tuple[bytes, str], list[tuple[Path, Outcome]]] = BoundedCache(_CACHED)

    def fitted(self, messages: Sequence[Message], costs: Sequence[Cost | None], room: int) -> SentMessages:
        """Return the messages within `room` tokens. Raises `LimitExceeded` if they do not fit or cannot be counted."""
        known = {id(one): cost for one, cost in zip(messages, costs, strict=True) if cost is not None}
        paired = list(self._dialect.mended(messages))
        whole = self._costs(paired, known)
        done = self._externalized(paired, whole)
        known.update(zip(map(id, paired), whole, strict=True))
        slim = [message for message, _ in done]
        left = self._costs(slim, known)
        if sum(one.tokens for one in left) <= room:
            sent = SentMessages(slim, left)
        else:
            sent = self._grown(slim, left, room) or self._pruned(slim, left, room)
        return replace(sent, refs=tuple(ref for _, refs in done for ref in refs))

    def take_changes(self) -> tuple[str, ...]:
        """Return and clear the list of changes made to the messages, one line each."""
        found, self._changes = tuple(self._changes), []
        return found

    def _pruned(self, slim: list[Message], costs: list[Cost], room: int) -> SentMessages:
        done = prune(
            [without_marks(one) for one in slim],
            max_tokens=max(1, room),
            format=self._dialect.format,
            keep_turns=self._keep_turns,
            session=self._session,
            count=self._tally.tokens,  # type: ignore[arg-type]
            read_tool=self._read_tool,
            redact=self._redact,
        )
        left = tuple(zip(done.messages, _origins(done, len(slim)), strict=True))
        messages = self._alternating(left, slim)
        sent = SentMessages(messages, self._costs(messages), pruned=done)
        failures = (f"an old result could not be stored: {one}" for one in done.failures)
        self._changes += [*done.steps, *failures]
        self._step = _Step(tuple(one.digest for one in costs), room, left, tuple(sent.costs), done)
        return sent

    def _grown(self, slim: list[Message], costs: list[Cost], room: int) -> SentMessages | None:
        """Append the messages since the newest step to its result; None if that step does not apply to them."""
        step = self._step
        if step is None or step.room != room or len(slim) < len(step.digests):
            return None
        if any(one.digest != old for one, old in zip(costs, step.digests, strict=False)):
            return None
        since, new = slim[len(step.digests) :], costs[len(step.digests) :]
        if counted_by(step.pruned) + sum(one.tokens for one in new) > room:
            return None
        origins = range(len(step.digests), len(slim))
        messages = self._alternating([*step.left, *zip(since, origins, strict=True)], slim)
        if not self._are_paired(messages, since):
            return None
        added = [*step.costs, *new]
        return SentMessages(
            messages, added if len(messages) == len(added) else self._costs(messages), pruned=step.pruned
        )

    def _are_paired(self, messages: list[Message], since: list[Message]) -> bool:
        """Whether the calls of all results in `since` are still present."""
        known = self._dialect.format
        wanted = {result.call_id for message in since for result in known.results(message)}
        return wanted <= {call.id for message in messages for call in known.calls(message)}

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

    def _externalized(
        self, messages: Sequence[Message], costs: Sequence[Cost]
    ) -> list[tuple[Message, tuple[Ref, ...]]]:
        """Return the messages with stubs in place of results that the policy finds too large, and their refs. Messages
        without such results are returned as the same objects."""
        if self._policy is None:
            return [(message, ()) for message in messages]
        tools: dict[str, str] = {}
        done = []
        for message, cost in zip(messages, costs, strict=True):
            parts = self._parts.get(cost.digest)
            if parts is None:
                known = self._dialect.format
                calls = {call.id: call.name for call in known.calls(message)}
                parts = self._parts.keep(cost.digest, (calls, known.results(message)))
            tools.update(parts[0])
            done.append(
                self._replaced(message, cost.digest, parts[1], tools, self._policy) if parts[1] else (message, ())
            )
        return done

    def _replaced(
        self,
        message: Message,
        digest: bytes,
        results: Sequence[ToolResult],
        tools: Mapping[str, str],
        policy: Policy,
    ) -> tuple[Message, tuple[Ref, ...]]:
        names = [result.name or tools.get(result.call_id) for result in results]
        key = (digest, "\0".join(map(str, names)))
        found = self._replacements.get(key)
        if found is None:
            found = [
                (path, outcome)
                for result, name in zip(results, names, strict=True)
                for path in text_paths(message, result)
                if (outcome := self._outcome(at(message, path), name, result.call_id, policy)) is not None
            ]
            if all(outcome.failure is None for _, outcome in found):  # else the next prompt tries again
                self._replacements.keep(key, found)
        new = message
        for path, outcome in found:
            new = dict(replaced(new, path, with_marks_of(outcome.content, at(message, path))))
        return new, tuple(ref for _, outcome in found for ref in outcome.refs)

    def _outcome(self, content: Any, tool: str | None, call_id: str, policy: Policy) -> Outcome | None:
        """Externalize content without the host's breakpoints, which belong to the turn; None if it stays as it is."""
        plain = without_marks(content)
        if not isinstance(plain, str | list):
            return None
        outcome = self._session.externalize(plain, tool=tool, call_id=call_id or None, policy=policy)
        if outcome.content is plain:
            return None
        self._changes.append(_change(tool, content, outcome))
        return outcome


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
