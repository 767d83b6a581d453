"""The decoded text of an artifact, and slices of it by lines or characters, a page at a time.

`DecodedText` is UTF-8 by offset, with the number of line feeds of each block. UTF-8 content is read
as it is stored, a block per frame. UTF-16 and UTF-32, detected by their byte-order mark, are
scanned once for an index of blocks and transcoded a block at a time. Invalid bytes (or code units)
are shown as U+FFFD, one for each, and counted. A line ends with a line feed; the carriage return
before it stays in the text. Lines are shown as a terminal shows them: without colours, and a
progress bar in its last state. Characters are shown as they are.

A page ends after a line feed if there is one within the limit, and never inside a character; a line
longer than the limit is paged by characters. All pages of a slice together are its text. A position
is the offset where the next page begins and, inside a long line or a slice by characters, two small
numbers: the excess of bytes over characters so far, and in the whole (plus one; 0 for not counted).
"""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.media import encoding_of, essence, is_json, is_jsonl, is_text
from coatcheck.previews.binaries import found_type
from coatcheck.previews.excerpts import count, folded, uncoloured
from coatcheck.reading.long_lines import with_characters
from coatcheck.reading.page import MIN_CHARS, PageDraft, chars_of, lines_of, parse_slice
from coatcheck.storage.frames import FRAME, line_counts

if TYPE_CHECKING:
    from coatcheck.previews import Sample

Form = Literal["pdf", "page", "office", "sheets", "text", "other"]
HEAD: Final = 4_096  # bytes that show whether content is text
REPLACEMENT: Final = "\ufffd"
PIECE: Final = 4 * FRAME  # small enough for the processor cache between reading and searching
_KEPT: Final = 4
_SURROGATE: Final = lazy_pattern("[\ud800-\udfff]")
_BETWEEN: Final = "\n--\n"
_LOST: Final = "\udcff"  # an invalid code unit of UTF-16 or UTF-32; the byte 0xFF in our UTF-8
MAX_LABELLED: Final = 16 << 20
_BARS: Final = 64  # times the characters of a page, to look for the end of progress bars
COUNTED: Final = (
    256 << 20
)  # larger totals are given in bytes: counting characters would take too long


def recognized(content: Content) -> tuple[Content, Form]:
    """Return a content with the media type that its bytes show (PNG data declared as text is an
    image), and its form: a PDF, a web page, an office file, a workbook, another text, or anything
    else."""
    media_type = found_type(content.read(0, HEAD), content.ref.media_type)
    if media_type != content.ref.media_type:
        content = Content(replace(content.ref, media_type=media_type), content.frames, content.read)
    bare = essence(media_type)
    form: Form = "other"
    if bare == "application/pdf":
        form = "pdf"
    elif bare in ("text/html", "application/xhtml+xml"):
        form = "page"
    elif bare == "application/zip" or bare.startswith("application/vnd.o"):
        from coatcheck.previews.binaries import WORKBOOKS, office_kind

        if kind := office_kind(sample_of(content)):
            form = "sheets" if kind in WORKBOOKS else "office"
    elif is_text(bare):
        form = "text"
    else:
        from coatcheck.reading import sheets

        if bare in sheets.OLD and sheets.is_old_workbook(content):
            form = "sheets"
    return content, form


def sample_of(content: Content) -> Sample:
    """Sample a stored artifact and count its lines, with the same result as `Sample.of` for the
    same bytes."""
    from coatcheck.previews import EDGE, SCANNED, Sample

    size = content.size
    head = content.read(0, EDGE)
    tail = content.read(max(len(head), size - EDGE), EDGE)
    feeds = sum(line_counts(content.frames) or (chunk.count(b"\n") for chunk in content.chunks()))
    ends = (tail or head)[-1:]
    lines = feeds + (ends not in (b"", b"\n"))
    return Sample(head, tail, size, lines, lambda: content.read(0, SCANNED))


