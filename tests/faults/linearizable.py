"""Is a history of puts, gets and forgets of one artifact in one session linearizable?

Each call took effect at one instant between its start and its end; a call that a crash cut short
took effect before the crash, or never. After a power cut the artifact is in the state before it,
except that changes that were not durable may be undone. The search is Wing and Gong's: try each
call that may come first, and remember what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Held = Literal["present", "absent", "damaged"]
CallKind = Literal["put", "get", "forget", "heal"]
State = tuple[Held, frozenset[Held]]
"""The state of the artifact, and the states that it may have instead after a power cut."""
NEW: State = ("absent", frozenset())


@dataclass(frozen=True, slots=True)
class Call:
    """A call and its result. `found` is what a get or a forget found, or None if that is unknown. A
    put of the same content to another session heals a damaged artifact."""

    kind: CallKind
    start: int
    end: int
    found: Held | None = None
    is_durable: bool = True
    is_over: bool = True  # False: a crash or an error cut it short


def after(call: Call, state: State) -> State | None:
    """Return the state after a call, or None if the call cannot have this result."""
    held, undone = state
    if call.kind == "get" or (call.kind == "forget" and held == "absent"):
        return (
            state
            if call.found in (None, held) or (held, call.found) == ("damaged", "absent")
            else None
        )
    if call.kind == "forget" and call.found == "absent" and held != "damaged":
        return None
    if call.kind == "heal" and held != "damaged":
        return state
    kept: frozenset[Held] = frozenset() if call.is_durable and call.is_over else undone | {held}
    return ("absent" if call.kind == "forget" else "present"), kept


def cut(states: Iterable[State]) -> set[State]:
    """Return the states that a power cut may leave."""
    found: set[State] = set()
    for held, undone in states:
        found |= {(one, frozenset()) for one in {held, *undone}}
        if undone:
            found.add(("damaged", frozenset()))
    return found


def outcomes(calls: Sequence[Call], states: Iterable[State]) -> set[State]:
    """Return the states in which these calls may leave the artifact: none, if they are not
    linearizable."""
    calls = sorted(calls, key=lambda call: call.start)
    found: set[State] = set()
    seen: set[tuple[int, State]] = set()
    todo = [(0, state) for state in states]
    everything = (1 << len(calls)) - 1
    while todo:
        done, state = todo.pop()
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if done == everything:
            found.add(state)
            continue
        left = [(index, call) for index, call in enumerate(calls) if not done >> index & 1]
        soonest = min(call.end for _, call in left)  # whatever starts after it cannot come first
        for index, call in left:
            if call.start > soonest:
                break
            then = after(call, state)
            if then is not None:
                todo.append((done | 1 << index, then))
            if not call.is_over:
                todo.append((done | 1 << index, state))  # it never took effect
    return found
