"""Previews: content of any size in a few characters, for a model that decides whether and what to
read.

Pure functions: the same bytes, media type and limit always make the same preview. Every preview
states exactly how much of the content it shows, and names the first read that a careful engineer
would make. A `Sample` is cut in the same place wherever the content comes from, so a value in
memory and the same bytes in a store have the same preview.

A kind of content is one row of a table: `KINDS` for text without a known media type, `_BY_TYPE` for
media types. To add one, write a form (`excerpts.Form`) in the module of its family and a row for
it.
"""

from __future__ import annotations

import codecs
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from coatcheck import media
from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import MARK, QuickPattern, is_suspect, mask
from coatcheck.tokens import estimate, roughly
from coatcheck.truncation import Truncation, truncation_of

from . import aligned, code, diffs, documents, findings, keyed, listings, logs, reports, tables
from .binaries import binary, is_binary
from .drafts import Draft, Kind, limited
from .excerpts import EMPTY, PROSE, Excerpt, Preview, ends, folded, some, whole
from .json_text import broken_json, json_document, json_lines
from .reprs import python_rows

__all__ = ["EDGE", "LEAST", "SCANNED", "Facts", "Preview", "Sample", "facts", "preview"]

EDGE: Final = 64 * 1024
"""Bytes of the head and of the tail in a sample. Content up to twice this size is sampled whole."""

SCANNED: Final = 16 << 20
"""Bytes from the beginning of content in which previews count and find lines. Counts of larger
content say "≥"."""

LEAST: Final = 20
"""Minimum limit for a preview with any text."""

_RUN: Final = "".join((string.ascii_letters, string.digits, "_.+/=~-"))
_CONTINUED: Final = bytes(range(0x80, 0xC0))  # of UTF-8: all bytes of a character but the first
MOST_TOKENS: Final = 300
"""Maximum number of tokens of a preview in a stub, with its description and the first read."""

# Bytes of the ends by which a stub's preview finds the kind of content. Figures are from all of it.
_WHOLE: Final = 16 * 1_024
_HEAD: Final = 5 * 1_024
_TAIL: Final = 2 * 1_024
_PART: Final = "the part that arrived: "
_TOKENS: Final = 52  # of a preview, besides one for every two characters of the limit
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """The first and the last bytes of content of `size` bytes. Overlapping bytes are removed from
    the tail.

    `lines` counts the lines, including a last one without a line feed; None if they were not
    counted. `read` returns the first `SCANNED` bytes of the content; without it, they are what the
    sample has."""

    head: bytes
    tail: bytes
    size: int
    lines: int | None = None
    read: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.head) > self.size or len(self.tail) > self.size:
            raise ValueError("a sample cannot be larger than its content")
        overlap = len(self.head) + len(self.tail) - self.size
        if overlap > 0:
            object.__setattr__(self, "tail", self.tail[overlap:])

    @classmethod
    def of(cls, data: bytes, feeds: int | None = None) -> Sample:
        """Return the sample of content in memory, given the number of its line feeds if that is
        known."""
        feeds = data.count(b"\n") if feeds is None else feeds
        lines = feeds + (not data.endswith(b"\n") if data else 0)
        read: Callable[[], bytes] = partial(data.__getitem__, slice(SCANNED))  # type: ignore[assignment]  # overloaded
        return cls(data[:EDGE], data[max(EDGE, len(data) - EDGE) :], len(data), lines, read)

    def shortened(self, head: int, tail: int) -> Sample:
        """Return a sample with less of both ends."""
        end = self.head + self.tail if len(self.tail) < tail else self.tail
        known = self.head + self.tail if self.is_whole else self.head
        return Sample(
            self.head[:head], end[-tail:], self.size, self.lines, self.read or (lambda: known)
        )

    @property
    def is_whole(self) -> bool:
        return len(self.head) + len(self.tail) == self.size


@dataclass(frozen=True, slots=True)
class Facts:
    """The fields of a stub besides its pointer. `lines` and `tokens` are None for binary content.
    `cut` is what was cut out of the content before it came here; then all figures are those of the
    part that arrived."""

    kind: str
    media_type: str
    size_bytes: int
    lines: int | None
    tokens: int | None
    preview: Preview
    summary: str = ""
    cut: Truncation | None = None


