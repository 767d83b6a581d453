"""JSON and JSONL out of untrusted bytes: caps on size, nodes, depth and length of a line, each with an error that says
what to do instead. Nothing here runs longer or takes more memory than its caps allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from coatcheck.errors import InvalidArgument, LimitExceeded, TooLarge
from coatcheck.ids import clip
from coatcheck.media import JSON, JSONL
from coatcheck.streams import Content

MAX_BYTES: Final = 64 << 20
MAX_NODES: Final = 10_000_000
MAX_LINE: Final = 16 << 20
_AS_TEXT: Final = "look at it as text, with lines or grep"
_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def essence(media_type: str) -> str:
    """A media type without its parameters, e.g. `text/csv` of `Text/CSV; charset=utf-8`."""
    return media_type.partition(";")[0].strip().lower()


def is_json(media_type: str) -> bool:
    bare = essence(media_type)
    return bare == JSON or bare.endswith("+json")


def is_jsonl(media_type: str) -> bool:
    return essence(media_type) in (JSONL, "application/jsonl", "application/x-jsonlines", "application/ndjson")


def whole(content: Content, max_bytes: int = MAX_BYTES) -> bytes:
    """All bytes of a content that is small enough to be held in memory."""
    if content.size > max_bytes:
        raise TooLarge(
            f"the artifact has {content.size:,} bytes, and this looks at {max_bytes:,} at most",
            hint="read it by lines or with grep; a large table or array answers SQL, e.g. SELECT … FROM artifact",
        )
    return b"".join(content.chunks())


def parse(data: bytes, what: str = "the artifact", max_nodes: int = MAX_NODES) -> Any:
    """The value of a JSON document."""
    _check_nodes(data, what, max_nodes)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise LimitExceeded(f"{what} is JSON nested too deeply to be read", hint=_AS_TEXT) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidArgument(f"{what} is not valid JSON ({where}: {error.msg})", hint=_AS_TEXT) from error
    except ValueError as error:  # bytes that are no text, a number of thousands of digits
        raise InvalidArgument(f"{what} is not readable as JSON: {clip(str(error))}", hint=_AS_TEXT) from error


def load(content: Content) -> Any:
    """The value of a content that is one JSON document."""
    return parse(whole(content))


def lines(content: Content, max_line: int = MAX_LINE) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers from 1 on. One that is too long comes as None."""
    number = 1
    rest = bytearray()
    skipping = False
    for chunk in content.chunks():
        for index, piece in enumerate(chunk.split(b"\n")):
            if index:
                if skipping or rest.strip():
                    yield number, None if skipping else bytes(rest)
                number += 1
                rest, skipping = bytearray(), False
            if not skipping:
                rest += piece
                if len(rest) > max_line:
                    rest, skipping = bytearray(), True
    if skipping or rest.strip():
        yield number, None if skipping else bytes(rest)


def _check_nodes(data: bytes, what: str, max_nodes: int) -> None:
    """Every value but the first follows a comma or an opening bracket: those outside of strings bound the memory."""
    if _marks(data) <= max_nodes:
        return
    if (nodes := _marks(_STRINGS.sub(b"", data))) > max_nodes:
        raise LimitExceeded(
            f"{what} is JSON of about {nodes:,} values, and this looks at {max_nodes:,} at most",
            hint="an array of records answers SQL: SELECT … FROM artifact",
        )


def _marks(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")
