"""Looking inside an artifact a bounded page at a time. Pure functions over `Content`: no catalog, no session."""

from __future__ import annotations

from coatcheck.errors import InvalidArgument
from coatcheck.reading import cursors, grep
from coatcheck.reading.decoding import Text
from coatcheck.reading.page import Page, Request
from coatcheck.reading.text import by_chars, by_lines
from coatcheck.streams import Content

__all__ = ["Page", "Request", "read_text"]


def read_text(content: Content, request: Request, *, key: bytes, position: tuple[int, ...] | None = None) -> Page:
    """A page of the artifact's text: lines, characters or a grep, as the request says; all of it where it says nothing.

    `position` comes with the request from `cursors.unseal`. The key seals the cursor of the next page."""
    if request.query is not None or request.diff is not None:
        raise InvalidArgument("a query or a diff does not read text", hint="use lines or grep")
    text = Text(content)
    if request.grep is not None:
        part = grep.search(text, request, position)
    elif request.chars is not None:
        part = by_chars(text, request.chars, request.max_chars, position)
    else:
        part = by_lines(text, request.lines, request.max_chars, position)
    ref = content.ref
    cursor = None if part.position is None else cursors.seal(key, ref.artifact_id, request, part.position)
    spans = () if part.span is None else (text.bytes_of(*part.span),)
    return Page(part.text, part.shown, ref.pointer, cursor, None, part.matches, part.matches_exact, spans)
