"""Unified diff of two texts, deterministic and in time that grows with their size.

Equal heads and tails are removed first, then lines that occur once on both sides anchor the rest, as in patience diff.
Only small pieces between anchors are compared line by line. A piece that would take too much work is shown as fully
replaced, which is still a correct diff, and the note says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import count as numbers
from typing import Final, NamedTuple

from coatcheck.content import Content
from coatcheck.media import TEXT, decoded, is_text
from coatcheck.previews.excerpts import count
from coatcheck.reading.json_content import whole
from coatcheck.reading.page import MAX_RESULT, BoundedLines, QueryResult

MAX_BYTES: Final = 32 << 20
MAX_LINES: Final = 1_000_000
WORK: Final = 8_000_000  # maximum pairs of lines to compare
_PIECE: Final = 1_000
_NO_NEWLINE: Final = "\\ No newline at end of file"


class _Change(NamedTuple):
    """Lines `old_start:old_end` became lines `new_start:new_end`."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def diff(old: Content, new: Content, *, context: int = 3, limit: int = MAX_RESULT) -> QueryResult:
    """Return the unified diff from `old` to `new`."""
    if old.ref.artifact_id == new.ref.artifact_id:
        return QueryResult("", "text/x-diff", "no changes", note="both are the same artifact")
    if not (is_text(old.ref.media_type) and is_text(new.ref.media_type)):
        return _summary(old, new, "only texts can be compared line by line")
    if max(old.size, new.size) > MAX_BYTES:
        return _summary(old, new, f"the limit for a line by line diff is {MAX_BYTES:,} bytes")
    before, after = _split(old), _split(new)
    if max(len(before), len(after)) > MAX_LINES:
        return _summary(old, new, f"the limit for a line by line diff is {MAX_LINES:,} lines")
    work = _Work()
    changes = _joined(work.changes(before, after))
    lines = BoundedLines(limit)
    lines.add(f"--- {old.ref.pointer}")
    lines.add(f"+++ {new.ref.pointer}")
    hunks = shown = 0
    for hunk in _hunks(changes, context):
        hunks += 1
        kept = [lines.add(line) for line in _lines(hunk, before, after, context)]
        shown += all(kept)
    removed = sum(change.old_end - change.old_start for change in changes)
    added = sum(change.new_end - change.new_start for change in changes)
    notes = []
    if lines.full:
        notes.append(f"{count(hunks - shown, 'changed place')} left out or cut; read both with lines to see them")
    if work.coarse:
        notes.append(
            f"{count(work.coarse, 'large piece')} shown as fully replaced: comparing line by line would take too long"
        )
    if not changes:
        notes.append("the texts are equal; only their encoding differs")
    places = count(hunks, "place") if not lines.full else f"{shown:,} of {count(hunks, 'place')}"
    return QueryResult(
        text=lines.text if changes else "",
        media_type="text/x-diff",
        shown=f"{count(removed, 'line')} removed, {count(added, 'line')} added, {places}",
        complete=not lines.full,
        note="; ".join(notes),
    )


class _Work:
    """Finds changes within a budget. `coarse` counts the pieces that exceeded it."""

    def __init__(self) -> None:
        self._budget = WORK
        self.coarse = 0

    def changes(self, old: list[str], new: list[str]) -> list[_Change]:
        found = []
        pending = [_Change(0, len(old), 0, len(new))]
        while pending:
            piece = _trimmed(pending.pop(), old, new)
            a, b, c, d = piece
            if a == b or c == d:
                if a != b or c != d:
                    found.append(piece)
                continue
            if anchors := _anchors(old, new, piece):
                pending.extend(_between(piece, anchors))
            elif b - a <= _PIECE and d - c <= _PIECE and (b - a) * (d - c) <= self._budget:
                self._budget -= (b - a) * (d - c)
                for tag, i, j, k, m in SequenceMatcher(None, old[a:b], new[c:d], autojunk=False).get_opcodes():
                    if tag != "equal":
                        found.append(_Change(a + i, a + j, c + k, c + m))
            else:
                self.coarse += 1
                found.append(piece)
        return sorted(found)


