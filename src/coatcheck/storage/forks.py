"""Keep locks and SQLite connections safe across forks and interrupts.

A child process has the memory of all threads but runs only one of them, so a lock that another thread holds would never
be released. Before a fork, the forking thread takes all locks. The parent releases them, and the child first renews the
objects they belong to.

An interrupt (Ctrl-C, an alarm handler that raises) may come at any instruction, even during the steps around a fork. So
each step depends on the state of the locks, not on how far it got, and is repeated until it is complete.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, Protocol, TypeVar, cast

from coatcheck.errors import StoreUnavailable

_T = TypeVar("_T")
_ATTEMPTS: Final = 100


class Mutex:
    """A lock between threads that is released even if interrupts arrive at any instruction.

    `before_release` undoes anything else that the owner may have begun. It may run several times, and must not raise.
    """

    def __init__(self, before_release: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()
        self.is_owned: Callable[[], bool] = cast(Any, self._lock)._is_owned
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self._before_release = before_release
        self._free: Callable[[], None] = self.release if before_release is None else self._undo_and_release

    def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` while holding the lock."""
        if self.is_owned() and self._is_inside():
            raise StoreUnavailable(
                "this thread is in the middle of another call to the store",
                hint="do not use a store from a signal handler or a callback that runs inside one of its calls",
            )
        return cast(_T, self._run(work, True))

    def try_run(self, work: Callable[[], _T]) -> _T | None:
        """Run `work` while holding the lock, or return None if the lock is not free."""
        return None if self.is_owned() and self._is_inside() else self._run(work, False)

    def _run(self, work: Callable[[], _T], wait: bool) -> _T | None:
        found = None  # a `return` inside would compile to an instruction that no `finally` covers
        try:
            try:
                try:
                    if self.acquire(wait):
                        found = work()
                finally:
                    if self.is_owned():
                        self._free()
            finally:  # each further release covers an interrupt before the first instruction of the previous one
                if self.is_owned():
                    self._free()
        finally:
            if self.is_owned():
                self._free()
        return found

    def _undo_and_release(self) -> None:
        def once() -> None:
            if self.is_owned():
                cast(Callable[[], None], self._before_release)()
                self.release()

        _complete(once)

    def _is_inside(self) -> bool:
        """Return whether this thread, which has the lock, is inside a call. If not, many interrupts in a row have left
        the lock behind, and it is released."""
        frame: FrameType | None = sys._getframe().f_back
        while frame is not None:
            if frame.f_code in _HOOKS or (frame.f_code is _RUN and frame.f_locals["self"] is self):
                return True
            frame = frame.f_back
        self._free()
        return False


def _complete(step: Callable[[], object]) -> None:
    """Repeat a step that interrupts have ended early, then raise the first of them."""
    first: BaseException | None = None
    for _ in range(_ATTEMPTS):
        try:
            step()
            break
        except BaseException as error:  # noqa: BLE001 - raised when the step is complete
            first = first or error
    if first is not None:
        raise first


class Forkable(Protocol):
    """An object with locks. `rank` orders them: a thread that has one may wait only for locks of a higher rank."""

    rank: int

    def locks(self) -> Iterable[Mutex]:
        """Yield the locks in the order in which a fork takes them."""

    def renew(self) -> None:
        """Prepare the object for use in a child process. May run several times."""


class _Taken(threading.local):
    """The locks that this thread has taken, or was about to take, for a fork."""

    def __init__(self) -> None:
        self.locks: list[Mutex] = []


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_taken = _Taken()
_process = os.getpid()


def watch(one: Forkable) -> None:
    """Take the locks of this object around forks and renew it in children, for as long as it exists."""
    _watched.add(one)


def unwatch(one: Forkable) -> None:
    _watched.discard(one)


def _before() -> None:
    _complete(_take)


def _in_parent() -> None:
    _complete(_give_back)


def _in_child() -> None:
    _complete(_renew)
    _complete(_give_back)


def _take() -> None:
    for one in sorted(_watched, key=lambda one: one.rank):
        for lock in one.locks():
            if not lock.is_owned():  # by a call that forks, or by an attempt that was interrupted
                _taken.locks.append(lock)
                lock.acquire()


def _give_back() -> None:
    while _taken.locks:
        if _taken.locks[-1].is_owned():
            _taken.locks[-1].release()
        _taken.locks.pop()


def _renew() -> None:
    global _process
    if _process != os.getpid():
        for one in list(_watched):
            one.renew()
        _process = os.getpid()


_RUN: Final = Mutex._run.__code__
_HOOKS: Final = {hook.__code__ for hook in (_before, _in_parent, _in_child)}
for _ in range(3):  # an interrupt before the first instruction of a hook ends it, and the next one does its work
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
