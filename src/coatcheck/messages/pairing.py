"""`pair`: which tool result answers which call. `turns`: where the turns of a conversation begin.

A turn is one answer of the model with the results of its calls, and the input just before it. A
late result is in a later turn than its call: those two turns can only be removed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from coatcheck.ids import clip
from coatcheck.messages.formats import Call, Format, ToolResult
from coatcheck.messages.paths import Message


@dataclass(frozen=True, slots=True)
class Pairing:
    """`call_of` maps (message number, result number) to the message number and call that the result
    answers. `open` are calls without a result, `orphans` results without a call."""

    call_of: dict[tuple[int, int], tuple[int, Call]] = field(default_factory=dict)
    open: tuple[tuple[int, Call], ...] = ()
    orphans: tuple[tuple[int, ToolResult], ...] = ()


def pair(messages: Sequence[Message], fmt: Format) -> Pairing:
    """Pair each result with the nearest earlier call that has its id and no result yet. Ids may be
    empty or repeat."""
    waiting: dict[str, list[_Asked]] = {}
    call_of: dict[tuple[int, int], tuple[int, Call]] = {}
    orphans: list[tuple[int, ToolResult]] = []
    for number, message in enumerate(messages):
        for place, call in enumerate(fmt.calls(message)):
            waiting.setdefault(call.id, []).append(_Asked(number, place, call))
        for place, result in enumerate(fmt.results(message)):
            calls = waiting.get(result.call_id)
            if calls:
                asked = _take_first_of_newest(calls)
                call_of[number, place] = (asked.message, asked.call)
            elif not _is_own_result(result):
                orphans.append((number, result))
    left = sorted(chain.from_iterable(waiting.values()), key=lambda one: (one.message, one.place))
    return Pairing(call_of, tuple((one.message, one.call) for one in left), tuple(orphans))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call without a result so far: the number of its message, and its place there."""

    message: int
    place: int
    call: Call


def _take_first_of_newest(calls: list[_Asked]) -> _Asked:
    """Remove and return the call that the next result answers. Calls of one message are answered
    in their order, those of the newest message first."""
    newest = calls[-1].message
    first = next(index for index, one in enumerate(calls) if one.message == newest)
    return calls.pop(first)


def _is_own_result(result: ToolResult) -> bool:
    """Whether this is the result of a provider's own call, in the same item as the call."""
    return not result.call_id and result.content_path == ("output",)


def unpaired(messages: Sequence[Message], fmt: Format) -> list[str]:
    """Return what a provider would refuse: calls without a result, results without a call, and for
    Anthropic results that are not in the message after their call. Empty if everything is
    paired."""
    found = pair(messages, fmt)
    problems: list[str] = []
    for number, call in found.open:
        problems.append(f"message {number}: call {clip(call.id, 40)} has no result")
    for number, result in found.orphans:
        problems.append(f"message {number}: result {clip(result.call_id, 40)} has no call")
    if fmt.name not in ("anthropic", "claude-code"):
        return problems
    for (number, _), (asked, call) in found.call_of.items():
        if number - asked not in (0, 1):  # a provider's own tools answer in the same message
            problems.append(
                f"message {number}: result {clip(call.id, 40)} is {number - asked} messages "
                "after its call"
            )
    return problems


def program_results(messages: Sequence[Message], fmt: Format) -> set[tuple[int, int]]:
    """Return the results that are for a provider's program, each as the number of its message and
    of the result."""
    found: set[tuple[int, int]] = set()
    has_programs = False
    for number, message in enumerate(messages):
        has_programs = has_programs or any(call.is_by_program for call in fmt.calls(message))
        for place, result in enumerate(fmt.results(message)):
            if result.is_for_program:
                found.add((number, place))
    if has_programs:
        paired = pair(messages, fmt).call_of
        found |= {place for place, (_, call) in paired.items() if call.is_by_program}
    return found


def in_context(messages: Sequence[Message], fmt: Format) -> list[Message]:
    """Return the messages as a model sees them, for counting: results for a provider's program are
    empty. Messages without such results are the same objects."""
    found = list(messages)
    for number, place in program_results(messages, fmt):
        found[number] = fmt.with_content(found[number], fmt.results(found[number])[place], "")
    return found


def side(message: Message, fmt: Format) -> str:
    """Return "system", "user", "assistant", or "result" for a message with tool results."""
    if fmt.results(message):
        return "result"
    role = fmt.role(message)
    if role in ("system", "developer"):
        return "system"
    return "assistant" if role in ("assistant", "model") or fmt.calls(message) else "user"


def turns(sides: Sequence[str]) -> list[int]:
    """Return the numbers of the messages that begin a turn, from the side of each message. System
    messages at the start belong to no turn."""
    lead = 0
    while lead < len(sides) and sides[lead] == "system":
        lead += 1
    found: list[int] = []
    before: str | None = None
    for number in range(lead, len(sides)):
        one = sides[number]
        begins_input = one in ("user", "system") and before in ("assistant", "result")
        begins_answer = one == "assistant" and before == "result"
        if before is None or begins_input or begins_answer:
            found.append(number)
        before = one
    return found
