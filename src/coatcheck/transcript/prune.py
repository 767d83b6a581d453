"""Prune a conversation to a token budget, in rare, large steps.

Messages stay as they are until the budget is exceeded; then one step cuts down to a low-water mark,
so that the turns after it only append. Nothing is remembered between calls: the steps are found
again from the messages alone, at the same points for every longer history, so the results for a
growing conversation begin alike.

A cut is a pure function of the messages up to a point. It works in stages, each beginning with the
oldest message: results become placeholders, then arguments of calls and attachments, then thinking
is removed. A stage begins only if the one before did not reach the target. If all of that gained
less than half of the wanted room, whole turns are folded into one note, and if even that is not
enough, fewer of the newest turns are kept. The savings of each stage are summed up once, so that a
cut is cheap however often the budget is exceeded.

A shorter form of a result that refers to one that is pruned says where that is stored.
"""

from __future__ import annotations

import json
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Final, Literal

from coatcheck.checks import one_of, share, whole
from coatcheck.errors import LimitExceeded
from coatcheck.externalize.policy import READ_TOOL
from coatcheck.externalize.shorter import ShownResult, repaired
from coatcheck.externalize.stub import STORED
from coatcheck.messages import PLAIN, Format, Message, detect, named_format
from coatcheck.messages.cache import StablePrefix
from coatcheck.messages.content import dumped, is_replaceable, plain_text
from coatcheck.messages.cost import weigh
from coatcheck.messages.pairing import pair, program_results, side, turns
from coatcheck.messages.paths import at
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.shrink import first_that_fits, halves
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.transcript.payloads import Payload, Write, arguments_in, attachments_in
from coatcheck.transcript.placeholders import OLD_RESULT, Placeholder, Placeholders, pointers_in

LOW_WATER: Final = 0.3
MIN_SAVED: Final = 16
What = Literal["result", "arguments", "thinking", "media", "turns"]
_STAGES: Final[tuple[tuple[What, str], ...]] = (
    ("result", "{} messages: results became placeholders"),
    ("arguments", "{} messages: arguments of calls became placeholders"),
    ("media", "{} messages: pictures and documents became placeholders"),
    ("thinking", "{} messages: thinking was removed"),
)
_TASK: Final = 8  # the first user message stays if it takes at most this part (1/8) of the budget
_MAX_LISTED: Final = 16  # artifacts that a note lists
_LONG_POINTER: Final = "art:" + "a7f3c9e1b5d2" + "8e4b6" * 4  # costs more tokens than real pointers
_NOTE_SHARE: Final = 16  # the part (1/16) of a budget that a note may take


@dataclass(frozen=True, slots=True)
class Replacement:
    """One payload that was replaced: the number of its message in the input, what it was, and its
    pointer (None if it was not stored)."""

    message: int
    what: What
    call_id: str
    pointer: str | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """Messages within the budget, and what was done.

    `unchanged_prefix` is how much is the same as in the input. `stable_prefix` is how much is the
    same as in the result before the newest turn, which a provider still has in its cache;
    `rewritten` is true if that is not all of it. `failures` are the errors of results that could
    not be stored."""

    messages: list[Message]
    tokens_before: int
    tokens_after: int
    unchanged_prefix: StablePrefix
    stable_prefix: StablePrefix
    rewritten: bool = False
    replaced: tuple[Replacement, ...] = ()
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
    redact: Literal["store"] | None = None,
    fold: bool = True,
    least_saved: int = MIN_SAVED,
) -> Pruned:
    """Make messages fit into `max_tokens`: old tool results become one-line placeholders with a
    pointer.

    The newest `keep_turns` turns, errors, `pinned` artifacts (by default those pinned in the
    session) and results of tools that are "never" in the store's settings stay, and calls stay
    paired with their results. Inline results are put in the `session` first; without a session the
    placeholder says that nothing is stored. `redact="store"`, here or in the store's settings,
    masks secrets before anything is put. If placeholders are not enough, more is replaced, and
    `steps` says what; turns are folded into a note only with `fold`. A step cuts down to
    `low_water` of the budget if possible. A replacement saves at least `least_saved` tokens.

    Session lines of pi, OpenClaw or Claude Code are returned as lines: only the messages in them
    are counted and pruned, and lines without a message stay.

    The result is deterministic, and the input is not changed. Raises `LimitExceeded` if the
    messages cannot be made to fit, or cannot be counted."""
    whole(max_tokens, "max_tokens", least=1)
    whole(keep_turns, "keep_turns")
    share(low_water, "low_water")
    one_of(redact, "redact", ("store",), optional=True)
    fmt = format_of(messages, format)
    inner = {
        number: found
        for number, one in enumerate(messages)
        if (found := fmt.inner(one)) is not None
    }
    are_lines = any(found is not messages[number] for number, found in inner.items())
    given = list(inner.values()) if are_lines else messages
    cutter = _Cutter(
        given,
        fmt,
        Placeholders(session, pinned, read_tool, redact),
        count=count,
        max_tokens=max_tokens,
        low_water=low_water,
        keep_turns=keep_turns,
        folds=fold,
        least_saved=least_saved,
    )
    done = cutter.pruned()
    return _in_lines(done, messages, inner, fmt) if are_lines else done


