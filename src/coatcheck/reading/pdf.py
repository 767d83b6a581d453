"""The text of a PDF by page (`query="page 3"`, `query="pages 2-5"`), read in a child process; needs the extra `pdf`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.errors import InvalidArgument, TooLarge
from coatcheck.ids import clip
from coatcheck.media import TEXT
from coatcheck.reading.answer import LIMIT, Answer, count
from coatcheck.reading.child import Pool
from coatcheck.streams import Content

MAX_BYTES: Final = 256 << 20
_PAGES: Final = re.compile(r"\s*pages?\s+(\d{1,7})(?:\s*(?:-|to|:)\s*(\d{1,7}))?\s*|\s*text\s*", re.IGNORECASE)
_EVERY: Final = 10_000_000

pool: Final = Pool("coatcheck.reading.pdf_child", "pdf", "pypdf")


@dataclass(frozen=True, slots=True)
class PdfLimits:
    seconds: float = 20.0
    memory: int = 1 << 30


def pages_in(query: str) -> tuple[int, int] | None:
    """The first and last page that a query names: `page 3`, `pages 2-5`, `text` for all; None where it names none."""
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
    limit: int = LIMIT,
    limits: PdfLimits = PdfLimits(),  # noqa: B008
) -> Answer:
    """The text of some pages, each under a line that says which it is."""
    if first < 1 or last < first:
        raise InvalidArgument(f"no such pages: {first} to {last}", hint="pages count from 1, e.g. query='pages 2-5'")
    told = ask(content, first, last, limit, limits)
    total = int(told["pages"])
    if told["encrypted"] and not total:
        raise InvalidArgument("the PDF is encrypted: its text needs a password")
    if first > total:
        raise InvalidArgument(f"there is no page {first}: the PDF has {count(total, 'page')}")
    texts = [(int(number), str(text).strip()) for number, text in told["texts"]]
    empty = sum(not text for _, text in texts)
    notes = []
    if told["more"]:
        notes.append(f"cut on page {texts[-1][0]}; ask for the pages after it")
    if empty:
        notes.append(f"{count(empty, 'page')} without text: scanned, or drawings only")
    shown = f"page {first}" if first == texts[-1][0] else f"pages {first}-{texts[-1][0]}"
    return Answer(
        text="\n\n".join(f"--- page {number} of {total} ---\n{text}" for number, text in texts),
        media_type=TEXT,
        shown=f"{shown} of {total}",
        complete=not told["more"],
        note="; ".join(notes),
    )


def ask(content: Content, first: int, last: int, chars: int, limits: PdfLimits) -> dict[str, Any]:
    """What the child tells of a PDF: pages, title and the like, texts of the pages asked for (none where last is 0)."""
    if content.size > MAX_BYTES:
        raise TooLarge(f"{clip(content.ref.pointer)} has {content.size:,} bytes, PDF is read up to {MAX_BYTES:,}")
    message = {
        "first": first, "last": last, "chars": chars, "seconds": limits.seconds, "memory": limits.memory
    }  # fmt: skip
    return pool.ask(message, {"0.pdf": content}, holds="", seconds=limits.seconds, most_chars=chars)
