"""Which tool result answers which call, what replaces those that answer none, and where turns begin.

A turn is one answer of the model with the results of its calls, and the input just before it. A late result is in a
later turn than its call: those two turns can only be removed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coatcheck.ids import clip
from coatcheck.messages.formats import Call, Format, ToolResult, text_of
from coatcheck.messages.paths import Message

NO_RESULT: Final = "No result: the call was interrupted, or its result came later."


@dataclass(frozen=True, slots=True)
class Pairing:
    """`call_of` maps (message number, result number) to the message number and call that the result answers. `open`
    are calls without a result, `orphans` results without a call."""

    call_of: dict[tuple[int, int], tuple[int, Call]] = field(default_factory=dict)
    open: tuple[tuple[int, Call], ...] = ()
    orphans: tuple[tuple[int, ToolResult], ...] = ()


def pair(messages: Sequence[Message], fmt: Format) -> Pairing:
    """Pair each result with the nearest earlier call that has its id and no result yet. Ids may be empty or repeat."""
    waiting: dict[str, list[tuple[int, int, Call]]] = {}
    call_of: dict[tuple[int, int], tuple[int, Call]] = {}
    orphans: list[tuple[int, ToolResult]] = []
    for number, message in enumerate(messages):
        for place, call in enumerate(fmt.calls(message)):
            waiting.setdefault(call.id, []).append((number, place, call))
        for place, result in enumerate(fmt.results(message)):
            calls = waiting.get(result.call_id)
            if calls:
                # Calls of one message are answered in their order, those of the newest message first.
                index = next(index for index, one in enumerate(calls) if one[0] == calls[-1][0])
                call_number, _, call = calls.pop(index)
                call_of[number, place] = (call_number, call)
            elif result.call_id or result.content_path != ("output",):  # else a provider's own call, with its result
                orphans.append((number, result))
    left = sorted((one for calls in waiting.values() for one in calls), key=lambda one: one[:2])
    return Pairing(call_of, tuple((number, call) for number, _, call in left), tuple(orphans))


def unpaired(messages: Sequence[Message], fmt: Format) -> list[str]:
    """Return what a provider would refuse: calls without a result, results without a call, and for Anthropic results
    that are not in the message after their call. Empty if everything is paired."""
    found = pair(messages, fmt)
    problems = [f"message {number}: call {clip(call.id, 40)} has no result" for number, call in found.open]
    problems += [f"message {number}: result {clip(one.call_id, 40)} has no call" for number, one in found.orphans]
    if fmt.name in ("anthropic", "claude-code"):
        problems += [
            f"message {number}: result {clip(call.id, 40)} is {number - call_number} messages after its call"
            for (number, _), (call_number, call) in found.call_of.items()
            if number not in (call_number, call_number + 1)  # a provider's own tools answer in the same message
        ]
    return problems


def late_text(call_id: object, content: object) -> str:
    """Return the text in place of a result that came too late for its call."""
    return f"Late result of the call {call_id}: {text_of(content)}"


def repeated_text(call_id: object, name: object, arguments: object) -> str:
    """Return the text in place of a call that uses the id of another one."""
    return f"Repeated call {call_id}, not made again: {name} with {text_of(arguments)}"


def side(message: Message, fmt: Format) -> str:
    """Return "system", "user", "assistant", or "result" for a message with tool results."""
    if fmt.results(message):
        return "result"
    role = fmt.role(message)
    if role in ("system", "developer"):
        return "system"
    return "assistant" if role in ("assistant", "model") or fmt.calls(message) else "user"


def turns(sides: Sequence[str]) -> list[int]:
    """Return the numbers of the messages that begin a turn, from the side of each message. System messages at the
    start belong to no turn."""
    lead = next((number for number, one in enumerate(sides) if one != "system"), len(sides))
    found: list[int] = []
    for number in range(lead, len(sides)):
        one, before = sides[number], sides[number - 1] if number > lead else None
        is_input = before is None or (one in ("user", "system") and before in ("assistant", "result"))
        if is_input or (one == "assistant" and before == "result"):
            found.append(number)
    return found
