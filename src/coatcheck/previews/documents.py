"""Documents: headings of Markdown, reStructuredText and web pages with their lines, tables with
their rows, elements of XML, accessibility snapshots."""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Final

from coatcheck.deferred import lazy_pattern

from .drafts import Draft, Section
from .excerpts import Body, Excerpt, grep, line, masked_line, some, start_pattern

_HEADING_OR_FENCE: Final = lazy_pattern(
    r"\n(?:(#{1,6})[ \t]{1,4}(\S[^\n]{0,300})|[ ]{0,3}(`{3,40}|~{3,40})([^\n]{0,200}))"
)
_TITLES: Final = lazy_pattern(r"(?:^|\n\n)# \S[^\n]{0,100}\n(?=\n)")
_UNDERLINED: Final = lazy_pattern(r"^(\S[^\n]{0,200})\n([=\-~^\"'*+#])\2{2,200}$", re.MULTILINE)
_ROOT: Final = lazy_pattern(rb"<([A-Za-z_][\w.:-]{0,60})([^<>]{0,1000})>")
_ELEMENT: Final = lazy_pattern(rb"<([A-Za-z_][\w.:-]{0,60})[\s/>]")
_TAG: Final = lazy_pattern(r"<(title|p|h[1-6])\b[^<>]{0,500}>", re.IGNORECASE)
_ANY_TAG: Final = lazy_pattern(r"<[^<>]{0,500}>")
_TITLE: Final = lazy_pattern(rb"<title\b[^<>]{0,500}>([^<]{0,400})", re.IGNORECASE)
_HEADING: Final = lazy_pattern(rb"<([hH][1-6])(?:\s[^<>]{0,500})?>")
_SILENT: Final = lazy_pattern(
    rb"<(script|style|template)\b|</(?:script|style|template)|<!--|-->", re.IGNORECASE
)
_SCRIPT: Final = lazy_pattern(
    r"<(script|style)[^<]*+(?:<(?!/\1)[^<]*+)*+|<!--[^-]*+(?:-(?!->)[^-]*+)*+", re.IGNORECASE
)
_ROW_OR_TABLE: Final = lazy_pattern(rb"<(/?table|tr)\b", re.IGNORECASE)
_TABLE_RULE: Final = lazy_pattern(
    r"^[ \t]{0,4}(\|?[^\n|]{1,200}\|[^\n]{0,1000})\n[ \t]{0,4}\|?[ \t]{0,4}:?-{2,100}:?[ \t]{0,4}\|"
    r"[-:| \t]{0,500}$",
    re.MULTILINE,
)
_TABLE_ROWS: Final = lazy_pattern(r"(?:\n[ \t]{0,4}\|?[^\n|]*+\|[^\n]*+)*+")
_MARKS: Final = 100_000
_MANY: Final = 5_000  # headings
_FEW: Final = 40

