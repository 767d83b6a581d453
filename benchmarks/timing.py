"""Timing: two sides take turns, so that other load on the machine slows both equally."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Side(Generic[T]):
    """The timed function (`run`), and one that makes its argument while the clock is stopped
    (`prepare`)."""

    prepare: Callable[[], T]
    run: Callable[[T], object]


@dataclass(frozen=True, slots=True)
class Times:
    """What a side took, in seconds."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        p99 = sorted(samples)[len(samples) * 99 // 100]
        return cls(statistics.median(samples), p99, statistics.fmean(samples))


def interleaved(floor: Side[A], ours: Side[B], rounds: int) -> tuple[Times, Times]:
    """Time both sides in turns, each going first every second time, after a warm-up of a tenth of
    the rounds."""
    theirs: list[float] = []
    own: list[float] = []
    warm_up = max(2, rounds // 10)
    with no_collection():
        for turn in range(-warm_up, rounds):
            if turn % 2:
                first, second = _timed(floor), _timed(ours)
            else:
                second, first = _timed(ours), _timed(floor)
            if turn >= 0:
                theirs.append(first)
                own.append(second)
    return Times.of(theirs), Times.of(own)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _timed(side: Side[T]) -> float:
    argument = side.prepare()
    start = time.perf_counter()
    side.run(argument)
    return time.perf_counter() - start
