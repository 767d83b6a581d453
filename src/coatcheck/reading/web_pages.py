"""The readable text of a web page.

The parser is our own, for two reasons that were measured. The parser of the standard library needs
10 s and more for 200 KB of unclosed comments or tags; this one takes linear time. The tree that a
browser's parser (lexbor) makes gives the same text, line by line, for every real page tried, so
tags in their order and a stack of open elements are enough.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.reading.text_writer import CELL, LONGEST_LINK, TextWriter

_LONG: Final = 160  # characters; a block in a cell ends a line that is longer
_VOID: Final = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source",
     "track", "wbr")
)  # fmt: skip
_IN_HEAD: Final = frozenset(
    ("base", "link", "meta", "noscript", "script", "style", "template", "title")
)
_SILENT: Final = frozenset(
    ("audio", "canvas", "datalist", "head", "iframe", "math", "noscript", "object", "script",
     "select", "style", "svg", "template", "title", "video")
)  # fmt: skip
_HEADINGS: Final = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}
_LISTS: Final = frozenset(("ul", "ol", "menu"))
_BLOCKS: Final = frozenset(
    ("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details",
     "dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header",
     "hgroup", "li", "main", "nav", "option", "p", "pre", "section", "summary", "table", "tbody",
     "tfoot", "thead", "tr", *_LISTS)
)  # fmt: skip
_CELLS: Final = frozenset(("td", "th", "tr", "tbody", "tfoot"))
# an element without an end tag ends where one of these begins
_CLOSED_BY: Final[Mapping[str, Container[str]]] = {
    "p": _BLOCKS | _HEADINGS.keys(), "li": {"li"}, "dt": {"dt", "dd"}, "dd": {"dt", "dd"},
    "td": _CELLS, "th": _CELLS, "tr": {"tr", "tbody", "tfoot"}, "thead": {"tbody", "tfoot"},
    "tbody": {"tbody", "tfoot"},
}  # fmt: skip
_INVISIBLE: Final = lazy_pattern(
    r"(?:^|;)\s*(?:display\s{0,9}:\s{0,9}none|visibility\s{0,9}:\s{0,9}hidden)", re.IGNORECASE
)
_LABELS: Final = ("aria-label", "placeholder", "name")

_TAG: Final = lazy_pattern(r"<(/?)([a-zA-Z][^\s/>]*+)")
_NAME: Final = lazy_pattern(r"[\s/]*+([^\s/>=]++)?\s*+(=?)\s*+")
_VALUE: Final = lazy_pattern(r"[^\s>]*+")
_RAW: Final = ("script", "style", "title", "textarea", "xmp", "iframe", "noembed", "noframes")
_RAW_END: Final = {tag: lazy_pattern(f"</{tag}", re.IGNORECASE | re.ASCII) for tag in _RAW}


def write_page(source: str, lines: TextWriter) -> None:
    """Write the text of a page."""
    page = _WebPage(lines)
    for token in tokens(source):
        if isinstance(token, str):
            page.text(html.unescape(token))
        elif token.is_end:
            page.end(token.name)
        else:
            page.start(token.name, token.attributes)
    page.close()


class Tag(NamedTuple):
    """A start tag, or an end tag without attributes."""

    name: str
    is_end: bool
    attributes: Mapping[str, str]


def tokens(source: str) -> Iterator[str | Tag]:
    """Yield the tags and texts of a page in linear time. As in a browser, a comment or tag that is
    not closed includes all of the rest."""
    at = 0
    while (start := source.find("<", at)) >= 0:
        yield source[at:start]
        match = _TAG.match(source, start)
        if match is not None:
            attributes, at = _attributes(source, match.end())
            if at < 0:
                return
            tag = Tag(match[2].lower(), bool(match[1]), attributes)
            yield tag
            if tag.name in _RAW_END and not tag.is_end:
                end = _RAW_END[tag.name].search(source, at)
                yield source[at : end.start() if end else len(source)]
                if end is None:
                    return
                at = end.start()
        elif source.startswith(("<!", "<?", "</"), start):
            at = _end_of_comment(source, start)
            if at < 0:
                return
        else:
            yield "<"
            at = start + 1
    yield source[at:]


def _end_of_comment(source: str, start: int) -> int:
    """The offset after a comment, a declaration or an odd end tag; -1 if it does not end."""
    mark = "-->" if source.startswith("<!--", start) else ">"
    end = source.find(mark, start + 2)
    return end + len(mark) if end >= 0 else -1


def _attributes(source: str, at: int) -> tuple[dict[str, str], int]:
    """The attributes of a tag, and the offset after it; -1 if it does not end."""
    given: dict[str, str] = {}
    while (match := _NAME.match(source, at)) is not None and match.end() < len(source):
        at, value = match.end(), ""
        if match[2]:
            value, at = _attribute_value(source, at)
            if at < 0:
                return given, -1
        if match[1]:
            given.setdefault(match[1].lower(), html.unescape(value))
        if not match[2] and source[at] == ">":
            return given, at + 1
    return given, -1


def _attribute_value(source: str, at: int) -> tuple[str, int]:
    """The value of an attribute that begins here, and the offset after it; -1 if it does not
    end."""
    if source[at] in "\"'":
        end = source.find(source[at], at + 1)
        if end < 0:
            return "", -1
        return source[at + 1 : end], end + 1
    match = _VALUE.match(source, at)
    assert match is not None  # it may be empty
    return match[0], match.end()


class _WebPage:
    """Writes the text of a page. Open elements are on a stack, so that hidden ones end where they
    do in a browser."""

    def __init__(self, lines: TextWriter) -> None:
        self._lines = lines
        self._open: list[str] = []
        self._names: Counter[str] = Counter()  # of the open elements
        self._hidden: int | None = None  # number of elements around the hidden one
        self._menus: list[int] = []  # number of elements around each menu
        # for each open list: the number of its last item, or None
        self._items: list[int | None] = []
        self._is_first_cell = True
        self._title = ""

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        while self._open and self._ends_before(self._open[-1], tag):
            self._pop()
        if tag not in _VOID:
            self._push(tag, given)
        if self._hidden is None:
            self._begin(tag, given)

    def end(self, tag: str) -> None:
        if self._names[tag]:
            while self._pop() != tag:
                pass

    def text(self, data: str) -> None:
        if self._hidden is None:
            self._lines.add(data)
        elif self._open[-1:] == ["title"] and not self._names["svg"]:
            self._title = self._title or data

    def close(self) -> None:
        """End all open elements."""
        while self._open:
            self._pop()

    def _ends_before(self, element: str, tag: str) -> bool:
        """Whether an open element has no end tag, and ends before this start tag."""
        if element == "head":
            return tag not in _IN_HEAD
        return tag in _CLOSED_BY.get(element, ())

    def _push(self, tag: str, given: Mapping[str, str]) -> None:
        if self._hidden is None and is_hidden(tag, given):
            self._hidden = len(self._open)
        if tag == "nav" or given.get("role") == "navigation":
            self._menus.append(len(self._open))
        self._open.append(tag)
        self._names[tag] += 1

    def _pop(self) -> str:
        tag = self._open.pop()
        self._names[tag] -= 1
        if self._hidden is None:
            self._finish(tag)
        elif len(self._open) == self._hidden:
            self._hidden = None
        if self._menus and len(self._open) == self._menus[-1]:
            self._menus.pop()
            self._lines.end(gap=True)
        if tag == "title" and self._title.strip():
            self._write_title()
        return tag

    def _write_title(self) -> None:
        self._lines.end()
        self._lines.add(f"Title: {self._title[:LONGEST_LINK]}")
        self._lines.end(gap=True)
        self._title = ""

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        if tag in ("table", "hr"):
            self._lines.end(gap=True)
        elif tag in _BLOCKS:
            self._break()
        begin = _BEGINNINGS.get(tag)
        if begin is not None:
            begin(self, tag, given)

    def _finish(self, tag: str) -> None:
        if tag == "a":
            self._lines.link("")
        elif tag in _HEADINGS:
            self._lines.end()
            self._lines.mark = ""
        elif tag in ("table", "pre"):
            self._lines.end(gap=True)
        elif tag in _BLOCKS:
            self._break()
        if tag == "pre":
            self._lines.verbatim = False
        if tag in _LISTS and self._items:
            self._items.pop()

    def _break(self) -> None:
        """End the line, unless it belongs to a menu or is short and in a cell."""
        if self._menus:
            self._lines.item()
        elif (self._names["td"] or self._names["th"]) and self._lines.size <= _LONG:
            self._lines.add(" ")
        else:
            self._lines.end()

    # The start of an element that is more than a block

    def heading(self, tag: str, _: Mapping[str, str]) -> None:
        self._lines.end(gap=True)
        self._lines.mark = _HEADINGS[tag]

    def line_break(self, _: str, __: Mapping[str, str]) -> None:
        if self._lines.verbatim:
            self._lines.add("\n")
        else:
            self._break()

    def row(self, _: str, __: Mapping[str, str]) -> None:
        self._is_first_cell = True

    def cell(self, _: str, __: Mapping[str, str]) -> None:
        if not self._is_first_cell:
            self._lines.add(CELL)
        self._is_first_cell = False

    def link(self, _: str, given: Mapping[str, str]) -> None:
        self._lines.link(given.get("href", ""))

    def image(self, _: str, given: Mapping[str, str]) -> None:
        alt = given.get("alt", "").strip()
        if alt:
            self._lines.add(f"[image: {alt[:200]}]")

    def field(self, _: str, given: Mapping[str, str]) -> None:
        kind = given.get("type")
        if kind in ("hidden", "radio", "checkbox"):
            return
        if kind in ("submit", "button"):
            what, name = "button", given.get("value", "")
        else:
            what, name = "field", next((given[key] for key in _LABELS if given.get(key)), "")
        self._lines.add(f" [{what}: {name[:100]}] " if name else " ")

    def items(self, tag: str, _: Mapping[str, str]) -> None:
        self._items.append(0 if tag == "ol" else None)

    def item(self, _: str, __: Mapping[str, str]) -> None:
        if self._menus:
            return
        mark = "- "
        if self._items and self._items[-1] is not None:
            self._items[-1] += 1
            mark = f"{self._items[-1]}. "
        depth = min(max(0, len(self._items) - 1), 8)
        self._lines.mark = "  " * depth + mark

    def verbatim(self, _: str, __: Mapping[str, str]) -> None:
        self._lines.verbatim = True


_BEGINNINGS: Final[dict[str, Callable[[_WebPage, str, Mapping[str, str]], None]]] = {
    **dict.fromkeys(_HEADINGS, _WebPage.heading),
    **dict.fromkeys(_LISTS, _WebPage.items),
    "a": _WebPage.link, "br": _WebPage.line_break, "img": _WebPage.image,
    "input": _WebPage.field, "li": _WebPage.item, "pre": _WebPage.verbatim,
    "td": _WebPage.cell, "th": _WebPage.cell, "tr": _WebPage.row,
}  # fmt: skip


def is_hidden(tag: str, given: Mapping[str, str]) -> bool:
    if tag in _SILENT:
        return True
    if tag in ("html", "body"):
        return False
    is_hidden = "hidden" in given or given.get("aria-hidden") == "true"
    return is_hidden or _INVISIBLE.search(given.get("style", "")) is not None
