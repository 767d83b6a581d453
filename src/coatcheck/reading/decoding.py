"""The text of an artifact, decoded once and honestly: `Text` is UTF-8 by offset, with the line feeds of each block.

Content in UTF-8 is read as it is stored, block for frame. UTF-16 and UTF-32, told by their byte-order mark, are scanned
once for an index of blocks and transcoded a block at a time; offsets are those of the UTF-8 either way. What is not
valid is shown as U+FFFD, one for each byte (or code unit) that could not be read, and counted. A line ends with a line
feed; the carriage return before it stays in the text.
"""

from __future__ import annotations

import codecs
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from coatcheck.media import encoding_of
from coatcheck.storage.frames import FRAME, line_counts
from coatcheck.streams import Content

REPLACEMENT: Final = "\ufffd"
PIECE: Final = 4 * FRAME  # it stays in a cache of the processor from the read to the end of a search
_KEPT: Final = 4
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LOST: Final = "\udcff"  # a code unit that could not be read, between UTF-16 or UTF-32 and our UTF-8: the byte 0xFF


class Text:
    """Characters by offset. `start` and `end` bound the UTF-8, without the byte-order mark.

    Strings that `take` answers hold a lone surrogate for each byte that is not valid, so that they can be measured:
    `visible` makes them fit to show."""

    def __init__(self, content: Content) -> None:
        self.encoding, self._unit, mark = encoding_of(content.read(0, 4))
        self.unit = "byte" if self._unit == 1 else "code unit"
        self.is_scanned = self._unit > 1
        self.has_mark = bool(mark)
        self._content = content
        self._kept: dict[int, bytes] = {}
        self._sources: array[int] | None = None
        self._starts: Sequence[int]
        if self._unit > 1:
            self.start = 0
            self._scan(mark)
        else:
            self.start, self.end = mark, content.size
            self._starts = range(0, self.end, FRAME)
            counts = line_counts(content.frames)
            if len(counts) != len(self._starts):
                counts = [self._block(index).count(b"\n") for index in range(len(self._starts))]
            self._feeds = list(accumulate(counts, initial=0))
        ended = self.end == self.start or self._block(len(self._starts) - 1).endswith(b"\n")
        self.lines = self._feeds[-1] + (not ended)

    def notes(self, at: int = 0) -> list[str]:
        """What a reader should know of how a page that begins there was decoded."""
        if self._unit > 1:
            return [f"decoded from {self.encoding}"]
        return ["a byte-order mark was left out"] if self.has_mark and at <= self.start else []

    def bytes_of(self, start: int, end: int) -> tuple[int, int]:
        """The stored bytes that a range of the text stands for: exact in UTF-8, in proportion where it was
        transcoded."""
        if start <= self.start:
            start = 0
        if not self.is_scanned or not self.end:
            return start, end
        return start * self._content.size // self.end, end * self._content.size // self.end

    def read(self, offset: int, length: int) -> bytes:
        """UTF-8 from an offset on, short only at the end. The blocks that it touches are kept for a while."""
        end = min(offset + length, self.end)
        if offset >= end:
            return b""
        first, last = self._index(offset), self._index(end - 1)
        data = self._block(first) if first == last else b"".join(map(self._block, range(first, last + 1)))
        base = self._starts[first]
        return data[offset - base : end - base]

    def pieces(self, at: int, end: int) -> Iterator[tuple[bytes, int]]:
        """All from one offset to another in large pieces cut where blocks are, each with its number of line feeds."""
        while at < end:
            first = self._index(at)
            last = min(first + 1 if self._sources else (at // PIECE + 1) * (PIECE // FRAME), len(self._starts))
            upto = self._starts[last] if last < len(self._starts) else self.end
            whole = at == self._starts[first] and upto <= end
            upto = min(upto, end)
            piece = (self.read if self._sources else self._content.read)(at, upto - at)
            yield piece, self._feeds[last] - self._feeds[first] if whole else piece.count(b"\n")
            at = upto

    def line_start(self, number: int) -> int:
        """The offset of a line, 1-based; the end for the line after the last."""
        feeds = number - 1
        if feeds <= 0:
            return self.start
        if feeds > self._feeds[-1]:
            return self.end
        index = bisect_left(self._feeds, feeds) - 1
        return self._starts[index] + _nth_feed(self._block(index), feeds - self._feeds[index]) + 1

    def line_at(self, offset: int) -> int:
        """The number of the line that an offset lies in."""
        index = self._index(offset)
        return 1 + self._feeds[index] + self._block(index).count(b"\n", 0, offset - self._starts[index])

    def line_begin(self, offset: int) -> int:
        """Where the line begins that an offset lies in."""
        return self.line_start(self.line_at(offset))

    def line_end(self, offset: int) -> int:
        """Where the line ends that an offset lies in: at its line feed, or at the end."""
        index = self._index(offset)
        found = self._block(index).find(b"\n", offset - self._starts[index])
        if found < 0:
            index = bisect_right(self._feeds, self._feeds[index + 1]) - 1
            if index == len(self._starts):
                return self.end
            found = self._block(index).find(b"\n")
        return self._starts[index] + found

    def take(self, at: int, limit: int) -> str:
        """At most so many characters from an offset on, fewer only at the end."""
        data = self.read(at, limit)
        while True:
            ended = at + len(data) >= self.end
            got = decode(data, final=ended)
            if ended or len(got) >= limit:
                return got[:limit]
            data += self.read(at + len(data), 4 * (limit - len(got)))

    def count(self, at: int, end: int) -> int:
        """How many characters there are between two offsets."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        total = 0
        for piece, _ in self.pieces(at, end):
            if piece.isascii() and not decoder.getstate()[0]:
                total += len(piece)
            else:
                total += len(decoder.decode(piece))
        return total + len(decoder.decode(b"", final=True))

    def skip(self, at: int, characters: int) -> int:
        """The offset so many characters further on; the end where there are fewer."""
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
                found = self._transcode(self._content.read(at, end - at), final=end == self._content.size)[0]
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = found
        return found

    def _scan(self, at: int) -> None:
        """Index content that is not UTF-8: where each block begins in it and in our UTF-8, and its line feeds."""
        sources, starts, feeds = array("q", [at]), array("q"), [0]
        self.end = 0
        while at < self._content.size:
            data = self._content.read(at, FRAME - at % FRAME)
            piece, used = self._transcode(data, final=at + len(data) == self._content.size)
            if not used:  # a character that two frames share: take both
                data = self._content.read(at, FRAME)
                piece, used = self._transcode(data, final=at + len(data) == self._content.size)
            starts.append(self.end)
            feeds.append(feeds[-1] + piece.count(b"\n"))
            self.end += len(piece)
            at += used
            sources.append(at)
        self._sources, self._starts, self._feeds = sources, starts, feeds

    def _transcode(self, data: bytes, *, final: bool) -> tuple[bytes, int]:
        """UTF-8 of UTF-16 or UTF-32, and how many bytes of it were whole characters (all of them, where final)."""
        used = len(data) - len(data) % self._unit
        torn = _LOST if final and used < len(data) else ""
        if self._unit == 2:
            decode_units = codecs.utf_16_le_decode if self.encoding == "UTF-16LE" else codecs.utf_16_be_decode
            text, used = decode_units(data[:used], "surrogatepass", final)
        else:
            text = _utf_32(data[:used], self.encoding)
        text = _SURROGATE.sub(_LOST, text) + torn
        return text.encode("utf-8", "surrogateescape"), len(data) if final else used


def decode(data: bytes, *, final: bool = True) -> str:
    """UTF-8 with a lone surrogate for each byte that is not valid; a character torn at the end waits unless final."""
    return codecs.utf_8_decode(data, "surrogateescape", final)[0]


def width(text: str) -> int:
    """How many bytes of UTF-8 a decoded text came from."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def visible(text: str) -> tuple[str, int]:
    """A decoded text fit to show, and how many bytes of it could not be read."""
    return (text, 0) if text.isascii() else _SURROGATE.subn(REPLACEMENT, text)


def _utf_32(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        order = "little" if encoding == "UTF-32LE" else "big"
        units = (int.from_bytes(data[at : at + 4], order) for at in range(0, len(data), 4))  # type: ignore[arg-type]
        return "".join(chr(unit) if unit < 0xD800 or 0xDFFF < unit < 0x110000 else _LOST for unit in units)


def _nth_feed(block: bytes, nth: int) -> int:
    """The offset of the nth line feed of a block that has as many: by halves first, since counting is quick."""
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
