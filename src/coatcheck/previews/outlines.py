"""Outlines: definitions of a source file, files of a diff, headings of a document or a web page.

Light patterns instead of parsers: a missed name is harmless, so counts are those of what was found.
Every pattern is linear on hostile text: each repetition is bounded, or cannot match what follows
it.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
from itertools import islice
from os.path import commonprefix
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .excerpts import (
    Body,
    Excerpt,
    Preview,
    ends,
    grep,
    line,
    line_pattern,
    masked_line,
    pack,
    some,
    visible,
)

_NUMBERED: Final = lazy_pattern(r"[ \t]{0,8}(\d{1,7})(?:→|\t|[:|] ?|-)")
# These begin with the line feed before the line instead of "^": `re` skips ahead to it, many times
# faster.
_DEFINITION: Final = lazy_pattern(
    r"\n([ \t]{0,12})"
    r"(?:(?:export|default|declare|public|private|protected|internal|static|final|abstract|async"
    r"|pub|pub\(crate\)|unsafe"
    r"|override|open|sealed|data|inline|virtual|extern|partial|local)[ \t]{1,4}){0,5}"
    r"(def|class|func|function|fn|interface|struct|enum|trait|impl|type|module|namespace|object"
    r"|record|message|service"
    r"|protocol|extension|CREATE TABLE|CREATE VIEW|create table"
    r"|create view)[*]?(?:<[^<>\n]{0,40}>)?[ \t]{1,4}"
    r"(?:\([^()\n]{0,80}\)[ \t]{0,4})?([A-Za-z_$\"`][\w$.\"`]{0,80})"
)
_METHOD: Final = lazy_pattern(
    r"\n((?:\t| {2,4}))(?:(?:public|private|protected|static|final|async|override|abstract|get"
    r"|set)[ \t]{1,4}){0,4}"
    r"(?:[A-Z][\w<>\[\],]{0,40} )?([A-Za-z_$][\w$]{0,80})\([^\n;{}]{0,200}\)[^\n;{}()]{0,80}\{$",
    re.MULTILINE,
)
_CONSTANT: Final = lazy_pattern(
    r"\n()(?:export )?(const|let|var) ([A-Za-z_$][\w$]{0,80})[^\n=]{0,80}= ?(?:async )?[(f]"
)
_C_FUNCTION: Final = lazy_pattern(
    r"\n()()(?:[A-Za-z_][\w:<>]{0,40}[ \t*&]{1,4}){1,4}([A-Za-z_][\w:]{0,80})\("
)
_SHELL: Final = lazy_pattern(r"\n()()([A-Za-z_][\w-]{0,60})[ ]?\(\)[ ]?\{")
_DEFINES: Final = QuickPattern(
    r"(?m)^[ \t]*(?:[a-z()]+[ \t]+)*(?:def|class|func|function|fn|interface|struct|enum|trait|impl"
    r"|type|module"
    r"|namespace|object|record|message|service|protocol|extension|CREATE TABLE|CREATE VIEW"
    r"|create table"
    r"|create view)[ \t*<]"
    r"|^[ \t]+[^\n;{}]*\)[^\n;{}()]*\{$|^(?:export )?(?:const|let|var) [^\n]*="
    r"|^[A-Za-z_][\w\x80-\xff-]* ?\(\) ?\{"
    r"|^(?:[A-Za-z_][\w:<>\x80-\xff]*[ \t*&]+)+[A-Za-z_][\w:\x80-\xff]*\("
)
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
_HEADING_OR_FENCE: Final = lazy_pattern(
    r"\n(?:(#{1,6})[ \t]{1,4}(\S[^\n]{0,300})|[ ]{0,3}(`{3,40}|~{3,40})([^\n]{0,200}))"
)
_TITLES: Final = lazy_pattern(r"(?:^|\n\n)# \S[^\n]{0,100}\n(?=\n)")
_UNDERLINED: Final = lazy_pattern(r"^(\S[^\n]{0,200})\n([=\-~^\"'*+#])\2{2,200}$", re.MULTILINE)
_ELEMENT: Final = lazy_pattern(r"<([A-Za-z_][\w.:-]{0,60})([^<>]{0,1000})>")
_LOOK: Final = 16_384
_MANY: Final = 1_000
_OUTLINED: Final = 256 << 10  # bytes of a source file that are outlined
_DIFFED: Final = 4 << 20
_PARTS: Final = 5_000  # commits or files that are counted
_COMMIT: Final = line_pattern(r"^(?:\x1b\[33m)?commit ([0-9a-f]{7,64})\b")
_ONE_LINE: Final = lazy_pattern(
    r"(?:[*|\\/ ]{0,12})(?=[a-f]*\d)([0-9a-f]{7,12}) (?:\([^()\n]{1,200}\) )?(\S[^\n]*)"
)
_FILE_IN_DIFF: Final = line_pattern(
    r"^(?:diff --git a/[^\n]* b/([^\n]+)|Index: ([^\n]+)\n=+)$"
    r"|^--- (?:a/)?([^\n\t]+)[^\n]*\n\+\+\+ (?:b/)?([^\n\t]+)"
)
_EDITED: Final = lazy_pattern(r"([ +-])[ ]{0,6}(\d{1,6})(?: |$)")
# How numbered lines, edits and short histories begin. A few of the first lines may differ.
_BLANK_LINES: Final = r"(?:(?:[^\S\n]|\.)*+\n)*+"
NUMBERED_LINES, NUMBERED_DIFF, SHORT_HISTORY = (
    lazy_pattern(rf"(?:{_BLANK_LINES}[^\n]*+\n){{0,2}}?{_BLANK_LINES}{one}", re.MULTILINE)
    for one in (
        _NUMBERED.pattern + r"(?![^\n]*+\n[ \t]{0,8}\1[→\t:|-])",
        _EDITED.pattern,
        _ONE_LINE.pattern,
    )
)
_DAY: Final = lazy_pattern(r"(?:[A-Z][a-z]{2} ([A-Z][a-z]{2} \d{1,2}) [\d:]{8} (\d{4}).{0,10})")
_AUTHOR: Final = line_pattern(r"^Author:\s+([^<\n]{1,80}?) *<")
_DATE: Final = line_pattern(r"^(?:Author|Commit)?Date: +([^\n]{8,40})$")
_TAG: Final = lazy_pattern(r"<(title|p|h[1-6])\b[^<>]{0,500}>", re.IGNORECASE)
_ANY_TAG: Final = lazy_pattern(r"<[^<>]{0,500}>")
_TITLE: Final = lazy_pattern(rb"<title\b[^<>]{0,500}>([^<]{0,400})", re.IGNORECASE)
_HEADING: Final = line_pattern(r"(?i)<(h[1-6])(?:\s[^<>]{0,500})?>")
_SILENT: Final = line_pattern(
    r"(?i)<(script|style|template)\b|</(?:script|style|template)|<!--|-->"
)
_SCRIPT: Final = lazy_pattern(
    r"<(script|style)[^<]*+(?:<(?!/\1)[^<]*+)*+|<!--[^-]*+(?:-(?!->)[^-]*+)*+", re.IGNORECASE
)
_MARKS: Final = 20_000

_ROLE: Final = line_pattern(
    r"^\s*(?:- |\* )?(?:'|\")?"
    r"(link|button|textbox|combobox|checkbox|radio|searchbox|heading|tab|menuitem|img|listitem"
    r"|row)\b"
)
_UID: Final = line_pattern(
    r"^\s*(?:uid=|\[)[\w_]+\]?\s?<?(link|button|textbox|combobox|checkbox|radio|searchbox|heading"
    r"|a|input|select|textarea|StaticText|tab)\b"
)
_URL: Final = lazy_pattern(r"(?:Page URL|Current URL|URL|url)[:=] ?\"?(\S{4,300}?)\"?(?=\s|$)")
_NAME: Final = lazy_pattern(
    r"(?:Page Title|Title): ([^\n]{1,200})|RootWebArea \"([^\"\n]{1,200})\""
)
SNAPSHOT_CUES: Final = ("[ref=", "Page URL:", "RootWebArea", "uid=", "]<button", "]<a ")
_PLURAL: Final = {
    "a": "link", "input": "field", "textarea": "field", "textbox": "field", "searchbox": "field",
    "select": "field", "combobox": "field", "checkbox": "field", "radio": "field",
}  # fmt: skip
_SHOWN: Final = ("link", "button", "field", "heading", "tab", "row", "img", "listitem")


class OutlineEntry(NamedTuple):
    """One entry of an outline: level, text, and a keyword that is shown once for several entries in
    a row."""

    level: int
    text: str
    word: str = ""


def outline(
    lead: str, entries: list[OutlineEntry], limit: int, *, sep: str = "; "
) -> tuple[str, int]:
    """Join as many entries as fit, upper levels first, in document order; also return their
    number."""
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
        parts.append(
            f"{entry.word} {entry.text}" if entry.word and entry.word != before else entry.text
        )
        before = entry.word
    if len(chosen) < len(entries):
        parts.append(f"+{len(entries) - len(chosen)} more")
    return lead + sep.join(parts)


def unnumber(text: Excerpt, read: str | None = None) -> tuple[str, int] | None:
    """Strip line numbers that a tool put before each line; also return the first number. None if
    there are none. `read` is the text to strip, if it is not only the head."""
    first = text.head[:4_096].split("\n", 9)[:8]
    found = [int(match.group(1)) for each in first if (match := _NUMBERED.match(each)) is not None]
    if (
        len(found) < 3
        or len(found) < len(first) - 2
        or found != list(range(found[0], found[0] + len(found)))
    ):
        return None
    lines = (text.head if read is None else read).split("\n")
    while _NUMBERED.match(lines[0]) is None:
        del lines[0]
    return "\n".join(
        each[match.end() :] if (match := _NUMBERED.match(each)) else each for each in lines
    ), found[0]


def numbered(text: Excerpt, limit: int) -> Preview | None:
    """Preview of a source file or document whose lines a tool has numbered."""
    found = unnumber(text)
    if found is None:
        return None
    body, start = found
    if (shown := code(text, limit, body=body, start=start)) is not None:
        return shown
    return _numbered_document(text, limit) if looks_like_markdown(body) else None


def _numbered_document(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the headings of a document whose lines a tool has numbered, with these numbers."""
    read = _outlined(text)
    found = unnumber(text, read.text)
    if found is None:
        return None
    body, start = found
    shown = _headings(
        text, _markdown_headings(body, start), limit, noun="# heading", scope=read.scope
    )
    return replace(shown, ask='grep="^ *[0-9]+.{1,2}#"') if shown and "^#" in shown.ask else shown


