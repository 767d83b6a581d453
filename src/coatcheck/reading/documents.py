"""Readable text of documents (`query="text"`): PDF, web pages, and Word, PowerPoint and
OpenDocument files.

Headings are lines with `#`, items begin with `-` or a number, cells of a row are separated by ` |
`, a link is `[text](address)` the first time. Scripts, styles and hidden parts are left out. A PDF
or an office file is sliced and searched as this text, a web page as its source.

Documents are hostile: they are parsed in a child process, no external entity is loaded, and a file
that unpacks to more than the limit is an error. Texts are kept for the next page.

`describe` is for binary content: type, size, dimensions of an image, pages of a PDF, names in an
archive. It reads only heads, tails and directories, and unpacks nothing.
"""

from __future__ import annotations

import html
import io
import posixpath
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple
from xml.parsers import expat

from coatcheck.content import ArtifactStream, Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded, MissingExtra, TooLarge
from coatcheck.ids import clip
from coatcheck.image_size import pixels
from coatcheck.media import TEXT, decoded, essence
from coatcheck.previews import EDGE, Sample
from coatcheck.previews.binaries import WORKBOOKS, header, office_kind
from coatcheck.previews.excerpts import count
from coatcheck.reading import heavy, pdf, sheets
from coatcheck.reading.page import MAX_CHARS, MAX_RESULT, BoundedLines, QueryResult, TextCache
from coatcheck.reading.text import Form, recognized, sample_of

MAX_HTML: Final = 16 << 20
MAX_UNPACKED: Final = 64 << 20  # bytes of XML in an office file
_PART: Final = lazy_pattern(
    r"\s*(?:page|slide)s?\s+(\d{1,7})(?:\s*(?:-|to|:)\s*(\d{1,7}))?\s*", re.IGNORECASE
)
_SLIDE: Final = lazy_pattern(r"^--- slide (\d+) ---$", re.MULTILINE)
_BETWEEN: Final = lazy_pattern(r"^--- (?:page|slide) \d+(?::[^\n]*)? ---$", re.MULTILINE)
_DIRECTORY: Final = 4 << 20
_NAMES: Final = 40
_DUMP: Final = 128
_NOTES: Final = {
    "application/zstd": "Compressed. It is not unpacked here.",
    "application/vnd.apache.parquet": (
        "query='DESCRIBE artifact' gives its columns, query='SELECT … FROM artifact' its rows"
    ),
}
_kept: Final[TextCache[QueryResult]] = TextCache()


def text_of(content: Content, form: Form) -> QueryResult:
    """Return the text of a document, as much as its limit allows."""
    if form == "pdf":
        return pdf.pdf_text(content, 1, pdf.EVERY)
    kept = _kept.get(content.ref.artifact_id)
    if kept is None:
        kept = sheets.cells(content) if form == "sheets" else heavy.document(content, form)
        _kept.put(content.ref.artifact_id, kept, len(kept.text))
    return kept


def text_query(content: Content, query: str) -> QueryResult | None:
    """Answer `text`, `page 3` or `slides 2-5`; None for another query."""
    match = _PART.fullmatch(query)
    if match is None and query.lower() != "text":
        return None
    content, form = recognized(content)
    media_type = clip(content.ref.media_type, 60)
    if form == "text":
        raise InvalidArgument(
            f"{media_type} is text already", hint='read it with lines="1:80" or grep="…"'
        )
    if form == "other":
        raise InvalidArgument(
            f"{media_type} has no text to read", hint="read it without a query to see what it is"
        )
    if match is None:
        return text_of(content, form)
    first, last = int(match[1]), int(match[2] or match[1])
    if form == "pdf":
        return pdf.pdf_text(content, first, last)
    whole = text_of(content, form)
    starts = [mark.start() for mark in _SLIDE.finditer(whole.text)]
    if not starts:
        raise InvalidArgument(
            "this document has no pages", hint='query="text" gives all of its text'
        )
    if not 1 <= first <= min(last, len(starts)):
        raise InvalidArgument(
            f"invalid slides: {first} to {last}", hint=f"it has {count(len(starts), 'slide')}"
        )
    last = min(last, len(starts))
    text = whole.text[starts[first - 1] : starts[last] if last < len(starts) else None].rstrip("\n")
    shown = f"slide {first}" if first == last else f"slides {first}-{last}"
    return replace(whole, text=text, shown=f"{shown} of {len(starts)}")


