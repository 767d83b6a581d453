"""`Request` and `Page`: what a read asks for and returns, and the cursor that leads from one page
to the next.

Lines count from 1 and both ends are included: `lines="4100:4160"` is 61 lines. Characters count
from 0 and the end is excluded, as in Python: `chars="0:2000"` is 2,000 characters. Negative numbers
count from the end, and an end may be left open: `lines="-50:"` is the last 50 lines. Several slices
of lines are separated by commas.

A cursor contains the position where a page stopped and the request that it continues, then a keyed
tag over both and the artifact's id. So the pointer and the cursor are enough to read on, also after
a restart; if the request is repeated it must be the same. A long pattern or query is not carried in
the cursor: it must be repeated, and the tag covers it too.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from operator import length_hint
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from coatcheck.checks import is_whole
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.media import TEXT

T = TypeVar("T")

MAX_CHARS: Final = 8_000
MIN_CHARS: Final = 200
MAX_CONTEXT: Final = 100
AUTO: Final = "auto"
_MAX_SLICES: Final = 50
MAX_RESULT: Final = 4_000_000  # characters of a query's result

_SPAN: Final = lazy_pattern(r"\s*(-?\d{1,18})?\s*(?:(:|(?<=\d)\s*-)\s*(-?\d{1,18})?)?\s*")
_HINTS: Final = {
    "lines": 'write lines="4100:4160", "7", ":100", "10:40,200:220" or "-50:" for the last 50; '
    "lines count from 1",
    "chars": 'write chars="0:2000", "8000:" or "-2000:" for the last 2,000; '
    "characters count from 0",
}

_WAYS: Final = ("lines", "chars", "grep", "query", "diff", "code")
_OF_GREP: Final = ("context", "ignore_case", "invert", "literal", "count", "last")

TAG: Final = 6
CARRIED: Final = 160  # maximum bytes of a request that a cursor carries
_LONGEST: Final = 512
_PERSON: Final = b"coatcheck.cursor"
_CURSOR: Final = lazy_pattern(r"[A-Za-z0-9_-]{8,}")
_AGAIN: Final = "leave the cursor out to read from the start"
_MEMBERS: Final = (
    "lines",
    "chars",
    "grep",
    "context",
    "ignore_case",
    "invert",
    "literal",
    "query",
    "diff",
    "exact",
    "count",
    "last",
)
_TEXTS: Final = ("grep", "query", "diff")
_REPEAT: Final = 1 << len(_MEMBERS)
_SLICES: Final = 0b11  # the bits of `lines` and `chars`


@dataclass(frozen=True, slots=True)
class Page:
    """One bounded answer to a read.

    `shown` describes which part of the whole the text is, and what was left out. `cursor` reads the
    next page; it is None at the end. `derived` is the pointer of the whole result if that was too
    large for a page. `matches` counts the lines that a grep found, shown or not, and on long lines
    each occurrence; it is a minimum if `matches_exact` is False, and `hits` are those on this page:
    line number and text. `first` and `last` are the numbers of the lines that a slice has shown, of
    `total` lines. `spans` are the byte ranges of the artifact that a slice has shown. `instead` is
    a query that has results, if this one has none. `cut` says what a host or a server cut out of
    the result before it was stored."""

    text: str
    shown: str
    pointer: str
    cursor: str | None
    derived: str | None = None
    matches: int | None = None
    matches_exact: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    instead: str | None = None
    first: int | None = None
    last: int | None = None
    total: int | None = None
    hits: tuple[tuple[int, str], ...] = ()
    cut: str | None = None


def misfit(message: str, *, hint: str, instead: Mapping[str, Any]) -> InvalidArgument:
    """Return the error for a request that cannot be answered as it is written, with one that
    can."""
    error = InvalidArgument(message, hint=hint)
    error.instead = instead
    return error


class PageDraft(NamedTuple):
    """A page before its cursor is sealed. `position` is the start of the next page, None at the
    end; `spans` are the ranges of the text that slices cover, `lines` their first and last line."""

    text: str
    shown: str
    position: tuple[int, ...] | None = None
    matches: int | None = None
    matches_exact: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    lines: tuple[int, int] | None = None
    total: int | None = None
    hits: tuple[tuple[int, str], ...] = ()


class Slice(NamedTuple):
    """Both ends of a slice as written in a request; None for an open end."""

    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to read of an artifact: slices, a grep (also within slices of lines), a query, a diff,
    the output of a program (`coatcheck.programs` answers those), or all of it.

    Raises `InvalidArgument` if the arguments cannot be combined. `context` None leaves the number
    of lines around a match to the kind of content, and "auto" adds as many as a short page has room
    for. `count` asks for numbers instead of lines, and `last` for the last matches, from which the
    cursor leads back. `max_chars` limits one page and may differ from page to page."""

    lines: str | None = None
    chars: str | None = None
    grep: str | None = None
    context: int | Literal["auto"] | None = None
    ignore_case: bool = False
    invert: bool = False
    literal: bool = False
    count: bool = False
    last: bool = False
    query: str | None = None
    diff: str | None = None
    code: str | None = None
    exact: bool = False
    max_chars: int = MAX_CHARS

    def __post_init__(self) -> None:
        given = [name for name in _WAYS if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidArgument(
                    f"{name} must be text, got {type(value).__name__}", hint=f'write {name}="…"'
                )
        if len(given) > 1 and given != ["lines", "grep"]:
            hint = "use one at a time; only lines and grep can be combined"
            raise InvalidArgument(f"{' and '.join(given)} cannot be combined", hint=hint)
        self._check_options_of_grep()
        if not is_whole(self.max_chars, MIN_CHARS):
            raise InvalidArgument(
                f"max_chars must be an integer of at least {MIN_CHARS}, got {self.max_chars!r}",
                hint=f"a page has {MAX_CHARS:,} characters by default",
            )
        for name in _HINTS:
            if name in given:
                _member(self, name)

    def _check_options_of_grep(self) -> None:
        extra = [name for name in _OF_GREP if getattr(self, name)]
        if extra and self.grep is None:
            raise InvalidArgument(
                f"{' and '.join(extra)} needs grep", hint='add grep="pattern", or leave it out'
            )
        if self.count and (self.last or self.context not in (None, AUTO)):
            what = "last" if self.last else "context"
            raise InvalidArgument(
                f"count and {what} cannot be combined", hint="count shows numbers alone"
            )
        if self.context not in (None, AUTO) and (
            not is_whole(self.context) or self.context > MAX_CONTEXT
        ):
            text = f"context must be 0 to {MAX_CONTEXT} lines, got {clip(str(self.context), 40)}"
            raise InvalidArgument(text, hint="use lines to read more")
        if self.grep == "":
            raise InvalidArgument(
                "grep is empty", hint='write grep="pattern", or lines="1:50" to read from the start'
            )


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query or a diff, complete up to its limit.

    `shown` describes the text ("12 of 30 results"), and `note` says what was left out, skipped or
    assumed. `instead` is a query that has results, if this one has none. The same query on the same
    content gives the same text."""

    text: str
    media_type: str = TEXT
    shown: str = ""
    note: str = ""
    instead: str = ""


class BoundedLines:
    """Lines of a result up to a limit in characters. After the first line that does not fit, none
    is added.

    A first line that exceeds the limit by itself is cut; `cut` is then its full length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: list[str] = []
        self._size = 0
        self.full = False
        self.cut = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def add(self, line: str) -> bool:
        """Add a line, and return whether all of it was kept."""
        if self.full:
            return False
        size = self._size + len(line) + bool(self._lines)
        if size <= self._limit:
            self._lines.append(line)
            self._size = size
            return True
        self.full = True
        if not self._lines:
            self._lines.append(line[: self._limit])
            self.cut = len(line)
        return False


class TextCache(Generic[T]):
    """The texts of the documents that were read last, by artifact id, up to twice the characters of
    a result.

    Each page of a document needs its whole text. To extract that takes a child process and up to
    seconds: 0.5 s for a web page of 1 MB, and a PDF of many pages is only read to its end because
    the pages that are done are kept between calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[T, int]] = {}  # the one that was put last is the last

    def get(self, key: str) -> T | None:
        with self._lock:
            return self._kept[key][0] if key in self._kept else None

    def put(self, key: str, text: T, size: int) -> None:
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = (text, size)
            total = sum(size for _, size in self._kept.values())
            while total > 2 * MAX_RESULT and len(self._kept) > 1:
                oldest = next(iter(self._kept))
                total -= self._kept.pop(oldest)[1]


def lines_of(spec: str, total: int) -> list[tuple[int, int]]:
    """The first and the last line of each slice of `total` lines, both 1-based and included, in the
    given order.

    Of several slices, those past the end are left out; it is an error if all are."""
    found = [(*_bounds("lines", one, total, 1), one) for one in spec.split(",")]
    inside = [(first, last) for first, last, _ in found if first <= total]
    if not inside:
        raise InvalidArgument(
            f"line {found[0][0]} is past the end: there are {total:,} lines",
            hint='lines="-50:" reads the last 50',
        )
    for first, last, one in found:
        if last < first <= total:
            raise _backwards("lines", one)
    return inside


def chars_of(spec: str, total: int) -> tuple[int, int]:
    """The first character of a slice of `total` characters and the one after its last, both
    0-based."""
    first, last = _bounds("chars", spec, total, 0)
    if first >= total:
        raise InvalidArgument(
            f"character {first} is past the end: there are {total:,}",
            hint='chars="-2000:" reads the last 2,000',
        )
    if last <= first:
        raise _backwards("chars", spec)
    return first, last


def _bounds(what: str, spec: str, total: int, origin: int) -> tuple[int, int]:
    start, end = parse_slice(what, spec)
    first, last = origin, total
    if start is not None:
        first = start if start >= 0 else max(origin, total + start + origin)
    if end is not None:
        last = min(end, total) if end > 0 else total + end + origin
    return first, last


def parse_slice(what: str, spec: str) -> Slice:
    """Parse `a:b` or `a-b`; one end may be missing. A single number is that line; a negative one is
    the tail."""
    match, hint = _SPAN.fullmatch(spec), _HINTS[what]
    if match is None or (match[1] is None and match[3] is None):
        raise InvalidArgument(f"{what}={clip(spec)} is not a slice", hint=hint)
    start, end = (None if part is None else int(part) for part in match.group(1, 3))
    is_single = match[2] is None and start is not None and start >= 0
    if is_single and what == "chars":
        raise InvalidArgument(f"chars={clip(spec)} needs a start and an end", hint=hint)
    if is_single:
        end = start
    if start is not None and end is not None and (start < 0) == (end < 0) and end < start:
        raise _backwards(what, spec)
    if what == "lines" and 0 in (start, end):
        raise InvalidArgument(f"lines={clip(spec)} includes line 0", hint=hint)
    if what == "chars" and end == 0:
        raise InvalidArgument(f"chars={clip(spec)} is empty", hint=hint)
    return Slice(start, end)


def _backwards(what: str, spec: str) -> InvalidArgument:
    return InvalidArgument(f"{what}={clip(spec)} ends before it begins", hint=_HINTS[what])


def seal(key: bytes, artifact_id: str, request: Request, position: Sequence[int]) -> str:
    """Make a cursor for this artifact and request. The key has 16 to 64 bytes and survives
    restarts."""
    wanted = _encode(request)
    body = wanted if len(wanted) <= CARRIED else _varint(_REPEAT)
    body += b"".join(map(_varint, position))
    return _text(body + _tag(key, artifact_id, wanted, body))


def unseal(
    key: bytes, artifact_id: str, cursor: str, request: Request | None = None
) -> tuple[Request, tuple[int, ...]]:
    """Return the request that a cursor continues, and its position.

    `request` came with the cursor: its members must be at their default or equal to those in the
    cursor, and its `max_chars` applies to the next page. Raises `InvalidArgument` if the cursor is
    incomplete, was signed with another key, or belongs to another artifact or request."""
    given = request or Request()
    body, tag = _open(cursor)
    foreign = InvalidArgument("that cursor is not for this artifact, or was altered", hint=_AGAIN)
    given = request or Request()
    try:
        data = iter(body)
        bits = _number(data)
        meant = given if bits & _REPEAT else _decode(bits, data)
        position = []
        while length_hint(data):
            position.append(_number(data))
    except ValueError as error:  # includes `InvalidArgument`
        raise foreign from error
    if not hmac.compare_digest(tag, _tag(key, artifact_id, _encode(meant), body)):
        if not bits & _REPEAT:
            raise foreign
        raise InvalidArgument(
            "that cursor continues a request too long to be part of it, "
            "or is not for this artifact",
            hint="repeat the arguments of the first call exactly, and add the cursor",
        )
    _check_repeated(given, meant)
    return replace(meant, max_chars=given.max_chars), tuple(position)


def _check_repeated(given: Request, meant: Request) -> None:
    """Raise `InvalidArgument` if a request that came with a cursor differs from the one that the
    cursor continues."""
    for name in _MEMBERS:
        if name == "exact":  # the cursor decides whether lines are exact
            continue
        value = _member(given, name)
        if value and value != _member(meant, name):
            continued, repeated = (_described(one, name) for one in (meant, given))
            raise InvalidArgument(
                f"that cursor continues {continued}, not {repeated}",
                hint=f"send the pointer and the cursor alone, or {_AGAIN}",
            )


def _described(request: Request, name: str) -> str:
    value = getattr(request, name)
    return f"{name}={clip(value, 60) if isinstance(value, str) else value}"


def continues_slice(cursor: str) -> bool:
    """Whether a cursor continues a slice rather than a grep or a query; the tag is not checked."""
    try:
        return not _number(iter(_open(cursor)[0])) & ~_SLICES
    except ValueError:
        return False


def _open(cursor: str) -> tuple[bytes, bytes]:
    text = cursor.strip()
    if len(text) > _LONGEST or not _CURSOR.fullmatch(text):
        raise InvalidArgument(f"that cursor is invalid: {clip(text, 40)}", hint=_AGAIN)
    sealed = b""
    with suppress(binascii.Error):
        sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(sealed) != text or len(sealed) <= TAG:
        raise InvalidArgument(
            "that cursor is incomplete", hint="copy it exactly from the page, or " + _AGAIN
        )
    return sealed[:-TAG], sealed[-TAG:]


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def _tag(key: bytes, artifact_id: str, wanted: bytes, body: bytes) -> bytes:
    mac = blake2b(key=key, digest_size=TAG, person=_PERSON)
    for part in (artifact_id.encode(), wanted, body):
        mac.update(_varint(len(part)) + part)
    return mac.digest()


def _member(request: Request, name: str) -> Any:
    """A member in normal form: two ways to write the same slice are equal."""
    value = getattr(request, name)
    if value is None:
        return None
    if name == "lines":
        slices = value.split(",")
        if len(slices) > _MAX_SLICES:
            raise InvalidArgument(
                f"lines has {len(slices)} slices, the limit is {_MAX_SLICES}", hint="use two calls"
            )
        return tuple(parse_slice(name, one) for one in slices)
    if name == "context":
        return MAX_CONTEXT + 2 if value == AUTO else value + 1  # 0 lines are not the default
    return parse_slice(name, value) if name == "chars" else value


def _encode(request: Request) -> bytes:
    """Encode the members that are not at their default: one bit each, then the values in order."""
    bits, values = 0, b""
    for bit, name in enumerate(_MEMBERS):
        value = _member(request, name)
        if value:
            bits |= 1 << bit
            values += _encoded_value(name, value)
    return _varint(bits) + values


def _encoded_value(name: str, value: Any) -> bytes:
    if name == "lines":
        return _varint(len(value)) + b"".join(map(_encoded_slice, value))
    if name == "chars":
        return _encoded_slice(value)
    if name in _TEXTS:
        written: bytes = value.encode("utf-8", "surrogatepass")
        return _varint(len(written)) + written
    if name == "context":
        return _varint(value)
    return b""  # of a flag, the bit is enough


def _encoded_slice(one: Slice) -> bytes:
    """Both ends: 0 if it is open, others in zigzag order."""
    written = b""
    for end in one:
        if end is None:
            written += _varint(0)
        else:
            written += _varint(1 + (end << 1 if end >= 0 else ~(end << 1)))
    return written


def _decode(bits: int, data: Iterator[int]) -> Request:
    if bits >> len(_MEMBERS):
        raise ValueError("unknown members")
    members: dict[str, Any] = {}
    for bit, name in enumerate(_MEMBERS):
        if bits >> bit & 1:
            members[name] = _decoded_value(name, data)
    return Request(**members)


def _decoded_value(name: str, data: Iterator[int]) -> Any:
    if name == "lines":
        many = _number(data)
        if many > _MAX_SLICES:
            raise ValueError("too many slices")
        return ",".join(_decoded_slice(data) for _ in range(many))
    if name == "chars":
        return _decoded_slice(data)
    if name in _TEXTS:
        return bytes(islice(data, _number(data))).decode("utf-8", "surrogatepass")
    if name == "context":
        context = _number(data) - 1
        return AUTO if context == MAX_CONTEXT + 1 else context
    return True


def _decoded_slice(data: Iterator[int]) -> str:
    ends = []
    for _ in range(2):
        number = _number(data) - 1
        ends.append("" if number < 0 else str(number >> 1 ^ -(number & 1)))
    return ":".join(ends)


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(data: Iterator[int]) -> int:
    number = 0
    for place, byte in enumerate(data):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number
    raise ValueError("the last number is incomplete")
