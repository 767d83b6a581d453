"""Outlines: definitions of a source file, files of a diff, headings of a document.

Light patterns instead of parsers: a missed name is harmless. Every pattern is linear on hostile text: each repetition
is bounded, or cannot match what follows it.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from itertools import islice
from os.path import commonprefix
from typing import Final, NamedTuple

from coatcheck.redaction import QuickPattern

from .excerpts import Excerpt, Preview, ends, line, pack, some, visible

_NUMBERED: Final = re.compile(r"[ \t]{0,8}(\d{1,7})(?:→|\t|[:|] ?|-)")
# These begin with the line feed before the line instead of "^": `re` skips ahead to it, many times faster.
_DEFINITION: Final = re.compile(
    r"\n([ \t]{0,12})"
    r"(?:(?:export|default|declare|public|private|protected|internal|static|final|abstract|async|pub|pub\(crate\)|unsafe"
    r"|override|open|sealed|data|inline|virtual|extern|partial|local)[ \t]{1,4}){0,5}"
    r"(def|class|func|function|fn|interface|struct|enum|trait|impl|type|module|namespace|object|record|message|service"
    r"|protocol|extension|CREATE TABLE|CREATE VIEW|create table|create view)[*]?(?:<[^<>\n]{0,40}>)?[ \t]{1,4}"
    r"(?:\([^()\n]{0,80}\)[ \t]{0,4})?([A-Za-z_$\"`][\w$.\"`]{0,80})"
)
_METHOD: Final = re.compile(
    r"\n((?:\t| {2,4}))(?:(?:public|private|protected|static|final|async|override|abstract|get|set)[ \t]{1,4}){0,4}"
    r"(?:[A-Z][\w<>\[\],]{0,40} )?([A-Za-z_$][\w$]{0,80})\([^\n;{}]{0,200}\)[^\n;{}()]{0,80}\{$",
    re.MULTILINE,
)
_CONSTANT: Final = re.compile(r"\n()(?:export )?(const|let|var) ([A-Za-z_$][\w$]{0,80})[^\n=]{0,80}= ?(?:async )?[(f]")
_C_FUNCTION: Final = re.compile(r"\n()()(?:[A-Za-z_][\w:<>]{0,40}[ \t*&]{1,4}){1,4}([A-Za-z_][\w:]{0,80})\(")
_SHELL: Final = re.compile(r"\n()()([A-Za-z_][\w-]{0,60})[ ]?\(\)[ ]?\{")
_DEFINES: Final = QuickPattern(
    r"(?m)^[ \t]*(?:[a-z()]+[ \t]+)*(?:def|class|func|function|fn|interface|struct|enum|trait|impl|type|module"
    r"|namespace|object|record|message|service|protocol|extension|CREATE TABLE|CREATE VIEW|create table"
    r"|create view)[ \t*<]"
    r"|^[ \t]+[^\n;{}]*\)[^\n;{}()]*\{$|^(?:export )?(?:const|let|var) [^\n]*=|^[A-Za-z_][\w\x80-\xff-]* ?\(\) ?\{"
    r"|^(?:[A-Za-z_][\w:<>\x80-\xff]*[ \t*&]+)+[A-Za-z_][\w:\x80-\xff]*\("
)
_KEYWORDS: Final = frozenset({"if", "for", "while", "switch", "catch", "function", "return", "with", "else", "do"})
_IMPORT: Final = re.compile(
    r"^(?:import[ \t(]|from [\w.]{1,80} import |package \w|#include[ \t]*[<\"]|use [\w:]{1,80}|using [\w.]{1,80};"
    r"|(?:const|let|var) [^\n]{0,80}require\(|export |module |#!/)",
    re.MULTILINE,
)
_LANGUAGES: Final = tuple(
    (name, re.compile(pattern, re.MULTILINE))
    for name, pattern in (
        ("go", r"^package [a-z]\w{0,60}$|^func (?:\([^()\n]{0,80}\) )?\w{1,80}\("),
        ("rust", r"^(?:pub )?(?:use [a-z_]{1,40}::|fn \w{1,80}[(<]|impl\b)"),
        ("python", r"^(?:from [\w.]{1,80} import |def \w{1,80}\([^\n]{0,200}:$|class \w{1,80}[(:])"),
        ("java", r"^package [a-z][\w.]{0,80};|^import java\."),
        ("typescript", r"^(?:import type |(?:export )?(?:interface|type) \w{1,80}|[^\n]{0,80}\): (?:void|Promise<))"),
        ("javascript", r"^(?:import [^\n]{0,200} from |(?:const|let|var) \w|(?:async )?function )"),
        ("c", r"^#include\b"),
    )
)
_HEADING_OR_FENCE: Final = re.compile(r"\n(?:(#{1,6})[ \t]{1,4}(\S[^\n]{0,300})|[ ]{0,3}(?:```|~~~))")
_UNDERLINED: Final = re.compile(r"^(\S[^\n]{0,200})\n([=\-~^\"'*+#])\2{2,200}$", re.MULTILINE)
_HUNK: Final = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
_TAG: Final = re.compile(r"<(title|p|h[1-6])\b[^<>]{0,500}>", re.IGNORECASE)
_ANY_TAG: Final = re.compile(r"<[^<>]{0,500}>")
_ELEMENT: Final = re.compile(r"<([A-Za-z_][\w.:-]{0,60})([^<>]{0,1000})>")
_SILENT: Final = re.compile(r"<(script|style)[^<]*+(?:<(?!/\1)[^<]*+)*+|<!--[^-]*+(?:-(?!->)[^-]*+)*+", re.IGNORECASE)
_LOOK: Final = 16_384
_SOME: Final = 20
_MANY: Final = 1_000


class OutlineEntry(NamedTuple):
    """One entry of an outline: level, text, and a keyword that is shown once for several entries in a row."""

    level: int
    text: str
    word: str = ""


def outline(lead: str, entries: list[OutlineEntry], limit: int, *, sep: str = "; ") -> tuple[str, int]:
    """Join as many entries as fit, upper levels first, in document order; also return their number."""
    by_level = sorted(range(len(entries)), key=lambda index: entries[index].level)
    low, high = 0, min(len(entries), limit)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(_join(lead, entries, by_level[:middle], sep)) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return _join(lead, entries, by_level[:low], sep), low


def _at_least(entries: list[OutlineEntry]) -> str:
    return f"at least {len(entries)}" if len(entries) >= _MANY else str(len(entries))


def _join(lead: str, entries: list[OutlineEntry], chosen: list[int], sep: str) -> str:
    parts, before = [], ""
    for index in sorted(chosen):
        entry = entries[index]
        parts.append(f"{entry.word} {entry.text}" if entry.word and entry.word != before else entry.text)
        before = entry.word
    if len(chosen) < len(entries):
        parts.append(f"+{len(entries) - len(chosen)} more")
    return lead + sep.join(parts)


def unnumber(text: Excerpt) -> tuple[str, int] | None:
    """Strip line numbers that a tool put before each line; also return the first number. None if there are none."""
    first = text.head[:4_096].split("\n", 9)[:8]
    found = [int(match.group(1)) for each in first if (match := _NUMBERED.match(each)) is not None]
    if len(found) < 3 or len(found) < len(first) - 2 or found != list(range(found[0], found[0] + len(found))):
        return None
    lines = text.head.split("\n")
    while _NUMBERED.match(lines[0]) is None:
        del lines[0]
    return "\n".join(each[match.end() :] if (match := _NUMBERED.match(each)) else each for each in lines), found[0]


def code(text: Excerpt, limit: int, *, language: str = "", body: str | None = None, start: int = 1) -> Preview | None:
    """Preview of the definitions in a source file, with line numbers from `start` on. `body` is the text without those
    that a tool added. Without a language, returns None for text that does not look like code."""
    body = text.head if body is None else body
    definitions = _definitions(body)
    if not language:
        early = sum(each[0] < _LOOK for each in definitions)
        if early < 2 or (early < 6 and _IMPORT.search(body, 0, _LOOK) is None):
            return None
        language = next((name for name, pattern in _LANGUAGES if pattern.search(body, 0, _LOOK)), "code")
    entries: list[OutlineEntry] = []
    at = 0
    for offset, level, keyword, name in definitions:
        start += body.count("\n", at, offset)
        at = offset
        entries.append(OutlineEntry(level, f"{visible(name)}:{start}", keyword))
    size = f"{text.lines} lines" if text.lines is not None else f"{text.size} bytes"
    shape, kept = outline(f"{language}, {size}: ", entries, limit, sep=", ")
    if not kept:
        return ends(text, limit)
    return Preview(shape, f"{kept} of {_at_least(entries)} definitions with their lines{text.scope}")


def _definitions(body: str) -> list[tuple[int, int, str, str]]:
    if not _DEFINES(body):
        return []
    found: dict[int, tuple[int, str, str]] = {}
    body = f"\n{body}"
    for match in islice(_DEFINITION.finditer(body), _MANY):
        found[match.start()] = (len(match.group(1).expandtabs(4)), match.group(2), match.group(3))
    for pattern in (_CONSTANT, _SHELL) if found else (_CONSTANT, _SHELL, _C_FUNCTION):
        for match in islice(pattern.finditer(body), _MANY):
            found.setdefault(match.start(), (0, match.group(2), match.group(3)))
    for match in islice(_METHOD.finditer(body), _MANY):
        if match.group(2) not in _KEYWORDS:
            found.setdefault(match.start(), (4, "", match.group(2)))
    return [(at, *found[at]) for at in sorted(found)[:_MANY]]


def diff(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the files in a diff, with the lines added and removed in each."""
    files: dict[str, list[int]] = {}
    name = ""
    old = new = 0
    for each in text.head.split("\n"):
        if not each:
            old, new = max(0, old - 1), max(0, new - 1)
        elif old > 0 or new > 0:
            mark = each[:1]
            new -= mark in "+ "
            old -= mark in "- "
            if mark in ("+", "-"):
                files.setdefault(name, [0, 0])["+-".index(mark)] += 1
        elif each[0] not in "@d+-":
            continue
        elif (hunk := _HUNK.match(each)) is not None:
            old, new = int(hunk.group(1) or 1), int(hunk.group(2) or 1)
        elif each.startswith("diff --git "):
            name = each.rpartition(" b/")[2]
            files.setdefault(name, [0, 0])
        elif each.startswith(("+++ ", "--- ")) and not each.startswith("/dev/null", 4):
            name = each[4:].split("\t")[0].removeprefix("b/" if each[0] == "+" else "a/")
            if each[0] == "+":
                files.setdefault(name, [0, 0])
    if not files:
        return None
    added, removed = (sum(counts[side] for counts in files.values()) for side in (0, 1))
    shared = commonprefix(list(files)) if len(files) > 1 else ""  # noqa: RUF071 - of characters, cut at a folder
    folder = shared[: shared.rfind("/") + 1]
    largest = sorted(files.items(), key=lambda file: -sum(file[1]))
    items = [f"{line(path.removeprefix(folder), 80)} +{plus} -{minus}" for path, (plus, minus) in largest]
    least = "" if text.is_whole else "at least "
    total = f"{least}{some(len(files), 'file')}"
    lead = f"diff of {total}, +{added} -{removed}{f', in {line(folder, 60)}' if folder else ''}: "
    shape, kept = pack(lead, items, len(items), limit)
    return Preview(shape, f"{kept} of {total}{text.scope}")


