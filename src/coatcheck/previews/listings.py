"""Texts whose lines are alike: logs, the output of programs, and tables of separated values."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .excerpts import (
    Body,
    Excerpt,
    Preview,
    about,
    ends,
    grep,
    line,
    line_pattern,
    pack,
    some,
    sql,
    uncoloured,
)
from .reports import TRACES, exception_note

_STAMP: Final = lazy_pattern(
    r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d"
    r"|\d\d/(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)/\d{4}:\d\d:\d\d:\d\d"
    r"|\b\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\b"
)
_WORDS: Final = {
    "PANIC": ("PANIC",), "FATAL": ("FATAL",), "CRITICAL": ("CRITICAL",), "ERROR": ("ERROR",),
    "WARN": ("WARN", "WARNING"), "NOTICE": ("NOTICE",), "INFO": ("INFO",), "DEBUG": ("DEBUG",),
    "TRACE": ("TRACE",),
}  # fmt: skip
"""The levels, worst first, and the words for them. Some logs write them in capitals, but each in
one way only."""
_OTHER_WORDS: Final = {
    "PANIC": ("EMERG",), "FATAL": ("FTL",), "CRITICAL": ("CRIT",), "ERROR": ("ERR", "SEVERE"),
    "WARN": ("WRN",), "INFO": ("INF",), "DEBUG": ("DBG", "FINE"), "TRACE": ("TRC", "VERBOSE"),
}  # fmt: skip
"""What some logs write instead."""
_LETTERS: Final = {"FATAL": "F", "ERROR": "E", "WARN": "W", "INFO": "I"}
_LEFT: Final = (
    r"""((?:["']?(?:level|severity|lvl|levelname|log\.level)["']?\s?[=:]\s?["']?)|[\s\[(|<]|^)"""
)
_RIGHT: Final = r"""(?=([\s\])|>:,"'}])|$)"""
_OTHERS: Final = frozenset(word for words in _OTHER_WORDS.values() for word in words)
_ALL_WORDS: Final = [*(word for words in _WORDS.values() for word in words), *sorted(_OTHERS)]
_SPELLINGS: Final = [
    *_ALL_WORDS,
    *map(str.lower, _ALL_WORDS),
    *map(str.title, _ALL_WORDS),
]
_LEVEL: Final = lazy_pattern(rf"{_LEFT}({'|'.join(_SPELLINGS)}){_RIGHT}")
# Each branch begins with a literal letter, so `re` can skip ahead: ten times faster than a leading
# `\\b`.
_CAPITALS: Final = lazy_pattern(
    "|".join(rf"{word[0]}(?<![\w.-]{word[0]}){word[1:]}(?=[\s\])|>:,])" for word in _ALL_WORDS)
)
_MARKED: Final = lazy_pattern(
    rf"\[(?:{'|'.join(map(str.lower, _ALL_WORDS))})\]|(?:level|severity)\"?[=:] ?\"?[a-zA-Z]"
    r"|[IWEF][01]\d[0-3]\d \d\d:"
)
_KLOG: Final = lazy_pattern(r"(^|\s)([IWEF])[01]\d[0-3]\d \d\d:\d\d:\d\d\.\d{6}()")
_TROUBLE: Final = line_pattern(
    r"(?i)(?:^|[\s\[(:])(error|fail(?:ed|ure)?|panic|exception|fatal)(?:[\s:!\])]|$)"
)
_A_LEVEL: Final = QuickPattern("(?i)" + "|".join(_ALL_WORDS))
_FAILS: Final = QuickPattern(
    r"(?m)^[ \t]{0,8}(?:--- FAIL: |FAILED[ :]|FAIL: |ERROR[ :]|E {3}|error(?:\[|: )|fatal: "
    r"|panic: |Traceback \("
    r"|[A-Z][\w\x80-\xff]*(?:Error|Exception): |npm ERR! |✖ |✗ |not ok |##\[error\]"
    r"|[\w./\x80-\xff-]+[:(]\d+[:,)][^\n]*error)"
)
_FAILURE: Final = lazy_pattern(
    r"\n[ \t]{0,8}(?:--- FAIL: |FAILED[ :]|FAIL: |ERROR[ :]|E {3}|error(?:\[\w{1,8}\])?: |fatal: "
    r"|panic: |Traceback \(|"
    r"[A-Z]\w{0,40}(?:Error|Exception): |npm ERR! |✖ |✗ |not ok |##\[error\]"
    r"|[\w./\-]{1,120}[:(]\d{1,6}[:,)][^\n]{0,12}\berror\b)[^\n]{0,300}"
)
_FOLDERS: Final = lazy_pattern(r"^[\w.\-]{0,60}(?:/[\w.\-]{1,60}){1,12}/")
_BAD: Final = ("PANIC", "FATAL", "CRITICAL", "ERROR")
_PEEK: Final = 24  # lines that decide what a text is
_NEAR: Final = 120  # characters of a line in which its level is looked for
_LATEST: Final = 200  # bytes at the start of a line in which a counted level begins
_SPARSE: Final = 2_000  # minimum bytes per occurrence of a rare byte
_SHORT: Final = 64 << 10  # up to this many bytes, every byte of a word is looked for first
_COUNTED: Final = (
    2 << 20
)  # bytes of a log that are searched for frequent levels; beyond, they are estimated
_SAMPLED: Final = 3_072
_FREQUENT: Final = 4  # times in the sample
_MANY: Final = 1_000
_ROOMY: Final = 160
_SEPARATORS: Final = (",", "\t", ";", "|")
_STRAY_QUOTE: Final = QuickPattern(
    r'[^,;|\t\r\n"]"[^,;|\t\r\n"]', captures=True
)  # neither begins nor ends a cell
_ROWS: Final = 30  # rows of a large table that are parsed
_CELL: Final = 24


def _looks_like_log(head: str) -> bool:
    """Whether half of the first lines have a time or a level near their beginning."""
    lines = [each for each in head[:16_384].split("\n", _PEEK)[:_PEEK] if each.strip()]
    if len(lines) < 3 or not may_be_log("\n".join(lines)):
        return False
    missing = len(lines) // 2 + 1
    for each in lines:
        missing -= not (
            _STAMP.search(each, 0, 60)
            or _CAPITALS.search(each, 0, 60)
            or _MARKED.search(each, 0, 60)
        )
        if not missing:
            return False
    return True


def may_be_log(lines: str) -> bool:
    """Fast check: False if no line can have a level or a time."""
    return ":" in lines or _A_LEVEL(lines)


class LevelStyle(NamedTuple):
    """How a log writes its levels: what is around the word, and its case."""

    left: str
    right: str
    case: Callable[[str], str]
    has_others: bool = False

    @lru_cache(maxsize=32)  # noqa: B019 - styles are few and small
    def spellings(self) -> dict[str, list[bytes]]:
        """The words for each level as this log writes them."""
        if self.case is str.strip:  # one letter, as klog writes it
            return {
                name: [f"{self.left}{letter}{self.right}".encode()]
                for name, letter in _LETTERS.items()
            }
        found = {}
        for name, words in _WORDS.items():
            used = (*words, *_OTHER_WORDS.get(name, ())) if self.has_others else words
            found[name] = [f"{self.left}{self.case(word)}{self.right}".encode() for word in used]
        return found

    @lru_cache(maxsize=32)  # noqa: B019 - styles are few and small
    def several(self) -> QuickPattern:
        """A pattern for lines that may have two levels: a message may name one. It may match other
        lines too."""
        words = [re.escape(word.decode()) for words in self.spellings().values() for word in words]
        first = [word.removesuffix(re.escape(self.right)) for word in words]
        return QuickPattern(rf"(?:{'|'.join(first)})[^\n]*(?:{'|'.join(words)})", captures=True)

    def is_first(self, data: bytes, at: int) -> bool:
        """Whether the level at an offset is the first in its line."""
        if self.left == "\n":
            return True
        start = data.rfind(b"\n", 0, at + 1) + 1
        before = data[start : at + 1]
        return not any(word in before for words in self.spellings().values() for word in words)


class LevelCount(NamedTuple):
    """The lines of one level: their number, the offsets of the first and the last, and the words
    for it."""

    lines: int
    first: int
    last: int
    words: tuple[str, ...]
    is_exact: bool = True

    def and_(self, other: LevelCount | None) -> LevelCount:
        if other is None:
            return self
        first, last = min(self.first, other.first), max(self.last, other.last)
        exact = self.is_exact and other.is_exact
        return LevelCount(self.lines + other.lines, first, last, other.words + self.words, exact)


def level_style(lines: list[str], *, is_coloured: bool = False) -> LevelStyle | None:
    """How the levels are written in some lines of a log; None if too few have one."""
    styles: Counter[LevelStyle] = Counter()
    has_others = False
    for each in lines:
        if (match := _CAPITALS.search(each, 0, _NEAR)) is not None:
            at = match.start()
            around = (
                ("m", "\x1b") if is_coloured else (each[at - 1] if at else "\n", each[match.end()])
            )
            styles[LevelStyle(*around, str.upper)] += 1
            has_others = has_others or match[0] in _OTHERS
        elif (match := _KLOG.search(each, 0, _NEAR)) is not None:
            month = each[match.end(2)]
            styles[LevelStyle(match[1] or "\n", month, str.strip)] += 1
        elif (match := _LEVEL.search(each, 0, _NEAR)) is not None:
            word = match[2]
            case = str.upper if word.isupper() else str.lower if word.islower() else str.title
            around = ("m", "\x1b") if is_coloured else (match[1] or "\n", match[3] or "\n")
            styles[LevelStyle(*around, case)] += 1
            has_others = has_others or word.upper() in _OTHERS
    if not styles:
        return None
    style, times = styles.most_common(1)[0]
    is_loose = style.case is not str.upper and style.case is not str.strip and len(style.left) < 2
    return (
        style._replace(has_others=has_others)
        if times * (2 if is_loose else 5) >= len(lines)
        else None
    )


def tally(body: Body, style: LevelStyle, sample: bytes) -> dict[str, LevelCount]:
    """Count the lines of each level in the whole, the worst level first. The level of a line is the
    first that it has near its beginning. Levels that are rare in the sample are counted exactly;
    frequent ones are estimated in large content."""
    found: dict[str, LevelCount] = {}
    frequent: list[tuple[str, bytes]] = []
    often = cache(sample.count)
    data, is_short = body.data, len(body.data) <= _SHORT
    for name, words in style.spellings().items():
        for word in words:
            if word[:1] == b"\n" and data.startswith(word[1:]):
                found[name] = LevelCount(1, 0, 0, (word.decode().strip(),))
            if is_short and not all(map(data.__contains__, word)):
                continue  # one of its bytes does not occur
            at = None
            if not (sample.count(word) > _FREQUENT and _is_near(sample, sample.find(word))):
                byte = min(word, key=often)
                at = _offsets(
                    data, word, byte if often(byte) * _SPARSE < len(sample) else None, style
                )
            if at is None:
                frequent.append((name, word))
            elif at:
                new = LevelCount(len(at), at[0], at[-1], (word.decode().strip(),))
                found[name] = new.and_(found.get(name))
    is_exact = len(data) * len(frequent) <= _COUNTED
    windows = data if is_exact else body.windows
    not_levels = _named_in_messages(windows, style) if frequent else Counter()
    for name, word in frequent:
        count = windows.count(word) - not_levels[word]
        if count > 0:
            total = count if is_exact else round(count * len(data) / len(windows))
            first, last = _first_and_last(data, word, style)
            new = LevelCount(total, first + 1, last + 1, (word.decode().strip(),), is_exact)
            found[name] = new.and_(found.get(name))
    return {name: found[name] for name in _WORDS if name in found}


def _named_in_messages(data: bytes, style: LevelStyle) -> Counter[bytes]:
    """How often each word is not the level of its line, but named later in it."""
    found: Counter[bytes] = Counter()
    if style.left == "\n":
        return found
    words = [word for words in style.spellings().values() for word in words]
    for match in style.several().found(data, data.count(b"\n") + 1):
        start = data.rfind(b"\n", 0, match.start() + 1) + 1
        line_ = data[start : match.end() + 1]
        counts = {word: line_.count(word) for word in words if word in line_}
        first = min(counts, key=line_.find, default=b"")
        for word, count in counts.items():
            found[word] += count - (word == first)
    return found


def _first_and_last(data: bytes, word: bytes, style: LevelStyle) -> tuple[int, int]:
    """The offsets of the first and the last line of a level; of a word named in a message, if many
    are before it."""
    first, last = data.find(word), data.rfind(word)
    for _ in range(_MANY):
        if style.is_first(data, first):
            break
        first = data.find(word, first + 1)
    for _ in range(_MANY):
        if style.is_first(data, last):
            break
        last = data.rfind(word, 0, last)
    return max(first, 0), max(last, 0)


def _offsets(data: bytes, word: bytes, byte: int | None, style: LevelStyle) -> list[int] | None:
    """The offsets of a word that is the level of a line, or None if there are many. If it has a
    rare byte, hopping from one of these to the next is many times as fast."""
    offset = 0 if byte is None else word.index(byte)
    key, at, left = word if byte is None else bytes([byte]), -1, 2 * _MANY + len(data) // _SPARSE
    found: list[int] = []
    while (at := data.find(key, at + 1)) >= 0:
        left -= 1
        if not left:
            return None
        start = at - offset
        if start < 0 or not data.startswith(word, start) or not _is_near(data, start):
            continue
        if style.is_first(data, start):
            found.append(start + 1)
    return found


def _is_near(data: bytes, at: int) -> bool:
    """Whether an offset is near the beginning of its line."""
    return at < _LATEST or data.rfind(b"\n", at - _LATEST, at + 1) >= 0


def counts_of(levels: dict[str, LevelCount], least: str) -> str:
    """`ERROR 3 INFO ~8,900`: an estimate has two digits."""
    return " ".join(
        f"{name} {f'{least}{one.lines}' if one.is_exact else about(one.lines)}"
        for name, one in levels.items()
    )


def log(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the number of lines of each level, the first and last time, and the first and last
    error. None if too few of the first lines have a time or a level."""
    head, tail = text.head, text.tail
    if is_coloured := "\x1b" in head or "\x1b" in tail:
        head, tail = uncoloured(head), uncoloured(tail)
    if not _looks_like_log(head):
        return None
    near = [
        each
        for each in (*head[:16_384].split("\n", 12)[:12], *(tail or head)[-400:].split("\n")[1:])
        if each
    ]
    style = level_style(near, is_coloured=is_coloured and "\x1b[" in text.head)
    body, extent = text.body, text.extent
    levels = tally(body, style, text.head[:_SAMPLED].encode("utf-8", "replace")) if style else {}
    first = _STAMP.search(head, 0, 16_384)
    last_lines = reversed((tail or head)[-16_384:].split("\n")) if first else ()
    last = next(filter(None, (_STAMP.search(each, 0, _LATEST) for each in last_lines)), None)
    span = " to ".join(dict.fromkeys((first.group(), last.group()))) if first and last else ""
    if not levels and not span:
        return None
    exact = all(one.is_exact for one in levels.values())
    parts = [part for part in (extent, counts_of(levels, body.least), span) if part]
    while len(shape := " · ".join(parts)) > limit:
        parts.pop()
    bad = [levels[name] for name in _BAD if name in levels]
    first_bad, last_bad = (
        (min(one.first for one in bad), max(one.last for one in bad)) if bad else (0, 0)
    )
    ask, what = ask_for_level(levels), "levels and times"
    if bad and limit - len(shape) >= 50:
        shape += body.errors(first_bad, last_bad, text.lines, limit - len(shape))
    ends_ = text.head[:2_048] + (text.tail or text.head)[-2_048:]
    if limit - len(shape) >= 60 and any(map(ends_.__contains__, TRACES)):
        shape += exception_note(body, limit - len(shape))
    if not levels and (match := next(iter(_TROUBLE.found(body.data, 1)), None)) is not None:
        lead = f"\nfirst “{match[1].decode()}”, line {body.number(match.start(1))}: "
        shape += (
            lead + body.line(match.start(1), limit - len(shape + lead))
            if limit - len(shape + lead) > 20
            else ""
        )
        ask = 'grep="(?i)error|fail|panic|exception|fatal"'
    elif not levels and limit - len(shape) > 100:
        first_line, last_line = (
            head.lstrip().partition("\n")[0],
            (tail or head).rstrip().rpartition("\n")[2],
        )
        shape += "\n" + line(first_line, (limit - len(shape)) // 2 - 1)
        shape += "\n" + line(last_line, limit - len(shape) - 1)
        what = "times, first and last line"
    of = f"the first {len(body.data)} of {text.size} bytes" if body.least else text.all_of(extent)
    return Preview(shape, f"{what} of {of}{'' if exact else ', ~ is an estimate'}", ask)


def ask_for_level(levels: dict[str, LevelCount]) -> str:
    """The read that shows the worst lines, or else the last ones."""
    names = [name for name in levels if name in _BAD] or [name for name in levels if name == "WARN"]
    return (
        grep(*(word for name in names for word in levels[name].words)) if names else 'lines="-40:"'
    )


def output(text: Excerpt, limit: int) -> Preview | None:
    """Preview of program output: its ends, and between them the first line that reports a
    failure."""
    plain = uncoloured(text.head)
    is_suspect = limit >= _ROOMY and _FAILS(plain)
    failures = list(islice(_FAILURE.finditer(f"\n{plain}"), _MANY)) if is_suspect else []
    if not failures:
        return None
    first = failures[0]
    least = "at least " if len(failures) == _MANY or not text.is_whole else ""
    number = plain.count("\n", 0, first.start()) + 1
    found = f"; {least}{some(len(failures), 'failure line')}, first at {number}"
    failure = line(_FOLDERS.sub("…/", first.group().strip(), count=1), limit // 3)
    shown = ends(
        text, limit, found, mark=found, middle=failure if first.end() >= limit // 4 else ""
    )
    return replace(shown, ask=f'lines="{max(1, number - 5)}:{number + 30}"')


def table(text: Excerpt, limit: int, *, separator: str | None = None) -> Preview | None:
    """Preview of the columns, the number of rows and the first rows of a table with any separator.
    One that does not parse is shown as text."""
    separator = separator or _separator(text.head) or ","
    lines = (
        text.head.removesuffix("\n").split("\n") if text.is_whole else text.head.split("\n", _ROWS)
    )
    if not text.is_whole and len(lines) > 1:
        lines.pop()
    rows, complete = _parsed([each + "\n" for each in lines], separator)
    if not text.is_whole:
        rows, complete = (
            rows[:-1] if len(rows) > 2 else rows,
            False,
        )  # the last row may be cut inside its quotes
    if not rows:
        return None
    columns, header = rows[0], _is_header(rows)
    total = str(len(rows) - header)
    if not complete:
        total = (
            f"at least {total}" if text.lines is None else _rows_by_lines(text, text.lines - header)
        )
    shape = f"{total} rows × {some(len(columns), 'column')}{'' if header else ', no header'}:"
    named = len(columns)
    if header:
        names = [line(name, 40) or '""' for name in columns[:limit]]
        shape, named = pack(f"{shape} ", names, len(columns), limit)
    shown, part = 0, ""
    for row in rows[header:]:
        cells, kept = pack(
            "", [line(cell, _CELL) for cell in row[:limit]], len(row), limit - len(shape) - 1
        )
        if kept < min(len(row), 3) or len(shape) + len(cells) + 1 > limit or "\n" in cells:
            break
        shape += "\n" + cells
        shown += 1
        if kept < len(row):
            part = ", the last in part"
            break
    of_columns = f"{named} of {len(columns)} columns and " if named < len(columns) else ""
    by = text.scope if total.startswith("at least") else ""
    by = ", ~ is an estimate" if total.startswith("~") else by
    names_ = columns if header else []
    ask = sql(names_, _grouped(names_, rows[header:])) if header else 'lines="1:30"'
    return Preview(shape, f"{of_columns}{shown} of {total} rows{part}{by}", ask or 'lines="1:30"')


def _rows_by_lines(text: Excerpt, lines: int) -> str:
    """The number of rows of a table that was not parsed as a whole, by its lines. Line feeds in
    quotes end no row. It is an estimate if quotes or empty lines leave a doubt."""
    body = text.body
    parts = body.data.split(b'"')  # those in quotes are at odd places
    if body.least or len(parts) % 2 == 0 or _STRAY_QUOTE.found(body.data, 1):
        return f"~{lines}"
    inside = sum(part.count(b"\n") for part in parts[1::2])
    has_empty_lines = b"\n\n" in body.data or b"\n\r\n" in body.data
    return f"~{lines - inside}" if has_empty_lines else str(lines - inside)


def _grouped(names: list[str], rows: list[list[str]]) -> str:
    """The column with the fewest values, but two or more, in some rows; empty if there is none."""
    best, fewest = "", 8
    for index, name in enumerate(names[:60]):
        values = {row[index] for row in rows[:200] if len(row) > index}
        is_text = not any(map(_is_number, values - {""}))
        if (
            1 < len(values) < min(fewest, len(rows[:200]) // 3 + 1)
            and is_text
            and max(map(len, values)) <= 40
        ):
            best, fewest = name, len(values)
    return best


def separator_of(text: Excerpt) -> str | None:
    """Return the separator if the text is clearly a table: at least five rows with the same three
    columns or more."""
    first = text.head[:16_384].split("\n", 5)[:5]
    if len(first) < 5 or not any(
        all(each.count(mark) > 1 for each in first) for mark in _SEPARATORS[:3]
    ):
        return None
    separator = _separator(text.head)
    if separator is None or separator == "|":
        return None
    rows, _ = _parsed(text.head.split("\n", _ROWS)[:_ROWS][:-1], separator)
    widths = set(map(len, rows))
    if len(rows) < 5 or len(widths) != 1 or min(widths) < 3:
        return None
    cells = [cell for row in rows for cell in row]
    return separator if sum(len(cell) > 60 for cell in cells) * 4 < len(cells) else None


def _separator(head: str) -> str | None:
    """The separator that makes the most columns in each of the first lines."""
    lines = [each for each in head[:16_384].split("\n", _ROWS)[:10] if each.strip()]
    marks = [mark for mark in _SEPARATORS if all(mark in each for each in lines)]
    if len(marks) == 1 or not lines:
        return marks[0] if lines else None
    best = max(
        marks or _SEPARATORS,
        key=lambda mark: min(sum(map(len, _parsed([each], mark)[0])) for each in lines),
    )
    return best if any(best in each for each in lines) else None


def _parsed(lines: list[str], separator: str) -> tuple[list[list[str]], bool]:
    """The rows up to the first invalid one, and whether all are valid."""
    rows: list[list[str]] = []
    try:
        rows.extend(row for row in csv.reader(lines, delimiter=separator) if row)
    except csv.Error:
        return rows, False
    return rows, True


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row has the column names: all different, no numbers."""
    named = [cell for cell in rows[0] if cell.strip()]
    if (
        len(rows) < 2
        or len(named) < len(rows[0]) - (len(named) > 2)
        or len(set(named)) < len(named)
    ):
        return False
    return not any(_is_number(cell) or len(cell) > 80 for cell in islice(named, 200))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
