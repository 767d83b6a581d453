"""Reads that may take long: short ones run here, heavy ones in a child process with limits on CPU
time and memory.

The worst case decides, not the usual cost. JSON is parsed here up to a size, and a path runs here
if it visits no value of such a document twice: the first answer of a child takes 200 ms, the next
ones 0.2. A pattern runs here if the size of its RE2 program times the bytes that RE2 sees at once
is small. Everything else goes to a warm child that runs the same functions, reads the content from
us piece by piece, and is killed if it exceeds a limit. The child keeps nothing between calls but
the process, and not even that if a call took much memory.
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError
from coatcheck.ids import digest_of
from coatcheck.media import JSON, TEXT, is_jsonl
from coatcheck.reading import grep, json_content, matches, sandbox
from coatcheck.reading.json_content import check_size
from coatcheck.reading.line_groups import LONG_LINE
from coatcheck.reading.page import MAX_RESULT, PageDraft, QueryResult, Request
from coatcheck.reading.patterns import program_size
from coatcheck.reading.sandbox import Confinement, Message, Pool, serve
from coatcheck.reading.text import DecodedText
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.reading.tables import Table

SECONDS: Final = 10.0  # CPU time of one read in the child
MEMORY: Final = 1 << 30
SMALL_JSON: Final = 256 << 10
SMALL_ROWS: Final = 16 << 10
SMALL_PART: Final = 1 << 20
SMALL_DIFF: Final = 256 << 10
WORK: Final = 100_000_000  # instructions of a pattern times bytes: three seconds at the worst
GREP_SECONDS: Final = matches.SEARCH_SECONDS + matches.COUNT_SECONDS
_WAIT: Final = 30.0  # seconds in total, including slow reads on a busy machine
_LARGE: Final = 256 << 20  # a child that has grown beyond this is replaced

pool: Final = Pool("coatcheck.reading.heavy", margin=384 << 20)


def find(content: Content, path: str) -> QueryResult:
    """Find the values that a JSONPath selects."""
    from coatcheck.reading import jsonpath  # slow to import, and few reads need it

    _check_document(content)
    if jsonpath.is_linear(path) and content.size <= SMALL_JSON:
        return jsonpath.find(content, path)
    hint = "name the keys instead of '..', or narrow the filter"
    return QueryResult(**_ask("find", [content], {"path": path}, hint=hint))


def nearest(content: Content, query: str) -> tuple[str, str]:
    """Return the path with results that a query probably means, or "" and what there is where it
    fails; two empty texts if neither is known."""
    try:
        _check_document(content)
        path, there = _ask("nearest", [content], {"query": query}, hint="")["found"]
        return str(path), str(there)
    except CoatcheckError:
        return "", ""


def shape(content: Content, *, max_chars: int) -> QueryResult:
    """Outline a JSON document."""
    _check_document(content)
    if content.size <= SMALL_JSON:
        return json_content.shape(content, max_chars=max_chars)
    return QueryResult(
        **_ask(
            "shape", [content], {"max_chars": max_chars}, hint="read it as text, with lines or grep"
        )
    )


def document(content: Content, form: str) -> QueryResult:
    """Extract the text of a web page or an office file, always in the child: it parses hostile
    content."""
    return QueryResult(
        **_ask("document", [content], {"form": form}, hint="use grep on the source, or describe it")
    )


def diff(old: Content, new: Content) -> QueryResult:
    """Compare two texts."""
    from coatcheck.reading import diff as compare

    if old.size + new.size <= SMALL_DIFF or max(old.size, new.size) > compare.MAX_BYTES:
        return compare.diff(old, new)
    return QueryResult(**_ask("diff", [old, new], {}, hint="read both with lines or grep"))


def search(
    content: Content, request: Request, position: tuple[int, ...] | None, base: str = ""
) -> PageDraft:
    """Return one page of a grep. `base` is the fragment of a content that is part of an
    artifact."""
    pattern, seen = request.grep or "", min(content.ref.size_bytes, LONG_LINE)
    if request.literal or program_size(pattern, ignore_case=request.ignore_case) * seen <= WORK:
        return grep.search(DecodedText(content, exact=request.exact), request, position, base)
    hint = "use a simpler pattern: fewer repetitions, no large ones inside one another"
    arguments = {"request": asdict(request), "position": position, "base": base}
    found = _ask(
        "grep", [content], arguments, seconds=GREP_SECONDS, chars=request.max_chars, hint=hint
    )
    tuples = {
        "position": found["position"] and tuple(found["position"]),
        "hits": tuple(map(tuple, found["hits"])),
    }
    return PageDraft(**found | tuples | {"spans": ()})


def part(content: Content, fragment: str) -> bytes:
    """Return the JSON of the value that a fragment points to. Raises `InvalidPointer` if there is
    none."""
    check_size(content)
    if content.size <= SMALL_PART:
        return _part(content, fragment)
    hint = "read it with lines or grep" + json_content.BY_SQL
    return bytes(
        _ask("part", [content], {"fragment": fragment}, chars=content.size, hint=hint)["raw"]
    )


def table(content: Content, name: str) -> tuple[bytes, str]:
    """Return the rows of a table of a content as JSON, and a note about what was left out. Raises
    `InvalidArgument` if there is none of that name."""
    check_size(content)
    if content.size <= SMALL_ROWS:
        return _table(content, name)
    reply = _ask(
        "table",
        [content],
        {"name": name},
        chars=content.size * 2 + MAX_RESULT,
        hint="read it as text, with lines or grep",
    )
    return bytes(reply["raw"]), str(reply["note"])


def tables(content: Content) -> list[Table]:
    """Describe the tables of a content, with the types of their columns as SQL calls them."""
    from coatcheck.reading.tables import Column, Table, tables_of  # most reads need it not

    check_size(content)
    if content.size <= SMALL_JSON:
        return tables_of(content)
    found = _ask("tables", [content], {}, hint="read it as text, with lines or grep")["found"]
    return [
        Table(name, rows, tuple(Column(*column) for column in columns), place)
        for name, rows, columns, place in found
    ]


def _table(content: Content, name: str) -> tuple[bytes, str]:
    from coatcheck.reading import tables  # most reads need it not

    found = tables.find_table(content, name)
    return tables.encoded_rows(found.rows()), found.note


def _part(content: Content, fragment: str) -> bytes:
    from coatcheck.reading import tables  # most reads need it not

    return tables.part_of(content, fragment)


def confinement() -> Confinement:
    """Return how the child processes are confined on this machine."""
    return Confinement(**_ask("confinement", [], {}, hint=""))


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
) -> Message:
    seconds = SECONDS if seconds is None else seconds
    return pool.ask(
        {"kind": kind, **arguments},
        seconds=_WAIT,
        cpu_seconds=seconds,
        memory=MEMORY,
        max_chars=chars,
        contents=contents,
        limit=f"{seconds:g} s of CPU time, {_WAIT:g} s in total or {MEMORY >> 30} GiB of memory",
        hint=hint,
    )


def main(folder: str) -> None:
    """Run the child process."""
    calls = _calls()
    _warm(calls)
    gc.disable()  # it takes most of the parsing time; a process that grows is replaced
    statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None

    def answer(message: Message, contents: list[Content]) -> Message:
        arguments = message["arguments"]
        reply = calls[arguments.pop("kind")](*contents, **arguments)
        resident = 0 if statm is None else int(os.pread(statm, 100, 0).split()[1]) * mmap.PAGESIZE
        return reply | {"leaves": resident > _LARGE}

    serve(folder, answer)


def _calls() -> dict[str, Callable[..., Message]]:
    from coatcheck.reading import diff as compare
    from coatcheck.reading import documents, jsonpath, near_paths
    from coatcheck.reading.tables import tables_of

    def search(
        content: Content, request: Message, position: list[int] | None, base: str = ""
    ) -> Message:
        at = None if position is None else tuple(position)
        asked = Request(**request)
        return grep.search(DecodedText(content, exact=asked.exact), asked, at, base)._asdict()

    def table(content: Content, name: str) -> Message:
        raw, note = _table(content, name)
        return {"raw": raw, "note": note}

    return {
        "find": lambda content, path: asdict(jsonpath.find(content, path)),
        "nearest": lambda content, query: {"found": near_paths.nearest(content, query)},
        "shape": lambda content, max_chars: asdict(
            json_content.shape(content, max_chars=max_chars)
        ),
        "diff": lambda old, new: asdict(compare.diff(old, new)),
        "document": lambda content, form: asdict(documents.extract(content, form)),
        "grep": search,
        "table": table,
        "tables": lambda content: {"found": [astuple(one) for one in tables_of(content)]},
        "part": lambda content, fragment: {"raw": _part(content, fragment)},
        "confinement": lambda: asdict(sandbox.confinement or Confinement(files=False, calls=False)),
    }


def _warm(calls: dict[str, Callable[..., Message]]) -> None:
    """Answer each kind of call once, so that everything is imported before files are out of
    reach."""

    def content(data: bytes, media_type: str) -> Content:
        ref = Ref(digest_of(data), "", len(data), media_type, "data")
        return Content.of(ref, data)

    document = content(b'{"a": [1, "b"]}\n', JSON)
    calls["find"](document, "$..a[?search(@, 'b')]")
    calls["nearest"](document, "$.b[?@.a == 'b']")
    calls["shape"](document, 1_000)
    calls["part"](document, "/a/1")
    calls["table"](content(b"rows:\n[('a', datetime.datetime(2026, 1, 1))]", TEXT), "artifact")
    calls["table"](document, "a")
    calls["tables"](document)
    for rows in (b"a: 1\n\na: 2\n", b"A  B\n1  2\n3  4\n"):
        calls["table"](content(rows, TEXT), "artifact")
    page = b"<table><tr><td>a<td>b<tr><td>1<td>2</table>"
    calls["table"](content(page, "text/html"), "artifact")
    calls["document"](content(b"<p>a &amp; b</p>", "text/html"), "page")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("content.xml", '<p a="b">text</p>')
    for data in (archive.getvalue(), archive.getvalue().replace(b".xml", b".xm\xff")):
        calls["document"](content(data, "application/zip"), "office")
    calls["diff"](content(b"a\nb\n", TEXT), content(b"a\nc\n", TEXT))
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        for text in ("\ufeffone\ntwo\n", "\ufeffé\n"):
            calls["grep"](content(text.encode(encoding), TEXT), {"grep": "two|."}, None)
    for escaped in (
        b'{"a": "\\u00fc \\ud83d\\ude00 \\ud83d \\n"}\n',
        '{"a": "é \\u00fc"}\n'.encode(),
    ):
        for pattern in ("ü", "a"):
            calls["grep"](content(escaped, JSON), {"grep": pattern}, None)
    for invalid in (b"\xff\xfe\x00\xd8\n\x00", b"\xff\n"):
        calls["grep"](content(invalid, TEXT), {"grep": "."}, None)
