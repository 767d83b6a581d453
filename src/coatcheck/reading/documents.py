"""Readable text of documents (`query="text"`): PDF, web pages, and Word, PowerPoint and
OpenDocument files.

Headings are lines with `#`, items begin with `-` or a number, cells of a row are separated by ` |
`, a link is `[text](address)` the first time. Scripts, styles and hidden parts are left out. A PDF
or an office file is sliced and searched as this text, a web page as its source.

Documents are hostile: they are parsed in a child process, no external entity is loaded, and a file
that unpacks to more than the limit is an error. Texts are kept for the next page.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.ids import clip
from coatcheck.media import TEXT, decoded
from coatcheck.previews.excerpts import count
from coatcheck.reading import heavy, pdf, sheets
from coatcheck.reading.office import write_office
from coatcheck.reading.page import MAX_RESULT, QueryResult, TextCache
from coatcheck.reading.text import Form, recognized
from coatcheck.reading.text_writer import TextWriter
from coatcheck.reading.web_pages import write_page

MAX_HTML: Final = 16 << 20
_PART: Final = lazy_pattern(
    r"\s*(?:page|slide)s?\s+(\d{1,7})(?:\s*(?:-|to|:)\s*(\d{1,7}))?\s*", re.IGNORECASE
)
_SLIDE: Final = lazy_pattern(r"^--- slide (\d+) ---$", re.MULTILINE)
_BETWEEN: Final = lazy_pattern(r"^--- (?:page|slide) \d+(?::[^\n]*)? ---$", re.MULTILINE)
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
    return _slides(text_of(content, form), first, last)


def _slides(whole: QueryResult, first: int, last: int) -> QueryResult:
    """A range of the slides in a text."""
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
    end = starts[last] if last < len(starts) else None
    text = whole.text[starts[first - 1] : end].rstrip("\n")
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
    media_type = "text/markdown" if form in ("office", "page") else TEXT  # those have headings
    ref = replace(content.ref, size_bytes=len(data), media_type=media_type)
    return Content.of(ref, data), "; ".join(filter(None, (note, result.note)))


def extract(content: Content, form: Form) -> QueryResult:
    """Extract the text of a web page or an office file. This runs in a child process."""
    lines = TextWriter()
    if form == "page":
        if content.size > MAX_HTML:
            raise TooLarge(
                f"{clip(content.ref.pointer)} has {content.size:,} bytes, the limit is {MAX_HTML:,}"
            )
        write_page(decoded(content.read(0, content.size)), lines)
    else:
        write_office(content, lines)
    lines.end()
    what = "the text of the page" if form == "page" else "the text of the document"
    note = f"only the first {MAX_RESULT:,} characters" if lines.kept.full else ""
    return QueryResult(lines.kept.text, shown=what, note=note)
