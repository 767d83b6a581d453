"""Levels of a log: how it writes them, and how many lines have each.

All lines are counted, with one search for each word: 0.4 ms for a word and a megabyte.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .excerpts import Body, grep

STAMP: Final = lazy_pattern(
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
_A_LEVEL: Final = QuickPattern("(?i)" + "|".join(_ALL_WORDS))
BAD: Final = ("PANIC", "FATAL", "CRITICAL", "ERROR")
_PEEK: Final = 24  # lines that decide what a text is
_START: Final = 62  # characters of a line in which its time or level decides
_CLOCK: Final = lazy_pattern(r"\d\d:\d\d")
_NEAR: Final = 120  # characters of a line in which its level is looked for
_LATEST: Final = 200  # bytes at the start of a line in which a counted level begins
_MANY: Final = 1_000
_RARE: Final = 50  # words that are looked at one by one


def looks_like_log(head: str) -> bool:
    """Whether half of the first lines have a time or a level near their beginning."""
    lines = [each[:_START] for each in head[:16_384].split("\n", _PEEK)[:_PEEK] if each.strip()]
    near = "\n".join(lines)
    patterns = [STAMP] if _CLOCK.search(near) else []
    patterns += [_CAPITALS, _MARKED] if _A_LEVEL(near) else []
    if len(lines) < 3 or not patterns:
        return False
    formed = 0
    for number, each in enumerate(lines):
        if (number - formed) * 2 > len(lines):
            return False
        if any(pattern.search(each) for pattern in patterns):
            formed += 1
    return formed * 2 >= len(lines)


@dataclass(frozen=True)
class LevelStyle:
    """How a log writes its levels: what is around the word, and its case. With `has_others`, it
    uses the less usual words too."""

    left: str
    right: str
    case: Callable[[str], str]
    has_others: bool = False

    @cached_property
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

    @cached_property
    def words(self) -> list[bytes]:
        return [word for words in self.spellings.values() for word in words]

    @cached_property
    def several(self) -> QuickPattern:
        """A pattern for lines that may have two levels: a message may name one. It may match other
        lines too."""
        words = [re.escape(word.decode()) for word in self.words]
        first = [word.removesuffix(re.escape(self.right)) for word in words]
        return QuickPattern(rf"(?:{'|'.join(first)})[^\n]*(?:{'|'.join(words)})", captures=True)

    def is_level(self, data: bytes, at: int) -> bool:
        """Whether the word at an offset is near the beginning of its line, and the first level in
        it."""
        start = data.rfind(b"\n", 0, at + 1) + 1
        if at - start > _LATEST:
            return False
        before = data[start : at + 1]
        return self.left == "\n" or not any(word in before for word in self.words)


@dataclass(frozen=True, slots=True)
class LevelCount:
    """The lines of one level: their number, the offsets of the first and the last, and the words
    for it."""

    lines: int
    first: int
    last: int
    words: tuple[str, ...]

    def and_(self, other: LevelCount | None) -> LevelCount:
        if other is None:
            return self
        first, last = min(self.first, other.first), max(self.last, other.last)
        return LevelCount(self.lines + other.lines, first, last, other.words + self.words)


def level_style(lines: list[str], *, is_coloured: bool = False) -> LevelStyle | None:
    """How the levels are written in some lines of a log; None if too few have one."""
    styles: Counter[LevelStyle] = Counter()
    has_others = False
    for each in lines:
        found = _style_of(each, is_coloured=is_coloured)
        if found is None:
            continue
        styles[replace(found, has_others=False)] += 1
        has_others = has_others or found.has_others
    if not styles:
        return None
    style, times = styles.most_common(1)[0]
    has_words = style.case is not str.upper and style.case is not str.strip
    least = 2 if has_words and len(style.left) < 2 else 5  # a word of prose may look like a level
    return replace(style, has_others=has_others) if times * least >= len(lines) else None


def _style_of(row: str, *, is_coloured: bool) -> LevelStyle | None:
    """How one line writes its level; None if it has none."""
    if (match := _CAPITALS.search(row, 0, _NEAR)) is not None:
        at = match.start()
        around = (row[at - 1] if at else "\n", row[match.end()])
        case: Callable[[str], str] = str.upper
        word = match[0]
    elif (match := _KLOG.search(row, 0, _NEAR)) is not None:
        return LevelStyle(match[1] or "\n", row[match.end(2)], str.strip)
    elif (match := _LEVEL.search(row, 0, _NEAR)) is not None:
        word = match[2]
        around = (match[1] or "\n", match[3] or "\n")
        case = _case_of(word)
    else:
        return None
    if is_coloured:
        around = ("m", "\x1b")
    return LevelStyle(*around, case, has_others=word.upper() in _OTHERS)


def _case_of(word: str) -> Callable[[str], str]:
    if word.isupper():
        return str.upper
    return str.lower if word.islower() else str.title


def tally(body: Body, style: LevelStyle) -> dict[str, LevelCount]:
    """Count the lines of each level in the whole, the worst level first. The level of a line is the
    first that it has near its beginning."""
    data = body.data
    found: dict[str, LevelCount] = {}
    frequent: list[tuple[str, bytes, int]] = []
    for name, words in style.spellings.items():
        for word in words:
            if word[:1] == b"\n" and data.startswith(word[1:]):
                found[name] = LevelCount(1, 0, 0, (word.decode().strip(),))
            times = data.count(word)
            if times > _RARE:
                frequent.append((name, word, times))
                continue
            at = _offsets(data, word, style) if times else []
            if at:
                new = LevelCount(len(at), at[0], at[-1], (word.decode().strip(),))
                found[name] = new.and_(found.get(name))
    not_levels = _named_in_messages(data, style) if frequent else Counter()
    for name, word, times in frequent:
        lines = times - not_levels[word]
        if lines > 0:
            first, last = _first_and_last(data, word, style)
            new = LevelCount(lines, first + 1, last + 1, (word.decode().strip(),))
            found[name] = new.and_(found.get(name))
    return {name: found[name] for name in _WORDS if name in found}


def _offsets(data: bytes, word: bytes, style: LevelStyle) -> list[int]:
    """The offsets of a word where it is the level of a line."""
    found: list[int] = []
    at = data.find(word)
    while at >= 0:
        if style.is_level(data, at):
            found.append(at + 1)
        at = data.find(word, at + 1)
    return found


def _named_in_messages(data: bytes, style: LevelStyle) -> Counter[bytes]:
    """How often each word is not the level of its line, but named later in it."""
    found: Counter[bytes] = Counter()
    if style.left == "\n":
        return found
    for match in style.several.found(data, data.count(b"\n") + 1):
        start = data.rfind(b"\n", 0, match.start() + 1) + 1
        row = data[start : match.end() + 1]
        counts = {word: row.count(word) for word in style.words if word in row}
        first = min(counts, key=row.find, default=b"")
        for word, times in counts.items():
            found[word] += times - (word == first)
    return found


def _first_and_last(data: bytes, word: bytes, style: LevelStyle) -> tuple[int, int]:
    """The offsets of the first and the last line of a level; of a word named in a message, if many
    are before it."""
    first, last = data.find(word), data.rfind(word)
    for _ in range(_MANY):
        if style.is_level(data, first):
            break
        first = data.find(word, first + 1)
    for _ in range(_MANY):
        if style.is_level(data, last):
            break
        last = data.rfind(word, 0, last)
    return max(first, 0), max(last, 0)


def counts_of(levels: dict[str, LevelCount], least: str) -> str:
    """`ERROR 3 INFO 8900`."""
    return " ".join(f"{name} {least}{one.lines}" for name, one in levels.items())


def ask_for_level(levels: dict[str, LevelCount]) -> str:
    """The read that shows the worst lines, or else the last ones."""
    names = [name for name in levels if name in BAD] or [name for name in levels if name == "WARN"]
    return (
        grep(*(word for name in names for word in levels[name].words)) if names else 'lines="-40:"'
    )


def is_level_word(word: str) -> bool:
    """Whether a word is a level, whatever marks are around it."""
    return word.strip("[]()<>|:,").upper() in _ALL_WORDS
