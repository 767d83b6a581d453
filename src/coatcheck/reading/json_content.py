"""JSON and JSONL from untrusted bytes: parse within limits, follow a fragment, outline the shape,
find rows in text.

Size, nodes, depth and line length are limited, so time and memory are too. Each error says what to
do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.deferred import lazy_pattern
from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip, follow
from coatcheck.media import REPR, TEXT, decoded, essence, is_jsonl
from coatcheck.previews.excerpts import count, is_installed
from coatcheck.previews.shape import SAMPLED, outline
from coatcheck.reading.page import MAX_CHARS, QueryResult
from coatcheck.values import encode_text, largest_array, read_repr

MAX_BYTES: Final = 64 << 20
MAX_NODES: Final = 10_000_000
MAX_LINE: Final = 16 << 20
MAX_ROWS: Final = 32 << 20  # bytes of a text in which rows are looked for
_RECORD_BYTES: Final = 16 << 20  # of the records in an outline
BY_SQL: Final = (
    "; query an array of records with SQL: SELECT … FROM artifact" if is_installed("duckdb") else ""
)
NOTHING: Final = "nothing matches; query='shape' shows the keys"
_AS_TEXT: Final = "read it as text, with lines or grep"
_STRINGS: Final = lazy_pattern(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# A line on which rows of JSON or of Python's `repr` may begin. A time or a level in brackets does
# not count, nor does an indented line: it may be part of a document that is cut.
DOCUMENT: Final = lazy_pattern(
    r"""^(?=\{\s*+["'}]|\[\s*+(?:["'\[({\]]|-?\d[\d.]*+\s*+[,\]]|None|[^\W\d][\w.]*+\()|\(\s*+["'\[({\d])""",
    re.MULTILINE,
)
_GAP: Final = lazy_pattern(r"[ \t\r]*+\n\s*+")
_DECODER: Final = json.JSONDecoder(parse_constant=lambda _: None)
_FEW_LINES: Final = 30  # around a document; a text with more is about something else
_ATTEMPTS: Final = 20  # lines at which a document may begin


def check_size(content: Content, max_bytes: int = MAX_BYTES) -> None:
    if content.size > max_bytes:
        raise TooLarge(
            f"the artifact has {content.size:,} bytes, the limit here is {max_bytes:,}",
            hint="read it with lines or grep" + BY_SQL,
        )


def whole(content: Content, max_bytes: int = MAX_BYTES) -> bytes:
    """Return all bytes of a content of limited size."""
    check_size(content, max_bytes)
    return b"".join(content.chunks())


def parse(data: bytes, what: str = "the artifact", max_nodes: int = MAX_NODES) -> Any:
    """Parse a JSON document. `what` names it in errors."""
    if _marks(data) > max_nodes and (nodes := _marks(_STRINGS.sub(b"", data))) > max_nodes:
        raise LimitExceeded(
            f"{what} is JSON of about {nodes:,} values, the limit here is {max_nodes:,}",
            hint=_AS_TEXT + BY_SQL,
        )
    try:
        return json.loads(data)
    except RecursionError as error:
        raise LimitExceeded(f"{what} is JSON nested too deeply to parse", hint=_AS_TEXT) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidArgument(
            f"{what} is not valid JSON ({where}: {error.msg})", hint=_AS_TEXT
        ) from error
    except ValueError as error:  # invalid UTF-8, or a number of thousands of digits
        raise InvalidArgument(
            f"{what} cannot be parsed as JSON: {clip(str(error))}", hint=_AS_TEXT
        ) from error


def load(content: Content) -> Any:
    """Parse a content that is one JSON document, or Python's `repr` of a value."""
    if essence(content.ref.media_type) != REPR:
        return parse(whole(content))
    text = decoded(whole(content, MAX_ROWS)).strip()
    try:
        value, end = read_repr(text)
    except ValueError:
        value, end = None, -1
    if end != len(text):
        raise InvalidArgument("the artifact is not what Python's repr writes", hint=_AS_TEXT)
    return json.loads(json.dumps(value, default=str))


def part_of(content: Content, fragment: str) -> bytes:
    """Return the JSON of the value that a fragment points to. Raises `InvalidPointer` if there is
    none."""
    part = follow(load(content), fragment)
    return encode_text(json.dumps(part, ensure_ascii=False, separators=(",", ":")))


def lines(content: Content, max_line: int = MAX_LINE) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with their numbers from 1 on; None for a line that is too
    long."""
    number, line, is_too_long = 1, bytearray(), False
    for chunk in content.chunks():
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line += piece
            if is_too_long or len(line) > max_line:
                yield number, None
            elif line.strip():
                yield number, bytes(line)
            number += 1
            line.clear()
            is_too_long = False
        line += rest
        if len(line) > max_line:
            line.clear()
            is_too_long = True
    if is_too_long:
        yield number, None
    elif line.strip():
        yield number, bytes(line)


def shape(content: Content, *, max_chars: int = MAX_CHARS) -> QueryResult:
    """Outline a JSON or JSONL content in at most `max_chars` characters."""
    lead = ""
    notes = []
    if is_jsonl(content.ref.media_type):
        values, total, skipped = _records(content)
        if total and not values:
            raise InvalidArgument(
                "no line of the artifact is valid JSON", hint="read it with lines"
            )
        lead = f"{count(total, 'record')}, one JSON value per line"
        if len(values) + skipped < total:
            lead += f", shape of the first {len(values):,}"
        if skipped:
            notes.append(f"{count(skipped, 'line')} skipped as invalid JSON")
    else:
        values = [load(content)]
    text, left = outline(values, max_chars, lead)
    if not left:
        return QueryResult(text, TEXT, "complete outline", note="; ".join(notes))
    notes.insert(0, f"{count(left, 'place')} left out; a JSONPath like $.key[0] goes deeper")
    return QueryResult(text, TEXT, "outline of the top levels", note="; ".join(notes))


def documents_in(text: str) -> tuple[list[Any], str]:
    """The rows in a text, and a note about what was left out. They are in Python's `repr`, or in
    JSON that follows other lines, or has NaN. Empty if there are none."""
    for match in islice(DOCUMENT.finditer(text), _ATTEMPTS):
        begin = match.end()
        documents, end = _documents(text, begin)
        if end - begin < len(text) // 2:  # too little of the text to be what it is about
            continue
        items, note = _items_of(documents)
        if not items:
            continue
        left = _count_lines(text[:begin]) + _count_lines(text[end:])
        if left > _FEW_LINES:
            break
        around = f"{count(left, 'line')} around them left out" if left else ""
        return items, "; ".join(filter(None, [note, around]))
    return [], ""


def _items_of(documents: list[Any]) -> tuple[list[Any], str]:
    """The rows that documents are or have, and a note that says where they are."""
    if len(documents) != 1:
        return documents, ""
    value = documents[0]
    if isinstance(value, list):
        return value, ""
    found = largest_array(value)
    if found is not None:
        inner: list[Any] = follow(value, found.pointer)
        # A list of texts is not what a document is about.
        if found.columns or isinstance(inner[0], list):
            return inner, f"rows of {found.pointer}"
    return [], ""


def _count_lines(text: str) -> int:
    text = text.strip()
    return text.count("\n") + 1 if text else 0


def _documents(text: str, start: int) -> tuple[list[Any], int]:
    """The values that begin here, each on a new line, and where the last one ends."""
    found: list[Any] = []
    end = at = start
    while at < len(text) and (text[at] in "[{" or not found):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            try:
                value, end = read_repr(text, at)
            except ValueError:
                break
        found.append(value)
        gap = _GAP.match(text, end)
        at = gap.end() if gap else len(text)
    return found, end


def _records(content: Content) -> tuple[list[Any], int, int]:
    """The first records, the number of all lines, and the number of invalid ones among those
    parsed."""
    records: list[Any] = []
    total = skipped = size = 0
    for number, line in lines(content):
        total += 1
        if len(records) >= SAMPLED or size > _RECORD_BYTES:
            continue
        try:
            if line is None:
                raise LimitExceeded("too long")
            size += len(line)
            records.append(parse(line, f"line {number}"))
        except (InvalidArgument, LimitExceeded):
            skipped += 1
    return records, total, skipped


def _marks(data: bytes) -> int:
    """Upper limit for the number of values after the first: each follows a comma or an open bracket
    outside strings."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")
