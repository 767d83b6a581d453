"""Text that is safe to show, cut where a reader would cut it. Head and tail: the preview of anything without a form.

Nothing here moves a cursor or hides: control, bidi and invisible characters come out as escapes. A cut never falls
inside such an escape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .sample import Preview, Text

EMPTY: Final = Preview("(empty)", "all 0 characters")
"""So that nobody takes a stub without a preview for an answer that is empty, or the other way round."""

_UNSEEN: Final = re.compile(
    "\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_ROOMY: Final = 80
_COLOUR: Final = re.compile("\x1b\\[[0-9;]{0,20}m")


def visible(text: str) -> str:
    """The text with every character that would not show as itself escaped. Line feeds and tabs stay."""
    return _UNSEEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    found = match.group()
    if found == "\r\n":
        return "\n"
    code = ord(found)
    if code < 0x100:
        return "\\r" if found == "\r" else f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def uncolour(text: str) -> str:
    """The text without terminal colours."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def line(text: str, room: int) -> str:
    """The beginning of a text on one line, at most `room` characters; an ellipsis says that it goes on."""
    start = text[: 4 * room + 64]
    flat = visible(" ".join(start.split()))
    if len(flat) <= room and len(start) == len(text):
        return flat
    used = fit(flat, room - 1)
    return flat[:used].rstrip() + "…" if room > 0 else ""


def fit(text: str, room: int) -> int:
    """How many characters from the beginning show in `room`, where some of them need an escape."""
    used = _fit(text[: max(room, 0) * 2], room)
    return used - 1 if text[used - 1 : used + 1] == "\r\n" else used


def fit_last(text: str, room: int) -> int:
    """How many characters from the end show in `room`."""
    return _fit(text[-max(room, 1) * 2 :][::-1], room) if room > 0 else 0


def _fit(text: str, room: int) -> int:
    if room <= 0:
        return 0
    if _UNSEEN.search(text) is None and "\r" not in text:
        return min(len(text), room)
    used = 0
    for index, character in enumerate(text):
        room -= len(visible(character))
        if room < 0:
            return index
        used = index + 1
    return used


def some(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def pack(lead: str, items: Sequence[str], total: int, room: int, *, sep: str = ", ") -> tuple[str, int]:
    """`lead` and as many whole items as fit, then how many of `total` are missing. Also the number shown."""
    best, count, length = _more(total, "") if total else "", 0, 0
    for index, item in enumerate(items, 1):
        length += len(item) + (len(sep) if index > 1 else 0)
        rest = _more(total - index, sep) if index < total else ""
        if len(lead) + length > room:
            break
        if len(lead) + length + len(rest) <= room:
            best, count = rest, index
    packed = lead + sep.join(items[:count]) + best
    return (packed if len(packed) <= room else lead[:room]), count


def _more(missing: int, sep: str) -> str:
    return f"{sep}+{missing} more"


def ends(text: Text, limit: int, note: str = "", *, mark: str = "", middle: str = "") -> Preview:
    """Head and tail, and between them how much is left out.

    `note` goes behind what is shown, `mark` into the mark of the cut; `middle` is one line from what was left out.
    """
    if (all_of_it := whole(text, limit, note)) is not None:
        return all_of_it
    tail = text.head if text.is_whole else text.tail
    room = limit - len(_cut(text, 0, 0, limit, mark, middle))
    first = _snap(text.head, fit(text.head, room - room * 2 // 5))
    last = _snap_last(tail, fit_last(tail, room * 2 // 5))
    cut = _cut(text, first, last, limit, mark, middle)
    shown = visible(text.head[:first]) + cut + visible(tail[len(tail) - last :])
    if text.is_whole:
        return Preview(shown, f"first {first} and last {last} of {len(text.head)} characters{note}")
    return Preview(shown, f"first {first} and last {last} characters of {text.size} bytes{note}")


def whole(text: Text, limit: int, note: str = "") -> Preview | None:
    """All of the text, where that fits. A byte-order mark alone is no text."""
    if text.is_whole and not text.head:
        return EMPTY
    if text.is_whole and len(text.head) <= 2 * limit and len(shown := visible(text.head)) <= limit:
        return Preview(shown, f"all {some(len(text.head), 'character')}{note}")
    return None


def _cut(text: Text, first: int, last: int, limit: int, mark: str, middle: str) -> str:
    """The mark of a cut. It counts characters where we hold them all, else bytes."""
    if text.is_whole:
        left_out, unit = str(len(text.head) - first - last), "characters"
    else:
        sides = text.head[:first] + text.tail[len(text.tail) - last :]
        left_out, unit = str(text.size - len(sides.encode(text.encoding, "replace"))), "bytes"
    if limit < _ROOMY:
        return f"…[+{left_out} {unit}]…" if limit >= _ROOMY // 2 else f"…+{left_out}…"
    about = "" if text.is_whole or text.is_exact else "about "
    said = f" …[{about}{left_out} {unit} left out{mark}]… "
    return f"{said}\n{middle}\n" if middle else said


def _snap(text: str, used: int) -> int:
    """A little less, where that ends the head with a line or a word."""
    if used >= len(text) or text[used - 1 : used].isspace() or text[used].isspace():
        return used
    end = text.rfind("\n", used - used // 4, used)
    if end < 0:
        end = text.rfind(" ", max(0, used - min(16, used // 4)), used)
    return end + 1 if end >= 0 else used


def _snap_last(text: str, used: int) -> int:
    """A little less, where that begins the tail with a line or a word."""
    start = len(text) - used
    if used == 0 or start == 0 or text[start - 1].isspace():
        return used
    begin = text.find("\n", start, start + used // 4)
    if begin < 0:
        begin = text.find(" ", start, start + min(16, used // 4))
    return len(text) - begin - 1 if begin >= 0 else used
