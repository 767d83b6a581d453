"""A value and a policy make what a model gets: the value itself where it is small, else a stub.

The store keeps the whole, exactly. Where it fails, the model gets a bounded head and tail that says so. What our own
tools answered is never externalized again.
"""

from __future__ import annotations

from functools import lru_cache

from coatcheck.config import Settings
from coatcheck.externalize.failures import FAILURES
from coatcheck.externalize.mixed import Mixed
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.plain import as_text
from coatcheck.externalize.policy import Limit, Policy
from coatcheck.scope import Scope
from coatcheck.store import Store

__all__ = ["FAILURES", "Limit", "Outcome", "Policy", "configured", "externalize"]


def externalize(
    store: Store, scope: Scope, value: object, *, tool: str | None, call_id: str | None, policy: Policy | None
) -> Outcome:
    """The outcome for a tool's result. Raises nothing where the store fails."""
    policy = policy or configured(store.settings)
    if policy.safe_chars and (not policy.tools or tool not in policy.tools):  # the quick way, which most results go
        if type(value) is str and len(value) <= policy.safe_chars:
            return Outcome(value, value)
        if type(value) is dict and "type" not in value and "content" not in value:
            text = as_text(value)
            if len(text) <= policy.safe_chars:
                return Outcome(text, value)
            return Mixed(store, scope, policy, _label(tool), _label(call_id)).judged(value, text)
    return Mixed(store, scope, policy, _label(tool), _label(call_id)).outcome(value)


@lru_cache(maxsize=64)
def configured(settings: Settings) -> Policy:
    """The policy that settings ask for, where code gives none."""
    said = settings.section("policy")
    rules = {tool: rule if isinstance(rule, str) else Limit(**rule) for tool, rule in said["tools"].items()}
    return Policy(**said | {"tools": rules})


def _label(text: str | None) -> str | None:
    """A tool's name or a call's id as it can be kept: hosts send all sorts, and it must not cost the result."""
    if not text:
        return None
    return (text if text.isascii() else text.encode("utf-8", "replace").decode())[:1_000]
