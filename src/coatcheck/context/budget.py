"""Limits on what a prompt may contain. They fail closed: what cannot be counted is over the limit.

`check` reports every violation at once. `enforce` returns parts that are within the budget, or
raises: it stores parts that are too large, replaces them by references and checks again. If the
store fails, it raises too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from coatcheck.checks import whole
from coatcheck.errors import BudgetExceeded, CoatcheckError
from coatcheck.externalize import Outcome, Policy, configured
from coatcheck.externalize.savings import UNCOUNTED
from coatcheck.externalize.storing import put
from coatcheck.intake import About
from coatcheck.models import model
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.shrink import first_that_fits
from coatcheck.tokens import LARGEST, TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.session import Session

_LOG: Final = logging.getLogger("coatcheck")
_AT_LEAST_ONE: Final = frozenset(
    {"max_hot_state_tokens", "max_prompt_tokens", "max_inline_artifact_chars"}
)
_PREVIEWS: Final = (200, 80, 0)
_TOOL: Final = "context"
_ANSWER: Final = 10  # the part (1/10) of a window that is left for the answer


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that is exceeded. If the value could not be counted, `actual` is None and `ambiguous`
    is set."""

    field: str
    limit: float | int
    actual: float | int | None
    message: str
    ambiguous: bool = False

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A hot state as it goes into a prompt: one line of JSON, its size, and each step that made it
    fit.

    `entries` is the number of artifacts in its index, `types` are their kinds in that order."""

    text: str
    tokens: int
    bytes: int
    steps: tuple[str, ...] = ()
    entries: int = 0
    types: tuple[str, ...] = ()

    def render(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Enforced:
    """Parts of a prompt that are within the budget. `refs` are the stored parts, `changes` has one
    line for each change, and `rest` is the line that replaces surplus chunks."""

    hot_state: Any = None
    prompt: str | int | None = None
    chunks: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    rest: str | None = None
    refs: tuple[Ref, ...] = ()
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one prompt, all inclusive. The limits on entries and chunks may be 0."""

    max_hot_state_tokens: int = 1_000
    max_artifact_index_entries: int = 20
    max_prompt_tokens: int = 8_000
    max_rag_chunks: int = 10
    max_inline_artifact_chars: int = 2_000

    def __post_init__(self) -> None:
        for one in fields(self):
            whole(getattr(self, one.name), one.name, least=1 if one.name in _AT_LEAST_ONE else 0)

    @classmethod
    def for_model(
        cls, name: str | None = None, *, window: int | None = None, **limits: int
    ) -> Budget:
        """Return the budget for the context window of a model, by its name: nine tenths of it, so
        that an answer fits. An unknown model has 200,000 tokens; `window` replaces what is known.
        `limits` are the other limits."""
        whole(window, "window", least=1, optional=True)
        tokens = model(name).window if window is None else window
        return cls(**{"max_prompt_tokens": tokens - tokens // _ANSWER} | limits)

    def check(
        self,
        *,
        hot_state: object = None,
        prompt: str | int | None = None,
        chunks: Iterable[object] = (),
        artifacts: Iterable[object] = (),
        count: TokenCounter = estimate,
    ) -> tuple[Violation, ...]:
        """Return every violation in the order of the fields, or an empty tuple. Never raises.

        `hot_state` is a `HotState`, its JSON, or a mapping. `prompt` is the text of the whole
        prompt, or its number of tokens. `chunks` are retrieved texts, `artifacts` inline texts of
        artifacts: strings, or objects with a `text`. Omitted parts are not checked."""
        found: list[Violation] = []
        if hot_state is not None:
            text, types = rendered(hot_state)
            found += self.hot_state_tokens(None if text is None else counted(count, text))
            entries = None if types is None else len(types)
            limit = self.max_artifact_index_entries
            found += _judged(
                "max_artifact_index_entries", limit, entries, "an artifact index of {} entries"
            )
        if prompt is not None:
            found += self.prompt_tokens(
                counted(count, prompt) if isinstance(prompt, str) else prompt
            )
        retrieved, inline = listed(chunks), listed(artifacts)
        number = None if retrieved is None else len(retrieved)
        found += _judged("max_rag_chunks", self.max_rag_chunks, number, "{} retrieved chunks")
        found += self.inline_chars("retrieved chunk", retrieved or [])
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
        policy: Policy | None = None,
    ) -> Enforced:
        """Return the same parts within the budget, or raise `BudgetExceeded` with every remaining
        violation.

        With a session, parts that are too large are stored there and replaced by references: a
        chunk or an inline artifact by its stub, surplus chunks by one line, a hot state by a
        shorter one. `policy` says whether secrets are masked first, and what stubs look like; by
        default the store's setting. Without a session, or if anything could not be counted, it
        raises."""
        parts: dict[str, Any] = {
            "chunks": listed(chunks),
            "artifacts": listed(artifacts),
        }  # an iterator is used up
        violations = self.check(hot_state=hot_state, prompt=prompt, count=count, **parts)
        texts, inline = (
            tuple(text for one in part or () if (text := text_of(one)) is not None)
            for part in parts.values()
        )
        if not violations:
            return Enforced(hot_state, prompt, texts, inline)
        log_violations(violations, None if session is None else session.session_id)
        if session is None or any(one.ambiguous for one in violations):
            raise refusal(violations)
        make = References(self, session, policy or configured(session.store.settings))
        if {one.field for one in violations} & {
            "max_hot_state_tokens",
            "max_artifact_index_entries",
        }:
            hot_state = make.smaller(hot_state, self, count)
        kept, rest = make.surplus(texts)
        within = tuple(make.inline(text, "retrieved chunk") for text in kept)
        shown = tuple(make.inline(text, "inline artifact") for text in inline)
        left = self.check(
            hot_state=hot_state, prompt=prompt, chunks=within, artifacts=shown, count=count
        )
        if left:
            raise refusal(left)
        return Enforced(
            hot_state, prompt, within, shown, rest, tuple(make.refs), tuple(make.changes)
        )

    # Checks of one field, for callers that have counted already. An invalid count is a violation.

    def hot_state_tokens(self, tokens: object) -> tuple[Violation, ...]:
        return _judged(
            "max_hot_state_tokens", self.max_hot_state_tokens, tokens, "a hot state of {} tokens"
        )

    def prompt_tokens(self, tokens: object) -> tuple[Violation, ...]:
        return _judged("max_prompt_tokens", self.max_prompt_tokens, tokens, "a prompt of {} tokens")

    def inline_chars(self, what: str, parts: Sequence[object]) -> list[Violation]:
        """Return a violation for each part that is too long, or whose length is unknown."""
        found: list[Violation] = []
        for number, part in enumerate(parts, 1):
            text = text_of(part)
            length = None if text is None else len(text)
            words = f"{what} {number} of {{}} characters"
            found += _judged(
                "max_inline_artifact_chars", self.max_inline_artifact_chars, length, words
            )
        return found


@dataclass(slots=True)
class References:
    """Replaces parts that are over the budget by references, and collects their `refs` and the
    `changes`."""

    budget: Budget
    session: Session
    policy: Policy
    list_tool: str | None = "list_artifacts"
    refs: list[Ref] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def inline(self, text: str, what: str) -> str:
        """Return a text that may be shown inline, or its stub with the longest preview that
        fits."""
        limit = self.budget.max_inline_artifact_chars
        if len(text) <= limit:
            return text
        outcomes = self._stubs(text, max_chars=limit, max_tokens=None, max_bytes=None, tools={})
        # Without a ref the store failed: it is a head and tail, and the next check decides.
        outcome = first_that_fits(outcomes, lambda one: one.ref is None or len(one.text) <= limit)
        if outcome.ref is not None and len(outcome.text) <= limit:
            self.refs.append(outcome.ref)
            self.changes.append(f"{what} of {len(text):,} characters became {outcome.ref.pointer}")
        return outcome.text

    def surplus(self, chunks: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Return the chunks that the budget allows, and one line of pointers for the others."""
        most = self.budget.max_rag_chunks
        if len(chunks) <= most:
            return chunks, None
        over = chunks[most:]
        try:
            rest = [
                put(self.session, chunk, About(tool=_TOOL, kind="doc"), self.policy)
                for chunk in over
            ]
        except CoatcheckError as error:  # a failing store must not prevent the prompt
            self.changes.append(
                f"{len(over)} of {len(chunks)} retrieved chunks are left out: {error.message}"
            )
            return chunks[
                :most
            ], f"{len(over)} more retrieved chunks are left out: they could not be stored."
        self.refs += rest
        self.changes.append(f"{len(rest)} of {len(chunks)} retrieved chunks became pointers")
        pointers = list(dict.fromkeys(ref.pointer for ref in rest))
        line = f"{len(rest)} more retrieved chunks, stored and not shown: "
        room = self.budget.max_inline_artifact_chars - len(line) - 40
        shown = pointers[: max(0, room // (len(pointers[0]) + 1))]
        left = len(pointers) - len(shown)
        see = f", see {self.list_tool}" if self.list_tool else ""
        return chunks[:most], line + " ".join(shown) + (f" and {left} others{see}" if left else "")

    def smaller(self, hot_state: Any, budget: Budget, count: TokenCounter) -> Any:
        """Return a hot state within a budget: shortened by its own `fitted` method, else as a stub;
        unchanged if nothing fits."""
        fitted = getattr(hot_state, "fitted", None)
        if callable(fitted):
            return fitted(budget, count=count)
        text, _ = rendered(hot_state)
        assert text is not None, "a state that cannot be rendered is ambiguous and was refused"

        def fits(outcome: Outcome) -> bool:
            tokens = counted(count, outcome.text)
            return (
                outcome.ref is not None
                and tokens is not None
                and tokens <= budget.max_hot_state_tokens
            )

        outcome = first_that_fits(self._stubs(text, tools={_TOOL: "always"}), fits)
        if outcome.ref is None or not fits(outcome):
            return hot_state
        self.refs.append(outcome.ref)
        self.changes.append(f"the hot state became {outcome.ref.pointer}")
        return outcome.text

    def _stubs(self, text: str, **changes: Any) -> Iterator[Outcome]:
        """Yield the outcomes of externalizing a text, with shorter and shorter previews."""
        for preview in _PREVIEWS:
            policy = replace(self.policy, enabled=True, preview_chars=preview, **changes)
            yield self.session.externalize(text, tool=_TOOL, policy=policy, source=UNCOUNTED)


def log_violations(violations: Iterable[Violation], session_id: str | None = None) -> None:
    """Log a warning for each violation. Called once by `Budget.enforce` or a `PromptBuilder`."""
    for one in violations:
        where = "" if session_id is None else f"session {mask(ascii(session_id))[:200]}: "
        _LOG.warning("%s%s", where, one.message)


def refusal(violations: Iterable[Violation], *, hint: str | None = None) -> BudgetExceeded:
    """Return the error for these violations: the message of the first, and the number of others.
    `hint` says what helps if everything could be counted."""
    found = tuple(violations)
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    if any(one.ambiguous for one in found):
        hint = "check the token counter: a budget that cannot be counted is violated"
    return BudgetExceeded(found[0].message + more, found, hint=hint)


def rendered(hot_state: object) -> tuple[str | None, list[str] | None]:
    """Return a hot state's JSON and the types of its index entries, each None if unknown."""
    text: object = hot_state
    try:
        if not isinstance(hot_state, str):
            render = getattr(hot_state, "render", None)
            text = (
                render()
                if callable(render)
                else json.dumps(hot_state, ensure_ascii=False, separators=(",", ":"))
            )
        state = json.loads(text) if isinstance(text, str) else None
    except Exception:  # noqa: BLE001 - the host's own object: what cannot be read cannot be counted
        state = None
    index = state.get("artifact_index", []) if isinstance(state, Mapping) else None
    types = None
    if isinstance(index, list):
        types = [str(one.get("type") if isinstance(one, Mapping) else None) for one in index]
    return text if isinstance(text, str) else None, types


def text_of(part: object) -> str | None:
    """Return the text of a chunk or an inline artifact: the string itself, or its `text` or
    `passage`; None if it has neither."""
    if isinstance(part, str):
        return part
    for name in ("text", "passage"):
        try:
            value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        except Exception:  # noqa: BLE001 - the host's own class: what cannot be read cannot be counted
            return None
        if isinstance(value, str):
            return value
    return None


def listed(parts: Any) -> list[Any] | None:
    """Return parts as a list, or None if they cannot be listed, which `check` refuses."""
    try:
        return None if isinstance(parts, str | bytes) else list(parts)
    except Exception:  # noqa: BLE001 - an iterator of the host's own
        return None


def _judged(field: str, limit: int, actual: object, words: str) -> tuple[Violation, ...]:
    if (
        not isinstance(actual, int | float)
        or isinstance(actual, bool)
        or not 0 <= actual <= LARGEST
    ):
        message = (
            f"{words.format('an unknown number of')}: it could not be counted, "
            f"and {field} is {limit:,}"
        )
        return (Violation(field, limit, None, message, True),)
    if actual <= limit:
        return ()
    return (
        Violation(
            field, limit, actual, f"{words.format(f'{actual:,}')} is over {field} ({limit:,})"
        ),
    )
