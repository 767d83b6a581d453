"""The threads of the executor.

They are daemon threads, which do not keep the process alive. Those of a
`concurrent.futures.ThreadPoolExecutor` do: the interpreter joins them at exit, so a process could
not end while a tool never returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Workers:
    """At most `size` threads that process a queue and end when it is empty.

    Each thread counts itself, so that an interrupt before it starts leaves no count behind."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._working = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(job)
            is_needed = self._working < self._size
        if is_needed and not start_thread(self._work):
            self._work()

    def _work(self) -> None:
        with self._lock:
            if self._working >= self._size:
                return
            self._working += 1
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                job = self._waiting.popleft()
            job()


def start_thread(work: Callable[[], None]) -> bool:
    """Run `work` in a new daemon thread, which does not keep the process alive. False if the system
    has no more threads."""
    try:
        threading.Thread(target=work, name="coatcheck-executor", daemon=True).start()
    except RuntimeError:
        return False
    return True
