"""The compaction safeguard: pointers survive a summary.

Before a host drops messages, `safeguard` says which artifacts they name, as an index that the summary must carry. When
the summary is written, `check_summary` says which of its pointers lead nowhere, and which of the index it has lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from coatcheck.errors import AmbiguousPointer, CoatcheckError, Expired, InvalidArgument
from coatcheck.externalize import Outcome, configured
from coatcheck.externalize.policy import READ_TOOL, Limit, Policy
from coatcheck.ids import MIN_PREFIX, SCHEME
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.transcript import shapes
from coatcheck.transcript.fold import pointers_in
from coatcheck.transcript.formats import Format, Message, Result, at
from coatcheck.transcript.placeholders import line_of, plain_text
from coatcheck.transcript.prune import format_of

LIST_TOOL: Final = "list_artifacts"
_CLAIMED: Final = re.compile(r"(?<![0-9A-Za-z])art:([0-9A-Za-z]{1,80})")
_MOST: Final = 50
_ROOM: Final = 160  # characters that the last line may take

Reason = Literal["unknown", "expired", "ambiguous", "not a pointer"]


@dataclass(frozen=True, slots=True)
class Index:
    """The artifacts that a summary must carry, best first: one line each, and how many more there are.

    `text` goes into the summary as it is. `pointers` are those in it, `left_out` those that did not fit. `unresolved`
    were named in the messages, and this session does not hold them (any more). `failures` says why a result could not
    be stored: keep its message."""

    text: str
    refs: tuple[Ref, ...] = ()
    left_out: tuple[Ref, ...] = ()
    unresolved: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def pointers(self) -> tuple[str, ...]:
        return tuple(ref.pointer for ref in self.refs)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A pointer that leads nowhere, and why."""

    pointer: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class SummaryCheck:
    """What is wrong with the pointers of a summary: those that lead nowhere, and those of the index that it lost.
    `more` counts what is not listed. Its text says so in words that a model can act on."""

    unresolved: tuple[Unresolved, ...] = ()
    lost: tuple[str, ...] = ()
    more: int = 0
    found: int = field(default=0, compare=False)

    @property
    def ok(self) -> bool:
        return not self.unresolved and not self.lost

    def __str__(self) -> str:
        if self.ok:
            return (
                f"all {self.found} pointers of the summary resolve" if self.found else "the summary names no artifact"
            )
        said = [f"{one.pointer}: {one.message}" for one in self.unresolved]
        said += [f"{pointer}: was in the index and is not in the summary; add it" for pointer in self.lost]
        return "\n".join([*said, *([f"and {self.more} more"] if self.more else [])])


def safeguard(
    dropped_messages: Sequence[Message],
    session: Session,
    *,
    format: Format | str | None = None,  # noqa: A002 - what users call it
    policy: Policy | None = None,
    max_items: int = 20,
    max_chars: int = 2_000,
    read_tool: str | None = READ_TOOL,
    list_tool: str | None = LIST_TOOL,
) -> Index:
    """The index of the artifacts in messages that a host is about to drop. Results that are over the policy and still
    inline are put first, so that nothing goes with the messages.

    Best first: pinned, then those that calls used most, the latest, the largest. At most `max_items` lines and
    `max_chars` characters; the last line says how many more there are, and how to list them."""
    if max_items < 0 or max_chars < _ROOM:
        raise InvalidArgument(f"an index of {max_items} items and {max_chars} characters is too small", hint="")
    known = format_of(dropped_messages, format)
    ranked, unresolved, failures = _ranked(
        dropped_messages, session, known, policy or configured(session.store.settings)
    )
    if not ranked:
        return Index("", unresolved=tuple(unresolved), failures=tuple(failures))
    head = f"Artifacts of the earlier conversation{f' ({read_tool} reads them)' if read_tool else ''}:"
    lines, used = [head], len(head) + _ROOM
    kept: list[Ref] = []
    for ref in ranked[:max_items]:
        line = f"- {line_of(ref, 100)}"
        if used + len(line) + 1 > max_chars:
            break
        lines.append(line)
        used += len(line) + 1
        kept.append(ref)
    rest = ranked[len(kept) :]
    if rest:
        how = f": {list_tool} shows them" if list_tool else ""
        lines.append(f"and {len(rest)} more{how}")
    return Index("\n".join(lines), tuple(kept), tuple(rest), tuple(unresolved), tuple(failures))


