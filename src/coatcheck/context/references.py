"""What is over a budget becomes a reference: stored whole, with a pointer in its place.

The answer is checked like the question was, so that nothing leaves here that is over. A store that fails makes no
reference, and so it refuses too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coatcheck.context.budget import Budget, Violation, rendered, text_of
from coatcheck.errors import BudgetExceeded, CoatcheckError
from coatcheck.externalize import Policy
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Enforced", "enforce", "inline", "refusal", "surplus"]

_PREVIEWS: Final = (200, 80, 0)
_TOOL: Final = "context"


@dataclass(frozen=True, slots=True)
class Enforced:
    """The parts of a prompt within the budget, `refs` for what became references, and `changes`: what was done, a
    line each. `rest` is the line that stands for chunks that were too many."""

    hot_state: Any = None
    prompt: str | int | None = None
    chunks: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    rest: str | None = None
    refs: tuple[Ref, ...] = ()
    changes: tuple[str, ...] = ()


def enforce(
    budget: Budget,
    *,
    session: Session | None,
    hot_state: Any,
    prompt: str | int | None,
    chunks: Iterable[object],
    artifacts: Iterable[object],
    count: TokenCounter = estimate,
) -> Enforced:
    chunks, artifacts = _held(chunks), _held(artifacts)
    violations = budget.check(hot_state=hot_state, prompt=prompt, chunks=chunks, artifacts=artifacts, count=count)
    if not violations:
        return Enforced(hot_state, prompt, _texts(chunks), _texts(artifacts))
    if session is None or any(one.ambiguous for one in violations):
        raise refusal(violations)
    refs: list[Ref] = []
    changes: list[str] = []
    said = {one.field for one in violations}
    if said & {"max_hot_state_tokens", "max_artifact_index_entries"}:
        hot_state = _smaller(budget, session, hot_state, count, refs, changes)
    kept, rest = surplus(budget, session, _texts(chunks), refs, changes)
    within = tuple(inline(budget, session, text, "retrieved chunk", refs, changes) for text in kept)
    shown = tuple(inline(budget, session, text, "inline artifact", refs, changes) for text in _texts(artifacts))
    left = budget.check(hot_state=hot_state, prompt=prompt, chunks=within, artifacts=shown, count=count)
    if left:
        raise refusal(left)
    return Enforced(hot_state, prompt, within, shown, rest, tuple(refs), tuple(changes))


def refusal(violations: Iterable[Violation]) -> BudgetExceeded:
    """The error for these violations: the first in words, and how many there are."""
    all_of_them = tuple(violations)
    more = f", and {len(all_of_them) - 1} more" if len(all_of_them) > 1 else ""
    hint = "check the token counter: a budget that cannot be counted is violated"
    ambiguous = any(one.ambiguous for one in all_of_them)
    return BudgetExceeded(all_of_them[0].message + more, all_of_them, hint=hint if ambiguous else None)


def inline(budget: Budget, session: Session, text: str, what: str, refs: list[Ref], changes: list[str]) -> str:
    """A text that may stand inline, or a stub of it that may."""
    limit = budget.max_inline_artifact_chars
    if len(text) <= limit:
        return text
    said = text
    for preview in _PREVIEWS:
        outcome = session.externalize(text, tool=_TOOL, policy=Policy(max_chars=limit, preview_chars=preview))
        said = outcome.text
        if outcome.ref is None:
            break  # the store failed: what it answers is a head and tail, and the check that follows judges it
        if len(said) <= limit:
            refs.append(outcome.ref)
            changes.append(f"{what} of {len(text):,} characters became {outcome.ref.pointer}")
            break
    return said


def surplus(
    budget: Budget, session: Session, chunks: tuple[str, ...], refs: list[Ref], changes: list[str]
) -> tuple[tuple[str, ...], str | None]:
    """As many chunks as there may be, and one line of pointers for the rest."""
    most = budget.max_rag_chunks
    if len(chunks) <= most:
        return chunks, None
    over = chunks[most:]
    try:
        rest = [session.put(chunk, tool=_TOOL, kind="doc") for chunk in over]
    except CoatcheckError as error:  # a store that fails costs the chunks that are too many, not the prompt
        changes.append(f"{len(over)} of {len(chunks)} retrieved chunks are left out: {error.message}")
        return chunks[:most], f"{len(over)} more retrieved chunks are left out: they could not be stored."
    refs += rest
    changes.append(f"{len(rest)} of {len(chunks)} retrieved chunks became pointers")
    pointers = list(dict.fromkeys(ref.pointer for ref in rest))
    line = f"{len(rest)} more retrieved chunks, stored and not shown: "
    room = budget.max_inline_artifact_chars - len(line) - 40
    shown = pointers[: max(0, room // (len(pointers[0]) + 1))]
    left = len(pointers) - len(shown)
    return chunks[:most], line + " ".join(shown) + (f" and {left} others, see list_artifacts" if left else "")


def _smaller(
    budget: Budget, session: Session, hot_state: Any, count: TokenCounter, refs: list[Ref], changes: list[str]
) -> Any:
    """A hot state within its limits: degraded by its own rules where it has them, else a stub of it."""
    fitted = getattr(hot_state, "fitted", None)
    if callable(fitted):
        return fitted(budget, count=count)
    text, _ = rendered(hot_state)
    assert text is not None, "what cannot be rendered is ambiguous, and was refused"
    for preview in _PREVIEWS:
        policy = Policy(tools={_TOOL: "always"}, preview_chars=preview)
        outcome = session.externalize(text, tool=_TOOL, policy=policy)
        tokens = counted(count, outcome.text)
        if outcome.ref is not None and tokens is not None and tokens <= budget.max_hot_state_tokens:
            refs.append(outcome.ref)
            changes.append(f"the hot state became {outcome.ref.pointer}")
            return outcome.text
    return hot_state


def _held(parts: Iterable[object]) -> Any:
    """The parts as they can be looked at twice. What is no list of parts stays, for the check to say so."""
    return parts if isinstance(parts, str | bytes) or not isinstance(parts, Iterable) else list(parts)


def _texts(parts: Iterable[object]) -> tuple[str, ...]:
    return tuple(text for text in map(text_of, parts) if text is not None)
