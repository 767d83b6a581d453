"""The compaction safeguard: keep pointers when a conversation is summarized.

Before a host drops messages, `safeguard` makes an index of their artifacts, which the summary must
contain. When the summary is written, `check_summary` finds pointers that do not resolve, and
entries of the index that are missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from coatcheck.checks import whole
from coatcheck.errors import AmbiguousPointer, CoatcheckError, Expired
from coatcheck.externalize import configured
from coatcheck.externalize.judge import leaving
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.policy import READ_TOOL, Policy
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.ids import MIN_PREFIX, SCHEME
from coatcheck.messages import Format, Message
from coatcheck.messages.content import arguments_of, dumped, plain_text
from coatcheck.messages.paths import at
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.transcript.placeholders import line_of, pointers_in
from coatcheck.transcript.prune import format_of

LIST_TOOL: Final = "list_artifacts"
_CLAIMED: Final = re.compile(r"(?<![0-9A-Za-z])art:([0-9A-Za-z]{1,80})")
_MAX_LISTED: Final = 50
_LAST_LINE: Final = 160  # characters reserved for the last line

Reason = Literal["unknown", "expired", "ambiguous", "not a pointer"]


@dataclass(frozen=True, slots=True)
class Index:
    """The artifacts that a summary must mention, most important first, one line each.

    `text` goes into the summary as it is. `pointers` are those in it, `left_out` did not fit.
    `unresolved` pointers occur in the messages, and this session cannot read them. `failures` says
    why a result could not be stored: keep its message."""

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
class PointerProblem:
    """A pointer that does not resolve, and why."""

    pointer: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class SummaryCheck:
    """What is wrong with the pointers of a summary: those that do not resolve, and those of the
    index that are missing. `more` counts what is not listed. `str()` describes the problems so that
    a model can fix them."""

    unresolved: tuple[PointerProblem, ...] = ()
    lost: tuple[str, ...] = ()
    more: int = 0
    found: int = field(default=0, compare=False)

    @property
    def ok(self) -> bool:
        return not self.unresolved and not self.lost

    def __str__(self) -> str:
        if self.ok:
            return (
                f"all {self.found} pointers of the summary resolve"
                if self.found
                else "the summary has no pointers"
            )
        problems = [f"{one.pointer}: {one.message}" for one in self.unresolved]
        problems += [
            f"{pointer}: was in the index and is not in the summary; add it"
            for pointer in self.lost
        ]
        return "\n".join([*problems, *([f"and {self.more} more"] if self.more else [])])


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
    """Return an index of the artifacts in messages that a host is about to drop. Results over the
    policy that are still inline are put first, so that they are not lost with the messages.

    Pinned artifacts come first, then those that calls used most, the latest, the largest. The index
    has at most `max_items` lines and `max_chars` characters; the last line says how many more there
    are, and how to list them."""
    whole(max_items, "max_items")
    whole(max_chars, "max_chars", least=_LAST_LINE)
    fmt = format_of(dropped_messages, format)
    policy = policy or configured(session.store.settings)
    mentions = _mentions(dropped_messages, session, fmt, policy)
    ranked, unresolved = _ranked(mentions, session)
    failures = mentions.failures
    if not ranked:
        return Index("", unresolved=tuple(unresolved), failures=tuple(failures))
    head = (
        f"Artifacts of the earlier conversation{f' ({read_tool} reads them)' if read_tool else ''}:"
    )
    lines, used = [head], len(head) + _LAST_LINE
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


def check_summary(
    text: str, session: Session, *, index: Index | Iterable[str] = ()
) -> SummaryCheck:
    """Check that every pointer in a summary resolves in this session, and that it has every pointer
    of the index."""
    claimed = list(dict.fromkeys(match[1] for match in _CLAIMED.finditer(text)))
    wrong = [one for one in (_checked(name, session) for name in claimed) if one is not None]
    wanted = index.pointers if isinstance(index, Index) else tuple(index)
    names = [name.lower() for name in claimed]
    lost = [
        one for one in wanted if not any(_same(one.removeprefix(SCHEME), name) for name in names)
    ]
    more = max(0, len(wrong) - _MAX_LISTED) + max(0, len(lost) - _MAX_LISTED)
    return SummaryCheck(tuple(wrong[:_MAX_LISTED]), tuple(lost[:_MAX_LISTED]), more, len(claimed))


@dataclass(slots=True)
class _Mentions:
    """Where the messages mention pointers: in which message last, and how often in calls."""

    last: dict[str, int] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, number: int, outcome: Outcome) -> None:
        """Note what a result of this message was stored as."""
        self.last |= {ref.pointer: number for ref in outcome.refs}
        if outcome.failure:
            self.failures.append(outcome.failure)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An artifact of the messages, how often calls used it, and its last message."""

    ref: Ref
    uses: int
    last: int

    @property
    def rank(self) -> tuple[bool, int, int, int, str]:
        """Sorts the most important first."""
        ref = self.ref
        return (not ref.pinned, -self.uses, -self.last, -ref.size_bytes, ref.artifact_id)


