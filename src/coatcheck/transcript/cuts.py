"""One cut: a history made small enough, in stages from the least painful on. What `prune` repeats over a conversation.

A cut is a pure function of the messages up to a point. Stages work from the oldest message on and stop as soon as the
target is met: results become placeholders, then arguments of calls, thinking and pictures go, then whole turns are
folded into one note, and last fewer of the newest turns are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from coatcheck.tokens import TokenCounter
from coatcheck.transcript import shapes
from coatcheck.transcript.fold import Fold, room_for_note
from coatcheck.transcript.formats import Format, Message
from coatcheck.transcript.placeholders import Placeholder, Placeholders
from coatcheck.transcript.turns import begins, pair, side
from coatcheck.transcript.weight import weigh

What = Literal["result", "arguments", "thinking", "media", "turns"]
_LEAST_SAVED: Final = 16  # tokens that a replacement must save
_SMALL_ARGUMENTS: Final = 600  # characters of arguments that are left alone
_TASK: Final = 8  # the first message of the user stays where it takes no more than this part of the budget


@dataclass(frozen=True, slots=True)
class Variant:
    """A message with payloads replaced: what it costs then, and each placeholder with how to write it in."""

    message: Message
    tokens: int
    what: What
    parts: tuple[tuple[Placeholder, str, Callable[[Message, str], Message]], ...] = ()


@dataclass(slots=True)
class Cut:
    """What becomes of the first `length` messages: variants by number, and a fold."""

    length: int
    tokens: int
    variants: dict[int, tuple[Variant, ...]] = field(default_factory=dict)
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
        self._keep_turns = keep_turns
        self.tokens = [weigh(one, count) for one in messages]
        self.pairing = pair(messages, known)
        self.sides = [side(one, known) for one in messages]
        self._made: dict[tuple[int, str], Variant | None] = {}
        self.results = [known.results(one) for one in messages]
        self._errors = {number for number, found in enumerate(self.results) if any(one.is_error for one in found)}
        self._pinned: set[int] = set()
        self._room = (
            room_for_note(known, messages[0], max_tokens, read_tool=placeholders.read_tool, count=count)
            if messages
            else 0
        )

    def cut(self, length: int) -> Cut:
        """The first `length` messages within the budget, or as near to it as can be."""
        starts = begins(self.sides, self.pairing, length)
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
        lead = starts[0] if starts else length
        old = length if not keep else starts[-keep] if keep <= len(starts) else lead
        cut = Cut(length, sum(self.tokens[:length]))
        steps: list[str] = []
        if keep < self._keep_turns and keep < len(starts):
            steps.append(f"kept only the newest {keep} of {self._keep_turns} turns")
        for what, said in (
            ("result", "{} results became placeholders"),
            ("arguments", "arguments of calls in {} messages became placeholders"),
            ("thinking", "thinking left {} messages"),
            ("media", "pictures and documents in {} messages became placeholders"),
        ):
            changed = self._stage(cut, what, range(lead, old))
            if changed:
                steps.append(said.format(changed))
        if cut.tokens > self._target:
            self._fold(cut, starts, old, steps)
        cut.steps = tuple(steps)
        return cut

    def _stage(self, cut: Cut, what: str, where: range) -> int:
        changed = 0
        last_user = max((at for at in range(cut.length) if self.sides[at] == "user"), default=0)
        for number in where:
            if cut.tokens <= self._target:
                break
            if what == "thinking" and number > last_user:
                break  # what belongs to the answer that is under way must be sent back
            variant = self._variant(number, what)
            if variant is None:
                continue
            before = cut.variants.get(number, ())
            tokens = before[-1].tokens if before else self.tokens[number]
            if before:
                variant = self._after(before, number, what)
                if variant is None or tokens - variant.tokens < _LEAST_SAVED:
                    continue
            cut.variants[number] = (*before, variant)
            cut.tokens -= tokens - variant.tokens
            changed += len(variant.parts) if what == "result" else 1
        return changed

    def _variant(self, number: int, what: str) -> Variant | None:
        key = (number, what)
        if key not in self._made:
            found = self._make(self._messages[number], number, what)
            if found is not None and self.tokens[number] - found.tokens < _LEAST_SAVED:
                found = None
            self._made[key] = found
        return self._made[key]

    def _after(self, before: tuple[Variant, ...], number: int, what: str) -> Variant | None:
        key = (number, "+".join([*(one.what for one in before), what]))
        if key not in self._made:
            self._made[key] = self._make(before[-1].message, number, what)
        return self._made[key]

    def _make(self, message: Message, number: int, what: str) -> Variant | None:
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
            content = shapes.at(message, result.content_path)
            made = self._placeholders.of(content, "an older result", tool=tool, call_id=result.call_id)
            if made is None or made.pinned:
                if made is not None:
                    self._pinned.add(number)
                continue
            parts.append((made, result.call_id, _result_writer(self._known, place)))
        return self._written(message, "result", parts)

    def _arguments(self, message: Message) -> Variant | None:
        parts = []
        for place, call in enumerate(self._known.calls(message)):
            found = shapes.arguments(message, call)
            if found is None or len(shapes.dumped(found[1])) <= _SMALL_ARGUMENTS:
                continue
            made = self._placeholders.of(found[1], "older arguments", tool=call.name, call_id=call.id)
            if made is not None and not made.pinned:
                parts.append((made, call.id, _argument_writer(self._known, place)))
        return self._written(message, "arguments", parts)

    def _media(self, message: Message) -> Variant | None:
        parts = []
        for path, carried in shapes.pictures(message):
            made = self._placeholders.of(carried.value, "an older attachment", tool=None, call_id=None)
            if made is not None and not made.pinned:
                parts.append((made, "", _media_writer(path)))
        return self._written(message, "media", parts)

    def _written(
        self,
        message: Message,
        what: What,
        parts: list[tuple[Placeholder, str, Callable[[Message, str], Message]]],
    ) -> Variant | None:
        if not parts:
            return None
        variant = Variant(message, 0, what, tuple(parts))
        done = written(variant, message, self._placeholders.read_tool)
        return replace(variant, message=done, tokens=weigh(done, self._count))

    def _fold(self, cut: Cut, starts: list[int], old: int, steps: list[str]) -> None:
        """Put whole turns of the oldest ones into a note. Those with errors or pinned artifacts go only if they must."""
        ranges = [
            range(start, stop) for start, stop in zip(starts, [*starts[1:], cut.length], strict=True) if stop <= old
        ]
        if not ranges or not self._room:
            return
        first = ranges[0].start
        kept = {first} if self.sides[first] == "user" and self.tokens[first] * _TASK <= self._max else set()
        gone: list[int] = []
        spared: list[range] = []
        total = cut.tokens + self._room
        for forced in (False, True):
            if forced and total <= self._max:
                break
            for turn in ranges if not forced else spared:
                if total <= self._target:
                    break
                if not forced and any(number in self._errors or number in self._pinned for number in turn):
                    spared.append(turn)
                    continue
                chosen = [number for number in turn if number not in kept]
                total -= sum(self._cost(cut, number) for number in chosen)
                gone += chosen
        if not gone or total >= cut.tokens:
            return
        cut.fold = Fold(tuple(sorted(gone)), self._room)
        cut.tokens = total
        for number in gone:
            cut.variants.pop(number, None)
        left = set(gone)
        count = sum(1 for turn in ranges if not left.isdisjoint(turn))
        steps.append(f"{len(gone)} messages of the oldest {count} turns were folded into a note")

    def _cost(self, cut: Cut, number: int) -> int:
        variants = cut.variants.get(number)
        return variants[-1].tokens if variants else self.tokens[number]


def written(variant: Variant, message: Message, read_tool: str | None) -> Message:
    """A message with the placeholders of a variant written in."""
    for made, _, write in variant.parts:
        message = write(message, made.text(read_tool))
    return message


def _result_writer(known: Format, place: int) -> Callable[[Message, str], Message]:
    return lambda message, text: shapes.with_result(known, message, known.results(message)[place], text)


def _argument_writer(known: Format, place: int) -> Callable[[Message, str], Message]:
    def write(message: Message, text: str) -> Message:
        found = shapes.arguments(message, known.calls(message)[place])
        return message if found is None else shapes.with_arguments(message, found[0], text)

    return write


def _media_writer(path: shapes.Path) -> Callable[[Message, str], Message]:
    def write(message: Message, text: str) -> Message:
        carried = shapes.blocks.payload(shapes.at(message, path))
        return message if carried is None else dict(shapes.replaced(message, path, carried.replace(text)))

    return write