_ROLE: Final = start_pattern(
    r"[ \t]{0,200}(?:- |\* )?(?:'|\")?"
    r"(link|button|textbox|combobox|checkbox|radio|searchbox|heading|tab|menuitem|img|listitem"
    r"|row)\b"
)
_UID: Final = start_pattern(
    r"[ \t]{0,200}(?:uid=|\[)\w{1,80}\]?\s?<?"
    r"(link|button|textbox|combobox|checkbox|radio|searchbox|heading|a|input|select|textarea|StaticText|tab)\b"
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


@dataclass(frozen=True, slots=True)
class Heading:
    """One heading: its level, from 1 on, its line and its text."""

    level: int
    line: int
    text: str


def markdown(text: Excerpt) -> Draft | None:
    """Preview of the headings of a document with their lines, and of its tables."""
    whole, scope = text.everything
    return headings(text, whole, scope)


def found_markdown(text: Excerpt) -> Draft | None:
    """The same for text that looks like Markdown."""
    return markdown(text) if looks_like_markdown(text.head) else None


def looks_like_markdown(body: str) -> bool:
    found = _markdown_headings(body[:16_384])
    if len(found) < 2:
        return False
    return max(one.level for one in found) >= 2 or len(_TITLES.findall(body[:16_384])) > 2


def headings(text: Excerpt, body: str, scope: str, *, start: int = 1) -> Draft | None:
    """Describe the headings that begin with `#` in a document whose first line has the number
    `start`."""
    found = _markdown_headings(body, start)
    if not found:
        return None
    ask = 'grep="^#"' if len(found) > _FEW else 'lines="1:60"'
    return _outline(text, found, _markdown_tables(body, start), scope, mark="#", ask=ask)


def restructured(text: Excerpt) -> Draft | None:
    """Preview of the underlined headings of a document with their lines."""
    whole, scope = text.everything
    levels: dict[str, int] = {}
    found = []
    number, at = 1, 0
    for match in islice(_UNDERLINED.finditer(whole), _MANY):
        level = levels.setdefault(match[2], len(levels) + 1)
        number += whole.count("\n", at, match.start())
        at = match.start()
        found.append(Heading(level, number, masked_line(match[1], 60)))
    return _outline(text, found, [], scope, mark="", ask='lines="1:60"') if found else None


def _outline(
    text: Excerpt, found: list[Heading], tables: list[str], scope: str, *, mark: str, ask: str
) -> Draft:
    """Describe headings and tables. If not all headings fit, the upper levels are shown."""
    least = "≥" if len(found) >= _MANY else ""
    part = f"{scope.removeprefix(', ')}: " if scope else ""
    lead = f"{part}{text.extent}, {least}{some(len(found), 'heading')}"
    lead += f", {some(len(tables), 'table')}" if tables else ""
    items = [f"{one.line}:{mark * one.level}{' ' if mark else ''}{one.text}" for one in found]
    ranks = [one.level for one in found]
    share = 0.75 if tables else 1.0
    sections = [Section("", items, "headings", sep="\n", share=share, ranks=ranks)]
    if tables:
        sections.append(Section("tables: ", tables, "tables"))
    return Draft(lead, tuple(sections), scope=scope, ask=ask)


def _markdown_tables(body: str, start: int) -> list[str]:
    """The tables with their lines, columns and numbers of rows."""
    found = []
    number, at = start, 0
    for match in islice(_TABLE_RULE.finditer(body), _MANY):
        number += body.count("\n", at, match.start())
        at = match.start()
        rows = _TABLE_ROWS.match(body, match.end())
        count = body.count("\n", match.end(), rows.end()) if rows else 0
        names = [masked_line(one.strip(), 20) for one in match[1].strip(" |").split("|")]
        found.append(f"{number}: {some(count, 'row')} of {masked_line(', '.join(names), 60)}")
    return found


def _markdown_headings(body: str, start: int = 1) -> list[Heading]:
    """The headings that begin with `#`, with the numbers of their lines from `start` on."""
    if "\n#" not in body and not body.startswith("#"):
        return []
    found: list[Heading] = []
    fence = ""  # the marks that began the code around a line
    number, at = start, 0
    for match in _HEADING_OR_FENCE.finditer(f"\n{body}"):
        marks, title, ticks, rest = match.groups()
        if marks is None and not fence:
            fence = ticks if ticks[0] == "~" or "`" not in rest else ""
        elif marks is None:
            fence = "" if ticks.startswith(fence) and not rest.strip() else fence
        elif not fence and len(found) < _MANY:
            number += body.count("\n", at, match.start())
            at = match.start()
            shown = masked_line(title.rstrip("# \t\r"), 60)
            found.append(Heading(len(marks), number, shown))
    return found


def tree(text: Excerpt) -> Draft | None:
    """Preview of the root of an XML document and its most frequent elements."""
    body = text.body
    root = _ROOT.search(body.data)
    if root is None:
        return None
    names = Counter(_ELEMENT.findall(body.data, root.end()))
    least = body.least
    attributes = masked_line(root[2].decode("utf-8", "replace").strip().rstrip("/"), 200)
    start = f"<{root[1].decode('utf-8', 'replace')}{' ' if attributes else ''}{attributes}>"
    part = f", {text.within(len(body.data))}" if body.least else ""
    common = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    items = []
    for name, times in common[:_FEW]:
        shown = masked_line(name.decode("utf-8", "replace"), 60)
        items.append(f"{shown} ×{least}{times}" if times > 1 else shown)
    section = Section("", items, "names of elements", len(common))
    ask = grep(f"<{common[0][0].decode('utf-8', 'replace')}") if common else ""
    sections = (section,) if items else ()
    return Draft(f"XML {start}{part}", sections, shown="the root", scope=part, ask=ask)


def page(text: Excerpt) -> Draft | None:
    """Preview of the title of an HTML page, its headings with their lines, and its tables."""
    body = text.body
    data = body.data
    named = _TITLE.search(data, 0, 1 << 20)
    title = _plain(named[1], 80) if named else ""
    found = _page_headings(data)
    tables = _page_tables(data)
    least = body.least or ("≥" if len(found) >= _MANY else "")
    lead = (f"HTML “{title}”" if title else "HTML") + f", {text.extent}"
    lead += f", {least}{some(len(found), 'heading')}"
    lead += f", {least}{some(len(tables), 'table')}" if tables else ""
    scope = f", {text.within(len(body.data))}" if body.least else ""
    if not found and not tables:
        source = _SCRIPT.sub(" ", text.head)
        words = masked_line(html.unescape(_ANY_TAG.sub(" ", source)), 400)
        section = Section("", [(line(words, 120), words)] if words else [])
        return Draft(
            lead, (section,), shown="title and first words", scope=scope, ask='query="text"'
        )
    items = [f"{one.line}:h{one.level} {one.text}" for one in found]
    ranks = [one.level for one in found]
    sections = []
    if items:
        share = 0.7 if tables else 1.0
        sections.append(Section("", items, "headings", sep="\n", share=share, ranks=ranks))
    if tables:
        sections.append(Section("tables: ", tables, "tables", share=0.4))
    first = _first_paragraph(text.head)
    if first:
        sections.append(Section("", [(line(first, 120), first)]))
    return Draft(lead, tuple(sections), scope=scope, ask='query="text"')


def _page_headings(data: bytes) -> list[Heading]:
    """The headings outside of scripts, styles and comments."""
    silent = list(
        islice(_SILENT.finditer(data), _MARKS)
    )  # where scripts, styles and comments begin and end
    begins = [match.start() for match in silent]
    found = []
    number, at = 1, 0
    for match in islice(_HEADING.finditer(data), _MANY):
        before = bisect_left(begins, match.start())
        last = silent[before - 1] if before else None
        if last is not None and (last[1] or last[0] == b"<!--"):
            continue
        content = _plain(data[match.end() : _end_of(data, match.end(), match[1])], 60)
        if content:
            number += data.count(b"\n", at, match.start())
            at = match.start()
            found.append(Heading(int(match[1][1:]), number, content))
    return found


def _page_tables(data: bytes) -> list[str]:
    """The tables with their lines and numbers of rows. Rows of a table inside of another count for
    both."""
    found: list[list[int]] = []
    opened: list[int] = []
    number, at = 1, 0
    for match in islice(_ROW_OR_TABLE.finditer(data), _MARKS):
        tag = match[1].lower()
        if tag == b"table":
            number += data.count(b"\n", at, match.start())
            at = match.start()
            opened.append(len(found))
            found.append([number, 0])
        elif tag == b"tr":
            for index in opened:
                found[index][1] += 1
        elif opened:
            opened.pop()
    return [
        f"#{index} {some(rows, 'row')} (line {line_})"
        for index, (line_, rows) in enumerate(found, 1)
    ]


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


def snapshot(text: Excerpt) -> Draft | None:
    """Preview of an accessibility snapshot: address, title, and the number of links, buttons and
    fields."""
    body = text.body
    roles: Counter[str] = Counter()
    for pattern in (_ROLE, _UID):
        for role, times in Counter(pattern.findall(body.lines)).items():
            name = role.decode()
            roles[_PLURAL.get(name, name)] += times
        if roles:
            break
    if roles.total() < 5:
        return None
    url, named = _URL.search(text.head), _NAME.search(text.head)
    title = next((one for one in named.groups() if one), "") if named else ""
    lead = f"page “{masked_line(title, 70)}”" if title else "page"
    lead += f" {masked_line(url[1], 90)}" if url else ""
    least = body.least
    counts = ", ".join(f"{least}{some(roles[role], role)}" for role in _SHOWN if roles[role])
    total = roles["heading"]
    sections = [
        Section("headings: ", _names(body, b'heading "'), "headings", total, share=0.4),
        Section("buttons: ", _names(body, b'button "'), "buttons", roles["button"], share=0.3),
        Section("links: ", _names(body, b'link "'), "links", roles["link"], share=0.3),
    ]
    kept = tuple(section for section in sections if section.items)
    is_form = roles["field"] or roles["button"]
    asked = [
        role
        for role in ("textbox", "searchbox", "combobox", "button")
        if roles[_PLURAL.get(role, role)]
    ]
    ask = grep(*(asked[:4] if is_form else ["link"]))
    return Draft(f"{lead}: {counts}", kept, shown="the number of elements", ask=ask)


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
