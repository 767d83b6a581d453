"""What stands out in a text on a terminal: matches and words, line numbers, JSON and diffs.

Each function cuts a text into pieces with a style, and the pieces are the text, whole and in order. The text is
untrusted, so nothing here backtracks, and `terminal.print_pieces` makes it visible after it was cut. Code is left as it
is: the lexers that there are for it can be made to run for minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from coatcheck.reading.patterns import Pattern

Piece = tuple[str, str]

PLAIN: Final = ""
FAINT: Final = "dim"
FOUND: Final = "bold red"
HEAD: Final = "bold"
_STEM: Final = 6
_KEY: Final = "blue"
_DIFF: Final = (("+++", HEAD), ("---", HEAD), ("@@", "cyan"), ("+", "green"), ("-", "red"))

_NUMBER: Final = re.compile(r"\d++([:-])")
_TOKEN: Final = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*+"?+)|(?P<number>-?+\b\d[\d.eE+-]*+)|\b(?:true|false|null)\b"""
)


def grep_lines(text: str, pattern: Pattern | None) -> Iterator[Piece]:
    """A page of a grep: `12:` before a line that matches, `11-` before its context."""
    for line in _lines(text):
        number = _NUMBER.match(line)
        if number is None:
            yield line, FAINT
            continue
        yield number[0], FAINT
        if pattern is not None and number[1] == ":":
            yield from _matches(line[number.end() :], pattern)
        else:
            yield line[number.end() :], PLAIN


def words_in(text: str, words: str) -> Iterator[Piece]:
    """A passage, with the words that were searched for, whatever their endings."""
    wanted = {word[:_STEM] for word in re.findall(r"\w++", words.lower()) if len(word) > 1}
    at = 0
    for word in re.finditer(r"\w++", text):
        if word[0].lower()[:_STEM] in wanted:
            yield text[at : word.start()], PLAIN
            yield word[0], FOUND
            at = word.end()
    yield text[at:], PLAIN


def json_tokens(text: str) -> Iterator[Piece]:
    """JSON or JSONL, or a page of it: a token that was cut at either end does no harm."""
    at = 0
    for token in _TOKEN.finditer(text):
        yield text[at : token.start()], PLAIN
        at = token.end()
        if token["string"] is None:
            yield token[0], "cyan" if token["number"] else "magenta"
        else:
            yield token[0], _KEY if _is_key(text, at) else "green"
    yield text[at:], PLAIN


def diff_lines(text: str) -> Iterator[Piece]:
    """A unified diff."""
    for line in _lines(text):
        yield line, next((style for mark, style in _DIFF if line.startswith(mark)), PLAIN)


def _is_key(text: str, at: int) -> bool:
    return text[at : at + 8].lstrip(" \t").startswith(":")


def _matches(body: str, pattern: Pattern) -> Iterator[Piece]:
    data = body.encode("utf-8", "backslashreplace")
    at = done = 0
    while at <= len(data) and (found := pattern.search(data, at, len(data))) is not None:
        start, end = found
        if start == end:  # nothing to show: go on behind the next character
            at = end + 1
            while at < len(data) and data[at] & 0xC0 == 0x80:
                at += 1
            continue
        yield data[done:start].decode("utf-8", "backslashreplace"), PLAIN
        yield data[start:end].decode("utf-8", "backslashreplace"), FOUND
        at = done = end
    yield data[done:].decode("utf-8", "backslashreplace"), PLAIN


def _lines(text: str) -> Iterator[str]:
    """Lines with their line feed. `str.splitlines` would also split where a text has odd characters."""
    *lines, last = text.split("\n")
    for line in lines:
        yield line + "\n"
    yield last
