"""Excerpts: the two ends of content, decoded, escaped and cut to fit.

A `Sample` is cut in the same place wherever the content comes from, so a value in memory and the same bytes in a store
have the same preview. `ends` is the preview of content without a known form. Control, bidi and invisible characters
come out as escapes, and a cut never falls inside an escape.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from coatcheck.media import decoded, encoding_of
from coatcheck.redaction import is_suspect, mask

EDGE: Final = 64 * 1024
"""Bytes of the head and of the tail in a sample. Content up to twice this size is sampled whole."""

SCANNED: Final = 16 << 20
"""Bytes from the beginning of content in which previews count and find lines. Counts of larger content say "≥"."""

_UNSEEN: Final = re.compile(
    "\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_ANSI: Final = re.compile(
    "\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|\\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\\\)|[()][0-9A-Za-z]|[@-Z\\\\^_])"
)
_ERASED: Final = re.compile("\x1b\\[[0-2]?K")
_WORDLESS: Final = re.compile(r"[\W\d_]+")
_NOT_LITERAL: Final = re.compile(r"[^\w /=<>,;@#%&!~:'-]")
_ROOMY: Final = 80
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}", re.ASCII)
_RESERVED: Final = frozenset(
    {"all", "and", "any", "as", "asc", "both", "case", "cast", "check", "column", "constraint", "create", "default",
     "desc", "describe", "distinct", "do", "else", "end", "except", "false", "fetch", "for", "foreign", "from", "group",
     "having", "in", "initially", "intersect", "into", "lambda", "lateral", "leading", "limit", "not", "null", "offset",
     "on", "only", "or", "order", "pivot", "primary", "qualify", "references", "returning", "select", "show", "some",
     "summarize", "symmetric", "table", "then", "to", "trailing", "true", "union", "unique", "unpivot", "using",
     "variadic", "when", "where", "window", "with"}
)  # fmt: skip
_CONTEXT: Final = 512  # bytes around a line that are searched for secrets too
_COUNTED: Final = 512 << 10  # bytes in which every occurrence is counted
_WINDOWS: Final = 9
_WINDOW: Final = 3_072
_ASK: Final = 90  # characters of an argument
_CONTINUED: Final = bytes(range(0x80, 0xC0))  # of UTF-8: all bytes of a character but the first


@dataclass(frozen=True, slots=True)
class Sample:
    """The first and the last bytes of content of `size` bytes. Overlapping bytes are removed from the tail.

    `lines` counts the lines, including a last one without a line feed; None if they were not counted. `read` returns
    the first `SCANNED` bytes of the content; without it, they are what the sample has."""

    head: bytes
    tail: bytes
    size: int
    lines: int | None = None
    read: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.head) > self.size or len(self.tail) > self.size:
            raise ValueError("a sample cannot be larger than its content")
        overlap = len(self.head) + len(self.tail) - self.size
        if overlap > 0:
            object.__setattr__(self, "tail", self.tail[overlap:])

    @classmethod
    def of(cls, data: bytes, feeds: int | None = None) -> Sample:
        """Return the sample of content in memory, given the number of its line feeds if that is known."""
        feeds = data.count(b"\n") if feeds is None else feeds
        lines = feeds + (not data.endswith(b"\n") if data else 0)
        return cls(data[:EDGE], data[max(EDGE, len(data) - EDGE) :], len(data), lines, lambda: data[:SCANNED])

    def shortened(self, head: int, tail: int) -> Sample:
        """Return a sample with less of both ends."""
        end = self.head + self.tail if len(self.tail) < tail else self.tail
        known = self.head + self.tail if self.is_whole else self.head
        return Sample(self.head[:head], end[-tail:], self.size, self.lines, self.read or (lambda: known))

    @property
    def is_whole(self) -> bool:
        return len(self.head) + len(self.tail) == self.size


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A decoded sample. Whole content is all in `head`. Half characters at a cut edge are dropped.

    `seen` and `seen_last` are the sizes of the head and the tail in bytes."""

    head: str
    tail: str
    is_whole: bool
    size: int
    seen: int
    lines: int | None
    is_exact: bool
    encoding: str
    seen_last: int = 0
    read: Callable[[], bytes] | None = None

    @property
    def body(self) -> Body:
        """The content to count and find in, in UTF-8."""
        if self.read is None or (self.is_whole and self.encoding != "UTF-8"):
            return Body(self.head.encode("utf-8", "surrogatepass"), self.is_whole)
        data = self.read()
        is_all = len(data) == self.size
        return Body(data if self.encoding == "UTF-8" else decoded(data).encode("utf-8", "surrogatepass"), is_all)

    @property
    def extent(self) -> str:
        """The size of the content: its lines if they are counted, else its bytes."""
        return some(self.lines, "line") if self.lines is not None else f"{self.size} bytes"

    @property
    def scope(self) -> str:
        """Suffix for a count over the head, naming the bytes it covers; empty if they are all there are."""
        return "" if self.is_whole else f", in the first {self.seen} of {self.size} bytes"

    @property
    def scope_of_both(self) -> str:
        """Suffix for a count over head and tail."""
        if self.is_whole:
            return ""
        ends = f"{self.seen}" if self.seen == self.seen_last else f"{self.seen} and last {self.seen_last}"
        return f", in the first {'and last ' if self.seen == self.seen_last else ''}{ends} of {self.size} bytes"


