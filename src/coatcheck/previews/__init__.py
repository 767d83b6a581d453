"""Previews: what content of any size looks like, in a few characters, for a model that decides whether to read on.

Pure: the same bytes, media type and limit make the same preview, always. Every preview is exact about what is shown of
how much, and says what it could not know from the two ends of large content.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Final

from coatcheck import media
from coatcheck.redaction import MARK, is_suspect, mask

from . import binaries, logs, outlines, records, tables
from .sample import EDGE, Preview, Sample, Text, decode, is_clean, looks_binary
from .text import EMPTY, ends, some, whole

__all__ = ["EDGE", "LEAST", "Preview", "Sample", "preview"]

LEAST: Final = 20
"""Fewer characters than this hold no preview."""

_LANGUAGES: Final = {"text/javascript": "javascript", "application/sql": "sql"}
_NO_CODE: Final = frozenset({"text/x-rst", "text/x-diff", "text/x-log"})
_RUN: Final = "".join((string.ascii_letters, string.digits, "_.+/=~-"))
_BINARY: Final = ("image/", "audio/", "video/", "font/")
_PACKED: Final = frozenset(
    {"application/pdf", "application/zip", "application/gzip", "application/zstd", "application/x-elf", media.BINARY,
     "application/vnd.apache.parquet", "application/vnd.sqlite3"}
)  # fmt: skip


def preview(content: Sample, *, media_type: str, limit: int = 200) -> Preview:
    """A preview in at most `limit` characters. Below `LEAST`, no text at all: `shown` still says how much there is."""
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


def _masked(text: Text) -> tuple[Text, int]:
    """The text without secrets, and how many there were. What a cut may have left of one goes too."""
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
    """What a token at the end of the text could have left there."""
    end = text[-256:]
    return end[len(end.rstrip(_RUN)) :]


def _is_plain(content: Sample, text: Text) -> bool:
    """Whether content of a type that we do not know is text all the same."""
    return is_clean(text) and media.is_text(media.sniff_bytes(content.head[: media.HEAD], b""))


def _of_text(text: Text, essence: str, limit: int) -> Preview:
    if essence == media.JSON or essence.endswith("+json"):
        return records.json_document(text, limit)
    if essence in (media.JSONL, "application/jsonl", "application/x-jsonlines"):
        return records.json_lines(text, limit)
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


def _of_plain(text: Text, limit: int) -> Preview:
    """Text that nobody named: what it looks like, else its ends."""
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
