"""The three spellings of an artifact's id that the designs have between them. Every reader of a
drop-in takes all."""

from __future__ import annotations

import re
from typing import Final

_SPELLINGS: Final = re.compile(r"art:([0-9a-f]{12,64})|art_([0-9a-f]{16})|([0-9a-f]{64})")
HINT: Final = (
    "an id has 64 lower-case hex characters; 'art:' with 12 or more of them and 'art_' "
    "with 16 work too"
)


def id_prefix(text: object) -> str | None:
    """Return the hex characters of an id: all 64, or the first ones. None if the text is not
    spelled like an id."""
    found = _SPELLINGS.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    return found[1] or found[2] or found[3]


def short_id(artifact_id: str) -> str:
    """Return an id as `art_` and its first 16 hex characters."""
    return f"art_{artifact_id[:16]}"
