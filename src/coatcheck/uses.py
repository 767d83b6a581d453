"""When sessions and blobs were last used, and what was shown of them: kept in memory, written in batches.

A read must not cost a write, and yet keep its session alive. So uses are noted here and flushed by a timer, well before
the session could expire for want of them, and on close.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from coatcheck.errors import StoreError
from coatcheck.storage import Catalog, Ranges, merged
from coatcheck.storage.forks import watch

_SLOWEST = 30.0
_QUICKEST = 0.05


class Uses:
    """The uses that the catalog does not know of yet."""

    rank = 0

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._sessions: dict[str, float] = {}
        self._blobs: dict[str, float] = {}
        self._shown: dict[tuple[str, str], Ranges] = {}
        self._last: dict[str, float] = {}
        self._timer: threading.Timer | None = None
        self._due = 0.0
        watch(self)

    def note(self, lineage: Iterable[str], now: float, ttl: float | None, digest: str | None = None) -> None:
        """A session and its ancestors were used, and perhaps a blob."""
        for session_id in lineage:
            self._sessions[session_id] = self._last[session_id] = now
        if digest is not None:
            self._blobs[digest] = now
        delay = _SLOWEST if ttl is None else min(_SLOWEST, max(_QUICKEST, ttl / 10))
        if self._timer is None or now + delay < self._due or not self._timer.is_alive():
            self._schedule(now, delay)

    def show(self, session_id: str, digest: str, start: int, end: int) -> None:
        """A session has seen these bytes of an artifact. Call `note` as well: that is what sets the timer."""
        with self._lock:
            key = (session_id, digest)
            self._shown[key] = merged([*self._shown.get(key, ()), (start, end)])

    def shown(self, session_id: str, digest: str) -> Ranges:
        """Which bytes a session has seen that the catalog may not know of yet."""
        return self._shown.get((session_id, digest), ())

    def last(self, session_id: str) -> float:
        """When this process last used a session; 0 where it did not."""
        return self._last.get(session_id, 0.0)

    def flush(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            sessions, self._sessions = self._sessions, {}
            blobs, self._blobs = self._blobs, {}
            shown, self._shown = self._shown, {}
        if sessions or blobs or shown:
            # A store that cannot be written to right now keeps serving reads; these uses count in this process.
            with contextlib.suppress(StoreError):
                self._catalog.touch(sessions, blobs, shown)

    def _schedule(self, now: float, delay: float) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._due = now + delay
            self._timer = threading.Timer(delay, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def pause(self) -> None:
        self._lock.acquire()

    def resume(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._timer = None  # its thread is the parent's
        self._lock.release()
