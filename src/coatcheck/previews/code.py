"""Source files: their definitions with first and last lines, methods under their class.

Light patterns instead of parsers: a missed name is harmless, so counts are those of what was found.
The last line of a definition is found by the indentation of the lines after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

from coatcheck.deferred import lazy_pattern

from .documents import headings, looks_like_markdown
from .drafts import Draft, Form, Section
from .excerpts import Excerpt, grep, some, start_pattern, visible

_NUMBERED: Final = lazy_pattern(r"[ \t]{0,8}(\d{1,7})(?:→|\t|[:|] ?|-)")
_KEYWORDS: Final = frozenset(
    {"if", "for", "while", "switch", "catch", "function", "return", "with", "else", "do"}
)
_IMPORT: Final = lazy_pattern(
    r"^(?:import[ \t(]|from [\w.]{1,80} import |package \w|#include[ \t]*[<\"]|use [\w:]{1,80}"
    r"|using [\w.]{1,80};"
    r"|(?:const|let|var) [^\n]{0,80}require\(|export |module |#!/)",
    re.MULTILINE,
)
_LANGUAGES: Final = tuple(
    (name, lazy_pattern(pattern, re.MULTILINE))
    for name, pattern in (
        ("go", r"^package [a-z]\w{0,60}$|^func (?:\([^()\n]{0,80}\) )?\w{1,80}\("),
        ("rust", r"^(?:pub )?(?:use [a-z_]{1,40}::|fn \w{1,80}[(<]|impl\b)"),
        (
            "python",
            r"^(?:from [\w.]{1,80} import |def \w{1,80}\([^\n]{0,200}:$|class \w{1,80}[(:])",
        ),
        ("java", r"^package [a-z][\w.]{0,80};|^import java\."),
        (
            "typescript",
            (
                r"^(?:import type |(?:export )?(?:interface|type) \w{1,80}"
                r"|[^\n]{0,80}\): (?:void|Promise<))"
            ),
        ),
        ("javascript", r"^(?:import [^\n]{0,200} from |(?:const|let|var) \w|(?:async )?function )"),
        ("c", r"^#include\b"),
    )
)

_BLANK_LINES: Final = r"(?:(?:[^\S\n]|\.)*+\n)*+"
NUMBERED_LINES: Final = lazy_pattern(
    rf"(?:{_BLANK_LINES}[^\n]*+\n){{0,2}}?{_BLANK_LINES}{_NUMBERED.pattern}"
    r"(?![^\n]*+\n[ \t]{0,8}\1[→\t:|-])",
    re.MULTILINE,
)
"""How numbered lines begin. A few of the first lines may differ."""

_DEFINITION: Final = start_pattern(
    r"([ \t]{0,12})"
    r"(?:(?:export|default|declare|public|private|protected|internal|static|final|abstract|async"
    r"|pub|pub\(crate\)|unsafe|override|open|sealed|data|inline|virtual|extern|partial|local)"
    r"[ \t]{1,4}){0,5}"
    r"(def|class|func|function|fn|interface|struct|enum|trait|impl|type|module|namespace|object"
    r"|record|message|service|protocol|extension|CREATE TABLE|CREATE VIEW|create table|create view)"
    r"[*]?(?:<[^<>\n]{0,40}>)?[ \t]{1,4}"
    r"(?:\([^()\n]{0,80}\)[ \t]{0,4})?([A-Za-z_$\"`\x80-\xff][\w$.\"`\x80-\xff]{0,80})"
)
_METHOD: Final = start_pattern(
    r"((?:\t| {2,4}))(?:(?:public|private|protected|static|final|async|override|abstract|get|set)"
    r"[ \t]{1,4}){0,4}"
    r"(?:[A-Z][\w<>\[\],]{0,40} )?([A-Za-z_$][\w$]{0,80})\([^\n;{}]{0,200}\)[^\n;{}()]{0,80}\{$"
)
_CONSTANT: Final = start_pattern(
    r"(?:export )?(const|let|var) ([A-Za-z_$][\w$]{0,80})[^\n=]{0,80}= ?(?:async )?[(f]"
)
_C_FUNCTION: Final = start_pattern(
    r"(?:[A-Za-z_][\w:<>]{0,40}[ \t*&]{1,4}){1,4}([A-Za-z_][\w:]{0,80})\("
)
_SHELL: Final = start_pattern(r"([A-Za-z_][\w-]{0,60}) ?\(\) ?\{")
_TEXTS: Final = lazy_pattern(rb'"""(?:[^"]|"(?!""))*+"""|\'\'\'(?:[^\']|\'(?!\'\'))*+\'\'\'')
_BLANK: Final = bytes(10 if byte == 10 else 32 for byte in range(256))
_DEEPEST: Final = 12
_LOOK: Final = 16_384
_MANY: Final = 5_000  # definitions
_METHODS: Final = (6, 15, 30)  # methods of a class that are listed if there is no room for all
_LEAST: Final = 6  # definitions in a text whose language is not known
_LEAST_KNOWN: Final = 2  # in one whose language can be seen, but without an import
_LISTED: Final = 60
_BY_KEYWORD: Final = ("python", "go", "rust")  # languages whose definitions all have a keyword


@dataclass(slots=True)
class Definition:
    """One definition: its keyword and name, its first and last line, and those inside of it. `at`
    is the offset of its first line."""

    indent: int
    word: str
    name: str
    first: int
    at: int
    last: int = 0
    inner: list[Definition] = field(default_factory=list)

    @property
    def span(self) -> str:
        return f"{self.name}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def variants(self, before: str) -> tuple[str, ...]:
        """The definition in ever more words. The keyword is left out after one with the same."""
        lead = f"{self.word} " if self.word and self.word != before else ""
        if not self.inner:
            return (f"{lead}{self.span}",)
        count = some(len(self.inner), "definition")
        spans = [one.span for one in self.inner]
        variants = [f"{lead}{self.span}", f"{lead}{self.span} {{{count}}}"]
        for most in _METHODS:
            if most < len(spans):
                some_of = f"{', '.join(spans[:most])}, +{len(spans) - most} more"
                variants.append(f"{lead}{self.span} {{{some_of}}}")
        return (*variants, f"{lead}{self.span} {{{', '.join(spans)}}}")


def code(language: str) -> Form:
    """The form of source code in a language."""
    return partial(source, language=language)


def source(text: Excerpt, *, language: str = "") -> Draft | None:
    """Preview of the definitions in a source file. Without a language, None for text that does not
    look like code."""
    body = text.body
    scope = f", {text.within(len(body.data))}" if body.least else ""
    return _outlined(text, body.data, scope, language=language)


def numbered(text: Excerpt) -> Draft | None:
    """Preview of a source file or document whose lines a tool has numbered."""
    if unnumber(text.head) is None:
        return None
    whole, scope = text.everything
    found = unnumber(whole)
    if found is None:
        return None
    body, start = found
    shown = _outlined(text, body.encode("utf-8", "surrogatepass"), scope, start=start)
    if shown is not None:
        return shown
    if not looks_like_markdown(body):
        return None
    document = headings(text, body, scope, start=start)
    if document is None:
        return None
    return replace(document, ask='grep="^ *[0-9]+.{1,2}#"')


def unnumber(text: str) -> tuple[str, int] | None:
    """Strip line numbers that a tool put before each line; also return the first number. None if
    there are none."""
    first = text[:4_096].split("\n", 9)[:8]
    matches = [_NUMBERED.match(each) for each in first]
    found = [int(match[1]) for match in matches if match is not None]
    if len(found) < 3 or len(found) < len(first) - 2:
        return None
    if found != list(range(found[0], found[0] + len(found))):
        return None
    lines = text.split("\n")
    while _NUMBERED.match(lines[0]) is None:
        del lines[0]
    stripped = []
    for each in lines:
        match = _NUMBERED.match(each)
        stripped.append(each if match is None else each[match.end() :])
    return "\n".join(stripped), found[0]


def _outlined(
    text: Excerpt, data: bytes, scope: str, *, language: str = "", start: int = 1
) -> Draft | None:
    """Describe the definitions in a source, whose first line has the number `start`."""
    beginning = data[:_LOOK].decode("utf-8", "replace")
    is_known = bool(language)
    if not language:
        language = next((name for name, one in _LANGUAGES if one.search(beginning)), "")
        is_numbered = start > 1 or data is not text.body.data
        is_known = bool(language) and (is_numbered or _IMPORT.search(beginning) is not None)
    least = _LEAST_KNOWN if language else _LEAST
    if not is_known and len(definitions(data[:_LOOK], language)) < least:
        return None
    found = definitions(data, language)
    if not found:
        return None
    top = _nested(found, data)
    for one in found:
        one.first += start - 1
        one.last += start - 1
    items = []
    before = ""
    for one in top:
        items.append(one.variants(before))
        before = one.word
    mark = "≥" if len(found) >= _MANY else ""
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{language or 'code'}, {text.extent}; {part}{mark}{some(len(found), 'definition')}:"
    words = [one.word for one in found if one.word]
    common = sorted(set(words), key=lambda word: (-words.count(word), word))[:3]
    is_numbered = start > 1 or data is not text.body.data
    ask = f'lines="{top[0].first}:{top[0].first + 79}"'
    if common and len(found) > _LISTED:
        ask = grep(*(f"{word} " for word in common), start="" if is_numbered else "^[a-z ]*")
    sections = (Section("", items, "lines that look like top-level definitions"),)
    return Draft(lead, sections, scope=scope, ask=ask)


def definitions(data: bytes, language: str = "") -> list[Definition]:
    """The definitions in a source, in order, each with the number of its line."""
    found: dict[int, tuple[int, bytes, bytes]] = {}
    lines = b"\n" + data
    for match in islice(_DEFINITION.finditer(lines), _MANY):
        found[match.start()] = (len(match[1]), match[2], match[3])
    others = language not in _BY_KEYWORD
    for match in islice(_CONSTANT.finditer(lines) if others else (), _MANY):
        found.setdefault(match.start(), (0, match[1], match[2]))
    for match in islice(_SHELL.finditer(lines) if others else (), _MANY):
        found.setdefault(match.start(), (0, b"", match[1]))
    for match in islice(_METHOD.finditer(lines) if others else (), _MANY):
        if match[2].decode() not in _KEYWORDS:
            found.setdefault(match.start(), (len(match[1]), b"", match[2]))
    if not found:
        for match in islice(_C_FUNCTION.finditer(lines), _MANY):
            found[match.start()] = (0, b"", match[1])
    listed = []
    number, at = 1, 0
    for offset in sorted(found)[:_MANY]:
        number += data.count(b"\n", at, offset)
        at = offset
        indent, word, name = found[offset]
        shown = visible(name.decode("utf-8", "replace"))
        listed.append(Definition(indent, word.decode(), shown, number, offset))
    return listed


def _nested(found: Sequence[Definition], data: bytes) -> list[Definition]:
    """Give each definition its last line and those inside of it; return the upper ones."""
    plain = data
    if b'"""' in data or b"'''" in data:
        plain = _TEXTS.sub(_blanked, data)
    top: list[Definition] = []
    for one in found:
        one.last = one.first + _lines_inside(one, plain)
        if top and one.first <= top[-1].last:
            top[-1].inner.append(one)
        else:
            top.append(one)
    return top


def _blanked(match: re.Match[bytes]) -> bytes:
    """A text in triple quotes as blank lines, whose indentation says nothing."""
    return match[0].translate(_BLANK)


def _lines_inside(one: Definition, plain: bytes) -> int:
    """The number of lines of a definition after its first: up to the last one that is indented
    deeper, or the bracket that closes it."""
    outside = _outside(one.indent)
    start = plain.find(b"\n", one.at)
    at = start
    while at >= 0:
        match = outside.search(plain, at)
        if match is None:
            end = _end_before(plain, len(plain.rstrip()), one)
            return plain.count(b"\n", one.at, end)
        first = plain[match.end() - 1 : match.end() + 2]
        is_level = match.end() - match.start() - 2 == one.indent
        if first[:1] in (b")", b"]", b"{"):  # a signature of several lines
            at = match.end()
            continue
        if (first[:1] == b"}" or first == b"end") and is_level:
            return plain.count(b"\n", one.at, match.end())
        return plain.count(b"\n", one.at, _end_before(plain, match.start(), one))
    return 0


def _end_before(plain: bytes, end: int, one: Definition) -> int:
    """Where the last line before an offset ends that is indented deeper than a definition: comments
    and blank lines after it are not inside."""
    while end > one.at:
        start = plain.rfind(b"\n", 0, end) + 1
        row = plain[start:end]
        if len(row) - len(row.lstrip()) > one.indent and row.strip():
            return end
        if start <= one.at:
            return start if start > one.at else one.at
        end = start - 1
    return one.at


def _outside(indent: int) -> re.Pattern[bytes]:
    """A pattern for a line that is indented at most that much, other than a comment."""
    return re.compile(rb"\n[ \t]{0,%d}[^\s#/*]" % min(indent, _DEEPEST))