def check_summary(text: str, session: Session, *, index: Index | Iterable[str] = ()) -> SummaryCheck:
    """Whether every pointer of a finished summary resolves in this session, and none of the index is lost."""
    claimed = list(dict.fromkeys(match[1] for match in _CLAIMED.finditer(text)))
    wrong = [one for one in (_judged(name, session) for name in claimed) if one is not None]
    wanted = index.pointers if isinstance(index, Index) else tuple(index)
    whole = [name.lower() for name in claimed]
    lost = [one for one in wanted if not any(_same(one.removeprefix(SCHEME), name) for name in whole)]
    more = max(0, len(wrong) - _MOST) + max(0, len(lost) - _MOST)
    return SummaryCheck(tuple(wrong[:_MOST]), tuple(lost[:_MOST]), more, len(claimed))


def _ranked(
    messages: Sequence[Message], session: Session, known: Format, policy: Policy
) -> tuple[list[Ref], list[str], list[str]]:
    """The artifacts that messages name or hold, best first; pointers that lead to none; why results were not stored."""
    last: dict[str, int] = {}
    used: dict[str, int] = {}
    failures: list[str] = []
    for number, message in enumerate(messages):
        for pointer in pointers_in(shapes.dumped(message)):
            last[pointer] = number
        for call in known.calls(message):
            found = shapes.arguments(message, call)
            for pointer in pointers_in(shapes.dumped(found[1])) if found else ():
                used[pointer] = used.get(pointer, 0) + 1
        for result in known.results(message):
            outcome = _put(at(message, result.content_path), result, session, policy)
            last |= {ref.pointer: number for ref in outcome.refs} if outcome else {}
            failures += [outcome.failure] if outcome and outcome.failure else []
    refs: dict[str, tuple[Ref, int, int]] = {}
    unresolved = []
    for pointer, number in last.items():
        ref = _ref(session, pointer)
        if ref is None:
            unresolved.append(pointer)
            continue
        _, uses, latest = refs.get(ref.artifact_id, (ref, 0, 0))
        refs[ref.artifact_id] = (ref, uses + used.get(pointer, 0), max(latest, number))
    best = sorted(
        refs.values(), key=lambda one: (not one[0].pinned, -one[1], -one[2], -one[0].size_bytes, one[0].artifact_id)
    )
    return [ref for ref, _, _ in best], unresolved, failures


def _put(content: object, result: Result, session: Session, policy: Policy) -> Outcome | None:
    """Store a result that is over the policy. What is a stub already stays one."""
    rule = policy.tools.get(result.name or "")
    limit: Limit = rule if isinstance(rule, Limit) else policy
    if rule == "never" or not limit.exceeded(plain_text(content) or shapes.dumped(content), policy.count):
        return None
    return session.externalize(content, tool=result.name, call_id=result.call_id, policy=policy)


def _ref(session: Session, pointer: str) -> Ref | None:
    try:
        return session.ref(pointer)
    except AmbiguousPointer:
        return None


def _judged(name: str, session: Session) -> Unresolved | None:
    """What is wrong with a pointer of a summary; None where it resolves. What another session holds answers like what
    does not exist."""
    pointer = SCHEME + name
    if not re.fullmatch(rf"[0-9a-f]{{{MIN_PREFIX},64}}", name):
        shown = pointer if len(pointer) <= 80 else pointer[:80] + "…"
        return Unresolved(shown, "not a pointer", "is no pointer: copy it as it stands in the index")
    try:
        session.coverage(pointer)
    except Expired:
        return Unresolved(pointer, "expired", "has expired: leave it out, or run the tool again")
    except AmbiguousPointer as error:
        return Unresolved(pointer, "ambiguous", f"fits several artifacts: use one of {', '.join(error.candidates[:4])}")
    except CoatcheckError:
        return Unresolved(pointer, "unknown", "is not an artifact of this session: leave it out")
    return None


def _same(wanted: str, name: str) -> bool:
    """Whether a summary's pointer, longer or shorter, is the one of the index."""
    return len(name) >= MIN_PREFIX and (wanted.startswith(name) or name.startswith(wanted))
