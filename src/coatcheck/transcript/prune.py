"""Pruning: a conversation within a token budget, in rare large steps.

What was sent once stays as it is until the budget is exceeded; then one step cuts down to a low-water mark, so that the
turns after it only append. Nothing is remembered between calls: the steps are found again from the messages alone, at
the same places for every longer history, so the answers for a growing conversation begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.externalize.policy import READ_TOOL
from coatcheck.ids import clip
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.cuts import Cut, Cutter, Variant, What, written
from coatcheck.transcript.fold import note_of
from coatcheck.transcript.formats import FORMATS, PLAIN, Format, Message, detect
from coatcheck.transcript.placeholders import Placeholders
from coatcheck.transcript.weight import weigh

LOW_WATER = 0.3


@dataclass(frozen=True, slots=True)
class Prefix:
    """How much of the beginning stayed: so many messages, so many tokens."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """One thing that left the prompt: which message (by its number in what was given), what of it, and where it is kept
    (None where nothing was stored)."""

    message: int
    what: What
    call_id: str
    pointer: str | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """Messages within the budget, and what it took.

    `unchanged_prefix` is what begins exactly like the messages given. `stable_prefix` is what begins like the answer
    before the newest turn: what a provider's cache still holds; `rewritten` says that this is less than all of it.
    `failures` are results that could not be stored, and why."""

    messages: list[Message]
    tokens_before: int
    tokens_after: int
    unchanged_prefix: Prefix
    stable_prefix: Prefix
    rewritten: bool = False
    replaced: tuple[Replaced, ...] = ()
    steps: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def saved(self) -> int:
        return self.tokens_before - self.tokens_after


def prune(
    messages: Sequence[Message],
    *,
    max_tokens: int,
    format: Format | str | None = None,  # noqa: A002 - what users call it
    keep_turns: int = 3,
    pinned: Iterable[Ref | str] | None = None,
    session: Session | None = None,
    low_water: float = LOW_WATER,
    count: TokenCounter = estimate,
    read_tool: str | None = READ_TOOL,
) -> Pruned:
    """The messages within `max_tokens`: old tool results become one-line placeholders with their pointer.

    The newest `keep_turns` turns, errors, and `pinned` artifacts (those pinned in the session where none are named)
    stay, and calls stay paired with their results. Results that were inline are put in the `session` first; without one
    the placeholder says that nothing is stored. Where that is not enough, `steps` says what else was done. A step cuts
    down to `low_water` of the budget where it can.

    Deterministic; the messages given are not changed. Raises `LimitExceeded` where they cannot be made to fit, or
    cannot be counted."""
    _check(max_tokens, keep_turns, low_water)
    known = format_of(messages, format)
    placeholders = Placeholders(session, pinned, read_tool)
    cutter = Cutter(
        messages,
        known,
        placeholders=placeholders,
        count=count,
        max_tokens=max_tokens,
        target=int(max_tokens * low_water),
        keep_turns=keep_turns,
    )
    newest = cutter.starts[-1] if cutter.starts else 0
    cut, before, total = _steps(cutter, len(messages), max_tokens, newest)
    if total > max_tokens:
        raise LimitExceeded(
            f"the messages need {total:,} tokens at least; the budget is {max_tokens:,}",
            hint="externalize results before they are sent, keep fewer turns, or raise the budget",
        )
    final = _Rendering(messages, cutter, cut, placeholders, known, count)
    was = None
    if before is not cut:
        was = _Rendering(messages[:newest], cutter, before, placeholders, known, count, store=False)
    return final.pruned(cutter.tokens, newest, was, max_tokens)


def format_of(messages: Sequence[Message], named: Format | str | None) -> Format:
    """The format that was named, or the one that these messages have."""
    if isinstance(named, Format):
        return named
    if named is None:
        return detect(messages) or PLAIN
    if named not in FORMATS:
        raise InvalidArgument(f"no format is called {clip(named)}", hint="one of: " + ", ".join(FORMATS))
    return FORMATS[named]


def _check(max_tokens: object, keep_turns: object, low_water: object) -> None:
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {clip(str(max_tokens))}", hint="a whole number from 1 on")
    if not isinstance(keep_turns, int) or isinstance(keep_turns, bool) or keep_turns < 0:
        raise InvalidArgument(f"keep_turns is {clip(str(keep_turns))}", hint="a whole number, 0 for none")
    if not isinstance(low_water, int | float) or not 0 < low_water <= 1:
        raise InvalidArgument(f"low_water is {clip(str(low_water))}", hint="a part of the budget: above 0, at most 1")


def _steps(cutter: Cutter, length: int, max_tokens: int, newest: int) -> tuple[Cut | None, Cut | None, int]:
    """Go through the history as it grew, message by message, and cut wherever it exceeded the budget. The cut that
    holds in the end, the one that held before the newest turn, and what it all costs.

    Where no cut was enough there was no answer, and the next message is a new try."""
    cut: Cut | None = None
    before: Cut | None = None
    total = 0
    for number in range(length):
        if number == newest:
            before = cut
        total += cutter.tokens[number]
        if total > max_tokens or (cut is not None and cut.fold is not None and _is_late(cutter, cut, number)):
            cut = cutter.cut(number + 1)
            total = cut.tokens
    return cut, before, total


def _is_late(cutter: Cutter, cut: Cut, number: int) -> bool:
    """Whether a message answers a call that was folded away before."""
    assert cut.fold is not None
    places = range(len(cutter.results[number]))
    asked = {found[0] for place in places if (found := cutter.pairing.call_of.get((number, place)))}
    return bool(asked.intersection(cut.fold.numbers))


class _Rendering:
    """A cut, written out over the messages that it is of. What it points at is stored, unless it is only to compare."""

    def __init__(
        self,
        messages: Sequence[Message],
        cutter: Cutter,
        cut: Cut | None,
        placeholders: Placeholders,
        known: Format,
        count: TokenCounter,
        *,
        store: bool = True,
    ) -> None:
        self._store = store
        self._given = messages
        self._cutter = cutter
        self._known = known
        self._cut = cut
        self._placeholders = placeholders
        self._count = count
        self.messages: list[Message] = []
        self.origin: list[int | None] = []
        self.replaced: list[Replaced] = []
        self._write()

    def _write(self) -> None:
        fold = self._cut.fold if self._cut else None
        gone = frozenset(fold.numbers) if fold else frozenset()
        for number, message in enumerate(self._given):
            if fold is not None and number == fold.numbers[0]:
                note, pointer = note_of(
                    fold,
                    self._given,
                    self._known,
                    placeholders=self._placeholders,
                    count=self._count,
                    store=self._store,
                )
                self._add(note, None)
                self.replaced += [Replaced(one, "turns", "", pointer) for one in fold.numbers]
            if number in gone:
                continue
            done = message
            for variant in self._cutter.variants(self._cut, number) if self._cut else ():
                done = self._written(variant, done, number)
            self._add(done, number)

    def _add(self, message: Message, origin: int | None) -> None:
        self.messages.append(message)
        self.origin.append(origin)

    def _written(self, variant: Variant, message: Message, number: int) -> Message:
        if not variant.parts:
            self.replaced.append(Replaced(number, variant.what, "", None))
            return variant.message
        if not self._store:
            return written(variant, message, self._placeholders.read_tool)
        stored = tuple((self._placeholders.put(made), call_id, write) for made, call_id, write in variant.parts)
        self.replaced += [Replaced(number, variant.what, call_id, made.pointer) for made, call_id, _ in stored]
        return written(replace(variant, parts=stored), message, self._placeholders.read_tool)

    def pruned(self, costs: Sequence[int], newest: int, was: _Rendering | None, max_tokens: int) -> Pruned:
        tokens = [
            costs[at] if at is not None and done is self._given[at] else weigh(done, self._count)
            for done, at in zip(self.messages, self.origin, strict=True)
        ]
        if sum(tokens) > max_tokens:  # the store failed, or gave longer pointers
            raise LimitExceeded(
                f"the messages need {sum(tokens):,} tokens; the budget is {max_tokens:,}", hint="raise the budget"
            )
        same = 0
        while same < len(self.messages) and self.messages[same] is self._given[same]:
            same += 1
        earlier = (
            was.messages
            if was is not None
            else [one for one, at in zip(self.messages, self.origin, strict=True) if at is None or at < newest]
        )
        stable = 0
        while stable < min(len(earlier), len(self.messages)) and earlier[stable] == self.messages[stable]:
            stable += 1
        return Pruned(
            messages=self.messages,
            tokens_before=sum(costs),
            tokens_after=sum(tokens),
            unchanged_prefix=Prefix(same, sum(tokens[:same])),
            stable_prefix=Prefix(stable, sum(tokens[:stable])),
            rewritten=stable < len(earlier),
            replaced=tuple(self.replaced),
            steps=self._cut.steps if self._cut else (),
            failures=tuple(self._placeholders.failures),
        )
