"""Previews: content of any size in a few characters, for a model that decides whether to read on.

Pure functions: the same bytes, media type and limit always make the same preview. Every preview states exactly how
much of the content it shows, and which counts cover only the two ends of large content.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from coatcheck import media
from coatcheck.redaction import MARK, is_suspect, mask

from .binaries import binary, is_binary
from .excerpts import EDGE, EMPTY, Excerpt, Preview, Sample, decode, ends, some, whole
from .json_text import json_document, json_lines
from .listings import log, looks_like_log, output, separator_of, table
from .outlines import code, diff, looks_like_markdown, markdown, page, restructured, tree, unnumber

__all__ = ["EDGE", "LEAST", "Preview", "Sample", "preview"]

LEAST: Final = 20
"""Minimum limit for a preview with any text."""

Form = Callable[[Excerpt, int], Preview | None]
_RUN: Final = "".join((string.ascii_letters, string.digits, "_.+/=~-"))
_CONTROL: Final = bytes([*range(7), *range(0x0E, 0x1B), *range(0x1C, 0x20)])
_LOOK: Final = 4_096


def preview(content: Sample, *, media_type: str, limit: int = 200, text: Excerpt | None = None) -> Preview:
    """Return a preview of at most `limit` characters. Below `LEAST` it has no text, only `shown`. `text` is the decoded
    content, if it is known."""
    if limit < LEAST:
        return Preview("", f"nothing of {content.size} bytes")
    if content.size == 0:
        return EMPTY
    essence = media_type.partition(";")[0].strip().lower()
    is_never_text = not essence.startswith("text/") and is_binary(essence)
    text = None if is_never_text else text or decode(content)
    if text is None or not _is_text(text, content, essence):
        return binary(content, essence, limit)
    text, secrets = _masked(text)
    found = (whole(text, limit) if text.is_whole else None) or _form(essence)(text, limit)
    if found is None or len(found.text) > limit:
        found = ends(text, limit)
    return Preview(found.text, f"{found.shown}; counted with {some(secrets, 'secret')} masked") if secrets else found


def _is_text(text: Excerpt, content: Sample, essence: str) -> bool:
    """Whether content is text. In binary data, one in ten characters is a control character, or one in three invalid.
    Content of an unknown type must look like text and have none of them."""
    look = text.head[:_LOOK]
    data = look.encode("utf-8", "surrogatepass")
    controls, invalid = len(data) - len(data.translate(None, _CONTROL)), look.count("\ufffd")
    if controls * 10 > len(look) or invalid * 3 > len(look):
        return False
    if essence.startswith("text/") or media.is_text(essence):
        return True
    return not controls and not invalid and media.is_text(media.sniff_bytes(content.head[: media.HEAD], b""))


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


def _form(essence: str) -> Form:
    """Return the function that previews text of a media type, or returns None for text that has not its form."""
    if essence in _FORMS:
        return _FORMS[essence]
    if essence.endswith("+json"):
        return json_document
    if essence.endswith(("/xml", "+xml")):
        return tree
    return partial(code, language=essence.removeprefix("text/x-")) if essence.startswith("text/x-") else _plain


def _plain(text: Excerpt, limit: int) -> Preview | None:
    """Preview of text without a known media type, by what it looks like."""
    numbered = unnumber(text)
    if numbered is not None:
        body, start = numbered
        if (found := code(text, limit, body=body, start=start)) is not None:
            return found
        if looks_like_markdown(body):
            return markdown(text, limit, body=body)
    if "\ndiff --git " in text.head or text.head.startswith("diff --git "):
        return diff(text, limit)
    if looks_like_log(text):
        return log(text, limit)
    if (separator := separator_of(text)) is not None:
        return table(text, limit, separator=separator)
    if (found := code(text, limit)) is not None:
        return found
    return markdown(text, limit) if looks_like_markdown(text.head) else output(text, limit)


_FORMS: Final[dict[str, Form]] = {
    media.JSON: json_document, media.JSONL: json_lines, "application/jsonl": json_lines,
    "application/x-jsonlines": json_lines, "text/csv": table,
    "text/tab-separated-values": partial(table, separator="\t"), "text/html": page, "application/xhtml+xml": page,
    "text/markdown": markdown, "text/x-rst": restructured, "text/x-diff": diff, "text/x-log": _plain,
    "text/javascript": partial(code, language="javascript"), "application/sql": partial(code, language="sql"),
}  # fmt: skip
