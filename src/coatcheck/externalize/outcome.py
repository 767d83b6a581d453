"""What became of a value: `Outcome`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coatcheck.externalize.decision import Decision, Estimate
from coatcheck.refs import Ref
from coatcheck.tokens import estimate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a value.

    `text` is what the model gets, as a string. `content` is the same in the shape of the value: the
    value itself if it is small, else the stub, or the list of blocks with stubs in it. `ref` is the
    stored artifact, None if the value stayed inline; `refs` has one for each stored block.
    `failure` says why nothing could be stored. `why` is the decision behind it: sizes, expected
    reads and costs. `has_scaled_image` is True if an image that the provider would refuse was
    scaled down."""

    text: str
    content: Any
    ref: Ref | None = None
    refs: tuple[Ref, ...] = ()
    is_stub: bool = False
    failure: str | None = None
    has_scaled_image: bool = False
    stored_tokens: int = field(default=0, repr=False, compare=False)
    """Tokens of what left the context."""
    stubs: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """The texts that replaced it."""
    basis: Basis | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> Decision | None:
        """Why the value left or stayed. None if it did not go through a policy, such as a part of a
        transcript."""
        if self.basis is None:
            return None
        left = bool(self.refs or self.failure)
        return self.basis.decision(self.stored_tokens if left else estimate(self.text), left)

    @property
    def tokens_saved(self) -> int:
        """Estimate of the tokens that the model does not get."""
        return max(0, self.stored_tokens - sum(map(estimate, self.stubs)))

    @classmethod
    def of_parts(cls, text: str, content: Any, parts: Sequence[Outcome]) -> Outcome:
        """Combine the outcomes of the parts of a value."""
        refs = tuple(ref for one in parts for ref in one.refs)
        return cls(
            text,
            content,
            ref=refs[0] if refs else None,
            refs=refs,
            is_stub=any(one.is_stub for one in parts),
            failure=next((one.failure for one in parts if one.failure), None),
            has_scaled_image=any(one.has_scaled_image for one in parts),
            stored_tokens=sum(one.stored_tokens for one in parts),
            stubs=tuple(stub for one in parts for stub in one.stubs),
        )


@dataclass(frozen=True, slots=True)
class Basis:
    """What decided an outcome: a reason, the limit in tokens, and the expected costs if they
    decided."""

    reason: str
    limit: int | None = None
    expected: Estimate | None = None

    def decision(self, tokens: int, left: bool) -> Decision:
        if self.expected is None or self.limit is None:
            return Decision(leaves=left, reason=self.reason, tokens=tokens, limit_tokens=self.limit)
        return replace(self.expected.decided(tokens, self.limit), leaves=left)


SMALL = Basis("small")
