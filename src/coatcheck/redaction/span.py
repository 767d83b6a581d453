"""What the finders of secrets have in common: a place in a text, and the marker that is put there."""

from __future__ import annotations

from typing import Final, NamedTuple

MARK: Final = "[masked:"
"""How every marker begins."""


class Span(NamedTuple):
    """A secret: where it stands, and what it is."""

    start: int
    end: int
    label: str