def markdown(text: Excerpt, limit: int, *, body: str | None = None) -> Preview | None:
    return _headings(text, _markdown_headings(text.head if body is None else body), limit)


def restructured(text: Excerpt, limit: int) -> Preview | None:
    levels: dict[str, int] = {}
    entries = []
    for match in islice(_UNDERLINED.finditer(text.head), _MANY):
        level = levels.setdefault(match.group(2), len(levels))
        entries.append(OutlineEntry(level, line(match.group(1), 60)))
    return _headings(text, entries, limit)


def looks_like_markdown(body: str) -> bool:
    levels = [entry.level for entry in _markdown_headings(body[:16_384])]
    return len(levels) >= 2 and max(levels) >= 2


def _markdown_headings(body: str) -> list[OutlineEntry]:
    if "\n#" not in body and not body.startswith("#"):
        return []
    entries: list[OutlineEntry] = []
    is_code = False
    for match in _HEADING_OR_FENCE.finditer(f"\n{body}"):
        marks, title = match.groups()
        if marks is None:
            is_code = not is_code
        elif not is_code and len(entries) < _MANY:
            title = line(title.rstrip("# \t\r"), 60)
            entries.append(OutlineEntry(len(marks), f"{marks} {title}"))
    return entries


def _headings(text: Excerpt, entries: list[OutlineEntry], limit: int) -> Preview | None:
    shape, kept = outline("", entries, limit, sep="\n")
    size = f" of {text.lines} lines" if text.lines is not None and text.is_whole else ""
    return Preview(shape, f"{kept} of {_at_least(entries)} headings{size}{text.scope}") if kept else None


