"""Excerpts: the two ends of a text, and what every form of preview is made with.

A form gets an `Excerpt` and returns a `Preview`. `ends` is the preview of content without a known
form. Control, bidi and invisible characters come out as escapes, and a cut never falls inside an
escape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.media import Look, decoded
from coatcheck.redaction import QuickPattern, is_suspect, mask

_UNSEEN: Final = lazy_pattern(
    "\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_ANSI: Final = lazy_pattern(
    "\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|\\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\\\)|[()][0-9A-Za-z]"
    "|[@-Z\\\\^_])"
)
_ERASED: Final = lazy_pattern("\x1b\\[[0-2]?K")
_WORDLESS: Final = lazy_pattern(r"[\W\d_]+")
_NOT_LITERAL: Final = lazy_pattern(r"[^\w /=<>,;@#%&!~:'-]")
_ROOMY: Final = 80
_PLAIN_NAME: Final = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,40}", re.ASCII)
_RESERVED: Final = frozenset(
    {"all", "and", "any", "as", "asc", "both", "case", "cast", "check", "column", "constraint",
     "create", "default", "desc", "describe", "distinct", "do", "else", "end", "except", "false",
     "fetch", "for", "foreign", "from", "group", "having", "in", "initially", "intersect", "into",
     "lambda", "lateral", "leading", "limit", "not", "null", "offset", "on", "only", "or", "order",
     "pivot", "primary", "qualify", "references", "returning", "select", "show", "some",
     "summarize", "symmetric", "table", "then", "to", "trailing", "true", "union", "unique",
     "unpivot", "using", "variadic", "when", "where", "window", "with"}
)  # fmt: skip
_CONTEXT: Final = 512  # bytes around a line that are searched for secrets too
_ASK: Final = 90  # characters of an argument


class Excerpt(NamedTuple):
    """A decoded sample. Whole content is all in `head`. Half characters at a cut edge are dropped.

    `seen` is the size of the head in bytes. `read` returns the first bytes of the content. If
    `is_folded`, progress bars in it are in their last state. If `is_part`, the content is what is
    left of a result that was cut before it came here."""

    head: str
    tail: str
    is_whole: bool
    size: int
    seen: int
    lines: int | None
    is_exact: bool
    look: Look
    read: Callable[[], bytes] | None = None
    is_folded: bool = False
    is_part: bool = False

    def all_of(self, what: str) -> str:
        """`all 12 lines`, or `12 lines that arrived` of a result that was cut."""
        return f"{what} that arrived" if self.is_part else f"all {what}"

    @property
    def body(self) -> Body:
        """The content to search and count in, as UTF-8."""
        is_utf8 = self.look.encoding.name == "UTF-8"
        if self.read is None or (self.is_whole and not is_utf8):
            return Body(self.head.encode("utf-8", "surrogatepass"), "" if self.is_whole else "≥")
        data = self.read()
        least = "" if len(data) == self.size else "≥"
        return Body(data if is_utf8 else decoded(data).encode("utf-8", "surrogatepass"), least)

    @property
    def everything(self) -> tuple[str, str]:
        """All of the text, not masked, and the suffix for figures from it: empty if it is the whole
        content. What is shown of it goes through `columns.safe` or `masked_line`."""
        body = self.body
        text = body.data.decode("utf-8", "replace").removeprefix("\ufeff")
        return text, f", {self.within(len(body.data))}" if body.least else ""

    @property
    def extent(self) -> str:
        """The size of the content: its lines if they are counted, else its bytes."""
        return some(self.lines, "line") if self.lines is not None else f"{self.size} bytes"

    @property
    def scope(self) -> str:
        """Suffix for a count over the head, naming the bytes it covers; empty if they are the whole
        content."""
        return "" if self.is_whole else f", {self.within(self.seen)}"

    def within(self, seen: int) -> str:
        """The part of the content that figures and lists are from, if it is the first `seen`
        bytes."""
        return f"in the first {seen} of {self.size} bytes"


class Body(NamedTuple):
    """The first bytes of content, not masked. Text to show goes through `line`, which masks.
    `least` is the prefix for a count in them, empty if they are the whole content and the count is
    exact."""

    data: bytes
    least: str

    @property
    def lines(self) -> bytes:
        """The content with a line feed before its first line too. Offsets in it are those of the
        line feeds before the lines in `data`, plus one."""
        return b"\n" + self.data

    def number(self, at: int, lines: int | None = None) -> int:
        """The number of the line at an offset. If the number of all lines is known, it is counted
        from the end."""
        if lines is None:
            return self.data.count(b"\n", 0, at) + 1
        return lines + self.data.endswith(b"\n") - self.data.count(b"\n", at)

    def line(self, at: int, room: int = 400) -> str:
        """The line at an offset, masked, without colours and in at most `room` characters."""
        shown, around = self._line(at, room)
        return self._line(at, room, masks=True)[0] if is_suspect(around) else shown

    def _line(self, at: int, room: int, *, masks: bool = False) -> tuple[str, str]:
        """The line at an offset, and the text around it, to find a secret that the line would
        cut."""
        data = self.data
        start = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        end = min(len(data) if end < 0 else end, start + 4 * room)
        text, low = data[start:end].decode("utf-8", "replace"), max(0, start - _CONTEXT)
        around = data[low : end + _CONTEXT].decode("utf-8", "replace")
        if masks:
            first = len(data[low:start].decode("utf-8", "replace"))
            text = mask(around, first, first + len(text))
        return line(uncoloured(text), room), around

    def errors(
        self, first: int, last: int, lines: int | None, room: int, *, masks: bool = False
    ) -> str:
        """The first and the last line with an error, masked, each on a line of its own with its
        number."""
        is_last = room > 150 and not self.least and self.data.find(b"\n", first, last) >= 0
        lead, around = f"\nfirst error, line {self.number(first)}: ", ""
        text, near = self._line(first, (room // 2 if is_last else room) - len(lead), masks=masks)
        shown = lead + text
        if is_last:
            lead = f"\nlast, line {self.number(last, lines)}: "
            text, around = self._line(last, room - len(shown) - len(lead), masks=masks)
            shown += lead + text
        is_safe = masks or not is_suspect(f"{near}\n{around}")
        return shown if is_safe else self.errors(first, last, lines, room, masks=True)


def line_pattern(pattern: str) -> QuickPattern:
    """A pattern for the lines of whole contents: `^` and `$` match at every line. For few matches:
    each takes 5 µs."""
    return QuickPattern(f"(?m){pattern}", captures=True)


def start_pattern(pattern: str) -> re.Pattern[bytes]:
    """A pattern for the beginnings of many lines of `Body.lines`. It begins with the line feed
    before the line, to which `re` skips ahead; a match takes 0.3 µs."""
    return lazy_pattern(rf"\n{pattern}".encode(), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of content. `shown` describes it in our own words and never quotes the content.

    `ask` is the argument of the first read that a careful engineer would make of this content, e.g.
    `grep="ERROR|FATAL"`, and `part` the path to the part of a JSON document that it is for.
    `program` is Python to run instead, if the agent can."""

    text: str
    shown: str
    ask: str = ""
    part: str = ""
    program: str = ""


