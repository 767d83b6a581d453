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

A placeholder is a pure function of its payload, so a prompt that is pruned again has the same
bytes. It is made before anything is stored; only the payloads of placeholders that a prompt really
contains are put.

Behind a placeholder is the exact result, even if the conversation shows a shorter form of it. A
shorter form that refers to a result that is pruned says where that result is stored.
"""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, Final, Literal

from coatcheck.checks import is_whole, one_of, share, whole
from coatcheck.errors import AmbiguousPointer, CoatcheckError, LimitExceeded, StoreError
from coatcheck.externalize.originals import original_of
from coatcheck.externalize.policy import READ_TOOL, Policy, configured
from coatcheck.externalize.shorter import ShownResult, expanded, is_reference, repaired
from coatcheck.externalize.storing import (
    Prepared,
    prepared,
    put_prepared,
)
from coatcheck.externalize.stub import STORED, is_stub, own_tag, placeholder, pointer_in_stub
from coatcheck.ids import digest_of, parse_pointer, pointer_of
from coatcheck.intake import About
from coatcheck.messages import PLAIN, Format, Message, detect, named_format
from coatcheck.messages.cache import StablePrefix
from coatcheck.messages.cost import weigh
from coatcheck.messages.formats import (
    arguments_of,
    attachments,
    dumped,
    is_replaceable,
    pair,
    plain_text,
    program_results,
    side,
    turns,
)
from coatcheck.messages.paths import Path, at, replaced
from coatcheck.parts import Part
from coatcheck.parts import write as write_part
from coatcheck.previews.excerpts import line as one_line
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.shrink import first_that_fits, halves
from coatcheck.tokens import TokenCounter, estimate
from coatcheck.truncation import INCOMPLETE, Truncation, find_truncation, parse_truncation
from coatcheck.values import byte_size

LOW_WATER: Final = 0.3
MIN_SAVED: Final = 16
What = Literal["result", "arguments", "thinking", "media", "turns"]
Write = Callable[..., Message]
"""Called with a message and a `text`. Returns a copy of the message with that text in one place."""

_STAGES: Final[tuple[tuple[What, str], ...]] = (
    ("result", "{} messages: results became placeholders"),
    ("arguments", "{} messages: arguments of calls became placeholders"),
    ("media", "{} messages: pictures and documents became placeholders"),
    ("thinking", "{} messages: thinking was removed"),
)
_SMALL_ARGUMENTS: Final = 600  # characters of arguments that are left alone
_SMALL_ARGUMENT: Final = 300  # characters of one argument that stays in view
_TASK: Final = 8  # the first user message stays if it takes at most this part (1/8) of the budget
_MAX_LISTED: Final = 16  # artifacts that a note lists
_LONG_POINTER: Final = "art:" + "a7f3c9e1b5d2" + "8e4b6" * 4  # costs more tokens than real pointers
_NOTE_SHARE: Final = 16  # the part (1/16) of a budget that a note may take
_POINTER: Final = re.compile(r"(?<![0-9A-Za-z:])art:[0-9a-f]{12,64}(?![0-9a-f])")
_RESULT: Final = "an older result"
_PAGE_HEAD: Final = re.compile(r"\[(art:[0-9a-f]{12,64})[;\]#]")


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
        given, fmt, Placeholders(session, pinned, read_tool, redact), count, max_tokens, low_water,
        keep_turns, folds=fold, least_saved=least_saved,
    )  # fmt: skip
    done = cutter.pruned()
    return _in_lines(done, messages, inner, fmt) if are_lines else done


def format_of(messages: Sequence[Message], named: Format | str | None) -> Format:
    """Return the named format, or the one that these messages have."""
    return named_format(named) or detect(messages) or PLAIN


def _in_lines(
    done: Pruned, lines: Sequence[Message], inner: dict[int, Message], fmt: Format
) -> Pruned:
    """Apply the result for the messages in some lines to the lines."""
    numbers, left = list(inner), iter(done.messages)
    folded = {numbers[one.message] for one in done.replaced if one.what == "turns"}
    first = min(folded, default=None)
    found: list[Message] = []
    places: list[int] = []  # of the lines that have a message
    for number, line in enumerate(lines):
        if number == first:
            places.append(len(found))
            found.append(fmt.wrapped(next(left)))
        if number not in inner:
            found.append(line)
        elif number not in folded:
            message = next(left)
            places.append(len(found))
            same = message is inner[number]
            found.append(
                line if same else message if inner[number] is line else {**line, "message": message}
            )
    unchanged = next(
        (at for at, one in enumerate(found) if at >= len(lines) or one is not lines[at]), len(found)
    )
    stable = done.stable_prefix.messages
    return replace(
        done,
        messages=found,
        replaced=tuple(replace(one, message=numbers[one.message]) for one in done.replaced),
        unchanged_prefix=replace(done.unchanged_prefix, messages=unchanged),
        stable_prefix=replace(
            done.stable_prefix, messages=places[stable] if stable < len(places) else len(found)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Variant:
    """A message with payloads replaced, its tokens, and each placeholder with its call id and how
    to write it."""

    message: Message
    tokens: int
    what: What
    parts: tuple[tuple[Placeholder, str, Write], ...] = ()


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
class _Rendering:
    """A cut applied to its messages: the messages, the number of each in the input (None for a
    note), and what was replaced."""

    messages: list[Message] = field(default_factory=list)
    origin: list[int | None] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)


@dataclass
class _Cutter:
    """Makes cuts of one history, and applies them."""

    messages: Sequence[Message]
    fmt: Format
    placeholders: Placeholders
    count: TokenCounter
    max_tokens: int
    low_water: float
    keep_turns: int
    folds: bool
    least_saved: int

    def __post_init__(self) -> None:
        messages, fmt, max_tokens = self.messages, self.fmt, self.max_tokens
        self._target = int(max_tokens * self.low_water)
        self._crowded = (max_tokens + self._target) // 2
        self._results = [fmt.results(one) for one in messages]
        self._for_program = program_results(messages, fmt)
        self._tokens = [self._weight(one, number) for number, one in enumerate(messages)]
        self._total = list(accumulate(self._tokens, initial=0))
        self._pairing = pair(messages, fmt)
        self._sides = [side(one, fmt) for one in messages]
        self._starts = turns(self._sides)
        self._lead = self._starts[0] if self._starts else len(messages)
        links = (
            (self._turn_of(asked), self._turn_of(at))
            for (at, _), (asked, _) in self._pairing.call_of.items()
        )
        self._links = sorted({(one, other) for one, other in links if one != other})
        self._users = [number for number, one in enumerate(self._sides) if one == "user"]
        self._variants: list[list[_Variant | None]] = [[] for _ in _STAGES]
        self._saved = [[0] for _ in _STAGES]
        self._spared: set[int] = {
            at for at, found in enumerate(self._results) if any(one.is_error for one in found)
        }
        self._room = self._room_for_note(messages[0]) if messages else 0

    def _weight(self, message: Message, number: int | None) -> int:
        """Count the tokens of a message, or of what was made of the message of this number. Results
        for a provider's program do not count, since they are not in the context."""
        for place, result in enumerate(() if number is None else self._results[number]):
            if (number, place) in self._for_program:
                message = self.fmt.with_content(message, result, "")
        return weigh(message, self.count)

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
        pairs = list(zip(final.messages, final.origin, strict=True))
        earlier = [one for one, at in pairs if at is None or at < newest]
        if before is not cut:
            earlier = self._rendered(before, newest, store=False).messages
        tokens = [
            self._tokens[at]
            if at is not None and one is self.messages[at]
            else self._weight(one, at)
            for one, at in pairs
        ]
        if sum(tokens) > self.max_tokens:  # the store failed, or returned longer pointers
            raise LimitExceeded(
                f"the messages need {sum(tokens):,} tokens, the budget is {self.max_tokens:,}",
                hint="raise the budget",
            )
        same = _shared(map(operator.is_, final.messages, self.messages))
        stable = _shared(map(operator.eq, final.messages, earlier))
        return Pruned(
            messages=final.messages,
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
            if total > self.max_tokens or (
                cut is not None and cut.fold and self._is_late(cut, number)
            ):
                cut = self._cut(number + 1)
                total = cut.tokens
        return cut, before, total

    def _is_late(self, cut: _Cut, number: int) -> bool:
        """Whether a message answers a call that was folded away."""
        places = range(len(self._results[number]))
        asked = {
            found[0] for place in places if (found := self._pairing.call_of.get((number, place)))
        }
        return bool(asked.intersection(cut.fold))

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
        lead = min(self._lead, length)
        old = length if not keep else starts[-keep] if keep <= len(starts) else lead
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
            reached[stage] = (
                min(end, bisect_left(saved, total - self._target, 0, end + 1)) if end else 0
            )
            total -= saved[reached[stage]]
            changed = sum(1 for one in self._variants[stage][: reached[stage]] if one is not None)
            if changed:
                steps.append(description.format(changed))
        cut = _Cut(length, total, tuple(reached), (), tuple(steps))
        return self._folded(cut, starts, old) if self.folds and total > self._crowded else cut

    def _last_user(self, length: int) -> int:
        """The last user message before a point: thinking after it must be sent back."""
        at = bisect_left(self._users, length)
        return self._users[at - 1] if at else -1

    def _reach(self, stage: int, end: int) -> None:
        """Make the variants of a stage up to a number, each from what the stages before made of the
        message."""
        made, saved = self._variants[stage], self._saved[stage]
        for number in range(len(made), end):
            message, tokens = self.messages[number], self._tokens[number]
            for earlier in self._variants[:stage]:
                before = earlier[number] if number < len(earlier) else None
                if before is not None:
                    message, tokens = before.message, before.tokens
            found = self._made(message, number, _STAGES[stage][0]) if number >= self._lead else None
            if found is not None and tokens - found.tokens < self.least_saved:
                found = None
            made.append(found)
            saved.append(saved[-1] + (tokens - found.tokens if found is not None else 0))

    def _made(self, message: Message, number: int, what: What) -> _Variant | None:
        """Return what a stage makes of a message, or None if it changes nothing."""
        parts = []
        for content, name, tool, call_id, write in self._payloads(message, number, what):
            made = self.placeholders.of(content, name, tool=tool, call_id=call_id)
            if made is None:
                continue
            is_kept = what == "result" and self.placeholders.policy.tools.get(tool or "") == "never"
            if not made.pinned and not is_kept:
                parts.append((made, call_id, write))
            elif what == "result":
                self._spared.add(number)
        done = self.fmt.without_thinking(message) if what == "thinking" else None
        if parts:
            done = self._with_placeholders(message, parts)
        return (
            None if done is None else _Variant(done, self._weight(done, number), what, tuple(parts))
        )

    def _payloads(
        self, message: Message, number: int, what: What
    ) -> Iterator[tuple[Any, str, str | None, str, Write]]:
        """Yield the payloads that a stage replaces: the content, what it is, tool, call id, and how
        to replace it."""
        fmt = self.fmt
        if what == "result":
            for place, result in enumerate(self._results[number]):
                is_for_program = (number, place) in self._for_program
                if not result.is_error and not is_for_program and is_replaceable(message, result):
                    asked = self._pairing.call_of.get((number, place))
                    tool, content = (
                        result.name or (asked[1].name if asked else None),
                        at(message, result.content_path),
                    )
                    yield (
                        content,
                        _RESULT,
                        tool,
                        result.call_id,
                        partial(fmt.with_content, result=result),
                    )
        elif what == "arguments":
            for call in fmt.calls(message):
                path, value = arguments_of(message, call) or ((), "")
                if len(dumped(value)) <= _SMALL_ARGUMENTS:
                    continue
                for content, write in _long_arguments(path, value):
                    yield content, "an older argument", call.name, call.id, write
        elif what == "media":
            for path, part in attachments(message):
                write = partial(_with_text, path=path, convert=partial(_with_stub, part))
                yield part.value, "an older attachment", None, "", write

    def _with_placeholders(
        self, message: Message, parts: Iterable[tuple[Placeholder, str, Write]]
    ) -> Message:
        for made, _, write in parts:
            message = write(message, text=made.text(self.placeholders.read_tool))
        return message

    def _folded(self, cut: _Cut, starts: list[int], old: int) -> _Cut:
        """Fold the oldest turns of a cut into a note. Turns with errors or pinned artifacts are
        folded only if the budget requires it."""
        if not starts or not self._room:
            return cut
        first = starts[0]
        task = (
            first
            if self._sides[first] == "user" and self._tokens[first] * _TASK <= self.max_tokens
            else -1
        )
        gone: list[int] = []
        spared: list[list[int]] = []
        count, total = 0, cut.tokens + self._room
        for forced in (False, True):
            if forced and total <= self.max_tokens:
                break
            for group in spared if forced else self._groups(starts, cut.length, old):
                if total <= self._target:
                    break
                if not forced and not self._spared.isdisjoint(group):
                    spared.append(group)
                    continue
                chosen = [
                    number for number in group if number != task and self._sides[number] != "system"
                ]
                total -= sum(self._cost(cut, number) for number in chosen)
                gone += chosen
                count += 1
        if not gone or total >= cut.tokens:
            return cut
        step = f"{len(gone)} messages of {count} turns were folded into a note"
        if kept := self._spared.intersection(gone):
            step += (
                f", {len(kept)} of them errors or pinned artifacts, because nothing else was left"
            )
        return replace(cut, fold=tuple(sorted(gone)), tokens=total, steps=(*cut.steps, step))

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
        return (
            0
            if smallest is None
            else max(weigh(smallest, self.count), self.max_tokens // _NOTE_SHARE)
        )

    def _turn_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _cost(self, cut: _Cut, number: int) -> int:
        return [self._tokens[number], *(one.tokens for one in self._variants_of(cut, number))][-1]

    def _rendered(self, cut: _Cut | None, length: int, *, store: bool) -> _Rendering:
        """Apply a cut to the first messages. Its payloads are stored, unless it is only made for a
        comparison."""
        done, fold = _Rendering(), cut.fold if cut else ()
        gone = frozenset(fold)
        for number, message in enumerate(self.messages[:length]):
            if fold and number == fold[0]:
                note, pointer = self._note(fold, store)
                done.messages.append(note)
                done.origin.append(None)
                done.replaced += [Replacement(one, "turns", "", pointer) for one in fold]
            if number in gone:
                continue
            for variant in self._variants_of(cut, number):
                parts = variant.parts
                if store:
                    parts = tuple(
                        (self.placeholders.put(made), call_id, write)
                        for made, call_id, write in parts
                    )
                message = self._with_placeholders(message, parts) if parts else variant.message
                found = [(call_id, made.pointer) for made, call_id, _ in parts] or [("", None)]
                done.replaced += [Replacement(number, variant.what, *one) for one in found]
            done.messages.append(message)
            done.origin.append(number)
        self._repair_references(done)
        return done

    def _repair_references(self, done: _Rendering) -> None:
        """Let results that refer to a replaced result say where that is now."""
        moved: dict[str, str] = {}
        for one in done.replaced:
            where = f"stored in {one.pointer}" if one.pointer else "no longer shown and not stored"
            for place, result in enumerate(self._results[one.message]):
                is_replaced = one.what == "turns" or (
                    one.what == "result" and one.call_id == result.call_id
                )
                if is_replaced:
                    asked = self._pairing.call_of.get((one.message, place))
                    tool = asked[1].name if asked else result.name
                    moved[ShownResult("", tool or "", result.call_id).place] = where
        if not moved:
            return
        for at_message, number in enumerate(done.origin):
            for result in self._results[number] if number is not None else ():
                message = done.messages[at_message]
                text = plain_text(at(message, result.content_path))
                changed = repaired(text, moved) if text is not None else None
                if changed is not None:
                    done.messages[at_message] = self.fmt.with_content(
                        message, result=result, text=changed
                    )

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


def _long_arguments(path: Path, value: Any) -> Iterator[tuple[str, Write]]:
    """Yield the long arguments of a call as texts with lines, and how to replace each. Short ones,
    such as the path of a file, stay in view."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
        yield text, partial(_with_text, path=path, convert=str)
        return
    for name, argument in arguments.items():
        if len(dumped(argument)) <= _SMALL_ARGUMENT:
            continue
        text = (
            argument
            if isinstance(argument, str)
            else json.dumps(argument, ensure_ascii=False, indent=2)
        )
        if isinstance(value, str):
            yield text, partial(_with_encoded_argument, path=path, name=name)
        else:
            yield text, partial(_with_text, path=(*path, name), convert=str)


def _with_encoded_argument(message: Message, text: str, path: Path, name: str) -> Message:
    """Write a text in place of one argument in arguments that are a string of JSON."""
    arguments = json.loads(at(message, path)) | {name: text}
    return dict(replaced(message, path, json.dumps(arguments, ensure_ascii=False)))


def _with_text(message: Message, text: str, path: Path, convert: Callable[[str], Any]) -> Message:
    """Write a text, converted to what belongs there, into one place of a message."""
    return dict(replaced(message, path, convert(text)))


def _with_stub(part: Part, text: str) -> Any:
    return write_part(part.with_text(text))


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


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The replacement for a payload. `payload` must be put before the pointer resolves; it is None
    if it is stored already. `artifact_id` is the full id, or the part of it that the pointer
    has."""

    what: str
    size_bytes: int
    lines: int | None
    artifact_id: str
    pointer: str | None
    payload: Prepared | None = None
    tool: str | None = None
    call_id: str | None = None
    pinned: bool = False
    cut: Truncation | None = None

    def text(self, read_tool: str | None) -> str:
        """The line of JSON that the model is shown."""
        return placeholder(
            self.what, self.pointer, self.size_bytes, self.lines, read_tool, cut=self.cut
        )


class Placeholders:
    """Makes placeholders for payloads, and puts the payloads into the session, with secrets masked
    if `redact` or the settings of the store ask for it."""

    def __init__(
        self,
        session: Session | None,
        pinned: Iterable[Ref | str] | None,
        read_tool: str | None,
        redact: Literal["store"] | None = None,
    ) -> None:
        self._session = session
        self.policy = Policy() if session is None else configured(session.store.settings, redact)
        self.read_tool = read_tool
        self._pinned = None if pinned is None else tuple(_prefix(one) for one in pinned)
        self.failures: list[str] = []

    def of(
        self, content: object, what: str, *, tool: str | None, call_id: str | None
    ) -> Placeholder | None:
        """Return the placeholder of a payload. None if the payload claims to be a stub, but its
        pointer does not resolve in this session, or if it refers to another result and the exact
        result was not stored."""
        text = plain_text(content)
        if text is not None and is_stub(text):
            return self._of_stub(text, what)
        if text is not None and is_reference(text):
            return self._of_reference(text, what)
        text = text and (expanded(text) or text)
        if text is not None and (found := self._of_page(text)) is not None:
            return found
        payload = prepared(content if text is None else text, self.policy)
        data = payload.encoded.data
        artifact_id = digest_of(data)
        pinned = self._is_pinned(
            artifact_id, self._ref(pointer_of(artifact_id, 64)) if self._pinned is None else None
        )
        lines = data.count(b"\n") + 1 if isinstance(payload.value, str) else None
        pointer = None if self._session is None else pointer_of(artifact_id)
        cut = find_truncation(payload.text) if what == _RESULT else None
        return Placeholder(
            what, len(data), lines, artifact_id, pointer, payload, tool, call_id, pinned, cut
        )

    def _is_pinned(self, artifact_id: str, ref: Ref | None) -> bool:
        """Whether an artifact must stay: the caller named it, or, if the caller named none, it is
        pinned in the session."""
        if self._pinned is None:
            return ref is not None and ref.pinned
        return any(
            artifact_id.startswith(one) or one.startswith(artifact_id) for one in self._pinned
        )

    def put(self, made: Placeholder) -> Placeholder:
        """Store the payload of a placeholder. If the store fails, the placeholder has no
        pointer."""
        if made.payload is None or self._session is None:
            return made
        about = About(tool=made.tool, call_id=made.call_id)
        try:
            ref = self._ref(pointer_of(made.artifact_id, 64))
            ref = ref or put_prepared(self._session, made.payload, about, self.policy)
        except CoatcheckError as error:
            self.failures.append(str(error))
            return replace(made, pointer=None, payload=None)
        return replace(made, pointer=ref.pointer, payload=None)

    def lines(self, pointers: Iterable[str], most: int) -> tuple[str, ...]:
        """Describe the first of these artifacts that the session has, one line each, at most
        `most`."""
        found: list[str] = []
        for pointer in pointers:
            if len(found) == most:
                break
            ref = self._ref(pointer)
            if ref is not None:
                found.append(line_of(ref, quoted=False))
            elif self._session is None:
                found.append(pointer)
        return tuple(found)

    def _of_stub(self, text: str, what: str) -> Placeholder | None:
        pointer = pointer_in_stub(text)
        ref = self._ref(pointer) if pointer is not None else None
        if pointer is None or (self._session is not None and ref is None):
            return None
        prefix, stub = parse_pointer(pointer).prefix, json.loads(text)
        size, lines = (
            one if is_whole(one) else None for one in (stub.get("size_bytes"), stub.get("lines"))
        )
        cut = parse_truncation(str(stub.get("stub")))
        return Placeholder(
            what, size or 0, lines, prefix, pointer, pinned=self._is_pinned(prefix, ref), cut=cut
        )

    def _of_reference(self, text: str, what: str) -> Placeholder | None:
        """A shorter form is not stored: its placeholder points at the exact result."""
        ref = None if self._session is None else original_of(self._session, text, self.policy)
        if ref is None:
            return None
        pinned = self._is_pinned(ref.artifact_id, ref)
        return Placeholder(what, ref.size_bytes, None, ref.artifact_id, ref.pointer, pinned=pinned)

    def _of_page(self, text: str) -> Placeholder | None:
        """A page from our own tools is not stored: its placeholder points at the artifact that was
        read."""
        match = _PAGE_HEAD.search(text[:4_000]) if self._session is not None else None
        if match is None or self._session is None or self._ref(match[1]) is None:
            return None
        if own_tag(self._session.store, text) is None:
            return None
        header = text[match.start() :].partition("\n")[0]
        cut = parse_truncation(header[header.find(INCOMPLETE) :]) if INCOMPLETE in header else None
        return Placeholder(
            "an older page of an artifact",
            byte_size(text),
            None,
            parse_pointer(match[1]).prefix,
            match[1],
            cut=cut,
        )

    def _ref(self, pointer: str) -> Ref | None:
        if self._session is None:
            return None
        try:
            return self._session.ref(pointer)
        except (AmbiguousPointer, StoreError):
            return None


def line_of(ref: Ref, limit: int = 80, *, quoted: bool = True) -> str:
    """Describe an artifact in one line: pointer, kind, size, tool, and its name or summary. Those
    are untrusted, so they are quoted as a JSON string, unless the line goes into one anyway."""
    label = one_line(mask(": ".join(filter(None, (ref.tool, ref.name or ref.summary)))), limit)
    about = json.dumps(label, ensure_ascii=False) if quoted and label else label
    return f"{ref.pointer} {ref.kind} {ref.size_bytes:,} bytes {about}".rstrip()


def pointers_in(text: str) -> list[str]:
    """Return the pointers in a text, each once, the last one first."""
    return list(dict.fromkeys(reversed(_POINTER.findall(text)))) if "art:" in text else []


def _prefix(one: Ref | str) -> str:
    return (
        one.artifact_id
        if isinstance(one, Ref)
        else parse_pointer(one).prefix
        if one.startswith("art:")
        else one
    )