def facts(
    sample: Sample,
    media_type: str,
    kind: str,
    limit: int,
    *,
    summary: str = "",
    tokens: float | None = None,
    cut: Truncation | None = None,
) -> Facts:
    """Describe content for a stub. `tokens` is the estimate for head and tail together, if it is
    known. `cut` is what was cut out of it, if the content itself does not say so. The preview has
    at most `MOST_TOKENS` tokens, and no more than `limit` characters of prose."""
    cut = _truncation(sample, media_type) or cut
    lines = total = None
    text = None
    if media_type.startswith("text/") or media.is_text(media_type):
        text = decode(sample.shortened(_HEAD, _TAIL) if sample.size > _WHOLE else sample)
        lines = sample.lines
        if text.look.encoding.name != "UTF-8":
            decoded = decode(sample)
            lines = decoded.lines
            tokens = roughly((decoded.head + decoded.tail).encode("utf-8", "replace"))
        elif tokens is None:
            tokens = roughly(sample.head + sample.tail)
        total = round(tokens * sample.size / max(1, len(sample.head) + len(sample.tail)))
    described = _Described(sample, media_type, text=text, is_part=cut is not None)
    shown = _within_tokens(described, limit)
    return Facts(kind, media_type, sample.size, lines, total, shown, summary, cut)