def as_text(content: Content, form: Form, *, is_searched: bool) -> tuple[Content, str]:
    """Return the text of a document as a content that can be sliced or searched, and a note for its
    pages. In a text to search, the lines between pages are form feeds: they match nothing, and show
    which page a match is on."""
    result = text_of(content, form)
    text = result.text
    if is_searched:
        text = sheets.searched(text) if form == "sheets" else _BETWEEN.sub("\f", text)
    data = text.encode()
    note = {"pdf": f"of the text of {result.shown}", "sheets": f"of {result.shown}"}.get(
        form, "of its text"
    )
    ref = replace(content.ref, size_bytes=len(data), media_type=TEXT)
    return Content.of(ref, data), "; ".join(filter(None, (note, result.note)))


def extract(content: Content, form: Form) -> QueryResult:
    """Extract the text of a web page or an office file. This runs in a child process."""
    lines = _Writer()
    if form == "page":
        if content.size > MAX_HTML:
            raise TooLarge(
                f"{clip(content.ref.pointer)} has {content.size:,} bytes, the limit is {MAX_HTML:,}"
            )
        _WebPage(lines).write(decoded(content.read(0, content.size)))
    else:
        _office(content, lines)
    lines.end()
    what = "the text of the page" if form == "page" else "the text of the document"
    note = f"only the first {MAX_RESULT:,} characters" if lines.kept.full else ""
    return QueryResult(lines.kept.text, shown=what, note=note)


class _Writer:
    """Lines of text, made of pieces. White space is collapsed, except in `verbatim` text. `mark`
    begins the next line that has text. The address of a link comes after its text, or after the
    first line of it."""

    def __init__(self) -> None:
        self.kept = BoundedLines(MAX_RESULT)
        self._pieces: list[str] = []
        self.size = 0
        self._last = ""  # piece that is not blank
        self._wants_gap = False
        self._href, self._link_at = "", 0
        self._known: set[str] = set()
        self._title = ""
        self.mark = ""
        self.verbatim = False

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.size += len(piece.strip())
        if not piece.isspace():
            self._last = piece or self._last

    def item(self) -> None:
        """Begin another item on the same line."""
        if self._last not in ("", _ITEM):
            self.add(_ITEM)

    def link(self, href: str) -> None:
        """Begin a link, and end the open one. An address that was written before is left out."""
        self._close_link()
        bare = "".join(href.split())
        is_new = not _NO_LINK.match(bare) and len(bare) <= _LONGEST_LINK and bare not in self._known
        self._href = bare if is_new else ""
        if is_new:
            self._open_link()

    def end(self, *, gap: bool = False) -> None:
        """End the current line, if it has any text. With `gap`, an empty line comes before the next
        one."""
        self._close_link()
        text = "".join(self._pieces)
        self._pieces.clear()
        self.size, self._last = 0, ""
        if self.verbatim:
            for line in text.strip("\n").split("\n") if text.strip() else ():
                self._put(line.rstrip())
        elif (flat := " ".join(text.split()).rstrip(" ·|")).strip("| "):
            self._put(self.mark + flat)
            self.mark = ""
        self._wants_gap |= gap
        if self._href:  # it had no text yet
            self._open_link()

    def _open_link(self) -> None:
        self._link_at = len(self._pieces)
        self._pieces.append("")

    def _close_link(self) -> None:
        text = "".join(self._pieces[self._link_at :]).strip() if self._href else ""
        if text:
            self._known.add(self._href)
            if text != self._href:
                self._pieces[self._link_at] = "["
                self._pieces.append(f"]({_ENCODED.sub(_decoded_address, self._href)})")
            self._href = ""

    def _put(self, line: str) -> None:
        if self._wants_gap and len(self.kept):
            self.kept.add("")
        self._wants_gap = False
        if self._title:
            self.kept.add(f"# {self._title}")
            self._title = ""
        self.kept.add(f" {line}" if line.startswith("--- slide ") else line)

    def title(self, text: str) -> None:
        """Put a heading before the next line, if there is one."""
        self.end(gap=True)
        self._title = text

    def slide(self, number: int) -> None:
        """Begin a slide with a line that no other text can have."""
        self.end()
        self.mark = ""
        self.kept.add(f"--- slide {number} ---" if number == 1 else f"\n--- slide {number} ---")


