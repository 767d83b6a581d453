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

from . import consoles, outlines, reports
from .binaries import binary, is_binary
from .excerpts import EMPTY, Excerpt, Kind, Preview, ends, folded, some, whole
from .json_text import broken_json, json_document, json_lines, python_rows
from .listings import log, output, separator_of, table

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
_WHOLE, _HEAD, _TAIL = (
    16 * 1_024,
    5 * 1_024,
    2 * 1_024,
)  # bytes that the preview of a stub is made from
_JSON_WHOLE, _JSON_HEAD = 32 * 1_024, 16 * 1_024
_START: Final = 256  # characters whose tokens are estimated
_PART: Final = "the part that arrived: "
_TOKENS: Final = (
    52  # of a preview with its description, besides one for every two characters of the limit
)
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
    known. `cut` is what was cut out of it, if the content itself does not say so. The preview is
    made from less than the sample, which is faster, and has no more tokens than `limit` characters
    of prose."""
    cut = _truncation(sample, media_type) or cut
    room, short = _TOKENS + limit // 2, sample
    most, head = (_JSON_WHOLE, _JSON_HEAD) if media_type == media.JSON else (_WHOLE, _HEAD)
    if sample.size > most:
        short = sample.shortened(head, _TAIL)
    lines = total = text = None
    if media_type.startswith("text/") or media.is_text(media_type):
        text, lines = decode(short), sample.lines
        if text.look.encoding.name != "UTF-8":
            decoded = decode(sample)
            lines, tokens = (
                decoded.lines,
                roughly((decoded.head + decoded.tail).encode("utf-8", "replace")),
            )
        elif tokens is None:
            tokens = roughly(sample.head + sample.tail)
        total = round(tokens * sample.size / max(1, len(sample.head) + len(sample.tail)))
        if (
            limit > LEAST and not (start := text.head[:_START]).isascii()
        ):  # each character may be a token
            limit = max(LEAST, min(limit, limit * _START * 3 // (4 * estimate(start) or 1)))
    while True:
        shown = _preview(short, media_type, limit, text=text, grows=True, is_part=cut is not None)
        written = _ENCODER.encode(f"{shown.text}{shown.shown}{shown.ask}")
        is_short = limit <= LEAST or len(written.encode("utf-8", "surrogatepass")) <= room * 3 // 2
        if is_short or estimate(written) <= room:
            return Facts(kind, media_type, sample.size, lines, total, shown, summary, cut)
        limit = limit * 2 // 3


def preview(content: Sample, *, media_type: str, limit: int = 200) -> Preview:
    """Return a preview of at most `limit` characters. Below `LEAST` it has no text, only `shown`,
    which says so if the content was cut before it came here."""
    cut = _truncation(content, media_type)
    if cut is None:
        return _preview(content, media_type, limit)
    found = _preview(content, media_type, limit, is_part=True)
    return replace(found, shown=f"{found.shown}; {cut}")


def _truncation(content: Sample, media_type: str) -> Truncation | None:
    """What was cut out of content before it came here."""
    if is_binary(media.essence(media_type)):
        return None
    return truncation_of(content.head, content.tail, content.size, content.read)


def _preview(
    content: Sample,
    media_type: str,
    limit: int,
    *,
    text: Excerpt | None = None,
    grows: bool = False,
    is_part: bool = False,
) -> Preview:
    """Return a preview. `text` is the decoded content, if it is known. If `grows`, some kinds of
    content get more characters, as `Kind.percent` says. If `is_part`, the preview says that it is
    one of the part that arrived."""
    if limit < LEAST:
        return Preview("", f"nothing of {content.size} bytes")
    if content.size == 0:
        return EMPTY
    essence = media_type.partition(";")[0].strip().lower()
    is_text = essence.startswith("text/")
    text = None if not is_text and is_binary(essence) else text or decode(content)
    is_text = is_text or media.is_text(essence)
    if text is None or text.look.is_binary or not (is_text or _looks_like_text(content, text)):
        return binary(content, essence, limit)
    if not is_part:
        return _of_text(text, _kinds_of(essence), limit, grows=grows)
    text, lead = text._replace(is_part=True), _PART if limit >= LEAST + len(_PART) else ""
    found = _of_text(text, _kinds_of(essence), limit - len(lead), grows=grows)
    return replace(found, text=lead + found.text)


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


def _of_text(text: Excerpt, kinds: Sequence[Kind], limit: int, *, grows: bool) -> Preview:
    """Preview of a text by the first kind whose form it has, with secrets masked; its ends if it
    has none."""
    text, secrets = _masked(text)
    found = whole(text, limit) if text.is_whole else None
    if found is None:
        near = f"{text.head}\n{text.tail}"
        has_cue = kinds is KINDS and _CUES(near)
        for kind in kinds:
            if kind.cues and not (has_cue and any(map(near.__contains__, kind.cues))):
                continue
            if kind.begins is not None and not kind.begins.match(text.head):
                continue
            room = limit * kind.percent // 100 if grows else limit
            found = kind.form(text, room)
            if found is not None and len(found.text) <= room:
                break
        else:
            found = ends(text, limit)
    if MARK in found.ask:
        found = replace(found, ask="", part="")
    if is_suspect(f"{found.text}\n{found.ask}"):
        is_safe = not is_suspect(found.ask)
        found = Preview(
            mask(found.text), found.shown, *((found.ask, found.part) if is_safe else ())
        )
    notes = ["progress bars are folded"] if text.is_folded else []
    if secrets:
        least = "" if text.is_whole else "at least "
        notes.append(
            f"{least}{some(secrets, 'secret')} {'is' if secrets == 1 else 'are'} masked in what "
            "you read"
        )
    return replace(found, shown="; ".join([found.shown, *notes])) if notes else found


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
        return (Kind("XML", (), outlines.tree),)
    if essence.startswith("text/x-") and essence != "text/x-log":
        return (
            Kind("code", (), partial(outlines.code, language=essence.removeprefix("text/x-")), 125),
        )
    return KINDS


def _table(text: Excerpt, limit: int) -> Preview | None:
    separator = separator_of(text)
    found = None if separator is None else table(text, limit, separator=separator)
    return found and replace(
        found, ask='lines="1:30"'
    )  # SQL is for content that is known to be a table


def _rows(text: Excerpt, limit: int) -> Preview | None:
    found = python_rows(text, limit)
    return replace(found, ask="") if found and found.ask.startswith("query=") else found


def _markdown(text: Excerpt, limit: int) -> Preview | None:
    return outlines.markdown(text, limit) if outlines.looks_like_markdown(text.head) else None


KINDS: Final[tuple[Kind, ...]] = (
    Kind("numbered lines", (), outlines.numbered, 125, outlines.NUMBERED_LINES),
    Kind("numbered diff", (), outlines.numbered_diff, begins=outlines.NUMBERED_DIFF),
    Kind("document", ("#",), _markdown, 125, lazy_pattern("# |---\n")),
    Kind("broken JSON", ('"',), broken_json, 125),
    Kind("Python rows", ("[(", "[{'"), _rows, 125),
    Kind("accessibility snapshot", outlines.SNAPSHOT_CUES, outlines.snapshot, 130),
    Kind("diff", ("diff --git ", "\n+++ "), outlines.diff),
    Kind("git log", ("commit ",), outlines.history, 130),
    Kind("git log --oneline", (), outlines.short_history, begins=outlines.SHORT_HISTORY),
    *reports.KINDS,
    Kind("log", (), log, 125),
    Kind("locations", (), consoles.locations, 125),
    Kind("separated values", (), _table),
    *consoles.KINDS,
    Kind("code", (), outlines.code, 125),
    Kind("markdown", (), _markdown, 125),
    Kind("YAML", (), consoles.yaml, 125),
    Kind("output", (), output),
)
"""The kinds of text without a known media type, in the order in which they are tried."""


_CUES: Final = QuickPattern(
    "|".join(
        "".join(f"\\x{byte:02x}" for byte in cue.encode()) for kind in KINDS for cue in kind.cues
    )
)
"""A quick check whether a text has any cue at all."""

_JSON_LINES: Final = Kind("JSON lines", (), json_lines, 150)
_HTML: Final = Kind("HTML", (), outlines.page, 130)
_BY_TYPE: Final[dict[str, Kind]] = {
    media.JSON: Kind("JSON", (), json_document), media.JSONL: _JSON_LINES,
    "application/jsonl": _JSON_LINES, "application/x-jsonlines": _JSON_LINES,
    "text/csv": Kind("CSV", (), table),
    "text/tab-separated-values": Kind("TSV", (), partial(table, separator="\t")),
    "text/html": _HTML, "application/xhtml+xml": _HTML,
    "text/markdown": Kind("Markdown", (), outlines.markdown, 125),
    "text/x-rst": Kind("reStructuredText", (), outlines.restructured, 125),
    "text/x-diff": Kind("diff", (), outlines.diff),
    "text/x-python-repr": Kind("Python rows", (), python_rows, 125),
    "application/yaml": Kind("YAML", (), consoles.yaml, 125),
    "text/javascript": Kind("JavaScript", (), partial(outlines.code, language="javascript"), 125),
    "application/sql": Kind("SQL", (), partial(outlines.code, language="sql"), 125),
}  # fmt: skip
"""The kinds of text with a known media type."""