def _ranked(mentions: _Mentions, session: Session) -> tuple[list[Ref], list[str]]:
    """Return the mentioned artifacts, most important first, and the pointers that do not
    resolve."""
    found: dict[str, _Candidate] = {}
    unresolved: list[str] = []
    for pointer, number in mentions.last.items():
        ref = None
        with suppress(AmbiguousPointer):
            ref = session.ref(pointer)
        if ref is None:
            unresolved.append(pointer)
            continue
        uses, last = mentions.uses[pointer], number
        before = found.get(ref.artifact_id)
        if before is not None:  # by a pointer of another length
            uses, last = before.uses + uses, max(before.last, last)
        found[ref.artifact_id] = _Candidate(ref, uses, last)
    ranked = sorted(found.values(), key=lambda one: one.rank)
    return [one.ref for one in ranked], unresolved


def _mentions(
    messages: Sequence[Message], session: Session, fmt: Format, policy: Policy
) -> _Mentions:
    """Return the pointers in messages. Results over the policy that are still inline are stored,
    and count as mentioned."""
    found = _Mentions()
    tools: dict[str, str] = {}
    for number, line in enumerate(messages):
        found.last |= dict.fromkeys(pointers_in(dumped(line)), number)
        message = fmt.inner(line) or {}
        for call in fmt.calls(message):
            tools[call.id] = call.name
            arguments = arguments_of(message, call)
            if arguments is not None:
                found.uses.update(pointers_in(dumped(arguments[1])))
        for result in (*fmt.results(message), *fmt.outputs(message)):
            tool = result.name or tools.get(result.call_id)
            content = at(message, result.content_path)
            text = plain_text(content) or dumped(content)
            if leaving(session.store, policy, [(tool, text)])[0]:
                outcome = session.externalize(
                    content, tool=tool, call_id=result.call_id, policy=policy, source=UNCOUNTED
                )
                found.add(number, outcome)
    return found


def _checked(name: str, session: Session) -> PointerProblem | None:
    """Return what is wrong with a pointer of a summary, or None if it resolves. A pointer of
    another session is reported exactly like one that does not exist."""
    pointer = SCHEME + name
    if not re.fullmatch(rf"[0-9a-f]{{{MIN_PREFIX},64}}", name):
        shown = pointer if len(pointer) <= 80 else pointer[:80] + "…"
        return PointerProblem(
            shown, "not a pointer", "is not a pointer: copy it exactly from the index"
        )
    try:
        session.coverage(pointer)
    except Expired:
        return PointerProblem(
            pointer, "expired", "has expired: leave it out, or run the tool again"
        )
    except AmbiguousPointer as error:
        return PointerProblem(
            pointer,
            "ambiguous",
            f"matches several artifacts: use one of {', '.join(error.candidates[:4])}",
        )
    except CoatcheckError:
        return PointerProblem(
            pointer, "unknown", "is not an artifact of this session: leave it out"
        )
    return None


def _same(wanted: str, name: str) -> bool:
    """Whether two pointers match, one of which may be longer."""
    return len(name) >= MIN_PREFIX and (wanted.startswith(name) or name.startswith(wanted))