class ReadText(NamedTuple):
    """As much of a text as is outlined, and the suffix for a count in it; empty if it is the whole
    text."""

    text: str
    scope: str


def _outlined(text: Excerpt) -> ReadText:
    if text.is_whole:
        return ReadText(text.head, "")
    body = text.body
    data = body.data[:_OUTLINED]
    is_whole = len(data) == len(body.data) and not body.least
    return ReadText(
        data.decode("utf-8", "replace"), "" if is_whole else f", {text.within(len(data))}"
    )


def code(
    text: Excerpt, limit: int, *, language: str = "", body: str | None = None, start: int = 1
) -> Preview | None:
    """Preview of the definitions in a source file, with line numbers from `start` on. `body` is the
    text without the numbers that a tool added. Without a language, returns None for text that does
    not look like code."""
    source = text.head if body is None else body
    definitions = _definitions(source)
    if not language:
        if not definitions:
            return None
        early = sum(each[0] < _LOOK for each in definitions)
        language = next(
            (name for name, pattern in _LANGUAGES if pattern.search(source, 0, _LOOK)), ""
        )
        is_known = bool(language) and (
            body is not None or _IMPORT.search(source, 0, _LOOK) is not None
        )
        if not (is_known or early >= 6):
            return None
        language = language or "code"
    scope, numbers = "", start
    if not text.is_whole:
        read = _outlined(text)
        scope = read.scope
        found = unnumber(text, read.text) if body is not None else None
        source = found[0] if found is not None else read.text
        definitions = _definitions(source)
    entries: list[OutlineEntry] = []
    at = 0
    for offset, level, keyword, name in definitions:
        numbers += source.count("\n", at, offset)
        at = offset
        entries.append(OutlineEntry(level, f"{visible(name)}:{numbers}", keyword))
    shape, kept = outline(f"{language}, {text.extent}{scope}: ", entries, limit, sep=", ")
    if not kept:
        return ends(text, limit)
    words = [
        word for word, _ in Counter(entry.word for entry in entries if entry.word).most_common(3)
    ]
    if kept == len(entries) or not words:
        first = 1 + source.count("\n", 0, definitions[0][0])
        ask = f'lines="{first}:{first + 79}"'
    else:
        ask = grep(*(f"{word} " for word in words), start="" if body is not None else "^[a-z ]*")
    return Preview(
        shape, f"{kept} of {_at_least(entries)} lines that look like definitions{scope}", ask
    )


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


