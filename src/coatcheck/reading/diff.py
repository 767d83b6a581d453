"""Unified diff of two texts, deterministic and in time that grows with their size.

Equal heads and tails are removed first, then lines that occur once on both sides anchor the rest,
as in patience diff. Only small pieces between anchors are compared line by line. A piece that would
take too much work is shown as fully replaced, which is still a correct diff, and the note says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from difflib import Match, SequenceMatcher
from itertools import count as numbers
from os.path import commonprefix
from typing import Final

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
    matcher = _Matcher(before, after)
    lines = BoundedLines(limit)
    lines.add(f"--- {old.ref.pointer}")
    lines.add(f"+++ {new.ref.pointer}")
    hunks = shown = removed = added = 0
    for hunk in matcher.get_grouped_opcodes(context):
        hunks += 1
        changes = [one for one in hunk if one[0] != "equal"]
        removed += sum(b - a for _, a, b, _, _ in changes)
        added += sum(d - c for _, _, _, c, d in changes)
        kept = [lines.add(line) for line in _lines(hunk, before, after)]
        shown += all(kept)
    places = count(hunks, "place")
    notes = []
    if lines.full:
        places = f"{shown:,} of {places}"
        left_out = count(hunks - shown, "changed place")
        notes.append(f"{left_out} left out or cut; read both with lines to see them")
    if matcher.coarse:
        notes.append(
            f"{count(matcher.coarse, 'large piece')} shown as fully replaced: "
            "comparing line by line would take too long"
        )
    if not hunks:
        notes.append("the texts are equal; only their encoding differs")
    return QueryResult(
        text=lines.text if hunks else "",
        media_type="text/x-diff",
        shown=f"{count(removed, 'line')} removed, {count(added, 'line')} added, {places}",
        note="; ".join(notes),
    )


class _Matcher(SequenceMatcher[str]):
    """Finds equal lines within a budget. `coarse` counts the pieces that exceeded it."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        super().__init__(None, "", "", autojunk=False)  # our own search needs no index of the lines
        self._old, self._new = old, new
        self.coarse = 0

    def get_matching_blocks(self) -> list[Match]:
        """Return the runs of equal lines in order, no two of them adjacent, and an empty one at the
        end."""
        budget = WORK
        found: list[tuple[int, int, int]] = []
        pending = [(0, len(self._old), 0, len(self._new))]
        while pending:
            a, b, c, d = pending.pop()
            head = self._equal(a, b, c, d)
            a, c = a + head, c + head
            tail = self._equal(a, b, c, d, backwards=True)
            b, d = b - tail, d - tail
            found += ((a - head, c - head, head), (b, d, tail))
            if a == b or c == d:
                continue
            if anchors := self._anchors(a, b, c, d):
                for i, j in [*anchors, (b, d)]:
                    pending.append((a, i, c, j))
                    found.append((i, j, i < b))
                    a, c = i + 1, j + 1
            elif b - a <= _PIECE and d - c <= _PIECE and (b - a) * (d - c) <= budget:
                budget -= (b - a) * (d - c)
                inner = SequenceMatcher(None, self._old[a:b], self._new[c:d], autojunk=False)
                found += ((a + i, c + j, size) for i, j, size in inner.get_matching_blocks())
            else:
                self.coarse += 1
        return [*_joined(sorted(found)), Match(len(self._old), len(self._new), 0)]

    def _equal(self, a: int, b: int, c: int, d: int, *, backwards: bool = False) -> int:
        """Number of equal lines at the start of two pieces, or at their end."""
        old, new = self._old, self._new
        most, size = min(b - a, d - c), 0
        while size < most and (
            old[b - 1 - size] == new[d - 1 - size] if backwards else old[a + size] == new[c + size]
        ):
            size += 1
        return size

    def _anchors(self, a: int, b: int, c: int, d: int) -> list[tuple[int, int]]:
        """Pairs of equal lines that occur once on each side: the longest run that is in order on
        both."""
        old, new = self._old[a:b], self._new[c:d]
        once = {line for line, times in Counter(old).items() if times == 1}
        once &= {line for line, times in Counter(new).items() if times == 1}
        if not once:
            return []
        where = {line: index for line, index in zip(new, numbers(c)) if line in once}
        pairs = [(index, where[line]) for line, index in zip(old, numbers(a)) if line in once]
        tails: list[
            int
        ] = []  # for each length of a run, the smallest index in `new` at which one ends
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


def _joined(runs: list[tuple[int, int, int]]) -> list[Match]:
    """Runs of equal lines, with those that are adjacent as one, and without empty ones."""
    blocks: list[Match] = []
    for a, b, size in runs:
        if not size:
            continue
        before = blocks[-1] if blocks else Match(-1, -1, 0)
        if (before.a + before.size, before.b + before.size) == (a, b):
            blocks[-1] = Match(before.a, before.b, before.size + size)
        else:
            blocks.append(Match(a, b, size))
    return blocks


def _lines(
    hunk: list[tuple[str, int, int, int, int]], old: list[str], new: list[str]
) -> Iterator[str]:
    yield f"@@ -{_range(hunk[0][1], hunk[-1][2])} +{_range(hunk[0][3], hunk[-1][4])} @@"
    for tag, a, b, c, d in hunk:
        marked = [(" ", old[a:b])] if tag == "equal" else [("-", old[a:b]), ("+", new[c:d])]
        for sign, lines in marked:
            for line in lines:
                yield sign + line.removesuffix("\n")
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
        same += len(commonprefix([one, other]))  # noqa: RUF071 - of bytes
        if one != other:
            break
    text = (
        f"{old.ref.pointer}: {old.ref.media_type}, {old.size:,} bytes\n"
        f"{new.ref.pointer}: {new.ref.media_type}, {new.size:,} bytes\n"
        f"They are equal up to byte {same:,} and differ from there on."
    )
    return QueryResult(text, TEXT, "summary of the difference", note=why)
