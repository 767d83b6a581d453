"""How many tokens a text costs a model: an estimate that needs nothing, and an exact count with the extra `[tokens]`.

The estimate never splits a text into tokens. It maps every character to a class (letter, digit, a script, …) and counts
where classes meet, since that is where tokenizers of the o200k kind cut. It is made to err on the high side: about a
tenth high on tool results, code, JSON, logs and prose. It is no bound: of files that it was not calibrated on, one in
forty came out more than 5% low, mostly lists of rare words, names or characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import index
from typing import Any, Final

from coatcheck.errors import MissingExtra

TokenCounter = Callable[[str], int]
"""What a host plugs in to count with its own tokenizer. `estimate`, `exact` and `count` are of this type."""

LARGEST: Final = 1 << 53
"""No text has more tokens: a number beyond is a fault of whoever counted."""

# Longer texts are read in this many pieces of this many characters, spread evenly.
_PIECES: Final = 512
_PIECE: Final = 512
_FEW, _SHORT = 24, 48  # where about will do

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

# Tokens for each time that a run of classes occurs (without overlap, as bytes.count counts). They solve a linear
# programme: the least total over-estimate of o200k such that no text comes out more than 3.3% low. The texts were the
# corpus of `tests/conftest.py` with the tool results and documents inside, and generated samples; files of a Linux
# machine and user-interface strings in 85 languages weighed in, most without a limit for each. Private use, the planes
# beyond, symbols, `n` and `ss` were set by hand. `python -m benchmarks.calibrate_tokens` measures them, and with
# `--fit` solves the programme for the corpus and `tests/token_samples.py`: rates of this kind, not these very ones.
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
# Typographic punctuation, arrows and box drawing cost less than other symbols: two bytes of UTF-8, what to take off.
_BY_BYTES: Final = {b"\xe2\x80": -1.70, b"\xe2\x86": -1.70, b"\xe2\x94": -1.70, b"\xe2\x95": -1.70}
# What the classes alone get wrong for a media type: tags make XML come out low. Other types gave no safe correction.
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

# Two neighbours of different classes are counted as one byte: eight classes, the other ones together, twice three bits.
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
    """About how many tokens this is, rounded up; 0 for the empty text alone. Pure: the same answer everywhere.

    Up to 262,144 characters, each one counts. A longer text is sampled, so that a gigabyte costs no more
    than a megabyte.
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
    return max(1, math.ceil(tokens))


def roughly(data: bytes) -> float:
    """About how many tokens a text has whose UTF-8 this is, from a few pieces of it where it is long: some 5% off."""
    size = len(data)
    if size <= 2 * _FEW * _SHORT:
        return _weigh_bytes(data)
    starts = [number * (size - _SHORT) // (_FEW - 1) for number in range(_FEW)]
    return _weigh_bytes(b"".join([data[start : start + _SHORT] for start in starts])) * size / (_FEW * _SHORT)


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
    """A byte for each two neighbours. Numbers of this length are added quickly, and no sum of two bytes carries."""
    first, second = classes.translate(_FIRST_OF)[:-1], classes.translate(_NUMBER_OF)[1:]
    return (int.from_bytes(first, "big") + int.from_bytes(second, "big")).to_bytes(len(first), "big")


def _encoded(text: str) -> bytes:
    """UTF-8, with U+FFFD for each half of a broken surrogate pair: no tokenizer takes those."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


# Places where every o200k tokenizer cuts, whatever stands around them: a text may be counted in parts that end there.
_CUT: Final = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=[0-9])(?=[A-Za-z])|(?<=\n)(?=[^\s/])")
_PART: Final = 1 << 20


def exact(text: str) -> int:
    """The number of o200k tokens, special tokens read as plain text. Needs the extra `[tokens]`.

    Counted in parts of a MiB or two, since the tokenizer's memory grows to 70 times the text. Parts end where the
    tokenizer cuts anyway; only in a run of a MiB without such a place may each part add a token.
    """
    tokenizer = _tokenizer()
    return sum(len(tokenizer.encode_ordinary(part)) for part in _parts(_encoded(text).decode()))


def count(text: str) -> int:
    """The exact number where the extra `[tokens]` is installed, else the estimate.

    It depends on what is installed: what a model is sent should be decided by `estimate`, or by a counter that the host
    chose.
    """
    try:
        return exact(text)
    except MissingExtra:
        return estimate(text)


def counted(count: TokenCounter, text: str) -> int | None:
    """The tokens of a text by a host's counter, rounded up, or None: then the text is over every limit.

    None where the counter raises, or answers what cannot be a count: None, a bool, what is no number, not a number,
    infinite or near it, negative, or 0 for a text that is not empty."""
    try:
        found: object = count(text)
        if isinstance(found, bool):
            return None
        tokens = math.ceil(found) if isinstance(found, float) else index(found)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever a host's counter raises: no count is no count
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
