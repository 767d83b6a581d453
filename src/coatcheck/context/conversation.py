"""The messages of a prompt: calls paired, large results out, and old ones pruned where all is more than there is room.

Between two steps of pruning a conversation only grows, so what a step made is kept and the new messages are put behind
it. That gives what pruning the whole history again would give, without going through it each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from coatcheck.context.cache_marks import bare, marked
from coatcheck.context.dialects import Dialect
from coatcheck.context.mending import mended
from coatcheck.context.slimming import Slimmer
from coatcheck.context.weights import Tally, Weighed
from coatcheck.errors import LimitExceeded
from coatcheck.externalize import Policy
from coatcheck.refs import Ref
from coatcheck.transcript.formats import Message
from coatcheck.transcript.prune import Pruned, prune

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Conversation", "Told"]

_NOTHING: Final[Mapping[int, Weighed]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Told:
    """Messages as they are sent, each with its cost, and what it took. `pruned` is the newest step of pruning that
    holds, `is_new` whether it was taken for this prompt."""

    messages: list[Message]
    costs: list[Weighed]
    refs: tuple[Ref, ...] = ()
    pruned: Pruned | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of pruning: the digests of the messages that it was made of, at how much room, and what it left.

    `left` are messages without a host's breakpoints, each with the number of the one that it was made of; a note of
    what was folded has none. `costs` are those of the messages as they are told."""

    of: tuple[bytes, ...]
    room: int
    left: tuple[tuple[Message, int | None], ...]
    costs: tuple[Weighed, ...]
    pruned: Pruned


class Conversation:
    """The conversation of one session with one provider. Holds the newest step of pruning."""

    def __init__(
        self,
        session: Session,
        dialect: Dialect,
        tally: Tally,
        *,
        policy: Policy | None,
        keep_turns: int,
        read_tool: str | None,
    ) -> None:
        self._session = session
        self._dialect = dialect
        self._tally = tally
        self._slimmer = Slimmer(session, policy, dialect.format)
        self._keep_turns = keep_turns
        self._read_tool = read_tool
        self._step: _Step | None = None

    def told(self, messages: Sequence[Message], costs: Sequence[Weighed | None], room: int) -> Told:
        """The messages, which cost so much, within so many tokens. Raises `LimitExceeded` where that cannot be, or
        cannot be counted."""
        known = {id(one): cost for one, cost in zip(messages, costs, strict=True) if cost is not None}
        paired = mended(messages, self._dialect.name)
        whole = self._weighed(paired, known)
        done = self._slimmer.slim(paired, [one.digest for one in whole])
        known.update(zip(map(id, paired), whole, strict=True))
        slim = [one.message for one in done]
        refs = tuple(ref for one in done for ref in one.refs)
        left = self._weighed(slim, known)
        if sum(one.tokens for one in left) <= room:
            return Told(slim, left, refs)
        grown = self._grown(slim, left, room)
        return self._pruned(slim, left, room, refs) if grown is None else replace(grown, refs=refs)

    def _pruned(self, slim: list[Message], costs: list[Weighed], room: int, refs: tuple[Ref, ...]) -> Told:
        done = prune(
            [bare(one) for one in slim],
            max_tokens=max(1, room),
            format=self._dialect.format,
            keep_turns=self._keep_turns,
            session=self._session,
            count=self._tally.tokens,  # type: ignore[arg-type]
            read_tool=self._read_tool,
        )
        left = tuple(zip(done.messages, _origins(done, len(slim)), strict=True))
        messages = self._alternating(left, slim)
        told = Told(messages, self._weighed(messages), refs, done, True)
        self._step = _Step(tuple(one.digest for one in costs), room, left, tuple(told.costs), done)
        return told

    def _grown(self, slim: list[Message], costs: list[Weighed], room: int) -> Told | None:
        """What the newest step left, with the messages since; None where that is no answer to these messages."""
        step = self._step
        if step is None or step.room != room or len(slim) < len(step.of):
            return None
        if any(one.digest != old for one, old in zip(costs, step.of, strict=False)):
            return None
        since, new = slim[len(step.of) :], costs[len(step.of) :]
        if sum(one.tokens for one in (*step.costs, *new)) > room:
            return None
        messages = [*self._alternating(step.left, slim), *since]
        if not self._are_paired(messages, since):
            return None
        return Told(messages, [*step.costs, *new], pruned=step.pruned)

    def _are_paired(self, messages: list[Message], since: list[Message]) -> bool:
        """Whether all that came since answers calls that are still there."""
        known = self._dialect.format
        wanted = {result.call_id for message in since for result in known.results(message)}
        return wanted <= {call.id for message in messages for call in known.calls(message)}

    def _alternating(self, left: Sequence[tuple[Message, int | None]], slim: list[Message]) -> list[Message]:
        """What a step left, with the breakpoints that the host has set in this turn. For Anthropic, messages of the
        user that pruning made neighbours are one. Those that a host left side by side stay so: the provider takes them
        as one, and the last may still get neighbours."""
        found: list[Message] = []
        last: int | None = None
        for message, origin in left:
            told = message if origin is None else _with_marks(message, slim[origin])
            were_neighbours = last is not None and origin == last + 1
            both = self._dialect.alternates and found and found[-1].get("role") == told.get("role") == "user"
            if both and not were_neighbours:
                found[-1] = self._dialect.joined(found[-1], told)
            else:
                found.append(told)
            last = origin
        return found

    def _weighed(self, messages: Sequence[Message], known: Mapping[int, Weighed] = _NOTHING) -> list[Weighed]:
        """What each costs; of the very objects that were weighed a moment ago, as it is known."""
        found = []
        for message in messages:
            one = known.get(id(message)) or self._tally.weighed(message)
            if one is None:
                raise LimitExceeded("the tokens of a message cannot be counted", hint="mend the counter")
            found.append(one)
        return found


def _origins(done: Pruned, length: int) -> list[int | None]:
    """For each message that pruning left, the number of the one that it was made of. A note, which is made of many,
    stands where the first of them stood."""
    folded = {one.message for one in done.replaced if one.what == "turns"}
    first = min(folded, default=None)
    return [None if number == first else number for number in range(length) if number == first or number not in folded]


def _with_marks(message: Message, now: Message) -> Message:
    """A message as it was left, with the marks that it has now; the same object as now where that is all."""
    if message is now or message == now:
        return now
    told: Message = marked(message, now) if bare(now) is not now else message
    return told
