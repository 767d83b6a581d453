"""The last use of sessions and blobs, and the ranges that were shown: collected in memory, written in batches.

A read must not cost a write, but it must keep its session alive. So uses are noted here, and written by a timer well
before the session could expire without them, and on close.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from coatcheck.errors import StoreError
from coatcheck.storage import Catalog, Ranges, merged
from coatcheck.storage.forks import Mutex, watch

_SLOWEST = 30.0
_QUICKEST = 0.05


class Activity:
    """The uses that are not in the catalog yet."""

    rank = 0

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = Mutex()
        self._sessions: dict[str, float] = {}
        self._blobs: dict[str, float] = {}
        self._shown: dict[tuple[str, str], Ranges] = {}
        self.last_uses: dict[str, float] = {}
        """When this process last used each session."""
        self._timer: threading.Timer | None = None
        self._due = 0.0
        watch(self)

    def note(self, lineage: Iterable[str], now: float, ttl: float | None, digest: str | None = None) -> None:
        """Note that a session and its ancestors were used, and perhaps a blob."""
        for session_id in lineage:
            self._sessions[session_id] = self.last_uses[session_id] = now
        if digest is not None:
            self._blobs[digest] = now
        delay = _SLOWEST if ttl is None else min(_SLOWEST, max(_QUICKEST, ttl / 10))
        if self._timer is None or now + delay < self._due or not self._timer.is_alive():
            self._schedule(now, delay)

    def show(self, session_id: str, digest: str, start: int, end: int) -> None:
        """Note that a session was shown these bytes of an artifact. Call `note` as well: that starts the timer."""
        key = (session_id, digest)

        def add() -> None:
            self._shown[key] = merged([*self._shown.get(key, ()), (start, end)])

        self._lock.run(add)

    def shown(self, session_id: str, digest: str) -> Ranges:
        """The bytes that a session was shown and that may not be in the catalog yet."""
        return self._shown.get((session_id, digest), ())

    def flush(self) -> None:
        sessions, blobs, shown = self._lock.run(self._taken)
        if sessions or blobs or shown:
            # A store that cannot be written at the moment still serves reads; the uses count in this process.
            with contextlib.suppress(StoreError):
                self._catalog.touch(sessions, blobs, shown)

    def _taken(self) -> tuple[dict[str, float], dict[str, float], dict[tuple[str, str], Ranges]]:
        """What was noted until now; from here on, nothing is."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        sessions, self._sessions = self._sessions, {}
        blobs, self._blobs = self._blobs, {}
        shown, self._shown = self._shown, {}
        return sessions, blobs, shown

    def _schedule(self, now: float, delay: float) -> None:
        def start() -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._due = now + delay
            self._timer = threading.Timer(delay, self.flush)
            self._timer.daemon = True
            self._timer.start()

        self._lock.run(start)

    def locks(self) -> list[Mutex]:
        return [self._lock]

    def renew(self) -> None:
        self._timer = None  # its thread exists only in the parent process