def _decoded_address(match: re.Match[str]) -> str:
    """Decode the letters of an address: percent-encoded, they would take many times as many
    tokens."""
    try:
        return bytes.fromhex(match[0].replace("%", "")).decode()
    except UnicodeDecodeError:
        return match[0]


_ENCODED: Final = lazy_pattern(r"(?:%[89A-Fa-f][0-9A-Fa-f])+")
_ITEM: Final = " · "
_CELL: Final = " | "
_LONG: Final = 160  # characters; a block in a cell ends a line that is longer
_LONGEST_LINK: Final = 500
_NO_LINK: Final = lazy_pattern(r"\s*(?:#|javascript:|data:|blob:|about:|$)", re.IGNORECASE)
_VOID: Final = frozenset(
    (
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "param",
        "source",
        "track",
        "wbr",
    )
)
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


class _Tag(NamedTuple):
    """A start tag, or an end tag without attributes."""

    name: str
    is_end: bool
    attributes: Mapping[str, str]


def _tokens(source: str) -> Iterator[str | _Tag]:
    """Yield the tags and texts of a page in linear time, unlike the parser of the standard library.
    As in a browser, a comment or tag that is not closed includes all of the rest."""
    at = 0
    while (start := source.find("<", at)) >= 0:
        yield source[at:start]
        match = _TAG.match(source, start)
        if source.startswith("<!--", start):
            at = source.find("-->", start + 2) + 3
            if at == 2:
                return
        elif match is None and source[start + 1 : start + 2] in ("!", "?", "/"):
            at = source.find(">", start) + 1
        elif match is None:
            yield "<"
            at = start + 1
        else:
            name, (given, at) = match[2].lower(), _attributes(source, match.end())
            if at > start:
                yield _Tag(name, bool(match[1]), given)
            if name in _RAW_END and not match[1] and at > start:
                end = _RAW_END[name].search(source, at)
                yield source[at : end.start() if end else len(source)]
                at = end.start() if end else 0
        if at <= start:
            return
    yield source[at:]


def _attributes(source: str, at: int) -> tuple[dict[str, str], int]:
    """The attributes of a tag, and the offset after it; 0 if it does not end."""
    given: dict[str, str] = {}
    while (match := _NAME.match(source, at)) is not None and match.end() < len(source):
        name, at, value = match[1], match.end(), ""
        if match[2] and source[at] in "\"'":
            end = source.find(source[at], at + 1)
            if end < 0:
                return given, 0
            value, at = source[at + 1 : end], end + 1
        elif match[2]:
            value, at = source[at : (end := _VALUE.match(source, at).end())], end  # type: ignore[union-attr]
        elif source[at] == ">":
            if name:
                given.setdefault(name.lower(), "")
            return given, at + 1
        if name:
            given.setdefault(name.lower(), html.unescape(value))
    return given, 0


