"""One cut: a history made small enough, in stages from the least painful on. What `prune` repeats over a conversation.

A cut is a pure function of the messages up to a point. A stage works from the oldest message on and stops as soon as
the target is met; the next begins only where it was not: results become placeholders, then arguments of calls and
pictures, then thinking goes. Where all that gained less than half of the room that was wanted, whole turns are folded
into one note, and where even that does not fit, fewer of the newest turns are kept. What each stage saves is summed up
once, so that a cut costs little however often the budget is exceeded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from coatcheck.tokens import TokenCounter
from coatcheck.transcript import shapes
from coatcheck.transcript.fold import Fold, room_for_note
from coatcheck.transcript.formats import Format, Message, at
from coatcheck.transcript.placeholders import Placeholder, Placeholders
from coatcheck.transcript.turns import pair, side, turns
from coatcheck.transcript.weight import weigh

What = Literal["result", "arguments", "thinking", "media", "turns"]
_STAGES: Final[tuple[tuple[What, str], ...]] = (
    ("result", "{} messages: results became placeholders"),
    ("arguments", "{} messages: arguments of calls became placeholders"),
    ("media", "{} messages: pictures and documents became placeholders"),
    ("thinking", "{} messages: thinking left"),
)
_LEAST_SAVED: Final = 16  # tokens that a replacement must save
_SMALL_ARGUMENTS: Final = 600  # characters of arguments that are left alone
_TASK: Final = 8  # the first message of the user stays where it takes no more than this part of the budget


@dataclass(frozen=True, slots=True)
class Variant:
    """A message with payloads replaced: what it costs then, and each placeholder with how to write it in."""

    message: Message
    tokens: int
    what: What
    parts: tuple[tuple[Placeholder, str, shapes.Write], ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of the first `length` messages: up to which number each stage was applied, and a fold."""

    length: int
    tokens: int
    reached: tuple[int, ...]
    fold: Fold | None = None
    steps: tuple[str, ...] = ()


