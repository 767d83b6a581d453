"""The messages of a prompt: calls paired, large results out, and old ones pruned where all is more than there is room.

Between two steps of pruning a conversation only grows, so what a step made is kept and the new messages are put behind
it. That gives what pruning the whole history again would give, without going through it each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

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
    """A step of pruning: the digests of the messages that it was made of, at how much room, and what it left."""

    of: tuple[bytes, ...]
    room: int
    told: Told


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
            slim,
            max_tokens=max(1, room),
            format=self._dialect.format,
            keep_turns=self._keep_turns,
            session=self._session,
            count=self._tally.tokens,  # type: ignore[arg-type]
            read_tool=self._read_tool,
        )
        left = self._alternating(done.messages, slim)
        told = Told(left, self._weighed(left), refs, done, True)
        self._step = _Step(tuple(one.digest for one in costs), room, told)
        return told

    def _grown(self, slim: list[Message], costs: list[Weighed], room: int) -> Told | None:
        """What the newest step left, with the messages since; None where that is no answer to these messages."""
        step = self._step
        if step is None or step.room != room or len(slim) < len(step.of):
            return None
        if any(one.digest != old for one, old in zip(costs, step.of, strict=False)):
            return None
        since, new = slim[len(step.of) :], costs[len(step.of) :]
        messages = [*step.told.messages, *since]
        if sum(one.tokens for one in (*step.told.costs, *new)) > room or not self._are_paired(messages, since):
            return None
        return Told(messages, [*step.told.costs, *new], pruned=step.told.pruned)

    def _are_paired(self, messages: list[Message], since: list[Message]) -> bool:
        """Whether all that came since answers calls that are still there."""
        known = self._dialect.format
        wanted = {result.call_id for message in since for result in known.results(message)}
        return wanted <= {call.id for message in messages for call in known.calls(message)}

    def _alternating(self, messages: list[Message], slim: list[Message]) -> list[Message]:
        """For Anthropic, messages of the user that pruning made neighbours are one. Those that a host left side by side
        stay so: the provider takes them as one, and the last may still get neighbours."""
        if not self._dialect.alternates:
            return messages
        places = {id(one): number for number, one in enumerate(slim)}
        found: list[Message] = []
        last: int | None = None
        for message in messages:
            place = places.get(id(message))
            were_neighbours = last is not None and place == last + 1
            if found and found[-1].get("role") == message.get("role") == "user" and not were_neighbours:
                found[-1] = self._dialect.joined(found[-1], message)
            else:
                found.append(message)
            last = place
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
