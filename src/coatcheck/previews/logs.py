"""Logs, and the output of programs that have no form of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .columns import safe
from .drafts import Draft, Section
from .excerpts import (
    PROSE,
    Body,
    Excerpt,
    Preview,
    ends,
    line,
    line_pattern,
    some,
    uncoloured,
)
from .levels import (
    BAD,
    STAMP,
    LevelCount,
    ask_for_level,
    counts_of,
    is_level_word,
    level_style,
    looks_like_log,
    tally,
)
from .reports import TRACES, last_cause

_TROUBLE: Final = line_pattern(
    r"(?i)(?:^|[\s\[(:])(error|fail(?:ed|ure)?|panic|exception|fatal)(?:[\s:!\])]|$)"
)
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

_LATEST: Final = 200
_MANY: Final = 1_000
_ROOMY: Final = 160
_ERROR: Final = 300  # characters of an error that are shown
_POSITIONS: Final = 14  # words of a line that may tell lines apart
_SAMPLED: Final = 600  # lines that show which words differ
_WORDS: Final = 300  # different words at one position beyond which they are names or numbers
_LISTED: Final = 40
_DIGITS: Final = lazy_pattern(rb"\d+")
_LETTERS: Final = lazy_pattern(rb"[A-Za-z\x80-\xff]{2}")


def log(text: Excerpt) -> Draft | None:
    """Preview of the number of lines of each level, the first and last time, the first and last
    error, and the words that tell the lines apart. None if too few of the first lines have a time
    or a level."""
    head, tail = text.head, text.tail
    is_coloured = "\x1b" in head or "\x1b" in tail
    if is_coloured:
        head, tail = uncoloured(head), uncoloured(tail)
    if not looks_like_log(head):
        return None
    first_lines = head[:16_384].split("\n", 12)[:12]
    last_lines = (tail or head)[-400:].split("\n")[1:]
    near = [each for each in (*first_lines, *last_lines) if each]
    style = level_style(near, is_coloured="\x1b[" in text.head)
    body = text.body
    levels = tally(body, style) if style else {}
    span = _span(head, tail)
    if not levels and not span:
        return None
    lead = " · ".join(part for part in (text.extent, counts_of(levels, body.least), span) if part)
    errors, ask = _errors(text, body, levels)
    sections = [*errors, *_exception(text, body)]
    position = _differing(body.data)
    program = ""
    if position is not None:
        sections.append(_words(body.data, position))
        program = f"print(Counter(w for l in lines for w in l.split()[{position}:{position + 1}])"
        program += ".most_common(30))"
    if not levels and not errors:
        sections.append(_ends_of(head, tail))
    scope = f", {text.within(len(body.data))}" if body.least else ""
    return Draft(
        lead,
        tuple(sections),
        shown="levels and times",
        scope=scope,
        ask=ask,
        program="" if levels else program,
    )


def _span(head: str, tail: str) -> str:
    """The first and the last time."""
    first = STAMP.search(head, 0, 16_384)
    if first is None:
        return ""
    for each in reversed((tail or head)[-16_384:].split("\n")):
        last = STAMP.search(each, 0, _LATEST)
        if last is not None:
            return " to ".join(dict.fromkeys((first.group(), last.group())))
    return ""


def _errors(text: Excerpt, body: Body, levels: dict[str, LevelCount]) -> tuple[list[Section], str]:
    """The first and the last error with their lines, and the read that shows all of them."""
    bad = [levels[name] for name in BAD if name in levels]
    if bad:
        first, last = min(one.first for one in bad), max(one.last for one in bad)
        sections = [_line_at(body, first, "first error", share=0.5)]
        if body.data.find(b"\n", first, last) >= 0:
            sections.append(_line_at(body, last, "last error", share=0.3, lines=text.lines))
        return sections, ask_for_level(levels)
    trouble = next(iter(_TROUBLE.found(body.data, 1)), None) if not levels else None
    if trouble is None:
        return [], ask_for_level(levels)
    word = trouble[1].decode()
    section = _line_at(body, trouble.start(1), f"first “{word}”", share=0.5)
    return [section], 'grep="(?i)error|fail|panic|exception|fatal"'


def _line_at(body: Body, at: int, label: str, *, share: float, lines: int | None = None) -> Section:
    """A line with its number, in few or in more words."""
    number = body.number(at, None if body.least else lines)
    texts = tuple(dict.fromkeys(body.line(at, room) for room in (60, 140, _ERROR)))
    return Section(f"{label}, line {number}: ", [texts], share=share)


def _exception(text: Excerpt, body: Body) -> list[Section]:
    """The last exception of a log."""
    near = text.head[:2_048] + (text.tail or text.head)[-2_048:]
    cause = last_cause(body) if any(cue in near for cue in TRACES) else None
    if cause is None:
        return []
    shown = body.line(cause.at, _ERROR)
    label = f"last exception, line {body.number(cause.at)}: "
    return [Section(label, [(line(shown, 80), shown)], share=0.3)]


def _words(data: bytes, position: int) -> Section:
    """The most frequent words at a position of the lines. Numbers in them count as alike."""
    lines = data.split(b"\n")
    found: Counter[bytes] = Counter()
    for each in lines:
        found[b"".join(each.split(None, position + 1)[position : position + 1])] += 1
    found.pop(b"", None)
    merged = _without_numbers(found)
    items = []
    for word, times in merged.most_common(_LISTED):
        written = word.decode("utf-8", "replace")
        at = data.find(word) if b"#" not in word else -1
        near = data[max(0, data.rfind(b"\n", 0, at)) : at + 200] if at >= 0 else b""
        items.append(
            f"{safe(uncoloured(written), 40, row=near.decode('utf-8', 'replace'))} {times}"
        )
    return Section(f"word {position + 1} of the lines: ", items, "words", len(merged), share=0.6)


def _differing(data: bytes) -> int | None:
    """The first position at which some lines have one of a few words other than times, levels and
    numbers."""
    lines = data.split(b"\n")
    sample = lines[:: max(1, len(lines) // _SAMPLED)]
    rows = [each.split(None, _POSITIONS) for each in sample if each]
    for position in range(1, _POSITIONS):
        column = Counter(row[position] for row in rows if len(row) > position)
        if column.total() * 2 < len(rows):
            return None
        words = _without_numbers(column)
        named = [word for word in words if _LETTERS.search(word) and b"=" not in word]
        covered = sum(words[word] for word in named)
        is_few = 1 < len(named) <= min(_WORDS, column.total() // 4)
        if not is_few or covered * 10 < column.total() * 8:
            continue
        if words.most_common(1)[0][1] * 100 > column.total() * 97:
            continue  # nearly all are the same
        if all(is_level_word(word.decode("utf-8", "replace")) for word in named):
            continue
        return position
    return None


def _without_numbers(counts: Counter[bytes]) -> Counter[bytes]:
    """Counts of words in which every number is `#`."""
    merged: Counter[bytes] = Counter()
    for word, times in counts.items():
        merged[_DIGITS.sub(b"#", word)] += times
    return merged


def _ends_of(head: str, tail: str) -> Section:
    """The first and the last line."""
    first = head.lstrip().partition("\n")[0]
    last = (tail or head).rstrip().rpartition("\n")[2]
    return Section("", [line(first, 200), line(last, 200)], sep="\n", is_counted=False)


def output(text: Excerpt, limit: int) -> Preview | None:
    """Preview of program output: its ends, and between them the first line that reports a
    failure."""
    limit = min(limit, PROSE)
    plain = uncoloured(text.head)
    may_fail = limit >= _ROOMY and _FAILS(plain)
    failures = list(islice(_FAILURE.finditer(f"\n{plain}"), _MANY)) if may_fail else []
    if not failures:
        return None
    first = failures[0]
    least = "at least " if len(failures) == _MANY or not text.is_whole else ""
    number = plain.count("\n", 0, first.start()) + 1
    found = f"; {least}{some(len(failures), 'failure line')}, first at {number}"
    failure = line(_FOLDERS.sub("…/", first.group().strip(), count=1), limit // 3)
    is_inside = first.end() >= limit // 4
    shown = ends(text, limit, found, mark=found, middle=failure if is_inside else "")
    return replace(shown, ask=f'lines="{max(1, number - 5)}:{number + 30}"')
