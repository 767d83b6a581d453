"""Text of a PDF by page (`query="page 3"`, `query="pages 2-5"`), read in a child process; needs the extra `pdf`."""

from __future__ import annotations

import codecs
import encodings
import importlib
import io
import logging
import pkgutil
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import TEXT
from coatcheck.previews.excerpts import count
from coatcheck.reading.page import MAX_RESULT, QueryResult
from coatcheck.reading.sandbox import Message, Pool, serve

MAX_BYTES: Final = 256 << 20
_PAGES: Final = re.compile(r"\s*pages?\s+(\d{1,7})(?:\s*(?:-|to|:)\s*(\d{1,7}))?\s*|\s*text\s*", re.IGNORECASE)
_EVERY: Final = 10_000_000
_METADATA: Final = ("title", "author", "subject", "creator")

pool: Final = Pool("coatcheck.reading.pdf", margin=1 << 30, extra="pdf", package="pypdf")


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


def ask(content: Content, first: int, last: int, chars: int, limits: PdfLimits) -> Message:
    """Ask the child for the number of pages, the metadata and the texts of some pages (none if last is 0)."""
    if content.size > MAX_BYTES:
        raise TooLarge(f"{clip(content.ref.pointer)} has {content.size:,} bytes, the limit for a PDF is {MAX_BYTES:,}")
    arguments = {"first": first, "last": last, "chars": chars}
    return pool.ask(arguments, **asdict(limits), max_chars=chars, contents=[content])


def main(folder: str) -> None:
    """Run the child process."""
    logging.disable()
    _warm()
    serve(folder, _answer)


def _answer(message: Message, contents: list[Content]) -> Message:
    from pypdf.errors import DependencyError, LimitReachedError

    file = io.BytesIO()
    for chunk in contents[0].chunks():
        file.write(chunk)
    try:
        return _read(file, **message["arguments"])
    except LimitReachedError as error:
        raise LimitExceeded("the PDF unpacks to more than the limit", hint="ask for other pages") from error
    except RecursionError as error:
        raise LimitExceeded("the PDF is nested too deeply to read") from error
    except DependencyError as error:
        raise InvalidArgument(f"the PDF cannot be read: {error}", hint="install the package that it names") from error
    except MemoryError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise InvalidArgument(f"the PDF cannot be read: {type(error).__name__}: {error}") from error


def _read(file: io.BytesIO, first: int, last: int, chars: int) -> Message:
    import pypdf

    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        return {"pages": 0, "encrypted": True, "about": {}, "texts": []}
    total = len(reader.pages)
    about = {key: str(value)[:200] for key in _METADATA if (value := getattr(reader.metadata, key, None))}
    found: Message = {"pages": total, "encrypted": reader.is_encrypted, "about": about, "texts": [], "more": False}
    for number in range(first, min(last, total) + 1):
        text = reader.pages[number - 1].extract_text()
        found["texts"].append([number, text[:chars]])
        found["more"] = len(text) > chars
        if found["more"]:
            break
        chars -= len(text)
    return found


def _warm() -> None:
    """Import all that the library may import on demand, since a confined process can open no module. A PDF can use any
    character encoding, so every codec is loaded too, and a page is read once."""
    import pypdf

    for module in pkgutil.walk_packages(pypdf.__path__, "pypdf."):
        with suppress(ImportError):  # it needs a package that is not installed
            importlib.import_module(module.name)
    for codec in pkgutil.iter_modules(encodings.__path__):
        with suppress(LookupError, ImportError):  # for another platform
            codecs.lookup(codec.name)
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    page = io.BytesIO()
    writer.write(page)
    pypdf.PdfReader(page).pages[0].extract_text()