class Body(NamedTuple):
    """The first bytes of content, not masked; `is_all` if there are no others. What is shown of it goes through `line`,
    which masks."""

    data: bytes
    is_all: bool

    @property
    def least(self) -> str:
        """Prefix for a count: empty if it is exact."""
        return "" if self.is_all else "≥"

    def occurrences(self, word: bytes) -> tuple[int, bool]:
        """How often a text occurs, and whether that is exact: in large content it is an estimate from windows."""
        data = self.data
        if len(data) <= _COUNTED:
            return data.count(word), True
        windows = self.windows
        return round(windows.count(word) * len(data) / len(windows)), False

    @property
    def windows(self) -> bytes:
        """Parts from all over large content, to estimate from."""
        step = len(self.data) // _WINDOWS
        return b"".join(self.data[at : at + _WINDOW] for at in range(0, len(self.data), step))

    def number(self, at: int) -> int:
        """The number of the line at an offset."""
        return self.data.count(b"\n", 0, at) + 1

    def line(self, at: int, room: int = 400) -> str:
        """The line at an offset, masked, without colours and on at most `room` characters."""
        data = self.data
        start = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        end = min(len(data) if end < 0 else end, start + 4 * room)
        low = max(0, start - _CONTEXT)
        around = data[low : end + _CONTEXT].decode("utf-8", "replace")
        if is_suspect(around):
            first = len(data[low:start].decode("utf-8", "replace"))
            shown = mask(around, first, first + len(data[start:end].decode("utf-8", "replace")))
        else:
            shown = data[start:end].decode("utf-8", "replace")
        return line(uncoloured(shown), room)


class LinePattern:
    """A pattern in RE2 syntax over bytes, for lines of whole contents: linear, and many times as fast as `re`. `^` and
    `$` match at every line. Compiled when it is first used."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    @cached_property
    def _compiled(self) -> Any:
        import re2  # type: ignore[import-untyped]  # it ships no types; here, so that importing coatcheck stays quick

        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # match bytes
        return re2.compile(f"(?m){self.pattern}".encode(), options)

    def is_in(self, text: str) -> bool:
        return self._compiled.search(text.encode("utf-8", "surrogatepass")) is not None

    def found(self, data: bytes, most: int = 1_000) -> list[re.Match[bytes]]:
        """The first matches."""
        return list(islice(self._compiled.finditer(data), most))

    def last(self, data: bytes, within: int = 1 << 16) -> re.Match[bytes] | None:
        """The last match near the end."""
        found = self.found(data[-within:], 10_000)
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of content. `shown` describes it in our own words and never quotes the content.

    `ask` is the argument of the first read that a careful engineer would make of this content, e.g.
    `grep="ERROR|FATAL"`, and `part` the path to the part of a JSON document that it is for."""

    text: str
    shown: str
    ask: str = ""
    part: str = ""


Form = Callable[[Excerpt, int], Preview | None]
"""Preview a text within a limit of characters; None for a text without this form."""


class Kind(NamedTuple):
    """One kind of content, a row of the table that `preview` goes through until a form fits.

    `cues` are texts of which one is near the beginning or the end of all such content; without cues, the form is always
    tried. `percent` says how much longer than usual its preview may be, because that was measured to pay."""

    name: str
    cues: tuple[str, ...]
    form: Form
    percent: int = 100


EMPTY: Final = Preview("(empty)", "all 0 characters")
"""The preview of empty content, which would otherwise look like a missing preview."""


def decode(sample: Sample) -> Excerpt:
    """Decode a sample as UTF-8, or as UTF-16 or UTF-32 if it has their byte-order mark."""
    whole = sample.is_whole
    encoding, unit, mark = encoding_of(sample.head)
    raw = sample.head + sample.tail if whole else sample.head
    head = codecs.getincrementaldecoder(encoding)("replace").decode(raw[mark:], final=whole)
    end = b"" if whole else sample.tail
    end = end[:3].lstrip(_CONTINUED) + end[3:] if unit == 1 else end[-(sample.size - len(end)) % unit :]
    tail = end.decode(encoding, "replace")
    if unit == 2:
        tail = tail.removeprefix("\ufffd")  # the second half of a character
    lines = sample.lines if unit == 1 else None
    if whole and lines is None:
        lines = head.count("\n") + (not head.endswith("\n") if head else 0)
    bars = 0
    if "\r" in head or "\r" in tail:
        (head, bars), (tail, others) = folded(head), folded(tail)
        bars += others
    exact = "\ufffd" not in head and "\ufffd" not in tail and not bars
    seen, last = len(sample.head), len(sample.tail)
    return Excerpt(head, tail, whole, sample.size, seen, lines, exact, encoding, last, sample.read)


