"""Counts that can be trusted, or none: whatever a host's tokenizer does, a budget is never kept by accident.

Every check of this package counts through `counted`. Its answer None means "could not be counted", and a budget that
cannot be counted is a budget that is violated.
"""

from __future__ import annotations

import math
from operator import index

from coatcheck.tokens import TokenCounter

__all__ = ["counted"]


def counted(count: TokenCounter, text: str) -> int | None:
    """The tokens of a text by this counter, rounded up; None where the counter raises, or answers what cannot be a
    count: None, a bool, what is no number, not a number, infinite, negative, or 0 for a text that is not empty."""
    try:
        found: object = count(text)
        if isinstance(found, bool):
            return None
        tokens = math.ceil(found) if isinstance(found, float) else index(found)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever a host's counter raises: no count is no count
        return None
    return None if tokens < 0 or (tokens == 0 and text) else tokens
