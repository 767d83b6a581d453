"""Parameter values that repeat what other values already cover. Only `make faults` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def shown_by_first(values: Iterable[Any], *, count: int = 1) -> list[Any]:
    """Values for `parametrize`: all but the first `count` are marked as repeated."""
    return [
        value if number < count else pytest.param(value, marks=pytest.mark.repeated)
        for number, value in enumerate(values)
    ]
