"""Count the tokens of a text: an estimate without dependencies, and an exact count with the extra
`[tokens]`.

The estimate never splits a text into tokens. It adds up what each character costs beside its
neighbours, as measured with the tokenizer o200k. It errs on the high side: 6 or 7% too high on tool
results, code, JSON, logs and prose, and hardly ever more than 25%. It never exceeds the number of
bytes in UTF-8, which bounds the tokens of every byte-level tokenizer. It is not an upper bound: of
the files that it was not calibrated on, one in fifty came out more than 5% low, mostly lists of
rare words, names or characters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from operator import index
from typing import Any, Final, TypeVar
from zlib import adler32

from coatcheck.deferred import lazy_pattern
from coatcheck.errors import MissingExtra

_Text = TypeVar("_Text", str, bytes)
TokenCounter = Callable[[str], int]
"""A function that counts tokens, such as a host's own tokenizer. `estimate`, `exact` and `count`
have this type."""

LARGEST: Final = 1 << 53
"""No text has more tokens: a larger count is a bug in the counter."""

# Longer texts are sampled: this many pieces of this many characters, spread evenly.
_PIECES: Final = 512
_PIECE: Final = 512
_FEW, _SHORT = 24, 48  # the same for `roughly`
_END: Final = 64 * 1_024  # bytes at each end of a text that `Weighed` looks at
_SAMPLED: Final = 24  # characters of each piece for `sampled`
CLEARLY: Final = 1.5
"""How far an estimate from samples must be from a limit to count."""

# Three tables of costs in parts of a token, looked up for every character.
#
# 1. The class of a character between those of its neighbours. Tokenizers such as o200k first cut a
# text by classes: a
#    space joins the word after it, signs beside signs are one piece, digits are grouped by three.
# 2. A character after the one before it, both in 16 groups. Pairs that are frequent inside a word
# or between signs
#    (`th`, `":`, `--`) are mostly inside a token, others (`qz`, `Xp`) rarely.
# 3. The script of a character that is not ASCII.
#
# The groups come from clustering the pairs by how often o200k cuts there. The costs began as the
# share of characters at which a token starts, and were then fitted to whole texts: the corpus of
# `tests/conftest.py` and the texts inside it, generated samples, files of a Linux machine,
# user-interface strings in 140 languages. Low estimates weighed more than high ones. `python -m
# benchmarks.calibrate_tokens --fit` fits them to other texts.
_CLASSES: Final = (
    "\n\r",
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " \t",
)
_SIGN: Final = len(_CLASSES)  # every other ASCII character
_LETTER: Final = 1  # as are characters of most scripts
_SIGNS: Final = (0xC2, 0xE2, *range(0xEE, 0x100))  # first bytes of characters that are signs
_CONTROL: Final = "".join(chr(code) for code in (*range(9), *range(14, 27), *range(28, 32), 127))
_AFTER: Final = (
    "0123456789Sefinoru", '\x0b!"$):>X]{', "#,CGKTWq}", "\x0c(=AEIOU", "%&*<@QYZ`|" + _CONTROL,
    "'+;\\^", "Hjmpy", "Dbdghlw", "\t", "\x1b-._", "\r ", "JLMNRVkvz", "\n?a", "stx", "BFPc", "/[~",
)  # fmt: skip
_THEN: Final = (
    "\t\n\x0c\r %+,0123456789>", "ckx", "!$&(*?@Y`|", "dln", "hrt", "fgj", "/X", "'s", "AHIKiuy",
    "Qqvwz~" + _CONTROL, "\x0b:[]^}", "JZbmp", '"#)-.;<=_', "\x1bEOUeo", "\\{", "BCDFGLMNPRSTVWa",
)  # fmt: skip
_PARTS: Final = 128  # of a token, in the first two tables
_WINDOW_COST: Final = bytes.fromhex(
    "0000000000006c9c6b767573668d57795f734e6f5050625a51174d6f3638317e805b773d01c1ef4d688902030000"
    "00006b3d4f617185817d5e5560687e020d857d555a42776e634e6173736b6ba203000800ab030057002c00008064"
    "77aa6e813a4a0060536d7466853c638276626170"
    "8b89726b607e93826d5866807d90030916280000656a688e67678c514f687367612c0e1d1d090f00001586431e00"
    "0000000090776a6fc2702d30488602750045212e000a0016040000114f12220517280528201f1b547977776f5a8a"
    "883e62918668004a1e000702"
)
_PAIR_COST: Final = bytes.fromhex(
    "03022e0001094400081519000e0009180b3d27870247002f6c51005600524946007607070087365d0c89434a0000"
    "724415210c000f3e00192c24350001130b00009f1344485d00d26d5e5359403b550b00576f2839523e0c475d1c99"
    "298740353a89000000be08004bc5000f0a0b2200"
    "17d51019208a0b2229c400830510003e0a129d0900006a0b07087e00551e7b4631004f00000d0c010f1888000021"
    "1e000000007b2623001c356c0235004c002138a90093ae4f436b69b20057130e0d045412250a001b000416250000"
    "00634e2c0a2d00470f9209000072001900000005"
    "00000200006700000066197422000b04185c00002f1200161a000000068f5d4a"
)
# Tokens for each character of a script, besides the costs above, from this code point to the next.
# Those of symbols, ideographs, private use and the planes beyond were set by hand.
_SCRIPTS: Final = {
    # Latin-1 signs and letters, other Latin, combining marks
    0x80: 0.39, 0xC0: 0.66, 0x100: 0.91, 0x280: 2.00,
    # Greek, Cyrillic, letters of it that Russian lacks
    0x380: 0.28, 0x400: 0.17, 0x450: 1.88, 0x460: 1.46,
    # Armenian, Hebrew, Arabic, more of it, Syriac
    0x500: 0.27, 0x580: 0.36, 0x600: 0.27, 0x680: 0.59, 0x700: 1.90,
    # Devanagari, Bengali, Gurmukhi, Gujarati, Oriya
    0x900: 0.29, 0x980: 0.35, 0xA00: 0.54, 0xA80: 0.35, 0xB00: 1.04,
    # Tamil, Telugu, Kannada, Malayalam, Sinhala
    0xB80: 0.33, 0xC00: 0.39, 0xC80: 0.35, 0xD00: 0.24, 0xD80: 0.50,
    # Thai, Lao and Tibetan, Burmese, Georgian
    0xE00: 0.36, 0xE80: 1.56, 0x1000: 0.48, 0x1080: 0.28,
    # Ethiopic, Khmer, …, Vietnamese, old Greek
    0x1100: 1.66, 0x1780: 0.20, 0x1800: 2.06, 0x1E00: 0.05, 0x1F00: 1.20,
    # dashes, …, arrows, boxes
    0x2000: 1.50, 0x2080: 2.00, 0x2180: 0.57, 0x2200: 2.09, 0x2500: 0.24, 0x2580: 2.00,
    # kana, ideographs, Yi, Hangul
    0x3000: 0.80, 0x3080: 0.50, 0x3100: 1.60, 0x3400: 0.68, 0xA000: 2.00, 0xAC00: 0.49,
    0xE000: 2.89, 0xF900: 1.87, 0xFF00: 1.80,  # private use, presentation forms, full width
    0x10000: 3.98, 0x1E000: 1.69, 0x20000: 3.98,  # old scripts, emoji, the planes beyond
}  # fmt: skip
_SCRIPT_PARTS: Final = 64


def _grouped(groups: tuple[str, ...], other: int = 0) -> bytes:
    """A table from each byte to the number of its group."""
    table = bytearray([other]) * 256
    for number, members in enumerate(groups):
        for member in members.encode():
            table[member] = number
    return bytes(table)


def _script_cost(code_point: int) -> int:
    rate = [rate for start, rate in _SCRIPTS.items() if start <= max(code_point, 0x80)][-1]
    return min(255, round(rate * _SCRIPT_PARTS))


# The first byte of UTF-8 says which script it is, except for these: there, two values of the second
# byte are a block.
_BLOCKED: Final = (0xD1, 0xE0, 0xE1, 0xE2, 0xE3, 0xEF, 0xF0)


def _code_point(lead: int, second: int = 0x80) -> int:
    """The first code point whose UTF-8 begins with these bytes."""
    if lead < 0xE0:
        return (lead & 31) << 6 | second & 63
    return (
        (lead & 15) << 12 | (second & 63) << 6
        if lead < 0xF0
        else (lead & 7) << 18 | (second & 63) << 12
    )


_CLASS_OF: Final = _grouped(_CLASSES, _SIGN)[:0xC2] + bytes(
    _SIGN if first in _SIGNS else _LETTER for first in range(0xC2, 0x100)
)
_WINDOW_TABLE: Final = _WINDOW_COST.ljust(256, b"\x00")
_AFTER_OF: Final = _grouped(_AFTER)
_THEN_OF: Final = _grouped(_THEN)
_LEAD_COST: Final = bytes(
    _script_cost(_code_point(lead)) if lead >= 0xC2 and lead not in _BLOCKED else 0
    for lead in range(256)
)
_BLOCK_COST: Final = bytes(32) + bytes(
    _script_cost(_code_point(lead, 0x80 + second))
    for lead in _BLOCKED
    for second in range(0, 64, 2)
)
_BLOCK_OF: Final = bytes(
    (_BLOCKED.index(lead) + 1) * 32 if lead in _BLOCKED else 0 for lead in range(256)
)
_HALF_OF: Final = bytes((byte & 63) >> 1 if 0x80 <= byte < 0xC0 else 0 for byte in range(256))
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_ASCII: Final = bytes(range(0x80))
_SUMMED: Final = 256  # bytes that `adler32` can certainly add up


def estimate(text: str) -> int:
    """Estimate the tokens of a text, rounded up; 0 only for the empty text. Pure: the same answer
    everywhere.

    Never more than the bytes of the text in UTF-8. A text of up to 262,144 characters is read in
    full. A longer text is sampled, so that a gigabyte costs no more than a megabyte.
    """
    if not text:
        return 0
    seen = text if len(text) <= _PIECES * _PIECE else "".join(_spread(text, _PIECES, _PIECE))
    tokens = _weigh_bytes(_encoded(seen)) * len(text) / len(seen)
    return max(1, _at_most_bytes(math.ceil(tokens), text))


def roughly(data: bytes) -> float:
    """Estimate the tokens of a text from its UTF-8 bytes, to about 5%. Samples a few pieces of a
    long text; never more than the number of bytes."""
    size = len(data)
    if size <= 2 * _FEW * _SHORT:
        return min(_weigh_bytes(data), size)
    weight = _weigh_bytes(b"".join(_spread(data, _FEW, _SHORT))) * size / (_FEW * _SHORT)
    return min(weight, size)


class Weighed:
    """A text, with its bytes in UTF-8 and a rough count of the tokens at both ends. Each is
    computed once."""

    text: str

    @cached_property
    def text_bytes(self) -> bytes:
        return self.text.encode("utf-8", "surrogatepass")

    @cached_property
    def tokens(self) -> float:
        data = self.text_bytes
        return roughly(data if len(data) <= 2 * _END else data[:_END] + data[-_END:])


def sampled(text: str, pieces: int = 16) -> float:
    """Estimate the tokens of a text from very few pieces: for many texts of which most are far from
    a limit."""
    if len(text) <= 2 * pieces * _SAMPLED:
        return estimate(text)
    return estimate("".join(_spread(text, pieces, _SAMPLED))) * len(text) / (pieces * _SAMPLED)


def _spread(text: _Text, pieces: int, size: int) -> list[_Text]:
    """Pieces of this many characters of a long text, spread evenly from its beginning to its
    end."""
    step = len(text) - size
    starts = [number * step // (pieces - 1) for number in range(pieces)]
    return [text[start : start + size] for start in starts]


def at_most(data: bytes, tokens: int) -> bool:
    """Whether a text certainly has at most this many tokens, decided by its UTF-8 bytes, or those
    of the JSON around it. False means that it has to be counted."""
    return len(data) <= tokens


def probably_exceeds(text: str, tokens: int) -> bool:
    """Whether a text has more than this many tokens. A bound or a few samples decide, and more
    samples near the limit: counting all of a text costs more than everything else that is done to a
    line of a transcript."""
    if len(text) <= tokens and at_most(text.encode("utf-8", "surrogatepass"), tokens):
        return False
    about = sampled(text)
    return (sampled(text, 64) if tokens / CLEARLY <= about <= tokens * CLEARLY else about) > tokens


def _at_most_bytes(tokens: int, text: str) -> int:
    """The smaller of a number of tokens and the bytes of the text in UTF-8. Counts bytes only if
    needed."""
    if tokens <= len(text) or text.isascii():
        return min(tokens, len(text))
    size = 0
    for start in range(0, len(text), _PART):
        size += len(_encoded(text[start : start + _PART]))
        if size >= tokens:
            return tokens
    return size


def _weigh_bytes(data: bytes) -> float:
    plain = data.isascii()
    seen = data if plain else data.translate(None, _CONTINUATION)
    parts = _total(_windows(seen).translate(_WINDOW_TABLE) + _pairs(seen).translate(_PAIR_COST))
    if plain:
        return parts / _PARTS
    other = data.translate(None, _ASCII)
    scripts = _total(other.translate(_LEAD_COST) + _blocks(other).translate(_BLOCK_COST))
    return parts / _PARTS + scripts / _SCRIPT_PARTS


# Long integers are added and shifted quickly: one byte for each character, and no sum of them
# carries.


def _windows(data: bytes) -> bytes:
    """The classes of each character and its neighbours as a number in base 6. Class 0, a line end,
    is at both ends."""
    classes = int.from_bytes(data.translate(_CLASS_OF), "little")
    return ((classes << 8) * 36 + classes * 6 + (classes >> 8)).to_bytes(len(data) + 1, "little")[
        :-1
    ]


def _pairs(data: bytes) -> bytes:
    """The groups of each character and the one before it."""
    before = int.from_bytes(data.translate(_AFTER_OF), "little")
    then = int.from_bytes(data.translate(_THEN_OF), "little")
    return ((before << 12) + then).to_bytes(len(data) + 1, "little")[:-1]


def _blocks(data: bytes) -> bytes:
    """The block of each character whose first byte is in `_BLOCKED`, and less than 32 for every
    other byte."""
    first = int.from_bytes(data.translate(_BLOCK_OF), "little")
    second = int.from_bytes(data.translate(_HALF_OF), "little")
    return (first + (second >> 8)).to_bytes(len(data), "little")


def _total(costs: bytes) -> int:
    """The sum of the bytes: `adler32` has it in its lower half, several times as fast as `sum`."""
    return sum(
        [
            adler32(costs[start : start + _SUMMED], 0) & 0xFFFF
            for start in range(0, len(costs), _SUMMED)
        ]
    )


def _encoded(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate: no tokenizer accepts those."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


# Places where every o200k tokenizer cuts: a text may be counted in parts that end there.
_CUT: Final = lazy_pattern(r"(?<=\S)(?= [A-Za-z])|(?<=[0-9])(?=[A-Za-z])|(?<=\n)(?=[^\s/])")
_PART: Final = 1 << 20


def exact(text: str) -> int:
    """The number of o200k tokens, with special tokens read as plain text. Needs the extra
    `[tokens]`.

    Counts in parts of one or two MiB, since the tokenizer's memory grows to 70 times the text.
    Parts end where the tokenizer cuts anyway; only in a run of a MiB without such a place can each
    part add a token.
    """
    tokenizer = _tokenizer()
    return sum(len(tokenizer.encode_ordinary(part)) for part in _parts(_encoded(text).decode()))


def count(text: str) -> int:
    """The exact number if the extra `[tokens]` is installed, else the estimate.

    The answer depends on the installation. To decide what a model is sent, use `estimate` or the
    host's own counter.
    """
    try:
        return exact(text)
    except MissingExtra:
        return estimate(text)


def counted(count: TokenCounter, text: str) -> int | None:
    """Count the tokens of a text with a host's counter, rounded up. None means: treat the text as
    over every limit.

    None if the counter raises or returns something that cannot be a count: not a number, a bool,
    NaN, infinite or huge, negative, or 0 for a text that is not empty."""
    try:
        found: object = count(text)
        if isinstance(found, bool):
            return None
        tokens = math.ceil(found) if isinstance(found, float) else index(found)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a host's counter may raise anything
        return None
    return tokens if (0 if not text else 1) <= tokens <= LARGEST else None


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PART:
        cut = _CUT.search(text, start + _PART, start + 2 * _PART)
        end = cut.start() if cut else start + _PART
        yield text[start:end]
        start = end
    yield text[start:]


@cache
def _tokenizer() -> Any:
    try:
        from splintr import Tokenizer
    except ImportError:
        raise MissingExtra("tokens") from None
    return Tokenizer.from_pretrained("o200k_base")
