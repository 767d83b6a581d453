"""Read an artifact by a program: `read` runs a model's code over the whole content and returns a
page of what it prints.

The program finds `text`, `lines` and `data`, which are made only if it names them, and functions
for other artifacts and for contents that are too large. Content crosses as text and is parsed in
the sandbox. The session decides what the program may open, as it does for every read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from coatcheck.content import Content
from coatcheck.errors import (
    CoatcheckError,
    InvalidArgument,
    LimitExceeded,
    MissingExtra,
    NotFound,
    ProgramFailed,
    TooLarge,
)
from coatcheck.externalize.storing import put
from coatcheck.ids import clip
from coatcheck.intake import About
from coatcheck.media import decoded, essence, is_json, is_jsonl, sniff_text
from coatcheck.previews.excerpts import count
from coatcheck.programs.engine import EXTRA, Program, check_source, is_available, run
from coatcheck.programs.prelude import names_in
from coatcheck.reading import Page, Request, Source, read_text, source_of, sql, truncation_in
from coatcheck.reading import read as read_page
from coatcheck.reading.page import MAX_RESULT
from coatcheck.reading.text import recognized
from coatcheck.redaction import mask
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession
    from coatcheck.programs.monty import Call

TOOL: Final = "read"
MAX_TEXT: Final = 64 << 20  # bytes of a content that a program gets as a whole
MAX_BINARY: Final = 16 << 20
NO_TIME: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""What the clock of a program shows that reads no artifact in particular."""
NOTHING: Final = "the program printed nothing: print what you want to see"
_HEAD: Final = 64 << 10
_MAX_REQUEST: Final = 2_000  # characters of the program in the record of its output
_SEPARATORS: Final = (",", "\t", ";", "|")
_TABLES: Final = (
    "text/csv",
    "application/csv",
    "text/x-csv",
    "application/x-csv",
    "text/comma-separated-values",
    "text/tab-separated-values",
    "text/tsv",
)
_MISSING: Final = re.compile(r"name '(text|lines|data)' is not defined")
_CUT: Final = re.compile(r"\bleft out\b|\bis cut\b|the first \d")
_DATA: Final = "try:\n    data = __value(__form, {})\nexcept ValueError:\n    pass\n"
_PARTS: Final = 'use lines_of(p, "10:40"), grep(p, "x") or query(p, "SELECT …")'
_ASSIGNED: Final = re.compile(r"\s*=[^=]")

BEFORE: Final = """
def artifact(pointer):
    form, body = __artifact(pointer)
    return __value(form, body)


def lines_of(pointer, lines):
    return __lines_of(pointer, lines)


def grep(pointer, pattern, ignore_case=False, context=0):
    return __grep(pointer, pattern, ignore_case, context)


def query(pointer, query):
    form, body = __query(pointer, query)
    return __value(form, body)
"""
"""The functions for content. They parse in the sandbox what the host's functions return."""

_FUNCTIONS: Final = frozenset(("__artifact", "__lines_of", "__grep", "__query"))


def read(
    session: CoreSession, target: Ref | str | Source, request: Request, cursor: str | None = None
) -> Page:
    """Run the program of a request over an artifact and return a page of its output. The whole
    output, if it is longer, becomes an artifact whose parents are those that the program read.

    Raises `ProgramFailed` with what was printed until then, and what opening the artifact raises.
    """
    if cursor is not None:
        raise InvalidArgument(
            "the output of a program has no cursor", hint="read on in the artifact that it names"
        )
    code = _checked(request.code)
    source = target if isinstance(target, Source) else source_of(session, target)
    with source.content as content:
        contents = Contents(session, {content.ref.artifact_id: None})
        start = _start(content, source.pointer, code, contents.notes)
        program = Program(code, _now(content.ref), start.inputs, BEFORE + start.source)
        try:
            printed = run(program, contents)
        except ProgramFailed as error:
            missing = _MISSING.fullmatch(error.detail)
            if missing is not None and missing[1] in start.missing:
                error.hint = start.missing[missing[1]]
            raise
        cut = truncation_in(content)
    page = page_of(contents, source.pointer, printed, request)
    return page if cut is None else replace(page, cut=str(cut))


