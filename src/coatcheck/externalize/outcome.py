"""What became of a value: `Outcome`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coatcheck.refs import Ref
from coatcheck.tokens import estimate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a value.

    `text` is what the model gets, as a string; `content` the same in the shape it came in: the value itself where it is
    small, else the stub, or the list of blocks with stubs in it. `ref` is what was stored, None where it stayed inline;
    `refs` has one for each block. `failure` says why nothing could be stored."""

    text: str
    content: Any
    ref: Ref | None = None
    refs: tuple[Ref, ...] = ()
    is_stub: bool = False
    failure: str | None = None
    _left: int = field(default=0, repr=False, compare=False)
    _stubs: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def tokens_saved(self) -> int:
        """How many tokens the model is spared, by an estimate."""
        return max(0, self._left - sum(map(estimate, self._stubs)))

    @classmethod
    def of_parts(cls, text: str, content: Any, parts: list[Outcome]) -> Outcome:
        """One outcome for what had several."""
        refs = tuple(ref for one in parts for ref in one.refs)
        return cls(
            text,
            content,
            refs[0] if refs else None,
            refs,
            any(one.is_stub for one in parts),
            next((one.failure for one in parts if one.failure), None),
            sum(one._left for one in parts),
            tuple(stub for one in parts for stub in one._stubs),
        )
