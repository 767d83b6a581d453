"""How long a call may take: the time of the call, and that of its turn."""

from __future__ import annotations

import threading
import time

from coatcheck.checks import seconds


class TurnOver(BaseException):
    """The turn is past its deadline, and nothing more may be stored for it.

    Not an `Exception`, so that no handler takes it for a failure of the store."""


class Cancelled(BaseException):
    """The call was cancelled. Not an `Exception` either."""


class Turn:
    """One turn of an agent: it ends after `deadline` seconds, or with `close`. After that, nothing
    more is stored; a store step that has begun is completed."""

    __slots__ = ("_closed", "end")

    def __init__(self, deadline: float | None = None) -> None:
        limit = checked_seconds(deadline, "deadline")
        self.end = None if limit is None else time.monotonic() + limit
        self._closed = False

    def left(self) -> float | None:
        """The seconds until its deadline; None if it has none."""
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def is_accepting_writes(self) -> bool:
        return not self._closed and (self.end is None or time.monotonic() < self.end)

    def close(self) -> None:
        self._closed = True


class Deadlines:
    """When to stop waiting for a call, on the monotonic clock: after its own `seconds`, or with its
    turn."""

    def __init__(self, turn: Turn, seconds: float | None) -> None:
        self.turn, self.seconds, self.until = turn, seconds, turn.end
        if seconds is not None:
            end = time.monotonic() + seconds
            self.until = end if self.until is None else min(self.until, end)

    @property
    def turn_is_over(self) -> bool:
        return not self.turn.is_accepting_writes()


def checked_seconds(given: float | None, name: str) -> float | None:
    """Return a number of seconds, or None if there is no limit. Raises `InvalidArgument` for
    anything else."""
    seconds(given, name, optional=True)
    return None if given is None or given >= threading.TIMEOUT_MAX / 2 else given