def format_of(messages: Sequence[Message], named: Format | str | None) -> Format:
    """Return the named format, or the one that these messages have."""
    return named_format(named) or detect(messages) or PLAIN


def _in_lines(
    done: Pruned, lines: Sequence[Message], inner: dict[int, Message], fmt: Format
) -> Pruned:
    """Apply the result for the messages in some lines to the lines."""
    numbers = list(inner)
    in_lines = tuple(replace(one, message=numbers[one.message]) for one in done.replaced)
    folded = {one.message for one in in_lines if one.what == "turns"}
    note_at = min(folded, default=None)
    messages = iter(done.messages)
    found: list[Message] = []
    places: list[int] = []  # of the lines that have a message
    for number, line in enumerate(lines):
        if number == note_at:
            places.append(len(found))
            found.append(fmt.wrapped(next(messages)))
        if number in folded:
            continue
        if number not in inner:
            found.append(line)
            continue
        places.append(len(found))
        found.append(_with_message(line, inner[number], next(messages)))
    stable = done.stable_prefix.messages
    stable_lines = places[stable] if stable < len(places) else len(found)
    unchanged = _shared(map(operator.is_, found, lines))
    return replace(
        done,
        messages=found,
        replaced=in_lines,
        unchanged_prefix=replace(done.unchanged_prefix, messages=unchanged),
        stable_prefix=replace(done.stable_prefix, messages=stable_lines),
    )


def _with_message(line: Message, before: Message, after: Message) -> Message:
    """Return a line with another message in place of its own. Some lines are the message itself."""
    if after is before:
        return line
    return after if before is line else {**line, "message": after}


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A payload's placeholder, and how to write it."""

    placeholder: Placeholder
    call_id: str
    write: Write