def run_alone(session: CoreSession, request: Request) -> Page:
    """Run the program of a request over no artifact in particular: it opens those that it names."""
    code = _checked(request.code)
    contents = Contents(session)
    printed = run(Program(code, NO_TIME, {}, BEFORE), contents)
    return page_of(contents, "", printed, request)


def _checked(code: str | None) -> str:
    check_source(code)
    if not is_available():
        raise MissingExtra(EXTRA)
    return code or ""


def page_of(contents: Contents, pointer: str, printed: str, request: Request) -> Page:
    """Return the output of a program that had these contents as a page, or its beginning and the
    pointer of an artifact with all of it."""
    session, text, code = contents.session, printed.removesuffix("\n"), request.code or ""
    if not printed:
        return Page("", NOTHING, pointer, None)
    length = f"the program's output, {count(len(text), 'character')}"
    shown = ", ".join([length, *contents.notes])
    if len(text) <= request.max_chars:
        return Page(text, shown, pointer, None)
    about = About(
        tool=TOOL,
        summary=clip(mask(f"output of a program: {code}"), 300),
        parents=tuple(contents.read),
        request=mask(json.dumps({"code": code[:_MAX_REQUEST]}, ensure_ascii=False)),
    )
    ref = put(session, text, about)
    with session.content(ref) as content:
        first = read_text(
            content,
            Request(max_chars=request.max_chars),
            ref.pointer,
            key=lambda: session.store.secret,
        )
    session.note_shown(ref, first.spans)
    shown = f"{shown}; {first.shown} of it, the full output is {ref.pointer}"
    return Page(first.text, shown, pointer, None, ref.pointer)


@dataclass(slots=True)
class Contents:
    """The artifacts that a program opens, in one session. `read` has their ids, in order, and
    `notes` which parts of documents it has as text."""

    session: CoreSession
    read: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    names: frozenset[str] = _FUNCTIONS
    later: frozenset[str] = frozenset()

    def call(self, call: Call) -> object:
        """Answer a call for content. An error becomes an exception in the program."""
        functions: dict[str, Callable[..., object]] = {
            "__artifact": self._artifact,
            "__lines_of": self._lines_of,
            "__grep": self._grep,
            "__query": self._query,
        }
        try:
            return functions[call.name](*call.args, **call.kwargs)
        except TypeError:
            return raised(InvalidArgument(f"{call.name[2:]} takes other arguments"))
        except CoatcheckError as error:
            return raised(error)

    def call_all(self, calls: Sequence[Call]) -> Sequence[object]:
        return [self.call(call) for call in calls]

    def _artifact(self, target: object) -> tuple[str, str | bytes]:
        with self._opened(target).content as content:
            return value_of(content, self.notes)

    def _lines_of(self, target: object, lines: object) -> str:
        return self._page(target, lines=lines).text

    def _grep(self, target: object, grep: object, ignore_case: object, context: object) -> str:
        return self._page(target, grep=grep, ignore_case=bool(ignore_case), context=context).text

    def _query(self, target: object, query: object) -> tuple[str, str]:
        page = self._page(target, query=query)
        asked = str(query).strip()
        if sql.is_sql(asked):
            return ",", page.text
        return "jsonl" if asked.startswith("$") else "text", page.text

    def _page(self, target: object, **request: Any) -> Page:
        """One bounded read, as large as a result may be. A program must not take a part for the
        whole, so a result that is cut is an error."""
        source = self._opened(target)
        with source.content:
            page = read_page(self.session, source, Request(max_chars=MAX_RESULT, **request))
        if page.cursor is not None or page.derived is not None or _CUT.search(page.shown):
            raise LimitExceeded(f"the result is too large: {page.shown}", hint="ask for less of it")
        return page

    def _opened(self, target: object) -> Source:
        if not isinstance(target, str):
            raise InvalidArgument("a pointer or a name is text", hint='write "art:…"')
        source = source_of(self.session, target)
        self.read[source.content.ref.artifact_id] = None
        return source


def raised(error: Exception) -> object:
    """An error of ours as an exception of the program, with the name of a built-in one."""
    from coatcheck.programs.monty import Raised

    kinds = ((NotFound, "LookupError"), (TooLarge, "MemoryError"), (InvalidArgument, "ValueError"),
             (LimitExceeded, "RuntimeError"))  # fmt: skip
    kind = next((name for type_, name in kinds if isinstance(error, type_)), "RuntimeError")
    return Raised(kind, mask(str(error)))


