"""Shorter forms of a result that leave nothing out: sparse line numbers, a repeated result, a
changed one.

Nothing has to be stored or read back for them, so each is used wherever it is shorter:

- A listing with a number on every line keeps the numbers of its first line and of every tenth.
  `expanded` returns the
  listing exactly.
- A result that the conversation already shows, by itself or as a part of another, becomes one line
  that says where.
- A result of an equal call that has changed becomes a diff, if that is much shorter.

The last two refer to what is shown above. When that leaves the conversation, `repaired` writes
where it is stored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from coatcheck.ids import clip
from coatcheck.tokens import estimate

LEAST_REPEATED: Final = 400
"""Minimum characters of a result that is worth a line about where it is shown."""

_EVERY: Final = 10
_NUMBERED: Final = re.compile(r" *(\d{1,9})(→|\t)(.*)", re.DOTALL)
_SPARSE: Final = re.compile(r"\[Lines (\d{1,9})-(\d{1,9}), numbered every 10 lines\.\]\n")
_SAME: Final = "[Nothing new: "
_CHANGED: Final = "[Changed: "
_ABOVE: Final = " returned, shown above"
_REFERENCE: Final = 400  # maximum characters of the line that refers to another result
_LEAST_LINES: Final = 20  # of a listing
_LEAST_CHANGED: Final = 1_200
_MOST_LINES: Final = 3_000  # of two results that are compared
_AROUND: Final = 2
_SHARE: Final = 0.6  # a diff must be shorter than this share of the result
_LABEL: Final = 60


@dataclass(frozen=True, slots=True)
class Listing:
    """Numbered lines without a gap, and the text after them, with the newline before it.

    `width` is the number of characters before the sign, with the blanks that align the numbers."""

    first: int
    sign: str
    lines: tuple[str, ...]
    rest: str = ""
    width: int = 0

    def shows(self, other: Listing) -> bool:
        """Whether this listing contains the lines of another under the same numbers."""
        start = other.first - self.first
        return start >= 0 and other.lines == self.lines[start : start + len(other.lines)]


@dataclass(frozen=True)
class ShownResult:
    """A result in a conversation: its text as it was sent, the call that it answers, and the call's
    arguments."""

    text: str
    tool: str = ""
    call_id: str = ""
    arguments: Any = None

    @property
    def place(self) -> str:
        return f"{clip(self.tool, _LABEL) or 'a tool'} (call {clip(self.call_id, _LABEL)})"

    @cached_property
    def listing(self) -> Listing | None:
        """The listing that the text begins with. Each later result is compared with it."""
        return listing(self.text)


def listing(text: str) -> Listing | None:
    """Return the listing that a text begins with, whether all of its lines are numbered or only
    some. None if it has too few lines."""
    found = _SPARSE.match(text)
    if found is not None:
        return _read_sparse(text[found.end() :], int(found[1]), int(found[2]))
    start = _NUMBERED.match(text)
    if start is None:
        return None
    first, sign, width = int(start[1]), start[2], start.start(2)
    lines: list[str] = []
    all_lines = text.split("\n")
    for at, line in enumerate(all_lines):
        prefix = str(first + at).rjust(width) + sign
        if not line.startswith(prefix):
            break
        lines.append(line[len(prefix) :])
    if len(lines) < _LEAST_LINES:
        return None
    rest = "".join(f"\n{line}" for line in all_lines[len(lines) :])
    return Listing(first=first, sign=sign, lines=tuple(lines), rest=rest, width=width)


def _read_sparse(text: str, first: int, last: int) -> Listing | None:
    lines = text.split("\n")
    count = last - first + 1
    start = _NUMBERED.fullmatch(lines[0])
    if start is None or int(start[1]) != first or not 0 < count <= len(lines):
        return None
    kept = [
        line.partition(start[2])[2] if _is_numbered(first, at) else line
        for at, line in enumerate(lines[:count])
    ]
    rest = "".join(f"\n{line}" for line in lines[count:])
    return Listing(first=first, sign=start[2], lines=tuple(kept), rest=rest, width=start.start(2))


def _is_numbered(first: int, at: int) -> bool:
    return at == 0 or (first + at) % _EVERY == 0


def sparse(text: str) -> str | None:
    """Return a listing with the numbers of its first line and of every tenth. None if the text is
    not a listing, or would not be shorter."""
    found = listing(text) if _NUMBERED.match(text) else None
    if found is None:
        return None
    first, last = found.first, found.first + len(found.lines) - 1
    body: list[str] = []
    for at, line in enumerate(found.lines):
        number = str(first + at).rjust(
            found.width if at == 0 else 0
        )  # the first number shows how they are aligned
        body.append(f"{number}{found.sign}{line}" if _is_numbered(first, at) else line)
    shorter = f"[Lines {first}-{last}, numbered every 10 lines.]\n" + "\n".join(body) + found.rest
    return shorter if len(shorter) < len(text) and expanded(shorter) == text else None


def expanded(text: str) -> str | None:
    """Return the listing of a sparse form, exactly as its tool returned it. None if the text is not
    a sparse form."""
    if _SPARSE.match(text) is None:
        return None
    found = listing(text)
    if found is None:
        return None
    lines = [
        f"{str(found.first + at).rjust(found.width)}{found.sign}{line}"
        for at, line in enumerate(found.lines)
    ]
    return "\n".join(lines) + found.rest


def shorter(text: str, tool: str, arguments: Any, shown: Sequence[ShownResult]) -> str | None:
    """Return a result that says how it differs from what the conversation shows. None if it has to
    be shown itself."""
    if is_reference(text):
        return None
    return repeated(text, shown) or changed(text, tool, arguments, shown)


def is_reference(text: str) -> bool:
    """Whether a result is a shorter form that refers to another result of the conversation."""
    return text.startswith((_SAME, _CHANGED)) and _ABOVE in text[:_REFERENCE]


def repaired(text: str, moved: Mapping[str, str]) -> str | None:
    """Return a shorter form that says where the result that it refers to is now. `moved` has that
    for each `ShownResult.place` that the conversation no longer shows. None if nothing has to
    change."""
    if not is_reference(text):
        return None
    for place, where in moved.items():
        old = f"{place}{_ABOVE}"
        if old in text[:_REFERENCE]:
            return text.replace(old, f"{place} returned, {where}", 1)
    return None


def repeated(text: str, shown: Iterable[ShownResult]) -> str | None:
    """Return one line that says where a conversation shows a result already. None if it does
    not."""
    if len(text) < LEAST_REPEATED or text.startswith((_SAME, _CHANGED)):
        return None
    lines = listing(text)
    if lines is not None and lines.rest.strip():
        lines = None
    for one in shown:
        if text == one.text:
            return f"{_SAME}this is what {one.place} returned, shown above.]"
        if text in one.text:
            return f"{_SAME}this is what {one.place} returned, shown above as a part of it.]"
        if lines is not None and one.listing is not None and one.listing.shows(lines):
            which = f"lines {lines.first}-{lines.first + len(lines.lines) - 1}"
            return f"{_SAME}these are {which} that {one.place} returned, shown above.]"
    return None


def changed(text: str, tool: str, arguments: Any, shown: Sequence[ShownResult]) -> str | None:
    """Return the differences from what an equal call returned before. None if there was no such
    call, or if the differences are not much shorter than the text."""
    if len(text) < _LEAST_CHANGED:
        return None
    same = (one for one in reversed(shown) if one.tool == tool and one.arguments == arguments)
    before = next((one for one in same if not one.text.startswith((_SAME, _CHANGED))), None)
    if before is None:
        return None
    old, new = _plain_lines(before.text), _plain_lines(text)
    if max(len(old), len(new)) > _MOST_LINES:
        return None
    differences = list(difflib.unified_diff(old, new, lineterm="", n=_AROUND))[2:]
    lead = (
        f"{_CHANGED}a diff against what {before.place} returned, shown above; "
        "all other lines are the same.]"
    )
    shorter = "\n".join([lead, *differences])
    return shorter if differences and estimate(shorter) < _SHARE * estimate(text) else None


def _plain_lines(text: str) -> list[str]:
    """Return the lines of a text; those of a listing without their numbers, which a change would
    shift."""
    found = listing(text)
    return text.split("\n") if found is None else [*found.lines, *found.rest.split("\n")[1:]]