def numbered_diff(text: Excerpt, limit: int) -> Preview | None:
    """Preview of an edit that a tool shows with line numbers: how much it changes, and where."""
    first = [each for each in text.head[:4_096].split("\n", 24)[:24] if each.strip(" .")]
    if (
        len(first) < 4
        or not (_EDITED.match(first[0]) or _EDITED.match(first[1]))
        or sum(bool(_EDITED.match(each)) for each in first) * 10 < len(first) * 9
    ):
        return None
    read = _outlined(text)
    edited = [match for each in read.text.split("\n") if (match := _EDITED.match(each))]
    added, removed = (sum(match[1] == mark for match in edited) for mark in "+-")
    if not added + removed:
        return None
    changed = [int(match[2]) for match in edited if match[1] != " "]
    sample = next(match for match in edited if match[1] != " ")
    lead = f"edit of lines {min(changed)}-{max(changed)}{read.scope}: +{added} -{removed}; first: "
    shape = lead + masked_line(sample.string, limit - len(lead))
    return Preview(shape, f"the number of changed lines{read.scope}", 'grep="^[+-]"')


class ChangedFile(NamedTuple):
    """One file of a diff: its lines added and removed, and where its part begins and ends."""

    name: str
    added: int
    removed: int
    start: int
    end: int


