"""Reads that may take long: short ones run here, heavy ones in a child process with limits on CPU time and memory.

The worst case decides, not the usual cost. JSON is parsed here up to a size. A pattern runs here if the size of its RE2
program times the bytes that RE2 sees at once is small. Everything else goes to a warm child that runs the same
functions, reads the content from us piece by piece, and is killed if it exceeds a limit.
"""

from __future__ import annotations

import base64
import re
from dataclasses import asdict
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import LimitExceeded
from coatcheck.reading import grep, json_content
from coatcheck.reading.json_content import check_size, is_jsonl, part_of
from coatcheck.reading.page import MAX_RESULT, PageDraft, QueryResult, Request
from coatcheck.reading.sandbox import Pool
from coatcheck.reading.text import DecodedText

SECONDS: Final = 10.0  # CPU time of one read in the child
MEMORY: Final = 1 << 30
SMALL_JSON: Final = 256 << 10
SMALL_PART: Final = 1 << 20
SMALL_FILTERED: Final = 4 << 10  # if a filter runs patterns
SMALL_DIFF: Final = 256 << 10
QUICK: Final = 0.5  # seconds for a path here before the child takes over
WORK: Final = 100_000_000  # instructions of a pattern times bytes: three seconds at the worst
_PER_CHARACTER: Final = 20  # maximum instructions per character of a pattern of this kind:
_SIMPLE: Final = re.compile(r"(?:[^\\{]|\\[^pPC])*")
GREP_SECONDS: Final = grep.SEARCH_SECONDS + grep.COUNT_SECONDS
_WAIT: Final = 30.0  # seconds in total, including slow reads on a busy machine
_MAX_FRAMES: Final = 8 << 20

pool: Final = Pool("coatcheck.reading.heavy_child")


def find(content: Content, path: str) -> QueryResult:
    """Find the values that a JSONPath selects."""
    from coatcheck.reading import jsonpath  # slow to import, and few reads need it

    _check_document(content)
    small = SMALL_FILTERED if "match(" in path or "search(" in path else SMALL_JSON
    if content.size <= small:
        try:
            return jsonpath.find(content, path, seconds=QUICK)
        except LimitExceeded:
            pass  # the child has more time; other limits fail there too
    hint = "name the keys instead of '..', or narrow the filter"
    return QueryResult(**_ask("find", [content], {"path": path}, hint=hint))


def shape(content: Content, *, max_chars: int) -> QueryResult:
    """Outline a JSON document."""
    _check_document(content)
    if content.size <= SMALL_JSON:
        return json_content.shape(content, max_chars=max_chars)
    return QueryResult(**_ask("shape", [content], {"max_chars": max_chars}, hint="read it as text, with lines or grep"))


def diff(old: Content, new: Content) -> QueryResult:
    """Compare two texts."""
    from coatcheck.reading import diff as compare

    if old.size + new.size <= SMALL_DIFF or max(old.size, new.size) > compare.MAX_BYTES:
        return compare.diff(old, new)
    return QueryResult(**_ask("diff", [old, new], {}, hint="read both with lines or grep"))


def search(content: Content, request: Request, position: tuple[int, ...] | None) -> PageDraft:
    """Return one page of a grep."""
    if _is_short(content, request):
        return grep.search(DecodedText(content), request, position)
    found = _ask(
        "grep",
        [content],
        {"request": asdict(request), "position": position},
        seconds=GREP_SECONDS,
        chars=request.max_chars,
        hint="use a simpler pattern: fewer repetitions, no large ones inside one another",
    )
    at = found["position"]
    return PageDraft(found["text"], found["shown"], at and tuple(at), found["matches"], found["matches_exact"])


def part(content: Content, fragment: str) -> bytes:
    """Return the JSON of the value that a fragment points to. Raises `InvalidPointer` if there is none."""
    check_size(content)
    if content.size <= SMALL_PART:
        return part_of(content, fragment)
    hint = "read it with lines or grep; query an array of records with SQL: SELECT … FROM artifact"
    found = _ask("part", [content], {"fragment": fragment}, chars=content.size, hint=hint)
    return bytes(found["raw"])


def _is_short(content: Content, request: Request) -> bool:
    pattern = request.grep or ""
    seen = min(content.ref.size_bytes, grep.LONG_LINE)
    if request.literal or (_SIMPLE.fullmatch(pattern) and _PER_CHARACTER * len(pattern) * seen <= WORK):
        return True
    return grep.program_size(pattern, ignore_case=request.ignore_case) * seen <= WORK


def _check_document(content: Content) -> None:
    if not is_jsonl(content.ref.media_type):
        check_size(content)


def _ask(
    kind: str,
    contents: list[Content],
    arguments: dict[str, Any],
    *,
    hint: str,
    seconds: float | None = None,
    chars: int = MAX_RESULT,
) -> dict[str, Any]:
    seconds = SECONDS if seconds is None else seconds
    message = {
        "kind": kind,
        "arguments": arguments,
        "seconds": seconds,
        "memory": MEMORY,
        "contents": [_metadata(content) for content in contents],
    }
    limit = f"{seconds:g} s of CPU time, {_WAIT:g} s in total or {MEMORY >> 30} GiB of memory"
    return pool.ask(message, {}, loaded="", seconds=_WAIT, max_chars=chars, served=contents, limit=limit, hint=hint)


def _metadata(content: Content) -> dict[str, Any]:
    ref = content.ref
    frames = content.frames if len(content.frames) <= _MAX_FRAMES else b""
    return {
        "id": ref.artifact_id,
        "size": content.size,
        "media_type": ref.media_type,
        "kind": ref.kind,
        "pointer_length": ref.pointer_length,
        "frames": base64.b64encode(frames).decode(),
    }
