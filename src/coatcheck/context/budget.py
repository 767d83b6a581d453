"""How much a prompt may hold, checked so that it fails closed: what cannot be counted is over.

`check` says all that is wrong at once. `enforce` lets nothing over the budget through: it turns what is too large into
references, checks again, and refuses what still does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.tokens import LARGEST, TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.context.references import Enforced
    from coatcheck.session import Session

__all__ = ["Budget", "Violation"]

_AT_LEAST_ONE: Final = frozenset({"max_hot_state_tokens", "max_prompt_tokens", "max_inline_artifact_chars"})


@dataclass(frozen=True, slots=True)
class Violation:
    """One limit that does not hold. `actual` is None, and `ambiguous` set, where it could not be counted."""

    field: str
    limit: float | int
    actual: float | int | None
    message: str
    ambiguous: bool = False

    def to_record(self) -> dict[str, Any]:
        return {
            "field": self.field, "limit": self.limit, "actual": self.actual, "message": self.message,
            "ambiguous": self.ambiguous,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one prompt. All are upper bounds that may be reached; entries and chunks may be limited to none."""

    max_hot_state_tokens: int = 1_000
    max_artifact_index_entries: int = 20
    max_prompt_tokens: int = 8_000
    max_rag_chunks: int = 10
    max_inline_artifact_chars: int = 2_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            least = 1 if field.name in _AT_LEAST_ONE else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgument(f"{field.name} is {clip(repr(value))}", hint=f"a whole number from {least} on")

    def check(
        self,
        *,
        hot_state: object = None,
        prompt: str | int | None = None,
        chunks: Iterable[object] = (),
        artifacts: Iterable[object] = (),
        count: TokenCounter = estimate,
    ) -> tuple[Violation, ...]:
        """Every violation, in the order of the fields; empty where all is within the budget. Never raises.

        `hot_state` is a `HotState`, its rendered JSON, or the mapping that it is made of. `prompt` is the text of the
        whole prompt, or how many tokens it has. `chunks` are what was retrieved, `artifacts` what stands inline of
        artifacts: texts, or objects with a `text`. What is not given is not checked."""
        found: list[Violation] = []
        if hot_state is not None:
            text, entries = rendered(hot_state)
            found += self.hot_state_tokens(None if text is None else counted(count, text))
            found += self.index_entries(entries)
        if prompt is not None:
            found += self.prompt_tokens(counted(count, prompt) if isinstance(prompt, str) else prompt)
        retrieved = _listed(chunks)
        found += _judged(
            "max_rag_chunks", self.max_rag_chunks, None if retrieved is None else len(retrieved), "{} retrieved chunks"
        )
        found += self.inline_chars("retrieved chunk", retrieved or [])
        inline = _listed(artifacts)
        found += self.inline_chars("inline artifact", [None] if inline is None else inline)
        return tuple(found)

    def enforce(
        self,
        *,
        session: Session | None = None,
        hot_state: Any = None,
        prompt: str | int | None = None,
        chunks: Iterable[object] = (),
        artifacts: Iterable[object] = (),
        count: TokenCounter = estimate,
    ) -> Enforced:
        """The same parts, within the budget, or `BudgetExceeded` with every violation that is left.

        With a session, what is too large is stored there and a reference takes its place: the stub of a chunk or an
        inline artifact, one line for the chunks that are too many, fewer words of a hot state. Without one, and where
        something could not be counted, it refuses."""
        from coatcheck.context.references import enforce

        return enforce(
            self, session=session, hot_state=hot_state, prompt=prompt, chunks=chunks, artifacts=artifacts, count=count
        )

    # One field each: for whoever has counted already. A count that is no count is a violation.

    def hot_state_tokens(self, tokens: object) -> tuple[Violation, ...]:
        return _judged("max_hot_state_tokens", self.max_hot_state_tokens, tokens, "a hot state of {} tokens")

    def index_entries(self, entries: object) -> tuple[Violation, ...]:
        limit = self.max_artifact_index_entries
        return _judged("max_artifact_index_entries", limit, entries, "an artifact index of {} entries")

    def prompt_tokens(self, tokens: object) -> tuple[Violation, ...]:
        return _judged("max_prompt_tokens", self.max_prompt_tokens, tokens, "a prompt of {} tokens")

    def inline_chars(self, what: str, parts: Sequence[object]) -> list[Violation]:
        """A violation for each part that is too long to stand inline, or of which nobody can say how long it is."""
        found: list[Violation] = []
        for number, part in enumerate(parts, 1):
            text = text_of(part)
            length = None if text is None else len(text)
            said = f"{what} {number} of {{}} characters"
            found += _judged("max_inline_artifact_chars", self.max_inline_artifact_chars, length, said)
        return found


def rendered(hot_state: object) -> tuple[str | None, int | None]:
    """A hot state's JSON and the entries of its index, each None where it cannot be told."""
    text: object = hot_state
    try:
        if not isinstance(hot_state, str):
            render = getattr(hot_state, "render", None)
            text = render() if callable(render) else json.dumps(hot_state, ensure_ascii=False, separators=(",", ":"))
        if not isinstance(text, str):
            return None, None
        state = json.loads(text)
    except Exception:  # noqa: BLE001 - a state of the host's own making: what cannot be read cannot be counted
        return (text, None) if isinstance(text, str) else (None, None)
    entries = state.get("artifact_index", []) if isinstance(state, Mapping) else None
    return text, len(entries) if isinstance(entries, list) else None


def text_of(part: object) -> str | None:
    """The text of a chunk or an inline artifact: itself, or what it has as `text` or `passage`; None where neither."""
    if isinstance(part, str):
        return part
    for name in ("text", "passage"):
        try:
            held = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        except Exception:  # noqa: BLE001 - a class of the host's own: what cannot be read cannot be counted
            return None
        if isinstance(held, str):
            return held
    return None


def _listed(parts: object) -> list[object] | None:
    if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
        return None
    try:
        return list(parts)
    except Exception:  # noqa: BLE001 - an iterator of the host's own
        return None


def _judged(field: str, limit: int, actual: object, said: str) -> tuple[Violation, ...]:
    number = isinstance(actual, int | float) and not isinstance(actual, bool) and 0 <= actual <= LARGEST
    if not number or not isinstance(actual, int | float):
        message = f"{said.format('an unknown number of')}: it could not be counted, and {field} is {limit:,}"
        return (Violation(field, limit, None, message, True),)
    if actual <= limit:
        return ()
    return (Violation(field, limit, actual, f"{said.format(f'{actual:,}')} is over {field} ({limit:,})"),)
