"""Count the tokens of a text: an estimate without dependencies, and an exact count with the extra `[tokens]`.

The estimate never splits a text into tokens. It maps every character to a class (letter, digit, a script, …) and counts
where classes meet, since tokenizers such as o200k cut there. It errs on the high side: about a tenth too high on tool
results, code, JSON, logs and prose. It never exceeds the number of bytes in UTF-8, which bounds the tokens of every
byte-level tokenizer. It is not an upper bound: of the files that it was not calibrated on, one in forty came out more
than 5% low, mostly lists of rare words, names or characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from operator import index
from typing import Any, Final

from coatcheck.errors import MissingExtra

TokenCounter = Callable[[str], int]
"""A function that counts tokens, such as a host's own tokenizer. `estimate`, `exact` and `count` have this type."""

LARGEST: Final = 1 << 53
"""No text has more tokens: a larger count is an error of the counter."""

# Longer texts are sampled: this many pieces of this many characters, spread evenly.
_PIECES: Final = 512
_PIECE: Final = 512
_FEW, _SHORT = 24, 48  # the same for `roughly`
_SAMPLED: Final = 24  # characters of each piece for `sampled`
_CACHED_CHARS: Final = 16_384  # longest text whose sample is cached: hosts often write a text twice
CLEARLY: Final = 1.5
"""How far an estimate from samples must be from a limit to count."""

# Upper bounds: tokens per byte of any text, and additional tokens for each rare letter or control character.
_MOST_PER_BYTE: Final = 1.6
_MOST_PER_RARE: Final = 2.0
_RARE: Final = b"jkqwxz" + bytes(code for code in range(32) if code not in b"\t\n\r") + b"\x7f"
_ENDS: Final = 16

# One class per character: by its byte where it is ASCII, else by the first byte of its UTF-8 (the others are dropped).
_ASCII: Final = {
    "l": "abcdefghijklmnopqrstuvwxyz", "U": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "d": "0123456789",
    "s": " ", "t": "\t", "n": "\r\n", "p": "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
}  # fmt: skip
_LETTERS: Final = {"v": "aeiouy", "z": "jkqwxz", "c": "bcdfghlmnprstv", "V": "AEIOUY", "C": "BCDFGHJKLMNPQRSTVWXZ"}
_SCRIPTS: Final = {
    "y": (0xC2, 0xC2),  # Latin-1 signs
    "e": (0xC3, 0xC3),  # Latin-1 letters
    "f": (0xC4, 0xC9),  # other Latin letters
    "g": (0xCA, 0xCD),  # phonetic letters, combining marks
    "G": (0xCE, 0xCF),  # Greek
    "K": (0xD0, 0xD1),  # Cyrillic
    "k": (0xD2, 0xD3),  # Cyrillic beyond the Slavic languages
    "A": (0xD4, 0xD5),  # Armenian
    "H": (0xD6, 0xD7),  # Hebrew
    "R": (0xD8, 0xDB),  # Arabic
    "S": (0xDC, 0xDF),  # Syriac, N'Ko, …
    "I": (0xE0, 0xE0),  # Indic scripts, Thai
    "i": (0xE1, 0xE1),  # Georgian, Khmer, …, and the Latin of Vietnamese
    "o": (0xE2, 0xE2),  # punctuation, arrows, box drawing, symbols
    "J": (0xE3, 0xE3),  # kana, CJK punctuation
    "Z": (0xE4, 0xE9),  # CJK ideographs
    "h": (0xEA, 0xED),  # Hangul
    "P": (0xEE, 0xEE),  # private use
    "X": (0xEF, 0xEF),  # full-width and presentation forms, selectors
    "E": (0xF0, 0xF0),  # emoji
    "F": (0xF1, 0xFF),  # the planes beyond
}

