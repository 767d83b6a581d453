"""Keep locks and SQLite connections safe across a fork.

A child process has the memory of all threads but runs only one of them, so a lock that another thread holds would never
be released. Objects with locks or connections are paused before a fork, then resumed in the parent and renewed in the
child.

An interrupt (Ctrl-C, an alarm handler that raises) must not leave a lock behind either: see `Mutex`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from coatcheck.errors import StoreUnavailable

_T = TypeVar("_T")


class Mutex:
    """A lock between threads that is released even if an interrupt arrives at any instruction.

    The lock knows its owner, so a release depends on its state, not on how far a call got, and can be repeated. `run`
    releases twice: the second release covers an interrupt inside the first. `before_release` undoes anything else that
    the owner may have begun. It may also run twice, and must not raise."""

    def __init__(self, before_release: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._is_owned: Callable[[], bool] = cast(Any, self._lock)._is_owned
        self._before_release = before_release

    def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` while holding the lock."""
        if self._is_owned():
            raise StoreUnavailable(
                "this thread is in the middle of another call to the store",
                hint="do not use a store from a signal handler or a callback that runs inside one of its calls",
            )
        try:
            try:
                self._lock.acquire()
                return work()
            finally:
                self._release()
        finally:
            self._release()

    def _release(self) -> None:
        if self._is_owned():
            if self._before_release is not None:
                self._before_release()
            self._lock.release()

    def acquire(self) -> None:
        """Take the lock before a fork."""
        self._lock.acquire()

    def release(self) -> None:
        """Release the lock after a fork, in the parent or in the child."""
        self._lock.release()


class Forkable(Protocol):
    """An object with locks. `rank` orders them: a thread that has one may wait only for locks of a higher rank."""

    rank: int

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None: ...


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_paused: list[Forkable] = []


def watch(one: Forkable) -> None:
    """Pause and renew this object around forks, for as long as it exists."""
    _watched.add(one)


def unwatch(one: Forkable) -> None:
    _watched.discard(one)


def _before() -> None:
    for one in sorted(_watched, key=lambda one: one.rank):
        one.pause()
        _paused.append(one)


def _in_parent() -> None:
    while _paused:
        _paused.pop().resume()


def _in_child() -> None:
    while _paused:
        _paused.pop().renew()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