class Cutter:
    """Cuts of one history. Nothing is stored here."""

    def __init__(
        self,
        messages: Sequence[Message],
        known: Format,
        *,
        placeholders: Placeholders,
        count: TokenCounter,
        max_tokens: int,
        target: int,
        keep_turns: int,
    ) -> None:
        self._messages = messages
        self._known = known
        self._placeholders = placeholders
        self._count = count
        self._max = max_tokens
        self._target = target
        self._crowded = (max_tokens + target) // 2
        self._keep_turns = keep_turns
        self.tokens = [weigh(one, count) for one in messages]
        self._total = _sums(self.tokens)
        self.pairing = pair(messages, known)
        self.sides = [side(one, known) for one in messages]
        self.results = [known.results(one) for one in messages]
        self.starts = turns(self.sides)
        self._lead = self.starts[0] if self.starts else len(messages)
        links = ((self._turn_of(asked), self._turn_of(at)) for (at, _), (asked, _) in self.pairing.call_of.items())
        self._links = sorted({(one, other) for one, other in links if one != other})
        self._users = [number for number, one in enumerate(self.sides) if one == "user"]
        self._variants: list[list[Variant | None]] = [[] for _ in _STAGES]
        self._saved = [[0] for _ in _STAGES]
        self._spared: set[int] = {at for at, found in enumerate(self.results) if any(one.is_error for one in found)}
        self._room = (
            room_for_note(known, messages[0], max_tokens, read_tool=placeholders.read_tool, count=count)
            if messages
            else 0
        )

    def variants(self, cut: Cut, number: int) -> Iterator[Variant]:
        """What the stages of a cut made of one message, in their order."""
        for stage, reached in enumerate(cut.reached):
            found = self._variants[stage][number] if number < reached else None
            if found is not None:
                yield found

    def cut(self, length: int) -> Cut:
        """The first `length` messages within the budget, or as near to it as can be."""
        starts = self.starts[: bisect_left(self.starts, length)]
        best: Cut | None = None
        for keep in range(self._keep_turns, min(self._keep_turns, 1) - 1, -1):
            if best is not None and keep >= len(starts):
                continue  # as many turns as there are: the same cut again
            found = self._attempt(length, starts, keep)
            if best is None or found.tokens < best.tokens:
                best = found
            if best.tokens <= self._max:
                break
        assert best is not None
        return best

    def _attempt(self, length: int, starts: list[int], keep: int) -> Cut:
        lead = min(self._lead, length)
        old = length if not keep else starts[-keep] if keep <= len(starts) else lead
        total, reached, steps = self._total[length], [0] * len(_STAGES), []
        if keep < self._keep_turns and keep < len(starts):
            steps.append(f"kept only the newest {keep} of {self._keep_turns} turns")
        for stage, (what, said) in enumerate(_STAGES):
            if total <= self._target:
                break
            end = min(old, self._last_user(length) + 1) if what == "thinking" else old
            self._reach(stage, end)
            saved = self._saved[stage]
            # What must be saved may be met half-way: then the messages behind that stay as they are.
            reached[stage] = min(end, bisect_left(saved, total - self._target, 0, end + 1)) if end else 0
            total -= saved[reached[stage]]
            changed = sum(1 for one in self._variants[stage][: reached[stage]] if one is not None)
            if changed:
                steps.append(said.format(changed))
        cut = Cut(length, total, tuple(reached), None, tuple(steps))
        return self._folded(cut, starts, old) if total > self._crowded else cut

    def _last_user(self, length: int) -> int:
        """The last message of the user before a point: what the model thought since must be sent back."""
        at = bisect_left(self._users, length)
        return self._users[at - 1] if at else -1

    def _reach(self, stage: int, end: int) -> None:
        """Make the variants of a stage up to a number. Each begins with what the stages before made of the message."""
        made, saved = self._variants[stage], self._saved[stage]
        for number in range(len(made), end):
            message, tokens = self._messages[number], self.tokens[number]
            for earlier in self._variants[:stage]:
                before = earlier[number] if number < len(earlier) else None
                if before is not None:
                    message, tokens = before.message, before.tokens
            found = self._make(message, number, _STAGES[stage][0]) if number >= self._lead else None
            if found is not None and tokens - found.tokens < _LEAST_SAVED:
                found = None
            made.append(found)
            saved.append(saved[-1] + (tokens - found.tokens if found is not None else 0))

    def _make(self, message: Message, number: int, what: What) -> Variant | None:
        if what == "result":
            return self._results(message, number)
        if what == "arguments":
            return self._arguments(message)
        if what == "media":
            return self._media(message)
        bare = shapes.without_thinking(self._known, message)
        return None if bare is None else Variant(bare, weigh(bare, self._count), "thinking")

    def _results(self, message: Message, number: int) -> Variant | None:
        parts = []
        for place, result in enumerate(self.results[number]):
            if result.is_error or not shapes.is_replaceable(message, result):
                continue
            call = self.pairing.call_of.get((number, place))
            tool = result.name or (call[1].name if call else None)
            content = at(message, result.content_path)
            made = self._placeholders.of(content, "an older result", tool=tool, call_id=result.call_id)
            if made is None or made.pinned:
                if made is not None:
                    self._spared.add(number)
                continue
            parts.append((made, result.call_id, shapes.result_writer(self._known, place)))
        return self._written(message, "result", parts)

    def _arguments(self, message: Message) -> Variant | None:
        parts = []
        for place, call in enumerate(self._known.calls(message)):
            found = shapes.arguments(message, call)
            if found is None or len(shapes.dumped(found[1])) <= _SMALL_ARGUMENTS:
                continue
            made = self._placeholders.of(found[1], "older arguments", tool=call.name, call_id=call.id)
            if made is not None and not made.pinned:
                parts.append((made, call.id, shapes.argument_writer(self._known, place)))
        return self._written(message, "arguments", parts)

    def _media(self, message: Message) -> Variant | None:
        parts = []
        for path, carried in shapes.pictures(message):
            made = self._placeholders.of(carried.value, "an older attachment", tool=None, call_id=None)
            if made is not None and not made.pinned:
                parts.append((made, "", shapes.picture_writer(path)))
        return self._written(message, "media", parts)

    def _written(
        self,
        message: Message,
        what: What,
        parts: list[tuple[Placeholder, str, shapes.Write]],
    ) -> Variant | None:
        if not parts:
            return None
        variant = Variant(message, 0, what, tuple(parts))
        done = written(variant, message, self._placeholders.read_tool)
        return replace(variant, message=done, tokens=weigh(done, self._count))

    def _folded(self, cut: Cut, starts: list[int], old: int) -> Cut:
        """A cut with whole turns of the oldest ones in a note. Those with errors or pinned artifacts go only if they
        must."""
        if not starts or not self._room:
            return cut
        first = starts[0]
        task = first if self.sides[first] == "user" and self.tokens[first] * _TASK <= self._max else -1
        gone: list[int] = []
        spared: list[list[int]] = []
        count, total = 0, cut.tokens + self._room
        for forced in (False, True):
            if forced and total <= self._max:
                break
            for group in spared if forced else self._groups(starts, cut.length, old):
                if total <= self._target:
                    break
                if not forced and not self._spared.isdisjoint(group):
                    spared.append(group)
                    continue
                chosen = [number for number in group if number != task and self.sides[number] != "system"]
                total -= sum(self._cost(cut, number) for number in chosen)
                gone += chosen
                count += 1
        if not gone or total >= cut.tokens:
            return cut
        said = f"{len(gone)} messages of {count} turns were folded into a note"
        fold = Fold(tuple(sorted(gone)), self._room)
        return replace(cut, fold=fold, tokens=total, steps=(*cut.steps, said))

    def _groups(self, starts: list[int], length: int, old: int) -> Iterator[list[int]]:
        """The messages of old turns, the oldest turn first, together with those of turns that calls tie to it. What is
        tied to a turn that stays is left out."""
        ends = [*starts[1:], length]
        group_of = list(range(len(starts)))
        for one, other in self._links:
            if other < len(starts):
                low, high = sorted((group_of[one], group_of[other]))
                group_of = [low if each == high else each for each in group_of]
        groups: dict[int, list[int]] = {}
        for turn, group in enumerate(group_of):
            groups.setdefault(group, []).append(turn)
        for members in groups.values():
            if ends[members[-1]] <= old:
                yield [number for turn in members for number in range(starts[turn], ends[turn])]

    def _turn_of(self, number: int) -> int:
        return bisect_right(self.starts, number) - 1

    def _cost(self, cut: Cut, number: int) -> int:
        tokens = self.tokens[number]
        for variant in self.variants(cut, number):
            tokens = variant.tokens
        return tokens


def _sums(numbers: Sequence[int]) -> list[int]:
    sums = [0]
    for one in numbers:
        sums.append(sums[-1] + one)
    return sums


def written(variant: Variant, message: Message, read_tool: str | None) -> Message:
    """A message with the placeholders of a variant written in."""
    for made, _, write in variant.parts:
        message = write(message, made.text(read_tool))
    return message