# Tokens per occurrence of a run of classes (without overlap, as bytes.count counts). They solve a linear programme: the
# least total over-estimate of o200k such that no text comes out more than 3.3% low. The texts were the corpus of
# `tests/conftest.py` with the tool results and documents inside it, and generated samples; files of a Linux machine and
# user-interface strings in 85 languages were added, most without a limit for each. The rates of private use, the planes
# beyond, symbols, `n` and `ss` were set by hand. `python -m benchmarks.calibrate_tokens` measures the rates, and with
# `--fit` solves the programme for the corpus and `tests/token_samples.py`, which gives similar rates, not the same
# ones.
_BY_CLASS: Final = {
    "d": 0.32, "p": 0.65, "n": 0.07, "ss": 0.03, "lU": 0.57, "ln": 0.28, "lt": 1.17, "Ul": 0.47, "Us": 0.41, "Up": 0.70,
    "dl": 1.61, "dU": 2.00, "dn": 1.55, "dp": 0.22, "dt": 1.80, "sl": 0.87, "sU": 0.55, "sd": 1.75, "sn": 1.95,
    "nl": 1.34, "nU": 2.00, "pl": 0.50, "pd": 0.74, "pn": 0.71, "pt": 1.34,
    "l" * 4: 0.28, "l" * 10: 0.93, "l" * 24: 3.81,
}  # fmt: skip
_BY_LETTER: Final = {"z": 0.99, "zz": 2.00, "vv": 0.26, "CC": 1.55, "VV": 0.92}
_CONTROL: Final = 1.60
_BY_SCRIPT: Final = {
    "y": 1.30, "e": 1.20, "f": 0.86, "g": 2.00, "G": 0.43, "K": 0.16, "KKKK": 1.11, "k": 0.81, "A": 0.46, "H": 0.53,
    "R": 0.12, "RRRR": 1.70, "S": 2.00, "I": 0.48, "i": 0.34, "o": 2.20, "os": 0.51, "do": 0.82, "ol": 1.68,
    "J": 0.70, "Z": 0.93, "h": 0.67, "P": 3.00, "X": 2.00, "E": 2.31, "F": 4.00,
}  # fmt: skip
# Typographic punctuation, arrows and box drawing cost less than other symbols: two bytes of UTF-8, and the discount.
_BY_BYTES: Final = {b"\xe2\x80": -1.70, b"\xe2\x86": -1.70, b"\xe2\x94": -1.70, b"\xe2\x95": -1.70}
# Corrections for a media type: tags make XML come out low. No other type had a safe correction.
_BY_MEDIA: Final = {"application/xml": 1.06, "text/xml": 1.06}


def _table(groups: dict[str, str]) -> bytes:
    table = bytearray(b"\x00" * 256)
    for name, members in groups.items():
        for member in members:
            table[ord(member)] = ord(name)
    for name, (first, last) in _SCRIPTS.items():
        table[first : last + 1] = name.encode() * (last + 1 - first)
    return bytes(table)


_CLASS_OF: Final = _table(_ASCII)
_LETTER_OF: Final = _table(_LETTERS)
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_CLASS_RATES: Final = [(run.encode(), rate) for run, rate in _BY_CLASS.items()] + [(b"\x00", _CONTROL)]

# Two adjacent characters of different classes are counted as one byte: twice three bits, for seven classes and "other".
_OTHERS: Final = len(_ASCII)
_NUMBER_OF: Final = bytes("".join(_ASCII).find(chr(code)) % (_OTHERS + 1) for code in range(256))
_FIRST_OF: Final = bytes(number << 3 for number in _NUMBER_OF)
_CLASSES: Final = [
    (bytes([_FIRST_OF[run[0]] | _NUMBER_OF[run[1]]]) if len(run) == 2 and run[0] != run[1] else None, run, rate)
    for run, rate in _CLASS_RATES
]
_LETTER_RATES: Final = [(run.encode(), rate) for run, rate in _BY_LETTER.items()]
_SCRIPT_RATES: Final = [(run.encode(), rate) for run, rate in _BY_SCRIPT.items()]


