"""Who waits for tools: jobs, and a bounded crew of threads that works them off."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from coatcheck.executor.attempt import Attempt
from coatcheck.executor.outcomes import ToolOutcome


@dataclass(frozen=True, slots=True)
class Started:
    """What is left of a job for those who ask how it went: none of its arguments."""

    outcome: Future[ToolOutcome]
    attempt: Attempt

    def cancel(self) -> None:
        """Never begin, or give up."""
        self.outcome.cancel()
        self.attempt.stop()


class Job:
    """The waiting side of one call."""

    def __init__(self, run: Callable[[Attempt], ToolOutcome], attempt: Attempt) -> None:
        self._run = run
        self._context = contextvars.copy_context()
        self.started = Started(Future(), attempt)

    @property
    def outcome(self) -> Future[ToolOutcome]:
        return self.started.outcome

    def __call__(self) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.conduct()

    def conduct(self) -> None:
        try:
            self.outcome.set_result(self._context.run(self._run, self.started.attempt))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the outcome is asked for
            self.outcome.set_exception(error)

    def cancel(self) -> None:
        self.started.cancel()


class Crew:
    """At most `size` daemon threads that work off a queue, and end when it is empty."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._working = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(job)
            if self._working >= self._size:
                return
            self._working += 1
        if not hire(self._work):
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                job = self._waiting.popleft()
            job()


def hire(work: Callable[[], None]) -> bool:
    """A daemon thread for this. False where the system has no more."""
    try:
        threading.Thread(target=work, name="coatcheck-executor", daemon=True).start()
    except RuntimeError:
        return False
    return True
