"""What a preview is made from: the two ends of the content, and how much there is in between.

The ends are always cut in the same place, wherever the content comes from, so that a value in memory and the same bytes
in a store make the same preview.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Final

from coatcheck.media import encoding_of

EDGE: Final = 64 * 1024
"""How many bytes of the head, and of the tail, a sample holds: content up to twice this is held whole."""

_CONTROL: Final = bytes([*range(7), *range(0x0E, 0x1B), *range(0x1C, 0x20)])
_LOOK: Final = 4_096


@dataclass(frozen=True, slots=True)
class Sample:
    """The first and the last bytes of content of `size` bytes. Where the two overlap, the tail gives way.

    `lines` counts line feeds, and one more where the last line has none; None where nobody counted.
    """

    head: bytes
    tail: bytes
    size: int
    lines: int | None = None

    def __post_init__(self) -> None:
        if len(self.head) > self.size or len(self.tail) > self.size:
            raise ValueError("a sample cannot be larger than its content")
        overlap = len(self.head) + len(self.tail) - self.size
        if overlap > 0:
            object.__setattr__(self, "tail", self.tail[overlap:])

    @classmethod
    def of(cls, data: bytes) -> Sample:
        """The sample of content in memory."""
        lines = data.count(b"\n") + (not data.endswith(b"\n") if data else 0)
        return cls(data[:EDGE], data[max(EDGE, len(data) - EDGE) :], len(data), lines)

    @property
    def is_whole(self) -> bool:
        return len(self.head) + len(self.tail) == self.size


@dataclass(frozen=True, slots=True)
class Text:
    """A sample, decoded. Whole content is all in `head`. No character at a cut edge is a broken half.

    `seen` and `seen_last` are how many bytes the head and the tail had."""

    head: str
    tail: str
    is_whole: bool
    size: int
    seen: int
    lines: int | None
    is_exact: bool
    encoding: str
    seen_last: int = 0

    @property
    def scope(self) -> str:
        """Where a count that needs every byte was made, to stand behind it: empty for the whole content."""
        return "" if self.is_whole else f", in the first {self.seen} of {self.size} bytes"

    @property
    def scope_of_both(self) -> str:
        """The same for a count over head and tail."""
        if self.is_whole:
            return ""
        ends = f"{self.seen}" if self.seen == self.seen_last else f"{self.seen} and last {self.seen_last}"
        return f", in the first {'and last ' if self.seen == self.seen_last else ''}{ends} of {self.size} bytes"


@dataclass(frozen=True, slots=True)
class Preview:
    """A glance at content. `shown` is our own words and numbers alone: nothing of the content is in it."""

    text: str
    shown: str


def decode(sample: Sample) -> Text:
    """The characters of a sample: UTF-8, or UTF-16 and UTF-32 where a byte-order mark says so."""
    encoding, unit, mark = encoding_of(sample.head)
    whole = sample.is_whole
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    raw = sample.head + sample.tail if whole else sample.head
    head = decoder.decode(raw[mark:], final=whole)
    tail = "" if whole else _decode_tail(sample, encoding, unit)
    lines = sample.lines if unit == 1 else None
    if whole and (lines is None or unit > 1):
        lines = head.count("\n") + (not head.endswith("\n") if head else 0)
    exact = "\ufffd" not in head and "\ufffd" not in tail
    return Text(head, tail, whole, sample.size, len(sample.head), lines, exact, encoding, len(sample.tail))


def looks_binary(text: Text) -> bool:
    """Whether these "characters" are other bytes: one in ten is a control character, or one in three no character."""
    look = text.head[:_LOOK]
    return _controls(look) * 10 > len(look) or look.count("\ufffd") * 3 > len(look)


def is_clean(text: Text) -> bool:
    """Whether nothing in the beginning speaks against text."""
    look = text.head[:_LOOK]
    return "\ufffd" not in look and not _controls(look)


def _controls(look: str) -> int:
    data = look.encode("utf-8", "surrogatepass")
    return len(data) - len(data.translate(None, _CONTROL))


def _decode_tail(sample: Sample, encoding: str, unit: int) -> str:
    tail = sample.tail
    if unit == 1:
        start = 0
        while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
            start += 1
        return tail[start:].decode(encoding, "replace")
    start = -(sample.size - len(tail)) % unit
    if unit == 2 and len(tail) > start + 1:
        high = tail[start + 1] if encoding == "UTF-16LE" else tail[start]
        start += 2 if 0xDC <= high <= 0xDF else 0
    return tail[start:].decode(encoding, "replace")
