"""Decide which texts are so large that they leave the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from coatcheck.core_session import CoreSession
from coatcheck.externalize.decision import Estimate, Situation, expected_costs
from coatcheck.externalize.outcome import Basis
from coatcheck.externalize.policy import MAX_TOKENS, Limit, Policy
from coatcheck.externalize.shorter import sparse
from coatcheck.externalize.stub import NEAR, STUB, is_stub, own_tag
from coatcheck.models import USUAL_PRICES, model
from coatcheck.store import Store
from coatcheck.tokens import Weighed

TOGETHER: Final = 4
"""What stays of a list may have this many times the limit."""

_NUMBER: Final = 12  # characters that a line number and the sign after it may take


class Judge:
    """Judges the texts of one result by the rule for its tool, a limit, or expected costs."""

    def __init__(
        self,
        session: CoreSession,
        policy: Policy,
        tool: str | None,
        call_id: str | None,
        situation: Situation | None = None,
    ) -> None:
        rule = policy.tools.get(tool) if tool else None
        self.policy = policy
        self.always = rule == "always"
        self.never = rule == "never" or not policy.enabled
        self.limit: Limit = rule if isinstance(rule, Limit) else policy
        self.shrink: Callable[[Any], Any] | None = rule if callable(rule) else None
        self.expected: Estimate | None = None
        self.own_answer: str | None = None
        """The tag of the marked answer of our tools that stays in this result."""
        self.may_repeat_own_answer = False
        self._store = session.store
        self._reason = "off" if not policy.enabled else "rule" if isinstance(rule, str) else "limit"
        if not (self.always or self.never or self.limit.is_named):
            self._decide_by_cost(session, tool, call_id, situation)

    def _decide_by_cost(
        self,
        session: CoreSession,
        tool: str | None,
        call_id: str | None,
        situation: Situation | None,
    ) -> None:
        """Set the limit from which a stub is expected to pay off in this conversation."""
        policy = self.policy
        prices = policy.prices
        if prices is None:
            prices = USUAL_PRICES if policy.model is None else model(policy.model).prices
        self.expected, break_even = expected_costs(
            session, tool, situation, prices, policy.expected_calls, call_id
        )
        if self.expected is None:
            self.never, self._reason = True, "report"
        else:
            self.limit = Limit(max_tokens=break_even)

    @property
    def basis(self) -> Basis:
        return Basis(self._reason, self.limit.max_tokens, self.expected)

    @property
    def room(self) -> Limit:
        """The limit for a text that replaces what could not be stored: a break-even says nothing
        about room."""
        return self.limit if self.expected is None else self.policy

    @property
    def image_tokens(self) -> int | None:
        """The limit for an image. A model cannot see a stub of it, so expected costs do not
        decide."""
        return self.limit.tokens if self.expected is None else MAX_TOKENS

    def leaves(self, text: str, size: int | None = None) -> bool:
        """Whether a value leaves, given its text. `size` is its byte size, if that is not the size
        of the text."""
        return self.is_large(text, size) and not self.stays_anyway(text)

    def is_large(self, text: str, size: int | None = None, weighed: Weighed | None = None) -> bool:
        if self.always:
            return True
        return self.limit.exceeded(text, self.policy.count, size=size, weighed=weighed)

    def is_large_together(self, texts: Sequence[str]) -> bool:
        """Whether the texts of a list are too large to stay together."""
        return self.limit.times(TOGETHER).exceeded("\n".join(texts), self.policy.count)

    def stays_anyway(self, text: str) -> bool:
        """Whether a text is a stub, or the first marked answer of our tools in this result. Marks
        can be copied, so a second one is treated like any other text."""
        if text.startswith(STUB) and is_stub(text, self.policy):
            return True
        tag = own_tag(self._store, text) if " ~" in text[:NEAR] else None
        if tag is None:
            return False
        is_repeated = self.may_repeat_own_answer and tag == self.own_answer
        if self.own_answer is not None and not is_repeated:
            return False
        self.own_answer = tag
        return True

    def shorter(self, text: str) -> str | None:
        """Return a shorter form of a text that stays, if the policy leaves that to us."""
        if self.expected is None or not may_be_numbered(text):
            return None
        return sparse(text)


def may_be_numbered(text: str) -> bool:
    """Whether a text may be a listing with a number on every line."""
    return "→" in text[:_NUMBER] or "\t" in text[:_NUMBER]


def leaving(
    store: Store, policy: Policy, texts: Sequence[tuple[str | None, str]], *, sampling: bool = False
) -> list[bool]:
    """Decide for each text, given with its tool, whether it leaves the context. With `sampling`,
    tokens are estimated from samples if they alone decide: for the many texts of a file."""
    if not policy.enabled:
        return [False] * len(texts)
    return [_leaves(store, policy, tool, text, sampling) for tool, text in texts]


def _leaves(store: Store, policy: Policy, tool: str | None, text: str, sampling: bool) -> bool:
    rule = policy.tools.get(tool) if tool else None
    if rule == "never":
        return False
    limit = rule if isinstance(rule, Limit) else policy
    exceeded = limit.probably_exceeded if sampling else limit.exceeded
    if rule != "always" and not exceeded(text, policy.count):
        return False
    if is_stub(text, policy):
        return False
    return " ~" not in text[:NEAR] or own_tag(store, text) is None