def page(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the title and headings of an HTML page."""
    title, first, entries = _titles(text.head)
    if text.tail:
        entries += _titles(text.tail)[2]
    lead = f"HTML “{title}”" if title else "HTML"
    shape, kept = outline(lead + "\n", entries, limit, sep="; ") if entries else (lead, 0)
    if not kept and not title:
        return None
    if first and kept == len(entries) and limit - len(shape) > 40:
        shape += "\n" + line(first, limit - len(shape) - 1)
    return Preview(shape, f"{'title and ' if title else ''}{kept} of {_at_least(entries)} headings{text.scope_of_both}")


def _titles(source: str) -> tuple[str, str, list[OutlineEntry]]:
    """The title, the first long paragraph, and the headings, without those in scripts."""
    source, title, first = _SILENT.sub("", source), "", ""
    entries: list[OutlineEntry] = []
    paragraphs = 0
    for match in _TAG.finditer(source):
        tag = match.group(1).lower()
        paragraphs += tag == "p"
        if (tag == "p" and (first or paragraphs > _SOME)) or len(entries) == _MANY:
            continue
        end = re.compile(f"</{tag}", re.IGNORECASE | re.ASCII).search(source, match.end(), match.end() + 400)
        inner = source[match.end() : end.start()] if end else ""
        content = line(html.unescape(_ANY_TAG.sub("", inner)), 400)
        if tag == "title":
            title = title or line(content, 80)
        elif tag == "p":
            first = content if len(content) >= 100 else ""
        else:
            entries.append(OutlineEntry(int(tag[1]), f"{tag} {line(content, 60)}".rstrip()))
    return title, first, entries


def tree(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the root of an XML document and its most frequent elements."""
    elements = _ELEMENT.finditer(text.head)
    root = next(elements, None)
    if root is None:
        return None
    names = Counter(match.group(1) for match in elements)
    attributes = line(root.group(2).strip().rstrip("/"), max(limit // 3, 10))
    start = f"<{root.group(1)} {attributes}>" if attributes else f"<{root.group(1)}>"
    if not names or len(start) + 16 > limit:
        return Preview(start, f"the root element{text.scope}")
    items = [f"{name} ×{count}" if count > 1 else name for name, count in names.most_common()]
    shape, kept = pack(f"XML {start}: ", items, len(items), limit)
    return Preview(shape, f"the root and {kept} of {len(items)} names of elements{text.scope}")