@dataclass(frozen=True, slots=True)
class _Variant:
    """A message with payloads replaced, its tokens, and the placeholders in it."""

    message: Message
    tokens: int
    what: What
    parts: tuple[_Replaced, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is done to the first `length` messages: the number up to which each stage is applied,
    and the numbers of the messages that are folded into a note."""

    length: int
    tokens: int
    reached: tuple[int, ...] = ()
    fold: tuple[int, ...] = ()
    steps: tuple[str, ...] = ()


@dataclass(slots=True)
class _Shown:
    """A message of a result, and its number in the input: None for a note."""

    message: Message
    number: int | None


@dataclass(slots=True)
class _Rendering:
    """A cut applied to its messages, and what was replaced."""

    shown: list[_Shown] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [one.message for one in self.shown]


@dataclass(slots=True)
class _Fold:
    """The messages that are folded into a note so far, their turns, and the tokens that remain."""

    tokens: int
    gone: list[int] = field(default_factory=list)
    turns: int = 0


class _Cutter:
    """Makes cuts of one history, and applies them."""

    def __init__(
        self,
        messages: Sequence[Message],
        fmt: Format,
        placeholders: Placeholders,
        *,
        count: TokenCounter,
        max_tokens: int,
        low_water: float,
        keep_turns: int,
        folds: bool,
        least_saved: int,
    ) -> None:
        self.messages, self.fmt, self.placeholders = messages, fmt, placeholders
        self.count, self.max_tokens = count, max_tokens
        self.keep_turns, self.folds, self.least_saved = keep_turns, folds, least_saved
        self._target = int(max_tokens * low_water)
        self._crowded = (max_tokens + self._target) // 2
        self._results = [fmt.results(one) for one in messages]
        self._for_program = program_results(messages, fmt)
        self._tokens = [self._weight(one, number) for number, one in enumerate(messages)]
        self._total = list(accumulate(self._tokens, initial=0))
        self._pairing = pair(messages, fmt)
        self._sides = [side(one, fmt) for one in messages]
        self._starts = turns(self._sides)
        self._lead = self._starts[0] if self._starts else len(messages)
        self._links = sorted(self._linked_turns())
        self._users = [number for number, one in enumerate(self._sides) if one == "user"]
        self._variants: list[list[_Variant | None]] = [[] for _ in _STAGES]
        self._saved = [[0] for _ in _STAGES]
        self._spared: set[int] = set()  # messages with errors or pinned artifacts
        for number, found in enumerate(self._results):
            if any(one.is_error for one in found):
                self._spared.add(number)
        self._room = self._room_for_note(messages[0]) if messages else 0

    def _weight(self, message: Message, number: int | None) -> int:
        """Count the tokens of a message, or of what was made of the message of this number. Results
        for a provider's program do not count, since they are not in the context."""
        for place, result in enumerate(() if number is None else self._results[number]):
            if (number, place) in self._for_program:
                message = self.fmt.with_content(message, result, "")
        return weigh(message, self.count)

    def _weight_of(self, shown: _Shown) -> int:
        number = shown.number
        if number is not None and shown.message is self.messages[number]:
            return self._tokens[number]
        return self._weight(shown.message, number)

    def pruned(self) -> Pruned:
        """Replay the history, and apply the last cut. Its payloads are stored."""
        newest = self._starts[-1] if self._starts else 0
        cut, before, total = self._steps(newest)
        if total > self.max_tokens:
            raise LimitExceeded(
                f"the messages need at least {total:,} tokens, the budget is {self.max_tokens:,}",
                hint="externalize results before they are sent, keep fewer turns, "
                "or raise the budget",
            )
        final = self._rendered(cut, len(self.messages), store=True)
        if before is cut:
            earlier = [
                one.message for one in final.shown if one.number is None or one.number < newest
            ]
        else:
            earlier = self._rendered(before, newest, store=False).messages
        tokens = [self._weight_of(one) for one in final.shown]
        if sum(tokens) > self.max_tokens:  # the store failed, or returned longer pointers
            raise LimitExceeded(
                f"the messages need {sum(tokens):,} tokens, the budget is {self.max_tokens:,}",
                hint="raise the budget",
            )
        messages = final.messages
        same = _shared(map(operator.is_, messages, self.messages))
        stable = _shared(map(operator.eq, messages, earlier))
        return Pruned(
            messages=messages,
            tokens_before=sum(self._tokens),
            tokens_after=sum(tokens),
            unchanged_prefix=StablePrefix(same, sum(tokens[:same])),
            stable_prefix=StablePrefix(stable, sum(tokens[:stable])),
            rewritten=stable < len(earlier),
            replaced=tuple(final.replaced),
            steps=cut.steps if cut else (),
            failures=tuple(self.placeholders.failures),
        )

    def _steps(self, newest: int) -> tuple[_Cut | None, _Cut | None, int]:
        """Replay the history message by message, and cut wherever it exceeded the budget. Return
        the last cut, the cut before the newest turn, and the total tokens.

        If no cut was enough at some point, the next message tries again."""
        cut: _Cut | None = None
        before: _Cut | None = None
        total = 0
        for number, tokens in enumerate(self._tokens):
            if number == newest:
                before = cut
            total += tokens
            is_late = cut is not None and self._is_late(cut, number)
            if total > self.max_tokens or is_late:
                cut = self._cut(number + 1)
                total = cut.tokens
        return cut, before, total

    def _is_late(self, cut: _Cut, number: int) -> bool:
        """Whether a message answers a call that was folded away."""
        for place in range(len(self._results[number])):
            asked = self._pairing.call_of.get((number, place))
            if asked is not None and asked[0] in cut.fold:
                return True
        return False

    def _variants_of(self, cut: _Cut | None, number: int) -> Iterator[_Variant]:
        """Yield what the stages of a cut made of one message, in order."""
        for stage, reached in enumerate(cut.reached if cut else ()):
            found = self._variants[stage][number] if number < reached else None
            if found is not None:
                yield found

    def _cut(self, length: int) -> _Cut:
        """Cut the first `length` messages to the budget, or as close to it as possible."""
        starts = self._starts[: bisect_left(self._starts, length)]
        best: _Cut | None = None
        for keep in range(self.keep_turns, min(self.keep_turns, 1) - 1, -1):
            if best is not None and keep >= len(starts):
                continue  # this keeps all turns: the same cut again
            found = self._attempt(length, starts, keep)
            if best is None or found.tokens < best.tokens:
                best = found
            if best.tokens <= self.max_tokens:
                break
        assert best is not None
        return best

    def _attempt(self, length: int, starts: list[int], keep: int) -> _Cut:
        """Cut the first `length` messages, except the newest `keep` turns, as far as wanted."""
        old = self._end_of_old(length, starts, keep)
        total, reached, steps = self._total[length], [0] * len(_STAGES), []
        if keep < self.keep_turns and keep < len(starts):
            steps.append(f"kept only the newest {keep} of {self.keep_turns} turns")
        for stage, (what, description) in enumerate(_STAGES):
            if total <= self._target:
                break
            end = min(old, self._last_user(length) + 1) if what == "thinking" else old
            self._reach(stage, end)
            saved = self._saved[stage]
            # Stop as soon as enough is saved: the messages after that stay as they are.
            enough = min(end, bisect_left(saved, total - self._target, 0, end + 1))
            total -= saved[enough]
            reached[stage] = enough
            changed = sum(one is not None for one in self._variants[stage][:enough])
            if changed:
                steps.append(description.format(changed))
        cut = _Cut(length, total, tuple(reached), (), tuple(steps))
        return self._folded(cut, starts, old) if self.folds and total > self._crowded else cut

    def _end_of_old(self, length: int, starts: list[int], keep: int) -> int:
        """Return where the newest `keep` turns begin."""
        if not keep:
            return length
        return starts[-keep] if keep <= len(starts) else min(self._lead, length)

    def _last_user(self, length: int) -> int:
        """The last user message before a point: thinking after it must be sent back."""
        at = bisect_left(self._users, length)
        return self._users[at - 1] if at else -1

    def _reach(self, stage: int, end: int) -> None:
        """Make the variants of a stage up to a number, each from what the stages before made of the
        message."""
        made, saved = self._variants[stage], self._saved[stage]
        for number in range(len(made), end):
            message, tokens = self._before_stage(stage, number)
            found = self._made(message, number, _STAGES[stage][0]) if number >= self._lead else None
            gain = tokens - found.tokens if found is not None else 0
            is_enough = gain >= self.least_saved
            made.append(found if is_enough else None)
            saved.append(saved[-1] + (gain if is_enough else 0))

    def _before_stage(self, stage: int, number: int) -> tuple[Message, int]:
        """Return what the stages before this one made of a message, and its tokens."""
        for earlier in reversed(self._variants[:stage]):
            found = earlier[number] if number < len(earlier) else None
            if found is not None:
                return found.message, found.tokens
        return self.messages[number], self._tokens[number]

    def _made(self, message: Message, number: int, what: What) -> _Variant | None:
        """Return what a stage makes of a message, or None if it changes nothing."""
        parts = []
        for one in self._payloads(message, number, what):
            made = self.placeholders.of(one.content, one.what, tool=one.tool, call_id=one.call_id)
            if made is None:
                continue
            stays = made.pinned or (what == "result" and self._is_never_replaced(one.tool))
            if not stays:
                parts.append(_Replaced(made, one.call_id, one.write))
            elif what == "result":
                self._spared.add(number)
        done = self.fmt.without_thinking(message) if what == "thinking" else None
        if parts:
            done = self._with_placeholders(message, parts)
        if done is None:
            return None
        return _Variant(done, self._weight(done, number), what, tuple(parts))

    def _is_never_replaced(self, tool: str | None) -> bool:
        return self.placeholders.policy.tools.get(tool or "") == "never"

    def _payloads(self, message: Message, number: int, what: What) -> Iterator[Payload]:
        """Yield the payloads that a stage replaces."""
        if what == "result":
            yield from self._old_results(message, number)
        elif what == "arguments":
            yield from arguments_in(message, self.fmt)
        elif what == "media":
            yield from attachments_in(message)

    def _old_results(self, message: Message, number: int) -> Iterator[Payload]:
        for place, result in enumerate(self._results[number]):
            if result.is_error or (number, place) in self._for_program:
                continue
            if not is_replaceable(message, result):
                continue
            asked = self._pairing.call_of.get((number, place))
            tool = result.name or (asked[1].name if asked else None)
            content = at(message, result.content_path)
            write = partial(self.fmt.with_content, result=result)
            yield Payload(content, OLD_RESULT, write, tool, result.call_id)

    def _with_placeholders(self, message: Message, parts: Iterable[_Replaced]) -> Message:
        for one in parts:
            message = one.write(message, text=one.placeholder.text(self.placeholders.read_tool))
        return message

    def _folded(self, cut: _Cut, starts: list[int], old: int) -> _Cut:
        """Fold the oldest turns of a cut into a note. Turns with errors or pinned artifacts are
        folded only if the budget requires it."""
        if not starts or not self._room:
            return cut
        plain: list[list[int]] = []
        spared: list[list[int]] = []
        for group in self._groups(starts, cut.length, old):
            (plain if self._spared.isdisjoint(group) else spared).append(group)
        fold = _Fold(cut.tokens + self._room)
        self._fold_turns(fold, plain, cut)
        if fold.tokens > self.max_tokens:
            self._fold_turns(fold, spared, cut)
        if not fold.gone or fold.tokens >= cut.tokens:
            return cut
        step = f"{len(fold.gone)} messages of {fold.turns} turns were folded into a note"
        lost = self._spared.intersection(fold.gone)
        if lost:
            step += (
                f", {len(lost)} of them errors or pinned artifacts, because nothing else was left"
            )
        return replace(
            cut, fold=tuple(sorted(fold.gone)), tokens=fold.tokens, steps=(*cut.steps, step)
        )

    def _fold_turns(self, fold: _Fold, groups: Iterable[list[int]], cut: _Cut) -> None:
        """Fold turns, the oldest first, until the target is reached."""
        for group in groups:
            if fold.tokens <= self._target:
                return
            for number in group:
                if not self._is_task(number) and self._sides[number] != "system":
                    fold.gone.append(number)
                    fold.tokens -= self._cost(cut, number)
            fold.turns += 1

    def _is_task(self, number: int) -> bool:
        """Whether a message is the first one of the user, if it is short: it stays."""
        return (
            number == self._lead
            and self._sides[number] == "user"
            and self._tokens[number] * _TASK <= self.max_tokens
        )

    def _groups(self, starts: list[int], length: int, old: int) -> Iterator[list[int]]:
        """Yield the message numbers of old turns, the oldest turn first, grouped with turns that
        share a call and its result. Groups with a turn that stays are left out."""
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

    def _room_for_note(self, like: Message) -> int:
        """How many tokens a note may take. 0 if the format has no conversation."""
        text = _note_text(99_999, _LONG_POINTER, (), 99_999, self.placeholders.read_tool)
        smallest = self.fmt.user_message(text, like)
        if smallest is None:
            return 0
        return max(weigh(smallest, self.count), self.max_tokens // _NOTE_SHARE)

    def _linked_turns(self) -> set[tuple[int, int]]:
        """Return the pairs of turns that share a call and its result."""
        links = set()
        for (answer, _), (call, _) in self._pairing.call_of.items():
            one, other = self._turn_of(call), self._turn_of(answer)
            if one != other:
                links.add((one, other))
        return links

    def _turn_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _cost(self, cut: _Cut, number: int) -> int:
        return [self._tokens[number], *(one.tokens for one in self._variants_of(cut, number))][-1]

    def _rendered(self, cut: _Cut | None, length: int, *, store: bool) -> _Rendering:
        """Apply a cut to the first messages. Its payloads are stored, unless it is only made for a
        comparison."""
        done, fold = _Rendering(), cut.fold if cut else ()
        gone = frozenset(fold)
        for number in range(length):
            if fold and number == fold[0]:
                note, pointer = self._note(fold, store)
                done.shown.append(_Shown(note, None))
                done.replaced += [Replacement(one, "turns", "", pointer) for one in fold]
            if number not in gone:
                done.shown.append(self._shown(cut, number, done.replaced, store=store))
        self._repair_references(done)
        return done

    def _shown(
        self, cut: _Cut | None, number: int, replaced: list[Replacement], *, store: bool
    ) -> _Shown:
        """Return what a cut makes of one message, and add what it replaces."""
        message = self.messages[number]
        for variant in self._variants_of(cut, number):
            parts = self._stored(variant.parts) if store else variant.parts
            message = self._with_placeholders(message, parts) if parts else variant.message
            replaced += _replacements(number, variant.what, parts)
        return _Shown(message, number)

    def _stored(self, parts: Iterable[_Replaced]) -> tuple[_Replaced, ...]:
        return tuple(
            replace(one, placeholder=self.placeholders.put(one.placeholder)) for one in parts
        )

    def _repair_references(self, done: _Rendering) -> None:
        """Let results that refer to a replaced result say where that is now."""
        moved = self._moved_results(done.replaced)
        if not moved:
            return
        for one in done.shown:
            if one.number is None:
                continue
            for result in self._results[one.number]:
                text = plain_text(at(one.message, result.content_path))
                changed = repaired(text, moved) if text is not None else None
                if changed is not None:
                    one.message = self.fmt.with_content(one.message, result=result, text=changed)

    def _moved_results(self, replacements: Iterable[Replacement]) -> dict[str, str]:
        """Return where replaced results are now, by the place that references name."""
        moved: dict[str, str] = {}
        for one in replacements:
            if one.what not in ("turns", "result"):
                continue
            where = f"stored in {one.pointer}" if one.pointer else "no longer shown and not stored"
            for place, result in enumerate(self._results[one.message]):
                if one.what == "result" and one.call_id != result.call_id:
                    continue
                asked = self._pairing.call_of.get((one.message, place))
                tool = asked[1].name if asked else result.name
                moved[ShownResult("", tool or "", result.call_id).place] = where
        return moved

    def _note(self, fold: tuple[int, ...], store: bool) -> tuple[Message, str | None]:
        """Return the note of a fold, and the pointer of the folded messages, which are stored one
        per line."""
        lines = "\n".join(dumped(self.messages[number]) for number in fold)
        stored = self.placeholders.of(lines, "earlier messages", tool=None, call_id=None)
        if stored is not None and store:
            stored = self.placeholders.put(stored)
        pointer = stored.pointer if stored is not None else None
        found = pointers_in(lines)
        listed = self.placeholders.lines(found, _MAX_LISTED)

        def made(shown: Sequence[str]) -> Message:
            others = len(found) - len(shown)
            text = _note_text(len(fold), pointer, shown, others, self.placeholders.read_tool)
            note = self.fmt.user_message(text, self.messages[fold[0]])
            assert note is not None, "a format without a conversation is not folded"
            return note

        notes = map(made, halves(listed))
        return first_that_fits(notes, lambda note: weigh(note, self.count) <= self._room), pointer


def _replacements(number: int, what: What, parts: Sequence[_Replaced]) -> list[Replacement]:
    if not parts:
        return [Replacement(number, what, "", None)]
    return [Replacement(number, what, one.call_id, one.placeholder.pointer) for one in parts]


def _note_text(
    number: int, pointer: str | None, listed: Sequence[str], others: int, read_tool: str | None
) -> str:
    kept = STORED if pointer else "not stored"
    note: dict[str, Any] = {
        "note": f"{number} earlier messages are left out of this prompt, {kept}"
    }
    if pointer:
        note["artifact"] = pointer
    if listed:
        note["artifacts"] = list(listed)
    if others:
        note["others"] = others
    if pointer and read_tool:
        note["hint"] = f"{read_tool} reads them, a message a line; grep finds a word"
    return json.dumps(note, ensure_ascii=False, separators=(",", ":"))


def _shared(same: Iterable[bool]) -> int:
    """Count how many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, same))