def _trimmed(piece: _Change, old: list[str], new: list[str]) -> _Change:
    a, b, c, d = piece
    while a < b and c < d and old[a] == new[c]:
        a, c = a + 1, c + 1
    while a < b and c < d and old[b - 1] == new[d - 1]:
        b, d = b - 1, d - 1
    return _Change(a, b, c, d)


def _anchors(old: list[str], new: list[str], piece: _Change) -> list[tuple[int, int]]:
    """Pairs of equal lines that occur once on each side: the longest run that is in order on both."""
    a, b, c, d = piece
    once = {line for line, times in Counter(old[a:b]).items() if times == 1}
    once &= {line for line, times in Counter(new[c:d]).items() if times == 1}
    if not once:
        return []
    where = {line: index for line, index in zip(new[c:d], numbers(c)) if line in once}
    pairs = [(index, where[line]) for line, index in zip(old[a:b], numbers(a)) if line in once]
    tails: list[int] = []  # for each length of a run, the smallest index in `new` at which one ends
    last: list[int] = []
    back: list[int] = []
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(tails, place)
        back.append(last[length - 1] if length else -1)
        tails[length : length + 1] = [place]
        last[length : length + 1] = [number]
    run = []
    at = last[-1]
    while at >= 0:
        run.append(pairs[at])
        at = back[at]
    return run[::-1]


def _between(piece: _Change, anchors: list[tuple[int, int]]) -> Iterator[_Change]:
    a, c = piece.old_start, piece.new_start
    for i, j in anchors:
        if a < i or c < j:
            yield _Change(a, i, c, j)
        a, c = i + 1, j + 1
    yield _Change(a, piece.old_end, c, piece.new_end)


def _joined(changes: list[_Change]) -> list[_Change]:
    """Merge changes that touch."""
    out: list[_Change] = []
    for change in changes:
        if out and out[-1].old_end == change.old_start and out[-1].new_end == change.new_start:
            out[-1] = _Change(out[-1].old_start, change.old_end, out[-1].new_start, change.new_end)
        else:
            out.append(change)
    return out


def _hunks(changes: list[_Change], context: int) -> Iterator[list[_Change]]:
    """Group changes whose context would overlap."""
    group: list[_Change] = []
    for change in changes:
        if group and change.old_start - group[-1].old_end > 2 * context:
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def _lines(group: list[_Change], old: list[str], new: list[str], context: int) -> Iterator[str]:
    before = min(context, group[0].old_start)
    start, other = group[0].old_start - before, group[0].new_start - before
    end = min(group[-1].old_end + context, len(old))
    finish = group[-1].new_end + end - group[-1].old_end
    yield f"@@ -{_range(start, end)} +{_range(other, finish)} @@"
    at = start
    for change in group:
        yield from _marked(" ", old[at : change.old_start])
        yield from _marked("-", old[change.old_start : change.old_end])
        yield from _marked("+", new[change.new_start : change.new_end])
        at = change.old_end
    yield from _marked(" ", old[at:end])


def _marked(mark: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield mark + line.removesuffix("\n")
        if not line.endswith("\n"):
            yield _NO_NEWLINE


def _range(start: int, end: int) -> str:
    return f"{start + 1}" if end - start == 1 else f"{start + (end > start)},{end - start}"


def _split(content: Content) -> list[str]:
    """Lines with their line feeds; the last may have none."""
    *lines, last = decoded(whole(content, MAX_BYTES)).split("\n")
    return [line + "\n" for line in lines] + ([last] if last else [])


def _summary(old: Content, new: Content, why: str) -> QueryResult:
    same = 0
    for one, other in zip(old.chunks(), new.chunks(), strict=False):
        if one != other:
            same += next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            break
        same += len(one)
    text = (
        f"{old.ref.pointer}: {old.ref.media_type}, {old.size:,} bytes\n"
        f"{new.ref.pointer}: {new.ref.media_type}, {new.size:,} bytes\n"
        f"They are equal up to byte {same:,} and differ from there on."
    )
    return QueryResult(text, TEXT, "summary of the difference", complete=False, note=why)