class _WebPage:
    """Writes the text of a page. Open elements are on a stack, so that hidden ones end where they
    do in a browser."""

    def __init__(self, lines: _Writer) -> None:
        self._lines = lines
        self._open: list[str] = []
        self._names: Counter[str] = Counter()
        self._hidden: int | None = None  # number of elements around the hidden one
        self._menus: list[int] = []  # number of elements around each menu
        self._items: list[
            int | None
        ] = []  # for each open list: the number of its last item, or None
        self._is_first_cell = True
        self._title = ""

    def write(self, source: str) -> None:
        for token in _tokens(source):
            if isinstance(token, str):
                self._text(html.unescape(token))
            elif token.is_end:
                self._close(token.name)
            else:
                self._start(token.name, token.attributes)
        while self._open:
            self._pop()

    def _start(self, tag: str, given: Mapping[str, str]) -> None:
        while self._open and (
            tag in _CLOSED_BY.get(self._open[-1], ())
            or (self._open[-1] == "head" and tag not in _IN_HEAD)
        ):
            self._pop()
        if tag not in _VOID:
            self._open.append(tag)
            self._names[tag] += 1
            is_hidden = (
                "hidden" in given
                or given.get("aria-hidden") == "true"
                or _INVISIBLE.search(given.get("style", ""))
            )
            if self._hidden is None and (
                tag in _SILENT or (is_hidden and tag not in ("html", "body"))
            ):
                self._hidden = len(self._open) - 1
            if tag == "nav" or given.get("role") == "navigation":
                self._menus.append(len(self._open) - 1)
        if self._hidden is None:
            self._begin(tag, given)

    def _close(self, tag: str) -> None:
        if self._names[tag]:
            while self._pop() != tag:
                pass

    def _text(self, data: str) -> None:
        if self._hidden is None:
            self._lines.add(data)
        elif self._open[-1:] == ["title"] and not self._names["svg"]:
            self._title = self._title or data

    def _pop(self) -> str:
        tag = self._open.pop()
        self._names[tag] -= 1
        if self._hidden is None:
            self._end(tag)
        elif len(self._open) == self._hidden:
            self._hidden = None
        if self._menus and len(self._open) == self._menus[-1]:
            self._menus.pop()
            self._lines.end(gap=True)
        if tag == "title" and self._title.strip():
            self._lines.end()
            self._lines.add(f"Title: {self._title[:_LONGEST_LINK]}")
            self._lines.end(gap=True)
            self._title = ""
        return tag

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        lines = self._lines
        if tag in _HEADINGS:
            lines.end(gap=True)
            lines.mark = _HEADINGS[tag]
        elif tag in ("td", "th"):
            if not self._is_first_cell:
                lines.add(_CELL)
            self._is_first_cell = False
        elif tag == "a":
            lines.link(given.get("href", ""))
        elif tag == "img" and (alt := given.get("alt", "").strip()):
            lines.add(f"[image: {alt[:200]}]")
        elif tag == "input" and given.get("type") not in ("hidden", "radio", "checkbox"):
            is_button = given.get("type") in ("submit", "button")
            name = (
                given.get("value")
                if is_button
                else next((given[key] for key in _LABELS if given.get(key)), "")
            )
            lines.add(f" [{'button' if is_button else 'field'}: {name[:100]}] " if name else " ")
        elif tag == "br" and lines.verbatim:
            lines.add("\n")
        elif tag in ("table", "hr"):
            lines.end(gap=True)
        elif tag in _BLOCKS or tag == "br":
            self._break()
        if tag == "tr":
            self._is_first_cell = True
        elif tag in _LISTS:
            self._items.append(0 if tag == "ol" else None)
        elif tag == "li" and not self._menus:
            number = self._items[-1] if self._items else None
            if number is not None:
                self._items[-1] = number + 1
            lines.mark = "  " * min(max(0, len(self._items) - 1), 8) + (
                "- " if number is None else f"{number + 1}. "
            )
        elif tag == "pre":
            lines.verbatim = True

    def _end(self, tag: str) -> None:
        if tag == "a":
            self._lines.link("")
        elif tag in _HEADINGS:
            self._lines.end()
            self._lines.mark = ""
        elif tag in ("table", "pre"):
            self._lines.end(gap=True)
            self._lines.verbatim &= tag != "pre"
        elif tag in _BLOCKS:
            self._break()
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