class DecodedText:
    """Characters by offset. `start` and `end` are the limits of the UTF-8, without the byte-order
    mark. `head` is its first block, and `is_paged` is True for the text of a document with pages.

    Strings from `take` have a lone surrogate for each invalid byte, so that they can be measured.
    `visible` makes them fit to show. Without `exact`, lines are shown as on a terminal."""

    def __init__(self, content: Content, *, exact: bool = False) -> None:
        self.exact = exact
        first = content.read(0, FRAME)
        self.media_type = content.ref.media_type
        self.is_document = is_json(self.media_type)
        self.is_json = self.is_document or is_jsonl(self.media_type)
        self.encoding, self._unit, mark = encoding_of(first[:4])
        self.unit = "byte" if self._unit == 1 else "code unit"
        self.is_scanned = self._unit > 1
        self.has_mark = bool(mark)
        self._content = content
        self._size = content.ref.size_bytes
        self._kept: dict[int, bytes] = {}  # the last few blocks: no frame of a page is read twice
        self._sources: array[int] | None = None
        self._pages: list[int] = []
        self._starts: Sequence[int]
        if self._unit > 1:
            self.start = 0
            self._scan(mark, first)
        else:
            self._kept[0] = first
            self.start, self.end = mark, self._size
            self._starts = range(0, self.end, FRAME)
            counts = line_counts(content.frames)
            if len(counts) < len(self._starts):
                counts = [self._block(index).count(b"\n") for index in range(len(self._starts))]
            self._feeds = list(accumulate(counts[: len(self._starts)], initial=0))
        self.head = first[self.start :] if self._unit == 1 else self._block(0) if self.end else b""
        self.is_paged = self.head.startswith(b"\f\n") and self.end <= MAX_LABELLED
        last = self.head if len(self._starts) < 2 else self._block(len(self._starts) - 1)
        self.lines = self._feeds[-1] + (self.end > self.start and not last.endswith(b"\n"))

    def notes(self, at: int = 0) -> list[str]:
        """Notes on the decoding of a page that begins at an offset."""
        if self._unit > 1:
            return [f"decoded from {self.encoding}"]
        return ["a byte-order mark was left out"] if self.has_mark and at <= self.start else []

    def as_shown(self, text: str) -> str:
        """A text of lines as a page shows it: in JSON, characters in place of their escapes, unless
        lines are exact."""
        return with_characters(text) if self.is_json and not self.exact else text

    def page_at(self, number: int) -> int:
        """The page of a line in a document's text, in which every page begins with a form feed in a
        line of its own."""
        if not self._pages:
            lines = self.read(0, self.end).split(b"\n")
            self._pages = [line for line, text in enumerate(lines, 1) if text == b"\f"]
        return bisect_right(self._pages, number)

    def bytes_of(self, start: int, end: int) -> tuple[int, int]:
        """The stored bytes of a range of the text: exact for UTF-8, proportional for transcoded
        text."""
        if start <= self.start:
            start = 0
        if not self.is_scanned or not self.end:
            return start, end
        return start * self._size // self.end, end * self._size // self.end

    def read(self, offset: int, length: int) -> bytes:
        """Return UTF-8 from an offset on, short only at the end. The last few blocks stay in
        memory."""
        end = min(offset + length, self.end)
        if offset >= end:
            return b""
        first, last = self._index(offset), self._index(end - 1)
        data = (
            self._block(first)
            if first == last
            else b"".join(map(self._block, range(first, last + 1)))
        )
        base = self._starts[first]
        return data[offset - base : end - base]

    def piece(self, at: int, end: int) -> tuple[bytes, int]:
        """Return a large piece of the text from an offset on, up to the end of a block, and its
        number of line feeds.

        Blocks in memory are not read again. Unless the text is scanned, this may run in a thread of
        its own."""
        first = self._index(at)
        last, base = first + 1, self._starts[first]
        block = self._block(first) if self._sources else self._kept.get(first)
        if block is None:
            stop = min((at // PIECE + 1) * (PIECE // FRAME), len(self._starts))
            while last < stop and last not in self._kept:
                last += 1
        upto = self._starts[last] if last < len(self._starts) else self.end
        is_whole, upto = at == base and upto <= end, min(upto, end)
        piece = (
            self._content.read(at, upto - at) if block is None else block[at - base : upto - base]
        )
        return piece, self._feeds[last] - self._feeds[first] if is_whole else piece.count(b"\n")

    def line_start(self, number: int) -> int:
        """Offset of a line, 1-based; the end for the line after the last."""
        feeds = number - 1
        if feeds <= 0:
            return self.start
        if feeds > self._feeds[-1]:
            return self.end
        index = bisect_left(self._feeds, feeds) - 1
        return self._starts[index] + _nth_feed(self._block(index), feeds - self._feeds[index]) + 1

    def line_at(self, offset: int) -> int:
        """Number of the line at an offset."""
        index = self._index(offset)
        return (
            1
            + self._feeds[index]
            + self._block(index).count(b"\n", 0, offset - self._starts[index])
        )

    def line_end(self, offset: int) -> int:
        """Offset where the line at an offset ends: at its line feed, or at the end."""
        index = self._index(offset)
        found = self._block(index).find(b"\n", offset - self._starts[index])
        if found < 0:
            index = bisect_right(self._feeds, self._feeds[index + 1]) - 1
            if index == len(self._starts):
                return self.end
            found = self._block(index).find(b"\n")
        return self._starts[index] + found

    def take(self, at: int, limit: int) -> str:
        """Return `limit` characters from an offset on, fewer only at the end."""
        data = self.read(at, limit)
        while True:
            ended = at + len(data) >= self.end
            got = decode(data, final=ended)
            if ended or len(got) >= limit:
                return got[:limit]
            data += self.read(at + len(data), 4 * (limit - len(got)))

    def count(self, at: int, end: int) -> int:
        """Number of characters between two offsets."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        total = 0
        while at < end:
            piece, _ = self.piece(at, end)
            at += len(piece)
            if piece.isascii() and not decoder.getstate()[0]:
                total += len(piece)
            else:
                total += len(decoder.decode(piece))
        return total + len(decoder.decode(b"", final=True))

    def skip(self, at: int, characters: int) -> int:
        """Offset of the character `characters` further on, or the end if there are fewer."""
        while characters and at < self.end:
            piece = self.read(at, FRAME)
            if len(piece) > characters and piece.isascii():
                return at + characters
            got = decode(piece, final=at + len(piece) >= self.end)[:characters]
            at += width(got)
            characters -= len(got)
        return at

    def _index(self, offset: int) -> int:
        return max(0, bisect_right(self._starts, min(offset, self.end - 1)) - 1)

    def _block(self, index: int) -> bytes:
        found = self._kept.get(index)
        if found is None:
            if self._sources is None:
                found = self._content.read(index * FRAME, FRAME)
            else:
                at, end = self._sources[index], self._sources[index + 1]
                found = self._transcode(self._content.read(at, end - at), final=end == self._size)[
                    0
                ]
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = found
        return found

    def _scan(self, at: int, first: bytes) -> None:
        """Index content that is not UTF-8: the start of each block in it and in our UTF-8, and its
        line feeds."""
        sources, starts, feeds = array("q", [at]), array("q"), [0]
        self.end = 0
        while at < self._size:
            data = self._content.read(at, FRAME - at % FRAME) if at >= FRAME else first[at:]
            piece, used = self._transcode(data, final=at + len(data) == self._size)
            if not used:  # one character in two frames: take both
                data = self._content.read(at, FRAME)
                piece, used = self._transcode(data, final=at + len(data) == self._size)
            starts.append(self.end)
            feeds.append(feeds[-1] + piece.count(b"\n"))
            self.end += len(piece)
            at += used
            sources.append(at)
        self._sources, self._starts, self._feeds = sources, starts, feeds

    def _transcode(self, data: bytes, *, final: bool) -> tuple[bytes, int]:
        """Convert UTF-16 or UTF-32 to UTF-8; also return the number of bytes used, which is all of
        them if final."""
        used = len(data) - len(data) % self._unit
        torn = _LOST if final and used < len(data) else ""
        if self._unit == 2:
            decode_units = (
                codecs.utf_16_le_decode if self.encoding == "UTF-16LE" else codecs.utf_16_be_decode
            )
            text, used = decode_units(data[:used], "surrogatepass", final)
        else:
            text = _utf_32(data[:used], self.encoding)
        text = _SURROGATE.sub(_LOST, text) + torn
        return text.encode("utf-8", "surrogateescape"), len(data) if final else used


def by_lines(
    text: DecodedText, spec: str | None, cap: int, position: tuple[int, ...] | None = None
) -> PageDraft:
    """A page of the lines in a slice (None for all), from the position on. Several slices are shown
    with `--` between them, and their positions begin with the number of the slice."""
    if not text.lines:
        return PageDraft("", _shown(["empty: 0 lines"], text, 0, 0), total=0)
    ranges = [(1, text.lines)] if spec is None else lines_of(spec, text.lines)
    if spec is None or "," not in spec:
        return _range(text, *ranges[0], cap, position)
    index, *rest = position or (0,)
    body, drafts = "", list[PageDraft]()
    following: tuple[int, ...] | None = None
    for number in range(index, len(ranges)):
        room = cap - len(body) - len(_BETWEEN)
        if drafts and room < MIN_CHARS // 2:
            following = (number,)
            break
        draft = _range(text, *ranges[number], room, tuple(rest) or None)
        drafts.append(draft)
        between = _BETWEEN[body.endswith("\n") :] if body else ""
        body += between + draft.text
        rest = []
        if draft.position is not None:
            following = (number, *draft.position)
            break
    past = spec.count(",") + 1 - len(ranges)
    return _joined(drafts, text.lines, body, following, past)


def _joined(
    drafts: list[PageDraft], total: int, body: str, following: tuple[int, ...] | None, past: int
) -> PageDraft:
    """One page of several slices; `past` of them are past the end of the text."""
    whole = f" of {total:,}"
    *others, last = [draft.shown for draft in drafts]
    shown = ", ".join([*(one.removesuffix(whole) for one in others), last])
    shown += f"; {past} past the end" if past else ""
    numbers = [number for draft in drafts for number in draft.lines or ()]
    spans = tuple(span for draft in drafts for span in draft.spans)
    lines = (min(numbers), max(numbers))
    return PageDraft(body, shown, following, spans=spans, lines=lines, total=total)


def _range(
    text: DecodedText, first: int, last: int, cap: int, position: tuple[int, ...] | None = None
) -> PageDraft:
    at = position[0] if position else text.line_start(first)
    number = text.line_at(at) if position else first
    inside = position is not None and len(position) > 1
    got = text.take(at, cap) if inside or text.exact else _as_shown(text, at, cap)
    *lines, rest = got.split("\n", last - number + 1)
    ends = len(lines) == last - number + 1  # the last line of the slice is complete
    whole = ends or at + width(got) == text.end
    cut = len(got) - len(rest) if ends or not whole else len(got)
    if cut and not inside:
        screen, bars = (got[:cut], 0) if text.exact else folded(got[:cut])
        body, lost = visible(text.as_shown(screen))
        many = body.count("\n") + (not body.endswith("\n"))
        numbers = number, number + many - 1
        shown = [_lines(*numbers, text.lines)]
        if bars:
            shown.append(f"{count(bars, 'line')} folded to the end of a progress bar")
        after = at + width(got[:cut])
        following, shown_as = None if whole else (after,), _shown(shown, text, at, lost)
        return PageDraft(
            body, shown_as, following, spans=((at, after),), lines=numbers, total=text.lines
        )
    return _inside(text, number, at, got[: cut or len(got)], position if inside else None, whole)


def _as_shown(text: DecodedText, at: int, cap: int) -> str:
    """Return text from an offset on that takes at most `cap` characters when it is shown. A
    progress bar shows fewer than it has."""
    got = text.take(at, cap)
    if got.count("\r") == got.count("\r\n"):
        return got
    *lines, rest = text.take(at, _BARS * cap).split("\n")
    room, whole = cap, 0
    for each in lines:
        room -= len(folded(each + "\n")[0])
        if room < 0:
            break
        whole += len(each) + 1
    longer = "\n".join((*lines, rest))
    if (
        whole == len(longer) - len(rest)
        and len(folded(rest)[0]) <= room
        and at + width(longer) == text.end
    ):
        whole += len(rest)
    return longer[:whole] or got


def by_chars(
    text: DecodedText, spec: str, cap: int, position: tuple[int, ...] | None = None
) -> PageDraft:
    """A page of the characters in a slice, from the position on."""
    size = text.end - text.start
    if not size:
        return PageDraft("", _shown(["empty: 0 characters"], text, 0, 0))
    at, skew, counted = position or (text.start, 0, 0)
    negative = any(end is not None and end < 0 for end in parse_slice("chars", spec))
    if position is None and (negative or size <= COUNTED):
        counted = 1 + size - text.count(text.start, text.end)
    total = size + 1 - counted if counted else None
    first, last = chars_of(spec, size if total is None else total)
    if position is None:
        at = text.skip(text.start, first)
        skew = at - text.start - first
        if at >= text.end:  # the total was not known
            chars_of(spec, text.count(text.start, text.end))
    begin = at - text.start - skew
    got = text.take(at, min(cap, last - begin))
    end = at + width(got)
    whole = begin + len(got) == last or end == text.end
    if not whole and (feed := got.rfind("\n")) >= 0:
        got = got[: feed + 1]
        end = at + width(got)
    body, lost = visible(got)
    upto = begin + len(got)
    if total is not None:
        shown = [f"characters {begin}-{upto} of {total:,}"]
    else:
        shown = [f"characters {begin}-{upto}", f"bytes {at}-{end} of {text.end:,}"]
    following = None if whole else (end, end - text.start - upto, counted)
    return PageDraft(body, _shown(shown, text, at, lost), following, spans=((at, end),))


def _inside(
    text: DecodedText, number: int, at: int, got: str, position: tuple[int, ...] | None, whole: bool
) -> PageDraft:
    """A page that begins or ends inside a line: the range of its characters, then of the whole
    lines that follow."""
    begin, end = text.line_start(number), text.line_end(at)
    at, skew, counted = position or (at, 0, 0)
    if position is None and end - begin <= COUNTED:
        counted = 1 + end - begin - text.count(begin, end)
    length = f"{end - begin + 1 - counted:,}" if counted else f"{end - begin:,} bytes"
    rest, feed, others = got.partition("\n")
    start = at - begin - skew
    shown = [f"characters {start}-{start + len(rest)} of line {number} ({length})"]
    if text.lines > 1:
        shown[0] += f" of {text.lines:,}"
    last = number
    if others:
        last += others.count("\n") + (not others.endswith("\n"))
        shown.append(_lines(number + 1, last, text.lines))
    body, lost = visible(got if text.exact else text.as_shown(uncoloured(got)))
    after = at + width(got)
    following: tuple[int, ...] | None
    if whole:
        following = None
    elif feed:
        following = (after,)
    else:
        following = (after, after - begin - start - len(rest), counted)
    shown_as = _shown(shown, text, at, lost)
    return PageDraft(
        body, shown_as, following, spans=((at, after),), lines=(number, last), total=text.lines
    )


def _lines(first: int, last: int, total: int) -> str:
    return f"line {first} of {total:,}" if first == last else f"lines {first}-{last} of {total:,}"


def _shown(parts: list[str], text: DecodedText, at: int, lost: int) -> str:
    notes = text.notes(at)
    if lost:
        notes.insert(0, f"{lost:,} invalid {text.unit}{'' if lost == 1 else 's'}")
    return "; ".join([", ".join(parts), *notes])


def decode(data: bytes, *, final: bool = True) -> str:
    """Decode UTF-8 with a lone surrogate for each invalid byte. A cut character at the end is left
    out unless final."""
    return codecs.utf_8_decode(data, "surrogateescape", final)[0]


def width(text: str) -> int:
    """Number of bytes of UTF-8 that a decoded text came from."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def visible(text: str) -> tuple[str, int]:
    """Replace invalid bytes in a decoded text with U+FFFD, and count them."""
    return (text, 0) if text.isascii() else _SURROGATE.subn(REPLACEMENT, text)


def _utf_32(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        order = "little" if encoding == "UTF-32LE" else "big"
        units = (int.from_bytes(data[at : at + 4], order) for at in range(0, len(data), 4))  # type: ignore[arg-type]
        return "".join(
            chr(unit) if unit < 0xD800 or 0xDFFF < unit < 0x110000 else _LOST for unit in units
        )


def _nth_feed(block: bytes, nth: int) -> int:
    """Offset of the nth line feed of a block. Halves the block first, since counting is fast."""
    low, high = 0, len(block)
    while high - low > 4096:
        middle = (low + high) // 2
        below = block.count(b"\n", low, middle)
        if below >= nth:
            high = middle
        else:
            low, nth = middle, nth - below
    at = low - 1
    for _ in range(nth):
        at = block.find(b"\n", at + 1)
    return at
