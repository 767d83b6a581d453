"""The readable text of Word, PowerPoint and OpenDocument files.

The files are hostile: a document type, and so every entity, is refused, and the total unpacked size
of the XML that is parsed is limited.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Container, Mapping
from typing import Final, NamedTuple
from xml.parsers import expat

from coatcheck.content import ArtifactStream, Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import CoatcheckError, InvalidArgument, LimitExceeded
from coatcheck.ids import clip
from coatcheck.previews import EDGE
from coatcheck.reading.text_writer import CELL, TextWriter

MAX_UNPACKED: Final = 64 << 20  # bytes of XML in an office file
_HEADING: Final = lazy_pattern(r"heading (\d)|title", re.IGNORECASE)
# the last repeats content for older programs
_REMOVED: Final = frozenset(("del", "moveFrom", "Fallback"))
_FURNITURE: Final = frozenset(("dt", "ftr", "hdr", "sldImg", "sldNum"))
_DEPTHS: Final = frozenset("012345678")
_UNREADABLE: Final = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError,
    ValueError,
)  # fmt: skip


def write_office(content: Content, lines: TextWriter) -> None:
    """Write the text of a Word, PowerPoint or OpenDocument file."""
    try:
        with opened(content) as archive:
            package = _Package(archive)
            kinds = {one.kind: one.target for one in package.relations("").values()}
            main = kinds.get("officeDocument", "")
            if main.startswith("word/"):
                _write_word(package, main, lines)
            elif main.startswith("ppt/"):
                _write_slides(package, main, lines)
            else:
                package.parse("content.xml", _OpenDocument(lines))
    except _UNREADABLE as error:
        if isinstance(error, CoatcheckError):
            raise
        raise InvalidArgument(f"the document cannot be read: {clip(str(error))}") from error


def opened(content: Content) -> zipfile.ZipFile:
    """Open a zip archive. It needs a buffered stream: a raw one may return less than it was asked
    for."""
    return zipfile.ZipFile(io.BufferedReader(ArtifactStream(content), EDGE))


def _write_word(package: _Package, main: str, lines: TextWriter) -> None:
    relations = package.relations(main)
    parts = {one.kind: one.target for one in relations.values()}
    levels = _levels_of_styles(package, parts.get("styles", ""))
    package.parse(main, _OfficeXml(lines, relations, levels))
    for kind in ("footnotes", "endnotes", "comments"):
        if kind in parts:
            lines.title(kind.capitalize())
            package.parse(parts[kind], _OfficeXml(lines, package.relations(parts[kind]), levels))


def _levels_of_styles(package: _Package, name: str) -> dict[str, int]:
    """The levels of the styles of headings, by id: programs translate the ids, but not the
    names."""
    levels: dict[str, int] = {}
    style = ""
    for tag, given in package.elements(name):
        if tag == "style":
            style = given.get("styleId", "")
        elif tag == "name":
            match = _HEADING.fullmatch(given.get("val", ""))
            if match is not None:
                levels[style] = min(int(match[1] or 1), 6)
    return levels


def _write_slides(package: _Package, main: str, lines: TextWriter) -> None:
    keys = [given.get("r:id", "") for tag, given in package.elements(main) if tag == "sldId"]
    slides = package.relations(main)
    for number, key in enumerate(keys, 1):
        lines.slide(number)
        if key not in slides or lines.kept.full:
            continue
        relations = package.relations(slides[key].target)
        package.parse(slides[key].target, _OfficeXml(lines, relations, {}))
        for relation in relations.values():
            if relation.kind == "notesSlide":
                lines.end()
                lines.mark = "Notes: "
                package.parse(relation.target, _OfficeXml(lines, {}, {}))


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


class _Prose(_Elements):
    """Writes paragraphs and tables. Each format has its names for a table, a row, a cell and what
    is left out."""

    table, row, cell = "table", "table-row", "table-cell"
    left_out: Container[str] = ("tracked-changes", "note-citation")

    def __init__(self, lines: TextWriter) -> None:
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
                self._lines.add(CELL)
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
        self, lines: TextWriter, relations: Mapping[str, Relation], levels: Mapping[str, int]
    ) -> None:
        super().__init__(lines)
        self._relations, self._levels = relations, levels
        self._is_text = self._is_muted = False

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        lines = self._lines
        match tag:
            case "t":
                self._is_text = True
            case "tab":
                lines.add("\t")
            case "br" | "cr":
                self._break()
            case "ph":
                self._is_muted = given.get("type") in _FURNITURE
                self._heading(given.get("type") in ("title", "ctrTitle"))
            case "pStyle":
                self._heading(self._levels.get(given.get("val", ""), 0))
            case "ilvl":
                lines.mark = lines.mark or "  " * _depth(given.get("val", "")) + "- "
            case "hyperlink" | "hlinkClick":
                self._link(given.get("r:id", ""))
            case "footnoteReference" | "endnoteReference":
                lines.add(f"[^{given.get('id', '')}]")
            case "footnote" | "endnote":
                lines.mark = f"[^{given.get('id', '')}] "
            case "comment":
                lines.mark = f"- {given.get('author', '')[:100]}: "

    def _finish(self, tag: str) -> None:
        lines = self._lines
        if tag == "t":
            self._is_text = False
        elif tag in ("hyperlink", "fld") or (tag == "r" and not self._levels):
            lines.link("")
        elif tag == "p":
            self._break()
            if not lines.mark.startswith("[^"):
                lines.mark = ""
        elif tag == "sp":
            self._is_muted = False

    def _link(self, key: str) -> None:
        to = self._relations.get(key)
        self._lines.link(to.target if to is not None and to.kind == "hyperlink" else "")

    def data(self, text: str) -> None:
        if self._is_text and not self._is_muted:
            self._lines.add(text)


class _OpenDocument(_Prose):
    """Writes the paragraphs, lists, tables and slides of an OpenDocument file."""

    def __init__(self, lines: TextWriter) -> None:
        super().__init__(lines)
        self._paragraphs = self._lists = self._notes = self._slides = 0

    def _begin(self, tag: str, given: Mapping[str, str]) -> None:
        lines = self._lines
        match tag:
            case "p":
                self._paragraphs += 1
            case "h":
                self._paragraphs += 1
                self._heading(min(max(1, _depth(given.get("outline-level", ""))), 6))
            case "s":
                lines.add(" ")
            case "tab":
                lines.add("\t")
            case "line-break":
                self._break(is_inside=self._notes > 0)
            case "a":
                lines.link(given.get("href", ""))
            case "list":
                self._lists += 1
            case "list-item":
                lines.mark = "  " * min(self._lists - 1, 8) + "- "
            case "note-body" | "annotation":
                self._notes += 1
                lines.add(" (note: ")
            case "page":
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


def _depth(written: str) -> int:
    return int(written) if written in _DEPTHS else 0
