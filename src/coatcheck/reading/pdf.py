"""Text of a PDF by page (`query="page 3"`, `query="pages 2-5"`), read in a child process; needs the
extra `pdf`.

Pages that were read from the first on are kept, since a long document takes longer than one call
may: the next call continues after them, and the next page of a grep does not read the document
again.
"""

from __future__ import annotations

import codecs
import encodings
import gc
import importlib
import io
import logging
import pkgutil
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import TEXT
from coatcheck.previews.excerpts import count
from coatcheck.reading.page import MAX_RESULT, QueryResult, TextCache
from coatcheck.reading.sandbox import Message, Pool, serve

MAX_BYTES: Final = 256 << 20
EVERY: Final = 10_000_000
SECONDS: Final = 30.0  # for one call; after two thirds of that, no further page is read
_METADATA: Final = ("title", "author", "subject", "creator")
_UNREADABLE: Final = "\0"  # in place of a page's text
_LIGATURES: Final = str.maketrans(
    {
        "ﬀ": "ff",
        "ﬁ": "fi",
        "ﬂ": "fl",
        "ﬃ": "ffi",
        "ﬄ": "ffl",
        "ﬅ": "st",
        "ﬆ": "st",
        "\0": None,
        "\r": " ",
        "\f": " ",
    }
)
_MARK: Final = lazy_pattern(r"^--- page ", re.MULTILINE)
_HYPHENATED: Final = lazy_pattern(r"([^\W\d_])[-\xad][ \t]*\n([^\W\d_]+[^\w\s]{0,3})[ \t\n]?")

pool: Final = Pool("coatcheck.reading.pdf", margin=1 << 30, extra="pdf", package="pypdf")


@dataclass(frozen=True, slots=True)
class _Pages:
    """Texts of consecutive pages, and the number of all pages. `is_cut` is True if the last text is
    not complete."""

    texts: tuple[str, ...]
    total: int
    is_cut: bool = False


_kept: Final[TextCache[_Pages]] = TextCache()


def pdf_text(
    content: Content, first: int, last: int, *, limit: int = MAX_RESULT, seconds: float = SECONDS
) -> QueryResult:
    """Return the text of some pages, each below a line with its number."""
    if first < 1 or last < first:
        raise InvalidArgument(
            f"invalid pages: {first} to {last}", hint="pages count from 1, e.g. query='pages 2-5'"
        )
    found = _read_pages(content, first, last, limit, seconds)
    if first > found.total:
        raise InvalidArgument(
            f"page {first} is past the end: the PDF has {count(found.total, 'page')}"
        )
    pages = list(enumerate(found.texts, first))
    end, wanted = pages[-1][0], min(last, found.total)
    scans = [number for number, text in pages if not text]
    notes = []
    if found.is_cut:
        notes.append(f"cut on page {end}; ask for the pages after it")
    elif end < wanted:
        notes.append(f"pages {end + 1}-{wanted} were not read in time; repeat the call to read on")
    if scans:
        notes.append(
            f"{_numbers(scans)} no text; {'it' if len(scans) == 1 else 'they'} may be scanned"
        )
    return QueryResult(
        text="\n\n".join(_page(number, text) for number, text in pages),
        media_type=TEXT,
        shown=f"{f'page {first}' if first == end else f'pages {first}-{end}'} of {found.total}",
        note="; ".join(notes),
    )


def _page(number: int, text: str) -> str:
    if text == _UNREADABLE:
        return f"--- page {number}: it could not be read ---"
    return (
        f"--- page {number} ---\n{text}"
        if text
        else f"--- page {number}: no text, it may be scanned ---"
    )


def _numbers(pages: Sequence[int]) -> str:
    """`page 3 has`, `pages 3-5, 7 have`."""
    ranges: list[list[int]] = []
    for page in pages:
        if ranges and page == ranges[-1][-1] + 1:
            ranges[-1][1:] = [page]
        else:
            ranges.append([page])
    listed = ", ".join("-".join(map(str, each)) for each in ranges[:10])
    listed += f" and {len(ranges) - 10} more" if len(ranges) > 10 else ""
    return f"page {listed} has" if len(pages) == 1 else f"pages {listed} have"