PROSE: Final = 600
"""Maximum number of characters of a preview that shows only the two ends of a text."""

EMPTY: Final = Preview("(empty)", "all 0 characters")
"""The preview of empty content, which would otherwise look like a missing preview."""


def visible(text: str) -> str:
    """Escape every character that would not show as itself, except line feeds and tabs."""
    return _UNSEEN.sub(
        lambda match: "\n" if match[0] == "\r\n" else match[0].encode("unicode_escape").decode(),
        text,
    )


def uncoloured(text: str) -> str:
    """Remove colours and other sequences that a terminal does not show."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def grep(*words: str, start: str = "") -> str:
    """The argument that searches for any of these texts, as many of them as fit; empty if there are
    none. A dot replaces every special character, so that the pattern needs no escapes and no
    quotes."""
    kept: list[str] = []
    for word in dict.fromkeys(
        _NOT_LITERAL.sub(".", one) for one in words if one and one.isprintable()
    ):
        if sum(map(len, kept)) + len(kept) + len(word) > _ASK:
            break
        kept.append(word)
    pattern = f"({'|'.join(kept)})" if start and len(kept) > 1 else "|".join(kept)
    return f'grep="{start}{pattern}"' if kept else ""


@cache
def is_installed(package: str) -> bool:
    """Whether an optional package is installed. Hints name only installed ones."""
    return find_spec(package) is not None


def sql(columns: Iterable[str], telling: str = "", *, rows: int = 20) -> str:
    """The argument with the first statement on a table: how often each value of a telling column
    occurs, else the first rows. Only plain names are used; empty if SQL is not installed."""
    if not is_installed("duckdb"):
        return ""
    if _PLAIN_NAME.fullmatch(telling) and telling.lower() not in _RESERVED:
        return f'query="SELECT {telling}, count(*) FROM artifact GROUP BY 1 ORDER BY 2 DESC"'  # noqa: S608 - plain names
    plain = [
        name for name in columns if _PLAIN_NAME.fullmatch(name) and name.lower() not in _RESERVED
    ]
    return f'query="SELECT {", ".join(plain[:4]) or "*"} FROM artifact LIMIT {rows}"'  # noqa: S608 - plain names


def folded(text: str) -> tuple[str, int]:
    """Return a text as a terminal shows it, without colours, and the number of lines of which only
    the end is left.

    A line that was drawn again and again after carriage returns, such as a progress bar, is shown
    in its last state. A carriage return between different texts stays."""
    if "\r" not in text or text.count("\r") == text.count("\r\n"):
        return uncoloured(text), 0
    lines, count = text.split("\n"), 0
    for index, each in enumerate(lines):
        *drawn, last = each.removesuffix("\r").split("\r")
        is_ended = index + 1 < len(lines)
        if drawn and _is_redrawn(shown := [one for one in (*drawn, last) if one], is_ended):
            lines[index] = _overwritten(shown) + "\r" * each.endswith("\r")
            count += 1
    return uncoloured("\n".join(lines)), count


def _is_redrawn(drawn: Sequence[str], is_ended: bool) -> bool:
    """Whether texts are states of one line: at least half begin with the same letters as the one
    before. Numbers count as alike only in a line that ends, since some files end lines with
    carriage returns."""
    words = [_WORDLESS.sub("", uncoloured(each[:80]))[:6] for each in drawn]
    alike = sum(old == new and (is_ended or bool(new)) for old, new in pairwise(words))
    return 2 * alike >= len(drawn) - 1 or any(_ERASED.match(each) for each in drawn[1:])


def _overwritten(drawn: Sequence[str]) -> str:
    """What is left of texts that were written over one another, the last on top."""
    left = ""
    for each in reversed(drawn):
        text = uncoloured(each)
        if len(text) > len(left):
            left += text[len(left) :]
        if _ERASED.search(each):
            break
    return left.rstrip(" ")


def line(text: str, room: int) -> str:
    """Return the beginning of a text on one line of at most `room` characters, with an ellipsis if
    it is cut."""
    start = text[: 4 * room + 64]
    flat = visible(" ".join(start.split()))
    if len(flat) <= room and len(start) == len(text):
        return flat
    used = fit(flat, room - 1)
    return flat[:used].rstrip() + "…" if room > 0 else ""


def masked_line(text: str, room: int) -> str:
    """Like `line`, for text that was not masked before."""
    start = text[: 4 * room + 256]
    return line(mask(start) if is_suspect(start) else text, room)


def fit(text: str, room: int) -> int:
    """Number of characters from the beginning that fit into `room`, counting escapes."""
    used = _fit(text[: max(room, 0) * 2], room)
    return used - 1 if text[used - 1 : used + 1] == "\r\n" else used


def _fit(text: str, room: int) -> int:
    if room <= 0 or _UNSEEN.search(text) is None:
        return max(0, min(len(text), room))
    for index, character in enumerate(text):
        room -= len(visible(character))
        if room < 0:
            return index
    return len(text)


def some(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def about(number: int) -> str:
    """An estimate, rounded to two digits: `~8,100`."""
    return f"~{round(number, 2 - len(str(number))):,}"


def count(number: int, noun: str) -> str:
    """`1 row`, `2,711 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def pack(lead: str, items: Sequence[str], total: int, room: int) -> tuple[str, int]:
    """Join `lead`, as many whole items as fit, and the number missing from `total`; also return the
    number shown."""
    best, kept, length = f"+{total} more" if total else "", 0, 0
    for index, item in enumerate(items, 1):
        length += len(item) + (2 if index > 1 else 0)
        rest = f", +{total - index} more" if index < total else ""
        if len(lead) + length > room:
            break
        if len(lead) + length + len(rest) <= room:
            best, kept = rest, index
    packed = lead + ", ".join(items[:kept]) + best
    return (packed if len(packed) <= room else lead[:room]), kept


def ends(text: Excerpt, limit: int, note: str = "", *, mark: str = "", middle: str = "") -> Preview:
    """Preview of head and tail, with the size of the omitted part between them.

    `note` is appended to `shown` and `mark` to the mark of the cut. `middle` is one line from the
    omitted part."""
    if (all_of_it := whole(text, limit, note)) is not None:
        return all_of_it
    tail = text.head if text.is_whole else text.tail
    room = limit - len(_cut(text, 0, 0, limit, mark, middle))
    first = _snap(text.head, fit(text.head, room - room * 2 // 5), room)
    last_room = room - len(visible(text.head[:first]))
    last = _snap_last(tail, _fit(tail[-max(last_room, 1) * 2 :][::-1], last_room), room)
    cut = _cut(text, first, last, limit, mark, middle)
    shown = visible(text.head[:first]) + cut + visible(tail[len(tail) - last :])
    if text.is_whole:
        return Preview(shown, f"first {first} and last {last} of {len(text.head)} characters{note}")
    return Preview(shown, f"first {first} and last {last} characters of {text.size} bytes{note}")


def whole(text: Excerpt, limit: int, note: str = "") -> Preview | None:
    """Preview of the whole text, or None if it does not fit. A byte-order mark alone counts as
    empty."""
    if text.is_whole and not text.head:
        return EMPTY
    if text.is_whole and len(text.head) <= 2 * limit and len(shown := visible(text.head)) <= limit:
        return Preview(shown, f"{text.all_of(some(len(text.head), 'character'))}{note}")
    return None


def _cut(text: Excerpt, first: int, last: int, limit: int, mark: str, middle: str) -> str:
    """The mark of a cut. It counts characters if the sample is whole, else bytes."""
    if text.is_whole:
        left_out, unit = str(len(text.head) - first - last), "characters"
    else:
        sides = text.head[:first] + text.tail[len(text.tail) - last :]
        left_out, unit = (
            str(text.size - len(sides.encode(text.look.encoding.name, "replace"))),
            "bytes",
        )
    if limit < _ROOMY:
        return f"…[+{left_out} {unit}]…" if limit >= _ROOMY // 2 else f"…+{left_out}…"
    about = "" if text.is_whole or text.is_exact else "about "
    cut = f" …[{about}{left_out} {unit} left out{mark}]… "
    return f"{cut}\n{middle}\n" if middle else cut


def _snap(text: str, used: int, room: int) -> int:
    """Shorten the head to whole lines. A line that alone is too long is cut, after a word if one
    ends nearby."""
    if used >= len(text) or text[used - 1 : used] == "\n":
        return used
    start = text.rfind("\n", 0, used) + 1
    if text.find("\n", used, start + room) >= 0 or len(text) <= start + room:
        return start if start else _word(text, used)
    return _word(text, used)


def _word(text: str, used: int) -> int:
    if text[used - 1 : used].isspace() or text[used].isspace():
        return used
    end = text.rfind(" ", max(0, used - min(16, used // 4)), used)
    return end + 1 if end >= 0 else used


def _snap_last(text: str, used: int, room: int) -> int:
    """Shorten the tail likewise."""
    start = len(text) - used
    if used == 0 or start == 0 or text[start - 1] == "\n":
        return used
    end = text.find("\n", start, len(text) - 1)
    if end >= 0 and text.rfind("\n", max(0, end - room), start) >= 0:
        return len(text) - end - 1
    if text[start - 1].isspace():
        return used
    begin = text.find(" ", start, start + min(16, used // 4))
    return len(text) - begin - 1 if begin >= 0 else used
