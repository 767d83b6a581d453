"""Shrinking to a limit: the fullest form of a thing that fits.

Forms are made only as far as they are needed, fullest first. If none fits, the smallest is
returned: callers differ in what they do then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def first_that_fits(forms: Iterable[_T], fits: Callable[[_T], bool]) -> _T:
    """Return the first form that fits, or the last one. There must be at least one."""
    form = None
    for form in forms:
        if fits(form):
            break
    assert form is not None
    return form


def least_step_that_fits(form: Callable[[int], _T], last: int, fits: Callable[[_T], bool]) -> _T:
    """Return the form of the first step from 0 to `last` that fits, or the last one. The steps are
    bisected, so after a step that fits, all should fit. Tries 0 first: usually nothing must
    shrink."""
    best = form(0)
    if fits(best) or not last:
        return best
    best = form(last)
    if not fits(best):
        return best
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        found = form(middle)
        if fits(found):
            best, high = found, middle
        else:
            low = middle + 1
    return best


def halves(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the items, then the first half of them, and so on until none is left."""
    yield items
    while items:
        items = items[: len(items) // 2]
        yield items
