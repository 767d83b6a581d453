"""What is over a budget becomes a reference: stored whole, with a pointer in its place.

The answer is checked like the question was, so that nothing leaves here that is over. A store that fails makes no
reference, and so it refuses too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck.context.budget import Budget, Violation, rendered, text_of
from coatcheck.errors import BudgetExceeded, CoatcheckError
from coatcheck.externalize import Policy, configured
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["Enforced", "References", "enforce", "refusal"]

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
    make = References(budget, session)
    said = {one.field for one in violations}
    if said & {"max_hot_state_tokens", "max_artifact_index_entries"}:
        hot_state = make.smaller(hot_state, budget, count)
    kept, rest = make.surplus(_texts(chunks))
    within = tuple(make.inline(text, "retrieved chunk") for text in kept)
    shown = tuple(make.inline(text, "inline artifact") for text in _texts(artifacts))
    left = budget.check(hot_state=hot_state, prompt=prompt, chunks=within, artifacts=shown, count=count)
    if left:
        raise refusal(left)
    return Enforced(hot_state, prompt, within, shown, rest, tuple(make.refs), tuple(make.changes))


def refusal(violations: Iterable[Violation]) -> BudgetExceeded:
    """The error for these violations: the first in words, and how many there are."""
    all_of_them = tuple(violations)
    more = f", and {len(all_of_them) - 1} more" if len(all_of_them) > 1 else ""
    hint = "check the token counter: a budget that cannot be counted is violated"
    ambiguous = any(one.ambiguous for one in all_of_them)
    return BudgetExceeded(all_of_them[0].message + more, all_of_them, hint=hint if ambiguous else None)


class References:
    """Makes references of what is over a budget. `refs` and `changes` are what it has made so far.

    The policy says which tools the agent has to read them, and whether secrets are masked before they are stored; by
    default it is that of the settings. `list_tool` is what the agent's tool for listing artifacts is called."""

    def __init__(
        self,
        budget: Budget,
        session: Session,
        policy: Policy | None = None,
        *,
        list_tool: str | None = "list_artifacts",
    ) -> None:
        self._budget = budget
        self._session = session
        self._policy = configured(session.store.settings) if policy is None else policy
        self._list_tool = list_tool
        self.refs: list[Ref] = []
        self.changes: list[str] = []

    def inline(self, text: str, what: str) -> str:
        """A text that may stand inline, or a stub of it that may."""
        limit = self._budget.max_inline_artifact_chars
        if len(text) <= limit:
            return text
        said = text
        for preview in _PREVIEWS:
            outcome = self._session.externalize(
                text,
                tool=_TOOL,
                policy=self._brief(preview, max_chars=limit, max_tokens=None, max_bytes=None, tools={}),
            )
            said = outcome.text
            if outcome.ref is None:
                break  # the store failed: what it answers is a head and tail, and the check that follows judges it
            if len(said) <= limit:
                self.refs.append(outcome.ref)
                self.changes.append(f"{what} of {len(text):,} characters became {outcome.ref.pointer}")
                break
        return said

    def surplus(self, chunks: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """As many chunks as there may be, and one line of pointers for the rest."""
        most = self._budget.max_rag_chunks
        if len(chunks) <= most:
            return chunks, None
        over = chunks[most:]
        stored = map(mask, over) if self._policy.redact == "store" else over
        try:
            rest = [self._session.put(chunk, tool=_TOOL, kind="doc") for chunk in stored]
        except CoatcheckError as error:  # a store that fails costs the chunks that are too many, not the prompt
            self.changes.append(f"{len(over)} of {len(chunks)} retrieved chunks are left out: {error.message}")
            return chunks[:most], f"{len(over)} more retrieved chunks are left out: they could not be stored."
        self.refs += rest
        self.changes.append(f"{len(rest)} of {len(chunks)} retrieved chunks became pointers")
        pointers = list(dict.fromkeys(ref.pointer for ref in rest))
        line = f"{len(rest)} more retrieved chunks, stored and not shown: "
        room = self._budget.max_inline_artifact_chars - len(line) - 40
        shown = pointers[: max(0, room // (len(pointers[0]) + 1))]
        left = len(pointers) - len(shown)
        see = f", see {self._list_tool}" if self._list_tool else ""
        return chunks[:most], line + " ".join(shown) + (f" and {left} others{see}" if left else "")

    def smaller(self, hot_state: Any, budget: Budget, count: TokenCounter) -> Any:
        """A hot state within a budget's limits: degraded by its own rules where it has them, else a stub of it; as it
        was where there is none that fits."""
        fitted = getattr(hot_state, "fitted", None)
        if callable(fitted):
            return fitted(budget, count=count)
        text, _ = rendered(hot_state)
        assert text is not None, "what cannot be rendered is ambiguous, and was refused"
        for preview in _PREVIEWS:
            policy = self._brief(preview, tools={_TOOL: "always"})
            outcome = self._session.externalize(text, tool=_TOOL, policy=policy)
            tokens = counted(count, outcome.text)
            if outcome.ref is not None and tokens is not None and tokens <= budget.max_hot_state_tokens:
                self.refs.append(outcome.ref)
                self.changes.append(f"the hot state became {outcome.ref.pointer}")
                return outcome.text
        return hot_state

    def _brief(self, preview_chars: int, **changes: Any) -> Policy:
        return replace(self._policy, enabled=True, preview_chars=preview_chars, **changes)


def _held(parts: Any) -> Any:
    """The parts as they can be looked at twice. What cannot be listed stays nothing that could, for the check to say
    so."""
    try:
        return parts if isinstance(parts, str | bytes) else list(parts)
    except Exception:  # noqa: BLE001 - an iterator of the host's own
        return None


def _texts(parts: Iterable[object]) -> tuple[str, ...]:
    return tuple(text for text in map(text_of, parts) if text is not None)
