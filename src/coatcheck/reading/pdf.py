"""Text of a PDF by page (`query="page 3"`, `query="pages 2-5"`), read in a child process; needs the extra `pdf`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.ids import clip
from coatcheck.media import TEXT
from coatcheck.previews.excerpts import count
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Pool

MAX_BYTES: Final = 256 << 20
_PAGES: Final = re.compile(r"\s*pages?\s+(\d{1,7})(?:\s*(?:-|to|:)\s*(\d{1,7}))?\s*|\s*text\s*", re.IGNORECASE)
_EVERY: Final = 10_000_000

pool: Final = Pool("coatcheck.reading.pdf_child", "pdf", "pypdf")


@dataclass(frozen=True, slots=True)
class PdfLimits:
    seconds: float = 20.0
    memory: int = 1 << 30


def pages_in(query: str) -> tuple[int, int] | None:
    """Parse `page 3`, `pages 2-5` or `text` (all pages) into the first and last page; None for another query."""
    match = _PAGES.fullmatch(query)
    if match is None:
        return None
    if match[1] is None:
        return 1, _EVERY
    return int(match[1]), int(match[2] or match[1])


def pdf_text(
    content: Content,
    first: int,
    last: int,
    *,
    limit: int = MAX_RESULT,
    limits: PdfLimits = PdfLimits(),  # noqa: B008
) -> QueryResult:
    """Return the text of some pages, each below a line with its number."""
    if first < 1 or last < first:
        raise InvalidArgument(f"invalid pages: {first} to {last}", hint="pages count from 1, e.g. query='pages 2-5'")
    found = ask(content, first, last, limit, limits)
    total = int(found["pages"])
    if found["encrypted"] and not total:
        raise InvalidArgument("the PDF is encrypted and needs a password")
    if first > total:
        raise InvalidArgument(f"page {first} is past the end: the PDF has {count(total, 'page')}")
    texts = [(int(number), str(text).strip()) for number, text in found["texts"]]
    empty = sum(not text for _, text in texts)
    notes = []
    if found["more"]:
        notes.append(f"cut on page {texts[-1][0]}; ask for the pages after it")
    if empty:
        notes.append(f"{count(empty, 'page')} without text: scanned, or drawings only")
    shown = f"page {first}" if first == texts[-1][0] else f"pages {first}-{texts[-1][0]}"
    return QueryResult(
        text="\n\n".join(f"--- page {number} of {total} ---\n{text}" for number, text in texts),
        media_type=TEXT,
        shown=f"{shown} of {total}",
        complete=not found["more"],
        note="; ".join(notes),
    )


def ask(content: Content, first: int, last: int, chars: int, limits: PdfLimits) -> dict[str, Any]:
    """Ask the child for the number of pages, the metadata and the texts of some pages (none if last is 0)."""
    if content.size > MAX_BYTES:
        raise TooLarge(f"{clip(content.ref.pointer)} has {content.size:,} bytes, the limit for a PDF is {MAX_BYTES:,}")
    message = {"first": first, "last": last, "chars": chars, **asdict(limits)}
    return pool.ask(message, {"0.pdf": content}, loaded="", seconds=limits.seconds, max_chars=chars)
