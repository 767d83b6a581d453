"""Texts whose lines are alike: logs, the output of programs, and tables of separated values."""

from __future__ import annotations

import csv
import re
from collections import Counter
from itertools import islice
from typing import Final

from coatcheck.redaction import QuickPattern

from .excerpts import Excerpt, Preview, ends, line, pack, some

_COLOUR: Final = re.compile("\x1b\\[[0-9;]{0,20}m")
_STAMP: Final = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d"
    r"|\d\d/(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)/\d{4}:\d\d:\d\d:\d\d"
    r"|\b\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\b"
)
# Each branch begins with a literal letter, so `re` can skip ahead: ten times faster than a leading `\\b`.
_ANY_LEVEL: Final = (
    r"T(?<!\wT)RACE\b|D(?<!\wD)EBUG\b|I(?<!\wI)NFO\b|N(?<!\wN)OTICE\b|W(?<!\wW)ARN(?:ING)?\b|E(?<!\wE)RROR\b"
    r"|F(?<!\wF)ATAL\b|C(?<!\wC)RITICAL\b|P(?<!\wP)ANIC\b"
    r"|\[(?:trace|debug|info|notice|warn(?:ing)?|error|fatal|critical|crit)(?=\])"
    r"|level=\"?(?:trace|debug|info|notice|warn(?:ing)?|error|fatal|critical|panic)\b"
)
_LEVEL: Final = re.compile(_ANY_LEVEL)
_LEVEL_OF_LINE: Final = re.compile(rf"({_ANY_LEVEL})[^\n]*+")
_WORDS: Final = ("INFO", "ERROR", "WARN", "DEBUG", "TRACE", "NOTICE", "FATAL", "CRITICAL", "PANIC", "level=", "[")
_FAILS: Final = QuickPattern(
    r"(?m)^[ \t]{0,8}(?:--- FAIL: |FAILED[ :]|FAIL: |ERROR[ :]|E {3}|error(?:\[|: )|fatal: |panic: |Traceback \("
    r"|[A-Z][\w\x80-\xff]*(?:Error|Exception): |npm ERR! |✖ |✗ |not ok |##\[error\]"
    r"|[\w./\x80-\xff-]+[:(]\d+[:,)][^\n]*error)"
)
_FAILURE: Final = re.compile(
    r"\n[ \t]{0,8}(?:--- FAIL: |FAILED[ :]|FAIL: |ERROR[ :]|E {3}|error(?:\[\w{1,8}\])?: |fatal: |panic: |Traceback \(|"
    r"[A-Z]\w{0,40}(?:Error|Exception): |npm ERR! |✖ |✗ |not ok |##\[error\]"
    r"|[\w./\-]{1,120}[:(]\d{1,6}[:,)][^\n]{0,12}\berror\b)[^\n]{0,300}"
)
_FOLDERS: Final = re.compile(r"^[\w.\-]{0,60}(?:/[\w.\-]{1,60}){1,12}/")
_RANK: Final = ("PANIC", "FATAL", "CRITICAL", "ERROR", "WARN", "NOTICE", "INFO", "DEBUG", "TRACE")
_BAD: Final = frozenset(_RANK[:4])
_SHORTER: Final = {"WARNING": "WARN", "CRIT": "CRITICAL"}
_PEEK: Final = 24  # lines that decide what a text is
_NEAR: Final = 200
_MANY: Final = 1_000
_ROOMY: Final = 160
_SEPARATORS: Final = (",", "\t", ";", "|")
_ROWS: Final = 30  # rows of a large table that are parsed
_CELL: Final = 24


def _uncolour(text: str) -> str:
    """Remove terminal colours."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def looks_like_log(text: Excerpt) -> bool:
    """Whether half of the first lines have a time or a level near their beginning."""
    lines = [each for each in _uncolour(text.head[:16_384]).split("\n", _PEEK)[:_PEEK] if each.strip()]
    if not may_be_log("\n".join(lines)):
        return False
    hits = sum(bool(_STAMP.search(each, 0, 48) or _LEVEL.search(each, 0, 60)) for each in lines)
    return len(lines) >= 3 and hits * 2 >= len(lines)


def may_be_log(lines: str) -> bool:
    """Fast check: False if no line can have a level or a time."""
    return ":" in lines or any(word in lines for word in _WORDS)


def log(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the number of lines of each level, the first and last time, and the first error."""
    head, tail = _uncolour(text.head), _uncolour(text.tail)
    levels, first_bad = _levels(head)
    if tail:
        in_tail, bad_in_tail = _levels(tail)
        levels += in_tail
        first_bad = first_bad or (bad_in_tail and (0, bad_in_tail[1]))
    least = "" if text.is_whole else "≥"
    counts = " ".join(f"{name} {least}{levels[name]}" for name in _RANK if levels[name])
    first = _STAMP.search(head, 0, 16_384)
    last_lines = reversed((tail or head)[-16_384:].split("\n")) if first else ()
    last = next(filter(None, (_STAMP.search(each, 0, _NEAR) for each in last_lines)), None)
    span = " to ".join(dict.fromkeys((first.group(), last.group()))) if first and last else ""
    if not counts and not span:
        return None
    total = f"{text.lines} lines" if text.lines is not None else f"{text.size} bytes"
    parts = [part for part in (total, counts, span) if part]
    while len(shape := " · ".join(parts)) > limit:
        parts.pop()
    if first_bad is not None and limit - len(shape) > 40:
        number, content = first_bad
        lead = f"\nfirst error, line {number}: " if number else "\nan error near the end: "
        shape += lead + line(content, limit - len(shape) - len(lead))
    return Preview(shape, f"levels and times of {text.scope_of_both.removeprefix(', in ') or f'all {total}'}")


