"""The numbers of a grep alone: matches, those of each alternative, and the most frequent values of
the first group."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Final, NamedTuple

from coatcheck.errors import InvalidArgument
from coatcheck.previews.excerpts import count
from coatcheck.reading.long_lines import Decoded
from coatcheck.reading.matches import SEARCH_SECONDS, Search, count_each, first_groups
from coatcheck.reading.page import BoundedLines, PageDraft, Request
from coatcheck.reading.patterns import Pattern, alternatives

_PART: Final = 40  # characters of an alternative
_VALUE: Final = 100  # characters of a value
_MOST: Final = 50  # values that are shown
_DISTINCT: Final = 200_000  # values that are counted


class Alternative(NamedTuple):
    name: str
    pattern: Pattern


def alternatives_of(request: Request, *, escapes: bool) -> list[Alternative]:
    """The alternatives of a pattern, none if it has none."""
    if request.literal or request.invert:
        return []
    found = []
    for part in alternatives(request.grep or ""):
        try:
            pattern = Pattern(part, ignore_case=request.ignore_case, escapes=escapes)
        except InvalidArgument:
            return []
        found.append(Alternative(part if len(part) <= _PART else part[: _PART - 1] + "…", pattern))
    return found


def count_page(search: Search, request: Request, where: str, *, escapes: bool) -> PageDraft:
    """A page of numbers: of each alternative and each value, or of the matches."""
    deadline = monotonic() + SEARCH_SECONDS
    (total,), is_exact = count_each(search, [search.pattern], deadline=deadline)
    notes = [f"{_least(is_exact)}{total:,} match{'es' * (total != 1)} in {where}"]
    rows: list[str] = []
    parts = alternatives_of(request, escapes=escapes)
    if parts:
        counts, is_whole = count_each(search, [one.pattern for one in parts], deadline=deadline)
        rows += [f"{number} {part.name}" for part, number in zip(parts, counts, strict=True)]
        notes.append(f"{_least(is_whole)}these of each alternative")
    if total and _has_values(search, request, parts):
        values, is_whole = _values(search, deadline=deadline)
        best = sorted(values.items(), key=lambda item: (-item[1], item[0]))[:_MOST]
        rows += ["--"] * bool(rows)
        rows += [f"{number} {value}" for value, number in best]
        of = f"the {len(best)} most frequent of " if len(best) < len(values) else ""
        notes.append(f"{of}{_least(is_whole)}{count(len(values), 'value')} of the first group")
    lines = BoundedLines(request.max_chars)
    for row in rows or [str(total)]:
        lines.add(row)
    if lines.full:
        notes.append("the last ones are left out")
    return PageDraft(lines.text, "; ".join(notes), None, total, is_exact, total=search.text.lines)


def _least(is_exact: bool) -> str:
    return "" if is_exact else "at least "


def _has_values(search: Search, request: Request, parts: list[Alternative]) -> bool:
    """Whether the pattern has a group other than one around its alternatives."""
    if request.literal or request.invert or not search.pattern.has_groups:
        return False
    return not parts or any(part.pattern.has_groups for part in parts)


def _values(search: Search, *, deadline: float) -> tuple[Counter[str], bool]:
    """How often the first group matched each value, and whether all were counted."""
    written: Counter[bytes] = Counter()
    is_whole = True
    for number, value in enumerate(first_groups(search)):
        if value in written or len(written) < _DISTINCT:
            written[value] += 1
        else:
            is_whole = False
        if not number & 1023 and monotonic() > deadline:
            is_whole = False
            break
    values: Counter[str] = Counter()
    for value, number in written.items():
        values[_shown(value)] += number
    return values, is_whole


def _shown(value: bytes) -> str:
    text = " ".join(Decoded(value).data.decode("utf-8", "replace").split())
    return text if len(text) <= _VALUE else text[: _VALUE - 1] + "…"
