"""Find the secrets of a text: the rules whose keyword occurs in it are applied.

The keywords of all rules are one `re2.Set`, so that a text without a secret is read once: 2.5 ms
for a log of 1 MB, where the rules themselves take 37 ms and more. A set that runs out of memory
would match nothing, but RE2 makes its states again instead, as long as one of them fits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction.rules import RULES, Rule
from coatcheck.redaction.secret import Secret

_KELVIN: Final = "\u212a"  # the only character beyond ASCII whose lower case is ASCII
_PREFILTER_MEMORY: Final = 64 << 20  # bytes; RE2 clears its states when they are used up
# A terminal colour, raw or as JSON and source code write it; or an escape of JSON, which has more
# backslashes in JSON that is inside JSON.
_ESCAPE: Final = lazy_pattern(
    r"(?:\x1b|(?<!\\)\\++(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,32}[A-Za-z]"
    r"|(?<!\\)\\++(?:(?P<letter>[\"'`/bfnrt])|u(?P<code>[0-9A-Fa-f]{4}))"
)
_ESCAPED_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def find_secrets(text: str) -> list[Secret]:
    """Find the secrets of a text, in order and without overlaps.

    Terminal colours do not hide them, and neither do the escapes of JSON, nor of JSON in JSON: a
    text with escapes is searched both as it is written and as its reader sees it."""
    rules = _rules_for(text)
    if not rules:
        return []
    found = _found(text, rules)
    if "\\" in text or "\x1b[" in text:
        found += _found_behind_escapes(text, rules)
    found.sort(key=lambda span: (span.start, -span.end))
    merged: list[Secret] = []
    for span in found:
        if merged and span.start < merged[-1].end:
            if span.end > merged[-1].end:
                merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def is_suspect(text: str) -> bool:
    """Whether a text may contain a secret. False is certain; it takes a tenth of the time of a
    search."""
    return bool(_rules_for(text))


def _rules_for(text: str) -> list[Rule]:
    """Return the rules whose keyword occurs in a text, as it is written or as it is read."""
    plain = text.replace(_KELVIN, "k")
    matched = _matched(plain)
    if _HIDES(text):
        matched |= _matched(_as_read(plain))
    return [RULES[number] for number in sorted(matched)]


def _matched(text: str) -> set[int]:
    return set(_prefilter().Match(text.encode("utf-8", "surrogatepass")) or ())


@cache
def _prefilter() -> Any:
    """The keywords of all rules, as one set. Made once in a process, in 3 ms."""
    import re2  # type: ignore[import-untyped]  # no types; here, so that importing stays quick

    options = _options()
    options.max_mem = _PREFILTER_MEMORY
    options.never_capture = True
    keywords = re2.Set.SearchSet(options)
    for rule in RULES:
        keywords.Add(rule.keyword.encode())
    keywords.Compile()
    return keywords


def _found(text: str, rules: list[Rule]) -> list[Secret]:
    found: list[Secret] = []
    for rule in rules:
        found += rule.find(text)
    return found


class _Piece(NamedTuple):
    """A part of a text that is read at once: characters that mean themselves, or one escape."""

    start: int  # in the text as written
    size: int
    read_start: int  # in the text as it is read
    read: str


def _pieces(text: str) -> Iterator[_Piece]:
    """The text, cut at its escapes. Colours are left out."""
    at = read_at = 0
    for escape in _ESCAPE.finditer(text):
        if escape.start() > at:
            plain = text[at : escape.start()]
            yield _Piece(at, len(plain), read_at, plain)
            read_at += len(plain)
        meaning = _meaning(escape)
        if meaning:
            yield _Piece(escape.start(), len(escape[0]), read_at, meaning)
            read_at += len(meaning)
        at = escape.end()
    if at < len(text):
        yield _Piece(at, len(text) - at, read_at, text[at:])


def _as_read(text: str) -> str:
    """The text with each escape as the character that it means, and without colours."""
    return _ESCAPE.sub(_meaning, text)


def _meaning(escape: re.Match[str]) -> str:
    """The character that an escape means; nothing for a colour."""
    if escape["letter"]:
        return _ESCAPED_LETTERS.get(escape["letter"], escape["letter"])
    if escape["code"]:
        return chr(int(escape["code"], 16))
    return ""


def _found_behind_escapes(text: str, rules: list[Rule]) -> list[Secret]:
    """Find the secrets of a text as it is read; positions are those in the text as it is
    written."""
    secrets = _found(_as_read(text), rules)
    if not secrets:
        return []
    pieces = list(_pieces(text))
    read_starts = [piece.read_start for piece in pieces]
    found: list[Secret] = []
    for span in secrets:
        first = pieces[bisect_right(read_starts, span.start) - 1]
        last = pieces[bisect_right(read_starts, span.end - 1) - 1]
        start = first.start + span.start - first.read_start
        end = last.start + span.end - last.read_start
        if span.end == last.read_start + len(last.read):
            end = last.start + last.size
        found.append(Secret(start, end, span.label))
    return found


class QuickPattern:
    """A pattern in RE2 syntax over bytes, compiled when it is first used: linear, and many times as
    fast as `re`. Characters beyond ASCII are bytes `\\x80-\\xff` of UTF-8.

    Called with a text, it says whether that may match slower patterns: it must match everything
    that they match, and may match more. `found` needs a pattern that `captures`."""

    def __init__(self, pattern: str, *, captures: bool = False) -> None:
        self._pattern = pattern
        self._captures = captures

    def __call__(self, text: str) -> bool:
        return self._compiled.search(text.encode("utf-8", "surrogatepass")) is not None

    def found(self, data: bytes, most: int = 1_000) -> list[re.Match[bytes]]:
        """The first matches."""
        return list(islice(self._compiled.finditer(data), most))

    @cached_property
    def _compiled(self) -> Any:
        import re2

        options = _options()
        options.never_capture = not self._captures
        return re2.compile(self._pattern.encode(), options)


def _options() -> Any:
    """Return RE2 options for matching bytes."""
    import re2

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    return options


# Escapes that may hide a keyword: colours, and ASCII characters written as their code.
_HIDES: Final = QuickPattern(r"\x1b\[|1[bB]\[|033\[|\\e\[|\\u00[0-7]")