def _office(content: Content, lines: _Writer) -> None:
    """Write the text of a Word, PowerPoint or OpenDocument file."""
    try:
        with _archive(content) as archive:
            package = _Package(archive)
            kinds = {one.kind: one.target for one in package.relations("").values()}
            main = kinds.get("officeDocument", "")
            if main.startswith("word/"):
                _word(package, main, lines)
            elif main.startswith("ppt/"):
                _slides(package, main, lines)
            else:
                package.parse("content.xml", _OpenDocument(lines))
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        zlib.error,
    ) as error:
        if isinstance(error, CoatcheckError):
            raise
        raise InvalidArgument(f"the document cannot be read: {clip(str(error))}") from error


def _archive(content: Content) -> zipfile.ZipFile:
    """Open a zip archive. It needs a buffered stream: a raw one may return less than it was asked
    for."""
    return zipfile.ZipFile(io.BufferedReader(ArtifactStream(content), EDGE))


class _Package:
    """The XML files inside an office file. The total unpacked size of those that are parsed is
    limited."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.names = frozenset(archive.namelist())
        self._left = MAX_UNPACKED

    def parse(self, name: str, handler: _Elements) -> None:
        """Parse a file, if it is there. A document type, and so every entity, is refused."""
        if name not in self.names:
            return
        parser = expat.ParserCreate(namespace_separator="}")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse
        parser.StartElementHandler = lambda tag, given: handler.start(
            tag.rpartition("}")[2], {_attribute(key): value for key, value in given.items()}
        )
        parser.EndElementHandler = lambda tag: handler.end(tag.rpartition("}")[2])
        parser.CharacterDataHandler = handler.data
        try:
            with self._archive.open(name) as file:
                while piece := file.read(EDGE):
                    self._left -= len(piece)
                    if self._left < 0:
                        raise LimitExceeded(
                            f"the document unpacks to more than {MAX_UNPACKED >> 20} MiB"
                        )
                    parser.Parse(piece, False)
                parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise InvalidArgument(f"the document cannot be read: {clip(name)}: {error}") from error

    def elements(self, name: str) -> list[tuple[str, Mapping[str, str]]]:
        """The start tags in a file."""
        found = _StartTags()
        self.parse(name, found)
        return found.all

    def relations(self, name: str) -> dict[str, Relation]:
        """The relations of a file by their ids. A target inside the package is a path from its
        root."""
        folder, _, file = name.rpartition("/")
        found = {}
        for tag, given in self.elements(posixpath.join(folder, "_rels", f"{file}.rels")):
            if tag == "Relationship":
                target = given.get("Target", "")
                if given.get("TargetMode") != "External":
                    target = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
                found[given.get("Id", "")] = Relation(
                    given.get("Type", "").rpartition("/")[2], target
                )
        return found


def _attribute(key: str) -> str:
    """The local name of an attribute. `r:id` is a relation; a plain `id` means something else."""
    space, _, name = key.rpartition("}")
    return f"r:{name}" if space.endswith("/relationships") else name


def _refuse(*_: object) -> None:
    raise InvalidArgument("the document cannot be read: it has a document type definition")


class _Elements:
    """Handles the elements of an XML file by their local names."""

    def start(self, tag: str, given: Mapping[str, str]) -> None: ...

    def end(self, tag: str) -> None: ...

    def data(self, text: str) -> None: ...


class Relation(NamedTuple):
    """What a file of an office package refers to, and how."""

    kind: str
    target: str


class _StartTags(_Elements):
    def __init__(self) -> None:
        self.all: list[tuple[str, Mapping[str, str]]] = []

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        self.all.append((tag, given))


_HEADING: Final = lazy_pattern(r"heading (\d)|title", re.IGNORECASE)
_REMOVED: Final = frozenset(
    ("del", "moveFrom", "Fallback")
)  # the last repeats content for older programs
_FURNITURE: Final = frozenset(("dt", "ftr", "hdr", "sldImg", "sldNum"))
_DEPTHS: Final = frozenset("012345678")


class _Prose(_Elements):
    """Writes paragraphs and tables. Each format has its names for a table, a row, a cell and what
    is left out."""

    table, row, cell = "table", "table-row", "table-cell"
    left_out: Container[str] = ("tracked-changes", "note-citation")

    def __init__(self, lines: _Writer) -> None:
        self._lines = lines
        self._depth = 0  # of elements that are left out
        self._tables: list[bool] = []  # nested: whether the next cell is the first of its row

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        if self._depth or tag in self.left_out:
            self._depth += 1
        elif tag == self.table:
            self._lines.end(gap=not self._tables)
            self._tables.append(True)
        elif tag not in (self.row, self.cell):
            self._begin(tag, given)
        elif self._tables:
            if tag == self.cell and not self._tables[-1]:
                self._lines.add(_CELL)
            self._tables[-1] = tag == self.row

    def end(self, tag: str) -> None:
        if self._depth:
            self._depth -= 1
        elif tag == self.row:
            self._lines.end()
        elif tag == self.table:
            self._lines.end(gap=len(self._tables) == 1)
            del self._tables[-1:]
        else:
            self._finish(tag)

    def _begin(self, tag: str, given: Mapping[str, str]) -> None: ...

    def _finish(self, tag: str) -> None: ...

    def _heading(self, level: int) -> None:
        if level and not self._tables:
            self._lines.end(gap=True)
            self._lines.mark = "#" * level + " "

    def _break(self, *, is_inside: bool = False) -> None:
        """End the line, unless it is inside a cell or a note."""
        if self._tables or is_inside:
            self._lines.add(" ")
        else:
            self._lines.end()


class _OfficeXml(_Prose):
    """Writes the paragraphs, lists and tables of Word and PowerPoint."""

    table, row, cell, left_out = "tbl", "tr", "tc", _REMOVED

    def __init__(
        self, lines: _Writer, relations: Mapping[str, Relation], levels: Mapping[str, int]
    ) -> None:
        super().__init__(lines)
        self._relations, self._levels = relations, levels
        self._is_text = self._is_muted = False

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        lines = self._lines
        if tag == "t":
            self._is_text = True
        elif tag == "tab":
            lines.add("\t")
        elif tag in ("br", "cr"):
            self._break()
        elif tag == "ph":
            self._is_muted = given.get("type") in _FURNITURE
            self._heading(given.get("type") in ("title", "ctrTitle"))
        elif tag == "pStyle":
            self._heading(self._levels.get(given.get("val", ""), 0))
        elif tag == "ilvl" and not lines.mark:
            depth = given.get("val", "")
            lines.mark = "  " * (int(depth) if depth in _DEPTHS else 0) + "- "
        elif tag in ("hyperlink", "hlinkClick"):
            to = self._relations.get(given.get("r:id", ""))
            lines.link(to.target if to is not None and to.kind == "hyperlink" else "")
        elif tag in ("footnoteReference", "endnoteReference"):
            lines.add(f"[^{given.get('id', '')}]")
        elif tag in ("footnote", "endnote"):
            lines.mark = f"[^{given.get('id', '')}] "
        elif tag == "comment":
            lines.mark = f"- {given.get('author', '')[:100]}: "

    def _finish(self, tag: str) -> None:
        lines = self._lines
        if tag == "t":
            self._is_text = False
        elif tag in ("hyperlink", "fld") or (tag == "r" and not self._levels):
            lines.link("")
        elif tag == "p":
            self._break()
            lines.mark = lines.mark if lines.mark.startswith("[^") else ""
        elif tag == "sp":
            self._is_muted = False

    def data(self, text: str) -> None:
        if self._is_text and not self._is_muted:
            self._lines.add(text)


def _word(package: _Package, main: str, lines: _Writer) -> None:
    relations = package.relations(main)
    parts = {one.kind: one.target for one in relations.values()}
    levels, style = {}, ""  # programs translate the ids of styles, but not their names
    for tag, given in package.elements(parts.get("styles", "")):
        if tag == "style":
            style = given.get("styleId", "")
        elif tag == "name" and (match := _HEADING.fullmatch(given.get("val", ""))):
            levels[style] = min(int(match[1] or 1), 6)
    package.parse(main, _OfficeXml(lines, relations, levels))
    for kind in ("footnotes", "endnotes", "comments"):
        if kind in parts:
            lines.title(kind.capitalize())
            package.parse(parts[kind], _OfficeXml(lines, package.relations(parts[kind]), levels))


def _slides(package: _Package, main: str, lines: _Writer) -> None:
    keys = [given.get("r:id", "") for tag, given in package.elements(main) if tag == "sldId"]
    slides = package.relations(main)
    for number, key in enumerate(keys, 1):
        lines.slide(number)
        if key in slides and not lines.kept.full:
            relations = package.relations(slides[key].target)
            package.parse(slides[key].target, _OfficeXml(lines, relations, {}))
            for notes in [one.target for one in relations.values() if one.kind == "notesSlide"]:
                lines.end()
                lines.mark = "Notes: "
                package.parse(notes, _OfficeXml(lines, {}, {}))


class _OpenDocument(_Prose):
    """Writes the paragraphs, lists, tables and slides of an OpenDocument file."""

    def __init__(self, lines: _Writer) -> None:
        super().__init__(lines)
        self._paragraphs = self._lists = self._notes = self._slides = 0

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        lines = self._lines
        if tag in ("p", "h"):
            self._paragraphs += 1
            level = given.get("outline-level", "1")
            self._heading(
                min(max(1, int(level)) if level in _DEPTHS else 1, 6) if tag == "h" else 0
            )
        elif tag in ("s", "tab"):
            lines.add(" " if tag == "s" else "\t")
        elif tag == "line-break":
            self._break(is_inside=self._notes > 0)
        elif tag == "a":
            lines.link(given.get("href", ""))
        elif tag == "list":
            self._lists += 1
        elif tag == "list-item":
            lines.mark = "  " * min(self._lists - 1, 8) + "- "
        elif tag in ("note-body", "annotation"):
            self._notes += 1
            lines.add(" (note: ")
        elif tag == "page":
            self._slides += 1
            lines.slide(self._slides)

    def _finish(self, tag: str) -> None:
        if tag in ("p", "h"):
            self._paragraphs -= 1
            self._break(is_inside=self._notes > 0)
        elif tag == "a":
            self._lines.link("")
        elif tag == "list":
            self._lists -= 1
        elif tag in ("note-body", "annotation"):
            self._notes -= 1
            self._lines.add(")")

    def data(self, text: str) -> None:
        if self._paragraphs and not self._depth:
            self._lines.add(text)


def describe(content: Content, *, max_chars: int = MAX_CHARS) -> QueryResult:
    """Describe a content without showing it, in at most `max_chars` characters."""
    media, sample = essence(content.ref.media_type), sample_of(content)
    head = sample.head
    lines = [f"{media}, {content.size:,} bytes"]
    if not content.size:
        lines.append("It is empty.")
    elif media.startswith("image/"):
        size = pixels(head) or _bitmap_size(head)
        lines.append(
            f"{size[0]:,} x {size[1]:,} pixels"
            if size
            else "Its first bytes do not have its dimensions."
        )
    elif media == "application/pdf":
        lines.extend(_pdf(content))
    elif media in _NOTES:
        lines.append(_NOTES[media])
    elif head.startswith(b"PK\x03\x04") or media == "application/zip":
        lines.extend(_zip(content, sample))
    elif media == "application/gzip":
        lines.extend(_gzip(content, head))
    elif about := header(sample, media):
        lines.append(about)
    if (
        not media.startswith("image/")
        and media != "application/pdf"
        and content.size
        and not head.startswith(b"PK")
    ):
        lines.extend(_dump(head))
    text = "\n".join(lines)
    cut = len(text) > max_chars
    return QueryResult(
        text[:max_chars], TEXT, "description", note="the description is cut" if cut else ""
    )


def _bitmap_size(head: bytes) -> tuple[int, int] | None:
    if head[:2] != b"BM" or len(head) < 26:
        return None
    width, height = struct.unpack("<ii", head[18:26])
    return width, abs(height)


def _pdf(content: Content) -> Iterator[str]:
    try:
        found = pdf.ask(content, 1, 0, 0, seconds=5)
    except MissingExtra:
        yield "Its text cannot be read here."
        return
    except CoatcheckError as error:
        yield f"It could not be opened: {error.message}"
        return
    if found["encrypted"]:
        yield "encrypted" if found["pages"] else "It is encrypted and needs a password."
    if found["pages"]:
        yield count(found["pages"], "page")
    for key, value in found["about"].items():
        yield f"{key}: {clip(value, 200)}"
    if found["pages"]:
        yield 'query="page 1" gives the text of a page, query="text" of all; grep searches it'


def _gzip(content: Content, head: bytes) -> Iterator[str]:
    if len(head) >= 10 and head[3] & 8 and not head[3] & 4:
        name = head[10 : head.find(b"\0", 10)] if b"\0" in head[10:300] else b""
        if name:
            yield f"contains {clip(name.decode('latin-1'))}"
    claimed = int.from_bytes(content.read(max(0, content.size - 4), 4), "little")
    yield (
        f"Compressed; it claims to unpack to {claimed:,} bytes (modulo 4 GiB). "
        "It is not unpacked here."
    )


def _zip(content: Content, sample: Sample) -> Iterator[str]:
    """Names and sizes according to the archive's directory, unless it is too large."""
    kind = office_kind(sample)
    if kind and kind not in WORKBOOKS:  # a workbook is described only if its cells cannot be read
        yield f'{kind}; query="text" gives its text, grep searches it'
        return
    tail = (sample.head + sample.tail)[-EDGE:]
    at = tail.rfind(b"PK\x05\x06")
    claimed = int.from_bytes(tail[at + 12 : at + 16], "little")
    if (
        at < 0 or len(tail) < at + 22 or claimed > _DIRECTORY or b"PK\x06\x07" in tail
    ):  # the last: ZIP64, unlimited
        yield "Its directory is missing or too large to list."
        return
    try:
        with _archive(content) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        yield f"Its directory cannot be read: {clip(str(error))}"
        return
    yield (
        f"{len(entries):,} entries that claim {sum(entry.file_size for entry in entries):,} "
        "bytes; not unpacked here:"
    )
    for entry in entries[:_NAMES]:
        yield f"  {clip(entry.filename)} {entry.file_size:,}"
    if len(entries) > _NAMES:
        yield f"  … {len(entries) - _NAMES:,} more"


def _dump(head: bytes) -> Iterator[str]:
    """The first bytes as hexadecimal digits and printable characters."""
    yield f"first {min(_DUMP, len(head))} bytes:"
    for at in range(0, min(_DUMP, len(head)), 16):
        row = head[at : at + 16]
        yield f"  {at:04x}  {row.hex(' '):<47}  {re.sub(rb'[^ -~]', b'.', row).decode('ascii')}"
