"""What a query finds: one text of bounded size, and honest words on what it is and what is missing from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coatcheck.media import TEXT

LIMIT: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a query, whole up to the limit that the query was given.

    `shown` says what the text is ("12 of 30 results"), `complete` whether it is all there is, and `note` what was left
    out, skipped or assumed. The same query on the same content gives the same text.
    """

    text: str
    media_type: str = TEXT
    shown: str = ""
    complete: bool = True
    note: str = ""


class Gathering:
    """Lines of a result up to a limit in characters. Once one does not fit none is added: what is kept is a beginning.

    A first line that is too long by itself is cut, so that there is something to see; `cut` then is its true length.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: list[str] = []
        self._size = 0
        self.full = False
        self.cut = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def add(self, line: str) -> bool:
        """Whether the line was kept whole."""
        if self.full:
            return False
        size = self._size + len(line) + (1 if self._lines else 0)
        if size <= self._limit:
            self._lines.append(line)
            self._size = size
            return True
        self.full = True
        if not self._lines:
            self._lines.append(line[: self._limit])
            self.cut = len(line)
        return False


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2,711 rows`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