def _within_tokens(described: _Described, limit: int) -> Preview:
    """The longest preview that has few enough tokens, in at most `limit` characters."""
    most = min(_TOKENS + limit // 2, MOST_TOKENS)
    while True:
        shown = described.at(limit)
        tokens = estimate(_ENCODER.encode(f"{shown.text}{shown.shown}{shown.ask}"))
        if tokens <= most or limit <= LEAST:
            return shown
        used = min(limit, len(shown.text))
        limit = max(LEAST, min(limit - 1, used * most // tokens - 8))


def preview(content: Sample, *, media_type: str, limit: int = 200) -> Preview:
    """Return a preview of at most `limit` characters. Below `LEAST` it has no text, only `shown`,
    which says so if the content was cut before it came here."""
    cut = _truncation(content, media_type)
    found = _Described(content, media_type, is_part=cut is not None).at(limit)
    return found if cut is None else replace(found, shown=f"{found.shown}; {cut}")


def _truncation(content: Sample, media_type: str) -> Truncation | None:
    """What was cut out of content before it came here."""
    if is_binary(media.essence(media_type)):
        return None
    return truncation_of(content.head, content.tail, content.size, content.read)


class _Described:
    """Content that is described once, and shown at any limit. `text` is the decoded content, if it
    is known. If `is_part`, the preview says that it is one of the part that arrived."""

    def __init__(
        self,
        content: Sample,
        media_type: str,
        *,
        text: Excerpt | None = None,
        is_part: bool = False,
    ) -> None:
        self._content = content
        self._essence = media_type.partition(";")[0].strip().lower()
        self._is_part = is_part
        self._drafts: dict[str, Draft | None] = {}
        self._text = self._as_text(text) if content.size else None
        self._secrets = 0
        if self._text is not None:
            self._text, self._secrets = _masked(self._text._replace(is_part=is_part))

    def at(self, limit: int) -> Preview:
        """The preview in at most `limit` characters."""
        if limit < LEAST:
            return Preview("", f"nothing of {self._content.size} bytes")
        if not self._content.size:
            return EMPTY
        if self._text is None:
            return binary(self._content, self._essence, limit)
        if not self._is_part:
            return self._of_text(self._text, limit)
        lead = _PART if limit >= LEAST + len(_PART) else ""
        found = self._of_text(self._text, limit - len(lead))
        return replace(found, text=lead + found.text)

    def _as_text(self, text: Excerpt | None) -> Excerpt | None:
        """The content as text; None if it is binary."""
        is_text = self._essence.startswith("text/")
        if not is_text and is_binary(self._essence):
            return None
        text = text or decode(self._content)
        is_text = is_text or media.is_text(self._essence)
        if text.look.is_binary or not (is_text or _looks_like_text(self._content, text)):
            return None
        return text

    def _of_text(self, text: Excerpt, limit: int) -> Preview:
        """Preview of a text by the first kind whose form it has; its ends if it has none."""
        found = whole(text, limit) if text.is_whole else None
        if found is None:
            found = self._by_kind(text, limit) or ends(text, min(limit, PROSE))
        found = _safe(found)
        notes = ["progress bars are folded"] if text.is_folded else []
        if self._secrets:
            least = "" if text.is_whole else "at least "
            secrets = some(self._secrets, "secret")
            notes.append(f"{least}{secrets} in it, masked here")
        return replace(found, shown="; ".join([found.shown, *notes])) if notes else found

    def _by_kind(self, text: Excerpt, limit: int) -> Preview | None:
        """Preview by the first kind whose form the text has."""
        kinds = _kinds_of(self._essence)
        near = f"{text.head}\n{text.tail}"
        has_cue = kinds is KINDS and _CUES(near)
        for kind in kinds:
            if kind.cues and not (has_cue and any(map(near.__contains__, kind.cues))):
                continue
            if kind.begins is not None and not kind.begins.match(text.head):
                continue
            if kind.name not in self._drafts:
                self._drafts[kind.name] = kind.form(text)
            draft = self._drafts[kind.name]
            found = None if draft is None else draft.render(limit)
            if draft is None or found is None or len(found.text) > limit:
                continue
            if draft.written is None and not draft.scope:
                arrived = "what arrived" if text.is_part else "all of it"
                counted = f"counted in {arrived}"
                found = replace(found, shown=", ".join(filter(None, [found.shown, counted])))
            return found
        return None


def _safe(found: Preview) -> Preview:
    """A preview without secrets. A read that would name one is left out."""
    if MARK in found.ask:
        found = replace(found, ask="", part="")
    if not is_suspect(f"{found.text}\n{found.ask}"):
        return found
    if is_suspect(found.ask):
        found = replace(found, ask="", part="")
    return replace(found, text=mask(found.text))


def decode(sample: Sample) -> Excerpt:
    """Decode a sample as UTF-8, or as UTF-16 or UTF-32 if it has their byte-order mark."""
    is_whole, is_plain = sample.is_whole, not sample.head[: media.LOOK].translate(None, media.PLAIN)
    look = media.PLAIN_TEXT if is_plain else media.look(sample.head)
    encoding, unit, mark = look.encoding
    raw = sample.head + sample.tail if is_whole else sample.head
    head = codecs.getincrementaldecoder(encoding)("replace").decode(raw[mark:], final=is_whole)
    end = b"" if is_whole else sample.tail
    end = (
        end[:3].lstrip(_CONTINUED) + end[3:]
        if unit == 1
        else end[-(sample.size - len(end)) % unit :]
    )
    tail = end.decode(encoding, "replace")
    if unit == 2:
        tail = tail.removeprefix("\ufffd")  # the second half of a character
    lines = sample.lines if unit == 1 else None
    if is_whole and lines is None:
        lines = head.count("\n") + (not head.endswith("\n") if head else 0)
    bars = 0
    if "\r" in head or "\r" in tail:
        (head, bars), (tail, others) = folded(head), folded(tail)
        bars += others
    is_exact = "\ufffd" not in head and "\ufffd" not in tail and not bars
    read = sample.read
    return Excerpt(
        head, tail, is_whole, sample.size, len(sample.head), lines, is_exact, look, read, bool(bars)
    )


def _looks_like_text(content: Sample, text: Excerpt) -> bool:
    """Whether content of an unknown type looks like text, without a control or invalid
    character."""
    return not text.look.has_odd and media.is_text(
        media.sniff_bytes(content.head[: media.HEAD], b"")
    )


def _masked(text: Excerpt) -> tuple[Excerpt, int]:
    """Mask secrets and count them. A token at a cut is removed, since it may be part of a
    secret."""
    head, tail = text.head, text.tail
    secrets = 0
    if is_suspect(f"{head}\n{tail}"):
        head, tail = mask(head), mask(tail)
        secrets = max(
            0, head.count(MARK) + tail.count(MARK) - text.head.count(MARK) - text.tail.count(MARK)
        )
    if text.is_whole and not secrets:
        return text, 0
    if not text.is_whole:
        head = head[:-256] + head[-256:].rstrip(_RUN)
        tail = tail[:256].lstrip(_RUN) + tail[256:]
    return text._replace(head=head, tail=tail, is_exact=text.is_exact and not secrets), secrets


def _kinds_of(essence: str) -> Sequence[Kind]:
    """The kinds to try for a text of this media type."""
    if essence in _BY_TYPE:
        return (_BY_TYPE[essence],)
    if essence.endswith("+json"):
        return (_BY_TYPE[media.JSON],)
    if essence.endswith(("/xml", "+xml")):
        return (Kind("XML", (), documents.tree),)
    if essence.startswith("text/x-") and essence != "text/x-log":
        return (Kind("code", (), code.code(essence.removeprefix("text/x-"))),)
    return KINDS


def _rows(text: Excerpt) -> Draft | None:
    """Rows of Python in text: SQL is for content that is known to be a table."""
    found = python_rows(text)
    return replace(found, ask="") if found and found.ask.startswith("query=") else found


KINDS: Final[tuple[Kind, ...]] = (
    Kind("numbered lines", (), code.numbered, code.NUMBERED_LINES),
    Kind("numbered diff", (), diffs.numbered_diff, diffs.NUMBERED_DIFF),
    Kind("Markdown table", ("|",), tables.ruled, lazy_pattern(r"\s*\|")),
    Kind("document", ("#",), documents.found_markdown, lazy_pattern("# |---\n")),
    Kind("broken JSON", ('"',), broken_json),
    Kind("Python rows", ("[(", "[{'"), _rows),
    Kind("accessibility snapshot", documents.SNAPSHOT_CUES, documents.snapshot),
    Kind("diff", ("diff --git ", "\n+++ "), diffs.diff),
    Kind("git log", ("commit ",), diffs.history),
    Kind("git log --oneline", (), diffs.short_history, diffs.SHORT_HISTORY),
    *reports.KINDS,
    Kind("log", (), logs.log),
    Kind("locations", (), findings.locations),
    Kind("separated values", (), tables.found_separated),
    Kind("aligned columns", (), aligned.columns),
    Kind("file listing", ("rwx", "r--"), listings.listing),
    Kind("tree", ("── ",), listings.drawn_tree),
    Kind("description", ("Name:  ",), keyed.described),
    Kind("paths", (), listings.paths),
    Kind("settings", ("=",), keyed.settings),
    Kind("columns without a header", ("  ",), aligned.bare_columns),
    Kind("code", (), code.source),
    Kind("markdown", (), documents.found_markdown),
    Kind("YAML", (), keyed.yaml),
    Kind("output", (), limited(logs.output)),
    Kind("plain lines", (), tables.plain_lines),
)
"""The kinds of text without a known media type, in the order in which they are tried."""


_CUES: Final = QuickPattern(
    "|".join(
        "".join(f"\\x{byte:02x}" for byte in cue.encode()) for kind in KINDS for cue in kind.cues
    )
)
"""A quick check whether a text has any cue at all."""

_JSON_LINES: Final = Kind("JSON lines", (), json_lines)
_HTML: Final = Kind("HTML", (), documents.page)
_BY_TYPE: Final[dict[str, Kind]] = {
    media.JSON: Kind("JSON", (), json_document), media.JSONL: _JSON_LINES,
    "application/jsonl": _JSON_LINES, "application/x-jsonlines": _JSON_LINES,
    "text/csv": Kind("CSV", (), tables.separated),
    "text/tab-separated-values": Kind("TSV", (), partial(tables.separated, separator="\t")),
    "text/html": _HTML, "application/xhtml+xml": _HTML,
    "text/markdown": Kind("Markdown", (), documents.markdown),
    "text/x-rst": Kind("reStructuredText", (), documents.restructured),
    "text/x-diff": Kind("diff", (), diffs.diff),
    "text/x-python-repr": Kind("Python rows", (), python_rows),
    "application/yaml": Kind("YAML", (), keyed.yaml),
    "text/javascript": Kind("JavaScript", (), code.code("javascript")),
    "application/sql": Kind("SQL", (), code.code("sql")),
}  # fmt: skip
"""The kinds of text with a known media type."""