def _read_pages(content: Content, first: int, last: int, limit: int, seconds: float) -> _Pages:
    """Return some pages; the last ones may be missing. Pages from the first on are kept, and read
    only once."""
    key = content.ref.artifact_id
    kept = _kept.get(key) or _Pages((), EVERY)
    done = len(kept.texts)
    if limit == MAX_RESULT and (kept.is_cut or min(last, kept.total) <= done):
        return _Pages(kept.texts[first - 1 : last], kept.total, kept.is_cut and last >= done)
    if limit != MAX_RESULT or first > done + 1:
        return _ask_pages(content, first, last, limit, seconds)
    more = _ask_pages(content, done + 1, last, max(1, limit - sum(map(len, kept.texts))), seconds)
    whole = _Pages(kept.texts + more.texts, more.total, more.is_cut)
    _kept.put(key, whole, sum(map(len, whole.texts)))
    return _Pages(whole.texts[first - 1 : last], whole.total, whole.is_cut)


def _ask_pages(content: Content, first: int, last: int, limit: int, seconds: float) -> _Pages:
    found = ask(content, first, last, limit, seconds)
    if found["encrypted"] and not found["pages"]:
        raise InvalidArgument("the PDF is encrypted and needs a password")
    texts = tuple(_UNREADABLE if text is None else _tidy(text) for text in found["texts"])
    return _Pages(texts, int(found["pages"]), bool(found["more"]))


def _tidy(text: str) -> str:
    """Write ligatures as letters, and join the words that a hyphen divides at the end of a line. No
    line looks like our lines between pages."""
    text = text.encode("utf-8", "replace").decode().translate(_LIGATURES)
    return _MARK.sub(r" \g<0>", _HYPHENATED.sub(r"\1\2\n", text).strip())


def ask(content: Content, first: int, last: int, chars: int, seconds: float) -> Message:
    """Ask the child for the number of pages, the metadata and the texts of some pages (none if last
    is 0)."""
    if content.size > MAX_BYTES:
        raise TooLarge(
            f"{clip(content.ref.pointer)} has {content.size:,} bytes, "
            f"the limit for a PDF is {MAX_BYTES:,}"
        )
    arguments = {"first": first, "last": last, "chars": chars, "seconds": seconds * 2 / 3}
    return pool.ask(arguments, seconds=seconds, max_chars=chars, contents=[content])


def main(folder: str) -> None:
    """Run the child process."""
    logging.disable()
    _warm()
    gc.freeze()  # so that the library is not scanned again and again
    serve(folder, _answer)


def _answer(message: Message, contents: list[Content]) -> Message:
    from pypdf.errors import DependencyError, LimitReachedError

    began = monotonic()
    try:
        return _read(io.BytesIO(b"".join(contents[0].chunks())), began, **message["arguments"])
    except LimitReachedError as error:
        raise LimitExceeded(
            "the PDF unpacks to more than the limit", hint="ask for other pages"
        ) from error
    except RecursionError as error:
        raise LimitExceeded("the PDF is nested too deeply to read") from error
    except DependencyError as error:
        raise InvalidArgument(f"the PDF cannot be read: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # a malformed file can raise anything
        raise InvalidArgument(f"the PDF cannot be read: {type(error).__name__}: {error}") from error


def _read(
    file: io.BytesIO, began: float, *, first: int, last: int, chars: int, seconds: float
) -> Message:
    """Read pages until the characters or the seconds are used up. Of several pages, an unreadable
    one is None."""
    import pypdf

    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        return {"pages": 0, "encrypted": True, "about": {}, "texts": []}
    total = len(reader.pages)
    about = {
        key: str(value)[:200] for key in _METADATA if (value := getattr(reader.metadata, key, None))
    }
    found: Message = {
        "pages": total,
        "encrypted": reader.is_encrypted,
        "about": about,
        "texts": [],
        "more": False,
    }
    for number in range(first, min(last, total) + 1):
        try:
            text = reader.pages[number - 1].extract_text()
        except MemoryError:
            raise
        except Exception:
            if first == last:
                raise
            found["texts"].append(None)
            continue
        found["texts"].append(text[:chars])
        found["more"] = len(text) > chars
        chars -= len(text)
        if found["more"] or monotonic() > began + seconds:
            break
    return found


def _warm() -> None:
    """Import what the library may import on demand, since a confined process cannot open a module.
    A PDF can use any character encoding, so every codec is loaded too, and a page is read once."""
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