def estimate(text: str, *, media_type: str | None = None) -> int:
    """Estimate the tokens of a text, rounded up; 0 only for the empty text. Pure: the same answer everywhere.

    Never more than the bytes of the text in UTF-8. Up to 262,144 characters are all looked at. A longer text is
    sampled, so that a gigabyte costs no more than a megabyte.
    """
    if not text:
        return 0
    seen = text
    if len(text) > _PIECES * _PIECE:
        starts = (number * (len(text) - _PIECE) // (_PIECES - 1) for number in range(_PIECES))
        seen = "".join([text[start : start + _PIECE] for start in starts])
    tokens = _weigh(seen) * len(text) / len(seen)
    if media_type is not None:
        tokens *= _BY_MEDIA.get(media_type.partition(";")[0].strip().lower(), 1.0)
    return max(1, _at_most_bytes(math.ceil(tokens), text))


def roughly(data: bytes) -> float:
    """Estimate the tokens of a text from its UTF-8 bytes, to about 5%. Samples a few pieces of a long text; never more
    than the number of bytes."""
    size = len(data)
    if size <= 2 * _FEW * _SHORT:
        return min(_weigh_bytes(data), size)
    starts = [number * (size - _SHORT) // (_FEW - 1) for number in range(_FEW)]
    weight = _weigh_bytes(b"".join([data[start : start + _SHORT] for start in starts])) * size / (_FEW * _SHORT)
    return min(weight, size)


def sampled(text: str, pieces: int = 16) -> float:
    """Estimate the tokens of a text from very few pieces: for many texts of which most are far from a limit."""
    return _cached_sample(text, pieces) if len(text) <= _CACHED_CHARS else _sample(text, pieces)


def _sample(text: str, pieces: int) -> float:
    if len(text) <= 2 * pieces * _SAMPLED:
        return estimate(text)
    starts = (number * (len(text) - _SAMPLED) // (pieces - 1) for number in range(pieces))
    return estimate("".join([text[at : at + _SAMPLED] for at in starts])) * len(text) / (pieces * _SAMPLED)


_cached_sample = lru_cache(256)(_sample)


def at_most(data: bytes, tokens: int) -> bool:
    """Whether a text certainly has at most this many tokens, decided by a bound from its UTF-8 bytes, or those of the
    JSON around it. False means that it has to be counted."""
    size = len(data)
    if size * _MOST_PER_BYTE > tokens:
        return False
    return size * _MOST_PER_BYTE + (size - len(data.translate(None, _RARE))) * _MOST_PER_RARE + _ENDS <= tokens


def probably_exceeds(text: str, tokens: int) -> bool:
    """Whether a text has more than this many tokens. A bound or a few samples decide, and more samples near the limit:
    counting all of a text costs more than everything else that is done to a line of a transcript."""
    if len(text) * _MOST_PER_BYTE <= tokens and at_most(text.encode("utf-8", "surrogatepass"), tokens):
        return False
    about = sampled(text)
    return (sampled(text, 64) if tokens / CLEARLY <= about <= tokens * CLEARLY else about) > tokens


def _at_most_bytes(tokens: int, text: str) -> int:
    """The smaller of a number of tokens and the bytes of the text in UTF-8. Counts bytes only if needed."""
    if tokens <= len(text) or text.isascii():
        return min(tokens, len(text))
    size = 0
    for start in range(0, len(text), _PART):
        size += len(_encoded(text[start : start + _PART]))
        if size >= tokens:
            return tokens
    return size


def _weigh(text: str) -> float:
    return _weigh_bytes(_encoded(text))


def _weigh_bytes(data: bytes) -> float:
    plain = data.isascii()
    dropped = b"" if plain else _CONTINUATION
    classes, letters = data.translate(_CLASS_OF, dropped), data.translate(_LETTER_OF, dropped)
    pairs = _pairs(classes)
    tokens = 0.0
    for pair, run, rate in _CLASSES:
        tokens += rate * (classes.count(run) if pair is None else pairs.count(pair))
    tokens += sum(rate * letters.count(run) for run, rate in _LETTER_RATES)
    if not plain:
        tokens += sum(rate * classes.count(run) for run, rate in _SCRIPT_RATES)
        tokens += sum(rate * data.count(run) for run, rate in _BY_BYTES.items())
    return tokens


def _pairs(classes: bytes) -> bytes:
    """One byte for each two adjacent classes. Long integers are added quickly, and no sum of two bytes carries."""
    first, second = classes.translate(_FIRST_OF)[:-1], classes.translate(_NUMBER_OF)[1:]
    return (int.from_bytes(first, "big") + int.from_bytes(second, "big")).to_bytes(len(first), "big")


def _encoded(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate: no tokenizer accepts those."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


# Places where every o200k tokenizer cuts: a text may be counted in parts that end there.
_CUT: Final = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=[0-9])(?=[A-Za-z])|(?<=\n)(?=[^\s/])")
_PART: Final = 1 << 20


def exact(text: str) -> int:
    """The number of o200k tokens, with special tokens read as plain text. Needs the extra `[tokens]`.

    Counts in parts of one or two MiB, since the tokenizer's memory grows to 70 times the text. Parts end where the
    tokenizer cuts anyway; only in a run of a MiB without such a place can each part add a token.
    """
    tokenizer = _tokenizer()
    return sum(len(tokenizer.encode_ordinary(part)) for part in _parts(_encoded(text).decode()))


def count(text: str) -> int:
    """The exact number if the extra `[tokens]` is installed, else the estimate.

    The answer depends on the installation. To decide what a model is sent, use `estimate` or the host's own counter.
    """
    try:
        return exact(text)
    except MissingExtra:
        return estimate(text)


def counted(count: TokenCounter, text: str) -> int | None:
    """Count the tokens of a text with a host's counter, rounded up. None means: treat the text as over every limit.

    None if the counter raises or returns something that cannot be a count: not a number, a bool, NaN, infinite or huge,
    negative, or 0 for a text that is not empty."""
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