def value_of(content: Content, notes: list[str]) -> tuple[str, str | bytes]:
    """Return the form of a content and what the sandbox makes a value of: JSON, rows of a table,
    the text of a text or a document, or the bytes of anything else. Which part of a document the
    text covers is added to `notes`."""
    content, form = recognized(content)
    if form == "other":
        return "bytes", _bytes(content, MAX_BINARY)
    if form in ("text", "page"):
        text = decoded(_bytes(content, MAX_TEXT))
        return _form(content, text), text
    from coatcheck.reading import documents  # few programs need it

    text_content, note = documents.as_text(content, form, is_searched=False)
    notes.append(note)
    return "text", _bytes(text_content, MAX_TEXT).decode()


@dataclass(slots=True)
class _Start:
    """What a program starts with: values, the source that makes the rest of them, and why a name
    is missing."""

    inputs: dict[str, object]
    source: str = ""
    missing: dict[str, str] = field(default_factory=dict)


def _start(content: Content, pointer: str, code: str, notes: list[str]) -> _Start:
    """Prepare what a program names: parsing what it does not takes time and memory."""
    names = names_in(code)
    wanted = {"text", "lines"} & names
    if "data" in names and not _is_assigned(code):
        wanted.add("data")
    start = _Start({"pointer": pointer, "p": pointer})
    if not wanted:
        return start
    if content.size > MAX_TEXT:
        size = f"the content has {content.size:,} bytes, a program gets up to {MAX_TEXT:,}"
        start.missing = dict.fromkeys(wanted, f"{size}: {_PARTS}")
        return start
    form, body = value_of(content, notes)
    if isinstance(body, bytes):
        start.inputs["data"] = body
        start.missing = dict.fromkeys(wanted, "the content is binary: data has its bytes")
        return start
    start.inputs["text"] = body
    if "lines" in wanted:
        start.source += "lines = __items(text)\n"
    if "data" in wanted:
        rows = _rows(content) if form == "text" else None
        if rows is not None:
            form, start.inputs["__body"] = "json", rows
        start.missing["data"] = "the content is text without rows: use text or lines"
        if form != "text":
            start.inputs["__form"] = form
            start.missing["data"] = "the content is not valid JSON: use text or lines"
            body_name = "text" if rows is None else "__body"
            start.source += _DATA.format(body_name)
    if "text" not in wanted:
        start.source += 'text = ""\n'
    return start


def _is_assigned(code: str) -> bool:
    """Whether the program makes its own `data` before it uses it."""
    found = re.search(r"\bdata\b", code)
    return found is not None and _ASSIGNED.match(code, found.end()) is not None


def _now(ref: Ref) -> datetime:
    """The time that a program's clock shows: when the artifact was stored. So the same program
    over it always prints the same."""
    return datetime.fromtimestamp(int(ref.created), UTC)


def _form(content: Content, text: str) -> str:
    """How a text is parsed: `json`, `jsonl`, the separator of its columns, or `text`."""
    media_type = content.ref.media_type
    if not is_json(media_type) and not is_jsonl(media_type) and essence(media_type) not in _TABLES:
        head = text[:_HEAD]
        media_type = sniff_text(head, text[-64:], None, head if len(text) <= _HEAD else None)
    if is_jsonl(media_type):
        return "jsonl"
    if is_json(media_type):
        return "json"
    return _separator(text) if essence(media_type) in _TABLES else "text"


def _separator(text: str) -> str:
    first = text[: text.find("\n") + 1 or len(text)]
    return max(_SEPARATORS, key=first.count)


def _bytes(content: Content, limit: int) -> bytes:
    if content.size > limit:
        raise TooLarge(
            f"the content has {content.size:,} bytes, the limit for a program is {limit:,}",
            hint=_PARTS,
        )
    return b"".join(content.chunks())


def _rows(content: Content) -> str | None:
    """The rows in a text as JSON, or None if there are none."""
    from coatcheck.reading import heavy, tables

    try:
        return heavy.table(content, tables.MAIN)[0].decode()
    except CoatcheckError:
        return None
