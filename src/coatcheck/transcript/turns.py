"""What belongs together in a conversation: calls with their results, and turns.

A turn is one answer of the model with the results of its calls, and what was said to it just before. A result that came
late lies in a later turn than its call: those two turns can only leave a conversation together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coatcheck.transcript.formats import Call, Format, Message, Result


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which result answers which call. A place is the number of a message and of the call or result in it.

    `open` are calls that nobody answered, `orphans` results that answer none."""

    call_of: dict[tuple[int, int], tuple[int, Call]] = field(default_factory=dict)
    open: tuple[tuple[int, Call], ...] = ()
    orphans: tuple[tuple[int, Result], ...] = ()


def pair(messages: Sequence[Message], known: Format) -> Pairing:
    """Each result with the nearest call before it that has its id and no result yet. Ids may be empty or repeat."""
    waiting: dict[str, list[tuple[int, int, Call]]] = {}
    call_of: dict[tuple[int, int], tuple[int, Call]] = {}
    orphans: list[tuple[int, Result]] = []
    for number, message in enumerate(messages):
        for place, call in enumerate(known.calls(message)):
            waiting.setdefault(call.id, []).append((number, place, call))
        for place, result in enumerate(known.results(message)):
            asked = waiting.get(result.call_id)
            if asked:
                # Calls of one message are answered in their order, those of the newest message first.
                at = next(index for index, one in enumerate(asked) if one[0] == asked[-1][0])
                call_number, _, call = asked.pop(at)
                call_of[number, place] = (call_number, call)
            elif not _carries_both(result):
                orphans.append((number, result))
    left = sorted((one for asked in waiting.values() for one in asked), key=lambda one: one[:2])
    return Pairing(call_of, tuple((number, call) for number, _, call in left), tuple(orphans))


def unpaired(messages: Sequence[Message], known: Format) -> list[str]:
    """What a provider would refuse of these messages: calls without a result, results without a call, and for
    Anthropic's rules those that do not stand in neighbouring messages. Empty where all is well."""
    found = pair(messages, known)
    said = [f"message {number}: call {_id(call.id)} has no result" for number, call in found.open]
    said += [f"message {number}: result {_id(result.call_id)} has no call" for number, result in found.orphans]
    if known.name in ("anthropic", "claude-code"):
        said += [
            f"message {number}: result {_id(call.id)} stands {number - asked} messages after its call"
            for (number, _), (asked, call) in found.call_of.items()
            if number not in (asked, asked + 1)  # a provider's own tools answer in the same message
        ]
    return said


def side(message: Message, known: Format) -> str:
    """ "system", "user", "assistant", or "result" for a message that carries results."""
    if known.results(message):
        return "result"
    role = known.role(message)
    if role in ("system", "developer"):
        return "system"
    return "assistant" if role in ("assistant", "model") or known.calls(message) else "user"


def turns(sides: Sequence[str]) -> list[int]:
    """Where turns begin, by whose side each message is on. Before the first one stand the system's messages."""
    lead = next((number for number, one in enumerate(sides) if one != "system"), len(sides))
    found: list[int] = []
    for number in range(lead, len(sides)):
        one, before = sides[number], sides[number - 1] if number > lead else None
        fresh = before is None or (one in ("user", "system") and before in ("assistant", "result"))
        if fresh or (one == "assistant" and before == "result"):
            found.append(number)
    return found


def _carries_both(result: Result) -> bool:
    """An item that is call and result in one (a provider's own MCP call) has no id that a call could have."""
    return result.content_path == ("output",) and not result.call_id and result.path == ()


def _id(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
