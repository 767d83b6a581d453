"""`Job`: the waiting side of one call, in a thread."""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from coatcheck.executor.attempts import Attempt

if TYPE_CHECKING:
    from coatcheck.executor.outcomes import ToolOutcome

_SECONDS_AT_EXIT: Final = 5.0  # for store steps that have begun when the process ends


class Job:
    """The waiting side of one call. Once it has run, it keeps only the outcome, none of the
    arguments."""

    def __init__(self, run: Callable[[Attempt], ToolOutcome], attempt: Attempt) -> None:
        self._run: Callable[[], ToolOutcome] | None = functools.partial(
            contextvars.copy_context().run, run, attempt
        )
        self._attempt = attempt
        self.outcome: Future[ToolOutcome] = Future()
        _jobs.add(self)

    def __call__(self) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.conduct()

    def conduct(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        try:
            self.outcome.set_result(run())
        except BaseException as error:  # noqa: BLE001 - raised again by `outcome.result()`
            self.outcome.set_exception(error)

    def answer(self, outcome: ToolOutcome) -> None:
        """Set the outcome without running."""
        self._run = None
        self.outcome.set_result(outcome)

    def cancel(self) -> None:
        """Abandon the tool, or never start it."""
        self.outcome.cancel()
        self._attempt.stop()


_jobs: WeakSet[Job] = WeakSet()
if hasattr(os, "register_at_fork"):  # a forked process does not have the threads
    os.register_at_fork(after_in_child=_jobs.clear)


@atexit.register
def _settle() -> None:
    """Cancel all calls when the process ends, and wait for the store steps that have begun.

    A daemon thread that is inside a C++ library, such as re2, when the interpreter ends would
    abort the process."""
    jobs = list(_jobs)
    for job in jobs:
        job.cancel()
    running = [job.outcome for job in jobs if job.outcome.running()]
    wait(running, timeout=_SECONDS_AT_EXIT)