def visible(text: str) -> str:
    """Escape every character that would not show as itself, except line feeds and tabs."""
    return _UNSEEN.sub(lambda match: "\n" if match[0] == "\r\n" else match[0].encode("unicode_escape").decode(), text)


def uncoloured(text: str) -> str:
    """Remove colours and other sequences that a terminal does not show."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def pattern_of(words: Iterable[str], *, start: str = "", room: int = _ASK) -> str:
    """A regular expression that matches any of some words, as many as fit. A dot replaces every special character, so
    that it needs no escapes and no quotes."""
    kept: list[str] = []
    for word in dict.fromkeys(_NOT_LITERAL.sub(".", one) for one in words if one and one.isprintable()):
        if sum(map(len, kept)) + len(kept) + len(word) > room:
            break
        kept.append(word)
    return start + (f"({'|'.join(kept)})" if start and len(kept) > 1 else "|".join(kept)) if kept else ""


def grep(*words: str, start: str = "") -> str:
    """The argument that searches for any of some words, which may be any text; empty if there is none."""
    pattern = pattern_of(words, start=start)
    return f'grep="{pattern}"' if pattern else ""


@cache
def is_installed(package: str) -> bool:
    """Whether an optional package is there. No hint names what is not."""
    return find_spec(package) is not None


def sql(columns: Iterable[str], telling: str = "", *, rows: int = 20) -> str:
    """The argument with the first statement on a table: the numbers of the values of a telling column, else the first
    rows. Only plain names are used; empty if SQL is not installed."""
    if not is_installed("duckdb"):
        return ""
    if _PLAIN_NAME.fullmatch(telling) and telling.lower() not in _RESERVED:
        return f'query="SELECT {telling}, count(*) FROM artifact GROUP BY 1 ORDER BY 2 DESC"'  # noqa: S608 - plain names
    plain = [name for name in columns if _PLAIN_NAME.fullmatch(name) and name.lower() not in _RESERVED]
    return f'query="SELECT {", ".join(plain[:4]) or "*"} FROM artifact LIMIT {rows}"'  # noqa: S608 - plain names


def folded(text: str) -> tuple[str, int]:
    """Return a text as a terminal shows it, without colours, and the number of lines of which only the end is left.

    A line that was drawn again and again after carriage returns, such as a progress bar, is what it was at its end. A
    carriage return between different texts stays."""
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
    """Whether texts are states of one line: at least half begin with the same letters as the one before. Numbers are
    alike only in a line that ends: in some files, lines end with carriage returns."""
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
    """Return the beginning of a text on one line of at most `room` characters, with an ellipsis if it is cut."""
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
    """Join `lead`, as many whole items as fit, and the number missing from `total`; also return the number shown."""
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

    `note` is appended to `shown` and `mark` to the mark of the cut. `middle` is one line from the omitted part."""
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
    """Preview of the whole text, or None if it does not fit. A byte-order mark alone counts as empty."""
    if text.is_whole and not text.head:
        return EMPTY
    if text.is_whole and len(text.head) <= 2 * limit and len(shown := visible(text.head)) <= limit:
        return Preview(shown, f"all {some(len(text.head), 'character')}{note}")
    return None


def _cut(text: Excerpt, first: int, last: int, limit: int, mark: str, middle: str) -> str:
    """The mark of a cut. It counts characters if the sample is whole, else bytes."""
    if text.is_whole:
        left_out, unit = str(len(text.head) - first - last), "characters"
    else:
        sides = text.head[:first] + text.tail[len(text.tail) - last :]
        left_out, unit = str(text.size - len(sides.encode(text.encoding, "replace"))), "bytes"
    if limit < _ROOMY:
        return f"…[+{left_out} {unit}]…" if limit >= _ROOMY // 2 else f"…+{left_out}…"
    about = "" if text.is_whole or text.is_exact else "about "
    cut = f" …[{about}{left_out} {unit} left out{mark}]… "
    return f"{cut}\n{middle}\n" if middle else cut


def _snap(text: str, used: int, room: int) -> int:
    """Shorten the head to whole lines. A line that alone is too long is cut, after a word if one ends nearby."""
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
