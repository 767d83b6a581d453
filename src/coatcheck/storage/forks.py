"""What a fork must not find: a lock that another thread holds, or a thread in the middle of SQLite.

The child has the memory of all threads but only one of them, so what the others held stays held. Whoever has locks or
connections is paused before a fork, resumed in the parent, and renewed in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """`rank` orders the locks: who holds one may wait only for those of higher rank."""

    rank: int

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None: ...


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_paused: list[Forkable] = []


def watch(one: Forkable) -> None:
    """From now on, and for as long as it lives."""
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
