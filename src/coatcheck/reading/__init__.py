"""Look inside an artifact one bounded page at a time: `read` is the entry, one module per kind of
request.

A result that is too large for a page becomes an artifact of its own, with its parents and the
request on record, and the page points to it. The session notes which bytes of an artifact were
shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.ids import clip, digest_of, is_pointer, parse_pointer
from coatcheck.media import JSON, is_json, is_jsonl, is_text, look, sniff_text
from coatcheck.reading.page import Page, QueryResult, Request, misfit, seal, unseal
from coatcheck.reading.text import (
    HEAD,
    DecodedText,
    Form,
    by_chars,
    by_lines,
    recognized,
    sample_of,
)
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.truncation import EDGE, Truncation, truncation_of

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession
    from coatcheck.previews import Preview

__all__ = ["Page", "Request", "Source", "preview_of", "read", "read_text", "sample_of", "source_of"]

TOOL: Final = "read"
_HEAD: Final = 4_096
_SHAPE: Final = "shape"
_AS_TEXT: Final = (
    "pdf",
    "office",
    "sheets",
)  # documents that are sliced, searched and compared as their text
_NO_TABLE: Final = lazy_pattern(r"there is no table ['\"](.{1,80})['\"]$")
_OTHER_TABLES: Final = 4


class Source(NamedTuple):
    """What is read: the content of an artifact or of a part of it, and its pointer."""

    content: Content
    pointer: str


def read(
    session: CoreSession, target: Ref | str | Source, request: Request, cursor: str | None = None
) -> Page:
    """Return the requested page, or the next one after a cursor. Raises what opening the artifact
    raises.

    To open an artifact once and read several pages, pass a `source_of` in a `with` block of its
    content."""
    source, position = target if isinstance(target, Source) else source_of(session, target), None
    with source.content as content:
        if cursor is not None:
            request, position = unseal(
                session.store.secret, content.ref.artifact_id, cursor, request
            )
        if request.query is not None:
            found: Page | QueryResult = _query(session, content, request)
        elif request.diff is not None:
            with source_of(session, request.diff).content as other:
                found = _diff(other, content)
        else:
            found = _slice(session, *recognized(content), source.pointer, request, position)
        if isinstance(found, QueryResult):
            found = _fit(session, source, request, found)
        elif found.spans and "#" not in source.pointer:
            session.note_shown(content.ref, found.spans)
        cut = truncation_in(content)
        return found if cut is None else replace(found, cut=str(cut))


def truncation_in(content: Content) -> Truncation | None:
    """What was cut out of an artifact before it came here: a page of it is not a page of the whole
    result."""
    if not is_text(content.ref.media_type):
        return None
    head = content.read(0, EDGE)
    tail = content.read(max(len(head), content.size - EDGE), EDGE)
    return truncation_of(head, tail, content.size, lambda: content.read(0, content.size))


def _diff(old: Content, new: Content) -> QueryResult:
    """Compare two texts. A document is compared as its text, if that can be read."""
    from coatcheck.reading import documents, heavy  # here and below: most reads need neither

    notes, texts = [], []
    for content in (old, new):
        text, form = recognized(content)
        if form in _AS_TEXT:
            with suppress(CoatcheckError):
                text, about = documents.as_text(text, form, is_searched=False)
                notes.append(f"{content.ref.pointer}: {about.removeprefix('of ')}")
        texts.append(text)
    result = heavy.diff(*texts)
    return replace(result, note="; ".join(filter(None, (*notes, result.note))))


def _slice(
    session: CoreSession,
    content: Content,
    form: Form,
    pointer: str,
    request: Request,
    position: tuple[int, ...] | None,
) -> Page | QueryResult:
    """A page of a text or of the text of a document, or the description of binary content."""
    is_slice = request.lines or request.chars or request.grep

    def paged(text: Content, position: tuple[int, ...] | None) -> Page:
        return read_text(
            text, request, pointer, key=lambda: session.store.secret, position=position
        )

    def paged_text() -> Page:
        from coatcheck.reading import documents

        text, note = documents.as_text(content, form, is_searched=request.grep is not None)
        page = paged(text, position)
        return replace(page, shown=f"{page.shown}, {note}", spans=())

    if (is_slice and form in _AS_TEXT) or (form == "sheets" and _has_sheets()):
        return paged_text()
    if form not in ("text", "page") and (not is_slice or look(content.read(0, HEAD)).is_binary):
        from coatcheck.reading.descriptions import describe

        described = describe(content, max_chars=request.max_chars)
        return (
            replace(described, note="binary content has no lines to read or search")
            if is_slice
            else described
        )
    if form != "page" or request.grep is None or request.invert or request.lines:
        return paged(content, position)
    page = paged(content, None)
    if page.matches or not page.matches_exact:
        return page if position is None else paged(content, position)
    in_text = paged_text()
    return (
        replace(in_text, shown=f"no match in the source, {in_text.shown}")
        if in_text.matches
        else page
    )


def _has_sheets() -> bool:
    from coatcheck.reading import sheets

    return sheets.pool.is_installed


def read_text(
    content: Content,
    request: Request,
    pointer: str,
    *,
    key: Callable[[], bytes],
    position: tuple[int, ...] | None = None,
) -> Page:
    """Return a page of the artifact's text: lines, characters, a grep, or all of it.

    `pointer` is the artifact's pointer, for the page. `position` comes with the request from
    `unseal`. The key signs the cursor of the next page, if there is one."""
    if request.query is not None or request.diff is not None:
        raise InvalidArgument("a query or a diff cannot be read as text", hint="use lines or grep")
    spans: tuple[tuple[int, int], ...] = ()
    if request.grep is not None:
        from coatcheck.reading import heavy

        draft = heavy.search(content, request, position, pointer.partition("#")[2])
    else:
        text = DecodedText(content, exact=request.exact)
        if request.chars is not None:
            draft = by_chars(text, request.chars, request.max_chars, position)
        else:
            draft = by_lines(text, request.lines, request.max_chars, position)
        spans = tuple(text.bytes_of(*span) for span in draft.spans)
    artifact_id = content.ref.artifact_id
    cursor = None if draft.position is None else seal(key(), artifact_id, request, draft.position)
    first, last = draft.lines or (None, None)
    return Page(draft.text, draft.shown, pointer, cursor, None, draft.matches, draft.matches_exact,
                spans, first=first, last=last, total=draft.total, hits=draft.hits)  # fmt: skip


def preview_of(content: Content, *, limit: int) -> Preview:
    """Preview a stored artifact. The same content has the same preview, however it is stored."""
    from coatcheck.previews import preview

    with content:
        return preview(sample_of(content), media_type=content.ref.media_type, limit=limit)


def source_of(session: CoreSession, target: Ref | str) -> Source:
    """Return what a target names. A part of a JSON artifact is a content of its own."""
    content = session.content(target)
    if (
        isinstance(target, Ref)
        or not is_pointer(target)
        or not (fragment := parse_pointer(target).fragment)
    ):
        return Source(content, content.ref.pointer)
    data, media_type = session.part(content, fragment), JSON
    if data.startswith(b'"'):  # a string is read as plain text
        from coatcheck.values import encode_text

        text = json.loads(data)
        data, media_type = encode_text(text), sniff_text(text[:_HEAD], text[-_HEAD:], None, text)
    part = replace(
        content.ref, artifact_id=digest_of(data), size_bytes=len(data), media_type=media_type
    )
    return Source(Content.of(part, data), f"{content.ref.pointer}#{fragment}")


def _query(session: CoreSession, content: Content, request: Request) -> QueryResult:
    from coatcheck.reading import documents, heavy, sql

    query = (request.query or "").strip()
    if query.lower() == _SHAPE:
        return heavy.shape(content, max_chars=request.max_chars)
    if (found := documents.text_query(content, query)) is not None:
        return found
    if query.startswith("$"):
        return _found(content, query)
    if sql.is_sql(query):
        return sql.query(session, content, query)
    media_type = content.ref.media_type
    if is_json(media_type) or is_jsonl(media_type):
        path, there = heavy.nearest(content, query)
        if path or there:
            text, hint = f"{clip(query)} is not a JSONPath", f"write {path}" if path else there
            raise (
                misfit(text, hint=hint, instead={"query": path})
                if path
                else InvalidArgument(text, hint=hint)
            )
    words = {"grep": query, "literal": True, "ignore_case": True}
    raise misfit(f"unknown query: {clip(query)}", hint=_queries(), instead=words)


def _queries() -> str:
    """What a query may be, given what is installed."""
    from coatcheck.reading import pdf, sql

    kinds = ['"text"', '"shape"', 'a JSONPath like "$.items[0]"']
    kinds += ['DuckDB SQL like "SELECT * FROM artifact"'] * sql.pool.is_installed
    kinds += ['"page 3" of a PDF'] * pdf.pool.is_installed
    return f"a query is {', '.join(kinds[:-1])} or {kinds[-1]}"


def _found(content: Content, path: str) -> QueryResult:
    """The values that a JSONPath selects. If there are none, the note says which path has some."""
    from coatcheck.reading import heavy
    from coatcheck.reading.json_content import NOTHING

    try:
        result = heavy.find(content, path)
    except InvalidArgument as error:
        nearest, _ = heavy.nearest(content, path)
        if not nearest:
            raise
        raise misfit(error.message, hint=f"write {nearest}", instead={"query": nearest}) from error
    if result.text or not result.shown.startswith("0 "):
        return result
    nearest, there = heavy.nearest(content, path)
    if nearest == path or not (nearest or there):
        return result
    note = f"nothing matches, but {nearest} does" if nearest else f"nothing matches: {there}"
    return replace(result, note=result.note.replace(NOTHING, note), instead=nearest)


def _fit(session: CoreSession, source: Source, request: Request, result: QueryResult) -> Page:
    """Make a page of a result: all of it, or its beginning and the pointer of an artifact with all
    of it."""
    shown = "; ".join(filter(None, (result.shown, result.note)))
    if len(result.text) <= request.max_chars:
        return Page(result.text, shown, source.pointer, None, instead=result.instead or None)
    from coatcheck.intake import About

    asked = {
        name: getattr(request, name)
        for name in ("query", "diff")
        if getattr(request, name) is not None
    }
    ref = session.put_about(
        result.text,
        About(
            tool=TOOL,
            media_type=result.media_type,
            summary=clip(next(iter(asked.values()), ""), 200)
            + f" of {source.pointer}: {result.shown}"[:250],
            parents=(source.content.ref.artifact_id,),
            request=mask(json.dumps({**asked, "max_chars": request.max_chars}, ensure_ascii=False)),
        ),
    )
    with session.content(ref) as whole:
        first = read_text(
            whole,
            Request(max_chars=request.max_chars),
            ref.pointer,
            key=lambda: session.store.secret,
        )
    session.note_shown(ref, first.spans)
    shown = f"{shown}; {first.shown} of the result, the full result is {ref.pointer}"
    return Page(first.text, shown, source.pointer, None, ref.pointer)