def _changed(data: bytes, commits: list[int]) -> list[ChangedFile]:
    """The first `_PARTS` files of a diff in order. A part ends where the next file or commit
    begins."""
    starts: list[tuple[int, str]] = []
    for match in _FILE_IN_DIFF.found(data, 2 * _PARTS + 2):  # a file has up to two
        named = (
            match[1]
            or match[2]
            or (match[4] if match[4] and match[4] != b"/dev/null" else match[3])
            or b""
        )
        is_header = not (match[1] or match[2])
        if is_header and starts and data.find(b"\n@@ ", starts[-1][0], match.start()) < 0:
            continue  # the header of the file that has just begun
        starts.append((match.start(), named.decode("utf-8", "replace")))
    ends_ = sorted({*(at for at, _ in starts), *commits, len(data)})
    files = []
    for at, name in starts[:_PARTS]:
        end = ends_[bisect_right(ends_, at)]
        first = data.find(b"\n@@ ", at, end)
        plus, minus = (
            data.count(mark, first, end) if first >= 0 else 0 for mark in (b"\n+", b"\n-")
        )
        files.append(ChangedFile(name, plus, minus, at, end))
    return files


def diff(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the files in a diff, with the lines added and removed in each."""
    if _COMMIT(text.head[:2_000]):
        return history(text, limit)
    body = text.body
    files = _changed(body.data[:_DIFFED], [])
    if not files:
        return None
    part = _part(text, body, len(files))
    lead, items = _changes(files)
    shape, kept = pack(f"diff of {lead}{part}: ", items, len(items), limit)
    largest = max(files, key=lambda file: file.added + file.removed)
    start = body.number(largest.start)
    end = min(start + 120, body.number(max(largest.end - 1, largest.start)))
    return Preview(shape, f"{kept} of {some(len(items), 'file')}{part}", f'lines="{start}:{end}"')


def _part(text: Excerpt, body: Body, found: int) -> str:
    """Suffix for figures about commits or files: empty if they are from all of the content."""
    if found >= _PARTS:
        return f", only the first {_PARTS} of each are counted"
    if body.least or len(body.data) > _DIFFED:
        return f", {text.within(min(len(body.data), _DIFFED))}"
    return ""


def _changes(files: list[ChangedFile]) -> tuple[str, list[str]]:
    """The totals of a diff, and its files by the number of changed lines."""
    merged: dict[str, list[int]] = {}
    for one in files:
        counts = merged.setdefault(one.name, [0, 0])
        counts[0] += one.added
        counts[1] += one.removed
    shared = commonprefix(list(merged)) if len(merged) > 1 else ""  # noqa: RUF071 - of characters, cut at a folder
    folder = shared[: shared.rfind("/") + 1]
    largest = sorted(merged.items(), key=lambda file: -sum(file[1]))
    items = [
        f"{masked_line(path.removeprefix(folder), 80)} +{plus} -{minus}"
        for path, (plus, minus) in largest[:200]
    ]
    items += [""] * (len(largest) - len(items))
    added, removed = (sum(counts[side] for counts in merged.values()) for side in (0, 1))
    where = f", in {masked_line(folder, 60)}" if folder else ""
    return f"{some(len(merged), 'file')}, +{added} -{removed}{where}", items


def history(text: Excerpt, limit: int) -> Preview | None:
    """Preview of `git log`, with or without the changes: commits, authors, dates, files."""
    body = text.body
    data = body.data[:_DIFFED]
    commits = _COMMIT.found(data, _PARTS)
    if not commits or commits[0].start() > 200:
        return None
    dates = [match[1].decode("utf-8", "replace") for match in _DATE.found(data, _PARTS)]
    authors = Counter(match[1].decode("utf-8", "replace") for match in _AUTHOR.found(data, _PARTS))
    files = _changed(data, [match.start() for match in commits])
    part = _part(text, body, max(len(commits), len(files)))
    lead = f"git log of {some(len(commits), 'commit')}{part}"
    span = dict.fromkeys(_DAY.sub(r"\1 \2", dates[at].strip()) for at in (-1, 0)) if dates else ()
    lead += f", {' to '.join(span)}" if span else ""
    names = [f"{masked_line(name, 24)} {times}" for name, times in authors.most_common(2)]
    lead += f", by {', '.join(names)}{' …' if len(authors) > 2 else ''}" if names else ""
    if files:
        totals, items = _changes(files)
        shape, kept = pack(
            line(f"{lead}; {totals}", limit * 2 // 3) + ": ", items, len(items), limit
        )
        return Preview(
            shape,
            f"{kept} of {some(len(items), 'file')}{part}",
            grep("commit ", "diff --git", start="^"),
        )
    subjects = []
    for match in commits[:40]:
        start = body.data.find(b"\n    ", match.end(), match.end() + 2_000)
        subject = masked_line(body.line(start + 1, 100), 60) if start >= 0 else ""
        subjects.append(f"{match[1][:7].decode()} {subject}")
    shape, kept = pack(line(lead, limit * 2 // 3) + ": ", subjects, len(commits), limit)
    return Preview(
        shape, f"{kept} of {some(len(commits), 'commit')}{part}", 'grep="^commit |^    [^ ]"'
    )


def short_history(text: Excerpt, limit: int) -> Preview | None:
    """Preview of `git log --oneline`: the number of lines, and the first."""
    first = [each for each in text.head[:4_096].split("\n", 20)[:20] if each.strip()]
    if len(first) < 5 or sum(bool(_ONE_LINE.match(each)) for each in first) * 10 < len(first) * 9:
        return None
    shown = [masked_line(each, 60) for each in first]
    shape, kept = pack(
        f"git log, one commit a line, {text.extent}: ", shown, text.lines or len(shown), limit
    )
    return Preview(shape, f"{kept} of {text.extent}", 'lines="1:60"')


def markdown(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the headings of a document with their lines."""
    read = _outlined(text)
    return _headings(text, _markdown_headings(read.text), limit, noun="# heading", scope=read.scope)


def restructured(text: Excerpt, limit: int) -> Preview | None:
    levels: dict[str, int] = {}
    entries = []
    number, at = 1, 0
    read = _outlined(text)
    for match in islice(_UNDERLINED.finditer(read.text), _MANY):
        level = levels.setdefault(match.group(2), len(levels))
        number += read.text.count("\n", at, match.start())
        at = match.start()
        entries.append(OutlineEntry(level, f"{number}:{masked_line(match.group(1), 60)}"))
    found = _headings(text, entries, limit, noun="heading", scope=read.scope)
    return replace(found, ask='lines="1:60"') if found else None


def looks_like_markdown(body: str) -> bool:
    levels = [entry.level for entry in _markdown_headings(body[:16_384])]
    return len(levels) >= 2 and (max(levels) >= 2 or len(_TITLES.findall(body[:16_384])) > 2)


def _markdown_headings(body: str, start: int = 1) -> list[OutlineEntry]:
    """The headings that begin with `#`, with the numbers of their lines from `start` on."""
    if "\n#" not in body and not body.startswith("#"):
        return []
    entries: list[OutlineEntry] = []
    fence = ""  # the marks that began the code around a line
    number, at = start, 0
    for match in _HEADING_OR_FENCE.finditer(f"\n{body}"):
        marks, title, ticks, rest = match.groups()
        if marks is None and not fence:
            fence = ticks if ticks[0] == "~" or "`" not in rest else ""
        elif marks is None:
            fence = "" if ticks.startswith(fence) and not rest.strip() else fence
        elif not fence and len(entries) < _MANY:
            number += body.count("\n", at, match.start())
            at = match.start()
            shown = masked_line(title.rstrip("# \t\r"), 60)
            entries.append(OutlineEntry(len(marks), f"{number}:{marks} {shown}"))
    return entries


def _headings(
    text: Excerpt, entries: list[OutlineEntry], limit: int, *, noun: str, scope: str
) -> Preview | None:
    """Preview of headings, each with the number of its line. `scope` is the part of the text that
    they are from."""
    lead = f"{scope.removeprefix(', ')}:\n" if scope else ""
    shape, kept = outline(lead, entries, limit, sep="\n")
    if not kept:
        return None
    size = f" of {text.lines} lines" if text.lines is not None else ""
    is_all = kept == len(entries) or any(not entry.text[:1].isdigit() for entry in entries)
    ask = 'lines="1:60"' if is_all else 'grep="^#"'
    return Preview(
        shape, f"{kept} of {_at_least(entries)} {noun}s with their lines{size}{scope}", ask
    )


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
    part = "" if text.is_whole else f", in the first {text.seen} bytes"
    shape, kept = pack(f"XML {start}{part}: ", items, len(items), limit)
    often = names.most_common(1)[0][0]
    return Preview(
        shape,
        f"the root and {kept} of {len(items)} names of elements{text.scope}",
        grep(f"<{often}"),
    )


def page(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the title and headings of a whole HTML page."""
    body = text.body
    data = body.data
    found = _TITLE.search(data, 0, 1 << 20)
    title = _plain(found[1], 80) if found else ""
    entries = []
    silent = _SILENT.found(data, _MARKS)  # where scripts, styles and comments begin and end
    begins = [match.start() for match in silent]
    for match in _HEADING.found(data, _MANY):
        last = silent[at - 1] if (at := bisect_left(begins, match.start())) else None
        content = _plain(data[match.end() : _end_of(data, match.end(), match[1])], 60)
        if content and not (last is not None and (last[1] or last[0] == b"<!--")):
            entries.append(
                OutlineEntry(int(match[1][1:]), f"{match[1].decode().lower()} {content}")
            )
    lead = f"HTML “{title}”" if title else "HTML"
    shape, kept = outline(lead + "\n", entries, limit, sep="; ") if entries else (lead, 0)
    if not kept and not title:
        words = masked_line(
            html.unescape(_ANY_TAG.sub(" ", _SCRIPT.sub(" ", text.head))), limit - 6
        )
        return (
            Preview(f"HTML: {words}", "the first words of a page without headings", 'query="text"')
            if words
            else None
        )
    if kept == len(entries) and limit - len(shape) > 40 and (first := _first_paragraph(text.head)):
        shape += "\n" + masked_line(first, limit - len(shape) - 1)
    least = body.least or ("≥" if len(entries) >= _MANY else "")
    return Preview(
        shape,
        f"{'title and ' if title else ''}{kept} of {least}{len(entries)} headings",
        'query="text"',
    )


def _plain(source: bytes, room: int) -> str:
    return masked_line(html.unescape(_ANY_TAG.sub("", source.decode("utf-8", "replace"))), room)


def _end_of(data: bytes, start: int, tag: bytes) -> int:
    """Where the element that begins at an offset ends."""
    end = data.find(b"</", start, start + 600)
    while 0 <= end < start + 600 and data[end + 2 : end + 4].lower() != tag.lower():
        end = data.find(b"</", end + 2, start + 600)
    return end if end >= 0 else start


def _first_paragraph(source: str) -> str:
    for match in _TAG.finditer(source):
        if match[1].lower() == "p":
            end = source.find("</p", match.end(), match.end() + 2_000)
            content = (
                masked_line(html.unescape(_ANY_TAG.sub("", source[match.end() : end])), 400)
                if end >= 0
                else ""
            )
            if len(content) >= 100:
                return content
    return ""


def snapshot(text: Excerpt, limit: int) -> Preview | None:
    """Preview of an accessibility snapshot: address, title, and the number of links, buttons and
    fields."""
    body = text.body
    roles: Counter[str] = Counter()
    for pattern in (_ROLE, _UID):
        for match in pattern.found(body.data, _MARKS):
            role = match[1].decode()
            roles[_PLURAL.get(role, role)] += 1
        if roles:
            break
    if roles.total() < 5:
        return None
    url, name = _URL.search(text.head), _NAME.search(text.head)
    title = next((one for one in name.groups() if one), "") if name else ""
    lead = f"page “{masked_line(title, 70)}”" if title else "page"
    lead += f" {masked_line(url[1], 90)}" if url else ""
    least = body.least or ("≥" if roles.total() >= _MARKS else "")
    counts = ", ".join(f"{least}{some(roles[role], role)}" for role in _SHOWN if roles[role])
    shape = masked_line(f"{lead}: {counts}", limit)
    headings = _names(body, rb'heading "')
    shown = "address, title and the number of elements"
    if headings and limit - len(shape) > 40:
        total = max(len(headings), roles["heading"])
        shape, kept = pack(f"{shape}\nheadings: ", headings, total, limit)
        shown += f", {kept} of {least}{total} headings"
    asked = [
        role
        for role in ("textbox", "searchbox", "combobox", "button")
        if roles[_PLURAL.get(role, role)]
    ]
    return Preview(
        shape, shown, grep(*(asked[:4] if roles["field"] or roles["button"] else ["link"]))
    )


def _names(body: Body, start: bytes) -> list[str]:
    """The names of the first elements that begin with some text."""
    found: list[str] = []
    at = -1
    while len(found) < 40 and (at := body.data.find(start, at + 1)) >= 0:
        end = body.data.find(b'"', at + len(start), at + 200)
        found.append(
            masked_line(
                body.data[at + len(start) : max(end, at + len(start))].decode("utf-8", "replace"),
                60,
            )
        )
    return [one for one in dict.fromkeys(found) if one]
