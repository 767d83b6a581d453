"""What a model gets when the store fails: a bounded head and tail that says so. Offloading never breaks the agent.

Failures are counted for the process, and logged once for each store.
"""

from __future__ import annotations

import logging
import threading
from typing import Final
from weakref import WeakSet

from coatcheck.errors import CoatcheckError
from coatcheck.externalize.policy import MAX_TOKENS, Limit
from coatcheck.redaction import mask
from coatcheck.store import Store
from coatcheck.tokens import TokenCounter

_LOG: Final = logging.getLogger("coatcheck")
_REASONS: Final = {
    "store_full": "the store is full",
    "quota_exceeded": "the quota is used up",
    "too_large": "it is larger than the store takes",
    "store_closed": "the store is closed",
}
_LEAST: Final = 80


class Failures:
    """How often offloading failed in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: WeakSet[Store] = WeakSet()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def note(self, store: Store, error: Exception) -> None:
        with self._lock:
            self._count += 1
            is_new = store not in self._told
            self._told.add(store)
        if is_new:
            _LOG.warning("offloading failed, results are cut while it does: %s", mask(f"{store!r}: {error}"))


FAILURES: Final = Failures()


def reason(error: Exception) -> str:
    """Why, in words for a model: nothing of paths or hosts."""
    code = error.code if isinstance(error, CoatcheckError) else "store_error"
    return _REASONS.get(code, f"the store failed ({code})")


def head_and_tail(text: str, why: str, limit: Limit, count: TokenCounter | None, *, sharing: int = 1) -> str:
    """As much of a text as the limit allows, from both ends; less where several share it. A limit too small for the
    words leaves the words."""
    room = (limit.max_chars or limit.max_bytes or 4 * (limit.max_tokens or MAX_TOKENS)) // sharing
    while room >= _LEAST:
        said = _said(text, why, room)
        if not limit.exceeded(said, count):
            return said
        room = room * 3 // 4
    return f"[This result has {len(text):,} characters; storing it failed: {why}. It is not kept, and not shown.]"


def nothing_shown(what: str, why: str) -> str:
    """In place of what is no text."""
    return f"[{what}: storing it failed: {why}. It is not kept, and not shown.]"


def _said(text: str, why: str, room: int) -> str:
    lead = (
        f"[This result has {len(text):,} characters, and storing it failed: {why}. "
        "Only its beginning and end follow; the rest is not kept.]\n"
    )
    cut = f"\n[… {len(text):,} characters left out, not kept …]\n"
    room = max(0, room - len(lead) - len(cut))
    if room >= len(text):
        return lead + text
    first = room - room * 2 // 5
    last = room - first
    cut = f"\n[… {len(text) - room:,} characters left out, not kept …]\n"
    return lead + text[:first] + cut + (text[-last:] if last else "")
