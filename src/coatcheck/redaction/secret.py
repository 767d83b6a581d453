"""The place of a secret in a text, and the marker that replaces it."""

from __future__ import annotations

from typing import Final, NamedTuple

MARK: Final = "[masked:"
"""The start of every marker."""


class Secret(NamedTuple):
    """The place of a secret in a text, and what it is."""

    start: int
    end: int
    label: str
