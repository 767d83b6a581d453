"""Slices of a text by lines or characters, a page at a time.

A page is cut after a line end where there is one within the cap, and never inside a character; a line longer than the
cap is paged by its characters. All pages of a slice, put together, are exactly its text. A position is the offset where
the next page begins and, inside a long line or a slice by characters, two small numbers more: how many bytes more than
characters there were so far, and in the whole (plus one; 0 for not counted).
"""

from __future__ import annotations

from typing import Final

from coatcheck.reading.decoding import Text, visible, width
from coatcheck.reading.page import Part, chars_of, lines_of, parse_chars

COUNTED: Final = 256 << 20  # beyond so many bytes a total is told in bytes: counting characters would take a while


def by_lines(text: Text, spec: str | None, cap: int, position: tuple[int, ...] | None = None) -> Part:
    """The lines that a spec names, all without one, from the position on."""
    if not text.lines:
        return Part("", _shown(["empty: 0 lines"], text, 0, 0))
    first, last = (1, text.lines) if spec is None else lines_of(spec, text.lines)
    at = position[0] if position else text.line_start(first)
    number = text.line_at(at) if position else first
    got = text.take(at, cap)
    wanted = last - number + 1
    cut = _after_feed(got, wanted)
    whole = cut is not None or at + width(got) == text.end
    if cut is None:
        cut = len(got) if whole else got.rfind("\n") + 1
    inside = position is not None and len(position) > 1
    if cut and not inside:
        body, lost = visible(got[:cut])
        lines = body.count("\n") + (not body.endswith("\n"))
        shown = [_lines(number, number + lines - 1, text.lines)]
        after = at + width(got[:cut])
        return Part(body, _shown(shown, text, at, lost), None if whole else (after,), span=(at, after))
    return _inside(text, number, at, got[: cut or len(got)], position if inside else None, whole)


def by_chars(text: Text, spec: str, cap: int, position: tuple[int, ...] | None = None) -> Part:
    """The characters that a spec names, from the position on."""
    size = text.end - text.start
    if not size:
        return Part("", _shown(["empty: 0 characters"], text, 0, 0))
    at, skew, counted = position or (text.start, 0, 0)
    negative = any(end is not None and end < 0 for end in parse_chars(spec))
    if position is None and (negative or size <= COUNTED):
        counted = 1 + size - text.count(text.start, text.end)
    total = size + 1 - counted if counted else None
    first, last = chars_of(spec, size if total is None else total)
    if position is None:
        at = text.skip(text.start, first)
        skew = at - text.start - first
        if at >= text.end:  # the total was not known
            chars_of(spec, text.count(text.start, text.end))
    begin = at - text.start - skew
    got = text.take(at, min(cap, last - begin))
    end = at + width(got)
    whole = begin + len(got) == last or end == text.end
    if not whole and (feed := got.rfind("\n")) >= 0:
        got = got[: feed + 1]
        end = at + width(got)
    body, lost = visible(got)
    upto = begin + len(got)
    if total is not None:
        shown = [f"characters {begin}-{upto} of {total:,}"]
    else:
        shown = [f"characters {begin}-{upto}", f"bytes {at}-{end} of {text.end:,}"]
    following = None if whole else (end, end - text.start - upto, counted)
    return Part(body, _shown(shown, text, at, lost), following, span=(at, end))


def _inside(text: Text, number: int, at: int, got: str, position: tuple[int, ...] | None, whole: bool) -> Part:
    """A page that begins or ends inside a line: it says which characters of it, then which whole lines follow."""
    begin, end = text.line_begin(at), text.line_end(at)
    at, skew, counted = position or (at, 0, 0)
    if position is None and end - begin <= COUNTED:
        counted = 1 + end - begin - text.count(begin, end)
    length = f"{end - begin + 1 - counted:,}" if counted else f"{end - begin:,} bytes"
    rest, feed, others = got.partition("\n")
    start = at - begin - skew
    shown = [f"characters {start}-{start + len(rest)} of line {number} ({length})"]
    if text.lines > 1:
        shown[0] += f" of {text.lines:,}"
    if others:
        shown.append(_lines(number + 1, number + others.count("\n") + (not others.endswith("\n")), text.lines))
    body, lost = visible(got)
    after = at + width(got)
    following: tuple[int, ...] | None
    if whole:
        following = None
    elif feed:
        following = (after,)
    else:
        following = (after, after - begin - start - len(rest), counted)
    return Part(body, _shown(shown, text, at, lost), following, span=(at, after))


def _after_feed(got: str, nth: int) -> int | None:
    """Where the nth line of a text ends, its line feed included; None where it has fewer."""
    if got.count("\n") < nth:
        return None
    at = -1
    for _ in range(nth):
        at = got.find("\n", at + 1)
    return at + 1


def _lines(first: int, last: int, total: int) -> str:
    return f"line {first} of {total:,}" if first == last else f"lines {first}-{last} of {total:,}"


def _shown(parts: list[str], text: Text, at: int, lost: int) -> str:
    notes = text.notes(at)
    if lost:
        notes.insert(0, f"{lost:,} invalid {text.unit}{'' if lost == 1 else 's'}")
    return "; ".join([", ".join(parts), *notes])
