"""Writes the readable text of a document: lines made of pieces, with marks, links and titles."""

from __future__ import annotations

import re
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.reading.page import MAX_RESULT, BoundedLines

CELL: Final = " | "
"""What separates the cells of a row."""

LONGEST_LINK: Final = 500
_ITEM: Final = " · "
_NO_LINK: Final = lazy_pattern(r"\s*(?:#|javascript:|data:|blob:|about:|$)", re.IGNORECASE)
_ENCODED: Final = lazy_pattern(r"(?:%[89A-Fa-f][0-9A-Fa-f])+")


class TextWriter:
    """Lines of text, made of pieces. White space is collapsed, except in `verbatim` text. `mark`
    begins the next line that has text. The address of a link comes after its text, or after the
    first line of it."""

    def __init__(self) -> None:
        self.kept = BoundedLines(MAX_RESULT)
        self.size = 0
        """Characters of the current line."""
        self.mark = ""
        self.verbatim = False
        self._pieces: list[str] = []
        self._last = ""  # piece that is not blank
        self._wants_gap = False
        self._title = ""
        self._href, self._link_at = "", 0
        self._known: set[str] = set()  # addresses that were written

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.size += len(piece.strip())
        if not piece.isspace():
            self._last = piece or self._last

    def item(self) -> None:
        """Begin another item on the same line."""
        if self._last not in ("", _ITEM):
            self.add(_ITEM)

    def link(self, href: str) -> None:
        """Begin a link, and end the open one. An address that was written before is left out."""
        self.end_link()
        self._href = ""
        bare = "".join(href.split())
        if not _NO_LINK.match(bare) and len(bare) <= LONGEST_LINK and bare not in self._known:
            self._href = bare
            self._open_link()

    def end_link(self) -> None:
        """End the open link. Without any text, it stays open."""
        text = "".join(self._pieces[self._link_at :]).strip() if self._href else ""
        if not text:
            return
        self._known.add(self._href)
        if text != self._href:
            self._pieces[self._link_at] = "["
            self._pieces.append(f"]({_ENCODED.sub(_decoded_address, self._href)})")
        self._href = ""

    def end(self, *, gap: bool = False) -> None:
        """End the current line, if it has any text. With `gap`, an empty line comes before the next
        one."""
        self.end_link()
        text = "".join(self._pieces)
        self._pieces.clear()
        self.size, self._last = 0, ""
        if self.verbatim:
            self._put_verbatim(text)
        else:
            self._put_flat(" ".join(text.split()).rstrip(" ·|"))
        self._wants_gap = self._wants_gap or gap
        if self._href:  # it had no text yet
            self._open_link()

    def title(self, text: str) -> None:
        """Put a heading before the next line, if there is one."""
        self.end(gap=True)
        self._title = text

    def slide(self, number: int) -> None:
        """Begin a slide with a line that no other text can have."""
        self.end()
        self.mark = ""
        self.kept.add(f"--- slide {number} ---" if number == 1 else f"\n--- slide {number} ---")

    def _open_link(self) -> None:
        self._link_at = len(self._pieces)
        self._pieces.append("")

    def _put_verbatim(self, text: str) -> None:
        if text.strip():
            for line in text.strip("\n").split("\n"):
                self._put(line.rstrip())

    def _put_flat(self, line: str) -> None:
        if line.strip("| "):
            self._put(self.mark + line)
            self.mark = ""

    def _put(self, line: str) -> None:
        if self._wants_gap and len(self.kept):
            self.kept.add("")
        self._wants_gap = False
        if self._title:
            self.kept.add(f"# {self._title}")
            self._title = ""
        self.kept.add(f" {line}" if line.startswith("--- slide ") else line)


def _decoded_address(match: re.Match[str]) -> str:
    """Decode the letters of an address: percent-encoded, they would take many times as many
    tokens."""
    try:
        return bytes.fromhex(match[0].replace("%", "")).decode()
    except UnicodeDecodeError:
        return match[0]
