"""Previews: content of any size in a few characters, for a model that decides whether to read on.

Pure functions: the same bytes, media type and limit always make the same preview. Every preview states exactly how
much of the content it shows, and which counts cover only the two ends of large content.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Final

from coatcheck import media
from coatcheck.redaction import MARK, is_suspect, mask

from . import binaries, json_text, logs, outlines, tables
from .excerpts import EDGE, EMPTY, Excerpt, Preview, Sample, decode, ends, is_clean, looks_binary, some, whole

__all__ = ["EDGE", "LEAST", "Preview", "Sample", "preview"]

LEAST: Final = 20
"""Minimum limit for a preview with any text."""

_LANGUAGES: Final = {"text/javascript": "javascript", "application/sql": "sql"}
_NO_CODE: Final = frozenset({"text/x-rst", "text/x-diff", "text/x-log"})
_RUN: Final = "".join((string.ascii_letters, string.digits, "_.+/=~-"))
_BINARY: Final = ("image/", "audio/", "video/", "font/")
_PACKED: Final = frozenset(
    {"application/pdf", "application/zip", "application/gzip", "application/zstd", "application/x-elf", media.BINARY,
     "application/vnd.apache.parquet", "application/vnd.sqlite3"}
)  # fmt: skip


def preview(content: Sample, *, media_type: str, limit: int = 200) -> Preview:
    """Return a preview of at most `limit` characters. Below `LEAST` it has no text, only `shown`."""
    if limit < LEAST:
        return Preview("", f"nothing of {content.size} bytes")
    if content.size == 0:
        return EMPTY
    essence = media_type.partition(";")[0].strip().lower()
    if essence in _PACKED or (essence.startswith(_BINARY) and not essence.endswith("+xml")):
        return binaries.binary(content, essence, limit)
    text = decode(content)
    if looks_binary(text) or not (media.is_text(essence) or _is_plain(content, text)):
        return binaries.binary(content, essence, limit)
    text, secrets = _masked(text)
    found = whole(text, limit) or _of_text(text, essence, limit)
    found = found if len(found.text) <= limit else ends(text, limit)
    return Preview(found.text, f"{found.shown}; counted with {some(secrets, 'secret')} masked") if secrets else found


def _masked(text: Excerpt) -> tuple[Excerpt, int]:
    """Mask secrets and count them. A token at a cut is removed, since it may be part of a secret."""
    head, tail = text.head, text.tail
    if is_suspect(f"{head}\n{tail}"):
        head, tail = mask(head), mask(tail)
    secrets = max(0, head.count(MARK) + tail.count(MARK) - text.head.count(MARK) - text.tail.count(MARK))
    if not text.is_whole:
        head, tail = head.removesuffix(_last_run(head)), tail.removeprefix(_last_run(tail[:256][::-1])[::-1])
    if text.is_whole and not secrets:
        return text, 0
    return replace(text, head=head, tail=tail, is_exact=text.is_exact and not secrets), secrets


def _last_run(text: str) -> str:
    """The characters at the end of the text that may belong to a cut token."""
    end = text[-256:]
    return end[len(end.rstrip(_RUN)) :]


def _is_plain(content: Sample, text: Excerpt) -> bool:
    """Whether content of an unknown type is text."""
    return is_clean(text) and media.is_text(media.sniff_bytes(content.head[: media.HEAD], b""))


def _of_text(text: Excerpt, essence: str, limit: int) -> Preview:
    if essence == media.JSON or essence.endswith("+json"):
        return json_text.json_document(text, limit)
    if essence in (media.JSONL, "application/jsonl", "application/x-jsonlines"):
        return json_text.json_lines(text, limit)
    if essence == "text/csv":
        return tables.table(text, limit)
    if essence == "text/tab-separated-values":
        return tables.table(text, limit, separator="\t")
    if essence in ("text/html", "application/xhtml+xml"):
        return outlines.page(text, limit)
    if essence.endswith(("/xml", "+xml")):
        return outlines.tree(text, limit)
    if essence == "text/markdown":
        return outlines.markdown(text, limit)
    if essence == "text/x-rst":
        return outlines.restructured(text, limit)
    if essence == "text/x-diff":
        return outlines.diff(text, limit)
    if essence in _LANGUAGES or (essence.startswith("text/x-") and essence not in _NO_CODE):
        return outlines.code(text, limit, language=_LANGUAGES.get(essence, essence.removeprefix("text/x-")))
    return _of_plain(text, limit)


def _of_plain(text: Excerpt, limit: int) -> Preview:
    """Preview of text without a known media type: by what it looks like, else its ends."""
    numbered = outlines.unnumber(text)
    if numbered is not None:
        body, start = numbered
        if (code := outlines.unnamed_code(text, limit, body=body, start=start)) is not None:
            return code
        if outlines.looks_like_markdown(body):
            return outlines.markdown(text, limit, body=body)
    if "\ndiff --git " in text.head or text.head.startswith("diff --git "):
        return outlines.diff(text, limit)
    if logs.looks_like(text):
        return logs.log(text, limit)
    if (separator := tables.looks_like(text)) is not None:
        return tables.table(text, limit, separator=separator)
    if (code := outlines.unnamed_code(text, limit)) is not None:
        return code
    return outlines.markdown(text, limit) if outlines.looks_like_markdown(text.head) else logs.output(text, limit)