def _levels(text: str) -> tuple[Counter[str], tuple[int, str] | None]:
    """Count one level per line that has one near its beginning; also the first error line with its number."""
    lines = text.split("\n")
    if max(map(len, lines)) > _NEAR:
        text = "\n".join(each[:_NEAR] for each in lines)
    counts: Counter[str] = Counter()
    for found, times in Counter(_LEVEL_OF_LINE.findall(text)).items():
        counts[_name(found)] += times
    if _BAD.isdisjoint(counts):
        return counts, None
    match = next(each for each in _LEVEL_OF_LINE.finditer(text) if _name(each.group(1)) in _BAD)
    start = text.rfind("\n", 0, match.start()) + 1
    return counts, (text.count("\n", 0, start) + 1, text[start : match.end()])


def _name(found: str) -> str:
    name = found.removeprefix("level=").strip('["').upper()
    return _SHORTER.get(name, name)


def output(text: Excerpt, limit: int) -> Preview | None:
    """Preview of program output: its ends, and between them the first line that reports a failure."""
    plain = _uncolour(text.head)
    is_suspect = limit >= _ROOMY and _FAILS(plain)
    failures = list(islice(_FAILURE.finditer(f"\n{plain}"), _MANY)) if is_suspect else []
    if not failures:
        return None
    first = failures[0]
    least = "at least " if len(failures) == _MANY or not text.is_whole else ""
    number = plain.count("\n", 0, first.start()) + 1
    found = f"; {least}{some(len(failures), 'failure line')}, first at {number}"
    failure = line(_FOLDERS.sub("…/", first.group().strip(), count=1), limit // 3)
    return ends(text, limit, found, mark=found, middle=failure if first.end() >= limit // 4 else "")


def table(text: Excerpt, limit: int, *, separator: str | None = None) -> Preview | None:
    """Preview of the columns, the number of rows and the first rows of a table with any separator. One that does not
    parse is shown as text."""
    separator = separator or _separator(text.head) or ","
    lines = text.head.removesuffix("\n").split("\n") if text.is_whole else text.head.split("\n", _ROWS)
    if not text.is_whole and len(lines) > 1:
        lines.pop()
    rows, complete = _parsed([each + "\n" for each in lines], separator)
    if not text.is_whole:
        rows, complete = rows[:-1] if len(rows) > 2 else rows, False  # the last row may be cut inside its quotes
    if not rows:
        return None
    columns, header = rows[0], _is_header(rows)
    total = str(len(rows) - header)
    if not complete:
        total = f"at least {total}" if text.lines is None else str(text.lines - header)
    shape = f"{total} rows × {some(len(columns), 'column')}{'' if header else ', no header'}:"
    named = len(columns)
    if header:
        names = [line(name, 40) or '""' for name in columns[:limit]]
        shape, named = pack(f"{shape} ", names, len(columns), limit)
    shown, part = 0, ""
    for row in rows[header:]:
        cells, kept = pack("", [line(cell, _CELL) for cell in row[:limit]], len(row), limit - len(shape) - 1)
        if kept < min(len(row), 3) or len(shape) + len(cells) + 1 > limit or "\n" in cells:
            break
        shape += "\n" + cells
        shown += 1
        if kept < len(row):
            part = ", the last in part"
            break
    of_columns = f"{named} of {len(columns)} columns and " if named < len(columns) else ""
    by = "" if complete else " (rows by line count)" if text.lines is not None else text.scope
    return Preview(shape, f"{of_columns}{shown} of {total} rows{part}{by}")


def separator_of(text: Excerpt) -> str | None:
    """Return the separator if the text is clearly a table: five rows or more, all of the same three columns or more."""
    first = text.head[:16_384].split("\n", 5)[:5]
    if len(first) < 5 or not any(all(each.count(mark) > 1 for each in first) for mark in _SEPARATORS[:3]):
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
    best = max(marks or _SEPARATORS, key=lambda mark: min(sum(map(len, _parsed([each], mark)[0])) for each in lines))
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
    if len(rows) < 2 or not named or len(set(named)) < len(named):
        return False
    return not any(_is_number(cell) or len(cell) > 80 for cell in islice(named, 200))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
