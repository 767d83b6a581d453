"""Previews: content of any size in a few characters, for a model that decides whether and what to read.

Pure functions: the same bytes, media type and limit always make the same preview. Every preview states exactly how
much of the content it shows, and names the first read that a careful engineer would make.

A kind of content is one row of a table: `KINDS` for text without a known media type, `_BY_TYPE` for media types. To
add one, write a form (`excerpts.Form`) in the module of its family and a row for it.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Final

from coatcheck import media
from coatcheck.redaction import MARK, QuickPattern, is_suspect, mask

from . import consoles, reports, webpages
from .binaries import binary, is_binary, looks_binary, odd_characters
from .excerpts import EDGE, EMPTY, SCANNED, Excerpt, Kind, Preview, Sample, decode, ends, some, whole
from .json_text import broken_json, json_document, json_lines, python_rows
from .listings import log, looks_like_log, output, separator_of, table
from .outlines import (
    begins_as_markdown,
    code,
    diff,
    history,
    looks_like_markdown,
    markdown,
    numbered,
    numbered_diff,
    restructured,
    short_history,
    tree,
)

__all__ = ["EDGE", "LEAST", "SCANNED", "Preview", "Sample", "preview"]

LEAST: Final = 20
"""Minimum limit for a preview with any text."""

_RUN: Final = "".join((string.ascii_letters, string.digits, "_.+/=~-"))


def preview(
    content: Sample, *, media_type: str, limit: int = 200, text: Excerpt | None = None, grows: bool = False
) -> Preview:
    """Return a preview of at most `limit` characters. Below `LEAST` it has no text, only `shown`. `text` is the decoded
    content, if it is known. If `grows`, some kinds of content get more characters, as `Kind.percent` says."""
    if limit < LEAST:
        return Preview("", f"nothing of {content.size} bytes")
    if content.size == 0:
        return EMPTY
    essence = media_type.partition(";")[0].strip().lower()
    is_never_text = not essence.startswith("text/") and is_binary(essence)
    text = None if is_never_text else text or decode(content)
    if text is None or not _is_text(content, essence):
        return binary(content, essence, limit)
    text, secrets = _masked(text)
    found = (whole(text, limit) if text.is_whole else None) or _fitting(text, essence, limit, grows=grows)
    found = found or ends(text, limit)
    if MARK in found.ask:
        found = replace(found, ask="", part="")
    if is_suspect(f"{found.text}\n{found.ask}"):
        is_safe = not is_suspect(found.ask)
        found = Preview(mask(found.text), found.shown, *((found.ask, found.part) if is_safe else ()))
    return replace(found, shown=f"{found.shown}; counted with {some(secrets, 'secret')} masked") if secrets else found


def _is_text(content: Sample, essence: str) -> bool:
    """Whether content is text. That of an unknown type must look like text, without a control or invalid character."""
    if looks_binary(content.head):
        return False
    if essence.startswith("text/") or media.is_text(essence):
        return True
    return not any(odd_characters(content.head)) and media.is_text(media.sniff_bytes(content.head[: media.HEAD], b""))


def _masked(text: Excerpt) -> tuple[Excerpt, int]:
    """Mask secrets and count them. A token at a cut is removed, since it may be part of a secret."""
    head, tail = text.head, text.tail
    if is_suspect(f"{head}\n{tail}"):
        head, tail = mask(head), mask(tail)
    secrets = max(0, head.count(MARK) + tail.count(MARK) - text.head.count(MARK) - text.tail.count(MARK))
    if text.is_whole and not secrets:
        return text, 0
    if not text.is_whole:
        head = head[:-256] + head[-256:].rstrip(_RUN)
        tail = tail[:256].lstrip(_RUN) + tail[256:]
    return replace(text, head=head, tail=tail, is_exact=text.is_exact and not secrets), secrets


def _fitting(text: Excerpt, essence: str, limit: int, *, grows: bool) -> Preview | None:
    """Preview of text by the first kind whose form it has; None if there is none."""
    for kind in _kinds(text, essence):
        room = limit * kind.percent // 100 if grows else limit
        found = kind.form(text, room)
        if found is not None and len(found.text) <= room:
            return found
    return None


def _kinds(text: Excerpt, essence: str) -> Iterator[Kind]:
    """The kinds that a text of a media type may be of."""
    if essence in _BY_TYPE:
        yield _BY_TYPE[essence]
    elif essence.endswith("+json"):
        yield _BY_TYPE[media.JSON]
    elif essence.endswith(("/xml", "+xml")):
        yield Kind("XML", (), tree)
    elif essence.startswith("text/x-") and essence != "text/x-log":
        yield Kind("code", (), partial(code, language=essence.removeprefix("text/x-")), 125)
    else:
        near = f"{text.head}\n{text.tail}"
        has_cue = _cues()(near)
        yield from (kind for kind in KINDS if not kind.cues or (has_cue and any(cue in near for cue in kind.cues)))


def _table(text: Excerpt, limit: int) -> Preview | None:
    separator = separator_of(text)
    found = None if separator is None else table(text, limit, separator=separator)
    return found and replace(found, ask='lines="1:30"')  # SQL is for content that is known to be a table


def _rows(text: Excerpt, limit: int) -> Preview | None:
    found = python_rows(text, limit)
    return replace(found, ask="") if found and found.ask.startswith("query=") else found


def _log(text: Excerpt, limit: int) -> Preview | None:
    return log(text, limit) if looks_like_log(text) else None


def _document(text: Excerpt, limit: int) -> Preview | None:
    return markdown(text, limit) if begins_as_markdown(text) else None


def _markdown(text: Excerpt, limit: int) -> Preview | None:
    return markdown(text, limit) if looks_like_markdown(text.head) else None


KINDS: Final[tuple[Kind, ...]] = (
    Kind("numbered lines", (), numbered, 125),
    Kind("numbered diff", (), numbered_diff),
    Kind("document", ("#",), _document, 125),
    Kind("broken JSON", ('"',), broken_json, 125),
    Kind("Python rows", ("[(", "[{'"), _rows, 125),
    *webpages.KINDS,
    Kind("diff", ("diff --git ", "\n+++ "), diff),
    Kind("git log", ("commit ",), history, 130),
    Kind("git log --oneline", (), short_history),
    *reports.KINDS,
    Kind("log", (), _log, 125),
    Kind("locations", (), consoles.locations, 125),
    Kind("separated values", (), _table),
    *consoles.KINDS,
    Kind("code", (), code, 125),
    Kind("markdown", (), _markdown, 125),
    Kind("YAML", (), consoles.yaml, 125),
    Kind("output", (), output),
)
"""The kinds of text without a known media type, in the order in which they are tried."""


@cache
def _cues() -> QuickPattern:
    """A quick check whether a text has any cue at all."""
    cues = {cue for kind in KINDS for cue in kind.cues}
    return QuickPattern("|".join("".join(f"\\x{byte:02x}" for byte in cue.encode()) for cue in sorted(cues)))


_JSON_LINES: Final = Kind("JSON lines", (), json_lines, 150)
_HTML: Final = Kind("HTML", (), webpages.page, 130)
_BY_TYPE: Final[dict[str, Kind]] = {
    media.JSON: Kind("JSON", (), json_document), media.JSONL: _JSON_LINES, "application/jsonl": _JSON_LINES,
    "application/x-jsonlines": _JSON_LINES, "text/csv": Kind("CSV", (), table),
    "text/tab-separated-values": Kind("TSV", (), partial(table, separator="\t")), "text/html": _HTML,
    "application/xhtml+xml": _HTML, "text/markdown": Kind("Markdown", (), markdown, 125),
    "text/x-rst": Kind("reStructuredText", (), restructured, 125), "text/x-diff": Kind("diff", (), diff),
    "text/x-python-repr": Kind("Python rows", (), python_rows, 125),
    "application/yaml": Kind("YAML", (), consoles.yaml, 125),
    "text/javascript": Kind("JavaScript", (), partial(code, language="javascript"), 125),
    "application/sql": Kind("SQL", (), partial(code, language="sql"), 125),
}  # fmt: skip
"""The kinds of text with a known media type."""
