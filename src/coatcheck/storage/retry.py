"""Calls to servers within a deadline: they are tried again until it passes, and do not wait beyond
it.

A server that hangs, or whose machine disappeared, neither answers nor closes the connection. When
the deadline passes, `Watch` shuts the socket down, and the call fails as it does for any broken
connection.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

from coatcheck.errors import StoreUnavailable

_SHORTEST, _LONGEST = 0.02, 2.0  # seconds between attempts
_LOOK: Final = 0.25  # seconds between two checks
_IDLE: Final = 30.0  # seconds without a call after which the watcher thread ends


_T = TypeVar("_T")


def keep_trying(
    call: Callable[[float], _T],
    doing: str,
    *,
    patience: float,
    errors: tuple[type[Exception], ...],
    may_pass: Callable[[Exception], bool],
    whose: str,
    hint: str,
) -> _T:
    """Return the result of `call`, which gets its deadline (`time.monotonic`). It is repeated until
    then if it fails with one of these errors and the error `may_pass`. Raises `StoreUnavailable`
    with the hint if it does not."""
    until, pause = time.monotonic() + patience, _SHORTEST
    while True:
        try:
            return call(until)
        except errors as error:
            again = may_pass(error)
            if not again or time.monotonic() + pause > until:
                # The text of the error may contain addresses, users and more: report only its kind.
                kind = getattr(error, "sqlstate", None) or type(error).__name__
                raise StoreUnavailable(
                    f"the {whose} failed while {doing}: {kind}",
                    hint="try again" if again else hint,
                    may_retry=again,
                ) from None
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, _LONGEST)


class HasSocket(Protocol):
    def fileno(self) -> int: ...


class Watch:
    """One watcher thread per process, which runs only while there are calls to watch."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, HasSocket]] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._owner = 0

    @contextmanager
    def over(self, connection: HasSocket, until: float) -> Iterator[None]:
        """Shut the connection down if the context is still open at `until` (`time.monotonic`)."""
        key = id(connection)
        if self._owner != os.getpid():
            self._begin()
        self._calls[key] = (until, connection)
        if self._watcher is None:
            self._start()
        try:
            yield
        finally:
            self._calls.pop(key, None)

    def _begin(self) -> None:
        with self._lock:
            if (
                self._owner != os.getpid()
            ):  # a child inherits its parent's calls, but not its threads
                self._calls, self._watcher, self._owner = {}, None, os.getpid()

    def _start(self) -> None:
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="coatcheck-watch", daemon=True
                )
                self._watcher.start()

    def _watch(self) -> None:
        busy = time.monotonic()
        while True:
            time.sleep(_LOOK)
            now = time.monotonic()
            calls = list(self._calls.values())
            if calls:
                busy = now
            for until, connection in calls:
                if now > until:
                    _shut_down(connection)
            with self._lock:
                if now - busy > _IDLE:
                    self._watcher = (
                        None  # first: a concurrent call either sees this or is seen below
                    )
                    if not self._calls:
                        return
                    self._watcher = threading.current_thread()


def _shut_down(connection: HasSocket) -> None:
    # If it is closed by now, nothing is waiting.
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
