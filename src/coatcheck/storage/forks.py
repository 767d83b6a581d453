"""Keep locks and SQLite connections safe across forks.

A child process has the memory of all threads but runs only one of them, so a lock that another
thread holds would never be released, and a connection that another thread uses would be in an
undefined state. Before a fork, the forking thread takes all locks; after it, parent and child
release them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol


class RLock(Protocol):
    """`threading.RLock`, which is a function in some versions of Python."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class Forkable(Protocol):
    """An object with locks. `rank` orders them: a thread that has one may wait only for locks of a
    higher rank."""

    rank: int

    def locks(self) -> Iterable[RLock]:
        """Return the locks, in the order in which they are taken."""

    def before_fork(self) -> None:
        """Close what must not be carried across a fork. The locks are held. May run twice."""

    def after_fork(self) -> None:
        """Prepare the object for its use in a child. The locks are held. May run twice."""


class _Taken(threading.local):
    """The locks that this thread has taken for a fork."""

    def __init__(self) -> None:
        self.locks: list[RLock] = []


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_taken = _Taken()


def watch(one: Forkable) -> None:
    """Prepare this object for each fork, for as long as it exists."""
    _watched.add(one)


def unwatch(one: Forkable) -> None:
    _watched.discard(one)


def _before() -> None:
    for one in sorted(_watched, key=lambda one: one.rank):
        for lock in one.locks():
            if lock not in _taken.locks:
                _taken.locks.append(lock)
                lock.acquire()
        one.before_fork()


def _in_child() -> None:
    for one in list(_watched):
        one.after_fork()
    _release()


def _release() -> None:
    while _taken.locks:
        try:
            _taken.locks[-1].release()
        except RuntimeError:
            pass  # an interrupt came before it was taken, or after it was released
        _taken.locks.pop()


for _ in range(2):  # an interrupt may end a hook early: then the second call does the rest
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)
