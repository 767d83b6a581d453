"""Pages of the web: HTML, and the accessibility snapshots that browser tools give to models."""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections import Counter
from typing import Final

from .excerpts import Body, Excerpt, Kind, Preview, grep, line_pattern, masked_line, pack, some
from .outlines import OutlineEntry, outline

_TAG: Final = re.compile(r"<(title|p|h[1-6])\b[^<>]{0,500}>", re.IGNORECASE)
_ANY_TAG: Final = re.compile(r"<[^<>]{0,500}>")
_TITLE: Final = re.compile(rb"<title\b[^<>]{0,500}>([^<]{0,400})", re.IGNORECASE)
_HEADING: Final = line_pattern(r"(?i)<(h[1-6])(?:\s[^<>]{0,500})?>")
_SILENT: Final = line_pattern(r"(?i)<(script|style|template)\b|</(?:script|style|template)|<!--|-->")
_SCRIPT: Final = re.compile(r"<(script|style)[^<]*+(?:<(?!/\1)[^<]*+)*+|<!--[^-]*+(?:-(?!->)[^-]*+)*+", re.IGNORECASE)
_MANY: Final = 1_000
_MARKS: Final = 20_000

_ROLE: Final = line_pattern(
    r"^\s*(?:- |\* )?(?:'|\")?"
    r"(link|button|textbox|combobox|checkbox|radio|searchbox|heading|tab|menuitem|img|listitem|row)\b"
)
_UID: Final = line_pattern(
    r"^\s*(?:uid=|\[)[\w_]+\]?\s?<?(link|button|textbox|combobox|checkbox|radio|searchbox|heading|a|input|select|textarea|StaticText|tab)\b"
)
_URL: Final = re.compile(r"(?:Page URL|Current URL|URL|url)[:=] ?\"?(\S{4,300}?)\"?(?=\s|$)")
_NAME: Final = re.compile(r"(?:Page Title|Title): ([^\n]{1,200})|RootWebArea \"([^\"\n]{1,200})\"")
_PLURAL: Final = {
    "a": "link", "input": "field", "textarea": "field", "textbox": "field", "searchbox": "field", "select": "field",
    "combobox": "field", "checkbox": "field", "radio": "field",
}  # fmt: skip
_SHOWN: Final = ("link", "button", "field", "heading", "tab", "row", "img", "listitem")


def page(text: Excerpt, limit: int) -> Preview | None:
    """Preview of the title and headings of the whole of an HTML page."""
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
            entries.append(OutlineEntry(int(match[1][1:]), f"{match[1].decode().lower()} {content}"))
    lead = f"HTML “{title}”" if title else "HTML"
    shape, kept = outline(lead + "\n", entries, limit, sep="; ") if entries else (lead, 0)
    if not kept and not title:
        words = masked_line(html.unescape(_ANY_TAG.sub(" ", _SCRIPT.sub(" ", text.head))), limit - 6)
        return (
            Preview(f"HTML: {words}", "the first words of a page without headings", 'query="text"') if words else None
        )
    if kept == len(entries) and limit - len(shape) > 40 and (first := _first_paragraph(text.head)):
        shape += "\n" + masked_line(first, limit - len(shape) - 1)
    least = body.least or ("≥" if len(entries) >= _MANY else "")
    return Preview(shape, f"{'title and ' if title else ''}{kept} of {least}{len(entries)} headings", 'query="text"')


def _plain(source: bytes, room: int) -> str:
    return masked_line(html.unescape(_ANY_TAG.sub("", source.decode("utf-8", "replace"))), room)


def _end_of(data: bytes, start: int, tag: bytes) -> int:
    """Where the element ends that begins at an offset."""
    end = data.find(b"</", start, start + 600)
    while 0 <= end < start + 600 and data[end + 2 : end + 4].lower() != tag.lower():
        end = data.find(b"</", end + 2, start + 600)
    return end if end >= 0 else start


def _first_paragraph(source: str) -> str:
    for match in _TAG.finditer(source):
        if match[1].lower() == "p":
            end = source.find("</p", match.end(), match.end() + 2_000)
            content = masked_line(html.unescape(_ANY_TAG.sub("", source[match.end() : end])), 400) if end >= 0 else ""
            if len(content) >= 100:
                return content
    return ""


def snapshot(text: Excerpt, limit: int) -> Preview | None:
    """Preview of an accessibility snapshot: address, title, and the number of links, buttons and fields."""
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
        shape, kept = pack(f"{shape}\nheadings: ", headings, len(headings), limit)
        shown += f", {kept} of {len(headings)} headings"
    asked = [role for role in ("textbox", "searchbox", "combobox", "button") if roles[_PLURAL.get(role, role)]]
    return Preview(shape, shown, grep(*(asked[:4] if roles["field"] or roles["button"] else ["link"])))


def _names(body: Body, start: bytes) -> list[str]:
    """The names of elements that begin with some text."""
    found: list[str] = []
    at = -1
    while len(found) < 40 and (at := body.data.find(start, at + 1)) >= 0:
        end = body.data.find(b'"', at + len(start), at + 200)
        found.append(masked_line(body.data[at + len(start) : max(end, at + len(start))].decode("utf-8", "replace"), 60))
    return [one for one in dict.fromkeys(found) if one]


KINDS: Final = (
    Kind("accessibility snapshot", ("[ref=", "Page URL:", "RootWebArea", "uid=", "]<button", "]<a "), snapshot, 130),
)
