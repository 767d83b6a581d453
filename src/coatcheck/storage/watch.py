"""Deadlines for calls that wait on a socket without a timeout.

A server that hangs, or whose machine disappeared, neither answers nor closes the connection. When the deadline passes,
the socket is shut down, and the call fails as it does for any broken connection.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

_LOOK: Final = 0.25  # seconds between two checks
_IDLE: Final = 30.0  # seconds without a call after which the watcher thread ends


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
            if self._owner != os.getpid():  # a child inherits its parent's calls, but not its threads
                self._calls, self._watcher, self._owner = {}, None, os.getpid()

    def _start(self) -> None:
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="coatcheck-watch", daemon=True)
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
                    self._watcher = None  # first: a concurrent call either sees this or is seen below
                    if not self._calls:
                        return
                    self._watcher = threading.current_thread()


def _shut_down(connection: HasSocket) -> None:
    # If it is closed by now, nothing is waiting.
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
