"""`read`: one request on one artifact of a session, answered by a page.

It finds the content, goes on from a cursor, and asks whichever part of this package answers such a request. A result
that is too large for a page is put as an artifact of its own, with its parents and the request on record, and the page
points at it. Which bytes of an artifact were shown is noted for the session.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from coatcheck.errors import InvalidArgument
from coatcheck.ids import SCHEME, clip, digest_of, parse_pointer
from coatcheck.intake import About
from coatcheck.media import JSON, is_text
from coatcheck.previews import EDGE, Preview, Sample, preview
from coatcheck.reading import cursors, read_text
from coatcheck.reading.answer import Answer
from coatcheck.reading.describe import describe
from coatcheck.reading.diff import diff
from coatcheck.reading.page import Page, Request
from coatcheck.reading.pdf import pages_in, pdf_text
from coatcheck.reading.shape import shape
from coatcheck.reading.sql import TABLE, is_sql, pointers_in, run_sql
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.scope import Scope
from coatcheck.storage.frames import line_counts
from coatcheck.store import Store
from coatcheck.streams import Content

TOOL: Final = "read"
_SHAPE: Final = "shape"
_PDF: Final = "application/pdf"
_QUERIES: Final = (
    'a query is "shape", a JSONPath like "$.items[0]", SQL like "SELECT * FROM artifact", or "page 3" of a PDF'
)


def read(store: Store, scope: Scope, target: Ref | str, request: Request, cursor: str | None = None) -> Page:
    """A page of what the request asks for, or the next one after a cursor. Raises what opening the artifact raises."""
    content, named = _content(store, scope, target)
    key, position = store.secret, None
    if cursor is not None:
        request, position = cursors.unseal(key, content.ref.artifact_id, cursor, request)
    if request.query is not None:
        page = _fit(store, scope, content, request, _query(store, scope, content, request))
    elif request.diff is not None:
        page = _fit(store, scope, content, request, diff(_content(store, scope, request.diff)[0], content))
    elif not is_text(content.ref.media_type) and request == Request(max_chars=request.max_chars):
        page = _fit(store, scope, content, request, describe(content, max_chars=request.max_chars))
    else:
        page = read_text(content, request, key=key, position=position)
        if named == content.ref.pointer:
            store.note_shown(scope, content.ref, page.spans)
    return replace(page, pointer=named)


def preview_of(content: Content, *, limit: int) -> Preview:
    """The preview of a stored artifact: the same for the same content, wherever and however it is stored."""
    return preview(sample_of(content), media_type=content.ref.media_type, limit=limit)


def sample_of(content: Content) -> Sample:
    """The two ends of a stored artifact, with its lines counted: what `Sample.of` makes of the same bytes."""
    size = content.size
    head = content.read(0, EDGE)
    tail = content.read(max(len(head), size - EDGE), EDGE)
    feeds = sum(line_counts(content.frames)) if content.frames else (head + tail).count(b"\n")
    ends = (tail or head)[-1:]
    return Sample(head, tail, size, feeds + (ends not in (b"", b"\n")))


def _content(store: Store, scope: Scope, target: Ref | str) -> tuple[Content, str]:
    """The content that a target names, and the pointer to say for it. A part of a JSON artifact is content too."""
    content = store.content(scope, target)
    if isinstance(target, Ref) or not target.startswith(SCHEME) or not parse_pointer(target).fragment:
        return content, content.ref.pointer
    with store.open(scope, target) as stream:
        data = stream.read()
    part = replace(content.ref, artifact_id=digest_of(data), size_bytes=len(data), media_type=JSON)
    fragment = parse_pointer(target).fragment
    pointer = f"{content.ref.pointer}#{fragment}"
    return Content(part, b"", lambda offset, length: data[offset : offset + length]), pointer


def _query(store: Store, scope: Scope, content: Content, request: Request) -> Answer:
    query = (request.query or "").strip()
    if query.lower() == _SHAPE:
        return shape(content, max_chars=request.max_chars)
    if content.ref.media_type.startswith(_PDF) and (pages := pages_in(query)) is not None:
        return pdf_text(content, *pages)
    if query.startswith("$"):
        from coatcheck.reading import jsonpath  # its library takes a while to load, and few reads need it

        return jsonpath.find(content, query)
    if is_sql(query):
        tables = {TABLE: content}
        tables.update((pointer, store.content(scope, pointer)) for pointer in pointers_in(query))
        return run_sql(query, tables)
    raise InvalidArgument(f"{clip(query)} is no query that can be answered", hint=_QUERIES)


def _fit(store: Store, scope: Scope, content: Content, request: Request, answer: Answer) -> Page:
    """An answer as a page: whole, or its beginning and the pointer of an artifact that holds the whole."""
    shown = "; ".join(filter(None, (answer.shown, answer.note)))
    pointer = content.ref.pointer
    if len(answer.text) <= request.max_chars:
        return Page(answer.text, shown, pointer, None)
    asked = {name: getattr(request, name) for name in ("query", "diff") if getattr(request, name) is not None}
    ref = store.put(
        scope,
        answer.text,
        About(
            tool=TOOL,
            media_type=answer.media_type,
            summary=clip(next(iter(asked.values()), ""), 200) + f" of {pointer}: {answer.shown}"[:250],
            parents=(content.ref.artifact_id,),
            request=mask(json.dumps({**asked, "max_chars": request.max_chars}, ensure_ascii=False)),
        ),
    )
    first = read_text(store.content(scope, ref), Request(max_chars=request.max_chars), key=store.secret)
    store.note_shown(scope, ref, first.spans)
    shown = f"{shown}; {first.shown} of the result, the whole is {ref.pointer}"
    return Page(first.text, shown, pointer, None, ref.pointer)
